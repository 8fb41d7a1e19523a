//! An estimate of the AUC of the last samples, cheap enough for every batch.

use super::{auc_of_counts, is_positive};

/// Score buckets.
const BUCKETS: usize = 1024;
/// Parts of the window.
const BLOCKS: usize = 8;

/// Counts scores in 1,024 buckets of √p, which are finer near 0, where click probabilities lie.
/// Samples leave the window an eighth at a time. Scores in one bucket count as ties. The memory is
/// fixed: 72 KiB.
#[derive(Debug, Clone)]
pub struct RunningAuc {
    /// Counts of the whole window.
    window: Histogram,
    /// Counts of its parts. Samples enter `current`; the part after it is the oldest.
    blocks: Vec<Histogram>,
    current: usize,
    block_samples: usize,
    filled: usize,
}

/// (negatives, positives) in each bucket.
type Histogram = Box<[[u32; 2]; BUCKETS]>;

fn empty_histogram() -> Histogram {
    Box::new([[0; 2]; BUCKETS])
}

impl RunningAuc {
    /// An estimator over about this many samples, at least 8 and at most 2^31.
    pub fn new(window_samples: usize) -> Self {
        Self {
            window: empty_histogram(),
            blocks: vec![empty_histogram(); BLOCKS],
            current: 0,
            block_samples: (window_samples.min(1 << 31) / BLOCKS).max(1),
            filled: 0,
        }
    }

    /// Adds a batch.
    ///
    /// # Panics
    /// When the slices differ in length.
    pub fn push(&mut self, predictions: &[f32], labels: &[f32]) {
        assert_eq!(predictions.len(), labels.len(), "one label a prediction");
        for (&prediction, &label) in predictions.iter().zip(labels) {
            if self.filled == self.block_samples {
                self.drop_oldest();
            }
            // A float cast saturates, and takes NaN to 0.
            let bucket = ((prediction.sqrt() * BUCKETS as f32) as usize).min(BUCKETS - 1);
            let class = usize::from(is_positive(label));
            self.window[bucket][class] += 1;
            self.blocks[self.current][bucket][class] += 1;
            self.filled += 1;
        }
    }

    fn drop_oldest(&mut self) {
        self.current = (self.current + 1) % BLOCKS;
        self.filled = 0;
        let oldest = &mut self.blocks[self.current];
        for (sum, part) in self.window.iter_mut().flatten().zip(oldest.iter_mut().flatten()) {
            *sum -= *part;
            *part = 0;
        }
    }

    /// The estimate; `None` unless both classes are in the window.
    pub fn value(&self) -> Option<f64> {
        auc_of_counts(self.window.iter().map(|&[negatives, positives]| (positives.into(), negatives.into())))
    }
}

#[cfg(test)]
mod tests {
    use super::super::auc;
    use super::super::tests::sample;
    use super::*;

    #[test]
    fn the_running_estimate_is_near_the_exact_value() {
        let (predictions, labels) = sample(20_000, 1 << 40, 4);
        let rare: Vec<f32> = predictions.iter().map(|p| p * 0.05).collect();
        for predictions in [predictions, rare] {
            let mut running = RunningAuc::new(1 << 20);
            running.push(&predictions, &labels);
            let exact = auc(&predictions, &labels).unwrap();
            assert!((running.value().unwrap() - exact).abs() < 5e-4);
        }
    }

    #[test]
    fn the_running_estimate_forgets_samples_older_than_its_window() {
        let mut running = RunningAuc::new(800);
        assert_eq!(running.value(), None);
        running.push(&[0.9, 0.1].repeat(500), &[0.0, 1.0].repeat(500));
        assert_eq!(running.value(), Some(0.0));
        running.push(&[0.9, 0.1].repeat(400), &[1.0, 0.0].repeat(400));
        assert_eq!(running.value(), Some(1.0));
        let counted: u32 = running.window.iter().flatten().sum();
        assert_eq!(counted, 800, "the window is full");
        running.push(&[f32::NAN, 2.0, -1.0], &[0.0; 3]);
    }
}

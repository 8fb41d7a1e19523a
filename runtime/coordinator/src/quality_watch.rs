//! Watches the quality of the latest predictions (`spec.training.quality.onRegression`): compares
//! the latest window with the latest ten. Pure.

use rectrain_dense::metrics::{QualityWindow, WindowMetrics, WindowPart};
use rectrain_kinds::{QualityMetric, RegressionRule};

/// The usual quality is the one over so many windows.
const USUAL_WINDOWS: u64 = 10;
/// Nothing is compared before so many windows of predictions.
const LEAST_WINDOWS: u64 = 2;

/// See the module documentation.
#[derive(Debug, Default)]
pub(crate) struct QualityWatch {
    usual: QualityWindow,
    /// The usual measure until there are windows enough, because training went back.
    before_rollback: Option<f64>,
    has_fallen: bool,
    /// Trained rows before the latest window that was good; `None` before the first one.
    good_before: Option<u64>,
}

/// The quality has fallen, or is back.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct QualityChange {
    pub(crate) has_fallen: bool,
    /// The measure over the latest window.
    pub(crate) now: f64,
    /// The measure over the windows before.
    pub(crate) usual: f64,
}

impl QualityWatch {
    /// The watch of a run that went back to a checkpoint of `trained` rows. Without `usual` it
    /// compares new windows only.
    pub(crate) fn after_rollback(usual: Option<f64>, trained: u64) -> Self {
        Self { before_rollback: usual, good_before: Some(trained), ..Self::default() }
    }

    /// Adds predictions. While the quality is low, the usual one stays as it was.
    pub(crate) fn push(&mut self, part: WindowPart, window_rows: u64) {
        if !self.has_fallen {
            self.usual.push(part, USUAL_WINDOWS * window_rows);
        }
    }

    /// Compares the latest window, after `trained` rows. The quality has fallen if it is worse than
    /// usual by more than the tolerance. It is back once it is worse by at most half of it.
    pub(crate) fn look(
        &mut self,
        rule: &RegressionRule,
        latest: &WindowMetrics,
        window_rows: u64,
        trained: u64,
    ) -> Option<QualityChange> {
        if latest.samples < window_rows {
            return None;
        }
        let usual = match self.usual.samples() < LEAST_WINDOWS * window_rows {
            true => self.before_rollback,
            false => measure(rule.metric, &self.usual.metrics()?),
        };
        let (now, usual) = (measure(rule.metric, latest)?, usual?);
        let most = if self.has_fallen { rule.tolerance / 2.0 } else { rule.tolerance };
        let has_fallen = rule.metric.worse_by(now, usual) > most;
        if !has_fallen {
            self.good_before = Some(trained.saturating_sub(latest.samples));
        }
        let is_news = std::mem::replace(&mut self.has_fallen, has_fallen) != has_fallen;
        is_news.then_some(QualityChange { has_fallen, now, usual })
    }

    /// The trained rows before the latest window that was good. A checkpoint of at most so many
    /// rows has none of a window that may be worse. The rows that made it fall may have begun
    /// within the last good window, too few to be seen.
    pub(crate) fn good_before(&self) -> Option<u64> {
        self.good_before
    }

    /// Whether the quality has fallen and is not back.
    pub(crate) fn has_fallen(&self) -> bool {
        self.has_fallen
    }
}

/// A measure; `None` if it is not defined.
pub(crate) fn measure(metric: QualityMetric, of: &WindowMetrics) -> Option<f64> {
    match metric {
        QualityMetric::Auc => of.auc,
        QualityMetric::NormalizedEntropy => of.normalized_entropy,
        QualityMetric::Calibration => of.calibration,
    }
}

#[cfg(test)]
mod tests {
    use rectrain_kinds::RegressionAction;

    use super::*;

    const ROWS: u64 = 1_000;
    const RULE: RegressionRule =
        RegressionRule { metric: QualityMetric::Auc, tolerance: 0.1, action: RegressionAction::Alert };

    /// A hundred predictions. `wrong` positives and as many negatives are the wrong way round.
    /// Their AUC is 1 - wrong / 50.
    fn part(wrong: usize) -> WindowPart {
        let mut part = WindowPart::default();
        let predictions: Vec<f32> =
            [vec![0.8; 50 - wrong], vec![0.2; wrong], vec![0.2; 50 - wrong], vec![0.8; wrong]].concat();
        let labels: Vec<f32> = [vec![1.0; 50], vec![0.0; 50]].concat();
        part.push(&predictions, &labels);
        part
    }

    /// A watch and its latest window.
    #[derive(Default)]
    struct Watched(QualityWatch, QualityWindow, u64);

    impl Watched {
        /// Makes predictions one window at a time. Returns the changes.
        fn predict(&mut self, windows: usize, wrong: usize) -> Vec<bool> {
            let mut changes = Vec::new();
            for _ in 0..windows * 10 {
                self.0.push(part(wrong), ROWS);
                self.1.push(part(wrong), ROWS);
                self.2 += 100;
                let change = self.0.look(&RULE, &self.1.metrics().unwrap(), ROWS, self.2);
                changes.extend(change.map(|change| change.has_fallen));
            }
            changes
        }
    }

    #[test]
    fn a_fall_is_told_once_and_so_is_the_recovery() {
        let mut watched = Watched::default();
        assert_eq!(watched.predict(10, 5), [false; 0]);
        assert_eq!(watched.predict(3, 20), [true]);
        assert!(watched.0.has_fallen());
        // However long it lasts, the usual quality stays the one before the fall.
        assert_eq!(watched.predict(30, 20), [false; 0]);
        assert_eq!(watched.predict(3, 5), [false]);
        assert!(!watched.0.has_fallen());
    }

    #[test]
    fn nothing_is_told_within_the_tolerance_or_too_early() {
        let mut early = Watched::default();
        assert_eq!(early.predict(1, 0), [false; 0]);
        let mut steady = Watched::default();
        assert_eq!(steady.predict(5, 5), [false; 0]);
        assert_eq!(steady.predict(5, 7), [false; 0], "worse by .04");
    }

    #[test]
    fn a_checkpoint_is_good_up_to_the_latest_good_window() {
        let mut watched = Watched::default();
        watched.predict(1, 5);
        assert_eq!(watched.0.good_before(), None, "nothing is compared yet");
        watched.predict(4, 5);
        assert_eq!(watched.0.good_before(), Some(4 * ROWS));
        // Half of the window is bad before the fall is seen. A part of the good one was bad
        // already.
        assert_eq!(watched.predict(1, 20), [true]);
        let good_before = watched.0.good_before().unwrap();
        assert!((4 * ROWS..5 * ROWS).contains(&good_before), "{good_before}");
        watched.predict(5, 20);
        assert_eq!(watched.0.good_before(), Some(good_before), "bad windows do not count");
    }

    #[test]
    fn after_a_rollback_the_first_window_is_compared_with_the_ones_before() {
        let mut watched =
            Watched(QualityWatch::after_rollback(Some(0.9), 7 * ROWS), QualityWindow::default(), 7 * ROWS);
        assert_eq!(watched.predict(1, 20), [true], "the stream is still bad");
        assert_eq!(watched.0.good_before(), Some(7 * ROWS), "the same checkpoint is good");
        let mut good = Watched(QualityWatch::after_rollback(Some(0.9), 7 * ROWS), QualityWindow::default(), 7 * ROWS);
        assert_eq!(good.predict(3, 5), [false; 0]);
        assert_eq!(good.0.good_before(), Some(9 * ROWS));
        let mut anew = Watched(QualityWatch::after_rollback(None, 0), QualityWindow::default(), 0);
        assert_eq!(anew.predict(5, 20), [false; 0], "new windows are compared with each other");
    }

    #[test]
    fn each_measure_is_compared() {
        let metrics =
            WindowMetrics { auc: Some(0.1), normalized_entropy: Some(0.2), calibration: Some(0.3), samples: 1 };
        let all = [QualityMetric::Auc, QualityMetric::NormalizedEntropy, QualityMetric::Calibration];
        assert_eq!(all.map(|metric| measure(metric, &metrics)), [Some(0.1), Some(0.2), Some(0.3)]);
    }
}

//! The training curves of a job: one column for each quantity, as the page reads them.

use rectrain_protocol::events::JobEvent;
use serde::Serialize;

/// Points of a live page, at most. When there are more, every second point is dropped, and from
/// then on half as many are kept.
const MAX_POINTS: usize = 4096;

/// A report of progress.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Point {
    /// When it was reported, in seconds since 1970 (UTC).
    pub at: f64,
    /// Global batches trained.
    pub step: u64,
    /// Samples trained.
    pub samples: u64,
    /// Throughput over the last seconds.
    pub samples_per_second: f64,
    /// Mean loss of the samples since the last report.
    pub loss: Option<f64>,
    /// AUC of the latest training predictions.
    pub auc: Option<f64>,
    /// L2 norm of the dense gradients, if it is known and finite.
    pub gradient_norm: Option<f64>,
}

impl Point {
    /// The point of a progress event; `None` for all other events.
    #[must_use]
    pub fn of(at: f64, event: &JobEvent) -> Option<Self> {
        let JobEvent::Progress { step, samples, samples_per_second, loss, running_auc, gradient_norm, .. } = event
        else {
            return None;
        };
        let loss = Some(*loss).filter(|loss| loss.is_finite());
        let (step, samples, samples_per_second) = (*step, *samples, *samples_per_second);
        let gradient_norm = gradient_norm.filter(|norm| norm.is_finite());
        Some(Self { at, step, samples, samples_per_second, loss, auc: *running_auc, gradient_norm })
    }
}

/// Points in columns. Steps ascend: a point replaces all points after its step, because a job that
/// restarted from a checkpoint trains these steps again.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Columns {
    at: Vec<f64>,
    step: Vec<u64>,
    samples: Vec<u64>,
    samples_per_second: Vec<f64>,
    loss: Vec<Option<f64>>,
    auc: Vec<Option<f64>>,
    gradient_norm: Vec<Option<f64>>,
}

impl Columns {
    /// Adds a point.
    pub fn push(&mut self, point: &Point) {
        let earlier = self.step.partition_point(|step| *step <= point.step);
        self.truncate(earlier);
        self.at.push(rounded(point.at, 1e3));
        self.step.push(point.step);
        self.samples.push(point.samples);
        self.samples_per_second.push(rounded(point.samples_per_second, 10.0));
        self.loss.push(point.loss.map(|loss| rounded(loss, 1e6)));
        self.auc.push(point.auc.map(|auc| rounded(auc, 1e6)));
        self.gradient_norm.push(point.gradient_norm.map(to_four_digits));
    }

    /// The number of points.
    #[must_use]
    pub fn len(&self) -> usize {
        self.step.len()
    }

    /// Whether there is no point.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.step.is_empty()
    }

    fn truncate(&mut self, length: usize) {
        self.at.truncate(length);
        self.step.truncate(length);
        self.samples.truncate(length);
        self.samples_per_second.truncate(length);
        self.loss.truncate(length);
        self.auc.truncate(length);
        self.gradient_norm.truncate(length);
    }
}

/// The value in units of `1 / parts`. More digits make the page large, and no chart shows them.
fn rounded(value: f64, parts: f64) -> f64 {
    (value * parts).round() / parts
}

/// The value with four significant digits, because gradients have any size.
fn to_four_digits(value: f64) -> f64 {
    if value == 0.0 {
        return value;
    }
    let digits = value.abs().log10().floor() as i32;
    rounded(value, 10.0_f64.powi(3 - digits))
}

/// The points of a live page, each with a number.
#[derive(Debug, Default)]
pub(super) struct Curve {
    points: Vec<(u64, Point)>,
    /// Every 2^`halvings`-th point is kept.
    halvings: u32,
    pushed: u64,
}

/// The points after a number.
#[derive(Debug, Serialize)]
pub(super) struct NewPoints {
    #[serde(flatten)]
    columns: Columns,
    /// The number of the last point.
    last: u64,
}

impl Curve {
    /// Adds a point, or drops it if its turn has not come.
    pub(super) fn push(&mut self, point: Point) {
        let is_kept = self.pushed.is_multiple_of(1 << self.halvings);
        self.pushed += 1;
        if !is_kept {
            return;
        }
        if self.points.len() == MAX_POINTS {
            let mut place = 0;
            self.points.retain(|_| {
                place += 1;
                place % 2 == 1
            });
            self.halvings += 1;
        }
        self.points.push((self.pushed, point));
    }

    /// The points with a number above `number`.
    pub(super) fn after(&self, number: u64) -> NewPoints {
        let mut columns = Columns::default();
        let first = self.points.partition_point(|(found, _)| *found <= number);
        for (_, point) in &self.points[first..] {
            columns.push(point);
        }
        NewPoints { columns, last: self.points.last().map_or(number, |(last, _)| *last) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn point(step: u64) -> Point {
        Point {
            at: step as f64,
            step,
            samples: 10 * step,
            samples_per_second: 1.0,
            loss: None,
            auc: None,
            gradient_norm: None,
        }
    }

    #[test]
    fn a_long_job_has_few_points_at_equal_intervals() {
        let mut curve = Curve::default();
        for step in 0..100_000 {
            curve.push(point(step));
            assert!(curve.points.len() <= MAX_POINTS);
        }
        let steps = curve.after(0).columns.step;
        assert!(
            steps.len() > MAX_POINTS / 2 && steps[0] == 0 && steps.last().is_some_and(|last| *last > 99_900),
            "{} points",
            steps.len()
        );
        assert!(steps.windows(2).all(|pair| pair[1] - pair[0] == 32), "{:?}", &steps[..9]);
    }

    #[test]
    fn a_page_gets_each_point_once() {
        let mut curve = Curve::default();
        for step in 1..=5 {
            curve.push(point(step));
        }
        let first = curve.after(0);
        assert_eq!((first.columns.len(), first.last), (5, 5));
        curve.push(point(6));
        let second = curve.after(first.last);
        assert_eq!((second.columns.step, second.last), (vec![6], 6));
        assert_eq!((curve.after(6).columns.is_empty(), curve.after(6).last), (true, 6));
    }

    #[test]
    fn steps_that_are_trained_again_replace_the_first_ones() {
        let mut columns = Columns::default();
        for step in [1, 2, 3, 4, 2, 3] {
            columns.push(&point(step));
        }
        assert_eq!(columns.step, [1, 2, 2, 3]);
    }

    #[test]
    fn gradients_of_any_size_keep_four_digits() {
        for (value, kept) in [(0.0, 0.0), (123_456.0, 123_500.0), (9.999_96, 10.0), (1.234_56e-7, 1.235e-7)] {
            let found = to_four_digits(value);
            assert!((found - kept).abs() <= 1e-9 * kept, "{value}: {found}");
        }
    }

    #[test]
    fn only_progress_is_a_point() {
        let warning = JobEvent::Warning { message: "w".to_owned() };
        assert_eq!(Point::of(1.0, &warning), None);
        let progress = JobEvent::Progress {
            step: 3,
            total_steps: None,
            samples: 30,
            samples_per_second: 2.0,
            loss: f64::NAN,
            running_auc: Some(0.5),
            gradient_norm: Some(f64::INFINITY),
            stream: None,
            window: None,
            baseline: None,
        };
        let expected = Point { at: 1.0, samples_per_second: 2.0, auc: Some(0.5), ..point(3) };
        assert_eq!(Point::of(1.0, &progress), Some(expected));
    }
}

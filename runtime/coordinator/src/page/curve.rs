//! A bounded number of points over the whole life of a job, at equal intervals.

use serde::Serialize;

/// Points, at most. When there are more, every second point is dropped, and from then on half as
/// many are kept.
const MAX_POINTS: usize = 512;

/// The state of training at one moment.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct Point {
    /// Seconds since the page was opened for this job.
    pub(super) seconds: f64,
    pub(super) step: u64,
    pub(super) samples_per_second: f64,
    pub(super) loss: Option<f64>,
    pub(super) auc: Option<f64>,
    pub(super) mode: String,
}

/// The points kept so far.
#[derive(Debug, Default)]
pub(super) struct Curve {
    points: Vec<Point>,
    /// Every 2^`halvings`-th point is kept.
    halvings: u32,
    pushed: u64,
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
        self.points.push(point);
    }

    /// The points, in order of time.
    pub(super) fn points(&self) -> &[Point] {
        &self.points
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_long_job_has_few_points_at_equal_intervals() {
        let mut curve = Curve::default();
        for step in 0..10_000 {
            let point = Point {
                seconds: step as f64,
                step,
                samples_per_second: 1.0,
                loss: None,
                auc: None,
                mode: "sync".to_owned(),
            };
            curve.push(point);
            assert!(curve.points().len() <= MAX_POINTS);
        }
        let steps: Vec<u64> = curve.points().iter().map(|point| point.step).collect();
        assert!(
            steps.len() > MAX_POINTS / 2 && steps[0] == 0 && steps.last().is_some_and(|last| *last > 9_900),
            "{steps:?}"
        );
        assert!(steps.windows(2).all(|pair| pair[1] - pair[0] == 32), "{steps:?}");
    }
}

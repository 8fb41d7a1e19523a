//! How a job has gone so far, in few points: as many seconds lie between two as keep them few.

use serde::Serialize;

/// Points at most; when there are as many, every second one goes and from then on half as many are kept.
const MOST: usize = 512;

/// A moment of the job.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct Point {
    /// Since the page was there.
    pub(super) seconds: f64,
    pub(super) step: u64,
    pub(super) samples_per_second: f64,
    pub(super) loss: Option<f64>,
    pub(super) auc: Option<f64>,
    pub(super) mode: String,
}

/// See the module's text.
#[derive(Debug, Default)]
pub(super) struct Curve {
    points: Vec<Point>,
    /// One of 2^thinned is kept.
    thinned: u32,
    offered: u64,
}

impl Curve {
    /// Offers the next point.
    pub(super) fn push(&mut self, point: Point) {
        let is_kept = self.offered.is_multiple_of(1 << self.thinned);
        self.offered += 1;
        if !is_kept {
            return;
        }
        if self.points.len() == MOST {
            let mut place = 0;
            self.points.retain(|_| {
                place += 1;
                place % 2 == 1
            });
            self.thinned += 1;
        }
        self.points.push(point);
    }

    /// The points that are kept, the earliest first.
    pub(super) fn points(&self) -> &[Point] {
        &self.points
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_whole_of_a_long_job_is_kept_in_few_points_of_equal_distance() {
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
            assert!(curve.points().len() <= MOST);
        }
        let steps: Vec<u64> = curve.points().iter().map(|point| point.step).collect();
        assert!(steps.len() > MOST / 2 && steps[0] == 0 && steps.last().is_some_and(|last| *last > 9_900), "{steps:?}");
        assert!(steps.windows(2).all(|pair| pair[1] - pair[0] == 32), "{steps:?}");
    }
}

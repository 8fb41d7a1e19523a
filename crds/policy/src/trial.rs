//! Trials of more dense workers: the throughput before and after, and the ceiling that a trial
//! without gain sets.

use serde::{Deserialize, Serialize};

use crate::AutoMode;

/// Standard errors by which a difference of means may be off by chance.
const CHANCE: f64 = 3.0;

/// Measured throughput at a number of dense workers.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Throughput {
    pub(crate) replicas: u32,
    pub(crate) mode: AutoMode,
    pub(crate) samples_per_second: f64,
}

/// The mean of several measured throughputs.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct MeanThroughput {
    pub(crate) replicas: u32,
    pub(crate) mode: AutoMode,
    samples_per_second: f64,
    /// The mean's relative error, squared: the variance of the measurements over their number.
    squared_error: f64,
}

impl MeanThroughput {
    /// The mean of at least three measurements, all at one number of workers and in one mode.
    pub(crate) fn of(measured: &[Throughput]) -> Option<Self> {
        let Throughput { replicas, mode, .. } = *measured.first()?;
        let count = measured.len() as f64;
        let mean = measured.iter().map(|one| one.samples_per_second).sum::<f64>() / count;
        let squares = measured.iter().map(|one| (one.samples_per_second / mean - 1.0).powi(2)).sum::<f64>();
        let squared_error = squares / (count - 1.0) / count;
        (count >= 3.0 && squared_error.is_finite()).then_some(Self {
            replicas,
            mode,
            samples_per_second: mean,
            squared_error,
        })
    }

    /// An upper bound of ln(self / before): the measured value plus [`CHANCE`] standard errors.
    pub(crate) fn most_gained_over(&self, before: &Self) -> f64 {
        let error = (self.squared_error + before.squared_error).sqrt();
        (self.samples_per_second / before.samples_per_second).ln() + CHANCE * error
    }
}

/// A decision to add dense workers, until its gain is known.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Trial {
    pub(crate) from: u32,
    pub(crate) to: u32,
    pub(crate) before: MeanThroughput,
    pub(crate) at_seconds: u64,
}

impl Trial {
    /// An upper bound of the elasticity of throughput: ln(after / before) over ln(to / from).
    /// `None` if `after` was measured at another number of workers or in another mode.
    pub(crate) fn elasticity(&self, after: &MeanThroughput) -> Option<f64> {
        let is_comparable = after.replicas == self.to && after.mode == self.before.mode;
        let workers = (f64::from(self.to) / f64::from(self.from)).ln();
        is_comparable.then(|| after.most_gained_over(&self.before) / workers)
    }
}

/// A number of dense workers above which a trial gained nothing.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Ceiling {
    pub(crate) replicas: u32,
    pub(crate) until_seconds: u64,
}

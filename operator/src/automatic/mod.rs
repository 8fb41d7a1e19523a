//! Automatic decisions about a job: its manifest as a policy, and the metrics of its processes as
//! observations. Pure.
//!
//! [`crate::scrape`] reads the metrics and `rectrain-policy` decides. [`crate::phase`] writes the
//! decisions into the status before [`crate::switch`] and [`crate::members`] carry them out.

pub mod memory;
pub mod observations;
pub mod policy;

use rectrain_crds::{DecisionStatus, ModePrediction};
use rectrain_policy::{History, Observations};

/// The results of a look at a job with automatic decisions.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Findings {
    /// The new decisions.
    pub decisions: Vec<DecisionStatus>,
    /// The predicted speed of both modes.
    pub prediction: Option<ModePrediction>,
}

/// The predicted speed of both modes, as a status shows it.
#[must_use]
pub fn prediction(history: &History, observations: &Observations) -> Option<ModePrediction> {
    let predicted = history.predict(observations)?;
    let error_percent = history.prediction_error().map(|error| (error * 100.0).round() as i64);
    Some(ModePrediction { sync: predicted.sync.round() as u64, gba: predicted.gba.round() as u64, error_percent })
}

//! Learned means of ratios: the error of the speed models, and the usual waits of a step.

use serde::{Deserialize, Serialize};

use crate::AutoMode;

/// Seconds over which a mean follows new measurements.
const CORRECTION_SECONDS: f64 = 600.0;
/// The model's own prediction counts as this many measurements, so that the first few measurements
/// of a mode do not overrule it.
const EXPECTED: u32 = 24;
/// A larger ratio of measurement to prediction is no error of the model and is clamped.
const MOST_CORRECTION: f64 = 2.0;

/// The mean of a logarithm: over everything measured, or over the last [`CORRECTION_SECONDS`],
/// whichever is shorter.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Correction {
    pub(crate) logarithm: f64,
    measured: u32,
}

impl Correction {
    /// The mean after a measurement over the `seconds` since the previous one.
    pub(crate) fn with(self, measured: f64, seconds: u64) -> Self {
        let count = self.measured.saturating_add(1);
        let share = (seconds as f64 / CORRECTION_SECONDS).max(f64::from(count).recip()).min(1.0);
        Self { logarithm: self.logarithm + share * (measured.ln() - self.logarithm), measured: count }
    }
}

/// The ratio of measured to predicted speed, learned for each mode while it was in use.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub(crate) struct Corrections {
    sync: Option<Correction>,
    gba: Option<Correction>,
}

impl Corrections {
    /// Correction factor of `mode`. A mode that never ran borrows the other's factor, but only if
    /// that lowers the prediction.
    pub(crate) fn of(self, mode: AutoMode) -> f64 {
        let own = self.own(mode).map(|correction| correction.logarithm);
        let other = || self.own(mode.other()).map(|correction| correction.logarithm.min(0.0));
        own.or_else(other).unwrap_or(0.0).exp()
    }

    /// The correction learned in `mode` itself.
    pub(crate) fn own(self, mode: AutoMode) -> Option<Correction> {
        match mode {
            AutoMode::Sync => self.sync,
            AutoMode::Gba => self.gba,
        }
    }

    /// Learns from a measurement over the `seconds` since the previous one.
    pub(crate) fn learn(&mut self, mode: AutoMode, measured_over_predicted: f64, seconds: u64) {
        let own = match mode {
            AutoMode::Sync => &mut self.sync,
            AutoMode::Gba => &mut self.gba,
        };
        let measured = measured_over_predicted.clamp(MOST_CORRECTION.recip(), MOST_CORRECTION);
        let expected = Correction { logarithm: 0.0, measured: EXPECTED };
        *own = Some(own.unwrap_or(expected).with(measured, seconds));
    }
}

//! The quality of predictions while training goes on, and what happens when it falls.

use serde::{Deserialize, Serialize};

/// A measure of the quality of predictions.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase")]
pub enum QualityMetric {
    /// Area under the ROC curve. Less is worse.
    #[default]
    Auc,
    /// Log loss over the entropy of the base rate. More is worse.
    NormalizedEntropy,
    /// Mean prediction over mean label. Further from 1 is worse.
    Calibration,
}

impl QualityMetric {
    /// How much worse `now` is than `usual`; below 0 if it is better.
    #[must_use]
    pub fn worse_by(self, now: f64, usual: f64) -> f64 {
        match self {
            Self::Auc => usual - now,
            Self::NormalizedEntropy => now - usual,
            Self::Calibration => (now - 1.0).abs() - (usual - 1.0).abs(),
        }
    }

    /// The name in a sentence.
    #[must_use]
    pub const fn title(self) -> &'static str {
        match self {
            Self::Auc => "AUC",
            Self::NormalizedEntropy => "normalized entropy",
            Self::Calibration => "calibration",
        }
    }
}

/// What happens when the quality falls.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase")]
pub enum RegressionAction {
    /// A warning and a metric tell it, and training goes on.
    #[default]
    Alert,
    /// Training also stops and waits. The job stays as it is, and learns nothing more. A restart of
    /// the job goes on from its last checkpoint. Only for a job on a stream.
    Pause,
    /// Training goes back to the newest checkpoint from before the fall, and goes on behind the
    /// rows that were trained since. These rows are left out, and counted as lost. Newer
    /// checkpoints are deleted. After three times within an hour training waits, as with `pause`.
    /// Only for a job on a stream that saves checkpoints regularly.
    Rollback,
}

/// When the quality has fallen, and what happens then.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct RegressionRule {
    /// The measure.
    pub metric: QualityMetric,
    /// How much worse than usual the measure may be, above 0.
    pub tolerance: f64,
    /// What happens.
    pub action: RegressionAction,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_measure_knows_its_worse_side() {
        let near = |found: f64, expected: f64| (found - expected).abs() < 1e-12;
        assert!(near(QualityMetric::Auc.worse_by(0.7, 0.75), 0.05));
        assert!(near(QualityMetric::NormalizedEntropy.worse_by(0.9, 0.8), 0.1));
        for now in [1.3, 0.7] {
            assert!(near(QualityMetric::Calibration.worse_by(now, 0.9), 0.2), "{now}");
        }
        assert!(QualityMetric::Calibration.worse_by(1.0, 0.9) < 0.0);
    }
}

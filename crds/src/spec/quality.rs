//! `spec.training.quality`: the quality of predictions on training rows, each made before its row
//! is learned.

use rectrain_kinds::{QualityMetric, RegressionAction};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::defaults;

/// A frozen model that predicts the same rows as the trained one.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct BaselineSpec {
    /// The checkpoint of the frozen model: a `spec.checkpoint.path`, followed by `@STEP`. It may be
    /// the job's own path. Each loader holds the model in memory. Required.
    #[schemars(length(min = 1, max = 1024))]
    pub from: String,
}

/// What happens when the quality of the latest predictions falls.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct RegressionSpec {
    /// The measure.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(extend("x-default" = QualityMetric::Auc))]
    pub metric: Option<QualityMetric>,

    /// How much worse the measure of the latest window may be than over the latest ten windows.
    /// Required.
    #[schemars(range(min = 0.0001, max = 10.0))]
    pub tolerance: f64,

    /// What happens.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(extend("x-default" = RegressionAction::Alert))]
    pub action: Option<RegressionAction>,
}

/// The quality of the latest predictions on training rows, each made before its row is learned.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct QualitySpec {
    /// The number of the latest predictions that count.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1000, max = 100_000_000), extend("x-default" = defaults::WINDOW_ROWS))]
    pub window_rows: Option<u32>,

    /// A frozen model that predicts the same rows, for comparison.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(extend("x-default" = "none"))]
    pub baseline: Option<BaselineSpec>,

    /// What happens when the quality falls.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(extend("x-default" = "nothing"))]
    pub on_regression: Option<RegressionSpec>,
}

//! The part of `spec` about inference servers.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::defaults;

/// The model for inference servers, while it is trained.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct ServingSpec {
    /// Publishes the model at every checkpoint: a full model, and then the rows that changed.
    /// `rectrain serve PATH` answers with the newest one. Needs `spec.checkpoint.path`.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(extend("x-default" = "nothing is published"))]
    pub publish: Option<PublishSpec>,
}

/// Publications of the model.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct PublishSpec {
    /// Directory of the published models: a local path, or a gs:// or s3:// URL. It belongs to one
    /// job, and is not the path of the checkpoints. Required.
    #[schemars(length(min = 1, max = 1024))]
    pub path: String,

    /// Seconds between two published models, such as 5 or 0.2. A checkpoint is taken this often, at
    /// the next global-step boundary, if `spec.checkpoint` asks for fewer.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 0.1, max = 86400.0), extend("x-default" = "as often as checkpoints"))]
    pub every_seconds: Option<f64>,

    /// The number of full models to keep, with the changes that build on them. Older ones are
    /// deleted. A server that was away longer loads the newest full model.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = 1000), extend("x-default" = defaults::PUBLICATIONS_KEPT))]
    pub keep: Option<u32>,

    /// Leaves out the rows of ids with fewer examples. An id that reaches this number is published
    /// with the next changes. A row counts its examples from its admission on, and only with
    /// `features.memory` and the eviction policy `lfu`. Counts are exact up to the maximum.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = 4096), extend("x-default" = "all rows are published"))]
    pub min_count: Option<u32>,
}

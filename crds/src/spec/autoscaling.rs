//! `spec.autoscaling`: the numbers of replicas that roles may have, and how they are decided.

use kube::KubeSchema;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::defaults;

/// The use of decisions to scale.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub enum AutoscalingMode {
    /// They are only reported, in `status.decisions` and in events.
    #[default]
    Recommend,
    /// They are carried out.
    Apply,
}

/// The scaler of a role.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub enum Scaler {
    /// The operator, with these settings.
    #[default]
    Operator,
    /// Something else: an autoscaler of Kubernetes, KEDA, or you. (The scale subresource sets the
    /// number of dense workers.) The operator decides nothing about the role.
    External,
}

/// How parameter servers are scaled: by memory, as the table grows, and by look-up load.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
#[x_kube(
    validation = Rule::new("!has(self.min) || !has(self.max) || self.min <= self.max").message("expected a `min` of at most `max`").field_path(".min"),
    validation = Rule::new("!(has(self.scaler) && self.scaler == 'external') || !(has(self.min) || has(self.max) || has(self.memoryTarget) || has(self.busyTarget) || has(self.maxMemoryGib))").message("an external scaler scales this role: remove the other settings, or `scaler: external`").field_path(".scaler")
)]
pub struct PsScalingSpec {
    /// The scaler.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(extend("x-default" = Scaler::Operator))]
    pub scaler: Option<Scaler>,

    /// The lower bound.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = 1024), extend("x-default" = "spec.roles.ps.replicas"))]
    pub min: Option<u32>,

    /// The upper bound.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = 1024), extend("x-default" = "4 · spec.roles.ps.replicas"))]
    pub max: Option<u32>,

    /// Target share of the memory limit for the fullest server. Its memory is extrapolated a
    /// quarter of an hour ahead, at the current growth.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 0.1, max = 0.95), extend("x-default" = defaults::PS_MEMORY_TARGET))]
    pub memory_target: Option<f64>,

    /// Target share of busy time for the busiest server.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 0.1, max = 0.95), extend("x-default" = defaults::PS_BUSY_TARGET))]
    pub busy_target: Option<f64>,

    /// The most memory of one server, in GiB. After one was killed for its memory, all servers get
    /// half as much more, up to this. Only then are its slots spread over more servers.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = 65_536), extend("x-default" = "limits are not raised: slots are spread over more servers"))]
    pub max_memory_gib: Option<u32>,
}

/// How embedding workers are scaled: by the time that batches wait for them.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
#[x_kube(
    validation = Rule::new("!has(self.min) || !has(self.max) || self.min <= self.max").message("expected a `min` of at most `max`").field_path(".min"),
    validation = Rule::new("!(has(self.scaler) && self.scaler == 'external') || !(has(self.min) || has(self.max) || has(self.queueWaitSeconds))").message("an external scaler scales this role: remove the other settings, or `scaler: external`").field_path(".scaler")
)]
pub struct EmbeddingWorkerScalingSpec {
    /// The scaler.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(extend("x-default" = Scaler::Operator))]
    pub scaler: Option<Scaler>,

    /// The lower bound.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = 1024), extend("x-default" = "spec.roles.embeddingWorker.replicas"))]
    pub min: Option<u32>,

    /// The upper bound.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = 1024), extend("x-default" = "4 · spec.roles.embeddingWorker.replicas"))]
    pub max: Option<u32>,

    /// Target mean wait of a batch until a worker starts with it, in seconds.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 0.0001, max = 60.0), extend("x-default" = "the time that a worker takes for a batch"))]
    pub queue_wait_seconds: Option<f64>,
}

/// How dense workers are scaled: by the throughput of one more worker, and by the cost of samples.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
#[x_kube(
    validation = Rule::new("!has(self.min) || !has(self.max) || self.min <= self.max").message("expected a `min` of at most `max`").field_path(".min"),
    validation = Rule::new("!has(self.maxCostPerMillionSamples) || has(self.pricePerHour)").message("the cost of samples follows from the cost of a worker: give `pricePerHour`, or remove `maxCostPerMillionSamples`").field_path(".maxCostPerMillionSamples"),
    validation = Rule::new("!(has(self.scaler) && self.scaler == 'external') || !(has(self.min) || has(self.max) || has(self.marginalThroughput) || has(self.pricePerHour) || has(self.maxCostPerMillionSamples))").message("an external scaler scales this role: remove the other settings, or `scaler: external`").field_path(".scaler")
)]
pub struct DenseWorkerScalingSpec {
    /// The scaler.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(extend("x-default" = Scaler::Operator))]
    pub scaler: Option<Scaler>,

    /// The lower bound.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = 1024), extend("x-default" = "spec.roles.denseWorker.replicas"))]
    pub min: Option<u32>,

    /// The upper bound.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = 1024), extend("x-default" = "4 · spec.roles.denseWorker.replicas"))]
    pub max: Option<u32>,

    /// The least throughput that one more worker must add, as a share of the average worker's.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 0.05, max = 0.95), extend("x-default" = defaults::MARGINAL_THROUGHPUT))]
    pub marginal_throughput: Option<f64>,

    /// Price of one worker per hour, in any currency.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 0.000001, max = 1000000.0), extend("x-default" = "cost is not considered"))]
    pub price_per_hour: Option<f64>,

    /// The highest cost of a million samples, in the currency of `pricePerHour`.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 0.000001, max = 1000000.0), extend("x-default" = "no bound"))]
    pub max_cost_per_million_samples: Option<f64>,
}

/// How loaders are scaled: by the rows of the stream that wait, or by the time that dense workers
/// wait for data that ends.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
#[x_kube(
    validation = Rule::new("!has(self.min) || !has(self.max) || self.min <= self.max").message("expected a `min` of at most `max`").field_path(".min"),
    validation = Rule::new("!(has(self.scaler) && self.scaler == 'external') || !(has(self.min) || has(self.max) || has(self.catchUpSeconds) || has(self.busyTarget) || has(self.waitTarget))").message("an external scaler scales this role: remove the other settings, or `scaler: external`").field_path(".scaler")
)]
pub struct LoaderScalingSpec {
    /// The scaler.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(extend("x-default" = Scaler::Operator))]
    pub scaler: Option<Scaler>,

    /// The lower bound.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = 1024), extend("x-default" = "spec.roles.loader.replicas"))]
    pub min: Option<u32>,

    /// The upper bound. A stream never has more loaders than partitions.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = 1024), extend("x-default" = "4 · spec.roles.loader.replicas"))]
    pub max: Option<u32>,

    /// Seconds in which the rows of a stream that wait should be read, while further ones arrive.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 10, max = 86_400), extend("x-default" = defaults::CATCH_UP_SECONDS))]
    pub catch_up_seconds: Option<u32>,

    /// Target share of the time that a loader reads.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 0.1, max = 0.95), extend("x-default" = defaults::LOADER_BUSY_TARGET))]
    pub busy_target: Option<f64>,

    /// Target share of the time that dense workers wait for data. It does not apply to a stream.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 0.01, max = 0.9), extend("x-default" = defaults::LOADER_WAIT_TARGET))]
    pub wait_target: Option<f64>,
}

/// Automatic numbers of replicas, decided from measurements. `autoscaling: {}` takes every default.
/// `rectrain run` scales loaders only.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct AutoscalingSpec {
    /// The use of decisions.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(extend("x-default" = AutoscalingMode::Recommend))]
    pub mode: Option<AutoscalingMode>,

    /// Parameter servers.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ps: Option<PsScalingSpec>,

    /// Embedding workers.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub embedding_worker: Option<EmbeddingWorkerScalingSpec>,

    /// Dense workers.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub dense_worker: Option<DenseWorkerScalingSpec>,

    /// Loaders.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub loader: Option<LoaderScalingSpec>,

    /// Seconds between two decisions about a role.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 10, max = 86_400), extend("x-default" = defaults::COOL_DOWN_SECONDS))]
    pub cool_down_seconds: Option<u32>,

    /// Seconds for which more replicas must have been needed, without interruption.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 15, max = 3600), extend("x-default" = defaults::UP_WINDOW_SECONDS))]
    pub up_window_seconds: Option<u32>,

    /// Seconds for which fewer replicas must have been enough, without interruption.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 15, max = 3600), extend("x-default" = defaults::DOWN_WINDOW_SECONDS))]
    pub down_window_seconds: Option<u32>,
}

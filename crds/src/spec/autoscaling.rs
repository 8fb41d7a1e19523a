//! `spec.autoscaling`: how many replicas roles may have, and what decides.

use kube::KubeSchema;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::defaults;

/// What becomes of decisions to scale.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub enum AutoscalingMode {
    /// They are told in `status.decisions` and in events, and nothing is changed.
    #[default]
    Recommend,
    /// They are carried out.
    Apply,
}

/// Who scales a role.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub enum Scaler {
    /// The operator, by what is said here.
    #[default]
    Operator,
    /// Somebody else: an autoscaler of Kubernetes or KEDA (through the scale subresource, which is that of the dense workers), or you.
    /// The operator decides nothing about the role.
    External,
}

/// How parameter servers are scaled: by memory, with the growth of the table, and by look-up load.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
#[x_kube(
    validation = Rule::new("!has(self.min) || !has(self.max) || self.min <= self.max").message("expected a `min` of at most `max`").field_path(".min"),
    validation = Rule::new("!(has(self.scaler) && self.scaler == 'external') || !(has(self.min) || has(self.max) || has(self.memoryTarget) || has(self.busyTarget) || has(self.maxMemoryGib))").message("somebody else scales this role: remove the other settings, or scaler: external").field_path(".scaler")
)]
pub struct PsScalingSpec {
    /// Who scales them.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(extend("x-default" = Scaler::Operator))]
    pub scaler: Option<Scaler>,

    /// As many at least.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = 1024), extend("x-default" = "spec.roles.ps.replicas"))]
    pub min: Option<u32>,

    /// As many at most.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = 1024), extend("x-default" = "4 · spec.roles.ps.replicas"))]
    pub max: Option<u32>,

    /// Share of its memory limit that the fullest should use, a quarter of an hour from now at the present growth.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 0.1, max = 0.95), extend("x-default" = defaults::PS_MEMORY_TARGET))]
    pub memory_target: Option<f64>,

    /// Share of the time that the busiest should work.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 0.1, max = 0.95), extend("x-default" = defaults::PS_BUSY_TARGET))]
    pub busy_target: Option<f64>,

    /// Memory in GiB that one may be given at most: after one was killed for its memory all of them get half as much more, until they have
    /// this. Only then are its slots spread over more servers.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = 65_536), extend("x-default" = "its slots are spread over more servers"))]
    pub max_memory_gib: Option<u32>,
}

/// How embedding workers are scaled: by the time that batches wait for them.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
#[x_kube(
    validation = Rule::new("!has(self.min) || !has(self.max) || self.min <= self.max").message("expected a `min` of at most `max`").field_path(".min"),
    validation = Rule::new("!(has(self.scaler) && self.scaler == 'external') || !(has(self.min) || has(self.max) || has(self.queueWaitSeconds))").message("somebody else scales this role: remove the other settings, or scaler: external").field_path(".scaler")
)]
pub struct EmbeddingWorkerScalingSpec {
    /// Who scales them.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(extend("x-default" = Scaler::Operator))]
    pub scaler: Option<Scaler>,

    /// As many at least.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = 1024), extend("x-default" = "spec.roles.embeddingWorker.replicas"))]
    pub min: Option<u32>,

    /// As many at most.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = 1024), extend("x-default" = "4 · spec.roles.embeddingWorker.replicas"))]
    pub max: Option<u32>,

    /// Mean seconds that a batch should wait until one begins with it.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 0.0001, max = 60.0), extend("x-default" = "as long as one then works on it"))]
    pub queue_wait_seconds: Option<f64>,
}

/// How dense workers are scaled: by what one more would add, and by what samples cost.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
#[x_kube(
    validation = Rule::new("!has(self.min) || !has(self.max) || self.min <= self.max").message("expected a `min` of at most `max`").field_path(".min"),
    validation = Rule::new("!has(self.maxCostPerMillionSamples) || has(self.pricePerHour)").message("what samples cost follows from what a worker costs: give `pricePerHour`, or remove `maxCostPerMillionSamples`").field_path(".maxCostPerMillionSamples"),
    validation = Rule::new("!(has(self.scaler) && self.scaler == 'external') || !(has(self.min) || has(self.max) || has(self.marginalThroughput) || has(self.pricePerHour) || has(self.maxCostPerMillionSamples))").message("somebody else scales this role: remove the other settings, or scaler: external").field_path(".scaler")
)]
pub struct DenseWorkerScalingSpec {
    /// Who scales them.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(extend("x-default" = Scaler::Operator))]
    pub scaler: Option<Scaler>,

    /// As many at least.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = 1024), extend("x-default" = "spec.roles.denseWorker.replicas"))]
    pub min: Option<u32>,

    /// As many at most.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = 1024), extend("x-default" = "4 · spec.roles.denseWorker.replicas"))]
    pub max: Option<u32>,

    /// What one more should add to the throughput, as a share of what each adds on average.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 0.05, max = 0.95), extend("x-default" = defaults::MARGINAL_THROUGHPUT))]
    pub marginal_throughput: Option<f64>,

    /// Price of one for an hour, in any currency.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 0.000001, max = 1000000.0), extend("x-default" = "cost is not looked at"))]
    pub price_per_hour: Option<f64>,

    /// What a million samples may cost at most, in the currency of `pricePerHour`.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 0.000001, max = 1000000.0), extend("x-default" = "no bound"))]
    pub max_cost_per_million_samples: Option<f64>,
}

/// How many replicas the roles should have, decided from what is measured of them. `autoscaling: {}` takes every default. Only a
/// cluster can carry it out.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct AutoscalingSpec {
    /// What becomes of decisions.
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

    /// Seconds between two decisions about a role.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 10, max = 86_400), extend("x-default" = defaults::COOL_DOWN_SECONDS))]
    pub cool_down_seconds: Option<u32>,

    /// Seconds for which more replicas must have been needed throughout.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 15, max = 3600), extend("x-default" = defaults::UP_WINDOW_SECONDS))]
    pub up_window_seconds: Option<u32>,

    /// Seconds for which fewer must have been enough throughout.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 15, max = 3600), extend("x-default" = defaults::DOWN_WINDOW_SECONDS))]
    pub down_window_seconds: Option<u32>,
}

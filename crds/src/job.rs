//! `RecTrainingJob`: the root of the manifest and the kind of the cluster's objects.

// kube's derive repeats each struct, `pub` and all, inside a function.
#![allow(unreachable_pub)]

use kube::{CustomResource, KubeSchema};
use serde::{Deserialize, Serialize};

use crate::{
    AutoscalingSpec, CheckpointSpec, DataSpec, FaultToleranceSpec, FeaturesSpec, ModelSpec, RecTrainingJobStatus,
    RolesSpec, ServingSpec, TrainingSpec, defaults,
};

/// The model, its data and its training.
#[derive(CustomResource, KubeSchema, Clone, Debug, PartialEq, Serialize, Deserialize)]
#[kube(
    group = "rectrain.dev",
    version = "v1alpha1",
    kind = "RecTrainingJob",
    plural = "rectrainingjobs",
    singular = "rectrainingjob",
    shortname = "rtj",
    category = "all",
    namespaced,
    status = "RecTrainingJobStatus",
    derive = "PartialEq",
    cel,
    doc = "RecTrainingJob trains one recommender model: `kubectl apply -f job.yaml` in a cluster, or `rectrain run job.yaml` without one.",
    validation = Rule::new("!has(self.metadata.name) || self.metadata.name.matches('^[a-z]([-a-z0-9]{0,33}[a-z0-9])?$')").message("the name is part of the job's pod names: expected at most 35 characters, a-z, 0-9 and -, starting with a letter and not ending with -"),
    scale(
        spec_replicas_path = ".spec.roles.denseWorker.replicas",
        status_replicas_path = ".status.replicaStatuses.denseWorker.ready",
        label_selector_path = ".status.selector"
    ),
    printcolumn(name = "Phase", type_ = "string", json_path = ".status.phase", description = "Phase of the job."),
    printcolumn(name = "Mode", type_ = "string", json_path = ".status.mode", description = "Training mode in use."),
    printcolumn(name = "Step", type_ = "integer", json_path = ".status.step", description = "Completed global steps."),
    printcolumn(name = "Samples/s", type_ = "integer", json_path = ".status.samplesPerSecond", description = "Rows trained per second, all dense workers together."),
    printcolumn(name = "AUC", type_ = "number", json_path = ".status.auc", description = "AUC of the latest evaluation, or of the training rows before the first."),
    printcolumn(name = "PS", type_ = "string", json_path = ".status.replicaStatuses.ps.display", description = "Parameter servers, ready/wanted."),
    printcolumn(name = "EW", type_ = "string", json_path = ".status.replicaStatuses.embeddingWorker.display", description = "Embedding workers, ready/wanted."),
    printcolumn(name = "DW", type_ = "string", json_path = ".status.replicaStatuses.denseWorker.display", description = "Dense workers, ready/wanted."),
    printcolumn(name = "Restarts", type_ = "integer", json_path = ".status.restarts", description = "Restarts after crashes, all roles together."),
    printcolumn(name = "Slowest", type_ = "string", json_path = ".status.slowest.pod", priority = 1, description = "Pod that slows training the most."),
    printcolumn(name = "Lag", type_ = "integer", json_path = ".status.stream.lagSeconds", priority = 1, description = "Seconds that training is behind its stream."),
    printcolumn(name = "Age", type_ = "date", json_path = ".metadata.creationTimestamp", description = "Time since the job was created.")
)]
#[serde(rename_all = "camelCase")]
#[x_kube(
    validation = crate::spec::one_width_rule(),
    validation = Rule::new("self.model.kind != 'lr' || self.features.sparse.all(f, !has(f.dim))").message("lr has one weight per id and no embeddings: remove `dim` from the features, or choose another model").field_path(".features.sparse"),
    validation = Rule::new("!(has(self.training) && has(self.training.optimizer) && has(self.training.optimizer.firstOrder)) || self.model.kind in ['lr', 'fm', 'deepfm', 'wideDeep']").message("the model has no first-order weights: remove `firstOrder`, or choose lr, fm, deepfm or wideDeep").field_path(".training.optimizer.firstOrder"),
    validation = Rule::new("!has(self.model.bottom) || (has(self.features.dense) && self.features.dense.size() > 0)").message("the bottom MLP reads the dense features and there are none: add spec.features.dense, or remove `bottom`").field_path(".model.bottom"),
    validation = Rule::new("(has(self.training) && has(self.training.globalBatchSize) ? self.training.globalBatchSize : 4096) >= (has(self.roles) && has(self.roles.denseWorker) && has(self.roles.denseWorker.replicas) ? self.roles.denseWorker.replicas : 1)").message("every dense worker needs at least one row of each batch: raise spec.training.globalBatchSize, or lower spec.roles.denseWorker.replicas"),
    validation = Rule::new("!has(self.roles) || !has(self.roles.denseWorker) || !has(self.roles.denseWorker.gpus) || !has(self.roles.denseWorker.device) || (self.roles.denseWorker.device == 'cpu' ? self.roles.denseWorker.gpus == 0 : (self.roles.denseWorker.device == 'auto' || self.roles.denseWorker.gpus > 0))").message("denseWorker.device and denseWorker.gpus contradict each other: remove one of them").field_path(".roles.denseWorker"),
    validation = Rule::new("self.model == oldSelf.model").message("the model cannot be changed once the job exists, because its trained parameters depend on it: make a new job").field_path(".model"),
    validation = Rule::new("self.features.sparse == oldSelf.features.sparse && has(self.features.label) == has(oldSelf.features.label) && (!has(self.features.label) || self.features.label == oldSelf.features.label) && has(self.features.dense) == has(oldSelf.features.dense) && (!has(self.features.dense) || self.features.dense == oldSelf.features.dense) && has(self.features.group) == has(oldSelf.features.group) && (!has(self.features.group) || self.features.group == oldSelf.features.group) && has(self.features.initializer) == has(oldSelf.features.initializer) && (!has(self.features.initializer) || self.features.initializer == oldSelf.features.initializer) && has(self.features.eviction) == has(oldSelf.features.eviction) && (!has(self.features.eviction) || self.features.eviction == oldSelf.features.eviction)").message("the features cannot be changed once the job exists, because the trained rows depend on them: make a new job, or change only `memory`").field_path(".features"),
    validation = Rule::new("has(self.features.memory) == has(oldSelf.features.memory)").message("a job cannot gain or lose its memory budget, because its rows are stored with their scores: change the number, or make a new job").field_path(".features"),
    validation = Rule::new("(has(self.training) && has(self.training.seed) ? self.training.seed : 42) == (has(oldSelf.training) && has(oldSelf.training.seed) ? oldSelf.training.seed : 42)").message("the seed cannot be changed once the job exists, because initial values depend on it: make a new job"),
    validation = Rule::new("(has(self.training) && has(self.training.embeddingValueType) ? self.training.embeddingValueType : 'f32') == (has(oldSelf.training) && has(oldSelf.training.embeddingValueType) ? oldSelf.training.embeddingValueType : 'f32')").message("embeddingValueType cannot be changed once the job exists, because the rows are stored in it: make a new job"),
    validation = Rule::new("(has(self.training) && has(self.training.optimizer) && has(self.training.optimizer.sparse) && has(self.training.optimizer.sparse.kind) ? self.training.optimizer.sparse.kind : (has(self.features.memory) ? 'rowWiseAdaGrad' : 'adam')) == (has(oldSelf.training) && has(oldSelf.training.optimizer) && has(oldSelf.training.optimizer.sparse) && has(oldSelf.training.optimizer.sparse.kind) ? oldSelf.training.optimizer.sparse.kind : (has(oldSelf.features.memory) ? 'rowWiseAdaGrad' : 'adam'))").message("the optimizer of the embedding rows cannot be changed once the job exists, because they are stored together with its state: make a new job"),
    validation = Rule::new("(has(self.training) && has(self.training.optimizer) && has(self.training.optimizer.firstOrder) ? (has(self.training.optimizer.firstOrder.kind) ? self.training.optimizer.firstOrder.kind : (has(self.features.memory) ? 'rowWiseAdaGrad' : 'adam')) : 'none') == (has(oldSelf.training) && has(oldSelf.training.optimizer) && has(oldSelf.training.optimizer.firstOrder) ? (has(oldSelf.training.optimizer.firstOrder.kind) ? oldSelf.training.optimizer.firstOrder.kind : (has(oldSelf.features.memory) ? 'rowWiseAdaGrad' : 'adam')) : 'none')").message("the optimizer of the first-order weights cannot be changed once the job exists, because they are stored together with its state: make a new job"),
    validation = Rule::new("has(self.managedBy) == has(oldSelf.managedBy) && (!has(self.managedBy) || self.managedBy == oldSelf.managedBy)").message("managedBy cannot be changed once the job exists: make a new job")
)]
pub struct RecTrainingJobSpec {
    /// The model: its kind and its sizes. Cannot be changed once the job exists. Required.
    pub model: ModelSpec,

    /// The columns to read, and their roles. Other columns are skipped. Cannot be changed once the
    /// job exists, because the trained rows and layers depend on it. Required.
    pub features: FeaturesSpec,

    /// The source of the rows. Exactly one of three: `train` (with or without `test`), `source`
    /// with `split`, or `synthetic`. Required.
    pub data: DataSpec,

    /// How the model is trained.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub training: Option<TrainingSpec>,

    /// The number of members of each role, and their pods. `rectrain run` runs all roles in one
    /// process; with `--processes` each member has its own. In a cluster each member has its own
    /// pod.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub roles: Option<RolesSpec>,

    /// Automatic numbers of replicas, decided from measurements. `autoscaling: {}` takes every
    /// default. `rectrain run` scales loaders, and refuses this unless the other roles have
    /// `scaler: external`.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(extend("x-default" = "fixed replicas, as in spec.roles"))]
    pub autoscaling: Option<AutoscalingSpec>,

    /// Checkpoints: where and how often.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(extend("x-default" = "no checkpoints"))]
    pub checkpoint: Option<CheckpointSpec>,

    /// The model for inference servers, while it is trained.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub serving: Option<ServingSpec>,

    /// True suspends the job: its pods are removed. When this is false again, they return and
    /// continue from the last checkpoint. Works only in a cluster; `rectrain run` refuses it.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(extend("x-default" = false))]
    pub suspend: Option<bool>,

    /// Seconds after the job's end until it is deleted, with everything that belongs to it. Only a
    /// cluster reads it.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 0, max = 315_360_000), extend("x-default" = "never deleted"))]
    pub ttl_seconds_after_finished: Option<u32>,

    /// The most seconds from the job's start to its end. A job that takes longer is stopped and
    /// fails. Works only in a cluster; `rectrain run` refuses it.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = 315_360_000), extend("x-default" = "no deadline"))]
    pub active_deadline_seconds: Option<u32>,

    /// Name of the controller that runs the job. The operator ignores jobs that name another one,
    /// such as `kueue.x-k8s.io/multikueue`. Cannot be changed once the job exists. Only a cluster
    /// reads it.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 63), extend("x-default" = defaults::MANAGED_BY))]
    pub managed_by: Option<String>,

    /// The handling of crashes, in a cluster and in `rectrain run --processes`. A failure caused by
    /// the user's input is never retried.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub fault_tolerance: Option<FaultToleranceSpec>,
}

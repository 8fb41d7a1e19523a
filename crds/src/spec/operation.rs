//! The parts of `spec` about a job's operation: checkpoints and the handling of failures.

use kube::KubeSchema;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::defaults;

/// The start of training.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub enum Resume {
    /// From initial values. A `path` with checkpoints of another run is refused, so that none of
    /// them is lost. After a crash, a run always continues from its own checkpoints.
    #[default]
    None,
    /// From the newest complete checkpoint under `path`, or from initial values if there is none.
    /// A `path` with nothing but damaged checkpoints is refused.
    Latest,
}

/// Checkpoints: directories with everything that training needs to continue.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
#[x_kube(
    validation = Rule::new("has(self.path) || !(has(self.everySteps) || has(self.everySeconds) || has(self.fullEvery) || has(self.keep) || (has(self.resume) && self.resume != 'none'))").message("checkpoints need a `path`: give it, or remove the other settings of `checkpoint`")
)]
pub struct CheckpointSpec {
    /// Directory of the checkpoints: a local path, or a gs:// or s3:// URL. Without it, none are
    /// written.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 1024), extend("x-default" = "no checkpoints"))]
    pub path: Option<String>,

    /// Global batches between two checkpoints (with a barrier, steps). There is always one at the
    /// end.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = 1_000_000_000_000u64), extend("x-default" = "one checkpoint, at the end"))]
    pub every_steps: Option<u64>,

    /// Seconds between two checkpoints, for jobs that have no end. The checkpoint is taken at the
    /// next global-step boundary. There is none if nothing was trained since the last one. May go
    /// with `everySteps`.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 10, max = 31_536_000u64), extend("x-default" = "none by time"))]
    pub every_seconds: Option<u64>,

    /// Every n-th checkpoint is a full one. The ones in between hold the embedding rows that
    /// changed since the previous checkpoint. 1 makes all checkpoints full.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = 1000), extend("x-default" = defaults::FULL_CHECKPOINT_EVERY))]
    pub full_every: Option<u32>,

    /// The number of full checkpoints to keep, with the deltas that build on them. Older
    /// checkpoints are deleted.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = 1000), extend("x-default" = defaults::CHECKPOINTS_KEPT))]
    pub keep: Option<u32>,

    /// The start of training.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(extend("x-default" = Resume::None))]
    pub resume: Option<Resume>,

    /// The checkpoint of another job whose model a new job begins with: the other job's `path`,
    /// followed by `@STEP` or `@latest`. Rows, optimizer state and dense parameters carry over. The
    /// data, the modes, the learning rates and all numbers of members may differ, and features may
    /// be added or left out. The other job's files are only read. If `path` holds a checkpoint of
    /// this job, the job resumes from that one.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 1024), extend("x-default" = "initial values"))]
    pub from: Option<String>,
}

/// The handling of crashes, in a cluster and in `rectrain run --processes`. A failure caused by the
/// user's input is never retried.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct FaultToleranceSpec {
    /// The most restarts after crashes before the job fails, all roles together. The count starts
    /// again after a day without a crash. 0 fails at the first crash.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 0, max = 100_000), extend("x-default" = defaults::MAX_RESTARTS))]
    pub max_restarts: Option<u32>,

    /// Seconds before the first restart. Doubled for each further one, up to 300.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = 300), extend("x-default" = defaults::BACKOFF_SECONDS))]
    pub backoff_seconds: Option<u32>,

    /// Seconds without progress after which training counts as stalled. Progress is a trained
    /// batch, restored or saved data, an evaluated batch, or a file that was read. A dense worker
    /// that spends this long on one batch exits, and its replacement continues.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 10, max = 86_400), extend("x-default" = defaults::STALL_SECONDS))]
    pub stall_seconds: Option<u32>,

    /// True if parameter servers keep their state in shared memory. If one dies, its replacement on
    /// the same machine finds the state there and continues. It reads nothing from a checkpoint.
    /// Works in `rectrain run --processes` and in a cluster. In a cluster the state is in an
    /// in-memory volume, which counts as the container's memory.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(extend("x-default" = defaults::SHARED_MEMORY))]
    pub shared_memory: Option<bool>,

    /// Replaces pods that stay slow although their work has moved away. Their rows move first, and
    /// new pods of the role avoid the node. `replaceSlow: {}` takes every default. Only a cluster
    /// reads it.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(extend("x-default" = "slow pods are not replaced"))]
    pub replace_slow: Option<ReplaceSlowSpec>,
}

/// When slow pods are replaced.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct ReplaceSlowSpec {
    /// Seconds for which the same pod must be named as slow, without interruption.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 60, max = 86_400), extend("x-default" = defaults::REPLACE_SLOW_AFTER_SECONDS))]
    pub after_seconds: Option<u32>,

    /// The most replacements in an hour, all roles together.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = 16), extend("x-default" = defaults::REPLACE_SLOW_PER_HOUR))]
    pub per_hour: Option<u32>,
}

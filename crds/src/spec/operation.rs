//! The parts of `spec` about a job's life rather than its mathematics: checkpoints and what happens after a failure.

use kube::KubeSchema;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::defaults;

/// Where training starts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub enum Resume {
    /// From initial values. A `path` that holds checkpoints of another run is refused, so that none of them is lost. (What this run
    /// has written itself is what it goes on from after a crash.)
    #[default]
    None,
    /// From the newest complete checkpoint under `path`, or from initial values if there is none.
    Latest,
}

/// Checkpoints: directories that hold everything training needs to go on.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
#[x_kube(
    validation = Rule::new("has(self.path) || !(has(self.everySteps) || has(self.fullEvery) || has(self.keep) || (has(self.resume) && self.resume != 'none'))").message("checkpoints need a `path`: give it, or remove the other settings of `checkpoint`")
)]
pub struct CheckpointSpec {
    /// Directory of the checkpoints: a local path, or a gs:// or s3:// URL. Left out, none are written.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 1024), extend("x-default" = "no checkpoints"))]
    pub path: Option<String>,

    /// Global batches between two checkpoints (with a barrier, steps); there is one at the end in any case.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = 1_000_000_000_000u64), extend("x-default" = "one checkpoint, at the end"))]
    pub every_steps: Option<u64>,

    /// Every how many checkpoints a full one is written; those between hold the embedding rows that changed since the one before.
    /// 1: all are full.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = 1000), extend("x-default" = defaults::FULL_CHECKPOINT_EVERY))]
    pub full_every: Option<u32>,

    /// Full checkpoints that are kept, with those that build on them; older ones are deleted.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = 1000), extend("x-default" = defaults::CHECKPOINTS_KEPT))]
    pub keep: Option<u32>,

    /// Where training starts.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(extend("x-default" = Resume::None))]
    pub resume: Option<Resume>,
}

/// What happens after a crash, in a cluster and in `rectrain run --processes`. A failure that the user's input causes is never retried.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct FaultToleranceSpec {
    /// Restarts of crashed roles, all roles together, after which the job has failed. They are counted anew once a day has gone by without one.
    /// 0 fails at the first crash.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 0, max = 100_000), extend("x-default" = defaults::MAX_RESTARTS))]
    pub max_restarts: Option<u32>,

    /// Seconds before the first restart; doubled with each further one, up to 300.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = 300), extend("x-default" = defaults::BACKOFF_SECONDS))]
    pub backoff_seconds: Option<u32>,

    /// Seconds without progress after which training counts as stalled: in which no batch was
    /// trained, nothing was restored or saved, no evaluation got on and no file was read. A dense worker
    /// that has been at one batch for as long ends, and another takes its place.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 10, max = 86_400), extend("x-default" = defaults::STALL_SECONDS))]
    pub stall_seconds: Option<u32>,

    /// Whether parameter servers keep what they hold in shared memory, where a process that takes the place of one that died on the same
    /// machine finds it: it goes on where the other stood, and nothing is read from a checkpoint. In `rectrain run --processes` and in a
    /// cluster, where a volume in memory, which counts as the container's memory, holds it.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(extend("x-default" = defaults::SHARED_MEMORY))]
    pub shared_memory: Option<bool>,
}

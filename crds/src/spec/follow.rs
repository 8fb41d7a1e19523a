//! `spec.data.train.follow`: files that keep coming.

use kube::KubeSchema;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::{LostRecordsSpec, defaults};

/// The order of files that are noticed together.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub enum FileOrderSpec {
    /// By path or URL, byte by byte: `dt=2026-11-02/a.csv` before `dt=2026-11-10/a.csv`.
    #[default]
    Name,
    /// By the time of the last modification. Files of one time are in the order of their names.
    Time,
}

/// The treatment of a late file: one that sorts before a file that was taken already.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub enum LateFilesSpec {
    /// It is trained next, and a warning names it.
    #[default]
    Train,
    /// It is counted and not trained, and a warning names it.
    Skip,
}

/// Where training on followed files ends. Exactly one of `idleSeconds` and `timestamp`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
#[x_kube(
    validation = Rule::new("has(self.idleSeconds) != has(self.timestamp)").message("expected exactly one of `idleSeconds` and `timestamp`")
)]
pub struct FollowUntilSpec {
    /// Training ends behind the known files once no new file has come for so many seconds. Listings
    /// notice it, so it takes up to `intervalSeconds` longer.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = 31_536_000), extend("x-default" = "none"))]
    pub idle_seconds: Option<u32>,

    /// Training ends behind the files that are there at this moment, in milliseconds since 1970
    /// (UTC).
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 0, max = 9_007_199_254_740_991u64), extend("x-default" = "none"))]
    pub timestamp: Option<u64>,
}

/// Files that keep coming. The paths are listed at each interval, and each new file is trained
/// once. The checkpoints hold the list of the files that were taken. A file is a file of
/// `spec.data.format`, and its rows do not change.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
pub struct FollowSpec {
    /// Paths, as in `spec.data.test.paths`, at which files appear. They need not match a file yet.
    /// Checkpoints belong to these paths, so a job that resumes has the same ones. A listing goes
    /// through at most 200,000 objects below a path. At least one, at most 64. Required.
    #[schemars(length(min = 1, max = 64), inner(length(min = 1, max = 1024)))]
    pub paths: Vec<String>,

    /// The order of files that are noticed together.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(extend("x-default" = FileOrderSpec::Name))]
    pub order: Option<FileOrderSpec>,

    /// Seconds between two listings.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = 86_400), extend("x-default" = defaults::FOLLOW_INTERVAL_SECONDS))]
    pub interval_seconds: Option<u32>,

    /// True if a file counts only once its directory has a file `_SUCCESS`, as Spark writes it at
    /// the end.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(extend("x-default" = false))]
    pub whole_directories: Option<bool>,

    /// Where training ends.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(extend("x-default" = "training has no end"))]
    pub until: Option<FollowUntilSpec>,

    /// The treatment of a file that disappears, or changes, before all its rows were trained. With
    /// `skip` its other rows are left out.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(extend("x-default" = LostRecordsSpec::Fail))]
    pub lost_files: Option<LostRecordsSpec>,

    /// The treatment of a late file: one that sorts before a file that was taken already.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(extend("x-default" = LateFilesSpec::Train))]
    pub late_files: Option<LateFilesSpec>,
}

//! Followed paths: files that keep coming. Each file is trained once.

use serde::{Deserialize, Serialize};

use crate::LostRecords;

/// Paths at which new files appear.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct FollowConfig {
    /// Local paths and URLs, each also as a glob. It need not match a file yet.
    pub paths: Vec<String>,
    /// The order of files that are noticed together.
    pub order: FileOrder,
    /// Seconds between two listings of the paths, at least 1.
    pub interval_seconds: u32,
    /// Whether a file counts only once its directory has a file [`FollowConfig::MARKER`].
    pub whole_directories: bool,
    /// Where training ends; `None`: never.
    pub until: Option<FollowEnd>,
    /// What happens if a file disappears, or changes, before all its rows were trained.
    pub lost_files: LostRecords,
    /// What happens to a late file.
    pub late_files: LateFiles,
}

impl FollowConfig {
    /// The name of the empty file that says that its directory is whole.
    pub const MARKER: &str = "_SUCCESS";
    /// Objects below a path that a listing goes through, at most.
    pub const MOST_OBJECTS: usize = 200_000;
}

/// The order of files that are noticed together.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum FileOrder {
    /// By path or URL, byte by byte.
    #[default]
    Name,
    /// By the time of the last modification, and by name where two times are equal.
    Time,
}

/// Where training on followed paths ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum FollowEnd {
    /// Behind the known files, once no new file has come for so many seconds.
    IdleSeconds(u32),
    /// Behind the files that are there at this moment, in milliseconds since 1970 (UTC).
    Timestamp(i64),
}

/// What happens to a late file: one that sorts before a file that was taken already.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum LateFiles {
    /// It is trained, after the files that were taken before it.
    #[default]
    Train,
    /// It is counted, and not trained.
    Skip,
}

//! The place in a stream, as a checkpoint holds it.

use std::collections::BTreeMap;

use rectrain_kinds::PartId;
use rectrain_modes::{PartitionPlace, StreamPlace};
use serde::{Deserialize, Serialize};

use crate::followed::FileLedger;

/// A stream in a checkpoint.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub(crate) struct StreamSnapshot {
    /// Where reading goes on.
    pub(crate) place: StreamPlace,
    /// The topics, by their places in the manifest.
    pub(crate) topics: BTreeMap<u32, Topic>,
    /// The latest time of a record in a chunk that was read, in milliseconds since 1970.
    pub(crate) event_millis: Option<i64>,
    /// The taken files, if the job follows paths.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) files: Option<FileLedger>,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub(crate) struct Topic {
    pub(crate) name: String,
    /// A topic that is deleted and made again has another one.
    pub(crate) id: String,
}

/// The first offset of each partition that is not trained at a place: behind it, chunks may have
/// been read that are trained later.
pub(crate) fn untrained(place: &StreamPlace) -> Vec<(PartId, u64)> {
    let first = |part: &PartitionPlace| {
        let begun = place.begun.iter().filter(|chunk| chunk.segment.part == part.part);
        (part.part, begun.map(|chunk| chunk.segment.from).fold(part.next, u64::min))
    };
    place.partitions.iter().map(first).collect()
}

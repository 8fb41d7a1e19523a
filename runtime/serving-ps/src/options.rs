//! The arguments of a server.

use std::collections::BTreeMap;
use std::time::Duration;

use rectrain_serving::KeyRange;

/// The arguments of a server.
#[derive(Debug, Clone)]
pub struct Options {
    /// The path of the publications.
    pub path: String,
    /// Options of its object store.
    pub storage: BTreeMap<String, String>,
    /// The shard that the server holds, from 0.
    pub shard: u32,
    /// The number of shards, at least 1.
    pub shards: u32,
    /// The versions that are held, at least 1.
    pub versions: usize,
    /// The time between two looks for a newer model.
    pub poll: Duration,
    /// The time from the signal to end until no more connections are accepted.
    pub drain: Duration,
}

impl Options {
    /// The keys of the shard.
    pub(crate) fn keys(&self) -> KeyRange {
        KeyRange::of_part(self.shard, self.shards)
    }
}

//! The versions that the server holds, as its threads share them. A change replaces the whole list,
//! so a look-up reads one list without waiting for a change.

use std::sync::Arc;

use rectrain_rows_proto as v1;
use rectrain_serving::Model;
use rectrain_serving::publication::{Base, Follower, ServedVersion};
use tokio::sync::watch;

/// A version of the shard's rows.
#[derive(Debug, Clone)]
pub(crate) struct HeldVersion {
    pub(crate) base: Base,
    pub(crate) model: Arc<Model>,
    /// As messages tell it.
    told: v1::Version,
}

/// All versions, oldest first.
#[derive(Debug, Clone, Default)]
pub(crate) struct Held {
    pub(crate) versions: Arc<[HeldVersion]>,
    /// The server ends soon.
    pub(crate) ending: bool,
}

impl HeldVersion {
    fn of(version: &ServedVersion) -> Self {
        let groups = version.content().into_iter();
        let groups = groups.map(|group| v1::GroupContent { rows: group.rows, sum: group.sum.to_bytes().to_vec() });
        let Base { sequence, digest } = version.base.clone();
        let told = v1::Version { sequence, digest, groups: groups.collect() };
        Self { base: version.base.clone(), model: Arc::clone(&version.model), told }
    }
}

impl Held {
    /// The newest version.
    pub(crate) fn newest(&self) -> Option<&HeldVersion> {
        self.versions.last()
    }

    /// The version with this sequence number and digest.
    pub(crate) fn find(&self, sequence: u64, digest: &str) -> Option<&HeldVersion> {
        self.versions.iter().rev().find(|held| held.base.sequence == sequence && held.base.digest == digest)
    }

    /// As watchers see it.
    pub(crate) fn message(&self) -> v1::Held {
        v1::Held { versions: self.versions.iter().map(|held| held.told.clone()).collect(), ending: self.ending }
    }

    /// The versions without their content.
    pub(crate) fn names(&self) -> Vec<v1::Version> {
        let name = |held: &HeldVersion| v1::Version {
            sequence: held.base.sequence,
            digest: held.base.digest.clone(),
            groups: Vec::new(),
        };
        self.versions.iter().map(name).collect()
    }
}

/// Shows the versions of a follower from now on.
pub(crate) fn show(held: &watch::Sender<Held>, follower: &Follower) {
    held.send_modify(|held| {
        let before = Arc::clone(&held.versions);
        // Versions that stay keep their content, which was summed up already.
        let version = |version: &ServedVersion| {
            let known = before.iter().find(|known| known.base == version.base);
            known.cloned().unwrap_or_else(|| HeldVersion::of(version))
        };
        held.versions = follower.versions().map(version).collect();
    });
}

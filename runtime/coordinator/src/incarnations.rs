//! Which process is the current incarnation of each member.
//! A process that seems dead may still run, behind a network partition or on a node that is
//! unreachable. As soon as another process joins as the same member, the coordinator refuses all
//! requests of the old one.

use std::collections::{BTreeMap, BTreeSet};

use rectrain_proto::v1;
use serde::{Deserialize, Serialize};

/// The current and the superseded processes, by caller ID.
#[derive(Debug, Default, Serialize, Deserialize)]
pub(super) struct Incarnations {
    /// The current process of each member, by role and index.
    current: BTreeMap<(i32, u32), u64>,
    superseded: BTreeSet<u64>,
}

impl Incarnations {
    /// Makes a process the current incarnation of a member. Returns the process that it supersedes.
    pub(super) fn claim(&mut self, role: v1::Role, index: u32, id: u64) -> Option<u64> {
        if id == 0 {
            return None;
        }
        let before = self.current.insert((role.into(), index), id).filter(|before| *before != id)?;
        self.superseded.insert(before);
        Some(before)
    }

    /// Whether a process is the current incarnation of a member. Processes without an ID cannot be
    /// told apart, so this holds for all of them.
    pub(super) fn is_current(&self, role: v1::Role, index: u32, id: u64) -> bool {
        id == 0 || self.current.get(&(role.into(), index)) == Some(&id)
    }

    /// Whether another process has superseded this one.
    pub(super) fn is_superseded(&self, id: u64) -> bool {
        self.superseded.contains(&id)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_is_superseded_only_by_another_one() {
        let mut incarnations = Incarnations::default();
        let (loader, worker) = (v1::Role::Loader, v1::Role::DenseWorker);
        assert_eq!(
            (incarnations.claim(loader, 0, 7), incarnations.claim(worker, 0, 8), incarnations.claim(loader, 1, 9)),
            (None, None, None)
        );
        assert_eq!(incarnations.claim(loader, 0, 7), None);
        assert_eq!(incarnations.claim(loader, 0, 10), Some(7));
        assert_eq!([7, 8, 9, 10].map(|id| incarnations.is_superseded(id)), [true, false, false, false]);
        assert_eq!((incarnations.claim(loader, 0, 0), incarnations.is_superseded(0)), (None, false));
        assert_eq!([7, 10, 0].map(|id| incarnations.is_current(loader, 0, id)), [false, true, true]);
    }
}

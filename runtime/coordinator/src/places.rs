//! Which process has which member's place. One that is thought to be dead may still live, behind a network that is cut or in a pod whose
//! node is not heard of: as soon as another has its place, it is answered nothing any more.

use std::collections::{BTreeMap, BTreeSet};

use rectrain_proto::v1;
use serde::{Deserialize, Serialize};

/// See the module's text. Processes by the id that they ask with.
#[derive(Debug, Default, Serialize, Deserialize)]
pub(super) struct Places {
    /// By role and index.
    taken: BTreeMap<(i32, u32), u64>,
    superseded: BTreeSet<u64>,
}

impl Places {
    /// A process takes a place; gives the one that had it before.
    pub(super) fn take(&mut self, role: v1::Role, index: u32, id: u64) -> Option<u64> {
        if id == 0 {
            return None;
        }
        let before = self.taken.insert((role.into(), index), id).filter(|before| *before != id)?;
        self.superseded.insert(before);
        Some(before)
    }

    /// Whether a process has taken this place, as far as is known: processes without an id are not told apart.
    pub(super) fn has(&self, role: v1::Role, index: u32, id: u64) -> bool {
        id == 0 || self.taken.get(&(role.into(), index)) == Some(&id)
    }

    /// Whether another has the place that this process had.
    pub(super) fn is_superseded(&self, id: u64) -> bool {
        self.superseded.contains(&id)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_has_lost_its_place_is_known_and_who_asks_twice_has_not() {
        let mut places = Places::default();
        let (loader, worker) = (v1::Role::Loader, v1::Role::DenseWorker);
        assert_eq!(
            (places.take(loader, 0, 7), places.take(worker, 0, 8), places.take(loader, 1, 9)),
            (None, None, None)
        );
        assert_eq!(places.take(loader, 0, 7), None);
        assert_eq!(places.take(loader, 0, 10), Some(7));
        assert_eq!([7, 8, 9, 10].map(|id| places.is_superseded(id)), [true, false, false, false]);
        assert_eq!((places.take(loader, 0, 0), places.is_superseded(0)), (None, false));
        assert_eq!([7, 10, 0].map(|id| places.has(loader, 0, id)), [false, true, true]);
    }
}

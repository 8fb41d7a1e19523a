//! Which parameter servers have died in this attempt and are not back, and whether one that dies may be: only where each step waits for all.

use std::cell::{Cell, RefCell};
use std::collections::BTreeSet;

use rectrain_roles::events::JobEvent;

/// See the module's text.
#[derive(Debug, Default)]
pub(super) struct Servers {
    has_barrier: Cell<bool>,
    away: RefCell<BTreeSet<u32>>,
}

impl Servers {
    /// An attempt begins, in a mode with a barrier or without.
    pub(super) fn begin(&self, has_barrier: bool) {
        self.has_barrier.set(has_barrier);
        self.away.borrow_mut().clear();
    }

    /// A server has died; whether another may find its rows. One that dies before it is back does not get a third.
    pub(super) fn died(&self, index: u32) -> bool {
        self.has_barrier.get() && self.away.borrow_mut().insert(index)
    }

    /// Servers that died and are not back.
    pub(super) fn away(&self) -> u32 {
        self.away.borrow().len() as u32
    }

    /// Notes what an event says; `has_barrier` tells which modes, by name, have one.
    pub(super) fn take(&self, event: &JobEvent, has_barrier: impl Fn(&str) -> bool) {
        match event {
            JobEvent::Started { mode, .. } | JobEvent::ModeSwitched { to: mode, .. } => {
                self.has_barrier.set(has_barrier(mode));
            }
            JobEvent::ServerKeptRows { member } => {
                self.away.borrow_mut().retain(|index| *member != format!("ps {index}"));
            }
            _ => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_server_is_replaced_where_there_is_a_barrier_and_once_before_it_is_back() {
        let has_barrier = |mode: &str| mode == "sync";
        let servers = Servers::default();
        servers.begin(true);
        assert!(servers.died(0) && servers.died(1) && !servers.died(0));
        servers.take(&JobEvent::ServerKeptRows { member: "ps 0".to_owned() }, has_barrier);
        assert_eq!((servers.away(), servers.died(0), servers.away()), (1, true, 2));
        servers.begin(true);
        let switched = |to: &str| JobEvent::ModeSwitched { step: 1, from: String::new(), to: to.to_owned() };
        servers.take(&switched("gba"), has_barrier);
        assert_eq!((servers.died(0), servers.away()), (false, 0));
        servers.take(&switched("sync"), has_barrier);
        assert!(servers.died(0));
    }
}

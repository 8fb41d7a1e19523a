//! Whether another may take the place of a member that has died: of an embedding worker or a loader always, of a parameter server where
//! it finds the rows, of a dense worker where there are others.

use std::cell::RefCell;
use std::collections::BTreeSet;

use rectrain_kinds::Role;
use rectrain_protocol::events::JobEvent;

/// See the module's text.
#[derive(Debug, Default)]
pub(super) struct Succession {
    /// Parameter servers and dense workers that have died in this attempt and are not back, as events name them.
    away: RefCell<BTreeSet<String>>,
    /// Parameter servers that were told to end, and hold nothing any more when they have.
    leaving: RefCell<BTreeSet<String>>,
}

impl Succession {
    /// An attempt begins.
    pub(super) fn begin(&self) {
        self.away.borrow_mut().clear();
        self.leaving.borrow_mut().clear();
    }

    /// Whether another may take the place of a member that has died, of a role that has so many, as far as is known here: whether it found what
    /// it needs, it tells the coordinator, who ends the attempt if not. `keeps_rows`: parameter servers have theirs in shared memory. One that
    /// dies before it is back does not get a third.
    pub(super) fn may_be_replaced(&self, role: Role, index: u32, members: u32, keeps_rows: bool) -> bool {
        let has_what_it_needs = match role {
            Role::Coordinator => false,
            Role::EmbeddingWorker | Role::Loader => return true,
            Role::Ps => keeps_rows || self.leaving.borrow().contains(&name(role, index)),
            Role::DenseWorker => members > 1,
        };
        has_what_it_needs && !self.away.borrow().contains(&name(role, index))
    }

    /// Another is on the way.
    pub(super) fn is_replaced(&self, role: Role, index: u32) {
        if !role.is_replaceable() {
            let name = name(role, index);
            self.leaving.borrow_mut().remove(&name);
            self.away.borrow_mut().insert(name);
        }
    }

    /// Those that died and are not back.
    pub(super) fn away(&self) -> u32 {
        self.away.borrow().len() as u32
    }

    /// Notes what an event says.
    pub(super) fn take(&self, event: &JobEvent) {
        if let JobEvent::ServerKeptRows { member } | JobEvent::Rejoined { member, .. } = event {
            self.away.borrow_mut().remove(member);
        }
        if let JobEvent::Leaving { member } = event {
            self.leaving.borrow_mut().insert(member.clone());
        }
    }
}

fn name(role: Role, index: u32) -> String {
    format!("{} {index}", role.name())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn back(member: &str) -> JobEvent {
        JobEvent::ServerKeptRows { member: member.to_owned() }
    }

    impl Succession {
        fn died(&self, role: Role, index: u32, members: u32, keeps_rows: bool) -> bool {
            let is_replaced = self.may_be_replaced(role, index, members, keeps_rows);
            if is_replaced {
                self.is_replaced(role, index);
            }
            is_replaced
        }
    }

    #[test]
    fn a_server_is_replaced_where_it_finds_its_rows_and_once_before_it_is_back() {
        let succession = Succession::default();
        let died = |index| succession.died(Role::Ps, index, 2, true);
        assert!(died(0) && died(1) && !died(0));
        assert!(!succession.died(Role::Ps, 7, 8, false), "its rows have died with it");
        succession.take(&back("ps 0"));
        assert_eq!((succession.away(), died(0), succession.away()), (1, true, 2));
        succession.begin();
        assert_eq!((succession.away(), died(0)), (0, true));
    }

    #[test]
    fn a_server_that_was_told_to_end_is_replaced_wherever_its_rows_are() {
        let succession = Succession::default();
        succession.take(&JobEvent::Leaving { member: "ps 1".to_owned() });
        assert!(!succession.died(Role::Ps, 0, 2, false) && succession.died(Role::Ps, 1, 2, false));
        assert!(!succession.died(Role::Ps, 1, 2, false), "it is not back");
        succession.take(&JobEvent::Rejoined { member: "ps 1".to_owned(), chunks: 0 });
        assert_eq!(succession.away(), 0);
    }

    #[test]
    fn a_dense_worker_is_replaced_where_there_are_others() {
        let succession = Succession::default();
        assert!(!succession.died(Role::DenseWorker, 0, 1, true), "nobody else has its parameters");
        assert!(succession.died(Role::DenseWorker, 1, 2, true));
        assert!(!succession.died(Role::DenseWorker, 1, 2, true), "it is not back");
        succession.take(&JobEvent::Rejoined { member: "dense-worker 1".to_owned(), chunks: 0 });
        assert_eq!(succession.away(), 0);
    }

    #[test]
    fn who_holds_nothing_is_always_replaced() {
        let succession = Succession::default();
        for role in [Role::EmbeddingWorker, Role::Loader] {
            assert!(succession.died(role, 0, 1, false) && succession.died(role, 0, 1, false));
        }
        assert_eq!(succession.away(), 0);
    }

    #[test]
    fn one_that_is_not_replaced_after_all_is_not_away() {
        let succession = Succession::default();
        assert!(succession.may_be_replaced(Role::Ps, 0, 1, true));
        assert_eq!(succession.away(), 0);
    }
}

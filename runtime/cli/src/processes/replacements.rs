//! Decides whether a dead member may be replaced while the others continue. An embedding worker or
//! a loader always may. A parameter server may if its replacement finds the rows. A dense worker
//! may if there are other dense workers.

use std::cell::RefCell;
use std::collections::BTreeSet;

use rectrain_kinds::Role;
use rectrain_protocol::events::JobEvent;

/// See the module's text.
#[derive(Debug, Default)]
pub(super) struct Replacements {
    /// Parameter servers and dense workers of this attempt whose replacement has not joined yet.
    /// The names are those in events.
    pending: RefCell<BTreeSet<String>>,
    /// Parameter servers that got SIGTERM. They hold no rows when they end.
    leaving: RefCell<BTreeSet<String>>,
}

impl Replacements {
    /// A new attempt starts: forgets the previous one.
    pub(super) fn begin_attempt(&self) {
        self.pending.borrow_mut().clear();
        self.leaving.borrow_mut().clear();
    }

    /// True if a dead member may be replaced. `members` is the number of members of its role.
    /// `keeps_rows`: parameter servers have their rows in shared memory. The replacement reports to
    /// the coordinator whether it found all it needs. If not, the coordinator ends the attempt. A
    /// replacement that dies before it has joined is not replaced.
    pub(super) fn may_be_replaced(&self, role: Role, index: u32, members: u32, keeps_rows: bool) -> bool {
        let has_what_it_needs = match role {
            _ if role.is_replaceable() => return true,
            Role::Ps => keeps_rows || self.leaving.borrow().contains(&name(role, index)),
            Role::DenseWorker => members > 1,
            _ => false,
        };
        has_what_it_needs && !self.pending.borrow().contains(&name(role, index))
    }

    /// Records that a replacement of a member starts.
    pub(super) fn start(&self, role: Role, index: u32) {
        if !role.is_replaceable() {
            let name = name(role, index);
            self.leaving.borrow_mut().remove(&name);
            self.pending.borrow_mut().insert(name);
        }
    }

    /// The number of replacements that have not joined yet.
    pub(super) fn pending(&self) -> u32 {
        self.pending.borrow().len() as u32
    }

    /// Records an event of the job.
    pub(super) fn record(&self, event: &JobEvent) {
        if let JobEvent::ServerKeptRows { member } | JobEvent::Rejoined { member, .. } = event {
            self.pending.borrow_mut().remove(member);
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

    impl Replacements {
        fn died(&self, role: Role, index: u32, members: u32, keeps_rows: bool) -> bool {
            let is_replaced = self.may_be_replaced(role, index, members, keeps_rows);
            if is_replaced {
                self.start(role, index);
            }
            is_replaced
        }
    }

    #[test]
    fn a_server_is_replaced_once_and_only_if_its_rows_are_kept() {
        let replacements = Replacements::default();
        let died = |index| replacements.died(Role::Ps, index, 2, true);
        assert!(died(0) && died(1) && !died(0));
        assert!(!replacements.died(Role::Ps, 7, 8, false), "its rows are lost");
        replacements.record(&back("ps 0"));
        assert_eq!((replacements.pending(), died(0), replacements.pending()), (1, true, 2));
        replacements.begin_attempt();
        assert_eq!((replacements.pending(), died(0)), (0, true));
    }

    #[test]
    fn a_drained_server_is_replaced_without_its_rows() {
        let replacements = Replacements::default();
        replacements.record(&JobEvent::Leaving { member: "ps 1".to_owned() });
        assert!(!replacements.died(Role::Ps, 0, 2, false) && replacements.died(Role::Ps, 1, 2, false));
        assert!(!replacements.died(Role::Ps, 1, 2, false), "its replacement has not joined");
        replacements.record(&JobEvent::Rejoined { member: "ps 1".to_owned(), chunks: 0 });
        assert_eq!(replacements.pending(), 0);
    }

    #[test]
    fn a_dense_worker_is_replaced_only_if_there_are_others() {
        let replacements = Replacements::default();
        assert!(!replacements.died(Role::DenseWorker, 0, 1, true), "no other worker has its parameters");
        assert!(replacements.died(Role::DenseWorker, 1, 2, true));
        assert!(!replacements.died(Role::DenseWorker, 1, 2, true), "its replacement has not joined");
        replacements.record(&JobEvent::Rejoined { member: "dense-worker 1".to_owned(), chunks: 0 });
        assert_eq!(replacements.pending(), 0);
    }

    #[test]
    fn embedding_workers_and_loaders_are_always_replaced() {
        let replacements = Replacements::default();
        for role in [Role::EmbeddingWorker, Role::Loader] {
            assert!(replacements.died(role, 0, 1, false) && replacements.died(role, 0, 1, false));
        }
        assert_eq!(replacements.pending(), 0);
    }

    #[test]
    fn asking_whether_a_member_may_be_replaced_changes_nothing() {
        let replacements = Replacements::default();
        assert!(replacements.may_be_replaced(Role::Ps, 0, 1, true));
        assert_eq!(replacements.pending(), 0);
    }
}

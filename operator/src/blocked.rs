//! Members of an attempt whose pods cannot start: a node cannot pull the image, no node has room, a
//! quota is used up, or the pod before does not end.
//!
//! A job without such a member makes no progress, and that is no stall: another attempt could not
//! start either, and the pods that run would lose their state. So the time without progress counts
//! from the moment at which no member is blocked any longer.

use jiff::Timestamp;
use rectrain_crds::{AttemptStatus, Role};

use crate::failure;
use crate::pods::PodFacts;

/// One look at the members of an attempt.
#[derive(Clone, Copy)]
pub struct BlockedLook<'a> {
    /// The attempt.
    pub attempt: &'a AttemptStatus,
    /// The job's pods.
    pub pods: &'a [PodFacts],
    /// Whether the cluster refuses to create a pod of the job.
    pub is_refused: bool,
    /// The present.
    pub now: Timestamp,
}

/// The last look at which a member of an attempt was blocked.
#[derive(Clone, Debug, Default)]
pub struct BlockedMemory {
    attempt: Option<u32>,
    at: Option<Timestamp>,
}

impl BlockedMemory {
    /// Adds a look. Returns the time of the last one at which a member was blocked.
    pub fn look(&mut self, look: BlockedLook<'_>) -> Option<Timestamp> {
        let is_first = self.attempt != Some(look.attempt.number);
        if is_first {
            *self = Self { attempt: Some(look.attempt.number), at: None };
        }
        if look.is_blocked(is_first) {
            self.at = Some(look.now);
        }
        self.at
    }
}

impl BlockedLook<'_> {
    /// Whether a member is blocked. Members that have not joined yet do not count, because training
    /// does not wait for them. A new operator does not know yet whether a missing pod is refused.
    fn is_blocked(&self, is_first: bool) -> bool {
        Role::ALL.into_iter().any(|role| {
            let members = self.members(role);
            let pods = self.pods_of(role, members);
            let is_missing = pods.len() < members as usize && (self.is_refused || is_first);
            is_missing || failure::stuck(&pods, self.now).or_else(|| failure::waiting(&pods, self.now)).is_some()
        })
    }

    /// Members of a role that participate.
    fn members(&self, role: Role) -> u32 {
        let replicas = self.attempt.replicas.as_ref();
        let of_role = replicas.and_then(|replicas| replicas.get(role)).map(|of_role| of_role.present);
        of_role.unwrap_or(u32::from(role == Role::Coordinator))
    }

    fn pods_of(&self, role: Role, members: u32) -> Vec<&PodFacts> {
        let is_member = |pod: &&PodFacts| pod.role == role && pod.attempt == self.attempt.number;
        let pods = self.pods.iter().filter(is_member);
        pods.filter(|pod| pod.index().is_some_and(|index| index < members)).collect()
    }
}

#[cfg(test)]
mod tests {
    use rectrain_crds::{AttemptReplicas, RoleReplicas};

    use super::*;

    fn seconds(seconds: i64) -> Timestamp {
        Timestamp::from_second(seconds).expect("a time")
    }

    /// An attempt with two parameter servers, and a third that has not joined.
    fn attempt(number: u32) -> AttemptStatus {
        let ps = RoleReplicas { started: 2, wanted: 3, present: 2, needed: 3 };
        let replicas = Some(AttemptReplicas { ps, ..AttemptReplicas::default() });
        AttemptStatus { number, replicas, ..AttemptStatus::default() }
    }

    fn pods() -> Vec<PodFacts> {
        let server = |index: u32| PodFacts::running(&format!("j-ps-{index}"), Role::Ps, 1);
        (0..3).map(server).chain([PodFacts::running("j-coordinator-0", Role::Coordinator, 1)]).collect()
    }

    fn without_image(pod: &mut PodFacts) {
        pod.waiting = Some(("ImagePullBackOff".to_owned(), "because".to_owned()));
    }

    #[test]
    fn a_member_that_cannot_start_is_blocked_and_a_joiner_is_not() {
        let attempt = attempt(1);
        let mut memory = BlockedMemory::default();
        let mut look = |pods: &[PodFacts], is_refused: bool, now: i64| {
            memory.look(BlockedLook { attempt: &attempt, pods, is_refused, now: seconds(now) })
        };
        let all = pods();
        assert_eq!(look(&all, false, 1), None);
        let mut joiner = pods();
        without_image(&mut joiner[2]);
        assert_eq!(look(&joiner, false, 2), None);
        let mut member = pods();
        without_image(&mut member[1]);
        assert_eq!(look(&member, false, 3), Some(seconds(3)));
        assert_eq!(look(&all, false, 4), Some(seconds(3)), "the time remains");
        assert_eq!(look(&all[..2], true, 5), Some(seconds(5)), "its coordinator is refused");
        assert_eq!(look(&all[1..], false, 6), Some(seconds(5)), "it is about to be created");
    }

    #[test]
    fn a_new_operator_counts_missing_pods_as_blocked() {
        let all = pods();
        for (attempts, expected) in [([1, 1], Some(seconds(7))), ([2, 2], Some(seconds(7))), ([1, 2], None)] {
            let mut memory = BlockedMemory::default();
            let [first, second] = attempts.map(attempt);
            let missing = BlockedLook { attempt: &first, pods: &all[1..], is_refused: false, now: seconds(7) };
            assert_eq!(memory.look(missing), Some(seconds(7)));
            let own: Vec<PodFacts> = all.iter().map(|pod| PodFacts { attempt: second.number, ..pod.clone() }).collect();
            let later = BlockedLook { attempt: &second, pods: &own, is_refused: false, now: seconds(9) };
            assert_eq!(memory.look(later), expected);
        }
    }
}

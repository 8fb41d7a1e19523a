//! The decisions in a job's status: reading them, and adding new ones. Pure.
//!
//! The status holds a decision before the operator carries it out. An operator that dies in between
//! continues from there.

use jiff::Timestamp;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use rectrain_crds::{
    DecisionAction, DecisionStatus, DecisionSubject, Mode, ModeSpec, RecTrainingJobStatus, ResolvedJob, Role,
};
use rectrain_policy::{Action, AutoMode, Decision, History, Subject};

use crate::text::shorten;

/// Decisions about each subject that a status keeps.
const KEPT: usize = 8;
/// Raises of the memory limit that a status keeps.
const RAISES_KEPT: usize = 16;
/// Bytes of a reason that a status keeps.
const MOST: usize = 1000;

/// The mode of `auto`: the last decided mode, or the one that training starts in.
#[must_use]
pub fn mode(status: Option<&RecTrainingJobStatus>) -> Mode {
    let decided = status.and_then(|status| last(&status.decisions, DecisionSubject::Mode));
    match decided.map(|decided| &decided.action) {
        Some(DecisionAction::SwitchMode { to, .. }) if AutoMode::try_from(*to).is_ok() => *to,
        _ => ModeSpec::Auto.first(),
    }
}

/// The subject of decisions about a role's number of members. The operator decides about no other
/// roles.
#[must_use]
pub fn subject(role: Role) -> Option<DecisionSubject> {
    match role {
        Role::Ps => Some(DecisionSubject::Ps),
        Role::EmbeddingWorker => Some(DecisionSubject::EmbeddingWorker),
        Role::DenseWorker => Some(DecisionSubject::DenseWorker),
        Role::Loader => Some(DecisionSubject::Loader),
        Role::Coordinator => None,
    }
}

/// The number of a role's members by the last decision that was carried out, within the manifest's
/// bounds. It stays in force if later decisions are only recommended.
#[must_use]
pub fn replicas(status: Option<&RecTrainingJobStatus>, job: &ResolvedJob, role: Role) -> Option<u32> {
    let given = job.autoscaling.as_ref()?;
    let bounds = match role {
        Role::Ps => given.ps?.bounds,
        Role::EmbeddingWorker => given.embedding_worker?.bounds,
        Role::DenseWorker => given.dense_worker?.bounds,
        Role::Loader => given.loader?.bounds,
        Role::Coordinator => return None,
    };
    let subject = subject(role)?;
    let of_role = status?.decisions.iter().rev().filter(|decided| decided.subject == subject);
    let decided = of_role.filter_map(carried_out_replicas).next()?;
    Some(decided.clamp(bounds.min, bounds.max))
}

/// The new number of members, if the decision scales a role and is carried out.
fn carried_out_replicas(decided: &DecisionStatus) -> Option<u32> {
    match decided.action {
        DecisionAction::Scale { to, .. } if decided.applied => Some(to),
        _ => None,
    }
}

/// The memory limit of parameter servers before the operator raised it: the manifest's at that
/// time. `None` if it was never raised.
#[must_use]
pub fn memory_before_raises(status: &RecTrainingJobStatus) -> Option<u64> {
    let raises = status.decisions.iter().rev().filter(|decided| decided.applied);
    let raises = raises.filter_map(|decided| match decided.action {
        DecisionAction::RaiseMemory { from_bytes, to_bytes, .. } => Some((from_bytes, to_bytes)),
        _ => None,
    });
    // A raise that does not continue the raise before it started from another manifest.
    raises.fold(None, |first, (from, to)| match first {
        Some(first) if first != to => Some(first),
        _ => Some(from),
    })
}

/// The memory limit of the next attempt's parameter servers, if the decision raises it and is
/// carried out.
#[must_use]
pub fn raised_memory(decided: &DecisionStatus) -> Option<u64> {
    match decided.action {
        DecisionAction::RaiseMemory { to_bytes, .. } if decided.applied => Some(to_bytes),
        _ => None,
    }
}

/// Time of the decision to rebalance the slots, in seconds since 1970. `None` unless it is the
/// newest decision about parameter servers, is carried out, and is within the cool-down; afterwards
/// the operator decides again.
#[must_use]
pub fn rebalance(status: &RecTrainingJobStatus, job: &ResolvedJob, now: Timestamp) -> Option<u64> {
    let cool_down = job.autoscaling.as_ref()?.cool_down_seconds;
    let decided = last(&status.decisions, DecisionSubject::Ps).filter(|decided| decided.applied)?;
    let DecisionAction::Rebalance { .. } = decided.action else { return None };
    let decided_seconds = u64::try_from(decided.time.0.as_second()).ok()?;
    let since = u64::try_from(now.as_second()).ok()?.checked_sub(decided_seconds)?;
    (since <= u64::from(cool_down)).then_some(decided_seconds)
}

/// The reason to switch to `mode`: of the newest decision about the mode, if it is that. Empty
/// otherwise.
#[must_use]
pub fn switch_reason(status: Option<&RecTrainingJobStatus>, mode: Mode) -> &str {
    reason(
        status,
        DecisionSubject::Mode,
        |action| matches!(action, DecisionAction::SwitchMode { to, .. } if *to == mode),
    )
}

/// The reason to have `replicas` members of a role: of the newest decision about it, if it is that.
/// Empty otherwise.
#[must_use]
pub fn scale_reason(status: &RecTrainingJobStatus, role: Role, replicas: u32) -> &str {
    let is_it = |action: &DecisionAction| match action {
        DecisionAction::Scale { to, .. } => *to == replicas,
        DecisionAction::Rebalance { servers } => *servers == replicas,
        _ => false,
    };
    subject(role).map_or("", |subject| reason(Some(status), subject, is_it))
}

fn reason(
    status: Option<&RecTrainingJobStatus>,
    subject: DecisionSubject,
    is_it: impl Fn(&DecisionAction) -> bool,
) -> &str {
    let decided = status.and_then(|status| last(&status.decisions, subject));
    decided.filter(|decided| decided.applied && is_it(&decided.action)).map_or("", |decided| &decided.reason)
}

/// The newest decision about `subject`.
#[must_use]
pub fn last(decisions: &[DecisionStatus], subject: DecisionSubject) -> Option<&DecisionStatus> {
    decisions.iter().rev().find(|decided| decided.subject == subject)
}

/// The policy's history of a job, when an operator starts to lead.
#[must_use]
pub fn history(status: Option<&RecTrainingJobStatus>) -> History {
    History::from_decisions(decided(status))
}

/// The decisions about a job, as far as its status keeps them.
pub fn decided(status: Option<&RecTrainingJobStatus>) -> impl Iterator<Item = Decision> {
    status.into_iter().flat_map(|status| &status.decisions).filter_map(read)
}

/// The decisions that a status keeps, the new ones last. It keeps the newest about each subject,
/// the one that sets the number of a role's members, and raises of the memory limit.
#[must_use]
pub fn kept(before: &[DecisionStatus], new: &[DecisionStatus]) -> Vec<DecisionStatus> {
    let all: Vec<_> = before.iter().chain(new).collect();
    let kept = all.iter().enumerate().filter(|(place, decided)| is_kept(decided, &all[place + 1..]));
    kept.map(|(_, decided)| (*decided).clone()).collect()
}

/// Whether a status keeps a decision, given all `later` decisions.
fn is_kept(decided: &DecisionStatus, later: &[&DecisionStatus]) -> bool {
    let is_raise = |decided: &DecisionStatus| raised_memory(decided).is_some();
    let (mut newer, mut raises, mut is_replaced) = (0, 0, false);
    for later in later.iter().filter(|later| later.subject == decided.subject) {
        newer += 1;
        raises += usize::from(is_raise(later));
        is_replaced |= carried_out_replicas(later).is_some();
    }
    // Other decisions must not displace the number of members. Nor the limit before the raises: a
    // raise is by half, so there are few.
    let sets_replicas = carried_out_replicas(decided).is_some() && !is_replaced;
    newer < KEPT || sets_replicas || is_raise(decided) && raises < RAISES_KEPT
}

/// A decision as a status keeps it. `None` if it changes nothing.
#[must_use]
pub fn write(decision: &Decision, recommends_only: bool) -> Option<DecisionStatus> {
    let subject = match decision.subject {
        Subject::Mode => DecisionSubject::Mode,
        Subject::Ps => DecisionSubject::Ps,
        Subject::EmbeddingWorker => DecisionSubject::EmbeddingWorker,
        Subject::DenseWorker => DecisionSubject::DenseWorker,
        Subject::Loader => DecisionSubject::Loader,
    };
    let action = match decision.action {
        Action::Keep => return None,
        Action::SwitchMode { from, to } => DecisionAction::SwitchMode { from: from.into(), to: to.into() },
        Action::Scale { from, to } => DecisionAction::Scale { from, to },
        Action::Rebalance { replicas } => DecisionAction::Rebalance { servers: replicas },
        Action::RaiseMemory { replica, from_bytes, to_bytes } => {
            DecisionAction::RaiseMemory { replica, from_bytes, to_bytes }
        }
    };
    let time = Timestamp::from_second(i64::try_from(decision.at_seconds).ok()?).ok()?;
    let applied = subject == DecisionSubject::Mode || !recommends_only;
    Some(DecisionStatus { subject, time: Time(time), action, applied, reason: shorten(&decision.reason, MOST) })
}

/// The reverse of [`write`]. `None` for a decision that this version does not know.
fn read(written: &DecisionStatus) -> Option<Decision> {
    let subject = match written.subject {
        DecisionSubject::Mode => Subject::Mode,
        DecisionSubject::Ps => Subject::Ps,
        DecisionSubject::EmbeddingWorker => Subject::EmbeddingWorker,
        DecisionSubject::DenseWorker => Subject::DenseWorker,
        DecisionSubject::Loader => Subject::Loader,
    };
    let action = match written.action {
        DecisionAction::SwitchMode { from, to } => {
            Action::SwitchMode { from: from.try_into().ok()?, to: to.try_into().ok()? }
        }
        DecisionAction::Scale { from, to } => Action::Scale { from, to },
        DecisionAction::Rebalance { servers } => Action::Rebalance { replicas: servers },
        DecisionAction::RaiseMemory { replica, from_bytes, to_bytes } => {
            Action::RaiseMemory { replica, from_bytes, to_bytes }
        }
        DecisionAction::Unknown(_) => return None,
    };
    let at_seconds = u64::try_from(written.time.0.as_second()).ok()?;
    Some(Decision { at_seconds, subject, action, reason: written.reason.clone() })
}

#[cfg(test)]
mod tests {
    use serde_json::Value;

    use super::*;

    fn decision(at_seconds: u64, subject: Subject, action: Action) -> Decision {
        Decision { at_seconds, subject, action, reason: "why".to_owned() }
    }

    const TO_GBA: Action = Action::SwitchMode { from: AutoMode::Sync, to: AutoMode::Gba };

    #[test]
    fn written_decisions_are_read_again() {
        let made = [
            decision(7, Subject::Mode, TO_GBA),
            decision(8, Subject::Ps, Action::RaiseMemory { replica: 1, from_bytes: 5, to_bytes: 7 }),
            decision(9, Subject::DenseWorker, Action::Scale { from: 2, to: 4 }),
            decision(10, Subject::Ps, Action::Rebalance { replicas: 3 }),
        ];
        let written: Vec<_> = made.iter().filter_map(|decision| write(decision, true)).collect();
        assert_eq!(written.iter().map(|written| written.applied).collect::<Vec<_>>(), [true, false, false, false]);
        let status = RecTrainingJobStatus { decisions: written, ..RecTrainingJobStatus::default() };
        assert_eq!(history(Some(&status)).decisions(), made);
        assert_eq!((mode(Some(&status)), mode(None)), (Mode::Gba, Mode::Sync));
    }

    /// Adds `count` decisions, one after the other.
    fn add(
        kept_before: &[DecisionStatus],
        from_seconds: u64,
        count: u64,
        subject: Subject,
        action: Action,
    ) -> Vec<DecisionStatus> {
        let mut all = kept_before.to_vec();
        for at_seconds in from_seconds..from_seconds + count {
            let new = write(&decision(at_seconds, subject, action), subject == Subject::Mode);
            all = kept(&all, new.as_slice());
        }
        all
    }

    #[test]
    fn a_status_keeps_the_newest_decisions_about_each_subject() {
        let raised = Action::RaiseMemory { replica: 1, from_bytes: 5, to_bytes: 7 };
        let servers = [raised, Action::Rebalance { replicas: 3 }];
        let made = (7..).zip(servers).filter_map(|(at, action)| write(&decision(at, Subject::Ps, action), true));
        let all = add(&made.collect::<Vec<_>>(), 11, 30, Subject::Mode, TO_GBA);
        let count = |subject| all.iter().filter(|decision| decision.subject == subject).count();
        assert_eq!((count(DecisionSubject::Mode), count(DecisionSubject::Ps)), (KEPT, 2));
        assert_eq!(all.last().map(|last| last.time.0.as_second()), Some(40));
    }

    #[test]
    fn the_number_of_members_is_kept_over_later_rebalances() {
        let scaled = add(&[], 50, 1, Subject::Ps, Action::Scale { from: 3, to: 4 });
        let kept = add(&scaled, 51, 29, Subject::Ps, Action::Rebalance { replicas: 4 });
        assert_eq!((kept.len(), &kept[0].action), (KEPT + 1, &DecisionAction::Scale { from: 3, to: 4 }));
    }

    #[test]
    fn the_limit_before_raises_is_the_one_of_their_manifest() {
        let raise = |at: u64, from_bytes: u64, to_bytes: u64| {
            write(&decision(at, Subject::Ps, Action::RaiseMemory { replica: 0, from_bytes, to_bytes }), false)
        };
        let before = |raises: &[Option<DecisionStatus>]| {
            let decisions = raises.iter().flatten().cloned().collect();
            memory_before_raises(&RecTrainingJobStatus { decisions, ..RecTrainingJobStatus::default() })
        };
        assert_eq!(before(&[]), None);
        assert_eq!(before(&[raise(1, 4, 6), raise(2, 6, 9)]), Some(4));
        assert_eq!(before(&[raise(1, 4, 6), raise(2, 8, 12), raise(3, 12, 18)]), Some(8), "of the new manifest");
        let raised: Vec<DecisionStatus> = raise(1, 4, 6).into_iter().collect();
        let told = add(&raised, 2, 28, Subject::Ps, Action::Rebalance { replicas: 4 });
        assert_eq!(before(&told.into_iter().map(Some).collect::<Vec<_>>()), Some(4), "after any later decisions");
    }

    /// A longer list would be refused by the API server, and the status could never be written
    /// again.
    #[test]
    fn the_longest_list_of_decisions_fits_into_the_schema() {
        let crd = serde_json::to_value(rectrain_crds::crd()).expect("it is JSON");
        let decisions = "/spec/versions/0/schema/openAPIV3Schema/properties/status/properties/decisions/maxItems";
        let most = crd.pointer(decisions).and_then(Value::as_u64).expect("a bound");
        let raise = Action::RaiseMemory { replica: 0, from_bytes: 4, to_bytes: 6 };
        let mut all = add(&[], 1, 1, Subject::Ps, Action::Scale { from: 3, to: 4 });
        all = add(&all, 100, 30, Subject::Ps, raise);
        all = add(&all, 200, 30, Subject::Ps, Action::Rebalance { replicas: 4 });
        all = add(&all, 300, 30, Subject::Mode, TO_GBA);
        for subject in [Subject::EmbeddingWorker, Subject::DenseWorker, Subject::Loader] {
            all = add(&all, 400, 30, subject, Action::Scale { from: 3, to: 4 });
        }
        assert!(all.len() > 4 * KEPT && all.len() as u64 <= most, "{} of {most}", all.len());
    }
}

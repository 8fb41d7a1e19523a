//! The number of replicas of a role, decided over a window of its needs ([`crate::needs`]).
//!
//! Scaling out takes the smallest need of the window and scaling in the largest (the stabilisation
//! of Kubernetes' HorizontalPodAutoscaler). So a role follows a peak or a lull only if it lasts. No
//! role changes while a change is under way, nor during its cool-down. A parameter server that was
//! killed for its memory waits for neither.
//!
//! A number that turned out to be too few is not tried again for a while: the load of the present
//! replicas predicts the load of fewer replicas only roughly.
//!
//! Uneven parameter servers have their slots rebalanced, which costs less than another server. They
//! scale out only if a rebalance does not help.

use crate::look::Look;
use crate::memory::{Kill, after_a_kill};
use crate::needs::{PsLoads, Role, need, roles, scaled_up};
use crate::{Action, Decision, ReplicaBounds, ReplicaCount, Subject, Verdict};

/// After a rebalance no server has more than this multiple of the mean of look-ups or bytes, as far
/// as whole slots allow (`rectrain_modes::migration::plan_moves`).
const EVEN: f64 = 1.1;
/// Below this share of their targets, servers are not worth moving rows for.
const WORTH_SPREADING: f64 = 0.5;
/// Cool-downs after slots moved, for a rebalance or for another number of servers, in which they
/// are not rebalanced again: single slots may exceed an even share.
const SPREAD_COOL_DOWNS: u64 = 12;

pub(crate) fn decide(look: Look<'_>) -> Vec<Decision> {
    let at_seconds = look.observations.at_seconds;
    let roles = roles(look.policy, look.observations);
    roles.into_iter().map(|role| verdict(look, role).into_decision(at_seconds, role.subject)).collect()
}

fn verdict(look: Look<'_>, role: Role) -> Verdict {
    let Role { subject, bounds, count } = role;
    let Some(count) = count else { return Verdict::keep("the number of replicas is not known") };
    let present = present(look, subject, count);
    if let Some(verdict) = after_kill(look, subject, present) {
        return verdict;
    }
    if let Some(verdict) = outside_bounds(bounds, present) {
        return verdict;
    }
    let Some(settled) = role.settled() else {
        return Verdict::keep(format!("{} of {} are ready: a change is under way", count.ready, count.wanted));
    };
    let facts = match need(look, subject, settled) {
        Ok(need) => need.facts,
        Err(unknown) => return Verdict::keep(unknown.to_string()),
    };
    let verdict = scale(look, Scaled { subject, bounds, present, settled }, facts);
    after_cool_down(look, subject, verdict)
}

/// The number to compare with: a recommendation changes nothing, so the next decision is compared
/// with the last recommendation.
fn present(look: Look<'_>, subject: Subject, count: ReplicaCount) -> u32 {
    let recommended = look.history.decided_replicas(subject).filter(|_| look.policy.scaling.recommends_only);
    recommended.unwrap_or(count.wanted)
}

fn after_kill(look: Look<'_>, subject: Subject, present: u32) -> Option<Verdict> {
    let replica = look.history.killed_for_memory().filter(|_| subject == Subject::Ps)?;
    let limit_bytes = look.observations.ps.get(replica as usize).and_then(|ps| ps.limit_bytes);
    Some(after_a_kill(look.policy.ps.as_ref()?, Kill { replica, limit_bytes, servers: present }))
}

fn outside_bounds(bounds: ReplicaBounds, present: u32) -> Option<Verdict> {
    let to = bounds.clamp(present);
    let reason = || format!("{present} is outside the manifest's range of {} to {}", bounds.min, bounds.max);
    (to != present).then(|| Verdict::act(Action::Scale { from: present, to }, reason()))
}

/// A role without a change under way.
struct Scaled {
    subject: Subject,
    bounds: ReplicaBounds,
    /// The number to compare with.
    present: u32,
    /// The number that is ready.
    settled: u32,
}

fn scale(look: Look<'_>, role: Scaled, mut facts: String) -> Verdict {
    let Scaled { subject, bounds, present, settled } = role;
    let scaling = &look.policy.scaling;
    let window = look.history.needed.get(&subject);
    let over = |seconds| window.and_then(|window| window.over(seconds));
    let up = over(scaling.up_window_seconds).and_then(|needed| needed.into_iter().min());
    let down = over(scaling.down_window_seconds).and_then(|needed| needed.into_iter().max());
    let too_few = look.history.too_few(subject, scaling.cool_down_seconds, look.observations.at_seconds);
    let too_few = too_few.filter(|too_few| down.is_some_and(|down| down <= *too_few));
    if let Some(too_few) = too_few {
        facts += &format!("; {too_few} were too few when tried");
    }
    let down = down.max(too_few.map(|too_few| too_few.saturating_add(1)));
    let to = match (up.map(|up| bounds.clamp(up)), down.map(|down| bounds.clamp(down))) {
        (Some(up), _) if up > present => up,
        (_, Some(down)) if down < present => down,
        (None, _) => return Verdict::keep(format!("less than {} s were measured", scaling.up_window_seconds)),
        _ => present,
    };
    match spread(look, subject, settled) {
        Some(Spread { enough, uneven }) if to == present || to > present && enough <= present => {
            Verdict::act(Action::Rebalance { replicas: settled }, format!("{uneven}; {facts}"))
        }
        _ if to == present => Verdict::keep(format!(
            "{facts}; keeping {present}: within tolerance, or outside it for less than the window"
        )),
        _ => Verdict::act(Action::Scale { from: present, to }, facts),
    }
}

/// Turns an action during the cool-down into a reason to keep.
fn after_cool_down(look: Look<'_>, subject: Subject, verdict: Verdict) -> Verdict {
    let Verdict::Act { action, reason } = verdict else { return verdict };
    let now = look.observations.at_seconds;
    let cool_down = look.policy.scaling.cool_down_seconds;
    match look.history.last(subject) {
        Some(last) if now < last.at_seconds.saturating_add(cool_down) => {
            let since = now.saturating_sub(last.at_seconds);
            Verdict::keep(format!("{reason}; the last decision was {since} s ago, and the cool-down is {cool_down} s"))
        }
        _ => Verdict::Act { action, reason },
    }
}

/// A reason to rebalance the slots of the parameter servers.
struct Spread {
    /// The number of servers that would be enough with even slots.
    enough: u32,
    /// The unevenness, in words.
    uneven: String,
}

/// Whether to rebalance the slots of `count` parameter servers.
fn spread(look: Look<'_>, subject: Subject, count: u32) -> Option<Spread> {
    let policy = look.policy.ps.as_ref().filter(|_| subject == Subject::Ps)?;
    let scaling = &look.policy.scaling;
    let again = SPREAD_COOL_DOWNS.saturating_mul(scaling.cool_down_seconds);
    let is_spread = |last: &Decision| {
        let spreads = matches!(last.action, Action::Rebalance { .. } | Action::Scale { .. });
        spreads && look.observations.at_seconds < last.at_seconds.saturating_add(again)
    };
    if count < 2 || look.history.last(Subject::Ps).is_some_and(is_spread) {
        return None;
    }
    let least = look.history.unevenness.over(scaling.up_window_seconds)?.into_iter().reduce(f64::min)?;
    let loads = PsLoads::of(policy, look);
    let is_uneven = least > EVEN * (1.0 + scaling.tolerance) && loads.worst()? >= WORTH_SPREADING;
    is_uneven.then(|| Spread {
        enough: scaled_up(count, loads.mean().unwrap_or(1.0), scaling.tolerance),
        uneven: format!("one server has {least:.2} times the mean of look-ups or bytes; {EVEN:.2} is the limit"),
    })
}

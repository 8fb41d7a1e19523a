//! The numbers of members of a job's roles while it trains. Pure; [`crate::phase`] decides with it
//! and `reconcile` sends the requests.
//!
//! It decides how many members an attempt starts with, how many to ask the coordinator for, and how
//! many pods the job needs meanwhile.
//!
//! The wanted numbers come from the manifest or from automatic decisions. The coordinator moves
//! slots, batches and pieces, and reports how many processes it needs: new ones before they own
//! anything, and old ones until they own nothing. The pods follow that report. So an operator that
//! dies between two of these steps finds the rest to do, and no pod goes that still holds a row.

use rectrain_crds::{AttemptReplicas, RecTrainingJobStatus, ResolvedJob, Role, RoleReplicas};

use crate::coordinator_view::{Rebalance, Report, Stage};
use crate::decisions;
use crate::names::manifest_replicas;
use crate::pods::PodFacts;

/// The wanted number of members of a role.
#[must_use]
pub fn wanted(status: Option<&RecTrainingJobStatus>, resolved: &ResolvedJob, role: Role) -> u32 {
    decisions::replicas(status, resolved, role).unwrap_or_else(|| manifest_replicas(role, resolved))
}

/// The members of an attempt that is about to start after the attempt `before`.
///
/// The attempt before may have ended while decided members were still joining, perhaps because no
/// node takes their pods. Training starts only when all initial members have joined, so the new
/// attempt starts without them and asks for them once it trains.
#[must_use]
pub fn starting(
    status: Option<&RecTrainingJobStatus>,
    resolved: &ResolvedJob,
    before: Option<&AttemptReplicas>,
) -> AttemptReplicas {
    let mut replicas = AttemptReplicas::default();
    for role in Role::MEMBERS {
        let wanted = wanted(status, resolved, role);
        let is_decided = decisions::replicas(status, resolved, role).is_some();
        let before = before.and_then(|before| before.get(role)).filter(|before| is_decided && before.wanted == wanted);
        let started = before.map_or(wanted, |before| before.present.clamp(1, wanted.max(1)));
        if let Some(of_role) = replicas.get_mut(role) {
            *of_role = RoleReplicas { started, wanted, present: started, needed: started };
        }
    }
    replicas
}

/// Sets the wanted numbers to the present ones of the manifest and of decisions.
pub fn want(replicas: &mut AttemptReplicas, status: Option<&RecTrainingJobStatus>, resolved: &ResolvedJob) {
    for role in Role::MEMBERS {
        if let Some(of_role) = replicas.get_mut(role) {
            of_role.wanted = wanted(status, resolved, role);
        }
    }
}

/// Whether the wanted numbers differ from the ones in `replicas`.
#[must_use]
pub fn are_others(replicas: &AttemptReplicas, status: Option<&RecTrainingJobStatus>, resolved: &ResolvedJob) -> bool {
    Role::MEMBERS.into_iter().any(|role| replicas.get(role).is_some_and(|r| r.wanted != wanted(status, resolved, role)))
}

/// Whether no member has to join or to leave.
#[must_use]
pub fn are_settled(replicas: &AttemptReplicas) -> bool {
    let all = Role::MEMBERS.into_iter().filter_map(|role| replicas.get(role));
    all.into_iter().all(|r| r.wanted == r.present && r.wanted == r.needed)
}

/// Takes over the coordinator's report of present and needed members.
pub fn follow(replicas: &mut AttemptReplicas, report: &Report) {
    for (role, reported) in &report.members {
        if let Some(of_role) = replicas.get_mut(*role) {
            of_role.present = reported.present;
            of_role.needed = reported.needed;
        }
    }
}

/// The roles and numbers of members to ask the coordinator for.
#[must_use]
pub fn to_ask(replicas: &AttemptReplicas, report: &Report, pods: &[PodFacts]) -> Vec<(Role, u32)> {
    if !matches!(report.stage, Stage::Training | Stage::Evaluating) {
        return Vec::new();
    }
    let to_ask = |role| Some((role, to_ask_of(role, replicas, report, pods)?));
    Role::MEMBERS.into_iter().filter_map(to_ask).collect()
}

/// The number of members of one role to ask for.
///
/// - While members are joining, another number is asked for only after the coordinator has aborted
///   the join: ask for the present number first.
/// - Leaving members have to leave before new ones join. A pod that is about to be deleted must not
///   be taken for the new pod of its name.
fn to_ask_of(role: Role, replicas: &AttemptReplicas, report: &Report, pods: &[PodFacts]) -> Option<u32> {
    let (replicas, reported) = (replicas.get(role)?, report.members.get(&role)?);
    if reported.wanted == replicas.wanted {
        return None;
    }
    if reported.wanted > reported.present && replicas.wanted > reported.present {
        return Some(reported.present);
    }
    let goes = |pod: &PodFacts| pod.role == role && pod.index().is_some_and(|index| index >= replicas.needed);
    let is_free = replicas.wanted <= replicas.needed || !pods.iter().any(goes);
    is_free.then_some(replicas.wanted)
}

/// The rebalance to ask the coordinator for, if the decision at `decided_seconds` is news to it and
/// no server is joining or leaving.
#[must_use]
pub fn rebalance_to_ask(replicas: &AttemptReplicas, report: &Report, decided_seconds: u64) -> Option<Rebalance> {
    let reported = report.members.get(&Role::Ps)?;
    let servers = [reported.wanted, reported.needed, replicas.ps.wanted];
    let is_settled = servers.into_iter().all(|servers| servers == reported.present);
    let is_news = report.stage == Stage::Training && report.slots_decided_seconds < decided_seconds;
    (is_settled && is_news).then_some(Rebalance { servers: reported.present, decided_seconds })
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::coordinator_view::Members;
    use crate::names::{ATTEMPT_LABEL, ROLE_LABEL};

    fn report(stage: Stage, present: u32, wanted: u32, needed: u32) -> Report {
        let members = [(Role::Ps, Members { present, wanted, needed })].into();
        Report { stage, members, ..Report::default() }
    }

    /// An attempt that started with `started` parameter servers.
    fn servers(started: u32, wanted: u32, needed: u32) -> AttemptReplicas {
        AttemptReplicas { ps: RoleReplicas { started, wanted, present: started, needed }, ..AttemptReplicas::default() }
    }

    fn pod(name: &str) -> PodFacts {
        let labels = json!({ROLE_LABEL: Role::Ps.name(), ATTEMPT_LABEL: "1"});
        let pod = serde_json::from_value(json!({"metadata": {"name": name, "labels": labels}})).expect("a pod");
        PodFacts::of(&pod).expect("one of the operator's")
    }

    /// A job with automatic decisions about parameter servers, and its status after a decision for
    /// four of them.
    fn decided(mode: &str) -> (ResolvedJob, RecTrainingJobStatus) {
        let manifest = format!(
            "{{apiVersion: rectrain.dev/v1alpha1, kind: RecTrainingJob, metadata: {{name: j}}, spec: {{model: {{kind: lr}},
             features: {{sparse: [{{name: C1}}]}}, data: {{synthetic: {{rows: 1000}}}}, autoscaling: {{mode: {mode}}},
             roles: {{ps: {{replicas: 2}}}}}}}}"
        );
        let resolved = rectrain_crds::load(&manifest, "j.yaml", &[]).expect("it is right").resolved;
        let decision = json!({"subject": "ps", "time": "2026-01-01T00:00:00Z", "from": "2", "to": "4", "applied": true, "reason": "r"});
        let status = serde_json::from_value(json!({"decisions": [decision]})).expect("a status");
        (resolved, status)
    }

    #[test]
    fn an_attempt_starts_with_the_members_that_had_joined() {
        let (resolved, status) = decided("apply");
        let ps = |before: Option<AttemptReplicas>| {
            let RoleReplicas { started, wanted, .. } = starting(Some(&status), &resolved, before.as_ref()).ps;
            (started, wanted)
        };
        let before = |wanted: u32, present: u32| {
            let ps = RoleReplicas { started: 2, wanted, present, needed: wanted };
            Some(AttemptReplicas { ps, ..AttemptReplicas::default() })
        };
        assert_eq!(ps(None), (4, 4));
        assert_eq!(ps(before(4, 2)), (2, 4), "no node took the others");
        assert_eq!(ps(before(4, 4)), (4, 4));
        assert_eq!(ps(before(2, 2)), (4, 4), "decided at its end: with fewer it would end again");
        assert_eq!(ps(before(4, 9)), (4, 4), "some were leaving");
    }

    #[test]
    fn a_carried_out_decision_holds_when_later_ones_are_recommended() {
        let (resolved, status) = decided("recommend");
        assert_eq!((wanted(Some(&status), &resolved, Role::Ps), wanted(None, &resolved, Role::Ps)), (4, 2));
    }

    #[test]
    fn servers_join_before_slots_move_and_leave_afterwards() {
        let mut servers = servers(1, 3, 1);
        let first = [pod("j-ps-0")];
        assert_eq!(to_ask(&servers, &report(Stage::Starting, 1, 1, 1), &first), [], "they are still joining");
        assert_eq!(to_ask(&servers, &report(Stage::Training, 1, 1, 1), &first), [(Role::Ps, 3)]);
        let asked = report(Stage::Training, 1, 3, 3);
        assert_eq!(to_ask(&servers, &asked, &first), []);
        follow(&mut servers, &asked);
        assert_eq!(servers.ps.needed, 3);
        servers.ps.wanted = 2;
        let three = ["j-ps-0", "j-ps-1", "j-ps-2"].map(pod);
        assert_eq!(to_ask(&servers, &report(Stage::Evaluating, 3, 3, 3), &three), [(Role::Ps, 2)]);
        let leaving = report(Stage::Training, 2, 2, 3);
        follow(&mut servers, &leaving);
        assert_eq!((servers.ps.needed, to_ask(&servers, &leaving, &three)), (3, vec![]), "the third still holds slots");
        let left = report(Stage::Training, 2, 2, 2);
        follow(&mut servers, &left);
        assert_eq!(servers.ps.needed, 2);
        servers.ps.wanted = 3;
        assert_eq!(to_ask(&servers, &left, &three), [], "the third pod is the old one");
        assert_eq!(to_ask(&servers, &left, &three[..2]), [(Role::Ps, 3)]);
    }

    #[test]
    fn a_rebalance_is_asked_for_once_per_decision() {
        let of = |wanted: u32| servers(2, wanted, 2);
        let reported = |slots_decided_seconds| Report { slots_decided_seconds, ..report(Stage::Training, 2, 2, 2) };
        assert_eq!(rebalance_to_ask(&of(2), &reported(0), 7), Some(Rebalance { servers: 2, decided_seconds: 7 }));
        assert_eq!(rebalance_to_ask(&of(2), &reported(7), 7), None, "the coordinator has accepted it");
        assert_eq!(rebalance_to_ask(&of(3), &reported(0), 7), None, "another number is wanted since");
        assert_eq!(rebalance_to_ask(&of(2), &report(Stage::Training, 2, 2, 3), 7), None, "one is leaving");
        assert_eq!(rebalance_to_ask(&of(2), &report(Stage::Evaluating, 2, 2, 2), 7), None, "training is paused");
    }

    #[test]
    fn a_restarted_coordinator_has_its_first_members_and_is_asked_again() {
        let mut servers = servers(1, 3, 3);
        let again = report(Stage::Starting, 1, 1, 1);
        follow(&mut servers, &again);
        assert_eq!(servers.ps.needed, 1);
        assert_eq!(to_ask(&servers, &report(Stage::Training, 1, 1, 1), &[pod("j-ps-0")]), [(Role::Ps, 3)]);
    }

    #[test]
    fn members_that_have_not_joined_are_given_up_first() {
        let mut servers = servers(1, 1, 3);
        let pods = [pod("j-ps-0"), pod("j-ps-1")];
        assert_eq!(to_ask(&servers, &report(Stage::Training, 1, 3, 3), &pods), [(Role::Ps, 1)]);
        servers.ps.wanted = 2;
        assert_eq!(
            to_ask(&servers, &report(Stage::Training, 1, 3, 3), &pods),
            [(Role::Ps, 1)],
            "and then the other number"
        );
    }
}

//! How many members the roles of a job have while it trains, as far as it can be decided without asking: with how many an attempt
//! starts, for how many its coordinator has to be asked, and how many pods there have to be meanwhile. Pure; [`crate::phase`] decides
//! with it and `reconcile` asks.
//!
//! What there is to be comes from the manifest, or from what was decided automatically. The coordinator moves slots, batches and
//! pieces of them and tells how many processes it needs: new ones before anything is theirs, old ones until nothing is any more. The
//! pods follow that word, so an operator that dies between any two of these steps finds the rest to do, and nobody goes who still
//! holds a row.

use rectrain_crds::{AttemptReplicas, RecTrainingJobStatus, ResolvedJob, RoleReplicas};

use crate::automatic;
use crate::coordinator::{Rebalance, Report, Stage};
use crate::names::Role;
use crate::pods::PodFacts;

/// How many members of a role there are to be.
#[must_use]
pub fn wanted(status: Option<&RecTrainingJobStatus>, resolved: &ResolvedJob, role: Role) -> u32 {
    automatic::replicas(status, resolved, role).unwrap_or_else(|| role.replicas(resolved))
}

/// Those of an attempt that is about to start, after the one `before`. Members that were decided on while that one trained and had not come when it
/// ended are asked for when training has begun: no node may have taken them, and an attempt begins only with all that it starts with.
#[must_use]
pub fn starting(
    status: Option<&RecTrainingJobStatus>,
    resolved: &ResolvedJob,
    before: Option<&AttemptReplicas>,
) -> AttemptReplicas {
    let mut replicas = AttemptReplicas::default();
    for role in Role::MEMBERS {
        let wanted = wanted(status, resolved, role);
        let is_decided = automatic::replicas(status, resolved, role).is_some();
        let before = before.and_then(|before| of(before, role)).filter(|before| is_decided && before.wanted == wanted);
        let started = before.map_or(wanted, |before| before.present.clamp(1, wanted.max(1)));
        if let Some(of_role) = of_mut(&mut replicas, role) {
            *of_role = RoleReplicas { started, wanted, present: started, needed: started };
        }
    }
    replicas
}

/// Those of a role; the coordinator is always one.
#[must_use]
pub fn of(replicas: &AttemptReplicas, role: Role) -> Option<&RoleReplicas> {
    match role {
        Role::Coordinator => None,
        Role::Ps => Some(&replicas.ps),
        Role::EmbeddingWorker => Some(&replicas.embedding_worker),
        Role::DenseWorker => Some(&replicas.dense_worker),
        Role::Loader => Some(&replicas.loader),
    }
}

fn of_mut(replicas: &mut AttemptReplicas, role: Role) -> Option<&mut RoleReplicas> {
    match role {
        Role::Coordinator => None,
        Role::Ps => Some(&mut replicas.ps),
        Role::EmbeddingWorker => Some(&mut replicas.embedding_worker),
        Role::DenseWorker => Some(&mut replicas.dense_worker),
        Role::Loader => Some(&mut replicas.loader),
    }
}

/// Members are to be as many as are wanted now.
pub fn want(replicas: &mut AttemptReplicas, status: Option<&RecTrainingJobStatus>, resolved: &ResolvedJob) {
    for role in Role::MEMBERS {
        if let Some(of_role) = of_mut(replicas, role) {
            of_role.wanted = wanted(status, resolved, role);
        }
    }
}

/// Whether others are wanted now than when the attempt was looked at last.
#[must_use]
pub fn are_others(replicas: &AttemptReplicas, status: Option<&RecTrainingJobStatus>, resolved: &ResolvedJob) -> bool {
    Role::MEMBERS.into_iter().any(|role| of(replicas, role).is_some_and(|r| r.wanted != wanted(status, resolved, role)))
}

/// Whether nobody is to come or to go.
#[must_use]
pub fn are_settled(replicas: &AttemptReplicas) -> bool {
    let all = Role::MEMBERS.into_iter().filter_map(|role| of(replicas, role));
    all.into_iter().all(|r| r.wanted == r.present && r.wanted == r.needed)
}

/// The coordinator says how many take part, and how many it needs.
pub fn follow(replicas: &mut AttemptReplicas, report: &Report) {
    for (role, told) in &report.members {
        if let Some(of_role) = of_mut(replicas, *role) {
            of_role.present = told.present;
            of_role.needed = told.needed;
        }
    }
}

/// The roles and numbers to ask the coordinator for.
#[must_use]
pub fn to_ask(replicas: &AttemptReplicas, report: &Report, pods: &[PodFacts]) -> Vec<(Role, u32)> {
    if !matches!(report.stage, Stage::Training | Stage::Evaluating) {
        return Vec::new();
    }
    let to_ask = |role| Some((role, to_ask_of(role, replicas, report, pods)?));
    Role::MEMBERS.into_iter().filter_map(to_ask).collect()
}

/// Members that have not all joined are given up before it is asked for another number of them, those that leave have to have left
/// before others come, and a pod that is about to go must not be taken for the new one of its name.
fn to_ask_of(role: Role, replicas: &AttemptReplicas, report: &Report, pods: &[PodFacts]) -> Option<u32> {
    let (replicas, told) = (of(replicas, role)?, report.members.get(&role)?);
    if told.wanted == replicas.wanted {
        return None;
    }
    if told.wanted > told.present && replicas.wanted > told.present {
        return Some(told.present);
    }
    let goes = |pod: &PodFacts| pod.role == role && pod.index().is_some_and(|index| index >= replicas.needed);
    let is_free = replicas.wanted <= replicas.needed || !pods.iter().any(goes);
    is_free.then_some(replicas.wanted)
}

/// Whether the coordinator has to be asked to spread the slots anew over as many servers, as was decided then.
#[must_use]
pub fn rebalance_to_ask(replicas: &AttemptReplicas, report: &Report, decided_seconds: u64) -> Option<Rebalance> {
    let told = report.members.get(&Role::Ps)?;
    let is_settled = [told.wanted, told.needed, replicas.ps.wanted].into_iter().all(|servers| servers == told.present);
    let is_news = report.stage == Stage::Training && report.slots_decided_seconds < decided_seconds;
    (is_settled && is_news).then_some(Rebalance { servers: told.present, decided_seconds })
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::coordinator::Members;
    use crate::names::{ATTEMPT_LABEL, ROLE_LABEL};

    fn report(stage: Stage, present: u32, wanted: u32, needed: u32) -> Report {
        let members = [(Role::Ps, Members { present, wanted, needed })].into();
        Report { stage, members, ..Report::default() }
    }

    /// So many parameter servers are wanted and needed, of which the attempt started with so many.
    fn servers(started: u32, wanted: u32, needed: u32) -> AttemptReplicas {
        AttemptReplicas { ps: RoleReplicas { started, wanted, present: started, needed }, ..AttemptReplicas::default() }
    }

    fn pod(name: &str) -> PodFacts {
        let labels = json!({ROLE_LABEL: Role::Ps.name(), ATTEMPT_LABEL: "1"});
        let pod = serde_json::from_value(json!({"metadata": {"name": name, "labels": labels}})).expect("a pod");
        PodFacts::of(&pod).expect("one of the operator's")
    }

    /// A job whose parameter servers are decided on, and its status after a decision for four of them.
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
    fn an_attempt_starts_with_those_that_had_come_and_asks_for_the_others() {
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
    fn what_was_carried_out_holds_where_decisions_are_only_told_from_then_on() {
        let (resolved, status) = decided("recommend");
        assert_eq!((wanted(Some(&status), &resolved, Role::Ps), wanted(None, &resolved, Role::Ps)), (4, 2));
    }

    #[test]
    fn servers_come_before_slots_and_go_after_them() {
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
        assert_eq!(to_ask(&servers, &left, &three), [], "the third pod is that of before");
        assert_eq!(to_ask(&servers, &left, &three[..2]), [(Role::Ps, 3)]);
    }

    #[test]
    fn slots_are_spread_once_a_decision_and_by_those_who_hold_them() {
        let of = |wanted: u32| servers(2, wanted, 2);
        let told = |slots_decided_seconds| Report { slots_decided_seconds, ..report(Stage::Training, 2, 2, 2) };
        assert_eq!(rebalance_to_ask(&of(2), &told(0), 7), Some(Rebalance { servers: 2, decided_seconds: 7 }));
        assert_eq!(rebalance_to_ask(&of(2), &told(7), 7), None, "it has been");
        assert_eq!(rebalance_to_ask(&of(3), &told(0), 7), None, "others are wanted since");
        assert_eq!(rebalance_to_ask(&of(2), &report(Stage::Training, 2, 2, 3), 7), None, "one is leaving");
        assert_eq!(rebalance_to_ask(&of(2), &report(Stage::Evaluating, 2, 2, 2), 7), None, "training rests");
    }

    #[test]
    fn a_coordinator_that_starts_again_has_as_many_as_at_first_and_is_asked_again() {
        let mut servers = servers(1, 3, 3);
        let again = report(Stage::Starting, 1, 1, 1);
        follow(&mut servers, &again);
        assert_eq!(servers.ps.needed, 1);
        assert_eq!(to_ask(&servers, &report(Stage::Training, 1, 1, 1), &[pod("j-ps-0")]), [(Role::Ps, 3)]);
    }

    #[test]
    fn more_that_have_not_come_are_given_up() {
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

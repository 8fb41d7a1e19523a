//! The number of a job's parameter servers while it trains, as far as it can be decided without asking: with how many an attempt
//! starts, for how many its coordinator has to be asked, and how many pods there have to be meanwhile. Pure; [`crate::phase`] decides
//! with it and `reconcile` asks.
//!
//! What there is to be comes from the manifest, or from what was decided automatically. The coordinator moves the slots and tells how
//! many processes it needs: new ones before slots come to them, old ones until all their slots have left. The pods follow that word,
//! so an operator that dies between any two of these steps finds the rest to do, and no server goes that still holds a row.

use rectrain_crds::{AttemptServers, RecTrainingJobStatus, ResolvedJob};

use crate::automatic;
use crate::coordinator::{Report, Stage};
use crate::names::Role;
use crate::pods::PodFacts;

/// How many parameter servers there are to be.
#[must_use]
pub fn wanted(status: Option<&RecTrainingJobStatus>, resolved: &ResolvedJob) -> u32 {
    automatic::servers(status, resolved).unwrap_or_else(|| Role::Ps.replicas(resolved))
}

/// Those of an attempt that is about to start.
#[must_use]
pub fn starting(wanted: u32) -> AttemptServers {
    AttemptServers { started: wanted, wanted, present: wanted, needed: wanted }
}

/// The coordinator says how many hold rows, and how many it needs.
pub fn follow(servers: &mut AttemptServers, report: &Report) {
    if let Some(told) = report.servers {
        servers.present = told.present;
        servers.needed = told.needed;
    }
}

/// The number to ask the coordinator for, if there is one. Servers that have not all joined are given up before it is asked for
/// another number of them, and a pod that is about to go must not be taken for the new one of its name.
#[must_use]
pub fn to_ask(servers: &AttemptServers, report: &Report, pods: &[PodFacts]) -> Option<u32> {
    let told = report.servers?;
    let trains = matches!(report.stage, Stage::Training | Stage::Evaluating);
    if !trains || told.wanted == servers.wanted {
        return None;
    }
    if told.wanted > told.present && servers.wanted > told.present {
        return Some(told.present);
    }
    let goes = |pod: &PodFacts| pod.role == Role::Ps && pod.index().is_some_and(|index| index >= servers.needed);
    let is_free = servers.wanted <= servers.needed || !pods.iter().any(goes);
    is_free.then_some(servers.wanted)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::coordinator::Servers;
    use crate::names::{ATTEMPT_LABEL, ROLE_LABEL};

    fn report(stage: Stage, present: u32, wanted: u32, needed: u32) -> Report {
        Report { stage, servers: Some(Servers { present, wanted, needed }), ..Report::default() }
    }

    fn pod(name: &str) -> PodFacts {
        let labels = json!({ROLE_LABEL: Role::Ps.name(), ATTEMPT_LABEL: "1"});
        let pod = serde_json::from_value(json!({"metadata": {"name": name, "labels": labels}})).expect("a pod");
        PodFacts::of(&pod).expect("one of the operator's")
    }

    #[test]
    fn servers_come_before_slots_and_go_after_them() {
        let mut servers = AttemptServers { wanted: 3, ..starting(1) };
        let first = [pod("j-ps-0")];
        assert_eq!(to_ask(&servers, &report(Stage::Starting, 1, 1, 1), &first), None, "they are still joining");
        assert_eq!(to_ask(&servers, &report(Stage::Training, 1, 1, 1), &first), Some(3));
        let asked = report(Stage::Training, 1, 3, 3);
        assert_eq!(to_ask(&servers, &asked, &first), None);
        follow(&mut servers, &asked);
        assert_eq!(servers.needed, 3);
        servers.wanted = 2;
        let three = ["j-ps-0", "j-ps-1", "j-ps-2"].map(pod);
        assert_eq!(to_ask(&servers, &report(Stage::Evaluating, 3, 3, 3), &three), Some(2));
        let leaving = report(Stage::Training, 2, 2, 3);
        follow(&mut servers, &leaving);
        assert_eq!((servers.needed, to_ask(&servers, &leaving, &three)), (3, None), "the third still holds slots");
        let left = report(Stage::Training, 2, 2, 2);
        follow(&mut servers, &left);
        assert_eq!(servers.needed, 2);
        servers.wanted = 3;
        assert_eq!(to_ask(&servers, &left, &three), None, "the third pod is that of before");
        assert_eq!(to_ask(&servers, &left, &three[..2]), Some(3));
    }

    #[test]
    fn a_coordinator_that_starts_again_has_as_many_as_at_first_and_is_asked_again() {
        let mut servers = AttemptServers { wanted: 3, needed: 3, ..starting(1) };
        let again = report(Stage::Starting, 1, 1, 1);
        follow(&mut servers, &again);
        assert_eq!(servers.needed, 1);
        assert_eq!(to_ask(&servers, &report(Stage::Training, 1, 1, 1), &[pod("j-ps-0")]), Some(3));
    }

    #[test]
    fn more_that_have_not_come_are_given_up() {
        let servers = AttemptServers { wanted: 1, needed: 3, ..starting(1) };
        let pods = [pod("j-ps-0"), pod("j-ps-1")];
        assert_eq!(to_ask(&servers, &report(Stage::Training, 1, 3, 3), &pods), Some(1));
        let fewer = AttemptServers { wanted: 2, ..servers };
        assert_eq!(to_ask(&fewer, &report(Stage::Training, 1, 3, 3), &pods), Some(1), "and then the other number");
    }
}

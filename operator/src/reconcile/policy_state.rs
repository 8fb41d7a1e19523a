//! The state of automatic decisions about a job between two looks.

use std::collections::{HashMap, HashSet};

use rectrain_crds::RecTrainingJobStatus;
use rectrain_policy::History;

use crate::decisions;
use crate::pods::PodFacts;
use crate::scrape::Meter;

/// The state of automatic decisions about a job between two looks.
#[derive(Clone, Debug, Default)]
pub(super) struct PolicyState {
    /// Time of the last look, in seconds since 1970.
    pub(super) at_seconds: u64,
    pub(super) history: History,
    /// The rows of the stream that waited at the last look that saw any, and its time.
    lag: Option<(u64, u64)>,
    /// The previous scrapes, by the pods' uids.
    pub(super) meters: HashMap<String, Meter>,
    /// The uids of disrupted pods that still exist.
    disrupted: HashSet<String>,
}

impl PolicyState {
    /// The state of a job that this operator has not looked at yet, restored from its status.
    pub(super) fn restored(status: Option<&RecTrainingJobStatus>) -> Self {
        Self { history: decisions::history(status), ..Self::default() }
    }

    /// Notes the rows of the stream that wait now. Returns the seconds since the note before, and
    /// the rows that waited then.
    pub(super) fn note_lag(&mut self, rows: Option<u64>) -> Option<(f64, u64)> {
        let now = rows.map(|rows| (self.at_seconds, rows));
        let (then, before) = std::mem::replace(&mut self.lag, now)?;
        let seconds = self.at_seconds.checked_sub(then).filter(|seconds| *seconds > 0)?;
        Some((seconds as f64, before))
    }

    /// Counts the pods that were evicted or disrupted since the previous look.
    pub(super) fn count_disrupted(&mut self, pods: &[PodFacts]) -> u32 {
        let is_disrupted = |pod: &&PodFacts| pod.evicted.is_some() || pod.disruption.is_some();
        let now: HashSet<String> = pods.iter().filter(is_disrupted).map(|pod| pod.uid.clone()).collect();
        let new = now.difference(&self.disrupted).count();
        self.disrupted = now;
        u32::try_from(new).unwrap_or(u32::MAX)
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;
    use crate::names::{ATTEMPT_LABEL, ROLE_LABEL};

    fn pod(uid: &str, status: &Value) -> PodFacts {
        let labels = json!({ROLE_LABEL: "ps", ATTEMPT_LABEL: "1"});
        let pod = json!({"metadata": {"name": "j-ps-0", "uid": uid, "labels": labels}, "status": status});
        PodFacts::of(&serde_json::from_value(pod).expect("a pod")).expect("one of the operator's")
    }

    #[test]
    fn the_lag_is_compared_with_the_look_before() {
        let mut state = PolicyState { at_seconds: 100, ..PolicyState::default() };
        assert_eq!(state.note_lag(Some(7)), None);
        state.at_seconds = 110;
        assert_eq!(state.note_lag(Some(9)), Some((10.0, 7)));
        assert_eq!(state.note_lag(Some(9)), None, "no time has passed");
        state.at_seconds = 120;
        assert_eq!(state.note_lag(None), Some((10.0, 9)));
        assert_eq!(state.note_lag(Some(1)), None);
    }

    #[test]
    fn a_disrupted_pod_is_counted_once() {
        let preempted = json!({"phase": "Running", "conditions": [{"type": "DisruptionTarget", "status": "True", "reason": "PreemptionByScheduler"}]});
        let evicted = json!({"phase": "Failed", "reason": "Evicted", "message": "The node was low on memory"});
        let well = json!({"phase": "Running", "conditions": [{"type": "Ready", "status": "True"}]});
        let mut state = PolicyState::default();
        let mut pods = vec![pod("a", &well), pod("b", &preempted)];
        assert_eq!(state.count_disrupted(&pods), 1);
        assert_eq!(state.count_disrupted(&pods), 0, "it was counted");
        pods = vec![pod("a", &evicted), pod("c", &preempted)];
        assert_eq!(state.count_disrupted(&pods), 2);
        assert_eq!(state.disrupted.len(), 2, "pods that are gone are forgotten");
    }
}

//! The part of the first step that automatic decisions need: the metrics of the job's processes, every few seconds and only for jobs that
//! leave something to decide. What is decided counts once it is in the status ([`remember`]), so that an operator that could not write
//! it decides again.

use std::collections::{HashMap, HashSet};
use std::net::{IpAddr, SocketAddr};
use std::sync::PoisonError;

use futures::future::join_all;
use kube::ResourceExt;
use rectrain_crds::{Phase, RecTrainingJob, ResolvedJob};
use rectrain_policy::{ClusterLoad, Decision, History, Observations, Policy};

use crate::automatic::{self, Changes, Findings};
use crate::coordinator::{CoordinatorView, Report, Stage};
use crate::measure::Meter;
use crate::names::{METRICS_PORT, Role};
use crate::nodes::cluster_load;
use crate::pods::PodFacts;
use crate::reconcile::Context;

/// Seconds between two looks: a few of them fit into the shortest window.
const LOOK_SECONDS: u64 = 5;

/// What is remembered of a job from one look to the next.
#[derive(Clone, Debug, Default)]
pub struct Watched {
    at_seconds: u64,
    history: History,
    /// By the pods' uids.
    meters: HashMap<String, Meter>,
    /// The uids of pods that were put out and are still to be seen.
    put_out: HashSet<String>,
}

/// A look at a job.
#[derive(Debug)]
pub struct Looked {
    /// What came of it.
    pub findings: Findings,
    watched: Watched,
    policy: Policy,
    observations: Observations,
    decisions: Vec<Decision>,
}

/// What there is to look at: nothing, if the job leaves nothing to decide or does not train.
fn decidable<'a>(
    job: &RecTrainingJob,
    resolved: Option<&'a ResolvedJob>,
    view: &'a CoordinatorView,
) -> Option<(&'a ResolvedJob, Policy, &'a Report, u32)> {
    let resolved = resolved?;
    let policy = automatic::policy(resolved)?;
    let CoordinatorView::Live(report @ Report { stage: Stage::Training, .. }) = view else { return None };
    let attempt = job.status.as_ref()?.attempt.as_ref()?.number;
    Some((resolved, policy, report, attempt))
}

/// Looks at the job, if it leaves something to decide, trains, and was not looked at just now.
pub async fn look(
    context: &Context,
    job: &RecTrainingJob,
    resolved: Option<&ResolvedJob>,
    view: &CoordinatorView,
    pods: &[PodFacts],
) -> Option<Box<Looked>> {
    let (namespace, name) = (job.namespace().unwrap_or_default(), job.name_any());
    let Some((resolved, policy, report, attempt)) = decidable(job, resolved, view) else {
        context.metrics.forget_look(&namespace, &name);
        rest(context, job);
        return None;
    };
    let now = (context.now)();
    let at_seconds = u64::try_from(now.as_second()).ok()?;
    let known = context.watched.lock().unwrap_or_else(PoisonError::into_inner).get(&job.uid()?).cloned();
    let mut watched =
        known.unwrap_or_else(|| Watched { history: automatic::history(job.status.as_ref()), ..Watched::default() });
    if at_seconds < watched.at_seconds + LOOK_SECONDS {
        return None;
    }
    watched.at_seconds = at_seconds;
    let preemptions = newly_put_out(pods, &mut watched.put_out);
    let pods: Vec<_> = pods.iter().filter(|pod| pod.attempt == attempt && !pod.is_leaving).cloned().collect();
    let changes = measure(context, &pods, &mut watched, at_seconds).await;
    // Only the mode is decided by the load of nodes.
    let nodes = match &policy.mode {
        Some(_) => cluster_load(&*context.read_nodes, &namespace, &name, &pods).await,
        None => ClusterLoad::default(),
    };
    let nodes = ClusterLoad { preemptions, ..nodes };
    context.metrics.crowded(&namespace, &name, nodes.node_cpu);
    let observations = Observations {
        attempt,
        // What was decided about a server that was killed is in the status alone.
        decided_elsewhere: watched.history.unknown(automatic::decided(job.status.as_ref())),
        ..automatic::observations(job, resolved, now, report, &pods, &changes, nodes)
    };
    watched.history.observe(&policy, &observations);
    let decisions = rectrain_policy::decide(&policy, &observations, &watched.history);
    for decision in &decisions {
        tracing::debug!(job = name, subject = %decision.subject, action = %decision.action, reason = decision.reason, "decided");
    }
    let written = decisions.iter().filter_map(|decision| automatic::write(decision, policy.scaling.recommends_only));
    let prediction = policy.mode.as_ref().and_then(|_| automatic::prediction(&watched.history, &observations));
    let findings = Findings { decisions: written.collect(), prediction };
    let error = prediction.and_then(|_| watched.history.prediction_error());
    context.metrics.predicted(&namespace, &name, error);
    Some(Box::new(Looked { findings, watched, policy, observations, decisions }))
}

/// A job that does not train is not measured: whoever looks again must not take the rest for slow training.
fn rest(context: &Context, job: &RecTrainingJob) {
    let mut all = context.watched.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(watched) = job.uid().and_then(|uid| all.get_mut(&uid)) {
        watched.meters.clear();
    }
}

/// Remembers a look whose findings are in the status; they are there only of a job that trains.
pub fn remember(context: &Context, job: &RecTrainingJob, looked: Box<Looked>) {
    let Looked { mut watched, policy, observations, decisions, .. } = *looked;
    let (namespace, name) = (job.namespace().unwrap_or_default(), job.name_any());
    let trains = job.status.as_ref().and_then(|status| status.phase) == Some(Phase::Training);
    let counts = if trains { decisions.as_slice() } else { &[] };
    watched.history.record(counts);
    context.traces.record((&namespace, &name), &policy, &observations, counts);
    context.watched.lock().unwrap_or_else(PoisonError::into_inner).insert(job.uid().unwrap_or_default(), watched);
}

/// How many pods were put out that are not among `known` yet, which has them then.
fn newly_put_out(pods: &[PodFacts], known: &mut HashSet<String>) -> u32 {
    let now: HashSet<String> =
        pods.iter().filter(|pod| pod.evicted.is_some() || pod.put_out.is_some()).map(|pod| pod.uid.clone()).collect();
    let new = now.difference(known).count();
    *known = now;
    u32::try_from(new).unwrap_or(u32::MAX)
}

/// Reads the metrics of all pods at the same time. Meters of pods that are gone go.
async fn measure(context: &Context, pods: &[PodFacts], watched: &mut Watched, at_seconds: u64) -> Changes {
    let asked = pods
        .iter()
        .filter(|pod| matches!(pod.role, Role::Ps | Role::EmbeddingWorker | Role::DenseWorker) && pod.is_running);
    let read = asked.filter_map(|pod| {
        let ip: IpAddr = pod.ip.as_ref()?.parse().ok()?;
        Some(async move { (pod, context.read_metrics.read(SocketAddr::new(ip, METRICS_PORT)).await) })
    });
    let mut meters = HashMap::new();
    let mut changes = Changes::new();
    for (pod, text) in join_all(read).await {
        let (Some(text), Some(index)) = (text, pod.index()) else { continue };
        let mut meter = watched.meters.remove(&pod.uid).unwrap_or_default();
        if let Some(change) = meter.read(at_seconds, &text) {
            changes.insert((pod.role, index), change);
        }
        meters.insert(pod.uid.clone(), meter);
    }
    watched.meters = meters;
    changes
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
    fn a_pod_that_is_put_out_is_counted_once() {
        let preempted = json!({"phase": "Running", "conditions": [{"type": "DisruptionTarget", "status": "True", "reason": "PreemptionByScheduler"}]});
        let evicted = json!({"phase": "Failed", "reason": "Evicted", "message": "The node was low on memory"});
        let well = json!({"phase": "Running", "conditions": [{"type": "Ready", "status": "True"}]});
        let mut known = HashSet::new();
        let mut pods = vec![pod("a", &well), pod("b", &preempted)];
        assert_eq!(newly_put_out(&pods, &mut known), 1);
        assert_eq!(newly_put_out(&pods, &mut known), 0, "it was counted");
        pods = vec![pod("a", &evicted), pod("c", &preempted)];
        assert_eq!(newly_put_out(&pods, &mut known), 2);
        assert_eq!(known.len(), 2, "those that are gone are forgotten");
    }
}

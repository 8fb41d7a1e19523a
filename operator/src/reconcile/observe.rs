//! The part of the first step that automatic decisions need: the metrics of the job's processes, every few seconds and only for jobs that
//! leave something to decide. What is decided counts once it is in the status ([`remember`]), so that an operator that could not write
//! it decides again.

use std::collections::HashMap;
use std::net::{IpAddr, SocketAddr};
use std::sync::PoisonError;

use futures::future::join_all;
use kube::ResourceExt;
use rectrain_crds::{Phase, RecTrainingJob, ResolvedJob};
use rectrain_policy::{ClusterLoad, Decision, History};

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
}

/// A look at a job.
#[derive(Debug)]
pub struct Looked {
    /// What came of it.
    pub findings: Findings,
    watched: Watched,
    decisions: Vec<Decision>,
}

/// Looks at the job, if it leaves something to decide, trains, and was not looked at just now.
pub async fn look(
    context: &Context,
    job: &RecTrainingJob,
    resolved: Option<&ResolvedJob>,
    view: &CoordinatorView,
    pods: &[PodFacts],
) -> Option<Looked> {
    let resolved = resolved?;
    let policy = automatic::policy(resolved)?;
    let CoordinatorView::Live(report @ Report { stage: Stage::Training, .. }) = view else { return None };
    let attempt = job.status.as_ref()?.attempt.as_ref()?.number;
    let now = (context.now)();
    let at_seconds = u64::try_from(now.as_second()).ok()?;
    let known = context.watched.lock().unwrap_or_else(PoisonError::into_inner).get(&job.uid()?).cloned();
    let mut watched =
        known.unwrap_or_else(|| Watched { history: automatic::history(job.status.as_ref()), ..Watched::default() });
    if at_seconds < watched.at_seconds + LOOK_SECONDS {
        return None;
    }
    watched.at_seconds = at_seconds;
    let pods: Vec<_> = pods.iter().filter(|pod| pod.attempt == attempt && !pod.is_leaving).cloned().collect();
    let changes = measure(context, &pods, &mut watched, at_seconds).await;
    // Only the mode is decided by the load of nodes.
    let nodes = match &policy.mode {
        Some(_) => cluster_load(&*context.read_nodes, &job.namespace()?, &job.name_any(), &pods).await,
        None => ClusterLoad::default(),
    };
    context.metrics.crowded(&job.namespace()?, &job.name_any(), nodes.node_cpu);
    let observations = automatic::observations(job, resolved, now, report, &pods, &changes, nodes);
    watched.history.observe(&policy, &observations);
    let decisions = rectrain_policy::decide(&policy, &observations, &watched.history);
    for decision in &decisions {
        tracing::debug!(job = job.name_any(), subject = %decision.subject, action = %decision.action, reason = decision.reason, "decided");
    }
    let written = decisions.iter().filter_map(|decision| automatic::write(decision, policy.scaling.recommends_only));
    let prediction = policy.mode.as_ref().and_then(|_| automatic::prediction(&watched.history, &observations));
    let findings = Findings { decisions: written.collect(), prediction };
    if let (Some(_), Some(error)) = (prediction, watched.history.prediction_error()) {
        context.metrics.predicted(&job.namespace().unwrap_or_default(), &job.name_any(), error);
    }
    Some(Looked { findings, watched, decisions })
}

/// Remembers a look whose findings are in the status; they are there only of a job that trains.
pub fn remember(context: &Context, uid: String, looked: Looked, phase: Option<Phase>) {
    let Looked { mut watched, decisions, .. } = looked;
    if phase == Some(Phase::Training) {
        watched.history.record(&decisions);
    }
    context.watched.lock().unwrap_or_else(PoisonError::into_inner).insert(uid, watched);
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

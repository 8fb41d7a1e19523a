//! Automatic decisions about a job: scrapes its processes every few seconds and runs the policy.
//!
//! A decision counts once it is in the status ([`commit`]). An operator that could not write the
//! status decides again.

use std::collections::HashMap;
use std::net::{IpAddr, SocketAddr};

use futures::future::join_all;
use jiff::Timestamp;
use kube::ResourceExt;
use rectrain_crds::{Phase, RecTrainingJob, ResolvedJob, Role};
use rectrain_policy::{ClusterLoad, Decision, Observations, Policy};

use super::context::Context;
use super::policy_state::PolicyState;
use crate::automatic::observations::{Deltas, JobLook};
use crate::automatic::policy::{policy, with_budget};
use crate::automatic::{Findings, prediction};
use crate::coordinator_view::{CoordinatorView, Report, Stage};
use crate::decisions;
use crate::names::{JobName, METRICS_PORT};
use crate::nodes::cluster_load;
use crate::pods::PodFacts;

/// Seconds between two looks, so that the shortest window has several.
const LOOK_SECONDS: u64 = 5;

/// The facts for automatic decisions.
#[derive(Clone, Copy)]
pub(super) struct JobFacts<'a> {
    pub(super) job: &'a RecTrainingJob,
    /// Its manifest, if it is valid.
    pub(super) resolved: Option<&'a ResolvedJob>,
    pub(super) view: &'a CoordinatorView,
    pub(super) pods: &'a [PodFacts],
}

/// A run of the policy. Its decisions do not count until [`commit`].
#[derive(Debug)]
pub struct PolicyRun {
    /// The results.
    pub findings: Findings,
    state: PolicyState,
    policy: Policy,
    observations: Observations,
    decisions: Vec<Decision>,
}

/// A job whose decisions are due.
struct Due<'a> {
    resolved: &'a ResolvedJob,
    policy: Policy,
    report: &'a Report,
    attempt: u32,
}

impl<'a> Due<'a> {
    /// `None` if the manifest leaves no decision to the operator, or if the job does not train.
    fn of(facts: JobFacts<'a>) -> Option<Self> {
        let resolved = facts.resolved?;
        let policy = policy(resolved)?;
        let CoordinatorView::Live(report @ Report { stage: Stage::Training, .. }) = facts.view else { return None };
        let policy = with_budget(policy, resolved, report.tables.budget.as_ref());
        let attempt = facts.job.status.as_ref()?.attempt.as_ref()?.number;
        Some(Self { resolved, policy, report, attempt })
    }
}

/// Runs the policy, if the manifest leaves decisions to the operator, the job trains, and the last
/// run was not just now.
pub(super) async fn run(context: &Context, facts: JobFacts<'_>) -> Option<Box<PolicyRun>> {
    let name = JobName::of(facts.job);
    let uid = facts.job.uid()?;
    let Some(due) = Due::of(facts) else {
        context.metrics.forget_look(&name);
        pause(context, &uid);
        return None;
    };
    let now = (context.now)();
    let at_seconds = u64::try_from(now.as_second()).ok()?;
    let known = context.memories.with(&uid, |memory| memory.policy.clone());
    let mut state = known.unwrap_or_else(|| PolicyState::restored(facts.job.status.as_ref()));
    if at_seconds < state.at_seconds + LOOK_SECONDS {
        return None;
    }
    state.at_seconds = at_seconds;
    let observations = observe(context, facts, &due, &mut state, now).await;
    state.history.observe(&due.policy, &observations);
    let decisions = rectrain_policy::decide(&due.policy, &observations, &state.history);
    for Decision { subject, action, reason, .. } in &decisions {
        tracing::debug!(job = name.name, %subject, %action, reason, "decided");
    }
    let findings = findings(&due.policy, &observations, &state, &decisions);
    let error = findings.prediction.and_then(|_| state.history.prediction_error());
    context.metrics.predicted(&name, error);
    Some(Box::new(PolicyRun { findings, state, policy: due.policy, observations, decisions }))
}

fn findings(policy: &Policy, observations: &Observations, state: &PolicyState, made: &[Decision]) -> Findings {
    let written = made.iter().filter_map(|decision| decisions::write(decision, policy.scaling.recommends_only));
    let prediction = policy.mode.as_ref().and_then(|_| prediction(&state.history, observations));
    Findings { decisions: written.collect(), prediction }
}

/// Measures the job.
async fn observe(
    context: &Context,
    facts: JobFacts<'_>,
    due: &Due<'_>,
    state: &mut PolicyState,
    now: Timestamp,
) -> Observations {
    let name = JobName::of(facts.job);
    let preemptions = state.count_disrupted(facts.pods);
    let is_own = |pod: &&PodFacts| pod.attempt == due.attempt && !pod.is_terminating;
    let pods: Vec<_> = facts.pods.iter().filter(is_own).cloned().collect();
    let deltas = scrape(context, &pods, state).await;
    // The load of nodes matters only for the mode.
    let nodes = match &due.policy.mode {
        Some(_) => cluster_load(&*context.measurements.nodes, &name.namespace, &name.name, &pods).await,
        None => ClusterLoad::default(),
    };
    let nodes = ClusterLoad { preemptions, ..nodes };
    context.metrics.crowded(&name, nodes.node_cpu);
    let (job, resolved, report) = (facts.job, due.resolved, due.report);
    let lag_before = state.note_lag(report.stream.as_deref().map(|stream| stream.lag_rows));
    let look = JobLook { job, resolved, now, report, pods: &pods, deltas: &deltas, nodes, lag_before };
    Observations {
        attempt: due.attempt,
        // Only the status has the decision after a kill.
        decided_elsewhere: state.history.unknown(decisions::decided(job.status.as_ref())),
        ..look.observations()
    }
}

/// Drops the scrapes of a job that does not train, so that the pause does not count as slow
/// training.
fn pause(context: &Context, uid: &str) {
    context.memories.with(uid, |memory| {
        if let Some(state) = &mut memory.policy {
            state.meters.clear();
            state.note_lag(None);
        }
    });
}

/// Commits a run whose findings are in the status. They are there only if the job trains.
pub(super) fn commit(context: &Context, job: &RecTrainingJob, run: Box<PolicyRun>) {
    let PolicyRun { mut state, policy, observations, decisions, .. } = *run;
    let trains = job.status.as_ref().and_then(|status| status.phase) == Some(Phase::Training);
    let counts = if trains { decisions.as_slice() } else { &[] };
    state.history.record(counts);
    context.traces.record(&JobName::of(job), &policy, &observations, counts);
    context.memories.with(&job.uid().unwrap_or_default(), |memory| memory.policy = Some(state));
}

/// Scrapes all pods at the same time. The scrapes of pods that are gone are dropped.
async fn scrape(context: &Context, pods: &[PodFacts], state: &mut PolicyState) -> Deltas {
    let running = pods.iter().filter(|pod| Role::MEMBERS.contains(&pod.role) && pod.is_running);
    let scrapes = running.filter_map(|pod| {
        let ip: IpAddr = pod.ip.as_ref()?.parse().ok()?;
        let address = SocketAddr::new(ip, METRICS_PORT);
        Some(async move { (pod, context.measurements.processes.scrape(address).await) })
    });
    let mut meters = HashMap::new();
    let mut deltas = Deltas::new();
    for (pod, text) in join_all(scrapes).await {
        let (Some(text), Some(index)) = (text, pod.index()) else { continue };
        let mut meter = state.meters.remove(&pod.uid).unwrap_or_default();
        if let Some(delta) = meter.add(state.at_seconds, &text) {
            deltas.insert((pod.role, index), delta);
        }
        meters.insert(pod.uid.clone(), meter);
    }
    state.meters = meters;
    deltas
}

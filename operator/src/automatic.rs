//! Automatic decisions about a job: its manifest as a policy, what its processes measure as observations, and what was decided as the
//! job's status keeps it. Pure; [`crate::measure`] reads the processes' metrics, `rectrain-policy` decides, and [`crate::phase`] writes
//! what was decided into the status before [`crate::switch`] carries it out: an operator that dies in between goes on from there.

use std::collections::BTreeMap;
use std::time::Duration;

use jiff::Timestamp;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use rectrain_crds::{
    AutoscalingMode, DecisionStatus, DecisionSubject, Mode, ModePrediction, ModeSpec, RecTrainingJob,
    RecTrainingJobStatus, ResolvedBounds, ResolvedJob,
};
use rectrain_policy::{
    Action, ClusterLoad, Decision, DenseWorkerPolicy, EmbeddingWorkerLoad, EmbeddingWorkerPolicy, History, Kill,
    ModePolicy, Observations, Policy, PsLoad, PsPolicy, ReplicaBounds, ReplicaCount, Replicas, ScalingPolicy, Subject,
    TrainingMode, Verdict, Worker,
};

use crate::coordinator::Report;
use crate::failure::shorten;
use crate::measure::Change;
use crate::members;
use crate::names::Role;
use crate::pods::PodFacts;
use crate::quantity::value_of;

/// Decisions that a status keeps about each subject.
const KEPT: usize = 8;
/// Decisions to raise the memory of parameter servers that it keeps.
const RAISES_KEPT: usize = 16;
/// Three measurements are enough to speak of.
const LOOKS_A_WINDOW: u64 = 4;
/// Bytes of a reason that are kept.
const MOST: usize = 1000;

/// What was found out about a job that is decided on automatically.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Findings {
    /// What was decided just now.
    pub decisions: Vec<DecisionStatus>,
    /// How fast the modes would be.
    pub prediction: Option<ModePrediction>,
}

/// The policy of a manifest; none if it leaves nothing to decide.
#[must_use]
pub fn policy(job: &ResolvedJob) -> Option<Policy> {
    let mode = job.training.auto.map(|auto| ModePolicy {
        margin: auto.margin,
        window_seconds: u64::from(auto.window_seconds),
        dwell_seconds: u64::from(auto.dwell_seconds),
        switches_per_hour: auto.switches_per_hour,
        crowded_cpu: auto.crowded_cpu,
        ..ModePolicy::default()
    });
    let Some(given) = &job.autoscaling else {
        return mode.map(|mode| Policy { mode: Some(mode), ..Policy::default() });
    };
    let bounds = |bounds: ResolvedBounds| ReplicaBounds { min: bounds.min, max: bounds.max };
    Some(Policy {
        mode,
        scaling: ScalingPolicy {
            recommends_only: given.mode == AutoscalingMode::Recommend,
            cool_down_seconds: u64::from(given.cool_down_seconds),
            up_window_seconds: u64::from(given.up_window_seconds),
            down_window_seconds: u64::from(given.down_window_seconds),
            ..ScalingPolicy::default()
        },
        ps: given.ps.map(|ps| PsPolicy {
            memory_target: ps.memory_target,
            busy_target: ps.busy_target,
            max_memory_bytes: ps.max_memory_bytes,
            ..PsPolicy::new(bounds(ps.bounds))
        }),
        embedding_worker: given.embedding_worker.map(|role| EmbeddingWorkerPolicy {
            bounds: bounds(role.bounds),
            queue_wait_seconds: role.queue_wait_seconds,
        }),
        dense_worker: given.dense_worker.map(|role| DenseWorkerPolicy {
            marginal_throughput: role.marginal_throughput,
            price_per_hour: role.price_per_hour,
            max_cost_per_million: role.max_cost_per_million_samples,
            ..DenseWorkerPolicy::new(bounds(role.bounds))
        }),
    })
}

/// How often a job that leaves something to decide has to be looked at: a few times in the shortest window that decisions are made over.
#[must_use]
pub fn look_every(job: Option<&ResolvedJob>) -> Option<Duration> {
    let policy = policy(job?)?;
    let mode = policy.mode.iter().map(|mode| mode.window_seconds);
    let scales = policy.ps.is_some() || policy.embedding_worker.is_some() || policy.dense_worker.is_some();
    let up = scales.then_some(policy.scaling.up_window_seconds);
    mode.chain(up).min().map(|seconds| Duration::from_secs((seconds / LOOKS_A_WINDOW).max(1)))
}

/// The mode that the automatic mode is to be in: that of its last decision, or the one that training starts in.
#[must_use]
pub fn mode(status: Option<&RecTrainingJobStatus>) -> Mode {
    let decided = status.and_then(|status| last(&status.decisions, DecisionSubject::Mode));
    decided.and_then(|decision| parse_mode(&decision.to)).map_or(ModeSpec::Auto.first(), of_policy)
}

/// What decisions about the number of a role's members are about; none are made about loaders.
#[must_use]
pub fn subject(role: Role) -> Option<DecisionSubject> {
    match role {
        Role::Ps => Some(DecisionSubject::Ps),
        Role::EmbeddingWorker => Some(DecisionSubject::EmbeddingWorker),
        Role::DenseWorker => Some(DecisionSubject::DenseWorker),
        Role::Coordinator | Role::Loader => None,
    }
}

/// How many members of a role were last decided on, as far as that was to be carried out: it holds as well where further decisions are only told.
#[must_use]
pub fn replicas(status: Option<&RecTrainingJobStatus>, job: &ResolvedJob, role: Role) -> Option<u32> {
    let given = job.autoscaling.as_ref()?;
    let bounds = match role {
        Role::Ps => given.ps?.bounds,
        Role::EmbeddingWorker => given.embedding_worker?.bounds,
        Role::DenseWorker => given.dense_worker?.bounds,
        Role::Coordinator | Role::Loader => return None,
    };
    let subject = subject(role)?;
    let is_it = |decision: &&DecisionStatus| decision.subject == subject && says_how_many(decision);
    let decided: u32 = status?.decisions.iter().rev().find(is_it)?.to.parse().ok()?;
    Some(decided.clamp(bounds.min, bounds.max))
}

/// Whether a decision says how many members of a role there are to be, and is carried out.
fn says_how_many(decided: &DecisionStatus) -> bool {
    decided.subject != DecisionSubject::Mode && decided.applied && decided.replica.is_none() && !is_rebalance(decided)
}

/// The memory limit of parameter servers that all decisions to raise it began with, if any has been carried out: that of the manifest then.
#[must_use]
pub fn memory_before_raises(status: &RecTrainingJobStatus) -> Option<u64> {
    let raises = status.decisions.iter().rev().filter(|decided| decided.applied).filter_map(read);
    let raises = raises.filter_map(|decision| match decision.action {
        Action::RaiseMemory { from_bytes, to_bytes, .. } => Some((from_bytes, to_bytes)),
        _ => None,
    });
    // One that does not go on from the one before went on from another manifest.
    raises.fold(None, |first, (from, to)| match first {
        Some(first) if first != to => Some(first),
        _ => Some(from),
    })
}

/// When it was decided to spread the slots anew over the parameter servers that there are, if that is the newest decision about them, is
/// carried out and still holds: after the cool-down it is decided anew.
#[must_use]
pub fn rebalance(status: &RecTrainingJobStatus, job: &ResolvedJob, now: Timestamp) -> Option<u64> {
    let cool_down = job.autoscaling.as_ref()?.cool_down_seconds;
    let decided = read(last(&status.decisions, DecisionSubject::Ps).filter(|decided| decided.applied)?)?;
    let Action::Rebalance { .. } = decided.action else { return None };
    let since = u64::try_from(now.as_second()).ok()?.checked_sub(decided.at_seconds)?;
    (since <= u64::from(cool_down)).then_some(decided.at_seconds)
}

/// Whether what was decided is to spread slots anew: over as many parameter servers as there were.
#[must_use]
pub fn is_rebalance(decided: &DecisionStatus) -> bool {
    decided.subject == DecisionSubject::Ps && decided.replica.is_none() && decided.from == decided.to
}

/// What is decided when the parameter server `killed`, one of `present`, was killed for its memory, which ends an attempt: in the next one
/// they have more memory, or there are more of them. None if somebody else decides, or nothing more may be done.
#[must_use]
pub fn after_a_kill(
    job: &RecTrainingJob,
    resolved: &ResolvedJob,
    present: u32,
    killed: u32,
    now: Timestamp,
) -> Option<DecisionStatus> {
    let policy = policy(resolved)?;
    let kill = Kill { replica: killed, limit_bytes: memory_limit(job), servers: present };
    let Verdict::Act { action, reason } = rectrain_policy::after_a_kill(policy.ps.as_ref()?, kill) else {
        return None;
    };
    let at_seconds = u64::try_from(now.as_second()).ok()?;
    write(&Decision { at_seconds, subject: Subject::Ps, action, reason }, policy.scaling.recommends_only)
}

/// The memory limit that the parameter servers of the next attempt have in place of the manifest's, by a decision that is carried out.
#[must_use]
pub fn raised_memory(decision: &DecisionStatus) -> Option<u64> {
    match read(decision).filter(|_| decision.applied)?.action {
        Action::RaiseMemory { to_bytes, .. } => Some(to_bytes),
        _ => None,
    }
}

/// Why `subject` is to become `to`: that of the newest decision, if that is what it says. Empty for what nobody decided.
#[must_use]
pub fn reason<'a>(status: Option<&'a RecTrainingJobStatus>, subject: DecisionSubject, to: &str) -> &'a str {
    let decided = status.and_then(|status| last(&status.decisions, subject));
    decided.filter(|decided| decided.applied && decided.to == to).map_or("", |decided| &decided.reason)
}

/// The newest decision about `subject`.
#[must_use]
pub fn last(decisions: &[DecisionStatus], subject: DecisionSubject) -> Option<&DecisionStatus> {
    decisions.iter().rev().find(|decision| decision.subject == subject)
}

/// The history of a job whose operator has just started.
#[must_use]
pub fn history(status: Option<&RecTrainingJobStatus>) -> History {
    History::from_decisions(decided(status))
}

/// What was decided about a job, as far as its status keeps it.
pub fn decided(status: Option<&RecTrainingJobStatus>) -> impl Iterator<Item = Decision> {
    status.into_iter().flat_map(|status| &status.decisions).filter_map(read)
}

/// All decisions that the status keeps, the new ones last: the newest of each subject, the one that says how many members there are to be, and
/// those by which servers got more memory.
#[must_use]
pub fn kept(before: &[DecisionStatus], new: &[DecisionStatus]) -> Vec<DecisionStatus> {
    let all: Vec<_> = before.iter().chain(new).collect();
    let is_kept = |(place, decision): &(usize, &&DecisionStatus)| {
        let mut later = all[place + 1..].iter().filter(|later| later.subject == decision.subject);
        // How many members there are to be is not forgotten over decisions about something else.
        let holds = says_how_many(decision) && !later.clone().any(|later| says_how_many(later));
        // Nor what their memory was raised from; a limit is raised by half at least, so it is not raised often.
        let is_raise = |decision: &DecisionStatus| decision.replica.is_some() && decision.applied;
        let raises = is_raise(decision) && later.clone().filter(|later| is_raise(later)).nth(RAISES_KEPT - 1).is_none();
        holds || raises || later.nth(KEPT - 1).is_none()
    };
    all.iter().enumerate().filter(is_kept).map(|(_, decision)| (**decision).clone()).collect()
}

/// A decision as a status keeps it; none if nothing was to be done.
#[must_use]
pub fn write(decision: &Decision, recommends_only: bool) -> Option<DecisionStatus> {
    let subject = match decision.subject {
        Subject::Mode => DecisionSubject::Mode,
        Subject::Ps => DecisionSubject::Ps,
        Subject::EmbeddingWorker => DecisionSubject::EmbeddingWorker,
        Subject::DenseWorker => DecisionSubject::DenseWorker,
    };
    let (from, to, replica) = match decision.action {
        Action::Keep => return None,
        Action::SwitchMode { from, to } => (from.to_string(), to.to_string(), None),
        Action::Scale { from, to } => (from.to_string(), to.to_string(), None),
        Action::Rebalance { replicas } => (replicas.to_string(), replicas.to_string(), None),
        Action::RaiseMemory { replica, from_bytes, to_bytes } => {
            (from_bytes.to_string(), to_bytes.to_string(), Some(replica))
        }
    };
    let time = Timestamp::from_second(i64::try_from(decision.at_seconds).ok()?).ok()?;
    let applied = subject == DecisionSubject::Mode || !recommends_only;
    Some(DecisionStatus {
        subject,
        time: Time(time),
        from,
        to,
        replica,
        applied,
        reason: shorten(&decision.reason, MOST),
    })
}

/// The reverse of [`write`]; none for what another version may have written.
fn read(written: &DecisionStatus) -> Option<Decision> {
    let (from, to) = (&written.from, &written.to);
    let (subject, action) = match (written.subject, written.replica) {
        (DecisionSubject::Mode, _) => {
            (Subject::Mode, Action::SwitchMode { from: parse_mode(from)?, to: parse_mode(to)? })
        }
        (DecisionSubject::Ps, Some(replica)) => {
            let action = Action::RaiseMemory { replica, from_bytes: from.parse().ok()?, to_bytes: to.parse().ok()? };
            (Subject::Ps, action)
        }
        _ if is_rebalance(written) => (Subject::Ps, Action::Rebalance { replicas: to.parse().ok()? }),
        (subject, _) => {
            let action = Action::Scale { from: from.parse().ok()?, to: to.parse().ok()? };
            let subject = match subject {
                DecisionSubject::EmbeddingWorker => Subject::EmbeddingWorker,
                DecisionSubject::DenseWorker => Subject::DenseWorker,
                _ => Subject::Ps,
            };
            (subject, action)
        }
    };
    let at_seconds = u64::try_from(written.time.0.as_second()).ok()?;
    Some(Decision { at_seconds, subject, action, reason: written.reason.clone() })
}

fn parse_mode(name: &str) -> Option<TrainingMode> {
    [TrainingMode::Sync, TrainingMode::Gba].into_iter().find(|mode| mode.name() == name)
}

fn of_policy(mode: TrainingMode) -> Mode {
    match mode {
        TrainingMode::Sync => Mode::Sync,
        TrainingMode::Gba => Mode::Gba,
    }
}

/// What a job's processes did since they were last asked, by role and index.
pub type Changes = BTreeMap<(Role, u32), Change>;

/// What is known of a job that trains, of which its coordinator gives this report; `nodes`: what is known of the nodes of its pods.
#[must_use]
pub fn observations(
    job: &RecTrainingJob,
    resolved: &ResolvedJob,
    now: Timestamp,
    report: &Report,
    pods: &[PodFacts],
    changes: &Changes,
    nodes: ClusterLoad,
) -> Observations {
    let training = &resolved.training;
    let present = |role: Role| report.members.get(&role).map_or_else(|| role.replicas(resolved), |told| told.present);
    let workers = present(Role::DenseWorker) as usize;
    let local = training.local_batch_size.unwrap_or(training.global_batch_size / workers.max(1));
    let of = |role: Role| changes.iter().filter(move |((of, _), _)| *of == role).map(|(_, change)| change);
    let mode = match report.mode {
        Some(Mode::Sync) => Some(TrainingMode::Sync),
        Some(Mode::Gba) => Some(TrainingMode::Gba),
        _ => None,
    };
    let measured: Vec<_> = of(Role::DenseWorker).filter_map(dense_worker).collect();
    // With a barrier a fast worker's waits contain the slowness of the others, and without one a slow worker's its own; the least of
    // them is the wait itself.
    let least = |value: fn(&Measured) -> f64| measured.iter().map(value).reduce(f64::min);
    let is_sync = mode == Some(TrainingMode::Sync);
    // A worker that made no step may be the slow one: without it nothing can be said of the modes.
    let is_complete = measured.len() == workers || training.barrier_workers == Some(measured.len()) && is_sync;
    let memory_limit = memory_limit(job);
    let ps_pods = |index: u32| pods.iter().find(|pod| pod.role == Role::Ps && pod.index() == Some(index));
    let ps = (0..).zip(of(Role::Ps)).map(|(index, change)| PsLoad {
        bytes: change.value("rectrain_ps_bytes") as u64,
        limit_bytes: memory_limit,
        busy: change
            .seconds_of(&["rectrain_ps_lookup_seconds", "rectrain_ps_update_seconds"])
            .map(|busy| busy.min(1.0)),
        look_ups_per_second: change.rate_of(&["rectrain_ps_found_rows_total", "rectrain_ps_inserted_rows_total"]),
        oom_kills: ps_pods(index)
            .filter(|pod| pod.ended.as_ref().is_some_and(|ended| ended.out_of_memory))
            .map_or(0, |pod| pod.restarts),
    });
    let ps: Vec<_> = ps.collect();
    let wanted = |role: Role| members::wanted(job.status.as_ref(), resolved, role);
    let count = |role: Role| {
        let ready = pods.iter().filter(|pod| pod.role == role && pod.is_ready && !pod.is_leaving).count();
        // One that is ready takes no part until something is its own.
        let ready = u32::try_from(ready).unwrap_or(u32::MAX).min(present(role));
        Some(ReplicaCount { wanted: wanted(role), ready })
    };
    let pending = pods.iter().filter(|pod| pod.unschedulable.is_some()).count();
    Observations {
        at_seconds: u64::try_from(now.as_second()).unwrap_or(0),
        mode,
        global_batch_rows: u32::try_from(training.global_batch_size).unwrap_or(u32::MAX),
        local_batch_rows: u32::try_from(local).unwrap_or(u32::MAX),
        staleness_tolerance: training.gba_staleness,
        workers: if is_complete {
            rectrain_policy::with_idle(measured.iter().map(|measured| measured.worker.clone()).collect(), workers)
        } else {
            Vec::new()
        },
        barrier_workers: training.barrier_workers.and_then(|workers| u32::try_from(workers).ok()),
        all_reduce_seconds: least(|m| m.all_reduce).filter(|_| is_sync),
        exchange_seconds: least(|m| m.other).filter(|_| mode == Some(TrainingMode::Gba)),
        wait_seconds: least(|m| m.wait).unwrap_or(0.0),
        samples_per_second: (!measured.is_empty()).then(|| measured.iter().map(|m| m.samples_per_second).sum()),
        // Every server, or no word of their memory.
        ps: if u32::try_from(ps.len()) == Ok(wanted(Role::Ps)) { ps } else { Vec::new() },
        embedding_workers: embedding_worker_load(of(Role::EmbeddingWorker)),
        cluster: ClusterLoad { pending_pods: u32::try_from(pending).unwrap_or(u32::MAX), ..nodes },
        replicas: Replicas {
            ps: count(Role::Ps),
            embedding_worker: count(Role::EmbeddingWorker),
            dense_worker: count(Role::DenseWorker),
        },
        ..Observations::default()
    }
}

/// A dense worker since it was last asked; seconds are means over its steps.
struct Measured {
    worker: Worker,
    all_reduce: f64,
    /// For data and embeddings.
    wait: f64,
    /// What is left of a step: without a barrier, the wait for parameters.
    other: f64,
    samples_per_second: f64,
}

/// None if it made no step.
fn dense_worker(change: &Change) -> Option<Measured> {
    let steps = change.difference("rectrain_dense_worker_compute_seconds_count").filter(|steps| *steps >= 1.0)?;
    let samples = change.difference("rectrain_dense_worker_samples_total").filter(|samples| *samples >= 1.0)?;
    let a_step =
        |name: &str| change.difference(&format!("rectrain_dense_worker_{name}_seconds_sum")).unwrap_or(0.0) / steps;
    let (compute, all_reduce) = (a_step("compute"), a_step("all_reduce"));
    let wait = a_step("batch_wait") + a_step("embedding_wait");
    let batch_rows = (samples / steps).round().max(1.0) as u32;
    (compute > 0.0).then(|| Measured {
        worker: Worker { batch_rows, compute_seconds: vec![compute] },
        all_reduce,
        wait,
        other: (a_step("step") - compute - all_reduce - a_step("embedding_wait")).max(0.0),
        samples_per_second: samples / change.seconds,
    })
}

/// How long work on batches waited for a core, and how long it then took; none if there was none.
fn embedding_worker_load<'a>(changes: impl Iterator<Item = &'a Change> + Clone) -> Option<EmbeddingWorkerLoad> {
    let sum = |name: &str| {
        let of_each =
            changes.clone().filter_map(|change| change.difference(&format!("rectrain_embedding_worker_{name}")));
        of_each.sum::<f64>()
    };
    let pieces = sum("service_seconds_count");
    (pieces >= 1.0).then(|| EmbeddingWorkerLoad {
        queue_wait_seconds: sum("queue_seconds_sum") / pieces,
        service_seconds: sum("service_seconds_sum") / pieces,
    })
}

/// What a parameter server of the job may use; none if its manifest says nothing, or nothing that can be read.
fn memory_limit(job: &RecTrainingJob) -> Option<u64> {
    let given = given_memory_limit(job)?;
    let attempt = job.status.as_ref().and_then(|status| status.attempt.as_ref());
    Some(attempt.and_then(|attempt| attempt.ps_memory_bytes).map_or(given, |raised| raised.max(given)))
}

/// What the manifest says that a parameter server may use.
#[must_use]
pub fn given_memory_limit(job: &RecTrainingJob) -> Option<u64> {
    let template = job.spec.roles.as_ref()?.ps.as_ref()?.template.as_ref()?;
    Some(value_of(template.resources.as_ref()?.limits.as_ref()?.get("memory")?)? as u64)
}

/// The prediction as a status shows it.
#[must_use]
pub fn prediction(history: &History, observations: &Observations) -> Option<ModePrediction> {
    let predicted = history.predict(observations)?;
    let error_percent = history.prediction_error().map(|error| (error * 100.0).round() as i64);
    Some(ModePrediction { sync: predicted.sync.round() as u64, gba: predicted.gba.round() as u64, error_percent })
}

#[cfg(test)]
mod tests {
    use super::*;

    const MANIFEST: &str = r#"
apiVersion: rectrain.dev/v1alpha1
kind: RecTrainingJob
metadata: {name: clicks}
spec:
  model: {kind: deepfm}
  features: {sparse: [{name: "C{1..4}"}]}
  data: {synthetic: {rows: 1000}}
  training: {mode: auto}
  autoscaling: {}
  roles: {ps: {replicas: 1, template: {resources: {limits: {memory: 2Gi}}}}, denseWorker: {replicas: 2}}
"#;

    fn job() -> (RecTrainingJob, ResolvedJob) {
        let manifest = rectrain_crds::load(MANIFEST, "job.yaml", &[]).expect("it is right");
        (manifest.job, manifest.resolved)
    }

    #[test]
    fn the_defaults_of_the_manifest_are_those_of_the_policy() {
        let policy = policy(&job().1).expect("there is something to decide");
        let bounds = |min, max| ReplicaBounds { min, max };
        let expected = Policy {
            mode: Some(ModePolicy::default()),
            scaling: ScalingPolicy { recommends_only: true, ..ScalingPolicy::default() },
            ps: Some(PsPolicy::new(bounds(1, 4))),
            embedding_worker: Some(EmbeddingWorkerPolicy { bounds: bounds(1, 4), queue_wait_seconds: None }),
            dense_worker: Some(DenseWorkerPolicy::new(bounds(2, 8))),
        };
        assert_eq!((policy.check(), &policy), (Ok(()), &expected));
    }

    fn decision(at_seconds: u64, subject: Subject, action: Action) -> Decision {
        Decision { at_seconds, subject, action, reason: "why".to_owned() }
    }

    #[test]
    fn what_a_status_keeps_is_read_again_and_bounded() {
        let to_gba = Action::SwitchMode { from: TrainingMode::Sync, to: TrainingMode::Gba };
        let raised = Action::RaiseMemory { replica: 1, from_bytes: 5, to_bytes: 7 };
        let made = [
            decision(7, Subject::Mode, to_gba),
            decision(8, Subject::Ps, raised),
            decision(9, Subject::DenseWorker, Action::Scale { from: 2, to: 4 }),
            decision(10, Subject::Ps, Action::Rebalance { replicas: 3 }),
        ];
        let written: Vec<_> = made.iter().filter_map(|decision| write(decision, true)).collect();
        assert_eq!(written.iter().map(|written| written.applied).collect::<Vec<_>>(), [true, false, false, false]);
        let status = RecTrainingJobStatus { decisions: written.clone(), ..RecTrainingJobStatus::default() };
        assert_eq!(history(Some(&status)).decisions(), made);
        assert_eq!((mode(Some(&status)), mode(None)), (Mode::Gba, Mode::Sync));
        let mut all = Vec::new();
        for at_seconds in 11..41 {
            let new = write(&decision(at_seconds, Subject::Mode, to_gba), true);
            all = kept(if at_seconds == 11 { &written } else { &all }, new.as_slice());
        }
        let count = |subject| all.iter().filter(|decision| decision.subject == subject).count();
        assert_eq!((count(DecisionSubject::Mode), count(DecisionSubject::Ps)), (KEPT, 2));
        let scaled = write(&decision(50, Subject::Ps, Action::Scale { from: 3, to: 4 }), false);
        let mut told = kept(&all, scaled.as_slice());
        for at_seconds in 51..80 {
            let new = write(&decision(at_seconds, Subject::Ps, Action::Rebalance { replicas: 4 }), true);
            told = kept(&told, new.as_slice());
        }
        let of_servers: Vec<_> = told.iter().filter(|decision| decision.subject == DecisionSubject::Ps).collect();
        assert_eq!((of_servers.len(), of_servers[0].to.as_str()), (KEPT + 1, "4"), "how many there are to be is kept");
        assert_eq!(all.last().map(|last| last.time.0.as_second()), Some(40));
    }

    #[test]
    fn the_limit_that_raises_began_with_is_that_of_the_manifest_they_were_made_for() {
        let raise = |at: u64, from_bytes: u64, to_bytes: u64| {
            write(&decision(at, Subject::Ps, Action::RaiseMemory { replica: 0, from_bytes, to_bytes }), false)
        };
        let before = |raises: &[Option<DecisionStatus>]| {
            let decisions = raises.iter().flatten().cloned().collect();
            memory_before_raises(&RecTrainingJobStatus { decisions, ..RecTrainingJobStatus::default() })
        };
        assert_eq!(before(&[]), None);
        assert_eq!(before(&[raise(1, 4, 6), raise(2, 6, 9)]), Some(4));
        assert_eq!(before(&[raise(1, 4, 6), raise(2, 8, 12), raise(3, 12, 18)]), Some(8), "it was written anew");
        let mut told: Vec<DecisionStatus> = raise(1, 4, 6).into_iter().collect();
        for at in 2..30 {
            told = kept(&told, write(&decision(at, Subject::Ps, Action::Rebalance { replicas: 4 }), false).as_slice());
        }
        assert_eq!(before(&told.into_iter().map(Some).collect::<Vec<_>>()), Some(4), "whatever was decided since");
    }

    fn change(samples: &[(&str, f64)]) -> Change {
        let text = |factor: f64| {
            samples.iter().map(|(name, value)| format!("{name} {}\n", value * factor)).collect::<String>()
        };
        let mut meter = crate::measure::Meter::default();
        assert!(meter.read(100, &text(1.0)).is_none(), "there is nothing to compare with");
        meter.read(110, &text(2.0)).expect("ten seconds later")
    }

    #[test]
    fn metrics_become_observations() {
        let (job, resolved) = job();
        let worker = |compute: f64| {
            change(&[
                ("rectrain_dense_worker_compute_seconds_sum{replica=\"0\"}", 10.0 * compute),
                ("rectrain_dense_worker_compute_seconds_count{replica=\"0\"}", 10.0),
                ("rectrain_dense_worker_step_seconds_sum{replica=\"0\"}", 10.0),
                ("rectrain_dense_worker_all_reduce_seconds_sum{replica=\"0\"}", 1.0),
                ("rectrain_dense_worker_embedding_wait_seconds_sum{replica=\"0\"}", 2.0),
                ("rectrain_dense_worker_samples_total{replica=\"0\"}", 20_480.0),
            ])
        };
        let ps = change(&[
            ("rectrain_ps_bytes{replica=\"0\"}", 500.0),
            ("rectrain_ps_lookup_seconds_sum{replica=\"0\"}", 2.0),
            ("rectrain_ps_update_seconds_sum{replica=\"0\"}", 3.0),
            ("rectrain_ps_found_rows_total{replica=\"0\"}", 700.0),
            ("rectrain_ps_inserted_rows_total{replica=\"0\"}", 50.0),
        ]);
        let mut changes = Changes::from([
            ((Role::DenseWorker, 0), worker(0.25)),
            ((Role::DenseWorker, 1), worker(0.5)),
            ((Role::Ps, 0), ps),
        ]);
        let now = Timestamp::from_second(1000).expect("a time");
        let report = |mode| Report { mode: Some(mode), ..Report::default() };
        let seen = observations(&job, &resolved, now, &report(Mode::Sync), &[], &changes, ClusterLoad::default());
        assert_eq!(seen.check(), Ok(()));
        let seconds: Vec<_> =
            seen.workers.iter().map(|worker| (worker.batch_rows, worker.compute_seconds[0])).collect();
        assert_eq!(seconds, [(2048, 0.25), (2048, 0.5)]);
        assert_eq!((seen.all_reduce_seconds, seen.exchange_seconds, seen.wait_seconds), (Some(0.1), None, 0.2));
        assert_eq!((seen.samples_per_second, seen.local_batch_rows), (Some(4096.0), 2048));
        let expected = PsLoad {
            bytes: 1000,
            limit_bytes: Some(2 << 30),
            busy: Some(0.5),
            look_ups_per_second: Some(75.0),
            oom_kills: 0,
        };
        assert_eq!(seen.ps, [expected]);
        changes.remove(&(Role::DenseWorker, 1));
        let without_one = observations(&job, &resolved, now, &report(Mode::Gba), &[], &changes, ClusterLoad::default());
        assert_eq!(without_one.workers, [], "the slow one may be missing");
    }
}

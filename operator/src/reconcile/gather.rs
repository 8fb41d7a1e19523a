//! The first step of a reconcile: gathers all facts about a job.

use std::collections::BTreeMap;

use jiff::Timestamp;
use kube::ResourceExt;
use kube::api::Api;
use kube_runtime::reflector::ObjectRef;
use rectrain_crds::{AttemptStatus, Phase, RecTrainingJob, ResolvedJob, Role};

use super::context::Context;
use super::dereference::{self, Belongings};
use super::error::ReconcileError;
use super::policy_run::{self, JobFacts, PolicyRun};
use super::refused_pods::{self, Attempt};
use super::validate::{self, Verdict};
use crate::attempt_signals::{AttemptLook, AttemptSignals, EndReason};
use crate::blocked::BlockedLook;
use crate::coordinator_client::CoordinatorEndpoint;
use crate::coordinator_view::CoordinatorView;
use crate::failure::Problem;
use crate::names::JobName;
use crate::path_in_use;
use crate::phase::Facts;

/// All facts about a job.
pub(super) struct Gathered {
    pub(super) job: RecTrainingJob,
    pub(super) name: JobName,
    pub(super) uid: String,
    /// Whether the job comes from the watch, and not from the API server itself.
    pub(super) is_from_watch: bool,
    pub(super) verdict: Verdict,
    pub(super) spec_hash: String,
    pub(super) belongings: Belongings,
    ready: BTreeMap<Role, u32>,
    /// The coordinator of its attempt, if it runs.
    pub(super) coordinator: Option<CoordinatorEndpoint>,
    view: CoordinatorView,
    pub(super) policy_run: Option<Box<PolicyRun>>,
    obstacle: Option<Problem>,
    pub(super) signals: AttemptSignals,
    /// The present, in whole seconds.
    pub(super) now: Timestamp,
}

/// A job to reconcile.
pub(super) struct Current {
    job: RecTrainingJob,
    is_from_watch: bool,
}

impl Current {
    pub(super) fn job(&self) -> &RecTrainingJob {
        &self.job
    }
}

/// The job to reconcile. `None` if it is gone, is being deleted, or if another controller runs it:
/// the garbage collector deletes the objects of a deleted job.
///
/// The watch's version is used unless this operator last read or wrote another one. Then the watch
/// may be behind the operator's own status, and the job is read from the API server.
pub(super) async fn current(context: &Context, seen: &RecTrainingJob) -> Result<Option<Current>, ReconcileError> {
    let is_from_watch = context.memories.is_current(seen);
    let job = if is_from_watch { Some(seen.clone()) } else { Box::pin(read(context, &JobName::of(seen))).await? };
    let job = job.filter(|job| job.metadata.deletion_timestamp.is_none() && validate::is_ours(job));
    Ok(job.map(|job| Current { job, is_from_watch }))
}

/// The job in the API server.
pub(super) async fn read(context: &Context, name: &JobName) -> Result<Option<RecTrainingJob>, ReconcileError> {
    let jobs: Api<RecTrainingJob> = Api::namespaced(context.client.clone(), &name.namespace);
    jobs.get_opt(&name.name).await.map_err(ReconcileError::Get)
}

/// Gathers all facts about a job. `None` if its coordinator's answer is late; the answer triggers
/// another reconcile.
pub(super) async fn gather(context: &Context, current: Current) -> Result<Option<Gathered>, ReconcileError> {
    let Current { job, is_from_watch } = current;
    let (name, uid) = (JobName::of(&job), job.uid().unwrap_or_default());
    let verdict = validate::judge(&job);
    let spec_hash = validate::spec_hash(&job.spec);
    let belongings = context.reader.belongings(&context.client, &job).await?;
    let coordinator = coordinator(context, &job, &belongings)?;
    let Some(view) = poll(context, &job, coordinator.as_ref()).await else { return Ok(None) };
    let resolved = verdict.manifest.as_ref().ok();
    let facts = JobFacts { job: &job, resolved, view: &view, pods: &belongings.pods };
    let policy_run = Box::pin(policy_run::run(context, facts)).await;
    let obstacle = context.memories.with(&uid, |memory| memory.obstacle.clone());
    let now = whole_second((context.now)());
    let look = Look { job: &job, resolved, spec_hash: &spec_hash, view: &view, belongings: &belongings, now };
    let signals = look.signals(context).await;
    let signals = AttemptSignals { path_in_use: path_in_use(context, &job).await?, ..signals };
    let ready = belongings.ready(&name.name);
    Ok(Some(Gathered {
        job,
        name,
        uid,
        is_from_watch,
        verdict,
        spec_hash,
        belongings,
        ready,
        coordinator,
        view,
        policy_run,
        obstacle,
        signals,
        now,
    }))
}

impl Gathered {
    /// The facts for [`crate::phase::decide`].
    pub(super) fn facts<'a>(&'a self, context: &'a Context, signals: &'a AttemptSignals) -> Facts<'a> {
        let manifest = self.verdict.manifest.as_ref();
        Facts {
            now: self.now,
            job: &self.job,
            verdict: manifest.map_err(Vec::as_slice),
            impossible_mode: self.verdict.impossible_mode.as_deref(),
            spec_hash: &self.spec_hash,
            image: context.config.image(manifest.map_or(0, |resolved| resolved.roles.gpus)),
            tls: context.config.tls,
            pods: &self.belongings.pods,
            ready: &self.ready,
            coordinator: &self.view,
            answer: None,
            automatic: self.policy_run.as_ref().map(|run| &run.findings),
            obstacle: self.obstacle.as_ref(),
            signals,
            poll: context.poll(manifest.ok()),
        }
    }
}

/// The endpoint of the job's coordinator. `None` unless the job is under way and its coordinator
/// runs.
fn coordinator(
    context: &Context,
    job: &RecTrainingJob,
    belongings: &Belongings,
) -> Result<Option<CoordinatorEndpoint>, ReconcileError> {
    let status = job.status.as_ref().filter(|status| status.phase.is_none_or(Phase::is_under_way));
    let Some(attempt) = status.and_then(|status| status.attempt.as_ref()) else { return Ok(None) };
    let Some(address) = dereference::coordinator(&belongings.pods, attempt.number) else { return Ok(None) };
    let certificate = context.certificate(Some(attempt), &job.uid().unwrap_or_default())?;
    Ok(Some(CoordinatorEndpoint { address, certificate }))
}

/// The coordinator's report. `None` if its answer is late.
async fn poll(
    context: &Context,
    job: &RecTrainingJob,
    coordinator: Option<&CoordinatorEndpoint>,
) -> Option<CoordinatorView> {
    let reference = ObjectRef::from_obj(job);
    match coordinator {
        Some(coordinator) => context.coordinators.poll(&reference, coordinator).await,
        None => {
            context.coordinators.forget(&reference);
            Some(CoordinatorView::Silent)
        }
    }
}

/// Why the job has to wait for its checkpoint path. The other jobs are read only before it begins.
async fn path_in_use(context: &Context, job: &RecTrainingJob) -> Result<Option<Problem>, ReconcileError> {
    if !path_in_use::is_about_to_begin(job) {
        return Ok(None);
    }
    let others = context.reader.jobs(&context.client, &JobName::of(job).namespace).await?;
    Ok(path_in_use::path_in_use(job, others.iter().map(|other| &**other)))
}

/// The facts for the signals about an attempt.
struct Look<'a> {
    job: &'a RecTrainingJob,
    /// Its manifest, if it is valid.
    resolved: Option<&'a ResolvedJob>,
    spec_hash: &'a str,
    view: &'a CoordinatorView,
    belongings: &'a Belongings,
    now: Timestamp,
}

impl Look<'_> {
    /// The signals about the attempt of a job under way.
    async fn signals(&self, context: &Context) -> AttemptSignals {
        let status = self.job.status.as_ref().filter(|status| status.phase.is_some_and(Phase::is_under_way));
        let Some(attempt) = status.and_then(|status| status.attempt.as_ref()) else {
            return AttemptSignals::default();
        };
        let (uid, name) = (self.job.uid().unwrap_or_default(), JobName::of(self.job));
        let pods = &self.belongings.pods;
        let look = AttemptLook { attempt: attempt.number, view: self.view, pods, now: self.now };
        let (mut signals, lacking) = context.memories.with(&uid, |memory| {
            let signals = memory.attempt.look(look);
            let saving = memory.attempt.saving(&end_reason(attempt, self.job, self.spec_hash));
            let contested = self.resolved.and_then(|resolved| memory.numbers.look(resolved, self.now));
            (AttemptSignals { saving, contested, ..signals }, memory.lacking.take())
        });
        let of_attempt = Attempt { job: &name, number: attempt.number };
        let lacking = refused_pods::look(&context.client, of_attempt, self.belongings, lacking, self.now).await;
        signals.pods_refused = lacking.as_ref().and_then(|lacking| lacking.problem().cloned());
        let is_refused = signals.pods_refused.is_some();
        let blocked = BlockedLook { attempt, pods, is_refused, now: self.now };
        signals.blocked_at = context.memories.with(&uid, |memory| {
            memory.lacking = lacking;
            memory.blocked.look(blocked)
        });
        signals
    }
}

/// The reason for the end of the attempt by the present manifest.
pub(super) fn end_reason(attempt: &AttemptStatus, job: &RecTrainingJob, spec_hash: &str) -> EndReason {
    let is_suspended = job.spec.suspend == Some(true);
    EndReason { attempt: attempt.number, is_suspended, spec_hash: spec_hash.to_owned() }
}

/// Times in Kubernetes objects are in whole seconds.
fn whole_second(now: Timestamp) -> Timestamp {
    Timestamp::from_second(now.as_second()).unwrap_or(now)
}

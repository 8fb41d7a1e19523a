//! One reconcile: read, judge, write the status, make what should be there, take away what should not. See the crate's text for the
//! path; this file is the path, the steps are in their own.

pub mod apply;
pub mod build;
pub mod dereference;
pub mod kinds;
pub mod lost;
pub mod merge;
pub mod observe;
pub mod prune;
pub mod refused_pods;
pub mod rehearse;
pub mod status;
pub mod validate;

use std::collections::HashMap;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use futures::{FutureExt, StreamExt, stream};
use jiff::Timestamp;
use kube::api::{Api, DeleteParams, PostParams, Preconditions};
use kube::runtime::controller::Action;
use kube::runtime::reflector::ObjectRef;
use kube::{Client, ResourceExt};
use rectrain_crds::{AttemptStatus, DecisionSubject, Phase, RecTrainingJob, ResolvedJob};

use crate::automatic;
use crate::certificates::{CertificateError, JobCertificate, Root};
use crate::config::OperatorConfig;
use crate::coordinator::{CoordinatorView, Whereabouts};
use crate::events::Announcer;
use crate::failure::{Cause, Problem};
use crate::measure::ReadMetrics;
use crate::metrics::{OperatorMetrics, Seen};
use crate::names::FIELD_MANAGER;
use crate::nodes::ReadNodes;
use crate::notice::{Ending, Memory, Noticed};
use crate::phase::{Decision, Facts, Run, decide, is_under_way, max_restarts, stall_seconds};
use crate::questions::Questions;
use crate::reconcile::apply::Settled;
use crate::reconcile::build::Plan;
use crate::reconcile::dereference::{Belongings, Reader};
use crate::reconcile::kinds::{Kind, Owned, Wanted};
use crate::reconcile::observe::Watched;
use crate::reconcile::validate::Verdict;
use crate::traces::Traces;

/// Time after which a job is looked at even if nothing was heard of it.
const AT_LEAST: Duration = Duration::from_secs(600);
/// Time after which the next reconcile finds what this one has learned.
const AGAIN: Duration = Duration::from_millis(100);
/// Time after which an object that was refused is tried again.
const REFUSED: Duration = Duration::from_secs(15);
/// Jobs under way that are looked at in a second, so that many of them leave the API server and the operator time for what changes.
const LOOKS_A_SECOND: f64 = 50.0;
/// Objects of a job that are applied at the same time.
const SIDE_BY_SIDE: usize = 16;
/// Objects whose stored form is remembered.
const MOST_SETTLED: usize = 100_000;

/// Why a reconcile did not get through; it is tried again after a while.
#[derive(Debug, thiserror::Error)]
pub enum ReconcileError {
    /// The job could not be read.
    #[error("cannot read the job: {0}")]
    Get(#[source] kube::Error),
    /// What belongs to the job could not be read.
    #[error("cannot list objects of kind {kind}: {source}")]
    List {
        /// The kind.
        kind: &'static str,
        /// Why.
        source: kube::Error,
    },
    /// The status could not be written; if somebody else wrote first, the next reconcile sees what.
    #[error("cannot write the job's status: {0}")]
    Status(#[source] kube::Error),
    /// An object could not be applied.
    #[error("cannot apply {kind} {name}: {source}")]
    Apply {
        /// Its kind.
        kind: &'static str,
        /// Its name.
        name: String,
        /// Why.
        source: kube::Error,
    },
    /// A name that the job needs is somebody else's.
    #[error("there is a {kind} {name} that does not belong to the job")]
    Taken {
        /// Its kind.
        kind: &'static str,
        /// Its name.
        name: String,
    },
    /// An earlier job of the same name is not quite gone.
    #[error("{kind} {name} of a deleted job of the same name is still there")]
    Leaving {
        /// Its kind.
        kind: &'static str,
        /// Its name.
        name: String,
    },
    /// An object could not be deleted.
    #[error("cannot delete {kind} {name}: {source}")]
    Delete {
        /// Its kind.
        kind: &'static str,
        /// Its name.
        name: String,
        /// Why.
        source: kube::Error,
    },
    /// The operator is about to end.
    #[error("the watches have ended")]
    Stopped,
    /// The job's certificate could not be made.
    #[error("cannot make the certificate of the job: {0}")]
    Certificate(#[from] CertificateError),
    /// The attempt's pods have a certificate and this operator has no root.
    #[error(
        "the job's pods speak with members of the job only, and this operator has none of its certificates: it runs without --namespace"
    )]
    NoRoot,
    /// An object could not be put together.
    #[error("cannot build the objects of the job: {0}")]
    Build(#[from] serde_json::Error),
}

impl ReconcileError {
    /// All that [`Self::step`] gives.
    pub const STEPS: [&str; 7] = ["get", "list", "status", "apply", "delete", "build", "stopped"];

    /// The step that failed, for metrics.
    #[must_use]
    pub fn step(&self) -> &'static str {
        match self {
            Self::Get(_) => "get",
            Self::List { .. } => "list",
            Self::Status(_) => "status",
            Self::Apply { .. } | Self::Taken { .. } | Self::Leaving { .. } => "apply",
            Self::Delete { .. } => "delete",
            Self::Build(_) | Self::Certificate(_) | Self::NoRoot => "build",
            Self::Stopped => "stopped",
        }
    }

    /// What the user can do about it, if it is the user who can.
    #[must_use]
    pub fn obstacle(&self) -> Option<Problem> {
        match self {
            Self::Taken { kind, name } => Some(Problem::new(
                Cause::NameConflict,
                format!(
                    "there is a {kind} `{name}` that does not belong to this job, and it is left alone: delete it, or give the job another name"
                ),
            )),
            Self::Apply { kind, name, source: kube::Error::Api(status) } if is_refusal(status) => Some(Problem::new(
                Cause::ObjectRefused,
                format!(
                    "the API server refuses {kind} `{name}`: {}. Check spec.roles.*.template, the namespace's quota and its admission policies",
                    status.message
                ),
            )),
            _ => None,
        }
    }
}

/// Whether the API server takes no such object, however often it is asked. A list with two entries of the same key it refuses as an error of its own.
fn is_refusal(status: &kube::core::Status) -> bool {
    matches!(status.code, 400 | 403 | 422) || status.message.starts_with("failed to create typed patch object")
}

/// What all reconciles share.
pub struct Context {
    /// The API server.
    pub client: Client,
    /// The installation.
    pub config: OperatorConfig,
    /// What the certificates of jobs come from; only an operator outside of a cluster has none.
    pub root: Option<Root>,
    /// Where objects are read from.
    pub reader: Reader,
    /// What coordinators are asked.
    pub questions: Questions,
    /// The clock.
    pub now: fn() -> Timestamp,
    /// Who tells of transitions.
    pub announcer: Announcer,
    /// What is counted.
    pub metrics: OperatorMetrics,
    /// What saves calls.
    pub settled: Settled,
    /// What keeps the operator from making an object, by the job's uid. One entry a job; it goes with the job.
    pub obstacles: Mutex<HashMap<String, Problem>>,
    /// Who reads the metrics of a job's processes.
    pub read_metrics: Arc<dyn ReadMetrics>,
    /// Who looks at the nodes that pods are on.
    pub read_nodes: Arc<dyn ReadNodes>,
    /// What is remembered of jobs that are decided on automatically, by the job's uid. It goes with the job; lost, it is made again
    /// from the status.
    pub watched: Mutex<HashMap<String, Watched>>,
    /// What was observed and decided of them.
    pub traces: Arc<Traces>,
    /// What was noticed of jobs, by the job's uid. It goes with the job.
    pub memories: Mutex<HashMap<String, Memory>>,
    /// The jobs that this operator knows, by namespace and name. An entry goes with its job.
    pub known: Mutex<HashMap<[String; 2], Known>>,
}

/// A job as this operator last read or wrote it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Known {
    uid: String,
    version: String,
}

impl Known {
    fn of(job: &RecTrainingJob) -> Option<Self> {
        Some(Self { uid: job.uid()?, version: job.resource_version()? })
    }
}

impl Context {
    /// The certificate of the attempt's pods, if they have one.
    fn certificate(
        &self,
        attempt: Option<&AttemptStatus>,
        uid: &str,
    ) -> Result<Option<JobCertificate>, ReconcileError> {
        if !attempt.is_some_and(|attempt| attempt.tls) {
            return Ok(None);
        }
        Ok(Some(self.root.as_ref().ok_or(ReconcileError::NoRoot)?.of_job(uid)?))
    }

    /// The time until a job under way is looked at again: no longer than decisions about it allow.
    fn poll(&self, job: Option<&ResolvedJob>) -> Duration {
        let all = self.metrics.jobs_under_way() as f64 / LOOKS_A_SECOND;
        let poll = self.config.poll.max(Duration::from_secs_f64(all));
        automatic::look_every(job).map_or(poll, |most| poll.min(most))
    }

    /// Whether the watch is not behind this operator: it has the job as the operator last read or wrote it, or the operator has done
    /// neither yet, as one that has just begun to lead.
    fn knows(&self, job: &RecTrainingJob) -> bool {
        let known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
        let last = known.get(&[job.namespace().unwrap_or_default(), job.name_any()]);
        last.is_none() || last == Known::of(job).as_ref()
    }

    fn know(&self, job: &RecTrainingJob) {
        let Some(now) = Known::of(job) else { return };
        let (namespace, name) = (job.namespace().unwrap_or_default(), job.name_any());
        let uid = now.uid.clone();
        let before = self.known.lock().unwrap_or_else(PoisonError::into_inner).insert([namespace, name], now);
        if let Some(before) = before.filter(|before| before.uid != uid) {
            self.forget_uid(&before.uid);
        }
    }

    /// The job is not as it was known: the next reconcile reads it afresh.
    fn doubt(&self, namespace: &str, name: &str) {
        let mut known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
        known.entry([namespace.to_owned(), name.to_owned()]).or_default().version.clear();
    }

    /// Forgets a job that is gone, or somebody else's.
    pub fn forget(&self, namespace: &str, name: &str) {
        self.metrics.forget_job(namespace, name);
        self.traces.forget(namespace, name);
        self.questions.forget(&ObjectRef::new(name).within(namespace));
        let key = [namespace.to_owned(), name.to_owned()];
        let known = self.known.lock().unwrap_or_else(PoisonError::into_inner).remove(&key);
        if let Some(known) = known {
            self.forget_uid(&known.uid);
        }
    }

    fn forget_uid(&self, uid: &str) {
        self.set_obstacle(uid, None);
        self.memories.lock().unwrap_or_else(PoisonError::into_inner).remove(uid);
        self.watched.lock().unwrap_or_else(PoisonError::into_inner).remove(uid);
    }

    /// Reads or changes what is remembered of a job.
    fn remember<T>(&self, uid: &str, change: impl FnOnce(&mut Memory) -> T) -> T {
        let mut memories = self.memories.lock().unwrap_or_else(PoisonError::into_inner);
        change(memories.entry(uid.to_owned()).or_default())
    }

    fn saves_nothing(&self, uid: &str) {
        let mut memories = self.memories.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(memory) = memories.get_mut(uid) {
            memory.saves_nothing();
        }
    }

    fn obstacle(&self, uid: &str) -> Option<Problem> {
        self.obstacles.lock().unwrap_or_else(PoisonError::into_inner).get(uid).cloned()
    }

    /// Gives whether it is news.
    fn set_obstacle(&self, uid: &str, obstacle: Option<Problem>) -> bool {
        let mut obstacles = self.obstacles.lock().unwrap_or_else(PoisonError::into_inner);
        match obstacle {
            Some(problem) => obstacles.insert(uid.to_owned(), problem.clone()) != Some(problem),
            None => obstacles.remove(uid).is_some(),
        }
    }
}

/// Reconciles one job, when the context's reader is ready. `seen` is the job as the watch has it. It is what is decided on unless this
/// operator last read or wrote another state of it: then the watch may be behind the operator's own status, and the job is read afresh.
/// Whatever changes something has the API server's word that the job is still the one that was decided on. `None` if it is put aside,
/// because its coordinator's answer is late: then nothing was done, and the answer asks for another reconcile.
///
/// # Errors
/// Whatever kept it from getting through; nothing is half done that the next reconcile does not find and finish.
pub async fn reconcile(seen: Arc<RecTrainingJob>, context: Arc<Context>) -> Result<Option<Action>, ReconcileError> {
    let (namespace, name) = (seen.namespace().unwrap_or_default(), seen.name_any());
    let jobs: Api<RecTrainingJob> = Api::namespaced(context.client.clone(), &namespace);
    let is_known = context.knows(&seen);
    let job = if is_known { Some((*seen).clone()) } else { Box::pin(read(&jobs, &name)).await? };
    let job = match job {
        Some(job) if job.metadata.deletion_timestamp.is_none() && validate::is_ours(&job) => job,
        // What belongs to a deleted job is the garbage collector's, and another controller's job is nobody's business.
        _ => {
            context.forget(&namespace, &name);
            return Ok(Some(Action::await_change()));
        }
    };
    context.know(&job);
    let uid = job.uid().unwrap_or_default();
    let verdict = validate::judge(&job);
    let spec_hash = validate::spec_hash(&job.spec);
    let belongings = context.reader.belongings(&context.client, &job).await?;
    let coordinator = match coordinator(&job, &belongings) {
        Some((attempt, address)) => {
            Some(Whereabouts { address, certificate: context.certificate(Some(attempt), &uid)? })
        }
        None => None,
    };
    let reference = ObjectRef::from_obj(&job);
    let view = match &coordinator {
        Some(coordinator) => match context.questions.ask(&reference, coordinator).await {
            Some(view) => view,
            None => return Ok(None),
        },
        None => {
            context.questions.forget(&reference);
            CoordinatorView::Silent
        }
    };
    let looked = Box::pin(observe::look(&context, &job, verdict.manifest.as_ref().ok(), &view, &belongings.pods)).await;
    let obstacle = context.obstacle(&uid);
    let now = whole_second((context.now)());
    let noticed = notice(&context, (&job, &spec_hash), &view, &belongings, now).await;
    let facts = Facts {
        now,
        job: &job,
        verdict: verdict.manifest.as_ref().map_err(Vec::as_slice),
        impossible_mode: verdict.impossible_mode.as_deref(),
        spec_hash: &spec_hash,
        image: context.config.image(verdict.manifest.as_ref().map_or(0, |resolved| resolved.roles.gpus)),
        tls: context.config.tls,
        pods: &belongings.pods,
        ready: &belongings.ready(&name),
        coordinator: &view,
        answer: None,
        automatic: looked.as_ref().map(|looked| &looked.findings),
        obstacle: obstacle.as_ref(),
        noticed: &noticed,
        poll: context.poll(verdict.manifest.as_ref().ok()),
    };
    let mut decision = decide_and_ask(&context, coordinator.as_ref(), &facts).await;
    if let Some(refused) = Box::pin(refused_change(&context, &job, (&verdict, &spec_hash), &decision, now)).await? {
        let noticed = Noticed { change_refused: Some(refused), ..noticed.clone() };
        decision = decide_and_ask(&context, coordinator.as_ref(), &Facts { noticed: &noticed, ..facts }).await;
    }
    let version = job.resource_version();
    let job = match Box::pin(write_status(&jobs, &context, job, &decision)).await {
        Err(ReconcileError::Status(kube::Error::Api(refusal))) if is_known && matches!(refusal.code, 404 | 409) => {
            context.doubt(&namespace, &name);
            return Ok(Some(Action::requeue(AGAIN)));
        }
        written => written?,
    };
    context.know(&job);
    if let Some(looked) = looked {
        // Only what is in the status was decided.
        observe::remember(&context, &job, looked);
    }
    context.metrics.saw_job(&namespace, &name, Seen::new(&decision.status, max_restarts(&job)));
    ask_for_members(&context, coordinator.as_ref(), &decision, &name).await;
    if decision.ask_save {
        ask_to_save(&context, coordinator.as_ref(), (&job, &spec_hash), &uid);
    } else if !decision.is_saving {
        context.saves_nothing(&uid);
    }
    if decision.delete {
        return delete_job(&jobs, &job).await.map(Some);
    }
    let mut wanted = match (&verdict.manifest, decision.run) {
        (Ok(resolved), Run::Hold | Run::Go) => objects(&context, &job, resolved, &decision)?,
        _ => Vec::new(),
    };
    for object in &mut wanted {
        if let Some(owned) = belongings.find(object.kind, &object.name) {
            apply::keep_what_cannot_change(object, owned);
        }
    }
    let lost = lost::delete(&context.client, &*context.read_nodes, &namespace, &belongings.pods, now);
    context.metrics.lost_pods(Box::pin(lost).await?);
    let work = match decision.run {
        Run::AsIs => Work::default(),
        _ => Work::new(&wanted, &belongings, &context.settled),
    };
    let is_confirmed = !is_known || job.resource_version() != version;
    if !work.is_none() && !is_confirmed && !Box::pin(is_still(&jobs, &job)).await? {
        context.doubt(&namespace, &name);
        return Ok(Some(Action::requeue(AGAIN)));
    }
    let result = Box::pin(carry_out(&context, &namespace, &uid, &work)).await;
    let found = result.as_ref().err().and_then(ReconcileError::obstacle);
    let is_news = context.set_obstacle(&uid, found.clone());
    match (result, found) {
        (Err(error), None) => Err(error),
        // The next reconcile puts it into the status.
        (_, _) if is_news => Ok(Some(Action::requeue(AGAIN))),
        (_, Some(_)) => Ok(Some(Action::requeue(REFUSED))),
        (Ok(()), None) => Ok(Some(Action::requeue(decision.look_again.unwrap_or(AT_LEAST).min(AT_LEAST)))),
    }
}

/// All objects that the job should have by this decision.
fn objects(
    context: &Context,
    job: &RecTrainingJob,
    resolved: &ResolvedJob,
    decision: &Decision,
) -> Result<Vec<Wanted>, ReconcileError> {
    let certificate = context.certificate(decision.status.attempt.as_ref(), &job.uid().unwrap_or_default())?;
    Ok(build::objects(&Plan::new(job, resolved, decision, certificate, &context.config))?)
}

/// What is noticed of a job that has pods, or should have.
async fn notice(
    context: &Context,
    (job, spec_hash): (&RecTrainingJob, &str),
    view: &CoordinatorView,
    belongings: &Belongings,
    now: Timestamp,
) -> Noticed {
    let status = job.status.as_ref().filter(|status| status.phase.is_some_and(is_under_way));
    let Some(attempt) = status.and_then(|status| status.attempt.as_ref()) else { return Noticed::default() };
    let (uid, names) = (job.uid().unwrap_or_default(), (job.namespace().unwrap_or_default(), job.name_any()));
    let (mut noticed, lacking) = context.remember(&uid, |memory| {
        let noticed = memory.look(attempt.number, view, &belongings.pods, now);
        (Noticed { saving: memory.saving(&ending(attempt, job, spec_hash)), ..noticed }, memory.lacking.take())
    });
    let lacking =
        refused_pods::look(&context.client, (&names.0, &names.1, attempt.number), belongings, lacking, now).await;
    noticed.pods_refused = lacking.as_ref().and_then(|lacking| lacking.problem().cloned());
    context.remember(&uid, |memory| memory.lacking = lacking);
    noticed
}

/// Why the API server would not take what the decision changes, if it ends an attempt for that.
async fn refused_change(
    context: &Context,
    job: &RecTrainingJob,
    (verdict, spec_hash): (&Verdict, &str),
    decision: &Decision,
    now: Timestamp,
) -> Result<Option<Problem>, ReconcileError> {
    let Ok(resolved) = &verdict.manifest else { return Ok(None) };
    if !rehearse::is_needed(job, decision, spec_hash) {
        return Ok(None);
    }
    let uid = job.uid().unwrap_or_default();
    if let Some(known) = context.remember(&uid, |memory| memory.rehearsal.clone()).filter(|known| known.is_of(job, now))
    {
        return Ok(known.refused().cloned());
    }
    let next = objects(context, job, resolved, &Decision { run: Run::Go, ..decision.clone() })?;
    let rehearsal = rehearse::rehearse(&context.client, job, &next, now).await;
    let refused = rehearsal.refused().cloned();
    context.remember(&uid, |memory| memory.rehearsal = Some(rehearsal));
    Ok(refused)
}

/// Where the job's coordinator is; one that has no business to talk is not asked.
fn coordinator<'a>(job: &'a RecTrainingJob, belongings: &Belongings) -> Option<(&'a AttemptStatus, SocketAddr)> {
    let status = job.status.as_ref()?;
    if matches!(status.phase, Some(Phase::Complete | Phase::Failed | Phase::Suspended)) {
        return None;
    }
    let attempt = status.attempt.as_ref()?;
    Some((attempt, dereference::coordinator(&belongings.pods, attempt.number)?))
}

/// Decides; if the coordinator has to be asked for another training mode, asks it and decides again with its answer.
async fn decide_and_ask(context: &Context, coordinator: Option<&Whereabouts>, facts: &Facts<'_>) -> Decision {
    let decision = decide(facts);
    let (Some(mode), Some(coordinator)) = (decision.ask_mode, coordinator) else { return decision };
    let reason = automatic::reason(facts.job.status.as_ref(), DecisionSubject::Mode, mode.name());
    let answer = context.questions.asking().set_mode(coordinator, mode, reason).await;
    tracing::info!(job = facts.job.name_any(), %mode, ?answer, "the coordinator was asked for another training mode");
    decide(&Facts { answer: Some(&answer), ..*facts })
}

/// Asks the coordinator for other numbers of roles' members, if there are to be any. If it does not agree now, as while slots move
/// already, it is asked again at the next look.
async fn ask_for_members(context: &Context, coordinator: Option<&Whereabouts>, decision: &Decision, job: &str) {
    let Some(coordinator) = coordinator else { return };
    for &(role, replicas) in &decision.ask_members {
        let subject = automatic::subject(role);
        let reason =
            subject.map_or("", |subject| automatic::reason(Some(&decision.status), subject, &replicas.to_string()));
        let answer = context.questions.asking().scale(coordinator, role, replicas, reason).await;
        tracing::info!(
            job,
            role = role.name(),
            replicas,
            ?answer,
            "the coordinator was asked for another number of members"
        );
    }
    if let Some(rebalance) = decision.ask_rebalance {
        let servers = rebalance.servers.to_string();
        let reason = automatic::reason(Some(&decision.status), DecisionSubject::Ps, &servers);
        let answer = context.questions.asking().rebalance(coordinator, rebalance, reason).await;
        tracing::info!(job, servers, ?answer, "the coordinator was asked to spread its slots anew");
    }
}

/// Asks the coordinator of an attempt that is about to end for a checkpoint, which is not waited for here.
fn ask_to_save(
    context: &Context,
    coordinator: Option<&Whereabouts>,
    (job, spec_hash): (&RecTrainingJob, &str),
    uid: &str,
) {
    let attempt = job.status.as_ref().and_then(|status| status.attempt.as_ref());
    let (Some(coordinator), Some(attempt)) = (coordinator, attempt) else { return };
    let patience = Duration::from_secs(u64::from(stall_seconds(job)));
    let has_ended = context.questions.save(&ObjectRef::from_obj(job), coordinator, patience);
    context.remember(uid, |memory| memory.saves(ending(attempt, job, spec_hash), has_ended));
}

fn ending(attempt: &AttemptStatus, job: &RecTrainingJob, spec_hash: &str) -> Ending {
    let is_suspended = job.spec.suspend == Some(true);
    Ending { attempt: attempt.number, is_suspended, spec_hash: spec_hash.to_owned() }
}

/// Writes the status if it has changed, and tells of transitions. Whoever wrote since the job was read is not overwritten: the API
/// server refuses, and the next reconcile decides on what is there then.
async fn write_status(
    jobs: &Api<RecTrainingJob>,
    context: &Context,
    job: RecTrainingJob,
    decision: &Decision,
) -> Result<RecTrainingJob, ReconcileError> {
    if job.status.as_ref() == Some(&decision.status) {
        return Ok(job);
    }
    let before = job.status.clone();
    let changed = RecTrainingJob { status: Some(decision.status.clone()), ..job };
    let parameters = PostParams { field_manager: Some(FIELD_MANAGER.to_owned()), ..PostParams::default() };
    let written =
        jobs.replace_status(&changed.name_any(), &parameters, &changed).await.map_err(ReconcileError::Status)?;
    context.announcer.announce(&written, before.as_ref(), decision).await;
    Ok(written)
}

async fn delete_job(jobs: &Api<RecTrainingJob>, job: &RecTrainingJob) -> Result<Action, ReconcileError> {
    let parameters = DeleteParams {
        preconditions: Some(Preconditions { uid: job.uid(), resource_version: job.resource_version() }),
        ..DeleteParams::background()
    };
    match jobs.delete(&job.name_any(), &parameters).await {
        Ok(_) => Ok(Action::await_change()),
        Err(kube::Error::Api(status)) if status.code == 404 => Ok(Action::await_change()),
        Err(source) => Err(ReconcileError::Delete { kind: "RecTrainingJob", name: job.name_any(), source }),
    }
}

/// The job as the API server has it.
async fn read(jobs: &Api<RecTrainingJob>, name: &str) -> Result<Option<RecTrainingJob>, ReconcileError> {
    jobs.get_opt(name).await.map_err(ReconcileError::Get)
}

/// Whether nobody has changed or deleted the job.
async fn is_still(jobs: &Api<RecTrainingJob>, job: &RecTrainingJob) -> Result<bool, ReconcileError> {
    let now = read(jobs, &job.name_any()).await?;
    Ok(now.is_some_and(|now| now.uid() == job.uid() && now.resource_version() == job.resource_version()))
}

/// What the cluster lacks of what is wanted, and has too much.
#[derive(Default)]
struct Work<'a> {
    apply: Vec<(&'a Wanted, Option<&'a Owned>)>,
    delete: Vec<&'a Owned>,
}

impl<'a> Work<'a> {
    fn new(wanted: &'a [Wanted], belongings: &'a Belongings, settled: &Settled) -> Self {
        let with_owned = wanted.iter().map(|object| (object, belongings.find(object.kind, &object.name)));
        // One that is leaving comes back when it is gone.
        let is_in_order = |object, owned: Option<&Owned>| {
            owned.is_some_and(|o| o.is_leaving || apply::is_in_order(object, o, settled))
        };
        Self {
            apply: with_owned.filter(|(object, owned)| !is_in_order(object, *owned)).collect(),
            delete: prune::superfluous(&belongings.objects, wanted),
        }
    }

    fn is_none(&self) -> bool {
        self.apply.is_empty() && self.delete.is_empty()
    }
}

/// Makes the cluster as wanted: first what pods need, then the pods. An object that is refused does not keep the others from being
/// made.
async fn carry_out(context: &Context, namespace: &str, job_uid: &str, work: &Work<'_>) -> Result<(), ReconcileError> {
    context.settled.trim(MOST_SETTLED);
    let (of_pods, needed) = work.apply.iter().partition::<Vec<_>, _>(|(object, _)| object.kind == Kind::StatefulSet);
    let mut refused = None;
    for objects in [needed, of_pods] {
        refused = refused.or(apply_side_by_side(context, namespace, job_uid, objects).await?);
    }
    for object in &work.delete {
        prune::delete(&context.client, namespace, object).await?;
        context.settled.forget(&object.uid);
    }
    refused.map_or(Ok(()), Err)
}

/// Applies objects that do not wait for each other. Gives the first that was refused, if any.
async fn apply_side_by_side<'a>(
    context: &'a Context,
    namespace: &'a str,
    job_uid: &'a str,
    objects: Vec<(&'a Wanted, Option<&'a Owned>)>,
) -> Result<Option<ReconcileError>, ReconcileError> {
    let apply = |(object, owned): (&'a Wanted, Option<&'a Owned>)| {
        // Boxed, since the compiler cannot tell that a stream of futures that borrow is `Send`.
        async move {
            let applied = apply::apply(&context.client, namespace, object, owned, job_uid, &context.settled).await;
            match (applied, owned) {
                // A set that has to go down goes, also where its new template is refused.
                (Err(error), Some(owned)) if error.obstacle().is_some() && object.has_no_pods() => {
                    prune::delete(&context.client, namespace, owned).await?;
                    Err(error)
                }
                (applied, _) => applied,
            }
        }
        .boxed()
    };
    let applying: Vec<_> = objects.into_iter().map(apply).collect();
    let results: Vec<_> = stream::iter(applying).buffered(SIDE_BY_SIDE).collect().await;
    let mut refused = None;
    for error in results.into_iter().filter_map(Result::err) {
        if error.obstacle().is_none() {
            return Err(error);
        }
        refused = refused.or(Some(error));
    }
    Ok(refused)
}

/// Kubernetes' times are in whole seconds.
fn whole_second(now: Timestamp) -> Timestamp {
    Timestamp::from_second(now.as_second()).unwrap_or(now)
}

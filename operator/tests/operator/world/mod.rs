//! A small cluster in memory.
//!
//! It has an API server (get, list, server-side apply, status, delete, garbage collection), the
//! controller of StatefulSets with a kubelet, and coordinators with scripts. Time stands still
//! between two [`World::tick`]s. Any call to the API server can be made to fail, in every way a
//! call can fail.

pub mod api;
pub mod faults;

use std::cell::Cell;
use std::collections::{BTreeMap, HashMap, VecDeque};
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use futures::future::BoxFuture;
use jiff::Timestamp;
use k8s_openapi::api::core::v1::Secret;
use kube::Client;
use kube_runtime::controller::Action;
use parking_lot::{Mutex, MutexGuard};
use rectrain_crds::{BudgetStatus, CheckpointStatus, JobSummary, Mode, Phase, RecTrainingJob, Role};
use rectrain_operator::certificates::{JobCertificate, Root};
use rectrain_operator::config::OperatorConfig;
use rectrain_operator::coordinator_client::{CoordinatorClient, CoordinatorEndpoint, RequestError};
use rectrain_operator::coordinator_poller::CoordinatorPoller;
use rectrain_operator::coordinator_view::{CoordinatorView, Members, Rebalance, Report, Stage, SwitchAnswer, Tables};
use rectrain_operator::events::Announcer;
use rectrain_operator::metrics::OperatorMetrics;
use rectrain_operator::nodes::NoNodes;
use rectrain_operator::reconcile::context::{Context, Measurements};
use rectrain_operator::reconcile::dereference::Reader;
use rectrain_operator::reconcile::error::ReconcileError;
use rectrain_operator::reconcile::memory::JobMemories;
use rectrain_operator::reconcile::reconcile;
use rectrain_operator::reconcile::stored_forms::StoredForms;
use rectrain_operator::scrape::ScrapeMetrics;
use serde_json::{Value, json};
use tokio::sync::Notify;
use tonic::Status;

use self::api::ApiServer;
use self::faults::Fault;

/// The result of a reconcile that put its job aside. No other reconcile has it.
pub const PUT_ASIDE: Action = Action::requeue(Duration::MAX);
pub const NAMESPACE: &str = "ads";
pub const JOB: &str = "clicks";

pub use crate::manifests::CLICKS as MANIFEST;

thread_local! {
    static NOW: Cell<i64> = const { Cell::new(1_800_000_000) };
}

pub fn now() -> Timestamp {
    Timestamp::from_second(NOW.get()).unwrap()
}

/// The report of a coordinator at each tick of its pod's life; the last one repeats.
pub type Script = Vec<CoordinatorView>;

pub struct World {
    pub api: Arc<Mutex<ApiServer>>,
    pub scripts: Arc<Mutex<Scripts>>,
    pub operator: Arc<Context>,
}

/// The scripts of the attempts, and the state of each coordinator.
#[derive(Default)]
pub struct Scripts {
    pub by_attempt: Vec<Script>,
    /// The modes that coordinators were asked for.
    pub asked: Vec<Mode>,
    /// The number of switches of the mode.
    pub switches: usize,
    /// The next answers to requests for a mode; without one, coordinators accept.
    pub answers: VecDeque<SwitchAnswer>,
    /// A fault of the operator during the next request for a mode.
    pub fault: Option<Fault>,
    /// Coordinators report their state only after this.
    pub slow: Option<Arc<Notify>>,
    /// The metrics of the process at an address at a time, in Prometheus' text format.
    pub metrics: Option<fn(IpAddr, i64) -> String>,
    killed: Arc<Notify>,
    ages: HashMap<String, usize>,
    coordinators: HashMap<IpAddr, (String, usize)>,
    /// By pod and its restarts.
    modes: HashMap<String, Mode>,
    runs: HashMap<IpAddr, String>,
    /// By pod and its restarts.
    members: HashMap<String, BTreeMap<Role, Members>>,
    /// The numbers of members that they were asked for.
    pub asked_members: Vec<(Role, u32)>,
    /// The rebalances that they were asked for, done already or not.
    pub asked_rebalances: Vec<Rebalance>,
    /// The number of requests for a checkpoint.
    pub asked_saves: usize,
    /// The result of such a request; without one it never ends.
    pub saved: Option<Result<String, String>>,
    /// The time of the last decision to rebalance, by pod and its restarts.
    slots_decided: HashMap<String, u64>,
    /// The memory budgets that they were asked for.
    pub asked_budgets: Vec<BudgetStatus>,
    /// By pod and its restarts: the budget since the last request for one.
    budgets: HashMap<String, BudgetStatus>,
    /// The reasons of requests.
    pub reasons: Vec<String>,
    /// The certificate that each coordinator demands.
    certificates: HashMap<IpAddr, JobCertificate>,
}

impl Scripts {
    /// The coordinator is asked for a mode.
    fn set_mode(&mut self, ip: IpAddr, mode: Mode) -> SwitchAnswer {
        let Some(run) = self.runs.get(&ip) else { return SwitchAnswer::Again("no coordinator".to_owned()) };
        self.asked.push(mode);
        let answer = self.answers.pop_front().unwrap_or(SwitchAnswer::Accepted);
        if answer == SwitchAnswer::Accepted {
            self.switches += usize::from(self.modes.insert(run.clone(), mode) != Some(mode));
        }
        answer
    }

    /// The coordinator is asked for a memory budget.
    fn set_budget(&mut self, ip: IpAddr, budget: BudgetStatus) -> Result<(), RequestError> {
        let run = self.runs.get(&ip).ok_or_else(|| refused("no coordinator"))?;
        self.budgets.insert(run.clone(), budget);
        self.asked_budgets.push(budget);
        Ok(())
    }

    /// The coordinator is asked for `wanted` members of a role.
    fn scale(&mut self, ip: IpAddr, role: Role, wanted: u32) -> Result<(), RequestError> {
        let members = self.runs.get(&ip).and_then(|run| self.members.get_mut(run));
        let members = members.ok_or_else(|| refused("no coordinator"))?;
        let members = members.get_mut(&role).unwrap();
        if members.present == members.wanted && members.needed > members.present {
            return Err(refused("some are leaving"));
        }
        if members.wanted > members.present && wanted > members.present {
            return Err(refused("not all have joined yet"));
        }
        *members = Members { wanted, needed: wanted.max(members.present), ..*members };
        self.asked_members.push((role, wanted));
        Ok(())
    }

    fn rebalance(&mut self, ip: IpAddr, rebalance: Rebalance) -> Result<(), RequestError> {
        let run = self.runs.get(&ip).ok_or_else(|| refused("no coordinator"))?;
        self.slots_decided.insert(run.clone(), rebalance.decided_seconds);
        self.asked_rebalances.push(rebalance);
        Ok(())
    }

    /// The members of a role of the only job, by its coordinator.
    pub fn members(&self, role: Role) -> Members {
        self.runs.values().filter_map(|run| self.members.get(run)).next().unwrap()[&role]
    }

    /// The coordinator of `pod` is one tick older.
    fn age(&mut self, pod: &Value, api: &ApiServer) {
        let uid = pod["metadata"]["uid"].as_str().unwrap().to_owned();
        let attempt: usize = pod["metadata"]["labels"]["rectrain.dev/attempt"].as_str().unwrap().parse().unwrap();
        let age = *self.ages.entry(uid).and_modify(|age| *age += 1).or_insert(0);
        let Some(ip) = pod["status"]["podIP"].as_str() else { return };
        let ip: IpAddr = ip.parse().unwrap();
        self.coordinators.insert(ip, (attempt.to_string(), age));
        let restarts = &pod["status"]["containerStatuses"][0]["restartCount"];
        let run = format!("{}/{restarts}", pod["metadata"]["uid"]);
        let read = manifest_of(api, pod);
        let mode = || serde_json::from_value(read["spec"]["training"]["mode"].clone()).unwrap();
        self.modes.entry(run.clone()).or_insert_with(mode);
        let started = |role: Role| {
            let started = read["spec"]["roles"][role.section()]["replicas"].as_u64().unwrap() as u32;
            (role, Members { present: started, wanted: started, needed: started })
        };
        let members = self.members.entry(run.clone());
        let members = members.or_insert_with(|| Role::MEMBERS.into_iter().map(started).collect());
        members.iter_mut().for_each(|(role, members)| join_and_leave(*role, members, api));
        self.runs.insert(ip, run);
        if let Some(certificate) = certificate(api, pod) {
            self.certificates.insert(ip, certificate);
        }
    }

    /// A schedule switches the mode.
    pub fn switch_all(&mut self, mode: Mode) {
        self.modes.values_mut().for_each(|present| *present = mode);
    }
}

fn refused(message: &str) -> RequestError {
    Status::failed_precondition(message).into()
}

impl World {
    /// A world with one job and an operator that has just started.
    pub fn new(manifest: &str, scripts: Vec<Script>) -> Self {
        NOW.set(1_800_000_000);
        let api = Arc::new(Mutex::new(ApiServer::default()));
        let mut job: Value =
            serde_json::to_value(rectrain_crds::parse_manifest(manifest, "job.yaml").unwrap()).unwrap();
        job["metadata"]["namespace"] = json!(NAMESPACE);
        api.lock().create("rectrainingjobs", job);
        // Every kill of the operator wakes the test in the same way.
        let killed = Arc::clone(&api.lock().killed);
        let scripts = Arc::new(Mutex::new(Scripts { by_attempt: scripts, killed, ..Scripts::default() }));
        let operator = operator(&api, &scripts);
        Self { api, scripts, operator }
    }

    pub fn api(&self) -> MutexGuard<'_, ApiServer> {
        self.api.lock()
    }

    /// Another process replaces the operator.
    pub fn replace_operator(&mut self) {
        self.operator = operator(&self.api, &self.scripts);
    }

    pub fn job(&self) -> RecTrainingJob {
        let job = self.api().get("rectrainingjobs", JOB).expect("the job is there").clone();
        serde_json::from_value(job).unwrap()
    }

    pub fn phase(&self) -> Option<Phase> {
        self.job().status?.phase
    }

    /// Reason and message of the condition of this type, if it is true.
    pub fn condition(&self, kind: &str) -> Option<(String, String)> {
        let status = self.job().status?;
        let condition = status.conditions.into_iter().find(|c| c.type_ == kind && c.status == "True")?;
        Some((condition.reason, condition.message))
    }

    /// The user changes the job.
    pub fn edit(&self, change: impl FnOnce(&mut Value)) {
        let mut api = self.api();
        let job = api.get_mut("rectrainingjobs", JOB).expect("the job is there");
        change(&mut job["spec"]);
        let generation = job["metadata"]["generation"].as_i64().unwrap() + 1;
        job["metadata"]["generation"] = json!(generation);
        api.touch("rectrainingjobs", JOB);
    }

    /// One reconcile.
    pub async fn reconcile(&self) -> Result<Action, ReconcileError> {
        let seen = Arc::new(match self.api().get("rectrainingjobs", JOB) {
            Some(job) => serde_json::from_value(job.clone()).unwrap(),
            None => return Ok(Action::await_change()),
        });
        self.reconcile_as_seen(&seen).await
    }

    /// One reconcile of the job as the watch has it, perhaps late.
    pub async fn reconcile_as_seen(&self, seen: &Arc<RecTrainingJob>) -> Result<Action, ReconcileError> {
        let action = Box::pin(reconcile(Arc::clone(seen), Arc::clone(&self.operator))).await?;
        Ok(action.unwrap_or(PUT_ASIDE))
    }

    /// Reconciles until a reconcile changes nothing.
    pub async fn settle(&self) {
        for _ in 0..20 {
            let before = self.api().revision();
            self.reconcile().await.unwrap();
            // Tasks that wait for an answer are no part of a reconcile.
            tokio::task::yield_now().await;
            if self.api().revision() == before {
                return;
            }
        }
        panic!("the operator never settles");
    }

    /// Five seconds pass: StatefulSets create and delete pods, and jobs make progress.
    pub fn tick(&self) {
        NOW.set(NOW.get() + 5);
        self.api().run_stateful_sets();
        let api = self.api.lock();
        let mut scripts = self.scripts.lock();
        scripts.coordinators.clear();
        scripts.runs.clear();
        scripts.certificates.clear();
        let is_coordinator = |pod: &&&Value| pod["metadata"]["labels"]["rectrain.dev/role"] == "coordinator";
        for pod in api.list("pods").iter().filter(is_coordinator) {
            scripts.age(pod, &api);
        }
    }

    /// Lets the job live until it has ended and its pods are gone.
    pub async fn live(&self) {
        for _ in 0..200 {
            self.settle().await;
            let ended =
                matches!(self.phase(), Some(Phase::Complete | Phase::Failed)) && self.api().list("pods").is_empty();
            if ended {
                return;
            }
            self.tick();
        }
        panic!("the job never ends: {:?}", self.job().status);
    }

    /// All objects, without identities, revisions and times, which differ from run to run.
    pub fn outline(&self) -> Value {
        self.api().outline()
    }
}

/// Members join as soon as all their pods are ready. One tick later the leaving ones are not
/// needed.
fn join_and_leave(role: Role, members: &mut Members, api: &ApiServer) {
    let is_of_role = |pod: &&&Value| pod["metadata"]["labels"]["rectrain.dev/role"] == role.name();
    let pods = api.list("pods").iter().filter(is_of_role).filter(|pod| api::is_ready(pod)).count();
    if members.present == members.wanted {
        members.needed = members.present;
    } else if pods as u32 >= members.needed {
        members.present = members.wanted;
    }
}

/// The manifest that a coordinator reads at its start: of the ConfigMap that its pod names, which
/// must exist.
fn manifest_of(api: &ApiServer, pod: &Value) -> Value {
    let volumes = pod["spec"]["volumes"].as_array().expect("volumes");
    let name = volumes.iter().find_map(|volume| volume["configMap"]["name"].as_str()).expect("a ConfigMap");
    let map = api.get("configmaps", name).unwrap_or_else(|| panic!("{name}, which a pod reads, does not exist"));
    serde_json::from_str(map["data"]["job.yaml"].as_str().unwrap()).unwrap()
}

/// The certificate that a pod reads, if it uses one: of the Secret that it names, which must exist.
fn certificate(api: &ApiServer, pod: &Value) -> Option<JobCertificate> {
    let arguments = pod["spec"]["containers"][0]["args"].as_array().expect("arguments");
    arguments.iter().find(|argument| argument.as_str().is_some_and(|text| text.starts_with("--tls=")))?;
    let volumes = pod["spec"]["volumes"].as_array().expect("volumes");
    let name = volumes.iter().find_map(|volume| volume["secret"]["secretName"].as_str()).expect("a Secret");
    let secret = api.get("secrets", name).unwrap_or_else(|| panic!("{name}, which a pod reads, does not exist"));
    let secret: Secret = serde_json::from_value(secret.clone()).unwrap();
    let file = |name: &str| String::from_utf8(secret.data.as_ref().unwrap()[name].0.clone()).unwrap();
    Some(JobCertificate { authority: file("ca.crt"), certificate: file("tls.crt"), key: file("tls.key") })
}

pub fn passes(seconds: i64) {
    NOW.set(NOW.get() + seconds);
}

fn operator(api: &Arc<Mutex<ApiServer>>, scripts: &Arc<Mutex<Scripts>>) -> Arc<Context> {
    let client: Client = api::client(api);
    let metrics = OperatorMetrics::new().unwrap();
    let coordinators = Arc::new(ScriptedCoordinators(Arc::clone(scripts)));
    let (coordinators, _late) = CoordinatorPoller::new(coordinators, metrics.clone());
    let processes = Arc::new(ScriptedMetrics(Arc::clone(scripts)));
    Arc::new(Context {
        announcer: Announcer::new(client.clone(), Some("test".to_owned())),
        client,
        config: OperatorConfig { runtime_image: "runtime:1".to_owned(), tls: true, ..OperatorConfig::default() },
        root: Some(Root::from_bytes([7; 32])),
        reader: Reader::Listed,
        coordinators,
        now,
        metrics,
        stored_forms: StoredForms::default(),
        memories: JobMemories::default(),
        measurements: Measurements { processes, nodes: Arc::new(NoNodes) },
        traces: Arc::default(),
    })
}

/// All processes have the scripted metrics.
struct ScriptedMetrics(Arc<Mutex<Scripts>>);

impl ScrapeMetrics for ScriptedMetrics {
    fn scrape(&self, address: SocketAddr) -> BoxFuture<'_, Option<String>> {
        let text = self.0.lock().metrics.as_ref().map(|metrics| metrics(address.ip(), NOW.get()));
        Box::pin(async move { text })
    }
}

struct ScriptedCoordinators(Arc<Mutex<Scripts>>);

impl CoordinatorClient for ScriptedCoordinators {
    fn view<'a>(&'a self, coordinator: &'a CoordinatorEndpoint) -> BoxFuture<'a, CoordinatorView> {
        let scripts = self.0.lock();
        let ip = coordinator.address.ip();
        let known = scripts.certificates.get(&ip);
        assert_eq!(coordinator.certificate.as_ref(), known, "another certificate than the pod's");
        let view = scripts.coordinators.get(&ip).and_then(|(attempt, age)| {
            let attempt: usize = attempt.parse().unwrap();
            let script = scripts.by_attempt.get(attempt - 1).or(scripts.by_attempt.last())?;
            script.get(*age).or(script.last()).cloned()
        });
        let mode = scripts.runs.get(&ip).and_then(|run| scripts.modes.get(run)).copied();
        let members = scripts.runs.get(&ip).and_then(|run| scripts.members.get(run)).cloned().unwrap_or_default();
        let run = scripts.runs.get(&ip);
        let slots_decided_seconds = run.and_then(|run| scripts.slots_decided.get(run)).copied().unwrap_or(0);
        let view = match view.unwrap_or(CoordinatorView::Silent) {
            CoordinatorView::Live(report) => {
                let changed = run.and_then(|run| scripts.budgets.get(run)).copied();
                let tables = Box::new(Tables { budget: changed.or(report.tables.budget), ..*report.tables });
                CoordinatorView::Live(Report { mode, members, slots_decided_seconds, tables, ..report })
            }
            other => other,
        };
        let slow = scripts.slow.clone();
        Box::pin(async move {
            if let Some(slow) = slow {
                slow.notified().await;
            }
            view
        })
    }

    fn set_mode<'a>(
        &'a self,
        coordinator: &'a CoordinatorEndpoint,
        mode: Mode,
        _: &'a str,
    ) -> BoxFuture<'a, SwitchAnswer> {
        let ip = coordinator.address.ip();
        let mut scripts = self.0.lock();
        let fault = scripts.fault.take();
        let lost = SwitchAnswer::Again("no answer".to_owned());
        let answer = match fault {
            Some(fault) if !fault.is_done() => lost,
            Some(_) => {
                scripts.set_mode(ip, mode);
                lost
            }
            None => scripts.set_mode(ip, mode),
        };
        if fault.is_some_and(Fault::kills) {
            scripts.killed.notify_one();
            return Box::pin(std::future::pending());
        }
        Box::pin(std::future::ready(answer))
    }

    fn scale<'a>(
        &'a self,
        at: &'a CoordinatorEndpoint,
        role: Role,
        replicas: u32,
        reason: &'a str,
    ) -> BoxFuture<'a, Result<(), RequestError>> {
        let mut scripts = self.0.lock();
        scripts.reasons.push(reason.to_owned());
        let answer = scripts.scale(at.address.ip(), role, replicas);
        Box::pin(std::future::ready(answer))
    }

    fn set_budget<'a>(
        &'a self,
        at: &'a CoordinatorEndpoint,
        budget: BudgetStatus,
    ) -> BoxFuture<'a, Result<(), RequestError>> {
        let mut scripts = self.0.lock();
        let answer = scripts.set_budget(at.address.ip(), budget);
        Box::pin(std::future::ready(answer))
    }

    fn save<'a>(&'a self, _: &'a CoordinatorEndpoint) -> BoxFuture<'a, Result<String, RequestError>> {
        let mut scripts = self.0.lock();
        scripts.asked_saves += 1;
        match scripts.saved.clone() {
            Some(saved) => Box::pin(std::future::ready(saved.map_err(|message| refused(&message)))),
            None => Box::pin(std::future::pending()),
        }
    }

    fn rebalance<'a>(
        &'a self,
        at: &'a CoordinatorEndpoint,
        rebalance: Rebalance,
        reason: &'a str,
    ) -> BoxFuture<'a, Result<(), RequestError>> {
        let mut scripts = self.0.lock();
        scripts.reasons.push(reason.to_owned());
        let answer = scripts.rebalance(at.address.ip(), rebalance);
        Box::pin(std::future::ready(answer))
    }
}

pub fn live(stage: Stage, step: u64) -> CoordinatorView {
    CoordinatorView::Live(report(stage, step))
}

/// A coordinator that reports the time without progress.
pub fn idle(stage: Stage, step: u64, seconds: f64) -> CoordinatorView {
    CoordinatorView::Live(Report { idle_seconds: Some(seconds), ..report(stage, step) })
}

fn report(stage: Stage, step: u64) -> Report {
    Report {
        idle_seconds: None,
        recovered: false,
        slots_decided_seconds: 0,
        slowest: None,
        no_step: None,
        tables: Box::new(Tables { budget: None, size: Some((100 * step, 9_000 * step)) }),
        stream: None,
        quality: None,
        missing: Vec::new(),
        stage,
        // The state of the coordinator replaces both.
        mode: None,
        members: BTreeMap::new(),
        step,
        total_steps: Some(4),
        samples_per_second: 1000.4,
        loss: 0.5,
        auc: Some(0.612_345_678),
        unseen: BTreeMap::from([("C1".to_owned(), 0.012_345_678)]),
        last_checkpoint: (step > 0).then(|| checkpoint(step)),
    }
}

fn checkpoint(step: u64) -> CheckpointStatus {
    CheckpointStatus { name: format!("full-{step}"), step }
}

/// Trains for `steps` ticks.
pub fn long(steps: u64) -> Script {
    let mut script = vec![live(Stage::Starting, 0)];
    script.extend((1..=steps).map(|step| live(Stage::Training, step)));
    script.push(complete());
    script
}

pub fn complete() -> CoordinatorView {
    let summary = JobSummary {
        auc: Some(0.7),
        steps: 4,
        samples: 4000,
        parameters_sha256: "ab".repeat(32),
        ..JobSummary::default()
    };
    CoordinatorView::Complete { summary: Box::new(summary), last_checkpoint: Some(checkpoint(4)) }
}

pub fn failed(message: &str, user_error: bool) -> CoordinatorView {
    CoordinatorView::Failed { message: message.to_owned(), user_error }
}

/// Starts, trains, evaluates, is complete.
pub fn good() -> Script {
    vec![
        CoordinatorView::Silent,
        live(Stage::Starting, 0),
        live(Stage::Training, 1),
        live(Stage::Training, 3),
        live(Stage::Evaluating, 4),
        complete(),
    ]
}

/// Trains, then a member is lost.
pub fn crashing() -> Script {
    vec![
        live(Stage::Training, 1),
        live(Stage::Training, 2),
        failed("ps 1 was restarted in the middle of the job", false),
    ]
}

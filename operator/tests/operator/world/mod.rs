//! A cluster small enough for a test: an API server in memory (get, list, server-side apply, status, delete, garbage collection),
//! the controller of StatefulSets with a kubelet in one step, and a coordinator whose job goes as scripted. Time stands still
//! between two [`World::tick`]s. Any call to the API server can be made to fail, in every way a call can.

pub mod api;
pub mod faults;

use std::cell::Cell;
use std::collections::{BTreeMap, HashMap, VecDeque};
use std::net::{IpAddr, SocketAddr};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use futures::future::BoxFuture;
use jiff::Timestamp;
use k8s_openapi::api::core::v1::Secret;
use kube::Client;
use kube::runtime::controller::Action;
use rectrain_crds::{CheckpointStatus, JobSummary, Mode, Phase, RecTrainingJob};
use rectrain_operator::certificates::{JobCertificate, Root};
use rectrain_operator::config::OperatorConfig;
use rectrain_operator::coordinator::{AskCoordinator, CoordinatorView, Members, Rebalance, Report, Stage, Whereabouts};
use rectrain_operator::events::Announcer;
use rectrain_operator::measure::ReadMetrics;
use rectrain_operator::metrics::OperatorMetrics;
use rectrain_operator::names::Role;
use rectrain_operator::nodes::NoNodes;
use rectrain_operator::questions::Questions;
use rectrain_operator::reconcile::apply::Settled;
use rectrain_operator::reconcile::dereference::Reader;
use rectrain_operator::reconcile::{Context, ReconcileError, reconcile};
use rectrain_operator::switch::SwitchAnswer;
use serde_json::{Value, json};
use tokio::sync::Notify;

use self::api::ApiServer;
use self::faults::Fault;

/// What a reconcile gives here of a job that it has put aside: no other gives it.
pub const PUT_ASIDE: Action = Action::requeue(Duration::MAX);
pub const NAMESPACE: &str = "ads";
pub const JOB: &str = "clicks";

pub const MANIFEST: &str = r#"
apiVersion: rectrain.dev/v1alpha1
kind: RecTrainingJob
metadata: {name: clicks}
spec:
  model: {kind: deepfm}
  features: {sparse: [{name: "C{1..4}"}]}
  data: {synthetic: {rows: 1000}}
  roles: {ps: {replicas: 2}, denseWorker: {replicas: 2}}
"#;

thread_local! {
    static NOW: Cell<i64> = const { Cell::new(1_800_000_000) };
}

fn now() -> Timestamp {
    Timestamp::from_second(NOW.get()).unwrap()
}

/// What a coordinator says at each tick of its pod's life; the last word stays.
pub type Script = Vec<CoordinatorView>;

pub struct World {
    pub api: Arc<Mutex<ApiServer>>,
    pub scripts: Arc<Mutex<Scripts>>,
    pub operator: Arc<Context>,
}

/// The scripts of the attempts, how far the coordinator of each pod is, and the training mode that it is in.
#[derive(Default)]
pub struct Scripts {
    pub by_attempt: Vec<Script>,
    /// What coordinators were asked to go on in.
    pub asked: Vec<Mode>,
    /// How often one of them has gone over to another mode.
    pub switches: usize,
    /// What they will answer, the next answer first; without one they agree.
    pub answers: VecDeque<SwitchAnswer>,
    /// What becomes of the operator when a coordinator is asked for a mode, once.
    pub fault: Option<Fault>,
    /// Coordinators answer how their jobs stand only after this.
    pub slow: Option<Arc<Notify>>,
    /// What the process at an address measures at a time, in Prometheus' text format.
    pub metrics: Option<fn(IpAddr, i64) -> String>,
    killed: Arc<Notify>,
    ages: HashMap<String, usize>,
    coordinators: HashMap<IpAddr, (String, usize)>,
    /// By pod and its restarts.
    modes: HashMap<String, Mode>,
    runs: HashMap<IpAddr, String>,
    /// By pod and its restarts.
    members: HashMap<String, BTreeMap<Role, Members>>,
    /// What they were asked for.
    pub asked_members: Vec<(Role, u32)>,
    /// What they were asked to spread anew, whether or not they had already.
    pub asked_rebalances: Vec<Rebalance>,
    /// How often one was asked for a checkpoint.
    pub asked_saves: usize,
    /// What becomes of that; without one it never ends.
    pub saved: Option<Result<String, String>>,
    /// By pod and its restarts, what that was decided at last.
    slots_decided: HashMap<String, u64>,
    /// And why.
    pub reasons: Vec<String>,
    /// What each coordinator asks to be shown.
    certificates: HashMap<IpAddr, JobCertificate>,
}

impl Scripts {
    /// What the coordinator does that is asked for a mode.
    fn set_mode(&mut self, ip: IpAddr, mode: Mode) -> SwitchAnswer {
        let Some(run) = self.runs.get(&ip) else { return SwitchAnswer::Again("nobody is there".to_owned()) };
        self.asked.push(mode);
        let answer = self.answers.pop_front().unwrap_or(SwitchAnswer::Accepted);
        if answer == SwitchAnswer::Accepted {
            self.switches += usize::from(self.modes.insert(run.clone(), mode) != Some(mode));
        }
        answer
    }

    /// What the coordinator does that is asked for so many members of a role.
    fn scale(&mut self, ip: IpAddr, role: Role, wanted: u32) -> Result<(), String> {
        let members = self.runs.get(&ip).and_then(|run| self.members.get_mut(run)).ok_or("nobody is there")?;
        let members = members.get_mut(&role).unwrap();
        if members.present == members.wanted && members.needed > members.present {
            return Err("some are leaving".to_owned());
        }
        if members.wanted > members.present && wanted > members.present {
            return Err("not all have joined yet".to_owned());
        }
        *members = Members { wanted, needed: wanted.max(members.present), ..*members };
        self.asked_members.push((role, wanted));
        Ok(())
    }

    fn rebalance(&mut self, ip: IpAddr, rebalance: Rebalance) -> Result<(), String> {
        let run = self.runs.get(&ip).ok_or("nobody is there")?;
        self.slots_decided.insert(run.clone(), rebalance.decided_seconds);
        self.asked_rebalances.push(rebalance);
        Ok(())
    }

    /// The members of a role of the only job, as its coordinator knows them.
    pub fn members(&self, role: Role) -> Members {
        self.runs.values().filter_map(|run| self.members.get(run)).next().unwrap()[&role]
    }

    /// A schedule switches.
    pub fn switch_all(&mut self, mode: Mode) {
        self.modes.values_mut().for_each(|present| *present = mode);
    }
}

impl World {
    /// With one job and an operator that has just started.
    pub fn new(manifest: &str, scripts: Vec<Script>) -> Self {
        NOW.set(1_800_000_000);
        let api = Arc::new(Mutex::new(ApiServer::default()));
        let mut job: Value =
            serde_json::to_value(rectrain_crds::parse_manifest(manifest, "job.yaml").unwrap()).unwrap();
        job["metadata"]["namespace"] = json!(NAMESPACE);
        api.lock().unwrap().create("rectrainingjobs", job);
        // Whoever kills the operator wakes the test in the same way.
        let killed = Arc::clone(&api.lock().unwrap().killed);
        let scripts = Arc::new(Mutex::new(Scripts { by_attempt: scripts, killed, ..Scripts::default() }));
        let operator = operator(&api, &scripts);
        Self { api, scripts, operator }
    }

    pub fn api(&self) -> MutexGuard<'_, ApiServer> {
        self.api.lock().unwrap()
    }

    /// The operator's process is gone, and another one takes its place.
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

    /// The condition of this type that holds: its reason and message.
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

    /// One reconcile of the job as the watch has it, late or not.
    pub async fn reconcile_as_seen(&self, seen: &Arc<RecTrainingJob>) -> Result<Action, ReconcileError> {
        let action = Box::pin(reconcile(Arc::clone(seen), Arc::clone(&self.operator))).await?;
        Ok(action.unwrap_or(PUT_ASIDE))
    }

    /// Reconciles until a reconcile changes nothing.
    pub async fn settle(&self) {
        for _ in 0..20 {
            let before = self.api().revision();
            self.reconcile().await.unwrap();
            // Whoever waits for an answer is no part of a reconcile.
            tokio::task::yield_now().await;
            if self.api().revision() == before {
                return;
            }
        }
        panic!("the operator never comes to rest");
    }

    /// Some seconds pass: pods come and go as StatefulSets want them, and jobs go on.
    pub fn tick(&self) {
        NOW.set(NOW.get() + 5);
        self.api().run_stateful_sets();
        let api = self.api.lock().unwrap();
        let mut scripts = self.scripts.lock().unwrap();
        scripts.coordinators.clear();
        scripts.runs.clear();
        scripts.certificates.clear();
        for pod in api.list("pods") {
            if pod["metadata"]["labels"]["rectrain.dev/role"] != "coordinator" {
                continue;
            }
            let uid = pod["metadata"]["uid"].as_str().unwrap().to_owned();
            let attempt: usize = pod["metadata"]["labels"]["rectrain.dev/attempt"].as_str().unwrap().parse().unwrap();
            let age = scripts.ages.entry(uid).and_modify(|age| *age += 1).or_insert(0);
            let age = *age;
            let Some(ip) = pod["status"]["podIP"].as_str() else { continue };
            let ip: IpAddr = ip.parse().unwrap();
            scripts.coordinators.insert(ip, (attempt.to_string(), age));
            let restarts = &pod["status"]["containerStatuses"][0]["restartCount"];
            let run = format!("{}/{restarts}", pod["metadata"]["uid"]);
            let read = manifest_of(&api, pod);
            scripts
                .modes
                .entry(run.clone())
                .or_insert_with(|| serde_json::from_value(read["spec"]["training"]["mode"].clone()).unwrap());
            let started = |role: Role| {
                let started = read["spec"]["roles"][role.field()]["replicas"].as_u64().unwrap() as u32;
                (role, Members { present: started, wanted: started, needed: started })
            };
            let members =
                scripts.members.entry(run.clone()).or_insert_with(|| Role::MEMBERS.into_iter().map(started).collect());
            members.iter_mut().for_each(|(role, members)| come_and_go(*role, members, &api));
            scripts.runs.insert(ip, run);
            if let Some(certificate) = certificate(&api, pod) {
                scripts.certificates.insert(ip, certificate);
            }
        }
    }

    /// Lets the job live until it has ended and everything is at rest.
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

    /// Everything that is there, without what differs from run to run: identities, revisions and times.
    pub fn outline(&self) -> Value {
        self.api().outline()
    }
}

/// Members take part as soon as all are there; one tick later those that hold nothing any more are not needed.
fn come_and_go(role: Role, members: &mut Members, api: &ApiServer) {
    let is_it = |pod: &&&Value| pod["metadata"]["labels"]["rectrain.dev/role"] == role.name();
    let there = api.list("pods").iter().filter(is_it).count();
    if members.present == members.wanted {
        members.needed = members.present;
    } else if there as u32 >= members.needed {
        members.present = members.wanted;
    }
}

/// What a coordinator reads when it starts: the manifest of the ConfigMap that its pod names, which must be there.
fn manifest_of(api: &ApiServer, pod: &Value) -> Value {
    let volumes = pod["spec"]["volumes"].as_array().expect("volumes");
    let name = volumes.iter().find_map(|volume| volume["configMap"]["name"].as_str()).expect("a ConfigMap");
    let map = api.get("configmaps", name).unwrap_or_else(|| panic!("{name}, which a pod reads, is not there"));
    serde_json::from_str(map["data"]["job.yaml"].as_str().unwrap()).unwrap()
}

/// The certificate that a pod reads, if it is told to: of the Secret that it names, which must be there.
fn certificate(api: &ApiServer, pod: &Value) -> Option<JobCertificate> {
    let arguments = pod["spec"]["containers"][0]["args"].as_array().expect("arguments");
    arguments.iter().find(|argument| argument.as_str().is_some_and(|text| text.starts_with("--tls=")))?;
    let volumes = pod["spec"]["volumes"].as_array().expect("volumes");
    let name = volumes.iter().find_map(|volume| volume["secret"]["secretName"].as_str()).expect("a Secret");
    let secret = api.get("secrets", name).unwrap_or_else(|| panic!("{name}, which a pod reads, is not there"));
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
    let (questions, _late) = Questions::new(Arc::new(ScriptedCoordinators(Arc::clone(scripts))), metrics.clone());
    Arc::new(Context {
        announcer: Announcer::new(client.clone(), Some("test".to_owned())),
        client,
        config: OperatorConfig { runtime_image: "runtime:1".to_owned(), tls: true, ..OperatorConfig::default() },
        root: Some(Root::from_bytes([7; 32])),
        reader: Reader::Listed,
        questions,
        now,
        metrics,
        settled: Settled::default(),
        obstacles: Mutex::default(),
        read_metrics: Arc::new(ScriptedMetrics(Arc::clone(scripts))),
        read_nodes: Arc::new(NoNodes),
        watched: Mutex::default(),
        traces: Arc::default(),
        memories: Mutex::default(),
        known: Mutex::default(),
    })
}

/// Dense workers measure what is scripted; nobody else measures anything.
struct ScriptedMetrics(Arc<Mutex<Scripts>>);

impl ReadMetrics for ScriptedMetrics {
    fn read(&self, address: SocketAddr) -> BoxFuture<'_, Option<String>> {
        let text = self.0.lock().unwrap().metrics.as_ref().map(|metrics| metrics(address.ip(), NOW.get()));
        Box::pin(async move { text })
    }
}

struct ScriptedCoordinators(Arc<Mutex<Scripts>>);

impl AskCoordinator for ScriptedCoordinators {
    fn ask<'a>(&'a self, coordinator: &'a Whereabouts) -> BoxFuture<'a, CoordinatorView> {
        let scripts = self.0.lock().unwrap();
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
                CoordinatorView::Live(Report { mode, members, slots_decided_seconds, ..report })
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

    fn set_mode<'a>(&'a self, coordinator: &'a Whereabouts, mode: Mode, _: &'a str) -> BoxFuture<'a, SwitchAnswer> {
        let ip = coordinator.address.ip();
        let mut scripts = self.0.lock().unwrap();
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
        at: &'a Whereabouts,
        role: Role,
        replicas: u32,
        reason: &'a str,
    ) -> BoxFuture<'a, Result<(), String>> {
        let mut scripts = self.0.lock().unwrap();
        scripts.reasons.push(reason.to_owned());
        let answer = scripts.scale(at.address.ip(), role, replicas);
        Box::pin(std::future::ready(answer))
    }

    fn save<'a>(&'a self, _: &'a Whereabouts) -> BoxFuture<'a, Result<String, String>> {
        let mut scripts = self.0.lock().unwrap();
        scripts.asked_saves += 1;
        match scripts.saved.clone() {
            Some(saved) => Box::pin(std::future::ready(saved)),
            None => Box::pin(std::future::pending()),
        }
    }

    fn rebalance<'a>(
        &'a self,
        at: &'a Whereabouts,
        rebalance: Rebalance,
        reason: &'a str,
    ) -> BoxFuture<'a, Result<(), String>> {
        let mut scripts = self.0.lock().unwrap();
        scripts.reasons.push(reason.to_owned());
        let answer = scripts.rebalance(at.address.ip(), rebalance);
        Box::pin(std::future::ready(answer))
    }
}

pub fn live(stage: Stage, step: u64) -> CoordinatorView {
    CoordinatorView::Live(report(stage, step))
}

/// It says for how long it has made no progress.
pub fn idle(stage: Stage, step: u64, seconds: f64) -> CoordinatorView {
    CoordinatorView::Live(Report { idle_seconds: Some(seconds), ..report(stage, step) })
}

fn report(stage: Stage, step: u64) -> Report {
    Report {
        idle_seconds: None,
        slots_decided_seconds: 0,
        missing: Vec::new(),
        stage,
        // Those of the coordinator's pod are put in their place.
        mode: None,
        members: BTreeMap::new(),
        step,
        total_steps: Some(4),
        samples_per_second: 1000.4,
        loss: 0.5,
        auc: Some(0.612_345_678),
        last_checkpoint: (step > 0).then(|| checkpoint(step)),
    }
}

fn checkpoint(step: u64) -> CheckpointStatus {
    CheckpointStatus { name: format!("full-{step}"), step }
}

/// Trains for so many ticks.
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

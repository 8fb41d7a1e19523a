//! A cluster small enough for a test: an API server in memory (get, list, server-side apply, status, delete, garbage collection),
//! the controller of StatefulSets with a kubelet in one step, and a coordinator whose job goes as scripted. Time stands still
//! between two [`World::tick`]s. Any call to the API server can be made to fail, in every way a call can.

pub mod api;
pub mod faults;

use std::cell::Cell;
use std::collections::HashMap;
use std::net::{IpAddr, SocketAddr};
use std::sync::{Arc, Mutex, MutexGuard};

use futures::future::BoxFuture;
use jiff::Timestamp;
use kube::Client;
use kube::runtime::controller::Action;
use rectrain_crds::{JobSummary, Phase, RecTrainingJob};
use rectrain_operator::config::OperatorConfig;
use rectrain_operator::coordinator::{AskCoordinator, CoordinatorView, Report, Stage};
use rectrain_operator::events::Announcer;
use rectrain_operator::metrics::OperatorMetrics;
use rectrain_operator::reconcile::apply::Settled;
use rectrain_operator::reconcile::dereference::Reader;
use rectrain_operator::reconcile::{Context, ReconcileError, reconcile};
use serde_json::{Value, json};

use self::api::ApiServer;

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

/// The scripts of the attempts, and how far the coordinator of each pod is.
#[derive(Default)]
pub struct Scripts {
    pub by_attempt: Vec<Script>,
    ages: HashMap<String, usize>,
    coordinators: HashMap<IpAddr, (String, usize)>,
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
        let scripts = Arc::new(Mutex::new(Scripts { by_attempt: scripts, ..Scripts::default() }));
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
        reconcile(seen, Arc::clone(&self.operator)).await
    }

    /// Reconciles until a reconcile changes nothing.
    pub async fn settle(&self) {
        for _ in 0..20 {
            let before = self.api().revision();
            self.reconcile().await.unwrap();
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

pub fn passes(seconds: i64) {
    NOW.set(NOW.get() + seconds);
}

fn operator(api: &Arc<Mutex<ApiServer>>, scripts: &Arc<Mutex<Scripts>>) -> Arc<Context> {
    let client: Client = api::client(api);
    Arc::new(Context {
        announcer: Announcer::new(client.clone(), Some("test".to_owned())),
        client,
        config: OperatorConfig { runtime_image: "runtime:1".to_owned(), ..OperatorConfig::default() },
        reader: Reader::Listed,
        ask: Arc::new(ScriptedCoordinators(Arc::clone(scripts))),
        now,
        metrics: OperatorMetrics::new().unwrap(),
        settled: Settled::default(),
        obstacles: Mutex::default(),
    })
}

struct ScriptedCoordinators(Arc<Mutex<Scripts>>);

impl AskCoordinator for ScriptedCoordinators {
    fn ask(&self, address: SocketAddr) -> BoxFuture<'_, CoordinatorView> {
        let scripts = self.0.lock().unwrap();
        let view = scripts.coordinators.get(&address.ip()).and_then(|(attempt, age)| {
            let attempt: usize = attempt.parse().unwrap();
            let script = scripts.by_attempt.get(attempt - 1).or(scripts.by_attempt.last())?;
            script.get(*age).or(script.last()).cloned()
        });
        Box::pin(std::future::ready(view.unwrap_or(CoordinatorView::Silent)))
    }
}

pub fn live(stage: Stage, step: u64) -> CoordinatorView {
    CoordinatorView::Live(Report {
        stage,
        mode: Some(rectrain_crds::Mode::Sync),
        step,
        total_steps: Some(4),
        samples_per_second: 1000.4,
        loss: 0.5,
        auc: Some(0.612_345_678),
    })
}

pub fn complete() -> CoordinatorView {
    CoordinatorView::Complete(Box::new(JobSummary {
        auc: Some(0.7),
        steps: 4,
        samples: 4000,
        parameters_sha256: "ab".repeat(32),
        ..JobSummary::default()
    }))
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

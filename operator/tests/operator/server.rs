//! Servers of a trained model, against the API server in memory.

use std::sync::Arc;
use std::time::Duration;

use kube_runtime::controller::Action;
use parking_lot::Mutex;
use rectrain_crds::{RecModelServerStatus, ServerPhase, VersionStatus};
use rectrain_operator::config::OperatorConfig;
use rectrain_operator::events::Announcer;
use rectrain_operator::metrics::OperatorMetrics;
use rectrain_operator::names::JobName;
use rectrain_operator::reconcile::error::ReconcileError;
use rectrain_operator::reconcile::stored_forms::StoredForms;
use rectrain_operator::server::act::{ServerContext, reconcile};
use serde_json::{Value, json};

use crate::world::api::{ApiServer, client};
use crate::world::faults::Fault;
use crate::world::{JOB, NAMESPACE, now, passes};

pub mod shards;

/// The RecModelServer of the tests.
const NAME: &str = "answers";
/// The name of all its objects.
const OBJECT: &str = "answers-server";
/// The name of the canary's Deployment.
const CANARY: &str = "answers-canary";

/// An operator, and an API server with a job and a RecModelServer.
pub struct Servers {
    pub api: Arc<Mutex<ApiServer>>,
    operator: ServerContext,
}

fn operator(api: &Arc<Mutex<ApiServer>>) -> ServerContext {
    let client = client(api);
    ServerContext {
        announcer: Announcer::new(client.clone(), Some("test".to_owned())),
        client,
        config: OperatorConfig { runtime_image: "runtime:1".to_owned(), ..OperatorConfig::default() },
        now,
        metrics: OperatorMetrics::new().unwrap(),
        stored_forms: StoredForms::default(),
        obstacles: Mutex::default(),
    }
}

/// A job that has saved the checkpoint of a step.
fn job(checkpoint: Option<(&str, u64)>) -> Value {
    let last = checkpoint.map(|(name, step)| json!({"name": name, "step": step}));
    json!({
        "apiVersion": "rectrain.dev/v1alpha1", "kind": "RecTrainingJob",
        "metadata": {"name": JOB, "namespace": NAMESPACE},
        "spec": {
            "model": {"kind": "lr"}, "features": {"sparse": [{"name": "C1"}]},
            "data": {"synthetic": {"rows": 1000}, "storage": {"options": {"region": "eu"}, "secretName": "store"}},
            "checkpoint": {"path": "s3://ads/clicks/"},
        },
        "status": {"lastCheckpoint": last},
    })
}

impl Servers {
    fn new(spec: Value) -> Self {
        let api = Arc::new(Mutex::new(ApiServer::default()));
        let server = json!({
            "apiVersion": "rectrain.dev/v1alpha1", "kind": "RecModelServer",
            "metadata": {"name": NAME, "namespace": NAMESPACE}, "spec": spec,
        });
        api.lock().create("recmodelservers", server);
        let operator = operator(&api);
        Self { api, operator }
    }

    /// Servers of the model of a job with a checkpoint of step 800.
    fn of_job(more: Value) -> Self {
        let mut spec = json!({"model": {"job": JOB}});
        spec.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        let servers = Self::new(spec);
        servers.api.lock().create("rectrainingjobs", job(Some(("step-000000000800", 800))));
        servers
    }

    async fn reconcile(&self) -> Result<Action, ReconcileError> {
        Box::pin(reconcile(&JobName::new(NAMESPACE, NAME), &self.operator)).await
    }

    async fn settle(&self) {
        for _ in 0..20 {
            let before = self.api.lock().revision();
            self.reconcile().await.unwrap();
            if self.api.lock().revision() == before {
                return;
            }
        }
        panic!("the operator never settles");
    }

    fn edit(&self, change: impl FnOnce(&mut Value)) {
        let mut api = self.api.lock();
        let server = api.get_mut("recmodelservers", NAME).unwrap();
        change(&mut server["spec"]);
        let generation = server["metadata"]["generation"].as_i64().unwrap() + 1;
        server["metadata"]["generation"] = json!(generation);
        api.touch("recmodelservers", NAME);
    }

    /// The job saves a checkpoint.
    fn saves(&self, name: &str, step: u64) {
        let mut api = self.api.lock();
        api.get_mut("rectrainingjobs", JOB).unwrap()["status"]["lastCheckpoint"] = json!({"name": name, "step": step});
        api.touch("rectrainingjobs", JOB);
    }

    fn object(&self, plural: &str) -> Option<Value> {
        self.api.lock().get(plural, OBJECT).cloned()
    }

    fn deployment(&self) -> Value {
        self.object("deployments").expect("a Deployment")
    }

    /// The second argument of the servers: their model.
    fn model(&self) -> String {
        let deployment = self.deployment();
        deployment["spec"]["template"]["spec"]["containers"][0]["args"][1].as_str().unwrap().to_owned()
    }

    fn status(&self) -> RecModelServerStatus {
        let server = self.api.lock().get("recmodelservers", NAME).unwrap().clone();
        serde_json::from_value(server["status"].clone()).unwrap()
    }

    /// Reason and message of the condition of this type, if it is true.
    fn condition(&self, kind: &str) -> Option<(String, String)> {
        let conditions = self.status().conditions;
        let condition = conditions.into_iter().find(|c| c.type_ == kind && c.status == "True")?;
        Some((condition.reason, condition.message))
    }

    /// The Deployment has rolled out all its pods.
    fn rolls_out(&self) {
        let deployment = self.deployment();
        let (replicas, generation) = (&deployment["spec"]["replicas"], &deployment["metadata"]["generation"]);
        let status = json!({
            "replicas": replicas, "updatedReplicas": replicas, "availableReplicas": replicas,
            "observedGeneration": generation,
        });
        let mut api = self.api.lock();
        api.get_mut("deployments", OBJECT).unwrap()["status"] = status;
        for index in 0..replicas.as_u64().unwrap() {
            let name = format!("{OBJECT}-{index}");
            api.remove("pods", &name);
            let mut metadata = deployment["spec"]["template"]["metadata"].clone();
            metadata["name"] = json!(name);
            let ready = json!({"conditions": [{"type": "Ready", "status": "True"}]});
            api.create("pods", json!({"metadata": metadata, "status": ready}));
        }
    }

    /// The step in the metric of the servers that answer.
    fn served_step(&self) -> String {
        let text = self.operator.metrics.encode().unwrap();
        let line = text.lines().find(|line| line.starts_with("rectrain_operator_server_served_step{"));
        line.and_then(|line| line.split(' ').next_back()).expect("a served step").to_owned()
    }

    fn writes(&self) -> usize {
        self.api.lock().log.iter().filter(|call| !call.starts_with("GET")).count()
    }
}

#[tokio::test]
async fn servers_get_their_objects_and_become_ready() {
    let servers = Servers::of_job(json!({"replicas": 3, "maxInFlight": 64}));
    servers.settle().await;
    let deployment = servers.deployment();
    let spec = &deployment["spec"];
    assert_eq!(spec["replicas"], 3);
    assert_eq!(spec["strategy"]["rollingUpdate"], json!({"maxUnavailable": 0, "maxSurge": 1}));
    assert_eq!(spec["template"]["metadata"]["labels"]["rectrain.dev/step"], "800");
    let container = &spec["template"]["spec"]["containers"][0];
    let arguments = [
        "serve",
        "s3://ads/clicks/step-000000000800",
        "--name=answers",
        "--listen=[::]:8080",
        "--grpc=[::]:9000",
        "--drain=5s",
        "--max-requests=64",
        "--option=region=eu",
    ];
    assert_eq!(container["args"], json!(arguments));
    assert_eq!(container["image"], "runtime:1");
    assert_eq!(container["envFrom"], json!([{"secretRef": {"name": "store", "optional": false}}]));
    assert_eq!(container["readinessProbe"]["httpGet"]["path"], "/v2/health/ready");
    assert_eq!(spec["template"]["spec"]["securityContext"]["runAsNonRoot"], true);
    let service = servers.object("services").unwrap();
    assert_eq!(service["spec"]["selector"], spec["selector"]["matchLabels"]);
    assert_eq!(service["spec"]["ports"][1]["port"], 9000);
    assert_eq!(servers.object("poddisruptionbudgets").unwrap()["spec"]["maxUnavailable"], 1);
    assert_eq!(servers.object("networkpolicies").unwrap()["spec"]["policyTypes"], json!(["Ingress"]));
    assert_eq!(servers.object("serviceaccounts").unwrap()["automountServiceAccountToken"], false);
    assert!(servers.object("horizontalpodautoscalers").is_none());
    let owner = &deployment["metadata"]["ownerReferences"][0];
    assert_eq!((&owner["kind"], &owner["controller"]), (&json!("RecModelServer"), &json!(true)));

    assert_eq!(servers.status().phase, Some(ServerPhase::Progressing));
    servers.rolls_out();
    servers.settle().await;
    let status = servers.status();
    assert_eq!(status.phase, Some(ServerPhase::Ready));
    assert_eq!(servers.condition("Ready").unwrap().0, "Serving");
    assert_eq!(status.replicas.unwrap().display, "3/3");
    assert_eq!(status.versions, [VersionStatus { step: Some(800), replicas: 3, ready: 3 }]);
    assert_eq!(status.observed_generation, Some(1));
}

#[tokio::test]
async fn a_users_template_is_merged_and_its_labels_do_not_win() {
    let template = json!({
        "labels": {"team": "ads", "rectrain.dev/model-server": "other"},
        "resources": {"limits": {"memory": "4Gi"}}, "serviceAccountName": "reader",
        "volumes": [{"name": "models", "emptyDir": {}}],
        "volumeMounts": [{"name": "models", "mountPath": "/models"}],
    });
    let spec = json!({"model": {"path": "/models/clicks"}, "image": "mine:2", "template": template});
    let servers = Servers::new(spec);
    servers.settle().await;
    assert_eq!(servers.model(), "/models/clicks");
    let template = servers.deployment()["spec"]["template"].clone();
    assert_eq!(template["metadata"]["labels"]["team"], "ads");
    assert_eq!(template["metadata"]["labels"]["rectrain.dev/model-server"], NAME);
    assert!(template["metadata"]["labels"]["rectrain.dev/step"].is_null(), "its step is not known");
    assert_eq!(template["spec"]["serviceAccountName"], "reader");
    assert_eq!(template["spec"]["volumes"].as_array().unwrap().len(), 2);
    let container = &template["spec"]["containers"][0];
    assert_eq!((&container["image"], &container["resources"]["limits"]["memory"]), (&json!("mine:2"), &json!("4Gi")));
}

#[tokio::test]
async fn servers_with_a_certificate_speak_tls_and_so_do_their_probes() {
    let servers = Servers::of_job(json!({"tls": {"secretName": "clicks-tls"}}));
    servers.settle().await;
    let pod = || servers.deployment()["spec"]["template"].clone();
    let arguments = |pod: &Value| {
        let arguments = pod["spec"]["containers"][0]["args"].as_array().unwrap().clone();
        arguments.into_iter().filter(|argument| argument.as_str().unwrap().starts_with("--tls")).collect::<Vec<_>>()
    };
    let template = pod();
    let server = ["--tls-cert=/etc/rectrain-tls/tls.crt", "--tls-key=/etc/rectrain-tls/tls.key"];
    assert_eq!(arguments(&template), server);
    let container = &template["spec"]["containers"][0];
    let mount = json!({"name": "tls", "mountPath": "/etc/rectrain-tls", "readOnly": true});
    assert_eq!(container["volumeMounts"][1], mount);
    for probe in ["startupProbe", "readinessProbe", "livenessProbe"] {
        assert_eq!(container[probe]["httpGet"]["scheme"], "HTTPS", "{probe}");
    }
    assert_eq!(template["metadata"]["annotations"]["prometheus.io/scheme"], "https");
    let secret = |pod: &Value| pod["spec"]["volumes"][1]["secret"].clone();
    let file = |name: &str| json!({"key": name, "path": name});
    let files = [file("tls.crt"), file("tls.key")];
    assert_eq!(secret(&template), json!({"secretName": "clicks-tls", "items": files}));

    servers.edit(|spec| spec["tls"]["clientCertificates"] = json!(true));
    servers.settle().await;
    let template = pod();
    let clients = [&server[..], &["--tls-client-ca=/etc/rectrain-tls/ca.crt"]].concat();
    assert_eq!(arguments(&template), clients);
    assert_eq!(secret(&template)["items"][2], file("ca.crt"));

    servers.edit(|spec| {
        spec.as_object_mut().unwrap().remove("tls");
    });
    servers.settle().await;
    let template = pod();
    assert_eq!(arguments(&template), [""; 0]);
    assert_eq!(template["spec"]["volumes"].as_array().unwrap().len(), 1);
    assert!(template["spec"]["containers"][0]["readinessProbe"]["httpGet"]["scheme"].is_null());
}

#[tokio::test]
async fn unchanged_objects_are_not_written_again() {
    let servers = Servers::of_job(json!({}));
    servers.settle().await;
    servers.rolls_out();
    servers.settle().await;
    let before = servers.writes();
    for _ in 0..5 {
        passes(60);
        servers.reconcile().await.unwrap();
    }
    assert_eq!(servers.writes(), before);
}

#[tokio::test]
async fn changed_and_deleted_objects_are_restored() {
    let servers = Servers::of_job(json!({}));
    servers.settle().await;
    let before = servers.object("services").unwrap()["spec"].clone();
    servers.api.lock().get_mut("services", OBJECT).unwrap()["spec"]["ports"] = json!([]);
    servers.api.lock().remove("networkpolicies", OBJECT);
    servers.settle().await;
    assert_eq!(servers.object("services").unwrap()["spec"], before);
    assert!(servers.object("networkpolicies").is_some());
}

#[tokio::test]
async fn servers_wait_for_the_first_checkpoint() {
    let servers = Servers::new(json!({"model": {"job": JOB}}));
    servers.settle().await;
    let (reason, message) = servers.condition("Degraded").unwrap();
    assert!(reason == "JobNotFound" && message.contains("`clicks`"), "{message}");
    servers.api.lock().create("rectrainingjobs", job(None));
    servers.settle().await;
    assert_eq!(servers.status().phase, Some(ServerPhase::Pending));
    assert_eq!(servers.condition("Progressing").unwrap().0, "NoCheckpoint");
    assert!(servers.object("deployments").is_none());
    servers.saves("step-000000000100", 100);
    servers.settle().await;
    assert_eq!(servers.model(), "s3://ads/clicks/step-000000000100");
}

#[tokio::test]
async fn a_job_without_checkpoints_is_reported() {
    let servers = Servers::new(json!({"model": {"job": JOB}}));
    let mut job = job(None);
    job["spec"].as_object_mut().unwrap().remove("checkpoint");
    servers.api.lock().create("rectrainingjobs", job);
    servers.settle().await;
    let (reason, message) = servers.condition("Degraded").unwrap();
    assert!(reason == "NoCheckpointPath" && message.contains("spec.checkpoint.path"), "{message}");
}

#[tokio::test]
async fn servers_outlive_their_job() {
    let servers = Servers::of_job(json!({}));
    servers.settle().await;
    let before = servers.deployment();
    servers.api.lock().remove("rectrainingjobs", JOB);
    passes(1000);
    servers.settle().await;
    assert_eq!(servers.deployment(), before);
    // A changed manifest is carried out with the remembered place and secret.
    servers.edit(|spec| spec["replicas"] = json!(5));
    servers.settle().await;
    let spec = servers.deployment()["spec"].clone();
    assert_eq!(spec["replicas"], 5);
    assert_eq!(servers.model(), "s3://ads/clicks/step-000000000800");
    assert_eq!(spec["template"]["spec"]["containers"][0]["envFrom"][0]["secretRef"]["name"], "store");
}

#[tokio::test]
async fn latest_follows_its_job_at_most_once_an_interval() {
    let servers = Servers::of_job(json!({"updateEverySeconds": 100}));
    servers.settle().await;
    servers.saves("step-000000000900-delta", 900);
    passes(60);
    servers.settle().await;
    assert_eq!(servers.model(), "s3://ads/clicks/step-000000000800");
    assert_eq!(servers.status().latest.unwrap().step, 900);
    assert_eq!(servers.reconcile().await.unwrap(), Action::requeue(Duration::from_secs(15)));
    // Only the newest of several checkpoints is served.
    servers.saves("step-000000001000", 1000);
    passes(40);
    servers.settle().await;
    assert_eq!(servers.model(), "s3://ads/clicks/step-000000001000");
    assert_eq!(servers.condition("Progressing").unwrap().0, "RollingOut");
    servers.saves("step-000000001100", 1100);
    passes(90);
    servers.settle().await;
    assert_eq!(servers.model(), "s3://ads/clicks/step-000000001000");
    assert_eq!(servers.reconcile().await.unwrap(), Action::requeue(Duration::from_secs(10)));
}

#[tokio::test]
async fn a_pinned_version_stays_and_a_rollback_finds_a_delta() {
    let servers = Servers::of_job(json!({"updateEverySeconds": 10}));
    servers.saves("step-000000000850-delta", 850);
    servers.settle().await;
    servers.saves("step-000000000900", 900);
    passes(10);
    servers.settle().await;
    assert_eq!(servers.model(), "s3://ads/clicks/step-000000000900");
    servers.edit(|spec| spec["version"] = json!(850));
    servers.settle().await;
    assert_eq!(servers.model(), "s3://ads/clicks/step-000000000850-delta");
    servers.saves("step-000000001000", 1000);
    passes(10_000);
    servers.settle().await;
    assert_eq!(servers.model(), "s3://ads/clicks/step-000000000850-delta");
    // A step that was never served is taken for a full checkpoint.
    servers.edit(|spec| spec["version"] = json!(700));
    servers.settle().await;
    assert_eq!(servers.model(), "s3://ads/clicks/step-000000000700");
    // A change of the manifest does not wait for the interval.
    servers.edit(|spec| spec["version"] = json!("latest"));
    servers.settle().await;
    assert_eq!(servers.model(), "s3://ads/clicks/step-000000001000");
}

#[tokio::test]
async fn a_step_of_a_path_needs_no_job() {
    let spec = json!({
        "model": {"path": "gs://ads/clicks"}, "version": 1200,
        "storage": {"options": {"endpoint": "http://store"}, "secretName": "mine"},
    });
    let servers = Servers::new(spec);
    servers.settle().await;
    assert_eq!(servers.model(), "gs://ads/clicks/step-000000001200");
    let container = servers.deployment()["spec"]["template"]["spec"]["containers"][0].clone();
    assert!(container["args"].as_array().unwrap().contains(&json!("--option=endpoint=http://store")));
    assert_eq!(container["envFrom"][0]["secretRef"]["name"], "mine");
}

/// Servers with an autoscaler.
pub async fn autoscaled() -> Servers {
    let cpu = json!({"resources": {"requests": {"cpu": "1"}}});
    let servers = Servers::of_job(json!({"autoscaling": {"minReplicas": 2, "maxReplicas": 6}, "template": cpu}));
    servers.settle().await;
    servers
}

/// Servers that gain an autoscaler, which sets their number, and lose it again.
pub async fn with_and_without_an_autoscaler() -> Servers {
    let servers = autoscaled().await;
    assert_eq!(servers.deployment()["spec"]["replicas"], 2);
    let autoscaler = servers.object("horizontalpodautoscalers").unwrap();
    assert_eq!(autoscaler["spec"]["scaleTargetRef"]["name"], OBJECT);
    assert_eq!(autoscaler["spec"]["metrics"][0]["resource"]["target"]["averageUtilization"], 70);
    servers.api.lock().get_mut("deployments", OBJECT).unwrap()["spec"]["replicas"] = json!(4);
    servers.settle().await;
    assert_eq!(servers.deployment()["spec"]["replicas"], 4, "the autoscaler decides");
    servers.edit(|spec| {
        spec.as_object_mut().unwrap().remove("autoscaling");
        spec["replicas"] = json!(3);
    });
    servers.settle().await;
    assert!(servers.object("horizontalpodautoscalers").is_none());
    assert_eq!(servers.deployment()["spec"]["replicas"], 3);
    servers
}

#[tokio::test]
async fn an_autoscaler_decides_while_the_manifest_has_one() {
    with_and_without_an_autoscaler().await;
}

#[tokio::test]
async fn an_autoscaler_follows_cpu_or_requests_or_both() {
    let cpu = |percent: u32| {
        let target = json!({"type": "Utilization", "averageUtilization": percent});
        json!({"type": "Resource", "resource": {"name": "cpu", "target": target}})
    };
    let target = json!({"type": "AverageValue", "averageValue": "8"});
    let metric = json!({"name": "rectrain_inference_requests_in_progress"});
    let requests = json!({"type": "Pods", "pods": {"metric": metric, "target": target}});
    for (measures, expected) in [
        (json!({"requestsInProgress": 8}), json!([requests])),
        (json!({"requestsInProgress": 8, "cpuPercent": 50}), json!([cpu(50), requests])),
        (json!({}), json!([cpu(70)])),
    ] {
        let mut scaling = measures;
        scaling["maxReplicas"] = json!(6);
        let servers = Servers::of_job(json!({"autoscaling": scaling}));
        servers.settle().await;
        assert_eq!(servers.object("horizontalpodautoscalers").unwrap()["spec"]["metrics"], expected);
    }
}

#[tokio::test]
async fn recorded_requests_warm_the_servers_up() {
    for (warm_up, key) in [
        (json!({"configMapName": "recorded"}), "requests.jsonl"),
        (json!({"configMapName": "recorded", "key": "monday"}), "monday"),
    ] {
        let servers = Servers::of_job(json!({"warmUp": warm_up}));
        servers.settle().await;
        let pod = servers.deployment()["spec"]["template"]["spec"].clone();
        let container = &pod["containers"][0];
        let argument = json!("--warm-up=/etc/rectrain-warm-up/requests.jsonl");
        assert!(container["args"].as_array().unwrap().contains(&argument), "{container}");
        let mount = json!({"name": "warm-up", "mountPath": "/etc/rectrain-warm-up", "readOnly": true});
        assert!(container["volumeMounts"].as_array().unwrap().contains(&mount), "{container}");
        let requests = json!({"name": "recorded", "items": [{"key": key, "path": "requests.jsonl"}]});
        let volume = json!({"name": "warm-up", "configMap": requests});
        assert!(pod["volumes"].as_array().unwrap().contains(&volume), "{pod}");
    }
}

#[tokio::test]
async fn a_stuck_rollout_is_reported() {
    let servers = Servers::of_job(json!({}));
    servers.settle().await;
    servers.api.lock().get_mut("deployments", OBJECT).unwrap()["status"] = json!({
        "replicas": 2, "updatedReplicas": 1, "availableReplicas": 1, "observedGeneration": 1,
        "conditions": [{"type": "Progressing", "status": "False", "reason": "ProgressDeadlineExceeded"}],
    });
    servers.settle().await;
    let (reason, message) = servers.condition("Degraded").unwrap();
    assert!(reason == "RolloutStuck" && message.starts_with("1 of 2 servers"), "{message}");
}

#[tokio::test]
async fn the_time_between_two_looks_reaches_the_servers() {
    for (seconds, expected) in
        [(json!(0.05), Some("--poll=50ms")), (json!(2), Some("--poll=2000ms")), (json!(null), None)]
    {
        let servers = Servers::of_job(json!({"pollSeconds": seconds}));
        servers.settle().await;
        let arguments = servers.deployment()["spec"]["template"]["spec"]["containers"][0]["args"].clone();
        let is_poll = |argument: &&str| argument.starts_with("--poll");
        let found = arguments.as_array().unwrap().iter().filter_map(|argument| argument.as_str()).find(is_poll);
        assert_eq!(found, expected, "{arguments}");
    }
}

#[tokio::test]
async fn a_gate_reaches_the_servers_and_is_named_if_they_do_not_start() {
    let servers = Servers::of_job(json!({"gate": {"rows": ["s3://ads/a.csv", "s3://ads/b.csv"], "minAuc": 0.7}}));
    servers.settle().await;
    let arguments = servers.deployment()["spec"]["template"]["spec"]["containers"][0]["args"].clone();
    for argument in ["--gate-rows=s3://ads/a.csv", "--gate-rows=s3://ads/b.csv", "--gate-min-auc=0.7"] {
        assert!(arguments.as_array().unwrap().contains(&json!(argument)), "{argument}: {arguments}");
    }
    servers.api.lock().get_mut("deployments", OBJECT).unwrap()["status"] = json!({
        "replicas": 3, "updatedReplicas": 1, "availableReplicas": 2, "observedGeneration": 1,
        "conditions": [{"type": "Progressing", "status": "False", "reason": "ProgressDeadlineExceeded"}],
    });
    servers.settle().await;
    let (reason, message) = servers.condition("Degraded").unwrap();
    assert!(reason == "RolloutStuck" && message.contains("spec.gate may refuse the model"), "{message}");
}

/// A canary of step 900 with a quarter of five servers. The checkpoint is a delta.
async fn with_canary() -> Servers {
    let servers = Servers::of_job(json!({"version": 800, "replicas": 5, "canary": {"step": 900, "percent": 25}}));
    servers.saves("step-000000000900-delta", 900);
    servers.settle().await;
    servers
}

/// Servers that gain a canary, and lose it again.
pub async fn with_and_without_a_canary() -> Servers {
    let servers = with_canary().await;
    servers.edit(|spec| {
        spec.as_object_mut().unwrap().remove("canary");
    });
    servers.settle().await;
    assert!(servers.api.lock().get("deployments", CANARY).is_none());
    servers
}

fn canary(servers: &Servers) -> Value {
    servers.api.lock().get("deployments", CANARY).cloned().expect("a canary")
}

/// So many servers of the canary answer.
fn canary_answers(servers: &Servers, available: u32) {
    servers.api.lock().get_mut("deployments", CANARY).unwrap()["status"] =
        json!({"replicas": 2, "updatedReplicas": 2, "availableReplicas": available, "observedGeneration": 1});
}

#[tokio::test]
async fn a_canary_has_its_part_of_the_servers_until_it_is_taken() {
    let servers = with_canary().await;
    let (deployment, spec) = (servers.deployment(), canary(&servers)["spec"].clone());
    // A quarter of five, rounded up. The others go on until these answer.
    assert_eq!((&deployment["spec"]["replicas"], &spec["replicas"]), (&json!(5), &json!(2)));
    assert_eq!(servers.model(), "s3://ads/clicks/step-000000000800");
    let container = &spec["template"]["spec"]["containers"][0];
    assert_eq!(container["args"][1], "s3://ads/clicks/step-000000000900-delta");
    let labels = &spec["template"]["metadata"]["labels"];
    assert_eq!((&labels["rectrain.dev/canary"], &labels["rectrain.dev/step"]), (&json!("true"), &json!("900")));
    assert!(deployment["spec"]["template"]["metadata"]["labels"]["rectrain.dev/canary"].is_null());
    // The Service reaches both, and only the canary's Deployment names the canary.
    let service = servers.object("services").unwrap()["spec"]["selector"].clone();
    assert_eq!(labels["rectrain.dev/model-server"], service["rectrain.dev/model-server"]);
    assert_eq!(spec["selector"]["matchLabels"]["rectrain.dev/canary"], "true");
    assert_eq!(deployment["spec"]["selector"]["matchLabels"], service);
    assert_eq!(servers.status().canary.unwrap().step, 900);

    servers.rolls_out();
    servers.settle().await;
    assert!(servers.condition("Progressing").unwrap().1.contains("servers of the canary"));
    canary_answers(&servers, 2);
    servers.settle().await;
    assert_eq!(servers.deployment()["spec"]["replicas"], 3);
    servers.rolls_out();
    servers.settle().await;
    assert_eq!(servers.status().phase, Some(ServerPhase::Ready));

    // Its checkpoint keeps its name while the job goes on.
    servers.saves("step-000000001000", 1000);
    servers.settle().await;
    assert_eq!(servers.status().canary.unwrap().name, "step-000000000900-delta");
    servers.edit(|spec| {
        spec.as_object_mut().unwrap().remove("canary");
        spec["version"] = json!(900);
    });
    servers.settle().await;
    assert!(servers.api.lock().get("deployments", CANARY).is_none());
    assert_eq!(servers.deployment()["spec"]["replicas"], 5);
    assert_eq!(servers.model(), "s3://ads/clicks/step-000000000900-delta");
    assert!(servers.status().canary.is_none());
}

#[tokio::test]
async fn each_server_of_a_canary_that_answers_replaces_one_of_the_others() {
    let servers = with_canary().await;
    servers.rolls_out();
    // A server of the canary that fails for a moment starts no other one.
    for (answering, others) in [(0, 5), (1, 4), (0, 4), (2, 3), (1, 3_u32)] {
        canary_answers(&servers, answering);
        servers.settle().await;
        assert_eq!(servers.deployment()["spec"]["replicas"], others, "{answering} of the canary answer");
        assert_eq!(canary(&servers)["spec"]["replicas"], 2);
        // While servers of the canary do not answer, servers are missing.
        assert_eq!(servers.status().replicas.unwrap().wanted, others + 2);
    }
    // One of them is superfluous.
    servers.edit(|spec| spec["canary"]["percent"] = json!(20));
    servers.settle().await;
    assert_eq!(
        (&servers.deployment()["spec"]["replicas"], &canary(&servers)["spec"]["replicas"]),
        (&json!(4), &json!(1))
    );
}

#[tokio::test]
async fn servers_that_the_manifest_gains_do_not_wait_for_a_canary() {
    let servers = with_canary().await;
    servers.rolls_out();
    servers.edit(|spec| spec["replicas"] = json!(8));
    // A canary that does not answer costs none of the new servers.
    for (answering, others) in [(0, 8), (2, 6), (1, 6_u32)] {
        canary_answers(&servers, answering);
        servers.settle().await;
        assert_eq!(servers.deployment()["spec"]["replicas"], others, "{answering} of the canary answer");
        assert_eq!(canary(&servers)["spec"]["replicas"], 2);
    }
}

/// A pod of the canary answers.
fn a_pod_of_the_canary_answers(servers: &Servers) {
    let mut metadata = canary(servers)["spec"]["template"]["metadata"].clone();
    metadata["name"] = json!("answers-canary-0");
    let ready = json!({"conditions": [{"type": "Ready", "status": "True"}]});
    servers.api.lock().create("pods", json!({"metadata": metadata, "status": ready}));
}

#[tokio::test]
async fn servers_of_the_canarys_step_are_stale_unless_they_are_the_canary() {
    let servers = with_canary().await;
    servers.rolls_out();
    // A part of the servers keeps the earlier model.
    servers.edit(|spec| (spec["version"], spec["canary"]["step"]) = (json!(900), json!(800)));
    servers.settle().await;
    a_pod_of_the_canary_answers(&servers);
    servers.settle().await;
    assert_eq!(servers.served_step(), "800", "no server has changed yet");
    servers.rolls_out();
    servers.settle().await;
    assert_eq!(servers.served_step(), "900", "only the canary has the earlier model");
}

#[tokio::test]
async fn a_canary_that_does_not_start_is_named() {
    let servers = with_canary().await;
    servers.rolls_out();
    servers.api.lock().get_mut("deployments", CANARY).unwrap()["status"] = json!({
        "replicas": 2, "updatedReplicas": 1, "availableReplicas": 0, "observedGeneration": 1,
        "conditions": [{"type": "Progressing", "status": "False", "reason": "ProgressDeadlineExceeded"}],
    });
    servers.settle().await;
    let (reason, message) = servers.condition("Degraded").unwrap();
    assert!(reason == "RolloutStuck" && message.contains("servers of the canary have"), "{message}");
    assert!(message.contains("remove spec.canary"), "{message}");
    assert_eq!(servers.deployment()["spec"]["replicas"], 5, "all of the others go on");
}

#[tokio::test]
async fn an_object_of_another_owner_is_reported_and_kept() {
    let servers = Servers::of_job(json!({}));
    let other = json!({"apiVersion": "v1", "kind": "Service", "metadata": {"name": OBJECT}, "spec": {"ports": []}});
    servers.api.lock().create("services", other);
    servers.settle().await;
    let (reason, message) = servers.condition("Degraded").unwrap();
    assert!(reason == "NameConflict" && message.contains("Service `answers-server`"), "{message}");
    assert_eq!(servers.object("services").unwrap()["spec"], json!({"ports": []}));
    servers.api.lock().remove("services", OBJECT);
    servers.settle().await;
    assert!(servers.condition("Degraded").is_none());
    assert!(servers.object("deployments").is_some());
}

#[tokio::test]
async fn a_refused_object_is_reported_until_it_is_accepted() {
    let servers = Servers::of_job(json!({}));
    servers.api.lock().refused.insert("deployments".to_owned(), (403, "exceeded quota".to_owned()));
    servers.settle().await;
    let (reason, message) = servers.condition("Degraded").unwrap();
    assert!(reason == "ObjectRefused" && message.contains("exceeded quota"), "{message}");
    servers.api.lock().refused.clear();
    servers.settle().await;
    assert_eq!(servers.condition("Progressing").unwrap().0, "RollingOut");
}

/// All objects of the operator, without identities and revisions, which differ from run to run.
fn outline(servers: &Servers) -> Value {
    servers.api.lock().outline()
}

/// Reconciles until all is done. Each failed reconcile is tried again.
async fn settle_in_spite_of_failures(servers: &Servers) {
    for _ in 0..40 {
        let before = servers.api.lock().revision();
        let result = servers.reconcile().await;
        if result.is_ok() && servers.api.lock().revision() == before {
            return;
        }
    }
    panic!("the operator never settles");
}

#[tokio::test]
async fn any_failing_call_ends_in_the_same_state() {
    let undisturbed = Servers::of_job(json!({}));
    undisturbed.settle().await;
    let (expected, calls) = (outline(&undisturbed), undisturbed.api.lock().calls);
    assert!(calls > 20, "{calls}");
    for fault in Fault::ALL.into_iter().filter(|fault| !fault.kills()) {
        for call in 1..=calls {
            let servers = Servers::of_job(json!({}));
            servers.api.lock().fault = Some((call, fault));
            settle_in_spite_of_failures(&servers).await;
            assert_eq!(outline(&servers), expected, "call {call}: {fault:?}");
        }
    }
}

#[tokio::test]
async fn another_operator_continues_with_the_remembered_model() {
    let mut servers = Servers::of_job(json!({}));
    servers.settle().await;
    let before = servers.deployment();
    servers.api.lock().remove("rectrainingjobs", JOB);
    servers.operator = operator(&servers.api);
    servers.settle().await;
    assert_eq!(servers.deployment(), before);
    assert!(servers.api.lock().log.iter().all(|call| !call.starts_with("DELETE")));
}

#[tokio::test]
async fn a_deleted_server_is_left_to_the_garbage_collector() {
    let servers = Servers::of_job(json!({}));
    servers.settle().await;
    servers.api.lock().remove("recmodelservers", NAME);
    assert_eq!(servers.reconcile().await.unwrap(), Action::await_change());
    assert!(servers.object("deployments").is_none());
}

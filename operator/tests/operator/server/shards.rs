//! Shards of a model's rows.

use jiff::SignedDuration;

use super::*;

/// A path with publications.
const PATH: &str = "s3://ads/published";

/// Servers of published models, whose rows are in shards.
fn sharded(shards: &Value) -> Servers {
    let storage = json!({"options": {"region": "eu"}, "secretName": "store"});
    Servers::new(json!({"model": {"path": PATH}, "storage": storage, "pollSeconds": 0.05, "shards": shards}))
}

fn set_name(shard: usize) -> String {
    format!("{NAME}-rows-{shard}")
}

impl Servers {
    fn named(&self, plural: &str, name: &str) -> Option<Value> {
        self.api.lock().get(plural, name).cloned()
    }

    fn set(&self, shard: usize) -> Value {
        self.named("statefulsets", &set_name(shard)).expect("a StatefulSet")
    }

    fn replicas_of_sets(&self, shards: usize) -> Vec<u64> {
        (0..shards).map(|shard| self.set(shard)["spec"]["replicas"].as_u64().unwrap()).collect()
    }

    /// So many pods of each shard answer, and all pods are as the StatefulSet.
    fn shards_answer(&self, ready: &[u64]) {
        for (shard, ready) in ready.iter().enumerate() {
            let (set, mut api) = (self.set(shard), self.api.lock());
            api.get_mut("statefulsets", &set_name(shard)).unwrap()["status"] = json!({
                "replicas": set["spec"]["replicas"], "readyReplicas": ready, "currentRevision": "a",
                "updateRevision": "a", "observedGeneration": set["metadata"]["generation"],
            });
            api.touch("statefulsets", &set_name(shard));
        }
    }

    /// A pod of the servers ends within its grace period.
    fn a_server_ends(&self) {
        let mut metadata = self.deployment()["spec"]["template"]["metadata"].clone();
        metadata["name"] = json!("answers-server-old");
        metadata["deletionTimestamp"] = json!((now() + SignedDuration::from_secs(30)).to_string());
        self.api.lock().create("pods", json!({"metadata": metadata}));
    }

    /// The arguments of the servers that begin so.
    fn arguments(&self, start: &str) -> Vec<String> {
        let deployment = self.deployment();
        let all = deployment["spec"]["template"]["spec"]["containers"][0]["args"].as_array().unwrap();
        let all = all.iter().map(|argument| argument.as_str().unwrap().to_owned());
        all.filter(|argument| argument.starts_with(start)).collect()
    }

    fn reason(&self, kind: &str) -> String {
        self.condition(kind).map_or_else(String::new, |(reason, _)| reason)
    }
}

/// Two shards with two pods each, and servers that read from them.
async fn serving() -> Servers {
    let servers = sharded(&json!({"count": 2}));
    servers.settle().await;
    servers.shards_answer(&[2, 2]);
    servers.settle().await;
    servers.rolls_out();
    servers.settle().await;
    assert_eq!(servers.status().phase, Some(ServerPhase::Ready));
    servers
}

/// Servers that gain shards, and lose them again.
pub async fn with_and_without() -> Servers {
    let servers = serving().await;
    servers.edit(|spec| {
        spec.as_object_mut().unwrap().remove("shards");
    });
    servers.settle().await;
    servers.rolls_out();
    servers.settle().await;
    assert!(servers.named("statefulsets", &set_name(0)).is_none());
    servers
}

#[tokio::test]
async fn shards_start_first_and_both_roles_get_their_arguments() {
    let servers = sharded(&json!({"count": 2, "replicas": 3, "cacheRows": 5000}));
    servers.settle().await;
    let set = servers.set(1);
    let spec = &set["spec"];
    assert_eq!((&spec["replicas"], &spec["serviceName"]), (&json!(3), &json!("answers-rows-1")));
    assert_eq!(
        (&spec["podManagementPolicy"], &spec["updateStrategy"]["type"]),
        (&json!("Parallel"), &json!("RollingUpdate"))
    );
    let pod = &spec["template"]["spec"];
    let container = &pod["containers"][0];
    let arguments = [
        "serving-ps",
        PATH,
        "--shard=1",
        "--shards=2",
        "--listen=[::]:8090",
        "--http=[::]:8080",
        "--drain=5s",
        "--poll=50ms",
        "--option=region=eu",
    ];
    assert_eq!(container["args"], json!(arguments));
    assert_eq!(container["envFrom"], json!([{"secretRef": {"name": "store", "optional": false}}]));
    assert_eq!(container["readinessProbe"]["httpGet"], json!({"path": "/v2/health/ready", "port": "http"}));
    assert_eq!(container["ports"][0], json!({"name": "rows", "containerPort": 8090, "protocol": "TCP"}));
    assert_eq!(pod["securityContext"]["runAsNonRoot"], true);
    let selector = json!({"matchLabels": {"rectrain.dev/model-rows": NAME, "rectrain.dev/shard": "1"}});
    assert_eq!(spec["selector"], selector);
    assert_eq!(pod["topologySpreadConstraints"][0]["labelSelector"], selector);
    let service = servers.named("services", "answers-rows-1").unwrap();
    assert_eq!(
        (&service["spec"]["clusterIP"], &service["spec"]["selector"]),
        (&json!("None"), &selector["matchLabels"])
    );
    let budget = servers.named("poddisruptionbudgets", "answers-rows-1").unwrap();
    assert_eq!((&budget["spec"]["maxUnavailable"], &budget["spec"]["selector"]), (&json!(1), &selector));
    let policy = servers.named("networkpolicies", "answers-rows").unwrap();
    let callers = json!([{"podSelector": {"matchLabels": {"rectrain.dev/model-server": NAME}}}]);
    assert_eq!(policy["spec"]["ingress"][0], json!({"from": callers, "ports": [{"port": 8090, "protocol": "TCP"}]}));
    assert_eq!(set["metadata"]["ownerReferences"][0]["kind"], "RecModelServer");

    // Without rows a server would not start.
    assert!(servers.object("deployments").is_none() && servers.object("services").is_some());
    let (reason, message) = servers.condition("Progressing").unwrap();
    assert!(reason == "ShardsStarting" && message.ends_with("answers-rows-0, answers-rows-1"), "{message}");
    servers.shards_answer(&[0, 1]);
    servers.settle().await;
    assert!(servers.object("deployments").is_none());
    assert_eq!(servers.status().shards.unwrap().display, "1/2");
    servers.shards_answer(&[1, 1]);
    servers.settle().await;
    let addresses = |shard: usize| {
        let set = set_name(shard);
        format!("--rows-from={set}-0.{set}:8090,{set}-1.{set}:8090,{set}-2.{set}:8090")
    };
    assert_eq!(servers.arguments("--rows-from"), [addresses(0), addresses(1)]);
    assert_eq!(servers.arguments("--cache-rows"), ["--cache-rows=5000"]);
    assert_eq!(servers.model(), PATH);
    servers.rolls_out();
    servers.settle().await;
    let (reason, message) = servers.condition("Progressing").unwrap();
    assert!(reason == "ShardsRollingOut" && message.starts_with("2 of 6 pods"), "{message}");
    servers.shards_answer(&[3, 3]);
    servers.settle().await;
    assert_eq!((servers.status().phase, servers.reason("Ready")), (Some(ServerPhase::Ready), "Serving".to_owned()));
    assert_eq!(servers.status().shards.unwrap().display, "2/2");
    assert_eq!(servers.status().replicas.unwrap().display, "2/2", "pods of shards are no servers");
}

#[tokio::test]
async fn a_shard_without_a_pod_that_answers_is_named_at_once() {
    let servers = serving().await;
    servers.shards_answer(&[2, 1]);
    servers.settle().await;
    assert_eq!(servers.reason("Progressing"), "ShardsRollingOut", "one pod of two is enough");
    servers.shards_answer(&[2, 0]);
    servers.settle().await;
    let (reason, message) = servers.condition("Degraded").unwrap();
    assert!(
        reason == "ShardDown" && message.starts_with("1 of 2 shards have no pod that answers: answers-rows-1."),
        "{message}"
    );
    assert_eq!(servers.status().shards.unwrap().display, "1/2");
    assert_eq!(servers.arguments("--rows-from").len(), 2, "the servers go on with the rows of the others");
    let text = servers.operator.metrics.encode().unwrap();
    let gauge = text.lines().find(|line| line.starts_with("rectrain_operator_server_ready_shards{"));
    assert!(gauge.is_some_and(|line| line.ends_with(" 1")), "{gauge:?}");
    servers.shards_answer(&[2, 2]);
    servers.settle().await;
    assert_eq!(servers.status().phase, Some(ServerPhase::Ready));
}

#[tokio::test]
async fn shards_that_do_not_start_are_reported_after_their_time() {
    let servers = sharded(&json!({"count": 2}));
    servers.settle().await;
    servers.shards_answer(&[1, 0]);
    passes(899);
    servers.settle().await;
    assert_eq!(servers.reason("Progressing"), "ShardsStarting");
    assert_eq!(servers.reconcile().await.unwrap(), Action::requeue(Duration::from_secs(60)));
    passes(1);
    servers.settle().await;
    let (reason, message) = servers.condition("Degraded").unwrap();
    assert!(reason == "ShardsStuck" && message.contains("answers: answers-rows-1: look at"), "{message}");
    passes(60);
    servers.settle().await;
    assert_eq!(servers.reason("Degraded"), "ShardsStuck");
    // A changed manifest has its own time.
    servers.edit(|spec| spec["image"] = json!("mine:2"));
    servers.settle().await;
    assert_eq!(servers.reason("Progressing"), "ShardsStarting");
    servers.shards_answer(&[2, 2]);
    servers.settle().await;
    assert!(servers.object("deployments").is_some());
}

#[tokio::test]
async fn replicas_of_shards_change_while_servers_read_from_them() {
    let servers = serving().await;
    servers.edit(|spec| spec["shards"]["replicas"] = json!(3));
    servers.settle().await;
    assert_eq!(servers.replicas_of_sets(2), [3, 3]);
    assert!(servers.arguments("--rows-from")[1].ends_with(",answers-rows-1-2.answers-rows-1:8090"));
    servers.shards_answer(&[3, 3]);
    servers.rolls_out();
    servers.settle().await;
    assert_eq!(servers.status().phase, Some(ServerPhase::Ready));
    // Servers that have not changed yet read from all three pods.
    servers.edit(|spec| spec["shards"]["replicas"] = json!(1));
    servers.settle().await;
    assert_eq!(servers.arguments("--rows-from")[0], "--rows-from=answers-rows-0-0.answers-rows-0:8090");
    assert_eq!(servers.replicas_of_sets(2), [3, 3]);
    assert_eq!(servers.reason("Progressing"), "RollingOut");
    servers.rolls_out();
    servers.settle().await;
    assert_eq!(servers.replicas_of_sets(2), [1, 1]);
    servers.shards_answer(&[1, 1]);
    servers.settle().await;
    assert_eq!(servers.status().phase, Some(ServerPhase::Ready));
}

#[tokio::test]
async fn servers_change_from_whole_models_to_shards_and_back() {
    let servers = Servers::new(json!({"model": {"path": PATH}}));
    servers.settle().await;
    servers.rolls_out();
    servers.settle().await;
    let whole = servers.deployment();
    assert!(servers.status().shards.is_none() && servers.arguments("--rows-from").is_empty());
    servers.edit(|spec| spec["shards"] = json!({"count": 3}));
    servers.settle().await;
    servers.shards_answer(&[2, 0, 2]);
    servers.settle().await;
    assert_eq!(servers.deployment()["spec"], whole["spec"], "the servers keep their rows until all shards answer");
    assert_eq!(servers.reason("Progressing"), "ShardsStarting");
    servers.shards_answer(&[2, 1, 2]);
    servers.settle().await;
    assert_eq!(servers.arguments("--rows-from").len(), 3);
    servers.shards_answer(&[2, 2, 2]);
    servers.rolls_out();
    servers.settle().await;
    assert_eq!(servers.status().phase, Some(ServerPhase::Ready));

    servers.edit(|spec| {
        spec.as_object_mut().unwrap().remove("shards");
    });
    servers.settle().await;
    assert_eq!(servers.deployment()["spec"], whole["spec"]);
    for plural in ["statefulsets", "services", "poddisruptionbudgets"] {
        assert!(servers.named(plural, "answers-rows-2").is_some(), "{plural}: a server may read from it");
    }
    assert!(servers.status().shards.is_none());
    // An earlier server still answers requests for a moment.
    servers.a_server_ends();
    servers.rolls_out();
    servers.settle().await;
    assert!(servers.named("statefulsets", "answers-rows-2").is_some());
    assert_eq!(servers.reconcile().await.unwrap(), Action::requeue(Duration::from_secs(5)));
    passes(30);
    servers.settle().await;
    for plural in ["statefulsets", "services", "poddisruptionbudgets"] {
        assert!((0..3).all(|shard| servers.named(plural, &set_name(shard)).is_none()), "{plural}");
        assert_eq!(plural == "statefulsets", servers.object(plural).is_none(), "the servers' own objects stay");
    }
    assert!(servers.named("networkpolicies", "answers-rows").is_none());
    assert_eq!(servers.status().phase, Some(ServerPhase::Ready));
}

#[tokio::test]
async fn shards_with_other_rows_end_before_the_wanted_ones_start() {
    let servers = serving().await;
    // The API server allows this in two steps, and the operator sees only the last one.
    servers.edit(|spec| spec["shards"] = json!({"count": 3}));
    servers.settle().await;
    assert!(servers.arguments("--rows-from").is_empty(), "the servers change to whole models");
    let arguments = servers.set(1)["spec"]["template"]["spec"]["containers"][0]["args"].clone();
    assert_eq!((&arguments[2], &arguments[3]), (&json!("--shard=1"), &json!("--shards=2")));
    assert!(servers.named("statefulsets", "answers-rows-2").is_none());
    assert_eq!(servers.status().shards.unwrap().display, "0/3");
    servers.rolls_out();
    servers.settle().await;
    let arguments = servers.set(2)["spec"]["template"]["spec"]["containers"][0]["args"].clone();
    assert_eq!((&arguments[2], &arguments[3]), (&json!("--shard=2"), &json!("--shards=3")));
    assert!(servers.arguments("--rows-from").is_empty(), "the new shards do not answer yet");
    servers.shards_answer(&[2, 2, 2]);
    servers.settle().await;
    assert_eq!(servers.arguments("--rows-from").len(), 3);
}

#[tokio::test]
async fn shards_of_another_path_end_at_once_if_there_is_no_server() {
    let servers = sharded(&json!({"count": 2}));
    servers.settle().await;
    servers.edit(|spec| spec["model"]["path"] = json!("s3://ads/other"));
    servers.settle().await;
    let arguments = servers.set(0)["spec"]["template"]["spec"]["containers"][0]["args"].clone();
    assert_eq!(arguments[1], "s3://ads/other");
    let deletes = servers.api.lock().log.iter().filter(|call| call.starts_with("DELETE statefulsets")).count();
    assert_eq!(deletes, 2, "their pods have rows of the earlier path");
    assert!(servers.object("deployments").is_none());
}

#[tokio::test]
async fn namesakes_of_a_shards_objects_are_reported_and_kept() {
    let servers = serving().await;
    // They have the labels, too, but no owner.
    let labels = servers.set(0)["metadata"]["labels"].clone();
    let other = |kind: &str, name: &str| json!({"apiVersion": "apps/v1", "kind": kind, "metadata": {"name": name, "labels": labels}, "spec": {"replicas": 7}});
    servers.api.lock().create("statefulsets", other("StatefulSet", "answers-rows-7"));
    servers.api.lock().remove("statefulsets", "answers-rows-1");
    servers.api.lock().create("statefulsets", other("StatefulSet", "answers-rows-1"));
    servers.settle().await;
    let (reason, message) = servers.condition("Degraded").unwrap();
    assert!(reason == "NameConflict" && message.contains("StatefulSet `answers-rows-1`"), "{message}");
    servers.edit(|spec| {
        spec.as_object_mut().unwrap().remove("shards");
    });
    servers.settle().await;
    servers.rolls_out();
    servers.settle().await;
    for name in ["answers-rows-1", "answers-rows-7"] {
        assert_eq!(servers.named("statefulsets", name).unwrap()["spec"], json!({"replicas": 7}), "{name}");
    }
    assert!(servers.named("statefulsets", "answers-rows-0").is_none());
    assert_eq!(servers.status().phase, Some(ServerPhase::Ready));
}

#[tokio::test]
async fn a_users_template_does_not_make_a_shard_a_server() {
    let template = json!({
        "labels": {"team": "ads", "rectrain.dev/model-server": NAME, "rectrain.dev/shard": "9"},
        "resources": {"limits": {"memory": "64Gi"}},
        "topologySpreadConstraints": [{"topologyKey": "kubernetes.io/hostname", "whenUnsatisfiable": "ScheduleAnyway", "maxSkew": 3}],
    });
    let servers = sharded(&json!({"count": 1, "template": template}));
    servers.settle().await;
    let template = servers.set(0)["spec"]["template"].clone();
    let labels = &template["metadata"]["labels"];
    assert_eq!((&labels["team"], &labels["rectrain.dev/shard"]), (&json!("ads"), &json!("0")));
    assert!(labels["rectrain.dev/model-server"].is_null(), "the servers' Service would select it");
    assert_eq!(template["spec"]["containers"][0]["resources"]["limits"]["memory"], "64Gi");
    assert_eq!(template["spec"]["topologySpreadConstraints"][0]["maxSkew"], 3);
}

#[tokio::test]
async fn changed_objects_of_shards_are_restored_and_others_not_written() {
    let servers = serving().await;
    let before = servers.writes();
    for _ in 0..3 {
        passes(60);
        servers.reconcile().await.unwrap();
    }
    assert_eq!(servers.writes(), before);
    servers.api.lock().get_mut("statefulsets", "answers-rows-0").unwrap()["spec"]["replicas"] = json!(0);
    servers.api.lock().remove("services", "answers-rows-1");
    servers.settle().await;
    assert_eq!(servers.replicas_of_sets(2), [2, 2]);
    assert!(servers.named("services", "answers-rows-1").is_some());
    // An object without its label is not in a list, and is found by its name.
    for (plural, name) in [("services", "answers-rows-0"), ("statefulsets", "answers-rows-1")] {
        let metadata = |servers: &Servers| servers.named(plural, name).unwrap()["metadata"].clone();
        let before = metadata(&servers);
        for field in ["labels", "annotations"] {
            servers.api.lock().get_mut(plural, name).unwrap()["metadata"][field] = json!({});
        }
        servers.settle().await;
        let after = metadata(&servers);
        assert_eq!((&after["labels"], &after["annotations"]), (&before["labels"], &before["annotations"]), "{name}");
    }
    assert_eq!(servers.arguments("--rows-from").len(), 2, "the servers read from shards all the while");
}

/// Shards start, and then servers. Each failed reconcile is tried again.
async fn start_in_spite_of_failures(fault: Option<(usize, Fault)>) -> (Value, usize) {
    let servers = sharded(&json!({"count": 2}));
    servers.api.lock().fault = fault;
    settle_in_spite_of_failures(&servers).await;
    servers.shards_answer(&[2, 2]);
    settle_in_spite_of_failures(&servers).await;
    servers.rolls_out();
    settle_in_spite_of_failures(&servers).await;
    let calls = servers.api.lock().calls;
    (outline(&servers), calls)
}

#[tokio::test]
async fn any_failing_call_for_shards_ends_in_the_same_state() {
    let (expected, calls) = start_in_spite_of_failures(None).await;
    assert!(calls > 40, "{calls}");
    let faults: Vec<Fault> = Fault::ALL.into_iter().filter(|fault| !fault.kills()).collect();
    // Each call fails in one of the ways.
    for call in 1..=calls {
        let fault = faults[call % faults.len()];
        let (found, _) = start_in_spite_of_failures(Some((call, fault))).await;
        assert_eq!(found, expected, "call {call}: {fault:?}");
    }
}

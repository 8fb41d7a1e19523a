//! The chart: it grants exactly the rights that the operator uses, it checks its values, and it
//! renders valid objects. Tests that need `helm` print that they are skipped if there is none.
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use serde_json::{Value, json};

#[path = "../../examples/chart_values/values.rs"]
mod chart_values;
mod versions;

use crate::world::{MANIFEST, World, crashing, good, passes};

fn chart() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../charts/rectrain")
}

/// The API group of metrics-server's measurements of nodes and pods.
const METRICS: &str = "metrics.k8s.io";

/// Verbs by resource, such as `services`: `get`. Measurements have resources such as
/// `pods.metrics.k8s.io`.
type Rights = BTreeMap<String, BTreeSet<String>>;

/// The rights of the chart's first rules: on jobs, their objects and their nodes.
fn granted() -> Rights {
    let text = std::fs::read_to_string(chart().join("templates/rbac.yaml")).unwrap();
    let rules = text.split_once("\nrules:\n").unwrap().1.split_once("\n---").unwrap().0;
    let rules = rules.lines().filter(|line| !line.trim_start().starts_with("{{")).collect::<Vec<_>>().join("\n");
    let rules: Value = serde_yaml::from_str(&format!("rules:\n{rules}")).unwrap();
    let mut rights = Rights::new();
    for rule in rules["rules"].as_array().unwrap() {
        let texts = |field: &str| rule[field].as_array().unwrap().iter().map(|text| text.as_str().unwrap().to_owned());
        for resource in texts("resources") {
            let is_measured = rule["apiGroups"] == json!([METRICS]);
            let resource = if is_measured { format!("{resource}.{METRICS}") } else { resource };
            rights.entry(resource).or_default().extend(texts("verbs"));
        }
    }
    rights
}

/// The rights that a call to the API server needs.
fn needed_by(call: &str, rights: &mut Rights) {
    let mut words = call.split(' ');
    let (method, plural) = (words.next().unwrap(), words.next().unwrap().to_owned());
    let (name, subresource) = (words.next().unwrap_or_default(), words.next().unwrap_or_default());
    let resource = if subresource.is_empty() { plural } else { format!("{plural}/{subresource}") };
    let verbs: &[&str] = match method {
        // Listed resources are watched, too.
        "GET" if name.is_empty() => &["list", "watch"],
        "GET" => &["get"],
        "POST" => &["create"],
        // Server-side apply may create the object.
        "PATCH" => &["patch", "create"],
        "PUT" => &["update"],
        "DELETE" => &["delete"],
        other => panic!("{other}"),
    };
    rights.entry(resource).or_default().extend(verbs.iter().map(|verb| (*verb).to_owned()));
}

/// The rights to read nodes and the use of pods.
async fn needed_for_nodes(rights: &mut Rights) {
    for path in crate::nodes::asked_of_a_node().await {
        let (right, verb) = match path.as_str() {
            "/api/v1/nodes/x" => ("nodes".to_owned(), "get"),
            "/apis/metrics.k8s.io/v1beta1/nodes/x" => (format!("nodes.{METRICS}"), "get"),
            "/apis/metrics.k8s.io/v1beta1/namespaces/default/pods" => (format!("pods.{METRICS}"), "list"),
            other => panic!("{other}"),
        };
        rights.entry(right).or_default().insert(verb.to_owned());
    }
    for call in crate::nodes::asked_when_a_node_is_lost().await {
        match call.as_str() {
            "GET /api/v1/nodes/x" => {}
            "DELETE /api/v1/namespaces/default/pods/j-ps-0" => needed_by("DELETE pods j-ps-0", rights),
            other => panic!("{other}"),
        }
    }
}

/// The operator needs each right of the chart, and no other.
#[tokio::test]
async fn the_chart_grants_exactly_the_rights_that_the_operator_uses() {
    let mut needed = Rights::new();
    // A life with a crash, ended by its time to live.
    let world = World::new(&format!("{MANIFEST}  ttlSecondsAfterFinished: 60\n"), vec![crashing(), good()]);
    world.live().await;
    passes(60);
    world.reconcile().await.unwrap();
    world.api().log.iter().for_each(|call| needed_by(call, &mut needed));
    // A job that becomes invalid and is suspended: its objects are removed.
    let world = World::new(MANIFEST, vec![good()]);
    world.settle().await;
    world.edit(|spec| spec["features"]["sparse"] = json!([{"name": "C1"}, {"name": "C1"}]));
    world.settle().await;
    assert_eq!(world.condition("Stalled").unwrap().0, "InvalidSpec");
    world.edit(|spec| spec["suspend"] = json!(true));
    world.settle().await;
    assert!(world.api().made().is_empty());
    world.api().log.iter().for_each(|call| needed_by(call, &mut needed));
    // A job whose pods are refused.
    let world = crate::trouble::with_refused_pods().await;
    let asked = world.api().log.iter().filter(|call| *call == "GET events").count();
    assert!(asked > 0, "the events were not read");
    needed.get_mut("events").unwrap().insert("list".to_owned());
    // Servers of a model, which gain and lose an autoscaler.
    let servers = crate::server::with_and_without_an_autoscaler().await;
    servers.api.lock().log.iter().for_each(|call| needed_by(call, &mut needed));
    // Servers that gain and lose a canary.
    let servers = crate::server::with_and_without_a_canary().await;
    servers.api.lock().log.iter().for_each(|call| needed_by(call, &mut needed));
    // Servers that gain and lose shards.
    let servers = crate::server::shards::with_and_without().await;
    servers.api.lock().log.iter().for_each(|call| needed_by(call, &mut needed));
    for watched in ["recmodelservers", "deployments"] {
        needed.get_mut(watched).unwrap().extend(["list".to_owned(), "watch".to_owned()]);
    }
    needed_for_nodes(&mut needed).await;
    // Jobs are watched, and a repeated event is patched.
    needed.get_mut("rectrainingjobs").unwrap().extend(["list".to_owned(), "watch".to_owned()]);
    needed.get_mut("events").unwrap().insert("patch".to_owned());
    assert_eq!(granted(), needed);
}

fn helm() -> Option<PathBuf> {
    let folder = |name| std::env::var_os(name).filter(|folder| !folder.is_empty()).map(PathBuf::from);
    let caches = folder("XDG_CACHE_HOME").or_else(|| Some(folder("HOME")?.join(".cache")));
    let cached = caches.map(|caches| caches.join("rectrain/cluster/bin/helm"));
    let candidates =
        std::env::var_os("HELM").map(PathBuf::from).into_iter().chain([PathBuf::from("helm")]).chain(cached);
    let found = candidates
        .into_iter()
        .find(|helm| Command::new(helm).arg("version").output().is_ok_and(|o| o.status.success()));
    if found.is_none() {
        eprintln!("SKIPPED: no helm was found, so the chart is not rendered; `cargo xtask cluster up` builds helm");
    }
    found
}

fn render(helm: &Path, arguments: &[&str]) -> Output {
    let mut command = Command::new(helm);
    command.args(["template", "rectrain"]).arg(chart()).args(["--namespace", "rectrain-system"]).args(arguments);
    command.output().unwrap()
}

fn objects(helm: &Path, arguments: &[&str]) -> Vec<Value> {
    let output = render(helm, arguments);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let text = String::from_utf8(output.stdout).unwrap();
    let documents =
        text.split("\n---").map(|document| serde_yaml::from_str::<Value>(document.trim_start_matches("---")).unwrap());
    documents.filter(|document| !document.is_null()).collect()
}

fn find<'a>(objects: &'a [Value], kind: &str) -> &'a Value {
    objects.iter().find(|object| object["kind"] == kind).unwrap_or_else(|| panic!("no {kind}"))
}

#[test]
fn the_chart_renders_with_all_example_values_and_passes_the_linter() {
    let Some(helm) = helm() else { return };
    let lint = Command::new(&helm).args(["lint", "--strict"]).arg(chart()).output().unwrap();
    assert!(lint.status.success(), "{}", String::from_utf8_lossy(&lint.stdout));
    for values in std::fs::read_dir(chart().join("ci")).unwrap() {
        let values = values.unwrap().path();
        let objects = objects(&helm, &["--values", values.to_str().unwrap()]);
        assert!(objects.len() >= 8, "{}", values.display());
        for object in &objects {
            assert!(object["apiVersion"].is_string() && object["metadata"]["name"].is_string(), "{object}");
        }
    }
}

#[test]
fn the_crds_are_the_generated_ones_and_outlive_the_chart() {
    let Some(helm) = helm() else { return };
    let all = objects(&helm, &[]);
    for generated in [rectrain_crds::crd_yaml(), rectrain_crds::server_crd_yaml()] {
        let generated: Value = serde_yaml::from_str(&generated).unwrap();
        let name = &generated["metadata"]["name"];
        let is_it = |crd: &&Value| crd["kind"] == "CustomResourceDefinition" && crd["metadata"]["name"] == *name;
        let mut crd = all.iter().find(is_it).unwrap_or_else(|| panic!("no {name}")).clone();
        assert_eq!(crd["metadata"]["annotations"]["helm.sh/resource-policy"], "keep");
        crd["metadata"].as_object_mut().unwrap().remove("annotations");
        assert_eq!(crd["spec"], generated["spec"]);
        assert_eq!(crd["metadata"], generated["metadata"]);
    }
    let without = objects(&helm, &["--set", "crds.install=false"]);
    assert!(without.iter().all(|object| object["kind"] != "CustomResourceDefinition"));
}

#[test]
fn the_chart_warns_of_jobs_without_checkpoints() {
    let Some(helm) = helm() else { return };
    let all = objects(&helm, &["--set", "watchNamespace=training"]);
    let policy = find(&all, "ValidatingAdmissionPolicy");
    let binding = find(&all, "ValidatingAdmissionPolicyBinding");
    assert_eq!(policy["spec"]["failurePolicy"], "Ignore");
    assert!(policy["spec"]["validations"][0]["message"].as_str().unwrap().starts_with("spec.checkpoint.path is not"));
    assert_eq!(binding["spec"]["policyName"], policy["metadata"]["name"]);
    assert_eq!(binding["spec"]["validationActions"], json!(["Warn"]));
    let watched = &binding["spec"]["matchResources"]["namespaceSelector"]["matchLabels"];
    assert_eq!(watched["kubernetes.io/metadata.name"], "training");
    for value in ["admissionWarnings.enabled=false", "crds.install=false"] {
        let without = objects(&helm, &["--set", value]);
        let warns = |object: &Value| object["kind"].as_str().unwrap().starts_with("ValidatingAdmission");
        assert!(!without.iter().any(warns), "{value}");
    }
}

#[test]
fn the_operators_pods_meet_the_restricted_standard() {
    let Some(helm) = helm() else { return };
    let all = objects(
        &helm,
        &[
            "--set",
            "runtimeImage.repository=r/runtime,runtimeImage.tag=v7,runtimeImage.pullSecrets={a,b}",
            "--set",
            "gpu.runtimeImage.tag=v8,gpu.nodeSelector.accelerator=l4",
        ],
    );
    let deployment = find(&all, "Deployment");
    assert_eq!(deployment["spec"]["replicas"], 2);
    let pod = &deployment["spec"]["template"]["spec"];
    assert_eq!(pod["securityContext"]["runAsNonRoot"], true);
    assert_eq!(pod["securityContext"]["seccompProfile"]["type"], "RuntimeDefault");
    let container = &pod["containers"][0];
    assert_eq!(container["securityContext"]["readOnlyRootFilesystem"], true);
    assert_eq!(container["securityContext"]["allowPrivilegeEscalation"], false);
    assert_eq!(container["securityContext"]["capabilities"]["drop"], json!(["ALL"]));
    let arguments: Vec<&str> = container["args"].as_array().unwrap().iter().map(|a| a.as_str().unwrap()).collect();
    for expected in [
        "--runtime-image=r/runtime:v7",
        "--image-pull-secret=a",
        "--image-pull-secret=b",
        "--namespace=$(POD_NAMESPACE)",
        "--gpu-runtime-image=rectrain/runtime-cuda:v8",
        r#"--gpu-pods={"nodeSelector":{"accelerator":"l4"},"tolerations":[{"effect":"NoSchedule","key":"nvidia.com/gpu","operator":"Exists"}]}"#,
    ] {
        assert!(arguments.contains(&expected), "{expected}: {arguments:?}");
    }
    // The NetworkPolicies of jobs let in pods with this label.
    assert_eq!(deployment["spec"]["template"]["metadata"]["labels"]["app.kubernetes.io/name"], "rectrain-operator");
}

#[test]
fn values_that_other_charts_have_reach_the_objects() {
    let Some(helm) = helm() else { return };
    let values = chart().join("ci/extras-values.yaml");
    let all = objects(&helm, &["--values", values.to_str().unwrap()]);
    assert!(all.iter().all(|object| object["kind"] != "ServiceAccount"), "serviceAccount.create is false");
    let deployment = find(&all, "Deployment");
    assert_eq!(
        (&deployment["metadata"]["name"], &deployment["spec"]["revisionHistoryLimit"]),
        (&json!("recommender"), &json!(3))
    );
    for object in all.iter().filter(|object| object["kind"] != "CustomResourceDefinition") {
        assert_eq!(object["metadata"]["labels"]["team"], "ads", "{}", object["kind"]);
    }
    let template = &deployment["spec"]["template"];
    assert_eq!(template["metadata"]["labels"]["stage"], "production");
    assert_eq!(template["metadata"]["annotations"]["example.com/owner"], "ads");
    let pod = &template["spec"];
    // The namespace's range of users decides, and everything else stays restricted.
    assert_eq!(pod["securityContext"], json!({"runAsNonRoot": true, "seccompProfile": {"type": "RuntimeDefault"}}));
    assert_eq!(
        (&pod["serviceAccountName"], &pod["priorityClassName"]),
        (&json!("operators"), &json!("system-cluster-critical"))
    );
    assert_eq!(pod["nodeSelector"], json!({"pool": "system"}));
    assert_eq!((&pod["tolerations"][0]["key"], &pod["volumes"][0]["name"]), (&json!("system"), &json!("authorities")));
    assert_eq!(pod["topologySpreadConstraints"][0]["topologyKey"], "topology.kubernetes.io/zone");
    let container = &pod["containers"][0];
    assert!(
        container["image"]
            .as_str()
            .unwrap()
            .ends_with("/operator@sha256:0000000000000000000000000000000000000000000000000000000000000001")
    );
    let arguments = container["args"].to_string();
    assert!(
        arguments.contains("--runtime-image=rectrain/runtime@sha256:")
            && arguments.contains("--gpu-runtime-image=rectrain/runtime-cuda@sha256:"),
        "{arguments}"
    );
    assert!(
        container["env"]
            .as_array()
            .unwrap()
            .contains(&json!({"name": "HTTPS_PROXY", "value": "http://proxy.example.com:3128"}))
    );
    assert_eq!(container["volumeMounts"][0]["mountPath"], "/etc/ssl/certs");
    assert_eq!(find(&all, "PodDisruptionBudget")["spec"]["maxUnavailable"], "50%");
    assert_eq!(find(&all, "ClusterPodMonitoring")["spec"]["endpoints"][0]["interval"], "60s");
    let one = objects(&helm, &["--values", values.to_str().unwrap(), "--set", "watchNamespace=ads"]);
    let places =
        one.iter().filter(|object| object["kind"] == "PodMonitoring").map(|object| &object["metadata"]["namespace"]);
    assert_eq!(places.collect::<Vec<_>>(), ["ads", "rectrain-system"]);
}

#[test]
fn the_readme_lists_every_value() {
    let readme = std::fs::read_to_string(chart().join("README.md")).unwrap();
    assert!(readme == chart_values::markdown(&chart()), "charts/rectrain/README.md is old: run `cargo xtask docs`");
    let rows: Vec<&str> = readme.lines().filter(|line| line.starts_with("| `")).collect();
    assert!(rows.iter().all(|row| !row.ends_with("|  |")), "a value without a meaning: {rows:#?}");
    for value in ["image.digest", "tolerations", "podSecurityContext", "metrics.rules.docsUrl"] {
        assert!(rows.iter().any(|row| row.starts_with(&format!("| `{value}` |"))), "{value} is missing");
    }
}

#[test]
fn misspelt_and_impossible_values_are_refused() {
    let Some(helm) = helm() else { return };
    for wrong in [
        "replica=3",
        "replicas=0",
        "image.repo=x",
        "metrics.podMonitor.interval=often",
        "image.pullPolicy=Sometimes",
        "gpu.image=x",
        "image.digest=latest",
        "podDisruptionBudget.maxUnavailable=some",
        "extraEnv={a,b}",
    ] {
        assert!(!render(&helm, &["--set", wrong]).status.success(), "{wrong} was accepted");
    }
}

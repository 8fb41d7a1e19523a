//! The built objects, checked against the expectations of the cluster, the runtime and the user.

use jiff::Timestamp;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use rectrain_crds::{AttemptMode, Mode, RecTrainingJobStatus, TrainingSpec, parse_manifest};

use serde_json::{Value, json};

use super::*;
use crate::certificates::Root;
use crate::reconcile::validate;
use crate::reconcile::validate::spec_hash;

const MANIFEST: &str = r#"
apiVersion: rectrain.dev/v1alpha1
kind: RecTrainingJob
metadata: {name: clicks}
spec:
  model: {kind: deepfm}
  features: {sparse: [{name: user}, {name: item}]}
  data:
    train: {paths: ["s3://bucket/train.csv"]}
    storage: {secretName: s3}
  suspend: false
  activeDeadlineSeconds: 60
  ttlSecondsAfterFinished: 60
  managedBy: rectrain.dev/operator
  faultTolerance: {maxRestarts: 2}
  roles:
    ps:
      replicas: 3
      template:
        labels: {team: ads, rectrain.dev/role: spoofed}
        annotations: {prometheus.io/scrape: "false"}
        resources: {requests: {memory: 2Gi}}
        env: [{name: RECTRAIN_LOG, value: debug}, {name: EXTRA, value: "1"}]
        volumes: [{name: tmp, emptyDir: {medium: Memory}}, {name: ckpt, persistentVolumeClaim: {claimName: c}}]
        volumeMounts: [{name: ckpt, mountPath: /ckpt}]
        nodeSelector: {cloud.google.com/gke-spot: "true"}
        tolerations: [{key: spot, operator: Exists}]
        topologySpreadConstraints:
        - {topologyKey: topology.kubernetes.io/zone, maxSkew: 1, whenUnsatisfiable: ScheduleAnyway}
        imagePullSecrets: [{name: registry}]
        priorityClassName: batch
        terminationGracePeriodSeconds: 120
        serviceAccountName: reader
    denseWorker: {replicas: 2, device: cuda}
"#;

struct Fixture {
    job: RecTrainingJob,
    resolved: ResolvedJob,
    config: OperatorConfig,
    attempt: AttemptStatus,
}

impl Fixture {
    fn new(manifest: &str) -> Self {
        let mut job = parse_manifest(manifest, "job.yaml").expect("the manifest is read");
        job.metadata.namespace = Some("ads".to_owned());
        job.metadata.uid = Some("job-uid".to_owned());
        let resolved = validate::verdict(&job).expect("the manifest is valid");
        let attempt = AttemptStatus {
            number: 4,
            spec_hash: spec_hash(&job.spec),
            image: "registry/rectrain:1".to_owned(),
            tls: true,
            ..AttemptStatus::default()
        };
        let config = OperatorConfig { namespace: Some("rectrain-system".to_owned()), ..OperatorConfig::default() };
        Self { job, resolved, config, attempt }
    }

    fn plan(&self, has_pods: bool) -> Plan<'_> {
        let status = RecTrainingJobStatus { attempt: Some(self.attempt.clone()), ..RecTrainingJobStatus::default() };
        let decision = Decision::new(status, if has_pods { Run::Go } else { Run::Hold }, None);
        let root = Root::from_bytes([7; 32]);
        let certificate = self.attempt.tls.then(|| root.of_job("job-uid").expect("a certificate"));
        Plan::new(&self.job, &self.resolved, &decision, certificate, &self.config)
    }

    fn objects(&self) -> Vec<Wanted> {
        objects(&self.plan(true)).expect("they are built")
    }
}

fn body<'a>(objects: &'a [Wanted], kind: Kind, name: &str) -> &'a Value {
    let found = objects.iter().find(|object| object.kind == kind && object.name == name);
    &found.unwrap_or_else(|| panic!("no {kind:?} {name}")).body
}

#[test]
fn a_job_has_three_objects_per_role_and_four_of_its_own() {
    let objects = Fixture::new(MANIFEST).objects();
    assert_eq!(objects.len(), 4 + 3 * 5);
    let mut kinds: Vec<Kind> = objects.iter().map(|object| object.kind).collect();
    let sorted = kinds.clone();
    kinds.sort();
    assert_eq!(kinds, sorted, "pods come last");
    for object in &objects {
        let metadata = &object.body["metadata"];
        assert_eq!(metadata["ownerReferences"][0]["uid"], "job-uid", "{}", object.name);
        assert_eq!(metadata["ownerReferences"][0]["controller"], true);
        assert_eq!(metadata["namespace"], "ads");
        assert_eq!(metadata["labels"]["app.kubernetes.io/managed-by"], "rectrain-operator");
        assert_eq!(metadata["labels"][names::JOB_LABEL], "clicks");
        assert_eq!(object.hash().len(), 32, "{}", object.name);
        assert_eq!(object.body["kind"], object.kind.name());
    }
}

/// With a certificate all pods have and use it. Without one none does, and there is no Secret.
#[test]
fn all_pods_of_an_attempt_have_the_certificate_or_none_has() {
    for tls in [true, false] {
        let mut fixture = Fixture::new(MANIFEST);
        fixture.attempt.tls = tls;
        let objects = fixture.objects();
        for role in Role::ALL {
            let set = body(&objects, Kind::StatefulSet, &names::of_role("clicks", role));
            let pod = &set["spec"]["template"]["spec"];
            let container = &pod["containers"][0];
            let has = |list: &Value, wanted: &str| list.as_array().expect("a list").iter().any(|v| v == wanted);
            assert_eq!(has(&container["args"], "--tls=/etc/rectrain-certificate"), tls, "{role:?}");
            let named = |list: &Value| list.as_array().expect("a list").iter().any(|v| v["name"] == "certificate");
            assert_eq!(named(&container["volumeMounts"]), tls, "{role:?}");
            assert_eq!(named(&pod["volumes"]), tls, "{role:?}");
        }
        let secret = objects.iter().find(|object| object.kind == Kind::Secret);
        assert_eq!(secret.is_some(), tls);
        if let Some(secret) = secret {
            assert_eq!(secret.name, "clicks-certificate");
            let files: Vec<_> = secret.body["data"].as_object().expect("files").keys().collect();
            assert_eq!(files, ["ca.crt", "tls.crt", "tls.key"]);
        }
    }
}

#[test]
fn replicas_follow_the_manifest_and_are_0_without_pods() {
    let fixture = Fixture::new(MANIFEST);
    let replicas = |has_pods: bool| -> Vec<u64> {
        let objects = objects(&fixture.plan(has_pods)).expect("they are built");
        Role::ALL
            .iter()
            .map(|role| {
                let name = names::of_role("clicks", *role);
                body(&objects, Kind::StatefulSet, &name)["spec"]["replicas"].as_u64().expect("a number")
            })
            .collect()
    };
    assert_eq!(replicas(true), [1, 3, 1, 2, 1]);
    assert_eq!(replicas(false), [0; 5]);
}

/// The rules of the restricted pod-security standard, one by one, for every role.
#[test]
fn pods_meet_the_restricted_standard() {
    let objects = Fixture::new(MANIFEST).objects();
    for role in Role::ALL {
        let set = body(&objects, Kind::StatefulSet, &names::of_role("clicks", role));
        let pod = &set["spec"]["template"]["spec"];
        assert_eq!(pod["automountServiceAccountToken"], false);
        assert_eq!(pod["securityContext"]["runAsNonRoot"], true);
        assert_eq!(pod["securityContext"]["seccompProfile"]["type"], "RuntimeDefault");
        let container = &pod["containers"][0];
        let security = &container["securityContext"];
        assert_eq!(security["allowPrivilegeEscalation"], false);
        assert_eq!(security["readOnlyRootFilesystem"], true);
        assert_eq!(security["capabilities"]["drop"][0], "ALL");
        assert_eq!(pod["containers"].as_array().map(Vec::len), Some(1));
    }
}

#[test]
fn pods_start_together_and_are_never_rolled() {
    let objects = Fixture::new(MANIFEST).objects();
    let set = body(&objects, Kind::StatefulSet, "clicks-ps");
    assert_eq!(set["spec"]["podManagementPolicy"], "Parallel");
    assert_eq!(set["spec"]["updateStrategy"]["type"], "OnDelete");
    assert_eq!(set["spec"]["serviceName"], "clicks-ps");
    assert_eq!(set["spec"]["template"]["metadata"]["labels"][ATTEMPT], "4");
}

const ATTEMPT: &str = names::ATTEMPT_LABEL;

fn arguments(objects: &[Wanted], name: &str) -> Value {
    body(objects, Kind::StatefulSet, name)["spec"]["template"]["spec"]["containers"][0]["args"].clone()
}

#[test]
fn a_role_gets_its_index_and_the_coordinators_address() {
    let objects = Fixture::new(MANIFEST).objects();
    assert_eq!(
        arguments(&objects, "clicks-ps"),
        json!([
            "ps",
            "/etc/rectrain/job.yaml",
            "--log=json",
            "--stay",
            "--index=$(RECTRAIN_INDEX)",
            "--coordinator=tcp://clicks-coordinator-0.clicks-coordinator.ads.svc:7000",
            "--advertise=tcp://$(POD_NAME).clicks-ps.ads.svc:7000",
            "--bind=tcp://[::]:7000",
            "--metrics=[::]:9090",
            "--tls=/etc/rectrain-certificate",
        ])
    );
}

#[test]
fn the_coordinator_gets_its_run_and_a_headless_service() {
    let objects = Fixture::new(MANIFEST).objects();
    assert_eq!(
        arguments(&objects, "clicks-coordinator"),
        json!([
            "coordinator",
            "/etc/rectrain/job.yaml",
            "--log=json",
            "--stay",
            "--json",
            "--control=[::]:7001",
            "--run=job-uid",
            "--bind=tcp://[::]:7000",
            "--metrics=[::]:9090",
            "--tls=/etc/rectrain-certificate",
        ])
    );
    let service = body(&objects, Kind::Service, "clicks-coordinator");
    assert_eq!(service["spec"]["clusterIP"], "None");
    assert_eq!(service["spec"]["publishNotReadyAddresses"], true);
    let ports: Vec<_> =
        service["spec"]["ports"].as_array().into_iter().flatten().map(|port| port["port"].clone()).collect();
    assert_eq!(ports, [7000, 7001, 9090]);
}

#[test]
fn the_users_template_is_merged_over_the_operators() {
    let objects = Fixture::new(MANIFEST).objects();
    let template = &body(&objects, Kind::StatefulSet, "clicks-ps")["spec"]["template"];
    let labels = &template["metadata"]["labels"];
    assert_eq!((&labels["team"], &labels["rectrain.dev/role"]), (&json!("ads"), &json!("ps")));
    assert_eq!(template["metadata"]["annotations"]["prometheus.io/scrape"], "false");
    let pod = &template["spec"];
    assert_eq!(pod["priorityClassName"], "batch");
    assert_eq!(pod["serviceAccountName"], "reader");
    assert_eq!(pod["imagePullSecrets"], json!([{"name": "registry"}]));
    assert_eq!(pod["topologySpreadConstraints"][0]["topologyKey"], "topology.kubernetes.io/zone");
    assert_eq!(pod["nodeSelector"]["cloud.google.com/gke-spot"], "true");
    let tolerated: Vec<_> = pod["tolerations"].as_array().into_iter().flatten().map(|one| one["key"].clone()).collect();
    assert_eq!(tolerated, ["node.kubernetes.io/not-ready", "node.kubernetes.io/unreachable", "spot"]);
    let names: Vec<_> = pod["volumes"].as_array().into_iter().flatten().map(|volume| volume["name"].clone()).collect();
    assert_eq!(names, ["manifest", "tmp", "certificate", "rows", "ckpt"]);
    assert_eq!(pod["volumes"][1]["emptyDir"]["medium"], "Memory");
    let container = &pod["containers"][0];
    assert_eq!(container["resources"]["requests"]["memory"], "2Gi");
    let env: Vec<_> =
        container["env"].as_array().into_iter().flatten().map(|variable| variable["name"].clone()).collect();
    let own = ["POD_NAME", "INDEX", "LOG", "GRACE_SECONDS", "STALL_SECONDS", "SHARED_MEMORY"];
    let own = own.map(|name| if name == "POD_NAME" { json!(name) } else { json!(format!("RECTRAIN_{name}")) });
    assert_eq!((&env[..6], &env[6]), (&own[..], &json!("EXTRA")));
    assert_eq!((&pod["terminationGracePeriodSeconds"], &container["env"][3]["value"]), (&json!(120), &json!("120")));
    assert_eq!(container["env"][2]["value"], "debug");
    let mounts: Vec<_> =
        container["volumeMounts"].as_array().into_iter().flatten().map(|m| m["mountPath"].clone()).collect();
    assert_eq!(mounts, ["/etc/rectrain", "/tmp", "/etc/rectrain-certificate", "/var/lib/rectrain/rows", "/ckpt"]);
    // Roles without a template are not changed.
    let loader = &body(&objects, Kind::StatefulSet, "clicks-loader")["spec"]["template"];
    assert_eq!(loader["spec"]["serviceAccountName"], "clicks-rectrain");
    assert_eq!(loader["spec"]["terminationGracePeriodSeconds"], 30);
    assert_eq!(loader["metadata"]["annotations"]["prometheus.io/scrape"], "true");
}

/// The volume outlives a container, and a variable tells the container its folder.
#[test]
fn only_the_coordinator_has_a_volume_for_its_journal() {
    let objects = Fixture::new(MANIFEST).objects();
    for role in Role::ALL {
        let set = body(&objects, Kind::StatefulSet, &names::of_role("clicks", role));
        let pod = &set["spec"]["template"]["spec"];
        let named =
            |list: &Value, name: &str| list.as_array().into_iter().flatten().find(|item| item["name"] == name).cloned();
        let kept = named(&pod["volumes"], "journal");
        assert_eq!(kept.is_some(), role == Role::Coordinator, "{role:?}");
        let Some(volume) = kept else { continue };
        assert_eq!(volume["emptyDir"], serde_json::json!({}), "on the node's disk");
        let container = &pod["containers"][0];
        let variable = named(&container["env"], "RECTRAIN_JOURNAL").expect("a variable has the folder");
        let mount = named(&container["volumeMounts"], "journal").expect("the volume is mounted");
        assert_eq!(mount["mountPath"], variable["value"]);
        let attempt = named(&container["env"], "RECTRAIN_RECOVER_ATTEMPT").expect("a variable has the attempt");
        assert_eq!(attempt["value"], set["spec"]["template"]["metadata"]["labels"][names::ATTEMPT_LABEL]);
    }
}

#[test]
fn rows_lie_in_a_memory_volume_unless_the_manifest_says_otherwise() {
    for keeps in [true, false] {
        let manifest = MANIFEST.replace("{maxRestarts: 2}", &format!("{{maxRestarts: 2, sharedMemory: {keeps}}}"));
        let objects = Fixture::new(&manifest).objects();
        for role in Role::ALL {
            let set = body(&objects, Kind::StatefulSet, &names::of_role("clicks", role));
            let pod = &set["spec"]["template"]["spec"];
            let named = |list: &Value, name: &str| {
                list.as_array().into_iter().flatten().find(|item| item["name"] == name).cloned()
            };
            let volume = named(&pod["volumes"], "rows");
            assert_eq!(volume.is_some(), keeps && role == Role::Ps, "{role:?}");
            let variable = named(&pod["containers"][0]["env"], "RECTRAIN_SHARED_MEMORY");
            assert_eq!(variable.is_some(), volume.is_some(), "{role:?}");
            if let (Some(volume), Some(variable)) = (volume, variable) {
                assert_eq!(volume["emptyDir"]["medium"], "Memory");
                let mount = named(&pod["containers"][0]["volumeMounts"], "rows").expect("the volume is mounted");
                assert_eq!(mount["mountPath"], variable["value"]);
            }
        }
    }
}

#[test]
fn raised_memory_raises_the_limit_and_the_request_in_proportion() {
    let resources = |given: &str, raised| {
        let mut fixture = Fixture::new(&MANIFEST.replace("{requests: {memory: 2Gi}}", given));
        fixture.attempt.ps_memory_bytes = Some(raised);
        let objects = fixture.objects();
        let worker = body(&objects, Kind::StatefulSet, "clicks-dense-worker");
        assert_eq!(worker["spec"]["template"]["spec"]["containers"][0]["resources"]["limits"]["memory"], Value::Null);
        let set = body(&objects, Kind::StatefulSet, "clicks-ps");
        let resources = &set["spec"]["template"]["spec"]["containers"][0]["resources"];
        (resources["requests"]["memory"].clone(), resources["limits"]["memory"].clone())
    };
    const GIB: u64 = 1 << 30;
    let guaranteed = "{requests: {memory: 2Gi}, limits: {memory: 2Gi}}";
    let raised = json!((3 * GIB).to_string());
    assert_eq!(resources(guaranteed, 3 * GIB), (raised.clone(), raised.clone()));
    let burstable = "{requests: {memory: 1Gi}, limits: {memory: 2Gi}}";
    assert_eq!(resources(burstable, 3 * GIB), (json!((3 * GIB / 2).to_string()), raised.clone()));
    assert_eq!(resources("{limits: {memory: 2Gi}}", 3 * GIB), (Value::Null, raised));
    assert_eq!(resources(guaranteed, GIB), (json!("2Gi"), json!("2Gi")), "its limit is as high");
    assert_eq!(resources("{requests: {memory: 2Gi}}", 3 * GIB), (json!("2Gi"), Value::Null), "it has no limit");
}

#[test]
fn only_roles_that_use_the_object_store_get_its_credentials() {
    let objects = Fixture::new(MANIFEST).objects();
    for role in Role::ALL {
        let set = body(&objects, Kind::StatefulSet, &names::of_role("clicks", role));
        let secret = &set["spec"]["template"]["spec"]["containers"][0]["envFrom"][0]["secretRef"]["name"];
        assert_eq!(secret == "s3", role != Role::EmbeddingWorker, "{role:?}");
    }
}

#[test]
fn a_dense_worker_on_a_gpu_requests_one_or_as_many_as_its_template() {
    let limit = |manifest: &str| {
        let objects = Fixture::new(manifest).objects();
        let set = body(&objects, Kind::StatefulSet, "clicks-dense-worker");
        set["spec"]["template"]["spec"]["containers"][0]["resources"]["limits"]["nvidia.com/gpu"].clone()
    };
    assert_eq!(limit(MANIFEST), "1");
    let more = MANIFEST.replace("device: cuda", "device: cuda, template: {resources: {limits: {nvidia.com/gpu: 4}}}");
    assert_eq!(limit(&more), "4");
    assert_eq!(limit(&MANIFEST.replace("device: cuda", "gpus: 1")), "1");
    assert_eq!(limit(&MANIFEST.replace(", device: cuda", "")), Value::Null);
}

#[test]
fn only_pods_with_a_gpu_have_the_installations_placement() {
    let mut fixture = Fixture::new(&MANIFEST.replace(
        "device: cuda",
        "gpus: 1, template: {nodeSelector: {zone: a}, tolerations: [{key: spot, operator: Exists}]}",
    ));
    let pods =
        r#"{"nodeSelector": {"accelerator": "l4"}, "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists"}]}"#;
    fixture.config.gpu_pods = pods.parse().expect("it is read");
    let objects = fixture.objects();
    let pod =
        |role| body(&objects, Kind::StatefulSet, &names::of_role("clicks", role))["spec"]["template"]["spec"].clone();
    let worker = pod(Role::DenseWorker);
    assert_eq!(worker["nodeSelector"], json!({"accelerator": "l4", "zone": "a"}), "the job adds to it");
    let keys: Vec<_> = worker["tolerations"].as_array().into_iter().flatten().map(|t| t["key"].clone()).collect();
    assert!(keys.contains(&json!("nvidia.com/gpu")) && keys.contains(&json!("spot")), "{keys:?}");
    let cache = json!({"name": "XDG_CACHE_HOME", "value": "/tmp"});
    let environment = |pod: &Value| pod["containers"][0]["env"].as_array().cloned().unwrap_or_default();
    assert!(environment(&worker).contains(&cache));
    let loader = pod(Role::Loader);
    let tolerated: Vec<_> = loader["tolerations"].as_array().into_iter().flatten().map(|t| t["key"].clone()).collect();
    let of_lost_nodes = ["node.kubernetes.io/not-ready", "node.kubernetes.io/unreachable"].map(Value::from);
    assert_eq!((&loader["nodeSelector"], &tolerated[..]), (&Value::Null, &of_lost_nodes[..]));
    assert!(!environment(&loader).contains(&cache));

    let wrong = r#"{"nodeSelectors": {}}"#.parse::<crate::config::GpuPods>().unwrap_err().to_string();
    assert!(wrong.contains("nodeSelectors") && wrong.contains("expected"), "{wrong}");
}

#[test]
fn a_job_with_gpus_runs_the_gpu_image() {
    let config = OperatorConfig { gpu_runtime_image: "cuda:1".to_owned(), ..OperatorConfig::default() };
    assert_eq!((config.image(0), config.image(1)), ("rectrain:latest", "cuda:1"));
}

/// The runtime accepts the pods' manifest. Settings that only the operator carries out are not in
/// it, because the runtime would refuse them.
#[test]
fn the_pods_manifest_is_valid_and_means_the_same_training() {
    let fixture = Fixture::new(MANIFEST);
    let objects = fixture.objects();
    let config_map = config_map(&objects);
    assert_eq!(config_map["immutable"], true);
    let text = config_map["data"]["job.yaml"].as_str().expect("the manifest");
    let manifest = rectrain_crds::load(text, "job.yaml", &[]).expect("pods can read it");
    assert_eq!(manifest.resolved, as_pods_read_it(&fixture.resolved));
    assert_eq!(rectrain_crds::capabilities(&manifest.job).len(), 1, "only the GPU is a capability of pods");
    for absent in ["suspend", "activeDeadlineSeconds", "managedBy", "template", "faultTolerance", "ttlSeconds"] {
        assert!(!text.contains(absent), "{absent}");
    }
    assert!(
        config_map["data"]["resolved.json"].as_str().is_some_and(|text| text.contains("\"globalBatchSize\": 4096"))
    );
}

/// The operator counts restarts: pods read the defaults.
fn as_pods_read_it(resolved: &ResolvedJob) -> ResolvedJob {
    let none = Fixture::new(&MANIFEST.replace("  faultTolerance: {maxRestarts: 2}\n", ""));
    ResolvedJob { fault_tolerance: none.resolved.fault_tolerance, ..resolved.clone() }
}

#[test]
fn another_limit_of_restarts_changes_no_object() {
    let other = Fixture::new(&MANIFEST.replace("maxRestarts: 2", "maxRestarts: 3"));
    assert_eq!(Fixture::new(MANIFEST).objects(), other.objects());
}

fn config_map(objects: &[Wanted]) -> &Value {
    &objects.iter().find(|object| object.kind == Kind::ConfigMap).expect("a ConfigMap").body
}

/// A restarted pod reads the manifest that its attempt started with, under the same name, whatever
/// the mode is now. The next attempt reads another one.
#[test]
fn pods_read_the_initial_mode_of_their_attempt() {
    let mut fixture = Fixture::new(MANIFEST);
    fixture.attempt.mode = Some(AttemptMode { wanted: Mode::Sync, ..AttemptMode::default() });
    let before = fixture.objects();
    fixture.job.spec.training = Some(TrainingSpec { mode: Some(Mode::Gba.into()), ..TrainingSpec::default() });
    fixture.resolved = validate::verdict(&fixture.job).expect("it is valid");
    assert_eq!(fixture.attempt.spec_hash, spec_hash(&fixture.job.spec), "no new attempt");
    fixture.attempt.mode = Some(AttemptMode { accepted: Some(Mode::Gba), wanted: Mode::Gba, ..AttemptMode::default() });
    assert_eq!(fixture.objects(), before);
    fixture.attempt.mode = Some(AttemptMode { started: Mode::Gba, wanted: Mode::Gba, ..AttemptMode::default() });
    let next = fixture.objects();
    let [old, new] = [&before, &next].map(|objects| config_map(objects));
    assert_ne!(old["metadata"]["name"], new["metadata"]["name"]);
    let read =
        rectrain_crds::load(new["data"]["job.yaml"].as_str().expect("text"), "job.yaml", &[]).expect("it is read");
    assert_eq!(read.resolved, as_pods_read_it(&fixture.resolved));
    let resolved: Value = serde_json::from_str(new["data"]["resolved.json"].as_str().expect("text")).expect("JSON");
    assert_eq!(resolved["training"]["mode"], "gba");
    let mounted = &body(&next, Kind::StatefulSet, "clicks-coordinator")["spec"]["template"]["spec"]["volumes"];
    assert!(mounted.as_array().expect("volumes").iter().any(|v| v["configMap"]["name"] == new["metadata"]["name"]));
}

#[test]
fn the_digest_covers_exactly_the_settings_of_pods() {
    let hash = |manifest: &str| spec_hash(&parse_manifest(manifest, "job.yaml").expect("it is read").spec);
    let before = hash(MANIFEST);
    for (from, to, same) in [
        ("suspend: false", "suspend: true", true),
        ("maxRestarts: 2", "maxRestarts: 3", true),
        ("activeDeadlineSeconds: 60", "activeDeadlineSeconds: 61", true),
        ("replicas: 3", "replicas: 4", true),
        ("denseWorker: {replicas: 2", "denseWorker: {replicas: 1", false),
        ("memory: 2Gi", "memory: 3Gi", false),
        ("train.csv", "train2.csv", false),
        ("suspend: false", "training: {mode: gba}", true),
        ("suspend: false", "training: {mode: gba, epochs: 2}", false),
    ] {
        assert_eq!(hash(&MANIFEST.replace(from, to)) == before, same, "{to}");
    }
}

#[test]
fn only_the_job_and_the_operator_reach_its_ports() {
    let objects = Fixture::new(MANIFEST).objects();
    let policy = &body(&objects, Kind::NetworkPolicy, "clicks-rectrain")["spec"];
    assert_eq!(policy["policyTypes"], json!(["Ingress"]));
    let ingress = &policy["ingress"];
    assert_eq!(ingress[0]["from"][0]["podSelector"]["matchLabels"][names::JOB_LABEL], "clicks");
    assert_eq!(ingress[0]["ports"][0]["port"], 7000);
    assert_eq!(
        ingress[1]["from"][0]["namespaceSelector"]["matchLabels"]["kubernetes.io/metadata.name"],
        "rectrain-system"
    );
    assert_eq!(ingress[1]["ports"][0]["port"], 7001);
    assert_eq!((&ingress[2]["from"], &ingress[2]["ports"][0]["port"]), (&Value::Null, &json!(9090)));
}

#[test]
fn a_second_build_is_equal_and_another_image_changes_the_digest() {
    let mut fixture = Fixture::new(MANIFEST);
    let first = fixture.objects();
    assert_eq!(first, fixture.objects());
    fixture.attempt.image = "registry/rectrain:2".to_owned();
    let changed = fixture.objects();
    let differing: Vec<_> =
        first.iter().zip(&changed).filter(|(a, b)| a.hash() != b.hash()).map(|(a, _)| a.kind).collect();
    assert_eq!(differing, [Kind::StatefulSet; 5]);
}

#[test]
fn new_pods_avoid_the_nodes_of_replaced_ones_besides_the_users_rules() {
    let users = "affinity: {nodeAffinity: {preferredDuringSchedulingIgnoredDuringExecution: \
                 [{weight: 1, preference: {matchExpressions: [{key: zone, operator: In, values: [a]}]}}]}}";
    let manifest = MANIFEST.replace("priorityClassName: batch", &format!("{users}\n        priorityClassName: batch"));
    let fixture = Fixture::new(&manifest);
    let replaced = |role: &str, node: &str| ReplacedPod {
        role: role.to_owned(),
        pod: format!("clicks-{role}-1"),
        uid: "u".to_owned(),
        node: Some(node.to_owned()),
        time: Time(Timestamp::UNIX_EPOCH),
        reason: "slow".to_owned(),
    };
    let mut plan = fixture.plan(true);
    plan.replaced_pods = vec![replaced("ps", "b"), replaced("ps", "a"), replaced("loader", "c")];
    let objects = objects(&plan).expect("they are built");
    let rules = |role| {
        let pod = &body(&objects, Kind::StatefulSet, &names::of_role("clicks", role))["spec"]["template"]["spec"];
        pod["affinity"]["nodeAffinity"]["preferredDuringSchedulingIgnoredDuringExecution"].clone()
    };
    let is_another = |node: &str| json!({"key": "metadata.name", "operator": "NotIn", "values": [node]});
    let rule = |nodes: &[Value]| json!({"weight": 100, "preference": {"matchFields": nodes}});
    let of_servers = rules(Role::Ps);
    assert_eq!((&of_servers[0]["weight"], &of_servers[1]), (&json!(1), &rule(&[is_another("a"), is_another("b")])));
    assert_eq!(rules(Role::Loader), json!([rule(&[is_another("c")])]));
    assert_eq!(rules(Role::DenseWorker), Value::Null);
}

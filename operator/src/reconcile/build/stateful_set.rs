//! The pods of a role. A StatefulSet gives them stable names and starts all of them at once. Its
//! pods wait until they are scaled away.
//!
//! It does not roll: only the next attempt changes pods, and `phase` decides about attempts. So a
//! new version of the operator restarts nothing.

use k8s_openapi::api::apps::v1::{StatefulSet, StatefulSetSpec, StatefulSetUpdateStrategy};
use k8s_openapi::api::core::v1::{
    Capabilities, ConfigMapVolumeSource, Container, ContainerPort, EmptyDirVolumeSource, EnvFromSource, EnvVar,
    EnvVarSource, HTTPGetAction, LocalObjectReference, ObjectFieldSelector, PodSecurityContext, PodSpec,
    PodTemplateSpec, Probe, ResourceRequirements, SeccompProfile, SecretEnvSource, SecretVolumeSource, SecurityContext,
    Toleration, Volume, VolumeMount,
};
use k8s_openapi::apimachinery::pkg::api::resource::Quantity;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{LabelSelector, ObjectMeta};
use k8s_openapi::apimachinery::pkg::util::intstr::IntOrString;
use rectrain_crds::defaults::TERMINATION_GRACE_SECONDS;
use rectrain_crds::{DataSource, Role};
use serde_json::{Value, json};

use super::config_map::MANIFEST;
use super::service::ports;
use super::{Plan, coordinator_host};
use crate::names::{
    self, ATTEMPT_LABEL, CONTAINER, CONTROL_PORT, JOB_UID_LABEL, MEMBER_PORT, METRICS_PORT, USER, pod_template,
};
use crate::quantity::value_of;
use crate::reconcile::merge::{overlay, strategic_merge};
use crate::replace_slow::avoided_nodes;

/// Folder of the manifest.
const FOLDER: &str = "/etc/rectrain";
/// Folder of the job's certificate.
const CERTIFICATE_FOLDER: &str = "/etc/rectrain-certificate";
/// Folder of a parameter server's rows, which outlive its container.
const ROWS_FOLDER: &str = "/var/lib/rectrain/rows";
/// Folder of the coordinator's journal.
const JOURNAL_FOLDER: &str = "/var/lib/rectrain/journal";
/// Seconds that pods stay on a lost node: some nodes return after a moment.
const LOST_NODE_SECONDS: i64 = 30;

pub(super) fn build(plan: &Plan<'_>, role: Role) -> Result<StatefulSet, serde_json::Error> {
    let name = plan.name();
    Ok(StatefulSet {
        metadata: plan.metadata(names::of_role(&name, role), names::role_labels(&name, role)),
        spec: StatefulSetSpec {
            service_name: Some(names::of_role(&name, role)),
            replicas: Some(i32::try_from(plan.replicas(role)).unwrap_or(i32::MAX)),
            pod_management_policy: Some("Parallel".to_owned()),
            update_strategy: Some(StatefulSetUpdateStrategy {
                type_: Some("OnDelete".to_owned()),
                ..StatefulSetUpdateStrategy::default()
            }),
            revision_history_limit: Some(2),
            selector: LabelSelector {
                match_labels: Some(names::pod_selector(&name, role)),
                ..LabelSelector::default()
            },
            template: template(plan, role)?,
            ..StatefulSetSpec::default()
        },
        status: None,
    })
}

/// The operator's template, with the user's template merged over it.
fn template(plan: &Plan<'_>, role: Role) -> Result<PodTemplateSpec, serde_json::Error> {
    let mut template = serde_json::to_value(PodTemplateSpec { metadata: None, spec: Some(pod(plan, role)) })?;
    let mut labels = json!({});
    let mut annotations = json!({
        "prometheus.io/scrape": "true",
        "prometheus.io/port": METRICS_PORT.to_string(),
        "prometheus.io/path": "/metrics",
    });
    if let Some(user) = pod_template(role, &plan.job.spec) {
        strategic_merge(&mut template, &overlay(user)?);
        strategic_merge(&mut labels, &json!(user.labels));
        strategic_merge(&mut annotations, &json!(user.annotations));
    }
    if let Some(bytes) = plan.attempt.ps_memory_bytes.filter(|_| role == Role::Ps) {
        raise_memory(&mut template, bytes);
    }
    avoid(&mut template, &avoided_nodes(&plan.replaced_pods, role));
    // The operator's labels win, because it selects objects by them.
    let mut own = names::role_labels(&plan.name(), role);
    own.insert(ATTEMPT_LABEL.to_owned(), plan.attempt.number.to_string());
    own.extend(plan.job.metadata.uid.clone().map(|uid| (JOB_UID_LABEL.to_owned(), uid)));
    strategic_merge(&mut labels, &json!(own));
    let metadata: ObjectMeta = serde_json::from_value(json!({"labels": labels, "annotations": annotations}))?;
    Ok(PodTemplateSpec { metadata: Some(metadata), ..serde_json::from_value(template)? })
}

/// Prefers other nodes than these, besides the user's rules. A pod still starts if no other node
/// takes it.
fn avoid(template: &mut Value, nodes: &[String]) {
    if nodes.is_empty() {
        return;
    }
    let is_another = |node: &String| json!({"key": "metadata.name", "operator": "NotIn", "values": [node]});
    let fields: Vec<Value> = nodes.iter().map(is_another).collect();
    let rule = json!({"weight": 100, "preference": {"matchFields": fields}});
    let affinity = &mut template["spec"]["affinity"]["nodeAffinity"];
    let rules = &mut affinity["preferredDuringSchedulingIgnoredDuringExecution"];
    match rules.as_array_mut() {
        Some(rules) => rules.push(rule),
        None => *rules = json!([rule]),
    }
}

/// Raises the container's memory limit to `bytes`, and its request in the same proportion, so that
/// a request equal to the limit stays equal. A template with a higher limit, or with none, is not
/// changed.
fn raise_memory(template: &mut Value, bytes: u64) {
    let containers = template["spec"]["containers"].as_array_mut().into_iter().flatten();
    for container in containers.filter(|container| container["name"] == CONTAINER) {
        let memory = |resources: &Value, kind: &str| {
            value_of(&Quantity(resources[kind]["memory"].as_str()?.to_owned())).filter(|bytes| *bytes > 0.0)
        };
        let resources = &mut container["resources"];
        let Some(limit) = memory(resources, "limits").filter(|limit| *limit < bytes as f64) else { continue };
        let request = memory(resources, "requests");
        resources["limits"]["memory"] = json!(bytes.to_string());
        if let Some(request) = request {
            let raised = (request * (bytes as f64 / limit)).round() as u64;
            resources["requests"]["memory"] = json!(raised.min(bytes).to_string());
        }
    }
}

fn pod(plan: &Plan<'_>, role: Role) -> PodSpec {
    let name = plan.name();
    let pull_secrets = plan.config.image_pull_secrets.iter();
    let gpu_pods = (gpus(plan, role) > 0).then_some(&plan.config.gpu_pods);
    PodSpec {
        service_account_name: Some(names::of_job(&name)),
        automount_service_account_token: Some(false),
        enable_service_links: Some(false),
        termination_grace_period_seconds: Some(grace_seconds(plan, role).into()),
        image_pull_secrets: (!plan.config.image_pull_secrets.is_empty())
            .then(|| pull_secrets.map(|name| LocalObjectReference { name: name.clone() }).collect()),
        security_context: Some(PodSecurityContext {
            run_as_non_root: Some(true),
            run_as_user: Some(USER),
            run_as_group: Some(USER),
            fs_group: Some(USER),
            fs_group_change_policy: Some("OnRootMismatch".to_owned()),
            seccomp_profile: Some(SeccompProfile { type_: "RuntimeDefault".to_owned(), localhost_profile: None }),
            ..PodSecurityContext::default()
        }),
        volumes: Some(volumes(plan, role)),
        node_selector: gpu_pods.and_then(|pods| pods.node_selector.clone()),
        tolerations: Some(tolerations(gpu_pods.and_then(|pods| pods.tolerations.as_deref()).unwrap_or_default())),
        containers: vec![container(plan, role)],
        ..PodSpec::default()
    }
}

/// The installation's tolerations, and short ones for lost nodes: training waits for their pods,
/// and replacements are as good. Kubernetes' default is five minutes.
fn tolerations(installation: &[Toleration]) -> Vec<Toleration> {
    let lost = ["not-ready", "unreachable"].map(|taint| Toleration {
        key: Some(format!("node.kubernetes.io/{taint}")),
        operator: Some("Exists".to_owned()),
        effect: Some("NoExecute".to_owned()),
        toleration_seconds: Some(LOST_NODE_SECONDS),
        value: None,
    });
    installation.iter().cloned().chain(lost).collect()
}

fn volumes(plan: &Plan<'_>, role: Role) -> Vec<Volume> {
    let name = plan.name();
    let manifest = Volume {
        name: "manifest".to_owned(),
        config_map: Some(ConfigMapVolumeSource {
            name: names::config_map(&name, &plan.manifest_hash),
            ..ConfigMapVolumeSource::default()
        }),
        ..Volume::default()
    };
    let tmp = Volume { name: "tmp".to_owned(), empty_dir: Some(EmptyDirVolumeSource::default()), ..Volume::default() };
    let certificate = plan.certificate.as_ref().map(|_| Volume {
        name: "certificate".to_owned(),
        secret: Some(SecretVolumeSource {
            secret_name: Some(names::certificate(&name)),
            // Readable for the pods' group only.
            default_mode: Some(0o440),
            ..SecretVolumeSource::default()
        }),
        ..Volume::default()
    });
    let durable = durable_state(plan, role).map(|DurableState { volume, is_memory, .. }| Volume {
        name: volume.to_owned(),
        empty_dir: Some(EmptyDirVolumeSource {
            medium: is_memory.then(|| "Memory".to_owned()),
            ..EmptyDirVolumeSource::default()
        }),
        ..Volume::default()
    });
    [manifest, tmp].into_iter().chain(certificate).chain(durable).collect()
}

/// State that outlives its container.
struct DurableState {
    volume: &'static str,
    folder: &'static str,
    /// The variable that tells the container the folder. An older runtime ignores it.
    variable: &'static str,
    /// Whether it lies in memory. Then it counts against the container's memory limit.
    is_memory: bool,
}

/// The durable state of a role: a parameter server's rows, the coordinator's journal.
fn durable_state(plan: &Plan<'_>, role: Role) -> Option<DurableState> {
    match role {
        Role::Ps if plan.resolved.fault_tolerance.shared_memory => Some(DurableState {
            volume: "rows",
            folder: ROWS_FOLDER,
            variable: "RECTRAIN_SHARED_MEMORY",
            is_memory: true,
        }),
        Role::Coordinator => Some(DurableState {
            volume: "journal",
            folder: JOURNAL_FOLDER,
            variable: "RECTRAIN_JOURNAL",
            is_memory: false,
        }),
        _ => None,
    }
}

fn mounts(plan: &Plan<'_>, role: Role) -> Vec<VolumeMount> {
    let certificate = plan.certificate.as_ref().map(|_| mount("certificate", CERTIFICATE_FOLDER, true));
    let durable = durable_state(plan, role).map(|state| mount(state.volume, state.folder, false));
    let always = [mount("manifest", FOLDER, true), mount("tmp", "/tmp", false)];
    always.into_iter().chain(certificate).chain(durable).collect()
}

fn container(plan: &Plan<'_>, role: Role) -> Container {
    Container {
        name: CONTAINER.to_owned(),
        image: Some(plan.attempt.image.clone()),
        image_pull_policy: Some(plan.config.image_pull_policy.clone()),
        args: Some(arguments(plan, role)),
        env: Some(environment(plan, role)),
        env_from: secrets(plan, role),
        ports: Some(ports(role).iter().map(|&(name, port)| container_port(name, port)).collect()),
        resources: device(plan, role),
        volume_mounts: Some(mounts(plan, role)),
        security_context: Some(SecurityContext {
            allow_privilege_escalation: Some(false),
            read_only_root_filesystem: Some(true),
            capabilities: Some(Capabilities { drop: Some(vec!["ALL".to_owned()]), add: None }),
            ..SecurityContext::default()
        }),
        // A drain waits while a pod of the role does not participate yet.
        readiness_probe: Some(Probe { period_seconds: Some(5), failure_threshold: Some(3), ..answers("/readyz", 3) }),
        // A process that computes on every core may answer slowly. Only a stuck one is restarted.
        liveness_probe: Some(Probe { period_seconds: Some(20), failure_threshold: Some(9), ..answers("/healthz", 10) }),
        // The last lines of a role say why it ended. They are the message that the operator shows.
        termination_message_policy: Some("FallbackToLogsOnError".to_owned()),
        ..Container::default()
    }
}

/// The command line of a role.
fn arguments(plan: &Plan<'_>, role: Role) -> Vec<String> {
    let mut arguments =
        vec![role.name().to_owned(), format!("{FOLDER}/{MANIFEST}"), "--log=json".to_owned(), "--stay".to_owned()];
    match role {
        Role::Coordinator => arguments.extend([
            "--json".to_owned(),
            format!("--control=[::]:{CONTROL_PORT}"),
            // All attempts of a job are one run, which continues from its own checkpoints.
            format!("--run={}", plan.job.metadata.uid.as_deref().unwrap_or_default()),
        ]),
        _ => {
            let service = names::of_role(&plan.name(), role);
            arguments.extend([
                "--index=$(RECTRAIN_INDEX)".to_owned(),
                format!("--coordinator=tcp://{}:{MEMBER_PORT}", coordinator_host(plan)),
                format!("--advertise=tcp://$(POD_NAME).{service}.{}.svc:{MEMBER_PORT}", plan.namespace()),
            ]);
        }
    }
    arguments.push(format!("--bind=tcp://[::]:{MEMBER_PORT}"));
    arguments.push(format!("--metrics=[::]:{METRICS_PORT}"));
    if plan.certificate.is_some() {
        arguments.push(format!("--tls={CERTIFICATE_FOLDER}"));
    }
    arguments
}

fn environment(plan: &Plan<'_>, role: Role) -> Vec<EnvVar> {
    let field = |name: &str, path: &str| EnvVar {
        name: name.to_owned(),
        value_from: Some(EnvVarSource {
            field_ref: Some(ObjectFieldSelector { api_version: Some("v1".to_owned()), field_path: path.to_owned() }),
            ..EnvVarSource::default()
        }),
        ..EnvVar::default()
    };
    let value =
        |name: &str, value: &str| EnvVar { name: name.to_owned(), value: Some(value.to_owned()), ..EnvVar::default() };
    let mut environment = vec![
        field("POD_NAME", "metadata.name"),
        field("RECTRAIN_INDEX", "metadata.labels['apps.kubernetes.io/pod-index']"),
        value("RECTRAIN_LOG", "info"),
        value("RECTRAIN_GRACE_SECONDS", &grace_seconds(plan, role).to_string()),
        // Not in the pods' manifest, so that a change needs no new pods.
        value("RECTRAIN_STALL_SECONDS", &plan.resolved.fault_tolerance.stall_seconds.to_string()),
    ];
    if let Some(state) = durable_state(plan, role) {
        environment.push(value(state.variable, state.folder));
    }
    if role == Role::Coordinator {
        // A new pod's journal is empty. It continues from the copies of this attempt's parameter
        // servers. An older runtime ignores the variable.
        environment.push(value("RECTRAIN_RECOVER_ATTEMPT", &plan.attempt.number.to_string()));
    }
    if gpus(plan, role) > 0 {
        // GPU libraries cache files, and the image's own folders are read-only.
        environment.push(value("XDG_CACHE_HOME", "/tmp"));
    }
    environment
}

/// Grace period of a pod in seconds.
fn grace_seconds(plan: &Plan<'_>, role: Role) -> u32 {
    let template = pod_template(role, &plan.job.spec);
    template.and_then(|template| template.termination_grace_period_seconds).unwrap_or(TERMINATION_GRACE_SECONDS)
}

/// The credentials of the object store, for roles that use it, and of the stream, for loaders.
fn secrets(plan: &Plan<'_>, role: Role) -> Option<Vec<EnvFromSource>> {
    let data = &plan.resolved.data;
    let storage = data.storage.secret_name.clone().filter(|_| role.uses_storage());
    let stream = match &data.source {
        DataSource::Stream(stream) => stream.secret_name.clone().filter(|_| role == Role::Loader),
        DataSource::Files(_) | DataSource::Synthetic(_) | DataSource::Follow(_) => None,
    };
    let source = |name| EnvFromSource {
        secret_ref: Some(SecretEnvSource { name, optional: Some(false) }),
        ..EnvFromSource::default()
    };
    let sources: Vec<EnvFromSource> = storage.into_iter().chain(stream).map(source).collect();
    (!sources.is_empty()).then_some(sources)
}

/// GPUs of each pod of a role.
fn gpus(plan: &Plan<'_>, role: Role) -> u32 {
    if role == Role::DenseWorker { plan.resolved.roles.gpus } else { 0 }
}

/// The GPU of a dense worker.
fn device(plan: &Plan<'_>, role: Role) -> Option<ResourceRequirements> {
    let gpus = gpus(plan, role);
    (gpus > 0).then(|| ResourceRequirements {
        limits: Some([("nvidia.com/gpu".to_owned(), Quantity(gpus.to_string()))].into()),
        ..ResourceRequirements::default()
    })
}

fn container_port(name: &str, port: u16) -> ContainerPort {
    ContainerPort {
        name: Some(name.to_owned()),
        container_port: i32::from(port),
        protocol: Some("TCP".to_owned()),
        ..ContainerPort::default()
    }
}

fn mount(name: &str, path: &str, read_only: bool) -> VolumeMount {
    VolumeMount {
        name: name.to_owned(),
        mount_path: path.to_owned(),
        read_only: read_only.then_some(true),
        ..VolumeMount::default()
    }
}

fn answers(path: &str, timeout_seconds: i32) -> Probe {
    Probe {
        http_get: Some(HTTPGetAction {
            path: Some(path.to_owned()),
            port: IntOrString::String("metrics".to_owned()),
            ..HTTPGetAction::default()
        }),
        timeout_seconds: Some(timeout_seconds),
        ..Probe::default()
    }
}

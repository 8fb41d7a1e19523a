//! Builds the objects of a `RecModelServer`. Pure: they depend only on the manifest, the chosen
//! model, the installation, and the number of pods that an autoscaler has set.

use std::collections::BTreeMap;

use kube::{Resource, ResourceExt};
use rectrain_crds::{
    PodTemplate, RecModelServer, ServerAutoscalingSpec, ServerTlsSpec, ShardsSpec, WarmUpSpec, defaults,
};
use serde_json::{Value, json};

use super::model::Target;
use super::shards;
use crate::config::OperatorConfig;
use crate::names::{self, CONTAINER, GRPC_PORT, REST_PORT, SERVER_LABEL, SERVER_UID_LABEL, STEP_LABEL, USER};
use crate::objects::{Kind, Wanted};
use crate::reconcile::merge::{overlay, strategic_merge};

/// The time after SIGTERM in which a server still accepts requests, so that load balancers notice.
pub(super) const DRAIN_SECONDS: u32 = 5;
/// The time that a server may need to load its model.
const START_SECONDS: u32 = 600;
/// The time between two looks of the startup probe.
const START_PERIOD_SECONDS: u32 = 5;
/// A rollout without progress for this time is reported. It is longer than a start may take.
pub(super) const DEADLINE_SECONDS: u32 = START_SECONDS + 300;

/// The folder with the certificate of the servers.
const TLS_FOLDER: &str = "/etc/rectrain-tls";
/// The files of the certificate in a Secret, by argument.
const TLS_ARGUMENTS: [(&str, &str); 2] = [("--tls-cert", "tls.crt"), ("--tls-key", "tls.key")];
/// The authorities of clients' certificates.
const CLIENT_AUTHORITY: (&str, &str) = ("--tls-client-ca", "ca.crt");
/// The folder with the recorded requests, and the file in it.
const WARM_UP_FOLDER: &str = "/etc/rectrain-warm-up";
const WARM_UP_FILE: &str = "requests.jsonl";
/// The gauge of a server for an autoscaler.
const IN_PROGRESS: &str = "rectrain_inference_requests_in_progress";

/// The input of the builders.
#[derive(Clone, Copy, Debug)]
pub struct Plan<'a> {
    /// The object.
    pub server: &'a RecModelServer,
    /// Its model.
    pub target: &'a Target,
    /// The number of servers with this model.
    pub replicas: u32,
    /// Whether these servers are the canary.
    pub is_canary: bool,
    /// The shards that they read rows from. Without any, each of them holds all rows.
    pub rows: Option<&'a ShardsSpec>,
    /// The installation.
    pub config: &'a OperatorConfig,
}

/// The number of servers that should exist. An autoscaler has set the number of an existing
/// Deployment.
#[must_use]
pub fn replicas(server: &RecModelServer, deployed: Option<u32>) -> u32 {
    let spec = &server.spec;
    match &spec.autoscaling {
        Some(scaling) => deployed.unwrap_or(0).clamp(least(scaling), scaling.max_replicas.max(least(scaling))),
        None => spec.replicas.unwrap_or(defaults::SERVERS),
    }
}

/// The number of servers of the canary. It leaves one of the others.
#[must_use]
pub fn canary_servers(server: &RecModelServer, replicas: u32) -> u32 {
    let Some(canary) = &server.spec.canary else { return 0 };
    let percent = u64::from(canary.percent.unwrap_or(defaults::CANARY_PERCENT));
    let part = (u64::from(replicas) * percent).div_ceil(100);
    u32::try_from(part).unwrap_or(u32::MAX).min(replicas.saturating_sub(1))
}

fn least(scaling: &ServerAutoscalingSpec) -> u32 {
    scaling.min_replicas.unwrap_or(defaults::REPLICAS)
}

/// All objects of the servers, in the order of their creation. `canary` is the plan of the canary's
/// servers. Shards have objects of their own (`shards::objects`).
///
/// # Errors
/// If the template cannot be written as JSON.
pub fn objects(plan: Plan<'_>, canary: Option<Plan<'_>>) -> Result<Vec<Wanted>, serde_json::Error> {
    let mut all = around_servers(plan);
    all.push(wanted(plan, Kind::Deployment, json!({"spec": deployment(plan)?})));
    if let Some(canary) = canary {
        all.push(wanted(canary, Kind::Deployment, json!({"spec": deployment(canary)?})));
    }
    if let Some(scaling) = &plan.server.spec.autoscaling {
        all.push(wanted(plan, Kind::HorizontalPodAutoscaler, json!({"spec": autoscaler(plan, scaling)})));
    }
    Ok(all)
}

/// The objects around the servers. They need no rows, so they are there before the servers.
#[must_use]
pub fn around_servers(plan: Plan<'_>) -> Vec<Wanted> {
    vec![
        wanted(plan, Kind::ServiceAccount, json!({"automountServiceAccountToken": false})),
        wanted(plan, Kind::Service, json!({"spec": service(plan)})),
        wanted(plan, Kind::NetworkPolicy, json!({"spec": network_policy(plan)})),
        wanted(plan, Kind::PodDisruptionBudget, json!({"spec": disruption_budget(plan)})),
    ]
}

/// The name of the Deployment of a plan.
#[must_use]
pub fn deployment_name(plan: Plan<'_>) -> String {
    let server = plan.server.name_any();
    if plan.is_canary { names::of_canary(&server) } else { names::of_server(&server) }
}

/// An object of the servers with these fields, named and owned.
fn wanted(plan: Plan<'_>, kind: Kind, body: Value) -> Wanted {
    let metadata = json!({"name": deployment_name(plan), "labels": names::server_labels(&plan.server.name_any())});
    owned(plan.server, kind, metadata, body)
}

/// An object with these metadata and fields that belongs to `server`.
pub(super) fn owned(server: &RecModelServer, kind: Kind, metadata: Value, mut body: Value) -> Wanted {
    body["apiVersion"] = json!(kind.resource().api_version);
    body["kind"] = json!(kind.name());
    body["metadata"] = metadata;
    body["metadata"]["namespace"] = json!(server.namespace());
    let owners: Vec<_> = server.controller_owner_ref(&()).into_iter().collect();
    body["metadata"]["ownerReferences"] = json!(owners);
    Wanted::new(kind, body)
}

/// The selector of all servers, or of the canary's.
fn selector(plan: Plan<'_>) -> Value {
    let server = plan.server.name_any();
    let labels = if plan.is_canary { names::canary_selector(&server) } else { names::server_selector(&server) };
    json!({ "matchLabels": labels })
}

/// The ports of a server, by name.
const PORTS: [(&str, u16); 2] = [("http", REST_PORT), ("grpc", GRPC_PORT)];

fn service(plan: Plan<'_>) -> Value {
    let ports = PORTS.map(|(name, port)| json!({"name": name, "port": port, "protocol": "TCP", "targetPort": name}));
    json!({"selector": names::server_selector(&plan.server.name_any()), "ports": ports})
}

/// Every pod may ask for predictions and read metrics. Other ports are closed. Calls from the
/// servers are not restricted, because their model is outside.
fn network_policy(plan: Plan<'_>) -> Value {
    let ports = PORTS.map(|(_, port)| json!({"port": port, "protocol": "TCP"}));
    json!({"podSelector": selector(plan), "policyTypes": ["Ingress"], "ingress": [{"ports": ports}]})
}

fn disruption_budget(plan: Plan<'_>) -> Value {
    one_at_a_time(&selector(plan))
}

/// A drain evicts one of these pods at a time.
pub(super) fn one_at_a_time(selector: &Value) -> Value {
    json!({"maxUnavailable": 1, "selector": selector, "unhealthyPodEvictionPolicy": "AlwaysAllow"})
}

fn autoscaler(plan: Plan<'_>, scaling: &ServerAutoscalingSpec) -> Value {
    let deployment = names::of_server(&plan.server.name_any());
    json!({
        "scaleTargetRef": {"apiVersion": "apps/v1", "kind": "Deployment", "name": deployment},
        "minReplicas": least(scaling),
        "maxReplicas": scaling.max_replicas,
        "metrics": measures(scaling),
    })
}

/// What the number of servers follows: the use of CPU, requests in progress, or the larger need.
fn measures(scaling: &ServerAutoscalingSpec) -> Vec<Value> {
    let without_requests = scaling.requests_in_progress.is_none().then_some(defaults::SERVER_CPU_PERCENT);
    let cpu = scaling.cpu_percent.or(without_requests).map(|percent| {
        let target = json!({"type": "Utilization", "averageUtilization": percent});
        json!({"type": "Resource", "resource": {"name": "cpu", "target": target}})
    });
    let requests = scaling.requests_in_progress.map(|requests| {
        let target = json!({"type": "AverageValue", "averageValue": requests.to_string()});
        json!({"type": "Pods", "pods": {"metric": {"name": IN_PROGRESS}, "target": target}})
    });
    cpu.into_iter().chain(requests).collect()
}

/// A rollout starts a new server before an old one ends, so no request is refused.
fn deployment(plan: Plan<'_>) -> Result<Value, serde_json::Error> {
    Ok(json!({
        "replicas": plan.replicas,
        "revisionHistoryLimit": 2,
        "progressDeadlineSeconds": DEADLINE_SECONDS,
        "strategy": {"type": "RollingUpdate", "rollingUpdate": {"maxUnavailable": 0, "maxSurge": 1}},
        "selector": selector(plan),
        "template": template(&servers(plan))?,
    }))
}

/// The pods of servers, or of a shard.
#[derive(Clone, Debug)]
pub(super) struct Pods<'a> {
    pub(super) server: &'a RecModelServer,
    pub(super) target: &'a Target,
    pub(super) config: &'a OperatorConfig,
    /// The user's changes.
    pub(super) template: Option<&'a PodTemplate>,
    /// The labels that the operator selects them by, and others.
    pub(super) labels: BTreeMap<String, String>,
    /// Their ports by name. One of them is `http`.
    pub(super) ports: [(&'static str, u16); 2],
    pub(super) arguments: Vec<String>,
    /// The certificate of their ports. `None` if connections are not encrypted.
    pub(super) tls: Option<&'a ServerTlsSpec>,
    /// The requests that they predict before they answer.
    pub(super) warm_up: Option<&'a WarmUpSpec>,
    /// Further fields of a pod.
    pub(super) fields: Value,
}

fn servers(plan: Plan<'_>) -> Pods<'_> {
    let name = plan.server.name_any();
    let mut labels = names::server_labels(&name);
    if plan.is_canary {
        labels.extend(names::canary_selector(&name));
    }
    labels.extend(plan.target.step().map(|step| (STEP_LABEL.to_owned(), step.to_string())));
    Pods {
        server: plan.server,
        target: plan.target,
        config: plan.config,
        template: plan.server.spec.template.as_ref(),
        labels,
        ports: PORTS,
        arguments: arguments(plan),
        tls: plan.server.spec.tls.as_ref(),
        warm_up: plan.server.spec.warm_up.as_ref(),
        fields: json!({}),
    }
}

/// The operator's template, with the user's template merged over it.
///
/// # Errors
/// If the user's template cannot be written as JSON.
pub(super) fn template(pods: &Pods<'_>) -> Result<Value, serde_json::Error> {
    let mut template = json!({"spec": pod(pods)});
    let mut labels = json!({});
    let mut annotations = json!({
        "prometheus.io/scrape": "true",
        "prometheus.io/port": REST_PORT.to_string(),
        "prometheus.io/path": "/metrics",
    });
    if pods.tls.is_some() {
        annotations["prometheus.io/scheme"] = json!("https");
    }
    if let Some(user) = pods.template {
        strategic_merge(&mut template, &overlay(user)?);
        strategic_merge(&mut labels, &json!(user.labels));
        strategic_merge(&mut annotations, &json!(user.annotations));
    }
    // The operator's labels win, because it selects pods by them. A shard's pods are no servers.
    strategic_merge(&mut labels, &json!({SERVER_LABEL: null}));
    strategic_merge(&mut labels, &json!(pods.labels));
    strategic_merge(&mut labels, &json!({SERVER_UID_LABEL: pods.server.uid()}));
    template["metadata"] = json!({"labels": labels, "annotations": annotations});
    Ok(template)
}

fn pod(pods: &Pods<'_>) -> Value {
    let mut pod = json!({
        "serviceAccountName": names::of_server(&pods.server.name_any()),
        "automountServiceAccountToken": false,
        "enableServiceLinks": false,
        "terminationGracePeriodSeconds": defaults::TERMINATION_GRACE_SECONDS,
        "securityContext": {
            "runAsNonRoot": true,
            "runAsUser": USER,
            "runAsGroup": USER,
            "fsGroup": USER,
            "fsGroupChangePolicy": "OnRootMismatch",
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "volumes": volumes(pods),
        "containers": [container(pods)],
    });
    if !pods.config.image_pull_secrets.is_empty() {
        let secrets = pods.config.image_pull_secrets.iter().map(|name| json!({"name": name}));
        pod["imagePullSecrets"] = secrets.collect();
    }
    strategic_merge(&mut pod, &pods.fields);
    pod
}

fn volumes(pods: &Pods<'_>) -> Vec<Value> {
    let mut volumes = vec![json!({"name": "tmp", "emptyDir": {}})];
    if let Some(tls) = pods.tls {
        let items: Vec<Value> = tls_files(tls).map(|(_, file)| json!({"key": file, "path": file})).collect();
        volumes.push(json!({"name": "tls", "secret": {"secretName": tls.secret_name, "items": items}}));
    }
    if let Some(WarmUpSpec { config_map_name, key }) = pods.warm_up {
        let key = key.as_deref().unwrap_or(defaults::WARM_UP_KEY);
        let requests = json!({"name": config_map_name, "items": [{"key": key, "path": WARM_UP_FILE}]});
        volumes.push(json!({"name": "warm-up", "configMap": requests}));
    }
    volumes
}

fn mounts(pods: &Pods<'_>) -> Vec<Value> {
    let mut mounts = vec![json!({"name": "tmp", "mountPath": "/tmp"})];
    if pods.tls.is_some() {
        mounts.push(json!({"name": "tls", "mountPath": TLS_FOLDER, "readOnly": true}));
    }
    if pods.warm_up.is_some() {
        mounts.push(json!({"name": "warm-up", "mountPath": WARM_UP_FOLDER, "readOnly": true}));
    }
    mounts
}

/// The arguments with the files of the certificate, and the names of the files.
fn tls_files(tls: &ServerTlsSpec) -> impl Iterator<Item = (&'static str, &'static str)> {
    let needs_certificates = tls.client_certificates.unwrap_or(false);
    TLS_ARGUMENTS.into_iter().chain(needs_certificates.then_some(CLIENT_AUTHORITY))
}

fn container(pods: &Pods<'_>) -> Value {
    let image = pods.server.spec.image.as_ref().unwrap_or(&pods.config.runtime_image);
    let ports = pods.ports.map(|(name, port)| json!({"name": name, "containerPort": port, "protocol": "TCP"}));
    let mut container = json!({
        "name": CONTAINER,
        "image": image,
        "imagePullPolicy": pods.config.image_pull_policy,
        "args": pods.arguments,
        "env": [{"name": "RECTRAIN_LOG", "value": "info"}],
        "ports": ports,
        "volumeMounts": mounts(pods),
        "securityContext": {
            "allowPrivilegeEscalation": false,
            "readOnlyRootFilesystem": true,
            "capabilities": {"drop": ["ALL"]},
        },
        // A server listens once its model is in memory.
        "startupProbe": probe(pods, "live", START_PERIOD_SECONDS, START_SECONDS / START_PERIOD_SECONDS),
        "readinessProbe": probe(pods, "ready", 2, 1),
        // A process that computes on every core may answer slowly. Only a stuck one is restarted.
        "livenessProbe": probe(pods, "live", 20, 9),
        "terminationMessagePolicy": "FallbackToLogsOnError",
    });
    if let Some(secret) = &pods.target.place.secret_name {
        container["envFrom"] = json!([{"secretRef": {"name": secret, "optional": false}}]);
    }
    container
}

/// A kubelet does not check the certificate, and shows none.
fn probe(pods: &Pods<'_>, path: &str, period_seconds: u32, failures: u32) -> Value {
    let mut get = json!({"path": format!("/v2/health/{path}"), "port": "http"});
    if pods.tls.is_some() {
        get["scheme"] = json!("HTTPS");
    }
    json!({
        "httpGet": get,
        "periodSeconds": period_seconds,
        "timeoutSeconds": if path == "live" { 10 } else { 2 },
        "failureThreshold": failures,
    })
}

/// The command line of a server.
fn arguments(plan: Plan<'_>) -> Vec<String> {
    let in_flight = plan.server.spec.max_in_flight.unwrap_or(defaults::SERVER_MAX_IN_FLIGHT);
    let mut arguments = vec![
        "serve".to_owned(),
        plan.target.location(),
        format!("--name={}", plan.server.name_any()),
        format!("--listen=[::]:{REST_PORT}"),
        format!("--grpc=[::]:{GRPC_PORT}"),
        format!("--drain={DRAIN_SECONDS}s"),
        format!("--max-requests={in_flight}"),
    ];
    if let Some(tls) = &plan.server.spec.tls {
        arguments.extend(tls_files(tls).map(|(argument, file)| format!("{argument}={TLS_FOLDER}/{file}")));
    }
    if plan.server.spec.warm_up.is_some() {
        arguments.push(format!("--warm-up={WARM_UP_FOLDER}/{WARM_UP_FILE}"));
    }
    if let Some(gate) = &plan.server.spec.gate {
        arguments.extend(gate.rows.iter().map(|rows| format!("--gate-rows={rows}")));
        arguments.push(format!("--gate-min-auc={}", gate.min_auc));
    }
    if let Some(shards) = plan.rows {
        arguments.extend(shards::arguments_of_servers(&plan.server.name_any(), shards));
    }
    arguments.extend(arguments_of_path(plan.server, plan.target));
    arguments
}

/// How a process reads the path of its model.
pub(super) fn arguments_of_path(server: &RecModelServer, target: &Target) -> Vec<String> {
    // At least 1 ms: the process refuses 0.
    let poll = server.spec.poll_seconds.map(|seconds| format!("--poll={:.0}ms", (1000.0 * seconds).max(1.0)));
    let options = target.place.options.iter().map(|(name, value)| format!("--option={name}={value}"));
    poll.into_iter().chain(options).collect()
}

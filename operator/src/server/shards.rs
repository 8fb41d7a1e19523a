//! The shards of a `RecModelServer`: pods that each hold a part of the rows. Pure.
//!
//! A shard is a StatefulSet whose pods all have the same rows, with a headless Service and a
//! PodDisruptionBudget. The number of shards and the path of the model decide which rows a shard
//! has. Both are in the arguments of its pods, and of the servers that read from it.
//!
//! Servers always find their rows:
//!
//! - They start once each shard has a pod that answers. Servers with whole models change to shards
//!   then.
//! - A shard loses pods, or ends, once no server reads from these pods.
//! - Shards with other rows end before the wanted ones start, because they have the same names.

use std::time::Duration;

use jiff::{SignedDuration, Timestamp};
use kube::ResourceExt;
use rectrain_crds::{RecModelServer, ServerPhase, ShardCount, ShardsSpec, defaults};
use serde_json::{Value, json};

use super::build::{self, DEADLINE_SECONDS, DRAIN_SECONDS, Pods};
use super::conditions::Finding;
use super::decide::{Facts, count};
use super::model::Target;
use crate::config::OperatorConfig;
use crate::names::{self, APPLIED_ANNOTATION, CONTAINER, REST_PORT, ROWS_PORT};
use crate::objects::{Kind, Owned, Wanted};

/// Time between two looks at shards that do not all answer.
pub(super) const LOOK_AT_SHARDS: Duration = Duration::from_secs(60);
/// The argument of a shard's pods with the number of shards, and the one of servers with the
/// addresses of a shard's pods.
const SHARDS: &str = "--shards=";
const ROWS_FROM: &str = "--rows-from=";
/// The reason of shards that do not start.
const STUCK: &str = "ShardsStuck";

/// The present step on the way to the wanted shards.
#[derive(Clone, Copy, Debug)]
pub(super) struct Layout<'a> {
    /// The shards that should exist now.
    pub(super) shards: Option<&'a ShardsSpec>,
    /// Whether the servers read from them.
    pub(super) is_read: bool,
    /// Whether there should be servers yet.
    pub(super) has_servers: bool,
    /// Whether there are shards with other rows. They end once no server reads from them.
    pub(super) has_others: bool,
}

impl<'a> Layout<'a> {
    /// The step that follows from the existing objects.
    pub(super) fn new(facts: Facts<'a>, target: &Target) -> Self {
        let wanted = facts.server.spec.shards.as_ref();
        let rows = wanted.map(|shards| Rows::of(shards, target));
        let has_others = sets(facts).any(|set| rows_of(&set.body) != rows);
        let is_deployed = facts.deployment.is_some();
        let Some(shards) = wanted.filter(|_| !has_others) else {
            let has_servers = wanted.is_none() || is_deployed;
            return Self { shards: None, is_read: false, has_servers, has_others };
        };
        let all_answer = silent(facts, shards).is_empty();
        let is_read = all_answer || facts.deployment.and_then(rows_of) == rows;
        Self { shards: Some(shards), is_read, has_servers: is_deployed || all_answer, has_others }
    }

    /// The shards that the servers read from.
    pub(super) fn read(&self) -> Option<&'a ShardsSpec> {
        self.shards.filter(|_| self.is_read)
    }
}

/// The number of shards and the place of their model. Shards with the same ones have the same rows.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Rows {
    shards: usize,
    place: String,
}

impl Rows {
    fn of(shards: &ShardsSpec, target: &Target) -> Self {
        Self { shards: shards.count as usize, place: target.location() }
    }
}

/// The rows of a shard's pods, or the rows that servers read from shards, by the arguments in their
/// StatefulSet or Deployment.
fn rows_of(body: &Value) -> Option<Rows> {
    let mut containers = body["spec"]["template"]["spec"]["containers"].as_array()?.iter();
    let arguments = containers.find(|container| container["name"] == CONTAINER)?["args"].as_array()?;
    let arguments: Vec<&str> = arguments.iter().filter_map(Value::as_str).collect();
    let number = arguments.iter().find_map(|argument| argument.strip_prefix(SHARDS)?.parse().ok());
    let read = arguments.iter().filter(|argument| argument.starts_with(ROWS_FROM)).count();
    let shards = number.or(Some(read).filter(|read| *read > 0))?;
    Some(Rows { shards, place: (*arguments.get(1)?).to_owned() })
}

/// Whether an object of the `RecModelServer` with this name belongs to its shards.
pub(super) fn is_of_shards(server: &str, object: &Owned) -> bool {
    let rest = object.name.strip_prefix(&names::of_rows(server));
    rest.is_some_and(|rest| rest.is_empty() || rest.starts_with('-'))
}

/// The existing StatefulSets.
fn sets(facts: Facts<'_>) -> impl Iterator<Item = &Owned> {
    facts.objects.iter().filter(|object| object.kind == Kind::StatefulSet && !object.is_terminating)
}

/// The StatefulSet of a shard.
fn set(facts: Facts<'_>, shard: u32) -> Option<&Value> {
    let name = names::of_shard(&facts.server.name_any(), shard);
    sets(facts).find(|set| set.name == name).map(|set| &set.body)
}

/// The pods of a shard that answer.
fn answering(facts: Facts<'_>, shard: u32) -> u32 {
    set(facts, shard).and_then(|set| count(&set["status"]["readyReplicas"])).unwrap_or(0)
}

/// The shards without a pod that answers, by the names of their StatefulSets.
fn silent(facts: Facts<'_>, shards: &ShardsSpec) -> Vec<String> {
    let silent = (0..shards.count).filter(|shard| answering(facts, *shard) == 0);
    silent.map(|shard| names::of_shard(&facts.server.name_any(), shard)).collect()
}

/// The pods that each shard should have.
fn replicas(shards: &ShardsSpec) -> u32 {
    shards.replicas.unwrap_or(defaults::SHARD_REPLICAS)
}

/// The arguments of servers that read from these shards.
pub(super) fn arguments_of_servers(server: &str, shards: &ShardsSpec) -> Vec<String> {
    let address = |shard, pod| names::rows_address(server, shard, pod);
    let addresses = |shard| (0..replicas(shards)).map(|pod| address(shard, pod)).collect::<Vec<_>>().join(",");
    let mut arguments: Vec<String> =
        (0..shards.count).map(|shard| format!("{ROWS_FROM}{}", addresses(shard))).collect();
    arguments.push(format!("--cache-rows={}", shards.cache_rows.unwrap_or(defaults::SERVER_CACHE_ROWS)));
    arguments
}

/// The input of the builders.
#[derive(Clone, Copy, Debug)]
pub(super) struct Plan<'a> {
    pub(super) server: &'a RecModelServer,
    pub(super) target: &'a Target,
    pub(super) shards: &'a ShardsSpec,
    pub(super) config: &'a OperatorConfig,
}

/// The objects of the shards, in the order of their creation. `is_settled` says that all servers
/// have the wanted arguments, so that none reads from a superfluous pod.
///
/// # Errors
/// If the template cannot be written as JSON.
pub(super) fn objects(plan: Plan<'_>, facts: Facts<'_>, is_settled: bool) -> Result<Vec<Wanted>, serde_json::Error> {
    let name = plan.server.name_any();
    let labels = names::server_labels(&name);
    let policy = json!({"name": names::of_rows(&name), "labels": labels});
    let mut all = vec![build::owned(plan.server, Kind::NetworkPolicy, policy, json!({"spec": network_policy(&name)}))];
    for shard in 0..plan.shards.count {
        let selector = json!({"matchLabels": names::shard_selector(&name, shard)});
        let present = set(facts, shard).and_then(|set| count(&set["spec"]["replicas"]));
        let wanted = replicas(plan.shards);
        let pods = present.filter(|_| !is_settled).map_or(wanted, |present| present.max(wanted));
        let specs = [
            (Kind::Service, service(&name, shard)),
            (Kind::PodDisruptionBudget, build::one_at_a_time(&selector)),
            (Kind::StatefulSet, stateful_set(plan, shard, pods)?),
        ];
        for (kind, spec) in specs {
            all.push(build::owned(plan.server, kind, metadata(plan, shard), json!({"spec": spec})));
        }
    }
    Ok(all)
}

fn metadata(plan: Plan<'_>, shard: u32) -> Value {
    let name = plan.server.name_any();
    let mut labels = names::shard_labels(&name, shard);
    // The operator lists the objects of a RecModelServer by this label.
    labels.extend(names::server_selector(&name));
    json!({"name": names::of_shard(&name, shard), "labels": labels})
}

/// The ports of a shard, by name.
const PORTS: [(&str, u16); 2] = [("rows", ROWS_PORT), ("http", REST_PORT)];

/// Servers know a shard's pods by their DNS names, and ask each of them for the versions that it
/// has. So a pod has a name before it is ready.
fn service(server: &str, shard: u32) -> Value {
    let ports = PORTS.map(|(name, port)| json!({"name": name, "port": port, "protocol": "TCP", "targetPort": name}));
    json!({
        "clusterIP": "None",
        "publishNotReadyAddresses": true,
        "selector": names::shard_selector(server, shard),
        "ports": ports,
    })
}

/// Only the servers may look rows up. Every pod may read metrics.
fn network_policy(server: &str) -> Value {
    let servers = json!([{"podSelector": {"matchLabels": names::server_selector(server)}}]);
    let port = |port: u16| json!([{"port": port, "protocol": "TCP"}]);
    json!({
        "podSelector": {"matchLabels": names::rows_selector(server)},
        "policyTypes": ["Ingress"],
        "ingress": [{"from": servers, "ports": port(ROWS_PORT)}, {"ports": port(REST_PORT)}],
    })
}

/// A rollout replaces one pod of a shard at a time, and waits until it answers. All pods start at
/// once.
fn stateful_set(plan: Plan<'_>, shard: u32, pods: u32) -> Result<Value, serde_json::Error> {
    let name = plan.server.name_any();
    Ok(json!({
        "serviceName": names::of_shard(&name, shard),
        "replicas": pods,
        "podManagementPolicy": "Parallel",
        "revisionHistoryLimit": 2,
        "updateStrategy": {"type": "RollingUpdate"},
        "selector": {"matchLabels": names::shard_selector(&name, shard)},
        "template": build::template(&pods_of(plan, shard))?,
    }))
}

fn pods_of(plan: Plan<'_>, shard: u32) -> Pods<'_> {
    let name = plan.server.name_any();
    // The pods of a shard prefer different nodes.
    let spread = json!([{
        "maxSkew": 1,
        "topologyKey": "kubernetes.io/hostname",
        "whenUnsatisfiable": "ScheduleAnyway",
        "labelSelector": {"matchLabels": names::shard_selector(&name, shard)},
    }]);
    let mut arguments = vec![
        "serving-ps".to_owned(),
        plan.target.location(),
        format!("--shard={shard}"),
        format!("{SHARDS}{}", plan.shards.count),
        format!("--listen=[::]:{ROWS_PORT}"),
        format!("--http=[::]:{REST_PORT}"),
        format!("--drain={DRAIN_SECONDS}s"),
    ];
    arguments.extend(build::arguments_of_path(plan.server, plan.target));
    Pods {
        server: plan.server,
        target: plan.target,
        config: plan.config,
        template: plan.shards.template.as_ref(),
        labels: names::shard_labels(&name, shard),
        ports: PORTS,
        arguments,
        // Only the servers of the model reach a shard. Look-ups have no TLS.
        tls: None,
        warm_up: None,
        fields: json!({"topologySpreadConstraints": spread}),
    }
}

/// The number of shards with a pod that answers. `None` if the manifest has no shards.
pub(super) fn number(facts: Facts<'_>, layout: Layout<'_>) -> Option<ShardCount> {
    let wanted = facts.server.spec.shards.as_ref()?;
    let silent = layout.shards.map_or(wanted.count as usize, |shards| silent(facts, shards).len());
    Some(ShardCount::new(wanted.count - u32::try_from(silent).unwrap_or(wanted.count), wanted.count))
}

/// The state of the shards. `None` if they are as they should be.
pub(super) fn finding(facts: Facts<'_>, layout: Layout<'_>, objects: &[Wanted]) -> Option<Finding> {
    if layout.has_others && facts.server.spec.shards.is_some() {
        let message = "shards with the rows of an earlier manifest end before the wanted ones start";
        return Some(Finding::new(ServerPhase::Progressing, "ShardsEnding", message));
    }
    let shards = layout.shards?;
    let silent = silent(facts, shards);
    if !silent.is_empty() && layout.is_read {
        let message = format!(
            "{} of {} shards have no pod that answers: {}. Requests for their rows get status 503: look at the logs and events of their pods",
            silent.len(),
            shards.count,
            silent.join(", ")
        );
        return Some(Finding::new(ServerPhase::Degraded, "ShardDown", message));
    }
    let (answering, wanted) = pods(facts, shards);
    let message = match silent.is_empty() {
        false => format!("the servers wait for shards without a pod that answers: {}", silent.join(", ")),
        true => format!("{answering} of {wanted} pods of the shards answer, or some are about to change"),
    };
    if silent.is_empty() && answering == wanted && (0..shards.count).all(|shard| is_rolled_out(facts, objects, shard)) {
        return None;
    }
    if is_overdue(facts) {
        let remedy = "look at the logs and events of the pods. A pod starts once its path has a publication";
        return Some(Finding::new(ServerPhase::Degraded, STUCK, format!("{message}: {remedy}")));
    }
    let reason = if silent.is_empty() { "ShardsRollingOut" } else { "ShardsStarting" };
    Some(Finding::new(ServerPhase::Progressing, reason, message))
}

/// The pods that answer, and the pods that should.
fn pods(facts: Facts<'_>, shards: &ShardsSpec) -> (u32, u32) {
    let answering = (0..shards.count).map(|shard| answering(facts, shard)).sum();
    (answering, shards.count * replicas(shards))
}

/// Whether all pods of a shard are as its StatefulSet, and this one is as it is wanted.
fn is_rolled_out(facts: Facts<'_>, objects: &[Wanted], shard: u32) -> bool {
    let name = names::of_shard(&facts.server.name_any(), shard);
    let wanted = objects.iter().find(|object| object.kind == Kind::StatefulSet && object.name == name);
    let Some((wanted, set)) = wanted.zip(set(facts, shard)) else { return false };
    let status = &set["status"];
    let is_applied = set["metadata"]["annotations"][APPLIED_ANNOTATION].as_str() == Some(wanted.hash());
    let is_seen = status["observedGeneration"].as_i64() >= set["metadata"]["generation"].as_i64();
    is_applied && is_seen && status["currentRevision"] == status["updateRevision"]
}

/// Whether shards have taken too long to start or to change.
fn is_overdue(facts: Facts<'_>) -> bool {
    let Some(before) = &facts.server.status else { return false };
    if before.observed_generation != facts.server.metadata.generation {
        return false;
    }
    let is_true = |kind: &str| before.conditions.iter().find(|known| known.type_ == kind && known.status == "True");
    let is_late =
        |since: Timestamp| facts.now.duration_since(since) >= SignedDuration::from_secs(i64::from(DEADLINE_SECONDS));
    is_true("Degraded").is_some_and(|known| known.reason == STUCK)
        || is_true("Progressing").is_some_and(|known| is_late(known.last_transition_time.0))
}

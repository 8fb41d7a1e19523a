//! The decision about a `RecModelServer`: from its manifest and the observed objects to the wanted
//! objects and the status. Pure.

use std::collections::BTreeMap;
use std::time::Duration;

use jiff::Timestamp;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use rectrain_crds::{RecModelServer, RecModelServerStatus, RecTrainingJob, ServerCount, ServerPhase, VersionStatus};
use serde_json::Value;

use super::build::{self, Plan};
use super::conditions::{Finding, conditions};
use super::model::{self, Choice, Missing, Target};
use super::observe::ServerPod;
use super::shards::{self, LOOK_AT_SHARDS, Layout};
use crate::config::OperatorConfig;
use crate::names::APPLIED_ANNOTATION;
use crate::objects::{Kind, Owned, Wanted};

/// Time between two looks at the job of a model.
const LOOK_AT_JOB: Duration = Duration::from_secs(15);
/// Time between two looks at servers that end, while shards may wait for that.
const LOOK_AT_ENDING: Duration = Duration::from_secs(5);
/// Longest time between two reconciles of an object that does not change.
const AT_LEAST: Duration = Duration::from_secs(600);
/// The most versions in a status.
const MOST_VERSIONS: usize = 16;

/// Why the API server refuses an object.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Obstacle {
    /// A word.
    pub reason: &'static str,
    /// A sentence with the remedy.
    pub message: String,
}

/// Everything that is known about a `RecModelServer`.
#[derive(Clone, Copy, Debug)]
pub struct Facts<'a> {
    /// The present, in whole seconds.
    pub now: Timestamp,
    /// The object.
    pub server: &'a RecModelServer,
    /// The job of its model, if the job exists.
    pub job: Option<&'a RecTrainingJob>,
    /// Its Deployment.
    pub deployment: Option<&'a Value>,
    /// The Deployment of its canary.
    pub canary: Option<&'a Value>,
    /// All of its objects.
    pub objects: &'a [Owned],
    /// Its pods.
    pub pods: &'a [ServerPod],
    /// The time by which all pods that end have ended. `None` if none ends.
    pub end_of_pods: Option<Timestamp>,
    /// The obstacle of the reconcile before.
    pub obstacle: Option<&'a Obstacle>,
    /// The installation.
    pub config: &'a OperatorConfig,
}

/// The decision.
#[derive(Clone, Debug)]
pub struct Decision {
    /// The new status.
    pub status: RecModelServerStatus,
    /// The wanted objects. `None` if there is no model: existing servers stay as they are.
    pub objects: Option<Vec<Wanted>>,
    /// Whether shards that are not wanted stay, because servers may read from them.
    pub keeps_shards: bool,
    /// The time until the next reconcile.
    pub look_again: Duration,
}

/// The servers and shards that should exist.
#[derive(Clone, Copy, Debug)]
struct Plans<'a> {
    servers: Plan<'a>,
    canary: Option<Plan<'a>>,
    layout: Layout<'a>,
}

/// Decides.
///
/// # Errors
/// If an object cannot be written as JSON.
pub fn decide(facts: Facts<'_>) -> Result<Decision, serde_json::Error> {
    let choice = model::choose(facts.server, facts.job, facts.now);
    let replicas = build::replicas(facts.server, deployed(facts.deployment));
    let plans = plans(facts, &choice, replicas);
    let objects = match plans {
        Some(plans) => Some(objects(facts, plans)?),
        None => None,
    };
    let wanted = objects.as_deref().unwrap_or_default();
    let finding = finding(facts, &choice, plans, wanted);
    let keeps_shards = plans.is_some_and(|plans| {
        // Without a Deployment no server reads from them.
        plans.layout.has_others && facts.deployment.is_some() && !is_settled(facts, plans.servers, wanted)
    });
    let number = plans.map_or(replicas, |of| of.servers.replicas + of.canary.map_or(0, |canary| canary.replicas));
    let mut status = status(facts, &choice, &finding, number);
    status.shards = plans.and_then(|plans| shards::number(facts, plans.layout));
    let has_shards = plans.is_some_and(|plans| plans.layout.shards.is_some() || plans.layout.has_others);
    let look_again = match has_shards && pods_end(facts) {
        true => LOOK_AT_ENDING,
        false => look_again(facts.server, &choice, &finding),
    };
    Ok(Decision { status, objects, keeps_shards, look_again })
}

/// The plans of the servers, the canary and the shards, if there is a model.
fn plans<'a>(facts: Facts<'a>, choice: &'a Choice, replicas: u32) -> Option<Plans<'a>> {
    let target = choice.target.as_ref().ok()?;
    let part = build::canary_servers(facts.server, replicas);
    let others = others(facts, replicas, part);
    let layout = Layout::new(facts, target);
    let (server, config) = (facts.server, facts.config);
    let servers = Plan { server, target, replicas: others, is_canary: false, rows: layout.read(), config };
    let canary = choice.canary.as_ref().map(|target| Plan { target, replicas: part, is_canary: true, ..servers });
    Some(Plans { servers, canary, layout })
}

/// All objects, in the order of their creation.
fn objects(facts: Facts<'_>, plans: Plans<'_>) -> Result<Vec<Wanted>, serde_json::Error> {
    let servers = plans.servers;
    let mut all = match plans.layout.has_servers {
        true => build::objects(servers, plans.canary)?,
        false => build::around_servers(servers),
    };
    if let Some(shards) = plans.layout.shards {
        let settled = is_settled(facts, servers, &all);
        let plan = shards::Plan { server: servers.server, target: servers.target, shards, config: servers.config };
        all.extend(shards::objects(plan, facts, settled)?);
        all.sort_by_key(|object| object.kind);
    }
    Ok(all)
}

/// Whether all servers have the wanted arguments, and no earlier server is left.
fn is_settled(facts: Facts<'_>, plan: Plan<'_>, objects: &[Wanted]) -> bool {
    !pods_end(facts) && of_deployment(plan, objects, facts.deployment).phase == ServerPhase::Ready
}

/// Whether a server ends, and still answers requests.
fn pods_end(facts: Facts<'_>) -> bool {
    facts.end_of_pods.is_some_and(|end| end > facts.now)
}

/// The number of the servers beside a canary of `part` servers. One of them ends for each server of
/// the canary that answers. So they all go on while the canary loads its model, and if it never
/// answers. A server of the canary that fails for a moment brings none of them back. After a change
/// of the manifest, only the servers of the canary that answer then replace others.
fn others(facts: Facts<'_>, replicas: u32, part: u32) -> u32 {
    let wanted = replicas - part.min(answering(facts.canary));
    let known = facts.server.status.as_ref().and_then(|status| status.observed_generation);
    let is_new_manifest = known != facts.server.metadata.generation;
    // With fewer servers than a full canary leaves, the manifest has gained some.
    let present = deployed(facts.deployment).filter(|present| !is_new_manifest && *present >= replicas - part);
    present.map_or(wanted, |present| wanted.min(present))
}

fn look_again(server: &RecModelServer, choice: &Choice, finding: &Finding) -> Duration {
    let for_job = match &server.spec {
        spec if spec.model.job.is_some() => LOOK_AT_JOB,
        // Nothing else happens when shards are overdue.
        spec if spec.shards.is_some() && finding.phase != ServerPhase::Ready => LOOK_AT_SHARDS,
        _ => AT_LEAST,
    };
    choice.wait.map_or(for_job, |wait| wait.min(for_job))
}

/// The number of pods in a Deployment's spec.
fn deployed(deployment: Option<&Value>) -> Option<u32> {
    deployment.and_then(|deployment| count(&deployment["spec"]["replicas"]))
}

/// The number of pods of a Deployment that answer requests.
fn answering(deployment: Option<&Value>) -> u32 {
    deployment.and_then(|deployment| count(&deployment["status"]["availableReplicas"])).unwrap_or(0)
}

/// A number of pods in an object.
pub(super) fn count(value: &Value) -> Option<u32> {
    u32::try_from(value.as_u64()?).ok()
}

/// The state of the servers and of their shards.
fn finding(facts: Facts<'_>, choice: &Choice, plans: Option<Plans<'_>>, objects: &[Wanted]) -> Finding {
    if let Some(obstacle) = facts.obstacle {
        return Finding::new(ServerPhase::Degraded, obstacle.reason, obstacle.message.clone());
    }
    if let Err(missing) = choice.target {
        return no_model(facts, missing);
    }
    let Some(plans) = plans else {
        return Finding::new(ServerPhase::Progressing, "Starting", "its servers are about to be created");
    };
    let servers = of_deployment(plans.servers, objects, facts.deployment);
    let servers = match plans.canary {
        // The first servers that are not ready have the word.
        Some(canary) if servers.phase == ServerPhase::Ready => of_deployment(canary, objects, facts.canary),
        _ => servers,
    };
    match shards::finding(facts, plans.layout, objects) {
        Some(shards) if has_the_word(&shards, &servers, plans.layout) => shards,
        _ => servers,
    }
}

/// Whether the state of the shards says more than the state of the servers.
fn has_the_word(shards: &Finding, servers: &Finding, layout: Layout<'_>) -> bool {
    shards.phase == ServerPhase::Degraded || servers.phase == ServerPhase::Ready || !layout.has_servers
}

/// The state of the servers of a plan.
fn of_deployment(plan: Plan<'_>, objects: &[Wanted], deployment: Option<&Value>) -> Finding {
    let name = build::deployment_name(plan);
    let wanted = objects.iter().find(|object| object.kind == Kind::Deployment && object.name == name);
    let Some((wanted, deployment)) = wanted.zip(deployment) else {
        return Finding::new(ServerPhase::Progressing, "Starting", "its servers are about to be created");
    };
    let applied = &deployment["metadata"]["annotations"][APPLIED_ANNOTATION];
    if applied.as_str() != Some(wanted.hash()) {
        return Finding::new(ServerPhase::Progressing, "RollingOut", "its servers are about to change");
    }
    rollout(deployment, plan)
}

/// The state of a Deployment that is as it should be.
fn rollout(deployment: &Value, plan: Plan<'_>) -> Finding {
    let replicas = plan.replicas;
    let (whose, remedy) = match plan.is_canary {
        true => (" of the canary", "remove spec.canary"),
        false => ("", "set spec.version to an earlier step"),
    };
    let status = &deployment["status"];
    let number = |field: &str| count(&status[field]).unwrap_or(0);
    let is_seen = status["observedGeneration"].as_i64() >= deployment["metadata"]["generation"].as_i64();
    let (updated, ready) = (number("updatedReplicas"), number("availableReplicas"));
    if is_seen && updated >= replicas && ready >= replicas && number("replicas") <= replicas {
        return Finding::new(ServerPhase::Ready, "Serving", "all servers answer with the wanted model");
    }
    let stuck = status["conditions"].as_array().into_iter().flatten();
    let mut stuck = stuck.filter(|condition| condition["reason"] == "ProgressDeadlineExceeded");
    if is_seen && stuck.next().is_some() {
        let has_gate = plan.server.spec.gate.is_some();
        let gate = if has_gate { " (spec.gate may refuse the model: the logs have its AUC)" } else { "" };
        let message = format!(
            "{updated} of {replicas} servers{whose} have the wanted model, and the others do not start: look at the logs and events of the pods{gate}, or {remedy}"
        );
        return Finding::new(ServerPhase::Degraded, "RolloutStuck", message);
    }
    let message = format!("{updated} of {replicas} servers{whose} have the wanted model, and {ready} servers answer");
    Finding::new(ServerPhase::Progressing, "RollingOut", message)
}

/// The state without a model.
fn no_model(facts: Facts<'_>, missing: Missing) -> Finding {
    let job = facts.server.spec.model.job.as_deref().unwrap_or_default();
    let (phase, reason, message) = match missing {
        Missing::Job => (
            ServerPhase::Degraded,
            "JobNotFound",
            format!("there is no RecTrainingJob `{job}` in this namespace: create it, or correct spec.model.job"),
        ),
        Missing::CheckpointPath => (
            ServerPhase::Degraded,
            "NoCheckpointPath",
            format!("the RecTrainingJob `{job}` writes no checkpoints: set its spec.checkpoint.path"),
        ),
        Missing::Checkpoint => (
            ServerPhase::Pending,
            "NoCheckpoint",
            format!("the RecTrainingJob `{job}` has no complete checkpoint yet: the servers start with its first"),
        ),
    };
    Finding::new(phase, reason, message)
}

fn status(facts: Facts<'_>, choice: &Choice, finding: &Finding, wanted: u32) -> RecModelServerStatus {
    let before = facts.server.status.clone().unwrap_or_default();
    let generation = facts.server.metadata.generation;
    let ready = facts.pods.iter().filter(|pod| pod.is_ready).count();
    let served = choice.target.as_ref().ok();
    let mut status = RecModelServerStatus {
        phase: Some(finding.phase),
        conditions: conditions(&before.conditions, finding, generation, facts.now),
        observed_generation: generation,
        versions: versions(facts.pods),
        replicas: Some(ServerCount::new(u32::try_from(ready).unwrap_or(u32::MAX), wanted)),
        ..before.clone()
    };
    // A model that is missing for a while is not forgotten.
    if choice.place.is_some() {
        status.model.clone_from(&choice.place);
        status.latest.clone_from(&choice.latest);
    }
    if let Some(target) = served {
        status.history = model::history(&before, target);
        status.since = Some(since(&before, target, facts.now));
        status.checkpoint.clone_from(&target.checkpoint);
        status.canary = choice.canary.as_ref().and_then(|canary| canary.checkpoint.clone());
    }
    status
}

/// When the servers were given this model.
fn since(before: &RecModelServerStatus, target: &Target, now: Timestamp) -> Time {
    let is_same = before.checkpoint == target.checkpoint
        && before.model.as_ref().is_some_and(|known| known.path == target.place.path);
    before.since.clone().filter(|_| is_same).unwrap_or(Time(now))
}

/// The servers by step, the newest first.
fn versions(pods: &[ServerPod]) -> Vec<VersionStatus> {
    let mut by_step: BTreeMap<Option<u64>, VersionStatus> = BTreeMap::new();
    for pod in pods {
        let version =
            by_step.entry(pod.step).or_insert_with(|| VersionStatus { step: pod.step, ..VersionStatus::default() });
        version.replicas += 1;
        version.ready += u32::from(pod.is_ready);
    }
    by_step.into_values().rev().take(MOST_VERSIONS).collect()
}

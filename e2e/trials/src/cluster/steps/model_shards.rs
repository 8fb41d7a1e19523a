//! Shards of a model that is published while it trains. Pods of the shards and of the servers are
//! killed, and a client's requests do not fail meanwhile.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use rectrain_harness::events::{missing, parse};
use rectrain_harness::files::write;
use rectrain_harness::jobs::{Jobs, NAMESPACE};
use rectrain_harness::manifests::{endless, merged, with_checkpoints};
use rectrain_harness::waiting::eventually;
use rectrain_harness::{HarnessError, not_yet};
use serde_json::{Value, json};

use super::serving::{ROLLOUT, predicts, row, server};
use crate::TrialError;
use crate::cluster::support::{TestCluster, object_store};
use crate::error::unmet;

/// The job, and its servers.
const NAME: &str = "in-shards";
/// The key of the published models in the bucket `data`.
const PUBLISHED: &str = "published/in-shards";
/// Global steps between two checkpoints, beside the ones that are published.
const EVERY: u64 = 2_000;
/// Shards, pods of each, and servers.
const SHARDS: u32 = 2;
const REPLICAS: u32 = 2;
const SERVERS: u32 = 2;
/// Rows in a server's cache. They are few, so that most requests ask the shards.
const CACHED: u32 = 100;
/// How long pods are killed, and the time between two kills of a pod of each role.
const KILLING: Duration = Duration::from_secs(120);
const BETWEEN_KILLS: Duration = Duration::from_secs(20);
/// The time within which a client repeats a request. A request that has no answer then has failed.
/// A server that is killed takes its connections with it, and is in the Service until the cluster
/// notices.
const PATIENCE: Duration = Duration::from_secs(10);
/// How long a killed pod may take until another one answers.
const RECOVERS: Duration = Duration::from_secs(120);
/// Requests that must all have the newest model at the end.
const LAST_REQUESTS: usize = 20;

/// The answers of a client, and its tries without one.
#[derive(Debug, Default)]
struct Client {
    /// Answers by the step of their model.
    answers: BTreeMap<u64, u64>,
    /// Tries that were repeated.
    repeated: u64,
    /// The longest time from a request to its answer.
    longest: Duration,
}

/// A pod of each role is killed every 20 s, and each request is answered. At the end the servers
/// have the newest model.
pub(in crate::cluster) fn shards(cluster: &TestCluster) -> Result<(), TrialError> {
    let jobs = &cluster.jobs;
    object_store::start(&cluster.paths, NAMESPACE)?;
    object_store::make_bucket(cluster.kubectl(), NAMESPACE)?;
    let path = format!("s3://data/{PUBLISHED}");
    let publish = json!({"serving": {"publish": {"path": path, "everySeconds": 2}}});
    jobs.submit(NAME, &merged(with_checkpoints(&endless(), NAME, EVERY), publish))?;
    // Pods without a publication restart, later each time.
    eventually(ROLLOUT, "a publication", || latest(cluster))?;
    let shards = json!({"count": SHARDS, "replicas": REPLICAS, "cacheRows": CACHED});
    let spec = json!({
        "model": {"path": path}, "storage": {"secretName": "object-store"}, "replicas": SERVERS, "pollSeconds": 0.2,
        "shards": shards,
    });
    jobs.apply(&server(NAME, &spec))?;
    until_ready(jobs)?;
    let request = cluster.paths.run().join("shards-request.json");
    write(&request, row().to_string())?;
    let client = while_asked(jobs, &request, || kill_by_turns(jobs))?;
    let requests: u64 = client.answers.values().sum();
    println!(
        "{requests} requests answered by {} models, {} tries repeated, the longest after {:.1} s",
        client.answers.len(),
        client.repeated,
        client.longest.as_secs_f64()
    );
    if client.answers.len() < 10 {
        return Err(unmet("answers of ten models at least", format!("{:?}", client.answers)));
    }
    until_ready(jobs)?;
    // Nothing is published any more.
    jobs.delete(NAME)?;
    newest_is_served(cluster, &request)?;
    Ok(jobs.within(&["delete", "recmodelserver", NAME, "--timeout=120s"]).map(drop)?)
}

/// Waits until all servers and all shards answer.
fn until_ready(jobs: &Jobs) -> Result<(), HarnessError> {
    eventually(ROLLOUT, "servers whose shards answer", || {
        let server = jobs.get(&format!("recmodelserver/{NAME}"))?;
        let status = &server["status"];
        let shards = format!("{SHARDS}/{SHARDS}");
        let is_ready = status["phase"] == "Ready" && status["shards"]["display"] == *shards;
        if is_ready { Ok(()) } else { Err(not_yet(status)) }
    })
}

/// Asks for predictions until `work` is done.
fn while_asked(
    jobs: &Jobs,
    request: &Path,
    work: impl FnOnce() -> Result<(), TrialError>,
) -> Result<Client, TrialError> {
    let is_done = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let load = scope.spawn(|| {
            let mut client = Client::default();
            while !is_done.load(Ordering::Relaxed) {
                client.ask(jobs, request)?;
            }
            Ok::<Client, TrialError>(client)
        });
        let worked = work();
        is_done.store(true, Ordering::Relaxed);
        let client = load.join().map_err(|_| HarnessError::Panicked)?;
        worked?;
        client
    })
}

impl Client {
    /// One request, which is repeated for a while.
    fn ask(&mut self, jobs: &Jobs, request: &Path) -> Result<(), TrialError> {
        let asked = Instant::now();
        let mut tries = 0;
        let step = eventually(PATIENCE, "an answer", || {
            tries += 1;
            predicts(jobs, NAME, request)
        })?;
        *self.answers.entry(step).or_default() += 1;
        self.repeated += tries - 1;
        self.longest = self.longest.max(asked.elapsed());
        Ok(())
    }
}

/// Kills a pod of a shard and a server, again and again. The shards take turns, and then their
/// pods. Before each kill all pods answer, so that a kill leaves one of each shard and one server.
fn kill_by_turns(jobs: &Jobs) -> Result<(), TrialError> {
    let started = Instant::now();
    for turn in 0.. {
        let due = BETWEEN_KILLS * turn;
        if due >= KILLING {
            return Ok(());
        }
        std::thread::sleep(due.saturating_sub(started.elapsed()));
        let waited = Instant::now();
        eventually(RECOVERS, "all pods before the next kill", || all_answer(jobs))?;
        let (shard, server) = (shard_of_turn(turn), first_server(jobs)?);
        println!("killing {shard} and {server}, {:.0} s late", waited.elapsed().as_secs_f64());
        jobs.kill_pod(&shard)?;
        jobs.kill_pod(&server)?;
    }
    Ok(())
}

/// The pod of a shard that a turn kills.
fn shard_of_turn(turn: u32) -> String {
    let (shard, pod) = (turn % SHARDS, turn / SHARDS % REPLICAS);
    format!("{NAME}-rows-{shard}-{pod}")
}

fn first_server(jobs: &Jobs) -> Result<String, HarnessError> {
    let selector = format!("rectrain.dev/model-server={NAME}");
    let pods = jobs.kubectl().json(NAMESPACE, &["get", "pods", "--selector", &selector])?;
    let name = pods["items"][0]["metadata"]["name"].as_str().map(str::to_owned);
    name.ok_or_else(|| missing("the servers' pods", &pods, "items"))
}

/// Checks that the StatefulSets and the Deployment have all of their pods.
fn all_answer(jobs: &Jobs) -> Result<(), HarnessError> {
    let sets = (0..SHARDS).map(|shard| (format!("statefulset/{NAME}-rows-{shard}"), "readyReplicas", REPLICAS));
    let servers = [(format!("deployment/{NAME}-server"), "availableReplicas", SERVERS)];
    for (resource, field, wanted) in sets.chain(servers) {
        let status = jobs.get(&resource)?["status"].take();
        if status[field] != wanted {
            return Err(not_yet(format!("{resource}: {status}")));
        }
    }
    Ok(())
}

/// The step of the newest model that was published.
fn latest(cluster: &TestCluster) -> Result<u64, TrialError> {
    let text = object_store::download(cluster.kubectl(), NAMESPACE, &format!("{PUBLISHED}/latest.json"))?;
    let latest: Value = parse("latest.json", &text)?;
    Ok(latest["step"].as_u64().ok_or_else(|| missing("latest.json", &latest, "step"))?)
}

/// Waits until the servers answer with the newest model that was published. The coordinator of a
/// deleted job may publish once more before it ends.
fn newest_is_served(cluster: &TestCluster, request: &Path) -> Result<(), TrialError> {
    let served = eventually(RECOVERS, "answers of the newest model", || {
        let newest = latest(cluster)?;
        for _ in 0..LAST_REQUESTS {
            match predicts(&cluster.jobs, NAME, request)? {
                step if step == newest => {}
                step => return Err(unmet(format!("an answer of step {newest}"), format!("one of step {step}"))),
            }
        }
        Ok(newest)
    })?;
    println!("all servers answer with the newest model, of step {served}");
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_pod_of_each_shard_is_killed_and_no_shard_twice_in_turn() {
        let turns: Vec<String> = (0..4).map(shard_of_turn).collect();
        assert_eq!(turns, ["in-shards-rows-0-0", "in-shards-rows-1-0", "in-shards-rows-0-1", "in-shards-rows-1-1"]);
        assert_eq!(shard_of_turn(4), turns[0]);
    }
}

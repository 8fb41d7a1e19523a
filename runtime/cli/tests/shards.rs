//! Inference servers whose rows are on prediction parameter servers answer as one that holds
//! everything: for any number of shards, while newer models are published, and while replicas end.

#![allow(clippy::unwrap_used, reason = "an unwrap in a test is an assertion")]

#[allow(dead_code, reason = "a part of it is for other tests")]
mod binary;
mod common;
mod server;
#[allow(dead_code, reason = "a part of it is for other tests")]
mod trained;

use std::collections::HashMap;
use std::io::{BufRead, BufReader};
use std::net::TcpListener;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use binary::{JOB, folder_with, training};
use common::rectrain;
use server::{FEATURES, Server, cells, infer_all, texts};
use trained::{largest_difference, train};

const PUBLISH: &str = "spec.serving.publish.path=published";
/// The time limit for a state, and the time between two looks.
const PATIENCE: Duration = Duration::from_secs(60);
const EVERY: Duration = Duration::from_millis(20);

fn until(state: &str, condition: impl Fn() -> bool) {
    let started = Instant::now();
    while !condition() {
        assert!(started.elapsed() < PATIENCE, "never: {state}");
        std::thread::sleep(EVERY);
    }
}

/// A replica of a shard at a fixed address, which is killed at the end of its test.
struct Replica {
    process: Child,
    folder: std::path::PathBuf,
    shard: usize,
    shards: usize,
    rows: String,
    http: String,
}

impl Replica {
    fn start(folder: &Path, shard: usize, shards: usize) -> Self {
        // Both ports stay free for a replacement.
        let free = || TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().to_string();
        let (rows, http) = (free(), free());
        Self {
            process: spawn(folder, shard, shards, &rows, &http),
            folder: folder.to_owned(),
            shard,
            shards,
            rows,
            http,
        }
    }

    fn kill(&mut self) {
        self.process.kill().unwrap();
        self.process.wait().unwrap();
    }

    fn start_again(&mut self) {
        self.process = spawn(&self.folder, self.shard, self.shards, &self.rows, &self.http);
    }

    fn signal(&self, signal: &str) {
        let sent = Command::new("kill").args([&format!("-{signal}"), &self.process.id().to_string()]).status();
        assert!(sent.unwrap().success());
    }

    fn get(&self, path: &str) -> (u16, String) {
        server::exchange_at(&self.http, &format!("GET {path}"), "")
    }

    fn metric(&self, name: &str) -> f64 {
        let (_, text) = self.get("/metrics");
        text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' ')?.parse().ok()).unwrap_or(0.0)
    }

    fn until_ready(&self) {
        until("a replica is ready", || self.get("/v2/health/ready").0 == 200);
    }
}

impl Drop for Replica {
    fn drop(&mut self) {
        // It may have been killed before.
        let _ended = self.process.kill();
        let _waited = self.process.wait();
    }
}

fn spawn(folder: &Path, shard: usize, shards: usize, rows: &str, http: &str) -> Child {
    let (shard, shards) = (shard.to_string(), shards.to_string());
    let arguments =
        ["serving-ps", "published", "--shard", &shard, "--shards", &shards, "--listen", rows, "--http", http];
    let mut process = Command::new(env!("CARGO_BIN_EXE_rectrain"))
        .args(arguments)
        .current_dir(folder)
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut line = String::new();
    BufReader::new(process.stdout.take().unwrap()).read_line(&mut line).unwrap();
    assert!(line.contains(&format!("shard {shard} of {shards}: look-ups at {rows}")), "{line:?}");
    process
}

/// The replicas of each shard.
fn replicas(folder: &Path, shards: usize, replicas: usize) -> Vec<Vec<Replica>> {
    (0..shards).map(|shard| (0..replicas).map(|_| Replica::start(folder, shard, shards)).collect()).collect()
}

/// A server whose rows are on these replicas.
fn sharded(folder: &Path, replicas: &[Vec<Replica>], arguments: &[&str]) -> Server {
    let addresses: Vec<String> = replicas
        .iter()
        .map(|shard| shard.iter().map(|replica| replica.rows.clone()).collect::<Vec<_>>().join(","))
        .collect();
    let rows_from = addresses.iter().flat_map(|addresses| ["--rows-from", addresses]);
    Server::start(folder, "published", &rows_from.chain(arguments.iter().copied()).collect::<Vec<_>>())
}

fn metadata(server: &Server) -> Value {
    serde_json::from_str(&server.get(&server.path)).unwrap()
}

#[test]
fn answers_are_those_of_a_server_that_holds_everything() {
    for model in ["dlrm", "wideDeep"] {
        let place = tempfile::tempdir().unwrap();
        let folder = place.path();
        train(folder, model, &[PUBLISH]);
        let columns = FEATURES.map(|name| cells(folder, name));
        let full = Server::start(folder, "published", &[]);
        // Unseen ids, lists and missing cells are in the rows.
        let expected = infer_all(&full, &columns, texts);
        let unseen = |server: &Server, feature: &str| {
            ["ids", "unseen_ids"]
                .map(|count| server.metric(&format!("rectrain_inference_{count}_total{{feature=\"{feature}\"}}")))
        };
        for shards in 1..=3 {
            let replicas = replicas(folder, shards, 1);
            // A cache of all keys, of a few, and of none.
            for cache_rows in ["100000", "9", "0"] {
                let server = sharded(folder, &replicas, &["--cache-rows", cache_rows]);
                let context = format!("{model}, {shards} shards, {cache_rows} rows in the cache");
                for _ in 0..2 {
                    let found = infer_all(&server, &columns, texts);
                    assert!(largest_difference(&expected, &found) == 0.0, "{context}");
                }
                for feature in ["user", "city", "tags"] {
                    assert_eq!(unseen(&server, feature), unseen(&full, feature).map(|count| 2.0 * count), "{context}");
                }
                assert!(unseen(&server, "user")[1] > 0.0);
                assert_eq!(metadata(&server)["properties"], metadata(&full)["properties"], "{context}");
                assert_eq!(
                    server.metric("rectrain_inference_model_rows"),
                    full.metric("rectrain_inference_model_rows")
                );
                let cached = server.metric("rectrain_inference_row_cache_rows");
                assert!(cached <= cache_rows.parse().unwrap(), "{context}: {cached}");
                let hits = server.metric("rectrain_inference_row_cache_hits_total");
                assert_eq!(hits > 0.0, cache_rows != "0", "{context}: {hits} hits");
                assert_eq!(server.terminate().code(), Some(0), "{context}");
            }
            let rows: f64 = replicas.iter().map(|shard| shard[0].metric("rectrain_serving_ps_rows")).sum();
            assert_eq!(rows, full.metric("rectrain_inference_model_rows"), "{model}, {shards} shards");
        }
    }
}

/// A job that publishes until it is dropped.
struct Training(Child);

impl Drop for Training {
    fn drop(&mut self) {
        // It may have ended before.
        let _ended = self.0.kill();
        let _waited = self.0.wait();
    }
}

impl Training {
    fn start(folder: &Path, every: &str) -> Self {
        let sets = format!(
            "spec.data.synthetic.rows=100000000,spec.checkpoint.path=checkpoints,spec.checkpoint.fullEvery=20,\
             spec.serving.publish.path=published,spec.serving.publish.everySeconds={every}"
        );
        let (job, mut lines) = training(folder, &["run", "job.yaml", "--json", "--set", &sets]);
        // A full pipe would hold the job up.
        std::thread::spawn(move || while lines.next().is_some() {});
        let job = Self(job);
        until("a delta is published", || sequence(folder) > 1);
        job
    }
}

/// The sequence number of the newest published model; 0 before the first.
fn sequence(folder: &Path) -> u64 {
    let bytes = std::fs::read(folder.join("published/latest.json")).unwrap_or_default();
    let latest: Value = serde_json::from_slice(&bytes).unwrap_or_default();
    latest["model"]["sequence"].as_u64().unwrap_or(0)
}

/// Requests for rows of [`JOB`], with ids that have rows and some that have none.
fn requests(server: &Server) -> Vec<String> {
    let metadata = metadata(server);
    let inputs = metadata["inputs"].as_array().unwrap();
    let request = |salt: u64| {
        let tensor = |input: &Value| {
            let (datatype, count) = if input["datatype"] == "BYTES" { ("INT64", 1100) } else { ("FP32", 10) };
            let data: Vec<u64> = (0..40).map(|row| (37 * row + 211 * salt) % count).collect();
            json!({ "name": input["name"], "shape": [40], "datatype": datatype, "data": data })
        };
        json!({ "inputs": inputs.iter().map(tensor).collect::<Vec<_>>() }).to_string()
    };
    (0..5).map(request).collect()
}

/// The version and the probabilities of an answer, or its status and its body.
fn infer(server: &Server, request: &str) -> Result<(String, Vec<f64>), (u16, String)> {
    let (status, body) = server.exchange(&format!("POST {}/infer", server.path), request);
    if status != 200 {
        return Err((status, body));
    }
    let answer: Value = serde_json::from_str(&body).unwrap();
    let version = answer["model_version"].as_str().unwrap().to_owned();
    Ok((version, serde_json::from_value(answer["outputs"][0]["data"].clone()).unwrap()))
}

#[test]
fn each_answer_is_the_full_servers_answer_of_the_version_it_names() {
    let place = folder_with(JOB);
    let folder = place.path();
    let job = Training::start(folder, "0.3");
    let replicas = replicas(folder, 2, 2);
    let full = Server::start(folder, "published", &[]);
    let servers =
        [sharded(folder, &replicas, &["--cache-rows", "2000"]), sharded(folder, &replicas, &["--cache-rows", "0"])];
    let requests = requests(&full);
    // The first replica of shard 0 is cut off for a time, and comes back.
    let (mut expected, mut found) = (HashMap::new(), Vec::new());
    let started = Instant::now();
    let mut stopped = None;
    while started.elapsed() < Duration::from_secs(14) {
        for (place, request) in requests.iter().enumerate() {
            let (version, answer) = infer(&full, request).unwrap();
            expected.insert((version, place), answer);
            for server in &servers {
                found.push((place, infer(server, request).unwrap()));
            }
        }
        let elapsed = started.elapsed().as_secs();
        if elapsed >= 3 && stopped.is_none() {
            stopped = Some(sequence(folder));
            replicas[0][0].signal("STOP");
        } else if elapsed >= 10 && stopped != Some(0) {
            assert!(sequence(folder) > stopped.unwrap(), "nothing was published meanwhile");
            stopped = Some(0);
            replicas[0][0].signal("CONT");
        }
    }
    let mut versions: Vec<&String> = Vec::new();
    for (place, (version, answer)) in &found {
        if let Some(expected) = expected.get(&(version.clone(), *place)) {
            assert!(largest_difference(expected, answer) < 1e-6, "request {place} of version {version}");
            versions.push(version);
        }
    }
    let compared = versions.len();
    versions.sort();
    versions.dedup();
    assert!(versions.len() >= 5 && compared > 30, "{compared} answers of {} versions", versions.len());
    let updated = servers[0].metric("rectrain_inference_row_cache_updates_total");
    assert!(updated > 0.0, "no row of the cache has changed");
    drop(job);
    let newest = sequence(folder) as f64;
    until("the replica that was stopped has the newest model", || {
        replicas[0][0].metric("rectrain_serving_ps_model_sequence") == newest
    });
    for server in &servers {
        until("a server has the newest model", || server.metric("rectrain_inference_model_sequence") == newest);
        assert_eq!(metadata(server)["properties"], metadata(&full)["properties"]);
        assert_eq!(server.metric("rectrain_inference_model_update_failures_total"), 0.0);
        for request in &requests {
            let (expected, found) = (infer(&full, request).unwrap(), infer(server, request).unwrap());
            assert_eq!(expected.0, found.0);
            assert!(largest_difference(&expected.1, &found.1) < 1e-6);
        }
    }
}

/// Ends clients, also if the test fails.
struct End<'a>(&'a AtomicBool);

impl Drop for End<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

#[test]
fn a_replica_that_is_killed_costs_no_request_and_a_lost_shard_a_503() {
    let place = folder_with(JOB);
    let folder = place.path();
    let job = Training::start(folder, "0.5");
    let mut replicas = replicas(folder, 2, 2);
    // Each request needs both shards.
    let server = sharded(folder, &replicas, &["--cache-rows", "0"]);
    let requests = requests(&server);
    let has_ended = AtomicBool::new(false);
    let answers = std::thread::scope(|scope| {
        let clients: Vec<_> = (0..3)
            .map(|_| {
                scope.spawn(|| {
                    let mut answers = 0_u64;
                    while !has_ended.load(Ordering::Relaxed) {
                        for request in &requests {
                            infer(&server, request).unwrap_or_else(|(status, body)| panic!("{status}: {body}"));
                            answers += 1;
                        }
                    }
                    answers
                })
            })
            .collect();
        let end = End(&has_ended);
        for (shard, replica) in [(0, 0), (1, 1), (0, 1), (1, 0)] {
            std::thread::sleep(Duration::from_millis(700));
            let killed = &mut replicas[shard][replica];
            killed.kill();
            std::thread::sleep(Duration::from_millis(700));
            killed.start_again();
            killed.until_ready();
            let metric = format!("rectrain_inference_shard_replicas{{shard=\"{shard}\"}}");
            until("the server sees both replicas", || server.metric(&metric) == 2.0);
        }
        drop(end);
        clients.into_iter().map(|client| client.join().unwrap()).sum::<u64>()
    });
    assert!(answers > 20, "{answers} answers");
    assert_eq!(server.metric("rectrain_inference_requests_total{code=\"200\"}"), answers as f64);

    replicas[1].iter_mut().for_each(Replica::kill);
    until("a request is refused", || infer(&server, &requests[0]).is_err());
    let started = Instant::now();
    let (status, head, body) = server.exchange_whole(&format!("POST {}/infer", server.path), &requests[0]);
    assert_eq!(status, 503, "{body}");
    assert!(head.to_lowercase().contains("retry-after: 1"), "{head}");
    assert!(body.contains("shard 1 cannot be read at present: no replica of it is ready"), "{body}");
    assert!(started.elapsed() < Duration::from_secs(1), "{:?}", started.elapsed());
    assert!(server.metric("rectrain_inference_failed_look_ups_total{shard=\"1\"}") >= 1.0);
    // The server itself stays ready.
    server.get("/v2/health/ready");
    replicas[1].iter_mut().for_each(Replica::start_again);
    until("the shard answers again", || infer(&server, &requests[0]).is_ok());
    drop(job);
    let newest = sequence(folder) as f64;
    until("the newest model", || server.metric("rectrain_inference_model_sequence") == newest);
    assert_eq!(server.terminate().code(), Some(0));
}

#[test]
fn a_wrong_division_is_refused_with_a_sentence() {
    let place = tempfile::tempdir().unwrap();
    let folder = place.path();
    train(folder, "lr", &[PUBLISH]);
    let refusal = |arguments: &[&str], code: i32| {
        let output = rectrain(folder, arguments);
        let message = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(code), "{message}");
        message
    };
    let message = refusal(&["serving-ps", "published", "--shard", "2", "--shards", "2"], 2);
    assert!(message.contains("--shard is 2, and --shards 2 has the shards 0 to 1"), "{message}");
    let message = refusal(&["serve", "checkpoints", "--rows-from", "127.0.0.1:1"], 2);
    assert!(message.contains("no models are published in checkpoints"), "{message}");
    let message = refusal(&["serve", "published", "--rows-from", "127.0.0.1"], 2);
    assert!(message.contains("expected addresses such as HOST:8090"), "{message}");
    // A replica of another division tells nothing, so the server waits and says why.
    let other = Replica::start(folder, 0, 2);
    other.until_ready();
    let mut waiting = Command::new(env!("CARGO_BIN_EXE_rectrain"))
        .args(["serve", "published", "--listen", "127.0.0.1:0", "--rows-from", &other.rows])
        .current_dir(folder)
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let log = BufReader::new(waiting.stderr.take().unwrap());
    let line = log.lines().map(|line| line.unwrap()).find(|line| line.contains("does not tell its versions")).unwrap();
    assert!(line.contains("this server holds shard 0 of 2, and the caller means shard 0 of 1"), "{line}");
    waiting.kill().unwrap();
    waiting.wait().unwrap();
}

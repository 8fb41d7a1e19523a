//! A job publishes its model, and a server that runs takes each publication. Its answers, and the
//! digest that it states, are the ones of a full export of the same checkpoint.

#![allow(clippy::unwrap_used, reason = "an unwrap in a test is an assertion")]

#[allow(dead_code, reason = "a part of it is for other tests")]
mod binary;
mod common;
mod server;
mod trained;

use std::path::Path;
use std::process::Child;
use std::time::Duration;

use serde_json::Value;

use binary::{JOB, folder_with, training};
use common::rectrain;
use server::{FEATURES, Server, cells, infer_all, texts};
use trained::{export, largest_difference, probabilities, report, train};

const PUBLISH: &str = "spec.serving.publish.path=published";
const RESUME: &str = "spec.checkpoint.resume=latest";

/// The looks at a server before a test gives up, and the time between two of them.
const LOOKS: u32 = 1200;
const EVERY: Duration = Duration::from_millis(50);

fn start(folder: &Path) -> Server {
    Server::start(folder, "published", &["--poll", "50ms"])
}

fn metadata(server: &Server) -> Value {
    serde_json::from_str(&server.get(&server.path)).unwrap()
}

/// Waits until the server has the model with this sequence number.
fn until_sequence(server: &Server, sequence: &str) {
    until(&format!("model {sequence}"), || metadata(server)["properties"]["sequence"] == sequence);
}

fn until(state: &str, condition: impl Fn() -> bool) {
    for _ in 0..LOOKS {
        if condition() {
            return;
        }
        std::thread::sleep(EVERY);
    }
    panic!("never: {state}");
}

/// The server answers as a full export of the newest checkpoint, and states its digest and step.
fn assert_serves_newest(folder: &Path, server: &Server, name: &str) {
    assert!(export(folder, name, "f32").status.success(), "{name}");
    let model: Value = serde_json::from_slice(&std::fs::read(folder.join(name).join("model.json")).unwrap()).unwrap();
    let served = metadata(server);
    assert_eq!(served["properties"]["contentDigest"], model["contentDigest"], "{name}");
    assert_eq!(served["versions"][0], model["step"].to_string(), "{name}");
    let output = format!("{name}.csv");
    report(folder, &[name, "--input", "test.csv", "--output", &output]);
    let columns = FEATURES.map(|name| cells(folder, name));
    let found = infer_all(server, &columns, texts);
    assert!(largest_difference(&probabilities(folder, &output), &found) < 1e-6, "{name}");
}

fn updates(server: &Server, kind: &str) -> f64 {
    server.metric(&format!("rectrain_inference_model_updates_total{{kind=\"{kind}\"}}"))
}

#[test]
fn a_server_takes_the_models_that_a_job_publishes() {
    let place = tempfile::tempdir().unwrap();
    let folder = place.path();
    train(folder, "dlrm", &[PUBLISH]);
    let server = start(folder);
    until_sequence(&server, "1");
    assert_serves_newest(folder, &server, "first");

    train(folder, "dlrm", &[PUBLISH, RESUME, "spec.training.epochs=8"]);
    assert!(folder.join("published/delta-000000000002.bin").is_file(), "the changes are no delta");
    until_sequence(&server, "2");
    assert_serves_newest(folder, &server, "second");
    assert_eq!((updates(&server, "delta"), updates(&server, "full")), (1.0, 0.0));

    train(folder, "dlrm", &[PUBLISH, RESUME, "spec.training.epochs=12", "spec.checkpoint.fullEvery=1"]);
    until_sequence(&server, "3");
    assert_serves_newest(folder, &server, "third");
    assert_eq!((updates(&server, "delta"), updates(&server, "full")), (1.0, 1.0));
    assert_eq!(server.metric("rectrain_inference_model_sequence"), 3.0);
    assert_eq!(server.metric("rectrain_inference_model_update_failures_total"), 0.0);
    assert_eq!(server.metric("rectrain_inference_model_freshness_seconds_count"), 2.0);
    assert!(server.metric("rectrain_inference_model_published_at") > 1.7e9);
    assert_eq!(server.terminate().code(), Some(0));
}

/// The digest of an export of the newest checkpoint.
fn exported_digest(folder: &Path, name: &str, arguments: &[&str]) -> Value {
    let export = ["checkpoint", "export", "checkpoints", "--for", "serving", "--output", name];
    let output = rectrain(folder, &[&export, arguments].concat());
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let model: Value = serde_json::from_slice(&std::fs::read(folder.join(name).join("model.json")).unwrap()).unwrap();
    model["contentDigest"].clone()
}

#[test]
fn ids_are_published_once_they_have_enough_examples() {
    let place = tempfile::tempdir().unwrap();
    let folder = place.path();
    // Each user has some 124 examples in 4 epochs. Cities have more.
    let (count, thin) = ("spec.serving.publish.minCount=200", ["--min-count", "200"]);
    let counted = [PUBLISH, count, "spec.features.memory.maxRows=100000", "spec.features.eviction.policy=lfu"];
    train(folder, "dlrm", &counted);
    let server = start(folder);
    until_sequence(&server, "1");
    let rows = server.metric("rectrain_inference_model_rows");
    let digest = || metadata(&server)["properties"]["contentDigest"].clone();
    assert!(rows > 0.0);
    assert_eq!(digest(), exported_digest(folder, "thin", &thin));
    assert_ne!(digest(), exported_digest(folder, "full", &[]));

    train(folder, "dlrm", &[&counted[..], &[RESUME, "spec.training.epochs=8"]].concat());
    until_sequence(&server, "2");
    assert_eq!(updates(&server, "delta"), 1.0);
    assert_eq!(digest(), exported_digest(folder, "later", &thin));
    // The 60 users are in it now.
    assert!(server.metric("rectrain_inference_model_rows") >= rows + 60.0);
}

#[test]
fn a_least_count_of_rows_that_count_nothing_is_refused() {
    let place = tempfile::tempdir().unwrap();
    let folder = place.path();
    train(folder, "lr", &[]);
    let arguments = ["checkpoint", "export", "checkpoints", "--for", "serving", "--output", "a", "--min-count", "2"];
    let refused = rectrain(folder, &arguments);
    let message = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert!(refused.status.code() == Some(2) && message.contains("do not count examples"), "{message}");
}

#[test]
fn a_torn_delta_leaves_the_model_until_the_next_full_one() {
    let place = tempfile::tempdir().unwrap();
    let folder = place.path();
    train(folder, "lr", &[PUBLISH]);
    assert!(export(folder, "first", "f32").status.success());
    train(folder, "lr", &[PUBLISH, RESUME, "spec.training.epochs=8"]);
    let delta = folder.join("published/delta-000000000002.bin");
    let bytes = std::fs::read(&delta).unwrap();
    std::fs::write(&delta, &bytes[..bytes.len() / 2]).unwrap();
    let server = start(folder);
    until("a failure is counted", || server.metric("rectrain_inference_model_update_failures_total") > 0.0);
    let first: Value = serde_json::from_slice(&std::fs::read(folder.join("first/model.json")).unwrap()).unwrap();
    let served = metadata(&server);
    assert_eq!(served["properties"]["sequence"], "1");
    assert_eq!(served["properties"]["contentDigest"], first["contentDigest"]);
    train(folder, "lr", &[PUBLISH, RESUME, "spec.training.epochs=12", "spec.checkpoint.fullEvery=1"]);
    until_sequence(&server, "3");
    assert_serves_newest(folder, &server, "third");
}

/// A job, which is killed at the end of its test.
struct Training(Child);

impl Drop for Training {
    fn drop(&mut self) {
        // It may have been killed before.
        let _ended = self.0.kill();
        let _waited = self.0.wait();
    }
}

/// The newest published model; null before the first.
fn latest(folder: &Path) -> Value {
    let bytes = std::fs::read(folder.join("published/latest.json")).unwrap_or_default();
    serde_json::from_slice(&bytes).unwrap_or_default()
}

fn served_sequence(server: &Server) -> u64 {
    metadata(server)["properties"]["sequence"].as_str().unwrap().parse().unwrap()
}

#[test]
fn models_are_published_and_served_while_the_job_trains() {
    let place = folder_with(JOB);
    let folder = place.path();
    let sets = "spec.data.synthetic.rows=100000000,spec.checkpoint.path=checkpoints,spec.checkpoint.fullEvery=1000,\
                spec.serving.publish.path=published,spec.serving.publish.everySeconds=1";
    let (job, _lines) = training(folder, &["run", "job.yaml", "--json", "--set", sets]);
    let mut job = Training(job);
    until("a delta is published", || latest(folder)["model"]["sequence"].as_u64() > Some(1));
    let server = start(folder);
    let first = served_sequence(&server);
    until("a newer model answers", || served_sequence(&server) > first);
    assert!(job.0.try_wait().unwrap().is_none(), "the job has ended");
    drop(job);
    let last = latest(folder);
    until_sequence(&server, &last["model"]["sequence"].to_string());
    let checkpoint = format!("checkpoints/{}", last["checkpoint"].as_str().unwrap());
    let exported = rectrain(folder, &["checkpoint", "export", &checkpoint, "--for", "serving", "--output", "last"]);
    assert!(exported.status.success(), "{}", String::from_utf8_lossy(&exported.stderr));
    let model: Value = serde_json::from_slice(&std::fs::read(folder.join("last/model.json")).unwrap()).unwrap();
    assert_eq!(metadata(&server)["properties"]["contentDigest"], model["contentDigest"]);
    assert_eq!(server.metric("rectrain_inference_model_update_failures_total"), 0.0);
}

/// The AUC of an export on the rows of a file.
fn auc(folder: &Path, export: &str, rows: &str) -> f64 {
    report(folder, &[export, "--input", rows, "--output", "auc.csv"])["auc"].as_f64().unwrap()
}

#[test]
fn a_model_below_the_bound_of_the_gate_is_not_taken() {
    let place = tempfile::tempdir().unwrap();
    let folder = place.path();
    train(folder, "dlrm", &[PUBLISH]);
    assert!(export(folder, "first", "f32").status.success());
    let copied = std::process::Command::new("cp").args(["-r", "published", "served"]).current_dir(folder).status();
    assert!(copied.unwrap().success());
    train(folder, "dlrm", &[PUBLISH, RESUME, "spec.training.epochs=8"]);
    assert!(export(folder, "second", "f32").status.success());
    // With the labels turned round, the better model is the worse one.
    let text = std::fs::read_to_string(folder.join("test.csv")).unwrap();
    let turned = |line: &str| match line.split_at(1) {
        ("0", rest) => format!("1{rest}"),
        ("1", rest) => format!("0{rest}"),
        _ => line.to_owned(),
    };
    std::fs::write(folder.join("turned.csv"), text.lines().map(|line| turned(line) + "\n").collect::<String>())
        .unwrap();
    let rows =
        if auc(folder, "first", "test.csv") > auc(folder, "second", "test.csv") { "test.csv" } else { "turned.csv" };
    let (first, second) = (auc(folder, "first", rows), auc(folder, "second", rows));
    assert!(first > second, "{first} and {second}: training changed no order");
    let bound = f64::midpoint(first, second).to_string();
    let gate = ["--gate-rows", rows, "--gate-min-auc", &bound];
    let server = Server::start(folder, "served", &[&["--poll", "50ms"], &gate[..]].concat());
    for file in ["delta-000000000002.bin", "latest.json"] {
        std::fs::copy(folder.join("published").join(file), folder.join("served").join(file)).unwrap();
    }
    until("the model is refused", || server.metric("rectrain_inference_model_update_failures_total") > 0.0);
    assert_eq!(metadata(&server)["properties"]["sequence"], "1");
    let refused = rectrain(folder, &[&["serve", "second"], &gate[..]].concat());
    let message = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert!(refused.status.code() == Some(1) && message.contains("on --gate-rows, and --gate-min-auc is"), "{message}");
}

#[test]
fn a_path_of_another_job_is_refused_before_training() {
    let place = tempfile::tempdir().unwrap();
    let folder = place.path();
    train(folder, "lr", &[PUBLISH]);
    let arguments = ["run", "job.yaml", "--set", PUBLISH, "--set", "metadata.name=other"];
    let refused = rectrain(folder, &[&arguments[..], &["--set", "spec.checkpoint.path=others"]].concat());
    let message = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert_eq!(refused.status.code(), Some(2), "{message}");
    assert!(message.contains("spec.serving.publish.path: published cannot be used: the job test"), "{message}");
}

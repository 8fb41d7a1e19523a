//! `rectrain run --processes --link`: links between processes as slow as a network.

#![allow(clippy::unwrap_used, reason = "an unwrap in a test is an assertion")]

mod common;

use common::{events, rectrain};
use serde_json::Value;

const JOB: &str = "
apiVersion: rectrain.dev/v1alpha1
kind: RecTrainingJob
metadata: {name: links}
spec:
  model: {kind: deepfm, embeddingDim: 4, hidden: [16, 8]}
  features: {sparse: [{name: 'C{1..26}'}]}
  data: {synthetic: {rows: 3000, testRows: 500, vocabulary: 1000}}
  training: {globalBatchSize: 128}
";

fn folder_with_job() -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("job.yaml"), JOB).unwrap();
    folder
}

fn run(more: &[&str]) -> Value {
    let folder = folder_with_job();
    let arguments = ["run", "job.yaml", "--json", "--processes", "--set", "spec.roles.ps.replicas=2"];
    events(&rectrain(folder.path(), &[&arguments[..], more].concat())).pop().unwrap()
}

/// In `sync` a step has four messages at least, one after the other. Gradients go to the embedding
/// worker, and on to the servers. Rows come back to it, and pooled embeddings to the dense worker.
#[test]
fn a_delay_slows_each_step_and_keeps_the_model() {
    let free = run(&[]);
    let delayed = run(&["--link", "1Gbit,25ms"]);
    for field in ["parametersSha256", "steps", "samples", "test"] {
        assert_eq!(free[field], delayed[field], "{field}");
    }
    let (seconds, steps) = (delayed["seconds"].as_f64().unwrap(), delayed["steps"].as_f64().unwrap());
    assert!(seconds > (steps - 1.0) * 4.0 * 0.025, "{seconds} s for {steps} steps");
}

/// The bytes of a step pass the card of the embedding worker, half of them or more in one
/// direction.
#[test]
fn a_rate_bounds_the_bytes_of_a_job() {
    let limited = run(&["--link", "4Mbit"]);
    let kinds = ["put_batch", "lookup", "forward", "backward", "update"];
    let bytes: f64 = kinds.iter().map(|kind| limited["bytesOnWire"][kind].as_f64().unwrap()).sum();
    let (seconds, rate) = (limited["seconds"].as_f64().unwrap(), 4e6 / 8.0);
    // The first pieces travel before training begins.
    assert!(seconds > 0.7 * bytes / 2.0 / rate, "{seconds} s for {bytes} bytes");
}

#[test]
fn only_a_launcher_on_this_machine_can_limit_links() {
    let folder = folder_with_job();
    let refused = |arguments: &[&str], expected: &str| {
        let output = rectrain(folder.path(), arguments);
        let said = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{said}");
        assert!(said.contains(expected), "{said}");
    };
    refused(&["run", "job.yaml", "--link", "1Gbit"], "--processes");
    refused(&["run", "job.yaml", "--processes", "--link", "1GB"], "expected a rate");
    let member = ["ps", "job.yaml", "--index", "0", "--coordinator", "tcp://127.0.0.1:9", "--link", "1Gbit"];
    refused(&member, "--parent");
    refused(&["coordinator", "job.yaml", "--link", "1Gbit"], "--parent");
    refused(&[&member[..], &["--parent", "1", "--tls", "certificates"]].concat(), "--tls");
}

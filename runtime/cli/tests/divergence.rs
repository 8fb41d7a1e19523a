//! A job whose training diverges fails for good: exit code 3, no restart, and the figures.

#![cfg(target_os = "linux")]
#![allow(clippy::unwrap_used, reason = "an unwrap in a test is an assertion")]

use std::path::Path;
use std::process::{Command, Output};

use serde_json::Value;

/// With this learning rate the loss grows by many orders of magnitude within a few steps.
const JOB: &str = "
apiVersion: rectrain.dev/v1alpha1
kind: RecTrainingJob
metadata: {name: divergence}
spec:
  model: {kind: deepfm, embeddingDim: 4, hidden: [64, 64]}
  features:
    sparse: [{name: 'C{1..3}'}]
    dense: [{name: I1}]
  data:
    synthetic: {rows: 3000, testRows: 500, vocabulary: 1000}
  training:
    globalBatchSize: 64
    epochs: 5
    optimizer:
      dense: {kind: sgd, learningRate: 1000}
      sparse: {kind: sgd, learningRate: 1000}
  faultTolerance: {maxRestarts: 3, backoffSeconds: 1}
";

fn run(folder: &Path, arguments: &[&str]) -> Output {
    std::fs::write(folder.join("job.yaml"), JOB).unwrap();
    let mut command = Command::new(env!("CARGO_BIN_EXE_rectrain"));
    command.args(["run", "job.yaml", "--json"]).args(arguments).current_dir(folder).output().unwrap()
}

fn rates(rate: &str) -> String {
    format!("spec.training.optimizer.dense.learningRate={rate},spec.training.optimizer.sparse.learningRate={rate}")
}

fn told(output: &Output) -> Vec<Value> {
    String::from_utf8_lossy(&output.stdout).lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

#[test]
fn a_divergence_is_not_retried_and_has_its_figures() {
    for arguments in [&[][..], &["--processes"], &["--set", "spec.training.mode=gba"]] {
        let folder = tempfile::tempdir().unwrap();
        let output = run(folder.path(), arguments);
        let message = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(3), "{arguments:?}: {message}");
        for part in ["training diverged: ", "lower the learning rate", "No checkpoint was saved"] {
            assert!(message.contains(part), "{part}: {message}");
        }
        let events = told(&output);
        let is_other = |event: &&Value| event["event"] == "restarting" || event["event"] == "summary";
        assert_eq!(events.iter().find(is_other), None, "{arguments:?}: {message}");
        let last = events.last().unwrap();
        assert_eq!((&last["event"], &last["userError"]), (&"failed".into(), &false.into()));
        assert!(last["divergence"]["step"].is_u64() && last["divergence"]["bestLoss"].is_f64(), "{last}");
    }
}

/// The model of these steps is finite and worthless.
#[test]
fn an_exploded_model_is_no_success_although_it_is_finite() {
    let folder = tempfile::tempdir().unwrap();
    let steps = "spec.training.steps=3,spec.training.epochs=null,spec.data.synthetic.testRows=1";
    let output = run(folder.path(), &["--set", steps]);
    let message = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(3), "{message}");
    assert_eq!(told(&output).pop().unwrap()["event"], "failed");
}

#[test]
fn the_last_good_checkpoint_stays_and_a_lower_rate_resumes_from_it() {
    let folder = tempfile::tempdir().unwrap();
    let saving = ["--set", "spec.checkpoint.path=ck,spec.checkpoint.resume=latest,spec.data.synthetic.testRows=1"];
    let good =
        run(folder.path(), &[&saving[..], &["--set", &rates("0.01"), "--set", "spec.training.epochs=1"]].concat());
    assert!(good.status.success(), "{}", String::from_utf8_lossy(&good.stderr));
    let last = told(&good).pop().unwrap();
    assert!(last["loss"].as_f64().unwrap() >= last["bestLoss"].as_f64().unwrap(), "{last}");

    let diverged = run(folder.path(), &[&saving[..], &["--set", "spec.training.epochs=2"]].concat());
    let message = String::from_utf8_lossy(&diverged.stderr);
    assert_eq!(diverged.status.code(), Some(3), "{message}");
    assert!(message.contains("The last checkpoint is step-"), "{message}");

    let again =
        run(folder.path(), &[&saving[..], &["--set", &rates("0.01"), "--set", "spec.training.epochs=2"]].concat());
    assert!(again.status.success(), "{}", String::from_utf8_lossy(&again.stderr));
    assert!(told(&again).iter().any(|event| event["event"] == "resumed"));
}

/// A lower limit finds a smaller growth, and the message names the setting.
#[test]
fn the_factor_can_be_set() {
    let folder = tempfile::tempdir().unwrap();
    let sets = format!("spec.training.divergenceFactor=2,{}", rates("10"));
    let output = run(folder.path(), &["--set", &sets]);
    let message = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(3), "{message}");
    assert!(message.contains("more than 2 times a normal one") && message.contains("divergenceFactor"), "{message}");
}

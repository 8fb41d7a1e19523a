//! Manifests that the API server must refuse, each with a sentence that tells the user what to do.
//!
//! `crds/tests/manifest.rs` tests the rules one by one. This trial shows that a real API server
//! accepts the rules, evaluates them, and shows their sentences to users.

use std::io::Write;
use std::process::Stdio;

use rectrain_harness::HarnessError;
use rectrain_harness::command::start;
use rectrain_harness::jobs::{Jobs, NAMESPACE};
use rectrain_harness::manifests::{manifest, merge};
use serde_json::{Value, json};

use crate::TrialError;
use crate::cluster::support::TestCluster;
use crate::error::unmet;

/// A change of a valid manifest, and a part of the sentence that must refuse it.
type Refusal = (Value, &'static str);

/// Changes of model and features that make a valid manifest invalid.
fn bad_models_and_features() -> Vec<Refusal> {
    let model = |model: Value, says| (json!({"model": model}), says);
    let features = |features: Value, says| (json!({"features": features}), says);
    vec![
        model(json!({"kind": "mlp"}), "Unsupported value: \"mlp\""),
        model(json!({"bottom": [8]}), "only dlrm has a bottom MLP: remove `bottom`, or set kind: dlrm"),
        model(json!({"crossLayers": 2}), "`crossLayers` belongs only to dcn and dcnV2: remove it, or set kind: dcnV2"),
        model(json!({"kind": "fm"}), "fm and lr have no hidden layers: remove `hidden`"),
        model(json!({"kind": "fm", "hidden": null, "dropout": 0.1}), "fm and lr have no layers to drop out of"),
        model(json!({"dropout": 1.0}), "dropout is the share of activations set to 0"),
        model(json!({"kind": "lr", "hidden": null, "embeddingDim": 4}), "lr has one weight per id and no embeddings"),
        features(json!({"sparse": [{"name": "C1"}, {"name": "C1"}]}), "a sparse feature is named twice"),
        features(json!({"dense": [{"name": "I1"}, {"name": "I1"}]}), "a dense feature is named twice"),
        features(json!({"dense": [{"name": "C{1..6}"}]}), "a column is either sparse or dense"),
        features(json!({"label": {"name": "x"}, "sparse": [{"name": "x"}]}), "the label is also a sparse feature"),
        features(json!({"label": {"name": "x"}, "dense": [{"name": "x"}]}), "the label is also a dense feature"),
        features(
            json!({"label": {"name": "x"}, "group": "x"}),
            "`group` selects the rows that are ranked against each other",
        ),
        features(json!({"sparse": [{"name": "C1", "dim": 8}]}), "they need one width: remove `dim`"),
        features(json!({"sparse": []}), "should have at least 1 items"),
        features(
            json!({"dense": [{"name": "I1", "transform": "standardize"}]}),
            "transform: standardize needs `mean` and `std`",
        ),
        features(json!({"dense": [{"name": "I1", "mean": 1.0}]}), "`mean` and `std` belong to transform: standardize"),
        features(json!({"dense": [{"name": "I1", "transform": "minMax"}]}), "transform: minMax needs `min` and `max`"),
    ]
}

/// Changes of data, training and checkpoints that make a valid manifest invalid.
fn bad_data_and_training() -> Vec<Refusal> {
    let data = |data: Value, says| (json!({"data": data}), says);
    let training = |training: Value, says| (json!({"training": training}), says);
    let dense = |dense: Value, says| (json!({"training": {"optimizer": {"dense": dense}}}), says);
    let sparse = |sparse: Value, says| (json!({"training": {"optimizer": {"sparse": sparse}}}), says);
    let files = |more: Value| {
        let mut all = json!({"synthetic": null, "source": {"paths": ["a.csv"]}});
        merge(&mut all, &more);
        all
    };
    vec![
        data(json!({"test": {"paths": ["a.csv"]}}), "`test` goes with `train`"),
        data(json!({"train": {"paths": ["a.csv"]}}), "expected exactly one of `train`"),
        data(json!({"synthetic": null}), "expected exactly one of `train`"),
        data(files(json!({})), "`source` needs `split`"),
        data(files(json!({"split": {"fraction": {"train": 1.0}}})), "`train` is a share of the rows"),
        data(files(json!({"split": {}})), "expected exactly one of `position`, `fraction`, `time` and `slices`"),
        data(json!({"split": {"fraction": {"train": 0.5}}}), "`split` divides `source`"),
        data(json!({"format": "csv"}), "are for files, and `synthetic` reads none"),
        data(json!({"synthetic": {"zipfExponent": 0.0}}), "expected an exponent above 0, such as 1.05"),
        training(json!({"mode": "asynchronous"}), "Unsupported value: \"asynchronous\""),
        training(json!({"epochs": 1, "steps": 2}), "`epochs` and `steps` both decide when training ends"),
        training(json!({"globalBatchSize": 0}), "should be greater than or equal to 1"),
        training(json!({"globalBatchSize": 1}), "every dense worker needs at least one row of each batch"),
        training(json!({"globalBachSize": 500}), "unknown field \"spec.training.globalBachSize\""),
        training(json!({"localBatchSize": 3}), "a global batch consists of whole local batches"),
        training(
            json!({"switchAt": [{"step": 1, "mode": "gba"}, {"step": 1, "mode": "sync"}]}),
            "only one switch can happen at a step",
        ),
        training(json!({"evaluation": {"every": "steps"}}), "`steps` and every: steps go together"),
        dense(json!({"kind": "sgd", "beta1": 0.9}), "`beta1` and `beta2` belong to adam and adamW"),
        dense(json!({"kind": "adam", "learningRate": 0.0}), "expected a learning rate above 0"),
        dense(json!({"kind": "adam", "momentum": 0.5}), "`momentum` belongs to sgd"),
        sparse(json!({"kind": "sgd", "epsilon": 0.1}), "sgd and ftrl have no epsilon"),
        sparse(json!({"kind": "adam", "l1": 0.1}), "`beta`, `l1` and `l2` belong to ftrl"),
        (json!({"checkpoint": {"resume": "latest"}}), "checkpoints need a `path`"),
    ]
}

/// Changes that an existing job must not get.
fn bad_changes() -> Vec<Refusal> {
    vec![
        (json!({"model": {"embeddingDim": 8}}), "the model cannot be changed once the job exists"),
        (json!({"features": {"group": "C1"}}), "the features cannot be changed once the job exists"),
        (json!({"training": {"seed": 7}}), "the seed cannot be changed once the job exists"),
        (
            json!({"training": {"embeddingValueType": "bf16"}}),
            "embeddingValueType cannot be changed once the job exists",
        ),
        (
            json!({"training": {"optimizer": {"sparse": {"kind": "sgd"}}}}),
            "the optimizer of the embedding rows cannot be changed once the job exists",
        ),
        (json!({"managedBy": "example.com/other"}), "managedBy cannot be changed once the job exists"),
    ]
}

pub(in crate::cluster) fn refuses(cluster: &TestCluster) -> Result<(), TrialError> {
    let jobs = &cluster.jobs;
    let name = "refusal";
    let long_name = "a-name-that-is-longer-than-pods-allow";
    warns_of_lost_training(jobs, name)?;
    let bad = [bad_models_and_features(), bad_data_and_training()].concat();
    let changes = bad_changes();
    let mut mistakes = Vec::new();
    for (over, says) in &bad {
        mistakes.extend(mistake(jobs, &manifest(name, over), says)?);
    }
    mistakes.extend(mistake(jobs, &manifest(long_name, &json!({})), "expected at most 35 characters")?);
    jobs.submit(name, &json!({"suspend": true}))?;
    for (over, says) in &changes {
        mistakes.extend(mistake(jobs, &manifest(name, over), says)?);
    }
    jobs.delete(name)?;
    if !mistakes.is_empty() {
        return Err(unmet("a refusal of each manifest with its sentence", mistakes.join("\n")));
    }
    println!("{} manifests refused, each with the sentence of its rule", bad.len() + 1 + changes.len());
    Ok(())
}

/// The API server accepts a job without a path for checkpoints with a warning, and a job with one
/// without a warning.
fn warns_of_lost_training(jobs: &Jobs, name: &str) -> Result<(), TrialError> {
    let saved = json!({"checkpoint": {"path": "s3://data/checkpoints/refusal"}});
    let warning = "spec.checkpoint.path is not set";
    for (changes, expected) in [(json!({}), true), (saved, false)] {
        match dry_run(jobs, &manifest(name, &changes))? {
            Answer::Accepted(printed) if printed.contains(warning) == expected => {}
            Answer::Accepted(printed) => return Err(unmet(format!("a warning: {expected}"), printed)),
            Answer::Refused(complaint) => return Err(unmet("the valid manifest to be accepted", complaint)),
        }
    }
    Ok(())
}

/// The API server's mistake, if it does not refuse the manifest with this sentence.
fn mistake(jobs: &Jobs, manifest: &Value, says: &str) -> Result<Option<String>, HarnessError> {
    Ok(match dry_run(jobs, manifest)? {
        Answer::Refused(complaint) if complaint.contains(says) => None,
        Answer::Refused(complaint) => Some(format!("{}: expected {says:?}, found {complaint}", manifest["spec"])),
        Answer::Accepted(_) => Some(format!("{}: expected {says:?}, and it was accepted", manifest["spec"])),
    })
}

/// The API server's answer to a manifest.
enum Answer {
    /// With these warnings, which may be empty.
    Accepted(String),
    /// With this complaint.
    Refused(String),
}

/// Asks the API server about a manifest, without creating an object.
fn dry_run(jobs: &Jobs, manifest: &Value) -> Result<Answer, HarnessError> {
    let mut kubectl = jobs.kubectl().command();
    kubectl.args(["--namespace", NAMESPACE, "apply", "--dry-run=server", "--filename=-"]);
    kubectl.stdin(Stdio::piped()).stdout(Stdio::null()).stderr(Stdio::piped());
    let mut child = start(&mut kubectl)?;
    if let Some(mut input) = child.stdin.take() {
        let text = manifest.to_string();
        input.write_all(text.as_bytes()).map_err(HarnessError::io("write to", "kubectl apply --dry-run"))?;
    }
    let output = child.wait_with_output().map_err(HarnessError::io("wait for", "kubectl apply --dry-run"))?;
    let printed = String::from_utf8_lossy(&output.stderr).into_owned();
    Ok(if output.status.success() { Answer::Accepted(printed) } else { Answer::Refused(printed) })
}

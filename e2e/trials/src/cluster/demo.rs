//! `cargo xtask cluster demo`: the README's example as a RecTrainingJob, with its data in an object
//! store in the cluster. Its model must equal bit for bit the one that `rectrain run` trains.

use std::process::Stdio;
use std::time::Duration;

use rectrain_bring_up::{Paths, kubectl};
use rectrain_harness::command::{Running, command, output, visible};
use rectrain_harness::events::final_event;
use rectrain_harness::jobs::condition;
use rectrain_harness::kubectl::Kubectl;
use rectrain_harness::not_yet;
use rectrain_harness::waiting::eventually;
use rectrain_harness::workspace::{built, workspace};
use serde_json::{Value, json};

use crate::TrialError;
use crate::cluster::support::{chart, object_store};
use crate::error::unmet;

const NAMESPACE: &str = "rectrain-demo";
const JOB: &str = "docs/examples/movielens-100k.yaml";
const JOB_NAME: &str = "movielens-100k";
const DATA: &str = "data/movielens-100k";
/// How long the job may take on a slow machine.
const PATIENCE: Duration = Duration::from_secs(1200);

/// Runs the trial. Its job and its namespace stay for a look.
///
/// # Errors
/// A step fails; the models differ.
pub fn run(paths: &Paths) -> Result<(), TrialError> {
    chart::install(paths, &[])?;
    visible(command(built("rectrain")?, ["data", "movielens-100k", "--output", DATA]).current_dir(workspace()))?;
    let kubectl = kubectl(paths)?;
    kubectl.fresh_namespace(NAMESPACE)?;
    object_store::start(paths, NAMESPACE)?;
    object_store::upload(&kubectl, NAMESPACE, &workspace().join(DATA), &["train.csv", "test.csv"])?;
    let data = json!({"spec": {"data": {
        "train": {"paths": ["s3://data/train.csv"]},
        "test": {"paths": ["s3://data/test.csv"]},
        "storage": {
            "secretName": "object-store",
        },
    }}});
    let mut patch = kubectl.command();
    patch.args(["patch", "--local", "--type=merge", "--output=json", "--filename"]);
    let job = output(patch.arg(workspace().join(JOB)).args(["--patch", &data.to_string()]))?;
    kubectl.apply(NAMESPACE, &job)?;
    let there = watch(&kubectl)?;
    println!("{there:#}");
    let here = output(command(built("rectrain")?, ["run", JOB, "--json", "--no-history"]).current_dir(workspace()))?;
    let here = final_event(&here)?;
    if here["parametersSha256"] != there["parametersSha256"] {
        let expected = format!("the model {} that `rectrain run` trains", here["parametersSha256"]);
        return Err(unmet(expected, &there["parametersSha256"]));
    }
    println!("`rectrain run` trained the same model, to the bit");
    Ok(())
}

/// Prints the job's phases until its end; returns its summary.
fn watch(kubectl: &Kubectl) -> Result<Value, TrialError> {
    let mut showing = kubectl.command();
    showing.args(["--namespace", NAMESPACE, "get", "rectrainingjob", JOB_NAME, "--watch"]);
    let showing = Running::start(showing.stdin(Stdio::null()))?;
    let ended = eventually(PATIENCE, "the end of the job", || {
        let job = kubectl.json(NAMESPACE, &["get", &format!("rectrainingjob/{JOB_NAME}")])?;
        match (condition(&job, "Complete"), condition(&job, "Failed")) {
            (None, None) => Err(not_yet(format!("its conditions are {}", job["status"]["conditions"]))),
            _ => Ok(job),
        }
    })?;
    drop(showing);
    match condition(&ended, "Complete") {
        Some(_) => Ok(ended["status"]["summary"].clone()),
        None => Err(unmet("a complete job", &ended["status"]["conditions"])),
    }
}

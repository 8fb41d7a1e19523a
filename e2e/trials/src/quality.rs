//! `cargo xtask quality`: trains on real data with several models, modes and seeds, and prints the
//! metrics on the test rows. docs/development/benchmarks.md shows its figures.

use rectrain_harness::HarnessError;
use rectrain_harness::arguments::list;
use rectrain_harness::cargo::build_programs;
use rectrain_harness::events::{missing, test_auc};
use rectrain_harness::rectrain::{job, train};
use rectrain_harness::statistics::{mean, range};
use serde_json::{Value, json};

use crate::TrialError;

const USAGE: &str = "usage: cargo xtask quality --manifest FILE [--path DATA] [--models a,b] [--modes a,b] \
[--seeds 1,2,3] [--set PATH=VALUE]
  Prints one line of JSON for each run, and a table of means. DATA replaces spec.data.source.paths.";

#[derive(Debug)]
struct Plan {
    manifest: String,
    sets: Vec<String>,
    models: Vec<String>,
    modes: Vec<String>,
    seeds: Vec<String>,
}

/// Runs the trial with the arguments of the command line.
///
/// # Errors
/// Wrong arguments; a run that fails.
pub fn run(arguments: &[&str]) -> Result<(), TrialError> {
    let plan = parse(arguments)?;
    build_programs()?;
    let mut rows = Vec::new();
    for model in &plan.models {
        for mode in &plan.modes {
            rows.push(row(&plan, model, mode)?);
        }
    }
    println!("| model | mode | test AUC: mean (min to max) | log loss: mean (min to max) |\n|---|---|---|---|");
    println!("{}", rows.join("\n"));
    Ok(())
}

fn parse(arguments: &[&str]) -> Result<Plan, HarnessError> {
    let mut plan = Plan {
        manifest: String::new(),
        sets: Vec::new(),
        models: list("dlrm,deepfm,dcnV2"),
        modes: list("sync,hybrid"),
        seeds: list("1,2,3"),
    };
    for pair in arguments.chunks(2) {
        match pair {
            ["--manifest", file] => plan.manifest = (*file).to_owned(),
            ["--path", path] => plan.sets.push(format!("spec.data.source.paths={{{path}}}")),
            ["--models", models] => plan.models = list(models),
            ["--modes", modes] => plan.modes = list(modes),
            ["--seeds", seeds] => plan.seeds = list(seeds),
            ["--set", set] => plan.sets.push((*set).to_owned()),
            _ => return Err(HarnessError::Usage(USAGE)),
        }
    }
    if plan.manifest.is_empty() { Err(HarnessError::Usage(USAGE)) } else { Ok(plan) }
}

/// Trains a model in a mode with every seed; returns the table's row.
fn row(plan: &Plan, model: &str, mode: &str) -> Result<String, TrialError> {
    let mut aucs = Vec::new();
    let mut losses = Vec::new();
    for seed in &plan.seeds {
        let summary = train_once(plan, model, mode, seed)?;
        let test = &summary["test"];
        aucs.push(test_auc(&summary)?);
        losses.push(test["logLoss"].as_f64().ok_or_else(|| missing("the summary", &summary, "test.logLoss"))?);
        println!(
            "{}",
            json!({ "model": model, "mode": mode, "seed": seed, "auc": test["auc"],
                "logLoss": test["logLoss"], "calibration": test["calibration"],
                "samplesPerSecond": summary["samplesPerSecond"], "parametersSha256": summary["parametersSha256"] })
        );
    }
    Ok(format!("| {model} | {mode} | {} | {} |", spread(&aucs), spread(&losses)))
}

/// Trains once; returns the summary.
fn train_once(plan: &Plan, model: &str, mode: &str, seed: &str) -> Result<Value, HarnessError> {
    let own = [
        shape(model).to_owned(),
        format!("spec.model.kind={model}"),
        format!("spec.training.mode={mode}"),
        format!("spec.training.seed={seed}"),
    ];
    train(job(&plan.manifest, plan.sets.iter().chain(&own))?)
}

/// The reference's layers of the model, as an override.
fn shape(model: &str) -> &'static str {
    match model {
        "dlrm" => "spec.model.hidden={512,256}",
        "fm" => "spec.model.hidden=null",
        "lr" => "spec.model.hidden=null,spec.model.embeddingDim=null",
        _ => "spec.model.hidden={256,128}",
    }
}

fn spread(values: &[f64]) -> String {
    let (low, high) = range(values);
    format!("{:.4} ({low:.4} to {high:.4})", mean(values.iter().copied()))
}

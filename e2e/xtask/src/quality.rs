//! Trains on real data for several models, modes and seeds and prints what was reached: the figures of docs/development/benchmarks.md.

use serde_json::Value;

use crate::list;

const USAGE: &str = "usage: cargo xtask quality --manifest FILE [--path DATA] [--models a,b] [--modes a,b] [--seeds 1,2,3] [--set PATH=VALUE]
  prints one line of JSON a run and a table of means; DATA replaces spec.data.source.paths";

#[derive(Debug)]
struct Plan {
    manifest: String,
    sets: Vec<String>,
    models: Vec<String>,
    modes: Vec<String>,
    seeds: Vec<String>,
}

pub(crate) fn run(arguments: &[&str]) -> Result<(), String> {
    let plan = parse(arguments)?;
    crate::cargo(&["build", "--release", "--workspace", "--bins", "--tests"], "the build failed")?;
    let mut rows = Vec::new();
    for model in &plan.models {
        for mode in &plan.modes {
            let mut aucs = Vec::new();
            let mut losses = Vec::new();
            for seed in &plan.seeds {
                let summary = train(&plan, model, mode, seed)?;
                let test = &summary["test"];
                aucs.push(test["auc"].as_f64().ok_or("the run gave no test AUC")?);
                losses.push(test["logLoss"].as_f64().ok_or("the run gave no log loss")?);
                println!(
                    "{}",
                    serde_json::json!({ "model": model, "mode": mode, "seed": seed, "auc": test["auc"],
                        "logLoss": test["logLoss"], "calibration": test["calibration"],
                        "samplesPerSecond": summary["samplesPerSecond"], "parametersSha256": summary["parametersSha256"] })
                );
            }
            rows.push(format!("| {model} | {mode} | {} | {} |", spread(&aucs), spread(&losses)));
        }
    }
    println!("| model | mode | test AUC: mean (min to max) | log loss: mean (min to max) |\n|---|---|---|---|");
    println!("{}", rows.join("\n"));
    Ok(())
}

fn parse(arguments: &[&str]) -> Result<Plan, String> {
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
            _ => return Err(USAGE.to_owned()),
        }
    }
    if plan.manifest.is_empty() { Err(USAGE.to_owned()) } else { Ok(plan) }
}

/// One run; its summary.
fn train(plan: &Plan, model: &str, mode: &str, seed: &str) -> Result<Value, String> {
    let own = [
        shape(model).to_owned(),
        format!("spec.model.kind={model}"),
        format!("spec.training.mode={mode}"),
        format!("spec.training.seed={seed}"),
    ];
    crate::last_event(&crate::output(crate::job(&plan.manifest, plan.sets.iter().chain(&own))?)?)
}

/// What the reference gives the model where the manifest leaves it open.
fn shape(model: &str) -> &'static str {
    match model {
        "dlrm" => "spec.model.hidden={512,256}",
        "fm" => "spec.model.hidden=null",
        "lr" => "spec.model.hidden=null,spec.model.embeddingDim=null",
        _ => "spec.model.hidden={256,128}",
    }
}

fn spread(values: &[f64]) -> String {
    let mean = values.iter().sum::<f64>() / values.len().max(1) as f64;
    let (low, high) = crate::range(values);
    format!("{mean:.4} ({low:.4} to {high:.4})")
}

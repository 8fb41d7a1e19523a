//! `cargo xtask continual`: continual training with switches between the training modes, as in
//! GBA's §5.2.
//!
//! A job trains slice by slice, and tests on each slice before it trains on it. In the middle the
//! mode switches from `sync` to another mode, or from another mode to `sync`; no hyper-parameter
//! changes. docs/development/benchmarks.md shows the figures.

use rectrain_harness::HarnessError;
use rectrain_harness::arguments::list;
use rectrain_harness::cargo::build_programs;
use rectrain_harness::events::{integer, missing, summary};
use rectrain_harness::rectrain::job;
use rectrain_harness::statistics::{mean, range};
use serde_json::{Value, json};

use crate::TrialError;
use crate::error::unmet;

const USAGE: &str = "usage: cargo xtask continual --manifest FILE [--path DATA] [--modes a,b] [--seeds 1,2,3] \
[--set PATH=VALUE] [--slow WORKER=FACTOR]
  FILE splits its source into slices (spec.data.split.slices). DATA replaces spec.data.source.paths.
  Prints one line of JSON for each run, and a table: the AUC of `sync` by slice, and for each switch the
  difference from it.";

struct Plan {
    manifest: String,
    sets: Vec<String>,
    modes: Vec<String>,
    seeds: Vec<String>,
    slow: Vec<String>,
}

/// The test on a slice, before this global step.
struct Tested {
    step: u64,
    auc: f64,
}

/// The tests on every slice from the second on: by seed, by slice.
type Runs = Vec<Vec<Tested>>;

/// Runs the trial with the arguments of the command line.
///
/// # Errors
/// Wrong arguments; a run that fails; a manifest without slices.
pub fn run(arguments: &[&str]) -> Result<(), TrialError> {
    let plan = parse(arguments)?;
    build_programs()?;
    let sync = train_seeds(&plan, "sync", &[])?;
    let tested = sync.first().map_or(0, Vec::len);
    // With a barrier a step is a global batch, and the first test follows the first slice.
    let first = sync.first().and_then(|run| run.first());
    let slice_batches =
        first.ok_or_else(|| unmet("a manifest with spec.data.split.slices", "no slice was tested"))?.step;
    let middle = tested as u64 / 2 + 1;
    let mut rows = vec![row("sync throughout", &sync)];
    let mut differences = Vec::new();
    for mode in &plan.modes {
        for (from, to) in [("sync", mode.as_str()), (mode.as_str(), "sync")] {
            let name = format!("{from} → {to}");
            let switch = [
                format!("spec.training.mode={from}"),
                format!("spec.training.switchAt[0].step={}", middle * slice_batches),
                format!("spec.training.switchAt[0].mode={to}"),
            ];
            let aucs = train_seeds(&plan, &name, &switch)?;
            rows.push(row(&name, &aucs));
            // Evaluation `middle`, counted from 0, is the first one after training in the other
            // mode.
            differences.push(difference(&name, &sync, &aucs, middle as usize));
        }
    }
    let slices: String = (2..tested + 2).map(|slice| format!(" {slice} |")).collect();
    println!(
        "\nTest AUC by slice, mean over {} seeds; the mode is switched before training on slice {}\n",
        plan.seeds.len(),
        middle + 1
    );
    println!("| |{slices}\n|---|{}", "---|".repeat(tested));
    println!("{}", rows.join("\n"));
    println!(
        "\n| AUC minus the AUC of sync throughout, same seed: mean (min to max) | first slice after the switch | all slices after it |\n|---|---|---|"
    );
    println!("{}", differences.join("\n"));
    Ok(())
}

fn parse(arguments: &[&str]) -> Result<Plan, HarnessError> {
    let mut plan = Plan {
        manifest: String::new(),
        sets: Vec::new(),
        modes: list("gba,async,hopBs,hopBw,bsp,hybrid"),
        seeds: list("1,2,3"),
        slow: Vec::new(),
    };
    for pair in arguments.chunks(2) {
        match pair {
            ["--manifest", file] => plan.manifest = (*file).to_owned(),
            ["--path", path] => plan.sets.push(format!("spec.data.source.paths={{{path}}}")),
            ["--modes", modes] => plan.modes = list(modes),
            ["--seeds", seeds] => plan.seeds = list(seeds),
            ["--set", set] => plan.sets.push((*set).to_owned()),
            ["--slow", slow] => plan.slow.push((*slow).to_owned()),
            _ => return Err(HarnessError::Usage(USAGE)),
        }
    }
    if plan.manifest.is_empty() { Err(HarnessError::Usage(USAGE)) } else { Ok(plan) }
}

fn train_seeds(plan: &Plan, name: &str, sets: &[String]) -> Result<Runs, HarnessError> {
    plan.seeds
        .iter()
        .map(|seed| {
            let (tested, summary) = train(plan, seed, sets)?;
            let aucs: Vec<f64> = tested.iter().map(|slice| slice.auc).collect();
            println!(
                "{}",
                json!({ "run": name, "seed": seed, "auc": aucs, "meanStaleness": summary["meanStaleness"],
                    "maxStaleness": summary["maxStaleness"], "droppedBatches": summary["droppedBatches"],
                    "excludedGradients": summary["excludedGradients"], "trainedRows": summary["trainedRows"],
                    "samplesPerSecond": summary["samplesPerSecond"] })
            );
            Ok(tested)
        })
        .collect()
}

/// Trains once; returns the tests on the slices, and the summary.
fn train(plan: &Plan, seed: &str, sets: &[String]) -> Result<(Vec<Tested>, Value), HarnessError> {
    let seed = format!("spec.training.seed={seed}");
    let mut job = job(&plan.manifest, std::iter::once(&seed).chain(&plan.sets).chain(sets))?;
    for slow in &plan.slow {
        job.args(["--slow", slow]);
    }
    let output = rectrain_harness::rectrain::run(job)?;
    let summary = summary(&output)?;
    let events = String::from_utf8_lossy(&output.stdout).into_owned();
    let events = events.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok());
    let tested = events.filter(|event| event["event"] == "evaluation").map(|event| {
        // A slice with equal labels has no AUC.
        let auc = event["test"]["auc"].as_f64().ok_or_else(|| missing("an evaluation", &event, "test.auc"))?;
        Ok(Tested { step: integer("an evaluation", &event, "step")?, auc })
    });
    Ok((tested.collect::<Result<_, HarnessError>>()?, summary))
}

fn row(name: &str, aucs: &Runs) -> String {
    let slices = aucs.first().map_or(0, Vec::len);
    let means = (0..slices).map(|slice| mean(aucs.iter().map(|seed| seed[slice].auc)));
    format!("| {name} |{}", means.map(|auc| format!(" {auc:.4} |")).collect::<String>())
}

fn difference(name: &str, sync: &Runs, aucs: &Runs, first: usize) -> String {
    let of = |slices: std::ops::Range<usize>| {
        let by_seed = sync.iter().zip(aucs).map(|(sync, other)| {
            mean(slices.clone().filter_map(|slice| Some(other.get(slice)?.auc - sync.get(slice)?.auc)))
        });
        spread(&by_seed.collect::<Vec<_>>())
    };
    let slices = sync.first().map_or(0, Vec::len);
    format!("| {name} | {} | {} |", of(first..first + 1), of(first..slices))
}

fn spread(values: &[f64]) -> String {
    let (low, high) = range(values);
    format!("{:+.4} ({low:+.4} to {high:+.4})", mean(values.iter().copied()))
}

//! Continual training with switches between the training modes, as in GBA's §5.2: the rows are gone through slice by slice, the
//! model is tested on each slice before it trains on it, and in the middle the mode is switched, from `sync` to each other mode
//! and from each other mode to `sync`, with no hyper-parameter changed. Prints the figures of docs/development/benchmarks.md.

use serde_json::Value;

use crate::list;

const USAGE: &str = "usage: cargo xtask continual --manifest FILE [--path DATA] [--modes a,b] [--seeds 1,2,3] [--set PATH=VALUE] [--slow WORKER=FACTOR]
  FILE splits its source into slices (spec.data.split.slices); DATA replaces spec.data.source.paths
  prints one line of JSON a run and a table: AUC of `sync` by slice, and for each switch how far from it the slices are";

struct Plan {
    manifest: String,
    sets: Vec<String>,
    modes: Vec<String>,
    seeds: Vec<String>,
    slow: Vec<String>,
}

/// A slice that was tested on, before this global step.
struct Tested {
    step: u64,
    auc: f64,
}

/// Each slice from the second on: by seed, by slice.
type Runs = Vec<Vec<Tested>>;

pub(crate) fn run(arguments: &[&str]) -> Result<(), String> {
    let plan = parse(arguments)?;
    crate::cargo(&["build", "--release", "--workspace", "--bins", "--tests"], "the build failed")?;
    let sync = train_seeds(&plan, "sync", &[])?;
    let tested = sync.first().map_or(0, Vec::len);
    // With a barrier a step is a global batch, and the first test is after the first slice.
    let first = sync.first().and_then(|run| run.first());
    let slice_batches = first.ok_or("nothing was tested: spec.data.split.slices is missing")?.step;
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
            // Evaluation `middle` (from 0) is the first after training in the other mode.
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
        "\n| AUC less that of sync throughout, same seed: mean (min to max) | first slice after the switch | all slices after it |\n|---|---|---|"
    );
    println!("{}", differences.join("\n"));
    Ok(())
}

fn parse(arguments: &[&str]) -> Result<Plan, String> {
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
            _ => return Err(USAGE.to_owned()),
        }
    }
    if plan.manifest.is_empty() { Err(USAGE.to_owned()) } else { Ok(plan) }
}

fn train_seeds(plan: &Plan, name: &str, sets: &[String]) -> Result<Runs, String> {
    plan.seeds
        .iter()
        .map(|seed| {
            let (tested, summary) = train(plan, seed, sets)?;
            let aucs: Vec<f64> = tested.iter().map(|slice| slice.auc).collect();
            println!(
                "{}",
                serde_json::json!({ "run": name, "seed": seed, "auc": aucs, "meanStaleness": summary["meanStaleness"],
                    "maxStaleness": summary["maxStaleness"], "droppedBatches": summary["droppedBatches"],
                    "excludedGradients": summary["excludedGradients"], "trainedRows": summary["trainedRows"],
                    "samplesPerSecond": summary["samplesPerSecond"] })
            );
            Ok(tested)
        })
        .collect()
}

/// One run: the slices that were tested on, and the summary.
fn train(plan: &Plan, seed: &str, sets: &[String]) -> Result<(Vec<Tested>, Value), String> {
    let seed = format!("spec.training.seed={seed}");
    let mut job = crate::job(&plan.manifest, std::iter::once(&seed).chain(&plan.sets).chain(sets))?;
    for slow in &plan.slow {
        job.args(["--slow", slow]);
    }
    let output = crate::output(job)?;
    let summary = crate::last_event(&output)?;
    let events = String::from_utf8_lossy(&output.stdout).into_owned();
    let events = events.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok());
    let tested = events.filter(|event| event["event"] == "evaluation").map(|event| {
        let auc = event["test"]["auc"].as_f64().ok_or("a slice has no AUC: all its labels are equal")?;
        Ok(Tested { step: event["step"].as_u64().ok_or("an evaluation has no step")?, auc })
    });
    Ok((tested.collect::<Result<_, &str>>()?, summary))
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

fn mean(values: impl Iterator<Item = f64>) -> f64 {
    let (sum, count) = values.fold((0.0, 0), |(sum, count), value| (sum + value, count + 1));
    sum / f64::from(count.max(1))
}

fn spread(values: &[f64]) -> String {
    let (low, high) = crate::range(values);
    format!("{:+.4} ({low:+.4} to {high:+.4})", mean(values.iter().copied()))
}

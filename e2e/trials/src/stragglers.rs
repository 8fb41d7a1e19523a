//! `cargo xtask stragglers`: jobs in many processes, with dense workers that get unequal CPU time.
//! Control groups limit the CPU time, so this needs Linux and root.
//!
//! All training modes run in turn, for several rounds. The table has throughput, staleness and
//! dropped batches, as GBA's tables 5.2 and 5.3 do. Machines are noisy, so each ratio compares runs
//! of one round.

use rectrain_harness::HarnessError;
use rectrain_harness::arguments::{list, number};
use rectrain_harness::cargo::build_programs;
use rectrain_harness::rectrain::job;
use rectrain_harness::statistics::{median, range};
use serde_json::{Value, json};

use crate::TrialError;

const USAGE: &str = "usage: cargo xtask stragglers [--manifest FILE] [--modes a,b] [--rounds 3] [--fast 6] \
[--slow 2] [--cores 0.16] [--factor 4] [--set PATH=VALUE]
  Trains with FAST + SLOW dense workers. A fast one gets CORES cores, a slow one CORES / FACTOR.";

struct Plan {
    manifest: String,
    modes: Vec<String>,
    rounds: usize,
    fast: u32,
    slow: u32,
    cores: f64,
    factor: f64,
    sets: Vec<String>,
}

/// Runs the trial with the arguments of the command line.
///
/// # Errors
/// Wrong arguments; a run that fails.
pub fn run(arguments: &[&str]) -> Result<(), TrialError> {
    let plan = parse(arguments)?;
    build_programs()?;
    let mut summaries: Vec<Vec<Value>> = vec![Vec::new(); plan.modes.len()];
    for round in 0..plan.rounds {
        for (mode, summaries) in plan.modes.iter().zip(&mut summaries) {
            let summary = train(&plan, mode)?;
            println!(
                "{}",
                json!({ "round": round, "mode": mode, "samplesPerSecond": summary["samplesPerSecond"],
                    "meanStaleness": summary["meanStaleness"], "maxStaleness": summary["maxStaleness"],
                    "droppedBatches": summary["droppedBatches"], "excludedGradients": summary["excludedGradients"],
                    "trainedRows": summary["trainedRows"] })
            );
            summaries.push(summary);
        }
    }
    println!(
        "\n| mode | samples/s: median | × sync: median (min to max) | staleness: mean | max | batches dropped \
         | gradients left out |"
    );
    println!("|---|---|---|---|---|---|---|");
    let base = summaries.first().cloned().unwrap_or_default();
    for (mode, summaries) in plan.modes.iter().zip(&summaries) {
        println!("{}", row(mode, summaries, &base));
    }
    Ok(())
}

fn parse(arguments: &[&str]) -> Result<Plan, HarnessError> {
    let mut plan = Plan {
        manifest: "docs/examples/straggler-job.yaml".to_owned(),
        modes: list("sync,hybrid,gba,async,hopBs,hopBw,bsp"),
        rounds: 3,
        fast: 6,
        slow: 2,
        cores: 0.16,
        factor: 4.0,
        sets: Vec::new(),
    };
    for pair in arguments.chunks(2) {
        match pair {
            ["--manifest", file] => plan.manifest = (*file).to_owned(),
            ["--modes", modes] => plan.modes = list(modes),
            ["--rounds", rounds] => plan.rounds = number(rounds, USAGE)?,
            ["--fast", workers] => plan.fast = number(workers, USAGE)?,
            ["--slow", workers] => plan.slow = number(workers, USAGE)?,
            ["--cores", cores] => plan.cores = number(cores, USAGE)?,
            ["--factor", factor] => plan.factor = number(factor, USAGE)?,
            ["--set", set] => plan.sets.push((*set).to_owned()),
            _ => return Err(HarnessError::Usage(USAGE)),
        }
    }
    Ok(plan)
}

fn train(plan: &Plan, mode: &str) -> Result<Value, HarnessError> {
    let workers = plan.fast + plan.slow;
    let own = format!("spec.training.mode={mode},spec.roles.denseWorker.replicas={workers}");
    let mut job = job(&plan.manifest, std::iter::once(&own).chain(&plan.sets))?;
    job.arg("--processes");
    for worker in 0..workers {
        let cores = if worker < plan.fast { plan.cores } else { plan.cores / plan.factor };
        job.arg("--cpus").arg(format!("denseWorker-{worker}={cores}"));
    }
    rectrain_harness::rectrain::train(job)
}

fn row(mode: &str, summaries: &[Value], base: &[Value]) -> String {
    let of =
        |name: &str| summaries.iter().map(|summary| summary[name].as_f64().unwrap_or(f64::NAN)).collect::<Vec<_>>();
    let speeds = of("samplesPerSecond");
    let base = base.iter().map(|summary| summary["samplesPerSecond"].as_f64().unwrap_or(f64::NAN));
    let ratios: Vec<f64> = speeds.iter().zip(base).map(|(speed, base)| speed / base).collect();
    let (low, high) = range(&ratios);
    format!(
        "| {mode} | {:.0} | {:.2} ({low:.2} to {high:.2}) | {:.2} | {:.0} | {:.0} | {:.0} |",
        median(speeds),
        median(ratios),
        median(of("meanStaleness")),
        median(of("maxStaleness")),
        median(of("droppedBatches")),
        median(of("excludedGradients"))
    )
}

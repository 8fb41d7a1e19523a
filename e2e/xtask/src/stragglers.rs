//! Real runs in many processes with dense workers of unequal CPU time (cgroups, so Linux and root), in every training mode in
//! turn, several rounds: throughput, staleness and dropped batches as in GBA's tables 5.2 and 5.3. The ratios are of one
//! session, and each of one round, because machines are noisy.

use serde_json::Value;

use crate::median;

const USAGE: &str = "usage: cargo xtask stragglers [--manifest FILE] [--modes a,b] [--rounds 3] [--fast 6] [--slow 2] [--cores 0.16] [--factor 4] [--set PATH=VALUE]
  FAST + SLOW dense workers; a fast one gets CORES cores, a slow one CORES / FACTOR";

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

pub(crate) fn run(arguments: &[&str]) -> Result<(), String> {
    let plan = parse(arguments)?;
    crate::cargo(&["build", "--release", "--workspace", "--bins", "--tests"], "the build failed")?;
    let mut summaries: Vec<Vec<Value>> = vec![Vec::new(); plan.modes.len()];
    for round in 0..plan.rounds {
        for (mode, summaries) in plan.modes.iter().zip(&mut summaries) {
            let summary = train(&plan, mode)?;
            println!(
                "{}",
                serde_json::json!({ "round": round, "mode": mode, "samplesPerSecond": summary["samplesPerSecond"],
                    "meanStaleness": summary["meanStaleness"], "maxStaleness": summary["maxStaleness"],
                    "droppedBatches": summary["droppedBatches"], "excludedGradients": summary["excludedGradients"],
                    "trainedRows": summary["trainedRows"] })
            );
            summaries.push(summary);
        }
    }
    println!(
        "\n| mode | samples/s: median | × sync: median (min to max) | staleness: mean | max | batches dropped | gradients left out |"
    );
    println!("|---|---|---|---|---|---|---|");
    let base = summaries.first().cloned().unwrap_or_default();
    for (mode, summaries) in plan.modes.iter().zip(&summaries) {
        println!("{}", row(mode, summaries, &base));
    }
    Ok(())
}

fn parse(arguments: &[&str]) -> Result<Plan, String> {
    let mut plan = Plan {
        manifest: "docs/examples/straggler-job.yaml".to_owned(),
        modes: crate::list("sync,hybrid,gba,async,hopBs,hopBw,bsp"),
        rounds: 3,
        fast: 6,
        slow: 2,
        cores: 0.16,
        factor: 4.0,
        sets: Vec::new(),
    };
    let wrong = |_| USAGE.to_owned();
    for pair in arguments.chunks(2) {
        match pair {
            ["--manifest", file] => plan.manifest = (*file).to_owned(),
            ["--modes", modes] => plan.modes = crate::list(modes),
            ["--rounds", rounds] => plan.rounds = rounds.parse().map_err(|_| USAGE.to_owned())?,
            ["--fast", workers] => plan.fast = workers.parse().map_err(|_| USAGE.to_owned())?,
            ["--slow", workers] => plan.slow = workers.parse().map_err(|_| USAGE.to_owned())?,
            ["--cores", cores] => plan.cores = cores.parse().map_err(wrong)?,
            ["--factor", factor] => plan.factor = factor.parse().map_err(wrong)?,
            ["--set", set] => plan.sets.push((*set).to_owned()),
            _ => return Err(USAGE.to_owned()),
        }
    }
    Ok(plan)
}

fn train(plan: &Plan, mode: &str) -> Result<Value, String> {
    let workers = plan.fast + plan.slow;
    let own = format!("spec.training.mode={mode},spec.roles.denseWorker.replicas={workers}");
    let mut job = crate::job(&plan.manifest, std::iter::once(&own).chain(&plan.sets))?;
    job.arg("--processes");
    for worker in 0..workers {
        let cores = if worker < plan.fast { plan.cores } else { plan.cores / plan.factor };
        job.arg("--cpus").arg(format!("denseWorker-{worker}={cores}"));
    }
    crate::last_event(&crate::output(job)?)
}

fn row(mode: &str, summaries: &[Value], base: &[Value]) -> String {
    let of =
        |name: &str| summaries.iter().map(|summary| summary[name].as_f64().unwrap_or(f64::NAN)).collect::<Vec<_>>();
    let speeds = of("samplesPerSecond");
    let base = base.iter().map(|summary| summary["samplesPerSecond"].as_f64().unwrap_or(f64::NAN));
    let ratios: Vec<f64> = speeds.iter().zip(base).map(|(speed, base)| speed / base).collect();
    let (low, high) = crate::range(&ratios);
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

//! `cargo xtask workers`: trains one job with several numbers of dense workers, with a barrier,
//! without one, and switched ten times. The global batch is the same, so the test AUC must be the
//! same within the noise of the seeds.

use rectrain_harness::HarnessError;
use rectrain_harness::arguments::{list, number};
use rectrain_harness::cargo::build_programs;
use rectrain_harness::events::test_auc;
use rectrain_harness::rectrain::{job, train};
use rectrain_harness::statistics::{deviation, mean, range};
use serde_json::json;

use crate::TrialError;
use crate::error::unmet;

const USAGE: &str = "usage: cargo xtask workers --manifest FILE [--path DATA] [--workers 1,4,16] [--switch-every STEPS] \
[--seeds 1,2,3,4,5] [--set PATH=VALUE]
  Prints one line of JSON for each run, and a table. DATA replaces spec.data.source.paths. A switched run changes
  between sync and gba ten times, every STEPS (20) steps. Fails if a case's mean AUC is outside the noise of the seeds.";

/// Switches of a switched run.
const SWITCHES: u64 = 10;
/// The most standard errors between two means that count as noise.
const MOST_ERRORS: f64 = 4.0;

#[derive(Debug)]
struct Plan {
    manifest: String,
    sets: Vec<String>,
    workers: Vec<String>,
    seeds: Vec<String>,
    switch_every: u64,
}

/// One way to train the job, and its test AUC with each seed.
struct Case {
    name: String,
    aucs: Vec<f64>,
}

/// Runs the trial with the arguments of the command line.
///
/// # Errors
/// Wrong arguments; a run that fails; a case whose AUC is outside the noise.
pub fn run(arguments: &[&str]) -> Result<(), TrialError> {
    let plan = parse(arguments)?;
    build_programs()?;
    let mut cases = Vec::new();
    for workers in &plan.workers {
        for (mode, sets) in ways(plan.switch_every) {
            cases.push(case(&plan, workers, mode, &sets)?);
        }
    }
    println!("| case | test AUC: mean (min to max) |\n|---|---|");
    for case in &cases {
        let (low, high) = range(&case.aucs);
        println!("| {} | {:.4} ({low:.4} to {high:.4}) |", case.name, mean(case.aucs.iter().copied()));
    }
    judge(&cases)
}

fn parse(arguments: &[&str]) -> Result<Plan, HarnessError> {
    let mut plan = Plan {
        manifest: String::new(),
        sets: Vec::new(),
        workers: list("1,4,16"),
        seeds: list("1,2,3,4,5"),
        switch_every: 20,
    };
    for pair in arguments.chunks(2) {
        match pair {
            ["--manifest", file] => plan.manifest = (*file).to_owned(),
            ["--path", path] => plan.sets.push(format!("spec.data.source.paths={{{path}}}")),
            ["--workers", workers] => plan.workers = list(workers),
            ["--seeds", seeds] => plan.seeds = list(seeds),
            ["--switch-every", steps] => plan.switch_every = number(steps, USAGE)?,
            ["--set", set] => plan.sets.push((*set).to_owned()),
            _ => return Err(HarnessError::Usage(USAGE)),
        }
    }
    if plan.manifest.is_empty() { Err(HarnessError::Usage(USAGE)) } else { Ok(plan) }
}

/// The overrides of the mode, for each way to train.
fn ways(switch_every: u64) -> [(&'static str, Vec<String>); 3] {
    let in_mode = |mode: &str| vec![format!("spec.training.mode={mode}")];
    let switches = (0..SWITCHES).flat_map(|place| {
        let (at, step) = (format!("spec.training.switchAt[{place}]"), (place + 1) * switch_every);
        let mode = if place % 2 == 0 { "gba" } else { "sync" };
        [format!("{at}.step={step}"), format!("{at}.mode={mode}")]
    });
    let switched = in_mode("sync").into_iter().chain(switches).collect();
    [("sync", in_mode("sync")), ("gba", in_mode("gba")), ("switched", switched)]
}

/// Trains with every seed.
fn case(plan: &Plan, workers: &str, mode: &str, sets: &[String]) -> Result<Case, TrialError> {
    let name = format!("{mode}, {workers} dense workers");
    let mut aucs = Vec::new();
    for seed in &plan.seeds {
        let own = [format!("spec.roles.denseWorker.replicas={workers}"), format!("spec.training.seed={seed}")];
        let summary = train(job(&plan.manifest, plan.sets.iter().chain(sets).chain(&own))?)?;
        if mode == "switched" && summary["modeSwitches"] != SWITCHES {
            return Err(unmet(format!("{SWITCHES} switches; lower --switch-every"), &summary["modeSwitches"]));
        }
        let auc = test_auc(&summary)?;
        println!(
            "{}",
            json!({ "case": name, "seed": seed, "auc": auc, "parametersSha256": summary["parametersSha256"] })
        );
        aucs.push(auc);
    }
    Ok(Case { name, aucs })
}

/// Compares every case with the first one.
fn judge(cases: &[Case]) -> Result<(), TrialError> {
    let Some((first, others)) = cases.split_first() else { return Ok(()) };
    for other in others {
        let errors = standard_errors(&first.aucs, &other.aucs);
        if errors > MOST_ERRORS || errors.is_nan() {
            let expected =
                format!("the AUC of `{}` within {MOST_ERRORS} standard errors of `{}`", other.name, first.name);
            return Err(unmet(expected, format!("{errors:.1} standard errors")));
        }
    }
    Ok(())
}

/// The distance of two means, in standard errors of that distance.
fn standard_errors(one: &[f64], other: &[f64]) -> f64 {
    let variance = |values: &[f64]| deviation(values).powi(2) / values.len() as f64;
    let distance = (mean(one.iter().copied()) - mean(other.iter().copied())).abs();
    // Equal values have no noise. A distance beyond rounding is then infinitely far.
    if distance < 1e-6 { 0.0 } else { distance / (variance(one) + variance(other)).sqrt() }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn case(name: &str, aucs: [f64; 3]) -> Case {
        Case { name: name.to_owned(), aucs: aucs.to_vec() }
    }

    #[test]
    fn a_mean_outside_the_noise_of_the_seeds_is_named() {
        let [one, near, far] = [
            case("one", [0.700, 0.702, 0.704]),
            case("near", [0.701, 0.703, 0.706]),
            case("far", [0.680, 0.682, 0.684]),
        ];
        assert!(judge(&[one, near]).is_ok());
        let error = judge(&[case("one", [0.700, 0.702, 0.704]), far]).expect_err("it is outside").to_string();
        assert!(error.contains("`far`") && error.contains("standard errors"), "{error}");
    }

    #[test]
    fn a_switched_run_has_ten_switches_and_ends_in_sync() {
        let [.., (_, switched)] = ways(20);
        assert_eq!(switched.len(), 1 + 2 * SWITCHES as usize);
        assert_eq!(switched[19..], ["spec.training.switchAt[9].step=200", "spec.training.switchAt[9].mode=sync"]);
    }

    #[test]
    fn arguments_are_pairs_and_the_manifest_is_required() {
        assert!(matches!(parse(&["--workers", "1"]), Err(HarnessError::Usage(_))));
        assert!(matches!(parse(&["--manifest"]), Err(HarnessError::Usage(_))));
        assert_eq!(parse(&["--manifest", "a.yaml", "--workers", "1,2"]).expect("valid").workers, ["1", "2"]);
    }
}

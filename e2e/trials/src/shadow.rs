//! `cargo xtask shadow`: the mode `shadow` as ShadowSync (Zheng et al. 2020) measures it in §4.1.
//!
//! - Throughput with 1, 2 and 4 dense workers, for `shadow`, its foreground form with k = 5, and
//!   `sync`. Each worker is a process with limited CPU time, so this part needs Linux and root.
//! - Normalized entropy (NE) on training and test rows of S-EASGD, S-MA, S-BMUF, of their
//!   foreground forms FR-* for several k, and of `sync`, over several seeds.

use rectrain_harness::HarnessError;
use rectrain_harness::arguments::{list, number, without_quick};
use rectrain_harness::cargo::build_programs;
use rectrain_harness::events::{missing, parse as parse_json, summary};
use rectrain_harness::rectrain::{job, run as run_job, train};
use rectrain_harness::statistics::{mean, median};
use serde_json::{Value, json};

use crate::TrialError;

const USAGE: &str =
    "usage: cargo xtask shadow [--quick] [--manifest FILE] [--path DATA] [--workers 1,2,4] [--cores 0.25] \
[--rounds 3] [--gaps 5,10,30,100] [--seeds 1,2,3] [--local 512] [--set PATH=VALUE]
  Prints samples a second by the number of dense workers, each with CORES cores (Linux, root), and NE by algorithm.
  DATA replaces spec.data.source.paths. A worker's batch has LOCAL rows, so the global batch grows with the workers.
  The NE on training rows needs data that is read once. --quick: synthetic data, one round, one seed, two gaps.";

const MANIFEST: &str = "docs/examples/shadow.yaml";
const ALGORITHMS: [&str; 3] = ["easgd", "ma", "bmuf"];
/// The foreground form whose throughput is measured (§4.1.2).
const FOREGROUND_GAP: &str = "5";
/// Dense workers of the runs whose NE is measured.
const NE_WORKERS: u64 = 4;

#[derive(Debug)]
struct Plan {
    manifest: String,
    sets: Vec<String>,
    workers: Vec<u64>,
    cores: f64,
    rounds: usize,
    gaps: Vec<String>,
    seeds: Vec<String>,
    local: u64,
}

/// A way to train, by its name in the tables.
struct Way {
    name: String,
    sets: Vec<String>,
}

/// Runs the trial with the arguments of the command line.
///
/// # Errors
/// Wrong arguments; a run that fails.
pub fn run(arguments: &[&str]) -> Result<(), TrialError> {
    let plan = parse(arguments)?;
    build_programs()?;
    print_speeds(&plan)?;
    print_entropies(&plan)
}

fn parse(arguments: &[&str]) -> Result<Plan, HarnessError> {
    let (is_quick, pairs) = without_quick(arguments);
    let mut plan = if is_quick { quick() } else { full() };
    for pair in pairs.chunks(2) {
        match pair {
            ["--manifest", file] => plan.manifest = (*file).to_owned(),
            ["--path", path] => plan.sets.push(format!("spec.data.source.paths={{{path}}}")),
            ["--workers", workers] => plan.workers = numbers(workers)?,
            ["--cores", cores] => plan.cores = number(cores, USAGE)?,
            ["--rounds", rounds] => plan.rounds = number(rounds, USAGE)?,
            ["--gaps", gaps] => plan.gaps = list(gaps),
            ["--seeds", seeds] => plan.seeds = list(seeds),
            ["--local", rows] => plan.local = number(rows, USAGE)?,
            ["--set", set] => plan.sets.push((*set).to_owned()),
            _ => return Err(HarnessError::Usage(USAGE)),
        }
    }
    Ok(plan)
}

fn full() -> Plan {
    Plan {
        manifest: MANIFEST.to_owned(),
        sets: Vec::new(),
        workers: vec![1, 2, 4],
        cores: 0.25,
        rounds: 3,
        gaps: list("5,10,30,100"),
        seeds: list("1,2,3"),
        local: 512,
    }
}

fn quick() -> Plan {
    Plan {
        sets: vec!["spec.data.synthetic.rows=65536".to_owned()],
        workers: vec![1, 2],
        rounds: 1,
        gaps: list("5,30"),
        seeds: list("1"),
        ..full()
    }
}

fn numbers(text: &str) -> Result<Vec<u64>, HarnessError> {
    list(text).iter().map(|part| number(part, USAGE)).collect()
}

fn sync() -> Way {
    Way { name: "sync".to_owned(), sets: vec!["spec.training.mode=sync".to_owned()] }
}

/// `shadow` in the background, or with `gap` in the foreground.
fn shadow(algorithm: &str, gap: Option<&str>) -> Way {
    let upper = algorithm.to_uppercase();
    let mut sets = vec!["spec.training.mode=shadow".to_owned(), format!("spec.training.shadow.algorithm={algorithm}")];
    sets.extend(gap.map(|gap| format!("spec.training.shadow.everySteps={gap}")));
    Way { name: gap.map_or_else(|| format!("S-{upper}"), |gap| format!("FR-{upper}-{gap}")), sets }
}

/// The overrides of the number of dense workers. Each worker's batch has the same size.
fn sizes(plan: &Plan, workers: u64) -> [String; 3] {
    [
        format!("spec.roles.denseWorker.replicas={workers}"),
        format!("spec.training.localBatchSize={}", plan.local),
        format!("spec.training.globalBatchSize={}", plan.local * workers),
    ]
}

/// Prints the throughput by the number of workers. All ways run in turn, for several rounds.
fn print_speeds(plan: &Plan) -> Result<(), TrialError> {
    let ways = [shadow("easgd", None), shadow("easgd", Some(FOREGROUND_GAP)), sync()];
    let mut rows = Vec::new();
    for way in &ways {
        let mut speeds = vec![Vec::new(); plan.workers.len()];
        for round in 0..plan.rounds {
            for (workers, speeds) in plan.workers.iter().zip(&mut speeds) {
                let (speed, gap) = speed(plan, way, *workers)?;
                println!(
                    "{}",
                    json!({ "way": way.name, "workers": workers, "round": round, "samplesPerSecond": speed,
                        "averageSyncGap": gap })
                );
                speeds.push(speed);
            }
        }
        rows.push(speed_row(&way.name, &plan.workers, speeds.into_iter().map(median)));
    }
    let names: Vec<String> = plan.workers.iter().map(|workers| format!("{workers} workers")).collect();
    println!("\n| samples/s (share of linear) | {} |\n|---|{}", names.join(" | "), "---|".repeat(names.len()));
    println!("{}\n", rows.join("\n"));
    Ok(())
}

/// Samples a second of a job in processes with CPU limits, and its average sync gap.
fn speed(plan: &Plan, way: &Way, workers: u64) -> Result<(f64, Value), HarnessError> {
    let sizes = sizes(plan, workers);
    let mut job = job(&plan.manifest, plan.sets.iter().chain(&way.sets).chain(&sizes))?;
    job.arg("--processes");
    for worker in 0..workers {
        job.arg("--cpus").arg(format!("denseWorker-{worker}={}", plan.cores));
    }
    let summary = train(job)?;
    let speed = float(&summary, &summary["samplesPerSecond"], "samplesPerSecond")?;
    Ok((speed, summary["averageSyncGap"].clone()))
}

/// A row of the table: each speed, and its share of the first one's multiple.
fn speed_row(name: &str, workers: &[u64], speeds: impl IntoIterator<Item = f64>) -> String {
    let mut one = None;
    let cells = workers.iter().zip(speeds).map(|(workers, speed)| {
        let one = *one.get_or_insert(speed / *workers as f64);
        format!("{speed:.0} ({:.2})", speed / (one * *workers as f64))
    });
    format!("| {name} | {} |", cells.collect::<Vec<_>>().join(" | "))
}

/// The ways whose NE is compared.
fn ways(gaps: &[String]) -> Vec<Way> {
    let of = |algorithm: &&str| {
        let foreground = gaps.iter().map(|gap| shadow(algorithm, Some(gap.as_str())));
        std::iter::once(shadow(algorithm, None)).chain(foreground).collect::<Vec<_>>()
    };
    ALGORITHMS.iter().flat_map(of).chain([sync()]).collect()
}

fn print_entropies(plan: &Plan) -> Result<(), TrialError> {
    let mut rows = Vec::new();
    for way in ways(&plan.gaps) {
        let runs: Result<Vec<Entropy>, HarnessError> =
            plan.seeds.iter().map(|seed| entropy(plan, &way, seed)).collect();
        let runs = runs?;
        let of = |figure: fn(&Entropy) -> f64| mean(runs.iter().map(figure));
        let (train, test) = (of(|run| run.train), of(|run| run.test));
        rows.push(format!("| {} | {} | {train:.5} | {test:.5} |", way.name, mean_gap(&runs)));
    }
    println!("\n| {NE_WORKERS} workers | average sync gap | train NE | test NE |\n|---|---|---|---|");
    println!("{}", rows.join("\n"));
    Ok(())
}

/// The mean of the average sync gaps. A dash for a way without exchanges.
fn mean_gap(runs: &[Entropy]) -> String {
    let gaps: Vec<f64> = runs.iter().filter_map(|run| run.gap).collect();
    if gaps.is_empty() { "–".to_owned() } else { format!("{:.2}", mean(gaps.into_iter())) }
}

/// The figures of a run.
struct Entropy {
    train: f64,
    test: f64,
    gap: Option<f64>,
}

fn entropy(plan: &Plan, way: &Way, seed: &str) -> Result<Entropy, HarnessError> {
    let own = [format!("spec.training.seed={seed}")];
    let sizes = sizes(plan, NE_WORKERS);
    let output = run_job(job(&plan.manifest, plan.sets.iter().chain(&way.sets).chain(&sizes).chain(&own))?)?;
    let summary = summary(&output)?;
    let printed = String::from_utf8_lossy(&output.stdout);
    let events: Result<Vec<Value>, HarnessError> =
        printed.lines().map(|line| parse_json("an event of the run", line)).collect();
    let found = read_entropy(&events?, &summary)?;
    println!(
        "{}",
        json!({ "way": way.name, "seed": seed, "trainNe": found.train, "testNe": found.test,
            "averageSyncGap": found.gap, "auc": summary["test"]["auc"] })
    );
    Ok(found)
}

/// NE is the log loss over the entropy of the labels. The test's figures give this entropy. The
/// loss on training rows is from before their update (§4): the mean over the events of progress, by
/// samples.
fn read_entropy(events: &[Value], summary: &Value) -> Result<Entropy, HarnessError> {
    let test = &summary["test"];
    let ne = float(summary, &test["normalizedEntropy"], "test.normalizedEntropy")?;
    let of_labels = float(summary, &test["logLoss"], "test.logLoss")? / ne;
    let loss = mean_loss(events).ok_or_else(|| missing("the run", summary, "an event of progress"))?;
    Ok(Entropy { train: loss / of_labels, test: ne, gap: summary["averageSyncGap"].as_f64() })
}

/// The mean loss over the events of progress, by their new samples. `None` without an event.
fn mean_loss(events: &[Value]) -> Option<f64> {
    let (mut before, mut sum, mut samples) = (0.0, 0.0, 0.0);
    for event in events.iter().filter(|event| event["event"] == "progress") {
        let (Some(until), Some(loss)) = (event["samples"].as_f64(), event["loss"].as_f64()) else { continue };
        sum += loss * (until - before);
        samples += until - before;
        before = until;
    }
    (samples > 0.0).then(|| sum / samples)
}

fn float(document: &Value, value: &Value, field: &str) -> Result<f64, HarnessError> {
    value.as_f64().ok_or_else(|| missing("the summary", document, field))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_algorithm_has_its_background_and_foreground_forms() {
        let names: Vec<String> = ways(&list("5,30")).into_iter().map(|way| way.name).collect();
        assert_eq!(
            names.join(" "),
            "S-EASGD FR-EASGD-5 FR-EASGD-30 S-MA FR-MA-5 FR-MA-30 S-BMUF FR-BMUF-5 FR-BMUF-30 sync"
        );
        let way = shadow("ma", Some("5"));
        assert_eq!(way.sets[1..], ["spec.training.shadow.algorithm=ma", "spec.training.shadow.everySteps=5"]);
    }

    #[test]
    fn arguments_change_the_full_and_the_quick_form() {
        let plan = parse(&["--quick", "--workers", "1,8"]).expect("valid");
        assert_eq!((plan.workers, plan.seeds, plan.gaps), (vec![1, 8], list("1"), list("5,30")));
        assert_eq!(parse(&[]).expect("valid").gaps, ["5", "10", "30", "100"]);
        for wrong in [&["--workers", "many"][..], &["--manifest"], &["--slow", "1"]] {
            assert!(matches!(parse(wrong), Err(HarnessError::Usage(_))), "{wrong:?}");
        }
    }

    #[test]
    fn speeds_are_shares_of_linear_growth() {
        assert_eq!(
            speed_row("sync", &[1, 2, 4], [100.0, 200.0, 300.0]),
            "| sync | 100 (1.00) | 200 (1.00) | 300 (0.75) |"
        );
    }

    #[test]
    fn the_train_ne_weighs_losses_by_samples() {
        let progress = |samples: u64, loss: f64| json!({ "event": "progress", "samples": samples, "loss": loss });
        let events = [progress(100, 0.6), json!({ "event": "evaluation" }), progress(400, 0.4)];
        let summary = json!({ "test": { "logLoss": 0.45, "normalizedEntropy": 0.9 }, "averageSyncGap": 2.5 });
        let found = read_entropy(&events, &summary).expect("complete");
        // The labels have an entropy of 0.5, and the mean loss is 0.45.
        assert!((found.train - 0.9).abs() < 1e-12 && (found.test - 0.9).abs() < 1e-12 && found.gap == Some(2.5));
        let error = read_entropy(&[], &summary).err().expect("no loss").to_string();
        assert!(error.contains("progress"), "{error}");
    }
}

//! `cargo xtask stream throughput`: the throughput of a job from Kafka, beside the same rows in a
//! CSV file. The two take turns, so that a slow hour of the machine hits both.

use std::fmt::Write as _;
use std::path::Path;

use rectrain_harness::arguments::number;
use rectrain_harness::cargo::build_programs;
use rectrain_harness::events::missing;
use rectrain_harness::kafka::Broker;
use rectrain_harness::rectrain::{job, replay, train};
use rectrain_harness::statistics::median;
use rectrain_harness::{HarnessError, files};
use rectrain_random::SplitMix64;
use serde_json::{Value, json};

use super::{TOPIC, USAGE};
use crate::TrialError;
use crate::error::unmet;

/// The least throughput from Kafka, as a share of the throughput from the file.
const LEAST_SHARE: f64 = 0.8;
/// `rectrain data replay` writes blocks of this many rows to the partitions in turn. With as many
/// rows a step, the job trains them in the order of the file.
const BATCH: u64 = 1_000;

struct Plan {
    rows: u64,
    rounds: u64,
    sets: Vec<String>,
}

/// A run of the job.
struct Run {
    samples_per_second: f64,
    model: Value,
}

/// Runs the trial with the arguments of the command line.
///
/// # Errors
/// Wrong arguments; a run that fails; different models; too low a throughput from Kafka.
pub(super) fn run(arguments: &[&str]) -> Result<(), TrialError> {
    let plan = parse(arguments)?;
    build_programs()?;
    let folder = files::temporary_folder("stream");
    let compared = compare(&plan, &folder);
    files::remove_folder(&folder)?;
    compared
}

fn parse(arguments: &[&str]) -> Result<Plan, HarnessError> {
    let mut plan = Plan { rows: 1_000_000, rounds: 3, sets: Vec::new() };
    for pair in arguments.chunks(2) {
        match pair {
            ["--rows", rows] => plan.rows = number(rows, USAGE)?,
            ["--rounds", rounds] => plan.rounds = number(rounds, USAGE)?,
            ["--set", set] => plan.sets.push((*set).to_owned()),
            _ => return Err(HarnessError::Usage(USAGE)),
        }
    }
    if plan.rows < BATCH || plan.rounds == 0 { Err(HarnessError::Usage(USAGE)) } else { Ok(plan) }
}

/// Trains from both sources in turns, and prints each run.
fn compare(plan: &Plan, folder: &Path) -> Result<(), TrialError> {
    let (rows, manifest) = (folder.join("rows.csv"), folder.join("job.yaml"));
    files::write(&rows, csv(plan.rows.next_multiple_of(BATCH)))?;
    let (rows, manifest_path) = (rows.display().to_string(), manifest.display().to_string());
    files::write(&manifest, manifest_of(&rows))?;
    let broker = Broker::start("")?;
    replay(&rows, &format!("kafka://{}/{TOPIC}", broker.address))?;
    let kafka = format!("spec.data.format=null,{}", broker.source(TOPIC));
    let (mut from_file, mut from_kafka) = (Vec::new(), Vec::new());
    for round in 0..plan.rounds {
        let file = train_once(plan, &manifest_path, ("csv", None), round)?;
        let stream = train_once(plan, &manifest_path, ("kafka", Some(&kafka)), round)?;
        if file.model != stream.model {
            return Err(unmet("one model of the same rows", "another model from Kafka than from the file"));
        }
        from_file.push(file.samples_per_second);
        from_kafka.push(stream.samples_per_second);
    }
    report(from_file, from_kafka)
}

fn train_once(
    plan: &Plan,
    manifest: &str,
    (name, source): (&str, Option<&String>),
    round: u64,
) -> Result<Run, HarnessError> {
    let summary = train(job(manifest, source.into_iter().chain(&plan.sets))?)?;
    let speed = summary["samplesPerSecond"].as_f64();
    let speed = speed.ok_or_else(|| missing("the summary", &summary, "samplesPerSecond"))?;
    println!("{}", json!({ "source": name, "round": round, "samplesPerSecond": speed, "samples": summary["samples"] }));
    Ok(Run { samples_per_second: speed, model: summary["parametersSha256"].clone() })
}

/// Prints the medians, and compares them.
fn report(from_file: Vec<f64>, from_kafka: Vec<f64>) -> Result<(), TrialError> {
    let (file, kafka) = (median(from_file), median(from_kafka));
    let share = kafka / file;
    println!("{}", json!({ "csv": file, "kafka": kafka, "share": share, "modelsEqual": true }));
    if share >= LEAST_SHARE {
        return Ok(());
    }
    Err(unmet(format!("at least {LEAST_SHARE} of the throughput from CSV"), format!("{share:.3}")))
}

/// Rows of clicks by users, items and ages. Small ids are frequent.
fn csv(rows: u64) -> String {
    let mut random = SplitMix64::new(7);
    let mut text = "label,user,item,age\n".to_owned();
    for _ in 0..rows {
        let mut id = |ids: u64| (random.unit() * random.unit() * ids as f64) as u64;
        let (user, item, age) = (id(50_000), id(5_000), id(80));
        let label = u64::from(random.remainder(10) < 2 + (user + item) % 4);
        // A text takes every write.
        let _written = writeln!(text, "{label},{user},{item},{age}");
    }
    text
}

fn manifest_of(rows: &str) -> String {
    format!(
        "apiVersion: rectrain.dev/v1alpha1
kind: RecTrainingJob
metadata: {{name: throughput}}
spec:
  model: {{kind: deepfm, embeddingDim: 8, hidden: [16]}}
  features:
    sparse: [{{name: user}}, {{name: item}}]
    dense: [{{name: age, transform: log1p}}]
  data: {{train: {{paths: ['{rows}']}}, format: csv}}
  training: {{mode: sync, globalBatchSize: {BATCH}}}
"
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn arguments_change_the_rows_and_the_rounds() {
        let plan = parse(&["--rows", "5000", "--rounds", "1", "--set", "spec.training.mode=gba"]).unwrap();
        assert_eq!((plan.rows, plan.rounds, plan.sets.len()), (5_000, 1, 1));
        for wrong in [&["--rows", "few"][..], &["--rows", "10"], &["--rounds", "0"], &["--rows"], &["--other", "1"]] {
            assert!(matches!(parse(wrong), Err(HarnessError::Usage(_))), "{wrong:?}");
        }
    }

    #[test]
    fn the_rows_are_the_same_in_every_trial() {
        let text = csv(1_000);
        assert_eq!(text, csv(1_000));
        let labels = text.lines().skip(1).filter(|line| line.starts_with('1')).count();
        assert!(text.lines().count() == 1_001 && (250..450).contains(&labels), "{labels} positives");
    }

    #[test]
    fn too_low_a_throughput_fails() {
        assert!(report(vec![100.0, 90.0, 110.0], vec![80.0, 85.0, 95.0]).is_ok());
        let error = report(vec![100.0], vec![79.0]).unwrap_err().to_string();
        assert!(error.contains("0.8") && error.contains("0.790"), "{error}");
    }
}

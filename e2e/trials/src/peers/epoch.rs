//! `cargo xtask peers --work epoch`: the road from a file to a test AUC, as whole processes. Every
//! system starts, reads its rows, trains the DLRM of `e2e/peers/epoch.yaml` for one epoch, and
//! tests it. Rectrain runs in `sync` and in `hybrid`. `sync` is the mode to compare with the peers,
//! which are synchronous too.

use std::path::{Path, PathBuf};
use std::process::Command;

use rectrain_harness::command::{command, visible};
use rectrain_harness::events::{missing, summary};
use rectrain_harness::rectrain::job;
use rectrain_harness::statistics::median;
use rectrain_harness::workspace::{built, cache, workspace};
use rectrain_harness::{HarnessError, files, say};
use serde_json::{Value, json};

use super::{FOLDER, PRECISIONS, Plan, TORCH, environment_of, install, precision_of, ratio};

/// The modes in which Rectrain runs.
const MODES: [&str; 2] = ["sync", "hybrid"];
/// Rows of a batch, as in `e2e/peers/work.py`.
const BATCH: u64 = 4096;
/// Different ids of each of the 26 columns: the rows of a peer's table.
const VOCABULARY: u64 = 2_000_000 / 26;

/// The peers, with the formats that they read.
const PEERS: [(&str, &[&str]); 8] = [
    ("torch", &["parquet", "tsv"]),
    ("torch-bf16", &["parquet", "tsv"]),
    ("torchrec", &["parquet", "tsv"]),
    ("torchrec-bf16", &["parquet", "tsv"]),
    ("torchrec-workers", &["parquet", "tsv"]),
    ("torchrec-workers-bf16", &["parquet", "tsv"]),
    ("tensorflow", &["tsv"]),
    ("tensorflow-xla", &["tsv"]),
];

/// The arguments that only this work has.
pub(super) struct Options {
    pub(super) formats: Vec<String>,
    /// Training batches of a file.
    pub(super) batches: u64,
    /// The peers to run; all without it.
    pub(super) peers: Option<Vec<String>>,
}

impl Default for Options {
    fn default() -> Self {
        Self { formats: vec!["parquet".to_owned(), "tsv".to_owned()], batches: 300, peers: None }
    }
}

impl Options {
    pub(super) fn is_valid(&self) -> bool {
        let known = |name: &String| PEERS.iter().any(|(peer, _)| peer == name);
        let are_formats = self.formats.iter().all(|format| ["parquet", "tsv"].contains(&format.as_str()));
        self.batches > 0 && are_formats && self.peers.as_ref().is_none_or(|peers| peers.iter().all(known))
    }

    /// The chosen peers that read a format.
    fn peers(&self, format: &str) -> Vec<&'static str> {
        let is_chosen = |name: &str| self.peers.as_ref().is_none_or(|peers| peers.iter().any(|peer| peer == name));
        let chosen = PEERS.iter().filter(|(name, formats)| formats.contains(&format) && is_chosen(name));
        chosen.map(|(name, _)| *name).collect()
    }

    /// Training rows.
    fn rows(&self) -> u64 {
        self.batches * BATCH
    }
}

/// Training and test rows in one format.
struct Files {
    train: PathBuf,
    test: PathBuf,
}

/// A system in one precision. Its command runs a whole process.
struct System {
    /// A peer, or a mode of Rectrain.
    name: String,
    precision: &'static str,
    is_peer: bool,
    command: Command,
}

/// The figures of one run.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Run {
    /// From the start of the process to its end.
    seconds: f64,
    peak_bytes: f64,
    auc: f64,
    /// Without the start of the process and without the test.
    train_seconds: f64,
}

/// Runs Rectrain and the peers in turns on each format; returns the ratios of their speeds.
pub(super) fn compare(plan: &Plan) -> Result<Vec<Value>, HarnessError> {
    let python = install(&TORCH)?;
    let folder = cache()?.join(format!("peers-epoch-{}", plan.epoch.batches));
    prepare(&folder, &python, &plan.epoch)?;
    let mut report = Vec::new();
    for format in &plan.epoch.formats {
        let files =
            Files { train: folder.join(format!("train.{format}")), test: folder.join(format!("test.{format}")) };
        report.extend(compare_format(format, &files, plan, &python)?);
    }
    Ok(report)
}

/// Writes the rows of both formats, unless they are there. The test's Parquet file comes last.
fn prepare(folder: &Path, python: &Path, options: &Options) -> Result<(), HarnessError> {
    if folder.join("test.parquet").exists() {
        return Ok(());
    }
    files::make_folder(folder)?;
    let numbers = [options.rows(), test_rows(options.rows()), VOCABULARY].map(|number| number.to_string());
    visible(command(built("examples/write_rows")?, [folder]).args(numbers))?;
    visible(&mut command(python, [script("epoch_data.py").as_path(), folder]))
}

/// A tenth of the training rows, in whole batches.
fn test_rows(rows: u64) -> u64 {
    (rows / 10).next_multiple_of(BATCH)
}

fn script(name: &str) -> PathBuf {
    workspace().join(FOLDER).join(name)
}

fn compare_format(format: &str, files: &Files, plan: &Plan, python: &Path) -> Result<Vec<Value>, HarnessError> {
    let mut systems = own(files, plan, python)?;
    systems.extend(peers(format, files, plan)?);
    let mut runs = vec![Vec::new(); systems.len()];
    for round in 1..=plan.rounds {
        for (system, runs) in systems.iter_mut().zip(&mut runs) {
            let run = run(&mut system.command, plan.epoch.rows())?;
            println!("{}", line(round, format, system, run));
            runs.push(run);
        }
        say(format!("epoch, {format}, round {round} of {}", plan.rounds));
    }
    for (system, runs) in systems.iter().zip(&runs) {
        eprintln!("{}", row(format, system, runs));
    }
    Ok(ratios(format, &systems, &runs, plan.epoch.rows()))
}

/// Rectrain in each mode and precision.
fn own(files: &Files, plan: &Plan, python: &Path) -> Result<Vec<System>, HarnessError> {
    let mut systems = Vec::new();
    for mode in MODES {
        for precision in PRECISIONS {
            let sets = [
                format!("spec.data.train.paths={{{}}}", files.train.display()),
                format!("spec.data.test.paths={{{}}}", files.test.display()),
                format!("spec.training.mode={mode}"),
                format!("spec.training.precision={precision}"),
                format!("spec.roles.denseWorker.threads={}", plan.threads),
            ];
            let command = measured(python, &job(&format!("{FOLDER}/epoch.yaml"), &sets)?);
            systems.push(System { name: mode.to_owned(), precision, is_peer: false, command });
        }
    }
    Ok(systems)
}

fn peers(format: &str, files: &Files, plan: &Plan) -> Result<Vec<System>, HarnessError> {
    let mut systems = Vec::new();
    for peer in plan.epoch.peers(format) {
        let python = install(environment_of(peer))?;
        let name = if peer.starts_with("tensorflow") { "epoch_tensorflow.py" } else { "epoch.py" };
        let mut command = command(&python, [script(name)]);
        command.args(["--peer", peer, "--threads", &plan.threads]);
        command.arg("--train").arg(&files.train).arg("--test").arg(&files.test);
        let precision = PRECISIONS[precision_of(peer)];
        systems.push(System { name: peer.to_owned(), precision, is_peer: true, command: measured(&python, &command) });
    }
    Ok(systems)
}

/// The same command, whose last line then has the figures of its process.
fn measured(python: &Path, inner: &Command) -> Command {
    let mut outer = command(python, [script("measured.py")]);
    outer.arg(inner.get_program()).args(inner.get_args()).current_dir(workspace());
    outer
}

/// Runs a system once. All rows must have been trained.
fn run(command: &mut Command, rows: u64) -> Result<Run, HarnessError> {
    let output = command.output().map_err(HarnessError::io("run", format!("{command:?}")))?;
    let last = summary(&output)?;
    let trained = last["rows"].as_u64().filter(|_| last["peer"].is_string()).or(last["samples"].as_u64());
    if trained != Some(rows) {
        return Err(missing(&format!("{command:?}"), &last, &format!("{rows} trained rows")));
    }
    figures(&last)
}

/// The figures in the last line of a run: a peer's own, or Rectrain's summary.
fn figures(last: &Value) -> Result<Run, HarnessError> {
    let number = |value: &Value, field: &str| value.as_f64().ok_or_else(|| missing("the run's last line", last, field));
    let (auc, train_seconds) = match last["peer"].is_string() {
        true => (&last["auc"], &last["trainSeconds"]),
        false => (&last["test"]["auc"], &last["seconds"]),
    };
    Ok(Run {
        seconds: number(&last["processSeconds"], "processSeconds")?,
        peak_bytes: number(&last["peakBytes"], "peakBytes")?,
        auc: number(auc, "auc")?,
        train_seconds: number(train_seconds, "trainSeconds")?,
    })
}

/// A run as a line of JSON.
fn line(round: usize, format: &str, system: &System, run: Run) -> Value {
    json!({
        "work": "epoch", "round": round, "format": format, "system": shown(system), "precision": system.precision,
        "seconds": run.seconds, "trainSeconds": run.train_seconds, "peakBytes": run.peak_bytes, "auc": run.auc,
    })
}

/// A system's name in reports.
fn shown(system: &System) -> String {
    if system.is_peer { system.name.clone() } else { format!("rectrain {}", system.name) }
}

/// The medians of a system's runs, for people.
fn row(format: &str, system: &System, runs: &[Run]) -> String {
    let (name, precision) = (shown(system), system.precision);
    let [seconds, training, gigabytes, auc] = medians(runs);
    format!(
        "epoch {format:8} {precision} {name:22} {seconds:7.1} s ({training:.1} s of training)   {gigabytes:.2} GB   \
         AUC {auc:.4}"
    )
}

/// The medians of seconds, seconds of training, gigabytes and AUC.
fn medians(runs: &[Run]) -> [f64; 4] {
    let of: [fn(&Run) -> f64; 4] =
        [|run| run.seconds, |run| run.train_seconds, |run| run.peak_bytes / 1e9, |run| run.auc];
    of.map(|figure| median(runs.iter().map(figure).collect()))
}

/// Rectrain's rows a second by a peer's of the same precision and round, for each mode.
fn ratios(format: &str, systems: &[System], runs: &[Vec<Run>], rows: u64) -> Vec<Value> {
    let rates = |runs: &[Run]| runs.iter().map(|run| rows as f64 / run.seconds).collect::<Vec<_>>();
    let all = || systems.iter().zip(runs);
    let mut report = Vec::new();
    for (own, own_runs) in all().filter(|(system, _)| !system.is_peer) {
        for (peer, peer_runs) in all().filter(|(system, _)| system.is_peer && system.precision == own.precision) {
            let work = format!("epoch {format} {} {}", own.name, own.precision);
            let mut ratio = ratio(&work, &peer.name, &rates(own_runs), &rates(peer_runs));
            let ([_, _, own_gigabytes, own_auc], [_, _, gigabytes, auc]) = (medians(own_runs), medians(peer_runs));
            ratio["work"] = json!("epoch");
            ratio["format"] = json!(format);
            ratio["mode"] = json!(own.name);
            ratio["precision"] = json!(own.precision);
            ratio["gigabytes"] = json!([own_gigabytes, gigabytes]);
            ratio["auc"] = json!([own_auc, auc]);
            report.push(ratio);
        }
    }
    report
}

#[cfg(test)]
mod tests {
    use super::*;

    fn system(name: &str, precision: &'static str, is_peer: bool) -> System {
        System { name: name.to_owned(), precision, is_peer, command: Command::new("true") }
    }

    fn after(seconds: f64) -> Run {
        Run { seconds, peak_bytes: 2e9, auc: 0.64, train_seconds: seconds - 1.0 }
    }

    #[test]
    fn a_mode_is_compared_with_the_peers_of_its_precision_in_the_same_round() {
        let systems = [
            system("sync", "fp32", false),
            system("sync", "bf16", false),
            system("torchrec", "fp32", true),
            system("torchrec-bf16", "bf16", true),
        ];
        let runs: Vec<Vec<Run>> =
            [[10.0, 20.0], [5.0, 5.0], [30.0, 40.0], [10.0, 15.0]].map(|seconds| seconds.map(after).to_vec()).to_vec();
        let report = ratios("parquet", &systems, &runs, 1200);
        let found: Vec<_> = report.iter().map(|ratio| (ratio["peer"].clone(), ratio["low"].clone())).collect();
        assert_eq!(found, [(json!("torchrec"), json!(2.0)), (json!("torchrec-bf16"), json!(2.0))]);
        assert_eq!(report[0]["high"], json!(3.0));
        assert_eq!(report[0]["auc"], json!([0.64, 0.64]));
    }

    #[test]
    fn figures_come_from_a_peer_or_from_a_summary() {
        let peer = json!({"peer": "torch", "auc": 0.7, "trainSeconds": 8.0, "processSeconds": 9.0, "peakBytes": 10});
        let summary = json!({"test": {"auc": 0.7}, "seconds": 8.0, "processSeconds": 9.0, "peakBytes": 10});
        let expected = Run { seconds: 9.0, peak_bytes: 10.0, auc: 0.7, train_seconds: 8.0 };
        assert_eq!([figures(&peer).unwrap(), figures(&summary).unwrap()], [expected; 2]);
        let error = figures(&json!({"processSeconds": 9.0, "peakBytes": 10})).unwrap_err().to_string();
        assert!(error.contains("no auc"), "{error}");
    }

    #[test]
    fn a_format_has_the_peers_that_read_it() {
        let all = Options::default();
        assert!(all.is_valid() && !all.peers("parquet").contains(&"tensorflow"));
        assert!(all.peers("tsv").contains(&"tensorflow"));
        let one = Options { peers: Some(vec!["torchrec".to_owned()]), ..Options::default() };
        assert_eq!((one.is_valid(), one.peers("tsv")), (true, vec!["torchrec"]));
        let unknown = Options { peers: Some(vec!["jax".to_owned()]), ..Options::default() };
        let empty = Options { batches: 0, ..Options::default() };
        let other = Options { formats: vec!["avro".to_owned()], ..Options::default() };
        assert!(!unknown.is_valid() && !empty.is_valid() && !other.is_valid());
    }

    #[test]
    fn arguments_choose_formats_batches_and_peers() {
        let arguments = ["--work", "epoch", "--formats", "tsv", "--batches", "3", "--peers", "torchrec,torch"];
        let plan = super::super::parse(&arguments).expect("valid");
        assert_eq!(plan.epoch.peers("tsv"), ["torch", "torchrec"]);
        assert_eq!((plan.epoch.rows(), plan.work), (3 * BATCH, vec!["epoch".to_owned()]));
        for wrong in [["--formats", "avro"], ["--batches", "many"], ["--batches", "0"], ["--peers", "jax"]] {
            assert!(super::super::parse(&wrong).is_err(), "{wrong:?}");
        }
    }

    #[test]
    fn test_rows_are_whole_batches() {
        assert_eq!((test_rows(300 * BATCH), test_rows(BATCH)), (30 * BATCH, BATCH));
    }
}

//! `cargo xtask peers`: runs the same work with Rectrain and with alternative systems, in turns on
//! one machine, and prints the ratios of their speeds. On a busy machine only ratios within one run
//! are meaningful.

mod epoch;
mod serve;

use std::path::{Path, PathBuf};
use std::process::Command;

use rectrain_harness::arguments::{list, number};
use rectrain_harness::cargo::build_programs_and_examples;
use rectrain_harness::command::{command, visible};
use rectrain_harness::events::{missing, summary};
use rectrain_harness::rectrain::job;
use rectrain_harness::statistics::{median, range};
use rectrain_harness::workspace::{built, cache, workspace};
use rectrain_harness::{HarnessError, files, say};
use serde_json::{Value, json};

use crate::TrialError;

const USAGE: &str = "usage: cargo xtask peers [--rounds 5] [--work a,b,dlrm,job,loader] [--threads 2]
       cargo xtask peers --work epoch [--formats parquet,tsv] [--batches 300] [--peers torchrec,…]
       cargo xtask peers --work serve [--model EXPORT]
  Installs the peers from PyPI once (they are large), runs each work in turns, and prints a table and a line of
  JSON. A ratio is Rectrain's samples per second divided by the peer's: the median of the rounds, and their
  range. Rectrain computes in bf16 next to a peer in bf16, and in fp32 otherwise. Keep the machine idle.
  a, b: MLPs with 12.9 M and 0.4 M parameters; dlrm: the dense part of the DLRM; job: the whole DLRM with
  embeddings; loader: reading rows in Criteo's layout from text, gzip, zstd and Parquet (e2e/peers).
  epoch: whole processes from a file to a test AUC, in `sync` and in `hybrid`. Each run is a line of JSON with its
  seconds, peak memory and AUC. It writes BATCHES batches of 4,096 rows once, and a tenth as many to test.
  serve: requests of a user with 200 candidates, answered by `rectrain serve` over REST, and by PyTorch with
  torch.compile and by onnxruntime in process. It fails below 2 times PyTorch, below 1.2 times onnxruntime, or with
  a p99 of 5 ms at half of the saturating rate. EXPORT is a folder of `rectrain checkpoint export --for serving`";

const FOLDER: &str = "e2e/peers";

/// The peers that read each of the loader's formats, by file extension.
const LOADERS: [(&str, &[&str]); 4] = [
    ("tsv", &["pandas", "polars", "torch"]),
    ("tsv.gz", &["pandas", "polars", "torch"]),
    ("tsv.zst", &["pandas", "polars"]),
    ("parquet", &["pandas", "polars"]),
];

/// A Python environment with some of the peers.
struct Environment {
    /// Its folder in the cache.
    name: &'static str,
    /// pip's requirement files. All but the first are installed without their dependencies.
    requirements: &'static [&'static str],
    /// The script that runs a peer.
    script: &'static str,
}

const TORCH: Environment =
    Environment { name: "peers", requirements: &["requirements.txt", "requirements-alone.txt"], script: "peers.py" };
const TENSORFLOW: Environment = Environment {
    name: "peers-tensorflow",
    requirements: &["requirements-tensorflow.txt"],
    script: "peers_tensorflow.py",
};

/// The peers that do a work.
fn peers_of(work: &str) -> &'static [&'static str] {
    match work {
        "job" => &["torch", "torchrec", "torchrec-bf16", "tensorflow", "tensorflow-xla"],
        _ => &["torch", "torch-bf16", "tensorflow", "tensorflow-xla"],
    }
}

fn environment_of(peer: &str) -> &'static Environment {
    if peer.starts_with("tensorflow") { &TENSORFLOW } else { &TORCH }
}

struct Plan {
    rounds: usize,
    work: Vec<String>,
    threads: String,
    epoch: epoch::Options,
    /// The export that `serve` uses. Without it, a model is trained.
    model: Option<PathBuf>,
}

/// Runs the trial with the arguments of the command line.
///
/// # Errors
/// Wrong arguments; a peer that cannot be installed; a run that fails; a bound of `serve` that does
/// not hold.
pub fn run(arguments: &[&str]) -> Result<(), TrialError> {
    let plan = parse(arguments)?;
    build_programs_and_examples()?;
    let mut report = Vec::new();
    for work in &plan.work {
        report.extend(match &**work {
            "loader" => compare_loaders(&plan, &install(&TORCH)?)?,
            "epoch" => epoch::compare(&plan)?,
            "serve" => serve::compare(&plan)?,
            work => compare(work, &plan)?,
        });
    }
    println!("{}", json!({ "rounds": plan.rounds, "threads": plan.threads.parse::<u32>().ok(), "ratios": report }));
    serve::check(&report)
}

fn parse(arguments: &[&str]) -> Result<Plan, HarnessError> {
    let mut plan = Plan {
        rounds: 5,
        work: list("a,b,dlrm,job,loader"),
        threads: "2".to_owned(),
        epoch: epoch::Options::default(),
        model: None,
    };
    for pair in arguments.chunks(2) {
        match pair {
            ["--rounds", rounds] => plan.rounds = number(rounds, USAGE)?,
            ["--work", work] => plan.work = list(work),
            ["--threads", threads] if threads.parse::<u32>().is_ok_and(|n| n > 0) => {
                plan.threads = (*threads).to_owned()
            }
            ["--formats", formats] => plan.epoch.formats = list(formats),
            ["--batches", batches] => plan.epoch.batches = number(batches, USAGE)?,
            ["--model", model] => plan.model = Some(PathBuf::from(model)),
            ["--peers", peers] => plan.epoch.peers = Some(list(peers)),
            _ => return Err(HarnessError::Usage(USAGE)),
        }
    }
    let known = ["a", "b", "dlrm", "job", "loader", "epoch", "serve"];
    if plan.rounds == 0 || !plan.epoch.is_valid() || plan.work.iter().any(|work| !known.contains(&work.as_str())) {
        return Err(HarnessError::Usage(USAGE));
    }
    Ok(plan)
}

/// Installs the peers of an environment, unless they are installed; returns the environment's
/// Python.
fn install(peers: &Environment) -> Result<PathBuf, HarnessError> {
    let environment = cache()?.join(peers.name);
    let python = environment.join("bin/python");
    let lists: Vec<PathBuf> = peers.requirements.iter().map(|name| workspace().join(FOLDER).join(name)).collect();
    let wanted = lists.iter().map(|list| files::read(list)).collect::<Result<String, _>>()?;
    let stamp = environment.join("installed.txt");
    if std::fs::read_to_string(&stamp).is_ok_and(|installed| installed == wanted) {
        return Ok(python);
    }
    say(format!("installing the peers into {}", environment.display()));
    visible(command("python3", ["-m", "venv"]).arg(&environment))?;
    for (index, list) in lists.iter().enumerate() {
        let mut pip = command(&python, ["-m", "pip", "install", "--quiet", "--disable-pip-version-check"]);
        if index > 0 {
            pip.arg("--no-deps");
        }
        visible(pip.arg("-r").arg(list))?;
    }
    files::write(&stamp, wanted)?;
    Ok(python)
}

/// The precisions that Rectrain runs in.
const PRECISIONS: [&str; 2] = ["fp32", "bf16"];

/// The index in [`PRECISIONS`] of the peer's precision.
fn precision_of(peer: &str) -> usize {
    usize::from(peer.ends_with("bf16"))
}

/// Runs all peers of a work and Rectrain in turns.
fn compare(work: &str, plan: &Plan) -> Result<Vec<Value>, HarnessError> {
    let peers = peers_of(work);
    let run = |peer: &&str| {
        let environment = environment_of(peer);
        Ok((install(environment)?, workspace().join(FOLDER).join(environment.script)))
    };
    let runs = peers.iter().map(run).collect::<Result<Vec<_>, HarnessError>>()?;
    let mut own = [Vec::new(), Vec::new()];
    let mut others = vec![Vec::new(); peers.len()];
    for round in 1..=plan.rounds {
        for (precision, rates) in PRECISIONS.iter().zip(&mut own) {
            rates.push(rate(&mut ours(work, precision, plan)?)?);
        }
        for ((peer, (python, script)), rates) in peers.iter().zip(&runs).zip(&mut others) {
            let mut command = Command::new(python);
            command.arg(script);
            rates.push(rate(command.args(["--work", work, "--peer", peer, "--threads", &plan.threads]))?);
        }
        say(format!("{work}, round {round} of {}", plan.rounds));
    }
    let report = peers.iter().zip(&others).map(|(peer, rates)| {
        let precision = PRECISIONS[precision_of(peer)];
        let mut report = ratio(&format!("{work} {precision}"), peer, &own[precision_of(peer)], rates);
        report["work"] = json!(work);
        report["precision"] = json!(precision);
        report
    });
    Ok(report.collect())
}

/// Reads rows in Criteo's layout from each format with all of its readers, in turns.
fn compare_loaders(plan: &Plan, python: &Path) -> Result<Vec<Value>, HarnessError> {
    let reader = built("examples/read_speed")?;
    let text = cache()?.join("peers/rows.tsv");
    let script = workspace().join(FOLDER).join("loaders.py");
    if !text.with_extension("parquet").exists() {
        visible(command(&reader, ["--write"]).arg(&text))?;
        visible(command(python, [&script]).arg("--prepare").arg(&text))?;
    }
    let mut report = Vec::new();
    for (format, peers) in LOADERS {
        let file = text.with_extension(format);
        let mut own = Vec::new();
        let mut others = vec![Vec::new(); peers.len()];
        for round in 1..=plan.rounds {
            own.push(rate(Command::new(&reader).arg("--json").arg(&file))?);
            for (peer, rates) in peers.iter().zip(&mut others) {
                let mut command = Command::new(python);
                rates.push(rate(command.arg(&script).arg(&file).args(["--peer", peer, "--threads", &plan.threads]))?);
            }
            say(format!("loader, {format}, round {round} of {}", plan.rounds));
        }
        let ratios =
            peers.iter().zip(&others).map(|(peer, rates)| ratio(&format!("loader {format}"), peer, &own, rates));
        report.extend(ratios);
    }
    Ok(report)
}

/// Compares Rectrain's rates with a peer's rates from the same rounds.
fn ratio(work: &str, peer: &str, own: &[f64], rates: &[f64]) -> Value {
    let ratios: Vec<f64> = own.iter().zip(rates).map(|(own, other)| own / other).collect();
    let ((low, high), middle) = (range(&ratios), median(ratios));
    let (own, other) = (median(own.to_vec()), median(rates.to_vec()));
    eprintln!(
        "{work:14} {peer:14} rectrain {own:9.0}   peer {other:9.0} samples/s   ratio {middle:.2} ({low:.2} to {high:.2})"
    );
    json!({"work": work, "peer": peer, "ratio": middle, "low": low, "high": high, "samplesPerSecond": own,
        "peerSamplesPerSecond": other})
}

/// The command that does the work with Rectrain.
fn ours(work: &str, precision: &str, plan: &Plan) -> Result<Command, HarnessError> {
    if work == "job" {
        let sets = [
            format!("spec.roles.denseWorker.threads={}", plan.threads),
            format!("spec.training.precision={precision}"),
        ];
        return job(&format!("{FOLDER}/dlrm.yaml"), &sets);
    }
    let mut command = Command::new(built("rectrain-bench")?);
    command.args(["step", "--model", work, "--threads", &plan.threads, "--precision", precision, "--json"]);
    Ok(command)
}

/// Runs a command; returns the samples per second in the last line of its output.
fn rate(command: &mut Command) -> Result<f64, HarnessError> {
    let output = command.output().map_err(HarnessError::io("run", format!("{command:?}")))?;
    let last = summary(&output)?;
    last["samplesPerSecond"].as_f64().ok_or_else(|| missing(&format!("{command:?}"), &last, "samplesPerSecond"))
}

//! `cargo xtask peers`: the same work by Rectrain and by the systems that one would take instead, in turns on the same machine, and the
//! ratios of their speeds. Only ratios taken in one run say something on a machine that is not quiet.

use std::path::{Path, PathBuf};
use std::process::Command;

use serde_json::{Value, json};

use crate::{cache, cargo, last_event, median, range, workspace};

const USAGE: &str = "usage: cargo xtask peers [--rounds 5] [--work a,b,dlrm,job,loader] [--threads 2]
  installs the peers from PyPI (once; they are large), runs each work by turns, and prints a table and a line of JSON of ratios:
  Rectrain's samples a second by the peer's, the median of the rounds and their range; Rectrain computes in bf16 beside peers that do,
  and in fp32 beside the others. Leave the machine alone meanwhile.
  a, b: MLPs of 12.9 M and 0.4 M parameters, dlrm: the dense part of the DLRM, job: all of it with embeddings, loader: rows in
  Criteo's layout from text, gzip, zstd and Parquet (e2e/peers)";

const FOLDER: &str = "e2e/peers";

/// What reads each format of the loader's files besides Rectrain, by the end of the file's name.
const LOADERS: [(&str, &[&str]); 4] = [
    ("tsv", &["pandas", "polars", "torch"]),
    ("tsv.gz", &["pandas", "polars", "torch"]),
    ("tsv.zst", &["pandas", "polars"]),
    ("parquet", &["pandas", "polars"]),
];

/// The peers that are installed together: their environment, the lists of what is installed in it (those after the first without what they
/// ask for), and what runs them.
struct Environment {
    name: &'static str,
    requirements: &'static [&'static str],
    script: &'static str,
}

const TORCH: Environment =
    Environment { name: "peers", requirements: &["requirements.txt", "requirements-alone.txt"], script: "peers.py" };
const TENSORFLOW: Environment = Environment {
    name: "peers-tensorflow",
    requirements: &["requirements-tensorflow.txt"],
    script: "peers_tensorflow.py",
};

/// What each work is done by besides Rectrain.
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
}

pub(crate) fn run(arguments: &[&str]) -> Result<(), String> {
    let plan = parse(arguments)?;
    cargo(&["build", "--release", "--workspace", "--bins", "--tests", "--examples"], "the build failed")?;
    let mut report = Vec::new();
    for work in &plan.work {
        report.extend(match &**work {
            "loader" => compare_loaders(&plan, &install(&TORCH)?)?,
            work => compare(work, &plan)?,
        });
    }
    println!("{}", json!({ "rounds": plan.rounds, "threads": plan.threads.parse::<u32>().ok(), "ratios": report }));
    Ok(())
}

fn parse(arguments: &[&str]) -> Result<Plan, String> {
    let mut plan = Plan { rounds: 5, work: crate::list("a,b,dlrm,job,loader"), threads: "2".to_owned() };
    for pair in arguments.chunks(2) {
        match pair {
            ["--rounds", rounds] => plan.rounds = rounds.parse().map_err(|_| USAGE.to_owned())?,
            ["--work", work] => plan.work = crate::list(work),
            ["--threads", threads] if threads.parse::<u32>().is_ok_and(|n| n > 0) => {
                plan.threads = (*threads).to_owned()
            }
            _ => return Err(USAGE.to_owned()),
        }
    }
    let known = ["a", "b", "dlrm", "job", "loader"];
    if plan.rounds == 0 || plan.work.iter().any(|work| !known.contains(&work.as_str())) {
        return Err(USAGE.to_owned());
    }
    Ok(plan)
}

/// Has peers in their environment; its Python.
fn install(peers: &Environment) -> Result<PathBuf, String> {
    let environment = cache()?.join(peers.name);
    let python = environment.join("bin/python");
    let lists: Vec<PathBuf> = peers.requirements.iter().map(|name| workspace().join(FOLDER).join(name)).collect();
    let wanted = lists.iter().map(std::fs::read_to_string).collect::<Result<String, _>>();
    let wanted = wanted.map_err(|error| format!("cannot read {FOLDER}: {error}"))?;
    let stamp = environment.join("installed.txt");
    if std::fs::read_to_string(&stamp).is_ok_and(|installed| installed == wanted) {
        return Ok(python);
    }
    eprintln!("xtask: installing the peers into {}", environment.display());
    let path = |path: &Path| path.display().to_string();
    execute("python3", &["-m", "venv", &path(&environment)])?;
    let pip = ["-m", "pip", "install", "--quiet", "--disable-pip-version-check"];
    for (place, list) in lists.iter().enumerate() {
        let alone: &[&str] = if place == 0 { &[] } else { &["--no-deps"] };
        execute(&path(&python), &[pip.as_slice(), alone, &["-r", &path(list)]].concat())?;
    }
    std::fs::write(&stamp, wanted).map_err(|error| format!("cannot write {}: {error}", stamp.display()))?;
    Ok(python)
}

fn execute(program: &str, arguments: &[&str]) -> Result<(), String> {
    let status = Command::new(program).args(arguments).status();
    let status = status.map_err(|error| format!("cannot run {program}: {error}; install python3 with venv"))?;
    if status.success() {
        Ok(())
    } else {
        Err(format!("`{program} {}` failed: its output is above", arguments.join(" ")))
    }
}

/// What Rectrain computes in, where the peer does.
const PRECISIONS: [&str; 2] = ["fp32", "bf16"];

fn precision_of(peer: &str) -> usize {
    usize::from(peer.ends_with("bf16"))
}

/// All peers of a work and Rectrain by turns.
fn compare(work: &str, plan: &Plan) -> Result<Vec<Value>, String> {
    let peers = peers_of(work);
    let run = |peer: &&str| {
        let environment = environment_of(peer);
        Ok((install(environment)?, workspace().join(FOLDER).join(environment.script)))
    };
    let runs = peers.iter().map(run).collect::<Result<Vec<_>, String>>()?;
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
        eprintln!("xtask: {work}, round {round} of {}", plan.rounds);
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

/// Rows in Criteo's layout, read from each format by all that read it, by turns.
fn compare_loaders(plan: &Plan, python: &Path) -> Result<Vec<Value>, String> {
    let reader = crate::built("examples/read_speed")?;
    let text = cache()?.join("peers/rows.tsv");
    let script = workspace().join(FOLDER).join("loaders.py").display().to_string();
    if !text.with_extension("parquet").exists() {
        let text = text.display().to_string();
        execute(&reader.display().to_string(), &["--write", &text])?;
        execute(&python.display().to_string(), &[&script, "--prepare", &text])?;
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
            eprintln!("xtask: loader, {format}, round {round} of {}", plan.rounds);
        }
        let ratios =
            peers.iter().zip(&others).map(|(peer, rates)| ratio(&format!("loader {format}"), peer, &own, rates));
        report.extend(ratios);
    }
    Ok(report)
}

/// What came of Rectrain's rates and a peer's, which were taken by turns.
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

fn ours(work: &str, precision: &str, plan: &Plan) -> Result<Command, String> {
    if work == "job" {
        let sets = [
            format!("spec.roles.denseWorker.threads={}", plan.threads),
            format!("spec.training.precision={precision}"),
        ];
        return crate::job(&format!("{FOLDER}/dlrm.yaml"), &sets);
    }
    let mut command = Command::new(crate::built("rectrain-bench")?);
    command.args(["step", "--model", work, "--threads", &plan.threads, "--precision", precision, "--json"]);
    Ok(command)
}

/// Samples a second, as the last line says.
fn rate(command: &mut Command) -> Result<f64, String> {
    let output = command.output().map_err(|error| format!("cannot run {command:?}: {error}"))?;
    let last = last_event(&output)?;
    last["samplesPerSecond"].as_f64().ok_or_else(|| format!("{command:?} told no samplesPerSecond: {last}"))
}

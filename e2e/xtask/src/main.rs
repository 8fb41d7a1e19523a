//! `cargo xtask`: the project's own commands. `check` for every save, `test` for everything that must hold, `docs` to write what is
//! generated from the code, `quality` to train on real data and compare with the recorded reference, `cluster` for a real Kubernetes.

mod chaos;
mod cluster;
mod continual;
mod gpu;
mod http;
mod migration;
mod peers;
mod quality;
mod random;
mod run_processes;
mod stragglers;

use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};

const USAGE: &str = "usage: cargo xtask COMMAND
  check             formatting and lints, for every save; `prose` and `architecture` are two of them
  test              everything that must hold: formatting, lints, unit, integration and multi-process tests, MovieLens,
                    and a real Kubernetes where this machine can have one
  test gpu          builds the runtime with the feature `cuda` and tries it: on a machine with an NVIDIA GPU, that it trains as the
                    CPU does; on one without, that it says so
  prose [ARGS]      checks the English of comments, documents and error texts; `prose --help` lists ARGS
  architecture      prints the layers of crates and the circles of modules, and checks them; `--list` adds the imports of circles
  docs              writes the files that are generated from the code (CRD, manifest reference)
  quality [ARGS]    trains on real data and prints AUC by model, mode and seed; `quality --help` lists ARGS
  continual [ARGS]  trains slice by slice, switches the mode in between, and prints AUC by slice; `continual --help` lists ARGS
  stragglers [ARGS] trains in every mode with dense workers of unequal CPU time and prints throughput, staleness and drops
  chaos [ARGS]      kills processes of a job at random and compares what it trains with the job left alone; `chaos --help` lists ARGS
  migration [ARGS]  moves millions of rows between parameter servers of a job that trains, and prints how long its steps take meanwhile
  peers [ARGS]      runs the same work by Rectrain and by PyTorch, TorchRec and TensorFlow by turns and prints ratios; `peers --help` lists ARGS
  cluster COMMAND   a real Kubernetes of two nodes on this machine; `cluster --help` lists COMMANDs";

/// The README's example and what it promises.
const MOVIELENS: &str = "docs/examples/movielens-100k.yaml";
const MOVIELENS_AUC: f64 = 0.785;

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let result = match arguments.as_slice() {
        ["check"] => check(),
        ["test"] => test(),
        ["test", "gpu"] => gpu::test(),
        ["docs"] => docs(),
        ["prose", rest @ ..] => rectrain_lint::prose::run(&workspace(), rest).map_err(String::from),
        ["architecture", rest @ ..] => rectrain_lint::architecture::run(&workspace(), rest).map_err(String::from),
        ["quality", rest @ ..] => quality::run(rest),
        ["continual", rest @ ..] => continual::run(rest),
        ["stragglers", rest @ ..] => stragglers::run(rest),
        ["chaos", rest @ ..] => chaos::run(rest),
        ["migration", rest @ ..] => migration::run(rest),
        ["peers", rest @ ..] => peers::run(rest),
        ["cluster", rest @ ..] => cluster::run(rest),
        _ => Err(USAGE.to_owned()),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(message) => {
            eprintln!("xtask: {message}");
            ExitCode::FAILURE
        }
    }
}

fn check() -> Result<(), String> {
    rectrain_lint::check(&workspace())?;
    cargo(&["fmt", "--all", "--check"], "run `cargo fmt --all`")?;
    cargo(
        &["clippy", "--release", "--workspace", "--all-targets", "--", "-D", "warnings"],
        "mend what clippy names above",
    )
}

fn test() -> Result<(), String> {
    let begun = std::time::Instant::now();
    check()?;
    // One selection of packages for building and testing, so that every dependency is built once.
    cargo(&["test", "--release", "--workspace"], "a test failed: its output is above")?;
    movielens()?;
    cluster::suite(begun)
}

/// Has the MovieLens data written, if it is not there.
fn movielens_data() -> Result<(), String> {
    let mut data = Command::new(built("rectrain")?);
    let data = data.args(["data", "movielens-100k"]).current_dir(workspace()).output();
    let data = data.map_err(|error| format!("rectrain cannot be run: {error}"))?;
    let reason = String::from_utf8_lossy(&data.stderr).into_owned();
    if data.status.success() { Ok(()) } else { Err(format!("its data cannot be had: {reason}")) }
}

/// The README's first command must reach what it promises. Skipped, aloud, where the data set cannot be had.
fn movielens() -> Result<(), String> {
    eprintln!("xtask: rectrain run {MOVIELENS}");
    if let Err(reason) = movielens_data() {
        eprintln!("xtask: SKIPPED the MovieLens run, because {reason}");
        return Ok(());
    }
    let summary = last_event(&output(job(MOVIELENS, [])?)?)?;
    match summary["test"]["auc"].as_f64() {
        Some(auc) if auc >= MOVIELENS_AUC => {
            eprintln!("xtask: test AUC {auc:.4}, at least {MOVIELENS_AUC} is promised");
            Ok(())
        }
        other => {
            Err(format!("the MovieLens run reached a test AUC of {other:?}; at least {MOVIELENS_AUC} is promised"))
        }
    }
}

/// `rectrain run MANIFEST --json` with these overrides, to be given further arguments and run.
fn job<'a>(manifest: &str, sets: impl IntoIterator<Item = &'a String>) -> Result<Command, String> {
    let mut command = Command::new(built("rectrain")?);
    command.args(["run", manifest, "--json"]).current_dir(workspace());
    for set in sets {
        command.args(["--set", set]);
    }
    Ok(command)
}

/// What a job printed.
fn output(mut job: Command) -> Result<std::process::Output, String> {
    job.output().map_err(|error| format!("cannot run rectrain: {error}"))
}

/// `a,b` as a list.
fn list(text: &str) -> Vec<String> {
    text.split(',').map(str::to_owned).collect()
}

/// The one in the middle; NaN if there is none.
fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or(f64::NAN)
}

/// The smallest and the largest.
fn range(values: &[f64]) -> (f64, f64) {
    let low = values.iter().copied().fold(f64::INFINITY, f64::min);
    (low, values.iter().copied().fold(f64::NEG_INFINITY, f64::max))
}

/// The summary that a run with `--json` printed last.
fn last_event(output: &std::process::Output) -> Result<serde_json::Value, String> {
    if !output.status.success() {
        return Err(format!("the run failed: {}", String::from_utf8_lossy(&output.stderr)));
    }
    let text = String::from_utf8_lossy(&output.stdout);
    let last = text.lines().last().ok_or("the run printed nothing")?;
    serde_json::from_str(last).map_err(|error| format!("the last line is not JSON: {error}"))
}

fn docs() -> Result<(), String> {
    cargo(&["build", "--release", "--workspace", "--examples"], "the build failed")?;
    example("generate", None)?;
    example("metrics_reference", Some("docs/reference/metrics.md"))?;
    example("operator_metrics", Some("docs/reference/operator-metrics.md"))
}

/// Runs a built example in the workspace; its output goes into `file` if one is given.
fn example(name: &str, file: Option<&str>) -> Result<(), String> {
    let program = built(&format!("examples/{name}"))?;
    let output = Command::new(&program)
        .current_dir(workspace())
        .output()
        .map_err(|error| format!("cannot run {}: {error}", program.display()))?;
    if !output.status.success() {
        return Err(format!("{name} failed: {}", String::from_utf8_lossy(&output.stderr)));
    }
    let Some(file) = file.map(|file| workspace().join(file)) else { return Ok(()) };
    std::fs::write(&file, output.stdout).map_err(|error| format!("cannot write {}: {error}", file.display()))
}

/// A file of the target folder that this program was built into.
fn built(name: &str) -> Result<PathBuf, String> {
    let own = std::env::current_exe().map_err(|error| format!("cannot find this program: {error}"))?;
    Ok(own.with_file_name(name))
}

/// Runs cargo in the workspace; `hint` says what to do if it fails.
fn cargo(arguments: &[&str], hint: &str) -> Result<(), String> {
    run_cargo(cargo_command(), arguments, hint)
}

/// In the workspace, without arguments.
fn cargo_command() -> Command {
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let mut cargo = Command::new(cargo);
    // What cargo says of this program when it runs it is not true of what is built: crates that look at it would be built anew each time.
    for (name, _) in std::env::vars_os() {
        if name.to_str().is_some_and(|name| name.starts_with("CARGO_PKG_") || name.starts_with("CARGO_MANIFEST_")) {
            cargo.env_remove(&name);
        }
    }
    cargo.current_dir(workspace());
    cargo
}

fn run_cargo(mut cargo: Command, arguments: &[&str], hint: &str) -> Result<(), String> {
    let shown = format!("cargo {}", arguments.join(" "));
    eprintln!("xtask: {shown}");
    let status = cargo
        .args(arguments)
        .status()
        .map_err(|error| format!("cannot run `{shown}`: {error}; install Rust with rustup"))?;
    if status.success() { Ok(()) } else { Err(format!("`{shown}` failed: {hint}")) }
}

/// Where what was fetched or built is kept: `$XDG_CACHE_HOME/rectrain`, or the same below `~/.cache`.
fn cache() -> Result<PathBuf, String> {
    let cache = match std::env::var_os("XDG_CACHE_HOME").filter(|folder| !folder.is_empty()) {
        Some(folder) => PathBuf::from(folder),
        None => Path::new(&std::env::var_os("HOME").ok_or("neither XDG_CACHE_HOME nor HOME is set")?).join(".cache"),
    };
    Ok(cache.join("rectrain"))
}

/// The checkout.
fn workspace() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).ancestors().nth(2).map_or_else(|| PathBuf::from("."), Path::to_path_buf)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_median_is_the_one_in_the_middle() {
        assert!(median(vec![3.0, 1.0, 9.0]).to_bits() == 3.0_f64.to_bits() && median(Vec::new()).is_nan());
    }
}

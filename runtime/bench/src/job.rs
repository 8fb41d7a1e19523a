//! Runs whole jobs: a manifest with varied fields, in alternation. Each run is its own process
//! (`rectrain run`), so that no run inherits memory, rows or threads from another.

use std::collections::BTreeMap;
use std::io::Write;
use std::path::PathBuf;
use std::process::{Command, Stdio};

use comfy_table::Table;
use serde::Serialize;
use serde_json::Value;

use crate::error::BenchError;
use crate::figures::{median, table};

/// The most combinations of one command. The limit only catches typing errors.
const MOST_RUNS: usize = 10_000;

#[derive(Clone, Debug, clap::Args)]
pub struct JobArgs {
    /// The manifest (a RecTrainingJob)
    pub manifest: PathBuf,
    /// Run with each of these values (`spec.roles.ps.replicas=1,2,4`); given several times, with
    /// each combination
    #[arg(long, value_name = "PATH=VALUE,…")]
    pub vary: Vec<String>,
    /// Override a field in all runs
    #[arg(long, value_name = "PATH=VALUE")]
    pub set: Vec<String>,
    /// Run each replica of each role in its own process
    #[arg(long)]
    pub processes: bool,
    /// Rounds; every combination runs once in each round
    #[arg(long, default_value_t = 3)]
    pub rounds: usize,
    /// Also print a line of JSON
    #[arg(long)]
    pub json: bool,
}

/// The figures of [`bench_job`].
#[derive(Clone, Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct JobFigures {
    pub rounds: usize,
    pub runs: Vec<RunFigures>,
}

/// The figures of one combination: the median of its rounds, and their range.
#[derive(Clone, Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct RunFigures {
    /// The varied fields and their values in this combination.
    pub settings: BTreeMap<String, String>,
    /// The rate in the job's summary, which excludes evaluations.
    pub samples_per_second: f64,
    pub lowest: f64,
    pub highest: f64,
    /// Embedding rows at the end of the job.
    pub rows: u64,
    /// The test AUC of the last round.
    pub test_auc: Option<f64>,
}

type Settings = Vec<(String, String)>;

/// Runs every combination once per round.
///
/// # Errors
/// Malformed arguments; a missing `rectrain`; a run that fails, with its standard error.
pub fn bench_job(args: &JobArgs) -> Result<JobFigures, BenchError> {
    let combinations = combinations(&args.vary)?;
    if args.rounds == 0 {
        return Err(BenchError::Argument { argument: "rounds", found: "0".to_owned(), expected: "at least 1" });
    }
    let mut summaries: Vec<Vec<Value>> = vec![Vec::new(); combinations.len()];
    for round in 1..=args.rounds {
        for (settings, summaries) in combinations.iter().zip(&mut summaries) {
            let summary = run(args, settings)?;
            let speed = summary["samplesPerSecond"].as_f64().unwrap_or_default();
            // Standard output is reserved for the figures.
            let _unseen = writeln!(std::io::stderr(), "round {round}: {} {speed:.0} samples/s", shown(settings));
            summaries.push(summary);
        }
    }
    let runs = combinations.into_iter().zip(&summaries).map(|(settings, summaries)| figures(settings, summaries));
    Ok(JobFigures { rounds: args.rounds, runs: runs.collect() })
}

fn figures(settings: Settings, summaries: &[Value]) -> RunFigures {
    let speeds: Vec<f64> = summaries.iter().filter_map(|summary| summary["samplesPerSecond"].as_f64()).collect();
    let last = summaries.last().unwrap_or(&Value::Null);
    RunFigures {
        settings: settings.into_iter().collect(),
        lowest: speeds.iter().copied().fold(f64::INFINITY, f64::min),
        highest: speeds.iter().copied().fold(0.0, f64::max),
        samples_per_second: median(speeds),
        rows: last["rows"].as_u64().unwrap_or_default(),
        test_auc: last["test"]["auc"].as_f64(),
    }
}

/// `rectrain`, which cargo builds into the folder of this program.
pub(crate) fn rectrain() -> Result<PathBuf, BenchError> {
    Ok(std::env::current_exe()?.with_file_name("rectrain"))
}

/// Runs the job once and returns its summary.
fn run(args: &JobArgs, settings: &Settings) -> Result<Value, BenchError> {
    let program = rectrain()?;
    let mut rectrain = Command::new(&program);
    rectrain
        .arg("run")
        .arg(&args.manifest)
        .arg("--json")
        .arg("--no-history")
        .stdin(Stdio::null())
        .stderr(Stdio::piped());
    let varied = settings.iter().map(|(path, value)| format!("{path}={value}"));
    for set in args.set.iter().cloned().chain(varied) {
        rectrain.args(["--set", &set]);
    }
    if args.processes {
        rectrain.arg("--processes");
    }
    let output = rectrain
        .output()
        .map_err(|source| BenchError::NoRectrain { program: program.display().to_string(), source })?;
    let printed = String::from_utf8_lossy(&output.stdout);
    let last = printed.lines().last().and_then(|line| serde_json::from_str::<Value>(line).ok());
    match last.filter(|last| output.status.success() && last["event"] == "summary") {
        Some(summary) => Ok(summary),
        None => {
            let complaint = String::from_utf8_lossy(&output.stderr);
            Err(BenchError::Ended(format!("a job with {}: {}", shown(settings), complaint.trim())))
        }
    }
}

/// All combinations of the varied fields. Without varied fields, one combination: the unchanged
/// manifest.
fn combinations(varied: &[String]) -> Result<Vec<Settings>, BenchError> {
    let mut all: Vec<Settings> = vec![Vec::new()];
    for one in varied {
        let wrong =
            || BenchError::Argument { argument: "vary", found: one.clone(), expected: "PATH=VALUE,VALUE and so on" };
        let (path, values) = one.split_once('=').ok_or_else(wrong)?;
        let values: Vec<&str> = values.split(',').map(str::trim).collect();
        if path.is_empty() || values.iter().any(|value| value.is_empty()) {
            return Err(wrong());
        }
        let with = |settings: &Settings, value: &str| {
            let mut settings = settings.clone();
            settings.push((path.to_owned(), value.to_owned()));
            settings
        };
        all = all.iter().flat_map(|settings| values.iter().map(|value| with(settings, value))).collect();
        if all.len() > MOST_RUNS {
            return Err(wrong());
        }
    }
    Ok(all)
}

fn shown(settings: &Settings) -> String {
    if settings.is_empty() {
        return "the unchanged manifest".to_owned();
    }
    settings.iter().map(|(path, value)| format!("{path}={value}")).collect::<Vec<_>>().join(" ")
}

impl JobFigures {
    /// The figures as a table for the terminal.
    #[must_use]
    pub fn table(&self) -> Table {
        let mut table = table(&["job", "samples/s", "lowest", "highest", "rows", "test AUC"]);
        for run in &self.runs {
            let RunFigures { settings, samples_per_second, lowest, highest, rows, test_auc } = run;
            let settings: Settings = settings.iter().map(|(path, value)| (path.clone(), value.clone())).collect();
            table.add_row([
                shown(&settings),
                format!("{samples_per_second:.0}"),
                format!("{lowest:.0}"),
                format!("{highest:.0}"),
                rows.to_string(),
                test_auc.map_or_else(String::new, |auc| format!("{auc:.4}")),
            ]);
        }
        table
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(varied: &[&str]) -> Result<Vec<String>, BenchError> {
        let varied: Vec<String> = varied.iter().map(|&one| one.to_owned()).collect();
        Ok(combinations(&varied)?.iter().map(shown).collect())
    }

    #[test]
    fn all_values_of_varied_fields_are_combined() {
        assert_eq!(of(&[]).unwrap(), ["the unchanged manifest"]);
        assert_eq!(of(&["a=1,2", "b=x,y"]).unwrap(), ["a=1 b=x", "a=1 b=y", "a=2 b=x", "a=2 b=y"]);
    }

    #[test]
    fn a_variation_without_path_or_value_is_refused() {
        for wrong in ["a", "=1", "a=", "a=1,,2"] {
            let error = of(&[wrong]).unwrap_err();
            assert!(error.is_user_error() && error.to_string().contains(wrong), "{error}");
        }
        let many = (0..101).map(|value| value.to_string()).collect::<Vec<_>>().join(",");
        let [a, b] = ["a", "b"].map(|path| format!("{path}={many}"));
        assert!(of(&[&a, &b]).is_err());
    }

    #[test]
    fn figures_are_the_median_of_the_rounds_and_their_range() {
        let round = |speed: f64| serde_json::json!({"samplesPerSecond": speed, "rows": 7, "test": {"auc": 0.75}});
        let figures = figures(Vec::new(), &[round(30.0), round(10.0), round(20.0)]);
        assert_eq!((figures.lowest, figures.samples_per_second, figures.highest), (10.0, 20.0, 30.0));
        assert_eq!((figures.rows, figures.test_auc), (7, Some(0.75)));
    }
}

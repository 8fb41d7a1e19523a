//! `rectrain runs`: lists, shows and compares the histories that `rectrain run` leaves.

use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use clap::{Args, Subcommand};
use comfy_table::{CellAlignment, Table, presets};
use rectrain_coordinator::page_of_runs;
use serde_json::{Value, json};

use crate::browser;
use crate::failure::Failure;
use crate::history::write_page;
use crate::human::{number, rate, thousands};
use crate::output;
use crate::record::{self, EVENTS};

#[derive(Debug, Subcommand)]
pub(crate) enum RunsCommand {
    /// List the runs of a folder, the newest first
    Ls {
        #[command(flatten)]
        place: RunsPlace,
        /// Print one JSON object per run
        #[arg(long)]
        json: bool,
    },
    /// Print the figures of a run, and make its page again
    Show {
        /// A folder of a run, its name, or the name of a job, for its newest run
        run: String,
        #[command(flatten)]
        place: RunsPlace,
        /// Print the run's record as JSON
        #[arg(long)]
        json: bool,
        /// Open the page in a browser
        #[arg(long)]
        open: bool,
    },
    /// Draw the curves of several runs over each other, on one page
    Compare {
        /// Runs, named as for `rectrain runs show`
        #[arg(required = true, num_args = 2..)]
        runs: Vec<String>,
        #[command(flatten)]
        place: RunsPlace,
        /// The page to write; by default compare.html in the folder of the runs
        #[arg(long, value_name = "FILE")]
        output: Option<PathBuf>,
        /// Open the page in a browser
        #[arg(long)]
        open: bool,
    },
}

/// The place of histories.
#[derive(Debug, Clone, Args)]
pub(crate) struct RunsPlace {
    /// The folder that holds the runs
    #[arg(long = "runs", value_name = "FOLDER", default_value = "runs")]
    pub(crate) runs_folder: PathBuf,
}

/// Runs one of the subcommands.
pub(crate) fn run(command: &RunsCommand) -> Result<(), Failure> {
    match command {
        RunsCommand::Ls { place, json } => ls(&place.runs_folder, *json),
        RunsCommand::Show { run, place, json, open } => show(&find(&place.runs_folder, run)?, *json, *open),
        RunsCommand::Compare { runs, place, output, open } => {
            let folders: Vec<PathBuf> =
                runs.iter().map(|run| find(&place.runs_folder, run)).collect::<Result<_, _>>()?;
            let page = output.clone().unwrap_or_else(|| place.runs_folder.join("compare.html"));
            compare(&folders, &page, *open)
        }
    }
}

fn ls(place: &Path, json: bool) -> Result<(), Failure> {
    let mut records = Vec::new();
    for folder in folders(place)? {
        records.push(read(&folder)?);
    }
    let started = |record: &Value| record["startedAt"].as_f64().unwrap_or_default();
    records.sort_by(|a, b| started(b).total_cmp(&started(a)));
    if json {
        return Ok(output::print(records.iter().map(|record| format!("{}\n", brief(record))).collect::<String>())?);
    }
    if records.is_empty() {
        return Ok(output::line(format_args!("{} holds no run: `rectrain run` leaves one there", place.display()))?);
    }
    Ok(output::line(table(&records))?)
}

fn show(folder: &Path, json: bool, open: bool) -> Result<(), Failure> {
    let record = read(folder)?;
    if json {
        return Ok(output::line(&record)?);
    }
    let page = write_page(folder).map_err(|error| cannot_write(&folder.join(record::PAGE), &error))?;
    let mut text = figures(&[record]).to_string();
    text.push_str(&format!("\nthe page: {}", page.display()));
    output::line(&text)?;
    if open {
        browser::open(&page);
    }
    Ok(())
}

fn compare(folders: &[PathBuf], page: &Path, open: bool) -> Result<(), Failure> {
    let records: Vec<Value> = folders.iter().map(|folder| read(folder)).collect::<Result<_, _>>()?;
    std::fs::write(page, page_of_runs(&records)).map_err(|error| cannot_write(page, &error))?;
    let mut table = figures(&records);
    add_settings(&mut table, &records);
    output::line(format_args!("{table}\nthe page: {}", page.display()))?;
    if open {
        browser::open(page);
    }
    Ok(())
}

/// The folders of runs in a folder, in order of their names.
fn folders(place: &Path) -> Result<Vec<PathBuf>, Failure> {
    let entries = match std::fs::read_dir(place) {
        Ok(entries) => entries,
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(Vec::new()),
        Err(error) => return Err(Failure::User(format!("{}: the runs cannot be listed: {error}", place.display()))),
    };
    let mut folders: Vec<PathBuf> =
        entries.flatten().map(|entry| entry.path()).filter(|path| path.join(EVENTS).is_file()).collect();
    folders.sort();
    Ok(folders)
}

/// The folder of a run. `run` is a folder, the name of one, or the name of a job.
fn find(place: &Path, run: &str) -> Result<PathBuf, Failure> {
    for folder in [PathBuf::from(run), place.join(run)] {
        if folder.join(EVENTS).is_file() {
            return Ok(folder);
        }
    }
    let all = folders(place)?;
    let names: Vec<String> = all.iter().filter_map(|folder| Some(folder.file_name()?.to_str()?.to_owned())).collect();
    if let Some(newest) = names.iter().filter(|name| is_of_job(name, run)).max() {
        return Ok(place.join(newest));
    }
    let known = if names.is_empty() { "there is none".to_owned() } else { format!("there are {}", names.join(", ")) };
    Err(Failure::User(format!("no run `{run}` in {}: {known}; --runs names another folder", place.display())))
}

/// Whether a folder `NAME-DATE-TIME` is of the job of this name. The name of a job may have dashes.
fn is_of_job(folder: &str, job: &str) -> bool {
    let rest = folder.strip_prefix(job).and_then(|rest| rest.strip_prefix('-'));
    rest.is_some_and(|rest| !rest.is_empty() && rest.chars().all(|letter| letter.is_ascii_digit() || letter == '-'))
}

fn read(folder: &Path) -> Result<Value, Failure> {
    record::read(folder)
        .map_err(|error| Failure::User(format!("{}: the run's {EVENTS} cannot be read: {error}", folder.display())))
}

fn cannot_write(page: &Path, error: &std::io::Error) -> Failure {
    Failure::Failed(format!("{}: the page cannot be written: {error}", page.display()))
}

/// The last evaluation and the one with the lowest log loss, as their metrics.
fn tests(record: &Value) -> (Value, Value) {
    let events = record["events"].as_array().map(Vec::as_slice).unwrap_or_default();
    let tests: Vec<&Value> =
        events.iter().map(|logged| &logged["event"]["test"]).filter(|test| test.is_object()).collect();
    let loss = |test: &Value| test["logLoss"].as_f64().unwrap_or(f64::INFINITY);
    let best = tests.iter().min_by(|a, b| loss(a).total_cmp(&loss(b)));
    let or_null = |test: Option<&&Value>| test.map_or(Value::Null, |test| (*test).clone());
    (or_null(tests.last()), or_null(best))
}

/// The summary of a run, or nothing.
fn summary(record: &Value) -> Value {
    let events = record["events"].as_array().map(Vec::as_slice).unwrap_or_default();
    let found = events.iter().map(|logged| &logged["event"]).find(|event| event["event"] == "summary");
    found.cloned().unwrap_or(Value::Null)
}

/// A run in one line of JSON.
fn brief(record: &Value) -> Value {
    let (last, best) = tests(record);
    json!({
        "run": record["title"],
        "job": record["name"],
        "phase": record["phase"],
        "startedAt": record["startedAt"],
        "model": record["plan"]["model"],
        "mode": record["mode"],
        "step": record["step"],
        "samples": record["samples"],
        "test": last,
        "bestTest": best,
        "message": record["message"],
        "command": record["command"],
    })
}

fn table(records: &[Value]) -> Table {
    let mut table = Table::new();
    let head = ["RUN", "PHASE", "MODEL", "MODE", "STEPS", "TEST AUC", "LOG LOSS", "BEST LOG LOSS"];
    table.load_preset(presets::NOTHING).set_header(head);
    for record in records {
        let (last, best) = tests(record);
        table.add_row([
            text(&record["title"]),
            text(&record["phase"]),
            text(&record["plan"]["model"]),
            text(&record["mode"]),
            whole(&record["step"]),
            number(last["auc"].as_f64(), 4),
            number(last["logLoss"].as_f64(), 4),
            number(best["logLoss"].as_f64(), 4),
        ]);
    }
    for place in 4..8 {
        if let Some(column) = table.column_mut(place) {
            column.set_cell_alignment(CellAlignment::Right);
        }
    }
    table
}

/// The figures of runs, one column for each.
fn figures(records: &[Value]) -> Table {
    let mut table = Table::new();
    table.load_preset(presets::NOTHING);
    let mut row = |name: &str, value: &dyn Fn(&Value) -> String| {
        let values: Vec<String> = records.iter().map(value).collect();
        if values.iter().any(|value| !value.is_empty() && value != "-") {
            table.add_row([name.to_owned()].into_iter().chain(values));
        }
    };
    row("run", &|record| text(&record["title"]));
    row("phase", &|record| text(&record["phase"]));
    row("message", &|record| text(&record["message"]));
    row("to continue", &|record| if record["phase"] == "Complete" { String::new() } else { text(&record["resume"]) });
    row("model", &|record| text(&record["plan"]["model"]));
    row("mode", &|record| text(&record["mode"]));
    row("steps", &|record| whole(&record["step"]));
    row("samples", &|record| whole(&record["samples"]));
    for (name, metric) in
        [("AUC", "auc"), ("GAUC", "gauc"), ("log loss", "logLoss"), ("normalized entropy", "normalizedEntropy")]
    {
        row(&format!("test {name}"), &|record| number(tests(record).0[metric].as_f64(), 5));
    }
    row("best test log loss", &|record| number(tests(record).1["logLoss"].as_f64(), 5));
    row("training loss", &|record| number(record["loss"].as_f64(), 5));
    row("gradient norm", &|record| norm(record.get("gradientNorm")));
    row("seconds", &|record| number(summary(record)["seconds"].as_f64(), 1));
    row("samples/s", &|record| summary(record)["samplesPerSecond"].as_f64().map_or("-".to_owned(), rate));
    row("embedding rows", &|record| whole(&summary(record)["rows"]));
    row("parameters sha256", &|record| text(&summary(record)["parametersSha256"]));
    table
}

/// The norm of the last reported gradients. It has any size, and `null` is not finite.
fn norm(norm: Option<&Value>) -> String {
    match norm {
        None => String::new(),
        Some(Value::Null) => "not finite".to_owned(),
        Some(norm) => norm.as_f64().map(|norm| format!("{norm:.3e}")).unwrap_or_default(),
    }
}

/// The most settings that a comparison shows.
const MOST_SETTINGS: usize = 40;
/// The most characters of a setting that a comparison shows.
const MOST_CHARACTERS: usize = 40;

/// Adds a row for each setting of the manifests that differs among the runs.
fn add_settings(table: &mut Table, records: &[Value]) {
    let manifests: Vec<&str> = records.iter().map(|record| record["manifest"].as_str().unwrap_or_default()).collect();
    let differing = rectrain_crds::differing_fields(&manifests);
    for (field, values) in differing.iter().take(MOST_SETTINGS) {
        let values = values.iter().map(|value| value.chars().take(MOST_CHARACTERS).collect::<String>());
        table.add_row([field.clone()].into_iter().chain(values));
    }
    if let Some(others) = differing.len().checked_sub(MOST_SETTINGS).filter(|others| *others > 0) {
        table.add_row([format!("and {others} other settings")]);
    }
}

fn text(value: &Value) -> String {
    value.as_str().unwrap_or_default().to_owned()
}

fn whole(value: &Value) -> String {
    value.as_u64().map_or("-".to_owned(), thousands)
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "an unwrap in a test is an assertion")]
mod tests {
    use std::fs;

    use super::*;

    fn place_with(names: &[&str]) -> tempfile::TempDir {
        let place = tempfile::tempdir().unwrap();
        for name in names {
            fs::create_dir(place.path().join(name)).unwrap();
            fs::write(place.path().join(name).join(EVENTS), "").unwrap();
        }
        place
    }

    #[test]
    fn a_run_is_found_by_folder_name_and_job() {
        let names = ["ctr-20260101-000000", "ctr-20260102-000000-2", "ctr-big-20260103-000000"];
        let place = place_with(&names);
        let found = |run: &str| find(place.path(), run).unwrap();
        assert_eq!(found("ctr"), place.path().join(names[1]), "the newest run of the job, and not of ctr-big");
        assert_eq!(found(names[0]), place.path().join(names[0]));
        assert_eq!(found(place.path().join(names[2]).to_str().unwrap()), place.path().join(names[2]));
        let missing = find(place.path(), "other").unwrap_err();
        assert!(missing.message().contains("no run `other`") && missing.message().contains(names[0]), "{missing:?}");
    }

    #[test]
    fn a_norm_is_a_number_or_says_that_it_is_none() {
        assert_eq!(norm(None), "");
        assert_eq!(norm(Some(&json!(0.034_21))), "3.421e-2");
        assert_eq!(norm(Some(&Value::Null)), "not finite");
    }

    #[test]
    fn the_best_evaluation_has_the_lowest_log_loss() {
        let test = |loss: f64| json!({"event": {"event": "evaluation", "test": {"logLoss": loss, "auc": 0.5}}});
        let record = json!({"title": "a", "phase": "Complete", "events": [test(0.5), test(0.4), test(0.9)]});
        let (last, best) = tests(&record);
        assert_eq!((&last["logLoss"], &best["logLoss"]), (&json!(0.9), &json!(0.4)));
        let shown = table(&[record]).to_string();
        assert!(shown.contains("0.9000") && shown.contains("0.4000"), "{shown}");
    }

    #[test]
    fn settings_that_differ_are_compared() {
        let record = |spec: &str| json!({"manifest": format!("spec: {{model: {{kind: lr}}, {spec}}}")});
        let mut table = Table::new();
        add_settings(&mut table, &[record("training: {seed: 1}"), record("training: {seed: 2}"), json!({})]);
        let shown = table.to_string();
        assert!(shown.contains("spec.training.seed") && shown.contains("spec.model.kind"), "{shown}");
        let mut same = Table::new();
        add_settings(&mut same, &[record("training: {seed: 1}"), record("training: {seed: 1}")]);
        assert_eq!(same.row_count(), 0);
        let many: String = (0..50).map(|field| format!("f{field}: 1, ")).collect();
        let mut long = Table::new();
        add_settings(&mut long, &[record(&many), record("")]);
        assert!(long.row_count() == 41 && long.to_string().contains("and 10 other settings"), "{long}");
    }

    #[test]
    fn figures_that_no_run_has_are_left_out() {
        let record = json!({"title": "a", "phase": "Interrupted", "step": 1234, "resume": "rectrain run a.yaml"});
        let shown = figures(&[record]).to_string();
        assert!(shown.contains("1,234") && shown.contains("to continue"), "{shown}");
        assert!(!shown.contains("sha256") && !shown.contains("GAUC"), "{shown}");
    }
}

//! The runs of the experiments: files on disk, and processes of `rectrain run`.

use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::process::ExitStatus;
use std::time::Instant;

use rectrain_harness::command::{command, output};
use rectrain_harness::events::{integer, missing, test_auc};
use rectrain_harness::rectrain::train;
use rectrain_harness::{HarnessError, files, say};
use serde_json::{Value, json};

use super::dataset::{DataSet, parts};
use super::lab::{Lab, Outcome, Tested, counts_levels};
use super::levels;
use super::limit::Limit;
use super::notebook::Notebook;
use super::profile::Profile;
use super::variant::{Model, Variant};
use crate::TrialError;
use crate::error::unmet;

/// A data set whose files and manifests are ready.
pub(super) struct Prepared {
    name: &'static str,
    folder: PathBuf,
    pub(super) profile: Profile,
}

impl Prepared {
    /// Reads a data set below `data`, and writes its parts and manifests into a folder of `work`.
    pub(super) fn new(set: &DataSet, data: &Path, work: &Path) -> Result<Self, HarnessError> {
        let folder = work.join(set.name);
        let text = output(command("gzip", ["-dc"]).arg(data.join(set.file)))?;
        let [train, validation, test] = parts(&text, set.has_header);
        let train_file = write_part(&folder, "train", set, &train)?;
        for (tested, rows) in [(Tested::Validation, &validation), (Tested::Test, &test)] {
            let file = write_part(&folder, name(tested), set, rows)?;
            files::write(&manifest(&folder, tested), set.manifest(&train_file, &file).to_string())?;
        }
        let profile = Profile::of(set.cells, train.lines().skip(usize::from(set.has_header)));
        say(format!("{}: {} ids in the training rows", set.name, profile.ids()));
        Ok(Self { name: set.name, folder, profile })
    }
}

fn write_part(folder: &Path, part: &str, set: &DataSet, rows: &str) -> Result<String, HarnessError> {
    let file = folder.join(part).with_extension(set.format);
    files::write(&file, rows)?;
    Ok(file.display().to_string())
}

fn name(tested: Tested) -> &'static str {
    match tested {
        Tested::Validation => "validation",
        Tested::Test => "test",
    }
}

fn manifest(folder: &Path, tested: Tested) -> PathBuf {
    folder.join(format!("{}.json", name(tested)))
}

/// The exit code of a run that has diverged.
const DIVERGED: i32 = 3;

/// Runs the product's own binary, and prints a line of JSON for each result.
pub(super) struct Bench<'a> {
    pub(super) binary: &'a Path,
    pub(super) data: &'a Prepared,
    pub(super) experiment: &'static str,
    pub(super) model: Model,
    pub(super) seeds: u64,
    /// The last overrides of every run.
    pub(super) sets: &'a [String],
    /// The runs of earlier commands, and of this one.
    pub(super) notebook: &'a mut Notebook,
    pub(super) limit: &'a mut Limit,
    /// The runs of the experiment with this model, and how many of them are done.
    pub(super) all: u64,
    pub(super) done: u64,
}

/// One run of `rectrain run`.
#[derive(Clone, Copy)]
struct Run<'v> {
    variant: &'v Variant,
    tested: Tested,
    seed: u64,
    /// Whether the run counts frequency levels, from its checkpoint. Its AUC is not taken.
    counts_levels: bool,
}

/// A folder for the checkpoint of a run, which is empty.
fn empty_folder(data: &Prepared) -> Result<PathBuf, HarnessError> {
    let folder = data.folder.join("checkpoint");
    files::remove_folder(&folder)?;
    Ok(folder)
}

/// The rows by frequency level in the only checkpoint of a folder.
fn levels_of(folder: &Path) -> Result<Vec<u64>, TrialError> {
    let mut levels = Vec::new();
    for checkpoint in paths(folder)?.iter().filter(|path| path.is_dir()) {
        for file in paths(checkpoint)?.iter().filter(|path| is_rows_file(path)) {
            let bytes = std::fs::read(file).map_err(HarnessError::io("read", file.display()))?;
            let form = || unmet("rows as docs/reference/checkpoint-format.md has them", file.display());
            levels::count(&bytes, &mut levels).ok_or_else(form)?;
        }
    }
    Ok(levels)
}

fn is_rows_file(path: &Path) -> bool {
    path.file_name().is_some_and(|name| name.to_string_lossy().starts_with("rows-"))
}

fn paths(folder: &Path) -> Result<Vec<PathBuf>, HarnessError> {
    let list = || HarnessError::io("list", folder.display());
    let entries = std::fs::read_dir(folder).map_err(list())?;
    entries.map(|entry| entry.map(|entry| entry.path()).map_err(list())).collect()
}

impl Bench<'_> {
    /// The figures of a run: from the notebook, or from the run itself.
    fn figures(&mut self, run: Run<'_>) -> Result<Value, TrialError> {
        let key = json!({ "dataset": self.data.name, "tested": name(run.tested), "levels": run.counts_levels,
            "sets": self.sets_of(run.variant, run.seed) });
        self.done += 1;
        if let Some(line) = self.notebook.run(&key) {
            return figures_of(line.clone());
        }
        self.limit.check()?;
        let begun = Instant::now();
        let mut line = recorded(if run.counts_levels { self.levels(run) } else { self.auc(run) })?;
        let seconds = begun.elapsed().as_secs_f64();
        line["seconds"] = json!((seconds * 10.0).round() / 10.0);
        line["run"] = key;
        self.notebook.keep(line.clone())?;
        let left = self.limit.note(seconds, self.all.saturating_sub(self.done));
        self.remark(format!("run {} of {}: {seconds:.1} s; at most {left:.0} min are left", self.done, self.all));
        figures_of(line)
    }

    /// Trains, and returns the AUC and the rows.
    fn auc(&self, run: Run<'_>) -> Result<Value, TrialError> {
        let summary = self.train_once(run, &[])?;
        Ok(json!({ "auc": test_auc(&summary)?, "rows": integer("the summary", &summary, "rows")? }))
    }

    /// Trains with a checkpoint, and returns the rows by frequency level.
    fn levels(&self, run: Run<'_>) -> Result<Value, TrialError> {
        let folder = empty_folder(self.data)?;
        self.train_once(run, &[format!("spec.checkpoint.path={}", folder.display())])?;
        Ok(json!({ "levels": levels_of(&folder)? }))
    }

    fn train_once(&self, run: Run<'_>, more: &[String]) -> Result<Value, HarnessError> {
        let mut job = command(self.binary, ["run", "--json", "--no-history"]);
        job.arg(manifest(&self.data.folder, run.tested));
        for set in self.sets_of(run.variant, run.seed).iter().chain(more) {
            job.args(["--set", set]);
        }
        train(job)
    }

    /// All overrides of a run.
    fn sets_of(&self, variant: &Variant, seed: u64) -> Vec<String> {
        let own = [format!("spec.model.kind={},spec.training.seed={seed}", self.model.kind)];
        let all = own.into_iter().chain(variant.optimizers.sets());
        all.chain(variant.sets.iter().cloned()).chain(self.sets.iter().cloned()).collect()
    }
}

/// The line of a run, also of one that diverged. Other failures may not come again, so that they are
/// not kept.
fn recorded(result: Result<Value, TrialError>) -> Result<Value, TrialError> {
    match result {
        Err(TrialError::Harness(HarnessError::Failed { status, output, .. })) if status.code() == Some(DIVERGED) => {
            Ok(json!({ "diverged": output }))
        }
        other => other,
    }
}

/// The figures of a line, or the failure that it keeps.
fn figures_of(line: Value) -> Result<Value, TrialError> {
    match line["diverged"].as_str() {
        None => Ok(line),
        Some(output) => {
            let (command, output) = ("the run".to_owned(), output.to_owned());
            // The exit code is in the second byte of a status.
            Err(HarnessError::Failed { command, status: ExitStatus::from_raw(DIVERGED << 8), output }.into())
        }
    }
}

/// The number of a run's line.
fn number(line: &Value, field: &str) -> Result<f64, HarnessError> {
    line[field].as_f64().ok_or_else(|| missing("the line of a run", line, field))
}

impl Lab for Bench<'_> {
    fn train(&mut self, variant: &Variant, tested: Tested) -> Result<Outcome, TrialError> {
        let mut outcome = Outcome { aucs: Vec::new(), rows: 0, levels: Vec::new() };
        for seed in 1..=self.seeds {
            let figures = self.figures(Run { variant, tested, seed, counts_levels: false })?;
            outcome.aucs.push(number(&figures, "auc")?);
            outcome.rows = outcome.rows.max(integer("the line of a run", &figures, "rows")?);
        }
        if counts_levels(variant, tested) {
            let figures = self.figures(Run { variant, tested, seed: 1, counts_levels: true })?;
            outcome.levels = figures["levels"].as_array().into_iter().flatten().filter_map(Value::as_u64).collect();
        }
        let auc = outcome.auc();
        self.remark(format!("memory {}, {}: {} AUC {auc:.4}", variant.memory, variant.name, name(tested)));
        Ok(outcome)
    }

    fn record(&mut self, variant: &Variant, outcome: &Outcome) -> Result<(), TrialError> {
        let mut line = line([self.experiment, self.data.name], self.model, variant, outcome);
        if !self.sets.is_empty() {
            line["set"] = json!(self.sets);
        }
        println!("{line}");
        Ok(self.notebook.keep(line)?)
    }

    fn remark(&mut self, text: String) {
        say(format!("{} {} {}: {text}", self.experiment, self.data.name, self.model.kind));
    }
}

/// The line of a result. Hashed tables count all their rows, as they would in an array.
fn line([experiment, dataset]: [&str; 2], model: Model, variant: &Variant, outcome: &Outcome) -> Value {
    let rows = variant.hashed_rows.unwrap_or(outcome.rows);
    let mut line = json!({
        "experiment": experiment, "dataset": dataset, "model": model.kind, "memory": variant.memory,
        "variant": variant.name, "auc": outcome.aucs, "rows": rows, "bytes": rows * variant.optimizers.row_bytes(model),
    });
    if !outcome.levels.is_empty() {
        line["levels"] = json!(outcome.levels);
    }
    line
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kraken::variant::{ADAM, MODELS};

    #[test]
    fn a_line_has_the_rows_and_their_bytes() {
        let outcome = Outcome { aucs: vec![0.75, 0.5], rows: 90, levels: Vec::new() };
        let gset = Variant::bounded("gset", 0.1, 10_000);
        let expected = json!({
            "experiment": "fig8", "dataset": "ml-1m", "model": "deepfm", "memory": 0.1, "variant": "gset",
            "auc": [0.75, 0.5], "rows": 90, "bytes": 90 * 60,
        });
        assert_eq!(line(["fig8", "ml-1m"], MODELS[0], &gset, &outcome), expected);
        let hashed = Variant { hashed_rows: Some(100), ..Variant::unbounded("hashed", ADAM) };
        let line = line(["fig8", "ml-1m"], MODELS[0], &hashed, &outcome);
        assert_eq!((&line["rows"], &line["bytes"]), (&json!(100), &json!(6_000)));
    }

    #[test]
    fn a_run_that_diverged_fails_again_and_other_failures_are_not_kept() {
        let failed = |code: i32| -> Result<Value, TrialError> {
            let (command, output) = ("the run".to_owned(), "the loss is not finite".to_owned());
            Err(HarnessError::Failed { command, status: ExitStatus::from_raw(code << 8), output }.into())
        };
        let line = recorded(failed(DIVERGED)).unwrap();
        let again = figures_of(line).unwrap_err();
        assert!(again.to_string().contains("exit status: 3") && again.to_string().contains("not finite"), "{again}");
        assert!(recorded(failed(1)).is_err());
        assert_eq!(figures_of(json!({ "auc": 0.5 })).unwrap()["auc"], 0.5);
    }

    #[test]
    fn a_line_has_the_levels_that_were_counted() {
        let outcome = Outcome { aucs: vec![0.75], rows: 3, levels: vec![2, 1] };
        let line = line(["fig9", "ml-1m"], MODELS[0], &Variant::unbounded("p 1", ADAM), &outcome);
        assert_eq!(line["levels"], json!([2, 1]));
    }
}

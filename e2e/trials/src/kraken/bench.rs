//! The runs of the experiments: files on disk, and processes of `rectrain run`.

use std::path::{Path, PathBuf};

use rectrain_harness::command::{command, output};
use rectrain_harness::events::{integer, test_auc};
use rectrain_harness::rectrain::train;
use rectrain_harness::{HarnessError, files, say};
use serde_json::{Value, json};

use super::dataset::{DataSet, parts};
use super::lab::{Lab, Outcome, Tested};
use super::levels;
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

/// Runs the product's own binary, and prints a line of JSON for each result.
pub(super) struct Bench<'a> {
    pub(super) binary: &'a Path,
    pub(super) data: &'a Prepared,
    pub(super) experiment: &'static str,
    pub(super) model: Model,
    pub(super) seeds: u64,
    /// The last overrides of every run.
    pub(super) sets: &'a [String],
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
    /// Trains with a checkpoint, and returns the rows by frequency level.
    fn levels(&self, variant: &Variant) -> Result<Vec<u64>, TrialError> {
        let folder = empty_folder(self.data)?;
        let variant = variant.clone().with([format!("spec.checkpoint.path={}", folder.display())]);
        self.run(&variant, Tested::Test, 1)?;
        levels_of(&folder)
    }

    fn run(&self, variant: &Variant, tested: Tested, seed: u64) -> Result<Value, HarnessError> {
        let own = [format!("spec.model.kind={},spec.training.seed={seed}", self.model.kind)];
        let mut job = command(self.binary, ["run", "--json", "--no-history"]);
        job.arg(manifest(&self.data.folder, tested));
        for set in own.iter().chain(&variant.optimizers.sets()).chain(&variant.sets).chain(self.sets) {
            job.args(["--set", set]);
        }
        train(job)
    }
}

impl Lab for Bench<'_> {
    fn train(&mut self, variant: &Variant, tested: Tested) -> Result<Outcome, TrialError> {
        let mut outcome = Outcome { aucs: Vec::new(), rows: 0, levels: Vec::new() };
        for seed in 1..=self.seeds {
            let summary = self.run(variant, tested, seed)?;
            outcome.aucs.push(test_auc(&summary)?);
            outcome.rows = outcome.rows.max(integer("the summary", &summary, "rows")?);
        }
        if variant.counts_levels && tested == Tested::Test {
            outcome.levels = self.levels(variant)?;
        }
        let auc = outcome.auc();
        self.remark(format!("memory {}, {}: {} AUC {auc:.4}", variant.memory, variant.name, name(tested)));
        Ok(outcome)
    }

    fn record(&mut self, variant: &Variant, outcome: &Outcome) {
        println!("{}", line([self.experiment, self.data.name], self.model, variant, outcome));
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
    fn a_line_has_the_levels_that_were_counted() {
        let outcome = Outcome { aucs: vec![0.75], rows: 3, levels: vec![2, 1] };
        let line = line(["fig9", "ml-1m"], MODELS[0], &Variant::unbounded("p 1", ADAM), &outcome);
        assert_eq!(line["levels"], json!([2, 1]));
    }
}

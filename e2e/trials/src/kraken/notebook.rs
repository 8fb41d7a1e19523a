//! The file of results: lines of JSON, one for each run and one for each result. A command takes
//! the figures of a run from the file if it is there. So a command that was ended goes on.
//!
//! | line | content |
//! |---|---|
//! | `{"run": {…}, "auc", "rows", "seconds"}` | a run, named by its data set, its test rows and its overrides |
//! | `{"run": {…}, "levels", "seconds"}` | a run that counts frequency levels |
//! | `{"run": {…}, "diverged", "seconds"}` | a run that diverged |
//! | `{"experiment", "dataset", "model", …}` | a result over all seeds |
//!
//! Lines that do not begin with a brace are skipped, such as the tables of `rectrain-bench`.

use std::collections::HashMap;
use std::fs::OpenOptions;
use std::io::Write;
use std::path::{Path, PathBuf};

use rectrain_harness::{HarnessError, events, files};
use serde_json::Value;

/// The results so far, and the file that keeps them. Without a file they end with the command.
pub(super) struct Notebook {
    file: Option<PathBuf>,
    /// The lines of runs, by the text of their `run`.
    runs: HashMap<String, Value>,
    /// The figures of the last result of each variant, by its name.
    results: HashMap<String, String>,
}

impl Notebook {
    /// Reads the file, if it exists. A part of a line at its end is removed: a command was killed
    /// there.
    pub(super) fn open(file: Option<&Path>) -> Result<Self, HarnessError> {
        let mut notebook = Self { file: file.map(Path::to_owned), runs: HashMap::new(), results: HashMap::new() };
        let Some(file) = file.filter(|file| file.exists()) else { return Ok(notebook) };
        let text = files::read(file)?;
        let whole = whole_lines(&text);
        if whole.len() < text.len() {
            files::write(file, whole)?;
        }
        lines(&file.display().to_string(), whole)?.into_iter().for_each(|line| notebook.note(line));
        Ok(notebook)
    }

    /// The line of a run.
    pub(super) fn run(&self, run: &Value) -> Option<&Value> {
        self.runs.get(&run.to_string())
    }

    /// Adds a line, unless the file has this run, or this result as the last one of its variant.
    /// The last one counts in a report.
    pub(super) fn keep(&mut self, line: Value) -> Result<(), HarnessError> {
        let is_there = match &line["run"] {
            Value::Null => self.results.get(&name(&line)) == Some(&figures(&line)),
            run => self.run(run).is_some(),
        };
        if let (Some(file), false) = (&self.file, is_there) {
            append(file, &line)?;
        }
        self.note(line);
        Ok(())
    }

    fn note(&mut self, line: Value) {
        if line["run"].is_null() {
            self.results.insert(name(&line), figures(&line));
        } else {
            self.runs.insert(line["run"].to_string(), line);
        }
    }
}

/// The name of a result's variant.
fn name(line: &Value) -> String {
    let fields = ["experiment", "dataset", "model", "memory", "variant", "set"];
    fields.map(|field| line[field].to_string()).join(" ")
}

/// The figures of a result. A number may lose its last digit between two commands, so an AUC has
/// nine digits here.
fn figures(line: &Value) -> String {
    let aucs = line["auc"].as_array().into_iter().flatten().filter_map(Value::as_f64);
    let aucs: Vec<String> = aucs.map(|auc| format!("{auc:.9}")).collect();
    format!("{} {} {} {}", aucs.join(" "), line["rows"], line["bytes"], line["levels"])
}

fn append(file: &Path, line: &Value) -> Result<(), HarnessError> {
    if let Some(folder) = file.parent() {
        files::make_folder(folder)?;
    }
    let opened = OpenOptions::new().create(true).append(true).open(file);
    let written = opened.and_then(|mut opened| opened.write_all(format!("{line}\n").as_bytes()));
    written.map_err(HarnessError::io("write", file.display()))
}

/// The text up to the end of its last whole line.
fn whole_lines(text: &str) -> &str {
    text.rfind('\n').map_or("", |end| &text[..=end])
}

/// The lines of JSON in a text; `name` names it for errors.
pub(super) fn lines(name: &str, text: &str) -> Result<Vec<Value>, HarnessError> {
    let numbered = text.lines().enumerate().filter(|(_, line)| line.starts_with('{'));
    numbered.map(|(number, line)| events::parse(&format!("line {} of {name}", number + 1), line)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn file(name: &str) -> PathBuf {
        let file = std::env::temp_dir().join(format!("rectrain-kraken-{name}-{}.jsonl", std::process::id()));
        let _absent = std::fs::remove_file(&file);
        file
    }

    fn run(seed: u64) -> Value {
        json!({ "dataset": "d", "sets": [format!("seed={seed}")] })
    }

    #[test]
    fn a_second_command_finds_the_runs_of_the_first() {
        let file = file("found");
        let result = |auc: &[f64]| json!({ "experiment": "fig8", "memory": 0.1, "variant": "gset", "auc": auc });
        let mut first = Notebook::open(Some(&file)).unwrap();
        first.keep(json!({ "run": run(1), "auc": 0.7612345678901234 })).unwrap();
        first.keep(result(&[0.76])).unwrap();
        let mut second = Notebook::open(Some(&file)).unwrap();
        assert_eq!(second.run(&run(1)).unwrap()["auc"].as_f64().map(|auc| (auc * 1e6).round()), Some(761_235.0));
        assert!(second.run(&run(2)).is_none());
        second.keep(json!({ "run": run(1), "auc": 0.5 })).unwrap();
        second.keep(result(&[0.76])).unwrap();
        second.keep(result(&[0.76, 0.77])).unwrap();
        assert_eq!(files::read(&file).unwrap().lines().count(), 3, "only the result with two seeds is new");
        std::fs::remove_file(&file).unwrap();
    }

    /// Fewer seeds, or runs with other settings, give a variant other figures.
    #[test]
    fn a_result_with_other_figures_becomes_the_last_one() {
        let file = file("figures");
        let result =
            |auc: &[f64], rows: u64| json!({ "experiment": "fig8", "variant": "gset", "auc": auc, "rows": rows });
        let results = [result(&[0.76, 0.77], 5), result(&[0.76], 5), result(&[0.76], 6), result(&[0.76, 0.77], 5)];
        for line in &results {
            Notebook::open(Some(&file)).unwrap().keep(line.clone()).unwrap();
        }
        Notebook::open(Some(&file)).unwrap().keep(results[3].clone()).unwrap();
        assert_eq!(lines("f", &files::read(&file).unwrap()).unwrap(), results);
        std::fs::remove_file(&file).unwrap();
    }

    #[test]
    fn a_part_of_a_line_is_removed_and_its_run_repeated() {
        let file = file("cut");
        files::write(&file, format!("{{\"run\":{}}}\n{{\"run\":{}", run(1), run(2))).unwrap();
        let mut notebook = Notebook::open(Some(&file)).unwrap();
        assert!(notebook.run(&run(1)).is_some() && notebook.run(&run(2)).is_none());
        notebook.keep(json!({ "run": run(2) })).unwrap();
        assert!(Notebook::open(Some(&file)).unwrap().run(&run(2)).is_some());
        std::fs::remove_file(&file).unwrap();
    }

    #[test]
    fn tables_are_skipped_and_broken_lines_are_named() {
        assert_eq!(lines("f", "a table\n{\"a\":1}\n\n").unwrap(), [json!({ "a": 1 })]);
        let error = lines("f.jsonl", "{\"a\":1}\n{\"a\":\n").unwrap_err().to_string();
        assert!(error.contains("line 2 of f.jsonl"), "{error}");
    }

    #[test]
    fn without_a_file_runs_are_kept_in_memory() {
        let mut notebook = Notebook::open(None).unwrap();
        notebook.keep(json!({ "run": run(1) })).unwrap();
        assert!(notebook.run(&run(1)).is_some());
    }
}

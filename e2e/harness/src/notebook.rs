//! A file of results: lines of JSON. A line with the field `run` has the figures of a run. The
//! field names the run by everything that may change them. A command takes the figures of a run
//! from the file if they are there. So a command that was ended goes on.
//!
//! Lines that do not begin with a brace are skipped, such as tables.

use std::collections::HashMap;
use std::fs::OpenOptions;
use std::io::Write;
use std::path::{Path, PathBuf};

use serde_json::Value;

use crate::{HarnessError, events, files};

/// The runs so far, and the file that keeps them. Without a file they end with the command.
#[derive(Debug)]
pub struct Notebook {
    file: Option<PathBuf>,
    /// The lines of runs, by the text of their `run`.
    runs: HashMap<String, Value>,
}

impl Notebook {
    /// Reads the file, if it exists, and returns its lines as well. A part of a line at its end is
    /// removed: a command was killed there.
    ///
    /// # Errors
    /// [`HarnessError::Io`]; [`HarnessError::Json`], which names the line.
    pub fn open(file: Option<&Path>) -> Result<(Self, Vec<Value>), HarnessError> {
        let mut notebook = Self { file: file.map(Path::to_owned), runs: HashMap::new() };
        let Some(file) = file.filter(|file| file.exists()) else { return Ok((notebook, Vec::new())) };
        let text = files::read(file)?;
        let whole = whole_lines(&text);
        if whole.len() < text.len() {
            files::write(file, whole)?;
        }
        let lines = lines(&file.display().to_string(), whole)?;
        lines.iter().filter(|line| !line["run"].is_null()).for_each(|line| notebook.note(line.clone()));
        Ok((notebook, lines))
    }

    /// The line of a run.
    #[must_use]
    pub fn run(&self, run: &Value) -> Option<&Value> {
        self.runs.get(&run.to_string())
    }

    /// Adds the line of a run, unless this run has one.
    ///
    /// # Errors
    /// [`HarnessError::Io`].
    pub fn keep_run(&mut self, line: Value) -> Result<(), HarnessError> {
        if self.run(&line["run"]).is_none() {
            self.append(&line)?;
            self.note(line);
        }
        Ok(())
    }

    /// Adds a line to the file, if there is one.
    ///
    /// # Errors
    /// [`HarnessError::Io`].
    pub fn append(&self, line: &Value) -> Result<(), HarnessError> {
        let Some(file) = &self.file else { return Ok(()) };
        if let Some(folder) = file.parent() {
            files::make_folder(folder)?;
        }
        let opened = OpenOptions::new().create(true).append(true).open(file);
        let written = opened.and_then(|mut opened| opened.write_all(format!("{line}\n").as_bytes()));
        written.map_err(HarnessError::io("write", file.display()))
    }

    fn note(&mut self, line: Value) {
        self.runs.insert(line["run"].to_string(), line);
    }
}

/// The lines of a file of results.
///
/// # Errors
/// [`HarnessError::Io`]; [`HarnessError::Json`], which names the line.
pub fn read(file: &Path) -> Result<Vec<Value>, HarnessError> {
    lines(&file.display().to_string(), &files::read(file)?)
}

/// The text up to the end of its last whole line.
fn whole_lines(text: &str) -> &str {
    text.rfind('\n').map_or("", |end| &text[..=end])
}

/// The lines of JSON in a text; `name` names it for errors.
fn lines(name: &str, text: &str) -> Result<Vec<Value>, HarnessError> {
    let numbered = text.lines().enumerate().filter(|(_, line)| line.starts_with('{'));
    numbered.map(|(number, line)| events::parse(&format!("line {} of {name}", number + 1), line)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn file(name: &str) -> PathBuf {
        let file = std::env::temp_dir().join(format!("rectrain-notebook-{name}-{}.jsonl", std::process::id()));
        let _absent = std::fs::remove_file(&file);
        file
    }

    fn open(file: &Path) -> Notebook {
        Notebook::open(Some(file)).unwrap().0
    }

    fn run(seed: u64) -> Value {
        json!({ "dataset": "d", "sets": [format!("seed={seed}")] })
    }

    #[test]
    fn a_second_command_finds_the_runs_of_the_first() {
        let file = file("found");
        open(&file).keep_run(json!({ "run": run(1), "auc": 0.7612345678901234 })).unwrap();
        let mut second = open(&file);
        assert_eq!(second.run(&run(1)).unwrap()["auc"].as_f64().map(|auc| (auc * 1e6).round()), Some(761_235.0));
        assert!(second.run(&run(2)).is_none());
        second.keep_run(json!({ "run": run(1), "auc": 0.5 })).unwrap();
        assert_eq!(files::read(&file).unwrap().lines().count(), 1, "the first figures stay");
        std::fs::remove_file(&file).unwrap();
    }

    #[test]
    fn a_part_of_a_line_is_removed_and_its_run_repeated() {
        let file = file("cut");
        files::write(&file, format!("{{\"run\":{}}}\n{{\"run\":{}", run(1), run(2))).unwrap();
        let mut notebook = open(&file);
        assert!(notebook.run(&run(1)).is_some() && notebook.run(&run(2)).is_none());
        notebook.keep_run(json!({ "run": run(2) })).unwrap();
        assert!(open(&file).run(&run(2)).is_some());
        std::fs::remove_file(&file).unwrap();
    }

    #[test]
    fn lines_of_results_are_no_runs() {
        let file = file("results");
        open(&file).append(&json!({ "experiment": "a" })).unwrap();
        let (notebook, lines) = Notebook::open(Some(&file)).unwrap();
        assert_eq!(lines, [json!({ "experiment": "a" })]);
        assert!(notebook.run(&Value::Null).is_none());
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
        let (mut notebook, _no_lines) = Notebook::open(None).unwrap();
        notebook.keep_run(json!({ "run": run(1) })).unwrap();
        assert!(notebook.run(&run(1)).is_some());
    }
}

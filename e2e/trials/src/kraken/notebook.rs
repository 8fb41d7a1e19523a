//! The file of results ([`rectrain_harness::notebook`]) with one line for each run and one for each
//! result.
//!
//! | line | content |
//! |---|---|
//! | `{"run": {…}, "auc", "rows", "seconds"}` | a run, named by its data set, its test rows and its overrides |
//! | `{"run": {…}, "levels", "seconds"}` | a run that counts frequency levels |
//! | `{"run": {…}, "diverged", "seconds"}` | a run that diverged |
//! | `{"experiment", "dataset", "model", …}` | a result over all seeds |

use std::collections::HashMap;
use std::path::Path;

use rectrain_harness::{HarnessError, notebook};
use serde_json::Value;

/// The results so far, and the file that keeps them. Without a file they end with the command.
pub(super) struct Notebook {
    runs: notebook::Notebook,
    /// The figures of the last result of each variant, by its name.
    results: HashMap<String, String>,
}

impl Notebook {
    /// Reads the file, if it exists.
    pub(super) fn open(file: Option<&Path>) -> Result<Self, HarnessError> {
        let (runs, lines) = notebook::Notebook::open(file)?;
        let results = lines.iter().filter(|line| line["run"].is_null()).map(|line| (name(line), figures(line)));
        Ok(Self { runs, results: results.collect() })
    }

    /// The line of a run.
    pub(super) fn run(&self, run: &Value) -> Option<&Value> {
        self.runs.run(run)
    }

    /// Adds a line, unless the file has this run, or this result as the last one of its variant.
    /// The last one counts in a report.
    pub(super) fn keep(&mut self, line: Value) -> Result<(), HarnessError> {
        if !line["run"].is_null() {
            return self.runs.keep_run(line);
        }
        let (name, figures) = (name(&line), figures(&line));
        if self.results.get(&name) != Some(&figures) {
            self.runs.append(&line)?;
            self.results.insert(name, figures);
        }
        Ok(())
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

#[cfg(test)]
mod tests {
    use std::path::PathBuf;

    use super::*;
    use serde_json::json;

    fn file(name: &str) -> PathBuf {
        let file = std::env::temp_dir().join(format!("rectrain-kraken-{name}-{}.jsonl", std::process::id()));
        let _absent = std::fs::remove_file(&file);
        file
    }

    fn result(auc: &[f64], rows: u64) -> Value {
        json!({ "experiment": "fig8", "memory": 0.1, "variant": "gset", "auc": auc, "rows": rows })
    }

    #[test]
    fn a_second_command_finds_the_runs_and_results_of_the_first() {
        let file = file("found");
        let run = json!({ "dataset": "d", "sets": ["seed=1"] });
        let mut first = Notebook::open(Some(&file)).unwrap();
        first.keep(json!({ "run": run, "auc": 0.76 })).unwrap();
        first.keep(result(&[0.76], 5)).unwrap();
        let mut second = Notebook::open(Some(&file)).unwrap();
        assert_eq!(second.run(&run).unwrap()["auc"], 0.76);
        second.keep(json!({ "run": run, "auc": 0.5 })).unwrap();
        second.keep(result(&[0.76], 5)).unwrap();
        second.keep(result(&[0.76, 0.77], 5)).unwrap();
        assert_eq!(notebook::read(&file).unwrap().len(), 3, "only the result with two seeds is new");
        std::fs::remove_file(&file).unwrap();
    }

    /// Fewer seeds, or runs with other settings, give a variant other figures.
    #[test]
    fn a_result_with_other_figures_becomes_the_last_one() {
        let file = file("figures");
        let results = [result(&[0.76, 0.77], 5), result(&[0.76], 5), result(&[0.76], 6), result(&[0.76, 0.77], 5)];
        for line in &results {
            Notebook::open(Some(&file)).unwrap().keep(line.clone()).unwrap();
        }
        Notebook::open(Some(&file)).unwrap().keep(results[3].clone()).unwrap();
        assert_eq!(notebook::read(&file).unwrap(), results);
        std::fs::remove_file(&file).unwrap();
    }
}

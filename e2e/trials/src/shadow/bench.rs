//! The runs: files on disk, and processes of `rectrain run`.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Instant;

use rectrain_harness::command::{command, output};
use rectrain_harness::events::missing;
use rectrain_harness::notebook::Notebook;
use rectrain_harness::rectrain::train;
use rectrain_harness::workspace::workspace;
use rectrain_harness::{HarnessError, files};
use serde_json::{Value, json};

use super::dataset::DataSet;
use super::done::Done;
use super::plan::{Plan, USAGE};
use super::run::{Figures, Rows, Run};
use super::{quality, times};
use crate::TrialError;

/// The manifest of the runs on synthetic rows.
const MANIFEST: &str = "docs/examples/shadow.yaml";

/// A data set whose files are ready.
struct Prepared {
    name: &'static str,
    manifest: PathBuf,
}

/// Runs a `rectrain`, and prints a line of JSON for each run.
pub(super) struct Bench<'a> {
    pub(super) plan: &'a Plan,
    pub(super) binary: &'a Path,
    /// The folder for files of rows and manifests.
    pub(super) work: &'a Path,
    /// The runs of earlier commands, and of this one.
    notebook: Notebook,
    prepared: Vec<Prepared>,
}

impl<'a> Bench<'a> {
    pub(super) fn new(plan: &'a Plan, binary: &'a Path, work: &'a Path, notebook: Notebook) -> Self {
        Self { plan, binary, work, notebook, prepared: Vec::new() }
    }

    /// The figures of these runs: from the notebook, or from the run itself.
    ///
    /// # Errors
    /// The first run that fails, by its name.
    pub(super) fn all(&mut self, runs: Vec<Run>) -> Result<Vec<Done>, TrialError> {
        let done = |run: Run| self.line(&run).map(|line| Done { run, line });
        runs.into_iter().map(done).collect()
    }

    fn line(&mut self, run: &Run) -> Result<Value, TrialError> {
        let name = run.name();
        if let Some(line) = self.notebook.run(&name) {
            return Ok(line.clone());
        }
        let begun = Instant::now();
        let mut line = self.figures(run).map_err(TrialError::part(run.title()))?;
        line["seconds"] = json!((begun.elapsed().as_secs_f64() * 10.0).round() / 10.0);
        line["run"] = name;
        println!("{line}");
        self.notebook.keep_run(line.clone())?;
        Ok(line)
    }

    fn figures(&mut self, run: &Run) -> Result<Value, TrialError> {
        match (run.figures, run.rows) {
            (Figures::Times, _) => times::measure(self.job(run, Path::new(MANIFEST)), run.workers, self.plan.steps),
            (_, Rows::Public(set)) => self.quality(run, set),
            (Figures::Speed | Figures::Quality, _) => Ok(self.speed(run)?),
        }
    }

    /// Examples per second, and the average sync gap.
    fn speed(&self, run: &Run) -> Result<Value, HarnessError> {
        let summary = train(self.job(run, Path::new(MANIFEST)))?;
        let field = "samplesPerSecond";
        let speed = summary[field].as_f64().ok_or_else(|| missing("the summary", &summary, field))?;
        Ok(json!({ "samplesPerSecond": speed, "averageSyncGap": summary["averageSyncGap"] }))
    }

    fn quality(&mut self, run: &Run, set: &'static DataSet) -> Result<Value, TrialError> {
        let manifest = self.prepare(set)?;
        Ok(quality::figures(&train(self.job(run, &manifest))?)?)
    }

    /// `rectrain run` of a run.
    fn job(&self, run: &Run, manifest: &Path) -> Command {
        let mut job = command(self.binary, ["run", "--json", "--no-history"]);
        job.arg(manifest).current_dir(workspace());
        for set in run.sets() {
            job.args(["--set", &set]);
        }
        if !run.cores.is_empty() {
            job.arg("--processes");
        }
        for (worker, cores) in run.cores.iter().enumerate() {
            job.args(["--cpus", &format!("denseWorker-{worker}={cores}")]);
        }
        job
    }

    /// The manifest of a data set. Reads the data set once.
    fn prepare(&mut self, set: &'static DataSet) -> Result<PathBuf, TrialError> {
        if let Some(ready) = self.prepared.iter().find(|ready| ready.name == set.name) {
            return Ok(ready.manifest.clone());
        }
        let data = self.plan.data.as_deref().ok_or(HarnessError::Usage(USAGE))?;
        let folder = self.work.join(set.name);
        let parts = set.parts(&output(command("gzip", ["-dc"]).arg(data.join(set.file)))?)?;
        let [train, test] = ["train", "test"].map(|part| folder.join(part).with_extension(set.format));
        files::write(&train, &parts.train)?;
        files::write(&test, &parts.test)?;
        let manifest = folder.join("job.json");
        let text = set.manifest(&train.display().to_string(), &test.display().to_string()).to_string();
        files::write(&manifest, text)?;
        self.prepared.push(Prepared { name: set.name, manifest: manifest.clone() });
        Ok(manifest)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::shadow::plan::parse;
    use crate::shadow::way::Way;

    fn words(job: &Command) -> Vec<String> {
        job.get_args().map(|word| word.to_string_lossy().into_owned()).collect()
    }

    #[test]
    fn limited_workers_are_processes_and_others_are_not() {
        let plan = parse(&["--part", "eps"], 2).unwrap();
        let (notebook, _no_lines) = Notebook::open(None).unwrap();
        let bench = Bench::new(&plan, Path::new("rectrain"), Path::new("work"), notebook);
        let run = Run::limited(Figures::Speed, Rows::Synthetic { batches: 5 }, Way::Sync, vec![0.5, 0.125]);
        let limited = words(&bench.job(&run, Path::new(MANIFEST)));
        assert_eq!(limited[..4], ["run", "--json", "--no-history", MANIFEST]);
        let expected = ["--processes", "--cpus", "denseWorker-0=0.5", "--cpus", "denseWorker-1=0.125"];
        assert_eq!(limited[limited.len() - 5..], expected);
        let free = words(&bench.job(&Run { cores: Vec::new(), ..run }, Path::new(MANIFEST)));
        assert!(!free.iter().any(|word| word == "--processes" || word == "--cpus"), "{free:?}");
    }

    /// The program does not exist, so a run that is not in the notebook fails.
    #[test]
    fn a_run_of_the_notebook_is_not_repeated_and_a_failure_names_its_run() {
        let plan = parse(&["--part", "eps"], 2).unwrap();
        let run = Run::limited(Figures::Speed, Rows::Synthetic { batches: 5 }, Way::Sync, vec![0.5]);
        let (mut notebook, _no_lines) = Notebook::open(None).unwrap();
        notebook.keep_run(json!({ "run": run.name(), "samplesPerSecond": 7.5 })).unwrap();
        let mut bench = Bench::new(&plan, Path::new("/no/rectrain"), Path::new("work"), notebook);
        let done = bench.all(vec![run.clone()]).unwrap();
        assert_eq!(done[0].number("samplesPerSecond").unwrap(), 7.5);
        let error = bench.all(vec![Run { seed: 2, ..run }]).err().expect("no program").to_string();
        assert!(error.contains("sync on synthetic rows with 1 dense workers of [0.5] cores, seed 2"), "{error}");
        assert!(error.contains("/no/rectrain"), "{error}");
    }
}

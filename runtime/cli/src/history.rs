//! The history of a run: a folder `NAME-TIME` with `events.jsonl`, `manifest.yaml` and `page.html`.
//!
//! `events.jsonl` is written while the job runs, so a killed process loses nothing but the last
//! line. Its first line says how the run was started. The page is made from the other two files
//! when the run ends, and `rectrain runs show` makes it again.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

use clap::Args;
use parking_lot::Mutex;
use rectrain_coordinator::{PlanFacts, RunFacts, page_of_runs};
use rectrain_protocol::events::JobEvent;
use rectrain_protocol::plan::JobPlan;
use serde_json::{Value, json};

use crate::record::{self, EVENTS, MANIFEST, PAGE};

/// Progress is kept at intervals of this fraction of the time since the start, so that a history of
/// any length has some ten thousand points.
const PROGRESS_FRACTION: u32 = 4000;
/// The least time between two reports of progress that are kept.
const LEAST_PAUSE: Duration = Duration::from_millis(150);
/// Folders with one name, at most. Runs of one name that start in the same second get a number.
const MOST_IN_A_SECOND: u32 = 1000;

#[derive(Debug, Clone, Args)]
pub(crate) struct HistoryArgs {
    /// The folder for histories: each run leaves NAME-TIME/{events.jsonl,manifest.yaml,page.html}
    #[arg(long, value_name = "FOLDER", default_value = "runs")]
    pub(crate) runs: PathBuf,
    /// Leave no history of the run
    #[arg(long)]
    pub(crate) no_history: bool,
    /// Also write the curves as an event file of TensorBoard, in DIR/NAME-TIME
    #[arg(long, value_name = "DIR")]
    pub(crate) tensorboard: Option<PathBuf>,
    /// Open the job's page in a browser
    #[arg(long)]
    pub(crate) open: bool,
}

/// The history of one run. It writes to disk from the first event of training on. If it cannot be
/// written, the job continues without it.
#[derive(Clone, Default)]
pub(crate) struct History(Option<Arc<Mutex<Log>>>);

struct Log {
    state: LogState,
    parent: PathBuf,
    name: String,
    manifest: String,
    began: Instant,
    last_progress: Option<Instant>,
    /// The line of the last progress, if it was not kept yet.
    skipped: Option<String>,
    number: u64,
    has_ended: bool,
}

enum LogState {
    /// Training has not begun. These are the lines so far.
    Before(Vec<String>),
    Open(Folder),
    /// The folder could not be written.
    Lost,
}

struct Folder {
    path: PathBuf,
    events: File,
}

/// How the command ended.
#[derive(Debug)]
pub(crate) enum Ending {
    Done,
    Interrupted(String),
    Failed(String),
}

impl History {
    /// The history of a run with this plan. `manifest` is its YAML.
    pub(crate) fn of(args: &HistoryArgs, plan: &JobPlan, manifest: Option<&str>) -> Self {
        if args.no_history {
            return Self::default();
        }
        let mut log = Log {
            state: LogState::Before(Vec::new()),
            parent: args.runs.clone(),
            name: plan.name.clone(),
            manifest: manifest.unwrap_or_default().to_owned(),
            began: Instant::now(),
            last_progress: None,
            skipped: None,
            number: 0,
            has_ended: false,
        };
        log.write(&json!({
            "event": record::OPENED,
            "job": plan.name,
            "mode": plan.mode.name(),
            "command": command_line(),
            "version": env!("CARGO_PKG_VERSION"),
            "process": std::process::id(),
            "plan": PlanFacts::of(plan),
        }));
        Self(Some(Arc::new(Mutex::new(log))))
    }

    /// The facts about the run that its live page shows, without the manifest.
    pub(crate) fn facts(&self) -> RunFacts {
        let history = self.0.as_ref().map(|log| log.lock().parent.display().to_string());
        RunFacts { manifest: None, command: Some(command_line()), history }
    }

    /// Keeps an event. Training begins with `Started` or `Resumed`, and the folder with it.
    pub(crate) fn record(&self, event: &JobEvent) {
        let Some(log) = &self.0 else { return };
        let mut log = log.lock();
        match serde_json::to_value(event) {
            Ok(value) if matches!(event, JobEvent::Progress { .. }) => log.progress(&value),
            Ok(value) => log.write(&value),
            Err(error) => tracing::warn!(%error, "an event is missing from the run's history"),
        }
        log.has_ended |= event.is_last();
        if matches!(event, JobEvent::Started { .. } | JobEvent::Resumed { .. }) {
            log.open();
        }
    }

    /// Keeps the members and their figures, for the page of the ended run.
    pub(crate) fn record_state(&self, state: Option<Value>) {
        let (Some(log), Some(state)) = (&self.0, state) else { return };
        log.lock().write(&json!({ "event": record::STATE, "state": state }));
    }

    /// Ends the history, and writes its page. Returns the page; `None` if there is no history.
    pub(crate) fn end(&self, ending: &Ending) -> Option<PathBuf> {
        let mut log = self.0.as_ref()?.lock();
        match ending {
            _ if log.has_ended => {}
            Ending::Interrupted(message) => log.write(&json!({ "event": record::INTERRUPTED, "message": message })),
            Ending::Failed(message) => log.write(&json!({ "event": record::FAILED, "message": message })),
            Ending::Done => {}
        }
        log.keep_skipped();
        let folder = log.folder()?.to_owned();
        match write_page(&folder) {
            Ok(page) => Some(page),
            Err(error) => {
                tracing::warn!(%error, folder = %folder.display(), "the page of the run cannot be written");
                None
            }
        }
    }
}

impl Log {
    /// Keeps a report of progress, or the latest one of those that come too soon.
    fn progress(&mut self, event: &Value) {
        let pause = LEAST_PAUSE.max(self.began.elapsed() / PROGRESS_FRACTION);
        let line = self.line(event);
        if self.last_progress.is_some_and(|last: Instant| last.elapsed() < pause) {
            self.skipped = Some(line);
            return;
        }
        self.last_progress = Some(Instant::now());
        self.skipped = None;
        self.put(&line);
    }

    /// Keeps the last report of progress before another event, so that curves reach that event.
    fn keep_skipped(&mut self) {
        if let Some(line) = self.skipped.take() {
            self.put(&line);
        }
    }

    fn write(&mut self, event: &Value) {
        self.keep_skipped();
        let line = self.line(event);
        self.put(&line);
    }

    fn line(&mut self, event: &Value) -> String {
        self.number += 1;
        let at = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or(Duration::ZERO).as_secs_f64();
        format!("{}\n", json!({ "number": self.number, "at": at, "event": event }))
    }

    fn put(&mut self, line: &str) {
        let written = match &mut self.state {
            LogState::Before(lines) => {
                lines.push(line.to_owned());
                return;
            }
            LogState::Open(folder) => folder.events.write_all(line.as_bytes()),
            LogState::Lost => return,
        };
        if let Err(error) = written {
            self.lose(&error);
        }
    }

    /// Makes the folder, with the lines so far.
    fn open(&mut self) {
        let LogState::Before(lines) = &self.state else { return };
        match Folder::make(&self.parent, &self.name, &self.manifest, &lines.concat()) {
            Ok(folder) => self.state = LogState::Open(folder),
            Err(error) => self.lose(&error),
        }
    }

    fn lose(&mut self, error: &io::Error) {
        let folder = self.folder().unwrap_or(&self.parent).display().to_string();
        tracing::warn!(%error, folder, "the run's history cannot be written; --no-history leaves it out");
        self.state = LogState::Lost;
    }

    fn folder(&self) -> Option<&Path> {
        match &self.state {
            LogState::Open(folder) => Some(&folder.path),
            _ => None,
        }
    }
}

impl Folder {
    fn make(parent: &Path, name: &str, manifest: &str, lines: &str) -> io::Result<Self> {
        fs::create_dir_all(parent)?;
        let path = unique_folder(parent, &format!("{name}-{}", jiff::Zoned::now().strftime("%Y%m%d-%H%M%S")))?;
        fs::write(path.join(MANIFEST), manifest)?;
        let mut events = OpenOptions::new().create_new(true).append(true).open(path.join(EVENTS))?;
        events.write_all(lines.as_bytes())?;
        Ok(Self { path, events })
    }
}

/// Makes a folder of this name, or with a number after it.
pub(crate) fn unique_folder(parent: &Path, name: &str) -> io::Result<PathBuf> {
    for number in 1..MOST_IN_A_SECOND {
        let path = if number == 1 { parent.join(name) } else { parent.join(format!("{name}-{number}")) };
        match fs::create_dir(&path) {
            Ok(()) => return Ok(path),
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
            Err(error) => return Err(error),
        }
    }
    Err(io::Error::new(io::ErrorKind::AlreadyExists, format!("{name} exists {MOST_IN_A_SECOND} times")))
}

/// Makes the page of a folder from its other files.
pub(crate) fn write_page(folder: &Path) -> io::Result<PathBuf> {
    let page = folder.join(PAGE);
    fs::write(&page, page_of_runs(&[record::read(folder)?]))?;
    Ok(page)
}

/// The command line as a person would repeat it.
fn command_line() -> String {
    let arguments = std::env::args_os().skip(1).map(|word| quoted(word.to_string_lossy().into_owned()));
    ["rectrain".to_owned()].into_iter().chain(arguments).collect::<Vec<_>>().join(" ")
}

/// The word in quotation marks, if a shell would change it.
fn quoted(word: String) -> String {
    let is_plain = |letter: char| letter.is_alphanumeric() || "-_./=:,@%+".contains(letter);
    if !word.is_empty() && word.chars().all(is_plain) { word } else { format!("'{}'", word.replace('\'', "'\\''")) }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "an unwrap in a test is an assertion")]
mod tests {
    use std::collections::BTreeMap;

    use rectrain_protocol::plan::small_plan;

    use super::*;

    fn history(folder: &Path) -> History {
        let args = HistoryArgs { runs: folder.join("runs"), no_history: false, tensorboard: None, open: false };
        History::of(&args, &small_plan(&[]), Some("kind: RecTrainingJob\n"))
    }

    fn started() -> JobEvent {
        let (job, mode, model) = ("small".to_owned(), "sync".to_owned(), "dlrm".to_owned());
        JobEvent::Started { job, mode, model, dense_parameters: 7, replicas: BTreeMap::new(), from: None }
    }

    fn progress(step: u64) -> JobEvent {
        JobEvent::Progress {
            step,
            total_steps: Some(100),
            samples: 10 * step,
            samples_per_second: 5.0,
            loss: 0.5,
            running_auc: None,
            gradient_norm: None,
            stream: None,
            window: None,
            baseline: None,
        }
    }

    fn lines(folder: &Path) -> Vec<Value> {
        let text = fs::read_to_string(folder.join(EVENTS)).unwrap();
        text.lines().map(|line| serde_json::from_str::<Value>(line).unwrap()["event"].clone()).collect()
    }

    #[test]
    fn a_run_leaves_its_events_manifest_and_page() {
        let directory = tempfile::tempdir().unwrap();
        let history = history(directory.path());
        history.record(&JobEvent::Warning { message: "early".to_owned() });
        assert!(!directory.path().join("runs").exists(), "nothing is written before training begins");
        history.record(&started());
        history.record(&progress(3));
        let page = history.end(&Ending::Interrupted("no checkpoint was saved".to_owned())).unwrap();
        let folder = page.parent().unwrap();
        let kinds: Vec<Value> = lines(folder).iter().map(|event| event["event"].clone()).collect();
        assert_eq!(kinds, ["opened", "warning", "started", "progress", "interrupted"]);
        assert_eq!(fs::read_to_string(folder.join(MANIFEST)).unwrap(), "kind: RecTrainingJob\n");
        let page = fs::read_to_string(page).unwrap();
        assert!(page.contains("\"phase\":\"Interrupted\"") && page.contains("no checkpoint was saved"));
    }

    #[test]
    fn the_last_progress_before_an_event_is_kept() {
        let directory = tempfile::tempdir().unwrap();
        let history = history(directory.path());
        history.record(&started());
        for step in 1..=500 {
            history.record(&progress(step));
        }
        let page = history.end(&Ending::Done).unwrap();
        let steps: Vec<u64> = lines(page.parent().unwrap()).iter().filter_map(|event| event["step"].as_u64()).collect();
        assert_eq!((steps.first(), steps.last()), (Some(&1), Some(&500)), "{steps:?}");
        assert!(steps.len() < 500, "most of the reports come too soon");
    }

    #[test]
    fn a_run_that_never_trained_leaves_no_folder() {
        let directory = tempfile::tempdir().unwrap();
        let history = history(directory.path());
        assert_eq!(history.end(&Ending::Failed("no such file".to_owned())), None);
        assert!(!directory.path().join("runs").exists());
    }

    #[test]
    fn a_folder_that_cannot_be_made_does_not_stop_the_run() {
        let directory = tempfile::tempdir().unwrap();
        fs::write(directory.path().join("runs"), "a file").unwrap();
        let history = history(directory.path());
        history.record(&started());
        history.record(&progress(1));
        assert_eq!(history.end(&Ending::Done), None);
    }

    #[test]
    fn two_runs_of_one_second_have_two_folders() {
        let directory = tempfile::tempdir().unwrap();
        let names = [1, 2].map(|_| unique_folder(directory.path(), "criteo-20260101-000000").unwrap());
        assert_ne!(names[0], names[1]);
    }

    #[test]
    fn words_that_a_shell_would_change_are_quoted() {
        assert_eq!(quoted("--set=a.b=1".to_owned()), "--set=a.b=1");
        assert_eq!(quoted("a={1,2} 'x'".to_owned()), r"'a={1,2} '\''x'\'''");
    }
}

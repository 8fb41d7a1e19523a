//! Shows a job's events: to a person as a progress bar and a table, to a program as one line of
//! JSON per event. Progress goes to standard error, results go to standard output.

use std::io::IsTerminal;
use std::time::{Duration, Instant, SystemTime};

use indicatif::{ProgressBar, ProgressStyle};
use rectrain_protocol::events::{JobEvent, Summary, TestMetrics};
use serde::Serialize;

use crate::history::History;
use crate::human::number;
use crate::outlook::Outlook;
use crate::output::{self, say};
use crate::progress::{Course, Figures};
use crate::sentences::{doubt, sentence, summary_table};
use crate::tensorboard::TensorBoard;

/// See the module's text.
pub(crate) struct Display {
    json: bool,
    bar: ProgressBar,
    /// True if progress is shown as lines, because standard error is no terminal.
    lines: bool,
    last_line: Option<Instant>,
    course: Course,
    /// Warnings that wait until the job has started: a job that cannot start has one error instead.
    pending: Vec<String>,
    /// The line of JSON with the addresses. It waits, too: `started` stays the first event.
    serving: Option<Serving>,
    /// The best AUC of an evaluation so far, and its step.
    best: Option<(f64, u64)>,
    /// The step at which the job last resumed.
    resumed_at: Option<u64>,
    /// Whether this run has reported progress.
    has_progressed: bool,
    /// Why the summary is not on standard output, in a sentence.
    unwritten: Option<String>,
    history: History,
    tensorboard: TensorBoard,
}

/// The least time between two lines of progress.
const LINE_EVERY: Duration = Duration::from_secs(5);

/// An event as `--json` prints it.
#[derive(Serialize)]
struct Line<'a> {
    #[serde(flatten)]
    event: &'a JobEvent,
    /// The time of the event in seconds since 1970 (UTC).
    at: f64,
    /// The epoch of the event's step, from 1.
    #[serde(skip_serializing_if = "Option::is_none")]
    epoch: Option<u32>,
}

/// The addresses of a job, as `--json` prints them.
#[derive(Serialize)]
struct Serving {
    event: &'static str,
    page: String,
    metrics: String,
    control: String,
    at: f64,
}

/// The addresses where a running job can be watched and controlled.
pub(crate) struct Addresses<'a> {
    pub(crate) page: &'a str,
    pub(crate) metrics: &'a str,
    pub(crate) control: &'a str,
}

impl Display {
    /// `warnings` are shown when the job has started.
    pub(crate) fn new(json: bool, outlook: Outlook, warnings: Vec<String>) -> Self {
        let terminal = std::io::stderr().is_terminal();
        let bar = if json || !terminal { ProgressBar::hidden() } else { ProgressBar::no_length() };
        // The message takes the rest of the line and is cut there, so that no line wraps.
        let colours = output::has_colours(&std::io::stderr());
        let style = if colours { "{bar:16.cyan/blue} {wide_msg}" } else { "{bar:16} {wide_msg}" };
        if let Ok(style) = ProgressStyle::with_template(style) {
            bar.set_style(style);
        }
        let course = Course::new(outlook);
        let lines = !json && !terminal;
        let (history, tensorboard) = (History::default(), TensorBoard::default());
        Self {
            json,
            bar,
            lines,
            last_line: None,
            course,
            pending: warnings,
            serving: None,
            best: None,
            resumed_at: None,
            has_progressed: false,
            unwritten: None,
            history,
            tensorboard,
        }
    }

    /// Records every event in this history and in this event file, too.
    pub(crate) fn record_in(&mut self, history: History, tensorboard: TensorBoard) {
        (self.history, self.tensorboard) = (history, tensorboard);
    }

    fn record(&self, event: &JobEvent) {
        self.history.record(event);
        self.tensorboard.record(event);
    }

    /// Prints a line for a person. With `--json` it prints nothing.
    pub(crate) fn note(&self, text: &str) {
        if !self.json {
            self.bar.suspend(|| say(text));
        }
    }

    /// The job has started: tells where it can be watched and controlled, and prints the warnings.
    pub(crate) fn addresses(&mut self, addresses: &Addresses<'_>) {
        let [page, metrics, control] = [addresses.page, addresses.metrics, addresses.control].map(str::to_owned);
        if self.json {
            self.serving = Some(Serving { event: "serving", page, metrics, control, at: 0.0 });
            return;
        }
        self.note(&format!("the job on {page}, its metrics on {metrics}, control at {control}"));
        self.warn_of_pending();
    }

    fn warn_of_pending(&mut self) {
        for warning in std::mem::take(&mut self.pending) {
            self.warn(&warning);
        }
    }

    /// Warns in either form of output.
    fn warn(&mut self, message: &str) {
        self.show(&JobEvent::Warning { message: message.to_owned() });
    }

    pub(crate) fn show(&mut self, event: &JobEvent) {
        if let JobEvent::Summary(summary) = event {
            self.conclude(event, summary);
            return;
        }
        self.record(event);
        match event {
            JobEvent::Restarting { .. } => self.course.restart(),
            JobEvent::Resumed { step, .. } => {
                self.course.resume();
                self.resumed_at = Some(*step);
            }
            JobEvent::Progress { .. } => self.has_progressed = true,
            _ => {}
        }
        let progress = figures(event).map(|figures| (figures.step, self.course.line(&figures)));
        if self.json {
            // If the reader has gone, the job continues, and its exit code tells the result.
            let _reader_gone = self.show_json(event);
            if let Some(serving) = self.serving.take() {
                let _reader_gone = print_json(&Serving { at: now(), ..serving });
                self.warn_of_pending();
            }
            return;
        }
        match (event, progress) {
            (_, Some((step, text))) => self.show_progress(step, text),
            (JobEvent::Evaluation { step, test }, _) => self.show_evaluation(event, *step, test),
            (JobEvent::Warning { message }, _) => {
                self.note(&format!("{} {message}", output::warning_label("warning:")));
            }
            // The command prints the error itself.
            (JobEvent::Failed { .. }, _) => self.bar.finish_and_clear(),
            _ => {
                if let Some(text) = sentence(event) {
                    self.note(&text);
                }
            }
        }
    }

    /// Why the summary is not on standard output, in a sentence with the summary; `None` if it is
    /// there, or if there is none.
    pub(crate) fn unwritten(mut self) -> Option<String> {
        self.unwritten.take()
    }

    fn show_json(&self, event: &JobEvent) -> std::io::Result<()> {
        let epoch = step_of(event).and_then(|step| self.course.epoch_of(step));
        print_json(&Line { event, at: now(), epoch })
    }

    fn show_progress(&mut self, step: u64, text: String) {
        if let Some(total) = self.course.total() {
            self.bar.set_length(total.max(step));
        }
        self.bar.set_position(step);
        if self.lines && self.last_line.is_none_or(|last| last.elapsed() >= LINE_EVERY) {
            self.last_line = Some(Instant::now());
            say(&text);
        }
        self.bar.set_message(text);
    }

    fn show_evaluation(&mut self, event: &JobEvent, step: u64, test: &TestMetrics) {
        let Some(text) = sentence(event) else { return };
        let epoch = self.course.epoch_of(step).map(|epoch| format!("epoch {epoch}"));
        let remarks: Vec<String> = epoch.into_iter().chain(compared(&mut self.best, step, test.auc)).collect();
        match remarks.is_empty() {
            true => self.note(&text),
            false => self.note(&text.replacen(':', &format!(" ({}):", remarks.join(", ")), 1)),
        }
    }

    /// Shows the end of a job that is done.
    fn conclude(&mut self, event: &JobEvent, summary: &Summary) {
        self.bar.finish_and_clear();
        if let Some(doubt) = summary.test.as_ref().and_then(doubt) {
            self.warn(&doubt);
        }
        self.record(event);
        let written = if self.json {
            self.show_json(event)
        } else {
            let has_trained = self.has_progressed || self.resumed_at != Some(summary.steps);
            output::write(format_args!("{}\n", summary_table(summary, has_trained)))
        };
        self.unwritten = written.err().map(|error| not_written(summary, &error));
    }
}

impl Drop for Display {
    /// An interrupted run leaves no half of a bar behind.
    fn drop(&mut self) {
        self.bar.finish_and_clear();
    }
}

/// Compares the AUC of an evaluation with the best one so far, which it may replace.
fn compared(best: &mut Option<(f64, u64)>, step: u64, auc: Option<f64>) -> Option<String> {
    let auc = auc?;
    match *best {
        Some((most, at)) if most >= auc => Some(format!("the best AUC is {} at step {at}", number(Some(most), 4))),
        before => {
            *best = Some((auc, step));
            before.map(|_| output::bold("the best so far"))
        }
    }
}

fn figures(event: &JobEvent) -> Option<Figures> {
    match *event {
        JobEvent::Progress { step, total_steps, samples_per_second, loss, running_auc, .. } => {
            Some(Figures { step, total_steps, samples_per_second, loss, running_auc })
        }
        _ => None,
    }
}

/// The global step of an event that has one.
fn step_of(event: &JobEvent) -> Option<u64> {
    match event {
        JobEvent::Progress { step, .. }
        | JobEvent::Evaluation { step, .. }
        | JobEvent::ModeSwitched { step, .. }
        | JobEvent::Resumed { step, .. }
        | JobEvent::CheckpointSaved { step, .. } => Some(*step),
        _ => None,
    }
}

/// Seconds since 1970 (UTC), to the millisecond.
fn now() -> f64 {
    let since = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    since.as_millis() as f64 / 1000.0
}

fn print_json(line: &impl Serialize) -> std::io::Result<()> {
    output::write(serde_json::to_string(line)? + "\n")
}

/// The summary is the only place of the digest and of most metrics, so the sentence has it.
fn not_written(summary: &Summary, error: &std::io::Error) -> String {
    let summary = serde_json::to_string(summary).unwrap_or_default();
    format!("the job is done, but its summary cannot be written to standard output: {error}. The summary: {summary}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_of_json_has_its_event_time_and_epoch() {
        let event = JobEvent::ModeSwitched { step: 7, from: "sync".to_owned(), to: "gba".to_owned() };
        let line = serde_json::to_string(&Line { event: &event, at: 1.5, epoch: Some(2) }).unwrap();
        assert!(line.starts_with(r#"{"event":"modeSwitched","step":7,"#), "{line}");
        assert!(line.ends_with(r#""at":1.5,"epoch":2}"#), "{line}");
        assert_eq!(serde_json::from_str::<JobEvent>(&line).unwrap(), event);
        let summary = JobEvent::Summary(Box::default());
        let line = serde_json::to_string(&Line { event: &summary, at: 1.5, epoch: None }).unwrap();
        assert!(line.starts_with(r#"{"event":"summary","test":null,"#), "{line}");
    }

    #[test]
    fn an_evaluation_is_compared_with_the_best_so_far() {
        let mut best = None;
        let texts = [Some(0.7), Some(0.8), None, Some(0.75)].map(|auc| compared(&mut best, 9, auc));
        assert_eq!((&texts[0], &texts[2]), (&None, &None));
        assert!(texts[1].as_ref().is_some_and(|text| text.contains("the best so far")), "{texts:?}");
        assert_eq!(texts[3].as_deref(), Some("the best AUC is 0.8000 at step 9"));
    }
}

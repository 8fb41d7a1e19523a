//! Shows a job's events: to a person as a progress bar and a table, to a program as one line of
//! JSON per event. Progress goes to standard error, results go to standard output.

use std::io::{IsTerminal, Write};
use std::os::fd::AsFd;
use std::time::{Duration, Instant};

use comfy_table::{CellAlignment, Table, presets};
use indicatif::{HumanDuration, ProgressBar, ProgressStyle};
use rectrain_kinds::Role;
use rectrain_protocol::events::{JobEvent, Summary, TestMetrics};

/// See the module's text.
pub(crate) struct Display {
    json: bool,
    bar: ProgressBar,
    /// True if progress is shown as lines, because standard error is no terminal.
    lines: bool,
    last_line: Option<Instant>,
    /// The first step that was shown since training started or resumed, and the time of it.
    started: Option<(u64, Instant)>,
    /// Why the summary is not on standard output, in a sentence.
    unwritten: Option<String>,
}

/// The least time between two lines of progress.
const LINE_EVERY: Duration = Duration::from_secs(5);

/// Prints a line to standard error. If the line cannot be written, for example to a full disk, the
/// job continues, and its exit code tells the result.
pub(crate) fn say(text: &str) {
    let _reader_gone = writeln!(std::io::stderr(), "{text}");
}

/// Whether standard error is a terminal.
pub(crate) fn has_terminal() -> bool {
    std::io::stderr().is_terminal()
}

/// Checks that standard output can be written, before anything is trained. An empty write fails on
/// a full device and on a file that is open for reading only, and adds nothing to the output.
///
/// # Errors
/// The operating system's error.
pub(crate) fn check_output() -> std::io::Result<()> {
    let output = std::io::stdout().as_fd().try_clone_to_owned()?;
    std::fs::File::from(output).write(&[]).map(|_written| ())
}

impl Display {
    pub(crate) fn new(json: bool) -> Self {
        let terminal = has_terminal();
        let bar = if json || !terminal { ProgressBar::hidden() } else { ProgressBar::no_length() };
        let style = "{bar:32} {pos}/{len} steps  {msg}";
        if let Ok(style) = ProgressStyle::with_template(style) {
            bar.set_style(style);
        }
        Self { json, bar, lines: !json && !terminal, last_line: None, started: None, unwritten: None }
    }

    /// Prints a line for a person. With `--json` it prints nothing.
    pub(crate) fn note(&self, text: &str) {
        if !self.json {
            self.bar.suspend(|| say(text));
        }
    }

    pub(crate) fn show(&mut self, event: &JobEvent) {
        if self.json {
            // If the reader has gone, the job continues, and its exit code tells the result.
            let written = show_json(event);
            if let (JobEvent::Summary(summary), Err(error)) = (event, written) {
                self.unwritten = Some(not_written(summary, &error));
            }
        } else {
            self.show_text(event);
        }
    }

    /// Why the summary is not on standard output, in a sentence with the summary; `None` if it is
    /// there, or if there is none.
    pub(crate) fn unwritten(self) -> Option<String> {
        self.unwritten
    }

    fn show_text(&mut self, event: &JobEvent) {
        match event {
            JobEvent::Started { job, mode, model, dense_parameters, .. } => {
                self.note(&format!("{job}: {model} in mode {mode}, {dense_parameters} dense parameters"));
            }
            JobEvent::Progress { step, total_steps, samples_per_second, loss, running_auc, .. } => {
                let (first, at) = *self.started.get_or_insert_with(|| (*step, Instant::now()));
                let made = (step.saturating_sub(first), at.elapsed());
                let text = progress_text(*step, *total_steps, *samples_per_second, *loss, *running_auc, made);
                if let Some(total) = total_steps {
                    self.bar.set_length(*total);
                }
                self.bar.set_position(*step);
                self.bar.set_message(text.clone());
                if self.lines && self.last_line.is_none_or(|last| last.elapsed() >= LINE_EVERY) {
                    self.last_line = Some(Instant::now());
                    let total = total_steps.map_or(String::new(), |total| format!("/{total}"));
                    say(&format!("step {step}{total}  {text}"));
                }
            }
            JobEvent::Evaluation { step, test } => {
                let (auc, log_loss) = (number(test.auc, 4), number(test.log_loss, 4));
                let unseen = most_unseen(test).map(|most| format!("; {most}")).unwrap_or_default();
                self.note(&format!(
                    "evaluation at step {step}: AUC {auc}, log loss {log_loss} on {} rows{unseen}",
                    test.samples
                ));
            }
            JobEvent::ModeSwitched { step, from, to } => self.note(&format!("mode {from} -> {to} at step {step}")),
            JobEvent::ModeChosen { mode, reason } => self.note(&format!("switching to mode {mode}: {reason}")),
            JobEvent::Scaling { role: Role::Ps, from, to, .. } if from == to => self.note("measuring the slots, to rebalance them"),
            JobEvent::Scaling { role, from, to, .. } => {
                self.note(&format!("{} {from} -> {to}: training continues meanwhile", role.plural()));
            }
            JobEvent::Scaled { role, from, to } => self.note(&format!("{} {from} -> {to}: done", role.plural())),
            JobEvent::SlotsMoved { slots: 0, imbalance, .. } => {
                self.note(&format!("no slot moves: the busiest parameter server has {imbalance:.2} times the mean"));
            }
            JobEvent::SlotsMoved { from, to, slots, bytes, seconds, rest_seconds, .. } => self.note(&format!(
                "parameter servers {from} -> {to}: {slots} slots ({} bytes) moved in {seconds:.2} s; training paused for {rest_seconds:.3} s",
                thousands(*bytes)
            )),
            JobEvent::Resumed { checkpoint, step, rows, .. } => {
                self.started = None;
                self.note(&format!("resuming at step {step} from checkpoint {checkpoint} ({} rows)", thousands(*rows)));
            }
            JobEvent::CheckpointSaved { step, checkpoint, bytes, seconds, .. } => self.note(&format!(
                "checkpoint {checkpoint} of step {step}: {} bytes in {seconds:.2} s",
                thousands(*bytes)
            )),
            JobEvent::Restarting { restart, message, seconds } => {
                self.started = None;
                self.note(&format!("{message}; restart {restart} in {seconds} s"));
            }
            JobEvent::Rejoined { member, chunks } => {
                self.note(&format!("{member} was replaced; {chunks} chunks of data are read again"));
            }
            JobEvent::Leaving { member } => self.note(&format!("{member} got SIGTERM: its rows move to the others first")),
            JobEvent::ServerKeptRows { member } => {
                self.note(&format!("{member} was killed and restarted; its rows were still in memory"));
            }
            JobEvent::CoordinatorTakenUp { step } => {
                self.note(&format!("the coordinator was killed and restarted; it continues at step {step} from its journal"));
            }
            JobEvent::Warning { message } => self.note(&format!("warning: {message}")),
            JobEvent::Summary(summary) => {
                self.bar.finish_and_clear();
                let mut output = std::io::stdout().lock();
                let written = writeln!(output, "{}", summary_table(summary)).and_then(|()| output.flush());
                self.unwritten = written.err().map(|error| not_written(summary, &error));
            }
            // The command prints the error itself.
            JobEvent::Failed { .. } => self.bar.finish_and_clear(),
        }
    }
}

fn show_json(event: &JobEvent) -> std::io::Result<()> {
    let mut output = std::io::stdout().lock();
    serde_json::to_writer(&mut output, event)?;
    output.write_all(b"\n")?;
    output.flush()
}

/// The summary is the only place of the digest and of most metrics, so the sentence has it.
fn not_written(summary: &Summary, error: &std::io::Error) -> String {
    let summary = serde_json::to_string(summary).unwrap_or_default();
    format!("the job is done, but its summary cannot be written to standard output: {error}. The summary: {summary}")
}

fn progress_text(
    step: u64,
    total_steps: Option<u64>,
    samples_per_second: f64,
    loss: f64,
    running_auc: Option<f64>,
    (made, elapsed): (u64, Duration),
) -> String {
    let left = match total_steps {
        Some(total) if made > 0 && total > step => {
            let left = elapsed.mul_f64((total - step) as f64 / made as f64);
            format!(", {} left", HumanDuration(left))
        }
        _ => String::new(),
    };
    format!(
        "{} samples/s, loss {loss:.4}, running AUC {}{left}",
        thousands(samples_per_second as u64),
        number(running_auc, 4)
    )
}

fn summary_table(summary: &Summary) -> Table {
    let mut table = Table::new();
    table.load_preset(presets::NOTHING);
    let mut row = |name: &str, value: String| {
        table.add_row([name.to_owned(), value]);
    };
    if let Some(test) = &summary.test {
        let TestMetrics { auc, gauc, rows_without_group, log_loss, normalized_entropy, calibration, samples, unseen } =
            test;
        row("test AUC", number(*auc, 5));
        if gauc.is_some() {
            row("test GAUC", number(*gauc, 5));
        }
        if let Some(rows) = rows_without_group {
            row("test rows without a group", thousands(*rows));
        }
        row("test log loss", number(*log_loss, 5));
        row("test normalized entropy", number(*normalized_entropy, 5));
        row("test calibration", number(*calibration, 4));
        row("test rows", thousands(*samples));
        for (feature, share) in unseen.iter().filter(|(_, share)| **share > 0.0) {
            row(&format!("test ids unseen in training, {feature}"), percent(*share));
        }
    }
    if summary.loss.is_some() {
        row("training loss", number(summary.loss, 5));
    }
    row("steps", thousands(summary.steps));
    row("samples", thousands(summary.samples));
    row("seconds", format!("{:.1}", summary.seconds));
    row("samples/s", thousands(summary.samples_per_second as u64));
    row("embedding rows", thousands(summary.rows));
    row("store bytes", thousands(summary.store_bytes));
    if summary.skipped_rows > 0 {
        row("bad rows skipped", thousands(summary.skipped_rows));
    }
    if summary.tokens_issued > 0 {
        row("mode", summary.mode.clone());
        row("staleness, mean", format!("{:.2}", summary.mean_staleness));
        row("staleness, max", thousands(summary.max_staleness));
        row("gradients left out", thousands(summary.excluded_gradients));
        row("batches dropped", thousands(summary.dropped_batches));
    }
    if summary.restarts > 0 {
        row("restarts", thousands(u64::from(summary.restarts)));
        row("batches trained again", thousands(summary.repeated_batches));
    }
    if summary.mode_switches > 0 {
        row("mode switches", thousands(summary.mode_switches));
    }
    if !summary.bytes_on_wire.is_empty() {
        row("bytes on the wire", thousands(summary.bytes_on_wire.values().sum()));
    }
    row("parameters sha256", summary.parameters_sha256.clone());
    if let Some(column) = table.column_mut(1) {
        column.set_cell_alignment(CellAlignment::Right);
    }
    table
}

/// The feature with the highest share of test ids without a row, as a phrase. `None` if all have
/// rows.
fn most_unseen(test: &TestMetrics) -> Option<String> {
    let (feature, share) = test.unseen.iter().max_by(|(_, a), (_, b)| a.total_cmp(b))?;
    (*share > 0.0).then(|| format!("{} of the ids of {feature} unseen in training", percent(*share)))
}

/// 0.031 as 3.1 %.
pub(crate) fn percent(share: f64) -> String {
    format!("{:.1} %", 100.0 * share)
}

pub(crate) fn number(value: Option<f64>, digits: usize) -> String {
    value.map_or("-".to_owned(), |value| format!("{value:.digits$}"))
}

/// 1234567 as 1,234,567.
pub(crate) fn thousands(value: u64) -> String {
    let digits = value.to_string();
    let mut grouped = String::with_capacity(digits.len() + digits.len() / 3);
    for (place, digit) in digits.chars().enumerate() {
        if place > 0 && (digits.len() - place).is_multiple_of(3) {
            grouped.push(',');
        }
        grouped.push(digit);
    }
    grouped
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_grouped_by_thousands() {
        assert_eq!(["7", "999", "1,000", "12,345,678"], [7, 999, 1_000, 12_345_678].map(thousands)[..]);
    }

    #[test]
    fn the_table_leaves_out_results_that_the_summary_lacks() {
        let summary = Summary { steps: 1234, parameters_sha256: "abc".to_owned(), ..Summary::default() };
        let table = summary_table(&summary).to_string();
        assert!(table.contains("1,234") && table.contains("abc") && !table.contains("AUC"), "{table}");
    }

    #[test]
    fn the_table_counts_rows_without_a_group() {
        let test = TestMetrics { rows_without_group: Some(1200), ..TestMetrics::default() };
        let table = summary_table(&Summary { test: Some(test), ..Summary::default() }).to_string();
        assert!(table.contains("test rows without a group") && table.contains("1,200"), "{table}");
    }

    #[test]
    fn the_table_lists_features_with_unseen_test_ids() {
        let unseen = [("item".to_owned(), 0.031), ("user".to_owned(), 0.0)].into();
        let test = TestMetrics { unseen, ..TestMetrics::default() };
        assert_eq!(most_unseen(&test).unwrap(), "3.1 % of the ids of item unseen in training");
        let table = summary_table(&Summary { test: Some(test), ..Summary::default() }).to_string();
        assert!(table.contains("unseen in training, item") && !table.contains("user"), "{table}");
        assert_eq!(most_unseen(&TestMetrics::default()), None);
    }

    #[test]
    fn the_time_left_follows_the_pace_of_this_run() {
        let text = |made| progress_text(900_100, Some(1_000_000), 1.0, 0.5, None, made);
        assert!(
            text((100, Duration::from_secs(10))).ends_with("3 hours left"),
            "{}",
            text((100, Duration::from_secs(10)))
        );
        assert!(!text((0, Duration::ZERO)).contains("left"));
    }
}

//! The progress of a command that reads rows.

use std::io::IsTerminal;
use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressStyle};

use crate::human::thousands;
use crate::output;

/// The least time between two lines of progress, where standard error is no terminal.
const LINE_EVERY: Duration = Duration::from_secs(5);

/// The progress on standard error: a bar, or lines if it is no terminal.
pub(crate) struct RowProgress {
    bar: ProgressBar,
    last_line: Option<Instant>,
    rows: u64,
}

impl RowProgress {
    /// The progress through about `rows` rows, shown or silent.
    pub(crate) fn new(is_silent: bool, rows: u64) -> Self {
        let terminal = std::io::stderr().is_terminal();
        let bar = if is_silent || !terminal { ProgressBar::hidden() } else { ProgressBar::new(rows) };
        if let Ok(style) = ProgressStyle::with_template("{bar:32} {pos}/{len} rows  {per_sec}") {
            bar.set_style(style);
        }
        Self { bar, last_line: (!is_silent && !terminal).then(Instant::now), rows }
    }

    /// Shows that so many rows are done.
    pub(crate) fn show(&mut self, rows: u64) {
        self.bar.set_length(self.rows.max(rows));
        self.bar.set_position(rows);
        if let Some(last) = &mut self.last_line
            && last.elapsed() >= LINE_EVERY
        {
            *last = Instant::now();
            output::say(&format!("{} of about {} rows", thousands(rows), thousands(self.rows.max(rows))));
        }
    }

    /// Removes the bar.
    pub(crate) fn end(&self) {
        self.bar.finish_and_clear();
    }
}

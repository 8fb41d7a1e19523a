//! The time limit of a command. A command that would go beyond it ends, and the next one goes on.

use std::time::Instant;

use crate::TrialError;

/// The time of a command and of its runs.
pub(super) struct Limit {
    begun: Instant,
    /// Infinite without a limit.
    minutes: f64,
    /// The runs of this command: their number, their seconds, and the seconds of the longest.
    runs: u32,
    seconds: f64,
    longest: f64,
}

impl Limit {
    /// A limit that begins now.
    pub(super) fn new(minutes: Option<f64>) -> Self {
        let minutes = minutes.unwrap_or(f64::INFINITY);
        Self { begun: Instant::now(), minutes, runs: 0, seconds: 0.0, longest: 0.0 }
    }

    /// Whether the next run may begin. The first one may, so that each command goes on.
    ///
    /// # Errors
    /// [`TrialError::TimeIsOver`] if a run like the longest one would end beyond the limit.
    pub(super) fn check(&self) -> Result<(), TrialError> {
        self.check_at(self.begun.elapsed().as_secs_f64())
    }

    fn check_at(&self, elapsed: f64) -> Result<(), TrialError> {
        if self.runs == 0 || elapsed + self.longest <= 60.0 * self.minutes {
            return Ok(());
        }
        Err(TrialError::TimeIsOver { minutes: self.minutes })
    }

    /// Notes the seconds of a run, and returns the minutes that so many more runs take.
    pub(super) fn note(&mut self, seconds: f64, left: u64) -> f64 {
        self.runs += 1;
        self.seconds += seconds;
        self.longest = self.longest.max(seconds);
        self.seconds / f64::from(self.runs) * left as f64 / 60.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_run_that_would_end_too_late_does_not_begin() {
        let mut limit = Limit::new(Some(9.0));
        assert!(limit.check_at(5_000.0).is_ok(), "the first run may begin");
        assert_eq!(limit.note(60.0, 10), 10.0);
        assert_eq!(limit.note(30.0, 4), 3.0);
        assert!(limit.check_at(480.0).is_ok());
        let error = limit.check_at(481.0).unwrap_err();
        assert!(error.to_string().contains("the 9 minutes"), "{error}");
    }

    #[test]
    fn without_a_limit_each_run_begins() {
        let mut limit = Limit::new(None);
        limit.note(1e6, 0);
        assert!(limit.check_at(1e9).is_ok());
    }
}

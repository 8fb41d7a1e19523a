//! Decides when a crashed run restarts, and counts the batches that are trained again. Pure.

use std::time::{Duration, Instant};

use rectrain_protocol::events::JobEvent;

/// The longest pause before a restart.
const LONGEST_PAUSE: Duration = Duration::from_secs(300);
/// After this time without a restart the count starts at 0 again, so that crashes of long ago do
/// not end a job that has trained since.
const FORGIVEN_AFTER: Duration = Duration::from_secs(24 * 3600);

/// The budget of restarts and the pauses before them.
#[derive(Debug)]
pub(super) struct Restarts {
    limit: u32,
    first_pause: Duration,
    done: u32,
    /// Restarts and replacements of members that count towards `limit`.
    counted: u32,
    last: Option<Instant>,
    /// Consecutive crashes with no checkpoint between them.
    in_a_row: u32,
}

impl Restarts {
    /// A budget of `limit` restarts, the first of them after `first_pause`.
    pub(super) fn new(limit: u32, first_pause: Duration) -> Self {
        Self { limit, first_pause, done: 0, counted: 0, last: None, in_a_row: 0 }
    }

    /// The pause before the next restart, or `None` if the budget is spent. `saved`: the attempt
    /// saved a checkpoint. The pause doubles with every consecutive crash of an attempt that saved
    /// none.
    pub(super) fn after_crash(&mut self, saved: bool, now: Instant) -> Option<Duration> {
        if !self.take_one(now) {
            return None;
        }
        self.done += 1;
        self.in_a_row = if saved { 0 } else { self.in_a_row + 1 };
        let doublings = self.in_a_row.saturating_sub(1).min(16);
        Some((self.first_pause * (1 << doublings)).min(LONGEST_PAUSE))
    }

    /// True if a dead member may be replaced. The replacement then counts towards the limit.
    pub(super) fn try_replace(&mut self, now: Instant) -> bool {
        self.take_one(now)
    }

    /// Gives back `members` replacements, which had not joined when the attempt ended.
    pub(super) fn return_unused(&mut self, members: u32) {
        self.counted = self.counted.saturating_sub(members);
    }

    /// Counts one restart or replacement. Returns false if the budget is spent.
    fn take_one(&mut self, now: Instant) -> bool {
        if self.last.is_some_and(|last| now.duration_since(last) >= FORGIVEN_AFTER) {
            self.counted = 0;
        }
        let is_any_left = self.counted < self.limit;
        if is_any_left {
            self.counted += 1;
            self.last = Some(now);
        }
        is_any_left
    }

    /// The number of restarts so far.
    pub(super) fn done(&self) -> u32 {
        self.done
    }

    /// The error of a run whose budget is spent; `message` is the last crash's.
    pub(super) fn exhausted(&self, message: &str) -> String {
        match self.limit {
            0 => message.to_owned(),
            limit => {
                format!("{message}; the job was restarted {limit} times, the limit (spec.faultTolerance.maxRestarts)")
            }
        }
    }
}

/// The record of all attempts, from their events.
#[derive(Debug, Default)]
pub(super) struct Account {
    pub(super) restarts: u32,
    repeated_batches: u64,
    /// The last batch that the previous attempt reported as trained. `None` once this attempt has
    /// reported its first batch.
    reached_before: Option<u64>,
    /// The last batch that this attempt reported as trained.
    reached: u64,
    /// True if this attempt saved a checkpoint.
    saved: bool,
}

impl Account {
    /// A new attempt starts.
    pub(super) fn begin_attempt(&mut self) {
        self.reached_before = Some(self.reached);
        self.saved = false;
    }

    /// True if this attempt saved a checkpoint.
    pub(super) fn saved_in_attempt(&self) -> bool {
        self.saved
    }

    /// Records an event, and returns the event to show: a summary gets the restarts of all
    /// attempts.
    pub(super) fn record(&mut self, event: JobEvent) -> JobEvent {
        match event {
            JobEvent::Resumed { batches, .. } => self.attempt_starts_at(batches),
            JobEvent::Progress { step, .. } => {
                self.attempt_starts_at(0);
                self.reached = self.reached.max(step);
            }
            JobEvent::CheckpointSaved { .. } => self.saved = true,
            JobEvent::Summary(mut summary) => {
                self.attempt_starts_at(0);
                summary.restarts = self.restarts;
                summary.repeated_batches = self.repeated_batches;
                return JobEvent::Summary(summary);
            }
            _ => {}
        }
        event
    }

    /// Records that this attempt trains from batch `batch` on. Only its first call has an effect.
    fn attempt_starts_at(&mut self, batch: u64) {
        if let Some(before) = self.reached_before.take() {
            self.repeated_batches += before.saturating_sub(batch);
            self.reached = batch;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pauses_double_until_a_checkpoint_is_saved_and_end_with_the_budget() {
        let mut restarts = Restarts::new(5, Duration::from_secs(100));
        let now = Instant::now();
        let pauses =
            [false, false, false, true, false].map(|saved| restarts.after_crash(saved, now).map(|p| p.as_secs()));
        assert_eq!(pauses, [Some(100), Some(200), Some(300), Some(100), Some(100)]);
        assert_eq!(restarts.after_crash(true, now), None);
        assert!(restarts.exhausted("ps 0 was killed").contains("restarted 5 times"));
        assert_eq!(Restarts::new(0, Duration::ZERO).after_crash(true, now), None);
    }

    #[test]
    fn replacements_and_restarts_share_one_budget() {
        let (mut restarts, now) = (Restarts::new(2, Duration::ZERO), Instant::now());
        assert!(restarts.try_replace(now));
        assert!(restarts.after_crash(true, now).is_some());
        assert!(!restarts.try_replace(now));
        assert_eq!((restarts.after_crash(true, now), restarts.done()), (None, 1));
    }

    #[test]
    fn a_day_without_a_restart_gives_the_budget_back() {
        let (mut restarts, mut now) = (Restarts::new(1, Duration::ZERO), Instant::now());
        assert!(restarts.try_replace(now) && !restarts.try_replace(now + FORGIVEN_AFTER / 2));
        for _ in 0..3 {
            now += FORGIVEN_AFTER;
            assert!(restarts.after_crash(true, now).is_some() && !restarts.try_replace(now));
        }
        assert_eq!(restarts.done(), 3);
    }

    #[test]
    fn batches_between_the_checkpoint_and_the_crash_count_as_repeated() {
        let progress = |step| JobEvent::Progress {
            step,
            total_steps: None,
            samples: 0,
            samples_per_second: 0.0,
            loss: 0.0,
            running_auc: None,
            gradient_norm: None,
            stream: None,
            window: None,
            baseline: None,
        };
        let resumed = |batches| JobEvent::Resumed { checkpoint: "c".to_owned(), step: batches, batches, rows: 0 };
        let mut account = Account::default();
        account.begin_attempt();
        account.record(progress(70));
        account.begin_attempt();
        account.record(resumed(50));
        account.record(progress(90));
        // One attempt crashes before it reports its first batch. The next one starts from batch 0.
        account.begin_attempt();
        account.begin_attempt();
        account.record(progress(10));
        account.restarts = 3;
        let JobEvent::Summary(summary) = account.record(JobEvent::Summary(Box::default())) else {
            panic!("a summary stays one")
        };
        assert_eq!((summary.restarts, summary.repeated_batches), (3, 20 + 90));
    }
}

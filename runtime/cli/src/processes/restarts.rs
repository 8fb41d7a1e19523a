//! When a run that crashed begins again, and what crashes cost it. Pure.

use std::time::{Duration, Instant};

use rectrain_protocol::events::JobEvent;

/// The longest pause before a restart.
const LONGEST_PAUSE: Duration = Duration::from_secs(300);
/// After so long without a restart they are counted anew: what happened long ago ends no job that has trained since.
const FORGIVEN_AFTER: Duration = Duration::from_secs(24 * 3600);

/// The budget of restarts and the pauses before them.
#[derive(Debug)]
pub(super) struct Restarts {
    most: u32,
    first_pause: Duration,
    done: u32,
    /// Those that count, with the members that were replaced while the others went on.
    counted: u32,
    last: Option<Instant>,
    /// Crashes with no checkpoint between them.
    in_a_row: u32,
}

impl Restarts {
    /// At most `most` of them, the first after `first_pause`.
    pub(super) fn new(most: u32, first_pause: Duration) -> Self {
        Self { most, first_pause, done: 0, counted: 0, last: None, in_a_row: 0 }
    }

    /// How long to wait before the next restart; `None` if there is none left. The pause doubles with every crash before which no
    /// checkpoint was saved: a job that gets on is not held up by what happened long ago.
    pub(super) fn after_crash(&mut self, saved: bool, now: Instant) -> Option<Duration> {
        if !self.takes_one(now) {
            return None;
        }
        self.done += 1;
        self.in_a_row = if saved { 0 } else { self.in_a_row + 1 };
        let doublings = self.in_a_row.saturating_sub(1).min(16);
        Some((self.first_pause * (1 << doublings)).min(LONGEST_PAUSE))
    }

    /// A member died whose place another can take: whether it may.
    pub(super) fn replaces(&mut self, now: Instant) -> bool {
        self.takes_one(now)
    }

    /// So many did not take the places after all: the attempt ended before they were there.
    pub(super) fn replaced_in_vain(&mut self, members: u32) {
        self.counted = self.counted.saturating_sub(members);
    }

    /// Counts one, if one is left.
    fn takes_one(&mut self, now: Instant) -> bool {
        if self.last.is_some_and(|last| now.duration_since(last) >= FORGIVEN_AFTER) {
            self.counted = 0;
        }
        let is_any_left = self.counted < self.most;
        if is_any_left {
            self.counted += 1;
            self.last = Some(now);
        }
        is_any_left
    }

    /// Restarts of all so far.
    pub(super) fn done(&self) -> u32 {
        self.done
    }

    /// What is said when none is left.
    pub(super) fn exhausted(&self, message: &str) -> String {
        match self.most {
            0 => message.to_owned(),
            most => format!("{message}; it was restarted {most} times (spec.faultTolerance.maxRestarts)"),
        }
    }
}

/// What is known of all attempts, from their events.
#[derive(Debug, Default)]
pub(super) struct Account {
    pub(super) restarts: u32,
    repeated_batches: u64,
    /// The farthest batch that an earlier attempt is known to have trained, until this attempt has said where it begins.
    reached_before: Option<u64>,
    reached: u64,
    saved: bool,
}

impl Account {
    /// Another attempt follows.
    pub(super) fn begin_attempt(&mut self) {
        self.reached_before = Some(self.reached);
        self.saved = false;
    }

    /// Whether a checkpoint was saved in this attempt.
    pub(super) fn saved_in_attempt(&self) -> bool {
        self.saved
    }

    /// Notes what an event says; gives it as it is to be shown.
    pub(super) fn take(&mut self, event: JobEvent) -> JobEvent {
        match event {
            JobEvent::Resumed { batches, .. } => self.begins_at(batches),
            JobEvent::Progress { step, .. } => {
                self.begins_at(0);
                self.reached = self.reached.max(step);
            }
            JobEvent::CheckpointSaved { .. } => self.saved = true,
            JobEvent::Summary(mut summary) => {
                self.begins_at(0);
                summary.restarts = self.restarts;
                summary.repeated_batches = self.repeated_batches;
                return JobEvent::Summary(summary);
            }
            _ => {}
        }
        event
    }

    /// This attempt trains from batch `batch` on; said again, it changes nothing.
    fn begins_at(&mut self, batch: u64) {
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
    fn members_that_are_replaced_are_of_the_same_budget() {
        let (mut restarts, now) = (Restarts::new(2, Duration::ZERO), Instant::now());
        assert!(restarts.replaces(now));
        assert!(restarts.after_crash(true, now).is_some());
        assert!(!restarts.replaces(now));
        assert_eq!((restarts.after_crash(true, now), restarts.done()), (None, 1));
    }

    #[test]
    fn a_day_without_a_restart_gives_the_budget_back() {
        let (mut restarts, mut now) = (Restarts::new(1, Duration::ZERO), Instant::now());
        assert!(restarts.replaces(now) && !restarts.replaces(now + FORGIVEN_AFTER / 2));
        for _ in 0..3 {
            now += FORGIVEN_AFTER;
            assert!(restarts.after_crash(true, now).is_some() && !restarts.replaces(now));
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
        };
        let resumed = |batches| JobEvent::Resumed { checkpoint: "c".to_owned(), step: batches, batches, rows: 0 };
        let mut account = Account::default();
        account.begin_attempt();
        account.take(progress(70));
        account.begin_attempt();
        account.take(resumed(50));
        account.take(progress(90));
        // It crashes before it says where it begins, and then begins from nothing.
        account.begin_attempt();
        account.begin_attempt();
        account.take(progress(10));
        account.restarts = 3;
        let JobEvent::Summary(summary) = account.take(JobEvent::Summary(Box::default())) else {
            panic!("a summary stays one")
        };
        assert_eq!((summary.restarts, summary.repeated_batches), (3, 20 + 90));
    }
}

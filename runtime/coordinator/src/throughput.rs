//! The rows trained per second, from the reports of the dense workers. Pure: every time is an
//! argument.

use std::collections::VecDeque;
use std::time::{Duration, Instant};

/// The window over which throughput is measured.
const WINDOW: Duration = Duration::from_secs(10);
/// Time without a step that is usual, however fast the steps are.
const PATIENCE: Duration = Duration::from_secs(3);
/// Usual intervals between reports after which a step is overdue.
const OVERDUE_INTERVALS: u32 = 3;
/// Usual intervals after which no step is expected to arrive.
const OVER_INTERVALS: u32 = 10;

/// Rows trained so far, at the times of the last reports with new rows. The first one is the last
/// before the window, so that reports after a stall are not taken for all of the time.
#[derive(Debug, Default)]
pub(super) struct Throughput(VecDeque<(Instant, u64)>);

impl Throughput {
    /// Records that `samples` rows were trained up to `now`. A report without new rows counts as
    /// none.
    pub(super) fn note(&mut self, now: Instant, samples: u64) {
        if self.0.back().is_some_and(|(_, before)| *before == samples) {
            return;
        }
        self.0.push_back((now, samples));
        while self.0.len() > 2 && self.0.get(1).is_some_and(|(then, _)| now.duration_since(*then) > WINDOW) {
            self.0.pop_front();
        }
    }

    /// Rows per second at `now`. Once a step is overdue, it is at most the rows of one report over
    /// the time since the last one, because no more were trained in that time.
    pub(super) fn per_second(&self, now: Instant) -> f64 {
        let Some(measured) = self.measured() else { return 0.0 };
        let idle = now.saturating_duration_since(measured.last);
        let is_over = idle > WINDOW.max(measured.interval * OVER_INTERVALS);
        match self.overdue(now) {
            Some(_) if is_over => 0.0,
            Some(idle) => (measured.rows_of_interval / idle.as_secs_f64()).min(measured.per_second()),
            None => measured.per_second(),
        }
    }

    /// The time without a step, if it is longer than usual. `None` before the first two reports.
    pub(super) fn overdue(&self, now: Instant) -> Option<Duration> {
        let measured = self.measured()?;
        let idle = now.saturating_duration_since(measured.last);
        (idle > PATIENCE.max(measured.interval * OVERDUE_INTERVALS)).then_some(idle)
    }

    fn measured(&self) -> Option<Measured> {
        let (&(from, before), &(second, next), &(to, after)) = (self.0.front()?, self.0.get(1)?, self.0.back()?);
        let intervals = u32::try_from(self.0.len() - 1).ok()?;
        // The part of the first interval before the window does not count, if there are more.
        let whole = second.duration_since(from);
        let outside = to.duration_since(from).saturating_sub(WINDOW).min(whole);
        let outside = if intervals > 1 { outside } else { Duration::ZERO };
        let outside_share = outside.as_secs_f64() / whole.as_secs_f64().max(f64::MIN_POSITIVE);
        let rows = after.saturating_sub(before) as f64 - next.saturating_sub(before) as f64 * outside_share;
        let interval = (to.duration_since(from) - outside) / intervals;
        let rows_of_interval = rows / f64::from(intervals);
        (!interval.is_zero()).then_some(Measured { last: to, interval, rows_of_interval })
    }
}

/// The reports within the window.
struct Measured {
    last: Instant,
    /// Mean time between two reports.
    interval: Duration,
    /// Mean rows of a report.
    rows_of_interval: f64,
}

impl Measured {
    fn per_second(&self) -> f64 {
        self.rows_of_interval / self.interval.as_secs_f64()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Reports of 100 rows every 200 ms for 20 s. Returns the time of the last one.
    fn steady(begun: Instant) -> (Throughput, Instant) {
        let mut throughput = Throughput::default();
        let mut last = begun;
        for report in 0..100_u32 {
            last = begun + Duration::from_millis(200) * report;
            throughput.note(last, 100 * u64::from(report));
        }
        (throughput, last)
    }

    #[test]
    fn a_stall_falls_to_the_rows_since_the_last_step() {
        let (throughput, last) = steady(Instant::now());
        let after = |seconds| throughput.per_second(last + Duration::from_secs(seconds));
        assert!((after(0) - 500.0).abs() < 1.0 && (after(2) - 500.0).abs() < 1.0);
        assert!((after(5) - 20.0).abs() < 1.0, "one report of 100 rows in 5 s: {}", after(5));
        assert!(after(9) < after(5) && after(11) == 0.0);
        assert_eq!(throughput.overdue(last + Duration::from_secs(2)), None);
        assert_eq!(throughput.overdue(last + Duration::from_secs(8)), Some(Duration::from_secs(8)));
    }

    #[test]
    fn reports_without_rows_do_not_hide_a_stall() {
        let (mut throughput, last) = steady(Instant::now());
        let later = last + Duration::from_secs(6);
        throughput.note(later, 9900);
        assert!(throughput.per_second(later) < 20.0 && throughput.overdue(later).is_some());
    }

    /// Four dense workers report the first step after a stall within milliseconds.
    #[test]
    fn the_first_reports_after_a_stall_are_not_taken_for_its_time() {
        let (mut throughput, last) = steady(Instant::now());
        for report in 1..=4_u32 {
            let now = last + Duration::from_secs(40) + Duration::from_millis(2) * report;
            throughput.note(now, 9900 + 100 * u64::from(report));
            let found = throughput.per_second(now);
            assert!(found < 45.0, "{found} after report {report}");
        }
        // Ten seconds later, nothing of the stall is left in the window.
        let resumed = last + Duration::from_secs(40);
        for report in 1..=60_u32 {
            throughput.note(resumed + Duration::from_millis(200) * report, 10_300 + 100 * u64::from(report));
        }
        let found = throughput.per_second(resumed + Duration::from_secs(12));
        assert!((found - 500.0).abs() < 10.0, "{found}");
    }

    #[test]
    fn slow_steps_are_no_stall() {
        let begun = Instant::now();
        let mut throughput = Throughput::default();
        for step in 0..4_u64 {
            throughput.note(begun + Duration::from_secs(30 * step), 3000 * step);
        }
        let at = |seconds: u64| begun + Duration::from_secs(90 + seconds);
        assert!((throughput.per_second(at(60)) - 100.0).abs() < 1e-6);
        assert!(throughput.overdue(at(60)).is_none() && throughput.overdue(at(100)).is_some());
    }
}

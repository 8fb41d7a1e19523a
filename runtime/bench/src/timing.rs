//! What requests take: by the clock, and of the processor.

use std::time::{Duration, Instant};

/// What one request took.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct Took {
    pub(crate) seconds: f64,
    /// What it computed of that, or the kernel for it; for the rest it waited for a processor or memory of others'. None where the
    /// kernel does not say.
    pub(crate) cpu_seconds: Option<f64>,
}

/// What `request` gives, and what it took.
pub(crate) fn timed<T>(request: impl FnOnce() -> T) -> (T, Took) {
    let before = cpu_seconds();
    let begin = Instant::now();
    let given = request();
    let seconds = begin.elapsed().as_secs_f64();
    (given, Took { seconds, cpu_seconds: cpu_seconds().zip(before).map(|(after, before)| after - before) })
}

/// The one that took longest by the clock; nothing if there was none.
pub(crate) fn longest(requests: &[Took]) -> Took {
    requests.iter().copied().max_by(|a, b| a.seconds.total_cmp(&b.seconds)).unwrap_or_default()
}

/// Seconds that this thread has computed.
fn cpu_seconds() -> Option<f64> {
    let status = std::fs::read_to_string("/proc/thread-self/schedstat").ok()?;
    Some(status.split(' ').next()?.parse::<u64>().ok()? as f64 / 1e9)
}

/// Splits a time into parts that follow each other.
pub(crate) struct Clock(Instant);

impl Clock {
    pub(crate) fn start() -> Self {
        Self(Instant::now())
    }

    /// The time since the last call.
    pub(crate) fn lap(&mut self) -> Duration {
        let now = Instant::now();
        now - std::mem::replace(&mut self.0, now)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_longest_by_the_clock_need_not_have_computed_the_most() {
        let took = |seconds, cpu| Took { seconds, cpu_seconds: Some(cpu) };
        assert_eq!(longest(&[took(1.0, 1.0), took(3.0, 0.5), took(2.0, 2.0)]), took(3.0, 0.5));
        assert_eq!(longest(&[]), Took::default());
    }

    #[test]
    fn who_waits_takes_time_and_computes_none_of_it() {
        let wait = Duration::from_millis(30);
        let ((), took) = timed(|| std::thread::sleep(wait));
        assert!(took.seconds >= wait.as_secs_f64());
        assert!(took.cpu_seconds.is_none_or(|cpu| cpu < took.seconds));
    }
}

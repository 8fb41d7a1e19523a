//! Measures requests: elapsed time and processor time.

use std::time::{Duration, Instant};

/// The times of one request.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct Took {
    /// The elapsed time.
    pub(crate) seconds: f64,
    /// The time that the processor spent on it, in the process or in the kernel. The request waited
    /// for the rest. `None` if the kernel does not report it.
    pub(crate) cpu_seconds: Option<f64>,
}

/// Runs `request`. Returns its result and times.
pub(crate) fn timed<T>(request: impl FnOnce() -> T) -> (T, Took) {
    let before = cpu_seconds();
    let begin = Instant::now();
    let result = request();
    let seconds = begin.elapsed().as_secs_f64();
    (result, Took { seconds, cpu_seconds: cpu_seconds().zip(before).map(|(after, before)| after - before) })
}

/// The request with the longest elapsed time, or the default if there is none.
pub(crate) fn longest(requests: &[Took]) -> Took {
    requests.iter().copied().max_by(|a, b| a.seconds.total_cmp(&b.seconds)).unwrap_or_default()
}

/// The processor time of this thread in seconds.
fn cpu_seconds() -> Option<f64> {
    let status = std::fs::read_to_string("/proc/thread-self/schedstat").ok()?;
    Some(status.split(' ').next()?.parse::<u64>().ok()? as f64 / 1e9)
}

/// The page faults of this process so far that needed no disk (`minflt` in proc(5)), of all its
/// threads. `None` if the kernel does not report them.
pub(crate) fn page_faults() -> Option<u64> {
    minor_faults(&std::fs::read_to_string("/proc/self/stat").ok()?)
}

/// The tenth field of `/proc/PID/stat`. The second is a name in parentheses, which may hold blanks.
fn minor_faults(stat: &str) -> Option<u64> {
    let (_, fields) = stat.rsplit_once(") ")?;
    fields.split(' ').nth(7)?.parse().ok()
}

/// Measures consecutive parts of a time.
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
    fn the_longest_request_is_the_one_with_the_longest_elapsed_time() {
        let took = |seconds, cpu| Took { seconds, cpu_seconds: Some(cpu) };
        assert_eq!(longest(&[took(1.0, 1.0), took(3.0, 0.5), took(2.0, 2.0)]), took(3.0, 0.5));
        assert_eq!(longest(&[]), Took::default());
    }

    #[test]
    fn page_faults_are_the_tenth_field_after_a_name_with_blanks() {
        assert_eq!(minor_faults("71 (a ) b) S 1 71 71 0 -1 4194304 1234 5 6 7\n"), Some(1234));
        assert_eq!(minor_faults("71 (a) S 1"), None);
    }

    #[test]
    fn writing_to_fresh_memory_faults() {
        let Some(before) = page_faults() else { return };
        let fresh = std::hint::black_box(vec![1_u8; 64 << 20]);
        let after = page_faults().expect("it was reported before");
        assert!(after > before, "{before} and {after} after {} bytes", fresh.len());
    }

    #[test]
    fn waiting_counts_as_elapsed_time_but_not_as_processor_time() {
        let wait = Duration::from_millis(30);
        let ((), took) = timed(|| std::thread::sleep(wait));
        assert!(took.seconds >= wait.as_secs_f64());
        assert!(took.cpu_seconds.is_none_or(|cpu| cpu < took.seconds));
    }
}

//! The wall time of each part of a long command.

use std::fmt;
use std::time::{Duration, Instant};

/// Parts and their wall times, in the order in which they ended.
#[derive(Debug, Default)]
pub struct Times(Vec<(String, Duration)>);

impl Times {
    /// Runs a part and records its time, whether or not it succeeds.
    ///
    /// # Errors
    /// The part's own.
    pub fn measure<T, E>(&mut self, part: &str, run: impl FnOnce() -> Result<T, E>) -> Result<T, E> {
        let started = Instant::now();
        let result = run();
        self.record(part, started.elapsed());
        result
    }

    /// Records a time that was measured elsewhere.
    pub fn record(&mut self, part: &str, time: Duration) {
        self.0.push((part.to_owned(), time));
    }
}

impl fmt::Display for Times {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let width = self.0.iter().map(|(part, _)| part.chars().count()).max().unwrap_or(0);
        write!(f, "wall time:")?;
        for (part, time) in &self.0 {
            write!(f, "\n  {part:<width$} {:>6.0} s", time.as_secs_f64())?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_part_is_listed_with_its_seconds_even_if_it_failed() {
        let mut times = Times::default();
        times.measure("lints", || Err::<(), _>(())).unwrap_err();
        times.record("cluster: up", Duration::from_millis(61_400));
        assert_eq!(times.to_string(), "wall time:\n  lints            0 s\n  cluster: up     61 s");
    }
}

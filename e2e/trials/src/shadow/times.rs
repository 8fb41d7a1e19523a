//! The times of a step, from the metrics of the dense workers of a running job.

use std::process::Command;
use std::time::{Duration, Instant};

use rectrain_harness::http::sum_of;
use rectrain_harness::statistics::mean;
use rectrain_harness::watched::WatchedRun;
use serde_json::{Value, json};

use crate::TrialError;
use crate::error::unmet;

/// Time between two looks at the metrics. Looks take CPU time, too.
const LOOK: Duration = Duration::from_millis(500);
/// The time limit for the steps of one job.
const AT_MOST: Duration = Duration::from_secs(900);
const STEP: &str = "rectrain_dense_worker_step_seconds";
const ALL_REDUCE: &str = "rectrain_dense_worker_all_reduce_seconds";
const EXCHANGE: &str = "rectrain_dense_worker_exchange_seconds";

/// The mean times of a dense worker, in seconds.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Times {
    steps: f64,
    /// A step without its all-reduce. The wait for rows is a part of it.
    step: f64,
    /// `None` without a barrier.
    all_reduce: Option<f64>,
    /// `None` without exchanges.
    exchange: Option<f64>,
}

/// Trains until each of so many dense workers has done `steps` steps, and returns the times.
///
/// # Errors
/// A run that fails or ends; [`TrialError::Unmet`] if the steps take too long.
pub(super) fn measure(job: Command, workers: u64, steps: u64) -> Result<Value, TrialError> {
    let mut run = WatchedRun::of(job)?;
    let times = watch(&mut run, workers as usize, steps as f64);
    let ended = run.end();
    let times = times?;
    ended?;
    Ok(line(&times))
}

fn watch(run: &mut WatchedRun, workers: usize, steps: f64) -> Result<Vec<Times>, TrialError> {
    let started = Instant::now();
    let mut least = 0.0;
    while started.elapsed() < AT_MOST {
        run.check_alive()?;
        let times: Vec<Times> = run.metrics().iter().filter_map(|text| read(text)).collect();
        if times.len() == workers {
            least = times.iter().map(|times| times.steps).fold(f64::INFINITY, f64::min);
            if least >= steps {
                return Ok(times);
            }
        }
        std::thread::sleep(LOOK);
    }
    Err(unmet(format!("{steps} steps of {workers} dense workers within {AT_MOST:?}"), format!("{least} steps")))
}

/// Reads the metrics of a dense worker. `None` if they are another role's, or no step is done.
fn read(text: &str) -> Option<Times> {
    let steps = sum_of(text, &format!("{STEP}_count"))?;
    let all_reduce = mean_of(text, ALL_REDUCE);
    let step = mean_of(text, STEP)? - all_reduce.unwrap_or(0.0);
    Some(Times { steps, step, all_reduce, exchange: mean_of(text, EXCHANGE) })
}

/// The mean of a histogram. `None` if it is empty.
fn mean_of(text: &str, metric: &str) -> Option<f64> {
    let count = sum_of(text, &format!("{metric}_count")).filter(|count| *count > 0.0)?;
    Some(sum_of(text, &format!("{metric}_sum"))? / count)
}

/// The figures over all workers. The worker that comes last to an all-reduce waits for no other, so
/// the shortest mean is the time of an all-reduce.
fn line(times: &[Times]) -> Value {
    let exchanges: Vec<f64> = times.iter().filter_map(|times| times.exchange).collect();
    let exchange = if exchanges.is_empty() { None } else { Some(mean(exchanges.into_iter())) };
    json!({
        "steps": times.iter().map(|times| times.steps).sum::<f64>(),
        "stepSeconds": mean(times.iter().map(|times| times.step)),
        "allReduceSeconds": times.iter().filter_map(|times| times.all_reduce).min_by(f64::total_cmp),
        "exchangeSeconds": exchange,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn histogram(name: &str, sum: f64, count: u64) -> String {
        format!("{name}_sum{{replica=\"0\"}} {sum}\n{name}_count{{replica=\"0\"}} {count}\n")
    }

    #[test]
    fn a_step_is_without_its_all_reduce() {
        let text = histogram(STEP, 5.0, 10) + &histogram(ALL_REDUCE, 2.0, 10) + &histogram(EXCHANGE, 0.0, 0);
        assert_eq!(read(&text), Some(Times { steps: 10.0, step: 0.3, all_reduce: Some(0.2), exchange: None }));
        let text = histogram(STEP, 5.0, 10) + &histogram(EXCHANGE, 3.0, 2);
        assert_eq!(read(&text), Some(Times { steps: 10.0, step: 0.5, all_reduce: None, exchange: Some(1.5) }));
    }

    #[test]
    fn other_roles_and_workers_before_their_first_step_have_no_times() {
        assert_eq!(read("rectrain_ps_rows 5\n"), None);
        assert_eq!(read(&histogram(STEP, 0.0, 0)), None);
    }

    #[test]
    fn the_last_worker_has_the_time_of_the_all_reduce() {
        let times = |step, all_reduce| Times { steps: 10.0, step, all_reduce: Some(all_reduce), exchange: None };
        let line = line(&[times(0.25, 0.5), times(0.75, 0.125)]);
        let expected = json!({ "steps": 20.0, "stepSeconds": 0.5, "allReduceSeconds": 0.125, "exchangeSeconds": null });
        assert_eq!(line, expected);
    }
}

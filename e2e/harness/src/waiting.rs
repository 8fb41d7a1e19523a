//! Waiting for a state, and doing several things in parallel.

use std::error::Error;
use std::time::{Duration, Instant};

use crate::{AnyError, HarnessError};

/// Time between two attempts of [`eventually`].
const PAUSE: Duration = Duration::from_millis(200);

/// Repeats `attempt` until it succeeds. `awaited` names the state for the error.
///
/// # Errors
/// [`HarnessError::TimedOut`] with the last failure, once an attempt fails after `patience`.
pub fn eventually<T, E: Into<AnyError>>(
    patience: Duration,
    awaited: &str,
    mut attempt: impl FnMut() -> Result<T, E>,
) -> Result<T, HarnessError> {
    let started = Instant::now();
    loop {
        match attempt() {
            Ok(value) => return Ok(value),
            Err(last) if started.elapsed() > patience => {
                return Err(HarnessError::TimedOut { awaited: awaited.to_owned(), patience, last: last.into() });
            }
            Err(_) => std::thread::sleep(PAUSE),
        }
    }
}

/// A step that can run in a thread of its own.
pub type ParallelStep<'a, E> = Box<dyn FnOnce() -> Result<(), E> + Send + 'a>;

/// Runs all steps at the same time, each to its end.
///
/// # Errors
/// [`HarnessError::InParallel`] with the failure of every step that failed or panicked.
pub fn side_by_side<E: Error + Send + Sync + 'static>(steps: Vec<ParallelStep<'_, E>>) -> Result<(), HarnessError> {
    let mut failures: Vec<AnyError> = Vec::new();
    std::thread::scope(|scope| {
        let running: Vec<_> = steps.into_iter().map(|step| scope.spawn(step)).collect();
        for step in running {
            match step.join() {
                Ok(Ok(())) => {}
                Ok(Err(failure)) => failures.push(Box::new(failure)),
                Err(_) => failures.push(Box::new(HarnessError::Panicked)),
            }
        }
    });
    if failures.is_empty() { Ok(()) } else { Err(HarnessError::InParallel(failures)) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::not_yet;

    #[test]
    fn parallel_steps_overlap_and_all_failures_are_reported() {
        let both = std::sync::Barrier::new(2);
        let meets = |result: Result<(), HarnessError>| -> ParallelStep<'_, HarnessError> {
            let both = &both;
            Box::new(move || {
                both.wait();
                result
            })
        };
        assert!(side_by_side(vec![meets(Ok(())), meets(Ok(()))]).is_ok());
        let failures = vec![meets(Err(not_yet("one"))), meets(Err(not_yet("two")))];
        assert_eq!(side_by_side(failures).unwrap_err().to_string(), "one; two");
    }

    #[test]
    fn a_timeout_names_the_state_and_the_last_failure() {
        let never = || Err::<(), _>(not_yet("it is at step 3"));
        let error = eventually(Duration::ZERO, "step 9", never).unwrap_err();
        assert_eq!(error.to_string(), "waited 0 s for step 9; the last look: it is at step 3");
    }
}

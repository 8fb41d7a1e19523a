//! Parts that cannot run on this machine. A person may skip them, and reads at the end which ones
//! were skipped. CI may not: with `CI=true` a skip is a failure.

use std::fmt::Display;

use crate::{HarnessError, say};
use parking_lot::Mutex;

/// The parts that this process has skipped, in order.
static SKIPPED: Mutex<Vec<String>> = Mutex::new(Vec::new());

/// The beginning of the line that reports a skipped part, after `xtask: `.
const MARK: &str = "SKIPPED ";
const BECAUSE: &str = ", because ";

/// Skips a part: reports it now and in the [`summary`].
///
/// # Errors
/// [`HarnessError::Skipped`] with `CI=true`.
pub fn skip(part: impl Display, reason: impl Display) -> Result<(), HarnessError> {
    skip_unless(is_ci(), part, reason)
}

fn skip_unless(is_ci: bool, part: impl Display, reason: impl Display) -> Result<(), HarnessError> {
    if is_ci {
        return Err(HarnessError::Skipped { part: part.to_string(), reason: reason.to_string() });
    }
    say(format!("{MARK}{part}{BECAUSE}{reason}"));
    SKIPPED.lock().push(part.to_string());
    Ok(())
}

/// Reports the skips that another process of this program has written to its log.
///
/// # Errors
/// See [`skip`].
pub fn repeat(log: &str) -> Result<(), HarnessError> {
    for (part, reason) in log.lines().filter_map(parse) {
        skip(part, reason)?;
    }
    Ok(())
}

/// The part and the reason in a line of a log.
fn parse(line: &str) -> Option<(&str, &str)> {
    line.strip_prefix("xtask: ")?.strip_prefix(MARK)?.split_once(BECAUSE)
}

/// One line that lists everything this process has skipped; `None` if it skipped nothing.
#[must_use]
pub fn summary() -> Option<String> {
    let skipped = SKIPPED.lock();
    if skipped.is_empty() { None } else { Some(format!("SKIPPED in all: {}", skipped.join("; "))) }
}

/// Whether a CI system runs this program.
#[must_use]
pub fn is_ci() -> bool {
    std::env::var_os("CI").is_some_and(|value| value == "true")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_skip_fails_in_ci_and_is_summarized_elsewhere() {
        let error = skip_unless(true, "MovieLens", "there is no network").unwrap_err().to_string();
        assert!(error.contains("MovieLens") && error.contains("there is no network"), "{error}");
        skip_unless(false, "MovieLens", "there is no network").unwrap();
        assert_eq!(summary().as_deref(), Some("SKIPPED in all: MovieLens"));
    }

    #[test]
    fn a_skip_is_found_in_a_log() {
        let line = "xtask: SKIPPED Prometheus, because there is no apt";
        assert_eq!(parse(line), Some(("Prometheus", "there is no apt")));
        assert_eq!(parse("xtask: SKIPPED in all: Prometheus"), None);
        assert_eq!(parse("Prometheus"), None);
    }
}

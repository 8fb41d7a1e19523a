//! Arguments of the trials' command lines.

use std::str::FromStr;

use crate::HarnessError;

/// The parts of `a,b`.
#[must_use]
pub fn list(text: &str) -> Vec<String> {
    text.split(',').map(str::to_owned).collect()
}

/// Whether a command line has `--quick`, and its other arguments.
#[must_use]
pub fn without_quick<'a>(arguments: &[&'a str]) -> (bool, Vec<&'a str>) {
    without(arguments, "--quick")
}

/// Whether a command line has a flag, which takes no value, and its other arguments.
#[must_use]
pub fn without<'a>(arguments: &[&'a str], flag: &str) -> (bool, Vec<&'a str>) {
    let others: Vec<&str> = arguments.iter().copied().filter(|argument| *argument != flag).collect();
    (others.len() < arguments.len(), others)
}

/// A number on a command line.
///
/// # Errors
/// [`HarnessError::Usage`] with `usage` if it is no number.
pub fn number<T: FromStr>(text: &str, usage: &'static str) -> Result<T, HarnessError> {
    text.parse().map_err(|_| HarnessError::Usage(usage))
}

//! Arguments of the trials' command lines.

use std::str::FromStr;

use crate::HarnessError;

/// The parts of `a,b`.
#[must_use]
pub fn list(text: &str) -> Vec<String> {
    text.split(',').map(str::to_owned).collect()
}

/// A number on a command line.
///
/// # Errors
/// [`HarnessError::Usage`] with `usage` if it is no number.
pub fn number<T: FromStr>(text: &str, usage: &'static str) -> Result<T, HarnessError> {
    text.parse().map_err(|_| HarnessError::Usage(usage))
}

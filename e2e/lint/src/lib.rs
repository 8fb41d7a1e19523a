//! The project's own lints, which `cargo xtask` calls.
//!
//! [`prose`] checks the English of comments and documents. [`architecture`] checks the layers of
//! crates and the circles of modules. docs/development/lints.md describes both. The lints read the
//! checkout without other tools, and take less than two seconds.

pub mod architecture;
mod baseline;
mod error;
mod lexer;
pub mod prose;
mod tree;

pub use error::LintError;

use std::fmt::Display;
use std::io::Write;
use std::path::Path;

/// Runs both lints on the checkout at `root`. Prints a line for each lint that passes.
///
/// # Errors
/// The first lint that fails.
pub fn check(root: &Path) -> Result<(), LintError> {
    prose::check(root)?;
    architecture::check(root)
}

/// Prints a report. A reader such as `head` may close the pipe early, which is no failure.
fn print(report: impl Display) {
    let _ = write!(std::io::stdout().lock(), "{report}");
}

//! `cargo xtask test`: everything that must hold.

use std::time::Instant;

use rectrain_harness::cargo::cargo;
use rectrain_trials::{movielens, suite};

use crate::check::check;
use crate::error::XtaskError;

/// Runs all parts.
pub(crate) fn test() -> Result<(), XtaskError> {
    let started = Instant::now();
    check()?;
    // Building and testing share one selection of packages, so every dependency is built once.
    cargo(&["test", "--release", "--workspace"], "a test failed: its output is above")?;
    movielens::run()?;
    Ok(suite::run(started)?)
}

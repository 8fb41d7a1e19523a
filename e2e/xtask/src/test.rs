//! `cargo xtask test`: everything that must hold.

use std::time::Instant;

use rectrain_harness::cargo::cargo_test;
use rectrain_harness::skips;
use rectrain_trials::suite::{self, Lacking};
use rectrain_trials::{TrialError, movielens};

use crate::check::check;
use crate::error::XtaskError;

/// Runs all parts.
pub(crate) fn test() -> Result<(), XtaskError> {
    let started = Instant::now();
    check()?;
    let lacking = tests()?;
    movielens::run()?;
    Ok(suite::run(started, lacking)?)
}

/// Runs the workspace's tests. Skipped parts count as skips, except those that the suite repeats
/// with a tool.
fn tests() -> Result<Lacking, TrialError> {
    // Building and testing share one selection of packages, so every dependency is built once.
    let reports = cargo_test(&["test", "--release", "--workspace"])?;
    let mut lacking = Lacking { helm: false, promtool: false };
    for report in reports {
        if report.contains("helm") {
            lacking.helm = true;
        } else if report.contains("promtool") {
            lacking.promtool = true;
        } else {
            skips::skip("a part of the workspace's tests", report)?;
        }
    }
    Ok(lacking)
}

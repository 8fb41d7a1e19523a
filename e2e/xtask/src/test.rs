//! `cargo xtask test`: everything that must hold. The cluster's programs are downloaded and built
//! in the background from the beginning, next to Rust's build.

use std::time::Instant;

use rectrain_bring_up::Paths;
use rectrain_harness::cargo::cargo_test;
use rectrain_harness::times::Times;
use rectrain_harness::{say, skips};
use rectrain_trials::suite::{self, Lacking, Prefetch};
use rectrain_trials::{TrialError, movielens, page};

use crate::check::check;
use crate::error::XtaskError;

/// Runs all parts, and prints the wall time of each, even if one has failed.
pub(crate) fn test() -> Result<(), XtaskError> {
    let started = Instant::now();
    let mut times = Times::default();
    let prefetch = start_prefetch();
    let result = parts(started, &mut times);
    if let Some(prefetch) = prefetch {
        prefetch.finish(&mut times);
    }
    times.record("all", started.elapsed());
    say(times);
    result
}

/// Without the prefetch the tests take longer, and nothing else changes.
fn start_prefetch() -> Option<Prefetch> {
    match Paths::new().map_err(TrialError::from).and_then(|paths| Prefetch::start(&paths)) {
        Ok(prefetch) => prefetch,
        Err(error) => {
            say(format!("nothing is built in the background: {error}"));
            None
        }
    }
}

fn parts(started: Instant, times: &mut Times) -> Result<(), XtaskError> {
    times.measure("formatting and lints", check)?;
    let lacking = times.measure("tests of the workspace", tests)?;
    times.measure("the page in a browser", || page::run(&[]))?;
    times.measure("MovieLens", movielens::run)?;
    Ok(suite::run(started, lacking, times)?)
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

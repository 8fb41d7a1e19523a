//! Failures of the project's commands.

use rectrain_harness::HarnessError;
use rectrain_lint::LintError;
use rectrain_trials::TrialError;

/// Why a command failed.
#[derive(Debug, thiserror::Error)]
pub(crate) enum XtaskError {
    /// A lint of the project found something, or could not read the checkout.
    #[error(transparent)]
    Lint(#[from] LintError),
    /// Commands select different features of a dependency.
    #[error(
        "these commands select other features than the tests, so cargo builds the packages twice:\n{0}\n\
         add the missing features to runtime/features/Cargo.toml"
    )]
    Features(String),
    /// ThreadSanitizer reported a race.
    #[error("ThreadSanitizer reports a data race on memory that threads share:\n{0}")]
    Race(String),
    /// A test did not run under ThreadSanitizer.
    #[error("the test did not run under ThreadSanitizer:\n{0}")]
    NotRun(String),
    /// ThreadSanitizer reported no race in a test that has one.
    #[error(
        "ThreadSanitizer did not report the data race that is planted in {test}, so it does not work on this machine"
    )]
    Missed {
        /// The test.
        test: &'static str,
    },
    /// A trial, or a step of it, failed.
    #[error(transparent)]
    Trial(#[from] TrialError),
}

impl From<HarnessError> for XtaskError {
    fn from(error: HarnessError) -> Self {
        Self::Trial(error.into())
    }
}

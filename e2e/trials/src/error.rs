//! Failures of trials.

use rectrain_bring_up::BringUpError;
use rectrain_harness::{AnyError, HarnessError};

/// Why a trial failed.
#[derive(Debug, thiserror::Error)]
pub enum TrialError {
    /// A step of the harness failed; its error names the step.
    #[error(transparent)]
    Harness(#[from] HarnessError),
    /// A step of the cluster's bring-up failed; its error names the step.
    #[error(transparent)]
    BringUp(#[from] BringUpError),
    /// Something that the trial claims is not true.
    #[error("expected {expected}; found {found}")]
    Unmet {
        /// The claim.
        expected: String,
        /// The observation that contradicts it.
        found: String,
    },
    /// A trial with a time limit has runs left. It keeps the others.
    #[error("the {minutes} minutes of this command are over, and runs are left: give the same command again")]
    TimeIsOver {
        /// The limit of the command.
        minutes: f64,
    },
    /// A named part of a trial failed.
    #[error("{part}: {source}")]
    Part {
        /// The part.
        part: String,
        /// Its failure.
        source: AnyError,
    },
    /// A step of `operate` was asked for that does not exist.
    #[error("`operate` has no step {name:?}; expected --quick, or some of {steps}")]
    NoStep {
        /// The requested step.
        name: String,
        /// The names of all steps.
        steps: String,
    },
    /// A trial disturbs nodes and processes, and the cluster is another machine's.
    #[error(
        "{trial} disturbs nodes and processes of this machine's cluster, and KUBECONFIG names another one: unset it"
    )]
    ForeignCluster {
        /// The trial.
        trial: &'static str,
    },
    /// A certificate for a trial could not be made.
    #[error("cannot make a certificate: {0}")]
    Certificate(#[from] rcgen::Error),
    /// A step of the cluster's tests failed.
    #[error("the cluster's step `{step}` {problem}")]
    SuiteStep {
        /// The words after `cargo xtask cluster`.
        step: String,
        /// The exit status or the time limit, and the last lines of the logs.
        problem: String,
    },
}

impl TrialError {
    /// Names the part of a trial in which an error occurred, for `map_err`.
    pub(crate) fn part<E: Into<AnyError>>(part: impl Into<String>) -> impl FnOnce(E) -> Self {
        let part = part.into();
        move |source| Self::Part { part, source: source.into() }
    }
}

/// A claim that does not hold: `expected` names it, `found` the contradicting observation.
pub(crate) fn unmet(expected: impl Into<String>, found: impl ToString) -> TrialError {
    TrialError::Unmet { expected: expected.into(), found: found.to_string() }
}

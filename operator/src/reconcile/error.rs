//! Errors of a reconcile.

use crate::certificates::CertificateError;
use crate::failure::{Cause, Problem};
use crate::metrics::Step;

/// Why a reconcile failed. It is retried after a back-off.
#[derive(Debug, thiserror::Error)]
pub enum ReconcileError {
    /// The job could not be read.
    #[error("cannot read the job: {0}")]
    Get(#[source] kube::Error),
    /// The job's objects could not be read.
    #[error("cannot list objects of kind {kind}: {source}")]
    List {
        /// The kind.
        kind: &'static str,
        /// Why.
        source: kube::Error,
    },
    /// The status could not be written. If another client wrote first, the next reconcile sees it.
    #[error("cannot write the job's status: {0}")]
    Status(#[source] kube::Error),
    /// An object could not be applied.
    #[error("cannot apply {kind} {name}: {source}")]
    Apply {
        /// Its kind.
        kind: &'static str,
        /// Its name.
        name: String,
        /// Why.
        source: kube::Error,
    },
    /// Another owner's object has a name that the job needs.
    #[error("there is a {kind} {name} that does not belong to the job")]
    Taken {
        /// Its kind.
        kind: &'static str,
        /// Its name.
        name: String,
    },
    /// An object of a deleted job of the same name still exists.
    #[error("{kind} {name} of a deleted job of the same name still exists")]
    Leaving {
        /// Its kind.
        kind: &'static str,
        /// Its name.
        name: String,
    },
    /// An object could not be deleted.
    #[error("cannot delete {kind} {name}: {source}")]
    Delete {
        /// Its kind.
        kind: &'static str,
        /// Its name.
        name: String,
        /// Why.
        source: kube::Error,
    },
    /// The operator is about to end.
    #[error("the watches have ended")]
    Stopped,
    /// The job's certificate could not be created.
    #[error("cannot create the certificate of the job: {0}")]
    Certificate(#[from] CertificateError),
    /// The attempt's pods use certificates and this operator has no root.
    #[error(
        "the job's pods accept only members of the job, and this operator has no root for its certificates: run it with --namespace"
    )]
    NoRoot,
    /// An object could not be built.
    #[error("cannot build the objects of the job: {0}")]
    Build(#[from] serde_json::Error),
}

impl ReconcileError {
    /// The step that failed, for metrics.
    #[must_use]
    pub fn step(&self) -> Step {
        match self {
            Self::Get(_) => Step::Get,
            Self::List { .. } => Step::List,
            Self::Status(_) => Step::Status,
            Self::Apply { .. } | Self::Taken { .. } | Self::Leaving { .. } => Step::Apply,
            Self::Delete { .. } => Step::Delete,
            Self::Build(_) | Self::Certificate(_) | Self::NoRoot => Step::Build,
            Self::Stopped => Step::Stopped,
        }
    }

    /// The problem to report, if the user can fix it.
    #[must_use]
    pub fn obstacle(&self) -> Option<Problem> {
        match self {
            Self::Taken { kind, name } => Some(Problem::new(
                Cause::NameConflict,
                format!(
                    "there is a {kind} `{name}` that does not belong to this job, and the operator does not touch it: delete it, or give the job another name"
                ),
            )),
            Self::Apply { kind, name, source: kube::Error::Api(status) } if is_refusal(status) => Some(Problem::new(
                Cause::ObjectRefused,
                format!(
                    "the API server refuses {kind} `{name}`: {}. Check spec.roles.*.template, the namespace's quota and its admission policies",
                    status.message
                ),
            )),
            _ => None,
        }
    }
}

/// Whether a retry of the same request fails again. The API server refuses a list with two entries
/// of the same key with an internal error.
fn is_refusal(status: &kube::core::Status) -> bool {
    matches!(status.code, 400 | 403 | 422) || status.message.starts_with("failed to create typed patch object")
}

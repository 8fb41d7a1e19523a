//! The version of the model that a server answers with. It changes if the server follows published
//! models.

use std::sync::Arc;

use rectrain_serving::publication::{Base, DenseVersion, RowChanges, ServedVersion, unix_milliseconds};
use rectrain_serving::{GroupContent, Model, digest_of_content};

use crate::metrics::Metrics;

/// The publication of a model.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Publication {
    /// Its sequence number in the path.
    pub sequence: u64,
    /// The digest of its rows and dense parameters.
    pub content_digest: String,
    /// The time of its publication, in milliseconds since 1970.
    pub published_at: u64,
}

impl Publication {
    /// The publication of a model that a follower has.
    #[must_use]
    pub fn of(version: &ServedVersion) -> Self {
        Self {
            sequence: version.base.sequence,
            content_digest: version.content_digest.clone(),
            published_at: version.published_at,
        }
    }

    /// The publication of a model whose rows are on shards. `content` is the content of the rows of
    /// all shards.
    #[must_use]
    pub fn of_dense(version: &DenseVersion, content: &[GroupContent]) -> Self {
        Self {
            sequence: version.base.sequence,
            content_digest: digest_of_content(content, &version.model.parameters),
            published_at: version.published_at,
        }
    }
}

/// The model that answers.
#[derive(Debug)]
pub(crate) struct Version {
    /// The version in requests: the step.
    pub(crate) name: String,
    step: u64,
    rows: u64,
    /// `None` for a model that does not change.
    pub(crate) publication: Option<Publication>,
}

impl Version {
    pub(crate) fn new(step: u64, rows: u64, publication: Option<Publication>) -> Arc<Self> {
        Arc::new(Self { name: step.to_string(), step, rows, publication })
    }

    /// Shows the version in the metrics.
    pub(crate) fn show(&self, metrics: &Metrics) {
        let shown = |value: u64| i64::try_from(value).unwrap_or(i64::MAX);
        metrics.step.set(shown(self.step));
        metrics.model_rows.set(shown(self.rows));
        if let Some(publication) = &self.publication {
            metrics.sequence.set(shown(publication.sequence));
            metrics.published_at.set(shown(publication.published_at / 1000));
        }
    }
}

/// A model that takes the place of another one.
pub struct NextModel {
    /// The model. Its tables may have no rows.
    pub model: Arc<Model>,
    /// Its sequence number and the digest of its publication.
    pub base: Base,
    /// The rows that differ from the model before, for a predictor that keeps rows of it.
    pub changes: RowChanges,
}

/// A model that replaces the one before, and its version.
pub(crate) struct Replacement {
    pub(crate) next: NextModel,
    pub(crate) version: Arc<Version>,
}

/// Seconds from the publication of a model until now, by the clocks of both machines.
pub(crate) fn freshness(publication: &Publication) -> f64 {
    unix_milliseconds().saturating_sub(publication.published_at) as f64 / 1000.0
}

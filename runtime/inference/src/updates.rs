//! The way of newer models into a server that runs.

use std::sync::Arc;

use rectrain_serving::GroupContent;
use rectrain_serving::publication::{DenseUpdate, DenseVersion, RowChanges, ServedVersion, Update};

use crate::batcher::Batcher;
use crate::version::{NextModel, Publication, Replacement, Version};

/// The side of a server that takes newer models.
#[derive(Clone)]
pub struct Updates(pub(crate) Batcher);

impl Updates {
    /// Answers with this model from the next batch on. Requests that are being predicted keep
    /// theirs. A model that was offered before and not taken yet is left out.
    pub fn offer(&self, next: &ServedVersion, update: &Update) {
        self.count(update.loaded, update.deltas);
        let model = Arc::clone(&next.model);
        let version = Version::new(model.step, model.rows(), Some(Publication::of(next)));
        // All rows are in the model, so no difference matters.
        let next = NextModel { model, base: next.base.clone(), changes: RowChanges::Unknown };
        self.0.replace(Replacement { next, version });
    }

    /// As [`Self::offer`], for a model whose rows are on shards. `content` is the content of the
    /// rows of all shards.
    pub fn offer_dense(&self, next: &DenseVersion, update: DenseUpdate, content: &[GroupContent]) {
        self.count(update.loaded, update.deltas);
        let model = Arc::clone(&next.model);
        let publication = Publication::of_dense(next, content);
        let rows = content.iter().map(|group| group.rows).sum();
        let version = Version::new(model.step, rows, Some(publication));
        let next = NextModel { model, base: next.base.clone(), changes: update.changes };
        self.0.replace(Replacement { next, version });
    }

    fn count(&self, loaded: bool, deltas: u64) {
        let metrics = self.0.metrics();
        metrics.updates.with_label_values(&["full"]).inc_by(u64::from(loaded));
        metrics.updates.with_label_values(&["delta"]).inc_by(deltas);
    }

    /// Counts a newer model that could not be taken.
    pub fn failed(&self) {
        self.0.metrics().update_failures.inc();
    }
}

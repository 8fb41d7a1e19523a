//! The way of newer models into a server that runs.

use std::sync::Arc;

use rectrain_serving::publication::{ServedVersion, Update};

use crate::batcher::Batcher;
use crate::version::{Publication, Replacement, Version};

/// The side of a server that takes newer models.
#[derive(Clone)]
pub struct Updates(pub(crate) Batcher);

impl Updates {
    /// Answers with this model from the next batch on. Requests that are being predicted keep
    /// theirs. A model that was offered before and not taken yet is left out.
    pub fn offer(&self, next: &ServedVersion, update: &Update) {
        let metrics = self.0.metrics();
        metrics.updates.with_label_values(&["full"]).inc_by(u64::from(update.loaded));
        metrics.updates.with_label_values(&["delta"]).inc_by(update.deltas);
        let model = Arc::clone(&next.model);
        let version = Version::new(model.step, model.rows(), Some(Publication::of(next)));
        self.0.replace(Replacement { model, version });
    }

    /// Counts a newer model that could not be taken.
    pub fn failed(&self) {
        self.0.metrics().update_failures.inc();
    }
}

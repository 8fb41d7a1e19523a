//! Tasks: the labels that a model predicts.

use serde::{Deserialize, Serialize};

named! {
    /// The losses that a manifest can train a task with.
    #[derive(Default)]
    pub enum LossKind as "loss" {
        /// Binary cross-entropy on a logit, for labels from 0 to 1.
        #[default]
        BinaryCrossEntropy = "binaryCrossEntropy",
        /// The fake negative weighted cross-entropy (Ktena et al. 2019), for labels from 0 to 1
        /// that come after their rows.
        FakeNegativeWeighted = "fakeNegativeWeighted",
    }
}

/// A label that a model predicts, and its part in training. A job has a list of them. The manifest
/// names one label, so the list has one entry.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Task {
    /// Unique within the job; in errors and reports.
    pub name: String,
    /// The column with the labels.
    pub label: String,
    /// The loss.
    pub loss: LossKind,
    /// Factor of the loss in the sum over all tasks, above 0.
    pub weight: f64,
}

impl Task {
    /// The task of a job with one label.
    #[must_use]
    pub fn only(label: &str) -> Self {
        Self { name: label.to_owned(), label: label.to_owned(), loss: LossKind::default(), weight: 1.0 }
    }
}

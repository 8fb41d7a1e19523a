//! The failure of a job, as members report it and events show it.

use rectrain_proto::v1;
use serde::{Deserialize, Serialize};

/// A failure of the job.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct JobFailure {
    /// One sentence.
    pub message: String,
    /// Whether the manifest or the data is at fault, so that a retry cannot help.
    pub user_error: bool,
    /// The figures, if training diverged. A retry would diverge again.
    pub divergence: Option<Divergence>,
}

/// The figures of a training that diverged.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Divergence {
    /// The global step that found it. Without a barrier, the number of its global batch.
    pub step: Option<u64>,
    /// The mean loss of its batch, or the last known one if that is not finite.
    pub loss: Option<f64>,
    /// The smallest mean loss of a batch before.
    pub best_loss: Option<f64>,
}

impl JobFailure {
    /// A failure that is no divergence.
    #[must_use]
    pub fn new(message: impl Into<String>, user_error: bool) -> Self {
        Self { message: message.into(), user_error, divergence: None }
    }
}

impl Divergence {
    /// The divergence in a message.
    #[must_use]
    pub fn read(message: &v1::Divergence) -> Self {
        let v1::Divergence { step, loss, best_loss } = *message;
        Self { step, loss: finite(loss), best_loss: finite(best_loss) }
    }

    /// The divergence as a message.
    #[must_use]
    pub fn write(self) -> v1::Divergence {
        let Self { step, loss, best_loss } = self;
        v1::Divergence { step, loss, best_loss }
    }
}

/// JSON has no other numbers.
fn finite(value: Option<f64>) -> Option<f64> {
    value.filter(|value| value.is_finite())
}

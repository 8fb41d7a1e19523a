//! Counts of predictions in messages.

use rectrain_dense::metrics::WindowPart;
use rectrain_proto::v1;

/// The message of these counts.
#[must_use]
pub fn write(part: WindowPart) -> v1::WindowPart {
    let WindowPart { samples, loss_sum, prediction_sum, label_sum, counts } = part;
    v1::WindowPart { samples, loss_sum, prediction_sum, label_sum, counts }
}

/// The counts in a message.
#[must_use]
pub fn read(part: &v1::WindowPart) -> WindowPart {
    let v1::WindowPart { samples, loss_sum, prediction_sum, label_sum, counts } = part.clone();
    WindowPart { samples, loss_sum, prediction_sum, label_sum, counts }
}

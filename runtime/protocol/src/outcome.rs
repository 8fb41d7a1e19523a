//! Converts the outcome of a pushed batch between its message and the type of the modes crate.

use rectrain_modes::Outcome;
use rectrain_proto::v1;

use crate::error::RoleError;

/// The outcome in a `message`. An error if it is unspecified.
pub fn read(message: &'static str, outcome: v1::Outcome) -> Result<Outcome, RoleError> {
    match outcome {
        v1::Outcome::Dropped => Ok(Outcome::Dropped),
        v1::Outcome::Trained => Ok(Outcome::Trained),
        v1::Outcome::Repeated => Ok(Outcome::Repeated),
        v1::Outcome::Unspecified => {
            Err(RoleError::Inconsistent { message, reason: "the outcome is missing".to_owned() })
        }
    }
}

/// The outcome for a message.
pub fn write(outcome: Outcome) -> v1::Outcome {
    match outcome {
        Outcome::Dropped => v1::Outcome::Dropped,
        Outcome::Trained => v1::Outcome::Trained,
        Outcome::Repeated => v1::Outcome::Repeated,
    }
}

//! What became of a pushed batch, between the modes' word for it and the wire's.

use rectrain_modes::Outcome;
use rectrain_proto::v1;

use crate::error::RoleError;

/// The outcome in a message; `message` names it if it has none.
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

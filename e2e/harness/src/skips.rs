//! Parts that cannot run on this machine.

use std::fmt::Display;

use crate::say;

/// Skips a part, and reports it.
pub fn skip(part: impl Display, reason: impl Display) {
    say(format!("SKIPPED {part}, because {reason}"));
}

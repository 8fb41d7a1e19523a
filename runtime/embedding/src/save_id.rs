//! The name of a save.

use std::fmt;

/// Names a save: a random number, equal in all processes that save at one instant.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct SaveId(pub u128);

impl fmt::Display for SaveId {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "{:032x}", self.0)
    }
}

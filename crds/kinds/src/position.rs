//! Positions in data. The ledger of a job and the readers of its data share them.

use serde::{Deserialize, Serialize};

/// A part of a source: the index of a file in the list of files, or the number of a stream's
/// partition.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct PartId(pub u32);

/// Rows before a place in its part, bad ones included: the row number in a file, or the offset of a
/// record in a partition.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Offset(pub u64);

/// A place in a source, before the row at `offset` of `part`.
///
/// In a list of files the offset may exceed the rows of its file. The excess then counts on in the
/// next file. So a reader can name a row of the list without knowing the length of every file.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Position {
    /// The part.
    pub part: PartId,
    /// The place in it.
    pub offset: Offset,
}

impl Position {
    /// Before the row at `offset` of part `part`.
    #[must_use]
    pub const fn new(part: u32, offset: u64) -> Self {
        Self { part: PartId(part), offset: Offset(offset) }
    }
}

impl std::fmt::Display for Position {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "offset {} of part {}", self.offset.0, self.part.0)
    }
}

/// The first row of a chunk.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub enum Start {
    /// The row of this number among the rows of a pass, from 0. Rows that are left out (bad rows,
    /// rows of another split) do not count. A reader finds it by passing over the rows before it.
    /// Only sources that end have such numbers.
    Row(u64),
    /// The first row at or after this position.
    At(Position),
}

//! The chunks of one pass over a source. A [`Chunks`] knows where each chunk begins and where the
//! pass ends. [`DataLedger`](crate::DataLedger) numbers the chunks, leases them, and counts global
//! steps.

use rectrain_kinds::{Position, Start};
use serde::{Deserialize, Serialize};

use crate::StreamChunks;

/// Cuts one pass over a source into chunks.
///
/// Every chunk but the last of a pass holds the same number of rows, or every chunk is one global
/// batch. So the number of a chunk fixes the global steps of its batches before a loader has read
/// it.
pub trait Chunks {
    /// Begins chunk `chunk`, the next one of the pass. `None` if all rows known so far are leased
    /// or read. The ledger then has loaders ask again.
    fn begin(&mut self, chunk: u64) -> Option<Start>;

    /// A loader has read `rows` rows in chunk `chunk`. They are at most the rows of a full chunk.
    ///
    /// # Errors
    /// The rows that the chunk must have, if it must have another number.
    fn found(&mut self, chunk: u64, rows: u64) -> Result<(), u64>;

    /// Loaders have read every chunk of the pass before `chunk`.
    fn read_before(&mut self, chunk: u64);

    /// Rows of a pass, once its end is known. A source that grows never has them.
    fn pass_rows(&self) -> Option<u64>;

    /// Global batches of `global_batch_rows` rows of a pass, once its end is known.
    fn pass_batches(&self, global_batch_rows: u64) -> Option<u64> {
        self.pass_rows().map(|rows| rows.div_ceil(global_batch_rows))
    }

    /// The offset behind the records of chunk `chunk`, in a source that grows.
    fn until(&self, _chunk: u64) -> Option<u64> {
        None
    }

    /// Whether another pass may follow.
    fn repeats(&self) -> bool {
        true
    }
}

/// The chunks of a job.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub enum JobChunks {
    /// Of a source that ends.
    Finite(FiniteChunks),
    /// Of a stream.
    Stream(Box<StreamChunks>),
}

impl JobChunks {
    /// The chunks of a stream.
    #[must_use]
    pub fn stream(&self) -> Option<&StreamChunks> {
        match self {
            Self::Finite(_) => None,
            Self::Stream(stream) => Some(stream),
        }
    }

    /// The chunks of a stream, to change them.
    pub fn stream_mut(&mut self) -> Option<&mut StreamChunks> {
        match self {
            Self::Finite(_) => None,
            Self::Stream(stream) => Some(stream),
        }
    }
}

impl Chunks for JobChunks {
    fn begin(&mut self, chunk: u64) -> Option<Start> {
        match self {
            Self::Finite(finite) => finite.begin(chunk),
            Self::Stream(stream) => {
                let segment = stream.begin(chunk)?;
                Some(Start::At(Position::new(segment.part.0, segment.from)))
            }
        }
    }

    /// A chunk of a stream has a row, because a loader has seen one. The rows of files were
    /// counted.
    fn found(&mut self, chunk: u64, rows: u64) -> Result<(), u64> {
        match self {
            Self::Finite(finite) => finite.found(chunk, rows),
            Self::Stream(stream) => match stream.expected_rows(chunk) {
                Some(expected) if rows != expected => Err(expected),
                None if rows == 0 => Err(1),
                _ => Ok(()),
            },
        }
    }

    fn read_before(&mut self, chunk: u64) {
        if let Self::Finite(finite) = self {
            finite.read_before(chunk);
        }
    }

    fn pass_rows(&self) -> Option<u64> {
        match self {
            Self::Finite(finite) => finite.pass_rows(),
            Self::Stream(_) => None,
        }
    }

    fn pass_batches(&self, global_batch_rows: u64) -> Option<u64> {
        match self {
            Self::Finite(finite) => finite.pass_batches(global_batch_rows),
            Self::Stream(stream) => stream.is_finished().then(|| stream.chunks_begun()),
        }
    }

    fn until(&self, chunk: u64) -> Option<u64> {
        self.stream().and_then(|stream| stream.segment(chunk)).map(|segment| segment.until)
    }

    fn repeats(&self) -> bool {
        matches!(self, Self::Finite(_))
    }
}

/// Chunks of a source that ends: chunk c begins at row c · `chunk_rows` of the pass. The first
/// chunk that comes back short ends the pass.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct FiniteChunks {
    chunk_rows: u64,
    pass_rows: Option<u64>,
    first_empty: Option<u64>,
}

impl FiniteChunks {
    /// Chunks of `chunk_rows` rows. `pass_rows` is the number of rows of a pass if an earlier pass
    /// has determined it.
    #[must_use]
    pub fn new(chunk_rows: u64, pass_rows: Option<u64>) -> Self {
        Self { chunk_rows, pass_rows, first_empty: None }
    }
}

impl Chunks for FiniteChunks {
    /// A chunk past the end may begin while the end is unknown. Its loader then finds no rows.
    fn begin(&mut self, chunk: u64) -> Option<Start> {
        let end_is_unknown = self.pass_rows.is_none() && self.first_empty.is_some();
        (!end_is_unknown).then_some(Start::Row(chunk * self.chunk_rows))
    }

    fn found(&mut self, chunk: u64, rows: u64) -> Result<(), u64> {
        if let Some(pass_rows) = self.pass_rows {
            let expected = pass_rows.saturating_sub(chunk * self.chunk_rows).min(self.chunk_rows);
            return if rows == expected { Ok(()) } else { Err(expected) };
        }
        if rows == 0 {
            self.first_empty = Some(self.first_empty.map_or(chunk, |first| first.min(chunk)));
        } else if rows < self.chunk_rows {
            self.pass_rows = Some(chunk * self.chunk_rows + rows);
        }
        Ok(())
    }

    /// The first empty chunk ends the pass once all chunks before it are known to be full.
    fn read_before(&mut self, chunk: u64) {
        if self.pass_rows.is_none()
            && let Some(empty) = self.first_empty
            && empty <= chunk
        {
            self.pass_rows = Some(empty * self.chunk_rows);
        }
    }

    fn pass_rows(&self) -> Option<u64> {
        self.pass_rows
    }
}

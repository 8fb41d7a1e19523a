//! The seam between data sets and the sources of their rows. A [`Source`] has parts, and opens
//! cursors over their rows. A [`Rows`] is at a position and moves forward only. Data sets add the
//! split, readers add chunks, shuffling and threads.

use std::fmt::Debug;

use rectrain_kinds::{BadRows, Position};

use crate::batch::Batch;
use crate::blocking::Stop;
use crate::error::DataError;
use crate::identity::Identity;
use crate::storage::SourceFile;
use crate::stream::Stream;
use crate::synthetic::Teacher;
use crate::time::TimeFilter;

/// Rows in parts: the files of a list, or the partitions of a stream.
pub(crate) trait Source: Debug + Send + Sync {
    /// A cursor at the first row of the view. May block.
    fn open(&self, view: View) -> Result<Box<dyn Rows>, DataError>;

    /// The parts that are read.
    fn identity(&self) -> Identity;

    /// Whether the rows end. If not, each part may grow, and a cursor stays in the part in which it
    /// was opened.
    fn is_finite(&self) -> bool {
        true
    }

    /// Rows of the first parts, as far as they are known without reading.
    fn known_rows(&self) -> Vec<u64>;

    /// Counts the rows of all parts, bad ones included. May read all of them. Blocks.
    fn count_rows(&self, stop: &Stop) -> Result<u64, DataError>;

    /// About how many rows there are now, without reading.
    fn estimated_rows(&self) -> u64;

    /// The files that are read, in order.
    fn files(&self) -> Vec<&SourceFile> {
        Vec::new()
    }

    /// The source as a stream, if it is one.
    fn stream(&self) -> Option<&dyn Stream> {
        None
    }

    /// The distribution of synthetic rows.
    fn teacher(&self) -> Option<&Teacher> {
        None
    }
}

/// A cursor over the rows of a view.
pub(crate) trait Rows: Send {
    /// Moves over up to `rows` good rows, and appends them to `into` if given. Returns the number
    /// of rows passed. Fewer than `rows` means that the view ends here, or that a part that grows
    /// has no further rows now. After an error the cursor must not be used.
    fn advance(&mut self, rows: u64, into: Option<&mut Batch>) -> Result<u64, DataError>;

    /// Moves over bad rows up to the next good one, or to the end of the view, if bad rows are
    /// skipped.
    fn pass_over_bad(&mut self) -> Result<(), DataError>;

    /// Bad rows left out so far.
    fn skipped(&self) -> u64;

    /// Whether a good row follows in the view, as far as [`pass_over_bad`](Self::pass_over_bad) has
    /// looked. Only streams know it.
    fn has_more(&self) -> bool {
        false
    }

    /// Keeps the bad rows that were skipped, if the source has a place for them. Afterwards they
    /// are skipped for good.
    fn keep_bad(&mut self) -> Result<(), DataError> {
        Ok(())
    }

    /// The latest time of a row that was appended, in milliseconds since 1970 (UTC). Only streams
    /// know it.
    fn event_millis(&self) -> Option<i64> {
        None
    }

    /// The position of the next row. At the end of a part this may be its end, or the beginning of
    /// the next part.
    fn position(&self) -> Position;
}

/// The rows that a cursor visits.
#[derive(Debug, Clone)]
pub(crate) struct View {
    /// The first row to look at.
    pub(crate) from: Position,
    /// Rows to look at from there on, bad ones included; `None`: to the end. In a stream, the
    /// offsets from there on.
    pub(crate) limit: Option<u64>,
    /// Leaves out the rows on one side of a moment.
    pub(crate) time: Option<TimeFilter>,
    /// The treatment of bad rows.
    pub(crate) bad_rows: BadRows,
    /// Ends the work when its reader is dropped.
    pub(crate) stop: Stop,
}

/// The number of bad rows that are logged one by one. Later ones are only counted.
const LOGGED: u64 = 5;

/// Counts bad rows, and decides whether reading continues.
#[derive(Debug)]
pub(crate) struct Tally {
    policy: BadRows,
    pub(crate) skipped: u64,
}

impl Tally {
    pub(crate) fn new(policy: BadRows) -> Self {
        Self { policy, skipped: 0 }
    }

    /// Whether a cursor must parse the rows that it passes over, because bad ones do not count.
    pub(crate) fn skips(&self) -> bool {
        matches!(self.policy, BadRows::Skip { .. })
    }

    /// Counts a bad row. Fails if the policy does not tolerate it.
    pub(crate) fn note(&mut self, error: DataError) -> Result<(), DataError> {
        let BadRows::Skip { limit } = self.policy else {
            return Err(error);
        };
        if self.skipped >= limit {
            return Err(DataError::TooManyBadRows { limit, last: Box::new(error) });
        }
        self.skipped += 1;
        if self.skipped <= LOGGED {
            tracing::warn!(%error, limit, "bad row left out");
        }
        Ok(())
    }
}

/// The position of row `row` of all parts, given the rows of the first parts. Beyond those the
/// offset counts on from the beginning of the next part.
pub(crate) fn locate(known_rows: &[u64], mut row: u64) -> Position {
    for (part, &rows) in known_rows.iter().enumerate() {
        if row < rows {
            return Position::new(part as u32, row);
        }
        row -= rows;
    }
    Position::new(known_rows.len() as u32, row)
}

/// The offset after `keys` keys. Fails unless it fits into 32 bits.
#[inline]
pub(crate) fn offset(keys: usize, column: &str) -> Result<u32, DataError> {
    u32::try_from(keys).map_err(|_| {
        DataError::config(
            "chunk_rows",
            format!("a chunk has more than 2^32 ids in column `{column}`; use smaller chunks"),
        )
    })
}

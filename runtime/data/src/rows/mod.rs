//! Rows in order: what the text, Parquet and synthetic sources have in common. A [`RowSource`] stands at a
//! row of a part and moves forward only; chunks, shuffling and threads are its caller's.

pub(crate) mod parquet;
pub(crate) mod synthetic;
pub(crate) mod text;

use crate::batch::Batch;
use crate::config::{BadRows, TimeBound};
use crate::error::DataError;

/// A cursor over the rows of a part.
pub(crate) trait RowSource: Send {
    /// Moves over up to `rows` good rows, appending them to `into` if it is given, and returns over how
    /// many. Fewer than `rows` means that the part has ended. After an error the cursor is of no use.
    fn advance(&mut self, rows: u64, into: Option<&mut Batch>) -> Result<u64, DataError>;

    /// Moves over bad rows up to the next good one, or to the end of the part, if bad rows are skipped.
    fn pass_over_bad(&mut self) -> Result<(), DataError>;

    /// Bad rows left out so far.
    fn skipped(&self) -> u64;
}

/// Which rows of the files make the part.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Selection {
    /// Rows `from..to` of the files in order, bad ones counted; `None`: to the end.
    Range { from: u64, to: Option<u64> },
    /// Rows before a moment (`test` is false) or from it on.
    Time { test_from: TimeBound, test: bool },
}

impl Selection {
    pub(crate) const ALL: Self = Self::Range { from: 0, to: None };

    /// First row, and number of rows if it is bounded, to look at.
    pub(crate) fn rows(&self) -> (u64, Option<u64>) {
        match self {
            Self::Range { from, to } => (*from, to.map(|to| to.saturating_sub(*from))),
            Self::Time { .. } => (0, None),
        }
    }

    /// Whether a row's place says whether it is meant.
    pub(crate) fn is_by_place(&self) -> bool {
        matches!(self, Self::Range { .. })
    }

    /// Without the first `rows` rows, where places say which those are.
    pub(crate) fn after(self, rows: u64) -> Self {
        match self {
            Self::Range { from, to } => Self::Range { from: from.saturating_add(rows), to },
            Self::Time { .. } => self,
        }
    }
}

/// Bad rows that are logged one by one; those after them are only counted.
const LOGGED: u64 = 5;

/// Counts bad rows and decides whether to go on.
#[derive(Debug)]
pub(crate) struct Tally {
    policy: BadRows,
    pub(crate) skipped: u64,
}

impl Tally {
    pub(crate) fn new(policy: BadRows) -> Self {
        Self { policy, skipped: 0 }
    }

    /// Whether rows that are passed over must be looked at, because the bad ones do not count.
    pub(crate) fn skips(&self) -> bool {
        matches!(self.policy, BadRows::Skip { .. })
    }

    /// A bad row was met.
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

/// Which file, and which row of it, row `row` of all files is, given the files' numbers of rows. Files
/// beyond those counted begin after the last.
pub(crate) fn locate(counts: &[u64], mut row: u64) -> (usize, u64) {
    for (file, &rows) in counts.iter().enumerate() {
        if row < rows {
            return (file, row);
        }
        row -= rows;
    }
    (counts.len(), row)
}

/// Fails unless the offsets of a column still fit into 32 bits.
#[inline]
pub(crate) fn offset(keys: usize, column: &str) -> Result<u32, DataError> {
    u32::try_from(keys).map_err(|_| {
        DataError::config(
            "chunk_rows",
            format!("a chunk has more than 2^32 ids in column `{column}`; use smaller chunks"),
        )
    })
}

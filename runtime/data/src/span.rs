//! Spans of rows.

use rectrain_kinds::Start;

/// Rows to read: from where, how far, and in which order.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Span {
    /// The first row.
    pub from: Start,
    /// The number of rows, at least 1 and below 2³². Bad rows that are skipped do not count.
    pub rows: u64,
    /// In a stream: the offset at which the span ends, if it has fewer rows before that.
    pub until: Option<u64>,
    /// The order of the rows in the batch.
    pub order: Order,
}

/// The order of the rows of a span.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Order {
    /// The order in which the source stores them.
    Stored,
    /// A permutation that is a pure function of these numbers.
    Shuffled {
        /// The seed of the shuffle.
        seed: u64,
        /// The pass over the data.
        epoch: u64,
        /// The number of the span in its pass.
        chunk: u64,
    },
}

impl Span {
    /// The span of the same length behind this one. A span from a position has none: its end is not
    /// known before it is read.
    pub(crate) fn following(self) -> Option<Self> {
        let Start::Row(row) = self.from else { return None };
        let order = match self.order {
            Order::Stored => Order::Stored,
            Order::Shuffled { seed, epoch, chunk } => Order::Shuffled { seed, epoch, chunk: chunk + 1 },
        };
        Some(Self { from: Start::Row(row.saturating_add(self.rows)), order, ..self })
    }
}

//! The coordinator's account of the training data. Data is leased to loaders in chunks of a fixed number of rows; a chunk's
//! place in the row sequence fixes the global steps that its batches are, so that the batches of a run are the same whichever
//! loader reads them. How many rows an epoch has is learned from the first chunk that comes back short.
//!
//! Called by the coordinator; evaluation uses one ledger of one epoch for each pass.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::GlobalStep;

/// How long to train.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum TrainingLength {
    /// This many passes over the training part.
    Epochs(u32),
    /// This many global steps, over as many epochs as they take.
    Steps(u64),
}

/// What a ledger hands out.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
pub struct DataPlan {
    /// Rows of a global batch; the last batch of an epoch may have fewer.
    pub global_batch_rows: u64,
    /// Full global batches in a chunk.
    pub batches_per_chunk: u64,
    /// Where training ends.
    pub length: TrainingLength,
}

/// A chunk on its way through a loader.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct ChunkLease {
    /// Pass over the data, from 0.
    pub epoch: u32,
    /// Chunk within the epoch, from 0.
    pub chunk: u64,
    /// The global step of the chunk's first batch.
    pub first_step: GlobalStep,
    /// Batches beyond this number are not trained (the limit on steps).
    pub max_batches: u64,
}

/// Where in the data an earlier run stood.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct DataPosition {
    /// Global batches of all epochs that are trained.
    pub batch: u64,
    /// Pass over the data that the next one is in. At the end of an epoch it may be this epoch or the next.
    pub epoch: u32,
    /// Rows of one epoch, if they were known.
    pub epoch_rows: Option<u64>,
}

/// The answer to a loader that asks for data.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Lease {
    /// Read this.
    Chunk(ChunkLease),
    /// Nothing now: the epoch's length must be learned from chunks still on lease. Ask again.
    Wait,
    /// Nothing is left.
    Finished,
}

/// Reports that contradict the ledger.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum LedgerError {
    /// A chunk that nobody was asked to read, or that was reported before.
    #[error("chunk {chunk} of epoch {epoch} was reported, but is not on lease")]
    NotLeased { epoch: u32, chunk: u64 },
    /// More rows than a chunk holds.
    #[error("chunk {chunk} of epoch {epoch} was reported with {rows} rows; a chunk holds {limit}")]
    TooManyRows { epoch: u32, chunk: u64, rows: u64, limit: u64 },
    /// The data changed under the run: this epoch is not as long as the one before.
    #[error(
        "chunk {chunk} of epoch {epoch} has {rows} rows where an earlier epoch had {expected}: the data changed while it was being read"
    )]
    DataChanged { epoch: u32, chunk: u64, rows: u64, expected: u64 },
    /// An earlier run stood where this data has nothing.
    #[error("there is no batch {} in epoch {} of this data, where an earlier run stood", .0.batch, .0.epoch)]
    NoSuchBatch(DataPosition),
    /// There is nothing to train on.
    #[error("the training data has no rows")]
    NoRows,
}

/// See the module's text.
#[derive(Debug, Serialize, Deserialize)]
pub struct DataLedger {
    plan: DataPlan,
    epoch: u32,
    /// The global step at which the current epoch begins.
    epoch_start: GlobalStep,
    next_chunk: u64,
    /// Rows of one epoch, once known.
    epoch_rows: Option<u64>,
    first_empty_chunk: Option<u64>,
    on_lease: BTreeMap<(u32, u64), ChunkLease>,
    rows_read: u64,
}

impl DataLedger {
    /// Nothing leased yet.
    #[must_use]
    pub fn new(plan: DataPlan) -> Self {
        let plan = DataPlan {
            global_batch_rows: plan.global_batch_rows.max(1),
            batches_per_chunk: plan.batches_per_chunk.max(1),
            ..plan
        };
        Self {
            plan,
            epoch: 0,
            epoch_start: GlobalStep(0),
            next_chunk: 0,
            epoch_rows: None,
            first_empty_chunk: None,
            on_lease: BTreeMap::new(),
            rows_read: 0,
        }
    }

    /// Goes on where an earlier run with the same plan stood: the first chunk leased is the one that holds the position's batch.
    /// That is an error if there is no such batch: the epochs before it have fewer.
    pub fn resume(plan: DataPlan, position: DataPosition) -> Result<Self, LedgerError> {
        let mut ledger = Self { epoch: position.epoch, epoch_rows: position.epoch_rows, ..Self::new(plan) };
        let epoch_batches = position.epoch_rows.map(|rows| rows.div_ceil(ledger.plan.global_batch_rows));
        let start = match (position.epoch, epoch_batches) {
            (0, _) => Some(0),
            (epoch, Some(batches)) => batches.checked_mul(u64::from(epoch)),
            (_, None) => None,
        };
        let within = start.and_then(|start| position.batch.checked_sub(start));
        let (Some(start), Some(within)) = (start, within) else { return Err(LedgerError::NoSuchBatch(position)) };
        if epoch_batches.is_some_and(|batches| within > batches) {
            return Err(LedgerError::NoSuchBatch(position));
        }
        ledger.epoch_start = GlobalStep(start);
        ledger.next_chunk = within / ledger.plan.batches_per_chunk;
        ledger.rows_read =
            ledger.next_chunk * ledger.chunk_rows() + u64::from(position.epoch) * position.epoch_rows.unwrap_or(0);
        Ok(ledger)
    }

    /// The first batch of the chunk to be leased next.
    #[must_use]
    pub fn next_batch(&self) -> u64 {
        self.epoch_start.0 + self.next_chunk * self.plan.batches_per_chunk
    }

    /// The next chunk, in order. A chunk past the end of an epoch may be leased while that end is unknown: it comes back empty.
    pub fn lease(&mut self) -> Lease {
        if let Some(rows) = self.epoch_rows
            && self.next_chunk * self.chunk_rows() >= rows
        {
            self.epoch += 1;
            self.epoch_start = GlobalStep(self.epoch_start.0 + rows.div_ceil(self.plan.global_batch_rows));
            self.next_chunk = 0;
        }
        let first_step = GlobalStep(self.epoch_start.0 + self.next_chunk * self.plan.batches_per_chunk);
        let max_batches = match self.plan.length {
            TrainingLength::Epochs(epochs) if self.epoch >= epochs => return Lease::Finished,
            TrainingLength::Epochs(_) => self.plan.batches_per_chunk,
            TrainingLength::Steps(steps) if first_step.0 >= steps => return Lease::Finished,
            TrainingLength::Steps(steps) => self.plan.batches_per_chunk.min(steps - first_step.0),
        };
        if self.epoch_rows == Some(0) {
            return Lease::Finished;
        }
        if self.epoch_rows.is_none() && self.first_empty_chunk.is_some() {
            return Lease::Wait;
        }
        let lease = ChunkLease { epoch: self.epoch, chunk: self.next_chunk, first_step, max_batches };
        self.on_lease.insert((lease.epoch, lease.chunk), lease);
        self.next_chunk += 1;
        Lease::Chunk(lease)
    }

    /// What a leased chunk turned out to hold; gives its lease back.
    pub fn report(&mut self, epoch: u32, chunk: u64, rows: u64) -> Result<ChunkLease, LedgerError> {
        let Some(lease) = self.on_lease.get(&(epoch, chunk)).copied() else {
            return Err(LedgerError::NotLeased { epoch, chunk });
        };
        let limit = self.chunk_rows();
        if rows > limit {
            return Err(LedgerError::TooManyRows { epoch, chunk, rows, limit });
        }
        if let Some(epoch_rows) = self.epoch_rows {
            let expected = epoch_rows.saturating_sub(chunk * limit).min(limit);
            if rows != expected {
                return Err(LedgerError::DataChanged { epoch, chunk, rows, expected });
            }
        } else if rows == 0 {
            self.first_empty_chunk = Some(self.first_empty_chunk.map_or(chunk, |first| first.min(chunk)));
        } else if rows < limit {
            self.epoch_rows = Some(chunk * limit + rows);
        }
        self.on_lease.remove(&(epoch, chunk));
        self.rows_read += rows;
        self.settle_exact_end();
        if self.epoch_rows == Some(0) { Err(LedgerError::NoRows) } else { Ok(lease) }
    }

    /// The step at which training ends, once it is known.
    #[must_use]
    pub fn total_steps(&self) -> Option<GlobalStep> {
        match self.plan.length {
            TrainingLength::Steps(steps) => Some(GlobalStep(steps)),
            TrainingLength::Epochs(epochs) => {
                let rows = self.epoch_rows?;
                Some(GlobalStep(rows.div_ceil(self.plan.global_batch_rows) * u64::from(epochs)))
            }
        }
    }

    /// Rows of one epoch, once known.
    #[must_use]
    pub fn epoch_rows(&self) -> Option<u64> {
        self.epoch_rows
    }

    /// Rows of all reported chunks.
    #[must_use]
    pub fn rows_read(&self) -> u64 {
        self.rows_read
    }

    /// Chunks handed out and not reported.
    #[must_use]
    pub fn on_lease(&self) -> usize {
        self.on_lease.len()
    }

    fn chunk_rows(&self) -> u64 {
        self.plan.global_batch_rows * self.plan.batches_per_chunk
    }

    /// The first empty chunk ends the epoch once all chunks before it are known to be full.
    fn settle_exact_end(&mut self) {
        if self.epoch_rows.is_none()
            && let Some(empty) = self.first_empty_chunk
            && self.on_lease.range(..(self.epoch, empty)).next().is_none()
        {
            self.epoch_rows = Some(empty * self.chunk_rows());
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn plan(batch: u64, batches: u64, length: TrainingLength) -> DataPlan {
        DataPlan { global_batch_rows: batch, batches_per_chunk: batches, length }
    }

    /// Runs `loaders` against data of `rows` rows; returns each step with its (epoch, first row, rows).
    fn run(plan: DataPlan, rows: u64, loaders: usize, choices: &[usize]) -> BTreeMap<u64, (u32, u64, u64)> {
        run_on(DataLedger::new(plan), rows, loaders, choices)
    }

    fn run_on(mut ledger: DataLedger, rows: u64, loaders: usize, choices: &[usize]) -> BTreeMap<u64, (u32, u64, u64)> {
        let plan = ledger.plan;
        let chunk_rows = plan.global_batch_rows * plan.batches_per_chunk;
        let mut held: Vec<Option<ChunkLease>> = vec![None; loaders];
        let mut finished = vec![false; loaders];
        let mut steps = BTreeMap::new();
        let mut turn = choices.iter().chain(&[0, 1, 2, 3, 4, 5, 6, 7]).cycle();
        while finished.iter().any(|f| !f) {
            let loader = turn.next().unwrap() % loaders;
            if let Some(lease) = held[loader].take() {
                let first_row = lease.chunk * chunk_rows;
                let held_rows = rows.saturating_sub(first_row).min(chunk_rows);
                ledger.report(lease.epoch, lease.chunk, held_rows).unwrap();
                for batch in 0..held_rows.div_ceil(plan.global_batch_rows).min(lease.max_batches) {
                    let row = first_row + batch * plan.global_batch_rows;
                    let size = (first_row + held_rows - row).min(plan.global_batch_rows);
                    let previous = steps.insert(lease.first_step.0 + batch, (lease.epoch, row, size));
                    assert_eq!(previous, None, "a step was handed out twice");
                }
            } else if !finished[loader] {
                match ledger.lease() {
                    Lease::Chunk(lease) => held[loader] = Some(lease),
                    Lease::Wait => {}
                    Lease::Finished => finished[loader] = true,
                }
            }
        }
        let end = steps.keys().next_back().map(|last| last + 1);
        assert!(end.is_none() || ledger.total_steps().map(|total| total.0) == end);
        assert_eq!(ledger.on_lease(), 0);
        steps
    }

    proptest! {
        #[test]
        fn any_number_of_loaders_in_any_order_trains_every_row_once_an_epoch_at_the_same_step(
            batch in 1u64..5, batches in 1u64..4, rows in 1u64..60, epochs in 1u32..4, loaders in 1usize..5,
            choices in proptest::collection::vec(any::<usize>(), 1..60),
        ) {
            let plan = plan(batch, batches, TrainingLength::Epochs(epochs));
            let steps = run(plan, rows, loaders, &choices);
            prop_assert_eq!(&steps, &run(plan, rows, 1, &[0]));
            let mut expected = Vec::new();
            for epoch in 0..epochs {
                for b in 0..rows.div_ceil(batch) {
                    expected.push((epoch, b * batch, (rows - b * batch).min(batch)));
                }
            }
            prop_assert_eq!(steps.keys().copied().collect::<Vec<_>>(), (0..expected.len() as u64).collect::<Vec<_>>());
            prop_assert_eq!(steps.into_values().collect::<Vec<_>>(), expected);
        }

        #[test]
        fn a_run_goes_on_from_any_batch_with_the_same_batches(
            batch in 1u64..5, batches in 1u64..4, rows in 1u64..60, epochs in 1u32..4, loaders in 1usize..5,
            at in any::<prop::sample::Index>(), knew_the_end in any::<bool>(), as_the_next_epoch in any::<bool>(),
            choices in proptest::collection::vec(any::<usize>(), 1..60),
        ) {
            let plan = plan(batch, batches, TrainingLength::Epochs(epochs));
            let all = run(plan, rows, 1, &[0]);
            let at = at.index(all.len() + 1) as u64;
            let epoch_batches = rows.div_ceil(batch);
            // At an epoch's end, both names of the place.
            let ended = u64::from(at > 0 && at.is_multiple_of(epoch_batches) && !as_the_next_epoch);
            let epoch = (at / epoch_batches - ended) as u32;
            // A chunk that is not full has told where the epoch ends.
            let chunk_is_full = |last: u64| (last % epoch_batches / batches + 1) * batches * batch <= rows;
            let told_the_end = at.checked_sub(1).is_some_and(|last| !chunk_is_full(last));
            let epoch_rows = (knew_the_end || epoch > 0 || told_the_end).then_some(rows);
            let ledger = DataLedger::resume(plan, DataPosition { batch: at, epoch, epoch_rows }).unwrap();
            prop_assert!(ledger.next_batch() <= at);
            let rest = run_on(ledger, rows, loaders, &choices);
            let from = at - (at - u64::from(epoch) * epoch_batches) % batches;
            let expected: BTreeMap<_, _> = all.into_iter().filter(|(step, _)| *step >= from).collect();
            prop_assert_eq!(rest, expected);
        }

        #[test]
        fn a_limit_on_steps_is_met_exactly(
            batch in 1u64..5, batches in 1u64..4, rows in 1u64..40, limit in 1u64..50, loaders in 1usize..4,
            choices in proptest::collection::vec(any::<usize>(), 1..60),
        ) {
            let steps = run(plan(batch, batches, TrainingLength::Steps(limit)), rows, loaders, &choices);
            prop_assert_eq!(steps.keys().copied().collect::<Vec<_>>(), (0..limit).collect::<Vec<_>>());
        }
    }

    #[test]
    fn a_position_that_the_data_does_not_have_is_refused() {
        let plan = plan(2, 2, TrainingLength::Epochs(3));
        for (batch, epoch, epoch_rows) in [(9, 1, Some(6)), (2, 1, Some(6)), (4, 0, Some(6)), (3, 1, None)] {
            let position = DataPosition { batch, epoch, epoch_rows };
            assert_eq!(DataLedger::resume(plan, position).unwrap_err(), LedgerError::NoSuchBatch(position));
        }
    }

    #[test]
    fn reports_that_contradict_the_ledger_are_refused() {
        let mut ledger = DataLedger::new(plan(2, 2, TrainingLength::Epochs(2)));
        assert_eq!(ledger.report(0, 0, 4), Err(LedgerError::NotLeased { epoch: 0, chunk: 0 }));
        assert!(matches!(ledger.lease(), Lease::Chunk(_)));
        assert!(matches!(ledger.report(0, 0, 5), Err(LedgerError::TooManyRows { .. })));
        assert!(ledger.report(0, 0, 3).is_ok());
        assert!(matches!(ledger.lease(), Lease::Chunk(ChunkLease { epoch: 1, chunk: 0, .. })));
        assert!(matches!(ledger.report(1, 0, 2), Err(LedgerError::DataChanged { expected: 3, .. })));
    }

    #[test]
    fn data_without_rows_is_an_error_and_not_an_endless_run() {
        let mut ledger = DataLedger::new(plan(2, 2, TrainingLength::Steps(10)));
        assert!(matches!(ledger.lease(), Lease::Chunk(_)));
        assert_eq!(ledger.report(0, 0, 0), Err(LedgerError::NoRows));
        assert_eq!(ledger.lease(), Lease::Finished);
    }
}

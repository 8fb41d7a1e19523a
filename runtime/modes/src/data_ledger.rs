//! The coordinator's account of the training data. Loaders lease the data in chunks of a fixed
//! number of rows. A chunk's number in the pass fixes the global steps of its batches. So the
//! batches of a run do not depend on which loader reads a chunk. [`Chunks`] determines where a
//! chunk begins and where a pass ends.
//!
//! The coordinator calls it. Each evaluation has a separate ledger, of one epoch.

use std::collections::BTreeMap;

use rectrain_kinds::Start;
use serde::{Deserialize, Serialize};

use crate::{Chunks, FiniteChunks, GlobalStep, JobChunks, StreamChunks};

/// How long to train.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub enum TrainingLength {
    /// This many passes over the training rows.
    Epochs(u32),
    /// This many global steps, over as many epochs as they take.
    Steps(u64),
}

/// The sizes of chunks and batches, and the length of training.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
pub struct DataPlan {
    /// Rows of a global batch; the last batch of an epoch may have fewer.
    pub global_batch_rows: u64,
    /// Full global batches in a chunk.
    pub batches_per_chunk: u64,
    /// Where training ends.
    pub length: TrainingLength,
}

impl DataPlan {
    fn chunk_rows(&self) -> u64 {
        self.global_batch_rows * self.batches_per_chunk
    }
}

/// A chunk that a loader reads.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct ChunkLease {
    /// Pass over the data, from 0.
    pub epoch: u32,
    /// Chunk within the epoch, from 0.
    pub chunk: u64,
    /// The first row of the chunk.
    pub start: Start,
    /// The offset behind its last record, in a stream.
    pub until: Option<u64>,
    /// The global step of the chunk's first batch.
    pub first_step: GlobalStep,
    /// Batches beyond this number are not trained (the limit on steps).
    pub max_batches: u64,
}

/// The point in the data up to which an earlier run has trained.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct DataPosition {
    /// Trained global batches of all epochs.
    pub batch: u64,
    /// Epoch of the next batch. At the end of an epoch it may be this epoch or the next.
    pub epoch: u32,
    /// Rows of one epoch, if they were known.
    pub epoch_rows: Option<u64>,
}

/// Where the passes over the present files begin. Before that, the run has trained on other files,
/// whose epochs may have had another length.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct FirstPass {
    /// The first epoch over the present files.
    pub epoch: u32,
    /// Global batches of all epochs before it.
    pub batch: u64,
    /// Rows of all epochs before it.
    pub rows: u64,
}

impl FirstPass {
    /// The global batches of a run of `epochs` epochs. `epoch_batches` is the number in an epoch
    /// over the present files. `None` if the run needs that number, and it is not known.
    #[must_use]
    pub fn batches_of_run(&self, epochs: u32, epoch_batches: Option<u64>) -> Option<u64> {
        match u64::from(epochs.saturating_sub(self.epoch)) {
            0 => Some(self.batch),
            passes => Some(epoch_batches?.saturating_mul(passes).saturating_add(self.batch)),
        }
    }
}

/// The answer to a loader that requests data.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Lease {
    /// Read this chunk.
    Chunk(ChunkLease),
    /// No chunk now. Ask again once loaders have reported leased chunks or the source has grown.
    Wait,
    /// No chunk is left.
    Finished,
}

/// Errors of the ledger: contradicting reports, and data that does not fit the run.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum LedgerError {
    /// A chunk that no loader has on lease. It was never leased, or a loader has already reported
    /// it.
    #[error("chunk {chunk} of epoch {epoch} was reported, but is not on lease")]
    NotLeased { epoch: u32, chunk: u64 },
    /// More rows than a chunk holds.
    #[error("chunk {chunk} of epoch {epoch} was reported with {rows} rows; a chunk holds {limit}")]
    TooManyRows { epoch: u32, chunk: u64, rows: u64, limit: u64 },
    /// The data changed during the run: this epoch has another length than an earlier one.
    #[error(
        "chunk {chunk} of epoch {epoch} has {rows} rows where an earlier epoch had {expected}: the data changed while it was being read"
    )]
    DataChanged { epoch: u32, chunk: u64, rows: u64, expected: u64 },
    /// An earlier run has trained up to a batch that this data does not have.
    #[error("an earlier run trained up to batch {} in epoch {}, and this data has no such batch", .0.batch, .0.epoch)]
    NoSuchBatch(DataPosition),
    /// The training data has no rows.
    #[error("the training data has no rows")]
    NoRows,
}

/// The coordinator's account of the data; see the module's documentation.
#[derive(Debug, Serialize, Deserialize)]
pub struct DataLedger<C = FiniteChunks> {
    plan: DataPlan,
    epoch: u32,
    /// The global step at which the current epoch begins.
    epoch_start: GlobalStep,
    next_chunk: u64,
    chunks: C,
    on_lease: BTreeMap<(u32, u64), ChunkLease>,
    rows_read: u64,
    first_pass: FirstPass,
}

impl DataLedger {
    /// A ledger over a source that ends. No chunk is leased yet.
    #[must_use]
    pub fn new(plan: DataPlan) -> Self {
        Self::over(plan, |chunk_rows| FiniteChunks::new(chunk_rows, None))
    }

    /// Continues an earlier run with the same plan. The first leased chunk is the one that has the
    /// position's batch.
    ///
    /// # Errors
    /// [`LedgerError::NoSuchBatch`] if the data up to the position has fewer batches.
    pub fn resume(plan: DataPlan, position: DataPosition) -> Result<Self, LedgerError> {
        Self::resume_after(plan, position, FirstPass::default())
    }

    /// As [`resume`](Self::resume), for a run that has trained on other files before `first_pass`.
    ///
    /// # Errors
    /// [`LedgerError::NoSuchBatch`] as `resume`, and if the position lies before the first pass.
    pub fn resume_after(plan: DataPlan, position: DataPosition, first_pass: FirstPass) -> Result<Self, LedgerError> {
        let epoch_rows = position.epoch_rows;
        let ledger = Self::over(plan, |chunk_rows| FiniteChunks::new(chunk_rows, epoch_rows));
        let mut ledger = Self { epoch: position.epoch, first_pass, ..ledger };
        let epoch_batches = epoch_rows.map(|rows| rows.div_ceil(ledger.plan.global_batch_rows));
        let passes = position.epoch.checked_sub(first_pass.epoch);
        let start = match (passes, epoch_batches) {
            (Some(0), _) => Some(first_pass.batch),
            (Some(passes), Some(batches)) => {
                batches.checked_mul(u64::from(passes)).and_then(|batches| batches.checked_add(first_pass.batch))
            }
            _ => None,
        };
        let within = start.and_then(|start| position.batch.checked_sub(start));
        let (Some(start), Some(within)) = (start, within) else { return Err(LedgerError::NoSuchBatch(position)) };
        if epoch_batches.is_some_and(|batches| within > batches) {
            return Err(LedgerError::NoSuchBatch(position));
        }
        ledger.epoch_start = GlobalStep(start);
        ledger.next_chunk = within / ledger.plan.batches_per_chunk;
        let passes = u64::from(passes.unwrap_or(0));
        ledger.rows_read =
            first_pass.rows + ledger.next_chunk * ledger.plan.chunk_rows() + passes * epoch_rows.unwrap_or(0);
        Ok(ledger)
    }
}

impl DataLedger<JobChunks> {
    /// The ledger of a job whose source ends.
    #[must_use]
    pub fn of_finite(ledger: DataLedger) -> Self {
        let DataLedger { plan, epoch, epoch_start, next_chunk, chunks, on_lease, rows_read, first_pass } = ledger;
        let chunks = JobChunks::Finite(chunks);
        Self { plan, epoch, epoch_start, next_chunk, chunks, on_lease, rows_read, first_pass }
    }

    /// The ledger of a job on a stream. It has trained on `trained` before the first chunk. A chunk
    /// is one global batch.
    #[must_use]
    pub fn of_stream(plan: DataPlan, chunks: StreamChunks, trained: FirstPass) -> Self {
        let ledger = Self::over(plan, |_| JobChunks::Stream(Box::new(chunks)));
        Self { epoch_start: GlobalStep(trained.batch), rows_read: trained.rows, first_pass: trained, ..ledger }
    }
}

impl<C: Chunks> DataLedger<C> {
    /// A ledger over `chunks(rows of a chunk)`.
    pub fn over(plan: DataPlan, chunks: impl FnOnce(u64) -> C) -> Self {
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
            chunks: chunks(plan.chunk_rows()),
            on_lease: BTreeMap::new(),
            rows_read: 0,
            first_pass: FirstPass::default(),
        }
    }

    /// The chunks of a pass.
    pub fn chunks(&self) -> &C {
        &self.chunks
    }

    /// The chunks of a pass, to change them.
    pub fn chunks_mut(&mut self) -> &mut C {
        &mut self.chunks
    }

    /// The first batch of the chunk to be leased next.
    #[must_use]
    pub fn next_batch(&self) -> u64 {
        self.epoch_start.0 + self.next_chunk * self.plan.batches_per_chunk
    }

    /// Leases the next chunk, in order. While the end of an epoch is unknown, the chunk may lie
    /// past it. Its loader then finds no rows.
    pub fn lease(&mut self) -> Lease {
        if let Some(batches) = self.pass_batches()
            && self.next_chunk * self.plan.batches_per_chunk >= batches
        {
            if !self.chunks.repeats() {
                return Lease::Finished;
            }
            self.epoch += 1;
            self.epoch_start = GlobalStep(self.epoch_start.0 + batches);
            self.next_chunk = 0;
        }
        let first_step = GlobalStep(self.next_batch());
        let max_batches = match self.plan.length {
            TrainingLength::Epochs(epochs) if self.epoch >= epochs => return Lease::Finished,
            TrainingLength::Epochs(_) => self.plan.batches_per_chunk,
            TrainingLength::Steps(steps) if first_step.0 >= steps => return Lease::Finished,
            TrainingLength::Steps(steps) => self.plan.batches_per_chunk.min(steps - first_step.0),
        };
        if self.epoch_rows() == Some(0) {
            return Lease::Finished;
        }
        let Some(start) = self.chunks.begin(self.next_chunk) else { return Lease::Wait };
        let until = self.chunks.until(self.next_chunk);
        let lease = ChunkLease { epoch: self.epoch, chunk: self.next_chunk, start, until, first_step, max_batches };
        self.on_lease.insert((lease.epoch, lease.chunk), lease);
        self.next_chunk += 1;
        Lease::Chunk(lease)
    }

    /// Records the rows that a loader found in a leased chunk, and ends its lease.
    ///
    /// # Errors
    /// A report that contradicts the ledger; [`LedgerError::NoRows`] once the data is known to be
    /// empty.
    pub fn report(&mut self, epoch: u32, chunk: u64, rows: u64) -> Result<ChunkLease, LedgerError> {
        let Some(lease) = self.on_lease.get(&(epoch, chunk)).copied() else {
            return Err(LedgerError::NotLeased { epoch, chunk });
        };
        let limit = self.plan.chunk_rows();
        if rows > limit {
            return Err(LedgerError::TooManyRows { epoch, chunk, rows, limit });
        }
        self.chunks.found(chunk, rows).map_err(|expected| LedgerError::DataChanged { epoch, chunk, rows, expected })?;
        self.on_lease.remove(&(epoch, chunk));
        self.rows_read += rows;
        let first_on_lease = self.on_lease.range((self.epoch, 0)..).next().map(|((_, chunk), _)| *chunk);
        self.chunks.read_before(first_on_lease.unwrap_or(self.next_chunk));
        if self.epoch_rows() == Some(0) { Err(LedgerError::NoRows) } else { Ok(lease) }
    }

    /// The step at which training ends, once it is known.
    #[must_use]
    pub fn total_steps(&self) -> Option<GlobalStep> {
        match self.plan.length {
            TrainingLength::Steps(steps) => Some(GlobalStep(self.end_of_stream().map_or(steps, |end| end.min(steps)))),
            TrainingLength::Epochs(_) if !self.chunks.repeats() => self.end_of_stream().map(GlobalStep),
            TrainingLength::Epochs(epochs) => {
                self.first_pass.batches_of_run(epochs, self.pass_batches()).map(GlobalStep)
            }
        }
    }

    /// The step at which a stream ends, once it is known.
    fn end_of_stream(&self) -> Option<u64> {
        let batches = self.pass_batches().filter(|_| !self.chunks.repeats())?;
        Some(self.first_pass.batch + batches)
    }

    fn pass_batches(&self) -> Option<u64> {
        self.chunks.pass_batches(self.plan.global_batch_rows)
    }

    /// Rows of one epoch, once known.
    #[must_use]
    pub fn epoch_rows(&self) -> Option<u64> {
        self.chunks.pass_rows()
    }

    /// Where the passes over the present files begin.
    #[must_use]
    pub fn first_pass(&self) -> FirstPass {
        self.first_pass
    }

    /// Rows of all reported chunks.
    #[must_use]
    pub fn rows_read(&self) -> u64 {
        self.rows_read
    }

    /// Whether a chunk is leased and no loader has reported it.
    #[must_use]
    pub fn is_on_lease(&self, epoch: u32, chunk: u64) -> bool {
        self.on_lease.contains_key(&(epoch, chunk))
    }

    /// Leased chunks that no loader has reported.
    #[must_use]
    pub fn on_lease(&self) -> usize {
        self.on_lease.len()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use rectrain_kinds::Position;

    use super::*;

    fn plan(batch: u64, batches: u64, length: TrainingLength) -> DataPlan {
        DataPlan { global_batch_rows: batch, batches_per_chunk: batches, length }
    }

    /// Trains with `loaders` loaders on data of `rows` rows. Returns each step with its (epoch,
    /// first row, rows).
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
        fn loaders_in_any_order_train_each_row_once_at_the_same_step(
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
        fn a_run_resumes_from_any_batch_with_the_same_batches(
            batch in 1u64..5, batches in 1u64..4, rows in 1u64..60, epochs in 1u32..4, loaders in 1usize..5,
            at in any::<prop::sample::Index>(), knew_the_end in any::<bool>(), as_the_next_epoch in any::<bool>(),
            choices in proptest::collection::vec(any::<usize>(), 1..60),
        ) {
            let plan = plan(batch, batches, TrainingLength::Epochs(epochs));
            let all = run(plan, rows, 1, &[0]);
            let at = at.index(all.len() + 1) as u64;
            let epoch_batches = rows.div_ceil(batch);
            // The end of an epoch has two names: this epoch, and the next.
            let ended = u64::from(at > 0 && at.is_multiple_of(epoch_batches) && !as_the_next_epoch);
            let epoch = (at / epoch_batches - ended) as u32;
            // A short chunk has shown the end of the epoch.
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

    proptest! {
        #[test]
        fn epochs_over_other_files_follow_the_first_ones(
            batch in 1u64..5, batches in 1u64..4, before in 1u64..60, rows in 1u64..60, loaders in 1usize..5,
            at in any::<prop::sample::Index>(), choices in proptest::collection::vec(any::<usize>(), 1..60),
        ) {
            let first = run(plan(batch, batches, TrainingLength::Epochs(1)), before, 1, &[0]);
            let first_pass = FirstPass { epoch: 1, batch: first.len() as u64, rows: before };
            let plan = plan(batch, batches, TrainingLength::Epochs(3));
            let position = DataPosition { batch: first_pass.batch, epoch: 1, epoch_rows: None };
            let all = run_on(DataLedger::resume_after(plan, position, first_pass).unwrap(), rows, loaders, &choices);
            let epoch_batches = rows.div_ceil(batch);
            for (n, (step, place)) in all.iter().enumerate() {
                let (n, epoch) = (n as u64, 1 + n as u64 / epoch_batches);
                let row = n % epoch_batches * batch;
                prop_assert_eq!((*step, *place), (first_pass.batch + n, (epoch as u32, row, (rows - row).min(batch))));
            }
            prop_assert_eq!(all.len() as u64, 2 * epoch_batches);
            let within = at.index(all.len()) as u64;
            let epoch = 1 + (within / epoch_batches) as u32;
            let position = DataPosition { batch: first_pass.batch + within, epoch, epoch_rows: Some(rows) };
            let rest = run_on(DataLedger::resume_after(plan, position, first_pass).unwrap(), rows, loaders, &choices);
            let from = position.batch - within % epoch_batches % batches;
            prop_assert_eq!(rest, all.into_iter().filter(|(step, _)| *step >= from).collect::<BTreeMap<_, _>>());
        }
    }

    #[test]
    fn a_position_past_the_end_of_the_data_is_refused() {
        let plan = plan(2, 2, TrainingLength::Epochs(3));
        for (batch, epoch, epoch_rows) in [(9, 1, Some(6)), (2, 1, Some(6)), (4, 0, Some(6)), (3, 1, None)] {
            let position = DataPosition { batch, epoch, epoch_rows };
            assert_eq!(DataLedger::resume(plan, position).unwrap_err(), LedgerError::NoSuchBatch(position));
        }
    }

    /// A run that waits for the end of an epoch that no loader reads never ends.
    #[test]
    fn a_run_of_fewer_epochs_than_earlier_files_had_ends_at_once() {
        let first_pass = FirstPass { epoch: 2, batch: 6, rows: 11 };
        let position = DataPosition { batch: 7, epoch: 2, epoch_rows: None };
        for (epochs, total) in [(1, Some(GlobalStep(6))), (2, Some(GlobalStep(6))), (3, None)] {
            let plan = plan(2, 2, TrainingLength::Epochs(epochs));
            let mut ledger = DataLedger::resume_after(plan, position, first_pass).unwrap();
            assert_eq!(ledger.total_steps(), total, "{epochs}");
            assert_eq!(ledger.lease() == Lease::Finished, total.is_some(), "{epochs}");
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
    fn data_without_rows_is_an_error() {
        let mut ledger = DataLedger::new(plan(2, 2, TrainingLength::Steps(10)));
        assert!(matches!(ledger.lease(), Lease::Chunk(_)));
        assert_eq!(ledger.report(0, 0, 0), Err(LedgerError::NoRows));
        assert_eq!(ledger.lease(), Lease::Finished);
    }

    /// The partitions of a stream. Each holds the rows from 0 to its end, and may grow.
    #[derive(Debug)]
    struct Partitions {
        chunk_rows: u64,
        ends: Vec<u64>,
        leased: Vec<u64>,
    }

    impl Partitions {
        fn unleased(&self, part: usize) -> u64 {
            self.ends[part] - self.leased[part]
        }
    }

    impl Chunks for Partitions {
        /// A full chunk of the partition that has most rows left.
        fn begin(&mut self, _chunk: u64) -> Option<Start> {
            let fullest = (0..self.ends.len()).max_by_key(|&part| self.unleased(part))?;
            if self.unleased(fullest) < self.chunk_rows {
                return None;
            }
            let start = Position::new(fullest as u32, self.leased[fullest]);
            self.leased[fullest] += self.chunk_rows;
            Some(Start::At(start))
        }

        fn found(&mut self, _chunk: u64, rows: u64) -> Result<(), u64> {
            if rows == self.chunk_rows { Ok(()) } else { Err(self.chunk_rows) }
        }

        fn read_before(&mut self, _chunk: u64) {}

        fn pass_rows(&self) -> Option<u64> {
            None
        }
    }

    /// A stream with one partition of `end` rows, whose end is the end of training. Reads it whole.
    fn read_stream(length: TrainingLength, trained: FirstPass, end: u64) -> (Vec<(u64, u64)>, Option<u64>) {
        use rectrain_kinds::{LostRecords, PartId, PartitionState, SegmentRead, StreamEnd};
        let stream = crate::StreamPlan {
            chunk_rows: 4,
            until: Some(StreamEnd::Latest),
            lost_records: LostRecords::Fail,
            parts: crate::StreamParts::Growing,
        };
        let mut ledger = DataLedger::of_stream(plan(4, 1, length), StreamChunks::new(stream), trained);
        assert_eq!(ledger.lease(), Lease::Wait);
        let chunks = ledger.chunks_mut().stream_mut().unwrap();
        let state = PartitionState { part: PartId(0), begin: 0, end, aged_end: 0, start: 0, stop: None };
        chunks.found(0, &[state]).unwrap();
        for segment in chunks.to_probe() {
            assert!(chunks.probed(segment, SegmentRead { next: segment.from, more: true }));
        }
        let mut steps = Vec::new();
        while let Lease::Chunk(lease) = ledger.lease() {
            let Start::At(from) = lease.start else { panic!("a stream has no row numbers") };
            let next = (from.offset.0 + 4).min(lease.until.unwrap());
            let read = SegmentRead { next, more: next < end };
            ledger.chunks_mut().stream_mut().unwrap().read(lease.chunk, read).unwrap();
            ledger.report(lease.epoch, lease.chunk, next - from.offset.0).unwrap();
            steps.push((lease.first_step.0, next));
        }
        assert_eq!(ledger.lease(), Lease::Finished);
        (steps, ledger.total_steps().map(|total| total.0))
    }

    #[test]
    fn a_stream_ends_with_its_last_rows_or_its_last_step() {
        let fresh = FirstPass::default();
        let all = read_stream(TrainingLength::Epochs(1), fresh, 10);
        assert_eq!(all, (vec![(0, 4), (1, 8), (2, 10)], Some(3)));
        assert_eq!(read_stream(TrainingLength::Steps(9), fresh, 10), all);
        assert_eq!(read_stream(TrainingLength::Steps(2), fresh, 10), (vec![(0, 4), (1, 8)], Some(2)));
        let trained = FirstPass { epoch: 0, batch: 7, rows: 25 };
        assert_eq!(read_stream(TrainingLength::Epochs(1), trained, 5), (vec![(7, 4), (8, 5)], Some(9)));
    }

    proptest! {
        #[test]
        fn a_growing_stream_is_leased_once_and_in_order(
            batch in 1u64..4, batches in 1u64..4, growth in proptest::collection::vec((0usize..3, 0u64..20), 1..40),
        ) {
            let plan = plan(batch, batches, TrainingLength::Epochs(1));
            let mut ledger = DataLedger::over(plan, |chunk_rows| Partitions {
                chunk_rows,
                ends: vec![0; 3],
                leased: vec![0; 3],
            });
            let (mut next, mut step) = ([0; 3], 0);
            for (part, rows) in growth {
                ledger.chunks_mut().ends[part] += rows;
                while let Lease::Chunk(lease) = ledger.lease() {
                    let Start::At(Position { part, offset }) = lease.start else { panic!("a stream has no row numbers") };
                    let part = part.0 as usize;
                    prop_assert_eq!((offset.0, lease.first_step.0), (next[part], step));
                    next[part] += batch * batches;
                    step += batches;
                    ledger.report(0, lease.chunk, batch * batches).unwrap();
                }
                prop_assert_eq!(ledger.lease(), Lease::Wait);
            }
            let all: u64 = next.iter().sum();
            prop_assert_eq!((ledger.rows_read(), ledger.total_steps(), ledger.on_lease()), (all, None, 0));
        }
    }
}

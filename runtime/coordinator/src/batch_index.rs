//! The global batches that the data has, as learned from the loaders' reports.
//! The index also locates a row of the run in its batch. The rows of a run are counted over all
//! epochs. Every batch is full except the last one of an epoch.

use std::collections::BTreeMap;

use rectrain_modes::{DataPosition, FirstPass};
use serde::{Deserialize, Serialize};

/// The batches known so far.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct BatchIndex {
    global_rows: u64,
    /// Batches known without a gap, from the first on.
    batches: u64,
    /// Each short batch: its rows, and the rows missing in all short batches up to it.
    short: BTreeMap<u64, Short>,
    /// The first batch of each epoch but the first.
    epoch_starts: Vec<u64>,
    epoch: u32,
    /// Chunks reported ahead of a gap, by first batch.
    later: BTreeMap<u64, Chunk>,
    total: Option<u64>,
    /// The first batch over the present files. Of the batches before it, the index knows only the
    /// counts of batches and rows.
    #[serde(default)]
    first: u64,
}

#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
struct Short {
    rows: u64,
    missing: u64,
}

/// A chunk of data as a loader found it.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
pub(super) struct Chunk {
    pub(super) epoch: u32,
    pub(super) first_batch: u64,
    /// Rows to train, at least 1.
    pub(super) rows: u64,
}

impl BatchIndex {
    pub(super) fn new(global_rows: u64) -> Self {
        Self {
            global_rows,
            batches: 0,
            short: BTreeMap::new(),
            epoch_starts: Vec::new(),
            epoch: 0,
            later: BTreeMap::new(),
            total: None,
            first: 0,
        }
    }

    /// The index of a run that resumes at `position`: the batches before it. Before `first_pass`
    /// the run has trained on other files. The index has only the counts of their batches and rows.
    pub(super) fn resume(global_rows: u64, position: DataPosition, first_pass: FirstPass) -> Self {
        let mut data = Self::after(global_rows, first_pass);
        for epoch in first_pass.epoch..position.epoch {
            let rows = position.epoch_rows.unwrap_or(0);
            data.add(Chunk { epoch, first_batch: data.batches, rows });
        }
        let rows = position.batch.saturating_sub(data.batches) * global_rows;
        let rows = position.epoch_rows.map_or(rows, |epoch_rows| rows.min(epoch_rows));
        if rows > 0 {
            data.add(Chunk { epoch: position.epoch, first_batch: data.batches, rows });
        }
        data
    }

    fn after(global_rows: u64, first_pass: FirstPass) -> Self {
        let FirstPass { epoch, batch, rows } = first_pass;
        let epoch_starts = vec![batch; epoch as usize];
        let mut data = Self { batches: batch, epoch, epoch_starts, first: batch, ..Self::new(global_rows) };
        let missing = (batch * global_rows).saturating_sub(rows);
        if missing > 0 {
            data.short.insert(batch - 1, Short { rows: global_rows, missing });
        }
        data
    }

    /// The epoch of a known batch, or of the batch after the last known one.
    pub(super) fn epoch_of(&self, batch: u64) -> u32 {
        self.epoch_starts.partition_point(|start| *start <= batch) as u32
    }

    /// Adds a chunk that a loader has read. Ignores the part that is known already from an earlier
    /// run.
    pub(super) fn add(&mut self, mut chunk: Chunk) {
        let known = self.batches.saturating_sub(chunk.first_batch);
        chunk.first_batch += known;
        chunk.rows = chunk.rows.saturating_sub(known * self.global_rows);
        if chunk.rows == 0 {
            return;
        }
        self.later.insert(chunk.first_batch, chunk);
        while let Some(chunk) = self.later.remove(&self.batches) {
            if std::mem::replace(&mut self.epoch, chunk.epoch) != chunk.epoch {
                self.epoch_starts.push(chunk.first_batch);
            }
            self.batches += chunk.rows.div_ceil(self.global_rows);
            let last = chunk.rows % self.global_rows;
            if last > 0 {
                let missing = self.missing_before(self.batches - 1) + self.global_rows - last;
                self.short.insert(self.batches - 1, Short { rows: last, missing });
            }
        }
    }

    /// Forgets which batches before `batch` are short, but not how many rows they miss. So a stream
    /// without an end needs bounded memory.
    pub(super) fn forget_before(&mut self, batch: u64) {
        let batch = batch.min(self.batches);
        if batch <= self.first {
            return;
        }
        let missing = self.missing_before(batch);
        let rows = self.rows_of(batch - 1);
        self.short = self.short.split_off(&batch);
        if missing > 0 {
            self.short.insert(batch - 1, Short { rows, missing });
        }
        self.first = batch;
    }

    /// Sets the number of batches in the data. A resumed run may be given fewer epochs or steps
    /// than the earlier run has trained. Then the data ends where the earlier run stopped.
    pub(super) fn end(&mut self, total: u64) {
        self.total = Some(total.max(self.batches));
    }

    /// Batches known without a gap.
    pub(super) fn batches(&self) -> u64 {
        self.batches
    }

    /// Whether all batches are known.
    pub(super) fn complete(&self) -> bool {
        self.total == Some(self.batches)
    }

    /// The first batch of each epoch but the first, ascending.
    pub(super) fn epoch_starts(&self) -> &[u64] {
        &self.epoch_starts
    }

    /// Rows of a known batch.
    pub(super) fn rows_of(&self, batch: u64) -> u64 {
        self.short.get(&batch).map_or(self.global_rows, |short| short.rows)
    }

    /// The first row of a batch. Rows of batches over earlier files are estimates. They never lie
    /// after the first row over the present files: [`Self::locate`] needs rows in the order of
    /// batches.
    pub(super) fn row_of(&self, batch: u64) -> u64 {
        let row = |batch: u64| batch * self.global_rows - self.missing_before(batch);
        row(batch).min(row(batch.max(self.first)))
    }

    /// The batch of a row, and the position of the row in it. The row after a batch's last row is
    /// the first of the next batch.
    pub(super) fn locate(&self, row: u64) -> (u64, u64) {
        // Binary search, since there may be one short batch for each of very many epochs. The
        // number of missing rows before the row lies between none and all.
        let missing = self.short.values().next_back().map_or(0, |short| short.missing);
        let (mut batch, mut latest) = (row / self.global_rows, (row + missing) / self.global_rows);
        while batch < latest {
            let middle = (batch + latest).div_ceil(2);
            if self.row_of(middle) <= row { batch = middle } else { latest = middle - 1 }
        }
        (batch, row - self.row_of(batch))
    }

    fn missing_before(&self, batch: u64) -> u64 {
        self.short.range(..batch).next_back().map_or(0, |(_, short)| short.missing)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_and_batches_agree_for_any_order_of_reports() {
        let mut data = BatchIndex::new(10);
        data.add(Chunk { epoch: 1, first_batch: 4, rows: 30 });
        data.add(Chunk { epoch: 0, first_batch: 3, rows: 4 });
        assert_eq!(data.batches(), 0);
        data.add(Chunk { epoch: 0, first_batch: 0, rows: 30 });
        data.add(Chunk { epoch: 1, first_batch: 7, rows: 4 });
        assert_eq!(data.batches(), 8);
        data.end(8);
        assert!(data.complete());
        assert_eq!(data.epoch_starts(), [4]);
        let mut row = 0;
        for batch in 0..8 {
            assert_eq!(data.row_of(batch), row);
            for place in 0..data.rows_of(batch) {
                assert_eq!(data.locate(row), (batch, place));
                row += 1;
            }
        }
        assert_eq!(row, 68);
        assert_eq!(data.locate(68), (8, 0));
    }

    #[test]
    fn a_resumed_index_equals_one_that_has_read_as_far() {
        let mut all = BatchIndex::new(10);
        for epoch in 0..3 {
            all.add(Chunk { epoch, first_batch: u64::from(epoch) * 4, rows: 34 });
        }
        for batch in 0..=12 {
            for epoch in [all.epoch_of(batch), all.epoch_of(batch.saturating_sub(1))] {
                let position = DataPosition { batch, epoch, epoch_rows: Some(34) };
                let mut resumed = BatchIndex::resume(10, position, FirstPass::default());
                assert_eq!(resumed.batches(), batch);
                // The chunk at the position is read again.
                resumed.add(Chunk { epoch, first_batch: u64::from(epoch) * 4, rows: 34 });
                let rows = |data: &BatchIndex| (0..=resumed.batches()).map(|b| data.row_of(b)).collect::<Vec<_>>();
                assert_eq!(rows(&resumed), rows(&all), "{batch} {epoch}");
                assert!(all.epoch_starts().starts_with(resumed.epoch_starts()), "{batch} {epoch}");
            }
        }
        let unknown_end =
            BatchIndex::resume(10, DataPosition { batch: 3, epoch: 0, epoch_rows: None }, FirstPass::default());
        assert_eq!((unknown_end.batches(), unknown_end.row_of(3)), (3, 30));
    }

    #[test]
    fn rows_are_counted_on_after_epochs_over_other_files() {
        let first_pass = FirstPass { epoch: 2, batch: 8, rows: 68 };
        let position = DataPosition { batch: 8, epoch: 2, epoch_rows: None };
        let mut data = BatchIndex::resume(10, position, first_pass);
        assert_eq!((data.batches(), data.row_of(8), data.epoch_of(8)), (8, 68, 2));
        data.add(Chunk { epoch: 2, first_batch: 8, rows: 25 });
        data.add(Chunk { epoch: 3, first_batch: 11, rows: 25 });
        assert_eq!((data.row_of(11), data.epoch_of(10), data.epoch_of(11)), (93, 2, 3));
        assert_eq!(data.locate(70), (8, 2));
        let position = DataPosition { batch: 12, epoch: 3, epoch_rows: Some(25) };
        let resumed = BatchIndex::resume(10, position, first_pass);
        assert_eq!((resumed.batches(), resumed.row_of(12), resumed.epoch_of(12)), (12, 103, 3));
    }

    /// All missing rows of earlier files are noted at one batch, and may be more than a batch has.
    #[test]
    fn rows_are_located_after_many_epochs_over_other_files() {
        let first_pass = FirstPass { epoch: 3, batch: 9, rows: 27 };
        let position = DataPosition { batch: 9, epoch: 3, epoch_rows: None };
        let mut data = BatchIndex::resume(4, position, first_pass);
        assert_eq!(data.locate(27), (9, 0), "the run would wait for a batch that no loader sends");
        data.add(Chunk { epoch: 3, first_batch: 9, rows: 6 });
        data.add(Chunk { epoch: 4, first_batch: 11, rows: 6 });
        for (row, expected) in (27..).zip([(9, 0), (9, 1), (9, 2), (9, 3), (10, 0), (10, 1), (11, 0)]) {
            assert_eq!(data.locate(row), expected, "{row}");
        }
        let rows: Vec<u64> = (0..=13).map(|batch| data.row_of(batch)).collect();
        assert!(rows.is_sorted(), "{rows:?}");
    }

    #[test]
    fn rows_are_located_after_short_batches_are_forgotten() {
        let index = |forgets: bool| {
            let mut data = BatchIndex::new(10);
            for batch in 0..100 {
                data.add(Chunk { epoch: 0, first_batch: batch, rows: 1 + batch * 7 % 10 });
                if forgets {
                    data.forget_before(batch.saturating_sub(5));
                }
            }
            data
        };
        let (all, forgetful) = (index(false), index(true));
        assert!(forgetful.short.len() <= 7, "{}", forgetful.short.len());
        for batch in 94..=100 {
            assert_eq!(forgetful.row_of(batch), all.row_of(batch), "{batch}");
        }
        for row in all.row_of(94)..=all.row_of(100) {
            assert_eq!(forgetful.locate(row), all.locate(row), "{row}");
        }
    }

    #[test]
    fn data_never_ends_before_the_position_of_a_resumed_run() {
        for (total, is_complete) in [(2, true), (7, true), (8, false)] {
            let position = DataPosition { batch: 7, epoch: 0, epoch_rows: None };
            let mut data = BatchIndex::resume(10, position, FirstPass::default());
            data.end(total);
            assert_eq!((data.complete(), data.batches()), (is_complete, 7), "{total}");
        }
    }
}

//! Which global batches the data is known to have, learned from the loaders' reports, and where a row of the run's row sequence
//! (all epochs, one after the other) is among them. Every batch is full but the last of an epoch.

use std::collections::BTreeMap;

use rectrain_modes::DataPosition;
use serde::{Deserialize, Serialize};

/// See the module's text.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Announced {
    global_rows: u64,
    /// Batches known without a gap from the first on.
    batches: u64,
    /// Rows of the batches that are short, and the rows missing in all of them up to here.
    short: BTreeMap<u64, Short>,
    /// Batches with which an epoch other than the first begins.
    epoch_starts: Vec<u64>,
    epoch: u32,
    /// Reported behind a gap: first batch → chunk.
    later: BTreeMap<u64, Chunk>,
    total: Option<u64>,
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
    /// Rows that are trained, at least 1.
    pub(super) rows: u64,
}

impl Announced {
    pub(super) fn new(global_rows: u64) -> Self {
        Self {
            global_rows,
            batches: 0,
            short: BTreeMap::new(),
            epoch_starts: Vec::new(),
            epoch: 0,
            later: BTreeMap::new(),
            total: None,
        }
    }

    /// What an earlier run knew of the batches before `position`.
    pub(super) fn resume(global_rows: u64, position: DataPosition) -> Self {
        let mut data = Self::new(global_rows);
        for epoch in 0..position.epoch {
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

    /// The pass over the data that a known batch, or the one after those, is in.
    pub(super) fn epoch_of(&self, batch: u64) -> u32 {
        self.epoch_starts.partition_point(|start| *start <= batch) as u32
    }

    /// A chunk has been read. What is known of it already, from an earlier run, is left out.
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

    /// The data has this many batches in all. A run that goes on may have been given fewer epochs or steps than the one before has trained:
    /// then it ends where that stood.
    pub(super) fn end(&mut self, total: u64) {
        self.total = Some(total.max(self.batches));
    }

    /// Batches known without a gap.
    pub(super) fn batches(&self) -> u64 {
        self.batches
    }

    /// Whether those are all.
    pub(super) fn complete(&self) -> bool {
        self.total == Some(self.batches)
    }

    /// Batches with which an epoch other than the first begins, ascending.
    pub(super) fn epoch_starts(&self) -> &[u64] {
        &self.epoch_starts
    }

    /// Rows of a known batch.
    pub(super) fn rows_of(&self, batch: u64) -> u64 {
        self.short.get(&batch).map_or(self.global_rows, |short| short.rows)
    }

    /// The first row of a batch.
    pub(super) fn row_of(&self, batch: u64) -> u64 {
        batch * self.global_rows - self.missing_before(batch)
    }

    /// The batch that a row is in, and its place there. The row after a batch's last is the first of the next batch.
    pub(super) fn locate(&self, row: u64) -> (u64, u64) {
        // It lies before as many missing rows as none to all: there may be a short batch for each of very many epochs.
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
    fn rows_and_batches_agree_over_epochs_whatever_the_order_of_the_reports() {
        let mut data = Announced::new(10);
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
    fn an_earlier_runs_knowledge_is_that_of_one_that_has_read_so_far() {
        let mut all = Announced::new(10);
        for epoch in 0..3 {
            all.add(Chunk { epoch, first_batch: u64::from(epoch) * 4, rows: 34 });
        }
        for batch in 0..=12 {
            for epoch in [all.epoch_of(batch), all.epoch_of(batch.saturating_sub(1))] {
                let position = DataPosition { batch, epoch, epoch_rows: Some(34) };
                let mut resumed = Announced::resume(10, position);
                assert_eq!(resumed.batches(), batch);
                // The chunk that it stood in is read again.
                resumed.add(Chunk { epoch, first_batch: u64::from(epoch) * 4, rows: 34 });
                let rows = |data: &Announced| (0..=resumed.batches()).map(|b| data.row_of(b)).collect::<Vec<_>>();
                assert_eq!(rows(&resumed), rows(&all), "{batch} {epoch}");
                assert!(all.epoch_starts().starts_with(resumed.epoch_starts()), "{batch} {epoch}");
            }
        }
        let unknown_end = Announced::resume(10, DataPosition { batch: 3, epoch: 0, epoch_rows: None });
        assert_eq!((unknown_end.batches(), unknown_end.row_of(3)), (3, 30));
    }

    #[test]
    fn data_that_ends_before_where_an_earlier_run_stood_ends_there() {
        for (total, is_complete) in [(2, true), (7, true), (8, false)] {
            let mut data = Announced::resume(10, DataPosition { batch: 7, epoch: 0, epoch_rows: None });
            data.end(total);
            assert_eq!((data.complete(), data.batches()), (is_complete, 7), "{total}");
        }
    }
}

//! The rows of one table, addressed by number, in chunks that never move. It knows the length of a
//! row but not the meaning of its words.
//!
//! ```text
//! row number = chunk · C + place,  C = 16, 32 or 64 rows a chunk, fewer where rows are long
//!     chunks ─┬─► [ row 0 | row 1 | … | row C−1 ]      live ──► one bit a row
//!             └─► [ row C | … ]
//! ```
//!
//! Invariants:
//! 1. Rows below `used` have been handed out at least once, or were found in a file; the others
//!    never.
//! 2. A row below `used` is either live (its bit is set) or on the free list, which runs through
//!    the first word of the free rows.
//! 3. Growing adds a chunk and moves no row. Only a first chunk of fewer than C rows is replaced by
//!    one of twice the size, so that a table of three rows does not pay for sixty-four.
//!
//! Because rows have numbers and not pointers, a copy of the chunks is a snapshot, and chunks can
//! lie in a file that outlives the process ([`Slab::adopt`]). There, a chunk's header has a bit for
//! each row. It is set once the row has been written, not when it is handed out. So a row that a
//! killed process left half-made is free.
//!
//! The slab also knows which rows changed since the last mark, by a bit for each row. And it can be
//! *frozen*: from then on, it copies a row aside before the row's first change. The rows of that
//! instant can then be copied out later ([`Slab::frozen_rows`]) while updates continue.
//!
//! All writes to a row's words pass through [`Slab::row_mut`], [`Slab::allocate`] or
//! [`Slab::release`], so no change is missed. A write costs the test of one bit. The first write to
//! a row of a frozen slab also costs a copy of the row.

use crate::arena::{Arena, Blocks, push_sparingly};
use crate::block_file::FoundBlock;
use std::sync::Arc;
use std::sync::atomic::{Ordering, compiler_fence};

const FIRST_CHUNK_ROWS: usize = 4;
const LEAST_CHUNK_ROWS: usize = 16;
const MOST_CHUNK_ROWS: usize = 64;
/// Words of a chunk, unless that would be fewer than [`LEAST_CHUNK_ROWS`] rows. Larger chunks would
/// waste memory: half a chunk of every table is unused on average.
const CHUNK_WORDS: usize = 4_096;
/// The end of the free list. No row has this number.
const NO_ROW: u32 = u32::MAX;

/// See the module's text.
pub(crate) struct Slab {
    chunks: Blocks<u32>,
    live: Vec<u64>,
    stride: usize,
    /// C = 1 << chunk_bits.
    chunk_bits: u32,
    used: u32,
    free: u32,
    rows: usize,
    /// A bit a row: whether it was written, handed out or released since the last mark.
    changed: Vec<u64>,
    frozen: Option<Box<Frozen>>,
}

/// The state of the slab at the instant of the freeze.
struct Frozen {
    /// The slab's bits at that instant: the rows that had changed since the mark before.
    changed: Vec<u64>,
    /// Whether the rows of that instant have not been copied out yet.
    pending: bool,
    /// The rows of that instant that have changed since: their numbers, and their words before the
    /// change.
    copied: Vec<u32>,
    copied_words: Vec<u32>,
}

impl Slab {
    /// An empty slab of rows of `stride` words, at least one. `owner` distinguishes it from the
    /// other slabs in `memory`.
    pub(crate) fn new(memory: &Arc<Arena>, owner: u32, stride: usize) -> Self {
        Self::of_chunks(Blocks::new(memory, owner), stride)
    }

    fn of_chunks(chunks: Blocks<u32>, stride: usize) -> Self {
        let fitting = (CHUNK_WORDS / stride).clamp(LEAST_CHUNK_ROWS, MOST_CHUNK_ROWS);
        Self {
            chunks,
            live: Vec::new(),
            stride,
            chunk_bits: fitting.ilog2(),
            used: 0,
            free: NO_ROW,
            rows: 0,
            changed: Vec::new(),
            frozen: None,
        }
    }

    /// A slab of these rows, which follow each other in `bytes` as in memory. They are numbered in
    /// order, as if each had been handed out and written. `None` if there are too many to number.
    pub(crate) fn from_rows(memory: &Arc<Arena>, owner: u32, stride: usize, bytes: &[u8]) -> Option<Self> {
        let mut slab = Self::new(memory, owner, stride);
        let row_bytes = stride * size_of::<u32>();
        let rows = bytes.len() / row_bytes;
        slab.used = u32::try_from(rows).ok().filter(|&rows| rows != NO_ROW)?;
        slab.rows = rows;
        let full = 1 << slab.chunk_bits;
        // A first chunk may be smaller if it is the only one.
        let chunk_rows = if rows < full { rows.next_power_of_two().max(FIRST_CHUNK_ROWS) } else { full };
        for (chunk, bytes) in bytes.chunks(full * row_bytes).enumerate() {
            slab.chunks.push(chunk_rows * stride);
            bytemuck::cast_slice_mut(&mut slab.chunks[chunk])[..bytes.len()].copy_from_slice(bytes);
        }
        slab.live = (0..rows).step_by(64).map(|first| u64::MAX >> (64 - (rows - first).min(64))).collect();
        slab.changed = slab.live.clone();
        if memory.is_on_file() {
            (0..rows).for_each(|row| slab.publish(row as u32));
        }
        Some(slab)
    }

    /// The slab whose chunks a file holds. Rows that had been [published](Self::publish) are live
    /// and count as changed. `None` if the chunks do not form such a slab.
    pub(crate) fn adopt(memory: &Arc<Arena>, owner: u32, stride: usize, found: Vec<FoundBlock>) -> Option<Self> {
        let mut slab = Self::of_chunks(Blocks::adopt(memory, owner, found)?, stride);
        let full = stride << slab.chunk_bits;
        let last = slab.chunks.len().checked_sub(1)?;
        let sizes = (0..=last).map(|chunk| slab.chunks[chunk].len());
        let is_whole = |(chunk, words): (usize, usize)| words == full || (last == 0 && chunk == 0 && words < full);
        if !sizes.enumerate().all(|chunk| is_whole(chunk) && chunk.1 % stride == 0) {
            return None;
        }
        slab.used = u32::try_from(slab.capacity()).ok().filter(|&rows| rows != NO_ROW)?;
        slab.live = vec![0; (slab.used as usize).div_ceil(64)];
        for row in (0..slab.used).rev() {
            let (chunk, start) = slab.place(row);
            if slab.chunks.owner_bits(chunk) >> slab.chunk_of(row).1 & 1 == 1 {
                set(&mut slab.live, row);
                slab.rows += 1;
            } else {
                slab.chunks[chunk][start] = slab.free;
                slab.free = row;
            }
        }
        slab.changed = slab.live.clone();
        Some(slab)
    }

    pub(crate) fn is_live(&self, row: u32) -> bool {
        bit(&self.live, row)
    }

    /// Records in the chunk's header that a row has been written. A process that adopts the chunks
    /// then finds the row.
    pub(crate) fn publish(&mut self, row: u32) {
        let (chunk, place) = self.chunk_of(row);
        self.chunks.set_owner_bit(chunk, place, true);
    }

    /// Live rows.
    pub(crate) fn rows(&self) -> usize {
        self.rows
    }

    /// Bytes of memory in use.
    pub(crate) fn bytes(&self) -> usize {
        self.chunks.bytes()
            + (self.live.capacity() + self.changed.capacity()) * size_of::<u64>()
            + self.frozen.as_ref().map_or(0, |frozen| frozen.bytes())
    }

    /// The chunk of a row, and the row's position in the chunk.
    fn chunk_of(&self, row: u32) -> (usize, u32) {
        ((row >> self.chunk_bits) as usize, row & ((1 << self.chunk_bits) - 1))
    }

    /// The chunk of a row, and the offset of its first word in the chunk.
    fn place(&self, row: u32) -> (usize, usize) {
        let (chunk, place) = self.chunk_of(row);
        (chunk, place as usize * self.stride)
    }

    pub(crate) fn row(&self, row: u32) -> &[u32] {
        let (chunk, start) = self.place(row);
        &self.chunks[chunk][start..start + self.stride]
    }

    /// A live row's words, for writing.
    pub(crate) fn row_mut(&mut self, row: u32) -> &mut [u32] {
        if !bit(&self.changed, row) {
            self.first_change(row);
        }
        let (chunk, start) = self.place(row);
        &mut self.chunks[chunk][start..start + self.stride]
    }

    /// Records that a live row is about to change for the first time since the mark.
    fn first_change(&mut self, row: u32) {
        set(&mut self.changed, row);
        let (chunk, start) = self.place(row);
        if let Some(frozen) = self.frozen.as_mut().filter(|frozen| frozen.pending) {
            frozen.copied.push(row);
            frozen.copied_words.extend_from_slice(&self.chunks[chunk][start..start + self.stride]);
        }
    }

    /// Hands out a row with unspecified contents; `None` once all 2³² − 1 numbers are taken.
    pub(crate) fn allocate(&mut self) -> Option<u32> {
        let row = if self.free == NO_ROW {
            self.fresh()?
        } else {
            let row = self.free;
            self.free = self.row(row)[0];
            row
        };
        // The row was free, so there is nothing to copy aside.
        set(&mut self.changed, row);
        set(&mut self.live, row);
        self.rows += 1;
        Some(row)
    }

    fn fresh(&mut self) -> Option<u32> {
        let row = self.used;
        if row == NO_ROW {
            return None;
        }
        if row as usize == self.capacity() {
            self.grow();
        }
        if row as usize == self.live.len() * 64 {
            push_sparingly(&mut self.live, 0);
            push_sparingly(&mut self.changed, 0);
        }
        self.used += 1;
        Some(row)
    }

    fn capacity(&self) -> usize {
        match self.chunks.len() {
            0 => 0,
            1 => self.chunks[0].len() / self.stride,
            several => several << self.chunk_bits,
        }
    }

    fn grow(&mut self) {
        let full = self.stride << self.chunk_bits;
        match self.chunks.len() {
            0 => self.chunks.push(FIRST_CHUNK_ROWS * self.stride),
            1 if self.chunks[0].len() < full => self.chunks.replace_only(2 * self.chunks[0].len()),
            _ => self.chunks.push(full),
        }
    }

    /// Returns a live row to the free list.
    pub(crate) fn release(&mut self, row: u32) {
        let (chunk, place) = self.chunk_of(row);
        self.chunks.set_owner_bit(chunk, place, false);
        // A process that finds the bit set must find the row unchanged.
        compiler_fence(Ordering::SeqCst);
        let free = self.free;
        self.row_mut(row)[0] = free;
        self.live[row as usize / 64] &= !(1 << (row % 64));
        self.rows -= 1;
        self.free = row;
    }

    /// The live rows with their numbers, in order of number.
    pub(crate) fn iter(&self) -> impl Iterator<Item = (u32, &[u32])> {
        let words = self.live.iter().enumerate();
        words.flat_map(move |(word, &live)| {
            let set = (0..64).filter(move |bit| live >> bit & 1 == 1);
            set.map(move |bit| {
                let row = word as u32 * 64 + bit;
                (row, self.row(row))
            })
        })
    }

    /// A copy of the live rows, one after another in order of number.
    pub(crate) fn copy_rows(&self) -> Vec<u32> {
        let mut copy = Vec::with_capacity(self.rows * self.stride);
        if self.rows == self.used as usize {
            let mut left = self.rows * self.stride;
            for chunk in (0..self.chunks.len()).map(|chunk| &self.chunks[chunk]) {
                let taken = left.min(chunk.len());
                copy.extend_from_slice(&chunk[..taken]);
                left -= taken;
            }
            return copy;
        }
        for (_, row) in self.iter() {
            copy.extend_from_slice(row);
        }
        copy
    }
}

/// Marks and freezing; see the module's text.
impl Slab {
    /// Sets a mark: from now on rows count as unchanged.
    pub(crate) fn mark(&mut self) {
        self.changed.fill(0);
    }

    /// Sets a mark and keeps the rows of this instant until [`Self::thaw`].
    pub(crate) fn freeze(&mut self) {
        let unchanged = vec![0; self.changed.len()];
        let changed = std::mem::replace(&mut self.changed, unchanged);
        self.frozen = Some(Box::new(Frozen { changed, pending: true, copied: Vec::new(), copied_words: Vec::new() }));
    }

    /// A copy of the rows as they were when the slab was frozen, in no particular order. With
    /// `changes_only`, only rows that had changed between the mark before and the freeze. The first
    /// call drops the copies, so later calls return no rows. Neither does a slab that is not
    /// frozen.
    pub(crate) fn frozen_rows(&mut self, changes_only: bool) -> Vec<u32> {
        if !self.frozen.as_ref().is_some_and(|frozen| frozen.pending) {
            return Vec::new();
        }
        let Some(mut frozen) = self.frozen.take() else { return Vec::new() };
        if !changes_only && self.changed.iter().all(|&word| word == 0) {
            *frozen = frozen.without_copies();
            self.frozen = Some(frozen);
            return self.copy_rows();
        }
        let wanted = |row| !changes_only || bit(&frozen.changed, row);
        let mut rows = Vec::new();
        if !changes_only {
            rows.reserve_exact(self.rows * self.stride + frozen.copied_words.len());
        }
        for (row, words) in self.iter() {
            if !bit(&self.changed, row) && wanted(row) {
                rows.extend_from_slice(words);
            }
        }
        for (&row, words) in frozen.copied.iter().zip(frozen.copied_words.chunks_exact(self.stride)) {
            if wanted(row) {
                rows.extend_from_slice(words);
            }
        }
        *frozen = frozen.without_copies();
        self.frozen = Some(frozen);
        rows
    }

    /// Ends the freeze. If the copied rows are `saved`, the mark of the freeze stays. If not,
    /// everything that had changed since the mark before counts as changed again.
    pub(crate) fn thaw(&mut self, saved: bool) {
        let Some(frozen) = self.frozen.take().filter(|_| !saved) else { return };
        for (now, then) in self.changed.iter_mut().zip(&frozen.changed) {
            *now |= then;
        }
    }
}

impl Frozen {
    /// Takes the bits out and drops the copied rows.
    fn without_copies(&mut self) -> Self {
        Self {
            changed: std::mem::take(&mut self.changed),
            pending: false,
            copied: Vec::new(),
            copied_words: Vec::new(),
        }
    }

    fn bytes(&self) -> usize {
        self.changed.capacity() * size_of::<u64>()
            + (self.copied.capacity() + self.copied_words.capacity()) * size_of::<u32>()
    }
}

fn bit(bits: &[u64], row: u32) -> bool {
    bits.get(row as usize / 64).is_some_and(|word| word >> (row % 64) & 1 == 1)
}

fn set(bits: &mut [u64], row: u32) {
    bits[row as usize / 64] |= 1 << (row % 64);
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::BTreeMap;

    fn empty(stride: usize) -> Slab {
        Slab::new(&Arc::default(), 0, stride)
    }

    #[test]
    fn a_released_row_is_handed_out_again_before_the_slab_grows() {
        let mut slab = empty(3);
        let rows: Vec<u32> = (0..64).filter_map(|_| slab.allocate()).collect();
        let bytes = slab.bytes();
        slab.release(rows[10]);
        slab.release(rows[20]);
        assert_eq!(slab.allocate(), Some(rows[20]));
        assert_eq!(slab.allocate(), Some(rows[10]));
        assert_eq!(slab.bytes(), bytes);
    }

    #[test]
    fn long_rows_lie_in_chunks_of_fewer() {
        let chunk_rows = |stride| 1_usize << empty(stride).chunk_bits;
        assert_eq!(chunk_rows(5), 64);
        assert_eq!(chunk_rows(64), 64);
        assert_eq!(chunk_rows(65), 32);
        assert_eq!(chunk_rows(131), 16);
        assert_eq!(chunk_rows(100_000), 16);
    }

    #[test]
    fn a_small_table_holds_a_small_chunk() {
        let mut slab = empty(100);
        slab.allocate().unwrap();
        assert!(slab.bytes() < 2_000, "{}", slab.bytes());
    }

    #[test]
    fn a_slab_from_rows_equals_one_that_was_filled_row_by_row() {
        for (stride, rows) in
            [(3, 0), (3, 1), (3, 4), (3, 5), (3, 63), (3, 64), (3, 65), (3, 128), (300, 16), (300, 17)]
        {
            let words: Vec<u32> = (0..(stride * rows) as u32).collect();
            let mut given = Slab::from_rows(&Arc::default(), 0, stride, bytemuck::cast_slice(&words)).unwrap();
            let mut grown = empty(stride);
            for row in words.chunks_exact(stride) {
                let number = grown.allocate().unwrap();
                grown.row_mut(number).copy_from_slice(row);
            }
            for more in 0..70 {
                assert_eq!(given.copy_rows(), grown.copy_rows());
                assert!(given.iter().eq(grown.iter()));
                assert_eq!((given.rows(), given.capacity()), (grown.rows(), grown.capacity()), "{rows} and {more}");
                assert_eq!((&given.live, &given.changed), (&grown.live, &grown.changed));
                assert_eq!(given.allocate(), grown.allocate());
                let row = (rows + more) as u32;
                given.row_mut(row).fill(row);
                grown.row_mut(row).fill(row);
            }
        }
    }

    /// The rows of a slab by their stamp, which each row's words repeat.
    fn stamps(words: &[u32], stride: usize) -> Vec<u32> {
        let mut stamps: Vec<u32> = words.chunks_exact(stride).map(|row| row[1]).collect();
        stamps.sort_unstable();
        stamps
    }

    proptest! {
        /// After any operations, the frozen rows are the rows at the freeze. The changes are the
        /// changes since the mark before, even after a save that failed in between.
        #[test]
        fn frozen_rows_are_those_of_the_instant(
            operations in prop::collection::vec((0_u8..3, any::<prop::sample::Index>()), 1..400),
            marks in prop::collection::vec(0_usize..400, 3),
            (changes_only, first_was_saved) in any::<(bool, bool)>(),
        ) {
            let stride = 3;
            let mut marks = marks;
            marks.sort_unstable();
            let mut slab = empty(stride);
            let mut model: BTreeMap<u32, u32> = BTreeMap::new();
            // (contents at the last mark, contents at the freeze)
            let (mut at_mark, mut expected) = (BTreeMap::new(), Vec::new());
            let mut rest = operations.into_iter().zip(1_u32..);
            for (phase, end) in marks.iter().copied().chain([usize::MAX]).enumerate() {
                let start = if phase == 0 { 0 } else { marks[phase - 1] };
                for ((operation, pick), stamp) in rest.by_ref().take(end.saturating_sub(start)) {
                    let picked = (!model.is_empty()).then(|| *model.keys().nth(pick.index(model.len())).unwrap());
                    match (operation, picked) {
                        (1, Some(row)) => {
                            slab.row_mut(row).fill(stamp);
                            model.insert(row, stamp);
                        }
                        (2, Some(row)) => {
                            slab.release(row);
                            model.remove(&row);
                        }
                        _ => {
                            let row = slab.allocate().unwrap();
                            slab.row_mut(row).fill(stamp);
                            model.insert(row, stamp);
                        }
                    }
                }
                match phase {
                    0 => {
                        slab.mark();
                        at_mark = model.clone();
                    }
                    1 => {
                        slab.freeze();
                        slab.frozen_rows(true);
                        slab.thaw(first_was_saved);
                        if first_was_saved {
                            at_mark = model.clone();
                        }
                    }
                    2 => {
                        slab.freeze();
                        let unchanged = |row, stamp| at_mark.get(row) == Some(stamp);
                        let wanted = model.iter().filter(|(row, stamp)| !changes_only || !unchanged(row, stamp));
                        expected = wanted.map(|(_, &stamp)| stamp).collect();
                        expected.sort_unstable();
                    }
                    _ => {}
                }
            }
            prop_assert_eq!(stamps(&slab.frozen_rows(changes_only), stride), expected);
            slab.thaw(true);
            let mut now: Vec<u32> = model.values().copied().collect();
            now.sort_unstable();
            prop_assert_eq!(stamps(&slab.copy_rows(), stride), now);
        }

        #[test]
        fn rows_keep_their_contents_while_others_come_and_go(
            stride in prop::sample::select(vec![2_usize, 65, 131]),
            operations in prop::collection::vec((prop::bool::weighted(0.6), any::<prop::sample::Index>()), 1..900)
        ) {
            let mut slab = empty(stride);
            let mut model = BTreeMap::new();
            for (stamp, (allocate, pick)) in operations.into_iter().enumerate() {
                if allocate || model.is_empty() {
                    let row = slab.allocate().unwrap();
                    slab.row_mut(row).fill(stamp as u32);
                    prop_assert!(model.insert(row, stamp as u32).is_none());
                } else {
                    let row = *model.keys().nth(pick.index(model.len())).unwrap();
                    model.remove(&row);
                    slab.release(row);
                }
            }
            prop_assert_eq!(slab.rows(), model.len());
            let found: BTreeMap<u32, u32> = slab.iter().map(|(row, words)| (row, words[1])).collect();
            prop_assert_eq!(&found, &model);
            let copied: Vec<u32> = model.values().flat_map(|&stamp| vec![stamp; stride]).collect();
            prop_assert_eq!(slab.copy_rows(), copied);
        }
    }
}

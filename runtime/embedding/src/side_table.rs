//! A policy's state beside the rows of one (slot, group): blocks of words, each selected by the
//! hash of a key. It knows nothing of the words; the [policy](crate::life) does.
//!
//! A block lies in a row of a [`Slab`], behind its number. So blocks live in shared memory, are
//! saved at one instant and are known by change, all as rows are. A block exists from its first
//! change on, and stays. One whose words are all 0 holds nothing, and a snapshot of the whole slot
//! leaves it out.

use crate::arena::Arena;
use crate::block_file::FoundBlock;
use crate::index::Hash;
use crate::log::{Part, RowLog};
use crate::slab::Slab;
use std::sync::Arc;

/// The shape of a side table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct SideLayout {
    /// Words of a block, without its number.
    pub(crate) block_words: usize,
    /// Blocks of one slot.
    pub(crate) blocks: u32,
}

impl SideLayout {
    /// Words of a block with its number, which is how it is stored.
    pub(crate) fn stride(&self) -> usize {
        1 + self.block_words
    }

    /// Bytes of a stored block.
    pub(crate) fn stored_bytes(&self) -> usize {
        self.stride() * size_of::<u32>()
    }

    /// The number of the block that a key's hash selects.
    pub(crate) fn number_of(&self, hash: Hash) -> u32 {
        hash.home(self.blocks as usize) as u32
    }
}

/// A slab's number for a block that does not exist.
const NONE: u32 = u32::MAX;

/// See the module's text.
pub(crate) struct SideTable {
    layout: SideLayout,
    slab: Slab,
    /// The slab's row of each block, by the block's number. Empty before the first block.
    rows: Vec<u32>,
}

impl SideTable {
    /// An empty side table. `owner` distinguishes it from the other side tables in `memory`.
    pub(crate) fn new(memory: &Arc<Arena>, owner: u32, layout: SideLayout) -> Self {
        Self { layout, slab: Slab::new(memory, owner, layout.stride()), rows: Vec::new() }
    }

    /// The side table whose blocks a file holds. `None` if they do not fit together.
    pub(crate) fn adopt(memory: &Arc<Arena>, owner: u32, layout: SideLayout, found: Vec<FoundBlock>) -> Option<Self> {
        let slab = Slab::adopt(memory, owner, layout.stride(), found)?;
        let mut rows = vec![NONE; layout.blocks as usize];
        for (row, words) in slab.iter() {
            let place = rows.get_mut(words[0] as usize)?;
            if std::mem::replace(place, row) != NONE {
                return None;
            }
        }
        Some(Self { layout, slab, rows })
    }

    pub(crate) fn layout(&self) -> SideLayout {
        self.layout
    }

    /// Bytes of memory in use.
    pub(crate) fn bytes(&self) -> usize {
        size_of::<Self>() + self.slab.bytes() + self.rows.capacity() * size_of::<u32>()
    }

    /// The words of the block that a hash selects, if it exists.
    pub(crate) fn block(&self, hash: Hash) -> Option<&[u32]> {
        self.stored(self.layout.number_of(hash)).map(|words| &words[1..])
    }

    /// The words of each block that exists.
    pub(crate) fn blocks(&self) -> impl Iterator<Item = &[u32]> {
        self.slab.iter().map(|(_, words)| &words[1..])
    }

    /// A block as it is stored, with its number.
    pub(crate) fn stored(&self, number: u32) -> Option<&[u32]> {
        let row = *self.rows.get(number as usize)?;
        (row != NONE).then(|| self.slab.row(row))
    }

    /// Changes the block that a hash selects, and shows the log its words before the change.
    pub(crate) fn change<T>(
        &mut self,
        hash: Hash,
        log: &mut impl RowLog,
        change: impl FnOnce(&mut [u32]) -> T,
    ) -> Option<T> {
        let row = self.row_of(self.layout.number_of(hash))?;
        let words = self.slab.row_mut(row);
        log.changing(Part::Side, row, words);
        Some(change(&mut words[1..]))
    }

    /// Replaces a block by a stored one. `None` if its number is not one of this table.
    pub(crate) fn put(&mut self, stored: &[u32]) -> Option<()> {
        let row = self.row_of(stored[0])?;
        self.slab.row_mut(row).copy_from_slice(stored);
        Some(())
    }

    /// Restores a block's stored words from before a change that was not completed. `false` if
    /// there is no such block.
    pub(crate) fn put_back(&mut self, row: u32, words: &[u32]) -> bool {
        let is_live = self.slab.is_live(row);
        if is_live {
            self.slab.row_mut(row).copy_from_slice(words);
        }
        is_live
    }

    /// The slab's row of a block, which is made if it does not exist.
    fn row_of(&mut self, number: u32) -> Option<u32> {
        if self.rows.is_empty() {
            self.rows = vec![NONE; self.layout.blocks as usize];
        }
        let row = *self.rows.get(number as usize)?;
        if row != NONE {
            return Some(row);
        }
        let row = self.slab.allocate()?;
        let words = self.slab.row_mut(row);
        words.fill(0);
        words[0] = number;
        self.slab.publish(row);
        self.rows[number as usize] = row;
        Some(row)
    }

    /// A copy of the stored blocks that hold something, in no particular order.
    pub(crate) fn copy(&self) -> Vec<u32> {
        without_empty(self.slab.copy_rows(), self.layout)
    }

    /// See [`Slab::mark`].
    pub(crate) fn mark(&mut self) {
        self.slab.mark();
    }

    /// See [`Slab::freeze`].
    pub(crate) fn freeze(&mut self) {
        self.slab.freeze();
    }

    /// The stored blocks at the freeze; with `changes_only` those that had changed since the mark
    /// before, also if they hold nothing now.
    pub(crate) fn frozen(&mut self, changes_only: bool) -> Vec<u32> {
        let blocks = self.slab.frozen_rows(changes_only);
        if changes_only { blocks } else { without_empty(blocks, self.layout) }
    }

    /// See [`Slab::thaw`].
    pub(crate) fn thaw(&mut self, saved: bool) {
        self.slab.thaw(saved);
    }
}

/// The stored blocks that hold something.
fn without_empty(blocks: Vec<u32>, layout: SideLayout) -> Vec<u32> {
    let mut kept = Vec::with_capacity(blocks.len());
    for block in blocks.chunks_exact(layout.stride()) {
        if block[1..].iter().any(|&word| word != 0) {
            kept.extend_from_slice(block);
        }
    }
    kept
}

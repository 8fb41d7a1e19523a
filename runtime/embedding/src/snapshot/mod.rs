//! Slot snapshots: the bytes of one slot in a checkpoint. This module turns copied rows into bytes
//! and checked bytes into rows. It takes no lock and touches no store.
//!
//! All numbers are little-endian:
//!
//! ```text
//! offset  size
//!      0     8  "RECTSLOT"
//!      8     4  format version, 2
//!     12     4  slot
//!     16     4  slots of the job
//!     20     4  row groups, G
//!     24     8  seed of the initial values
//!     32     8  length of everything, checksum included
//!     40     4  kind: 0 all rows of the slot, 1 changes
//!     44     4  0
//!     48     …  the groups' records
//!      …        the removed keys of group 0, of group 1, …, each group's rising; none if all rows are
//!               given
//!      …        the rows of group 0, of group 1, …, each group's by rising key; a row is the words
//!               that it is in memory: key, the policy's word, values, optimizer state
//!      …        the side table's blocks of group 0, of group 1, …, each group's by rising number; a
//!               block is the words that it is in memory: number, contents
//!     −8     8  XXH3-64 of everything before it
//! ```
//!
//! The record of a group:
//!
//! ```text
//! offset  size
//!      0    12  dim u32, zero columns u32, value type u8, initializer u8, optimizer u8, row life u8
//!     12     8  the initializer's numbers, 2 × f32
//!     20    32  the optimizer's numbers, 4 × f64
//!     52    16  rows u64, removed keys u64
//!     68    40  unless the row life is 0: its settings 4 × u64, and blocks u64
//!      …    40  if bit 7 of the optimizer is set: the optimizer of the zero columns u64, and its
//!               numbers, 4 × f64
//! ```
//!
//! A row travels as one unit, so values and state are of the same instant. Equal contents give
//! equal bytes. The reader checks every number against the length before it uses it, and never
//! panics, whatever the bytes are.

mod read;
mod sort;
mod spec;
mod write;

use crate::key::key_of;
use crate::layout::RowLayout;
use crate::{FeatureKey, GroupId, Slot};

pub(crate) use read::{CheckedSnapshot, config_of, read};
pub(crate) use write::write;

const MAGIC: &[u8; 8] = b"RECTSLOT";
const VERSION: u32 = 2;
const HEADER_BYTES: usize = 48;
const CHECKSUM_BYTES: usize = 8;

/// The rows of a slot at one instant, as bytes to keep; see
/// [`Store::snapshot_slot`](crate::Store::snapshot_slot).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SlotSnapshot {
    slot: Slot,
    content: SlotContent,
    rows: u64,
    removed: u64,
    bytes: Vec<u8>,
}

/// Whether a snapshot stands alone.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum SlotContent {
    /// All rows of the slot.
    Whole,
    /// The rows that changed since an earlier snapshot, and the keys of removed rows.
    Changes,
}

impl SlotSnapshot {
    /// The slot whose rows these are.
    #[must_use]
    pub fn slot(&self) -> Slot {
        self.slot
    }

    /// Whether it holds the whole slot or changes.
    #[must_use]
    pub fn content(&self) -> SlotContent {
        self.content
    }

    /// Rows of all groups together.
    #[must_use]
    pub fn rows(&self) -> u64 {
        self.rows
    }

    /// Removed keys of all groups together; 0 for a whole slot.
    #[must_use]
    pub fn removed(&self) -> u64 {
        self.removed
    }

    /// The bytes, for a file or a message.
    #[must_use]
    pub fn as_bytes(&self) -> &[u8] {
        &self.bytes
    }

    /// The bytes, for a file or a message.
    #[must_use]
    pub fn into_bytes(self) -> Vec<u8> {
        self.bytes
    }
}

/// The contents of a restored snapshot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RestoredSlot {
    /// The slot that was restored.
    pub slot: Slot,
    /// Whether the slot was replaced or changed.
    pub content: SlotContent,
    /// Rows of all groups together.
    pub rows: u64,
    /// Removed keys of all groups together.
    pub removed: u64,
}

/// The rows of a slot copied out of its tables.
pub(crate) struct SlotRows {
    /// For each group its rows' words, in no particular order.
    pub(crate) groups: Vec<Vec<u32>>,
    /// For each group the stored blocks of its side table, in no particular order.
    pub(crate) side: Vec<Vec<u32>>,
    /// For each group the keys that were removed, if the rows are changes. A key may repeat, and
    /// may have one of the rows.
    pub(crate) removed: Option<Vec<Vec<FeatureKey>>>,
}

impl SlotRows {
    /// No rows of this many groups.
    pub(crate) fn none(groups: usize) -> Self {
        Self { groups: vec![Vec::new(); groups], side: vec![Vec::new(); groups], removed: None }
    }

    /// The rows of all groups by rising (key, group).
    pub(crate) fn in_key_order<'r>(&'r self, layouts: &[RowLayout]) -> Vec<CopiedRow<'r>> {
        let mut ordered = Vec::new();
        for (position, (rows, layout)) in self.groups.iter().zip(layouts).enumerate() {
            let group = GroupId(position as u16);
            let rows = rows.chunks_exact(layout.stride());
            ordered.extend(rows.map(|words| CopiedRow { key: key_of(words), group, words }));
        }
        ordered.sort_unstable_by_key(|row| (row.key, row.group));
        ordered
    }
}

/// Stored blocks of a side table by rising number. `stride` is the words of a block with its
/// number.
pub(crate) fn blocks_in_order(blocks: &[u32], stride: usize) -> Vec<&[u32]> {
    let mut ordered: Vec<&[u32]> = blocks.chunks_exact(stride).collect();
    ordered.sort_unstable_by_key(|block| block[0]);
    ordered
}

/// One row of [`SlotRows`].
pub(crate) struct CopiedRow<'r> {
    pub(crate) key: FeatureKey,
    pub(crate) group: GroupId,
    pub(crate) words: &'r [u32],
}

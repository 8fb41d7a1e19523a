//! Everything the store can refuse. A refusal changes nothing: a call that returns an error has
//! touched no row.

use crate::{FeatureKey, GroupId, RowSpec, SaveId, SharedMemoryError, Slot, SpecError};
use thiserror::Error;

/// A call on a store that was refused.
#[derive(Debug, Error)]
pub enum StoreError {
    #[error("cannot make an embedding store: {0}")]
    Spec(#[from] SpecError),
    #[error("row group {group} does not exist: this store has {groups}; use the groups it was made with")]
    UnknownGroup { group: GroupId, groups: usize },
    #[error("slot {slot} does not exist: this store has {slots}; use the job's slot count everywhere")]
    UnknownSlot { slot: Slot, slots: u32 },
    #[error(
        "{what} of {keys} rows of row group {group} needs a buffer of {expected} values (rows x dim), \
         but got {actual}"
    )]
    BufferLength { what: &'static str, group: GroupId, keys: usize, expected: usize, actual: usize },
    #[error("an update was asked for with update count 0; counts start at 1 with the first update")]
    UpdateCountZero,
    #[error(
        "an update of {keys} rows of row group {group} came with the examples of {found} keys; give one item for each \
         key, or none"
    )]
    Examples { group: GroupId, keys: usize, found: usize },
    #[error("cannot restore a slot: {0}")]
    Snapshot(#[from] SnapshotError),
    #[error("the store is being saved already; complete or abandon that save first")]
    FrozenAlready,
    #[error(
        "the changes since save {since} are not known: the store tracks them from the first save that completes while \
         tracking is on; save everything instead"
    )]
    ChangesUnknown { since: SaveId },
    #[error(transparent)]
    SharedMemory(#[from] SharedMemoryError),
    #[error("slot {slot} was saved already in this save; each slot is saved once")]
    SavedAlready { slot: Slot },
}

/// Bytes that are not a snapshot this store can take.
#[derive(Debug, Error, PartialEq)]
pub enum SnapshotError {
    #[error("these {actual} bytes do not start with the magic of a slot snapshot; give a slot file of a checkpoint")]
    NotASnapshot { actual: usize },
    #[error("the snapshot has format version {found}, this program reads {supported}; use the program that wrote it")]
    Version { found: u32, supported: u32 },
    #[error("the snapshot has {actual} bytes, expected {expected}; it was truncated or extended, so take another copy")]
    Length { expected: u64, actual: u64 },
    #[error("the snapshot's checksum is {actual:#018x}, it was written with {expected:#018x}; take another copy")]
    Checksum { expected: u64, actual: u64 },
    #[error("the snapshot's {field} has the unknown value {found}; it was damaged or written by another program")]
    Field { field: &'static str, found: u64 },
    #[error(
        "the snapshot is of a job with {found} slots, this store has {expected}; use the slot count it was made with"
    )]
    Slots { found: u32, expected: u32 },
    #[error("the snapshot is of slot {slot}, which is not below its slot count {slots}")]
    Slot { slot: Slot, slots: u32 },
    #[error(
        "the snapshot's rows were initialized with seed {found}, this store has seed {expected}; use the same seed"
    )]
    Seed { found: u64, expected: u64 },
    #[error("the snapshot describes rows that no store can hold: {0}")]
    Config(#[from] SpecError),
    #[error("the snapshot has {found} row groups, this store has {expected}; use the features it was made with")]
    Groups { found: usize, expected: usize },
    #[error(
        "the snapshot's row group {group} was made with {found:?}, this store has {expected:?}; only the learning rate \
         may change (and not FTRL's)"
    )]
    Spec { group: GroupId, found: Box<RowSpec>, expected: Box<RowSpec> },
    #[error("the snapshot of slot {slot} holds key {key} in row group {group}, which belongs to another slot")]
    ForeignKey { slot: Slot, group: GroupId, key: FeatureKey },
    #[error(
        "key {key} of row group {group} is repeated or out of order in the snapshot; it was not written by this program"
    )]
    KeyOrder { group: GroupId, key: FeatureKey },
    #[error(
        "block {number} of the counters of row group {group} is not one that this program writes; take another copy of \
         the snapshot"
    )]
    Block { group: GroupId, number: u32 },
    #[error(
        "the snapshot holds {rows} rows in one row group of one slot, more than a table can number; use more slots"
    )]
    TooManyRows { rows: usize },
}

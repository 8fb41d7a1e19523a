//! The embedding store: a hash table from 64-bit feature keys to rows of embedding values with
//! their optimizer state.
//!
//! A [`Store`] is one process's share of a global table. It holds no socket, thread or clock: a
//! parameter server calls [`Store::lookup`] and [`Store::update`] from as many threads as it likes,
//! checkpoints call [`Store::freeze`], exports call [`Store::for_each_row`]. It does not
//! remove duplicate keys, pool embeddings, or decide which process holds which slot; its callers
//! do.
//!
//! ```text
//! Store
//!  ├─ groups     one RowSpec a GroupId: dim, value type, optimizer, initializer
//!  └─ slots      slot = floor(key · slots / 2^64): slots in order are keys in order
//!      └─ Slot   one lock
//!          └─ Table per group
//!              ├─ Index  open addressing in 64-byte buckets: tag bytes + row numbers
//!              └─ Slab   rows in chunks, addressed by number: key, meta, values, state
//! ```
//!
//! The cost of a batch:
//!
//! - One lock for each run of keys of the same slot. A batch sorted by key takes each slot's lock
//!   once.
//! - No allocation for a key.
//! - Memory reads that overlap: the store prefetches the buckets and rows of later keys while it
//!   works on earlier ones.
//!
//! Results are defined to the bit. Initial values are a pure function of (seed, key, column), and
//! optimizers use IEEE operations in a fixed order. Equal calls therefore give equal
//! [digests](Store::slot_digest) on every machine, for any number of threads and any order of keys.

#[cfg(target_endian = "big")]
compile_error!("rows and snapshots are little-endian in memory; big-endian targets are not supported");

mod arena;
mod block_file;
mod budget;
mod contents;
mod counts;
mod error;
mod frozen;
mod group;
mod index;
mod initial;
mod key;
mod layout;
mod life;
mod life_counts;
mod limits;
mod log;
mod moving;
mod optimizer;
mod pieces;
mod prefetch;
mod region;
mod row_update;
mod runs;
mod save_id;
mod saves;
mod shared;
mod shared_memory_error;
mod side_table;
mod simd;
mod slab;
mod slot;
mod slot_values;
mod snapshot;
mod spec;
mod spec_error;
mod store;
mod table;
mod trimming;

pub use budget::{Kept, RowBytes};
pub use contents::Digest;
pub use counts::{LookupCounts, Missing, UpdateCounts};
pub use error::{SnapshotError, StoreError};
pub use frozen::FrozenStore;
pub use key::{FeatureKey, GroupId, Slot, slot_of};
pub use life::{
    Admission, AdmitAfter, Examples, LeastCount, LifePolicy, Managed, Moment, Priority, RowTimes, RowUses, RowWord,
    ScoreRule, Seen,
};
pub use life_counts::LifeCounts;
pub use limits::{MAX_DIM, MAX_GROUPS, MAX_SLOTS};
pub use log::UpdateLog;
pub use rectrain_kinds::{Initializer, SparseOptimizer, ValueType};
pub use save_id::SaveId;
pub use saves::SaveScope;
pub use shared::Reopened;
pub use shared_memory_error::SharedMemoryError;
pub use slot_values::{GroupValues, SlotValues};
pub use snapshot::{RestoredSlot, SlotContent, SlotSnapshot};
pub use spec::{Budget, BudgetUnit, RowSpec, StoreConfig};
pub use spec_error::SpecError;
pub use store::{Store, StoreBytes};

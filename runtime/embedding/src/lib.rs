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
//! What a batch costs: one lock a run of keys of equal slot (sort the keys and it is one lock a
//! slot), no allocation a key, and memory reads that overlap, because what the keys ahead need is
//! asked for while others are worked on.
//!
//! Everything a row goes through is defined to the bit: initial values are a pure function of
//! (seed, key, column), optimizers use IEEE operations in a fixed order, and so equal calls give
//! equal [digests](Store::slot_digest) on every machine, whatever the threads and the order in which
//! keys arrived.

#[cfg(target_endian = "big")]
compile_error!("rows and snapshots are little-endian in memory; big-endian targets are not supported");

mod arena;
mod block_file;
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
mod log;
mod moving;
mod optimizer;
mod pieces;
mod prefetch;
mod region;
mod runs;
mod saves;
mod shared;
mod side_table;
mod simd;
mod slab;
mod slot;
mod snapshot;
mod spec;
mod store;
mod table;

pub use contents::Digest;
pub use counts::{LookupCounts, Missing, UpdateCounts};
pub use error::{SharedMemoryError, SnapshotError, SpecError, StoreError};
pub use frozen::FrozenStore;
pub use key::{FeatureKey, GroupId, Slot, slot_of};
pub use life::{AdmitAfter, LifePolicy, Moment, Sweep, Swept};
pub use log::UpdateLog;
pub use rectrain_kinds::{Initializer, SparseOptimizer, ValueType};
pub use saves::{SaveId, SaveScope};
pub use shared::Reopened;
pub use snapshot::{RestoredSlot, SlotContent, SlotSnapshot};
pub use spec::{MAX_DIM, MAX_GROUPS, MAX_SLOTS, RowSpec, StoreConfig};
pub use store::{Store, StoreBytes};

//! Limits of a store.

/// The most slots a store may be divided into.
pub const MAX_SLOTS: u32 = 1 << 20;
/// The largest embedding dimension of a row.
pub const MAX_DIM: usize = 1 << 16;
/// The most row groups of a store.
pub const MAX_GROUPS: usize = 1 << 16;

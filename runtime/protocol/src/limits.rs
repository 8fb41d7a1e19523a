//! Bounds that several roles rely on.

/// Batches that each dense worker may have pushed and not yet reported in a mode without a barrier.
/// Embedding workers keep as many pieces of each dense worker for its replacement.
pub const UNREPORTED: usize = 8;

/// Batches of an evaluation that a dense worker requests ahead of the one that it predicts.
pub const LOOK_AHEAD: usize = 4;

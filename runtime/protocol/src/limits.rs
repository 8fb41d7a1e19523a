//! Bounds that several roles rely on.

/// Batches that each dense worker may have pushed and not yet reported in a mode without a barrier.
/// Embedding workers keep as many pieces of each dense worker for its replacement.
pub const UNREPORTED: usize = 8;

/// As [`UNREPORTED`], for each thread of a dense worker if several threads train its replica
/// (`shadow`). A thread computes one batch, has pushed one, and may have one report on its way.
pub const UNREPORTED_OF_THREAD: usize = 3;

/// Batches of an evaluation that a dense worker requests ahead of the one that it predicts.
pub const LOOK_AHEAD: usize = 4;

/// The largest copy of the coordinator's journal, in bytes. The journal is larger while it holds
/// the predictions of a large test part. It is then not copied.
pub const MAX_JOURNAL_COPY_BYTES: usize = 16 << 20;

//! Progress of readers. A reader may pass over text for hours before the first requested row. The
//! counter lets its caller distinguish such a reader from one that hangs.

use std::sync::atomic::{AtomicU64, Ordering};

static PASSED: AtomicU64 = AtomicU64::new(0);

/// A number that rises while any reader of this process makes progress. It counts opened files,
/// bytes of text files, batches of Parquet rows, and synthetic rows, requested or not.
#[must_use]
pub fn passed() -> u64 {
    PASSED.load(Ordering::Relaxed)
}

pub(crate) fn pass(amount: u64) {
    PASSED.fetch_add(amount, Ordering::Relaxed);
}

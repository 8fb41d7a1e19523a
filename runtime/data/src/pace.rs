//! Whether readers get on. A reader may pass over hours of text before the first row that somebody wants; whoever waits for it can tell that
//! from one that hangs.

use std::sync::atomic::{AtomicU64, Ordering};

static PASSED: AtomicU64 = AtomicU64::new(0);

/// A number that rises while any reader of this process gets on: files that are opened, bytes of text files, batches of Parquet's rows and
/// rows that are drawn, whether wanted or not.
#[must_use]
pub fn passed() -> u64 {
    PASSED.load(Ordering::Relaxed)
}

pub(crate) fn pass(amount: u64) {
    PASSED.fetch_add(amount, Ordering::Relaxed);
}

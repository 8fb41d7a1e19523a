//! M, the number of local gradients in one global step (§4.1): M = B_s·N_s / B_a. The global batch
//! is then the same as in synchronous training, and so the learning rate and the optimizer need no
//! change. M is never rounded. If a local batch size does not divide the global batch, the error
//! names the nearest sizes that do. Called when a job is validated.

use std::num::NonZeroU32;

use serde::{Deserialize, Serialize};

/// The number of pairs (gradient, token) in one global step; at least 1.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct BufferSize(NonZeroU32);

/// The reason why no buffer has these sizes.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum BufferSizeError {
    /// A size of zero.
    #[error("{what} is 0; it must be at least 1")]
    Zero { what: &'static str },
    /// M would not be whole.
    #[error(
        "a global batch of {global} rows (synchronous local batch × workers) is not a whole number of local batches of {local} \
         rows: {remainder} rows would be left over in every step. Use a local batch of {below} or {above} rows, which divide it"
    )]
    NotWhole { global: u64, local: u64, remainder: u64, below: u64, above: u64 },
    /// The local batch alone exceeds a step.
    #[error(
        "a local batch of {local} rows is larger than the global batch of {global} rows, which one step must not exceed. Use a \
         local batch of at most {global} rows"
    )]
    LargerThanGlobal { global: u64, local: u64 },
    /// The number of gradients per step exceeds a `u32`.
    #[error(
        "a global batch of {global} rows in local batches of {local} rows is more than {} gradients a step",
        u32::MAX
    )]
    TooMany { global: u64, local: u64 },
    /// The gradients of a step do not fit in a server's memory.
    #[error(
        "a buffer of {gradients} gradients of {gradient_bytes} bytes each needs more than the {budget_bytes} bytes that the \
         parameter server may use for it. Use larger local batches, more parameter servers, or a larger budget"
    )]
    Memory { gradients: u32, gradient_bytes: u64, budget_bytes: u64 },
}

impl BufferSize {
    /// One gradient per step, for `async` and `hopBs`.
    pub const ONE: Self = Self(NonZeroU32::MIN);

    /// A buffer of `gradients` gradients.
    pub fn new(gradients: u32) -> Result<Self, BufferSizeError> {
        NonZeroU32::new(gradients).map(Self).ok_or(BufferSizeError::Zero { what: "the number of gradients in a step" })
    }

    /// M = `sync_batch` · `sync_workers` / `local_batch` (§4.1; batch sizes in rows).
    pub fn of_global_batch(sync_batch: u64, sync_workers: u32, local_batch: u64) -> Result<Self, BufferSizeError> {
        let sizes = [
            (sync_batch, "the synchronous local batch size"),
            (u64::from(sync_workers), "the number of synchronous workers"),
            (local_batch, "the asynchronous local batch size"),
        ];
        if let Some((_, what)) = sizes.into_iter().find(|(size, _)| *size == 0) {
            return Err(BufferSizeError::Zero { what });
        }
        let global = sync_batch
            .checked_mul(u64::from(sync_workers))
            .ok_or(BufferSizeError::TooMany { global: u64::MAX, local: local_batch })?;
        Self::of_rows(global, local_batch)
    }

    /// Checks that M gradients fit in `budget_bytes` of a server whose share of one gradient is
    /// `gradient_bytes`.
    pub fn within(self, gradient_bytes: u64, budget_bytes: u64) -> Result<Self, BufferSizeError> {
        match gradient_bytes.checked_mul(u64::from(self.get())) {
            Some(bytes) if bytes <= budget_bytes => Ok(self),
            _ => Err(BufferSizeError::Memory { gradients: self.get(), gradient_bytes, budget_bytes }),
        }
    }

    /// The number of gradients.
    #[must_use]
    pub fn get(self) -> u32 {
        self.0.get()
    }

    fn of_rows(global: u64, local: u64) -> Result<Self, BufferSizeError> {
        if local > global {
            return Err(BufferSizeError::LargerThanGlobal { global, local });
        }
        let remainder = global % local;
        if remainder != 0 {
            let (below, above) = divisors_around(global, local);
            return Err(BufferSizeError::NotWhole { global, local, remainder, below, above });
        }
        u32::try_from(global / local)
            .ok()
            .and_then(NonZeroU32::new)
            .map(Self)
            .ok_or(BufferSizeError::TooMany { global, local })
    }
}

/// The largest divisor of `n` that is at most `near`, and the smallest that is larger (`near` ≤
/// `n`). Without a larger divisor, the second is `n`.
fn divisors_around(n: u64, near: u64) -> (u64, u64) {
    let (mut below, mut above) = (1, n);
    let mut small = 1;
    while small <= n / small {
        if n.is_multiple_of(small) {
            for divisor in [small, n / small] {
                if divisor <= near {
                    below = below.max(divisor);
                } else {
                    above = above.min(divisor);
                }
            }
        }
        small += 1;
    }
    (below, above)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_nearest_divisors_are_named() {
        for n in 1..200u64 {
            for near in 1..=n {
                let (below, above) = divisors_around(n, near);
                let divisors: Vec<u64> = (1..=n).filter(|d| n % d == 0).collect();
                assert_eq!(below, *divisors.iter().rfind(|d| **d <= near).unwrap());
                assert_eq!(above, divisors.iter().copied().find(|d| *d > near).unwrap_or(n));
            }
        }
    }

    #[test]
    fn impossible_sizes_are_explained() {
        let text = BufferSize::of_global_batch(100, 8, 300).unwrap_err().to_string();
        assert!(text.contains("800 rows") && text.contains("200 or 400"), "{text}");
        assert!(matches!(BufferSize::of_global_batch(100, 8, 0), Err(BufferSizeError::Zero { .. })));
        assert!(matches!(BufferSize::of_global_batch(1, 8, 9), Err(BufferSizeError::LargerThanGlobal { .. })));
        assert!(matches!(BufferSize::of_global_batch(1 << 40, 8, 1), Err(BufferSizeError::TooMany { .. })));
        assert!(matches!(BufferSize::of_global_batch(u64::MAX, 2, 1), Err(BufferSizeError::TooMany { .. })));
        let m = BufferSize::of_global_batch(100, 8, 100).unwrap();
        assert_eq!(m.within(1 << 20, 8 << 20), Ok(m));
        assert!(matches!(m.within((1 << 20) + 1, 8 << 20), Err(BufferSizeError::Memory { .. })));
        assert!(matches!(m.within(u64::MAX, u64::MAX), Err(BufferSizeError::Memory { .. })));
    }
}

//! The cut of a batch into shards, and the threads that work on them.
//!
//! Burn's `flex` backend runs a graph on one thread (without its `rayon` feature). The tower
//! therefore gives each thread whole graphs over different samples. So element-wise layers scale
//! with the threads as well as matrix products. The cut depends only on the batch, never on the
//! threads. Results come back in the order of the shards, so sums over them have the same bits for
//! any number of threads.

use std::num::NonZeroUsize;
use std::ops::Range;
use std::sync::Arc;

use rayon::prelude::*;

use crate::DenseError;

/// Target number of shards: enough to keep eight threads busy.
const SHARDS: usize = 8;
/// Fewest and most samples of a shard. With fewer, a graph costs more than its arithmetic; with
/// more, activations leave the cache.
const SHARD_SAMPLES: [usize; 2] = [256, 1024];
/// Shards are a multiple of this many samples, except the last.
const SHARD_GRANULE: usize = 64;

/// The samples of each shard of a batch: a pure function of the batch's size.
pub(crate) fn shards(samples: usize) -> Vec<Range<usize>> {
    let [least, most] = SHARD_SAMPLES;
    let size = samples.div_ceil(SHARDS).next_multiple_of(SHARD_GRANULE).clamp(least, most);
    (0..samples).step_by(size).map(|start| start..samples.min(start + size)).collect()
}

/// A fixed set of threads. With one thread, all work runs on the caller's thread.
#[derive(Debug, Clone)]
pub(crate) struct Workers {
    pool: Option<Arc<rayon::ThreadPool>>,
    threads: usize,
}

impl Workers {
    /// Starts the threads; 0 means one for each core that this process may use.
    pub(crate) fn new(threads: usize) -> Result<Self, DenseError> {
        let threads = match threads {
            0 => std::thread::available_parallelism().map_or(1, NonZeroUsize::get),
            threads => threads,
        };
        let pool = (threads > 1)
            .then(|| {
                rayon::ThreadPoolBuilder::new()
                    .num_threads(threads)
                    .thread_name(|index| format!("dense-{index}"))
                    .build()
                    .map(Arc::new)
                    .map_err(|error| DenseError::Threads { threads, reason: error.to_string() })
            })
            .transpose()?;
        Ok(Self { pool, threads })
    }

    pub(crate) fn threads(&self) -> usize {
        self.threads
    }

    /// Applies `work` to each item; results are in the items' order.
    pub(crate) fn map<T: Send, R: Send>(&self, items: Vec<T>, work: impl Fn(T) -> R + Sync + Send) -> Vec<R> {
        match &self.pool {
            Some(pool) if items.len() > 1 => pool.install(|| items.into_par_iter().with_max_len(1).map(work).collect()),
            _ => items.into_iter().map(work).collect(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shards_cover_the_batch_in_order_without_gaps() {
        for samples in [0, 1, 255, 256, 257, 1000, 2048, 4096, 5000, 65_536] {
            let shards = shards(samples);
            let mut next = 0;
            for shard in &shards {
                assert_eq!(shard.start, next);
                assert!(!shard.is_empty() && shard.len() <= SHARD_SAMPLES[1]);
                next = shard.end;
            }
            assert_eq!(next, samples);
        }
        assert_eq!(shards(4096).len(), 8);
        assert!(shards(0).is_empty());
    }

    #[test]
    fn results_keep_the_order_of_their_items() {
        for threads in [1, 3] {
            let workers = Workers::new(threads).unwrap();
            let squares = workers.map((0..1000_u64).collect(), |value| value * value);
            assert!(squares.iter().zip(0..).all(|(&square, value)| square == value * value));
        }
    }
}

//! The order of rows in a shuffled chunk: the same on every machine and in every version.

use rectrain_random::SplitMix64;

/// The order of the rows of a chunk in an epoch: a permutation of `0..len` (Fisher and Yates) that
/// depends on the arguments only.
pub fn chunk_permutation(seed: u64, epoch: u64, chunk: u64, len: u32) -> Vec<u32> {
    let mut random = SplitMix64::of_words(&[seed, epoch, chunk]);
    let mut order: Vec<u32> = (0..len).collect();
    for last in (1..len).rev() {
        order.swap(last as usize, random.below(u64::from(last) + 1) as usize);
    }
    order
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_shuffle_is_a_permutation_by_seed_epoch_and_chunk() {
        for len in [0, 1, 2, 3, 1000] {
            let mut order = chunk_permutation(7, 0, 3, len);
            assert_eq!(order, chunk_permutation(7, 0, 3, len));
            order.sort_unstable();
            assert_eq!(order, (0..len).collect::<Vec<_>>());
        }
        let base = chunk_permutation(7, 0, 3, 1000);
        for other in [(8, 0, 3), (7, 1, 3), (7, 0, 4), (0, 7, 3), (3, 0, 7)] {
            assert_ne!(base, chunk_permutation(other.0, other.1, other.2, 1000));
        }
    }

    #[test]
    fn every_permutation_of_four_is_equally_likely() {
        let mut counts = std::collections::HashMap::new();
        for chunk in 0..24_000 {
            *counts.entry(chunk_permutation(1, 0, chunk, 4)).or_insert(0) += 1;
        }
        assert_eq!(counts.len(), 24);
        assert!(counts.values().all(|n| (850..1150).contains(n)), "{counts:?}");
    }
}

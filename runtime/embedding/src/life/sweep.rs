//! Sweeps: the removal of rows that their policy gives up, in bounded pieces.

use super::Moment;

/// The rows that a sweep removes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sweep {
    /// The present, by which rows expire.
    pub now: Moment,
    /// Rows with a score below this are evicted; 0 evicts none.
    pub floor: u16,
}

/// The outcome of a piece of a sweep.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Swept {
    /// The row number that the next piece starts from. `None` at the end of the table.
    pub next: Option<u32>,
    /// Rows removed because they had expired.
    pub expired: u64,
    /// Rows removed because their score was below the floor.
    pub evicted: u64,
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::group::{Group, GroupMemory};
    use crate::index::Hash;
    use crate::layout::META_WORD;
    use crate::life::{Numbers, Refusal, RowLife, Side, SightedKey};
    use crate::log::{NoLog, RowLog};
    use crate::optimizer::RowOptimizer;
    use crate::table::{GradientRun, KeyRun, Table};
    use crate::{FeatureKey, Missing, RowSpec, Slot, SpecError, StoreConfig};

    /// Kraken's row word, without decay: the time of the last update in the upper half, the number
    /// of updates in the lower half. A row expires after 10 units of time.
    #[derive(Clone, Copy)]
    struct Fading;

    impl RowLife for Fading {
        const SNAPSHOT_TAG: u8 = u8::MAX;
        const USES_ROW_WORD: bool = true;
        const REFUSAL: Refusal = Refusal::Missing;

        fn numbers(self) -> Numbers {
            [0; 4]
        }

        fn validate(self) -> Result<(), SpecError> {
            Ok(())
        }

        fn admits_at_look_up(self) -> bool {
            true
        }

        fn sighted(self, _sighted: SightedKey, _side: &mut Side<'_, impl RowLog>) -> Result<(), Refusal> {
            Err(Self::REFUSAL)
        }

        fn touched(self, word: &mut u32, now: Moment) {
            *word = (now.0 as u32) << 16 | ((*word & 0xffff) + 1);
        }

        fn is_expired(self, word: u32, now: Moment) -> bool {
            now.0 - u64::from(word >> 16) > 10
        }

        fn score(self, word: u32, _now: Moment) -> Option<u16> {
            Some(word as u16)
        }
    }

    struct Trained {
        group: Group,
        table: Table,
    }

    impl Trained {
        fn new() -> Self {
            let spec = RowSpec::plain(2);
            let config = StoreConfig { slots: 1, seed: 1, groups: vec![spec], budget: None };
            let group = Group::new(spec, &config, GroupMemory::default());
            let table = Table::new(&group, Slot(0));
            Self { group, table }
        }

        fn train(&mut self, keys: std::ops::Range<u64>, now: u64) {
            let keys: Vec<FeatureKey> = keys.map(FeatureKey).collect();
            let hashes: Vec<Hash> = keys.iter().copied().map(Hash::of).collect();
            let run = KeyRun { keys: &keys, hashes: &hashes };
            let mut values = vec![0.0; 2 * keys.len()];
            self.table.lookup(Fading, &self.group, run, Missing::Insert, &mut values);
            let step = self.group.spec.optimizer.step(1);
            let gradients = GradientRun { keys: run, gradients: &values, step, now: Moment(now) };
            let counts = self.table.update(Fading, &self.group, gradients, &mut [0.0; 2], &mut NoLog);
            assert_eq!(counts.applied, keys.len() as u64);
        }

        /// Sweeps the table in pieces of 7 rows; returns the numbers of expired and evicted rows.
        fn sweep(&mut self, now: u64, floor: u16) -> (u64, u64) {
            let (mut next, mut expired, mut evicted) = (Some(0), 0, 0);
            while let Some(from) = next {
                let before = self.table.rows() as u64;
                let swept = self.table.sweep(Fading, Sweep { now: Moment(now), floor }, from..from + 7, true);
                assert_eq!(before - self.table.rows() as u64, swept.expired + swept.evicted);
                assert!(swept.expired + swept.evicted <= 7 && swept.next.is_none_or(|next| next == from + 7));
                (next, expired, evicted) = (swept.next, expired + swept.expired, evicted + swept.evicted);
            }
            (expired, evicted)
        }

        fn has(&self, key: u64) -> bool {
            self.table.contains(FeatureKey(key))
        }
    }

    #[test]
    fn an_update_writes_the_rows_word_and_a_look_up_does_not() {
        let mut trained = Trained::new();
        trained.train(0..3, 5);
        trained.train(1..2, 9);
        let word = |key| trained.table.row_of(FeatureKey(key)).unwrap()[META_WORD];
        assert_eq!((word(0), word(1)), (5 << 16 | 1, 9 << 16 | 2));
    }

    #[test]
    fn a_sweep_in_pieces_removes_expired_rows_and_low_scores() {
        let mut trained = Trained::new();
        trained.train(0..50, 1);
        trained.train(0..40, 8);
        trained.train(0..20, 8);
        assert_eq!(trained.sweep(11, 0), (0, 0));
        assert_eq!(trained.sweep(12, 0), (10, 0), "10 rows were last updated at 1");
        assert!(trained.has(39) && !trained.has(40));
        assert_eq!(trained.sweep(12, 3), (0, 20), "rows of 2 updates");
        assert_eq!(trained.sweep(19, 9), (20, 0), "expired rows go first");
        assert_eq!(trained.table.rows(), 0);
    }

    #[test]
    fn removals_by_a_sweep_are_tombstones_and_their_memory_is_reused() {
        let mut trained = Trained::new();
        trained.train(0..100, 1);
        trained.table.mark();
        let bytes = trained.table.bytes();
        trained.train(0..60, 20);
        trained.table.freeze();
        assert_eq!(trained.sweep(20, 0), (40, 0));
        assert_eq!(trained.table.frozen_rows(true).len(), 60 * trained.group.layout.stride(), "as they were");
        trained.table.thaw(true);
        trained.table.freeze();
        let mut removed = trained.table.frozen_removed().to_vec();
        removed.sort_unstable();
        assert!(removed.into_iter().eq((60..100).map(FeatureKey)));
        trained.table.thaw(true);
        trained.train(200..240, 20);
        assert!(trained.table.bytes() <= bytes + 40 * size_of::<FeatureKey>());
    }
}

//! The life of a row: which keys get one, how it records its use, and when it is removed.
//!
//! A policy has a file here that implements [`RowLife`]. A row group names its policy with the
//! policy's settings ([`LifePolicy`] in [`RowSpec::life`](crate::RowSpec::life)):
//!
//! | policy | a key gets its row | the row's word | beside the rows | a row is removed |
//! |---|---|---|---|---|
//! | [`KeepAll`] | at its first training look-up | not used | nothing | never |
//! | [`AdmitAfter`] | at its `count`-th update | not used | counters of keys without a row | never |
//! | [`Managed`] | by its [`Admission`] | time and score | counters, if it counts | when it has expired, or over the budget |
//!
//! # Where a policy is asked
//!
//! | when | hook |
//! |---|---|
//! | a training look-up meets a key without a row | [`RowLife::admits_at_look_up`] |
//! | an update meets a key without a row | [`RowLife::sighted`], then [`RowLife::admitted`] if it gets one |
//! | an update changes a row | [`RowLife::touched`], with the row's word |
//! | a slot keeps its [budget](crate::budget) | [`RowLife::is_expired`] and [`RowLife::rank`] |
//! | the store opens its shared memory again | [`RowLife::reopened`] |
//!
//! Sightings are counted by updates and not by look-ups. A look-up may be repeated: by a retry, by
//! a replacement of a worker that died, and by each piece of a batch. An update of a step is
//! applied once, also after a kill ([`UpdateLog`](crate::UpdateLog)). So what a policy counts is a
//! function of the data alone, for any number of servers and workers. An evaluation admits no key
//! and scores no row.
//!
//! # State
//!
//! A policy has two places for state. Both are part of the slot's digest. Both follow the rows:
//! into snapshots of a whole slot and of changes, through a freeze, with a slot that moves, and
//! into shared memory.
//!
//! - *The row's word* ([`USES_ROW_WORD`](RowLife::USES_ROW_WORD)): 4 bytes that every row has, 0 in
//!   a new row. Kraken (§IV) keeps 16 bits of time and 16 bits of score there. The log of an update
//!   covers the word, so a killed update scores a row once.
//! - *The side table* ([`SideTable`](crate::side_table::SideTable)): blocks of words beside the
//!   rows of a (slot, group), for keys that have no row. A key's hash selects its block. Blocks are
//!   saved, moved, digested and logged whole, so the policy alone decides what they hold: exact
//!   counters, or the cells of a counting filter.
//!
//! # Cost
//!
//! The store selects the policy once a batch ([`with_life`]) and calls code that is generic over
//! it. A hook that a policy does not implement compiles to nothing.

mod admission;
mod admit_after;
mod clock;
mod keep_all;
mod least_count;
mod managed;
mod score;
mod seen;
mod uses;

use crate::index::Hash;
use crate::log::RowLog;
use crate::side_table::{SideLayout, SideTable};
use crate::{FeatureKey, SpecError};

pub use admission::Admission;
pub use admit_after::AdmitAfter;
pub(crate) use keep_all::KeepAll;
pub use least_count::LeastCount;
pub(crate) use managed::ManagedRows;
pub use managed::{Managed, Priority, ScoreRule};
pub(crate) use seen::Touch;
pub use seen::{Examples, Moment, Seen};
pub use uses::{RowTimes, RowUses, RowWord};

/// The policy of a row group, with its settings.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum LifePolicy {
    /// Every key that is trained gets a row and keeps it.
    #[default]
    KeepAll,
    /// A key gets its row at its n-th update.
    AdmitAfter(AdmitAfter),
    /// A table that admits, scores, expires and evicts.
    Managed(Managed),
}

/// Evaluates an expression with the policy that a [`LifePolicy`] names, as a value of its own type.
macro_rules! with_life {
    ($policy:expr, $life:ident => $value:expr) => {
        match $policy {
            $crate::LifePolicy::KeepAll => {
                let $life = $crate::life::KeepAll;
                $value
            }
            $crate::LifePolicy::AdmitAfter($life) => $value,
            $crate::LifePolicy::Managed(settings) => {
                let $life = settings.rows();
                $value
            }
        }
    };
}
pub(crate) use with_life;

/// A policy's settings as a snapshot holds them; those that it does not have are 0.
pub(crate) type Numbers = [u64; 4];

/// The reason why an update gives a key no row and drops its gradient.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Refusal {
    /// The policy admits no keys by updates: the key was never looked up, or its row was removed
    /// since.
    Missing,
    /// The policy has not admitted the key yet. To count it, `forgotten` sightings of other keys
    /// were dropped.
    TurnedAway { forgotten: u32 },
}

/// The rules of a row's life; see the module's text.
pub(crate) trait RowLife: Copy {
    /// Names the policy in snapshots. A tag is never given to another policy.
    const SNAPSHOT_TAG: u8;

    /// Whether the policy writes to the row's word. The digest then covers the word, and sweeps
    /// read it; a policy without it keeps every row.
    const USES_ROW_WORD: bool;

    /// The outcome for a key without a row in the part of an update that an earlier process
    /// completed.
    fn refusal(self) -> Refusal;

    /// The settings as a snapshot holds them.
    fn numbers(self) -> Numbers;

    /// Checks every setting against its range.
    fn validate(self) -> Result<(), SpecError>;

    /// The shape of a slot's side table, in a store of this many slots. `None` if the policy keeps
    /// nothing beside the rows.
    fn side_layout(self, _slots: u32) -> Option<SideLayout> {
        None
    }

    /// Whether a training look-up gives a row to a key that has none.
    fn admits_at_look_up(self) -> bool;

    /// An update has met a key without a row. `Ok` gives it one, to which its gradient is applied.
    /// A policy changes its side table through [`Side::change`] only, and only if it refuses.
    fn sighted(self, sighted: SightedKey, side: &mut Side<'_, impl RowLog>) -> Result<(), Refusal>;

    /// The key, which [`Self::sighted`] admitted, has its row. Forgets it in the side table.
    fn admitted(self, _sighted: SightedKey, _side: &mut Side<'_, impl RowLog>) {}

    /// An update is about to change the row of this word.
    #[inline(always)]
    fn touched(self, _word: &mut u32, _touch: Touch) {}

    /// Whether the row of this word has expired.
    fn is_expired(self, _word: u32, _now: Moment) -> bool {
        false
    }

    /// A moment before which the row of this word does not expire, unless an update changes it.
    fn due(self, _word: u32, _now: Moment) -> Moment {
        Moment(u64::MAX)
    }

    /// The place of the row of this word in an eviction. `None` for a row that is never evicted.
    fn rank(self, _word: u32, _now: Moment) -> Option<Rank> {
        None
    }

    /// Seconds since the last update of the row of this word.
    fn age_seconds(self, _word: u32, _now: Moment) -> u64 {
        0
    }

    /// Whether a block of a side table, without its number, is one that this policy can have
    /// written. `owns` returns whether a key belongs to the block's slot and number.
    fn is_block(self, _words: &[u32], _owns: impl Fn(FeatureKey) -> bool) -> bool {
        false
    }

    /// The side table was found in shared memory. A process that was killed between two steps of an
    /// admission leaves a key both with a row and in the side table; it must be forgotten there.
    fn reopened(self, _side: &mut SideTable, _has_row: impl Fn(FeatureKey) -> bool) {}
}

/// A key of an update, and the hash that selects its block.
#[derive(Clone, Copy)]
pub(crate) struct SightedKey {
    pub(crate) key: FeatureKey,
    pub(crate) hash: Hash,
    /// The seed of the store.
    pub(crate) seed: u64,
    /// The number of the update in the whole job.
    pub(crate) update: u64,
}

/// A row's place in an eviction: the lowest first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Rank {
    pub(crate) priority: Priority,
    pub(crate) value: u64,
}

/// A policy's access to the side table during an update.
pub(crate) struct Side<'a, L> {
    pub(crate) table: Option<&'a mut SideTable>,
    pub(crate) log: &'a mut L,
}

impl<L: RowLog> Side<'_, L> {
    /// The words of the key's block, without its number. `None` if the block holds nothing.
    fn read(&self, hash: Hash) -> Option<&[u32]> {
        self.table.as_ref()?.block(hash)
    }

    /// Changes the words of the key's block, which is made if it does not exist. The log sees the
    /// change, so that it is undone if the process is killed before the key is done.
    fn change<T>(&mut self, hash: Hash, change: impl FnOnce(&mut [u32]) -> T) -> Option<T> {
        self.table.as_mut()?.change(hash, self.log, change)
    }
}

impl LifePolicy {
    /// The policy with the settings made equal that may differ between two runs.
    pub(crate) fn without_changeable(self) -> Self {
        match self {
            Self::Managed(managed) => Self::Managed(managed.without_changeable()),
            other => other,
        }
    }

    pub(crate) fn validate(self) -> Result<(), SpecError> {
        with_life!(self, life => life.validate())
    }

    pub(crate) fn side_layout(self, slots: u32) -> Option<SideLayout> {
        with_life!(self, life => life.side_layout(slots))
    }

    pub(crate) fn uses_row_word(self) -> bool {
        fn uses<L: RowLife>(_life: L) -> bool {
            L::USES_ROW_WORD
        }
        with_life!(self, life => uses(life))
    }

    /// The policy's tag and settings in a snapshot.
    pub(crate) fn to_snapshot(self) -> (u8, Numbers) {
        fn tagged<L: RowLife>(life: L) -> (u8, Numbers) {
            (L::SNAPSHOT_TAG, life.numbers())
        }
        with_life!(self, life => tagged(life))
    }

    /// The policy of a snapshot. `None` if no policy has this tag and these settings.
    pub(crate) fn from_snapshot(tag: u8, numbers: Numbers) -> Option<Self> {
        match tag {
            KeepAll::SNAPSHOT_TAG => Some(Self::KeepAll),
            AdmitAfter::SNAPSHOT_TAG => AdmitAfter::from_numbers(numbers).map(Self::AdmitAfter),
            ManagedRows::SNAPSHOT_TAG => Managed::from_numbers(numbers).map(Self::Managed),
            _ => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_snapshot_distinguishes_all_policies() {
        let managed = Managed {
            admission: Admission::Always,
            expire_after: None,
            score: ScoreRule::Lfu,
            priority: Priority::Low,
        };
        let counting = Managed {
            admission: Admission::Count { count: 3, counters: 1 << 33 },
            expire_after: std::num::NonZeroU64::new(48 * 3_600),
            score: ScoreRule::Score { decay_per_day_millionths: 100_000, positive_weight_thousandths: 3_000 },
            priority: Priority::High,
        };
        let drawing = Managed { admission: Admission::Probability { per_2_32: u32::MAX }, ..counting };
        let policies = [
            LifePolicy::Managed(managed),
            LifePolicy::Managed(counting),
            LifePolicy::Managed(Managed { score: ScoreRule::Lru, ..drawing }),
            LifePolicy::KeepAll,
            LifePolicy::AdmitAfter(AdmitAfter { count: 3, counters: 1_000 }),
            LifePolicy::AdmitAfter(AdmitAfter { count: 2, counters: 1 << 33 }),
        ];
        for policy in policies {
            let (tag, numbers) = policy.to_snapshot();
            assert_eq!(LifePolicy::from_snapshot(tag, numbers), Some(policy));
            assert_eq!(tag == 0, policy == LifePolicy::KeepAll, "a tag of 0 has no settings in a snapshot");
        }
        assert_eq!(LifePolicy::from_snapshot(u8::MAX, [0; 4]), None);
    }
}

//! A table that manages itself. It admits keys by a rule, scores its rows by their examples, and
//! lets rows expire. When the store is over its budget, it gives up the rows of the lowest score.
//! This is Kraken's GSET (§III-A) with the row's 4 bytes of §IV.
//!
//! The row's word:
//!
//! ```text
//!         bits 31 … 16                        15 … 0
//! score   time of the last update, in units   score at that time, a small float
//! LFU     as above                            as above, without decay, all examples equal
//! LRU     ─────── time of the last update in seconds, or its number without a clock ───────
//! ```
//!
//! The score S of a row follows S ← (1−β)S for each day that passes, and S ← S + r·c⁺ + c⁻ with the
//! examples of each update. Kraken weighs new examples by β as well. That is a factor common to all
//! rows, which changes no order; without it, a score reads as a number of recent examples. Decay is
//! exact to one [unit](super::clock) of time. The coding error of the score is in
//! [`score`](super::score).
//!
//! A word of 0 is a row that a look-up made and no update has changed. It counts as one negative
//! example of the present, and does not expire.
//!
//! Every decision is a function of the word, the present moment, the key and the number of the
//! update. All numbers are integers or results of IEEE operations in a fixed order.

use super::admission::{Admission, is_drawn};
use super::clock::{Clock, power};
use super::score::{code_of, score_of};
use super::{AdmitAfter, Moment, Numbers, Rank, Refusal, RowLife, Side, SightedKey, Touch};
use crate::log::RowLog;
use crate::side_table::{SideLayout, SideTable};
use crate::{FeatureKey, SpecError};
use std::num::NonZeroU64;

/// The most of `positive_weight_thousandths`: a weight of 1,000.
const MOST_WEIGHT: u32 = 1_000_000;
/// The most of `expire_after`: 136 years.
const MOST_SECONDS: u64 = 1 << 32;

/// See the module's text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Managed {
    /// Which keys get a row.
    pub admission: Admission,
    /// Seconds of event time from a row's last update to its removal; at most 2³². Never early,
    /// less than a tenth late. Without a clock no row expires.
    pub expire_after: Option<NonZeroU64>,
    /// The order in which rows are evicted when the store is over its budget.
    pub score: ScoreRule,
    /// The class of the group's rows in an eviction.
    pub priority: Priority,
}

/// The order in which rows are evicted: the lowest first, and ties by key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ScoreRule {
    /// Kraken's feature score; see the module's text.
    Score {
        /// β a day: `0 ..= 999_999`.
        decay_per_day_millionths: u32,
        /// r, the weight of a positive example: `0 ..= 1_000_000`.
        positive_weight_thousandths: u32,
    },
    /// The least frequently used first: a score without decay in which all examples weigh 1.
    Lfu,
    /// The least recently updated first.
    Lru,
}

/// The class of rows in an eviction.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Priority {
    /// Evicted by score.
    Low,
    /// Evicted only when the slot has no rows of low priority left.
    High,
}

/// A [`Managed`] with the numbers that follow from it, made once a batch.
#[derive(Clone, Copy)]
pub(crate) struct ManagedRows {
    settings: Managed,
    clock: Clock,
    /// The age in units from which a row has expired.
    expiry: Option<u16>,
    /// What a score is multiplied by in one unit.
    factor: f64,
    positive_weight: f64,
}

impl Managed {
    pub(crate) fn rows(self) -> ManagedRows {
        let clock = Clock::new(self.expire_after);
        let (decay, weight) = match self.score {
            ScoreRule::Score { decay_per_day_millionths: decay, positive_weight_thousandths: weight } => {
                (f64::from(decay) / 1e6, f64::from(weight) / 1e3)
            }
            _ => (0.0, 1.0),
        };
        ManagedRows {
            settings: self,
            clock,
            expiry: self.expire_after.map(|span| clock.expiry(span)),
            factor: clock.factor(1.0 - decay),
            positive_weight: weight,
        }
    }

    /// The settings that may differ between two runs, made equal. Words and counters keep their
    /// meaning when these change.
    pub(crate) fn without_changeable(self) -> Self {
        Self { priority: Priority::Low, ..self }
    }

    pub(super) fn from_numbers([kinds, counters, expire_after, weights]: Numbers) -> Option<Self> {
        let [admission, rule, priority, 0, ..] = kinds.to_le_bytes() else { return None };
        Some(Self {
            admission: Admission::from_numbers(admission, (kinds >> 32) as u32, counters)?,
            expire_after: NonZeroU64::new(expire_after),
            score: match rule {
                0 => ScoreRule::Score {
                    decay_per_day_millionths: weights as u32,
                    positive_weight_thousandths: (weights >> 32) as u32,
                },
                1 => ScoreRule::Lfu,
                2 => ScoreRule::Lru,
                _ => return None,
            },
            priority: match priority {
                0 => Priority::Low,
                1 => Priority::High,
                _ => return None,
            },
        })
    }
}

impl ManagedRows {
    fn is_lru(&self) -> bool {
        self.settings.score == ScoreRule::Lru
    }

    /// Whether words hold a time and a score.
    pub(super) fn has_scores(&self) -> bool {
        !self.is_lru()
    }

    /// Units since the last update.
    fn units(&self, word: u32, now: Moment) -> u16 {
        self.clock.age((word >> 16) as u16, now)
    }

    /// The score at this moment.
    fn score_at(&self, word: u32, now: Moment) -> f64 {
        match word {
            0 => 1.0,
            _ => self.score_after(word, self.units(word, now)),
        }
    }

    /// The score of an updated row after this many units of time.
    #[inline]
    pub(super) fn score_after(&self, word: u32, units: u16) -> f64 {
        score_of(word as u16) * power(self.factor, units)
    }

    /// Units of time in whole seconds.
    pub(super) fn seconds(&self, units: u16) -> u64 {
        self.clock.seconds(units.into())
    }

    fn scored(&self, word: u32, touch: Touch) -> u32 {
        let Touch { key, update, now, examples } = touch;
        let earlier = if word == 0 { 0.0 } else { self.score_at(word, now) };
        let added = f64::from(examples.positive) * self.positive_weight + f64::from(examples.negative);
        let chance = || rectrain_random::mix(key.0 ^ rectrain_random::mix(update));
        let code = code_of(earlier + added, chance);
        let time = if word == 0 { self.clock.time(now) } else { self.clock.later((word >> 16) as u16, now) };
        u32::from(time) << 16 | u32::from(code)
    }
}

/// The word of a row under LRU.
fn recency(Touch { update, now, .. }: Touch) -> u32 {
    let order = if now.0 == 0 { update } else { now.0 };
    u32::try_from(order).unwrap_or(u32::MAX)
}

impl RowLife for ManagedRows {
    const SNAPSHOT_TAG: u8 = 2;
    const USES_ROW_WORD: bool = true;

    fn refusal(self) -> Refusal {
        self.settings.admission.refusal()
    }

    /// Admission, score rule and priority, a byte each; the admission's number in the upper half.
    fn numbers(self) -> Numbers {
        let (admission, number, counters) = self.settings.admission.numbers();
        let (rule, weights) = match self.settings.score {
            ScoreRule::Score { decay_per_day_millionths: decay, positive_weight_thousandths: weight } => {
                (0, u64::from(decay) | u64::from(weight) << 32)
            }
            ScoreRule::Lfu => (1, 0),
            ScoreRule::Lru => (2, 0),
        };
        let kinds = u64::from(u32::from_le_bytes([admission, rule, self.settings.priority as u8, 0]));
        let expire_after = self.settings.expire_after.map_or(0, NonZeroU64::get);
        [kinds | u64::from(number) << 32, counters, expire_after, weights]
    }

    fn validate(self) -> Result<(), SpecError> {
        let refused = |name, found, expected| Err(SpecError::Life { name, found, expected });
        if let ScoreRule::Score { decay_per_day_millionths: decay, positive_weight_thousandths: weight } =
            self.settings.score
        {
            if decay >= 1_000_000 {
                return refused("decay per day", decay.into(), "below 1000000 millionths");
            }
            if weight > MOST_WEIGHT {
                return refused("positive weight", weight.into(), "at most 1000000 thousandths");
            }
        }
        match self.settings.expire_after {
            Some(span) if span.get() > MOST_SECONDS => refused("expiry", span.get(), "at most 2^32 seconds"),
            _ => self.settings.admission.validate(),
        }
    }

    fn side_layout(self, slots: u32) -> Option<SideLayout> {
        self.settings.admission.counters()?.side_layout(slots)
    }

    #[inline(always)]
    fn admits_at_look_up(self) -> bool {
        self.settings.admission == Admission::Always
    }

    fn sighted(self, sighted: SightedKey, side: &mut Side<'_, impl RowLog>) -> Result<(), Refusal> {
        match self.settings.admission {
            Admission::Count { count, counters } => AdmitAfter { count, counters }.sighted(sighted, side),
            Admission::Probability { per_2_32 } if is_drawn(per_2_32, sighted) => Ok(()),
            _ => Err(self.refusal()),
        }
    }

    fn admitted(self, sighted: SightedKey, side: &mut Side<'_, impl RowLog>) {
        if let Some(counters) = self.settings.admission.counters() {
            counters.admitted(sighted, side);
        }
    }

    #[inline(always)]
    fn touched(self, word: &mut u32, touch: Touch) {
        *word = if self.is_lru() { recency(touch).max(*word) } else { self.scored(*word, touch) };
    }

    fn is_expired(self, word: u32, now: Moment) -> bool {
        let (Some(expiry), Some(span)) = (self.expiry, self.settings.expire_after) else { return false };
        if word == 0 || now.0 == 0 {
            return false;
        }
        match self.is_lru() {
            true => now.0.saturating_sub(word.into()) > span.get(),
            false => self.units(word, now) >= expiry,
        }
    }

    fn due(self, word: u32, now: Moment) -> Moment {
        let (Some(expiry), Some(span)) = (self.expiry, self.settings.expire_after) else { return Moment(u64::MAX) };
        Moment(match (word, self.is_lru()) {
            (0, _) => u64::MAX,
            (_, true) => u64::from(word).saturating_add(span.get()),
            (_, false) => self.clock.due(self.units(word, now), expiry, now),
        })
    }

    fn rank(self, word: u32, now: Moment) -> Option<Rank> {
        let value = match (word, self.is_lru()) {
            (0, true) => u32::try_from(now.0).ok().filter(|&now| now > 0).unwrap_or(u32::MAX).into(),
            (_, true) => word.into(),
            // The bits of doubles that are not negative compare as the doubles.
            (_, false) => self.score_at(word, now).to_bits(),
        };
        Some(Rank { priority: self.settings.priority, value })
    }

    fn age_seconds(self, word: u32, now: Moment) -> u64 {
        match (word, self.is_lru()) {
            (0, _) => 0,
            (_, true) => now.0.saturating_sub(word.into()),
            (_, false) => self.clock.seconds(self.units(word, now).into()),
        }
    }

    fn is_block(self, words: &[u32], owns: impl Fn(FeatureKey) -> bool) -> bool {
        self.settings.admission.counters().is_some_and(|counters| counters.is_block(words, owns))
    }

    fn reopened(self, side: &mut SideTable, has_row: impl Fn(FeatureKey) -> bool) {
        if let Some(counters) = self.settings.admission.counters() {
            counters.reopened(side, has_row);
        }
    }
}

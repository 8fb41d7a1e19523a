//! STUB of the contract.
#![allow(missing_docs, dead_code, clippy::missing_errors_doc, reason = "stub")]
use super::{Numbers, Refusal, RowLife, Side, SightedKey};
use crate::SpecError;
use crate::log::RowLog;
use std::num::NonZeroU64;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Managed { pub admission: Admission, pub expire_after: Option<NonZeroU64>, pub score: ScoreRule, pub priority: Priority }
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Admission { Always, Count { count: u32, counters: u64 }, Probability { per_2_32: u32 } }
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ScoreRule { Score { decay_per_day_millionths: u32, positive_weight_thousandths: u32 }, Lfu, Lru }
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Priority { Low, High }
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Examples { pub positive: u32, pub negative: u32 }
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BudgetUnit { Rows, Bytes }
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Budget { pub unit: BudgetUnit, pub limit: u64 }
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Kept { pub expired: u64, pub evicted: u64, pub youngest_evicted_seconds: Option<u64> }
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LifeCounts { pub admitted: u64, pub turned_away: u64, pub expired: u64, pub evicted: u64, pub gradients_dropped: u64 }
#[derive(Clone, Copy, Debug, Default)]
pub struct Seen<'e> { pub now: crate::Moment, pub examples: &'e [Examples] }

impl RowLife for Managed {
    const SNAPSHOT_TAG: u8 = 2;
    const USES_ROW_WORD: bool = false;
    const REFUSAL: Refusal = Refusal::Missing;
    fn numbers(self) -> Numbers { [0; 4] }
    fn validate(self) -> Result<(), SpecError> { Ok(()) }
    fn admits_at_look_up(self) -> bool { true }
    fn sighted(self, _sighted: SightedKey, _side: &mut Side<'_, impl RowLog>) -> Result<(), Refusal> { Err(Self::REFUSAL) }
}

//! One memory budget for all tables of a job. [`Store::keep_budget`] removes the rows that have
//! expired. Then it removes the rows of the lowest score while the slot is over its part.
//!
//! A slot has its own part of the budget: the limit divided by the number of slots, and 1 more for
//! the first slots if there is a remainder. So a slot decides alone, and a job decides the same on
//! any number of servers. Keys are hashes, so slots fill evenly. The part of a slot, and a share of
//! it, is at least one row. A budget of few rows a slot, fewer than about 30, evicts rows of some
//! slots that are worth more than rows of others.
//!
//! A slot that is over its part is trimmed to 31/32 of it, so that the work comes once for many new
//! rows. The order is:
//!
//! 1. Rows that have expired.
//! 2. Rows of a group that is over its [share](crate::RowSpec::share).
//! 3. Rows of any group whose policy evicts. Rows of low priority go first.
//!
//! Within 2 and 3, rows go by [`Rank`](crate::life::Rank), and ties by key and group. The outcome
//! is a function of the slot's contents and the present moment.
//!
//! # After a kill
//!
//! A slot that a killed process left between its limit and 31/32 looks like one that is within its
//! budget. So a store in shared memory [marks](crate::trimming) the slot that it trims. The process
//! that opens the memory trims that slot to the end. The rows that were to stay have the highest
//! ranks, so the second process removes exactly the rest.

use std::sync::atomic::Ordering;

use crate::layout::{HEADER_WORDS, RowLayout};
use crate::life::{LifePolicy, Moment, with_life};
use crate::slot::SlotState;
use crate::table::RankedRow;
use crate::trimming::Trimmed;
use crate::{Budget, BudgetUnit, GroupId, LifeCounts, RowSpec, Slot, Store, StoreError};

/// The rows that [`Store::keep_budget`] removed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Kept {
    /// Rows whose last update was too long ago.
    pub expired: u64,
    /// Rows removed for the budget or a share.
    pub evicted: u64,
    /// The shortest time from the last update of an evicted row to the present, to one unit of its
    /// clock. `None` if no row was evicted, or without a clock.
    pub youngest_evicted_seconds: Option<u64>,
}

/// Bytes of an index entry, counted against a budget in bytes.
const INDEX_BYTES: u64 = 10;

impl Budget {
    /// The part of one of `slots` slots.
    fn of_slot(self, slot: Slot, slots: u32) -> u64 {
        let slots = u64::from(slots);
        self.limit / slots + u64::from(u64::from(slot.0) < self.limit % slots)
    }

    /// The cost of a row.
    fn cost(self, layout: &RowLayout) -> u64 {
        match self.unit {
            BudgetUnit::Rows => 1,
            BudgetUnit::Bytes => RowBytes::of(layout).total(),
        }
    }
}

/// The bytes of memory of a row, as a budget in bytes counts them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RowBytes {
    /// The values.
    pub values: u64,
    /// The state of the optimizer.
    pub state: u64,
    /// The row's own: its key, the policy's word, and its index entry.
    pub own: u64,
}

impl RowBytes {
    fn of(layout: &RowLayout) -> Self {
        const WORD: usize = size_of::<u32>();
        let (all, header, look_up) = (layout.row_bytes(), HEADER_WORDS * WORD, layout.look_up_words() * WORD);
        Self { values: (look_up - header) as u64, state: (all - look_up) as u64, own: header as u64 + INDEX_BYTES }
    }

    /// All bytes.
    #[must_use]
    pub fn total(self) -> u64 {
        self.values + self.state + self.own
    }
}

impl RowSpec {
    /// The bytes of memory of a row of this group.
    #[must_use]
    pub fn row_bytes(&self) -> RowBytes {
        RowBytes::of(&RowLayout::new(self))
    }
}

/// The size to which rows over a limit are trimmed: 31/32 of it, rounded up.
fn trimmed_size(limit: u64) -> u64 {
    limit - limit / 32
}

impl Store {
    /// Removes the rows of a slot that have expired. If the slot is over its part of the budget, it
    /// also removes the rows of the lowest score, down to 31/32 of the part; see the [module's
    /// text](crate::budget). Rows of [`LifePolicy::KeepAll`] and [`LifePolicy::AdmitAfter`] count,
    /// but stay.
    ///
    /// Call it after the last gradient of a step for this slot, and before a look-up of the next
    /// step. If the process is killed meanwhile, the next one repeats the call.
    ///
    /// # Errors
    /// [`StoreError::UnknownSlot`].
    pub fn keep_budget(&self, slot: Slot, now: Moment) -> Result<Kept, StoreError> {
        self.keep_budget_through(slot, now, &mut || {})
    }

    /// Like [`Self::keep_budget`]. Calls `removing` before each change of memory.
    pub(crate) fn keep_budget_through(
        &self,
        slot: Slot,
        now: Moment,
        removing: &mut impl FnMut(),
    ) -> Result<Kept, StoreError> {
        if !self.removes_rows {
            self.cell(slot)?;
            return Ok(Kept::default());
        }
        let mut sweep = Sweep { store: self, slot, now, kept: Kept::default(), removing };
        let mut state = self.cell(slot)?.lock();
        sweep.expire(&mut state);
        sweep.trim_all(&mut state, None);
        Ok(sweep.kept)
    }

    /// Completes the trimming that a killed process left half-done.
    pub(crate) fn complete_trimming(&self) -> Result<(), StoreError> {
        for slot in (0..self.config.slots).map(Slot) {
            let Some((part, now)) = self.trimming.unfinished(slot) else { continue };
            let mut sweep = Sweep { store: self, slot, now, kept: Kept::default(), removing: &mut || {} };
            let mut state = self.cell(slot)?.lock();
            sweep.trim_all(&mut state, Some(part));
            self.trimming.finish(slot);
        }
        Ok(())
    }

    /// Changes the budget. The next [`Self::keep_budget`] of each slot keeps it.
    ///
    /// # Errors
    /// [`StoreError::Spec`] if the limit is 0.
    pub fn set_budget(&self, budget: Option<Budget>) -> Result<(), StoreError> {
        budget.map_or(Ok(()), Budget::validate)?;
        *self.budget.lock() = budget;
        Ok(())
    }

    /// The budget now.
    #[must_use]
    pub fn budget(&self) -> Option<Budget> {
        *self.budget.lock()
    }
}

/// The work of [`Store::keep_budget`] on one slot.
struct Sweep<'s, R> {
    store: &'s Store,
    slot: Slot,
    now: Moment,
    kept: Kept,
    removing: &'s mut R,
}

/// A row that may be evicted, in the order of eviction.
type Candidate = (RankedRow, GroupId);

impl<R: FnMut()> Sweep<'_, R> {
    fn expire(&mut self, state: &mut SlotState) {
        for (position, group) in self.store.groups.iter().enumerate() {
            let table = &mut state.tables[position];
            let expired = with_life!(group.spec.life, life => table.expired(life, self.now));
            for key in &expired {
                (self.removing)();
                table.remove(*key, self.store.tracking.load(Ordering::Relaxed));
                self.store.life_counts.add(position, LifeCounts { expired: 1, ..LifeCounts::default() });
            }
            self.kept.expired += expired.len() as u64;
        }
    }

    /// Trims each group that is over its share, and then the slot. The part `unfinished` is trimmed
    /// even if it is within its limit.
    fn trim_all(&mut self, state: &mut SlotState, unfinished: Option<Trimmed>) {
        let Some(budget) = self.store.budget() else { return };
        let one_row = self.store.layouts.iter().map(|layout| budget.cost(layout)).max().unwrap_or(0);
        let limit = budget.of_slot(self.slot, self.store.config.slots).max(one_row);
        for (position, group) in self.store.groups.iter().enumerate() {
            let Some(share) = group.spec.share else { continue };
            let limit = (u128::from(limit) * u128::from(share) / 1_000_000) as u64;
            let limit = limit.max(budget.cost(&group.layout));
            self.trim(state, budget, limit, Trimmed::Group(GroupId(position as u16)), unfinished);
        }
        self.trim(state, budget, limit, Trimmed::Slot, unfinished);
    }

    fn trim(&mut self, state: &mut SlotState, budget: Budget, limit: u64, part: Trimmed, unfinished: Option<Trimmed>) {
        let used = self.used(state, budget, part);
        let target = trimmed_size(limit);
        if used <= limit && (unfinished != Some(part) || used <= target) {
            return;
        }
        self.store.trimming.start(self.slot, part, self.now);
        self.evict(state, budget, used - target, part);
        (self.removing)();
        self.store.trimming.finish(self.slot);
    }

    /// The cost of the rows of a part.
    fn used(&self, state: &SlotState, budget: Budget, part: Trimmed) -> u64 {
        let tables = state.tables.iter().zip(&self.store.layouts).enumerate();
        let own = tables.filter(|(position, _)| part.covers(*position));
        own.map(|(_, (table, layout))| table.rows() as u64 * budget.cost(layout)).sum()
    }

    /// Evicts rows of a part, from the lowest rank, until `excess` is gone or no row is left.
    fn evict(&mut self, state: &mut SlotState, budget: Budget, excess: u64, part: Trimmed) {
        let cost = |group: GroupId| budget.cost(&self.store.layouts[usize::from(group.0)]);
        let mut candidates = self.candidates(state, part);
        let least = candidates.iter().map(|&(_, group)| cost(group)).min().unwrap_or(1);
        let most = usize::try_from(excess.div_ceil(least)).unwrap_or(usize::MAX);
        if most < candidates.len() {
            candidates.select_nth_unstable_by_key(most, order);
            candidates.truncate(most);
        }
        candidates.sort_unstable_by_key(order);
        let mut left = excess;
        for (row, group) in candidates {
            if left == 0 {
                break;
            }
            left = left.saturating_sub(cost(group));
            (self.removing)();
            self.evict_row(state, row, group);
        }
    }

    fn candidates(&self, state: &SlotState, part: Trimmed) -> Vec<Candidate> {
        let mut candidates = Vec::new();
        for (position, (table, group)) in state.tables.iter().zip(&self.store.groups).enumerate() {
            if part.covers(position) && group.spec.life.uses_row_word() {
                candidates.reserve(table.rows());
                let id = GroupId(position as u16);
                with_life!(group.spec.life, life => {
                    candidates.extend(table.ranked(life, self.now).map(|row| (row, id)));
                });
            }
        }
        candidates
    }

    fn evict_row(&mut self, state: &mut SlotState, row: RankedRow, group: GroupId) {
        let position = usize::from(group.0);
        state.tables[position].remove(row.key, self.store.tracking.load(Ordering::Relaxed));
        self.store.life_counts.add(position, LifeCounts { evicted: 1, ..LifeCounts::default() });
        self.kept.evicted += 1;
        if self.now != Moment(0) {
            let youngest = &mut self.kept.youngest_evicted_seconds;
            *youngest = Some(youngest.map_or(row.age_seconds, |earlier| earlier.min(row.age_seconds)));
        }
    }
}

/// The order of eviction.
fn order((row, group): &Candidate) -> (crate::life::Rank, crate::FeatureKey, GroupId) {
    (row.rank, row.key, *group)
}

/// Whether a policy removes rows.
pub(crate) fn removes_rows(life: LifePolicy) -> bool {
    life.uses_row_word()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{SparseOptimizer, ValueType};

    #[test]
    fn a_row_has_22_bytes_beyond_values_and_state() {
        let adam = SparseOptimizer::Adam { learning_rate: 0.1, beta1: 0.9, beta2: 0.999, epsilon: 1e-8 };
        let bytes = |value_type, optimizer| RowSpec { value_type, optimizer, ..RowSpec::plain(5) }.row_bytes();
        let sgd = SparseOptimizer::Sgd { learning_rate: 0.1 };
        assert_eq!(bytes(ValueType::F32, adam), RowBytes { values: 20, state: 40, own: 22 });
        // Five 16-bit values take three words.
        assert_eq!(bytes(ValueType::F16, sgd), RowBytes { values: 12, state: 0, own: 22 });
        assert_eq!(bytes(ValueType::F32, adam).total(), 82);
    }
}

//! The history of the rows of tables within a budget: rows admitted, expired and evicted, and
//! gradients dropped, by row group. The store counts. This module reports the counts as metrics and
//! to the coordinator.

use std::collections::BTreeSet;

use parking_lot::Mutex;
use rectrain_embedding::{FeatureKey, GroupId, Kept, LifeCounts, Moment, Slot, Store, slot_of};
use rectrain_proto::v1;
use rectrain_protocol::error::RoleError;
use rectrain_protocol::metrics::PsMetrics;
use rectrain_protocol::plan::JobPlan;
use rectrain_protocol::table_budget;

/// Rows updated less than this many seconds of event time ago are young. Their eviction means that
/// the budget is too small for the ids in use.
const YOUNG_SECONDS: u64 = 3_600;

/// See the module documentation.
pub(crate) struct TableLife {
    /// The names of the tables of each row group. Empty if every group keeps all its rows.
    names: Vec<String>,
    /// The counts that the metrics have, by row group.
    reported: Mutex<Vec<LifeCounts>>,
}

impl TableLife {
    /// The metrics begin at 0, whatever a killed process has counted in this store.
    pub(crate) fn new(plan: &JobPlan, store: &Store) -> Self {
        let names = if plan.has_managed_rows() { plan.group_names() } else { Vec::new() };
        Self { names, reported: Mutex::new(store.life_counts()) }
    }

    /// Updates the metrics to the counts of the store.
    pub(crate) fn report(&self, store: &Store, metrics: &PsMetrics) {
        if self.names.is_empty() {
            return;
        }
        let budget = store.budget().map(table_budget::write).unwrap_or_default();
        metrics.budget_rows.set(budget.rows as i64);
        metrics.budget_bytes.set(budget.bytes as i64);
        let mut reported = self.reported.lock();
        for (group, (now, before)) in store.life_counts().into_iter().zip(reported.iter_mut()).enumerate() {
            let table = &self.names[group];
            metrics.admitted.inc_by(table, now.admitted.saturating_sub(before.admitted));
            metrics.turned_away.inc_by(table, now.turned_away.saturating_sub(before.turned_away));
            metrics.expired.inc_by(table, now.expired.saturating_sub(before.expired));
            metrics.evicted.inc_by(table, now.evicted.saturating_sub(before.evicted));
            metrics.dropped_gradients.inc_by(table, now.gradients_dropped.saturating_sub(before.gradients_dropped));
            // The store knows every group that the plan has.
            metrics.table_rows.set(table, store.group_rows(GroupId(group as u16)).unwrap_or(0) as i64);
            *before = now;
        }
    }

    /// The counts that the coordinator does not have yet.
    pub(crate) fn since_taken(store: &Store) -> v1::TableCounts {
        totals(&store.life_counts_since_taken())
    }

    /// Returns the counts that the coordinator does not have yet, and notes that it has them.
    pub(crate) fn take(store: &Store) -> v1::TableCounts {
        totals(&store.take_life_counts())
    }

    /// Notes the rows that a slot lost at `now`. Without a clock, no row has an age.
    pub(crate) fn note(kept: &Kept, now: Moment, metrics: &PsMetrics) {
        if now != Moment::default() && kept.youngest_evicted_seconds.is_some_and(|age| age < YOUNG_SECONDS) {
            metrics.young_evictions.inc();
        }
    }
}

/// Changes the budget of the store. Each slot keeps it from its next step on.
pub(crate) fn set_budget(store: &Store, budget: v1::TableBudget) -> Result<(), RoleError> {
    let reason = || "a budget is a number of rows or of bytes".to_owned();
    let budget = table_budget::read(budget);
    let budget = budget.ok_or_else(|| RoleError::Inconsistent { message: "set_budget", reason: reason() })?;
    Ok(store.set_budget(Some(budget))?)
}

/// The counts of all row groups together, for the coordinator.
pub(crate) fn totals(by_group: &[LifeCounts]) -> v1::TableCounts {
    let mut totals = v1::TableCounts::default();
    for counts in by_group {
        totals.admitted += counts.admitted;
        totals.turned_away += counts.turned_away;
        totals.expired += counts.expired;
        totals.evicted += counts.evicted;
        totals.gradients_dropped += counts.gradients_dropped;
    }
    totals
}

/// The slots that a step has updated, in order.
#[derive(Default)]
pub(crate) struct Touched(BTreeSet<Slot>);

impl Touched {
    /// Adds the slots of `keys`, which ascend.
    pub(crate) fn add(&mut self, keys: &[FeatureKey], slots: u32) {
        let mut rest = keys;
        while let Some(first) = rest.first() {
            let slot = slot_of(*first, slots);
            self.0.insert(slot);
            rest = &rest[rest.partition_point(|key| slot_of(*key, slots) == slot)..];
        }
    }

    pub(crate) fn slots(&self) -> impl Iterator<Item = Slot> + '_ {
        self.0.iter().copied()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_slots_of_all_groups_are_touched_once() {
        let mut touched = Touched::default();
        let keys = |keys: &[u64]| -> Vec<FeatureKey> { keys.iter().map(|key| FeatureKey(key << 62)).collect() };
        touched.add(&keys(&[0, 0, 2]), 4);
        touched.add(&keys(&[2, 3]), 4);
        touched.add(&[], 4);
        assert_eq!(touched.slots().collect::<Vec<_>>(), [Slot(0), Slot(2), Slot(3)]);
    }
}

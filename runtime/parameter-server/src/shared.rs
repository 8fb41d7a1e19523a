//! The parts of a parameter server that every request needs: its rows, its partition of the dense
//! parameters, and its durable state.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use parking_lot::{RwLock, RwLockReadGuard, RwLockWriteGuard};
use rectrain_embedding::{
    Examples, FeatureKey, GroupId, LookupCounts, Missing, Moment, Store, UpdateCounts, UpdateLog,
};
use rectrain_modes::GlobalStep;
use rectrain_proto::v1;
use rectrain_protocol::error::RoleError;
use rectrain_protocol::metrics::PsMetrics;
use rectrain_protocol::plan::JobPlan;

use crate::first_layers::FirstLayers;
use crate::kept::Kept;
use crate::partition::Partition;
use crate::slots::Slots;
use crate::table_life::{TableLife, Touched};

/// See the module documentation.
pub(crate) struct Shared {
    pub(crate) plan: Arc<JobPlan>,
    pub(crate) store: Arc<Store>,
    pub(crate) slots: Arc<Slots>,
    pub(crate) partition: RwLock<Partition>,
    /// In `des`, for a model with a tower.
    pub(crate) first_layers: FirstLayers,
    /// The global step before which the state of the dense optimizer began.
    pub(crate) dense_since: AtomicU64,
    /// `None` if the rows end with the process.
    pub(crate) kept: Option<Arc<Kept>>,
    pub(crate) life: TableLife,
    pub(crate) metrics: PsMetrics,
}

impl Shared {
    /// The number of columns of the rows, by group.
    pub(crate) fn group_dims(&self) -> &[usize] {
        &self.plan.layout.group_dims
    }

    pub(crate) fn tracked_store(&self) -> TrackedStore<'_> {
        let removes_rows = self.plan.removes_rows();
        TrackedStore { store: &self.store, slots: &self.slots, metrics: &self.metrics, removes_rows }
    }

    pub(crate) fn read_partition(&self) -> RwLockReadGuard<'_, Partition> {
        self.partition.read()
    }

    pub(crate) fn write_partition(&self) -> RwLockWriteGuard<'_, Partition> {
        self.partition.write()
    }

    /// The global step before which the state of the dense optimizer began.
    pub(crate) fn dense_since(&self) -> GlobalStep {
        GlobalStep(self.dense_since.load(Ordering::Acquire))
    }

    /// A mode begins. The coordinator says since when the dense optimizer's state exists.
    pub(crate) fn set_dense_since(&self, step: u64) {
        self.dense_since.store(step, Ordering::Release);
    }

    /// Disables the durable state if shared memory is full.
    pub(crate) fn give_up_where_memory_is_full(&self) {
        if let Some(kept) = &self.kept
            && self.store.is_shared_memory_full()
        {
            kept.give_up(&"it is full");
        }
    }

    /// The bytes that the store uses, payload and overhead. Freed memory is not counted: new rows
    /// use it before the store allocates more.
    pub(crate) fn bytes(&self) -> u64 {
        let bytes = self.store.bytes();
        bytes.payload + bytes.overhead
    }

    /// The progress of the long work, and the size of the tables as the metrics have it. Waits for
    /// no lock.
    pub(crate) fn work(&self) -> v1::Work {
        let size = |gauge: i64| u64::try_from(gauge).unwrap_or(0);
        let (rows, bytes) = (size(self.metrics.rows_held.get()), size(self.metrics.bytes.get()));
        let tables = v1::TableSize { rows, bytes };
        let metrics = &self.metrics;
        v1::Work {
            done: self.store.work_done(),
            look_ups: metrics.lookup.get_sample_count(),
            rows: metrics.found_rows.get() + metrics.inserted_rows.get() + metrics.initial_rows.get(),
            seconds: metrics.lookup.get_sample_sum() + metrics.update_time.get_sample_sum(),
            tables: Some(tables),
        }
    }

    pub(crate) fn count_store(&self) {
        self.metrics.rows_held.set(self.store.rows() as i64);
        self.metrics.bytes.set(self.bytes() as i64);
        self.life.report(&self.store, &self.metrics);
    }
}

/// The gradients of a row group, summed over the pieces of a step.
pub(crate) struct GroupUpdate<'g> {
    pub(crate) group: GroupId,
    /// In ascending order, without duplicates.
    pub(crate) keys: &'g [FeatureKey],
    /// `[keys, row dim]`.
    pub(crate) gradients: &'g [f32],
    /// Of each key. Empty if the group's policy needs none.
    pub(crate) examples: &'g [Examples],
    pub(crate) step: GlobalStep,
    /// The latest event time of the step.
    pub(crate) now: Moment,
}

/// The store, with a record of the rows that change while their slot moves.
pub(crate) struct TrackedStore<'s> {
    store: &'s Store,
    slots: &'s Slots,
    metrics: &'s PsMetrics,
    /// Whether rows expire or are evicted.
    removes_rows: bool,
}

impl TrackedStore<'_> {
    pub(crate) fn look_up(
        &self,
        group: GroupId,
        keys: &[FeatureKey],
        missing: Missing,
        out: &mut [f32],
    ) -> Result<LookupCounts, RoleError> {
        let counts = self.store.lookup(group, keys, missing, out)?;
        if counts.inserted > 0 {
            self.slots.changed(group, keys);
        }
        Ok(counts)
    }

    /// Reads rows for an evaluation, and makes none. Returns the positions of the keys without a
    /// row.
    pub(crate) fn read(&self, group: GroupId, keys: &[FeatureKey], out: &mut [f32]) -> Result<Vec<usize>, RoleError> {
        Ok(self.store.read(group, keys, out)?)
    }

    /// Applies gradients. The optimizers count updates from 1. With a `log`, a replacement of this
    /// process continues after the last updated row.
    pub(crate) fn update(
        &self,
        update: &GroupUpdate<'_>,
        log: Option<&mut UpdateLog>,
    ) -> Result<UpdateCounts, RoleError> {
        let GroupUpdate { group, keys, gradients, examples, step, now } = *update;
        let seen = rectrain_embedding::Seen { now, examples };
        let counts = match log {
            Some(log) => self.store.update_seen_logged(group, keys, gradients, step.0 + 1, seen, log)?,
            None => self.store.update_seen(group, keys, gradients, step.0 + 1, seen)?,
        };
        self.slots.changed(group, keys);
        Ok(counts)
    }

    /// The number of slots of the job.
    pub(crate) fn slot_count(&self) -> u32 {
        self.store.config().slots
    }

    /// Removes the expired rows, and those beyond the budget, from the slots of `keys`, which a
    /// step has updated. This is a part of applying the step: a replacement of this process repeats
    /// it, and it then removes the rest.
    ///
    /// One slot is locked at a time. Requests for the others are served meanwhile.
    pub(crate) fn keep_budget(&self, touched: &Touched, now: Moment) -> Result<(), RoleError> {
        if !self.removes_rows {
            return Ok(());
        }
        for slot in touched.slots() {
            TableLife::note(&self.slots.keep_budget(slot, now)?, now, self.metrics);
        }
        Ok(())
    }
}

/// Wraps each key in its type.
pub(crate) fn as_keys(keys: Vec<u64>) -> Vec<FeatureKey> {
    keys.into_iter().map(FeatureKey).collect()
}

//! All metrics of the roles: durations as histograms, counts as counters, each with a `replica`
//! label. Each process has one registry.

use std::collections::BTreeMap;

use prometheus::{
    Gauge, GaugeVec, Histogram, HistogramOpts, HistogramVec, IntCounter, IntCounterVec, IntGauge, IntGaugeVec, Opts,
    Registry, TextEncoder,
};
use rectrain_kinds::Role;
use rectrain_proto::metric_names;

use crate::error::RoleError;
use crate::events::{FollowedFiles, LostRecords, StreamLag, WindowQuality};
use crate::token_counts::TokenCounts;

/// Buckets of times: 10 µs to 10 s, three a decade.
const SECONDS: &[f64] = &[
    1e-5, 2.5e-5, 5e-5, 1e-4, 2.5e-4, 5e-4, 1e-3, 2.5e-3, 5e-3, 1e-2, 2.5e-2, 5e-2, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0,
];

/// Buckets of staleness, in global steps.
const STEPS: &[f64] = &[0.0, 1.0, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0, 16.0, 32.0, 64.0, 128.0];

/// Gauges of one replica, one for each sparse feature, with the label `feature`.
#[derive(Clone)]
pub struct FeatureShares {
    family: GaugeVec,
    replica: String,
}

impl FeatureShares {
    /// Sets the share of each feature, from 0 to 1. A feature without a share keeps its last one.
    pub fn set(&self, shares: &BTreeMap<String, f64>) {
        for (feature, share) in shares {
            self.family.with_label_values(&[self.replica.as_str(), feature.as_str()]).set(*share);
        }
    }
}

/// Counters of one replica, one for each row group, with the label `table`.
#[derive(Clone)]
pub struct TableCounters {
    family: IntCounterVec,
    replica: String,
}

impl TableCounters {
    /// Adds to the counter of a row group, which its tables name.
    pub fn inc_by(&self, table: &str, count: u64) {
        self.family.with_label_values(&[self.replica.as_str(), table]).inc_by(count);
    }
}

/// Gauges of one replica, one for each partition, with the labels `topic` and `partition`.
#[derive(Clone)]
pub struct PartitionGauges {
    family: IntGaugeVec,
    replica: String,
}

impl PartitionGauges {
    /// Sets the gauge of a partition.
    pub fn set(&self, topic: &str, partition: u32, value: i64) {
        self.family.with_label_values(&[self.replica.as_str(), topic, &partition.to_string()]).set(value);
    }
}

/// Gauges of one replica, one for each row group, with the label `table`.
#[derive(Clone)]
pub struct TableGauges {
    family: IntGaugeVec,
    replica: String,
}

impl TableGauges {
    /// Sets the gauge of a row group, which its tables name.
    pub fn set(&self, table: &str, value: i64) {
        self.family.with_label_values(&[self.replica.as_str(), table]).set(value);
    }
}

macro_rules! metrics {
    ($($(#[$doc:meta])* $owner:ident { $($field:ident: $kind:ident = $name:expr, $help:literal;)* })*) => {
        $(
            $(#[$doc])*
            #[derive(Clone)]
            pub struct $owner { $(#[doc = $help] pub $field: metrics!(@single $kind),)* }
        )*

        /// All metrics of the roles, registered once in a process's registry.
        #[derive(Clone)]
        pub struct RoleMetrics { registry: Registry, $($($field: metrics!(@family $kind),)*)* }

        impl RoleMetrics {
            /// Registers every metric.
            pub fn new(registry: Registry) -> Result<Self, RoleError> {
                $($(
                    let $field = metrics!(@new $kind, $name, $help).map_err(metrics_error)?;
                    registry.register(Box::new($field.clone())).map_err(metrics_error)?;
                )*)*
                Ok(Self { registry, $($($field,)*)* })
            }
        }

        $(
            impl $owner {
                /// The metrics of one replica.
                #[must_use]
                pub fn of(all: &RoleMetrics, replica: u32) -> Self {
                    let replica = replica.to_string();
                    Self { $($field: metrics!(@of $kind, all.$field, replica),)* }
                }
            }
        )*

        /// Name, kind and help of every metric of the roles, for the reference.
        pub const REFERENCE: &[(&str, &str, &str)] = &[$($(($name, stringify!($kind), $help),)*)*];
    };
    (@single seconds) => { Histogram };
    (@single steps) => { Histogram };
    (@single counter) => { IntCounter };
    (@single gauge) => { IntGauge };
    (@single age) => { Gauge };
    (@single ratio) => { Gauge };
    (@single shares) => { FeatureShares };
    (@single table_counter) => { TableCounters };
    (@single table_gauge) => { TableGauges };
    (@single partition_gauge) => { PartitionGauges };
    (@family seconds) => { HistogramVec };
    (@family steps) => { HistogramVec };
    (@family counter) => { IntCounterVec };
    (@family gauge) => { IntGaugeVec };
    (@family age) => { GaugeVec };
    (@family ratio) => { GaugeVec };
    (@family shares) => { GaugeVec };
    (@family table_counter) => { IntCounterVec };
    (@family table_gauge) => { IntGaugeVec };
    (@family partition_gauge) => { IntGaugeVec };
    (@of shares, $family:expr, $replica:expr) => { FeatureShares { family: $family.clone(), replica: $replica.clone() } };
    (@of table_counter, $family:expr, $replica:expr) => { TableCounters { family: $family.clone(), replica: $replica.clone() } };
    (@of table_gauge, $family:expr, $replica:expr) => { TableGauges { family: $family.clone(), replica: $replica.clone() } };
    (@of partition_gauge, $family:expr, $replica:expr) => { PartitionGauges { family: $family.clone(), replica: $replica.clone() } };
    (@of $kind:ident, $family:expr, $replica:expr) => { $family.with_label_values(&[$replica.as_str()]) };
    (@new seconds, $name:expr, $help:literal) => {
        HistogramVec::new(HistogramOpts::new($name, $help).buckets(SECONDS.to_vec()), &["replica"])
    };
    (@new steps, $name:expr, $help:literal) => {
        HistogramVec::new(HistogramOpts::new($name, $help).buckets(STEPS.to_vec()), &["replica"])
    };
    (@new counter, $name:expr, $help:literal) => { IntCounterVec::new(Opts::new($name, $help), &["replica"]) };
    (@new gauge, $name:expr, $help:literal) => { IntGaugeVec::new(Opts::new($name, $help), &["replica"]) };
    (@new age, $name:expr, $help:literal) => { GaugeVec::new(Opts::new($name, $help), &["replica"]) };
    (@new ratio, $name:expr, $help:literal) => { GaugeVec::new(Opts::new($name, $help), &["replica"]) };
    (@new table_counter, $name:expr, $help:literal) => {
        IntCounterVec::new(Opts::new($name, $help), &["replica", "table"])
    };
    (@new table_gauge, $name:expr, $help:literal) => { IntGaugeVec::new(Opts::new($name, $help), &["replica", "table"]) };
    (@new partition_gauge, $name:expr, $help:literal) => {
        IntGaugeVec::new(Opts::new($name, $help), &["replica", "topic", "partition"])
    };
    (@new shares, $name:expr, $help:literal) => { GaugeVec::new(Opts::new($name, $help), &["replica", "feature"]) };
}

metrics! {
    /// Metrics of a loader.
    LoaderMetrics {
        read: seconds = metric_names::LOADER_READ_SECONDS, "Time to read and parse a chunk of data.";
        predict: seconds = metric_names::LOADER_PREDICT_SECONDS, "Time in which the frozen model predicted a chunk of data (spec.training.quality.baseline).";
        send: seconds = "rectrain_loader_send_seconds", "Time until every dense worker has received a global batch. High values mean that training is the bottleneck.";
        accept: seconds = metric_names::LOADER_ACCEPT_SECONDS, "Time until the embedding workers have accepted a global batch, once its ids are prepared. High values mean that training is the bottleneck.";
        rows: counter = metric_names::LOADER_ROWS_TOTAL, "Rows read, including test data.";
        skipped_rows: counter = "rectrain_loader_skipped_rows_total", "Bad rows skipped because spec.data.badRows allows it.";
        baseline_rows: counter = "rectrain_loader_baseline_rows_total", "Rows that the frozen model has predicted (spec.training.quality.baseline).";
        baseline_failures: counter = "rectrain_loader_baseline_failures_total", "Times that the frozen model could not be loaded, or failed to predict. Training then goes on without it.";
        commit_failures: counter = "rectrain_loader_commit_failures_total", "Commits of offsets for a consumer group that failed. Training does not depend on them.";
        broker_errors: counter = "rectrain_loader_broker_errors_total", "Looks at the brokers of a stream, and listings of followed paths, that failed and are tried again. The loader trains what it has read meanwhile.";
    }
    /// Metrics of an embedding worker.
    EmbeddingWorkerMetrics {
        look_up: seconds = "rectrain_embedding_worker_lookup_seconds", "Time until all parameter servers have answered a batch's look-up, including the wait for earlier steps.";
        pool: seconds = "rectrain_embedding_worker_pool_seconds", "Time to pool a batch's rows.";
        update: seconds = "rectrain_embedding_worker_update_seconds", "Time until all parameter servers have accepted a batch's gradients.";
        queue: seconds = metric_names::EMBEDDING_WORKER_QUEUE_SECONDS, "Time that work on a batch (preparing ids, pooling, scattering gradients) waited for a free core. High values mean too few embedding workers.";
        service: seconds = metric_names::EMBEDDING_WORKER_SERVICE_SECONDS, "Time that a core then spent on this work.";
        unique_ids: counter = "rectrain_embedding_worker_unique_ids_total", "Distinct ids, summed over all batches.";
        batches_in_flight: gauge = "rectrain_embedding_worker_batches_in_flight", "Batches whose ids have arrived and whose gradients have not.";
        pooled_groups: counter = "rectrain_embedding_worker_pooled_groups_total", "Tables of pieces that parameter servers pooled (spec.training.partialPooling: bySize).";
        saved_bytes: counter = "rectrain_embedding_worker_saved_bytes_total", "Bytes that these tables saved between embedding workers and parameter servers, by the formula of the decision.";
        missing_rows: counter = "rectrain_embedding_worker_missing_rows_total", "Gradients whose row no longer existed when they arrived.";
    }
    /// Metrics of a parameter server.
    PsMetrics {
        lookup: seconds = metric_names::PS_LOOKUP_SECONDS, "Time to look up a batch's rows.";
        gate_wait: seconds = "rectrain_ps_gate_wait_seconds", "Time that a look-up waited for earlier steps to be applied.";
        early_rows: counter = "rectrain_ps_early_rows_total", "Rows in `sync` that were read before an earlier step was applied, because no such step changes them.";
        deferred_rows: counter = "rectrain_ps_deferred_rows_total", "Rows in `sync` that waited for the update of an earlier step although they were looked up ahead.";
        update_time: seconds = metric_names::PS_UPDATE_SECONDS, "Time to sum and apply the gradients of a step.";
        found_rows: counter = metric_names::PS_FOUND_ROWS_TOTAL, "Rows looked up that existed.";
        inserted_rows: counter = metric_names::PS_INSERTED_ROWS_TOTAL, "Rows created because training saw their key for the first time.";
        initial_rows: counter = "rectrain_ps_initial_rows_total", "Rows read as their initial value because they did not exist: by an evaluation, or by training if their id is not admitted.";
        lost_rows: counter = "rectrain_ps_missing_rows_total", "Gradients dropped because their row no longer existed.";
        non_finite_rows: counter = "rectrain_ps_non_finite_rows_total", "Gradients dropped because they were not finite.";
        dense_staleness: steps = "rectrain_ps_dense_gradient_staleness_steps", "Staleness of dense gradients applied without a barrier: the step that applied a gradient minus the step at which its parameters were pulled.";
        token_staleness: steps = "rectrain_ps_token_staleness_steps", "Staleness of tokens: the step that applied a gradient minus its token. It decides whether gba excludes the gradient.";
        buffered_gradients: gauge = "rectrain_ps_buffered_gradients", "Gradients in the buffer. They are applied when it is full.";
        applied_gradients: counter = "rectrain_ps_applied_gradients_total", "Dense gradients applied without a barrier, with any weight.";
        excluded_gradients: counter = "rectrain_ps_excluded_gradients_total", "Dense gradients excluded for their staleness. They count as applied too.";
        late_gradients: counter = "rectrain_ps_late_gradients_total", "Dense gradients dropped because their step was already applied (hopBw).";
        exchanges: counter = "rectrain_ps_exchanges_total", "Replicas of dense workers that this server's copy has moved towards (shadow).";
        incomplete_rounds: counter = "rectrain_ps_incomplete_rounds_total", "Rounds of the mean of replicas that this server closed without a late or dead dense worker (shadow with ma or bmuf).";
        repeated_gradients: counter = "rectrain_ps_repeated_gradients_total", "Gradients with a barrier that arrived twice because an embedding worker died. They were applied once.";
        rows_held: gauge = "rectrain_ps_rows", "Rows in the embedding store of this server.";
        bytes: gauge = metric_names::PS_BYTES, "Bytes of the embedding store, including its index.";
        budget_rows: gauge = "rectrain_ps_budget_rows", "Rows that the tables of the whole job may have, by spec.features.memory.maxRows; 0 without such a budget.";
        budget_bytes: gauge = "rectrain_ps_budget_bytes", "Bytes that the tables of the whole job may use, by spec.features.memory.maxBytes or auto; 0 without such a budget.";
        table_rows: table_gauge = "rectrain_ps_table_rows", "Rows of tables that do not keep every row, by the label `table`. Tables of equal settings are one.";
        admitted: table_counter = "rectrain_ps_admitted_rows_total", "Rows made for ids that the table's admission admitted, by the label `table`.";
        turned_away: table_counter = "rectrain_ps_turned_away_gradients_total", "Gradients dropped because their id was not admitted yet, by the label `table`.";
        expired: table_counter = "rectrain_ps_expired_rows_total", "Rows removed because they were not updated for `expireAfter`, by the label `table`.";
        evicted: table_counter = "rectrain_ps_evicted_rows_total", "Rows removed because the tables were beyond their budget, by the label `table`.";
        dropped_gradients: table_counter = "rectrain_ps_dropped_gradients_total", "Gradients dropped because their row had been removed since the look-up, by the label `table`.";
        young_evictions: counter = "rectrain_ps_young_evictions_total", "Evictions that removed a row updated less than an hour of event time before. The budget is then too small for the ids in use.";
        slots: gauge = "rectrain_ps_slots", "Slots that this server owns.";
        kept_rows: gauge = "rectrain_ps_kept_rows", "Rows that this process found in shared memory when it replaced one that died; otherwise 0.";
        repaired_rows: gauge = "rectrain_ps_repaired_rows", "Rows among these whose update was interrupted by the death. They were restored, and the update is repeated.";
        stored_journal_bytes: gauge = "rectrain_ps_journal_copy_bytes", "Bytes of the copy of the coordinator's journal that this server keeps.";
        moved_bytes: counter = "rectrain_ps_moved_bytes_total", "Bytes of rows sent to other parameter servers with slots that move.";
        forwarded_rows: counter = "rectrain_ps_forwarded_rows_total", "Rows sent again because they changed while their slot was moving.";
    }
    /// Metrics of the coordinator.
    CoordinatorMetrics {
        tokens_issued: counter = "rectrain_coordinator_tokens_issued_total", "Batches handed out with a token (modes without a barrier), including lost ones.";
        tokens_lost: counter = "rectrain_coordinator_tokens_lost_total", "Tokens lost with the dense worker that held them. Their batches are handed out again.";
        dropped_batches: counter = "rectrain_coordinator_batches_dropped_total", "Local batches whose gradients hopBw dropped.";
        repeated_batches: counter = "rectrain_coordinator_batches_repeated_total", "Batches reported twice. The second report was ignored.";
        lost_replica_batches: counter = "rectrain_coordinator_replica_batches_lost_total", "Batches of replicas that died with their dense worker before the parameter servers had seen them (shadow). Their updates of rows are not lost.";
        mode_switches: counter = "rectrain_coordinator_mode_switches_total", "Switches of the training mode.";
        checkpoints: counter = "rectrain_coordinator_checkpoints_total", "Checkpoints written.";
        checkpoint_time: seconds = "rectrain_coordinator_checkpoint_seconds", "Time from the boundary of a checkpoint until it was complete. Training continues meanwhile.";
        checkpoint_freeze: seconds = "rectrain_coordinator_checkpoint_freeze_seconds", "Time that training was paused until all servers had frozen their rows for a checkpoint.";
        checkpoint_bytes: counter = "rectrain_coordinator_checkpoint_bytes_total", "Bytes of the checkpoints written.";
        checkpoint_step: gauge = "rectrain_coordinator_checkpoint_step", "Global step of the last checkpoint. A crash repeats all training since.";
        checkpoint_free_bytes: gauge = "rectrain_coordinator_checkpoint_free_bytes", "Bytes that the file system of a local checkpoint path had free before the last checkpoint; 0 for a bucket.";
        failed_checkpoints: counter = "rectrain_coordinator_checkpoints_failed_total", "Checkpoints aborted because a part could not be written.";
        lease_heartbeats: counter = "rectrain_coordinator_lease_heartbeats_total", "Renewals of the lease on the checkpoint path.";
        failed_heartbeats: counter = "rectrain_coordinator_lease_heartbeats_failed_total", "Renewals of the lease that the storage refused. The lease expires 30 s after the last renewal.";
        lost_leases: counter = "rectrain_coordinator_leases_lost_total", "Leases that another run, or a replacement of this coordinator, took over. This process then ends without another checkpoint.";
        journal_writes: counter = "rectrain_coordinator_journal_writes_total", "Writes of the journal, from which a replacement of the coordinator recovers.";
        journal_copies: counter = "rectrain_coordinator_journal_copies_total", "Copies of the journal that parameter servers acknowledged.";
        journal_copy_bytes: counter = "rectrain_coordinator_journal_copy_bytes_total", "Bytes of these copies.";
        journal_copy_time: seconds = "rectrain_coordinator_journal_copy_seconds", "Time until all reachable parameter servers had a copy. Replies to members wait for it.";
        journal_copies_behind: gauge = "rectrain_coordinator_journal_copies_behind", "Parameter servers that lack the newest copy of the journal, because they could not be reached.";
        journal_copies_too_large: counter = "rectrain_coordinator_journal_copies_too_large_total", "Writes of the journal that were too large to copy. Until the next smaller one, the loss of the coordinator's node restarts the job from its last checkpoint.";
        journal_copies_recovered: counter = "rectrain_coordinator_journal_copies_recovered_total", "Recoveries of this coordinator from a copy of the journal. They lose no step.";
        skipped_checkpoints: counter = "rectrain_coordinator_checkpoints_skipped_total", "Checkpoints skipped because the one before was still being written.";
        publications: counter = "rectrain_coordinator_publications_total", "Models published for inference servers.";
        publication_step: gauge = "rectrain_coordinator_publication_step", "Global step of the newest published model.";
        publication_time: seconds = "rectrain_coordinator_publication_seconds", "Time in which a model was published. Training continues meanwhile.";
        late_publications: counter = "rectrain_coordinator_publications_late_total", "Checkpoints that were published together with a later one, because the one before was still being published.";
        failed_publications: counter = "rectrain_coordinator_publications_failed_total", "Attempts to publish a model that failed. The next attempt has its changes.";
        map_epoch: gauge = "rectrain_coordinator_map_epoch", "Epoch of the slot map in force. Every migration increases it.";
        parameter_servers: gauge = "rectrain_coordinator_parameter_servers", "Parameter servers in the slot map.";
        embedding_workers: gauge = "rectrain_coordinator_embedding_workers", "Embedding workers that hold batches.";
        dense_workers: gauge = "rectrain_coordinator_dense_workers", "Dense workers that train.";
        loaders: gauge = "rectrain_coordinator_loaders", "Loaders that lease data or whose data is not yet trained.";
        share_changes: counter = "rectrain_coordinator_share_changes_total", "Changes of the share of work that a loader, an embedding worker or a parameter server gets by its measured speed.";
        chunks_read_twice: counter = "rectrain_coordinator_chunks_read_twice_total", "Chunks of data that a second loader reads, because the first one is slow or late.";
        pieces_pulled_twice: counter = "rectrain_coordinator_pieces_pulled_twice_total", "Pieces of a step that a second dense worker also got, because the first one was late or is slow (spec.training.sync.pieces: pulled).";
        rejoins: counter = "rectrain_coordinator_rejoins_total", "Members that died and were replaced while the others continued.";
        migrations: counter = "rectrain_coordinator_migrations_total", "Migrations of slots between parameter servers.";
        moved_slots: counter = "rectrain_coordinator_moved_slots_total", "Slots that moved to another parameter server.";
        migrated_bytes: counter = "rectrain_coordinator_moved_bytes_total", "Bytes of rows that parameter servers sent each other in migrations.";
        migration_time: seconds = "rectrain_coordinator_migration_seconds", "Time from the plan of a migration until its slot map was in force. Training continues meanwhile.";
        flip_time: seconds = "rectrain_coordinator_flip_seconds", "Time that training was paused to bring a new slot map into force.";
        stream_lag_records: gauge = "rectrain_coordinator_stream_lag_records", "Records of the stream that wait at the brokers, and rows of followed files that wait. Gaps between offsets count, too.";
        stream_lag: age = "rectrain_coordinator_stream_lag_seconds", "Age of the latest record of the stream that was read; 0 if no record waits.";
        stream_event_time: gauge = "rectrain_coordinator_stream_event_time", "Time of that record, in seconds since 1970 (UTC).";
        stream_lost_records: gauge = "rectrain_coordinator_stream_lost_records", "Records of the stream, or rows of followed files, that were gone before they were trained, or that a rollback left out.";
        followed_files: gauge = "rectrain_coordinator_followed_files", "Files of the followed paths that were taken for training.";
        followed_files_waiting: gauge = "rectrain_coordinator_followed_files_waiting", "Files of the followed paths that were noticed and have untrained rows.";
        followed_files_late: gauge = "rectrain_coordinator_followed_files_late", "Files that came late: they sort before a file that was taken already.";
        followed_files_changed: gauge = "rectrain_coordinator_followed_files_changed", "Files that changed after they were read. The new content is not trained.";
        followed_files_lost: gauge = "rectrain_coordinator_followed_files_lost", "Files that disappeared or changed before all their rows were trained.";
        window_auc: ratio = "rectrain_coordinator_window_auc", "AUC of the latest predictions, each made before its row was learned.";
        window_normalized_entropy: ratio = "rectrain_coordinator_window_normalized_entropy", "Log loss of these predictions over the entropy of their base rate.";
        window_calibration: ratio = "rectrain_coordinator_window_calibration", "Mean of these predictions over the mean of their labels.";
        baseline_auc: ratio = "rectrain_coordinator_baseline_auc", "AUC of the frozen model's predictions on the latest rows that were read.";
        baseline_normalized_entropy: ratio = "rectrain_coordinator_baseline_normalized_entropy", "Log loss of the frozen model's predictions over the entropy of their base rate.";
        baseline_calibration: ratio = "rectrain_coordinator_baseline_calibration", "Mean of the frozen model's predictions over the mean of their labels.";
        quality_fallen: gauge = "rectrain_coordinator_quality_fallen", "1 if the quality of the latest predictions has fallen (spec.training.quality.onRegression) and is not back, otherwise 0.";
        rollbacks: gauge = "rectrain_coordinator_rollbacks", "Times that training went back to an earlier checkpoint because the quality had fallen, over the life of the checkpoint path. Set when training goes back, until the process ends.";
        rolled_back_rows: gauge = "rectrain_coordinator_rolled_back_rows", "Trained rows that the last of these rollbacks left out.";
        rolled_back_records: partition_gauge = "rectrain_coordinator_rolled_back_records", "Records of a partition that it left out, by the labels `topic` and `partition`. Gaps between offsets count, too.";
        training_held: gauge = "rectrain_coordinator_training_held", "1 if training waits because the quality has fallen, otherwise 0.";
        unseen_share: shares = "rectrain_evaluation_unseen_share", "Share of a feature's look-ups in the last evaluation that found no row, by the label `feature`. High values mean that no training row had the ids, for instance because the test files write them in another form.";
    }
    /// Metrics of a dense worker.
    DenseWorkerMetrics {
        step: seconds = metric_names::DENSE_WORKER_STEP_SECONDS, "Time of a training step.";
        batch_wait: seconds = metric_names::DENSE_WORKER_BATCH_WAIT_SECONDS, "Time that a dense worker waited for a loader. High values mean that loaders are the bottleneck.";
        embedding_wait: seconds = metric_names::DENSE_WORKER_EMBEDDING_WAIT_SECONDS, "Time that a step waited for its embeddings.";
        compute: seconds = metric_names::DENSE_WORKER_COMPUTE_SECONDS, "Time of the forward and backward pass.";
        all_reduce: seconds = metric_names::DENSE_WORKER_ALL_REDUCE_SECONDS, "Time to sum gradients over the dense workers.";
        steps: counter = "rectrain_dense_worker_steps_total", "Steps trained.";
        samples: counter = metric_names::DENSE_WORKER_SAMPLES_TOTAL, "Samples trained.";
        pieces: counter = "rectrain_dense_worker_pieces_total", "Pieces of a step that the worker has pulled and computed (spec.training.sync.pieces: pulled). A piece that two workers compute counts at both.";
        gradient_norm: ratio = "rectrain_dense_worker_gradient_norm", "L2 norm of the dense gradients of the last step before a report, before the optimizer. In modes with a barrier it covers the global batch, in others and with pulled pieces the local batch. NaN or +Inf if a gradient is not finite.";
        sync_gap: steps = "rectrain_dense_worker_sync_gap_steps", "Batches of a replica between two exchanges of a fragment with the parameter servers (shadow). The sum divided by the count is the average sync gap.";
        exchange: seconds = "rectrain_dense_worker_exchange_seconds", "Time of an exchange of the replica with the parameter servers (shadow). Training waits for it only with everySteps.";
        gpu_memory_used: gauge = "rectrain_dense_worker_gpu_memory_used_bytes", "GPU memory in the worker's buffers; 0 on the CPU.";
        gpu_memory_reserved: gauge = "rectrain_dense_worker_gpu_memory_reserved_bytes", "GPU memory that the worker has reserved from the driver, including memory kept for reuse; 0 on the CPU.";
    }
}

impl RoleMetrics {
    /// The registry of all metrics.
    #[must_use]
    pub fn registry(&self) -> &Registry {
        &self.registry
    }

    /// The registry in the text format of Prometheus.
    pub fn encode(&self) -> Result<String, RoleError> {
        TextEncoder::new().encode_to_string(&self.registry.gather()).map_err(metrics_error)
    }
}

impl CoordinatorMetrics {
    /// Adds the increase of the counts since `before`. Counts of earlier processes are in `before`
    /// already.
    pub fn count(&self, counts: &TokenCounts, before: &TokenCounts) {
        let add = |counter: &IntCounter, value: u64, before: u64| counter.inc_by(value.saturating_sub(before));
        add(&self.tokens_issued, counts.issued, before.issued);
        add(&self.tokens_lost, counts.lost, before.lost);
        add(&self.dropped_batches, counts.dropped_batches, before.dropped_batches);
        add(&self.repeated_batches, counts.repeated_batches, before.repeated_batches);
        add(&self.lost_replica_batches, counts.lost_replica_batches, before.lost_replica_batches);
        add(&self.mode_switches, counts.switches, before.switches);
    }

    /// Sets the quality of the latest predictions. A figure that is not defined keeps its last
    /// value.
    pub fn set_window(&self, window: &WindowQuality) {
        set_quality([&self.window_auc, &self.window_normalized_entropy, &self.window_calibration], window);
    }

    /// As [`set_window`](Self::set_window), for the frozen model.
    pub fn set_baseline(&self, window: &WindowQuality) {
        set_quality([&self.baseline_auc, &self.baseline_normalized_entropy, &self.baseline_calibration], window);
    }

    /// Sets how far training is behind its stream.
    pub fn set_stream_lag(&self, lag: &StreamLag) {
        let whole = |value: f64| value as i64;
        self.stream_lag_records.set(i64::try_from(lag.rows).unwrap_or(i64::MAX));
        self.stream_lag.set(lag.seconds);
        self.stream_event_time.set(whole(lag.event_time.unwrap_or(0.0)));
        self.stream_lost_records.set(i64::try_from(lag.lost_records).unwrap_or(i64::MAX));
    }

    /// Sets the times that training went back, and the rows and records that the last one left out.
    pub fn set_rollback(&self, rollbacks: u64, rows: u64, lost: &[LostRecords]) {
        let whole = |count: u64| i64::try_from(count).unwrap_or(i64::MAX);
        self.rollbacks.set(whole(rollbacks));
        self.rolled_back_rows.set(whole(rows));
        for LostRecords { topic, partition, from, until } in lost {
            self.rolled_back_records.set(topic, *partition, whole(until.saturating_sub(*from)));
        }
    }

    /// Sets the counts of followed files.
    pub fn set_followed(&self, files: &FollowedFiles) {
        let FollowedFiles { taken, waiting, late, changed, lost } = *files;
        for (gauge, count) in [
            (&self.followed_files, taken),
            (&self.followed_files_waiting, waiting),
            (&self.followed_files_late, late),
            (&self.followed_files_changed, changed),
            (&self.followed_files_lost, lost),
        ] {
            gauge.set(i64::try_from(count).unwrap_or(i64::MAX));
        }
    }

    /// Sets the number of members of a role that are in use, if the role has a gauge.
    pub fn set_members(&self, role: Role, members: u32) {
        let gauge = match role {
            Role::Ps => &self.parameter_servers,
            Role::EmbeddingWorker => &self.embedding_workers,
            Role::DenseWorker => &self.dense_workers,
            Role::Loader => &self.loaders,
            _ => return,
        };
        gauge.set(i64::from(members));
    }
}

impl PsMetrics {
    pub fn count_look_up(&self, counts: rectrain_embedding::LookupCounts) {
        self.found_rows.inc_by(counts.found);
        self.inserted_rows.inc_by(counts.inserted);
        self.initial_rows.inc_by(counts.missing);
    }
}

fn set_quality(gauges: [&Gauge; 3], window: &WindowQuality) {
    for (gauge, value) in gauges.into_iter().zip([window.auc, window.normalized_entropy, window.calibration]) {
        if let Some(value) = value {
            gauge.set(value);
        }
    }
}

/// The text of docs/reference/metrics.md.
#[must_use]
pub fn reference_markdown() -> String {
    let mut text = String::from(
        "# Metrics\n\nEvery process serves these metrics on `/metrics`. Times are histograms in seconds, and staleness is in global steps.\n\
         Every metric of a role has the label `replica`.\n",
    );
    tabulate(&mut text, REFERENCE);
    text.push_str(
        "\n## Wire\n\nMessages between this process and other members. The client counts a call, and the server counts a request.\n\
         Roles of one process exchange frames without serializing them: such frames have 0 bytes.\n",
    );
    tabulate(&mut text, rectrain_wire::METRICS_REFERENCE);
    text
}

fn tabulate(text: &mut String, metrics: &[(&str, &str, &str)]) {
    text.push_str("\n| metric | kind | meaning |\n|---|---|---|\n");
    for (name, kind, help) in metrics {
        let kind = match *kind {
            "seconds" | "steps" => "histogram",
            "shares" | "ratio" | "age" | "table_gauge" | "partition_gauge" => "gauge",
            "table_counter" => "counter",
            kind => kind,
        };
        text.push_str(&format!("| `{name}` | {kind} | {help} |\n"));
    }
}

fn metrics_error(error: prometheus::Error) -> RoleError {
    RoleError::Task { what: "registration of metrics", reason: error.to_string() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_reference_is_up_to_date() {
        let written = include_str!("../../../docs/reference/metrics.md");
        assert_eq!(written, reference_markdown(), "run `cargo xtask docs` to update it");
    }

    #[test]
    fn metrics_register_once_and_are_named_alike() {
        let all = RoleMetrics::new(Registry::new()).unwrap();
        PsMetrics::of(&all, 3).rows_held.set(7);
        assert!(all.encode().unwrap().contains("rectrain_ps_rows{replica=\"3\"} 7"));
        for (name, kind, help) in REFERENCE {
            assert!(name.starts_with("rectrain_") && help.ends_with('.'), "{name}");
            assert_eq!(kind.ends_with("counter"), name.ends_with("_total"), "{name}");
            assert_eq!(["seconds", "age"].contains(kind), name.ends_with("_seconds"), "{name}");
            assert_eq!(*kind == "steps", name.ends_with("_steps"), "{name}");
        }
    }

    #[test]
    fn each_feature_has_a_share() {
        let all = RoleMetrics::new(Registry::new()).unwrap();
        let shares = [("item".to_owned(), 0.25), ("user".to_owned(), 1.0)].into();
        CoordinatorMetrics::of(&all, 0).unseen_share.set(&shares);
        let text = all.encode().unwrap();
        for line in [r#"{feature="item",replica="0"} 0.25"#, r#"{feature="user",replica="0"} 1"#] {
            assert!(text.contains(&format!("rectrain_evaluation_unseen_share{line}")), "{text}");
        }
    }

    #[test]
    fn a_rollback_has_the_records_of_each_partition() {
        let all = RoleMetrics::new(Registry::new()).unwrap();
        let lost = |partition, from, until| LostRecords { topic: "clicks".to_owned(), partition, from, until };
        CoordinatorMetrics::of(&all, 0).set_rollback(2, 50, &[lost(0, 10, 40), lost(3, 0, 20)]);
        let text = all.encode().unwrap();
        for line in
            [r#"{partition="0",replica="0",topic="clicks"} 30"#, r#"{partition="3",replica="0",topic="clicks"} 20"#]
        {
            assert!(text.contains(&format!("rectrain_coordinator_rolled_back_records{line}")), "{text}");
        }
        assert!(text.contains("rectrain_coordinator_rollbacks{replica=\"0\"} 2"), "{text}");
        assert!(text.contains("rectrain_coordinator_rolled_back_rows{replica=\"0\"} 50"), "{text}");
    }

    /// The operator reads them from this process.
    #[test]
    fn every_shared_metric_name_is_registered() {
        for name in metric_names::ALL {
            let (_, kind, _) = REFERENCE.iter().find(|(known, ..)| *known == name).expect(name);
            let (is_counter, is_histogram) = (name.ends_with("_total"), name.ends_with("_seconds"));
            assert_eq!((*kind == "counter", *kind == "seconds"), (is_counter, is_histogram), "{name}");
        }
    }

    #[test]
    fn only_the_increase_of_counts_is_added() {
        let metrics = CoordinatorMetrics::of(&RoleMetrics::new(Registry::new()).unwrap(), 0);
        let before = TokenCounts { switches: 9, ..TokenCounts::default() };
        let later = TokenCounts { switches: 11, ..before };
        metrics.count(&later, &before);
        assert_eq!(metrics.mode_switches.get(), 2);
        // The job resumed from an older checkpoint.
        metrics.count(&before, &later);
        assert_eq!(metrics.mode_switches.get(), 2);
    }
}

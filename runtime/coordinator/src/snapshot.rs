//! The coordinator's part of a checkpoint: the position of training and its data at a boundary, and
//! counts over the job's whole life.
//! It is JSON, under the name [`NAME`].

use rectrain_crds::TableSummary;
use rectrain_modes::RowCounts;
use rectrain_modes::{DataPosition, FirstPass, TrainingLength};
use rectrain_proto::v1;
use serde::{Deserialize, Serialize};

use crate::files::FileList;
use crate::rollback::{Record, RolledBack};
use crate::stream_snapshot::StreamSnapshot;
use rectrain_protocol::error::RoleError;
use rectrain_protocol::events::TestMetrics;
use rectrain_protocol::plan::JobPlan;
use rectrain_protocol::token_counts::TokenCounts;

/// The name of the snapshot in a checkpoint.
pub(super) const NAME: &str = "coordinator";
/// The version of the format.
const VERSION: u32 = 1;

/// The coordinator's state at a boundary.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub(super) struct Snapshot {
    version: u32,
    cut: DataCut,
    pub(super) training: TrainingSnapshot,
    /// Rows of one epoch, if known.
    pub(super) epoch_rows: Option<u64>,
    pub(super) samples: u64,
    pub(super) training_seconds: f64,
    /// Sum of the labels, and rows, of chunks that are trained to their end.
    pub(super) labels: (f64, u64),
    pub(super) skipped_rows: u64,
    pub(super) last_test: Option<(u64, TestMetrics)>,
    pub(super) applied: AppliedGradients,
    /// The training files. Checkpoints of earlier versions have none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) files: Option<FileList>,
    /// Where the passes over these files begin.
    #[serde(default, skip_serializing_if = "is_first")]
    pub(super) first_pass: FirstPass,
    /// The place in the stream, if the job trains on one. The chunks after it count from
    /// `first_pass`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) stream: Option<StreamSnapshot>,
    /// Rollbacks in the checkpoint path before it.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub(super) rollbacks: u64,
    /// The rollback to this checkpoint. It is not in the file: `stream` differs from it.
    #[serde(skip)]
    pub(super) rolled_back: Option<Box<RolledBack>>,
}

fn is_first(pass: &FirstPass) -> bool {
    *pass == FirstPass::default()
}

#[allow(clippy::trivially_copy_pass_by_ref, reason = "serde passes a reference")]
fn is_zero(step: &u64) -> bool {
    *step == 0
}

/// How the data is divided into batches and chunks. Positions in the data depend on it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct DataCut {
    global_batch_size: u64,
    chunk_batches: u64,
    shuffle_seed: Option<u64>,
}

/// The position of training.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub(super) struct TrainingSnapshot {
    pub(super) step: u64,
    pub(super) trained_rows: u64,
    pub(super) dropped_rows: u64,
    pub(super) dropped_batches: u64,
    /// Global batches trained.
    pub(super) batch: u64,
    /// The epoch of the next batch.
    pub(super) epoch: u32,
    /// The mode after the boundary, and the manifest's mode at that time.
    pub(super) mode: String,
    pub(super) first_mode: String,
    pub(super) evaluated_through: u64,
    pub(super) counts: TokenCounts,
    /// The global step before which the state of the dense optimizer began. Not 0 only if a warm
    /// start has changed the optimizer.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub(super) dense_since: u64,
}

/// Dense gradients applied without a barrier.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub(super) struct AppliedGradients {
    gradients: u64,
    /// Applied by the servers that applied the fewest and the most. The two differ if gradients
    /// were lost or arrived twice.
    #[serde(default)]
    pub(super) fewest: u64,
    #[serde(default)]
    pub(super) most: u64,
    /// Gradients excluded for their staleness. They count as applied too.
    pub(super) excluded: u64,
    /// In global steps.
    staleness_sum: f64,
    pub(super) staleness_max: u64,
}

/// The counts of a parameter server under one slot map.
#[derive(Clone, Copy)]
pub(super) struct Counted {
    /// The gradients that it has applied to its dense partition.
    pub(super) applied: v1::Applied,
    /// The history of its rows.
    pub(super) table: v1::TableCounts,
}

/// The counts of the run that this one resumed, and of servers under earlier slot maps.
#[derive(Clone, Copy)]
pub(super) struct Before {
    pub(super) applied: AppliedGradients,
    pub(super) table: TableSummary,
}

impl TrainingSnapshot {
    pub(super) fn rows(&self) -> RowCounts {
        let Self { trained_rows, dropped_rows, dropped_batches, .. } = *self;
        RowCounts { trained_rows, dropped_rows, dropped_batches }
    }
}

impl Snapshot {
    /// The snapshot behind the rows that a rollback leaves out. A checkpoint that was saved after
    /// the rollback is behind them already.
    pub(super) fn behind(mut self, record: &Record) -> Self {
        if self.rollbacks >= record.number() || self.training.step > record.step() {
            return self;
        }
        let before = self.stream.take().map(|stream| stream.place).unwrap_or_default();
        self.rolled_back = Some(Box::new(record.left_out(&before, self.first_pass.rows)));
        self.stream = Some(record.stream().clone());
        self.rollbacks = record.number();
        self
    }

    pub(super) fn new(plan: &JobPlan, training: TrainingSnapshot) -> Self {
        Self {
            version: VERSION,
            cut: DataCut::of(plan),
            training,
            epoch_rows: None,
            samples: 0,
            training_seconds: 0.0,
            labels: (0.0, 0),
            skipped_rows: 0,
            last_test: None,
            applied: AppliedGradients::default(),
            files: None,
            first_pass: FirstPass::default(),
            stream: None,
            rollbacks: 0,
            rolled_back: None,
        }
    }

    /// The snapshot of a job that begins with another job's model: no row is trained, and the
    /// global step counts on from `step`.
    pub(super) fn before_first_row(plan: &JobPlan, step: u64, dense_since: u64) -> Self {
        Self::new(plan, TrainingSnapshot { step, dense_since, ..TrainingSnapshot::initial(plan.mode) })
    }

    pub(super) fn encode(&self) -> Result<Vec<u8>, RoleError> {
        serde_json::to_vec(self)
            .map_err(|error| RoleError::Task { what: "writing of the coordinator's state", reason: error.to_string() })
    }

    /// Decodes the snapshot in checkpoint `name`, for a job with this plan.
    ///
    /// # Errors
    /// [`RoleError::Input`] if the format is unknown, or the job divides its data differently.
    pub(super) fn decode(plan: &JobPlan, name: &str, bytes: &[u8]) -> Result<Self, RoleError> {
        let saved: Self = serde_json::from_slice(bytes).map_err(|error| {
            RoleError::Input(format!(
                "the coordinator's state in checkpoint {name} cannot be read by this version: {error}"
            ))
        })?;
        if saved.version != VERSION {
            let found = saved.version;
            return Err(RoleError::Input(format!(
                "the coordinator's state in checkpoint {name} has version {found}; this program reads version {VERSION}"
            )));
        }
        saved.cut.check(DataCut::of(plan), name)?;
        saved.check_kind(plan)?;
        Ok(saved)
    }

    /// A place in a stream is none in files, and the other way round.
    fn check_kind(&self, plan: &JobPlan) -> Result<(), RoleError> {
        let was = match &self.stream {
            None => "files",
            Some(stream) if stream.files.is_some() => "followed paths",
            Some(_) => "a stream",
        };
        let is = match plan.stream() {
            None => "files",
            Some(_) if plan.follow().is_some() => "followed paths",
            Some(_) => "a stream",
        };
        let is_before_first_row = self.stream.is_none() && self.training.batch == 0;
        if was == is || is_before_first_row {
            return self.check_paths(plan);
        }
        Err(RoleError::Input(format!(
            "spec.data.train: the checkpoint of step {} was trained on {was}, and the job reads {is}: {}",
            self.training.step,
            self.as_new_job(plan)
        )))
    }

    /// A list of taken files belongs to its paths.
    fn check_paths(&self, plan: &JobPlan) -> Result<(), RoleError> {
        let files = self.stream.as_ref().and_then(|stream| stream.files.as_ref());
        let difference = files.zip(plan.follow()).and_then(|(files, follow)| files.difference(follow));
        match difference {
            None => Ok(()),
            Some(difference) => Err(RoleError::Input(format!(
                "{difference}, and the checkpoint of step {} lists the files that were trained of the former ones: change it back, or {}",
                self.training.step,
                self.as_new_job(plan)
            ))),
        }
    }

    /// Whether the run has trained all that a job with this plan would train.
    pub(super) fn is_all_trained(&self, plan: &JobPlan) -> bool {
        let epoch_batches = self.epoch_rows.map(|rows| rows.div_ceil(plan.global_batch_rows.max(1)));
        let all = match plan.length {
            TrainingLength::Steps(steps) => Some(steps),
            TrainingLength::Epochs(epochs) => self.first_pass.batches_of_run(epochs, epoch_batches),
        };
        all.is_some_and(|all| self.training.batch >= all)
    }

    /// Compares the training files with the ones that are found now. Returns this snapshot with
    /// the next epoch over other files, if it is at the end of an epoch, and the difference.
    ///
    /// # Errors
    /// [`RoleError::Input`] if the files differ and the snapshot is within an epoch: its position
    /// counts the rows of the earlier files.
    pub(super) fn with_files(&self, plan: &JobPlan, found: &FileList) -> Result<Option<(Self, String)>, RoleError> {
        let difference = self.files.as_ref().and_then(|files| files.difference(found));
        let Some(difference) = difference.filter(|_| !self.is_all_trained(plan)) else { return Ok(None) };
        match self.next_epoch(plan) {
            Some(next) => Ok(Some((next, difference))),
            None => Err(RoleError::Input(format!(
                "spec.data: {difference} since the checkpoint of step {}, which is within an epoch, so rows would be trained twice or never: restore the files as they were (other files may follow at the end of an epoch), or train from the start with another spec.checkpoint.path; {}",
                self.training.step,
                self.as_new_job(plan)
            ))),
        }
    }

    /// How the training files differ from the ones found now, if this snapshot has trained all that
    /// the job would train. A later run then has nothing to train, whatever the files are.
    pub(super) fn change_after_the_end(&self, plan: &JobPlan, found: &FileList) -> Option<String> {
        let difference = self.files.as_ref().and_then(|files| files.difference(found));
        difference.filter(|_| self.is_all_trained(plan))
    }

    /// How to train other data with the model of this checkpoint, as the end of a sentence.
    pub(super) fn as_new_job(&self, plan: &JobPlan) -> String {
        let path = plan.checkpoint.as_ref().map_or("PATH", |checkpoint| checkpoint.path.as_str());
        format!(
            "to begin a new job with this model on other data, set spec.checkpoint.from to {path}@{} and spec.checkpoint.path to another path",
            self.training.step
        )
    }

    /// This snapshot with the next epoch over other files; `None` within an epoch.
    fn next_epoch(&self, plan: &JobPlan) -> Option<Self> {
        let FirstPass { epoch, batch, rows } = self.first_pass;
        let epoch_rows = self.epoch_rows.unwrap_or(0);
        let trained = self.training.batch.checked_sub(batch)?;
        let passes = match epoch_rows.div_ceil(plan.global_batch_rows.max(1)) {
            0 if trained == 0 => 0,
            batches if batches > 0 && trained.is_multiple_of(batches) => trained / batches,
            _ => return None,
        };
        let epoch = epoch.checked_add(u32::try_from(passes).ok()?)?;
        let first_pass = FirstPass { epoch, batch: self.training.batch, rows: rows + passes * epoch_rows };
        let counts = self.training.rows();
        if counts.trained_rows + counts.dropped_rows != first_pass.rows {
            return None;
        }
        let training = TrainingSnapshot { epoch, ..self.training.clone() };
        Some(Self { training, epoch_rows: None, files: None, first_pass, ..self.clone() })
    }

    pub(super) fn position(&self) -> DataPosition {
        DataPosition { batch: self.training.batch, epoch: self.training.epoch, epoch_rows: self.epoch_rows }
    }
}

impl DataCut {
    fn of(plan: &JobPlan) -> Self {
        Self {
            global_batch_size: plan.global_batch_rows,
            chunk_batches: plan.batches_per_chunk,
            shuffle_seed: plan.shuffle,
        }
    }

    /// Checks that both divide the data in the same way, so that a position means the same in both.
    fn check(self, own: Self, name: &str) -> Result<(), RoleError> {
        let differs = |field: &str, was: String, is: String| {
            Err(RoleError::Input(format!(
                "{field} is {is}, but checkpoint {name} was written with {was}, and its place in the data is counted in that: change it back, or train from the start with another spec.checkpoint.path, with this checkpoint's model if spec.checkpoint.from names it"
            )))
        };
        if self.global_batch_size != own.global_batch_size {
            let (was, is) = (self.global_batch_size, own.global_batch_size);
            return differs("spec.training.globalBatchSize", was.to_string(), is.to_string());
        }
        if self.chunk_batches != own.chunk_batches {
            let rows = |cut: Self| format!("{} rows", cut.chunk_batches * cut.global_batch_size);
            return differs("the window of spec.data.shuffle (or the slice of spec.data.split)", rows(self), rows(own));
        }
        if self.shuffle_seed != own.shuffle_seed {
            let text =
                |seed: Option<u64>| seed.map_or("no shuffle".to_owned(), |seed| format!("a shuffle with seed {seed}"));
            return differs("the order of the rows", text(self.shuffle_seed), text(own.shuffle_seed));
        }
        Ok(())
    }
}

impl AppliedGradients {
    /// Means over the servers: each server has applied its part of every gradient.
    pub(super) fn mean_of(servers: &[v1::Applied]) -> Self {
        let count = servers.len().max(1) as u64;
        let sum = |of: fn(&v1::Applied) -> u64| servers.iter().map(of).sum::<u64>();
        let gradients = || servers.iter().map(|applied| applied.gradients);
        Self {
            gradients: sum(|applied| applied.gradients) / count,
            fewest: gradients().min().unwrap_or(0),
            most: gradients().max().unwrap_or(0),
            excluded: sum(|applied| applied.excluded) / count,
            staleness_sum: sum(|applied| applied.staleness_sum) as f64 / count as f64,
            staleness_max: servers.iter().map(|applied| applied.staleness_max).max().unwrap_or(0),
        }
    }

    /// Adds the gradients of an earlier run.
    pub(super) fn plus(self, earlier: Self) -> Self {
        Self {
            gradients: self.gradients + earlier.gradients,
            fewest: self.fewest + earlier.fewest,
            most: self.most + earlier.most,
            excluded: self.excluded + earlier.excluded,
            staleness_sum: self.staleness_sum + earlier.staleness_sum,
            staleness_max: self.staleness_max.max(earlier.staleness_max),
        }
    }

    pub(super) fn mean_staleness(self) -> f64 {
        self.staleness_sum / self.gradients.max(1) as f64
    }
}

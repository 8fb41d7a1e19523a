//! The progress of the dense workers, and the status of the job.

use std::ops::Range;
use std::time::{Instant, SystemTime, UNIX_EPOCH};

use rectrain_crds::TableSummary;
use rectrain_dense::metrics::{QualityWindow, WindowMetrics};
use rectrain_kinds::{Family, RegressionAction, RegressionRule};
use rectrain_modes::gba::TokenMode;
use rectrain_modes::{Rank, TrainingMode};
use rectrain_proto::v1;
use serde::{Deserialize, Serialize};

use super::State;
use crate::as_bytes;
use crate::quality_watch::{QualityChange, QualityWatch, measure};
use crate::slowest::{Change, MemberId, Named, Setting, Slowest};
use crate::snapshot::{AppliedGradients, Snapshot};
use crate::speeds::Speeds;
use crate::throughput::Throughput;
use crate::training::{TrainedPiece, TrainedStep};
use rectrain_protocol::Role;
use rectrain_protocol::error::RoleError;
use rectrain_protocol::events::{JobEvent, StreamLag, Summary, WindowQuality};
use rectrain_protocol::failure::Divergence;
use rectrain_protocol::window_part;

/// Members that the status lists as missing, at most.
const MOST_MISSING: usize = 10;

/// The result of training.
pub(crate) struct Trained {
    pub(crate) dense_digest: Vec<u8>,
    pub(crate) summary: Summary,
}

#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub(super) struct DenseWorkerState {
    pub(super) steps_done: u64,
    pub(super) running_auc: Option<f64>,
    /// The norm of the dense gradients of its last step. A replacement of the coordinator waits for
    /// the next report.
    #[serde(skip)]
    gradient_norm: Option<f64>,
    pub(super) training_seconds: f64,
    /// Training time of earlier incarnations of this rank.
    pub(super) training_seconds_before: f64,
    #[serde(with = "as_bytes::optional_message")]
    pub(super) done: Option<v1::TrainingDone>,
}

/// The reports of the dense workers, and the counts of earlier runs.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Progress {
    /// By rank.
    pub(super) ranks: Vec<DenseWorkerState>,
    pub(super) samples: u64,
    /// Sum of losses, and samples, since the last event.
    pub(super) loss_since_event: (f64, u64),
    pub(super) last_loss: f64,
    /// The smallest mean loss of an event; `None` before the first one.
    pub(super) best_loss: Option<f64>,
    #[serde(skip)]
    pub(super) throughput: Throughput,
    /// The quality of the latest predictions. A replacement of the coordinator begins a new window.
    #[serde(skip)]
    window: QualityWindow,
    /// The quality of the frozen model's predictions on the latest rows that loaders have read.
    #[serde(skip)]
    baseline: QualityWindow,
    #[serde(skip)]
    watch: QualityWatch,
    #[serde(skip)]
    slowest: Slowest,
    /// The time of the last progress: a step, a batch, a part of an evaluation, or work of
    /// parameter servers that all others wait for.
    #[serde(skip, default = "Instant::now")]
    pub(super) progressed: Instant,
    pub(super) speeds: Speeds,
    /// Gradients applied in earlier runs, and by servers that have left.
    pub(super) applied_before: AppliedGradients,
    /// The history of the rows of tables, under earlier slot maps.
    pub(super) table_before: TableSummary,
    /// Seconds of training in earlier runs.
    pub(super) seconds_before: f64,
}

impl Progress {
    pub(super) fn new(dense_workers: u32, saved: Option<&Snapshot>) -> Self {
        Self {
            ranks: vec![DenseWorkerState::default(); dense_workers as usize],
            samples: saved.map_or(0, |saved| saved.samples),
            loss_since_event: (0.0, 0),
            last_loss: 0.0,
            best_loss: None,
            throughput: Throughput::default(),
            window: QualityWindow::default(),
            baseline: QualityWindow::default(),
            watch: watch(saved),
            slowest: Slowest::default(),
            progressed: Instant::now(),
            speeds: Speeds::default(),
            applied_before: saved.map(|saved| saved.applied).unwrap_or_default(),
            table_before: TableSummary::default(),
            seconds_before: saved.map_or(0.0, |saved| saved.training_seconds),
        }
    }

    /// Notes the mean loss of an event.
    fn note_loss(&mut self, loss: f64) {
        self.last_loss = loss;
        self.best_loss = Some(self.best_loss.map_or(loss, |best| best.min(loss)));
    }

    /// The mean loss of the last event; `None` before the first one.
    fn last_loss(&self) -> Option<f64> {
        self.best_loss.map(|_| self.last_loss).filter(|loss| loss.is_finite())
    }

    /// Completes the figures of a divergence that the member does not know.
    pub(super) fn complete(&self, divergence: &mut Divergence) {
        divergence.loss = divergence.loss.or(self.last_loss());
        divergence.best_loss = divergence.best_loss.or(self.best_loss);
    }
}

impl State {
    /// A replacement of dense worker `rank` continues before `batch`. Batches that were trained and
    /// not reported are counted now, without their loss. Batches that were reported and are trained
    /// again are not counted twice.
    pub(crate) fn resume_worker_at(&mut self, rank: Rank, batch: u64, share: &Range<u32>) {
        let first = self.training.current_batch();
        let Some(worker) = self.progress.ranks.get_mut(rank.0 as usize) else { return };
        let told = std::mem::replace(&mut worker.steps_done, batch).max(first);
        let rows = |batches: Range<u64>| -> u64 {
            batches.map(|batch| self.training.rows_of_share(batch, share.clone())).sum()
        };
        self.progress.samples = (self.progress.samples + rows(told..batch)).saturating_sub(rows(batch..told));
    }

    pub(super) fn all_trained(&self) -> bool {
        self.progress.ranks.iter().all(|rank| rank.done.is_some())
    }

    /// Applies the report of one worker. Returns a progress event for some reports.
    pub(crate) fn apply_progress(&mut self, report: &v1::Progress) -> Result<Option<JobEvent>, RoleError> {
        let rank = self.rank_mut("progress", report.rank)?;
        let has_trained = rank.steps_done < report.steps_done;
        rank.steps_done = rank.steps_done.max(report.steps_done);
        rank.running_auc = report.running_auc;
        rank.gradient_norm = report.gradient_norm.or(rank.gradient_norm);
        rank.training_seconds = report.training_seconds;
        // Without a barrier, workers count no steps.
        if has_trained || report.samples > 0 {
            self.progress.progressed = Instant::now();
        }
        if self.members.leaving_dense_workers.get(&report.rank) == Some(&true) {
            self.members.leaving_dense_workers.remove(&report.rank);
        }
        self.progress.speeds.record(report);
        self.note_predictions(report.window.as_ref());
        let mode = self.training.mode();
        let pulls_pieces = mode == TrainingMode::Pulled;
        // Without a barrier, each batch is reported by itself. With pulled pieces, each step is.
        if mode.family() == Family::Barrier && !pulls_pieces {
            self.progress.samples += report.samples;
        }
        if !pulls_pieces {
            self.progress.loss_since_event.0 += report.loss_sum;
            self.progress.loss_since_event.1 += report.samples;
        }
        let now = Instant::now();
        self.progress.throughput.note(now, self.progress.samples);
        let ignored = self.is_on_stream().then_some(Role::Loader);
        let report_with_wait = self.with_data_wait(report, now);
        self.progress.slowest.record(&report_with_wait, ignored, now);
        self.name_slowest(now);
        self.note_pieces(report, now);
        self.share_pieces(now);
        self.note_loaders(report, now);
        self.training.set_pace(self.samples_per_second() / self.job.data.global_batch_rows.max(1) as f64);
        // Worker 0 may be slow. It does not hold the others back if they pull pieces.
        let is_told = report.rank == 0 || pulls_pieces;
        if !is_told || self.progress.loss_since_event.1 == 0 {
            return Ok(None);
        }
        let (loss, samples) = std::mem::take(&mut self.progress.loss_since_event);
        self.progress.note_loss(loss / samples as f64);
        self.watch_quality();
        Ok(Some(JobEvent::Progress {
            step: self.step(),
            total_steps: self.total_steps().map(|steps| steps.0),
            samples: self.progress.samples,
            samples_per_second: self.samples_per_second(),
            loss: self.progress.last_loss,
            running_auc: self.running_auc(),
            gradient_norm: self.gradient_norm(),
            stream: self.stream_lag(),
            window: self.window(),
            baseline: self.baseline(),
        }))
    }

    /// Adds predictions of a worker to the window.
    fn note_predictions(&mut self, part: Option<&v1::WindowPart>) {
        let (part, rows) = (part.map(window_part::read).unwrap_or_default(), self.job.window_rows);
        if self.job.on_regression.is_some() {
            self.progress.watch.push(part.clone(), rows);
        }
        self.progress.window.push(part, rows);
    }

    /// Adds predictions of the frozen model, which a loader has made.
    pub(super) fn note_baseline(&mut self, part: &v1::WindowPart) {
        self.progress.baseline.push(window_part::read(part), self.job.window_rows);
    }

    /// Tells when the quality falls and when it is back. Training may stop for it, or go back.
    fn watch_quality(&mut self) {
        let rows = self.job.window_rows;
        let Some((rule, latest)) = self.job.on_regression.zip(self.progress.window.metrics()) else { return };
        let trained = self.progress.samples;
        let Some(change) = self.progress.watch.look(&rule, &latest, rows, trained) else { return };
        let frozen = self.progress.baseline.metrics().and_then(|frozen| measure(rule.metric, &frozen));
        self.pending_events.push(JobEvent::Warning { message: quality_message(&rule, change, frozen) });
        if !change.has_fallen || self.is_held {
            return;
        }
        match rule.action {
            RegressionAction::Alert => {}
            RegressionAction::Pause => self.is_held = true,
            RegressionAction::Rollback => {
                let begin = trained.saturating_sub(latest.samples);
                self.note_fall(self.progress.watch.good_before().unwrap_or(begin), change.usual);
            }
        }
    }

    /// The rows of the last checkpoint that training may go back to, at most; `None` if it never
    /// goes back. Before the first good window, no checkpoint is known to be good.
    pub(crate) fn good_before(&self) -> Option<u64> {
        let rule = self.job.on_regression.filter(|rule| rule.action == RegressionAction::Rollback);
        rule.map(|_| self.progress.watch.good_before().unwrap_or(0))
    }

    /// Whether the quality has fallen and is not back.
    pub(crate) fn has_quality_fallen(&self) -> bool {
        self.progress.watch.has_fallen()
    }

    /// Whether training waits because the quality has fallen.
    pub(crate) fn is_held(&self) -> bool {
        self.is_held
    }

    /// A batch without a barrier has ended. This is the progress of such modes, because workers
    /// count no steps.
    pub(crate) fn batch_report(&mut self, report: &v1::BatchReport) -> Result<(), RoleError> {
        self.progress.progressed = Instant::now();
        self.progress.samples += u64::from(report.rows);
        self.training.batch_report(report)
    }

    /// A worker has nothing more to do with a pulled piece. Returns whether its predictions count.
    pub(crate) fn piece_report(&mut self, report: &v1::PieceReport) -> Result<bool, RoleError> {
        let now = Instant::now();
        let TrainedPiece { counts, steps } = self.training.piece_report(report, now)?;
        for TrainedStep { rows, loss_sum } in steps {
            self.progress.progressed = now;
            self.progress.samples += rows;
            if let Some(loss_sum) = loss_sum {
                self.progress.loss_since_event.0 += loss_sum;
                self.progress.loss_since_event.1 += rows;
            }
        }
        Ok(counts)
    }

    /// Whether all members wait for parameter servers, which restore rows, write a checkpoint or
    /// compute the digest.
    pub(crate) fn is_waiting_for_servers(&self) -> bool {
        self.training.restoring() || self.training.is_saving() || self.all_trained()
    }

    /// Parameter servers that all members wait for have done work.
    pub(crate) fn note_server_progress(&mut self) {
        self.progress.progressed = Instant::now();
    }

    /// A loader reads. It may have to skip much data before it finds a row.
    pub(crate) fn note_loader_progress(&mut self) {
        self.progress.progressed = Instant::now();
    }

    pub(crate) fn training_done(&mut self, done: v1::TrainingDone) -> Result<(), RoleError> {
        if !self.training.ended() {
            let reason = format!("dense worker {} has ended before training has", done.rank);
            return Err(RoleError::Inconsistent { message: "training_done", reason });
        }
        let rank = self.rank_mut("training_done", done.rank)?;
        rank.done = Some(done);
        Ok(())
    }

    /// The result, once every dense worker has finished.
    pub(crate) fn trained(&mut self) -> Result<Option<Trained>, RoleError> {
        let Some(done) = self.progress.ranks.iter().map(|rank| rank.done.as_ref()).collect::<Option<Vec<_>>>() else {
            return Ok(None);
        };
        self.check_labels()?;
        let first = done.first().ok_or(RoleError::Stopped)?;
        // The other workers waited for a mode without a barrier and have old parameters.
        let mut in_step = done.iter().take(self.training.barrier_workers() as usize);
        if let Some(other) = in_step.find(|other| other.parameters_sha256 != first.parameters_sha256) {
            return Err(RoleError::Diverged { rank: other.rank });
        }
        let seconds = self.training_seconds();
        let summary = Summary {
            test: self.evaluation.last_test.as_ref().map(|(_, test)| test.clone()),
            steps: first.steps,
            samples: self.progress.samples,
            seconds,
            loss: self.progress.last_loss(),
            best_loss: self.progress.best_loss,
            window: self.window(),
            samples_per_second: if seconds > 0.0 { self.progress.samples as f64 / seconds } else { 0.0 },
            mode: self.training.mode().name().to_owned(),
            mode_switches: self.training.counts().switches,
            trained_rows: self.training.trained_rows(),
            dropped_batches: self.training.counts().dropped_batches,
            lost_replica_batches: self.training.counts().lost_replica_batches,
            average_sync_gap: self.training.counts().average_sync_gap(),
            tokens_issued: self.training.counts().issued,
            tokens_lost: self.training.counts().lost,
            skipped_rows: self.data.skipped_rows,
            ..Summary::default()
        };
        Ok(Some(Trained { dense_digest: first.parameters_sha256.clone(), summary }))
    }

    pub(crate) fn status(&mut self) -> v1::JobStatus {
        let now = Instant::now();
        self.name_slowest(now);
        let joined = matches!(self.roster(), Ok(Some(_)));
        let phase = match (&self.end.failure, self.end.has_ended, joined) {
            (Some(_), _, _) => v1::Phase::Failed,
            (None, true, _) => v1::Phase::Complete,
            (None, false, false) => v1::Phase::Starting,
            (None, false, true) if !self.evaluation.passes.is_empty() => v1::Phase::Evaluating,
            (None, false, true) => v1::Phase::Training,
        };
        let replicas = Role::MEMBERS.map(|role| self.replicas(role)).to_vec();
        v1::JobStatus {
            phase: phase.into(),
            mode: self.training.mode().name().to_owned(),
            step: self.step(),
            total_steps: self.total_steps().map_or(0, |steps| steps.0),
            samples: self.progress.samples,
            samples_per_second: self.samples_per_second(),
            loss: self.progress.last_loss,
            auc: match &self.evaluation.last_test {
                Some((_, test)) => test.auc,
                None => self.running_auc(),
            },
            message: self.end.failure.as_ref().map(|failure| failure.message.clone()).unwrap_or_default(),
            ps: self.members.servers.present(),
            map_epoch: self.training.map_epoch(),
            replicas,
            workers: self.progress.speeds.workers(),
            all_reduce_seconds: self.progress.speeds.all_reduce_seconds().unwrap_or(0.0),
            last_checkpoint: self.checkpoints.last.as_ref().map(|(name, _)| name.clone()).unwrap_or_default(),
            last_checkpoint_step: self.last_checkpoint_step().unwrap_or(0),
            idle_seconds: Some(self.progress.progressed.elapsed().as_secs_f64()),
            slots_decided_seconds: self.members.slots_decided_seconds,
            missing: self.missing(MOST_MISSING),
            // The coordinator knows both, and not its state.
            recovered: false,
            tables: None,
            budget: self.budget,
            unseen: self.highest_unseen_shares(),
            slowest: self.slowest().filter(|_| phase == v1::Phase::Training),
            no_step: self.no_step(now).filter(|_| phase == v1::Phase::Training),
            stream: self.stream_lag().map(|lag| write_lag(lag, self.stream_partitions())),
            quality: Some(self.quality()),
            average_sync_gap: self.training.counts().average_sync_gap(),
        }
    }

    fn quality(&self) -> v1::Quality {
        v1::Quality {
            window: self.window().map(write_quality),
            baseline: self.baseline().map(write_quality),
            has_fallen: self.has_quality_fallen(),
            is_held: self.is_held(),
        }
    }

    /// Sets the newest checkpoint that this run has saved or restored.
    pub(crate) fn set_last_checkpoint(&mut self, checkpoint: &str, step: u64) {
        self.checkpoints.last = Some((checkpoint.to_owned(), step));
    }

    /// The step of the newest checkpoint.
    pub(crate) fn last_checkpoint_step(&self) -> Option<u64> {
        self.checkpoints.last.as_ref().map(|(_, step)| *step)
    }

    /// The name of the last checkpoint of the job, once it exists.
    pub(crate) fn final_checkpoint(&self) -> Option<String> {
        let has_all = self.training.ended() || self.training.end_is_saved();
        self.checkpoints.last.as_ref().filter(|_| has_all).map(|(name, _)| name.clone())
    }

    /// Global batches trained.
    pub(crate) fn step(&self) -> u64 {
        self.training.batches_done(self.batches_of_the_slowest())
    }

    /// Global batches that are trained and whose gradients are applied.
    pub(super) fn settled_batches(&self) -> u64 {
        self.training.settled_batches(self.batches_of_the_slowest())
    }

    /// Global batches that no dense worker needs from a loader any more.
    pub(super) fn fetched_batches(&self) -> u64 {
        self.training.fetched_batches(self.batches_of_the_slowest())
    }

    /// Global batches of the slowest worker that trains with a barrier.
    pub(super) fn batches_of_the_slowest(&self) -> u64 {
        self.progress
            .ranks
            .iter()
            .take(self.training.barrier_workers() as usize)
            .map(|rank| rank.steps_done)
            .min()
            .unwrap_or(0)
    }

    /// Mean AUC over the dense workers that train.
    fn running_auc(&self) -> Option<f64> {
        self.mean_of_workers(|rank| rank.running_auc)
    }

    /// Mean norm of the dense gradients of each dense worker's last step. Not finite if one is not.
    pub(crate) fn gradient_norm(&self) -> Option<f64> {
        self.mean_of_workers(|rank| rank.gradient_norm)
    }

    /// Mean over the dense workers that train and have the figure.
    fn mean_of_workers(&self, figure: impl Fn(&DenseWorkerState) -> Option<f64>) -> Option<f64> {
        // With a barrier, the other workers only wait and repeat an old value.
        let train = match self.training.mode().family() {
            Family::Barrier => self.training.barrier_workers(),
            Family::Tokens | Family::Replicas => u32::MAX,
        };
        let known: Vec<f64> = self.progress.ranks.iter().take(train as usize).filter_map(figure).collect();
        (!known.is_empty()).then(|| known.iter().sum::<f64>() / known.len() as f64)
    }

    /// The quality of the latest predictions; `None` before the first one.
    pub(crate) fn window(&self) -> Option<WindowQuality> {
        self.progress.window.metrics().map(quality_of)
    }

    /// The quality of the frozen model; `None` before its first prediction, or if there is none.
    pub(crate) fn baseline(&self) -> Option<WindowQuality> {
        self.progress.baseline.metrics().map(quality_of)
    }

    fn samples_per_second(&self) -> f64 {
        self.progress.throughput.per_second(Instant::now())
    }

    /// A member still waits for another one.
    pub(crate) fn note_wait(&mut self, waiting: &v1::Waiting) {
        let now = Instant::now();
        self.progress.slowest.wait(waiting, now);
        self.name_slowest(now);
    }

    /// A dense worker's report, with its wait for data as time spent on the loader that training
    /// waited for. In other modes, workers wait for batches also because of other workers.
    fn with_data_wait(&self, report: &v1::Progress, now: Instant) -> v1::Progress {
        let mut report = report.clone();
        let waits_for_data_only = match self.training.mode() {
            TrainingMode::Tokens(mode) => matches!(mode, TokenMode::Gba { .. } | TokenMode::Async),
            mode => mode.family() == Family::Barrier && mode != TrainingMode::Pulled,
        };
        let loader = self.awaited_loader(now).filter(|_| waits_for_data_only && report.data_wait_seconds > 0.0);
        if let Some(index) = loader {
            let (role, seconds) = (v1::Role::Loader.into(), report.data_wait_seconds);
            report.spent.push(v1::Spent { role, index, seconds });
        }
        report
    }

    /// Names the slowest member, or none. Each change is an event.
    fn name_slowest(&mut self, now: Instant) {
        let change = if self.waits_for_records() {
            self.progress.slowest.rest(now)
        } else {
            let members = Role::MEMBERS.map(|role| (role, self.replicas(role).present));
            let mode = self.training.mode();
            let together = mode.family() == Family::Barrier;
            let setting = Setting { mode: mode.name(), together, members: members.into() };
            self.progress.slowest.decide(&setting, now, now_seconds())
        };
        if let Some(change) = change {
            self.pending_events.push(JobEvent::Warning { message: message_of(change) });
        }
    }

    /// The member that slows training the most. Otherwise a slow one whose work has moved away.
    fn slowest(&self) -> Option<v1::Slowest> {
        let named = self.progress.slowest.named().or_else(|| self.relieved())?;
        let v1::Member { role, index } = member(named.member);
        Some(v1::Slowest { role, index, share: named.share, since_seconds: named.since_seconds })
    }

    /// A slow member whose work has moved away. Training does not wait for it.
    fn relieved(&self) -> Option<Named> {
        let of_roles = [
            (Role::Ps, &self.members.servers.shares),
            (Role::EmbeddingWorker, &self.data.piece_shares),
            (Role::Loader, self.data.loader_pace.shares()),
        ];
        let (role, (index, fell)) = of_roles.into_iter().find_map(|(role, shares)| Some((role, shares.slowest()?)))?;
        let since_seconds = now_seconds().saturating_sub(fell.map_or(0, |fell| fell.elapsed().as_secs()));
        Some(Named { member: (role, index), share: 0.0, since_seconds })
    }

    /// The time without a step, while training makes none for longer than usual.
    fn no_step(&self, now: Instant) -> Option<v1::NoStep> {
        let idle = self.progress.throughput.overdue(now)?;
        let waits_for = self.progress.slowest.waits_for(now);
        let waits_for = waits_for.or_else(|| Some((Role::Loader, self.reading_loader()?))).map(member);
        // Progress without rows: the slots move, a checkpoint is written, a loader skips data.
        let is_busy = self.progress.progressed.elapsed() < idle / 2;
        (!is_busy).then_some(v1::NoStep { seconds: idle.as_secs_f64(), waits_for })
    }

    fn rank_mut(&mut self, what: &'static str, rank: u32) -> Result<&mut DenseWorkerState, RoleError> {
        let ranks = self.progress.ranks.len();
        self.progress.ranks.get_mut(rank as usize).ok_or_else(|| RoleError::Inconsistent {
            message: what,
            reason: format!("dense worker {rank} is not one of {ranks}"),
        })
    }

    /// Wall-clock time of training, including earlier runs.
    pub(super) fn training_seconds(&self) -> f64 {
        let of_rank = |rank: &DenseWorkerState| rank.training_seconds_before + rank.training_seconds;
        self.progress.seconds_before + self.progress.ranks.iter().map(of_rank).fold(0.0, f64::max)
    }
}

/// The watch of a run. After a rollback, it compares with the quality before the fall at first.
fn watch(saved: Option<&Snapshot>) -> QualityWatch {
    let Some(saved) = saved else { return QualityWatch::default() };
    match &saved.rolled_back {
        Some(rolled_back) => QualityWatch::after_rollback(rolled_back.usual, saved.samples),
        None => QualityWatch::default(),
    }
}

fn write_lag(lag: StreamLag, partitions: u32) -> v1::StreamLag {
    let StreamLag { rows, seconds, event_time, lost_records, .. } = lag;
    v1::StreamLag { rows, seconds, event_time, lost_records, partitions }
}

fn quality_of(metrics: WindowMetrics) -> WindowQuality {
    let WindowMetrics { auc, normalized_entropy, calibration, samples } = metrics;
    WindowQuality { auc, normalized_entropy, calibration, rows: samples }
}

fn write_quality(quality: WindowQuality) -> v1::WindowQuality {
    let WindowQuality { auc, normalized_entropy, calibration, rows } = quality;
    v1::WindowQuality { auc, normalized_entropy, calibration, rows }
}

/// The sentence about a change of the quality. `frozen` is the measure of the frozen model.
fn quality_message(rule: &RegressionRule, change: QualityChange, frozen: Option<f64>) -> String {
    let QualityChange { has_fallen, now, usual } = change;
    let title = rule.metric.title();
    let beside = frozen.map_or_else(String::new, |frozen| format!("; the frozen model has {frozen:.4}"));
    let facts = format!("the {title} of the latest predictions is {now:.4}, and it was {usual:.4} before{beside}");
    match (has_fallen, rule.action) {
        (true, RegressionAction::Alert) => format!("the quality has fallen: {facts}"),
        (true, RegressionAction::Rollback) => format!("the quality has fallen, so training goes back: {facts}"),
        (true, RegressionAction::Pause) => {
            format!(
                "the quality has fallen, so training waits: {facts}; restart the job to go on from its last checkpoint"
            )
        }
        (false, _) => format!("the quality is as before: {facts}"),
    }
}

fn member((role, index): MemberId) -> v1::Member {
    v1::Member { role: v1::Role::from(role).into(), index }
}

fn now_seconds() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs())
}

fn message_of(change: Change) -> String {
    match change {
        Change::Slow(named) => {
            let (role, index) = named.member;
            let percent = 100.0 * named.share;
            format!("{role} {index} is slow: {percent:.0} % of a step's time is spent waiting for it beyond the usual")
        }
        Change::Recovered((role, index)) => format!("{role} {index} no longer slows training"),
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use rectrain_protocol::plan::small_plan;

    use super::*;

    /// A second in which a step waits for the first of three servers most of the time.
    fn second() -> v1::Progress {
        let spent = |index, seconds| v1::Spent { role: v1::Role::Ps.into(), index, seconds };
        let spent = vec![spent(0, 0.7), spent(1, 0.1), spent(2, 0.1)];
        v1::Progress { samples: 1_000, step_seconds: 1.0, spent, ..v1::Progress::default() }
    }

    #[test]
    fn the_norm_of_gradients_is_a_mean_that_keeps_infinity() {
        let mut state = State::new(&small_plan(&["spec.roles.denseWorker.replicas=2"]), None).unwrap();
        assert_eq!(state.gradient_norm(), None);
        let mut report = |rank, gradient_norm| {
            let report = v1::Progress { rank, gradient_norm, ..second() };
            state.apply_progress(&report).unwrap();
            state.gradient_norm()
        };
        assert_eq!(report(1, Some(3.0)), Some(3.0));
        assert_eq!(report(0, Some(1.0)), Some(2.0));
        // A report without a step keeps the norm of the last one.
        assert_eq!(report(0, None), Some(2.0));
        assert_eq!(report(1, Some(f64::INFINITY)), Some(f64::INFINITY));
    }

    #[test]
    fn a_slow_member_stays_named_while_its_work_is_away() {
        let mut state = State::new(&small_plan(&["spec.roles.embeddingWorker.replicas=2"]), None).unwrap();
        assert_eq!(state.slowest(), None);
        state.data.piece_shares.set(1, 3);
        let named = state.slowest().unwrap();
        assert_eq!((named.role(), named.index, named.share), (v1::Role::EmbeddingWorker, 1, 0.0));
        assert!(named.since_seconds.abs_diff(now_seconds()) < 60);
    }

    #[test]
    fn no_member_is_slow_while_training_waits_for_rows() {
        let mut state = State::new(&small_plan(&[]), None).unwrap();
        let setting = Setting { mode: "sync", together: true, members: [(Role::Ps, 3), (Role::DenseWorker, 1)].into() };
        let begun = Instant::now();
        let at = |seconds| begun + Duration::from_secs(seconds);
        for seconds in 0..30 {
            state.progress.slowest.record(&second(), None, at(seconds));
            state.progress.slowest.decide(&setting, at(seconds), seconds);
        }
        state.is_held = true;
        state.name_slowest(at(32));
        assert_eq!(state.slowest().map(|slow| slow.index), Some(0), "it was measured just now");
        state.name_slowest(at(50));
        assert_eq!(state.slowest(), None);
        let told = format!("{:?}", state.pending_events);
        assert!(told.contains("no longer slows training"), "{told}");
    }
}

//! The training data: leases of chunks, what loaders found in them, and replays.

use std::collections::BTreeMap;
use std::time::Instant;

use rectrain_kinds::Family;
use rectrain_modes::loader_pace::LoaderPace;
use rectrain_modes::shares::{PIECES, ShareChange, Shares};
use rectrain_modes::{DataLedger, DataPosition, GlobalStep, JobChunks, Lease, LedgerError};
use rectrain_policy::{LoaderUse, ReplicaCount};
use rectrain_proto::v1;
use serde::{Deserialize, Serialize};

use super::State;
use super::stream::Stream;
use crate::batch_index::Chunk;
use crate::files::FileList;
use crate::in_flight::{InFlightChunks, Leased, Replay};
use crate::loader_use::LoaderUseMeter;
use crate::snapshot::Snapshot;
use rectrain_protocol::Role;
use rectrain_protocol::error::RoleError;
use rectrain_protocol::events::JobEvent;
use rectrain_protocol::plan::JobPlan;
use rectrain_protocol::round_robin::RoundRobin;

/// Batches before the settled ones that a replaced member may fetch again, at most.
pub(super) const FETCHED_AGAIN: u64 = 64;
/// Chunks of a slow loader that are not trained, at most. The last batches of one may be trained
/// together with the next one.
const MOST_AHEAD: usize = 2;

/// The reply to a loader that asks for a chunk to replay.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum ReplayLease {
    Replay(Replay),
    Wait,
    Finished,
}

#[derive(Debug, Default, Serialize, Deserialize)]
pub(super) struct Labels {
    pub(super) sum: f64,
    pub(super) rows: u64,
}

/// The counts of a chunk that a later run may have to read again.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct ChunkRead {
    pub(super) label_sum: f64,
    pub(super) rows: u64,
    pub(super) skipped_rows: u64,
}

/// The training data of a job.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Data {
    pub(super) ledger: DataLedger<JobChunks>,
    /// The stream, if the job trains on one.
    pub(super) stream: Stream,
    /// The number of training files that the first loader found, and their digest.
    pub(super) files: Option<(u64, u64)>,
    /// The list of these files, if the job has checkpoints.
    pub(super) listed: Option<FileList>,
    pub(super) in_flight: InFlightChunks,
    /// Which embedding worker gets which piece.
    pub(super) round_robin: RoundRobin,
    /// The embedding workers' shares of the pieces, by their speed.
    pub(super) piece_shares: Shares,
    /// The loaders' shares of the chunks, by their speed.
    pub(super) loader_pace: LoaderPace,
    #[serde(skip)]
    loader_use: LoaderUseMeter,
    pub(super) labels: Labels,
    pub(super) skipped_rows: u64,
    /// Counts of each chunk, by first batch, from the first chunk that a later run may read again.
    /// Empty without checkpoints.
    pub(super) reads: BTreeMap<u64, ChunkRead>,
    /// The files of the checkpoint that the job resumed from, if nothing is left to train. They may
    /// differ from the ones found now, and the position counts their rows.
    #[serde(default)]
    pub(super) trained_on: Option<FileList>,
}

impl Data {
    pub(super) fn new(plan: &JobPlan, ledger: DataLedger<JobChunks>, saved: Option<&Snapshot>) -> Self {
        let (sum, rows) = saved.map_or((0.0, 0), |saved| saved.labels);
        Self {
            stream: Stream::new(plan, &ledger, saved),
            ledger,
            files: None,
            listed: None,
            in_flight: InFlightChunks::new(plan.batches_per_chunk),
            round_robin: RoundRobin::new(plan.replicas.embedding_worker),
            piece_shares: Shares::default(),
            loader_pace: LoaderPace::default(),
            loader_use: LoaderUseMeter::default(),
            labels: Labels { sum, rows },
            skipped_rows: saved.map_or(0, |saved| saved.skipped_rows),
            reads: BTreeMap::new(),
            trained_on: None,
        }
    }
}

impl State {
    /// The next chunk that `loader` has to replay.
    pub(crate) fn next_replay(&mut self, loader: u32) -> ReplayLease {
        if self.is_leaving_loader(loader) {
            return ReplayLease::Finished;
        }
        let replay = if self.data.in_flight.has_replays() && self.is_active_loader(loader) {
            let trained = self.settled_batches();
            self.data.in_flight.next_replay(loader, trained)
        } else {
            None
        };
        match replay {
            Some(replay) => ReplayLease::Replay(replay),
            None if self.all_trained() => ReplayLease::Finished,
            None => ReplayLease::Wait,
        }
    }

    /// Leases the next chunk to `loader`. Also returns the batches to skip at its beginning, and
    /// the pieces of the next batch.
    pub(crate) fn lease(&mut self, loader: u32) -> (Lease, (u64, u32)) {
        if self.is_leaving_loader(loader) {
            return (Lease::Finished, (0, 0));
        }
        if self.training.restoring() || !self.is_active_loader(loader) || self.is_held() {
            return (Lease::Wait, (0, 0));
        }
        if self.training.data_mut().complete() {
            // A resumed run that has nothing left to train may lie within a chunk. It does not read
            // that chunk: the files may have changed.
            return (Lease::Finished, (0, 0));
        }
        let (loaders, now) = (self.sharing_loaders(), Instant::now());
        let is_over = self.total_steps().is_some_and(|total| self.data.ledger.next_batch() >= total.0);
        if !is_over && loaders.is_some_and(|loaders| !self.may_lease(loader, loaders, now)) {
            return (Lease::Wait, (0, 0));
        }
        let lease = self.data.ledger.lease();
        let Lease::Chunk(chunk) = lease else { return (lease, (0, 0)) };
        let skip = self.training.skip_in_chunk(chunk.first_step.0);
        self.data.in_flight.drop_trained_before(self.settled_batches());
        self.data.in_flight.lease_to(Leased::Train { lease: chunk, skip }, loader);
        let number = (chunk.epoch, chunk.chunk);
        self.data.loader_use.begins(loader, number, now);
        if loaders.is_some() {
            self.data.loader_pace.leased(number, loader, chunk.max_batches, now);
            if self.data.loader_pace.is_slow(loader) {
                self.read_twice(number);
            }
        }
        (lease, skip)
    }

    /// Whether `loader`, one of so many, may have the next chunk now. A slow one must not be far
    /// ahead of training. Another loader sends its chunks, so nothing else would hold it back, and
    /// the other loader would have to keep them all.
    fn may_lease(&self, loader: u32, loaders: u32, now: Instant) -> bool {
        let pace = &self.data.loader_pace;
        let is_ahead = || self.data.in_flight.chunks_of(loader, self.step()) >= MOST_AHEAD;
        pace.may_lease(loader, loaders, now) && !(pace.is_slow(loader) && is_ahead())
    }

    /// The loaders that share the chunks by their speed; `None` if there is only one, or if they
    /// are about to change. Loaders of a stream wait for records, and a second one could find more
    /// of them.
    fn sharing_loaders(&self) -> Option<u32> {
        let loaders = &self.members.loaders;
        (loaders.is_stable() && loaders.present() > 1 && !self.is_on_stream()).then_some(loaders.present())
    }

    /// Has a second loader read a chunk. Returns whether one is to do so.
    fn read_twice(&mut self, chunk: (u32, u64)) -> bool {
        let is_possible = self.data.in_flight.read_twice(chunk);
        if is_possible {
            self.data.loader_pace.reads_twice(chunk);
        }
        is_possible
    }

    /// Gives a slow loader fewer chunks, and one that has recovered as many as the others. Has a
    /// second loader read the chunk that training waits for, if it is late. Returns whether one is
    /// to do so.
    pub(crate) fn share_chunks(&mut self, now: Instant) -> bool {
        let Some(loaders) = self.sharing_loaders().filter(|_| !self.training.ended()) else {
            self.data.loader_pace.forget();
            return false;
        };
        if let Some(change) = self.data.loader_pace.decide(loaders, now) {
            let ShareChange { member, factor, .. } = change;
            let share = change.share();
            self.pending_events.push(JobEvent::ShareChanged { role: Role::Loader, index: member, share, factor });
        }
        let trained = self.progress.samples;
        let chunk = self.data.in_flight.first_unread();
        let late = chunk.filter(|chunk| self.data.loader_pace.is_late(*chunk, trained, now));
        late.is_some_and(|late| self.read_twice(late))
    }

    /// Sets the weight of a loader.
    pub(super) fn weigh_loader(&mut self, loader: u32, weight: u32) {
        self.data.loader_pace.set(loader, weight);
    }

    /// Notes how long a dense worker has trained, and has waited for data.
    pub(super) fn note_loaders(&mut self, report: &v1::Progress, now: Instant) {
        let v1::Progress { rank, step_seconds, data_wait_seconds, .. } = *report;
        let workers = self.members.dense_workers.present().max(1);
        self.data.loader_pace.passed(step_seconds / f64::from(workers), now);
        self.data.loader_use.waited(rank, data_wait_seconds, step_seconds);
    }

    /// Notes that a loader has read a chunk.
    fn note_read(&mut self, report: &v1::ChunkReport) {
        let (chunk, now) = ((report.epoch, report.chunk), Instant::now());
        if self.data.in_flight.first_unread() == Some(chunk) {
            self.data.loader_pace.arrives(chunk, now);
        }
        self.data.loader_pace.read(chunk, report.loader, now);
        self.data.loader_use.ends(report.loader, chunk, now);
    }

    /// The loader that training has waited for lately. `None` on a stream, whose loaders wait for
    /// records.
    pub(super) fn awaited_loader(&self, now: Instant) -> Option<u32> {
        match self.members.loaders.present() {
            _ if self.is_on_stream() => None,
            1 => Some(0),
            _ => self.data.loader_pace.awaited(now),
        }
    }

    /// The loader that reads the first chunk that is not read yet. `None` on a stream.
    pub(super) fn reading_loader(&self) -> Option<u32> {
        let chunk = self.data.in_flight.first_unread().filter(|_| !self.is_on_stream())?;
        match self.members.loaders.present() {
            1 => Some(0),
            _ => self.data.loader_pace.reader_of(chunk),
        }
    }

    /// The use of the loaders since the last look, and their number. Their use is unknown on a
    /// stream, whose loaders wait for records.
    pub(crate) fn look_at_loaders(&mut self, now: Instant) -> (Option<LoaderUse>, ReplicaCount) {
        let loaders = &self.members.loaders;
        let count = ReplicaCount { wanted: loaders.wanted(), ready: loaders.present() };
        let load = self.data.loader_use.look(count.ready, now);
        (load.filter(|_| !self.is_on_stream()), count)
    }

    /// Whether another loader has read the chunk of this report before, and sends it.
    pub(crate) fn is_sent_by_another(&self, report: &v1::ChunkReport) -> bool {
        let is_read_twice = self.data.loader_pace.is_read_twice((report.epoch, report.chunk));
        is_read_twice && !self.data.ledger.is_on_lease(report.epoch, report.chunk)
    }

    /// A loader has listed the training files. Rows are counted through all files, so a loader with
    /// other files would train rows twice or never.
    pub(crate) fn files_found(&mut self, found: &v1::FilesFound) -> Result<(), RoleError> {
        let v1::FilesFound { loader, files, digest, .. } = *found;
        let list = FileList::read(found);
        let Some((first_files, first_digest)) = self.data.files else {
            self.data.files = Some((files, digest));
            self.data.listed = list;
            return Ok(());
        };
        if first_digest == digest {
            return self.same_content(loader, list.as_ref());
        }
        Err(RoleError::Input(format!(
            "spec.data.train.paths: loader {loader} finds {files} training files, which differ from the {first_files} files at the start of training in name, size or order: files below a glob must not be added, removed or changed while a job trains"
        )))
    }

    /// Checks that files of the names and sizes that the first loader found have their content too.
    fn same_content(&self, loader: u32, list: Option<&FileList>) -> Result<(), RoleError> {
        let lists = self.data.listed.as_ref().zip(list);
        match lists.and_then(|(first, list)| first.difference(list)) {
            None => Ok(()),
            Some(difference) => Err(RoleError::Input(format!(
                "spec.data: loader {loader} finds other training files than at the start of training: {difference}: files must not be changed while a job trains"
            ))),
        }
    }

    /// The training files, once a loader has reported them.
    pub(crate) fn training_files(&self) -> Option<FileList> {
        self.data.files.map(|_| self.data.listed.clone().unwrap_or_default())
    }

    /// Nothing is left to train after a checkpoint on these files. Later checkpoints list them, and
    /// not the files found now.
    pub(crate) fn keep_files(&mut self, trained_on: Option<FileList>) {
        self.data.trained_on = trained_on;
    }

    /// The files for the list in a checkpoint.
    pub(super) fn files_to_save(&self) -> Option<FileList> {
        self.data.trained_on.as_ref().or(self.data.listed.as_ref()).cloned()
    }

    /// Assigns pieces to embedding workers, in training or in the evaluation at a step.
    pub(crate) fn round_robin(&self, evaluation: Option<GlobalStep>) -> &RoundRobin {
        let pass = evaluation.and_then(|at_step| self.evaluation.passes.get(&at_step));
        pass.map_or(&self.data.round_robin, |pass| &pass.round_robin)
    }

    /// Notes how long the embedding workers worked on the pieces that a dense worker fetched.
    pub(super) fn note_pieces(&mut self, report: &v1::Progress, now: Instant) {
        for time in &report.pieces {
            self.data.piece_shares.record(time.embedding_worker, f64::from(time.pieces), time.seconds, now);
        }
        // A late piece stops all dense workers that train steps together, or one of the others.
        let stopped = match self.training.mode().family() {
            Family::Barrier => self.members.dense_workers.present().max(1),
            Family::Tokens | Family::Replicas => 1,
        };
        self.data.piece_shares.passed(report.step_seconds / f64::from(stopped), now);
    }

    /// Gives a slow embedding worker fewer pieces of the batches that no loader has leased yet. One
    /// that has recovered gets as many as the others.
    pub(super) fn share_pieces(&mut self, now: Instant) {
        let workers = self.members.embedding_workers.present();
        let is_stable = self.members.embedding_workers.is_stable() && self.data.round_robin.latest_workers() == workers;
        let settled = self.settled_batches();
        if !is_stable || self.training.ended() || self.data.round_robin.latest_from() > settled {
            self.data.piece_shares.forget();
            return;
        }
        let numbers: Vec<u32> = (0..workers).collect();
        let Some(change) = self.data.piece_shares.decide(&numbers, PIECES, now) else { return };
        self.data.round_robin.forget_before(settled.saturating_sub(FETCHED_AGAIN));
        self.weigh_pieces(workers);
        self.pending_events.push(JobEvent::ShareChanged {
            role: Role::EmbeddingWorker,
            index: change.member,
            share: change.share(),
            factor: change.factor,
        });
    }

    /// Assigns batches that no loader has leased yet to so many embedding workers, by their shares.
    pub(super) fn weigh_pieces(&mut self, workers: u32) {
        let weights: Vec<u32> = (0..workers).map(|worker| self.data.piece_shares.weight(worker)).collect();
        self.data.round_robin.set_weights_from(self.data.ledger.next_batch(), &weights);
    }

    pub(crate) fn chunk_report(&mut self, report: &v1::ChunkReport) -> Result<(), RoleError> {
        self.note_read(report);
        if self.data.in_flight.was_read(report.epoch, report.chunk) || self.is_sent_by_another(report) {
            // The loader that died, its replacement, or a second loader has reported it already.
            return Ok(());
        }
        // A stream's records may be deleted before they are read. The next attempt tells it.
        let resumes = self.job.resumes && !self.is_on_stream();
        let until = self.stream_read(report);
        let lease = self.data.ledger.report(report.epoch, report.chunk, report.rows).map_err(|error| match error {
            LedgerError::DataChanged { .. } if resumes => data_changed(error),
            error => no_rows("train")(error),
        })?;
        self.data.in_flight.mark_read(report.epoch, report.chunk, until);
        if let Some(part) = &report.baseline {
            self.note_baseline(part);
        }
        let rows = report.rows.min(lease.max_batches * self.job.data.global_batch_rows);
        if rows > 0 {
            self.training.data_mut().add(Chunk { epoch: lease.epoch, first_batch: lease.first_step.0, rows });
        }
        if let Some(total) = self.data.ledger.total_steps() {
            self.training.data_mut().end(total.0);
        }
        // Much has to be done before the first batch is trained. Reading counts as progress,
        // because loaders read ahead only a bounded number of chunks.
        self.progress.progressed = Instant::now();
        self.training.advance()?;
        if self.job.has_checkpoints {
            let v1::ChunkReport { label_sum, rows, skipped_rows, .. } = *report;
            self.data.reads.insert(lease.first_step.0, ChunkRead { label_sum, rows, skipped_rows });
            self.forget_settled_reads();
        }
        self.forget_settled_chunks();
        self.data.skipped_rows += report.skipped_rows;
        self.data.labels.sum += report.label_sum;
        self.data.labels.rows += report.rows;
        let first_epoch_read = self.data.ledger.epoch_rows().is_some() && self.data.ledger.on_lease() == 0;
        if first_epoch_read { self.check_labels() } else { Ok(()) }
    }

    /// Global batches of an epoch over the present files; `None` until one was read to its end.
    pub(crate) fn steps_per_epoch(&self) -> Option<u64> {
        let rows = self.data.ledger.epoch_rows()?;
        Some(rows.div_ceil(self.job.data.global_batch_rows.max(1))).filter(|steps| *steps > 0)
    }

    /// Epochs trained, with the present one as a fraction; `None` until the length of one is known.
    pub(crate) fn epoch(&self) -> Option<f64> {
        let first = self.data.ledger.first_pass();
        let steps = self.step().saturating_sub(first.batch);
        Some(f64::from(first.epoch) + steps as f64 / self.steps_per_epoch()? as f64)
    }

    /// Forgets the chunks before the one with the first unsettled batch. Training never pauses
    /// before that batch, so no later run reads them again.
    fn forget_settled_reads(&mut self) {
        let batch = self.settled_batches();
        let epoch = self.training.data_mut().epoch_of(batch);
        let position = DataPosition { batch, epoch, epoch_rows: self.data.ledger.epoch_rows() };
        // A position that the data does not have forgets nothing.
        let _forgotten = self.forget_reads_before(position);
    }

    /// Forgets the chunks that a run that resumes at `position` does not read again.
    pub(super) fn forget_reads_before(&mut self, position: DataPosition) -> Result<(), LedgerError> {
        let first_pass = self.data.ledger.first_pass();
        let read_again = DataLedger::resume_after(self.job.data, position, first_pass)?.next_batch();
        self.data.reads = self.data.reads.split_off(&read_again);
        Ok(())
    }

    /// Checks that the label varies. A constant label cannot be learned and is most likely the
    /// wrong column.
    pub(super) fn check_labels(&self) -> Result<(), RoleError> {
        let Labels { sum, rows } = self.data.labels;
        let value = match rows {
            0 => return Ok(()),
            _ if sum <= 0.0 => 0,
            rows if sum >= rows as f64 => 1,
            _ => return Ok(()),
        };
        Err(RoleError::Input(format!(
            "the label `{}` is {value} in all {rows} rows of training data that were read, so there is nothing to learn: is spec.features.label the right column?",
            self.job.label
        )))
    }

    pub(crate) fn total_steps(&self) -> Option<GlobalStep> {
        self.data.ledger.total_steps()
    }
}

pub(super) fn no_rows(part: &'static str) -> impl Fn(LedgerError) -> RoleError {
    move |error| match error {
        LedgerError::NoRows => RoleError::Input(format!("the {part} data has no rows: check spec.data")),
        other => RoleError::Ledger(other),
    }
}

/// The data differs from the data at the time of the checkpoint.
pub(super) fn data_changed(error: LedgerError) -> RoleError {
    RoleError::Input(format!("spec.data: {error}: is it the data that the checkpoint was trained on?"))
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use rectrain_modes::Rank;
    use rectrain_protocol::batch::{BatchKey, BatchPosition};

    use super::*;
    use rectrain_protocol::plan::small_plan;

    const CHUNK: u64 = 5;

    /// Chunks have [`CHUNK`] global batches of 24 rows.
    fn plan() -> JobPlan {
        small_plan(&["spec.data.shuffle.windowRows=120", "spec.checkpoint.path=/nowhere"])
    }

    #[test]
    fn loaders_that_find_other_files_fail_the_job() {
        let mut state = State::new(&plan(), None).unwrap();
        let found = |loader, files, digest| v1::FilesFound { loader, files, digest, ..v1::FilesFound::default() };
        state.files_found(&found(0, 12, 7)).unwrap();
        state.files_found(&found(1, 12, 7)).unwrap();
        let error = state.files_found(&found(1, 13, 8)).unwrap_err();
        assert!(error.is_user_error() && error.to_string().contains("loader 1 finds 13 training files"), "{error}");
        state.reset_to(&plan(), None).unwrap();
        assert!(state.files_found(&found(0, 12, 9)).is_err(), "also after a reset to a checkpoint");
    }

    /// A second of training in which each embedding worker worked on 20 pieces, for so many seconds
    /// in all.
    fn second(state: &mut State, seconds: [f64; 2], now: Instant) {
        let time = |(worker, seconds)| v1::PieceTime {
            embedding_worker: worker,
            pieces: 20,
            seconds,
            ..v1::PieceTime::default()
        };
        let pieces = (0..).zip(seconds).map(time).collect();
        state.note_pieces(&v1::Progress { step_seconds: 1.0, pieces, ..v1::Progress::default() }, now);
        state.share_pieces(now);
    }

    fn holders(state: &State, batches: std::ops::Range<u64>) -> Vec<usize> {
        let key = |batch| BatchKey { position: BatchPosition::Train(batch), piece: 0 };
        let holder = |batch| state.round_robin(None).assign(key(batch), 1).embedding_worker;
        batches.map(holder).collect()
    }

    #[test]
    fn a_slow_embedding_worker_gets_fewer_pieces_of_batches_not_leased_yet() {
        let mut state = State::new(&small_plan(&["spec.roles.embeddingWorker.replicas=2"]), None).unwrap();
        assert!(matches!(state.data.ledger.lease(), Lease::Chunk(_)));
        let leased = state.data.ledger.next_batch();
        let (before, begun) = (holders(&state, 0..leased), Instant::now());
        for seconds in 0..30 {
            second(&mut state, [0.04, 2.0], begun + Duration::from_secs(seconds));
        }
        assert_eq!(holders(&state, 0..leased), before, "a loader may have sent them");
        let later = holders(&state, leased..leased + 256);
        assert!((1..=5).contains(&later.iter().filter(|worker| **worker == 1).count()), "{later:?}");
        let changed = |event: &&JobEvent| matches!(event, JobEvent::ShareChanged { index: 1, .. });
        assert_eq!(state.pending_events.iter().filter(changed).count(), 1, "the first change is not in force yet");
        // A new number of workers keeps the shares.
        state.weigh_pieces(3);
        let third = holders(&state, leased..leased + 256);
        assert!(third.iter().filter(|worker| **worker == 1).count() < third.len() / 20, "{third:?}");
        assert!(third.iter().filter(|worker| **worker == 2).count() > third.len() / 3, "{third:?}");
    }

    /// A job with two loaders that trains.
    fn with_two_loaders() -> State {
        let plan = small_plan(&["spec.data.shuffle.windowRows=120", "spec.roles.loader.replicas=2"]);
        let mut state = State::new(&plan, None).unwrap();
        state.training.take_calls();
        state.training.begun().unwrap();
        state
    }

    /// The chunk that a loader gets.
    fn leased(state: &mut State, loader: u32) -> u64 {
        match state.lease(loader).0 {
            Lease::Chunk(lease) => lease.chunk,
            other => panic!("{other:?}"),
        }
    }

    fn report(loader: u32, chunk: u64) -> v1::ChunkReport {
        v1::ChunkReport { loader, chunk, rows: CHUNK * 24, label_sum: 3.0, ..v1::ChunkReport::default() }
    }

    #[test]
    fn a_chunk_of_a_slow_loader_is_read_by_another_one_and_counted_once() {
        let mut state = with_two_loaders();
        state.weigh_loader(1, 4);
        let chunk = leased(&mut state, 1);
        assert_eq!(state.next_replay(1), ReplayLease::Wait, "it reads the chunk already");
        let ReplayLease::Replay(replay) = state.next_replay(0) else { panic!("loader 0 reads it too") };
        assert!(replay.report && replay.is_second);
        assert!(!state.is_sent_by_another(&report(0, chunk)), "it is the first");
        state.chunk_report(&report(0, chunk)).unwrap();
        // All of it is trained before the slow loader has read it.
        state.data.in_flight.drop_trained_before(u64::MAX);
        assert!(state.is_sent_by_another(&report(1, chunk)));
        state.chunk_report(&report(1, chunk)).unwrap();
        assert_eq!(state.data.labels.rows, CHUNK * 24);
        assert!(state.chunk_report(&report(1, 99)).is_err(), "it is not on lease");
    }

    #[test]
    fn a_slow_loader_is_not_far_ahead_of_training() {
        let mut state = with_two_loaders();
        for _ in 0..MOST_AHEAD {
            leased(&mut state, 1);
        }
        state.weigh_loader(1, 4);
        // Training stands still, so no other loader leases a chunk.
        let later = Instant::now() + Duration::from_secs(60);
        assert!(!state.may_lease(1, 2, later), "loader 0 would keep a further one");
        assert!(state.may_lease(0, 2, later));
        state.progress.ranks.iter_mut().for_each(|rank| rank.steps_done = CHUNK);
        assert!(state.may_lease(1, 2, later), "its first one is trained");
    }

    #[test]
    fn a_surplus_loader_leaves_when_its_last_batches_are_trained() {
        let mut state = with_two_loaders();
        assert_eq!([0, 1].map(|loader| leased(&mut state, loader)), [0, 1]);
        state.members.loaders.set_wanted(1);
        let mut after = |steps| {
            state.progress.ranks.iter_mut().for_each(|rank| rank.steps_done = steps);
            state.change_loaders();
            state.members.loaders.present()
        };
        assert_eq!([CHUNK, 2 * CHUNK - 1, 2 * CHUNK].map(&mut after), [2, 2, 1]);
    }

    #[test]
    fn a_second_loader_reads_the_chunk_that_training_waits_for() {
        let mut state = with_two_loaders();
        let [late, read] = [1, 0].map(|loader| leased(&mut state, loader));
        state.chunk_report(&report(0, read)).unwrap();
        let begun = Instant::now();
        let mut after = |seconds| state.share_chunks(begun + Duration::from_secs(seconds));
        assert_eq!([0, 1, 3, 4].map(&mut after), [false, false, true, false]);
        let ReplayLease::Replay(replay) = state.next_replay(0) else { panic!("the chunk is late") };
        assert!(matches!(replay.leased, Leased::Train { lease, .. } if lease.chunk == late));
    }

    /// The position counts the rows of the files that were trained. A list of other files beside it
    /// would let a later run continue on them in the middle of an epoch.
    #[test]
    fn a_checkpoint_lists_the_files_that_were_trained() {
        let mut state = State::new(&plan(), None).unwrap();
        let list = |digest| {
            let summary = Some(v1::FilesSummary { bytes: 5, digest });
            v1::FilesFound { files: 2000, digest, summary, ..v1::FilesFound::default() }
        };
        state.files_found(&list(7)).unwrap();
        assert_eq!(state.files_to_save(), FileList::read(&list(7)));
        state.keep_files(FileList::read(&list(3)));
        assert_eq!(state.files_to_save(), FileList::read(&list(3)));
        let found = v1::FilesFound { loader: 1, ..list(7) };
        state.files_found(&found).expect("loaders agree on the files found");
    }

    /// The state stays small however rare checkpoints are. Its label counts are as if nothing had
    /// been forgotten.
    #[test]
    fn chunk_counts_are_kept_while_a_run_may_read_them_again() {
        let plan = plan();
        let mut state = State::new(&plan, None).unwrap();
        state.training.take_calls();
        state.training.begun().unwrap();
        // Grants at most two batches ahead.
        state.training.set_pace(0.0);
        let mut trained = 0;
        for chunk in 0..10_u32 {
            let Lease::Chunk(lease) = state.data.ledger.lease() else { panic!("there is more") };
            assert_eq!(lease.first_step.0, u64::from(chunk) * CHUNK);
            let (label_sum, rows) = (f64::from(chunk) + 1.0, CHUNK * 24);
            let report =
                v1::ChunkReport { chunk: lease.chunk, rows, label_sum, skipped_rows: 1, ..v1::ChunkReport::default() };
            state.chunk_report(&report).unwrap();
            assert!(state.data.reads.len() <= 2, "{}", state.data.reads.len());
            // The last chunk is trained only in part.
            let until = lease.first_step.0 + if chunk == 9 { 2 } else { CHUNK };
            while trained < until {
                (trained, _) = state.training.horizon(1, trained, trained).unwrap().unwrap();
                state.progress.ranks[0].steps_done = trained;
            }
        }
        assert!((46..50).contains(&trained), "{trained}");
        state.training.request_save();
        state.training.advance().unwrap();
        state.training.next_order(Rank(0), 1).unwrap();
        let saved = state.save(&plan, &[]).unwrap();
        assert_eq!((saved.position().batch, saved.skipped_rows), (trained, 9));
        assert_eq!(saved.labels, ((1..10).sum::<u64>() as f64, 9 * CHUNK * 24));
    }
}

//! Handlers of the members' requests. A request that cannot be answered yet waits until it can.

use std::ops::Range;
use std::time::{Duration, Instant};

use rectrain_kinds::Start;
use rectrain_modes::{ChunkLease, GlobalStep, Lease, Rank, TrainingMode};
use rectrain_proto::v1;
use rectrain_proto::v1::pull_reply::Reply as PullReply;
use rectrain_wire::{BoxFuture, Frame, Peer, Refusal, RefusalCode, Service, Tensor};

use super::Coordinator;
use super::in_flight::{Leased, Replay};
use super::state::{EvaluationLease, Part, ReplayLease, State};
use super::training::{PiecePull, Pulled, RepairReply};
use rectrain_protocol::deadline::WHOLE_JOB;
use rectrain_protocol::error::RoleError;
use rectrain_protocol::events::{JobEvent, WindowQuality};
use rectrain_protocol::failure::{Divergence, JobFailure};
use rectrain_protocol::message::{self, Done, Request};
use rectrain_protocol::round_robin::RoundRobin;

/// How long a request waits before the coordinator tells the caller to retry.
const LONG_POLL: Duration = Duration::from_secs(20);

const SUPERSEDED: &str = "another process has replaced this member";

impl Service for Coordinator {
    fn call<'a>(&'a self, _peer: &'a Peer, frame: Frame) -> BoxFuture<'a, Result<Frame, Refusal>> {
        Box::pin(async move {
            let caller = message::caller(&frame)?;
            if caller.attempt != 0 && caller.attempt != self.attempt {
                return Err(refuse("the coordinator leads another attempt of the job"));
            }
            let (is_superseded, earlier_reply) = {
                let state = self.lock();
                (state.is_superseded(&caller), state.replies.get(&caller))
            };
            if is_superseded {
                return Err(refuse(SUPERSEDED));
            }
            // Callers repeat parts of a share, and a request for the attempt changes nothing. These
            // two replies need no journal. A parameter server asks for the attempt before it can
            // get a copy of the journal.
            let needs_journal = ![v1::AttemptRequest::KIND, v1::EvaluationPart::KIND].contains(&frame.kind);
            let reply = match earlier_reply {
                Some(reply) => Ok(reply),
                None => self.answer(&caller, frame).await,
            };
            // A refusal may report a failure of the job. A superseded coordinator must not send it.
            if needs_journal || reply.is_err() {
                self.journaled().await;
            }
            reply
        })
    }
}

impl Coordinator {
    async fn answer(&self, caller: &v1::Caller, frame: Frame) -> Result<Frame, Refusal> {
        Ok(match frame.kind {
            v1::Join::KIND => self.join(caller, read(frame)?).await?,
            v1::LeaseRequest::KIND => self.lease(caller, read::<v1::LeaseRequest>(frame)?.loader).await?,
            v1::ChunkReport::KIND => self.chunk_report(caller, &read(frame)?)?,
            v1::FilesFound::KIND => self.files_found(caller, &read(frame)?)?,
            v1::StreamFound::KIND => self.stream_found(caller, &read(frame)?)?,
            v1::FilesSeen::KIND => self.files_seen(caller, &read(frame)?)?,
            v1::Reading::KIND => self.reading(read(frame)?),
            v1::Waiting::KIND => self.waiting(&read(frame)?),
            v1::OrderRequest::KIND => self.order(caller, read(frame)?).await?,
            v1::HorizonRequest::KIND => self.horizon(caller, read(frame)?).await?,
            v1::RingRequest::KIND => self.ring(read(frame)?).await?,
            v1::MendRequest::KIND => self.repair_ring(caller, read(frame)?).await?,
            v1::PullRequest::KIND => self.pull(caller, read(frame)?).await?,
            v1::PieceReport::KIND => self.piece_report(caller, &read(frame)?)?,
            v1::BatchReport::KIND => self.batch_report(caller, &read(frame)?)?,
            v1::EvaluationLeaseRequest::KIND => {
                self.evaluation_lease(caller, read::<v1::EvaluationLeaseRequest>(frame)?.loader).await?
            }
            v1::RepeatRequest::KIND => self.next_replay(caller, read::<v1::RepeatRequest>(frame)?.loader).await?,
            v1::EvaluationChunkReport::KIND => self.evaluation_chunk_report(caller, &read(frame)?)?,
            v1::EvaluationPart::KIND => {
                let (part, tensors) = message::read(frame)?;
                self.evaluation_part(part, tensors)?
            }
            v1::EvaluationShare::KIND => self.evaluation_share(caller, read(frame)?)?,
            v1::Progress::KIND => self.progress(caller, &read(frame)?)?,
            v1::TrainingDone::KIND => self.training_done(caller, read(frame)?)?,
            v1::DenseSaved::KIND => {
                self.dense_saved(read(frame)?)?;
                message::done::<v1::DenseSaved>()
            }
            v1::Leave::KIND => self.drain_member(&read(frame)?).await,
            v1::Farewell::KIND => self.farewell(caller, read(frame)?)?,
            v1::JobEndRequest::KIND => self.job_end(caller, read(frame)?).await?,
            v1::AttemptRequest::KIND => self.attempt(read(frame)?),
            v1::MapRequest::KIND => self.map(read(frame)?).await?,
            v1::Failure::KIND => self.member_failed(read(frame)?),
            kind => return Err(message::refuse_kind("coordinator", kind)),
        })
    }

    fn chunk_report(&self, caller: &v1::Caller, report: &v1::ChunkReport) -> Result<Frame, RoleError> {
        self.apply_and_reply::<v1::ChunkReport>(caller, |state| {
            let sent_by_another = state.is_sent_by_another(report);
            state.chunk_report(report)?;
            Ok(v1::Reported { sent_by_another, ..reported(state) })
        })
    }

    fn evaluation_chunk_report(
        &self,
        caller: &v1::Caller,
        report: &v1::EvaluationChunkReport,
    ) -> Result<Frame, RoleError> {
        self.apply_and_reply::<v1::EvaluationChunkReport>(caller, |state| {
            state.evaluation_chunk_report(report)?;
            Ok(reported(state))
        })
    }

    fn files_found(&self, caller: &v1::Caller, found: &v1::FilesFound) -> Result<Frame, RoleError> {
        self.apply::<v1::FilesFound>(caller, |state| state.files_found(found))
    }

    fn stream_found(&self, caller: &v1::Caller, found: &v1::StreamFound) -> Result<Frame, RoleError> {
        let known = self.apply_and_reply::<v1::StreamFound>(caller, |state| state.stream_found(found))?;
        if let Some(lag) = self.lock().stream_lag() {
            self.metrics.set_stream_lag(&lag);
        }
        Ok(known)
    }

    fn files_seen(&self, caller: &v1::Caller, seen: &v1::FilesSeen) -> Result<Frame, RoleError> {
        let wanted = self.apply_and_reply::<v1::FilesSeen>(caller, |state| state.files_seen(seen))?;
        let state = self.lock();
        if let Some(lag) = state.stream_lag() {
            self.metrics.set_stream_lag(&lag);
        }
        if let Some(files) = state.followed_files() {
            self.metrics.set_followed(&files);
        }
        drop(state);
        Ok(wanted)
    }

    fn reading(&self, _reading: v1::Reading) -> Frame {
        self.lock().note_loader_progress();
        message::done::<v1::Reading>()
    }

    fn waiting(&self, waiting: &v1::Waiting) -> Frame {
        self.lock().note_wait(waiting);
        message::done::<v1::Waiting>()
    }

    fn batch_report(&self, caller: &v1::Caller, report: &v1::BatchReport) -> Result<Frame, RoleError> {
        self.apply::<v1::BatchReport>(caller, |state| state.batch_report(report))
    }

    fn piece_report(&self, caller: &v1::Caller, report: &v1::PieceReport) -> Result<Frame, RoleError> {
        self.apply_and_reply::<v1::PieceReport>(caller, |state| {
            Ok(v1::PieceReported { counts: state.piece_report(report)? })
        })
    }

    fn progress(&self, caller: &v1::Caller, report: &v1::Progress) -> Result<Frame, RoleError> {
        let mut event = None;
        let done = self.apply::<v1::Progress>(caller, |state| {
            event = state.apply_progress(report)?;
            Ok(())
        })?;
        if let Some(JobEvent::Progress { window, baseline, .. }) = &event {
            self.show_quality(window.as_ref(), baseline.as_ref());
        }
        self.publish(event.into_iter().collect());
        Ok(done)
    }

    fn show_quality(&self, window: Option<&WindowQuality>, baseline: Option<&WindowQuality>) {
        if let Some(window) = window {
            self.metrics.set_window(window);
        }
        if let Some(baseline) = baseline {
            self.metrics.set_baseline(baseline);
        }
        let (has_fallen, is_held) = {
            let state = self.lock();
            (state.has_quality_fallen(), state.is_held())
        };
        self.metrics.quality_fallen.set(i64::from(has_fallen));
        self.metrics.training_held.set(i64::from(is_held));
    }

    fn training_done(&self, caller: &v1::Caller, done: v1::TrainingDone) -> Result<Frame, RoleError> {
        self.apply::<v1::TrainingDone>(caller, |state| state.training_done(done))
    }

    fn farewell(&self, caller: &v1::Caller, farewell: v1::Farewell) -> Result<Frame, RoleError> {
        self.apply::<v1::Farewell>(caller, |state| {
            state.farewell(farewell);
            Ok(())
        })
    }

    fn attempt(&self, _request: v1::AttemptRequest) -> Frame {
        let budget = self.lock().budget;
        message::reply::<v1::AttemptRequest>(&v1::Attempt { attempt: self.attempt, budget }, Vec::new())
    }

    async fn map(&self, _request: v1::MapRequest) -> Result<Frame, RoleError> {
        Ok(message::reply::<v1::MapRequest>(&self.directory().await?, Vec::new()))
    }

    fn member_failed(&self, failure: v1::Failure) -> Frame {
        let v1::Failure { message, user_error, divergence, .. } = failure;
        let divergence = divergence.as_ref().map(Divergence::read);
        self.lock().fail(JobFailure { message, user_error, divergence });
        self.changed.notify_waiters();
        message::done::<v1::Failure>()
    }

    /// Applies a report once and replies [`Done`].
    fn apply<R: Request<Reply = Done>>(
        &self,
        caller: &v1::Caller,
        change: impl FnOnce(&mut State) -> Result<(), RoleError>,
    ) -> Result<Frame, RoleError> {
        self.apply_and_reply::<R>(caller, |state| change(state).map(|()| Done {}))
    }

    /// Applies a request once and replies. A repeated request gets the first reply.
    fn apply_and_reply<R: Request>(
        &self,
        caller: &v1::Caller,
        change: impl FnOnce(&mut State) -> Result<R::Reply, RoleError>,
    ) -> Result<Frame, RoleError> {
        self.change(|state| {
            if let Some(reply) = state.replies.get(caller) {
                return Ok(reply);
            }
            let reply = message::reply::<R>(&change(state)?, Vec::new());
            state.replies.insert(caller, &reply);
            Ok(reply)
        })
    }

    pub(super) async fn join(&self, caller: &v1::Caller, request: v1::Join) -> Result<Frame, RoleError> {
        if self.lock().job_end().is_none() {
            let roster = async {
                if request.attempt != 0 && request.attempt != self.attempt {
                    let reason = "its rows belong to another attempt".to_owned();
                    return Err(RoleError::Inconsistent { message: "join", reason });
                }
                let joined = self.change(|state| {
                    if state.replies.mark_applied(caller) { state.join(caller, &request) } else { Ok(None) }
                })?;
                if let Some(rejoined) = joined {
                    self.metrics.rejoins.inc();
                    self.events.push(rejoined);
                    if let (v1::Role::Ps, Some(copies)) = (request.role(), &self.copies) {
                        copies.wait_again_for(request.index);
                    }
                    let is_writer = request.role() == v1::Role::DenseWorker && request.index == 0;
                    if is_writer && !self.lock().training().is_saving_dense() {
                        self.fail_dense_file();
                    }
                }
                self.wait_until(WHOLE_JOB, State::roster).await
            };
            match roster.await {
                Err(RoleError::JobFailed { .. }) => {}
                roster => {
                    let roster = v1::Roster { attempt: self.attempt, ..roster? };
                    return Ok(message::reply::<v1::Join>(&roster, Vec::new()));
                }
            }
        }
        // A member cannot join a job that has ended. Its `job_end` request returns how it ended.
        std::future::pending().await
    }

    pub(super) async fn lease(&self, caller: &v1::Caller, loader: u32) -> Result<Frame, RoleError> {
        use v1::lease_reply::Lease as Reply;
        let reply = |lease| v1::LeaseReply { lease: Some(lease) };
        let lease = reply_once::<v1::LeaseRequest>(caller, |state| match state.lease(loader) {
            (Lease::Chunk(lease), skip) => {
                let file = state.followed_file(&lease);
                Ok(Some(reply(Reply::Chunk(write_lease(lease, skip, state.round_robin(None), file)))))
            }
            (Lease::Finished, _) => Ok(Some(reply(Reply::Finished(v1::Finished {})))),
            (Lease::Wait, _) => Ok(None),
        });
        let [nothing, wait] = [Reply::Finished(v1::Finished {}), Reply::Wait(v1::Wait {})]
            .map(|lease| message::reply::<v1::LeaseRequest>(&reply(lease), Vec::new()));
        let lease = or_retry(self.until_loader_replaced(loader, nothing, lease).await, wait)?;
        self.changed.notify_waiters();
        Ok(lease)
    }

    async fn evaluation_lease(&self, caller: &v1::Caller, loader: u32) -> Result<Frame, RoleError> {
        use v1::evaluation_lease_reply::Lease as Reply;
        let reply = |lease| v1::EvaluationLeaseReply { lease: Some(lease) };
        let lease = reply_once::<v1::EvaluationLeaseRequest>(caller, |state| {
            let lease = match state.evaluation_lease(loader) {
                EvaluationLease::Chunk { at_step, chunk, first_batch } => {
                    let turns = state.round_robin(Some(at_step)).write();
                    Some(Reply::Chunk(v1::EvaluationChunk { at_step: at_step.0, chunk, first_batch, turns }))
                }
                EvaluationLease::Finished => Some(Reply::Finished(v1::Finished {})),
                EvaluationLease::Wait => None,
            };
            Ok(lease.map(reply))
        });
        let [nothing, wait] = [Reply::Finished(v1::Finished {}), Reply::Wait(v1::Wait {})]
            .map(|lease| message::reply::<v1::EvaluationLeaseRequest>(&reply(lease), Vec::new()));
        or_retry(self.until_loader_replaced(loader, nothing, lease).await, wait)
    }

    pub(super) async fn next_replay(&self, caller: &v1::Caller, loader: u32) -> Result<Frame, RoleError> {
        use v1::repeat_reply::Repeat as Reply;
        let finished =
            || v1::RepeatReply { repeat: Some(Reply::Finished(v1::Finished {})), ..v1::RepeatReply::default() };
        let repeat = reply_once::<v1::RepeatRequest>(caller, |state| {
            let embedding_worker_successions = state.embedding_worker_successions();
            Ok(match state.next_replay(loader) {
                ReplayLease::Replay(Replay { leased, embedding_worker, pieces, report, is_second }) => {
                    self.metrics.chunks_read_twice.inc_by(u64::from(is_second));
                    let range = |Range { start, end }| v1::PieceRange { start, end };
                    let pieces = pieces.unwrap_or_default().into_iter().map(range).collect();
                    let repeat = Some(match leased {
                        Leased::Train { lease, skip } => {
                            let file = state.followed_file(&lease);
                            Reply::Chunk(write_lease(lease, skip, state.round_robin(None), file))
                        }
                        Leased::Evaluation { at_step, chunk, first_batch } => {
                            let turns = state.round_robin(Some(at_step)).write();
                            Reply::Evaluation(v1::EvaluationChunk { at_step: at_step.0, chunk, first_batch, turns })
                        }
                    });
                    Some(v1::RepeatReply { repeat, embedding_worker, pieces, report, embedding_worker_successions })
                }
                ReplayLease::Finished => Some(finished()),
                ReplayLease::Wait => None,
            })
        });
        let wait = v1::RepeatReply { repeat: Some(Reply::Wait(v1::Wait {})), ..v1::RepeatReply::default() };
        let [nothing, wait] = [finished(), wait].map(|reply| message::reply::<v1::RepeatRequest>(&reply, Vec::new()));
        or_retry(self.until_loader_replaced(loader, nothing, repeat).await, wait)
    }

    async fn order(&self, caller: &v1::Caller, request: v1::OrderRequest) -> Result<Frame, RoleError> {
        let (rank, done) = (Rank(request.rank), request.done);
        let order = reply_once::<v1::OrderRequest>(caller, |state| state.training().next_order(rank, done));
        let wait = v1::Order { order: Some(v1::order::Order::Wait(v1::Wait {})), ..v1::Order::default() };
        let wait = message::reply::<v1::OrderRequest>(&wait, Vec::new());
        or_retry(self.until_replaced(rank, wait.clone(), order).await, wait)
    }

    /// Waits for `ready` on behalf of dense worker `rank`. Returns `nothing` as soon as another
    /// process replaces that worker, because the caller may be dead.
    async fn until_replaced<T: Clone>(
        &self,
        rank: Rank,
        nothing: T,
        mut ready: impl FnMut(&mut State) -> Result<Option<T>, RoleError>,
    ) -> Result<T, RoleError> {
        let replacements = self.lock().training().replacements(rank);
        self.try_then_wait(LONG_POLL, |state| {
            let is_there = state.training().replacements(rank) == replacements;
            if is_there { ready(state) } else { Ok(Some(nothing.clone())) }
        })
        .await
    }

    async fn ring(&self, request: v1::RingRequest) -> Result<Frame, RoleError> {
        let ring = self.wait_until(LONG_POLL, |state| Ok(state.training().ring_after(request.ring)));
        let ring = or_retry(ring.await, request.ring)?;
        Ok(message::reply::<v1::RingRequest>(&v1::Ring { ring }, Vec::new()))
    }

    async fn repair_ring(&self, caller: &v1::Caller, request: v1::MendRequest) -> Result<Frame, RoleError> {
        let v1::MendRequest { rank, ring, step } = request;
        let mended = reply_once::<v1::MendRequest>(caller, |state| {
            let mended = state.training().repair_ring(Rank(rank), ring, step.map(GlobalStep))?;
            if let (Some(RepairReply::Resume { batch, .. }), None) = (mended, step) {
                let share = self.plan.share(Rank(rank), state.training().barrier_workers());
                state.resume_worker_at(Rank(rank), batch, &share);
            }
            Ok(mended.map(|mended| match mended {
                RepairReply::Superseded { by } => v1::Mended { ring: by, ..v1::Mended::default() },
                RepairReply::Resume { step, donor, .. } => {
                    let (_, dense_workers) = state.workers();
                    v1::Mended { ring, waits: false, step: step.0, donor: donor.0, dense_workers }
                }
            }))
        });
        let wait = v1::Mended { ring, waits: true, ..v1::Mended::default() };
        let wait = message::reply::<v1::MendRequest>(&wait, Vec::new());
        or_retry(self.try_then_wait(LONG_POLL, mended).await, wait)
    }

    async fn horizon(&self, caller: &v1::Caller, request: v1::HorizonRequest) -> Result<Frame, RoleError> {
        let v1::HorizonRequest { rank, order, from, at } = request;
        {
            let mut state = self.lock();
            if let Some((_, at_step)) = state.training().evaluating().filter(|(number, _)| *number == order) {
                state.evaluation_asked(at_step, Rank(rank), at);
            }
        }
        let horizon = reply_once::<v1::HorizonRequest>(caller, |state| match state.training().evaluating() {
            Some((number, at_step)) if number == order => state.evaluation_horizon(at_step, from),
            _ => state.horizon(order, from, at),
        });
        let wait = v1::Horizon { until: from, last: false, turns: Vec::new() };
        let wait = message::reply::<v1::HorizonRequest>(&wait, Vec::new());
        or_retry(self.try_then_wait(LONG_POLL, horizon).await, wait)
    }

    /// Hands out a piece. If there is none, waits until there is: others may change something, or a
    /// piece may become late.
    async fn pull_piece(&self, caller: &v1::Caller, request: v1::PullRequest) -> Result<Frame, RoleError> {
        let rank = Rank(request.rank);
        let nothing = pull_reply(PullReply::Wait(v1::Wait {}));
        let replacements = self.lock().training().replacements(rank);
        let until = Instant::now() + LONG_POLL;
        let mut end = until;
        loop {
            let ready = |state: &mut State| {
                if state.training().replacements(rank) != replacements {
                    return Ok(Some(PieceWait::Ends(nothing.clone())));
                }
                if let Some(reply) = state.replies.get(caller) {
                    return Ok(Some(PieceWait::Ends(reply)));
                }
                let pulled = state.training().pull_piece(rank, request.order, Instant::now())?;
                if let PiecePull::Wait(next_late) = pulled {
                    return Ok(next_late.filter(|late| *late < end).map(PieceWait::Sooner));
                }
                let reply = pull_reply(self.piece_reply(state, pulled));
                state.replies.insert(caller, &reply);
                Ok(Some(PieceWait::Ends(reply)))
            };
            match self.try_then_wait(end.saturating_duration_since(Instant::now()), ready).await {
                Ok(PieceWait::Ends(reply)) => return Ok(reply),
                Ok(PieceWait::Sooner(late)) => end = late,
                Err(RoleError::Task { .. }) if Instant::now() < until => end = until,
                Err(RoleError::Task { .. }) => return Ok(nothing),
                Err(error) => return Err(error),
            }
        }
    }

    fn piece_reply(&self, state: &State, pulled: PiecePull) -> PullReply {
        match pulled {
            PiecePull::Wait(_) => PullReply::Wait(v1::Wait {}),
            PiecePull::Pause => PullReply::Rest(v1::Finished {}),
            PiecePull::Piece { piece, key, is_second } => {
                self.metrics.pieces_pulled_twice.inc_by(u64::from(is_second));
                let assigned = state.round_robin(None).assign(key, self.plan.pieces());
                PullReply::Piece(v1::PulledPiece {
                    piece: Some(v1::StepPiece { step: piece.step.0, piece: piece.piece.0 }),
                    batch: Some(key.write()),
                    embedding_worker: assigned.embedding_worker as u32,
                })
            }
        }
    }

    async fn pull(&self, caller: &v1::Caller, request: v1::PullRequest) -> Result<Frame, RoleError> {
        use v1::pull_reply::Reply;
        let (rank, order) = (Rank(request.rank), request.order);
        if self.lock().training().mode() == TrainingMode::Pulled {
            return self.pull_piece(caller, request).await;
        }
        let reply = |reply| v1::PullReply { reply: Some(reply) };
        let pulled = reply_once::<v1::PullRequest>(caller, |state| {
            let pulled = state.training().pull(rank, order)?;
            let round_robin = state.round_robin(None);
            Ok(pulled.map(|pulled| {
                reply(match pulled {
                    Pulled::Work { assignment, oldest_token, key } => Reply::Assignment(v1::Assignment {
                        embedding_worker: round_robin.assign(key, self.plan.pieces()).embedding_worker as u32,
                        first_row: assignment.batch.first_row,
                        rows: assignment.batch.rows,
                        token: assignment.token.0,
                        oldest_token,
                        batch: Some(key.write()),
                    }),
                    Pulled::Pause => Reply::Rest(v1::Finished {}),
                })
            }))
        });
        let wait = message::reply::<v1::PullRequest>(&reply(Reply::Wait(v1::Wait {})), Vec::new());
        or_retry(self.until_replaced(rank, wait.clone(), pulled).await, wait)
    }

    fn evaluation_part(&self, request: v1::EvaluationPart, tensors: Vec<Tensor>) -> Result<Frame, RoleError> {
        let v1::EvaluationPart { rank, at_step, first } = request;
        let [predictions, labels, groups] = message::take("evaluation_part", tensors)?;
        let (predictions, labels) = (predictions.expect_f32("predictions")?, labels.expect_f32("labels")?);
        let part = Part::new(predictions, labels, groups.expect_u64("groups")?)?;
        let rows = self.change(|state| state.evaluation_part(GlobalStep(at_step), Rank(rank), first, part))?;
        Ok(message::reply::<v1::EvaluationPart>(&v1::EvaluationRows { rows }, Vec::new()))
    }

    fn evaluation_share(&self, caller: &v1::Caller, request: v1::EvaluationShare) -> Result<Frame, RoleError> {
        let mut finished = Vec::new();
        let reply = self.apply_and_reply::<v1::EvaluationShare>(caller, |state| {
            let (rows, events) = state.evaluation_share(request)?;
            finished = events;
            Ok(v1::EvaluationRows { rows })
        })?;
        self.publish(finished);
        Ok(reply)
    }

    /// Waits for the end of the job. Refuses a caller as soon as another process replaces it.
    async fn job_end(&self, caller: &v1::Caller, request: v1::JobEndRequest) -> Result<Frame, Refusal> {
        loop {
            let changed = self.changed.notified();
            {
                let state = self.lock();
                if state.is_superseded(caller) {
                    return Err(refuse(SUPERSEDED));
                }
                if let Some(end) = state.member_end(caller, &request) {
                    return Ok(message::reply::<v1::JobEndRequest>(&end, Vec::new()));
                }
            }
            changed.await;
        }
    }

    /// Waits for `ready` on behalf of `loader`. Returns `nothing` as soon as another process
    /// replaces that loader, because the caller may be dead and would not read a chunk.
    async fn until_loader_replaced<T: Clone>(
        &self,
        loader: u32,
        nothing: T,
        mut ready: impl FnMut(&mut State) -> Result<Option<T>, RoleError>,
    ) -> Result<T, RoleError> {
        let replacements = self.lock().loader_replacements(loader);
        let waiting = self.wait_until(LONG_POLL, |state| {
            if state.loader_replacements(loader) == replacements { ready(state) } else { Ok(Some(nothing.clone())) }
        });
        waiting.await
    }
}

/// Reads a request without tensors.
fn read<R: Request>(frame: Frame) -> Result<R, Refusal> {
    Ok(message::read::<R>(frame)?.0)
}

/// Refuses a caller that does not belong to this attempt of the job.
fn refuse(why: &str) -> Refusal {
    Refusal { code: RefusalCode::NotFound, message: why.to_owned(), retryable: false }
}

/// Turns the reply of `ready` into a frame and remembers it. A repeated request of `caller` gets
/// the first reply.
fn reply_once<R: Request>(
    caller: &v1::Caller,
    mut ready: impl FnMut(&mut State) -> Result<Option<R::Reply>, RoleError>,
) -> impl FnMut(&mut State) -> Result<Option<Frame>, RoleError> {
    move |state| {
        if let Some(reply) = state.replies.get(caller) {
            return Ok(Some(reply));
        }
        let reply = ready(state)?.map(|reply| message::reply::<R>(&reply, Vec::new()));
        if let Some(reply) = &reply {
            state.replies.insert(caller, reply);
        }
        Ok(reply)
    }
}

/// How the wait for a piece goes on.
enum PieceWait {
    Ends(Frame),
    /// A piece becomes late at this time, before the end of the wait.
    Sooner(Instant),
}

fn pull_reply(reply: PullReply) -> Frame {
    message::reply::<v1::PullRequest>(&v1::PullReply { reply: Some(reply) }, Vec::new())
}

/// The reply to the report of a chunk.
fn reported(state: &State) -> v1::Reported {
    let embedding_worker_successions = state.embedding_worker_successions();
    v1::Reported { embedding_worker_successions, ..v1::Reported::default() }
}

fn write_lease(
    lease: ChunkLease,
    (skip_batches, skip_pieces): (u64, u32),
    turns: &RoundRobin,
    file: Option<v1::FollowedFile>,
) -> v1::ChunkLease {
    let ChunkLease { epoch, chunk, first_step, max_batches, start, until } = lease;
    let segment = match (start, until) {
        (Start::At(from), Some(until)) => Some(v1::Segment { part: from.part.0, from: from.offset.0, until }),
        _ => None,
    };
    v1::ChunkLease {
        epoch,
        chunk,
        first_step: first_step.0,
        max_batches,
        skip_batches,
        skip_pieces,
        turns: turns.write(),
        segment,
        file,
    }
}

/// Replies `wait` to a request that waited for too long. The caller then retries.
fn or_retry<T>(lease: Result<T, RoleError>, wait: T) -> Result<T, RoleError> {
    match lease {
        Err(RoleError::Task { .. }) => Ok(wait),
        other => other,
    }
}

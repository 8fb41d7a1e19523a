//! What members ask and tell the coordinator, and how they are answered: what cannot be answered yet is held until it can.

use std::ops::Range;
use std::time::Duration;

use rectrain_modes::{ChunkLease, GlobalStep, Lease, Rank};
use rectrain_proto::v1;
use rectrain_wire::{BoxFuture, Frame, Peer, Refusal, RefusalCode, Service, Tensor};

use super::Coordinator;
use super::outstanding::{Given, Repeat};
use super::state::{EvaluationLease, Part, Repeated, State};
use super::training::{Mended, Pulled};
use rectrain_protocol::deadline::WHOLE_JOB;
use rectrain_protocol::error::RoleError;
use rectrain_protocol::events::JobEvent;
use rectrain_protocol::message::{self, Done, Request};
use rectrain_protocol::round_robin::Turns;

/// How long a question for a lease is held before its asker is told to ask again.
const LEASE_HOLD: Duration = Duration::from_secs(20);

const SUPERSEDED: &str = "another has taken this member's place";

impl Service for Coordinator {
    fn call<'a>(&'a self, _peer: &'a Peer, frame: Frame) -> BoxFuture<'a, Result<Frame, Refusal>> {
        Box::pin(async move {
            let caller = message::caller(&frame)?;
            if caller.attempt != 0 && caller.attempt != self.attempt {
                return Err(refuse("the coordinator has begun another attempt of the job"));
            }
            let (is_superseded, asked_before) = {
                let state = self.lock();
                (state.is_superseded(&caller), state.replies.answered(&caller))
            };
            if is_superseded {
                return Err(refuse(SUPERSEDED));
            }
            let is_remembered = ![v1::JobEndRequest::KIND, v1::EvaluationPart::KIND].contains(&frame.kind);
            let reply = match asked_before {
                Some(reply) => reply,
                None => self.answer(&caller, frame).await?,
            };
            // How the job has ended is known when it has; and parts of a share are asked for again.
            if is_remembered {
                self.remembered().await;
            }
            Ok(reply)
        })
    }
}

impl Coordinator {
    async fn answer(&self, caller: &v1::Caller, frame: Frame) -> Result<Frame, Refusal> {
        match frame.kind {
            v1::Join::KIND => Ok(self.join(caller, message::read::<v1::Join>(frame)?.0).await?),
            v1::LeaseRequest::KIND => {
                Ok(self.lease(caller, message::read::<v1::LeaseRequest>(frame)?.0.loader).await?)
            }
            v1::ChunkReport::KIND => {
                let (report, _) = message::read::<v1::ChunkReport>(frame)?;
                Ok(self.hear_and_answer::<v1::ChunkReport>(caller, |state| {
                    state.chunk_report(&report)?;
                    Ok(reported(state))
                })?)
            }
            v1::FilesFound::KIND => {
                let (found, _) = message::read::<v1::FilesFound>(frame)?;
                Ok(self
                    .hear_and_answer::<v1::FilesFound>(caller, |state| state.files_found(&found).map(|()| Done {}))?)
            }
            v1::Reading::KIND => {
                message::read::<v1::Reading>(frame)?;
                self.lock().loader_has_read();
                Ok(message::done::<v1::Reading>())
            }
            v1::OrderRequest::KIND => Ok(self.order(caller, message::read::<v1::OrderRequest>(frame)?.0).await?),
            v1::HorizonRequest::KIND => Ok(self.horizon(caller, message::read::<v1::HorizonRequest>(frame)?.0).await?),
            v1::RingRequest::KIND => Ok(self.ring(message::read::<v1::RingRequest>(frame)?.0).await?),
            v1::MendRequest::KIND => Ok(self.mend(caller, message::read::<v1::MendRequest>(frame)?.0).await?),
            v1::PullRequest::KIND => Ok(self.pull(caller, message::read::<v1::PullRequest>(frame)?.0).await?),
            v1::BatchReport::KIND => {
                let (report, _) = message::read::<v1::BatchReport>(frame)?;
                Ok(self.hear::<v1::BatchReport>(caller, |state| state.batch_report(&report))?)
            }
            v1::EvaluationLeaseRequest::KIND => {
                let (request, _) = message::read::<v1::EvaluationLeaseRequest>(frame)?;
                Ok(self.evaluation_lease(caller, request.loader).await?)
            }
            v1::RepeatRequest::KIND => {
                Ok(self.repeat(caller, message::read::<v1::RepeatRequest>(frame)?.0.loader).await?)
            }
            v1::EvaluationChunkReport::KIND => {
                let (report, _) = message::read::<v1::EvaluationChunkReport>(frame)?;
                Ok(self.hear_and_answer::<v1::EvaluationChunkReport>(caller, |state| {
                    state.evaluation_chunk_report(&report)?;
                    Ok(reported(state))
                })?)
            }
            v1::EvaluationPart::KIND => {
                let (part, tensors) = message::read::<v1::EvaluationPart>(frame)?;
                Ok(self.evaluation_part(part, tensors)?)
            }
            v1::EvaluationShare::KIND => {
                Ok(self.evaluation_share(caller, message::read::<v1::EvaluationShare>(frame)?.0)?)
            }
            v1::Progress::KIND => {
                let (report, _) = message::read::<v1::Progress>(frame)?;
                Ok(self.hear_news::<v1::Progress>(caller, |state| state.take_progress(&report))?)
            }
            v1::TrainingDone::KIND => {
                let (done, _) = message::read::<v1::TrainingDone>(frame)?;
                Ok(self.hear::<v1::TrainingDone>(caller, |state| state.training_done(done))?)
            }
            v1::DenseSaved::KIND => {
                self.dense_saved(message::read::<v1::DenseSaved>(frame)?.0)?;
                Ok(message::done::<v1::DenseSaved>())
            }
            v1::Leave::KIND => Ok(self.let_leave(&message::read::<v1::Leave>(frame)?.0).await),
            v1::Farewell::KIND => {
                let (farewell, _) = message::read::<v1::Farewell>(frame)?;
                Ok(self.hear::<v1::Farewell>(caller, |state| {
                    state.farewell(farewell);
                    Ok(())
                })?)
            }
            v1::JobEndRequest::KIND => self.job_end(caller, message::read::<v1::JobEndRequest>(frame)?.0).await,
            v1::AttemptRequest::KIND => {
                message::read::<v1::AttemptRequest>(frame)?;
                Ok(message::reply::<v1::AttemptRequest>(&v1::Attempt { attempt: self.attempt }, Vec::new()))
            }
            v1::MapRequest::KIND => {
                message::read::<v1::MapRequest>(frame)?;
                Ok(message::reply::<v1::MapRequest>(&self.directory().await?, Vec::new()))
            }
            v1::Failure::KIND => {
                let (failure, _) = message::read::<v1::Failure>(frame)?;
                self.fail(failure.message, failure.user_error);
                Ok(message::done::<v1::Failure>())
            }
            kind => Err(message::refuse_kind("coordinator", kind)),
        }
    }

    /// Takes in what a member tells, once, and answers that it is done.
    fn hear<R: Request<Reply = Done>>(
        &self,
        caller: &v1::Caller,
        change: impl FnOnce(&mut State) -> Result<(), RoleError>,
    ) -> Result<Frame, RoleError> {
        self.hear_and_answer::<R>(caller, |state| change(state).map(|()| Done {}))
    }

    /// As [`Self::hear`]; what is told may be an event.
    fn hear_news<R: Request<Reply = Done>>(
        &self,
        caller: &v1::Caller,
        change: impl FnOnce(&mut State) -> Result<Option<JobEvent>, RoleError>,
    ) -> Result<Frame, RoleError> {
        let mut news = None;
        let done = self.hear::<R>(caller, |state| change(state).map(|event| news = event))?;
        news.into_iter().for_each(|event| self.events.push(event));
        Ok(done)
    }

    /// Takes in what a member tells, once, and answers it.
    fn hear_and_answer<R: Request>(
        &self,
        caller: &v1::Caller,
        change: impl FnOnce(&mut State) -> Result<R::Reply, RoleError>,
    ) -> Result<Frame, RoleError> {
        self.change(|state| {
            if let Some(reply) = state.replies.answered(caller) {
                return Ok(reply);
            }
            let reply = message::reply::<R>(&change(state)?, Vec::new());
            state.replies.answer(caller, &reply);
            Ok(reply)
        })
    }

    pub(super) async fn join(&self, caller: &v1::Caller, request: v1::Join) -> Result<Frame, RoleError> {
        if self.lock().job_end().is_none() {
            let roster = async {
                if request.attempt != 0 && request.attempt != self.attempt {
                    let reason = "the rows that it holds are of another attempt".to_owned();
                    return Err(RoleError::Inconsistent { message: "join", reason });
                }
                let joined =
                    self.change(
                        |state| if state.replies.hears(caller) { state.join(caller, &request) } else { Ok(None) },
                    )?;
                if let Some(rejoined) = joined {
                    self.metrics.rejoins.inc();
                    self.events.push(rejoined);
                    let is_writer = request.role() == v1::Role::DenseWorker && request.index == 0;
                    if is_writer && !self.lock().training().saves_dense() {
                        self.dense_parameters_lost();
                    }
                }
                self.until(WHOLE_JOB, State::roster).await
            };
            match roster.await {
                Err(RoleError::JobFailed { .. }) => {}
                roster => {
                    let roster = v1::Roster { attempt: self.attempt, ..roster? };
                    return Ok(message::reply::<v1::Join>(&roster, Vec::new()));
                }
            }
        }
        // Nobody joins a job that has ended; the answer to `job_end` tells how it did.
        std::future::pending().await
    }

    pub(super) async fn lease(&self, caller: &v1::Caller, loader: u32) -> Result<Frame, RoleError> {
        use v1::lease_reply::Lease as Reply;
        let reply = |lease| v1::LeaseReply { lease: Some(lease) };
        let lease = answered::<v1::LeaseRequest>(caller, |state| match state.lease(loader) {
            (Lease::Chunk(lease), skip) => Ok(Some(reply(Reply::Chunk(write_lease(lease, skip, state.turns(None)))))),
            (Lease::Finished, _) => Ok(Some(reply(Reply::Finished(v1::Finished {})))),
            (Lease::Wait, _) => Ok(None),
        });
        let [nothing, wait] = [Reply::Finished(v1::Finished {}), Reply::Wait(v1::Wait {})]
            .map(|lease| message::reply::<v1::LeaseRequest>(&reply(lease), Vec::new()));
        let lease = or_ask_again(self.until_succeeded(loader, nothing, lease).await, wait)?;
        self.changed.notify_waiters();
        Ok(lease)
    }

    async fn evaluation_lease(&self, caller: &v1::Caller, loader: u32) -> Result<Frame, RoleError> {
        use v1::evaluation_lease_reply::Lease as Reply;
        let reply = |lease| v1::EvaluationLeaseReply { lease: Some(lease) };
        let lease = answered::<v1::EvaluationLeaseRequest>(caller, |state| {
            let lease = match state.evaluation_lease(loader) {
                EvaluationLease::Chunk { at_step, chunk, first_batch } => {
                    let turns = state.turns(Some(at_step)).write();
                    Some(Reply::Chunk(v1::EvaluationChunk { at_step: at_step.0, chunk, first_batch, turns }))
                }
                EvaluationLease::Finished => Some(Reply::Finished(v1::Finished {})),
                EvaluationLease::Wait => None,
            };
            Ok(lease.map(reply))
        });
        let [nothing, wait] = [Reply::Finished(v1::Finished {}), Reply::Wait(v1::Wait {})]
            .map(|lease| message::reply::<v1::EvaluationLeaseRequest>(&reply(lease), Vec::new()));
        or_ask_again(self.until_succeeded(loader, nothing, lease).await, wait)
    }

    pub(super) async fn repeat(&self, caller: &v1::Caller, loader: u32) -> Result<Frame, RoleError> {
        use v1::repeat_reply::Repeat as Reply;
        let finished =
            || v1::RepeatReply { repeat: Some(Reply::Finished(v1::Finished {})), ..v1::RepeatReply::default() };
        let repeat = answered::<v1::RepeatRequest>(caller, |state| {
            let embedding_worker_successions = state.embedding_worker_successions();
            Ok(match state.repeat(loader) {
                Repeated::Repeat(Repeat { given, embedding_worker, pieces, report }) => {
                    let range = |Range { start, end }| v1::PieceRange { start, end };
                    let pieces = pieces.unwrap_or_default().into_iter().map(range).collect();
                    let repeat = Some(match given {
                        Given::Train { lease, skip } => Reply::Chunk(write_lease(lease, skip, state.turns(None))),
                        Given::Evaluation { at_step, chunk, first_batch } => {
                            let turns = state.turns(Some(at_step)).write();
                            Reply::Evaluation(v1::EvaluationChunk { at_step: at_step.0, chunk, first_batch, turns })
                        }
                    });
                    Some(v1::RepeatReply { repeat, embedding_worker, pieces, report, embedding_worker_successions })
                }
                Repeated::Finished => Some(finished()),
                Repeated::Wait => None,
            })
        });
        let wait = v1::RepeatReply { repeat: Some(Reply::Wait(v1::Wait {})), ..v1::RepeatReply::default() };
        let [nothing, wait] = [finished(), wait].map(|reply| message::reply::<v1::RepeatRequest>(&reply, Vec::new()));
        or_ask_again(self.until_succeeded(loader, nothing, repeat).await, wait)
    }

    async fn order(&self, caller: &v1::Caller, request: v1::OrderRequest) -> Result<Frame, RoleError> {
        let (rank, done) = (Rank(request.rank), request.done);
        let order = answered::<v1::OrderRequest>(caller, |state| state.training().next_order(rank, done));
        let wait = v1::Order { order: Some(v1::order::Order::Wait(v1::Wait {})), ..v1::Order::default() };
        let wait = message::reply::<v1::OrderRequest>(&wait, Vec::new());
        or_ask_again(self.until_replaced(rank, wait.clone(), order).await, wait)
    }

    /// What `ready` has for dense worker `rank`; `nothing`, as soon as another has taken its place: what a dead one has done counts for
    /// nothing, and what it is given nobody trains.
    async fn until_replaced<T: Clone>(
        &self,
        rank: Rank,
        nothing: T,
        mut ready: impl FnMut(&mut State) -> Result<Option<T>, RoleError>,
    ) -> Result<T, RoleError> {
        let successions = self.lock().training().successions(rank);
        self.until_changed(LEASE_HOLD, |state| {
            let is_there = state.training().successions(rank) == successions;
            if is_there { ready(state) } else { Ok(Some(nothing.clone())) }
        })
        .await
    }

    async fn ring(&self, request: v1::RingRequest) -> Result<Frame, RoleError> {
        let ring = self.until(LEASE_HOLD, |state| Ok(state.training().ring_after(request.ring)));
        let ring = or_ask_again(ring.await, request.ring)?;
        Ok(message::reply::<v1::RingRequest>(&v1::Ring { ring }, Vec::new()))
    }

    async fn mend(&self, caller: &v1::Caller, request: v1::MendRequest) -> Result<Frame, RoleError> {
        let v1::MendRequest { rank, ring, step } = request;
        let mended = answered::<v1::MendRequest>(caller, |state| {
            let mended = state.training().mend(Rank(rank), ring, step.map(GlobalStep))?;
            if let (Some(Mended::GoesOn { batch, .. }), None) = (mended, step) {
                let share = self.plan.share(Rank(rank), state.training().barrier_workers());
                state.goes_on_from(Rank(rank), batch, &share);
            }
            Ok(mended.map(|mended| match mended {
                Mended::Superseded { by } => v1::Mended { ring: by, ..v1::Mended::default() },
                Mended::GoesOn { step, donor, .. } => {
                    let (_, dense_workers) = state.workers();
                    v1::Mended { ring, waits: false, step: step.0, donor: donor.0, dense_workers }
                }
            }))
        });
        let wait = v1::Mended { ring, waits: true, ..v1::Mended::default() };
        let wait = message::reply::<v1::MendRequest>(&wait, Vec::new());
        or_ask_again(self.until_changed(LEASE_HOLD, mended).await, wait)
    }

    async fn horizon(&self, caller: &v1::Caller, request: v1::HorizonRequest) -> Result<Frame, RoleError> {
        let v1::HorizonRequest { rank, order, from, at } = request;
        {
            let mut state = self.lock();
            if let Some((_, at_step)) = state.training().evaluating().filter(|(number, _)| *number == order) {
                state.predicts(at_step, Rank(rank), at);
            }
        }
        let horizon = answered::<v1::HorizonRequest>(caller, |state| match state.training().evaluating() {
            Some((number, at_step)) if number == order => state.evaluation_horizon(at_step, from),
            _ => state.horizon(order, from, at),
        });
        let wait = v1::Horizon { until: from, last: false, turns: Vec::new() };
        let wait = message::reply::<v1::HorizonRequest>(&wait, Vec::new());
        or_ask_again(self.until_changed(LEASE_HOLD, horizon).await, wait)
    }

    async fn pull(&self, caller: &v1::Caller, request: v1::PullRequest) -> Result<Frame, RoleError> {
        use v1::pull_reply::Reply;
        let (rank, order) = (Rank(request.rank), request.order);
        let reply = |reply| v1::PullReply { reply: Some(reply) };
        let pulled = answered::<v1::PullRequest>(caller, |state| {
            let pulled = state.training().pull(rank, order)?;
            let turns = state.turns(None);
            Ok(pulled.map(|pulled| {
                reply(match pulled {
                    Pulled::Work { assignment, oldest_token, key } => Reply::Assignment(v1::Assignment {
                        embedding_worker: turns.place(key, self.plan.pieces()).embedding_worker as u32,
                        first_row: assignment.batch.first_row,
                        rows: assignment.batch.rows,
                        token: assignment.token.0,
                        oldest_token,
                        batch: Some(key.write()),
                    }),
                    Pulled::Rest => Reply::Rest(v1::Finished {}),
                })
            }))
        });
        let wait = message::reply::<v1::PullRequest>(&reply(Reply::Wait(v1::Wait {})), Vec::new());
        or_ask_again(self.until_replaced(rank, wait.clone(), pulled).await, wait)
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
        let v1::EvaluationShare { rank, at_step, rows } = request;
        let mut finished = Vec::new();
        let reply = self.hear_and_answer::<v1::EvaluationShare>(caller, |state| {
            let (rows, events) = state.evaluation_share(GlobalStep(at_step), Rank(rank), rows)?;
            finished = events;
            Ok(v1::EvaluationRows { rows })
        })?;
        finished.into_iter().for_each(|event| self.events.push(event));
        Ok(reply)
    }

    /// Whoever another takes the place of while it lives hears of it here.
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

    /// What `ready` has for `loader`; `nothing`, as soon as another has taken its place: what is given to a dead loader nobody reads.
    async fn until_succeeded<T: Clone>(
        &self,
        loader: u32,
        nothing: T,
        mut ready: impl FnMut(&mut State) -> Result<Option<T>, RoleError>,
    ) -> Result<T, RoleError> {
        let successions = self.lock().loader_successions(loader);
        let waiting = self.until(LEASE_HOLD, |state| {
            if state.loader_successions(loader) == successions { ready(state) } else { Ok(Some(nothing.clone())) }
        });
        waiting.await
    }
}

/// Whoever asks takes no part in the job any more.
fn refuse(why: &str) -> Refusal {
    Refusal { code: RefusalCode::NotFound, message: why.to_owned(), retryable: false }
}

/// What `ready` answers to a question of `caller`, as a frame; the answer that was given before, if this was asked before.
fn answered<R: Request>(
    caller: &v1::Caller,
    mut ready: impl FnMut(&mut State) -> Result<Option<R::Reply>, RoleError>,
) -> impl FnMut(&mut State) -> Result<Option<Frame>, RoleError> {
    move |state| {
        if let Some(reply) = state.replies.answered(caller) {
            return Ok(Some(reply));
        }
        let reply = ready(state)?.map(|reply| message::reply::<R>(&reply, Vec::new()));
        if let Some(reply) = &reply {
            state.replies.answer(caller, reply);
        }
        Ok(reply)
    }
}

/// What the report of a chunk is answered once it counts.
fn reported(state: &State) -> v1::Reported {
    v1::Reported { embedding_worker_successions: state.embedding_worker_successions() }
}

fn write_lease(lease: ChunkLease, (skip_batches, skip_pieces): (u64, u32), turns: &Turns) -> v1::ChunkLease {
    let ChunkLease { epoch, chunk, first_step, max_batches } = lease;
    v1::ChunkLease {
        epoch,
        chunk,
        first_step: first_step.0,
        max_batches,
        skip_batches,
        skip_pieces,
        turns: turns.write(),
    }
}

/// A question held too long is answered with `wait`; it is no failure.
fn or_ask_again<T>(lease: Result<T, RoleError>, wait: T) -> Result<T, RoleError> {
    match lease {
        Err(RoleError::Task { .. }) => Ok(wait),
        other => other,
    }
}

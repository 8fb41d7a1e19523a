//! The coordinator: who is in the job and where, which data is leased to whom, where training and evaluation stand, and how the
//! job ended. A single small service; members call it little and seldom, and it holds their questions until it can answer.

mod announced;
mod control;
mod digest;
mod state;
mod training;

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use futures::future::try_join_all;
use rectrain_modes::{GlobalStep, Lease, Rank};
use rectrain_proto::v1;
use rectrain_wire::{BoxFuture, Channel, Frame, Peer, Refusal, Service, Tensor, Transport};
use tokio::sync::Notify;

pub use self::control::{ControlService, serve_control};
use self::state::{Share, State};
pub(crate) use self::training::TokenCounts;
use self::training::{Pulled, ServerCall, SwitchRefused};
use crate::error::RoleError;
use crate::events::{EventLog, JobEvent, Summary};
use crate::member::connect;
use crate::message::{self, Request};
use crate::metrics::CoordinatorMetrics;
use crate::plan::{CALL_DEADLINE, JobPlan, WHOLE_JOB};

/// How long a question for a lease is held before its asker is told to ask again.
const LEASE_HOLD: Duration = Duration::from_secs(20);

/// See the module's text.
pub struct Coordinator {
    plan: Arc<JobPlan>,
    state: Mutex<State>,
    changed: Notify,
    events: EventLog,
    metrics: CoordinatorMetrics,
}

impl Coordinator {
    /// For a job that nobody has joined yet.
    pub fn new(plan: Arc<JobPlan>, events: EventLog, metrics: CoordinatorMetrics) -> Result<Self, RoleError> {
        Ok(Self { state: Mutex::new(State::new(&plan)?), plan, changed: Notify::new(), events, metrics })
    }

    /// Follows the job to its end: waits for training, collects the digest, and pushes the last event.
    pub async fn run(&self, transport: &dyn Transport) -> Result<Summary, RoleError> {
        // Once a member has failed, the others end, and calls to them fail: the first failure is what happened.
        let result =
            self.summarize(transport).await.map_err(|error| self.lock().check_failure().err().unwrap_or(error));
        match &result {
            Ok(summary) => {
                self.events.push(JobEvent::Summary(Box::new(summary.clone())));
                self.lock().end();
            }
            Err(error) => {
                self.lock().fail(error.to_string(), error.is_user_error());
                self.events.push(JobEvent::Failed { message: error.to_string(), user_error: error.is_user_error() });
            }
        }
        self.changed.notify_waiters();
        result
    }

    /// Ends the job with an error, as if a member had failed.
    pub fn fail(&self, message: String, user_error: bool) {
        self.lock().fail(message, user_error);
        self.changed.notify_waiters();
    }

    async fn summarize(&self, transport: &dyn Transport) -> Result<Summary, RoleError> {
        let roster = self.until(WHOLE_JOB, State::roster).await?;
        self.events.push(self.plan.started()?);
        let servers = roster.ps.iter().map(|address| connect(transport, address)).collect::<Result<Vec<_>, _>>()?;
        let result = tokio::select! {
            result = self.until(WHOLE_JOB, State::trained) => result?,
            error = self.drive(&servers) => return Err(error),
        };
        let mut summary = result.summary;
        digest::of_model(&self.plan, &result.dense_digest, &servers, &mut summary).await?;
        for address in
            roster.ps.iter().chain(&roster.embedding_workers).chain(&roster.dense_workers).chain(&roster.loaders)
        {
            add_traffic(&mut summary, &connect(transport, address)?).await?;
        }
        Ok(summary)
    }

    /// Makes the calls to the parameter servers that switches and the end of the data need, until one fails.
    async fn drive(&self, servers: &[Channel]) -> RoleError {
        loop {
            let calls = self.until(WHOLE_JOB, |state| {
                let calls = state.training().take_calls();
                Ok((!calls.is_empty()).then_some(calls))
            });
            let done = async {
                for call in calls.await? {
                    self.call_servers(servers, call).await?;
                }
                Ok(())
            };
            if let Err(error) = done.await {
                return error;
            }
        }
    }

    async fn call_servers(&self, servers: &[Channel], call: ServerCall) -> Result<(), RoleError> {
        match call {
            ServerCall::Begin { mode, at, first_piece } => {
                let begin = v1::BeginMode {
                    mode: mode.name().to_owned(),
                    step: at.step.0,
                    first_row: at.next_row,
                    first_piece,
                };
                let calls =
                    servers.iter().map(|server| message::call(server, begin.clone(), Vec::new(), CALL_DEADLINE));
                try_join_all(calls).await?;
                let before = self.change(|state| {
                    let before = state.training().mode();
                    state.training().begun()?;
                    Ok(before)
                })?;
                if before != mode {
                    let (from, to) = (before.name().to_owned(), mode.name().to_owned());
                    self.events.push(JobEvent::ModeSwitched { step: at.step.0, from, to });
                }
                Ok(())
            }
            ServerCall::Flush => {
                let calls =
                    servers.iter().map(|server| message::call(server, v1::FlushRequest {}, Vec::new(), CALL_DEADLINE));
                for (index, (reply, _)) in try_join_all(calls).await?.into_iter().enumerate() {
                    self.change(|state| state.training().flushed(index as u32, &reply))?;
                }
                Ok(())
            }
        }
    }

    /// Waits until `ready` gives something; fails as soon as the job has failed.
    async fn until<T>(
        &self,
        deadline: Duration,
        mut ready: impl FnMut(&mut State) -> Result<Option<T>, RoleError>,
    ) -> Result<T, RoleError> {
        let waiting = async {
            loop {
                let changed = self.changed.notified();
                {
                    let mut state = self.lock();
                    state.check_failure()?;
                    if let Some(value) = ready(&mut state)? {
                        return Ok(value);
                    }
                }
                changed.await;
            }
        };
        tokio::time::timeout(deadline, waiting).await.map_err(|_| RoleError::Task {
            what: "a wait for the coordinator",
            reason: format!("nothing changed within {deadline:?}"),
        })?
    }

    /// As [`Self::until`], where asking may itself change the state for others.
    async fn until_changed<T>(
        &self,
        deadline: Duration,
        mut ready: impl FnMut(&mut State) -> Result<Option<T>, RoleError>,
    ) -> Result<T, RoleError> {
        let first = self.change(|state| ready(state))?;
        match first {
            Some(value) => Ok(value),
            None => self.until(deadline, ready).await,
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Changes the state; an error in it ends the job.
    fn change<T>(&self, change: impl FnOnce(&mut State) -> Result<T, RoleError>) -> Result<T, RoleError> {
        let result = {
            let mut state = self.lock();
            state.check_failure()?;
            let result = change(&mut state);
            state.begin_ordered_evaluation();
            self.metrics.set(&state.training().counts());
            if let Err(error) = &result {
                state.fail(error.to_string(), error.is_user_error());
            }
            result
        };
        self.changed.notify_waiters();
        result
    }

    async fn join(&self, request: v1::Join) -> Result<Frame, RoleError> {
        if self.lock().job_end().is_none() {
            let roster = async {
                self.change(|state| state.join(&request))?;
                self.until(WHOLE_JOB, State::roster).await
            };
            match roster.await {
                Err(RoleError::JobFailed { .. }) => {}
                roster => return Ok(message::reply::<v1::Join>(&roster?, Vec::new())),
            }
        }
        // Nobody joins a job that has ended; the answer to `job_end` tells how it did.
        std::future::pending().await
    }

    async fn lease(&self) -> Result<Frame, RoleError> {
        use v1::lease_reply::Lease as Reply;
        let lease = self.until(LEASE_HOLD, |state| match state.lease() {
            Lease::Chunk(lease) => Ok(Some(Reply::Chunk(v1::ChunkLease {
                epoch: lease.epoch,
                chunk: lease.chunk,
                first_step: lease.first_step.0,
                max_batches: lease.max_batches,
            }))),
            Lease::Finished => Ok(Some(Reply::Finished(v1::Finished {}))),
            Lease::Wait => Ok(None),
        });
        let lease = or_ask_again(lease.await, Reply::Wait(v1::Wait {}))?;
        self.changed.notify_waiters();
        Ok(message::reply::<v1::LeaseRequest>(&v1::LeaseReply { lease: Some(lease) }, Vec::new()))
    }

    async fn evaluation_lease(&self) -> Result<Frame, RoleError> {
        use v1::evaluation_lease_reply::Lease as Reply;
        let lease = self.until(LEASE_HOLD, |state| {
            Ok(match state.evaluation_lease() {
                state::EvaluationLease::Chunk { at_step, chunk, first_batch } => {
                    Some(Reply::Chunk(v1::EvaluationChunk { at_step: at_step.0, chunk, first_batch }))
                }
                state::EvaluationLease::Finished => Some(Reply::Finished(v1::Finished {})),
                state::EvaluationLease::Wait => None,
            })
        });
        let lease = or_ask_again(lease.await, Reply::Wait(v1::Wait {}))?;
        Ok(message::reply::<v1::EvaluationLeaseRequest>(&v1::EvaluationLeaseReply { lease: Some(lease) }, Vec::new()))
    }

    async fn order(&self, request: v1::OrderRequest) -> Result<Frame, RoleError> {
        let (rank, done) = (Rank(request.rank), request.done);
        let order = self.until_changed(LEASE_HOLD, |state| state.training().next_order(rank, done)).await;
        let wait = v1::Order { order: Some(v1::order::Order::Wait(v1::Wait {})), ..v1::Order::default() };
        Ok(message::reply::<v1::OrderRequest>(&or_ask_again(order, wait)?, Vec::new()))
    }

    async fn horizon(&self, request: v1::HorizonRequest) -> Result<Frame, RoleError> {
        let v1::HorizonRequest { order, from, at, .. } = request;
        let horizon = self.until_changed(LEASE_HOLD, |state| match state.training().evaluating() {
            Some((number, at_step)) if number == order => state.evaluation_horizon(at_step, from),
            _ => state.training().horizon(order, from, at),
        });
        let wait = v1::Horizon { until: from, last: false };
        Ok(message::reply::<v1::HorizonRequest>(&or_ask_again(horizon.await, wait)?, Vec::new()))
    }

    async fn pull(&self, request: v1::PullRequest) -> Result<Frame, RoleError> {
        use v1::pull_reply::Reply;
        let (rank, order) = (Rank(request.rank), request.order);
        let pulled = self.until_changed(LEASE_HOLD, |state| {
            Ok(state.training().pull(rank, order)?.map(|pulled| match pulled {
                Pulled::Work { assignment, oldest_token, key } => Reply::Assignment(v1::Assignment {
                    first_row: assignment.batch.first_row,
                    rows: assignment.batch.rows,
                    token: assignment.token.0,
                    oldest_token,
                    batch: Some(key.write()),
                }),
                Pulled::Rest => Reply::Rest(v1::Finished {}),
            }))
        });
        let reply = or_ask_again(pulled.await, Reply::Wait(v1::Wait {}))?;
        Ok(message::reply::<v1::PullRequest>(&v1::PullReply { reply: Some(reply) }, Vec::new()))
    }

    /// Switches the training mode by command; gives the mode until then.
    fn set_mode(&self, name: &str) -> Result<&'static str, SwitchRefused> {
        let mode = self.plan.mode_named(name).ok_or_else(|| {
            let names: Vec<&str> = self.plan.modes.iter().map(|mode| mode.name()).collect();
            SwitchRefused::Mode(format!("there is no training mode `{name}`: expected one of {}", names.join(", ")))
        })?;
        let from = {
            let mut state = self.lock();
            let from = state.training().request(mode)?;
            if let Err(error) = state.training().advance() {
                state.fail(error.to_string(), error.is_user_error());
            }
            from
        };
        self.changed.notify_waiters();
        Ok(from.name())
    }

    fn evaluation_share(&self, request: v1::EvaluationShare, tensors: Vec<Tensor>) -> Result<Frame, RoleError> {
        let [predictions, labels, groups] = message::take("evaluation_share", tensors)?;
        let share = Share {
            predictions: predictions.expect_f32("predictions")?,
            labels: labels.expect_f32("labels")?,
            groups: groups.expect_u64("groups")?,
        };
        let finished =
            self.change(|state| state.evaluation_share(GlobalStep(request.at_step), Rank(request.rank), share))?;
        for event in finished {
            self.events.push(event);
        }
        Ok(message::done::<v1::EvaluationShare>())
    }

    async fn job_end(&self) -> Result<Frame, RoleError> {
        let waiting = async {
            loop {
                let changed = self.changed.notified();
                if let Some(end) = self.lock().job_end() {
                    return end;
                }
                changed.await;
            }
        };
        Ok(message::reply::<v1::JobEndRequest>(&waiting.await, Vec::new()))
    }
}

impl Service for Coordinator {
    fn call<'a>(&'a self, _peer: &'a Peer, frame: Frame) -> BoxFuture<'a, Result<Frame, Refusal>> {
        Box::pin(async move {
            match frame.kind {
                v1::Join::KIND => Ok(self.join(message::read::<v1::Join>(frame)?.0).await?),
                v1::LeaseRequest::KIND => Ok(self.lease().await?),
                v1::ChunkReport::KIND => {
                    let (report, _) = message::read::<v1::ChunkReport>(frame)?;
                    self.change(|state| state.chunk_report(&report))?;
                    Ok(message::done::<v1::ChunkReport>())
                }
                v1::OrderRequest::KIND => Ok(self.order(message::read::<v1::OrderRequest>(frame)?.0).await?),
                v1::HorizonRequest::KIND => Ok(self.horizon(message::read::<v1::HorizonRequest>(frame)?.0).await?),
                v1::PullRequest::KIND => Ok(self.pull(message::read::<v1::PullRequest>(frame)?.0).await?),
                v1::BatchReport::KIND => {
                    let (report, _) = message::read::<v1::BatchReport>(frame)?;
                    self.change(|state| state.training().batch_report(&report))?;
                    Ok(message::done::<v1::BatchReport>())
                }
                v1::EvaluationLeaseRequest::KIND => Ok(self.evaluation_lease().await?),
                v1::EvaluationChunkReport::KIND => {
                    let (report, _) = message::read::<v1::EvaluationChunkReport>(frame)?;
                    self.change(|state| state.evaluation_chunk_report(&report))?;
                    Ok(message::done::<v1::EvaluationChunkReport>())
                }
                v1::EvaluationShare::KIND => {
                    let (share, tensors) = message::read::<v1::EvaluationShare>(frame)?;
                    Ok(self.evaluation_share(share, tensors)?)
                }
                v1::Progress::KIND => {
                    let (report, _) = message::read::<v1::Progress>(frame)?;
                    if let Some(event) = self.change(|state| state.progress(&report))? {
                        self.events.push(event);
                    }
                    Ok(message::done::<v1::Progress>())
                }
                v1::TrainingDone::KIND => {
                    let (done, _) = message::read::<v1::TrainingDone>(frame)?;
                    self.change(|state| state.training_done(done))?;
                    Ok(message::done::<v1::TrainingDone>())
                }
                v1::JobEndRequest::KIND => Ok(self.job_end().await?),
                v1::Failure::KIND => {
                    let (failure, _) = message::read::<v1::Failure>(frame)?;
                    self.fail(failure.message, failure.user_error);
                    Ok(message::done::<v1::Failure>())
                }
                kind => Err(message::refuse_kind("coordinator", kind)),
            }
        })
    }
}

/// A question held too long is answered with `wait`; it is no failure.
fn or_ask_again<T>(lease: Result<T, RoleError>, wait: T) -> Result<T, RoleError> {
    match lease {
        Err(RoleError::Task { .. }) => Ok(wait),
        other => other,
    }
}

async fn add_traffic(summary: &mut Summary, member: &Channel) -> Result<(), RoleError> {
    let (traffic, _) = message::call(member, v1::TrafficRequest {}, Vec::new(), CALL_DEADLINE).await?;
    for (kind, bytes) in traffic.bytes_sent {
        *summary.bytes_on_wire.entry(kind).or_default() += bytes;
    }
    Ok(())
}

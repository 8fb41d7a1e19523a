//! The coordinator: who is in the job and where, which data is leased to whom, where training and evaluation stand, and how the
//! job ended. A single small service; members call it little and seldom, and it holds their questions until it can answer.

mod control;
mod digest;
mod state;

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use rectrain_modes::{GlobalStep, Lease, Rank};
use rectrain_proto::v1;
use rectrain_wire::{BoxFuture, Channel, Frame, Peer, Refusal, Service, Tensor, Transport};
use tokio::sync::Notify;

pub use self::control::{ControlService, serve_control};
use self::state::{Share, State};
use crate::error::RoleError;
use crate::events::{EventLog, JobEvent, Summary};
use crate::member::connect;
use crate::message::{self, Request};
use crate::plan::{CALL_DEADLINE, JobPlan, WHOLE_JOB};

/// How long a question for a lease is held before its asker is told to ask again.
const LEASE_HOLD: Duration = Duration::from_secs(20);

/// See the module's text.
pub struct Coordinator {
    plan: Arc<JobPlan>,
    state: Mutex<State>,
    changed: Notify,
    events: EventLog,
}

impl Coordinator {
    /// For a job that nobody has joined yet.
    #[must_use]
    pub fn new(plan: Arc<JobPlan>, events: EventLog) -> Self {
        Self { state: Mutex::new(State::new(&plan)), plan, changed: Notify::new(), events }
    }

    /// Follows the job to its end: waits for training, collects the digest, and pushes the last event.
    pub async fn run(&self, transport: &dyn Transport) -> Result<Summary, RoleError> {
        let result = self.summarize(transport).await;
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
        let result = self.until(WHOLE_JOB, State::trained).await?;
        let servers = roster.ps.iter().map(|address| connect(transport, address)).collect::<Result<Vec<_>, _>>()?;
        let (parameters_sha256, rows, store_bytes) =
            digest::of_model(&self.plan, &result.dense_digest, &servers).await?;
        let mut summary = Summary { rows, store_bytes, parameters_sha256, ..result.summary };
        for address in
            roster.ps.iter().chain(&roster.embedding_workers).chain(&roster.dense_workers).chain(&roster.loaders)
        {
            add_traffic(&mut summary, &connect(transport, address)?).await?;
        }
        Ok(summary)
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

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Changes the state; an error in it ends the job.
    fn change<T>(&self, change: impl FnOnce(&mut State) -> Result<T, RoleError>) -> Result<T, RoleError> {
        let result = {
            let mut state = self.lock();
            state.check_failure()?;
            let result = change(&mut state);
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

    async fn training_end(&self) -> Result<Frame, RoleError> {
        let total = self.until(WHOLE_JOB, |state| Ok(state.total_steps())).await?;
        Ok(message::reply::<v1::EndRequest>(&v1::EndReply { total_steps: total.0 }, Vec::new()))
    }

    async fn evaluation_size(&self, at_step: GlobalStep) -> Result<Frame, RoleError> {
        let batches = self.until(CALL_DEADLINE, |state| Ok(state.evaluation_batches(at_step))).await?;
        Ok(message::reply::<v1::EvaluationSizeRequest>(&v1::EvaluationSize { batches }, Vec::new()))
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
                v1::EndRequest::KIND => Ok(self.training_end().await?),
                v1::EvaluationBegin::KIND => {
                    let (begin, _) = message::read::<v1::EvaluationBegin>(frame)?;
                    self.change(|state| {
                        state.begin_evaluation(GlobalStep(begin.at_step));
                        Ok(())
                    })?;
                    Ok(message::done::<v1::EvaluationBegin>())
                }
                v1::EvaluationLeaseRequest::KIND => Ok(self.evaluation_lease().await?),
                v1::EvaluationChunkReport::KIND => {
                    let (report, _) = message::read::<v1::EvaluationChunkReport>(frame)?;
                    self.change(|state| state.evaluation_chunk_report(&report))?;
                    Ok(message::done::<v1::EvaluationChunkReport>())
                }
                v1::EvaluationSizeRequest::KIND => {
                    let (request, _) = message::read::<v1::EvaluationSizeRequest>(frame)?;
                    Ok(self.evaluation_size(GlobalStep(request.at_step)).await?)
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

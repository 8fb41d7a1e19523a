//! The life cycle of a member of any role. A member serves, joins, learns the addresses of the
//! others, works, and stays until the job has ended.
//!
//! All members run this code, whether they share a process or not. Only the transport differs.

use std::path::PathBuf;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

use rectrain_kinds::Role;
use rectrain_modes::Rank;
use rectrain_proto::v1;
use rectrain_wire::{Address, BoxFuture, Frame, Peer, Refusal, Service, Transport, WireCounters};
use tokio::runtime::Handle;
use tokio::sync::oneshot;

use rectrain_dense_worker::{DensePeers, DenseWorker, Trainer};
use rectrain_embedding_worker::EmbeddingWorker;
use rectrain_loader::{Loader, LoaderPeers};
use rectrain_parameter_server::{ParameterServer, Rows};
use rectrain_protocol::coordinator_channel::CoordinatorChannel;
use rectrain_protocol::deadline::{CALL_DEADLINE, WHOLE_JOB};
use rectrain_protocol::embedding_workers::EmbeddingWorkers;
use rectrain_protocol::error::RoleError;
use rectrain_protocol::failure::{Divergence, JobFailure};
use rectrain_protocol::message::{self, Request};
use rectrain_protocol::metrics::{DenseWorkerMetrics, EmbeddingWorkerMetrics, LoaderMetrics, PsMetrics, RoleMetrics};
use rectrain_protocol::placement::Directory;
use rectrain_protocol::plan::JobPlan;
use rectrain_protocol::readiness::Readiness;
use rectrain_protocol::watchdog::Watchdog;

/// How long a released member tries to report its traffic.
const FAREWELL: Duration = Duration::from_secs(5);

/// How long a member of a job without checkpoints tries to reach the coordinator before it ends.
const LEAVE: Duration = Duration::from_secs(2);

/// One member of a job.
pub struct Member {
    /// The plan of the job.
    pub plan: Arc<JobPlan>,
    /// The role.
    pub role: Role,
    /// The index in the role, from 0.
    pub index: u32,
    /// The transport to all other members.
    pub transport: Arc<dyn Transport>,
    /// The address of the coordinator.
    pub coordinator: Address,
    /// The address to serve on.
    pub bind: Address,
    /// The address for other members, if it differs from the one served on.
    pub advertise: Option<Address>,
    /// The directory for a parameter server's rows, in memory that outlives the process. `None`:
    /// the rows end with the process.
    pub shared_memory: Option<PathBuf>,
    /// A dense worker computes this many times slower: 1, or more to simulate a straggler.
    pub slow: f64,
    /// Watches the computations of a dense worker. If one hangs, the owner of the process ends it.
    pub watchdog: Watchdog,
    /// Set to ready once the member is ready.
    pub readiness: Readiness,
    /// The metrics of this process.
    pub metrics: RoleMetrics,
    /// Counts the messages of this process.
    pub counters: Arc<WireCounters>,
}

/// The state of a role between its service's start and its work.
enum Work {
    Ps(Arc<ParameterServer>),
    EmbeddingWorker(Arc<EmbeddingWorker>),
    DenseWorker(Arc<DenseWorker>),
    Loader,
}

impl Member {
    /// Works in the job until it has ended. An error of this member fails the job.
    pub async fn run(self) -> Result<(), RoleError> {
        let coordinator = CoordinatorChannel::new(self.transport.connect(&self.coordinator)?);
        match Box::pin(self.participate(&coordinator)).await {
            Ok(()) => Ok(()),
            Err(error @ RoleError::JobFailed { .. }) => Err(error),
            Err(error) => {
                self.report_failure(&coordinator, &error).await;
                Err(error)
            }
        }
    }

    /// Tells the coordinator that this member is about to end, and waits for its permission.
    /// Returns the name of the checkpoint that the coordinator saved. Meanwhile, the rows of a
    /// parameter server move to the other servers, if there are any. [`Self::run`] then ends before
    /// this future.
    ///
    /// # Errors
    /// The reason why there is no checkpoint; see
    /// [`Coordinator::save_now`](rectrain_coordinator::Coordinator::save_now).
    pub fn leave(&self) -> impl Future<Output = Result<String, RoleError>> + Send + use<> {
        let request = v1::Leave { role: v1::Role::from(self.role).into(), index: self.index };
        let coordinator = self.transport.connect(&self.coordinator);
        let saves = self.plan.checkpoint.is_some();
        async move {
            let (saved, _) = if saves {
                CoordinatorChannel::new(coordinator?).call(request, Vec::new(), CALL_DEADLINE).await?
            } else {
                // Does not wait for a coordinator that has ended too.
                let coordinator = coordinator?;
                coordinator.ready(LEAVE).await?;
                message::call(&coordinator, request, Vec::new(), CALL_DEADLINE).await?
            };
            if saved.checkpoint.is_empty() {
                return Err(RoleError::Task { what: "saving of a checkpoint", reason: saved.reason });
            }
            Ok(saved.checkpoint)
        }
    }

    async fn participate(&self, coordinator: &CoordinatorChannel) -> Result<(), RoleError> {
        let rows = self.rows(coordinator).await?;
        let (place, attempt) = rows.as_ref().and_then(Rows::place).unwrap_or_default();
        let incarnation = self.incarnation(rows.as_ref(), coordinator).await?;
        let bind = self.bind_address(place)?.of_process(incarnation);
        let (work, service) = self.service(rows)?;
        if let (Work::Ps(server), true) = (&work, attempt != 0) {
            // The other members count a step as applied once all its gradients have arrived. So
            // apply it before the server answers.
            server.finish_recovery().await?;
        }
        let service = Arc::new(MemberService { inner: service, counters: Arc::clone(&self.counters) });
        let serving = self.transport.serve(service, &bind)?;
        let address = self.advertise.as_ref().unwrap_or(serving.address()).clone().of_process(incarnation).to_string();
        if let Work::Ps(server) = &work {
            server.serves_at(&address);
        }
        let join =
            v1::Join { role: v1::Role::from(self.role).into(), index: self.index, address: address.clone(), attempt };
        let working = async {
            let (roster, _) = coordinator.call(join, Vec::new(), WHOLE_JOB).await?;
            coordinator.set_attempt(roster.attempt);
            self.work(work, &roster, coordinator).await
        };
        tokio::select! {
            done = working => done?,
            end = self.job_end(coordinator, &address) => return end,
        }
        self.job_end(coordinator, &address).await
    }

    /// The incarnation ID that peers send in their greeting. With it, they never reach an earlier
    /// or later process at the same address. Such a process has other batches and parameters. A
    /// restarted parameter server has the state of its predecessor, so its ID is the attempt of the
    /// job. The rows of a parameter server then also keep the present memory budget of the job.
    async fn incarnation(&self, rows: Option<&Rows>, coordinator: &CoordinatorChannel) -> Result<u64, RoleError> {
        let Some(rows) = rows else { return Ok(coordinator.caller_id()) };
        let (v1::Attempt { attempt, budget }, _) =
            coordinator.call(v1::AttemptRequest {}, Vec::new(), WHOLE_JOB).await?;
        if let Some(budget) = budget {
            rows.set_budget(budget)?;
        }
        Ok(attempt)
    }

    /// The rows of a parameter server; `None` for other roles.
    async fn rows(&self, coordinator: &CoordinatorChannel) -> Result<Option<Rows>, RoleError> {
        if self.role != Role::Ps {
            return Ok(None);
        }
        let Some(directory) = &self.shared_memory else { return Rows::none(&self.plan).map(Some) };
        Rows::in_memory_that_outlives(directory, &self.plan, coordinator).await.map(Some)
    }

    /// The address to serve on. A parameter server that replaces another one serves at its address,
    /// unless its port was given.
    fn bind_address(&self, place: &str) -> Result<Address, RoleError> {
        let any_port = self.bind.to_string().ends_with(":0") && self.advertise.is_none();
        Ok(if any_port && !place.is_empty() { place.parse()? } else { self.bind.clone() })
    }

    fn service(&self, rows: Option<Rows>) -> Result<(Work, Arc<dyn Service>), RoleError> {
        Ok(match self.role {
            Role::Ps => {
                let metrics = PsMetrics::of(&self.metrics, self.index);
                let rows = rows.map_or_else(|| Rows::none(&self.plan), Ok)?;
                let transport = Arc::clone(&self.transport);
                let server = ParameterServer::new(&self.plan, self.index, rows, transport, metrics)?;
                let server = Arc::new(server.reporting(self.readiness.clone()));
                let service = server.service();
                (Work::Ps(server), service)
            }
            Role::EmbeddingWorker => {
                let metrics = EmbeddingWorkerMetrics::of(&self.metrics, self.index);
                let worker = Arc::new(EmbeddingWorker::new(&self.plan, self.index, metrics));
                let service = worker.service();
                (Work::EmbeddingWorker(worker), service)
            }
            Role::DenseWorker => {
                let metrics = DenseWorkerMetrics::of(&self.metrics, self.index);
                let worker = Arc::new(DenseWorker::new(Rank(self.index), self.slow, self.watchdog.clone(), metrics));
                (Work::DenseWorker(Arc::clone(&worker)), worker)
            }
            Role::Loader => (Work::Loader, Arc::new(NoRequests)),
            Role::Coordinator => {
                let reason = "members join the coordinator, which is none itself".to_owned();
                return Err(RoleError::Inconsistent { message: "join", reason });
            }
        })
    }

    async fn work(&self, work: Work, roster: &v1::Roster, coordinator: &CoordinatorChannel) -> Result<(), RoleError> {
        match work {
            Work::Ps(_) => Ok(()),
            Work::EmbeddingWorker(worker) => {
                // Slots may have moved since the start of the job, if this worker is a replacement.
                let directory = self.directory(coordinator);
                worker.connect(directory.fetch().await?, directory);
                self.readiness.set_ready();
                Ok(())
            }
            Work::DenseWorker(worker) => {
                let directory = self.directory(coordinator);
                let peers = DensePeers {
                    coordinator: coordinator.clone(),
                    // Slots may have moved before this worker joined.
                    placement: directory.fetch().await?,
                    directory,
                    embedding_workers: self.embedding_workers(roster, coordinator)?,
                    next: None,
                    readiness: self.readiness.clone(),
                };
                let (own, plan, watchdog) = (Arc::clone(&worker), Arc::clone(&self.plan), self.watchdog.clone());
                // A GPU may also hang while it is opened.
                let trainer = move || watchdog.watch_opening(|| own.trainer(&plan, peers));
                train_on_a_thread(&worker, trainer, self.index).await
            }
            Work::Loader => {
                let peers = LoaderPeers {
                    coordinator: coordinator.clone(),
                    embedding_workers: self.embedding_workers(roster, coordinator)?,
                };
                let metrics = LoaderMetrics::of(&self.metrics, self.index);
                self.readiness.set_ready();
                Loader::new(Arc::clone(&self.plan), self.index, peers, metrics).run().await
            }
        }
    }

    fn embedding_workers(
        &self,
        roster: &v1::Roster,
        coordinator: &CoordinatorChannel,
    ) -> Result<Arc<EmbeddingWorkers>, RoleError> {
        Ok(Arc::new(EmbeddingWorkers::new(
            &roster.embedding_workers,
            self.directory(coordinator),
            self.plan.patience(),
        )?))
    }

    fn directory(&self, coordinator: &CoordinatorChannel) -> Directory {
        Directory { coordinator: coordinator.clone(), transport: Arc::clone(&self.transport) }
    }

    async fn job_end(&self, coordinator: &CoordinatorChannel, address: &str) -> Result<(), RoleError> {
        let request = v1::JobEndRequest {
            role: v1::Role::from(self.role).into(),
            index: self.index,
            address: address.to_owned(),
        };
        let (end, _) = coordinator.call(request, Vec::new(), WHOLE_JOB).await?;
        if end.failed {
            let divergence = end.divergence.as_ref().map(Divergence::read);
            let failure = JobFailure { message: end.message, user_error: end.user_error, divergence };
            return Err(RoleError::JobFailed(Box::new(failure)));
        }
        if end.released {
            tracing::info!(role = self.role.name(), index = self.index, "the job continues without this member");
            if let Some(directory) = self.shared_memory.as_ref().filter(|_| self.role == Role::Ps) {
                Rows::forget(directory)?;
            }
            self.say_farewell(coordinator, address).await;
        }
        Ok(())
    }

    /// Reports the traffic of this member for the summary of the job.
    async fn say_farewell(&self, coordinator: &CoordinatorChannel, address: &str) {
        let farewell = v1::Farewell { address: address.to_owned(), traffic: Some(traffic(&self.counters)) };
        if let Err(error) = coordinator.call(farewell, Vec::new(), FAREWELL).await {
            tracing::warn!(%error, "cannot report this member's traffic: it is missing in the summary");
        }
    }

    /// Reports the failure to the coordinator, which may itself have failed.
    async fn report_failure(&self, coordinator: &CoordinatorChannel, error: &RoleError) {
        let user_error = error.is_user_error();
        let message =
            if user_error { error.to_string() } else { format!("{} {}: {error}", self.role.name(), self.index) };
        let divergence = error.divergence().map(Divergence::write);
        let (role, index) = (v1::Role::from(self.role).into(), self.index);
        let failure = v1::Failure { role, index, message, user_error, divergence };
        if let Err(unreported) = coordinator.call(failure, Vec::new(), CALL_DEADLINE).await {
            tracing::warn!(%error, %unreported, "cannot report the failure to the coordinator");
        }
    }
}

/// Makes the trainer and runs it on a new thread. Dropping the future stops the thread and joins
/// it. The thread waits for messages through this runtime, so the runtime must outlive it.
async fn train_on_a_thread(
    worker: &Arc<DenseWorker>,
    trainer: impl FnOnce() -> Result<Trainer, RoleError> + Send + 'static,
    index: u32,
) -> Result<(), RoleError> {
    struct StopOnDrop<'a>(&'a DenseWorker, Option<JoinHandle<()>>);
    impl Drop for StopOnDrop<'_> {
        fn drop(&mut self) {
            self.0.close();
            // A panic of the thread is reported as its result.
            let _panicked = self.1.take().map(JoinHandle::join);
        }
    }
    let ((done, finished), runtime) = (oneshot::channel(), Handle::current());
    let thread = std::thread::Builder::new()
        .name(format!("dense-worker-{index}"))
        .spawn(move || {
            let made = {
                let _inside = runtime.enter();
                trainer()
            };
            // The receiver is gone if the job was stopped.
            let _stopped = done.send(made.and_then(Trainer::run));
        })
        .map_err(|source| RoleError::System { attempt: "start the training thread".to_owned(), source })?;
    let _stop = StopOnDrop(worker, Some(thread));
    finished.await.map_err(|_| RoleError::Task { what: "the training thread", reason: "it panicked".to_owned() })?
}

/// Answers requests for traffic, and passes all others to the role.
struct MemberService {
    inner: Arc<dyn Service>,
    counters: Arc<WireCounters>,
}

impl Service for MemberService {
    fn call<'a>(&'a self, peer: &'a Peer, frame: Frame) -> BoxFuture<'a, Result<Frame, Refusal>> {
        if frame.kind != v1::TrafficRequest::KIND {
            return self.inner.call(peer, frame);
        }
        Box::pin(async move { Ok(message::reply::<v1::TrafficRequest>(&traffic(&self.counters), Vec::new())) })
    }
}

fn traffic(counters: &WireCounters) -> v1::Traffic {
    let sent = counters.snapshot().into_iter().filter(|(_, traffic)| traffic.bytes_sent > 0);
    v1::Traffic { bytes_sent: sent.map(|(kind, traffic)| (kind.to_owned(), traffic.bytes_sent)).collect() }
}

/// The service of a loader, which answers no requests.
struct NoRequests;

impl Service for NoRequests {
    fn call<'a>(&'a self, _peer: &'a Peer, frame: Frame) -> BoxFuture<'a, Result<Frame, Refusal>> {
        Box::pin(async move { Err(message::refuse_kind("loader", frame.kind)) })
    }
}

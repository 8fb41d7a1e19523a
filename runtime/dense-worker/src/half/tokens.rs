//! Trains without a barrier (GBA, appendix B, algorithm 1). The worker pulls a batch with its token
//! and the parameters, computes, and pushes the gradients with the token. It does not wait for
//! other workers. [`Lanes`] decides the next actions, and this module carries them out.
//!
//! There is one lane, and the worker's own thread computes its batches. In `shadow` with several
//! threads, each of them is a lane.

use std::collections::{HashMap, VecDeque};
use std::time::{Duration, Instant};

use rectrain_dense::StepOutput;
use rectrain_modes::gba::{LaneAction, Lanes, WorkerAction};
use rectrain_modes::{Assignment, Batch, Outcome, Reply, Server, Token};
use rectrain_proto::v1;
use rectrain_proto::v1::pull_reply::Reply as PullReply;
use rectrain_wire::Tensor;
use tokio::sync::mpsc;
use tokio::task::JoinHandle;

use super::WorkerHalf;
use crate::hogwild::{Job, Trained, TrainingThreads};
use crate::local_batch::LocalBatch;
use crate::replica::{Answer, Replica};
use crate::trainer::Trainer;
use rectrain_protocol::batch::BatchKey;
use rectrain_protocol::deadline::CALL_DEADLINE;
use rectrain_protocol::error::RoleError;
use rectrain_protocol::layout::Pooled;
use rectrain_protocol::message;
use rectrain_protocol::outcome;
use rectrain_protocol::plan::dense_partition;
use rectrain_protocol::round_robin::Piece;

/// The most batches that are pushed but not acknowledged. With 1, a worker waits until its own
/// gradient is in the buffers before it pulls again. So it reads its own writes. A single worker
/// with M = 1 then trains as in `sync`, to the bit.
const UNACKNOWLEDGED: usize = 1;
/// The capacity of the channel of events. There are at most as many events as calls in flight.
const EVENTS: usize = 256;
/// Stands for the embedding worker, which acknowledges the gradients of rows for all parameter
/// servers. Parameter server i, with its dense partition, is `Server(i + 1)`.
const ROWS: Server = Server(0);

/// The result of a call in flight.
enum Event {
    Pulled(PullReply),
    Acknowledged {
        server: Server,
        batch: Batch,
        outcome: v1::Outcome,
        steps: Vec<u64>,
    },
    /// In `shadow`: the answers of all servers, after an exchange of this duration.
    Exchanged(Vec<Answer>, Duration),
    /// In `shadow` with several threads: the thread of this lane has trained its batch.
    Trained(usize, Batch, Box<Trained>),
    Failed(RoleError),
}

/// A batch between its pull and its report.
struct InHand {
    piece: Piece,
    oldest_token: u64,
    dense_steps: Vec<u64>,
    embedding_steps: Vec<u64>,
}

/// Computed gradients of a lane that are not pushed yet, and the steps of the parameters that
/// produced them.
struct Computed {
    pooled: Pooled,
    dense_pulled_at: Vec<u64>,
    rows_pulled_at: Vec<u64>,
}

/// The state of one order.
pub(super) struct Run<'a> {
    trainer: &'a mut Trainer,
    order: u64,
    lanes: Lanes,
    in_hand: HashMap<Batch, InHand>,
    /// By lane.
    computed: HashMap<usize, Computed>,
    events: mpsc::Sender<Event>,
    happened: mpsc::Receiver<Event>,
    reports: VecDeque<JoinHandle<Result<(), RoleError>>>,
    /// In `shadow`: the worker's replica. Other modes pull the dense parameters for each batch.
    replica: Option<Replica>,
    /// In the foreground form of `shadow`: the next pull waits for the end of an exchange.
    holds_pull: bool,
}

/// Training without a barrier.
pub(super) struct Tokens;

impl WorkerHalf for Tokens {
    /// Trains until the coordinator hands out no more batches in this order.
    fn train(&self, trainer: &mut Trainer, order: &v1::Order) -> Result<(), RoleError> {
        let servers = trainer.peers.placement.servers.len() as u32;
        Run::new(trainer, order, 1 + servers, None).run()
    }
}

impl<'a> Run<'a> {
    /// A run whose dense gradients are applied to a replica. Only rows are pushed.
    pub(super) fn of_replica(trainer: &'a mut Trainer, order: &v1::Order, replica: Replica) -> Self {
        Self::new(trainer, order, 1, Some(replica))
    }

    /// A run in which `acknowledging` peers acknowledge each batch.
    fn new(trainer: &'a mut Trainer, order: &v1::Order, acknowledging: u32, replica: Option<Replica>) -> Self {
        let (events, happened) = mpsc::channel(EVENTS);
        let lanes = trainer.threads.as_ref().map_or(1, TrainingThreads::count);
        Self {
            trainer,
            order: order.number,
            lanes: Lanes::new(lanes, acknowledging, UNACKNOWLEDGED),
            in_hand: HashMap::new(),
            computed: HashMap::new(),
            events,
            happened,
            reports: VecDeque::new(),
            replica,
            holds_pull: false,
        }
    }

    pub(super) fn run(mut self) -> Result<(), RoleError> {
        let mut actions: VecDeque<LaneAction> = self.lanes.start().into();
        loop {
            while let Some((lane, action)) = actions.pop_front() {
                match action {
                    WorkerAction::Pull if self.is_held() => self.holds_pull = true,
                    WorkerAction::Pull => self.pull(),
                    WorkerAction::Compute(assignment) if self.trainer.threads.is_some() => {
                        self.give_to_thread(lane, assignment.batch)?;
                    }
                    WorkerAction::Compute(assignment) => {
                        self.compute(lane, assignment)?;
                        actions.extend(self.lanes.computed(lane)?);
                    }
                    WorkerAction::Push(assignment) => {
                        self.push(lane, assignment)?;
                        self.exchange()?;
                    }
                    WorkerAction::Report(batch, outcome) => self.report(batch, outcome)?,
                    WorkerAction::Stop => return self.finish(),
                }
            }
            actions.extend(self.next_event()?);
        }
    }

    fn next_event(&mut self) -> Result<Vec<LaneAction>, RoleError> {
        let waited = Instant::now();
        let event = self.trainer.receive(&mut self.happened)?;
        if self.trainer.threads.is_none() {
            self.trainer.metrics.batch_wait.observe(waited.elapsed().as_secs_f64());
            self.trainer.pace.times.waited_for_data(waited.elapsed());
        }
        match event {
            Event::Failed(error) => Err(error),
            Event::Pulled(PullReply::Wait(_)) => {
                self.pull();
                Ok(Vec::new())
            }
            Event::Pulled(PullReply::Rest(_)) => Ok(self.lanes.answered(Reply::Finished)?),
            Event::Pulled(PullReply::Piece(_)) => {
                let reason = "a piece without a token came for a pull of a batch".to_owned();
                Err(RoleError::Inconsistent { message: "pull", reason })
            }
            Event::Pulled(PullReply::Assignment(assigned)) => {
                let batch = Batch { first_row: assigned.first_row, rows: assigned.rows };
                let in_hand = InHand {
                    piece: Piece {
                        key: BatchKey::read("pull", assigned.batch)?,
                        embedding_worker: assigned.embedding_worker as usize,
                    },
                    oldest_token: assigned.oldest_token,
                    dense_steps: vec![0; self.trainer.peers.placement.servers.len()],
                    embedding_steps: Vec::new(),
                };
                self.in_hand.insert(batch, in_hand);
                Ok(self.lanes.answered(Reply::Work(Assignment { batch, token: Token(assigned.token) }))?)
            }
            Event::Acknowledged { server, batch, outcome, steps } => {
                if let Some(in_hand) = self.in_hand.get_mut(&batch) {
                    if server == ROWS {
                        // In `shadow` no dense gradient is pushed: the dense partitions count as
                        // far as the rows.
                        if self.replica.is_some() {
                            in_hand.dense_steps.clone_from(&steps);
                        }
                        in_hand.embedding_steps = steps;
                    } else if let (Some(pulled_at), Some(step)) =
                        (in_hand.dense_steps.get_mut(server.0 as usize - 1), steps.first())
                    {
                        *pulled_at = *step;
                    }
                }
                Ok(self.lanes.acknowledged(server, batch, outcome::read("push", outcome)?)?)
            }
            Event::Exchanged(answers, took) => {
                if let Some(replica) = &mut self.replica {
                    replica.end_exchange(self.trainer, &answers, took)?;
                }
                // A missed exchange is due again at once, and training waits for it, too.
                self.exchange()?;
                if !self.is_held() && std::mem::take(&mut self.holds_pull) {
                    self.pull();
                }
                Ok(Vec::new())
            }
            Event::Trained(lane, batch, trained) => {
                self.take_trained(lane, batch, *trained)?;
                Ok(self.lanes.computed(lane)?)
            }
        }
    }

    fn pull(&self) {
        let coordinator = self.trainer.peers.coordinator.clone();
        let request = v1::PullRequest { rank: self.trainer.rank.0, order: self.order };
        let events = self.events.clone();
        self.trainer.spawn(async move {
            let event = match coordinator.call(request, Vec::new(), CALL_DEADLINE).await {
                Ok((reply, _)) => Event::Pulled(reply.reply.unwrap_or(PullReply::Wait(v1::Wait {}))),
                Err(error) => Event::Failed(error),
            };
            // A stopped worker has dropped the receiver.
            let _stopped = events.send(event).await;
        });
    }

    fn compute(&mut self, lane: usize, assignment: Assignment) -> Result<(), RoleError> {
        let started = Instant::now();
        let piece = self.in_hand(assignment.batch)?.piece;
        let trainer = &mut *self.trainer;
        let fetching = trainer.fetch(std::iter::once(piece), None);
        let dense_pulled_at = if self.replica.is_some() { Vec::new() } else { trainer.pull_parameters()? };
        let own = trainer.fetched(fetching)?;
        own.expect_all("forward")?;
        trainer.metrics.embedding_wait.observe(started.elapsed().as_secs_f64());
        let scale = own.scale_without_barrier(&trainer.plan);
        let (number, step) = (seed_of(piece, trainer), piece.key.position.number());
        let output = trainer.compute(&own, scale, number, step)?;
        if let Some(replica) = &mut self.replica {
            replica.train(trainer)?;
        }
        self.keep(lane, own, output, (dense_pulled_at, started))
    }

    /// Gives a batch to the thread of its lane, which trains the replica with it.
    fn give_to_thread(&self, lane: usize, batch: Batch) -> Result<(), RoleError> {
        let piece = self.in_hand(batch)?.piece;
        let (events, number) = (self.events.clone(), seed_of(piece, self.trainer));
        let reply = move |trained: Result<Trained, RoleError>| {
            let event = match trained {
                Ok(trained) => Event::Trained(lane, batch, Box::new(trained)),
                Err(error) => Event::Failed(error),
            };
            // A stopped worker has dropped the receiver.
            let _stopped = events.blocking_send(event);
        };
        let threads = self.trainer.threads.as_ref();
        let fetching = self.trainer.fetch(std::iter::once(piece), None).into_single();
        let (Some(threads), Some(fetching)) = (threads, fetching) else { return Err(unknown(batch)) };
        threads.train(lane, Job { fetching, number, reply: Box::new(reply) })
    }

    /// Counts a batch that a thread has trained, and keeps its gradients for the push.
    fn take_trained(&mut self, lane: usize, batch: Batch, trained: Trained) -> Result<(), RoleError> {
        let (step, started) = (self.in_hand(batch)?.piece.key.position.number(), trained.started);
        let (own, output) = self.trainer.check_trained(trained, step)?;
        if let Some(replica) = &mut self.replica {
            replica.trained();
        }
        self.keep(lane, own, output, (Vec::new(), started))
    }

    /// Counts a computed batch, and keeps its gradients for the push. `of`: the steps of the dense
    /// parameters, and the begin of the batch.
    fn keep(
        &mut self,
        lane: usize,
        own: LocalBatch,
        output: StepOutput,
        of: (Vec<u64>, Instant),
    ) -> Result<(), RoleError> {
        let (loss_sum, (dense_pulled_at, started)) = (output.loss_sum(), of);
        let StepOutput { predictions, embedding_gradients, linear_gradients, .. } = output;
        self.trainer.count(&own, loss_sum, &predictions, 0, started)?;
        let pooled = Pooled { embeddings: embedding_gradients, linear: linear_gradients };
        self.computed.insert(lane, Computed { pooled, dense_pulled_at, rows_pulled_at: own.steps });
        Ok(())
    }

    /// Whether training waits for an exchange under way (`shadow`, foreground form). The worker
    /// holds no batch meanwhile. So other workers can train the last batches, and end the order.
    fn is_held(&self) -> bool {
        let sync = self.replica.as_ref().map(Replica::sync);
        sync.is_some_and(|sync| sync.is_foreground() && sync.is_under_way())
    }

    /// In `shadow`: begins an exchange of the replica if one is due.
    fn exchange(&mut self) -> Result<(), RoleError> {
        let Some(replica) = &mut self.replica else { return Ok(()) };
        if !replica.sync().is_due() {
            return Ok(());
        }
        let started = Instant::now();
        let exchanging = replica.begin_exchange(self.trainer, false)?;
        let events = self.events.clone();
        self.trainer.spawn(async move {
            let event = match exchanging.await {
                Ok(answers) => Event::Exchanged(answers, started.elapsed()),
                Err(error) => Event::Failed(error),
            };
            let _stopped = events.send(event).await;
        });
        Ok(())
    }

    /// Sends row gradients to the embedding worker, and without a replica dense gradients to every
    /// parameter server. Does not wait.
    fn push(&mut self, lane: usize, assignment: Assignment) -> Result<(), RoleError> {
        let Some(computed) = self.computed.remove(&lane) else {
            return Err(rectrain_modes::gba::WorkerError::NothingComputed.into());
        };
        let in_hand = self.in_hand(assignment.batch)?;
        let batch = assignment.batch;
        let push = v1::TokenPush {
            rank: self.trainer.rank.0,
            first_row: batch.first_row,
            rows: batch.rows,
            token: assignment.token.0,
            oldest_token: in_hand.oldest_token,
            pulled_at: computed.rows_pulled_at,
        };
        let rows = self.trainer.send_gradients(in_hand.piece, computed.pooled, None, Some(push.clone()));
        self.acknowledge(ROWS, batch, async {
            let reply =
                rows.await.map_err(|error| RoleError::Task { what: "backward", reason: error.to_string() })??;
            Ok((reply.outcome(), reply.steps.clone()))
        });
        let total = self.trainer.tower.layout().total();
        let servers = self.trainer.peers.placement.servers.len();
        for (index, pulled_at) in computed.dense_pulled_at.into_iter().enumerate() {
            let own = dense_partition(total, index, servers);
            let gradient = vec![Tensor::from(self.trainer.tower.gradients()?[own].to_vec())];
            let channel = self.trainer.peers.placement.servers[index].clone();
            let request =
                v1::PushDense { push: Some(v1::TokenPush { pulled_at: vec![pulled_at], ..push.clone() }), piece: None };
            self.acknowledge(Server(index as u32 + 1), batch, async move {
                let (reply, _) = message::call_server(&channel, request, || Ok(gradient.clone())).await?;
                Ok((reply.outcome(), vec![reply.step]))
            });
        }
        Ok(())
    }

    /// Awaits `pushed` in a task, and sends its result as an event.
    fn acknowledge(
        &self,
        server: Server,
        batch: Batch,
        pushed: impl Future<Output = Result<(v1::Outcome, Vec<u64>), RoleError>> + Send + 'static,
    ) {
        let events = self.events.clone();
        self.trainer.spawn(async move {
            let event = match pushed.await {
                Ok((outcome, steps)) => Event::Acknowledged { server, batch, outcome, steps },
                Err(error) => Event::Failed(error),
            };
            let _stopped = events.send(event).await;
        });
    }

    /// Reports a batch to the coordinator, without waiting.
    fn report(&mut self, batch: Batch, outcome: Outcome) -> Result<(), RoleError> {
        let in_hand = self.in_hand.remove(&batch).ok_or_else(|| unknown(batch))?;
        let (exchanges, exchanged_batches) = self.replica.as_mut().map_or((0, 0), Replica::take_gaps);
        let report = v1::BatchReport {
            rank: self.trainer.rank.0,
            first_row: batch.first_row,
            rows: batch.rows,
            outcome: outcome::write(outcome).into(),
            dense_steps: in_hand.dense_steps,
            embedding_steps: in_hand.embedding_steps,
            unseen: self.replica.as_ref().map_or(0, |replica| replica.sync().unseen()),
            exchanges,
            exchanged_batches,
        };
        let coordinator = self.trainer.peers.coordinator.clone();
        self.reports.push_back(
            self.trainer.spawn(async move { coordinator.call(report, Vec::new(), CALL_DEADLINE).await.map(drop) }),
        );
        while self.reports.front().is_some_and(JoinHandle::is_finished) {
            let Some(report) = self.reports.pop_front() else { break };
            self.trainer.join("batch_report", report)?;
        }
        Ok(())
    }

    /// Every batch is pushed. Ends the exchanges of the replica, and the reports.
    fn finish(mut self) -> Result<(), RoleError> {
        while self.replica.as_ref().is_some_and(|replica| replica.sync().is_under_way()) {
            // No other event can come: nothing else is under way.
            self.next_event()?;
        }
        if let Some(replica) = self.replica.take() {
            replica.finish(self.trainer)?;
        }
        self.reports.into_iter().try_for_each(|report| self.trainer.join("batch_report", report))
    }

    fn in_hand(&self, batch: Batch) -> Result<&InHand, RoleError> {
        self.in_hand.get(&batch).ok_or_else(|| unknown(batch))
    }
}

/// The seed of dropout of a piece. Each piece has its own. If a batch has one piece, the seed is
/// the number of the batch, as in modes with a barrier.
fn seed_of(piece: Piece, trainer: &Trainer) -> u64 {
    piece.key.position.number() * u64::from(trainer.plan.pieces()) + u64::from(piece.key.piece)
}

fn unknown(batch: Batch) -> RoleError {
    RoleError::Inconsistent { message: "pull", reason: format!("this worker has not pulled {batch}") }
}

//! Trains the pieces that the worker pulls (`sync` with `spec.training.sync.pieces: pulled`). Each
//! piece is computed alone, with the parameters before its step, which the parameter servers hold.
//! [`PieceWorker`] decides the next action, and this module carries it out.

use std::collections::{HashMap, VecDeque};
use std::time::Instant;

use futures::future::try_join_all;
use rectrain_dense::StepOutput;
use rectrain_modes::barrier::pulled::{PieceAction, PieceOutcome, PieceWorker, StepPiece};
use rectrain_modes::{GlobalStep, Rank};
use rectrain_proto::v1;
use rectrain_proto::v1::pull_reply::Reply as PullReply;
use rectrain_wire::Tensor;
use tokio::sync::mpsc;
use tokio::task::JoinHandle;

use super::WorkerHalf;
use crate::local_batch::LocalBatch;
use crate::partitions::wrong_size;
use crate::trainer::Trainer;
use rectrain_protocol::batch::BatchKey;
use rectrain_protocol::deadline::CALL_DEADLINE;
use rectrain_protocol::error::RoleError;
use rectrain_protocol::layout::Pooled;
use rectrain_protocol::message;
use rectrain_protocol::plan::dense_partition;
use rectrain_protocol::round_robin::Piece;

/// The capacity of the channel of events. There are at most as many events as calls in flight: a
/// pull, and a few for each of the few pieces in hand.
const EVENTS: usize = 64;
/// The most reports on their way to the coordinator.
const REPORTS: usize = 8;

/// The result of a call in flight.
enum Event {
    Pulled(PullReply),
    Fetched(StepPiece, Box<LocalBatch>),
    /// The partitions before a step, by server. `None`: a server has applied the step.
    Read(GlobalStep, Option<Vec<Vec<f32>>>),
    Acknowledged(StepPiece),
    Failed(RoleError),
}

/// A piece between its pull and its report.
struct InHand {
    piece: Piece,
    /// From the fetch until the computation.
    batch: Option<LocalBatch>,
    /// From the computation on.
    computed: Computed,
}

/// The results of a piece that go to no parameter server.
#[derive(Default)]
struct Computed {
    loss_sum: f64,
    predictions: Vec<f32>,
    labels: Vec<f32>,
}

/// A report on its way to the coordinator. Another worker may have reported the piece. The reply
/// says whether the predictions count.
struct Reporting {
    reply: JoinHandle<Result<v1::PieceReported, RoleError>>,
    computed: Computed,
}

/// Training of pulled pieces.
pub(super) struct Pulled;

impl WorkerHalf for Pulled {
    /// Trains until the coordinator hands out no more pieces in this order.
    fn train(&self, trainer: &mut Trainer, order: &v1::Order) -> Result<(), RoleError> {
        trainer.pulls = true;
        Run::new(trainer, order).run()?;
        trainer.pulls = false;
        trainer.tower.set_replica(trainer.rank.0);
        Ok(())
    }
}

/// The state of one order.
struct Run<'a> {
    trainer: &'a mut Trainer,
    order: &'a v1::Order,
    machine: PieceWorker,
    in_hand: HashMap<StepPiece, InHand>,
    /// The gradients of the pooled embeddings of the piece that was computed last.
    gradients: Option<Pooled>,
    /// Parameters that came before a computation with the present ones had begun.
    later: VecDeque<Event>,
    events: mpsc::Sender<Event>,
    happened: mpsc::Receiver<Event>,
    reports: VecDeque<Reporting>,
}

impl<'a> Run<'a> {
    fn new(trainer: &'a mut Trainer, order: &'a v1::Order) -> Self {
        let (events, happened) = mpsc::channel(EVENTS);
        Self {
            trainer,
            order,
            machine: PieceWorker::new(),
            in_hand: HashMap::new(),
            gradients: None,
            later: VecDeque::new(),
            events,
            happened,
            reports: VecDeque::new(),
        }
    }

    fn run(mut self) -> Result<(), RoleError> {
        let mut actions: VecDeque<PieceAction> = self.machine.start().into();
        loop {
            while let Some(action) = actions.pop_front() {
                match action {
                    PieceAction::Pull => self.pull(),
                    PieceAction::Fetch(piece) => self.fetch(piece)?,
                    PieceAction::Read(step) => self.read(step),
                    PieceAction::Compute(piece) => {
                        // The requests that events lead to travel while this thread computes.
                        self.take_events(&mut actions)?;
                        self.compute(piece)?;
                        actions.extend(self.machine.computed(piece).map_err(inconsistent)?);
                    }
                    PieceAction::Send(piece) => self.send(piece)?,
                    PieceAction::Report(piece, outcome) => self.report(piece, outcome)?,
                    PieceAction::Stop => return self.finish(),
                }
            }
            let event = match self.later.pop_front() {
                Some(event) => event,
                None => self.receive()?,
            };
            actions.extend(self.handle(event)?);
        }
    }

    /// Handles the events that have come, except for new parameters: the present ones are about to
    /// be used. No action that this leads to is a computation.
    fn take_events(&mut self, actions: &mut VecDeque<PieceAction>) -> Result<(), RoleError> {
        while let Ok(event) = self.happened.try_recv() {
            if let Event::Read(..) = event {
                self.later.push_back(event);
                continue;
            }
            for action in self.handle(event)? {
                match action {
                    PieceAction::Pull => self.pull(),
                    PieceAction::Fetch(piece) => self.fetch(piece)?,
                    PieceAction::Read(step) => self.read(step),
                    PieceAction::Report(piece, outcome) => self.report(piece, outcome)?,
                    other => actions.push_back(other),
                }
            }
        }
        Ok(())
    }

    /// Waits for the result of a call, and measures the wait.
    fn receive(&mut self) -> Result<Event, RoleError> {
        let waited = Instant::now();
        let event = self.trainer.receive(&mut self.happened)?;
        let waited = waited.elapsed();
        let times = &mut self.trainer.pace.times;
        times.passed(waited);
        if let Event::Fetched(_, batch) = &event {
            times.waited(waited, &batch.reply_time);
            self.trainer.metrics.embedding_wait.observe(waited.as_secs_f64());
        } else if let Event::Pulled(_) = event {
            self.trainer.metrics.batch_wait.observe(waited.as_secs_f64());
        }
        Ok(event)
    }

    fn handle(&mut self, event: Event) -> Result<Vec<PieceAction>, RoleError> {
        match event {
            Event::Failed(error) => Err(error),
            Event::Pulled(PullReply::Wait(_)) => {
                self.pull();
                Ok(Vec::new())
            }
            Event::Pulled(PullReply::Rest(_)) => Ok(self.machine.pulled(None)),
            Event::Pulled(PullReply::Piece(pulled)) => self.pulled(&pulled),
            Event::Pulled(PullReply::Assignment(_)) => {
                let reason = "a batch with a token came for a pull of a piece".to_owned();
                Err(RoleError::Inconsistent { message: "pull", reason })
            }
            Event::Fetched(piece, batch) => {
                // The embedding worker may have the gradients already, or the step is applied.
                let has_rows = batch.missing == 0;
                if let Some(in_hand) = self.in_hand.get_mut(&piece).filter(|_| has_rows) {
                    in_hand.batch = Some(*batch);
                }
                Ok(self.machine.fetched(piece, has_rows))
            }
            Event::Read(step, values) => {
                let are_found = values.is_some();
                if let Some(values) = values {
                    self.put_parameters(values)?;
                }
                self.machine.parameters_read(step, are_found).map_err(inconsistent)
            }
            Event::Acknowledged(piece) => self.machine.acknowledged(piece).map_err(inconsistent),
        }
    }

    fn pulled(&mut self, pulled: &v1::PulledPiece) -> Result<Vec<PieceAction>, RoleError> {
        let missing = || RoleError::Inconsistent { message: "pull", reason: "the piece is missing".to_owned() };
        let v1::StepPiece { step, piece } = pulled.piece.ok_or_else(missing)?;
        let at = StepPiece { step: GlobalStep(step), piece: Rank(piece) };
        let key = BatchKey::read("pull", pulled.batch)?;
        let piece = Piece { key, embedding_worker: pulled.embedding_worker as usize };
        self.in_hand.entry(at).or_insert(InHand { piece, batch: None, computed: Computed::default() });
        Ok(self.machine.pulled(Some(at)))
    }

    fn pull(&self) {
        let coordinator = self.trainer.peers.coordinator.clone();
        let request = v1::PullRequest { rank: self.trainer.rank.0, order: self.order.number };
        self.tell(async move {
            let (reply, _) = coordinator.call(request, Vec::new(), CALL_DEADLINE).await?;
            Ok(Event::Pulled(reply.reply.unwrap_or(PullReply::Wait(v1::Wait {}))))
        });
    }

    fn fetch(&self, at: StepPiece) -> Result<(), RoleError> {
        let piece = self.in_hand(at)?.piece;
        let fetching = self.trainer.fetch(std::iter::once(piece), Some(at.step.0)).into_single();
        let fetching = fetching.ok_or_else(|| unknown(at))?;
        self.tell(async move { Ok(Event::Fetched(at, Box::new(joined("forward", fetching).await?))) });
        Ok(())
    }

    /// Reads the parameters before a step from all servers. Each replies once it has applied the
    /// steps before.
    fn read(&self, step: GlobalStep) {
        let (servers, patience) = (self.trainer.peers.placement.servers.clone(), self.trainer.plan.patience());
        self.tell(async move {
            let request = v1::GetPartition { state: false, before: Some(step.0) };
            let calls =
                servers.iter().map(|server| message::call_server_within(server, request, || Ok(Vec::new()), patience));
            let mut values = Some(Vec::new());
            for (reply, tensors) in try_join_all(calls).await? {
                if reply.is_applied {
                    values = None;
                } else if let Some(values) = &mut values {
                    let [own] = message::take("get_partition", tensors)?;
                    values.push(own.expect_f32("parameters")?);
                }
            }
            Ok(Event::Read(step, values))
        });
    }

    fn put_parameters(&mut self, values: Vec<Vec<f32>>) -> Result<(), RoleError> {
        let tower = &mut self.trainer.tower;
        let (total, servers) = (tower.layout().total(), values.len());
        for (server, own) in values.into_iter().enumerate() {
            let range = dense_partition(total, server, servers);
            if own.len() != range.len() {
                return Err(wrong_size(server, range.len(), own.len()));
            }
            tower.parameters_mut()?[range].copy_from_slice(&own);
        }
        Ok(())
    }

    /// Computes the gradients of a piece. They depend on the piece and the parameters only, so
    /// another worker computes the same ones.
    fn compute(&mut self, at: StepPiece) -> Result<(), RoleError> {
        let started = Instant::now();
        let batch = self.in_hand.get_mut(&at).and_then(|in_hand| in_hand.batch.take()).ok_or_else(|| unknown(at))?;
        let number = self.order.batch + at.step.0.saturating_sub(self.order.step);
        let trainer = &mut *self.trainer;
        let scale = 1.0 / trainer.samples_to_train(self.order, number, &batch).max(1) as f32;
        trainer.tower.set_replica(at.piece.0);
        let output = trainer.compute(&batch, scale, at.step.0, at.step.0)?;
        let loss_sum = output.loss_sum();
        let StepOutput { predictions, embedding_gradients, linear_gradients, .. } = output;
        trainer.metrics.pieces.inc();
        trainer.count_step(batch.samples, loss_sum, 0, started)?;
        self.gradients = Some(Pooled { embeddings: embedding_gradients, linear: linear_gradients });
        if let Some(in_hand) = self.in_hand.get_mut(&at) {
            in_hand.computed = Computed { loss_sum, predictions, labels: batch.labels };
        }
        Ok(())
    }

    /// Sends the gradients of the piece that was computed last, without waiting.
    fn send(&mut self, at: StepPiece) -> Result<(), RoleError> {
        let pooled = self.gradients.take().ok_or_else(|| unknown(at))?;
        let piece = self.in_hand(at)?.piece;
        let rows = self.trainer.send_gradients(piece, pooled, Some(at.step.0), None);
        let (servers, patience) = (self.trainer.peers.placement.servers.clone(), self.trainer.plan.patience());
        let total = self.trainer.tower.layout().total();
        let gradients = self.trainer.tower.gradients()?;
        let of_server = |server| Tensor::from(gradients[dense_partition(total, server, servers.len())].to_vec());
        let gradients: Vec<Tensor> = (0..servers.len()).map(of_server).collect();
        let piece = Some(v1::StepPiece { step: at.step.0, piece: at.piece.0 });
        self.tell(async move {
            let pushes = servers.iter().zip(gradients).map(|(server, gradient)| {
                let push = v1::PushDense { push: None, piece };
                message::call_server_within(server, push, move || Ok(vec![gradient.clone()]), patience)
            });
            let all = try_join_all(pushes);
            futures::future::try_join(all, joined("backward", rows)).await?;
            Ok(Event::Acknowledged(at))
        });
        Ok(())
    }

    /// Reports a piece to the coordinator, without waiting for the reply.
    fn report(&mut self, at: StepPiece, outcome: PieceOutcome) -> Result<(), RoleError> {
        let in_hand = self.in_hand.remove(&at).ok_or_else(|| unknown(at))?;
        let report = v1::PieceReport {
            rank: self.trainer.rank.0,
            order: self.order.number,
            piece: Some(v1::StepPiece { step: at.step.0, piece: at.piece.0 }),
            trained: outcome == PieceOutcome::Trained,
            loss_sum: in_hand.computed.loss_sum,
        };
        let coordinator = self.trainer.peers.coordinator.clone();
        let call = async move { Ok(coordinator.call(report, Vec::new(), CALL_DEADLINE).await?.0) };
        self.reports.push_back(Reporting { reply: self.trainer.spawn(call), computed: in_hand.computed });
        while self.reports.len() > REPORTS || self.reports.front().is_some_and(|report| report.reply.is_finished()) {
            let Some(report) = self.reports.pop_front() else { break };
            self.end_report(report)?;
        }
        Ok(())
    }

    /// Counts the predictions of a piece once, whichever worker has reported it first.
    fn end_report(&mut self, report: Reporting) -> Result<(), RoleError> {
        if self.trainer.join("piece_report", report.reply)?.counts {
            self.trainer.count_predictions(&report.computed.predictions, &report.computed.labels);
        }
        Ok(())
    }

    /// All pieces have ended. Ends the reports.
    fn finish(mut self) -> Result<(), RoleError> {
        while let Some(report) = self.reports.pop_front() {
            self.end_report(report)?;
        }
        Ok(())
    }

    /// Awaits a call in a task, and sends its result as an event.
    fn tell(&self, call: impl Future<Output = Result<Event, RoleError>> + Send + 'static) {
        let events = self.events.clone();
        self.trainer.spawn(async move {
            let event = call.await.unwrap_or_else(Event::Failed);
            // A stopped worker has dropped the receiver.
            let _stopped = events.send(event).await;
        });
    }

    fn in_hand(&self, at: StepPiece) -> Result<&InHand, RoleError> {
        self.in_hand.get(&at).ok_or_else(|| unknown(at))
    }
}

async fn joined<T>(what: &'static str, task: JoinHandle<Result<T, RoleError>>) -> Result<T, RoleError> {
    task.await.map_err(|error| RoleError::Task { what, reason: error.to_string() })?
}

fn inconsistent(error: rectrain_modes::barrier::pulled::PieceError) -> RoleError {
    RoleError::Inconsistent { message: "pull", reason: error.to_string() }
}

fn unknown(at: StepPiece) -> RoleError {
    RoleError::Inconsistent { message: "pull", reason: format!("this worker does not have {at}") }
}

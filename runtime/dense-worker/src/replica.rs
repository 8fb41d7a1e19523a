//! The replica of the dense parameters that a dense worker trains in `shadow` (ShadowSync §3.2 and
//! §3.3). [`ReplicaSync`] decides when the worker exchanges it with the parameter servers.
//!
//! Between two batches, the training thread takes a snapshot. A task sends it and receives the
//! copies of all servers. The training thread applies them between two later batches, to the
//! replica of that moment. So the thread never waits for an exchange, except in the foreground
//! form.
//!
//! An exchange sends one fragment of each server's partition. The fragments of a partition take
//! turns. A server that forms the mean of the replicas decides whose turn it is. With
//! `wirePrecision: bf16`, values travel as differences from a base that both ends know.

use std::num::NonZeroU32;
use std::ops::Range;
use std::time::{Duration, Instant};

use futures::future::try_join_all;
use rectrain_modes::shadow::{Fragments, ReplicaSync, interpolate, receive_difference, send_difference};
use rectrain_proto::v1;
use rectrain_wire::{BoxFuture, Channel, Tensor};

use crate::partitions::wrong_size;
use crate::trainer::{KeptReplica, Trainer};
use rectrain_protocol::error::RoleError;
use rectrain_protocol::message;
use rectrain_protocol::plan::dense_partition;

/// The state of the replica in one order. Its parameters are in the tower.
pub(crate) struct Replica {
    order: u64,
    /// The number of dense workers that train in the order.
    workers: u32,
    /// Whether the servers need this replica at the end of the order, however little it has moved.
    needs_all: bool,
    /// α, above 0 and at most 1.
    alpha: f32,
    fragments: Fragments,
    /// By server: the fragment of the next exchange.
    turns: Vec<u32>,
    /// If values travel as differences in bf16.
    bases: Option<Bases>,
    sync: ReplicaSync,
    /// Exchanges begun in this order.
    exchanges: u64,
    /// Updates of the optimizer's state.
    updates: u64,
    /// The exchanges that have ended since the last report, and the batches between them.
    unreported: (u64, u64),
    /// Whether the replica has trained a batch of this order.
    has_trained: bool,
}

impl Replica {
    /// The replica of an order. It is the one of the last order, or begins with the servers' copy.
    pub(crate) fn begin(trainer: &mut Trainer, order: &v1::Order, shadow: &v1::Shadow) -> Result<Self, RoleError> {
        let updates = trainer.begin_replica(order)?;
        trainer.share_replica(shadow.threads, updates)?;
        let (fragments, servers) = (Fragments::new(shadow.fragments), trainer.peers.placement.servers.len());
        Ok(Self {
            order: order.number,
            workers: shadow.workers,
            needs_all: shadow.needs_all,
            alpha: shadow.alpha,
            fragments,
            turns: vec![0; servers],
            bases: shadow.bf16.then(|| Bases::new(trainer.tower.layout().total(), servers, fragments)),
            sync: ReplicaSync::new(NonZeroU32::new(shadow.every_steps), fragments),
            exchanges: 0,
            updates,
            unreported: (0, 0),
            has_trained: false,
        })
    }

    /// Applies the gradients of a batch.
    pub(crate) fn train(&mut self, trainer: &mut Trainer) -> Result<(), RoleError> {
        self.trained();
        Ok(trainer.tower.apply(self.updates)?)
    }

    /// A thread has applied the gradients of a batch.
    pub(crate) fn trained(&mut self) {
        self.updates += 1;
        self.has_trained = true;
        self.sync.trained();
    }

    /// The exchanges of this replica.
    pub(crate) fn sync(&self) -> &ReplicaSync {
        &self.sync
    }

    /// The exchanges that have ended since the last call, and the batches between them.
    pub(crate) fn take_gaps(&mut self) -> (u64, u64) {
        std::mem::take(&mut self.unreported)
    }

    /// Takes a snapshot, and returns the call that sends it to all servers. The call's results are
    /// their answers. `last`: the snapshot has all fragments, and the optimizer's state.
    pub(crate) fn begin_exchange(&mut self, trainer: &mut Trainer, last: bool) -> Result<Exchanging, RoleError> {
        self.sync.begin();
        self.exchanges += 1;
        let (rank, caller) = (trainer.rank.0, trainer.peers.coordinator.caller_id());
        let Self { order, exchanges: number, workers, .. } = *self;
        let exchange = v1::Exchange { rank, order, number, last, caller, workers, fragment: 0, base: 0 };
        self.snapshot(trainer, exchange)
    }

    /// Moves the replica towards the copy. If a server has refused the exchange, it counts as
    /// missed.
    pub(crate) fn end_exchange(
        &mut self,
        trainer: &mut Trainer,
        answers: &[Answer],
        took: Duration,
    ) -> Result<(), RoleError> {
        let is_complete = self.move_towards(trainer, answers)?;
        trainer.metrics.exchange.observe(took.as_secs_f64());
        if is_complete {
            let gap = self.sync.end();
            self.count_gap(trainer, gap);
        } else {
            self.sync.miss();
        }
        Ok(())
    }

    /// Moves the replica towards the copy, in the parts that the servers have sent: w⁽ⁱ⁾ ← (1 − α)
    /// w⁽ⁱ⁾ + α w̃ (algorithm 2, second line). Returns whether all servers have sent theirs.
    fn move_towards(&mut self, trainer: &mut Trainer, answers: &[Answer]) -> Result<bool, RoleError> {
        let mut is_complete = true;
        for ((server, answer), turn) in answers.iter().enumerate().zip(&mut self.turns) {
            match answer {
                Answer::Copy { range, values } => {
                    trainer.move_replica(range, values, self.alpha)?;
                    *turn = self.fragments.after(*turn);
                }
                Answer::Difference { range, difference, base } => {
                    let Some(bases) = &mut self.bases else {
                        let reason = "a difference came in an order with whole values".to_owned();
                        return Err(RoleError::Inconsistent { message: "exchange", reason });
                    };
                    let copy = bases.receive(server, *turn, range, difference, *base);
                    trainer.move_replica(range, copy, self.alpha)?;
                    *turn = self.fragments.after(*turn);
                }
                Answer::Refused(fragment) => {
                    *turn = fragment.map_or(*turn, |fragment| self.fragments.clamp(fragment));
                    is_complete = false;
                }
            }
        }
        Ok(is_complete)
    }

    fn count_gap(&mut self, trainer: &Trainer, gap: Option<u64>) {
        if let Some(gap) = gap.filter(|gap| *gap > 0) {
            trainer.metrics.sync_gap.observe(gap as f64);
            self.unreported = (self.unreported.0 + 1, self.unreported.1 + gap);
        }
    }

    /// Makes the last exchange of the order. If the replica trained nothing in it, only a mean of
    /// all replicas needs this exchange. Then keeps the replica for the next order.
    pub(crate) fn finish(mut self, trainer: &mut Trainer) -> Result<(), RoleError> {
        if self.has_trained || self.needs_all {
            let started = Instant::now();
            let call = self.begin_exchange(trainer, true)?;
            let answers = trainer.wait(call)?;
            if !self.move_towards(trainer, &answers)? {
                let reason = "a server has refused the last exchange of an order".to_owned();
                return Err(RoleError::Inconsistent { message: "exchange", reason });
            }
            trainer.metrics.exchange.observe(started.elapsed().as_secs_f64());
            let gap = self.sync.end_all();
            self.count_gap(trainer, gap);
        }
        trainer.take_shared_replica()?;
        let parameters = trainer.tower.parameters()?.to_vec();
        trainer.replica = Some(KeptReplica { parameters, updates: self.updates });
        Ok(())
    }
}

/// An exchange on its way. Its results are the answers of all servers, by their index.
pub(crate) type Exchanging = BoxFuture<'static, Result<Vec<Answer>, RoleError>>;

/// The answer of a server to a snapshot.
pub(crate) enum Answer {
    /// The copy of these parameters, out of all of them.
    Copy { range: Range<usize>, values: Vec<f32> },
    /// The difference of the copy of these parameters from the ones that were sent, as bf16, and
    /// the number of the base after it.
    Difference { range: Range<usize>, difference: Vec<u16>, base: u64 },
    /// The server's copy has not moved. The server waits for this other fragment, or lacks the base
    /// of a difference.
    Refused(Option<u32>),
}

/// The bases of the fragments of all servers (see [`send_difference`]).
struct Bases {
    /// For each parameter.
    values: Vec<f32>,
    /// By server and fragment: the number of the base. 0 if the server may have another one.
    numbers: Vec<u64>,
    fragments: usize,
}

impl Bases {
    /// No server has a base.
    fn new(parameters: usize, servers: usize, fragments: Fragments) -> Self {
        let fragments = fragments.count() as usize;
        Self { values: vec![0.0; parameters], numbers: vec![0; servers * fragments], fragments }
    }

    /// The tensor that sends these parameters, and the number of its base. Until the answer, the
    /// fragment has no base.
    fn send(&mut self, server: usize, fragment: u32, range: &Range<usize>, parameters: &[f32]) -> (u64, Tensor) {
        let base = &mut self.values[range.clone()];
        let number = std::mem::take(&mut self.numbers[server * self.fragments + fragment as usize]);
        if number == 0 {
            base.copy_from_slice(parameters);
            return (0, Tensor::from(parameters.to_vec()));
        }
        (number, Tensor::from(send_difference(base, parameters)))
    }

    /// The copy of a fragment, by the answer of its server.
    fn receive(
        &mut self,
        server: usize,
        fragment: u32,
        range: &Range<usize>,
        difference: &[u16],
        number: u64,
    ) -> &[f32] {
        let base = &mut self.values[range.clone()];
        receive_difference(base, difference);
        self.numbers[server * self.fragments + fragment as usize] = number;
        base
    }
}

impl Trainer {
    /// Moves these parameters of the replica towards the copy, also while threads train it.
    fn move_replica(&mut self, range: &Range<usize>, copy: &[f32], alpha: f32) -> Result<(), RoleError> {
        match &self.threads {
            Some(threads) => threads.replica.interpolate(range.clone(), copy, alpha),
            None => interpolate(&mut self.tower.parameters_mut()?[range.clone()], copy, alpha),
        }
        Ok(())
    }

    /// Puts the replica of the last order back, or begins one that is equal to the servers' copy.
    /// Returns the number of updates of its optimizer's state.
    fn begin_replica(&mut self, order: &v1::Order) -> Result<u64, RoleError> {
        if let Some(kept) = self.replica.take() {
            self.tower.parameters_mut()?.copy_from_slice(&kept.parameters);
            return Ok(kept.updates);
        }
        self.read_back()?;
        // An earlier order in `shadow` counted the batches of all workers. The count is then too
        // high. It only matters to Adam's bias correction, in the first updates.
        Ok(order.step.saturating_sub(order.dense_since))
    }
}

impl Replica {
    /// The calls that send each server its part of the present parameters.
    fn snapshot(&mut self, trainer: &mut Trainer, exchange: v1::Exchange) -> Result<Exchanging, RoleError> {
        if exchange.last {
            trainer.take_shared_replica()?;
        } else if let Some(threads) = &trainer.threads {
            threads.replica.read(trainer.tower.parameters_mut()?);
        }
        let tower = &mut trainer.tower;
        let (parameters, state) = if exchange.last { tower.state()? } else { (tower.parameters()?, &[][..]) };
        let (total, servers) = (parameters.len(), &trainer.peers.placement.servers);
        let mut calls = Vec::with_capacity(servers.len());
        for ((server, channel), fragment) in servers.iter().enumerate().zip(self.turns.iter().copied()) {
            let own = dense_partition(total, server, servers.len());
            if exchange.last {
                let slots = state.chunks_exact(total.max(1));
                let state: Vec<f32> = slots.flat_map(|slot| slot[own.clone()].iter().copied()).collect();
                let tensors = vec![Tensor::from(parameters[own.clone()].to_vec()), Tensor::from(state)];
                calls.push(send(server, channel.clone(), exchange, tensors, own));
                continue;
            }
            let Range { start, end } = self.fragments.range(fragment, own.len());
            let own = own.start + start..own.start + end;
            let (base, tensor) = match &mut self.bases {
                Some(bases) => bases.send(server, fragment, &own, &parameters[own.clone()]),
                None => (0, Tensor::from(parameters[own.clone()].to_vec())),
            };
            let exchange = v1::Exchange { fragment, base, ..exchange };
            calls.push(send(server, channel.clone(), exchange, vec![tensor], own));
        }
        Ok(Box::pin(try_join_all(calls)))
    }
}

/// Sends a snapshot of the parameters `own` to a server.
async fn send(
    server: usize,
    channel: Channel,
    exchange: v1::Exchange,
    tensors: Vec<Tensor>,
    own: Range<usize>,
) -> Result<Answer, RoleError> {
    let (reply, tensors) = message::call_server(&channel, exchange, move || Ok(tensors.clone())).await?;
    if reply.lacks_base || reply.other_fragment.is_some() {
        return Ok(Answer::Refused(reply.other_fragment));
    }
    let [copy] = message::take("exchange", tensors)?;
    let check = |found: usize| if found == own.len() { Ok(()) } else { Err(wrong_size(server, own.len(), found)) };
    if reply.base == 0 {
        let values = copy.expect_f32("parameters")?;
        check(values.len())?;
        return Ok(Answer::Copy { range: own, values });
    }
    let difference = copy.expect_u16("difference")?;
    check(difference.len())?;
    Ok(Answer::Difference { range: own, difference, base: reply.base })
}

//! The embedding worker: keeps the batches in flight, asks the parameter servers for the rows of their ids, pools them, and on
//! the way back turns gradients of pooled embeddings into gradients of rows (Persia §4.1). Loaders put batches here, whole, and
//! any dense worker may fetch one: which one does is decided only when it does, by rank where there is a barrier and by the
//! coordinator where there is none.

mod finished;
mod prepared_ids;

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use futures::future::try_join_all;
use rectrain_kinds::Compression;
use rectrain_modes::GlobalStep;
use rectrain_modes::migration::SlotMap;
use rectrain_proto::v1;
use rectrain_wire::ids::UniqueIds;
use rectrain_wire::{BoxFuture, Frame, Peer, Refusal, Service, Tensor, WireError};
use tokio::sync::{Notify, OnceCell, Semaphore};

use crate::finished::Finished;
use crate::prepared_ids::PreparedIds;
use rectrain_protocol::batch::{BatchKey, BatchPosition};
use rectrain_protocol::blocking::blocking;
use rectrain_protocol::compression::TensorCodec;
use rectrain_protocol::error::{RoleError, is_gone};
use rectrain_protocol::layout::{FeatureLayout, decode_pooled, encode_pooled};
use rectrain_protocol::message::{self, Request};
use rectrain_protocol::metrics::EmbeddingWorkerMetrics;
use rectrain_protocol::placement::{Directory, Placement, is_stale};
use rectrain_protocol::plan::JobPlan;

/// How often a look-up fetches the slot map again, and the pause if the coordinator has no newer one yet.
const MAP_ATTEMPTS: usize = 100;
const MAP_PAUSE: Duration = Duration::from_millis(20);

/// A piece of a batch, with its ids prepared.
struct Held {
    prepared: PreparedIds,
    global_samples: u32,
    /// Dense features, labels, and groups if there are any.
    rest: Vec<Tensor>,
    /// Of an evaluation: whether it has been fetched. Should the answer be lost with its connection it is fetched again.
    is_evaluated: AtomicBool,
}

/// How far the dense workers are. Bounds what is held: a loader waits while its batch is more than a window ahead.
#[derive(Default)]
struct Positions {
    train: u64,
    evaluation: Option<GlobalStep>,
    /// By piece of a batch: the batch that was asked for last. Each is one dense worker's, and they are not alike fast.
    evaluated: HashMap<u32, u64>,
}

impl Positions {
    fn admits(&self, key: BatchKey, window: u64) -> bool {
        match key.position {
            BatchPosition::Train(number) => number < self.train + window,
            // Nobody asks for it any more.
            BatchPosition::Evaluation { at_step, .. } if self.evaluation > Some(at_step) => true,
            BatchPosition::Evaluation { at_step, number } => {
                // Whoever has predicted its pieces asks for none of them of an embedding worker that has come since.
                let evaluated = self.evaluated.get(&key.piece).or_else(|| self.evaluated.values().max());
                number < window + evaluated.copied().filter(|_| self.evaluation == Some(at_step)).unwrap_or(0)
            }
        }
    }

    /// This piece is asked for.
    fn move_to(&mut self, key: BatchKey, window: u64) {
        match key.position {
            BatchPosition::Train(number) => self.train = self.train.max(number),
            BatchPosition::Evaluation { at_step, number } => {
                if self.evaluation != Some(at_step) {
                    self.evaluated.clear();
                }
                self.evaluation = Some(at_step);
                let evaluated = self.evaluated.entry(key.piece).or_insert(number);
                // Whoever has taken a dense worker's place begins at the beginning.
                let begins_anew = number + 2 * window < *evaluated;
                *evaluated = if begins_anew { number } else { number.max(*evaluated) };
            }
        }
    }

    /// Whether it is of an evaluation that another has followed.
    fn is_over(&self, key: BatchKey) -> bool {
        matches!(key.position, BatchPosition::Evaluation { at_step, .. } if self.evaluation > Some(at_step))
    }
}

/// What the parameter servers have answered.
struct LookedUp {
    /// By group; none where a server has applied the step and does not know any more what it answered before.
    rows: Option<Vec<Vec<f32>>>,
    /// The servers' steps.
    steps: Vec<u64>,
    /// In `sync`: all of them have applied the step.
    is_applied: bool,
}

/// What there is of a piece.
enum Piece {
    Here(Arc<Held>),
    /// Its gradients are taken in.
    Answered(v1::BackwardReply),
}

/// See the module's text.
pub struct EmbeddingWorker {
    layout: Arc<FeatureLayout>,
    compression: Compression,
    window: u64,
    /// How long a call waits for what others have to do first.
    patience: Duration,
    directory: OnceCell<Directory>,
    /// Where the slots are, as far as this worker knows.
    placement: Mutex<Option<Arc<Placement>>>,
    batches: Mutex<HashMap<BatchKey, Arc<Held>>>,
    finished: Mutex<Finished>,
    positions: Mutex<Positions>,
    changed: Notify,
    /// One permit a core: work beyond that waits its turn, and how long it does tells whether there are enough embedding workers.
    cores: Semaphore,
    metrics: EmbeddingWorkerMetrics,
}

impl EmbeddingWorker {
    /// Without parameter servers: [`Self::connect`] gives them.
    #[must_use]
    pub fn new(plan: &JobPlan, metrics: EmbeddingWorkerMetrics) -> Self {
        Self {
            layout: Arc::new(plan.layout.clone()),
            compression: plan.compression,
            window: plan.batches_ahead.max(1),
            patience: plan.patience(),
            directory: OnceCell::new(),
            placement: Mutex::default(),
            batches: Mutex::new(HashMap::new()),
            finished: Mutex::new(Finished::of(plan)),
            positions: Mutex::default(),
            changed: Notify::new(),
            cores: Semaphore::new(std::thread::available_parallelism().map_or(1, usize::from)),
            metrics,
        }
    }

    /// Sets where the parameter servers are, and where that is asked for when it has changed. Look-ups that came earlier wait for this.
    pub fn connect(&self, placement: Placement, directory: Directory) {
        // A second roster of the same job is the same roster.
        if self.directory.set(directory).is_ok() {
            *self.lock_placement() = Some(Arc::new(placement));
        }
        self.changed.notify_waiters();
    }

    async fn put_batch(&self, request: v1::PutBatch, mut tensors: Vec<Tensor>) -> Result<Frame, RoleError> {
        let key = BatchKey::read("put_batch", request.batch)?;
        let samples = request.samples as usize;
        let ids = self.layout.features.len() * 3;
        if !(ids + 2..=ids + 3).contains(&tensors.len()) {
            return Err(RoleError::Tensors { message: "put_batch", expected: ids + 2, found: tensors.len() });
        }
        // As long as training rests, be it for an evaluation of hours or for a worker whose node is still to come. Whether it
        // rests for too long is for those to say who watch the job's progress.
        self.wait(|| self.lock_positions().admits(key, self.window).then_some(())).await;
        let rest = tensors.split_off(ids);
        let layout = Arc::clone(&self.layout);
        let prepared = self.work("preparation of ids", move || prepare(samples, tensors, &layout)).await??;
        self.metrics.unique_ids.inc_by(prepared.keys().iter().map(Vec::len).sum::<usize>() as u64);
        let held =
            Held { prepared, global_samples: request.global_samples, rest, is_evaluated: AtomicBool::new(false) };
        // It comes twice if a loader has died, or another embedding worker's answer to one was lost.
        if self.lock_finished().answer_to(key).is_none()
            && !self.lock_positions().is_over(key)
            && let Entry::Vacant(place) = self.lock_batches().entry(key)
        {
            place.insert(Arc::new(held));
            self.metrics.batches_in_flight.inc();
            self.changed.notify_waiters();
        }
        Ok(message::done::<v1::PutBatch>())
    }

    async fn forward(&self, request: v1::Forward) -> Result<Frame, RoleError> {
        let key = BatchKey::read("forward", request.batch)?;
        let held = match self.answered_not_given(key).filter(|_| request.step.is_some()) {
            Some(held) => held,
            None => {
                if let Some(again) = self.given_before(key) {
                    return Ok(again);
                }
                let Piece::Here(held) = self.piece("forward", key).await? else {
                    return self.given_before(key).ok_or(RoleError::Stopped);
                };
                held
            }
        };
        let started = Instant::now();
        let LookedUp { rows, steps, is_applied } = self.look_up_anywhere(&key, request.step, &held.prepared).await?;
        let Some(rows) = rows else {
            let applied = v1::Forwarded { is_applied, ..v1::Forwarded::default() };
            return Ok(message::reply::<v1::Forward>(&applied, Vec::new()));
        };
        self.metrics.look_up.observe(started.elapsed().as_secs_f64());
        match key.position {
            BatchPosition::Evaluation { at_step, number } => {
                held.is_evaluated.store(true, Ordering::Relaxed);
                self.forget_evaluated(at_step, number, key.piece);
            }
            BatchPosition::Train(number) => self.forget_before(number, request.step.is_some()),
        }
        let started = Instant::now();
        let (layout, by_ids) = (Arc::clone(&self.layout), Arc::clone(&held));
        let pooled = self.work("pooling", move || by_ids.prepared.pool(&rows, &layout)).await?;
        self.metrics.pool.observe(started.elapsed().as_secs_f64());
        let mut tensors = encode_pooled(pooled, &self.layout, |values, dim| self.compression.encode(values, dim))?;
        // The batch stays until its gradients are here: another worker may have to fetch it again.
        tensors.extend(held.rest.iter().cloned());
        let samples = held.prepared.samples() as u32;
        let global_samples = held.global_samples;
        let answered = self.lock_finished().answer_to(key).is_some();
        let reply = v1::Forwarded { samples, global_samples, steps, answered, is_applied };
        self.lock_finished().give(key, request.step.is_some(), &reply, &tensors);
        Ok(message::reply::<v1::Forward>(&reply, tensors))
    }

    /// A piece whose gradients are here and that its dense worker got from this worker's predecessor: should the dense worker die as well, its
    /// successor needs it once more.
    fn answered_not_given(&self, key: BatchKey) -> Option<Arc<Held>> {
        let finished = self.lock_finished();
        let is_it = finished.answer_to(key).is_some() && !finished.was_given(key);
        drop(finished);
        self.lock_batches().get(&key).filter(|_| is_it).cloned()
    }

    fn given_before(&self, key: BatchKey) -> Option<Frame> {
        let (reply, tensors) = self.lock_finished().given(key)?;
        Some(message::reply::<v1::Forward>(&reply, tensors))
    }

    async fn backward(&self, request: v1::Backward, tensors: Vec<Tensor>) -> Result<Frame, RoleError> {
        let key = BatchKey::read("backward", request.batch)?;
        // Its predecessor may have answered the look-up: then the batch comes again.
        let held = match self.piece("backward", key).await? {
            Piece::Here(held) => held,
            Piece::Answered(reply) => return Ok(message::reply::<v1::Backward>(&reply, Vec::new())),
        };
        let samples = held.prepared.samples();
        let mut tensors = tensors.into_iter();
        let gradients = decode_pooled("backward", &mut tensors, samples, &self.layout, self.compression)?;
        let (layout, by_ids) = (Arc::clone(&self.layout), Arc::clone(&held));
        let rows = self.work("scattering of gradients", move || by_ids.prepared.scatter(&gradients, &layout)).await?;
        let started = Instant::now();
        let reply = self.update(&key, &request, &held.prepared, rows).await?;
        self.metrics.update.observe(started.elapsed().as_secs_f64());
        // First the answer, so that the batch is not taken in again in between.
        let rank = request.push.as_ref().map(|push| push.rank);
        self.lock_finished().answer(key, rank, reply.clone());
        self.changed.notify_waiters();
        let may_be_asked_for = request.step.is_some() && self.lock_finished().is_needed_again(key);
        if !may_be_asked_for {
            self.forget(key);
        }
        Ok(message::reply::<v1::Backward>(&reply, Vec::new()))
    }

    /// Computes on a core of its own as soon as one is free.
    async fn work<T: Send + 'static>(
        &self,
        what: &'static str,
        work: impl FnOnce() -> T + Send + 'static,
    ) -> Result<T, RoleError> {
        let queued = Instant::now();
        let _core = self.cores.acquire().await.map_err(|_closed| RoleError::Stopped)?;
        self.metrics.queue.observe(queued.elapsed().as_secs_f64());
        let started = Instant::now();
        let done = blocking(what, work).await?;
        self.metrics.service.observe(started.elapsed().as_secs_f64());
        Ok(done)
    }

    /// The piece; waits for it, and lets those up to it in. Another dense worker, which has died since, may have been faster.
    async fn piece(&self, message: &'static str, key: BatchKey) -> Result<Piece, RoleError> {
        self.lock_positions().move_to(key, self.window);
        self.changed.notify_waiters();
        let there = || {
            let answer = self.lock_finished().answer_to(key).cloned().map(Piece::Answered);
            answer.or_else(|| self.lock_batches().get(&key).cloned().map(Piece::Here))
        };
        let piece = match key.position {
            BatchPosition::Train(_) => self.until("the batch", there).await.ok(),
            BatchPosition::Evaluation { .. } => self.while_others_get_on(there).await,
        };
        piece.ok_or_else(|| {
            let reason = format!("{key} did not arrive within {:?}", self.patience);
            RoleError::Inconsistent { message, reason }
        })
    }

    /// As [`Self::look_up`], with the slot map fetched again as often as a server says that it is old.
    async fn look_up_anywhere(
        &self,
        key: &BatchKey,
        step: Option<u64>,
        prepared: &PreparedIds,
    ) -> Result<LookedUp, RoleError> {
        let started = Instant::now();
        for _attempt in 0..MAP_ATTEMPTS {
            let placement = self.placement().await?;
            match self.look_up(&placement, key, step, prepared).await {
                Err(error) if is_stale(&error) => self.fetch_placement(&placement).await?,
                // A server ends when its slots have left, which this worker may not have heard of.
                Err(RoleError::Wire(error)) if is_gone(&error) && self.is_superseded(&placement).await => {}
                // It was killed, and may come back with its rows: the next call waits for it.
                Err(RoleError::Wire(WireError::Closed { .. })) if started.elapsed() < self.patience => {
                    tokio::time::sleep(MAP_PAUSE).await;
                }
                looked_up => return looked_up,
            }
        }
        let placement = self.placement().await?;
        self.look_up(&placement, key, step, prepared).await
    }

    /// Asks every parameter server, also one that holds none of the keys: with a barrier each holds the look-up back until this
    /// step may be read. One that has applied it answers as it did before.
    ///
    /// # Errors
    /// Some have applied it and others have not, and one of them does not know any more what it answered before: what the others still need cannot
    /// be computed any more.
    async fn look_up(
        &self,
        placement: &Placement,
        key: &BatchKey,
        step: Option<u64>,
        prepared: &PreparedIds,
    ) -> Result<LookedUp, RoleError> {
        let runs = runs(&placement.map, prepared);
        let train = matches!(key.position, BatchPosition::Train(_));
        let request = v1::Lookup { step, train, map_epoch: placement.epoch().0 };
        let calls = placement.servers.iter().enumerate().map(|(server, channel)| {
            let keys =
                prepared.keys().iter().zip(&runs).map(|(keys, runs)| Tensor::from(gather(keys, &runs[server], 1)));
            message::call(channel, request, keys.collect(), self.patience)
        });
        let looked_up = try_join_all(calls).await?;
        let applied = looked_up.iter().filter(|(reply, _)| reply.is_applied).count();
        let is_applied = applied > 0 && applied == looked_up.len();
        if looked_up.iter().any(|(reply, tensors)| reply.is_applied && tensors.is_empty()) {
            let nothing = LookedUp { rows: None, steps: Vec::new(), is_applied };
            return if is_applied { Ok(nothing) } else { Err(applied_by_some(applied, looked_up.len())) };
        }
        let (steps, mut replies): (Vec<_>, Vec<_>) =
            looked_up.into_iter().map(|(reply, tensors)| (reply.step, tensors.into_iter())).unzip();
        let mut rows = Vec::with_capacity(runs.len());
        for (group, dim) in self.layout.group_dims.iter().enumerate() {
            let mut parts = Vec::with_capacity(replies.len());
            for reply in &mut replies {
                parts.push(self.compression.decode("lookup", reply, *dim)?);
            }
            rows.push(merge(parts, &runs[group], prepared.keys()[group].len(), *dim)?);
        }
        Ok(LookedUp { rows: Some(rows), steps, is_applied })
    }

    /// Gradients go where the rows were looked up. Should the map have changed since, a server refuses them, and the job goes on from its last
    /// checkpoint: another server may have taken its part already. It does not come to that, because the map changes at rest.
    async fn update(
        &self,
        key: &BatchKey,
        request: &v1::Backward,
        prepared: &PreparedIds,
        rows: Vec<Vec<f32>>,
    ) -> Result<v1::BackwardReply, RoleError> {
        let placement = self.placement().await?;
        let (runs, map_epoch) = (runs(&placement.map, prepared), placement.epoch().0);
        let mut calls = Vec::with_capacity(placement.servers.len());
        for (server, channel) in placement.servers.iter().enumerate() {
            let push = request.push.as_ref().map(|push| token_push_to(push, server)).transpose()?;
            let update = v1::Update { step: request.step.unwrap_or_default(), piece: key.piece, push, map_epoch };
            let (rows, runs) = (&rows, &runs);
            let tensors = move || {
                let mut tensors = Vec::with_capacity(3 * rows.len());
                for (group, dim) in self.layout.group_dims.iter().enumerate() {
                    let own = &runs[group][server];
                    tensors.push(Tensor::from(gather(&prepared.keys()[group], own, 1)));
                    tensors.extend(self.compression.encode_gradients(gather(&rows[group], own, *dim), *dim)?);
                }
                Ok(tensors)
            };
            // Gradients are known by their step and piece, or by their batch and token, so that a server that has them already takes no harm.
            calls.push(message::call_server(channel, update, tensors));
        }
        let mut all = v1::BackwardReply::default();
        for (reply, _tensors) in try_join_all(calls).await? {
            self.metrics.missing_rows.inc_by(reply.missing_rows);
            all.outcome = all.outcome.max(reply.outcome);
            all.steps.push(reply.step);
        }
        Ok(all)
    }

    async fn placement(&self) -> Result<Arc<Placement>, RoleError> {
        self.until("the parameter servers", || self.lock_placement().clone()).await
    }

    /// A server has refused the map of `old`, or has not yet heard of it.
    async fn fetch_placement(&self, old: &Placement) -> Result<(), RoleError> {
        let Some(directory) = self.directory.get() else { return Err(RoleError::Stopped) };
        if self.placement().await?.epoch() > old.epoch() {
            return Ok(());
        }
        let fetched = directory.fetch().await?;
        if self.take_over(fetched) {
            return Ok(());
        }
        tokio::time::sleep(MAP_PAUSE).await;
        Ok(())
    }

    /// Whether a newer placement than `old` is in force; it is taken over.
    async fn is_superseded(&self, old: &Placement) -> bool {
        let Some(directory) = self.directory.get() else { return false };
        directory.fetch().await.is_ok_and(|fetched| {
            self.take_over(fetched);
            self.lock_placement().as_ref().is_some_and(|known| known.epoch() > old.epoch())
        })
    }

    /// Says whether the placement was newer than what is known.
    fn take_over(&self, fetched: Placement) -> bool {
        let mut placement = self.lock_placement();
        let is_newer = placement.as_ref().is_none_or(|known| known.epoch() < fetched.epoch());
        if is_newer {
            *placement = Some(Arc::new(fetched));
        }
        is_newer
    }

    /// Waits until `ready` gives something; asked again at every change.
    async fn wait<T>(&self, ready: impl Fn() -> Option<T>) -> T {
        loop {
            let changed = self.changed.notified();
            if let Some(value) = ready() {
                return value;
            }
            changed.await;
        }
    }

    /// As [`Self::wait`], for as long as a call may take.
    async fn until<T>(&self, what: &'static str, ready: impl Fn() -> Option<T>) -> Result<T, RoleError> {
        tokio::time::timeout(self.patience, self.wait(ready)).await.map_err(|_| RoleError::Task {
            what: "an embedding worker's wait",
            reason: format!("{what} did not come within {:?}", self.patience),
        })
    }

    /// As [`Self::until`], for as long as anything comes or is asked for here: loaders bring the pieces of all, and a dense worker that has taken
    /// another's place may be far behind.
    async fn while_others_get_on<T>(&self, ready: impl Fn() -> Option<T>) -> Option<T> {
        loop {
            let changed = self.changed.notified();
            if let Some(value) = ready() {
                return Some(value);
            }
            tokio::time::timeout(self.patience, changed).await.ok()?;
        }
    }

    /// Batch `number` of training has been asked for: what nobody will ask for any more goes.
    fn forget_before(&self, number: u64, has_barrier: bool) {
        let has_rows = |held: &Held| held.prepared.samples() > 0;
        self.retain(|key, held| may_be_fetched(key.position, number, self.window, has_rows(held), has_barrier));
    }

    /// This piece of batch `number` of an evaluation has been fetched: those of it that were fetched long before go, and all of earlier evaluations.
    /// Others stay: another dense worker may be far behind.
    fn forget_evaluated(&self, at_step: GlobalStep, number: u64, piece: u32) {
        self.retain(|key, held| match key.position {
            BatchPosition::Train(_) => true,
            BatchPosition::Evaluation { at_step: of, number: fetched } => {
                let is_gone = held.is_evaluated.load(Ordering::Relaxed) && fetched + 2 * self.window < number;
                of == at_step && !(is_gone && key.piece == piece)
            }
        });
    }

    fn retain(&self, stays: impl Fn(BatchKey, &Held) -> bool) {
        let mut batches = self.lock_batches();
        let before = batches.len();
        batches.retain(|key, held| stays(*key, held));
        self.metrics.batches_in_flight.sub((before - batches.len()) as i64);
    }

    fn forget(&self, key: BatchKey) {
        if self.lock_batches().remove(&key).is_some() {
            self.metrics.batches_in_flight.dec();
        }
    }

    fn lock_batches(&self) -> MutexGuard<'_, HashMap<BatchKey, Arc<Held>>> {
        self.batches.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn lock_finished(&self) -> MutexGuard<'_, Finished> {
        self.finished.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn lock_placement(&self) -> MutexGuard<'_, Option<Arc<Placement>>> {
        self.placement.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn lock_positions(&self) -> MutexGuard<'_, Positions> {
        self.positions.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Service for EmbeddingWorker {
    fn call<'a>(&'a self, _peer: &'a Peer, frame: Frame) -> BoxFuture<'a, Result<Frame, Refusal>> {
        Box::pin(async move {
            match frame.kind {
                v1::PutBatch::KIND => {
                    let (request, tensors) = message::read::<v1::PutBatch>(frame)?;
                    Ok(self.put_batch(request, tensors).await?)
                }
                v1::Forward::KIND => Ok(self.forward(message::read::<v1::Forward>(frame)?.0).await?),
                v1::Backward::KIND => {
                    let (request, tensors) = message::read::<v1::Backward>(frame)?;
                    Ok(self.backward(request, tensors).await?)
                }
                kind => Err(message::refuse_kind("embedding worker", kind)),
            }
        })
    }
}

/// Whether a piece may still be fetched when batch `number` of training has been. Pieces without rows, which short batches have, are fetched only
/// where there is a barrier, and there none far behind the others: it came again because an embedding worker had died that its gradients were with.
/// What came again after an evaluation was over is fetched by nobody.
fn may_be_fetched(position: BatchPosition, number: u64, window: u64, has_rows: bool, has_barrier: bool) -> bool {
    match position {
        // A dense worker asks again for staleness + 2 batches, and another is staleness + 1 ahead: less than two windows.
        BatchPosition::Train(of) if has_barrier => of + 2 * window >= number,
        BatchPosition::Train(of) => has_rows || of + window >= number,
        BatchPosition::Evaluation { .. } => false,
    }
}

/// In `sync`, after an embedding worker and a dense worker have died together, and a parameter server that had answered their look-up as well.
fn applied_by_some(some: usize, servers: usize) -> RoleError {
    let reason = format!(
        "{some} of {servers} parameter servers have applied the step and the others lack gradients that cannot be computed again"
    );
    RoleError::Inconsistent { message: "lookup", reason }
}

/// `[group][server]` → runs of the group's keys.
fn runs(map: &SlotMap, prepared: &PreparedIds) -> Vec<Vec<Vec<Range<usize>>>> {
    prepared.keys().iter().map(|keys| map.split(keys)).collect()
}

/// The token on its way to one server.
fn token_push_to(push: &v1::TokenPush, server: usize) -> Result<v1::TokenPush, RoleError> {
    let pulled_at = push.pulled_at.get(server).copied().ok_or_else(|| RoleError::Inconsistent {
        message: "backward",
        reason: format!("the step of parameter server {server} is missing"),
    })?;
    Ok(v1::TokenPush { pulled_at: vec![pulled_at], ..push.clone() })
}

fn prepare(samples: usize, tensors: Vec<Tensor>, layout: &FeatureLayout) -> Result<PreparedIds, RoleError> {
    let mut tensors = tensors.into_iter();
    let mut unique = Vec::with_capacity(layout.features.len());
    for _feature in &layout.features {
        let parts = [
            message::next("put_batch", &mut tensors)?,
            message::next("put_batch", &mut tensors)?,
            message::next("put_batch", &mut tensors)?,
        ];
        unique.push(UniqueIds::from_tensors(parts, samples as u32)?);
    }
    Ok(PreparedIds::new(samples, unique, layout))
}

/// The runs of `values` ([n, dim]), one after the other.
fn gather<T: Copy>(values: &[T], runs: &[Range<usize>], dim: usize) -> Vec<T> {
    let mut gathered = Vec::with_capacity(runs.iter().map(Range::len).sum::<usize>() * dim);
    for run in runs {
        gathered.extend_from_slice(&values[run.start * dim..run.end * dim]);
    }
    gathered
}

/// The inverse of [`gather`] over all servers.
fn merge(mut parts: Vec<Vec<f32>>, runs: &[Vec<Range<usize>>], keys: usize, dim: usize) -> Result<Vec<f32>, RoleError> {
    for (part, runs) in parts.iter().zip(runs) {
        let expected = runs.iter().map(Range::len).sum::<usize>() * dim;
        if part.len() != expected {
            let reason = format!("{expected} values were asked for, {} came", part.len());
            return Err(RoleError::Inconsistent { message: "lookup", reason });
        }
    }
    if parts.len() == 1 {
        return Ok(parts.pop().unwrap_or_default());
    }
    let mut merged = vec![0.0; keys * dim];
    for (part, runs) in parts.iter().zip(runs) {
        let mut next = 0;
        for run in runs {
            let length = run.len() * dim;
            merged[run.start * dim..run.end * dim].copy_from_slice(&part[next..next + length]);
            next += length;
        }
    }
    Ok(merged)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn merge_undoes_gather_for_any_slot_map() {
        let keys: Vec<u64> = (0..500u64).map(|i| i * (u64::MAX / 500)).collect();
        let values: Vec<f32> = (0..1000u16).map(f32::from).collect();
        for servers in [1u16, 2, 5] {
            let runs = SlotMap::even(64, servers).split(&keys);
            let parts = runs.iter().map(|runs| gather(&values, runs, 2)).collect();
            assert_eq!(merge(parts, &runs, keys.len(), 2).unwrap(), values);
        }
    }

    #[test]
    fn what_came_again_and_was_trained_long_ago_is_not_kept_for_ever() {
        let kept = |of, has_rows, has_barrier| may_be_fetched(BatchPosition::Train(of), 100, 8, has_rows, has_barrier);
        assert_eq!([83, 84, 99, 120].map(|of| kept(of, true, true)), [false, true, true, true]);
        assert_eq!([0, 99].map(|of| kept(of, true, false)), [true, true], "a batch may be handed out again late");
        assert_eq!([91, 92, 120].map(|of| kept(of, false, false)), [false, true, true]);
        let evaluation = BatchPosition::Evaluation { at_step: GlobalStep(7), number: 1 };
        assert!(!may_be_fetched(evaluation, 100, 8, true, true));
    }

    #[test]
    fn pieces_of_an_evaluation_come_as_far_as_their_own_dense_worker_is() {
        let key = |at_step: u64, number: u64, piece: u32| BatchKey {
            position: BatchPosition::Evaluation { at_step: GlobalStep(at_step), number },
            piece,
        };
        let mut positions = Positions::default();
        (0..1000).for_each(|number| positions.move_to(key(7, number, 0), 8));
        positions.move_to(key(7, 5, 1), 8);
        let admits = |positions: &Positions, number, piece| positions.admits(key(7, number, piece), 8);
        // The last is asked for by nobody.
        for (piece, most) in [(0, 1006), (1, 12), (2, 1006)] {
            assert!(admits(&positions, most, piece) && !admits(&positions, most + 1, piece), "piece {piece}");
        }
        // A successor begins at the beginning, and what came late of the one before does no harm.
        for number in [0, 999, 1, 2] {
            positions.move_to(key(7, number, 0), 8);
        }
        assert_eq!([9, 10].map(|number| admits(&positions, number, 0)), [true, false]);
        // Another evaluation: nobody asks for what was of this one, and whoever brings it is let go.
        positions.move_to(key(9, 0, 0), 8);
        assert!(positions.admits(key(7, 5000, 0), 8) && positions.is_over(key(7, 5000, 0)));
        assert!(!positions.admits(key(9, 8, 0), 8) && !positions.is_over(key(9, 8, 0)));
    }

    #[test]
    fn rows_that_do_not_fit_the_question_are_refused() {
        let runs = vec![vec![0..2], vec![2..3]];
        assert!(merge(vec![vec![0.0; 4], vec![0.0; 1]], &runs, 3, 2).is_err());
    }
}

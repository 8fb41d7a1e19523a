//! The parameter server: holds the rows of its slots, answers look-ups and applies updates in the order that the training mode
//! asks for: with a barrier ([`StepGate`]), or without one, when it holds a partition of the dense parameters as well
//! ([`tokens`]). Embedding workers call it, dense workers for its partition, and the coordinator to begin a mode, for checkpoints
//! ([`checkpoint`]), to move slots to and from other servers ([`slots`]), and for the digest at the end.

mod answered;
mod buffer;
mod checkpoint;
mod kept;
mod slots;
#[cfg(all(test, target_os = "linux"))]
#[allow(clippy::unwrap_used, reason = "an unwrap in a test is an assertion")]
mod tests;
mod tokens;

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};
use std::time::Instant;

use futures::{StreamExt, TryStreamExt};
use rectrain_embedding::{FeatureKey, GroupId, LookupCounts, Missing, Slot, Store, UpdateCounts, UpdateLog};
use rectrain_kinds::Compression;
use rectrain_modes::barrier::{GateError, SparseGradients, StepGate, sum_by_key};
use rectrain_modes::migration::NotServed;
use rectrain_modes::switch::Boundary;
use rectrain_modes::{GlobalStep, Rank};
use rectrain_proto::v1;
use rectrain_wire::{BoxFuture, Frame, Peer, Refusal, Service, Tensor, Transport};
use tokio::sync::oneshot;

use self::answered::Answered;
use self::checkpoint::Saving;
pub use self::kept::Rows;
use self::kept::{Kept, Left, Standing};
use self::slots::Slots;
use self::tokens::{Held, Partition, Tokens};
use rectrain_modes::TrainingMode;
use rectrain_protocol::blocking::blocking;
use rectrain_protocol::compression::TensorCodec;
use rectrain_protocol::error::RoleError;
use rectrain_protocol::message::{self, Request};
use rectrain_protocol::metrics::PsMetrics;
use rectrain_protocol::plan::JobPlan;
use rectrain_protocol::readiness::Readiness;

/// Slots that are digested at a time, of each of which the rows are copied.
const DIGESTS: usize = 4;

/// The gradients of one piece of a batch: a part for each row group.
type Contribution = Vec<SparseGradients>;
type Gate = StepGate<oneshot::Sender<()>, Contribution>;

/// The rows, and who has to know which of them change.
struct TrackedStore<'s> {
    store: &'s Store,
    slots: &'s Slots,
}

impl TrackedStore<'_> {
    fn look_up(&self, group: GroupId, keys: &[FeatureKey], missing: Missing, out: &mut [f32]) -> CountsResult {
        let counts = self.store.lookup(group, keys, missing, out)?;
        if counts.inserted > 0 {
            self.slots.changed(group, keys);
        }
        Ok(counts)
    }

    /// The optimizers count updates from 1. With a `log` a process that takes this one's place goes on behind the last row.
    fn update(
        &self,
        group: GroupId,
        keys: &[FeatureKey],
        gradients: &[f32],
        step: GlobalStep,
        log: Option<&mut UpdateLog>,
    ) -> Result<UpdateCounts, RoleError> {
        let counts = match log {
            Some(log) => self.store.update_logged(group, keys, gradients, step.0 + 1, log)?,
            None => self.store.update(group, keys, gradients, step.0 + 1)?,
        };
        self.slots.changed(group, keys);
        Ok(counts)
    }
}

/// What a call that takes its time has of the server.
struct Handles {
    store: Arc<Store>,
    slots: Arc<Slots>,
    partition: Arc<RwLock<Partition>>,
    kept: Option<Arc<Kept>>,
    metrics: PsMetrics,
}

impl Handles {
    fn held(&self) -> Held<'_> {
        let Self { store, slots, partition, kept, metrics } = self;
        Held { store: TrackedStore { store, slots }, partition, kept: kept.as_deref(), metrics }
    }
}

/// How updates are ordered.
enum Order {
    /// No mode has begun.
    None,
    Barrier(Gate),
    Tokens(Arc<Tokens>),
}

/// See the module's text.
pub struct ParameterServer {
    plan: Arc<JobPlan>,
    store: Arc<Store>,
    slots: Arc<Slots>,
    /// None where rows end with the process.
    kept: Option<Arc<Kept>>,
    /// Where others reach it.
    address: OnceLock<String>,
    /// Whether no mode has begun here and nothing was restored: the rows may be another's, who has died.
    is_new: AtomicBool,
    group_dims: Vec<usize>,
    order: Mutex<Order>,
    /// From its first mode on.
    takes_part: Readiness,
    /// The mode and where it began, to know a repeated message by.
    began: Mutex<Option<(TrainingMode, Boundary)>>,
    partition: Arc<RwLock<Partition>>,
    /// Locked for as long as it takes to add an answer, or to copy one that is asked for again.
    answered: Mutex<Answered>,
    saving: Saving,
    compression: Compression,
    metrics: PsMetrics,
}

impl ParameterServer {
    /// Parameter server number `index` with these rows; the coordinator says which mode begins, unless the rows are those of a server whose
    /// place this one takes. Slots that move go to other servers over `transport`.
    pub fn new(
        plan: &Arc<JobPlan>,
        index: u32,
        rows: Rows,
        transport: Arc<dyn Transport>,
        metrics: PsMetrics,
    ) -> Result<Self, RoleError> {
        let Rows { store, kept, left } = rows;
        let store = Arc::new(store);
        store.track_changes(plan.checkpoint.is_some());
        let map = left.as_ref().map_or_else(|| Ok(plan.slot_map()), |left| left.standing.map())?;
        let slots = Arc::new(Slots::new(index, map, &store, transport, metrics.clone()));
        let server = Self {
            plan: Arc::clone(plan),
            saving: Saving::new(plan, index, &slots),
            store,
            slots,
            kept: kept.map(Arc::new),
            address: OnceLock::new(),
            is_new: AtomicBool::new(true),
            group_dims: plan.layout.group_dims.clone(),
            order: Mutex::new(Order::None),
            takes_part: Readiness::default(),
            began: Mutex::new(None),
            partition: Arc::default(),
            answered: Mutex::new(Answered::of(plan.pieces())),
            compression: plan.compression,
            metrics,
        };
        if let Some(left) = left {
            server.go_on(left)?;
        }
        Ok(server)
    }

    /// It is to tell when it takes part.
    #[must_use]
    pub fn telling(mut self, takes_part: Readiness) -> Self {
        if !self.is_new.load(Ordering::Acquire) {
            takes_part.begin();
        }
        self.takes_part = takes_part;
        self
    }

    /// Others reach this server at `address`.
    pub fn serves_at(&self, address: &str) {
        // One that is served twice is reached where it was first.
        let _again = self.address.set(address.to_owned());
    }

    /// Stands where the server stood whose rows these are.
    fn go_on(&self, left: Left) -> Result<(), RoleError> {
        let Some(kept) = &self.kept else { return Ok(()) };
        let Left { standing, reopened, gradients, tokens, partition } = left;
        let begin = standing.begin();
        let (mode, at) = self.beginning(&begin)?;
        // Of slots that had left, and were not dropped yet.
        let own = self.slots.own();
        let others = (0..self.store.config().slots).map(Slot).filter(|slot| !own.contains(*slot));
        others.into_iter().try_for_each(|slot| self.store.clear_slot(slot).map(drop))?;
        *self.write_partition() = partition;
        let next = GlobalStep(at.step.0 + u64::from(kept.log().update()));
        let order = match mode {
            TrainingMode::Tokens(mode) => {
                let collected = Tokens::new(&self.plan, mode, at);
                collected.go_on(&self.plan, mode, tokens, &self.handles().held())?;
                Order::Tokens(Arc::new(collected))
            }
            TrainingMode::Sync | TrainingMode::Hybrid { .. } => {
                let mut gate = Gate::new(self.plan.pieces(), mode.staleness(), next);
                if next == at.step {
                    self.begin_within(&mut gate, &begin)?;
                }
                for (step, piece, contribution) in gradients {
                    gate.push(GlobalStep(step), Rank(piece), contribution)?;
                }
                Order::Barrier(gate)
            }
        };
        *self.began.lock().unwrap_or_else(PoisonError::into_inner) = Some((mode, at));
        *self.lock_order() = order;
        self.is_new.store(false, Ordering::Release);
        self.metrics.kept_rows.set(reopened.rows as i64);
        self.metrics.repaired_rows.set(reopened.repaired_rows as i64);
        self.count_store();
        tracing::info!(step = next.0, rows = reopened.rows, "going on with the rows of the server before");
        Ok(())
    }

    fn handles(&self) -> Handles {
        Handles {
            store: Arc::clone(&self.store),
            slots: Arc::clone(&self.slots),
            partition: Arc::clone(&self.partition),
            kept: self.kept.clone(),
            metrics: self.metrics.clone(),
        }
    }

    fn beginning(&self, begin: &v1::BeginMode) -> Result<(TrainingMode, Boundary), RoleError> {
        let mode = self.plan.mode_named(&begin.mode).ok_or_else(|| RoleError::Inconsistent {
            message: "begin_mode",
            reason: format!("there is no mode `{}`", begin.mode),
        })?;
        Ok((mode, Boundary { step: GlobalStep(begin.step), next_row: begin.first_row }))
    }

    /// Pieces of the first step that were trained before are not pushed any more.
    fn begin_within(&self, gate: &mut Gate, begin: &v1::BeginMode) -> Result<(), RoleError> {
        for piece in 0..begin.first_piece {
            let nothing = self.group_dims.iter().map(|_| SparseGradients::default()).collect();
            gate.push(GlobalStep(begin.step), Rank(piece), nothing)?;
        }
        Ok(())
    }

    fn begin_mode(&self, begin: &v1::BeginMode) -> Result<Frame, RoleError> {
        let (mode, at) = self.beginning(begin)?;
        let mut began = self.began.lock().unwrap_or_else(PoisonError::into_inner);
        if *began == Some((mode, at)) {
            return Ok(message::done::<v1::BeginMode>());
        }
        let order = match mode {
            TrainingMode::Tokens(tokens) => Order::Tokens(Arc::new(Tokens::new(&self.plan, tokens, at))),
            TrainingMode::Sync | TrainingMode::Hybrid { .. } => {
                let mut gate = Gate::new(self.plan.pieces(), mode.staleness(), at.step);
                self.begin_within(&mut gate, begin)?;
                Order::Barrier(gate)
            }
        };
        if let Some(kept) = &self.kept {
            let buffer = if let Order::Tokens(tokens) = &order { tokens.dense_standing() } else { None };
            kept.begin(&self.standing(begin), &self.read_partition(), buffer.as_ref());
        }
        self.is_new.store(false, Ordering::Release);
        self.lock_answered().forget_all();
        *self.lock_order() = order;
        *began = Some((mode, at));
        self.takes_part.begin();
        Ok(message::done::<v1::BeginMode>())
    }

    fn standing(&self, begin: &v1::BeginMode) -> Standing {
        Standing::new(begin, self.address.get().map_or("", String::as_str), &self.slots.map())
    }

    async fn look_up(&self, request: v1::Lookup, tensors: Vec<Tensor>) -> Result<Frame, RoleError> {
        let keys = self.keys_of("lookup", tensors)?;
        if matches!(*self.lock_order(), Order::None) {
            // It may be in the place of one whose slots have left, and the asker's map as old as the first, which this one begins with.
            return Err(NotServed::Unregistered.into());
        }
        self.slots.admit_epoch(request.map_epoch)?;
        let arrived = Instant::now();
        if let Some(step) = request.step {
            let (answer, answered) = oneshot::channel();
            let waits = |gate: &mut Gate| {
                let is_there = !gate.has_passed(GlobalStep(step));
                Ok(is_there.then(|| gate.look_up(GlobalStep(step), answer).is_none()))
            };
            match self.with_gate("lookup", waits)? {
                Some(true) => answered.await.map_err(|_| RoleError::Stopped)?,
                Some(false) => {}
                None => return Ok(self.answered_before(GlobalStep(step), &keys)),
            }
        }
        self.metrics.gate_wait.observe(arrived.elapsed().as_secs_f64());
        let step = match &*self.lock_order() {
            Order::Tokens(tokens) => tokens.embedding_step(),
            Order::Barrier(_) => 0,
            // As in `refuse_if_new`.
            Order::None => return Err(not_this_mode("lookup", "has not begun")),
        };
        let missing = if request.train { Missing::Insert } else { Missing::ReadInitial };
        self.slots.admit_look_up(request.map_epoch, &keys)?;
        let started = Instant::now();
        let (store, slots, dims) = (Arc::clone(&self.store), Arc::clone(&self.slots), self.group_dims.clone());
        let trained = move || {
            let looked_up = look_up_groups(&TrackedStore { store: &store, slots: &slots }, &keys, &dims, missing)?;
            Ok::<_, RoleError>((looked_up, keys))
        };
        let ((rows, counts), keys) = blocking("look-up", trained).await??;
        self.metrics.lookup.observe(started.elapsed().as_secs_f64());
        self.metrics.count_look_up(counts);
        let mut tensors = Vec::with_capacity(2 * rows.len());
        for (rows, dim) in rows.into_iter().zip(&self.group_dims) {
            tensors.extend(self.compression.encode(rows, *dim)?);
        }
        if let Some(step) = request.step.map(GlobalStep) {
            let state = |gate: &mut Gate| Ok((gate.has_passed(step), gate.staleness() == 0));
            let (has_passed, is_sync) = self.with_gate("lookup", state)?;
            // Whoever asks had a predecessor, whose gradients were the step's last but for others': the rows may be those after it.
            if has_passed {
                return Ok(self.answered_before(step, &keys));
            }
            if is_sync && request.train {
                self.keep_answer(step, keys, &tensors);
            }
        }
        Ok(message::reply::<v1::Lookup>(&v1::LookupReply { step, is_applied: false }, tensors))
    }

    /// The answer to a look-up for a step that is applied, or is being: what was answered before it, as far as that is kept.
    fn answered_before(&self, step: GlobalStep, keys: &Vec<Vec<FeatureKey>>) -> Frame {
        let again = self.lock_answered().again(step, keys).unwrap_or_default();
        message::reply::<v1::Lookup>(&v1::LookupReply { is_applied: true, ..v1::LookupReply::default() }, again)
    }

    /// In `sync`, where rows are not what they were once the step is applied. A single dense worker has nobody who takes its place.
    fn keep_answer(&self, step: GlobalStep, keys: Vec<Vec<FeatureKey>>, tensors: &[Tensor]) {
        if self.plan.replicas.dense_workers > 1 {
            let copy = tensors.to_vec();
            let old = self.lock_answered().keep(step, keys, copy);
            // Given back without the lock.
            drop(old);
        }
    }

    async fn update(&self, request: v1::Update, tensors: Vec<Tensor>) -> Result<Frame, RoleError> {
        let contribution = self.gradients_of(tensors)?;
        self.slots.admit_update(request.map_epoch, contribution.iter().map(|group| &*group.keys))?;
        if let Some(push) = request.push {
            let (tokens, handles) = (self.tokens_or_refuse("update")?, self.handles());
            self.give_up_where_memory_is_full();
            let pushed = move || tokens.push_rows(&push, contribution, &handles.held());
            let reply = blocking("update", pushed).await??;
            self.count_store();
            return Ok(message::reply::<v1::Update>(&reply, Vec::new()));
        }
        let piece = Rank(request.piece);
        let contribution = self.keep(request.step, piece, contribution).await?;
        let step = GlobalStep(request.step);
        let applied = self.with_gate("update", |gate| {
            match gate.push(step, piece, contribution) {
                // An embedding worker has died that had pushed them, and its successor does it again; or this server has, before it answered.
                Err(GateError::Repeated { .. }) => {
                    self.metrics.repeated_gradients.inc();
                    let (answer, applied) = oneshot::channel();
                    Ok(gate.pushed_again(step, answer).is_none().then_some(applied))
                }
                pushed => Ok(pushed.map(|()| None)?),
            }
        })?;
        let total = self.apply_ready().await?;
        if let Some(applied) = applied {
            applied.await.map_err(|_| RoleError::Stopped)?;
        }
        Ok(message::reply::<v1::Update>(&total, Vec::new()))
    }

    /// Gradients are not lost from here on, should this process be killed: whoever sent them is told so when they are in the gate.
    async fn keep(&self, step: u64, piece: Rank, contribution: Contribution) -> Result<Contribution, RoleError> {
        let Some(kept) = self.kept.clone() else { return Ok(contribution) };
        self.give_up_where_memory_is_full();
        let keep = move || {
            kept.keep(step, piece.0, &contribution);
            contribution
        };
        blocking("keeping of gradients", keep).await
    }

    fn give_up_where_memory_is_full(&self) {
        if let Some(kept) = &self.kept
            && self.store.is_shared_memory_full()
        {
            kept.give_up(&"it is full");
        }
    }

    /// What the server before was about to apply is applied. Without a barrier it is already: see [`Tokens::go_on`].
    pub async fn finish_taking_over(&self) -> Result<(), RoleError> {
        let has_barrier = matches!(&*self.lock_order(), Order::Barrier(_));
        if has_barrier { self.apply_ready().await.map(drop) } else { Ok(()) }
    }

    /// Applies the steps whose gradients are all there.
    async fn apply_ready(&self) -> Result<v1::UpdateReply, RoleError> {
        let mut total = v1::UpdateReply::default();
        loop {
            let Some((step, contributions)) = self.with_gate("update", |gate| Ok(gate.next_update()))? else { break };
            let reply = self.apply(step, contributions).await?;
            total.missing_rows += reply.missing_rows;
            total.non_finite_rows += reply.non_finite_rows;
            for answer in self.with_gate("update", |gate| Ok(gate.finish_update()))? {
                // A look-up whose caller has gone needs no answer.
                let _gone = answer.send(());
            }
        }
        Ok(total)
    }

    async fn flush(&self) -> Result<Frame, RoleError> {
        let (tokens, handles) = (self.tokens_or_refuse("flush")?, self.handles());
        let flushed = blocking("flush", move || tokens.flush(&handles.held())).await??;
        Ok(message::reply::<v1::FlushRequest>(&flushed, Vec::new()))
    }

    fn put_partition(&self, request: &v1::PutPartition, tensors: Vec<Tensor>) -> Result<Frame, RoleError> {
        let [parameters, state] = message::take("put_partition", tensors)?;
        let (parameters, state) = (parameters.expect_f32("parameters")?, state.expect_f32("state")?);
        let optimizer = self.plan.dense_optimizer;
        if request.optimizer != optimizer.kind().name() || state.len() != parameters.len() * optimizer.slots().len() {
            let reason = format!(
                "{} parameters came with {} values of the state of {}, where the job's optimizer is {}",
                parameters.len(),
                state.len(),
                request.optimizer,
                optimizer.kind()
            );
            return Err(RoleError::Inconsistent { message: "put_partition", reason });
        }
        self.write_partition().put(parameters, state);
        self.keep_partition();
        Ok(message::done::<v1::PutPartition>())
    }

    /// What it holds of the dense parameters has changed, and not by a step.
    fn keep_partition(&self) {
        if let Some(kept) = &self.kept {
            let buffer = self.tokens().and_then(|tokens| tokens.dense_standing());
            kept.keep_partition(&self.read_partition(), buffer.as_ref());
        }
    }

    async fn get_partition(&self, request: v1::GetPartition) -> Result<Frame, RoleError> {
        self.refuse_if_new("get_partition")?;
        let partition = Arc::clone(&self.partition);
        // Behind an update that is under way.
        let (parameters, state) = blocking("reading of the partition", move || {
            let partition = partition.read().unwrap_or_else(PoisonError::into_inner);
            (partition.parameters(), request.state.then(|| partition.state().to_vec()))
        })
        .await?;
        let step = self.tokens().map_or(0, |tokens| tokens.dense_step_of(&parameters));
        let mut tensors = vec![Tensor::from(parameters.values.to_vec())];
        tensors.extend(state.map(Tensor::from));
        let reply = v1::Partition { step, optimizer: self.plan.dense_optimizer.kind().name().to_owned() };
        Ok(message::reply::<v1::GetPartition>(&reply, tensors))
    }

    async fn push_dense(&self, request: v1::PushDense, tensors: Vec<Tensor>) -> Result<Frame, RoleError> {
        let [gradient] = message::take("push_dense", tensors)?;
        let gradient = gradient.expect_f32("gradient")?;
        let push = request
            .push
            .ok_or(RoleError::Inconsistent { message: "push_dense", reason: "the token is missing".to_owned() })?;
        let (tokens, handles) = (self.tokens_or_refuse("push_dense")?, self.handles());
        let reply = blocking("dense update", move || tokens.push_dense(&push, gradient, &handles.held())).await??;
        Ok(message::reply::<v1::PushDense>(&reply, Vec::new()))
    }

    async fn apply(&self, step: GlobalStep, pieces: Vec<Contribution>) -> Result<v1::UpdateReply, RoleError> {
        let started = Instant::now();
        let (store, slots, dims) = (Arc::clone(&self.store), Arc::clone(&self.slots), self.group_dims.clone());
        let kept = self.kept.clone();
        let apply = move || {
            let store = TrackedStore { store: &store, slots: &slots };
            let Some(kept) = kept else { return apply_groups(&store, step, pieces, &dims, None) };
            let mut log = kept.log();
            log.begin();
            let reply = apply_groups(&store, step, pieces, &dims, Some(&mut log))?;
            log.finish();
            kept.forget(step.0 + 1);
            Ok(reply)
        };
        let reply = blocking("update", apply).await??;
        self.metrics.update_time.observe(started.elapsed().as_secs_f64());
        self.metrics.lost_rows.inc_by(reply.missing_rows);
        self.metrics.non_finite_rows.inc_by(reply.non_finite_rows);
        self.count_store();
        Ok(reply)
    }

    fn count_store(&self) {
        self.metrics.rows_held.set(self.store.rows() as i64);
        self.metrics.bytes.set(self.bytes() as i64);
    }

    async fn digest(&self) -> Result<Frame, RoleError> {
        let digests = (0..self.store.config().slots).map(|slot| {
            let store = Arc::clone(&self.store);
            async move { Ok::<_, RoleError>(blocking("digest", move || store.slot_digest(Slot(slot))).await??) }
        });
        let digests: Vec<_> = futures::stream::iter(digests).buffered(DIGESTS).try_collect().await?;
        let slots = digests.len();
        let applied = Some(self.read_partition().applied());
        let reply = v1::StoreDigests { rows: self.store.rows(), bytes: self.bytes(), applied };
        let digests: Vec<u8> = digests.into_iter().flatten().collect();
        let tensor = Tensor::new(&[slots, 32], digests)?;
        Ok(message::reply::<v1::StoreDigestRequest>(&reply, vec![tensor]))
    }

    /// Bytes that the store uses, payload and overhead: not what rows that have left gave back, which others use before there are more.
    fn bytes(&self) -> u64 {
        let bytes = self.store.bytes();
        bytes.payload + bytes.overhead
    }

    fn keys_of(&self, what: &'static str, tensors: Vec<Tensor>) -> Result<Vec<Vec<FeatureKey>>, RoleError> {
        let (expected, found) = (self.group_dims.len(), tensors.len());
        if expected != found {
            return Err(RoleError::Tensors { message: what, expected, found });
        }
        tensors.into_iter().map(|tensor| Ok(as_keys(tensor.expect_u64("keys")?))).collect()
    }

    fn gradients_of(&self, tensors: Vec<Tensor>) -> Result<Contribution, RoleError> {
        let mut tensors = tensors.into_iter();
        let mut contribution = Vec::with_capacity(self.group_dims.len());
        for dim in &self.group_dims {
            let keys = message::next("update", &mut tensors)?.expect_u64("keys")?;
            let values = self.compression.decode("update", &mut tensors, *dim)?;
            if values.len() != keys.len() * dim || !keys.is_sorted_by(|a, b| a < b) {
                let reason = format!(
                    "{} keys (ascending) must come with {dim} gradients each, got {}",
                    keys.len(),
                    values.len()
                );
                return Err(RoleError::Inconsistent { message: "update", reason });
            }
            contribution.push(SparseGradients { keys, values });
        }
        Ok(contribution)
    }

    /// The gate of a mode with a barrier, for as long as `work` takes.
    fn with_gate<T>(
        &self,
        message: &'static str,
        work: impl FnOnce(&mut Gate) -> Result<T, RoleError>,
    ) -> Result<T, RoleError> {
        match &mut *self.lock_order() {
            Order::Barrier(gate) => work(gate),
            _ => Err(not_this_mode(message, "has no barrier, or none has begun")),
        }
    }

    fn tokens(&self) -> Option<Arc<Tokens>> {
        if let Order::Tokens(tokens) = &*self.lock_order() { Some(Arc::clone(tokens)) } else { None }
    }

    fn tokens_or_refuse(&self, message: &'static str) -> Result<Arc<Tokens>, RoleError> {
        self.tokens().ok_or_else(|| not_this_mode(message, "has a barrier, or none has begun"))
    }

    /// One that has taken another's place without its rows must not answer as if there were none.
    fn refuse_if_new(&self, message: &'static str) -> Result<(), RoleError> {
        if self.is_new.load(Ordering::Acquire) { Err(not_this_mode(message, "has not begun")) } else { Ok(()) }
    }

    fn lock_order(&self) -> MutexGuard<'_, Order> {
        self.order.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn lock_answered(&self) -> MutexGuard<'_, Answered> {
        self.answered.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn read_partition(&self) -> RwLockReadGuard<'_, Partition> {
        self.partition.read().unwrap_or_else(PoisonError::into_inner)
    }

    fn write_partition(&self) -> RwLockWriteGuard<'_, Partition> {
        self.partition.write().unwrap_or_else(PoisonError::into_inner)
    }
}

fn not_this_mode(message: &'static str, which: &str) -> RoleError {
    RoleError::Inconsistent { message, reason: format!("the training mode {which}") }
}

impl Service for ParameterServer {
    fn call<'a>(&'a self, _peer: &'a Peer, frame: Frame) -> BoxFuture<'a, Result<Frame, Refusal>> {
        Box::pin(async move {
            match frame.kind {
                v1::Lookup::KIND => {
                    let (request, tensors) = message::read::<v1::Lookup>(frame)?;
                    Ok(self.look_up(request, tensors).await?)
                }
                v1::Update::KIND => {
                    let (request, tensors) = message::read::<v1::Update>(frame)?;
                    Ok(self.update(request, tensors).await?)
                }
                v1::PushDense::KIND => {
                    let (request, tensors) = message::read::<v1::PushDense>(frame)?;
                    Ok(self.push_dense(request, tensors).await?)
                }
                v1::GetPartition::KIND => Ok(self.get_partition(message::read::<v1::GetPartition>(frame)?.0).await?),
                v1::PutPartition::KIND => {
                    let (request, tensors) = message::read::<v1::PutPartition>(frame)?;
                    Ok(self.put_partition(&request, tensors)?)
                }
                v1::BeginMode::KIND => Ok(self.begin_mode(&message::read::<v1::BeginMode>(frame)?.0)?),
                v1::FlushRequest::KIND => Ok(self.flush().await?),
                v1::RestoreRows::KIND => {
                    let (request, _) = message::read::<v1::RestoreRows>(frame)?;
                    let restored = self.saving.restore(request, &self.store).await?;
                    self.is_new.store(false, Ordering::Release);
                    self.count_store();
                    Ok(message::reply::<v1::RestoreRows>(&restored, Vec::new()))
                }
                v1::Freeze::KIND => {
                    let (request, _) = message::read::<v1::Freeze>(frame)?;
                    self.refuse_if_new("freeze")?;
                    let frozen = self.saving.freeze(request, &self.store, &self.read_partition())?;
                    Ok(message::reply::<v1::Freeze>(&frozen, Vec::new()))
                }
                v1::WriteFrozen::KIND => {
                    let (request, _) = message::read::<v1::WriteFrozen>(frame)?;
                    Ok(message::reply::<v1::WriteFrozen>(&self.saving.write(request).await?, Vec::new()))
                }
                v1::Thaw::KIND => {
                    self.saving.thaw(message::read::<v1::Thaw>(frame)?.0)?;
                    Ok(message::done::<v1::Thaw>())
                }
                v1::StoreDigestRequest::KIND => {
                    self.refuse_if_new("store_digest")?;
                    Ok(self.digest().await?)
                }
                v1::WorkRequest::KIND => {
                    message::read::<v1::WorkRequest>(frame)?;
                    Ok(message::reply::<v1::WorkRequest>(&v1::Work { done: self.store.work_done() }, Vec::new()))
                }
                kind => self.move_slots(kind, frame).await,
            }
        })
    }
}

impl ParameterServer {
    /// What concerns the slots and not their rows' training.
    async fn move_slots(&self, kind: u16, frame: Frame) -> Result<Frame, Refusal> {
        tracing::debug!(kind = message::kind_name(kind), "a message about slots");
        match kind {
            v1::MeasureSlots::KIND => {
                message::read::<v1::MeasureSlots>(frame)?;
                Ok(message::reply::<v1::MeasureSlots>(&v1::SlotCosts {}, self.slots.measure().await?))
            }
            v1::CopySlot::KIND => {
                let (request, _) = message::read::<v1::CopySlot>(frame)?;
                Ok(message::reply::<v1::CopySlot>(&self.slots.copy(request).await?, Vec::new()))
            }
            v1::ForwardChanges::KIND => {
                message::read::<v1::ForwardChanges>(frame)?;
                Ok(message::reply::<v1::ForwardChanges>(&self.slots.forward().await?, Vec::new()))
            }
            v1::SealSlots::KIND => {
                let (request, _) = message::read::<v1::SealSlots>(frame)?;
                Ok(message::reply::<v1::SealSlots>(&self.slots.seal(request).await?, Vec::new()))
            }
            v1::PutSlots::KIND => {
                let (request, tensors) = message::read::<v1::PutSlots>(frame)?;
                self.slots.put(request, tensors).await?;
                self.count_store();
                Ok(message::done::<v1::PutSlots>())
            }
            v1::AdoptMap::KIND => {
                let (mut adopted, is_new) = self.slots.adopt(message::read::<v1::AdoptMap>(frame)?.0).await?;
                if is_new {
                    if let Some(kept) = &self.kept {
                        kept.move_to(&self.slots.map());
                    }
                    adopted.applied = Some(self.write_partition().take_applied());
                    self.keep_partition();
                }
                self.count_store();
                Ok(message::reply::<v1::AdoptMap>(&adopted, Vec::new()))
            }
            v1::ReleaseSlots::KIND => {
                self.slots.release(message::read::<v1::ReleaseSlots>(frame)?.0).await?;
                self.count_store();
                Ok(message::done::<v1::ReleaseSlots>())
            }
            kind => Err(message::refuse_kind("parameter server", kind)),
        }
    }
}

/// The same memory under its proper name.
fn as_keys(keys: Vec<u64>) -> Vec<FeatureKey> {
    keys.into_iter().map(FeatureKey).collect()
}

type CountsResult = Result<LookupCounts, RoleError>;
type LookUpResult = Result<(Vec<Vec<f32>>, LookupCounts), RoleError>;

fn look_up_groups(
    store: &TrackedStore<'_>,
    keys: &[Vec<FeatureKey>],
    dims: &[usize],
    missing: Missing,
) -> LookUpResult {
    let mut total = LookupCounts::default();
    let mut groups = Vec::with_capacity(keys.len());
    for (group, (keys, dim)) in keys.iter().zip(dims).enumerate() {
        let mut rows = vec![0.0; keys.len() * dim];
        total += store.look_up(GroupId(group as u16), keys, missing, &mut rows)?;
        groups.push(rows);
    }
    Ok((groups, total))
}

/// Sums the pieces' gradients and applies them as one update.
fn apply_groups(
    store: &TrackedStore<'_>,
    step: GlobalStep,
    mut pieces: Vec<Contribution>,
    dims: &[usize],
    mut log: Option<&mut UpdateLog>,
) -> Result<v1::UpdateReply, RoleError> {
    let mut reply = v1::UpdateReply::default();
    for (group, dim) in dims.iter().enumerate() {
        let contributions = pieces.iter_mut().map(|piece| std::mem::take(&mut piece[group])).collect();
        let sum = sum_by_key(contributions, *dim);
        let counts = store.update(GroupId(group as u16), &as_keys(sum.keys), &sum.values, step, log.as_deref_mut())?;
        reply.missing_rows += counts.missing;
        reply.non_finite_rows += counts.non_finite;
    }
    Ok(reply)
}

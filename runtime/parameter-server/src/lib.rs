//! The parameter server: holds the rows of its slots, answers look-ups and applies updates in the
//! order that the training mode requires ([`half`]). In modes without a barrier, it also holds a
//! partition of the dense parameters. In `shadow`, dense workers exchange their replicas with it.
//!
//! Embedding workers read and update its rows. Dense workers read and update its partition. The
//! coordinator begins modes and takes checkpoints ([`checkpoint`]). It also moves slots between
//! servers ([`slots`]) and collects the digests at the end. The server's state outlives its process
//! ([`kept`]). It also keeps a copy of the coordinator's journal ([`journal_copy`]).

mod averages;
mod checkpoint;
mod contribution;
mod copying_alone;
mod early;
mod first_layers;
mod half;
mod journal_copy;
mod kept;
mod look_up_replies;
mod memory_room;
mod partial;
mod partition;
mod pooled;
mod shared;
mod slots;
mod table_life;
#[cfg(all(test, target_os = "linux"))]
#[allow(clippy::unwrap_used, reason = "an unwrap in a test is an assertion")]
mod tests;

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Instant;

use futures::{StreamExt, TryStreamExt};
use parking_lot::Mutex;
use rectrain_embedding::{Examples, FeatureKey, GroupId, LookupCounts, Missing, Slot};
use rectrain_kinds::Compression;
use rectrain_modes::barrier::SparseGradients;
use rectrain_modes::barrier::pulled::StepPiece;
use rectrain_modes::migration::NotServed;
use rectrain_modes::switch::Boundary;
use rectrain_modes::{GlobalStep, Rank, TrainingMode};
use rectrain_pooling::PooledGroups;
use rectrain_proto::v1;
use rectrain_protocol::blocking::blocking;
use rectrain_protocol::compression::TensorCodec;
use rectrain_protocol::error::RoleError;
use rectrain_protocol::examples;
use rectrain_protocol::key_set::KeySet;
use rectrain_protocol::message::{self, Request};
use rectrain_protocol::metrics::PsMetrics;
use rectrain_protocol::plan::JobPlan;
use rectrain_protocol::readiness::Readiness;
use rectrain_protocol::remember::Remembering;
use rectrain_wire::{BoxFuture, Frame, Peer, Refusal, Service, Tensor, Transport};

use self::checkpoint::Saving;
use self::contribution::Contribution;
use self::early::{Divided, EarlyLookUp, PieceKeys, divide};
use self::first_layers::FirstLayers;
use self::half::{BarrierHalf, CurrentHalf, ModeHalf, RowGradients, ShadowHalf, TokenHalf, half_of, not_this_mode};
use self::journal_copy::JournalCopy;
pub use self::kept::Rows;
use self::kept::{Left, Standing};
use self::look_up_replies::LookUpReplies;
use self::memory_room::memory_room;
use self::partial::PartialPieces;
use self::pooled::PooledPieces;
use self::shared::{Shared, TrackedStore, as_keys};
use self::slots::Slots;
use self::table_life::{TableLife, set_budget};

/// The number of slots that are digested at once. Each digest copies the rows of its slot.
const DIGESTS: usize = 4;

/// See the module documentation.
pub struct ParameterServer {
    shared: Arc<Shared>,
    half: Arc<CurrentHalf>,
    replies: Arc<LookUpReplies>,
    /// In `des`: the pieces whose gradients have not arrived.
    partial: PartialPieces,
    /// With partial pooling: the same in other modes.
    pooled: PooledPieces,
    /// The address at which other roles reach the server.
    address: OnceLock<String>,
    /// Whether no mode has begun here and no rows were restored. Such a process may replace a dead
    /// one without having its rows.
    is_new: AtomicBool,
    /// Set when the first mode begins.
    readiness: Readiness,
    /// The current mode and the boundary at which it began, to recognise a repeated message.
    began: Mutex<Option<(TrainingMode, Boundary)>>,
    saving: Saving,
    compression: Compression,
    /// By row group: whether gradients carry the examples of each key.
    counted: Vec<bool>,
    journal_copy: JournalCopy,
}

impl ParameterServer {
    /// Creates parameter server number `index` with these rows. With the recovered rows of a
    /// predecessor, the server resumes its mode. Otherwise the coordinator begins the first mode.
    /// The server sends moving slots to other servers over `transport`.
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
        let slots = Arc::new(Slots::new(index, map, &store, transport, plan.stall, metrics.clone()));
        let half = Arc::<CurrentHalf>::default();
        let server = Self {
            saving: Saving::new(plan, index, &slots),
            replies: Arc::new(LookUpReplies::new(plan, Arc::clone(&half))),
            half,
            partial: PartialPieces::default(),
            pooled: PooledPieces::of(plan),
            address: OnceLock::new(),
            is_new: AtomicBool::new(true),
            readiness: Readiness::default(),
            began: Mutex::new(None),
            compression: plan.compression,
            counted: plan.counts_examples(),
            journal_copy: JournalCopy::default(),
            shared: Arc::new(Shared {
                plan: Arc::clone(plan),
                life: TableLife::new(plan, &store),
                store,
                slots,
                partition: parking_lot::RwLock::default(),
                first_layers: FirstLayers::default(),
                dense_since: AtomicU64::new(0),
                kept: kept.map(Arc::new),
                metrics,
            }),
        };
        if let Some(left) = left {
            server.recover(left)?;
        }
        Ok(server)
    }

    /// Makes the server report its readiness here.
    #[must_use]
    pub fn reporting(mut self, readiness: Readiness) -> Self {
        if !self.is_new.load(Ordering::Acquire) {
            readiness.set_ready();
        }
        self.readiness = readiness;
        self
    }

    /// The service that other roles call. A layer in front of the server repeats the replies of
    /// repeated look-ups.
    #[must_use]
    pub fn service(self: &Arc<Self>) -> Arc<dyn Service> {
        Arc::new(Remembering::new(Arc::clone(self), Arc::clone(&self.replies)))
    }

    /// Sets the address at which other roles reach this server. Only the first call has an effect.
    pub fn serves_at(&self, address: &str) {
        // A later call changes nothing.
        let _again = self.address.set(address.to_owned());
    }

    /// Resumes from the recovered state of the predecessor.
    fn recover(&self, left: Left) -> Result<(), RoleError> {
        let Some(kept) = &self.shared.kept else { return Ok(()) };
        let Left { standing, reopened, gradients, layers, tokens, partition } = left;
        let begin = standing.begin();
        let (mode, at) = self.beginning(&begin)?;
        self.shared.set_dense_since(begin.dense_since);
        self.clear_slots_of_others()?;
        *self.shared.write_partition() = partition;
        let next = GlobalStep(at.step.0 + u64::from(kept.log().update()));
        let half: Arc<dyn ModeHalf> = match mode {
            TrainingMode::Tokens(mode) => {
                Arc::new(TokenHalf::recover(&self.shared.plan, mode, at, tokens, &self.shared)?)
            }
            TrainingMode::Shadow(mode) => Arc::new(ShadowHalf::recover(mode, at, tokens, &self.shared)?),
            TrainingMode::Sync | TrainingMode::Pulled | TrainingMode::Hybrid { .. } | TrainingMode::Des => {
                self.shared.first_layers.recover(&self.shared.plan, layers)?;
                let began = (at.step, begin.first_piece);
                Arc::new(BarrierHalf::recover(&self.shared, mode, began, next, gradients)?)
            }
        };
        self.half.set(half);
        *self.began.lock() = Some((mode, at));
        self.is_new.store(false, Ordering::Release);
        self.shared.metrics.kept_rows.set(reopened.rows as i64);
        self.shared.metrics.repaired_rows.set(reopened.repaired_rows as i64);
        self.shared.count_store();
        tracing::info!(step = next.0, rows = reopened.rows, "continuing with the rows of the server before");
        Ok(())
    }

    /// Drops the rows of slots that the predecessor had handed over but not yet dropped.
    fn clear_slots_of_others(&self) -> Result<(), RoleError> {
        let (store, own) = (&self.shared.store, self.shared.slots.own());
        let others = (0..store.config().slots).map(Slot).filter(|slot| !own.contains(*slot));
        Ok(others.into_iter().try_for_each(|slot| store.clear_slot(slot).map(drop))?)
    }

    fn beginning(&self, begin: &v1::BeginMode) -> Result<(TrainingMode, Boundary), RoleError> {
        let mode = self.shared.plan.mode_named(&begin.mode).ok_or_else(|| RoleError::Inconsistent {
            message: "begin_mode",
            reason: format!("there is no mode `{}`", begin.mode),
        })?;
        Ok((mode, Boundary { step: GlobalStep(begin.step), next_row: begin.first_row }))
    }

    fn begin_mode(&self, begin: &v1::BeginMode) -> Result<Frame, RoleError> {
        let (mode, at) = self.beginning(begin)?;
        let mut began = self.began.lock();
        if *began == Some((mode, at)) {
            return Ok(message::done::<v1::BeginMode>());
        }
        self.shared.set_dense_since(begin.dense_since);
        if began.as_ref().is_some_and(|(before, _)| *before != mode) {
            self.shared.write_partition().forget_averages();
        }
        self.shared.write_partition().forget_previous();
        let half = half_of(&self.shared, mode, at, begin.first_piece)?;
        if let Some(kept) = &self.shared.kept {
            let buffer = half.dense_standing();
            kept.begin(&self.standing(begin), &self.shared.read_partition(), buffer.as_ref());
        }
        self.is_new.store(false, Ordering::Release);
        self.replies.clear();
        self.partial.clear();
        self.pooled.clear();
        self.shared.first_layers.clear();
        self.half.set(half);
        *began = Some((mode, at));
        self.readiness.set_ready();
        Ok(message::done::<v1::BeginMode>())
    }

    fn standing(&self, begin: &v1::BeginMode) -> Standing {
        Standing::new(begin, self.address.get().map_or("", String::as_str), &self.shared.slots.map())
    }

    async fn look_up(&self, request: v1::Lookup, tensors: Vec<Tensor>) -> Result<Frame, RoleError> {
        if request.train {
            self.shared.slots.copied_alone().await;
        }
        if let Some(samples) = request.partial_samples {
            return self.look_up_partial(request, samples, tensors).await;
        }
        if let Some(piece) = request.pooled {
            return self.look_up_pooled(request, piece, tensors).await;
        }
        let keys = Arc::new(self.keys_of("lookup", tensors)?);
        // A replacement whose slots were handed over begins with the first slot map, which a caller
        // may still use.
        let half = self.half.get().ok_or(NotServed::Unregistered)?;
        self.shared.slots.admit_epoch(request.map_epoch)?;
        let arrived = Instant::now();
        let earlier = admit(&*half, &request, &keys).await?;
        let is_early = !earlier.is_empty();
        let gate_seconds = arrived.elapsed().as_secs_f64();
        self.shared.metrics.gate_wait.observe(gate_seconds);
        let step = half.row_step();
        let started = Instant::now();
        let shared = Arc::clone(&self.shared);
        let read = move || {
            let (store, dims) = (shared.tracked_store(), shared.group_dims());
            let Divided { now, deferred } = divide(&keys, &earlier);
            shared.slots.check_look_up(request.map_epoch, &now)?;
            if is_early {
                let count = |keys: &[Vec<FeatureKey>]| keys.iter().map(Vec::len).sum::<usize>() as u64;
                shared.metrics.early_rows.inc_by(count(&now));
                shared.metrics.deferred_rows.inc_by(count(&keys) - count(&now));
            }
            let read = if request.train { look_up_groups } else { read_groups };
            let rows = read(&store, &now, dims)?;
            Ok::<_, RoleError>((rows, deferred))
        };
        let (LookedUp { rows, counts, missing }, deferred) = blocking("look-up", read).await??;
        self.shared.metrics.lookup.observe(started.elapsed().as_secs_f64());
        self.shared.metrics.count_look_up(counts);
        let tensors = self.encode_rows(rows)?;
        let deferred = if is_early { deferred.write() } else { Vec::new() };
        let reply = v1::LookupReply { step, is_applied: false, missing, gate_seconds, deferred, is_early };
        Ok(message::reply::<v1::Lookup>(&reply, tensors))
    }

    /// The tensors of a reply with rows by row group.
    fn encode_rows(&self, rows: Vec<Vec<f32>>) -> Result<Vec<Tensor>, RoleError> {
        let mut tensors = Vec::with_capacity(2 * rows.len());
        for (rows, dim) in rows.into_iter().zip(self.shared.group_dims()) {
            tensors.extend(self.compression.encode(rows, *dim)?);
        }
        Ok(tensors)
    }

    async fn update(&self, request: v1::Update, tensors: Vec<Tensor>) -> Result<Frame, RoleError> {
        let contribution = match (request.partial_samples, request.pooled) {
            (Some(samples), _) => self.partial_gradients(&request, samples, tensors).await?,
            (None, Some(piece)) => self.pooled_gradients(&request, piece, tensors).await?,
            (None, None) => Some(self.gradients_of(&mut tensors.into_iter(), request.moment, None)?),
        };
        let Some(contribution) = contribution else {
            let reply = v1::UpdateReply { needs_ids: true, ..v1::UpdateReply::default() };
            return Ok(message::reply::<v1::Update>(&reply, Vec::new()));
        };
        self.shared.slots.admit_update(request.map_epoch, contribution.groups.iter().map(|group| &*group.keys))?;
        let v1::Update { step, piece, push, .. } = request;
        let half = self.half_or_refuse("update")?;
        let reply = half.update(&self.shared, RowGradients { step, piece, push, contribution }).await?;
        Ok(message::reply::<v1::Update>(&reply, Vec::new()))
    }

    /// Applies the steps whose gradients were complete when the predecessor died. The server must
    /// do this before it answers any look-up, because a step with all its gradients counts as
    /// applied.
    pub async fn finish_recovery(&self) -> Result<(), RoleError> {
        match self.half.get() {
            Some(half) => half.finish_recovery(&self.shared).await,
            None => Ok(()),
        }
    }

    async fn flush(&self) -> Result<Frame, RoleError> {
        let flushed = self.half_or_refuse("flush")?.flush(&self.shared).await?;
        Ok(message::reply::<v1::FlushRequest>(&flushed, Vec::new()))
    }

    fn put_partition(&self, request: &v1::PutPartition, tensors: Vec<Tensor>) -> Result<Frame, RoleError> {
        let [parameters, state] = message::take("put_partition", tensors)?;
        let (parameters, state) = (parameters.expect_f32("parameters")?, state.expect_f32("state")?);
        let optimizer = self.shared.plan.dense_optimizer;
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
        self.shared.write_partition().put(parameters, state);
        self.keep_partition();
        Ok(message::done::<v1::PutPartition>())
    }

    /// Makes the partition durable after a change other than a step.
    fn keep_partition(&self) {
        if let Some(kept) = &self.shared.kept {
            let buffer = self.half.get().and_then(|half| half.dense_standing());
            kept.keep_partition(&self.shared.read_partition(), buffer.as_ref());
        }
    }

    async fn get_partition(&self, request: v1::GetPartition) -> Result<Frame, RoleError> {
        self.refuse_if_new("get_partition")?;
        if let Some(step) = request.before {
            return self.read_before(GlobalStep(step)).await;
        }
        let shared = Arc::clone(&self.shared);
        // Waits for a running update.
        let (parameters, state) = blocking("reading of the partition", move || {
            let partition = shared.read_partition();
            (partition.parameters(), request.state.then(|| partition.state().to_vec()))
        })
        .await?;
        let step = self.half.get().map_or(0, |half| half.dense_step_of(&parameters));
        let mut tensors = vec![Tensor::from(parameters.values.to_vec())];
        tensors.extend(state.map(Tensor::from));
        let optimizer = self.shared.plan.dense_optimizer.kind().name().to_owned();
        let partition = v1::Partition { step, optimizer, is_applied: false };
        Ok(message::reply::<v1::GetPartition>(&partition, tensors))
    }

    /// With pulled pieces: the partition before a step.
    async fn read_before(&self, step: GlobalStep) -> Result<Frame, RoleError> {
        let half = self.half_or_refuse("get_partition")?;
        let values = half.read_before(&self.shared, step).await?;
        let optimizer = self.shared.plan.dense_optimizer.kind().name().to_owned();
        let partition = v1::Partition { step: step.0, optimizer, is_applied: values.is_none() };
        let tensors = values.map(|values| Tensor::from(values.to_vec())).into_iter().collect();
        Ok(message::reply::<v1::GetPartition>(&partition, tensors))
    }

    async fn push_dense(&self, request: v1::PushDense, tensors: Vec<Tensor>) -> Result<Frame, RoleError> {
        let [gradient] = message::take("push_dense", tensors)?;
        let gradient = gradient.expect_f32("gradient")?;
        if let Some(v1::StepPiece { step, piece }) = request.piece {
            let piece = StepPiece { step: GlobalStep(step), piece: Rank(piece) };
            let reply = self.half_or_refuse("push_dense")?.push_piece(&self.shared, piece, gradient).await?;
            return Ok(message::reply::<v1::PushDense>(&reply, Vec::new()));
        }
        let push = request
            .push
            .ok_or(RoleError::Inconsistent { message: "push_dense", reason: "the token is missing".to_owned() })?;
        let reply = self.half_or_refuse("push_dense")?.push_dense(&self.shared, push, gradient).await?;
        Ok(message::reply::<v1::PushDense>(&reply, Vec::new()))
    }

    async fn exchange(&self, request: v1::Exchange, tensors: Vec<Tensor>) -> Result<Frame, RoleError> {
        self.refuse_if_new("exchange")?;
        let half = self.half_or_refuse("exchange")?;
        let (reply, tensors) = half.exchange(&self.shared, request, tensors).await?;
        Ok(message::reply::<v1::Exchange>(&reply, tensors))
    }

    /// Keeps a copy of the coordinator's journal.
    fn put_journal(&self, request: v1::PutJournal, tensors: Vec<Tensor>) -> Result<Frame, Refusal> {
        let [image] = message::take("put_journal", tensors)?;
        let image = image.expect_u8("image").map_err(RoleError::from)?;
        let bytes = self.journal_copy.put(request.head, image)?;
        self.shared.metrics.stored_journal_bytes.set(bytes as i64);
        Ok(message::done::<v1::PutJournal>())
    }

    fn claim_journal(&self, request: v1::ClaimJournal) -> Result<Frame, Refusal> {
        let (head, image) = self.journal_copy.claim(request)?;
        Ok(message::reply::<v1::ClaimJournal>(&head, vec![Tensor::from(image)]))
    }

    async fn digest(&self) -> Result<Frame, RoleError> {
        let digests = (0..self.shared.store.config().slots).map(|slot| {
            let store = Arc::clone(&self.shared.store);
            async move { Ok::<_, RoleError>(blocking("digest", move || store.slot_digest(Slot(slot))).await??) }
        });
        let digests: Vec<_> = futures::stream::iter(digests).buffered(DIGESTS).try_collect().await?;
        let slots = digests.len();
        let applied = Some(self.shared.read_partition().applied());
        let table = Some(TableLife::since_taken(&self.shared.store));
        let reply = v1::StoreDigests { rows: self.shared.store.rows(), bytes: self.shared.bytes(), applied, table };
        let digests: Vec<u8> = digests.into_iter().flatten().collect();
        let tensor = Tensor::new(&[slots, 32], digests)?;
        Ok(message::reply::<v1::StoreDigestRequest>(&reply, vec![tensor]))
    }

    fn keys_of(&self, what: &'static str, tensors: Vec<Tensor>) -> Result<Vec<Vec<FeatureKey>>, RoleError> {
        let (expected, found) = (self.shared.group_dims().len(), tensors.len());
        if expected != found {
            return Err(RoleError::Tensors { message: what, expected, found });
        }
        tensors.into_iter().map(|tensor| Ok(as_keys(tensor.expect_u64("keys")?))).collect()
    }

    /// Reads the gradients of rows. The examples of the groups that this server pools come later.
    fn gradients_of(
        &self,
        tensors: &mut impl Iterator<Item = Tensor>,
        moment: u64,
        pooled: Option<&PooledGroups>,
    ) -> Result<Contribution, RoleError> {
        let mut contribution = Contribution { moment, ..Contribution::default() };
        for (group, (dim, counted)) in self.shared.group_dims().iter().zip(&self.counted).enumerate() {
            let keys = message::next("update", tensors)?.expect_u64("keys")?;
            let values = self.compression.decode("update", tensors, *dim)?;
            if values.len() != keys.len() * dim || !keys.is_sorted_by(|a, b| a < b) {
                let reason = format!(
                    "{} keys (ascending) must come with {dim} gradients each, got {}",
                    keys.len(),
                    values.len()
                );
                return Err(RoleError::Inconsistent { message: "update", reason });
            }
            let is_pooled = pooled.is_some_and(|groups| groups.contains(group));
            contribution.examples.push(match *counted && !is_pooled {
                true => read_examples(tensors, keys.len())?,
                false => Vec::new(),
            });
            contribution.groups.push(SparseGradients { keys, values });
        }
        Ok(contribution)
    }

    fn half_or_refuse(&self, message: &'static str) -> Result<Arc<dyn ModeHalf>, RoleError> {
        self.half.get().ok_or_else(|| not_this_mode(message, "has not begun"))
    }

    /// Refuses a message of `des` in another mode.
    fn expect_des(&self, message: &'static str) -> Result<(), RoleError> {
        match *self.began.lock() {
            Some((TrainingMode::Des, _)) => Ok(()),
            _ => Err(not_this_mode(message, "is not `des`")),
        }
    }

    /// Refuses a request that a replacement without its predecessor's rows would answer as if there
    /// were no rows.
    fn refuse_if_new(&self, message: &'static str) -> Result<(), RoleError> {
        if self.is_new.load(Ordering::Acquire) { Err(not_this_mode(message, "has not begun")) } else { Ok(()) }
    }
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
                v1::PutFirstLayer::KIND => {
                    let (request, tensors) = message::read::<v1::PutFirstLayer>(frame)?;
                    Ok(self.put_first_layer(request, tensors).await?)
                }
                v1::FirstLayerGradientRequest::KIND => {
                    let (request, _) = message::read::<v1::FirstLayerGradientRequest>(frame)?;
                    Ok(self.first_layer_gradient(request).await?)
                }
                v1::Exchange::KIND => {
                    let (request, tensors) = message::read::<v1::Exchange>(frame)?;
                    Ok(self.exchange(request, tensors).await?)
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
                    let restored = self.saving.restore(request, &self.shared.store).await?;
                    self.is_new.store(false, Ordering::Release);
                    self.shared.count_store();
                    Ok(message::reply::<v1::RestoreRows>(&restored, Vec::new()))
                }
                v1::Freeze::KIND => {
                    let (request, _) = message::read::<v1::Freeze>(frame)?;
                    self.refuse_if_new("freeze")?;
                    let frozen = self.saving.freeze(request, &self.shared.store, &self.shared.read_partition())?;
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
                    Ok(message::reply::<v1::WorkRequest>(&self.shared.work(), Vec::new()))
                }
                v1::SetBudget::KIND => {
                    let (request, _) = message::read::<v1::SetBudget>(frame)?;
                    set_budget(&self.shared.store, request.budget.unwrap_or_default())?;
                    self.shared.count_store();
                    Ok(message::done::<v1::SetBudget>())
                }
                v1::PutJournal::KIND => {
                    let (request, tensors) = message::read::<v1::PutJournal>(frame)?;
                    self.put_journal(request, tensors)
                }
                v1::ClaimJournal::KIND => self.claim_journal(message::read::<v1::ClaimJournal>(frame)?.0),
                kind => self.move_slots(kind, frame).await,
            }
        })
    }
}

impl ParameterServer {
    /// Handles the messages about moving slots.
    async fn move_slots(&self, kind: u16, frame: Frame) -> Result<Frame, Refusal> {
        tracing::debug!(kind = message::kind_name(kind), "a message about slots");
        match kind {
            v1::MeasureSlots::KIND => {
                message::read::<v1::MeasureSlots>(frame)?;
                let costs = v1::SlotCosts { memory_room: memory_room() };
                Ok(message::reply::<v1::MeasureSlots>(&costs, self.shared.slots.measure().await?))
            }
            v1::CopySlot::KIND => {
                let (request, _) = message::read::<v1::CopySlot>(frame)?;
                Ok(message::reply::<v1::CopySlot>(&self.shared.slots.copy(request).await?, Vec::new()))
            }
            v1::ForwardChanges::KIND => {
                let (v1::ForwardChanges { copied, .. }, _) = message::read::<v1::ForwardChanges>(frame)?;
                Ok(message::reply::<v1::ForwardChanges>(&self.shared.slots.forward(copied).await?, Vec::new()))
            }
            v1::SealSlots::KIND => {
                let (request, _) = message::read::<v1::SealSlots>(frame)?;
                Ok(message::reply::<v1::SealSlots>(&self.shared.slots.seal(request).await?, Vec::new()))
            }
            v1::PutSlots::KIND => {
                let (request, tensors) = message::read::<v1::PutSlots>(frame)?;
                self.shared.slots.put(request, tensors).await?;
                self.shared.count_store();
                Ok(message::done::<v1::PutSlots>())
            }
            v1::AdoptMap::KIND => {
                let (mut adopted, is_new) = self.shared.slots.adopt(message::read::<v1::AdoptMap>(frame)?.0).await?;
                if is_new {
                    if let Some(kept) = &self.shared.kept {
                        kept.move_to(&self.shared.slots.map());
                    }
                    adopted.applied = Some(self.shared.write_partition().take_applied());
                    adopted.table = Some(TableLife::take(&self.shared.store));
                    self.keep_partition();
                }
                self.shared.count_store();
                Ok(message::reply::<v1::AdoptMap>(&adopted, Vec::new()))
            }
            v1::ReleaseSlots::KIND => {
                self.shared.slots.release(message::read::<v1::ReleaseSlots>(frame)?.0).await?;
                self.shared.count_store();
                Ok(message::done::<v1::ReleaseSlots>())
            }
            kind => Err(message::refuse_kind("parameter server", kind)),
        }
    }
}

/// Waits until a look-up may read the rows. Returns the keys that it may not read yet.
async fn admit(half: &dyn ModeHalf, request: &v1::Lookup, keys: &PieceKeys) -> Result<Vec<PieceKeys>, RoleError> {
    let step = request.step.map(GlobalStep);
    let (Some(step), Some(piece), true) = (step, request.piece, request.train) else {
        return half.admit_look_up(step).await.map(|()| Vec::new());
    };
    if !keys.iter().all(|keys| keys.is_sorted()) {
        let reason = "the keys of a piece must ascend".to_owned();
        return Err(RoleError::Inconsistent { message: "lookup", reason });
    }
    let look_up = EarlyLookUp { step, piece: Rank(piece), epoch: request.map_epoch, keys: Arc::clone(keys) };
    half.admit_early(look_up).await
}

/// Reads the examples of a group's keys.
fn read_examples(tensors: &mut impl Iterator<Item = Tensor>, keys: usize) -> Result<Vec<Examples>, RoleError> {
    let bytes = message::next("update", tensors)?.expect_u8("examples")?;
    examples::decode("update", &bytes, keys)
}

/// The rows of a look-up.
struct LookedUp {
    /// By group, `[keys, row dim]`.
    rows: Vec<Vec<f32>>,
    counts: LookupCounts,
    /// In an evaluation: the keys without a row, as in the reply.
    missing: Vec<u8>,
}

/// Looks the rows of each group up for training, and makes the missing ones.
fn look_up_groups(store: &TrackedStore<'_>, keys: &[Vec<FeatureKey>], dims: &[usize]) -> Result<LookedUp, RoleError> {
    let mut counts = LookupCounts::default();
    let mut groups = Vec::with_capacity(keys.len());
    for (group, (keys, dim)) in keys.iter().zip(dims).enumerate() {
        let mut rows = vec![0.0; keys.len() * dim];
        counts += store.look_up(GroupId(group as u16), keys, Missing::Insert, &mut rows)?;
        groups.push(rows);
    }
    Ok(LookedUp { rows: groups, counts, missing: Vec::new() })
}

/// Reads the rows of each group for an evaluation. A missing row reads as its initial values.
fn read_groups(store: &TrackedStore<'_>, keys: &[Vec<FeatureKey>], dims: &[usize]) -> Result<LookedUp, RoleError> {
    let mut counts = LookupCounts::default();
    let mut groups = Vec::with_capacity(keys.len());
    let mut missing = KeySet::none_of(keys.iter().map(Vec::len).sum());
    let mut first = 0;
    for (group, (keys, dim)) in keys.iter().zip(dims).enumerate() {
        let mut rows = vec![0.0; keys.len() * dim];
        let unseen = store.read(GroupId(group as u16), keys, &mut rows)?;
        counts.found += (keys.len() - unseen.len()) as u64;
        counts.missing += unseen.len() as u64;
        unseen.into_iter().for_each(|key| missing.insert(first + key));
        first += keys.len();
        groups.push(rows);
    }
    Ok(LookedUp { rows: groups, counts, missing: missing.write() })
}

//! The parameter server: holds the rows of its slots, answers look-ups and applies updates in the order that the training mode
//! asks for ([`StepGate`]). Embedding workers call it, and the coordinator for the digest at the end.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

use rectrain_embedding::{FeatureKey, GroupId, Missing, Store};
use rectrain_modes::{GlobalStep, Rank, SparseGradients, StepGate, sum_by_key};
use rectrain_proto::v1;
use rectrain_wire::{BoxFuture, Frame, Peer, Refusal, Service, Tensor};
use tokio::sync::oneshot;

use crate::compression::Compression;
use crate::error::RoleError;
use crate::message::{self, Request};
use crate::metrics::PsMetrics;
use crate::plan::JobPlan;

/// One rank's gradients of one step: a part for each row group.
type Contribution = Vec<SparseGradients>;

/// See the module's text.
pub struct ParameterServer {
    store: Arc<Store>,
    group_dims: Vec<usize>,
    gate: Mutex<StepGate<oneshot::Sender<()>, Contribution>>,
    staleness: u64,
    compression: Compression,
    metrics: PsMetrics,
}

impl ParameterServer {
    /// An empty store, before step 0.
    pub fn new(plan: &JobPlan, metrics: PsMetrics) -> Result<Self, RoleError> {
        let store = Store::new(plan.store.clone())?;
        Ok(Self {
            store: Arc::new(store),
            group_dims: plan.layout.group_dims.clone(),
            gate: Mutex::new(StepGate::new(plan.replicas.dense_workers, plan.mode.staleness(), GlobalStep(0))),
            staleness: plan.mode.staleness(),
            compression: plan.compression,
            metrics,
        })
    }

    async fn look_up(&self, request: v1::Lookup, tensors: Vec<Tensor>) -> Result<Frame, RoleError> {
        let keys = self.keys_of("lookup", tensors)?;
        let arrived = Instant::now();
        // An evaluation sees every step before it, in any mode; a training look-up may be τ steps ahead of what is applied.
        let ahead = if request.train { 0 } else { self.staleness };
        let (answer, answered) = oneshot::channel();
        if self.lock_gate().look_up(GlobalStep(request.step + ahead), answer).is_none() {
            answered.await.map_err(|_| RoleError::Stopped)?;
        }
        self.metrics.gate_wait.observe(arrived.elapsed().as_secs_f64());
        let missing = if request.train { Missing::Insert } else { Missing::ReadInitial };
        let started = Instant::now();
        let (store, dims) = (Arc::clone(&self.store), self.group_dims.clone());
        let (rows, counts) = blocking("look-up", move || look_up_groups(&store, &keys, &dims, missing)).await??;
        self.metrics.lookup.observe(started.elapsed().as_secs_f64());
        self.metrics.count_look_up(counts);
        let mut tensors = Vec::with_capacity(2 * rows.len());
        for (rows, dim) in rows.into_iter().zip(&self.group_dims) {
            tensors.extend(self.compression.encode(rows, *dim)?);
        }
        Ok(message::reply::<v1::Lookup>(&message::Done {}, tensors))
    }

    async fn update(&self, request: v1::Update, tensors: Vec<Tensor>) -> Result<Frame, RoleError> {
        let contribution = self.gradients_of(tensors)?;
        self.lock_gate().push(GlobalStep(request.step), Rank(request.rank), contribution)?;
        let mut total = v1::UpdateReply::default();
        loop {
            let Some((step, contributions)) = self.lock_gate().next_update() else { break };
            let reply = self.apply(step, contributions).await?;
            total.missing_rows += reply.missing_rows;
            total.non_finite_rows += reply.non_finite_rows;
            for answer in self.lock_gate().finish_update() {
                // A look-up whose caller has gone needs no answer.
                let _gone = answer.send(());
            }
        }
        Ok(message::reply::<v1::Update>(&total, Vec::new()))
    }

    async fn apply(&self, step: GlobalStep, ranks: Vec<Contribution>) -> Result<v1::UpdateReply, RoleError> {
        let started = Instant::now();
        let (store, dims) = (Arc::clone(&self.store), self.group_dims.clone());
        let reply = blocking("update", move || apply_groups(&store, step, ranks, &dims)).await??;
        self.metrics.update_time.observe(started.elapsed().as_secs_f64());
        self.metrics.lost_rows.inc_by(reply.missing_rows);
        self.metrics.non_finite_rows.inc_by(reply.non_finite_rows);
        self.metrics.rows_held.set(self.store.rows() as i64);
        self.metrics.bytes.set(self.bytes() as i64);
        Ok(reply)
    }

    async fn digest(&self) -> Result<Frame, RoleError> {
        let store = Arc::clone(&self.store);
        let digests = blocking("digest", move || store.digests(0..store.config().slots)).await??;
        let slots = digests.len();
        let reply = v1::StoreDigests { rows: self.store.rows(), bytes: self.bytes() };
        let digests: Vec<u8> = digests.into_iter().flatten().collect();
        let tensor = Tensor::new(&[slots, 32], digests)?;
        Ok(message::reply::<v1::StoreDigestRequest>(&reply, vec![tensor]))
    }

    /// Bytes of the store, payload and overhead.
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

    fn lock_gate(&self) -> std::sync::MutexGuard<'_, StepGate<oneshot::Sender<()>, Contribution>> {
        self.gate.lock().unwrap_or_else(PoisonError::into_inner)
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
                v1::StoreDigestRequest::KIND => Ok(self.digest().await?),
                kind => Err(message::refuse_kind("parameter server", kind)),
            }
        })
    }
}

/// Runs `work` where it may take its time.
pub(crate) async fn blocking<T: Send + 'static>(
    what: &'static str,
    work: impl FnOnce() -> T + Send + 'static,
) -> Result<T, RoleError> {
    tokio::task::spawn_blocking(work).await.map_err(|error| RoleError::Task { what, reason: error.to_string() })
}

/// The same memory under its proper name.
fn as_keys(keys: Vec<u64>) -> Vec<FeatureKey> {
    keys.into_iter().map(FeatureKey).collect()
}

type LookUpResult = Result<(Vec<Vec<f32>>, rectrain_embedding::LookupCounts), RoleError>;

fn look_up_groups(store: &Store, keys: &[Vec<FeatureKey>], dims: &[usize], missing: Missing) -> LookUpResult {
    let mut total = rectrain_embedding::LookupCounts::default();
    let mut groups = Vec::with_capacity(keys.len());
    for (group, (keys, dim)) in keys.iter().zip(dims).enumerate() {
        let mut rows = vec![0.0; keys.len() * dim];
        total += store.lookup(GroupId(group as u16), keys, missing, &mut rows)?;
        groups.push(rows);
    }
    Ok((groups, total))
}

/// Sums the ranks' gradients and applies them as one update; the optimizers count updates from 1.
fn apply_groups(
    store: &Store,
    step: GlobalStep,
    mut ranks: Vec<Contribution>,
    dims: &[usize],
) -> Result<v1::UpdateReply, RoleError> {
    let mut reply = v1::UpdateReply::default();
    for (group, dim) in dims.iter().enumerate() {
        let contributions = ranks.iter_mut().map(|rank| std::mem::take(&mut rank[group])).collect();
        let sum = sum_by_key(contributions, *dim);
        let counts = store.update(GroupId(group as u16), &as_keys(sum.keys), &sum.values, step.0 + 1)?;
        reply.missing_rows += counts.missing;
        reply.non_finite_rows += counts.non_finite;
    }
    Ok(reply)
}

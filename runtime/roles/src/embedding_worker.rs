//! The embedding worker: keeps the ids of the batches in flight, asks the parameter servers for their rows, pools them, and on
//! the way back turns gradients of pooled embeddings into gradients of rows (Persia §4.1). Loaders and dense workers call it.

use std::collections::HashMap;
use std::ops::Range;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

use futures::future::try_join_all;
use rectrain_proto::v1;
use rectrain_wire::ids::UniqueIds;
use rectrain_wire::{BoxFuture, Channel, Frame, Peer, Refusal, Service, Tensor};
use tokio::sync::{Notify, OnceCell};

use crate::batch::{BatchKey, BatchPosition};
use crate::compression::Compression;
use crate::error::RoleError;
use crate::message::{self, Request};
use crate::metrics::EmbeddingWorkerMetrics;
use crate::parameter_server::blocking;
use crate::plan::{CALL_DEADLINE, JobPlan};
use crate::pooling::{FeatureLayout, Pooled, PreparedIds};
use crate::slot_map::SlotMap;

/// See the module's text.
pub struct EmbeddingWorker {
    layout: Arc<FeatureLayout>,
    slots: SlotMap,
    compression: Compression,
    servers: OnceCell<Vec<Channel>>,
    /// Batches whose ids are here and whose gradients are not: bounded by the window in which dense workers accept batches, which
    /// loaders wait for before they send ids.
    batches: Mutex<HashMap<BatchKey, Arc<PreparedIds>>>,
    arrived: Notify,
    metrics: EmbeddingWorkerMetrics,
}

impl EmbeddingWorker {
    /// Without parameter servers: [`Self::connect`] gives them.
    #[must_use]
    pub fn new(plan: &JobPlan, metrics: EmbeddingWorkerMetrics) -> Self {
        Self {
            layout: Arc::new(plan.layout.clone()),
            slots: plan.slot_map(),
            compression: plan.compression,
            servers: OnceCell::new(),
            batches: Mutex::new(HashMap::new()),
            arrived: Notify::new(),
            metrics,
        }
    }

    /// Sets the parameter servers, in the order of the slot map. Look-ups that came earlier wait for this.
    pub fn connect(&self, servers: Vec<Channel>) {
        // A second roster of the same job is the same roster.
        let _already_connected = self.servers.set(servers);
        self.arrived.notify_waiters();
    }

    async fn put_ids(&self, request: v1::PutIds, tensors: Vec<Tensor>) -> Result<Frame, RoleError> {
        let key = BatchKey::read("put_ids", request.batch)?;
        let samples = request.samples as usize;
        let expected = self.layout.features.len() * 3;
        if tensors.len() != expected {
            return Err(RoleError::Tensors { message: "put_ids", expected, found: tensors.len() });
        }
        let layout = Arc::clone(&self.layout);
        let prepared = blocking("preparation of ids", move || prepare(samples, tensors, &layout)).await??;
        self.metrics.unique_ids.inc_by(prepared.keys().iter().map(Vec::len).sum::<usize>() as u64);
        let previous = self.lock_batches().insert(key, Arc::new(prepared));
        if previous.is_some() {
            return Err(RoleError::Inconsistent { message: "put_ids", reason: format!("{key} was sent twice") });
        }
        self.metrics.batches_in_flight.inc();
        self.arrived.notify_waiters();
        Ok(message::done::<v1::PutIds>())
    }

    async fn forward(&self, request: v1::Forward) -> Result<Frame, RoleError> {
        let key = BatchKey::read("forward", request.batch)?;
        let prepared = self.wait_for(key).await?;
        let started = Instant::now();
        let rows = self.look_up(&key, &prepared).await?;
        self.metrics.look_up.observe(started.elapsed().as_secs_f64());
        if matches!(key.position, BatchPosition::Evaluation { .. }) {
            self.forget(key);
        }
        let started = Instant::now();
        let layout = Arc::clone(&self.layout);
        let pooled = blocking("pooling", move || prepared.pool(&rows, &layout)).await?;
        self.metrics.pool.observe(started.elapsed().as_secs_f64());
        Ok(message::reply::<v1::Forward>(&message::Done {}, encode_pooled(pooled, &self.layout, self.compression)?))
    }

    async fn backward(&self, request: v1::Backward, tensors: Vec<Tensor>) -> Result<Frame, RoleError> {
        let key = BatchKey::read("backward", request.batch)?;
        let prepared = self.forget(key).ok_or_else(|| RoleError::Inconsistent {
            message: "backward",
            reason: format!("the ids of {key} are not here"),
        })?;
        let gradients = decode_pooled("backward", tensors, prepared.samples(), &self.layout, self.compression)?;
        let (layout, by_ids) = (Arc::clone(&self.layout), Arc::clone(&prepared));
        let rows = blocking("scattering of gradients", move || by_ids.scatter(&gradients, &layout)).await?;
        let started = Instant::now();
        self.update(&key, &prepared, rows).await?;
        self.metrics.update.observe(started.elapsed().as_secs_f64());
        Ok(message::done::<v1::Backward>())
    }

    /// Asks every parameter server, also one that holds none of the keys: each holds the look-up back until this step may be read.
    async fn look_up(&self, key: &BatchKey, prepared: &PreparedIds) -> Result<Vec<Vec<f32>>, RoleError> {
        let runs = self.runs(prepared);
        let request = match key.position {
            BatchPosition::Step(step) => v1::Lookup { step: step.0, train: true },
            BatchPosition::Evaluation { at_step, .. } => v1::Lookup { step: at_step.0, train: false },
        };
        let calls = self.servers().await?.iter().enumerate().map(|(server, channel)| {
            let keys =
                prepared.keys().iter().zip(&runs).map(|(keys, runs)| Tensor::from(gather(keys, &runs[server], 1)));
            message::call(channel, request, keys.collect(), CALL_DEADLINE)
        });
        let mut replies =
            try_join_all(calls).await?.into_iter().map(|(_done, tensors)| tensors.into_iter()).collect::<Vec<_>>();
        let mut rows = Vec::with_capacity(runs.len());
        for (group, dim) in self.layout.group_dims.iter().enumerate() {
            let mut parts = Vec::with_capacity(replies.len());
            for reply in &mut replies {
                parts.push(self.compression.decode("lookup", reply, *dim)?);
            }
            rows.push(merge(parts, &runs[group], prepared.keys()[group].len(), *dim)?);
        }
        Ok(rows)
    }

    async fn update(&self, key: &BatchKey, prepared: &PreparedIds, rows: Vec<Vec<f32>>) -> Result<(), RoleError> {
        let BatchPosition::Step(step) = key.position else {
            return Err(RoleError::Inconsistent { message: "backward", reason: format!("{key} is not trained") });
        };
        let runs = self.runs(prepared);
        let request = v1::Update { step: step.0, rank: key.rank.0 };
        let servers = self.servers().await?;
        let mut calls = Vec::with_capacity(servers.len());
        for (server, channel) in servers.iter().enumerate() {
            let mut tensors = Vec::with_capacity(3 * rows.len());
            for (group, dim) in self.layout.group_dims.iter().enumerate() {
                let own = &runs[group][server];
                tensors.push(Tensor::from(gather(&prepared.keys()[group], own, 1)));
                tensors.extend(self.compression.encode(gather(&rows[group], own, *dim), *dim)?);
            }
            calls.push(message::call(channel, request, tensors, CALL_DEADLINE));
        }
        for (reply, _tensors) in try_join_all(calls).await? {
            self.metrics.missing_rows.inc_by(reply.missing_rows);
        }
        Ok(())
    }

    /// `[group][server]` → runs of the group's keys.
    fn runs(&self, prepared: &PreparedIds) -> Vec<Vec<Vec<Range<usize>>>> {
        prepared.keys().iter().map(|keys| self.slots.split(keys)).collect()
    }

    async fn wait_for(&self, key: BatchKey) -> Result<Arc<PreparedIds>, RoleError> {
        let waiting = async {
            loop {
                let arrived = self.arrived.notified();
                if let Some(prepared) = self.lock_batches().get(&key) {
                    return Arc::clone(prepared);
                }
                arrived.await;
            }
        };
        tokio::time::timeout(CALL_DEADLINE, waiting).await.map_err(|_| RoleError::Inconsistent {
            message: "forward",
            reason: format!("the ids of {key} did not arrive within {CALL_DEADLINE:?}"),
        })
    }

    async fn servers(&self) -> Result<&[Channel], RoleError> {
        let waiting = async {
            loop {
                let connected = self.arrived.notified();
                if let Some(servers) = self.servers.get() {
                    return servers.as_slice();
                }
                connected.await;
            }
        };
        tokio::time::timeout(CALL_DEADLINE, waiting).await.map_err(|_| RoleError::Stopped)
    }

    fn forget(&self, key: BatchKey) -> Option<Arc<PreparedIds>> {
        let removed = self.lock_batches().remove(&key);
        if removed.is_some() {
            self.metrics.batches_in_flight.dec();
        }
        removed
    }

    fn lock_batches(&self) -> std::sync::MutexGuard<'_, HashMap<BatchKey, Arc<PreparedIds>>> {
        self.batches.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Service for EmbeddingWorker {
    fn call<'a>(&'a self, _peer: &'a Peer, frame: Frame) -> BoxFuture<'a, Result<Frame, Refusal>> {
        Box::pin(async move {
            match frame.kind {
                v1::PutIds::KIND => {
                    let (request, tensors) = message::read::<v1::PutIds>(frame)?;
                    Ok(self.put_ids(request, tensors).await?)
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

fn prepare(samples: usize, tensors: Vec<Tensor>, layout: &FeatureLayout) -> Result<PreparedIds, RoleError> {
    let mut tensors = tensors.into_iter();
    let mut unique = Vec::with_capacity(layout.features.len());
    for _feature in &layout.features {
        let parts = [
            message::next("put_ids", &mut tensors)?,
            message::next("put_ids", &mut tensors)?,
            message::next("put_ids", &mut tensors)?,
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

/// Pooled embeddings, or gradients of them, as they travel between dense and embedding workers.
pub(crate) fn encode_pooled(
    pooled: Pooled,
    layout: &FeatureLayout,
    compression: Compression,
) -> Result<Vec<Tensor>, RoleError> {
    let mut tensors = Vec::with_capacity(4);
    if layout.embedding_width > 0 {
        tensors.extend(compression.encode(pooled.embeddings, layout.embedding_width)?);
    }
    if layout.linear {
        tensors.extend(compression.encode(pooled.linear, layout.features.len())?);
    }
    Ok(tensors)
}

/// The inverse of [`encode_pooled`]; sizes are checked.
pub(crate) fn decode_pooled(
    what: &'static str,
    tensors: Vec<Tensor>,
    samples: usize,
    layout: &FeatureLayout,
    compression: Compression,
) -> Result<Pooled, RoleError> {
    let mut tensors = tensors.into_iter();
    let mut part = |columns: usize| {
        if columns == 0 {
            return Ok(Vec::new());
        }
        let values = compression.decode(what, &mut tensors, columns)?;
        if values.len() == samples * columns {
            return Ok(values);
        }
        let reason = format!("{samples} samples of {columns} columns were expected, {} values came", values.len());
        Err(RoleError::Inconsistent { message: what, reason })
    };
    let embeddings = part(layout.embedding_width)?;
    let linear = part(if layout.linear { layout.features.len() } else { 0 })?;
    Ok(Pooled { embeddings, linear })
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
    fn rows_that_do_not_fit_the_question_are_refused() {
        let runs = vec![vec![0..2], vec![2..3]];
        assert!(merge(vec![vec![0.0; 4], vec![0.0; 1]], &runs, 3, 2).is_err());
    }
}

//! The embedding worker: holds the batches in flight, looks up the rows of their ids and pools
//! them. In the backward pass it turns gradients of pooled embeddings into gradients of rows
//! (Persia §4.1).
//!
//! Loaders put pieces of batches here, and any dense worker may fetch a piece. In modes with a
//! barrier, the rank of a dense worker determines its pieces. In modes without one, the coordinator
//! assigns them.

mod partial;
mod parts;
mod pieces;
mod pooled;
mod positions;
mod replies;
mod rows;
mod sums;
mod times;

use std::sync::Arc;
use std::time::Instant;

use rectrain_kinds::Compression;
use rectrain_pooling::{BySize, PreparedIds};
use rectrain_proto::v1;
use rectrain_protocol::batch::BatchKey;
use rectrain_protocol::blocking::blocking;
use rectrain_protocol::compression::TensorCodec;
use rectrain_protocol::error::RoleError;
use rectrain_protocol::layout::{FeatureLayout, Pooled, PooledWidths, decode_pooled, encode_pooled};
use rectrain_protocol::message::{self, Request};
use rectrain_protocol::metrics::EmbeddingWorkerMetrics;
use rectrain_protocol::placement::{Directory, Placement};
use rectrain_protocol::plan::JobPlan;
use rectrain_protocol::remember::Remembering;
use rectrain_protocol::unseen::LookUps;
use rectrain_wire::ids::UniqueIds;
use rectrain_wire::{BoxFuture, Frame, Peer, Refusal, Service, Tensor};
use tokio::sync::Semaphore;

use crate::partial::SumGradients;
use crate::pieces::{Piece, Pieces};
use crate::pooled::GroupSums;
use crate::rows::{Found, LookUp, LookedUp, RowGradients, Rows};
use crate::sums::Sums;
use crate::times::ForwardTimes;

/// See the module documentation.
pub struct EmbeddingWorker {
    layout: Arc<FeatureLayout>,
    /// By row group: whether gradients carry the examples of each key.
    counted: Arc<Vec<bool>>,
    compression: Compression,
    pieces: Arc<Pieces>,
    rows: Rows,
    /// One permit a core. Work without a permit queues. The time in the queue shows whether there
    /// are enough embedding workers.
    cores: Semaphore,
    metrics: EmbeddingWorkerMetrics,
}

impl EmbeddingWorker {
    /// Creates a worker that does not know the parameter servers yet: see [`Self::connect`].
    #[must_use]
    pub fn new(plan: &JobPlan, index: u32, metrics: EmbeddingWorkerMetrics) -> Self {
        let layout = Arc::new(plan.layout.clone());
        Self {
            compression: plan.compression,
            counted: Arc::new(plan.counts_examples()),
            pieces: Arc::new(Pieces::new(plan, metrics.clone())),
            rows: Rows::new(plan, index, Arc::clone(&layout), metrics.clone()),
            layout,
            cores: Semaphore::new(std::thread::available_parallelism().map_or(1, usize::from)),
            metrics,
        }
    }

    /// Sets the parameter servers, and the directory that returns newer placements. Look-ups wait
    /// until then.
    pub fn connect(&self, placement: Placement, directory: Directory) {
        self.rows.connect(placement, directory);
    }

    /// The service that other roles call. A layer in front of the worker repeats the replies of
    /// repeated requests.
    #[must_use]
    pub fn service(self: &Arc<Self>) -> Arc<dyn Service> {
        Arc::new(Remembering::new(Arc::clone(self), Arc::clone(&self.pieces)))
    }

    async fn put_batch(&self, request: v1::PutBatch, mut tensors: Vec<Tensor>) -> Result<Frame, RoleError> {
        let key = BatchKey::read("put_batch", request.batch)?;
        let samples = request.samples as usize;
        let ids = self.layout.features.len() * 3;
        if !(ids + 2..=ids + 3).contains(&tensors.len()) {
            return Err(RoleError::Tensors { message: "put_batch", expected: ids + 2, found: tensors.len() });
        }
        self.pieces.admitted(key, samples > 0).await;
        let rest = tensors.split_off(ids);
        let (layout, started) = (Arc::clone(&self.layout), Instant::now());
        let prepared = self.work("preparation of ids", move || prepare(samples, tensors, &layout)).await??;
        self.metrics.unique_ids.inc_by(prepared.keys().iter().map(Vec::len).sum::<usize>() as u64);
        self.pieces.put(key, Piece::new(prepared, started.elapsed(), &request, rest));
        Ok(message::done::<v1::PutBatch>())
    }

    async fn forward(&self, request: v1::Forward) -> Result<Frame, RoleError> {
        let key = BatchKey::read("forward", request.batch)?;
        let arrived = Instant::now();
        let Some(piece) = self.pieces.fetch("forward", key, request.pulled).await? else {
            let applied = v1::Forwarded { is_applied: true, ..v1::Forwarded::default() };
            return Ok(message::reply::<v1::Forward>(&applied, Vec::new()));
        };
        let started = Instant::now();
        let look_up = LookUp { key, step: request.step, prepared: &piece.prepared, partial: request.partial };
        let LookedUp { found, steps, is_applied, missing, servers } = self.rows.look_up(&look_up).await?;
        let looked_up = started.elapsed();
        let Some(found) = found else {
            let applied = v1::Forwarded { is_applied, ..v1::Forwarded::default() };
            return Ok(message::reply::<v1::Forward>(&applied, Vec::new()));
        };
        self.metrics.look_up.observe(looked_up.as_secs_f64());
        let waited_for_piece = started.duration_since(arrived);
        self.pieces.fetched(key, &piece, request.step.is_some());
        let started = Instant::now();
        let (layout, ids) = (Arc::clone(&self.layout), Arc::clone(&piece));
        let pool = move || {
            // In training the servers report no missing keys.
            let look_ups = if missing.is_empty() { Vec::new() } else { ids.prepared.count_unseen(&missing, &layout) };
            let pooled = match found {
                Found::Rows(rows, None) => ids.prepared.pool(&rows, &layout),
                Found::Rows(rows, Some(GroupSums { groups, pooled })) => {
                    groups.pool(&ids.prepared, &rows, &pooled, &layout)
                }
                Found::Sums(Sums { pooled, cells }) => {
                    ids.cells.keep(cells);
                    pooled
                }
            };
            (pooled, look_ups)
        };
        let (pooled, look_ups) = self.work("pooling", pool).await?;
        self.metrics.pool.observe(started.elapsed().as_secs_f64());
        let (widths, compression) = self.form(request.partial)?;
        let mut tensors = encode_pooled(pooled, widths, |values, dim| compression.encode(values, dim))?;
        tensors.extend(piece.rest.iter().cloned());
        let times = ForwardTimes {
            all: arrived.elapsed(),
            waited_for_piece,
            prepared: waited_for_piece.min(piece.preparation),
            looked_up,
            loader: piece.loader,
            servers,
        };
        let reply = v1::Forwarded {
            seconds: times.all.as_secs_f64(),
            own_seconds: times.own_seconds(),
            spent: times.spent(),
            samples: piece.prepared.samples() as u32,
            global_samples: piece.global_samples,
            steps,
            answered: self.pieces.is_acknowledged(key),
            is_applied,
            look_ups: look_ups.into_iter().map(LookUps::write).collect(),
        };
        Ok(message::reply::<v1::Forward>(&reply, tensors))
    }

    async fn backward(&self, request: v1::Backward, tensors: Vec<Tensor>) -> Result<Frame, RoleError> {
        let key = BatchKey::read("backward", request.batch)?;
        // If the predecessor of this worker answered the look-up, the piece may not be here. The
        // loader then sends it again.
        let Some(piece) = self.pieces.fetch("backward", key, request.pulled).await? else {
            // The parameter servers have had equal gradients from another dense worker.
            return Ok(message::reply::<v1::Backward>(&v1::BackwardReply::default(), Vec::new()));
        };
        let samples = piece.prepared.samples();
        let mut tensors = tensors.into_iter();
        let (widths, compression) = self.form(request.partial)?;
        let gradients = decode_pooled("backward", &mut tensors, samples, widths, compression)?;
        if request.partial {
            return self.backward_sums(key, request, piece, gradients).await;
        }
        let placement = self.rows.placement().await?;
        let by_size = self.rows.pooled_groups(key, &piece.prepared, &placement);
        let (layout, ids) = (Arc::clone(&self.layout), Arc::clone(&piece));
        let counted = Arc::clone(&self.counted);
        let scatter = move || -> Result<RowGradients, RoleError> {
            let (rows, sums) = match by_size {
                None => (ids.prepared.scatter(&gradients, &layout), None),
                Some(BySize { groups, .. }) => {
                    let (rows, pooled) = groups.scatter(&ids.prepared, &gradients, &layout);
                    (rows, Some(GroupSums { groups, pooled }))
                }
            };
            let examples = match counted.contains(&true) {
                true => ids.prepared.examples(ids.labels()?, &counted, &layout),
                false => vec![Vec::new(); counted.len()],
            };
            Ok(RowGradients { rows, sums, examples, moment: ids.moment })
        };
        let gradients = self.work("scattering of gradients", scatter).await??;
        let started = Instant::now();
        let reply = self.rows.update(key, &request, (&piece.prepared, &placement), gradients).await?;
        self.metrics.update.observe(started.elapsed().as_secs_f64());
        Ok(message::reply::<v1::Backward>(&reply, Vec::new()))
    }

    /// The backward pass of `des`: sends the gradient of the sums on.
    async fn backward_sums(
        &self,
        key: BatchKey,
        request: v1::Backward,
        piece: Arc<Piece>,
        gradients: Pooled,
    ) -> Result<Frame, RoleError> {
        let step = request
            .step
            .ok_or_else(|| RoleError::Inconsistent { message: "backward", reason: "the step is missing".to_owned() })?;
        let (layout, counted, ids) = (Arc::clone(&self.layout), Arc::clone(&self.counted), Arc::clone(&piece));
        let examples = match counted.contains(&true) {
            true => {
                let count = move || Ok::<_, RoleError>(ids.prepared.examples(ids.labels()?, &counted, &layout));
                self.work("counting of examples", count).await??
            }
            false => vec![Vec::new(); counted.len()],
        };
        let gradients = SumGradients { pooled: gradients, examples, moment: piece.moment };
        let started = Instant::now();
        let reply = self.rows.update_sums(key, step, (&piece.prepared, &piece.cells), gradients).await?;
        self.metrics.update.observe(started.elapsed().as_secs_f64());
        Ok(message::reply::<v1::Backward>(&reply, Vec::new()))
    }

    /// The columns and the compression of a piece's values in messages of dense workers. Sums are
    /// never compressed: the second-order term is a difference of large numbers.
    fn form(&self, partial: bool) -> Result<(PooledWidths, Compression), RoleError> {
        if partial {
            return Ok((PooledWidths::of_sums(self.rows.operators()?), Compression::None));
        }
        Ok((self.layout.pooled_widths(), self.compression))
    }

    /// Runs `work` on a blocking thread once a core is free.
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

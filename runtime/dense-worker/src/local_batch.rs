//! A local batch: fetches pieces from embedding workers and joins them, then splits the gradients
//! by piece again.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Instant;

use rectrain_dense::Features;
use rectrain_kinds::Compression;
use rectrain_proto::v1;
use rectrain_wire::Tensor;
use tokio::task::JoinHandle;

use super::Trainer;
use super::spent::ReplyTime;
use rectrain_protocol::batch::BatchPosition;
use rectrain_protocol::compression::TensorCodec;
use rectrain_protocol::deadline::WHOLE_JOB;
use rectrain_protocol::error::RoleError;
use rectrain_protocol::layout::{Pooled, PooledWidths, decode_pooled, encode_pooled};
use rectrain_protocol::long_wait::reporting_wait;
use rectrain_protocol::message;
use rectrain_protocol::plan::JobPlan;
use rectrain_protocol::round_robin::Piece;
use rectrain_protocol::unseen::{self, LookUps};

/// One piece or several joined pieces. Row i of `pooled`, `dense`, `labels` and `groups` is sample
/// i.
#[derive(Default)]
pub(crate) struct LocalBatch {
    pub(crate) samples: usize,
    /// Samples of the global batch; 0 if there is no piece.
    pub(crate) global_samples: usize,
    pub(crate) pooled: Pooled,
    pub(crate) dense: Vec<f32>,
    pub(crate) labels: Vec<f32>,
    pub(crate) groups: Vec<u64>,
    /// Without a barrier: the step of each parameter server when it answered the look-up.
    pub(crate) steps: Vec<u64>,
    /// In an evaluation: the look-ups of each feature.
    pub(crate) look_ups: Vec<LookUps>,
    /// The pieces in order, each with its number of samples.
    pub(crate) pieces: Vec<(Piece, usize)>,
    /// The number of pieces whose gradients a dead dense worker had already delivered.
    pub(crate) answered: usize,
    /// The number of pieces that the embedding workers no longer have.
    pub(crate) missing: usize,
    /// True if the parameter servers have applied the step, so that they need no more gradients for
    /// it.
    pub(crate) is_applied: bool,
    /// The time of the reply, of a batch with one piece.
    pub(crate) reply_time: ReplyTime,
}

impl LocalBatch {
    pub(crate) fn features(&self) -> Features<'_> {
        Features {
            samples: self.samples,
            dense: &self.dense,
            embeddings: &self.pooled.embeddings,
            linear: &self.pooled.linear,
        }
    }

    /// Appends the rows of `other`.
    fn append(mut self, other: Self) -> Self {
        self.answered += other.answered;
        self.missing += other.missing;
        self.is_applied |= other.is_applied;
        if self.pieces.is_empty() {
            let Self { answered, missing, is_applied, .. } = self;
            return Self { answered, missing, is_applied, ..other };
        }
        if other.pieces.is_empty() {
            return self;
        }
        self.samples += other.samples;
        self.pooled.embeddings.extend(other.pooled.embeddings);
        self.pooled.linear.extend(other.pooled.linear);
        self.dense.extend(other.dense);
        self.labels.extend(other.labels);
        self.groups.extend(other.groups);
        self.pieces.extend(other.pieces);
        unseen::add(&mut self.look_ups, &other.look_ups);
        self
    }

    /// The factor of each sample's gradient in modes without a barrier. The last batches of the
    /// data may be smaller. With this factor, the mean over the gradients in a buffer is still the
    /// mean over all their samples.
    pub(crate) fn scale_without_barrier(&self, plan: &JobPlan) -> f32 {
        let pieces = (self.global_samples as u64).div_ceil(plan.local_batch_rows);
        pieces as f32 / self.global_samples.max(1) as f32
    }

    /// The number of pieces, including missing ones.
    pub(crate) fn all_pieces(&self) -> usize {
        self.pieces.len() + self.missing
    }

    /// Refuses a batch with missing pieces.
    pub(crate) fn expect_all(&self, message: &'static str) -> Result<(), RoleError> {
        if self.missing == 0 {
            return Ok(());
        }
        let reason = format!(
            "a dead dense worker had delivered the gradients of {} of {} pieces, and their embeddings were dropped",
            self.missing,
            self.all_pieces()
        );
        Err(RoleError::Inconsistent { message, reason })
    }

    /// Splits the gradients of the pooled embeddings by piece.
    pub(crate) fn by_piece(&self, mut gradients: Pooled) -> Vec<(Piece, Pooled)> {
        if let [(piece, _)] = self.pieces[..] {
            return vec![(piece, gradients)];
        }
        let width = |values: &[f32]| values.len() / self.samples.max(1);
        let (embeddings, linear) = (width(&gradients.embeddings), width(&gradients.linear));
        self.pieces
            .iter()
            .map(|(piece, samples)| {
                let own = Pooled {
                    embeddings: gradients.embeddings.drain(..samples * embeddings).collect(),
                    linear: gradients.linear.drain(..samples * linear).collect(),
                };
                (*piece, own)
            })
            .collect()
    }
}

/// Gradients that are being sent to the embedding workers, oldest first.
pub(crate) type Pushes = VecDeque<JoinHandle<Result<v1::BackwardReply, RoleError>>>;

/// Pieces that are being fetched.
pub(crate) struct Fetching(Vec<JoinHandle<Result<LocalBatch, RoleError>>>);

impl Fetching {
    /// The request for a single piece.
    pub(crate) fn into_single(self) -> Option<JoinHandle<Result<LocalBatch, RoleError>>> {
        self.0.into_iter().next()
    }
}

impl Trainer {
    /// Requests pieces from their embedding workers, without waiting. With a barrier, `step` is the
    /// global step that trains them.
    pub(crate) fn fetch(&self, pieces: impl Iterator<Item = Piece>, step: Option<u64>) -> Fetching {
        let fetch = |piece: Piece| {
            let (workers, plan) = (Arc::clone(&self.peers.embedding_workers), Arc::clone(&self.plan));
            let coordinator = self.peers.coordinator.clone();
            let waiting = self.waiting_for(v1::Role::EmbeddingWorker, piece.embedding_worker as u32);
            // Evaluations have no step, and look rows up.
            let partial = self.divided.is_some() && step.is_some();
            let pulled = self.pulls;
            let form = if partial { self.form() } else { Form::of_rows(&self.plan) };
            self.spawn(async move {
                let started = Instant::now();
                let request = v1::Forward { batch: Some(piece.key.write()), step, partial, pulled };
                // In an evaluation this call may wait for hours, while a replaced dense worker
                // predicts its share again. The embedding worker notices if the job makes no
                // progress.
                let is_evaluated = matches!(piece.key.position, BatchPosition::Evaluation { .. });
                let patience = if is_evaluated { WHOLE_JOB } else { plan.patience() };
                let call = workers.call_within(piece.embedding_worker, request, Vec::new(), patience);
                let replied = if is_evaluated { call.await } else { reporting_wait(call, &coordinator, waiting).await };
                let (reply, tensors) = replied?;
                let reply_time = ReplyTime::new(piece.embedding_worker, started.elapsed(), &reply);
                Ok(LocalBatch { reply_time, ..read(piece, reply, tensors, &plan, form)? })
            })
        };
        Fetching(pieces.map(fetch).collect())
    }

    /// Waits for the pieces and joins them.
    pub(crate) fn fetched(&mut self, fetching: Fetching) -> Result<LocalBatch, RoleError> {
        let mut batch = LocalBatch::default();
        for piece in fetching.0 {
            let started = Instant::now();
            let piece = self.join("forward", piece)?;
            self.pace.times.waited(started.elapsed(), &piece.reply_time);
            batch = batch.append(piece);
        }
        Ok(batch)
    }

    /// Sends a piece's gradients to its embedding worker, without waiting.
    pub(crate) fn send_gradients(
        &self,
        Piece { key, embedding_worker }: Piece,
        gradients: Pooled,
        step: Option<u64>,
        push: Option<v1::TokenPush>,
    ) -> JoinHandle<Result<v1::BackwardReply, RoleError>> {
        let workers = Arc::clone(&self.peers.embedding_workers);
        let (Form { widths, compression }, partial) = (self.form(), self.divided.is_some());
        let pulled = self.pulls;
        self.spawn(async move {
            let tensors = encode_pooled(gradients, widths, |values, dim| compression.encode_gradients(values, dim))?;
            let request = v1::Backward { batch: Some(key.write()), step, push, partial, pulled };
            Ok(workers.call(embedding_worker, request, tensors).await?.0)
        })
    }
}

/// The columns and the compression of a piece's values in messages.
#[derive(Clone, Copy)]
struct Form {
    widths: PooledWidths,
    compression: Compression,
}

impl Form {
    /// Pooled rows, and their gradients.
    fn of_rows(plan: &JobPlan) -> Self {
        Self { widths: plan.layout.pooled_widths(), compression: plan.compression }
    }
}

impl Trainer {
    /// The form of the order that is carried out.
    fn form(&self) -> Form {
        match &self.divided {
            Some(divided) => Form { widths: PooledWidths::of_sums(divided.operators), compression: Compression::None },
            None => Form::of_rows(&self.plan),
        }
    }
}

fn read(
    piece: Piece,
    reply: v1::Forwarded,
    tensors: Vec<Tensor>,
    plan: &JobPlan,
    Form { widths, compression }: Form,
) -> Result<LocalBatch, RoleError> {
    let answered = usize::from(reply.answered);
    let is_applied = reply.is_applied;
    if (reply.answered || is_applied) && tensors.is_empty() {
        return Ok(LocalBatch { answered, missing: 1, is_applied, ..LocalBatch::default() });
    }
    let samples = reply.samples as usize;
    let mut tensors = tensors.into_iter();
    let pooled = decode_pooled("forward", &mut tensors, samples, widths, compression)?;
    let dense = message::next("forward", &mut tensors)?.expect_f32("dense")?;
    let labels = message::next("forward", &mut tensors)?.expect_f32("labels")?;
    let groups = tensors.next().map(|groups| groups.expect_u64("groups")).transpose()?.unwrap_or_default();
    let width = plan.schema.dense.len();
    if dense.len() != samples * width || labels.len() != samples || !(groups.is_empty() || groups.len() == samples) {
        let reason = format!(
            "{} has {samples} samples, but the reply has {} dense values and {} labels",
            piece.key,
            dense.len(),
            labels.len()
        );
        return Err(RoleError::Inconsistent { message: "forward", reason });
    }
    Ok(LocalBatch {
        samples,
        global_samples: reply.global_samples as usize,
        pooled,
        dense,
        labels,
        groups,
        steps: reply.steps,
        look_ups: reply.look_ups.into_iter().map(LookUps::read).collect(),
        pieces: vec![(piece, samples)],
        answered,
        missing: 0,
        is_applied,
        reply_time: ReplyTime::default(),
    })
}

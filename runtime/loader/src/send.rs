//! Sends chunks to the embedding workers, cut into global batches and pieces.

use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};

use futures::future::try_join_all;
use rectrain_data::Batch;
use rectrain_proto::v1;
use rectrain_protocol::batch::{BatchKey, BatchPosition};
use rectrain_protocol::blocking::blocking;
use rectrain_protocol::deadline::WHOLE_JOB;
use rectrain_protocol::error::RoleError;
use rectrain_protocol::round_robin::{Piece, RoundRobin};
use rectrain_wire::Tensor;
use rectrain_wire::ids::{Scratch, UniqueIds};

use crate::Loader;
use crate::lease::Lease;

/// Selects the pieces of a chunk to send.
#[derive(Clone, Default)]
pub(crate) struct Selection {
    /// Only pieces of this embedding worker. `None` selects all.
    embedding_worker: Option<u32>,
    /// Only these pieces of each global batch. An empty list selects all.
    pieces: Vec<Range<u32>>,
}

impl Selection {
    /// Selects the pieces that a dead process held.
    pub(crate) fn lost(reply: &v1::RepeatReply) -> Self {
        let pieces = reply.pieces.iter().map(|range| range.start..range.end).collect();
        Self { embedding_worker: reply.embedding_worker, pieces }
    }

    fn has(&self, piece: &Piece) -> bool {
        self.embedding_worker.is_none_or(|only| piece.embedding_worker == only as usize)
            && (self.pieces.is_empty() || self.pieces.iter().any(|only| only.contains(&piece.key.piece)))
    }
}

/// The rows of a chunk, and the destinations of its pieces.
pub(crate) struct ReadChunk {
    first: BatchPosition,
    max_batches: u64,
    skip: (u64, u32),
    selection: Selection,
    turns: RoundRobin,
    rows: Batch,
}

impl ReadChunk {
    pub(crate) fn new(lease: &Lease, selection: Selection, rows: Batch) -> Result<Self, RoleError> {
        Ok(Self {
            first: lease.first(),
            max_batches: lease.max_batches(),
            skip: lease.skip(),
            selection,
            turns: lease.turns()?,
            rows,
        })
    }
}

impl Loader {
    pub(crate) async fn send_chunk(&self, chunk: ReadChunk) -> Result<(), RoleError> {
        let ReadChunk { first: position, max_batches, skip, selection, turns, rows } = chunk;
        let rows = Arc::new(rows);
        let size = self.plan.global_batch_rows as usize;
        let (first, skip_pieces) = skip;
        for number in first..(rows.samples.div_ceil(size) as u64).min(max_batches) {
            let start = number as usize * size;
            let range = start..rows.samples.min(start + size);
            let first_piece = if number == first { skip_pieces } else { 0 };
            let keys =
                (first_piece..self.plan.pieces()).map(|piece| BatchKey { position: position.after(number), piece });
            let pieces = keys.map(|key| turns.assign(key, self.plan.pieces()));
            self.send_batch(pieces.filter(|piece| selection.has(piece)), &rows, range).await?;
        }
        Ok(())
    }

    /// Sends pieces of one global batch. Waits until embedding workers have accepted every piece,
    /// which bounds the batches in flight. A short batch has pieces without rows.
    async fn send_batch(
        &self,
        pieces: impl Iterator<Item = Piece>,
        rows: &Arc<Batch>,
        range: Range<usize>,
    ) -> Result<(), RoleError> {
        let started = Instant::now();
        let pieces = pieces.map(|piece| {
            let own = self.plan.rows_of_piece(range.len(), piece.key.piece);
            let own = range.start + own.start..range.start + own.end;
            self.send_piece(piece, range.len(), Arc::clone(rows), own)
        });
        let longest = try_join_all(pieces).await?.into_iter().max().unwrap_or_default();
        self.metrics.accept.observe(longest.as_secs_f64());
        self.metrics.send.observe(started.elapsed().as_secs_f64());
        Ok(())
    }

    /// Sends a piece. Returns the time until it was accepted, without the preparation of its ids.
    async fn send_piece(
        &self,
        Piece { key, embedding_worker }: Piece,
        global_samples: usize,
        rows: Arc<Batch>,
        own: Range<usize>,
    ) -> Result<Duration, RoleError> {
        let rows = rows.slice(own);
        let (samples, moment) = (rows.samples as u32, rows.latest());
        let tensors = blocking("removal of duplicate ids", move || tensors_of(rows)).await??;
        let (batch, global_samples) = (Some(key.write()), global_samples as u32);
        let put = v1::PutBatch { batch, samples, global_samples, loader: self.index, moment };
        // If the job no longer has this embedding worker, the piece is a repeat and already
        // trained: skip it. A present worker accepts the piece once training is near enough.
        let sent = Instant::now();
        self.peers.embedding_workers.call_if_present(embedding_worker, put, tensors, WHOLE_JOB).await?;
        Ok(sent.elapsed())
    }
}

/// The tensors of a piece: ids, then dense features, labels, and group ids if there are any.
fn tensors_of(piece: Batch) -> Result<Vec<Tensor>, RoleError> {
    let mut scratch = Scratch::default();
    let mut tensors = Vec::with_capacity(3 * piece.sparse.len() + 3);
    for column in &piece.sparse {
        let unique = UniqueIds::from_column(&column.keys, column.offsets.as_deref(), piece.samples, &mut scratch)?;
        tensors.extend(unique.into_tensors());
    }
    tensors.extend([Tensor::from(piece.dense), Tensor::from(piece.labels)]);
    tensors.extend(piece.groups.map(Tensor::from));
    Ok(tensors)
}

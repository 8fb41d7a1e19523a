//! Reads and sends again the pieces that dead processes held.
//!
//! The loader sends repeats of training concurrently. They are few, and a piece may have to wait
//! until a piece of another repeat is trained. Repeats of an evaluation may be the whole test data,
//! so [`EvaluationRepeats`] orders them.

use std::collections::BTreeMap;

use futures::StreamExt;
use futures::future::OptionFuture;
use futures::stream::FuturesUnordered;
use rectrain_proto::v1;
use rectrain_proto::v1::repeat_reply::Repeat;
use rectrain_protocol::deadline::CALL_DEADLINE;
use rectrain_protocol::error::RoleError;

use crate::Loader;
use crate::lease::{Lease, Pass};
use crate::reader::Reader;
use crate::send::{ReadChunk, Selection};

/// The pieces that were lost together: an embedding worker, or ranges of the dense workers' pieces.
type Loss = (Option<u32>, Vec<(u32, u32)>);

/// The chunks of an evaluation to read and send again.
///
/// The chunks of one loss are sent one at a time in data order. An earlier chunk may overtake the
/// one being sent, which may be waiting for a piece of the earlier chunk. Different losses do not
/// wait for each other.
#[derive(Default)]
struct EvaluationRepeats {
    /// By loss, first batch, and a unique number.
    waiting: BTreeMap<(Loss, u64, u64), v1::RepeatReply>,
    /// The chunks that are being sent, by their numbers: loss and first batch.
    sending: BTreeMap<u64, (Loss, u64)>,
    at_step: u64,
    added: u64,
    /// The reader of the chunk that was sent last. The next chunk continues with it.
    reader: Option<Reader>,
}

impl EvaluationRepeats {
    /// Adds a chunk of the evaluation at a step. Returns whether this evaluation is later than the
    /// previous chunks, which are then dropped.
    fn add(&mut self, at_step: u64, first_batch: u64, reply: v1::RepeatReply) -> bool {
        let is_later = at_step > self.at_step;
        if is_later {
            self.waiting.clear();
            self.sending.clear();
            self.at_step = at_step;
        }
        self.added += 1;
        let pieces = reply.pieces.iter().map(|range| (range.start, range.end)).collect();
        self.waiting.insert(((reply.embedding_worker, pieces), first_batch, self.added), reply);
        is_later
    }

    /// The next chunk that may be sent, with its number.
    fn next(&mut self) -> Option<(u64, v1::RepeatReply, Option<Reader>)> {
        let is_behind =
            |loss: &Loss, first_batch: u64| self.sending.values().any(|(of, sent)| of == loss && *sent < first_batch);
        // The map orders by loss, then by first batch.
        let next = self.waiting.keys().find(|(loss, first_batch, _)| !is_behind(loss, *first_batch))?.clone();
        let reply = self.waiting.remove(&next)?;
        let (loss, first_batch, number) = next;
        self.sending.insert(number, (loss, first_batch));
        Some((number, reply, self.reader.take()))
    }

    fn sent(&mut self, number: u64, reader: Option<Reader>) {
        self.sending.remove(&number);
        self.reader = reader;
    }
}

impl Loader {
    /// Reads and sends again the pieces that dead embedding workers, dense workers or loaders held.
    /// Continues until nothing can be lost any longer. Other processes wait for the pieces that
    /// this loader has taken over.
    pub(crate) async fn repeat_lost_pieces(&self) -> Result<(), RoleError> {
        let (mut training, mut evaluating) = (FuturesUnordered::new(), FuturesUnordered::new());
        let mut evaluation = EvaluationRepeats::default();
        let mut asking = Some(Box::pin(self.next_repeat()));
        loop {
            while let Some((number, reply, reader)) = evaluation.next() {
                evaluating.push(async move { Ok::<_, RoleError>((number, self.repeat(reply, reader).await?)) });
            }
            tokio::select! {
                Some(asked) = OptionFuture::from(asking.as_mut()) => {
                    let Some(reply) = asked? else {
                        asking = None;
                        continue;
                    };
                    match &reply.repeat {
                        Some(Repeat::Evaluation(lease)) => {
                            let (at_step, first_batch) = (lease.at_step, lease.first_batch);
                            if evaluation.add(at_step, first_batch, reply) {
                                // The previous evaluation is over.
                                evaluating.clear();
                            }
                        }
                        _ => training.push(self.repeat(reply, None)),
                    }
                    asking = Some(Box::pin(self.next_repeat()));
                }
                Some(repeated) = training.next() => { repeated?; }
                Some(repeated) = evaluating.next() => {
                    let (number, reader) = repeated?;
                    evaluation.sent(number, reader);
                }
                else => return Ok(()),
            }
        }
    }

    /// The next chunk to repeat. `None` once training has ended.
    async fn next_repeat(&self) -> Result<Option<v1::RepeatReply>, RoleError> {
        loop {
            let request = v1::RepeatRequest { loader: self.index };
            let (reply, _) = self.peers.coordinator.call(request, Vec::new(), CALL_DEADLINE).await?;
            match reply.repeat {
                Some(Repeat::Finished(_)) => return Ok(None),
                Some(Repeat::Chunk(_) | Repeat::Evaluation(_)) => return Ok(Some(reply)),
                Some(Repeat::Wait(_)) | None => {}
            }
        }
    }

    /// Reads a chunk and sends its lost pieces. Uses `reader` if it is given, and returns the
    /// reader for the next chunk.
    async fn repeat(&self, reply: v1::RepeatReply, reader: Option<Reader>) -> Result<Option<Reader>, RoleError> {
        self.peers.embedding_workers.follow_replacements(reply.embedding_worker_successions).await?;
        let (selection, is_unreported) = (Selection::lost(&reply), reply.report);
        let lease = match reply.repeat {
            Some(Repeat::Chunk(lease)) => Lease::Training(lease),
            Some(Repeat::Evaluation(lease)) if self.plan.test.is_some() => Lease::Evaluation(lease),
            _ => return Ok(reader),
        };
        let reader = match reader.filter(|_| lease.pass() == Pass::Evaluation) {
            Some(reader) => reader,
            None => self.reader(lease.pass(), lease.epoch(), 0).await?,
        };
        let (reader, content) = self.read(reader, self.place(&lease)).await?;
        if is_unreported && self.report(&lease, &content).await? {
            return Ok(Some(reader));
        }
        if let Some(rows) = content.rows {
            self.send_chunk(ReadChunk::new(&lease, selection, rows)?).await?;
        }
        Ok(Some(reader))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn add(repeats: &mut EvaluationRepeats, at_step: u64, first_batch: u64) -> bool {
        repeats.add(at_step, first_batch, v1::RepeatReply::default())
    }

    fn next(repeats: &mut EvaluationRepeats) -> Option<u64> {
        repeats.next().map(|(number, ..)| number)
    }

    #[test]
    fn evaluation_chunks_are_sent_in_order_unless_an_earlier_one_comes() {
        let mut repeats = EvaluationRepeats::default();
        for first_batch in [0, 10, 20] {
            assert_eq!(add(&mut repeats, 5, first_batch), first_batch == 0);
        }
        assert_eq!((next(&mut repeats), next(&mut repeats)), (Some(1), None));
        repeats.sent(1, None);
        assert_eq!((next(&mut repeats), next(&mut repeats)), (Some(2), None));
        // Two embedding workers may each lack a piece that a dense worker of the other one waits
        // for.
        add(&mut repeats, 5, 10);
        add(&mut repeats, 5, 0);
        assert_eq!([(); 3].map(|()| next(&mut repeats)), [Some(5), None, None]);
        repeats.sent(5, None);
        assert_eq!((next(&mut repeats), next(&mut repeats)), (Some(4), None));
        repeats.sent(4, None);
        repeats.sent(2, None);
        assert_eq!((next(&mut repeats), next(&mut repeats)), (Some(3), None));
        // A different loss does not wait for this one.
        let of_a_worker = v1::RepeatReply { embedding_worker: Some(1), ..v1::RepeatReply::default() };
        for first_batch in [40, 30] {
            repeats.add(5, first_batch, of_a_worker.clone());
        }
        assert_eq!((next(&mut repeats), next(&mut repeats)), (Some(7), None));
        // The next evaluation does not wait for this one.
        assert!(add(&mut repeats, 9, 30));
        assert_eq!(next(&mut repeats), Some(8));
    }
}

//! Reads the chunks of leases: by their numbers from files, and by their offsets from a stream.

use rectrain_data::{
    Batch, ChunkReader, DataError, Dataset, Order, PartId, Position, ReadPlan, Segment, SegmentRead, Span, SpanReader,
    Start,
};
use rectrain_proto::v1;
use rectrain_protocol::error::RoleError;

use crate::followed::FollowedReader;
use crate::lease::Lease;

/// A reader of one kind of chunks.
pub(crate) enum Reader {
    Files(Box<ChunkReader>),
    Stream(Box<SpanReader>),
    Followed(Box<FollowedReader>),
}

/// A chunk to read.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum ChunkPlace {
    /// Its number in the pass.
    Number(u64),
    /// Its records, and the most rows of them.
    Records { segment: Segment, rows: u64 },
    /// Rows of a followed file: of its good rows, the ones of a segment. There are at most `rows`.
    File { file: v1::FollowedFile, segment: Segment, rows: u64 },
}

/// The content of a chunk.
#[derive(Debug, Default)]
pub(crate) struct Content {
    /// `None` past the end of the data.
    pub(crate) rows: Option<Batch>,
    /// The number of bad rows that were skipped.
    pub(crate) skipped: u64,
    /// Set for a stream: where the chunk ends.
    pub(crate) read: Option<SegmentRead>,
    /// For a stream: the latest time of a record.
    pub(crate) event_millis: Option<i64>,
    /// The predictions of the frozen model.
    pub(crate) baseline: Option<v1::WindowPart>,
}

impl Reader {
    pub(crate) fn new(dataset: &Dataset, plan: ReadPlan) -> Result<Self, DataError> {
        match dataset.is_finite() {
            true => Ok(Self::Files(Box::new(dataset.reader(plan)?))),
            false => Ok(Self::Stream(Box::new(dataset.span_reader(0)))),
        }
    }

    /// Reads a chunk. Blocks.
    pub(crate) fn read(&mut self, place: ChunkPlace) -> Result<Content, RoleError> {
        match (self, place) {
            (Self::Files(reader), ChunkPlace::Number(chunk)) => {
                let rows = reader.read(chunk)?;
                Ok(Content { rows, skipped: reader.skipped(), ..Content::default() })
            }
            (Self::Stream(reader), ChunkPlace::Records { segment, rows }) => {
                let Some(found) = reader.read(span(segment, rows))? else { return Ok(Content::default()) };
                Ok(Content {
                    read: Some(SegmentRead { next: found.next.offset.0, more: found.more }),
                    skipped: found.skipped,
                    event_millis: found.event_millis,
                    rows: Some(found.batch).filter(|rows| rows.samples > 0),
                    baseline: None,
                })
            }
            (Self::Followed(reader), ChunkPlace::File { file, segment, rows }) => reader.read(&file, segment, rows),
            // The coordinator leases records of a stream, and chunks of files.
            _ => Err(DataError::Stopped.into()),
        }
    }
}

fn span(segment: Segment, rows: u64) -> Span {
    let from = Start::At(Position::new(segment.part.0, segment.from));
    Span { from, rows, until: Some(segment.until), order: Order::Stored }
}

impl ChunkPlace {
    pub(crate) fn of(lease: &Lease, global_batch_rows: u64) -> Self {
        match lease {
            Lease::Training(v1::ChunkLease { segment: Some(records), file, .. }) => {
                let v1::Segment { part, from, until } = *records;
                let segment = Segment { part: PartId(part), from, until };
                let rows = global_batch_rows;
                match file.clone() {
                    Some(file) => Self::File { file, segment, rows },
                    None => Self::Records { segment, rows },
                }
            }
            lease => Self::Number(lease.chunk()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_lease_of_records_is_read_by_their_offsets() {
        let segment = v1::Segment { part: 65_538, from: 7, until: 90 };
        let lease = Lease::Training(v1::ChunkLease { chunk: 5, segment: Some(segment), ..v1::ChunkLease::default() });
        let place = ChunkPlace::of(&lease, 32);
        let records = Segment { part: PartId::of_partition(1, 2), from: 7, until: 90 };
        assert_eq!(place, ChunkPlace::Records { segment: records, rows: 32 });
        let span = span(records, 32);
        assert_eq!((span.from, span.rows, span.until), (Start::At(Position::new(65_538, 7)), 32, Some(90)));
        let file = v1::FollowedFile { part: 3, ..v1::FollowedFile::default() };
        let of_a_file =
            v1::ChunkLease { segment: Some(segment), file: Some(file.clone()), ..v1::ChunkLease::default() };
        let place = ChunkPlace::of(&Lease::Training(of_a_file), 32);
        assert_eq!(place, ChunkPlace::File { file, segment: records, rows: 32 });
        let lease = Lease::Training(v1::ChunkLease { chunk: 5, ..v1::ChunkLease::default() });
        assert_eq!(ChunkPlace::of(&lease, 32), ChunkPlace::Number(5));
    }
}

//! Record batches (version 2 of Kafka's format).

use std::collections::{HashSet, VecDeque};

use bytes::Bytes;

use crate::codec::{Malformed, Reader, Writer};
use crate::compression::Compression;

/// Bytes of a batch before the bytes that its length counts: the first offset and the length.
const BEFORE_LENGTH: usize = 12;
/// Bytes from the length to the attributes, where the checksum begins: the leader's epoch, the
/// version and the checksum.
const BEFORE_ATTRIBUTES: usize = 9;
const TRANSACTIONAL: i16 = 1 << 4;
const CONTROL: i16 = 1 << 5;
/// The type of the marker of an aborted transaction.
const ABORT: i16 = 0;

/// A record of a partition.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Record {
    /// Its place in the partition.
    pub offset: i64,
    /// In milliseconds since 1970 (UTC): the time of the event, or of the broker's write.
    pub timestamp: i64,
    /// The key; `None` if it is null.
    pub key: Option<Bytes>,
    /// The value; `None` for a tombstone.
    pub value: Option<Bytes>,
}

/// A record to be written.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct NewRecord {
    /// In milliseconds since 1970 (UTC).
    pub timestamp: i64,
    /// The key; `None` for null.
    pub key: Option<Bytes>,
    /// The value; `None` for a tombstone.
    pub value: Option<Bytes>,
    /// Names and values that go with the record.
    pub headers: Vec<(String, Bytes)>,
}

/// A transaction that was aborted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Aborted {
    pub(crate) producer: i64,
    /// The offset of its first record.
    pub(crate) first: i64,
}

/// The content of a fetch.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Decoded {
    /// Ascending by offset.
    pub(crate) records: Vec<Record>,
    /// The offset behind the last whole batch; `None` if there is none.
    pub(crate) next: Option<i64>,
}

/// Decodes the batches of a fetch from offset `from` on. Leaves out the records before `from`, the
/// records of aborted transactions and the markers of transactions. The last batch may be cut off.
pub(crate) fn decode(bytes: Bytes, from: i64, mut aborted: Vec<Aborted>) -> Result<Decoded, Malformed> {
    aborted.sort_by_key(|transaction| transaction.first);
    let mut open = Transactions { coming: aborted.into(), aborted: HashSet::new() };
    let mut reader = Reader::new(bytes);
    let mut decoded = Decoded::default();
    while let Some(batch) = Batch::read(&mut reader)? {
        let is_wanted = open.keeps(&batch)?;
        decoded.next = Some(batch.last + 1);
        if is_wanted && batch.last >= from {
            batch.records(from, &mut decoded.records)?;
        }
    }
    Ok(decoded)
}

/// The transactions that are aborted, from the present batch on.
struct Transactions {
    coming: VecDeque<Aborted>,
    aborted: HashSet<i64>,
}

impl Transactions {
    /// Whether the batch has records to read.
    fn keeps(&mut self, batch: &Batch) -> Result<bool, Malformed> {
        while self.coming.front().is_some_and(|next| next.first <= batch.last) {
            self.aborted.extend(self.coming.pop_front().map(|begun| begun.producer));
        }
        if batch.attributes & CONTROL != 0 {
            if batch.is_abort()? {
                self.aborted.remove(&batch.producer);
            }
            return Ok(false);
        }
        Ok(batch.attributes & TRANSACTIONAL == 0 || !self.aborted.contains(&batch.producer))
    }
}

struct Batch {
    first: i64,
    last: i64,
    attributes: i16,
    first_timestamp: i64,
    max_timestamp: i64,
    producer: i64,
    count: i32,
    /// The records, as the batch has them.
    body: Bytes,
}

impl Batch {
    /// The next batch. `None` at the end, or before a batch that is cut off.
    fn read(reader: &mut Reader) -> Result<Option<Self>, Malformed> {
        if reader.left() < BEFORE_LENGTH {
            return Ok(None);
        }
        let mut ahead = reader.clone();
        let first = ahead.i64()?;
        let length = usize::try_from(ahead.i32()?).map_err(|_| Malformed("a batch has a negative length"))?;
        if ahead.left() < length {
            return Ok(None);
        }
        let mut batch = Reader::new(ahead.take(length)?);
        *reader = ahead;
        Self::parse(first, &mut batch).map(Some)
    }

    fn parse(first: i64, batch: &mut Reader) -> Result<Self, Malformed> {
        let mut head = Reader::new(batch.take(BEFORE_ATTRIBUTES)?);
        head.i32()?;
        if head.i8()? != 2 {
            return Err(Malformed("a batch has a format of Kafka before 0.11"));
        }
        if head.u32()? != crc32c::crc32c(&batch.clone().rest()) {
            return Err(Malformed("a batch has a wrong checksum"));
        }
        let attributes = batch.i16()?;
        let last = first + i64::from(batch.i32()?);
        let (first_timestamp, max_timestamp) = (batch.i64()?, batch.i64()?);
        let producer = batch.i64()?;
        batch.i16()?;
        batch.i32()?;
        let count = batch.i32()?;
        let body = batch.clone().rest();
        Ok(Self { first, last, attributes, first_timestamp, max_timestamp, producer, count, body })
    }

    /// Whether this batch of control records aborts a transaction.
    fn is_abort(&self) -> Result<bool, Malformed> {
        let mut records = Vec::new();
        self.records(i64::MIN, &mut records)?;
        let Some(key) = records.into_iter().next().and_then(|marker| marker.key) else { return Ok(false) };
        let mut key = Reader::new(key);
        key.i16()?;
        Ok(key.i16()? == ABORT)
    }

    /// Appends the records from offset `from` on.
    fn records(&self, from: i64, into: &mut Vec<Record>) -> Result<(), Malformed> {
        let body = Compression::of_attributes(self.attributes)?.decompress(self.body.clone())?;
        let mut reader = Reader::new(body);
        for _ in 0..self.count {
            let record = self.record(&mut reader)?;
            if record.offset >= from {
                into.push(record);
            }
        }
        Ok(())
    }

    fn record(&self, batch: &mut Reader) -> Result<Record, Malformed> {
        let length = usize::try_from(batch.varlong()?).map_err(|_| Malformed("a record has a negative length"))?;
        let mut record = Reader::new(batch.take(length)?);
        record.i8()?;
        let timestamp = self.first_timestamp.saturating_add(record.varlong()?);
        let offset = self.first + record.varlong()?;
        let (key, value) = (record.record_bytes()?, record.record_bytes()?);
        let written_by_broker = self.attributes & (1 << 3) != 0;
        let timestamp = if written_by_broker { self.max_timestamp } else { timestamp };
        Ok(Record { offset, timestamp, key, value })
    }
}

/// A batch of new records, not compressed. At least one.
pub(crate) fn encode(records: &[NewRecord]) -> Bytes {
    let first_timestamp = records.first().map_or(0, |record| record.timestamp);
    let max_timestamp = records.iter().map(|record| record.timestamp).max().unwrap_or(0);
    let mut body = Writer::default();
    body.i16(0).i32(records.len() as i32 - 1).i64(first_timestamp).i64(max_timestamp);
    body.i64(-1).i16(-1).i32(-1).i32(records.len() as i32);
    for (place, record) in records.iter().enumerate() {
        let record = encode_record(record, place as i64, first_timestamp);
        body.varlong(record.len() as i64).raw(&record);
    }
    let body = body.into_bytes();
    let mut batch = Writer::default();
    batch.i64(0).i32((BEFORE_ATTRIBUTES + body.len()) as i32);
    batch.i32(-1).i8(2).u32(crc32c::crc32c(&body)).raw(&body);
    batch.into_bytes()
}

fn encode_record(record: &NewRecord, place: i64, first_timestamp: i64) -> Bytes {
    let mut into = Writer::default();
    into.i8(0).varlong(record.timestamp - first_timestamp).varlong(place);
    into.record_bytes(record.key.as_deref()).record_bytes(record.value.as_deref());
    into.varlong(record.headers.len() as i64);
    for (name, value) in &record.headers {
        into.record_bytes(Some(name.as_bytes())).record_bytes(Some(value));
    }
    into.into_bytes()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn new(timestamp: i64, value: &str) -> NewRecord {
        let headers = vec![("reason".to_owned(), Bytes::from_static(b"none"))];
        NewRecord { timestamp, key: None, value: Some(Bytes::from(value.to_owned())), headers }
    }

    /// A batch that begins at offset `first`, changed by `change` and with its checksum corrected.
    fn batch(first: i64, records: &[NewRecord], attributes: i16, producer: i64) -> Vec<u8> {
        let mut bytes = encode(records).to_vec();
        bytes[..8].copy_from_slice(&first.to_be_bytes());
        bytes[21..23].copy_from_slice(&attributes.to_be_bytes());
        bytes[43..51].copy_from_slice(&producer.to_be_bytes());
        let checksum = crc32c::crc32c(&bytes[21..]);
        bytes[17..21].copy_from_slice(&checksum.to_be_bytes());
        bytes
    }

    fn marker(first: i64, kind: i16, producer: i64) -> Vec<u8> {
        let key = [0, kind].map(i16::to_be_bytes).concat();
        let record = NewRecord { key: Some(key.into()), ..NewRecord::default() };
        batch(first, &[record], CONTROL | TRANSACTIONAL, producer)
    }

    fn offsets(decoded: &Decoded) -> Vec<i64> {
        decoded.records.iter().map(|record| record.offset).collect()
    }

    #[test]
    fn records_survive_the_round_trip() {
        let records = [new(1_000, "a"), new(990, "bb"), NewRecord { timestamp: 5, ..NewRecord::default() }];
        let decoded = decode(encode(&records), 0, vec![]).unwrap();
        let found: Vec<_> =
            decoded.records.iter().map(|record| (record.offset, record.timestamp, record.value.as_deref())).collect();
        assert_eq!(found, [(0, 1_000, Some(&b"a"[..])), (1, 990, Some(b"bb")), (2, 5, None)]);
        assert_eq!(decoded.next, Some(3));
    }

    #[test]
    fn a_fetch_begins_within_a_batch_and_ends_within_another() {
        let two = [new(0, "x"), new(0, "y")];
        let mut bytes = [batch(10, &two, 0, -1), batch(12, &two, 0, -1)].concat();
        let last = batch(14, &two, 0, -1);
        bytes.extend_from_slice(&last[..last.len() - 1]);
        let decoded = decode(bytes.into(), 11, vec![]).unwrap();
        assert_eq!((offsets(&decoded), decoded.next), (vec![11, 12, 13], Some(14)));
        assert_eq!(decode(Bytes::from_static(&[0; 7]), 0, vec![]), Ok(Decoded::default()));
    }

    /// Compaction removes records, and keeps the offsets of the others.
    #[test]
    fn offsets_that_compaction_has_removed_are_passed_over() {
        let two = [new(0, "x"), new(0, "y")];
        let bytes = [batch(10, &two, 0, -1), batch(50, &two, 0, -1)].concat();
        for (from, expected) in [(7, vec![10, 11, 50, 51]), (12, vec![50, 51]), (51, vec![51])] {
            let decoded = decode(bytes.clone().into(), from, vec![]).unwrap();
            assert_eq!((offsets(&decoded), decoded.next), (expected, Some(52)), "from {from}");
        }
    }

    #[test]
    fn aborted_records_and_markers_are_left_out() {
        let one = [new(0, "x")];
        let bytes = [
            batch(0, &one, TRANSACTIONAL, 7),
            batch(1, &one, TRANSACTIONAL, 8),
            batch(2, &one, 0, -1),
            marker(3, 0, 7),
            batch(4, &one, TRANSACTIONAL, 7),
            marker(5, 1, 8),
            marker(6, 1, 7),
        ]
        .concat();
        let decoded = decode(bytes.clone().into(), 0, vec![Aborted { producer: 7, first: 0 }]).unwrap();
        assert_eq!((offsets(&decoded), decoded.next), (vec![1, 2, 4], Some(7)));
        let decoded = decode(bytes.into(), 5, vec![]).unwrap();
        assert_eq!((offsets(&decoded), decoded.next), (vec![], Some(7)), "reading goes on behind the markers");
    }

    #[test]
    fn the_broker_s_time_counts_if_it_wrote_one() {
        let decoded = decode(batch(0, &[new(1, "a"), new(9, "b")], 1 << 3, -1).into(), 0, vec![]).unwrap();
        assert!(decoded.records.iter().all(|record| record.timestamp == 9));
    }

    #[test]
    fn damage_is_noticed() {
        let good = batch(0, &[new(0, "value")], 0, -1);
        for at in 21..good.len() {
            let mut bad = good.clone();
            bad[at] ^= 1;
            assert!(decode(bad.into(), 0, vec![]).is_err(), "byte {at}");
        }
        let mut old = good;
        old[16] = 1;
        assert!(decode(old.into(), 0, vec![]).is_err());
    }
}

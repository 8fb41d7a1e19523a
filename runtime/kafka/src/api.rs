//! The requests that the client sends, in one version each, and their answers. The brokers from
//! Kafka 3.1 to 4 know these versions.

use bytes::Bytes;

use crate::codec::{Malformed, Reader, Writer};
use crate::error::ErrorCode;
use crate::records::Aborted;

/// A request with its version.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Api {
    pub(crate) key: i16,
    pub(crate) version: i16,
    /// Whether its headers have tagged fields.
    pub(crate) is_flexible: bool,
    /// The name in errors.
    pub(crate) name: &'static str,
}

pub(crate) const fn api(key: i16, version: i16, name: &'static str) -> Api {
    Api { key, version, is_flexible: false, name }
}

pub(crate) const PRODUCE: Api = api(0, 7, "produce");
pub(crate) const FETCH: Api = api(1, 10, "fetch");
pub(crate) const LIST_OFFSETS: Api = api(2, 2, "list offsets");
pub(crate) const METADATA: Api = Api { is_flexible: true, ..api(3, 12, "metadata") };
pub(crate) const SASL_HANDSHAKE: Api = api(17, 1, "SASL handshake");
pub(crate) const CREATE_TOPICS: Api = api(19, 2, "create topics");
pub(crate) const SASL_AUTHENTICATE: Api = api(36, 1, "SASL authenticate");

/// Reads only committed records.
const READ_COMMITTED: i8 = 1;
/// The replica ID of a consumer.
const CONSUMER: i32 = -1;

/// The ID of a topic. A topic that is deleted and made again under its name has another one.
pub type TopicId = [u8; 16];

/// A topic as the brokers know it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TopicMetadata {
    /// Its name.
    pub name: String,
    /// Its ID.
    pub id: TopicId,
    /// [`ErrorCode::NONE`], or why the topic cannot be used.
    pub error: ErrorCode,
    /// Its partitions, ascending.
    pub partitions: Vec<PartitionMetadata>,
}

/// A partition as the brokers know it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PartitionMetadata {
    /// Its number.
    pub number: i32,
    /// The broker that leads it; negative: none now.
    pub leader: i32,
}

/// The brokers, and some topics.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Metadata {
    /// ID and address of each.
    pub(crate) brokers: Vec<(i32, String)>,
    pub(crate) topics: Vec<TopicMetadata>,
}

/// An offset to look up.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum OffsetAt {
    /// The first record that the broker still has.
    Earliest,
    /// Behind the last record that may be read.
    Latest,
    /// The first record with at least this timestamp, in milliseconds since 1970 (UTC).
    Timestamp(i64),
}

impl OffsetAt {
    fn code(self) -> i64 {
        match self {
            Self::Earliest => -2,
            Self::Latest => -1,
            Self::Timestamp(milliseconds) => milliseconds.max(0),
        }
    }
}

/// A partition in an answer, with an error or its content.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct OfPartition<T> {
    pub(crate) topic: String,
    pub(crate) partition: i32,
    pub(crate) error: ErrorCode,
    pub(crate) content: T,
}

/// The content of a partition in the answer to a fetch.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct FetchContent {
    /// The end of the records that may be read.
    pub(crate) stable_end: i64,
    /// The first record that the broker still has.
    pub(crate) begin: i64,
    pub(crate) aborted: Vec<Aborted>,
    pub(crate) records: Bytes,
}

/// A partition in a fetch.
#[derive(Debug, Clone, Copy)]
pub(crate) struct FetchPartition<'a> {
    pub(crate) topic: &'a str,
    pub(crate) partition: i32,
    pub(crate) offset: i64,
}

fn named(reader: &mut Reader) -> Result<String, Malformed> {
    Ok(reader.string()?.unwrap_or_default())
}

pub(crate) fn metadata_request(topics: &[String]) -> Bytes {
    let mut body = Writer::default();
    body.compact_array(topics, |body, topic| {
        body.raw(&TopicId::default()).compact_string(topic).no_tags();
    });
    // It neither makes topics nor asks which operations are allowed.
    body.bool(false).bool(false).no_tags();
    body.into_bytes()
}

pub(crate) fn metadata_answer(reader: &mut Reader) -> Result<Metadata, Malformed> {
    reader.i32()?;
    let brokers = reader.compact_array(|reader| {
        let (id, host, port) = (reader.i32()?, reader.compact_string()?.unwrap_or_default(), reader.i32()?);
        reader.compact_string()?;
        reader.skip_tags()?;
        let host = if host.contains(':') { format!("[{host}]") } else { host };
        Ok((id, format!("{host}:{port}")))
    })?;
    reader.compact_string()?;
    reader.i32()?;
    let topics = reader.compact_array(|reader| {
        let error = ErrorCode(reader.i16()?);
        let (name, id) = (reader.compact_string()?.unwrap_or_default(), reader.uuid()?);
        reader.i8()?;
        let mut partitions = reader.compact_array(partition_metadata)?;
        partitions.sort_by_key(|partition| partition.number);
        reader.i32()?;
        reader.skip_tags()?;
        Ok(TopicMetadata { name, id, error, partitions })
    })?;
    Ok(Metadata { brokers, topics })
}

fn partition_metadata(reader: &mut Reader) -> Result<PartitionMetadata, Malformed> {
    reader.i16()?;
    let (number, leader) = (reader.i32()?, reader.i32()?);
    reader.i32()?;
    for _replicas in 0..3 {
        reader.compact_array(Reader::i32)?;
    }
    reader.skip_tags()?;
    Ok(PartitionMetadata { number, leader })
}

pub(crate) fn list_offsets_request(topic: &str, partitions: &[i32], at: OffsetAt) -> Bytes {
    let mut body = Writer::default();
    body.i32(CONSUMER).i8(READ_COMMITTED);
    body.array(&[topic], |body, topic| {
        body.string(topic).array(partitions, |body, partition| {
            body.i32(*partition).i64(at.code());
        });
    });
    body.into_bytes()
}

/// The offset of each partition; -1: there is no such record.
pub(crate) fn list_offsets_answer(reader: &mut Reader) -> Result<Vec<OfPartition<i64>>, Malformed> {
    reader.i32()?;
    by_topic(reader, |reader| {
        let (partition, error) = (reader.i32()?, ErrorCode(reader.i16()?));
        reader.i64()?;
        Ok((partition, error, reader.i64()?))
    })
}

pub(crate) fn fetch_request(partitions: &[FetchPartition<'_>], wait_millis: i32, bytes: i32) -> Bytes {
    let mut body = Writer::default();
    body.i32(CONSUMER).i32(wait_millis).i32(1).i32(bytes).i8(READ_COMMITTED);
    // Without a session: every fetch names all its partitions.
    body.i32(0).i32(-1);
    body.array(partitions, |body, partition| {
        body.string(partition.topic).array(&[partition], |body, partition| {
            body.i32(partition.partition).i32(-1).i64(partition.offset).i64(-1).i32(bytes);
        });
    });
    body.i32(0);
    body.into_bytes()
}

/// The error of the whole fetch, and its partitions.
pub(crate) fn fetch_answer(reader: &mut Reader) -> Result<(ErrorCode, Vec<OfPartition<FetchContent>>), Malformed> {
    reader.i32()?;
    let error = ErrorCode(reader.i16()?);
    reader.i32()?;
    let partitions = by_topic(reader, |reader| {
        let (partition, error) = (reader.i32()?, ErrorCode(reader.i16()?));
        reader.i64()?;
        let (stable_end, begin) = (reader.i64()?, reader.i64()?);
        let aborted = reader.array(|reader| Ok(Aborted { producer: reader.i64()?, first: reader.i64()? }))?;
        let records = reader.bytes()?.unwrap_or_default();
        Ok((partition, error, FetchContent { stable_end, begin, aborted, records }))
    })?;
    Ok((error, partitions))
}

pub(crate) fn produce_request(topic: &str, partition: i32, records: &Bytes, timeout_millis: i32) -> Bytes {
    let mut body = Writer::default();
    // All replicas in sync must have written the records.
    body.null_string().i16(-1).i32(timeout_millis);
    body.array(&[topic], |body, topic| {
        body.string(topic).array(&[partition], |body, partition| {
            body.i32(*partition).bytes(records);
        });
    });
    body.into_bytes()
}

/// The offset of the first record of each partition.
pub(crate) fn produce_answer(reader: &mut Reader) -> Result<Vec<OfPartition<i64>>, Malformed> {
    by_topic(reader, |reader| {
        let (partition, error, offset) = (reader.i32()?, ErrorCode(reader.i16()?), reader.i64()?);
        reader.i64()?;
        reader.i64()?;
        Ok((partition, error, offset))
    })
}

pub(crate) fn create_topic_request(topic: &str, partitions: i32, timeout_millis: i32) -> Bytes {
    let mut body = Writer::default();
    body.array(&[topic], |body, topic| {
        // With the brokers' number of replicas.
        body.string(topic).i32(partitions).i16(1).i32(0).i32(0);
    });
    body.i32(timeout_millis).bool(false);
    body.into_bytes()
}

pub(crate) fn create_topic_answer(reader: &mut Reader) -> Result<Vec<(ErrorCode, Option<String>)>, Malformed> {
    reader.i32()?;
    reader.array(|reader| {
        reader.string()?;
        Ok((ErrorCode(reader.i16()?), reader.string()?))
    })
}

pub(crate) fn handshake_request(mechanism: &str) -> Bytes {
    let mut body = Writer::default();
    body.string(mechanism);
    body.into_bytes()
}

/// The error, and the mechanisms that the broker knows.
pub(crate) fn handshake_answer(reader: &mut Reader) -> Result<(ErrorCode, Vec<String>), Malformed> {
    Ok((ErrorCode(reader.i16()?), reader.array(named)?))
}

pub(crate) fn authenticate_request(token: &[u8]) -> Bytes {
    let mut body = Writer::default();
    body.bytes(token);
    body.into_bytes()
}

/// The error with its message, and the broker's token.
pub(crate) fn authenticate_answer(reader: &mut Reader) -> Result<(ErrorCode, Option<String>, Bytes), Malformed> {
    let (error, message) = (ErrorCode(reader.i16()?), reader.string()?);
    Ok((error, message, reader.bytes()?.unwrap_or_default()))
}

/// Reads partitions that are grouped by topic.
pub(crate) fn by_topic<T>(
    reader: &mut Reader,
    mut read: impl FnMut(&mut Reader) -> Result<(i32, ErrorCode, T), Malformed>,
) -> Result<Vec<OfPartition<T>>, Malformed> {
    let topics = reader.array(|reader| {
        let topic = named(reader)?;
        reader.array(|reader| {
            let (partition, error, content) = read(reader)?;
            Ok(OfPartition { topic: topic.clone(), partition, error, content })
        })
    })?;
    Ok(topics.into_iter().flatten().collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Written by hand after the protocol's guide, and not with the code under test.
    #[test]
    fn an_answer_to_a_metadata_request_is_read() {
        let mut bytes = vec![0, 0, 0, 0, 2, 0, 0, 0, 1, 2, b'h', 0, 0, 0x23, 0x84, 0, 0, 2, b'c', 0, 0, 0, 1];
        bytes.extend_from_slice(&[2, 0, 0, 2, b't']);
        bytes.extend_from_slice(&[9; 16]);
        bytes.extend_from_slice(&[0, 2, 0, 0, 0, 0, 0, 3, 0, 0, 0, 1, 0, 0, 0, 5]);
        bytes.extend_from_slice(&[2, 0, 0, 0, 1, 2, 0, 0, 0, 1, 1, 0]);
        bytes.extend_from_slice(&[0x80, 0, 0, 0, 0, 0]);
        let metadata = metadata_answer(&mut Reader::new(bytes.into())).unwrap();
        assert_eq!(metadata.brokers, [(1, "h:9092".to_owned())]);
        let partitions = vec![PartitionMetadata { number: 3, leader: 1 }];
        let topic = TopicMetadata { name: "t".to_owned(), id: [9; 16], error: ErrorCode::NONE, partitions };
        assert_eq!(metadata.topics, [topic]);
    }

    #[test]
    fn a_fetch_names_each_partition_with_its_offset() {
        let wanted = FetchPartition { topic: "t", partition: 2, offset: 7 };
        let bytes = fetch_request(&[wanted], 500, 1 << 20);
        let expected = [
            &[255, 255, 255, 255, 0, 0, 1, 0xf4, 0, 0, 0, 1, 0, 16, 0, 0, 1, 0, 0, 0, 0, 255, 255, 255, 255][..],
            &[0, 0, 0, 1, 0, 1, b't', 0, 0, 0, 1, 0, 0, 0, 2, 255, 255, 255, 255, 0, 0, 0, 0, 0, 0, 0, 7],
            &[255, 255, 255, 255, 255, 255, 255, 255, 0, 16, 0, 0, 0, 0, 0, 0],
        ]
        .concat();
        assert_eq!(&bytes[..], &expected[..]);
    }

    #[test]
    fn an_answer_to_a_fetch_is_read() {
        let bytes = [
            &[0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 0, 1, b't', 0, 0, 0, 1, 0, 0, 0, 2, 0, 1][..],
            &[0, 0, 0, 0, 0, 0, 0, 9, 0, 0, 0, 0, 0, 0, 0, 8, 0, 0, 0, 0, 0, 0, 0, 3],
            &[0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 7, 0, 0, 0, 0, 0, 0, 0, 4, 255, 255, 255, 255],
        ]
        .concat();
        let (error, partitions) = fetch_answer(&mut Reader::new(bytes.into())).unwrap();
        let aborted = vec![Aborted { producer: 7, first: 4 }];
        let content = FetchContent { stable_end: 8, begin: 3, aborted, records: Bytes::new() };
        let expected =
            OfPartition { topic: "t".to_owned(), partition: 2, error: ErrorCode::OFFSET_OUT_OF_RANGE, content };
        assert_eq!((error, partitions), (ErrorCode::NONE, vec![expected]));
    }
}

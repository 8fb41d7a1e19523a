//! The offsets that a consumer group has committed, which the tools of Kafka show as its lag. The
//! client is no member of the group: it only reads and writes these offsets.

use std::collections::BTreeMap;
use std::time::Duration;

use bytes::Bytes;

use crate::api::{Api, OfPartition, api, by_topic};
use crate::client::{Client, Use};
use crate::codec::{Malformed, Reader, Writer};
use crate::error::{ErrorCode, KafkaError};

const OFFSET_COMMIT: Api = api(8, 5, "offset commit");
const OFFSET_FETCH: Api = api(9, 3, "offset fetch");
const FIND_COORDINATOR: Api = api(10, 1, "find coordinator");

/// The kind of key in a search for a coordinator.
const GROUP: i8 = 0;
/// The generation of a client that is no member of the group.
const NO_GENERATION: i32 = -1;

/// Where a group goes on in a partition.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GroupOffset {
    /// The topic.
    pub topic: String,
    /// The partition.
    pub partition: i32,
    /// The offset of the first record that the group has not used.
    pub offset: i64,
}

impl Client {
    /// The offsets that a group has committed for these partitions, in their order. `None`: there
    /// is none.
    ///
    /// # Errors
    /// The group's broker does not answer, or answers with an error.
    pub async fn committed(
        &self,
        group: &str,
        topic: &str,
        partitions: &[i32],
    ) -> Result<Vec<Option<i64>>, KafkaError> {
        let (broker, body) = (self.group_broker(group).await?, fetch_request(group, topic, partitions));
        let answer = self.call(&broker, Use::Others, OFFSET_FETCH, &body, Duration::ZERO, fetch_answer);
        let (code, found) = answer.await?;
        check(group, code)?;
        found.iter().try_for_each(|of| check(group, of.error))?;
        let offset = |partition: &i32| {
            let of = found.iter().find(|of| of.partition == *partition);
            of.map(|of| of.content).filter(|offset| *offset >= 0)
        };
        Ok(partitions.iter().map(offset).collect())
    }

    /// Commits offsets of a group. A group that consumers are members of refuses them.
    ///
    /// # Errors
    /// The group's broker does not answer, or answers with an error.
    pub async fn commit(&self, group: &str, offsets: &[GroupOffset]) -> Result<(), KafkaError> {
        let (broker, body) = (self.group_broker(group).await?, commit_request(group, offsets));
        let answer = self.call(&broker, Use::Others, OFFSET_COMMIT, &body, Duration::ZERO, commit_answer);
        answer.await?.iter().try_for_each(|of| check(group, of.error))
    }

    /// The broker that keeps the offsets of a group.
    async fn group_broker(&self, group: &str) -> Result<String, KafkaError> {
        let (any, body) = (self.any_broker().await?, find_request(group));
        let answer = self.call(&any, Use::Others, FIND_COORDINATOR, &body, Duration::ZERO, find_answer);
        let (code, broker) = answer.await?;
        check(group, code)?;
        Ok(broker)
    }
}

fn check(group: &str, code: ErrorCode) -> Result<(), KafkaError> {
    match code {
        ErrorCode::NONE => Ok(()),
        code => Err(KafkaError::Broker { subject: format!("consumer group {group}"), code }),
    }
}

fn find_request(group: &str) -> Bytes {
    let mut body = Writer::default();
    body.string(group).i8(GROUP);
    body.into_bytes()
}

/// The error, and the address of the broker.
fn find_answer(reader: &mut Reader) -> Result<(ErrorCode, String), Malformed> {
    reader.i32()?;
    let code = ErrorCode(reader.i16()?);
    reader.string()?;
    reader.i32()?;
    let (host, port) = (reader.string()?.unwrap_or_default(), reader.i32()?);
    let host = if host.contains(':') { format!("[{host}]") } else { host };
    Ok((code, format!("{host}:{port}")))
}

fn fetch_request(group: &str, topic: &str, partitions: &[i32]) -> Bytes {
    let mut body = Writer::default();
    body.string(group).array(&[topic], |body, topic| {
        body.string(topic).array(partitions, |body, partition| {
            body.i32(*partition);
        });
    });
    body.into_bytes()
}

/// The error of the group, and the offset of each partition; -1: none is committed.
fn fetch_answer(reader: &mut Reader) -> Result<(ErrorCode, Vec<OfPartition<i64>>), Malformed> {
    reader.i32()?;
    let partitions = by_topic(reader, |reader| {
        let (partition, offset) = (reader.i32()?, reader.i64()?);
        reader.string()?;
        Ok((partition, ErrorCode(reader.i16()?), offset))
    })?;
    Ok((ErrorCode(reader.i16()?), partitions))
}

fn commit_request(group: &str, offsets: &[GroupOffset]) -> Bytes {
    let mut topics: BTreeMap<&str, Vec<&GroupOffset>> = BTreeMap::new();
    for offset in offsets {
        topics.entry(&offset.topic).or_default().push(offset);
    }
    let topics: Vec<_> = topics.into_iter().collect();
    let mut body = Writer::default();
    body.string(group).i32(NO_GENERATION).string("");
    body.array(&topics, |body, (topic, offsets)| {
        body.string(topic).array(offsets, |body, of| {
            body.i32(of.partition).i64(of.offset).null_string();
        });
    });
    body.into_bytes()
}

fn commit_answer(reader: &mut Reader) -> Result<Vec<OfPartition<()>>, Malformed> {
    reader.i32()?;
    by_topic(reader, |reader| Ok((reader.i32()?, ErrorCode(reader.i16()?), ())))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Written by hand after the protocol's guide, and not with the code under test.
    #[test]
    fn a_commit_names_each_partition_with_its_offset() {
        let of = |topic: &str, partition, offset| GroupOffset { topic: topic.to_owned(), partition, offset };
        let bytes = commit_request("g", &[of("t", 1, 7), of("s", 0, 2), of("t", 2, 9)]);
        let expected = [
            &[0, 1, b'g', 255, 255, 255, 255, 0, 0, 0, 0, 0, 2][..],
            &[0, 1, b's', 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 2, 255, 255],
            &[0, 1, b't', 0, 0, 0, 2, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 7, 255, 255],
            &[0, 0, 0, 2, 0, 0, 0, 0, 0, 0, 0, 9, 255, 255],
        ]
        .concat();
        assert_eq!(&bytes[..], &expected[..]);
    }

    #[test]
    fn answers_about_a_group_are_read() {
        let found = [0, 0, 0, 0, 0, 0, 255, 255, 0, 0, 0, 1, 0, 1, b'h', 0, 0, 0x23, 0x84].to_vec();
        let found = find_answer(&mut Reader::new(found.into())).unwrap();
        assert_eq!(found, (ErrorCode::NONE, "h:9092".to_owned()));
        let fetched = [
            &[0, 0, 0, 0, 0, 0, 0, 1, 0, 1, b't', 0, 0, 0, 1, 0, 0, 0, 2][..],
            &[0, 0, 0, 0, 0, 0, 0, 9, 0, 1, b'm', 0, 0, 0, 16],
        ]
        .concat();
        let (code, partitions) = fetch_answer(&mut Reader::new(fetched.into())).unwrap();
        let of = |error, content| OfPartition { topic: "t".to_owned(), partition: 2, error, content };
        assert_eq!((code, partitions), (ErrorCode(16), vec![of(ErrorCode::NONE, 9)]));
        let committed = [0, 0, 0, 0, 0, 0, 0, 1, 0, 1, b't', 0, 0, 0, 1, 0, 0, 0, 2, 0, 25].to_vec();
        let committed = commit_answer(&mut Reader::new(committed.into())).unwrap();
        let of = OfPartition { topic: "t".to_owned(), partition: 2, error: ErrorCode(25), content: () };
        assert_eq!(committed, [of]);
    }
}

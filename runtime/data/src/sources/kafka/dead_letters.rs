//! Bad records that were skipped, on their way to the dead-letter topic.

use std::time::Duration;

use bytes::Bytes;
use rectrain_kafka::{Client, KafkaError, NewRecord, Record};
use rectrain_kinds::PartId;

/// Records in one write.
const MOST_RECORDS: usize = 500;
/// Bytes of values in one write, about.
const MOST_BYTES: usize = 512 << 10;
/// Attempts to write before reading fails.
const ATTEMPTS: u32 = 8;

/// A bad record with its place and the reason, as the dead-letter topic gets it.
pub(super) fn letter(topic: &str, part: PartId, record: &Record, reason: &str) -> NewRecord {
    let (_, partition) = part.topic_and_partition();
    let header = |name: &str, value: String| (name.to_owned(), Bytes::from(value));
    NewRecord {
        timestamp: record.timestamp,
        key: record.key.clone(),
        value: record.value.clone(),
        headers: vec![
            header("topic", topic.to_owned()),
            header("partition", partition.to_string()),
            header("offset", record.offset.to_string()),
            header("reason", reason.to_owned()),
        ],
    }
}

/// Cuts letters into writes.
pub(super) fn writes(letters: Vec<NewRecord>) -> Vec<Vec<NewRecord>> {
    let (mut writes, mut bytes): (Vec<Vec<NewRecord>>, usize) = (Vec::new(), 0);
    for letter in letters {
        let size = letter.value.as_ref().map_or(0, Bytes::len);
        match writes.last_mut() {
            Some(write) if write.len() < MOST_RECORDS && bytes + size <= MOST_BYTES => {
                bytes += size;
                write.push(letter);
            }
            _ => {
                bytes = size;
                writes.push(vec![letter]);
            }
        }
    }
    writes
}

/// Writes to the first partition. Tries again while the broker is not there.
pub(super) async fn write(client: &Client, topic: &str, letters: &[NewRecord]) -> Result<(), KafkaError> {
    let mut pause = Duration::from_millis(100);
    for _ in 1..ATTEMPTS {
        match client.produce(topic, 0, letters).await {
            Err(error) if error.is_transient() => tracing::warn!(%error, "bad records are written again"),
            written => return written.map(drop),
        }
        tokio::time::sleep(pause).await;
        pause *= 2;
    }
    client.produce(topic, 0, letters).await.map(drop)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_letter_says_where_its_record_was_and_why_it_is_bad() {
        let value = Some(Bytes::from_static(b"no JSON"));
        let record = Record { offset: 17, timestamp: 5, key: Some(Bytes::from_static(b"k")), value: value.clone() };
        let letter = letter("clicks", PartId::of_partition(1, 3), &record, "a JSON object is expected");
        let headers: Vec<_> = letter.headers.iter().map(|(name, value)| (name.as_str(), &value[..])).collect();
        let expected: [(&str, &[u8]); 4] =
            [("topic", b"clicks"), ("partition", b"3"), ("offset", b"17"), ("reason", b"a JSON object is expected")];
        assert_eq!((headers.as_slice(), letter.timestamp, letter.value), (&expected[..], 5, value));
    }

    #[test]
    fn writes_are_bounded_and_keep_the_order() {
        let letter = |size: usize| NewRecord { value: Some(vec![7; size].into()), ..NewRecord::default() };
        let sizes = [MOST_BYTES * 2, MOST_BYTES / 2, MOST_BYTES / 2, 1];
        let cut: Vec<usize> = writes(sizes.map(letter).into()).iter().map(Vec::len).collect();
        assert_eq!(cut, [1, 2, 1]);
        let many = writes(vec![letter(0); MOST_RECORDS + 1]);
        assert_eq!(many.iter().map(Vec::len).collect::<Vec<_>>(), [MOST_RECORDS, 1]);
        assert!(writes(Vec::new()).is_empty());
    }
}

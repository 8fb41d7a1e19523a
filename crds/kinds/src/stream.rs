//! Streams: the topics, the format of their records, and where reading begins and ends.

use serde::{Deserialize, Serialize};

use crate::{CsvFormat, PartId};

/// Topics of a Kafka cluster.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct KafkaConfig {
    /// Addresses `HOST:PORT` of brokers. One that answers is enough.
    pub bootstrap_servers: Vec<String>,
    /// The topics, at most [`PartId::MOST_TOPICS`]. The place of a topic in this list is a part of
    /// the positions in checkpoints.
    pub topics: Vec<String>,
    /// The format of the records' values.
    pub format: RecordFormat,
    /// Where a run begins that resumes from no checkpoint.
    pub start: StreamStart,
    /// Where training ends; `None`: never.
    pub until: Option<StreamEnd>,
    /// How long rows wait for a full global batch, in milliseconds. Then they are trained as a
    /// smaller one.
    pub linger_millis: u64,
    /// What happens if the broker has deleted records that were not trained.
    pub lost_records: LostRecords,
    /// The topic for bad records, if they are kept.
    pub dead_letter_topic: Option<String>,
    /// The consumer group for which the offsets of checkpoints are committed, if there is one.
    pub group: Option<String>,
    /// Encryption and authentication.
    pub security: KafkaSecurity,
}

/// The format of a record's value.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub enum RecordFormat {
    /// A JSON object. Its members are the columns.
    Json,
    /// One line of text. There is no header, so the columns are named.
    Csv(CsvFormat),
    /// An Avro record behind the number of its schema, which a schema registry has.
    Avro {
        /// The registry: `http://HOST:PORT` or `https://HOST:PORT`.
        registry: String,
    },
    /// A Protobuf message behind the number of its schema, which a schema registry has.
    Protobuf {
        /// The registry: `http://HOST:PORT` or `https://HOST:PORT`.
        registry: String,
    },
}

/// Where the first run of a job begins in each partition.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub enum StreamStart {
    /// At the first record that the broker still has.
    #[default]
    Earliest,
    /// Behind the last record at the start of the job. A partition that is added later is read
    /// from its first record.
    Latest,
    /// At the first record whose timestamp is at least this, in milliseconds since 1970 (UTC).
    Timestamp(i64),
    /// At the offset that [`KafkaConfig::group`] has committed. Without one, at the first record.
    Committed,
}

/// Where the training on a stream ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum StreamEnd {
    /// Behind the records that the topics have when the run starts, or resumes.
    Latest,
    /// In each partition before the first record whose timestamp is at least this, in milliseconds
    /// since 1970 (UTC). Without such a record, behind the ones that are there at this moment.
    Timestamp(i64),
    /// Behind the last records, once no new one has come for so many seconds.
    IdleSeconds(u32),
}

/// What happens if the broker has deleted records before they were trained.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum LostRecords {
    /// Training ends with an error that names the partition and the number of records that are
    /// gone.
    #[default]
    Fail,
    /// They are counted as lost, and training goes on behind them.
    Skip,
}

/// A mechanism of authentication (SASL).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub enum SaslMechanism {
    /// Name and password in plain text. For TLS only.
    Plain,
    /// SCRAM with SHA-256 (RFC 7677).
    ScramSha256,
    /// SCRAM with SHA-512.
    ScramSha512,
}

impl SaslMechanism {
    /// The name in Kafka's protocol.
    #[must_use]
    pub const fn wire_name(self) -> &'static str {
        match self {
            Self::Plain => "PLAIN",
            Self::ScramSha256 => "SCRAM-SHA-256",
            Self::ScramSha512 => "SCRAM-SHA-512",
        }
    }
}

/// Encryption and authentication of the connections to a broker. Names, passwords and certificates
/// come from the environment of the process, never from a manifest.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct KafkaSecurity {
    /// Whether connections use TLS.
    pub tls: bool,
    /// The mechanism of authentication; `None`: no authentication.
    pub sasl: Option<SaslMechanism>,
}

impl KafkaSecurity {
    /// The environment variable with the user's name.
    pub const USERNAME: &str = "KAFKA_USERNAME";
    /// The environment variable with the password.
    pub const PASSWORD: &str = "KAFKA_PASSWORD";
    /// The environment variable with the certificate of the authority that signs the brokers'
    /// certificates, as PEM. Without it the system's authorities count.
    pub const AUTHORITY: &str = "KAFKA_CA_CERTIFICATE";
}

impl PartId {
    /// Topics of a stream, at most.
    pub const MOST_TOPICS: usize = 1 << 15;
    /// Partitions of a topic, at most.
    pub const MOST_PARTITIONS: u32 = 1 << 16;

    /// Partition `partition` of topic number `topic`. A topic that gains partitions changes no
    /// other part.
    #[must_use]
    pub const fn of_partition(topic: u32, partition: u32) -> Self {
        Self(topic * Self::MOST_PARTITIONS + partition)
    }

    /// The number of the topic, and of the partition in it.
    #[must_use]
    pub const fn topic_and_partition(self) -> (u32, u32) {
        (self.0 / Self::MOST_PARTITIONS, self.0 % Self::MOST_PARTITIONS)
    }
}

/// Records of a partition that are read together: the ones from `from` on, before `until`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Segment {
    /// The partition.
    pub part: PartId,
    /// The offset of the first record.
    pub from: u64,
    /// The offset behind the last record.
    pub until: u64,
}

/// What a loader found in a segment.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SegmentRead {
    /// The offset behind the last record that was read or passed over.
    pub next: u64,
    /// Whether a good row follows within the segment.
    pub more: bool,
}

/// The state of a partition at the broker, as a loader found it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PartitionState {
    /// The partition.
    pub part: PartId,
    /// The offset of the first record that the broker still has.
    pub begin: u64,
    /// The offset behind the last record that may be read.
    pub end: u64,
    /// Such an offset that was found at least `linger_millis` ago.
    pub aged_end: u64,
    /// Where a job begins that has no checkpoint. The records before `begin` are lost then.
    pub start: u64,
    /// Where training ends with [`StreamEnd::Timestamp`], once that is known.
    pub stop: Option<u64>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_part_is_a_partition_of_a_topic() {
        for (topic, partition) in [(0, 0), (0, 65_535), (1, 0), (32_767, 65_535)] {
            assert_eq!(PartId::of_partition(topic, partition).topic_and_partition(), (topic, partition));
        }
        let sorted = [(0, 7), (1, 0), (1, 1), (2, 0)].map(|(topic, partition)| PartId::of_partition(topic, partition));
        assert!(sorted.is_sorted());
    }
}

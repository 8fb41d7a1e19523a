//! `spec.data.train.kafka`: a stream to train on.

use kube::KubeSchema;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::{CsvSpec, FollowSpec, defaults};

/// The format of the records' values.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub enum RecordFormatSpec {
    /// A JSON object. Its members are the columns. A member that is absent or null is a missing
    /// value. A list of numbers or texts has several values.
    Json,
    /// One line of text without a header. `csv.columns` names the columns.
    Csv,
    /// An Avro record in the wire format of a schema registry. Its fields are the columns. Records
    /// within it and maps are none.
    Avro,
    /// A Protobuf message in the wire format of a schema registry. Its fields are the columns.
    /// Messages within it and maps are none.
    Protobuf,
}

/// Where a job begins that has no checkpoint.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub enum StreamStartSpec {
    /// At the first record that the brokers still have.
    #[default]
    Earliest,
    /// Behind the last record. A partition that is added later is read from its first record.
    Latest,
    /// At the first record with at least the time in `startTimestamp`.
    Timestamp,
    /// At the offset that the consumer group in `group` has committed. A partition without one is
    /// read from its first record.
    Committed,
}

/// Where training on a stream ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub enum StreamEndSpec {
    /// Behind the records that the topics have when the job starts, or resumes.
    Latest,
    /// Before the first record of each partition that has at least the time in `untilTimestamp`. A
    /// partition without one ends with its records of that moment.
    Timestamp,
    /// Behind the last records, once no new record has come for `untilIdleSeconds`.
    Idle,
}

/// The treatment of rows that are gone before they were trained: records that the brokers deleted,
/// or a file that disappeared or changed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub enum LostRecordsSpec {
    /// Training ends with an error that names the partition and the number of records, or the file.
    #[default]
    Fail,
    /// They are counted, a warning names them, and training goes on behind them.
    Skip,
}

/// A mechanism of authentication.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub enum SaslMechanismSpec {
    /// Name and password in plain text. Needs `tls: true`.
    Plain,
    /// SCRAM with SHA-256.
    ScramSha256,
    /// SCRAM with SHA-512.
    ScramSha512,
}

/// Encryption and authentication.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
#[x_kube(
    validation = Rule::new("!(has(self.sasl) && self.sasl == 'plain') || (has(self.tls) && self.tls)").message("`plain` sends the password as it is: set tls: true, or use scramSha256 or scramSha512").field_path(".sasl")
)]
pub struct KafkaSecuritySpec {
    /// True if connections use TLS. The environment variable `KAFKA_CA_CERTIFICATE` may have the
    /// certificate of the authority, as PEM. Otherwise the system's authorities count.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(extend("x-default" = false))]
    pub tls: Option<bool>,

    /// The mechanism of authentication. The environment variables `KAFKA_USERNAME` and
    /// `KAFKA_PASSWORD` have the name and the password.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(extend("x-default" = "no authentication"))]
    pub sasl: Option<SaslMechanismSpec>,

    /// Name of a Secret in the job's namespace. Its entries become environment variables of the
    /// loaders: `KAFKA_USERNAME`, `KAFKA_PASSWORD` and `KAFKA_CA_CERTIFICATE`. Only a cluster uses
    /// it: `rectrain run` uses its own environment.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 253), extend("x-default" = "none"))]
    pub secret_name: Option<String>,
}

/// Topics of a Kafka cluster. Brokers from version 3.1 on. The job joins no consumer group: its
/// checkpoints hold the offsets.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
#[x_kube(
    validation = Rule::new("(has(self.start) && self.start == 'timestamp') == has(self.startTimestamp)").message("`startTimestamp` goes with start: timestamp: give both or neither").field_path(".startTimestamp"),
    validation = Rule::new("(has(self.until) && self.until == 'timestamp') == has(self.untilTimestamp)").message("`untilTimestamp` goes with until: timestamp: give both or neither").field_path(".untilTimestamp"),
    validation = Rule::new("(has(self.until) && self.until == 'idle') == has(self.untilIdleSeconds)").message("`untilIdleSeconds` goes with until: idle: give both or neither").field_path(".untilIdleSeconds"),
    validation = Rule::new("!(has(self.start) && self.start == 'committed') || has(self.group)").message("start: committed needs the `group` that has committed the offsets").field_path(".group"),
    validation = Rule::new("(self.format == 'avro' || self.format == 'protobuf') == has(self.schemaRegistry)").message("format: avro and format: protobuf need `schemaRegistry`, which has the schemas, and other formats need none").field_path(".schemaRegistry"),
    validation = Rule::new("(self.format == 'csv') == has(self.csv)").message("format: csv needs `csv` with the names of the columns, and other formats have none").field_path(".csv")
)]
pub struct KafkaSpec {
    /// Addresses `HOST:PORT` of brokers. One that answers is enough. At least one, at most 32.
    /// Required.
    #[schemars(
        length(min = 1, max = 32),
        inner(length(min = 3, max = 255), regex(pattern = r"^[^\s/:]+:[0-9]{1,5}$|^\[[0-9a-fA-F:.]+\]:[0-9]{1,5}$")),
        extend("x-expected" = "addresses such as kafka-0.kafka:9092")
    )]
    pub bootstrap_servers: Vec<String>,

    /// The topics. Checkpoints count on their order: add topics at the end. At least one, at most
    /// 64. Required.
    #[schemars(length(min = 1, max = 64), inner(length(min = 1, max = 249), regex(pattern = r"^[a-zA-Z0-9._-]+$")))]
    pub topics: Vec<String>,

    /// The format of the records' values. Required.
    pub format: RecordFormatSpec,

    /// How the text of a record is split into columns. Goes with `format: csv`, and needs
    /// `columns`.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(extend("x-default" = "none"))]
    pub csv: Option<CsvSpec>,

    /// URL of the schema registry that has the schemas of Avro and Protobuf records.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(
        length(min = 8, max = 1024),
        regex(pattern = r"^https?://[^\s]+$"),
        extend("x-default" = "none", "x-expected" = "a URL such as http://registry:8081")
    )]
    pub schema_registry: Option<String>,

    /// Where a job begins that has no checkpoint of its own.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(extend("x-default" = StreamStartSpec::Earliest))]
    pub start: Option<StreamStartSpec>,

    /// The time of the first record for `start: timestamp`, in milliseconds since 1970 (UTC).
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 0, max = 9_007_199_254_740_991u64), extend("x-default" = "none"))]
    pub start_timestamp: Option<u64>,

    /// A consumer group. At each checkpoint the job commits its offsets for it, so that Kafka's
    /// tools show how far the job is. It must have no members. The job itself resumes from the
    /// checkpoint, and reads these offsets only with `start: committed`.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 249), regex(pattern = r"^[a-zA-Z0-9._-]+$"), extend("x-default" = "none"))]
    pub group: Option<String>,

    /// Where training ends.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(extend("x-default" = "training has no end"))]
    pub until: Option<StreamEndSpec>,

    /// The time of the first record that is not trained, for `until: timestamp`, in milliseconds
    /// since 1970 (UTC).
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 0, max = 9_007_199_254_740_991u64), extend("x-default" = "none"))]
    pub until_timestamp: Option<u64>,

    /// The seconds without a new record after which training ends, for `until: idle`. The brokers
    /// must answer meanwhile.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = 31_536_000), extend("x-default" = "none"))]
    pub until_idle_seconds: Option<u32>,

    /// How long rows of a partition wait for a full global batch, in milliseconds. Then they are
    /// trained as a smaller one.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 100, max = 3_600_000u64), extend("x-default" = defaults::LINGER_MILLIS))]
    pub linger_millis: Option<u64>,

    /// The treatment of records that the brokers deleted before they were trained.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(extend("x-default" = LostRecordsSpec::Fail))]
    pub lost_records: Option<LostRecordsSpec>,

    /// Topic to which loaders write each bad record that `spec.data.badRows` skips: its key, its
    /// value and its time, with the headers `topic`, `partition`, `offset` and `reason`. A record
    /// may be written more than once, if a loader dies. The topic must exist.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 249), regex(pattern = r"^[a-zA-Z0-9._-]+$"), extend("x-default" = "none"))]
    pub dead_letter_topic: Option<String>,

    /// Encryption and authentication.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(extend("x-default" = "neither"))]
    pub security: Option<KafkaSecuritySpec>,
}

/// Rows to train on: files, a stream, or files that keep coming. Exactly one of `paths`, `kafka`
/// and `follow`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
#[x_kube(
    validation = Rule::new("[has(self.paths), has(self.kafka), has(self.follow)].filter(given, given).size() == 1").message("expected exactly one of `paths` (files), `kafka` (a stream) and `follow` (files that keep coming)")
)]
pub struct TrainSpec {
    /// Files, as in `spec.data.test.paths`. At least one, at most 1,024.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(min = 1, max = 1024), inner(length(min = 1, max = 1024)), extend("x-default" = "none"))]
    pub paths: Vec<String>,

    /// Topics of a Kafka cluster.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(extend("x-default" = "none"))]
    pub kafka: Option<KafkaSpec>,

    /// Files that keep coming.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(extend("x-default" = "none"))]
    pub follow: Option<FollowSpec>,
}

impl TrainSpec {
    /// The paths of files, known or to come, and their field.
    pub(crate) fn file_paths(&self) -> (&'static str, &[String]) {
        match &self.follow {
            Some(follow) => ("spec.data.train.follow.paths", &follow.paths),
            None => ("spec.data.train.paths", &self.paths),
        }
    }
}

//! A job on clicks in a topic, and the topic.

#![allow(clippy::unwrap_used, reason = "an unwrap in a test is an assertion")]

use std::fmt::Write as _;
use std::path::Path;
use std::time::Duration;

use rectrain_harness::kafka::Broker;
use rectrain_kafka::{Client, KafkaError, NewRecord, Security};
use serde_json::Value;

use crate::common::{events, run_job};

pub const PARTITIONS: usize = 8;
/// Rows of a global batch.
pub const BATCH: usize = 16;
/// How long a run without an end may take for the rows of a test.
pub const PATIENCE: Duration = Duration::from_secs(60);

pub const JOB: &str = "
apiVersion: rectrain.dev/v1alpha1
kind: RecTrainingJob
metadata: {name: clicks}
spec:
  model: {kind: deepfm, embeddingDim: 4, hidden: [8]}
  features:
    sparse: [{name: user}, {name: item}]
    dense: [{name: age}]
  data: {train: {paths: [rows.csv]}, format: csv}
  training: {globalBatchSize: 16}
";

/// A click: its label, user, item and age.
pub type Row = (u32, String, String, u32);

pub fn row(number: usize) -> Row {
    let number = number as u32;
    let (user, item, age) = (number * 7 % 23, number * 5 % 17, number % 9);
    (u32::from((user % 3 + item % 2 + number % 4) > 3), format!("u{user}"), format!("i{item}"), age)
}

pub fn json((label, user, item, age): &Row) -> String {
    format!(r#"{{"user":"{user}","age":{age},"other":[null],"label":{label},"item":"{item}"}}"#)
}

/// A topic with these values in each partition.
pub fn produce(address: &str, topic: &str, partitions: &[Vec<String>]) {
    let records = |values: &Vec<String>| values.iter().map(|value| record(value)).collect::<Vec<_>>();
    produce_records(address, topic, &partitions.iter().map(records).collect::<Vec<_>>());
}

/// A topic with these records in each partition.
pub fn produce_records(address: &str, topic: &str, partitions: &[Vec<NewRecord>]) {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        let client = Client::new(vec![address.to_owned()], Security::default());
        loop {
            match client.create_topic(topic, partitions.len() as i32).await {
                // It may be there already.
                Ok(()) | Err(KafkaError::Broker { .. }) => break,
                // The broker has just started.
                Err(error) if error.is_transient() => tokio::time::sleep(Duration::from_millis(100)).await,
                Err(error) => panic!("{error}"),
            }
        }
        for (partition, records) in (0..).zip(partitions) {
            for records in records.chunks(1_000) {
                while let Err(error) = client.produce(topic, partition, records).await {
                    assert!(error.is_transient(), "{error}");
                    tokio::time::sleep(Duration::from_millis(100)).await;
                }
            }
        }
    });
}

pub fn record(value: &str) -> NewRecord {
    NewRecord { timestamp: 1_700_000_000_000, value: Some(value.to_owned().into()), ..NewRecord::default() }
}

/// Partitions of different lengths, each of whole batches.
pub fn rows(batches: usize) -> Vec<Vec<Row>> {
    let mut next = 0;
    let mut rows = |count: usize| {
        next += count;
        (next - count..next).map(row).collect()
    };
    (0..PARTITIONS).map(|partition| rows((batches + partition % 3) * BATCH)).collect()
}

pub fn values(rows: &[Vec<Row>]) -> Vec<Vec<String>> {
    rows.iter().map(|rows| rows.iter().map(json).collect()).collect()
}

/// A file with the rows in the order in which the partitions take turns.
pub fn write_rows(folder: &Path, partitions: &[Vec<Row>]) {
    let mut left: Vec<_> = partitions.iter().map(|rows| rows.chunks(BATCH)).collect();
    let mut text = "label,user,item,age\n".to_owned();
    while left.iter().any(|chunks| chunks.len() > 0) {
        for (label, user, item, age) in left.iter_mut().filter_map(Iterator::next).flatten() {
            writeln!(text, "{label},{user},{item},{age}").unwrap();
        }
    }
    std::fs::write(folder.join("rows.csv"), text).unwrap();
}

/// The overrides that train from a topic up to its present end.
pub fn from_topic(broker: &Broker, topic: &str) -> String {
    format!(
        "spec.data.format=null,spec.data.train.paths=null,spec.data.train.kafka.bootstrapServers={{{}}},\
         spec.data.train.kafka.topics={{{topic}}},spec.data.train.kafka.format=json,spec.data.train.kafka.until=latest",
        broker.address
    )
}

pub fn run(folder: &Path, sets: &[&str]) -> Vec<Value> {
    events(&run_job(folder, sets))
}

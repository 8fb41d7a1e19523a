//! A client for Kafka: the metadata of topics, offsets, reads of partitions, writes. It speaks
//! Kafka's binary protocol over TCP or TLS, with or without SASL. Brokers from version 3.1 on.
//!
//! The client joins no consumer group: the caller names the partitions and offsets that it reads,
//! and keeps its position itself. It can commit offsets for a group, so that tools show its lag.
//! The records of aborted transactions, and the markers of transactions, are left out. So offsets
//! have gaps, and [`Fetched::next`] says where to read on.
//!
//! Why not an existing client: `docs/development/kafka-client.md` has the comparison.

mod api;
mod client;
mod codec;
mod compression;
mod connection;
mod error;
mod groups;
mod records;
mod scram;
mod security;

pub use api::{OffsetAt, PartitionMetadata, TopicId, TopicMetadata};
pub use client::{Client, FetchFrom, Fetched, FetchedPartition};
pub use error::{ErrorCode, KafkaError};
pub use groups::GroupOffset;
pub use records::{NewRecord, Record};
pub use security::{Credentials, Security};

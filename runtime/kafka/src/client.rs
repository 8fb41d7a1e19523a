//! The client: which broker leads which partition, and the connections to the brokers.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use futures::future::join_all;
use tokio::sync::Mutex;

use crate::api::{self, Api, FetchPartition, Metadata, OfPartition, OffsetAt, TopicMetadata};
use crate::codec::{Malformed, Reader};
use crate::connection::{Connection, unreachable};
use crate::error::{ErrorCode, KafkaError};
use crate::records::{self, NewRecord, Record};
use crate::security::Security;

/// How long brokers wait for the replicas of a write, or for a new topic.
const WRITE: Duration = Duration::from_secs(30);

/// A client of one cluster. All methods may be called concurrently. They do not repeat a request
/// that failed, but a later call finds the present leaders: see [`KafkaError::is_transient`].
pub struct Client {
    bootstrap: Vec<String>,
    security: Security,
    cluster: Mutex<Cluster>,
    /// By the broker's address and the use. A fetch waits at the broker for records, so it has a
    /// connection of its own.
    connections: Mutex<HashMap<(String, Use), Slot>>,
}

/// A connection that is shared; `None`: it was closed, or is in use.
type Slot = Arc<Mutex<Option<Connection>>>;

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Use {
    Fetches,
    Others,
}

/// The brokers and leaders that are known.
#[derive(Debug, Default)]
struct Cluster {
    brokers: BTreeMap<i32, String>,
    leaders: HashMap<(String, i32), i32>,
}

/// A place to read from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FetchFrom {
    /// The topic.
    pub topic: String,
    /// The partition.
    pub partition: i32,
    /// The offset of the first record.
    pub offset: i64,
}

/// The records of a partition, or why there are none.
#[derive(Debug)]
pub struct FetchedPartition {
    /// The topic.
    pub topic: String,
    /// The partition.
    pub partition: i32,
    /// The records.
    pub fetched: Result<Fetched, KafkaError>,
}

/// Records of a partition.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Fetched {
    /// Ascending by offset. There may be none.
    pub records: Vec<Record>,
    /// The offset to read on from. It may lie behind the last record, because the markers of
    /// transactions and records that were removed or aborted have offsets too.
    pub next: i64,
    /// The offset behind the last record that may be read now.
    pub end: i64,
    /// The offset of the first record that the broker still has.
    pub begin: i64,
}

impl std::fmt::Debug for Client {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Client").field("bootstrap", &self.bootstrap).finish_non_exhaustive()
    }
}

impl Client {
    /// A client of the cluster that has the brokers `bootstrap` (`HOST:PORT`). Connects at the
    /// first call.
    #[must_use]
    pub fn new(bootstrap: Vec<String>, security: Security) -> Self {
        Self { bootstrap, security, cluster: Mutex::default(), connections: Mutex::default() }
    }

    /// The partitions and leaders of topics.
    ///
    /// # Errors
    /// No broker answers. A topic that does not exist has an error of its own.
    pub async fn topics(&self, topics: &[String]) -> Result<Vec<TopicMetadata>, KafkaError> {
        let body = api::metadata_request(topics);
        let known: Vec<String> = self.cluster.lock().await.brokers.values().cloned().collect();
        let mut last = unreachable("", "no broker is named");
        for broker in known.iter().chain(&self.bootstrap) {
            match self.call(broker, Use::Others, api::METADATA, &body, Duration::ZERO, api::metadata_answer).await {
                Ok(metadata) => return Ok(self.learn(metadata).await),
                Err(error) if matches!(error, KafkaError::Unreachable { .. }) => last = error,
                Err(error) => return Err(error),
            }
        }
        Err(last)
    }

    async fn learn(&self, metadata: Metadata) -> Vec<TopicMetadata> {
        let mut cluster = self.cluster.lock().await;
        cluster.brokers = metadata.brokers.into_iter().collect();
        for topic in &metadata.topics {
            for partition in &topic.partitions {
                cluster.leaders.insert((topic.name.clone(), partition.number), partition.leader);
            }
        }
        metadata.topics
    }

    /// An offset of each of these partitions, in their order. `None`: there is no record with such
    /// a timestamp.
    ///
    /// # Errors
    /// A leader does not answer, or answers with an error.
    pub async fn offsets(&self, topic: &str, partitions: &[i32], at: OffsetAt) -> Result<Vec<Option<i64>>, KafkaError> {
        let leaders = self.leaders(topic, partitions).await?;
        let mut by_broker: BTreeMap<&str, Vec<i32>> = BTreeMap::new();
        for (partition, leader) in partitions.iter().zip(&leaders) {
            by_broker.entry(leader).or_default().push(*partition);
        }
        let mut asked = Vec::with_capacity(by_broker.len());
        for (broker, partitions) in &by_broker {
            asked.push(self.offsets_of(broker, topic, partitions, at));
        }
        let mut found = HashMap::new();
        for answer in join_all(asked).await {
            for OfPartition { partition, error, content, .. } in answer? {
                self.check(topic, partition, error).await?;
                found.insert(partition, content);
            }
        }
        let missing = |partition| KafkaError::Malformed {
            subject: name(topic, partition),
            problem: "the broker's answer lacks the partition".to_owned(),
        };
        let offset = |partition: &i32| found.get(partition).copied().ok_or_else(|| missing(*partition));
        partitions.iter().map(|partition| offset(partition).map(|offset| Some(offset).filter(|at| *at >= 0))).collect()
    }

    async fn offsets_of(
        &self,
        broker: &str,
        topic: &str,
        partitions: &[i32],
        at: OffsetAt,
    ) -> Result<Vec<OfPartition<i64>>, KafkaError> {
        let body = api::list_offsets_request(topic, partitions, at);
        self.call(broker, Use::Others, api::LIST_OFFSETS, &body, Duration::ZERO, api::list_offsets_answer).await
    }

    /// Reads from several partitions, each from its offset, up to about `bytes` bytes of each.
    /// Waits at the brokers for up to `wait` until one of them has a record.
    pub async fn fetch(&self, from: &[FetchFrom], wait: Duration, bytes: u32) -> Vec<FetchedPartition> {
        let mut by_broker: BTreeMap<String, Vec<&FetchFrom>> = BTreeMap::new();
        let mut fetched = Vec::with_capacity(from.len());
        for place in from {
            match self.leaders(&place.topic, &[place.partition]).await {
                Ok(leader) => by_broker.entry(leader.concat()).or_default().push(place),
                Err(error) => fetched.push(place.failed(error)),
            }
        }
        let mut asked = Vec::with_capacity(by_broker.len());
        for (broker, from) in &by_broker {
            asked.push(self.fetch_of(broker, from, wait, bytes));
        }
        fetched.extend(join_all(asked).await.into_iter().flatten());
        fetched
    }

    async fn fetch_of(&self, broker: &str, from: &[&FetchFrom], wait: Duration, bytes: u32) -> Vec<FetchedPartition> {
        let partitions: Vec<FetchPartition<'_>> = from
            .iter()
            .map(|of| FetchPartition { topic: &of.topic, partition: of.partition, offset: of.offset })
            .collect();
        let body = api::fetch_request(&partitions, wait.as_millis() as i32, bytes.min(i32::MAX as u32) as i32);
        let answer = self.call(broker, Use::Fetches, api::FETCH, &body, wait, api::fetch_answer).await;
        let mut contents = match answer {
            Ok((ErrorCode::NONE, contents)) => contents,
            Ok((code, _)) => {
                let error = KafkaError::Broker { subject: format!("fetch from the broker {broker}"), code };
                return from.iter().map(|place| place.failed(error.clone())).collect();
            }
            Err(error) => return from.iter().map(|place| place.failed(error.clone())).collect(),
        };
        let mut fetched = Vec::with_capacity(from.len());
        for place in from {
            let is_of = |of: &OfPartition<_>| of.topic == place.topic && of.partition == place.partition;
            // A broker may leave out a partition for which it has no room.
            if let Some(at) = contents.iter().position(is_of) {
                fetched.push(self.read(place, contents.swap_remove(at)).await);
            }
        }
        fetched
    }

    async fn read(&self, place: &FetchFrom, found: OfPartition<api::FetchContent>) -> FetchedPartition {
        if let Err(error) = self.check(&place.topic, place.partition, found.error).await {
            return place.failed(error);
        }
        let api::FetchContent { stable_end: end, begin, aborted, records } = found.content;
        let decoded = match records::decode(records, place.offset, aborted) {
            Ok(decoded) => decoded,
            Err(Malformed(problem)) => {
                let subject = format!("{}, from offset {}", name(&place.topic, place.partition), place.offset);
                return place.failed(KafkaError::Malformed { subject, problem: problem.to_owned() });
            }
        };
        let next = decoded.next.map_or(place.offset, |next| next.max(place.offset));
        let fetched = Fetched { records: decoded.records, next, end, begin };
        FetchedPartition { topic: place.topic.clone(), partition: place.partition, fetched: Ok(fetched) }
    }

    /// Writes records to a partition, and waits until all replicas in sync have them. Returns the
    /// offset of the first one. After an error they may have been written or not.
    ///
    /// # Errors
    /// The leader does not answer, or refuses the records.
    pub async fn produce(&self, topic: &str, partition: i32, records: &[NewRecord]) -> Result<i64, KafkaError> {
        let leader = self.leaders(topic, &[partition]).await?.concat();
        let body = api::produce_request(topic, partition, &records::encode(records), WRITE.as_millis() as i32);
        let answer = self.call(&leader, Use::Others, api::PRODUCE, &body, WRITE, api::produce_answer).await?;
        match answer.into_iter().next() {
            Some(OfPartition { error, content, .. }) => {
                self.check(topic, partition, error).await?;
                Ok(content)
            }
            None => Err(KafkaError::Malformed {
                subject: name(topic, partition),
                problem: "the broker's answer lacks the partition".to_owned(),
            }),
        }
    }

    /// Makes a topic with one replica of each partition.
    ///
    /// # Errors
    /// No broker answers, or the topic exists already.
    pub async fn create_topic(&self, topic: &str, partitions: i32) -> Result<(), KafkaError> {
        let broker = self.any_broker().await?;
        let body = api::create_topic_request(topic, partitions, WRITE.as_millis() as i32);
        let answer =
            self.call(&broker, Use::Others, api::CREATE_TOPICS, &body, WRITE, api::create_topic_answer).await?;
        match answer.into_iter().next() {
            Some((ErrorCode::NONE, _)) | None => Ok(()),
            Some((code, message)) => {
                let subject =
                    message.map_or_else(|| format!("topic {topic}"), |text| format!("topic {topic} ({text})"));
                Err(KafkaError::Broker { subject, code })
            }
        }
    }

    /// A broker of the cluster.
    pub(crate) async fn any_broker(&self) -> Result<String, KafkaError> {
        self.topics(&[]).await?;
        let broker = self.cluster.lock().await.brokers.values().next().cloned();
        broker.ok_or_else(|| unreachable("", "no broker is known"))
    }

    /// The addresses of the leaders of these partitions, in their order.
    async fn leaders(&self, topic: &str, partitions: &[i32]) -> Result<Vec<String>, KafkaError> {
        if let Some(leaders) = self.known_leaders(topic, partitions).await {
            return Ok(leaders);
        }
        self.topics(&[topic.to_owned()]).await?;
        self.known_leaders(topic, partitions).await.ok_or_else(|| KafkaError::Broker {
            subject: format!("topic {topic}"),
            // The partition has no leader now.
            code: ErrorCode(5),
        })
    }

    async fn known_leaders(&self, topic: &str, partitions: &[i32]) -> Option<Vec<String>> {
        let cluster = self.cluster.lock().await;
        let leader = |partition: &i32| {
            let id = cluster.leaders.get(&(topic.to_owned(), *partition))?;
            cluster.brokers.get(id).cloned()
        };
        partitions.iter().map(leader).collect()
    }

    /// Fails with the broker's error. Forgets the leader of the partition then.
    async fn check(&self, topic: &str, partition: i32, code: ErrorCode) -> Result<(), KafkaError> {
        if code == ErrorCode::NONE {
            return Ok(());
        }
        if code.is_transient() {
            self.cluster.lock().await.leaders.remove(&(topic.to_owned(), partition));
        }
        Err(KafkaError::Broker { subject: name(topic, partition), code })
    }

    pub(crate) async fn call<T>(
        &self,
        broker: &str,
        purpose: Use,
        api: Api,
        body: &Bytes,
        wait: Duration,
        read: impl FnOnce(&mut Reader) -> Result<T, Malformed>,
    ) -> Result<T, KafkaError> {
        let slot = Arc::clone(self.connections.lock().await.entry((broker.to_owned(), purpose)).or_default());
        let mut slot = slot.lock().await;
        let answered = self.answer(&mut slot, broker, api, body, wait, read).await;
        if matches!(answered, Err(KafkaError::Unreachable { .. })) {
            // The broker may lead nothing any more.
            self.cluster.lock().await.leaders.clear();
        }
        answered
    }

    async fn answer<T>(
        &self,
        slot: &mut Option<Connection>,
        broker: &str,
        api: Api,
        body: &Bytes,
        wait: Duration,
        read: impl FnOnce(&mut Reader) -> Result<T, Malformed>,
    ) -> Result<T, KafkaError> {
        // While it is used it is not in its slot: a call that is cancelled leaves none behind.
        let mut connection = match slot.take() {
            Some(connection) => connection,
            None => Connection::open(broker, &self.security).await?,
        };
        let mut answer = connection.call(api, body, wait).await?;
        let content = read(&mut answer).map_err(|problem| connection.malformed(api, problem))?;
        *slot = Some(connection);
        Ok(content)
    }
}

impl FetchFrom {
    fn failed(&self, error: KafkaError) -> FetchedPartition {
        FetchedPartition { topic: self.topic.clone(), partition: self.partition, fetched: Err(error) }
    }
}

fn name(topic: &str, partition: i32) -> String {
    format!("topic {topic}, partition {partition}")
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The next call asks for the leader of a partition that is not known.
    #[test]
    fn a_leader_is_forgotten_once_it_leads_no_more() {
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        runtime.block_on(async {
            let client = Client::new(Vec::new(), Security::default());
            let mut cluster = client.cluster.lock().await;
            cluster.brokers.insert(7, "broker:9092".to_owned());
            cluster.leaders.extend([0, 1].map(|partition| (("t".to_owned(), partition), 7)));
            drop(cluster);
            let another_leads = ErrorCode(6);
            let may_not = ErrorCode(29);
            for (code, is_known) in [(ErrorCode::NONE, true), (may_not, true), (another_leads, false)] {
                assert_eq!(client.check("t", 0, code).await.is_ok(), code == ErrorCode::NONE);
                assert_eq!(client.known_leaders("t", &[0]).await.is_some(), is_known, "{code:?}");
            }
            assert_eq!(client.known_leaders("t", &[1]).await, Some(vec!["broker:9092".to_owned()]));
            let error = client.check("t", 0, another_leads).await.unwrap_err();
            assert!(
                error.is_transient() && error.to_string().contains("another broker leads the partition"),
                "{error}"
            );
        });
    }
}

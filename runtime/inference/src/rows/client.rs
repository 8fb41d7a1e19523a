//! Look-ups in the shards, on a thread with a runtime of its own. It watches which versions each
//! replica holds. A look-up goes to a replica that holds its version. Without a reply in time it
//! goes to another replica as well, and the first reply counts.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use futures::StreamExt;
use futures::future::try_join_all;
use futures::stream::FuturesUnordered;
use parking_lot::Mutex;
use prometheus::Registry;
use rectrain_rows_proto as v1;
use rectrain_rows_proto::rows_client::RowsClient;
use rectrain_serving::publication::Base;
use rectrain_serving::shard::{FoundRows, key_count};
use rectrain_serving::{GroupContent, RowSum, ServingError};
use tokio::runtime::Handle;
use tokio::sync::watch;
use tokio::task::AbortHandle;
use tonic::Status;
use tonic::transport::{Channel, Endpoint};

use super::shard::{HeldVersion, Shard};
use crate::batcher::{Arrived, Patience};
use crate::error::InferenceError;
use crate::metrics::RowMetrics;

/// The most keys of a request to a replica: as many as it reads.
pub(crate) const MAX_KEYS: usize = 1 << 16;
/// The most bytes of a reply.
const MAX_REPLY_BYTES: usize = 256 << 20;
/// The time for a connection, and between two signs of life that a silent replica is asked for.
const CONNECT: Duration = Duration::from_secs(2);
/// The time for a sign of life.
const ALIVE: Duration = Duration::from_secs(4);
/// The time between two attempts to watch a replica.
const RECONNECT: Duration = Duration::from_millis(100);
/// The time for which look-ups wait for a shard whose last replica has gone.
const GRACE: Duration = Duration::from_millis(500);
/// The time between two looks for a replica that holds a version.
const LOOK: Duration = Duration::from_millis(20);
/// The wait of a look-up that may not be hedged early, in times of `hedge`.
const SLOW_HEDGE: u32 = 20;
/// Windows of a connection. Replies are larger than the default ones.
const STREAM_WINDOW: u32 = 1 << 20;
const CONNECTION_WINDOW: u32 = 4 << 20;

/// How look-ups are made.
#[derive(Debug, Clone, Copy)]
pub struct RowOptions {
    /// A look-up without a reply after this time goes to another replica as well.
    pub hedge: Duration,
    /// The longest time of a look-up.
    pub limit: Duration,
}

/// A look-up in one shard.
#[derive(Debug)]
pub(crate) struct ShardKeys {
    pub(crate) shard: usize,
    /// By row group.
    pub(crate) keys: Vec<Vec<u8>>,
}

/// The rows of look-ups in their order, each by row group.
type Found = Result<Vec<Vec<FoundRows>>, ServingError>;

/// The shards of a model, for the life of the process.
#[derive(Clone)]
pub struct RowClient(Arc<Inner>);

struct Inner {
    /// The addresses of the replicas, by shard.
    addresses: Vec<Vec<String>>,
    clients: Vec<Vec<RowsClient<Channel>>>,
    shards: Vec<Mutex<Shard>>,
    /// Counts the changes of the replicas.
    changed: watch::Sender<u64>,
    options: RowOptions,
    metrics: RowMetrics,
    runtime: Handle,
}

impl RowClient {
    /// Begins to watch the replicas of each shard. An address is HOST:PORT. Their order is the one
    /// of the shards.
    ///
    /// # Errors
    /// An address that is none; a thread that does not start; metrics that exist already.
    pub fn start(
        addresses: Vec<Vec<String>>,
        options: RowOptions,
        registry: &Registry,
    ) -> Result<Self, InferenceError> {
        let io = |action| move |source| InferenceError::Io { action, source };
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
        let runtime = runtime.map_err(io("start the runtime of look-ups"))?;
        let clients = {
            // Connections begin in the runtime.
            let _entered = runtime.enter();
            let of_shard = |addresses: &Vec<String>| -> Result<Vec<_>, InferenceError> {
                addresses.iter().map(|address| client(address)).collect()
            };
            addresses.iter().map(of_shard).collect::<Result<Vec<_>, _>>()?
        };
        let now = Instant::now();
        let inner = Arc::new(Inner {
            shards: addresses.iter().map(|replicas| Mutex::new(Shard::new(replicas.len(), now))).collect(),
            addresses,
            clients,
            changed: watch::Sender::new(0),
            options,
            metrics: RowMetrics::new(registry)?,
            runtime: runtime.handle().clone(),
        });
        for (shard, replicas) in inner.addresses.iter().enumerate() {
            for replica in 0..replicas.len() {
                runtime.spawn(Arc::clone(&inner).watch(shard, replica));
            }
        }
        let work = move || runtime.block_on(std::future::pending::<()>());
        let thread = std::thread::Builder::new().name("rectrain-rows".into()).spawn(work);
        thread.map(drop).map_err(io("start the thread of look-ups"))?;
        Ok(Self(inner))
    }

    /// The number of shards.
    #[must_use]
    pub fn shards(&self) -> u32 {
        self.0.shards.len() as u32
    }

    /// The content of a version in all shards together, by row group. `None` unless a replica of
    /// every shard holds it.
    #[must_use]
    pub fn content(&self, base: &Base) -> Option<Vec<GroupContent>> {
        let mut all: Vec<GroupContent> = Vec::new();
        for shard in &self.0.shards {
            let shard = shard.lock();
            let content = shard.content(base)?;
            all.resize(content.len().max(all.len()), GroupContent::default());
            all.iter_mut().zip(content).for_each(|(all, part)| all.join(part));
        }
        Some(all)
    }

    /// The first shard without a replica that holds a version, as the end of a sentence.
    #[must_use]
    pub fn shard_without(&self, base: &Base) -> Option<String> {
        let shard = self.0.shards.iter().position(|shard| shard.lock().content(base).is_none())?;
        let addresses = self.0.addresses[shard].join(", ");
        Some(format!("shard {shard} ({addresses}): {}", self.0.lack(shard, base)))
    }

    /// The greatest sequence number that a replica holds.
    #[must_use]
    pub fn newest(&self) -> u64 {
        self.0.shards.iter().map(|shard| shard.lock().newest()).max().unwrap_or(0)
    }

    /// Tells when a replica holds other versions.
    #[must_use]
    pub fn changes(&self) -> watch::Receiver<u64> {
        self.0.changed.subscribe()
    }

    pub(crate) fn metrics(&self) -> &RowMetrics {
        &self.0.metrics
    }

    /// Begins look-ups in one version, of rows of these widths. `arrived` is told when all have
    /// ended.
    pub(crate) fn fetch(
        &self,
        base: &Base,
        dims: &Arc<[usize]>,
        asked: Vec<ShardKeys>,
        patience: Patience,
        arrived: &Arrived,
    ) -> Fetch {
        let slot = Arc::new(Slot::default());
        let ending = Ending { slot: Arc::clone(&slot), arrived: Arc::clone(arrived) };
        let (inner, base, dims) = (Arc::clone(&self.0), base.clone(), Arc::clone(dims));
        let task = self.0.runtime.spawn(async move {
            let look_ups = asked.into_iter().map(|asked| inner.look_up(&base, &dims, asked, patience));
            let found = try_join_all(look_ups).await;
            ending.finish(found);
        });
        Fetch { slot, task: task.abort_handle() }
    }
}

/// Look-ups in progress. They end if this value is dropped.
pub(crate) struct Fetch {
    slot: Arc<Slot>,
    task: AbortHandle,
}

#[derive(Default)]
struct Slot {
    found: Mutex<Option<Found>>,
    has_ended: AtomicBool,
}

impl Fetch {
    pub(crate) fn has_ended(&self) -> bool {
        self.slot.has_ended.load(Ordering::Acquire)
    }

    /// The rows, once the look-ups have ended.
    pub(crate) fn take(&self) -> Found {
        self.slot.found.lock().take().unwrap_or_else(unexpected_end)
    }
}

impl Drop for Fetch {
    fn drop(&mut self) {
        self.task.abort();
    }
}

fn unexpected_end() -> Found {
    Err(ServingError::RowsUnavailable { shard: 0, problem: "the look-up ended without a result".to_owned() })
}

/// Tells the end of look-ups, whatever it is.
struct Ending {
    slot: Arc<Slot>,
    arrived: Arrived,
}

impl Ending {
    fn finish(self, found: Found) {
        *self.slot.found.lock() = Some(found);
    }
}

impl Drop for Ending {
    fn drop(&mut self) {
        self.slot.has_ended.store(true, Ordering::Release);
        (self.arrived)();
    }
}

fn client(address: &str) -> Result<RowsClient<Channel>, InferenceError> {
    let wrong = |problem: String| InferenceError::Address { address: address.to_owned(), problem };
    let has_port = address.rsplit_once(':').is_some_and(|(host, port)| !host.is_empty() && port.parse::<u16>().is_ok());
    if !has_port {
        return Err(wrong("it has no port".to_owned()));
    }
    let endpoint = Endpoint::from_shared(format!("http://{address}")).map_err(|error| wrong(error.to_string()))?;
    let channel = endpoint
        .connect_timeout(CONNECT)
        .tcp_nodelay(true)
        .http2_keep_alive_interval(CONNECT)
        .keep_alive_timeout(ALIVE)
        .keep_alive_while_idle(true)
        .initial_stream_window_size(STREAM_WINDOW)
        .initial_connection_window_size(CONNECTION_WINDOW)
        .connect_lazy();
    Ok(RowsClient::new(channel).max_decoding_message_size(MAX_REPLY_BYTES))
}

impl Inner {
    /// Watches a replica for the life of the process.
    async fn watch(self: Arc<Self>, shard: usize, replica: usize) {
        let mut warned = None;
        loop {
            let ended = self.watch_once(shard, replica, &mut warned).await;
            self.show(shard, replica, Vec::new(), false);
            let problem = ended.err().map_or_else(|| "it ended".to_owned(), |status| sentence(&status));
            if warned.as_ref() != Some(&problem) {
                let address = &self.addresses[shard][replica];
                tracing::warn!(shard, address, problem, "a replica of a shard does not tell its versions");
                warned = Some(problem);
            }
            tokio::time::sleep(RECONNECT).await;
        }
    }

    async fn watch_once(&self, shard: usize, replica: usize, warned: &mut Option<String>) -> Result<(), Status> {
        let request = v1::WatchRequest { shard: shard as u32, shards: self.shards.len() as u32 };
        let mut client = self.clients[shard][replica].clone();
        let mut told = client.watch(request).await?.into_inner();
        while let Some(v1::Held { versions, ending }) = told.message().await? {
            *warned = None;
            self.show(shard, replica, versions.into_iter().filter_map(held_version).collect(), ending);
        }
        Ok(())
    }

    /// A replica holds these versions from now on.
    fn show(&self, shard: usize, replica: usize, held: Vec<HeldVersion>, ending: bool) {
        let mut state = self.shards[shard].lock();
        state.set(replica, held, ending, Instant::now());
        let (connected, newest) = (state.connected(), state.newest());
        drop(state);
        let label = shard.to_string();
        self.metrics.replicas.with_label_values(&[&label]).set(connected as i64);
        self.metrics.held_sequence.with_label_values(&[&label]).set(i64::try_from(newest).unwrap_or(i64::MAX));
        self.changed.send_modify(|changes| *changes += 1);
    }

    /// Why no replica can answer for a version, as the end of a sentence.
    fn lack(&self, shard: usize, base: &Base) -> String {
        let state = self.shards[shard].lock();
        if state.connected() == 0 {
            return "no replica of it is ready".to_owned();
        }
        let (oldest, newest, sequence) = (state.oldest(), state.newest(), base.sequence);
        format!("its replicas hold versions {oldest} to {newest}, and none has the model {sequence} that is served")
    }

    /// Looks up the rows of keys in a shard.
    async fn look_up(
        &self,
        base: &Base,
        dims: &[usize],
        asked: ShardKeys,
        patience: Patience,
    ) -> Result<Vec<FoundRows>, ServingError> {
        let ShardKeys { shard, keys } = asked;
        let label = shard.to_string();
        self.metrics.look_ups.with_label_values(&[&label]).inc();
        let request = v1::LookUpRequest {
            sequence: base.sequence,
            digest: base.digest.clone(),
            shard: shard as u32,
            shards: self.shards.len() as u32,
            keys,
        };
        let deadline = Instant::now() + self.options.limit;
        let mut changed = self.changed.subscribe();
        let mut refused = None;
        loop {
            changed.mark_unchanged();
            let candidates = self.shards[shard].lock().candidates(base, Instant::now());
            if !candidates.is_empty() {
                match self.race(shard, &label, candidates, &request, dims, deadline).await {
                    Ok(found) => {
                        let bytes: usize = found.iter().map(|rows| rows.present.len() + rows.values.len()).sum();
                        self.metrics.bytes.with_label_values(&[&label]).inc_by(bytes as u64);
                        return Ok(found);
                    }
                    Err(problem) => refused = Some(problem),
                }
            }
            let now = Instant::now();
            let down_since = self.shards[shard].lock().down_since();
            let is_down = down_since.is_some_and(|since| patience == Patience::None || now - since > GRACE);
            let has_waited = now >= deadline || (patience == Patience::None && down_since.is_none());
            if is_down || has_waited {
                self.metrics.failed.with_label_values(&[&label]).inc();
                let problem = match (down_since, refused) {
                    (None, Some(problem)) => problem,
                    _ => self.lack(shard, base),
                };
                return Err(ServingError::RowsUnavailable { shard, problem });
            }
            tokio::select! {
                _changed = changed.changed() => {}
                () = tokio::time::sleep(LOOK) => {}
            }
        }
    }

    /// Asks replicas until one replies. The error is the last problem.
    async fn race(
        &self,
        shard: usize,
        label: &str,
        candidates: Vec<usize>,
        request: &v1::LookUpRequest,
        dims: &[usize],
        deadline: Instant,
    ) -> Result<Vec<FoundRows>, String> {
        let mut rest = candidates.into_iter();
        let mut asked = Vec::new();
        let mut running = FuturesUnordered::new();
        let mut hedge = self.options.hedge;
        loop {
            if running.is_empty() {
                let Some(replica) = rest.next() else { return Err("no replica of it has replied".to_owned()) };
                asked.push(replica);
                running.push(self.ask(shard, replica, request, dims, deadline));
            }
            tokio::select! {
                Some((replica, reply)) = running.next() => match reply {
                    Ok(found) => {
                        // The ones that were asked before are slow.
                        let mut state = self.shards[shard].lock();
                        let slow = asked.iter().take_while(|earlier| **earlier != replica);
                        slow.for_each(|slow| state.suspect(*slow, Instant::now()));
                        return Ok(found);
                    }
                    Err(problem) => {
                        self.metrics.refused.with_label_values(&[label]).inc();
                        self.shards[shard].lock().suspect(replica, Instant::now());
                        if running.is_empty() && rest.len() == 0 {
                            return Err(problem);
                        }
                    }
                },
                () = tokio::time::sleep(hedge), if rest.len() > 0 => {
                    // All replicas may be slow. Then most look-ups wait longer for the first one.
                    if hedge == self.options.hedge && !self.shards[shard].lock().may_hedge() {
                        hedge *= SLOW_HEDGE;
                    } else if let Some(replica) = rest.next() {
                        self.metrics.hedged.with_label_values(&[label]).inc();
                        asked.push(replica);
                        running.push(self.ask(shard, replica, request, dims, deadline));
                    }
                }
            }
        }
    }

    /// Asks one replica. The error is the problem, as the end of a sentence.
    async fn ask(
        &self,
        shard: usize,
        replica: usize,
        request: &v1::LookUpRequest,
        dims: &[usize],
        deadline: Instant,
    ) -> (usize, Result<Vec<FoundRows>, String>) {
        let address = &self.addresses[shard][replica];
        let mut client = self.clients[shard][replica].clone();
        let mut own = tonic::Request::new(request.clone());
        own.set_timeout(deadline.saturating_duration_since(Instant::now()));
        let reply = match tokio::time::timeout_at(deadline.into(), client.look_up(own)).await {
            Err(_passed) => Err("it did not reply in time".to_owned()),
            Ok(Err(status)) => Err(sentence(&status)),
            Ok(Ok(reply)) => found(reply.into_inner(), request, dims),
        };
        (replica, reply.map_err(|problem| format!("{address}: {problem}")))
    }
}

/// The rows of a reply, if it answers the request.
fn found(reply: v1::LookUpResponse, request: &v1::LookUpRequest, dims: &[usize]) -> Result<Vec<FoundRows>, String> {
    if !reply.is_held {
        return Err(format!("it does not hold the model {}", request.sequence));
    }
    let groups: Vec<FoundRows> =
        reply.groups.into_iter().map(|v1::GroupRows { present, values }| FoundRows { present, values }).collect();
    let mut expected = request.keys.iter().zip(dims);
    let is_sound = groups.len() == request.keys.len()
        && groups.iter().all(|rows| {
            expected.next().is_some_and(|(keys, dim)| key_count(keys).is_some_and(|count| rows.is_of(count, *dim)))
        });
    if is_sound { Ok(groups) } else { Err("its reply has another number of rows or values".to_owned()) }
}

/// A version in a message. `None` if its content cannot be read.
fn held_version(version: v1::Version) -> Option<HeldVersion> {
    let content = version.groups.iter().map(|group| {
        let sum: &[u8; 32] = group.sum[..].try_into().ok()?;
        Some(GroupContent { rows: group.rows, sum: RowSum::of_bytes(sum) })
    });
    let content = content.collect::<Option<_>>()?;
    Some(HeldVersion { base: Base { sequence: version.sequence, digest: version.digest }, content })
}

/// The message of a status with its cause, which tonic leaves out.
fn sentence(status: &Status) -> String {
    let mut text = status.message().to_owned();
    let mut cause = std::error::Error::source(status);
    while let Some(error) = cause {
        let more = error.to_string();
        if !text.contains(&more) {
            text = format!("{text}: {more}");
        }
        cause = error.source();
    }
    text
}

#[cfg(test)]
mod tests {
    use std::net::SocketAddr;

    use rectrain_rows_proto::rows_server::{Rows, RowsServer};
    use rectrain_serving::shard::{keys_in, push_key};
    use tonic::{Request, Response};

    use super::*;

    const HEDGE: Duration = Duration::from_millis(20);
    const OPTIONS: RowOptions = RowOptions { hedge: HEDGE, limit: Duration::from_secs(5) };

    /// A replica whose rows have one value: the key plus its own number. Odd keys have no row.
    #[derive(Clone)]
    struct Fake {
        delay: Duration,
        sequences: Vec<u64>,
        number: f32,
        /// Values that are missing at the end of a reply.
        lacks: usize,
    }

    impl Default for Fake {
        fn default() -> Self {
            Self { delay: Duration::ZERO, sequences: vec![1], number: 0.0, lacks: 0 }
        }
    }

    #[tonic::async_trait]
    impl Rows for Fake {
        type WatchStream = futures::stream::BoxStream<'static, Result<v1::Held, Status>>;

        async fn watch(&self, _request: Request<v1::WatchRequest>) -> Result<Response<Self::WatchStream>, Status> {
            let version = |sequence: &u64| v1::Version { sequence: *sequence, digest: "d".into(), groups: Vec::new() };
            let held = v1::Held { versions: self.sequences.iter().map(version).collect(), ending: false };
            let forever = futures::stream::pending();
            Ok(Response::new(futures::stream::once(async { Ok(held) }).chain(forever).boxed()))
        }

        async fn look_up(&self, request: Request<v1::LookUpRequest>) -> Result<Response<v1::LookUpResponse>, Status> {
            tokio::time::sleep(self.delay).await;
            let request = request.into_inner();
            let groups = request.keys.iter().map(|keys| {
                let mut group = v1::GroupRows { present: vec![0; (keys.len() / 8).div_ceil(8)], values: Vec::new() };
                for (place, key) in keys_in(keys).enumerate().filter(|(_, key)| key % 2 == 0) {
                    group.present[place / 8] |= 1 << (place % 8);
                    group.values.extend_from_slice(&(key as f32 + self.number).to_le_bytes());
                }
                group.values.truncate(group.values.len() - 4 * self.lacks);
                group
            });
            Ok(Response::new(v1::LookUpResponse { is_held: true, groups: groups.collect(), held: Vec::new() }))
        }
    }

    /// The address of a replica that serves for the life of the test.
    fn serve(fake: Fake) -> String {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let address: SocketAddr = listener.local_addr().unwrap();
        listener.set_nonblocking(true).unwrap();
        std::thread::spawn(move || {
            let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
            runtime.block_on(async {
                let listener = tokio::net::TcpListener::from_std(listener).unwrap();
                let incoming = tonic::transport::server::TcpIncoming::from(listener);
                let service = RowsServer::new(fake);
                tonic::transport::Server::builder().add_service(service).serve_with_incoming(incoming).await.unwrap();
            });
        });
        address.to_string()
    }

    fn start(shards: Vec<Vec<String>>) -> RowClient {
        RowClient::start(shards, OPTIONS, &Registry::new()).unwrap()
    }

    fn base(sequence: u64) -> Base {
        Base { sequence, digest: "d".to_owned() }
    }

    fn until(state: &str, condition: impl Fn() -> bool) {
        let started = Instant::now();
        while !condition() {
            assert!(started.elapsed() < Duration::from_secs(20), "never: {state}");
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    /// Looks keys up in a shard. Returns their values, and the time.
    fn look_up(
        client: &RowClient,
        shard: usize,
        keys: &[u64],
        patience: Patience,
    ) -> (Result<Vec<Option<f32>>, String>, Duration) {
        let mut bytes = Vec::new();
        keys.iter().for_each(|key| push_key(&mut bytes, *key));
        let (told, arrival) = std::sync::mpsc::channel();
        let arrived: Arrived = Arc::new(move || told.send(()).unwrap_or_default());
        let started = Instant::now();
        let asked = vec![ShardKeys { shard, keys: vec![bytes] }];
        let fetch = client.fetch(&base(1), &Arc::from([1]), asked, patience, &arrived);
        arrival.recv_timeout(Duration::from_secs(20)).unwrap();
        assert!(fetch.has_ended());
        let elapsed = started.elapsed();
        let values = fetch.take().map(|found| {
            let row = |bytes: &[u8]| f32::from_le_bytes(*bytes.first_chunk().unwrap());
            found[0][0].rows(keys.len(), 1).map(|bytes| bytes.map(row)).collect()
        });
        (values.map_err(|error| error.to_string()), elapsed)
    }

    #[test]
    fn the_first_reply_counts_and_a_slow_replica_is_asked_last() {
        let slow = Fake { delay: Duration::from_secs(3), number: 0.5, ..Fake::default() };
        let client = start(vec![vec![serve(slow), serve(Fake::default())]]);
        until("both replicas are watched", || client.0.shards[0].lock().connected() == 2);
        for _ in 0..20 {
            let (found, elapsed) = look_up(&client, 0, &[2, 3, 10], Patience::Short);
            assert_eq!(found, Ok(vec![Some(2.0), None, Some(10.0)]));
            assert!(elapsed < Duration::from_secs(1), "{elapsed:?}");
        }
        let hedged = client.metrics().hedged.with_label_values(&["0"]).get();
        assert!((1..=3).contains(&hedged), "{hedged} of 20 look-ups were hedged");
        assert_eq!(client.metrics().look_ups.with_label_values(&["0"]).get(), 20);
    }

    #[test]
    fn a_reply_of_another_size_is_refused_and_another_replica_asked() {
        let wrong = Fake { lacks: 1, ..Fake::default() };
        let client = start(vec![vec![serve(wrong.clone()), serve(Fake::default())], vec![serve(wrong)]]);
        until("all replicas are watched", || client.content(&base(1)).is_some());
        until("both replicas are watched", || client.0.shards[0].lock().connected() == 2);
        for _ in 0..4 {
            assert_eq!(look_up(&client, 0, &[4], Patience::Short).0, Ok(vec![Some(4.0)]));
        }
        assert!(client.metrics().refused.with_label_values(&["0"]).get() >= 1);
        let (found, elapsed) = look_up(&client, 1, &[4], Patience::None);
        let message = found.unwrap_err();
        assert!(message.contains("the rows of shard 1 cannot be read at present"), "{message}");
        assert!(message.contains("its reply has another number of rows or values"), "{message}");
        assert!(elapsed < Duration::from_secs(2), "{elapsed:?}");
    }

    #[test]
    fn a_shard_that_is_down_or_has_other_versions_answers_nothing() {
        let newer = Fake { sequences: vec![5, 6], ..Fake::default() };
        let nobody = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().to_string();
        let client = start(vec![vec![serve(newer)], vec![nobody]]);
        until("the replica is watched", || client.newest() == 6);
        let message = look_up(&client, 0, &[1], Patience::None).0.unwrap_err();
        assert!(message.contains("hold versions 5 to 6, and none has the model 1"), "{message}");
        std::thread::sleep(GRACE);
        let (found, elapsed) = look_up(&client, 1, &[1], Patience::Short);
        assert!(found.unwrap_err().contains("no replica of it is ready"));
        assert!(elapsed < GRACE, "{elapsed:?}");
        assert_eq!(client.metrics().failed.with_label_values(&["1"]).get(), 1);
        let missing = client.shard_without(&base(6)).unwrap();
        assert!(missing.starts_with("shard 1 (127.0.0.1:"), "{missing}");
        assert!(client.content(&base(6)).is_none());
    }

    #[test]
    fn an_address_without_a_port_is_refused() {
        for wrong in ["host", "host:", ":8090", "a b:1"] {
            let refused = RowClient::start(vec![vec![wrong.to_owned()]], OPTIONS, &Registry::new());
            assert!(matches!(refused, Err(InferenceError::Address { .. })), "{wrong}");
        }
    }
}

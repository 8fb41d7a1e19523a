//! The calling side. One connection carries all calls of a channel; request ids tell them apart.
//!
//! A connection has three tasks. A writer sends the frames of a bounded queue. A reader hands each
//! reply to its waiting call. A supervisor fails all waiting calls when the writer or the reader
//! ends.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use parking_lot::{Mutex, MutexGuard, RwLock};
use tokio::io::AsyncWriteExt;
use tokio::net::TcpStream;
use tokio::sync::{Semaphore, mpsc, oneshot};
use tokio::task::{AbortHandle, JoinSet};

use super::stream::{FrameReader, Queued, ReadError, Sink, Stream, write_all};
use super::{TcpConfig, host_and_port, process, tune};
use crate::address::Address;
use crate::codec::{DecodedFrame, Frame, FrameRole, Malformed, Outgoing};
use crate::error::{Refusal, WireError};
use crate::metrics::WireCounters;
use crate::progress::{Progress, Stage, back_off};
use crate::tls::is_distrust;
use crate::transport::{BoxFuture, ChannelBackend};

/// The most frames queued for writing on one connection. The calls with further frames wait.
const QUEUE_FRAMES: usize = 64;

/// How long to wait for the other side's reason after writing has failed.
const LAST_WORD: Duration = Duration::from_millis(50);

/// The result that a waiting call receives.
enum Outcome {
    Reply(Frame),
    Refusal(Refusal),
    Malformed(Malformed),
    Lost(Arc<str>),
    Distrusted(Arc<str>),
}

pub(super) struct TcpChannel {
    address: Address,
    config: TcpConfig,
    counters: Arc<WireCounters>,
    /// One permit per call in flight. The semaphore serves waiting callers in order.
    permits: Semaphore,
    /// The next request id. All connections of the channel share it, so that no id is used twice.
    next_id: Arc<AtomicU64>,
    current: RwLock<Option<Arc<Connection>>>,
    /// The call that connects holds this lock. True once there has been a connection.
    connected_before: tokio::sync::Mutex<bool>,
}

impl TcpChannel {
    pub(super) fn new(address: Address, config: TcpConfig, counters: Arc<WireCounters>) -> Self {
        Self {
            address,
            permits: Semaphore::new(config.max_in_flight.clamp(1, Semaphore::MAX_PERMITS)),
            config,
            counters,
            next_id: Arc::new(AtomicU64::new(1)),
            current: RwLock::new(None),
            connected_before: tokio::sync::Mutex::new(false),
        }
    }

    /// Sends the request and waits for its reply.
    async fn exchange(&self, request: Frame, progress: &Progress<'_>) -> Result<Frame, WireError> {
        let _permit = self.permits.acquire().await.map_err(|closed| progress.closed(closed))?;
        let id = self.next_id.fetch_add(1, Ordering::Relaxed);
        let limits = &self.config.limits;
        let mut outgoing = Outgoing::new(FrameRole::Request, id, request, limits)
            .map_err(|malformed| progress.unsendable(malformed))?;
        loop {
            let connection = self.connection(progress).await?;
            let Some(reply) = Waiting::register(&connection.calls, id) else {
                continue;
            };
            progress.enter(Stage::Queue);
            let request = Request { outgoing, calls: connection.calls.clone() };
            if let Err(mpsc::error::SendError(unsent)) = connection.queue.send(request).await {
                // The writer has ended, but the supervisor has not failed the calls yet.
                connection.calls.fail(Ended::lost("the writer has ended"));
                outgoing = unsent.outgoing;
                continue;
            }
            progress.enter(Stage::Reply);
            return match reply.wait().await {
                Outcome::Reply(frame) => Ok(frame),
                Outcome::Refusal(refusal) => Err(progress.refused(refusal)),
                Outcome::Malformed(malformed) => Err(progress.malformed(malformed)),
                Outcome::Lost(reason) => Err(progress.closed(reason)),
                Outcome::Distrusted(reason) => Err(progress.distrusted(reason)),
            };
        }
    }

    /// The current connection, or a new one.
    async fn connection(&self, progress: &Progress<'_>) -> Result<Arc<Connection>, WireError> {
        if let Some(connection) = self.live() {
            return Ok(connection);
        }
        progress.enter(Stage::Connection);
        let mut connected_before = self.connected_before.lock().await;
        if let Some(connection) = self.live() {
            return Ok(connection);
        }
        let (replies, sink) = self.dial(progress).await?;
        let connection = Arc::new(Connection::start(replies, sink, self));
        *self.current.write() = Some(connection.clone());
        if std::mem::replace(&mut *connected_before, true) {
            self.counters.reconnects.inc();
        }
        Ok(connection)
    }

    fn live(&self) -> Option<Arc<Connection>> {
        let current = self.current.read();
        current.as_ref().filter(|connection| connection.calls.is_open()).cloned()
    }

    /// Connects, in as many attempts as fit before the call's deadline.
    async fn dial(&self, progress: &Progress<'_>) -> Result<(FrameReader, Sink), WireError> {
        let endpoint = host_and_port(&self.address)?;
        let mut attempt = 0;
        loop {
            // Each attempt gives the handshake more time than the last one, for peers with slow
            // handshakes. It resolves the name again, because the address may have changed.
            let shaking = self.config.connect_timeout * (1 << attempt.min(2));
            match self.dial_once(endpoint, shaking).await {
                Ok(halves) => return Ok(halves),
                Err(error) => progress.failed_attempt(error),
            }
            let pause = back_off(attempt);
            attempt += 1;
            // Do not pause past the deadline: start the last attempt just before it.
            let left = progress.left().saturating_sub(Duration::from_millis(2));
            tokio::time::sleep(pause.min(left.max(Duration::from_millis(1)))).await;
        }
    }

    async fn dial_once(&self, endpoint: (&str, u16), shaking: Duration) -> std::io::Result<(FrameReader, Sink)> {
        let stream = within(self.config.connect_timeout, TcpStream::connect(endpoint)).await?;
        if is_connected_to_itself(&stream) {
            // Close at once and without lingering, so that the service can bind this port again.
            let _ = socket2::SockRef::from(&stream).set_linger(Some(Duration::ZERO));
            return Err(std::io::Error::other("nothing listens there: the kernel connected the socket to itself"));
        }
        tune(&stream, &self.config)?;
        within(shaking, Box::pin(self.shake_hands(stream))).await
    }

    async fn shake_hands(&self, stream: TcpStream) -> std::io::Result<(FrameReader, Sink)> {
        let stream = match &self.config.credentials {
            Some(credentials) => Stream::Tls(Box::new(credentials.connect(stream).await?.into())),
            None => Stream::Plain(stream),
        };
        let (source, mut sink) = stream.into_halves(self.config.link.as_ref());
        let mut replies = FrameReader::new(source, self.config.limits);
        if let Some(process) = process(&self.address) {
            greet(process, &mut replies, &mut sink).await?;
        }
        Ok((replies, sink))
    }
}

impl ChannelBackend for TcpChannel {
    fn address(&self) -> &Address {
        &self.address
    }

    fn counters(&self) -> &WireCounters {
        &self.counters
    }

    fn ready<'a>(&'a self, progress: &'a Progress<'a>) -> BoxFuture<'a, Result<(), WireError>> {
        Box::pin(async move { self.connection(progress).await.map(drop) })
    }

    fn call<'a>(&'a self, request: Frame, progress: &'a Progress<'a>) -> BoxFuture<'a, Result<Frame, WireError>> {
        Box::pin(self.exchange(request, progress))
    }
}

async fn within<T>(time: Duration, attempt: impl Future<Output = std::io::Result<T>>) -> std::io::Result<T> {
    let no_answer = |_| std::io::Error::new(std::io::ErrorKind::TimedOut, format!("no answer within {time:?}"));
    tokio::time::timeout(time, attempt).await.unwrap_or_else(|late| Err(no_answer(late)))
}

/// Checks that the other end is the expected incarnation. This happens before any request, so that
/// no other process takes a request for its own.
async fn greet(process: u64, replies: &mut FrameReader, sink: &mut Sink) -> std::io::Result<()> {
    sink.write_all(&Outgoing::greeting(process).into_bytes()).await?;
    sink.flush().await?;
    match replies.next().await {
        Ok(DecodedFrame { role: FrameRole::Greeting, request_id, .. }) if request_id == process => Ok(()),
        Ok(DecodedFrame { role: FrameRole::Goodbye, frame, .. }) => {
            Err(std::io::Error::other(format!("the other side said: {}", Refusal::from_bytes(&frame.meta))))
        }
        Ok(_) => Err(std::io::Error::other("the other side did not return the greeting")),
        Err(ReadError::Io(error)) => Err(error),
        Err(ReadError::Ended) => {
            Err(std::io::Error::other("the other side closed the connection instead of returning the greeting"))
        }
        Err(ReadError::Malformed(malformed)) => Err(std::io::Error::other(malformed.to_string())),
    }
}

/// True if the socket is connected to itself (a TCP simultaneous open). That happens when a process
/// dials a dead service on its own machine, and the kernel picks the service's port as the caller's
/// own.
fn is_connected_to_itself(stream: &TcpStream) -> bool {
    matches!((stream.local_addr(), stream.peer_addr()), (Ok(local), Ok(peer)) if local == peer)
}

/// A connection with its tasks. They end when it is dropped.
struct Connection {
    calls: Arc<PendingCalls>,
    queue: mpsc::Sender<Request>,
    supervisor: AbortHandle,
}

impl Connection {
    fn start(reader: FrameReader, sink: Sink, channel: &TcpChannel) -> Self {
        let (queue, requests) = mpsc::channel(QUEUE_FRAMES);
        let calls = Arc::new(PendingCalls::default());
        let replies = Replies {
            reader,
            calls: calls.clone(),
            counters: channel.counters.clone(),
            next_id: channel.next_id.clone(),
            peer: channel.address.to_string(),
        };
        let counters = channel.counters.clone();
        let mut tasks = JoinSet::new();
        tasks.spawn(replies.read());
        tasks.spawn(async move {
            match write_all(requests, sink, &counters).await {
                Ok(()) => Ended::lost("it was closed on this side"),
                Err(error) => Ended::WritingFailed(format!("writing failed: {error}").into()),
            }
        });
        let failing = FailOnDrop(calls.clone());
        let supervisor = tokio::spawn(async move {
            if let Some(Ok(ended)) = tasks.join_next().await {
                let ended = match ended {
                    Ended::WritingFailed(reason) => why(reason, &mut tasks).await,
                    ended => ended,
                };
                failing.0.fail(ended);
            }
        });
        Self { calls, queue, supervisor: supervisor.abort_handle() }
    }
}

/// Returns why the connection ended. If the other side sent a reason before it closed the
/// connection, returns that reason instead of the writer's.
async fn why(writing_failed: Arc<str>, tasks: &mut JoinSet<Ended>) -> Ended {
    match tokio::time::timeout(LAST_WORD, tasks.join_next()).await {
        Ok(Some(Ok(said @ (Ended::Distrusted(_) | Ended::Malformed(_))))) => said,
        _ => Ended::Lost(writing_failed),
    }
}

/// Fails the waiting calls when the supervisor ends for any reason. For example, the runtime of the
/// connection's tasks may shut down before the channel is dropped.
struct FailOnDrop(Arc<PendingCalls>);

impl Drop for FailOnDrop {
    fn drop(&mut self) {
        self.0.fail(Ended::lost("the tasks of the connection were stopped"));
    }
}

impl Drop for Connection {
    fn drop(&mut self) {
        self.supervisor.abort();
    }
}

/// Why a connection ended.
#[derive(Clone)]
enum Ended {
    Lost(Arc<str>),
    /// The other side is gone, or does not read.
    WritingFailed(Arc<str>),
    Distrusted(Arc<str>),
    Malformed(Malformed),
}

impl Ended {
    fn lost(reason: impl Into<Arc<str>>) -> Self {
        Self::Lost(reason.into())
    }

    /// In TLS 1.3 the client finishes its handshake before the server checks the client's
    /// certificate. So the alert of a refused certificate arrives at the first read.
    fn reading_failed(error: &std::io::Error) -> Self {
        if is_distrust(error) {
            return Self::Distrusted(error.to_string().into());
        }
        Self::lost(format!("reading failed: {error}"))
    }
}

/// The calls of one connection that wait for their reply, by request id.
#[derive(Default)]
struct PendingCalls(Mutex<Pending>);

#[derive(Default)]
struct Pending {
    calls: HashMap<u64, oneshot::Sender<Outcome>>,
    ended: bool,
}

impl PendingCalls {
    fn lock(&self) -> MutexGuard<'_, Pending> {
        self.0.lock()
    }

    fn is_open(&self) -> bool {
        !self.lock().ended
    }

    fn take(&self, id: u64) -> Option<oneshot::Sender<Outcome>> {
        self.lock().calls.remove(&id)
    }

    fn contains(&self, id: u64) -> bool {
        self.lock().calls.contains_key(&id)
    }

    /// Fails all waiting calls and accepts no further ones. Only the first failure counts.
    fn fail(&self, ended: Ended) {
        let calls = {
            let mut pending = self.lock();
            pending.ended = true;
            std::mem::take(&mut pending.calls)
        };
        for call in calls.into_values() {
            let outcome = match &ended {
                Ended::Malformed(malformed) => Outcome::Malformed(malformed.clone()),
                Ended::Lost(reason) | Ended::WritingFailed(reason) => Outcome::Lost(Arc::clone(reason)),
                Ended::Distrusted(reason) => Outcome::Distrusted(Arc::clone(reason)),
            };
            // The send fails if the call was dropped meanwhile. That is fine.
            let _ = call.send(outcome);
        }
    }
}

/// A call's entry among the waiting calls. Dropping it removes the entry.
struct Waiting<'a> {
    calls: &'a PendingCalls,
    id: u64,
    reply: oneshot::Receiver<Outcome>,
}

impl<'a> Waiting<'a> {
    /// `None` if the connection has ended.
    fn register(calls: &'a PendingCalls, id: u64) -> Option<Self> {
        let (sender, reply) = oneshot::channel();
        let mut pending = calls.lock();
        if pending.ended {
            return None;
        }
        pending.calls.insert(id, sender);
        Some(Self { calls, id, reply })
    }

    async fn wait(mut self) -> Outcome {
        match (&mut self.reply).await {
            Ok(outcome) => outcome,
            Err(_) => Outcome::Lost("the connection was dropped".into()),
        }
    }
}

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        self.calls.take(self.id);
    }
}

/// A request in the writer's queue.
struct Request {
    outgoing: Outgoing,
    calls: Arc<PendingCalls>,
}

impl Queued for Request {
    fn outgoing(&mut self) -> &mut Outgoing {
        &mut self.outgoing
    }

    fn as_outgoing(&self) -> &Outgoing {
        &self.outgoing
    }

    fn is_abandoned(&self) -> bool {
        !self.calls.contains(self.outgoing.request_id())
    }
}

/// The reading task of a connection.
struct Replies {
    reader: FrameReader,
    calls: Arc<PendingCalls>,
    counters: Arc<WireCounters>,
    next_id: Arc<AtomicU64>,
    peer: String,
}

impl Replies {
    async fn read(mut self) -> Ended {
        loop {
            let taken = match self.reader.next().await {
                Ok(reply) => self.take(reply),
                Err(ReadError::Ended) => Err(Ended::lost("the other side closed it")),
                Err(ReadError::Io(error)) => Err(Ended::reading_failed(&error)),
                // The peer died while it sent a frame. That is a lost connection, not a malformed
                // frame.
                Err(ReadError::Malformed(Malformed::Truncated)) => {
                    Err(Ended::lost("the other side closed it in the middle of a frame"))
                }
                Err(ReadError::Malformed(malformed)) => Err(self.refuse(malformed)),
            };
            if let Err(ended) = taken {
                return ended;
            }
        }
    }

    fn take(&self, reply: DecodedFrame) -> Result<(), Ended> {
        let DecodedFrame { role, request_id, frame, bytes } = reply;
        self.counters.received(frame.kind, bytes);
        let outcome = match role {
            FrameRole::Reply => Outcome::Reply(frame),
            FrameRole::Refusal => Outcome::Refusal(Refusal::from_bytes(&frame.meta)),
            FrameRole::Goodbye => {
                let goodbye = Refusal::from_bytes(&frame.meta);
                return Err(Ended::lost(format!("the other side said: {goodbye}")));
            }
            FrameRole::Request | FrameRole::Greeting => {
                return Err(self.refuse(Malformed::Unexpected { role, request_id }));
            }
        };
        if request_id == 0 || request_id >= self.next_id.load(Ordering::Relaxed) {
            return Err(self.refuse(Malformed::Unexpected { role, request_id }));
        }
        let late = match self.calls.take(request_id) {
            Some(call) => call.send(outcome).is_err(),
            None => true,
        };
        if late {
            self.counters.late_replies.inc();
        }
        Ok(())
    }

    fn refuse(&self, malformed: Malformed) -> Ended {
        self.counters.refused_frame(&malformed);
        tracing::warn!(peer = self.peer, reason = malformed.reason(), "closing a connection: {malformed}");
        Ended::Malformed(malformed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_connection_to_itself_is_recognised() {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let served = TcpStream::connect(address).await.unwrap();
        assert!(!is_connected_to_itself(&served));
        drop((served, listener));

        let socket = tokio::net::TcpSocket::new_v4().unwrap();
        socket.set_reuseaddr(true).unwrap();
        socket.bind(address).unwrap();
        let own = socket.connect(address).await.unwrap();
        assert!(is_connected_to_itself(&own));
    }
}

//! What both transports have in common: services, channels to them, and the promises they keep.
//! Roles program against this module only.
//!
//! **Calls.** Many calls share a channel, each with its deadline. A call that is dropped or whose
//! deadline passes frees its place at once; what the callee still answers is thrown away and
//! counted. Dropping a call does not stop the callee: a handler once started runs to its end
//! (unless its [`Serving`] is dropped), so it may take locks across awaits and need not be
//! cancel-safe.
//!
//! **Back-pressure.** A channel has at most `max_in_flight` calls; further ones wait, within
//! their deadlines. A service handles at most `max_concurrent` requests of one connection (a
//! channel, in process) at a time, unsent replies included; then it stops reading, the sockets
//! fill, and senders wait. Nothing is queued without bound on either side.
//!
//! **Handlers that wait for one another** (a barrier, an all-reduce) hold their places while they
//! wait. If as many wait as there are places on a connection, the request they wait for is never
//! read. So `max_concurrent` must be greater than the number of requests that can wait at one time
//! *on one connection* for others that come on the same connection; the default of 1,024 allows
//! 1,023. Requests on different connections never take one another's places.
//!
//! **Panics** in a handler are caught: the caller gets a refusal with the code `Internal`, and
//! the connection goes on.

use std::fmt;
use std::future::{Future, poll_fn};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::Pin;
use std::sync::Arc;
use std::task::Poll;
use std::time::Duration;

use tokio::time::Instant;

use crate::address::Address;
use crate::codec::Frame;
use crate::error::{Refusal, RefusalCode, WireError};
use crate::local::{LocalChannel, LocalServing};
use crate::metrics::{InFlight, WireCounters};
use crate::tcp::{TcpChannel, TcpServing};

/// A future on the heap.
pub type BoxFuture<'a, T> = Pin<Box<dyn Future<Output = T> + Send + 'a>>;

/// Who sent a request.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Peer {
    name: Arc<str>,
    connection: u64,
}

impl Peer {
    /// A caller called `name`, on the connection of this number.
    pub fn new(name: impl Into<Arc<str>>, connection: u64) -> Self {
        Self { name: name.into(), connection }
    }

    /// The number of the connection among those of this service: requests of one channel carry
    /// one number until it reconnects.
    pub fn connection(&self) -> u64 {
        self.connection
    }
}

impl fmt::Display for Peer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.name)
    }
}

/// What answers requests. Requests of one connection are handled concurrently and may be
/// answered in any order.
pub trait Service: Send + Sync + 'static {
    /// Answers a request, or refuses it.
    fn call<'a>(&'a self, peer: &'a Peer, request: Frame) -> BoxFuture<'a, Result<Frame, Refusal>>;
}

/// A way to carry frames.
pub trait Transport: Send + Sync + 'static {
    /// Serves at an address until the [`Serving`] is dropped. Must be called inside a tokio
    /// runtime, on which the service then runs. With `tcp://host:0` any free port is taken:
    /// [`Serving::address`] has it.
    fn serve(&self, service: Arc<dyn Service>, bind: &Address) -> Result<Serving, WireError>;

    /// A channel to an address. No connection is made yet: the first call makes it (or
    /// [`Channel::ready`]), and waits for a service that is not there yet.
    fn connect(&self, address: &Address) -> Result<Channel, WireError>;
}

/// A service that is being served. Dropping it stops it at once: connections are closed, handlers
/// are dropped at their next await, callers get [`WireError::Closed`].
pub struct Serving {
    address: Address,
    kind: ServingKind,
}

pub(crate) enum ServingKind {
    Tcp(TcpServing),
    Local(LocalServing),
}

impl Serving {
    pub(crate) fn new(address: Address, kind: ServingKind) -> Self {
        Self { address, kind }
    }

    /// Where it can be reached; for TCP, the host that was given and the port that was taken.
    pub fn address(&self) -> &Address {
        &self.address
    }

    /// Takes no more requests, lets those being handled finish and their replies go out, for at
    /// most `grace`; then stops like a drop. True if all had finished by then.
    pub async fn stop(self, grace: Duration) -> bool {
        match self.kind {
            ServingKind::Tcp(serving) => serving.stop(grace).await,
            ServingKind::Local(serving) => serving.stop(grace).await,
        }
    }
}

impl fmt::Debug for Serving {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Serving({})", self.address)
    }
}

/// A way to call one service. Cheap to clone: clones share one connection and its places. Calls
/// are made inside a tokio runtime, which carries the connection's tasks; they end when the last
/// clone is dropped.
#[derive(Clone)]
pub struct Channel(pub(crate) ChannelKind);

#[derive(Clone)]
pub(crate) enum ChannelKind {
    Tcp(Arc<TcpChannel>),
    Local(Arc<LocalChannel>),
}

impl Channel {
    /// Sends a request and waits for its reply, at most `deadline`. A lost connection is made
    /// anew by the next call; a call that may have been sent is never sent twice.
    pub async fn call(&self, request: Frame, deadline: Duration) -> Result<Frame, WireError> {
        let (address, counters) = self.parts();
        let kind = request.kind;
        let progress = Progress::new(address, counters, Some(kind), deadline);
        let _in_flight = InFlight::enter(&counters.calls_in_flight);
        let result = match &self.0 {
            ChannelKind::Tcp(channel) => progress.within(channel.call(request, &progress)).await,
            ChannelKind::Local(channel) => progress.within(channel.call(request, &progress)).await,
        };
        counters.called(kind, progress.started.elapsed(), result.as_ref().err());
        result
    }

    /// Waits until there is a connection, at most `deadline`.
    pub async fn ready(&self, deadline: Duration) -> Result<(), WireError> {
        let (address, counters) = self.parts();
        let progress = Progress::new(address, counters, None, deadline);
        match &self.0 {
            ChannelKind::Tcp(channel) => progress.within(channel.ready(&progress)).await,
            ChannelKind::Local(channel) => progress.within(channel.ready(&progress)).await,
        }
    }

    /// The address that is called.
    pub fn address(&self) -> &Address {
        self.parts().0
    }

    fn parts(&self) -> (&Address, &WireCounters) {
        match &self.0 {
            ChannelKind::Tcp(channel) => channel.parts(),
            ChannelKind::Local(channel) => channel.parts(),
        }
    }
}

impl fmt::Debug for Channel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Channel({})", self.address())
    }
}

/// How far a call has come: what its errors say.
pub(crate) struct Progress<'a> {
    address: &'a Address,
    counters: &'a WireCounters,
    kind: Option<u16>,
    deadline: Duration,
    started: Instant,
    state: std::sync::Mutex<State>,
}

#[derive(Clone, Default)]
struct State {
    stage: Stage,
    attempts: u32,
    last_failure: Option<String>,
}

/// What a call is waiting for.
#[derive(Clone, Copy, Default, PartialEq, Eq)]
pub(crate) enum Stage {
    #[default]
    Place,
    Connection,
    Queue,
    Reply,
}

impl<'a> Progress<'a> {
    fn new(address: &'a Address, counters: &'a WireCounters, kind: Option<u16>, deadline: Duration) -> Self {
        let started = Instant::now();
        Self { address, counters, kind, deadline, started, state: std::sync::Mutex::default() }
    }

    pub(crate) fn enter(&self, stage: Stage) {
        self.update(|state| state.stage = stage);
    }

    /// Notes a failed attempt to connect.
    pub(crate) fn failed_attempt(&self, failure: impl fmt::Display) {
        self.update(|state| {
            state.attempts += 1;
            state.last_failure = Some(failure.to_string());
        });
    }

    /// Time left until the deadline.
    pub(crate) fn left(&self) -> Duration {
        self.deadline.saturating_sub(self.started.elapsed())
    }

    pub(crate) fn closed(&self, reason: impl fmt::Display) -> WireError {
        WireError::Closed { peer: self.address.to_string(), attempted: self.attempted(), reason: reason.to_string() }
    }

    pub(crate) fn distrusted(&self, reason: impl fmt::Display) -> WireError {
        WireError::Distrusted {
            peer: self.address.to_string(),
            attempted: self.attempted(),
            reason: reason.to_string(),
        }
    }

    pub(crate) fn refused(&self, refusal: Refusal) -> WireError {
        WireError::Refused { peer: self.address.to_string(), attempted: self.attempted(), refusal }
    }

    pub(crate) fn unsendable(&self, malformed: crate::codec::Malformed) -> WireError {
        WireError::Unsendable { peer: self.address.to_string(), attempted: self.attempted(), malformed }
    }

    pub(crate) fn malformed(&self, malformed: crate::codec::Malformed) -> WireError {
        WireError::Malformed { peer: self.address.to_string(), malformed }
    }

    async fn within<T>(&self, call: impl Future<Output = Result<T, WireError>>) -> Result<T, WireError> {
        match tokio::time::timeout(self.deadline, call).await {
            Ok(result) => result,
            Err(_) => Err(self.out_of_time()),
        }
    }

    fn out_of_time(&self) -> WireError {
        let state = self.state.lock().unwrap_or_else(|poisoned| poisoned.into_inner()).clone();
        let (peer, attempted) = (self.address.to_string(), self.attempted());
        let after = self.deadline;
        match (state.stage, state.last_failure) {
            (Stage::Connection, Some(last)) => {
                WireError::Unreachable { peer, attempted, after, attempts: state.attempts, last }
            }
            (stage, _) => {
                let stage = match stage {
                    Stage::Place => "waiting for one of the channel's places in flight",
                    Stage::Connection => "connecting",
                    Stage::Queue => "waiting for earlier frames to be sent",
                    Stage::Reply => "waiting for the reply",
                };
                WireError::Deadline { peer, attempted, after, stage }
            }
        }
    }

    fn attempted(&self) -> String {
        match self.kind {
            Some(kind) => format!("call {:?}", self.counters.kind_name(kind)),
            None => "connect".to_owned(),
        }
    }

    fn update(&self, change: impl FnOnce(&mut State)) {
        change(&mut self.state.lock().unwrap_or_else(|poisoned| poisoned.into_inner()));
    }
}

/// Runs a handler; a panic in it becomes an internal refusal.
pub(crate) async fn answer(
    service: &dyn Service,
    peer: &Peer,
    request: Frame,
    counters: &WireCounters,
) -> Result<Frame, Refusal> {
    let _in_flight = InFlight::enter(&counters.requests_in_flight);
    let kind = counters.kind_name(request.kind);
    let result = match caught(|| service.call(peer, request)) {
        Ok(mut handler) => {
            poll_fn(|context| match caught(|| handler.as_mut().poll(context)) {
                Ok(poll) => poll,
                Err(refusal) => Poll::Ready(Err(refusal)),
            })
            .await
        }
        Err(refusal) => Err(refusal),
    };
    if let Err(refusal) = &result {
        counters.refused_request(refusal.code);
        if refusal.message.starts_with(PANICKED) {
            counters.handler_panics.inc();
            tracing::error!(%peer, kind, "{}", refusal.message);
        }
    }
    result
}

const PANICKED: &str = "the handler panicked";

/// A service is behind a shared reference and a panicking handler is never polled again, so what
/// a panic leaves half-done is only what the service itself guards with its locks.
fn caught<T>(run: impl FnOnce() -> T) -> Result<T, Refusal> {
    catch_unwind(AssertUnwindSafe(run)).map_err(|panic| {
        let text = panic
            .downcast_ref::<&str>()
            .map(|text| (*text).to_owned())
            .or_else(|| panic.downcast_ref::<String>().cloned())
            .unwrap_or_else(|| "no message".to_owned());
        Refusal::new(RefusalCode::Internal, format!("{PANICKED}: {text}"))
    })
}

/// The pause before attempt number `attempt` (from 0) to connect: 5 ms, doubling up to 500 ms.
pub(crate) fn back_off(attempt: u32) -> Duration {
    Duration::from_millis((5u64 << attempt.min(10)).min(500))
}

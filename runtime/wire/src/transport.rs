//! Services, the channels to them, and the guarantees of every transport. Roles program against
//! this module only.
//!
//! **Calls.** Many calls share a channel, each with its own deadline. A call that is dropped, or
//! that misses its deadline, releases its permit at once; a reply that still arrives is discarded
//! and counted. Dropping a call does not stop the callee. A handler that has started runs to its
//! end unless its [`Serving`] is dropped. So it may hold locks across awaits and need not be
//! cancel-safe.
//!
//! **Back-pressure.** A channel has at most `max_in_flight` calls; further calls wait, within their
//! deadlines. A service handles at most `max_concurrent` requests of one connection at a time,
//! unsent replies included (in process: of one channel). Beyond that it stops reading, the sockets
//! fill up, and senders wait. Neither side queues without bound.
//!
//! **Handlers that wait for one another** (a barrier, an all-reduce) hold their permits while they
//! wait. If they hold every permit of a connection, the service never reads the request they wait
//! for. So `max_concurrent` must be greater than the number of requests that can wait at one time
//! *on one connection* for others on the same connection. The default of 1,024 allows 1,023.
//! Requests on different connections never take one another's permits.
//!
//! **Panics** in a handler are caught: the caller gets a refusal with the code `Internal`, and
//! the connection stays open.

use std::fmt;
use std::future::{Future, poll_fn};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::Pin;
use std::sync::Arc;
use std::task::Poll;
use std::time::Duration;

use crate::address::Address;
use crate::codec::Frame;
use crate::error::{Refusal, RefusalCode, WireError};
use crate::metrics::{InFlight, WireCounters};
use crate::progress::Progress;

/// A future on the heap.
pub type BoxFuture<'a, T> = Pin<Box<dyn Future<Output = T> + Send + 'a>>;

/// The sender of a request.
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

    /// The number of the connection, unique within the service. All requests of a channel carry
    /// the same number until it reconnects.
    pub fn connection(&self) -> u64 {
        self.connection
    }
}

impl fmt::Display for Peer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.name)
    }
}

/// A handler of requests. It handles the requests of one connection concurrently, and may reply
/// in any order.
pub trait Service: Send + Sync + 'static {
    /// Answers a request, or refuses it.
    fn call<'a>(&'a self, peer: &'a Peer, request: Frame) -> BoxFuture<'a, Result<Frame, Refusal>>;
}

/// A way to carry frames.
pub trait Transport: Send + Sync + 'static {
    /// Serves at an address until the [`Serving`] is dropped. Must be called inside a tokio
    /// runtime, which then runs the service. `tcp://host:0` binds any free port:
    /// [`Serving::address`] has it.
    fn serve(&self, service: Arc<dyn Service>, bind: &Address) -> Result<Serving, WireError>;

    /// A channel to an address, not connected yet. The first call (or [`Channel::ready`]) connects,
    /// and waits for a service that is not up yet.
    fn connect(&self, address: &Address) -> Result<Channel, WireError>;
}

/// A running service. Dropping it stops it at once: connections close, handlers are dropped at
/// their next await, and callers get [`WireError::Closed`].
pub struct Serving {
    address: Address,
    backend: Box<dyn ServingBackend>,
}

/// The serving half of a transport, behind a [`Serving`]. Dropping it stops the service.
pub(crate) trait ServingBackend: Send + Sync {
    /// Accepts no further requests, and waits up to `grace` for the handlers and their replies.
    /// True if all of them finished in time.
    fn stop(self: Box<Self>, grace: Duration) -> BoxFuture<'static, bool>;
}

impl Serving {
    pub(crate) fn new(address: Address, backend: impl ServingBackend + 'static) -> Self {
        Self { address, backend: Box::new(backend) }
    }

    /// The address of the service: for TCP, the given host and the port that was bound.
    pub fn address(&self) -> &Address {
        &self.address
    }

    /// Accepts no further requests, and lets running handlers finish and send their replies, for
    /// at most `grace`. Then stops as a drop does. True if all handlers finished in time.
    pub async fn stop(self, grace: Duration) -> bool {
        self.backend.stop(grace).await
    }
}

impl fmt::Debug for Serving {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Serving({})", self.address)
    }
}

/// A way to call one service. Cheap to clone: clones share one connection and its permits. Calls
/// must be made inside a tokio runtime, which runs the connection's tasks. These end when the last
/// clone is dropped.
#[derive(Clone)]
pub struct Channel(Arc<dyn ChannelBackend>);

/// The calling half of a transport, behind a [`Channel`]. The channel enforces the deadline: it
/// drops the futures of this trait when the deadline passes.
pub(crate) trait ChannelBackend: Send + Sync {
    /// The address that is called.
    fn address(&self) -> &Address;

    /// The counters of the transport.
    fn counters(&self) -> &WireCounters;

    /// Waits until there is a connection.
    fn ready<'a>(&'a self, progress: &'a Progress<'a>) -> BoxFuture<'a, Result<(), WireError>>;

    /// Sends a request, once at most, and waits for its reply.
    fn call<'a>(&'a self, request: Frame, progress: &'a Progress<'a>) -> BoxFuture<'a, Result<Frame, WireError>>;
}

impl Channel {
    pub(crate) fn new(backend: impl ChannelBackend + 'static) -> Self {
        Self(Arc::new(backend))
    }

    /// Sends a request and waits for its reply, for at most `deadline`. After a lost connection
    /// the next call reconnects. A call that may have been sent is never sent twice.
    pub async fn call(&self, request: Frame, deadline: Duration) -> Result<Frame, WireError> {
        let counters = self.0.counters();
        let kind = request.kind;
        let progress = Progress::new(self.address(), counters, Some(kind), deadline);
        let _in_flight = InFlight::enter(&counters.calls_in_flight);
        let result = progress.within(self.0.call(request, &progress)).await;
        counters.called(kind, progress.elapsed(), result.as_ref().err());
        result
    }

    /// Waits until there is a connection, for at most `deadline`.
    pub async fn ready(&self, deadline: Duration) -> Result<(), WireError> {
        let progress = Progress::new(self.address(), self.0.counters(), None, deadline);
        progress.within(self.0.ready(&progress)).await
    }

    /// The address that is called.
    pub fn address(&self) -> &Address {
        self.0.address()
    }
}

impl fmt::Debug for Channel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Channel({})", self.address())
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

/// Turns a panic into a refusal. The service is behind a shared reference, and the caller never
/// polls a panicked handler again. So a panic can only leave state half-changed that the service
/// itself guards with locks.
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

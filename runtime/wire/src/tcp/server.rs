//! The serving side: a task accepts connections, a task for each reads requests and starts their
//! handlers, one more writes what they answer. A place is taken before a request is read and
//! given back when its reply has been written: that bounds memory and makes the sender wait.

use std::net::{TcpListener as StdListener, ToSocketAddrs};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use tokio::net::{TcpListener, TcpStream};
use tokio::runtime::Handle;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc, watch};
use tokio::task::{JoinHandle, JoinSet};

use super::stream::{FrameReader, Queued, ReadError, Stream, write_all};
use super::{TcpConfig, process, tune};
use crate::address::{Address, listening_at};
use crate::codec::{DecodedFrame, Frame, FrameRole, Limits, Malformed, Outgoing};
use crate::error::{Refusal, RefusalCode, WireError};
use crate::metrics::WireCounters;
use crate::transport::{Peer, Service, answer};

/// How long a refused peer may take to read why before the connection is closed.
const LINGER: Duration = Duration::from_millis(250);
/// The pause after accepting failed (out of file descriptors, most likely).
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);

/// How often the log tells of refused strangers at most: whoever reaches the port can make as many as it likes.
const STRANGERS_TOLD_EVERY: Duration = Duration::from_secs(1);

/// What all connections of one service share.
struct Shared {
    service: Arc<dyn Service>,
    config: TcpConfig,
    counters: Arc<WireCounters>,
    /// The number of this process, if whoever connects may mean another.
    process: Option<u64>,
    stopping: watch::Receiver<bool>,
    /// When a refused stranger was told of last.
    told_of_a_stranger: Mutex<Option<Instant>>,
}

impl Shared {
    /// Every stranger is counted; of many that come at once the log has one.
    fn tells_of_a_stranger(&self) -> bool {
        let mut told = self.told_of_a_stranger.lock().unwrap_or_else(PoisonError::into_inner);
        let is_due = told.is_none_or(|told| told.elapsed() >= STRANGERS_TOLD_EVERY);
        if is_due {
            *told = Some(Instant::now());
        }
        is_due
    }
}

/// The accepting task, which owns all others: they end when it is dropped.
pub(crate) struct TcpServing {
    stop: watch::Sender<bool>,
    accepting: JoinHandle<()>,
}

impl TcpServing {
    /// Binds and starts; also gives the port.
    pub(super) fn start(
        service: Arc<dyn Service>,
        endpoint: (&str, u16),
        address: &Address,
        config: TcpConfig,
        counters: Arc<WireCounters>,
    ) -> Result<(Self, u16), WireError> {
        let runtime = Handle::try_current().map_err(|_| WireError::NoRuntime { address: address.to_string() })?;
        let _inside = runtime.enter();
        let (listener, port) =
            bind(endpoint).map_err(|source| WireError::Bind { address: address.to_string(), source })?;
        let (stop, stopping) = watch::channel(false);
        let told_of_a_stranger = Mutex::default();
        let process = process(address);
        let shared = Arc::new(Shared { service, config, counters, process, stopping, told_of_a_stranger });
        let accepting = runtime.spawn(accept(listener, shared));
        Ok((Self { stop, accepting }, port))
    }

    pub(crate) async fn stop(mut self, grace: Duration) -> bool {
        // The accepting task holds a receiver as long as it lives.
        let _ = self.stop.send(true);
        tokio::time::timeout(grace, &mut self.accepting).await.is_ok()
    }
}

impl Drop for TcpServing {
    fn drop(&mut self) {
        self.accepting.abort();
    }
}

fn bind(endpoint: (&str, u16)) -> std::io::Result<(TcpListener, u16)> {
    let addresses: Vec<_> = endpoint.to_socket_addrs()?.flat_map(listening_at).collect();
    let listener = StdListener::bind(&addresses[..])?;
    listener.set_nonblocking(true)?;
    let port = listener.local_addr()?.port();
    Ok((TcpListener::from_std(listener)?, port))
}

async fn accept(listener: TcpListener, shared: Arc<Shared>) {
    let most = shared.config.max_connections.clamp(1, Semaphore::MAX_PERMITS);
    let places = Arc::new(Semaphore::new(most));
    let mut connections = JoinSet::new();
    let mut stopping = shared.stopping.clone();
    for number in 1.. {
        let accepted = tokio::select! {
            accepted = next_connection(&listener, &places) => accepted,
            _ = stopping.wait_for(|stop| *stop) => break,
        };
        while connections.try_join_next().is_some() {}
        match accepted {
            Ok((stream, name, place)) => {
                let shared = shared.clone();
                connections.spawn(async move {
                    serve_connection(stream, Peer::new(name, number), shared).await;
                    drop(place);
                });
            }
            Err(error) => {
                tracing::warn!("could not accept a connection: {error}");
                tokio::time::sleep(ACCEPT_PAUSE).await;
            }
        }
    }
    drop(listener);
    while connections.join_next().await.is_some() {}
}

async fn next_connection(
    listener: &TcpListener,
    places: &Arc<Semaphore>,
) -> std::io::Result<(TcpStream, String, OwnedSemaphorePermit)> {
    let place = places.clone().acquire_owned().await.map_err(std::io::Error::other)?;
    let (stream, from) = listener.accept().await?;
    Ok((stream, format!("tcp://{from}"), place))
}

/// A reply in the writer's queue, with the place its request has taken.
struct Reply {
    outgoing: Outgoing,
    _place: Option<OwnedSemaphorePermit>,
}

impl Queued for Reply {
    fn outgoing(&mut self) -> &mut Outgoing {
        &mut self.outgoing
    }

    fn as_outgoing(&self) -> &Outgoing {
        &self.outgoing
    }

    fn is_given_up(&self) -> bool {
        false
    }
}

async fn serve_connection(stream: TcpStream, peer: Peer, shared: Arc<Shared>) {
    if let Err(error) = tune(&stream, &shared.config) {
        tracing::debug!(%peer, "could not tune a connection: {error}");
    }
    let Some(stream) = known(stream, &peer, &shared).await else { return };
    let (read, write) = stream.into_halves();
    // One more than there are places, for the goodbye: sending into the queue never waits.
    let most = shared.config.max_concurrent.clamp(1, Semaphore::MAX_PERMITS - 1);
    let (queue, replies) = mpsc::channel(most + 1);
    let mut writer = JoinSet::new();
    let counters = shared.counters.clone();
    writer.spawn(async move { write_all(replies, write, &counters).await });

    let mut requests = Requests {
        reader: FrameReader::new(read, shared.config.limits),
        places: Arc::new(Semaphore::new(most)),
        handlers: JoinSet::new(),
        queue: queue.clone(),
        peer: peer.clone(),
        shared: shared.clone(),
    };
    let mut stopping = shared.stopping.clone();
    let refused = tokio::select! {
        refused = requests.read() => refused,
        _ = writer.join_next() => None,
        _ = stopping.wait_for(|stop| *stop) => None,
    };
    match &refused {
        Some(Refused::Malformed(malformed)) => {
            shared.counters.refused_frame(malformed);
            tracing::warn!(%peer, reason = malformed.reason(), "closing a connection: {malformed}");
        }
        Some(Refused::Greeting) => {
            shared.counters.refused_greetings.inc();
            tracing::debug!(%peer, "closing a connection: it is meant for another process");
        }
        None => {}
    }
    let Requests { mut reader, mut handlers, queue: handlers_queue, .. } = requests;
    drop(handlers_queue);
    while handlers.join_next().await.is_some() {}
    if let Some(refused) = &refused {
        let _ = queue.send(Reply { outgoing: goodbye(refused), _place: None }).await;
    }
    drop(queue);
    while writer.join_next().await.is_some() {}
    if refused.is_some() {
        let _ = tokio::time::timeout(LINGER, reader.drain()).await;
    }
}

/// The connection, if whoever made it may.
async fn known(stream: TcpStream, peer: &Peer, shared: &Shared) -> Option<Stream> {
    let Some(credentials) = &shared.config.credentials else { return Some(Stream::Plain(stream)) };
    let mut stopping = shared.stopping.clone();
    let accepted = tokio::select! {
        accepted = credentials.accept(stream) => accepted,
        _ = stopping.wait_for(|stop| *stop) => return None,
    };
    match accepted {
        Ok(stream) => Some(Stream::Tls(Box::new(stream.into()))),
        Err(stranger) => {
            shared.counters.refused_stranger(&stranger);
            if shared.tells_of_a_stranger() {
                tracing::warn!(%peer, reason = stranger.reason, "refused a connection: {stranger}");
            }
            None
        }
    }
}

/// Why a connection is closed on this side.
enum Refused {
    Malformed(Malformed),
    /// It is meant for another process.
    Greeting,
}

fn goodbye(refused: &Refused) -> Outgoing {
    let refusal = match refused {
        Refused::Malformed(malformed) => {
            Refusal::new(RefusalCode::InvalidRequest, format!("a frame was refused: {malformed}"))
        }
        Refused::Greeting => Refusal::new(RefusalCode::NotFound, "this is another process than the one meant"),
    };
    Outgoing::refusal(FrameRole::Goodbye, 0, 0, &refusal)
}

/// The reading side of a connection.
struct Requests {
    reader: FrameReader,
    places: Arc<Semaphore>,
    handlers: JoinSet<()>,
    queue: mpsc::Sender<Reply>,
    peer: Peer,
    shared: Arc<Shared>,
}

impl Requests {
    /// Reads requests and starts their handlers until the peer ends the connection, or sends what
    /// must be refused.
    async fn read(&mut self) -> Option<Refused> {
        loop {
            let place = self.places.clone().acquire_owned().await.ok()?;
            let DecodedFrame { role, request_id, frame, bytes } = match self.reader.next().await {
                Ok(request) => request,
                Err(ReadError::Ended) => return None,
                Err(ReadError::Malformed(malformed)) => return Some(Refused::Malformed(malformed)),
                Err(ReadError::Io(error)) => {
                    tracing::debug!(peer = %self.peer, "a connection was lost: {error}");
                    return None;
                }
            };
            if role != FrameRole::Greeting {
                self.shared.counters.received(frame.kind, bytes);
            }
            match role {
                FrameRole::Request => {}
                FrameRole::Greeting if self.shared.process == Some(request_id) => {
                    let _ =
                        self.queue.send(Reply { outgoing: Outgoing::greeting(request_id), _place: Some(place) }).await;
                    continue;
                }
                FrameRole::Greeting => return Some(Refused::Greeting),
                _ => return Some(Refused::Malformed(Malformed::Unexpected { role, request_id })),
            }
            while self.handlers.try_join_next().is_some() {}
            let (shared, peer) = (self.shared.clone(), self.peer.clone());
            let queue = self.queue.clone();
            self.handlers.spawn(async move {
                let kind = frame.kind;
                let result = answer(&*shared.service, &peer, frame, &shared.counters).await;
                let outgoing = reply_to(kind, request_id, result, &shared.config.limits);
                // If the connection is gone nobody waits for the reply.
                let _ = queue.send(Reply { outgoing, _place: Some(place) }).await;
            });
        }
    }
}

/// The reply as it goes out; one that breaks the limits becomes a refusal that says so.
fn reply_to(kind: u16, request_id: u64, result: Result<Frame, Refusal>, limits: &Limits) -> Outgoing {
    let reply = result.and_then(|frame| {
        Outgoing::new(FrameRole::Reply, request_id, frame, limits)
            .map_err(|malformed| Refusal::new(RefusalCode::Internal, format!("the reply cannot be sent: {malformed}")))
    });
    reply.unwrap_or_else(|refusal| Outgoing::refusal(FrameRole::Refusal, kind, request_id, &refusal))
}

//! The serving side. One task accepts connections. Each connection has a task that reads requests
//! and starts their handlers, and a task that writes the replies. The reader takes a permit before
//! it reads a request; the writer releases it after the reply. That bounds memory and makes the
//! sender wait.

use std::net::{TcpListener as StdListener, ToSocketAddrs};
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use tokio::net::{TcpListener, TcpStream};
use tokio::runtime::Handle;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc, watch};
use tokio::task::{JoinHandle, JoinSet};

use super::stream::{FrameReader, Queued, ReadError, Stream, write_all};
use super::{TcpConfig, host_and_port, process, tune};
use crate::address::{Address, listening_at};
use crate::codec::{DecodedFrame, Frame, FrameRole, Limits, Malformed, Outgoing};
use crate::error::{Refusal, RefusalCode, WireError};
use crate::metrics::WireCounters;
use crate::transport::{BoxFuture, Peer, Service, ServingBackend, answer};

/// How long a refused peer may take to read the reason before the connection is closed.
const LINGER: Duration = Duration::from_millis(250);
/// The pause after a failed accept. The usual cause is that the process is out of file descriptors.
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);

/// The shortest time between two log lines about refused strangers. Any host that reaches the port
/// can cause as many refusals as it likes.
const STRANGER_LOG_INTERVAL: Duration = Duration::from_secs(1);

/// State shared by all connections of one service.
struct Shared {
    service: Arc<dyn Service>,
    config: TcpConfig,
    counters: Arc<WireCounters>,
    /// The incarnation of this process, if callers may address a particular one.
    process: Option<u64>,
    stopping: watch::Receiver<bool>,
    /// The time of the last log line about a refused stranger.
    stranger_logged: Mutex<Option<Instant>>,
}

impl Shared {
    /// True if a log line about a stranger is due. Every stranger is counted, but few are logged.
    fn logs_this_stranger(&self) -> bool {
        let mut logged = self.stranger_logged.lock();
        let is_due = logged.is_none_or(|logged| logged.elapsed() >= STRANGER_LOG_INTERVAL);
        if is_due {
            *logged = Some(Instant::now());
        }
        is_due
    }
}

/// The accepting task. It owns all others: they end when it is dropped.
pub(super) struct TcpServing {
    stop: watch::Sender<bool>,
    accepting: JoinHandle<()>,
}

impl TcpServing {
    /// Binds the address and starts the service. Also returns the port.
    pub(super) fn start(
        service: Arc<dyn Service>,
        address: &Address,
        config: TcpConfig,
        counters: Arc<WireCounters>,
    ) -> Result<(Self, u16), WireError> {
        let runtime = Handle::try_current().map_err(|_| WireError::NoRuntime { address: address.to_string() })?;
        let _inside = runtime.enter();
        let (listener, port) =
            bind(host_and_port(address)?).map_err(|source| WireError::Bind { address: address.to_string(), source })?;
        let (stop, stopping) = watch::channel(false);
        let stranger_logged = Mutex::default();
        let process = process(address);
        let shared = Arc::new(Shared { service, config, counters, process, stopping, stranger_logged });
        let accepting = runtime.spawn(accept(listener, shared));
        Ok((Self { stop, accepting }, port))
    }
}

impl ServingBackend for TcpServing {
    fn stop(mut self: Box<Self>, grace: Duration) -> BoxFuture<'static, bool> {
        Box::pin(async move {
            // Sending cannot fail: the accepting task holds a receiver for as long as it runs.
            let _ = self.stop.send(true);
            tokio::time::timeout(grace, &mut self.accepting).await.is_ok()
        })
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
    let permits = Arc::new(Semaphore::new(most));
    let mut connections = JoinSet::new();
    let mut stopping = shared.stopping.clone();
    for number in 1.. {
        let accepted = tokio::select! {
            accepted = next_connection(&listener, &permits) => accepted,
            _ = stopping.wait_for(|stop| *stop) => break,
        };
        while connections.try_join_next().is_some() {}
        match accepted {
            Ok((stream, name, permit)) => {
                let shared = shared.clone();
                connections.spawn(async move {
                    serve_connection(stream, Peer::new(name, number), shared).await;
                    drop(permit);
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
    permits: &Arc<Semaphore>,
) -> std::io::Result<(TcpStream, String, OwnedSemaphorePermit)> {
    let permit = permits.clone().acquire_owned().await.map_err(std::io::Error::other)?;
    let (stream, from) = listener.accept().await?;
    Ok((stream, format!("tcp://{from}"), permit))
}

/// A reply in the writer's queue, with the permit of its request.
struct Reply {
    outgoing: Outgoing,
    _permit: Option<OwnedSemaphorePermit>,
}

impl Queued for Reply {
    fn outgoing(&mut self) -> &mut Outgoing {
        &mut self.outgoing
    }

    fn as_outgoing(&self) -> &Outgoing {
        &self.outgoing
    }

    fn is_abandoned(&self) -> bool {
        false
    }
}

async fn serve_connection(stream: TcpStream, peer: Peer, shared: Arc<Shared>) {
    if let Err(error) = tune(&stream, &shared.config) {
        tracing::debug!(%peer, "cannot set the socket options of a connection: {error}");
    }
    let Some(stream) = known(stream, &peer, &shared).await else { return };
    let (read, write) = stream.into_halves(shared.config.link.as_ref());
    // One more than the permits, for the goodbye: so sending into the queue never waits.
    let most = shared.config.max_concurrent.clamp(1, Semaphore::MAX_PERMITS - 1);
    let (queue, replies) = mpsc::channel(most + 1);
    let mut writer = JoinSet::new();
    let counters = shared.counters.clone();
    writer.spawn(async move { write_all(replies, write, &counters).await });

    let mut requests = Requests {
        reader: FrameReader::new(read, shared.config.limits),
        permits: Arc::new(Semaphore::new(most)),
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
            tracing::debug!(%peer, "closing a connection: it is meant for another incarnation of this process");
        }
        None => {}
    }
    let Requests { mut reader, mut handlers, queue: handlers_queue, .. } = requests;
    drop(handlers_queue);
    while handlers.join_next().await.is_some() {}
    if let Some(refused) = &refused {
        let _ = queue.send(Reply { outgoing: goodbye(refused), _permit: None }).await;
    }
    drop(queue);
    while writer.join_next().await.is_some() {}
    if refused.is_some() {
        let _ = tokio::time::timeout(LINGER, reader.drain()).await;
    }
}

/// The connection after the TLS handshake, if there is one to make. `None` for a stranger.
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
            if shared.logs_this_stranger() {
                tracing::warn!(%peer, reason = stranger.reason, "refused a connection: {stranger}");
            }
            None
        }
    }
}

/// Why this side closes a connection.
enum Refused {
    Malformed(Malformed),
    /// The connection is meant for another incarnation.
    Greeting,
}

fn goodbye(refused: &Refused) -> Outgoing {
    let refusal = match refused {
        Refused::Malformed(malformed) => {
            Refusal::new(RefusalCode::InvalidRequest, format!("a frame was refused: {malformed}"))
        }
        Refused::Greeting => Refusal::new(RefusalCode::NotFound, "another process now runs at this address"),
    };
    Outgoing::refusal(FrameRole::Goodbye, 0, 0, &refusal)
}

/// The reading side of a connection.
struct Requests {
    reader: FrameReader,
    permits: Arc<Semaphore>,
    handlers: JoinSet<()>,
    queue: mpsc::Sender<Reply>,
    peer: Peer,
    shared: Arc<Shared>,
}

impl Requests {
    /// Reads requests and starts their handlers. Returns when the peer ends the connection, or with
    /// the reason if it sent something that must be refused.
    async fn read(&mut self) -> Option<Refused> {
        loop {
            let permit = self.permits.clone().acquire_owned().await.ok()?;
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
                    let _ = self
                        .queue
                        .send(Reply { outgoing: Outgoing::greeting(request_id), _permit: Some(permit) })
                        .await;
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
                // If the connection is gone, no caller waits for the reply.
                let _ = queue.send(Reply { outgoing, _permit: Some(permit) }).await;
            });
        }
    }
}

/// The reply as it is sent. A reply that breaks the limits becomes a refusal that says so.
fn reply_to(kind: u16, request_id: u64, result: Result<Frame, Refusal>, limits: &Limits) -> Outgoing {
    let reply = result.and_then(|frame| {
        Outgoing::new(FrameRole::Reply, request_id, frame, limits)
            .map_err(|malformed| Refusal::new(RefusalCode::Internal, format!("the reply cannot be sent: {malformed}")))
    });
    reply.unwrap_or_else(|refusal| Outgoing::refusal(FrameRole::Refusal, kind, request_id, &refusal))
}

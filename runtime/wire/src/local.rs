//! The transport inside one process: a registry of names. A call moves the frame to the service and
//! the reply back, by ownership. Nothing is copied, serialized or summed. Deadlines, permits,
//! panics, refusals and dropped calls behave as over TCP.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use parking_lot::{Mutex, MutexGuard};
use tokio::runtime::Handle;
use tokio::sync::{OwnedSemaphorePermit, Semaphore, oneshot};
use tokio::task::JoinSet;

use crate::address::Address;
use crate::codec::Frame;
use crate::error::{Refusal, WireError};
use crate::metrics::WireCounters;
use crate::progress::{Progress, Stage, back_off};
use crate::transport::{BoxFuture, Channel, ChannelBackend, Peer, Service, Serving, ServingBackend, Transport, answer};

/// The bounds of in-process calls. The defaults are TCP's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct InProcessConfig {
    /// The most calls of one channel at a time. 1,024 by default.
    pub max_in_flight: usize,
    /// The most requests of one channel that a service handles at a time. 1,024 by default. See
    /// `transport` for handlers that wait for one another.
    pub max_concurrent: usize,
}

impl Default for InProcessConfig {
    fn default() -> Self {
        Self { max_in_flight: 1024, max_concurrent: 1024 }
    }
}

/// The in-process transport. Clones share one registry of names. A channel reaches only services of
/// its own registry.
#[derive(Clone)]
pub struct InProcess {
    config: InProcessConfig,
    counters: Arc<WireCounters>,
    services: Arc<Services>,
}

type Services = Mutex<HashMap<String, Arc<Server>>>;

impl InProcess {
    /// A transport with an empty registry; counts into `counters`.
    pub fn new(config: InProcessConfig, counters: Arc<WireCounters>) -> Self {
        Self { config, counters, services: Arc::default() }
    }
}

impl Transport for InProcess {
    fn serve(&self, service: Arc<dyn Service>, bind: &Address) -> Result<Serving, WireError> {
        let name = name_of(bind)?;
        let runtime = Handle::try_current().map_err(|_| WireError::NoRuntime { address: bind.to_string() })?;
        let mut services = lock(&self.services);
        if services.contains_key(name) {
            return Err(WireError::Bind { address: bind.to_string(), source: std::io::ErrorKind::AddrInUse.into() });
        }
        let server = Arc::new(Server {
            service,
            runtime,
            counters: self.counters.clone(),
            connections: AtomicU64::new(0),
            handlers: Mutex::new(Some(JoinSet::new())),
        });
        services.insert(name.to_owned(), server.clone());
        let serving = LocalServing { name: name.to_owned(), services: self.services.clone(), server };
        Ok(Serving::new(bind.clone(), serving))
    }

    fn connect(&self, address: &Address) -> Result<Channel, WireError> {
        name_of(address)?;
        Ok(Channel::new(LocalChannel {
            address: address.clone(),
            config: self.config,
            counters: self.counters.clone(),
            services: self.services.clone(),
            permits: Semaphore::new(self.config.max_in_flight.clamp(1, Semaphore::MAX_PERMITS)),
            connection: Mutex::new(None),
        }))
    }
}

fn name_of(address: &Address) -> Result<&str, WireError> {
    match address {
        Address::Local(name) => Ok(name),
        Address::Tcp { .. } => Err(WireError::WrongScheme {
            transport: "in-process",
            address: address.to_string(),
            expected: "local://NAME",
        }),
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock()
}

/// A service and its running handlers.
struct Server {
    service: Arc<dyn Service>,
    runtime: Handle,
    counters: Arc<WireCounters>,
    connections: AtomicU64,
    /// `None` once it has stopped.
    handlers: Mutex<Option<JoinSet<()>>>,
}

impl Server {
    /// Starts the handler of a request. Returns the request if the service has stopped.
    fn start(self: &Arc<Self>, peer: Peer, request: Frame, call: RunningCall) -> Result<(), Frame> {
        let mut handlers = lock(&self.handlers);
        let Some(handlers) = handlers.as_mut() else {
            return Err(request);
        };
        while handlers.try_join_next().is_some() {}
        self.counters.received(request.kind, 0);
        let server = self.clone();
        let handler = async move {
            let RunningCall { reply, permit } = call;
            let result = answer(&*server.service, &peer, request, &server.counters).await;
            if let Ok(frame) = &result {
                server.counters.sent(frame.kind, 0);
            }
            drop(permit);
            if reply.send(result).is_err() {
                server.counters.late_replies.inc();
            }
        };
        handlers.spawn_on(handler, &self.runtime);
        Ok(())
    }

    fn stop(&self) -> Option<JoinSet<()>> {
        lock(&self.handlers).take()
    }

    fn is_stopped(&self) -> bool {
        lock(&self.handlers).is_none()
    }
}

/// The call that a running handler belongs to.
struct RunningCall {
    reply: oneshot::Sender<Result<Frame, Refusal>>,
    permit: OwnedSemaphorePermit,
}

/// A name registered for a service; dropping it removes the name.
struct LocalServing {
    name: String,
    services: Arc<Services>,
    server: Arc<Server>,
}

impl ServingBackend for LocalServing {
    fn stop(self: Box<Self>, grace: Duration) -> BoxFuture<'static, bool> {
        Box::pin(async move {
            lock(&self.services).remove(&self.name);
            let Some(mut handlers) = self.server.stop() else {
                return true;
            };
            let finish = async { while handlers.join_next().await.is_some() {} };
            tokio::time::timeout(grace, finish).await.is_ok()
        })
    }
}

impl Drop for LocalServing {
    fn drop(&mut self) {
        let mut services = lock(&self.services);
        // After `stop` the name may have been taken by another service.
        if services.get(&self.name).is_some_and(|server| Arc::ptr_eq(server, &self.server)) {
            services.remove(&self.name);
        }
        drop(services);
        drop(self.server.stop());
    }
}

struct LocalChannel {
    address: Address,
    config: InProcessConfig,
    counters: Arc<WireCounters>,
    services: Arc<Services>,
    /// One permit per call in flight. The semaphore serves waiting callers in order.
    permits: Semaphore,
    connection: Mutex<Option<Connection>>,
}

/// A service found by its name, with this channel's permits there.
#[derive(Clone)]
struct Connection {
    server: Arc<Server>,
    permits: Arc<Semaphore>,
    peer: Peer,
}

impl ChannelBackend for LocalChannel {
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

impl LocalChannel {
    /// Moves the request to a handler and waits for the reply.
    async fn exchange(&self, mut request: Frame, progress: &Progress<'_>) -> Result<Frame, WireError> {
        let _permit = self.permits.acquire().await.map_err(|closed| progress.closed(closed))?;
        loop {
            let connection = self.connection(progress).await?;
            progress.enter(Stage::Queue);
            let permit = connection.permits.clone().acquire_owned().await;
            let permit = permit.map_err(|closed| progress.closed(closed))?;
            progress.enter(Stage::Reply);
            let kind = request.kind;
            let (reply, result) = oneshot::channel();
            let call = RunningCall { reply, permit };
            if let Err(unsent) = connection.server.start(connection.peer.clone(), request, call) {
                request = unsent;
                continue;
            }
            self.counters.sent(kind, 0);
            return match result.await {
                Ok(Ok(frame)) => {
                    self.counters.received(frame.kind, 0);
                    Ok(frame)
                }
                Ok(Err(refusal)) => Err(progress.refused(refusal)),
                Err(_) => Err(progress.closed("the service stopped")),
            };
        }
    }

    /// The service registered under the name. Waits for one, as TCP waits for a listener.
    async fn connection(&self, progress: &Progress<'_>) -> Result<Connection, WireError> {
        let mut attempt = 0;
        loop {
            if let Some(connection) = self.find() {
                return Ok(connection);
            }
            progress.enter(Stage::Connection);
            progress.failed_attempt("no service has this name");
            tokio::time::sleep(back_off(attempt)).await;
            attempt += 1;
        }
    }

    fn find(&self) -> Option<Connection> {
        let mut current = lock(&self.connection);
        if let Some(connection) = current.as_ref()
            && !connection.server.is_stopped()
        {
            return Some(connection.clone());
        }
        let name = name_of(&self.address).ok()?;
        let server = lock(&self.services).get(name)?.clone();
        let number = server.connections.fetch_add(1, Ordering::Relaxed) + 1;
        let connection = Connection {
            server,
            permits: Arc::new(Semaphore::new(self.config.max_concurrent.clamp(1, Semaphore::MAX_PERMITS))),
            peer: Peer::new(format!("in-process channel {number}"), number),
        };
        if current.replace(connection.clone()).is_some() {
            self.counters.reconnects.inc();
        }
        Some(connection)
    }
}

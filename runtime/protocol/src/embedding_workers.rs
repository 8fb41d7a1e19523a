//! How a loader or a dense worker calls the embedding workers.
//! A worker that dies is replaced while the job continues. A call that failed with it is repeated
//! to its replacement, wherever that runs. Embedding workers and the parameter servers behind them
//! apply a repeated request only once.

use std::time::{Duration, Instant};

use parking_lot::RwLock;
use rectrain_wire::{Address, Channel, Tensor};
use tokio::sync::Mutex;

use crate::error::{RoleError, is_gone};
use crate::message::{self, Request};
use crate::placement::Directory;
use crate::placement::connect;

/// How often a waiting call checks that its embedding worker is still reachable.
const LIVENESS_INTERVAL: Duration = Duration::from_secs(1);
/// How long one attempt to connect may take before the coordinator is asked for a new address. The
/// first attempt is short, because the replacement may be there at once. Each further attempt takes
/// twice as long, up to the maximum.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(2);
const FIRST_CONNECT_TIMEOUT: Duration = Duration::from_millis(50);
/// The pause between two requests for the replacement's address.
const RETRY_PAUSE: Duration = Duration::from_millis(50);

/// Channels to all embedding workers.
pub struct EmbeddingWorkers {
    directory: Directory,
    patience: Duration,
    channels: RwLock<Vec<Channel>>,
    /// The number of replacements that `channels` include. Locked during a fetch, so that no old
    /// reply overwrites a newer one.
    replacements_seen: Mutex<u64>,
}

impl EmbeddingWorkers {
    /// Connects to embedding workers at `addresses`, by index. `directory` returns new addresses
    /// after changes. `patience` is the deadline of a call.
    pub fn new(addresses: &[String], directory: Directory, patience: Duration) -> Result<Self, RoleError> {
        let channels = addresses.iter().map(|address| connect(&*directory.transport, address));
        let channels = RwLock::new(channels.collect::<Result<_, _>>()?);
        Ok(Self { directory, patience, channels, replacements_seen: Mutex::default() })
    }

    /// Reconnects if more than the known number of workers were replaced. Later calls go to the
    /// latest replacements. A replaced worker may still run for a while, and a piece sent to it
    /// would be lost.
    ///
    /// # Errors
    /// The coordinator does not answer.
    pub async fn follow_replacements(&self, replacements: u64) -> Result<(), RoleError> {
        let mut replacements_seen = self.replacements_seen.lock().await;
        if *replacements_seen < replacements {
            self.reconnect(0).await?;
            *replacements_seen = replacements;
        }
        Ok(())
    }

    /// Sends `request` to embedding worker `index`. Repeats it to the replacement whenever the
    /// worker dies.
    ///
    /// # Errors
    /// A refusal, or no reply within the deadline.
    pub async fn call<R: Request + Clone>(
        &self,
        index: usize,
        request: R,
        tensors: Vec<Tensor>,
    ) -> Result<(R::Reply, Vec<Tensor>), RoleError> {
        self.call_within(index, request, tensors, self.patience).await
    }

    /// As [`Self::call`], with `patience` as the deadline.
    pub async fn call_within<R: Request + Clone>(
        &self,
        index: usize,
        request: R,
        tensors: Vec<Tensor>,
        patience: Duration,
    ) -> Result<(R::Reply, Vec<Tensor>), RoleError> {
        self.call_if_present(index, request, tensors, patience).await?.ok_or_else(|| {
            let reason = format!("the job has no embedding worker {index}");
            RoleError::Inconsistent { message: "map", reason }
        })
    }

    /// As [`Self::call_within`]. `None` if the job no longer has an embedding worker of this index:
    /// all pieces that it held are trained.
    pub async fn call_if_present<R: Request + Clone>(
        &self,
        index: usize,
        request: R,
        tensors: Vec<Tensor>,
        patience: Duration,
    ) -> Result<Option<(R::Reply, Vec<Tensor>)>, RoleError> {
        let until = Instant::now() + patience;
        loop {
            let Some(channel) = self.channel(index) else {
                // The worker may have joined since the last fetch.
                if self.locate(index, None).await? {
                    continue;
                }
                return Ok(None);
            };
            let gone = if let Address::Local(_) = channel.address() {
                // A worker in this process dies only with this process, unless the job has released
                // it. The request is therefore not cloned for a retry.
                match channel.ready(CONNECT_TIMEOUT).await {
                    Ok(()) => return message::call(&channel, request, tensors, patience).await.map(Some),
                    Err(gone) => gone,
                }
            } else {
                match self.answer((index, &channel), request.clone(), tensors.clone(), patience).await {
                    Err(RoleError::Wire(gone)) if is_gone(&gone) && Instant::now() < until => gone,
                    answered => return answered.map(Some),
                }
            };
            tracing::debug!(%gone, index, "an embedding worker is gone");
            tokio::time::sleep(RETRY_PAUSE).await;
            if !self.locate(index, Some(channel.address())).await? {
                return Ok(None);
            }
        }
    }

    /// Returns the reply, or an error once the worker has gone. A call alone notices that only at
    /// its deadline if it has to connect. A slow connection is not an error: name resolution and
    /// handshakes take time, and a restarted handshake might never finish.
    async fn answer<R: Request>(
        &self,
        (index, channel): (usize, &Channel),
        request: R,
        tensors: Vec<Tensor>,
        patience: Duration,
    ) -> Result<(R::Reply, Vec<Tensor>), RoleError> {
        let gone = async {
            let mut reached = FIRST_CONNECT_TIMEOUT;
            loop {
                let Err(gone) = channel.ready(reached).await else {
                    reached = CONNECT_TIMEOUT;
                    tokio::time::sleep(LIVENESS_INTERVAL).await;
                    continue;
                };
                tokio::time::sleep(RETRY_PAUSE).await;
                match self.is_still_at(index, channel.address()).await {
                    Ok(true) => reached = (2 * reached).min(CONNECT_TIMEOUT),
                    Ok(false) => return gone.into(),
                    Err(error) => return error,
                }
            }
        };
        tokio::select! {
            // The call comes first: it must open the connection, because `gone` gives up connecting
            // early.
            biased;
            answered = message::call(channel, request, tensors, patience) => answered,
            gone = gone => Err(gone),
        }
    }

    /// Whether the directory still has the worker at this address.
    async fn is_still_at(&self, index: usize, address: &Address) -> Result<bool, RoleError> {
        let is_anywhere = self.locate(index, Some(address)).await?;
        Ok(is_anywhere && self.channel(index).is_some_and(|channel| channel.address() == address))
    }

    fn channel(&self, index: usize) -> Option<Channel> {
        self.channels.read().get(index).cloned()
    }

    /// Connects to the present address of a worker, which differs from `gone`. Returns whether the
    /// job has a worker of this index.
    async fn locate(&self, index: usize, gone: Option<&Address>) -> Result<bool, RoleError> {
        let _locked = self.replacements_seen.lock().await;
        if self.channel(index).is_some_and(|known| Some(known.address()) != gone) {
            return Ok(true);
        }
        self.reconnect(index).await
    }

    /// Reconnects to this worker and to all others whose address has changed. Returns whether the
    /// job has a worker of this index.
    async fn reconnect(&self, index: usize) -> Result<bool, RoleError> {
        let addresses = self.directory.fetch_addresses().await?.embedding_workers;
        let is_known =
            |address: &String, index| self.channel(index).is_some_and(|known| known.address().to_string() == *address);
        // Skips workers that this process has not called yet. Channels to workers that have left
        // the job stay, and are not used.
        for (other, address) in
            addresses.iter().enumerate().filter(|(other, _)| *other <= index || self.channel(*other).is_some())
        {
            if is_known(address, other) {
                continue;
            }
            let channel = connect(&*self.directory.transport, address)?;
            let mut channels = self.channels.write();
            match channels.get_mut(other) {
                Some(known) => *known = channel,
                None => channels.push(channel),
            }
        }
        Ok(index < addresses.len())
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "an unwrap in a test is an assertion")]
mod tests {
    use std::collections::HashMap;
    use std::sync::Arc;

    use rectrain_proto::v1;
    use rectrain_wire::{BoxFuture, Frame, Peer, Refusal, Service, TcpConfig, TcpTransport, Transport, WireCounters};
    use tokio::net::{TcpListener, TcpStream};

    use super::*;
    use crate::coordinator_channel::CoordinatorChannel;
    use crate::deadline::CALL_DEADLINE;

    /// An embedding worker that is also the coordinator which knows its address.
    struct WorkerAndCoordinator(String);

    impl Service for WorkerAndCoordinator {
        fn call<'a>(&'a self, _peer: &'a Peer, frame: Frame) -> BoxFuture<'a, Result<Frame, Refusal>> {
            Box::pin(async move {
                if frame.kind == v1::MapRequest::KIND {
                    let placement =
                        v1::Placement { embedding_workers: vec![self.0.clone()], ..v1::Placement::default() };
                    return Ok(message::reply::<v1::MapRequest>(&placement, Vec::new()));
                }
                let traffic = v1::Traffic { bytes_sent: HashMap::from([("rows".to_owned(), 7)]) };
                Ok(message::reply::<v1::TrafficRequest>(&traffic, Vec::new()))
            })
        }
    }

    /// A proxy that waits for `pause` before it forwards a connection.
    async fn proxy_slowly(listener: TcpListener, to: (String, u16), pause: Duration) {
        while let Ok((mut caller, _)) = listener.accept().await {
            let to = to.clone();
            tokio::spawn(async move {
                tokio::time::sleep(pause).await;
                let mut server = TcpStream::connect(to).await.unwrap();
                tokio::io::copy_bidirectional(&mut caller, &mut server).await
            });
        }
    }

    /// The connection takes longer than the limit after which the coordinator is asked for a new
    /// address.
    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn a_slow_connection_is_not_given_up() {
        let transport = TcpTransport::new(TcpConfig::default(), WireCounters::unregistered(|_| "any").unwrap());
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = format!("tcp://{}", listener.local_addr().unwrap());
        let both = Arc::new(WorkerAndCoordinator(address.clone()));
        let serving = transport.serve(both, &Address::tcp("127.0.0.1", 0)).unwrap();
        let Address::Tcp { host, port, .. } = serving.address().clone() else { panic!("not TCP") };
        let proxying = tokio::spawn(proxy_slowly(listener, (host, port), CONNECT_TIMEOUT + CONNECT_TIMEOUT / 4));
        let coordinator = CoordinatorChannel::new(transport.connect(serving.address()).unwrap());
        let directory = Directory { coordinator, transport: Arc::new(transport) };
        let workers = EmbeddingWorkers::new(&[address], directory, CALL_DEADLINE).unwrap();
        let began = Instant::now();
        let answer = tokio::time::timeout(CALL_DEADLINE / 20, workers.call(0, v1::TrafficRequest {}, Vec::new())).await;
        let (traffic, _) = answer.expect("the worker answers in time").unwrap();
        assert_eq!(traffic.bytes_sent["rows"], 7);
        assert!(began.elapsed() > CONNECT_TIMEOUT);
        proxying.abort();
    }
}

//! How a loader or a dense worker reaches the embedding workers. One that has died is replaced while the job goes on: a call that it took
//! with it is made again, of its successor, wherever that is. Both of them, and the parameter servers behind, take in only once what comes
//! twice.

use std::time::{Duration, Instant};

use parking_lot::RwLock;
use rectrain_wire::{Address, Channel, Tensor};
use tokio::sync::Mutex;

use crate::error::{RoleError, is_gone};
use crate::message::{self, Request};
use crate::placement::Directory;
use crate::placement::connect;

/// How often a call that waits looks whether its embedding worker is still there.
const LOOK: Duration = Duration::from_secs(1);
/// Of one that cannot be connected to within this time it is asked whether it is somewhere else now. When it has just died its successor may be there in
/// a moment: at first it has less time, and twice as much with each time.
const REACHED: Duration = Duration::from_secs(2);
const REACHED_AT_FIRST: Duration = Duration::from_millis(50);
/// Between two questions where its successor is.
const PAUSE: Duration = Duration::from_millis(50);

/// See the module's text.
pub struct EmbeddingWorkers {
    directory: Directory,
    patience: Duration,
    channels: RwLock<Vec<Channel>>,
    /// Successions that `channels` go by. Held while the directory is asked, so that no answer is put over a newer one.
    followed: Mutex<u64>,
}

impl EmbeddingWorkers {
    /// At these addresses, by index; `directory` knows others if they change. A call may take as long as `patience`.
    pub fn new(addresses: &[String], directory: Directory, patience: Duration) -> Result<Self, RoleError> {
        let channels = addresses.iter().map(|address| connect(&*directory.transport, address));
        let channels = RwLock::new(channels.collect::<Result<_, _>>()?);
        Ok(Self { directory, patience, channels, followed: Mutex::default() })
    }

    /// Embedding workers have taken others' places so often: what is sent from here on comes to the last of them. One that they have replaced
    /// may live on for a while, and what it took in would be lost.
    ///
    /// # Errors
    /// The coordinator cannot be asked.
    pub async fn follow(&self, successions: u64) -> Result<(), RoleError> {
        let mut followed = self.followed.lock().await;
        if *followed < successions {
            self.connect_anew(0).await?;
            *followed = successions;
        }
        Ok(())
    }

    /// Sends `request` to embedding worker number `index`, and again to its successor as often as it dies.
    ///
    /// # Errors
    /// A refusal; or that there was none to answer within the deadline of a call.
    pub async fn call<R: Request + Clone>(
        &self,
        index: usize,
        request: R,
        tensors: Vec<Tensor>,
    ) -> Result<(R::Reply, Vec<Tensor>), RoleError> {
        self.call_within(index, request, tensors, self.patience).await
    }

    /// As [`Self::call`], and for as long as `patience` allows.
    pub async fn call_within<R: Request + Clone>(
        &self,
        index: usize,
        request: R,
        tensors: Vec<Tensor>,
        patience: Duration,
    ) -> Result<(R::Reply, Vec<Tensor>), RoleError> {
        self.call_if_there(index, request, tensors, patience).await?.ok_or_else(|| {
            let reason = format!("there is no embedding worker {index}");
            RoleError::Inconsistent { message: "map", reason }
        })
    }

    /// As [`Self::call`], and for as long as `patience` allows; `None`, if the job goes on without an embedding worker of this number:
    /// what it was to be given is trained.
    pub async fn call_if_there<R: Request + Clone>(
        &self,
        index: usize,
        request: R,
        tensors: Vec<Tensor>,
        patience: Duration,
    ) -> Result<Option<(R::Reply, Vec<Tensor>)>, RoleError> {
        let until = Instant::now() + patience;
        loop {
            let Some(channel) = self.channel(index) else {
                // It may have joined since.
                if self.look_for(index, None).await? {
                    continue;
                }
                return Ok(None);
            };
            let gone = if let Address::Local(_) = channel.address() {
                // It lives and dies with this process, unless it is one that has left: nothing is copied to be sent again.
                match channel.ready(REACHED).await {
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
            tokio::time::sleep(PAUSE).await;
            if !self.look_for(index, Some(channel.address())).await? {
                return Ok(None);
            }
        }
    }

    /// The answer; or that nobody is there to give one, which a call by itself finds out only at its deadline if it has to connect. To take long for
    /// that is not to be gone: names, handshakes and busy machines take their time, and begun anew it would never come to an end.
    async fn answer<R: Request>(
        &self,
        (index, channel): (usize, &Channel),
        request: R,
        tensors: Vec<Tensor>,
        patience: Duration,
    ) -> Result<(R::Reply, Vec<Tensor>), RoleError> {
        let gone = async {
            let mut reached = REACHED_AT_FIRST;
            loop {
                let Err(gone) = channel.ready(reached).await else {
                    reached = REACHED;
                    tokio::time::sleep(LOOK).await;
                    continue;
                };
                tokio::time::sleep(PAUSE).await;
                match self.is_still_at(index, channel.address()).await {
                    Ok(true) => reached = (2 * reached).min(REACHED),
                    Ok(false) => return gone.into(),
                    Err(error) => return error,
                }
            }
        };
        tokio::select! {
            // First, so that what connects is the call and not the look, which gives up.
            biased;
            answered = message::call(channel, request, tensors, patience) => answered,
            gone = gone => Err(gone),
        }
    }

    /// Whether the directory knows of no other place for it.
    async fn is_still_at(&self, index: usize, address: &Address) -> Result<bool, RoleError> {
        let is_anywhere = self.look_for(index, Some(address)).await?;
        Ok(is_anywhere && self.channel(index).is_some_and(|channel| channel.address() == address))
    }

    fn channel(&self, index: usize) -> Option<Channel> {
        self.channels.read().get(index).cloned()
    }

    /// Connects to where it is now, which is not where it is `gone` from; says whether it is anywhere.
    async fn look_for(&self, index: usize, gone: Option<&Address>) -> Result<bool, RoleError> {
        let _held = self.followed.lock().await;
        if self.channel(index).is_some_and(|known| Some(known.address()) != gone) {
            return Ok(true);
        }
        self.connect_anew(index).await
    }

    /// Connects to this one and to all others that are not where they were; says whether there is one of this number.
    async fn connect_anew(&self, index: usize) -> Result<bool, RoleError> {
        let addresses = self.directory.ask().await?.embedding_workers;
        let is_known =
            |address: &String, index| self.channel(index).is_some_and(|known| known.address().to_string() == *address);
        // Those that have left are asked for nothing any more.
        for (other, address) in
            addresses.iter().enumerate().filter(|(other, _)| *other <= index || self.channel(*other).is_some())
        {
            if is_known(address, other) {
                continue;
            }
            let channel = connect(&*self.directory.transport, address)?;
            let mut channels = self.channels.write();
            match channels.get_mut(other) {
                Some(place) => *place = channel,
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

    /// An embedding worker, and a coordinator that knows where it is.
    struct Both(String);

    impl Service for Both {
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

    /// Passes bytes on, and begins to only after a while.
    async fn hesitate(listener: TcpListener, to: (String, u16), pause: Duration) {
        while let Ok((mut caller, _)) = listener.accept().await {
            let to = to.clone();
            tokio::spawn(async move {
                tokio::time::sleep(pause).await;
                let mut server = TcpStream::connect(to).await.unwrap();
                tokio::io::copy_bidirectional(&mut caller, &mut server).await
            });
        }
    }

    /// Longer than anybody is waited for before it is asked whether it is somewhere else.
    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn one_that_is_slow_to_connect_to_is_connected_to() {
        let transport = TcpTransport::new(TcpConfig::default(), WireCounters::unregistered(|_| "any").unwrap());
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = format!("tcp://{}", listener.local_addr().unwrap());
        let both = Arc::new(Both(address.clone()));
        let serving = transport.serve(both, &Address::tcp("127.0.0.1", 0)).unwrap();
        let Address::Tcp { host, port, .. } = serving.address().clone() else { panic!("not TCP") };
        let hesitating = tokio::spawn(hesitate(listener, (host, port), REACHED + REACHED / 4));
        let coordinator = CoordinatorChannel::new(transport.connect(serving.address()).unwrap());
        let directory = Directory { coordinator, transport: Arc::new(transport) };
        let workers = EmbeddingWorkers::new(&[address], directory, CALL_DEADLINE).unwrap();
        let began = Instant::now();
        let answer = tokio::time::timeout(CALL_DEADLINE / 20, workers.call(0, v1::TrafficRequest {}, Vec::new())).await;
        let (traffic, _) = answer.expect("it is never connected to").unwrap();
        assert_eq!(traffic.bytes_sent["rows"], 7);
        assert!(began.elapsed() > REACHED);
        hesitating.abort();
    }
}

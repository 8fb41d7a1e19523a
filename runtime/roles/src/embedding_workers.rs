//! How a loader or a dense worker reaches the embedding workers. One that has died is replaced while the job goes on: a call that it took
//! with it is made again, of its successor, wherever that is. Both of them, and the parameter servers behind, take in only once what comes
//! twice.

use std::sync::{PoisonError, RwLock};
use std::time::{Duration, Instant};

use rectrain_wire::{Address, Channel, Tensor};
use tokio::sync::Mutex;

use crate::error::{RoleError, is_gone};
use crate::member::connect;
use crate::message::{self, Request};
use crate::placement::Directory;

/// How often a call that waits looks whether its embedding worker is still there.
const LOOK: Duration = Duration::from_secs(1);
/// One that cannot be connected to within this time is not there. When it has just died its successor may be somewhere else in a moment:
/// at first it has less time, and twice as much with each time.
const REACHED: Duration = Duration::from_secs(2);
const REACHED_AT_FIRST: Duration = Duration::from_millis(50);
/// Between two questions where its successor is.
const PAUSE: Duration = Duration::from_millis(50);

/// See the module's text.
pub(crate) struct EmbeddingWorkers {
    directory: Directory,
    patience: Duration,
    channels: RwLock<Vec<Channel>>,
    /// Successions that `channels` go by. Held while the directory is asked, so that no answer is put over a newer one.
    followed: Mutex<u64>,
}

impl EmbeddingWorkers {
    /// At these addresses, by index; `directory` knows others if they change. A call may take as long as `patience`.
    pub(crate) fn new(addresses: &[String], directory: Directory, patience: Duration) -> Result<Self, RoleError> {
        let channels = addresses.iter().map(|address| connect(&*directory.transport, address));
        let channels = RwLock::new(channels.collect::<Result<_, _>>()?);
        Ok(Self { directory, patience, channels, followed: Mutex::default() })
    }

    /// Embedding workers have taken others' places so often: what is sent from here on comes to the last of them. One that they have replaced
    /// may live on for a while, and what it took in would be lost.
    ///
    /// # Errors
    /// The coordinator cannot be asked.
    pub(crate) async fn follow(&self, successions: u64) -> Result<(), RoleError> {
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
    pub(crate) async fn call<R: Request + Clone>(
        &self,
        index: usize,
        request: R,
        tensors: Vec<Tensor>,
    ) -> Result<(R::Reply, Vec<Tensor>), RoleError> {
        self.call_if_there(index, request, tensors, self.patience).await?.ok_or_else(|| {
            let reason = format!("there is no embedding worker {index}");
            RoleError::Inconsistent { message: "map", reason }
        })
    }

    /// As [`Self::call`], and for as long as `patience` allows; `None`, if the job goes on without an embedding worker of this number:
    /// what it was to be given is trained.
    pub(crate) async fn call_if_there<R: Request + Clone>(
        &self,
        index: usize,
        request: R,
        tensors: Vec<Tensor>,
        patience: Duration,
    ) -> Result<Option<(R::Reply, Vec<Tensor>)>, RoleError> {
        let until = Instant::now() + patience;
        let mut reached = REACHED_AT_FIRST;
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
                match answer(&channel, request.clone(), tensors.clone(), (reached, patience)).await {
                    Err(RoleError::Wire(gone)) if is_gone(&gone) && Instant::now() < until => gone,
                    answered => return answered.map(Some),
                }
            };
            tracing::debug!(%gone, index, "an embedding worker is gone");
            reached = (2 * reached).min(REACHED);
            tokio::time::sleep(PAUSE).await;
            if !self.look_for(index, Some(channel.address())).await? {
                return Ok(None);
            }
        }
    }

    fn channel(&self, index: usize) -> Option<Channel> {
        self.channels.read().unwrap_or_else(PoisonError::into_inner).get(index).cloned()
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
            let mut channels = self.channels.write().unwrap_or_else(PoisonError::into_inner);
            match channels.get_mut(other) {
                Some(place) => *place = channel,
                None => channels.push(channel),
            }
        }
        Ok(index < addresses.len())
    }
}

/// The answer; or that nobody is there to give one, which a call by itself finds out only at its deadline if it has to connect.
async fn answer<R: Request>(
    channel: &Channel,
    request: R,
    tensors: Vec<Tensor>,
    (reached, patience): (Duration, Duration),
) -> Result<(R::Reply, Vec<Tensor>), RoleError> {
    let gone = async {
        let mut reached = reached;
        loop {
            if let Err(gone) = channel.ready(reached).await {
                return gone;
            }
            reached = REACHED;
            tokio::time::sleep(LOOK).await;
        }
    };
    tokio::select! {
        answered = message::call(channel, request, tensors, patience) => answered,
        gone = gone => Err(gone.into()),
    }
}

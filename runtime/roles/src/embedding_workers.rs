//! How a loader or a dense worker reaches the embedding workers. One that has died is replaced while the job goes on: a call that it took
//! with it is made again, of its successor, wherever that is. Both of them, and the parameter servers behind, take in only once what comes
//! twice.

use std::sync::{PoisonError, RwLock};
use std::time::{Duration, Instant};

use rectrain_wire::{Address, Channel, Tensor};

use crate::error::{RoleError, is_gone};
use crate::member::connect;
use crate::message::{self, Request};
use crate::placement::Directory;
use crate::plan::CALL_DEADLINE;

/// How often a call that waits looks whether its embedding worker is still there.
const LOOK: Duration = Duration::from_secs(1);
/// One that cannot be connected to within this time is not there.
const REACHED: Duration = Duration::from_secs(2);
/// Between two questions where its successor is.
const PAUSE: Duration = Duration::from_millis(50);

/// See the module's text.
pub(crate) struct EmbeddingWorkers {
    directory: Directory,
    channels: RwLock<Vec<Channel>>,
}

impl EmbeddingWorkers {
    /// At these addresses, by index; `directory` knows others if they change.
    pub(crate) fn new(addresses: &[String], directory: Directory) -> Result<Self, RoleError> {
        let channels = addresses.iter().map(|address| connect(&*directory.transport, address));
        let channels = RwLock::new(channels.collect::<Result<_, _>>()?);
        Ok(Self { directory, channels })
    }

    /// How many there are.
    pub(crate) fn count(&self) -> usize {
        self.channels.read().unwrap_or_else(PoisonError::into_inner).len()
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
        let until = Instant::now() + CALL_DEADLINE;
        loop {
            let channel = self.channel(index)?;
            if let Address::Local(_) = channel.address() {
                // It lives and dies with this process, so nothing is copied to be sent again.
                return message::call(&channel, request, tensors, CALL_DEADLINE).await;
            }
            let gone = match answer(&channel, request.clone(), tensors.clone()).await {
                Err(RoleError::Wire(gone)) if is_gone(&gone) && Instant::now() < until => gone,
                answered => return answered,
            };
            tracing::debug!(%gone, index, "an embedding worker is gone");
            tokio::time::sleep(PAUSE).await;
            self.look_for(index).await?;
        }
    }

    fn channel(&self, index: usize) -> Result<Channel, RoleError> {
        let channels = self.channels.read().unwrap_or_else(PoisonError::into_inner);
        channels.get(index).cloned().ok_or_else(|| RoleError::Inconsistent {
            message: "roster",
            reason: format!("there is no embedding worker {index}"),
        })
    }

    /// Connects to where it is now.
    async fn look_for(&self, index: usize) -> Result<(), RoleError> {
        let addresses = self.directory.embedding_workers().await?;
        let Some(address) = addresses.get(index) else { return Ok(()) };
        if self.channel(index)?.address().to_string() != *address {
            let channel = connect(&*self.directory.transport, address)?;
            if let Some(place) = self.channels.write().unwrap_or_else(PoisonError::into_inner).get_mut(index) {
                *place = channel;
            }
        }
        Ok(())
    }
}

/// The answer; or that nobody is there to give one, which a call by itself finds out only at its deadline if it has to connect.
async fn answer<R: Request>(
    channel: &Channel,
    request: R,
    tensors: Vec<Tensor>,
) -> Result<(R::Reply, Vec<Tensor>), RoleError> {
    let gone = async {
        loop {
            if let Err(gone) = channel.ready(REACHED).await {
                return gone;
            }
            tokio::time::sleep(LOOK).await;
        }
    };
    tokio::select! {
        answered = message::call(channel, request, tensors, CALL_DEADLINE) => answered,
        gone = gone => Err(gone.into()),
    }
}

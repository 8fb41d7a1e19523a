//! How a member calls the coordinator.
//! A coordinator that dies is replaced by one with the same state. If a reply is lost with the old
//! one, the member repeats the request under the same number. The coordinator then applies it only
//! once.

use std::collections::BTreeSet;
use std::hash::{BuildHasher, RandomState};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use parking_lot::{Mutex, MutexGuard};
use prost::Message;
use rectrain_proto::v1;
use rectrain_wire::{Channel, Tensor, WireError};

use crate::deadline::CALL_DEADLINE;
use crate::error::RoleError;
use crate::message::{self, Request};

/// The pause before a retry when the coordinator's process has ended.
const RETRY_PAUSE: Duration = Duration::from_millis(10);

/// A peer that closes the connection this often in a row, right after a request and without ever
/// answering one, does not speak the protocol. Most likely one side uses TLS and the other does
/// not.
const MAX_EARLY_CLOSES: u32 = 5;
const EARLY: Duration = Duration::from_secs(1);

/// A channel to the coordinator. Cheap to clone. Clones number their requests together.
#[derive(Debug, Clone)]
pub struct CoordinatorChannel {
    channel: Channel,
    caller: Arc<Caller>,
}

/// This process as the coordinator knows it.
#[derive(Debug)]
struct Caller {
    id: u64,
    /// The attempt that this process belongs to; 0 before it has joined.
    attempt: AtomicU64,
    was_answered: AtomicBool,
    requests: Mutex<PendingRequests>,
}

#[derive(Debug, Default)]
struct PendingRequests {
    last_number: u64,
    pending: BTreeSet<u64>,
}

impl CoordinatorChannel {
    /// A channel of a process that has sent no request yet.
    pub fn new(channel: Channel) -> Self {
        let caller = Caller {
            id: RandomState::new().hash_one("caller").max(1),
            attempt: AtomicU64::new(0),
            was_answered: AtomicBool::new(false),
            requests: Mutex::default(),
        };
        Self { channel, caller: Arc::new(caller) }
    }

    /// The random ID of this process. The coordinator tells incarnations of a member apart by it.
    pub fn caller_id(&self) -> u64 {
        self.caller.id
    }

    /// Sets the attempt of all later requests. A coordinator of another attempt refuses them.
    pub fn set_attempt(&self, attempt: u64) {
        self.caller.attempt.store(attempt, Ordering::Release);
    }

    /// Sends `request` with `tensors` and waits for the reply. Retries if the coordinator dies
    /// meanwhile.
    ///
    /// # Errors
    /// - A refusal by the coordinator.
    /// - No reply within `deadline`.
    /// - The coordinator answered before, died, and no replacement came within [`CALL_DEADLINE`].
    /// - The peer never answered and closes the connection at each request.
    pub async fn call<R: Request>(
        &self,
        request: R,
        tensors: Vec<Tensor>,
        deadline: Duration,
    ) -> Result<(R::Reply, Vec<Tensor>), RoleError> {
        let pending = PendingRequest::new(&self.caller);
        let request = request.encode_to_vec();
        let (began, mut early_closes) = (Instant::now(), 0);
        loop {
            let meta = [&*request, &pending.caller().encode_to_vec()].concat();
            let sent = Instant::now();
            let left = deadline.saturating_sub(began.elapsed());
            match message::call_with::<R>(&self.channel, meta, tensors.clone(), left).await {
                Err(RoleError::Wire(WireError::Closed { .. }))
                    if began.elapsed() < deadline && early_closes < MAX_EARLY_CLOSES =>
                {
                    let was_answered = self.caller.was_answered.load(Ordering::Acquire);
                    early_closes = if was_answered || sent.elapsed() > EARLY { 0 } else { early_closes + 1 };
                    tokio::time::sleep(RETRY_PAUSE).await;
                    self.channel.ready(CALL_DEADLINE).await?;
                }
                answered => {
                    self.caller.was_answered.fetch_or(answered.is_ok(), Ordering::AcqRel);
                    return answered;
                }
            }
        }
    }
}

/// A request that is under way. It is pending until this is dropped.
struct PendingRequest<'a> {
    caller: &'a Caller,
    number: u64,
}

impl<'a> PendingRequest<'a> {
    fn new(caller: &'a Caller) -> Self {
        let mut requests = caller.lock();
        requests.last_number += 1;
        let number = requests.last_number;
        requests.pending.insert(number);
        Self { caller, number }
    }

    fn caller(&self) -> v1::Caller {
        let unanswered = self.caller.lock().pending.range(..=self.number).copied().collect();
        let attempt = self.caller.attempt.load(Ordering::Acquire);
        v1::Caller { id: self.caller.id, number: self.number, unanswered, attempt }
    }
}

impl Drop for PendingRequest<'_> {
    fn drop(&mut self) {
        self.caller.lock().pending.remove(&self.number);
    }
}

impl Caller {
    fn lock(&self) -> MutexGuard<'_, PendingRequests> {
        self.requests.lock()
    }
}

#[cfg(test)]
mod tests {
    use rectrain_wire::{Address, TcpConfig, TcpTransport, Transport, WireCounters};
    use tokio::io::AsyncReadExt;

    use super::*;

    #[test]
    fn a_request_carries_its_caller_and_decodes_without_it() {
        let request = v1::ChunkReport { epoch: 3, chunk: 4, ..v1::ChunkReport::default() };
        let caller = v1::Caller { id: 7, number: 2, unanswered: vec![1, 2], attempt: 9 };
        let meta = [request.encode_to_vec(), caller.encode_to_vec()].concat();
        assert_eq!(v1::ChunkReport::decode(&*meta).unwrap(), request);
        assert_eq!(v1::Caller::decode(&*meta).unwrap(), caller);
        assert_eq!(v1::Caller::decode(&*request.encode_to_vec()).unwrap(), v1::Caller::default());
    }

    /// A member that uses TLS closes the connections of peers that do not.
    #[tokio::test]
    async fn a_peer_that_always_closes_the_connection_is_given_up() {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = Address::tcp("127.0.0.1", listener.local_addr().unwrap().port());
        let counters = WireCounters::unregistered(|_| "any").unwrap();
        let channel = TcpTransport::new(TcpConfig::default(), counters).connect(&address).unwrap();
        let closing = async {
            loop {
                let (mut stream, _) = listener.accept().await.unwrap();
                stream.read_u8().await.unwrap();
            }
        };
        let coordinator = CoordinatorChannel::new(channel);
        let asking = coordinator.call(v1::AttemptRequest {}, Vec::new(), Duration::from_secs(600));
        let answer = tokio::select! {
            answer = asking => answer,
            () = closing => return,
            () = tokio::time::sleep(Duration::from_secs(20)) => panic!("the channel retries for ever"),
        };
        assert!(matches!(answer, Err(RoleError::Wire(WireError::Closed { .. }))), "{answer:?}");
    }

    #[test]
    fn requests_are_numbered_and_list_those_that_are_pending() {
        let (attempt, was_answered) = (AtomicU64::new(9), AtomicBool::new(false));
        let caller = Caller { id: 7, attempt, was_answered, requests: Mutex::default() };
        let (first, second, third) =
            (PendingRequest::new(&caller), PendingRequest::new(&caller), PendingRequest::new(&caller));
        let expected =
            |number, unanswered: &[u64]| v1::Caller { id: 7, number, unanswered: unanswered.to_vec(), attempt: 9 };
        assert_eq!((first.caller(), third.caller()), (expected(1, &[1]), expected(3, &[1, 2, 3])));
        drop(second);
        assert_eq!((first.caller(), third.caller()), (expected(1, &[1]), expected(3, &[1, 3])));
        drop(first);
        assert_eq!((third.caller(), PendingRequest::new(&caller).caller()), (expected(3, &[3]), expected(4, &[3, 4])));
    }
}

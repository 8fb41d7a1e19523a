//! Copies of the journal on parameter servers. They outlive the coordinator's machine.
//!
//! Each image that was written is sent to every server of the slot map before a reply leaves. So
//! every server that answers has all that members know. One task for each server sends the newest
//! image only. A server that cannot be reached does not delay replies; it gets the newest image as
//! soon as it answers again. If no server can be reached, replies wait: another coordinator may
//! lead the job, and this one would not learn of it. [`super::recovery`] needs the copies of all
//! servers, and takes the newest.

use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use futures::stream::{FuturesUnordered, StreamExt};
use parking_lot::Mutex;
use rectrain_proto::v1;
use rectrain_protocol::error::RoleError;
use rectrain_protocol::limits::MAX_JOURNAL_COPY_BYTES;
use rectrain_protocol::message::{self, COORDINATOR_SUPERSEDED};
use rectrain_protocol::metrics::CoordinatorMetrics;
use rectrain_protocol::placement::Placement;
use rectrain_wire::{Channel, Tensor, WireError};
use tokio::sync::watch;
use tokio::task::AbortHandle;

/// How long replies wait for a connection to a server. A server whose process ended refuses
/// connections at once.
const CONNECT: Duration = Duration::from_secs(1);
/// How long replies wait for a connected server to acknowledge a copy. Longer than a lost
/// connection takes to be noticed.
const PATIENCE: Duration = Duration::from_secs(75);
/// A connection may break while the server lives, so a copy is sent this often before the server
/// counts as unreachable.
const TRIES: u32 = 2;
/// The pause before another try to reach an unreachable server.
const RETRY_PAUSE: Duration = Duration::from_millis(100);

/// Sends copies to the servers of the present slot map.
pub(super) struct Copies {
    sender: Sender,
    newest: watch::Sender<Option<Written>>,
    holders: Mutex<Vec<Holder>>,
}

/// The parts that every task needs.
#[derive(Clone)]
struct Sender {
    /// The key of the copies.
    job: String,
    /// The incarnation of this coordinator.
    owner: u64,
    metrics: CoordinatorMetrics,
}

/// An image that was written to the journal.
#[derive(Clone)]
struct Written {
    sequence: u64,
    holders: Vec<u32>,
    /// Empty if no coordinator can continue from the journal.
    image: Bytes,
}

/// A server that gets copies. Dropping it ends its task.
struct Holder {
    number: u32,
    address: String,
    state: Arc<watch::Sender<HolderState>>,
    task: AbortHandle,
}

impl Drop for Holder {
    fn drop(&mut self) {
        self.task.abort();
    }
}

type StateOfHolder = watch::Receiver<HolderState>;
/// A condition on the state of a server and a sequence.
type IsReached = fn(HolderState, u64) -> bool;

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum HolderState {
    /// It has acknowledged the copy with this sequence.
    Has(u64),
    Unreachable,
    /// It refuses this coordinator, because another one has claimed the copy.
    Superseded,
}

impl HolderState {
    /// Whether a reply need not wait for this server to get the copy with this sequence.
    fn is_settled(self, sequence: u64) -> bool {
        self == Self::Unreachable || self.has_answered(sequence)
    }

    /// Whether this server has accepted or refused the copy with this sequence.
    fn has_answered(self, sequence: u64) -> bool {
        match self {
            Self::Has(newest) => newest >= sequence,
            Self::Unreachable => false,
            Self::Superseded => true,
        }
    }
}

impl Copies {
    /// Copies under the key `job`, written by the coordinator of incarnation `owner`. No server
    /// gets them yet.
    pub(super) fn new(job: String, owner: u64, metrics: CoordinatorMetrics) -> Self {
        let sender = Sender { job, owner, metrics };
        Self { sender, newest: watch::Sender::new(None), holders: Mutex::default() }
    }

    /// From the next copy on, the servers of this placement get the copies.
    pub(super) fn follow(&self, placement: &Placement) {
        let mut holders = self.holders.lock();
        let mut before = std::mem::take(&mut *holders);
        let addresses = placement.addresses.iter().zip(&placement.servers);
        for (number, (address, channel)) in placement.map.servers().iter().zip(addresses) {
            let number = u32::from(*number);
            let known = before.iter().position(|holder| holder.number == number && holder.address == *address);
            holders.push(match known {
                Some(at) => before.swap_remove(at),
                None => self.holder(number, address, channel.clone()),
            });
        }
    }

    fn holder(&self, number: u32, address: &str, server: Channel) -> Holder {
        let state = Arc::new(watch::Sender::new(HolderState::Has(0)));
        let replicating = self.sender.clone().replicate(server, self.newest.subscribe(), Arc::clone(&state));
        let task = tokio::spawn(replicating).abort_handle();
        Holder { number, address: address.to_owned(), state, task }
    }

    /// A server has joined again. From now on, replies wait until it has the newest copy, which its
    /// process before may have lost.
    pub(super) fn wait_again_for(&self, server: u32) {
        for holder in self.holders.lock().iter().filter(|holder| holder.number == server) {
            holder.state.send_if_modified(|state| {
                let was_away = *state == HolderState::Unreachable;
                if was_away {
                    *state = HolderState::Has(0);
                }
                was_away
            });
        }
    }

    /// Sends the image with this sequence to all servers, and waits until each has it or cannot be
    /// reached, and until at least one has it. Returns at once if no server gets copies yet. An
    /// image that is too large voids the copies.
    ///
    /// # Errors
    /// [`RoleError::Superseded`] if another coordinator has claimed the copies.
    pub(super) async fn put(&self, sequence: u64, image: Bytes) -> Result<(), RoleError> {
        if image.len() <= MAX_JOURNAL_COPY_BYTES {
            return self.send(sequence, image).await;
        }
        self.sender.metrics.journal_copies_too_large.inc();
        self.void(sequence).await
    }

    /// Makes the servers forget the image: no coordinator can continue from it any longer.
    ///
    /// # Errors
    /// See [`Self::put`].
    pub(super) async fn void(&self, sequence: u64) -> Result<(), RoleError> {
        self.send(sequence, Bytes::new()).await
    }

    async fn send(&self, sequence: u64, image: Bytes) -> Result<(), RoleError> {
        let started = Instant::now();
        loop {
            let states = self.hand_over(sequence, image.clone());
            let acknowledged = self.acknowledged(&states, sequence).await?;
            // If the slot map changed so that all these servers left it, the others get the image.
            if acknowledged > 0 || states.is_empty() {
                self.sender.metrics.journal_copy_time.observe(started.elapsed().as_secs_f64());
                return Ok(());
            }
        }
    }

    /// Waits until each server has the copy or cannot be reached, and at least one has it. Returns
    /// how many have it; 0 if all have left the slot map.
    async fn acknowledged(&self, states: &[StateOfHolder], sequence: u64) -> Result<usize, RoleError> {
        let acknowledged = count_copies(states, HolderState::is_settled, sequence, usize::MAX).await?;
        self.sender.metrics.journal_copies_behind.set(states.len().saturating_sub(acknowledged) as i64);
        if acknowledged > 0 {
            return Ok(acknowledged);
        }
        count_copies(states, HolderState::has_answered, sequence, 1).await
    }

    /// Gives the image to the tasks. Returns the states of their servers.
    fn hand_over(&self, sequence: u64, image: Bytes) -> Vec<StateOfHolder> {
        let holders = self.holders.lock();
        let numbers: Vec<u32> = holders.iter().map(|holder| holder.number).collect();
        if !numbers.is_empty() {
            self.newest.send_replace(Some(Written { sequence, holders: numbers, image }));
        }
        holders.iter().map(|holder| holder.state.subscribe()).collect()
    }
}

/// Waits until each state `is_reached`, or until `enough` servers have the copy. Returns how many
/// have it. Servers that left the slot map do not count.
///
/// # Errors
/// [`RoleError::Superseded`] as soon as one server refuses this coordinator. The others may be cut
/// off.
async fn count_copies(
    states: &[StateOfHolder],
    is_reached: IsReached,
    sequence: u64,
    enough: usize,
) -> Result<usize, RoleError> {
    let mut reaching: FuturesUnordered<_> =
        states.iter().map(|state| reached(state.clone(), is_reached, sequence)).collect();
    let mut copies = 0;
    while copies < enough
        && let Some(reached) = reaching.next().await
    {
        match reached {
            Some(HolderState::Has(_)) => copies += 1,
            Some(HolderState::Superseded) => return Err(RoleError::Superseded),
            Some(HolderState::Unreachable) | None => {}
        }
    }
    Ok(copies)
}

/// Waits until the state is reached. Returns `None` if the server left the slot map.
async fn reached(mut state: StateOfHolder, is_reached: IsReached, sequence: u64) -> Option<HolderState> {
    let reached = state.wait_for(|state| is_reached(*state, sequence)).await.map(|state| *state);
    reached.ok()
}

impl Sender {
    /// Sends each newest copy to one server, until the coordinator ends or is superseded.
    async fn replicate(
        self,
        server: Channel,
        mut newest: watch::Receiver<Option<Written>>,
        state: Arc<watch::Sender<HolderState>>,
    ) {
        while newest.changed().await.is_ok() {
            loop {
                // A statement of its own, so that no lock is held while the copy is sent.
                let copy = newest.borrow_and_update().clone();
                let Some(copy) = copy else { break };
                match self.send(&server, &copy).await {
                    Ok(()) => {
                        state.send_replace(HolderState::Has(copy.sequence));
                        break;
                    }
                    Err(error) if error.is_refused_with(COORDINATOR_SUPERSEDED) => {
                        tracing::warn!(%error, "a parameter server refuses the copy of the journal");
                        state.send_replace(HolderState::Superseded);
                        return;
                    }
                    Err(error) => {
                        tracing::debug!(%error, "a parameter server does not get the copy of the journal");
                        state.send_replace(HolderState::Unreachable);
                        tokio::time::sleep(RETRY_PAUSE).await;
                    }
                }
            }
        }
    }

    async fn send(&self, server: &Channel, copy: &Written) -> Result<(), RoleError> {
        let mut tries = 1;
        loop {
            match self.send_once(server, copy).await {
                Err(RoleError::Wire(WireError::Closed { .. })) if tries < TRIES => tries += 1,
                sent => return sent,
            }
        }
    }

    async fn send_once(&self, server: &Channel, copy: &Written) -> Result<(), RoleError> {
        let Written { sequence, holders, image } = copy;
        let (job, owner) = (self.job.clone(), self.owner);
        let head = v1::JournalHead { job, owner, sequence: *sequence, holders: holders.clone() };
        server.ready(CONNECT).await?;
        message::call(server, v1::PutJournal { head: Some(head) }, vec![Tensor::from(image.to_vec())], PATIENCE)
            .await?;
        self.metrics.journal_copies.inc();
        self.metrics.journal_copy_bytes.inc_by(image.len() as u64);
        Ok(())
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "an unwrap in a test is an assertion")]
mod tests {
    use std::pin::pin;

    use prometheus::Registry;
    use rectrain_modes::migration::{Epoch, SlotMap};
    use rectrain_protocol::message::Request;
    use rectrain_protocol::metrics::RoleMetrics;
    use rectrain_wire::{
        Address, BoxFuture, Frame, InProcess, InProcessConfig, Peer, Refusal, Service, Serving, Transport, WireCounters,
    };

    use super::*;

    /// A server that keeps the copies it got, in order. It refuses copies of incarnation 1.
    #[derive(Default)]
    struct Server(Mutex<Vec<(v1::JournalHead, usize)>>);

    impl Service for Server {
        fn call<'a>(&'a self, _peer: &'a Peer, frame: Frame) -> BoxFuture<'a, Result<Frame, Refusal>> {
            Box::pin(async move {
                let (request, tensors) = message::read::<v1::PutJournal>(frame)?;
                let head = request.head.unwrap();
                if head.owner == 1 {
                    return Err(Refusal::new(COORDINATOR_SUPERSEDED, "superseded"));
                }
                self.0.lock().push((head, tensors[0].byte_len()));
                Ok(message::done::<v1::PutJournal>())
            })
        }
    }

    impl Server {
        /// The sequence, the holders and the bytes of the last copy.
        fn last(&self) -> Option<(u64, Vec<u32>, usize)> {
            self.0.lock().last().map(|(head, bytes)| (head.sequence, head.holders.clone(), *bytes))
        }
    }

    fn transport() -> InProcess {
        InProcess::new(InProcessConfig::default(), WireCounters::unregistered(|_| "test").unwrap())
    }

    fn serve(transport: &InProcess, name: &str) -> (Arc<Server>, Serving) {
        let server = Arc::new(Server::default());
        let serving = transport.serve(Arc::clone(&server) as Arc<dyn Service>, &Address::local(name)).unwrap();
        (server, serving)
    }

    fn placement(transport: &InProcess, servers: &[u16]) -> Placement {
        let map = SlotMap::new(Epoch(1), servers.to_vec(), servers.to_vec()).unwrap();
        let addresses: Vec<String> = servers.iter().map(|server| format!("local://{server}")).collect();
        Placement::new(map, &addresses, transport).unwrap()
    }

    fn copies(owner: u64) -> Copies {
        let metrics = CoordinatorMetrics::of(&RoleMetrics::new(Registry::new()).unwrap(), 0);
        Copies::new("job".to_owned(), owner, metrics)
    }

    #[tokio::test]
    async fn every_server_of_the_map_gets_each_copy() {
        let transport = transport();
        let (zero, _serving) = serve(&transport, "0");
        let (one, _also) = serve(&transport, "1");
        let copies = copies(7);
        copies.put(1, Bytes::from_static(b"nowhere")).await.unwrap();
        copies.follow(&placement(&transport, &[0]));
        copies.put(2, Bytes::from_static(b"two")).await.unwrap();
        assert_eq!((zero.last(), one.last()), (Some((2, vec![0], 3)), None));
        copies.follow(&placement(&transport, &[0, 1]));
        copies.put(3, Bytes::from_static(b"three")).await.unwrap();
        assert_eq!((zero.last(), one.last()), (Some((3, vec![0, 1], 5)), Some((3, vec![0, 1], 5))));
        copies.follow(&placement(&transport, &[1]));
        copies.put(4, Bytes::from_static(b"four")).await.unwrap();
        assert_eq!((zero.last(), one.last()), (Some((3, vec![0, 1], 5)), Some((4, vec![1], 4))));
    }

    #[tokio::test]
    async fn a_server_that_is_away_gets_the_newest_copy_later() {
        let transport = transport();
        let (zero, _serving) = serve(&transport, "0");
        let copies = copies(7);
        copies.follow(&placement(&transport, &[0, 1]));
        for sequence in 1..=3 {
            copies.put(sequence, Bytes::from_static(b"image")).await.unwrap();
        }
        assert_eq!((zero.last(), copies.sender.metrics.journal_copies_behind.get()), (Some((3, vec![0, 1], 5)), 1));
        let (one, _also) = serve(&transport, "1");
        while one.last().is_none() {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        assert_eq!((one.last(), one.0.lock().len()), (Some((3, vec![0, 1], 5)), 1));
        copies.put(4, Bytes::from_static(b"image")).await.unwrap();
        assert_eq!(copies.sender.metrics.journal_copies_behind.get(), 0);
    }

    #[tokio::test]
    async fn a_copy_waits_until_one_server_has_it() {
        let transport = transport();
        let copies = copies(7);
        copies.follow(&placement(&transport, &[0, 1]));
        let mut putting = pin!(copies.put(1, Bytes::from_static(b"image")));
        let waits = tokio::time::timeout(Duration::from_millis(500), &mut putting).await;
        assert!(waits.is_err(), "no server has the copy");
        let (one, _serving) = serve(&transport, "1");
        putting.await.unwrap();
        assert_eq!(one.last(), Some((1, vec![0, 1], 5)));
        copies.void(2).await.unwrap();
        assert_eq!((one.last(), copies.sender.metrics.journal_copies_behind.get()), (Some((2, vec![0, 1], 0)), 1));
    }

    #[tokio::test]
    async fn a_copy_that_waits_goes_to_the_servers_of_the_next_map() {
        let transport = transport();
        let (one, _serving) = serve(&transport, "1");
        let copies = copies(7);
        copies.follow(&placement(&transport, &[0]));
        let mut putting = pin!(copies.put(1, Bytes::from_static(b"image")));
        assert!(tokio::time::timeout(Duration::from_millis(500), &mut putting).await.is_err());
        copies.follow(&placement(&transport, &[1]));
        putting.await.unwrap();
        assert_eq!(one.last(), Some((1, vec![1], 5)));
    }

    /// A server that accepts connections and never answers.
    struct Hung;

    impl Service for Hung {
        fn call<'a>(&'a self, _peer: &'a Peer, _frame: Frame) -> BoxFuture<'a, Result<Frame, Refusal>> {
            Box::pin(std::future::pending())
        }
    }

    #[tokio::test]
    async fn one_refusal_is_enough_while_another_server_hangs() {
        let transport = transport();
        let _hung = transport.serve(Arc::new(Hung) as Arc<dyn Service>, &Address::local("0")).unwrap();
        let (_server, _serving) = serve(&transport, "1");
        let copies = copies(1);
        copies.follow(&placement(&transport, &[0, 1]));
        let put = tokio::time::timeout(Duration::from_secs(20), copies.put(1, Bytes::new())).await;
        assert!(matches!(put, Ok(Err(RoleError::Superseded))), "{put:?}");
    }

    #[tokio::test]
    async fn a_superseded_coordinator_is_told() {
        let transport = transport();
        let (_server, _serving) = serve(&transport, "0");
        let copies = copies(1);
        copies.follow(&placement(&transport, &[0]));
        assert!(matches!(copies.put(1, Bytes::new()).await, Err(RoleError::Superseded)));
    }

    #[tokio::test]
    async fn an_image_that_is_too_large_voids_the_copies() {
        let transport = transport();
        let (server, _serving) = serve(&transport, "0");
        let copies = copies(7);
        copies.follow(&placement(&transport, &[0]));
        copies.put(1, Bytes::from(vec![0; MAX_JOURNAL_COPY_BYTES])).await.unwrap();
        assert_eq!(server.last(), Some((1, vec![0], MAX_JOURNAL_COPY_BYTES)));
        copies.put(2, Bytes::from(vec![0; MAX_JOURNAL_COPY_BYTES + 1])).await.unwrap();
        assert_eq!(server.last(), Some((2, vec![0], 0)));
        assert_eq!(copies.sender.metrics.journal_copies_too_large.get(), 1);
    }

    #[test]
    fn put_journal_is_a_known_message() {
        assert_eq!(message::kind_name(v1::PutJournal::KIND), "put_journal");
    }
}

//! Carries out a [`RingAllReduce`]: sends to the next dense worker, receives from the previous one's calls.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use parking_lot::{Mutex, MutexGuard};
use rectrain_modes::barrier::RingAllReduce;
use rectrain_modes::{GlobalStep, Rank};
use rectrain_proto::v1;
use rectrain_wire::{Channel, Tensor, WireError};
use tokio::sync::Notify;

use rectrain_protocol::error::RoleError;
use rectrain_protocol::message::{self, Request};

/// Far beyond a step's rounds.
const MOST_CHUNKS: usize = 65_536;

/// The pause before a dense worker is called again to which the connection was lost.
const CALL_AGAIN: Duration = Duration::from_millis(10);

/// Ring, step and round.
type Place = (u64, u64, u32);

/// Chunks that the previous rank has sent. Bounded by the ring: it is at most one step's rounds ahead of this rank.
#[derive(Debug, Default)]
pub(crate) struct RingMailbox {
    received: Mutex<Received>,
    arrived: Notify,
}

#[derive(Debug, Default)]
struct Received {
    /// The number of the ring that this rank is part of: chunks of earlier ones were meant for a sum that is not made any more.
    ring: u64,
    chunks: BTreeMap<Place, Vec<f32>>,
    /// The last chunk that this rank has added to its sum. In a ring they are added in order, so that all before it are as well.
    added: Option<Place>,
}

impl RingMailbox {
    /// Takes a chunk in; one that comes again, because the connection was lost before its sender had the answer, counts once.
    pub(crate) fn put(&self, ring: u64, step: GlobalStep, round: u32, chunk: Vec<f32>) -> Result<(), RoleError> {
        let mut received = self.lock();
        let place = (ring, step.0, round);
        let is_known = received.added >= Some(place) || received.chunks.contains_key(&place);
        if ring < received.ring || is_known {
            return Ok(());
        }
        if received.chunks.len() >= MOST_CHUNKS {
            let reason = format!("{MOST_CHUNKS} chunks have been sent that nobody waits for");
            return Err(RoleError::Inconsistent { message: "ring_chunk", reason });
        }
        received.chunks.insert(place, chunk);
        drop(received);
        self.arrived.notify_waiters();
        Ok(())
    }

    /// This rank is part of ring number `ring` from now on.
    pub(crate) fn begin(&self, ring: u64) {
        let mut received = self.lock();
        received.ring = ring;
        received.chunks = received.chunks.split_off(&(ring, 0, 0));
    }

    async fn take(&self, ring: u64, step: GlobalStep, round: u32, patience: Duration) -> Result<Vec<f32>, RoleError> {
        let place = (ring, step.0, round);
        let waiting = async {
            loop {
                let arrived = self.arrived.notified();
                if let Some(chunk) = self.lock().add(place) {
                    return chunk;
                }
                arrived.await;
            }
        };
        tokio::time::timeout(patience, waiting).await.map_err(|_| RoleError::Task {
            what: "all-reduce",
            reason: format!("round {round} of step {step} did not come within {patience:?}"),
        })
    }

    fn lock(&self) -> MutexGuard<'_, Received> {
        self.received.lock()
    }
}

impl Received {
    fn add(&mut self, place: Place) -> Option<Vec<f32>> {
        let chunk = self.chunks.remove(&place)?;
        self.added = Some(place);
        Some(chunk)
    }
}

/// A rank's place in the ring.
#[derive(Debug, Clone, Copy)]
pub(crate) struct RingPart {
    /// Which ring: another each time that one of its dense workers is replaced.
    pub(crate) number: u64,
    pub(crate) rank: Rank,
    pub(crate) ranks: u32,
    /// How long each round waits for the others.
    pub(crate) patience: Duration,
}

/// Sums `buffer` over all ranks, in place; every rank ends with the same bits. Given up, it leaves a part of the sum there.
pub(crate) async fn all_reduce(
    step: GlobalStep,
    part: RingPart,
    buffer: &mut [f32],
    next: &Channel,
    mailbox: &RingMailbox,
) -> Result<(), RoleError> {
    let mut ring = RingAllReduce::new(part.rank, part.ranks, buffer.len());
    for round in 0..ring.rounds() {
        let Some(send) = ring.send() else { break };
        let chunk = || vec![Tensor::from(buffer[send.range.clone()].to_vec())];
        let message = v1::RingChunk { step: step.0, round: send.round, ring: part.number };
        let sent = call_peer(next, message, chunk, part.patience);
        let (_done, received) =
            futures::future::try_join(sent, mailbox.take(part.number, step, round, part.patience)).await?;
        ring.receive(round, &received, buffer)?;
    }
    Ok(())
}

/// Calls another dense worker, which takes in once what comes twice, and calls it again when the connection is lost: whoever is at its other
/// end may live on. If it does not, whoever waits for this hears of a new ring besides. `tensors` gives the request's tensors each time.
pub(crate) async fn call_peer<R: Request + Clone>(
    peer: &Channel,
    request: R,
    tensors: impl Fn() -> Vec<Tensor>,
    patience: Duration,
) -> Result<(R::Reply, Vec<Tensor>), RoleError> {
    let until = Instant::now() + patience;
    loop {
        let left = until.saturating_duration_since(Instant::now());
        match message::call(peer, request.clone(), tensors(), left).await {
            Err(RoleError::Wire(WireError::Closed { .. })) if Instant::now() < until => {
                tokio::time::sleep(CALL_AGAIN).await;
            }
            answered => return answered,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use prometheus::Registry;
    use rectrain_wire::{Address, TcpConfig, TcpTransport, Transport, WireCounters};
    use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
    use tokio::net::{TcpListener, TcpStream};

    use super::super::DenseWorker;
    use super::*;
    use rectrain_protocol::metrics::{DenseWorkerMetrics, RoleMetrics};
    use rectrain_protocol::watchdog::Watchdog;

    const PATIENCE: Duration = Duration::from_secs(600);
    const RANKS: u32 = 3;
    const STEPS: u64 = 40;

    fn transport() -> TcpTransport {
        TcpTransport::new(TcpConfig::default(), WireCounters::unregistered(|_| "test").unwrap())
    }

    /// Passes on what comes, until the next would be more than `most` bytes.
    async fn pass_on(mut from: impl AsyncRead + Unpin, mut to: impl AsyncWrite + Unpin, most: usize) {
        let mut bytes = vec![0; 64 << 10];
        let mut passed = 0;
        while let Ok(read @ 1..) = from.read(&mut bytes).await {
            passed += read;
            if passed > most || to.write_all(&bytes[..read]).await.is_err() {
                return;
            }
        }
    }

    /// A network between dense workers that loses every connection: some while a chunk is on its way, some while the answer to one is.
    async fn lose_connections(listener: TcpListener, to: u16) {
        for connection in 0.. {
            let (mut caller, _) = listener.accept().await.unwrap();
            let mut callee = TcpStream::connect(("127.0.0.1", to)).await.unwrap();
            let (most_asked, most_answered) =
                if connection % 2 == 0 { (3_000, usize::MAX) } else { (usize::MAX, 100 + 100 * (connection % 5)) };
            let (asks, answered) = caller.split();
            let (answers, asked) = callee.split();
            tokio::select! {
                () = pass_on(asks, asked, most_asked) => {}
                () = pass_on(answers, answered, most_answered) => {}
            }
        }
    }

    fn gradients(rank: u32, step: u64) -> Vec<f32> {
        (0..500).map(|value| ((value * 37 + u64::from(rank) * 11 + step * 5) % 101) as f32 / 7.0).collect()
    }

    /// What each rank has after each step; `loses`: connections are lost all the time.
    async fn sums(loses: bool) -> Vec<Vec<Vec<f32>>> {
        let metrics = RoleMetrics::new(Registry::new()).unwrap();
        let metrics_of = |rank| DenseWorkerMetrics::of(&metrics, rank);
        let of_rank = |rank| Arc::new(DenseWorker::new(Rank(rank), 1.0, Watchdog::default(), metrics_of(rank)));
        let workers: Vec<Arc<DenseWorker>> = (0..RANKS).map(of_rank).collect();
        let (mut servings, mut addresses, mut network) = (Vec::new(), Vec::new(), tokio::task::JoinSet::new());
        for worker in &workers {
            let serving = transport().serve(worker.clone(), &Address::tcp("127.0.0.1", 0)).unwrap();
            let Address::Tcp { port, .. } = serving.address().clone() else { panic!("it is served over TCP") };
            servings.push(serving);
            if !loses {
                addresses.push(Address::tcp("127.0.0.1", port));
                continue;
            }
            let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
            addresses.push(Address::tcp("127.0.0.1", listener.local_addr().unwrap().port()));
            network.spawn(lose_connections(listener, port));
        }
        let training = (0..RANKS).map(|rank| {
            let next = transport().connect(&addresses[((rank + 1) % RANKS) as usize]).unwrap();
            let mailbox = &workers[rank as usize].ring;
            async move {
                let part = RingPart { number: 2, rank: Rank(rank), ranks: RANKS, patience: PATIENCE };
                mailbox.begin(part.number);
                let mut sums = Vec::new();
                for step in 0..STEPS {
                    let mut sum = gradients(rank, step);
                    all_reduce(GlobalStep(step), part, &mut sum, &next, mailbox).await.unwrap();
                    sums.push(sum);
                }
                sums
            }
        });
        let sums = futures::future::join_all(training).await;
        // No chunk that came twice is left behind.
        assert!(workers.iter().all(|worker| worker.ring.lock().chunks.is_empty()));
        sums
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn connections_that_are_lost_between_workers_that_live_change_no_bit() {
        let lost = tokio::time::timeout(Duration::from_secs(60), sums(true)).await.unwrap();
        assert_eq!(lost, sums(false).await);
        assert!(lost.iter().all(|of_rank| *of_rank == lost[0]));
    }

    #[tokio::test]
    async fn a_chunk_that_comes_again_counts_once() {
        let mailbox = RingMailbox::default();
        mailbox.begin(1);
        let step = GlobalStep(7);
        let put = |ring, round, value: f32| mailbox.put(ring, step, round, vec![value]).unwrap();
        put(1, 0, 0.5);
        put(1, 0, 0.75);
        assert_eq!(mailbox.take(1, step, 0, PATIENCE).await.unwrap(), [0.5]);
        put(1, 0, 0.5);
        put(1, 1, 1.5);
        assert_eq!(mailbox.take(1, step, 1, PATIENCE).await.unwrap(), [1.5]);
        put(1, 0, 0.5);
        put(1, 1, 1.5);
        assert!(mailbox.lock().chunks.is_empty());
        // The same step is summed anew by the next ring.
        put(2, 0, 2.5);
        mailbox.begin(2);
        put(1, 2, 3.5);
        assert_eq!(mailbox.take(2, step, 0, PATIENCE).await.unwrap(), [2.5]);
        assert!(mailbox.lock().chunks.is_empty());
    }
}

//! Runs a [`RingAllReduce`] over the network. It sends chunks to the next dense worker, and
//! receives chunks from the calls of the previous one.

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

/// The most chunks in the mailbox: far more than a step has rounds.
const MOST_CHUNKS: usize = 65_536;

/// The pause before another call of a dense worker whose connection was lost.
const RETRY_PAUSE: Duration = Duration::from_millis(10);

/// Ring, step and round.
type ChunkId = (u64, u64, u32);

/// Chunks from the previous rank. Their number is bounded, because the previous rank is at most one
/// step's rounds ahead of this rank.
#[derive(Debug, Default)]
pub(crate) struct RingMailbox {
    received: Mutex<Received>,
    arrived: Notify,
}

#[derive(Debug, Default)]
struct Received {
    /// The number of this rank's ring. Chunks of earlier rings belong to sums that were aborted.
    ring: u64,
    chunks: BTreeMap<ChunkId, Vec<f32>>,
    /// The last chunk that this rank has added to its sum. A ring adds chunks in order, so all
    /// earlier chunks were added too.
    added: Option<ChunkId>,
}

impl RingMailbox {
    /// Stores a received chunk. Idempotent: the sender repeats a chunk if it lost the connection
    /// before it received the reply.
    pub(crate) fn put(&self, ring: u64, step: GlobalStep, round: u32, chunk: Vec<f32>) -> Result<(), RoleError> {
        let mut received = self.lock();
        let id = (ring, step.0, round);
        let is_known = received.added >= Some(id) || received.chunks.contains_key(&id);
        if ring < received.ring || is_known {
            return Ok(());
        }
        if received.chunks.len() >= MOST_CHUNKS {
            let reason = format!("{MOST_CHUNKS} chunks are stored and not used: the previous worker is too far ahead");
            return Err(RoleError::Inconsistent { message: "ring_chunk", reason });
        }
        received.chunks.insert(id, chunk);
        drop(received);
        self.arrived.notify_waiters();
        Ok(())
    }

    /// Joins ring number `ring`, and drops the chunks of earlier rings.
    pub(crate) fn begin(&self, ring: u64) {
        let mut received = self.lock();
        received.ring = ring;
        received.chunks = received.chunks.split_off(&(ring, 0, 0));
    }

    /// Waits for a chunk and removes it. Fails after `patience`.
    async fn take(&self, ring: u64, step: GlobalStep, round: u32, patience: Duration) -> Result<Vec<f32>, RoleError> {
        let id = (ring, step.0, round);
        let waiting = async {
            loop {
                let arrived = self.arrived.notified();
                if let Some(chunk) = self.lock().add(id) {
                    return chunk;
                }
                arrived.await;
            }
        };
        tokio::time::timeout(patience, waiting).await.map_err(|_| RoleError::Task {
            what: "all-reduce",
            reason: format!("the chunk of round {round} of step {step} did not arrive within {patience:?}"),
        })
    }

    fn lock(&self) -> MutexGuard<'_, Received> {
        self.received.lock()
    }
}

impl Received {
    fn add(&mut self, id: ChunkId) -> Option<Vec<f32>> {
        let chunk = self.chunks.remove(&id)?;
        self.added = Some(id);
        Some(chunk)
    }
}

/// A rank's position in the ring.
#[derive(Debug, Clone, Copy)]
pub(crate) struct RingPart {
    /// The number of the ring. It grows each time one of its dense workers is replaced.
    pub(crate) number: u64,
    pub(crate) rank: Rank,
    pub(crate) ranks: u32,
    /// How long each round may wait for the others.
    pub(crate) patience: Duration,
}

/// Sums `buffer` over all ranks, in place. Every rank ends with the same bits. If this future is
/// dropped early, `buffer` contains a partial sum.
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

/// Calls another dense worker, and repeats the call while the connection is lost, because that
/// worker may still live. The request must be idempotent. If the worker is dead, the caller learns
/// of a new ring and drops this future. `tensors` makes the request's tensors for each call.
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
                tokio::time::sleep(RETRY_PAUSE).await;
            }
            result => return result,
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

    /// Forwards bytes, until more than `most` bytes were read.
    async fn forward(mut from: impl AsyncRead + Unpin, mut to: impl AsyncWrite + Unpin, most: usize) {
        let mut bytes = vec![0; 64 << 10];
        let mut passed = 0;
        while let Ok(read @ 1..) = from.read(&mut bytes).await {
            passed += read;
            if passed > most || to.write_all(&bytes[..read]).await.is_err() {
                return;
            }
        }
    }

    /// A network between dense workers that breaks every connection: some during a chunk, some
    /// during a reply.
    async fn lose_connections(listener: TcpListener, to: u16) {
        for connection in 0.. {
            let (mut caller, _) = listener.accept().await.unwrap();
            let mut callee = TcpStream::connect(("127.0.0.1", to)).await.unwrap();
            let (most_requested, most_replied) =
                if connection % 2 == 0 { (3_000, usize::MAX) } else { (usize::MAX, 100 + 100 * (connection % 5)) };
            let (requests, to_caller) = caller.split();
            let (replies, to_callee) = callee.split();
            tokio::select! {
                () = forward(requests, to_callee, most_requested) => {}
                () = forward(replies, to_caller, most_replied) => {}
            }
        }
    }

    fn gradients(rank: u32, step: u64) -> Vec<f32> {
        (0..500).map(|value| ((value * 37 + u64::from(rank) * 11 + step * 5) % 101) as f32 / 7.0).collect()
    }

    /// The sums of each rank after each step. `loses`: the network breaks all connections.
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
        // No repeated chunk stays in a mailbox.
        assert!(workers.iter().all(|worker| worker.ring.lock().chunks.is_empty()));
        sums
    }

    #[tokio::test(flavor = "multi_thread")]
    async fn lost_connections_between_live_workers_change_no_bit() {
        let lost = tokio::time::timeout(Duration::from_secs(60), sums(true)).await.unwrap();
        assert_eq!(lost, sums(false).await);
        assert!(lost.iter().all(|of_rank| *of_rank == lost[0]));
    }

    #[tokio::test]
    async fn a_repeated_chunk_counts_once() {
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
        // The next ring sums the same step again.
        put(2, 0, 2.5);
        mailbox.begin(2);
        put(1, 2, 3.5);
        assert_eq!(mailbox.take(2, step, 0, PATIENCE).await.unwrap(), [2.5]);
        assert!(mailbox.lock().chunks.is_empty());
    }
}

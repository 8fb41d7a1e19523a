//! Rounds in which a server forms the mean of the replicas, in `shadow` with `ma` or `bmuf`.
//! [`Rounds`] decides which replicas a round waits for. The replicas of the open round are in
//! memory only: their workers have no reply yet, and send them again to a replacement.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use rectrain_modes::shadow::{Average, Joined, Rounds};
use rectrain_proto::v1;
use rectrain_protocol::blocking::blocking;
use rectrain_protocol::error::RoleError;
use tokio::sync::oneshot;

use super::BufferStanding;
use crate::partition::Replica;
use crate::shared::Shared;

/// The longest time that a replica waits for the other replicas of its round.
const LONGEST_WAIT: Duration = Duration::from_secs(5);

/// The server's partition of the copy, after a round.
type Global = Arc<Vec<f32>>;

/// See the module documentation.
pub(super) struct Averaging {
    average: Average,
    open: Mutex<OpenRound>,
}

#[derive(Default)]
struct OpenRound {
    rounds: Rounds,
    /// By rank. At most one for each worker of the job.
    members: BTreeMap<u32, (v1::Exchange, Replica)>,
    /// The calls that await the end of the round.
    waiting: Vec<oneshot::Sender<Global>>,
}

/// The answer to a replica.
enum Answer {
    Now(Global),
    /// After this round.
    Later(u64, oneshot::Receiver<Global>),
}

impl Averaging {
    pub(super) fn new(average: Average, rounds: Rounds) -> Self {
        Self { average, open: Mutex::new(OpenRound { rounds, ..OpenRound::default() }) }
    }

    /// Adds a replica to the open round. Returns the copy after the round. `buffer` is the position
    /// of the dense partition's buffer.
    pub(super) async fn exchange(
        self: &Arc<Self>,
        shared: &Arc<Shared>,
        exchange: v1::Exchange,
        replica: Replica,
        buffer: Option<BufferStanding>,
    ) -> Result<Global, RoleError> {
        let (this, server, standing) = (Arc::clone(self), Arc::clone(shared), buffer.clone());
        let join = move || this.join(&server, exchange, replica, standing.as_ref());
        let (round, mut later) = match blocking("exchange", join).await?? {
            Answer::Now(copy) => return Ok(copy),
            Answer::Later(round, later) => (round, later),
        };
        if let Ok(answered) = tokio::time::timeout(LONGEST_WAIT, &mut later).await {
            return answered.map_err(|_dropped| RoleError::Stopped);
        }
        let (this, server) = (Arc::clone(self), Arc::clone(shared));
        blocking("exchange", move || this.close_overdue(&server, round, buffer.as_ref())).await?;
        later.await.map_err(|_dropped| RoleError::Stopped)
    }

    /// Adds a replica to the open round, and closes the round if it is complete.
    fn join(
        &self,
        shared: &Shared,
        exchange: v1::Exchange,
        replica: Replica,
        buffer: Option<&BufferStanding>,
    ) -> Result<Answer, RoleError> {
        let mut open = self.open.lock();
        let partition = shared.read_partition();
        partition.check_size(&replica, shared.plan.dense_optimizer.slots().len())?;
        if partition.exchanges().has(&exchange) {
            return Ok(Answer::Now(partition.parameters().values));
        }
        drop(partition);
        match open.rounds.join(exchange.order, exchange.workers, exchange.rank, exchange.last) {
            Joined::Late => Ok(Answer::Now(shared.read_partition().parameters().values)),
            Joined::Complete => {
                open.members.insert(exchange.rank, (exchange, replica));
                Ok(Answer::Now(self.close(&mut open, shared, buffer)))
            }
            Joined::Open(round) => {
                open.members.insert(exchange.rank, (exchange, replica));
                let (ends, later) = oneshot::channel();
                open.waiting.push(ends);
                Ok(Answer::Later(round, later))
            }
        }
    }

    /// Closes this round without the late ranks, unless another call has closed it.
    fn close_overdue(&self, shared: &Shared, round: u64, buffer: Option<&BufferStanding>) {
        let mut open = self.open.lock();
        if open.rounds.is_overdue(round) {
            shared.metrics.incomplete_rounds.inc();
            self.close(&mut open, shared, buffer);
        }
    }

    /// Moves the copy by the open round, makes it durable, and answers the waiting calls.
    fn close(&self, open: &mut OpenRound, shared: &Shared, buffer: Option<&BufferStanding>) -> Global {
        open.rounds.close();
        let members = std::mem::take(&mut open.members);
        shared.metrics.exchanges.inc_by(members.len() as u64);
        let mut partition = shared.write_partition();
        partition.average(members.into_values(), &self.average);
        let copy = partition.parameters().values;
        drop(partition);
        if let Some(kept) = shared.kept.as_deref() {
            kept.keep_partition(&shared.read_partition(), buffer);
        }
        for waiting in open.waiting.drain(..) {
            // The call of a dead worker has ended.
            let _ended = waiting.send(Arc::clone(&copy));
        }
        copy
    }
}

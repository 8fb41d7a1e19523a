//! Rounds in which a server forms the mean of the replicas, in `shadow` with `ma` or `bmuf`.
//! [`Rounds`] decides which replicas a round waits for. The replicas of the open round are in
//! memory only: their workers have no reply yet, and send them again to a replacement.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use rectrain_kinds::OutputModel;
use rectrain_modes::shadow::{Average, Fragments, Joined, Part, Rounds};
use rectrain_proto::v1;
use rectrain_protocol::blocking::blocking;
use rectrain_protocol::error::RoleError;
use tokio::sync::oneshot;

use super::{BufferStanding, Exchanged};
use crate::averages::RoundFragment;
use crate::partition::Replica;
use crate::shared::Shared;

/// The longest time that a replica waits for the other replicas of its round.
const LONGEST_WAIT: Duration = Duration::from_secs(5);

/// The server's partition of the copy, after a round.
type Global = Arc<Vec<f32>>;

/// See the module documentation.
pub(super) struct Averaging {
    average: Average,
    output: OutputModel,
    fragments: Fragments,
    longest_wait: Duration,
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
    Now(Exchanged),
    /// After this round.
    Later(u64, oneshot::Receiver<Global>),
}

impl Averaging {
    pub(super) fn new(average: Average, output: OutputModel, fragments: Fragments, rounds: Rounds) -> Self {
        let open = Mutex::new(OpenRound { rounds, ..OpenRound::default() });
        Self { average, output, fragments, longest_wait: LONGEST_WAIT, open }
    }

    /// Adds a replica to the open round. Returns the copy after the round. `buffer` is the position
    /// of the dense partition's buffer.
    pub(super) async fn exchange(
        self: &Arc<Self>,
        shared: &Arc<Shared>,
        exchange: v1::Exchange,
        replica: Replica,
        buffer: Option<BufferStanding>,
    ) -> Result<Exchanged, RoleError> {
        let (this, server, standing) = (Arc::clone(self), Arc::clone(shared), buffer.clone());
        let join = move || this.join(&server, exchange, replica, standing.as_ref());
        let (round, mut later) = match blocking("exchange", join).await?? {
            Answer::Now(answer) => return Ok(answer),
            Answer::Later(round, later) => (round, later),
        };
        if let Ok(answered) = tokio::time::timeout(self.longest_wait, &mut later).await {
            return answered.map(Exchanged::Copy).map_err(|_dropped| RoleError::Stopped);
        }
        let (this, server) = (Arc::clone(self), Arc::clone(shared));
        blocking("exchange", move || this.close_overdue(&server, round, buffer.as_ref())).await?;
        later.await.map(Exchanged::Copy).map_err(|_dropped| RoleError::Stopped)
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
        let now = partition.parameters().values;
        if partition.exchanges().has(&exchange) {
            return Ok(Answer::Now(Exchanged::Copy(now)));
        }
        drop(partition);
        let part = if exchange.last { Part::Last } else { Part::Fragment(exchange.fragment) };
        match open.rounds.join(exchange.order, exchange.workers, exchange.rank, part) {
            Joined::Late => Ok(Answer::Now(Exchanged::Copy(now))),
            Joined::OtherFragment(fragment) => Ok(Answer::Now(Exchanged::OtherFragment(fragment))),
            Joined::Complete => {
                drop(now);
                open.members.insert(exchange.rank, (exchange, replica));
                Ok(Answer::Now(Exchanged::Copy(self.close(&mut open, shared, buffer))))
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
        let own = self.fragments.range(open.rounds.turn(), shared.read_partition().len());
        open.rounds.close();
        let fragment = RoundFragment { range: own, next: open.rounds.turn() };
        let members = std::mem::take(&mut open.members);
        shared.metrics.exchanges.inc_by(members.len() as u64);
        let mut partition = shared.write_partition();
        partition.average(members.into_values(), fragment, &self.average, self.output);
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

#[cfg(all(test, target_os = "linux"))]
#[allow(clippy::unwrap_used, reason = "an unwrap in a test is an assertion")]
mod tests {
    use super::*;
    use crate::tests::shared_of;

    /// The exchange of a rank of three.
    fn exchange(rank: u32, number: u64) -> v1::Exchange {
        v1::Exchange { rank, order: 1, number, caller: 7, workers: 3, ..v1::Exchange::default() }
    }

    fn replica(shared: &Shared, value: f32) -> Replica {
        let len = shared.read_partition().len();
        Replica { range: 0..len, parameters: vec![value; len], state: None }
    }

    /// Only rank 0 is there. It waits for the others once.
    #[tokio::test(flavor = "multi_thread")]
    async fn a_round_that_waits_too_long_is_closed() {
        let folder = tempfile::tempdir().unwrap();
        let shared = shared_of("shadow", folder.path()).await;
        let averaging = Averaging::new(Average::Mean, OutputModel::Copy, Fragments::default(), Rounds::default());
        let averaging = Arc::new(Averaging { longest_wait: Duration::from_millis(5), ..averaging });
        for (number, value) in [(1, 2.0), (2, 4.0)] {
            let answer = averaging.exchange(&shared, exchange(0, number), replica(&shared, value), None).await;
            let Ok(Exchanged::Copy(copy)) = answer else { panic!("the copy is the answer") };
            assert!(copy.iter().all(|parameter| *parameter == value), "{copy:?}");
            assert_eq!(shared.metrics.incomplete_rounds.get(), 1, "the first one only");
        }
        assert_eq!(shared.metrics.exchanges.get(), 2);
    }

    /// Ranks 0 and 1 wait for rank 2, and both find that the round is overdue.
    #[tokio::test(flavor = "multi_thread")]
    async fn an_overdue_round_is_closed_once_and_answers_all_its_ranks() {
        let folder = tempfile::tempdir().unwrap();
        let shared = shared_of("shadow", folder.path()).await;
        let averaging = Averaging::new(Average::Mean, OutputModel::Copy, Fragments::default(), Rounds::default());
        let join = |rank, number, value| {
            let replica = replica(&shared, value);
            averaging.join(&shared, exchange(rank, number), replica, None).unwrap()
        };
        let mut waiting = Vec::new();
        for (rank, value) in [(0, 1.0), (1, 4.0)] {
            let Answer::Later(round, later) = join(rank, 1, value) else { panic!("rank 2 is late") };
            waiting.push((round, later));
        }
        for (round, _) in &waiting {
            averaging.close_overdue(&shared, *round, None);
        }
        assert_eq!(shared.metrics.incomplete_rounds.get(), 1);
        for (_, later) in waiting {
            assert!(later.await.unwrap().iter().all(|parameter| *parameter == 2.5));
        }
        // The next round does not wait for rank 2.
        assert!(matches!(join(0, 2, 6.0), Answer::Later(..)));
        let Answer::Now(Exchanged::Copy(copy)) = join(1, 2, 8.0) else { panic!("rank 2 is awaited") };
        assert!(copy.iter().all(|parameter| *parameter == 7.0), "{copy:?}");
        assert_eq!(shared.metrics.incomplete_rounds.get(), 1);
    }
}

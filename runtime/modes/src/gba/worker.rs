//! A dense worker's half (appendix B, algorithm 1). The worker pulls parameters, a batch and a
//! token, and computes. Then it pushes the gradient with its token to every parameter server, and
//! continues with the next batch without waiting for them. A worker that restarts forgets
//! everything that it held. The dense-worker role calls this state machine and carries out the
//! actions that it returns.

use std::collections::{BTreeSet, VecDeque};

use crate::{Assignment, Batch, Outcome, Reply, Server};

/// The role's next action.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum WorkerAction {
    /// Request a batch and a token from the coordinator.
    Pull,
    /// Pull the parameters, compute this batch, then call [`PushPullWorker::computed`].
    Compute(Assignment),
    /// Send the gradient of this batch, with this token, to every server.
    Push(Assignment),
    /// Report the outcome of this batch to the coordinator.
    Report(Batch, Outcome),
    /// All data is trained and every push is acknowledged.
    Stop,
}

/// A message that no correct peer sends.
#[derive(Debug, thiserror::Error, PartialEq, Eq)]
pub enum WorkerError {
    /// The coordinator answered although the worker has no request open.
    #[error("the coordinator sent a batch, but this worker has no request open")]
    NotAsked,
    /// The role reported a gradient although no batch is being computed.
    #[error("a gradient was reported, but this worker is not computing a batch")]
    NothingComputed,
    /// An acknowledgement of a batch that was not pushed to this server, or that it already
    /// acknowledged.
    #[error("server {server} acknowledged {batch}, but this worker expects no acknowledgement of that batch from it")]
    NotOwed { server: Server, batch: Batch },
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum State {
    /// At the limit of pushes without an acknowledgement.
    Full,
    Asked,
    Computing(Assignment),
    Ended,
}

#[derive(Clone, Debug)]
struct Pending {
    batch: Batch,
    missing: BTreeSet<Server>,
    outcome: Outcome,
}

/// The dense worker as a state machine; see the module's documentation.
#[derive(Clone, Debug)]
pub struct PushPullWorker {
    servers: u32,
    unacknowledged_limit: usize,
    state: State,
    pending: VecDeque<Pending>,
}

impl PushPullWorker {
    /// A worker of a job with `servers` parameter servers. At most `unacknowledged_limit` pushed
    /// batches may wait for acknowledgements; the limit is at least 1. At that limit, the worker
    /// stops until all servers have acknowledged one of them.
    #[must_use]
    pub fn new(servers: u32, unacknowledged_limit: usize) -> Self {
        Self {
            servers: servers.max(1),
            unacknowledged_limit: unacknowledged_limit.max(1),
            state: State::Ended,
            pending: VecDeque::new(),
        }
    }

    /// Starts, or restarts after a failure. The worker forgets every batch that it held.
    pub fn start(&mut self) -> Vec<WorkerAction> {
        self.pending.clear();
        self.state = State::Asked;
        vec![WorkerAction::Pull]
    }

    /// The coordinator's answer to a pull.
    pub fn answered(&mut self, reply: Reply) -> Result<Vec<WorkerAction>, WorkerError> {
        if self.state != State::Asked {
            return Err(WorkerError::NotAsked);
        }
        Ok(match reply {
            Reply::Work(assignment) => {
                self.state = State::Computing(assignment);
                vec![WorkerAction::Compute(assignment)]
            }
            Reply::Finished => {
                self.state = State::Ended;
                self.stop_if_done()
            }
        })
    }

    /// The gradient of the present batch is computed.
    pub fn computed(&mut self) -> Result<Vec<WorkerAction>, WorkerError> {
        let State::Computing(assignment) = self.state else { return Err(WorkerError::NothingComputed) };
        self.pending.push_back(Pending {
            batch: assignment.batch,
            missing: (0..self.servers).map(Server).collect(),
            outcome: Outcome::Dropped,
        });
        self.state = State::Full;
        let mut actions = vec![WorkerAction::Push(assignment)];
        self.pull_if_possible(&mut actions);
        Ok(actions)
    }

    /// A server answered a push. The worker reports the outcome of a batch once all servers have
    /// answered. The outcome is repeated if one server already had the rows, else trained if one
    /// buffered them, else dropped.
    pub fn acknowledged(
        &mut self,
        server: Server,
        batch: Batch,
        outcome: Outcome,
    ) -> Result<Vec<WorkerAction>, WorkerError> {
        let not_owed = WorkerError::NotOwed { server, batch };
        // A live worker that was presumed dead may get its own batch again. The first match is the
        // older push: each server answers in the order of the pushes.
        let owed = |p: &Pending| p.batch == batch && p.missing.contains(&server);
        let Some(place) = self.pending.iter().position(owed) else { return Err(not_owed) };
        let pending = &mut self.pending[place];
        pending.missing.remove(&server);
        pending.outcome = pending.outcome.max(outcome);
        if !pending.missing.is_empty() {
            return Ok(Vec::new());
        }
        let mut actions = vec![WorkerAction::Report(batch, pending.outcome)];
        self.pending.remove(place);
        self.pull_if_possible(&mut actions);
        actions.extend(self.stop_if_done());
        Ok(actions)
    }

    /// Pushed batches that some server has not acknowledged yet.
    #[must_use]
    pub fn unacknowledged(&self) -> usize {
        self.pending.len()
    }

    /// Whether the worker has stopped: no batch is left, and every push is acknowledged.
    #[must_use]
    pub fn has_stopped(&self) -> bool {
        self.state == State::Ended && self.pending.is_empty()
    }

    fn pull_if_possible(&mut self, actions: &mut Vec<WorkerAction>) {
        if self.state == State::Full && self.pending.len() < self.unacknowledged_limit {
            self.state = State::Asked;
            actions.push(WorkerAction::Pull);
        }
    }

    fn stop_if_done(&self) -> Vec<WorkerAction> {
        if self.has_stopped() { vec![WorkerAction::Stop] } else { Vec::new() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Token;

    fn assignment(first_row: u64) -> Assignment {
        Assignment { batch: Batch { first_row, rows: 1 }, token: Token(0) }
    }

    #[test]
    fn it_runs_ahead_of_acknowledgements_up_to_the_limit() {
        let mut worker = PushPullWorker::new(2, 2);
        assert_eq!(worker.start(), [WorkerAction::Pull]);
        let (first, second) = (assignment(0), assignment(1));
        assert_eq!(worker.answered(Reply::Work(first)).unwrap(), [WorkerAction::Compute(first)]);
        assert_eq!(worker.computed().unwrap(), [WorkerAction::Push(first), WorkerAction::Pull]);
        worker.answered(Reply::Work(second)).unwrap();
        assert_eq!(worker.computed().unwrap(), [WorkerAction::Push(second)], "two pushes are unacknowledged");
        assert_eq!(worker.acknowledged(Server(1), second.batch, Outcome::Dropped).unwrap(), []);
        assert!(worker.acknowledged(Server(1), second.batch, Outcome::Dropped).is_err());
        assert_eq!(
            worker.acknowledged(Server(0), second.batch, Outcome::Trained).unwrap(),
            [WorkerAction::Report(second.batch, Outcome::Trained), WorkerAction::Pull]
        );
        assert_eq!(worker.answered(Reply::Finished).unwrap(), []);
        worker.acknowledged(Server(0), first.batch, Outcome::Repeated).unwrap();
        assert_eq!(
            worker.acknowledged(Server(1), first.batch, Outcome::Trained).unwrap(),
            [WorkerAction::Report(first.batch, Outcome::Repeated), WorkerAction::Stop]
        );
    }

    #[test]
    fn a_restart_forgets_the_held_batches() {
        let mut worker = PushPullWorker::new(1, 1);
        worker.start();
        worker.answered(Reply::Work(assignment(0))).unwrap();
        assert_eq!(worker.start(), [WorkerAction::Pull]);
        assert_eq!(worker.computed(), Err(WorkerError::NothingComputed));
        assert_eq!(worker.unacknowledged(), 0);
    }
}

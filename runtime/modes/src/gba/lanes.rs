//! Several computations of one dense worker at the same time (the threads of `shadow`). Each lane
//! is a [`PushPullWorker`]. The coordinator knows the worker only. So the lanes take turns with
//! their requests for batches, and one request is open at a time.

use std::collections::VecDeque;

use crate::gba::{PushPullWorker, WorkerAction, WorkerError};
use crate::{Batch, Outcome, Reply, Server};

/// The lanes of a dense worker as a state machine; see the module's documentation.
#[derive(Clone, Debug)]
pub struct Lanes {
    lanes: Vec<PushPullWorker>,
    /// The lanes that want a batch. The open request is for the first one.
    pulling: VecDeque<usize>,
    /// Whether the coordinator has handed out the last batch.
    ended: bool,
}

/// The role's next action, and the lane that it is for.
pub type LaneAction = (usize, WorkerAction);

impl Lanes {
    /// `lanes` lanes, at least 1. See [`PushPullWorker::new`] for the other arguments, which hold
    /// for each lane.
    #[must_use]
    pub fn new(lanes: usize, servers: u32, unacknowledged_limit: usize) -> Self {
        let lane = PushPullWorker::new(servers, unacknowledged_limit);
        Self { lanes: vec![lane; lanes.max(1)], pulling: VecDeque::new(), ended: false }
    }

    /// Starts all lanes.
    pub fn start(&mut self) -> Vec<LaneAction> {
        let started: Vec<_> = self.lanes.iter_mut().map(PushPullWorker::start).collect();
        started.into_iter().enumerate().flat_map(|(lane, actions)| self.admit(lane, actions)).collect()
    }

    /// The coordinator's answer to the open request.
    ///
    /// # Errors
    /// [`WorkerError::NotAsked`] if no request is open.
    pub fn answered(&mut self, reply: Reply) -> Result<Vec<LaneAction>, WorkerError> {
        let lane = self.pulling.pop_front().ok_or(WorkerError::NotAsked)?;
        let mut actions = self.lanes[lane].answered(reply).map(|actions| of_lane(lane, actions))?;
        if reply == Reply::Finished {
            self.ended = true;
            for lane in std::mem::take(&mut self.pulling) {
                actions.extend(of_lane(lane, self.lanes[lane].answered(Reply::Finished)?));
            }
        } else if let Some(next) = self.pulling.front() {
            actions.push((*next, WorkerAction::Pull));
        }
        Ok(self.stop_once(actions))
    }

    /// The gradient of a lane's batch is computed.
    ///
    /// # Errors
    /// [`WorkerError::NothingComputed`] if the lane computes nothing.
    pub fn computed(&mut self, lane: usize) -> Result<Vec<LaneAction>, WorkerError> {
        let actions = self.lanes.get_mut(lane).ok_or(WorkerError::NothingComputed)?.computed()?;
        self.go_on(lane, actions)
    }

    /// A server answered the push of a batch. See [`PushPullWorker::acknowledged`].
    ///
    /// # Errors
    /// [`WorkerError::NotOwed`] if no lane expects this answer.
    pub fn acknowledged(
        &mut self,
        server: Server,
        batch: Batch,
        outcome: Outcome,
    ) -> Result<Vec<LaneAction>, WorkerError> {
        for lane in 0..self.lanes.len() {
            match self.lanes[lane].acknowledged(server, batch, outcome) {
                Err(WorkerError::NotOwed { .. }) => {}
                actions => return self.go_on(lane, actions?),
            }
        }
        Err(WorkerError::NotOwed { server, batch })
    }

    /// Continues with a lane. If it wants a batch after the last one was handed out, it ends.
    fn go_on(&mut self, lane: usize, mut actions: Vec<WorkerAction>) -> Result<Vec<LaneAction>, WorkerError> {
        if self.ended && actions.contains(&WorkerAction::Pull) {
            actions.retain(|action| *action != WorkerAction::Pull);
            actions.extend(self.lanes[lane].answered(Reply::Finished)?);
        }
        let admitted = self.admit(lane, actions);
        Ok(self.stop_once(admitted))
    }

    /// Lets a lane's request wait while another one is open.
    fn admit(&mut self, lane: usize, actions: Vec<WorkerAction>) -> Vec<LaneAction> {
        let mut admitted = Vec::with_capacity(actions.len());
        for action in actions {
            if action == WorkerAction::Pull {
                self.pulling.push_back(lane);
                if self.pulling.len() > 1 {
                    continue;
                }
            }
            admitted.push((lane, action));
        }
        admitted
    }

    /// The worker stops once its last lane does.
    fn stop_once(&self, mut actions: Vec<LaneAction>) -> Vec<LaneAction> {
        let last = actions.iter().rfind(|(_, action)| *action == WorkerAction::Stop).cloned();
        actions.retain(|(_, action)| *action != WorkerAction::Stop);
        actions.extend(last.filter(|_| self.lanes.iter().all(PushPullWorker::has_stopped)));
        actions
    }
}

fn of_lane(lane: usize, actions: Vec<WorkerAction>) -> Vec<LaneAction> {
    actions.into_iter().map(|action| (lane, action)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Assignment, Token};

    fn batch(number: u64) -> Batch {
        Batch { first_row: 10 * number, rows: 10 }
    }

    fn work(number: u64) -> Reply {
        Reply::Work(Assignment { batch: batch(number), token: Token(number) })
    }

    /// The actions in short: the lane, and the first letter of the action.
    fn short(actions: Vec<LaneAction>) -> Vec<String> {
        let letter = |action| match action {
            WorkerAction::Pull => "pull",
            WorkerAction::Compute(_) => "compute",
            WorkerAction::Push(_) => "push",
            WorkerAction::Report(..) => "report",
            WorkerAction::Stop => "stop",
        };
        actions.into_iter().map(|(lane, action)| format!("{lane} {}", letter(action))).collect()
    }

    #[test]
    fn lanes_compute_at_the_same_time_and_one_request_is_open() {
        let mut lanes = Lanes::new(3, 1, 1);
        assert_eq!(short(lanes.start()), ["0 pull"]);
        assert_eq!(short(lanes.answered(work(0)).unwrap()), ["0 compute", "1 pull"]);
        assert_eq!(short(lanes.answered(work(1)).unwrap()), ["1 compute", "2 pull"]);
        assert_eq!(short(lanes.computed(1).unwrap()), ["1 push"]);
        let done = |lanes: &mut Lanes, number| lanes.acknowledged(Server(0), batch(number), Outcome::Trained).unwrap();
        assert_eq!(short(done(&mut lanes, 1)), ["1 report"], "lane 2 has asked before");
        assert_eq!(short(lanes.answered(work(2)).unwrap()), ["2 compute", "1 pull"]);
        assert_eq!(short(lanes.computed(0).unwrap()), ["0 push"]);
        assert_eq!(short(lanes.answered(Reply::Finished).unwrap()), [""; 0], "others compute or wait");
        assert_eq!(short(done(&mut lanes, 0)), ["0 report"], "no further request");
        assert_eq!(short(lanes.computed(2).unwrap()), ["2 push"]);
        assert_eq!(short(done(&mut lanes, 2)), ["2 report", "2 stop"]);
    }

    #[test]
    fn the_end_reaches_lanes_that_wait_and_stops_the_worker_once() {
        let mut lanes = Lanes::new(4, 1, 1);
        lanes.start();
        assert_eq!(short(lanes.answered(Reply::Finished).unwrap()), ["3 stop"]);
        assert_eq!(lanes.answered(Reply::Finished), Err(WorkerError::NotAsked));
    }

    #[test]
    fn messages_that_no_lane_expects_are_refused() {
        let mut lanes = Lanes::new(2, 1, 1);
        lanes.start();
        assert_eq!(lanes.computed(0), Err(WorkerError::NothingComputed));
        assert_eq!(lanes.computed(7), Err(WorkerError::NothingComputed));
        let not_owed = WorkerError::NotOwed { server: Server(0), batch: batch(0) };
        assert_eq!(lanes.acknowledged(Server(0), batch(0), Outcome::Trained), Err(not_owed));
    }
}

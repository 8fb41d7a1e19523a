//! Training at rest, at a global-step boundary: what is due there in its order (an evaluation, a checkpoint, dense workers that join or leave, a
//! flip of the slot map), and the way into the mode in which it goes on. At the end the checkpoint comes first: what the test shows, or bad rows
//! in its files, lose no model.

use rectrain_modes::switch::{Boundary, SwitchPhase};
use rectrain_modes::{DenseHome, Server};
use rectrain_proto::v1;
use rectrain_proto::v1::order::Order as Kind;

use super::driver::driver;
use super::{SaveStep, ServerCall, SlotsMove, Stage, Training};
use rectrain_protocol::error::RoleError;

impl Training {
    /// Dense parameters are where the mode has them: the first mode begins.
    pub(super) fn begin_first_mode(&mut self) {
        let at = self.start_of_order();
        match self.modes.current.dense_home() {
            DenseHome::Workers => self.begin_mode(at),
            DenseHome::Servers => {
                self.give(at, Kind::Publish(v1::Publish {}));
                self.stage = Stage::Moving;
            }
        }
    }

    /// Every parameter server has restored its rows; dense workers take their parameters from `checkpoint`.
    pub(crate) fn rows_restored(&mut self, checkpoint: String) {
        let at = self.start_of_order();
        self.give(at, Kind::Restore(v1::Restore { checkpoint }));
    }

    /// The servers have fixed the instant. Dense worker 0 writes its parameters under the `ticket`; without one there is no
    /// checkpoint of this boundary.
    pub(crate) fn frozen(&mut self, ticket: Option<v1::Ticket>) -> Result<(), RoleError> {
        let at = self.boundary()?;
        self.due.save = SaveStep::Frozen;
        if self.is_dense_on_workers()
            && let Some(ticket) = ticket
        {
            self.give(at, Kind::Save(v1::Save { ticket: Some(ticket) }));
        }
        self.advance()
    }

    /// The checkpoint of the end exists, or has to be written again.
    pub(crate) fn last_saved(&mut self, exists: bool) -> Result<(), RoleError> {
        if exists {
            self.due.save = SaveStep::Written;
            return self.advance();
        }
        self.due.save = SaveStep::Freezing;
        self.calls.push(ServerCall::Save { at: self.boundary()?, last: true });
        Ok(())
    }

    /// The servers are at another map.
    pub(crate) fn flipped(&mut self, map_epoch: u64, servers: u32) -> Result<(), RoleError> {
        let at = self.boundary()?;
        let gathered = self.gathers(servers);
        self.slots.map_epoch = map_epoch;
        self.plan.servers = servers;
        self.run.set_servers(2 * servers);
        self.slots.moving = SlotsMove::Flipped;
        self.move_dense(at, self.is_dense_on_workers() || gathered)?;
        self.advance()
    }

    /// No slot moves any more.
    pub(crate) fn slots_settled(&mut self) -> Result<(), RoleError> {
        self.slots.moving = SlotsMove::No;
        if self.stage == Stage::Settling {
            self.leave_rest()?;
        }
        Ok(())
    }

    /// Whether each dense worker holds the dense parameters, in the mode in force.
    fn is_dense_on_workers(&self) -> bool {
        self.modes.current.dense_home() == DenseHome::Workers
    }

    /// Whether each dense worker holds the dense parameters, in this mode and in the next one.
    fn stays_on_workers(&self) -> bool {
        self.is_dense_on_workers() && self.modes.next.dense_home() == DenseHome::Workers
    }

    /// Whether the dense parameters, which are on the servers, have to be cut anew for so many servers.
    fn gathers(&self, servers: u32) -> bool {
        !self.is_dense_on_workers() && servers != self.plan.servers
    }

    /// Every parameter server has begun the mode.
    pub(crate) fn begun(&mut self) -> Result<(), RoleError> {
        for server in 0..2 * self.plan.servers {
            self.run.moved(Server(server))?;
        }
        self.start();
        self.advance()
    }

    /// The calls to the servers that were asked for, in the coordinator's life before: whether they were made is not known, and made twice
    /// they do what they do once.
    pub(crate) fn call_again(&mut self) -> Result<(), RoleError> {
        self.calls.clear();
        match self.stage {
            Stage::Beginning => {
                let at = self.boundary().unwrap_or_else(|_| self.start_of_order());
                self.begin_mode(at);
            }
            Stage::Training if self.flushing => self.calls.push(ServerCall::Flush),
            Stage::Saving => {
                let at = self.boundary()?;
                let last = self.due.saves_last;
                // The one of the end has to exist, and who was writing it is dead.
                if self.due.save == SaveStep::Freezing || (last && self.due.save == SaveStep::Frozen) {
                    self.due.save = SaveStep::Freezing;
                    self.calls.push(ServerCall::Save { at, last });
                }
            }
            _ => {}
        }
        self.advance()
    }

    pub(super) fn enter_rest(&mut self) -> Result<(), RoleError> {
        let at = self.boundary()?;
        self.flushing = false;
        self.workers.asked.clear();
        self.workers.answers.clear();
        self.feed.granted = self.feed.data.locate(at.next_row).0;
        self.stage = Stage::Resting;
        Ok(())
    }

    /// At rest: predict if that is due, or save the model of the end.
    pub(super) fn decide_at_rest(&mut self) -> Result<bool, RoleError> {
        let at = self.boundary()?;
        let due = self.evaluation_due().is_some_and(|due| due <= self.feed.granted);
        if due
            && self.plan.tests_on_the_next_slice
            && !self.feed.data.complete()
            && self.feed.data.batches() == self.feed.granted
        {
            // Whether there is a next slice is not known yet.
            return Ok(false);
        }
        match (self.is_at_end(at), self.plan.saves) {
            (true, true) => self.begin_save(at, true),
            (true, false) => self.test_the_end(at),
            (false, _) if due && self.plan.evaluates => self.begin_evaluation(at),
            (false, _) => self.after_evaluation(),
        }
    }

    /// The last evaluation, if there is one behind the last row.
    fn test_the_end(&mut self, at: Boundary) -> Result<bool, RoleError> {
        // That the data ends here may have been found out after an evaluation here.
        let is_tested = self.due.tested_at == Some(self.feed.granted);
        if self.plan.evaluates && !self.plan.tests_on_the_next_slice && !is_tested {
            self.begin_evaluation(at)
        } else {
            self.leave_rest()
        }
    }

    fn begin_evaluation(&mut self, at: Boundary) -> Result<bool, RoleError> {
        self.due.evaluated_through = self.feed.granted;
        self.due.tested_at = Some(self.feed.granted);
        self.due.evaluation_to_begin = Some(at.step);
        self.give(at, Kind::Evaluate(v1::Evaluate { read: !self.is_dense_on_workers() }));
        self.stage = Stage::Evaluating;
        Ok(true)
    }

    pub(super) fn after_restore(&mut self) -> bool {
        self.begin_first_mode();
        true
    }

    /// At rest: save a checkpoint if that is due.
    pub(super) fn after_evaluation(&mut self) -> Result<bool, RoleError> {
        let at = self.boundary()?;
        let due =
            self.save_due().is_some_and(|due| due <= self.feed.granted) && self.due.saved_through < self.feed.granted;
        match self.is_at_end(at) {
            // It may have become known only since training rests here.
            true if self.plan.saves && !self.end_is_saved() => self.begin_save(at, true),
            false if self.plan.saves && (due || self.due.save_wanted) => self.begin_save(at, false),
            _ => self.leave_rest(),
        }
    }

    /// At rest: a checkpoint is fixed, or exists.
    pub(super) fn after_save(&mut self) -> Result<bool, RoleError> {
        let at = self.boundary()?;
        match self.is_at_end(at) {
            true if !self.end_is_saved() => self.begin_save(at, true),
            true => self.test_the_end(at),
            false => self.leave_rest(),
        }
    }

    /// Whether the checkpoint of the end exists.
    pub(crate) fn end_is_saved(&self) -> bool {
        self.due.save == SaveStep::Written
    }

    fn begin_save(&mut self, at: Boundary, last: bool) -> Result<bool, RoleError> {
        self.due.saves_last = last;
        self.due.saved_through = self.feed.granted;
        self.due.save_wanted = false;
        self.due.save = SaveStep::Freezing;
        self.calls.push(ServerCall::Save { at, last });
        self.stage = Stage::Saving;
        Ok(true)
    }

    pub(super) fn is_saved(&self) -> bool {
        self.due.save == SaveStep::Written || (self.due.save == SaveStep::Frozen && !self.due.saves_last)
    }

    pub(super) fn leave_rest(&mut self) -> Result<bool, RoleError> {
        let at = self.boundary()?;
        if self.is_at_end(at) {
            if self.slots.moving != SlotsMove::No {
                self.calls.push(ServerCall::SettleSlots);
                self.stage = Stage::Settling;
                return Ok(false);
            }
            self.give(at, Kind::End(v1::End { read: !self.is_dense_on_workers() }));
            self.stage = Stage::Ended;
            return Ok(false);
        }
        if self.is_regrouping() {
            if self.workers.next > self.plan.workers && self.stays_on_workers() {
                self.give(at, Kind::Publish(v1::Publish {}));
                self.stage = Stage::Sharing;
                return Ok(true);
            }
            self.regroup();
        }
        self.flip_or_move(at)
    }

    /// From here on there are so many dense workers. Those that join have carried out what was ordered so far.
    fn regroup(&mut self) {
        self.plan.workers = self.workers.next;
        self.workers.wanted = None;
        self.workers.done.resize(self.workers.next as usize, self.order.number);
    }

    /// The dense parameters are on the servers: all workers, those that join among them, read them from there.
    pub(super) fn take_in_workers(&mut self) -> Result<bool, RoleError> {
        let at = self.boundary()?;
        self.regroup();
        self.give(at, Kind::ReadBack(v1::ReadBack {}));
        self.stage = Stage::Joining;
        Ok(true)
    }

    pub(super) fn flip_or_move(&mut self, at: Boundary) -> Result<bool, RoleError> {
        if let SlotsMove::Copied { servers } = self.slots.moving {
            if !self.gathers(servers) {
                return Ok(self.flip());
            }
            self.give(at, Kind::ReadBack(v1::ReadBack {}));
            self.stage = Stage::Gathering;
            return Ok(true);
        }
        self.move_dense(at, self.is_dense_on_workers())
    }

    pub(super) fn flip(&mut self) -> bool {
        self.calls.push(ServerCall::Flip);
        self.stage = Stage::Flipping;
        true
    }

    /// Brings the dense parameters, which the workers hold or the servers, to where the next mode has them.
    fn move_dense(&mut self, at: Boundary, on_workers: bool) -> Result<bool, RoleError> {
        match (on_workers, self.modes.next.dense_home() == DenseHome::Workers) {
            (true, false) => self.give(at, Kind::Publish(v1::Publish {})),
            (false, true) => self.give(at, Kind::ReadBack(v1::ReadBack {})),
            _ => return self.begin_after_move(),
        }
        self.stage = Stage::Moving;
        Ok(true)
    }

    pub(super) fn begin_after_move(&mut self) -> Result<bool, RoleError> {
        let at = self.boundary()?;
        self.begin_mode(at);
        Ok(false)
    }

    fn begin_mode(&mut self, at: Boundary) {
        let (_, place) = self.feed.data.locate(at.next_row);
        let first_piece = (place / self.plan.local_rows) as u32;
        self.calls.push(ServerCall::Begin { mode: self.modes.next, at, first_piece });
        self.stage = Stage::Beginning;
    }

    /// All servers are in the mode: dense workers train.
    fn start(&mut self) {
        self.counts.switches += u64::from(self.modes.current != self.modes.next);
        self.modes.current = self.modes.next;
        self.feed.stop_at = None;
        let at = self.start_of_order();
        let order = driver(self.modes.current).begin(self);
        self.give(at, order);
        self.stage = Stage::Training;
    }

    pub(super) fn boundary(&self) -> Result<Boundary, RoleError> {
        match self.run.phase() {
            SwitchPhase::Moving { at, .. } => Ok(*at),
            _ => Err(RoleError::Inconsistent { message: "order", reason: "training is not at rest".to_owned() }),
        }
    }

    /// An earlier run may have stood within the global batch after the last, if it was to train longer than this one.
    fn is_at_end(&self, at: Boundary) -> bool {
        self.feed.data.complete() && at.next_row >= self.feed.data.row_of(self.feed.data.batches())
    }

    /// The mode after this rest: a command's, else the schedule's. And the dense workers that there are to be.
    pub(super) fn choose_what_is_next(&mut self) {
        self.workers.next = self.workers.wanted.take().unwrap_or(self.plan.workers);
        let here = driver(self.modes.current).next_batch(self);
        self.modes.next = self.modes.current;
        while let Some((_, mode)) = self.modes.scheduled.front().copied().filter(|(batch, _)| *batch <= here) {
            self.modes.scheduled.pop_front();
            self.modes.next = mode;
        }
        if let Some(mode) = self.modes.requested.take() {
            self.modes.next = mode;
        }
    }

    pub(super) fn is_asked_to_rest(&self) -> bool {
        let flips = matches!(self.slots.moving, SlotsMove::Copied { .. });
        flips
            || self.modes.requested.is_some()
            || self.workers.wanted.is_some()
            || (self.due.save_wanted && self.plan.saves)
    }

    /// The next batch before which training rests, as far as that is known.
    pub(super) fn next_rest(&self) -> Option<u64> {
        let switch = self.modes.scheduled.front().map(|(batch, _)| *batch);
        let evaluation = if self.plan.evaluates { self.evaluation_due() } else { None };
        switch.into_iter().chain(evaluation).chain(self.save_due()).min()
    }

    fn save_due(&self) -> Option<u64> {
        self.plan.save_every.map(|every| (self.due.saved_through / every + 1) * every)
    }

    fn evaluation_due(&self) -> Option<u64> {
        self.plan.evaluation.next_after(self.due.evaluated_through, self.feed.data.epoch_starts())
    }
}

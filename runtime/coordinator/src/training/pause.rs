//! Training paused at a boundary: everything that is due there, in order.
//!
//! 1. An evaluation.
//! 2. A checkpoint.
//! 3. Dense workers that join or leave.
//! 4. A flip of the slot map.
//! 5. The next mode.
//!
//! At the end, the checkpoint comes before the evaluation. Then bad rows in the test files cannot
//! cost the trained model.

use rectrain_modes::switch::{Boundary, SwitchPhase};
use rectrain_modes::{DenseHome, Server};
use rectrain_proto::v1;
use rectrain_proto::v1::order::Order as Kind;

use super::driver::driver;
use super::{SaveStep, ServerCall, SlotsMove, Stage, Training};
use rectrain_protocol::error::RoleError;

impl Training {
    /// Begins the first mode, once the dense parameters are where that mode needs them.
    pub(super) fn begin_first_mode(&mut self) {
        let at = self.start_of_order();
        match self.modes.current.dense_home() {
            DenseHome::Workers => self.begin_mode(at),
            DenseHome::Servers => {
                self.issue_order(at, Kind::Publish(v1::Publish {}));
                self.stage = Stage::Moving;
            }
        }
    }

    /// All parameter servers have restored their rows. Dense workers restore their parameters from
    /// the same checkpoint.
    pub(crate) fn rows_restored(&mut self, checkpoint: v1::Restore) {
        let at = self.start_of_order();
        self.issue_order(at, Kind::Restore(checkpoint));
    }

    /// All servers have frozen their rows. Dense worker 0 writes its parameters under `ticket`.
    /// Without a ticket there is no checkpoint at this boundary.
    pub(crate) fn frozen(&mut self, ticket: Option<v1::Ticket>) -> Result<(), RoleError> {
        let at = self.boundary()?;
        self.due.save = SaveStep::Frozen;
        if self.is_dense_on_workers()
            && let Some(ticket) = ticket
        {
            self.issue_order(at, Kind::Save(v1::Save { ticket: Some(ticket) }));
        }
        self.advance()
    }

    /// The last checkpoint exists, or has to be written again.
    pub(crate) fn last_saved(&mut self, exists: bool) -> Result<(), RoleError> {
        if exists {
            self.due.save = SaveStep::Written;
            return self.advance();
        }
        self.due.save = SaveStep::Freezing;
        self.calls.push(ServerCall::Save { at: self.boundary()?, last: true });
        Ok(())
    }

    /// The servers have adopted the next map.
    pub(crate) fn flipped(&mut self, map_epoch: u64, servers: u32) -> Result<(), RoleError> {
        let at = self.boundary()?;
        let gathered = self.gathers(servers);
        self.slots.map_epoch = map_epoch;
        self.config.servers = servers;
        self.run.set_servers(2 * servers);
        self.slots.moving = SlotsMove::Flipped;
        self.move_dense(at, self.is_dense_on_workers() || gathered)?;
        self.advance()
    }

    /// The migration has settled.
    pub(crate) fn slots_settled(&mut self) -> Result<(), RoleError> {
        self.slots.moving = SlotsMove::No;
        if self.stage == Stage::Settling {
            self.leave_pause()?;
        }
        Ok(())
    }

    /// Whether the workers hold the dense parameters in the present mode.
    fn is_dense_on_workers(&self) -> bool {
        self.modes.current.dense_home() == DenseHome::Workers
    }

    /// Whether the workers hold the dense parameters in the present mode and in the next one.
    fn stays_on_workers(&self) -> bool {
        self.is_dense_on_workers() && self.modes.next.dense_home() == DenseHome::Workers
    }

    /// Whether the servers hold the dense parameters and have to partition them again for `servers`
    /// servers.
    fn gathers(&self, servers: u32) -> bool {
        !self.is_dense_on_workers() && servers != self.config.servers
    }

    /// All parameter servers have begun the mode.
    pub(crate) fn begun(&mut self) -> Result<(), RoleError> {
        for server in 0..2 * self.config.servers {
            self.run.moved(Server(server))?;
        }
        self.start();
        self.advance()
    }

    /// Repeats the calls that an earlier coordinator may have made. The calls are idempotent.
    pub(crate) fn repeat_calls(&mut self) -> Result<(), RoleError> {
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
                // The last checkpoint must exist, and the coordinator that wrote it has died.
                if self.due.save == SaveStep::Freezing || (last && self.due.save == SaveStep::Frozen) {
                    self.due.save = SaveStep::Freezing;
                    self.calls.push(ServerCall::Save { at, last });
                }
            }
            _ => {}
        }
        self.advance()
    }

    pub(super) fn enter_pause(&mut self) -> Result<(), RoleError> {
        let at = self.boundary()?;
        self.flushing = false;
        self.workers.asked.clear();
        self.workers.answers.clear();
        self.feed.granted = self.feed.data.locate(at.next_row).0;
        self.stage = Stage::Paused;
        Ok(())
    }

    /// Paused: begins an evaluation if one is due, or the last checkpoint.
    pub(super) fn decide_at_pause(&mut self) -> Result<bool, RoleError> {
        let at = self.boundary()?;
        let due = self.evaluation_due().is_some_and(|due| due <= self.feed.granted);
        if due
            && self.config.tests_on_the_next_slice
            && !self.feed.data.complete()
            && self.feed.data.batches() == self.feed.granted
        {
            // It is not known yet whether there is another slice.
            return Ok(false);
        }
        match (self.is_at_end(at), self.config.saves) {
            (true, true) => self.begin_save(at, true),
            (true, false) => self.evaluate_at_end(at),
            (false, _) if due && self.config.evaluates => self.begin_evaluation(at),
            (false, _) => self.after_evaluation(),
        }
    }

    /// Begins the last evaluation, unless it has taken place at this boundary.
    fn evaluate_at_end(&mut self, at: Boundary) -> Result<bool, RoleError> {
        // The end of the data may have become known only after an evaluation here.
        let is_tested = self.due.tested_at == Some(self.feed.granted);
        if self.config.evaluates && !self.config.tests_on_the_next_slice && !is_tested {
            self.begin_evaluation(at)
        } else {
            self.leave_pause()
        }
    }

    fn begin_evaluation(&mut self, at: Boundary) -> Result<bool, RoleError> {
        self.due.evaluated_through = self.feed.granted;
        self.due.tested_at = Some(self.feed.granted);
        self.due.evaluation_to_begin = Some(at.step);
        self.issue_order(at, Kind::Evaluate(v1::Evaluate { read: !self.is_dense_on_workers() }));
        self.stage = Stage::Evaluating;
        Ok(true)
    }

    pub(super) fn after_restore(&mut self) -> bool {
        self.begin_first_mode();
        true
    }

    /// Paused: begins a checkpoint if one is due.
    pub(super) fn after_evaluation(&mut self) -> Result<bool, RoleError> {
        let at = self.boundary()?;
        let due =
            self.save_due().is_some_and(|due| due <= self.feed.granted) && self.due.saved_through < self.feed.granted;
        match self.is_at_end(at) {
            // The end of the data may have become known during this pause.
            true if self.config.saves && !self.end_is_saved() => self.begin_save(at, true),
            false if self.config.saves && (due || self.due.save_wanted) => self.begin_save(at, false),
            _ => self.leave_pause(),
        }
    }

    /// Paused: a checkpoint is frozen, or the last one is written.
    pub(super) fn after_save(&mut self) -> Result<bool, RoleError> {
        let at = self.boundary()?;
        match self.is_at_end(at) {
            true if !self.end_is_saved() => self.begin_save(at, true),
            true => self.evaluate_at_end(at),
            false => self.leave_pause(),
        }
    }

    /// Whether the last checkpoint exists.
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

    pub(super) fn leave_pause(&mut self) -> Result<bool, RoleError> {
        let at = self.boundary()?;
        if self.is_at_end(at) {
            if self.slots.moving != SlotsMove::No {
                self.calls.push(ServerCall::SettleSlots);
                self.stage = Stage::Settling;
                return Ok(false);
            }
            self.issue_order(at, Kind::End(v1::End { read: !self.is_dense_on_workers() }));
            self.stage = Stage::Ended;
            return Ok(false);
        }
        if self.is_regrouping() {
            if self.workers.next > self.config.workers && self.stays_on_workers() {
                self.issue_order(at, Kind::Publish(v1::Publish {}));
                self.stage = Stage::Sharing;
                return Ok(true);
            }
            self.regroup();
        }
        self.flip_or_move(at)
    }

    /// Continues with the next number of dense workers. New workers count as having carried out all
    /// orders so far.
    fn regroup(&mut self) {
        self.config.workers = self.workers.next;
        self.workers.wanted = None;
        self.workers.done.resize(self.workers.next as usize, self.order.number);
    }

    /// The servers have the dense parameters. All workers, including new ones, read them.
    pub(super) fn admit_workers(&mut self) -> Result<bool, RoleError> {
        let at = self.boundary()?;
        self.regroup();
        self.issue_order(at, Kind::ReadBack(v1::ReadBack {}));
        self.stage = Stage::Joining;
        Ok(true)
    }

    pub(super) fn flip_or_move(&mut self, at: Boundary) -> Result<bool, RoleError> {
        if let SlotsMove::Copied { servers } = self.slots.moving {
            if !self.gathers(servers) {
                return Ok(self.flip());
            }
            self.issue_order(at, Kind::ReadBack(v1::ReadBack {}));
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

    /// Moves the dense parameters to the workers or the servers, as the next mode needs.
    fn move_dense(&mut self, at: Boundary, on_workers: bool) -> Result<bool, RoleError> {
        match (on_workers, self.modes.next.dense_home() == DenseHome::Workers) {
            (true, false) => self.issue_order(at, Kind::Publish(v1::Publish {})),
            (false, true) => self.issue_order(at, Kind::ReadBack(v1::ReadBack {})),
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
        let first_piece = (place / self.config.local_rows) as u32;
        self.calls.push(ServerCall::Begin { mode: self.modes.next, at, first_piece });
        self.stage = Stage::Beginning;
    }

    /// All servers are in the mode: dense workers begin to train.
    fn start(&mut self) {
        self.counts.switches += u64::from(self.modes.current != self.modes.next);
        self.modes.current = self.modes.next;
        self.feed.stop_at = None;
        let at = self.start_of_order();
        let order = driver(self.modes.current).begin(self);
        self.issue_order(at, order);
        self.stage = Stage::Training;
    }

    pub(super) fn boundary(&self) -> Result<Boundary, RoleError> {
        match self.run.phase() {
            SwitchPhase::Moving { at, .. } => Ok(*at),
            _ => Err(RoleError::Inconsistent { message: "order", reason: "training is not paused".to_owned() }),
        }
    }

    /// An earlier run that was meant to train longer may have stopped within the batch after the
    /// last one.
    fn is_at_end(&self, at: Boundary) -> bool {
        self.feed.data.complete() && at.next_row >= self.feed.data.row_of(self.feed.data.batches())
    }

    /// Chooses the next mode, by command or else by schedule, and the next number of dense workers.
    pub(super) fn choose_next(&mut self) {
        self.workers.next = self.workers.wanted.take().unwrap_or(self.config.workers);
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

    pub(super) fn must_pause(&self) -> bool {
        let flips = matches!(self.slots.moving, SlotsMove::Copied { .. });
        flips
            || self.modes.requested.is_some()
            || self.workers.wanted.is_some()
            || (self.due.save_wanted && self.config.saves)
    }

    /// The batch before the next pause, as far as known.
    pub(super) fn next_pause(&self) -> Option<u64> {
        let switch = self.modes.scheduled.front().map(|(batch, _)| *batch);
        let evaluation = if self.config.evaluates { self.evaluation_due() } else { None };
        switch.into_iter().chain(evaluation).chain(self.save_due()).min()
    }

    fn save_due(&self) -> Option<u64> {
        self.config.save_every.map(|every| (self.due.saved_through / every + 1) * every)
    }

    fn evaluation_due(&self) -> Option<u64> {
        self.config.evaluation.next_after(self.due.evaluated_through, self.feed.data.epoch_starts())
    }
}

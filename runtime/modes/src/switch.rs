//! The switch between synchronous training and the modes without a barrier (§4.1; design: one
//! optimizer state for both). It happens at a global-step boundary. It moves only the flat dense
//! parameters and optimizer state:
//!
//! 1. *draining*: the coordinator hands out nothing beyond the boundary. Workers train the batches
//!    already handed out, and the gradient buffers end empty.
//! 2. *moving*: the row ledger proves the boundary. Towards a mode on the parameter servers, the
//!    dense workers publish each server's partition to it. Towards `sync`, they read it back. After
//!    a lost message or a process restart, the coordinator sends the same order again. An order
//!    that was already carried out changes nothing.
//! 3. Training continues in the other mode at the very next step and row. No message carries
//!    hyper-parameters.
//!
//! The coordinator calls this state machine and journals a copy of its state.

use std::collections::BTreeSet;

use serde::{Deserialize, Serialize};

use crate::barrier::{BarrierCoordinator, BarrierError};
use crate::gba::{DispatchError, Dispatcher, DispatcherSetup, TokenMode};
use crate::{
    Answers, Batch, CoordinatorHalf, DataList, DenseHome, GlobalStep, RowCounts, RowLedger, RowLedgerError, Server,
    TrainingMode,
};

/// A mode and the dense workers that train in it.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct RunMode {
    /// The mode with its settings.
    pub mode: TrainingMode,
    /// N_a: dense workers.
    pub workers: u32,
    /// B_a: rows of a local batch.
    pub local_rows: u32,
}

/// The point at which one mode ends and the next begins.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Boundary {
    /// All steps before this one are applied; this and later steps are not.
    pub step: GlobalStep,
    /// All rows before this one are settled; this and later rows are untouched.
    pub next_row: u64,
}

/// An order from the coordinator. The coordinator may send it again until the answer arrives.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Order {
    /// Apply the gradients left in the buffer, because the data has ended. Answer:
    /// [`Dispatcher::flushed`].
    Flush { server: Server },
    /// The dense workers send this server its partition of the flat parameters and optimizer state.
    /// The server starts at `at` in `mode`. If the previous mode was on the servers as well, the
    /// server keeps its partition and only restarts at `at`. Answer: [`TrainingRun::moved`].
    Publish { server: Server, at: Boundary, mode: RunMode },
    /// The dense workers read this server's partition back. Answer: [`TrainingRun::moved`].
    ReadBack { server: Server, at: Boundary },
    /// Training continues, and workers join.
    Start { mode: RunMode, at: Boundary },
}

/// Requests and messages that the run rejects.
#[derive(Debug, thiserror::Error, PartialEq)]
pub enum SwitchError {
    /// A run makes one switch at a time.
    #[error("the training mode cannot be switched while another switch is under way")]
    UnderWay,
    /// M·B_a is not the global batch of synchronous training.
    #[error(
        "gba would aggregate {gradients} gradients of {local_rows} rows, but the global batch is {global_rows} rows: switching \
         would change the learning problem. Use M = global batch / local batch"
    )]
    GlobalBatch { gradients: u32, local_rows: u32, global_rows: u32 },
    /// The row ledger cannot prove the boundary.
    #[error("the training mode cannot be switched here: {0}")]
    Ledger(#[from] RowLedgerError),
    /// The mode's settings are invalid.
    #[error("the training mode cannot be switched: {0}")]
    Mode(#[from] DispatchError),
    /// A message contradicts the steps that the coordinator handed out with a barrier.
    #[error(transparent)]
    Barrier(#[from] BarrierError),
}

/// The phase of a run.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum SwitchPhase {
    /// Training in its mode.
    Training,
    /// Draining up to the next boundary, before training continues as `to`.
    Draining {
        /// The next mode.
        to: RunMode,
    },
    /// Paused while the parameters move.
    Moving {
        /// The next mode.
        to: RunMode,
        /// The boundary.
        at: Boundary,
        /// Servers whose partition has not been moved.
        missing: BTreeSet<Server>,
    },
}

/// The sizes of a run that hold in every mode.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub struct RunPlan {
    /// G: rows of a global batch.
    pub global_rows: u32,
    /// Parameter servers.
    pub servers: u32,
    /// See [`DispatcherSetup::in_flight_limit`].
    pub in_flight_limit: usize,
}

/// The coordinator half of the current mode. While training is paused: the parts that outlive a
/// mode.
#[derive(Clone, Debug, Serialize, Deserialize)]
enum Side {
    Barrier(Box<BarrierCoordinator>),
    Tokens(Box<Dispatcher>),
    Paused { step: GlobalStep, data: DataList, ledger: RowLedger },
}

impl Side {
    fn half(&self) -> Option<&dyn CoordinatorHalf> {
        match self {
            Self::Barrier(half) => Some(&**half),
            Self::Tokens(half) => Some(&**half),
            Self::Paused { .. } => None,
        }
    }

    fn half_mut(&mut self) -> Option<&mut dyn CoordinatorHalf> {
        match self {
            Self::Barrier(half) => Some(&mut **half),
            Self::Tokens(half) => Some(&mut **half),
            Self::Paused { .. } => None,
        }
    }

    fn into_parts(self) -> (DataList, RowLedger) {
        match self {
            Self::Barrier(half) => half.into_parts(),
            Self::Tokens(half) => half.into_parts(),
            Self::Paused { data, ledger, .. } => (data, ledger),
        }
    }
}

/// The training run as a state machine; see the module's documentation.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct TrainingRun {
    plan: RunPlan,
    mode: RunMode,
    phase: SwitchPhase,
    side: Side,
}

impl TrainingRun {
    /// A run that starts at `at` in `mode`. Carry out the [`Self::pending_orders`]. Data is
    /// announced later, with [`Self::extend_data`].
    pub fn new(plan: RunPlan, mode: RunMode, at: Boundary) -> Result<Self, SwitchError> {
        Self::resume(plan, mode, at.step, RowCounts { trained_rows: at.next_row, ..RowCounts::default() })
    }

    /// As [`Self::new`], for a run that continues before `step`, where an earlier run paused.
    /// `rows` counts the rows that the earlier run settled.
    pub fn resume(plan: RunPlan, mode: RunMode, step: GlobalStep, rows: RowCounts) -> Result<Self, SwitchError> {
        let at = Boundary { step, next_row: rows.trained_rows + rows.dropped_rows };
        let plan = RunPlan { servers: plan.servers.max(1), global_rows: plan.global_rows.max(1), ..plan };
        let data = DataList::new(plan.global_rows, at.next_row);
        let ledger = RowLedger::resume(rows);
        let side = Side::Paused { step, data, ledger };
        let mut run = Self { plan, mode, phase: SwitchPhase::Training, side };
        run.validate(mode)?;
        match mode.mode.dense_home() {
            DenseHome::Workers => run.begin(mode, at)?,
            DenseHome::Servers => {
                run.phase = SwitchPhase::Moving { to: mode, at, missing: run.servers().collect() };
            }
        }
        Ok(run)
    }

    /// The next segment (epoch) of the data has `rows` rows.
    pub fn extend_data(&mut self, rows: u64) -> Answers {
        match &mut self.side {
            Side::Paused { data, .. } => data.extend(rows),
            side => return side.half_mut().map_or_else(Vec::new, |half| half.extend_data(rows)),
        }
        Vec::new()
    }

    /// No more data will be announced.
    pub fn close_data(&mut self) -> Answers {
        match &mut self.side {
            Side::Paused { data, .. } => data.close(),
            side => return side.half_mut().map_or_else(Vec::new, CoordinatorHalf::close_data),
        }
        Vec::new()
    }

    /// With a barrier: the next global batch and its step. `None` while there is no data, while
    /// draining, and in other modes.
    pub fn next_sync_step(&mut self) -> Result<Option<(GlobalStep, Batch)>, SwitchError> {
        match &mut self.side {
            Side::Barrier(half) => Ok(half.next_step_to_train()?),
            _ => Ok(None),
        }
    }

    /// With a barrier: `step` is applied everywhere. A repeated call changes nothing.
    pub fn sync_step_applied(&mut self, step: GlobalStep) -> Result<(), SwitchError> {
        match &mut self.side {
            Side::Barrier(half) => Ok(half.step_applied(step)?),
            _ => Err(BarrierError::StepNotOut { step }.into()),
        }
    }

    /// The dispatcher, in the modes without a barrier.
    pub fn dispatcher(&mut self) -> Option<&mut Dispatcher> {
        if let Side::Tokens(dispatcher) = &mut self.side { Some(dispatcher) } else { None }
    }

    /// Requests a switch. After this and after every message, call [`Self::advance`] until the run
    /// is moving.
    pub fn switch_to(&mut self, to: RunMode) -> Result<(), SwitchError> {
        if self.phase == SwitchPhase::Training && to == self.mode {
            return self.validate(to);
        }
        self.rest(to)
    }

    /// Requests a pause at the next boundary, for an evaluation or at the end of the data. Training
    /// then continues in `to`, which is the present mode or another. As for [`Self::switch_to`],
    /// [`Self::advance`] reports when training has paused. [`Self::moved`] ends the pause.
    pub fn rest(&mut self, to: RunMode) -> Result<(), SwitchError> {
        if self.phase != SwitchPhase::Training {
            return Err(SwitchError::UnderWay);
        }
        self.validate(to)?;
        self.phase = SwitchPhase::Draining { to };
        if let Some(half) = self.side.half_mut() {
            half.start_draining();
        }
        Ok(())
    }

    /// Checks whether training has drained to a boundary, and if so returns the orders that move
    /// the parameters. Before that, it may return orders to flush. An error means that the row
    /// ledger cannot prove the boundary.
    pub fn advance(&mut self) -> Result<Vec<Order>, SwitchError> {
        let SwitchPhase::Draining { to } = self.phase else { return Ok(Vec::new()) };
        let Some(step) = self.side.half().and_then(CoordinatorHalf::paused_at) else {
            return Ok(self.flush_orders());
        };
        let (data, ledger) = self.take_parts(step);
        let at = Boundary { step, next_row: data.next_row() };
        let proof = ledger.prove_boundary(at.next_row);
        self.side = Side::Paused { step, data, ledger };
        proof?;
        self.phase = SwitchPhase::Moving { to, at, missing: self.servers().collect() };
        Ok(self.pending_orders())
    }

    /// A server's partition has been moved. A repeated call changes nothing. The last missing
    /// server starts the next mode.
    pub fn moved(&mut self, server: Server) -> Result<Vec<Order>, SwitchError> {
        let SwitchPhase::Moving { to, at, missing } = &mut self.phase else { return Ok(Vec::new()) };
        missing.remove(&server);
        if !missing.is_empty() {
            return Ok(Vec::new());
        }
        let (to, at) = (*to, *at);
        self.begin(to, at)?;
        Ok(vec![Order::Start { mode: to, at }])
    }

    /// The orders without an answer yet. Send them again after the coordinator or a process that
    /// should have carried one out restarts.
    #[must_use]
    pub fn pending_orders(&self) -> Vec<Order> {
        match &self.phase {
            SwitchPhase::Training | SwitchPhase::Draining { .. } => self.flush_orders(),
            SwitchPhase::Moving { to, at, missing } => missing
                .iter()
                .map(|&server| match to.mode.dense_home() {
                    DenseHome::Workers => Order::ReadBack { server, at: *at },
                    DenseHome::Servers => Order::Publish { server, at: *at, mode: *to },
                })
                .collect(),
        }
    }

    /// Sets the number of parameter servers. Possible only while paused, when no server is filling
    /// a step. Returns whether the number was set.
    pub fn set_servers(&mut self, servers: u32) -> bool {
        let SwitchPhase::Moving { missing, .. } = &mut self.phase else { return false };
        self.plan.servers = servers.max(1);
        *missing = (0..self.plan.servers).map(Server).collect();
        true
    }

    /// The phase of the run.
    #[must_use]
    pub fn phase(&self) -> &SwitchPhase {
        &self.phase
    }

    /// The current mode, or while paused the mode until the pause.
    #[must_use]
    pub fn mode(&self) -> RunMode {
        self.mode
    }

    /// The dispatcher, in the modes without a barrier, for reading only.
    #[must_use]
    pub fn current_dispatcher(&self) -> Option<&Dispatcher> {
        if let Side::Tokens(dispatcher) = &self.side { Some(dispatcher) } else { None }
    }

    /// With a barrier: the step to be handed out next. Without: the step that the slowest server is
    /// filling.
    #[must_use]
    pub fn next_step(&self) -> GlobalStep {
        match &self.side {
            Side::Paused { step, .. } => *step,
            side => side.half().map_or_else(GlobalStep::default, CoordinatorHalf::next_step),
        }
    }

    /// The first row that has not been handed out.
    #[must_use]
    pub fn next_row(&self) -> u64 {
        match &self.side {
            Side::Barrier(half) => half.data().next_row(),
            Side::Tokens(half) => half.data().next_row(),
            Side::Paused { data, .. } => data.next_row(),
        }
    }

    /// The row ledger.
    #[must_use]
    pub fn ledger(&self) -> &RowLedger {
        match &self.side {
            Side::Barrier(half) => half.ledger(),
            Side::Tokens(half) => half.ledger(),
            Side::Paused { ledger, .. } => ledger,
        }
    }

    fn servers(&self) -> impl Iterator<Item = Server> + use<> {
        (0..self.plan.servers).map(Server)
    }

    fn flush_orders(&self) -> Vec<Order> {
        if self.side.half().is_some_and(CoordinatorHalf::needs_flush) {
            return self.servers().map(|server| Order::Flush { server }).collect();
        }
        Vec::new()
    }

    fn validate(&self, to: RunMode) -> Result<(), SwitchError> {
        let RunMode { mode, workers, local_rows } = to;
        mode.validate(workers)?;
        let global_rows = self.plan.global_rows;
        if let TrainingMode::Tokens(TokenMode::Gba { buffer, .. }) = mode
            && u64::from(buffer.get()) * u64::from(local_rows) != u64::from(global_rows)
        {
            return Err(SwitchError::GlobalBatch { gradients: buffer.get(), local_rows, global_rows });
        }
        Ok(())
    }

    /// Takes the data list and the row ledger out of the mode that ends before `step`.
    fn take_parts(&mut self, step: GlobalStep) -> (DataList, RowLedger) {
        let nothing = Side::Paused { step, data: DataList::new(1, 0), ledger: RowLedger::default() };
        std::mem::replace(&mut self.side, nothing).into_parts()
    }

    fn begin(&mut self, to: RunMode, at: Boundary) -> Result<(), SwitchError> {
        let (mut data, ledger) = self.take_parts(at.step);
        self.side = match to.mode.tokens() {
            None => Side::Barrier(Box::new(BarrierCoordinator::new(at.step, self.plan.global_rows, data, ledger))),
            Some(mode) => {
                data.set_batch_rows(to.local_rows);
                let setup = DispatcherSetup {
                    mode,
                    workers: to.workers,
                    servers: self.plan.servers,
                    first_step: at.step,
                    in_flight_limit: self.plan.in_flight_limit,
                };
                Side::Tokens(Box::new(Dispatcher::new(setup, data, ledger)?))
            }
        };
        self.mode = to;
        self.phase = SwitchPhase::Training;
        Ok(())
    }
}

//! The result of a decision.

use std::time::Duration;

use rectrain_crds::{BudgetStatus, Mode, RecTrainingJobStatus, Role};

use crate::coordinator_view::Rebalance;
use crate::failure::Problem;

/// Whether the job's objects and pods should exist.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Run {
    /// No object of the job should exist.
    Nothing,
    /// Its objects should exist, its pods should not.
    Hold,
    /// Everything that exists should stay as it is.
    AsIs,
    /// Its objects and its pods should exist.
    Go,
}

/// The result of a decision.
#[derive(Clone, Debug, PartialEq)]
pub struct Decision {
    /// The job's new status.
    pub status: RecTrainingJobStatus,
    /// Whether its objects and pods should exist.
    pub run: Run,
    /// The training mode to ask the coordinator for. Decide again with its answer before the status
    /// is written.
    pub ask_mode: Option<Mode>,
    /// The roles and numbers of members to ask the coordinator for.
    pub ask_members: Vec<(Role, u32)>,
    /// The rebalance to ask the coordinator for.
    pub ask_rebalance: Option<Rebalance>,
    /// The memory budget of the tables to ask the coordinator for.
    pub ask_budget: Option<BudgetStatus>,
    /// Whether to ask the coordinator for a checkpoint before its attempt ends.
    pub ask_save: bool,
    /// Whether the end of the attempt waits for that checkpoint.
    pub is_saving: bool,
    /// Why the job does not train.
    pub problem: Option<Problem>,
    /// Whether the job's time to live is over.
    pub delete: bool,
    /// When to look again without a change; `None` waits for a change.
    pub look_again: Option<Duration>,
}

impl Decision {
    /// A decision that asks for nothing.
    #[must_use]
    pub fn new(status: RecTrainingJobStatus, run: Run, problem: Option<Problem>) -> Self {
        Self {
            status,
            run,
            ask_mode: None,
            ask_members: Vec::new(),
            ask_rebalance: None,
            ask_budget: None,
            ask_save: false,
            is_saving: false,
            problem,
            delete: false,
            look_again: None,
        }
    }
}

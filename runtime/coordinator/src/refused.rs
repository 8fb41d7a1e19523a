//! Why the coordinator refuses a command or a request to drain. The texts go to users.

/// Why a command to scale a role is refused.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ResizeRefused {
    /// The job can never have this many members.
    #[error("{0}")]
    Number(String),
    /// The job cannot be scaled now. The same command may succeed later.
    #[error("{0}")]
    Now(String),
}

/// Why a command to switch the training mode is refused.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(crate) enum SwitchRefused {
    /// The job cannot train in this mode.
    #[error("{0}")]
    Mode(String),
    /// The mode cannot be switched now. The same command may succeed later.
    #[error("{0}")]
    Now(String),
}

/// Why a command to change the memory budget is refused.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(crate) enum BudgetRefused {
    /// The job cannot have this budget.
    #[error("{0}")]
    Budget(String),
    /// Training has ended.
    #[error("training has ended")]
    Ended,
}

/// Why there is no checkpoint for a caller that asked for one.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum SaveRefused {
    /// The manifest names no path for checkpoints.
    #[error("the job saves no checkpoints: spec.checkpoint.path is not set")]
    NoPath,
    /// Training ended without a last checkpoint.
    #[error("training has ended")]
    Ended,
    /// The checkpoint could not be written, or the job failed meanwhile.
    #[error("{0}")]
    Failed(String),
}

/// Why other parameter servers cannot take the rows of one that is about to end.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(crate) enum DrainRefused {
    #[error("it holds no rows")]
    NoRows,
    #[error("there is no other parameter server to take its rows")]
    NoOtherServer,
    #[error("all parameter servers are about to end")]
    AllServersDrain,
    #[error("the coordinator is about to end as well")]
    CoordinatorEnds,
    #[error("training has not begun")]
    NotStarted,
    #[error("training has ended")]
    Ended,
    /// The job failed while its slots were moving.
    #[error("{0}")]
    Failed(String),
}

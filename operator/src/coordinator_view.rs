//! The state of a job as its coordinator reports it, and a coordinator's answers to requests. Types
//! only.

use std::collections::BTreeMap;

use rectrain_crds::{
    BudgetStatus, CheckpointStatus, JobSummary, Mode, QualityStatus, Role, StreamStatus, TablesStatus, UnseenShares,
};

/// A coordinator's report about its job.
#[derive(Clone, Debug, PartialEq)]
pub enum CoordinatorView {
    /// It does not answer, or does not exist.
    Silent,
    /// The job is under way.
    Live(Report),
    /// The job is complete.
    Complete {
        /// The results.
        summary: Box<JobSummary>,
        /// The last checkpoint that it saved or restored.
        last_checkpoint: Option<CheckpointStatus>,
    },
    /// The job failed.
    Failed {
        /// Why, in a sentence.
        message: String,
        /// Whether the manifest or the data is at fault.
        user_error: bool,
    },
    /// Training diverged.
    Diverged {
        /// The figures and advice, in sentences.
        message: String,
    },
}

/// The state of a job that is under way.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Report {
    /// Its stage.
    pub stage: Stage,
    /// Its mode, if this version knows it.
    pub mode: Option<Mode>,
    /// Completed global steps.
    pub step: u64,
    /// Total number of steps, once known.
    pub total_steps: Option<u64>,
    /// Rows per second.
    pub samples_per_second: f64,
    /// Mean loss of the last report.
    pub loss: f64,
    /// AUC of the last evaluation, or of the training rows.
    pub auc: Option<f64>,
    /// By sparse feature: the share of unseen test ids in the last evaluation.
    pub unseen: UnseenShares,
    /// The last complete checkpoint, if this attempt has written one.
    pub last_checkpoint: Option<CheckpointStatus>,
    /// The members of each role that the coordinator reports.
    pub members: BTreeMap<Role, Members>,
    /// Members that have not joined yet.
    pub missing: Vec<String>,
    /// Seconds since the last step, or part of an evaluation, was completed. Absent from
    /// coordinators of an earlier version.
    pub idle_seconds: Option<f64>,
    /// Whether the coordinator continues where one that ended was. False if it leads a new attempt,
    /// and from earlier versions.
    pub recovered: bool,
    /// Time of the newest decision to rebalance that the coordinator has accepted, in seconds since
    /// 1970; 0 if there is none.
    pub slots_decided_seconds: u64,
    /// The member that slows training the most.
    pub slowest: Option<Box<SlowMember>>,
    /// The time without a step, while training makes none for longer than usual.
    pub no_step: Option<Box<NoStep>>,
    /// Its tables.
    pub tables: Box<Tables>,
    /// How far training is behind its stream, if it reads one.
    pub stream: Option<Box<StreamStatus>>,
    /// The quality of the latest predictions on training rows.
    pub quality: Option<Box<QualityStatus>>,
}

/// The tables of a job. A coordinator of an earlier version reports nothing about them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Tables {
    /// The memory budget. Absent without one.
    pub budget: Option<BudgetStatus>,
    /// Rows and bytes. Absent until the coordinator knows them.
    pub size: Option<(u64, u64)>,
}

impl Tables {
    /// The tables as a status shows them, once their size is known.
    #[must_use]
    pub fn status(&self) -> Option<TablesStatus> {
        let Self { budget, size } = *self;
        size.map(|(rows, bytes)| TablesStatus { rows, bytes, budget })
    }
}

/// A slow member.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SlowMember {
    /// Its role.
    pub role: Role,
    /// Its index in the role.
    pub index: u32,
    /// The share of a step's time that its slowness costs.
    pub share: f64,
    /// When it became slow, in seconds since 1970.
    pub since_seconds: u64,
}

/// The time without a step.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct NoStep {
    /// Seconds since the last step.
    pub seconds: f64,
    /// The member that training waits for, if it is known.
    pub waits_for: Option<(Role, u32)>,
}

/// The members of a role.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Members {
    /// Members that participate.
    pub present: u32,
    /// Members that the coordinator was last asked for.
    pub wanted: u32,
    /// Processes that the coordinator needs until then.
    pub needed: u32,
}

/// The stage of a job that is under way.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Stage {
    /// Members are joining.
    #[default]
    Starting,
    /// The job trains.
    Training,
    /// The job predicts the test rows.
    Evaluating,
}

/// A request to rebalance the slots over the present parameter servers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rebalance {
    /// The number of parameter servers.
    pub servers: u32,
    /// Time of the decision, in seconds since 1970. A coordinator carries each decision out once.
    pub decided_seconds: u64,
}

/// A coordinator's answer to the request for another training mode.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum SwitchAnswer {
    /// Training continues in it from the next global-step boundary on.
    Accepted,
    /// The job cannot train in it; a sentence says why.
    Refused(String),
    /// Not now, or no answer: ask again.
    Again(String),
}

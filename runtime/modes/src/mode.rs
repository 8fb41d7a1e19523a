//! A training mode with its settings.
//!
//! A mode has three halves, each a state machine in the module of its family:
//!
//! | half | `barrier` (`sync`, `hybrid`) | `gba` (`gba`, `async`, `bsp`, `hopBs`, `hopBw`) |
//! |---|---|---|
//! | coordinator: who trains which rows when | [`BarrierCoordinator`](crate::barrier::BarrierCoordinator) | [`Dispatcher`](crate::gba::Dispatcher) |
//! | parameter server: when a look-up is answered and a gradient applied | [`StepGate`](crate::barrier::StepGate) | [`GradientServer`](crate::gba::GradientServer) |
//! | dense worker: what it fetches, computes and pushes next | [`StepWindow`](crate::barrier::StepWindow) | [`PushPullWorker`](crate::gba::PushPullWorker) |
//!
//! [`TrainingRun`](crate::switch::TrainingRun) switches between the coordinator halves, through the
//! trait [`CoordinatorHalf`].

use rectrain_kinds::{Family, Mode};
use serde::{Deserialize, Serialize};

use crate::gba::{BufferSize, Decay, DispatchError, LostTokens, TokenMode};
use crate::{Answers, DataList, GlobalStep, RowLedger};

/// How embeddings and dense parameters are kept in step.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub enum TrainingMode {
    /// Every gradient is applied before the next look-up; repeatable to the bit.
    Sync,
    /// Embeddings are at most `staleness` global steps behind; dense parameters are in step.
    Hybrid {
        /// τ, in global steps.
        staleness: u64,
    },
    /// No barrier: dense parameters on the parameter servers, gradients with tokens.
    Tokens(TokenMode),
}

/// The settings of a job for all modes. Each mode reads its own.
#[derive(Debug, Clone, Copy)]
pub struct ModeSettings {
    /// τ of `hybrid`, in global steps.
    pub hybrid_staleness: u64,
    /// M of `gba`: the gradients in a step.
    pub gba_buffer: BufferSize,
    /// The weight of stale gradients in `gba`.
    pub gba_decay: Decay,
    /// The tokens of `gba` that dead workers held.
    pub gba_lost_tokens: LostTokens,
    /// b1 of `hopBs`: the most batches that a worker may be ahead of the slowest.
    pub hop_bs_bound: u64,
    /// b3 of `hopBw`: the gradients that each step drops.
    pub hop_bw_backups: u32,
    /// b2 of `bsp`: the gradients in a step.
    pub bsp_aggregate: BufferSize,
}

impl TrainingMode {
    /// The mode of this kind, with its part of the settings.
    #[must_use]
    pub const fn of(kind: Mode, settings: &ModeSettings) -> Self {
        match kind {
            Mode::Sync => Self::Sync,
            Mode::Hybrid => Self::Hybrid { staleness: settings.hybrid_staleness },
            Mode::Async => Self::Tokens(TokenMode::Async),
            Mode::Gba => Self::Tokens(TokenMode::Gba {
                buffer: settings.gba_buffer,
                decay: settings.gba_decay,
                lost_tokens: settings.gba_lost_tokens,
            }),
            Mode::HopBs => Self::Tokens(TokenMode::HopBs { bound: settings.hop_bs_bound }),
            Mode::HopBw => Self::Tokens(TokenMode::HopBw { backups: settings.hop_bw_backups }),
            Mode::Bsp => Self::Tokens(TokenMode::Bsp { aggregate: settings.bsp_aggregate }),
        }
    }

    /// The mode without its settings.
    #[must_use]
    pub const fn kind(self) -> Mode {
        match self {
            Self::Sync => Mode::Sync,
            Self::Hybrid { .. } => Mode::Hybrid,
            Self::Tokens(mode) => mode.kind(),
        }
    }

    /// The name of the mode.
    #[must_use]
    pub const fn name(self) -> &'static str {
        self.kind().name()
    }

    /// The family whose halves run the mode.
    #[must_use]
    pub const fn family(self) -> Family {
        self.kind().family()
    }

    /// Where the dense parameters are while training is in this mode.
    #[must_use]
    pub const fn dense_home(self) -> DenseHome {
        match self.family() {
            Family::Barrier => DenseHome::Workers,
            Family::Tokens => DenseHome::Servers,
        }
    }

    /// τ: how many steps may be looked up and not yet applied; 0 without a barrier, where nothing bounds
    /// it.
    #[must_use]
    pub const fn staleness(self) -> u64 {
        match self {
            Self::Hybrid { staleness } => staleness,
            Self::Sync | Self::Tokens(_) => 0,
        }
    }

    /// Whether `workers` dense workers can train in this mode.
    ///
    /// # Errors
    /// [`DispatchError`], if they are too few.
    pub fn validate(self, workers: u32) -> Result<(), DispatchError> {
        match self {
            Self::Tokens(mode) => mode.validate(workers),
            Self::Sync | Self::Hybrid { .. } => Ok(()),
        }
    }
}

/// Which processes hold the dense parameters.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DenseHome {
    /// Each dense worker holds all of them, equal to the others'.
    Workers,
    /// Each parameter server holds a partition. Dense workers pull them.
    Servers,
}

/// The coordinator's half of a mode, between two step boundaries.
pub trait CoordinatorHalf {
    /// The next segment of the data has `rows` rows.
    fn extend_data(&mut self, rows: u64) -> Answers;

    /// No more data will come.
    fn close_data(&mut self) -> Answers;

    /// Hands out no more than the next boundary needs.
    fn start_draining(&mut self);

    /// The boundary's step, once every row before it is settled; `None` until then.
    fn paused_at(&self) -> Option<GlobalStep>;

    /// Whether parameter servers have to apply an incomplete buffer before training can pause.
    fn needs_flush(&self) -> bool;

    /// The step that training is in: the next one to hand out, or the one that the slowest server fills.
    fn next_step(&self) -> GlobalStep;

    /// The data that is known.
    fn data(&self) -> &DataList;

    /// The account of rows.
    fn ledger(&self) -> &RowLedger;

    /// Ends the mode: data and account go to the next one.
    fn into_parts(self: Box<Self>) -> (DataList, RowLedger);
}

//! A training mode with its settings.
//!
//! The state machines of a mode are its halves. Each half is in the module of the mode's family:
//!
//! | half | `barrier` (`sync`, `hybrid`, `des`) | `gba` (`gba`, `async`, `bsp`, `hopBs`, `hopBw`) |
//! |---|---|---|
//! | coordinator: which worker trains which rows, and when | [`BarrierCoordinator`](crate::barrier::BarrierCoordinator) | [`Dispatcher`](crate::gba::Dispatcher) |
//! | parameter server: when it answers a look-up and applies a gradient | [`StepGate`](crate::barrier::StepGate) | [`GradientServer`](crate::gba::GradientServer) |
//! | dense worker: the next fetches, computations and pushes | [`StepWindow`](crate::barrier::StepWindow) | [`PushPullWorker`](crate::gba::PushPullWorker) |
//!
//! The mode `shadow` takes the halves of `gba` for its rows, as `async` has them. For its dense
//! parameters, the dense worker's half is [`ReplicaSync`](crate::shadow::ReplicaSync), and the
//! server's half is [`interpolate`](crate::shadow::interpolate), or
//! [`Rounds`](crate::shadow::Rounds) and [`Average`](crate::shadow::Average).
//!
//! [`TrainingRun`](crate::switch::TrainingRun) switches between the coordinator halves, through the
//! trait [`CoordinatorHalf`](crate::CoordinatorHalf).

use std::num::NonZeroU32;

use rectrain_kinds::{Family, Mode, SyncPieces};
use serde::{Deserialize, Serialize};

use crate::gba::{BufferSize, Decay, DispatchError, LostTokens, TokenMode};
use crate::shadow::Shadow;

/// How embeddings and dense parameters are synchronized.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub enum TrainingMode {
    /// Every gradient is applied before the next look-up; repeatable to the bit.
    Sync,
    /// As `sync`, but free dense workers pull the pieces of a step
    /// ([`pulled`](crate::barrier::pulled)). The parameter servers hold the dense parameters.
    Pulled,
    /// Embeddings are at most `staleness` global steps behind; dense parameters are synchronous.
    Hybrid {
        /// τ, in global steps.
        staleness: u64,
    },
    /// As `sync`, but the parameter servers send partial results instead of rows.
    Des,
    /// No barrier: dense parameters on the parameter servers, gradients with tokens.
    Tokens(TokenMode),
    /// No barrier: each dense worker trains a replica, and exchanges it with the parameter servers.
    Shadow(Shadow),
}

/// The settings of a job for all modes. Each mode reads its own.
#[derive(Debug, Clone, Copy)]
pub struct ModeSettings {
    /// Which dense worker computes a piece of a step in `sync`.
    pub sync_pieces: SyncPieces,
    /// τ of `hybrid`, in global steps.
    pub hybrid_staleness: u64,
    /// M of `gba`: the gradients in a step.
    pub gba_buffer: BufferSize,
    /// The weight of stale gradients in `gba`.
    pub gba_decay: Decay,
    /// How lost tokens of dead workers are treated in `gba`.
    pub gba_lost_tokens: LostTokens,
    /// b1 of `hopBs`: the most batches that a worker may be ahead of the slowest.
    pub hop_bs_bound: u64,
    /// b3 of `hopBw`: the gradients that each step drops.
    pub hop_bw_backups: u32,
    /// b2 of `bsp`: the gradients in a step.
    pub bsp_aggregate: BufferSize,
    /// How `shadow` synchronises.
    pub shadow: Shadow,
}

impl TrainingMode {
    /// The mode of this kind, with its part of the settings.
    #[must_use]
    pub const fn of(kind: Mode, settings: &ModeSettings) -> Self {
        match kind {
            Mode::Sync => match settings.sync_pieces {
                SyncPieces::Fixed => Self::Sync,
                SyncPieces::Pulled => Self::Pulled,
            },
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
            Mode::Shadow => Self::Shadow(settings.shadow),
            Mode::Des => Self::Des,
        }
    }

    /// The mode without its settings.
    #[must_use]
    pub const fn kind(self) -> Mode {
        match self {
            Self::Sync | Self::Pulled => Mode::Sync,
            Self::Hybrid { .. } => Mode::Hybrid,
            Self::Tokens(mode) => mode.kind(),
            Self::Shadow(_) => Mode::Shadow,
            Self::Des => Mode::Des,
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
            Family::Barrier if matches!(self, Self::Pulled) => DenseHome::Servers,
            Family::Barrier => DenseHome::Workers,
            Family::Tokens | Family::Replicas => DenseHome::Servers,
        }
    }

    /// τ: the number of steps that may be looked up and not yet applied. 0 without a barrier, where
    /// it has no bound.
    #[must_use]
    pub const fn staleness(self) -> u64 {
        match self {
            Self::Hybrid { staleness } => staleness,
            Self::Sync | Self::Pulled | Self::Des | Self::Tokens(_) | Self::Shadow(_) => 0,
        }
    }

    /// The threads of a dense worker that train batches at the same time.
    #[must_use]
    pub const fn training_threads(self) -> NonZeroU32 {
        match self {
            Self::Shadow(shadow) => shadow.threads,
            _ => NonZeroU32::MIN,
        }
    }

    /// The rules by which batches are handed out and gradients of rows are applied, in a mode
    /// without a barrier. `None` in a mode with one.
    #[must_use]
    pub const fn tokens(self) -> Option<TokenMode> {
        match self {
            Self::Tokens(mode) => Some(mode),
            Self::Shadow(_) => Some(TokenMode::Async),
            Self::Sync | Self::Pulled | Self::Hybrid { .. } | Self::Des => None,
        }
    }

    /// Checks whether `workers` dense workers can train in this mode.
    ///
    /// # Errors
    /// [`DispatchError`], if there are too few.
    pub fn validate(self, workers: u32) -> Result<(), DispatchError> {
        self.tokens().map_or(Ok(()), |mode| mode.validate(workers))
    }
}

/// Which processes hold the dense parameters.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DenseHome {
    /// Each dense worker holds all of them, with the same values as the others.
    Workers,
    /// Each parameter server holds a partition. Dense workers pull them. In `shadow`, dense workers
    /// train replicas of them.
    Servers,
}

//! The errors of a role. An error of the user's input ends a run with exit code 2 and is never retried;
//! every other error ends it with 1.

use rectrain_dense::{DenseError, GPU_SUPPORT};
use rectrain_wire::{Refusal, RefusalCode, WireError};

/// A role cannot go on.
#[derive(Debug, thiserror::Error)]
pub enum RoleError {
    /// The data cannot be read as the manifest says.
    #[error(transparent)]
    Data(Box<rectrain_data::DataError>),
    /// The model cannot be built, or its numbers left the range of floats.
    #[error(transparent)]
    Dense(#[from] DenseError),
    /// The embedding store refused.
    #[error("the embedding store refused: {0}")]
    Store(#[from] rectrain_embedding::StoreError),
    /// A peer could not be reached or refused.
    #[error(transparent)]
    Wire(#[from] WireError),
    /// Values that cannot travel as fp16.
    #[error("values cannot be compressed for a message: {0}")]
    Compress(#[from] rectrain_wire::compress::CompressError),
    /// A peer broke the protocol of a training mode with a barrier.
    #[error("the step gate of a parameter server refused: {0}")]
    Gate(#[from] rectrain_modes::barrier::GateError),
    /// A switch of the training mode that cannot be, or an account of rows that contradicts it.
    #[error("the coordinator cannot pause or switch training: {0}")]
    Switch(Box<rectrain_modes::switch::SwitchError>),
    /// A message without a barrier that no correct dense worker sends.
    #[error("the coordinator cannot hand out a batch: {0}")]
    Dispatch(#[from] rectrain_modes::gba::DispatchError),
    /// A gradient that no correct dense worker pushes.
    #[error("a gradient buffer refused a gradient: {0}")]
    Push(#[from] rectrain_modes::gba::PushError),
    /// An answer that no correct peer gives a dense worker.
    #[error("a dense worker was answered against the protocol: {0}")]
    Worker(#[from] rectrain_modes::gba::WorkerError),
    /// A peer broke the all-reduce.
    #[error("the all-reduce of dense gradients failed: {0}")]
    Ring(#[from] rectrain_modes::barrier::RingError),
    /// The caller's slot map is not this server's.
    #[error(transparent)]
    NotServed(#[from] rectrain_modes::migration::NotServed),
    /// Slots that cannot move now.
    #[error("slots cannot move: {0}")]
    Migration(#[from] rectrain_modes::migration::MigrationError),
    /// A loader's account contradicts the coordinator's.
    #[error("the account of the data is contradicted: {0}")]
    Ledger(#[from] rectrain_modes::LedgerError),
    /// A checkpoint that cannot be written or read.
    #[error(transparent)]
    Checkpoint(Box<rectrain_checkpoint::CheckpointError>),
    /// An answer that is not of its kind.
    #[error("the answer to `{message}` cannot be read: {source}")]
    Reply { message: &'static str, source: prost::DecodeError },
    /// A message with too many or too few tensors.
    #[error("`{message}` came with {found} tensors where {expected} were expected")]
    Tensors { message: &'static str, expected: usize, found: usize },
    /// Numbers in a message that do not fit together.
    #[error("`{message}` is inconsistent: {reason}")]
    Inconsistent { message: &'static str, reason: String },
    /// The manifest and the data cannot be trained together.
    #[error("{0}")]
    Input(String),
    /// Another member failed and the coordinator ended the job.
    #[error("{message}")]
    JobFailed { message: String, user_error: bool },
    /// A member has joined a second time, after everybody had.
    #[error(
        "{member} was restarted in the middle of the job, and what it held is lost: the job has to go on from its last checkpoint"
    )]
    Restarted { member: String },
    /// The dense workers, which must hold the same parameters, do not.
    #[error(
        "dense workers 0 and {rank} ended with different parameters: they must be equal in this mode, so this run cannot be trusted"
    )]
    Diverged { rank: u32 },
    /// A port, file or thread could not be had.
    #[error("cannot {attempt}: {source}")]
    System { attempt: String, source: std::io::Error },
    /// A task ended without a result.
    #[error("{what} ended unexpectedly: {reason}")]
    Task { what: &'static str, reason: String },
    /// The run was told to stop.
    #[error("stopped before the end of training")]
    Stopped,
}

impl RoleError {
    /// Whether the user's manifest or data is at fault: trying again cannot help.
    #[must_use]
    pub fn is_user_error(&self) -> bool {
        match self {
            Self::Data(error) => error.is_users_input(),
            Self::Input(_) | Self::Ledger(rectrain_modes::LedgerError::NoRows) => true,
            Self::Checkpoint(error) => matches!(**error, rectrain_checkpoint::CheckpointError::OtherJob { .. }),
            Self::JobFailed { user_error, .. } => *user_error,
            Self::Dense(error) => match error {
                // A program that can use GPUs and sees none may be on a node that has lost its own: another node may have one.
                DenseError::NoGpu { .. } => !GPU_SUPPORT,
                error => matches!(error, DenseError::NoBf16 { .. }),
            },
            _ => false,
        }
    }
}

impl From<rectrain_modes::switch::SwitchError> for RoleError {
    fn from(error: rectrain_modes::switch::SwitchError) -> Self {
        Self::Switch(Box::new(error))
    }
}

impl From<rectrain_checkpoint::CheckpointError> for RoleError {
    fn from(error: rectrain_checkpoint::CheckpointError) -> Self {
        Self::Checkpoint(Box::new(error))
    }
}

impl From<rectrain_data::DataError> for RoleError {
    fn from(error: rectrain_data::DataError) -> Self {
        Self::Data(Box::new(error))
    }
}

impl From<RoleError> for Refusal {
    fn from(error: RoleError) -> Self {
        match error {
            RoleError::NotServed(reason) => Self::retryable(RefusalCode::StaleEpoch, reason.to_string()),
            error => Self { code: RefusalCode::Internal, message: error.to_string(), retryable: false },
        }
    }
}

/// Whether the other side is no more, or cannot be reached.
pub fn is_gone(error: &WireError) -> bool {
    matches!(error, WireError::Closed { .. } | WireError::Unreachable { .. } | WireError::Deadline { .. })
}

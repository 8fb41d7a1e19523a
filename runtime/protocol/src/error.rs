//! The errors of a role. An error of the user's input ends a run with exit code 2 and is never
//! retried. Every other error ends it with code 1.

use rectrain_dense::{DenseError, GPU_SUPPORT};
use rectrain_wire::{Refusal, RefusalCode, WireError};

use crate::failure::{Divergence, JobFailure};

/// A role cannot continue.
#[derive(Debug, thiserror::Error)]
pub enum RoleError {
    /// The data cannot be read as the manifest says.
    #[error(transparent)]
    Data(Box<rectrain_data::DataError>),
    /// The model cannot be built, or its numbers overflowed.
    #[error(transparent)]
    Dense(#[from] DenseError),
    /// The embedding store refused a request.
    #[error("the embedding store refused a request: {0}")]
    Store(#[from] rectrain_embedding::StoreError),
    /// A peer cannot be reached, or refused a request.
    #[error(transparent)]
    Wire(#[from] WireError),
    /// Values cannot be compressed to fp16.
    #[error("values cannot be compressed for a message: {0}")]
    Compress(#[from] rectrain_wire::compress::CompressError),
    /// A peer broke the protocol of a training mode with a barrier.
    #[error("the step gate of a parameter server refused a request: {0}")]
    Gate(#[from] rectrain_modes::barrier::GateError),
    /// The training mode cannot be switched, or the ledger of rows contradicts the switch.
    #[error("the coordinator cannot pause or switch training: {0}")]
    Switch(Box<rectrain_modes::switch::SwitchError>),
    /// A dense worker broke the protocol of a training mode without a barrier.
    #[error("the coordinator cannot hand out a batch: {0}")]
    Dispatch(#[from] rectrain_modes::gba::DispatchError),
    /// A dense worker pushed a gradient that no correct one pushes.
    #[error("a gradient buffer refused a gradient: {0}")]
    Push(#[from] rectrain_modes::gba::PushError),
    /// A dense worker got a reply that no correct peer gives.
    #[error("a dense worker got a reply that breaks the protocol: {0}")]
    Worker(#[from] rectrain_modes::gba::WorkerError),
    /// A peer broke the all-reduce.
    #[error("the all-reduce of dense gradients failed: {0}")]
    Ring(#[from] rectrain_modes::barrier::RingError),
    /// The caller's slot map is not this server's.
    #[error(transparent)]
    NotServed(#[from] rectrain_modes::migration::NotServed),
    /// Slots cannot move now.
    #[error("slots cannot move: {0}")]
    Migration(#[from] rectrain_modes::migration::MigrationError),
    /// A loader's report contradicts the coordinator's ledger.
    #[error("a loader's report contradicts the coordinator's ledger: {0}")]
    Ledger(#[from] rectrain_modes::LedgerError),
    /// A checkpoint cannot be written or read.
    #[error(transparent)]
    Checkpoint(Box<rectrain_checkpoint::CheckpointError>),
    /// A reply cannot be decoded.
    #[error("the reply to `{message}` cannot be decoded: {source}")]
    Reply { message: &'static str, source: prost::DecodeError },
    /// A message has too many or too few tensors.
    #[error("`{message}` has {found} tensors, expected {expected}")]
    Tensors { message: &'static str, expected: usize, found: usize },
    /// A message contradicts itself or the state of the receiver.
    #[error("`{message}` is inconsistent: {reason}")]
    Inconsistent { message: &'static str, reason: String },
    /// The manifest and the data do not fit together.
    #[error("{0}")]
    Input(String),
    /// Another run has the lease on the checkpoint path. It may end.
    #[error("{0}")]
    Leased(String),
    /// Another member failed and the coordinator ended the job.
    #[error("{}", .0.message)]
    JobFailed(Box<JobFailure>),
    /// Training diverged.
    #[error("training diverged: {reason}")]
    Exploded { reason: String, divergence: Divergence },
    /// A member that cannot be replaced while the job trains has joined a second time.
    #[error(
        "{member} was restarted in the middle of the job and its state is lost: the job has to resume from its last checkpoint"
    )]
    Restarted { member: String },
    /// Dense workers that must hold the same parameters hold different ones.
    #[error(
        "dense workers 0 and {rank} ended with different parameters: they must be equal in this mode, so the result is not trustworthy"
    )]
    Diverged { rank: u32 },
    /// The quality of predictions has fallen. The next attempt goes on from an earlier checkpoint.
    #[error("{0}")]
    RolledBack(String),
    /// A replacement of this coordinator leads the job, or its journal is outdated. Parameter
    /// servers refuse copies of the journal from this one.
    #[error(
        "another coordinator leads the job now, or this one's journal is outdated, because its node or network seemed lost"
    )]
    Superseded,
    /// The system refused a port, a file or a thread.
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
    /// Whether a peer refused a request with this code.
    #[must_use]
    pub fn is_refused_with(&self, code: RefusalCode) -> bool {
        match self {
            Self::Wire(error) => error.refusal().is_some_and(|refusal| refusal.code == code),
            _ => false,
        }
    }

    /// Whether the user's manifest or data is at fault, so that a retry cannot help.
    #[must_use]
    pub fn is_user_error(&self) -> bool {
        match self {
            Self::Data(error) => error.is_users_input(),
            Self::Input(_) | Self::Leased(_) | Self::Ledger(rectrain_modes::LedgerError::NoRows) => true,
            Self::Checkpoint(error) => matches!(**error, rectrain_checkpoint::CheckpointError::OtherJob { .. }),
            Self::JobFailed(failure) => failure.user_error,
            Self::Dense(error) => match error {
                // A program built for GPUs that sees none may run on a node that lost its own. A
                // retry may land on another node.
                DenseError::NoGpu { .. } => !GPU_SUPPORT,
                error => matches!(error, DenseError::NoBf16 { .. }),
            },
            _ => false,
        }
    }

    /// The figures, if training diverged: a retry would diverge again.
    #[must_use]
    pub fn divergence(&self) -> Option<Divergence> {
        match self {
            Self::Exploded { divergence, .. } => Some(*divergence),
            Self::JobFailed(failure) => failure.divergence,
            Self::Dense(DenseError::NonFinite { .. }) => Some(Divergence::default()),
            _ => None,
        }
    }
}

impl From<&RoleError> for JobFailure {
    fn from(error: &RoleError) -> Self {
        Self { message: error.to_string(), user_error: error.is_user_error(), divergence: error.divergence() }
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

/// Whether the peer has ended or cannot be reached.
pub fn is_gone(error: &WireError) -> bool {
    matches!(error, WireError::Closed { .. } | WireError::Unreachable { .. } | WireError::Deadline { .. })
}

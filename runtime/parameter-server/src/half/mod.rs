//! A parameter server's half of a training mode: it decides when rows may be read and when
//! gradients are applied. Each family of modes has a file.

mod averaging;
mod barrier;
mod bases;
mod buffer;
mod pieces;
mod shadow;
mod tokens;

use std::sync::Arc;

use parking_lot::{Mutex, MutexGuard};
use rectrain_modes::barrier::pulled::StepPiece;
use rectrain_modes::switch::Boundary;
use rectrain_modes::{GlobalStep, TrainingMode};
use rectrain_proto::v1;
use rectrain_protocol::error::RoleError;
use rectrain_wire::{BoxFuture, Tensor};

pub(crate) use self::barrier::BarrierHalf;
pub(crate) use self::buffer::BufferStanding;
pub(crate) use self::shadow::ShadowHalf;
pub(crate) use self::tokens::TokenHalf;
use crate::contribution::Contribution;
use crate::early::{EarlyLookUp, PieceKeys};
use crate::partition::Snapshot;
use crate::shared::Shared;

/// The gradients of the rows of one piece.
pub(crate) struct RowGradients {
    /// The step that the piece belongs to, in a mode with a barrier.
    pub(crate) step: u64,
    /// The piece, in a mode with a barrier.
    pub(crate) piece: u32,
    /// The batch and its token, in a mode without a barrier.
    pub(crate) push: Option<v1::TokenPush>,
    /// By row group.
    pub(crate) contribution: Contribution,
}

/// The answer to a replica, in `shadow`.
enum Exchanged {
    /// The whole copy of this partition.
    Copy(Arc<Vec<f32>>),
    /// The open round is of this other fragment. The copy has not moved.
    OtherFragment(u32),
}

/// See the module documentation. `shared` is the rest of the server.
pub(crate) trait ModeHalf: Send + Sync {
    /// Waits until a look-up for `step` may read the rows.
    fn admit_look_up(&self, step: Option<GlobalStep>) -> BoxFuture<'_, Result<(), RoleError>>;

    /// Waits until a look-up may read the rows, except for the keys that it returns. Earlier steps
    /// may still change those.
    fn admit_early(&self, look_up: EarlyLookUp) -> BoxFuture<'_, Result<Vec<PieceKeys>, RoleError>> {
        Box::pin(async move { self.admit_look_up(Some(look_up.step)).await.map(|()| Vec::new()) })
    }

    /// The step that collects gradients of rows, for their staleness. 0 in a mode with a barrier.
    fn row_step(&self) -> u64;

    /// In `sync`: whether the rows may include steps that a look-up for `step` must not see.
    fn has_passed(&self, _step: GlobalStep) -> bool {
        false
    }

    /// In `sync` and `des`: the first step whose replies to look-ups the server stores. A
    /// replacement of a worker then reads the same rows again, to the bit. `None` in other modes.
    fn keeps_look_ups_from(&self) -> Option<GlobalStep> {
        None
    }

    /// Accepts gradients of rows, and applies the steps that they complete.
    fn update<'a>(
        &'a self,
        shared: &'a Arc<Shared>,
        gradients: RowGradients,
    ) -> BoxFuture<'a, Result<v1::UpdateReply, RoleError>>;

    /// Accepts a gradient of this server's partition of the dense parameters.
    fn push_dense<'a>(
        &'a self,
        shared: &'a Arc<Shared>,
        push: v1::TokenPush,
        gradient: Vec<f32>,
    ) -> BoxFuture<'a, Result<v1::PushReply, RoleError>>;

    /// With pulled pieces: accepts the gradient of this server's partition from one piece.
    fn push_piece<'a>(
        &'a self,
        _shared: &'a Arc<Shared>,
        _piece: StepPiece,
        _gradient: Vec<f32>,
    ) -> BoxFuture<'a, Result<v1::PushReply, RoleError>> {
        Box::pin(async { Err(not_this_mode("push_dense", "has no pulled pieces")) })
    }

    /// With pulled pieces: this server's partition before a step, once the steps before are
    /// applied. `None` if all servers have applied the step, and the parameters are gone.
    fn read_before<'a>(
        &'a self,
        _shared: &'a Arc<Shared>,
        _step: GlobalStep,
    ) -> BoxFuture<'a, Result<Option<Arc<Vec<f32>>>, RoleError>> {
        Box::pin(async { Err(not_this_mode("get_partition", "has no pulled pieces")) })
    }

    /// In `shadow`: moves the copy, which is this server's partition, towards a replica. Returns
    /// the tensors of the reply: the same part of the copy.
    fn exchange<'a>(
        &'a self,
        _shared: &'a Arc<Shared>,
        _exchange: v1::Exchange,
        _tensors: Vec<Tensor>,
    ) -> BoxFuture<'a, Result<(v1::Exchanged, Vec<Tensor>), RoleError>> {
        Box::pin(async { Err(not_this_mode("exchange", "trains no replicas")) })
    }

    /// Applies the gradients in an unfilled buffer at the end of the data.
    fn flush<'a>(&'a self, shared: &'a Arc<Shared>) -> BoxFuture<'a, Result<v1::Flushed, RoleError>>;

    /// Applies the steps whose gradients were complete when the predecessor died.
    fn finish_recovery<'a>(&'a self, shared: &'a Arc<Shared>) -> BoxFuture<'a, Result<(), RoleError>>;

    /// The position of the dense partition's buffer. `None` while it has gradients, and in a mode
    /// with a barrier.
    fn dense_standing(&self) -> Option<BufferStanding>;

    /// The step whose gradients were collected while these parameters were current. 0 in a mode
    /// with a barrier.
    fn dense_step_of(&self, parameters: &Snapshot) -> u64;
}

/// The half of the current mode. `None` before the first mode.
#[derive(Default)]
pub(crate) struct CurrentHalf(Mutex<Option<Arc<dyn ModeHalf>>>);

impl CurrentHalf {
    pub(crate) fn set(&self, half: Arc<dyn ModeHalf>) {
        *self.lock() = Some(half);
    }

    pub(crate) fn get(&self) -> Option<Arc<dyn ModeHalf>> {
        self.lock().clone()
    }

    fn lock(&self) -> MutexGuard<'_, Option<Arc<dyn ModeHalf>>> {
        self.0.lock()
    }
}

/// Creates the half of a mode that begins at a boundary. In a mode with a barrier, the mode before
/// has already trained the pieces of the first step before `first_piece`.
pub(crate) fn half_of(
    shared: &Shared,
    mode: TrainingMode,
    at: Boundary,
    first_piece: u32,
) -> Result<Arc<dyn ModeHalf>, RoleError> {
    Ok(match mode {
        TrainingMode::Tokens(mode) => Arc::new(TokenHalf::new(&shared.plan, mode, at)),
        TrainingMode::Shadow(mode) => Arc::new(ShadowHalf::new(&shared.plan, mode, at)),
        TrainingMode::Sync | TrainingMode::Pulled | TrainingMode::Hybrid { .. } | TrainingMode::Des => {
            Arc::new(BarrierHalf::new(shared, mode, at.step, first_piece)?)
        }
    })
}

/// Refuses a message that belongs to the other family of modes, or that arrives before the first
/// mode.
pub(crate) fn not_this_mode(message: &'static str, which: &str) -> RoleError {
    RoleError::Inconsistent { message, reason: format!("the training mode {which}") }
}

//! The dense partition of a parameter server with pulled pieces: a gate collects the gradients of
//! the pieces of a step, and the optimizer applies their sum. The server stores gradients before it
//! acknowledges them, and the partition after each step. So a replacement of its process goes on
//! with both ([`crate::kept`]).

use std::sync::Arc;

use parking_lot::{Mutex, MutexGuard};
use rectrain_modes::barrier::pulled::{PieceError, PieceGate, PiecePushed, Reading, StepPiece};
use rectrain_modes::{GlobalStep, Rank};
use rectrain_proto::v1;
use rectrain_protocol::blocking::blocking;
use rectrain_protocol::error::RoleError;
use tokio::sync::oneshot;

use crate::shared::Shared;

/// The parameters of the partition.
type Values = Arc<Vec<f32>>;
type Gate = PieceGate<oneshot::Sender<()>, Vec<f32>>;

/// See the module documentation.
pub(super) struct DensePieces(Mutex<State>);

struct State {
    gate: Gate,
    /// The parameters before the last update, or before the one under way.
    previous: Option<Values>,
}

/// The work that is left for a push.
enum Pushed {
    /// Nothing.
    Done,
    /// The push has completed the step: apply this sum.
    Completes(GlobalStep, Option<Vec<f32>>),
    /// Wait until the step is applied.
    Waits(oneshot::Receiver<()>),
}

/// The answer to a reader of the parameters before a step.
enum Read {
    Values(Values),
    Applied,
    Waits(oneshot::Receiver<()>),
}

impl DensePieces {
    /// A gate before step `first`. The mode before has trained the pieces of that step before
    /// `first_piece`.
    pub(super) fn new(shared: &Shared, first: GlobalStep, first_piece: u32) -> Result<Self, RoleError> {
        Self::with_copy(shared, first, first_piece, None)
    }

    /// Resumes from the partition of the server that this one replaces, and from the gradients that
    /// it had acknowledged. The mode began before step `began`.
    pub(super) fn recover(
        shared: &Shared,
        (began, first_piece): (GlobalStep, u32),
        gradients: Vec<(u64, u32, Vec<f32>)>,
    ) -> Result<Self, RoleError> {
        let (step, previous) = {
            let partition = shared.read_partition();
            (partition.step().unwrap_or(began).max(began), partition.previous())
        };
        let first_piece = if step == began { first_piece } else { 0 };
        let pieces = Self::with_copy(shared, step, first_piece, previous.filter(|_| step > began))?;
        for (of_step, piece, gradient) in gradients {
            if of_step == step.0 {
                let piece = StepPiece { step, piece: Rank(piece) };
                pieces.lock().gate.push(piece, Some(gradient)).map_err(refused)?;
            }
        }
        Ok(pieces)
    }

    fn with_copy(
        shared: &Shared,
        first: GlobalStep,
        first_piece: u32,
        previous: Option<Values>,
    ) -> Result<Self, RoleError> {
        let mut gate = Gate::new(shared.plan.pieces(), first, previous.is_some());
        for piece in (0..first_piece).map(Rank) {
            gate.push(StepPiece { step: first, piece }, None).map_err(refused)?;
        }
        Ok(Self(Mutex::new(State { gate, previous })))
    }

    /// Applies the step whose gradients were complete when the predecessor died.
    pub(super) async fn finish_recovery(self: &Arc<Self>, shared: &Arc<Shared>) -> Result<(), RoleError> {
        let update = self.lock().next_update(shared);
        match update {
            Some((step, sum)) => self.apply(shared, step, sum).await,
            None => Ok(()),
        }
    }

    /// Takes the gradient of a piece. If it completes the step, or the step is being applied,
    /// returns once the step is applied.
    pub(super) async fn push(
        self: &Arc<Self>,
        shared: &Arc<Shared>,
        piece: StepPiece,
        gradient: Vec<f32>,
    ) -> Result<v1::PushReply, RoleError> {
        let expected = shared.read_partition().len();
        if gradient.len() != expected {
            let reason = format!("a gradient of {expected} values was expected, {} came", gradient.len());
            return Err(RoleError::Inconsistent { message: "push_dense", reason });
        }
        let gradient = if self.lock().gate.open() == piece.step {
            store_durably(shared, piece, gradient).await?
        } else {
            gradient
        };
        let pushed = self.lock().push(shared, piece, gradient)?;
        match pushed {
            Pushed::Done => {}
            Pushed::Completes(step, sum) => self.apply(shared, step, sum).await?,
            Pushed::Waits(applied) => applied.await.map_err(|_| RoleError::Stopped)?,
        }
        Ok(v1::PushReply { outcome: v1::Outcome::Trained.into(), step: self.lock().gate.open().0 })
    }

    /// The parameters before a step. Waits until the steps before are applied. `None` if all
    /// servers have applied the step, and the parameters are gone.
    pub(super) async fn read_before(&self, shared: &Shared, step: GlobalStep) -> Result<Option<Values>, RoleError> {
        loop {
            let read = self.lock().read(shared, step);
            match read {
                Read::Values(values) => return Ok(Some(values)),
                Read::Applied => return Ok(None),
                Read::Waits(changed) => changed.await.map_err(|_| RoleError::Stopped)?,
            }
        }
    }

    /// Applies a step and lets its readers go on, on a blocking thread: nothing interrupts it.
    async fn apply(
        self: &Arc<Self>,
        shared: &Arc<Shared>,
        step: GlobalStep,
        sum: Option<Vec<f32>>,
    ) -> Result<(), RoleError> {
        let (pieces, shared) = (Arc::clone(self), Arc::clone(shared));
        let apply = move || {
            let (optimizer, since) = (shared.plan.dense_optimizer, shared.dense_since());
            shared.write_partition().apply_pieces(step, sum.as_deref(), optimizer, since)?;
            if let Some(kept) = shared.kept.as_deref() {
                kept.keep_partition(&shared.read_partition(), None);
                kept.forget_pieces(step.0 + 1);
            }
            let readers = pieces.lock().gate.finish_update();
            for reader in readers {
                // The receiver is gone if its caller has given up: ignore that.
                let _gone = reader.send(());
            }
            Ok(())
        };
        blocking("dense update", apply).await?
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.0.lock()
    }
}

impl State {
    fn push(&mut self, shared: &Shared, piece: StepPiece, gradient: Vec<f32>) -> Result<Pushed, RoleError> {
        Ok(match self.gate.push(piece, Some(gradient)).map_err(refused)? {
            PiecePushed::Taken => match self.next_update(shared) {
                Some((step, sum)) => Pushed::Completes(step, sum),
                None => Pushed::Done,
            },
            PiecePushed::Known => {
                shared.metrics.repeated_gradients.inc();
                Pushed::Done
            }
            PiecePushed::Applying => {
                shared.metrics.repeated_gradients.inc();
                match self.read(shared, piece.step.next()) {
                    Read::Waits(applied) => Pushed::Waits(applied),
                    Read::Values(_) | Read::Applied => Pushed::Done,
                }
            }
        })
    }

    /// The step to apply now, with the sum of its gradients. The present parameters become the copy
    /// at once, because readers of them may come during the update.
    fn next_update(&mut self, shared: &Shared) -> Option<(GlobalStep, Option<Vec<f32>>)> {
        let update = self.gate.next_update()?;
        self.previous = Some(shared.read_partition().parameters().values);
        Some(update)
    }

    fn read(&mut self, shared: &Shared, step: GlobalStep) -> Read {
        let (signal, changed) = oneshot::channel();
        match self.gate.read(step, signal) {
            // No update is under way, and none begins while this lock is held.
            Reading::Present(_) => Read::Values(shared.read_partition().parameters().values),
            Reading::Previous(_) => self.previous.clone().map_or(Read::Applied, Read::Values),
            Reading::Passed(_) => Read::Applied,
            Reading::Waits => Read::Waits(changed),
        }
    }
}

/// Makes a gradient durable before the server acknowledges it.
async fn store_durably(shared: &Arc<Shared>, piece: StepPiece, gradient: Vec<f32>) -> Result<Vec<f32>, RoleError> {
    let Some(kept) = shared.kept.clone() else { return Ok(gradient) };
    shared.give_up_where_memory_is_full();
    let keep = move || {
        kept.keep_piece(piece.step.0, piece.piece.0, &gradient);
        gradient
    };
    blocking("keeping of gradients", keep).await
}

fn refused(error: PieceError) -> RoleError {
    RoleError::Inconsistent { message: "push_dense", reason: error.to_string() }
}

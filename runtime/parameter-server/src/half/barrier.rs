//! The half of a parameter server in modes with a barrier in each step. A gate delays look-ups
//! until the steps before are applied. It applies a step once the gradients of all its pieces have
//! arrived. In `sync` the rows that the steps before do not change are read earlier. In `des`
//! look-ups return partial results, and their gradients come back ([`crate::partial`]). With pulled
//! pieces the server also has a partition of the dense parameters ([`DensePieces`]).

use std::sync::Arc;
use std::time::Instant;

use parking_lot::{Mutex, MutexGuard};
use rectrain_embedding::{GroupId, Moment, UpdateLog};
use rectrain_modes::barrier::pulled::StepPiece;
use rectrain_modes::barrier::{GateError, LookAhead, StepGate, sum_by_key};
use rectrain_modes::{GlobalStep, Rank, TrainingMode};
use rectrain_proto::v1;
use rectrain_protocol::blocking::blocking;
use rectrain_protocol::error::RoleError;
use rectrain_wire::BoxFuture;
use tokio::sync::{Notify, oneshot};

use super::pieces::DensePieces;
use super::{BufferStanding, ModeHalf, RowGradients, Snapshot, not_this_mode};
use crate::contribution::{Contribution, KeyExamples, latest, sum_examples, sum_of_layer};
use crate::early::{EarlyLookUp, PieceKeys};
use crate::kept::LeftGradients;
use crate::shared::{GroupUpdate, Shared, TrackedStore, as_keys};
use crate::table_life::Touched;

type Gate = StepGate<oneshot::Sender<()>, Contribution>;

/// See the module documentation.
pub(crate) struct BarrierHalf {
    gate: Mutex<Gate>,
    ahead: Mutex<LookAhead<PieceKeys>>,
    /// Notified when a piece announces its keys, and when a step is applied.
    changed: Notify,
    /// With pulled pieces: the partition of the dense parameters.
    dense: Option<Arc<DensePieces>>,
}

impl BarrierHalf {
    /// Creates a gate before step `first`. The mode before has already trained the pieces of that
    /// step before `first_piece`, so they contribute no gradients.
    pub(crate) fn new(
        shared: &Shared,
        mode: TrainingMode,
        first: GlobalStep,
        first_piece: u32,
    ) -> Result<Self, RoleError> {
        let dense = match mode {
            TrainingMode::Pulled => Some(Arc::new(DensePieces::new(shared, first, first_piece)?)),
            _ => None,
        };
        Self::with_dense(shared, mode, (first, first_piece), dense)
    }

    fn with_dense(
        shared: &Shared,
        mode: TrainingMode,
        (first, first_piece): (GlobalStep, u32),
        dense: Option<Arc<DensePieces>>,
    ) -> Result<Self, RoleError> {
        let mut gate = Gate::new(shared.plan.pieces(), mode.staleness(), first);
        let looks_ahead = matches!(mode, TrainingMode::Sync | TrainingMode::Pulled);
        let window = if looks_ahead { shared.plan.look_ahead() } else { 0 };
        let mut ahead = LookAhead::new(shared.plan.pieces(), window);
        for piece in 0..first_piece {
            gate.push(first, Rank(piece), Contribution::nothing(shared.group_dims().len()))?;
            ahead.skip(first, Rank(piece));
        }
        Ok(Self { gate: Mutex::new(gate), ahead: Mutex::new(ahead), changed: Notify::new(), dense })
    }

    /// Resumes from the durable state of the server that this one replaces: from `left`, with the
    /// gradients that it had acknowledged but not applied. `next` is the first step that is not
    /// applied to its rows. `began` is the first step of the mode, and the first piece of it.
    pub(crate) fn recover(
        shared: &Shared,
        mode: TrainingMode,
        (began, first_piece): (GlobalStep, u32),
        next: GlobalStep,
        left: LeftGradients,
    ) -> Result<Self, RoleError> {
        let dense = match mode {
            TrainingMode::Pulled => Some(Arc::new(DensePieces::recover(shared, (began, first_piece), left.dense)?)),
            _ => None,
        };
        let first_piece = if next == began { first_piece } else { 0 };
        let half = Self::with_dense(shared, mode, (next, first_piece), dense)?;
        for (step, piece, contribution) in left.rows {
            half.lock().push(GlobalStep(step), Rank(piece), contribution)?;
        }
        Ok(half)
    }

    async fn take(&self, shared: &Arc<Shared>, gradients: RowGradients) -> Result<v1::UpdateReply, RoleError> {
        let RowGradients { step, piece, contribution, .. } = gradients;
        let contribution = store_durably(shared, step, piece, contribution).await?;
        let applied = self.push(shared, GlobalStep(step), Rank(piece), contribution)?;
        let total = self.apply_complete(shared).await?;
        if let Some(applied) = applied.or_else(|| self.applied_by_another(GlobalStep(step))) {
            applied.await.map_err(|_| RoleError::Stopped)?;
        }
        Ok(total)
    }

    /// With pulled pieces: a signal that resolves when the step is applied, if it is complete and
    /// not applied. The call that completes a step is answered only then, also if another call
    /// applies it: a worker that dies meanwhile does not report the piece of the other call.
    fn applied_by_another(&self, step: GlobalStep) -> Option<oneshot::Receiver<()>> {
        self.dense.as_ref()?;
        let (signal, applied) = oneshot::channel();
        self.lock().pushed_again(step, signal).is_none().then_some(applied)
    }

    /// Passes the gradients to the gate. If the gate already has them, returns a signal that
    /// resolves when their step is applied: a retried push is answered only then.
    fn push(
        &self,
        shared: &Shared,
        step: GlobalStep,
        piece: Rank,
        contribution: Contribution,
    ) -> Result<Option<oneshot::Receiver<()>>, RoleError> {
        let mut gate = self.lock();
        match gate.push(step, piece, contribution) {
            Err(GateError::Repeated { .. }) => {
                shared.metrics.repeated_gradients.inc();
                let (signal, applied) = oneshot::channel();
                Ok(gate.pushed_again(step, signal).is_none().then_some(applied))
            }
            pushed => Ok(pushed.map(|()| None)?),
        }
    }

    /// Applies the steps whose gradients are complete.
    async fn apply_complete(&self, shared: &Arc<Shared>) -> Result<v1::UpdateReply, RoleError> {
        let mut total = v1::UpdateReply::default();
        loop {
            let Some((step, contributions)) = self.lock().next_update() else { break };
            let reply = apply(shared, step, contributions).await?;
            total.missing_rows += reply.missing_rows;
            total.non_finite_rows += reply.non_finite_rows;
            self.finish_update();
        }
        Ok(total)
    }

    /// The rows have the update that the gate returned last.
    fn finish_update(&self) {
        let mut gate = self.lock();
        for waiting in gate.finish_update() {
            // The receiver is gone if its caller has given up: ignore that.
            let _gone = waiting.send(());
        }
        let applied = gate.applied();
        drop(gate);
        self.lock_ahead().forget_before(applied);
        self.changed.notify_waiters();
    }

    /// Announces the keys of a look-up. Waits until the keys of all steps before it are known that
    /// are not applied. Returns these keys.
    async fn keys_before(&self, look_up: EarlyLookUp) -> Vec<PieceKeys> {
        let EarlyLookUp { step, piece, epoch, keys } = look_up;
        let applied = self.lock().applied();
        self.lock_ahead().announce(applied, step, piece, epoch, keys);
        self.changed.notify_waiters();
        loop {
            let changed = self.changed.notified();
            // A step that is applied meanwhile only makes the keys more than necessary.
            let applied = self.lock().applied();
            let known = self.lock_ahead().keys_before(step, applied, epoch);
            if let Some(keys) = known {
                return keys;
            }
            changed.await;
        }
    }

    fn lock_ahead(&self) -> MutexGuard<'_, LookAhead<PieceKeys>> {
        self.ahead.lock()
    }

    fn lock(&self) -> MutexGuard<'_, Gate> {
        self.gate.lock()
    }
}

impl ModeHalf for BarrierHalf {
    fn admit_look_up(&self, step: Option<GlobalStep>) -> BoxFuture<'_, Result<(), RoleError>> {
        Box::pin(async move {
            let Some(step) = step else { return Ok(()) };
            let (signal, admitted) = oneshot::channel();
            let waits = self.lock().look_up(step, signal).is_none();
            if waits { admitted.await.map_err(|_| RoleError::Stopped) } else { Ok(()) }
        })
    }

    fn admit_early(&self, look_up: EarlyLookUp) -> BoxFuture<'_, Result<Vec<PieceKeys>, RoleError>> {
        Box::pin(async move {
            let is_on = self.lock_ahead().is_on();
            if is_on {
                return Ok(self.keys_before(look_up).await);
            }
            self.admit_look_up(Some(look_up.step)).await.map(|()| Vec::new())
        })
    }

    fn row_step(&self) -> u64 {
        0
    }

    fn has_passed(&self, step: GlobalStep) -> bool {
        self.lock().has_passed(step)
    }

    fn keeps_look_ups_from(&self) -> Option<GlobalStep> {
        let gate = self.lock();
        (gate.staleness() == 0).then(|| GlobalStep(gate.applied().0.saturating_sub(1)))
    }

    fn update<'a>(
        &'a self,
        shared: &'a Arc<Shared>,
        gradients: RowGradients,
    ) -> BoxFuture<'a, Result<v1::UpdateReply, RoleError>> {
        Box::pin(async move {
            if gradients.push.is_some() {
                return Err(not_this_mode("update", "has a barrier"));
            }
            self.take(shared, gradients).await
        })
    }

    fn push_dense<'a>(
        &'a self,
        _shared: &'a Arc<Shared>,
        _push: v1::TokenPush,
        _gradient: Vec<f32>,
    ) -> BoxFuture<'a, Result<v1::PushReply, RoleError>> {
        Box::pin(async { Err(not_this_mode("push_dense", "has a barrier")) })
    }

    fn push_piece<'a>(
        &'a self,
        shared: &'a Arc<Shared>,
        piece: StepPiece,
        gradient: Vec<f32>,
    ) -> BoxFuture<'a, Result<v1::PushReply, RoleError>> {
        Box::pin(async move {
            let dense = self.dense.as_ref().ok_or_else(|| not_this_mode("push_dense", "has no pulled pieces"))?;
            dense.push(shared, piece, gradient).await
        })
    }

    fn read_before<'a>(
        &'a self,
        shared: &'a Arc<Shared>,
        step: GlobalStep,
    ) -> BoxFuture<'a, Result<Option<Arc<Vec<f32>>>, RoleError>> {
        Box::pin(async move {
            let dense = self.dense.as_ref().ok_or_else(|| not_this_mode("get_partition", "has no pulled pieces"))?;
            dense.read_before(shared, step).await
        })
    }

    fn flush<'a>(&'a self, _shared: &'a Arc<Shared>) -> BoxFuture<'a, Result<v1::Flushed, RoleError>> {
        Box::pin(async { Err(not_this_mode("flush", "has a barrier")) })
    }

    fn finish_recovery<'a>(&'a self, shared: &'a Arc<Shared>) -> BoxFuture<'a, Result<(), RoleError>> {
        Box::pin(async move {
            self.apply_complete(shared).await?;
            match &self.dense {
                Some(dense) => dense.finish_recovery(shared).await,
                None => Ok(()),
            }
        })
    }

    fn dense_standing(&self) -> Option<BufferStanding> {
        None
    }

    fn dense_step_of(&self, _parameters: &Snapshot) -> u64 {
        0
    }
}

/// Makes the gradients durable before the server acknowledges them.
async fn store_durably(
    shared: &Arc<Shared>,
    step: u64,
    piece: u32,
    contribution: Contribution,
) -> Result<Contribution, RoleError> {
    let Some(kept) = shared.kept.clone() else { return Ok(contribution) };
    shared.give_up_where_memory_is_full();
    let keep = move || {
        kept.keep(step, piece, &contribution);
        contribution
    };
    blocking("keeping of gradients", keep).await
}

async fn apply(
    shared: &Arc<Shared>,
    step: GlobalStep,
    pieces: Vec<Contribution>,
) -> Result<v1::UpdateReply, RoleError> {
    let started = Instant::now();
    let server = Arc::clone(shared);
    let apply = move || {
        finish_first_layer(&server, step, &pieces)?;
        let store = server.tracked_store();
        let Some(kept) = &server.kept else {
            return apply_groups(&store, step, pieces, server.group_dims(), None);
        };
        let mut log = kept.log();
        log.begin();
        let reply = apply_groups(&store, step, pieces, server.group_dims(), Some(&mut log))?;
        log.finish();
        kept.forget(step.0 + 1);
        Ok(reply)
    };
    let reply = blocking("update", apply).await??;
    shared.metrics.update_time.observe(started.elapsed().as_secs_f64());
    shared.metrics.lost_rows.inc_by(reply.missing_rows);
    shared.metrics.non_finite_rows.inc_by(reply.non_finite_rows);
    shared.count_store();
    Ok(reply)
}

/// Sums the pieces' gradients of the first layer's weight. The sum is durable before the step is
/// applied, because the pieces' own gradients are removed after it.
fn finish_first_layer(shared: &Shared, step: GlobalStep, pieces: &[Contribution]) -> Result<(), RoleError> {
    let Some(sum) = sum_of_layer(pieces.iter())? else { return Ok(()) };
    if let Some(kept) = &shared.kept {
        kept.keep_layer_gradient(step.0, &sum);
    }
    shared.first_layers.finish(step.0, sum);
    Ok(())
}

/// Sums the pieces' gradients and applies them as one update. Then removes the rows that the
/// updated slots do not keep.
fn apply_groups(
    store: &TrackedStore<'_>,
    step: GlobalStep,
    mut pieces: Vec<Contribution>,
    dims: &[usize],
    mut log: Option<&mut UpdateLog>,
) -> Result<v1::UpdateReply, RoleError> {
    let mut reply = v1::UpdateReply::default();
    let (now, mut touched) = (Moment(latest(pieces.iter())), Touched::default());
    for (group, dim) in dims.iter().enumerate() {
        let examples = KeyExamples::of(pieces.iter(), group);
        let contributions = pieces.iter_mut().map(|piece| std::mem::take(&mut piece.groups[group])).collect();
        let sum = sum_by_key(contributions, *dim);
        let (keys, gradients) = (as_keys(sum.keys), sum.values);
        let examples = sum_examples(&examples, &keys);
        let group = GroupId(group as u16);
        let update = GroupUpdate { group, keys: &keys, gradients: &gradients, examples: &examples, step, now };
        let counts = store.update(&update, log.as_deref_mut())?;
        touched.add(&keys, store.slot_count());
        reply.missing_rows += counts.missing;
        reply.non_finite_rows += counts.non_finite;
    }
    store.keep_budget(&touched, now)?;
    Ok(reply)
}

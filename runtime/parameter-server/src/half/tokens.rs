//! The half of a parameter server in modes without a barrier. It has two gradient buffers: one for
//! its rows and one for its partition of the dense parameters. Each buffer counts its own global
//! steps.
//!
//! The push that fills a buffer also applies the step, before the buffer accepts the next push.
//! Accepted pushes are durable ([`super::kept`]). All calls may block, so they run on blocking
//! threads.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use parking_lot::{Mutex, MutexGuard};
use rectrain_dense::DenseOptimizer;
use rectrain_embedding::{FeatureKey, GroupId, Moment, UpdateLog};
use rectrain_modes::gba::{
    Decay, EmbeddingPair, EmbeddingRule, KeyDivisor, KeySteps, LastUpdates, Push, TokenMode, Update, aggregate_dense,
    aggregate_embeddings,
};
use rectrain_modes::switch::Boundary;
use rectrain_modes::{Batch, Outcome, Token};
use rectrain_modes::{GlobalStep, Rank};
use rectrain_proto::v1;

use super::buffer::{Buffer, BufferStanding};
use super::{ModeHalf, RowGradients, not_this_mode};
use crate::contribution::{Contribution, KeyExamples, latest, sum_examples};
use crate::kept::{Kept, LeftTokens, Pushes, RowsStanding, WrittenPush};
use crate::partition::Snapshot;
use crate::shared::{GroupUpdate, Shared, as_keys};
use crate::table_life::Touched;
use rectrain_protocol::blocking::blocking;
use rectrain_protocol::error::RoleError;
use rectrain_protocol::outcome;
use rectrain_protocol::plan::JobPlan;
use rectrain_wire::BoxFuture;

/// The number of steps between two sweeps that drop keys which can no longer be stale.
const FORGET_EVERY: u64 = 64;

/// See the module documentation.
pub(crate) struct TokenBuffers {
    decay: Decay,
    divisor: KeyDivisor,
    optimizer: DenseOptimizer,
    group_dims: Vec<usize>,
    first_step: GlobalStep,
    rows: Mutex<Rows>,
    /// The step that the rows' buffer is filling. Readable while an update holds `rows`.
    embedding_step: AtomicU64,
    dense: Mutex<Dense>,
}

struct Rows {
    buffer: Buffer<Contribution>,
    /// By group. `None` if the mode never drops a gradient as stale.
    last_updates: Option<Vec<LastUpdates>>,
    oldest: Token,
    kept: KeptRows,
}

/// Tracks the durable state of the rows, so that a step can delete outdated parts of it.
#[derive(Default)]
struct KeptRows {
    /// The first push that is in no applied step.
    first_push: u64,
    /// The steps with durable lists of changed keys. The record of the last step also has the
    /// buffer's position.
    steps: VecDeque<GlobalStep>,
}

struct Dense {
    buffer: Buffer<Vec<f32>>,
    /// The first push that is in no applied step.
    first_push: u64,
}

impl TokenBuffers {
    pub(crate) fn new(plan: &JobPlan, mode: TokenMode, at: Boundary) -> Self {
        let workers = plan.replicas.dense_worker;
        let decay = mode.decay();
        let last_updates =
            (decay != Decay::None).then(|| plan.layout.group_dims.iter().map(|_| LastUpdates::default()).collect());
        Self {
            decay,
            divisor: if matches!(mode, TokenMode::Gba { .. }) { plan.key_divisor } else { KeyDivisor::Buffer },
            optimizer: plan.dense_optimizer,
            group_dims: plan.layout.group_dims.clone(),
            first_step: at.step,
            rows: Mutex::new(Rows {
                buffer: Buffer::new(mode, workers, at),
                last_updates,
                oldest: Token(at.step.0),
                kept: KeptRows::default(),
            }),
            embedding_step: AtomicU64::new(at.step.0),
            dense: Mutex::new(Dense { buffer: Buffer::new(mode, workers, at), first_push: 0 }),
        }
    }

    /// Resumes from the durable state of the server that this one replaces. Replays the pushes that
    /// no applied step contains.
    pub(crate) fn go_on(
        &self,
        plan: &JobPlan,
        mode: TokenMode,
        left: LeftTokens,
        shared: &Shared,
    ) -> Result<(), RoleError> {
        let workers = plan.replicas.dense_worker;
        let LeftTokens { rows: standing, changed, row_pushes, dense: dense_standing, dense_pushes } = left;
        let mut rows = self.lock_rows();
        if let Some(RowsStanding { buffer, oldest }) = standing {
            rows.kept.first_push = buffer.pushes;
            rows.buffer = Buffer::resume(mode, workers, buffer);
            rows.oldest = oldest;
            self.embedding_step.store(rows.buffer.step().0, Ordering::Release);
        }
        for (step, keys) in changed {
            if let Some(last_updates) = &mut rows.last_updates {
                let all = last_updates.iter_mut().zip(&keys);
                all.for_each(|(steps, keys)| keys.iter().for_each(|key| steps.set_changed(*key, step.next())));
            }
            rows.kept.steps.push_back(step);
        }
        for (push, contribution) in row_pushes {
            self.take_rows(&mut rows, (&push, contribution), None, shared)?;
        }
        let mut dense = self.lock_dense();
        if let Some(standing) = dense_standing {
            dense.first_push = standing.pushes;
            dense.buffer = Buffer::resume(mode, workers, standing);
        }
        for (push, gradient) in dense_pushes {
            self.take_dense(&mut dense, (&push, gradient), None, shared)?;
        }
        Ok(())
    }

    /// The step that the rows' buffer is filling.
    pub(crate) fn embedding_step(&self) -> u64 {
        self.embedding_step.load(Ordering::Acquire)
    }

    /// The step whose gradients were collected while these parameters were current.
    pub(crate) fn dense_step_of(&self, parameters: &Snapshot) -> u64 {
        parameters.step().unwrap_or(self.first_step).0.max(self.first_step.0)
    }

    /// The position of the dense partition's buffer. `None` while it has gradients.
    pub(crate) fn dense_standing(&self) -> Option<BufferStanding> {
        self.lock_dense().buffer.standing()
    }

    /// Adds the gradients of a batch's rows to the buffer.
    pub(crate) fn push_rows(
        &self,
        push: &v1::TokenPush,
        contribution: Contribution,
        shared: &Shared,
    ) -> Result<v1::UpdateReply, RoleError> {
        let written = shared.kept.as_deref().and_then(|kept| kept.write_row_push(push, &contribution));
        self.take_rows(&mut self.lock_rows(), (push, contribution), written, shared)
    }

    /// Adds the gradient of the dense partition to its buffer.
    pub(crate) fn push_dense(
        &self,
        push: &v1::TokenPush,
        gradient: Vec<f32>,
        shared: &Shared,
    ) -> Result<v1::PushReply, RoleError> {
        let expected = shared.read_partition().len();
        if gradient.len() != expected {
            let reason = format!("a gradient of {expected} values was expected, {} came", gradient.len());
            return Err(RoleError::Inconsistent { message: "push_dense", reason });
        }
        let written = shared.kept.as_deref().and_then(|kept| kept.write_dense_push(push, &gradient));
        self.take_dense(&mut self.lock_dense(), (push, gradient), written, shared)
    }

    /// Applies the gradients that remain in the buffers at the end of the data.
    pub(crate) fn flush(&self, shared: &Shared) -> Result<v1::Flushed, RoleError> {
        let mut rows = self.lock_rows();
        if let Some(update) = rows.buffer.flush() {
            self.apply_rows(&mut rows, &update, &mut v1::UpdateReply::default(), shared)?;
        }
        let mut dense = self.lock_dense();
        if let Some(update) = dense.buffer.flush() {
            self.apply_dense(&mut dense, &update, shared)?;
        }
        shared.metrics.buffered_gradients.set(0);
        Ok(v1::Flushed { dense_step: dense.buffer.step().0, embedding_step: rows.buffer.step().0 })
    }

    fn take_rows(
        &self,
        rows: &mut Rows,
        (push, contribution): (&v1::TokenPush, Contribution),
        written: Option<WrittenPush>,
        shared: &Shared,
    ) -> Result<v1::UpdateReply, RoleError> {
        rows.oldest = rows.oldest.max(Token(push.oldest_token));
        let taken = rows.buffer.take(push_of(push, contribution)?)?;
        if let (Some(kept), Some(number)) = (shared.kept.as_deref(), taken.number) {
            kept.keep_push(Pushes::Rows, number, written);
        }
        let mut reply = v1::UpdateReply { outcome: outcome::write(taken.outcome).into(), ..v1::UpdateReply::default() };
        if let Some(update) = taken.update {
            self.apply_rows(rows, &update, &mut reply, shared)?;
        }
        reply.step = rows.buffer.step().0;
        Ok(reply)
    }

    fn take_dense(
        &self,
        dense: &mut Dense,
        (push, gradient): (&v1::TokenPush, Vec<f32>),
        written: Option<WrittenPush>,
        shared: &Shared,
    ) -> Result<v1::PushReply, RoleError> {
        let taken = dense.buffer.take(push_of(push, gradient)?)?;
        if let (Some(kept), Some(number)) = (shared.kept.as_deref(), taken.number) {
            kept.keep_push(Pushes::Dense, number, written);
        }
        if taken.outcome == Outcome::Dropped && taken.number.is_some() {
            shared.write_partition().count_late();
            shared.metrics.late_gradients.inc();
        }
        if let Some(update) = taken.update {
            self.apply_dense(dense, &update, shared)?;
        }
        shared.metrics.buffered_gradients.set(dense.buffer.fill() as i64);
        Ok(v1::PushReply { outcome: outcome::write(taken.outcome).into(), step: dense.buffer.step().0 })
    }

    fn apply_rows(
        &self,
        rows: &mut Rows,
        update: &Update<Contribution>,
        reply: &mut v1::UpdateReply,
        shared: &Shared,
    ) -> Result<(), RoleError> {
        let started = std::time::Instant::now();
        let mut log = shared.kept.as_deref().map(Kept::log);
        if let Some(log) = &mut log {
            log.begin();
        }
        let store = shared.tracked_store();
        let (now, mut touched) = (Moment(latest(pieces_of(update))), Touched::default());
        let mut changed = Vec::with_capacity(self.group_dims.len());
        for (group, dim) in self.group_dims.iter().enumerate() {
            let rule = EmbeddingRule { dim: *dim, decay: self.decay, divisor: self.divisor, buffer: update.divisor };
            let pairs: Vec<EmbeddingPair<'_>> = update
                .pairs
                .iter()
                .map(|pair| EmbeddingPair {
                    rank: pair.push.rank,
                    token: pair.push.token,
                    gradients: &pair.push.gradient.groups[group],
                })
                .collect();
            let gradients = match &mut rows.last_updates {
                Some(steps) => aggregate_embeddings(&pairs, rule, update.step, &mut steps[group]),
                None => aggregate_embeddings(&pairs, rule, update.step, &mut NeverStale),
            };
            let (keys, gradients) = (as_keys(gradients.keys), gradients.values);
            let examples = sum_examples(&KeyExamples::of(pieces_of(update), group), &keys);
            let (group, step) = (GroupId(group as u16), update.step);
            let of_group = GroupUpdate { group, keys: &keys, gradients: &gradients, examples: &examples, step, now };
            let counts = store.update(&of_group, log.as_deref_mut())?;
            touched.add(&keys, store.slot_count());
            reply.missing_rows += counts.missing;
            reply.non_finite_rows += counts.non_finite;
            changed.push(keys);
        }
        store.keep_budget(&touched, now)?;
        if let (Some(kept), Some(log)) = (shared.kept.as_deref(), log) {
            self.finish_kept_step(rows, update.step, changed, (kept, log))?;
        }
        if let Some(steps) = &mut rows.last_updates
            && update.step.0.is_multiple_of(FORGET_EVERY)
        {
            steps.iter_mut().for_each(|steps| steps.forget_settled(rows.oldest, self.decay.tolerance()));
        }
        shared.metrics.lost_rows.inc_by(reply.missing_rows);
        shared.metrics.non_finite_rows.inc_by(reply.non_finite_rows);
        shared.metrics.update_time.observe(started.elapsed().as_secs_f64());
        self.embedding_step.store(update.step.next().0, Ordering::Release);
        Ok(())
    }

    /// Makes the step durable, after the store has changed its rows. A replacement of this server
    /// then also has the step.
    fn finish_kept_step(
        &self,
        rows: &mut Rows,
        step: GlobalStep,
        changed: Vec<Vec<FeatureKey>>,
        (kept, mut log): (&Kept, MutexGuard<'_, UpdateLog>),
    ) -> Result<(), RoleError> {
        let buffer = rows.buffer.standing().ok_or_else(|| left_in_buffer("update"))?;
        let pushes = buffer.pushes;
        let asked = rows.last_updates.is_some();
        let keys = changed
            .into_iter()
            .map(|keys| if asked { keys.into_iter().map(|key| key.0).collect() } else { Vec::new() });
        kept.keep_row_step(step, &RowsStanding { buffer, oldest: rows.oldest }, &keys.collect::<Vec<_>>());
        log.finish();
        drop(log);
        kept.forget_pushes(Pushes::Rows, rows.kept.first_push..pushes);
        rows.kept.first_push = pushes;
        rows.kept.steps.push_back(step);
        let settled = rows.oldest.0.saturating_add(self.decay.tolerance());
        while rows.kept.steps.len() > 1
            && let Some(oldest) = rows.kept.steps.pop_front_if(|step| step.next().0 <= settled)
        {
            kept.forget_row_step(oldest);
        }
        Ok(())
    }

    fn apply_dense(&self, dense: &mut Dense, update: &Update<Vec<f32>>, shared: &Shared) -> Result<(), RoleError> {
        let pairs = update.pairs.iter().map(|pair| (pair.weight, pair.push.gradient.as_slice()));
        let gradient = aggregate_dense(pairs, update.divisor);
        let metrics = &shared.metrics;
        let since = shared.dense_since();
        shared.write_partition().step_by(update, gradient.as_deref(), self.optimizer, since, metrics)?;
        if let Some(kept) = shared.kept.as_deref() {
            let buffer = dense.buffer.standing().ok_or_else(|| left_in_buffer("push_dense"))?;
            // The caller holds the buffer's lock, so no step changes the partition meanwhile. A
            // read lock lets pulls continue.
            kept.keep_partition(&shared.read_partition(), Some(&buffer));
            kept.forget_pushes(Pushes::Dense, dense.first_push..buffer.pushes);
            dense.first_push = buffer.pushes;
        }
        Ok(())
    }

    fn lock_rows(&self) -> MutexGuard<'_, Rows> {
        self.rows.lock()
    }

    fn lock_dense(&self) -> MutexGuard<'_, Dense> {
        self.dense.lock()
    }
}

/// [`TokenBuffers`] as the server calls them: slow work runs on blocking threads.
pub(crate) struct TokenHalf(Arc<TokenBuffers>);

impl TokenHalf {
    /// Creates empty buffers for a mode that begins at this boundary.
    pub(crate) fn new(plan: &JobPlan, mode: TokenMode, at: Boundary) -> Self {
        Self(Arc::new(TokenBuffers::new(plan, mode, at)))
    }

    /// Resumes from the durable state of the server that this one replaces.
    pub(crate) fn recover(
        plan: &JobPlan,
        mode: TokenMode,
        at: Boundary,
        left: LeftTokens,
        shared: &Shared,
    ) -> Result<Self, RoleError> {
        let buffers = TokenBuffers::new(plan, mode, at);
        buffers.go_on(plan, mode, left, shared)?;
        Ok(Self(Arc::new(buffers)))
    }
}

impl ModeHalf for TokenHalf {
    fn admit_look_up(&self, step: Option<GlobalStep>) -> BoxFuture<'_, Result<(), RoleError>> {
        Box::pin(async move {
            match step {
                None => Ok(()),
                Some(_) => Err(not_this_mode("lookup", "has no barrier")),
            }
        })
    }

    fn row_step(&self) -> u64 {
        self.0.embedding_step()
    }

    fn update<'a>(
        &'a self,
        shared: &'a Arc<Shared>,
        gradients: RowGradients,
    ) -> BoxFuture<'a, Result<v1::UpdateReply, RoleError>> {
        Box::pin(async move {
            let Some(push) = gradients.push else { return Err(not_this_mode("update", "has no barrier")) };
            shared.give_up_where_memory_is_full();
            let (buffers, server) = (Arc::clone(&self.0), Arc::clone(shared));
            let reply = blocking("update", move || buffers.push_rows(&push, gradients.contribution, &server)).await??;
            shared.count_store();
            Ok(reply)
        })
    }

    fn push_dense<'a>(
        &'a self,
        shared: &'a Arc<Shared>,
        push: v1::TokenPush,
        gradient: Vec<f32>,
    ) -> BoxFuture<'a, Result<v1::PushReply, RoleError>> {
        let (buffers, server) = (Arc::clone(&self.0), Arc::clone(shared));
        Box::pin(async move { blocking("dense update", move || buffers.push_dense(&push, gradient, &server)).await? })
    }

    fn flush<'a>(&'a self, shared: &'a Arc<Shared>) -> BoxFuture<'a, Result<v1::Flushed, RoleError>> {
        let (buffers, server) = (Arc::clone(&self.0), Arc::clone(shared));
        Box::pin(async move { blocking("flush", move || buffers.flush(&server)).await? })
    }

    // `recover` has already replayed every push.
    fn finish_recovery<'a>(&'a self, _shared: &'a Arc<Shared>) -> BoxFuture<'a, Result<(), RoleError>> {
        Box::pin(async { Ok(()) })
    }

    fn dense_standing(&self) -> Option<BufferStanding> {
        self.0.dense_standing()
    }

    fn dense_step_of(&self, parameters: &Snapshot) -> u64 {
        self.0.dense_step_of(parameters)
    }
}

/// The record of key changes where no gradient is ever stale: it stores nothing.
struct NeverStale;

impl KeySteps for NeverStale {
    fn changed(&self, _key: u64) -> Option<GlobalStep> {
        None
    }

    fn set_changed(&mut self, _key: u64, _step: GlobalStep) {}
}

/// The contributions of a step.
fn pieces_of(update: &Update<Contribution>) -> impl Iterator<Item = &Contribution> {
    update.pairs.iter().map(|pair| &pair.push.gradient)
}

fn left_in_buffer(message: &'static str) -> RoleError {
    let reason = "gradients are left in a buffer whose step was applied".to_owned();
    RoleError::Inconsistent { message, reason }
}

fn push_of<G>(push: &v1::TokenPush, gradient: G) -> Result<Push<G>, RoleError> {
    let [pulled_at] = push.pulled_at[..] else {
        let reason = format!("it came with {} steps of one server", push.pulled_at.len());
        return Err(RoleError::Inconsistent { message: "push", reason });
    };
    Ok(Push {
        rank: Rank(push.rank),
        batch: Batch { first_row: push.first_row, rows: push.rows },
        token: Token(push.token),
        pulled_at: GlobalStep(pulled_at),
        gradient,
    })
}

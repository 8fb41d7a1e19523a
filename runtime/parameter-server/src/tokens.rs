//! A parameter server where there is no barrier: two gradient buffers ([`GradientServer`]), one for its rows and one for its
//! partition of the dense parameters, each with a global step of its own. Whoever brings the gradient that fills a buffer
//! applies the step before the next gradient is taken. What it has taken outlives the process ([`super::kept`]). Called on threads
//! that may take their time.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};

use rectrain_dense::{DenseOptimizer, FlatOptimizer};
use rectrain_embedding::{FeatureKey, GroupId, UpdateLog};
use rectrain_modes::gba::{
    Decay, EmbeddingPair, EmbeddingRule, KeyDivisor, KeySteps, LastUpdates, Push, TokenMode, Update, aggregate_dense,
    aggregate_embeddings, staleness,
};
use rectrain_modes::switch::Boundary;
use rectrain_modes::{Batch, Outcome, Token};
use rectrain_modes::{GlobalStep, Rank};
use rectrain_proto::v1;

use super::buffer::{Buffer, BufferStanding};
use super::kept::{Kept, LeftTokens, Pushes, RowsStanding, WrittenPush};
use super::{Contribution, TrackedStore};
use rectrain_protocol::error::RoleError;
use rectrain_protocol::metrics::PsMetrics;
use rectrain_protocol::outcome;
use rectrain_protocol::plan::JobPlan;

/// Steps after which keys that can no longer be stale are forgotten.
const FORGET_EVERY: u64 = 64;

/// A server's partition of the dense parameters with its optimizer state. It outlives the modes.
#[derive(Default)]
pub(super) struct Partition {
    parameters: Snapshot,
    state: Vec<f32>,
    applied: v1::Applied,
}

/// Parameters as they were when a step had been applied.
#[derive(Clone, Default)]
pub(super) struct Snapshot {
    pub(super) values: Arc<Vec<f32>>,
    /// The step that is being collected while these are in force; none before the first.
    step: Option<GlobalStep>,
}

impl Partition {
    /// As a server before this one held it.
    pub(super) fn found(values: Vec<f32>, state: Vec<f32>, step: Option<GlobalStep>, applied: v1::Applied) -> Self {
        Self { parameters: Snapshot { values: Arc::new(values), step }, state, applied }
    }

    /// The step that is being collected with these parameters in force; none before the first.
    pub(super) fn step(&self) -> Option<GlobalStep> {
        self.parameters.step
    }

    pub(super) fn put(&mut self, parameters: Vec<f32>, state: Vec<f32>) {
        self.parameters = Snapshot { values: Arc::new(parameters), step: None };
        self.state = state;
    }

    pub(super) fn parameters(&self) -> Snapshot {
        self.parameters.clone()
    }

    pub(super) fn state(&self) -> &[f32] {
        &self.state
    }

    pub(super) fn applied(&self) -> v1::Applied {
        self.applied
    }

    /// Gives what was applied and counts anew.
    pub(super) fn take_applied(&mut self) -> v1::Applied {
        std::mem::take(&mut self.applied)
    }

    fn count(&mut self, update: &Update<Vec<f32>>, metrics: &PsMetrics) {
        for pair in &update.pairs {
            let stale = update.step.0.saturating_sub(pair.push.pulled_at.0);
            self.applied.gradients += 1;
            self.applied.staleness_sum += stale;
            self.applied.staleness_max = self.applied.staleness_max.max(stale);
            metrics.applied_gradients.inc();
            metrics.dense_staleness.observe(stale as f64);
            metrics.token_staleness.observe(staleness(pair.push.token, update.step).max(0) as f64);
            if pair.weight == 0.0 {
                self.applied.excluded += 1;
                metrics.excluded_gradients.inc();
            }
        }
    }

    fn apply(&mut self, optimizer: DenseOptimizer, gradient: &[f32], step: GlobalStep) -> Result<(), RoleError> {
        // Copies only while a worker's pull still holds the values of the step before.
        let values = Arc::make_mut(&mut self.parameters.values);
        Ok(optimizer.update(values, &mut self.state, gradient, step.0 + 1)?)
    }
}

/// See the module's text.
pub(super) struct Tokens {
    decay: Decay,
    divisor: KeyDivisor,
    optimizer: DenseOptimizer,
    group_dims: Vec<usize>,
    first_step: GlobalStep,
    rows: Mutex<Rows>,
    /// The step that the rows' buffer is filling, to be read without waiting for an update.
    embedding_step: AtomicU64,
    dense: Mutex<Dense>,
}

struct Rows {
    buffer: Buffer<Contribution>,
    /// By group; none where no gradient is ever left out.
    last_updates: Option<Vec<LastUpdates>>,
    oldest: Token,
    kept: KeptRows,
}

/// What is there for a server that takes this one's place.
#[derive(Default)]
struct KeptRows {
    /// The first push that no applied step has.
    first_push: u64,
    /// Steps of which it is known which keys they changed; the last one's tells where the buffer stood, too.
    steps: VecDeque<GlobalStep>,
}

struct Dense {
    buffer: Buffer<Vec<f32>>,
    /// The first push that no applied step has.
    first_push: u64,
}

/// The rest of the server, which steps are applied to.
pub(super) struct Held<'s> {
    pub(super) store: TrackedStore<'s>,
    pub(super) partition: &'s RwLock<Partition>,
    pub(super) kept: Option<&'s Kept>,
    pub(super) metrics: &'s PsMetrics,
}

impl Tokens {
    pub(super) fn new(plan: &JobPlan, mode: TokenMode, at: Boundary) -> Self {
        let workers = plan.replicas.dense_workers;
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

    /// Stands where the server stood of which this was found: what was pushed since its last steps is taken in once more.
    pub(super) fn go_on(
        &self,
        plan: &JobPlan,
        mode: TokenMode,
        left: LeftTokens,
        held: &Held<'_>,
    ) -> Result<(), RoleError> {
        let workers = plan.replicas.dense_workers;
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
            self.take_rows(&mut rows, (&push, contribution), None, held)?;
        }
        let mut dense = self.lock_dense();
        if let Some(standing) = dense_standing {
            dense.first_push = standing.pushes;
            dense.buffer = Buffer::resume(mode, workers, standing);
        }
        for (push, gradient) in dense_pushes {
            self.take_dense(&mut dense, (&push, gradient), None, held)?;
        }
        Ok(())
    }

    /// The step that the rows' buffer is filling.
    pub(super) fn embedding_step(&self) -> u64 {
        self.embedding_step.load(Ordering::Acquire)
    }

    /// The step that was being collected when these parameters were in force.
    pub(super) fn dense_step_of(&self, parameters: &Snapshot) -> u64 {
        parameters.step.unwrap_or(self.first_step).0.max(self.first_step.0)
    }

    /// Where the dense partition's buffer stands; none while gradients are in it.
    pub(super) fn dense_standing(&self) -> Option<BufferStanding> {
        self.lock_dense().buffer.standing()
    }

    /// Takes the gradients of a batch's rows.
    pub(super) fn push_rows(
        &self,
        push: &v1::TokenPush,
        contribution: Contribution,
        held: &Held<'_>,
    ) -> Result<v1::UpdateReply, RoleError> {
        let written = held.kept.and_then(|kept| kept.write_row_push(push, &contribution));
        self.take_rows(&mut self.lock_rows(), (push, contribution), written, held)
    }

    /// Takes the gradient of the dense partition.
    pub(super) fn push_dense(
        &self,
        push: &v1::TokenPush,
        gradient: Vec<f32>,
        held: &Held<'_>,
    ) -> Result<v1::PushReply, RoleError> {
        let expected = read(held.partition).parameters.values.len();
        if gradient.len() != expected {
            let reason = format!("a gradient of {expected} values was expected, {} came", gradient.len());
            return Err(RoleError::Inconsistent { message: "push_dense", reason });
        }
        let written = held.kept.and_then(|kept| kept.write_dense_push(push, &gradient));
        self.take_dense(&mut self.lock_dense(), (push, gradient), written, held)
    }

    /// Applies what is left in the buffers: the data has ended.
    pub(super) fn flush(&self, held: &Held<'_>) -> Result<v1::Flushed, RoleError> {
        let mut rows = self.lock_rows();
        if let Some(update) = rows.buffer.flush() {
            self.apply_rows(&mut rows, &update, &mut v1::UpdateReply::default(), held)?;
        }
        let mut dense = self.lock_dense();
        if let Some(update) = dense.buffer.flush() {
            self.apply_dense(&mut dense, &update, held)?;
        }
        held.metrics.buffered_gradients.set(0);
        Ok(v1::Flushed { dense_step: dense.buffer.step().0, embedding_step: rows.buffer.step().0 })
    }

    fn take_rows(
        &self,
        rows: &mut Rows,
        (push, contribution): (&v1::TokenPush, Contribution),
        written: Option<WrittenPush>,
        held: &Held<'_>,
    ) -> Result<v1::UpdateReply, RoleError> {
        rows.oldest = rows.oldest.max(Token(push.oldest_token));
        let taken = rows.buffer.take(push_of(push, contribution)?)?;
        if let (Some(kept), Some(number)) = (held.kept, taken.number) {
            kept.keep_push(Pushes::Rows, number, written);
        }
        let mut reply = v1::UpdateReply { outcome: outcome::write(taken.outcome).into(), ..v1::UpdateReply::default() };
        if let Some(update) = taken.update {
            self.apply_rows(rows, &update, &mut reply, held)?;
        }
        reply.step = rows.buffer.step().0;
        Ok(reply)
    }

    fn take_dense(
        &self,
        dense: &mut Dense,
        (push, gradient): (&v1::TokenPush, Vec<f32>),
        written: Option<WrittenPush>,
        held: &Held<'_>,
    ) -> Result<v1::PushReply, RoleError> {
        let taken = dense.buffer.take(push_of(push, gradient)?)?;
        if let (Some(kept), Some(number)) = (held.kept, taken.number) {
            kept.keep_push(Pushes::Dense, number, written);
        }
        if taken.outcome == Outcome::Dropped && taken.number.is_some() {
            write(held.partition).applied.late += 1;
            held.metrics.late_gradients.inc();
        }
        if let Some(update) = taken.update {
            self.apply_dense(dense, &update, held)?;
        }
        held.metrics.buffered_gradients.set(dense.buffer.fill() as i64);
        Ok(v1::PushReply { outcome: outcome::write(taken.outcome).into(), step: dense.buffer.step().0 })
    }

    fn apply_rows(
        &self,
        rows: &mut Rows,
        update: &Update<Contribution>,
        reply: &mut v1::UpdateReply,
        held: &Held<'_>,
    ) -> Result<(), RoleError> {
        let started = std::time::Instant::now();
        let mut log = held.kept.map(Kept::log);
        if let Some(log) = &mut log {
            log.begin();
        }
        let mut changed = Vec::with_capacity(self.group_dims.len());
        for (group, dim) in self.group_dims.iter().enumerate() {
            let rule = EmbeddingRule { dim: *dim, decay: self.decay, divisor: self.divisor, buffer: update.divisor };
            let pairs: Vec<EmbeddingPair<'_>> = update
                .pairs
                .iter()
                .map(|pair| EmbeddingPair {
                    rank: pair.push.rank,
                    token: pair.push.token,
                    gradients: &pair.push.gradient[group],
                })
                .collect();
            let gradients = match &mut rows.last_updates {
                Some(steps) => aggregate_embeddings(&pairs, rule, update.step, &mut steps[group]),
                None => aggregate_embeddings(&pairs, rule, update.step, &mut NeverStale),
            };
            let keys: Vec<FeatureKey> = gradients.keys.into_iter().map(FeatureKey).collect();
            let (group, log) = (GroupId(group as u16), log.as_deref_mut());
            let counts = held.store.update(group, &keys, &gradients.values, update.step, log)?;
            reply.missing_rows += counts.missing;
            reply.non_finite_rows += counts.non_finite;
            changed.push(keys);
        }
        if let (Some(kept), Some(log)) = (held.kept, log) {
            self.finish_kept_step(rows, update.step, changed, (kept, log))?;
        }
        if let Some(steps) = &mut rows.last_updates
            && update.step.0.is_multiple_of(FORGET_EVERY)
        {
            steps.iter_mut().for_each(|steps| steps.forget_settled(rows.oldest, self.decay.tolerance()));
        }
        held.metrics.lost_rows.inc_by(reply.missing_rows);
        held.metrics.non_finite_rows.inc_by(reply.non_finite_rows);
        held.metrics.update_time.observe(started.elapsed().as_secs_f64());
        self.embedding_step.store(update.step.next().0, Ordering::Release);
        Ok(())
    }

    /// The step's rows are changed: from here on it is applied for whoever takes this server's place, too.
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

    fn apply_dense(&self, dense: &mut Dense, update: &Update<Vec<f32>>, held: &Held<'_>) -> Result<(), RoleError> {
        let pairs = update.pairs.iter().map(|pair| (pair.weight, pair.push.gradient.as_slice()));
        let gradient = aggregate_dense(pairs, update.divisor);
        {
            let mut partition = write(held.partition);
            if let Some(gradient) = gradient {
                partition.apply(self.optimizer, &gradient, update.step)?;
            }
            partition.count(update, held.metrics);
            partition.parameters.step = Some(update.step.next());
        }
        if let Some(kept) = held.kept {
            let buffer = dense.buffer.standing().ok_or_else(|| left_in_buffer("push_dense"))?;
            // Nobody changes it meanwhile, and who only reads does not wait.
            kept.keep_partition(&read(held.partition), Some(&buffer));
            kept.forget_pushes(Pushes::Dense, dense.first_push..buffer.pushes);
            dense.first_push = buffer.pushes;
        }
        Ok(())
    }

    fn lock_rows(&self) -> MutexGuard<'_, Rows> {
        self.rows.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn lock_dense(&self) -> MutexGuard<'_, Dense> {
        self.dense.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Where every gradient counts, nobody asks when a key changed.
struct NeverStale;

impl KeySteps for NeverStale {
    fn changed(&self, _key: u64) -> Option<GlobalStep> {
        None
    }

    fn set_changed(&mut self, _key: u64, _step: GlobalStep) {}
}

fn read(partition: &RwLock<Partition>) -> RwLockReadGuard<'_, Partition> {
    partition.read().unwrap_or_else(PoisonError::into_inner)
}

fn write(partition: &RwLock<Partition>) -> RwLockWriteGuard<'_, Partition> {
    partition.write().unwrap_or_else(PoisonError::into_inner)
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

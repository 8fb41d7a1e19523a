//! A parameter server where there is no barrier: two gradient buffers ([`GradientServer`]), one for its rows and one for its
//! partition of the dense parameters, each with a global step of its own. Whoever brings the gradient that fills a buffer
//! applies the step before the next gradient is taken. Called on threads that may take their time.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use rectrain_dense::DenseOptimizer;
use rectrain_embedding::{FeatureKey, GroupId};
use rectrain_modes::gba::{
    Batch, Boundary, Decay, EmbeddingPair, EmbeddingRule, GradientServer, KeyDivisor, KeySteps, LastUpdates, Outcome,
    Push, Pushed, Token, TokenMode, Update, aggregate_dense, aggregate_embeddings, staleness,
};
use rectrain_modes::{GlobalStep, Rank};
use rectrain_proto::v1;

use super::{Contribution, TrackedStore};
use crate::error::RoleError;
use crate::metrics::PsMetrics;
use crate::outcome;
use crate::plan::JobPlan;

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
    dense: Mutex<GradientServer<Vec<f32>>>,
}

struct Rows {
    server: GradientServer<Contribution>,
    /// By group; none where no gradient is ever left out.
    last_updates: Option<Vec<LastUpdates>>,
    oldest: Token,
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
                server: GradientServer::new(mode, workers, at.step, at.next_row),
                last_updates,
                oldest: Token(at.step.0),
            }),
            embedding_step: AtomicU64::new(at.step.0),
            dense: Mutex::new(GradientServer::new(mode, workers, at.step, at.next_row)),
        }
    }

    /// The step that the rows' buffer is filling.
    pub(super) fn embedding_step(&self) -> u64 {
        self.embedding_step.load(Ordering::Acquire)
    }

    /// The step that was being collected when these parameters were in force.
    pub(super) fn dense_step_of(&self, parameters: &Snapshot) -> u64 {
        parameters.step.unwrap_or(self.first_step).0.max(self.first_step.0)
    }

    /// Takes the gradients of a batch's rows.
    pub(super) fn push_rows(
        &self,
        store: &TrackedStore<'_>,
        push: &v1::TokenPush,
        contribution: Contribution,
        metrics: &PsMetrics,
    ) -> Result<v1::UpdateReply, RoleError> {
        let mut rows = self.lock_rows();
        rows.oldest = rows.oldest.max(Token(push.oldest_token));
        let pushed = rows.server.push(read(push, contribution)?)?;
        let outcome = outcome_of(&pushed);
        let mut reply = v1::UpdateReply { outcome: outcome::write(outcome).into(), ..v1::UpdateReply::default() };
        if let Pushed::Full(update) = pushed {
            self.apply_rows(store, &mut rows, &update, &mut reply, metrics)?;
        }
        reply.step = rows.server.step().0;
        Ok(reply)
    }

    /// Takes the gradient of the dense partition.
    pub(super) fn push_dense(
        &self,
        partition: &Mutex<Partition>,
        push: &v1::TokenPush,
        gradient: Vec<f32>,
        metrics: &PsMetrics,
    ) -> Result<v1::PushReply, RoleError> {
        let expected = lock(partition).parameters.values.len();
        if gradient.len() != expected {
            let reason = format!("a gradient of {expected} values was expected, {} came", gradient.len());
            return Err(RoleError::Inconsistent { message: "push_dense", reason });
        }
        let mut dense = self.lock_dense();
        let pushed = dense.push(read(push, gradient)?)?;
        let outcome = outcome_of(&pushed);
        if outcome == Outcome::Dropped {
            lock(partition).applied.late += 1;
            metrics.late_gradients.inc();
        }
        if let Pushed::Full(update) = pushed {
            self.apply_dense(partition, &update, metrics)?;
        }
        metrics.buffered_gradients.set(dense.fill() as i64);
        Ok(v1::PushReply { outcome: outcome::write(outcome).into(), step: dense.step().0 })
    }

    /// Applies what is left in the buffers: the data has ended.
    pub(super) fn flush(
        &self,
        store: &TrackedStore<'_>,
        partition: &Mutex<Partition>,
        metrics: &PsMetrics,
    ) -> Result<v1::Flushed, RoleError> {
        let mut rows = self.lock_rows();
        if let Some(update) = rows.server.flush() {
            self.apply_rows(store, &mut rows, &update, &mut v1::UpdateReply::default(), metrics)?;
        }
        let mut dense = self.lock_dense();
        if let Some(update) = dense.flush() {
            self.apply_dense(partition, &update, metrics)?;
        }
        metrics.buffered_gradients.set(0);
        Ok(v1::Flushed { dense_step: dense.step().0, embedding_step: rows.server.step().0 })
    }

    fn apply_rows(
        &self,
        store: &TrackedStore<'_>,
        rows: &mut Rows,
        update: &Update<Contribution>,
        reply: &mut v1::UpdateReply,
        metrics: &PsMetrics,
    ) -> Result<(), RoleError> {
        let started = std::time::Instant::now();
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
            let counts = store.update(GroupId(group as u16), &keys, &gradients.values, update.step, None)?;
            reply.missing_rows += counts.missing;
            reply.non_finite_rows += counts.non_finite;
        }
        if let (Some(steps), Decay::Threshold { tolerance }) = (&mut rows.last_updates, self.decay)
            && update.step.0.is_multiple_of(FORGET_EVERY)
        {
            steps.iter_mut().for_each(|steps| steps.forget_settled(rows.oldest, tolerance));
        }
        metrics.lost_rows.inc_by(reply.missing_rows);
        metrics.non_finite_rows.inc_by(reply.non_finite_rows);
        metrics.update_time.observe(started.elapsed().as_secs_f64());
        self.embedding_step.store(update.step.next().0, Ordering::Release);
        Ok(())
    }

    fn apply_dense(
        &self,
        partition: &Mutex<Partition>,
        update: &Update<Vec<f32>>,
        metrics: &PsMetrics,
    ) -> Result<(), RoleError> {
        let pairs = update.pairs.iter().map(|pair| (pair.weight, pair.push.gradient.as_slice()));
        let gradient = aggregate_dense(pairs, update.divisor);
        let mut partition = lock(partition);
        if let Some(gradient) = gradient {
            partition.apply(self.optimizer, &gradient, update.step)?;
        }
        partition.parameters.step = Some(update.step.next());
        for pair in &update.pairs {
            let stale = update.step.0.saturating_sub(pair.push.pulled_at.0);
            let applied = &mut partition.applied;
            applied.gradients += 1;
            applied.staleness_sum += stale;
            applied.staleness_max = applied.staleness_max.max(stale);
            metrics.applied_gradients.inc();
            metrics.dense_staleness.observe(stale as f64);
            metrics.token_staleness.observe(staleness(pair.push.token, update.step).max(0) as f64);
            if pair.weight == 0.0 {
                applied.excluded += 1;
                metrics.excluded_gradients.inc();
            }
        }
        Ok(())
    }

    fn lock_rows(&self) -> MutexGuard<'_, Rows> {
        self.rows.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn lock_dense(&self) -> MutexGuard<'_, GradientServer<Vec<f32>>> {
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

fn lock(partition: &Mutex<Partition>) -> MutexGuard<'_, Partition> {
    partition.lock().unwrap_or_else(PoisonError::into_inner)
}

fn read<G>(push: &v1::TokenPush, gradient: G) -> Result<Push<G>, RoleError> {
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

fn outcome_of<G>(pushed: &Pushed<G>) -> Outcome {
    match pushed {
        Pushed::Buffered | Pushed::Full(_) => Outcome::Trained,
        Pushed::Late => Outcome::Dropped,
        Pushed::Repeated => Outcome::Repeated,
    }
}

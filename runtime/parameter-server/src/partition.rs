//! A parameter server's partition of the dense parameters, in modes that store them on the servers.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::sync::Arc;

use rectrain_dense::{DenseOptimizer, FlatOptimizer};
use rectrain_kinds::OutputModel;
use rectrain_modes::GlobalStep;
use rectrain_modes::gba::{Update, staleness};
use rectrain_modes::shadow::{Average, add_to_mean, interpolate};
use rectrain_proto::v1;
use rectrain_protocol::error::RoleError;
use rectrain_protocol::metrics::PsMetrics;
use serde::{Deserialize, Serialize};

use crate::averages::{Averages, RoundFragment, RoundMember};

/// A server's partition of the dense parameters with its optimizer state. It persists across
/// switches of the mode.
#[derive(Default)]
pub(crate) struct Partition {
    parameters: Snapshot,
    state: Vec<f32>,
    applied: v1::Applied,
    exchanges: SeenExchanges,
    averages: Averages,
    /// With pulled pieces: the parameters before the last step.
    previous: Option<Arc<Vec<f32>>>,
}

/// A dense worker's replica of a partition, in `shadow`.
pub(crate) struct Replica {
    /// The parameters of this range of the partition.
    pub(crate) range: Range<usize>,
    pub(crate) parameters: Vec<f32>,
    /// The optimizer state of the replica, in the last exchange of an order.
    pub(crate) state: Option<Vec<f32>>,
}

/// The exchanges of replicas that a partition has seen, in `shadow`. It has entries for as many
/// workers as the job had.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct SeenExchanges {
    /// By rank: the incarnation, the order and the number of the worker's last exchange.
    last: BTreeMap<u32, (u64, u64, u64)>,
    /// The order of the last handed-over optimizer state.
    order: u64,
    /// The ranks that have handed their state over in that order.
    handed_over: BTreeSet<u32>,
}

impl SeenExchanges {
    /// Whether this is the last exchange of its rank.
    pub(crate) fn has(&self, exchange: &v1::Exchange) -> bool {
        self.last.get(&exchange.rank) == Some(&(exchange.caller, exchange.order, exchange.number))
    }

    /// Notes an exchange. Returns false if it is a repetition.
    fn note(&mut self, exchange: &v1::Exchange) -> bool {
        let this = (exchange.caller, exchange.order, exchange.number);
        self.last.insert(exchange.rank, this) != Some(this)
    }

    /// Notes the state of a rank. Returns the number of states in this order so far. `None` if this
    /// rank's is one of them.
    fn hand_over(&mut self, exchange: &v1::Exchange) -> Option<usize> {
        if self.order != exchange.order {
            self.order = exchange.order;
            self.handed_over.clear();
        }
        self.handed_over.insert(exchange.rank).then_some(self.handed_over.len())
    }
}

/// The parameters after a step.
#[derive(Clone, Default)]
pub(crate) struct Snapshot {
    pub(crate) values: Arc<Vec<f32>>,
    /// The step whose gradients are collected while these are current. `None` before the first
    /// step.
    step: Option<GlobalStep>,
}

impl Snapshot {
    /// The step whose gradients are collected while these are current. `None` before the first
    /// step.
    pub(crate) fn step(&self) -> Option<GlobalStep> {
        self.step
    }
}

impl Partition {
    /// The recovered partition of the predecessor.
    pub(crate) fn found(
        (values, state): (Vec<f32>, Vec<f32>),
        step: Option<GlobalStep>,
        applied: v1::Applied,
        exchanges: SeenExchanges,
        averages: Averages,
    ) -> Self {
        let parameters = Snapshot { values: Arc::new(values), step };
        Self { parameters, state, applied, exchanges, averages, previous: None }
    }

    /// With the copy of the parameters before the last step.
    pub(crate) fn with_previous(self, previous: Option<Vec<f32>>) -> Self {
        Self { previous: previous.map(Arc::new), ..self }
    }

    /// With pulled pieces: the parameters before the last step.
    pub(crate) fn previous(&self) -> Option<Arc<Vec<f32>>> {
        self.previous.clone()
    }

    /// Forgets the parameters before the last step, because a mode begins.
    pub(crate) fn forget_previous(&mut self) {
        self.previous = None;
    }

    /// The exchanges of replicas so far.
    pub(crate) fn exchanges(&self) -> &SeenExchanges {
        &self.exchanges
    }

    /// The memory of the rounds with a mean.
    pub(crate) fn averages(&self) -> &Averages {
        &self.averages
    }

    /// Moves the parameters, which are the copy w̃, towards a replica, in the range of the replica:
    /// w̃ ← (1 − α) w̃ + α w⁽ⁱ⁾ (ShadowSync §3.3, algorithm 2). If the replica comes with its
    /// optimizer state, the state of the copy becomes the mean over the replicas of this order.
    /// Once all workers of the order have ended it, the parameters become the `output` model.
    ///
    /// Returns false for a repeated exchange, which changes nothing. `slots` is the number of
    /// values of the optimizer's state for each parameter.
    ///
    /// # Errors
    /// [`RoleError::Inconsistent`] if the replica has another size than its range.
    pub(crate) fn exchange(
        &mut self,
        exchange: &v1::Exchange,
        replica: &Replica,
        (alpha, output): (f32, OutputModel),
        slots: usize,
    ) -> Result<bool, RoleError> {
        self.check_size(replica, slots)?;
        if !self.exchanges.note(exchange) {
            return Ok(false);
        }
        // Copies only while a reply still holds the copy after the exchange before.
        let copy: &mut Vec<f32> = Arc::make_mut(&mut self.parameters.values);
        interpolate(&mut copy[replica.range.clone()], &replica.parameters, alpha);
        if output != OutputModel::Copy {
            self.averages.note_elastic(exchange.order, exchange.rank, &replica.parameters, exchange.last);
            self.averages.output(output, copy, exchange.workers);
        }
        self.take_state(exchange, replica.state.as_deref());
        Ok(true)
    }

    /// Moves the parameters, which are the copy, by a round of replicas that [`Self::check_size`]
    /// accepts (ShadowSync §3.3, algorithms 3 and 4). States of optimizers are treated as in
    /// [`Self::exchange`]. All exchanges belong to one order, and all but the last ones to the
    /// round's fragment.
    pub(crate) fn average(
        &mut self,
        members: impl IntoIterator<Item = (v1::Exchange, Replica)>,
        fragment: RoundFragment,
        average: &Average,
        output: OutputModel,
    ) {
        let (mut order, mut workers, mut round) = (self.averages.order(), 0, Vec::new());
        for (exchange, Replica { parameters, state, .. }) in members {
            self.exchanges.note(&exchange);
            self.take_state(&exchange, state.as_deref());
            (order, workers) = (exchange.order, exchange.workers);
            round.push(RoundMember { rank: exchange.rank, parameters, last: exchange.last });
        }
        let copy: &mut Vec<f32> = Arc::make_mut(&mut self.parameters.values);
        self.averages.apply(copy, order, round, fragment, average);
        self.averages.output(output, copy, workers);
    }

    /// Adds the state of a replica's optimizer to the mean of the order, once for each rank.
    fn take_state(&mut self, exchange: &v1::Exchange, state: Option<&[f32]>) {
        if let Some(state) = state
            && let Some(count) = self.exchanges.hand_over(exchange)
        {
            add_to_mean(&mut self.state, state, count);
        }
    }

    /// Checks the size of a replica. `slots` is as in [`Self::exchange`].
    ///
    /// # Errors
    /// [`RoleError::Inconsistent`] if the replica has another size than its range.
    pub(crate) fn check_size(&self, replica: &Replica, slots: usize) -> Result<(), RoleError> {
        let (expected, found) = (replica.range.len(), replica.parameters.len());
        let expected_state = if replica.state.is_some() { expected * slots } else { 0 };
        let state = replica.state.as_ref().map_or(0, Vec::len);
        if found == expected && state == expected_state && replica.range.end <= self.len() {
            return Ok(());
        }
        let reason = format!(
            "a replica of {expected} parameters and {expected_state} values of optimizer state was expected, and one of {found} and {state} came",
        );
        Err(RoleError::Inconsistent { message: "exchange", reason })
    }

    /// The step whose gradients are collected while these parameters are current. `None` before the
    /// first step.
    pub(crate) fn step(&self) -> Option<GlobalStep> {
        self.parameters.step
    }

    pub(crate) fn put(&mut self, parameters: Vec<f32>, state: Vec<f32>) {
        self.parameters = Snapshot { values: Arc::new(parameters), step: None };
        self.state = state;
        self.exchanges = SeenExchanges::default();
        self.averages = Averages::default();
        self.previous = None;
    }

    /// Forgets the block momentum and the replicas that rest, because another mode begins.
    pub(crate) fn forget_averages(&mut self) {
        self.averages = Averages::default();
    }

    pub(crate) fn parameters(&self) -> Snapshot {
        self.parameters.clone()
    }

    pub(crate) fn state(&self) -> &[f32] {
        &self.state
    }

    pub(crate) fn applied(&self) -> v1::Applied {
        self.applied
    }

    /// Returns the applied counts and resets them.
    pub(crate) fn take_applied(&mut self) -> v1::Applied {
        std::mem::take(&mut self.applied)
    }

    /// The number of parameters in this partition.
    pub(crate) fn len(&self) -> usize {
        self.parameters.values.len()
    }

    /// Counts a gradient that was dropped because its step was already applied.
    pub(crate) fn count_late(&mut self) {
        self.applied.late += 1;
    }

    /// Applies a step. `gradient` is `None` if every gradient of the step was excluded. The
    /// optimizer's state began before the step `since`.
    pub(crate) fn step_by(
        &mut self,
        update: &Update<Vec<f32>>,
        gradient: Option<&[f32]>,
        optimizer: DenseOptimizer,
        since: GlobalStep,
        metrics: &PsMetrics,
    ) -> Result<(), RoleError> {
        if let Some(gradient) = gradient {
            let count = update.step.next().0.saturating_sub(since.0);
            self.apply(optimizer, gradient, count)?;
        }
        self.count(update, metrics);
        self.parameters.step = Some(update.step.next());
        Ok(())
    }

    /// Applies a step of pulled pieces with the sum of their gradients. It is `None` if the mode
    /// before has trained all pieces. Retains the parameters before the step. The optimizer's state
    /// began before the step `since`.
    pub(crate) fn apply_pieces(
        &mut self,
        step: GlobalStep,
        sum: Option<&[f32]>,
        optimizer: DenseOptimizer,
        since: GlobalStep,
    ) -> Result<(), RoleError> {
        self.previous = Some(Arc::clone(&self.parameters.values));
        if let Some(sum) = sum {
            self.apply(optimizer, sum, step.next().0.saturating_sub(since.0))?;
        }
        self.parameters.step = Some(step.next());
        Ok(())
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

    fn apply(&mut self, optimizer: DenseOptimizer, gradient: &[f32], update_count: u64) -> Result<(), RoleError> {
        // Copies only while a worker's pull still holds the parameters of the previous step.
        let values = Arc::make_mut(&mut self.parameters.values);
        Ok(optimizer.update(values, &mut self.state, gradient, update_count)?)
    }
}

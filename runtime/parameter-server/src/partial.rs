//! The mode `des`: partial results of the rows that this server holds, and the gradients of these
//! rows from the gradient of the sum over all servers. The rest of a step is as in `sync`: the same
//! gate admits look-ups, and gradients of rows take the same way to the store.
//!
//! The server retains the ids of a piece between its look-up and its gradients, so that they travel
//! once. A replacement does not have them, and requests them with the gradients.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Instant;

use parking_lot::Mutex;
use rectrain_embedding::FeatureKey;
use rectrain_modes::GlobalStep;
use rectrain_modes::barrier::SparseGradients;
use rectrain_modes::des::SubOperators;
use rectrain_modes::migration::NotServed;
use rectrain_pooling::{FirstLayer, PreparedServerIds, ServerIds, ServerTower, TowerResults, WeightGradient};
use rectrain_proto::v1;
use rectrain_protocol::blocking::blocking;
use rectrain_protocol::error::RoleError;
use rectrain_protocol::layout::FeatureLayout;
use rectrain_protocol::message;
use rectrain_wire::{Frame, Tensor};

use crate::contribution::Contribution;
use crate::first_layers::layer_of;
use crate::shared::{Shared, as_keys};
use crate::{LookedUp, ParameterServer, look_up_groups, read_examples, read_groups};

/// A piece's ids on this server, with the rows of their look-up.
pub(crate) struct PartialPiece {
    /// The slot map that divided the ids.
    map_epoch: u64,
    ids: PreparedServerIds,
    /// By row group. Empty if gradients do not depend on rows.
    rows: Vec<Vec<f32>>,
}

/// The pieces of the last steps. Look-ups wait for the step before, so there are two steps at most.
#[derive(Default)]
pub(crate) struct PartialPieces(Mutex<BTreeMap<(u64, u32), Arc<PartialPiece>>>);

impl PartialPieces {
    /// Retains a piece of `step`. Drops the pieces of earlier steps.
    fn keep(&self, step: u64, piece: u32, ids: PartialPiece) {
        let mut pieces = self.0.lock();
        let kept = pieces.split_off(&(step, 0));
        let old = std::mem::replace(&mut *pieces, kept);
        pieces.insert((step, piece), Arc::new(ids));
        drop(pieces);
        drop(old);
    }

    /// The piece, if the server has its ids as this slot map divides them.
    fn get(&self, step: u64, piece: u32, map_epoch: u64) -> Option<Arc<PartialPiece>> {
        self.0.lock().get(&(step, piece)).filter(|ids| ids.map_epoch == map_epoch).cloned()
    }

    /// Drops all pieces, because another mode begins.
    pub(crate) fn clear(&self) {
        self.0.lock().clear();
    }
}

impl ParameterServer {
    /// Answers a look-up with partial results.
    pub(crate) async fn look_up_partial(
        &self,
        request: v1::Lookup,
        samples: u32,
        tensors: Vec<Tensor>,
    ) -> Result<Frame, RoleError> {
        let operators = self.operators("lookup")?;
        let (Some(step), Some(piece), true) = (request.step, request.piece, request.train) else {
            return Err(inconsistent("lookup", "partial results need a step and a piece".to_owned()));
        };
        let half = self.half.get().ok_or(NotServed::Unregistered)?;
        self.shared.slots.admit_epoch(request.map_epoch)?;
        let ids = self.prepare("lookup", samples, tensors).await?;
        let arrived = Instant::now();
        half.admit_look_up(Some(GlobalStep(step))).await?;
        let layer = match operators.units {
            0 => None,
            _ => Some(self.shared.first_layers.layer(step).await?),
        };
        let gate_seconds = arrived.elapsed().as_secs_f64();
        self.shared.metrics.gate_wait.observe(gate_seconds);
        let started = Instant::now();
        let shared = Arc::clone(&self.shared);
        let read = move || {
            let keys = keys_of(&ids);
            shared.slots.check_look_up(request.map_epoch, &keys)?;
            let LookedUp { rows, counts, .. } = look_up_groups(&shared.tracked_store(), &keys, shared.group_dims())?;
            let results = reduce(&ids, &rows, &shared.plan.layout, operators, layer.as_deref());
            Ok::<_, RoleError>((ids, rows, counts, results))
        };
        let (ids, rows, counts, results) = blocking("partial results", read).await??;
        self.shared.metrics.lookup.observe(started.elapsed().as_secs_f64());
        self.shared.metrics.count_look_up(counts);
        let rows = if operators.columns() == 0 { Vec::new() } else { rows };
        self.partial.keep(step, piece, PartialPiece { map_epoch: request.map_epoch, ids, rows });
        let reply = v1::LookupReply { gate_seconds, ..v1::LookupReply::default() };
        Ok(message::reply::<v1::Lookup>(&reply, results.into_tensors(operators)))
    }

    /// The gradients of the piece's rows, from the gradient of the sums. `None` if the server does
    /// not have the ids of the piece.
    pub(crate) async fn partial_gradients(
        &self,
        request: &v1::Update,
        samples: u32,
        mut tensors: Vec<Tensor>,
    ) -> Result<Option<Contribution>, RoleError> {
        let operators = self.operators("update")?;
        let layer = match operators.units {
            0 => None,
            _ => match self.shared.first_layers.get(request.step) {
                None => return self.without_layer(request.step).map(Some),
                layer => layer,
            },
        };
        let known = if request.has_ids {
            let count = ServerIds::tensor_count(&self.shared.plan.layout);
            let ids = tensors.split_off(tensors.len().saturating_sub(count));
            Some(Arc::new(self.read_again(request.map_epoch, samples, ids).await?))
        } else {
            self.partial.get(request.step, request.piece, request.map_epoch)
        };
        let Some(piece) = known else { return Ok(None) };
        if piece.ids.samples() != samples as usize {
            let reason = format!("a piece of {} samples came with {samples}", piece.ids.samples());
            return Err(inconsistent("update", reason));
        }
        let mut tensors = tensors.into_iter();
        let sizes = (piece.ids.samples(), piece.ids.shared_cells());
        let gradients = TowerResults::from_tensors("update", &mut tensors, operators, sizes)?;
        let mut contribution = Contribution { moment: request.moment, ..Contribution::default() };
        for (keys, counted) in piece.ids.keys().iter().zip(&self.counted) {
            let examples = if *counted { read_examples(&mut tensors, keys.len())? } else { Vec::new() };
            contribution.examples.push(examples);
        }
        let shared = Arc::clone(&self.shared);
        let compute = move || {
            let (layout, layer) = (&shared.plan.layout, layer.as_deref());
            let (values, of_layer) = spread(&piece, &gradients, layout, operators, layer);
            let of_group = |(keys, values): (&Vec<u64>, Vec<f32>)| SparseGradients { keys: keys.clone(), values };
            (piece.ids.keys().iter().zip(values).map(of_group).collect::<Vec<_>>(), of_layer)
        };
        (contribution.groups, contribution.of_layer) = blocking("gradients of rows", compute).await?;
        Ok(Some(contribution))
    }

    /// The contribution to a step whose first layer is not here. If the step is applied, this
    /// server has the piece's gradients already, and ignores the contribution.
    fn without_layer(&self, step: u64) -> Result<Contribution, RoleError> {
        if self.half.get().is_some_and(|half| half.has_passed(GlobalStep(step))) {
            return Ok(Contribution::nothing(self.shared.group_dims().len()));
        }
        Err(inconsistent("update", format!("the first layer of step {step} is not here")))
    }

    /// Reads the rows of a piece again whose look-up another process has answered. Its step is not
    /// applied, so the rows are the same. If it is, the gradients are dropped as repeated.
    async fn read_again(&self, map_epoch: u64, samples: u32, tensors: Vec<Tensor>) -> Result<PartialPiece, RoleError> {
        let ids = self.prepare("update", samples, tensors).await?;
        let shared = Arc::clone(&self.shared);
        let read = move || {
            let LookedUp { rows, .. } = read_groups(&shared.tracked_store(), &keys_of(&ids), shared.group_dims())?;
            Ok::<_, RoleError>(PartialPiece { map_epoch, ids, rows })
        };
        blocking("reading of rows", read).await?
    }

    async fn prepare(
        &self,
        name: &'static str,
        samples: u32,
        tensors: Vec<Tensor>,
    ) -> Result<PreparedServerIds, RoleError> {
        let shared: Arc<Shared> = Arc::clone(&self.shared);
        let prepare = move || {
            let layout = &shared.plan.layout;
            Ok::<_, RoleError>(ServerIds::from_tensors(name, tensors, samples, layout)?.prepare(samples, layout))
        };
        blocking("preparation of ids", prepare).await?
    }

    fn operators(&self, name: &'static str) -> Result<SubOperators, RoleError> {
        let none = || inconsistent(name, "the model has no substitution".to_owned());
        self.shared.plan.sub_operators().ok_or_else(none)
    }
}

impl ParameterServer {
    /// Stores the first layer of a step.
    pub(crate) async fn put_first_layer(
        &self,
        request: v1::PutFirstLayer,
        tensors: Vec<Tensor>,
    ) -> Result<Frame, RoleError> {
        self.expect_des("put_first_layer")?;
        let [weights, biases] = message::take("put_first_layer", tensors)?;
        let (weights, biases) = (weights.expect_f32("weights")?, biases.expect_f32("biases")?);
        let shared = Arc::clone(&self.shared);
        let put = move || {
            let layer = layer_of(&shared.plan, &weights, &biases)?;
            if let Some(kept) = &shared.kept {
                kept.keep_layer(request.step, &weights, &biases);
            }
            shared.first_layers.put(request.step, layer);
            Ok::<_, RoleError>(())
        };
        blocking("preparation of the first layer", put).await??;
        Ok(message::done::<v1::PutFirstLayer>())
    }

    /// Replies with the gradient of a step once it is there.
    pub(crate) async fn first_layer_gradient(
        &self,
        request: v1::FirstLayerGradientRequest,
    ) -> Result<Frame, RoleError> {
        self.expect_des("first_layer_gradient")?;
        let gradient = self.shared.first_layers.gradient(request.step).await?;
        let tensors = vec![Tensor::from(gradient.to_vec())];
        Ok(message::reply::<v1::FirstLayerGradientRequest>(&v1::FirstLayerGradient {}, tensors))
    }
}

/// The results of a piece. A model with a tower has a `layer`.
fn reduce(
    ids: &PreparedServerIds,
    rows: &[Vec<f32>],
    layout: &FeatureLayout,
    operators: SubOperators,
    layer: Option<&FirstLayer>,
) -> TowerResults {
    match (layer, operators.sums) {
        (Some(layer), sums) => ids.reduce_tower(rows, layout, ServerTower { sums, layer }),
        (None, Some(sums)) => TowerResults { beside: ids.reduce(rows, layout, sums), outputs: Vec::new() },
        (None, None) => TowerResults::default(),
    }
}

/// The gradients of a piece's rows by group, and of the first layer's weight.
fn spread(
    piece: &PartialPiece,
    gradients: &TowerResults,
    layout: &FeatureLayout,
    operators: SubOperators,
    layer: Option<&FirstLayer>,
) -> (Vec<Vec<f32>>, Vec<f32>) {
    let PartialPiece { ids, rows, .. } = piece;
    match (layer, operators.sums) {
        (Some(layer), sums) => {
            let mut of_layer = WeightGradient::new(layer.shape());
            let tower = ServerTower { sums, layer };
            let of_rows = ids.tower_gradients(rows, gradients, layout, tower, &mut of_layer);
            (of_rows, of_layer.into_values())
        }
        (None, Some(sums)) => (ids.gradients(rows, &gradients.beside, layout, sums), Vec::new()),
        (None, None) => (Vec::new(), Vec::new()),
    }
}

fn keys_of(ids: &PreparedServerIds) -> Vec<Vec<FeatureKey>> {
    ids.keys().iter().cloned().map(as_keys).collect()
}

fn inconsistent(message: &'static str, reason: String) -> RoleError {
    RoleError::Inconsistent { message, reason }
}

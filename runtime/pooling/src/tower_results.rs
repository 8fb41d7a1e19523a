//! The results of a parameter server for any model, in the mode `des`. For a model with a tower
//! they are the output of the [first layer](crate::first_layer) and sums beside it. `wideDeep` has
//! the sums of `lr`, and `deepfm` has the sums of `fm`. `lr` and `fm` have the sums only.

use rectrain_modes::des::cells::Cell;
use rectrain_modes::des::{Partial, PooledGradients, SubOperators, Substitution};
use rectrain_protocol::error::RoleError;
use rectrain_protocol::layout::{FeatureLayout, Pooled};
use rectrain_protocol::message;
use rectrain_wire::Tensor;

use crate::first_layer::{FirstLayer, WeightGradient};
use crate::server_ids::PreparedServerIds;
use crate::server_results::ServerResults;

/// A model with a tower, as parameter servers compute it.
#[derive(Clone, Copy, Debug)]
pub struct ServerTower<'a> {
    /// The sums beside the tower. `None` for `dnn`.
    pub sums: Option<Substitution>,
    /// The first layer of the tower.
    pub layer: &'a FirstLayer,
}

/// Results of one server, or on the way back the gradients of the sums ⊕ over all servers.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct TowerResults {
    /// The results beside the tower. Empty for `dnn`.
    pub beside: ServerResults,
    /// The output of the first layer before its activation, `[samples, units]`. Empty for `lr` and
    /// `fm`.
    pub outputs: Vec<f32>,
}

/// The sums ⊕ over all servers.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct TowerSums {
    /// The sums beside the tower. Empty for `dnn`.
    pub partial: Partial,
    /// By server: the whole embeddings of its shared cells, `[cells, d]`.
    pub whole: Vec<Vec<f32>>,
    /// The output of the first layer before its activation, `[samples, units]`.
    pub outputs: Vec<f32>,
}

impl TowerResults {
    /// The tensors of a message, all f32: the outputs `[samples, units]` if there is a tower, and
    /// then the tensors of [`ServerResults::into_tensors`] if there are sums. They are never
    /// compressed.
    #[must_use]
    pub fn into_tensors(self, operators: SubOperators) -> Vec<Tensor> {
        let Self { beside, outputs } = self;
        let mut tensors = Vec::new();
        if operators.units > 0 {
            tensors.push(Tensor::from(outputs));
        }
        if let Some(sums) = operators.sums {
            tensors.extend(beside.into_tensors(sums));
        }
        tensors
    }

    /// Reads the tensors of [`Self::into_tensors`] for a piece of `samples` samples with `cells`
    /// shared cells.
    ///
    /// # Errors
    /// [`RoleError::Wire`] or [`RoleError::Inconsistent`] if a tensor is missing or has another
    /// length.
    pub fn from_tensors(
        name: &'static str,
        tensors: &mut impl Iterator<Item = Tensor>,
        operators: SubOperators,
        (samples, cells): (usize, usize),
    ) -> Result<Self, RoleError> {
        let mut results = Self::default();
        if operators.units > 0 {
            results.outputs = message::next(name, tensors)?.expect_f32("outputs")?;
            let (expected, found) = (samples * operators.units, results.outputs.len());
            if expected != found {
                let reason = format!("expected {expected} outputs of {samples} samples, found {found}");
                return Err(RoleError::Inconsistent { message: name, reason });
            }
        }
        if let Some(sums) = operators.sums {
            results.beside = ServerResults::from_tensors(name, tensors, sums, (samples, cells))?;
        }
        Ok(results)
    }

    /// The gradients of all sums, from the message of a dense worker. It has the columns of
    /// [`TowerSums::into_pooled`]. The embeddings of shared cells are empty.
    #[must_use]
    pub fn from_pooled(gradients: Pooled, operators: SubOperators) -> Self {
        let Pooled { embeddings, linear } = gradients;
        let units = operators.units;
        let (outputs, second) = match units {
            0 => (Vec::new(), embeddings),
            _ if units == operators.columns() => (embeddings, Vec::new()),
            _ => {
                let (mut outputs, mut second) = (Vec::new(), Vec::new());
                for columns in embeddings.chunks_exact(operators.columns()) {
                    outputs.extend_from_slice(&columns[..units]);
                    second.extend_from_slice(&columns[units..]);
                }
                (outputs, second)
            }
        };
        let partial = Partial { first: linear, second };
        Self { beside: ServerResults { partial, vectors: Vec::new() }, outputs }
    }

    /// The sums over all servers, in their order. `cells` has the shared cells of each server.
    #[must_use]
    pub fn sum(of_servers: Vec<Self>, cells: &[&[Cell]], sums: Option<Substitution>) -> TowerSums {
        let (beside, outputs): (Vec<_>, Vec<_>) =
            of_servers.into_iter().map(|results| (results.beside, results.outputs)).unzip();
        let outputs = outputs.into_iter().reduce(add).unwrap_or_default();
        match sums {
            Some(sums) => {
                let (partial, whole) = ServerResults::sum(beside, cells, sums);
                TowerSums { partial, whole, outputs }
            }
            None => TowerSums { partial: Partial::default(), whole: vec![Vec::new(); cells.len()], outputs },
        }
    }
}

impl TowerSums {
    /// The sums for a dense worker. `embeddings`, `[samples, operators.columns()]`, has the outputs
    /// of a sample and then its second-order sums. `linear` has the first-order sums. Also returns
    /// the whole embeddings of shared cells.
    #[must_use]
    pub fn into_pooled(self, operators: SubOperators) -> (Pooled, Vec<Vec<f32>>) {
        let Self { partial: Partial { first, second }, whole, outputs } = self;
        let embeddings = match (operators.units, operators.columns() - operators.units) {
            (0, _) => second,
            (_, 0) => outputs,
            (units, columns) => {
                let samples = outputs.chunks_exact(units).zip(second.chunks_exact(columns));
                samples.flat_map(|(outputs, second)| outputs.iter().chain(second).copied()).collect()
            }
        };
        (Pooled { embeddings, linear: first }, whole)
    }
}

impl PreparedServerIds {
    /// The results over the looked-up rows. `rows[g]` is `[keys of group g, row dim of g]`.
    #[must_use]
    pub fn reduce_tower(&self, rows: &[Vec<f32>], layout: &FeatureLayout, tower: ServerTower<'_>) -> TowerResults {
        let pooled = self.pool(rows, layout);
        let outputs = tower.layer.reduce(self.samples(), &pooled.embeddings);
        let beside = tower.sums.map(|sums| self.reduce_pooled(&pooled, sums)).unwrap_or_default();
        TowerResults { beside, outputs }
    }

    /// The gradients of the rows, `[keys, row dim]` by group. Adds this server's part of the
    /// gradient of W to `of_weights`. `gradients` has the gradients of the sums, and the whole
    /// embeddings of the shared cells. `rows` are the rows that [`Self::reduce_tower`] had.
    #[must_use]
    pub fn tower_gradients(
        &self,
        rows: &[Vec<f32>],
        gradients: &TowerResults,
        layout: &FeatureLayout,
        tower: ServerTower<'_>,
        of_weights: &mut WeightGradient,
    ) -> Vec<Vec<f32>> {
        let own = self.pool(rows, layout).embeddings;
        let TowerResults { beside, outputs } = gradients;
        // Here a shared cell counts with this server's part. The other servers add theirs.
        of_weights.add_piece(tower.layer.kernel(), self.samples(), &own, outputs);
        let of_layer = tower.layer.spread(self.samples(), outputs);
        let of_sums = |sums: Substitution| {
            // The gradients of first-order weights do not depend on the rows.
            let own = if sums.dim == 0 { Vec::new() } else { own };
            self.spread_pooled(own, beside, sums)
        };
        let PooledGradients { linear, embeddings } = tower.sums.map(of_sums).unwrap_or_default();
        self.scatter(&Pooled { embeddings: add(of_layer, embeddings), linear }, layout)
    }
}

/// The sums of two vectors by place. Places that `other` does not have stay as they are.
fn add(mut sums: Vec<f32>, other: Vec<f32>) -> Vec<f32> {
    sums.iter_mut().zip(other).for_each(|(sum, value)| *sum += value);
    sums
}

//! The results of a parameter server for a model with a tower, in the mode `des`. They are the
//! output of the [first layer](crate::first_layer) and sums beside it. The sums are those that
//! `lr` has for `wideDeep`, and `fm` for `deepfm`.

use rectrain_modes::des::cells::Cell;
use rectrain_modes::des::{Partial, PooledGradients, Substitution};
use rectrain_protocol::layout::{FeatureLayout, Pooled};

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
    /// The output of the first layer before its activation, `[samples, units]`.
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

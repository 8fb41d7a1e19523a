//! The ids of a piece on one parameter server, in the mode `des` and for partial pooling. The
//! embedding worker divides the piece. Each server computes its partial results, and later the
//! gradients of its rows, with the code that pools a whole piece.

use rectrain_modes::des::cells::Cell;
use rectrain_modes::des::{PooledGradients, Substitution};
use rectrain_modes::migration::SlotMap;
use rectrain_protocol::error::RoleError;
use rectrain_protocol::layout::{FeatureLayout, Pooled};
use rectrain_protocol::message;
use rectrain_wire::Tensor;
use rectrain_wire::ids::UniqueIds;

use crate::partial_pooling::PooledGroups;
use crate::prepared_ids::{FeatureIds, PreparedIds, WeightedIds};
use crate::server_results::ServerResults;

/// Tensors of a feature in a message: keys, starts, samples, and the weights of the samples.
const FEATURE_TENSORS: usize = 4;

/// The part of a piece that one parameter server holds.
#[derive(Clone, Debug, PartialEq)]
pub struct ServerIds {
    /// In the order of the manifest.
    features: Vec<WeightedIds>,
    /// The cells whose ids other servers hold, too. Only a model with second-order results has
    /// some.
    cells: Vec<Cell>,
}

impl ServerIds {
    /// Divides a piece among the servers of the map, in their order. `sums` are the model's.
    #[must_use]
    pub fn divide(piece: &PreparedIds, map: &SlotMap, layout: &FeatureLayout, sums: Option<Substitution>) -> Vec<Self> {
        let servers = map.servers().len();
        let owners: Vec<Vec<u16>> = piece.keys().iter().map(|keys| owners(map, keys)).collect();
        let mut parts = vec![Self { features: Vec::new(), cells: Vec::new() }; servers];
        for (number, (feature, place)) in (0u32..).zip(piece.features.iter().zip(&layout.features)) {
            let owners = &owners[place.group];
            divide_feature(feature, owners, &mut parts);
            if servers > 1 && sums.is_some_and(|sums| sums.dim > 0) {
                let cells = shared_cells(feature, owners, piece.samples(), servers);
                for (part, samples) in parts.iter_mut().zip(cells) {
                    part.cells.extend(samples.into_iter().map(|sample| Cell { feature: number, sample }));
                }
            }
        }
        parts
    }

    /// Divides the features whose row groups the servers pool. The parts fit the layout of these
    /// groups.
    #[must_use]
    pub fn divide_groups(
        piece: &PreparedIds,
        map: &SlotMap,
        layout: &FeatureLayout,
        groups: &PooledGroups,
    ) -> Vec<Self> {
        let mut parts = vec![Self { features: Vec::new(), cells: Vec::new() }; map.servers().len()];
        let of_group = |(group, keys): (usize, &Vec<u64>)| match groups.contains(group) {
            true => owners(map, keys),
            false => Vec::new(),
        };
        let owners: Vec<Vec<u16>> = piece.keys().iter().enumerate().map(of_group).collect();
        let features = piece.features.iter().zip(&layout.features);
        for (feature, place) in features.filter(|(_, place)| groups.contains(place.group)) {
            divide_feature(feature, &owners[place.group], &mut parts);
        }
        parts
    }

    /// The cells whose ids other servers hold, too.
    #[must_use]
    pub fn cells(&self) -> &[Cell] {
        &self.cells
    }

    /// The tensors of a message: for each feature keys u64, starts u32, samples u16 or u32 and
    /// weights f32 (empty if all are 1). At last the shared cells u32 `[cells, 2]`, feature and
    /// sample.
    #[must_use]
    pub fn to_tensors(&self) -> Vec<Tensor> {
        let mut tensors = Vec::with_capacity(FEATURE_TENSORS * self.features.len() + 1);
        for WeightedIds { unique, weights } in &self.features {
            tensors.extend(unique.clone().into_tensors());
            tensors.push(Tensor::from(weights.clone().unwrap_or_default()));
        }
        let cells: Vec<u32> = self.cells.iter().flat_map(|cell| [cell.feature, cell.sample]).collect();
        tensors.push(Tensor::from(cells));
        tensors
    }

    /// The number of tensors of [`Self::to_tensors`].
    #[must_use]
    pub fn tensor_count(layout: &FeatureLayout) -> usize {
        FEATURE_TENSORS * layout.features.len() + 1
    }

    /// Reads the tensors of [`Self::to_tensors`] for a piece of `samples` samples.
    ///
    /// # Errors
    /// [`RoleError::Tensors`], [`RoleError::Wire`] or [`RoleError::Inconsistent`] if the tensors do
    /// not fit together.
    pub fn from_tensors(
        name: &'static str,
        tensors: Vec<Tensor>,
        samples: u32,
        layout: &FeatureLayout,
    ) -> Result<Self, RoleError> {
        let (expected, found) = (Self::tensor_count(layout), tensors.len());
        if expected != found {
            return Err(RoleError::Tensors { message: name, expected, found });
        }
        let mut tensors = tensors.into_iter();
        let mut features = Vec::with_capacity(layout.features.len());
        for _feature in &layout.features {
            features.push(read_feature(name, &mut tensors, samples)?);
        }
        let cells = message::next(name, &mut tensors)?.expect_u32("cells")?;
        Ok(Self { features, cells: read_cells(name, &cells, layout.features.len(), samples)? })
    }

    /// The ids with the keys to look up.
    #[must_use]
    pub fn prepare(self, samples: u32, layout: &FeatureLayout) -> PreparedServerIds {
        let Self { features, cells } = self;
        PreparedServerIds { ids: PreparedIds::weighted(samples as usize, features, layout), cells }
    }
}

/// The part of a piece that this parameter server holds, ready for its rows.
#[derive(Debug)]
pub struct PreparedServerIds {
    ids: PreparedIds,
    cells: Vec<Cell>,
}

impl PreparedServerIds {
    /// The keys to look up by group: ascending, without duplicates.
    #[must_use]
    pub fn keys(&self) -> &[Vec<u64>] {
        self.ids.keys()
    }

    /// The number of samples of the piece.
    #[must_use]
    pub fn samples(&self) -> usize {
        self.ids.samples()
    }

    /// The number of cells whose ids other servers hold, too.
    #[must_use]
    pub fn shared_cells(&self) -> usize {
        self.cells.len()
    }

    /// The partial results over the looked-up rows. `rows[g]` is `[keys of group g, row dim of g]`.
    #[must_use]
    pub fn reduce(&self, rows: &[Vec<f32>], layout: &FeatureLayout, substitution: Substitution) -> ServerResults {
        self.reduce_pooled(&self.pool(rows, layout), substitution)
    }

    /// [`Self::reduce`] of this server's pooled rows.
    pub(crate) fn reduce_pooled(&self, pooled: &Pooled, substitution: Substitution) -> ServerResults {
        let Pooled { embeddings, linear } = pooled;
        let partial = substitution.reduce(self.samples(), linear, embeddings);
        ServerResults { partial, vectors: substitution.vectors_of(&self.cells, embeddings) }
    }

    /// The gradients of the rows, `[keys, row dim]` by group. `gradients` has the gradient of the
    /// sum ⊕, and the whole embeddings of the shared cells. `rows` are the rows that
    /// [`Self::reduce`] had. They are not read for `lr`.
    #[must_use]
    pub fn gradients(
        &self,
        rows: &[Vec<f32>],
        gradients: &ServerResults,
        layout: &FeatureLayout,
        substitution: Substitution,
    ) -> Vec<Vec<f32>> {
        // The gradients of first-order weights do not depend on the rows.
        let own = match substitution.dim {
            0 => Vec::new(),
            _ => self.pool(rows, layout).embeddings,
        };
        let PooledGradients { linear, embeddings } = self.spread_pooled(own, gradients, substitution);
        self.scatter(&Pooled { embeddings, linear }, layout)
    }

    /// The gradients of this server's pooled rows, from its pooled embeddings.
    pub(crate) fn spread_pooled(
        &self,
        mut embeddings: Vec<f32>,
        gradients: &ServerResults,
        substitution: Substitution,
    ) -> PooledGradients {
        substitution.put_vectors(&self.cells, &gradients.vectors, &mut embeddings);
        substitution.spread(&gradients.partial, &embeddings)
    }

    /// Pools this server's rows. `rows[g]` is `[keys of group g, row dim of g]`.
    #[must_use]
    pub fn pool(&self, rows: &[Vec<f32>], layout: &FeatureLayout) -> Pooled {
        self.ids.pool(rows, layout)
    }

    /// Gradients of this server's rows, from the gradients of its pooled rows. Each group's result
    /// is `[keys, row dim]`.
    #[must_use]
    pub fn scatter(&self, gradients: &Pooled, layout: &FeatureLayout) -> Vec<Vec<f32>> {
        self.ids.scatter(gradients, layout)
    }
}

/// Adds a feature's ids to the parts of the servers that hold them. `owners` has the server of each
/// key of the feature's group.
fn divide_feature(feature: &FeatureIds, owners: &[u16], parts: &mut [ServerIds]) {
    let owner = |position: usize| owners[feature.rows[position] as usize];
    for (server, part) in (0u16..).zip(parts) {
        let unique = feature.unique.keeping(|position| owner(position) == server);
        part.features.push(WeightedIds { unique, weights: feature.weights.clone() });
    }
}

/// The place of the server that holds each key.
fn owners(map: &SlotMap, keys: &[u64]) -> Vec<u16> {
    let mut owners = vec![0; keys.len()];
    for (server, runs) in (0u16..).zip(map.split(keys)) {
        runs.into_iter().for_each(|run| owners[run].fill(server));
    }
    owners
}

/// By server: the samples, ascending, whose ids of a feature it holds together with other servers.
fn shared_cells(feature: &FeatureIds, owners: &[u16], samples: usize, servers: usize) -> Vec<Vec<u32>> {
    let mut first: Vec<Option<u16>> = vec![None; samples];
    let mut is_shared = vec![false; samples];
    feature.for_each(|row, sample, _| {
        let owner = owners[row];
        is_shared[sample] |= *first[sample].get_or_insert(owner) != owner;
    });
    let mut of_servers = vec![Vec::new(); servers];
    feature.for_each(|row, sample, _| {
        if is_shared[sample] {
            of_servers[usize::from(owners[row])].push(sample as u32);
        }
    });
    for samples in &mut of_servers {
        samples.sort_unstable();
        samples.dedup();
    }
    of_servers
}

fn read_feature(
    name: &'static str,
    tensors: &mut impl Iterator<Item = Tensor>,
    samples: u32,
) -> Result<WeightedIds, RoleError> {
    let ids = [message::next(name, tensors)?, message::next(name, tensors)?, message::next(name, tensors)?];
    let unique = UniqueIds::from_tensors(ids, samples)?;
    let weights = message::next(name, tensors)?.expect_f32("weights")?;
    if !weights.is_empty() && weights.len() != samples as usize {
        let reason = format!("{} weights came for {samples} samples", weights.len());
        return Err(RoleError::Inconsistent { message: name, reason });
    }
    Ok(WeightedIds { unique, weights: (!weights.is_empty()).then_some(weights) })
}

fn read_cells(name: &'static str, cells: &[u32], features: usize, samples: u32) -> Result<Vec<Cell>, RoleError> {
    let pairs = cells.chunks_exact(2);
    let is_whole = pairs.remainder().is_empty();
    let cells: Vec<Cell> = pairs.map(|pair| Cell { feature: pair[0], sample: pair[1] }).collect();
    if is_whole && cells.iter().all(|cell| (cell.feature as usize) < features && cell.sample < samples) {
        return Ok(cells);
    }
    let reason = format!("expected pairs of a feature below {features} and a sample below {samples}");
    Err(RoleError::Inconsistent { message: name, reason })
}

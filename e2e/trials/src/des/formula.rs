//! The bytes of a step by formula: of DES and of the mesh (Rong et al. 2020, section 4), and of
//! Rectrain in `sync` and `des` (docs/development/substitution.md). Pure.

/// Bytes of a key.
const KEY: f64 = 8.0;
/// Bytes of a value, and of the place where an id's samples begin.
const VALUE: f64 = 4.0;
/// Bytes of a frame's header and checksum (40), and of its structured part, which has about 20.
const FRAME: f64 = 60.0;
/// Bytes of a tensor's descriptor.
const TENSOR: f64 = 40.0;
/// The most samples whose indices have 2 bytes.
const NARROW_SAMPLES: f64 = 65_536.0;
/// Bytes of a cell in a look-up of `des`: its feature and its sample.
const CELL: f64 = 8.0;
/// Tensors of a feature in a look-up of `des`: keys, starts, samples, weights.
const FEATURE_TENSORS: f64 = 4.0;

/// A model that `des` trains.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Model {
    Lr,
    /// With embeddings of this many columns.
    Fm(u32),
    Dnn(Tower),
}

/// The sizes of a `dnn`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Tower {
    /// Columns of an embedding.
    pub(super) dim: u32,
    /// Units of the first layer.
    pub(super) units: u32,
}

/// The sizes of a step with one embedding worker and one dense worker. There are no dense features.
#[derive(Clone, Copy, Debug)]
pub(super) struct Step {
    pub(super) model: Model,
    /// B: samples of the batch.
    pub(super) batch: f64,
    /// F: sparse features.
    pub(super) features: f64,
    /// Ids of a sample in each feature.
    pub(super) values: f64,
    /// u: distinct ids of the batch.
    pub(super) unique: f64,
    /// N: parameter servers.
    pub(super) servers: f64,
}

/// Bytes of a step by link, in the order of [`LINKS`].
pub(super) type Bytes = [f64; 7];

/// The links of a step. Over the last two, the first layer of `dnn` goes to the servers and its
/// gradient comes back.
pub(super) const LINKS: [&str; 7] =
    ["lookUp", "results", "gradients", "forward", "backward", "firstLayer", "firstLayerGradient"];

/// The bytes that one step moves between all workers by the formulas of the paper.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Paper {
    /// 2 (N − 1) S_M
    pub(super) des: f64,
    /// (N − 1) (S_f + S_w). For `dnn`, S_w has the embeddings and the first layer.
    pub(super) mesh: f64,
}

impl Model {
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Lr => "lr",
            Self::Fm(_) => "fm",
            Self::Dnn(_) => "dnn",
        }
    }

    /// d: columns of an embedding.
    pub(super) fn dim(self) -> u32 {
        match self {
            Self::Lr => 0,
            Self::Fm(dim) | Self::Dnn(Tower { dim, .. }) => dim,
        }
    }

    /// h: units of the first layer of a tower.
    fn units(self) -> f64 {
        match self {
            Self::Lr | Self::Fm(_) => 0.0,
            Self::Dnn(Tower { units, .. }) => f64::from(units),
        }
    }

    /// Columns of a row: the first-order weight, and the embedding.
    fn row(self) -> f64 {
        let first_order = if matches!(self, Self::Dnn(_)) { 0.0 } else { 1.0 };
        f64::from(self.dim()) + first_order
    }

    /// Columns of the partial results: Σ w·x, for `fm` Σ v·x and Σ⟨vx, vx⟩. For `dnn` the output of
    /// the first layer.
    fn results(self) -> f64 {
        match self {
            Self::Lr => 1.0,
            Self::Fm(dim) => f64::from(dim) + 2.0,
            Self::Dnn(_) => self.units(),
        }
    }

    /// Columns of the vector that a server returns for a cell on several servers.
    fn vector(self) -> f64 {
        if let Self::Fm(dim) = self { f64::from(dim) } else { 0.0 }
    }

    /// Tensors of a piece's pooled values, or sums: first-order ones, and embeddings or outputs.
    fn pooled_tensors(self) -> f64 {
        match self {
            Self::Lr | Self::Dnn(_) => 1.0,
            Self::Fm(_) => 2.0,
        }
    }

    /// Tensors of a server's partial results.
    fn result_tensors(self) -> f64 {
        match self {
            Self::Lr | Self::Dnn(_) => 1.0,
            Self::Fm(_) => 3.0,
        }
    }
}

impl Step {
    /// The formulas of section 4, with the first-order weights of `fm`.
    pub(super) fn paper(&self) -> Paper {
        let others = self.servers - 1.0;
        let mesh = others * (self.unique * (KEY + VALUE * self.model.row()) + self.weight());
        Paper { des: 2.0 * others * VALUE * self.model.results() * self.batch, mesh }
    }

    /// The bytes of `sync` without a look-ahead.
    pub(super) fn sync(&self) -> Bytes {
        let row = VALUE * self.model.row();
        let pooled = row * self.features * self.batch;
        [
            self.servers * frame(1.0) + KEY * self.unique,
            self.servers * frame(1.0) + row * self.unique,
            self.servers * frame(2.0) + (KEY + row) * self.unique,
            self.forward_frame() + pooled,
            frame(self.model.pooled_tensors()) + pooled,
            0.0,
            0.0,
        ]
    }

    /// Bytes of the rows of the first layer's weight over embeddings.
    fn weight(&self) -> f64 {
        VALUE * f64::from(self.model.dim()) * self.features * self.model.units()
    }

    /// The bytes of the first layer to all servers, and of its gradient. The first server gets the
    /// bias, too.
    fn first_layer(&self) -> [f64; 2] {
        if self.model.units() == 0.0 {
            return [0.0; 2];
        }
        let bias = VALUE * self.model.units();
        [self.servers * (frame(2.0) + self.weight()) + bias, self.servers * (frame(1.0) + self.weight())]
    }

    /// The bytes of `des`.
    pub(super) fn des(&self) -> Bytes {
        let index = if self.batch > NARROW_SAMPLES { 4.0 } else { 2.0 };
        let sums = VALUE * self.model.results() * self.batch;
        // A list of starts has one more than there are ids.
        let of_features = frame(FEATURE_TENSORS * self.features + 1.0) + VALUE * self.features;
        let (cells, vector) = (self.shared_cells(), VALUE * self.model.vector());
        let results = self.servers * (frame(self.model.result_tensors()) + sums + vector * cells);
        let ids = self.features * self.values * self.batch;
        let [first_layer, first_layer_gradient] = self.first_layer();
        [
            self.servers * (of_features + CELL * cells) + (KEY + VALUE) * self.unique + index * ids,
            results,
            results,
            self.forward_frame() + sums,
            frame(self.model.pooled_tensors()) + sums,
            first_layer,
            first_layer_gradient,
        ]
    }

    /// The expected cells of a server whose ids other servers hold, too. A server holds each of n
    /// ids with probability 1/N. It holds all of them, or none, in the other cells.
    fn shared_cells(&self) -> f64 {
        let share = 1.0 / self.servers;
        let of_cell = 1.0 - share.powf(self.values) - (1.0 - share).powf(self.values);
        if self.model.vector() > 0.0 { of_cell * self.features * self.batch } else { 0.0 }
    }

    /// Bytes of the reply to a dense worker without its pooled values. It has the labels, and an
    /// empty tensor of dense features.
    fn forward_frame(&self) -> f64 {
        frame(self.model.pooled_tensors() + 2.0) + VALUE * self.batch
    }
}

impl Paper {
    /// The share of the mesh's bytes that DES saves: 1 − 2 S_M / (S_f + S_w).
    pub(super) fn saved(self) -> f64 {
        saved(self.des, self.mesh)
    }
}

/// Bytes of a frame with so many tensors, without their payloads.
fn frame(tensors: f64) -> f64 {
    FRAME + TENSOR * tensors
}

/// The share of `before` that `after` saves; negative if it is more.
pub(super) fn saved(after: f64, before: f64) -> f64 {
    1.0 - after / before
}

/// The largest deviation of a link's measured bytes from its formula, as a share of the formula. A
/// link without bytes in both deviates by 0.
pub(super) fn deviation(measured: &Bytes, formula: &Bytes) -> f64 {
    let of_link = |(measured, formula): (&f64, &f64)| {
        if measured == formula { 0.0 } else { (measured / formula - 1.0).abs() }
    };
    measured.iter().zip(formula).map(of_link).fold(0.0, f64::max)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The paper's table 2: batch size, unique ids, and the savings of `lr` in percent.
    const TABLE_2: [(f64, f64, f64); 5] = [
        (512.0, 147_664.0, 99.769),
        (1024.0, 257_757.0, 99.735),
        (2048.0, 448_814.0, 99.696),
        (4096.0, 789_511.0, 99.654),
        (8192.0, 1_389_353.0, 99.607),
    ];

    fn step(model: Model, batch: f64, unique: f64) -> Step {
        Step { model, batch, features: 26.0, values: 1.0, unique, servers: 4.0 }
    }

    #[test]
    fn the_formula_of_the_paper_gives_its_table() {
        for (batch, unique, lr) in TABLE_2 {
            let found = 100.0 * step(Model::Lr, batch, unique).paper().saved();
            assert!((found - lr).abs() < 6e-4, "{batch}: {found}, not {lr}");
        }
    }

    #[test]
    fn the_first_order_of_fm_adds_a_column_to_rows_and_to_results() {
        let paper = step(Model::Fm(8), 100.0, 1000.0).paper();
        assert_eq!(paper, Paper { des: 2.0 * 3.0 * 4.0 * 10.0 * 100.0, mesh: 3.0 * 1000.0 * (8.0 + 36.0) });
    }

    /// Two features and three samples with the ids a b a and c c d, on one server.
    #[test]
    fn links_agree_with_messages_counted_by_hand() {
        let step = Step { model: Model::Fm(2), batch: 3.0, features: 2.0, values: 1.0, unique: 4.0, servers: 1.0 };
        // Of `des`: 9 tensors with 4 keys, 2 + 1 and 2 + 1 starts, and 6 samples. Then 3 samples of
        // 1 and 3 columns.
        let look_up = 60.0 + 9.0 * 40.0 + 4.0 * 8.0 + 6.0 * 4.0 + 6.0 * 2.0;
        let results = 60.0 + 3.0 * 40.0 + 3.0 * 4.0 + 9.0 * 4.0;
        let (forward, backward) = (60.0 + 160.0 + 48.0 + 12.0, 60.0 + 80.0 + 48.0);
        assert_eq!(step.des(), [look_up, results, results, forward, backward, 0.0, 0.0]);
        // Of `sync`: 4 rows of 3 columns, and 3 samples of 2 times 3 columns.
        let (rows, pooled) = (4.0 * 12.0, 3.0 * 24.0);
        let forward = 60.0 + 160.0 + pooled + 12.0;
        assert_eq!(step.sync(), [100.0 + 32.0, 100.0 + rows, 140.0 + 32.0 + rows, forward, 140.0 + pooled, 0.0, 0.0]);
    }

    /// The same ids for a `dnn` on two servers. It has embeddings of two columns, and a first layer
    /// of three units.
    #[test]
    fn links_of_a_tower_agree_with_messages_counted_by_hand() {
        let model = Model::Dnn(Tower { dim: 2, units: 3 });
        let step = Step { model, batch: 3.0, features: 2.0, values: 1.0, unique: 4.0, servers: 2.0 };
        // On each server 9 tensors, with 1 + 1 starts besides the ids' own.
        let look_up = 2.0 * (60.0 + 9.0 * 40.0 + 2.0 * 4.0) + 4.0 * (8.0 + 4.0) + 6.0 * 2.0;
        let results = 2.0 * (100.0 + 9.0 * 4.0);
        let (forward, backward) = (60.0 + 120.0 + 36.0 + 12.0, 100.0 + 36.0);
        // W has 4 rows of 3 values.
        let (layer, gradient) = (2.0 * (140.0 + 48.0) + 12.0, 2.0 * (100.0 + 48.0));
        assert_eq!(step.des(), [look_up, results, results, forward, backward, layer, gradient]);
        // Of `sync`: 4 rows of 2 columns, and 3 samples of 2 times 2 columns.
        let (rows, pooled) = (4.0 * 8.0, 3.0 * 16.0);
        let (of_keys, of_gradients) = (2.0 * 100.0 + 32.0, 2.0 * 140.0 + 32.0 + rows);
        let forward = 60.0 + 120.0 + pooled + 12.0;
        assert_eq!(step.sync(), [of_keys, 200.0 + rows, of_gradients, forward, 100.0 + pooled, 0.0, 0.0]);
    }

    /// The paper's table 2 for `dnn`. It does not print the units and the fields: all its ratios
    /// follow from 256 units and 600 fields.
    #[test]
    fn the_formula_of_the_paper_gives_its_table_for_towers() {
        let model = Model::Dnn(Tower { dim: 8, units: 256 });
        for ((batch, unique, _), expected) in TABLE_2.into_iter().zip([90.310, 86.226, 81.658, 77.015, 72.264]) {
            let step = Step { features: 600.0, ..step(model, batch, unique) };
            let found = 100.0 * step.paper().saved();
            assert!((found - expected).abs() < 6e-4, "{batch}: {found}, not {expected}");
        }
    }

    /// With two servers and two ids, half of the cells are shared. Each has 8 bytes in a look-up,
    /// and a vector in the results.
    #[test]
    fn cells_on_several_servers_add_their_vectors() {
        let of = |model, values| Step { values, servers: 2.0, ..step(model, 10.0, 100.0) };
        let added = |model| {
            let [one, two] = [1.0, 2.0].map(|values| of(model, values).des());
            // The second id of each cell has an index of 2 bytes.
            [two[0] - one[0] - 2.0 * 260.0, two[1] - one[1], two[2] - one[2], two[3] - one[3]]
        };
        assert_eq!(added(Model::Lr), [0.0; 4]);
        assert_eq!(added(Model::Dnn(Tower { dim: 4, units: 3 })), [0.0; 4]);
        assert_eq!(added(Model::Fm(4)), [2.0 * 130.0 * 8.0, 2.0 * 130.0 * 16.0, 2.0 * 130.0 * 16.0, 0.0]);
    }

    #[test]
    fn the_largest_deviation_counts() {
        let formula = [100.0, 100.0, 200.0, 50.0, 10.0, 0.0, 0.0];
        assert!((deviation(&[101.0, 98.0, 200.0, 50.0, 10.0, 0.0, 0.0], &formula) - 0.02).abs() < 1e-12);
        assert!(deviation(&formula, &formula) < 1e-12);
        let unexpected = deviation(&[100.0, 100.0, 200.0, 50.0, 10.0, 8.0, 0.0], &formula);
        assert!(unexpected.is_infinite(), "a link that should have no bytes has some");
    }
}

//! The first layer of towers over several servers (Rong et al. 2020, section 4.3), against a naive
//! computation in 64 bits and against an undivided layer.

use rectrain_gemm::{Finish, Kernel, Left, Matrix, Right, Start, multiply, product};
use rectrain_modes::des::SubOperators;
use rectrain_modes::des::cells::Cell;
use rectrain_protocol::layout::PooledWidths;

use super::*;

const UNITS: usize = 5;
const DENSE_FEATURES: usize = 3;

#[derive(Clone, Copy, Debug, PartialEq)]
enum Kind {
    Dnn,
    WideDeep,
    DeepFm,
}

const KINDS: [Kind; 3] = [Kind::Dnn, Kind::WideDeep, Kind::DeepFm];

/// Features of each pooling in two row groups. Only `deepfm` needs one width.
fn layout_of(kind: Kind) -> FeatureLayout {
    let linear = kind != Kind::Dnn;
    let dims = if kind == Kind::DeepFm { [3, 3, 3] } else { [4, 2, 4] };
    let place = |feature: usize| FeaturePlace {
        group: feature % 2,
        dim: dims[feature],
        offset: dims[..feature].iter().sum(),
        pooling: POOLINGS[feature],
    };
    FeatureLayout {
        features: (0..POOLINGS.len()).map(place).collect(),
        group_dims: dims[..2].iter().map(|dim| dim + usize::from(linear)).collect(),
        linear,
        embedding_width: dims.iter().sum(),
    }
}

/// A model whose loss is Σ c·tanh(VW + b), and beside the tower Σ e·(Σ w + Σ over pairs ⟨v, v⟩).
struct TowerModel {
    kind: Kind,
    layout: FeatureLayout,
    weights: Vec<f32>,
    bias: Vec<f32>,
    /// c, `[samples, units]`.
    of_outputs: Vec<f32>,
    /// e, `[samples]`.
    of_samples: Vec<f32>,
}

impl TowerModel {
    fn random(kind: Kind, random: &mut SplitMix64) -> Self {
        let layout = layout_of(kind);
        let weights = values(layout.embedding_width * UNITS, random);
        let (bias, of_outputs) = (values(UNITS, random), values(SAMPLES * UNITS, random));
        Self { kind, layout, weights, bias, of_outputs, of_samples: values(SAMPLES, random) }
    }

    fn shape(&self) -> LayerShape {
        LayerShape { width: self.layout.embedding_width, units: UNITS }
    }

    fn sums(&self) -> Option<Substitution> {
        match self.kind {
            Kind::Dnn => None,
            Kind::WideDeep => Some(Substitution { features: POOLINGS.len(), dim: 0 }),
            Kind::DeepFm => Some(Substitution { features: POOLINGS.len(), dim: 3 }),
        }
    }

    /// The loss of the whole piece, in 64 bits.
    fn naive(&self, piece: &PreparedIds, rows: &[Vec<f64>], weights: &[f64]) -> f64 {
        let width = self.layout.embedding_width;
        let mut embeddings = vec![0.0; SAMPLES * width];
        let mut first = vec![0.0; SAMPLES];
        for (feature, place) in piece.features.iter().zip(&self.layout.features) {
            let (row_dim, column) = (self.layout.group_dims[place.group], self.layout.first_embedding_column());
            feature.for_each(|row, sample, weight| {
                let row = &rows[place.group][row * row_dim..(row + 1) * row_dim];
                for index in 0..place.dim {
                    embeddings[sample * width + place.offset + index] += f64::from(weight) * row[column + index];
                }
                if self.layout.linear {
                    first[sample] += f64::from(weight) * row[0];
                }
            });
        }
        let of_sample = |(sample, vectors): (usize, &[f64])| {
            let beside = first[sample] + self.pairs(vectors);
            f64::from(self.of_samples[sample]) * beside + self.tower(sample, vectors, weights)
        };
        embeddings.chunks_exact(width).enumerate().map(of_sample).sum()
    }

    /// Σ over pairs of features of ⟨v, v⟩, for `deepfm`.
    fn pairs(&self, vectors: &[f64]) -> f64 {
        let Some(Substitution { dim, .. }) = self.sums().filter(|sums| sums.dim > 0) else { return 0.0 };
        let vectors: Vec<&[f64]> = vectors.chunks_exact(dim).collect();
        let pairs = vectors
            .iter()
            .enumerate()
            .flat_map(|(index, left)| vectors[index + 1..].iter().map(move |right| dot(left, right)));
        pairs.sum()
    }

    /// Σ c·tanh(VW + b) of one sample.
    fn tower(&self, sample: usize, vector: &[f64], weights: &[f64]) -> f64 {
        let output = |unit: usize| {
            let column = weights.iter().skip(unit).step_by(UNITS);
            f64::from(self.bias[unit]) + vector.iter().zip(column).map(|(value, weight)| value * weight).sum::<f64>()
        };
        (0..UNITS).map(|unit| f64::from(self.of_outputs[sample * UNITS + unit]) * output(unit).tanh()).sum()
    }

    /// The results of each server for its part of the piece.
    fn parts(&self, piece: &PreparedIds, servers: u16) -> Vec<Part> {
        let map = SlotMap::even(64, servers);
        let parts = ServerIds::divide(piece, &map, &self.layout, self.sums());
        let part = |(server, part): (usize, ServerIds)| {
            let cells = part.cells().to_vec();
            let ids = part.prepare(SAMPLES as u32, &self.layout);
            let rows = rows_of(ids.keys(), &self.layout);
            let bias = (server == 0).then_some(&self.bias[..]);
            let layer = FirstLayer::new(Kernel::fp32(), self.shape(), &self.weights, bias).unwrap();
            let tower = ServerTower { sums: self.sums(), layer: &layer };
            let results = ids.reduce_tower(&rows, &self.layout, tower);
            Part { cells, ids, rows, layer, results }
        };
        parts.into_iter().enumerate().map(part).collect()
    }

    /// The gradients of the loss by the sums. Also returns the loss.
    fn gradients(&self, sums: &TowerSums) -> (f64, TowerResults) {
        let mut loss = 0.0;
        let mut outputs = Vec::new();
        for (output, factor) in sums.outputs.iter().zip(&self.of_outputs) {
            let activation = f64::from(*output).tanh();
            loss += f64::from(*factor) * activation;
            outputs.push((f64::from(*factor) * (1.0 - activation * activation)) as f32);
        }
        let Some(Substitution { dim, .. }) = self.sums() else {
            return (loss, TowerResults { beside: ServerResults::default(), outputs });
        };
        let mut second = Vec::new();
        for (sample, factor) in self.of_samples.iter().enumerate() {
            let mut beside = f64::from(sums.partial.first[sample]);
            if dim > 0 {
                let results = &sums.partial.second[sample * (dim + 1)..(sample + 1) * (dim + 1)];
                let square: f64 = results[..dim].iter().map(|value| f64::from(*value).powi(2)).sum();
                beside += 0.5 * square - 0.5 * f64::from(results[dim]);
                second.extend(results[..dim].iter().map(|value| *factor * *value));
                second.push(-0.5 * *factor);
            }
            loss += f64::from(*factor) * beside;
        }
        let partial = Partial { first: self.of_samples.clone(), second };
        (loss, TowerResults { beside: ServerResults { partial, vectors: Vec::new() }, outputs })
    }

    /// Computes the piece on this number of servers.
    fn on_servers(&self, piece: &PreparedIds, servers: u16) -> Trained {
        let parts = self.parts(piece, servers);
        let cells: Vec<_> = parts.iter().map(|part| &part.cells[..]).collect();
        let results = parts.iter().map(|part| part.results.clone()).collect();
        let sums = TowerResults::sum(results, &cells, self.sums());
        let (loss, gradients) = self.gradients(&sums);
        let mut of_weights = WeightGradient::new(self.shape());
        let mut of_rows = vec![Vec::new(); self.layout.group_dims.len()];
        for (part, vectors) in parts.iter().zip(sums.whole) {
            let mut gradients = gradients.clone();
            gradients.beside.vectors = vectors;
            let mut of_server = WeightGradient::new(self.shape());
            let tower = ServerTower { sums: self.sums(), layer: &part.layer };
            let groups = part.ids.tower_gradients(&part.rows, &gradients, &self.layout, tower, &mut of_server);
            of_weights.add(&of_server).unwrap();
            for (group, (keys, values)) in part.ids.keys().iter().zip(groups).enumerate() {
                let rows = values.chunks_exact(self.layout.group_dims[group]).map(<[f32]>::to_vec);
                of_rows[group].extend(keys.iter().copied().zip(rows));
            }
        }
        of_rows.iter_mut().for_each(|group| group.sort_by_key(|(key, _)| *key));
        Trained { loss, of_rows, of_weights: of_weights.values().to_vec() }
    }
}

/// A loss, the gradients of the rows by group and key, and the gradient of W.
struct Trained {
    loss: f64,
    of_rows: Vec<Vec<(u64, Vec<f32>)>>,
    of_weights: Vec<f32>,
}

struct Part {
    cells: Vec<Cell>,
    ids: PreparedServerIds,
    rows: Vec<Vec<f32>>,
    layer: FirstLayer,
    results: TowerResults,
}

fn dot(left: &[f64], right: &[f64]) -> f64 {
    left.iter().zip(right).map(|(left, right)| left * right).sum()
}

fn wide(values: &[f32]) -> Vec<f64> {
    values.iter().copied().map(f64::from).collect()
}

/// Central differences of `loss` by the value at each place of `values`.
fn differences(values: &mut [f64], mut loss: impl FnMut(&[f64]) -> f64) -> Vec<f32> {
    const EPSILON: f64 = 1e-5;
    let mut found = Vec::new();
    for place in 0..values.len() {
        let value = values[place];
        values[place] = value + EPSILON;
        let above = loss(values);
        values[place] = value - EPSILON;
        let below = loss(values);
        values[place] = value;
        found.push(((above - below) / (2.0 * EPSILON)) as f32);
    }
    found
}

/// Equations 8 and 9, and the gradients through the partition. The naive computation knows no
/// servers.
#[test]
fn s4_3_every_division_of_the_ids_trains_the_undivided_layer() {
    let mut random = SplitMix64::new(11);
    for kind in KINDS {
        for most in [1, 4] {
            let model = TowerModel::random(kind, &mut random);
            let piece = piece(&model.layout, most, &mut random);
            let rows: Vec<Vec<f64>> = rows_of(piece.keys(), &model.layout).iter().map(|rows| wide(rows)).collect();
            let mut weights = wide(&model.weights);
            let expected = model.naive(&piece, &rows, &weights);
            let of_weights = differences(&mut weights, |weights| model.naive(&piece, &rows, weights));
            let of_group = |group: usize| {
                let mut moved = rows.clone();
                let mut of_group = moved[group].clone();
                differences(&mut of_group, |values| {
                    moved[group].copy_from_slice(values);
                    model.naive(&piece, &moved, &weights)
                })
            };
            let of_rows: Vec<Vec<f32>> = (0..rows.len()).map(of_group).collect();
            for servers in [1, 2, 3, 7] {
                let found = model.on_servers(&piece, servers);
                let loss = found.loss;
                assert!((loss - expected).abs() < 1e-4, "{kind:?} on {servers}: {loss}, not {expected}");
                assert_close(&found.of_weights, &of_weights);
                for ((found, expected), keys) in found.of_rows.iter().zip(&of_rows).zip(piece.keys()) {
                    let found_keys: Vec<u64> = found.iter().map(|(key, _)| *key).collect();
                    assert_eq!(&found_keys, keys, "each key has one server");
                    let found: Vec<f32> = found.iter().flat_map(|(_, values)| values.iter().copied()).collect();
                    assert_close(&found, expected);
                }
            }
        }
    }
}

/// Between the roles, results and gradients are tensors and columns side by side.
#[test]
fn results_and_gradients_survive_their_messages() {
    let mut random = SplitMix64::new(29);
    for kind in KINDS {
        let model = TowerModel::random(kind, &mut random);
        let operators = SubOperators { sums: model.sums(), units: UNITS };
        let parts = model.parts(&piece(&model.layout, 4, &mut random), 3);
        for Part { results, cells, .. } in &parts {
            let tensors = results.clone().into_tensors(operators);
            let sizes = (SAMPLES, cells.len());
            let read =
                |tensors: Vec<Tensor>| TowerResults::from_tensors("lookup", &mut tensors.into_iter(), operators, sizes);
            assert_eq!(read(tensors.clone()).unwrap(), *results, "{kind:?}");
            assert!(read(tensors[1..].to_vec()).is_err(), "{kind:?}: the outputs are missing");
            let mut short = tensors;
            short[0] = Tensor::from(vec![0.0f32; SAMPLES * UNITS - 1]);
            let error = read(short).unwrap_err().to_string();
            assert!(error.contains("expected 200 outputs of 40 samples, found 199"), "{error}");
        }
        let cells: Vec<_> = parts.iter().map(|part| &part.cells[..]).collect();
        let results = parts.iter().map(|part| part.results.clone()).collect();
        let sums = TowerResults::sum(results, &cells, model.sums());
        let (pooled, whole) = sums.clone().into_pooled(operators);
        let widths = PooledWidths::of_sums(operators);
        assert_eq!(pooled.embeddings.len(), SAMPLES * widths.embeddings, "{kind:?}");
        assert_eq!(pooled.linear.len(), SAMPLES * widths.linear, "{kind:?}");
        assert_eq!((whole, &pooled.embeddings[..UNITS]), (sums.whole, &sums.outputs[..UNITS]), "{kind:?}");
        let beside = ServerResults { partial: sums.partial, vectors: Vec::new() };
        let expected = TowerResults { beside, outputs: sums.outputs };
        assert_eq!(TowerResults::from_pooled(pooled, operators), expected, "{kind:?}");
    }
}

/// A partial output that is missed or counted twice, a second bias, and a part of the gradient of
/// W that is missed.
#[test]
fn planted_bugs_change_the_first_layer() {
    let mut random = SplitMix64::new(13);
    let model = TowerModel::random(Kind::Dnn, &mut random);
    let piece = piece(&model.layout, 4, &mut random);
    let parts = model.parts(&piece, 3);
    let sum = |results: Vec<TowerResults>| TowerResults::sum(results, &[&[], &[], &[]], None).outputs;
    let results: Vec<TowerResults> = parts.iter().map(|part| part.results.clone()).collect();
    let right = sum(results.clone());
    let deviates = |outputs: &[f32]| outputs.iter().zip(&right).any(|(found, right)| (found - right).abs() > 1e-2);
    assert!(!deviates(&model.parts(&piece, 1)[0].results.outputs));
    assert!(deviates(&sum(results[..2].to_vec())), "a server is missed");
    let twice = results.iter().chain(&results[1..2]).cloned().collect();
    assert!(deviates(&sum(twice)), "a server is counted twice");
    let with_bias = FirstLayer::new(Kernel::fp32(), model.shape(), &model.weights, Some(&model.bias)).unwrap();
    let tower = ServerTower { sums: None, layer: &with_bias };
    let mut biased = results;
    biased[1] = parts[1].ids.reduce_tower(&parts[1].rows, &model.layout, tower);
    assert!(deviates(&sum(biased)), "two servers have the bias");

    let gradients = TowerResults { beside: ServerResults::default(), outputs: model.of_outputs.clone() };
    let mut of_server = WeightGradient::new(model.shape());
    let tower = ServerTower { sums: None, layer: &parts[0].layer };
    let _rows = parts[0].ids.tower_gradients(&parts[0].rows, &gradients, &model.layout, tower, &mut of_server);
    let mut whole = WeightGradient::new(model.shape());
    let pooled = piece.pool(&rows_of(piece.keys(), &model.layout), &model.layout);
    whole.add_piece(Kernel::fp32(), SAMPLES, &pooled.embeddings, &model.of_outputs);
    let mut parts_of_gradient = of_server.values().iter().zip(whole.values());
    assert!(parts_of_gradient.any(|(found, whole)| (found - whole).abs() > 1e-2), "one server has a part only");
}

fn left(kernel: Kernel, matrix: Matrix<'_>) -> Left {
    let mut left = Left::new();
    left.pack(kernel, matrix);
    left
}

fn right(kernel: Kernel, matrix: Matrix<'_>) -> Right {
    let mut right = Right::new();
    right.pack(kernel, matrix);
    right
}

/// A linear layer over embeddings and dense features side by side, as a tower of `sync` computes
/// it.
struct Undivided {
    inputs: Vec<f32>,
    weights: Vec<f32>,
    width: usize,
}

impl Undivided {
    fn inputs(&self) -> Matrix<'_> {
        Matrix::new(&self.inputs, SAMPLES, self.width)
    }

    fn weights(&self) -> Matrix<'_> {
        Matrix::new(&self.weights, self.width, UNITS)
    }
}

/// With every kernel for 32-bit floats. The dense worker adds the product of the dense features to
/// the sums.
#[test]
fn one_server_computes_the_bits_of_an_undivided_layer() {
    let mut random = SplitMix64::new(17);
    let model = TowerModel::random(Kind::Dnn, &mut random);
    let (layout, width) = (&model.layout, model.shape().width);
    let piece = piece(layout, 3, &mut random);
    let rows = rows_of(piece.keys(), layout);
    let pooled = piece.pool(&rows, layout).embeddings;
    let dense = values(SAMPLES * DENSE_FEATURES, &mut random);
    let lower = values(DENSE_FEATURES * UNITS, &mut random);
    let gradient = values(SAMPLES * UNITS, &mut random);
    let side_by_side = pooled.chunks_exact(width).zip(dense.chunks_exact(DENSE_FEATURES));
    let undivided = Undivided {
        inputs: side_by_side.flat_map(|(embeddings, dense)| [embeddings, dense].concat()).collect(),
        weights: [&model.weights[..], &lower[..]].concat(),
        width: width + DENSE_FEATURES,
    };
    for kernel in Kernel::all().filter(|kernel| !kernel.is_bf16()) {
        let packed = right(kernel, undivided.weights());
        let expected = product(&left(kernel, undivided.inputs()), &packed, Start::Row(&model.bias), Finish::Relu);
        let layer = FirstLayer::new(kernel, model.shape(), &model.weights, Some(&model.bias)).unwrap();
        let mut outputs = layer.reduce(SAMPLES, &pooled);
        let dense = left(kernel, Matrix::new(&dense, SAMPLES, DENSE_FEATURES));
        let lower = right(kernel, Matrix::new(&lower, DENSE_FEATURES, UNITS));
        multiply(&dense, &lower, &mut outputs, Start::Sum, Finish::Relu);
        assert_eq!(outputs, expected, "{}", kernel.name());

        let of_outputs = Matrix::new(&gradient, SAMPLES, UNITS);
        let packed = right(kernel, undivided.weights().transpose());
        let of_inputs = product(&left(kernel, of_outputs), &packed, Start::Zero, Finish::Plain);
        let of_embeddings = of_inputs.chunks_exact(undivided.width).flat_map(|row| row[..width].iter().copied());
        assert_eq!(layer.spread(SAMPLES, &gradient), of_embeddings.collect::<Vec<_>>(), "{}", kernel.name());

        let inputs = left(kernel, undivided.inputs().transpose());
        let of_weights = product(&inputs, &right(kernel, of_outputs), Start::Zero, Finish::Plain);
        // The pieces of a step, one after the other.
        let mut found = WeightGradient::new(model.shape());
        found.add_piece(kernel, 32, &pooled[..32 * width], &gradient[..32 * UNITS]);
        found.add_piece(kernel, SAMPLES - 32, &pooled[32 * width..], &gradient[32 * UNITS..]);
        assert_eq!(found.values(), &of_weights[..width * UNITS], "{}", kernel.name());
    }
}

#[test]
fn a_layer_of_another_shape_is_refused() {
    let shape = LayerShape { width: 3, units: 2 };
    let refusal = |weights: usize, biases: Option<usize>| {
        let (weights, bias) = (vec![0.0; weights], biases.map(|biases| vec![0.0; biases]));
        FirstLayer::new(Kernel::fp32(), shape, &weights, bias.as_deref()).unwrap_err().to_string()
    };
    assert!(refusal(5, None).contains("expected 6 weights, found 5"));
    assert!(refusal(6, Some(3)).contains("expected 2 biases, found 3"));
    let other = WeightGradient::new(LayerShape { width: 1, units: 2 });
    let error = WeightGradient::new(shape).add(&other).unwrap_err().to_string();
    assert!(error.contains("expected 6 gradients of weights, found 2"), "{error}");
}

/// Figure 6: x' = x₀·⊕(x·w) + b + x, over several layers and down to a logit. Each x is α·x₀ + β,
/// where α depends on the sample, and β is the sum of the biases before. So the products of x₀ with
/// all vectors w are enough, and they are one product VW.
#[test]
fn figure_6_the_cross_layers_of_dcn_are_columns_of_the_first_layer() {
    const LAYERS: usize = 3;
    let (layout, mut random) = (layout_of(Kind::Dnn), SplitMix64::new(23));
    let piece = piece(&layout, 4, &mut random);
    let shape = LayerShape { width: layout.embedding_width, units: LAYERS + 1 };
    let weights = values(shape.values(), &mut random);
    let vector = |column: usize| -> Vec<f64> {
        weights.iter().skip(column).step_by(shape.units).map(|weight| f64::from(*weight)).collect()
    };
    let vectors: Vec<Vec<f64>> = (0..shape.units).map(vector).collect();
    let biases: Vec<Vec<f64>> = (0..LAYERS).map(|_| wide(&values(shape.width, &mut random))).collect();
    let (crosses, last) = (&vectors[..LAYERS], &vectors[LAYERS]);

    let naive = |first: &[f64]| {
        let mut x = first.to_vec();
        for (cross, bias) in crosses.iter().zip(&biases) {
            let product = dot(&x, cross);
            x = x.iter().zip(first).zip(bias).map(|((x, first), bias)| first * product + bias + x).collect();
        }
        dot(&x, last)
    };
    let pooled = piece.pool(&rows_of(piece.keys(), &layout), &layout).embeddings;
    let expected: Vec<f64> = pooled.chunks_exact(shape.width).map(|first| naive(&wide(first))).collect();

    let from_products = |products: &[f32]| {
        let (mut alpha, mut beta) = (1.0_f64, vec![0.0_f64; shape.width]);
        for ((cross, bias), product) in crosses.iter().zip(&biases).zip(products) {
            alpha += alpha * f64::from(*product) + dot(&beta, cross);
            beta.iter_mut().zip(bias).for_each(|(sum, bias)| *sum += bias);
        }
        alpha * f64::from(products[LAYERS]) + dot(&beta, last)
    };
    let layer = FirstLayer::new(Kernel::fp32(), shape, &weights, None).unwrap();
    for servers in [1, 2, 3, 7] {
        let part = |part: ServerIds| {
            let ids = part.prepare(SAMPLES as u32, &layout);
            ids.reduce_tower(&rows_of(ids.keys(), &layout), &layout, ServerTower { sums: None, layer: &layer })
        };
        let parts = ServerIds::divide(&piece, &SlotMap::even(64, servers), &layout, None);
        let products = TowerResults::sum(parts.into_iter().map(part).collect(), &[], None).outputs;
        for (products, expected) in products.chunks_exact(shape.units).zip(&expected) {
            let found = from_products(products);
            assert!((found - expected).abs() <= 1e-4 * (1.0 + expected.abs()), "{found}, not {expected}");
        }
    }
}

/// Table 2: R = 1 − 2·S_M / (S_f + S_V + S_W). The paper does not print the units of the layer and
/// the columns of V. All five ratios follow from 256 units and 600 fields of 8 columns.
#[test]
fn table_2_the_bytes_saved_for_dnn() {
    let weights = 4 * LayerShape { width: 600 * 8, units: 256 }.values();
    let one_column = LayerShape { width: 1, units: 256 };
    let layer = FirstLayer::new(Kernel::fp32(), one_column, &[0.0; 256], None).unwrap();
    for (batch, unique, expected) in [
        (512, 147_664, 90.310),
        (1024, 257_757, 86.226),
        (2048, 448_814, 81.658),
        (4096, 789_511, 77.015),
        (8192, 1_389_353, 72.264),
    ] {
        let results = 4 * layer.reduce(batch, &vec![0.0; batch]).len();
        let saved = 100.0 * (1.0 - 2.0 * results as f64 / (unique * (8 + 4 * 8) + weights) as f64);
        assert!((saved - expected).abs() < 6e-4, "{batch}: {saved}");
    }
}

/// The shares that the page on `des` prints: of the bytes of all links, for rows of 950 ids, with
/// the sizes of table 2.
#[test]
fn dnn_saves_most_with_few_servers_and_large_batches() {
    const IDS_OF_A_ROW: f64 = 950.0;
    let (width, units, dim) = (4800.0, 256.0, 8.0);
    let saved = |batch: f64, unique: f64, servers: f64| {
        let to_dense_worker = |columns: f64| 2.0 * 4.0 * columns * batch;
        let rows = 8.0 * unique + 4.0 * dim * unique + (8.0 + 4.0 * dim) * unique;
        let ids = 12.0 * unique + 2.0 * IDS_OF_A_ROW * batch;
        let weights = 2.0 * 4.0 * width * units * servers;
        let des = ids + weights + servers * to_dense_worker(units) + to_dense_worker(units);
        (100.0 * (1.0 - des / (rows + to_dense_worker(width)))).round()
    };
    let of_servers = |batch, unique| [1.0, 2.0, 4.0].map(|servers| saved(batch, unique, servers));
    assert_eq!(of_servers(512.0, 147_664.0), [53.0, 19.0, -50.0]);
    assert_eq!(of_servers(8192.0, 1_389_353.0), [82.0, 76.0, 63.0]);
}

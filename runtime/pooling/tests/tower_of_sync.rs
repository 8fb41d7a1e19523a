//! A `dnn` whose first layer parameter servers compute in part, against the tower of `sync`: the
//! same losses, parameters and rows over several steps. With one server they are equal to the bit.

#![allow(clippy::unwrap_used, reason = "an unwrap in a test is an assertion")]

use std::collections::BTreeMap;
use std::sync::Arc;

use rectrain_dense::burn::tensor::{Tensor, activation::relu};
use rectrain_dense::layers::{Context, Linear};
use rectrain_dense::onnx::{Graph, Value};
use rectrain_dense::tasks::BinaryCrossEntropy;
use rectrain_dense::{
    ComputeDevice, DenseOptimizer, Features, FlatOptimizer, InputWidths, Inputs, Model, ModelConfig, ModelSettings,
    ParameterLayout, Precision, Tasks, Tower, TowerOptions,
};
use rectrain_gemm::{Kernel, add_rows};
use rectrain_kinds::Pooling;
use rectrain_modes::migration::SlotMap;
use rectrain_pooling::{
    FirstLayer, LayerShape, PreparedIds, PreparedServerIds, ServerIds, ServerResults, ServerTower, TowerResults,
    WeightGradient,
};
use rectrain_protocol::layout::{FeatureLayout, FeaturePlace, Pooled};
use rectrain_random::SplitMix64;
use rectrain_wire::ids::{Scratch, UniqueIds};

/// One shard of a tower.
const SAMPLES: usize = 250;
const STEPS: u64 = 5;
/// Columns of each feature's embedding. The features 0 and 2 share a table.
const DIMS: [usize; 3] = [4, 2, 4];
const HIDDEN: [usize; 2] = [6, 5];
const SHAPE: LayerShape = LayerShape { width: 10, units: HIDDEN[0] };
const OPTIMIZER: DenseOptimizer =
    DenseOptimizer::AdaGrad { learning_rate: 0.1, initial_accumulator: 0.1, epsilon: 1e-8 };

/// The tower above its first layer. Its input is the output of that layer, before ReLU.
#[derive(Debug)]
struct Above {
    layout: ParameterLayout,
    hidden: Linear,
    logit: Linear,
}

impl Above {
    /// Layers named as in `dnn`, so that they start with the same parameters.
    fn new() -> Self {
        let mut layout = ParameterLayout::default();
        let hidden = Linear::new(&mut layout, "deep.1", HIDDEN[0], HIDDEN[1]);
        let logit = Linear::new(&mut layout, "deep.logit", HIDDEN[1], 1);
        Self { layout, hidden, logit }
    }
}

impl Model for Above {
    fn name(&self) -> &'static str {
        "above"
    }

    fn layout(&self) -> &ParameterLayout {
        &self.layout
    }

    fn input_widths(&self) -> InputWidths {
        InputWidths { embeddings: HIDDEN[0], ..InputWidths::default() }
    }

    fn forward(&self, context: &Context<'_>, inputs: Inputs<Tensor<2>>) -> Tensor<2> {
        let outputs = relu(inputs.embeddings.unwrap());
        self.logit.forward(context, self.hidden.forward_relu(context, outputs))
    }

    fn onnx(&self, graph: &mut Graph<'_>, inputs: Inputs<Value>) -> Value {
        let outputs = graph.op("Relu", &[&inputs.embeddings.unwrap()]);
        let hidden = self.hidden.onnx_relu(graph, &outputs);
        self.logit.onnx(graph, &hidden)
    }
}

fn tower(model: Arc<dyn Model>) -> Tower {
    let options = TowerOptions { seed: 7, rank: 0, threads: 1, device: ComputeDevice::Cpu, precision: Precision::Fp32 };
    Tower::new(model, Tasks::single(BinaryCrossEntropy), OPTIMIZER, options).unwrap()
}

fn layout() -> FeatureLayout {
    let place = |feature: usize| FeaturePlace {
        group: feature % 2,
        dim: DIMS[feature],
        offset: DIMS[..feature].iter().sum(),
        pooling: [Pooling::Sum, Pooling::Mean, Pooling::SqrtN][feature],
    };
    FeatureLayout {
        features: (0..DIMS.len()).map(place).collect(),
        group_dims: DIMS[..2].to_vec(),
        linear: false,
        embedding_width: SHAPE.width,
    }
}

/// A batch of one piece. A cell has up to three values of 200.
struct Batch {
    piece: PreparedIds,
    labels: Vec<f32>,
}

impl Batch {
    fn random(layout: &FeatureLayout, random: &mut SplitMix64) -> Self {
        let mut unique = Vec::new();
        for _feature in &layout.features {
            let (mut keys, mut offsets) = (Vec::new(), vec![0]);
            for _sample in 0..SAMPLES {
                keys.extend((0..random.below(4)).map(|_| random.below(200) * (u64::MAX / 200)));
                offsets.push(keys.len() as u32);
            }
            unique.push(UniqueIds::from_column(&keys, Some(&offsets), SAMPLES, &mut Scratch::default()).unwrap());
        }
        let labels = (0..SAMPLES).map(|_| random.below(2) as f32).collect();
        Self { piece: PreparedIds::new(SAMPLES, unique, layout), labels }
    }
}

/// The rows of all tables by group and key. A new row's values depend on its key.
#[derive(Debug, Default)]
struct Rows(BTreeMap<(usize, u64), Vec<f32>>);

impl Rows {
    fn look_up(&mut self, keys: &[Vec<u64>], layout: &FeatureLayout) -> Vec<Vec<f32>> {
        let mut of_groups = Vec::new();
        for (group, (keys, dim)) in keys.iter().zip(&layout.group_dims).enumerate() {
            let mut rows = Vec::new();
            for key in keys {
                let initial = || {
                    let mut random = SplitMix64::new(key ^ group as u64);
                    (0..*dim).map(|_| random.unit() as f32 - 0.5).collect()
                };
                rows.extend_from_slice(self.0.entry((group, *key)).or_insert_with(initial));
            }
            of_groups.push(rows);
        }
        of_groups
    }

    /// A step of gradient descent.
    fn descend(&mut self, keys: &[Vec<u64>], gradients: &[Vec<f32>], layout: &FeatureLayout) {
        for (group, (keys, gradients)) in keys.iter().zip(gradients).enumerate() {
            for (key, gradient) in keys.iter().zip(gradients.chunks_exact(layout.group_dims[group])) {
                let row = self.0.get_mut(&(group, *key)).unwrap();
                row.iter_mut().zip(gradient).for_each(|(value, gradient)| *value -= 4.0 * gradient);
            }
        }
    }

    fn values(&self) -> Vec<f32> {
        self.0.values().flatten().copied().collect()
    }
}

/// Training as in `sync`: the dense worker gets pooled rows.
struct SyncTraining {
    tower: Tower,
    rows: Rows,
}

impl SyncTraining {
    fn new() -> Self {
        let settings = ModelSettings::Dnn { hidden: HIDDEN.to_vec() };
        let model = ModelConfig::new(settings, 0, DIMS.to_vec()).build().unwrap();
        Self { tower: tower(model), rows: Rows::default() }
    }

    /// The loss of a step.
    fn step(&mut self, batch: &Batch, layout: &FeatureLayout, step: u64) -> f64 {
        let keys = batch.piece.keys();
        let pooled = batch.piece.pool(&self.rows.look_up(keys, layout), layout);
        let features = Features { samples: SAMPLES, dense: &[], embeddings: &pooled.embeddings, linear: &[] };
        let output = self.tower.forward_backward(features, &batch.labels, 1.0 / SAMPLES as f32, step).unwrap();
        self.tower.apply(step).unwrap();
        let loss = output.loss_sum();
        let of_pooled = Pooled { embeddings: output.embedding_gradients, linear: Vec::new() };
        self.rows.descend(keys, &batch.piece.scatter(&of_pooled, layout), layout);
        loss
    }
}

/// Training with partial results. The dense worker gets the summed output of the first layer.
struct DesTraining {
    servers: u16,
    above: Tower,
    /// Weight and bias of the first layer, with the state of their optimizer.
    first: Vec<f32>,
    state: Vec<f32>,
    rows: Rows,
}

impl DesTraining {
    fn new(servers: u16, first: Vec<f32>) -> Self {
        let state = OPTIMIZER.initial_state(first.len());
        Self { servers, above: tower(Arc::new(Above::new())), first, state, rows: Rows::default() }
    }

    /// The servers' parts of the piece.
    fn divide(&self, batch: &Batch, layout: &FeatureLayout) -> Vec<PreparedServerIds> {
        let parts = ServerIds::divide(&batch.piece, &SlotMap::even(1024, self.servers), layout, None);
        parts.into_iter().map(|part| part.prepare(SAMPLES as u32, layout)).collect()
    }

    /// Each server's copy of the first layer.
    fn layers(&self) -> Vec<FirstLayer> {
        let (weights, bias) = self.first.split_at(SHAPE.values());
        let layer = |server: u16| FirstLayer::new(Kernel::fp32(), SHAPE, weights, (server == 0).then_some(bias));
        (0..self.servers).map(|server| layer(server).unwrap()).collect()
    }

    /// The loss of a step.
    fn step(&mut self, batch: &Batch, layout: &FeatureLayout, step: u64) -> f64 {
        let (parts, layers) = (self.divide(batch, layout), self.layers());
        let rows: Vec<_> = parts.iter().map(|ids| self.rows.look_up(ids.keys(), layout)).collect();
        let mut results = Vec::new();
        for ((ids, rows), layer) in parts.iter().zip(&rows).zip(&layers) {
            results.push(ids.reduce_tower(rows, layout, ServerTower { sums: None, layer }));
        }
        let outputs = TowerResults::sum(results, &[], None).outputs;
        let features = Features { samples: SAMPLES, dense: &[], embeddings: &outputs, linear: &[] };
        let output = self.above.forward_backward(features, &batch.labels, 1.0 / SAMPLES as f32, step).unwrap();
        self.above.apply(step).unwrap();
        let loss = output.loss_sum();
        let gradients = TowerResults { beside: ServerResults::default(), outputs: output.embedding_gradients };
        let mut of_weights = WeightGradient::new(SHAPE);
        for ((ids, rows), layer) in parts.iter().zip(&rows).zip(&layers) {
            let mut of_server = WeightGradient::new(SHAPE);
            let tower = ServerTower { sums: None, layer };
            let of_rows = ids.tower_gradients(rows, &gradients, layout, tower, &mut of_server);
            of_weights.add(&of_server).unwrap();
            self.rows.descend(ids.keys(), &of_rows, layout);
        }
        let mut of_bias = vec![0.0; SHAPE.units];
        add_rows(&gradients.outputs, &mut of_bias);
        let of_first = [of_weights.values(), &of_bias[..]].concat();
        OPTIMIZER.update(&mut self.first, &mut self.state, &of_first, step).unwrap();
        loss
    }

    /// The parameters in the order of the whole tower.
    fn parameters(&mut self) -> Vec<f32> {
        [&self.first[..], self.above.parameters().unwrap()].concat()
    }
}

/// Trains both ways from the same start, and passes the losses, parameters and rows of both to
/// `compare` after each step.
fn train(servers: u16, mut compare: impl FnMut(&[f32], &[f32])) {
    let (layout, mut random) = (layout(), SplitMix64::new(19));
    let mut sync = SyncTraining::new();
    let start = sync.tower.parameters().unwrap()[..SHAPE.values() + SHAPE.units].to_vec();
    let mut des = DesTraining::new(servers, start.clone());
    assert_eq!(des.parameters(), sync.tower.parameters().unwrap(), "the same start");
    for step in 1..=STEPS {
        let batch = Batch::random(&layout, &mut random);
        let (expected, found) = (sync.step(&batch, &layout, step), des.step(&batch, &layout, step));
        compare(&[found as f32], &[expected as f32]);
        compare(&des.parameters(), sync.tower.parameters().unwrap());
        compare(&des.rows.values(), &sync.rows.values());
    }
    assert_ne!(des.first, start, "the first layer has moved");
}

#[test]
fn one_server_trains_the_tower_of_sync_to_the_bit() {
    train(1, |found, expected| assert_eq!(found, expected));
}

#[test]
fn several_servers_train_the_tower_of_sync_within_rounding() {
    for servers in [2, 3, 7] {
        train(servers, |found, expected| {
            assert_eq!(found.len(), expected.len());
            for (found, expected) in found.iter().zip(expected) {
                let error = (found - expected).abs();
                assert!(error <= 1e-5 * (1.0 + expected.abs()), "{servers}: {found}, not {expected}");
            }
        });
    }
}

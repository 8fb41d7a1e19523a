//! A model and a loss of another crate. A tower trains them, exports them to ONNX, saves and
//! restores them.

#![allow(clippy::unwrap_used, reason = "an unwrap in a test is an assertion")]

use std::sync::Arc;

use prost::Message;
use rectrain_dense::burn::tensor::Tensor;
use rectrain_dense::layers::{Context, Mlp};
use rectrain_dense::metrics::Metric;
use rectrain_dense::onnx::{EMBEDDINGS, Graph, PROBABILITY, Value, proto};
use rectrain_dense::tasks::{BinaryCrossEntropy, Loss, SampleLoss, Tasks};
use rectrain_dense::{
    ComputeDevice, DenseOptimizer, Features, Initializer, InputWidths, Inputs, Model, ParameterId, ParameterLayout,
    Precision, Tower, TowerOptions, export_onnx,
};

#[path = "../src/onnx/evaluate.rs"]
mod evaluate;

const DIM: usize = 4;
const SAMPLES: usize = 400;

/// Two towers: an MLP over the user's embedding and one over the item's. The logit is the dot
/// product of their outputs, plus a bias.
#[derive(Debug)]
struct TwoTowers {
    layout: ParameterLayout,
    user: Mlp,
    item: Mlp,
    bias: ParameterId,
}

impl TwoTowers {
    fn new(hidden: &[usize]) -> Self {
        let mut layout = ParameterLayout::default();
        let user = Mlp::new(&mut layout, "user", DIM, hidden, 0.0);
        let item = Mlp::new(&mut layout, "item", DIM, hidden, 0.0);
        let bias = layout.push("bias", [1, 1], Initializer::Zeros);
        Self { layout, user, item, bias }
    }
}

impl Model for TwoTowers {
    fn name(&self) -> &str {
        "twoTowers"
    }

    fn layout(&self) -> &ParameterLayout {
        &self.layout
    }

    fn input_widths(&self) -> InputWidths {
        InputWidths { embeddings: 2 * DIM, ..InputWidths::default() }
    }

    fn forward(&self, context: &Context<'_>, inputs: Inputs<Tensor<2>>) -> Tensor<2> {
        let embeddings = inputs.embeddings.unwrap();
        let user = self.user.forward(context, embeddings.clone().narrow(1, 0, DIM));
        let item = self.item.forward(context, embeddings.narrow(1, DIM, DIM));
        (user * item).sum_dim(1) + context.parameter(self.bias)
    }

    fn onnx(&self, graph: &mut Graph<'_>, inputs: Inputs<Value>) -> Value {
        let embeddings = inputs.embeddings.unwrap();
        let user = graph.columns(&embeddings, 0..DIM);
        let item = graph.columns(&embeddings, DIM..2 * DIM);
        let (user, item) = (self.user.onnx(graph, user), self.item.onnx(graph, item));
        let products = graph.op("Mul", &[&user, &item]);
        let dot = graph.sum_columns(&products);
        let bias = graph.parameter(self.bias);
        graph.op("Add", &[&dot, &bias])
    }
}

/// The negative log-likelihood of a Poisson distribution with the mean eˣ, for counts.
#[derive(Debug)]
struct Poisson;

impl Loss for Poisson {
    fn name(&self) -> &'static str {
        "Poisson loss"
    }

    fn takes(&self, label: f32) -> bool {
        label.is_finite() && label >= 0.0
    }

    fn labels(&self) -> &'static str {
        "labels from 0"
    }

    fn predict(&self, logit: f64) -> f64 {
        logit.exp()
    }

    fn evaluate(&self, logit: f64, label: f64) -> SampleLoss {
        let mean = logit.exp();
        SampleLoss { loss: mean - label * logit, prediction: mean, derivative: mean - label }
    }

    fn derivative(&self, logits: Tensor<2>, labels: Tensor<2>) -> Tensor<2> {
        logits.exp() - labels
    }

    fn onnx_operator(&self) -> &'static str {
        "Exp"
    }

    fn metrics(&self) -> &'static [Metric] {
        &[Metric::Calibration]
    }
}

fn tower(tasks: Tasks, precision: Precision) -> Tower {
    let options = TowerOptions { seed: 5, rank: 0, threads: 2, device: ComputeDevice::Cpu, precision };
    Tower::new(Arc::new(TwoTowers::new(&[16, 8])), tasks, DenseOptimizer::adam(0.01), options).unwrap()
}

/// Embeddings from −1 to 1, and for each sample the dot product of its user and its item.
fn sampled() -> (Vec<f32>, Vec<f32>) {
    let mut state = 7_u64;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 40) as f32 / (1 << 23) as f32 - 1.0
    };
    let embeddings: Vec<f32> = (0..SAMPLES * 2 * DIM).map(|_| next()).collect();
    let dot = |row: &[f32]| (0..DIM).map(|d| row[d] * row[DIM + d]).sum();
    let dots = embeddings.chunks_exact(2 * DIM).map(dot).collect();
    (embeddings, dots)
}

fn features(embeddings: &[f32]) -> Features<'_> {
    Features { samples: SAMPLES, dense: &[], embeddings, linear: &[] }
}

/// Trains for these updates. Returns the mean loss of each.
fn train(tower: &mut Tower, embeddings: &[f32], labels: &[f32], updates: std::ops::RangeInclusive<u64>) -> Vec<f64> {
    let mut losses = Vec::new();
    for update in updates {
        let scale = 1.0 / SAMPLES as f32;
        let output = tower.forward_backward(features(embeddings), labels, scale, update).unwrap();
        losses.push(output.loss_sum() / SAMPLES as f64);
        tower.apply(update).unwrap();
    }
    losses
}

#[test]
fn a_model_of_another_crate_learns_in_either_precision() {
    let (embeddings, dots) = sampled();
    let labels: Vec<f32> = dots.iter().map(|&dot| f32::from(dot > 0.0)).collect();
    for precision in [Precision::Fp32, Precision::Bf16] {
        let mut tower = tower(Tasks::single(BinaryCrossEntropy), precision);
        let losses = train(&mut tower, &embeddings, &labels, 1..=400);
        assert!(losses[0] > 0.6 && losses[399] < 0.2, "{} to {}", losses[0], losses[399]);
    }
}

#[test]
fn its_onnx_graph_predicts_as_the_tower_does() {
    let (embeddings, dots) = sampled();
    let labels: Vec<f32> = dots.iter().map(|&dot| f32::from(dot > 0.0)).collect();
    let mut tower = tower(Tasks::single(BinaryCrossEntropy), Precision::Fp32);
    train(&mut tower, &embeddings, &labels, 1..=50);
    let parameters = tower.parameters().unwrap().to_vec();
    let file = export_onnx(tower.model(), tower.tasks(), &parameters).unwrap();
    let file = proto::Model::decode(&file[..]).unwrap();
    let graph = file.graph.unwrap();
    assert_eq!(graph.name, "twoTowers");
    let outputs = evaluate::evaluate(&graph, SAMPLES, &[(EMBEDDINGS, &embeddings)]);
    let predictions = tower.predict(features(&embeddings)).unwrap();
    for (found, expected) in predictions.iter().zip(&outputs[PROBABILITY]) {
        assert!((f64::from(*found) - expected).abs() < 1e-5, "{found} but {expected}");
    }
}

#[test]
fn its_training_continues_from_a_checkpoint_to_the_bit() {
    let (embeddings, dots) = sampled();
    let labels: Vec<f32> = dots.iter().map(|&dot| f32::from(dot > 0.0)).collect();
    let new = || tower(Tasks::single(BinaryCrossEntropy), Precision::Fp32);
    let mut uninterrupted = new();
    train(&mut uninterrupted, &embeddings, &labels, 1..=5);
    let (parameters, state) = uninterrupted.state().map(|(p, s)| (p.to_vec(), s.to_vec())).unwrap();
    let mut restored = new();
    restored.restore(&parameters, "adam", &state).unwrap();
    for tower in [&mut uninterrupted, &mut restored] {
        train(tower, &embeddings, &labels, 6..=10);
    }
    assert_eq!(uninterrupted.state().unwrap(), restored.state().unwrap());
    let mut other = Tower::new(
        Arc::new(TwoTowers::new(&[4])),
        Tasks::single(BinaryCrossEntropy),
        DenseOptimizer::adam(0.01),
        TowerOptions { seed: 5, rank: 0, threads: 1, device: ComputeDevice::Cpu, precision: Precision::Fp32 },
    );
    let error = other.as_mut().unwrap().restore(&parameters, "adam", &state).unwrap_err().to_string();
    assert!(error.contains("cannot restore the parameters"), "{error}");
}

#[test]
fn a_loss_of_another_crate_learns_counts() {
    let (embeddings, dots) = sampled();
    let labels: Vec<f32> = dots.iter().map(|dot| dot.exp().round()).collect();
    let mut tower = tower(Tasks::single(Poisson), Precision::Fp32);
    let losses = train(&mut tower, &embeddings, &labels, 1..=300);
    assert!(losses[299] < losses[0] - 0.1, "{} to {}", losses[0], losses[299]);
    let predictions = tower.predict(features(&embeddings)).unwrap();
    let metrics = tower.tasks().metrics(&predictions, &labels, &[]);
    let calibration = metrics[0].value(Metric::Calibration).unwrap();
    assert!((calibration - 1.0).abs() < 0.05, "{calibration}");
    let error = tower.forward_backward(features(&embeddings), &[-1.0; SAMPLES], 1.0, 1).unwrap_err().to_string();
    assert!(error.contains("Poisson loss takes labels from 0"), "{error}");
}

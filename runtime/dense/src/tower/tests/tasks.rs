//! Towers with several tasks: a column of labels, logits and predictions each.

use std::sync::Arc;

use prost::Message;

use super::*;
use crate::export::export_onnx;
use crate::models::reference::Reference;
use crate::onnx::{DENSE, EMBEDDINGS, evaluate, proto};
use crate::tasks::{SquaredError, TaskLoss};

const WEIGHT: f64 = 0.25;

/// Whether a video was clicked, and for how long it was watched.
fn two_tasks() -> Tasks {
    let click = TaskLoss { name: "click".to_owned(), loss: Arc::new(BinaryCrossEntropy), weight: 1.0 };
    let watched = TaskLoss { name: "watched".to_owned(), loss: Arc::new(SquaredError), weight: WEIGHT };
    Tasks::new(vec![click, watched]).unwrap()
}

fn shared_bottom() -> ModelConfig {
    ModelConfig { tasks: 2, ..dnn() }
}

fn host(threads: usize) -> Tower {
    let options =
        TowerOptions { seed: SEED, rank: RANK, threads, device: ComputeDevice::Cpu, precision: Precision::Fp32 };
    Tower::new(shared_bottom().build().unwrap(), two_tasks(), DenseOptimizer::adam(1e-2), options).unwrap()
}

fn device() -> Tower {
    Tower { tasks: two_tasks(), ..on_device(shared_bottom()) }
}

/// Labels of both tasks, row by row.
fn labels(sampled: &Sampled) -> Vec<f32> {
    sampled.labels.iter().enumerate().flat_map(|(sample, &click)| [click, sample as f32 / 4.0 - 0.5]).collect()
}

/// Σ over samples of each task's loss, from the definitions.
fn loss_sums(reference: &Reference<'_>, parameters: &[f64], batch: &Batch, labels: &[f32]) -> [f64; 2] {
    let mut sums = [0.0; 2];
    for (sample, labels) in labels.chunks_exact(2).enumerate() {
        let logits = reference.logits(parameters, batch, sample);
        let p = 1.0 / (1.0 + (-logits[0]).exp());
        let [click, watched] = [f64::from(labels[0]), f64::from(labels[1])];
        sums[0] -= click * p.ln() + (1.0 - click) * (1.0 - p).ln();
        sums[1] += (logits[1] - watched).powi(2) / 2.0;
    }
    sums
}

#[test]
fn the_gradients_of_two_tasks_match_the_definition() {
    for (slack, tower) in [(1.0, host(1)), (slack(), device())] {
        let mut tower = moved(tower);
        let sampled = Sampled::new(tower.model(), 6);
        let (batch, labels) = (sampled.batch(), labels(&sampled));
        let scale = 1.0 / 3.0;
        let output = tower.forward_backward(sampled.features(), &labels, scale, STEP).unwrap();
        let (config, layout) = (shared_bottom(), tower.layout().clone());
        let reference = Reference { config: &config, layout: &layout, dropout: None };
        let parameters = wide(tower.parameters().unwrap());
        let expected = loss_sums(&reference, &parameters, &batch, &labels);
        for (found, expected) in output.loss_sums.iter().zip(expected) {
            assert!((found - expected).abs() < slack * 1e-6 * expected, "{found} but {expected}");
        }
        let total = |parameters: &[f64]| {
            let [click, watched] = loss_sums(&reference, parameters, &batch, &labels);
            f64::from(scale) * (click + WEIGHT * watched)
        };
        assert_within(slack, "parameters", tower.gradients().unwrap(), &differences(&parameters, total));
    }
}

#[test]
fn the_exported_graph_has_an_output_a_task() {
    let mut tower = moved(host(1));
    let sampled = Sampled::new(tower.model(), 6);
    let parameters = tower.parameters().unwrap().to_vec();
    let file = export_onnx(tower.model(), tower.tasks(), &parameters).unwrap();
    let graph = proto::Model::decode(&file[..]).unwrap().graph.unwrap();
    let outputs = evaluate(&graph, 6, &[(DENSE, &sampled.dense), (EMBEDDINGS, &sampled.embeddings)]);
    let predictions = tower.predict(sampled.features()).unwrap();
    for (column, name) in ["prediction.click", "prediction.watched"].into_iter().enumerate() {
        let column: Vec<f32> = predictions.iter().skip(column).step_by(2).copied().collect();
        assert_close(name, &column, &outputs[name]);
    }
}

#[test]
fn shards_and_threads_keep_the_columns_of_labels_apart() {
    let samples = 600;
    let run = |threads| {
        let mut tower = host(threads);
        let sampled = Sampled::new(tower.model(), samples);
        let output = tower.forward_backward(sampled.features(), &labels(&sampled), 1.0, 1).unwrap();
        assert_eq!(output.predictions, tower.predict(sampled.features()).unwrap());
        assert_eq!(output.loss_sums.len(), 2);
        output
    };
    assert_eq!(run(1), run(3));
}

#[test]
fn a_model_without_a_logit_for_each_task_is_refused() {
    let options = TowerOptions { seed: 1, rank: 0, threads: 1, device: ComputeDevice::Cpu, precision: Precision::Fp32 };
    let error = Tower::new(dnn().build().unwrap(), two_tasks(), DenseOptimizer::adam(1e-3), options).unwrap_err();
    assert!(error.to_string().contains("the `dnn` model has 1 logits a sample, expected 2: one a task"), "{error}");
}

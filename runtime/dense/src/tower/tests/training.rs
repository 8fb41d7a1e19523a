//! Steps of training as a whole.

use super::*;
use crate::models::reference::all_models;

#[test]
fn an_empty_batch_has_zero_gradients_and_still_applies() {
    let towers = |config: ModelConfig| {
        [tower(config.clone()), bf16_tower(config.clone()), on_device(config.clone()), bf16_on_device(config)]
    };
    for mut tower in all_models().into_iter().flat_map(towers) {
        let sampled = Sampled::new(tower.model(), 4);
        tower.forward_backward(sampled.features(), &sampled.labels, 1.0, 1).unwrap();
        let empty = Sampled::new(tower.model(), 0);
        let output = tower.forward_backward(empty.features(), &[], 1.0, 2).unwrap();
        assert_eq!(output.loss_sum(), 0.0);
        assert!(output.predictions.is_empty() && output.embedding_gradients.is_empty());
        assert!(tower.gradients().unwrap().iter().all(|&gradient| gradient == 0.0));
        tower.apply(1).unwrap();
        assert!(tower.predict(empty.features()).unwrap().is_empty());
    }
}

#[test]
fn gradients_of_replicas_sum_to_the_global_batch() {
    let mut tower = tower(dnn());
    let sampled = Sampled::new(tower.model(), 10);
    tower.forward_backward(sampled.features(), &sampled.labels, 0.1, 1).unwrap();
    let whole = wide(tower.gradients().unwrap());
    let mut sum = vec![0.0_f32; whole.len()];
    for part in [0..4, 4..10] {
        let rows = |values: &[f32], width: usize| values[part.start * width..part.end * width].to_vec();
        let (dense, embeddings) = (rows(&sampled.dense, 2), rows(&sampled.embeddings, 9));
        let features = Features { samples: part.len(), dense: &dense, embeddings: &embeddings, linear: &[] };
        tower.forward_backward(features, &sampled.labels[part.clone()], 0.1, 1).unwrap();
        sum.iter_mut().zip(tower.gradients().unwrap()).for_each(|(sum, gradient)| *sum += gradient);
    }
    assert_close("sum over replicas", &sum, &whole);
}

#[test]
fn dropout_differs_by_step_and_rank() {
    let config = ModelConfig { dropout: 0.3, ..dnn() };
    let model = config.build().unwrap();
    let sampled = Sampled::new(&*model, 512);
    let predictions = |rank, step| {
        let options =
            TowerOptions { seed: SEED, rank, threads: 1, device: ComputeDevice::Cpu, precision: Precision::Fp32 };
        let mut tower = Tower::new(model.clone(), clicks(), DenseOptimizer::adam(1e-3), options).unwrap();
        tower.forward_backward(sampled.features(), &sampled.labels, 1.0, step).unwrap().predictions
    };
    assert_eq!(predictions(0, 1), predictions(0, 1));
    assert_ne!(predictions(0, 1), predictions(0, 2));
    assert_ne!(predictions(0, 1), predictions(1, 1));
}

#[test]
fn training_finds_the_function_behind_the_labels() {
    let config = dlrm(&[16], &[32]);
    for tower in [tower(config.clone()), bf16_on_device(config)] {
        check_training(tower);
    }
}

fn check_training(mut tower: Tower) {
    let mut sampled = Sampled::new(tower.model(), 512);
    for sample in 0..sampled.samples {
        let score: f32 =
            (0..4).map(|d| sampled.embeddings[sample * 12 + d] * sampled.embeddings[sample * 12 + 8 + d]).sum();
        sampled.labels[sample] = if score > 0.0 { 1.0 } else { 0.0 };
    }
    let mut losses = Vec::new();
    for step in 1..=150 {
        let output = tower.forward_backward(sampled.features(), &sampled.labels, 1.0 / 512.0, step).unwrap();
        losses.push(output.loss_sum() / 512.0);
        tower.apply(step).unwrap();
    }
    assert!(losses[0] > 0.6 && losses[149] < 0.15, "{} to {}", losses[0], losses[149]);
}

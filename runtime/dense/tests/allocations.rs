//! Counts the allocations of dense steps in the steady state.

#![allow(clippy::unwrap_used, reason = "an unwrap in a test is an assertion")]

mod counting;

use std::hint::black_box;

use rectrain_dense::tasks::{BinaryCrossEntropy, Tasks};
use rectrain_dense::{
    ComputeDevice, DenseOptimizer, Features, ModelConfig, ModelSettings, Precision, Tower, TowerOptions,
};

use counting::{Counting, counted};

/// Bytes of a large allocation. Activations are larger. The nodes of Burn's graph, the losses and
/// the logits of a shard are smaller.
const LARGE: usize = 32 << 10;

#[global_allocator]
static ALLOCATOR: Counting = Counting;

const FEATURES: usize = 26;
const DIM: usize = 16;
const DENSE: usize = 13;
/// Eight shards of 256 samples.
const SAMPLES: usize = 2048;

fn dlrm() -> ModelSettings {
    ModelSettings::Dlrm { bottom: vec![512, 256], top: vec![512, 256] }
}

fn dnn() -> ModelSettings {
    ModelSettings::Dnn { hidden: vec![512, 256, 128] }
}

/// A tower that computes on the thread that calls it.
fn tower(settings: ModelSettings, precision: Precision, dense: usize) -> Tower {
    let model = ModelConfig::new(settings, dense, vec![DIM; FEATURES]).build().unwrap();
    let options = TowerOptions { seed: 1, rank: 0, threads: 1, device: ComputeDevice::Cpu, precision };
    Tower::new(model, Tasks::single(BinaryCrossEntropy), DenseOptimizer::adam(1e-3), options).unwrap()
}

/// Values from −0.5 to 0.5.
fn values(count: usize) -> Vec<f32> {
    (0..count).map(|index| (index * 7919 % 1000) as f32 / 1000.0 - 0.5).collect()
}

#[test]
fn large_allocations_are_counted() {
    assert_eq!(counted(LARGE, || drop(black_box(vec![1_u8; LARGE]))), [1, LARGE]);
    assert_eq!(counted(LARGE, || drop(black_box(vec![0_u64; LARGE]))), [1, 8 * LARGE]);
    assert_eq!(counted(LARGE, || drop(black_box(vec![1_u8; LARGE - 1]))), [0, 0]);
}

/// The gradient of the embeddings belongs to the caller, which sends it away.
fn check_steps(settings: &ModelSettings, precision: Precision, dense: usize) {
    let mut tower = tower(settings.clone(), precision, dense);
    let (embeddings, dense) = (values(SAMPLES * FEATURES * DIM), values(SAMPLES * dense));
    let labels: Vec<f32> = values(SAMPLES).iter().map(|&value| f32::from(value > 0.0)).collect();
    let features = Features { samples: SAMPLES, dense: &dense, embeddings: &embeddings, linear: &[] };
    let mut step = |number: u64| {
        let output = tower.forward_backward(features, &labels, 1.0 / SAMPLES as f32, number).unwrap();
        assert_eq!(output.embedding_gradients.len(), embeddings.len());
        tower.apply(number).unwrap();
    };
    (1..=3).for_each(&mut step);
    for number in 4..=6 {
        let found = counted(LARGE, || step(number));
        assert_eq!(found, [1, size_of_val(&*embeddings)], "{settings:?}, {precision:?}, step {number}");
    }
}

#[test]
fn a_step_allocates_only_the_gradient_that_it_returns() {
    for precision in [Precision::Fp32, Precision::Bf16] {
        for settings in [dlrm(), dnn()] {
            check_steps(&settings, precision, DENSE);
            check_steps(&settings, precision, 0);
        }
    }
}

#[test]
fn predictions_need_no_large_allocation() {
    for settings in [dlrm(), dnn()] {
        let mut tower = tower(settings, Precision::Fp32, DENSE);
        let (embeddings, dense) = (values(SAMPLES * FEATURES * DIM), values(SAMPLES * DENSE));
        let features = Features { samples: SAMPLES, dense: &dense, embeddings: &embeddings, linear: &[] };
        let mut predict = || drop(tower.predict(features).unwrap());
        (0..3).for_each(|_| predict());
        assert_eq!(counted(LARGE, &mut predict), [0, 0]);
    }
}

//! Counts the allocations and the page faults of dense steps in the steady state.

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

/// The page faults of this thread so far that needed no disk (`minflt` in proc(5)).
fn page_faults() -> u64 {
    let stat = std::fs::read_to_string("/proc/thread-self/stat").unwrap();
    let (_, fields) = stat.rsplit_once(") ").unwrap();
    fields.split(' ').nth(7).unwrap().parse().unwrap()
}

#[test]
fn page_faults_are_counted() {
    let before = page_faults();
    let fresh = black_box(vec![1_u8; 64 << 20]);
    assert!(page_faults() > before, "after {} bytes", fresh.len());
}

/// Steps whose page faults are counted together.
const STEPS: u64 = 5;

/// Steps of a tower on the same batch.
struct Steps {
    tower: Tower,
    embeddings: Vec<f32>,
    dense: Vec<f32>,
    labels: Vec<f32>,
    number: u64,
}

impl Steps {
    /// After three steps.
    fn warm(settings: ModelSettings, precision: Precision, dense: usize, gives_back: bool) -> Self {
        let labels = values(SAMPLES).iter().map(|&value| f32::from(value > 0.0)).collect();
        let (embeddings, dense_values) = (values(SAMPLES * FEATURES * DIM), values(SAMPLES * dense));
        let tower = tower(settings, precision, dense);
        let mut steps = Self { tower, embeddings, dense: dense_values, labels, number: 0 };
        (0..3).for_each(|_| steps.step(gives_back));
        steps
    }

    /// One step. Its caller may give the gradient of the embeddings back.
    fn step(&mut self, gives_back: bool) {
        let Self { tower, embeddings, dense, labels, number } = self;
        *number += 1;
        let features = Features { samples: SAMPLES, dense, embeddings, linear: &[] };
        let output = tower.forward_backward(features, labels, 1.0 / SAMPLES as f32, *number).unwrap();
        assert_eq!(output.embedding_gradients.len(), embeddings.len());
        tower.apply(*number).unwrap();
        if gives_back {
            tower.reuse(output.embedding_gradients);
        }
    }
}

/// The precisions, models and numbers of dense features that are counted.
fn each_kind(check: impl Fn(ModelSettings, Precision, usize)) {
    for precision in [Precision::Fp32, Precision::Bf16] {
        for settings in [dlrm(), dnn()] {
            check(settings.clone(), precision, DENSE);
            check(settings, precision, 0);
        }
    }
}

#[test]
fn a_step_allocates_only_the_gradient_that_it_returns() {
    each_kind(|settings, precision, dense| {
        let mut steps = Steps::warm(settings.clone(), precision, dense, false);
        let gradient = size_of_val(&*steps.embeddings);
        for _ in 0..3 {
            let found = counted(LARGE, || steps.step(false));
            assert_eq!(found, [1, gradient], "{settings:?}, {precision:?}, step {}", steps.number);
        }
    });
}

#[test]
fn a_step_whose_gradient_comes_back_needs_no_fresh_memory() {
    each_kind(|settings, precision, dense| {
        let mut steps = Steps::warm(settings.clone(), precision, dense, true);
        let before = page_faults();
        let found = counted(LARGE, || (0..STEPS).for_each(|_| steps.step(true)));
        let faults = page_faults() - before;
        assert_eq!(found, [0, 0], "{settings:?}, {precision:?}, {dense} dense features");
        // Fewer than one fresh large buffer a step has pages. A few remain on a busy machine.
        let most = STEPS * (LARGE as u64 / 4096);
        assert!(faults < most, "{faults} faults in {STEPS} steps: {settings:?}, {precision:?}, {dense} dense features");
    });
}

#[test]
fn the_memory_that_comes_back_does_not_change_a_gradient() {
    let mut steps = Steps::warm(dlrm(), Precision::Fp32, DENSE, false);
    let Steps { tower, embeddings, dense, labels, .. } = &mut steps;
    let features = Features { samples: SAMPLES, dense, embeddings, linear: &[] };
    let mut gradient = |memory: Vec<f32>| {
        tower.reuse(memory);
        tower.forward_backward(features, labels, 1.0, 9).unwrap().embedding_gradients
    };
    let expected = gradient(Vec::new());
    for length in [0, 7, embeddings.len(), 2 * embeddings.len()] {
        assert!(gradient(vec![f32::NAN; length]) == expected, "after {length} values");
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

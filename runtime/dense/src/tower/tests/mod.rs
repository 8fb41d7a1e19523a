//! Tests of towers against an independent definition of every model: fixtures, and one file for
//! each claim.

mod devices;
mod gradients;
mod refusals;
mod repeatability;
mod state;
mod substitution;
mod tasks;
mod training;

use std::ops::Range;

use burn::tensor::Device;

use super::*;
use crate::device::gpus;
use crate::models::reference::Batch;
use crate::random::Stream;
use crate::tasks::BinaryCrossEntropy;
use crate::{CrossStructure, ModelConfig, ModelSettings};

const SEED: u64 = 11;
const RANK: u32 = 3;
const STEP: u64 = 17;

/// How much further from the exact value a step in bf16 may be than one in 32 bits. The tolerance
/// is 2 % of the largest gradient of a parameter (or of .001), plus 20 % of each gradient. An
/// operand of 8 bits is off by up to 0.4 %, and up to seven of them follow one another. Some
/// gradients are the small remainder of samples that cancel out. A device rounds sums as well,
/// which doubles the error.
const BF16_SLACK: f64 = 10_000.0;

fn config(settings: ModelSettings) -> ModelConfig {
    let dims = match settings {
        ModelSettings::Lr => vec![0; 3],
        ModelSettings::Dlrm { .. } | ModelSettings::DeepFm { .. } | ModelSettings::Fm => vec![4; 3],
        _ => vec![4, 2, 3],
    };
    ModelConfig::new(settings, 2, dims)
}

fn dnn() -> ModelConfig {
    config(ModelSettings::Dnn { hidden: vec![6, 5] })
}

fn dlrm(bottom: &[usize], top: &[usize]) -> ModelConfig {
    config(ModelSettings::Dlrm { bottom: bottom.to_vec(), top: top.to_vec() })
}

fn clicks() -> Tasks {
    Tasks::single(BinaryCrossEntropy)
}

fn tower_with(config: ModelConfig, threads: usize, precision: Precision) -> Tower {
    let options = TowerOptions { seed: SEED, rank: RANK, threads, device: ComputeDevice::Cpu, precision };
    Tower::new(config.build().unwrap(), clicks(), DenseOptimizer::adam(1e-2), options).unwrap()
}

fn tower(config: ModelConfig) -> Tower {
    tower_with(config, 1, Precision::Fp32)
}

fn bf16_tower(config: ModelConfig) -> Tower {
    tower_with(config, 1, Precision::Bf16)
}

/// A device with memory of its own: the machine's GPU if this build can use one, otherwise the
/// CPU's backend.
fn device() -> Device {
    if gpus().unwrap().is_empty() { Device::flex() } else { open_cuda(0, Precision::Bf16).unwrap() }
}

/// How much further from the exact value a device may be than the CPU. Products on tensor cores
/// round their inputs to 11 bits.
fn slack() -> f64 {
    if gpus().unwrap().is_empty() { 1.0 } else { 2000.0 }
}

/// A tower on a device with memory of its own.
fn on_device(config: ModelConfig) -> Tower {
    on_device_with(config, DenseOptimizer::adam(1e-2), Precision::Fp32)
}

fn bf16_on_device(config: ModelConfig) -> Tower {
    on_device_with(config, DenseOptimizer::adam(1e-2), Precision::Bf16)
}

fn on_device_with(config: ModelConfig, optimizer: DenseOptimizer, precision: Precision) -> Tower {
    let model = config.build().unwrap();
    let parameters = model.layout().initialize(SEED);
    let state = optimizer.initial_state(parameters.len());
    let device = Accelerator::new((device(), "device".into()), precision, model.layout(), parameters, state);
    let compute = Compute::Accelerator(Box::new(device));
    Tower { model, substitute: None, tasks: clicks(), optimizer, seed: SEED, rank: RANK, compute }
}

/// Moves every parameter away from 0, because a weight at 0 hides errors in its factor.
fn moved(mut tower: Tower) -> Tower {
    let stream = Stream::new(&[98]);
    for (index, parameter) in (0..).zip(tower.parameters_mut().unwrap()) {
        *parameter += (0.2 * stream.unit(index) - 0.1) as f32;
    }
    tower
}

/// Moves hidden units far from the kink of ReLU, every other one above it. If bf16 moves a unit
/// across the kink, a gradient changes by a sample's whole part, which is no rounding error.
fn clear_of_kinks(tower: Tower) -> Tower {
    clear_of_kinks_by(1.5, tower)
}

fn clear_of_kinks_by(distance: f32, mut tower: Tower) -> Tower {
    let layout = tower.layout().clone();
    for linear in layout.linears() {
        let entry = layout.entry(linear.bias);
        if entry.name.contains("logit") || entry.name.starts_with("cross.") {
            continue;
        }
        let biases = &mut tower.parameters_mut().unwrap()[entry.range()];
        for (unit, bias) in biases.iter_mut().enumerate() {
            *bias = if unit % 2 == 0 { distance } else { -distance };
        }
    }
    tower
}

/// A batch whose values f32 holds exactly.
#[derive(Clone)]
struct Sampled {
    samples: usize,
    dense: Vec<f32>,
    embeddings: Vec<f32>,
    linear: Vec<f32>,
    labels: Vec<f32>,
}

impl Sampled {
    fn new(model: &dyn Model, samples: usize) -> Self {
        let values = |key: u64, width: usize| -> Vec<f32> {
            let stream = Stream::new(&[99, key]);
            (0..(samples * width) as u64).map(|i| (2.0 * stream.unit(i) - 1.0) as f32).collect()
        };
        let widths = model.input_widths();
        Self {
            samples,
            dense: values(0, widths.dense),
            embeddings: values(1, widths.embeddings),
            linear: values(2, widths.linear),
            labels: values(3, 1).iter().map(|&x| if x > 0.0 { 1.0 } else { 0.0 }).collect(),
        }
    }

    fn features(&self) -> Features<'_> {
        Features { samples: self.samples, dense: &self.dense, embeddings: &self.embeddings, linear: &self.linear }
    }

    fn batch(&self) -> Batch {
        let wide = |values: &[f32]| values.iter().copied().map(f64::from).collect();
        Batch {
            samples: self.samples,
            dense: wide(&self.dense),
            embeddings: wide(&self.embeddings),
            linear: wide(&self.linear),
            labels: wide(&self.labels),
        }
    }
}

fn wide(values: &[f32]) -> Vec<f64> {
    values.iter().copied().map(f64::from).collect()
}

/// Central differences of `loss` along each coordinate.
fn differences(at: &[f64], loss: impl Fn(&[f64]) -> f64) -> Vec<f64> {
    const EPSILON: f64 = 1e-5;
    let mut point = at.to_vec();
    (0..at.len())
        .map(|index| {
            let mut moved = |by: f64| {
                point[index] = at[index] + by;
                let loss = loss(&point);
                point[index] = at[index];
                loss
            };
            (moved(EPSILON) - moved(-EPSILON)) / (2.0 * EPSILON)
        })
        .collect()
}

fn assert_close(what: &str, got: &[f32], expected: &[f64]) {
    assert_within(1.0, what, got, expected);
}

fn assert_within(slack: f64, what: &str, got: &[f32], expected: &[f64]) {
    assert_eq!(got.len(), expected.len(), "{what}");
    let scale = expected.iter().fold(1e-3_f64, |most, value| most.max(value.abs()));
    for (index, (&got, &expected)) in got.iter().zip(expected).enumerate() {
        let error = (f64::from(got) - expected).abs();
        assert!(
            error <= slack * (2e-6 * scale + 2e-5 * expected.abs()),
            "{what}[{index}]: {got} but {expected} expected"
        );
    }
}

/// Trains on one batch of 32 samples, one step for each update count.
fn steps(tower: &mut Tower, updates: Range<u64>) {
    let sampled = Sampled::new(tower.model(), 32);
    for update in updates {
        tower.forward_backward(sampled.features(), &sampled.labels, 1.0 / 32.0, update).unwrap();
        tower.apply(update).unwrap();
    }
}

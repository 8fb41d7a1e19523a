//! Measures the dense part of a training step: the forward and backward pass of a tower, and its
//! optimizer. The inputs are random and in memory before the measurement.
//!
//! | model | layers | inputs | batch |
//! |---|---|---|---|
//! | `dlrm` | bottom 512-256-16, pairwise dots, top 512-256-1 | 26 embeddings of 16, 13 dense | 4,096 |
//! | `a` | 4096-2048-1024-512-256-1 | 429 | 1,024 |
//! | `b` | 512-256-128-1 | 429 | 4,096 |
//!
//! 429 inputs are 26 embeddings of 16 values and 13 dense values. The step includes the gradients
//! of the embeddings.

use std::time::Instant;

use comfy_table::Table;
use rectrain_dense::metrics::WindowPart;
use rectrain_dense::tasks::{BinaryCrossEntropy, Tasks};
use rectrain_dense::{
    ComputeDevice, DenseError, DenseOptimizer, Features, ModelConfig, ModelSettings, Precision, Tower, TowerOptions,
};
use serde::Serialize;

use crate::error::BenchError;
use crate::figures::{median, table};
use crate::timing::page_faults;
use crate::zipf::Random;

const FEATURES: usize = 26;
const DIM: usize = 16;
const DENSE: usize = 13;

/// A tower of the benchmark.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum BenchedTower {
    /// DLRM: bottom 512-256-16, top 512-256-1
    Dlrm,
    /// 4096-2048-1024-512-256-1
    A,
    /// 512-256-128-1
    B,
}

/// The precision of the products of linear layers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum BenchedPrecision {
    /// 32-bit floats
    Fp32,
    /// Operands rounded to bf16
    Bf16,
}

#[derive(Clone, Debug, clap::Args)]
pub struct StepArgs {
    /// The tower
    #[arg(long, value_enum, default_value_t = BenchedTower::Dlrm)]
    pub model: BenchedTower,
    /// Samples per batch (by default 1024 for `a`, 4096 for the others)
    #[arg(long)]
    pub batch: Option<usize>,
    /// Threads of the computation
    #[arg(long, default_value_t = 2)]
    pub threads: usize,
    /// The precision of the products of linear layers
    #[arg(long, value_enum, default_value_t = BenchedPrecision::Fp32)]
    pub precision: BenchedPrecision,
    /// Index of the GPU to use instead of the CPU
    #[arg(long)]
    pub gpu: Option<usize>,
    /// Measured steps, after three unmeasured ones
    #[arg(long, default_value_t = 15)]
    pub steps: usize,
    /// Also print a line of JSON
    #[arg(long)]
    pub json: bool,
}

/// The figures of [`bench_step`]. Times are medians over the steps.
#[derive(Clone, Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct StepFigures {
    pub samples_per_second: f64,
    pub step_seconds: f64,
    /// On a GPU this includes the queued update of the previous step.
    pub forward_backward_seconds: f64,
    pub update_seconds: f64,
    /// The time to count the step's predictions for the window of quality. The predictions are the
    /// ones of the forward pass, so test-then-train costs nothing else.
    pub window_seconds: f64,
    pub fastest_step_seconds: f64,
    /// Page faults that needed no disk, by step: the mean over the measured steps. Each is a page
    /// that the kernel cleared. `None` if the kernel does not report them.
    pub page_faults: Option<f64>,
    /// The number of multiplications and additions in the matrix products of a step.
    pub flops: f64,
    pub parameters: usize,
    pub batch: usize,
    pub threads: usize,
    pub device: String,
    pub precision: &'static str,
}

impl StepFigures {
    pub(crate) fn table(&self) -> Table {
        let mut table = table(&["", "", "unit"]);
        let mut row = |name: &str, value: f64, digits: usize, unit: &str| {
            table.add_row([name.to_owned(), format!("{value:.digits$}"), unit.to_owned()]);
        };
        row("step", self.samples_per_second, 0, "samples/s");
        row("step", self.step_seconds * 1e3, 2, "ms");
        row("step, the fastest", self.fastest_step_seconds * 1e3, 2, "ms");
        row("forward and backward pass", self.forward_backward_seconds * 1e3, 2, "ms");
        row("update (Adam)", self.update_seconds * 1e3, 2, "ms");
        row("predictions counted (test, then train)", self.window_seconds * 1e3, 3, "ms");
        row("their share of a step", 1e2 * self.window_seconds / self.step_seconds, 2, "%");
        if let Some(faults) = self.page_faults {
            row("page faults of a step", faults, 1, "");
        }
        row("matrix products of a step", self.flops / 1e9, 1, "GFLOP");
        row("rate if a step were only these", self.flops / self.step_seconds / 1e9, 0, "GFLOP/s");
        row("parameters", self.parameters as f64, 0, "");
        table
    }
}

/// Trains a tower for a few steps.
///
/// # Errors
/// [`BenchError::Argument`], or [`BenchError::Dense`].
pub fn bench_step(args: &StepArgs) -> Result<StepFigures, BenchError> {
    let batch = args.batch.unwrap_or(if args.model == BenchedTower::A { 1_024 } else { 4_096 });
    for (argument, found) in [("batch", batch), ("steps", args.steps)] {
        if found == 0 {
            return Err(BenchError::Argument { argument, found: found.to_string(), expected: "at least 1" });
        }
    }
    let device = args.gpu.map_or(ComputeDevice::Cpu, ComputeDevice::Cuda);
    let mut tower = tower(args, device)?;
    let mut random = Random::new(1);
    let mut values = |count: usize| -> Vec<f32> { (0..count).map(|_| random.unit() as f32 - 0.5).collect() };
    let (embeddings, dense, labels) = (values(batch * FEATURES * DIM), values(batch * DENSE), values(batch));
    let labels: Vec<f32> = labels.iter().map(|&value| f32::from(value > 0.0)).collect();
    let features = Features { samples: batch, dense: &dense, embeddings: &embeddings, linear: &[] };

    let predictions: Vec<f32> = dense.iter().take(batch).map(|&value| value + 0.5).collect();
    let mut window = WindowPart::default();
    let mut parts: [Vec<f64>; 4] = Default::default();
    let mut faults_before = None;
    for count in 1..=args.steps as u64 + 3 {
        if count == 4 {
            faults_before = page_faults();
        }
        let begin = Instant::now();
        let output = tower.forward_backward(features, &labels, 1.0 / batch as f32, count)?;
        let passed = begin.elapsed().as_secs_f64();
        tower.apply(count)?;
        tower.reuse(output.embedding_gradients);
        let step = begin.elapsed().as_secs_f64();
        window.push(&predictions, &labels);
        let counted = begin.elapsed().as_secs_f64() - step;
        if count > 3 {
            let seconds = [passed, step - passed, step, counted];
            parts.iter_mut().zip(seconds).for_each(|(part, seconds)| part.push(seconds));
        }
    }
    let faults = page_faults().zip(faults_before).map(|(after, before)| after - before);
    let [passes, updates, steps, counts] = parts;
    let fastest = steps.iter().copied().fold(f64::INFINITY, f64::min);
    let (step_seconds, passed) = (median(steps), median(passes));
    // One product forward and two backward, each with a multiplication and an addition per
    // parameter. Biases are counted too, but they are few.
    let flops = 6.0 * tower.layout().total() as f64 * batch as f64;
    Ok(StepFigures {
        samples_per_second: batch as f64 / step_seconds,
        step_seconds,
        forward_backward_seconds: passed,
        update_seconds: median(updates),
        window_seconds: median(counts),
        fastest_step_seconds: fastest,
        page_faults: faults.map(|faults| faults as f64 / args.steps as f64),
        flops,
        parameters: tower.layout().total(),
        batch,
        threads: args.threads,
        device: device.to_string(),
        precision: match args.precision {
            BenchedPrecision::Fp32 => "fp32",
            BenchedPrecision::Bf16 => "bf16",
        },
    })
}

fn tower(args: &StepArgs, device: ComputeDevice) -> Result<Tower, DenseError> {
    let settings = match args.model {
        BenchedTower::Dlrm => ModelSettings::Dlrm { bottom: vec![512, 256], top: vec![512, 256] },
        BenchedTower::A => ModelSettings::Dnn { hidden: vec![4096, 2048, 1024, 512, 256] },
        BenchedTower::B => ModelSettings::Dnn { hidden: vec![512, 256, 128] },
    };
    let config = ModelConfig::new(settings, DENSE, vec![DIM; FEATURES]);
    let precision = match args.precision {
        BenchedPrecision::Fp32 => Precision::Fp32,
        BenchedPrecision::Bf16 => Precision::Bf16,
    };
    let options = TowerOptions { seed: 1, rank: 0, threads: args.threads, device, precision };
    Tower::new(config.build()?, Tasks::single(BinaryCrossEntropy), DenseOptimizer::adam(1e-3), options)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn args(model: BenchedTower, precision: BenchedPrecision, batch: usize) -> StepArgs {
        StepArgs { model, batch: Some(batch), threads: 1, precision, gpu: None, steps: 2, json: false }
    }

    #[test]
    fn each_tower_trains_and_a_pass_takes_less_than_its_step() {
        for (model, parameters) in [
            (BenchedTower::Dlrm, 14 * 512 + 513 * 256 + 257 * 16 + 368 * 512 + 513 * 256 + 257),
            (BenchedTower::B, 430 * 512 + 513 * 256 + 257 * 128 + 129),
        ] {
            for precision in [BenchedPrecision::Fp32, BenchedPrecision::Bf16] {
                let figures = bench_step(&args(model, precision, 64)).unwrap();
                assert_eq!(figures.parameters, parameters, "{model:?}");
                assert!(figures.samples_per_second > 0.0 && figures.fastest_step_seconds <= figures.step_seconds);
                assert!(figures.forward_backward_seconds <= figures.step_seconds);
            }
        }
    }

    #[test]
    fn an_empty_batch_and_a_missing_gpu_are_refused() {
        assert!(
            bench_step(&args(BenchedTower::B, BenchedPrecision::Fp32, 0))
                .unwrap_err()
                .to_string()
                .contains("--batch 0")
        );
        for precision in [BenchedPrecision::Fp32, BenchedPrecision::Bf16] {
            let error = bench_step(&StepArgs { gpu: Some(99), ..args(BenchedTower::B, precision, 8) }).unwrap_err();
            assert!(error.is_user_error() && error.to_string().contains("cannot compute on a GPU"), "{error}");
        }
    }
}

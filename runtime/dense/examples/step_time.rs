//! How fast the tower trains: the DLRM of the docs' benchmarks (26 embeddings of dimension 16, 13 dense features, bottom
//! 512-256-16, top 512-256-1, batch 4,096) on 2 threads, and where the time goes.
//!
//! `cargo run --release -p rectrain-dense --example step_time [threads] [batch] [gpu]`, the last one the index of a GPU to take
//! instead of the threads (with `--features cuda`).

use std::time::{Duration, Instant};

use rectrain_dense::{
    ComputeDevice, DenseError, DenseOptimizer, Features, Model, ModelConfig, ModelKind, Tower, TowerOptions,
};

const SPARSE: usize = 26;
const DIM: usize = 16;
const DENSE: usize = 13;
const REPEATS: u64 = 15;

fn main() -> Result<(), DenseError> {
    let mut arguments = std::env::args().skip(1).map_while(|argument| argument.parse().ok());
    let threads = arguments.next().unwrap_or(2);
    let batch = arguments.next().unwrap_or(4096);
    let device = arguments.next().map_or(ComputeDevice::Cpu, ComputeDevice::Cuda);
    let embeddings = values(1, batch * SPARSE * DIM);
    let dense = values(2, batch * DENSE);
    let labels: Vec<f32> = values(3, batch).iter().map(|&x| if x > 0.5 { 1.0 } else { 0.0 }).collect();

    let dlrm = ModelKind::Dlrm { bottom: vec![512, 256], top: vec![512, 256] };
    let optimizer = DenseOptimizer::adam(1e-3);
    let mut tower = tower(dlrm, &[DIM; SPARSE], optimizer, threads, device)?;
    let features = Features { samples: batch, dense: &dense, embeddings: &embeddings, linear: &[] };
    let scale = 1.0 / batch as f32;
    println!(
        "{device}, {threads} threads, batch {batch}, {} parameters; median and least of {REPEATS} runs",
        tower.layout().total()
    );

    let forward = time(|_| tower.predict(features).map(drop))?;
    let gradients = time(|step| tower.forward_backward(features, &labels, scale, step).map(drop))?;
    // A GPU only queues it; in `step`, the next pass waits for it.
    let apply = time(|step| tower.apply(step))?;
    let step = time(|step| {
        tower.forward_backward(features, &labels, scale, step)?;
        tower.apply(step)
    })?;
    report("step", step, batch);
    report("  forward and backward", gradients, batch);
    report("  apply (Adam)", apply, batch);
    report("forward alone", forward, batch);

    // The same matrix products without the interaction: as many inputs into the top as pairs and bottom outputs.
    let inputs = values(4, batch * 367);
    let mut top = self::tower(ModelKind::Dnn { hidden: vec![512, 256] }, &[367], optimizer, threads, device)?;
    let zeros = vec![0.5; batch * DENSE];
    let features = Features { samples: batch, dense: &zeros, embeddings: &inputs, linear: &[] };
    let top = time(|step| top.forward_backward(features, &labels, scale, step).map(drop))?;
    report("the top MLP alone, forward and backward", top, batch);
    Ok(())
}

fn tower(
    kind: ModelKind,
    dims: &[usize],
    optimizer: DenseOptimizer,
    threads: usize,
    device: ComputeDevice,
) -> Result<Tower, DenseError> {
    let config = ModelConfig { kind, dense_features: DENSE, embedding_dims: dims.to_vec(), dropout: 0.0 };
    Tower::new(Model::new(config)?, optimizer, TowerOptions { seed: 1, rank: 0, threads, device })
}

/// Median and least time of `work`, which is given the update count.
fn time(mut work: impl FnMut(u64) -> Result<(), DenseError>) -> Result<[Duration; 2], DenseError> {
    let mut times = Vec::new();
    for count in 1..=REPEATS {
        let start = Instant::now();
        work(count)?;
        times.push(start.elapsed());
    }
    times.sort();
    Ok([times[times.len() / 2], times[0]])
}

fn report(what: &str, times: [Duration; 2], samples: usize) {
    let [median, least] = times.map(|time| {
        let rate = samples as f64 / time.as_secs_f64();
        format!("{:>8.2} ms {rate:>9.0} samples/s", time.as_secs_f64() * 1e3)
    });
    println!("{what:<42}{median}   least {least}");
}

/// Made-up values in [0, 1).
fn values(seed: u32, count: usize) -> Vec<f32> {
    let mut state = seed;
    let next = |_| {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (state >> 8) as f32 / (1 << 24) as f32
    };
    (0..count).map(next).collect()
}

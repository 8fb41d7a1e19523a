//! The two models of speed against the simulator, which runs the modes' own state machines.

use std::sync::Arc;

use rectrain_modes::TrainingMode as SimulatedMode;
use rectrain_modes::gba::{BufferSize, Decay, LostTokens, TokenMode};
use rectrain_modes::simulate::{ClusterSpec, LinkSpec, Report, ServerSpec, Simulation, StepTime, WorkerSpec, simulate};
use rectrain_policy::{Observations, Prediction, Worker, predict};
use rectrain_random::SplitMix64;

const ROWS: u32 = 512;
const TOLERANCE: u32 = 4;

/// Batches of `base` seconds; a share of `share` takes a heavy-tailed multiple.
fn batches(base: f64, share: f64, random: &mut SplitMix64) -> Vec<f64> {
    let batch = |random: &mut SplitMix64| {
        let (hit, multiple) = (random.unit() < share, (1.0 - random.unit()).powf(-1.0 / 1.5).min(20.0));
        base * if hit { multiple } else { 1.0 + 0.02 * random.unit() }
    };
    (0..512).map(|_| batch(random)).collect()
}

/// Pulled pieces for each worker.
const PIECES_EACH: u32 = 3;

fn simulated(workers: &[Vec<f64>], link: LinkSpec, mode: SimulatedMode) -> Report {
    let worker = |seconds: &Vec<f64>| WorkerSpec {
        step: StepTime::Trace { batch_seconds: Arc::from(seconds.as_slice()), first: 0 },
        slowness: Vec::new(),
        link_slowness: 1.0,
        crashes: None,
    };
    let cluster = ClusterSpec {
        workers: workers.iter().map(worker).collect(),
        servers: vec![ServerSpec { seconds_per_request: 0.0, bytes_per_second: 1e18, slowness: None }; 2],
        slots_move: false,
        embedding: None,
        loaders: None,
        link,
        detection_seconds: 1.0,
    };
    let pieces = PIECES_EACH * workers.len() as u32;
    let simulation = Simulation { cluster, mode, local_rows: ROWS, pieces, seconds: 120.0, intervals: 0, seed: 1 };
    simulate(&simulation).unwrap()
}

fn gba(workers: usize) -> SimulatedMode {
    SimulatedMode::Tokens(TokenMode::Gba {
        buffer: BufferSize::new(workers as u32).unwrap(),
        decay: Decay::Threshold { tolerance: u64::from(TOLERANCE) },
        lost_tokens: LostTokens::Vanish,
    })
}

fn observed(workers: &[Vec<f64>]) -> Observations {
    Observations {
        global_batch_rows: ROWS * workers.len() as u32,
        local_batch_rows: ROWS,
        staleness_tolerance: TOLERANCE,
        workers: workers.iter().map(|seconds| Worker { batch_rows: ROWS, compute_seconds: seconds.clone() }).collect(),
        ..Observations::default()
    }
}

fn predicted(workers: &[Vec<f64>], all_reduce: f64, exchange: f64) -> Prediction {
    predict(&observed(workers), Some(all_reduce), Some(exchange)).unwrap()
}

/// The prediction for pulled pieces. A worker reads the parameters in `read` seconds, and a piece
/// waits `wait` seconds.
fn predicted_pulled(workers: &[Vec<f64>], read: f64, wait: f64) -> f64 {
    let fixed = observed(workers);
    let global_batch_rows = PIECES_EACH * fixed.global_batch_rows;
    let observations = Observations { pulls_pieces: true, global_batch_rows, wait_seconds: wait, ..fixed };
    predict(&observations, None, Some(read)).unwrap().sync
}

/// Equal workers, a quarter four times slower, one eight times slower, heavy tails, and all of it
/// together.
fn clusters() -> Vec<(&'static str, Vec<Vec<f64>>)> {
    let mut random = SplitMix64::new(3);
    let mut cluster = |speed: &dyn Fn(usize) -> f64, share: f64| {
        (0..16).map(|rank| batches(0.05 * speed(rank), share, &mut random)).collect()
    };
    vec![
        ("equal", cluster(&|_| 1.0, 0.0)),
        ("a quarter at a quarter", cluster(&|rank| if rank % 4 == 3 { 4.0 } else { 1.0 }, 0.0)),
        ("one at an eighth", cluster(&|rank| if rank == 5 { 8.0 } else { 1.0 }, 0.0)),
        ("heavy tails", cluster(&|_| 1.0, 0.05)),
        ("all of it", cluster(&|rank| [1.0, 1.0, 1.3, 2.5][rank % 4], 0.02)),
    ]
}

fn off(predicted: f64, simulated: f64) -> f64 {
    predicted / simulated - 1.0
}

#[test]
fn without_a_network_the_prediction_is_the_simulated_speed() {
    let free =
        LinkSpec { latency_seconds: 0.0, bytes_per_second: 1e18, dense_bytes: 0.0, embedding_bytes_per_row: 0.0 };
    for (name, workers) in clusters() {
        let prediction = predicted(&workers, 0.0, 0.0);
        let sync = off(prediction.sync, simulated(&workers, free, SimulatedMode::Sync).global_samples_per_second);
        let gba = off(prediction.gba, simulated(&workers, free, gba(16)).trained_samples_per_second);
        println!("{name}: sync {:+.1} %, gba {:+.1} %", sync * 100.0, gba * 100.0);
        assert!(sync.abs() < 0.01 && gba.abs() < 0.03, "{name}: sync {sync}, gba {gba}");
    }
}

#[test]
fn the_prediction_for_pulled_pieces_is_the_simulated_speed() {
    let free =
        LinkSpec { latency_seconds: 0.0, bytes_per_second: 1e18, dense_bytes: 0.0, embedding_bytes_per_row: 0.0 };
    let link = LinkSpec { latency_seconds: 1e-3, bytes_per_second: 1e9, dense_bytes: 8e6, ..free };
    // With a network a step begins with the parameters, and ends with the gradients of its last
    // piece.
    let exchange = 2.0 * (1e-3 + 8e-3);
    for (name, workers) in clusters() {
        // The model knows single late pieces only on average.
        let most = if name == "all of it" { 0.07 } else { 0.02 };
        for (link, exchange) in [(free, 0.0), (link, exchange)] {
            let report = simulated(&workers, link, SimulatedMode::Pulled);
            let off = off(predicted_pulled(&workers, exchange, 0.0), report.global_samples_per_second);
            println!("{name}, {exchange} s: {:+.1} %", off * 100.0);
            assert!(off.abs() < most, "{name}, {exchange} s: {off}");
        }
    }
    let one_stopped: Vec<Vec<f64>> = [0.05, 0.05, 1e4, 0.05].map(|seconds| vec![seconds]).into();
    let healthy = predicted_pulled(&vec![vec![0.05]; 4], 0.0, 0.0);
    assert!((predicted_pulled(&one_stopped, 0.0, 0.0) / healthy - 0.75).abs() < 1e-9, "three quarters");
}

#[test]
fn with_a_network_the_prediction_adds_its_measured_times() {
    let link =
        LinkSpec { latency_seconds: 1e-3, bytes_per_second: 1e9, dense_bytes: 8e6, embedding_bytes_per_row: 0.0 };
    // The simulator's times: a ring over 16 workers, and two round trips, for a token and for
    // parameters.
    let all_reduce = 2.0 * 4.0 * 1e-3 + 2.0 * 15.0 / 16.0 * 8e-3;
    let look_up = 2e-3;
    let exchange = 2.0 * 2e-3 + 8e-3;
    for (name, workers) in clusters() {
        let prediction = predicted(&workers, all_reduce + look_up, exchange);
        let sync = off(prediction.sync, simulated(&workers, link, SimulatedMode::Sync).global_samples_per_second);
        let gba = off(prediction.gba, simulated(&workers, link, gba(16)).trained_samples_per_second);
        println!("{name}: sync {:+.1} %, gba {:+.1} %", sync * 100.0, gba * 100.0);
        assert!(sync.abs() < 0.03 && gba.abs() < 0.05, "{name}: sync {sync}, gba {gba}");
    }
}

#[test]
fn a_worker_whose_gradients_are_excluded_adds_nothing() {
    let mut workers = vec![vec![0.05]; 8];
    let all = predicted(&workers, 0.0, 0.0);
    workers.push(vec![0.05 * 9.0]);
    let with_one_too_slow = predicted(&workers, 0.0, 0.0);
    assert!((with_one_too_slow.gba / all.gba - 1.0).abs() < 1e-9, "{with_one_too_slow:?}");
    assert_eq!(with_one_too_slow.slowest, 8);
}

use super::*;
use crate::gba::{BufferSize, Decay, LostTokens};

const LOCAL_ROWS: u32 = 512;

fn worker(slowness: Slowness) -> WorkerSpec {
    WorkerSpec { seconds_per_row: 1e-4, seconds_per_batch: 0.0, slowness, link_slowness: 1.0, crashes: None }
}

/// Servers grow with workers, so that they are no bottleneck.
fn cluster(workers: Vec<WorkerSpec>) -> ClusterSpec {
    let servers = (workers.len() / 100).clamp(2, 8);
    ClusterSpec {
        workers,
        servers: vec![ServerSpec { seconds_per_request: 4e-6 }; servers],
        link: LinkSpec {
            latency_seconds: 1e-4,
            bytes_per_second: 1e9,
            dense_bytes: 1e5,
            embedding_bytes_per_row: 256.0,
        },
        detection_seconds: 1.0,
    }
}

/// A quarter of the workers four times slower.
fn stragglers(workers: usize) -> ClusterSpec {
    let slowness = |rank| if rank % 4 == 3 { Slowness::Constant { factor: 4.0 } } else { Slowness::None };
    cluster((0..workers).map(|rank| worker(slowness(rank))).collect())
}

fn gba(buffer: usize) -> SimulatedMode {
    SimulatedMode::Tokens(TokenMode::Gba {
        buffer: BufferSize::new(buffer as u32).unwrap(),
        decay: Decay::Threshold { tolerance: 4 },
        lost_tokens: LostTokens::Vanish,
    })
}

fn all_modes(workers: usize) -> [SimulatedMode; 7] {
    [
        SimulatedMode::Sync,
        SimulatedMode::Hybrid { staleness: 2 },
        SimulatedMode::Tokens(TokenMode::Async),
        gba(workers),
        SimulatedMode::Tokens(TokenMode::HopBs { bound: 2 }),
        SimulatedMode::Tokens(TokenMode::HopBw { backups: workers as u32 / 4 }),
        SimulatedMode::Tokens(TokenMode::Bsp { aggregate: BufferSize::new(workers.div_ceil(8) as u32).unwrap() }),
    ]
}

fn run(cluster: &ClusterSpec, mode: SimulatedMode, seconds: f64) -> Report {
    let simulation = Simulation { cluster: cluster.clone(), mode, local_rows: LOCAL_ROWS, seconds, seed: 7 };
    simulate(&simulation).unwrap()
}

#[test]
fn with_a_quarter_of_the_workers_4_times_slower_gba_is_2_4_times_sync_and_as_fast_as_async() {
    for (workers, seconds) in [(8, 40.0), (80, 20.0), (800, 6.0)] {
        let cluster = stragglers(workers);
        let reports = all_modes(workers).map(|mode| run(&cluster, mode, seconds));
        let rate = |name: &str| reports.iter().find(|r| r.mode == name).unwrap().global_samples_per_second;
        assert!(rate("gba") >= 2.4 * rate("sync"), "{workers} workers: {} and {}", rate("gba"), rate("sync"));
        assert!(rate("gba") >= 0.97 * rate("async"), "{workers} workers: {} and {}", rate("gba"), rate("async"));
        // What the fleet can do: 6 of 8 at full speed, 2 at a quarter.
        let ideal = workers as f64 * 0.8125 * 1e4;
        assert!(rate("async") <= ideal * 1.02 && rate("async") >= ideal * 0.9, "{} of {ideal}", rate("async"));
        assert!(rate("hop-bs") < 0.5 * rate("gba"), "hop-bs runs at the pace of the slowest");
    }
}

#[test]
fn without_stragglers_all_modes_run_at_nearly_the_same_speed() {
    let cluster = cluster(vec![worker(Slowness::None); 16]);
    for mode in all_modes(16) {
        let rate = run(&cluster, mode, 20.0).global_samples_per_second;
        assert!((0.93..=1.01).contains(&(rate / 160_000.0)), "{}: {rate}", mode.name());
    }
}

#[test]
fn a_run_repeats_to_the_bit_and_another_seed_is_another_run() {
    let tail = Slowness::HeavyTailed { probability: 0.1, shape: 1.2, limit: 50.0 };
    let crashes = Some(Crashes { mean_seconds_between: 5.0, recovery_seconds: 2.0 });
    let cluster = cluster(vec![WorkerSpec { crashes, ..worker(tail) }; 12]);
    for mode in all_modes(12) {
        let simulation =
            |seed| Simulation { cluster: cluster.clone(), mode, local_rows: LOCAL_ROWS, seconds: 20.0, seed };
        let first = simulate(&simulation(1)).unwrap();
        assert_eq!(first, simulate(&simulation(1)).unwrap());
        assert_ne!(first, simulate(&simulation(2)).unwrap());
        assert!(first.steps > 0);
    }
}

#[test]
fn every_kind_of_trouble_costs_sync_more_than_gba() {
    let mut periodic = vec![worker(Slowness::None); 16];
    for (i, w) in periodic.iter_mut().enumerate() {
        let offset_seconds = i as f64;
        w.slowness = Slowness::Periodic { factor: 6.0, period_seconds: 16.0, slow_seconds: 1.0, offset_seconds };
    }
    let tail = Slowness::HeavyTailed { probability: 0.05, shape: 1.1, limit: 30.0 };
    let crashes = Some(Crashes { mean_seconds_between: 30.0, recovery_seconds: 3.0 });
    let mut slow_link = vec![worker(Slowness::None); 16];
    slow_link[5].link_slowness = 200.0;
    let trace = Slowness::Trace { batch_seconds: vec![0.05, 0.05, 0.05, 0.5] };
    let mut traced = vec![worker(Slowness::None); 16];
    traced[0].slowness = trace.clone();
    let troubles = [
        ("periodic", periodic),
        ("heavy tail", vec![worker(tail); 16]),
        ("crashes", vec![WorkerSpec { crashes, ..worker(Slowness::None) }; 16]),
        ("slow link", slow_link),
        ("trace", traced),
    ];
    for (name, workers) in troubles {
        let cluster = cluster(workers);
        let [sync, gba] = [SimulatedMode::Sync, gba(16)].map(|mode| run(&cluster, mode, 60.0));
        let ratio = gba.global_samples_per_second / sync.global_samples_per_second;
        assert!(ratio > 1.2, "{name}: gba is {ratio} times sync");
        assert!(gba.idle < sync.idle, "{name}");
        assert_eq!(gba.lost_tokens > 0, name == "crashes");
    }
}

#[test]
fn a_slow_server_slows_every_mode_and_its_gradients_grow_stale() {
    let mut slow = cluster(vec![worker(Slowness::None); 16]);
    let fast = run(&slow, gba(16), 30.0);
    slow.servers[1].seconds_per_request = 4e-3;
    let report = run(&slow, gba(16), 30.0);
    // One server serves a pull and a push of each batch.
    let limit = f64::from(LOCAL_ROWS) / 8e-3;
    let rate = report.global_samples_per_second;
    assert!(rate <= limit * 1.01 && rate >= limit * 0.95, "{rate} of {limit}");
    assert!(report.idle > fast.idle + 0.4);
}

#[test]
fn sync_has_no_staleness_and_gba_drops_what_is_older_than_its_tolerance() {
    let sync = run(&stragglers(8), SimulatedMode::Sync, 20.0);
    assert_eq!((sync.max_staleness, sync.dropped_batches), (0, 0));
    let mut cluster = cluster(vec![worker(Slowness::None); 8]);
    cluster.workers[0].slowness = Slowness::Constant { factor: 20.0 };
    let report = run(&cluster, gba(8), 60.0);
    let slow_batches = 60.0 / (20.0 * 0.0512);
    let dropped = report.dropped_batches as f64;
    assert!((0.8..=1.0).contains(&(dropped / slow_batches)), "{dropped} of {slow_batches} batches of the slow worker");
    assert!(report.max_staleness >= 16);
}

#[test]
fn thousands_of_workers_are_simulated_in_seconds() {
    let report = run(&stragglers(4000), gba(4000), 2.0);
    assert!(report.steps > 20 && report.idle < 0.1, "{report:?}");
}

#[test]
fn settings_that_cannot_be_are_explained() {
    let good =
        Simulation { cluster: stragglers(4), mode: SimulatedMode::Sync, local_rows: LOCAL_ROWS, seconds: 1.0, seed: 0 };
    let explain = |change: fn(&mut Simulation)| {
        let mut simulation = good.clone();
        change(&mut simulation);
        simulate(&simulation).unwrap_err().to_string()
    };
    assert!(explain(|s| s.cluster.workers.clear()).contains("worker"));
    assert!(explain(|s| s.cluster.servers.clear()).contains("parameter server"));
    assert!(explain(|s| s.cluster.link.bytes_per_second = 0.0).contains("bandwidth"));
    assert!(explain(|s| s.seconds = f64::NAN).contains("NaN"));
    assert!(
        explain(|s| s.cluster.workers[0].slowness = Slowness::Trace { batch_seconds: Vec::new() }).contains("trace")
    );
    assert!(explain(|s| s.mode = SimulatedMode::Tokens(TokenMode::HopBw { backups: 4 })).contains("b3"));
}

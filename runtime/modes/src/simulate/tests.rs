use super::*;
use crate::gba::TokenMode;
use crate::gba::{BufferSize, Decay, LostTokens};
use crate::shadow::Shadow;

const LOCAL_ROWS: u32 = 512;

/// A batch takes 51.2 ms.
fn worker(slowness: impl IntoIterator<Item = Cause>) -> WorkerSpec {
    WorkerSpec {
        step: StepTime::Constant { seconds_per_batch: 0.0, seconds_per_row: 1e-4 },
        slowness: slowness.into_iter().map(Slowness::always).collect(),
        link_slowness: 1.0,
        crashes: None,
    }
}

/// A worker whose consecutive batches take `seconds`.
fn traced(seconds: &[f64]) -> WorkerSpec {
    WorkerSpec { step: StepTime::Trace { batch_seconds: seconds.into(), first: 0 }, ..worker(None) }
}

/// The number of servers grows with the workers, so servers are no bottleneck.
fn cluster(workers: Vec<WorkerSpec>) -> ClusterSpec {
    let servers = (workers.len() / 100).clamp(2, 8);
    ClusterSpec {
        workers,
        servers: vec![ServerSpec { seconds_per_request: 4e-6, bytes_per_second: 1e10, slowness: None }; servers],
        slots_move: false,
        embedding: None,
        loaders: None,
        link: LinkSpec {
            latency_seconds: 1e-4,
            bytes_per_second: 1e9,
            dense_bytes: 1e5,
            embedding_bytes_per_row: 256.0,
        },
        detection_seconds: 1.0,
    }
}

/// A cluster in which only computing takes time.
fn free_network(workers: Vec<WorkerSpec>) -> ClusterSpec {
    ClusterSpec {
        workers,
        servers: vec![ServerSpec { seconds_per_request: 0.0, bytes_per_second: 1e18, slowness: None }; 2],
        slots_move: false,
        embedding: None,
        loaders: None,
        link: LinkSpec { latency_seconds: 0.0, bytes_per_second: 1e18, dense_bytes: 0.0, embedding_bytes_per_row: 0.0 },
        detection_seconds: 1.0,
    }
}

const FOUR_TIMES: Cause = Cause::Constant { factor: 4.0 };

/// A cluster in which a quarter of the workers is four times slower.
fn stragglers(workers: usize) -> ClusterSpec {
    cluster((0..workers).map(|rank| worker((rank % 4 == 3).then_some(FOUR_TIMES))).collect())
}

fn gba(buffer: usize) -> TrainingMode {
    TrainingMode::Tokens(TokenMode::Gba {
        buffer: BufferSize::new(buffer as u32).unwrap(),
        decay: Decay::Threshold { tolerance: 4 },
        lost_tokens: LostTokens::Vanish,
    })
}

fn all_modes(workers: usize) -> [TrainingMode; 9] {
    [
        TrainingMode::Sync,
        TrainingMode::Pulled,
        TrainingMode::Hybrid { staleness: 2 },
        TrainingMode::Tokens(TokenMode::Async),
        gba(workers),
        TrainingMode::Tokens(TokenMode::HopBs { bound: 2 }),
        TrainingMode::Tokens(TokenMode::HopBw { backups: workers as u32 / 4 }),
        TrainingMode::Tokens(TokenMode::Bsp { aggregate: BufferSize::new(workers.div_ceil(8) as u32).unwrap() }),
        TrainingMode::Shadow(Shadow::default()),
    ]
}

/// A piece for each worker, which only pulled pieces need.
fn simulation(cluster: &ClusterSpec, mode: TrainingMode, seconds: f64) -> Simulation {
    let pieces = cluster.workers.len() as u32;
    Simulation { cluster: cluster.clone(), mode, local_rows: LOCAL_ROWS, pieces, seconds, intervals: 0, seed: 7 }
}

fn run(cluster: &ClusterSpec, mode: TrainingMode, seconds: f64) -> Report {
    simulate(&simulation(cluster, mode, seconds)).unwrap()
}

#[test]
fn with_a_quarter_of_stragglers_gba_keeps_the_speed_of_async() {
    for (workers, seconds) in [(8, 40.0), (80, 20.0), (800, 6.0)] {
        let cluster = stragglers(workers);
        let reports = all_modes(workers).map(|mode| run(&cluster, mode, seconds));
        let rate = |name: &str| reports.iter().find(|r| r.mode == name).unwrap().global_samples_per_second;
        assert!(rate("gba") >= 2.4 * rate("sync"), "{workers} workers: {} and {}", rate("gba"), rate("sync"));
        assert!(rate("gba") >= 0.97 * rate("async"), "{workers} workers: {} and {}", rate("gba"), rate("async"));
        // The fleet's capacity: 6 of 8 workers at full speed, 2 at a quarter.
        let ideal = workers as f64 * 0.8125 * 1e4;
        assert!(rate("async") <= ideal * 1.02 && rate("async") >= ideal * 0.9, "{} of {ideal}", rate("async"));
        assert!(rate("hopBs") < 0.5 * rate("gba"), "hopBs runs at the pace of the slowest");
    }
}

#[test]
fn without_stragglers_all_modes_run_at_nearly_the_same_speed() {
    let cluster = cluster(vec![worker(None); 16]);
    for mode in all_modes(16) {
        let rate = run(&cluster, mode, 20.0).global_samples_per_second;
        assert!((0.93..=1.01).contains(&(rate / 160_000.0)), "{}: {rate}", mode.name());
    }
}

#[test]
fn a_run_repeats_to_the_bit_and_another_seed_is_another_run() {
    let tail = Cause::HeavyTailed { probability: 0.1, shape: 1.2, limit: 50.0 };
    let crashes = Some(Crashes { mean_seconds_between: 5.0, recovery_seconds: 2.0 });
    let cluster = cluster(vec![WorkerSpec { crashes, ..worker([tail]) }; 12]);
    for mode in all_modes(12) {
        let simulation = |seed| Simulation { intervals: 5, seed, ..simulation(&cluster, mode, 20.0) };
        let first = simulate(&simulation(1)).unwrap();
        assert_eq!(first, simulate(&simulation(1)).unwrap());
        assert_ne!(first, simulate(&simulation(2)).unwrap());
        assert!(first.steps > 0);
    }
}

#[test]
fn every_kind_of_trouble_costs_sync_more_than_gba() {
    let mut periodic = vec![worker(None); 16];
    for (i, w) in periodic.iter_mut().enumerate() {
        let offset_seconds = i as f64;
        let cause = Cause::Periodic { factor: 6.0, period_seconds: 16.0, slow_seconds: 1.0, offset_seconds };
        w.slowness = vec![Slowness::always(cause)];
    }
    let tail = Cause::HeavyTailed { probability: 0.05, shape: 1.1, limit: 30.0 };
    let crashes = Some(Crashes { mean_seconds_between: 30.0, recovery_seconds: 3.0 });
    let mut slow_link = vec![worker(None); 16];
    slow_link[5].link_slowness = 200.0;
    let mut one_traced = vec![worker(None); 16];
    one_traced[0] = traced(&[0.05, 0.05, 0.05, 0.5]);
    let troubles = [
        ("periodic", periodic),
        ("heavy tail", vec![worker([tail]); 16]),
        ("crashes", vec![WorkerSpec { crashes, ..worker(None) }; 16]),
        ("slow link", slow_link),
        ("trace", one_traced),
    ];
    for (name, workers) in troubles {
        let cluster = cluster(workers);
        let [sync, gba] = [TrainingMode::Sync, gba(16)].map(|mode| run(&cluster, mode, 60.0));
        let ratio = gba.global_samples_per_second / sync.global_samples_per_second;
        assert!(ratio > 1.2, "{name}: gba is {ratio} times sync");
        assert!(gba.idle < sync.idle, "{name}");
        assert_eq!(gba.lost_tokens > 0, name == "crashes");
    }
}

#[test]
fn a_slow_server_slows_every_mode_and_its_gradients_grow_stale() {
    let mut slow = cluster(vec![worker(None); 16]);
    let fast = run(&slow, gba(16), 30.0);
    slow.servers[1].seconds_per_request = 4e-3;
    let report = run(&slow, gba(16), 30.0);
    // One server serves a pull and a push of each batch, with half of their bytes.
    let bytes = 1e5 + 256.0 * f64::from(LOCAL_ROWS);
    let limit = f64::from(LOCAL_ROWS) / (2.0 * (4e-3 + bytes / 2.0 / 1e10));
    let rate = report.global_samples_per_second;
    assert!(rate <= limit * 1.01 && rate >= limit * 0.95, "{rate} of {limit}");
    assert!(report.idle > fast.idle + 0.4);
}

#[test]
fn sync_has_no_staleness_and_gba_drops_gradients_past_its_tolerance() {
    let sync = run(&stragglers(8), TrainingMode::Sync, 20.0);
    assert_eq!((sync.max_staleness, sync.dropped_batches), (0, 0));
    let mut cluster = cluster(vec![worker(None); 8]);
    cluster.workers[0] = worker([Cause::Constant { factor: 20.0 }]);
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

/// Workers of 10, 10, 20 and 40 ms a batch.
fn unequal() -> [WorkerSpec; 4] {
    [0.01, 0.01, 0.02, 0.04].map(|seconds| traced(&[seconds]))
}

#[test]
fn with_a_free_network_throughput_matches_the_calculation() {
    let rows = f64::from(LOCAL_ROWS);
    let all_speeds = rows * (100.0 + 100.0 + 50.0 + 25.0);
    let pace_of_the_slowest = rows * 4.0 * 25.0;
    let cluster = free_network(unequal().into());
    for (mode, expected) in [
        (TrainingMode::Sync, pace_of_the_slowest),
        (TrainingMode::Hybrid { staleness: 2 }, pace_of_the_slowest),
        (TrainingMode::Tokens(TokenMode::Async), all_speeds),
        (gba(4), all_speeds),
        (TrainingMode::Shadow(Shadow::default()), all_speeds),
        (TrainingMode::Tokens(TokenMode::Bsp { aggregate: BufferSize::new(3).unwrap() }), all_speeds),
        (TrainingMode::Tokens(TokenMode::HopBs { bound: 2 }), pace_of_the_slowest),
        // The third of the four workers sets the pace of the steps.
        (TrainingMode::Tokens(TokenMode::HopBw { backups: 1 }), rows * (3.0 * 50.0 + 25.0)),
    ] {
        let rate = run(&cluster, mode, 40.0).global_samples_per_second;
        assert!((rate / expected - 1.0).abs() < 0.005, "{}: {rate}, not {expected}", mode.name());
    }
}

#[test]
fn an_asynchronous_gradient_is_stale_by_all_steps_applied_meanwhile() {
    // Four batches are always in flight. A batch therefore meets three others on average, at any
    // speeds. While the slowest worker computes one, the others apply 4 + 4 + 2. No speed is a
    // multiple of another, because the result would then depend on ties.
    let workers = [0.0101, 0.0103, 0.0211, 0.0397].map(|seconds| traced(&[seconds]));
    let report = run(&free_network(workers.into()), TrainingMode::Tokens(TokenMode::Async), 40.0);
    assert!((report.mean_staleness - 3.0).abs() < 0.01, "{report:?}");
    assert_eq!(report.max_staleness, 10, "{report:?}");
}

#[test]
fn a_link_takes_its_latency_and_its_bytes_however_many_servers_share_it() {
    for servers in [1, 4] {
        let mut cluster = free_network(vec![worker(None)]);
        cluster.servers = vec![cluster.servers[0]; servers];
        cluster.link.latency_seconds = 2e-3;
        cluster.link.bytes_per_second = 1e8;
        cluster.link.dense_bytes = 1e6;
        let asynchronous = run(&cluster, TrainingMode::Tokens(TokenMode::Async), 40.0);
        // Four latencies (batch and parameters, there and back), the parameters, and the
        // computation. Gradients travel in parallel.
        let expected = f64::from(LOCAL_ROWS) / (4.0 * 2e-3 + 1e-2 + 0.0512);
        let rate = asynchronous.global_samples_per_second;
        assert!((rate / expected - 1.0).abs() < 0.01, "{servers} servers: {rate}, not {expected}");
    }
}

/// An exchange of dense parameters takes place beside training, however long it takes (§3.2).
#[test]
fn in_shadow_no_batch_waits_for_dense_parameters() {
    let mut cluster = free_network(vec![worker(None); 3]);
    cluster.link.bytes_per_second = 1e8;
    cluster.link.dense_bytes = 1e7;
    let [shadow, asynchronous] = [TrainingMode::Shadow(Shadow::default()), TrainingMode::Tokens(TokenMode::Async)]
        .map(|mode| run(&cluster, mode, 40.0).global_samples_per_second);
    let full = 3.0 * f64::from(LOCAL_ROWS) / 0.0512;
    assert!((shadow / full - 1.0).abs() < 0.01, "{shadow}, not {full}");
    // A pull takes 0.1 s.
    let slowed = 3.0 * f64::from(LOCAL_ROWS) / (0.0512 + 0.1);
    assert!((asynchronous / slowed - 1.0).abs() < 0.01, "{asynchronous}, not {slowed}");
}

#[test]
fn all_slowness_of_a_moment_multiplies_and_ends_with_its_time() {
    let mut slow = worker([Cause::Constant { factor: 2.0 }]);
    let cause = Cause::Constant { factor: 5.0 };
    slow.slowness.push(Slowness { cause, from_seconds: 10.0, until_seconds: 20.0 });
    let cluster = free_network(vec![slow, worker(None)]);
    assert_eq!([5.0, 10.0, 19.0, 20.0].map(|at| cluster.slowed_share(at)), [0.5; 4]);
    let simulation = Simulation { intervals: 3, ..simulation(&cluster, TrainingMode::Sync, 30.0) };
    let rates = simulate(&simulation).unwrap().interval_samples_per_second;
    let full = 2.0 * f64::from(LOCAL_ROWS) / 0.0512;
    for (rate, slower) in rates.iter().zip([2.0, 10.0, 2.0]) {
        assert!((rate / full * slower - 1.0).abs() < 0.06, "{rates:?} of {full}");
    }
}

#[test]
fn a_worker_that_is_down_half_the_time_is_idle_half_the_time() {
    let crashes = Some(Crashes { mean_seconds_between: 20.0, recovery_seconds: 20.0 });
    let one = free_network(vec![WorkerSpec { crashes, ..worker(None) }]);
    for mode in [TrainingMode::Sync, gba(1)] {
        let report = run(&one, mode, 20_000.0);
        assert!((report.idle - 0.5).abs() < 0.03, "{}: {}", mode.name(), report.idle);
    }
    // With eight such workers, sync makes progress only while none is down.
    let eight = free_network(vec![WorkerSpec { crashes, ..worker(None) }; 8]);
    let [sync, gba] = [TrainingMode::Sync, gba(8)].map(|mode| run(&eight, mode, 2_000.0));
    assert!(gba.global_samples_per_second > 3.0 * sync.global_samples_per_second, "{gba:?} {sync:?}");
}

/// A few random workers in a random mode, for a few dozen batches.
pub(super) fn random_simulation(seed: u64) -> Simulation {
    let mut random = timeline::random_stream(seed, 1 << 40);
    let mut below = |n: u64| (random.positive_unit() * n as f64) as u64 % n;
    let n = 1 + below(6) as usize;
    let mut workers = Vec::new();
    for rank in 0..n {
        let mut made = match below(4) {
            0 => traced([[0.02, 0.05, 0.3].as_slice(), &[0.04]][below(2) as usize]),
            _ => worker(None),
        };
        let causes = [
            FOUR_TIMES,
            Cause::Periodic { factor: 6.0, period_seconds: 1.0, slow_seconds: 0.3, offset_seconds: rank as f64 * 0.1 },
            Cause::HeavyTailed { probability: 0.2, shape: 1.1, limit: 40.0 },
        ];
        for cause in causes {
            if below(3) == 0 {
                let until_seconds = if below(2) == 0 { 1.0 } else { f64::INFINITY };
                made.slowness.push(Slowness { cause, from_seconds: 0.2, until_seconds });
            }
        }
        if below(4) == 0 {
            made.link_slowness = 30.0;
        }
        if below(3) == 0 {
            let recovery_seconds = [0.0, 0.05, 0.7][below(3) as usize];
            made.crashes = Some(Crashes { mean_seconds_between: 0.5, recovery_seconds });
        }
        workers.push(made);
    }
    let mut cluster = cluster(workers);
    cluster.servers.truncate(1 + below(2) as usize);
    cluster.servers[0].seconds_per_request = [4e-6, 4e-3][below(2) as usize];
    // Shorter than some recoveries and longer than others. So a worker may be declared dead, or be
    // back before that.
    cluster.detection_seconds = 0.1;
    let tokens = |mode| TrainingMode::Tokens(mode);
    let m = BufferSize::new(1 + below(6) as u32).unwrap();
    let lost_tokens = if below(2) == 0 { LostTokens::Vanish } else { LostTokens::Replace };
    let pieces = 1 + below(12) as u32;
    let mode = match below(10) {
        0 => TrainingMode::Sync,
        9 => TrainingMode::Pulled,
        1 => TrainingMode::Hybrid { staleness: 1 + below(3) },
        2 => tokens(TokenMode::Async),
        3 => tokens(TokenMode::HopBs { bound: below(4) }),
        4 => tokens(TokenMode::HopBw { backups: below(n as u64) as u32 }),
        5 => tokens(TokenMode::Bsp { aggregate: m }),
        6 => TrainingMode::Shadow(Shadow::default()),
        _ => tokens(TokenMode::Gba { buffer: m, decay: Decay::Threshold { tolerance: below(4) }, lost_tokens }),
    };
    Simulation { cluster, mode, local_rows: LOCAL_ROWS, pieces, seconds: 2.0, intervals: 4, seed }
}

/// Samples per second of each ten seconds of 120. Server 0 of three is slow from 30 to 80 s, and
/// then costs about as much time as the batches.
fn with_a_slow_server(mode: TrainingMode, slots_move: bool) -> Vec<f64> {
    let mut cluster = cluster(vec![worker(None); 8]);
    let usual = ServerSpec { seconds_per_request: 4e-6, bytes_per_second: 5e8, slowness: None };
    let slowness = Some(MemberSlowness { factor: 60.0, from_seconds: 30.0, until_seconds: 80.0 });
    cluster.servers = vec![ServerSpec { slowness, ..usual }, usual, usual];
    cluster.slots_move = slots_move;
    let simulation = Simulation { intervals: 12, seed: 3, ..simulation(&cluster, mode, 120.0) };
    simulate(&simulation).unwrap().interval_samples_per_second
}

#[test]
fn slots_that_move_away_from_a_slow_server_restore_the_speed() {
    for mode in [TrainingMode::Sync, gba(8), TrainingMode::Tokens(TokenMode::Async)] {
        let [fixed, moving] = [false, true].map(|slots_move| with_a_slow_server(mode, slots_move));
        let name = mode.name();
        assert_eq!(fixed[..3], moving[..3], "{name}: nothing moves before");
        let healthy = fixed[1];
        assert!(fixed[6] < 0.7 * healthy, "{name}: {fixed:?}");
        assert!(moving[6] > 0.85 * healthy && moving[7] > 0.85 * healthy, "{name}: {moving:?}");
        assert!(fixed[10] > 0.95 * healthy && moving[11] > 0.95 * healthy, "{name}: {fixed:?} {moving:?}");
        assert_eq!(moving, with_a_slow_server(mode, true), "{name}: it repeats to the bit");
    }
}

/// Samples per second of each ten seconds of 120, with two embedding workers that take 4 ms for a
/// batch. Embedding worker 0 is twenty times slower from 30 to 80 s.
fn with_a_slow_embedding_worker(mode: TrainingMode, pieces_move: bool) -> Vec<f64> {
    let slow = MemberSlowness { factor: 20.0, from_seconds: 30.0, until_seconds: 80.0 };
    let seconds_per_row = 4e-3 / f64::from(LOCAL_ROWS);
    let embedding = Some(EmbeddingSpec { workers: vec![Some(slow), None], seconds_per_row, pieces_move });
    let cluster = ClusterSpec { embedding, ..cluster(vec![worker(None); 8]) };
    let simulation = Simulation { intervals: 12, seed: 3, ..simulation(&cluster, mode, 120.0) };
    simulate(&simulation).unwrap().interval_samples_per_second
}

#[test]
fn batches_that_move_away_from_a_slow_embedding_worker_restore_the_speed() {
    // In `sync` a step still waits for the slow one whenever it has one of its batches.
    for (mode, share) in [(TrainingMode::Sync, 0.5), (gba(8), 0.75), (TrainingMode::Tokens(TokenMode::Async), 0.75)] {
        let [fixed, moving] = [false, true].map(|pieces_move| with_a_slow_embedding_worker(mode, pieces_move));
        let name = mode.name();
        assert_eq!(fixed[..3], moving[..3], "{name}: nothing moves before");
        let healthy = fixed[1];
        assert!(fixed[6] < 0.4 * healthy, "{name}: {fixed:?}");
        assert!(moving[6] > share * healthy && moving[7] > share * healthy, "{name}: {moving:?}");
        assert!(fixed[10] > 0.95 * healthy && moving[11] > 0.9 * healthy, "{name}: {fixed:?} {moving:?}");
        assert_eq!(moving, with_a_slow_embedding_worker(mode, true), "{name}: it repeats to the bit");
    }
}

/// Two loaders that take 4 ms for a batch of a dense worker, in chunks of 32 of them.
fn loaders(slow: Option<MemberSlowness>, chunks_move: bool) -> LoaderSpec {
    let seconds_per_row = 4e-3 / f64::from(LOCAL_ROWS);
    let chunk_rows = 32 * u64::from(LOCAL_ROWS);
    LoaderSpec { loaders: vec![slow, None], seconds_per_row, chunk_rows, chunk_batches: 4, chunks_move }
}

/// Samples per second of each ten seconds of 120. Loader 0 of two is twenty times slower from 30 to
/// 80 s.
fn with_a_slow_loader(mode: TrainingMode, chunks_move: bool) -> Vec<f64> {
    let slow = MemberSlowness { factor: 20.0, from_seconds: 30.0, until_seconds: 80.0 };
    let loaders = Some(loaders(Some(slow), chunks_move));
    let cluster = ClusterSpec { loaders, ..cluster(vec![worker(None); 8]) };
    let simulation = Simulation { intervals: 12, seed: 3, ..simulation(&cluster, mode, 120.0) };
    simulate(&simulation).unwrap().interval_samples_per_second
}

#[test]
fn chunks_that_move_away_from_a_slow_loader_restore_the_speed() {
    for mode in [TrainingMode::Sync, gba(8), TrainingMode::Tokens(TokenMode::Async)] {
        let [fixed, moving] = [false, true].map(|chunks_move| with_a_slow_loader(mode, chunks_move));
        let name = mode.name();
        assert_eq!(fixed[..3], moving[..3], "{name}: nothing moves before");
        let healthy = fixed[1];
        assert!(fixed[6] < 0.6 * healthy, "{name}: {fixed:?}");
        assert!(moving[6] > 0.8 * healthy && moving[7] > 0.8 * healthy, "{name}: {moving:?}");
        assert!(fixed[10] > 0.95 * healthy && moving[11] > 0.9 * healthy, "{name}: {fixed:?} {moving:?}");
        assert_eq!(moving, with_a_slow_loader(mode, true), "{name}: it repeats to the bit");
    }
}

/// Dense workers need 8 batches in 51.2 ms. Two loaders that take 40 ms for each read 50 batches a
/// second.
#[test]
fn training_is_as_fast_as_its_loaders() {
    let slow = LoaderSpec { seconds_per_row: 40e-3 / f64::from(LOCAL_ROWS), ..loaders(None, true) };
    let cluster = ClusterSpec { loaders: Some(slow), ..free_network(vec![worker(None); 8]) };
    for mode in [TrainingMode::Sync, gba(8)] {
        let rate = run(&cluster, mode, 200.0).global_samples_per_second;
        let expected = 50.0 * f64::from(LOCAL_ROWS);
        assert!((rate / expected - 1.0).abs() < 0.05, "{}: {rate}, not {expected}", mode.name());
    }
}

#[test]
fn the_role_with_the_most_slow_members_is_drawn() {
    let slow = MemberSlowness { factor: 20.0, from_seconds: 30.0, until_seconds: 80.0 };
    let embedding = Some(EmbeddingSpec { workers: vec![Some(slow), None], seconds_per_row: 1e-5, pieces_move: true });
    let cluster = ClusterSpec { embedding, ..stragglers(8) };
    assert_eq!([29.0, 30.0, 79.0, 80.0].map(|at| cluster.slowed_share(at)), [0.25, 0.5, 0.5, 0.25]);
}

/// Each of two embedding workers has every other batch. A step has two of its batches, one after
/// the other.
#[test]
fn a_batch_waits_for_its_turn_at_an_embedding_worker() {
    let seconds_per_row = 0.01 / f64::from(LOCAL_ROWS);
    let embedding = Some(EmbeddingSpec { workers: vec![None; 2], seconds_per_row, pieces_move: false });
    let cluster = ClusterSpec { embedding, ..free_network(vec![worker(None); 4]) };
    let rate = run(&cluster, TrainingMode::Sync, 40.0).global_samples_per_second;
    let expected = 4.0 * f64::from(LOCAL_ROWS) / (0.0512 + 2.0 * 0.01);
    assert!((rate / expected - 1.0).abs() < 0.01, "{rate}, not {expected}");
}

/// Pulled pieces. The last worker takes `factor` times as long for a piece, which may be longer
/// than the run.
fn pulled(workers: usize, pieces: u32, factor: f64) -> Simulation {
    let slow = Cause::Constant { factor };
    let worker = |rank| worker((rank + 1 == workers && factor > 1.0).then_some(slow));
    let cluster = free_network((0..workers).map(worker).collect());
    Simulation { pieces, ..simulation(&cluster, TrainingMode::Pulled, 60.0) }
}

/// Rows a second if a step takes so many pieces one after the other.
fn rate_of(pieces: u32, one_after_the_other: u32) -> f64 {
    f64::from(pieces * LOCAL_ROWS) / (f64::from(one_after_the_other) * 0.0512)
}

#[test]
fn a_step_takes_its_pieces_over_its_workers_rounded_up() {
    for (workers, pieces) in [(4, 12), (4, 4), (4, 8), (4, 9), (3, 12), (2, 5), (8, 24), (16, 40)] {
        let expected = |workers: usize| rate_of(pieces, pieces.div_ceil(workers as u32));
        for (factor, computing) in [(1.0, workers), (1e6, workers - 1)] {
            let report = simulate(&pulled(workers, pieces, factor)).unwrap();
            let (rate, expected) = (report.global_samples_per_second, expected(computing));
            assert!(
                (rate / expected - 1.0).abs() < 0.01,
                "{pieces} pieces, {computing} of {workers}: {rate}, not {expected}"
            );
        }
    }
}

#[test]
fn a_slow_worker_of_four_costs_pulled_pieces_a_quarter() {
    let slowness = |cause| Slowness { cause, from_seconds: 20.0, until_seconds: 60.0 };
    let mut simulation = Simulation { intervals: 10, seconds: 100.0, ..pulled(4, 12, 1.0) };
    simulation.cluster.workers[0].slowness = vec![slowness(Cause::Constant { factor: 33.0 })];
    let rates = simulate(&simulation).unwrap().interval_samples_per_second;
    let healthy = rate_of(12, 3);
    for (interval, share) in [1.0, 1.0, 0.74, 0.75, 0.75, 0.75, 0.95, 1.0, 1.0, 1.0].into_iter().enumerate() {
        // Its last slow piece ends 1.7 s after it has recovered.
        let tolerance = if [2, 6].contains(&interval) { 0.1 } else { 0.02 };
        assert!((rates[interval] / healthy - share).abs() < tolerance, "{interval}: {rates:?} of {healthy}");
    }
    let fixed = Simulation { mode: TrainingMode::Sync, ..simulation };
    let rates = simulate(&fixed).unwrap().interval_samples_per_second;
    assert!(rates[4] < 0.05 * rates[1], "{rates:?}");
}

/// P bytes of dense parameters: a worker receives P once a step, and sends P with each piece.
#[test]
fn a_worker_sends_the_dense_gradients_of_each_piece() {
    let mut simulation = pulled(1, 3, 1.0);
    simulation.cluster.link.bytes_per_second = 1e8;
    simulation.cluster.link.dense_bytes = 1e6;
    // The parameters, three pieces, and the gradients of the last one. The gradients of the others
    // travel meanwhile.
    let expected = f64::from(3 * LOCAL_ROWS) / (0.01 + 3.0 * 0.0512 + 0.01);
    let rate = simulate(&simulation).unwrap().global_samples_per_second;
    assert!((rate / expected - 1.0).abs() < 0.01, "{rate}, not {expected}");
    // Each of two servers receives half of P for each piece and sends half of P for each step.
    simulation.pieces = 2;
    simulation.cluster.link.bytes_per_second = 1e18;
    simulation.cluster.servers.iter_mut().for_each(|server| server.bytes_per_second = 2e6);
    let expected = f64::from(2 * LOCAL_ROWS) / ((2.0 + 1.0) * 0.25 + 0.0512);
    let rate = simulate(&simulation).unwrap().global_samples_per_second;
    assert!((rate / expected - 1.0).abs() < 0.03, "{rate}, not {expected}");
}

#[test]
fn workers_that_die_do_not_stop_the_others_with_pulled_pieces() {
    let crashes = Some(Crashes { mean_seconds_between: 20.0, recovery_seconds: 20.0 });
    let eight = free_network(vec![WorkerSpec { crashes, ..worker(None) }; 8]);
    let [fixed, pulled] = [TrainingMode::Sync, TrainingMode::Pulled].map(|mode| {
        let simulation = Simulation { pieces: 24, ..simulation(&eight, mode, 2_000.0) };
        simulate(&simulation).unwrap().global_samples_per_second
    });
    assert!(pulled > 10.0 * fixed, "{pulled} against {fixed}");
}

#[test]
fn invalid_settings_are_explained() {
    let good = simulation(&stragglers(4), TrainingMode::Sync, 1.0);
    let explain = |change: fn(&mut Simulation)| {
        let mut simulation = good.clone();
        change(&mut simulation);
        simulate(&simulation).unwrap_err().to_string()
    };
    assert!(explain(|s| s.cluster.workers.clear()).contains("worker"));
    assert!(explain(|s| s.cluster.servers.clear()).contains("parameter server"));
    assert!(explain(|s| s.pieces = 0).contains("at least one piece in a global batch"));
    assert!(explain(|s| s.cluster.link.bytes_per_second = 0.0).contains("bandwidth"));
    assert!(explain(|s| s.seconds = f64::NAN).contains("NaN"));
    assert!(explain(|s| s.cluster.workers[0] = traced(&[])).contains("trace"));
    assert!(explain(|s| s.cluster.workers[0] = traced(&[1.0, f64::NAN, 2.0])).contains("NaN"));
    assert!(explain(|s| s.cluster.workers[0] = traced(&[1.0, -1.0])).contains("-1"));
    assert!(explain(|s| s.cluster.servers[0].bytes_per_second = 0.0).contains("server's bandwidth"));
    let slowness = MemberSlowness { factor: 0.0, from_seconds: 0.0, until_seconds: 1.0 };
    let error = simulate(&Simulation {
        cluster: ClusterSpec {
            servers: vec![ServerSpec { slowness: Some(slowness), ..good.cluster.servers[0] }],
            ..good.cluster.clone()
        },
        ..good.clone()
    });
    assert!(error.unwrap_err().to_string().contains("server's slowness"));
    let embedding = |workers, seconds_per_row| {
        let embedding = Some(EmbeddingSpec { workers, seconds_per_row, pieces_move: true });
        let cluster = ClusterSpec { embedding, ..good.cluster.clone() };
        simulate(&Simulation { cluster, ..good.clone() }).unwrap_err().to_string()
    };
    let loaders = |change: fn(&mut LoaderSpec)| {
        let mut spec = loaders(Some(slowness), true);
        change(&mut spec);
        let cluster = ClusterSpec { loaders: Some(spec), ..good.cluster.clone() };
        simulate(&Simulation { cluster, ..good.clone() }).unwrap_err().to_string()
    };
    assert!(loaders(|_| ()).contains("a loader's slowness is 0"));
    assert!(loaders(|spec| spec.loaders.clear()).contains("at least one loader"));
    assert!(loaders(|spec| spec.chunk_rows = 0).contains("at least one row in a chunk"));
    assert!(embedding(Vec::new(), 1e-5).contains("at least one embedding worker"));
    assert!(embedding(vec![None], -1.0).contains("an embedding worker's seconds for a row is -1"));
    assert!(embedding(vec![Some(slowness)], 1e-5).contains("an embedding worker's slowness"));
    assert!(explain(|s| s.mode = TrainingMode::Tokens(TokenMode::HopBw { backups: 4 })).contains("b3"));
}

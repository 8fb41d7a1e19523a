//! Checks invariants of the state machines under random clusters, after every event and at the end.

use super::super::tests::random_simulation;
use super::super::{StepTime, TrainingMode, WorkerSpec, barrier, pulled, shadow};
use super::*;
use crate::gba::Decay;

fn ensure(holds: bool, what: &str) -> Result<(), String> {
    if holds { Ok(()) } else { Err(what.to_owned()) }
}

/// The invariants after every event.
fn check_moment(world: &World<'_>, mode: TokenMode, before: Time) -> Result<(), String> {
    let workers = world.workers.len();
    ensure(world.timeline.now >= before, "the clock went back")?;
    ensure(world.dispatcher.in_flight() <= workers * (UNACKNOWLEDGED + 1), "more batches are out than allowed")?;
    let known = world.dispatcher.step();
    for server in &world.servers {
        ensure(server.fill() < server.capacity().get() as usize, "a full buffer was not applied")?;
        ensure(server.step() >= known, "the coordinator is ahead of a server")?;
    }
    if let TokenMode::HopBs { bound } = mode {
        ensure(world.dispatcher.version_spread() <= bound, "the fastest worker is further ahead than b1")?;
    }
    Ok(())
}

/// The invariants at the end: every gradient and every row is accounted for.
fn check_end(world: &World<'_>, mode: TokenMode) -> Result<(), String> {
    let rows = u64::from(world.simulation.local_rows);
    let ledger = world.dispatcher.ledger();
    for server in &world.servers {
        let (counts, m) = (server.counts(), u64::from(server.capacity().get()));
        ensure(counts.applied == server.step().0 * m, "steps are not M gradients each")?;
        ensure(counts.buffered == counts.applied + server.fill() as u64, "a gradient was lost in the buffer")?;
        ensure((counts.buffered + counts.late) * rows == server.taken().rows(), "rows were taken twice or not at all")?;
        let settled = ledger.trained_rows() + ledger.dropped_rows();
        ensure(settled <= server.taken().rows(), "rows count as settled that a server never saw")?;
        ensure(ledger.dropped_batches() <= counts.late, "batches count as dropped that a server took")?;
        let data = &counts.data_staleness;
        ensure(data.histogram.iter().sum::<u64>() == counts.applied, "the staleness of some gradients is missing")?;
        match mode {
            TokenMode::Gba { decay: Decay::Threshold { tolerance }, .. } => {
                let stale: u64 = data.histogram[tolerance as usize + 1..].iter().sum();
                ensure(counts.excluded == stale, "the excluded gradients are not the stale ones")?;
            }
            TokenMode::HopBw { .. } => {
                ensure(counts.gradient_staleness.max == 0, "hopBw applied a stale gradient")?;
            }
            _ => ensure(counts.excluded + counts.late == 0, "a mode without drops dropped a gradient")?,
        }
    }
    Ok(())
}

fn run_checked(simulation: &Simulation, mode: TokenMode) -> Result<Report, String> {
    let mut world = begin(simulation, mode).map_err(|e| e.to_string())?;
    let mut before = 0;
    while let Some(event) = world.timeline.next() {
        world.handle(event).map_err(|e| e.to_string())?;
        check_moment(&world, mode, before)?;
        before = world.timeline.now;
    }
    check_end(&world, mode)?;
    Ok(world.report(mode))
}

fn check_report(simulation: &Simulation, report: &Report) -> Result<(), String> {
    // No batch of these clusters is faster than its base time.
    let most = |worker: &WorkerSpec| {
        let base = match &worker.step {
            StepTime::Constant { seconds_per_batch, seconds_per_row } => {
                seconds_per_batch + seconds_per_row * f64::from(simulation.local_rows)
            }
            StepTime::Trace { batch_seconds, .. } => batch_seconds.iter().copied().fold(f64::INFINITY, f64::min),
        };
        f64::from(simulation.local_rows) * (simulation.seconds / base).floor()
    };
    let most: f64 = simulation.cluster.workers.iter().map(most).sum();
    let samples = report.global_samples_per_second * simulation.seconds;
    ensure(samples <= most + 1e-6, "more was trained than the workers can")?;
    let counted: f64 = report.interval_samples_per_second.iter().sum::<f64>() * simulation.seconds
        / report.interval_samples_per_second.len() as f64;
    ensure((counted - samples).abs() < 1e-3, "the intervals do not add up")?;
    ensure(report.mean_staleness <= report.max_staleness as f64, "the mean staleness is above the largest")?;
    ensure((0.0..=1.0).contains(&report.idle), "the idle share is no share")?;
    ensure(report.trained_samples_per_second <= most / simulation.seconds + 1e-6, "more was trained than finished")
}

#[test]
fn ten_thousand_random_clusters_violate_no_invariant() {
    let mut modes = std::collections::BTreeMap::new();
    for seed in 0..10_000 {
        let simulation = random_simulation(seed);
        let report = match simulation.mode {
            TrainingMode::Tokens(mode) => run_checked(&simulation, mode),
            TrainingMode::Shadow(_) => shadow::run(&simulation).map_err(|e| e.to_string()),
            TrainingMode::Sync | TrainingMode::Des => barrier::run(&simulation, 0).map_err(|e| e.to_string()),
            TrainingMode::Pulled => pulled::run(&simulation).map_err(|e| e.to_string()),
            TrainingMode::Hybrid { staleness } => barrier::run(&simulation, staleness).map_err(|e| e.to_string()),
        };
        let checked = report.and_then(|report| {
            let name = if simulation.mode == TrainingMode::Pulled { "pulled" } else { report.mode };
            *modes.entry(name).or_insert(0u64) += report.steps;
            check_report(&simulation, &report)
        });
        if let Err(violation) = checked {
            panic!("seed {seed}: {violation} in {simulation:?}");
        }
    }
    assert_eq!(modes.len(), 9, "{modes:?}");
    assert!(modes.values().all(|steps| *steps > 1000), "{modes:?}");
}

//! `rectrain simulate`: predicts the throughput and the staleness of each training mode with
//! workers of unequal speed. It reads a `kind: Simulation` (see docs/guide/simulate.md), and runs
//! the training modes' own state machines under a virtual clock ([`rectrain_modes::simulate`]). It
//! shows the results as a table, as JSON lines, and as a drawing.

mod plan;
mod plot;
mod show;
mod trace;

use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};

use indicatif::ProgressBar;
use parking_lot::Mutex;
use rectrain_crds::simulation::load_simulation;
use rectrain_modes::simulate::{Report, Simulation, SimulationError, simulate};

use self::trace::Trace;
use crate::args::{SimulateArgs, overrides};
use crate::failure::Failure;
use crate::{input, output};

pub(crate) fn run(args: &SimulateArgs) -> Result<(), Failure> {
    let file = input::name(&args.simulation);
    let text = input::read(&args.simulation, "simulation")?;
    let overrides = overrides(&args.set, &args.set_string);
    let user = |error: &dyn std::fmt::Display| Failure::User(error.to_string());
    let document = load_simulation(&text, &file, &overrides).map_err(|error| user(&error))?;
    let trace = document.spec.trace.as_deref().map(read_trace).transpose()?;
    let simulations = plan::simulations(&document, trace.as_ref()).map_err(|error| user(&error))?;
    let reports = run_all(&simulations).map_err(|error| Failure::User(format!("{file}: {error}")))?;
    if args.json {
        output::print(show::json_lines(&simulations, &reports))?;
    } else {
        output::line(show::table(&reports))?;
    }
    if let Some(path) = &args.svg {
        std::fs::write(path, plot::draw(&simulations, &reports))
            .map_err(|error| Failure::User(format!("{}: the drawing cannot be written: {error}", path.display())))?;
    }
    Ok(())
}

fn read_trace(path: &str) -> Result<Trace, Failure> {
    let text = input::read(Path::new(path), "trace")?;
    Trace::parse(&text, path.ends_with(".jsonl")).map_err(|error| Failure::User(format!("{path}: {error}")))
}

/// Runs all simulations on all processors. The reports are in the order of the simulations.
fn run_all(simulations: &[Simulation]) -> Result<Vec<Report>, SimulationError> {
    let threads = std::thread::available_parallelism().map_or(1, usize::from).min(simulations.len());
    let next = AtomicUsize::new(0);
    let results = Mutex::new(Vec::new());
    let bar = ProgressBar::new(simulations.len() as u64);
    std::thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(|| {
                while let Some((index, simulation)) = take(&next, simulations) {
                    let result = simulate(simulation);
                    results.lock().push((index, result));
                    bar.inc(1);
                }
            });
        }
    });
    bar.finish_and_clear();
    let mut results = results.into_inner();
    results.sort_by_key(|(index, _)| *index);
    results.into_iter().map(|(_, result)| result).collect()
}

fn take<'a>(next: &AtomicUsize, simulations: &'a [Simulation]) -> Option<(usize, &'a Simulation)> {
    let index = next.fetch_add(1, Ordering::Relaxed);
    simulations.get(index).map(|simulation| (index, simulation))
}

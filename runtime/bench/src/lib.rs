//! Benchmarks of the runtime's parts and of whole jobs, for the program `rectrain-bench`.
//! A benchmark takes its arguments and returns its figures; [`run`] prints them.
//!
//! Figures are medians of many short rounds, because machines are seldom quiet. Things to compare
//! alternate within one run.

// A print macro panics when its pipe closes.
#![deny(clippy::print_stdout, clippy::print_stderr)]

mod error;
mod figures;
mod flat;
mod job;
mod large;
mod managed;
mod memory;
mod serve;
mod soak;
mod step;
mod store;
mod timing;
mod unique;
mod wire;
mod zipf;

pub use error::BenchError;
pub use flat::{FlatArgs, FlatFigures, bench_flat};
pub use job::{JobArgs, JobFigures, RunFigures, bench_job};
pub use large::{LargeArgs, LargeFigures, bench_large};
pub use managed::ManagedFigures;
pub use memory::{MemoryFigures, bench_memory};
pub use serve::{LoadFigures, ServeArgs, ServeFigures, bench_serve};
pub use soak::{SoakArgs, SoakFigures, SoakPart, SoakedFigures, bench_soak};
pub use step::{BenchedPrecision, BenchedTower, StepArgs, StepFigures, bench_step};
pub use store::{StoreArgs, StoreFigures, bench_store};
pub use wire::{WireArgs, WireFigures, bench_wire};

use std::io::{ErrorKind, Write};

use comfy_table::Table;
use serde::Serialize;

/// The benchmarks, as subcommands.
#[derive(Clone, Debug, clap::Subcommand)]
pub enum Bench {
    /// Measure the embedding store: look-up and update, memory, growth
    Store(StoreArgs),
    /// Compare stores of several sizes, in alternation, with batches of the same ids
    Flat(FlatArgs),
    /// Measure the memory below a store: the same rows read and written without prefetching, and
    /// fresh memory
    Memory(StoreArgs),
    /// Check a table beyond the limits of 32 bits against arithmetic: values, slots, a rows file
    Large(LargeArgs),
    /// Soak a store within a memory budget with ids that keep coming: memory, requests, hit rate
    Managed(SoakArgs),
    /// Measure the dense part of a training step: a tower and its optimizer
    Step(StepArgs),
    /// Compare the data plane with bare TCP, on loopback
    Wire(WireArgs),
    /// Run whole jobs with `rectrain`: a manifest with varied fields, in alternation
    Job(JobArgs),
    /// Put `rectrain serve` under load: the saturating rate, latencies below it, and their floor
    Serve(ServeArgs),
}

/// Runs a benchmark and prints a table, and with `--json` a line of JSON after it.
///
/// # Errors
/// [`BenchError`].
pub fn run(bench: &Bench) -> Result<(), BenchError> {
    match bench {
        Bench::Store(args) => {
            let figures = bench_store(args)?;
            print(&figures.table(), args.json.then_some(&figures))
        }
        Bench::Flat(args) => {
            let figures = bench_flat(args)?;
            print(&flat::figures_table(&figures), args.store.json.then_some(&figures))
        }
        Bench::Memory(args) => {
            let figures = bench_memory(args)?;
            print(&figures.table(), args.json.then_some(&figures))
        }
        Bench::Large(args) => {
            let figures = bench_large(args)?;
            print(&figures.table(), args.json.then_some(&figures))
        }
        Bench::Managed(args) => {
            let figures = bench_soak(args)?;
            print(&figures.table(), args.json.then_some(&figures))
        }
        Bench::Step(args) => {
            let figures = bench_step(args)?;
            print(&figures.table(), args.json.then_some(&figures))
        }
        Bench::Wire(args) => {
            let figures = bench_wire(args)?;
            print(&figures.table(), args.json.then_some(&figures))
        }
        Bench::Job(args) => {
            let figures = bench_job(args)?;
            print(&figures.table(), args.json.then_some(&figures))
        }
        Bench::Serve(args) => {
            let figures = bench_serve(args)?;
            print(&figures.table(), args.json.then_some(&figures))
        }
    }
}

fn print(table: &Table, json: Option<&impl Serialize>) -> Result<(), BenchError> {
    let mut text = format!("{table}\n");
    if let Some(figures) = json {
        text += &(serde_json::to_string(figures)? + "\n");
    }
    let mut output = std::io::stdout().lock();
    match output.write_all(text.as_bytes()).and_then(|()| output.flush()) {
        // The reader has seen enough.
        Err(error) if error.kind() == ErrorKind::BrokenPipe => Ok(()),
        written => Ok(written?),
    }
}

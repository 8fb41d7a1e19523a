//! `rectrain bench` without the rest of `rectrain`, which takes long to build (and without `job`, which needs it):
//! `cargo run --release -p rectrain-bench --example bench -- store --dim 16 --rows 5000000 --json`

use clap::Parser;
use rectrain_bench::{Bench, BenchError};

/// The command's allocator.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

#[derive(Parser)]
#[command(about = "Measures parts of the runtime on this machine")]
struct Arguments {
    #[command(subcommand)]
    bench: Bench,
}

fn main() -> Result<(), BenchError> {
    rectrain_bench::run(&Arguments::parse().bench)
}

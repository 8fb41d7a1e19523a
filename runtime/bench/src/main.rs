//! `rectrain-bench`: measures the runtime's parts, or whole jobs, on this machine.
//!
//! ```sh
//! cargo run --release -p rectrain-bench -- store --dim 16 --rows 5000000 --json
//! ```
//!
//! Exits with 2 if the arguments are wrong, and with 1 on any other failure, as `rectrain` does.

use std::io::Write;
use std::process::ExitCode;

use clap::Parser;
use rectrain_bench::Bench;

/// The allocator of `rectrain`, so that benchmarks measure the memory behaviour of the product.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

/// Measures the runtime on this machine, in parts or as a whole.
#[derive(Parser)]
#[command(name = "rectrain-bench", version, max_term_width = 100)]
struct Arguments {
    #[command(subcommand)]
    bench: Bench,
}

fn main() -> ExitCode {
    let Err(error) = rectrain_bench::run(&Arguments::parse().bench) else { return ExitCode::SUCCESS };
    // If standard error is closed, the exit code still reports the failure.
    let _unseen = writeln!(std::io::stderr(), "rectrain-bench: {error}");
    ExitCode::from(if error.is_user_error() { 2 } else { 1 })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_command_line_is_consistent() {
        use clap::CommandFactory;
        Arguments::command().debug_assert();
    }
}

//! The `rectrain` command. `rectrain run job.yaml` trains a job on this machine. Each role has a
//! subcommand that runs one process of a job. The other subcommands help with manifests, data and
//! checkpoints. This crate is thin: the runtime's crates do the work.

mod args;
mod checkpoint;
#[cfg(feature = "cluster")]
mod cluster;
mod data;
mod devices;
mod failure;
mod job;
mod mode;
mod parent;
mod policy;
mod predict;
mod processes;
mod role;
mod run;
mod running;
mod saving;
mod scale;
mod show;
mod signal;
mod simulate;
mod slow;

use std::io::IsTerminal;
use std::process::ExitCode;

use clap::Parser;
use tracing_subscriber::EnvFilter;

use crate::args::{Cli, Command, LogFormat};
use crate::failure::{Failure, INTERRUPTED};

/// mimalloc keeps freed pages for the next step. The system's allocator would return them, and each
/// step would fault them in again.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

fn main() -> ExitCode {
    let cli = Cli::parse();
    log_to_stderr(cli.log);
    match execute(cli.command) {
        Ok(()) => ExitCode::SUCCESS,
        Err(Failure::User(message)) => end(2, &message),
        Err(Failure::Diverged(message)) => end(3, &message),
        Err(Failure::Failed(message)) => end(1, &message),
        Err(Failure::Interrupted(message)) => end(INTERRUPTED, &message),
    }
}

fn execute(command: Command) -> Result<(), Failure> {
    match command {
        Command::Run(args) => run::run(&args),
        Command::Validate(job) => job::validate(&job),
        Command::Explain { topic } => job::explain(&topic),
        Command::Simulate(args) => simulate::run(&args),
        Command::Policy { command } => policy::run(&command),
        Command::Data { set } => data::prepare(&set),
        Command::Mode(args) => mode::mode(&args),
        Command::Scale(args) => scale::scale(&args),
        Command::Checkpoint { command } => checkpoint::run(&command),
        Command::Predict(args) => predict::run(&args),
        Command::Devices { json } => devices::show(json),
        Command::Coordinator(args) => role::coordinate(&args),
        Command::Member(member) => role::run_member(member.role, &member.args),
        #[cfg(feature = "cluster")]
        Command::Status(job) => cluster::status(&job),
        #[cfg(feature = "cluster")]
        Command::Logs(args) => cluster::show_logs(&args),
    }
}

fn end(code: u8, message: &str) -> ExitCode {
    show::say(&format!("rectrain: {message}"));
    ExitCode::from(code)
}

fn log_to_stderr(format: LogFormat) {
    let filter = EnvFilter::try_from_env("RECTRAIN_LOG").unwrap_or_else(|_| EnvFilter::new("warn"));
    let colours = std::io::stderr().is_terminal();
    let logs = tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr).with_ansi(colours);
    // A report that a line cannot be written would fail for the same reason.
    let logs = logs.log_internal_errors(false);
    match format {
        LogFormat::Text => logs.init(),
        LogFormat::Json => logs.json().init(),
    }
}

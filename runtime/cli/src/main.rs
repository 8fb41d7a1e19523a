//! The `rectrain` command. `rectrain run job.yaml` trains a job on this machine. Each role has a
//! subcommand that runs one process of a job. The other subcommands help with manifests, data and
//! checkpoints. This crate is thin: the runtime's crates do the work.

// A print macro panics when its pipe closes.
#![deny(clippy::print_stdout, clippy::print_stderr)]

mod args;
mod browser;
mod checkpoint;
#[cfg(feature = "cluster")]
mod cluster;
mod data;
mod devices;
mod failure;
mod history;
mod human;
mod input;
mod job;
mod link;
mod local;
mod manual;
mod mode;
mod outlook;
mod output;
mod page;
#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "an unwrap in a test is an assertion")]
mod pages;
mod parent;
mod partial;
mod placement;
mod policy;
mod predict;
mod preview;
mod processes;
mod profile;
mod progress;
mod publishing;
mod record;
mod replay;
mod role;
mod row_files;
mod row_progress;
mod run;
mod running;
mod runs;
mod saving;
mod scale;
mod sentences;
mod serve;
mod serving_ps;
mod show;
mod signal;
mod simulate;
mod sizing;
mod slow;
mod svg;
mod tensorboard;
mod trained;

use std::process::ExitCode;

use clap::Parser;
use tracing_subscriber::EnvFilter;

use crate::args::{Cli, Command, LogFormat};
use crate::failure::{Failure, USER};

/// mimalloc keeps freed pages for the next step. The system's allocator would return them, and each
/// step would fault them in again.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

fn main() -> ExitCode {
    let cli = match Cli::try_parse() {
        Ok(cli) => cli,
        Err(answer) => return show_usage(&answer),
    };
    log_to_stderr(cli.log);
    match execute(cli.command) {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => end(failure.exit_code(), failure.message()),
    }
}

fn execute(command: Command) -> Result<(), Failure> {
    match command {
        Command::Run(args) => run::run(&args),
        Command::Runs { command } => runs::run(&command),
        Command::Validate(args) => job::validate(&args),
        Command::Explain { topic, recursive } => job::explain(&topic, recursive),
        Command::Simulate(args) => simulate::run(&args),
        Command::Plan(args) => sizing::run(&args),
        Command::Policy { command } => policy::run(&command),
        Command::Data { command } => data::run(&command),
        Command::Mode(args) => mode::mode(&args),
        Command::Scale(args) => scale::scale(&args),
        Command::Checkpoint { command } => checkpoint::run(&command),
        Command::Predict(args) => predict::run(&args),
        Command::Serve(args) => serve::run(&args),
        Command::ServingPs(args) => serving_ps::run(&args),
        Command::Devices { json } => devices::show(json),
        Command::Coordinator(args) => role::coordinate(&args),
        Command::Member(member) => role::run_member(member.role, &member.args),
        Command::Status(job) => local::status(&job),
        Command::Logs(args) => local::logs(&args),
        Command::Page(args) => page::page(&args),
        Command::Completion { shell } => manual::completion(shell),
        Command::Man { output } => manual::man(output.as_deref()),
        Command::Version => Ok(output::line(concat!("rectrain ", env!("CARGO_PKG_VERSION")))?),
    }
}

/// Prints help or the version to standard output, and an error of the command line to standard
/// error.
fn show_usage(answer: &clap::Error) -> ExitCode {
    let text = answer.render();
    if answer.use_stderr() {
        let text = if output::has_colours(&std::io::stderr()) { text.ansi().to_string() } else { text.to_string() };
        output::say(text.trim_end());
        return ExitCode::from(USER);
    }
    let text = if output::has_colours(&std::io::stdout()) { text.ansi().to_string() } else { text.to_string() };
    match output::line(text.trim_end()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => end(1, &error.to_string()),
    }
}

fn end(code: u8, message: &str) -> ExitCode {
    output::say(&format!("{} {message}", output::error_label("rectrain:")));
    ExitCode::from(code)
}

fn log_to_stderr(format: LogFormat) {
    let filter = EnvFilter::try_from_env("RECTRAIN_LOG").unwrap_or_else(|_| EnvFilter::new("warn"));
    let colours = output::has_colours(&std::io::stderr());
    let logs = tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr).with_ansi(colours);
    // A report that a line cannot be written would fail for the same reason.
    let logs = logs.log_internal_errors(false);
    match format {
        LogFormat::Text => logs.init(),
        LogFormat::Json => logs.json().init(),
    }
}

//! Running cargo in the workspace.

use std::process::Command;

use crate::workspace::workspace;
use crate::{HarnessError, say};

/// The selection of packages and targets that the tests build too. Features are resolved by
/// selection, so another selection would build dependencies a second time.
const PROGRAMS: [&str; 5] = ["build", "--release", "--workspace", "--bins", "--tests"];

/// Builds every program of the workspace.
///
/// # Errors
/// See [`cargo`].
pub fn build_programs() -> Result<(), HarnessError> {
    cargo(&PROGRAMS, "the build failed")
}

/// Builds every program and every example of the workspace.
///
/// # Errors
/// See [`cargo`].
pub fn build_programs_and_examples() -> Result<(), HarnessError> {
    cargo(&[PROGRAMS.as_slice(), &["--examples"]].concat(), "the build failed")
}

/// Runs cargo in the workspace; `hint` says how to repair a failure.
///
/// # Errors
/// [`HarnessError::NotStarted`] without cargo, [`HarnessError::Failed`] if it fails.
pub fn cargo(arguments: &[&str], hint: &str) -> Result<(), HarnessError> {
    run(cargo_command(), arguments, hint)
}

/// cargo without arguments, with the workspace as working directory.
#[must_use]
pub fn cargo_command() -> Command {
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let mut cargo = Command::new(cargo);
    // `cargo run` describes this program's package in these variables. Build scripts that read them
    // would run again each time.
    for (name, _) in std::env::vars_os() {
        if name.to_str().is_some_and(|name| name.starts_with("CARGO_PKG_") || name.starts_with("CARGO_MANIFEST_")) {
            cargo.env_remove(&name);
        }
    }
    cargo.current_dir(workspace());
    cargo
}

/// Runs a prepared cargo command with these arguments; `hint` says how to repair a failure.
///
/// # Errors
/// See [`cargo`].
pub fn run(mut cargo: Command, arguments: &[&str], hint: &str) -> Result<(), HarnessError> {
    let command = shown(arguments);
    say(&command);
    let status = cargo.args(arguments).status().map_err(not_started(arguments))?;
    if status.success() {
        return Ok(());
    }
    Err(HarnessError::Failed { command: format!("`{command}`"), status, output: hint.to_owned() })
}

/// cargo's command line, for messages.
#[must_use]
pub fn shown(arguments: &[&str]) -> String {
    format!("cargo {}", arguments.join(" "))
}

/// Turns a system error into [`HarnessError::NotStarted`], for `map_err`.
pub fn not_started(arguments: &[&str]) -> impl FnOnce(std::io::Error) -> HarnessError {
    let command = format!("`{}`", shown(arguments));
    move |source| HarnessError::NotStarted { command, hint: "install Rust with rustup", source }
}

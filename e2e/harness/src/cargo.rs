//! Running cargo in the workspace.

use std::io::{BufRead, BufReader};
use std::process::{Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};

use crate::workspace::workspace;
use crate::{HarnessError, say};

/// The selection of packages and targets that the tests build too. Features are resolved by
/// selection, so another selection would build dependencies a second time.
const PROGRAMS: [&str; 5] = ["build", "--release", "--workspace", "--bins", "--tests"];

/// Builds every program of the workspace, once per process: a trial installs the chart several
/// times, and each time cargo would look at all sources.
///
/// # Errors
/// See [`cargo`].
pub fn build_programs() -> Result<(), HarnessError> {
    static ARE_BUILT: AtomicBool = AtomicBool::new(false);
    if !ARE_BUILT.load(Ordering::Relaxed) {
        cargo(&PROGRAMS, "the build failed")?;
        ARE_BUILT.store(true, Ordering::Relaxed);
    }
    Ok(())
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

/// Runs `cargo test` and prints its usual output. Returns the reports (`SKIPPED: …`) of tests that
/// succeeded, but skipped a part. libtest hides them, unless it is asked for the output of
/// successful tests.
///
/// # Errors
/// See [`cargo`].
pub fn cargo_test(arguments: &[&str]) -> Result<Vec<String>, HarnessError> {
    let arguments = [arguments, &["--", "--show-output"]].concat();
    say(shown(&arguments));
    let mut tests = cargo_command();
    let mut tests = tests.args(&arguments).stdout(Stdio::piped()).spawn().map_err(not_started(&arguments))?;
    let output = tests.stdout.take().ok_or(HarnessError::NoPipe { program: "cargo", stream: "output" })?;
    let mut filter = TestOutput::default();
    for line in BufReader::new(output).split(b'\n').map_while(Result::ok) {
        let line = String::from_utf8_lossy(&line);
        if filter.is_shown(&line) {
            println!("{line}");
        }
    }
    let status = tests.wait().map_err(HarnessError::io("wait for", "cargo test"))?;
    if status.success() {
        return Ok(filter.skipped);
    }
    let output = "a test failed: its output is above".to_owned();
    Err(HarnessError::Failed { command: format!("`{}`", shown(&arguments)), status, output })
}

/// Separates the output of successful tests from the rest.
#[derive(Debug, Default)]
struct TestOutput {
    is_of_successes: bool,
    skipped: Vec<String>,
}

impl TestOutput {
    /// Takes the next line; returns whether it is shown without `--show-output`.
    fn is_shown(&mut self, line: &str) -> bool {
        const REPORT: &str = "SKIPPED: ";
        if line == "successes:" {
            self.is_of_successes = true;
        } else if line == "failures:" || line.starts_with("test result:") {
            self.is_of_successes = false;
        }
        if self.is_of_successes
            && let Some(report) = line.get(..REPORT.len()).filter(|start| start.eq_ignore_ascii_case(REPORT))
        {
            self.skipped.push(line[report.len()..].to_owned());
        }
        !self.is_of_successes
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reports_of_skipped_parts_are_found_in_hidden_output() {
        let output = "running 1 test\ntest a ... ok\n\nsuccesses:\n\n---- a stdout ----\nSKIPPED: there is no helm\n\
                      skipped: mounting takes root\n\n\nsuccesses:\n    a\n\ntest result: ok. 1 passed\n";
        let mut filter = TestOutput::default();
        let shown: Vec<&str> = output.lines().filter(|line| filter.is_shown(line)).collect();
        assert_eq!(shown, ["running 1 test", "test a ... ok", "", "test result: ok. 1 passed"]);
        assert_eq!(filter.skipped, ["there is no helm", "mounting takes root"]);
    }
}

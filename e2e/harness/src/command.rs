//! Running other programs.

use std::ffi::OsStr;
use std::process::{Child, Command, Stdio};

use crate::{HarnessError, say};

/// A command with its arguments and an empty standard input.
pub fn command<S: AsRef<OsStr>>(program: impl AsRef<OsStr>, arguments: impl IntoIterator<Item = S>) -> Command {
    let mut command = Command::new(program);
    command.args(arguments).stdin(Stdio::null());
    command
}

/// Runs a command and returns its standard output.
///
/// # Errors
/// [`HarnessError::NotStarted`]; [`HarnessError::Failed`] with both of its outputs.
pub fn output(command: &mut Command) -> Result<String, HarnessError> {
    let output = command.output().map_err(not_started(command))?;
    let printed = String::from_utf8_lossy(&output.stdout).into_owned();
    if output.status.success() {
        return Ok(printed);
    }
    let complaint = String::from_utf8_lossy(&output.stderr);
    let output_text = format!("{} {}", printed.trim(), complaint.trim());
    Err(HarnessError::Failed { command: shown(command), status: output.status, output: output_text })
}

/// Runs a command that writes to the terminal.
///
/// # Errors
/// [`HarnessError::NotStarted`], [`HarnessError::Failed`].
pub fn visible(command: &mut Command) -> Result<(), HarnessError> {
    say(shown(command));
    let status = command.status().map_err(not_started(command))?;
    if status.success() {
        return Ok(());
    }
    Err(HarnessError::Failed { command: shown(command), status, output: "its output is above".to_owned() })
}

/// Starts a command in the background.
///
/// # Errors
/// [`HarnessError::NotStarted`].
pub fn start(command: &mut Command) -> Result<Child, HarnessError> {
    command.spawn().map_err(not_started(command))
}

/// Turns a system error into [`HarnessError::NotStarted`], for `map_err`.
fn not_started(command: &Command) -> impl FnOnce(std::io::Error) -> HarnessError + use<> {
    let command = shown(command);
    move |source| HarnessError::NotStarted { command, hint: "is it installed, and on the PATH?", source }
}

/// The command line as a person would type it.
#[must_use]
pub fn shown(command: &Command) -> String {
    let words = std::iter::once(command.get_program()).chain(command.get_args());
    let words: Vec<_> = words.map(|word| word.to_string_lossy().into_owned()).collect();
    format!("`{}`", words.join(" "))
}

/// A background process that is killed when this value is dropped.
#[derive(Debug)]
pub struct Running(pub Child);

impl Running {
    /// Starts a command; the process ends with the returned value.
    ///
    /// # Errors
    /// [`HarnessError::NotStarted`].
    pub fn start(command: &mut Command) -> Result<Self, HarnessError> {
        start(command).map(Self)
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        // The process may have ended by itself.
        let _killed = self.0.kill();
        let _waited = self.0.wait();
    }
}

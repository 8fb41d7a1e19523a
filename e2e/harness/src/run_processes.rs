//! The processes of a `rectrain run --processes`: their output, their death, and the end of the
//! run.

use std::io::{BufRead, BufReader, Read};
use std::process::{Child, Command, ExitStatus};
use std::sync::mpsc::Sender;

use crate::HarnessError;

/// Reads the run's output in a thread. Each line for which `parse` returns a value is sent to `to`,
/// until the output ends or the receiver is dropped.
///
/// # Errors
/// [`HarnessError::NoPipe`] without an output.
pub fn forward_lines<T: Send + 'static>(
    output: Option<impl Read + Send + 'static>,
    to: Sender<T>,
    parse: impl Fn(&str) -> Option<T> + Send + 'static,
) -> Result<(), HarnessError> {
    let output = output.ok_or(HarnessError::NoPipe { program: "rectrain", stream: "output" })?;
    std::thread::spawn(move || {
        for line in BufReader::new(output).lines().map_while(Result::ok) {
            if let Some(value) = parse(&line)
                && to.send(value).is_err()
            {
                return;
            }
        }
    });
    Ok(())
}

/// Waits for the run to end; kills it first if following it has failed.
///
/// # Errors
/// [`HarnessError::Io`] if the system cannot wait for it.
pub fn end<T, E>(run: &mut Child, followed: &Result<T, E>) -> Result<ExitStatus, HarnessError> {
    if followed.is_err() {
        // The run may have ended by itself.
        let _killed = run.kill();
    }
    run.wait().map_err(HarnessError::io("wait for", "rectrain"))
}

/// Kills a process with SIGKILL; returns false if it has just ended by itself.
///
/// # Errors
/// [`HarnessError::NotStarted`] if `kill` cannot be run.
pub fn kill(process: u32) -> Result<bool, HarnessError> {
    let killed = Command::new("kill").args(["-9", &process.to_string()]).status();
    let killed = killed.map_err(|source| HarnessError::NotStarted {
        command: format!("`kill -9 {process}`"),
        hint: "is procps installed?",
        source,
    })?;
    Ok(killed.success())
}

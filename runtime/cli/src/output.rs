//! The one writer of standard output and standard error. No other module prints, so no command
//! panics when a pipe closes or a disk is full.
//!
//! A reader may close the pipe before the end (`rectrain explain spec | head`). The command then
//! does the rest of its work silently, and its exit code tells the result as always. Any other
//! error of a write fails the command.

use std::fmt::Display;
use std::io::{self, ErrorKind, IsTerminal, Write};
use std::os::fd::AsFd;

/// Standard output cannot be written, for example because a disk is full.
#[derive(Debug, thiserror::Error)]
#[error("cannot write to standard output: {0}")]
pub(crate) struct OutputError(#[from] io::Error);

/// Prints a line to standard output.
///
/// # Errors
/// If standard output cannot be written. A closed pipe is no error.
pub(crate) fn line(text: impl Display) -> Result<(), OutputError> {
    print(format_args!("{text}\n"))
}

/// Prints a text that ends its own lines to standard output.
///
/// # Errors
/// As [`line`].
pub(crate) fn print(text: impl Display) -> Result<(), OutputError> {
    match write(text) {
        Err(error) if error.kind() == ErrorKind::BrokenPipe => Ok(()),
        written => written.map_err(OutputError),
    }
}

/// Writes a text to standard output at once. For results that must not be lost: a closed pipe is an
/// error here.
///
/// # Errors
/// The operating system's error.
pub(crate) fn write(text: impl Display) -> io::Result<()> {
    let text = text.to_string();
    let mut output = io::stdout().lock();
    output.write_all(text.as_bytes())?;
    output.flush()
}

/// Standard output for results of many lines. A closed pipe is no error, as in [`line`].
pub(crate) struct Results;

impl Write for Results {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        match io::stdout().write(bytes) {
            Err(error) if error.kind() == ErrorKind::BrokenPipe => Ok(bytes.len()),
            written => written,
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        match io::stdout().flush() {
            Err(error) if error.kind() == ErrorKind::BrokenPipe => Ok(()),
            flushed => flushed,
        }
    }
}

/// Prints a line to standard error. If the line cannot be written, for example to a full disk, the
/// command continues, and its exit code tells the result.
pub(crate) fn say(text: &str) {
    let _reader_gone = writeln!(io::stderr(), "{text}");
}

/// Checks that standard output can be written, before anything is trained. An empty write fails on
/// a full device and on a file that is open for reading only, and adds nothing to the output.
///
/// # Errors
/// The operating system's error.
pub(crate) fn check() -> io::Result<()> {
    let output = io::stdout().as_fd().try_clone_to_owned()?;
    std::fs::File::from(output).write(&[]).map(|_written| ())
}

/// A word before an error on standard error: red where there are colours.
pub(crate) fn error_label(text: &str) -> String {
    paint(text, "1;31")
}

/// A word before a warning on standard error: yellow where there are colours.
pub(crate) fn warning_label(text: &str) -> String {
    paint(text, "33")
}

/// An important text on standard error: bold where there are colours.
pub(crate) fn bold(text: &str) -> String {
    paint(text, "1")
}

fn paint(text: &str, code: &str) -> String {
    if has_colours(&io::stderr()) { format!("\x1b[{code}m{text}\x1b[0m") } else { text.to_owned() }
}

/// Whether colours may be written to `stream`: it is a terminal, and `NO_COLOR` (no-color.org) is
/// not set.
pub(crate) fn has_colours(stream: &impl IsTerminal) -> bool {
    stream.is_terminal() && std::env::var_os("NO_COLOR").is_none_or(|value| value.is_empty())
}

//! Running other programs, and finding processes that run.

use std::ffi::OsStr;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

/// A command with its arguments.
pub(super) fn command<S: AsRef<OsStr>>(program: impl AsRef<OsStr>, arguments: impl IntoIterator<Item = S>) -> Command {
    let mut command = Command::new(program);
    command.args(arguments).stdin(Stdio::null());
    command
}

/// Runs a command and gives what it printed; if it fails, the error says what it was and what it complained of.
pub(super) fn output(command: &mut Command) -> Result<String, String> {
    let output = command.output().map_err(|error| format!("cannot run {}: {error}", shown(command)))?;
    let printed = String::from_utf8_lossy(&output.stdout).into_owned();
    if output.status.success() {
        return Ok(printed);
    }
    let complaint = String::from_utf8_lossy(&output.stderr);
    Err(format!("{} failed ({}): {} {}", shown(command), output.status, printed.trim(), complaint.trim()))
}

/// Runs a command whose output the user sees.
pub(super) fn visible(command: &mut Command) -> Result<(), String> {
    eprintln!("xtask: {}", shown(command));
    let status = command.status().map_err(|error| format!("cannot run {}: {error}", shown(command)))?;
    if status.success() { Ok(()) } else { Err(format!("{} failed ({status})", shown(command))) }
}

/// As a person would type it.
fn shown(command: &Command) -> String {
    let words = std::iter::once(command.get_program()).chain(command.get_args());
    let words: Vec<_> = words.map(|word| word.to_string_lossy().into_owned()).collect();
    format!("`{}`", words.join(" "))
}

/// Tries until it works; after `patience`, the last failure.
pub(super) fn eventually<T>(
    patience: Duration,
    what: &str,
    mut attempt: impl FnMut() -> Result<T, String>,
) -> Result<T, String> {
    let started = Instant::now();
    loop {
        match attempt() {
            Ok(value) => return Ok(value),
            Err(error) if started.elapsed() > patience => {
                return Err(format!("{what}: not within {} s: {error}", patience.as_secs()));
            }
            Err(_) => std::thread::sleep(Duration::from_millis(200)),
        }
    }
}

/// Something that is tried, and what is wrong if it does not work.
pub(super) type Trial<'a> = Box<dyn FnOnce() -> Result<(), String> + Send + 'a>;

/// Tries all at the same time, each to its end; what is wrong with each of those that do not work.
pub(super) fn side_by_side(trials: Vec<Trial<'_>>) -> Result<(), String> {
    let wrong: Vec<String> = std::thread::scope(|scope| {
        let started: Vec<_> = trials.into_iter().map(|trial| scope.spawn(trial)).collect();
        let ended = started.into_iter().map(|trial| trial.join().unwrap_or_else(|_| Err("it panicked".to_owned())));
        ended.filter_map(Result::err).collect()
    });
    if wrong.is_empty() { Ok(()) } else { Err(wrong.join("; ")) }
}

/// The processes of this machine, those in other namespaces included, and the words they were started with.
pub(super) fn all() -> impl Iterator<Item = (u32, Vec<String>)> {
    let entries = std::fs::read_dir("/proc").into_iter().flatten().flatten();
    entries.filter_map(|entry| {
        let process = entry.file_name().to_str()?.parse().ok()?;
        let line = std::fs::read(entry.path().join("cmdline")).ok()?;
        let words = line.strip_suffix(&[0]).unwrap_or(&line).split(|byte| *byte == 0);
        Some((process, words.map(|word| String::from_utf8_lossy(word).into_owned()).collect()))
    })
}

/// Identifies the process's namespace of process ids.
pub(super) fn pid_namespace(process: u32) -> Option<PathBuf> {
    std::fs::read_link(format!("/proc/{process}/ns/pid")).ok()
}

/// Memory that the process holds, in bytes.
pub(super) fn resident_bytes(process: u32) -> Option<u64> {
    let status = std::fs::read_to_string(format!("/proc/{process}/status")).ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"))?;
    Some(line.split_whitespace().next()?.parse::<u64>().ok()? * 1024)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_tried_side_by_side_runs_at_the_same_time_and_all_failures_are_told() {
        let both = std::sync::Barrier::new(2);
        let meets = |result: Result<(), String>| -> Trial<'_> {
            let both = &both;
            Box::new(move || {
                both.wait();
                result
            })
        };
        assert_eq!(side_by_side(vec![meets(Ok(())), meets(Ok(()))]), Ok(()));
        let failures = vec![meets(Err("one".to_owned())), meets(Err("two".to_owned()))];
        assert_eq!(side_by_side(failures), Err("one; two".to_owned()));
    }
}

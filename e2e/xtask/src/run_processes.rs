//! The processes of a `rectrain run --processes`: what they say, which they are, and their end.

use std::io::{BufRead, BufReader, Read};
use std::process::{Child, Command, ExitStatus};
use std::sync::mpsc::Sender;

/// Has what is `read` of each line of a run's output sent as it comes, until the run or the receiver is gone.
pub(crate) fn tell<T: Send + 'static>(
    output: Option<impl Read + Send + 'static>,
    to: Sender<T>,
    read: impl Fn(&str) -> Option<T> + Send + 'static,
) -> Result<(), String> {
    let output = output.ok_or("rectrain has no output")?;
    std::thread::spawn(move || {
        for line in BufReader::new(output).lines().map_while(Result::ok) {
            if let Some(said) = read(&line)
                && to.send(said).is_err()
            {
                return;
            }
        }
    });
    Ok(())
}

/// Waits for the run to end; ends it if following it has failed.
pub(crate) fn end<T>(run: &mut Child, followed: &Result<T, String>) -> Result<ExitStatus, String> {
    if followed.is_err() {
        // It is ended already, or ends here.
        let _ended = run.kill();
    }
    run.wait().map_err(|error| format!("cannot wait for rectrain: {error}"))
}

/// Kills a process; false if it has ended by itself in this moment.
pub(crate) fn kill(process: u32) -> Result<bool, String> {
    let killed = Command::new("kill").args(["-9", &process.to_string()]).status();
    Ok(killed.map_err(|error| format!("cannot run kill: {error}"))?.success())
}

/// Processes and their roles.
pub(crate) fn children_of(parent: u32) -> Vec<(u32, String)> {
    let Ok(processes) = std::fs::read_dir("/proc") else { return Vec::new() };
    let mut children = Vec::new();
    for entry in processes.flatten() {
        let Some(process) = entry.file_name().to_str().and_then(|name| name.parse::<u32>().ok()) else { continue };
        let Ok(stat) = std::fs::read_to_string(entry.path().join("stat")) else { continue };
        // After the name in brackets: state, parent.
        let mut fields = stat.rsplit(')').next().unwrap_or_default().split_whitespace();
        let (state, parent_of) = (fields.next(), fields.next().and_then(|parent| parent.parse::<u32>().ok()));
        if parent_of == Some(parent)
            && state != Some("Z")
            && let Ok(line) = std::fs::read(entry.path().join("cmdline"))
        {
            // One that has no words yet is about to become what it was started as.
            if let Some(role) = line.split(|byte| *byte == 0).nth(1) {
                children.push((process, String::from_utf8_lossy(role).into_owned()));
            }
        }
    }
    children.sort_unstable();
    children
}

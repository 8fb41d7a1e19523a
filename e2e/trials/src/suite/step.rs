//! A step of the suite: a `cargo xtask cluster` command as a process of its own, with a log and a
//! time limit.

use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Stdio};
use std::time::{Duration, Instant};

use rectrain_bring_up::{Paths, kubectl};
use rectrain_harness::command::{command, output, start as start_command};
use rectrain_harness::files::log_file;
use rectrain_harness::times::Times;
use rectrain_harness::workspace::built;
use rectrain_harness::{HarnessError, say, skips};

use super::guard::Guard;
use crate::TrialError;

/// Lines of a log that are shown for a failed step.
const LAST_LINES: usize = 40;

/// A command of `cargo xtask cluster`.
#[derive(Debug, Clone, Copy)]
pub(super) struct Step {
    pub(super) words: &'static [&'static str],
    pub(super) patience: Duration,
}

/// A step with its time limit in seconds.
pub(super) const fn step(words: &'static [&'static str], seconds: u64) -> Step {
    Step { words, patience: Duration::from_secs(seconds) }
}

impl Step {
    fn name(&self) -> String {
        self.words.join(" ")
    }

    fn log(&self, paths: &Paths) -> PathBuf {
        paths.root().join("test-log").join(format!("{}.log", self.words[0]))
    }

    fn failed(&self, problem: String) -> TrialError {
        TrialError::SuiteStep { step: self.name(), problem }
    }

    /// Starts the step in a process group of its own, so that its descendants can be killed with
    /// it.
    pub(super) fn start(&self, paths: &Paths) -> Result<Child, HarnessError> {
        let log = self.log(paths);
        let out = log_file(&log)?;
        let also_out = out.try_clone().map_err(HarnessError::io("write the log", log.display()))?;
        let mut own = command(built("xtask")?, ["cluster"]);
        start_command(own.args(self.words).stdout(out).stderr(also_out).process_group(0))
    }
}

/// Runs a step to its end, or kills it at its time limit. Records its time, and repeats its skips.
pub(super) fn run(paths: &Paths, guard: &mut Guard, times: &mut Times, step: Step) -> Result<(), TrialError> {
    let name = step.name();
    let mut child = step.start(paths)?;
    guard.watch(&child);
    let started = Instant::now();
    let status = loop {
        match child.try_wait().map_err(HarnessError::io("wait for", &name))? {
            Some(status) => break Some(status),
            None if started.elapsed() > step.patience => break None,
            None => std::thread::sleep(Duration::from_millis(100)),
        }
    };
    let took = started.elapsed();
    times.record(&format!("cluster: {name}"), took);
    let seconds = took.as_secs_f64();
    match status {
        Some(status) if status.success() => {
            say(format!("the cluster's step `{name}` took {seconds:.0} s"));
            Ok(skips::repeat(&String::from_utf8_lossy(&std::fs::read(step.log(paths)).unwrap_or_default()))?)
        }
        Some(status) => Err(step.failed(format!("ended with {status} after {seconds:.0} s{}", evidence(paths, &step)))),
        None => {
            kill_group(&mut child);
            let problem = format!("was killed at its time limit, after {seconds:.0} s{}", evidence(paths, &step));
            Err(step.failed(problem))
        }
    }
}

/// Kills a process group by its first process.
pub(super) fn kill_group(child: &mut Child) {
    // It may have ended by itself.
    let _killed = output(&mut command("kill", ["-KILL", "--", &format!("-{}", child.id())]));
    let _waited = child.wait();
}

/// Titles, and arguments of kubectl whose output may explain a failed step.
const WITNESSES: [(&str, &str); 3] = [
    ("the operator", "logs --namespace=rectrain-system --selector=app.kubernetes.io/name=rectrain-operator --tail=15"),
    (
        "the operator before its last restart",
        "logs --namespace=rectrain-system --selector=app.kubernetes.io/name=rectrain-operator --tail=15 --previous --ignore-errors",
    ),
    (
        "events of jobs",
        "get events --all-namespaces --field-selector=involvedObject.kind=RecTrainingJob --sort-by=.metadata.creationTimestamp \
         --output=custom-columns=:.metadata.creationTimestamp,:.involvedObject.name,:.reason,:.message",
    ),
];

/// The end of a failed step's log, and the end of the cluster's own logs.
fn evidence(paths: &Paths, step: &Step) -> String {
    let log = step.log(paths);
    let mut text = format!("; the last lines of {}:\n{}", log.display(), tail(&log, LAST_LINES));
    if step.words == ["up"] {
        for entry in std::fs::read_dir(paths.run().join("log")).into_iter().flatten().flatten() {
            text.push_str(&format!("\n{}:\n{}", entry.path().display(), tail(&entry.path(), 3)));
        }
        return text;
    }
    for (title, words) in WITNESSES {
        let Ok(kubectl) = kubectl(paths) else { continue };
        let mut kubectl = kubectl.command();
        kubectl.args(words.split_whitespace()).arg("--request-timeout=5s").stdin(Stdio::null());
        if let Ok(printed) = output(&mut kubectl) {
            text.push_str(&format!("\n{title}:\n{}", last(&printed, LAST_LINES)));
        }
    }
    text
}

fn tail(file: &Path, lines: usize) -> String {
    let text = std::fs::read(file).unwrap_or_default();
    last(&String::from_utf8_lossy(&text), lines)
}

fn last(text: &str, lines: usize) -> String {
    let all: Vec<&str> = text.lines().collect();
    all[all.len().saturating_sub(lines)..].join("\n")
}

#[cfg(test)]
pub(super) mod tests {
    use rectrain_harness::processes;

    use super::*;

    /// A shell that has started `sleep` with this argument, in a process group of their own.
    pub(in super::super) fn child_with_grandchild(seconds: &str) -> Child {
        let mut sh = command("sh", ["-c", &format!("sleep {seconds} & sleep 1000")]);
        sh.process_group(0).spawn().unwrap()
    }

    pub(in super::super) fn runs(seconds: &str) -> bool {
        processes::all().any(|(_, words)| words == ["sleep", seconds])
    }

    pub(in super::super) fn soon(holds: impl Fn() -> bool) -> bool {
        (0..100).any(|_| {
            holds() || {
                std::thread::sleep(Duration::from_millis(50));
                false
            }
        })
    }

    #[test]
    fn a_killed_step_takes_its_descendants_with_it() {
        let mut step = child_with_grandchild("1001.5");
        assert!(soon(|| runs("1001.5")));
        kill_group(&mut step);
        assert!(soon(|| !runs("1001.5")));
    }

    #[test]
    fn the_end_of_a_log_is_its_last_lines() {
        let file = std::env::temp_dir().join(format!("rectrain-tail-{}", std::process::id()));
        std::fs::write(&file, "a\nb\nc\n").unwrap();
        assert_eq!((tail(&file, 2), tail(&file, 9)), ("b\nc".to_owned(), "a\nb\nc".to_owned()));
        std::fs::remove_file(&file).unwrap();
        assert_eq!(tail(&file, 2), "");
    }
}

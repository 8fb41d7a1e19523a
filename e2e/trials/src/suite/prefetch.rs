//! Downloads and builds for the cluster, in the background of `cargo xtask test`.

use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use rectrain_bring_up::{Paths, available};
use rectrain_harness::command::{command, output};
use rectrain_harness::say;
use rectrain_harness::times::Times;

use super::guard::Guard;
use super::step::{Step, step};
use crate::TrialError;

/// The suite limits the time of programs that it needs. This process is killed at the end of the
/// tests.
const PREFETCH: Step = step(&["prefetch"], 0);

/// `cargo xtask cluster prefetch` in the background.
#[derive(Debug)]
pub struct Prefetch {
    /// The process, which leads a process group.
    process: u32,
    /// Waits for the process; returns its wall time.
    waiting: JoinHandle<Duration>,
    guard: Guard,
}

impl Prefetch {
    /// Starts it, unless this machine can have no cluster. The suite reports the reason later.
    ///
    /// # Errors
    /// The process does not start.
    pub fn start(paths: &Paths) -> Result<Option<Self>, TrialError> {
        if available(paths).is_err() {
            return Ok(None);
        }
        let mut guard = Guard::new(true)?;
        let mut child = PREFETCH.start(paths)?;
        guard.watch(&child);
        let (process, started) = (child.id(), Instant::now());
        let waiting = std::thread::spawn(move || {
            // Its success shows when the suite looks for the programs.
            let _status = child.wait();
            started.elapsed()
        });
        say("downloading and building the cluster's programs in the background");
        Ok(Some(Self { process, waiting, guard }))
    }

    /// Records its time, and kills it if it still runs.
    pub fn finish(self, times: &mut Times) {
        if !self.waiting.is_finished() {
            let _killed = output(&mut command("kill", ["-KILL", "--", &format!("-{}", self.process)]));
        }
        if let Ok(time) = self.waiting.join() {
            times.record("in the background: the cluster's programs", time);
        }
        self.guard.dismiss();
    }
}

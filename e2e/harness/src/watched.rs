//! A `rectrain run --processes` in the background, watched through its page and the metrics of its
//! processes.

use std::collections::VecDeque;
use std::io::{BufRead, BufReader, Read};
use std::net::SocketAddr;
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::Arc;

use parking_lot::Mutex;
use serde_json::Value;

use crate::command::Running;
use crate::workspace::{built, workspace};
use crate::{HarnessError, events, http};

/// The lines of the log that are kept for an error.
const KEPT_LINES: usize = 20;

/// A running job. Dropping it kills the run.
#[derive(Debug)]
pub struct WatchedRun {
    run: Running,
    /// The address of its page.
    page: SocketAddr,
    log: Arc<Mutex<Log>>,
}

/// The parts of the run's log that are kept.
#[derive(Debug, Default)]
struct Log {
    /// The metrics addresses that the processes have logged so far.
    metrics: Vec<SocketAddr>,
    /// The last lines.
    last: VecDeque<String>,
}

impl WatchedRun {
    /// Starts the job of a manifest with these overrides. Paths in the manifest are relative to the
    /// workspace.
    ///
    /// # Errors
    /// [`HarnessError::NotStarted`]; see [`http::free_address`].
    pub fn start(manifest: &Path, sets: &[String]) -> Result<Self, HarnessError> {
        let mut run = Command::new(built("rectrain")?);
        run.args(["run", "--processes", "--json", "--no-history"]).arg(manifest);
        for set in sets {
            run.args(["--set", set]);
        }
        Self::of(run)
    }

    /// Starts this `rectrain run --processes`.
    ///
    /// # Errors
    /// [`HarnessError::NotStarted`]; see [`http::free_address`].
    pub fn of(mut run: Command) -> Result<Self, HarnessError> {
        let page = http::free_address()?;
        run.args(["--metrics", &page.to_string()]);
        // The processes log the addresses of their metrics at this level.
        run.env("RECTRAIN_LOG", "info").env("NO_COLOR", "1").current_dir(workspace());
        run.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::piped());
        let mut run = Running::start(&mut run)?;
        let lines = run.0.stderr.take().ok_or(HarnessError::NoPipe { program: "rectrain", stream: "log" })?;
        let log = Arc::new(Mutex::new(Log::default()));
        follow(lines, Arc::clone(&log));
        Ok(Self { run, page, log })
    }

    /// The metrics of each process that answers.
    #[must_use]
    pub fn metrics(&self) -> Vec<String> {
        let addresses = self.log.lock().metrics.clone();
        addresses.into_iter().filter_map(|address| http::get(address, "/metrics").ok()).collect()
    }

    /// Its page, with the step and the events.
    ///
    /// # Errors
    /// [`HarnessError::Io`] if the coordinator does not answer; [`HarnessError::Json`].
    pub fn page(&self) -> Result<Value, HarnessError> {
        events::parse("the job's page", &http::get(self.page, "/job.json")?)
    }

    /// Succeeds while the run has not ended.
    ///
    /// # Errors
    /// [`HarnessError::Failed`] with the last lines of the log if the run has ended.
    pub fn check_alive(&mut self) -> Result<(), HarnessError> {
        match self.run.0.try_wait().map_err(HarnessError::io("wait for", "rectrain"))? {
            None => Ok(()),
            Some(status) => {
                Err(HarnessError::Failed { command: "the run".to_owned(), status, output: self.last_lines() })
            }
        }
    }

    fn last_lines(&self) -> String {
        self.log.lock().last.iter().cloned().collect::<Vec<_>>().join("\n")
    }

    /// Ends the run and its processes. It saves nothing.
    ///
    /// # Errors
    /// [`HarnessError::Io`] if the system cannot signal it or wait for it.
    pub fn end(mut self) -> Result<(), HarnessError> {
        let signalled = Command::new("kill").args(["-INT", &self.run.0.id().to_string()]).status();
        signalled.and_then(|_| self.run.0.wait()).map(drop).map_err(HarnessError::io("end", "the job"))
    }
}

/// Reads the log in a thread until the run ends.
fn follow(lines: impl Read + Send + 'static, log: Arc<Mutex<Log>>) {
    std::thread::spawn(move || {
        for line in BufReader::new(lines).lines().map_while(Result::ok) {
            log.lock().push(line);
        }
    });
}

impl Log {
    fn push(&mut self, line: String) {
        self.metrics.extend(metrics_of(&line));
        if self.last.len() == KEPT_LINES {
            self.last.pop_front();
        }
        self.last.push_back(line);
    }
}

/// The metrics address in a log line of a process that joins.
fn metrics_of(line: &str) -> Option<SocketAddr> {
    let (_, rest) = line.split_once("metrics=")?;
    rest.split_whitespace().next()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_metrics_address_is_found_in_a_log_line() {
        let line = "INFO rectrain::processes: joining role=\"ps\" index=0 metrics=127.0.0.1:4711 process=ps 0";
        assert_eq!(metrics_of(line), "127.0.0.1:4711".parse().ok());
        assert_eq!(metrics_of("INFO joining"), None);
    }

    #[test]
    fn addresses_are_kept_and_only_the_last_lines_are() {
        let mut log = Log::default();
        log.push("joining metrics=127.0.0.1:1".to_owned());
        (0..KEPT_LINES).for_each(|line| log.push(format!("line {line}")));
        assert_eq!(log.metrics, ["127.0.0.1:1".parse().expect("an address")]);
        assert_eq!((log.last.len(), log.last.front().map(String::as_str)), (KEPT_LINES, Some("line 0")));
    }
}

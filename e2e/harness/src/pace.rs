//! The pace of a job after its first steps. The first steps wait for data and for connections, so a
//! short job as a whole is slower.

use std::io::{BufRead, BufReader, Read};
use std::process::{Command, Stdio};
use std::time::Instant;

use serde_json::Value;

use crate::HarnessError;
use crate::command::{Running, shown};
use crate::events::{missing, parse};

/// A job that has ended.
#[derive(Clone, Debug)]
pub struct Paced {
    /// Samples per second from the end of the first steps to the last report of progress.
    pub samples_per_second: f64,
    /// The summary.
    pub summary: Value,
}

/// A report of progress.
#[derive(Clone, Copy, Debug)]
struct Report {
    /// Since the start of the process.
    seconds: f64,
    step: u64,
    samples: f64,
}

/// Runs a `rectrain run --json` to its end. Its pace counts from the first report of step `from` or
/// a later one.
///
/// # Errors
/// [`HarnessError::Failed`] with the log of a job that fails; [`HarnessError::NoField`] if the job
/// has fewer than two reports to compare.
pub fn run(mut job: Command, from: u64) -> Result<Paced, HarnessError> {
    job.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let begun = Instant::now();
    let mut running = Running::start(&mut job)?;
    let no_pipe = |stream| HarnessError::NoPipe { program: "rectrain", stream };
    let printed = running.0.stdout.take().ok_or_else(|| no_pipe("output"))?;
    let mut errors = running.0.stderr.take().ok_or_else(|| no_pipe("log"))?;
    // The log may be longer than a pipe holds.
    let log = std::thread::spawn(move || {
        let mut log = Vec::new();
        // The part that was read is all there is to show.
        let _partial = errors.read_to_end(&mut log);
        String::from_utf8_lossy(&log).into_owned()
    });
    let (mut reports, mut last) = (Vec::new(), String::new());
    for line in BufReader::new(printed).lines() {
        let line = line.map_err(HarnessError::io("read the events of", shown(&job)))?;
        reports.extend(report(begun.elapsed().as_secs_f64(), &parse("an event of the job", &line)?));
        last = line;
    }
    let status = running.0.wait().map_err(HarnessError::io("wait for", shown(&job)))?;
    if !status.success() {
        let output = log.join().unwrap_or_default();
        return Err(HarnessError::Failed { command: shown(&job), status, output });
    }
    let summary = parse("the summary", &last)?;
    match pace(&reports, from) {
        Some(samples_per_second) => Ok(Paced { samples_per_second, summary }),
        None => Err(missing("the job's events", &summary, &format!("two reports of progress from step {from} on"))),
    }
}

impl Paced {
    /// The digest of the trained parameters.
    ///
    /// # Errors
    /// [`HarnessError::NoField`].
    pub fn digest(&self) -> Result<&str, HarnessError> {
        let field = "parametersSha256";
        self.summary[field].as_str().ok_or_else(|| missing("the summary", &self.summary, field))
    }

    /// The mean bytes of a step between all processes.
    #[must_use]
    pub fn bytes_of_step(&self) -> f64 {
        let kinds = self.summary["bytesOnWire"].as_object().into_iter().flat_map(|kinds| kinds.values());
        kinds.filter_map(Value::as_f64).sum::<f64>() / self.summary["steps"].as_f64().unwrap_or(f64::NAN)
    }
}

/// The report in an event; `None` for other events.
fn report(seconds: f64, event: &Value) -> Option<Report> {
    let is_progress = event["event"] == "progress";
    let (step, samples) = (event["step"].as_u64()?, event["samples"].as_f64()?);
    is_progress.then_some(Report { seconds, step, samples })
}

/// Samples per second between the first report of step `from` or a later one, and the last report.
fn pace(reports: &[Report], from: u64) -> Option<f64> {
    let first = reports.iter().find(|report| report.step >= from)?;
    let last = reports.last()?;
    (last.step > first.step).then(|| (last.samples - first.samples) / (last.seconds - first.seconds))
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn the_pace_counts_from_a_step_to_the_last_report() {
        let report = |seconds, step| Report { seconds, step, samples: 10.0 * step as f64 };
        let reports = [report(5.0, 1), report(6.0, 3), report(8.0, 5), report(10.0, 9)];
        assert_eq!(pace(&reports, 3), Some(15.0));
        assert_eq!(pace(&reports, 4), Some(20.0));
        assert_eq!((pace(&reports, 9), pace(&reports, 10), pace(&[], 0)), (None, None, None));
    }

    #[test]
    fn only_progress_is_a_report() {
        let found = report(1.5, &json!({ "event": "progress", "step": 3, "samples": 12 })).map(|found| found.samples);
        assert_eq!(found, Some(12.0));
        assert!(report(1.5, &json!({ "event": "summary", "step": 3, "samples": 12 })).is_none());
        assert!(report(1.5, &json!({ "event": "progress" })).is_none());
    }

    #[test]
    fn a_job_is_run_to_its_summary_and_a_failure_shows_its_log() {
        let sh = |script: &str| {
            let mut sh = Command::new("sh");
            sh.args(["-c", script]);
            sh
        };
        let progress = |step| format!("echo '{{\"event\":\"progress\",\"step\":{step},\"samples\":{step}00}}'");
        let summary = r#"echo '{"steps":4,"parametersSha256":"ab","bytesOnWire":{"a":30,"b":10}}'"#;
        let script = [progress(1), progress(2), "sleep 0.1".to_owned(), progress(4), summary.to_owned()].join("; ");
        let paced = run(sh(&script), 2).expect("a summary");
        assert!((500.0..2100.0).contains(&paced.samples_per_second), "{paced:?}");
        assert_eq!((paced.digest().expect("a digest"), paced.bytes_of_step()), ("ab", 10.0));
        assert!(run(sh(&script), 4).is_err(), "no step after the fourth");
        let error = run(sh("echo trouble >&2; exit 3"), 0).expect_err("it failed").to_string();
        assert!(error.contains("trouble"), "{error}");
    }
}

//! A trace of measured step times: the seconds of each worker's batches, in training order.
//!
//! A CSV file has a header with the columns `worker` and `seconds`, then one line per batch, with
//! numbers without quotes. A file of JSON lines has one object per batch with the fields `worker`
//! and `seconds`. Other columns and fields are ignored. Workers are numbered from 0 without a gap.
//! Lines of different workers may be mixed.

use std::collections::BTreeMap;
use std::sync::Arc;

use serde::Deserialize;

/// See the module's text.
#[derive(Debug, PartialEq)]
pub(crate) struct Trace {
    /// The seconds of each batch in order, by worker. Each worker has at least one batch.
    pub(crate) workers: Vec<Arc<[f64]>>,
}

/// An invalid trace.
#[derive(Debug, PartialEq, thiserror::Error)]
pub(crate) enum TraceError {
    #[error("line 1: expected a header with the columns `worker` and `seconds`, found `{found}`")]
    Header { found: String },
    #[error("line {line}: expected a worker's number and the seconds of a batch, found `{found}`")]
    Line { line: usize, found: String },
    #[error("line {line}: a batch took {seconds} seconds: expected a number from 0.000001 to 1000000")]
    Seconds { line: usize, seconds: f64 },
    #[error("the trace holds no batches")]
    Empty,
    #[error("worker {missing} has no batches, but worker {largest} has: workers are numbered from 0 without a gap")]
    Gap { missing: u32, largest: u32 },
}

#[derive(Deserialize)]
struct Batch {
    worker: u32,
    seconds: f64,
}

impl Trace {
    /// Parses JSON lines if `json_lines` is true, CSV otherwise.
    pub(crate) fn parse(text: &str, json_lines: bool) -> Result<Self, TraceError> {
        let mut lines = text.lines().enumerate().map(|(index, line)| (index + 1, line.trim()));
        let columns = if json_lines { None } else { Some(header(lines.next().unwrap_or_default().1)?) };
        let mut workers = BTreeMap::<u32, Vec<f64>>::new();
        for (line, text) in lines.filter(|(_, text)| !text.is_empty()) {
            let batch = match columns {
                None => serde_json::from_str(text).ok(),
                Some(columns) => csv_line(text, columns),
            };
            let Batch { worker, seconds } = batch.ok_or_else(|| TraceError::Line { line, found: shorten(text) })?;
            if !(1e-6..=1e6).contains(&seconds) {
                return Err(TraceError::Seconds { line, seconds });
            }
            workers.entry(worker).or_default().push(seconds);
        }
        let largest = *workers.keys().next_back().ok_or(TraceError::Empty)?;
        if let Some(missing) = (0..largest).zip(workers.keys()).find(|(number, worker)| number != *worker) {
            return Err(TraceError::Gap { missing: missing.0, largest });
        }
        Ok(Self { workers: workers.into_values().map(Arc::from).collect() })
    }
}

/// The indices of the columns `worker` and `seconds`.
fn header(line: &str) -> Result<(usize, usize), TraceError> {
    let column = |name| line.split(',').position(|found| found.trim() == name);
    column("worker").zip(column("seconds")).ok_or_else(|| TraceError::Header { found: shorten(line) })
}

fn csv_line(line: &str, (worker, seconds): (usize, usize)) -> Option<Batch> {
    let field = |index| line.split(',').nth(index).map(str::trim);
    Some(Batch { worker: field(worker)?.parse().ok()?, seconds: field(seconds)?.parse().ok()? })
}

fn shorten(text: &str) -> String {
    text.chars().take(60).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn trace(workers: &[&[f64]]) -> Trace {
        Trace { workers: workers.iter().map(|seconds| Arc::from(*seconds)).collect() }
    }

    #[test]
    fn csv_and_json_lines_hold_the_same_batches() {
        let expected = trace(&[&[0.05, 0.06], &[0.2]]);
        let csv = "step,worker,seconds\n0,0,0.05\n\n0,1,0.2\n1, 0 ,6e-2\n";
        let json = "{\"worker\":0,\"seconds\":0.05}\n{\"seconds\":0.2,\"worker\":1,\"step\":0}\n{\"worker\":0,\"seconds\":0.06}";
        assert_eq!(Trace::parse(csv, false).unwrap(), expected);
        assert_eq!(Trace::parse(json, true).unwrap(), expected);
    }

    #[test]
    fn an_unreadable_trace_is_refused_with_its_line() {
        for (text, json, expected) in [
            ("", false, "line 1: expected a header"),
            ("", true, "holds no batches"),
            ("worker,seconds\n", false, "holds no batches"),
            ("rank,seconds\n0,1\n", false, "found `rank,seconds`"),
            ("worker,seconds\n0,1\n0\n", false, "line 3: expected a worker's number"),
            ("worker,seconds\n0,fast\n", false, "found `0,fast`"),
            ("worker,seconds\n-1,1\n", false, "line 2"),
            ("worker,seconds\n0,0\n", false, "line 2: a batch took 0 seconds"),
            ("worker,seconds\n0,NaN\n", false, "line 2: a batch took NaN seconds"),
            ("worker,seconds\n0,1\n2,1\n", false, "worker 1 has no batches, but worker 2 has"),
            ("worker,seconds\n1,1\n", false, "worker 0 has no batches, but worker 1 has"),
            ("{\"worker\":0}\n", true, "line 1"),
        ] {
            let error = Trace::parse(text, json).unwrap_err().to_string();
            assert!(error.contains(expected), "{text:?}: {error}");
        }
    }
}

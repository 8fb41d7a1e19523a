//! Replays recorded requests before a server answers. So the first clients do not wait for memory
//! that the system has not mapped yet, and for rows that no cache holds.

use std::fs::File;
use std::io::{self, BufRead, BufReader, Read};
use std::path::Path;
use std::time::{Duration, Instant};

use rectrain_data::ColumnEncoder;

use crate::batcher::{Patience, Predict, predict_now};
use crate::error::InferenceError;
use crate::limits::Limits;
use crate::protocol::read_request;
use crate::service::ServedModel;

/// The extent of a warm-up.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct WarmedUp {
    /// Requests that were predicted.
    pub requests: u64,
    /// Their rows.
    pub rows: u64,
    /// Whether the time ended before the file.
    pub was_cut: bool,
}

/// Predicts the requests of a file, one a line, in the form of the REST interface. Empty lines are
/// skipped. After `time` no further request is begun. One line at a time is in memory, of at most
/// [`Limits::max_body_bytes`].
///
/// # Errors
/// [`InferenceError::File`] if the file cannot be read. [`InferenceError::Recorded`] names the line
/// of a request that the model cannot answer.
pub fn warm_up(
    file: &Path,
    time: Duration,
    model: &ServedModel,
    predictor: &mut impl Predict,
    limits: &Limits,
) -> Result<WarmedUp, InferenceError> {
    let encoder = ColumnEncoder::new(model.schema.clone(), &model.null_values)?;
    let cannot = |source| InferenceError::File { action: "read the recorded requests of", file: file.into(), source };
    let mut lines = Lines::new(File::open(file).map_err(cannot)?, limits.max_body_bytes);
    let (started, mut done) = (Instant::now(), WarmedUp::default());
    while lines.advance().map_err(cannot)? {
        if lines.line.trim_ascii().is_empty() {
            continue;
        }
        if started.elapsed() >= time {
            done.was_cut = true;
            break;
        }
        let bad = |problem: String| InferenceError::Recorded { file: file.into(), line: lines.number, problem };
        if lines.line.len() > limits.max_body_bytes {
            let most = limits.max_body_bytes;
            return Err(bad(format!("the request is longer than {most} bytes, the most that a body may have")));
        }
        let request = read_request(&lines.line, limits.max_request_rows).map_err(|refusal| bad(refusal.to_string()))?;
        let batch = encoder.encode(&request.columns).map_err(|error| bad(error.to_string()))?;
        if batch.samples > 0 {
            predict_now(predictor, &batch, Patience::Short)
                .map_err(|error| bad(format!("the model failed: {error}")))?;
        }
        (done.requests, done.rows) = (done.requests + 1, done.rows + batch.samples as u64);
    }
    Ok(done)
}

/// The lines of a file, one at a time.
struct Lines {
    reader: BufReader<File>,
    /// The most bytes of a line.
    most: usize,
    /// The current line, without its end. A longer one is cut one byte beyond the bound.
    line: Vec<u8>,
    /// Its number, from 1.
    number: u64,
}

impl Lines {
    fn new(file: File, most: usize) -> Self {
        Self { reader: BufReader::new(file), most, line: Vec::new(), number: 0 }
    }

    /// Reads the next line. False at the end of the file.
    fn advance(&mut self) -> io::Result<bool> {
        self.line.clear();
        self.number += 1;
        // One byte for the end of the line, and one to see that it is too long.
        let read = (&mut self.reader).take(self.most as u64 + 2).read_until(b'\n', &mut self.line)?;
        if self.line.last() == Some(&b'\n') {
            self.line.pop();
        }
        Ok(read > 0)
    }
}

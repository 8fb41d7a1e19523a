//! Records a sample of the requests: one line of JSON a request, in the form of the REST interface,
//! whichever interface it came by. A request's id and parameters are left out.
//! [`mod@crate::warm_up`] replays the lines.
//!
//! A thread of its own writes, so that no request waits for a disk. The requests that wait for it
//! are bounded, and so is the file. An existing file is continued, so that a process that restarts
//! again and again does not write without bound.

use std::fs::{File, OpenOptions};
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, TrySendError, sync_channel};
use std::thread::JoinHandle;

use rectrain_data::Column;

use crate::error::InferenceError;
use crate::metrics::Metrics;
use crate::protocol::write_request;

/// Requests that wait to be written. Beyond them requests are not recorded, and counted.
const WAITING: usize = 16;

/// The sample of the requests, and the bounds of its file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RecordOptions {
    /// The file.
    pub file: PathBuf,
    /// Each `every`-th request is written, at least 1.
    pub every: u64,
    /// The most lines of the file. The recording ends there.
    pub max_requests: u64,
    /// The most bytes of the file. The recording ends before a line that would exceed them.
    pub max_bytes: u64,
}

/// See the module documentation.
pub(crate) struct Recorder {
    every: u64,
    max_line_bytes: usize,
    /// Requests offered.
    offered: AtomicU64,
    /// The file takes no more lines.
    ended: Arc<AtomicBool>,
    /// `None` only while it is dropped.
    lines: Option<SyncSender<Vec<u8>>>,
    thread: Option<JoinHandle<()>>,
    metrics: Metrics,
}

impl Recorder {
    /// Opens the file, and starts the thread.
    pub(crate) fn start(
        options: RecordOptions,
        max_line_bytes: usize,
        metrics: Metrics,
    ) -> Result<Self, InferenceError> {
        let every = options.every.max(1);
        let recording = Recording::open(&options).map_err(|source| InferenceError::File {
            action: "record requests in",
            file: options.file.clone(),
            source,
        })?;
        let ended = Arc::new(AtomicBool::new(false));
        let (lines, written) = sync_channel(WAITING);
        let (state, counted) = (Arc::clone(&ended), metrics.clone());
        let thread = std::thread::Builder::new()
            .name("rectrain-record".into())
            .spawn(move || {
                recording.run(&written, &counted, &options.file);
                state.store(true, Ordering::Relaxed);
            })
            .map_err(|source| InferenceError::Io { action: "start the thread that records requests", source })?;
        let (lines, thread) = (Some(lines), Some(thread));
        Ok(Self { every, max_line_bytes, offered: AtomicU64::new(0), ended, lines, thread, metrics })
    }

    /// A request has come. It does not wait.
    pub(crate) fn offer(&self, columns: &[Column]) {
        let place = self.offered.fetch_add(1, Ordering::Relaxed);
        if !place.is_multiple_of(self.every) || self.ended.load(Ordering::Relaxed) {
            return;
        }
        if let Err(reason) = self.send(columns) {
            self.metrics.unrecorded.with_label_values(&[reason]).inc();
        }
    }

    fn send(&self, columns: &[Column]) -> Result<(), &'static str> {
        let mut line = write_request(columns).ok_or("form")?;
        if line.len() > self.max_line_bytes {
            return Err("size");
        }
        line.push(b'\n');
        let sent = self.lines.as_ref().map_or(Ok(()), |lines| lines.try_send(line));
        match sent {
            Err(TrySendError::Full(_)) => Err("busy"),
            // The recording has ended meanwhile.
            Ok(()) | Err(TrySendError::Disconnected(_)) => Ok(()),
        }
    }
}

impl Drop for Recorder {
    /// Waits until the last requests are written.
    fn drop(&mut self) {
        self.lines = None;
        if let Some(thread) = self.thread.take() {
            let _panics_were_printed = thread.join();
        }
    }
}

/// The file, and the room in it.
struct Recording {
    file: File,
    /// Lines and bytes that still fit.
    lines: u64,
    bytes: u64,
}

impl Recording {
    /// Continues the file behind its last whole line.
    fn open(options: &RecordOptions) -> io::Result<Self> {
        let mut file = OpenOptions::new().read(true).append(true).create(true).open(&options.file)?;
        let length = file.metadata()?.len();
        if length > options.max_bytes {
            return Ok(Self { file, lines: 0, bytes: 0 });
        }
        let mut text = Vec::new();
        (&mut file).take(options.max_bytes).read_to_end(&mut text)?;
        let end = text.iter().rposition(|byte| *byte == b'\n').map_or(0, |place| place + 1);
        if end < text.len() {
            file.set_len(end as u64)?;
        }
        let lines = text[..end].iter().filter(|byte| **byte == b'\n').count() as u64;
        Ok(Self {
            file,
            lines: options.max_requests.saturating_sub(lines),
            bytes: options.max_bytes.saturating_sub(end as u64),
        })
    }

    /// Writes lines until there are no more, or no more fit, or the file fails.
    fn run(mut self, lines: &Receiver<Vec<u8>>, metrics: &Metrics, path: &Path) {
        let file = path.display();
        while self.lines > 0 {
            let Ok(line) = lines.recv() else { return };
            let length = line.len() as u64;
            if length > self.bytes {
                break;
            }
            if let Err(error) = self.file.write_all(&line) {
                tracing::warn!(%error, %file, "the recording of requests ends, because its file cannot be written");
                return;
            }
            (self.lines, self.bytes) = (self.lines - 1, self.bytes - length);
            metrics.recorded.inc();
        }
        tracing::info!(%file, "the recording of requests ends, because its file is full");
    }
}

#[cfg(test)]
mod tests {
    use prometheus::Registry;
    use rectrain_data::Values;

    use super::*;

    fn columns(x: i64) -> [Column; 1] {
        [Column { name: "x".into(), rows: 1, list: None, values: Values::Integers(vec![Some(x)]) }]
    }

    fn line(x: i64) -> String {
        format!("{}\n", String::from_utf8(write_request(&columns(x)).unwrap()).unwrap())
    }

    fn options(folder: &Path) -> RecordOptions {
        RecordOptions { file: folder.join("requests.jsonl"), every: 1, max_requests: 100, max_bytes: 1 << 20 }
    }

    /// The content of the file after these requests, and the number that was counted as recorded.
    fn record(options: &RecordOptions, xs: &[i64]) -> (String, u64) {
        let metrics = Metrics::new(Registry::new(), vec![]).unwrap();
        let recorder = Recorder::start(options.clone(), 1000, metrics.clone()).unwrap();
        for x in xs {
            let before = metrics.recorded.get();
            recorder.offer(&columns(*x));
            // The queue is short, so each request waits for the one before.
            while metrics.recorded.get() == before
                && !recorder.ended.load(Ordering::Relaxed)
                && (recorder.offered.load(Ordering::Relaxed) - 1).is_multiple_of(options.every)
            {
                std::thread::yield_now();
            }
        }
        drop(recorder);
        (std::fs::read_to_string(&options.file).unwrap(), metrics.recorded.get())
    }

    #[test]
    fn each_nth_request_is_a_line() {
        let folder = tempfile::tempdir().unwrap();
        let options = RecordOptions { every: 3, ..options(folder.path()) };
        assert_eq!(record(&options, &[0, 1, 2, 3, 4, 5, 6]), ([0, 3, 6].map(line).concat(), 3));
    }

    #[test]
    fn the_file_is_bounded_also_over_restarts() {
        let folder = tempfile::tempdir().unwrap();
        let by_lines = RecordOptions { max_requests: 3, ..options(folder.path()) };
        assert_eq!(record(&by_lines, &[1, 2]).1, 2);
        assert_eq!(record(&by_lines, &[3, 4]), ([1, 2, 3].map(line).concat(), 1));
        assert_eq!(record(&by_lines, &[5]).1, 0);
        std::fs::remove_file(&by_lines.file).unwrap();
        let by_bytes = RecordOptions { max_bytes: 2 * line(1).len() as u64, ..options(folder.path()) };
        assert_eq!(record(&by_bytes, &[1, 2, 3]), ([1, 2].map(line).concat(), 2));
    }

    #[test]
    fn a_line_that_is_not_whole_is_cut() {
        let folder = tempfile::tempdir().unwrap();
        let options = options(folder.path());
        std::fs::write(&options.file, line(1) + "{\"inputs\":[{\"na").unwrap();
        assert_eq!(record(&options, &[2]).0, [1, 2].map(line).concat());
    }

    #[test]
    fn requests_without_a_line_are_counted_by_reason() {
        let folder = tempfile::tempdir().unwrap();
        let metrics = Metrics::new(Registry::new(), vec![]).unwrap();
        let recorder = Recorder::start(options(folder.path()), 100, metrics.clone()).unwrap();
        let of = |values, rows| [Column { name: "x".into(), rows, list: None, values }];
        recorder.offer(&of(Values::Texts(vec![Some(vec![255])]), 1));
        recorder.offer(&of(Values::Integers(vec![Some(7); 100]), 100));
        let counted = |reason| metrics.unrecorded.with_label_values(&[reason]).get();
        assert_eq!((counted("form"), counted("size"), counted("busy")), (1, 1, 0));
        let nowhere = RecordOptions { file: folder.path().join("no/file"), ..options(folder.path()) };
        let error = Recorder::start(nowhere, 100, metrics).err().unwrap().to_string();
        assert!(error.starts_with("cannot record requests in ") && error.contains("no/file"), "{error}");
    }
}

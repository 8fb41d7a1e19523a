//! `--tensorboard`: the curves of a run as an event file of TensorBoard.
//!
//! An event file is a sequence of TFRecords, each with one `tensorflow.Event`. The messages below
//! are the parts of TensorFlow's `event.proto` and `summary.proto` that scalars need.

use std::fs::{self, OpenOptions};
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

use parking_lot::Mutex;
use prost::Message;
use rectrain_protocol::events::{JobEvent, TestMetrics};

use crate::history::unique_folder;

/// The content of a file's first record.
const VERSION: &str = "brain.Event:2";
/// Progress is written at intervals of this fraction of the time since the start.
const PROGRESS_FRACTION: u32 = 4000;
/// TensorFlow stores checksums rotated and with this constant added, so that a checksum of data
/// that contain checksums stays meaningful.
const MASK: u32 = 0xa282_ead8;

/// `tensorflow.Event`
#[derive(Clone, PartialEq, Message)]
struct Event {
    /// Seconds since 1970 (UTC).
    #[prost(double, tag = "1")]
    wall_time: f64,
    /// The global step.
    #[prost(int64, tag = "2")]
    step: i64,
    #[prost(string, optional, tag = "3")]
    file_version: Option<String>,
    #[prost(message, optional, tag = "5")]
    summary: Option<Scalars>,
}

/// `tensorflow.Summary`
#[derive(Clone, PartialEq, Message)]
struct Scalars {
    #[prost(message, repeated, tag = "1")]
    value: Vec<Scalar>,
}

/// `tensorflow.Summary.Value`
#[derive(Clone, PartialEq, Message)]
struct Scalar {
    #[prost(string, tag = "1")]
    tag: String,
    #[prost(float, optional, tag = "2")]
    simple_value: Option<f32>,
}

/// The event file of a run. Without a folder it writes nothing. If the file cannot be written, the
/// job continues without it.
#[derive(Clone, Default)]
pub(crate) struct TensorBoard(Option<Arc<Mutex<State>>>);

enum State {
    /// Training has not begun.
    Before {
        parent: PathBuf,
        name: String,
    },
    Open(EventFile),
    /// The file could not be written.
    Lost,
}

struct EventFile {
    file: fs::File,
    began: Instant,
    last_progress: Option<Instant>,
}

impl TensorBoard {
    /// The event file `NAME-DATE-TIME/events.out.tfevents.…` in `folder`, of a job of this name.
    pub(crate) fn of(folder: Option<&Path>, name: &str) -> Self {
        let state = folder.map(|folder| State::Before { parent: folder.to_owned(), name: name.to_owned() });
        Self(state.map(|state| Arc::new(Mutex::new(state))))
    }

    /// Writes the scalars of an event. Training begins with `Started` or `Resumed`, and the file
    /// with it.
    pub(crate) fn record(&self, event: &JobEvent) {
        let Some(state) = &self.0 else { return };
        let mut state = state.lock();
        if let Err(error) = state.record(event) {
            tracing::warn!(%error, "the event file for TensorBoard cannot be written");
            *state = State::Lost;
        }
    }
}

impl State {
    fn record(&mut self, event: &JobEvent) -> io::Result<()> {
        if let (Self::Before { parent, name }, JobEvent::Started { .. } | JobEvent::Resumed { .. }) = (&*self, event) {
            *self = Self::Open(EventFile::create(parent, name)?);
        }
        match self {
            Self::Open(file) => file.record(event),
            Self::Before { .. } | Self::Lost => Ok(()),
        }
    }
}

impl EventFile {
    fn create(parent: &Path, name: &str) -> io::Result<Self> {
        fs::create_dir_all(parent)?;
        let folder = unique_folder(parent, &format!("{name}-{}", jiff::Zoned::now().strftime("%Y%m%d-%H%M%S")))?;
        // TensorBoard reads the files that have `tfevents` in their names.
        let path = folder.join(format!("events.out.tfevents.{}.rectrain", now() as u64));
        let file = OpenOptions::new().create_new(true).append(true).open(path)?;
        let mut events = Self { file, began: Instant::now(), last_progress: None };
        events.write(&Event { wall_time: now(), file_version: Some(VERSION.to_owned()), ..Event::default() })?;
        Ok(events)
    }

    fn record(&mut self, event: &JobEvent) -> io::Result<()> {
        if matches!(event, JobEvent::Progress { .. }) && !self.takes_progress() {
            return Ok(());
        }
        let (step, scalars) = scalars(event);
        let value: Vec<Scalar> = scalars.into_iter().filter_map(|(tag, value)| Scalar::of(tag, value)).collect();
        if value.is_empty() {
            return Ok(());
        }
        let (step, summary) = (i64::try_from(step).unwrap_or(i64::MAX), Some(Scalars { value }));
        self.write(&Event { wall_time: now(), step, summary, ..Event::default() })
    }

    /// Whether enough time has passed since the last report of progress.
    fn takes_progress(&mut self) -> bool {
        let pause = self.began.elapsed() / PROGRESS_FRACTION;
        if self.last_progress.is_some_and(|last| last.elapsed() < pause) {
            return false;
        }
        self.last_progress = Some(Instant::now());
        true
    }

    /// Writes a record with one system call, so that a reader meanwhile sees whole records only.
    fn write(&mut self, event: &Event) -> io::Result<()> {
        self.file.write_all(&framed(&event.encode_to_vec()))
    }
}

impl Scalar {
    /// A scalar with a value. TensorBoard draws no values that are not numbers.
    fn of(tag: &str, value: Option<f64>) -> Option<Self> {
        let value = value.map(|value| value as f32).filter(|value| value.is_finite())?;
        Some(Self { tag: tag.to_owned(), simple_value: Some(value) })
    }
}

/// The step and the scalars of an event.
fn scalars(event: &JobEvent) -> (u64, Vec<(&'static str, Option<f64>)>) {
    match event {
        JobEvent::Progress { step, samples_per_second, loss, running_auc, gradient_norm, .. } => {
            let norm = ("train/gradient_norm", *gradient_norm);
            let speed = ("train/samples_per_second", Some(*samples_per_second));
            (*step, vec![("train/loss", Some(*loss)), ("train/auc", *running_auc), norm, speed])
        }
        JobEvent::Evaluation { step, test } => (*step, quality(test)),
        JobEvent::Summary(summary) => (summary.steps, vec![("train/loss", summary.loss)]),
        _ => (0, Vec::new()),
    }
}

fn quality(test: &TestMetrics) -> Vec<(&'static str, Option<f64>)> {
    vec![
        ("test/auc", test.auc),
        ("test/gauc", test.gauc),
        ("test/log_loss", test.log_loss),
        ("test/normalized_entropy", test.normalized_entropy),
        ("test/calibration", test.calibration),
    ]
}

/// A TFRecord: the length as 64 bits, its checksum, the data, their checksum. Little endian.
fn framed(data: &[u8]) -> Vec<u8> {
    let length = (data.len() as u64).to_le_bytes();
    [&length[..], &masked_checksum(&length), data, &masked_checksum(data)].concat()
}

/// The CRC-32C of the bytes, as TensorFlow stores it.
fn masked_checksum(bytes: &[u8]) -> [u8; 4] {
    crc32c::crc32c(bytes).rotate_right(15).wrapping_add(MASK).to_le_bytes()
}

/// Seconds since 1970 (UTC).
fn now() -> f64 {
    SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or(Duration::ZERO).as_secs_f64()
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "an unwrap in a test is an assertion")]
mod tests {
    use super::*;

    #[test]
    fn the_first_record_is_as_tensorflow_writes_it() {
        // `tf.io.TFRecordWriter` wrote this header for 24 bytes, and the event is
        // `Event(wall_time=1.0, file_version="brain.Event:2")`.
        let event = Event { wall_time: 1.0, file_version: Some(VERSION.to_owned()), ..Event::default() };
        let record = framed(&event.encode_to_vec());
        assert_eq!(record[..12], [0x18, 0, 0, 0, 0, 0, 0, 0, 0xa3, 0x7f, 0x4b, 0x22]);
        let data = [&[0x09, 0, 0, 0, 0, 0, 0, 0xf0, 0x3f, 0x1a, 0x0d][..], VERSION.as_bytes()].concat();
        assert_eq!((&record[12..36], record.len()), (&data[..], 40));
    }

    #[test]
    fn a_value_that_is_no_number_is_left_out() {
        assert_eq!(Scalar::of("a", Some(f64::NAN)), None);
        assert_eq!(Scalar::of("a", Some(1e300)), None);
        assert_eq!(Scalar::of("a", None), None);
        assert_eq!(Scalar::of("a", Some(0.5)).unwrap().simple_value, Some(0.5));
    }

    #[test]
    fn a_folder_that_cannot_be_made_does_not_stop_the_run() {
        let directory = tempfile::tempdir().unwrap();
        fs::write(directory.path().join("board"), "a file").unwrap();
        let board = TensorBoard::of(Some(&directory.path().join("board")), "a");
        board.record(&JobEvent::Resumed { checkpoint: "c".to_owned(), step: 1, batches: 1, rows: 1 });
        assert!(matches!(*board.0.unwrap().lock(), State::Lost));
    }
}

//! The coordinator's journal: its whole state, written before it sends a reply. The replacement of
//! a killed coordinator recovers from it.
//!
//! The journal is an image, not a log, so there is nothing to replay. The state is a few KiB, so
//! writing it whole is cheap. One write serves many replies.
//!
//! Writes alternate between two files, so that one of them is complete whenever the process dies.
//! The journal outlives the process but not the machine. A coordinator without a journal restarts
//! the job from its last checkpoint.

use std::fs::{DirBuilder, File, OpenOptions};
use std::io::{self, Read};
use std::os::unix::fs::{DirBuilderExt, FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use parking_lot::Mutex;
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};
use tokio::sync::{Notify, watch};

use super::state::State;
use rectrain_protocol::blocking::await_task;
use rectrain_protocol::error::RoleError;
use rectrain_protocol::plan::JobPlan;

/// The first bytes of a file. They identify the format of the header and of the image.
const MAGIC: [u8; 8] = *b"RTJRNL01";
/// Magic, number, length of the image, and a SHA-256 over these three fields and the image.
const HEADER_BYTES: usize = 8 + 8 + 8 + 32;
/// The names of the files.
const FILES: [&str; 2] = ["state-0", "state-1"];
/// The file of the events, in the same directory.
pub(super) const EVENTS: &str = "events.jsonl";
/// The value of [`Journal::written`] once no more writes follow. It ends every wait for a write.
const ENDED: u64 = u64::MAX;

/// The journal of one coordinator.
pub(super) struct Journal {
    files: Mutex<Files>,
    /// Writes requested so far.
    requested: AtomicU64,
    wake: Notify,
    /// The newest request that a write has served.
    written: watch::Sender<u64>,
}

/// The state that an earlier coordinator left in the journal.
pub(super) struct Recovered {
    pub(super) attempt: u64,
    pub(super) state: State,
}

#[derive(Serialize)]
struct Image<'a> {
    job: &'a str,
    attempt: u64,
    state: &'a State,
}

#[derive(Deserialize)]
struct OwnedImage {
    job: String,
    attempt: u64,
    state: State,
}

impl Journal {
    /// Opens the journal in this directory, and creates the directory if needed. Also returns the
    /// state that a coordinator of the same job left there.
    ///
    /// # Errors
    /// [`RoleError::System`] if the directory cannot be created or written.
    pub(super) fn open(directory: &Path, plan: &JobPlan, run: &str) -> Result<(Self, Option<Recovered>), RoleError> {
        let cannot = |source| RoleError::System {
            attempt: format!("keep the coordinator's journal in {}", directory.display()),
            source,
        };
        let (files, image) = Files::open(directory).map_err(cannot)?;
        let job = job(plan, run);
        let recovered = image.and_then(|image| match rmp_serde::from_slice::<OwnedImage>(&image) {
            Ok(image) if image.job == job => Some(Recovered { attempt: image.attempt, state: image.state }),
            Ok(_) => {
                tracing::warn!("the journal in {} belongs to another job: it is ignored", directory.display());
                None
            }
            Err(error) => {
                tracing::warn!(%error, "the journal in {} cannot be read: it is ignored", directory.display());
                None
            }
        });
        let journal = Self {
            files: Mutex::new(Files { job, ..files }),
            requested: AtomicU64::new(0),
            wake: Notify::new(),
            written: watch::Sender::new(0),
        };
        Ok((journal, recovered))
    }

    /// Requests a write of the present state, and waits until it is done.
    pub(super) async fn flushed(&self) {
        let number = self.requested.fetch_add(1, Ordering::AcqRel) + 1;
        self.wake.notify_one();
        let mut written = self.written.subscribe();
        // The sender lives as long as `self`.
        let _never_closed = written.wait_for(|written| *written >= number).await.is_ok();
    }

    /// Waits for a request to write. Returns the number to pass to [`Self::write`].
    pub(super) async fn requested(&self) -> u64 {
        self.wake.notified().await;
        self.requested.load(Ordering::Acquire)
    }

    /// Encodes the state.
    pub(super) fn image(&self, attempt: u64, state: &State) -> Result<Vec<u8>, RoleError> {
        let files = self.files.lock();
        let image = rmp_serde::to_vec_named(&Image { job: &files.job, attempt, state });
        image.map_err(|error| RoleError::Inconsistent { message: "journal", reason: error.to_string() })
    }

    /// Writes an image that was encoded after `number` was returned.
    pub(super) async fn write(self: &Arc<Self>, number: u64, image: Vec<u8>) -> io::Result<()> {
        let journal = Arc::clone(self);
        let writing = tokio::task::spawn_blocking(move || journal.files.lock().write(&image));
        await_task("writing of the journal", writing).await.map_err(io::Error::other)??;
        self.written.send_replace(number);
        Ok(())
    }

    /// Ends the journal, because the job has ended. Every present and later wait for a write
    /// returns.
    pub(super) fn close(&self) {
        self.written.send_replace(ENDED);
    }

    /// Removes the journal after a failed write, because its state is outdated. Every present and
    /// later wait for a write returns.
    pub(super) fn discard(&self) {
        self.files.lock().remove();
        self.close();
    }
}

/// Identifies a run and its plan. A coordinator ignores the journal of another run or plan.
fn job(plan: &JobPlan, run: &str) -> String {
    let hash = Sha256::digest(format!("{run}\n{plan:?}"));
    hash.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// The two files of the journal.
struct Files {
    job: String,
    paths: [PathBuf; 2],
    files: [File; 2],
    /// The number of the last write. Writes with even numbers go to the first file.
    number: u64,
}

impl Files {
    /// Opens the files. Also returns the newest complete image.
    fn open(directory: &Path) -> io::Result<(Self, Option<Vec<u8>>)> {
        DirBuilder::new().mode(0o700).recursive(true).create(directory)?;
        let paths = FILES.map(|name| directory.join(name));
        let open = |path| OpenOptions::new().create(true).truncate(false).read(true).write(true).mode(0o600).open(path);
        let mut files = [open(&paths[0])?, open(&paths[1])?];
        let mut newest: Option<(u64, Vec<u8>)> = None;
        for file in &mut files {
            let mut bytes = Vec::new();
            file.read_to_end(&mut bytes)?;
            newest = newest.into_iter().chain(read(&bytes)).max_by_key(|(number, _)| *number);
        }
        let (number, image) = newest.unzip();
        Ok((Self { job: String::new(), paths, files, number: number.unwrap_or(0) }, image))
    }

    fn write(&mut self, image: &[u8]) -> io::Result<()> {
        self.number += 1;
        let mut bytes = Vec::with_capacity(HEADER_BYTES + image.len());
        bytes.extend(MAGIC);
        bytes.extend(self.number.to_le_bytes());
        bytes.extend((image.len() as u64).to_le_bytes());
        bytes.extend(sum(&bytes, image));
        bytes.extend(image);
        self.files[(self.number % 2) as usize].write_all_at(&bytes, 0)
    }

    fn remove(&mut self) {
        for path in &self.paths {
            if let Err(error) = std::fs::remove_file(path) {
                tracing::warn!(%error, "cannot remove the outdated journal {}", path.display());
            }
        }
    }
}

/// The number and the image in a file, if both are complete.
fn read(bytes: &[u8]) -> Option<(u64, Vec<u8>)> {
    let (header, rest) = bytes.split_at_checked(HEADER_BYTES)?;
    let (head, sum_of_all) = header.split_at(HEADER_BYTES - 32);
    let number = |from: usize| head.get(from..from + 8)?.try_into().ok().map(u64::from_le_bytes);
    let image = rest.get(..usize::try_from(number(16)?).ok()?)?;
    (head.starts_with(&MAGIC) && sum(head, image) == sum_of_all).then_some((number(8)?, image.to_vec()))
}

fn sum(head: &[u8], image: &[u8]) -> [u8; 32] {
    Sha256::new().chain_update(head).chain_update(image).finalize().into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_newest_whole_image_is_found() {
        let directory = tempfile::tempdir().unwrap();
        let (mut files, nothing) = Files::open(directory.path()).unwrap();
        assert_eq!(nothing, None);
        for image in ["one", "a longer one", "three"] {
            files.write(image.as_bytes()).unwrap();
        }
        let found = || Files::open(directory.path()).unwrap().1.map(|image| String::from_utf8(image).unwrap());
        assert_eq!(found().as_deref(), Some("three"));
        // The process dies after any byte of the fourth write. The third image stays complete.
        let (mut files, _) = Files::open(directory.path()).unwrap();
        let path = files.paths[0].clone();
        let before = std::fs::read(&path).unwrap();
        files.write(b"the fourth").unwrap();
        let after = std::fs::read(&path).unwrap();
        for cut in 0..after.len() {
            let torn: Vec<u8> = after[..cut].iter().chain(before.iter().skip(cut)).copied().collect();
            std::fs::write(&path, &torn).unwrap();
            let expected = if torn == after { "the fourth" } else { "three" };
            assert_eq!(found().as_deref(), Some(expected), "{cut}");
        }
        std::fs::write(&path, &after).unwrap();
        assert_eq!(found().as_deref(), Some("the fourth"));
    }

    #[test]
    fn a_discarded_journal_leaves_no_image() {
        let directory = tempfile::tempdir().unwrap();
        let (mut files, _) = Files::open(directory.path()).unwrap();
        files.write(b"one").unwrap();
        files.remove();
        assert_eq!(Files::open(directory.path()).unwrap().1, None);
    }
}

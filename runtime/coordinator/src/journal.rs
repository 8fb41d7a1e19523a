//! The coordinator's journal: all that it knows, written before it answers anybody, so that one that is killed goes on where it was. Not a
//! log but an image, a few KiB of it: the state is small, writing it whole needs no replay, and many answers share one writing. Two files
//! are written in turn, so that one of them is whole whenever the process dies. It outlives the process, and not the machine: a
//! coordinator that finds none has the job begin anew from its last checkpoint.

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
use rectrain_protocol::blocking::done;
use rectrain_protocol::error::RoleError;
use rectrain_protocol::plan::JobPlan;

/// What files begin with: the form of the header and of the image.
const MAGIC: [u8; 8] = *b"RTJRNL01";
/// Magic, number, bytes of the image, SHA-256 of all three and the image.
const HEADER_BYTES: usize = 8 + 8 + 8 + 32;
/// The files' names.
const FILES: [&str; 2] = ["state-0", "state-1"];
/// The events' file, beside them.
pub(super) const EVENTS: &str = "events.jsonl";
/// Everything that is asked for counts as written.
const ENDED: u64 = u64::MAX;

/// See the module's text.
pub(super) struct Journal {
    files: Mutex<Files>,
    /// Writings asked for.
    asked: AtomicU64,
    wanted: Notify,
    /// Of those, written.
    written: watch::Sender<u64>,
}

/// What a coordinator has left.
pub(super) struct Left {
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
    /// In this directory, which is made if there is none; and what a coordinator of the same job has left there.
    ///
    /// # Errors
    /// A directory that cannot be made or written.
    pub(super) fn open(directory: &Path, plan: &JobPlan, run: &str) -> Result<(Self, Option<Left>), RoleError> {
        let cannot = |source| RoleError::System {
            attempt: format!("keep the coordinator's journal in {}", directory.display()),
            source,
        };
        let (files, left) = Files::open(directory).map_err(cannot)?;
        let job = job(plan, run);
        let left = left.and_then(|image| match rmp_serde::from_slice::<OwnedImage>(&image) {
            Ok(image) if image.job == job => Some(Left { attempt: image.attempt, state: image.state }),
            Ok(_) => {
                tracing::warn!("the journal in {} is another job's", directory.display());
                None
            }
            Err(error) => {
                tracing::warn!(%error, "the journal in {} cannot be read", directory.display());
                None
            }
        });
        let journal = Self {
            files: Mutex::new(Files { job, ..files }),
            asked: AtomicU64::new(0),
            wanted: Notify::new(),
            written: watch::Sender::new(0),
        };
        Ok((journal, left))
    }

    /// Waits until all that is known now is written.
    pub(super) async fn written(&self) {
        let number = self.asked.fetch_add(1, Ordering::AcqRel) + 1;
        self.wanted.notify_one();
        let mut written = self.written.subscribe();
        // The sender lives as long as this does.
        let _never_closed = written.wait_for(|written| *written >= number).await.is_ok();
    }

    /// Waits until something is to be written; gives what [`Self::write`] is to be told.
    pub(super) async fn wanted(&self) -> u64 {
        self.wanted.notified().await;
        self.asked.load(Ordering::Acquire)
    }

    /// The state as bytes.
    pub(super) fn image(&self, attempt: u64, state: &State) -> Result<Vec<u8>, RoleError> {
        let files = self.files.lock();
        let image = rmp_serde::to_vec_named(&Image { job: &files.job, attempt, state });
        image.map_err(|error| RoleError::Inconsistent { message: "journal", reason: error.to_string() })
    }

    /// Writes an image that was made after `number` was given.
    pub(super) async fn write(self: &Arc<Self>, number: u64, image: Vec<u8>) -> io::Result<()> {
        let journal = Arc::clone(self);
        let writing = tokio::task::spawn_blocking(move || journal.files.lock().write(&image));
        done("writing of the journal", writing).await.map_err(io::Error::other)??;
        self.written.send_replace(number);
        Ok(())
    }

    /// Nobody waits any more: the job has ended, or the journal cannot be written; then what it holds is not true any more and is removed.
    pub(super) fn end(&self, is_true: bool) {
        if !is_true {
            self.files.lock().remove();
        }
        self.written.send_replace(ENDED);
    }
}

/// Of which run of which plan a journal is: another one's is not taken up.
fn job(plan: &JobPlan, run: &str) -> String {
    let hash = Sha256::digest(format!("{run}\n{plan:?}"));
    hash.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// The two files.
struct Files {
    job: String,
    paths: [PathBuf; 2],
    files: [File; 2],
    /// Of the last writing: even ones are in the first file.
    number: u64,
}

impl Files {
    /// With the newest image that is whole.
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
                tracing::warn!(%error, "a journal that is not true any more is left: cannot remove {}", path.display());
            }
        }
    }
}

/// The number and the image of a file, if they are whole.
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
    fn the_newest_image_that_is_whole_is_found() {
        let directory = tempfile::tempdir().unwrap();
        let (mut files, nothing) = Files::open(directory.path()).unwrap();
        assert_eq!(nothing, None);
        for image in ["one", "a longer one", "three"] {
            files.write(image.as_bytes()).unwrap();
        }
        let found = || Files::open(directory.path()).unwrap().1.map(|image| String::from_utf8(image).unwrap());
        assert_eq!(found().as_deref(), Some("three"));
        // The fourth was being written when the process died, at any byte: the third is whole.
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
    fn a_journal_that_is_not_true_any_more_is_gone() {
        let directory = tempfile::tempdir().unwrap();
        let (mut files, _) = Files::open(directory.path()).unwrap();
        files.write(b"one").unwrap();
        files.remove();
        assert_eq!(Files::open(directory.path()).unwrap().1, None);
    }
}

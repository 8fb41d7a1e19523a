//! The coordinator's journal: its whole state, written before it sends a reply. The replacement of
//! a killed coordinator recovers from it.
//!
//! The journal is an image, not a log, so there is nothing to replay. The state is a few KiB, so
//! writing it whole is cheap. One write serves many replies. A job that follows paths has up to
//! 1.9 MB more: the list of its files ([`super::followed`]).
//!
//! Writes alternate between two files, so that one of them is complete whenever the process dies.
//! The files outlive the process but not the machine. After a reset of the machine they may be
//! outdated, so an image of another boot is ignored. Parameter servers keep copies of each image
//! ([`super::copies`]), from which a coordinator on another machine recovers
//! ([`super::recovery`]). A coordinator without a journal restarts the job from its last
//! checkpoint.

use std::fs::{DirBuilder, File, OpenOptions};
use std::hash::{BuildHasher, RandomState};
use std::io::{self, Read};
use std::os::unix::fs::{DirBuilderExt, FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use bytes::Bytes;
use parking_lot::Mutex;
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};
use tokio::sync::{Notify, watch};

use super::hexadecimal::hexadecimal;
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

/// Where a coordinator keeps its journal.
#[derive(Debug, Clone, Copy)]
pub struct JournalPlace<'a> {
    /// The directory of its files.
    pub(super) directory: &'a Path,
    /// The number of the job's attempt.
    pub(super) attempt: u32,
    /// The incarnation of this coordinator, unless it continues from the directory.
    pub(super) owner: u64,
}

impl<'a> JournalPlace<'a> {
    /// A place for one process. The number of the job's attempt tells copies of the journal apart,
    /// because attempts share the name of the run.
    #[must_use]
    pub fn new(directory: &'a Path, attempt: u32) -> Self {
        Self { directory, attempt, owner: RandomState::new().hash_one("coordinator").max(1) }
    }

    /// The key of the copies of this journal on parameter servers.
    pub(super) fn copies_of(&self, job: &str) -> String {
        format!("{job}/{}", self.attempt)
    }
}

/// The journal of one coordinator.
pub(super) struct Journal {
    files: Mutex<Files>,
    /// The run and its plan.
    job: String,
    /// The key of the copies on parameter servers.
    copies: String,
    /// The incarnation of this coordinator. A replacement that continues from the files has the
    /// same one, because its predecessor has surely ended.
    owner: u64,
    /// The boot of this machine; empty if it is unknown.
    boot: String,
    /// Writes requested so far.
    requested: AtomicU64,
    wake: Notify,
    /// The newest request that a write has served.
    written: watch::Sender<u64>,
}

/// The state that an earlier coordinator left in the journal.
pub(super) struct Recovered {
    pub(super) attempt: u64,
    /// The number of the last event that the earlier coordinator had pushed.
    pub(super) events: u64,
    pub(super) state: State,
}

#[derive(Serialize)]
struct Image<'a> {
    job: &'a str,
    attempt: u64,
    owner: u64,
    events: u64,
    /// The boot of the machine that writes the image; empty if it is unknown.
    boot: &'a str,
    state: &'a State,
}

/// A decoded image.
#[derive(Deserialize)]
pub(super) struct OwnedImage {
    job: String,
    attempt: u64,
    #[serde(default)]
    owner: u64,
    #[serde(default)]
    events: u64,
    #[serde(default)]
    boot: String,
    pub(super) state: State,
}

impl OwnedImage {
    /// Decodes the image of a journal of this job; `None` if it belongs to another job, or to
    /// another version of this program. `place` names the image in the log.
    pub(super) fn decode(image: &[u8], job: &str, place: &str) -> Option<Self> {
        match rmp_serde::from_slice::<Self>(image) {
            Ok(image) if image.job == job => Some(image),
            Ok(_) => {
                tracing::warn!("the journal in {place} belongs to another job: it is ignored");
                None
            }
            Err(error) => {
                tracing::warn!(%error, "the journal in {place} cannot be read: it is ignored");
                None
            }
        }
    }

    /// As [`Self::decode`], for an image in a file. `None` also if the machine has restarted since
    /// the file was written. Newer writes may then be lost.
    fn decode_file(image: &[u8], job: &str, directory: &Path) -> Option<Self> {
        let place = directory.display().to_string();
        let image = Self::decode(image, job, &place)?;
        let boot = boot();
        let is_of_another_boot = !boot.is_empty() && !image.boot.is_empty() && image.boot != boot;
        if is_of_another_boot {
            tracing::warn!("the journal in {place} was written before the machine restarted: it is ignored");
        }
        (!is_of_another_boot).then_some(image)
    }

    /// Encodes this image for the coordinator of incarnation `owner` on this machine.
    fn encode_for(&self, owner: u64) -> Result<Vec<u8>, RoleError> {
        let Self { job, attempt, events, state, .. } = self;
        encode(&Image { job, attempt: *attempt, owner, events: *events, boot: &boot(), state })
    }
}

impl Journal {
    /// Opens the journal in this place, and creates the directory if needed. Also returns the
    /// state that a coordinator of the same job left there.
    ///
    /// # Errors
    /// [`RoleError::System`] if the directory cannot be created or written.
    pub(super) fn open(
        place: JournalPlace<'_>,
        plan: &JobPlan,
        run: &str,
    ) -> Result<(Self, Option<Recovered>), RoleError> {
        let JournalPlace { directory, .. } = place;
        let cannot = |source| RoleError::System {
            attempt: format!("keep the coordinator's journal in {}", directory.display()),
            source,
        };
        let (files, image) = Files::open(directory).map_err(cannot)?;
        let job = job(plan, run);
        let image = image.and_then(|image| OwnedImage::decode_file(&image, &job, directory));
        let owner = image.as_ref().map(|image| image.owner).filter(|owner| *owner != 0);
        let recovered = image.map(|OwnedImage { attempt, events, state, .. }| Recovered { attempt, events, state });
        let journal = Self {
            files: Mutex::new(files),
            copies: place.copies_of(&job),
            job,
            owner: owner.unwrap_or(place.owner),
            boot: boot(),
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

    /// Waits for a request to write. Returns the number to pass to [`Self::serve`].
    pub(super) async fn requested(&self) -> u64 {
        self.wake.notified().await;
        self.requested.load(Ordering::Acquire)
    }

    /// The key of the copies on parameter servers.
    pub(super) fn copies(&self) -> &str {
        &self.copies
    }

    /// The incarnation of this coordinator.
    pub(super) fn owner(&self) -> u64 {
        self.owner
    }

    /// Encodes the state. `events` is the number of the last event.
    pub(super) fn image(&self, attempt: u64, events: u64, state: &State) -> Result<Bytes, RoleError> {
        let Self { job, owner, boot, .. } = self;
        encode(&Image { job, attempt, owner: *owner, events, boot, state }).map(Bytes::from)
    }

    /// Writes an image. Returns its sequence, which increases with each write of this coordinator
    /// and of its replacements.
    pub(super) async fn write(self: &Arc<Self>, image: Bytes) -> io::Result<u64> {
        let journal = Arc::clone(self);
        let writing = tokio::task::spawn_blocking(move || journal.files.lock().write(&image));
        await_task("writing of the journal", writing).await.map_err(io::Error::other)?
    }

    /// Serves all requests up to `number`: an image that was encoded after that number was returned
    /// is written.
    pub(super) fn serve(&self, number: u64) {
        self.written.send_replace(number);
    }

    /// Ends the journal, because the job has ended. Every present and later wait for a write
    /// returns.
    pub(super) fn close(&self) {
        self.written.send_replace(ENDED);
    }

    /// Whether no more writes follow.
    pub(super) fn is_closed(&self) -> bool {
        *self.written.borrow() == ENDED
    }

    /// Removes the journal after a failed write, because its state is outdated.
    pub(super) fn discard(&self) {
        self.files.lock().remove();
    }
}

fn encode(image: &Image<'_>) -> Result<Vec<u8>, RoleError> {
    rmp_serde::to_vec_named(image)
        .map_err(|error| RoleError::Inconsistent { message: "journal", reason: error.to_string() })
}

/// Whether the directory has a journal of this job.
///
/// # Errors
/// The directory cannot be created or read.
pub(super) fn is_in(directory: &Path, job: &str) -> io::Result<bool> {
    let (_, image) = Files::open(directory)?;
    Ok(image.is_some_and(|image| OwnedImage::decode_file(&image, job, directory).is_some()))
}

/// Writes the copy of an image, with its sequence, to the directory. The coordinator that opens the
/// journal there continues from it as incarnation `owner`.
///
/// # Errors
/// [`RoleError::System`] if the directory cannot be written.
pub(super) fn install(directory: &Path, image: &OwnedImage, owner: u64, sequence: u64) -> Result<(), RoleError> {
    let image = image.encode_for(owner)?;
    let write = || {
        let (mut files, _) = Files::open(directory)?;
        // Files that are ignored may have a higher number.
        files.clear()?;
        files.number = sequence.saturating_sub(1);
        files.write(&image).map(drop)
    };
    write().map_err(|source| RoleError::System {
        attempt: format!("keep the coordinator's journal in {}", directory.display()),
        source,
    })
}

/// Identifies a run and its plan. A coordinator ignores the journal of another run or plan. The
/// limits of waits and restarts do not count: the options of a process change them.
pub(super) fn job(plan: &JobPlan, run: &str) -> String {
    let plan = JobPlan { stall: Duration::ZERO, max_restarts: 0, backoff: Duration::ZERO, ..plan.clone() };
    hexadecimal(&Sha256::digest(format!("{run}\n{plan:?}")))
}

/// Identifies the boot of this machine; empty where `/proc` does not say.
fn boot() -> String {
    let boot = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
    boot.trim().to_owned()
}

/// The two files of the journal.
struct Files {
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
        Ok((Self { paths, files, number: number.unwrap_or(0) }, image))
    }

    /// Writes an image. Returns its number.
    fn write(&mut self, image: &[u8]) -> io::Result<u64> {
        self.number += 1;
        let mut bytes = Vec::with_capacity(HEADER_BYTES + image.len());
        bytes.extend(MAGIC);
        bytes.extend(self.number.to_le_bytes());
        bytes.extend((image.len() as u64).to_le_bytes());
        bytes.extend(sum(&bytes, image));
        bytes.extend(image);
        self.files[(self.number % 2) as usize].write_all_at(&bytes, 0)?;
        Ok(self.number)
    }

    /// Empties the files.
    fn clear(&self) -> io::Result<()> {
        self.files.iter().try_for_each(|file| file.set_len(0))
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
    use rectrain_protocol::plan::small_plan;

    use super::*;

    #[test]
    fn limits_of_waits_and_restarts_do_not_change_the_job() {
        let key = |changes: &[&str]| job(&small_plan(changes), "run");
        let limits = ["spec.faultTolerance.stallSeconds=77", "spec.faultTolerance.maxRestarts=9"];
        assert_eq!(key(&limits), key(&[]));
        assert_ne!(key(&["spec.training.seed=7"]), key(&[]));
        assert_ne!(job(&small_plan(&[]), "other"), key(&[]));
    }

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

    /// An image of a state at the start of a job, written at this boot.
    fn image_of(plan: &JobPlan, job: &str, boot: &str) -> Vec<u8> {
        let state = State::new(plan, None).unwrap();
        encode(&Image { job, attempt: 1, owner: 2, events: 3, boot, state: &state }).unwrap()
    }

    #[test]
    fn a_file_of_another_boot_is_ignored() {
        let (directory, plan) = (tempfile::tempdir().unwrap(), small_plan(&[]));
        for (boot, is_read) in [(&*boot(), true), ("", true), ("another", boot().is_empty())] {
            let image = image_of(&plan, "job", boot);
            assert_eq!(OwnedImage::decode_file(&image, "job", directory.path()).is_some(), is_read, "{boot}");
        }
    }

    #[test]
    fn an_installed_copy_replaces_files_with_higher_numbers() {
        let (directory, plan) = (tempfile::tempdir().unwrap(), small_plan(&[]));
        let (mut files, _) = Files::open(directory.path()).unwrap();
        for _ in 0..7 {
            files.write(&image_of(&plan, "job", "another")).unwrap();
        }
        let copy = OwnedImage::decode(&image_of(&plan, "job", "another"), "job", "a test").unwrap();
        install(directory.path(), &copy, 9, 5).unwrap();
        assert!(is_in(directory.path(), "job").unwrap());
        assert_eq!(Files::open(directory.path()).unwrap().0.number, 5);
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

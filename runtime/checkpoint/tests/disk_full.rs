//! A full disk: an in-memory file system of a few megabytes, which only root can mount. Otherwise
//! the tests print that they were skipped.

#![cfg(target_os = "linux")]
#![allow(clippy::unwrap_used, reason = "an unwrap in a test is an assertion")]

mod common;

use std::num::NonZeroUsize;
use std::path::Path;
use std::process::Command;

use common::{Job, identity, local, runtime};
use rectrain_checkpoint::{CheckpointError, CheckpointWriter, Depth, latest_good, retain, save_state};
use rectrain_storage::Directory;

const DISK_BYTES: u64 = 24 << 20;
/// The smallest space that a file takes.
const PAGE: usize = 4096;

/// A disk that is unmounted with the test.
struct Disk(tempfile::TempDir);

impl Disk {
    fn mounted() -> Option<Self> {
        let folder = tempfile::tempdir().unwrap();
        let options = format!("size={DISK_BYTES}");
        let mounted = Command::new("mount").args(["-t", "tmpfs", "-o", &options, "tmpfs"]).arg(folder.path()).output();
        match mounted {
            Ok(output) if output.status.success() => Some(Self(folder)),
            Ok(output) => {
                eprintln!("SKIPPED: no disk can be mounted: {}", String::from_utf8_lossy(&output.stderr));
                None
            }
            Err(error) => {
                eprintln!("SKIPPED: mount cannot be run: {error}");
                None
            }
        }
    }

    /// Fills the disk up to `room` free bytes.
    fn fill(&self, room: usize) {
        let path = self.filler();
        let error = std::fs::write(&path, vec![1_u8; DISK_BYTES as usize]).unwrap_err();
        assert_eq!(error.kind(), std::io::ErrorKind::StorageFull);
        let filler = std::fs::File::options().write(true).open(path).unwrap();
        filler.set_len(filler.metadata().unwrap().len() - room as u64).unwrap();
    }

    fn empty(&self) {
        std::fs::remove_file(self.filler()).unwrap();
    }

    fn filler(&self) -> std::path::PathBuf {
        self.0.path().join("filler")
    }
}

impl Drop for Disk {
    fn drop(&mut self) {
        // Lazy: the disk goes when the last file on it is closed.
        let _unmounted = Command::new("umount").arg("-l").arg(self.0.path()).status();
    }
}

/// Files in the checkpoints' folder, temporary ones included.
fn files(folder: &Path) -> Vec<String> {
    let mut found: Vec<String> =
        std::fs::read_dir(folder).unwrap().filter_map(|entry| entry.unwrap().file_name().into_string().ok()).collect();
    found.sort();
    found
}

/// However much room is left, the attempt fails with the file and the reason. The previous
/// checkpoint stays the last good one. Once there is room, the next delta holds all changes.
#[test]
fn a_full_disk_costs_only_the_attempt() {
    let Some(disk) = Disk::mounted() else { return };
    let directory = local(&disk.0);
    runtime().block_on(async {
        let mut job = Job::new(2);
        job.train(5);
        let mut base = job.save(&directory, None).await.unwrap();
        for pages in 0..6 {
            disk.fill(pages * PAGE);
            job.train(1);
            let error = job.save(&directory, Some(&base)).await.unwrap_err();
            assert!(matches!(error, CheckpointError::Storage(_)) && !error.is_checkpoints_fault(), "{error}");
            let message = error.to_string();
            let named = directory.name_of(&format!("step-{:012}-delta/", job.steps));
            assert!(message.contains(&named) && message.contains("No space left on device"), "{message}");
            let found = latest_good(&directory, None, Depth::Checksums, &[]).await.unwrap();
            assert_eq!(found.checkpoint.unwrap().manifest().id, base.id);
            disk.empty();
            job.train(1);
            base = job.save(&directory, Some(&base)).await.unwrap();
            let found = latest_good(&directory, None, Depth::Checksums, &[]).await.unwrap();
            let checkpoint = found.checkpoint.unwrap();
            assert_eq!(checkpoint.manifest().id, base.id);
            assert_eq!(Job::restore(&checkpoint, 1).await.unwrap().digests(), job.digests());
        }
        let kept = retain(&directory, &identity("dnn"), NonZeroUsize::MIN, &[], &[]).await.unwrap();
        assert!(kept.unfinished.len() > 1, "{kept:?}");
    });
}

#[test]
fn a_large_file_that_does_not_fit_leaves_nothing() {
    let Some(disk) = Disk::mounted() else { return };
    let directory = local(&disk.0);
    runtime().block_on(async {
        let mut job = Job::new(1);
        job.train(1);
        let base = job.save(&directory, None).await.unwrap();
        let writer = CheckpointWriter::begin(&directory, Job { steps: 2, ..Job::new(1) }.begin(None)).await.unwrap();
        let large = vec![1; 2 * DISK_BYTES as usize];
        let error = save_state(&directory, writer.ticket(), "large", large).await.unwrap_err().to_string();
        let named = directory.name_of(&format!("{}/state-large-", writer.ticket().directory));
        assert!(error.contains(&named) && error.contains("No space left on device"), "{error}");
        assert_eq!(files(&disk.0.path().join(&writer.ticket().directory)), Vec::<String>::new());
        assert_eq!(last_good(&directory).await, base.id);
    });
}

async fn last_good(directory: &Directory) -> rectrain_checkpoint::CheckpointId {
    latest_good(directory, None, Depth::Checksums, &[]).await.unwrap().checkpoint.unwrap().id()
}

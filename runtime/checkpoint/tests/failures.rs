//! A storage that fails: during an upload, when it is full, when it does not answer. Nothing is
//! lost, the error names the cause, and the next attempt succeeds.

#![allow(clippy::unwrap_used, reason = "an unwrap in a test is an assertion")]

mod common;

use std::fmt;
use std::num::NonZeroUsize;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use bytes::Bytes;
use common::{Job, identity, runtime};
use futures::stream::BoxStream;
use object_store::memory::InMemory;
use object_store::path::Path;
use object_store::{
    CopyOptions, GetOptions, GetResult, ListResult, MultipartUpload, ObjectMeta, ObjectStore, PutMultipartOptions,
    PutOptions, PutPayload, PutResult, Result, UploadPart,
};
use rectrain_checkpoint::{CheckpointError, CheckpointWriter, Depth, RowsWriter, latest_good, retain};
use rectrain_storage::{Directory, StorageError};

/// A store with a limited number of bytes, like a full disk. A test can also make it unreachable.
#[derive(Debug)]
struct Small {
    inner: InMemory,
    left: Arc<AtomicU64>,
    dead: Arc<AtomicU64>,
}

fn full() -> object_store::Error {
    object_store::Error::Generic { store: "small", source: "No space left on device".into() }
}

impl Small {
    fn take(left: &AtomicU64, bytes: u64) -> Result<()> {
        left.fetch_update(Ordering::SeqCst, Ordering::SeqCst, |left| left.checked_sub(bytes)).map_err(|_| full())?;
        Ok(())
    }

    fn alive(&self) -> Result<()> {
        if self.dead.load(Ordering::SeqCst) == 0 {
            return Ok(());
        }
        Err(object_store::Error::Generic { store: "small", source: "connection refused".into() })
    }
}

impl fmt::Display for Small {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("small")
    }
}

#[derive(Debug)]
struct SmallUpload {
    inner: Box<dyn MultipartUpload>,
    left: Arc<AtomicU64>,
}

#[async_trait::async_trait]
impl MultipartUpload for SmallUpload {
    fn put_part(&mut self, data: PutPayload) -> UploadPart {
        match Small::take(&self.left, data.content_length() as u64) {
            Ok(()) => self.inner.put_part(data),
            Err(error) => Box::pin(std::future::ready(Err(error))),
        }
    }

    async fn complete(&mut self) -> Result<PutResult> {
        self.inner.complete().await
    }

    async fn abort(&mut self) -> Result<()> {
        self.inner.abort().await
    }
}

#[async_trait::async_trait]
impl ObjectStore for Small {
    async fn put_opts(&self, location: &Path, payload: PutPayload, options: PutOptions) -> Result<PutResult> {
        self.alive()?;
        Self::take(&self.left, payload.content_length() as u64)?;
        self.inner.put_opts(location, payload, options).await
    }

    async fn put_multipart_opts(
        &self,
        location: &Path,
        options: PutMultipartOptions,
    ) -> Result<Box<dyn MultipartUpload>> {
        self.alive()?;
        let inner = self.inner.put_multipart_opts(location, options).await?;
        Ok(Box::new(SmallUpload { inner, left: Arc::clone(&self.left) }))
    }

    async fn get_opts(&self, location: &Path, options: GetOptions) -> Result<GetResult> {
        self.alive()?;
        self.inner.get_opts(location, options).await
    }

    async fn get_ranges(&self, location: &Path, ranges: &[Range<u64>]) -> Result<Vec<Bytes>> {
        self.alive()?;
        self.inner.get_ranges(location, ranges).await
    }

    fn delete_stream(&self, locations: BoxStream<'static, Result<Path>>) -> BoxStream<'static, Result<Path>> {
        self.inner.delete_stream(locations)
    }

    fn list(&self, prefix: Option<&Path>) -> BoxStream<'static, Result<ObjectMeta>> {
        self.inner.list(prefix)
    }

    async fn list_with_delimiter(&self, prefix: Option<&Path>) -> Result<ListResult> {
        self.alive()?;
        self.inner.list_with_delimiter(prefix).await
    }

    async fn copy_opts(&self, from: &Path, to: &Path, options: CopyOptions) -> Result<()> {
        self.inner.copy_opts(from, to, options).await
    }
}

struct Failing {
    directory: Directory,
    left: Arc<AtomicU64>,
    dead: Arc<AtomicU64>,
}

fn failing(bytes: u64) -> Failing {
    let (left, dead) = (Arc::new(AtomicU64::new(bytes)), Arc::new(AtomicU64::new(0)));
    let store = Small { inner: InMemory::new(), left: Arc::clone(&left), dead: Arc::clone(&dead) };
    Failing { directory: Directory::in_store(Arc::new(store), Path::from("jobs/one"), "small://jobs/one"), left, dead }
}

/// A storage that fills up at any byte of the second checkpoint. The first stays the last good one,
/// the error names the cause, and the job's change marks stay. Once there is room again, the next
/// delta holds all changes.
#[test]
fn nothing_is_lost_wherever_the_space_runs_out() {
    runtime().block_on(async {
        let needed = {
            let storage = failing(u64::MAX);
            let mut job = Job::new(2);
            job.train(5);
            let base = job.save(&storage.directory, None).await.unwrap();
            let before = storage.left.load(Ordering::SeqCst);
            job.train(2);
            job.save(&storage.directory, Some(&base)).await.unwrap();
            before - storage.left.load(Ordering::SeqCst)
        };
        for room in (0..needed).step_by(needed as usize / 40) {
            let storage = failing(u64::MAX);
            let mut job = Job::new(2);
            job.train(5);
            let base = job.save(&storage.directory, None).await.unwrap();
            job.train(2);
            storage.left.store(room, Ordering::SeqCst);
            let error = job.save(&storage.directory, Some(&base)).await.unwrap_err();
            assert!(matches!(error, CheckpointError::Storage(StorageError::Store { .. })), "{error}");
            assert!(error.to_string().contains("No space left on device"), "{error}");
            assert!(error.to_string().contains("small://jobs/one/step-000000000007-delta/"), "{error}");
            let found = latest_good(&storage.directory, None, Depth::Checksums, &[]).await.unwrap();
            assert_eq!(found.checkpoint.unwrap().manifest().id, base.id);
            storage.left.store(u64::MAX, Ordering::SeqCst);
            let keep = NonZeroUsize::MIN;
            retain(&storage.directory, &identity("dnn"), keep, &[], &[]).await.unwrap();
            job.train(1);
            let delta = job.save(&storage.directory, Some(&base)).await.unwrap();
            let found = latest_good(&storage.directory, None, Depth::Checksums, &[]).await.unwrap();
            let checkpoint = found.checkpoint.unwrap();
            assert_eq!(checkpoint.manifest().id, delta.id);
            assert!(found.skipped.is_empty(), "unfinished checkpoints have been deleted: {:?}", found.skipped);
            assert_eq!(Job::restore(&checkpoint, 1).await.unwrap().digests(), job.digests());
        }
    });
}

#[test]
fn a_probe_names_the_operation_that_failed_and_leaves_nothing() {
    runtime().block_on(async {
        let storage = failing(3);
        let error = storage.directory.probe("probe-1").await.unwrap_err();
        assert!(error.is_outage() && !error.is_denied(), "{error}");
        assert!(error.to_string().starts_with("cannot write small://jobs/one/probe-1: "), "{error}");
        storage.left.store(u64::MAX, Ordering::SeqCst);
        storage.dead.store(1, Ordering::SeqCst);
        let error = storage.directory.probe("probe-1").await.unwrap_err().to_string();
        assert!(error.contains("cannot write") && error.contains("connection refused"), "{error}");
        storage.dead.store(0, Ordering::SeqCst);
        storage.directory.probe("probe-1").await.unwrap();
        assert_eq!(storage.directory.files("").await.unwrap(), []);
    });
}

#[test]
fn a_large_file_that_fails_in_mid_upload_does_not_appear() {
    runtime().block_on(async {
        let storage = failing(u64::MAX);
        let mut job = Job::new(1);
        job.train(1);
        let writer = CheckpointWriter::begin(&storage.directory, job.begin(None)).await.unwrap();
        storage.left.store(20 << 20, Ordering::SeqCst);
        let name = format!("{}/large.bin", writer.ticket().directory);
        let mut file = storage.directory.create(&name, 1 << 20);
        let mut written = 0;
        let error = loop {
            match file.write(vec![7_u8; 1 << 20]).await {
                Ok(()) => written += 1,
                Err(error) => break error,
            }
            assert!(written < 30, "at most a few parts are in flight beyond the failed one");
        };
        assert!(error.to_string().contains("No space left"), "{error}");
        assert!(file.finish().await.is_err());
        assert_eq!(storage.directory.size(&name).await.unwrap(), None);
    });
}

#[test]
fn an_unreachable_storage_is_an_error_and_no_reason_to_fall_back() {
    runtime().block_on(async {
        let storage = failing(u64::MAX);
        let mut job = Job::new(1);
        job.train(1);
        job.save(&storage.directory, None).await.unwrap();
        storage.dead.store(1, Ordering::SeqCst);
        let error = latest_good(&storage.directory, None, Depth::Sizes, &[]).await.unwrap_err();
        assert!(!error.is_checkpoints_fault() && error.to_string().contains("connection refused"), "{error}");
        storage.dead.store(0, Ordering::SeqCst);
        assert!(latest_good(&storage.directory, None, Depth::Sizes, &[]).await.unwrap().checkpoint.is_some());
    });
}

#[test]
fn slots_out_of_order_are_refused() {
    runtime().block_on(async {
        let storage = failing(u64::MAX);
        let mut job = Job::new(1);
        job.train(1);
        let writer = CheckpointWriter::begin(&storage.directory, job.begin(None)).await.unwrap();
        let snapshot = |slot| job.stores[0].snapshot_slot(rectrain_embedding::Slot(slot)).unwrap();
        let mut rows = RowsWriter::create(&storage.directory, writer.ticket(), 0, common::SLOTS, 0);
        rows.write(snapshot(2)).await.unwrap();
        assert!(matches!(rows.write(snapshot(1)).await, Err(CheckpointError::Incomplete { .. })));
    });
}

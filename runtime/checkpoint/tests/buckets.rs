//! Checkpoints in buckets: written to, found in and restored from real servers on loopback
//! (`storage/tests/servers`).

#![allow(clippy::unwrap_used, reason = "an unwrap in a test is an assertion")]

mod common;
#[path = "../../storage/tests/servers/mod.rs"]
mod servers;

use std::num::NonZeroUsize;
use std::sync::Arc;
use std::time::Duration;

use common::{Job, identity, local, runtime};
use futures::{StreamExt, TryStreamExt};
use object_store::aws::AmazonS3Builder;
use object_store::path::Path;
use rectrain_checkpoint::{CheckpointWriter, Depth, Kind, directory_name, latest_good, list, retain};
use rectrain_storage::Directory;
use servers::{BUCKET, Server};

/// A job's operations on its checkpoints.
async fn walk(directory: &Directory) {
    let mut job = Job::new(2);
    job.train(20);
    let full = job.save(directory, None).await.unwrap();
    job.train(2);
    let delta = job.save(directory, Some(&full)).await.unwrap();
    let found = latest_good(directory, Some(&identity("dnn")), Depth::Checksums, &[]).await.unwrap();
    let checkpoint = found.checkpoint.unwrap();
    assert_eq!(checkpoint.manifest().id, delta.id);
    assert_eq!(Job::restore(&checkpoint, 3).await.unwrap().digests(), job.digests());
    // An unfinished checkpoint, and one that is too old.
    directory.put("step-000000000001/rows-00000-12345678.bin", vec![1]).await.unwrap();
    job.train(1);
    let second = job.save(directory, None).await.unwrap();
    let retained = retain(directory, &identity("dnn"), NonZeroUsize::MIN, &[], &[]).await.unwrap();
    assert_eq!((retained.deleted.len(), retained.unfinished.len()), (2, 1));
    let left: Vec<String> = list(directory).await.unwrap().into_iter().map(|listed| listed.name).collect();
    assert_eq!(left, [second.directory()]);
}

#[test]
fn checkpoints_live_in_an_s3_bucket() {
    let Some(server) = servers::s3() else { return };
    let directory = Directory::open(&format!("s3://{BUCKET}/jobs/one"), &server.options, true).unwrap();
    runtime().block_on(walk(&directory));
}

#[test]
fn checkpoints_live_in_a_google_bucket_by_its_xml_api() {
    let Some(server) = servers::xml() else { return };
    let directory = Directory::open(&format!("gs://{BUCKET}/jobs/one"), &server.options, true).unwrap();
    runtime().block_on(walk(&directory));
}

/// More folders than a store lists in one answer, which is 1,000. All but the last hold attempts
/// that were never finished.
async fn find_the_last_of_1500(directory: &Directory) {
    const FOLDERS: u64 = 1500;
    let put = |file: String| async move { directory.put(&file, vec![1]).await };
    let unfinished = (1..FOLDERS).map(|step| format!("{}/rows-00000-12345678.bin", directory_name(step, Kind::Full)));
    let others = ["notes/readme", "step-1/rows.bin", "zz/rows.bin"].map(str::to_owned);
    let puts = futures::stream::iter(unfinished.chain(others)).map(put).buffer_unordered(16);
    puts.try_collect::<Vec<()>>().await.unwrap();
    let mut job = Job::new(1);
    job.train(2);
    job.steps = FOLDERS;
    let last = job.save(directory, None).await.unwrap();
    let found = latest_good(directory, Some(&identity("dnn")), Depth::Sizes, &[]).await.unwrap();
    assert_eq!(found.checkpoint.unwrap().id(), last.id);
    assert!(found.skipped.is_empty(), "{:?}", found.skipped);
    let steps: Vec<u64> = list(directory).await.unwrap().into_iter().map(|listed| listed.step).collect();
    assert_eq!(steps, (1..=FOLDERS).collect::<Vec<_>>());
}

#[test]
fn an_s3_bucket_lists_1500_checkpoints() {
    let Some(server) = servers::s3() else { return };
    let directory = Directory::open(&format!("s3://{BUCKET}/jobs/one"), &server.options, true).unwrap();
    runtime().block_on(find_the_last_of_1500(&directory));
}

#[test]
fn a_google_bucket_lists_1500_checkpoints() {
    let Some(server) = servers::xml() else { return };
    let directory = Directory::open(&format!("gs://{BUCKET}/jobs/one"), &server.options, true).unwrap();
    runtime().block_on(find_the_last_of_1500(&directory));
}

/// A job's checkpoints copied into a bucket, as when a job moves: found, verified, restored,
/// deleted.
#[test]
fn checkpoints_in_a_google_bucket_are_restored() {
    let Some(server) = servers::gcs() else { return };
    runtime().block_on(async {
        let folder = tempfile::tempdir().unwrap();
        let on_disk = local(&folder);
        let mut job = Job::new(2);
        job.train(20);
        let full = job.save(&on_disk, None).await.unwrap();
        job.train(2);
        let delta = job.save(&on_disk, Some(&full)).await.unwrap();
        for checkpoint in [&full, &delta] {
            for entry in on_disk.files(&checkpoint.directory()).await.unwrap() {
                let bytes = std::fs::read(folder.path().join(&entry.name)).unwrap();
                server.upload(&format!("jobs/one/{}", entry.name), &bytes);
            }
        }
        let directory = Directory::open(&format!("gs://{BUCKET}/jobs/one"), &server.options, true).unwrap();
        let found = latest_good(&directory, Some(&identity("dnn")), Depth::Checksums, &[]).await.unwrap();
        let checkpoint = found.checkpoint.unwrap();
        assert_eq!(checkpoint.manifest().id, delta.id);
        assert_eq!(Job::restore(&checkpoint, 3).await.unwrap().digests(), job.digests());
        // A file of the newest one is lost: the one before it is used.
        directory.delete(&[format!("{}/{}", delta.directory(), delta.files[0].name)]).await.unwrap();
        let found = latest_good(&directory, None, Depth::Sizes, &[]).await.unwrap();
        assert_eq!(found.checkpoint.unwrap().manifest().id, full.id);
        let reason = found.skipped[0].reason.to_string();
        assert!(reason.contains(&delta.files[0].name) && reason.contains("is missing"), "{reason}");
        retain(&directory, &identity("dnn"), NonZeroUsize::MIN, &[], &[]).await.unwrap();
        assert_eq!(Job::restore(&latest(&directory).await, 1).await.unwrap().steps, 20);
    });
}

async fn latest(directory: &Directory) -> rectrain_checkpoint::Checkpoint {
    latest_good(directory, None, Depth::Checksums, &[]).await.unwrap().checkpoint.unwrap()
}

/// The bucket, through a client that does not wait a minute for a server to come back.
fn impatient(server: &Server) -> Directory {
    let retry = object_store::RetryConfig {
        max_retries: 1,
        retry_timeout: Duration::from_secs(2),
        ..object_store::RetryConfig::default()
    };
    rectrain_storage::use_ring();
    let store = server
        .options
        .iter()
        .fold(AmazonS3Builder::new(), |store, (name, value)| store.with_config(name.parse().unwrap(), value));
    let store = store.with_bucket_name(BUCKET).with_retry(retry).build().unwrap();
    Directory::in_store(Arc::new(store), Path::from("jobs/one"), &format!("s3://{BUCKET}/jobs/one"))
}

/// The server dies while a checkpoint's largest file is being uploaded. The writer's error names
/// the file and the cause. The files that existed before exist when the server is back. The attempt
/// is no checkpoint, and the next one holds all changes.
#[test]
fn a_server_that_dies_in_mid_upload_costs_only_the_attempt() {
    let Some(mut server) = servers::s3() else { return };
    let directory = impatient(&server);
    runtime().block_on(async {
        let mut job = Job::new(2);
        job.train(5);
        let base = job.save(&directory, None).await.unwrap();
        job.train(2);
        let writer = CheckpointWriter::begin(&directory, job.begin(Some(&base))).await.unwrap();
        let ticket = writer.ticket().clone();
        let frozen = job.freeze(&ticket);
        let files = job.write_files(&directory, &ticket, &frozen).await.unwrap();
        let large = format!("{}/state-large.bin", ticket.directory);
        let mut upload = directory.create(&large, 5 << 20);
        for _ in 0..6 {
            upload.write(vec![7_u8; 5 << 20]).await.unwrap();
        }
        server.kill();
        let error = loop {
            if let Err(error) = upload.write(vec![7_u8; 5 << 20]).await {
                break error.to_string();
            }
        };
        let named = format!("cannot write s3://{BUCKET}/jobs/one/{large}: ");
        assert!(error.starts_with(&named) && error.contains("127.0.0.1"), "{error}");
        // The coordinator cannot finish it either. Looking for a checkpoint is an error, not
        // "none".
        let error = writer.commit(files).await.unwrap_err();
        assert!(!error.is_checkpoints_fault() && error.to_string().contains(&ticket.directory), "{error}");
        assert!(latest_good(&directory, None, Depth::Sizes, &[]).await.is_err());
        drop(frozen);

        server.restart();
        assert_eq!(directory.size(&large).await.unwrap(), None);
        let found = latest_good(&directory, None, Depth::Checksums, &[]).await.unwrap();
        assert_eq!(found.checkpoint.unwrap().manifest().id, base.id);
        let [skipped] = &found.skipped[..] else { panic!("{:?}", found.skipped) };
        assert!(skipped.reason.to_string().contains("never finished"), "{}", skipped.reason);
        job.train(1);
        let delta = job.save(&directory, Some(&base)).await.unwrap();
        retain(&directory, &identity("dnn"), NonZeroUsize::MIN, &[], &[]).await.unwrap();
        let checkpoint = latest(&directory).await;
        assert_eq!(checkpoint.manifest().id, delta.id);
        assert_eq!(Job::restore(&checkpoint, 1).await.unwrap().digests(), job.digests());
    });
}

//! A directory behaves the same on this machine, in memory and in the buckets of real servers.

#![allow(clippy::unwrap_used, reason = "an unwrap in a test is an assertion")]

mod servers;

use std::collections::BTreeMap;
use std::sync::Arc;

use object_store::memory::InMemory;
use object_store::path::Path;
use rectrain_storage::{Directory, Entry};

fn runtime() -> tokio::runtime::Runtime {
    tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap()
}

fn names(entries: Vec<Entry>) -> Vec<String> {
    entries.into_iter().map(|entry| entry.name).collect()
}

/// Bytes that differ from all near neighbours.
fn bytes(count: usize) -> Vec<u8> {
    (0..count).map(|index| (index % 251) as u8).collect()
}

/// Every operation of a directory, with files of several parts of `part` bytes.
async fn walk(directory: &Directory, part: usize) {
    assert_eq!(directory.folders().await.unwrap(), Vec::<String>::new());
    directory.probe("probe-1").await.unwrap();
    assert_eq!(names(directory.files("").await.unwrap()), Vec::<String>::new(), "a probe leaves nothing");
    directory.put("a/one", b"1".to_vec()).await.unwrap();
    directory.put("a/one", b"11".to_vec()).await.unwrap();
    let large = bytes(part * 7 / 2);
    let mut file = directory.create("b/two", part);
    for piece in large.chunks(part * 3 / 5) {
        file.write(piece.to_vec()).await.unwrap();
    }
    assert_eq!(directory.size("b/two").await.unwrap(), None, "a file does not appear before it is complete");
    file.finish().await.unwrap();
    assert_eq!(directory.size("b/two").await.unwrap(), Some(large.len() as u64));
    assert_eq!(directory.read("b/two", large.len() as u64).await.unwrap().unwrap(), large);
    let across = part - 2..part * 2 + 2;
    let read = directory.read_range("b/two", across.start as u64..across.end as u64).await.unwrap();
    assert_eq!(read[..], large[across]);
    assert!(directory.read_range("b/two", 5..large.len() as u64 + 1).await.is_err());
    assert_eq!(directory.read("a/one", 2).await.unwrap().unwrap(), b"11");
    assert!(directory.read("a/one", 1).await.unwrap_err().to_string().contains("a/one"));
    assert_eq!(directory.read("a/none", 1).await.unwrap(), None);
    let mut dropped = directory.create("b/three", part);
    dropped.write(bytes(part + 1)).await.unwrap();
    drop(dropped);
    directory.create("b/small", part).finish().await.unwrap();
    let whole = |name: &String| !name.contains("three");
    let found: Vec<String> = names(directory.files("b").await.unwrap()).into_iter().filter(whole).collect();
    assert_eq!(found, ["b/small", "b/two"]);
    assert_eq!(directory.folders().await.unwrap(), ["a", "b"]);
    assert_eq!(directory.size("b/three").await.unwrap(), None);
    directory.delete(&["a/one".into(), "a/none".into()]).await.unwrap();
    directory.delete_folder("b", "two").await.unwrap();
    directory.delete_folder("none", "x").await.unwrap();
    assert_eq!(names(directory.files("").await.unwrap()), Vec::<String>::new());
}

#[test]
fn a_local_directory() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("deep/down");
    let options = BTreeMap::new();
    assert!(
        Directory::open(path.to_str().unwrap(), &options, false).is_err(),
        "opening without `create` makes no folder"
    );
    let local = Directory::open(path.to_str().unwrap(), &options, true).unwrap();
    runtime().block_on(walk(&local, 5));
}

#[cfg(target_os = "linux")]
#[test]
fn a_folder_that_cannot_be_written_fails_its_probe() {
    // The kernel makes no files there, for root neither.
    for path in ["/proc/self", "/sys/kernel"] {
        let directory = Directory::open(path, &BTreeMap::new(), true).unwrap();
        let error = runtime().block_on(directory.probe("probe-1")).unwrap_err().to_string();
        assert!(error.starts_with(&format!("cannot write {path}/probe-1: ")), "{error}");
    }
}

/// Parts and reads that bypass the page cache, at unaligned offsets.
#[test]
fn a_local_directory_with_large_files() {
    let folder = tempfile::tempdir().unwrap();
    let directory = Directory::open(folder.path().to_str().unwrap(), &BTreeMap::new(), true).unwrap();
    runtime().block_on(async {
        walk(&directory, 1 << 20).await;
        let large = bytes((7 << 20) + 77);
        let mut file = directory.create("deep/down/large", 2 << 20);
        for piece in large.chunks(777_777) {
            file.write(piece.to_vec()).await.unwrap();
        }
        file.finish().await.unwrap();
        assert_eq!(std::fs::read(folder.path().join("deep/down/large")).unwrap(), large);
        for range in [0..large.len(), 5..(3 << 20) + 1, (4 << 20) + 3..large.len(), 4096..8192 << 8] {
            let read = directory.read_range("deep/down/large", range.start as u64..range.end as u64).await.unwrap();
            assert!(read[..] == large[range]);
        }
        assert!(directory.read_range("deep/down/large", 5..large.len() as u64 + 1).await.is_err());
        let error = directory.read_range("deep/none", 0..5 << 20).await.unwrap_err().to_string();
        assert!(error.contains("deep/none"), "{error}");
        assert_eq!(names(directory.files("deep/down").await.unwrap()), ["deep/down/large"]);
    });
}

#[test]
fn a_directory_in_memory() {
    let store = Directory::in_store(Arc::new(InMemory::new()), Path::from("x/y"), "memory");
    runtime().block_on(walk(&store, 5));
}

/// Object stores accept no part below 5 MiB, except the last one.
const PART: usize = 5 << 20;

#[test]
fn a_directory_in_an_s3_bucket() {
    let Some(server) = servers::s3() else { return };
    let path = format!("s3://{}/jobs/one", servers::BUCKET);
    runtime().block_on(walk(&Directory::open(&path, &server.options, true).unwrap(), PART));
}

#[test]
fn a_directory_in_a_google_bucket_by_its_xml_api() {
    let Some(server) = servers::xml() else { return };
    let path = format!("gs://{}/jobs/one", servers::BUCKET);
    runtime().block_on(walk(&Directory::open(&path, &server.options, true).unwrap(), PART));
}

#[test]
fn files_of_a_google_bucket_are_listed_read_and_deleted() {
    let Some(server) = servers::gcs() else { return };
    let path = format!("gs://{}/jobs/one", servers::BUCKET);
    let directory = Directory::open(&path, &server.options, true).unwrap();
    runtime().block_on(async {
        assert_eq!(directory.folders().await.unwrap(), Vec::<String>::new());
        server.upload("jobs/one/a/one", b"11");
        server.upload("jobs/one/b/two", &bytes(1000));
        server.upload("jobs/one/b/small", b"");
        server.upload("jobs/other/c", b"c");
        assert_eq!(directory.folders().await.unwrap(), ["a", "b"]);
        assert_eq!(names(directory.files("b").await.unwrap()), ["b/small", "b/two"]);
        assert_eq!(directory.size("b/two").await.unwrap(), Some(1000));
        assert_eq!(directory.size("b/three").await.unwrap(), None);
        assert_eq!(directory.read("b/two", 1000).await.unwrap().unwrap(), bytes(1000));
        assert_eq!(directory.read_range("b/two", 300..800).await.unwrap()[..], bytes(1000)[300..800]);
        assert!(directory.read_range("b/two", 900..1001).await.is_err());
        directory.delete(&["a/one".into(), "a/none".into()]).await.unwrap();
        directory.delete_folder("b", "two").await.unwrap();
        assert_eq!(names(directory.files("").await.unwrap()), Vec::<String>::new());
    });
}

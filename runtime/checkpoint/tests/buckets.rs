//! The same against a real S3 server on loopback: versitygw, built from its Go module into the user's cache once. Skipped,
//! aloud, where it is not there and cannot be built.

#![allow(clippy::unwrap_used, reason = "an unwrap in a test is an assertion")]

mod common;

use std::collections::BTreeMap;
use std::net::TcpListener;
use std::num::NonZeroUsize;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use common::{Job, identity, runtime};
use rectrain_checkpoint::{Depth, latest_good, list, retain};
use rectrain_storage::Directory;

/// A server that ends with the test.
struct Server(Child);

impl Drop for Server {
    fn drop(&mut self) {
        // It may have ended by itself.
        let _ended = self.0.kill();
        let _waited = self.0.wait();
    }
}

/// The program of a Go module, from the cache or built into it; none if that cannot be.
fn built(module: &str, name: &str) -> Option<PathBuf> {
    let cache = std::env::var_os("XDG_CACHE_HOME").map(PathBuf::from);
    let cache = cache.or_else(|| std::env::var_os("HOME").map(|home| Path::new(&home).join(".cache")))?;
    let folder = cache.join("rectrain/bin");
    let program = folder.join(name);
    if program.exists() {
        return Some(program);
    }
    std::fs::create_dir_all(&folder).ok()?;
    let built = Command::new("go").args(["install", module]).env("GOBIN", &folder).env("GOFLAGS", "-p=2").output();
    match built {
        Ok(output) if output.status.success() => Some(program),
        Ok(output) => {
            eprintln!("SKIPPED: {module} cannot be built: {}", String::from_utf8_lossy(&output.stderr));
            None
        }
        Err(error) => {
            eprintln!("SKIPPED: {name} is not there, and go cannot be run to build it: {error}");
            None
        }
    }
}

fn free_port() -> u16 {
    TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port()
}

/// Starts a server and waits until it accepts connections. Another program may take the free port first; then the server ends at
/// once and another port is tried.
fn started(make: impl Fn(u16) -> Command) -> (Server, u16) {
    for _ in 0..5 {
        let port = free_port();
        let mut command = make(port);
        command.stdout(Stdio::null()).stderr(Stdio::null());
        let mut server = Server(command.spawn().unwrap());
        let deadline = Instant::now() + Duration::from_secs(120);
        while Instant::now() < deadline && server.0.try_wait().unwrap().is_none() {
            if std::net::TcpStream::connect(("127.0.0.1", port)).is_ok() {
                return (server, port);
            }
            std::thread::sleep(Duration::from_millis(50));
        }
    }
    panic!("the server does not start")
}

/// What a job does with its checkpoints, with files large enough to be sent in parts.
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
    // A file of several parts, whole and in pieces.
    let mut file = directory.create("parts/large.bin", 5 << 20);
    let bytes: Vec<u8> = (0..17_u32 << 20).map(|index| (index % 251) as u8).collect();
    for piece in bytes.chunks(3 << 20) {
        file.write(piece.to_vec()).await.unwrap();
    }
    assert_eq!(directory.size("parts/large.bin").await.unwrap(), None);
    file.finish().await.unwrap();
    assert_eq!(directory.size("parts/large.bin").await.unwrap(), Some(bytes.len() as u64));
    let range = 5_000_000..11_000_000_u64;
    let read = directory.read_range("parts/large.bin", range.clone()).await.unwrap();
    assert_eq!(read[..], bytes[range.start as usize..range.end as usize]);
    directory.delete_folder("parts", "large.bin").await.unwrap();
    // What was never finished, and what is too old.
    directory.put("step-000000000001/rows-00000-12345678.bin", vec![1]).await.unwrap();
    job.train(1);
    let second = job.save(directory, None).await.unwrap();
    let retained = retain(directory, &identity("dnn"), NonZeroUsize::MIN, &[]).await.unwrap();
    assert_eq!((retained.deleted.len(), retained.unfinished.len()), (2, 1));
    let left: Vec<String> = list(directory).await.unwrap().into_iter().map(|listed| listed.name).collect();
    assert_eq!(left, [second.directory()]);
}

fn options(pairs: &[(&str, &str)]) -> BTreeMap<String, String> {
    pairs.iter().map(|&(name, value)| (name.to_owned(), value.to_owned())).collect()
}

#[test]
fn checkpoints_live_in_a_bucket_of_s3() {
    let Some(program) = built("github.com/versity/versitygw/cmd/versitygw@v1.8.0", "versitygw") else { return };
    let folder = tempfile::tempdir().unwrap();
    std::fs::create_dir(folder.path().join("checkpoints")).unwrap();
    let (_server, port) = started(|port| {
        let mut command = Command::new(&program);
        command.env("ROOT_ACCESS_KEY", "user").env("ROOT_SECRET_KEY", "password");
        command.args(["--port", &format!("127.0.0.1:{port}"), "posix"]).arg(folder.path());
        command
    });
    let endpoint = format!("http://127.0.0.1:{port}");
    let options = options(&[
        ("endpoint", &endpoint),
        ("access_key_id", "user"),
        ("secret_access_key", "password"),
        ("region", "us-east-1"),
        ("allow_http", "true"),
    ]);
    let directory = Directory::open("s3://checkpoints/jobs/one", &options, true).unwrap();
    runtime().block_on(walk(&directory));
}

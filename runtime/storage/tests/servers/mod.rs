//! Object stores on loopback for tests: real third-party servers, built once from their Go modules
//! into the user's cache. If a server is missing and cannot be built, the test says so and passes.

#![allow(dead_code, reason = "each test file uses a part of it")]

use std::collections::{BTreeMap, BTreeSet};
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Mutex;
use std::time::{Duration, Instant};

/// The bucket of every server.
pub const BUCKET: &str = "checkpoints";

/// A server that stops with the test.
pub struct Server {
    child: Child,
    /// On loopback.
    pub port: u16,
    /// Options of a path that reach this server.
    pub options: BTreeMap<String, String>,
    /// The files of a server that stores them on disk. They survive a restart of the server.
    _folder: tempfile::TempDir,
    make: Box<dyn Fn(u16) -> Command>,
}

impl Drop for Server {
    fn drop(&mut self) {
        self.kill();
    }
}

impl Server {
    /// Kills the server, as a crash would.
    pub fn kill(&mut self) {
        // It may have exited already.
        let _ended = self.child.kill();
        let _waited = self.child.wait();
    }

    /// Restarts the server on the same port.
    pub fn restart(&mut self) {
        self.kill();
        self.child = running(&self.make, self.port).expect("the server starts again");
    }
}

/// versitygw: S3, with signatures checked.
pub fn s3() -> Option<Server> {
    let program = built("github.com/versity/versitygw/cmd/versitygw@v1.8.0", "versitygw")?;
    let folder = tempfile::tempdir().unwrap();
    std::fs::create_dir(folder.path().join(BUCKET)).unwrap();
    let path = folder.path().to_owned();
    let mut server = started(folder, move |port| {
        let mut command = Command::new(&program);
        command.env("ROOT_ACCESS_KEY", "user").env("ROOT_SECRET_KEY", "password");
        command.args(["--port", &format!("127.0.0.1:{port}"), "posix"]).arg(&path);
        command
    });
    server.options.extend(options(&[
        ("access_key_id", "user"),
        ("secret_access_key", "password"),
        ("region", "us-east-1"),
        ("allow_http", "true"),
    ]));
    Some(server)
}

/// gofakes3, for `gs://`. The client uses Google's XML API for every request. Its paths, queries
/// and answers are S3's, multipart uploads included. `gcs` covers the parts that only Google has
/// (generations).
pub fn xml() -> Option<Server> {
    let program = built("github.com/johannesboyne/gofakes3/cmd/gofakes3@v1.2.0", "gofakes3")?;
    let server = started(tempfile::tempdir().unwrap(), move |port| {
        let mut command = Command::new(&program);
        command.args(["-host", &format!("127.0.0.1:{port}"), "-backend", "memory", "-initialbucket", BUCKET]);
        command
    });
    Some(anonymous(server))
}

/// fake-gcs-server. It serves reads, lists and deletions of the XML API. It refuses every XML
/// upload with `400 invalid uploadType`: it routes `PUT /bucket/object` and `POST
/// /bucket/object?uploads` to the handler of its JSON API, which looks for `uploadType` in the
/// query. So tests upload with [`Server::upload`].
pub fn gcs() -> Option<Server> {
    let program = built("github.com/fsouza/fake-gcs-server@v1.56.1", "fake-gcs-server")?;
    let server = started(tempfile::tempdir().unwrap(), move |port| {
        let mut command = Command::new(&program);
        command.args(["-scheme", "http", "-host", "127.0.0.1", "-backend", "memory", "-port", &port.to_string()]);
        // It serves the XML API only for this host.
        command.args(["-public-host", &format!("127.0.0.1:{port}")]);
        command
    });
    let made = server.post("/storage/v1/b", "application/json", format!("{{\"name\":\"{BUCKET}\"}}").as_bytes());
    assert!(made.starts_with("HTTP/1.1 200"), "{made}");
    Some(anonymous(server))
}

/// An account without keys. The client honours `skip_signature` for reads only; for writes it would
/// ask Google for a token.
fn anonymous(mut server: Server) -> Server {
    let account = format!(
        "{{\"gcs_base_url\":\"http://127.0.0.1:{}\",\"disable_oauth\":true,\"client_email\":\"\",\"private_key\":\"\",\
         \"private_key_id\":\"\"}}",
        server.port
    );
    server.options.extend(options(&[("service_account_key", &account), ("allow_http", "true")]));
    server
}

impl Server {
    /// Uploads an object to [`gcs`] with Google's JSON API.
    pub fn upload(&self, name: &str, bytes: &[u8]) {
        let name = name.replace('/', "%2F");
        let target = format!("/upload/storage/v1/b/{BUCKET}/o?uploadType=media&name={name}");
        let answer = self.post(&target, "application/octet-stream", bytes);
        assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
    }

    fn post(&self, target: &str, content_type: &str, body: &[u8]) -> String {
        let mut stream = TcpStream::connect(("127.0.0.1", self.port)).unwrap();
        let (port, length) = (self.port, body.len());
        let head = format!(
            "POST {target} HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nContent-Type: {content_type}\r\nContent-Length: {length}\r\n\
             Connection: close\r\n\r\n"
        );
        stream.write_all(head.as_bytes()).unwrap();
        stream.write_all(body).unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).unwrap();
        answer
    }
}

fn options(pairs: &[(&str, &str)]) -> BTreeMap<String, String> {
    pairs.iter().map(|&(name, value)| (name.to_owned(), value.to_owned())).collect()
}

/// The program of a Go module, from the cache or built into it. `None` if it cannot be built.
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
            eprintln!("SKIPPED: {name} is not there, and go, which would build it, cannot be run: {error}");
            None
        }
    }
}

/// A free port that no other test of this process was given. Two servers on one port would look
/// like one: the second exits only after the first has accepted the connection of its test.
fn free_port() -> u16 {
    static GIVEN: Mutex<BTreeSet<u16>> = Mutex::new(BTreeSet::new());
    loop {
        let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
        if GIVEN.lock().unwrap().insert(port) {
            return port;
        }
    }
}

/// Starts a server. If another program takes the free port first, the server exits and the next
/// attempt uses another port.
fn started(folder: tempfile::TempDir, make: impl Fn(u16) -> Command + 'static) -> Server {
    for _ in 0..5 {
        let port = free_port();
        if let Some(child) = running(&make, port) {
            let options = options(&[("endpoint", &format!("http://127.0.0.1:{port}"))]);
            return Server { child, port, options, _folder: folder, make: Box::new(make) };
        }
    }
    panic!("the server does not start")
}

/// A server on a port, once it accepts connections. `None` if it exits or takes minutes.
fn running(make: &dyn Fn(u16) -> Command, port: u16) -> Option<Child> {
    let mut child = make(port).stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
    let deadline = Instant::now() + Duration::from_secs(120);
    while Instant::now() < deadline && child.try_wait().unwrap().is_none() {
        if TcpStream::connect(("127.0.0.1", port)).is_ok() {
            return Some(child);
        }
        std::thread::sleep(Duration::from_millis(50));
    }
    let _ended = child.kill();
    let _waited = child.wait();
    None
}

//! A real Kafka broker on loopback for tests: one process in KRaft mode. Its jars come from Maven
//! once, into the user's cache. If it cannot be had, the test says so and passes.

#![allow(dead_code, reason = "each test file uses a part of it")]

use std::fmt::Write as _;
use std::net::{TcpListener, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

const VERSION: &str = "4.1.0";
/// The user of the listeners with SASL, and the password.
pub const USER: &str = "rectrain";
pub const PASSWORD: &str = "secret";
/// Any cluster ID will do.
const CLUSTER: &str = "MkU3OEVBNTcwNTJENDM2Qg";
/// It starts in 6 seconds on an idle machine.
const START: Duration = Duration::from_secs(180);

/// A broker that stops with the test.
pub struct Broker {
    child: Option<Child>,
    classes: String,
    folder: tempfile::TempDir,
    /// Without encryption or authentication.
    pub address: String,
    /// With SASL (PLAIN and SCRAM-SHA-512), without encryption.
    pub sasl_address: String,
    /// With SASL and TLS, if the broker has a certificate.
    pub tls_address: String,
}

impl Drop for Broker {
    fn drop(&mut self) {
        self.kill();
    }
}

impl Broker {
    /// A broker. `None` if there is no Java or Maven here.
    pub fn start() -> Option<Self> {
        Self::start_with("", &[])
    }

    /// A broker with a certificate and its key as PEM, if it is not empty, and more settings.
    pub fn start_with(certificate: &str, settings: &[&str]) -> Option<Self> {
        let classes = format!("{}/*", jars()?.display());
        // Another program may take a free port first.
        (0..5).find_map(|_| Self::try_start(&classes, certificate, settings)).or_else(|| panic!("Kafka does not start"))
    }

    fn try_start(classes: &str, certificate: &str, settings: &[&str]) -> Option<Self> {
        let folder = tempfile::tempdir().unwrap();
        let [plain, sasl, tls, controller] = [(); 4].map(|()| free_port());
        let mut text = properties(folder.path(), [plain, sasl, tls, controller], !certificate.is_empty());
        settings.iter().for_each(|setting| writeln!(text, "{setting}").unwrap());
        std::fs::write(folder.path().join("keystore.pem"), certificate).unwrap();
        std::fs::write(folder.path().join("server.properties"), text).unwrap();
        let address = |port: u16| format!("127.0.0.1:{port}");
        let mut broker = Self {
            child: None,
            classes: classes.to_owned(),
            folder,
            address: address(plain),
            sasl_address: address(sasl),
            tls_address: address(tls),
        };
        let scram = format!("SCRAM-SHA-512=[name={USER},password={PASSWORD}]");
        let format = ["format", "-t", CLUSTER, "--add-scram", &scram, "-c"];
        let formatted = broker.java("kafka.tools.StorageTool").args(format).arg(broker.settings()).output().unwrap();
        assert!(formatted.status.success(), "{}", String::from_utf8_lossy(&formatted.stderr));
        broker.run().then_some(broker)
    }

    fn settings(&self) -> PathBuf {
        self.folder.path().join("server.properties")
    }

    fn java(&self, class: &str) -> Command {
        let mut command = Command::new("java");
        command.args(["-Xmx512m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", "-cp", &self.classes, class]);
        command.stdin(Stdio::null());
        command
    }

    /// Runs the broker until it answers. `false` if it exits before.
    fn run(&mut self) -> bool {
        let log = std::fs::File::create(self.folder.path().join("log")).unwrap();
        let mut command = self.java("kafka.Kafka");
        command.arg(self.settings()).stdout(log.try_clone().unwrap()).stderr(log);
        let mut child = command.spawn().unwrap();
        let deadline = Instant::now() + START;
        while child.try_wait().unwrap().is_none() {
            if TcpStream::connect(&self.address).is_ok() {
                self.child = Some(child);
                return true;
            }
            assert!(Instant::now() < deadline, "Kafka does not answer");
            std::thread::sleep(Duration::from_millis(100));
        }
        false
    }

    /// Kills the broker, as a crash would. Its records stay.
    pub fn kill(&mut self) {
        if let Some(mut child) = self.child.take() {
            // It may have exited already.
            let _ended = child.kill();
            let _waited = child.wait();
        }
    }

    /// Starts the broker again on the same ports, with its records.
    pub fn restart(&mut self) {
        self.kill();
        assert!(self.run(), "Kafka starts again");
    }
}

fn properties(folder: &Path, [plain, sasl, tls, controller]: [u16; 4], has_tls: bool) -> String {
    let mut listeners = format!("PLAINTEXT://127.0.0.1:{plain},SASL_PLAINTEXT://127.0.0.1:{sasl}");
    if has_tls {
        write!(listeners, ",SASL_SSL://127.0.0.1:{tls}").unwrap();
    }
    let folder = folder.display();
    let mut text = format!(
        "process.roles=broker,controller
node.id=1
controller.quorum.voters=1@127.0.0.1:{controller}
listeners={listeners},CONTROLLER://127.0.0.1:{controller}
advertised.listeners={listeners}
controller.listener.names=CONTROLLER
inter.broker.listener.name=PLAINTEXT
listener.security.protocol.map=PLAINTEXT:PLAINTEXT,CONTROLLER:PLAINTEXT,SASL_PLAINTEXT:SASL_PLAINTEXT,SASL_SSL:SASL_SSL
sasl.enabled.mechanisms=PLAIN,SCRAM-SHA-512
log.dirs={folder}/logs
auto.create.topics.enable=false
offsets.topic.replication.factor=1
transaction.state.log.replication.factor=1
transaction.state.log.min.isr=1
message.max.bytes=33554432
"
    );
    for listener in ["sasl_plaintext", "sasl_ssl"] {
        let security = "org.apache.kafka.common.security";
        writeln!(
            text,
            "listener.name.{listener}.plain.sasl.jaas.config={security}.plain.PlainLoginModule required user_{USER}=\"{PASSWORD}\";
listener.name.{listener}.scram-sha-512.sasl.jaas.config={security}.scram.ScramLoginModule required;"
        )
        .unwrap();
    }
    if has_tls {
        writeln!(text, "ssl.keystore.type=PEM\nssl.keystore.location={folder}/keystore.pem").unwrap();
    }
    text
}

const PROJECT: &str = "<project xmlns=\"http://maven.apache.org/POM/4.0.0\">
  <modelVersion>4.0.0</modelVersion>
  <groupId>dev.rectrain</groupId><artifactId>kafka</artifactId><version>1</version>
  <dependencies><dependency>
    <groupId>org.apache.kafka</groupId><artifactId>kafka_2.13</artifactId><version>VERSION</version>
  </dependency></dependencies>
</project>
";

/// The folder with Kafka's jars, from the cache or fetched into it. `None` if they cannot be had.
fn jars() -> Option<PathBuf> {
    let cache = std::env::var_os("XDG_CACHE_HOME").map(PathBuf::from);
    let cache = cache.or_else(|| std::env::var_os("HOME").map(|home| Path::new(&home).join(".cache")))?;
    let folder = cache.join(format!("rectrain/kafka-{VERSION}"));
    if folder.join("lib").is_dir() {
        return Some(folder.join("lib"));
    }
    // Another test may fetch them at the same time: each has a folder of its own, and the first one
    // is kept.
    std::fs::create_dir_all(&folder).ok()?;
    let own = tempfile::tempdir_in(&folder).ok()?;
    std::fs::write(own.path().join("pom.xml"), PROJECT.replace("VERSION", VERSION)).ok()?;
    let goal = ["-q", "-B", "dependency:copy-dependencies", "-DincludeScope=runtime", "-DoutputDirectory=lib"];
    match Command::new("mvn").args(goal).current_dir(own.path()).output() {
        Ok(output) if output.status.success() => {
            // Only the first rename succeeds.
            let _renamed = std::fs::rename(own.path().join("lib"), folder.join("lib"));
            Some(folder.join("lib"))
        }
        Ok(output) => {
            eprintln!("SKIPPED: Kafka {VERSION} cannot be fetched: {}", String::from_utf8_lossy(&output.stdout));
            None
        }
        Err(error) => {
            eprintln!("SKIPPED: Kafka {VERSION} is not there, and mvn, which would fetch it, cannot be run: {error}");
            None
        }
    }
}

fn free_port() -> u16 {
    TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port()
}

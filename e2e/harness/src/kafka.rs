//! A real Kafka broker on loopback: one process in KRaft mode. Its jars come from Maven once, into
//! the user's cache.

use std::collections::BTreeSet;
use std::io::{BufRead, BufReader, Write};
use std::net::TcpStream;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use crate::command::{command, output, start};
use crate::http::free_address;
use crate::skips::is_ci;
use crate::{HarnessError, files, not_yet};

const VERSION: &str = "4.1.0";
/// The user of the listeners with SASL.
pub const USER: &str = "rectrain";
/// The user's password.
pub const PASSWORD: &str = "secret";
/// The ID of each broker's cluster. Any would do.
pub const CLUSTER: &str = "MkU3OEVBNTcwNTJENDM2Qg";
/// It starts in 6 seconds on an idle machine.
const START: Duration = Duration::from_secs(180);
/// Another program may take a free port first.
const ATTEMPTS: u32 = 5;

/// Changes of topics, and transactions. Java compiles it when it runs it.
const ADMIN: &str = include_str!("KafkaAdmin.java");

/// A broker that stops when it is dropped.
pub struct Broker {
    child: Option<Child>,
    classes: String,
    folder: PathBuf,
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
        // The system removes it some day otherwise.
        let _removed = std::fs::remove_dir_all(&self.folder);
    }
}

impl Broker {
    /// A broker for a test. Without Java or Maven the test says so, and has none.
    ///
    /// # Panics
    /// See [`for_test_with`](Self::for_test_with).
    #[must_use]
    pub fn for_test() -> Option<Self> {
        Self::for_test_with("")
    }

    /// As [`for_test`](Self::for_test). The tests of a process have one broker together, so each of
    /// them needs topics of its own. It ends with the process.
    ///
    /// # Panics
    /// See [`for_test_with`](Self::for_test_with).
    #[must_use]
    #[allow(clippy::panic, reason = "only tests call it")]
    pub fn shared_for_test() -> Option<Arc<Self>> {
        static SHARED: Mutex<Option<(Arc<Broker>, Child)>> = Mutex::new(None);
        let mut shared = SHARED.lock();
        if let Some((broker, _)) = &*shared {
            return Some(Arc::clone(broker));
        }
        let broker = Arc::new(Self::for_test()?);
        // No value of a static is ever dropped.
        let remover = remove_at_end(&broker.folder).unwrap_or_else(|error| panic!("{error}"));
        *shared = Some((Arc::clone(&broker), remover));
        Some(broker)
    }

    /// As [`for_test`](Self::for_test), with a certificate and its key as PEM.
    ///
    /// # Panics
    /// The broker does not start, although it is there. With `CI=true` also without Java or Maven.
    #[must_use]
    #[allow(clippy::panic, reason = "only tests call it")]
    pub fn for_test_with(certificate: &str) -> Option<Self> {
        if let Err(reason) = output(&mut command("java", ["-version"])).and_then(|_| jars()) {
            assert!(!is_ci(), "CI=true forbids to skip the tests with Kafka: {reason}");
            eprintln!("SKIPPED: {reason}");
            return None;
        }
        Some(Self::start(certificate).unwrap_or_else(|error| panic!("{error}")))
    }

    /// A broker. It has a listener with TLS if there is a certificate with its key, as PEM.
    ///
    /// # Errors
    /// [`HarnessError::NotYet`] without Java or Maven; a broker that does not start.
    pub fn start(certificate: &str) -> Result<Self, HarnessError> {
        let classes = format!("{}/*", jars()?.display());
        for _ in 1..ATTEMPTS {
            if let Some(broker) = Self::try_start(&classes, certificate)? {
                return Ok(broker);
            }
        }
        let found = Self::try_start(&classes, certificate)?;
        found.ok_or_else(|| not_yet(format!("Kafka does not start within {ATTEMPTS} attempts")))
    }

    /// `None` if the broker exits.
    fn try_start(classes: &str, certificate: &str) -> Result<Option<Self>, HarnessError> {
        static NUMBER: AtomicU32 = AtomicU32::new(0);
        let name = format!("rectrain-kafka-{}-{}", std::process::id(), NUMBER.fetch_add(1, Ordering::Relaxed));
        let folder = std::env::temp_dir().join(name);
        std::fs::create_dir_all(&folder).map_err(HarnessError::io("create", folder.display()))?;
        let mut ports = [0; 4];
        for port in &mut ports {
            *port = free_address()?.port();
        }
        let [plain, sasl, tls, _] = ports.map(|port| format!("127.0.0.1:{port}"));
        let mut broker = Self {
            child: None,
            classes: classes.to_owned(),
            folder,
            address: plain,
            sasl_address: sasl,
            tls_address: tls,
        };
        files::write(&broker.folder.join("keystore.pem"), certificate)?;
        files::write(&broker.settings(), properties(&broker.folder, ports, !certificate.is_empty()))?;
        files::write(&broker.folder.join("KafkaAdmin.java"), ADMIN)?;
        let scram = format!("SCRAM-SHA-512=[name={USER},password={PASSWORD}]");
        let format = ["format", "-t", CLUSTER, "--add-scram", &scram, "-c"];
        let settings = broker.settings();
        output(broker.java("kafka.tools.StorageTool").args(format).arg(settings))?;
        Ok(broker.run()?.then_some(broker))
    }

    fn settings(&self) -> PathBuf {
        self.folder.join("server.properties")
    }

    fn java(&self, class: &str) -> Command {
        command("java", ["-Xmx512m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", "-cp", &self.classes, class])
    }

    /// Runs the broker until it answers. `false` if it exits before.
    fn run(&mut self) -> Result<bool, HarnessError> {
        let settings = self.settings();
        let mut java = self.java("kafka.Kafka");
        let mut child = start(tied(java.arg(settings)).stdout(Stdio::null()).stderr(Stdio::null()))?;
        let began = Instant::now();
        while began.elapsed() < START {
            if child.try_wait().map_err(HarnessError::io("wait for", "Kafka"))?.is_some() {
                return Ok(false);
            }
            if TcpStream::connect(&self.address).is_ok() {
                self.child = Some(child);
                return Ok(true);
            }
            std::thread::sleep(Duration::from_millis(100));
        }
        self.child = Some(child);
        Err(not_yet(format!("Kafka does not answer within {} s", START.as_secs())))
    }

    /// The overrides of a job that trains a topic of JSON records, up to the end that it has when
    /// the job starts.
    #[must_use]
    pub fn source(&self, topic: &str) -> String {
        let kafka = "spec.data.train.kafka";
        format!(
            "spec.data.train.paths=null,{kafka}.bootstrapServers={{{}}},{kafka}.topics={{{topic}}},\
             {kafka}.format=json,{kafka}.until=latest",
            self.address
        )
    }

    /// Changes a topic, as only its administrator does. `arguments` are a command, a topic, and the
    /// values of the command: `partitions TOPIC COUNT`, `delete-records TOPIC PARTITION OFFSET`
    /// (the records before it), `delete TOPIC`, or `compacted TOPIC`, which makes a topic that is
    /// compacted at once.
    ///
    /// # Errors
    /// The broker refuses, or Java cannot compile a file: it needs a JDK.
    pub fn administer(&self, arguments: &[&str]) -> Result<(), HarnessError> {
        output(self.admin().args(arguments)).map(drop)
    }

    /// A producer that writes transactions to a partition.
    ///
    /// # Errors
    /// It does not start.
    pub fn transactions(&self, topic: &str, partition: u32) -> Result<Transactions, HarnessError> {
        let partition = partition.to_string();
        let mut producer = self.admin();
        let producer = producer.args(["write", topic, &partition]).stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = start(producer.stderr(Stdio::null()))?;
        let pipes = child.stdin.take().zip(child.stdout.take());
        let Some((commands, answers)) = pipes else { return Err(not_yet("the producer has no pipes")) };
        Ok(Transactions { child, commands, answers: BufReader::new(answers) })
    }

    fn admin(&self) -> Command {
        let source = self.folder.join("KafkaAdmin.java");
        let mut java = self.java(&source.to_string_lossy());
        java.arg(&self.address);
        java
    }

    /// Kills the broker, as a crash would. Its records stay.
    pub fn kill(&mut self) {
        if let Some(mut child) = self.child.take() {
            // It may have exited already.
            let _ended = child.kill();
            let _waited = child.wait();
        }
    }

    /// Kills the broker, and starts it again on the same ports with its records.
    ///
    /// # Errors
    /// It does not start.
    pub fn restart(&mut self) -> Result<(), HarnessError> {
        self.kill();
        if self.run()? { Ok(()) } else { Err(not_yet("Kafka does not start again")) }
    }
}

/// A producer that writes transactions. It ends when it is dropped, and an open transaction stays
/// open for ten minutes.
pub struct Transactions {
    child: Child,
    commands: ChildStdin,
    answers: BufReader<ChildStdout>,
}

impl Drop for Transactions {
    fn drop(&mut self) {
        // It may have exited already.
        let _ended = self.child.kill();
        let _waited = self.child.wait();
    }
}

impl Transactions {
    /// Writes records. One with a tab has its key before it.
    ///
    /// # Errors
    /// The producer has ended.
    pub fn write(&mut self, values: &[String]) -> Result<(), HarnessError> {
        let text: String = values.iter().flat_map(|value| [value, "\n"]).collect();
        self.commands.write_all(text.as_bytes()).map_err(HarnessError::io("write to", "the producer"))
    }

    /// Obeys `begin`, `flush`, `commit` or `abort`. The broker has done it when this returns.
    ///
    /// # Errors
    /// The producer has ended.
    pub fn order(&mut self, command: &str) -> Result<(), HarnessError> {
        self.write(&[command.to_owned()])?;
        let mut answer = String::new();
        self.answers.read_line(&mut answer).map_err(HarnessError::io("read from", "the producer"))?;
        if answer.trim() == command { Ok(()) } else { Err(not_yet(format!("the producer could not {command}"))) }
    }
}

/// The broker keeps records of any time. By default it deletes the ones older than a week, from
/// half a minute after its start on.
fn properties(folder: &Path, [plain, sasl, tls, controller]: [u16; 4], has_tls: bool) -> String {
    let mut listeners = format!("PLAINTEXT://127.0.0.1:{plain},SASL_PLAINTEXT://127.0.0.1:{sasl}");
    if has_tls {
        listeners += &format!(",SASL_SSL://127.0.0.1:{tls}");
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
log.retention.ms=-1
log.cleaner.backoff.ms=200
"
    );
    let security = "org.apache.kafka.common.security";
    for listener in ["sasl_plaintext", "sasl_ssl"] {
        let plain = format!("{security}.plain.PlainLoginModule required user_{USER}=\"{PASSWORD}\";");
        let scram = format!("{security}.scram.ScramLoginModule required;");
        text += &format!("listener.name.{listener}.plain.sasl.jaas.config={plain}\n");
        text += &format!("listener.name.{listener}.scram-sha-512.sasl.jaas.config={scram}\n");
    }
    if has_tls {
        text += &format!("ssl.keystore.type=PEM\nssl.keystore.location={folder}/keystore.pem\n");
    }
    text
}

/// Kills the program that it runs when its standard input ends.
const TIED: &str = r#"exec 3<&0; (cat <&3 >/dev/null; kill -9 $$) & exec "$@" </dev/null 3<&-"#;

/// The same command, which ends with the process that starts it, even if that is killed. It has the
/// process number of the command.
fn tied(inner: &Command) -> Command {
    let mut tied = command("sh", ["-c", TIED, "sh"]);
    tied.arg(inner.get_program()).args(inner.get_args()).stdin(Stdio::piped());
    tied
}

/// Removes a folder some time after its standard input has ended.
const REMOVE: &str = r#"cat >/dev/null; sleep 1; rm -rf -- "$0""#;

/// Starts a process that removes a folder when this process has ended, and its broker with it.
fn remove_at_end(folder: &Path) -> Result<Child, HarnessError> {
    let mut remover = command("sh", ["-c", REMOVE]);
    start(remover.arg(folder).stdin(Stdio::piped()).stdout(Stdio::null()).stderr(Stdio::null()))
}

const PROJECT: &str = "<project xmlns=\"http://maven.apache.org/POM/4.0.0\">
  <modelVersion>4.0.0</modelVersion>
  <groupId>dev.rectrain</groupId><artifactId>kafka</artifactId><version>1</version>
  <dependencies><dependency>
    <groupId>org.apache.kafka</groupId><artifactId>kafka_2.13</artifactId><version>VERSION</version>
  </dependency></dependencies>
</project>
";

/// The SHA-256 of each of Kafka's jars, as `sha256sum` prints it.
const JARS: &str = include_str!("kafka.sha256");

/// The program `java` on the PATH, as the file in its installation that a link may lead to.
///
/// # Errors
/// [`HarnessError::NotYet`] without Java.
pub fn java() -> Result<PathBuf, HarnessError> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let mut programs = std::env::split_paths(&path).filter_map(|folder| folder.join("java").canonicalize().ok());
    programs.next().ok_or_else(|| not_yet("Kafka needs Java, and `java` is not on the PATH"))
}

/// The folder with Kafka's jars, from the cache or fetched into it. They are checked once in a
/// process.
///
/// # Errors
/// [`HarnessError::NotYet`] if they cannot be fetched, or are other files.
pub fn jars() -> Result<PathBuf, HarnessError> {
    // Several tests of one process may need them at the same time.
    static CHECKED: Mutex<Option<PathBuf>> = Mutex::new(None);
    let mut checked = CHECKED.lock();
    if let Some(jars) = &*checked {
        return Ok(jars.clone());
    }
    let cache = std::env::var_os("XDG_CACHE_HOME").map(PathBuf::from);
    let cache = cache.or_else(|| std::env::var_os("HOME").map(|home| Path::new(&home).join(".cache")));
    let cache = cache.ok_or_else(|| not_yet("there is no folder for Kafka's jars: set HOME"))?;
    let folder = cache.join(format!("rectrain/kafka-{VERSION}"));
    let jars = folder.join("lib");
    if jars.is_dir() {
        check(&jars)?;
    } else {
        fetch(&folder, &jars)?;
    }
    Ok(checked.insert(jars).clone())
}

/// Fetches Kafka's jars with Maven, and checks them.
fn fetch(folder: &Path, jars: &Path) -> Result<(), HarnessError> {
    // Another process may fetch them at the same time: each has a folder of its own, and the first
    // one is kept.
    let own = folder.join(format!("fetch-{}", std::process::id()));
    files::write(&own.join("pom.xml"), PROJECT.replace("VERSION", VERSION))?;
    let goal = ["-q", "-B", "dependency:copy-dependencies", "-DincludeScope=runtime", "-DoutputDirectory=lib"];
    let fetched = output(command("mvn", goal).current_dir(&own)).and_then(|_| check(&own.join("lib")));
    let renamed = fetched.is_ok() && std::fs::rename(own.join("lib"), jars).is_ok();
    let _removed = std::fs::remove_dir_all(&own);
    match fetched {
        Ok(()) if renamed || jars.is_dir() => Ok(()),
        Ok(()) => Err(not_yet(format!("Kafka {VERSION} cannot be kept in {}", jars.display()))),
        Err(error) => Err(not_yet(format!("Kafka {VERSION} cannot be fetched: {error}"))),
    }
}

/// Checks that a folder has Kafka's jars and nothing else.
fn check(jars: &Path) -> Result<(), HarnessError> {
    let entries = std::fs::read_dir(jars).and_then(Iterator::collect::<std::io::Result<Vec<_>>>);
    let entries = entries.map_err(HarnessError::io("list", jars.display()))?;
    let names = entries.iter().map(std::fs::DirEntry::file_name);
    let found = output(command("sha256sum", names).current_dir(jars))?;
    if lines(&found) == lines(JARS) {
        return Ok(());
    }
    let problem = format!("{} has other files than Kafka {VERSION}, by their SHA-256: remove it", jars.display());
    Err(not_yet(problem))
}

fn lines(text: &str) -> BTreeSet<&str> {
    text.lines().collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_tied_process_ends_with_its_input() {
        let mut child = start(&mut tied(&command("sleep", ["1000"]))).unwrap();
        assert!(child.try_wait().unwrap().is_none());
        drop(child.stdin.take());
        assert!(!child.wait().unwrap().success());
    }

    #[test]
    fn a_folder_is_removed_after_its_remover_has_no_input() {
        let folder = std::env::temp_dir().join(format!("rectrain-removed-{}", std::process::id()));
        files::write(&folder.join("file"), "").unwrap();
        let mut remover = remove_at_end(&folder).unwrap();
        assert!(remover.try_wait().unwrap().is_none() && folder.exists());
        drop(remover.stdin.take());
        assert!(remover.wait().unwrap().success());
        assert!(!folder.exists());
    }

    #[test]
    fn only_the_jars_of_the_list_are_kafka() {
        for line in JARS.lines() {
            let (digest, name) = line.split_once("  ").unwrap();
            assert!(digest.len() == 64 && digest.bytes().all(|byte| byte.is_ascii_hexdigit()), "{line}");
            assert!(name.ends_with(".jar"), "{line}");
        }
        assert!(JARS.contains(&format!("  kafka_2.13-{VERSION}.jar\n")));
        let folder = std::env::temp_dir().join(format!("rectrain-jars-{}", std::process::id()));
        files::write(&folder.join(format!("kafka_2.13-{VERSION}.jar")), "another one").unwrap();
        let error = check(&folder).unwrap_err().to_string();
        std::fs::remove_dir_all(&folder).unwrap();
        assert!(error.contains("has other files than Kafka"), "{error}");
    }

    #[test]
    fn a_listener_with_tls_needs_a_certificate() {
        let text = |has_tls| properties(Path::new("/k"), [1, 2, 3, 4], has_tls);
        let plain = "listeners=PLAINTEXT://127.0.0.1:1,SASL_PLAINTEXT://127.0.0.1:2";
        assert!(text(false).contains(&format!("{plain},CONTROLLER://127.0.0.1:4\nadvertised.{plain}\n")));
        assert!(text(true).contains(&format!("{plain},SASL_SSL://127.0.0.1:3,CONTROLLER")));
        assert_eq!([false, true].map(|has_tls| text(has_tls).contains("keystore")), [false, true]);
    }
}

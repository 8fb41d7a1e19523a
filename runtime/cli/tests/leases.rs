//! Two runs on one checkpoint path: the second is refused while the first lives, and takes over
//! when it is dead.

#![cfg(target_os = "linux")]
#![allow(clippy::unwrap_used, reason = "an unwrap in a test is an assertion")]

mod children;
mod common;

use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Child, Command, Output, Stdio};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use children::children_of;
use common::{events, rectrain};

const JOB: &str = "
apiVersion: rectrain.dev/v1alpha1
kind: RecTrainingJob
metadata: {name: leases}
spec:
  model: {kind: lr}
  features:
    sparse: [{name: 'C{1..26}'}]
  data:
    synthetic: {rows: 3000, testRows: 500, vocabulary: 1000}
  training: {globalBatchSize: 128}
  checkpoint: {path: ck, everySteps: 5, resume: latest}
";
const LONG: &str = "spec.data.synthetic.rows=300000000";

fn folder() -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("job.yaml"), JOB).unwrap();
    folder
}

fn run(folder: &Path, arguments: &[&str]) -> Output {
    rectrain(folder, &[&["run", "job.yaml", "--json"], arguments].concat())
}

/// Starts a run and returns when it has saved a checkpoint.
fn training(folder: &Path, arguments: &[&str]) -> Child {
    let mut command = Command::new(env!("CARGO_BIN_EXE_rectrain"));
    command.args(["run", "job.yaml", "--json"]).args(arguments).current_dir(folder);
    let mut child = command.stdout(Stdio::piped()).stderr(Stdio::null()).spawn().unwrap();
    let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
    while !lines.next().unwrap().unwrap().contains("checkpointSaved") {}
    // The run must be able to write until it is killed.
    std::thread::spawn(move || lines.count());
    child
}

fn assert_refused(output: &Output, parts: &[&str]) {
    let message = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(2), "{message}");
    for part in [&["spec.checkpoint.path: ", "is in use by ", "wait for its end"], parts].concat() {
        assert!(message.contains(part), "`{part}` is not in: {message}");
    }
    let told = String::from_utf8_lossy(&output.stdout);
    assert!(!told.contains("restarting") && !told.contains("progress"), "{told}");
}

/// The run that is refused has the same or another manifest, and is in one process or in many.
#[test]
fn a_second_run_is_refused_until_the_first_is_killed() {
    let folder = folder();
    let mut first = training(folder.path(), &["--set", LONG]);
    let process = format!("process {} on ", first.id());
    for arguments in
        [&[][..], &["--processes"], &["--set", "metadata.name=other"], &["--set", "spec.checkpoint.resume=none"]]
    {
        let refused = run(folder.path(), arguments);
        assert_refused(&refused, &["job `leases`", &process, "s ago"]);
    }
    assert_eq!(first.try_wait().unwrap(), None, "the first run does not notice");
    first.kill().unwrap();
    first.wait().unwrap();
    assert!(folder.path().join("ck/lease.json").exists());
    let (started, sets) = (Instant::now(), ["--set", LONG, "--set", "spec.training.steps=1"]);
    let told = events(&run(folder.path(), &sets));
    assert!(started.elapsed().as_secs() < 25, "it does not wait for the expiry");
    assert!(told.iter().any(|event| event["event"] == "resumed"));
    assert!(!folder.path().join("ck/lease.json").exists(), "a run that ends releases the lease");
}

#[test]
fn a_run_in_many_processes_holds_the_lease_too() {
    let folder = folder();
    let mut first = training(folder.path(), &["--processes", "--set", LONG]);
    assert_refused(&run(folder.path(), &[]), &["job `leases`"]);
    // SIGTERM: it ends in order.
    Command::new("kill").arg(first.id().to_string()).status().unwrap();
    first.wait().unwrap();
    let second = run(folder.path(), &["--set", LONG, "--set", "spec.training.steps=1"]);
    assert!(second.status.success(), "{}", String::from_utf8_lossy(&second.stderr));
}

/// SIGKILL gives the launcher no chance to end its processes.
#[test]
fn the_processes_of_a_killed_launcher_end_and_free_the_path() {
    let folder = folder();
    let mut first = training(folder.path(), &["--processes", "--set", LONG]);
    let processes = children_of(first.id());
    assert!(processes.len() > 4, "{processes:?}");
    first.kill().unwrap();
    first.wait().unwrap();
    let killed = Instant::now();
    // A process that its new parent has not waited for yet has ended, too.
    let lives = |(process, _): &(u32, String)| {
        let stat = std::fs::read_to_string(format!("/proc/{process}/stat")).unwrap_or_default();
        stat.rsplit_once(')').is_some_and(|(_, rest)| !rest.trim_start().starts_with('Z'))
    };
    while processes.iter().any(lives) {
        assert!(killed.elapsed().as_secs() < 20, "{processes:?}");
        std::thread::sleep(Duration::from_millis(50));
    }
    let second = run(folder.path(), &["--set", LONG, "--set", "spec.training.steps=1"]);
    assert!(!events(&second).is_empty());
}

/// Of a machine that this one cannot look into, only the heartbeat counts.
#[test]
fn the_lease_of_another_machine_lasts_until_it_expires() {
    let folder = folder();
    let lease = |age_seconds: u64| {
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_millis() as u64;
        let heartbeat = now - age_seconds * 1000;
        let text = format!(
            "{{\"run\":\"r\",\"job\":\"far\",\"holder\":\"h\",\"heartbeat\":{heartbeat},\"interval\":5000,\
             \"process\":{{\"host\":\"node-7\",\"machine\":\"m\",\"pid\":1,\"start\":1}}}}"
        );
        std::fs::create_dir_all(folder.path().join("ck")).unwrap();
        std::fs::write(folder.path().join("ck/lease.json"), text).unwrap();
    };
    lease(10);
    assert_refused(&run(folder.path(), &[]), &["run r of job `far`", "process 1 on node-7"]);
    lease(31);
    let taken = run(folder.path(), &[]);
    let told = String::from_utf8_lossy(&taken.stdout);
    assert!(taken.status.success(), "{}", String::from_utf8_lossy(&taken.stderr));
    assert!(told.contains("has expired and was taken over from run r of job `far`"), "{told}");
    // A file that is no lease is not replaced.
    std::fs::write(folder.path().join("ck/lease.json"), "{}").unwrap();
    assert_refused(&run(folder.path(), &[]), &["an unknown run", "lease.json"]);
}

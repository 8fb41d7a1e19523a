//! Tests the `rectrain` binary as a user sees it: exit codes, messages, JSON, signals.

#![allow(clippy::unwrap_used, reason = "an unwrap in a test is an assertion")]

mod binary;
mod children;
mod common;

use std::io::{BufRead, BufReader, Lines};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdout, Command, Stdio};
use std::time::{Duration, Instant};

use serde_json::Value;

use binary::{JOB, folder_with, training, training_with};
use children::children_of;
use common::{events, rectrain};

#[test]
fn processes_train_the_same_model_as_one_process() {
    let folder = folder_with(JOB);
    let replicas = [
        "--set",
        "spec.roles.ps.replicas=2",
        "--set",
        "spec.roles.embeddingWorker.replicas=2",
        "--set",
        "spec.roles.denseWorker.replicas=2",
    ];
    let one = [&["run", "job.yaml", "--json"], &replicas[..]].concat();
    let many = [&["run", "job.yaml", "--json", "--processes"], &replicas[..]].concat();
    let one = events(&rectrain(folder.path(), &one));
    let many = events(&rectrain(folder.path(), &many));
    let (one, many) = (one.last().unwrap(), many.last().unwrap());
    assert_eq!(one["event"], "summary");
    for field in ["parametersSha256", "steps", "samples", "rows", "test"] {
        assert_eq!(one[field], many[field], "{field}");
    }
    assert!(one["bytesOnWire"].as_object().unwrap().is_empty(), "nothing travels within a process");
    let travelled = many["bytesOnWire"].as_object().unwrap();
    for kind in ["put_batch", "order", "horizon", "forward", "backward", "lookup", "update", "ring_chunk"] {
        assert!(travelled[kind].as_u64().unwrap() > 0, "{kind}");
    }
}

#[test]
fn gba_and_switches_train_in_processes_with_a_slow_worker() {
    let folder = folder_with(JOB);
    let workers = "spec.roles.denseWorker.replicas=2,spec.roles.ps.replicas=2";
    let switches = "spec.training.switchAt[0].step=4,spec.training.switchAt[0].mode=gba,\
                    spec.training.switchAt[1].step=9,spec.training.switchAt[1].mode=sync";
    let arguments = ["run", "job.yaml", "--json", "--processes", "--set", workers, "--set", switches];
    let arguments = [&arguments[..], &["--slow", "denseWorker-1=2x"]].concat();
    let events = events(&rectrain(folder.path(), &arguments));
    let switched: Vec<_> = events.iter().filter(|event| event["event"] == "modeSwitched").collect();
    assert_eq!(switched.len(), 2, "{events:#?}");
    assert_eq!((&switched[0]["to"], &switched[1]["to"]), (&"gba".into(), &"sync".into()));
    let summary = events.last().unwrap();
    assert_eq!(summary["trainedRows"], summary["samples"]);
    assert!(summary["tokensIssued"].as_u64().unwrap() > 0);
    assert!(summary["bytesOnWire"]["push_dense"].as_u64().unwrap() > 0);
}

#[test]
fn bad_test_data_is_refused_before_training() {
    let rows = "1,5\n0,6\n";
    for (test, expected) in [("label,user\nyes,5\n".to_owned(), "yes"), ("label,user\n".to_owned(), "has no rows")] {
        let folder = folder_with(
            "{apiVersion: rectrain.dev/v1alpha1, kind: RecTrainingJob, metadata: {name: t}, spec: {model: {kind: lr},
             features: {sparse: [{name: user}]}, training: {epochs: 100000, globalBatchSize: 64},
             data: {train: {paths: [train.csv]}, test: {paths: [test.csv]}}}}",
        );
        std::fs::write(folder.path().join("train.csv"), "label,user\n".to_owned() + &rows.repeat(5000)).unwrap();
        std::fs::write(folder.path().join("test.csv"), test).unwrap();
        let output = rectrain(folder.path(), &["run", "job.yaml"]);
        let message = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{message}");
        assert!(message.contains("test.csv") && message.contains(expected), "{message}");
    }
}

#[test]
fn a_bad_row_deep_in_test_data_does_not_lose_the_model() {
    let rows = "1,5\n0,6\n".repeat(20_000);
    let job = |mode: &str| {
        format!(
            "{{apiVersion: rectrain.dev/v1alpha1, kind: RecTrainingJob, metadata: {{name: t}}, spec: {{model: {{kind: lr}},
             features: {{sparse: [{{name: user}}]}}, training: {{mode: {mode}, globalBatchSize: 64, localBatchSize: 64}},
             checkpoint: {{path: checkpoints, resume: latest}},
             data: {{train: {{paths: [train.csv]}}, test: {{paths: [test.csv]}}}}}}}}"
        )
    };
    for mode in ["sync", "gba"] {
        let folder = folder_with(&job(mode));
        let write = |name: &str, last: &str| {
            std::fs::write(folder.path().join(name), format!("label,user\n{rows}{last}")).unwrap();
        };
        write("train.csv", "");
        write("test.csv", "yes,5\n");
        let output = rectrain(folder.path(), &["run", "job.yaml"]);
        let message = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{message}");
        assert!(message.contains("test.csv, line 40002"), "{message}");
        assert!(message.contains("the trained model is in checkpoint step-000000000625"), "{message}");
        write("test.csv", "");
        let events = events(&rectrain(folder.path(), &["run", "job.yaml", "--json"]));
        assert!(events.iter().any(|event| event["event"] == "resumed" && event["step"] == 625), "{events:?}");
        assert!(events.last().unwrap()["test"]["auc"].as_f64() > Some(0.99), "{events:?}");
    }
}

#[test]
fn a_resumed_run_with_nothing_left_to_train_says_so() {
    let folder = folder_with(JOB);
    let sets = "spec.checkpoint.path=checkpoints,spec.checkpoint.resume=latest";
    let run = || rectrain(folder.path(), &["run", "job.yaml", "--json", "--set", sets]);
    let said = |events: &[Value]| events.iter().any(|event| event.to_string().contains("nothing is left to train"));
    let (first, again) = (events(&run()), events(&run()));
    assert_eq!((said(&first), said(&again)), (false, true), "{again:?}");
    let digest = |events: &[Value]| events.last().unwrap()["parametersSha256"].clone();
    assert_eq!(digest(&first), digest(&again));
    let for_a_person = rectrain(folder.path(), &["run", "job.yaml", "--set", sets]);
    let message = String::from_utf8_lossy(&for_a_person.stderr);
    assert_eq!(message.matches("nothing is left to train").count(), 1, "{message}");
    let table = String::from_utf8_lossy(&for_a_person.stdout);
    assert!(table.contains("parameters sha256") && !table.contains("samples/s"), "{table}");
}

/// In a mode without a barrier no other process waits for the worker, so only its own watchdog
/// notices.
#[test]
fn a_dense_worker_that_hangs_in_a_batch_is_replaced() {
    // Once the manifest sets the limit. Once the environment does, as in pods.
    let limits = [(",spec.faultTolerance.stallSeconds=10", None), ("", Some(("RECTRAIN_STALL_SECONDS", "10")))];
    std::thread::scope(|scope| {
        for (set, variable) in limits {
            scope.spawn(move || {
                let folder = folder_with(JOB);
                let sets = format!(
                    "metadata.name=hangs-{},spec.training.mode=gba,spec.roles.denseWorker.replicas=2,spec.data.synthetic.rows=10000000{set}",
                    set.len()
                );
                let hangs =
                    ["run", "job.yaml", "--json", "--processes", "--slow", "denseWorker-1=1000000x", "--set", &sets];
                let (mut child, mut lines) = training_with(folder.path(), &hangs, variable);
                let rejoined = lines.find(|line| line.as_ref().unwrap().contains("rejoined")).unwrap().unwrap();
                let rejoined: Value = serde_json::from_str(&rejoined).unwrap();
                assert_eq!(rejoined["member"], "dense-worker 1");
                assert!(Command::new("kill").args(["-INT", &child.id().to_string()]).status().unwrap().success());
                assert_eq!(child.wait().unwrap().code(), Some(130));
                assert!(children_of(child.id()).is_empty());
            });
        }
    });
}

/// Logs and notes go to a full disk.
#[test]
fn a_run_whose_notes_cannot_be_written_completes() {
    for processes in [&[][..], &["--processes"]] {
        let folder = folder_with(JOB);
        let output = Command::new(env!("CARGO_BIN_EXE_rectrain"))
            .args(["run", "job.yaml", "--set", "spec.checkpoint.path=saved"])
            .args(processes)
            .env("RECTRAIN_LOG", "info")
            .current_dir(folder.path())
            .stderr(std::fs::File::options().write(true).open("/dev/full").unwrap())
            .output()
            .unwrap();
        assert!(output.status.success(), "{processes:?}: {}", output.status);
        assert!(folder.path().join("saved").exists());
    }
}

/// Standard output is a full disk: the run ends before anything is trained.
#[test]
fn a_run_whose_summary_cannot_be_written_fails_at_once() {
    for arguments in [&[][..], &["--json"], &["--processes"], &["--processes", "--json"]] {
        let folder = folder_with(JOB);
        let output = Command::new(env!("CARGO_BIN_EXE_rectrain"))
            .args(["run", "job.yaml", "--set", "spec.checkpoint.path=saved"])
            .args(arguments)
            .current_dir(folder.path())
            .stdout(std::fs::File::options().write(true).open("/dev/full").unwrap())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap()
            .wait_with_output()
            .unwrap();
        let message = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(1), "{arguments:?}: {message}");
        assert!(message.contains("the summary cannot be written to standard output: No space left"), "{message}");
        assert!(!folder.path().join("saved").exists());
    }
}

/// The reader of the output goes away while the job trains. The message has the summary then.
#[test]
fn a_summary_that_is_lost_is_not_success() {
    for arguments in [&["--json"][..], &["--processes", "--json"], &[]] {
        let folder = folder_with(JOB);
        let mut child = Command::new(env!("CARGO_BIN_EXE_rectrain"))
            .args(["run", "job.yaml", "--set", "spec.checkpoint.path=saved"])
            .args(arguments)
            .current_dir(folder.path())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        drop(child.stdout.take());
        let output = child.wait_with_output().unwrap();
        let message = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(1), "{arguments:?}: {message}");
        for part in ["the job is done, but its summary cannot be written", "Broken pipe", "\"parametersSha256\":\""] {
            assert!(message.contains(part), "{part}: {message}");
        }
        assert!(folder.path().join("saved").exists());
    }
}

#[test]
fn a_running_job_is_switched_by_its_name() {
    let folder = folder_with(JOB);
    let name = format!("switched-{}", std::process::id());
    let sets = format!("metadata.name={name},spec.data.synthetic.rows=3000000");
    let mut job = Command::new(env!("CARGO_BIN_EXE_rectrain"))
        .args(["run", "job.yaml", "--json", "--set", &sets])
        .current_dir(folder.path())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    let mode = |arguments: &[&str]| rectrain(folder.path(), &[&["mode"], arguments].concat());
    let deadline = Instant::now() + Duration::from_secs(60);
    while !mode(&["set", &name, "gba"]).status.success() {
        assert!(Instant::now() < deadline, "the job cannot be reached");
        std::thread::sleep(Duration::from_millis(100));
    }
    let wrong = mode(&["set", &name, "gbba"]);
    assert_eq!(wrong.status.code(), Some(2));
    assert!(String::from_utf8_lossy(&wrong.stderr).contains("expected one of sync, hybrid, async, gba"), "{wrong:?}");
    while String::from_utf8_lossy(&mode(&[&name]).stdout).trim() != "gba" {
        assert!(Instant::now() < deadline, "the mode is not switched");
        std::thread::sleep(Duration::from_millis(100));
    }
    job.kill().unwrap();
    job.wait().unwrap();
    let gone = mode(&["set", &name, "sync"]);
    assert_eq!(gone.status.code(), Some(2));
    assert!(String::from_utf8_lossy(&gone.stderr).contains("no job `switched-"), "{gone:?}");
}

/// A job of 94 steps with one dense worker, which cannot be replaced.
const SAVED: &[&str] = &[
    "--set",
    "spec.data.synthetic.rows=6000,spec.training.epochs=2,spec.roles.ps.replicas=2",
    "--set",
    "spec.faultTolerance.backoffSeconds=1",
];

#[test]
fn a_run_restarts_from_its_checkpoint_and_keeps_the_model() {
    let folder = folder_with(JOB);
    let alone = events(&rectrain(folder.path(), &[&["run", "job.yaml", "--json"], SAVED].concat()));
    let mut child = Command::new(env!("CARGO_BIN_EXE_rectrain"))
        .args([&["run", "job.yaml", "--json", "--processes"], SAVED].concat())
        .args(["--set", "spec.checkpoint.path=checkpoints,spec.checkpoint.everySteps=5"])
        .current_dir(folder.path())
        .stdout(Stdio::piped())
        .stderr(Stdio::inherit())
        .spawn()
        .unwrap();
    let (mut to_kill, mut resumed, mut last) = (vec!["coordinator", "dense-worker", "ps"], 0, Value::Null);
    let (mut kept, mut taken_up) = (0, 0);
    for line in BufReader::new(child.stdout.take().unwrap()).lines() {
        last = serde_json::from_str(&line.unwrap()).unwrap();
        resumed += usize::from(last["event"] == "resumed");
        kept += usize::from(last["event"] == "serverKeptRows");
        taken_up += usize::from(last["event"] == "coordinatorTakenUp");
        if last["event"] == "checkpointSaved"
            && let Some(role) = to_kill.pop()
        {
            let process = children_of(child.id()).into_iter().find(|(_, name)| name == role).unwrap().0;
            assert!(Command::new("kill").args(["-9", &process.to_string()]).status().unwrap().success());
        }
    }
    assert!(child.wait().unwrap().success());
    let alone = alone.last().unwrap();
    for field in ["parametersSha256", "samples", "trainedRows", "steps", "test"] {
        assert_eq!(last[field], alone[field], "{field}");
    }
    // The parameter server's replacement found the rows, and the coordinator's found the journal.
    // Only the death of the dense worker made the job restart.
    assert_eq!((resumed, kept, taken_up, &last["restarts"]), (1, 1, 1, &1.into()));
}

#[test]
fn ctrl_c_saves_a_checkpoint_and_the_next_run_resumes_from_it() {
    for processes in [&[][..], &["--processes"]] {
        let folder = folder_with(JOB);
        let alone = events(&rectrain(folder.path(), &[&["run", "job.yaml", "--json"], SAVED].concat()));
        let job = [&["run", "job.yaml", "--json"], SAVED, &["--set", "spec.checkpoint.path=checkpoints"]].concat();
        let (child, _output) = training(folder.path(), &[&job[..], processes].concat());
        assert!(Command::new("kill").args(["-INT", &child.id().to_string()]).status().unwrap().success());
        let output = child.wait_with_output().unwrap();
        let message = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(130), "{message}");
        assert!(message.contains("was saved"), "{message}");
        let latest = [&job[..], processes, &["--set", "spec.checkpoint.resume=latest"]].concat();
        let after = events(&rectrain(folder.path(), &latest));
        assert!(
            after.iter().any(|event| event["event"] == "resumed" && event["step"].as_u64() > Some(0)),
            "{after:#?}"
        );
        assert_eq!(after.last().unwrap()["parametersSha256"], alone.last().unwrap()["parametersSha256"]);
    }
}

#[test]
fn checkpoints_of_another_run_are_refused_without_a_restart() {
    let folder = folder_with(JOB);
    let job = ["run", "job.yaml", "--json", "--set", "spec.checkpoint.path=checkpoints"];
    assert!(rectrain(folder.path(), &job).status.success());
    for processes in [&[][..], &["--processes"]] {
        let refused = rectrain(folder.path(), &[&job[..], processes].concat());
        let message = String::from_utf8_lossy(&refused.stderr);
        assert_eq!(refused.status.code(), Some(2), "{message}");
        assert!(message.contains("rectrain: spec.checkpoint.path") && message.contains("`latest`"), "{message}");
        assert!(!String::from_utf8_lossy(&refused.stdout).contains("restarting"), "{refused:?}");
    }
}

#[test]
fn damaged_checkpoints_are_refused_without_a_restart() {
    let folder = folder_with(JOB);
    let job = ["run", "job.yaml", "--json", "--set", "spec.checkpoint.path=checkpoints,spec.checkpoint.resume=latest"];
    assert!(rectrain(folder.path(), &job).status.success());
    let [checkpoint] = &entries(&folder.path().join("checkpoints"))[..] else { panic!("there is one, at the end") };
    let rows = entries(checkpoint).into_iter().find(|file| file.display().to_string().contains("rows-00000")).unwrap();
    let mut bytes = std::fs::read(&rows).unwrap();
    bytes[300] ^= 1;
    std::fs::write(&rows, bytes).unwrap();
    for processes in [&[][..], &["--processes"]] {
        let refused = rectrain(folder.path(), &[&job[..], processes].concat());
        let message = String::from_utf8_lossy(&refused.stderr);
        assert_eq!(refused.status.code(), Some(2), "{message}");
        let file = rows.file_name().unwrap().to_str().unwrap();
        assert!(message.contains(file) && message.contains("set another path"), "{message}");
        let told = String::from_utf8_lossy(&refused.stdout);
        assert!(!told.contains("restarting") && !told.contains("\"progress\""), "{told}");
    }
    let elsewhere = [&job[..], &["--set", "spec.checkpoint.path=elsewhere"]].concat();
    assert!(rectrain(folder.path(), &elsewhere).status.success());
}

fn entries(folder: &Path) -> Vec<PathBuf> {
    std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()).collect()
}

#[test]
fn ctrl_c_ends_a_run_and_all_its_processes() {
    for processes in [&[][..], &["--processes"]] {
        let folder = folder_with(&JOB.replace("rows: 3000", "rows: 3000000"));
        let (child, _output) = training(folder.path(), &[&["run", "job.yaml", "--json"], processes].concat());
        let children = children_of(child.id());
        assert!(Command::new("kill").args(["-INT", &child.id().to_string()]).status().unwrap().success());
        let output = child.wait_with_output().unwrap();
        assert_eq!(output.status.code(), Some(130), "{}", String::from_utf8_lossy(&output.stderr));
        for (process, role) in children {
            assert!(!Path::new(&format!("/proc/{process}/exe")).exists(), "{role} still runs");
        }
    }
}

/// The processes of a job as pods run them, one by one.
struct Pods {
    folder: tempfile::TempDir,
    /// The address that members connect to.
    members: String,
    coordinator: Child,
    events: Lines<BufReader<ChildStdout>>,
}

impl Pods {
    const ROLES: [&str; 4] = ["ps", "embedding-worker", "dense-worker", "loader"];

    fn start(manifest: &str) -> Self {
        let folder = folder_with(manifest);
        let arguments = ["coordinator", "job.yaml", "--json", "--stay", "--bind", "tcp://127.0.0.1:0"];
        let mut coordinator = Self::command(&folder)
            .args(arguments)
            .args(["--control", "127.0.0.1:0", "--metrics", "127.0.0.1:0"])
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut events = BufReader::new(coordinator.stdout.take().unwrap()).lines();
        let addresses: Value = serde_json::from_str(&events.next().unwrap().unwrap()).unwrap();
        let members = addresses["members"].as_str().unwrap().to_owned();
        Self { folder, members, coordinator, events }
    }

    fn command(folder: &tempfile::TempDir) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_rectrain"));
        command.current_dir(folder.path()).env("RECTRAIN_LOG", "info").stderr(Stdio::piped());
        command
    }

    fn member(&self, role: &str, bind: &str) -> Child {
        self.member_number(0, role, bind, &[])
    }

    fn member_number(&self, index: u32, role: &str, bind: &str, more: &[&str]) -> Child {
        let index = index.to_string();
        let arguments = [role, "job.yaml", "--index", &index, "--stay", "--coordinator", &self.members, "--bind", bind];
        Self::command(&self.folder).args(arguments).args(["--metrics", "127.0.0.1:0"]).args(more).spawn().unwrap()
    }

    /// Waits for the next event of this kind. If the job fails first, the test fails.
    fn event(&mut self, kind: &str) -> Value {
        let mut events = self.events.by_ref().map(|line| serde_json::from_str::<Value>(&line.unwrap()).unwrap());
        let is_it = |event: &Value| {
            assert!(kind == "failed" || event["event"] != "failed", "{event}");
            event["event"] == kind
        };
        events.find(is_it).unwrap()
    }
}

/// Waits until the process says that it stays, and sends it SIGTERM. Returns false if it ended by
/// itself instead.
fn stop_when_it_stays(process: &mut Child) -> bool {
    let mut logs = BufReader::new(process.stderr.take().unwrap()).lines();
    let stays = logs.any(|line| line.unwrap().contains("staying until told to stop"));
    if stays {
        assert!(process.try_wait().unwrap().is_none());
        assert!(Command::new("kill").arg(process.id().to_string()).status().unwrap().success());
    }
    process.wait().unwrap();
    stays
}

/// Waits until the process says that it stays, and sends it SIGTERM. Returns its exit code.
fn exit_code_after_staying(mut process: Child) -> Option<i32> {
    assert!(stop_when_it_stays(&mut process));
    process.wait().unwrap().code()
}

#[test]
fn with_stay_processes_outlive_their_job_and_exit_with_0() {
    let mut pods = Pods::start(JOB);
    let members = Pods::ROLES.map(|role| pods.member(role, "tcp://127.0.0.1:0"));
    assert_eq!(pods.event("summary")["samples"], 3000);
    for member in members {
        assert_eq!(exit_code_after_staying(member), Some(0));
    }
    assert_eq!(exit_code_after_staying(pods.coordinator), Some(0));
}

#[test]
fn a_server_restarted_without_its_rows_fails_the_job_everywhere() {
    let mut pods = Pods::start(&JOB.replace("rows: 3000", "rows: 3000000"));
    // A fixed address, which the restarted process can use again, as a pod keeps its name.
    let bind = format!("tcp://127.0.0.73:{}", free_port());
    let mut server = pods.member("ps", &bind);
    let others = ["embedding-worker", "dense-worker", "loader"].map(|role| pods.member(role, "tcp://127.0.0.1:0"));
    pods.event("progress");
    server.kill().unwrap();
    server.wait().unwrap();
    let mut restarted = pods.member("ps", &bind);
    let message = pods.event("failed")["message"].as_str().unwrap().to_owned();
    assert!(message.contains("restarted") || message.contains("127.0.0.73"), "{message}");
    // If the coordinator learns of the restart from this process, the process fails. The next one
    // stays.
    let stayed = stop_when_it_stays(&mut restarted);
    assert_eq!(restarted.wait().unwrap().code(), Some(1));
    if !stayed {
        assert_eq!(exit_code_after_staying(pods.member("ps", &bind)), Some(1));
    }
    assert_eq!(exit_code_after_staying(pods.coordinator), Some(1));
    for mut other in others {
        // A member that failed by itself has exited. A member that learned of the failure stays.
        other.kill().unwrap();
        other.wait().unwrap();
    }
}

/// As with pods that are deleted by force: an old process is killed some time after its replacement
/// started under the same name.
#[test]
fn replaced_members_that_still_run_do_no_harm() {
    let manifest = JOB
        .replace("rows: 3000", "rows: 90000")
        .replace("training: {", "roles: {embeddingWorker: {replicas: 2}, denseWorker: {replicas: 2}}\n  training: {");
    for mode in ["sync", "hybrid"] {
        let manifest = manifest.replace("globalBatchSize", &format!("mode: {mode}, globalBatchSize"));
        let alone = events(&rectrain(folder_with(&manifest).path(), &["run", "job.yaml", "--json"])).pop().unwrap();
        let mut pods = Pods::start(&manifest);
        let start = |pods: &Pods, role: &str, index| {
            let more: &[&str] = if role == "dense-worker" { &["--slow", "8"] } else { &[] };
            pods.member_number(index, role, "tcp://127.0.0.1:0", more)
        };
        let members = [("ps", 0), ("embedding-worker", 0), ("dense-worker", 0), ("loader", 0)];
        let mut others: Vec<Child> = members.iter().map(|(role, index)| start(&pods, role, *index)).collect();
        let mut replaced = ["embedding-worker", "dense-worker"].map(|role| (role, start(&pods, role, 1)));
        pods.event("progress");
        for round in 0..4 {
            for (role, before) in &mut replaced {
                let replacement = start(&pods, role, 1);
                assert_eq!(pods.event("rejoined")["member"], format!("{role} 1"));
                // The old process may have ended by itself, or may still receive data for its
                // replacement.
                std::thread::sleep(Duration::from_millis(40 * round));
                before.kill().unwrap();
                before.wait().unwrap();
                *before = replacement;
            }
            pods.event("progress");
        }
        let last = pods.event("summary");
        let exact: &[&str] = if mode == "sync" { &["parametersSha256", "test", "rows"] } else { &[] };
        for field in exact.iter().chain(&["trainedRows", "steps"]) {
            assert_eq!(last[field], alone[field], "{mode}: {field}");
        }
        others.extend(replaced.map(|(_, last)| last));
        others.push(pods.coordinator);
        for mut other in others {
            other.kill().unwrap();
            other.wait().unwrap();
        }
    }
}

fn free_port() -> u16 {
    std::net::TcpListener::bind("127.0.0.73:0").unwrap().local_addr().unwrap().port()
}

#[test]
fn each_mistake_of_the_user_has_a_message_and_exit_code_2() {
    let csv = |header: &str, rows: &str| format!("{header}\n{rows}");
    let good = "1,5\n0,6\n";
    let job = |sparse: &str| {
        format!(
            "{{apiVersion: rectrain.dev/v1alpha1, kind: RecTrainingJob, metadata: {{name: t}}, spec: {{model: {{kind: lr}},\n\
             features: {{sparse: [{{name: {sparse}}}], dense: []}}, data: {{train: {{paths: [train.csv]}}}}}}}}"
        )
    };
    let table: Vec<(&str, String, Option<String>, &[&str])> = vec![
        (
            "a misspelt key",
            job("user").replace("sparse", "sprase"),
            Some(csv("label,user", good)),
            &["sprase", "sparse"],
        ),
        ("a missing file", job("user"), None, &["train.csv"]),
        ("a column that is not there", job("usr"), Some(csv("label,user", good)), &["usr", "train.csv", "user"]),
        ("a label that is not there", job("user"), Some(csv("lable,user", good)), &["label", "lable", "train.csv"]),
        ("text in a number", job("user"), Some(csv("label,user", "1,5\nyes,6\n")), &["train.csv", "3", "label", "yes"]),
        ("an empty file", job("user"), Some(String::new()), &["train.csv", "empty"]),
        ("a label that is all 0", job("user"), Some(csv("label,user", "0,5\n0,6\n")), &["label", "0 in all 2 rows"]),
        ("no manifest", String::new(), Some(csv("label,user", good)), &["job.yaml", "empty"]),
    ];
    for (mistake, manifest, data, expected) in table {
        let folder = folder_with(&manifest);
        if let Some(data) = data {
            std::fs::write(folder.path().join("train.csv"), data).unwrap();
        }
        let output = rectrain(folder.path(), &["run", "job.yaml"]);
        let message = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{mistake}: {message}");
        for part in expected {
            assert!(message.contains(part), "{mistake}: `{part}` is not in: {message}");
        }
        assert!(!message.contains("panicked"), "{mistake}: {message}");
    }
}

#[test]
fn validate_and_explain_answer_and_refuse() {
    let folder = folder_with(JOB);
    let valid = rectrain(folder.path(), &["validate", "job.yaml", "--set", "spec.training.mode=hybrid"]);
    assert!(valid.status.success());
    assert_eq!(String::from_utf8_lossy(&valid.stdout), "job.yaml: valid (deepfm in mode hybrid)\n");
    let invalid = rectrain(folder.path(), &["validate", "job.yaml", "--set", "spec.training.mode=hybird"]);
    assert_eq!(invalid.status.code(), Some(2));
    let message = String::from_utf8_lossy(&invalid.stderr);
    assert!(message.contains("spec.training.mode") && message.contains("hybrid"), "{message}");
    for topic in ["spec.training.globalBatchSize", "hybrid", "sync"] {
        let explained = rectrain(folder.path(), &["explain", topic]);
        assert!(explained.status.success() && explained.stdout.len() > 100, "{topic}");
    }
    assert_eq!(rectrain(folder.path(), &["explain", "spec.training.globalBatch"]).status.code(), Some(2));
}

/// A manifest may need a capability that only a cluster has.
#[test]
fn a_manifest_for_a_cluster_is_valid_and_run_refuses_it() {
    let folder = folder_with(JOB);
    let fields = [
        ("spec.suspend=true", "spec.suspend"),
        ("spec.activeDeadlineSeconds=60", "spec.activeDeadlineSeconds"),
        ("spec.autoscaling.mode=apply", "spec.autoscaling.mode"),
    ];
    let set = fields.map(|(set, _)| set).join(",");
    let valid = rectrain(folder.path(), &["validate", "job.yaml", "--set", &set]);
    let said = String::from_utf8_lossy(&valid.stdout);
    assert!(valid.status.success(), "{}", String::from_utf8_lossy(&valid.stderr));
    assert!(said.starts_with("job.yaml: valid (deepfm in mode sync)\n"), "{said}");
    let notes: Vec<_> = said.lines().skip(1).collect();
    for (_, field) in fields {
        let note = format!("note: `rectrain run` would refuse it here: {field}: this version cannot ");
        assert!(notes.iter().any(|line| line.starts_with(&note)), "{field}: {said}");
    }
    for (set, field) in fields {
        let refused = rectrain(folder.path(), &["run", "job.yaml", "--set", set]);
        let message = String::from_utf8_lossy(&refused.stderr);
        assert_eq!(refused.status.code(), Some(2), "{message}");
        assert!(message.contains(&format!("job.yaml: {field}: this version cannot ")), "{message}");
    }
    // A capability that this build lacks is no mistake either.
    let gpu = ["job.yaml", "--set", "spec.roles.denseWorker.gpus=1"];
    let valid = rectrain(folder.path(), &[&["validate"], &gpu[..]].concat());
    assert!(valid.status.success(), "{}", String::from_utf8_lossy(&valid.stderr));
}

#[test]
fn metrics_and_a_page_are_served_while_a_job_trains() {
    let folder = folder_with(&JOB.replace("rows: 3000", "rows: 3000000"));
    let mut child = Command::new(env!("CARGO_BIN_EXE_rectrain"))
        .args(["run", "job.yaml"])
        .current_dir(folder.path())
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut lines = BufReader::new(child.stderr.take().unwrap()).lines();
    let best = lines.next().unwrap().unwrap();
    assert!(best.contains("best possible test AUC"), "{best}");
    let address = lines.next().unwrap().unwrap();
    let (address, _) = address.strip_prefix("the job on http://").unwrap().split_once("/,").unwrap();
    while !lines.next().unwrap().unwrap().starts_with("step ") {}
    let metrics = get(address, "/metrics");
    let page = get(address, "/");
    assert!(
        page.contains("content-security-policy: default-src 'none'") && page.contains("<h1 id=\"name\">"),
        "{page}"
    );
    let job = |query: &str| -> Value {
        let answer = get(address, &format!("/job.json{query}"));
        serde_json::from_str(answer.split_once("\r\n\r\n").unwrap().1).unwrap()
    };
    // The page takes the event of the line above in a task of its own.
    let points = |job: &Value| job["curve"]["step"].as_array().unwrap().len();
    let deadline = Instant::now() + Duration::from_secs(60);
    let mut first = job("");
    while points(&first) == 0 && Instant::now() < deadline {
        std::thread::sleep(Duration::from_millis(20));
        first = job("");
    }
    assert_eq!((&first["phase"], &first["mode"]), (&"Training".into(), &"sync".into()), "{first}");
    assert_eq!(first["events"][0]["event"]["event"], "started");
    let members: Vec<&Value> = first["members"].as_array().unwrap().iter().map(|member| &member["role"]).collect();
    assert_eq!(members, ["ps", "embedding-worker", "dense-worker", "loader"]);
    assert_eq!(first["members"][0]["slots"], 1024);
    assert!(first["manifest"].as_str().unwrap().contains("kind: deepfm"), "{}", first["manifest"]);
    assert_eq!((&first["plan"]["globalBatchRows"], &first["command"]), (&128.into(), &"rectrain run job.yaml".into()));
    assert!(first["state"]["rows"].as_u64() > Some(0) && first["members"][0]["rows"].as_u64() > Some(0), "{first}");
    let losses = first["curve"]["loss"].as_array().unwrap().len();
    assert!(losses > 0 && losses == points(&first), "{}", first["curve"]);
    let known = first["events"].as_array().unwrap().last().unwrap()["number"].as_u64().unwrap();
    let later = job(&format!("?after={known}"));
    assert!(later["events"].as_array().unwrap().iter().all(|event| event["number"].as_u64() > Some(known)), "{later}");
    assert!(later["step"].as_u64() >= first["step"].as_u64());
    let newer = job(&format!("?after={known}&points={}", first["curve"]["last"]));
    let steps = newer["curve"]["step"].as_array().unwrap();
    let last = first["curve"]["step"].as_array().unwrap().last().unwrap().as_u64();
    assert!(steps.iter().all(|step| step.as_u64() >= last) && newer["manifest"].is_null(), "{newer}");
    child.kill().unwrap();
    child.wait().unwrap();
    for name in [
        "rectrain_dense_worker_step_seconds_bucket",
        "rectrain_ps_lookup_seconds_bucket",
        "rectrain_ps_rows",
        "rectrain_embedding_worker_pool_seconds_bucket",
        "rectrain_loader_rows_total",
    ] {
        assert!(metrics.contains(name), "{name} is not in:\n{metrics}");
    }
}

fn get(address: &str, path: &str) -> String {
    use std::io::{Read, Write};
    let mut stream = std::net::TcpStream::connect(address).unwrap();
    write!(stream, "GET {path} HTTP/1.1\r\nHost: {address}\r\nConnection: close\r\n\r\n").unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    answer
}

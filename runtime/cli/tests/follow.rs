//! Jobs that follow paths. In `sync` they end with the model of the same files given at the start.
//! Kills of the coordinator and of loaders change nothing.

#![allow(clippy::unwrap_used, reason = "an unwrap in a test is an assertion")]

#[allow(dead_code, reason = "a part of it is for other tests")]
mod binary;
mod children;
mod common;
#[path = "../../storage/tests/servers/mod.rs"]
mod servers;

use std::fmt::Write as _;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use binary::{folder_with, training};
use children::children_of;
use common::{events, refusal_of_job, run_job, summary};
use rectrain_storage::Directory;
use serde_json::Value;
use servers::BUCKET;

/// Rows of a global batch.
const BATCH: usize = 16;

const JOB: &str = "
apiVersion: rectrain.dev/v1alpha1
kind: RecTrainingJob
metadata: {name: clicks}
spec:
  model: {kind: deepfm, embeddingDim: 4, hidden: [8]}
  features:
    sparse: [{name: user}, {name: item}]
    dense: [{name: age}]
  data: {train: {paths: ['in/*.csv']}, format: csv}
  training: {globalBatchSize: 16}
";

/// Follows the paths until no file has come for a second.
const FOLLOW: &str = "spec.data.train.paths=null,spec.data.train.follow.paths={in/*.csv},\
                      spec.data.train.follow.intervalSeconds=1,spec.data.train.follow.until.idleSeconds=1";

/// The text of a file with `batches` global batches. `seed` tells files apart.
fn text(seed: usize, batches: usize) -> String {
    let mut text = "label,user,item,age\n".to_owned();
    for number in seed * 1_000..seed * 1_000 + batches * BATCH {
        let (user, item, age) = (number * 7 % 23, number * 5 % 17, number % 9);
        let label = usize::from((user % 3 + item % 2 + number % 4) > 3);
        writeln!(text, "{label},u{user},i{item},{age}").unwrap();
    }
    text
}

/// Writes a file, and moves it to its place when it is whole.
fn put(folder: &Path, name: &str, text: &str) {
    std::fs::create_dir_all(folder.join("in")).unwrap();
    std::fs::write(folder.join("new"), text).unwrap();
    std::fs::rename(folder.join("new"), folder.join("in").join(name)).unwrap();
}

fn run(folder: &Path, sets: &[&str]) -> Vec<Value> {
    events(&run_job(folder, sets))
}

fn warnings(events: &[Value]) -> Vec<&str> {
    let warnings = events.iter().filter(|event| event["event"] == "warning");
    warnings.filter_map(|event| event["message"].as_str()).collect()
}

#[test]
fn followed_files_give_the_model_of_the_same_files() {
    let folder = folder_with(JOB);
    for (seed, name) in ["a.csv", "b.csv", "c.csv"].into_iter().enumerate() {
        put(folder.path(), name, &text(seed, 3 + seed));
    }
    let files = run(folder.path(), &[]);
    assert_eq!(summary(&files)["samples"], 12 * BATCH);
    for loaders in ["1", "3"] {
        let loaders = format!("spec.roles.loader.replicas={loaders}");
        let followed = run(folder.path(), &[FOLLOW, &loaders]);
        assert_eq!(summary(&followed)["samples"], 12 * BATCH, "{loaders}");
        assert_eq!(summary(&followed)["parametersSha256"], summary(&files)["parametersSha256"], "{loaders}");
    }
    let gba = run(folder.path(), &[FOLLOW, "spec.training.mode=gba"]);
    assert_eq!(summary(&gba)["trainedRows"], 12 * BATCH);
}

#[test]
fn each_run_trains_the_files_that_came_since_the_last_one() {
    let folder = folder_with(JOB);
    put(folder.path(), "b.csv", &text(1, 3));
    let saved = [FOLLOW, "spec.checkpoint.path=model", "spec.checkpoint.resume=latest"];
    assert_eq!(summary(&run(folder.path(), &saved))["samples"], 3 * BATCH);
    // Nothing is new.
    assert_eq!(summary(&run(folder.path(), &saved))["samples"], 3 * BATCH);
    put(folder.path(), "c.csv", &text(2, 4));
    let next = run(folder.path(), &saved);
    assert_eq!(summary(&next)["samples"], 7 * BATCH);
    let alone = run(folder.path(), &[FOLLOW]);
    assert_eq!(summary(&next)["parametersSha256"], summary(&alone)["parametersSha256"]);
    // A file that comes late, and one that changes after it was read.
    put(folder.path(), "a.csv", &text(3, 2));
    put(folder.path(), "b.csv", &text(4, 9));
    let last = run(folder.path(), &saved);
    assert_eq!(summary(&last)["samples"], 9 * BATCH);
    let told = warnings(&last).join("\n");
    assert!(told.contains("in/a.csv came late"), "{told}");
    assert!(told.contains("in/b.csv changed after it was read"), "{told}");
    let message =
        refusal_of_job(folder.path(), &[&saved[..], &["spec.data.train.follow.paths={in/[a-c].csv}"]].concat());
    assert!(message.contains("spec.data.train.follow.paths was in/*.csv, and is in/[a-c].csv"), "{message}");
}

#[test]
fn a_directory_counts_once_it_is_whole_and_a_bad_row_is_named_or_skipped() {
    let folder = folder_with(JOB);
    put(folder.path(), "a.csv", &text(1, 2));
    let whole = "spec.data.train.follow.wholeDirectories=true";
    let message = refusal_of_job(folder.path(), &[FOLLOW, whole]);
    assert!(message.contains("no file with rows came"), "{message}");
    put(folder.path(), "_SUCCESS", "");
    assert_eq!(summary(&run(folder.path(), &[FOLLOW, whole]))["samples"], 2 * BATCH);
    put(folder.path(), "b.csv", &format!("{}1,u1,i1,old\n1,u1,i1,3\n", text(2, 1)));
    let message = refusal_of_job(folder.path(), &[FOLLOW]);
    assert!(message.contains("in/b.csv") && message.contains("line 18"), "{message}");
    let skipping = run(folder.path(), &[FOLLOW, "spec.data.badRows.action=skip"]);
    let figures = ["samples", "skippedRows"].map(|figure| summary(&skipping)[figure].as_u64().unwrap() as usize);
    assert_eq!(figures, [3 * BATCH + 1, 1]);
}

/// Kills a member of a run. Waits if its replacement has not started yet.
fn kill(run: u32, role: &str) {
    for _ in 0..200 {
        if let Some((pid, _)) = children_of(run).into_iter().find(|(_, of)| of == role) {
            assert!(Command::new("kill").args(["-9", &pid.to_string()]).status().unwrap().success());
            return;
        }
        std::thread::sleep(Duration::from_millis(50));
    }
    panic!("no {role} runs any more");
}

#[test]
fn kills_lose_no_row_and_change_no_model() {
    let folder = folder_with(JOB);
    for seed in 0..12 {
        put(folder.path(), &format!("{seed:02}.csv"), &text(seed, 60));
    }
    let undisturbed = run(folder.path(), &[FOLLOW]);
    let settings = "spec.roles.loader.replicas=2,spec.checkpoint.path=model,spec.checkpoint.everySteps=40,\
                    spec.faultTolerance.backoffSeconds=1";
    let arguments =
        ["run", "job.yaml", "--json", "--processes", "--slow", "denseWorker-0=8x", "--set", FOLLOW, "--set", settings];
    let (mut child, lines) = training(folder.path(), &arguments);
    for role in ["coordinator", "loader", "coordinator"] {
        kill(child.id(), role);
        std::thread::sleep(Duration::from_millis(200));
    }
    let last = lines.map(|line| line.unwrap()).last().unwrap();
    assert!(child.wait().unwrap().success(), "{last}");
    let last: Value = serde_json::from_str(&last).unwrap();
    assert_eq!(last["parametersSha256"], summary(&undisturbed)["parametersSha256"], "{last}");
}

#[test]
fn objects_of_a_bucket_are_followed() {
    let Some(server) = servers::s3() else { return };
    let folder = folder_with(JOB);
    let directory = Directory::open(&format!("s3://{BUCKET}/in"), &server.options, true).unwrap();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let put = |name: &str, text: String| runtime.block_on(directory.put(name, text.into_bytes())).unwrap();
    put("dt=1/a.csv", text(1, 2));
    put("dt=1/_SUCCESS", String::new());
    put("dt=2/b.csv", text(2, 3));
    // `--set` reads `true` as a boolean, and `yes` as a text.
    let text_of = |value: &str| if value == "true" { "yes".to_owned() } else { value.to_owned() };
    let option = |(name, value): (&String, &String)| format!("spec.data.storage.options.{name}={}", text_of(value));
    let options = server.options.iter().map(option).collect::<Vec<_>>().join(",");
    let paths = format!("spec.data.train.follow.paths={{s3://{BUCKET}/in/*/*.csv}}");
    let whole = "spec.data.train.follow.wholeDirectories=true";
    let saved = [FOLLOW, &paths, &options, whole, "spec.checkpoint.path=model", "spec.checkpoint.resume=latest"];
    assert_eq!(summary(&run(folder.path(), &saved))["samples"], 2 * BATCH);
    put("dt=2/_SUCCESS", String::new());
    assert_eq!(summary(&run(folder.path(), &saved))["samples"], 5 * BATCH);
    put("dt=1/a.csv", text(3, 2));
    let last = run(folder.path(), &saved);
    assert_eq!(summary(&last)["samples"], 5 * BATCH);
    let told = warnings(&last).join("\n");
    assert!(told.contains("in/dt=1/a.csv changed after it was read"), "{told}");
}

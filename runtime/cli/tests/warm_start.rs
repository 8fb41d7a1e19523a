//! Jobs that begin with the model of another job's checkpoint. Seven nights equal one run over all
//! days. Features come and go. Models and checkpoints that do not fit are refused before the first
//! step.

#![allow(clippy::unwrap_used, reason = "an unwrap in a test is an assertion")]

mod common;

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::path::{Path, PathBuf};

use common::{events, rectrain, run_job};
use serde_json::Value;

/// Rows of a day: six global batches.
const DAY: u32 = 96;
/// Steps of a day.
const STEPS: u64 = 6;

const JOB: &str = "
apiVersion: rectrain.dev/v1alpha1
kind: RecTrainingJob
metadata: {name: clicks}
spec:
  model: {kind: deepfm, embeddingDim: 4, hidden: [8], dropout: 0.25}
  features:
    sparse: [{name: user}, {name: item}]
    dense: [{name: age}]
  data: {train: {paths: ['d/day1.csv']}, test: {paths: ['d/test.csv']}}
  training: {globalBatchSize: 16}
";

/// Seven days of clicks and a test file, below `d`.
fn folder() -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("job.yaml"), JOB).unwrap();
    std::fs::create_dir(folder.path().join("d")).unwrap();
    for day in 1..=7 {
        write(folder.path(), &format!("day{day}.csv"), day * DAY..(day + 1) * DAY);
    }
    write(folder.path(), "test.csv", 5_000..5_200);
    folder
}

/// Rows of clicks that depend on user, item and age.
fn write(folder: &Path, name: &str, rows: std::ops::Range<u32>) {
    let mut text = "label,user,item,age,shop\n".to_owned();
    for row in rows {
        let (user, item, age) = (row * 7 % 23, row * 5 % 17, row % 9);
        let label = u32::from((user % 3 + item % 2 + row % 4) > 3);
        writeln!(text, "{label},u{user},i{item},{age},s{}", row % 5).unwrap();
    }
    std::fs::write(folder.join("d").join(name), text).unwrap();
}

/// The settings of the night after `day`: its data, its path, and the model that it begins with.
fn night(day: u32, from: Option<u32>) -> Vec<String> {
    let mut sets = vec![format!("spec.data.train.paths={{d/day{day}.csv}}"), format!("spec.checkpoint.path=m/{day}")];
    sets.extend(from.map(|from| format!("spec.checkpoint.from=m/{from}@latest")));
    sets
}

fn train(folder: &Path, sets: &[String], more: &[&str]) -> Vec<Value> {
    let all: Vec<&str> = sets.iter().map(String::as_str).chain(more.iter().copied()).collect();
    events(&run_job(folder, &all))
}

fn find<'e>(events: &'e [Value], name: &str) -> &'e Value {
    events.iter().find(|event| event["event"] == name).unwrap_or_else(|| panic!("no {name}: {events:#?}"))
}

fn last(events: &[Value]) -> &Value {
    events.last().unwrap()
}

/// Every file below a folder, with its content.
fn contents(folder: &Path) -> BTreeMap<PathBuf, Vec<u8>> {
    let mut files = BTreeMap::new();
    for entry in std::fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        match path.is_dir() {
            true => files.extend(contents(&path)),
            false => {
                let content = std::fs::read(&path).unwrap();
                files.insert(path, content);
            }
        }
    }
    files
}

/// A run that must end before its first step, with exit code 2 and these words.
fn refused(folder: &Path, sets: &[&str], words: &[&str]) {
    let output = run_job(folder, sets);
    let message = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(2), "{sets:?}: {message}");
    for word in words {
        assert!(message.contains(word), "{sets:?}: `{word}` is not in: {message}");
    }
    assert!(!String::from_utf8_lossy(&output.stdout).contains("\"progress\""), "{sets:?}");
}

/// Everything carries over: rows, both optimizers' states and counts, and the dropout masks.
#[test]
fn seven_nights_equal_one_run_over_all_days() {
    let folder = folder();
    let days: Vec<String> = (1..=7).map(|day| format!("d/day{day}.csv")).collect();
    let all = format!("spec.data.train.paths={{{}}}", days.join(","));
    let each_day = format!("spec.training.evaluation.every=steps,spec.training.evaluation.steps={STEPS}");
    let one = events(&run_job(folder.path(), &[&all, &each_day]));
    let auc_at = |step: u64| {
        let is_it = |event: &&Value| event["event"] == "evaluation" && event["step"] == step;
        one.iter().find(is_it).unwrap_or_else(|| panic!("no evaluation at {step}: {one:#?}"))["test"]["auc"].clone()
    };
    let mut nights = Vec::new();
    for day in 1..=7_u32 {
        let from = day.checked_sub(1).filter(|from| *from > 0);
        let night = train(folder.path(), &night(day, from), &[]);
        let step = u64::from(day) * STEPS;
        assert_eq!(last(&night)["steps"], step, "night {day}");
        assert!(last(&night)["test"]["auc"].is_f64(), "{night:#?}");
        assert_eq!(last(&night)["test"]["auc"], auc_at(step), "night {day}");
        nights.push(last(&night)["test"]["auc"].clone());
        assert_eq!(find(&night, "started")["from"].is_object(), from.is_some(), "night {day}");
        if let Some(from) = from {
            let origin = &find(&night, "started")["from"];
            assert_eq!((&origin["path"], &origin["step"]), (&format!("m/{from}").into(), &(step - STEPS).into()));
            assert_eq!(origin["digest"].as_str().map(str::len), Some(16), "{origin}");
            assert_eq!(&find(&night, "warmStarted")["from"], origin);
            assert_eq!(find(&night, "warmStarted")["freshParameters"], 0);
        }
        if day == 7 {
            assert_eq!(last(&night)["parametersSha256"], last(&one)["parametersSha256"]);
        }
    }
    assert_ne!(nights[0], nights[6], "the nights change the model");
}

#[test]
fn a_night_may_change_modes_rates_and_numbers() {
    let folder = folder();
    train(folder.path(), &night(1, None), &[]);
    let before = contents(&folder.path().join("m/1"));
    for (other, sets) in [
        &["spec.training.mode=gba", "spec.roles.denseWorker.replicas=2", "spec.roles.ps.replicas=3"][..],
        &["spec.training.globalBatchSize=24", "spec.training.optimizer.dense.learningRate=0.5"],
        &["spec.training.optimizer.sparse.learningRate=0.5", "spec.training.seed=9", "spec.training.epochs=2"],
        &["spec.features.label.positiveFrom=1", "spec.data.badRows.action=skip", "spec.data.test=null"],
    ]
    .into_iter()
    .enumerate()
    {
        let path = format!("spec.checkpoint.path=m/other{other}");
        let second = train(folder.path(), &night(2, Some(1)), &[&[&*path][..], sets].concat());
        let rows = if sets.contains(&"spec.training.epochs=2") { 2 * DAY } else { DAY };
        assert_eq!(last(&second)["trainedRows"], rows, "{sets:?}");
        assert!(find(&second, "warmStarted")["rows"].as_u64() > Some(0), "{sets:?}");
    }
    assert_eq!(contents(&folder.path().join("m/1")), before, "the other job's files are only read");
}

#[test]
fn features_come_and_go_and_are_named() {
    let folder = folder();
    let first = train(folder.path(), &night(1, None), &[]);
    let grown = train(folder.path(), &night(2, Some(1)), &["spec.features.sparse[2].name=shop"]);
    let event = find(&grown, "warmStarted");
    assert_eq!((&event["newFeatures"], &event["leftOutFeatures"]), (&vec!["shop"].into(), &Vec::<Value>::new().into()));
    // The four columns of the new embedding, each with eight weights.
    assert_eq!(event["freshParameters"], 32);
    assert_eq!(event["rows"], last(&first)["rows"]);
    assert!(last(&grown)["rows"].as_u64() > event["rows"].as_u64(), "rows of the new table");
    let shrunk = train(
        folder.path(),
        &night(3, Some(2)),
        &["spec.features.sparse[0].name=item", "spec.features.sparse[1].name=shop", "spec.features.dense=null"],
    );
    let event = find(&shrunk, "warmStarted");
    assert_eq!(event["leftOutFeatures"], Value::from(vec!["user", "age"]), "{event}");
    assert_eq!(event["freshParameters"], 0);
}

#[test]
fn a_new_dense_optimizer_starts_fresh_and_says_so() {
    let folder = folder();
    train(folder.path(), &night(1, None), &[]);
    for (mode, replaced) in [("sync", "adamW"), ("hybrid", "adaGrad"), ("sync", "sgd"), ("gba", "adamW")] {
        let optimizer = format!("spec.training.optimizer.dense.kind={replaced},spec.training.mode={mode}");
        let whole = format!("spec.checkpoint.path=m/whole-{mode}-{replaced}");
        let parts = format!("spec.checkpoint.path=m/parts-{mode}-{replaced},spec.checkpoint.resume=latest");
        let whole = train(folder.path(), &night(2, Some(1)), &[&optimizer, &whole]);
        assert_eq!(find(&whole, "warmStarted")["replacedOptimizer"], "adam");
        // The count of the fresh state survives a checkpoint of the new job.
        let first = train(folder.path(), &night(2, Some(1)), &[&optimizer, &parts, "spec.training.steps=2"]);
        assert_eq!(last(&first)["steps"], STEPS + 2);
        let rest = train(folder.path(), &night(2, Some(1)), &[&optimizer, &parts]);
        assert_eq!(find(&rest, "resumed")["step"], STEPS + 2);
        assert_eq!(last(&rest)["trainedRows"], DAY, "{mode}, {replaced}");
        if mode == "sync" {
            assert_eq!(last(&rest)["parametersSha256"], last(&whole)["parametersSha256"], "{replaced}");
        }
    }
}

#[test]
fn the_jobs_own_checkpoint_comes_first() {
    let folder = folder();
    train(folder.path(), &night(1, None), &[]);
    let sets = [night(2, Some(1)), vec!["spec.checkpoint.resume=latest".to_owned()]].concat();
    let first = train(folder.path(), &sets, &[]);
    let again = train(folder.path(), &sets, &[]);
    let text = format!("{again:?}");
    assert!(text.contains("spec.checkpoint.from m/1@latest is not used: this job's own checkpoint step-"), "{text}");
    assert!(!again.iter().any(|event| event["event"] == "warmStarted"), "{text}");
    assert_eq!(last(&again)["parametersSha256"], last(&first)["parametersSha256"]);
}

#[test]
fn two_nights_may_begin_with_one_model_at_once() {
    let folder = folder();
    train(folder.path(), &night(1, None), &[]);
    std::thread::scope(|scope| {
        let jobs = ["m/a", "m/b"].map(|path| {
            let (folder, path) = (folder.path(), format!("spec.checkpoint.path={path}"));
            scope.spawn(move || train(folder, &night(2, Some(1)), &[&path]))
        });
        let [a, b] = jobs.map(|job| job.join().unwrap());
        assert_eq!(last(&a)["parametersSha256"], last(&b)["parametersSha256"]);
    });
}

#[test]
fn processes_begin_with_another_jobs_model_too() {
    let folder = folder();
    train(folder.path(), &night(1, None), &[]);
    let one = train(folder.path(), &night(2, Some(1)), &[]);
    let sets = night(2, Some(1));
    let sets = sets.iter().flat_map(|set| ["--set", set.as_str()]);
    let arguments = ["run", "job.yaml", "--json", "--processes", "--set", "spec.roles.ps.replicas=2"].into_iter();
    let path = ["--set", "spec.checkpoint.path=m/processes"];
    let many = events(&rectrain(folder.path(), &arguments.chain(sets).chain(path).collect::<Vec<_>>()));
    assert_eq!(last(&one)["parametersSha256"], last(&many)["parametersSha256"]);
    assert_eq!(find(&many, "started")["from"]["step"], STEPS);
}

#[test]
fn a_model_that_does_not_fit_is_refused_with_all_differences() {
    let folder = folder();
    train(folder.path(), &night(1, None), &[]);
    for (change, words) in [
        ("spec.model.hidden={16,8}", &["spec.model.hidden is `[8]` in the checkpoint and `[16,8]` in the job"][..]),
        (
            "spec.model.embeddingDim=8",
            &["the dim of the sparse feature `user` is `4` in the checkpoint and `8`", "of the sparse feature `item`"],
        ),
        ("spec.training.optimizer.sparse.kind=sgd", &["spec.training.optimizer.sparse of the table `item`"]),
    ] {
        let words = [&["spec.checkpoint.from: the model of m/1/step-", "Undo these changes"], words].concat();
        refused(folder.path(), &["spec.checkpoint.from=m/1@latest", change], &words);
    }
}

/// The state of the first-order weights carries over too.
#[test]
fn nights_with_ftrl_for_first_order_weights_equal_one_run() {
    let folder = folder();
    let ftrl = "spec.training.optimizer.firstOrder.kind=ftrl,spec.training.optimizer.firstOrder.l1=0.001";
    let both = events(&run_job(folder.path(), &["spec.data.train.paths={d/day1.csv,d/day2.csv}", ftrl]));
    train(folder.path(), &night(1, None), &[ftrl]);
    let second = train(folder.path(), &night(2, Some(1)), &[ftrl]);
    assert_eq!(last(&second)["parametersSha256"], last(&both)["parametersSha256"]);
    refused(folder.path(), &["spec.checkpoint.from=m/1@latest"], &["spec.training.optimizer.firstOrder of the table"]);
}

#[test]
fn a_checkpoint_that_is_not_there_is_refused() {
    let folder = folder();
    train(folder.path(), &night(1, None), &[]);
    std::fs::create_dir(folder.path().join("empty")).unwrap();
    for (from, words) in [
        ("m/9@latest", &["spec.checkpoint.from: cannot open the folder m/9", "of another job"][..]),
        ("empty", &["spec.checkpoint.from: empty holds no finished checkpoint"]),
        ("m/1@7", &["m/1 holds no checkpoint of step 7; its newest steps are 6"]),
        ("m/1@newest", &["expected the number of a step or `latest` after the `@`"]),
        ("m@latest", &["spec.checkpoint.from: m holds no finished checkpoint"]),
    ] {
        refused(folder.path(), &[&format!("spec.checkpoint.from={from}")], words);
    }
    let own = "spec.checkpoint.path=m/1,spec.checkpoint.from=./m/1/@latest";
    refused(folder.path(), &[own], &["this job's own spec.checkpoint.path", "spec.checkpoint.resume to `latest`"]);
    std::os::unix::fs::symlink(folder.path().join("m/1"), folder.path().join("link")).unwrap();
    std::fs::create_dir(folder.path().join("m/2")).unwrap();
    std::os::unix::fs::symlink(folder.path().join("m/2"), folder.path().join("two")).unwrap();
    let linked = "spec.checkpoint.path=m/2,spec.checkpoint.from=two@latest";
    refused(folder.path(), &[linked], &["are the same folder", "spec.checkpoint.resume to `latest`"]);
    let whole = events(&run_job(folder.path(), &["spec.checkpoint.from=link@6", "spec.data.train.paths={d/day2.csv}"]));
    assert_eq!(find(&whole, "started")["from"]["step"], 6);
}

#[test]
fn a_damaged_checkpoint_is_refused() {
    let folder = folder();
    train(folder.path(), &night(1, None), &["spec.checkpoint.everySteps=3,spec.checkpoint.fullEvery=1"]);
    let newest = folder.path().join("m/1/step-000000000006");
    let flip = |part: &str| {
        let files = std::fs::read_dir(&newest).unwrap().map(|entry| entry.unwrap().path());
        let file = files.into_iter().find(|path| path.display().to_string().contains(part)).unwrap();
        let mut bytes = std::fs::read(&file).unwrap();
        let middle = bytes.len() / 2;
        bytes[middle] ^= 1;
        std::fs::write(&file, bytes).unwrap();
    };
    for part in ["rows", "dense"] {
        flip(part);
        for from in ["spec.checkpoint.from=m/1@6", "spec.checkpoint.from=m/1@latest"] {
            refused(folder.path(), &[from], &["spec.checkpoint.from: ", part, "spec.checkpoint.from=m/1@STEP"]);
        }
        flip(part);
    }
    // A damaged manifest: `latest` means the checkpoint before, with a warning.
    flip("manifest");
    refused(folder.path(), &["spec.checkpoint.from=m/1@6"], &["manifest.json"]);
    let older = events(&run_job(folder.path(), &["spec.checkpoint.from=m/1@latest"]));
    assert_eq!(find(&older, "started")["from"]["step"], 3);
    assert!(format!("{older:?}").contains("spec.checkpoint.from skips the newer checkpoint step-000000000006"));
}

#[test]
fn a_resume_on_other_files_names_the_way_out() {
    let folder = folder();
    train(folder.path(), &night(1, None), &[]);
    let resume = "spec.checkpoint.path=m/1,spec.checkpoint.resume=latest";
    let words = ["d/day1.csv was removed", "trained all of its data", "set spec.checkpoint.from to m/1@6"];
    refused(folder.path(), &[resume, "spec.data.train.paths={d/day2.csv}"], &words);
    let again = events(&run_job(folder.path(), &[resume]));
    let text = format!("{again:?}");
    assert!(text.contains("nothing is left to train") && text.contains("set spec.checkpoint.from to m/1@6"), "{text}");
}

#[test]
fn the_text_output_names_the_model_that_a_job_begins_with() {
    let folder = folder();
    train(folder.path(), &night(1, None), &[]);
    let output = rectrain(folder.path(), &["run", "job.yaml", "--set", "spec.checkpoint.from=m/1"]);
    let text = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{text}");
    for part in ["from m/1 (step 6, step-000000000006, digest ", "beginning with the model of m/1@6"] {
        assert!(text.contains(part), "{part}: {text}");
    }
}

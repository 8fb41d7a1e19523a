//! Runs that end anywhere and resume from their last checkpoint: in `sync` to the bit, and in every
//! mode with every row trained once.

#![allow(clippy::unwrap_used, reason = "an unwrap in a test is an assertion")]

mod common;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use prometheus::Registry;
use rectrain_checkpoint::{FileContent, MANIFEST, Manifest};
use rectrain_coordinator::Coordinator;
use rectrain_member::local::{run_in_process, run_with};
use rectrain_protocol::RoleError;
use rectrain_protocol::events::{EventLog, JobEvent, Summary};
use rectrain_protocol::metrics::{CoordinatorMetrics, RoleMetrics};

use crate::common::plan;

/// Trains as run `run`. With `crash_after`, drops the job after this many checkpoints.
fn train(
    run: &str,
    changes: &[&str],
    crash_after: Option<usize>,
) -> Result<(Option<Summary>, Vec<JobEvent>), RoleError> {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(3).enable_all().build().unwrap();
    let events = EventLog::default();
    let result = runtime.block_on(async {
        let metrics = RoleMetrics::new(Registry::new()).unwrap();
        let mut follower = events.follow();
        let crash = async {
            let mut left = crash_after.unwrap_or(usize::MAX);
            while left > 0
                && let Some(event) = follower.next().await
            {
                left -= usize::from(matches!(event, JobEvent::CheckpointSaved { .. }));
            }
            if left > 0 {
                std::future::pending::<()>().await;
            }
        };
        let plan = Arc::new(plan(changes));
        // Training faster than the disk would skip checkpoints and might end before the crash.
        let workers = if crash_after.is_some() { plan.replicas.dense_worker } else { 0 };
        let slow = (0..workers).map(|rank| (rank, 6.0)).collect();
        tokio::select! {
            summary = run_in_process(plan, run, &slow, events.clone(), metrics) => summary.map(Some),
            () = crash => Ok(None),
        }
    });
    runtime.shutdown_background();
    let summary = result?;
    let seen = events.after(0, usize::MAX).into_iter().map(|logged| logged.event).collect();
    Ok((summary, seen))
}

fn summary(run: &str, changes: &[&str]) -> Summary {
    train(run, changes, None).unwrap().0.unwrap()
}

fn saved_steps(events: &[JobEvent]) -> Vec<u64> {
    let step = |event: &JobEvent| if let JobEvent::CheckpointSaved { step, .. } = event { Some(*step) } else { None };
    events.iter().filter_map(step).collect()
}

fn resumed(events: &[JobEvent]) -> Option<u64> {
    events.iter().find_map(|event| if let JobEvent::Resumed { step, .. } = event { Some(*step) } else { None })
}

fn path_of(folder: &Path) -> String {
    format!("spec.checkpoint.path={}", folder.join("checkpoints").display())
}

/// The existing checkpoints, by ascending step. A busy machine may skip some while the one before
/// is being written.
fn finished(folder: &Path) -> Vec<PathBuf> {
    let steps = std::fs::read_dir(folder.join("checkpoints")).unwrap().map(|entry| entry.unwrap().path());
    let mut steps: Vec<_> = steps.filter(|step| step.join("manifest.json").exists()).collect();
    steps.sort();
    steps
}

fn name(checkpoint: &Path) -> String {
    checkpoint.file_name().unwrap().to_str().unwrap().to_owned()
}

/// The step of a full checkpoint.
fn step_of(checkpoint: &Path) -> Option<u64> {
    name(checkpoint).trim_start_matches("step-").parse().ok()
}

/// Flips a bit in the middle of a file of the checkpoint.
fn damage(checkpoint: &Path, file: &str) {
    let files = std::fs::read_dir(checkpoint).unwrap().map(|entry| entry.unwrap().path());
    let file = files.into_iter().find(|path| path.display().to_string().contains(file)).unwrap();
    let mut bytes = std::fs::read(&file).unwrap();
    let middle = bytes.len() / 2;
    bytes[middle] ^= 1;
    std::fs::write(&file, bytes).unwrap();
}

/// 2 epochs of 2000 rows in batches of 96: 42 steps. The 21st and the last have 80 rows. A
/// chunk has 5 batches.
const WINDOW: &str = "spec.data.shuffle.windowRows=480";

#[test]
fn sync_resumes_to_the_bit_from_anywhere_with_any_replicas() {
    let alone = summary("alone", &[WINDOW]);
    let others = [
        &["spec.roles.ps.replicas=3"][..],
        &["spec.roles.ps.replicas=2", "spec.roles.embeddingWorker.replicas=2", "spec.roles.loader.replicas=2"],
        &[],
    ];
    // A third of the checkpoints are full, the others are deltas. Step 21 is the end of the first
    // epoch.
    let crashes = [(4, 1), (4, 2), (5, 3), (7, 2), (20, 1), (21, 1)];
    for ((every, crash_after), others) in crashes.into_iter().zip(others.into_iter().cycle()) {
        let folder = tempfile::tempdir().unwrap();
        let path = path_of(folder.path());
        let every = format!("spec.checkpoint.everySteps={every}");
        let job = [WINDOW, &path, &every, "spec.checkpoint.fullEvery=3"];
        let (nothing, before) = train("crashed", &job, Some(crash_after)).unwrap();
        assert!(nothing.is_none(), "the job ended before {crash_after} checkpoints");
        let (after, events) = train("crashed", &[&job[..], others].concat(), None).unwrap();
        let after = after.unwrap();
        assert!(resumed(&events) >= saved_steps(&before).last().copied(), "{events:?}");
        assert_eq!(after.parameters_sha256, alone.parameters_sha256, "{every}, after {crash_after}: {others:?}");
        assert_eq!((after.samples, after.steps, after.trained_rows), (alone.samples, alone.steps, alone.trained_rows));
        assert_eq!(after.test, alone.test);
    }
}

#[test]
fn several_dense_workers_resume_to_the_bit() {
    let workers = "spec.roles.denseWorker.replicas=3";
    let alone = summary("alone", &[workers]);
    let folder = tempfile::tempdir().unwrap();
    let path = path_of(folder.path());
    let job = [workers, &path, "spec.checkpoint.everySteps=10"];
    train("crashed", &job, Some(2)).unwrap();
    let (after, events) = train("crashed", &job, None).unwrap();
    assert!(resumed(&events) >= Some(20));
    assert_eq!(after.unwrap().parameters_sha256, alone.parameters_sha256);
}

#[test]
fn checkpoints_change_no_bit_and_a_finished_run_stays_finished() {
    let alone = summary("alone", &[]);
    let folder = tempfile::tempdir().unwrap();
    let path = path_of(folder.path());
    let (saved, events) = train("saved", &[&path, "spec.checkpoint.everySteps=5"], None).unwrap();
    assert_eq!(saved.unwrap().parameters_sha256, alone.parameters_sha256);
    assert_eq!(saved_steps(&events).last(), Some(&42), "{events:?}");
    let (again, events) = train("another", &[&path, "spec.checkpoint.resume=latest"], None).unwrap();
    let again = again.unwrap();
    assert_eq!(resumed(&events), Some(42));
    assert_eq!(
        (again.parameters_sha256, again.test, again.samples),
        (alone.parameters_sha256, alone.test, alone.samples)
    );
}

#[test]
fn more_epochs_continue_where_the_first_ones_ended() {
    let folder = tempfile::tempdir().unwrap();
    let path = path_of(folder.path());
    summary("first", &[&path, "spec.training.epochs=1"]);
    let both = summary("second", &[&path, "spec.checkpoint.resume=latest"]);
    assert_eq!(both.parameters_sha256, summary("alone", &[]).parameters_sha256);
}

#[test]
fn every_mode_resumes_with_every_row_trained_once() {
    for mode in ["hybrid", "async", "gba", "hopBs", "hopBw", "bsp", "shadow"] {
        let folder = tempfile::tempdir().unwrap();
        let path = path_of(folder.path());
        let mode_is = format!("spec.training.mode={mode}");
        let job = [
            &*mode_is,
            &path,
            "spec.checkpoint.everySteps=6",
            "spec.training.localBatchSize=32",
            "spec.roles.denseWorker.replicas=3",
            "spec.roles.ps.replicas=2",
        ];
        train("crashed", &job, Some(2)).unwrap();
        let (after, events) = train("crashed", &[&job[..5], &["spec.roles.ps.replicas=3"]].concat(), None).unwrap();
        let after = after.unwrap();
        assert!(resumed(&events) >= Some(12), "{mode}: {events:?}");
        let dropped = after.dropped_batches;
        assert_eq!(after.samples, 4000, "{mode}");
        assert!(after.trained_rows + dropped * 32 >= 4000 && after.trained_rows <= 4000, "{mode}: {after:?}");
        assert!(mode == "hopBw" || dropped == 0, "{mode}");
        assert!(after.test.unwrap().auc.unwrap() > 0.5, "{mode}");
    }
}

#[test]
fn a_switched_job_resumes_in_its_last_mode() {
    let folder = tempfile::tempdir().unwrap();
    let path = path_of(folder.path());
    let job = [
        &*path,
        "spec.training.switchAt[0].step=8",
        "spec.training.switchAt[0].mode=gba",
        "spec.checkpoint.everySteps=6",
    ];
    train("crashed", &job, Some(3)).unwrap();
    let after = summary("crashed", &job);
    assert_eq!((after.mode.as_str(), after.mode_switches, after.trained_rows), ("gba", 1, 4000));
}

#[test]
fn a_checkpoint_resumes_in_the_present_mode_of_the_manifest() {
    for (saved_in, resumes_in) in [("sync", "gba"), ("gba", "sync"), ("hybrid", "async"), ("bsp", "hybrid")] {
        let folder = tempfile::tempdir().unwrap();
        let path = path_of(folder.path());
        let job = [
            &*path,
            "spec.checkpoint.everySteps=6",
            "spec.training.localBatchSize=32",
            "spec.roles.denseWorker.replicas=3",
            "spec.roles.ps.replicas=2",
        ];
        let in_mode = |mode: &str| format!("spec.training.mode={mode}");
        train("crashed", &[&job[..], &[&in_mode(saved_in)]].concat(), Some(2)).unwrap();
        let (after, events) = train("crashed", &[&job[..], &[&in_mode(resumes_in)]].concat(), None).unwrap();
        let after = after.unwrap();
        assert!(resumed(&events) >= Some(12), "{saved_in} to {resumes_in}: {events:?}");
        assert_eq!(after.mode, resumes_in, "{saved_in}");
        assert_eq!((after.samples, after.trained_rows), (4000, 4000), "{saved_in} to {resumes_in}");
        assert!(after.test.unwrap().auc.unwrap() > 0.5, "{saved_in} to {resumes_in}");
    }
}

/// In `des`, dense workers hold the whole first layer, so a checkpoint has what one of `sync` has.
#[test]
fn a_checkpoint_of_des_resumes_in_sync_to_the_bit_and_the_reverse() {
    let dnn = "spec.model.kind=dnn";
    let alone = summary("alone", &[dnn]);
    for (saved_in, resumes_in) in [("des", "sync"), ("sync", "des"), ("des", "des"), ("des", "hybrid")] {
        let folder = tempfile::tempdir().unwrap();
        let path = path_of(folder.path());
        let job = [dnn, &*path, "spec.checkpoint.everySteps=6"];
        let in_mode = |mode: &str| format!("spec.training.mode={mode}");
        train("crashed", &[&job[..], &[&in_mode(saved_in)]].concat(), Some(2)).unwrap();
        let (after, events) = train("crashed", &[&job[..], &[&in_mode(resumes_in)]].concat(), None).unwrap();
        let after = after.unwrap();
        assert!(resumed(&events) >= Some(12), "{saved_in} to {resumes_in}: {events:?}");
        assert_eq!((after.mode.as_str(), after.trained_rows), (resumes_in, 4000), "{saved_in}");
        let is_exact = resumes_in != "hybrid";
        assert!(!is_exact || after.parameters_sha256 == alone.parameters_sha256, "{saved_in} to {resumes_in}");
    }
}

#[test]
fn a_damaged_checkpoint_is_named_and_the_one_before_is_used() {
    let alone = summary("alone", &[]);
    let folder = tempfile::tempdir().unwrap();
    let path = path_of(folder.path());
    let job = [&*path, "spec.checkpoint.everySteps=10", "spec.checkpoint.fullEvery=1", "spec.roles.ps.replicas=2"];
    train("crashed", &job, Some(3)).unwrap();
    let steps = finished(folder.path());
    let [before, newest] = &steps[steps.len() - 2..] else { panic!("{steps:?}") };
    damage(newest, "rows-00001");
    let (after, events) = train("crashed", &job, None).unwrap();
    let warned = |event: &JobEvent| matches!(event, JobEvent::Warning { message } if message.contains("rows-00001") && message.contains(&name(newest)));
    assert!(events.iter().any(warned), "{events:?}");
    assert_eq!(resumed(&events), step_of(before));
    assert_eq!(after.unwrap().parameters_sha256, alone.parameters_sha256);
}

/// With `keep: 1` the damaged checkpoint must not count as the one to keep.
#[test]
fn a_damaged_checkpoint_does_not_displace_later_ones() {
    let folder = tempfile::tempdir().unwrap();
    let path = path_of(folder.path());
    let job = [&*path, "spec.checkpoint.fullEvery=1"];
    train("crashed", &[&job[..], &["spec.checkpoint.everySteps=10"]].concat(), Some(3)).unwrap();
    let steps = finished(folder.path());
    let [before, newest] = &steps[steps.len() - 2..] else { panic!("{steps:?}") };
    damage(newest, "rows-00000");
    let often = [&job[..], &["spec.checkpoint.everySteps=3", "spec.checkpoint.keep=1"]].concat();
    let (_, events) = train("crashed", &often, Some(2)).unwrap();
    assert_eq!(resumed(&events), step_of(before));
    let (_, again) = train("crashed", &often, None).unwrap();
    assert!(resumed(&again) >= saved_steps(&events).first().copied(), "{again:?}");
    assert!(resumed(&again) > step_of(before), "{again:?}");
}

/// Members of a drained node request checkpoints at the same time. Each gets one that begins after
/// its request, although another is being written.
#[test]
fn every_request_for_a_checkpoint_gets_one() {
    let folder = tempfile::tempdir().unwrap();
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(3).enable_all().build().unwrap();
    runtime.block_on(async {
        let metrics = RoleMetrics::new(Registry::new()).unwrap();
        let plan = Arc::new(plan(&[
            &path_of(folder.path()),
            "spec.checkpoint.everySteps=7",
            "spec.data.synthetic.rows=100000000",
            "spec.roles.ps.replicas=2",
        ]));
        let own = CoordinatorMetrics::of(&metrics, 0);
        let coordinator = Coordinator::start(Arc::clone(&plan), "test", None, EventLog::default(), own).await.unwrap();
        let coordinator = Arc::new(coordinator);
        let slow = BTreeMap::new();
        let training = run_with(plan, &slow, Arc::clone(&coordinator), metrics);
        let ask = |number: u32| {
            let coordinator = &coordinator;
            async move {
                tokio::time::sleep(Duration::from_millis(u64::from(number) * 7)).await;
                let since = coordinator.status().step;
                (since, coordinator.save_now().await)
            }
        };
        let asking = async {
            while coordinator.status().samples == 0 {
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
            futures::future::join_all((0..12).map(ask)).await
        };
        let told = tokio::select! {
            ended = training => panic!("training has ended: {:?}", ended.map(|summary| summary.steps)),
            told = tokio::time::timeout(Duration::from_secs(120), asking) => told.expect("checkpoints in time"),
        };
        for (since, saved) in told {
            let saved = saved.expect("no request is refused");
            let step = saved.trim_start_matches("step-").trim_end_matches("-delta").parse::<u64>().unwrap();
            assert!(step >= since, "{saved} is older than the request at step {since}");
        }
    });
    runtime.shutdown_background();
}

/// Damages the checkpoint at a path.
type Damage = fn(&Path);

/// Ways to damage a checkpoint whose manifest stays valid, each with a word of the error's reason.
const DAMAGES: [(Damage, &str); 4] = [
    (|checkpoint| std::fs::remove_file(rows_file(checkpoint)).unwrap(), "is missing"),
    (
        |checkpoint| {
            let bytes = std::fs::read(rows_file(checkpoint)).unwrap();
            std::fs::write(rows_file(checkpoint), &bytes[..bytes.len() - 1]).unwrap();
        },
        "was truncated",
    ),
    (|checkpoint| damage(checkpoint, "rows-00001"), "rows-00001"),
    (state_one_row_less, "contradicts the manifest"),
];

fn rows_file(checkpoint: &Path) -> PathBuf {
    let files = std::fs::read_dir(checkpoint).unwrap().map(|entry| entry.unwrap().path());
    files.into_iter().find(|path| path.display().to_string().contains("rows-00001")).unwrap()
}

/// Makes the manifest state one row less in the rows file of server 1, with a right checksum.
fn state_one_row_less(checkpoint: &Path) {
    let path = checkpoint.join(MANIFEST);
    let mut manifest = Manifest::decode("manifest", &std::fs::read(&path).unwrap()).unwrap();
    manifest.rows -= 1;
    for file in &mut manifest.files {
        if let FileContent::Rows { part: 1, rows, .. } = &mut file.content {
            *rows -= 1;
        }
    }
    std::fs::write(path, manifest.encode()).unwrap();
}

fn copy_of(checkpoints: &[PathBuf]) -> tempfile::TempDir {
    let copy = tempfile::tempdir().unwrap();
    for checkpoint in checkpoints {
        let to = copy.path().join("checkpoints").join(name(checkpoint));
        std::fs::create_dir_all(&to).unwrap();
        for file in std::fs::read_dir(checkpoint).unwrap().map(|entry| entry.unwrap().path()) {
            std::fs::copy(&file, to.join(file.file_name().unwrap())).unwrap();
        }
    }
    copy
}

/// Each kind of damage, first to the newest checkpoint and then to all: the one before is used, or
/// the job ends without a step.
#[test]
fn damage_never_makes_a_job_start_from_initial_values() {
    let folder = tempfile::tempdir().unwrap();
    let settings = ["spec.checkpoint.everySteps=10", "spec.checkpoint.fullEvery=1", "spec.roles.ps.replicas=2"];
    train("crashed", &[&[&*path_of(folder.path())], &settings[..]].concat(), Some(2)).unwrap();
    let saved = finished(folder.path());
    for (harm, reason) in DAMAGES {
        let copy = copy_of(&saved);
        let path = path_of(copy.path());
        let job = [&[&*path, "spec.training.epochs=null", "spec.training.steps=25"], &settings[..]].concat();
        let checkpoints = finished(copy.path());
        let [.., before, newest] = &checkpoints[..] else { panic!("{checkpoints:?}") };
        let lost = name(&rows_file(newest));
        harm(newest);
        let (_, events) = train("crashed", &job, None).unwrap();
        let warned = |event: &JobEvent| matches!(event, JobEvent::Warning { message } if message.contains(&lost) && message.contains(reason));
        assert!(events.iter().any(warned), "{reason}: {events:?}");
        assert_eq!(resumed(&events), step_of(before), "{reason}");

        let copy = copy_of(&saved);
        finished(copy.path()).iter().for_each(|checkpoint| harm(checkpoint));
        let path = path_of(copy.path());
        let job = [&[&*path, "spec.checkpoint.resume=latest"], &settings[..]].concat();
        let error = train("another", &job, None).unwrap_err();
        assert!(error.is_user_error(), "{error}");
        let message = error.to_string();
        assert!(message.contains("spec.checkpoint.path") && message.contains("set another path"), "{message}");
        assert!(message.contains(&lost) && message.contains(reason), "{message}");
    }
}

#[test]
fn only_damaged_checkpoints_are_refused_after_a_crash_too() {
    let folder = tempfile::tempdir().unwrap();
    let path = path_of(folder.path());
    let job = [&*path, "spec.checkpoint.everySteps=10", "spec.checkpoint.fullEvery=1"];
    train("crashed", &job, Some(1)).unwrap();
    for step in std::fs::read_dir(folder.path().join("checkpoints")).unwrap() {
        for file in std::fs::read_dir(step.unwrap().path()).unwrap().map(|file| file.unwrap().path()) {
            if file.display().to_string().contains("rows-") {
                let mut bytes = std::fs::read(&file).unwrap();
                bytes[200] ^= 1;
                std::fs::write(&file, bytes).unwrap();
            }
        }
    }
    let error = train("crashed", &job, None).unwrap_err();
    assert!(error.is_user_error() && error.to_string().contains("rows-00000"), "{error}");
    // A crash during the first checkpoint leaves no manifest. Then no checkpoint is lost.
    for step in std::fs::read_dir(folder.path().join("checkpoints")).unwrap() {
        let _absent = std::fs::remove_file(step.unwrap().path().join(MANIFEST));
    }
    let (_, events) =
        train("crashed", &[&job[..], &["spec.training.epochs=null", "spec.training.steps=12"]].concat(), None).unwrap();
    assert!(events.iter().any(|event| matches!(event, JobEvent::Warning { .. })), "{events:?}");
    assert_eq!(resumed(&events), None);
}

#[test]
fn a_checkpoint_that_does_not_fit_is_refused_and_left_alone() {
    let folder = tempfile::tempdir().unwrap();
    let path = path_of(folder.path());
    summary("first", &[&path, "spec.training.epochs=1"]);
    let refused = |run: &str, changes: &[&str]| {
        let error = train(run, &[&[&*path], changes].concat(), None).unwrap_err();
        assert!(error.is_user_error(), "{error}");
        error.to_string()
    };
    assert!(refused("second", &[]).contains("resume"));
    let latest = "spec.checkpoint.resume=latest";
    let message = refused("second", &[latest, "spec.training.globalBatchSize=48"]);
    assert!(message.contains("globalBatchSize is 48") && message.contains("with 96"), "{message}");
    let message = refused("second", &[latest, "spec.model.hidden={16,4}"]);
    assert!(message.contains("model.hidden.1"), "{message}");
    let message = refused("second", &[latest, "spec.data.synthetic.rows=100"]);
    assert!(message.contains("spec.data"), "{message}");
    let left = std::fs::read_dir(folder.path().join("checkpoints")).unwrap().count();
    assert_eq!(left, 1);
}

#[test]
fn only_as_many_checkpoints_are_kept_as_asked_for() {
    let folder = tempfile::tempdir().unwrap();
    let path = path_of(folder.path());
    let settings = ["spec.checkpoint.everySteps=3", "spec.checkpoint.fullEvery=1", "spec.checkpoint.keep=2"];
    let (_, events) = train("run", &[&[&*path], &settings[..]].concat(), None).unwrap();
    let steps = saved_steps(&events);
    let mut names: Vec<String> = std::fs::read_dir(folder.path().join("checkpoints"))
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    names.sort();
    let kept: Vec<String> = steps.iter().skip(steps.len() - 2).map(|step| format!("step-{step:012}")).collect();
    assert_eq!(names, kept);
}

//! Jobs with a frozen model beside the one that trains. It predicts every row that is trained, and
//! changes no model.

#![allow(clippy::unwrap_used, reason = "an unwrap in a test is an assertion")]

mod common;

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

use prometheus::Registry;
use rectrain_member::local::run_in_process;
use rectrain_protocol::RoleError;
use rectrain_protocol::events::{EventLog, JobEvent, Summary};
use rectrain_protocol::metrics::RoleMetrics;

use crate::common::plan;

/// A run that has ended.
struct Ended {
    summary: Summary,
    events: Vec<JobEvent>,
    /// In the text format of Prometheus.
    metrics: String,
}

fn try_train(changes: &[&str]) -> Result<Ended, RoleError> {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(3).enable_all().build().unwrap();
    let events = EventLog::default();
    let metrics = RoleMetrics::new(Registry::new()).unwrap();
    let plan = Arc::new(plan(changes));
    let summary = runtime.block_on(run_in_process(plan, "a run", &BTreeMap::new(), events.clone(), metrics.clone()));
    runtime.shutdown_background();
    let events = events.after(0, usize::MAX).into_iter().map(|logged| logged.event).collect();
    Ok(Ended { summary: summary?, events, metrics: metrics.encode().unwrap() })
}

fn train(changes: &[&str]) -> Ended {
    try_train(changes).unwrap()
}

/// A whole job of 21 steps that leaves a checkpoint in `folder`.
fn first_job(folder: &Path) -> String {
    let path = folder.join("first").display().to_string();
    assert_eq!(train(&[&format!("spec.checkpoint.path={path}"), EPOCH]).summary.steps, 21);
    path
}

/// An epoch of 2000 rows in batches of 96: 21 steps.
const EPOCH: &str = "spec.training.epochs=1";

#[test]
fn a_frozen_model_predicts_each_row_and_changes_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let first = first_job(folder.path());
    let from = format!("spec.checkpoint.from={first}@21");
    let frozen = format!("spec.training.quality.baseline.from={first}@21");
    let alone = train(&[&from, EPOCH]);
    assert!(!alone.metrics.contains("rectrain_loader_baseline_rows_total{replica=\"0\"} 2"), "{}", alone.metrics);
    for loaders in ["1", "2"] {
        let loaders = format!("spec.roles.loader.replicas={loaders}");
        let beside = train(&[&from, &frozen, EPOCH, &loaders]);
        assert_eq!(beside.summary.parameters_sha256, alone.summary.parameters_sha256, "{loaders}");
        let rows = beside.metrics.lines().filter_map(|line| line.strip_prefix("rectrain_loader_baseline_rows_total{"));
        let rows: u64 = rows.map(|line| line.split(' ').next_back().unwrap().parse::<u64>().unwrap()).sum();
        assert_eq!(rows, 2000, "{loaders}");
    }
}

/// The frozen model has trained these rows before. The other one meets them for the first time.
#[test]
fn the_events_have_both_qualities() {
    let folder = tempfile::tempdir().unwrap();
    let first = first_job(folder.path());
    let frozen = format!("spec.training.quality.baseline.from={first}@21");
    let ended = train(&[&frozen, EPOCH]);
    let last = ended.events.iter().rev().find_map(|event| match event {
        JobEvent::Progress { window: Some(window), baseline: Some(baseline), .. } => Some((*window, *baseline)),
        _ => None,
    });
    let Some((window, baseline)) = last else { panic!("{:?}", ended.events) };
    assert!(baseline.rows >= window.rows && baseline.rows <= 2000, "{window:?}, {baseline:?}");
    assert!(baseline.normalized_entropy < window.normalized_entropy, "{window:?}, {baseline:?}");
}

#[test]
fn a_checkpoint_that_does_not_fit_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let first = first_job(folder.path());
    let field = "spec.training.quality.baseline.from";
    let refusal = |changes: &[&str]| {
        let error = try_train(changes).err().unwrap();
        assert!(error.is_user_error(), "{error}");
        error.to_string()
    };
    let message = refusal(&[&format!("{field}={first}@20")]);
    assert!(message.contains(field) && message.contains(&format!("no finished checkpoint {first}@20")), "{message}");
    let frozen = format!("{field}={first}@21");
    let message = refusal(&[&frozen, "spec.features.dense[0].transform=log1p"]);
    assert!(message.contains("its model has other inputs than this job"), "{message}");
}

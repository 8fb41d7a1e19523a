//! Test ids that no training row had: the shares in events and summary equal a naive count over the
//! files, and a high share is a warning.

#![allow(clippy::unwrap_used, reason = "an unwrap in a test is an assertion")]

mod common;

use std::collections::BTreeSet;
use std::path::Path;

use serde_json::Value;

use common::{events, rectrain};

const JOB: &str = "
apiVersion: rectrain.dev/v1alpha1
kind: RecTrainingJob
metadata: {name: test}
spec:
  model: {kind: deepfm, embeddingDim: 4, hidden: [8]}
  features:
    sparse: [{name: user_id}, {name: tags, multiValue: {separator: '|'}}, {name: item_id}]
  data: {train: {paths: [train.csv]}, test: {paths: [test.csv]}}
  training: {epochs: 2, globalBatchSize: 48, localBatchSize: 12, evaluation: {every: epoch}}
  roles:
    ps: {replicas: 2}
    embeddingWorker: {replicas: 2}
    denseWorker: {replicas: 2}
";
const FEATURES: [&str; 3] = ["user_id", "tags", "item_id"];
const HEADER: &str = "label,user_id,tags,item_id\n";

/// Row number `row` of these users. Every third row has two tags, and others have one or none.
fn line(row: u32, user: u32, first_tag: u32, item: &str) -> String {
    let tag = first_tag + row * 5 % 11;
    let tags = match row % 3 {
        0 => format!("{tag}|{}", tag + 3),
        1 => tag.to_string(),
        _ => String::new(),
    };
    format!("{},{user},{tags},{item}\n", u32::from(row * 5 % 7 < 3))
}

/// Writes the files. Every other test user is unknown, some test tags are, and the test items have
/// another form than the training items.
fn write_files(folder: &Path) {
    let train: String = (0..400).map(|row| line(row, row % 50, 0, &(row % 20).to_string())).collect();
    let test = |row: u32| line(row, row % 50 + 1000 * (row % 2), 5, &format!("item-{}", row % 20));
    let test: String = (0..250).map(test).collect();
    std::fs::write(folder.join("train.csv"), format!("{HEADER}{train}")).unwrap();
    std::fs::write(folder.join("test.csv"), format!("{HEADER}{test}")).unwrap();
    std::fs::write(folder.join("job.yaml"), JOB).unwrap();
}

/// The ids of a column, in order.
fn ids(folder: &Path, file: &str, column: usize) -> Vec<String> {
    let text = std::fs::read_to_string(folder.join(file)).unwrap();
    let cells = text.lines().skip(1).map(|line| line.split(',').nth(column).unwrap());
    cells.flat_map(|cell| cell.split('|')).filter(|id| !id.is_empty()).map(str::to_owned).collect()
}

/// The share of the test ids in a column that the training file does not have.
fn naive_share(folder: &Path, column: usize) -> f64 {
    let known: BTreeSet<String> = ids(folder, "train.csv", column).into_iter().collect();
    let test = ids(folder, "test.csv", column);
    test.iter().filter(|id| !known.contains(*id)).count() as f64 / test.len() as f64
}

fn assert_equals_the_naive_count(test: &Value, folder: &Path) {
    assert_eq!(test["samples"], 250);
    for (column, feature) in (1..).zip(FEATURES) {
        let (found, expected) = (test["unseen"][feature].as_f64().unwrap(), naive_share(folder, column));
        assert!((found - expected).abs() < 1e-12, "{feature}: found {found}, expected {expected}");
    }
}

#[test]
fn shares_of_unseen_ids_equal_a_naive_count() {
    let folder = tempfile::tempdir().unwrap();
    write_files(folder.path());
    let naive = [1, 2, 3].map(|column| naive_share(folder.path(), column));
    assert!(naive[0] == 0.5 && naive[1] > 0.1 && naive[1] < 0.5 && naive[2] == 1.0, "{naive:?}");
    let places: [&[&str]; 2] = [&[], &["--processes"]];
    for mode in ["sync", "gba"] {
        for processes in places {
            let set = format!("spec.training.mode={mode}");
            let run = ["run", "job.yaml", "--json", "--set", &set];
            let events = events(&rectrain(folder.path(), &[&run[..], processes].concat()));
            let is = |name: &'static str| move |event: &&Value| event["event"] == name;
            let evaluations: Vec<_> = events.iter().filter(is("evaluation")).collect();
            assert_eq!(evaluations.len(), 2, "{events:#?}");
            for evaluation in evaluations {
                assert_equals_the_naive_count(&evaluation["test"], folder.path());
            }
            assert_equals_the_naive_count(&events.last().unwrap()["test"], folder.path());
            let is_about_ids = |event: &&Value| event["message"].to_string().contains("no training row had");
            let warnings: Vec<_> = events.iter().filter(is("warning")).filter(is_about_ids).collect();
            assert_eq!(warnings.len(), 1, "the second evaluation has the same share: {warnings:?}");
            let message = warnings[0]["message"].as_str().unwrap();
            assert!(message.contains("100.0 % of `item_id`") && !message.contains("user_id"), "{message}");
        }
    }
}

#[test]
fn a_person_sees_the_shares_of_unseen_ids() {
    let folder = tempfile::tempdir().unwrap();
    write_files(folder.path());
    let output = rectrain(folder.path(), &["run", "job.yaml"]);
    let (table, notes) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{notes}");
    let line = table.lines().find(|line| line.contains("unseen in training, user_id"));
    assert!(line.is_some_and(|line| line.trim_end().ends_with("50.0 %")), "{table}");
    assert!(notes.contains("warning: test ids that no training row had: 100.0 % of `item_id`"), "{notes}");
}

//! `rectrain data placement`: its figures against a computation by hand, and bad inputs.

#![allow(clippy::unwrap_used, reason = "an unwrap in a test is an assertion")]

mod common;

use std::path::Path;

use serde_json::{Value, json};

use common::rectrain;

/// A row of `lr` has one value, so a look-up costs 8 + 4 bytes.
const JOB: &str = "
apiVersion: rectrain.dev/v1alpha1
kind: RecTrainingJob
metadata: {name: clicks}
spec:
  model: {kind: lr}
  features: {sparse: [{name: a}, {name: b}, {name: c}, {name: d}]}
  data: {train: {paths: [clicks.csv]}}
  training: {globalBatchSize: 100}
";

/// The job and 1,000 rows. A piece of 100 rows has 100 ids of `a` and `c`, 2 of `b` and 5 of `d`.
fn folder() -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("job.yaml"), JOB).unwrap();
    let rows: String = (0..1_000).map(|row| format!("{},{row},{},{row},{}\n", row % 2, row % 2, row % 5)).collect();
    std::fs::write(folder.path().join("clicks.csv"), format!("label,a,b,c,d\n{rows}")).unwrap();
    folder
}

fn placed(folder: &Path, arguments: &[&str]) -> Value {
    let output = rectrain(folder, &[&["data", "placement", "job.yaml", "--json"], arguments].concat());
    assert!(output.status.success(), "{output:?}");
    serde_json::from_slice(&output.stdout).unwrap()
}

fn assert_is(found: &Value, expected: f64) {
    assert!((found.as_f64().unwrap() - expected).abs() < 1e-9, "{found}, not {expected}");
}

#[test]
fn the_figures_are_those_of_the_rows() {
    let folder = folder();
    let report = placed(folder.path(), &[]);
    assert_eq!(report["read"], json!({"rows": 1_000, "isAll": true, "pieceRows": 100}));
    assert_eq!(report["pieces"], 10);
    let [a, b] = [&report["features"][0], &report["features"][1]];
    assert_eq!((&a["name"], &a["lookUps"], &a["bytes"]), (&json!("a"), &json!(1_000), &json!(12_000)));
    assert_eq!((&b["lookUps"], &b["bytes"]), (&json!(20), &json!(240)));
    // A piece costs 1200 + 24 + 1200 + 60 bytes.
    assert_is(&a["share"], 1_200.0 / 2_484.0);
    let two = &report["placements"][0];
    assert_is(&two["fieldsModulo"], 2.0 * 2_400.0 / 2_484.0);
    assert_is(&two["fieldsBalanced"], 2.0 * 1_260.0 / 2_484.0);
    assert_is(&two["fieldsAtBest"], 1.0);
    assert_eq!(two["fields"], json!([["a", "d"], ["b", "c"]]));
    let servers: Vec<&Value> = report["placements"].as_array().unwrap().iter().map(|of| &of["servers"]).collect();
    assert_eq!(servers, [2, 3, 5, 8]);
    // Of eight servers, two have the large fields. Slots divide every field.
    let eight = &report["placements"][3];
    assert_is(&eight["fieldsBalanced"], 8.0 * 1_200.0 / 2_484.0);
    for slots in [&eight["slotsEven"], &eight["slotsBalanced"]] {
        assert!(slots.as_f64().unwrap() < 2.0, "{eight}");
    }
}

#[test]
fn a_sample_and_numbers_of_servers_can_be_chosen() {
    let folder = folder();
    let report =
        placed(folder.path(), &["--sample", "150", "--servers", "4", "--set", "spec.training.globalBatchSize=64"]);
    assert_eq!(report["read"], json!({"rows": 150, "isAll": false, "pieceRows": 64}));
    assert_eq!((&report["pieces"], &report["placements"][0]["servers"]), (&json!(3), &json!(4)));
    assert_eq!(report["features"][0]["lookUps"], 150);
    let output = rectrain(folder.path(), &["data", "placement", "job.yaml", "--sample", "150"]);
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(text.starts_with("clicks: look-ups of the first 150 training rows, in 2 pieces"), "{text}");
    assert!(text.contains("every second piece decides the balanced placements"), "{text}");
}

/// A global batch has a piece for each dense worker.
#[test]
fn each_dense_worker_looks_up_a_piece() {
    let folder = folder();
    let report = placed(folder.path(), &["--set", "spec.roles.denseWorker.replicas=4"]);
    assert_eq!((&report["pieces"], &report["read"]["pieceRows"]), (&json!(40), &json!(25)));
    assert_eq!(report["features"][1]["lookUps"], 80, "each piece has both ids");
}

#[test]
fn bad_inputs_are_refused_with_exit_code_2() {
    let folder = folder();
    let refused = |arguments: &[&str], part: &str| {
        let output = rectrain(folder.path(), &[&["data", "placement", "job.yaml"], arguments].concat());
        assert_eq!(output.status.code(), Some(2), "{arguments:?}: {output:?}");
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(said.contains(part) && output.stdout.is_empty(), "{part}: {said}");
    };
    refused(&["--servers", "0"], "--servers");
    refused(&["--servers", "2,many"], "--servers");
    refused(&["--sample", "0"], "--sample");
    refused(&["--set", "spec.data.train.paths={none.csv}"], "there is no file none.csv");
    let kafka = "spec.data.train.paths=null,spec.data.train.kafka.bootstrapServers={127.0.0.1:9},\
                 spec.data.train.kafka.topics={clicks},spec.data.train.kafka.format=json";
    refused(&["--set", kafka], "needs rows that end");
}

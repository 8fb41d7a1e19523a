//! `rectrain plan`: its figures against a computation by hand, and bad inputs.

#![allow(clippy::unwrap_used, reason = "an unwrap in a test is an assertion")]

mod common;

use std::path::Path;

use serde_json::{Value, json};

use common::rectrain;

/// Rows of 4 values with two moments each, and 22 bytes of their own: 4 × 4 × 3 + 22 = 70 bytes.
const JOB: &str = "
apiVersion: rectrain.dev/v1alpha1
kind: RecTrainingJob
metadata: {name: clicks}
spec:
  model: {kind: dnn, embeddingDim: 4, hidden: [8]}
  features: {sparse: [{name: user}, {name: item}]}
  data: {train: {paths: [clicks.csv]}}
  training: {globalBatchSize: 10, epochs: 2}
  checkpoint: {path: ck, keep: 3}
";
const ROW_BYTES: u64 = 70;
const IDS: [&str; 4] = ["--ids", "user=1000000000", "--ids", "item=10000000"];

fn folder() -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("job.yaml"), JOB).unwrap();
    let rows: String = (0..100).map(|row| format!("{},{row},{}\n", row % 2, row % 7)).collect();
    std::fs::write(folder.path().join("clicks.csv"), format!("label,user,item\n{rows}")).unwrap();
    folder
}

fn planned(folder: &Path, arguments: &[&str]) -> Value {
    let output = rectrain(folder, &[&["plan", "job.yaml", "--json"], arguments].concat());
    assert!(output.status.success(), "{output:?}");
    serde_json::from_slice(&output.stdout).unwrap()
}

#[test]
fn the_figures_are_those_of_the_formulas() {
    let folder = folder();
    let mut arguments = IDS.to_vec();
    arguments.extend(["--rows", "720000000", "--samples-per-second", "100000"]);
    arguments.extend(["--worker-samples-per-second", "30000", "--core-hour", "0.03", "--gb-hour", "0.004"]);
    let plan = planned(folder.path(), &arguments);
    let bytes = 1_010_000_000 * ROW_BYTES;
    assert_eq!(plan["tables"][0], json!({"feature": "user", "rows": 1_000_000_000, "rowBytes": ROW_BYTES}));
    assert_eq!((&plan["rows"], &plan["bytes"]), (&json!(1_010_000_000), &json!(bytes)));
    // 70.7 GB in 0.6 of 16 GiB each: 6.86.
    assert_eq!(plan["servers"], 7);
    // Four full checkpoints, and as much for deltas.
    assert_eq!(plan["checkpointBytes"], json!(8 * bytes));
    // 4 dense workers, an embedding worker and a loader: 7 × 2 + 4 × 4 + 2 + 0.5 cores.
    let workers = &plan["workers"];
    assert_eq!((&workers["denseWorkers"], &workers["embeddingWorkers"]), (&json!(4), &json!(1)));
    assert_eq!((&workers["loaders"], &workers["cores"]), (&json!(1), &json!(32.5)));
    let memory = (7_u64 * 16 + 4 * 8 + 2) * (1 << 30) + (512 << 20);
    assert_eq!(workers["memory"], json!(memory));
    // Two epochs of 720 million rows at 100,000 a second are 4 hours.
    assert_eq!(plan["hours"], 4.0);
    let cost = 4.0 * (32.5 * 0.03 + memory as f64 / 1e9 * 0.004);
    assert!((plan["cost"].as_f64().unwrap() - cost).abs() < 1e-9, "{plan}");
}

#[test]
fn a_profile_gives_the_ids_and_the_rows() {
    let folder = folder();
    let profiled = rectrain(folder.path(), &["data", "profile", "job.yaml", "--json", "profile.json"]);
    assert!(profiled.status.success(), "{profiled:?}");
    let plan = planned(folder.path(), &["--profile", "profile.json", "--samples-per-second", "1"]);
    assert_eq!((&plan["tables"][0]["rows"], &plan["tables"][1]["rows"]), (&json!(100), &json!(7)));
    assert_eq!((&plan["servers"], &plan["workers"]), (&json!(1), &Value::Null));
    assert_eq!(plan["hours"].as_f64().unwrap(), 200.0 / 3600.0);
    let plan = planned(folder.path(), &["--profile", "profile.json", "--ids", "item=9"]);
    assert_eq!((&plan["tables"][0]["rows"], &plan["tables"][1]["rows"]), (&json!(100), &json!(9)));
}

#[test]
fn a_budget_and_a_hashed_table_bound_the_rows() {
    let folder = folder();
    let budget = ["--set", "spec.features.memory.maxRows=1010000", "--set", "spec.training.optimizer.sparse.kind=adam"];
    let plan = planned(folder.path(), &[&IDS[..], &budget].concat());
    assert_eq!((&plan["rows"], &plan["isBounded"], &plan["servers"]), (&json!(1_010_000), &json!(true), &json!(1)));
    let buckets = ["--set", "spec.features.sparse[0].hashBuckets=1000"];
    let plan = planned(folder.path(), &[&IDS[..], &buckets].concat());
    assert_eq!((&plan["tables"][0]["rows"], &plan["isBounded"]), (&json!(1_000), &json!(false)));
}

#[test]
fn a_person_reads_of_the_missing_rates() {
    let folder = folder();
    let output = rectrain(folder.path(), &[&["plan", "job.yaml"], &IDS[..]].concat());
    let text = String::from_utf8(output.stdout).unwrap();
    for part in ["1,000,000,000", "70.7 GB", "7 of 17.2 GB", "give --samples-per-second"] {
        assert!(text.contains(part), "{part}: {text}");
    }
}

const LOAD: [&str; 4] = ["--requests-per-second", "10000", "--core-requests-per-second", "100"];

#[test]
fn the_servers_of_a_model_are_those_of_the_formulas() {
    let folder = folder();
    let arguments = [&["plan", "serving", "job.yaml", "--json"], &IDS[..], &LOAD].concat();
    let prices = ["--large-price", "2", "--small-price", "1"];
    let output = rectrain(folder.path(), &[&arguments[..], &prices].concat());
    assert!(output.status.success(), "{output:?}");
    let plan: Value = serde_json::from_slice(&output.stdout).unwrap();
    // 16 bytes and 4 values a row, and 200 candidates of two features.
    let bytes = 1_010_000_000_u64 * 32;
    assert_eq!((&plan["bytes"], &plan["requestIds"]), (&json!(bytes), &json!(400.0)));
    let servers = |place: usize| {
        let of = &plan["deployments"][place];
        (of["large"].as_u64().unwrap(), of["small"].as_u64().unwrap(), of["price"].as_f64().unwrap())
    };
    // A server of 16 cores at half of its load answers 800 requests a second. Two models in memory
    // are 65 GB: .6 of 128 GiB are enough, and .6 of 16 GiB are not.
    assert_eq!(servers(0), (13, 0, 26.0));
    // Two copies of all rows are 5.0 GB in each of 13 servers.
    assert_eq!(servers(1), (0, 13, 13.0));
    // A large machine holds all rows. The second one has the second copy.
    assert_eq!(servers(2), (2, 13, 17.0));
    assert_eq!(plan["deployments"][2]["shards"], json!({"count": 1, "replicas": 2}));
    assert!(plan["deployments"][0]["shards"].is_null());
    // 10,000 requests of 400 rows of a key and 4 values are 96 MB a second. Two machines have 1.25
    // GB each.
    let network = plan["deployments"][2]["network"].as_f64().unwrap();
    assert!((network - 0.096 / 2.5).abs() < 1e-9, "{network}");
    let person = rectrain(folder.path(), &[&["plan", "serving", "job.yaml"], &IDS[..], &LOAD].concat());
    let text = String::from_utf8(person.stdout).unwrap();
    let shards = "spec.shards of a RecModelServer, for the last one: {count: 1, replicas: 2}";
    for part in ["1,010,000,000, 32.3 GB in the memory of servers", "whole", "co-located", "non-co-located", shards] {
        assert!(text.contains(part), "{part}: {text}");
    }
}

#[test]
fn a_request_reads_rows_of_all_features_alike() {
    let folder = folder();
    let arguments = [&["plan", "serving", "job.yaml", "--json"], &IDS[..], &LOAD].concat();
    let wide = ["--set", "spec.features.sparse[0].dim=12", "--changed-rows-per-second", "1000000"];
    let output = rectrain(folder.path(), &[&arguments[..], &wide].concat());
    assert!(output.status.success(), "{output:?}");
    let plan: Value = serde_json::from_slice(&output.stdout).unwrap();
    let of = |user_bytes: f64, item_bytes: f64| 1_000_000_000.0 * user_bytes + 10_000_000.0 * item_bytes;
    assert_eq!(plan["bytes"].as_f64(), Some(of(64.0, 32.0)));
    // 10,000 requests of 200 rows of 56 bytes and 200 of 24. Nearly all rows are the users', and so
    // are the changed ones, which two copies take.
    let read = 10_000.0 * 200.0 * (56.0 + 24.0);
    let changed = 2.0 * 1e6 * of(56.0, 24.0) / 1.01e9;
    let deployment = &plan["deployments"][2];
    assert_eq!(deployment["storage"], 2);
    let network = deployment["network"].as_f64().unwrap();
    assert!((network - (read + changed) / 2.5e9).abs() < 1e-9, "{network}");
}

#[test]
fn bad_inputs_of_a_plan_for_serving_are_refused() {
    let folder = folder();
    let cases: [(&[&str], &str); 5] = [
        (&[], "the number of ids of the feature `user` is not known"),
        (&["--load", "0"], "expected a number above 0, at most 1"),
        (&["--cached", "2"], "expected a number from 0 to 1"),
        (&["--large-price", "2"], "--small-price"),
        (
            &["--ids", "user=5", "--ids", "item=5", "--update-cores", "16"],
            "--update-cores 16: expected less than --cores",
        ),
    ];
    for (arguments, part) in cases {
        let output = rectrain(folder.path(), &[&["plan", "serving", "job.yaml"], &LOAD[..], arguments].concat());
        let message = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{arguments:?}: {message}");
        assert!(message.contains(part) && output.stdout.is_empty(), "{part}: {message}");
    }
    let missing = rectrain(folder.path(), &["plan", "serving", "job.yaml"]);
    assert!(String::from_utf8_lossy(&missing.stderr).contains("--requests-per-second"), "{missing:?}");
}

#[test]
fn bad_inputs_are_refused_with_exit_code_2() {
    let folder = folder();
    std::fs::write(folder.path().join("other.json"), "{\"rows\": 3}").unwrap();
    let cases: [(&[&str], &str); 7] = [
        (&[], "the number of ids of the feature `user` is not known: give `--ids user=10000000`"),
        (&["--ids", "usr=5"], "the job has no sparse feature `usr`: it has user, item"),
        (&["--ids", "user"], "expected FEATURE=IDS"),
        (&["--server-memory", "16Q"], "expected a number of bytes such as 16Gi"),
        (&["--samples-per-second", "0"], "expected a number above 0"),
        (&["--core-hour", "1"], "--gb-hour"),
        (&["--profile", "other.json"], "other.json:1: the profile cannot be read"),
    ];
    for (arguments, part) in cases {
        let output = rectrain(folder.path(), &[&["plan", "job.yaml"], arguments].concat());
        let message = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{arguments:?}: {message}");
        assert!(message.contains(part) && output.stdout.is_empty(), "{part}: {message}");
    }
}

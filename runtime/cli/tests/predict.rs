//! `rectrain predict` repeats the job's own evaluation, from a checkpoint and from an export. The
//! Python module in e2e/python gives the same probabilities. Where its packages cannot be
//! installed, that test says so and is skipped.

#![allow(clippy::unwrap_used, reason = "an unwrap in a test is an assertion")]

mod common;
mod python;
mod trained;

use std::fmt::Write as _;
use std::path::Path;
use std::process::Command;

use serde_json::Value;

use trained::{TEST_ROWS, export, largest_difference, predict, probabilities, report, train};

const MODELS: [&str; 8] = ["dlrm", "deepfm", "dcn", "dcnV2", "wideDeep", "dnn", "fm", "lr"];

fn refusal(folder: &Path, arguments: &[&str]) -> (Option<i32>, String) {
    let output = predict(folder, arguments);
    (output.status.code(), String::from_utf8_lossy(&output.stderr).into_owned())
}

#[test]
fn predictions_repeat_the_evaluation_of_every_model() {
    let python = python::find(&["numpy", "onnxruntime"]);
    for model in MODELS {
        let place = tempfile::tempdir().unwrap();
        let folder = place.path();
        let test = train(folder, model, &[]);
        let input = ["--input", "test.csv", "--id", "id", "--batch-rows", "500"];
        let found = report(folder, &[&["checkpoints", "--output", "a.csv"], &input[..]].concat());
        for metric in ["auc", "logLoss", "normalizedEntropy", "calibration"] {
            assert_eq!(found[metric], test[metric], "{model}: {metric}");
        }
        assert_eq!(found["unseen"], test["unseen"], "{model}");
        assert_eq!((&found["rows"], &found["labelledRows"]), (&TEST_ROWS.into(), &TEST_ROWS.into()));
        assert!(export(folder, "export", "f32").status.success(), "{model}");
        report(folder, &[&["export", "--output", "b.csv"], &input[..]].concat());
        let read = |name| std::fs::read(folder.join(name)).unwrap();
        assert_eq!(read("a.csv"), read("b.csv"), "{model}: checkpoint and export");
        report(folder, &["export", "--input", "test.csv", "--output", "c.csv", "--batch-rows", "7", "--threads", "1"]);
        let (own, small) = (probabilities(folder, "a.csv"), probabilities(folder, "c.csv"));
        assert!(largest_difference(&own, &small) < 1e-6, "{model}: other batches");
        assert!(own.iter().any(|probability| (probability - own[0]).abs() > 1e-3), "{model}: all are equal");
        if let Some(python) = &python {
            let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/predict_check.py");
            let mut check = Command::new(python);
            check.arg(script).args(["export", "test.csv", "d.csv"]).current_dir(folder);
            let output = check.output().unwrap();
            assert!(output.status.success(), "{model}: {}", String::from_utf8_lossy(&output.stderr));
            let difference = largest_difference(&own, &probabilities(folder, "d.csv"));
            assert!(difference < 1e-6, "{model}: Python differs by {difference:e}");
        }
    }
}

#[test]
fn smaller_values_stay_within_the_stated_error() {
    let place = tempfile::tempdir().unwrap();
    let folder = place.path();
    train(folder, "deepfm", &[]);
    report(folder, &["checkpoints", "--input", "test.csv", "--output", "f32.csv"]);
    let exact = probabilities(folder, "f32.csv");
    for (values, bound) in [("f16", 1e-3), ("bf16", 1e-2), ("int8", 2e-2)] {
        assert!(export(folder, values, values).status.success(), "{values}");
        let output = format!("{values}.csv");
        report(folder, &[values, "--input", "test.csv", "--output", &output]);
        let difference = largest_difference(&exact, &probabilities(folder, &output));
        assert!(difference > 0.0 && difference < bound, "{values}: {difference:e}");
        let model: Value =
            serde_json::from_slice(&std::fs::read(folder.join(values).join("model.json")).unwrap()).unwrap();
        assert!(model["rows"][0]["largestError"].as_f64().unwrap() > 0.0, "{values}");
    }
}

#[test]
fn an_export_is_the_same_for_any_number_of_servers() {
    let mut exports = Vec::new();
    for servers in ["1", "3"] {
        let place = tempfile::tempdir().unwrap();
        let folder = place.path();
        train(folder, "wideDeep", &[&format!("spec.roles.ps.replicas={servers}")]);
        assert!(export(folder, "export", "f32").status.success());
        let mut names: Vec<_> =
            std::fs::read_dir(folder.join("export")).unwrap().map(|e| e.unwrap().file_name()).collect();
        names.sort();
        let content: Vec<_> =
            names.iter().map(|name| std::fs::read(folder.join("export").join(name)).unwrap()).collect();
        exports.push((names, content));
    }
    assert!(exports[0].0.len() >= 4 && exports[0] == exports[1]);
}

#[test]
fn columns_in_another_order_and_without_labels_predict_the_same() {
    let place = tempfile::tempdir().unwrap();
    let folder = place.path();
    train(folder, "dnn", &[]);
    report(folder, &["checkpoints", "--input", "test.csv", "--output", "a.csv"]);
    let text = std::fs::read_to_string(folder.join("test.csv")).unwrap();
    let mut turned = String::new();
    for line in text.lines() {
        let mut cells: Vec<&str> = line.split(',').skip(1).collect();
        cells.reverse();
        writeln!(turned, "{}", cells.join(",")).unwrap();
    }
    let (header, rows) = turned.split_once('\n').unwrap();
    let lines: Vec<&str> = rows.lines().collect();
    for (number, lines) in lines.chunks(100).enumerate() {
        std::fs::write(folder.join(format!("part-{number}.csv")), format!("{header}\n{}\n", lines.join("\n"))).unwrap();
    }
    let found = report(folder, &["checkpoints", "--input", "part-*.csv", "--output", "b.csv", "--id", "id"]);
    assert_eq!((&found["labelledRows"], found.get("auc")), (&0.into(), None));
    assert_eq!(probabilities(folder, "a.csv"), probabilities(folder, "b.csv"));
    let ids = std::fs::read_to_string(folder.join("b.csv")).unwrap();
    let ids: Vec<&str> = ids.lines().skip(1).map(|line| line.split(',').next().unwrap()).collect();
    assert!(ids.iter().enumerate().all(|(row, id)| *id == format!("id{row}")), "{ids:?}");
    let standard = predict(folder, &["checkpoints", "--input", "part-*.csv", "--output", "-", "--id", "id"]);
    assert_eq!(standard.stdout, std::fs::read(folder.join("b.csv")).unwrap());
}

#[test]
fn bad_rows_end_the_command_or_are_left_out_and_counted() {
    let place = tempfile::tempdir().unwrap();
    let folder = place.path();
    train(folder, "lr", &[]);
    let text = std::fs::read_to_string(folder.join("test.csv")).unwrap();
    let mut lines: Vec<String> = text.lines().map(str::to_owned).collect();
    lines[10] = lines[10].replacen(',', ",extra,", 1);
    std::fs::write(folder.join("bad.csv"), lines.join("\n")).unwrap();
    let arguments = ["checkpoints", "--input", "bad.csv", "--output", "bad-out.csv", "--id", "id"];
    let (code, message) = refusal(folder, &arguments);
    assert!(code == Some(2) && message.contains("bad.csv, line 11"), "{code:?} {message}");
    assert!(!folder.join("bad-out.csv").exists());
    assert!(std::fs::read_dir(folder).unwrap().all(|e| !e.unwrap().file_name().to_string_lossy().contains("partial")));
    let found = report(folder, &[&arguments[..], &["--bad-rows", "skip"]].concat());
    assert_eq!((&found["rows"], &found["skippedRows"]), (&(TEST_ROWS - 1).into(), &1.into()));
    let written = std::fs::read_to_string(folder.join("bad-out.csv")).unwrap();
    assert!(written.contains("\nid8,") && !written.contains("\nid9,") && written.contains("\nid10,"));
}

#[test]
fn wrong_input_is_refused_with_one_sentence() {
    let place = tempfile::tempdir().unwrap();
    let folder = place.path();
    train(folder, "lr", &[]);
    std::fs::write(folder.join("less.csv"), "label,user,tags,age,balance\n1,u1,t,3,1\n").unwrap();
    for (arguments, part) in [
        (&["checkpoints", "--input", "less.csv", "--output", "o.csv"][..], "less.csv has no column `city`"),
        (&["checkpoints", "--input", "test.csv", "--output", "o.csv", "--id", "none"], "has no column `none`"),
        (&["checkpoints", "--input", "test.csv", "--output", "o.txt"], "ends in .parquet or .csv"),
        (&["checkpoints", "--input", "test.csv", "--output", "o.csv", "--id", "id", "--id", "id"], "--id id"),
        (&["nowhere", "--input", "test.csv", "--output", "o.csv"], "cannot open the folder nowhere (it starts from "),
        (
            &["checkpoints", "--input", "none.csv", "--output", "o.csv"],
            "no file none.csv: check the path (it starts from ",
        ),
    ] {
        let (code, message) = refusal(folder, arguments);
        assert!(code == Some(2) && message.contains(part), "{arguments:?}: {code:?} {message}");
        assert!(!folder.join("o.csv").exists());
    }
    std::fs::create_dir(folder.join("full")).unwrap();
    std::fs::write(folder.join("full/x"), "x").unwrap();
    let output = export(folder, "full", "f32");
    let message = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.code() == Some(2) && message.contains("full is not empty"), "{message}");
    assert_eq!(std::fs::read_dir(folder.join("full")).unwrap().count(), 1);
}

/// Changes a byte in the middle of a file.
fn damage(path: &Path) {
    let mut bytes = std::fs::read(path).unwrap();
    let middle = bytes.len() / 2;
    bytes[middle] ^= 1;
    std::fs::write(path, bytes).unwrap();
}

#[test]
fn a_damaged_model_is_refused_with_the_name_of_its_file() {
    let place = tempfile::tempdir().unwrap();
    let folder = place.path();
    train(folder, "fm", &[]);
    assert!(export(folder, "export", "f32").status.success());
    damage(&folder.join("export/rows-0.bin"));
    let (_, message) = refusal(folder, &["export", "--input", "test.csv", "--output", "o.csv"]);
    assert!(message.contains("rows-0.bin is damaged"), "{message}");
    let steps = std::fs::read_dir(folder.join("checkpoints")).unwrap().map(|entry| entry.unwrap().path());
    let newest = steps.filter(|path| path.is_dir()).max().unwrap();
    let files = std::fs::read_dir(newest).unwrap().map(|entry| entry.unwrap().path());
    let rows: Vec<_> = files.filter(|path| path.file_name().unwrap().to_string_lossy().starts_with("rows-")).collect();
    rows.iter().for_each(|path| damage(path));
    let (_, message) = refusal(folder, &["checkpoints", "--input", "test.csv", "--output", "o.csv"]);
    assert!(message.contains("rows-00000"), "{message}");
    let output = export(folder, "second", "f32");
    assert!(!output.status.success() && !folder.join("second").exists());
}

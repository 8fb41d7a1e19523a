//! Small trained models of generated rows, for the tests of commands that predict. The rows have
//! missing cells, empty lists, and ids that training never had.

use std::path::Path;
use std::process::Output;

use serde_json::Value;

use crate::common::{events, rectrain};

/// All test rows in one local batch: `--batch-rows 500` then repeats the job's bits.
const JOB: &str = "
apiVersion: rectrain.dev/v1alpha1
kind: RecTrainingJob
metadata: {name: test}
spec:
  model: {kind: dnn, embeddingDim: 4, hidden: [8]}
  features:
    sparse:
      - {name: user}
      - {name: city, missing: skip}
      - {name: tags, multiValue: {separator: '|'}, pooling: mean}
    dense:
      - {name: age, transform: log1p, missing: 0.5}
      - {name: balance, transform: standardize, mean: 1.5, std: 2}
  data: {train: {paths: [train.csv]}, test: {paths: [test.csv]}}
  training: {globalBatchSize: 500, epochs: 4}
  checkpoint: {path: checkpoints}
";

pub const TEST_ROWS: u32 = 240;

/// A row, with missing cells, empty lists, and for `first_user` above 60 unseen ids.
fn line(row: u32, first_user: u32) -> String {
    let user = if row.is_multiple_of(17) { String::new() } else { format!("u{}", first_user + row * 7 % 60) };
    let city = ["Bern", "", "New York", "7", "7.0", "null"][(row % 6) as usize];
    let tags = match row % 4 {
        0 => String::new(),
        1 => format!("t{}", row % 9),
        _ => format!("t{}|{}||t{}", row % 9, row % 13, row % 5),
    };
    let age = if row.is_multiple_of(11) { String::new() } else { (row % 70).to_string() };
    format!("{},{user},{city},{tags},{age},{}", u32::from(row * 5 % 7 < 3), f64::from(row % 23) / 4.0 - 2.0)
}

const COLUMNS: &str = "label,user,city,tags,age,balance";

fn write_files(folder: &Path) {
    let train: Vec<String> = (0..2000).map(|row| line(row, 0)).collect();
    let test: Vec<String> = (0..TEST_ROWS).map(|row| format!("{},id{row}", line(row, 30))).collect();
    std::fs::write(folder.join("train.csv"), format!("{COLUMNS}\n{}\n", train.join("\n"))).unwrap();
    std::fs::write(folder.join("test.csv"), format!("{COLUMNS},id\n{}\n", test.join("\n"))).unwrap();
}

/// A manifest of this model. The first-order models have no hidden layers.
fn manifest(model: &str) -> String {
    let settings = match model {
        "dlrm" => "{kind: dlrm, embeddingDim: 4, bottom: [8], hidden: [8]}".to_owned(),
        "fm" => "{kind: fm, embeddingDim: 4}".to_owned(),
        "lr" => "{kind: lr}".to_owned(),
        kind => format!("{{kind: {kind}, embeddingDim: 4, hidden: [8]}}"),
    };
    JOB.replace("{kind: dnn, embeddingDim: 4, hidden: [8]}", &settings)
}

/// Trains a model in the folder, and returns the metrics of its last evaluation.
pub fn train(folder: &Path, model: &str, sets: &[&str]) -> Value {
    write_files(folder);
    std::fs::write(folder.join("job.yaml"), manifest(model)).unwrap();
    let sets = sets.iter().flat_map(|set| ["--set", set]);
    let arguments: Vec<&str> = ["run", "job.yaml", "--json"].into_iter().chain(sets).collect();
    let events = events(&rectrain(folder, &arguments));
    events.iter().rfind(|event| event["event"] == "evaluation").unwrap()["test"].clone()
}

pub fn predict(folder: &Path, arguments: &[&str]) -> Output {
    rectrain(folder, &[&["predict"], arguments].concat())
}

/// The report of a prediction with `--json`.
pub fn report(folder: &Path, arguments: &[&str]) -> Value {
    let output = predict(folder, &[arguments, &["--json"]].concat());
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    serde_json::from_slice(&output.stdout).unwrap()
}

pub fn export(folder: &Path, name: &str, values: &str) -> Output {
    let arguments = ["checkpoint", "export", "checkpoints", "--for", "serving", "--values", values, "--output", name];
    rectrain(folder, &arguments)
}

/// The cells of the last column of a CSV file.
pub fn probabilities(folder: &Path, file: &str) -> Vec<f64> {
    let text = std::fs::read_to_string(folder.join(file)).unwrap();
    text.lines().skip(1).map(|line| line.rsplit(',').next().unwrap().parse().unwrap()).collect()
}

pub fn largest_difference(a: &[f64], b: &[f64]) -> f64 {
    assert_eq!(a.len(), b.len());
    a.iter().zip(b).map(|(a, b)| (a - b).abs()).fold(0.0, f64::max)
}

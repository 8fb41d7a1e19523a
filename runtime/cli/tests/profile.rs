//! `rectrain data profile`: its figures, its files, its warnings, its proposal, and bad inputs.

#![allow(clippy::unwrap_used, reason = "an unwrap in a test is an assertion")]

mod common;

use std::path::Path;
use std::process::Output;

use serde_json::{Value, json};

use common::rectrain;

const JOB: &str = "
apiVersion: rectrain.dev/v1alpha1
kind: RecTrainingJob
metadata: {name: clicks}
spec:
  model: {kind: deepfm, embeddingDim: 4, hidden: [8]}
  features:
    sparse: [{name: user}, {name: item}, {name: tags, multiValue: {separator: '|'}}]
    dense: [{name: price}]
  data:
    train: {paths: [clicks.csv]}
    timeColumn: {name: t}
";

/// A folder with the job and 1,000 rows. Each item is seen twice, a minute apart. Each user is seen
/// ten times, and every tenth row has none.
fn folder() -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    let user = |row: u32| if row % 10 == 3 { String::new() } else { (row % 100).to_string() };
    // No user's and no item's label is always the same.
    let label = |row: u32| u32::from((row + row / 100).is_multiple_of(4));
    let rows: String = (0..1_000)
        .map(|row| format!("{},{},{},a|b,{}.5,{}\n", label(row), user(row), row / 2, row % 7, 60 * row))
        .collect();
    write(folder.path(), "clicks.csv", &format!("label,user,item,tags,price,t\n{rows}"));
    write(folder.path(), "job.yaml", JOB);
    folder
}

fn write(folder: &Path, name: &str, text: &str) {
    std::fs::write(folder.join(name), text).unwrap();
}

fn said(output: &Output) -> String {
    String::from_utf8_lossy(&output.stdout).into_owned() + &String::from_utf8_lossy(&output.stderr)
}

/// The JSON of a profile with these overrides.
fn profiled(folder: &Path, sets: &[&str]) -> Value {
    let mut arguments = vec!["data", "profile", "job.yaml", "--json", "profile.json"];
    sets.iter().for_each(|set| arguments.extend(["--set", set]));
    let output = rectrain(folder, &arguments);
    assert!(output.status.success(), "{output:?}");
    serde_json::from_slice(&std::fs::read(folder.join("profile.json")).unwrap()).unwrap()
}

fn warnings(folder: &Path, sets: &[&str]) -> String {
    profiled(folder, sets)["warnings"].to_string()
}

#[test]
fn the_figures_are_those_of_the_rows() {
    let folder = folder();
    let profile = profiled(folder.path(), &[]);
    let [user, item, tags] = [0, 1, 2].map(|feature| &profile["features"][feature]);
    assert_eq!((&profile["read"]["rows"], &profile["read"]["isAll"]), (&json!(1_000), &json!(true)));
    assert_eq!((&profile["label"]["rate"], &profile["label"]["ones"]), (&json!(0.25), &json!(250)));
    assert_eq!(profile["time"]["spanSeconds"], 999 * 60);
    // The missing id is an id, too.
    assert_eq!((&user["ids"], &user["missingRows"]), (&json!(91), &json!(100)));
    assert_eq!((&item["ids"], &item["seenOnce"], &item["gapSeconds"]), (&json!(500), &json!(0), &json!(60)));
    assert_eq!(item["levels"], json!([{"from": 1, "ids": 0, "lookUps": 0}, {"from": 2, "ids": 500, "lookUps": 1_000}]));
    assert_eq!((&tags["ids"], &tags["lookUps"]), (&json!(2), &json!(2_000)));
    // The top 1 % of 500 items are 5 items of 2 rows each.
    assert!((item["topShare"].as_f64().unwrap() - 0.01).abs() < 1e-9, "{item}");
    // A first-order weight and 4 values, and two moments of Adam for each.
    assert_eq!(item["rowBytes"], json!({"values": 20, "optimizer": 40, "own": 22, "total": 82}));
    assert_eq!((&item["bytes"], &profile["tables"]["rows"]), (&json!(500 * 82), &json!(593)));
    assert_eq!((&profile["dense"][0]["min"], &profile["dense"][0]["max"]), (&json!(0.5), &json!(6.5)));
    assert_eq!((&profile["warnings"], &profile["proposal"]["memory"]), (&json!([]), &Value::Null));
}

#[test]
fn a_profile_is_printed_and_written_as_a_page() {
    let folder = folder();
    let output = rectrain(folder.path(), &["data", "profile", "job.yaml", "--html", "p.html", "--sample", "400"]);
    assert!(output.status.success(), "{output:?}");
    let text = said(&output);
    for part in [
        "clicks: the first 400 of about ",
        "labels of label: 25.0 % positive\n",
        "times of t: from 1970-01-01 00:00:00 UTC to 1970-01-01 06:39:00 UTC, 6 h 39 min\n",
        "all counts are exact",
        "note: no memory is proposed",
    ] {
        assert!(text.contains(part), "{part}: {text}");
    }
    let row = text.lines().find(|line| line.trim_start().starts_with("item")).unwrap();
    let cells: Vec<&str> = row.split_whitespace().collect();
    assert_eq!(cells[1..4], ["200", "0.0", "%"], "{row}");
    let page = std::fs::read_to_string(folder.path().join("p.html")).unwrap();
    assert!(page.contains("<h3>item</h3>") && page.contains("<polyline"), "{page}");
    let left: Vec<_> = std::fs::read_dir(folder.path()).unwrap().map(|file| file.unwrap().file_name()).collect();
    assert_eq!(left.len(), 3, "{left:?}");
}

#[test]
fn columns_that_look_wrong_are_told() {
    let folder = folder();
    let rows: String = (0..1_000).map(|row| format!("{},{},{row}.25\n", row % 2, 7 + row % 2)).collect();
    write(folder.path(), "wrong.csv", &format!("label,leak,price\n{rows}"));
    let ones: String = (0..200).map(|row| format!("1,{row},{row}\n")).collect();
    write(folder.path(), "ones.csv", &format!("label,leak,price\n{ones}"));
    let of = |file: &str, sparse: &str| {
        let sets = [
            "spec.data.timeColumn=null".to_owned(),
            format!("spec.data.train.paths={{{file}}}"),
            "spec.features.sparse=null".to_owned(),
            format!("spec.features.sparse[0].name={sparse}"),
            "spec.features.dense=null".to_owned(),
        ];
        warnings(folder.path(), &sets.each_ref().map(String::as_str))
    };
    let leak = of("wrong.csv", "leak");
    assert!(leak.contains("leak alone tells the label: AUC 1.000"), "{leak}");
    let floats = of("wrong.csv", "price");
    assert!(floats.contains("price: 100.0 % of the ids look like floats, such as 0.25"), "{floats}");
    let ones = of("ones.csv", "leak");
    assert!(ones.contains("the label is 1 in all rows"), "{ones}");
}

/// A job with one feature, so that the proposal is the whole `features` of a manifest.
const QUERIES: &str = "
apiVersion: rectrain.dev/v1alpha1
kind: RecTrainingJob
metadata: {name: queries}
spec:
  model: {kind: deepfm, embeddingDim: 4, hidden: [8]}
  data:
    train: {paths: [queries.csv]}
    timeColumn: {name: t}
";

#[test]
fn the_proposal_is_a_valid_part_of_a_manifest() {
    let folder = tempfile::tempdir().unwrap();
    // 45,000 queries occur once, and 125 occur 120 times, 15,000 seconds apart.
    let query = |row: u32| if row.is_multiple_of(4) { row % 500 } else { 1_000 + row };
    let rows: String = (0..60_000).map(|row| format!("{},{},{}\n", row % 3 % 2, query(row), 30 * row)).collect();
    write(folder.path(), "queries.csv", &format!("label,query,t\n{rows}"));
    write(folder.path(), "job.yaml", &format!("{QUERIES}  features: {{sparse: [{{name: query}}]}}\n"));
    let proposal = profiled(folder.path(), &[])["proposal"].take();
    let query = &proposal["features"][0];
    assert_eq!(query["admission"]["value"], "{probability: 0.03}", "{proposal}");
    assert_eq!(query["expireAfter"]["value"], "5h");
    assert!(proposal["memory"]["value"].as_str().unwrap().ends_with("Mi"), "{proposal}");
    let fragment: String = proposal["yaml"].as_str().unwrap().lines().map(|line| format!("  {line}\n")).collect();
    write(folder.path(), "proposed.yaml", &format!("{QUERIES}{fragment}"));
    let valid = rectrain(folder.path(), &["validate", "proposed.yaml"]);
    assert!(valid.status.success(), "{fragment}\n{}", said(&valid));
}

#[test]
fn bad_inputs_are_refused_with_exit_code_2() {
    let folder = folder();
    write(folder.path(), "empty.csv", "");
    let refused = |arguments: &[&str], part: &str| {
        let output = rectrain(folder.path(), &[&["data", "profile"], arguments].concat());
        assert_eq!(output.status.code(), Some(2), "{arguments:?}: {output:?}");
        assert!(said(&output).contains(part), "{part}: {}", said(&output));
        assert!(output.stdout.is_empty(), "{output:?}");
    };
    refused(&["none.yaml"], "none.yaml: the manifest cannot be read: there is no such file in ");
    let set = |set: &str, part: &str| refused(&["job.yaml", "--set", set], part);
    set("spec.data.train.paths={clikcs.csv}", "there is no file clikcs.csv");
    set("spec.data.train.paths={empty.csv}", "empty.csv is empty");
    set("spec.features.sparse[0].name=usre", "has no column `usre` (spec.features.sparse), did you mean `user`?");
    set("spec.data.timeColumn.name=day", "has no column `day` (spec.data.timeColumn.name)");
    set("spec.features.sparse={}", "spec.features.sparse");
    set("spec.features.label.name=t", "for other values set spec.features.label.positiveFrom");
    let kafka = "spec.data.train.paths=null,spec.data.train.kafka.bootstrapServers={127.0.0.1:9},\
                 spec.data.train.kafka.topics={clicks},spec.data.train.kafka.format=json";
    set(kafka, "a profile needs rows that end");
    refused(&["job.yaml", "--html", "nowhere/p.html"], "name a file in a folder that exists");
    refused(&["job.yaml", "--sample", "0"], "--sample");
}

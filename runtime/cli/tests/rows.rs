//! Rows in other forms than the plain one: the run has the same parameters, or it ends with exit
//! code 2 and one sentence.

#![allow(clippy::unwrap_used, reason = "an unwrap in a test is an assertion")]

mod common;

use std::path::Path;
use std::process::Output;

use common::{events, run_job};

const JOB: &str = "
apiVersion: rectrain.dev/v1alpha1
kind: RecTrainingJob
metadata: {name: test}
spec:
  model: {kind: lr}
  features: {sparse: [{name: user_id}, {name: item_id}]}
  data: {train: {paths: [rows.csv]}}
  training: {globalBatchSize: 8}
";

fn run(folder: &Path, job: &str, sets: &[&str]) -> Output {
    std::fs::write(folder.join("job.yaml"), job).unwrap();
    run_job(folder, sets)
}

/// The summary of a run on these rows.
fn summary(rows: &str, sets: &[&str]) -> serde_json::Value {
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("rows.csv"), rows).unwrap();
    events(&run(folder.path(), JOB, sets)).pop().unwrap()
}

/// The digest of the parameters after a run on these rows.
fn digest(rows: &str, sets: &[&str]) -> String {
    summary(rows, sets)["parametersSha256"].as_str().unwrap().to_owned()
}

/// The message of a run that ends with exit code 2.
fn refusal(rows: &str, sets: &[&str]) -> String {
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("rows.csv"), rows).unwrap();
    let output = run(folder.path(), JOB, sets);
    let message = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(2), "{message}");
    message
}

/// Rows of 40 users and 7 items, each written by `row(label, user, item)`.
fn rows(header: &str, row: impl Fn(u32, u32, u32) -> String) -> String {
    let lines = (0..40).map(|user| row(u32::from(user * 5 % 7 < 3), user, user * 3 % 7) + "\n");
    format!("{header}\n{}", lines.collect::<String>())
}

fn plain() -> String {
    rows("label,user_id,item_id", |label, user, item| format!("{label},{user},{item}"))
}

#[test]
fn labels_beyond_32_bits_are_as_0_and_1() {
    let times = rows("label,user_id,item_id", |label, user, item| {
        format!("{},{user},{item}", 1_699_999_999 + u64::from(label))
    });
    assert_eq!(digest(&times, &["spec.features.label.positiveFrom=1700000000"]), digest(&plain(), &[]));
    assert!(refusal(&times, &[]).contains("expected 0 or 1"));
}

/// A file that pyarrow wrote with checksums of its pages.
const CHECKSUMS: &[u8] = include_bytes!("../../data/tests/files/checksums.parquet");

#[test]
fn a_parquet_page_with_a_wrong_checksum_ends_the_run() {
    let folder = tempfile::tempdir().unwrap();
    let mut flipped = CHECKSUMS.to_vec();
    flipped[3337] ^= 1;
    std::fs::write(folder.path().join("good.parquet"), CHECKSUMS).unwrap();
    std::fs::write(folder.path().join("bad.parquet"), flipped).unwrap();
    events(&run(folder.path(), JOB, &["spec.data.train.paths={good.parquet}"]));
    let output = run(folder.path(), JOB, &["spec.data.train.paths={bad.parquet}", "spec.data.badRows.action=skip"]);
    let message = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(2), "{message}");
    assert!(message.contains("bad.parquet is damaged: row group 0, column `user_id`"), "{message}");
}

/// Every kind of file without rows, beside one with rows.
#[test]
fn files_without_rows_are_skipped_in_every_format() {
    let folder = tempfile::tempdir().unwrap();
    let write = |name: &str, bytes: &[u8]| std::fs::write(folder.path().join(name), bytes).unwrap();
    write("a.parquet", CHECKSUMS);
    write("empty.parquet", b"");
    write("a.csv", plain().as_bytes());
    write("empty.csv", b"");
    write("header.csv", b"label,user_id,item_id\n");
    write("empty.csv.gz", b"");
    write("empty.csv.zst", b"");
    for (alone, among) in [
        ("{a.parquet}", "{empty.parquet,a.parquet}"),
        ("{a.csv}", "{empty.csv,header.csv,a.csv,empty.csv.gz,empty.csv.zst}"),
    ] {
        let digest = |paths: &str| {
            let paths = format!("spec.data.train.paths={paths}");
            events(&run(folder.path(), JOB, &[&paths])).pop().unwrap()["parametersSha256"].clone()
        };
        assert_eq!(digest(alone), digest(among));
    }
    for (paths, sentence) in [("{empty.parquet}", "is empty"), ("{header.csv,empty.csv}", "header.csv has no rows")] {
        let output = run(folder.path(), JOB, &[&format!("spec.data.train.paths={paths}")]);
        let message = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.code() == Some(2) && message.contains(sentence), "{message}");
    }
}

#[test]
fn ids_have_one_row_in_every_form() {
    let header = "label,user_id,item_id";
    let wanted = digest(&plain(), &[]);
    for (form, rows) in [
        ("floats", rows(header, |label, user, item| format!("{label},{user}.0,{item}.00"))),
        ("blanks", rows("label, user_id, item_id", |label, user, item| format!("{label}, {user},\t{item} "))),
        ("both", rows(header, |label, user, item| format!("{label},\" {user}.0\",{item}.0 "))),
        (
            "mixed",
            rows(header, |label, user, item| match user % 2 {
                0 => format!("{label},{user},{item}"),
                _ => format!("{label},{user}.0, {item}"),
            }),
        ),
    ] {
        assert_eq!(digest(&rows, &[]), wanted, "{form}");
    }
    let padded = rows(header, |label, user, item| format!("{label},0{user},{item}"));
    assert_ne!(digest(&padded, &[]), wanted, "a leading zero makes another id");
}

#[test]
fn markers_of_missing_values_are_empty_cells() {
    let with = |marker: &str| {
        rows("label,user_id,item_id", |label, user, item| match user % 4 {
            0 => format!("{label},{user},{marker}"),
            _ => format!("{label},{user},{item}"),
        })
    };
    let wanted = digest(&with(""), &[]);
    let cases: [(&str, &[&str]); 8] = [
        ("NaN", &[]),
        ("NULL", &[]),
        ("null", &[]),
        ("\\N", &[]),
        (" ", &[]),
        ("NULL", &["spec.data.nullValues={NULL,NA}"]),
        ("na", &["spec.data.nullValues={NULL,NA}"]),
        ("\\N", &["spec.data.nullValues={\\\\N}"]),
    ];
    for (marker, sets) in cases {
        assert_eq!(digest(&with(marker), sets), wanted, "{marker:?}");
    }
    assert_ne!(digest(&with("NA"), &[]), wanted, "without a setting it is Namibia");
    assert_ne!(digest(&with("nan"), &["spec.data.nullValues={}"]), wanted);
}

/// Rows of the days from 1 August 2024 on, each written by `day(year, month, day)`.
fn days(day: impl Fn(u32, u32, u32) -> String) -> String {
    let months = [(8, 31), (9, 30), (10, 31), (11, 30)];
    let days = months.into_iter().flat_map(|(month, days)| (1..=days).map(move |day| (month, day)));
    let lines = days.map(|(m, d)| format!("{},{d},{m},{}\n", d % 2, day(2024, m, d)));
    format!("label,user_id,item_id,day\n{}", lines.collect::<String>())
}

#[test]
fn a_split_by_a_date_does_not_depend_on_its_spelling() {
    let by = |test_from: &str, order: &str| {
        vec![
            "spec.data.train=null,spec.data.source.paths={rows.csv},spec.data.split.time.column=day".to_owned(),
            format!("spec.data.split.time.testFrom={test_from}{order}"),
        ]
    };
    let samples = |rows: &str, sets: &[String]| {
        let sets: Vec<&str> = sets.iter().map(String::as_str).collect();
        let summary = summary(rows, &sets);
        (summary["samples"].clone(), summary["parametersSha256"].clone())
    };
    let iso = days(|y, m, d| format!("{y}-{m:02}-{d:02}"));
    let us = days(|y, m, d| format!("{m}/{d}/{y}"));
    let wanted = samples(&iso, &by("2024-11-01", ""));
    assert_eq!(wanted.0, 92);
    assert_eq!(samples(&us, &by("11/1/2024", ",spec.data.split.time.order=monthFirst")), wanted);
    assert_eq!(samples(&days(|y, m, d| format!("{y}-{m}-{d}T00:00:00Z")), &by("2024-11-01", "")), wanted);
    let refused = |rows: &str, test_from: &str| {
        let sets = by(test_from, "");
        refusal(rows, &sets.iter().map(String::as_str).collect::<Vec<_>>())
    };
    assert!(refused(&us, "11/1/2024").contains("set `order: monthFirst` or dayFirst"));
    assert!(refused(&us, "2024-11-01").contains("rows.csv, line 2, column `day`: found \"8/1/2024\""));
}

#[test]
fn lists_of_values_are_read_in_every_spelling() {
    let lists = |separator: &str, quote: &str| {
        rows("label,user_id,item_id", |label, user, item| format!("{label},{user},{quote}{item}{separator}9{quote}"))
    };
    let by = |separator: &str| format!("spec.features.sparse[1].multiValue.separator={separator}");
    let wanted = digest(&lists("|", ""), &[&by("|")]);
    assert_eq!(digest(&lists(",", "\""), &[&by("\\,")]), wanted);
    assert_eq!(digest(&lists("::", ""), &[&by("::")]), wanted);
    let wide = lists("|", "").replace(',', "::");
    assert_eq!(digest(&wide, &[&by("|"), "spec.data.csv.delimiter=::"]), wanted);
    let json = rows("label,user_id,item_id", |label, user, item| format!("{label},{user},\"[{item}, 9]\""));
    assert!(refusal(&json, &[&by("\\,")]).contains("not a list in brackets"));
    let message = refusal(&lists(",", ""), &[&by("\\,")]);
    assert!(message.contains("3 cells (this row has 4)"), "{message}");
}

#[test]
fn a_manifest_may_begin_with_a_byte_order_mark() {
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("rows.csv"), plain()).unwrap();
    events(&run(folder.path(), &format!("\u{feff}{}", JOB.trim_start()), &[]));
}

#[test]
fn words_for_labels_are_as_0_and_1() {
    let words = rows("label,user_id,item_id", |label, user, item| {
        format!("{},{user},{item}", if label == 1 { "click" } else { "skip" })
    });
    let values = "spec.features.label.values.click=1,spec.features.label.values.skip=0";
    assert_eq!(digest(&words, &[values]), digest(&plain(), &[]));
    assert!(refusal(&words, &["spec.features.label.values.click=1"]).contains("expected one of the words"));
}

/// Each batch has ten rows of each of two users as negatives, and the positive ones once more: two
/// of the first user, and six of the second one. The test has each row once, with its label.
#[test]
fn fake_negatives_lower_predictions_unless_labels_are_late() {
    let of = |user: u32, label: u32, count: usize| format!("{label},{user},0\n").repeat(count);
    let batch = [of(0, 0, 10), of(1, 0, 10), of(0, 1, 2), of(1, 1, 6)].concat();
    let test = [of(0, 0, 8), of(0, 1, 2), of(1, 0, 4), of(1, 1, 6)].concat();
    let folder = tempfile::tempdir().unwrap();
    for (file, rows) in [("rows.csv", batch.repeat(50)), ("test.csv", test)] {
        std::fs::write(folder.path().join(file), format!("label,user_id,item_id\n{rows}")).unwrap();
    }
    let settings = "spec.data.test.paths={test.csv},spec.training.globalBatchSize=28,spec.training.epochs=20,\
                    spec.training.optimizer.sparse.learningRate=0.05,spec.training.optimizer.dense.learningRate=0.05";
    let calibration = |sets: &[&str]| {
        let summary = events(&run(folder.path(), JOB, &[&[settings][..], sets].concat())).pop().unwrap();
        summary["test"]["calibration"].as_f64().unwrap()
    };
    let (plain, late) = (calibration(&[]), calibration(&["spec.training.lateLabels=fakeNegativeWeighted"]));
    // Of the users' records 2 in 12 and 6 in 16 are positive, and of their rows 2 and 6 in 10.
    let expected = (10.0 * 2.0 / 12.0 + 10.0 * 6.0 / 16.0) / 8.0;
    assert!((plain - expected).abs() < 0.02, "{plain}, expected {expected}");
    assert!((late - 1.0).abs() < 0.02, "{late}");
}

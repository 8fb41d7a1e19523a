//! Checkpoints of tables with scores: shown with quantiles, and exported without low scores.

#![allow(clippy::unwrap_used, reason = "an unwrap in a test is an assertion")]

mod common;

use std::fmt::Write as _;
use std::path::Path;
use std::process::Output;

use common::{events, rectrain};

const JOB: &str = "
apiVersion: rectrain.dev/v1alpha1
kind: RecTrainingJob
metadata: {name: test}
spec:
  model: {kind: lr}
  features: {sparse: [{name: item}]}
  data: {train: {paths: [rows.csv]}, timeColumn: {name: time}}
  training: {globalBatchSize: 1}
  checkpoint: {path: checkpoints}
";
const BUDGET: [&str; 2] = ["--set", "spec.features.memory.maxRows=5000"];

/// Trains ten items. Item k occurs k + 1 times on day k. Only the last one is clicked.
fn trained(sets: &[&str]) -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    let mut rows = String::from("label,time,item\n");
    for item in 0..10 {
        for _ in 0..=item {
            writeln!(rows, "{},{},{item}", u32::from(item == 9), 1_700_000_000 + item * 86_400).unwrap();
        }
    }
    std::fs::write(folder.path().join("rows.csv"), rows).unwrap();
    std::fs::write(folder.path().join("job.yaml"), JOB).unwrap();
    events(&rectrain(folder.path(), &[&["run", "job.yaml", "--json", "--no-history"], sets].concat()));
    folder
}

fn checkpoint(folder: &Path, words: &[&str]) -> (Output, String) {
    let output = rectrain(folder, &[&["checkpoint"], words].concat());
    let text = [&output.stdout[..], &output.stderr].concat();
    (output, String::from_utf8(text).unwrap())
}

/// Rows in a safetensors file: the shape of its keys.
fn rows_of(file: &Path) -> u64 {
    let bytes = std::fs::read(file).unwrap();
    let length = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    let header: serde_json::Value = serde_json::from_slice(&bytes[8..8 + length]).unwrap();
    header["key"]["shape"][0].as_u64().unwrap()
}

#[test]
fn scores_are_shown_and_low_ones_are_left_out() {
    let folder = trained(&BUDGET);
    let (shown, text) = checkpoint(folder.path(), &["inspect", "checkpoints"]);
    assert!(shown.status.success(), "{text}");
    // Scores are (k + 1) · 0.9⁹⁻ᵏ, and 3 · 10 of the last item. Ages are 9 − k days.
    let line = text.lines().find(|line| line.trim_start().starts_with("item ")).unwrap();
    let cells: Vec<&str> = line.split_whitespace().collect();
    let expected = ["item", "10", "0.9", "3.9", "8.1", "1", "d", "0", "h", "5", "d", "0", "h", "8", "d", "0", "h"];
    assert_eq!(cells, expected, "{text}");
    let export = ["export", "checkpoints", "--output", "all", "--format", "safetensors"];
    let (all, text) = checkpoint(folder.path(), &export);
    assert!(all.status.success() && !text.contains("left out"), "{text}");
    assert_eq!(rows_of(&folder.path().join("all/embeddings-0.safetensors")), 10);
    // 5.1, 6.5, 8.1 and 30 stay.
    let export = ["export", "checkpoints", "--output", "some", "--format", "safetensors", "--min-score", "5"];
    let (some, text) = checkpoint(folder.path(), &export);
    assert!(some.status.success() && text.contains("6 of 10 rows are left out"), "{text}");
    assert_eq!(rows_of(&folder.path().join("some/embeddings-0.safetensors")), 4);
    let export = ["export", "checkpoints", "--output", "served", "--for", "serving", "--min-score", "5"];
    let (served, text) = checkpoint(folder.path(), &export);
    assert!(served.status.success() && text.contains("6 of 10 rows") && text.contains("4 rows as f32"), "{text}");
}

#[test]
fn a_checkpoint_without_scores_is_refused() {
    let lru = [&BUDGET[..], &["--set", "spec.features.eviction.policy=lru"]].concat();
    for sets in [&[][..], &lru[..]] {
        let folder = trained(sets);
        let export = ["export", "checkpoints", "--output", "some", "--min-score", "5"];
        let (refused, text) = checkpoint(folder.path(), &export);
        assert_eq!(refused.status.code(), Some(2), "{text}");
        assert!(text.contains("have no scores") && text.contains("spec.features.memory"), "{text}");
        assert!(!folder.path().join("some").exists(), "nothing is written");
    }
    let folder = tempfile::tempdir().unwrap();
    for score in ["-1", "NaN", "high"] {
        let least = format!("--min-score={score}");
        let (refused, text) = checkpoint(folder.path(), &["export", "nowhere", "--output", "some", &least]);
        assert_eq!(refused.status.code(), Some(2), "{text}");
        assert!(text.contains("at least 0"), "{text}");
    }
}

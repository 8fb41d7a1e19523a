//! Runs the page about own data from its first to its last line, as a reader would.

#![allow(clippy::unwrap_used, reason = "an unwrap in a test is an assertion")]

use std::path::Path;
use std::process::Command;

/// The fences of a page of this kind.
fn fences(page: &str, kind: &str) -> Vec<String> {
    let start = format!("```{kind}\n");
    page.split(&start).skip(1).map(|block| block.split("```").next().unwrap().to_owned()).collect()
}

#[test]
fn the_page_about_own_data_does_as_it_says() {
    let page = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/guide/own-data.md");
    let page = std::fs::read_to_string(page).unwrap();
    let folder = tempfile::tempdir().unwrap();
    let [manifest] = &fences(&page, "yaml")[..] else { panic!("one manifest was expected") };
    std::fs::write(folder.path().join("clicks.yaml"), manifest).unwrap();
    let binary = Path::new(env!("CARGO_BIN_EXE_rectrain"));
    let path = format!("{}:{}", binary.parent().unwrap().display(), std::env::var("PATH").unwrap());
    let script = fences(&page, "sh").concat();
    assert!(script.matches("rectrain ").count() >= 7, "{script}");
    let mut shell = Command::new("bash");
    shell.args(["-euo", "pipefail", "-c", &script]).env("PATH", path).current_dir(folder.path());
    let output = shell.output().unwrap();
    let said = format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{said}");
    assert!(!said.contains("warning:"), "{said}");
    // The page promises a model that beats the mean of the labels.
    let entropies = said.lines().filter(|line| line.trim_start().starts_with("test normalized entropy"));
    let entropies: Vec<f64> = entropies.map(|line| line.split_whitespace().last().unwrap().parse().unwrap()).collect();
    assert!(entropies.len() >= 3 && entropies.iter().all(|entropy| *entropy < 0.98), "{entropies:?}: {said}");
    let predictions = std::fs::read_to_string(folder.path().join("predictions.csv")).unwrap();
    assert_eq!(predictions.lines().count(), 20_001, "{}", predictions.lines().next().unwrap());
    assert!(folder.path().join("serving/model.json").exists());
}

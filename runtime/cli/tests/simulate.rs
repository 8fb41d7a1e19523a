//! Tests `rectrain simulate` as a user sees it: results, files, determinism, mistakes.

#![allow(clippy::unwrap_used, reason = "an unwrap in a test is an assertion")]

mod common;

use std::path::{Path, PathBuf};

use rectrain_crds::Mode;
use serde_json::Value;

use common::rectrain;

fn examples() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/examples")
}

/// The lines that `rectrain simulate --json` prints.
fn lines(folder: &Path, arguments: &[&str]) -> Vec<Value> {
    let output = rectrain(folder, &[&["simulate"], arguments, &["--json"]].concat());
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap().lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

fn rate(lines: &[Value], mode: &str, workers: u64) -> f64 {
    let line = lines.iter().find(|line| line["mode"] == mode && line["workers"] == workers);
    line.unwrap()["globalSamplesPerSecond"].as_f64().unwrap()
}

/// Two of eight workers are four times slower. gba has at least 2.4 times the throughput of sync,
/// at 8, 80 and 800 workers.
#[test]
fn with_a_quarter_stragglers_gba_is_as_fast_as_async() {
    let set = ["straggler.yaml", "--set", "spec.workers={8,80,800},spec.modes={sync,async,gba},spec.seconds=16"];
    let lines = lines(&examples(), &set);
    assert_eq!(lines.len(), 9);
    for workers in [8, 80, 800] {
        let [sync, asynchronous, gba] = ["sync", "async", "gba"].map(|mode| rate(&lines, mode, workers));
        assert!(gba >= 2.4 * sync, "{workers} workers: gba {gba}, sync {sync}");
        assert!(gba >= 0.97 * asynchronous, "{workers} workers: gba {gba}, async {asynchronous}");
    }
}

/// The rows of the guide's table of pulled pieces: rows of a piece, pieces, rounds of four workers
/// and of three, and the simulated share of the speed.
fn table_of_pulled_pieces() -> Vec<[f64; 5]> {
    let guide = std::fs::read_to_string(examples().join("../guide/simulate.md")).unwrap();
    let section = guide.split_once("| `sync.localBatchSize` |").unwrap().1;
    let lines = section.lines().skip(2).take_while(|line| line.starts_with('|'));
    let cells = |line: &str| -> Vec<f64> { line.split('|').filter_map(|cell| cell.trim().parse().ok()).collect() };
    lines.map(|line| cells(line).try_into().unwrap()).collect()
}

/// p pieces take n workers ⌈p/n⌉ rounds, and ⌈p/(n − 1)⌉ if one of them is slow.
#[test]
fn the_guide_has_the_speed_of_pulled_pieces_with_a_slow_worker() {
    let table = table_of_pulled_pieces();
    assert!(table.len() >= 4, "{table:?}");
    for [rows, pieces, healthy_rounds, slow_rounds, share] in table {
        assert_eq!(pieces, 4.0 * 384.0 / rows);
        assert_eq!([healthy_rounds, slow_rounds], [4.0, 3.0].map(|workers| (pieces / workers).ceil()), "{pieces}");
        let rate_of = |stragglers: &str| {
            let set = format!("spec.modes=sync,spec.seconds=60,spec.sync.localBatchSize={rows},{stragglers}");
            rate(&lines(&examples(), &["slow-dense-worker.yaml", "--set", &set]), "sync", 4)
        };
        let always = "spec.stragglers[0].fromSeconds=0,spec.stragglers[0].untilSeconds=61";
        let simulated = rate_of(always) / rate_of("spec.stragglers=null");
        assert!((simulated - share).abs() < 0.01, "{pieces} pieces: {simulated}, not {share}");
        assert!((simulated / (healthy_rounds / slow_rounds) - 1.0).abs() < 0.03, "{pieces} pieces: {simulated}");
    }
}

#[test]
fn each_json_line_starts_with_the_comparable_results_of_a_mode() {
    let output = rectrain(&examples(), &["simulate", "straggler.yaml", "--json"]);
    let text = String::from_utf8(output.stdout).unwrap();
    let modes = Mode::ALL.map(Mode::name);
    assert_eq!(text.lines().count(), modes.len());
    for (line, mode) in text.lines().zip(modes) {
        let mut rest = line;
        let keys = ["globalSamplesPerSecond", "localSamplesPerSecond", "meanStaleness", "droppedBatches"];
        assert!(rest.starts_with(&format!("{{\"mode\":\"{mode}\",\"workers\":8,")), "{line}");
        for key in keys {
            let place = rest.find(&format!("\"{key}\":")).unwrap_or_else(|| panic!("no {key} in {rest}"));
            rest = &rest[place..];
        }
        let value: Value = serde_json::from_str(line).unwrap();
        for key in keys.iter().chain(&["maxStaleness", "idleShare", "trainedSamplesPerSecond", "seed"]) {
            assert!(value[key].is_number(), "{key} in {line}");
        }
        assert_eq!(value["droppedBatches"].as_u64().unwrap() > 0, mode == "hopBw", "{line}");
        assert_eq!(value["meanStaleness"].as_f64().unwrap() == 0.0, ["sync", "hybrid", "des", "hopBw"].contains(&mode));
    }
}

#[test]
fn the_same_seed_gives_the_same_results() {
    let folder = tempfile::tempdir().unwrap();
    let text = "{apiVersion: rectrain.dev/v1alpha1, kind: Simulation, spec: {seconds: 5, stragglers: [\n\
                {heavyTail: {shape: 1.2, probability: 0.1}}, {factor: 3, periodSeconds: 2, slowSeconds: 1},\n\
                {share: 0.5, crashes: {meanSecondsBetween: 3, recoverySeconds: 1}}]}}";
    std::fs::write(folder.path().join("s.yaml"), text).unwrap();
    let first = lines(folder.path(), &["s.yaml"]);
    assert_eq!(first, lines(folder.path(), &["s.yaml"]));
    let other = lines(folder.path(), &["s.yaml", "--set", "spec.seed=7"]);
    for (a, b) in first.iter().zip(&other) {
        assert_ne!(a["globalSamplesPerSecond"], b["globalSamplesPerSecond"], "{a} {b}");
    }
}

#[test]
fn workers_follow_the_times_of_a_trace() {
    let folder = tempfile::tempdir().unwrap();
    std::fs::write(folder.path().join("t.csv"), "worker,seconds\n0,0.01\n1,0.05\n0,0.03\n").unwrap();
    std::fs::write(folder.path().join("t.jsonl"), "{\"worker\":0,\"seconds\":0.02}\n{\"worker\":1,\"seconds\":0.05}\n")
        .unwrap();
    let text = "{apiVersion: rectrain.dev/v1alpha1, kind: Simulation, spec: {workers: 2, modes: async, trace: t.csv,\n\
                localBatchSize: 100, network: {latencySeconds: 0, denseBytes: 0, embeddingBytesPerRow: 0}}}";
    std::fs::write(folder.path().join("s.yaml"), text).unwrap();
    for trace in ["t.csv", "t.jsonl"] {
        let lines = lines(folder.path(), &["s.yaml", "--set", &format!("spec.trace={trace}")]);
        // Worker 0 takes 20 ms a batch on average, worker 1 50 ms.
        let (rate, expected) = (rate(&lines, "async", 2), 100.0 / 0.02 + 100.0 / 0.05);
        assert!((rate / expected - 1.0).abs() < 0.01, "{trace}: {rate}, not {expected}");
    }
}

#[test]
fn the_table_and_the_drawing_show_every_mode() {
    let folder = tempfile::tempdir().unwrap();
    let example = examples().join("straggler.yaml");
    let set = "spec.workers={4,8},spec.seconds=4,spec.stragglers[0].untilSeconds=3";
    let output = rectrain(folder.path(), &["simulate", example.to_str().unwrap(), "--set", set, "--svg", "plot.svg"]);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let text = String::from_utf8(output.stdout).unwrap();
    let table = text.split_once('\n').unwrap().1;
    let svg = std::fs::read_to_string(folder.path().join("plot.svg")).unwrap();
    for mode in Mode::ALL.map(Mode::name) {
        assert_eq!(table.matches(&format!(" {mode} ")).count(), 2, "{mode} in {table}");
        assert_eq!(svg.matches(&format!(">{mode}</text>")).count(), 2, "{mode}");
        assert_eq!(svg.matches(&format!("<title>{mode}</title></polyline>")).count(), 2, "{mode}");
    }
    assert!(svg.starts_with("<svg ") && svg.trim_end().ends_with("</svg>") && !svg.contains("NaN"));
    for tag in ["svg", "g", "text", "polyline", "title"] {
        assert_eq!(
            svg.matches(&format!("<{tag} ")).count() + svg.matches(&format!("<{tag}>")).count(),
            svg.matches(&format!("</{tag}>")).count(),
            "{tag}"
        );
    }
}

#[test]
fn every_example_of_a_simulation_can_be_simulated() {
    let mut simulated = 0;
    for entry in std::fs::read_dir(examples()).unwrap() {
        let path = entry.unwrap().path();
        if path.is_file() && std::fs::read_to_string(&path).unwrap().contains("kind: Simulation") {
            let lines = lines(&examples(), &[path.to_str().unwrap(), "--set", "spec.modes=gba"]);
            assert!(lines[0]["steps"].as_u64().unwrap() > 0, "{}", path.display());
            simulated += 1;
        }
    }
    assert!(simulated >= 2, "{simulated}");
}

#[test]
fn each_mistake_has_a_one_line_message_and_exit_code_2() {
    let head = "apiVersion: rectrain.dev/v1alpha1\nkind: Simulation\nspec:\n";
    let table: &[(&str, &[&str], &[&str])] = &[
        ("  wrokers: 8\n", &[], &["s.yaml:4:3", "spec.wrokers", "did you mean `workers`?"]),
        (
            "  workers: many\n",
            &[],
            &["s.yaml:4:3", "spec.workers[0]", "expected an integer from 1 to 100000", "`many`"],
        ),
        ("  workers: 8\n", &["--set", "spec.workers=0"], &["--set spec.workers=0", "expected an integer from 1"]),
        ("  workers: 8\n", &["--set", "spec.workers"], &["--set spec.workers", "found no `=`"]),
        ("  modes: [gbaa]\n", &[], &["s.yaml:4", "spec.modes[0]", "did you mean `gba`?"]),
        ("  stragglers: [{share: 0.5}]\n", &[], &["s.yaml:4", "spec.stragglers[0]", "no problem"]),
        ("  gba: {localBatchSize: 300}\n", &[], &["s.yaml:4", "spec.gba.localBatchSize", "256 or 512"]),
        ("  hopBw: {backups: 9}\n", &[], &["s.yaml:4", "spec.hopBw.backups", "fewer than"]),
        ("  trace: none.csv\n", &[], &["none.csv", "cannot be read"]),
        ("  trace: bad.csv\n", &[], &["bad.csv: line 3", "`0,fast`"]),
        ("  workers: [8\n", &[], &["s.yaml:", "not valid YAML"]),
        ("  workers: 8\n", &["--svg", "no/such/folder/x.svg"], &["no/such/folder/x.svg", "cannot be written"]),
    ];
    for (spec, arguments, expected) in table {
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join("s.yaml"), format!("{head}{spec}")).unwrap();
        std::fs::write(folder.path().join("bad.csv"), "worker,seconds\n0,1\n0,fast\n").unwrap();
        let output = rectrain(folder.path(), &[&["simulate", "s.yaml"], *arguments].concat());
        let message = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{spec}: {message}");
        for part in *expected {
            assert!(message.contains(part), "{spec}: `{part}` is not in: {message}");
        }
        assert_eq!(message.trim_end().lines().count(), 1, "{spec}: {message}");
    }
    let folder = tempfile::tempdir().unwrap();
    let output = rectrain(folder.path(), &["simulate", "missing.yaml"]);
    assert_eq!(output.status.code(), Some(2));
    assert!(String::from_utf8_lossy(&output.stderr).contains("missing.yaml: the simulation cannot be read"));
}

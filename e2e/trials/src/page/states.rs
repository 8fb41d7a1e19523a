//! The states of a run that the page must show, as histories. They are made, not trained, so that
//! each picture is the same on every machine.

use std::path::Path;

use rectrain_harness::{HarnessError, files};
use serde_json::{Value, json};

/// The states, by name.
pub(super) const STATES: [State; 6] = [
    State { name: "training", until: 0.62, end: End::None, overfits: false },
    State { name: "overfit", until: 1.0, end: End::Complete, overfits: true },
    State { name: "complete", until: 1.0, end: End::Complete, overfits: false },
    State { name: "failed", until: 0.4, end: End::Failed, overfits: false },
    State { name: "interrupted", until: 0.5, end: End::Interrupted, overfits: false },
    State { name: "empty", until: 0.0, end: End::None, overfits: false },
];

/// The steps of a whole run.
const STEPS: u64 = 948;
const EPOCHS: u64 = 30;
/// The rows of a global batch.
const ROWS: u64 = 2048;
/// The seconds of a whole run.
const SECONDS: f64 = 60.0;
/// 2026-11-28 14:05 UTC.
const START: f64 = 1_795_874_700.0;
const MANIFEST: &str = "\
apiVersion: rectrain.dev/v1alpha1
kind: RecTrainingJob
metadata:
  name: criteo
spec:
  model:
    kind: deepfm
  training:
    epochs: 30
    globalBatchSize: 2048
    evaluation:
      every: epoch
";

/// A state of a run.
pub(super) struct State {
    pub(super) name: &'static str,
    /// The part of the run that is over, from 0 to 1.
    until: f64,
    end: End,
    overfits: bool,
}

#[derive(PartialEq)]
enum End {
    /// The process lives.
    None,
    Complete,
    Failed,
    Interrupted,
}

/// The lines of `events.jsonl`.
struct Lines(String, u64);

impl Lines {
    fn push(&mut self, seconds: f64, event: &Value) {
        self.1 += 1;
        let line = json!({ "number": self.1, "at": START + seconds, "event": event });
        self.0.push_str(&format!("{line}\n"));
    }
}

/// Writes the history of a state into a folder.
pub(super) fn write(state: &State, folder: &Path) -> Result<(), HarnessError> {
    files::write(&folder.join("manifest.yaml"), MANIFEST)?;
    files::write(&folder.join("events.jsonl"), lines(state, STEPS).0)
}

/// Writes the history of a complete run with this many reports of progress.
pub(super) fn write_long(reports: u64, folder: &Path) -> Result<(), HarnessError> {
    let long = State { name: "long", until: 1.0, end: End::Complete, overfits: false };
    files::write(&folder.join("manifest.yaml"), MANIFEST)?;
    files::write(&folder.join("events.jsonl"), lines(&long, reports).0)
}

fn lines(state: &State, steps: u64) -> Lines {
    let mut lines = Lines(String::new(), 0);
    lines.push(0.0, &opened());
    if state.until == 0.0 {
        return lines;
    }
    let (job, model) = ("criteo", "deepfm");
    lines.push(
        0.5,
        &json!({ "event": "started", "job": job, "mode": "sync", "model": model, "denseParameters": 213_441 }),
    );
    let last = (steps as f64 * state.until) as u64;
    let mut epoch = 0;
    for step in 1..=last {
        let mut report = progress(step, steps, state.overfits);
        if step == last && state.end == End::Failed {
            report["gradientNorm"] = Value::Null;
        }
        lines.push(seconds_at(step, steps), &report);
        while (epoch + 1) * steps <= step * EPOCHS {
            epoch += 1;
            push_epoch(&mut lines, epoch, step, seconds_at(step, steps), state.overfits);
        }
    }
    push_end(&mut lines, state, last, seconds_at(last, steps) + 1.0);
    lines
}

fn seconds_at(step: u64, steps: u64) -> f64 {
    1.0 + SECONDS * step as f64 / steps as f64
}

fn opened() -> Value {
    json!({
        "event": "opened",
        "job": "criteo",
        "mode": "sync",
        "command": "rectrain run docs/examples/criteo.yaml",
        "version": "0.1.0",
        "process": std::process::id(),
        "plan": {
            "model": "deepfm",
            "globalBatchRows": ROWS,
            "epochs": EPOCHS,
            "denseOptimizer": {"kind": "adam", "learningRate": 0.001},
            "rowOptimizer": {"kind": "adaGrad", "learningRate": 0.05},
            "hasCheckpoints": true,
        },
    })
}

/// A number between -0.5 and 0.5 that looks random.
fn noise(seed: u64) -> f64 {
    let mixed = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(29).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    (mixed >> 40) as f64 / f64::from(1 << 24) - 0.5
}

fn progress(step: u64, steps: u64, overfits: bool) -> Value {
    let part = step as f64 / steps as f64;
    let (loss, auc) = if overfits {
        (0.01 + 0.46 * (-4.0 * part).exp() * (1.0 + 0.06 * noise(step)), (0.66 + 0.5 * part).min(0.998))
    } else {
        (0.44 + 0.12 * (-12.0 * part).exp() + 0.03 * noise(step), 0.79 - 0.12 * (-10.0 * part).exp())
    };
    json!({
        "event": "progress",
        "step": step,
        "totalSteps": steps,
        "samples": step * ROWS,
        "samplesPerSecond": 32_000.0 + 5_000.0 * noise(step + 1),
        "loss": loss,
        "runningAuc": auc + 0.006 * noise(step + 2),
        "gradientNorm": (0.02 + 0.3 * (-20.0 * part).exp()) * (1.0 + noise(step + 3)),
    })
}

/// The metrics after an epoch. A run that overfits is best after the first one.
fn test(epoch: u64, overfits: bool) -> Value {
    let (log_loss, auc) = if overfits {
        let later = (epoch - 1) as f64 / (EPOCHS - 1) as f64;
        (0.446 + 2.0 * later.powf(1.2), 0.7643 - 0.1 * later.powf(0.7))
    } else {
        let left = (-(epoch as f64) / 4.0).exp();
        (0.446 + 0.09 * left, 0.7662 - 0.07 * left)
    };
    json!({
        "auc": auc,
        "gauc": auc - 0.03,
        "logLoss": log_loss,
        "normalizedEntropy": log_loss / 0.56,
        "calibration": 1.0 + 0.1 * (epoch as f64 / 3.0).sin() / epoch as f64,
        "samples": 16_000,
        "unseen": {"C3": 0.031, "C12": 0.02},
    })
}

fn push_epoch(lines: &mut Lines, epoch: u64, step: u64, at: f64, overfits: bool) {
    lines.push(at, &json!({ "event": "evaluation", "step": step, "test": test(epoch, overfits) }));
    if epoch.is_multiple_of(5) {
        let name = format!("step-{step:012}");
        let saved = json!({ "event": "checkpointSaved", "step": step, "checkpoint": name, "rows": 212_345, "bytes": 37_905_642, "seconds": 0.21 });
        lines.push(at, &saved);
    }
    match epoch {
        8 if !overfits => {
            let reason = "worker 1 is 3.1 times slower than the median";
            lines.push(at, &json!({ "event": "modeChosen", "mode": "gba", "reason": reason }));
            lines.push(at, &json!({ "event": "modeSwitched", "step": step, "from": "sync", "to": "gba" }));
        }
        10 => {
            lines.push(at, &json!({ "event": "scaling", "role": "denseWorker", "from": 2, "to": 3 }));
            lines.push(at, &json!({ "event": "scaled", "role": "denseWorker", "from": 2, "to": 3 }));
        }
        11 => {
            let message = "more than half of the test ids of C3 are unseen in training";
            lines.push(at, &json!({ "event": "warning", "message": message }));
        }
        12 if !overfits => {
            lines.push(at, &json!({ "event": "modeSwitched", "step": step, "from": "gba", "to": "hybrid" }));
        }
        _ => {}
    }
}

fn push_end(lines: &mut Lines, state: &State, last: u64, at: f64) {
    if last > 0 {
        lines.push(at, &members(last));
    }
    match state.end {
        End::None => {}
        End::Complete => lines.push(at, &summary(last, state.overfits)),
        End::Failed => {
            let message = "training diverged at step 379: the mean loss of a batch is 8.3e14, and the best was 0.4412: lower spec.training.optimizer.dense.learningRate";
            lines.push(at, &json!({ "event": "failed", "message": message, "userError": false }));
        }
        End::Interrupted => {
            let message =
                "interrupted; checkpoint step-000000000474 was saved: spec.checkpoint.resume=latest resumes from it";
            lines.push(at, &json!({ "event": "interrupted", "message": message }));
        }
    }
}

fn summary(last: u64, overfits: bool) -> Value {
    json!({
        "event": "summary",
        "test": test(EPOCHS, overfits),
        "steps": last,
        "samples": last * ROWS,
        "seconds": SECONDS,
        "samplesPerSecond": (last * ROWS) as f64 / SECONDS,
        "rows": 212_345,
        "storeBytes": 44_000_000,
        "mode": if overfits { "sync" } else { "hybrid" },
        "tokensIssued": if overfits { 0 } else { 300 },
        "meanStaleness": 0.42,
        "maxStaleness": 3,
        "parametersSha256": "9f2c1b7de4a05c3388a1fe0b6f7a9c21d4e5f60718293a4b5c6d7e8f90a1b2c3",
    })
}

fn members(step: u64) -> Value {
    let server = |index: u32| json!({ "role": "ps", "index": index, "slots": 512, "rows": 106_172, "bytes": 22_000_000, "address": format!("tcp://127.0.0.1:4100{index}") });
    let worker = |index: u32| json!({ "role": "dense-worker", "index": index, "computeSeconds": 0.0123, "address": format!("tcp://127.0.0.1:4300{index}") });
    json!({
        "event": "state",
        "state": {
            "members": [
                server(0), server(1),
                {"role": "embedding-worker", "index": 0, "address": "tcp://127.0.0.1:42000"},
                worker(0), worker(1), worker(2),
                {"role": "loader", "index": 0, "address": "tcp://127.0.0.1:44000"},
            ],
            "wanted": {"ps": 2, "embeddingWorker": 1, "denseWorker": 3, "loader": 1},
            "state": {
                "rows": 212_345, "bytes": 44_000_000, "meanStaleness": 0.42,
                "totals": {"loader": step * ROWS, "dense-worker": step * ROWS, "ps": 4_000_000, "embedding-worker": 3_000_000},
            },
            "allReduceSeconds": 0.0093,
        },
    })
}

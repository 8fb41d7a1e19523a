//! Reads the history of a run into the record that its page shows. The inverse of
//! [`crate::history`]. The events stay JSON, so histories of other versions can be read.

use std::fs;
use std::io;
use std::path::Path;

use rectrain_coordinator::{Columns, Point};
use serde_json::{Map, Value, json};

/// The events, one JSON object per line.
pub(crate) const EVENTS: &str = "events.jsonl";
/// The manifest with its overrides.
pub(crate) const MANIFEST: &str = "manifest.yaml";
/// The page of the run.
pub(crate) const PAGE: &str = "page.html";

/// The kind of the first line, which says how the run was started.
pub(crate) const OPENED: &str = "opened";
/// The kind of the line with the members at the end of the run.
pub(crate) const STATE: &str = "state";
/// The kind of the last line of a run that a signal ended.
pub(crate) const INTERRUPTED: &str = "interrupted";
/// The kind of the last line of a run that failed.
pub(crate) const FAILED: &str = "failed";

/// The argument with which a run resumes from its last checkpoint.
const RESUME: &str = "--set spec.checkpoint.resume=latest";

/// Reads the history in a folder.
///
/// # Errors
/// The file of the events cannot be read. A missing manifest is no error.
pub(crate) fn read(folder: &Path) -> io::Result<Value> {
    let events = fs::read_to_string(folder.join(EVENTS))?;
    let manifest = fs::read_to_string(folder.join(MANIFEST)).ok();
    let mut record = Record::default();
    // A killed process may have left half a line.
    for logged in events.lines().filter_map(|line| serde_json::from_str(line).ok()) {
        record.add(logged);
    }
    let title = folder.file_name().map(|name| name.to_string_lossy().into_owned());
    Ok(record.finish(manifest, title.as_deref()))
}

/// A history, as far as it was read.
#[derive(Default)]
struct Record {
    /// The fields of the page's record.
    fields: Map<String, Value>,
    curve: Columns,
    events: Vec<Value>,
    /// The process of the run, unless the run has ended.
    process: Option<u64>,
    has_ended: bool,
}

impl Record {
    fn add(&mut self, logged: Value) {
        let event = &logged["event"];
        self.copy_from(&logged, &[("at", "now")]);
        match event["event"].as_str().unwrap_or_default() {
            OPENED => {
                self.process = event["process"].as_u64();
                self.copy_from(&logged, &[("at", "startedAt")]);
                let same = ["mode", "command", "version", "plan"].map(|field| (field, field));
                self.copy_from(event, &[("job", "name")]);
                self.copy_from(event, &same);
                return;
            }
            STATE => {
                if let Some(state) = event["state"].as_object() {
                    let shown = ["members", "wanted", "state", "epoch", "stepsPerEpoch", "allReduceSeconds", "unseen"];
                    let kept = shown.iter().filter_map(|field| Some(((*field).to_owned(), state.get(*field)?.clone())));
                    self.fields.extend(kept);
                }
                return;
            }
            "progress" => return self.add_progress(&logged),
            "modeSwitched" => self.copy_from(event, &[("to", "mode")]),
            "checkpointSaved" | "resumed" => self.copy_from(event, &[("checkpoint", "lastCheckpoint")]),
            "summary" => {
                self.copy_from(event, &[("steps", "step"), ("samples", "samples"), ("mode", "mode")]);
                self.end("Complete", "");
            }
            FAILED => self.end("Failed", event["message"].as_str().unwrap_or_default()),
            INTERRUPTED => self.end("Interrupted", event["message"].as_str().unwrap_or_default()),
            _ => {}
        }
        self.events.push(logged);
    }

    fn add_progress(&mut self, logged: &Value) {
        let event = &logged["event"];
        let (Some(at), Some(step)) = (logged["at"].as_f64(), event["step"].as_u64()) else { return };
        let samples = event["samples"].as_u64().unwrap_or_default();
        let samples_per_second = event["samplesPerSecond"].as_f64().unwrap_or_default();
        let (loss, auc) = (event["loss"].as_f64(), event["runningAuc"].as_f64());
        let gradient_norm = event["gradientNorm"].as_f64();
        self.curve.push(&Point { at, step, samples, samples_per_second, loss, auc, gradient_norm });
        // A norm of null is not finite, which the page says.
        if let Some(norm) = event.get("gradientNorm") {
            self.set("gradientNorm", norm.clone());
        }
        let same = ["step", "totalSteps", "samples", "samplesPerSecond", "loss"].map(|field| (field, field));
        self.copy_from(event, &same);
    }

    /// Copies fields that are not null, each under its new name.
    fn copy_from(&mut self, from: &Value, names: &[(&str, &str)]) {
        for (name, new_name) in names {
            if !from[*name].is_null() {
                self.fields.insert((*new_name).to_owned(), from[*name].clone());
            }
        }
    }

    fn end(&mut self, phase: &str, message: &str) {
        // The first end counts: a run that failed also ends with a failure of the command.
        if !std::mem::replace(&mut self.has_ended, true) {
            self.set("phase", json!(phase));
            self.set("message", json!(message));
        }
    }

    fn set(&mut self, field: &str, value: Value) {
        self.fields.insert(field.to_owned(), value);
    }

    fn finish(mut self, manifest: Option<String>, title: Option<&str>) -> Value {
        if !self.has_ended {
            if self.process.is_some_and(is_alive) {
                let has_begun = !self.curve.is_empty() || !self.events.is_empty();
                self.set("phase", json!(if has_begun { "Training" } else { "Starting" }));
            } else {
                self.end("Interrupted", "the process ended without a result, for instance because it was killed");
            }
        }
        if self.fields.get("name").is_none_or(Value::is_null) {
            self.set("name", json!(title.unwrap_or("run")));
        }
        if let Some(resume) = self.resume() {
            self.set("resume", json!(resume));
        }
        self.set("title", json!(title));
        self.set("manifest", json!(manifest));
        self.set("curve", json!(self.curve));
        let events = std::mem::take(&mut self.events);
        self.set("events", Value::Array(events));
        Value::Object(self.fields)
    }

    /// The command that continues the run from its last checkpoint.
    fn resume(&self) -> Option<String> {
        self.fields.get("lastCheckpoint")?;
        let command = self.fields.get("command")?.as_str()?;
        Some(if command.contains("spec.checkpoint.resume=latest") {
            command.to_owned()
        } else {
            format!("{command} {RESUME}")
        })
    }
}

/// Whether a process of this number lives on this machine, as far as `/proc` can tell.
fn is_alive(process: u64) -> bool {
    Path::new("/proc").join(process.to_string()).exists()
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "an unwrap in a test is an assertion")]
mod tests {
    use super::*;

    fn record_of(events: &[Value]) -> Value {
        let folder = tempfile::tempdir().unwrap();
        let opened = json!({
            "event": OPENED, "job": "small", "command": "rectrain run a.yaml", "process": u32::MAX,
            "plan": {"epochs": 2}
        });
        let mut text = String::new();
        for (number, event) in [&opened].into_iter().chain(events).enumerate() {
            text.push_str(&format!("{}\n", json!({ "number": number, "at": 100 + number, "event": event })));
        }
        text.push_str("{\"number\": 9, \"at");
        fs::write(folder.path().join(EVENTS), text).unwrap();
        fs::write(folder.path().join(MANIFEST), "kind: RecTrainingJob\n").unwrap();
        read(folder.path()).unwrap()
    }

    #[test]
    fn a_norm_that_is_no_number_is_told_apart_from_none() {
        let progress = json!({"event": "progress", "step": 5, "samples": 50, "loss": 0.5});
        assert_eq!(record_of(std::slice::from_ref(&progress)).get("gradientNorm"), None);
        let with = |step: u64, norm: Value| {
            let mut with = progress.clone();
            (with["step"], with["gradientNorm"]) = (json!(step), norm);
            with
        };
        let record = record_of(&[with(5, json!(1.234_56)), with(6, Value::Null)]);
        assert_eq!(record.get("gradientNorm"), Some(&Value::Null));
        assert_eq!(record["curve"]["gradientNorm"], json!([1.235, null]));
        assert_eq!(record_of(&[with(6, json!(2.5))])["gradientNorm"], json!(2.5));
    }

    #[test]
    fn a_history_without_an_end_was_interrupted() {
        let progress = json!({"event": "progress", "step": 5, "totalSteps": 10, "samples": 50, "loss": 0.5});
        let record = record_of(&[progress]);
        assert_eq!((&record["phase"], &record["name"]), (&json!("Interrupted"), &json!("small")));
        assert_eq!((&record["step"], &record["totalSteps"], &record["now"]), (&json!(5), &json!(10), &json!(101)));
        assert_eq!(record["curve"]["loss"], json!([0.5]));
        assert_eq!((&record["plan"]["epochs"], &record["resume"]), (&json!(2), &Value::Null));
        assert_eq!(record["manifest"], "kind: RecTrainingJob\n");
    }

    #[test]
    fn the_end_of_a_history_is_its_phase() {
        let summary = json!({"event": "summary", "steps": 8, "samples": 80, "mode": "gba"});
        let record = record_of(&[summary]);
        assert_eq!(
            (&record["phase"], &record["step"], &record["mode"]),
            (&json!("Complete"), &json!(8), &json!("gba"))
        );
        let failed = json!({"event": "failed", "message": "diverged"});
        let record = record_of(&[failed, json!({"event": INTERRUPTED, "message": "late"})]);
        assert_eq!((&record["phase"], &record["message"]), (&json!("Failed"), &json!("diverged")));
        assert_eq!(record["events"].as_array().unwrap().len(), 2);
    }

    #[test]
    fn an_interrupted_run_says_how_to_resume() {
        let saved = json!({"event": "checkpointSaved", "checkpoint": "step-5", "step": 5});
        let record = record_of(&[saved, json!({"event": INTERRUPTED, "message": "saved"})]);
        assert_eq!(record["resume"], format!("rectrain run a.yaml {RESUME}"));
        assert_eq!(record["lastCheckpoint"], "step-5");
    }
}

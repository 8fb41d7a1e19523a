//! The JSON that `rectrain --json` prints: one event a line, the summary last.

use std::process::Output;

use serde_json::Value;

use crate::{HarnessError, not_yet};

/// The last line of a run that has succeeded: its summary.
///
/// # Errors
/// [`HarnessError::Failed`] with the run's log; [`HarnessError::NoOutput`]; [`HarnessError::Json`].
pub fn summary(output: &Output) -> Result<Value, HarnessError> {
    if !output.status.success() {
        let log = String::from_utf8_lossy(&output.stderr).into_owned();
        return Err(HarnessError::Failed { command: "the run".to_owned(), status: output.status, output: log });
    }
    let text = String::from_utf8_lossy(&output.stdout);
    let last =
        text.lines().last().ok_or(HarnessError::NoOutput { program: "the run", expected: "a summary as JSON" })?;
    parse("the run's last line", last)
}

/// The final event in the output of a job: `summary` or `failed`.
///
/// # Errors
/// [`HarnessError::NotYet`] while the job runs; [`HarnessError::Json`].
pub fn final_event(lines: &str) -> Result<Value, HarnessError> {
    let mut events =
        lines.lines().rev().filter(|line| line.starts_with('{')).map(|line| parse("an event of the job", line));
    // The log of a pod has records of `tracing` as well, which are no events.
    let is_event = |line: &Result<Value, _>| line.as_ref().map_or(true, |line| line["event"].is_string());
    let last = events.find(is_event).unwrap_or_else(|| Err(not_yet("the job has printed no event")))?;
    match last["event"].as_str() {
        Some("summary" | "failed") => Ok(last),
        _ => Err(not_yet(format!("the job's last event is {last}"))),
    }
}

/// Parses a JSON document; `subject` names it for the error.
///
/// # Errors
/// [`HarnessError::Json`].
pub fn parse(subject: &str, text: &str) -> Result<Value, HarnessError> {
    serde_json::from_str(text).map_err(HarnessError::json(subject, text))
}

/// A whole number in a document; `subject` names the document for the error.
///
/// # Errors
/// [`HarnessError::NoField`].
pub fn integer(subject: &str, document: &Value, field: &str) -> Result<u64, HarnessError> {
    document[field].as_u64().ok_or_else(|| missing(subject, document, field))
}

/// The AUC on the test rows in the summary of `rectrain run`.
///
/// # Errors
/// [`HarnessError::NoField`].
pub fn test_auc(summary: &Value) -> Result<f64, HarnessError> {
    summary["test"]["auc"].as_f64().ok_or_else(|| missing("the summary", summary, "test.auc"))
}

/// A document without an expected field.
#[must_use]
pub fn missing(subject: &str, document: &Value, field: &str) -> HarnessError {
    HarnessError::NoField { document: subject.to_owned(), field: field.to_owned(), found: document.to_string() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_summary_or_a_failure_ends_a_job() {
        assert!(final_event("").is_err());
        assert!(final_event("{\"event\":\"progress\"}\n").is_err());
        let ended =
            final_event("starting\n{\"event\":\"progress\"}\n{\"event\":\"summary\",\"steps\":3}\nlog\n").unwrap();
        assert_eq!(ended["steps"], 3);
        assert_eq!(final_event("{\"event\":\"failed\"}").unwrap()["event"], "failed");
        let logged = final_event("{\"event\":\"summary\"}\n{\"level\":\"INFO\",\"fields\":{}}\n").unwrap();
        assert_eq!(logged["event"], "summary");
        assert!(final_event("{\"event\":\"summ").unwrap_err().to_string().contains("an event of the job"));
    }
}

//! Requests are recorded, and replayed before a server answers.

use std::path::{Path, PathBuf};
use std::time::Duration;

use rectrain_inference::{InferenceError, Limits, RecordOptions, WarmedUp};
use serde_json::{Value, json};

use crate::grpc::{infer, raw_request, request};
use crate::host::{Host, inputs, limits, replay};

const LONG: Duration = Duration::from_secs(3600);

fn write(folder: &Path, lines: &[String]) -> PathBuf {
    let file = folder.join("requests.jsonl");
    std::fs::write(&file, lines.join("\n")).unwrap();
    file
}

fn line(xs: &[f32]) -> String {
    json!({"id": "7", "inputs": inputs(xs)}).to_string()
}

#[tokio::test(flavor = "multi_thread")]
async fn the_requests_of_both_interfaces_are_recorded_and_replayed() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("requests.jsonl");
    let options = RecordOptions { file: file.clone(), every: 1, max_requests: 100, max_bytes: 1 << 20 };
    let mut host = Host::start_as(limits(), |server| {
        server.record(options).unwrap();
        server
    })
    .await;
    // A body of several lines becomes one.
    let pretty = format!("{:#}", json!({"id": "secret", "inputs": inputs(&[1.0, 2.0, 3.0])}));
    let head = "POST /v2/models/clicks/infer HTTP/1.1\r\nHost: test\r\nConnection: close\r\n";
    assert_eq!(host.send(format!("{head}Content-Length: {}\r\n\r\n{pretty}", pretty.len())).await.status, 200);
    // A request that is refused is not recorded.
    assert_eq!(host.infer(&json!({"inputs": []})).await.status, 400);
    infer(&host, request()).await.unwrap();
    infer(&host, raw_request()).await.unwrap();
    host.until_metric("rectrain_inference_recorded_requests_total", 3).await;
    host.end();
    host.ended().await.unwrap();
    let text = std::fs::read_to_string(&file).unwrap();
    assert!(!text.contains("secret"), "{text}");
    let bodies: Vec<Value> = text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert_eq!(bodies[0], json!({"inputs": inputs(&[1.0, 2.0, 3.0])}));
    let tags = json!({"name": "tags", "shape": [2, 2], "datatype": "BYTES", "data": ["a", "b", "", ""]});
    let x = json!({"name": "x", "shape": [2], "datatype": "FP32", "data": [1.0, null]});
    for body in &bodies[1..] {
        assert_eq!((&body["inputs"][1], &body["inputs"][2]), (&tags, &x));
    }
    let (done, batches) = replay(&file, LONG, &limits());
    assert_eq!(done.unwrap(), WarmedUp { requests: 3, rows: 7, was_cut: false });
    assert_eq!(batches, [3, 2, 2]);
}

#[test]
fn a_bad_line_is_named_with_its_file_and_number() {
    let folder = tempfile::tempdir().unwrap();
    let column = line(&[1.0]).replace("\"user\"", "\"usr\"");
    let failing = line(&[-1.0]);
    let long = format!("{{\"id\":\"{}\"}}", "x".repeat(2000));
    let limits = Limits { max_body_bytes: 1000, max_request_rows: 4, ..limits() };
    for (bad, problem) in [
        (column.as_str(), "the model has no column `usr`, did you mean `user`?"),
        ("hello", "the request is no inference request of JSON"),
        (failing.as_str(), "the model failed: "),
        (long.as_str(), "the request is longer than 1000 bytes"),
        (&line(&[0.0; 5]), "column `x` has 5 rows, and a request may have 4"),
    ] {
        // Empty lines count, and are skipped.
        let file = write(folder.path(), &[line(&[1.0, 2.0]), String::new(), bad.to_owned(), line(&[3.0])]);
        let (done, batches) = replay(&file, LONG, &limits);
        let message = done.unwrap_err().to_string();
        let start = format!("{}, line 3: ", file.display());
        assert!(message.starts_with(&start) && message.contains(problem), "{message}");
        assert_eq!(batches[0], 2);
    }
    let (missing, _) = replay(&folder.path().join("none"), LONG, &limits);
    assert!(matches!(missing, Err(InferenceError::File { .. })), "{missing:?}");
}

#[test]
fn a_warm_up_ends_after_its_time() {
    let folder = tempfile::tempdir().unwrap();
    let file = write(folder.path(), &[line(&[1.0]), line(&[2.0])]);
    let (done, batches) = replay(&file, Duration::ZERO, &limits());
    assert_eq!(done.unwrap(), WarmedUp { was_cut: true, ..WarmedUp::default() });
    assert_eq!(batches, [0_usize; 0]);
}

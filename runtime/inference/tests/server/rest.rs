//! The REST interface, and the limits of the server.

use std::time::Duration;

use rectrain_inference::{InferenceError, Limits};
use serde_json::{Value, json};

use crate::host::{Host, Reply, inputs, limits};

/// The probabilities of a response with status 200.
fn probabilities(reply: &Reply) -> Vec<f32> {
    assert_eq!(reply.status, 200, "{}", reply.body);
    let data = reply.json()["outputs"][0]["data"].clone();
    serde_json::from_value(data).unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn health_and_metadata_describe_the_server_and_its_model() {
    let host = Host::start(limits()).await;
    for (path, expected) in [
        ("/v2", json!({"name": "rectrain", "version": env!("CARGO_PKG_VERSION"), "extensions": []})),
        ("/v2/health/live", json!({"live": true})),
        ("/v2/health/ready", json!({"ready": true})),
        ("/v2/models/clicks/ready", json!({"name": "clicks", "ready": true})),
        ("/v2/models/clicks/versions/7/ready", json!({"name": "clicks", "ready": true})),
    ] {
        let reply = host.get(path).await;
        assert_eq!((reply.status, reply.json()), (200, expected), "{path}");
    }
    let metadata = host.get("/v2/models/clicks").await.json();
    let tensor = |name: &str, datatype: &str| json!({"name": name, "datatype": datatype, "shape": [-1]});
    assert_eq!(metadata["inputs"], json!([tensor("user", "BYTES"), tensor("tags", "BYTES"), tensor("x", "FP32")]));
    assert_eq!(metadata["outputs"], json!([tensor("probability", "FP32")]));
    assert_eq!((&metadata["name"], &metadata["versions"]), (&json!("clicks"), &json!(["7"])));
    for path in ["/v2/models/other", "/v2/models/clicks/versions/8", "/v2/models/clicks/versions/8/ready", "/v3"] {
        let reply = host.get(path).await;
        assert_eq!((reply.status, reply.json()["error"].is_string()), (404, true), "{path}");
    }
    let metrics = host.get("/metrics").await.body;
    assert!(metrics.contains("rectrain_inference_model_step 7"), "{metrics}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_request_gets_one_probability_a_row_and_its_id_back() {
    let host = Host::start(limits()).await;
    let reply = host.infer(&json!({"id": "a7", "inputs": inputs(&[1.0, 2.0, 3.0])})).await;
    assert_eq!(probabilities(&reply), [1.25, 2.25, 3.25]);
    let body = reply.json();
    assert_eq!(
        (&body["id"], &body["model_name"], &body["model_version"]),
        (&json!("a7"), &json!("clicks"), &json!("7"))
    );
    assert_eq!(body["outputs"][0]["shape"], json!([3]));
    // The tags of a row count as quarters.
    let tags = json!([
        {"name": "user", "shape": [1], "datatype": "INT64", "data": [5]},
        {"name": "tags", "shape": [2, 2], "datatype": "BYTES", "data": [["a", "b"], [null, ""]]},
        {"name": "x", "shape": [2, 1], "datatype": "FP64", "data": [[1], [null]]},
    ]);
    let reply = host.infer(&json!({"inputs": tags})).await;
    assert_eq!(probabilities(&reply), [1.5, 0.5]);
    assert!(reply.json().get("id").is_none());
    let none = host.infer(&json!({"inputs": inputs(&[])})).await;
    assert_eq!(probabilities(&none), [0.0_f32; 0]);
    assert_eq!(host.metric("rectrain_inference_rows_total").await, 5);
    assert_eq!(host.metric("rectrain_inference_requests_total{code=\"200\"}").await, 3);
    assert_eq!(host.metric("rectrain_inference_ids_total{feature=\"user\"}").await, 5);
    assert_eq!(host.metric("rectrain_inference_unseen_ids_total{feature=\"user\"}").await, 2);
}

#[tokio::test(flavor = "multi_thread")]
async fn bad_requests_get_a_sentence_that_names_column_and_row() {
    let host = Host::start(Limits { max_request_rows: 5, ..limits() }).await;
    let with = |place: usize, tensor: Value| {
        let mut inputs = inputs(&[1.0, 2.0]);
        inputs[place] = tensor;
        json!({ "inputs": inputs })
    };
    let tensor = |name: &str, shape: Value, datatype: &str, data: Value| json!({ "name": name, "shape": shape, "datatype": datatype, "data": data });
    for (request, status, part) in [
        (json!({"inputs": []}), 400, "the request has no column `user`"),
        (with(0, tensor("usr", json!([1]), "INT64", json!([1]))), 400, "no column `usr`, did you mean `user`?"),
        (
            with(2, tensor("x", json!([2]), "FP32", json!([1, "b"]))),
            400,
            "row 2, column `x`: found \"b\", expected a number",
        ),
        (
            with(2, tensor("x", json!([2]), "BYTES", json!(["1", "b"]))),
            400,
            "row 2, column `x`: found \"b\", expected a number",
        ),
        (with(2, tensor("x", json!([1]), "FP32", json!([1e30]))), 400, "row 1, column `x`"),
        (with(2, tensor("x", json!([1]), "UINT8", json!([1]))), 400, "column `x` has the datatype `UINT8`"),
        (
            with(1, tensor("tags", json!([3]), "BYTES", json!(["a", "b", "c"]))),
            400,
            "column `tags` has 3 rows, and column `x` has 2",
        ),
        (with(0, tensor("user", json!([2]), "FP64", json!([1, 0.5]))), 400, "row 2, column `user`: found \"0.5\""),
        (with(0, tensor("user", json!([1, 2]), "INT64", json!([1, 2]))), 400, "column `user` has 2 values a row"),
        (with(2, tensor("x", json!([6]), "FP32", json!([1, 2, 3, 4, 5, 6]))), 413, "a request may have 5"),
        (json!({}), 400, "missing field `inputs`"),
    ] {
        let reply = host.infer(&request).await;
        let message = reply.json()["error"].as_str().unwrap().to_owned();
        assert!(reply.status == status && message.contains(part), "{request}: {} {message}", reply.status);
    }
    let header = host.infer_with("x-request-timeout-ms: soon\r\n", &json!({"inputs": inputs(&[1.0])})).await;
    assert_eq!(header.status, 400, "{}", header.body);
    assert_eq!(host.metric("rectrain_inference_rows_total").await, 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn large_bodies_are_refused_with_and_without_their_length() {
    let host = Host::start(Limits { max_body_bytes: 100, ..limits() }).await;
    let path = "POST /v2/models/clicks/infer HTTP/1.1\r\nHost: test\r\nConnection: close\r\n";
    let declared = host.send(format!("{path}Content-Length: 101\r\n\r\n")).await;
    assert_eq!(declared.status, 413, "{}", declared.body);
    let chunk = "x".repeat(60);
    let chunks = format!("3c\r\n{chunk}\r\n3c\r\n{chunk}\r\n0\r\n\r\n");
    let chunked = host.send(format!("{path}Transfer-Encoding: chunked\r\n\r\n{chunks}")).await;
    assert_eq!(chunked.status, 413, "{}", chunked.body);
}

#[tokio::test(flavor = "multi_thread")]
async fn rows_beyond_the_queue_are_shed_with_a_hint_to_retry() {
    let host = Host::start(Limits { max_queued_rows: 4, ..limits() }).await;
    host.model.block();
    let computing = host.spawn_infer(&[1.0, 2.0]);
    host.model.until_entered(1).await;
    let waiting = host.spawn_infer(&[3.0, 4.0, 5.0]);
    host.until_metric("rectrain_inference_queued_rows", 3).await;
    let shed = host.infer(&json!({"inputs": inputs(&[6.0, 7.0])})).await;
    assert_eq!(shed.status, 429, "{}", shed.body);
    assert!(shed.head.to_lowercase().contains("retry-after: 1"), "{}", shed.head);
    assert_eq!(shed.json()["error"], "the server is overloaded: 3 rows wait; repeat the request later");
    assert_eq!(host.metric("rectrain_inference_shed_requests_total{reason=\"rows\"}").await, 1);
    host.model.release();
    assert_eq!(probabilities(&computing.await.unwrap()), [1.25, 2.25]);
    assert_eq!(probabilities(&waiting.await.unwrap()), [3.25, 4.25, 5.25]);
    assert_eq!(host.model.batches(), [2, 3]);
}

#[tokio::test(flavor = "multi_thread")]
async fn requests_beyond_the_bound_are_shed_before_their_bodies() {
    let host = Host::start(Limits { max_requests: 1, ..limits() }).await;
    host.model.block();
    let computing = host.spawn_infer(&[1.0]);
    host.model.until_entered(1).await;
    let path = "POST /v2/models/clicks/infer HTTP/1.1\r\nHost: test\r\nConnection: close\r\n";
    let shed = host.send(format!("{path}Content-Length: 50\r\n\r\n")).await;
    assert_eq!(shed.status, 429, "{}", shed.body);
    assert_eq!(host.metric("rectrain_inference_shed_requests_total{reason=\"requests\"}").await, 1);
    host.model.release();
    assert_eq!(probabilities(&computing.await.unwrap()), [1.25]);
    assert_eq!(host.infer(&json!({"inputs": inputs(&[2.0])})).await.status, 200);
}

#[tokio::test(flavor = "multi_thread")]
async fn waiting_requests_share_a_batch_and_get_their_own_rows() {
    let host = Host::start(limits()).await;
    host.model.block();
    let first = host.spawn_infer(&[9.0]);
    host.model.until_entered(1).await;
    let mut waiting = Vec::new();
    for n in 1..=3_u16 {
        waiting.push(host.spawn_infer(&[f32::from(n), f32::from(n) * 10.0]));
        host.until_metric("rectrain_inference_queued_rows", 2 * u64::from(n)).await;
    }
    host.model.release();
    assert_eq!(probabilities(&first.await.unwrap()), [9.25]);
    for (n, reply) in (1..=3_u16).zip(waiting) {
        assert_eq!(probabilities(&reply.await.unwrap()), [f32::from(n) + 0.25, f32::from(n) * 10.0 + 0.25]);
    }
    assert_eq!(host.model.batches(), [1, 6]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_request_that_fails_does_not_spoil_its_batch() {
    let host = Host::start(limits()).await;
    host.model.block();
    let first = host.spawn_infer(&[9.0]);
    host.model.until_entered(1).await;
    // The model fails on negative inputs.
    let bad = host.spawn_infer(&[-1.0]);
    host.until_metric("rectrain_inference_queued_rows", 1).await;
    let good = host.spawn_infer(&[2.0, 3.0]);
    host.until_metric("rectrain_inference_queued_rows", 3).await;
    host.model.release();
    assert_eq!(probabilities(&first.await.unwrap()), [9.25]);
    let bad = bad.await.unwrap();
    assert!(bad.status == 500 && bad.body.contains("the model failed"), "{} {}", bad.status, bad.body);
    assert_eq!(probabilities(&good.await.unwrap()), [2.25, 3.25]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_late_request_is_answered_so_and_never_predicted() {
    let host = Host::start(limits()).await;
    host.model.block();
    let computing = host.spawn_infer(&[1.0]);
    host.model.until_entered(1).await;
    // The model is blocked, so no time is enough.
    let late = host.infer_with("x-request-timeout-ms: 1\r\n", &json!({"inputs": inputs(&[2.0, 3.0])})).await;
    assert_eq!(late.status, 504, "{}", late.body);
    assert_eq!(late.json()["error"], "the request was not answered within its time limit of 1 ms");
    host.model.release();
    assert_eq!(probabilities(&computing.await.unwrap()), [1.25]);
    assert_eq!(host.infer(&json!({"inputs": inputs(&[4.0])})).await.status, 200);
    assert_eq!(host.model.batches(), [1, 1]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_client_that_goes_away_takes_its_request_back() {
    let host = Host::start(limits()).await;
    host.model.block();
    let computing = host.spawn_infer(&[1.0]);
    host.model.until_entered(1).await;
    let connection = host.open_infer(&json!({"inputs": inputs(&[2.0, 3.0])})).await;
    host.until_metric("rectrain_inference_queued_rows", 2).await;
    drop(connection);
    host.until_metric("rectrain_inference_cancelled_requests_total", 1).await;
    host.model.release();
    assert_eq!(probabilities(&computing.await.unwrap()), [1.25]);
    assert_eq!(host.infer(&json!({"inputs": inputs(&[4.0])})).await.status, 200);
    assert_eq!(host.model.batches(), [1, 1]);
    host.until_metric("rectrain_inference_abandoned_requests_total", 1).await;
    assert_eq!(host.metric("rectrain_inference_requests_in_progress").await, 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_draining_server_is_not_ready_and_still_answers() {
    let mut host = Host::start(Limits { drain: Duration::from_secs(3600), ..limits() }).await;
    host.end();
    host.until_status("/v2/health/ready", 503).await;
    assert_eq!(host.get("/v2/models/clicks/ready").await.status, 503);
    assert_eq!(host.get("/v2/health/live").await.status, 200);
    assert_eq!(probabilities(&host.infer(&json!({"inputs": inputs(&[1.0])})).await), [1.25]);
}

#[tokio::test(flavor = "multi_thread")]
async fn the_end_waits_for_the_requests_in_progress() {
    let mut host = Host::start(limits()).await;
    host.model.block();
    let computing = host.spawn_infer(&[1.0]);
    host.model.until_entered(1).await;
    let waiting = host.spawn_infer(&[2.0, 3.0]);
    host.until_metric("rectrain_inference_queued_rows", 2).await;
    host.end();
    host.until_refused().await;
    host.model.release();
    assert_eq!(probabilities(&computing.await.unwrap()), [1.25]);
    assert_eq!(probabilities(&waiting.await.unwrap()), [2.25, 3.25]);
    assert!(matches!(host.ended().await, Ok(())));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_model_that_panics_ends_the_server_with_an_error() {
    let host = Host::start(limits()).await;
    host.model.block();
    let computing = host.spawn_infer(&[1.0]);
    host.model.until_entered(1).await;
    host.model.panic();
    // The server may end before it has sent the response.
    if let Ok(reply) = computing.await {
        assert_eq!(reply.status, 503, "{}", reply.body);
    }
    assert!(matches!(host.ended().await, Err(InferenceError::ModelEnded)));
}

//! The operator's knowledge about nodes, by the answers of the API server.

use std::sync::Arc;

use http::{Request, Response};
use kube::Client;
use kube::client::Body;
use parking_lot::Mutex;
use rectrain_operator::nodes::{ClusterNodes, NodeLoad, ReadNodes};
use rectrain_operator::pods::PodFacts;
use rectrain_operator::reconcile::lost_pods;
use serde_json::{Value, json};

const NODE: &str = "/api/v1/nodes/x";
const NODE_METRICS: &str = "/apis/metrics.k8s.io/v1beta1/nodes/x";
const POD_METRICS: &str = "/apis/metrics.k8s.io/v1beta1/namespaces/default/pods";

/// Nodes of an API server with these answers, and the requested paths.
fn nodes(answer: fn(&str) -> (u16, String)) -> (ClusterNodes, Arc<Mutex<Vec<String>>>) {
    let asked: Arc<Mutex<Vec<String>>> = Arc::default();
    let log = Arc::clone(&asked);
    let service = tower::service_fn(move |request: Request<Body>| {
        let path = request.uri().path().to_owned();
        let (status, body) = answer(&path);
        log.lock().push(request.uri().to_string());
        async move { Ok::<_, kube::Error>(Response::builder().status(status).body(Body::from(body.into_bytes())).unwrap()) }
    });
    (ClusterNodes::new(Client::new(service, "default")), asked)
}

fn node() -> Value {
    let conditions = json!([{"type": "Ready", "status": "True"}, {"type": "MemoryPressure", "status": "True"}]);
    json!({"metadata": {"name": "x"}, "status": {"allocatable": {"cpu": "4"}, "conditions": conditions}})
}

fn metrics(name: &str, more: &Value) -> Value {
    let mut metrics = json!({"metadata": {"name": name}, "timestamp": "2026-01-01T00:00:00Z", "window": "15s"});
    metrics.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    metrics
}

fn status(code: u16, reason: &str) -> (u16, String) {
    let status = json!({"kind": "Status", "apiVersion": "v1", "status": "Failure", "code": code, "reason": reason, "message": reason});
    (code, status.to_string())
}

/// Answers about one node and one pod.
fn measured(path: &str) -> (u16, String) {
    match path {
        NODE => (200, node().to_string()),
        NODE_METRICS => (200, metrics("x", &json!({"usage": {"cpu": "2500000000n", "memory": "1Gi"}})).to_string()),
        POD_METRICS => {
            let containers = json!({"containers": [{"name": "rectrain", "usage": {"cpu": "1250m"}}]});
            (200, json!({"metadata": {}, "items": [metrics("job-ps-0", &containers)]}).to_string())
        }
        path => panic!("{path}"),
    }
}

/// The paths of all requests about a node.
pub async fn asked_of_a_node() -> Vec<String> {
    let (nodes, asked) = nodes(measured);
    assert!(nodes.node("x").await.is_some());
    assert!(!nodes.used_by_pods("default", "job").await.is_empty());
    let asked = asked.lock();
    asked.iter().map(|uri| uri.split('?').next().unwrap().to_owned()).collect()
}

/// The requests about an overdue pod on a node that is not ready.
pub async fn asked_when_a_node_is_lost() -> Vec<String> {
    let asked: Arc<Mutex<Vec<String>>> = Arc::default();
    let log = Arc::clone(&asked);
    let service = tower::service_fn(move |request: Request<Body>| {
        let path = request.uri().path().to_owned();
        let (status, body) = match path.as_str() {
            NODE => (
                200,
                json!({"metadata": {"name": "x"}, "status": {"conditions": [{"type": "Ready", "status": "Unknown"}]}}),
            ),
            path if path.contains("/pods/") => (200, json!({"metadata": {"name": "j-ps-0"}})),
            _ => (404, json!({"kind": "Status", "code": 404, "reason": "", "message": "", "status": "Failure"})),
        };
        if status == 200 {
            log.lock().push(format!("{} {path}", request.method()));
        }
        let body = Body::from(body.to_string().into_bytes());
        async move { Ok::<_, kube::Error>(Response::builder().status(status).body(body).unwrap()) }
    });
    let client = Client::new(service, "default");
    let labels = json!({"rectrain.dev/role": "ps", "rectrain.dev/attempt": "1"});
    let pod = json!({
        "metadata": {"name": "j-ps-0", "uid": "u", "labels": labels, "deletionTimestamp": "2026-01-01T00:00:30Z"},
        "spec": {"nodeName": "x", "containers": []},
    });
    let pods = [PodFacts::of(&serde_json::from_value(pod).unwrap()).unwrap()];
    for (now, expected) in [("2026-01-01T00:00:35Z", 0), ("2026-01-01T00:01:00Z", 1)] {
        let nodes = ClusterNodes::new(client.clone());
        let deleted = lost_pods::delete(&client, &nodes, "default", &pods, now.parse().unwrap()).await.unwrap();
        assert_eq!(deleted, expected, "at {now}");
    }
    let asked = asked.lock();
    asked.clone()
}

#[tokio::test]
async fn pressure_and_use_are_read_once_in_a_while() {
    let (nodes, asked) = nodes(measured);
    for _ in 0..2 {
        let load = NodeLoad { is_lost: false, is_under_pressure: true, cores: Some(4.0), used_cores: Some(2.5) };
        assert_eq!(nodes.node("x").await, Some(load));
        assert_eq!(nodes.used_by_pods("default", "job").await, [("job-ps-0".to_owned(), 1.25)].into());
    }
    let asked = asked.lock();
    assert_eq!(asked.len(), 3, "{asked:?}");
    assert!(asked[2].contains("labelSelector=rectrain.dev%2Fjob%3Djob"), "{asked:?}");
}

#[tokio::test]
async fn a_missing_metrics_api_is_not_asked_again() {
    let (nodes, asked) = nodes(|path| match path {
        path if path.starts_with("/api/v1/nodes/") => (200, node().to_string()),
        // The API server's answer about an API that is not registered.
        _ => (404, "404 page not found\n".to_owned()),
    });
    let load = NodeLoad { is_lost: false, is_under_pressure: true, cores: Some(4.0), used_cores: None };
    assert_eq!((nodes.node("x").await, nodes.node("y").await), (Some(load), Some(load)));
    assert!(nodes.used_by_pods("default", "job").await.is_empty());
    let asked = asked.lock();
    let of_metrics = asked.iter().filter(|path| path.contains("metrics.k8s.io")).count();
    assert_eq!(of_metrics, 1, "{asked:?}");
}

#[tokio::test]
async fn a_new_node_without_measurements_does_not_disable_them() {
    let (nodes, asked) = nodes(|path| match path {
        NODE => (200, node().to_string()),
        POD_METRICS => (200, json!({"metadata": {}, "items": []}).to_string()),
        _ => status(404, "NotFound"),
    });
    assert_eq!(nodes.node("x").await.unwrap().used_cores, None);
    assert!(nodes.used_by_pods("default", "job").await.is_empty());
    assert_eq!(asked.lock().len(), 3, "measurements of pods are requested, too");
}

#[tokio::test]
async fn without_the_right_to_read_nodes_nothing_is_known() {
    let (nodes, _) = nodes(|_| status(403, "Forbidden"));
    assert_eq!(nodes.node("x").await, None);
    assert!(nodes.used_by_pods("default", "job").await.is_empty());
}

//! Manifests of jobs, and parts of them, as JSON.

use serde_json::{Value, json};

/// A small job over synthetic rows; `changes` are merged into its spec.
#[must_use]
pub fn manifest(name: &str, changes: &Value) -> Value {
    let mut job = json!({
        "apiVersion": "rectrain.dev/v1alpha1",
        "kind": "RecTrainingJob",
        "metadata": {"name": name},
        "spec": {
            "model": {"kind": "deepfm", "hidden": [32]},
            "features": {"sparse": [{"name": "C{1..6}"}], "dense": [{"name": "I{1..4}"}]},
            "data": {"synthetic": {"rows": 20_000, "testRows": 2_000}},
            "training": {"mode": "sync", "globalBatchSize": 500},
            "roles": {"ps": {"replicas": 2}, "embeddingWorker": {"replicas": 2}, "denseWorker": {"replicas": 2}},
            "faultTolerance": {"backoffSeconds": 1},
        },
    });
    merge(&mut job["spec"], changes);
    job
}

/// Merges `over` into `base` as a JSON merge patch (RFC 7386): null removes a field.
pub fn merge(base: &mut Value, over: &Value) {
    match (base, over) {
        (Value::Object(base), Value::Object(over)) => {
            for (field, value) in over {
                if value.is_null() {
                    base.remove(field);
                } else {
                    merge(base.entry(field.clone()).or_insert(Value::Null), value);
                }
            }
        }
        (base, over) => *base = over.clone(),
    }
}

/// `base` with `over` merged into it.
#[must_use]
pub fn merged(mut base: Value, over: Value) -> Value {
    merge(&mut base, &over);
    base
}

/// Changes that make a job outlast every trial: one replica of each role, and rows for days.
#[must_use]
pub fn endless() -> Value {
    json!({
        "data": {"synthetic": {"rows": 1_000_000_000, "testRows": 1_000}},
        "roles": {"ps": {"replicas": 1}, "embeddingWorker": {"replicas": 1}, "denseWorker": {"replicas": 1}},
    })
}

/// `job` with checkpoints in the object store, one every `every` global steps.
#[must_use]
pub fn with_checkpoints(job: &Value, name: &str, every: u64) -> Value {
    merged(
        job.clone(),
        json!({
            "data": {"storage": {"secretName": "object-store"}},
            "checkpoint": {"path": format!("s3://data/checkpoints/{name}"), "everySteps": every},
        }),
    )
}

/// A role with one replica, whose container has these limits.
#[must_use]
pub fn with_limits(limits: &Value) -> Value {
    several_with_limits(1, limits)
}

/// A role with this many replicas, whose containers have these limits.
#[must_use]
pub fn several_with_limits(replicas: u32, limits: &Value) -> Value {
    json!({"replicas": replicas, "template": {"resources": {"limits": limits}}})
}

/// A pod template that no node accepts.
#[must_use]
pub fn without_a_node() -> Value {
    json!({"nodeSelector": {"rectrain.dev/no-such-node": "true"}})
}

/// A Kubernetes list of objects.
#[must_use]
pub fn list(items: Vec<Value>) -> Value {
    json!({"apiVersion": "v1", "kind": "List", "items": items})
}

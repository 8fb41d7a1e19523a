//! Server-side apply of what differs, with one field owner. An object that stands as it was applied is left alone: it carries the
//! digest of what was applied, and still says all of it.

use std::collections::HashMap;
use std::sync::{Mutex, PoisonError};

use kube::api::{Api, DynamicObject, Patch, PatchParams};
use kube::{Client, ResourceExt};
use serde_json::Value;

use crate::names::{APPLIED_ANNOTATION, FIELD_MANAGER};
use crate::reconcile::ReconcileError;
use crate::reconcile::kinds::{Owned, Wanted};
use crate::reconcile::validate::digest;

/// What the API server made of objects that it stores in other words than they were applied in (`1000m` becomes `1`): by uid, the
/// digest of what was wanted and of what is stored. Only saves calls; an empty one is right. Entries go with their objects.
#[derive(Debug, Default)]
pub struct Settled(Mutex<HashMap<String, (String, String)>>);

impl Settled {
    fn is(&self, wanted: &Wanted, owned: &Owned) -> bool {
        let settled = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        settled.get(&owned.uid).is_some_and(|(hash, stored)| hash == wanted.hash() && *stored == content(&owned.body))
    }

    fn note(&self, wanted: &Wanted, stored: &DynamicObject) {
        if let (Some(uid), Ok(body)) = (stored.uid(), serde_json::to_value(stored)) {
            if says(&body, &wanted.body) {
                return;
            }
            let mut settled = self.0.lock().unwrap_or_else(PoisonError::into_inner);
            settled.insert(uid, (wanted.hash().to_owned(), content(&body)));
        }
    }

    /// Forgets an object that was deleted.
    pub fn forget(&self, uid: &str) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).remove(uid);
    }

    /// Forgets all objects but these, when there are far too many.
    pub fn trim(&self, most: usize) {
        let mut settled = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if settled.len() > most {
            settled.clear();
        }
    }
}

/// Digest of what an object says, without what changes by itself.
fn content(body: &Value) -> String {
    let mut body = body.clone();
    if let Some(object) = body.as_object_mut() {
        object.remove("status");
        if let Some(metadata) = object.get_mut("metadata").and_then(Value::as_object_mut) {
            for volatile in ["resourceVersion", "managedFields", "generation"] {
                metadata.remove(volatile);
            }
        }
    }
    digest(&body)
}

/// Whether the object stands as it is wanted.
#[must_use]
pub fn is_in_order(wanted: &Wanted, owned: &Owned, settled: &Settled) -> bool {
    let applied = owned.body["metadata"]["annotations"][APPLIED_ANNOTATION].as_str();
    applied == Some(wanted.hash()) && (says(&owned.body, &wanted.body) || settled.is(wanted, owned))
}

/// Whether `stored` says everything that `wanted` says; it may say more (what the API server fills in).
#[must_use]
pub fn says(stored: &Value, wanted: &Value) -> bool {
    match (stored, wanted) {
        (_, Value::Null) => true,
        (Value::Object(stored), Value::Object(wanted)) => wanted.iter().all(|(key, wanted)| match stored.get(key) {
            Some(stored) => says(stored, wanted),
            None => is_empty(wanted),
        }),
        (Value::Array(stored), Value::Array(wanted)) => {
            stored.len() == wanted.len() && stored.iter().zip(wanted).all(|(stored, wanted)| says(stored, wanted))
        }
        (stored, wanted) => stored == wanted,
    }
}

/// Empty lists and maps are often not stored.
fn is_empty(value: &Value) -> bool {
    match value {
        Value::Null => true,
        Value::Array(items) => items.is_empty(),
        Value::Object(fields) => fields.is_empty(),
        _ => false,
    }
}

/// An object that is immutable stays as it was made: where a later version of the operator would write something else into it for
/// people to read, nothing is to be applied.
pub fn keep_what_cannot_change(wanted: &mut Wanted, owned: &Owned) {
    if owned.body["immutable"] == Value::Bool(true) {
        let mut body = wanted.body.clone();
        body["data"] = owned.body["data"].clone();
        *wanted = Wanted::new(wanted.kind, body);
    }
}

/// Applies an object. One that somebody else made under the same name is never touched: `is_new` asks first.
///
/// # Errors
/// [`ReconcileError::Taken`] if the name is somebody else's, [`ReconcileError::Apply`] if the API server refuses.
pub async fn apply(
    client: &Client,
    namespace: &str,
    wanted: &Wanted,
    owned: Option<&Owned>,
    job_uid: &str,
    settled: &Settled,
) -> Result<(), ReconcileError> {
    let api: Api<DynamicObject> = Api::namespaced_with(client.clone(), namespace, &wanted.kind.resource());
    let failed = |source| ReconcileError::Apply { kind: wanted.kind.name(), name: wanted.name.clone(), source };
    if owned.is_none() {
        match api.get_opt(&wanted.name).await.map_err(failed)? {
            Some(there) if Owned::of(wanted.kind, &there, job_uid).is_none() => {
                let (kind, name) = (wanted.kind.name(), wanted.name.clone());
                return Err(if is_of_a_deleted_job(&there, &wanted.body) {
                    ReconcileError::Leaving { kind, name }
                } else {
                    ReconcileError::Taken { kind, name }
                });
            }
            _ => {}
        }
    }
    let parameters = PatchParams::apply(FIELD_MANAGER).force();
    let stored = api.patch(&wanted.name, &parameters, &Patch::Apply(&wanted.body)).await.map_err(failed)?;
    settled.note(wanted, &stored);
    tracing::debug!(kind = wanted.kind.name(), name = wanted.name, "applied");
    Ok(())
}

/// Whether an object belonged to an earlier job of the same name, which the garbage collector has not got to yet.
fn is_of_a_deleted_job(there: &DynamicObject, wanted: &Value) -> bool {
    let owner = &wanted["metadata"]["ownerReferences"][0];
    let owners = there.metadata.owner_references.iter().flatten();
    owners.into_iter().any(|other| owner["kind"] == other.kind && owner["name"] == other.name)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn an_object_may_say_more_than_was_applied_but_not_less_and_nothing_else() {
        let wanted = json!({"spec": {"replicas": 2, "ports": [{"port": 1}], "labels": {}}});
        for (stored, same) in [
            (json!({"spec": {"replicas": 2, "ports": [{"port": 1, "protocol": "TCP"}], "x": 1}}), true),
            (json!({"spec": {"replicas": 3, "ports": [{"port": 1}]}}), false),
            (json!({"spec": {"replicas": 2, "ports": [{"port": 1}, {"port": 2}]}}), false),
            (json!({"spec": {"replicas": 2}}), false),
            (json!({}), false),
        ] {
            assert_eq!(says(&stored, &wanted), same, "{stored}");
        }
    }
}

//! Objects that the API server stores in another form than they were applied in.

use std::collections::HashMap;

use kube::ResourceExt;
use kube::api::DynamicObject;
use parking_lot::{Mutex, MutexGuard};
use serde_json::Value;

use crate::digest::digest;
use crate::objects::{Owned, Wanted};

/// Objects that the API server stores in another form than they were applied in (`1000m` becomes
/// `1`). It only saves calls; an empty one is correct. Entries are dropped with their objects.
#[derive(Debug, Default)]
pub struct StoredForms(Mutex<HashMap<String, StoredForm>>);

/// Two forms of an object.
#[derive(Debug)]
struct StoredForm {
    /// Digest of the applied object.
    applied: String,
    /// Digest of the stored content.
    stored: String,
}

impl StoredForms {
    /// Whether `owned` is the stored form of `wanted`.
    pub(super) fn is_of(&self, wanted: &Wanted, owned: &Owned) -> bool {
        let forms = self.lock();
        let form = forms.get(&owned.uid);
        form.is_some_and(|form| form.applied == wanted.hash() && form.stored == content(&owned.body))
    }

    /// Notes the stored form of an applied object, if it differs.
    pub(super) fn note(&self, wanted: &Wanted, stored: &DynamicObject) {
        let (Some(uid), Ok(body)) = (stored.uid(), serde_json::to_value(stored)) else { return };
        if !contains(&body, &wanted.body) {
            let form = StoredForm { applied: wanted.hash().to_owned(), stored: content(&body) };
            self.lock().insert(uid, form);
        }
    }

    /// Forgets an object that was deleted.
    pub(super) fn forget(&self, uid: &str) {
        self.lock().remove(uid);
    }

    /// Forgets all objects if there are more than `most`.
    pub(crate) fn trim(&self, most: usize) {
        let mut forms = self.lock();
        if forms.len() > most {
            forms.clear();
        }
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<String, StoredForm>> {
        self.0.lock()
    }
}

/// Digest of an object without the fields that change by themselves.
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

/// Whether `stored` contains everything in `wanted`. It may contain more, which the API server
/// filled in.
#[must_use]
pub fn contains(stored: &Value, wanted: &Value) -> bool {
    match (stored, wanted) {
        (_, Value::Null) => true,
        (Value::Object(stored), Value::Object(wanted)) => wanted.iter().all(|(key, wanted)| match stored.get(key) {
            Some(stored) => contains(stored, wanted),
            None => is_empty(wanted),
        }),
        (Value::Array(stored), Value::Array(wanted)) => {
            stored.len() == wanted.len() && stored.iter().zip(wanted).all(|(stored, wanted)| contains(stored, wanted))
        }
        (stored, wanted) => stored == wanted,
    }
}

/// The API server often drops empty lists and maps.
fn is_empty(value: &Value) -> bool {
    match value {
        Value::Null => true,
        Value::Array(items) => items.is_empty(),
        Value::Object(fields) => fields.is_empty(),
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn a_stored_object_may_contain_more_but_not_less_and_nothing_else() {
        let wanted = json!({"spec": {"replicas": 2, "ports": [{"port": 1}], "labels": {}}});
        for (stored, same) in [
            (json!({"spec": {"replicas": 2, "ports": [{"port": 1, "protocol": "TCP"}], "x": 1}}), true),
            (json!({"spec": {"replicas": 3, "ports": [{"port": 1}]}}), false),
            (json!({"spec": {"replicas": 2, "ports": [{"port": 1}, {"port": 2}]}}), false),
            (json!({"spec": {"replicas": 2}}), false),
            (json!({}), false),
        ] {
            assert_eq!(contains(&stored, &wanted), same, "{stored}");
        }
    }
}

//! Deletion of the job's objects that are not wanted. Objects of other owners are never listed. A
//! deletion names the object's uid, so a newer object of the same name is safe.

use kube::Client;
use kube::api::{Api, DeleteParams, DynamicObject, Preconditions, PropagationPolicy};

use super::error::ReconcileError;
use crate::objects::{Owned, Wanted};

/// The existing objects that are not wanted. Pure.
#[must_use]
pub fn superfluous<'a>(owned: &'a [Owned], wanted: &[Wanted]) -> Vec<&'a Owned> {
    let is_wanted = |object: &Owned| wanted.iter().any(|w| w.kind == object.kind && w.name == object.name);
    owned.iter().filter(|object| !object.is_terminating && !is_wanted(object)).collect()
}

/// Deletes an object and its dependents.
///
/// # Errors
/// If the API server refuses. A missing object is no error.
pub async fn delete(client: &Client, namespace: &str, object: &Owned) -> Result<(), ReconcileError> {
    let api: Api<DynamicObject> = Api::namespaced_with(client.clone(), namespace, &object.kind.resource());
    let parameters = DeleteParams {
        preconditions: Some(Preconditions { uid: Some(object.uid.clone()), resource_version: None }),
        propagation_policy: Some(PropagationPolicy::Background),
        ..DeleteParams::default()
    };
    match api.delete(&object.name, &parameters).await {
        Ok(_) => Ok(()),
        Err(kube::Error::Api(status)) if status.code == 404 || status.code == 409 => Ok(()),
        Err(source) => Err(ReconcileError::Delete { kind: object.kind.name(), name: object.name.clone(), source }),
    }
}

//! Deletion of what belongs to the job and is not wanted any more. What does not belong to it is never listed, and a deletion names
//! the object's uid, so another object that has taken its name meanwhile is safe.

use kube::Client;
use kube::api::{Api, DeleteParams, DynamicObject, Preconditions, PropagationPolicy};

use crate::reconcile::ReconcileError;
use crate::reconcile::kinds::{Owned, Wanted};

/// What is there and not wanted. Pure.
#[must_use]
pub fn superfluous<'a>(owned: &'a [Owned], wanted: &[Wanted]) -> Vec<&'a Owned> {
    let is_wanted = |object: &Owned| wanted.iter().any(|w| w.kind == object.kind && w.name == object.name);
    owned.iter().filter(|object| !object.is_leaving && !is_wanted(object)).collect()
}

/// Deletes an object and what belongs to it.
///
/// # Errors
/// If the API server refuses; that it is gone already is no error.
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

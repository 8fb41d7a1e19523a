//! Server-side apply of objects that differ, with one field owner. An object that is as it was
//! applied is left alone: it carries the digest of the applied object, and still contains all of
//! it.

use kube::Client;
use kube::api::{Api, DynamicObject, Patch, PatchParams};
use serde_json::Value;

use super::error::ReconcileError;
use super::stored_forms::{StoredForms, contains};
use crate::names::{APPLIED_ANNOTATION, FIELD_MANAGER};
use crate::objects::{Owned, Wanted};

/// Whether the object is as it is wanted.
#[must_use]
pub fn is_in_order(wanted: &Wanted, owned: &Owned, stored_forms: &StoredForms) -> bool {
    let applied = owned.body["metadata"]["annotations"][APPLIED_ANNOTATION].as_str();
    applied == Some(wanted.hash()) && (contains(&owned.body, &wanted.body) || stored_forms.is_of(wanted, owned))
}

/// Keeps the data of an immutable object as they are. A later version of the operator may write
/// other information for people into them, and that is no reason to apply them.
pub fn keep_immutable_data(wanted: &mut Wanted, owned: &Owned) {
    if owned.body["immutable"] == Value::Bool(true) {
        let mut body = wanted.body.clone();
        body["data"] = owned.body["data"].clone();
        *wanted = Wanted::new(wanted.kind, body);
    }
}

/// The object to apply, and the existing one.
#[derive(Clone, Copy)]
pub struct Application<'a> {
    /// The object to apply.
    pub wanted: &'a Wanted,
    /// The existing object, if it belongs to the job.
    pub owned: Option<&'a Owned>,
}

/// Where objects are applied.
#[derive(Clone, Copy)]
pub struct Target<'a> {
    /// The API server.
    pub client: &'a Client,
    /// The job's namespace.
    pub namespace: &'a str,
    /// The job's uid.
    pub job_uid: &'a str,
}

/// Applies an object. An object of the same name that belongs to another owner is not touched.
///
/// # Errors
/// [`ReconcileError::Taken`] if another owner has the name, and [`ReconcileError::Leaving`] if a
/// deleted job of the same name has it. [`ReconcileError::Apply`] if the API server refuses.
pub async fn apply(
    target: Target<'_>,
    application: Application<'_>,
    stored_forms: &StoredForms,
) -> Result<(), ReconcileError> {
    let Application { wanted, owned } = application;
    let resource = wanted.kind.resource();
    let api: Api<DynamicObject> = Api::namespaced_with(target.client.clone(), target.namespace, &resource);
    let failed = |source| ReconcileError::Apply { kind: wanted.kind.name(), name: wanted.name.clone(), source };
    if owned.is_none() {
        let existing = api.get_opt(&wanted.name).await.map_err(failed)?;
        check_owner(existing.as_ref(), wanted, target.job_uid)?;
    }
    let parameters = PatchParams::apply(FIELD_MANAGER).force();
    let stored = api.patch(&wanted.name, &parameters, &Patch::Apply(&wanted.body)).await.map_err(failed)?;
    stored_forms.note(wanted, &stored);
    tracing::debug!(kind = wanted.kind.name(), name = wanted.name, "applied");
    Ok(())
}

/// Refuses to touch an existing object of another owner.
fn check_owner(existing: Option<&DynamicObject>, wanted: &Wanted, job_uid: &str) -> Result<(), ReconcileError> {
    let other = existing.filter(|existing| Owned::of(wanted.kind, existing, job_uid).is_none());
    let Some(other) = other else { return Ok(()) };
    let (kind, name) = (wanted.kind.name(), wanted.name.clone());
    Err(if is_of_deleted_job(other, &wanted.body) {
        ReconcileError::Leaving { kind, name }
    } else {
        ReconcileError::Taken { kind, name }
    })
}

/// Whether an object belongs to an earlier job of the same name, and the garbage collector has not
/// deleted it yet.
fn is_of_deleted_job(existing: &DynamicObject, wanted: &Value) -> bool {
    let owner = &wanted["metadata"]["ownerReferences"][0];
    let owners = existing.metadata.owner_references.iter().flatten();
    owners.into_iter().any(|other| owner["kind"] == other.kind && owner["name"] == other.name)
}

//! The second step, pure: the manifest with every default filled in, and what of it the pods depend on.

use rectrain_crds::{FieldError, RecTrainingJob, RecTrainingJobSpec, ResolvedJob, defaults};
use serde_json::{Value, json};
use sha2::{Digest, Sha256};

/// Whether this operator runs the job, or another controller does.
#[must_use]
pub fn is_ours(job: &RecTrainingJob) -> bool {
    job.spec.managed_by.as_deref().is_none_or(|name| name == defaults::MANAGED_BY)
}

/// The manifest with nothing left to look up.
///
/// # Errors
/// Everything that is wrong with it. The API server has checked the schema's rules already; this finds what they cannot say.
pub fn verdict(job: &RecTrainingJob) -> Result<ResolvedJob, Vec<FieldError>> {
    rectrain_crds::validate(job)
}

/// The part of the spec that pods run, as they get it: without what only a cluster reads, and without what the operator itself
/// carries out (holding a job, stopping it after a time).
#[must_use]
pub fn for_pods(spec: &RecTrainingJobSpec) -> RecTrainingJobSpec {
    let mut spec = spec.clone();
    spec.suspend = None;
    spec.active_deadline_seconds = None;
    spec.ttl_seconds_after_finished = None;
    spec.managed_by = None;
    spec.fault_tolerance = None;
    if let Some(roles) = &mut spec.roles {
        let templates = [
            roles.coordinator.as_mut().map(|role| &mut role.template),
            roles.ps.as_mut().map(|role| &mut role.template),
            roles.embedding_worker.as_mut().map(|role| &mut role.template),
            roles.dense_worker.as_mut().map(|role| &mut role.template),
            roles.loader.as_mut().map(|role| &mut role.template),
        ];
        templates.into_iter().flatten().for_each(|template| *template = None);
    }
    spec
}

/// Digest of what pods depend on: what they run and what they look like. A job whose digest changes gets new pods.
#[must_use]
pub fn spec_hash(spec: &RecTrainingJobSpec) -> String {
    let roles = serde_json::to_value(&spec.roles).unwrap_or(Value::Null);
    digest(&json!({"run": for_pods(spec), "roles": roles}))
}

/// SHA-256 of a value whose objects have sorted keys, in hexadecimal; 32 digits tell objects of one cluster apart.
#[must_use]
pub fn digest(value: &Value) -> String {
    let hash = Sha256::digest(value.to_string().as_bytes());
    hash.iter().take(16).map(|byte| format!("{byte:02x}")).collect()
}

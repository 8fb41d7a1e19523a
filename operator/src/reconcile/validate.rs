//! The second step, pure: the manifest with every default filled in, and what of it the pods depend on.

use rectrain_crds::{
    Capability, FieldError, Mode, RecTrainingJob, RecTrainingJobSpec, ResolvedJob, TrainingSpec, defaults,
};
use serde_json::{Value, json};
use sha2::{Digest, Sha256};

use crate::names::Role;

/// Whether this operator runs the job, or another controller does.
#[must_use]
pub fn is_ours(job: &RecTrainingJob) -> bool {
    job.spec.managed_by.as_deref().is_none_or(|name| name == defaults::MANAGED_BY)
}

/// What a job in a cluster may ask for.
const CAPABILITIES: &[Capability] = &[
    Capability::Checkpoint,
    Capability::Resume,
    Capability::Cuda,
    Capability::Suspend,
    Capability::Deadline,
    Capability::AutoMode,
    Capability::Autoscaling,
    Capability::ApplyScaling,
];

/// The manifest with nothing left to look up.
///
/// # Errors
/// Everything that is wrong with it. The API server has checked the schema's rules already; this finds what they cannot say.
pub fn verdict(job: &RecTrainingJob) -> Result<ResolvedJob, Vec<FieldError>> {
    let resolved = rectrain_crds::validate(job)?;
    rectrain_crds::refuse_missing(job, CAPABILITIES)?;
    Ok(resolved)
}

/// What is to be said of a manifest.
#[derive(Clone, Debug)]
pub struct Verdict {
    /// The manifest with nothing left to look up, or everything that is wrong with it.
    pub manifest: Result<ResolvedJob, Vec<FieldError>>,
    /// What is wrong with its training mode, if that is all and the mode that the job is in could stay: `manifest` has that one.
    pub impossible_mode: Option<Vec<FieldError>>,
}

/// Judges the manifest. A job that trains is not to be stopped by a mode that it cannot go on in.
#[must_use]
pub fn judge(job: &RecTrainingJob) -> Verdict {
    let errors = match verdict(job) {
        Ok(resolved) => return Verdict { manifest: Ok(resolved), impossible_mode: None },
        Err(errors) => errors,
    };
    let mode = job.status.as_ref().and_then(|status| status.attempt.as_ref()?.mode.as_ref());
    let in_present_mode = mode.map(|mode| RecTrainingJob {
        metadata: job.metadata.clone(),
        spec: in_mode(&job.spec, mode.accepted.unwrap_or(mode.started)),
        status: None,
    });
    match in_present_mode.map(|job| verdict(&job)) {
        Some(Ok(resolved)) => Verdict { manifest: Ok(resolved), impossible_mode: Some(errors) },
        _ => Verdict { manifest: Err(errors), impossible_mode: None },
    }
}

/// The spec with this training mode, which nothing switches automatically: that is the operator's to do, and no pod reads it.
#[must_use]
pub fn in_mode(spec: &RecTrainingJobSpec, mode: Mode) -> RecTrainingJobSpec {
    let training = TrainingSpec { mode: Some(mode.into()), auto: None, ..spec.training.clone().unwrap_or_default() };
    RecTrainingJobSpec { training: Some(training), ..spec.clone() }
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
    spec.autoscaling = None;
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

/// The spec with so many members of each role that `replicas` speaks of.
#[must_use]
pub fn with_replicas(mut spec: RecTrainingJobSpec, replicas: impl Fn(Role) -> Option<u32>) -> RecTrainingJobSpec {
    let roles = spec.roles.get_or_insert_default();
    for role in Role::MEMBERS {
        let Some(replicas) = replicas(role) else { continue };
        let field = match role {
            Role::Coordinator => continue,
            Role::Ps => &mut roles.ps.get_or_insert_default().replicas,
            Role::EmbeddingWorker => &mut roles.embedding_worker.get_or_insert_default().replicas,
            Role::DenseWorker => &mut roles.dense_worker.get_or_insert_default().replicas,
            Role::Loader => &mut roles.loader.get_or_insert_default().replicas,
        };
        *field = Some(replicas);
    }
    spec
}

/// Digest of what pods depend on: what they run and what they look like. A job whose digest changes gets new pods. The training mode
/// is none of it, and the numbers of members neither, because they change while pods run; but for dense workers whose number is
/// also that of the pieces of a batch.
#[must_use]
pub fn spec_hash(spec: &RecTrainingJobSpec) -> String {
    let has_elastic_workers = has_elastic_dense_workers(spec);
    let same = |role| (role != Role::DenseWorker || has_elastic_workers).then_some(1);
    manifest_hash(&with_replicas(in_mode(spec, Mode::default()), same))
}

/// Whether each dense worker has pieces of its own of a batch that was cut without regard to their number.
fn has_elastic_dense_workers(spec: &RecTrainingJobSpec) -> bool {
    let Some(training) = &spec.training else { return false };
    let rows = training.global_batch_size.unwrap_or(defaults::GLOBAL_BATCH_SIZE);
    let workers = spec.roles.as_ref().and_then(|roles| roles.dense_worker.as_ref()?.replicas).unwrap_or(1);
    training.local_batch_size.is_some_and(|local| workers <= rows / local.max(1))
}

/// Digest of what the pods of one attempt read and look like, the training mode that it starts in included.
#[must_use]
pub fn manifest_hash(spec: &RecTrainingJobSpec) -> String {
    let roles = serde_json::to_value(&spec.roles).unwrap_or(Value::Null);
    digest(&json!({"run": for_pods(spec), "roles": roles}))
}

/// SHA-256 of a value whose objects have sorted keys, in hexadecimal; 32 digits tell objects of one cluster apart.
#[must_use]
pub fn digest(value: &Value) -> String {
    let hash = Sha256::digest(value.to_string().as_bytes());
    hash.iter().take(16).map(|byte| format!("{byte:02x}")).collect()
}

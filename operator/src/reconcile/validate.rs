//! The manifest with every default filled in, and the parts of it that pods depend on. Pure.

use rectrain_crds::{
    Capability, FieldError, MemorySpec, Mode, RecTrainingJob, RecTrainingJobSpec, ResolvedJob, Role, TrainingSpec,
    defaults,
};
use serde_json::{Value, json};

use crate::digest::digest;

/// Whether this operator runs the job, and not another controller.
#[must_use]
pub fn is_ours(job: &RecTrainingJob) -> bool {
    job.spec.managed_by.as_deref().is_none_or(|name| name == defaults::MANAGED_BY)
}

/// The capabilities of a job in a cluster.
const CAPABILITIES: &[Capability] = &[
    Capability::Checkpoint,
    Capability::Resume,
    Capability::WarmStart,
    Capability::Cuda,
    Capability::Suspend,
    Capability::Deadline,
    Capability::AutoMode,
    Capability::Autoscaling,
    Capability::ApplyScaling,
];

/// The resolved manifest.
///
/// # Errors
/// All errors in it. The API server has checked the schema's rules already; this finds the errors
/// that they cannot express.
pub fn verdict(job: &RecTrainingJob) -> Result<ResolvedJob, Vec<FieldError>> {
    let resolved = rectrain_crds::validate(job)?;
    rectrain_crds::refuse_missing(job, CAPABILITIES)?;
    Ok(resolved)
}

/// The verdict on a manifest.
#[derive(Clone, Debug)]
pub struct Verdict {
    /// The resolved manifest, or all errors in it.
    pub manifest: Result<ResolvedJob, Vec<FieldError>>,
    /// The errors in its training mode, if there are no others and the job's present mode could
    /// stay. `manifest` then has the present mode.
    pub impossible_mode: Option<Vec<FieldError>>,
}

/// Judges the manifest. An impossible mode does not stop a job that trains in another one.
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

/// The spec with this fixed training mode. The operator switches modes, so pods read no `auto`.
#[must_use]
pub fn in_mode(spec: &RecTrainingJobSpec, mode: Mode) -> RecTrainingJobSpec {
    let training = TrainingSpec { mode: Some(mode.into()), auto: None, ..spec.training.clone().unwrap_or_default() };
    RecTrainingJobSpec { training: Some(training), ..spec.clone() }
}

/// The spec for pods: without settings that only a cluster reads, and without settings that the
/// operator itself carries out (a suspension, a deadline). Pods do not know their limits, so a
/// budget that depends on them is a number of bytes.
#[must_use]
pub fn for_pods(spec: &RecTrainingJobSpec) -> RecTrainingJobSpec {
    let memory = spec.features.memory.as_ref().map(|memory| memory.for_members(spec));
    let mut spec = spec.clone();
    spec.features.memory = memory;
    spec.suspend = None;
    spec.active_deadline_seconds = None;
    spec.ttl_seconds_after_finished = None;
    spec.managed_by = None;
    spec.fault_tolerance = None;
    spec.autoscaling = None;
    if let Some(roles) = &mut spec.roles {
        roles.remove_templates();
    }
    spec
}

/// The spec with the numbers of members that `replicas` returns.
#[must_use]
pub fn with_replicas(mut spec: RecTrainingJobSpec, replicas: impl Fn(Role) -> Option<u32>) -> RecTrainingJobSpec {
    let roles = spec.roles.get_or_insert_default();
    for role in Role::MEMBERS {
        if let Some(replicas) = replicas(role) {
            roles.set_replicas(role, replicas);
        }
    }
    spec
}

/// Digest of the parts of the spec that pods depend on. A job whose digest changes gets new pods.
///
/// The training mode, the numbers of members and the number of a memory budget are no part of it,
/// because they change while pods run. The number of
/// dense workers is, if each of them takes an equal share of every batch.
#[must_use]
pub fn spec_hash(spec: &RecTrainingJobSpec) -> String {
    let has_elastic_workers = has_elastic_dense_workers(spec);
    let same = |role| (role != Role::DenseWorker || has_elastic_workers).then_some(1);
    manifest_hash(&with_budget(with_replicas(in_mode(spec, Mode::default()), same)))
}

/// The spec with a fixed number as its memory budget, if it has one.
fn with_budget(mut spec: RecTrainingJobSpec) -> RecTrainingJobSpec {
    spec.features.memory = spec.features.memory.map(|_| MemorySpec { max_rows: Some(1), ..MemorySpec::default() });
    spec
}

/// Whether batches are cut into pieces independent of the number of dense workers.
fn has_elastic_dense_workers(spec: &RecTrainingJobSpec) -> bool {
    let Some(training) = &spec.training else { return false };
    let rows = training.global_batch_size.unwrap_or(defaults::GLOBAL_BATCH_SIZE);
    let workers = spec.roles.as_ref().and_then(|roles| roles.dense_worker.as_ref()?.replicas).unwrap_or(1);
    training.local_batch_size.is_some_and(|local| workers <= rows / local.max(1))
}

/// Digest of the manifest and the templates of an attempt's pods, with its initial training mode.
#[must_use]
pub fn manifest_hash(spec: &RecTrainingJobSpec) -> String {
    let roles = serde_json::to_value(&spec.roles).unwrap_or(Value::Null);
    digest(&json!({"run": for_pods(spec), "roles": roles}))
}

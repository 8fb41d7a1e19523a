//! The features of a job, beyond plain training, that a program may not support. Such a program
//! refuses the job with a sentence. It never ignores the field.

use std::fmt;

use crate::{
    AutoscalingMode, AutoscalingSpec, DeviceKind, FieldError, FieldPath, ModeSpec, RecTrainingJob, Resume, Scaler,
};

/// Something that not every version or build can do.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Capability {
    /// Writing checkpoints.
    Checkpoint,
    /// Starting from a checkpoint.
    Resume,
    /// Beginning with the model of another job.
    WarmStart,
    /// Computing on NVIDIA GPUs.
    Cuda,
    /// Suspending a job.
    Suspend,
    /// Stopping a job after a time.
    Deadline,
    /// Choosing the training mode while training continues.
    AutoMode,
    /// Deciding how many replicas a role other than the loaders should have.
    Autoscaling,
    /// Carrying out such decisions.
    ApplyScaling,
}

impl Capability {
    /// The remedy for a job that needs it, in a program that lacks it.
    fn remedy(self) -> &'static str {
        match self {
            Capability::Checkpoint | Capability::Resume | Capability::WarmStart | Capability::AutoMode => {
                "remove the field"
            }
            Capability::Cuda => {
                "remove the field, or use a program that was built with the feature `cuda` (docs/guide/gpu.md)"
            }
            Capability::Suspend | Capability::Deadline | Capability::Autoscaling | Capability::ApplyScaling => {
                "remove the field here; in a cluster it works"
            }
        }
    }
}

impl fmt::Display for Capability {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Capability::Checkpoint => "write checkpoints",
            Capability::Resume => "start from a checkpoint",
            Capability::WarmStart => "begin with the model of another job",
            Capability::Cuda => "compute on a GPU",
            Capability::Suspend => "suspend a job",
            Capability::Deadline => "stop a job after a time",
            Capability::AutoMode => "choose the training mode by itself",
            Capability::Autoscaling => "decide on numbers of replicas outside a cluster, except of loaders",
            Capability::ApplyScaling => "carry out decisions to scale (it can recommend)",
        })
    }
}

/// A field of a job, and the capability it needs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Requirement {
    /// The field.
    pub path: FieldPath,
    /// The capability.
    pub capability: Capability,
}

/// Everything the job needs. Fields that only a cluster reads (`template`,
/// `ttlSecondsAfterFinished`, `managedBy`) need nothing: their descriptions say so, and the same
/// manifest runs without a cluster.
pub fn capabilities(job: &RecTrainingJob) -> Vec<Requirement> {
    let spec = &job.spec;
    let checkpoint = spec.checkpoint.clone().unwrap_or_default();
    let workers = spec.roles.as_ref().and_then(|roles| roles.dense_worker.as_ref());
    let needs_gpu = workers.is_some_and(|workers| workers.device() == DeviceKind::Cuda);
    let asks_by = if workers.is_some_and(|workers| workers.device.is_some()) { "device" } else { "gpus" };
    let asks_by = format!("spec.roles.denseWorker.{asks_by}");
    let mode = spec.training.as_ref().and_then(|training| training.mode);
    let scaling = spec.autoscaling.as_ref().filter(|scaling| scales_more_than_loaders(scaling));
    let asked = [
        (checkpoint.path.is_some(), "spec.checkpoint.path", Capability::Checkpoint),
        (checkpoint.resume == Some(Resume::Latest), "spec.checkpoint.resume", Capability::Resume),
        (checkpoint.from.is_some(), "spec.checkpoint.from", Capability::WarmStart),
        (needs_gpu, asks_by.as_str(), Capability::Cuda),
        (spec.suspend == Some(true), "spec.suspend", Capability::Suspend),
        (spec.active_deadline_seconds.is_some(), "spec.activeDeadlineSeconds", Capability::Deadline),
        (mode == Some(ModeSpec::Auto), "spec.training.mode", Capability::AutoMode),
        (scaling.is_some(), "spec.autoscaling", Capability::Autoscaling),
        (
            scaling.is_some_and(|scaling| scaling.mode == Some(AutoscalingMode::Apply)),
            "spec.autoscaling.mode",
            Capability::ApplyScaling,
        ),
    ];
    let asked = asked.into_iter().filter(|(asks, ..)| *asks);
    asked.map(|(_, path, capability)| Requirement { path: FieldPath::parse(path), capability }).collect()
}

/// Whether a role other than the loaders is scaled. Every program can scale loaders.
fn scales_more_than_loaders(given: &AutoscalingSpec) -> bool {
    let scalers = [
        given.ps.as_ref().and_then(|role| role.scaler),
        given.embedding_worker.as_ref().and_then(|role| role.scaler),
        given.dense_worker.as_ref().and_then(|role| role.scaler),
    ];
    scalers.into_iter().any(|scaler| scaler.unwrap_or_default() == Scaler::Operator)
}

/// Refuses a job that needs a capability the caller lacks.
///
/// # Errors
/// One error for each such field.
pub fn refuse_missing(job: &RecTrainingJob, can: &[Capability]) -> Result<(), Vec<FieldError>> {
    let missing = capabilities(job).into_iter().filter(|asked| !can.contains(&asked.capability));
    let errors: Vec<_> = missing
        .map(|asked| {
            let (capability, remedy) = (asked.capability, asked.capability.remedy());
            FieldError::new(asked.path, format!("this version cannot {capability}: {remedy}"))
        })
        .collect();
    if errors.is_empty() { Ok(()) } else { Err(errors) }
}

//! Settings of a manifest with their defaults.

use rectrain_crds::{Mode, ModeSpec, RecTrainingJob, defaults};

use crate::decisions;

/// The training mode of the manifest, or the decided one if the manifest leaves the mode to the
/// operator.
#[must_use]
pub fn wanted_mode(job: &RecTrainingJob) -> Mode {
    match job.spec.training.as_ref().and_then(|training| training.mode).unwrap_or_default() {
        ModeSpec::Fixed(mode) => mode,
        ModeSpec::Auto => decisions::mode(job.status.as_ref()),
    }
}

/// How often the job may restart.
#[must_use]
pub fn max_restarts(job: &RecTrainingJob) -> u32 {
    job.spec.fault_tolerance.as_ref().and_then(|given| given.max_restarts).unwrap_or(defaults::MAX_RESTARTS)
}

/// Seconds without progress after which the job restarts.
#[must_use]
pub fn stall_seconds(job: &RecTrainingJob) -> u32 {
    job.spec.fault_tolerance.as_ref().and_then(|given| given.stall_seconds).unwrap_or(defaults::STALL_SECONDS)
}

/// Seconds of the first back-off after a crash.
pub(super) fn first_back_off_seconds(job: &RecTrainingJob) -> u64 {
    let given = job.spec.fault_tolerance.as_ref().and_then(|given| given.backoff_seconds);
    u64::from(given.unwrap_or(defaults::BACKOFF_SECONDS))
}

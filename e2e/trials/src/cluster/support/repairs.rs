//! The operator's repairs of a job's objects.

use std::time::{Duration, Instant};

use rectrain_harness::jobs::Jobs;
use rectrain_harness::waiting::eventually;
use rectrain_harness::{HarnessError, not_yet};

/// How long a repair may take.
const REPAIR: Duration = Duration::from_secs(5);

/// Changes a label of an object of a job, and waits until the operator has restored it; returns the
/// time of the repair.
pub(crate) fn relabel(jobs: &Jobs, object: &str) -> Result<Duration, HarnessError> {
    jobs.within(&["label", object, "app.kubernetes.io/name=other", "--overwrite"])?;
    until_repaired(&format!("the label of {object}"), || {
        let label = jobs.get(object)?["metadata"]["labels"]["app.kubernetes.io/name"].clone();
        if label == "rectrain" { Ok(()) } else { Err(not_yet(format!("it is {label}"))) }
    })
}

/// Waits until `check` succeeds; returns the time of the repair.
pub(crate) fn until_repaired(
    object: &str,
    check: impl FnMut() -> Result<(), HarnessError>,
) -> Result<Duration, HarnessError> {
    let started = Instant::now();
    eventually(REPAIR, &format!("the repair of {object}"), check)?;
    Ok(started.elapsed())
}

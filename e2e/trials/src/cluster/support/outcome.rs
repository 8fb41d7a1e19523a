//! Comparisons of a job in the cluster with an undisturbed run.

use rectrain_harness::events::missing;
use rectrain_harness::jobs::Jobs;
use serde_json::Value;

use crate::TrialError;
use crate::error::unmet;

/// The largest difference of the test AUC without a barrier.
const AUC: f64 = 0.002;

/// Waits until the job is complete, and deletes it. Without a barrier: every row is trained once,
/// and the test AUC is close to that in the summary `undisturbed`.
pub(crate) fn same_rows(jobs: &Jobs, name: &str, undisturbed: &Value) -> Result<(), TrialError> {
    let job = jobs.until_phase(name, "Complete")?;
    let summary = &job["status"]["summary"];
    let auc = |value: &Value| value.as_f64().ok_or_else(|| missing(&format!("the summary of {name}"), summary, "auc"));
    let difference = auc(&summary["auc"])? - auc(&undisturbed["test"]["auc"])?;
    if summary["samples"] != undisturbed["trainedRows"] || difference.abs() > AUC {
        return Err(unmet(format!("{name} to train as in {undisturbed}"), summary));
    }
    println!("{name}: {} restarts, every row trained once, AUC {difference:+.4}", job["status"]["restarts"]);
    Ok(jobs.delete(name)?)
}

/// Waits until the job is complete, and deletes it. Its model has the digest in the summary
/// `undisturbed`.
pub(crate) fn same_digest(jobs: &Jobs, name: &str, undisturbed: &Value) -> Result<(), TrialError> {
    let job = jobs.until_phase(name, "Complete")?;
    let found = &job["status"]["summary"]["parametersSha256"];
    if *found != undisturbed["parametersSha256"] {
        return Err(unmet(format!("{name} to train the model {}", undisturbed["parametersSha256"]), found));
    }
    println!("{name}: {} restarts, the same model to the bit", job["status"]["restarts"]);
    Ok(jobs.delete(name)?)
}

/// Checks that `attempt`, the number of a job's last attempt, is the first one.
pub(crate) fn no_restart(name: &str, attempt: &Value) -> Result<(), TrialError> {
    if *attempt == 1 {
        return Ok(());
    }
    Err(unmet(format!("{name} to recover in its first attempt"), format!("attempt {attempt}")))
}

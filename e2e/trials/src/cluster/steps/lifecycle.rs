//! A job's whole life: it completes and it is deleted.

use std::time::Duration;

use rectrain_harness::jobs::condition;
use rectrain_harness::manifests::{endless, manifest};
use rectrain_harness::not_yet;
use rectrain_harness::rectrain::train_outside;
use rectrain_harness::waiting::eventually;
use serde_json::json;

use crate::TrialError;
use crate::cluster::support::TestCluster;
use crate::error::unmet;

/// How long a job's objects may take to disappear.
const REMOVAL: Duration = Duration::from_secs(180);

pub(in crate::cluster) fn completes(cluster: &TestCluster) -> Result<(), TrialError> {
    let (jobs, name) = (&cluster.jobs, "complete");
    let manifest = manifest(name, &json!({}));
    let here = train_outside(&manifest)?;
    jobs.apply(&manifest)?;
    let seen = jobs.phases(name)?;
    println!("phases: {}", seen.join(", "));
    let job = jobs.until_phase(name, "Complete")?;
    let there = &job["status"]["summary"];
    println!("summary: {there}");
    for (field, expected) in [("parametersSha256", &here["parametersSha256"]), ("auc", &here["test"]["auc"])] {
        if there[field] != *expected {
            return Err(unmet(format!("{field} {expected}, as outside of the cluster"), &there[field]));
        }
    }
    // A watch may miss a short phase, so only the order counts.
    let mut documented = ["Pending", "Starting", "Training", "Evaluating", "Complete"].into_iter();
    let in_order = seen.iter().all(|phase| documented.any(|next| next == phase));
    if !in_order || seen.last().is_none_or(|last| last != "Complete") || condition(&job, "Ready").is_none() {
        let found = format!("the phases {seen:?} and {}", job["status"]["conditions"]);
        return Err(unmet("the documented phases, and the condition Ready", found));
    }
    eventually(REMOVAL, "the end of all pods", || jobs.has_no_pods(name))?;
    let status = jobs.rectrain(&["status", name])?;
    println!("{status}");
    if status.contains("Complete") { Ok(()) } else { Err(unmet("Complete in `rectrain status`", status)) }
}

pub(in crate::cluster) fn leaves_nothing(cluster: &TestCluster) -> Result<(), TrialError> {
    let (jobs, name) = (&cluster.jobs, "gone");
    jobs.submit(name, &endless())?;
    jobs.until_phase(name, "Training")?;
    jobs.delete(name)?;
    eventually(REMOVAL, "the removal of the job's objects", || {
        let left = jobs.belongings(name)?;
        if left.is_empty() { jobs.has_no_pods(name) } else { Err(not_yet(format!("{left:?}"))) }
    })?;
    Ok(())
}

//! A running job survives its operator: the leader's death, an upgrade, and the removal of the
//! chart.

use std::time::{Duration, Instant};

use rectrain_bring_up::find;
use rectrain_bring_up::images::{Image, NEXT_TAG, tag_next};
use rectrain_harness::jobs::Jobs;
use rectrain_harness::kubectl::SYSTEM;
use rectrain_harness::manifests::endless;
use rectrain_harness::waiting::eventually;
use rectrain_harness::{HarnessError, not_yet};
use serde_json::Value;

use crate::TrialError;
use crate::cluster::support::TestCluster;
use crate::cluster::support::chart::{POLL_EVERY_SECOND, install, install_earlier, uninstall};
use crate::error::unmet;

const CRD: &str = "customresourcedefinition/rectrainingjobs.rectrain.dev";
/// How long another instance may take to lead after the leader's death.
const TAKEOVER: Duration = Duration::from_secs(20);
/// How long a new attempt may take to begin.
const NEW_ATTEMPT: Duration = Duration::from_secs(180);

pub(in crate::cluster) fn takes_over(cluster: &TestCluster) -> Result<(), TrialError> {
    let (jobs, name) = (&cluster.jobs, "undisturbed");
    jobs.submit(name, &endless())?;
    jobs.until_phase(name, "Training")?;
    let before = jobs.pods(name)?;
    lose_the_leader(cluster)?;
    jobs.until_step_after(name, jobs.step(name)?)?;
    let old = attempt_image(jobs, name)?;
    let has_new_image = upgrade(cluster)?;
    jobs.until_step_after(name, jobs.step(name)?)?;
    let after = jobs.pods(name)?;
    if after != before {
        return Err(unmet(format!("the pods {before:?}"), format!("{after:?}")));
    }
    if has_new_image {
        jobs.kill_pod(&format!("{name}-ps-0"))?;
        eventually(NEW_ATTEMPT, "the new image in the next attempt", || match attempt_image(jobs, name)? {
            now if now != old => Ok(()),
            now => Err(not_yet(format!("the image is {now}"))),
        })?;
    }
    jobs.delete(name)?;
    install(&cluster.paths, &[POLL_EVERY_SECOND])
}

fn lose_the_leader(cluster: &TestCluster) -> Result<(), HarnessError> {
    let kubectl = cluster.kubectl();
    let old = kubectl.leader()?;
    kubectl.kill_pod(SYSTEM, &old)?;
    let started = Instant::now();
    eventually(TAKEOVER, "another leader", || match kubectl.leader()? {
        now if now != old && !now.is_empty() => Ok(()),
        now => Err(not_yet(format!("the leader is {now:?}"))),
    })?;
    println!("another instance led after {:.1} s", started.elapsed().as_secs_f64());
    Ok(())
}

/// Upgrades operator and runtime to the next version; returns whether new attempts get another
/// image. A foreign cluster has one tag of each image, so there only the operator's arguments
/// change.
fn upgrade(cluster: &TestCluster) -> Result<bool, TrialError> {
    let Some(own) = find(&cluster.paths).filter(|_| !cluster.is_foreign()) else {
        return install(&cluster.paths, &["--set=pollSeconds=2"]).map(|()| false);
    };
    for image in [Image::Operator, Image::Runtime] {
        tag_next(&own, image)?;
    }
    let tags = format!("--set=image.tag={NEXT_TAG},runtimeImage.tag={NEXT_TAG}");
    install(&cluster.paths, &[POLL_EVERY_SECOND, &tags])?;
    Ok(true)
}

/// The image of the job's present attempt.
fn attempt_image(jobs: &Jobs, name: &str) -> Result<String, HarnessError> {
    Ok(jobs.status(name)?["attempt"]["image"].to_string())
}

/// Uninstalls the chart under a job, installs an earlier one and then the present one. The CRD
/// follows each chart, and the operator continues with the job.
pub(in crate::cluster) fn outlives_the_chart(cluster: &TestCluster) -> Result<(), TrialError> {
    let (jobs, paths, name) = (&cluster.jobs, &cluster.paths, "kept");
    jobs.submit(name, &endless())?;
    jobs.until_phase(name, "Training")?;
    let before = jobs.pods(name)?;
    uninstall(paths)?;
    let at = jobs.step(name)?;
    let all = columns(jobs)?;
    install_earlier(paths, &[POLL_EVERY_SECOND])?;
    if columns(jobs)? == all {
        return Err(unmet("the CRD of the earlier chart", "the present one"));
    }
    install(paths, &[POLL_EVERY_SECOND])?;
    let later = jobs.until_step_after(name, at)?;
    println!("no operator from step {at}, then one that continued the job: step {later}");
    let after = jobs.pods(name)?;
    match (columns(jobs)? == all, after == before) {
        (true, true) => Ok(jobs.delete(name)?),
        (false, _) => Err(unmet("the CRD of the present chart", columns(jobs)?)),
        (_, false) => Err(unmet(format!("the pods {before:?}"), format!("{after:?}"))),
    }
}

/// The columns that kubectl prints for jobs, as the CRD defines them.
fn columns(jobs: &Jobs) -> Result<Value, HarnessError> {
    Ok(jobs.get(CRD)?["spec"]["versions"][0]["additionalPrinterColumns"].clone())
}

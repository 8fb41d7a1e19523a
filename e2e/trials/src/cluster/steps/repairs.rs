//! The operator restores objects of a job that others change or delete.

use std::time::Duration;

use rectrain_harness::manifests::endless;
use rectrain_harness::not_yet;

use crate::TrialError;
use crate::cluster::support::TestCluster;
use crate::cluster::support::repairs::{relabel, until_repaired};

pub(in crate::cluster) fn repairs(cluster: &TestCluster) -> Result<(), TrialError> {
    let (jobs, name) = (&cluster.jobs, "repaired");
    jobs.submit(name, &endless())?;
    jobs.until_phase(name, "Training")?;
    let before = jobs.belongings(name)?;
    let mut slowest = Duration::ZERO;
    for (object, uid) in &before {
        // Deleting a StatefulSet with its pods would restart the job.
        let orphan = if object.starts_with("StatefulSet") { "--cascade=orphan" } else { "--cascade=background" };
        slowest = slowest.max(relabel(jobs, object)?);
        jobs.within(&["delete", object, orphan, "--wait=false"])?;
        slowest = slowest.max(until_repaired(object, || match jobs.belongings(name)?.get(object) {
            Some(now) if now != uid => Ok(()),
            other => Err(not_yet(format!("its uid is {other:?}"))),
        })?);
    }
    println!("{} objects changed and deleted; the slowest repair took {:.1} s", before.len(), slowest.as_secs_f64());
    jobs.within(&["scale", &format!("statefulset/{name}-loader"), "--replicas=3"])?;
    until_repaired("the replicas of a StatefulSet", || {
        let replicas = jobs.get(&format!("statefulset/{name}-loader"))?["spec"]["replicas"].clone();
        if replicas == 1 { Ok(()) } else { Err(not_yet(format!("there are {replicas}"))) }
    })?;
    Ok(jobs.delete(name)?)
}

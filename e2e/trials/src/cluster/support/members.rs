//! Members of a job: a random one, its pod, the samples that it has trained, and a limit on its
//! processor.

use std::net::SocketAddr;
use std::time::Duration;

use rectrain_bring_up::cgroups::LimitedProcessor;
use rectrain_harness::jobs::Jobs;
use rectrain_harness::waiting::eventually;
use rectrain_harness::{HarnessError, http, not_yet};
use rectrain_random::SplitMix64;

use crate::TrialError;

/// A role, and the number of a member; or the number of its members.
pub(crate) type Member = (&'static str, u32);

/// The pod of a member.
pub(crate) fn pod(job: &str, (role, number): Member) -> String {
    format!("{job}-{role}-{number}")
}

/// Any member of these roles, each with the same probability.
pub(crate) fn any_of(roles: &[Member], random: &mut SplitMix64) -> Member {
    let members: Vec<_> =
        roles.iter().flat_map(|(role, count)| (0..*count).map(move |number| (*role, number))).collect();
    let chosen = members.get(random.remainder(members.len() as u64) as usize);
    chosen.copied().unwrap_or(("coordinator", 0))
}

/// Limits a pod to `percent` of a processor until the value is dropped. Waits for its process at
/// most as long as `patience`.
pub(crate) fn limit(jobs: &Jobs, pod: &str, percent: u32, patience: Duration) -> Result<LimitedProcessor, TrialError> {
    let process = eventually(patience, &format!("the process of {pod}"), || jobs.process_of(pod))?;
    Ok(LimitedProcessor::to(process, percent)?)
}

/// The samples that a dense worker has trained.
pub(crate) fn samples(worker: SocketAddr, patience: Duration) -> Result<f64, HarnessError> {
    eventually(patience, "a dense worker's metrics", || {
        let page = http::get(worker, "/metrics")?;
        http::sum_of(&page, "rectrain_dense_worker_samples_total").ok_or_else(|| not_yet("it has trained no sample"))
    })
}

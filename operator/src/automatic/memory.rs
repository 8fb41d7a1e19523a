//! The memory limit of parameter servers, and the decision after one of them was killed at it.

use jiff::Timestamp;
use rectrain_crds::{DecisionStatus, RecTrainingJob, ResolvedJob};
use rectrain_policy::{Decision, Kill, Subject, Verdict};

use super::policy::policy;
use crate::decisions;
use crate::quantity::value_of;

/// The memory limit of a parameter server in bytes, by the manifest or raised above it. `None` if
/// the manifest sets no limit, or none that can be read.
pub(crate) fn memory_limit(job: &RecTrainingJob) -> Option<u64> {
    let given = given_memory_limit(job)?;
    let attempt = job.status.as_ref().and_then(|status| status.attempt.as_ref());
    Some(attempt.and_then(|attempt| attempt.ps_memory_bytes).map_or(given, |raised| raised.max(given)))
}

/// The memory limit of a parameter server by the manifest, in bytes.
#[must_use]
pub fn given_memory_limit(job: &RecTrainingJob) -> Option<u64> {
    let template = job.spec.roles.as_ref()?.ps.as_ref()?.template.as_ref()?;
    Some(value_of(template.resources.as_ref()?.limits.as_ref()?.get("memory")?)? as u64)
}

/// A parameter server that was killed for its memory.
#[derive(Clone, Copy, Debug)]
pub struct KilledServer {
    /// Its index.
    pub replica: u32,
    /// The number of parameter servers.
    pub servers: u32,
}

/// Decides after a kill for memory, which ends an attempt: the next attempt has more memory or more
/// parameter servers. `None` if the manifest leaves neither to the operator, or if both are at
/// their limit.
#[must_use]
pub fn after_a_kill(
    job: &RecTrainingJob,
    resolved: &ResolvedJob,
    killed: KilledServer,
    now: Timestamp,
) -> Option<DecisionStatus> {
    let policy = policy(resolved)?;
    let KilledServer { replica, servers } = killed;
    let kill = Kill { replica, limit_bytes: memory_limit(job), servers };
    let Verdict::Act { action, reason } = rectrain_policy::after_a_kill(policy.ps.as_ref()?, kill) else {
        return None;
    };
    let at_seconds = u64::try_from(now.as_second()).ok()?;
    decisions::write(&Decision { at_seconds, subject: Subject::Ps, action, reason }, policy.scaling.recommends_only)
}

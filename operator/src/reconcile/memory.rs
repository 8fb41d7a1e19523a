//! The operator's memory about each job. A lost memory costs some calls and some time: a new
//! operator builds it again.

use std::collections::HashMap;

use kube::ResourceExt;
use parking_lot::{Mutex, MutexGuard};
use rectrain_crds::RecTrainingJob;

use super::dry_run::DryRun;
use super::policy_state::PolicyState;
use super::refused_pods::Lacking;
use crate::attempt_signals::AttemptMemory;
use crate::blocked::BlockedMemory;
use crate::contested::ContestedNumbers;
use crate::failure::Problem;
use crate::names::JobName;

/// The memory about one job.
#[derive(Clone, Debug, Default)]
pub struct JobMemory {
    /// The resource version that this operator last read or wrote; empty if that is in doubt.
    version: String,
    /// Why the operator cannot create an object of the job.
    pub(super) obstacle: Option<Problem>,
    /// Signals about its attempt.
    pub(super) attempt: AttemptMemory,
    /// When its members were last blocked.
    pub(super) blocked: BlockedMemory,
    /// The last numbers of replicas in its manifest.
    pub(super) numbers: ContestedNumbers,
    /// Pods that the cluster does not create, or whose containers it does not start.
    pub(super) lacking: Option<Lacking>,
    /// The last dry run of a changed manifest.
    pub(super) dry_run: Option<DryRun>,
    /// The state of automatic decisions. A lost one is restored from the job's status.
    pub(super) policy: Option<PolicyState>,
}

/// The memories about all jobs. Each has one entry, which is dropped with the job.
#[derive(Debug, Default)]
pub struct JobMemories(Mutex<Memories>);

#[derive(Debug, Default)]
struct Memories {
    by_uid: HashMap<String, JobMemory>,
    /// The uid of the job with a name.
    uids: HashMap<JobName, String>,
}

impl JobMemories {
    /// Whether `job`, as a watch has it, is the version that this operator last read or wrote. True
    /// for a job that it has neither read nor written yet, as after the start of its leadership.
    pub(super) fn is_current(&self, job: &RecTrainingJob) -> bool {
        let memories = self.lock();
        let Some(uid) = memories.uids.get(&JobName::of(job)) else { return true };
        let version = memories.by_uid.get(uid).map(|memory| &memory.version);
        job.uid().as_ref() == Some(uid) && version.is_some() && version == job.resource_version().as_ref()
    }

    /// Notes the version of a job that this operator has read or written. The memory about another
    /// job of the same name is dropped.
    pub(super) fn note(&self, job: &RecTrainingJob) {
        let (Some(uid), Some(version)) = (job.uid(), job.resource_version()) else { return };
        let mut memories = self.lock();
        let before = memories.uids.insert(JobName::of(job), uid.clone());
        if let Some(before) = before.filter(|before| *before != uid) {
            memories.by_uid.remove(&before);
        }
        memories.by_uid.entry(uid).or_default().version = version;
    }

    /// The job is not as this operator last knew it: the next reconcile reads it from the API
    /// server.
    pub(super) fn doubt(&self, job: &JobName) {
        let mut memories = self.lock();
        let uid = memories.uids.entry(job.clone()).or_default().clone();
        if let Some(memory) = memories.by_uid.get_mut(&uid) {
            memory.version.clear();
        }
    }

    /// Forgets a job.
    pub(super) fn forget(&self, job: &JobName) {
        let mut memories = self.lock();
        if let Some(uid) = memories.uids.remove(job) {
            memories.by_uid.remove(&uid);
        }
    }

    /// Reads or changes the memory about a job.
    pub(super) fn with<T>(&self, uid: &str, change: impl FnOnce(&mut JobMemory) -> T) -> T {
        change(self.lock().by_uid.entry(uid.to_owned()).or_default())
    }

    fn lock(&self) -> MutexGuard<'_, Memories> {
        self.0.lock()
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn job(uid: &str, version: &str) -> RecTrainingJob {
        let mut job = serde_json::to_value(crate::manifests::load(crate::manifests::AUTOMATIC).job).expect("JSON");
        job["metadata"] = json!({"name": "clicks", "namespace": "ads", "uid": uid, "resourceVersion": version});
        serde_json::from_value(job).expect("a job")
    }

    #[test]
    fn a_job_is_current_in_the_version_last_noted() {
        let memories = JobMemories::default();
        assert!(memories.is_current(&job("1", "7")), "it was never noted");
        memories.note(&job("1", "7"));
        assert!(memories.is_current(&job("1", "7")) && !memories.is_current(&job("1", "6")));
        assert!(!memories.is_current(&job("2", "7")), "another job of the same name");
        memories.doubt(&JobName::new("ads", "clicks"));
        assert!(!memories.is_current(&job("1", "7")));
        memories.forget(&JobName::new("ads", "clicks"));
        assert!(memories.is_current(&job("1", "7")));
        memories.doubt(&JobName::new("ads", "clicks"));
        assert!(!memories.is_current(&job("1", "7")), "it was in doubt before it was noted");
    }

    #[test]
    fn a_memory_is_dropped_with_its_job() {
        let memories = JobMemories::default();
        let lacks = |uid: &str| memories.with(uid, |memory| std::mem::take(&mut memory.version)).is_empty();
        memories.note(&job("1", "7"));
        memories.note(&job("2", "8"));
        assert!(lacks("1") && !lacks("2"), "another job has its name");
        memories.note(&job("2", "9"));
        memories.forget(&JobName::new("ads", "clicks"));
        assert!(lacks("2"));
    }
}

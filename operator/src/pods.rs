//! The facts about a pod that decisions need, taken from its status. Pure. [`crate::failure`] and
//! [`crate::phase`] judge them.

use jiff::Timestamp;
use k8s_openapi::api::core::v1::{ContainerState, ContainerStatus, Pod, PodSpec};
use rectrain_crds::Role;

use crate::names::{ATTEMPT_LABEL, CONTAINER, JOB_UID_LABEL, ROLE_LABEL};
use crate::quantity::value_of;

/// A pod of a job.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PodFacts {
    /// Its name.
    pub name: String,
    /// Its identity. Earlier and later pods may have the same name.
    pub uid: String,
    /// Its role.
    pub role: Role,
    /// The number of its attempt; 0 for a pod of another job.
    pub attempt: u32,
    /// The uid of its job. Earlier versions of the operator did not write it.
    pub job_uid: Option<String>,
    /// Whether it is being deleted.
    pub is_terminating: bool,
    /// The end of its grace period, if it is being deleted.
    pub terminates_by: Option<Timestamp>,
    /// The finalizers that keep its object.
    pub finalizers: Vec<String>,
    /// Whether it is ready.
    pub is_ready: bool,
    /// Since when it is ready.
    pub ready_since: Option<Timestamp>,
    /// Its address, once it has one.
    pub ip: Option<String>,
    /// Its node.
    pub node: Option<String>,
    /// The Secrets with which its node pulls images.
    pub pull_secrets: Vec<String>,
    /// CPU requests of all its containers, in thousandths of a core.
    pub requested_millicores: u64,
    /// Whether the role's container runs.
    pub is_running: bool,
    /// How often the role's container was restarted.
    pub restarts: u32,
    /// Why the scheduler finds no node for it.
    pub unschedulable: Option<String>,
    /// Since when the scheduler finds no node for it.
    pub unschedulable_since: Option<Timestamp>,
    /// Why a container does not start: reason and message.
    pub waiting: Option<(String, String)>,
    /// The last end of the role's container.
    pub ended: Option<Ended>,
    /// Why its node evicted it: reason and message.
    pub evicted: Option<String>,
    /// Why the cluster is about to remove it: the reason of its condition `DisruptionTarget`.
    pub disruption: Option<String>,
}

/// Reasons of `DisruptionTarget` that are intended: a drain, a preemption, or a node's shutdown.
const INTENDED: [&str; 3] = ["EvictionByEvictionAPI", "PreemptionByScheduler", "TerminationByKubelet"];

/// Words in the kubelet's message when a pod exceeded its own limit of disk. The message of a node
/// that is short of memory or disk has none of them.
const OWN_LIMITS: [&str; 2] = ["exceeds the", "exceeded its"];

/// The end of a container.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Ended {
    /// Its exit code.
    pub exit_code: i32,
    /// Whether the kernel killed it at its memory limit.
    pub out_of_memory: bool,
    /// Its termination message.
    pub message: String,
    /// The time.
    pub at: Option<Timestamp>,
}

impl PodFacts {
    /// Its index in its StatefulSet, from 0.
    #[must_use]
    pub fn index(&self) -> Option<u32> {
        self.name.rsplit_once('-')?.1.parse().ok()
    }

    /// Whether its node prepares its containers: it mounts volumes and assigns an address.
    #[must_use]
    pub fn is_being_created(&self) -> bool {
        let is_created =
            |(reason, _): &(String, String)| matches!(reason.as_str(), "ContainerCreating" | "PodInitializing");
        !self.is_terminating && self.waiting.as_ref().is_some_and(is_created)
    }

    /// Whether the cluster removes it for a reason outside of it. Its node is drained, shut down or
    /// short of memory or disk, or a pod of higher priority preempts it. The loss of a node does
    /// not count. Neither does an eviction because the pod exceeded a limit of its own, which
    /// would happen again and again.
    #[must_use]
    pub fn is_displaced(&self) -> bool {
        match self.evicted.as_ref().filter(|why| why.starts_with("Evicted")) {
            Some(why) => !OWN_LIMITS.iter().any(|words| why.contains(words)),
            None => self.disruption.as_deref().is_some_and(|reason| INTENDED.contains(&reason)),
        }
    }

    /// The pod as the job with this uid sees it: a pod of a deleted job of the same name belongs to
    /// no attempt of this job.
    #[must_use]
    pub fn of_job(mut self, job_uid: &str) -> Self {
        if self.job_uid.as_deref().is_some_and(|uid| uid != job_uid) {
            self.attempt = 0;
        }
        self
    }

    /// The facts about a pod. `None` if it lacks the operator's labels.
    #[must_use]
    pub fn of(pod: &Pod) -> Option<Self> {
        let labels = pod.metadata.labels.as_ref()?;
        let status = pod.status.as_ref();
        let containers = status.and_then(|s| s.container_statuses.as_deref()).unwrap_or_default();
        // Containers that the cluster injects (a mesh's proxy, an agent) end and restart by
        // themselves.
        let own = containers.iter().find(|container| container.name == CONTAINER);
        let conditions = status.and_then(|s| s.conditions.as_deref()).unwrap_or_default();
        let condition = |kind: &str| conditions.iter().find(|condition| condition.type_ == kind);
        let ready = condition("Ready").filter(|c| c.status == "True");
        let unschedulable =
            condition("PodScheduled").filter(|c| c.status == "False" && c.reason.as_deref() == Some("Unschedulable"));
        let evicted = status.filter(|s| s.phase.as_deref() == Some("Failed") && s.reason.is_some()).map(|s| {
            format!("{}: {}", s.reason.as_deref().unwrap_or_default(), s.message.as_deref().unwrap_or_default())
        });
        Some(Self {
            name: pod.metadata.name.clone()?,
            uid: pod.metadata.uid.clone().unwrap_or_default(),
            role: Role::named(labels.get(ROLE_LABEL)?)?,
            attempt: labels.get(ATTEMPT_LABEL)?.parse().ok()?,
            job_uid: labels.get(JOB_UID_LABEL).cloned(),
            is_terminating: pod.metadata.deletion_timestamp.is_some(),
            terminates_by: pod.metadata.deletion_timestamp.as_ref().map(|time| time.0),
            finalizers: pod.metadata.finalizers.clone().unwrap_or_default(),
            is_ready: ready.is_some(),
            ready_since: ready.and_then(|c| Some(c.last_transition_time.as_ref()?.0)),
            ip: status.and_then(|s| s.pod_ip.clone()),
            node: pod.spec.as_ref().and_then(|spec| spec.node_name.clone()),
            pull_secrets: pod.spec.as_ref().map(pull_secrets).unwrap_or_default(),
            requested_millicores: pod.spec.as_ref().map_or(0, requested_millicores),
            is_running: own.is_some_and(|c| c.state.as_ref().is_some_and(|state| state.running.is_some())),
            restarts: own.map_or(0, |c| u32::try_from(c.restart_count).unwrap_or(0)),
            unschedulable: unschedulable.map(|c| c.message.clone().unwrap_or_default()),
            unschedulable_since: unschedulable.and_then(|c| Some(c.last_transition_time.as_ref()?.0)),
            waiting: containers.iter().find_map(waiting),
            ended: own.and_then(ended),
            evicted,
            disruption: condition("DisruptionTarget")
                .filter(|c| c.status == "True")
                .map(|c| c.reason.clone().unwrap_or_default()),
        })
    }
}

fn pull_secrets(spec: &PodSpec) -> Vec<String> {
    spec.image_pull_secrets.iter().flatten().map(|secret| secret.name.clone()).collect()
}

fn requested_millicores(spec: &PodSpec) -> u64 {
    let requests = spec.containers.iter().filter_map(|container| container.resources.as_ref()?.requests.as_ref());
    requests.filter_map(|requests| value_of(requests.get("cpu")?)).map(|cores| (cores * 1e3).round() as u64).sum()
}

fn waiting(container: &ContainerStatus) -> Option<(String, String)> {
    let waiting = container.state.as_ref()?.waiting.as_ref()?;
    Some((waiting.reason.clone()?, waiting.message.clone().unwrap_or_default()))
}

/// The end of the container's present run, or of the run before it.
fn ended(container: &ContainerStatus) -> Option<Ended> {
    let of = |state: &Option<ContainerState>| {
        let terminated = state.as_ref()?.terminated.clone()?;
        Some(Ended {
            exit_code: terminated.exit_code,
            out_of_memory: terminated.reason.as_deref() == Some("OOMKilled"),
            message: terminated.message.unwrap_or_default().trim().to_owned(),
            at: terminated.finished_at.map(|time| time.0),
        })
    };
    of(&container.state).or_else(|| of(&container.last_state))
}

#[cfg(test)]
impl PodFacts {
    /// A pod that runs and is ready, for tests.
    pub(crate) fn running(name: &str, role: Role, attempt: u32) -> Self {
        Self {
            name: name.to_owned(),
            uid: "uid".to_owned(),
            role,
            attempt,
            job_uid: None,
            is_terminating: false,
            terminates_by: None,
            finalizers: Vec::new(),
            is_ready: true,
            ready_since: None,
            ip: None,
            node: None,
            pull_secrets: Vec::new(),
            requested_millicores: 0,
            is_running: true,
            restarts: 0,
            unschedulable: None,
            unschedulable_since: None,
            waiting: None,
            ended: None,
            evicted: None,
            disruption: None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_eviction_displaces_a_pod_unless_it_exceeded_its_limit() {
        let is_displaced = |evicted: Option<&str>, disruption: Option<&str>| {
            let pod = PodFacts::running("j-ps-0", Role::Ps, 1);
            let text = |text: Option<&str>| text.map(str::to_owned);
            PodFacts { evicted: text(evicted), disruption: text(disruption), ..pod }.is_displaced()
        };
        let kubelet = Some("TerminationByKubelet");
        for message in [
            "Evicted: The node was low on resource: memory. Threshold quantity: 100Mi, available: 90Mi. ",
            "Evicted: The node had condition: [DiskPressure]. ",
        ] {
            assert!(is_displaced(Some(message), None) && is_displaced(Some(message), kubelet), "{message}");
        }
        for message in [
            "Evicted: Pod ephemeral local storage usage exceeds the total limit of containers 1Gi. ",
            "Evicted: Container rectrain exceeded its local ephemeral storage limit \"1Gi\". ",
            "Evicted: Usage of EmptyDir volume \"tmp\" exceeds the limit \"1Gi\". ",
        ] {
            assert!(!is_displaced(Some(message), None) && !is_displaced(Some(message), kubelet), "{message}");
        }
        assert!(is_displaced(Some("Terminated: Pod was terminated in response to node shutdown."), kubelet));
        assert!(is_displaced(None, Some("EvictionByEvictionAPI")) && !is_displaced(None, None));
        assert!(!is_displaced(None, Some("DeletionByTaintManager")), "its node is lost");
    }
}

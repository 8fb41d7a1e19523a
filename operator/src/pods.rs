//! What the operator wants to know of a pod, taken out of the pod's status. Pure; [`crate::failure`] and [`crate::phase`] judge it.

use jiff::Timestamp;
use k8s_openapi::api::core::v1::{ContainerState, ContainerStatus, Pod, PodSpec};

use crate::names::{ATTEMPT_LABEL, CONTAINER, JOB_UID_LABEL, ROLE_LABEL, Role};
use crate::quantity::value_of;

/// A pod of a job.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PodFacts {
    /// Its name.
    pub name: String,
    /// Tells it from other pods that had its name or will have it.
    pub uid: String,
    /// What it does.
    pub role: Role,
    /// The attempt it is of; 0 for none of the job's.
    pub attempt: u32,
    /// The uid of the job it is of; earlier versions did not write it down.
    pub job_uid: Option<String>,
    /// Whether it is being deleted.
    pub is_leaving: bool,
    /// By when it should be gone then: its grace period is over.
    pub gone_by: Option<Timestamp>,
    /// Whether it is ready.
    pub is_ready: bool,
    /// Its address, once it has one.
    pub ip: Option<String>,
    /// The node that it is on.
    pub node: Option<String>,
    /// Thousandths of a core that all its containers request.
    pub requested_millicores: u64,
    /// Whether the role's container runs.
    pub is_running: bool,
    /// How often that was started again.
    pub restarts: u32,
    /// Why no node takes it.
    pub unschedulable: Option<String>,
    /// Since when none does.
    pub unschedulable_since: Option<Timestamp>,
    /// Why a container does not start: reason and message.
    pub waiting: Option<(String, String)>,
    /// How the role's container last ended, if it has.
    pub ended: Option<Ended>,
    /// Why the node put it out: reason and message.
    pub evicted: Option<String>,
    /// Why it has to go for another pod or for the sake of its node, if it has to: the reason of its condition `DisruptionTarget`.
    pub put_out: Option<String>,
}

/// Reasons of `DisruptionTarget` that somebody stands behind.
const INTENDED: [&str; 3] = ["EvictionByEvictionAPI", "PreemptionByScheduler", "TerminationByKubelet"];

/// How a container ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Ended {
    /// Its exit code.
    pub exit_code: i32,
    /// Whether it had used up its memory.
    pub out_of_memory: bool,
    /// Its last words.
    pub message: String,
    /// When.
    pub at: Option<Timestamp>,
}

impl PodFacts {
    /// Which of its role's pods it is, from 0: the number that its StatefulSet gave it.
    #[must_use]
    pub fn index(&self) -> Option<u32> {
        self.name.rsplit_once('-')?.1.parse().ok()
    }

    /// Whether its node is about to begin its containers: it mounts volumes, and gives it an address.
    #[must_use]
    pub fn is_being_created(&self) -> bool {
        let is_created =
            |(reason, _): &(String, String)| matches!(reason.as_str(), "ContainerCreating" | "PodInitializing");
        !self.is_leaving && self.waiting.as_ref().is_some_and(is_created)
    }

    /// Whether somebody means it to go: its node is drained or shut down, or another pod is more important. A node that is lost is
    /// nobody's intention, and what a node evicts for what it uses would end again and again.
    #[must_use]
    pub fn makes_way(&self) -> bool {
        let is_meant = self.put_out.as_deref().is_some_and(|reason| INTENDED.contains(&reason));
        is_meant && !self.evicted.as_ref().is_some_and(|why| why.starts_with("Evicted"))
    }

    /// As the job with this uid has it: a pod of a deleted job of the same name is of no attempt of its own.
    #[must_use]
    pub fn of_job(mut self, job_uid: &str) -> Self {
        if self.job_uid.as_deref().is_some_and(|uid| uid != job_uid) {
            self.attempt = 0;
        }
        self
    }

    /// Of a pod of the operator's; none for a pod that lacks its labels.
    #[must_use]
    pub fn of(pod: &Pod) -> Option<Self> {
        let labels = pod.metadata.labels.as_ref()?;
        let status = pod.status.as_ref();
        let containers = status.and_then(|s| s.container_statuses.as_deref()).unwrap_or_default();
        // What a cluster puts beside it (a mesh's proxy, an agent) ends and starts again by itself.
        let own = containers.iter().find(|container| container.name == CONTAINER);
        let conditions = status.and_then(|s| s.conditions.as_deref()).unwrap_or_default();
        let condition = |kind: &str| conditions.iter().find(|condition| condition.type_ == kind);
        let unschedulable =
            condition("PodScheduled").filter(|c| c.status == "False" && c.reason.as_deref() == Some("Unschedulable"));
        let evicted = status.filter(|s| s.phase.as_deref() == Some("Failed") && s.reason.is_some()).map(|s| {
            format!("{}: {}", s.reason.as_deref().unwrap_or_default(), s.message.as_deref().unwrap_or_default())
        });
        Some(Self {
            name: pod.metadata.name.clone()?,
            uid: pod.metadata.uid.clone().unwrap_or_default(),
            role: Role::from_name(labels.get(ROLE_LABEL)?)?,
            attempt: labels.get(ATTEMPT_LABEL)?.parse().ok()?,
            job_uid: labels.get(JOB_UID_LABEL).cloned(),
            is_leaving: pod.metadata.deletion_timestamp.is_some(),
            gone_by: pod.metadata.deletion_timestamp.as_ref().map(|time| time.0),
            is_ready: condition("Ready").is_some_and(|c| c.status == "True"),
            ip: status.and_then(|s| s.pod_ip.clone()),
            node: pod.spec.as_ref().and_then(|spec| spec.node_name.clone()),
            requested_millicores: pod.spec.as_ref().map_or(0, requested_millicores),
            is_running: own.is_some_and(|c| c.state.as_ref().is_some_and(|state| state.running.is_some())),
            restarts: own.map_or(0, |c| u32::try_from(c.restart_count).unwrap_or(0)),
            unschedulable: unschedulable.map(|c| c.message.clone().unwrap_or_default()),
            unschedulable_since: unschedulable.and_then(|c| Some(c.last_transition_time.as_ref()?.0)),
            waiting: containers.iter().find_map(waiting),
            ended: own.and_then(ended),
            evicted,
            put_out: condition("DisruptionTarget")
                .filter(|c| c.status == "True")
                .map(|c| c.reason.clone().unwrap_or_default()),
        })
    }
}

fn requested_millicores(spec: &PodSpec) -> u64 {
    let requests = spec.containers.iter().filter_map(|container| container.resources.as_ref()?.requests.as_ref());
    requests.filter_map(|requests| value_of(requests.get("cpu")?)).map(|cores| (cores * 1e3).round() as u64).sum()
}

fn waiting(container: &ContainerStatus) -> Option<(String, String)> {
    let waiting = container.state.as_ref()?.waiting.as_ref()?;
    Some((waiting.reason.clone()?, waiting.message.clone().unwrap_or_default()))
}

/// The end that is shown is the present one, or else the last one before the present run.
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

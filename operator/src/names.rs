//! Names and labels of everything that belongs to a job. Builders write them, and readers select by
//! them.

use std::collections::BTreeMap;

use kube::ResourceExt;
use rectrain_crds::{PodTemplate, RecTrainingJobSpec, ResolvedJob, Role};

/// The one field owner of everything that the operator applies.
pub const FIELD_MANAGER: &str = "rectrain-operator";
/// Selects everything that the operator has created.
pub const MANAGED_BY_SELECTOR: &str = "app.kubernetes.io/managed-by=rectrain-operator";
/// Label: the job that an object belongs to.
pub const JOB_LABEL: &str = "rectrain.dev/job";
/// Label: the role of a pod or of another object.
pub const ROLE_LABEL: &str = "rectrain.dev/role";
/// Label of pods: the number of their attempt.
pub const ATTEMPT_LABEL: &str = "rectrain.dev/attempt";
/// Label of pods: the uid of their job. It tells them from pods of a deleted job of the same name.
pub const JOB_UID_LABEL: &str = "rectrain.dev/job-uid";
/// The container of a pod that does the role's work. Other containers say nothing about the job.
pub const CONTAINER: &str = "rectrain";
/// Annotation: the digest of the applied object.
pub const APPLIED_ANNOTATION: &str = "rectrain.dev/applied-hash";

/// Label: the RecModelServer that an object belongs to.
pub const SERVER_LABEL: &str = "rectrain.dev/model-server";
/// Label of pods: the uid of their RecModelServer.
pub const SERVER_UID_LABEL: &str = "rectrain.dev/model-server-uid";
/// Label of the pods of a RecModelServer's canary.
pub const CANARY_LABEL: &str = "rectrain.dev/canary";
/// Label of a RecModelServer's pods: the global step of their model.
pub const STEP_LABEL: &str = "rectrain.dev/step";
/// Label of a shard's pods: the RecModelServer whose rows they have. They lack [`SERVER_LABEL`],
/// because the servers' Service selects by it.
pub const ROWS_LABEL: &str = "rectrain.dev/model-rows";
/// Label of a shard's objects and pods: its number.
pub const SHARD_LABEL: &str = "rectrain.dev/shard";
/// Unprivileged UID and GID of pods; must match the runtime image.
pub const USER: i64 = 65532;

/// Port for calls between members of a job.
pub const MEMBER_PORT: u16 = 7000;
/// Port for the operator's requests to a coordinator (gRPC).
pub const CONTROL_PORT: u16 = 7001;
/// Port of `/metrics`, `/healthz` and `/readyz` in every process.
pub const METRICS_PORT: u16 = 9090;

/// Port of REST, health and `/metrics` in a model's servers.
pub const REST_PORT: u16 = 8080;
/// Port of gRPC in a model's servers.
pub const GRPC_PORT: u16 = 9000;
/// Port of look-ups in a shard. Its health and `/metrics` are at [`REST_PORT`].
pub const ROWS_PORT: u16 = 8090;

/// Namespace and name of a job, or of a RecModelServer.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct JobName {
    /// The namespace.
    pub namespace: String,
    /// The name.
    pub name: String,
}

impl JobName {
    /// The job `name` of `namespace`.
    #[must_use]
    pub fn new(namespace: &str, name: &str) -> Self {
        Self { namespace: namespace.to_owned(), name: name.to_owned() }
    }

    /// The namespace and name of an object.
    #[must_use]
    pub fn of(object: &impl ResourceExt) -> Self {
        Self { namespace: object.namespace().unwrap_or_default(), name: object.name_any() }
    }
}

impl std::fmt::Display for JobName {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}/{}", self.namespace, self.name)
    }
}

/// The number of a role's replicas in the manifest.
#[must_use]
pub fn manifest_replicas(role: Role, job: &ResolvedJob) -> u32 {
    let replicas = job.roles.members.get(role).map_or(1, |of_role| of_role.replicas);
    u32::try_from(replicas).unwrap_or(u32::MAX)
}

/// The user's template of a role's pods.
#[must_use]
pub fn pod_template(role: Role, spec: &RecTrainingJobSpec) -> Option<&PodTemplate> {
    spec.roles.as_ref()?.template(role)
}

/// The name of a role's StatefulSet, Service and PodDisruptionBudget.
#[must_use]
pub fn of_role(job: &str, role: Role) -> String {
    format!("{job}-{}", role.name())
}

/// The name of the ConfigMap of the manifest with this digest. The digest includes the training
/// mode.
#[must_use]
pub fn config_map(job: &str, manifest_hash: &str) -> String {
    format!("{job}-{}", manifest_hash.get(..10).unwrap_or(manifest_hash))
}

/// The name of the job's ServiceAccount and NetworkPolicy.
#[must_use]
pub fn of_job(job: &str) -> String {
    format!("{job}-rectrain")
}

/// The name of the Secret of the job's certificate.
#[must_use]
pub fn certificate(job: &str) -> String {
    format!("{job}-certificate")
}

/// Labels of everything that belongs to a job.
#[must_use]
pub fn job_labels(job: &str) -> BTreeMap<String, String> {
    labels(&[
        ("app.kubernetes.io/name", "rectrain"),
        ("app.kubernetes.io/instance", job),
        ("app.kubernetes.io/managed-by", FIELD_MANAGER),
        (JOB_LABEL, job),
    ])
}

/// Labels of everything that belongs to one role of a job.
#[must_use]
pub fn role_labels(job: &str, role: Role) -> BTreeMap<String, String> {
    let mut all = job_labels(job);
    all.extend(labels(&[("app.kubernetes.io/component", role.name()), (ROLE_LABEL, role.name())]));
    all
}

/// Labels that select the pods of one role of a job.
#[must_use]
pub fn pod_selector(job: &str, role: Role) -> BTreeMap<String, String> {
    labels(&[(JOB_LABEL, job), (ROLE_LABEL, role.name())])
}

/// The name of all objects of a RecModelServer, except the canary's Deployment and the shards'
/// objects.
#[must_use]
pub fn of_server(server: &str) -> String {
    format!("{server}-server")
}

/// The name of the Deployment of a RecModelServer's canary.
#[must_use]
pub fn of_canary(server: &str) -> String {
    format!("{server}-canary")
}

/// The name of the NetworkPolicy of a RecModelServer's shards, and the start of the names of the
/// shards' objects.
#[must_use]
pub fn of_rows(server: &str) -> String {
    format!("{server}-rows")
}

/// The name of a shard's StatefulSet, Service and PodDisruptionBudget.
#[must_use]
pub fn of_shard(server: &str, shard: u32) -> String {
    format!("{}-{shard}", of_rows(server))
}

/// The address of the look-ups of a shard's pod, within its namespace.
#[must_use]
pub fn rows_address(server: &str, shard: u32, pod: u32) -> String {
    let name = of_shard(server, shard);
    format!("{name}-{pod}.{name}:{ROWS_PORT}")
}

/// Labels of everything that belongs to a RecModelServer.
#[must_use]
pub fn server_labels(server: &str) -> BTreeMap<String, String> {
    labels(&[
        ("app.kubernetes.io/name", "rectrain"),
        ("app.kubernetes.io/instance", server),
        ("app.kubernetes.io/component", "server"),
        ("app.kubernetes.io/managed-by", FIELD_MANAGER),
        (SERVER_LABEL, server),
    ])
}

/// Labels that select the pods of a RecModelServer, the canary's included.
#[must_use]
pub fn server_selector(server: &str) -> BTreeMap<String, String> {
    labels(&[(SERVER_LABEL, server)])
}

/// Labels that select the pods of a RecModelServer's canary.
#[must_use]
pub fn canary_selector(server: &str) -> BTreeMap<String, String> {
    labels(&[(SERVER_LABEL, server), (CANARY_LABEL, "true")])
}

/// Labels that select the pods of all shards of a RecModelServer.
#[must_use]
pub fn rows_selector(server: &str) -> BTreeMap<String, String> {
    labels(&[(ROWS_LABEL, server)])
}

/// Labels that select the pods of a shard.
#[must_use]
pub fn shard_selector(server: &str, shard: u32) -> BTreeMap<String, String> {
    labels(&[(ROWS_LABEL, server), (SHARD_LABEL, &shard.to_string())])
}

/// Labels of a shard's pods.
#[must_use]
pub fn shard_labels(server: &str, shard: u32) -> BTreeMap<String, String> {
    let mut all = server_labels(server);
    all.remove(SERVER_LABEL);
    all.extend(labels(&[("app.kubernetes.io/component", "rows")]));
    all.extend(shard_selector(server, shard));
    all
}

fn labels(pairs: &[(&str, &str)]) -> BTreeMap<String, String> {
    pairs.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Names of pods are label values and host names, and so are names of a StatefulSet's
    /// revisions: `NAME-` and ten characters. Names of Services are host names, too.
    #[test]
    fn the_longest_job_name_leaves_room_for_pod_names() {
        let (job, namespace) = ("j".repeat(35), "n".repeat(63));
        for role in Role::ALL {
            let name = of_role(&job, role);
            assert!(format!("{name}-9999").len() <= 63, "{name}");
            assert!(format!("{name}-5d4c8f7b99").len() <= 63, "{name}");
            // DNS names have 253 characters.
            assert!(format!("{name}-9999.{name}.{namespace}.svc.cluster.local").len() <= 253, "{name}");
        }
        let of_the_job = [of_job(&job), certificate(&job), config_map(&job, "0123456789abcdef")];
        assert!(of_the_job.iter().all(|name| name.len() <= 63), "{of_the_job:?}");
        let mut labels = job_labels(&job).into_iter().chain(role_labels(&job, Role::EmbeddingWorker));
        assert!(labels.all(|(_, value)| value.len() <= 63));
    }

    /// A Deployment's pods are named `NAME-`, ten characters, `-` and five characters.
    #[test]
    fn the_longest_server_name_leaves_room_for_pod_names() {
        let server = "s".repeat(35);
        let deployments = [of_server(&server), of_canary(&server)];
        assert!(deployments.iter().all(|name| format!("{name}-5d4c8f7b99-abcde").len() <= 63));
        assert!(server_labels(&server).values().all(|value| value.len() <= 63));
        // A StatefulSet's pods and revisions are named `NAME-`, and a number or ten characters.
        let shard = of_shard(&server, 99);
        assert!(format!("{shard}-9").len() <= 63 && format!("{shard}-5d4c8f7b99").len() <= 63);
        assert!(shard_labels(&server, 99).values().all(|value| value.len() <= 63));
        let selected = server_selector(&server);
        assert!(selected.iter().all(|(label, value)| server_labels(&server).get(label) == Some(value)));
    }

    /// The servers' Service, Deployment and PodDisruptionBudget select by the server's label alone.
    #[test]
    fn the_pods_of_a_shard_are_not_selected_as_servers() {
        let pods = shard_labels("clicks", 1);
        assert!(server_selector("clicks").iter().any(|(label, value)| pods.get(label) != Some(value)));
        for selector in [rows_selector("clicks"), shard_selector("clicks", 1)] {
            assert!(selector.iter().all(|(label, value)| pods.get(label) == Some(value)), "{selector:?}");
        }
        assert!(shard_selector("clicks", 0).iter().any(|(label, value)| pods.get(label) != Some(value)));
        assert_eq!(rows_address("clicks", 1, 0), "clicks-rows-1-0.clicks-rows-1:8090");
    }
}

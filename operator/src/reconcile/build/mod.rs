//! The fifth step, pure: the objects that a job should have, each built in a file of its own. What is built is a function of the
//! manifest, the attempt and the installation alone, so building twice gives the same.

mod config_map;
mod network_policy;
mod pod_disruption_budget;
mod secret;
mod service;
mod service_account;
mod stateful_set;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ObjectMeta, OwnerReference};
use kube::{Resource, ResourceExt};
use rectrain_crds::{AttemptReplicas, AttemptStatus, RecTrainingJob, RecTrainingJobSpec, ResolvedJob};
use serde::Serialize;

use crate::certificates::JobCertificate;
use crate::config::OperatorConfig;
use crate::members;
use crate::names::{self, Role};
use crate::phase::{Decision, Run, wanted_mode};
use crate::reconcile::kinds::{Kind, Wanted};
use crate::reconcile::validate::{in_mode, manifest_hash, with_replicas};

/// Everything that builders read.
#[derive(Clone, Debug)]
pub struct Plan<'a> {
    /// The job.
    pub job: &'a RecTrainingJob,
    /// Its manifest in the training mode and with the members that the attempt starts with: what a pod that comes later
    /// reads, whatever has become of them meanwhile. While there are pods nothing else of it changes; a job that holds may have been
    /// changed since.
    pub spec: RecTrainingJobSpec,
    /// The same, resolved.
    pub resolved: ResolvedJob,
    /// Digest of `spec`.
    pub manifest_hash: String,
    /// The attempt that its pods are of.
    pub attempt: AttemptStatus,
    /// Pods of members that there have to be now.
    pub replicas: AttemptReplicas,
    /// The certificate of its members, if its pods speak with them only.
    pub certificate: Option<JobCertificate>,
    /// Whether pods should be there.
    pub has_pods: bool,
    /// The installation.
    pub config: &'a OperatorConfig,
}

impl<'a> Plan<'a> {
    /// For what was decided.
    #[must_use]
    pub fn new(
        job: &'a RecTrainingJob,
        resolved: &ResolvedJob,
        decision: &Decision,
        certificate: Option<JobCertificate>,
        config: &'a OperatorConfig,
    ) -> Self {
        let attempt = decision.status.attempt.clone().unwrap_or_default();
        let mode = attempt.mode.as_ref().map_or_else(|| wanted_mode(job), |mode| mode.started);
        let replicas = attempt.replicas.unwrap_or_else(|| members::starting(job.status.as_ref(), resolved, None));
        let spec = with_replicas(in_mode(&job.spec, mode), |role| members::of(&replicas, role).map(|r| r.started));
        // Nothing else that a manifest means depends on these.
        let mut resolved = resolved.clone();
        resolved.training.mode = mode;
        resolved.roles.ps.replicas = replicas.ps.started as usize;
        resolved.roles.embedding_worker.replicas = replicas.embedding_worker.started as usize;
        resolved.roles.dense_worker.replicas = replicas.dense_worker.started as usize;
        resolved.roles.loader.replicas = replicas.loader.started as usize;
        // What the operator decides may change under a job, and what its pods read may not.
        resolved.training.auto = None;
        resolved.autoscaling = None;
        let manifest_hash = manifest_hash(&spec);
        let has_pods = decision.run == Run::Go;
        Self { job, spec, resolved, manifest_hash, attempt, replicas, certificate, has_pods, config }
    }

    /// The pods that a role has.
    fn replicas(&self, role: Role) -> u32 {
        match members::of(&self.replicas, role) {
            _ if !self.has_pods => 0,
            Some(of_role) => of_role.needed,
            None => role.replicas(&self.resolved),
        }
    }

    fn name(&self) -> String {
        self.job.name_any()
    }

    fn namespace(&self) -> String {
        self.job.namespace().unwrap_or_default()
    }

    fn owner(&self) -> Option<Vec<OwnerReference>> {
        self.job.controller_owner_ref(&()).map(|owner| vec![owner])
    }

    fn metadata(&self, name: String, labels: std::collections::BTreeMap<String, String>) -> ObjectMeta {
        ObjectMeta {
            name: Some(name),
            namespace: self.job.namespace(),
            labels: Some(labels),
            owner_references: self.owner(),
            ..ObjectMeta::default()
        }
    }
}

/// All objects of a job, in the order in which they are made.
///
/// # Errors
/// If one cannot be written as JSON.
pub fn objects(plan: &Plan<'_>) -> Result<Vec<Wanted>, serde_json::Error> {
    let mut all = vec![
        wanted(Kind::ServiceAccount, &service_account::build(plan))?,
        wanted(Kind::ConfigMap, &config_map::build(plan)?)?,
        wanted(Kind::NetworkPolicy, &network_policy::build(plan))?,
    ];
    if let Some(certificate) = &plan.certificate {
        all.push(wanted(Kind::Secret, &secret::build(plan, certificate))?);
    }
    for role in Role::ALL {
        all.push(wanted(Kind::Service, &service::build(plan, role))?);
        all.push(wanted(Kind::PodDisruptionBudget, &pod_disruption_budget::build(plan, role))?);
        all.push(wanted(Kind::StatefulSet, &stateful_set::build(plan, role)?)?);
    }
    all.sort_by_key(|object| object.kind);
    Ok(all)
}

fn wanted<T: Serialize>(kind: Kind, object: &T) -> Result<Wanted, serde_json::Error> {
    Ok(Wanted::new(kind, serde_json::to_value(object)?))
}

/// The host name of the coordinator's pod, which its headless Service gives it.
fn coordinator_host(plan: &Plan<'_>) -> String {
    let service = names::of_role(&plan.name(), Role::Coordinator);
    format!("{service}-0.{service}.{}.svc", plan.namespace())
}

#[cfg(test)]
mod tests;

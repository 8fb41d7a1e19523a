//! Builds the objects of a job, each in a file of its own. Pure: they depend only on the manifest,
//! the attempt and the installation, so a second build gives the same objects.

mod config_map;
mod network_policy;
mod pod_disruption_budget;
mod secret;
mod service;
mod service_account;
mod stateful_set;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::{ObjectMeta, OwnerReference};
use kube::{Resource, ResourceExt};
use rectrain_crds::{
    AttemptReplicas, AttemptStatus, RecTrainingJob, RecTrainingJobSpec, ReplacedPod, ResolvedJob, Role,
};
use serde::Serialize;

use crate::budget;
use crate::certificates::JobCertificate;
use crate::config::OperatorConfig;
use crate::members;
use crate::names::{self, manifest_replicas};
use crate::objects::{Kind, Wanted};
use crate::phase::{Decision, Run, wanted_mode};
use crate::reconcile::validate::{in_mode, manifest_hash, with_replicas};

/// The input of the builders.
#[derive(Clone, Debug)]
pub struct Plan<'a> {
    /// The job.
    pub job: &'a RecTrainingJob,
    /// Its manifest with the attempt's initial training mode and members, which pods of the whole
    /// attempt read. While pods run, the rest of it does not change. The manifest of a suspended
    /// job may change.
    pub spec: RecTrainingJobSpec,
    /// The same, resolved.
    pub resolved: ResolvedJob,
    /// Digest of `spec`.
    pub manifest_hash: String,
    /// The attempt of its pods.
    pub attempt: AttemptStatus,
    /// The members of each role.
    pub replicas: AttemptReplicas,
    /// The certificate of its members, if its pods accept only members.
    pub certificate: Option<JobCertificate>,
    /// Whether its pods should exist.
    pub has_pods: bool,
    /// Its slow pods that were replaced. New pods avoid their nodes.
    pub replaced_pods: Vec<ReplacedPod>,
    /// The installation.
    pub config: &'a OperatorConfig,
}

impl<'a> Plan<'a> {
    /// The plan of a decision.
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
        let mut spec = with_replicas(in_mode(&job.spec, mode), |role| replicas.get(role).map(|r| r.started));
        if let Some(budget) = attempt.budget {
            spec.features.memory = Some(budget::for_pods(budget));
        }
        // No other resolved setting depends on these.
        let mut resolved = resolved.clone();
        resolved.training.mode = mode;
        for role in Role::MEMBERS {
            if let (Some(resolved), Some(of_role)) = (resolved.roles.members.get_mut(role), replicas.get(role)) {
                resolved.replicas = of_role.started as usize;
            }
        }
        // Settings of automatic decisions may change during an attempt, and the pods' manifest may
        // not.
        resolved.training.auto = None;
        resolved.autoscaling = None;
        let manifest_hash = manifest_hash(&spec);
        let has_pods = decision.run == Run::Go;
        let replaced_pods = decision.status.replaced_pods.clone();
        Self { job, spec, resolved, manifest_hash, attempt, replicas, certificate, has_pods, replaced_pods, config }
    }

    /// The number of a role's pods.
    fn replicas(&self, role: Role) -> u32 {
        match self.replicas.get(role) {
            _ if !self.has_pods => 0,
            Some(of_role) => of_role.needed,
            None => manifest_replicas(role, &self.resolved),
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

/// All objects of a job, in the order of their creation.
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

/// The host name of the coordinator's pod, by its headless Service.
fn coordinator_host(plan: &Plan<'_>) -> String {
    let service = names::of_role(&plan.name(), Role::Coordinator);
    format!("{service}-0.{service}.{}.svc", plan.namespace())
}

#[cfg(test)]
mod tests;

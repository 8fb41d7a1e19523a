//! The kinds of objects that belong to a job, and one such object in the form that all of them share: JSON.

use k8s_openapi::api::apps::v1::StatefulSet;
use k8s_openapi::api::core::v1::{ConfigMap, Secret, Service, ServiceAccount};
use k8s_openapi::api::networking::v1::NetworkPolicy;
use k8s_openapi::api::policy::v1::PodDisruptionBudget;
use kube::api::{ApiResource, DynamicObject};
use serde_json::Value;

use crate::names::APPLIED_ANNOTATION;

/// What the operator makes for a job, in the order in which it is made.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Kind {
    /// Whom the pods run as.
    ServiceAccount,
    /// The manifest that the pods read.
    ConfigMap,
    /// The certificate by which the pods know each other.
    Secret,
    /// The names by which pods find each other.
    Service,
    /// Who may call the pods.
    NetworkPolicy,
    /// How many pods may be taken away at a time.
    PodDisruptionBudget,
    /// The pods.
    StatefulSet,
}

impl Kind {
    /// All of them, in the order in which they are made.
    pub const ALL: [Self; 7] = [
        Self::ServiceAccount,
        Self::ConfigMap,
        Self::Secret,
        Self::Service,
        Self::NetworkPolicy,
        Self::PodDisruptionBudget,
        Self::StatefulSet,
    ];

    /// How the API server knows it.
    #[must_use]
    pub fn resource(self) -> ApiResource {
        match self {
            Self::ServiceAccount => ApiResource::erase::<ServiceAccount>(&()),
            Self::ConfigMap => ApiResource::erase::<ConfigMap>(&()),
            Self::Secret => ApiResource::erase::<Secret>(&()),
            Self::Service => ApiResource::erase::<Service>(&()),
            Self::NetworkPolicy => ApiResource::erase::<NetworkPolicy>(&()),
            Self::PodDisruptionBudget => ApiResource::erase::<PodDisruptionBudget>(&()),
            Self::StatefulSet => ApiResource::erase::<StatefulSet>(&()),
        }
    }

    /// Its name in messages.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::ServiceAccount => "ServiceAccount",
            Self::ConfigMap => "ConfigMap",
            Self::Secret => "Secret",
            Self::Service => "Service",
            Self::NetworkPolicy => "NetworkPolicy",
            Self::PodDisruptionBudget => "PodDisruptionBudget",
            Self::StatefulSet => "StatefulSet",
        }
    }
}

/// An object that should be there.
#[derive(Clone, Debug, PartialEq)]
pub struct Wanted {
    /// Its kind.
    pub kind: Kind,
    /// Its name.
    pub name: String,
    /// All of it, as it is applied.
    pub body: Value,
}

impl Wanted {
    /// The digest that the object carries.
    #[must_use]
    pub fn hash(&self) -> &str {
        self.body["metadata"]["annotations"][APPLIED_ANNOTATION].as_str().unwrap_or_default()
    }
}

/// An object that belongs to the job, as it stands.
#[derive(Clone, Debug, PartialEq)]
pub struct Owned {
    /// Its kind.
    pub kind: Kind,
    /// Its name.
    pub name: String,
    /// Its identity, which another object of the same name does not have.
    pub uid: String,
    /// Whether it is being deleted.
    pub is_leaving: bool,
    /// All of it.
    pub body: Value,
}

impl Owned {
    /// Of an object whose controller is the job with `job_uid`.
    #[must_use]
    pub fn of(kind: Kind, object: &DynamicObject, job_uid: &str) -> Option<Self> {
        let metadata = &object.metadata;
        let owners = metadata.owner_references.as_deref().unwrap_or_default();
        if !owners.iter().any(|owner| owner.uid == job_uid && owner.controller == Some(true)) {
            return None;
        }
        Some(Self {
            kind,
            name: metadata.name.clone()?,
            uid: metadata.uid.clone()?,
            is_leaving: metadata.deletion_timestamp.is_some(),
            body: serde_json::to_value(object).ok()?,
        })
    }
}

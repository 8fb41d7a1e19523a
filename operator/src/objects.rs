//! The kinds of objects of jobs and of model servers, and an object of any kind as JSON.

use k8s_openapi::api::apps::v1::{Deployment, StatefulSet};
use k8s_openapi::api::autoscaling::v2::HorizontalPodAutoscaler;
use k8s_openapi::api::core::v1::{ConfigMap, Secret, Service, ServiceAccount};
use k8s_openapi::api::networking::v1::NetworkPolicy;
use k8s_openapi::api::policy::v1::PodDisruptionBudget;
use kube::api::{ApiResource, DynamicObject, ObjectMeta};
use serde::Serialize;
use serde_json::Value;

use crate::digest::digest;
use crate::names::APPLIED_ANNOTATION;

/// The kinds of objects that the operator applies, in the order of their creation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Kind {
    /// The account of the pods.
    ServiceAccount,
    /// The manifest that the pods read.
    ConfigMap,
    /// The certificate with which the pods authenticate each other.
    Secret,
    /// The DNS names of the pods.
    Service,
    /// The permitted callers of the pods.
    NetworkPolicy,
    /// The number of pods that a drain may evict at a time.
    PodDisruptionBudget,
    /// The pods of a job, or of a RecModelServer's shard.
    StatefulSet,
    /// The pods of a RecModelServer.
    Deployment,
    /// The number of pods of a RecModelServer, by their load.
    HorizontalPodAutoscaler,
}

impl Kind {
    /// All kinds of a job's objects, in the order of their creation.
    pub const ALL: [Self; 7] = [
        Self::ServiceAccount,
        Self::ConfigMap,
        Self::Secret,
        Self::Service,
        Self::NetworkPolicy,
        Self::PodDisruptionBudget,
        Self::StatefulSet,
    ];

    /// The API resource.
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
            Self::Deployment => ApiResource::erase::<Deployment>(&()),
            Self::HorizontalPodAutoscaler => ApiResource::erase::<HorizontalPodAutoscaler>(&()),
        }
    }

    /// The name in messages.
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
            Self::Deployment => "Deployment",
            Self::HorizontalPodAutoscaler => "HorizontalPodAutoscaler",
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
    /// The object, as it is applied.
    pub body: Value,
}

impl Wanted {
    /// An object as it is applied: with the digest of everything else in it.
    #[must_use]
    pub fn new(kind: Kind, mut body: Value) -> Self {
        let name = body["metadata"]["name"].as_str().unwrap_or_default().to_owned();
        if let Some(metadata) = body["metadata"].as_object_mut() {
            let annotations = metadata.remove("annotations");
            let mut annotations = annotations.and_then(|given| given.as_object().cloned()).unwrap_or_default();
            annotations.remove(APPLIED_ANNOTATION);
            if !annotations.is_empty() {
                metadata.insert("annotations".to_owned(), Value::Object(annotations));
            }
        }
        let hash = digest(&body);
        body["metadata"]["annotations"][APPLIED_ANNOTATION] = Value::String(hash);
        Self { kind, name, body }
    }

    /// Whether it is a StatefulSet without pods.
    #[must_use]
    pub fn has_no_pods(&self) -> bool {
        self.kind == Kind::StatefulSet && self.body["spec"]["replicas"] == 0
    }

    /// The digest that the object carries.
    #[must_use]
    pub fn hash(&self) -> &str {
        self.body["metadata"]["annotations"][APPLIED_ANNOTATION].as_str().unwrap_or_default()
    }
}

/// An existing object of the job.
#[derive(Clone, Debug, PartialEq)]
pub struct Owned {
    /// Its kind.
    pub kind: Kind,
    /// Its name.
    pub name: String,
    /// Its identity. Earlier and later objects may have the same name.
    pub uid: String,
    /// Whether it is being deleted.
    pub is_terminating: bool,
    /// The object.
    pub body: Value,
}

/// An object as the operator's watches cache it: as text, until a reconcile of its job reads it.
#[derive(Clone, Debug)]
pub struct ObjectText {
    name: String,
    uid: String,
    /// The uid of its controller.
    controller: String,
    is_terminating: bool,
    text: Box<str>,
}

/// An object with its kind. The API server omits the kind of the items of a list.
#[derive(Serialize)]
#[serde(rename_all = "camelCase")]
struct Typed<'a> {
    api_version: String,
    kind: &'static str,
    metadata: &'a ObjectMeta,
    #[serde(flatten)]
    data: &'a Value,
}

impl ObjectText {
    /// The text of an object. `None` if it has no controller.
    #[must_use]
    pub fn of(kind: Kind, object: &DynamicObject) -> Option<Self> {
        let metadata = &object.metadata;
        let owners = metadata.owner_references.as_deref().unwrap_or_default();
        let controller = owners.iter().find(|owner| owner.controller == Some(true))?;
        let (api_version, data) = (kind.resource().api_version, &object.data);
        let typed = Typed { api_version, kind: kind.name(), metadata, data };
        Some(Self {
            name: metadata.name.clone()?,
            uid: metadata.uid.clone()?,
            controller: controller.uid.clone(),
            is_terminating: metadata.deletion_timestamp.is_some(),
            text: serde_json::to_string(&typed).ok()?.into_boxed_str(),
        })
    }

    /// The object, if the job with `job_uid` is its controller.
    #[must_use]
    pub fn owned(&self, kind: Kind, job_uid: &str) -> Option<Owned> {
        if self.controller != job_uid {
            return None;
        }
        Some(Owned {
            kind,
            name: self.name.clone(),
            uid: self.uid.clone(),
            is_terminating: self.is_terminating,
            body: serde_json::from_str(&self.text).ok()?,
        })
    }
}

impl Owned {
    /// The object, if the job with `job_uid` is its controller.
    #[must_use]
    pub fn of(kind: Kind, object: &DynamicObject, job_uid: &str) -> Option<Self> {
        ObjectText::of(kind, object)?.owned(kind, job_uid)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn an_item_of_a_list_has_its_kind() {
        let owner = json!({"apiVersion": "rectrain.dev/v1alpha1", "kind": "RecTrainingJob", "name": "a", "uid": "1", "controller": true});
        let item = json!({"metadata": {"name": "x", "uid": "2", "ownerReferences": [owner]}, "spec": {"replicas": 1}});
        let item: DynamicObject = serde_json::from_value(item).expect("an item");
        let owned = Owned::of(Kind::StatefulSet, &item, "1").expect("an object of the job");
        assert_eq!((&owned.body["apiVersion"], &owned.body["kind"]), (&json!("apps/v1"), &json!("StatefulSet")));
        assert_eq!((&owned.body["spec"], &owned.body["metadata"]["name"]), (&json!({"replicas": 1}), &json!("x")));
        assert!(Owned::of(Kind::StatefulSet, &item, "3").is_none());
    }
}

//! What the operator's watches keep of what they see: of an object its text, of a pod its facts. As a tree, a StatefulSet takes some
//! twenty times the memory of its text, and a thousand jobs have five thousand of them.

use std::borrow::Cow;
use std::collections::BTreeMap;

use kube::api::{ApiResource, ObjectMeta};
use kube::core::Resource;
use kube::runtime::reflector::{Lookup, Store};
use kube::runtime::watcher::Event;
use rectrain_crds::RecTrainingJob;

use crate::names::JOB_LABEL;
use crate::pods::PodFacts;
use crate::reconcile::kinds::{Kind, ObjectText};

/// What the watches have seen.
#[derive(Clone)]
pub struct Caches {
    /// Objects by kind.
    pub objects: BTreeMap<Kind, Store<Entry<ObjectText>>>,
    /// Pods.
    pub pods: Store<Entry<PodFacts>>,
}

/// One object that a watch has seen, and what is kept of it.
#[derive(Clone, Debug)]
pub struct Entry<T> {
    namespace: String,
    name: String,
    /// The job that owns it, and the one that its label names: somebody may have changed either.
    pub jobs: Vec<String>,
    /// None if it lacks what makes it a job's.
    pub kept: Option<T>,
}

impl<T> Entry<T> {
    /// Of an object of which `kept` is kept.
    #[must_use]
    pub fn new(metadata: &ObjectMeta, kept: Option<T>) -> Self {
        Self {
            namespace: metadata.namespace.clone().unwrap_or_default(),
            name: metadata.name.clone().unwrap_or_default(),
            jobs: jobs_of(metadata),
            kept,
        }
    }

    /// Its namespace.
    #[must_use]
    pub fn namespace(&self) -> &str {
        &self.namespace
    }

    /// What is kept of it, if it may belong to this job.
    #[must_use]
    pub fn of_job(&self, namespace: &str, job: &str) -> Option<&T> {
        let is_of = self.namespace == namespace && self.jobs.iter().any(|name| name == job);
        self.kept.as_ref().filter(|_| is_of)
    }
}

fn jobs_of(metadata: &ObjectMeta) -> Vec<String> {
    let owners = metadata.owner_references.iter().flatten();
    let owners =
        owners.filter(|owner| owner.kind == <RecTrainingJob as Resource>::kind(&())).map(|owner| owner.name.clone());
    let label = metadata.labels.iter().flatten().filter(|(key, _)| *key == JOB_LABEL).map(|(_, job)| job.clone());
    let mut names: Vec<String> = owners.chain(label).collect();
    names.dedup();
    names
}

/// The event with what is kept of its object.
pub fn keep<K, T>(event: Event<K>, entry: impl Fn(&mut K) -> Entry<T>) -> Event<Entry<T>> {
    match event {
        Event::Apply(mut object) => Event::Apply(entry(&mut object)),
        Event::Delete(mut object) => Event::Delete(entry(&mut object)),
        Event::Init => Event::Init,
        Event::InitApply(mut object) => Event::InitApply(entry(&mut object)),
        Event::InitDone => Event::InitDone,
    }
}

impl<T> Lookup for Entry<T> {
    type DynamicType = ApiResource;

    fn kind(resource: &ApiResource) -> Cow<'_, str> {
        Cow::Borrowed(&resource.kind)
    }

    fn group(resource: &ApiResource) -> Cow<'_, str> {
        Cow::Borrowed(&resource.group)
    }

    fn version(resource: &ApiResource) -> Cow<'_, str> {
        Cow::Borrowed(&resource.version)
    }

    fn plural(resource: &ApiResource) -> Cow<'_, str> {
        Cow::Borrowed(&resource.plural)
    }

    fn name(&self) -> Option<Cow<'_, str>> {
        Some(Cow::Borrowed(&self.name))
    }

    fn namespace(&self) -> Option<Cow<'_, str>> {
        Some(Cow::Borrowed(&self.namespace))
    }

    fn resource_version(&self) -> Option<Cow<'_, str>> {
        None
    }

    fn uid(&self) -> Option<Cow<'_, str>> {
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_object_is_of_its_owner_and_of_the_job_that_its_label_names() {
        let metadata: ObjectMeta = serde_json::from_value(serde_json::json!({
            "namespace": "n", "labels": {JOB_LABEL: "b"},
            "ownerReferences": [{"apiVersion": "rectrain.dev/v1alpha1", "kind": "RecTrainingJob", "name": "a", "uid": "1"}],
        }))
        .expect("metadata");
        let entry = Entry::new(&metadata, Some(1));
        assert_eq!(entry.jobs, ["a", "b"]);
        assert_eq!(entry.of_job("n", "a"), Some(&1));
        assert_eq!(entry.of_job("n", "b"), Some(&1));
        assert_eq!(entry.of_job("n", "c"), None);
        assert_eq!(entry.of_job("m", "a"), None);
    }
}

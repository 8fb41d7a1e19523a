//! Caches of the operator's watches: the text of an object, the facts about a pod.
//!
//! A parsed StatefulSet takes some twenty times the memory of its text, and a thousand jobs have
//! five thousand of them. Entries are found by job, so that a reconcile does not search the objects
//! of other jobs.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use kube::api::ObjectMeta;
use kube::core::Resource;
use kube_runtime::watcher::Event;
use parking_lot::RwLock;
use rectrain_crds::RecTrainingJob;
use tokio::sync::watch;

use crate::names::JOB_LABEL;
use crate::objects::{Kind, ObjectText};
use crate::pods::PodFacts;

/// The caches of all watches.
#[derive(Clone)]
pub struct Caches {
    /// Objects by kind.
    pub objects: BTreeMap<Kind, Cache<ObjectText>>,
    /// Pods.
    pub pods: Cache<PodFacts>,
}

/// An object from a watch, reduced to its cached value.
#[derive(Clone, Debug)]
pub struct Entry<T> {
    namespace: String,
    name: String,
    /// The job that owns it, and the job that its label names. Another client may have changed
    /// either.
    jobs: Vec<String>,
    /// `None` if the object cannot belong to a job.
    value: Option<Arc<T>>,
}

impl<T> Entry<T> {
    /// An entry of an object with this value.
    #[must_use]
    pub fn new(metadata: &ObjectMeta, value: Option<T>) -> Self {
        Self {
            namespace: metadata.namespace.clone().unwrap_or_default(),
            name: metadata.name.clone().unwrap_or_default(),
            jobs: jobs_of(metadata),
            value: value.map(Arc::new),
        }
    }

    /// Its namespace.
    #[must_use]
    pub fn namespace(&self) -> &str {
        &self.namespace
    }

    /// The jobs that it may belong to.
    #[must_use]
    pub fn jobs(&self) -> &[String] {
        &self.jobs
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

/// The event with its object reduced to an entry.
pub fn reduce<K, T>(event: Event<K>, entry: impl Fn(&mut K) -> Entry<T>) -> Event<Entry<T>> {
    match event {
        Event::Apply(mut object) => Event::Apply(entry(&mut object)),
        Event::Delete(mut object) => Event::Delete(entry(&mut object)),
        Event::Init => Event::Init,
        Event::InitApply(mut object) => Event::InitApply(entry(&mut object)),
        Event::InitDone => Event::InitDone,
    }
}

/// The cache of a watch, for readers.
#[derive(Clone, Debug)]
pub struct Cache<T> {
    state: Arc<RwLock<State<T>>>,
    is_complete: watch::Receiver<bool>,
}

/// The writing end of a [`Cache`], for its watch.
#[derive(Debug)]
pub struct CacheWriter<T> {
    state: Arc<RwLock<State<T>>>,
    is_complete: watch::Sender<bool>,
}

#[derive(Debug)]
struct State<T> {
    now: Objects<T>,
    /// The list of a restarted watch so far. Readers see the objects from before until the list is
    /// complete.
    listed: Objects<T>,
}

#[derive(Debug)]
struct Objects<T> {
    /// By namespace and job, then by name.
    by_job: HashMap<[String; 2], BTreeMap<String, Arc<T>>>,
    /// The jobs of each object, by namespace and name.
    jobs: HashMap<[String; 2], Vec<String>>,
}

/// An empty cache.
#[must_use]
pub fn empty<T>() -> (CacheWriter<T>, Cache<T>) {
    let state = Arc::new(RwLock::new(State { now: Objects::default(), listed: Objects::default() }));
    let (complete, is_complete) = watch::channel(false);
    (CacheWriter { state: Arc::clone(&state), is_complete: complete }, Cache { state, is_complete })
}

impl<T> CacheWriter<T> {
    /// Applies an event of the watch.
    pub fn apply(&self, event: &Event<Entry<T>>) {
        let mut state = self.state.write();
        match event {
            Event::Apply(entry) => state.now.put(entry),
            Event::Delete(entry) => state.now.remove(entry),
            Event::Init => state.listed = Objects::default(),
            Event::InitApply(entry) => state.listed.put(entry),
            Event::InitDone => {
                state.now = std::mem::take(&mut state.listed);
                self.is_complete.send_replace(true);
            }
        }
    }
}

impl<T> Cache<T> {
    /// Waits for the first complete list. False if the watch ends before.
    pub async fn is_complete(&self) -> bool {
        self.is_complete.clone().wait_for(|is_complete| *is_complete).await.is_ok()
    }

    /// The values of the objects that may belong to this job, in the order of their names.
    #[must_use]
    pub fn of_job(&self, namespace: &str, job: &str) -> Vec<Arc<T>> {
        let state = self.state.read();
        let of_job = state.now.by_job.get(&[namespace.to_owned(), job.to_owned()]);
        of_job.into_iter().flat_map(BTreeMap::values).cloned().collect()
    }
}

impl<T> Default for Objects<T> {
    fn default() -> Self {
        Self { by_job: HashMap::new(), jobs: HashMap::new() }
    }
}

impl<T> Objects<T> {
    fn put(&mut self, entry: &Entry<T>) {
        self.remove(entry);
        let Some(value) = &entry.value else { return };
        for job in &entry.jobs {
            let of_job = self.by_job.entry([entry.namespace.clone(), job.clone()]).or_default();
            of_job.insert(entry.name.clone(), Arc::clone(value));
        }
        self.jobs.insert([entry.namespace.clone(), entry.name.clone()], entry.jobs.clone());
    }

    /// Removes an object from all its jobs. They may differ from the jobs of the entry.
    fn remove(&mut self, entry: &Entry<T>) {
        for job in self.jobs.remove(&[entry.namespace.clone(), entry.name.clone()]).into_iter().flatten() {
            let key = [entry.namespace.clone(), job];
            let Some(of_job) = self.by_job.get_mut(&key) else { continue };
            of_job.remove(&entry.name);
            if of_job.is_empty() {
                self.by_job.remove(&key);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn entry(name: &str, owner: &str, label: &str, value: u32) -> Entry<u32> {
        let metadata: ObjectMeta = serde_json::from_value(serde_json::json!({
            "namespace": "n", "name": name, "labels": {JOB_LABEL: label},
            "ownerReferences": [{"apiVersion": "rectrain.dev/v1alpha1", "kind": "RecTrainingJob", "name": owner, "uid": "1"}],
        }))
        .expect("metadata");
        Entry::new(&metadata, Some(value))
    }

    fn of(cache: &Cache<u32>, job: &str) -> Vec<u32> {
        cache.of_job("n", job).iter().map(|value| **value).collect()
    }

    #[test]
    fn an_object_belongs_to_its_owner_and_to_its_labels_job() {
        let (writer, cache) = empty();
        writer.apply(&Event::Apply(entry("x", "a", "b", 1)));
        assert_eq!((of(&cache, "a"), of(&cache, "b"), of(&cache, "c")), (vec![1], vec![1], vec![]));
        assert!(cache.of_job("m", "a").is_empty());
    }

    #[test]
    fn a_moved_or_deleted_object_leaves_its_jobs() {
        let (writer, cache) = empty();
        writer.apply(&Event::Apply(entry("y", "a", "a", 2)));
        writer.apply(&Event::Apply(entry("x", "a", "a", 1)));
        assert_eq!(of(&cache, "a"), [1, 2]);
        writer.apply(&Event::Apply(entry("x", "a", "b", 3)));
        writer.apply(&Event::Apply(entry("y", "c", "c", 4)));
        assert_eq!((of(&cache, "a"), of(&cache, "b"), of(&cache, "c")), (vec![3], vec![3], vec![4]));
        writer.apply(&Event::Delete(entry("x", "d", "d", 3)));
        assert_eq!((of(&cache, "a"), of(&cache, "b")), (vec![], vec![]));
        writer.apply(&Event::Apply(Entry { value: None, ..entry("y", "c", "c", 5) }));
        assert!(of(&cache, "c").is_empty());
        let state = cache.state.read();
        assert!(state.now.by_job.is_empty() && state.now.jobs.is_empty(), "no entry is left");
    }

    #[tokio::test]
    async fn a_restarted_watch_removes_nothing_before_its_list_is_complete() {
        let (writer, cache) = empty();
        writer.apply(&Event::Init);
        writer.apply(&Event::InitApply(entry("x", "a", "a", 1)));
        assert!(of(&cache, "a").is_empty() && !*cache.is_complete.borrow());
        writer.apply(&Event::InitDone);
        assert!(cache.is_complete().await);
        writer.apply(&Event::Init);
        writer.apply(&Event::InitApply(entry("y", "a", "a", 2)));
        assert_eq!(of(&cache, "a"), [1]);
        writer.apply(&Event::InitDone);
        assert_eq!(of(&cache, "a"), [2]);
    }

    #[tokio::test]
    async fn a_watch_that_ends_early_ends_the_wait_for_its_list() {
        let (writer, cache) = empty::<u32>();
        drop(writer);
        assert!(!cache.is_complete().await);
    }
}

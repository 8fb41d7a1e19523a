//! What the operator's watches keep of what they see: of an object its text, of a pod its facts. As a tree, a StatefulSet takes some
//! twenty times the memory of its text, and a thousand jobs have five thousand of them. It is found by job, so that a reconcile does
//! not look through what belongs to others.

use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, PoisonError, RwLock};

use kube::api::ObjectMeta;
use kube::core::Resource;
use kube::runtime::watcher::Event;
use rectrain_crds::RecTrainingJob;
use tokio::sync::watch;

use crate::names::JOB_LABEL;
use crate::pods::PodFacts;
use crate::reconcile::kinds::{Kind, ObjectText};

/// What the watches have seen.
#[derive(Clone)]
pub struct Caches {
    /// Objects by kind.
    pub objects: BTreeMap<Kind, Seen<ObjectText>>,
    /// Pods.
    pub pods: Seen<PodFacts>,
}

/// One object that a watch has seen, and what is kept of it.
#[derive(Clone, Debug)]
pub struct Entry<T> {
    namespace: String,
    name: String,
    /// The job that owns it, and the one that its label names: somebody may have changed either.
    jobs: Vec<String>,
    /// None if it lacks what makes it a job's.
    kept: Option<Arc<T>>,
}

impl<T> Entry<T> {
    /// Of an object of which `kept` is kept.
    #[must_use]
    pub fn new(metadata: &ObjectMeta, kept: Option<T>) -> Self {
        Self {
            namespace: metadata.namespace.clone().unwrap_or_default(),
            name: metadata.name.clone().unwrap_or_default(),
            jobs: jobs_of(metadata),
            kept: kept.map(Arc::new),
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

/// What one watch has seen, for its readers.
#[derive(Clone, Debug)]
pub struct Seen<T> {
    state: Arc<RwLock<State<T>>>,
    is_whole: watch::Receiver<bool>,
}

/// The watch's own end of [`Seen`].
#[derive(Debug)]
pub struct Notes<T> {
    state: Arc<RwLock<State<T>>>,
    is_whole: watch::Sender<bool>,
}

#[derive(Debug)]
struct State<T> {
    now: Objects<T>,
    /// What a watch that begins again has listed so far; until it has listed all, what it saw before counts.
    listed: Objects<T>,
}

#[derive(Debug)]
struct Objects<T> {
    /// By namespace and job, then by name.
    by_job: HashMap<[String; 2], BTreeMap<String, Arc<T>>>,
    /// The jobs of each object, by namespace and name.
    jobs: HashMap<[String; 2], Vec<String>>,
}

/// For a watch that has seen nothing yet.
#[must_use]
pub fn empty<T>() -> (Notes<T>, Seen<T>) {
    let state = Arc::new(RwLock::new(State { now: Objects::default(), listed: Objects::default() }));
    let (whole, is_whole) = watch::channel(false);
    (Notes { state: Arc::clone(&state), is_whole: whole }, Seen { state, is_whole })
}

impl<T> Notes<T> {
    /// Takes note of what the watch says.
    pub fn take(&self, event: &Event<Entry<T>>) {
        let mut state = self.state.write().unwrap_or_else(PoisonError::into_inner);
        match event {
            Event::Apply(entry) => state.now.put(entry),
            Event::Delete(entry) => state.now.remove(entry),
            Event::Init => state.listed = Objects::default(),
            Event::InitApply(entry) => state.listed.put(entry),
            Event::InitDone => {
                state.now = std::mem::take(&mut state.listed);
                self.is_whole.send_replace(true);
            }
        }
    }
}

impl<T> Seen<T> {
    /// Waits until everything that is there has been seen once. Gives whether that can still be: false if the watch has ended before.
    pub async fn is_whole(&self) -> bool {
        self.is_whole.clone().wait_for(|is_whole| *is_whole).await.is_ok()
    }

    /// What is kept of the objects that may belong to this job, in the order of their names.
    #[must_use]
    pub fn of_job(&self, namespace: &str, job: &str) -> Vec<Arc<T>> {
        let state = self.state.read().unwrap_or_else(PoisonError::into_inner);
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
        let Some(kept) = &entry.kept else { return };
        for job in &entry.jobs {
            let of_job = self.by_job.entry([entry.namespace.clone(), job.clone()]).or_default();
            of_job.insert(entry.name.clone(), Arc::clone(kept));
        }
        self.jobs.insert([entry.namespace.clone(), entry.name.clone()], entry.jobs.clone());
    }

    /// The jobs that it was of before it changed may be others.
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

    fn entry(name: &str, owner: &str, label: &str, kept: u32) -> Entry<u32> {
        let metadata: ObjectMeta = serde_json::from_value(serde_json::json!({
            "namespace": "n", "name": name, "labels": {JOB_LABEL: label},
            "ownerReferences": [{"apiVersion": "rectrain.dev/v1alpha1", "kind": "RecTrainingJob", "name": owner, "uid": "1"}],
        }))
        .expect("metadata");
        Entry::new(&metadata, Some(kept))
    }

    fn of(seen: &Seen<u32>, job: &str) -> Vec<u32> {
        seen.of_job("n", job).iter().map(|kept| **kept).collect()
    }

    #[test]
    fn an_object_is_of_its_owner_and_of_the_job_that_its_label_names() {
        let (notes, seen) = empty();
        notes.take(&Event::Apply(entry("x", "a", "b", 1)));
        assert_eq!((of(&seen, "a"), of(&seen, "b"), of(&seen, "c")), (vec![1], vec![1], vec![]));
        assert!(seen.of_job("m", "a").is_empty());
    }

    #[test]
    fn an_object_that_changes_hands_or_goes_is_its_jobs_no_more() {
        let (notes, seen) = empty();
        notes.take(&Event::Apply(entry("y", "a", "a", 2)));
        notes.take(&Event::Apply(entry("x", "a", "a", 1)));
        assert_eq!(of(&seen, "a"), [1, 2]);
        notes.take(&Event::Apply(entry("x", "a", "b", 3)));
        notes.take(&Event::Apply(entry("y", "c", "c", 4)));
        assert_eq!((of(&seen, "a"), of(&seen, "b"), of(&seen, "c")), (vec![3], vec![3], vec![4]));
        notes.take(&Event::Delete(entry("x", "d", "d", 3)));
        assert_eq!((of(&seen, "a"), of(&seen, "b")), (vec![], vec![]));
        notes.take(&Event::Apply(Entry { kept: None, ..entry("y", "c", "c", 5) }));
        assert!(of(&seen, "c").is_empty());
        let state = seen.state.read().unwrap();
        assert!(state.now.by_job.is_empty() && state.now.jobs.is_empty(), "nothing is left of them");
    }

    #[tokio::test]
    async fn a_watch_that_begins_again_takes_nothing_away_before_it_has_listed_all() {
        let (notes, seen) = empty();
        notes.take(&Event::Init);
        notes.take(&Event::InitApply(entry("x", "a", "a", 1)));
        assert!(of(&seen, "a").is_empty() && !*seen.is_whole.borrow());
        notes.take(&Event::InitDone);
        assert!(seen.is_whole().await);
        notes.take(&Event::Init);
        notes.take(&Event::InitApply(entry("y", "a", "a", 2)));
        assert_eq!(of(&seen, "a"), [1]);
        notes.take(&Event::InitDone);
        assert_eq!(of(&seen, "a"), [2]);
    }

    #[tokio::test]
    async fn a_watch_that_ends_before_it_has_listed_all_keeps_nobody_waiting() {
        let (notes, seen) = empty::<u32>();
        drop(notes);
        assert!(!seen.is_whole().await);
    }
}

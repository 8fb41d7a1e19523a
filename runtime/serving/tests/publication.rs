//! Checkpoints become publications, and publications become the models of their checkpoints, to the
//! bit. Files that are missing, cut short or of another model are refused, and the model before
//! them stays.

#![allow(clippy::unwrap_used, reason = "an unwrap in a test is an assertion")]

use std::collections::BTreeMap;
use std::num::{NonZeroU32, NonZeroUsize};
use std::path::Path;
use std::sync::{Arc, Mutex};

use rectrain_checkpoint::{
    Base, Begin, Checkpoint, CheckpointWriter, DensePart, Manifest, SlotSet, save_dense, save_rows,
};
use rectrain_embedding::{FeatureKey, GroupId, LeastCount, Missing, SaveScope, Slot, Store};
use rectrain_protocol::plan::JobPlan;
use rectrain_serving::publication::{
    Base as PublishedBase, DenseFollower, Follower, Published, Publisher, RowChanges, ServedVersion,
};
use rectrain_serving::{
    ExportType, GroupContent, KeyRange, Model, ServingError, digest_of_content, export, load_export,
};
use rectrain_storage::Directory;
use serde_json::json;

const JOB: &str = "
apiVersion: rectrain.dev/v1alpha1
kind: RecTrainingJob
metadata: {name: test}
spec:
  model: {kind: deepfm, embeddingDim: 4, hidden: [8]}
  features:
    sparse: [{name: user}, {name: item, dim: 4}]
    dense: [{name: age}]
  data: {train: {paths: ['d/*.csv']}}
";

fn plan(sets: &[(&str, &str)]) -> JobPlan {
    let text = sets.iter().fold(JOB.to_owned(), |text, (from, to)| text.replace(from, to));
    JobPlan::new(&rectrain_crds::load(&text, "test.yaml", &[]).unwrap().resolved).unwrap()
}

fn key(number: u64) -> FeatureKey {
    FeatureKey(number.wrapping_mul(0x9e37_79b9_7f4a_7c15))
}

/// A trained job without roles, its checkpoint path, and its publication path.
struct Job {
    plan: JobPlan,
    store: Arc<Store>,
    parameters: Vec<f32>,
    step: u64,
    last: Option<Manifest>,
    place: tempfile::TempDir,
}

impl Job {
    fn new() -> Self {
        Self::of(plan(&[]))
    }

    fn of(plan: JobPlan) -> Self {
        let store = Arc::new(Store::new(plan.store.clone()).unwrap());
        store.track_changes(true);
        let parameters = vec![0.25; plan.dense_parameters().unwrap()];
        Self { plan, store, parameters, step: 0, last: None, place: tempfile::tempdir().unwrap() }
    }

    fn directory(&self, name: &str) -> Directory {
        Directory::open(self.place.path().join(name).to_str().unwrap(), &BTreeMap::new(), true).unwrap()
    }

    fn file(&self, name: &str) -> std::path::PathBuf {
        self.place.path().join("published").join(name)
    }

    /// The names in the publication path, sorted.
    fn published_names(&self) -> Vec<String> {
        let entries = std::fs::read_dir(self.file("")).unwrap();
        let mut names: Vec<String> = entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
        names.sort();
        names
    }

    /// Updates or creates the rows of these numbers, and the dense parameters.
    fn train(&mut self, numbers: std::ops::Range<u64>) {
        self.step += 10;
        for (group, spec) in (0..).map(GroupId).zip(&self.plan.store.groups) {
            for number in numbers.clone() {
                self.store.lookup(group, &[key(number)], Missing::Insert, &mut vec![0.0; spec.dim]).unwrap();
                let gradient = vec![number as f32 / 7.0 - 1.0; spec.dim];
                self.store.update(group, &[key(number)], &gradient, self.step).unwrap();
            }
        }
        for (place, parameter) in self.parameters.iter_mut().enumerate() {
            *parameter += (place as f32 + 1.0) / (self.step as f32 + 100.0);
        }
    }

    fn evict(&self, number: u64) {
        for group in 0..self.plan.store.groups.len() {
            assert!(self.store.remove(GroupId(group as u16), key(number)).unwrap(), "{number} has no row");
        }
    }

    /// Saves a checkpoint: a full one, or the changes since the last one.
    async fn save(&mut self, full: bool) -> Manifest {
        let directory = self.directory("checkpoints");
        let base = self.last.as_ref().filter(|_| !full);
        let begin = Begin {
            step: self.step,
            base: base.map(|base| Base { directory: base.directory(), id: base.id }),
            slots: self.plan.store.slots,
            identity: self.plan.identity(),
            info: BTreeMap::from([("job".to_owned(), json!("test"))]),
        };
        let writer = CheckpointWriter::begin(&directory, begin).await.unwrap();
        let ticket = writer.ticket();
        let scope = ticket.base.as_ref().map_or(SaveScope::Everything, |b| SaveScope::ChangesSince(b.id.save_id()));
        let frozen = Arc::new(self.store.freeze(ticket.id.save_id(), scope).unwrap());
        let slots = SlotSet::new((0..self.plan.store.slots).map(Slot));
        let part = DensePart {
            offset: 0,
            parameters: self.parameters.clone(),
            optimizer: "sgd".to_owned(),
            state: Vec::new(),
            update_count: self.step,
        };
        let files = vec![
            save_rows(&directory, ticket, 0, &frozen, &slots).await.unwrap(),
            save_dense(&directory, ticket, 0, &part).await.unwrap(),
        ];
        let manifest = writer.commit(files).await.unwrap();
        Arc::into_inner(frozen).unwrap().complete();
        self.last = Some(manifest.clone());
        manifest
    }

    async fn publisher(&self) -> Publisher {
        let (checkpoints, output) = (self.directory("checkpoints"), self.directory("published"));
        Publisher::open(checkpoints, output, "test", NonZeroUsize::new(2).unwrap()).await.unwrap()
    }

    async fn follower(&self) -> Follower {
        let (follower, update) = Follower::open(self.directory("published")).await.unwrap();
        assert!(update.stopped.is_none(), "{:?}", update.stopped);
        follower
    }

    /// The served model equals the last checkpoint: its values, its digest, and a full export of
    /// both, byte for byte.
    async fn assert_served(&self, follower: &Follower) {
        self.assert_served_thin(follower, None).await;
    }

    /// As [`Self::assert_served`], without the rows of fewer examples.
    async fn assert_served_thin(&self, follower: &Follower, least: Option<LeastCount>) {
        let name = self.last.as_ref().unwrap().directory();
        let checkpoint = Checkpoint::open(&self.directory("checkpoints"), &name).await.unwrap();
        let expected = Model::thin_of_checkpoint(&checkpoint, least).await.unwrap();
        let version = follower.version();
        assert_eq!(version.model.step, expected.step);
        assert_eq!(version.model.tables, expected.tables);
        assert_eq!(version.model.parameters, expected.parameters);
        let folders = ["own", "other"].map(|folder| self.place.path().join(folder));
        for (model, folder) in [&*version.model, &expected].into_iter().zip(&folders) {
            export(model, folder, ExportType::F32).unwrap();
        }
        for file in ["model.json", "rows-0.bin", "dense.bin", "tower.onnx"] {
            let [own, other] = folders.each_ref().map(|folder| std::fs::read(folder.join(file)).unwrap());
            assert!(own == other, "{file} differs");
        }
        let stated = content_digest(&folders[1]);
        assert_eq!(version.content_digest, stated);
        assert_eq!(load_export(&folders[1]).unwrap().content_digest(), stated);
        folders.iter().for_each(|folder| std::fs::remove_dir_all(folder).unwrap());
    }
}

fn content_digest(export: &Path) -> String {
    let model: serde_json::Value = serde_json::from_slice(&std::fs::read(export.join("model.json")).unwrap()).unwrap();
    model["contentDigest"].as_str().unwrap().to_owned()
}

/// Publishes the newest checkpoint, and the full model that belongs to it.
async fn published(job: &Job, publisher: &mut Publisher) -> Published {
    let mut published = publisher.publish().await.unwrap().expect("there is a new checkpoint");
    assert_eq!(published.not_deleted, None);
    if let Some(full) = published.full.take() {
        let written = full.write(&job.directory("checkpoints"), &job.directory("published")).await.unwrap();
        assert_eq!(written.sequence(), published.sequence);
        publisher.announce_full(written).await.unwrap();
    }
    published
}

#[tokio::test]
async fn a_follower_serves_each_published_checkpoint_to_the_bit() {
    let mut job = Job::new();
    job.train(0..40);
    job.save(true).await;
    let mut publisher = job.publisher().await;
    let full = published(&job, &mut publisher).await;
    let rows = 40 * job.plan.store.groups.len() as u64;
    assert_eq!((full.sequence, full.step, full.rows, full.is_full), (1, 10, rows, true));
    assert_eq!(publisher.publish().await.unwrap(), None);
    let mut follower = job.follower().await;
    job.assert_served(&follower).await;
    assert!(follower.poll().await.unwrap().is_none());

    job.train(30..50);
    job.evict(3);
    job.save(false).await;
    let delta = published(&job, &mut publisher).await;
    assert_eq!((delta.sequence, delta.is_full, delta.coalesced), (2, false, 0));
    assert!(delta.rows < rows, "a delta has changed rows only: {}", delta.rows);
    let before = Arc::clone(&follower.version().model);
    let update = follower.poll().await.unwrap().unwrap();
    assert_eq!((update.loaded, update.deltas), (false, 1));
    assert!(follower.version().model.tables.iter().all(|table| table.row(key(3).0).is_none()));
    assert!(before.tables.iter().all(|table| table.row(key(3).0).is_some()), "a model in use has changed");
    job.assert_served(&follower).await;

    // The publisher was late: one delta has the changes of two checkpoints. A row returns.
    job.train(0..5);
    job.evict(45);
    job.save(false).await;
    job.train(2..4);
    job.evict(0);
    job.save(false).await;
    // Another process continues.
    let delta = published(&job, &mut job.publisher().await).await;
    assert_eq!((delta.sequence, delta.is_full, delta.coalesced), (3, false, 1));
    follower.poll().await.unwrap().unwrap();
    job.assert_served(&follower).await;
    job.assert_served(&job.follower().await).await;
}

/// Servers take the changes at once. The files of the full model are written meanwhile.
#[tokio::test]
async fn a_full_checkpoint_is_published_as_its_changes_first() {
    let mut job = Job::new();
    job.train(0..40);
    job.save(true).await;
    let mut publisher = job.publisher().await;
    let all = published(&job, &mut publisher).await.rows;
    let mut follower = job.follower().await;
    job.train(30..50);
    job.evict(3);
    job.save(true).await;
    let mut changes = publisher.publish().await.unwrap().unwrap();
    assert_eq!((changes.sequence, changes.is_full, changes.rows), (2, false, all / 2), "20 of 40 rows");
    let update = follower.poll().await.unwrap().unwrap();
    assert_eq!((update.loaded, update.deltas), (false, 1));
    job.assert_served(&follower).await;

    // A delta on a full model that is not announced yet. The files of the full one stay.
    let full = changes.full.take().unwrap();
    let written = full.write(&job.directory("checkpoints"), &job.directory("published")).await.unwrap();
    job.train(10..12);
    job.save(false).await;
    assert!(!published(&job, &mut publisher).await.is_full);
    follower.poll().await.unwrap().unwrap();
    job.assert_served(&follower).await;
    publisher.announce_full(written).await.unwrap();
    assert!(follower.poll().await.unwrap().is_none(), "it has the same model");
    assert_eq!(job.follower().await.version().base, follower.version().base);
    std::fs::remove_dir_all(job.file("full-000000000001")).unwrap();
    job.assert_served(&job.follower().await).await;

    // The publisher is late: the full checkpoint, and the changes on it.
    job.train(0..9);
    job.evict(20);
    job.save(true).await;
    let slot = rectrain_embedding::slot_of(key(7), job.plan.store.slots);
    job.store.clear_slot(slot).unwrap();
    job.train(7..8);
    job.save(false).await;
    let changes = published(&job, &mut publisher).await;
    assert_eq!((changes.sequence, changes.is_full, changes.coalesced), (4, false, 1));
    follower.poll().await.unwrap().unwrap();
    job.assert_served(&follower).await;
    job.assert_served(&job.follower().await).await;
}

#[tokio::test]
async fn a_full_model_that_cannot_be_written_is_given_up() {
    let mut job = Job::new();
    job.train(0..4);
    job.save(true).await;
    let mut publisher = job.publisher().await;
    published(&job, &mut publisher).await;
    job.train(0..4);
    job.save(true).await;
    let full = publisher.publish().await.unwrap().unwrap().full.unwrap();
    std::fs::create_dir(job.file("full-000000000002")).unwrap();
    std::fs::write(job.file("full-000000000002/rows-0.bin"), "cut short").unwrap();
    // The job began anew, so the checkpoint is another one.
    std::fs::remove_dir_all(job.place.path().join("checkpoints")).unwrap();
    job.save(true).await;
    let failed = full.write(&job.directory("checkpoints"), &job.directory("published")).await.unwrap_err();
    assert!(failed.to_string().contains("was replaced while the full model 2"), "{failed}");
    publisher.give_up_full();
    let next = published(&job, &mut publisher).await;
    assert_eq!((next.sequence, next.rows), (3, 0), "no row has changed");
    assert!(!job.file("full-000000000002").exists());
    job.assert_served(&job.follower().await).await;
}

/// Requests are predicted while deltas are applied.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_reader_sees_whole_versions_only_while_deltas_are_applied() {
    let mut job = Job::new();
    job.train(0..400);
    job.save(true).await;
    let mut publisher = job.publisher().await;
    published(&job, &mut publisher).await;
    let mut follower = job.follower().await;
    let newest = Arc::new(Mutex::new(Some(follower.version().clone())));
    let shared = Arc::clone(&newest);
    let reader = std::thread::spawn(move || {
        let mut seen = Vec::new();
        loop {
            let version = shared.lock().unwrap().clone();
            let Some(version) = version else { return seen };
            assert_eq!(version.model.content_digest(), version.content_digest, "of step {}", version.model.step);
            seen.push(version.base.sequence);
        }
    });
    for round in 0..30 {
        job.train(10 * round..10 * round + 50);
        job.save(round % 10 == 9).await;
        published(&job, &mut publisher).await;
        follower.poll().await.unwrap().unwrap();
        *newest.lock().unwrap() = Some(follower.version().clone());
    }
    *newest.lock().unwrap() = None;
    let seen = reader.join().unwrap();
    assert!(seen.is_sorted() && seen.len() > 1, "{seen:?}");
    job.assert_served(&follower).await;
}

#[tokio::test]
async fn a_slot_that_a_checkpoint_has_whole_replaces_its_rows() {
    let mut job = Job::new();
    job.train(0..40);
    job.save(true).await;
    let mut publisher = job.publisher().await;
    published(&job, &mut publisher).await;
    let mut follower = job.follower().await;
    // As after a move: the slot has other rows, and its changes are not known.
    let slot = rectrain_embedding::slot_of(key(7), job.plan.store.slots);
    job.store.clear_slot(slot).unwrap();
    job.train(7..8);
    job.save(false).await;
    assert!(!published(&job, &mut publisher).await.is_full);
    follower.poll().await.unwrap().unwrap();
    job.assert_served(&follower).await;
}

#[tokio::test]
async fn a_follower_that_was_away_catches_up_or_loads_anew() {
    let mut job = Job::new();
    job.train(0..40);
    job.save(true).await;
    let mut publisher = job.publisher().await;
    published(&job, &mut publisher).await;
    let mut away = job.follower().await;
    let mut longer_away = job.follower().await;
    for round in 0..3 {
        job.train(round..round + 9);
        job.save(false).await;
        published(&job, &mut publisher).await;
    }
    let update = away.poll().await.unwrap().unwrap();
    assert_eq!((update.loaded, update.deltas), (false, 3));
    job.assert_served(&away).await;
    for _ in 0..2 {
        job.train(50..60);
        job.save(true).await;
        assert!(!published(&job, &mut publisher).await.is_full, "the changes are known");
    }
    // Two full models stay, and no delta below them.
    let [five, six] = ["delta-000000000005.bin", "delta-000000000006.bin"];
    assert_eq!(job.published_names(), [five, six, "full-000000000005", "full-000000000006", "latest.json"]);
    let update = longer_away.poll().await.unwrap().unwrap();
    assert_eq!((update.loaded, update.deltas), (true, 0));
    job.assert_served(&longer_away).await;
}

#[tokio::test]
async fn a_follower_that_is_too_far_behind_a_full_model_loads_it() {
    let mut job = Job::new();
    job.train(0..4);
    job.save(true).await;
    let mut publisher = job.publisher().await;
    published(&job, &mut publisher).await;
    let mut far = job.follower().await;
    job.train(0..2);
    job.save(false).await;
    published(&job, &mut publisher).await;
    let mut near = job.follower().await;
    for round in 0..20 {
        job.train(0..2);
        // The full model 22 is 20 models above the one, and 21 above the other.
        job.save(round == 19).await;
        published(&job, &mut publisher).await;
    }
    for (follower, loaded, deltas) in [(&mut far, true, 0), (&mut near, false, 20)] {
        let update = follower.poll().await.unwrap().unwrap();
        assert_eq!((update.loaded, update.deltas), (loaded, deltas));
        job.assert_served(follower).await;
    }
}

/// A coordinator that was replaced lives on for a while.
#[tokio::test]
async fn a_publisher_does_not_overwrite_the_models_of_another_one() {
    let mut job = Job::new();
    job.train(0..4);
    job.save(true).await;
    let mut old = job.publisher().await;
    published(&job, &mut old).await;
    let mut new = job.publisher().await;
    let mut follower = job.follower().await;
    for (sequence, numbers) in [(2, 0..2), (3, 1..4)] {
        job.train(numbers);
        job.save(false).await;
        assert_eq!(published(&job, &mut new).await.sequence, sequence);
        let refused = old.publish().await.unwrap_err().to_string();
        assert!(refused.contains("latest.json") && refused.contains("another process has published"), "{refused}");
        assert_eq!(old.publish().await.unwrap(), None, "it knows the model of the other one now");
        follower.poll().await.unwrap().unwrap();
        job.assert_served(&follower).await;
    }
}

/// A job that begins anew under the same path reaches the steps of the one before.
#[tokio::test]
async fn another_checkpoint_with_the_name_of_the_published_one_is_published() {
    let mut job = Job::new();
    job.train(0..4);
    let first = job.save(true).await;
    let mut publisher = job.publisher().await;
    published(&job, &mut publisher).await;
    let mut follower = job.follower().await;
    std::fs::remove_dir_all(job.place.path().join("checkpoints")).unwrap();
    job.train(2..9);
    job.step = first.step;
    let second = job.save(true).await;
    assert_eq!(first.directory(), second.directory());
    let other = published(&job, &mut publisher).await;
    assert_eq!((other.sequence, other.step, other.is_full), (2, first.step, false));
    assert_eq!(publisher.publish().await.unwrap(), None);
    assert_eq!(follower.poll().await.unwrap().unwrap().deltas, 1);
    job.assert_served(&follower).await;
}

#[tokio::test]
async fn rows_are_published_once_they_have_enough_examples() {
    let lfu = "dense: [{name: age}]\n    memory: {maxRows: 1000000}\n    eviction: {policy: lfu}";
    let mut job = Job::of(plan(&[("dense: [{name: age}]", lfu)]));
    let least = Some(LeastCount(NonZeroU32::new(2).unwrap()));
    let groups = job.plan.store.groups.len() as u64;
    job.train(0..40);
    job.train(0..10);
    job.save(true).await;
    let mut publisher = job.publisher().await.with_least_count(least);
    let full = published(&job, &mut publisher).await;
    assert_eq!((full.is_full, full.rows), (true, 10 * groups));
    let mut follower = job.follower().await;
    job.assert_served_thin(&follower, least).await;

    // Five rows have a second example now, and five others their first. One row of each kind goes.
    job.train(10..15);
    job.train(50..55);
    job.evict(3);
    job.evict(39);
    job.save(false).await;
    let delta = published(&job, &mut publisher).await;
    assert_eq!((delta.is_full, delta.rows), (false, 5 * groups));
    assert_eq!(follower.poll().await.unwrap().unwrap().deltas, 1);
    job.assert_served_thin(&follower, least).await;
    assert_eq!(follower.version().model.rows(), 14 * groups);

    // A row of many examples goes, and comes back with one.
    job.evict(4);
    job.train(4..5);
    job.save(false).await;
    assert_eq!(published(&job, &mut publisher).await.rows, 0);
    follower.poll().await.unwrap().unwrap();
    job.assert_served_thin(&follower, least).await;
    assert_eq!(follower.version().model.rows(), 13 * groups);

    // The differences of a full checkpoint, and the full model that is written later.
    job.train(50..53);
    job.save(true).await;
    let differences = published(&job, &mut publisher).await;
    assert_eq!((differences.is_full, differences.rows), (false, 3 * groups));
    follower.poll().await.unwrap().unwrap();
    job.assert_served_thin(&follower, least).await;
    job.assert_served_thin(&job.follower().await, least).await;

    // A publisher that does not know the published rows.
    let mut publisher = job.publisher().await.with_least_count(least);
    job.evict(5);
    job.train(5..6);
    job.train(53..54);
    job.save(false).await;
    let delta = published(&job, &mut publisher).await;
    assert_eq!((delta.is_full, delta.rows), (false, groups));
    follower.poll().await.unwrap().unwrap();
    job.assert_served_thin(&follower, least).await;

    // Another bound needs a full model: rows that did not change are in no changes.
    let mut publisher = job.publisher().await;
    job.train(0..1);
    job.save(false).await;
    assert!(published(&job, &mut publisher).await.is_full);
    assert!(follower.poll().await.unwrap().unwrap().loaded);
    job.assert_served(&follower).await;
}

/// It is no replacement for the full model that servers load, and nothing refers to it.
#[tokio::test]
async fn a_full_model_that_was_never_announced_is_not_counted_and_goes() {
    let mut job = Job::new();
    job.train(0..4);
    job.save(true).await;
    let (checkpoints, output) = (job.directory("checkpoints"), job.directory("published"));
    let mut publisher = Publisher::open(checkpoints, output, "test", NonZeroUsize::MIN).await.unwrap();
    published(&job, &mut publisher).await;
    // A publisher ended after it had written the files. Another one may be writing the next model.
    for name in ["full-000000000002", "full-000000000003"] {
        std::fs::create_dir(job.file(name)).unwrap();
        std::fs::write(job.file(name).join("rows-0.bin"), "rows").unwrap();
    }
    job.train(0..2);
    job.save(false).await;
    assert!(!published(&job, &mut publisher).await.is_full);
    let expected = ["delta-000000000002.bin", "full-000000000001", "full-000000000003", "latest.json"];
    assert_eq!(job.published_names(), expected);
    job.assert_served(&job.follower().await).await;
}

/// What happens to a delta, and the words of the refusal.
fn damage(file: &Path, kind: &str) -> &'static str {
    let bytes = std::fs::read(file).unwrap();
    match kind {
        "missing" => {
            std::fs::remove_file(file).unwrap();
            "delta-000000000002.bin cannot be used: it does not exist"
        }
        "torn" => {
            std::fs::write(file, &bytes[..bytes.len() / 2]).unwrap();
            "delta-000000000002.bin cannot be used: its SHA-256 is"
        }
        _ => {
            let before = b"\"digest\":\"";
            let place = bytes.windows(before.len()).position(|window| window == before).unwrap() + before.len();
            let mut other = bytes;
            other[place] = if other[place] == b'0' { b'1' } else { b'0' };
            let content = other.len() - 32;
            let digest = <sha2::Sha256 as sha2::Digest>::digest(&other[..content]);
            other[content..].copy_from_slice(&digest);
            std::fs::write(file, other).unwrap();
            "delta-000000000002.bin cannot be used: it is the delta 2 on the model 1 with digest"
        }
    }
}

#[tokio::test]
async fn a_delta_that_cannot_be_used_leaves_the_model_until_the_next_full_one() {
    for kind in ["missing", "torn", "another base"] {
        let mut job = Job::new();
        job.train(0..40);
        job.save(true).await;
        let mut publisher = job.publisher().await;
        published(&job, &mut publisher).await;
        let mut follower = job.follower().await;
        let served = follower.version().content_digest.clone();
        job.train(0..9);
        job.save(false).await;
        published(&job, &mut publisher).await;
        let expected = damage(&job.file("delta-000000000002.bin"), kind);
        for _ in 0..2 {
            let message = follower.poll().await.unwrap_err().to_string();
            assert!(message.contains(expected), "{kind}: {message}");
            assert_eq!(follower.version().content_digest, served, "{kind}");
        }
        // One that starts serves the model before the delta, and says so.
        let (new, update) = Follower::open(job.directory("published")).await.unwrap();
        assert!(update.stopped.unwrap().to_string().contains(expected), "{kind}");
        assert_eq!(new.version().content_digest, served, "{kind}");
        job.train(0..9);
        job.save(kind != "missing").await;
        // A publisher builds upon no delta that is missing.
        assert_eq!(published(&job, &mut publisher).await.is_full, kind == "missing", "{kind}");
        let update = follower.poll().await.unwrap().unwrap();
        assert!(update.loaded && update.stopped.is_none(), "{kind}");
        job.assert_served(&follower).await;
    }
}

#[tokio::test]
async fn values_that_are_not_finite_are_not_taken() {
    let mut job = Job::new();
    job.train(0..4);
    job.save(true).await;
    let mut publisher = job.publisher().await;
    published(&job, &mut publisher).await;
    let mut follower = job.follower().await;
    job.parameters[3] = f32::NAN;
    job.train(0..4);
    job.save(false).await;
    published(&job, &mut publisher).await;
    let message = follower.poll().await.unwrap_err().to_string();
    assert!(message.ends_with("it has a value that is not finite, so it is not taken"), "{message}");
    job.save(true).await;
    published(&job, &mut publisher).await;
    let message = follower.poll().await.unwrap_err().to_string();
    assert!(message.contains("full-000000000003 cannot be used") && message.contains("not finite"), "{message}");
    assert_eq!(follower.version().base.sequence, 1);
}

#[tokio::test]
async fn a_damaged_full_model_is_refused() {
    let mut job = Job::new();
    job.train(0..4);
    job.save(true).await;
    published(&job, &mut job.publisher().await).await;
    let file = job.file("full-000000000001/rows-0.bin");
    let mut bytes = std::fs::read(&file).unwrap();
    *bytes.last_mut().unwrap() ^= 1;
    std::fs::write(&file, bytes).unwrap();
    let message = Follower::open(job.directory("published")).await.unwrap_err().to_string();
    assert!(message.contains("rows-0.bin is damaged: its SHA-256 is"), "{message}");
    std::fs::remove_file(file).unwrap();
    let message = Follower::open(job.directory("published")).await.unwrap_err().to_string();
    assert!(message.contains("rows-0.bin is damaged: it does not exist"), "{message}");
}

#[tokio::test]
async fn a_path_belongs_to_one_job_and_has_models() {
    let mut job = Job::new();
    let empty = Follower::open(job.directory("published")).await.unwrap_err();
    assert!(empty.to_string().contains("it has no latest.json"), "{empty}");
    assert_eq!(job.publisher().await.publish().await.unwrap(), None);
    job.train(0..4);
    job.save(true).await;
    published(&job, &mut job.publisher().await).await;
    let (checkpoints, output) = (job.directory("checkpoints"), job.directory("published"));
    let other = Publisher::open(checkpoints, output, "other", NonZeroUsize::MIN).await.unwrap_err();
    assert!(matches!(other, ServingError::Publication { .. }), "{other}");
    assert!(other.to_string().contains("the job test publishes its models there"), "{other}");
    std::fs::write(job.file("latest.json"), "{}").unwrap();
    let message = Follower::open(job.directory("published")).await.unwrap_err().to_string();
    assert!(message.contains("latest.json cannot be used: its format is null"), "{message}");
}

#[tokio::test]
async fn a_model_with_other_features_needs_a_new_server() {
    let mut job = Job::new();
    job.train(0..4);
    job.save(true).await;
    let mut publisher = job.publisher().await;
    published(&job, &mut publisher).await;
    let mut follower = job.follower().await;
    job.plan = plan(&[("name: age", "name: age, transform: log1p")]);
    job.train(0..4);
    // Another job trains under the same path after the checkpoints were removed.
    std::fs::remove_dir_all(job.place.path().join("checkpoints")).unwrap();
    job.save(true).await;
    assert!(published(&job, &mut publisher).await.is_full);
    let message = follower.poll().await.unwrap_err().to_string();
    assert!(message.contains("start the server anew"), "{message}");
    assert_eq!(follower.version().base.sequence, 1);
}

/// Servers of three shards, and one without rows, follow a job beside one that holds everything.
#[tokio::test]
async fn shards_hold_the_rows_of_each_of_their_last_versions() {
    const SHARDS: u32 = 3;
    const VERSIONS: usize = 4;
    let mut job = Job::new();
    job.train(0..300);
    job.save(true).await;
    let mut publisher = job.publisher().await;
    published(&job, &mut publisher).await;
    let mut whole = job.follower().await;
    let mut shards = Vec::new();
    for shard in 0..SHARDS {
        let keys = KeyRange::of_part(shard, SHARDS);
        let (follower, update) = Follower::open_part(job.directory("published"), keys, VERSIONS).await.unwrap();
        assert!(update.stopped.is_none() && update.loaded);
        shards.push(follower);
    }
    let (mut dense, stopped) = DenseFollower::open(job.directory("published")).await.unwrap();
    assert!(stopped.is_none() && dense.version().base == whole.version().base);
    assert!(dense.version().model.tables.iter().all(|table| table.is_empty()));
    let mut expected = vec![whole.version().clone()];
    for round in 0..9 {
        job.train(13 * round..13 * round + 40);
        job.evict(290 - round);
        if round == 4 {
            // A slot that moves is given whole.
            job.store.clear_slot(rectrain_embedding::slot_of(key(7), job.plan.store.slots)).unwrap();
            job.train(7..8);
        }
        // In round 6 no follower looks, and a full model is beside the deltas.
        job.save(round == 6).await;
        published(&job, &mut publisher).await;
        whole.poll().await.unwrap().unwrap();
        expected.push(whole.version().clone());
        if round != 6 {
            for shard in &mut shards {
                shard.poll().await.unwrap().unwrap();
            }
        }
        assert_shards_hold(&shards, &expected, if round == 6 { 1 } else { 0 });
        dense.look().await.unwrap();
        assert_eq!(dense.newest(), whole.version().base.sequence);
    }
    // The server without rows goes to the newest model that is to be had.
    let has = |sequence: u64| move |base: &PublishedBase| base.sequence == sequence;
    assert!(dense.advance(has(99)).is_none());
    for (sequence, deltas) in [(4, 3), (10, 6)] {
        let update = dense.advance(has(sequence)).unwrap();
        let RowChanges::Known(changes) = update.changes else { panic!("the changes are known") };
        assert_eq!((update.loaded, update.deltas, changes.len() as u64), (false, deltas, deltas));
        let version = &expected[sequence as usize - 1];
        assert_eq!(dense.version().base, version.base);
        assert_eq!(dense.version().model.parameters, version.model.parameters);
    }
    // A server that starts has the versions since the full model.
    let (late, _) =
        Follower::open_part(job.directory("published"), KeyRange::of_part(1, SHARDS), VERSIONS).await.unwrap();
    let sequences: Vec<u64> = late.versions().map(|version| version.base.sequence).collect();
    assert_eq!(sequences, [8, 9, 10]);
    // A damaged file of a full model is refused, although most of its rows belong to others.
    let rows = job.file("full-000000000008/rows-0.bin");
    let mut bytes = std::fs::read(&rows).unwrap();
    *bytes.last_mut().unwrap() ^= 1;
    std::fs::write(&rows, bytes).unwrap();
    let error = Follower::open_part(job.directory("published"), KeyRange::of_part(0, SHARDS), 1).await.unwrap_err();
    assert!(matches!(error, ServingError::Damaged { .. }), "{error}");
}

/// All shards together have the rows of each version that they hold, and its digest.
fn assert_shards_hold(shards: &[Follower], expected: &[ServedVersion], late: usize) {
    let held: Vec<Vec<&ServedVersion>> = shards.iter().map(|shard| shard.versions().collect()).collect();
    assert_eq!(held[0].last().unwrap().base, expected[expected.len() - 1 - late].base);
    for place in 0..held[0].len() {
        let versions: Vec<&ServedVersion> = held.iter().map(|held| held[place]).collect();
        let version = expected.iter().find(|version| version.base == versions[0].base).unwrap();
        let mut content = vec![GroupContent::default(); version.model.tables.len()];
        for (group, table) in version.model.tables.iter().enumerate() {
            let rows = versions.iter().flat_map(|shard| shard.model.tables[group].rows());
            assert!(rows.eq(table.rows()), "group {group} of version {}", version.base.sequence);
        }
        for shard in &versions {
            assert_eq!((&shard.base, shard.model.step), (&version.base, version.model.step));
            content.iter_mut().zip(shard.content()).for_each(|(all, part)| all.join(&part));
        }
        assert_eq!(digest_of_content(&content, &version.model.parameters), version.content_digest);
    }
}

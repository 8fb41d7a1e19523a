//! Rows whose right values follow from arithmetic. Each value starts at 1, and each update has the
//! gradient 1. So a row tells how often it was updated, and its next update shows its optimizer
//! state.

#![allow(clippy::unwrap_used, reason = "an unwrap in a test is an assertion")]

mod common;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use common::{Job, SLOTS, key, local, runtime};
use rectrain_checkpoint::{Checkpoint, CheckpointWriter, Depth, Manifest};
use rectrain_embedding::{
    GroupId, Initializer, LifePolicy, Missing, RowSpec, Slot, SparseOptimizer, Store, StoreConfig, ValueType, slot_of,
};
use rectrain_storage::Directory;

const DIM: usize = 2;
/// A power of two, so that SGD does not round.
const RATE: f64 = 1.0 / 128.0;
const SGD: GroupId = GroupId(0);
const ADA_GRAD: GroupId = GroupId(1);

fn stores(servers: usize) -> Vec<Arc<Store>> {
    let spec = |optimizer| RowSpec {
        dim: DIM,
        value_type: ValueType::F32,
        optimizer,
        life: LifePolicy::KeepAll,
        initializer: Initializer::Constant(1.0),
        zero_columns: 0,
        first_order: None,
        share: None,
    };
    let ada_grad = SparseOptimizer::AdaGrad { learning_rate: RATE, initial_accumulator: 0.0, epsilon: 1e-10 };
    let groups = vec![spec(SparseOptimizer::Sgd { learning_rate: RATE }), spec(ada_grad)];
    let store = || {
        let store =
            Arc::new(Store::new(StoreConfig { slots: SLOTS, seed: 3, groups: groups.clone(), budget: None }).unwrap());
        store.track_changes(true);
        store
    };
    (0..servers).map(|_| store()).collect()
}

/// The value of a row after this many updates.
fn value(group: GroupId, updates: u64) -> f64 {
    match group {
        SGD => 1.0 - RATE * updates as f64,
        // The accumulator is the number of updates.
        _ => (1..=updates).fold(1.0, |value, accumulator| value - RATE / (accumulator as f64).sqrt()),
    }
}

/// Keys by number, with their updates.
type Updates = BTreeMap<u64, u64>;

/// A job whose rows are known.
struct Known {
    job: Job,
    updates: Updates,
}

impl Known {
    fn new(servers: usize) -> Self {
        let job = Job { stores: stores(servers), parameters: vec![0.5; 10], steps: 0 };
        Self { job, updates: Updates::new() }
    }

    fn train(&mut self, number: u64, times: u64) {
        for _ in 0..times {
            self.job.steps += 1;
            update_once(self.job.holder(key(number)), number, self.job.steps);
        }
        *self.updates.entry(number).or_default() += times;
    }

    fn remove(&mut self, number: u64) {
        for group in [SGD, ADA_GRAD] {
            assert!(self.job.holder(key(number)).remove(group, key(number)).unwrap());
        }
        self.updates.remove(&number);
    }

    /// Moves every slot as a migration does: whole, into stores that know no base.
    fn move_to(&mut self, servers: usize) {
        let new = stores(servers);
        for slot in 0..SLOTS {
            let snapshot = self.job.stores[slot as usize % self.job.stores.len()].snapshot_slot(Slot(slot)).unwrap();
            new[slot as usize % servers].restore_slot(snapshot.as_bytes()).unwrap();
        }
        self.job.stores = new;
    }
}

fn update_once(store: &Store, number: u64, step: u64) {
    for group in [SGD, ADA_GRAD] {
        store.lookup(group, &[key(number)], Missing::Insert, &mut [0.0; DIM]).unwrap();
        store.update(group, &[key(number)], &[1.0; DIM], step).unwrap();
    }
}

async fn restored(checkpoint: &Checkpoint, servers: usize) -> Job {
    let parameters = checkpoint.dense().await.unwrap().parameters;
    let job = Job { stores: stores(servers), parameters, steps: checkpoint.manifest().step };
    for (server, store) in job.stores.iter().enumerate() {
        checkpoint.restore_rows(store, &job.slots_of(server)).await.unwrap();
        store.mark_saved(checkpoint.id().save_id()).unwrap();
    }
    job
}

/// Compares every row with arithmetic. Then trains each once more and compares again.
fn check(job: &Job, updates: &Updates, case: &str) {
    let rows: u64 = job.stores.iter().map(|store| store.rows()).sum();
    assert_eq!(rows, 2 * updates.len() as u64, "{case}");
    for more in [0, 1] {
        for (&number, &count) in updates {
            let store = job.holder(key(number));
            for (group, tolerance) in [(SGD, 0.0), (ADA_GRAD, 1e-5)] {
                let mut found = [0.0; DIM];
                store.lookup(group, &[key(number)], Missing::ReadInitial, &mut found).unwrap();
                let expected = value(group, count + more);
                let is_right = |found: &f32| (f64::from(*found) - expected).abs() <= tolerance;
                assert!(found.iter().all(is_right), "{case}: key {number} is {found:?}, expected {expected}");
            }
            update_once(store, number, job.steps + 1 + more);
        }
    }
}

async fn open(directory: &Directory, manifest: &Manifest) -> Checkpoint {
    Checkpoint::open(directory, &manifest.directory()).await.unwrap()
}

/// Keys are trained in turn, so that each delta changes other rows.
#[test]
fn a_restore_at_any_delta_gives_each_row_its_number_of_updates() {
    let phases: [&[(u64, u64)]; 5] =
        [&[(1, 20), (2, 40)], &[(3, 1), (1, 1)], &[(2, 3)], &[(1, 5), (4, 2)], &[(5, 7), (3, 1)]];
    runtime().block_on(async {
        let folder = tempfile::tempdir().unwrap();
        let directory = local(&folder);
        let mut known = Known::new(2);
        let mut saved: Vec<(Manifest, Updates)> = Vec::new();
        for (place, phase) in phases.into_iter().enumerate() {
            phase.iter().for_each(|&(number, times)| known.train(number, times));
            if place == 2 {
                known.remove(3);
            }
            let manifest = known.job.save(&directory, saved.last().map(|(base, _)| base)).await.unwrap();
            saved.push((manifest, known.updates.clone()));
        }
        for (manifest, updates) in &saved {
            let checkpoint = open(&directory, manifest).await;
            for servers in [1, 2, 3] {
                let case = format!("{} on {servers} servers", manifest.directory());
                check(&restored(&checkpoint, servers).await, updates, &case);
            }
        }
    });
}

/// Threads insert rows and update old ones from the freeze on, until all files are written.
#[test]
fn rows_made_after_the_freeze_are_in_no_checkpoint() {
    runtime().block_on(async {
        let folder = tempfile::tempdir().unwrap();
        let directory = local(&folder);
        let mut known = Known::new(2);
        (1..300).for_each(|number| known.train(number, number % 7 + 1));
        let writer = CheckpointWriter::begin(&directory, known.job.begin(None)).await.unwrap();
        let frozen = known.job.freeze(writer.ticket());
        let inserted: Arc<[AtomicU64; 2]> = Arc::default();
        let is_written = Arc::new(AtomicBool::new(false));
        let threads = known.job.stores.iter().cloned().enumerate().map(|(server, store)| {
            let (inserted, is_written) = (Arc::clone(&inserted), Arc::clone(&is_written));
            std::thread::spawn(move || {
                let is_own = |number: &u64| slot_of(key(*number), SLOTS).0 as usize % 2 == server;
                for number in (1000..20_000).filter(is_own) {
                    update_once(&store, number, number);
                    let old = number % 299 + 1;
                    if is_own(&old) {
                        update_once(&store, old, number);
                    }
                    inserted[server].fetch_add(1, Ordering::Relaxed);
                    if is_written.load(Ordering::Relaxed) {
                        return;
                    }
                }
            })
        });
        let threads: Vec<_> = threads.collect();
        while inserted.iter().any(|count| count.load(Ordering::Relaxed) < 50) {
            std::thread::yield_now();
        }
        let files = known.job.write_files(&directory, writer.ticket(), &frozen).await.unwrap();
        is_written.store(true, Ordering::Relaxed);
        threads.into_iter().for_each(|thread| thread.join().unwrap());
        let manifest = writer.commit(files).await.unwrap();
        let checkpoint = open(&directory, &manifest).await;
        // A checkpoint of the restored rows, without a step, holds the same rows.
        let mut again = restored(&checkpoint, 3).await;
        let digests = again.digests();
        again.steps += 1;
        let next = again.save(&directory, None).await.unwrap();
        assert_eq!(restored(&open(&directory, &next).await, 1).await.digests(), digests);
        check(&again, &known.updates, "restored");
    });
}

/// Keys in all slots, and keys in the slots of one server. The next checkpoint is being written
/// while each one is read.
#[test]
fn rows_of_five_servers_restore_onto_one_seven_and_two() {
    let in_all: Vec<u64> = (1..200).collect();
    let in_one = (1..2000).filter(|number| slot_of(key(*number), SLOTS).0 % 5 == 3).take(100).collect();
    for numbers in [in_all, in_one] {
        runtime().block_on(async {
            let folder = tempfile::tempdir().unwrap();
            let directory = local(&folder);
            let mut known = Known::new(5);
            numbers.iter().for_each(|number| known.train(*number, number % 5 + 1));
            let digests = known.job.digests();
            let mut manifest = known.job.save(&directory, None).await.unwrap();
            for servers in [1, 7, 2] {
                let checkpoint = open(&directory, &manifest).await;
                let mut next = restored(&checkpoint, servers).await;
                assert_eq!(next.digests(), digests, "{servers} servers");
                next.steps += 1;
                let writer = CheckpointWriter::begin(&directory, next.begin(None)).await.unwrap();
                let frozen = next.freeze(writer.ticket());
                let files = next.write_files(&directory, writer.ticket(), &frozen).await.unwrap();
                check(&restored(&checkpoint, 3).await, &known.updates, "beside the next one");
                manifest = writer.commit(files).await.unwrap();
            }
            check(&restored(&open(&directory, &manifest).await, 4).await, &known.updates, "the last");
        });
    }
}

/// Each generation writes a delta on a base of the generation before it, moves its slots, and
/// writes a full checkpoint.
#[test]
fn five_generations_save_after_restores_and_migrations() {
    runtime().block_on(async {
        let folder = tempfile::tempdir().unwrap();
        let directory = local(&folder);
        let mut known = Known::new(2);
        known.train(1, 4);
        let mut last = known.job.save(&directory, None).await.unwrap();
        for (generation, servers) in (2..).zip([3, 1, 4, 2, 5]) {
            known.job = restored(&open(&directory, &last).await, servers).await;
            known.train(generation, generation);
            known.train(1, 1);
            let delta = known.job.save(&directory, Some(&last)).await.unwrap();
            known.move_to(servers % 3 + 1);
            let knows = |store: &Arc<Store>| store.knows_changes_since(delta.id.save_id());
            assert!(!known.job.stores.iter().any(knows), "a delta would lack the rows that moved");
            let before = known.updates.clone();
            known.train(generation, 1);
            last = known.job.save(&directory, None).await.unwrap();
            for (manifest, updates) in [(&delta, &before), (&last, &known.updates)] {
                let checkpoint = open(&directory, manifest).await;
                checkpoint.verify(Depth::Checksums).await.unwrap();
                check(&restored(&checkpoint, 2).await, updates, &format!("generation {generation}"));
            }
        }
    });
}

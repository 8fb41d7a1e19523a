//! Stores in memory that outlives their process: the contents after a kill at any moment, and the
//! files that are refused.
#![cfg(target_os = "linux")]
// Helpers outside the test functions unwrap too.
#![allow(clippy::unwrap_used, reason = "an unwrap in a test is an assertion")]

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use rectrain_embedding::{
    AdmitAfter, FeatureKey, GroupId, Initializer, LifePolicy, Missing, Reopened, RowSpec, SharedMemoryError, Slot,
    SparseOptimizer, Store, StoreConfig, StoreError, UpdateLog, ValueType,
};

/// The directory of the store that a child process of this test is to train. Without this variable
/// the child's test does nothing.
const DIRECTORY: &str = "RECTRAIN_TEST_SHARED_STORE";
const UPDATES: u32 = 800;
const KEYS: usize = 3_000;

/// Groups 0 and 1 keep every key. Group 2 admits keys at their third update, and has too few
/// counters. Its first-order weight has an optimizer of its own.
fn config() -> StoreConfig {
    let adagrad = SparseOptimizer::AdaGrad { learning_rate: 0.1, initial_accumulator: 0.1, epsilon: 1e-8 };
    let keeping = RowSpec {
        dim: 16,
        value_type: ValueType::F32,
        optimizer: adagrad,
        life: LifePolicy::KeepAll,
        initializer: Initializer::Uniform { low: -0.1, high: 0.1 },
        zero_columns: 0,
        first_order: None,
        share: None,
    };
    let sgd = SparseOptimizer::Sgd { learning_rate: 0.1 };
    let half = RowSpec { dim: 5, value_type: ValueType::F16, optimizer: sgd, ..keeping };
    let life = LifePolicy::AdmitAfter(AdmitAfter { count: 3, counters: 8_000 });
    let ftrl = SparseOptimizer::Ftrl { learning_rate: 0.05, beta: 1.0, l1: 0.001, l2: 0.01 };
    let admitting = RowSpec { dim: 6, life, zero_columns: 1, first_order: Some(ftrl), ..keeping };
    StoreConfig { slots: 16, seed: 7, groups: vec![keeping, half, admitting], budget: None }
}

const GROUPS: usize = 3;

/// A directory in memory, which is removed when this is dropped.
struct SharedDirectory(PathBuf);

impl SharedDirectory {
    fn new(name: &str) -> Self {
        let path = Path::new("/dev/shm").join(format!("rectrain-test-{name}-{}", std::process::id()));
        let _absent = std::fs::remove_dir_all(&path);
        Self(path)
    }

    fn open(&self) -> (Store, UpdateLog, Reopened) {
        Store::in_shared_memory(config(), &self.0).unwrap()
    }

    fn refusal(&self, config: StoreConfig) -> SharedMemoryError {
        match Store::in_shared_memory(config, &self.0).map(drop) {
            Err(StoreError::SharedMemory(error)) => error,
            other => panic!("{other:?}"),
        }
    }
}

impl Drop for SharedDirectory {
    fn drop(&mut self) {
        let _left = std::fs::remove_dir_all(&self.0);
    }
}

/// A well-mixed sequence, the same on every run.
fn random(seed: u64) -> impl Iterator<Item = u64> {
    let mut state = seed.wrapping_add(1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    std::iter::repeat_with(move || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state.wrapping_mul(0x2545_f491_4f6c_dd1d)
    })
}

/// The keys and gradients of an update.
fn work(update: u32, group: usize) -> (Vec<FeatureKey>, Vec<f32>) {
    let dim = config().groups[group].dim;
    let mut random = random(u64::from(update) * GROUPS as u64 + group as u64);
    let mut keys: Vec<u64> =
        random.by_ref().take(KEYS).map(|key| (key % 40_000).wrapping_mul(0x9e37_79b9_7f4a_7c15)).collect();
    keys.sort_unstable();
    keys.dedup();
    let gradients = random.take(keys.len() * dim).map(|bits| (bits >> 40) as f32 / (1 << 24) as f32 - 0.5).collect();
    (keys.into_iter().map(FeatureKey).collect(), gradients)
}

fn look_up(store: &Store, update: u32) {
    for group in 0..GROUPS {
        let keys = work(update, group).0;
        let mut out = vec![0.0; keys.len() * config().groups[group].dim];
        store.lookup(GroupId(group as u16), &keys, Missing::Insert, &mut out).unwrap();
    }
}

fn train_logged(store: &Store, log: &mut UpdateLog, updates: std::ops::Range<u32>) {
    for update in updates {
        look_up(store, update);
        log.begin();
        for group in 0..GROUPS {
            let (keys, gradients) = work(update, group);
            let count = u64::from(update) + 1;
            store.update_logged(GroupId(group as u16), &keys, &gradients, count, log).unwrap();
        }
        log.finish();
    }
}

fn train(store: &Store, updates: std::ops::Range<u32>) {
    for update in updates {
        look_up(store, update);
        for group in 0..GROUPS {
            let (keys, gradients) = work(update, group);
            store.update(GroupId(group as u16), &keys, &gradients, u64::from(update) + 1).unwrap();
        }
    }
}

#[test]
fn rows_outlive_the_store_that_held_them() {
    let directory = SharedDirectory::new("outlive");
    let own = Store::new(config()).unwrap();
    train(&own, 0..20);
    {
        let (store, mut log, reopened) = directory.open();
        assert_eq!(reopened, Reopened::default());
        train_logged(&store, &mut log, 0..10);
    }
    let (store, mut log, reopened) = directory.open();
    assert_eq!((log.update(), reopened.repaired_rows), (10, 0));
    assert!(reopened.rows > 10_000);
    train_logged(&store, &mut log, 10..20);
    assert_eq!(store.digests(0..16).unwrap(), own.digests(0..16).unwrap());
    assert_eq!(store.rows(), own.rows());
}

#[test]
fn rows_removed_and_slots_emptied_stay_so_and_their_memory_is_used_again() {
    let directory = SharedDirectory::new("removed");
    let length = || std::fs::metadata(directory.0.join("rows-0")).unwrap().len();
    let (store, mut log, _) = directory.open();
    train_logged(&store, &mut log, 0..20);
    let keys = work(3, 0).0;
    for key in &keys[..100] {
        assert!(store.remove(GroupId(0), *key).unwrap());
    }
    let of_slot = store.slot_rows(Slot(5)).unwrap();
    assert_eq!(store.clear_slot(Slot(5)).unwrap(), of_slot);
    let (rows, digests, bytes) = (store.rows(), store.digests(0..16).unwrap(), length());
    drop(store);
    let (store, _, reopened) = directory.open();
    assert_eq!((reopened.rows, store.digests(0..16).unwrap()), (rows, digests));
    look_up(&store, 3);
    assert!(store.rows() > rows);
    assert_eq!(length(), bytes, "what was given back is used again");
}

/// No test of its own: the next test starts and kills this process.
#[test]
fn child_process_that_trains_until_it_is_killed() {
    let Some(directory) = std::env::var_os(DIRECTORY) else { return };
    let (store, mut log, reopened) = Store::in_shared_memory(config(), Path::new(&directory)).unwrap();
    println!("repaired {}", reopened.repaired_rows);
    let next = log.update();
    train_logged(&store, &mut log, next..UPDATES);
}

#[test]
fn a_process_killed_at_any_moment_loses_nothing_and_does_nothing_twice() {
    let directory = SharedDirectory::new("killed");
    let seed = std::process::id().into();
    println!("seed {seed}");
    let mut pauses = random(seed).map(|pause| Duration::from_micros(5_000 + pause % 60_000)).take(30);
    let (mut kills, mut repaired) = (0, 0);
    loop {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command
            .args(["--exact", "child_process_that_trains_until_it_is_killed", "--nocapture"])
            .env(DIRECTORY, &directory.0);
        let mut child = command.stdout(Stdio::piped()).spawn().unwrap();
        if let Some(pause) = pauses.next() {
            std::thread::sleep(pause);
            // The process may have ended by itself.
            let _ended = child.kill();
        }
        let output = child.wait_with_output().unwrap();
        repaired += String::from_utf8_lossy(&output.stdout).matches("repaired 1").count();
        if output.status.success() {
            break;
        }
        assert_eq!(output.status.code(), None, "{output:?}");
        kills += 1;
    }
    let (store, log, _) = directory.open();
    println!("{kills} kills, {repaired} rows put back");
    assert!(kills > 5 && log.update() == UPDATES);
    let own = Store::new(config()).unwrap();
    train(&own, 0..UPDATES);
    assert_eq!(store.digests(0..16).unwrap(), own.digests(0..16).unwrap());
}

/// Files of a process that was killed while it created them have their length, but no memory and no
/// magic.
#[test]
fn half_created_files_are_completed_with_all_memory() {
    use std::os::unix::fs::MetadataExt;
    let directory = SharedDirectory::new("making");
    std::fs::create_dir_all(&directory.0).unwrap();
    let names = ["rows-0", "rows-1", "side-2", "update"];
    for (name, length) in names.into_iter().zip([2 << 20, 4096, 4096, 2 << 20]) {
        std::fs::File::create(directory.0.join(name)).unwrap().set_len(length).unwrap();
    }
    let (store, mut log, reopened) = directory.open();
    assert_eq!(reopened, Reopened::default());
    train_logged(&store, &mut log, 0..1);
    let rows = store.rows();
    drop((store, log));
    // A file whose process was killed while it grew.
    let growing = directory.0.join("rows-0");
    let file = std::fs::OpenOptions::new().write(true).open(&growing).unwrap();
    file.set_len(file.metadata().unwrap().len() + (4 << 20)).unwrap();
    let (_store, log, reopened) = directory.open();
    assert_eq!((log.update(), reopened.rows), (1, rows));
    for name in names {
        let file = std::fs::metadata(directory.0.join(name)).unwrap();
        assert_eq!(file.blocks() * 512, file.len(), "{name}");
    }
}

#[test]
fn rows_of_another_shape_and_files_that_are_no_rows_are_refused_by_name() {
    let directory = SharedDirectory::new("refused");
    {
        let (store, mut log, _) = directory.open();
        train_logged(&store, &mut log, 0..1);
    }
    let mut other = config();
    other.groups[0].dim = 8;
    let refusal = directory.refusal(other).to_string();
    assert!(refusal.contains("rows-0 cannot be used: its rows have another length"), "{refusal}");
    let mut bytes = std::fs::read(directory.0.join("rows-0")).unwrap();
    // The second block claims to be longer than the file.
    let first = u64::from_le_bytes(bytes[64..72].try_into().unwrap()) as usize;
    bytes[64 + first..72 + first].copy_from_slice(&u64::MAX.to_le_bytes());
    std::fs::write(directory.0.join("rows-0"), &bytes).unwrap();
    let refusal = directory.refusal(config()).to_string();
    assert!(refusal.contains("a block is longer than the file"), "{refusal}");
    std::fs::write(directory.0.join("rows-0"), vec![1; bytes.len()]).unwrap();
    let refusal = directory.refusal(config()).to_string();
    assert!(refusal.contains("does not begin as a file of rows"), "{refusal}");
    std::fs::remove_dir_all(&directory.0).unwrap();
    std::fs::write(&directory.0, "a file").unwrap();
    let refusal = directory.refusal(config()).to_string();
    assert!(refusal.starts_with("cannot make "), "{refusal}");
    std::fs::remove_file(&directory.0).unwrap();
}

/// A memory file system of a given size, for this test alone.
struct SmallMemory(PathBuf);

impl SmallMemory {
    /// `None` if this user may not mount file systems.
    fn mount(name: &str, size: &str) -> Option<Self> {
        let path = std::env::temp_dir().join(format!("rectrain-test-{name}-{}", std::process::id()));
        std::fs::create_dir_all(&path).unwrap();
        let options = format!("size={size}");
        let mounted = Command::new("mount").args(["-t", "tmpfs", "-o", &options, "tmpfs"]).arg(&path).status();
        mounted.is_ok_and(|status| status.success()).then_some(Self(path))
    }
}

impl Drop for SmallMemory {
    fn drop(&mut self) {
        let _unmounted = Command::new("umount").arg("-l").arg(&self.0).status();
        let _removed = std::fs::remove_dir(&self.0);
    }
}

#[test]
fn full_shared_memory_does_not_stop_the_store_but_a_reopen_is_refused() {
    let Some(memory) = SmallMemory::mount("full", "24m") else {
        println!("skipped: mounting a file system takes root");
        return;
    };
    let directory = memory.0.join("store");
    let keys: Vec<FeatureKey> = random(3).take(300_000).map(FeatureKey).collect();
    let mut out = vec![0.0; keys.len() * 16];
    {
        let (store, _log, _) = Store::in_shared_memory(config(), &directory).unwrap();
        let counts = store.lookup(GroupId(0), &keys, Missing::Insert, &mut out).unwrap();
        assert_eq!((counts.inserted, store.rows()), (300_000, 300_000));
        let counts = store.lookup(GroupId(0), &keys, Missing::Insert, &mut out).unwrap();
        assert_eq!(counts.found, 300_000);
    }
    match Store::in_shared_memory(config(), &directory).map(drop) {
        Err(StoreError::SharedMemory(error)) => {
            assert!(error.to_string().contains("it could not grow when rows were added"), "{error}");
        }
        other => panic!("{other:?}"),
    }
}

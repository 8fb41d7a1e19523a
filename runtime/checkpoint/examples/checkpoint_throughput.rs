//! The speed of writing and restoring checkpoints compared with `fio` on the same disk, and how
//! long training stalls: `checkpoint_throughput FOLDER [ROWS] [DIM] [ROUNDS]`. Prints one line of
//! JSON per round and one of the medians. As root it empties the page cache before each read.

use std::collections::BTreeMap;
use std::path::Path;
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use rectrain_checkpoint::{Begin, CheckpointWriter, Depth, Identity, SlotSet, latest_good, save_rows};
use rectrain_embedding::{
    FeatureKey, GroupId, Initializer, LifePolicy, Missing, RowSpec, SaveScope, Slot, SparseOptimizer, Store,
    StoreConfig, ValueType,
};
use rectrain_storage::Directory;

type Failure = Box<dyn std::error::Error>;

/// The allocator of the `rectrain` command.
#[global_allocator]
static ALLOCATOR: mimalloc::MiMalloc = mimalloc::MiMalloc;

const SLOTS: u32 = 1024;
/// Rows of a batch that trains while the checkpoint is written.
const BATCH: usize = 20_000;

fn config(dim: usize) -> StoreConfig {
    let spec = RowSpec {
        dim,
        value_type: ValueType::F32,
        optimizer: SparseOptimizer::AdaGrad { learning_rate: 0.1, initial_accumulator: 0.1, epsilon: 1e-8 },
        life: LifePolicy::KeepAll,
        initializer: Initializer::Uniform { low: -0.01, high: 0.01 },
        zero_columns: 0,
        first_order: None,
        share: None,
    };
    StoreConfig { slots: SLOTS, seed: 1, groups: vec![spec], budget: None }
}

/// The finaliser of SplitMix64: spreads keys over the whole range, as in a job.
fn key(number: u64) -> FeatureKey {
    let word = (number ^ (number >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let word = (word ^ (word >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    FeatureKey(word ^ (word >> 31))
}

fn filled(rows: u64, dim: usize) -> Result<Arc<Store>, Failure> {
    let store = Arc::new(Store::new(config(dim))?);
    let mut out = vec![0.0; BATCH * dim];
    for start in (0..rows).step_by(BATCH) {
        let mut keys: Vec<FeatureKey> = (start..(start + BATCH as u64).min(rows)).map(key).collect();
        keys.sort_unstable();
        let out = &mut out[..keys.len() * dim];
        store.lookup(GroupId(0), &keys, Missing::Insert, out)?;
    }
    Ok(store)
}

fn empty_page_cache() -> bool {
    let sync = Command::new("sync").status().is_ok_and(|status| status.success());
    sync && std::fs::write("/proc/sys/vm/drop_caches", "3").is_ok()
}

/// How `fio` accesses a file.
#[derive(Clone, Copy)]
enum Access {
    /// Through the page cache, synced to the disk at the end.
    Cached,
    /// Past the page cache.
    Direct,
}

/// Bytes per second of one thread that writes or reads (`action`) a file of `bytes` bytes, 8 MiB at
/// a time.
fn fio(folder: &Path, action: &str, access: Access, bytes: u64) -> Result<f64, Failure> {
    empty_page_cache();
    let direct = match access {
        Access::Cached => "--direct=0",
        Access::Direct => "--direct=1",
    };
    // Direct accesses need whole blocks.
    let size = format!("--size={}", bytes.next_multiple_of(8 << 20));
    let name = format!("--filename={}", folder.join("fio").display());
    let output = Command::new("fio")
        .args(["--name=job", "--bs=8M", "--ioengine=psync", "--end_fsync=1", "--invalidate=0", "--output-format=json"])
        .args([&format!("--rw={action}"), direct, &size, &name])
        .output()
        .map_err(|error| format!("fio cannot be run: {error}"))?;
    if !output.status.success() {
        return Err(format!("fio: {}", String::from_utf8_lossy(&output.stderr)).into());
    }
    let report: serde_json::Value = serde_json::from_slice(&output.stdout)?;
    let job = &report["jobs"][0];
    let (bytes, milliseconds) = (job[action]["io_bytes"].as_f64(), job["job_runtime"].as_f64());
    let (Some(bytes), Some(milliseconds)) = (bytes, milliseconds) else { return Err("fio reported no figures".into()) };
    Ok(bytes / milliseconds * 1e3)
}

/// Durations of batches (look-up and update) in seconds, rising.
#[derive(Default)]
struct Batches {
    taken: Vec<f64>,
    /// The part in which the thread neither ran nor waited for a core, which is time spent on
    /// locks. Precise to some milliseconds.
    blocked: Vec<f64>,
}

/// Seconds in which this thread ran or waited for a core.
fn runnable() -> f64 {
    let schedstat = std::fs::read_to_string("/proc/thread-self/schedstat").unwrap_or_default();
    schedstat.split_whitespace().take(2).filter_map(|number| number.parse::<f64>().ok()).sum::<f64>() / 1e9
}

/// Trains batches until `stop`.
fn train(store: &Store, rows: u64, dim: usize, stop: &AtomicBool) -> Result<Batches, String> {
    let (mut batches, mut number) = (Batches::default(), 0);
    let mut out = vec![0.0; BATCH * dim];
    while !stop.load(Ordering::Relaxed) {
        number += 1;
        let mut keys: Vec<FeatureKey> =
            (0..BATCH as u64).map(|index| key((number * 7_919_000 + index * 331) % rows)).collect();
        keys.sort_unstable();
        let (start, before) = (Instant::now(), runnable());
        store.lookup(GroupId(0), &keys, Missing::Insert, &mut out).map_err(|error| error.to_string())?;
        store.update(GroupId(0), &keys, &out, number).map_err(|error| error.to_string())?;
        let taken = start.elapsed().as_secs_f64();
        batches.taken.push(taken);
        batches.blocked.push((taken - (runnable() - before)).max(0.0));
    }
    batches.taken.sort_by(f64::total_cmp);
    batches.blocked.sort_by(f64::total_cmp);
    Ok(batches)
}

/// The batches of one thread during `work`.
async fn beside<T>(
    store: &Arc<Store>,
    rows: u64,
    dim: usize,
    work: impl Future<Output = Result<T, Failure>>,
) -> Result<(T, Batches), Failure> {
    let stop = Arc::new(AtomicBool::new(false));
    let (training, stopped) = (Arc::clone(store), Arc::clone(&stop));
    let thread = std::thread::spawn(move || train(&training, rows, dim, &stopped));
    let result = work.await;
    stop.store(true, Ordering::Relaxed);
    let taken = thread.join().map_err(|_| "training ended early")??;
    Ok((result?, taken))
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or(f64::NAN)
}

/// A save: its total seconds, the seconds in `freeze`, and its bytes.
struct Saved {
    seconds: f64,
    freeze: f64,
    bytes: u64,
}

async fn save(store: &Arc<Store>, directory: &Directory, step: u64) -> Result<Saved, Failure> {
    let start = Instant::now();
    let begin = Begin { step, base: None, slots: SLOTS, identity: Identity::default(), info: BTreeMap::new() };
    let writer = CheckpointWriter::begin(directory, begin).await?;
    let freeze = Instant::now();
    let frozen = Arc::new(store.freeze(writer.ticket().id.save_id(), SaveScope::Everything)?);
    let freeze = freeze.elapsed().as_secs_f64();
    let all = SlotSet::new((0..SLOTS).map(Slot));
    let entry = save_rows(directory, writer.ticket(), 0, &frozen, &all).await?;
    let bytes = writer.commit(vec![entry]).await?.bytes();
    if let Some(frozen) = Arc::into_inner(frozen) {
        frozen.complete();
    }
    Ok(Saved { seconds: start.elapsed().as_secs_f64(), freeze, bytes })
}

/// Seconds to find the last checkpoint and restore it.
async fn restore(directory: &Directory, rows: u64, dim: usize) -> Result<f64, Failure> {
    empty_page_cache();
    let start = Instant::now();
    let found = latest_good(directory, None, Depth::Sizes, &[]).await?;
    let checkpoint = found.checkpoint.ok_or("the checkpoint is not there")?;
    let restored = Arc::new(Store::new(config(dim))?);
    checkpoint.restore_rows(&restored, &SlotSet::new((0..SLOTS).map(Slot))).await?;
    let seconds = start.elapsed().as_secs_f64();
    if restored.rows() != rows {
        return Err(format!("{} rows were restored", restored.rows()).into());
    }
    Ok(seconds)
}

/// The size of the store, and the number of the round.
struct Round {
    rows: u64,
    dim: usize,
    number: u64,
}

/// The figures of a round, by name.
async fn round(
    store: &Arc<Store>,
    folder: &Path,
    directory: &Directory,
    Round { rows, dim, number }: Round,
) -> Result<BTreeMap<&'static str, f64>, Failure> {
    let saved = save(store, directory, 2 * number).await?;
    let bytes = saved.bytes as f64;
    let written = fio(folder, "write", Access::Cached, saved.bytes)?;
    let written_direct = fio(folder, "write", Access::Direct, saved.bytes)?;
    let restore = restore(directory, rows, dim).await?;
    let read = fio(folder, "read", Access::Cached, saved.bytes)?;
    let read_direct = fio(folder, "read", Access::Direct, saved.bytes)?;
    let pause = async {
        tokio::time::sleep(Duration::from_secs(2)).await;
        Ok(())
    };
    let ((), alone) = beside(store, rows, dim, pause).await?;
    let (busy, meanwhile) = beside(store, rows, dim, save(store, directory, 2 * number + 1)).await?;
    for entry in directory.folders().await? {
        directory.delete_folder(&entry, "manifest.json").await?;
    }
    let longest = |seconds: &[f64]| seconds.last().map_or(f64::NAN, |seconds| seconds * 1e3);
    Ok(BTreeMap::from([
        ("bytes", bytes),
        ("writeMBs", bytes / saved.seconds / 1e6),
        ("fioWriteMBs", written / 1e6),
        ("fioDirectWriteMBs", written_direct / 1e6),
        ("writeOfFio", bytes / saved.seconds / written),
        ("writeOfFioDirect", bytes / saved.seconds / written_direct),
        ("restoreMBs", bytes / restore / 1e6),
        ("fioReadMBs", read / 1e6),
        ("fioDirectReadMBs", read_direct / 1e6),
        ("restoreOfFio", bytes / restore / read),
        ("restoreOfFioDirect", bytes / restore / read_direct),
        ("freezeMs", saved.freeze.max(busy.freeze) * 1e3),
        ("saveWhileTrainingSeconds", busy.seconds),
        ("longestBatchMs", longest(&alone.taken)),
        ("longestBlockedMs", longest(&alone.blocked)),
        ("batchMs", median(alone.taken) * 1e3),
        ("longestBatchWhileSavingMs", longest(&meanwhile.taken)),
        ("longestBlockedWhileSavingMs", longest(&meanwhile.blocked)),
        ("batchWhileSavingMs", median(meanwhile.taken) * 1e3),
    ]))
}

async fn run(folder: &Path, rows: u64, dim: usize, rounds: u64) -> Result<(), Failure> {
    let store = filled(rows, dim)?;
    let directory = Directory::open(&folder.join("checkpoints").to_string_lossy(), &BTreeMap::new(), true)?;
    if !empty_page_cache() {
        eprintln!("The page cache cannot be emptied: readings are from memory.");
    }
    let mut figures: BTreeMap<&str, Vec<f64>> = BTreeMap::new();
    for number in 0..rounds {
        let round = round(&store, folder, &directory, Round { rows, dim, number }).await?;
        println!("{}", serde_json::to_string(&round)?);
        round.into_iter().for_each(|(name, value)| figures.entry(name).or_default().push(value));
    }
    let medians: BTreeMap<_, _> = figures.into_iter().map(|(name, values)| (name, median(values))).collect();
    println!("{}", serde_json::to_string(&serde_json::json!({ "rows": rows, "dim": dim, "medians": medians }))?);
    Ok(())
}

fn main() -> Result<(), Failure> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [folder, sizes @ ..] = &arguments[..] else {
        return Err("usage: checkpoint_throughput FOLDER [ROWS] [DIM] [ROUNDS]".into());
    };
    let size = |index: usize, default: u64| sizes.get(index).map_or(Ok(default), |size| size.parse());
    let (rows, dim, rounds) = (size(0, 10_000_000)?, size(1, 16)?, size(2, 3)?);
    let folder = Path::new(folder).join("rectrain-speed");
    std::fs::create_dir_all(&folder)?;
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build()?;
    let result = runtime.block_on(run(&folder, rows, usize::try_from(dim)?, rounds));
    std::fs::remove_dir_all(&folder)?;
    result
}

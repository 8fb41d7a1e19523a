//! How fast checkpoints are written and restored, beside plain sequential writing and reading of as many bytes on the same disk, and
//! how long training stalls: `speed FOLDER [ROWS] [DIM]`. Prints one line of JSON. As root it empties the page cache before it reads.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{Read, Write};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Instant;

use rectrain_checkpoint::{Begin, CheckpointWriter, Depth, Identity, SlotSet, latest_good, save_rows};
use rectrain_embedding::{
    FeatureKey, GroupId, Initializer, Missing, RowSpec, SaveScope, Slot, SparseOptimizer, Store, StoreConfig, ValueType,
};
use rectrain_storage::Directory;

type Failure = Box<dyn std::error::Error>;

const SLOTS: u32 = 1024;
/// Rows of a batch that trains while the checkpoint is written.
const BATCH: usize = 20_000;

fn config(dim: usize) -> StoreConfig {
    let spec = RowSpec {
        dim,
        value_type: ValueType::F32,
        optimizer: SparseOptimizer::AdaGrad { learning_rate: 0.1, initial_accumulator: 0.1, epsilon: 1e-8 },
        initializer: Initializer::Uniform { low: -0.01, high: 0.01 },
        zero_columns: 0,
    };
    StoreConfig { slots: SLOTS, seed: 1, groups: vec![spec] }
}

/// The finaliser of SplitMix64: keys as they are in a job, spread over everything.
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
    let sync = std::process::Command::new("sync").status().is_ok_and(|status| status.success());
    sync && std::fs::write("/proc/sys/vm/drop_caches", "3").is_ok()
}

/// Seconds to write and fsync so many bytes that do not compress, and the file.
fn plain_write(folder: &Path, bytes: u64) -> Result<(f64, std::path::PathBuf), Failure> {
    let path = folder.join("plain");
    let mut buffer = vec![0_u8; 8 << 20];
    for (index, chunk) in buffer.as_chunks_mut::<8>().0.iter_mut().enumerate() {
        *chunk = key(index as u64).0.to_le_bytes();
    }
    let start = Instant::now();
    let mut file = File::create(&path)?;
    let mut left = bytes;
    while left > 0 {
        let length = left.min(buffer.len() as u64);
        file.write_all(&buffer[..length as usize])?;
        left -= length;
    }
    file.sync_all()?;
    Ok((start.elapsed().as_secs_f64(), path))
}

fn plain_read(path: &Path) -> Result<f64, Failure> {
    let mut buffer = vec![0_u8; 8 << 20];
    let start = Instant::now();
    let mut file = File::open(path)?;
    while file.read(&mut buffer)? > 0 {}
    Ok(start.elapsed().as_secs_f64())
}

/// The longest batch (look-up and update) in seconds until `stop`, and how many there were.
fn train(store: &Store, rows: u64, dim: usize, stop: &AtomicBool) -> Result<(f64, u64), Failure> {
    let (mut longest, mut batches) = (0.0_f64, 0);
    let mut out = vec![0.0; BATCH * dim];
    while !stop.load(Ordering::Relaxed) {
        batches += 1;
        let mut keys: Vec<FeatureKey> =
            (0..BATCH as u64).map(|index| key((batches * 7_919_000 + index * 331) % rows)).collect();
        keys.sort_unstable();
        let start = Instant::now();
        store.lookup(GroupId(0), &keys, Missing::Insert, &mut out)?;
        store.update(GroupId(0), &keys, &out, batches)?;
        longest = longest.max(start.elapsed().as_secs_f64());
    }
    Ok((longest, batches))
}

async fn save(store: &Arc<Store>, directory: &Directory, step: u64) -> Result<(f64, f64, u64), Failure> {
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
    Ok((start.elapsed().as_secs_f64(), freeze, bytes))
}

async fn run(folder: &Path, rows: u64, dim: usize) -> Result<serde_json::Value, Failure> {
    let store = filled(rows, dim)?;
    let name = folder.join("checkpoints");
    let directory = Directory::open(&name.to_string_lossy(), &BTreeMap::new(), true)?;
    let (write, freeze, bytes) = save(&store, &directory, 1).await?;
    let (plain_write, plain) = plain_write(folder, bytes)?;

    // The same while one thread trains.
    let stop = Arc::new(AtomicBool::new(false));
    let (alone, busy) = {
        let measure = |stop: Arc<AtomicBool>| {
            let store = Arc::clone(&store);
            std::thread::spawn(move || train(&store, rows, dim, &stop).map_err(|error| error.to_string()))
        };
        let alone = measure(Arc::clone(&stop));
        tokio::time::sleep(std::time::Duration::from_secs(3)).await;
        stop.store(true, Ordering::Relaxed);
        let alone = alone.join().map_err(|_| "training ended early")??;
        stop.store(false, Ordering::Relaxed);
        let busy = measure(Arc::clone(&stop));
        save(&store, &directory, 2).await?;
        stop.store(true, Ordering::Relaxed);
        (alone, busy.join().map_err(|_| "training ended early")??)
    };
    std::fs::remove_dir_all(name.join("step-000000000002"))?;
    drop(store);

    let cold = empty_page_cache();
    let plain_read = plain_read(&plain)?;
    empty_page_cache();
    let start = Instant::now();
    let found = latest_good(&directory, None, Depth::Sizes, &[]).await?;
    let checkpoint = found.checkpoint.ok_or("the checkpoint is not there")?;
    let restored = Arc::new(Store::new(config(dim))?);
    checkpoint.restore_rows(&restored, &SlotSet::new((0..SLOTS).map(Slot))).await?;
    let restore = start.elapsed().as_secs_f64();
    if restored.rows() != rows {
        return Err(format!("{} rows were restored", restored.rows()).into());
    }
    let speed = |seconds: f64| (bytes as f64 / seconds / 1e6).round();
    Ok(serde_json::json!({
        "rows": rows, "dim": dim, "bytes": bytes,
        "writeMBs": speed(write), "plainWriteMBs": speed(plain_write), "writeOfPlain": plain_write / write,
        "restoreMBs": speed(restore), "plainReadMBs": speed(plain_read), "restoreOfPlain": plain_read / restore,
        "pageCacheEmptied": cold, "freezeMs": freeze * 1e3,
        "longestBatchAloneMs": alone.0 * 1e3, "longestBatchWhileSavingMs": busy.0 * 1e3,
        "batchesWhileSaving": busy.1,
    }))
}

fn main() -> Result<(), Failure> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [folder, sizes @ ..] = &arguments[..] else { return Err("usage: speed FOLDER [ROWS] [DIM]".into()) };
    let rows = sizes.first().map_or(Ok(10_000_000), |rows| rows.parse())?;
    let dim = sizes.get(1).map_or(Ok(16), |dim| dim.parse())?;
    let folder = Path::new(folder).join("rectrain-speed");
    std::fs::create_dir_all(&folder)?;
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build()?;
    let result = runtime.block_on(run(&folder, rows, dim));
    std::fs::remove_dir_all(&folder)?;
    println!("{}", result?);
    Ok(())
}

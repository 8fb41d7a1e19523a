//! Checks a table whose offsets do not fit 32 bits. It has more than 2³¹ values, slots and a rows
//! file of more than 4 GiB, and look-ups of more than 2³¹ ids.
//!
//! Each row's right value follows from arithmetic. Its values begin at the group's initial value,
//! and each of its one to three updates has the gradient 1. A second group has other values, so a
//! read past the end of the first group's rows is noticed. The table is compared with these values
//! twice: in the store that trained it, and in one that restored it from a rows file.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Instant;

use comfy_table::Table;
use rectrain_checkpoint::{
    Begin, Checkpoint, CheckpointError, CheckpointWriter, Identity, Manifest, SlotSet, save_rows,
};
use rectrain_embedding::{
    Digest, FeatureKey, GroupId, Initializer, LifePolicy, Missing, RowSpec, SaveScope, Slot, SparseOptimizer, Store,
    StoreConfig, ValueType,
};
use rectrain_storage::Directory;
use serde::Serialize;

use crate::error::BenchError;
use crate::figures::table;
use crate::zipf::key;

/// Keys of one request. All have the same number of updates.
const CHUNK: u64 = 8_192;
const RATE: f64 = 1.0 / 128.0;
/// The initial values of the groups.
const INITIAL: [f32; 2] = [1.0, -1.0];
/// The most that a value may differ from arithmetic in 64 bits.
const TOLERANCE: f32 = 1e-6;

#[derive(Clone, Debug, clap::Args)]
pub struct LargeArgs {
    /// Columns per row
    #[arg(long, default_value_t = 64)]
    pub dim: usize,
    /// Rows of the large group. The defaults need some 30 GB of memory, and 18 GB in the folder
    #[arg(long, default_value_t = 34_000_000)]
    pub rows: u64,
    /// Slots of the store. Few slots are large
    #[arg(long, default_value_t = 4)]
    pub slots: u32,
    /// Ids to look up in all, at least
    #[arg(long, default_value_t = (1 << 31) + 1)]
    pub ids: u64,
    /// Folder for the checkpoint. It must be empty
    #[arg(long, value_name = "FOLDER")]
    pub folder: PathBuf,
    /// Also print a line of JSON
    #[arg(long)]
    pub json: bool,
}

/// The sizes that [`bench_large`] reached, and its times. All values were right.
#[derive(Clone, Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct LargeFigures {
    pub rows: u64,
    pub values: u64,
    pub largest_slot_bytes: u64,
    pub rows_file_bytes: u64,
    pub ids: u64,
    /// True if all four sizes are beyond 32 bits. A run with smaller ones proves less.
    pub is_beyond_32_bits: bool,
    pub fill_seconds: f64,
    pub save_seconds: f64,
    pub restore_seconds: f64,
}

impl LargeFigures {
    pub(crate) fn table(&self) -> Table {
        let mut table = table(&["all values are right", "", "unit"]);
        let mut row = |name: &str, value: String, unit: &str| {
            table.add_row([name, value.as_str(), unit]);
        };
        row("rows", self.rows.to_string(), "");
        row("values", self.values.to_string(), "");
        row("largest slot", self.largest_slot_bytes.to_string(), "bytes");
        row("rows file", self.rows_file_bytes.to_string(), "bytes");
        row("ids looked up", self.ids.to_string(), "");
        row("all beyond 32 bits", self.is_beyond_32_bits.to_string(), "");
        row("fill", format!("{:.1}", self.fill_seconds), "s");
        row("save", format!("{:.1}", self.save_seconds), "s");
        row("restore", format!("{:.1}", self.restore_seconds), "s");
        table
    }
}

/// Fills a large table, compares it with arithmetic, saves and restores it, and compares again.
///
/// # Errors
/// [`BenchError::Argument`], [`BenchError::Wrong`] for a value, a digest or a number of rows that
/// is not right, [`BenchError::Store`] and [`BenchError::Checkpoint`].
pub fn bench_large(args: &LargeArgs) -> Result<LargeFigures, BenchError> {
    check(args)?;
    let begun = Instant::now();
    let store = new_store(args)?;
    fill(&store, args)?;
    let fill_seconds = begun.elapsed().as_secs_f64();
    let mut ids = 0;
    while ids < args.ids {
        ids += compare(&store, args)?;
    }
    let largest_slot_bytes = largest_slot(&store, args)?;
    let digests = ends_of(&store, args)?;
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build()?;
    let begun = Instant::now();
    let directory = open(args)?;
    let manifest = runtime.block_on(save(&directory, &store, args))?;
    let save_seconds = begun.elapsed().as_secs_f64();
    let rows_file_bytes = manifest.bytes();
    // There may be no memory for both.
    drop(store);
    let begun = Instant::now();
    let store = new_store(args)?;
    runtime.block_on(restore(&directory, &manifest, &store, args))?;
    let restore_seconds = begun.elapsed().as_secs_f64();
    if ends_of(&store, args)? != digests {
        return Err(wrong("the digest of the first or the last slot changed between save and restore".to_owned()));
    }
    ids += compare(&store, args)?;
    let values = args.rows * args.dim as u64;
    let is_beyond_32_bits = values.min(ids) > 1 << 31 && largest_slot_bytes.min(rows_file_bytes) > 1 << 32;
    let rows = store.rows();
    Ok(LargeFigures {
        rows,
        values,
        largest_slot_bytes,
        rows_file_bytes,
        ids,
        is_beyond_32_bits,
        fill_seconds,
        save_seconds,
        restore_seconds,
    })
}

fn check(args: &LargeArgs) -> Result<(), BenchError> {
    let refuse = |argument, found: String, expected| Err(BenchError::Argument { argument, found, expected });
    if args.rows < CHUNK {
        return refuse("rows", args.rows.to_string(), "at least 8192");
    }
    let is_empty = std::fs::read_dir(&args.folder).map_or(true, |mut entries| entries.next().is_none());
    if !is_empty {
        return refuse("folder", args.folder.display().to_string(), "an empty folder, or a new one");
    }
    Ok(())
}

fn new_store(args: &LargeArgs) -> Result<Arc<Store>, BenchError> {
    let spec = |initial| RowSpec {
        dim: args.dim,
        value_type: ValueType::F32,
        optimizer: SparseOptimizer::AdaGrad { learning_rate: RATE, initial_accumulator: 0.0, epsilon: 1e-10 },
        life: LifePolicy::KeepAll,
        initializer: Initializer::Constant(initial),
        zero_columns: 0,
        first_order: None,
        share: None,
    };
    let groups = INITIAL.map(spec).to_vec();
    Ok(Arc::new(Store::new(StoreConfig { slots: args.slots, seed: 1, groups, budget: None })?))
}

/// The keys of both groups in requests: the group, the number of updates, and the sorted keys. The
/// second group has the keys of the first request only.
fn requests(args: &LargeArgs) -> impl Iterator<Item = (GroupId, u64, Vec<FeatureKey>)> {
    let rows = args.rows;
    let request = move |(group, chunk): (u16, u64)| {
        let mut keys: Vec<FeatureKey> = (chunk * CHUNK..rows.min((chunk + 1) * CHUNK)).map(key).collect();
        keys.sort_unstable();
        (GroupId(group), chunk % 3 + 1, keys)
    };
    (0..rows.div_ceil(CHUNK)).map(|chunk| (0, chunk)).chain([(1, 0)]).map(request)
}

fn fill(store: &Store, args: &LargeArgs) -> Result<(), BenchError> {
    let ones = vec![1.0; CHUNK as usize * args.dim];
    let mut out = vec![0.0; ones.len()];
    let mut step = 0;
    for (group, updates, keys) in requests(args) {
        let length = keys.len() * args.dim;
        store.lookup(group, &keys, Missing::Insert, &mut out[..length])?;
        for _ in 0..updates {
            step += 1;
            store.update(group, &keys, &ones[..length], step)?;
        }
    }
    Ok(())
}

/// Compares every value with arithmetic. Returns the number of ids looked up.
fn compare(store: &Store, args: &LargeArgs) -> Result<u64, BenchError> {
    let expected_rows = args.rows + CHUNK;
    if store.rows() != expected_rows {
        return Err(wrong(format!("the store has {} rows, expected {expected_rows}", store.rows())));
    }
    let mut out = vec![0.0; CHUNK as usize * args.dim];
    let mut ids = 0;
    for (group, updates, keys) in requests(args) {
        let out = &mut out[..keys.len() * args.dim];
        store.lookup(group, &keys, Missing::ReadInitial, out)?;
        let expected = value(group, updates);
        if let Some(place) = out.iter().position(|found| (found - expected).abs().total_cmp(&TOLERANCE).is_gt()) {
            let key = keys[place / args.dim];
            return Err(wrong(format!("key {key:?} of group {} is {}, expected {expected}", group.0, out[place])));
        }
        ids += keys.len() as u64;
    }
    Ok(ids)
}

/// The value of a row after this many updates. AdaGrad's accumulator is the number of updates.
fn value(group: GroupId, updates: u64) -> f32 {
    let initial = f64::from(INITIAL[usize::from(group.0)]);
    (1..=updates).fold(initial, |value, accumulator| value - RATE / (accumulator as f64).sqrt()) as f32
}

fn largest_slot(store: &Store, args: &LargeArgs) -> Result<u64, BenchError> {
    let mut largest = 0;
    for slot in 0..args.slots {
        largest = largest.max(store.slot_bytes(Slot(slot))?);
    }
    Ok(largest)
}

/// The digests of the first and the last slot.
fn ends_of(store: &Store, args: &LargeArgs) -> Result<[Digest; 2], BenchError> {
    let last = Slot(args.slots.saturating_sub(1));
    Ok([store.slot_digest(Slot(0))?, store.slot_digest(last)?])
}

fn open(args: &LargeArgs) -> Result<Directory, BenchError> {
    let path = args.folder.display().to_string();
    Directory::open(&path, &BTreeMap::new(), true).map_err(|error| CheckpointError::from(error).into())
}

fn all_slots(args: &LargeArgs) -> SlotSet {
    SlotSet::new((0..args.slots).map(Slot))
}

async fn save(directory: &Directory, store: &Arc<Store>, args: &LargeArgs) -> Result<Manifest, BenchError> {
    let begin = Begin { step: 1, base: None, slots: args.slots, identity: Identity::new([]), info: BTreeMap::new() };
    let writer = CheckpointWriter::begin(directory, begin).await?;
    let frozen = Arc::new(store.freeze(writer.ticket().id.save_id(), SaveScope::Everything)?);
    let rows = save_rows(directory, writer.ticket(), 0, &frozen, &all_slots(args)).await?;
    Ok(writer.commit(vec![rows]).await?)
}

async fn restore(
    directory: &Directory,
    manifest: &Manifest,
    store: &Arc<Store>,
    args: &LargeArgs,
) -> Result<(), CheckpointError> {
    let checkpoint = Checkpoint::open(directory, &manifest.directory()).await?;
    checkpoint.restore_rows(store, &all_slots(args)).await.map(drop)
}

fn wrong(found: String) -> BenchError {
    BenchError::Wrong(found)
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "an unwrap in a test is an assertion")]
mod tests {
    use super::*;

    fn args(folder: &std::path::Path) -> LargeArgs {
        LargeArgs { dim: 3, rows: 20_000, slots: 4, ids: 50_000, folder: folder.to_owned(), json: false }
    }

    #[test]
    fn a_small_table_is_right_and_not_beyond_32_bits() {
        let folder = tempfile::tempdir().unwrap();
        let figures = bench_large(&args(folder.path())).unwrap();
        assert_eq!((figures.rows, figures.values), (20_000 + CHUNK, 60_000));
        assert!(!figures.is_beyond_32_bits && figures.ids >= 50_000, "{figures:?}");
        let refused = bench_large(&args(folder.path())).unwrap_err();
        assert!(refused.is_user_error() && refused.to_string().contains("an empty folder"), "{refused}");
    }

    #[test]
    fn a_wrong_value_and_a_missing_row_are_found() {
        let args = args(std::path::Path::new("unused"));
        let store = new_store(&args).unwrap();
        fill(&store, &args).unwrap();
        assert_eq!(compare(&store, &args).unwrap(), 20_000 + CHUNK);
        store.update(GroupId(0), &[key(19_999)], &[1.0; 3], 100).unwrap();
        let error = compare(&store, &args).unwrap_err().to_string();
        assert!(error.contains("of group 0 is 0.9"), "{error}");
        assert!(store.remove(GroupId(1), key(5)).unwrap());
        let error = compare(&store, &args).unwrap_err().to_string();
        assert!(error.contains("rows, expected 28192"), "{error}");
    }
}

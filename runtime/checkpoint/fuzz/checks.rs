//! Properties that hold for any bytes. Each check gives bytes to a reader, which accepts or refuses
//! them. It must not panic, loop or take memory out of proportion. Noise never passes a checksum.
//! So checks try the bytes as they are, and once more with valid checksums. A check returns the
//! kind of its outcome. Two drivers share the checks: `tests/fuzz.rs` in every test run, and
//! cargo-fuzz, which is guided by coverage.

#![allow(dead_code, reason = "each target of cargo-fuzz uses one check")]

use std::collections::BTreeMap;
use std::sync::{Arc, LazyLock};

use object_store::memory::InMemory;
use object_store::path::Path;
use object_store::{ObjectStore, ObjectStoreExt};
use rectrain_checkpoint::{
    Base, Begin, CheckpointWriter, DensePart, Depth, Identity, MANIFEST, Manifest, SlotSet, decode_index, encode_index,
    latest_good, save_dense, save_rows, save_state,
};
use rectrain_embedding::{
    FeatureKey, GroupId, Initializer, LifePolicy, Missing, RowSpec, SaveScope, Slot, SparseOptimizer, Store,
    StoreConfig, ValueType,
};
use rectrain_fuzzing::{Area, Target, outcome};
use rectrain_storage::Directory;
use xxhash_rust::xxh3::xxh3_64;

pub const AREAS: &[Area] = &[Area {
    name: "checkpoints",
    targets: &[
        target("manifest", manifest, || files("manifest")),
        target("rows_index", rows_index, || files("rows")),
        target("slot", slot, slot_seeds),
        target("dense", dense, || files("dense")),
        target("checkpoint", checkpoint, checkpoint_seeds),
    ],
}];

const fn target(name: &'static str, check: fn(&[u8]) -> String, seeds: fn() -> Vec<Vec<u8>>) -> Target {
    Target { name, check, seeds, words: Vec::new, inputs: 6_000, memory: 1 << 20 }
}

/// A manifest or an error. A manifest survives encoding and decoding.
pub fn manifest(input: &[u8]) -> String {
    [check_manifest(input), check_manifest(&with_checksum(input.to_vec()))].join("; ")
}

fn check_manifest(bytes: &[u8]) -> String {
    let decoded = Manifest::decode("fuzz", bytes);
    if let Ok(manifest) = &decoded {
        let again = Manifest::decode("fuzz", &manifest.encode()).expect("written bytes can be read");
        assert_eq!(again.encode(), manifest.encode());
    }
    outcome(&decoded)
}

fn with_checksum(mut bytes: Vec<u8>) -> Vec<u8> {
    const BEFORE: &[u8] = b"\"checksum\": \"";
    let found = bytes.windows(BEFORE.len()).position(|window| window == BEFORE);
    if let Some(start) = found.map(|at| at + BEFORE.len()).filter(|start| start + 16 < bytes.len()) {
        bytes[start..start + 16].fill(b'0');
        let sum = format!("{:016x}", xxh3_64(&bytes));
        bytes[start..start + 16].copy_from_slice(sum.as_bytes());
    }
    bytes
}

const ROWS_HEADER: usize = 64;
const ROWS_FOOTER: usize = 32;

/// A rows file's header and index: a consistent one, or an error.
pub fn rows_index(input: &[u8]) -> String {
    [check_index(input), check_index(&with_index_checksum(input.to_vec()))].join("; ")
}

/// The offset of a rows file's index, if it is within the file.
fn index_offset(file: &[u8]) -> Option<usize> {
    let footer = file.len().checked_sub(ROWS_FOOTER)?;
    let offset = u64::from_le_bytes(file[footer..footer + 8].try_into().ok()?);
    usize::try_from(offset).ok().filter(|offset| (ROWS_HEADER..=footer).contains(offset))
}

fn with_index_checksum(mut file: Vec<u8>) -> Vec<u8> {
    if let Some(index) = index_offset(&file) {
        let footer = file.len() - ROWS_FOOTER;
        let entries = ((footer - index) / 40) as u32;
        file[footer + 8..footer + 12].copy_from_slice(&entries.to_le_bytes());
        let sum = xxh3_64(&[&file[..ROWS_HEADER], &file[index..footer]].concat());
        file[footer + 16..footer + 24].copy_from_slice(&sum.to_le_bytes());
    }
    file
}

fn check_index(file: &[u8]) -> String {
    let head = &file[..file.len().min(ROWS_HEADER)];
    let tail = &file[index_offset(file).unwrap_or(head.len())..];
    let decoded = decode_index(head, tail, file.len() as u64);
    if let Ok((header, entries)) = &decoded {
        assert!(entries.iter().all(|entry| entry.slot.0 < header.slots));
        assert!(entries.windows(2).all(|pair| pair[0].slot < pair[1].slot));
        assert_eq!(encode_index(header, entries).0, tail);
    }
    outcome(&decoded)
}

fn config() -> StoreConfig {
    let spec = RowSpec {
        dim: 3,
        value_type: ValueType::F16,
        optimizer: SparseOptimizer::AdaGrad { learning_rate: 0.1, initial_accumulator: 0.1, epsilon: 1e-8 },
        life: LifePolicy::KeepAll,
        initializer: Initializer::Constant(0.5),
        zero_columns: 0,
        first_order: None,
        share: None,
    };
    StoreConfig { slots: 4, seed: 1, groups: vec![spec], budget: None }
}

fn key(number: u64) -> FeatureKey {
    FeatureKey(number.wrapping_mul(0x9e37_79b9_7f4a_7c15))
}

fn touch(store: &Store, numbers: std::ops::Range<u64>) {
    for number in numbers {
        store.lookup(GroupId(0), &[key(number)], Missing::Insert, &mut [0.0; 3]).expect("a valid request");
    }
}

fn filled() -> Arc<Store> {
    let store = Arc::new(Store::new(config()).expect("a valid configuration"));
    store.track_changes(true);
    touch(&store, 0..24);
    store
}

/// Snapshots of slot 1: the whole slot, and changes with a removed key.
fn slot_seeds() -> Vec<Vec<u8>> {
    let store = filled();
    let save = |id: u128, scope| {
        let frozen = store.freeze(rectrain_embedding::SaveId(id), scope).expect("nothing is frozen");
        let bytes = frozen.save_slot(Slot(1)).expect("slot 1 is there").into_bytes();
        frozen.complete();
        bytes
    };
    let whole = save(1, SaveScope::Everything);
    let gone = (0..24).map(key).find(|key| store.slot_of(*key) == Slot(1)).expect("a key of slot 1");
    store.remove(GroupId(0), gone).expect("a valid request");
    touch(&store, 24..32);
    vec![whole, save(2, SaveScope::ChangesSince(rectrain_embedding::SaveId(1)))]
}

/// A slot snapshot: the store accepts it, or refuses it and stays unchanged.
pub fn slot(input: &[u8]) -> String {
    [check_slot(input), check_slot(&with_slot_checksum(input.to_vec()))].join("; ")
}

/// The snapshot with valid length and checksum.
fn with_slot_checksum(mut bytes: Vec<u8>) -> Vec<u8> {
    let length = bytes.len();
    if length >= 56 {
        bytes[32..40].copy_from_slice(&(length as u64).to_le_bytes());
        let sum = xxh3_64(&bytes[..length - 8]).to_le_bytes();
        bytes[length - 8..].copy_from_slice(&sum);
    }
    bytes
}

fn check_slot(bytes: &[u8]) -> String {
    let store = filled();
    let digests = || store.digests(0..4).expect("all slots are there");
    let before = digests();
    let _any = Store::config_of_snapshot(bytes);
    let restored = store.restore_slot(bytes);
    match &restored {
        Err(_) => assert_eq!(digests(), before),
        Ok(restored) => {
            let after = digests();
            let others = (0..4).filter(|slot| *slot != restored.slot.0 as usize);
            others.for_each(|slot| assert_eq!(after[slot], before[slot]));
            assert!(restored.rows <= bytes.len() as u64);
        }
    }
    outcome(&restored)
}

/// A file of dense parameters: values or an error. Values survive encoding and decoding. Also tries
/// the bytes behind a valid header length, so that the reader gets beyond it.
pub fn dense(input: &[u8]) -> String {
    let mut outcomes = vec![check_dense(input)];
    if let Some(rest) = input.get(8..) {
        for length in [rest.len(), rest.iter().rposition(|byte| *byte == b'}').map_or(0, |end| end + 1)] {
            outcomes.push(check_dense(&[&(length as u64).to_le_bytes()[..], rest].concat()));
        }
    }
    outcomes.join("; ")
}

fn check_dense(bytes: &[u8]) -> String {
    let decoded = DensePart::decode(bytes);
    if let Ok((part, id)) = &decoded {
        let again = part.encode(*id).expect("a decoded part can be encoded");
        let (read, _) = DensePart::decode(&again).expect("written bytes can be read");
        assert_eq!((read.offset, read.parameters.len()), (part.offset, part.parameters.len()));
    }
    outcome(&decoded)
}

/// A full checkpoint and a delta on it, in memory, and the digests of their slots.
struct Chain {
    files: BTreeMap<String, Vec<u8>>,
    full: Vec<[u8; 32]>,
    delta: Vec<[u8; 32]>,
}

static RUNTIME: LazyLock<tokio::runtime::Runtime> =
    LazyLock::new(|| tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime"));
static CHAIN: LazyLock<Chain> = LazyLock::new(|| RUNTIME.block_on(chain()));

fn directory(memory: &Arc<InMemory>) -> Directory {
    Directory::in_store(Arc::clone(memory) as Arc<dyn ObjectStore>, Path::default(), "fuzz")
}

async fn chain() -> Chain {
    let memory = Arc::new(InMemory::new());
    let directory = directory(&memory);
    let store = filled();
    let (mut base, mut digests) = (None, Vec::new());
    for step in 1..3_u64 {
        let begin = Begin {
            step,
            base,
            slots: 4,
            identity: Identity::new([("model".to_owned(), serde_json::json!({ "kind": "lr" }))]),
            info: BTreeMap::new(),
        };
        let writer = CheckpointWriter::begin(&directory, begin).await.expect("nothing is in the way");
        let ticket = writer.ticket().clone();
        let scope =
            ticket.base.as_ref().map_or(SaveScope::Everything, |base| SaveScope::ChangesSince(base.id.save_id()));
        let frozen = Arc::new(store.freeze(ticket.id.save_id(), scope).expect("nothing is frozen"));
        digests.push(store.digests(0..4).expect("all slots are there"));
        let dense = DensePart {
            offset: 0,
            parameters: vec![step as f32, 0.5],
            optimizer: "adam".into(),
            state: vec![("m".into(), vec![1.0, 2.0])],
            update_count: step,
        };
        let slots = SlotSet::new((0..4).map(Slot));
        let saved = "memory holds it";
        let files = vec![
            save_rows(&directory, &ticket, 0, &frozen, &slots).await.expect(saved),
            save_dense(&directory, &ticket, 0, &dense).await.expect(saved),
            save_state(&directory, &ticket, "coordinator", b"{}".to_vec()).await.expect(saved),
        ];
        let manifest = writer.commit(files).await.expect(saved);
        Arc::into_inner(frozen).expect("the last reference").complete();
        base = Some(Base { directory: manifest.directory(), id: manifest.id });
        store.remove(GroupId(0), key(step)).expect("a valid request");
        touch(&store, 24..30);
    }
    let mut files = BTreeMap::new();
    for entry in directory.files("").await.expect("memory answers") {
        let bytes = directory.read(&entry.name, u64::MAX).await.expect("memory answers").expect("it is there");
        files.insert(entry.name, bytes);
    }
    let [full, delta] = digests.try_into().expect("two checkpoints");
    Chain { files, full, delta }
}

/// Files whose names begin with `kind`, as seeds.
fn files(kind: &str) -> Vec<Vec<u8>> {
    let is_it = |name: &str| name.rsplit('/').next().is_some_and(|name| name.starts_with(kind));
    CHAIN.files.iter().filter(|(name, _)| is_it(name)).map(|(_, bytes)| bytes.clone()).collect()
}

/// Bytes of an edit in a [`checkpoint`] input: operation, file, offset (3), byte.
const EDIT: usize = 6;

fn checkpoint_seeds() -> Vec<Vec<u8>> {
    vec![vec![0; 1 + 4 * EDIT], vec![3; 1 + 4 * EDIT], vec![7; 1 + EDIT]]
}

/// A whole directory of checkpoints with edited files. If a checkpoint is restored, it is one of
/// the original ones. If checksums were repaired (by the bits of the first byte), any content or
/// error is fine.
pub fn checkpoint(input: &[u8]) -> String {
    let Some((repairs, edits)) = input.split_first() else { return "empty".to_owned() };
    let mut files = CHAIN.files.clone();
    let names: Vec<&String> = CHAIN.files.keys().collect();
    for edit in edits.chunks_exact(EDIT) {
        let name = names[edit[1] as usize % names.len()];
        let other = names[edit[5] as usize % names.len()];
        let offset = u32::from_le_bytes([edit[2], edit[3], edit[4], 0]) as usize;
        edited(&mut files, edit[0], name, other, offset, edit[5]);
    }
    let untouched = files == CHAIN.files;
    repair(&mut files, *repairs);
    RUNTIME.block_on(async {
        let (restored, skipped) = restored(&files).await;
        if untouched {
            assert_eq!(restored, Some(CHAIN.delta.clone()));
        } else if repairs & 7 == 0
            && let Some(digests) = &restored
        {
            assert!(*digests == CHAIN.full || *digests == CHAIN.delta, "rows that were never saved");
        }
        format!("{} {skipped}", restored.is_some())
    })
}

fn edited(files: &mut BTreeMap<String, Vec<u8>>, operation: u8, name: &str, other: &str, offset: usize, byte: u8) {
    let donor = files.get(other).cloned();
    let Some(bytes) = files.get_mut(name).filter(|bytes| !bytes.is_empty()) else { return };
    let offset = offset % bytes.len();
    match operation % 8 {
        0 => bytes[offset] ^= 1 << (byte % 8),
        1 => bytes[offset] = byte,
        2 => bytes.truncate(offset),
        3 => bytes.insert(offset, byte),
        4 => drop(bytes.remove(offset)),
        // Like a file system that lost blocks.
        5 => bytes[offset..].fill(0),
        6 => *bytes = donor.unwrap_or_default(),
        _ => drop(files.remove(name)),
    }
}

/// Repairs checksums: of slots and indexes (1), of files in their manifests (2), of manifests (4).
fn repair(files: &mut BTreeMap<String, Vec<u8>>, which: u8) {
    let names: Vec<String> = files.keys().cloned().collect();
    let manifests: Vec<&String> = names.iter().filter(|name| name.ends_with(MANIFEST)).collect();
    if which & 1 != 0 {
        for name in names.iter().filter(|name| name.contains("rows-")) {
            let bytes = std::mem::take(files.entry(name.clone()).or_default());
            files.insert(name.clone(), with_index_checksum(with_slot_checksums(bytes)));
        }
    }
    for manifest in manifests {
        if which & 2 != 0 {
            let folder = manifest.trim_end_matches(MANIFEST);
            let Ok(mut text) = String::from_utf8(files[manifest].clone()) else { continue };
            for (name, before) in CHAIN.files.iter().filter(|(name, _)| name.starts_with(folder)) {
                let Some(now) = files.get(name) else { continue };
                text = text.replace(&format!("{:016x}", xxh3_64(before)), &format!("{:016x}", xxh3_64(now)));
                text = text.replace(&format!("\"size\": {}", before.len()), &format!("\"size\": {}", now.len()));
                if let (Some(before), Some(now)) = (index_checksum(before), index_checksum(now)) {
                    text = text.replace(&before, &now);
                }
            }
            files.insert(manifest.clone(), text.into_bytes());
        }
        if which & 4 != 0 {
            let bytes = with_checksum(files[manifest].clone());
            files.insert(manifest.clone(), bytes);
        }
    }
}

fn index_checksum(file: &[u8]) -> Option<String> {
    let footer = index_offset(file).map(|_| file.len() - ROWS_FOOTER)?;
    Some(format!("{:016x}", u64::from_le_bytes(file[footer + 16..footer + 24].try_into().ok()?)))
}

/// Repairs the checksums of the slots of a rows file, at the offsets of its index.
fn with_slot_checksums(mut file: Vec<u8>) -> Vec<u8> {
    let Some(index) = index_offset(&file) else { return file };
    for entry in (index..file.len() - ROWS_FOOTER).step_by(40) {
        let number = |at: usize| {
            let bytes = file.get(entry + at..entry + at + 8).and_then(|bytes| bytes.try_into().ok());
            bytes.and_then(|bytes| usize::try_from(u64::from_le_bytes(bytes)).ok())
        };
        let (Some(offset), Some(length)) = (number(8), number(16)) else { continue };
        let Some(end) = offset.checked_add(length).filter(|end| *end <= index) else { continue };
        let slot = with_slot_checksum(file[offset..end].to_vec());
        file[offset..end].copy_from_slice(&slot);
    }
    file
}

/// Restores the last good checkpoint, reading all of it. Returns its digests, or `None` if there is
/// no good one, and the kinds of errors for which others were skipped.
async fn restored(files: &BTreeMap<String, Vec<u8>>) -> (Option<Vec<[u8; 32]>>, String) {
    let memory = Arc::new(InMemory::new());
    for (name, bytes) in files {
        memory.put(&Path::from(name.as_str()), bytes.clone().into()).await.expect("memory holds it");
    }
    let directory = directory(&memory);
    let found = latest_good(&directory, None, Depth::Checksums, &[]).await.expect("memory answers");
    let mut kinds = String::new();
    for skipped in found.skipped {
        assert!(skipped.reason.to_string().contains("step-"), "it names the file: {}", skipped.reason);
        kinds += &outcome(&Err::<(), _>(skipped.reason));
    }
    let Some(checkpoint) = found.checkpoint else { return (None, kinds) };
    let _any = checkpoint.store_config().await;
    let _any = checkpoint.dense().await;
    let _any = checkpoint.state("coordinator").await;
    let store = Arc::new(Store::new(config()).expect("a valid configuration"));
    let restored = checkpoint.restore_rows(&store, &SlotSet::new((0..4).map(Slot))).await;
    kinds += &outcome(&restored);
    (restored.ok().map(|_| store.digests(0..4).expect("all slots are there")), kinds)
}

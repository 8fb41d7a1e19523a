//! Slot snapshots: the bytes of one slot in a checkpoint. What is here turns copied rows into bytes and
//! checked bytes into rows; it takes no lock and touches no store.
//!
//! All numbers are little-endian:
//!
//! ```text
//! offset  size
//!      0     8  "RECTSLOT"
//!      8     4  format version, 2
//!     12     4  slot
//!     16     4  slots of the job
//!     20     4  row groups, G
//!     24     8  seed of the initial values
//!     32     8  length of everything, checksum included
//!     40     4  kind: 0 all rows of the slot, 1 changes
//!     44     4  0
//!     48  68·G  each group: dim u32, zero columns u32, value type u8, initializer u8, optimizer u8,
//!               0 u8, initializer's numbers 2 × f32, optimizer's numbers 4 × f64, rows u64,
//!               removed keys u64
//!      …        the removed keys of group 0, of group 1, …, each group's rising; none where all rows
//!               are given
//!      …        the rows of group 0, of group 1, …, each group's by rising key; a row is the words
//!               it is in memory: key, score and timestamp, values, optimizer state
//!    −8     8  XXH3-64 of everything before it
//! ```
//!
//! A row travels as one unit, so values and state are of the same instant. Equal contents give equal
//! bytes. Reading checks every number against the length before it is used, and never panics
//! whatever the bytes are.

use crate::layout::{RowLayout, key_of, key_of_bytes};
use crate::{
    FeatureKey, GroupId, Initializer, RowSpec, Slot, SnapshotError, SparseOptimizer, StoreConfig, ValueType, slot_of,
};
use xxhash_rust::xxh3::xxh3_64;

const MAGIC: &[u8; 8] = b"RECTSLOT";
const VERSION: u32 = 2;
const HEADER_BYTES: usize = 48;
const GROUP_BYTES: usize = 68;
const CHECKSUM_BYTES: usize = 8;

/// The rows of a slot at one instant, as bytes to keep; see
/// [`Store::snapshot_slot`](crate::Store::snapshot_slot).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SlotSnapshot {
    slot: Slot,
    content: SlotContent,
    rows: u64,
    removed: u64,
    bytes: Vec<u8>,
}

/// Whether a snapshot stands alone.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum SlotContent {
    /// All rows of the slot.
    Whole,
    /// The rows that changed since an earlier snapshot, and the keys of those that were removed.
    Changes,
}

impl SlotSnapshot {
    #[must_use]
    pub fn slot(&self) -> Slot {
        self.slot
    }

    /// Whether it holds the whole slot or changes.
    #[must_use]
    pub fn content(&self) -> SlotContent {
        self.content
    }

    /// Rows of all groups together.
    #[must_use]
    pub fn rows(&self) -> u64 {
        self.rows
    }

    /// Removed keys of all groups together; 0 where the whole slot is given.
    #[must_use]
    pub fn removed(&self) -> u64 {
        self.removed
    }

    #[must_use]
    pub fn as_bytes(&self) -> &[u8] {
        &self.bytes
    }

    #[must_use]
    pub fn into_bytes(self) -> Vec<u8> {
        self.bytes
    }
}

/// What a restored snapshot held.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RestoredSlot {
    pub slot: Slot,
    /// Whether the slot was replaced or changed.
    pub content: SlotContent,
    /// Rows of all groups together.
    pub rows: u64,
    /// Keys that the snapshot said were removed.
    pub removed: u64,
}

/// The rows of a slot copied out of its tables: for each group its rows' words, in no order.
pub(crate) struct SlotRows {
    pub(crate) groups: Vec<Vec<u32>>,
    /// For each group the keys that were removed, if the rows are changes. A key may repeat, and may
    /// have one of the rows.
    pub(crate) removed: Option<Vec<Vec<FeatureKey>>>,
}

impl SlotRows {
    /// The keys of one group's rows, rising, each with the number of its row. `stride` is the words of a row.
    fn ordered(rows: &[u32], stride: usize) -> Vec<(FeatureKey, u32)> {
        // Numbers, not rows, are sorted: a row's key lies in memory of its own, and sorting looks at each a dozen times.
        sorted(rows.chunks_exact(stride).map(key_of).zip(0..).collect())
    }

    /// The rows of all groups by rising (key, group).
    pub(crate) fn in_key_order<'r>(&'r self, layouts: &[RowLayout]) -> Vec<(FeatureKey, GroupId, &'r [u32])> {
        let groups = self.groups.iter().zip(layouts).enumerate();
        let mut ordered: Vec<_> = groups
            .flat_map(|(group, (rows, layout))| {
                let group = GroupId(group as u16);
                let rows = rows.chunks_exact(layout.stride());
                rows.map(move |row| (key_of(row), group, row))
            })
            .collect();
        ordered.sort_unstable_by_key(|&(key, group, _)| (key, group));
        ordered
    }
}

/// Sorts by key. Keys are hashes and a slot is a range of them, so where a key belongs follows from the key nearly to the place;
/// keys that crowd cost time and nothing else.
fn sorted(rows: Vec<(FeatureKey, u32)>) -> Vec<(FeatureKey, u32)> {
    let keys = || rows.iter().map(|(key, _)| key.0);
    let (Some(first), Some(last)) = (keys().min(), keys().max()) else { return rows };
    // As many places as keys, or up to twice as many.
    let shift = (last - first).checked_ilog2().map_or(0, |bits| (bits + 1).saturating_sub(rows.len().ilog2() + 1));
    let place = |key: FeatureKey| ((key.0 - first) >> shift) as usize;
    let mut ends = vec![0_usize; place(FeatureKey(last)) + 1];
    rows.iter().for_each(|&(key, _)| ends[place(key)] += 1);
    let mut end = 0;
    for count in &mut ends {
        end += *count;
        *count = end;
    }
    let mut ordered = vec![(FeatureKey(0), 0); rows.len()];
    let mut starts = ends.clone();
    for &row in &rows {
        let start = &mut starts[place(row.0)];
        *start -= 1;
        ordered[*start] = row;
    }
    for (start, end) in starts.into_iter().zip(ends) {
        if end - start > 1 {
            ordered[start..end].sort_unstable_by_key(|&(key, _)| key);
        }
    }
    ordered
}

/// Writes a snapshot.
pub(crate) fn write(config: &StoreConfig, slot: Slot, rows: &SlotRows) -> SlotSnapshot {
    let content = if rows.removed.is_some() { SlotContent::Changes } else { SlotContent::Whole };
    let strides: Vec<usize> = config.groups.iter().map(|spec| RowLayout::new(spec).stride()).collect();
    let ordered: Vec<Vec<(FeatureKey, u32)>> =
        rows.groups.iter().zip(&strides).map(|(rows, &stride)| SlotRows::ordered(rows, stride)).collect();
    let removed = removed_keys(rows.removed.as_deref().unwrap_or_default(), &ordered);
    let words: usize = rows.groups.iter().map(Vec::len).sum();
    let keys: usize = removed.iter().map(Vec::len).sum();
    let head = HEADER_BYTES + GROUP_BYTES * config.groups.len();
    let length = head + keys * size_of::<u64>() + words * size_of::<u32>() + CHECKSUM_BYTES;
    let mut bytes = Vec::with_capacity(length);
    bytes.extend_from_slice(MAGIC);
    for number in [VERSION, slot.0, config.slots, config.groups.len() as u32] {
        bytes.extend_from_slice(&number.to_le_bytes());
    }
    bytes.extend_from_slice(&config.seed.to_le_bytes());
    bytes.extend_from_slice(&(length as u64).to_le_bytes());
    let kind: u32 = match content {
        SlotContent::Whole => 0,
        SlotContent::Changes => 1,
    };
    bytes.extend_from_slice(&kind.to_le_bytes());
    bytes.extend_from_slice(&[0; 4]);
    for (group, spec) in config.groups.iter().enumerate() {
        write_spec(&mut bytes, spec);
        bytes.extend_from_slice(&(ordered[group].len() as u64).to_le_bytes());
        bytes.extend_from_slice(&(removed.get(group).map_or(0, Vec::len) as u64).to_le_bytes());
    }
    for key in removed.iter().flatten() {
        bytes.extend_from_slice(&key.0.to_le_bytes());
    }
    for ((ordered, rows), &stride) in ordered.iter().zip(&rows.groups).zip(&strides) {
        for &(_, row) in ordered {
            let start = row as usize * stride;
            bytes.extend_from_slice(bytemuck::cast_slice(&rows[start..start + stride]));
        }
    }
    let checksum = xxh3_64(&bytes);
    bytes.extend_from_slice(&checksum.to_le_bytes());
    let count = ordered.iter().map(|rows| rows.len() as u64).sum();
    SlotSnapshot { slot, content, rows: count, removed: keys as u64, bytes }
}

/// The removed keys of each group, rising, each once, without those that have a row after all.
fn removed_keys(removed: &[Vec<FeatureKey>], ordered: &[Vec<(FeatureKey, u32)>]) -> Vec<Vec<FeatureKey>> {
    let of_group = |(keys, rows): (&Vec<FeatureKey>, &Vec<(FeatureKey, u32)>)| {
        let mut keys = keys.clone();
        keys.sort_unstable();
        keys.dedup();
        keys.retain(|key| rows.binary_search_by_key(key, |&(key, _)| key).is_err());
        keys
    };
    removed.iter().zip(ordered).map(of_group).collect()
}

/// A snapshot that has passed every check, ready to become tables.
pub(crate) struct CheckedSnapshot<'b> {
    pub(crate) slot: Slot,
    pub(crate) content: SlotContent,
    /// For each group the bytes of its rows, by rising key.
    pub(crate) groups: Vec<&'b [u8]>,
    /// For each group the removed keys, rising.
    pub(crate) removed: Vec<Vec<FeatureKey>>,
}

/// Reads a snapshot for a store made with `config`.
pub(crate) fn read<'b>(config: &StoreConfig, bytes: &'b [u8]) -> Result<CheckedSnapshot<'b>, SnapshotError> {
    let body = checked_body(bytes)?;
    let mut reader = Reader { rest: body };
    reader.take::<12>()?;
    let slot = Slot(reader.u32()?);
    check_job(config, slot, &mut reader)?;
    reader.take::<8>()?;
    let content = read_content(&mut reader)?;
    let mut counts = Vec::with_capacity(config.groups.len());
    for (position, expected) in config.groups.iter().enumerate() {
        let found = read_spec(&mut reader)?;
        if !expected.continues(&found) {
            return Err(SnapshotError::Spec {
                group: GroupId(position as u16),
                found: Box::new(found),
                expected: Box::new(*expected),
            });
        }
        counts.push(GroupCounts { rows: reader.u64()?, removed: reader.u64()? });
    }
    if content == SlotContent::Whole
        && let Some(counts) = counts.iter().find(|counts| counts.removed != 0)
    {
        return Err(SnapshotError::Field { field: "count of removed keys", found: counts.removed });
    }
    check_length(config, &counts, reader.rest.len())?;
    let (removed, rows) = read_removed(config, slot, &counts, reader.rest)?;
    let groups = read_rows(config, slot, &counts, rows)?;
    Ok(CheckedSnapshot { slot, content, groups, removed })
}

/// What one group of a snapshot holds.
struct GroupCounts {
    rows: u64,
    removed: u64,
}

fn read_content(reader: &mut Reader) -> Result<SlotContent, SnapshotError> {
    let (kind, reserved) = (reader.u32()?, reader.u32()?);
    if reserved != 0 {
        return Err(SnapshotError::Field { field: "reserved word", found: u64::from(reserved) });
    }
    match kind {
        0 => Ok(SlotContent::Whole),
        1 => Ok(SlotContent::Changes),
        found => Err(SnapshotError::Field { field: "kind", found: u64::from(found) }),
    }
}

/// The configuration of the store that wrote a snapshot: for readers that know nothing of the job.
pub(crate) fn config_of(bytes: &[u8]) -> Result<StoreConfig, SnapshotError> {
    let mut reader = Reader { rest: checked_body(bytes)? };
    reader.take::<16>()?;
    let (slots, groups, seed) = (reader.u32()?, reader.u32()?, reader.u64()?);
    reader.take::<16>()?;
    let mut specs = Vec::new();
    for _ in 0..groups {
        specs.push(read_spec(&mut reader)?);
        reader.take::<16>()?;
    }
    let config = StoreConfig { slots, seed, groups: specs };
    config.validate()?;
    Ok(config)
}

/// Everything but the checksum, once magic, version, length and checksum are right.
fn checked_body(bytes: &[u8]) -> Result<&[u8], SnapshotError> {
    let actual = bytes.len();
    let mut reader = Reader { rest: bytes };
    let is_ours = reader.take::<8>().is_ok_and(|magic| magic == *MAGIC);
    if !is_ours || actual < HEADER_BYTES + CHECKSUM_BYTES {
        return Err(SnapshotError::NotASnapshot { actual });
    }
    let found = reader.u32()?;
    if found != VERSION {
        return Err(SnapshotError::Version { found, supported: VERSION });
    }
    reader.take::<20>()?;
    let expected = reader.u64()?;
    let actual = actual as u64;
    if expected != actual {
        return Err(SnapshotError::Length { expected, actual });
    }
    let (body, checksum) = bytes.split_at(bytes.len() - CHECKSUM_BYTES);
    let expected = Reader { rest: checksum }.u64()?;
    let actual = xxh3_64(body);
    if expected != actual {
        return Err(SnapshotError::Checksum { expected, actual });
    }
    Ok(body)
}

/// Compares slot count, slot, group count and seed with the store's.
fn check_job(config: &StoreConfig, slot: Slot, reader: &mut Reader) -> Result<(), SnapshotError> {
    let (slots, groups, seed) = (reader.u32()?, reader.u32()? as usize, reader.u64()?);
    if slots != config.slots {
        return Err(SnapshotError::Slots { found: slots, expected: config.slots });
    }
    if slot.0 >= slots {
        return Err(SnapshotError::Slot { slot, slots });
    }
    if seed != config.seed {
        return Err(SnapshotError::Seed { found: seed, expected: config.seed });
    }
    if groups != config.groups.len() {
        return Err(SnapshotError::Groups { found: groups, expected: config.groups.len() });
    }
    Ok(())
}

/// Whether `actual` bytes are just what the counted keys and rows take.
fn check_length(config: &StoreConfig, counts: &[GroupCounts], actual: usize) -> Result<(), SnapshotError> {
    let row_bytes = |spec| (RowLayout::new(spec).stride() * size_of::<u32>()) as u128;
    let bytes = |(spec, counts): (_, &GroupCounts)| {
        row_bytes(spec) * u128::from(counts.rows) + size_of::<u64>() as u128 * u128::from(counts.removed)
    };
    let expected: u128 = config.groups.iter().zip(counts).map(bytes).sum();
    if expected != actual as u128 {
        return Err(SnapshotError::Length {
            expected: u64::try_from(expected).unwrap_or(u64::MAX),
            actual: actual as u64,
        });
    }
    Ok(())
}

/// Cuts the removed keys off the front of `bytes`, which are long enough, and checks them.
fn read_removed<'b>(
    config: &StoreConfig,
    slot: Slot,
    counts: &[GroupCounts],
    bytes: &'b [u8],
) -> Result<(Vec<Vec<FeatureKey>>, &'b [u8]), SnapshotError> {
    let mut rest = bytes;
    let mut removed = Vec::with_capacity(counts.len());
    for (position, counts) in counts.iter().enumerate() {
        let (own, others) = rest.split_at(counts.removed as usize * size_of::<u64>());
        rest = others;
        let keys = own.as_chunks::<8>().0.iter().map(|bytes| FeatureKey(u64::from_le_bytes(*bytes)));
        let keys: Vec<FeatureKey> = keys.collect();
        check_keys(keys.iter().copied(), GroupId(position as u16), slot, config.slots)?;
        removed.push(keys);
    }
    Ok((removed, rest))
}

/// Cuts the rows of every group out of `bytes`, which are just as long as they are together, and
/// checks their keys.
fn read_rows<'b>(
    config: &StoreConfig,
    slot: Slot,
    counts: &[GroupCounts],
    bytes: &'b [u8],
) -> Result<Vec<&'b [u8]>, SnapshotError> {
    let mut rest = bytes;
    let mut groups = Vec::with_capacity(counts.len());
    for (position, (spec, counts)) in config.groups.iter().zip(counts).enumerate() {
        let row_bytes = RowLayout::new(spec).stride() * size_of::<u32>();
        let (own, others) = rest.split_at(row_bytes * counts.rows as usize);
        rest = others;
        check_keys(own.chunks_exact(row_bytes).map(key_of_bytes), GroupId(position as u16), slot, config.slots)?;
        groups.push(own);
    }
    Ok(groups)
}

fn check_keys(
    keys: impl Iterator<Item = FeatureKey>,
    group: GroupId,
    slot: Slot,
    slots: u32,
) -> Result<(), SnapshotError> {
    let mut earlier = None;
    for key in keys {
        if slot_of(key, slots) != slot {
            return Err(SnapshotError::ForeignKey { slot, group, key });
        }
        if earlier.is_some_and(|earlier| earlier >= key) {
            return Err(SnapshotError::KeyOrder { group, key });
        }
        earlier = Some(key);
    }
    Ok(())
}

fn write_spec(bytes: &mut Vec<u8>, spec: &RowSpec) {
    bytes.extend_from_slice(&(spec.dim as u32).to_le_bytes());
    bytes.extend_from_slice(&(spec.zero_columns as u32).to_le_bytes());
    let value_type = match spec.value_type {
        ValueType::F32 => 0,
        ValueType::F16 => 1,
        ValueType::Bf16 => 2,
    };
    let (initializer, initial) = match spec.initializer {
        Initializer::Constant(value) => (0, [value, 0.0]),
        Initializer::Uniform { low, high } => (1, [low, high]),
        Initializer::Normal { standard_deviation } => (2, [standard_deviation, 0.0]),
    };
    let (optimizer, parameters) = optimizer_numbers(&spec.optimizer);
    bytes.extend_from_slice(&[value_type, initializer, optimizer, 0]);
    for number in initial {
        bytes.extend_from_slice(&number.to_le_bytes());
    }
    for number in parameters {
        bytes.extend_from_slice(&number.to_le_bytes());
    }
}

fn optimizer_numbers(optimizer: &SparseOptimizer) -> (u8, [f64; 4]) {
    match *optimizer {
        SparseOptimizer::Sgd { learning_rate } => (0, [learning_rate, 0.0, 0.0, 0.0]),
        SparseOptimizer::AdaGrad { learning_rate, initial_accumulator, epsilon } => {
            (1, [learning_rate, initial_accumulator, epsilon, 0.0])
        }
        SparseOptimizer::RowWiseAdaGrad { learning_rate, initial_accumulator, epsilon } => {
            (2, [learning_rate, initial_accumulator, epsilon, 0.0])
        }
        SparseOptimizer::Adam { learning_rate, beta1, beta2, epsilon } => (3, [learning_rate, beta1, beta2, epsilon]),
        SparseOptimizer::Ftrl { learning_rate, beta, l1, l2 } => (4, [learning_rate, beta, l1, l2]),
    }
}

fn read_spec(reader: &mut Reader) -> Result<RowSpec, SnapshotError> {
    let dim = reader.u32()? as usize;
    let zero_columns = reader.u32()? as usize;
    let [value_type, initializer, optimizer, reserved] = reader.take::<4>()?;
    let unknown = |field, found: u8| SnapshotError::Field { field, found: u64::from(found) };
    if reserved != 0 {
        return Err(unknown("reserved byte", reserved));
    }
    let value_type = match value_type {
        0 => ValueType::F32,
        1 => ValueType::F16,
        2 => ValueType::Bf16,
        other => return Err(unknown("value type", other)),
    };
    let [a, b] = [reader.f32()?, reader.f32()?];
    let initializer = match initializer {
        0 => Initializer::Constant(a),
        1 => Initializer::Uniform { low: a, high: b },
        2 => Initializer::Normal { standard_deviation: a },
        other => return Err(unknown("initializer", other)),
    };
    let parameters = [reader.f64()?, reader.f64()?, reader.f64()?, reader.f64()?];
    let optimizer = optimizer_from(optimizer, parameters).ok_or_else(|| unknown("optimizer", optimizer))?;
    Ok(RowSpec { dim, value_type, optimizer, initializer, zero_columns })
}

fn optimizer_from(tag: u8, parameters: [f64; 4]) -> Option<SparseOptimizer> {
    let [learning_rate, b, c, d] = parameters;
    Some(match tag {
        0 => SparseOptimizer::Sgd { learning_rate },
        1 => SparseOptimizer::AdaGrad { learning_rate, initial_accumulator: b, epsilon: c },
        2 => SparseOptimizer::RowWiseAdaGrad { learning_rate, initial_accumulator: b, epsilon: c },
        3 => SparseOptimizer::Adam { learning_rate, beta1: b, beta2: c, epsilon: d },
        4 => SparseOptimizer::Ftrl { learning_rate, beta: b, l1: c, l2: d },
        _ => return None,
    })
}

/// Takes numbers off the front of bytes.
struct Reader<'b> {
    rest: &'b [u8],
}

impl Reader<'_> {
    fn take<const N: usize>(&mut self) -> Result<[u8; N], SnapshotError> {
        let (taken, rest) = self
            .rest
            .split_first_chunk()
            .ok_or(SnapshotError::Length { expected: N as u64, actual: self.rest.len() as u64 })?;
        self.rest = rest;
        Ok(*taken)
    }

    fn u32(&mut self) -> Result<u32, SnapshotError> {
        self.take().map(u32::from_le_bytes)
    }

    fn u64(&mut self) -> Result<u64, SnapshotError> {
        self.take().map(u64::from_le_bytes)
    }

    fn f32(&mut self) -> Result<f32, SnapshotError> {
        self.take().map(f32::from_le_bytes)
    }

    fn f64(&mut self) -> Result<f64, SnapshotError> {
        self.take().map(f64::from_le_bytes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        /// Keys that are spread, crowded in one place, or both.
        #[test]
        fn rows_are_sorted_however_their_keys_are_spread(
            keys in prop::collection::btree_set(prop_oneof![any::<u64>(), 0..200_u64, (u64::MAX - 200)..=u64::MAX], 0..300),
            order in any::<u64>(),
        ) {
            let expected: Vec<FeatureKey> = keys.iter().copied().map(FeatureKey).collect();
            let mut rows: Vec<_> = expected.iter().copied().zip(0_u32..).collect();
            rows.sort_by_key(|&(key, _)| key.0.wrapping_mul(order | 1));
            let found = sorted(rows);
            prop_assert!(found.iter().map(|&(key, _)| key).eq(expected));
            prop_assert!(found.iter().map(|&(_, number)| number).eq(0..keys.len() as u32));
        }
    }
}

//! Slot snapshots: the bytes of a slot file. What is here turns copied rows into bytes and checked
//! bytes into rows; it takes no lock and touches no store.
//!
//! All numbers are little-endian:
//!
//! ```text
//! offset  size
//!      0     8  "RECTSLOT"
//!      8     4  format version, 1
//!     12     4  slot
//!     16     4  slots of the job
//!     20     4  row groups, G
//!     24     8  seed of the initial values
//!     32     8  length of everything, checksum included
//!     40  60·G  each group: dim u32, zero columns u32, value type u8, initializer u8, optimizer u8,
//!               0 u8, initializer's numbers 2 × f32, optimizer's numbers 4 × f64, rows u64
//!      …        the rows of group 0, of group 1, …, each group's by rising key; a row is the words
//!               it is in memory: key, score and timestamp, values, optimizer state
//!    −8     8  XXH3-64 of everything before it
//! ```
//!
//! A row travels as one unit, so values and state are of the same instant. Equal contents give equal
//! bytes. Reading checks every number against the length before it is used, and never panics
//! whatever the bytes are.

use crate::layout::{RowLayout, key_of};
use crate::{
    FeatureKey, GroupId, Initializer, RowSpec, Slot, SnapshotError, SparseOptimizer, StoreConfig, ValueType, slot_of,
};
use xxhash_rust::xxh3::xxh3_64;

const MAGIC: &[u8; 8] = b"RECTSLOT";
const VERSION: u32 = 1;
const HEADER_BYTES: usize = 40;
const GROUP_BYTES: usize = 60;
const CHECKSUM_BYTES: usize = 8;

/// The rows of a slot at one instant, as bytes to keep; see
/// [`Store::snapshot_slot`](crate::Store::snapshot_slot).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SlotSnapshot {
    slot: Slot,
    rows: u64,
    bytes: Vec<u8>,
}

impl SlotSnapshot {
    #[must_use]
    pub fn slot(&self) -> Slot {
        self.slot
    }

    /// Rows of all groups together.
    #[must_use]
    pub fn rows(&self) -> u64 {
        self.rows
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
    /// Rows of all groups together.
    pub rows: u64,
}

/// The rows of a slot copied out of its tables: for each group its rows' words, in no order.
pub(crate) struct SlotRows {
    pub(crate) groups: Vec<Vec<u32>>,
}

impl SlotRows {
    /// The rows of one group by rising key. `stride` is the words of a row.
    fn ordered(rows: &[u32], stride: usize) -> Vec<&[u32]> {
        let mut ordered: Vec<&[u32]> = rows.chunks_exact(stride).collect();
        ordered.sort_unstable_by_key(|row| key_of(row));
        ordered
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

/// Writes a snapshot.
pub(crate) fn write(config: &StoreConfig, slot: Slot, rows: &SlotRows) -> SlotSnapshot {
    let words: usize = rows.groups.iter().map(Vec::len).sum();
    let head = HEADER_BYTES + GROUP_BYTES * config.groups.len();
    let length = head + words * size_of::<u32>() + CHECKSUM_BYTES;
    let mut bytes = Vec::with_capacity(length);
    bytes.extend_from_slice(MAGIC);
    for number in [VERSION, slot.0, config.slots, config.groups.len() as u32] {
        bytes.extend_from_slice(&number.to_le_bytes());
    }
    bytes.extend_from_slice(&config.seed.to_le_bytes());
    bytes.extend_from_slice(&(length as u64).to_le_bytes());
    let mut count = 0;
    for (spec, rows) in config.groups.iter().zip(&rows.groups) {
        let rows = (rows.len() / RowLayout::new(spec).stride()) as u64;
        write_spec(&mut bytes, spec);
        bytes.extend_from_slice(&rows.to_le_bytes());
        count += rows;
    }
    for (spec, rows) in config.groups.iter().zip(&rows.groups) {
        for row in SlotRows::ordered(rows, RowLayout::new(spec).stride()) {
            bytes.extend_from_slice(bytemuck::cast_slice(row));
        }
    }
    let checksum = xxh3_64(&bytes);
    bytes.extend_from_slice(&checksum.to_le_bytes());
    SlotSnapshot { slot, rows: count, bytes }
}

/// A snapshot that has passed every check, ready to become tables.
pub(crate) struct CheckedSnapshot {
    pub(crate) slot: Slot,
    /// For each group its rows' words, by rising key.
    pub(crate) groups: Vec<Vec<u32>>,
}

/// Reads a snapshot for a store made with `config`.
pub(crate) fn read(config: &StoreConfig, bytes: &[u8]) -> Result<CheckedSnapshot, SnapshotError> {
    let body = checked_body(bytes)?;
    let mut reader = Reader { rest: body };
    reader.take::<12>()?;
    let slot = Slot(reader.u32()?);
    check_job(config, slot, &mut reader)?;
    reader.take::<8>()?;
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
        counts.push(reader.u64()?);
    }
    let groups = read_rows(config, slot, &counts, reader.rest)?;
    Ok(CheckedSnapshot { slot, groups })
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

/// Cuts the rows of every group out of `bytes`, which must be just as long as they are together, and
/// checks their keys.
fn read_rows(config: &StoreConfig, slot: Slot, counts: &[u64], bytes: &[u8]) -> Result<Vec<Vec<u32>>, SnapshotError> {
    let strides: Vec<usize> = config.groups.iter().map(|spec| RowLayout::new(spec).stride()).collect();
    let row_bytes = |&stride: &usize| stride as u128 * size_of::<u32>() as u128;
    let sizes = strides.iter().map(row_bytes).zip(counts);
    let expected: u128 = sizes.map(|(size, &count)| size * u128::from(count)).sum();
    if expected != bytes.len() as u128 {
        return Err(SnapshotError::Length {
            expected: u64::try_from(expected).unwrap_or(u64::MAX),
            actual: bytes.len() as u64,
        });
    }
    let mut rest = bytes;
    let mut groups = Vec::with_capacity(strides.len());
    for (position, (&stride, &count)) in strides.iter().zip(counts).enumerate() {
        let mut words = vec![0; stride * count as usize];
        let (own, others) = rest.split_at(words.len() * size_of::<u32>());
        bytemuck::cast_slice_mut(&mut words).copy_from_slice(own);
        rest = others;
        check_keys(&words, stride, GroupId(position as u16), slot, config.slots)?;
        groups.push(words);
    }
    Ok(groups)
}

fn check_keys(words: &[u32], stride: usize, group: GroupId, slot: Slot, slots: u32) -> Result<(), SnapshotError> {
    let mut earlier = None;
    for row in words.chunks_exact(stride) {
        let key = key_of(row);
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

//! The record of a row group in a snapshot.

use super::read::Reader;
use crate::life::LifePolicy;
use crate::optimizer::RowOptimizer;
use crate::{Initializer, RowSpec, SnapshotError, SparseOptimizer, ValueType};

const SPEC_BYTES: usize = 52;
const COUNT_BYTES: usize = 16;
const LIFE_BYTES: usize = 40;
const FIRST_ORDER_BYTES: usize = 40;
/// This bit of the optimizer's tag says that the record ends with the optimizer of the leading
/// columns. No tag has it.
const HAS_FIRST_ORDER: u8 = 0x80;

/// A group's spec, and the numbers of its rows, removed keys and blocks in the snapshot.
pub(super) struct GroupRecord {
    pub(super) spec: RowSpec,
    pub(super) rows: u64,
    pub(super) removed: u64,
    /// Blocks of the side table.
    pub(super) blocks: u64,
}

/// Whether the record of a group with this policy has the policy's settings.
fn has_settings(life: LifePolicy) -> bool {
    life.to_snapshot().0 != 0
}

/// Bytes of the record of a group with this spec.
pub(super) fn record_bytes(spec: &RowSpec) -> usize {
    let life = if has_settings(spec.life) { LIFE_BYTES } else { 0 };
    SPEC_BYTES + COUNT_BYTES + life + spec.first_order.map_or(0, |_| FIRST_ORDER_BYTES)
}

/// The optimizer of the leading columns, as the end of a record.
fn write_first_order(optimizer: SparseOptimizer, bytes: &mut Vec<u8>) {
    let (tag, numbers) = optimizer.to_snapshot();
    bytes.extend_from_slice(&u64::from(tag).to_le_bytes());
    numbers.iter().for_each(|number| bytes.extend_from_slice(&number.to_le_bytes()));
}

/// The inverse of [`write_first_order`].
fn read_first_order(reader: &mut Reader<'_>) -> Result<SparseOptimizer, SnapshotError> {
    let tag = reader.u64()?;
    let numbers = [reader.f64()?, reader.f64()?, reader.f64()?, reader.f64()?];
    let optimizer = u8::try_from(tag).ok().and_then(|tag| SparseOptimizer::from_snapshot(tag, numbers));
    optimizer.ok_or(SnapshotError::Field { field: "optimizer of first-order weights", found: tag })
}

impl GroupRecord {
    pub(super) fn write(&self, bytes: &mut Vec<u8>) {
        let spec = &self.spec;
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
        let (optimizer, optimizer_numbers) = spec.optimizer.to_snapshot();
        let (life, life_numbers) = spec.life.to_snapshot();
        let flag = spec.first_order.map_or(0, |_| HAS_FIRST_ORDER);
        bytes.extend_from_slice(&[value_type, initializer, optimizer | flag, life]);
        initial.iter().for_each(|number| bytes.extend_from_slice(&number.to_le_bytes()));
        optimizer_numbers.iter().for_each(|number| bytes.extend_from_slice(&number.to_le_bytes()));
        bytes.extend_from_slice(&self.rows.to_le_bytes());
        bytes.extend_from_slice(&self.removed.to_le_bytes());
        if has_settings(spec.life) {
            life_numbers.iter().for_each(|number| bytes.extend_from_slice(&number.to_le_bytes()));
            bytes.extend_from_slice(&self.blocks.to_le_bytes());
        }
        if let Some(first_order) = spec.first_order {
            write_first_order(first_order, bytes);
        }
    }

    pub(super) fn read(reader: &mut Reader<'_>) -> Result<Self, SnapshotError> {
        let unknown = |field, found: u8| SnapshotError::Field { field, found: u64::from(found) };
        let dim = reader.u32()? as usize;
        let zero_columns = reader.u32()? as usize;
        let [value_type, initializer, optimizer, life] = reader.take::<4>()?;
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
        let numbers = [reader.f64()?, reader.f64()?, reader.f64()?, reader.f64()?];
        let has_first_order = optimizer & HAS_FIRST_ORDER != 0;
        let optimizer = SparseOptimizer::from_snapshot(optimizer & !HAS_FIRST_ORDER, numbers)
            .ok_or_else(|| unknown("optimizer", optimizer))?;
        let (rows, removed) = (reader.u64()?, reader.u64()?);
        let (mut numbers, mut blocks) = ([0; 4], 0);
        if life != 0 {
            numbers = [reader.u64()?, reader.u64()?, reader.u64()?, reader.u64()?];
            blocks = reader.u64()?;
        }
        let life = LifePolicy::from_snapshot(life, numbers).ok_or_else(|| unknown("row life", life))?;
        let first_order = if has_first_order { Some(read_first_order(reader)?) } else { None };
        let spec = RowSpec { dim, value_type, optimizer, life, initializer, zero_columns, first_order, share: None };
        Ok(Self { spec, rows, removed, blocks })
    }
}

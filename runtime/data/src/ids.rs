//! The values of a column of ids, as Arrow arrays, and their keys. Parquet files have such columns,
//! and so have rows in memory. Text files have texts only, and call the encoder themselves.

use arrow_array::cast::AsArray;
use arrow_array::types::{Int64Type, UInt64Type};
use arrow_array::{Array, ArrayRef, BinaryArray, Float64Array, ListArray, PrimitiveArray};
use arrow_cast::cast;
use arrow_schema::{ArrowError, DataType};

use crate::schema::{FLOAT_IDS, SparseEncoder};
use crate::spelling::Id;

/// The first integer that 16-bit floats may have rounded.
const HALF_LIMIT: f64 = (1 << 11) as f64;
/// The first integer that 32-bit floats may have rounded.
pub(crate) const SINGLE_LIMIT: f64 = (1 << 24) as f64;
/// The first integer that 64-bit floats may have rounded.
pub(crate) const DOUBLE_LIMIT: f64 = (1_u64 << 53) as f64;

/// The values of a sparse column, in one of the types of ids.
pub(crate) enum Ids {
    Integers(PrimitiveArray<Int64Type>),
    Unsigned(PrimitiveArray<UInt64Type>),
    /// Integers as floats, and the first integer that such floats may have rounded.
    Floats(Float64Array, f64),
    Bytes(BinaryArray),
    Lists(ListArray, Box<Ids>),
}

impl Ids {
    pub(crate) fn of(values: &ArrayRef) -> Result<Self, ArrowError> {
        Ok(match values.data_type() {
            DataType::List(_) => {
                let lists = values.as_list::<i32>().clone();
                let items = Box::new(Self::of(lists.values())?);
                Self::Lists(lists, items)
            }
            DataType::UInt64 => Self::Unsigned(values.as_primitive().clone()),
            found if found.is_floating() => {
                let limit = match found {
                    DataType::Float16 => HALF_LIMIT,
                    DataType::Float32 => SINGLE_LIMIT,
                    _ => DOUBLE_LIMIT,
                };
                let values = cast(values, &DataType::Float64)?;
                Self::Floats(values.as_primitive().clone(), limit)
            }
            found if found.is_integer() => Self::Integers(cast(values, &DataType::Int64)?.as_primitive().clone()),
            _ => Self::Bytes(cast(values, &DataType::Binary)?.as_binary().clone()),
        })
    }

    /// The expected values, if row `row` holds others: floats that are no integers, or may be
    /// rounded, or a list in brackets.
    pub(crate) fn fault(&self, row: usize, sparse: &SparseEncoder) -> Option<&'static str> {
        match self {
            Self::Lists(lists, items) if lists.is_valid(row) => {
                let offsets = lists.value_offsets();
                (offsets[row] as usize..offsets[row + 1] as usize).find_map(|item| items.item_fault(item, sparse))
            }
            Self::Floats(values, limit) if values.is_valid(row) => {
                let value = values.value(row);
                let is_id = value.is_nan() || value.fract() == 0.0 && value.abs() < *limit;
                (!is_id).then_some(FLOAT_IDS)
            }
            Self::Bytes(values) if values.is_valid(row) => sparse.fault(values.value(row)),
            _ => None,
        }
    }

    /// As [`Ids::fault`], for an item of a list. Its text is not split, and may have brackets.
    pub(crate) fn item_fault(&self, item: usize, sparse: &SparseEncoder) -> Option<&'static str> {
        match self {
            Self::Bytes(_) => self.is_rounded(item).then_some(FLOAT_IDS),
            _ => self.fault(item, sparse),
        }
    }

    /// Whether the text of row `row` is a float that may have lost digits.
    pub(crate) fn is_rounded(&self, row: usize) -> bool {
        matches!(self, Self::Bytes(values) if values.is_valid(row) && Id::read(values.value(row)).is_rounded())
    }

    /// Appends the keys of row `row`. It has no [`Ids::fault`].
    pub(crate) fn push(&self, row: usize, sparse: &SparseEncoder, keys: &mut Vec<u64>) {
        match self {
            Self::Lists(lists, items) => {
                let offsets = lists.value_offsets();
                if lists.is_valid(row) {
                    for item in offsets[row] as usize..offsets[row + 1] as usize {
                        items.push_item(item, sparse, keys);
                    }
                }
            }
            Self::Bytes(values) if values.is_valid(row) => {
                sparse.push_text(values.value(row), keys);
            }
            Self::Integers(values) if values.is_valid(row) => {
                keys.push(sparse.table.integer(values.value(row)));
            }
            Self::Unsigned(values) if values.is_valid(row) => {
                keys.push(sparse.table.unsigned(values.value(row)));
            }
            Self::Floats(values, _) if values.is_valid(row) && !values.value(row).is_nan() => {
                sparse.remarks.note_floats();
                keys.push(sparse.table.integer(values.value(row) as i64));
            }
            _ => keys.extend(sparse.missing),
        }
    }

    /// Appends the key of one item of a list. Nulls and empty texts are not items. The text of an
    /// item is not split at separators.
    pub(crate) fn push_item(&self, item: usize, sparse: &SparseEncoder, keys: &mut Vec<u64>) {
        match self {
            Self::Bytes(values) if values.is_valid(item) => {
                sparse.push_item(values.value(item), keys);
            }
            Self::Bytes(_) => {}
            _ => self.push(item, sparse, keys),
        }
    }
}

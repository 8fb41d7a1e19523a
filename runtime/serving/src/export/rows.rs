//! The file of a row group: arrays that a reader maps.

use serde::{Deserialize, Serialize};

use super::manifest::FileOfExport;
use crate::error::ServingError;
use crate::table::Table;
use crate::value::ExportType;

/// The first bytes of a rows file.
const MAGIC: &[u8; 8] = b"RTSERVE1";
/// Each array begins at a multiple of this many bytes.
const ALIGNMENT: usize = 64;

/// The description of a rows file in `model.json`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct RowsFile {
    pub(super) group: usize,
    #[serde(flatten)]
    pub(super) file: FileOfExport,
    /// Number of rows.
    pub(super) rows: u64,
    /// Values of a row, the first-order weight first if there is one.
    pub(super) dim: usize,
    /// The name of an [`ExportType`].
    pub(super) value_type: String,
    /// Where the keys begin: u64, little-endian, rising.
    pub(super) keys_offset: u64,
    /// Where the factors of the rows begin: f32, little-endian. Only `int8` has them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) scales_offset: Option<u64>,
    /// Where the values begin, row by row.
    pub(super) values_offset: u64,
    /// The largest difference between a value in the file and the checkpoint's.
    pub(super) largest_error: f32,
}

impl RowsFile {
    /// The name of the file.
    pub(super) fn name(&self) -> String {
        format!("rows-{}.bin", self.group)
    }

    /// The bytes of a table, and their description. It does not describe the file yet.
    pub(super) fn encode(group: usize, table: &Table, value_type: ExportType) -> Result<(Vec<u8>, Self), ServingError> {
        let dim = table.dim();
        let mut bytes = MAGIC.to_vec();
        let keys_offset = align(&mut bytes);
        table.keys().iter().for_each(|key| bytes.extend_from_slice(&key.to_le_bytes()));
        let scales: Vec<f32> = table.values().chunks_exact(dim).map(|row| value_type.scale(row)).collect();
        let scales_offset = value_type.has_scales().then(|| {
            let offset = align(&mut bytes);
            scales.iter().for_each(|scale| bytes.extend_from_slice(&scale.to_le_bytes()));
            offset
        });
        let values_offset = align(&mut bytes);
        let mut largest_error = 0.0_f32;
        for ((row, key), scale) in table.values().chunks_exact(dim).zip(table.keys()).zip(&scales) {
            for &value in row {
                let start = bytes.len();
                value_type.encode(value, *scale, &mut bytes);
                let error = (value_type.decode(&bytes[start..], *scale) - value).abs();
                if !error.is_finite() {
                    return Err(ServingError::Value { group, key: *key, value, value_type: value_type.name() });
                }
                largest_error = largest_error.max(error);
            }
        }
        let description = Self {
            group,
            file: FileOfExport::default(),
            rows: table.keys().len() as u64,
            dim,
            value_type: value_type.name().to_owned(),
            keys_offset,
            scales_offset,
            values_offset,
            largest_error,
        };
        Ok((bytes, description))
    }

    /// The table in the bytes of a file, or the problem with them.
    pub(super) fn decode(&self, bytes: &[u8]) -> Result<Table, String> {
        let value_type: ExportType = self.value_type.parse()?;
        if !bytes.starts_with(MAGIC) {
            return Err("it does not begin as a rows file".to_owned());
        }
        let rows = usize::try_from(self.rows).map_err(|error| error.to_string())?;
        let keys = array(bytes, self.keys_offset, rows, 8)?;
        let keys = keys.chunks_exact(8).map(|key| u64::from_le_bytes(key.try_into().unwrap_or_default())).collect();
        let scales = match self.scales_offset {
            None => vec![1.0; rows],
            Some(offset) => {
                let scales = array(bytes, offset, rows, 4)?;
                scales.chunks_exact(4).map(|scale| ExportType::F32.decode(scale, 1.0)).collect()
            }
        };
        let width = value_type.bytes();
        let values = array(bytes, self.values_offset, rows, self.dim.saturating_mul(width))?;
        let row_of = |place: usize| place / self.dim.max(1);
        let values = values.chunks_exact(width).enumerate();
        let values = values.map(|(place, value)| value_type.decode(value, scales[row_of(place)])).collect();
        Table::of(self.dim, keys, values).ok_or_else(|| "its keys do not rise".to_owned())
    }
}

/// Fills up to the next multiple of [`ALIGNMENT`], and returns it.
fn align(bytes: &mut Vec<u8>) -> u64 {
    bytes.resize(bytes.len().next_multiple_of(ALIGNMENT), 0);
    bytes.len() as u64
}

/// An array of `rows` entries of `width` bytes.
fn array(bytes: &[u8], offset: u64, rows: usize, width: usize) -> Result<&[u8], String> {
    let start = usize::try_from(offset).ok();
    let end = start.and_then(|start| start.checked_add(rows.checked_mul(width)?));
    let range = start.zip(end).and_then(|(start, end)| bytes.get(start..end));
    range.ok_or_else(|| format!("it has {} bytes, and an array of {rows} rows at {offset} is longer", bytes.len()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn table() -> Table {
        let keys: Vec<u64> = (1..=100).map(|row| row << 56).collect();
        let values = (0..300_u16).map(|n| (f32::from(n) - 150.0) / 100.0).collect();
        Table::of(3, keys, values).unwrap()
    }

    #[test]
    fn a_table_comes_back_within_the_stated_error() {
        for value_type in ExportType::ALL {
            let (bytes, file) = RowsFile::encode(2, &table(), value_type).unwrap();
            let found = file.decode(&bytes).unwrap();
            assert_eq!(found.keys(), table().keys());
            let errors = found.values().iter().zip(table().values().to_vec()).map(|(a, b)| (a - b).abs());
            assert_eq!(errors.fold(0.0, f32::max), file.largest_error, "{}", value_type.name());
            assert_eq!(value_type == ExportType::F32, file.largest_error == 0.0);
            assert_eq!(file.values_offset % 64, 0);
            assert!(file.decode(&bytes[..bytes.len() - 1]).is_err());
        }
    }

    #[test]
    fn a_value_beyond_half_precision_is_refused() {
        let table = Table::of(1, vec![7], vec![1e6]).unwrap();
        let message = RowsFile::encode(0, &table, ExportType::F16).unwrap_err().to_string();
        assert!(message.contains("key 0000000000000007: 1000000 cannot be exported as f16"), "{message}");
    }
}

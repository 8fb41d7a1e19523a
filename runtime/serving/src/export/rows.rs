//! The file of a row group: arrays that a reader maps.

use serde::{Deserialize, Serialize};

use super::manifest::FileOfExport;
use crate::error::ServingError;
use crate::value::ExportType;
use crate::versioned_table::{Builder, VersionedTable};

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
    pub(super) fn encode(
        group: usize,
        table: &VersionedTable,
        value_type: ExportType,
    ) -> Result<(Vec<u8>, Self), ServingError> {
        let dim = table.dim();
        let mut bytes = MAGIC.to_vec();
        let keys_offset = align(&mut bytes);
        table.rows().for_each(|(key, _)| bytes.extend_from_slice(&key.to_le_bytes()));
        let scales: Vec<f32> = table.rows().map(|(_, row)| value_type.scale(row)).collect();
        let scales_offset = value_type.has_scales().then(|| {
            let offset = align(&mut bytes);
            scales.iter().for_each(|scale| bytes.extend_from_slice(&scale.to_le_bytes()));
            offset
        });
        let values_offset = align(&mut bytes);
        let mut largest_error = 0.0_f32;
        for ((key, row), scale) in table.rows().zip(&scales) {
            for &value in row {
                let start = bytes.len();
                value_type.encode(value, *scale, &mut bytes);
                let error = (value_type.decode(&bytes[start..], *scale) - value).abs();
                if !error.is_finite() {
                    return Err(ServingError::Value { group, key, value, value_type: value_type.name() });
                }
                largest_error = largest_error.max(error);
            }
        }
        let description = Self {
            group,
            file: FileOfExport::default(),
            rows: table.len() as u64,
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
    pub(super) fn decode(&self, bytes: &[u8]) -> Result<VersionedTable, String> {
        let value_type: ExportType = self.value_type.parse()?;
        if !bytes.starts_with(MAGIC) {
            return Err("it does not begin as a rows file".to_owned());
        }
        let rows = usize::try_from(self.rows).map_err(|error| error.to_string())?;
        let keys = array(bytes, self.keys_offset, rows, 8)?;
        let keys = keys.as_chunks::<8>().0.iter().map(|key| u64::from_le_bytes(*key));
        let scales = match self.scales_offset {
            None => vec![1.0; rows],
            Some(offset) => {
                let scales = array(bytes, offset, rows, 4)?;
                scales.chunks_exact(4).map(|scale| ExportType::F32.decode(scale, 1.0)).collect()
            }
        };
        let width = value_type.bytes();
        let values = array(bytes, self.values_offset, rows, self.dim.saturating_mul(width))?;
        let mut table = Builder::new(self.dim);
        let mut row = Vec::new();
        for ((key, values), scale) in keys.zip(values.chunks(self.dim.saturating_mul(width).max(1))).zip(scales) {
            if table.last_key().is_some_and(|last| last >= key) {
                return Err("its keys do not rise".to_owned());
            }
            row.clear();
            row.extend(values.chunks_exact(width).map(|value| value_type.decode(value, scale)));
            table.push(key, &row);
        }
        Ok(table.finish())
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

    fn table() -> VersionedTable {
        let mut table = Builder::new(3);
        for row in 1..=100_u16 {
            table.push(u64::from(row) << 56, &[0, 1, 2].map(|n| (f32::from(3 * row + n) - 153.0) / 100.0));
        }
        table.finish()
    }

    #[test]
    fn a_table_comes_back_within_the_stated_error() {
        for value_type in ExportType::ALL {
            let (bytes, file) = RowsFile::encode(2, &table(), value_type).unwrap();
            let found = file.decode(&bytes).unwrap();
            let expected = table();
            assert!(found.rows().map(|(key, _)| key).eq(expected.rows().map(|(key, _)| key)));
            let values = |table: &VersionedTable| table.rows().flat_map(|(_, row)| row.to_vec()).collect::<Vec<_>>();
            let errors = values(&found).into_iter().zip(values(&expected)).map(|(a, b)| (a - b).abs());
            assert_eq!(errors.fold(0.0, f32::max), file.largest_error, "{}", value_type.name());
            assert_eq!(value_type == ExportType::F32, file.largest_error == 0.0);
            assert_eq!(file.values_offset % 64, 0);
            assert!(file.decode(&bytes[..bytes.len() - 1]).is_err());
        }
    }

    #[test]
    fn a_value_beyond_half_precision_is_refused() {
        let mut table = Builder::new(1);
        table.push(7, &[1e6]);
        let message = RowsFile::encode(0, &table.finish(), ExportType::F16).unwrap_err().to_string();
        assert!(message.contains("key 0000000000000007: 1000000 cannot be exported as f16"), "{message}");
    }
}

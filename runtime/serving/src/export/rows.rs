//! The file of a row group: arrays that a reader maps.

use std::ops::Range;

use serde::{Deserialize, Serialize};

use super::manifest::FileOfExport;
use crate::error::ServingError;
use crate::table::KeyRange;
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
        if !bytes.starts_with(MAGIC) {
            return Err("it does not begin as a rows file".to_owned());
        }
        let rows = usize::try_from(self.rows).map_err(|error| error.to_string())?;
        let Arrays { keys, scales, values } = self.arrays()?;
        let keys = keys_of(keys.of(bytes, rows)?);
        let scales = scales.map(|scales| scales.of(bytes, rows)).transpose()?;
        self.table(&keys, scales, values.of(bytes, rows)?)
    }

    /// Reads the rows of a range of keys from the file, which comes piece by piece. So only these
    /// rows and the keys are in memory.
    pub(super) fn read_part(&self, range: KeyRange) -> Result<PartOfRows<'_>, String> {
        let Arrays { keys, scales, values } = self.arrays()?;
        let rows = usize::try_from(self.rows).map_err(|error| error.to_string())?;
        let is_behind = |array: &Array| array.start >= keys.end(rows);
        if !is_behind(&values) || !scales.as_ref().is_none_or(is_behind) {
            return Err("its keys are not its first array".to_owned());
        }
        let wanted = vec![Wanted::new(0..MAGIC.len()), Wanted::new(keys.start..keys.end(rows))];
        Ok(PartOfRows { file: self, range, rows, wanted, scales, values, place: 0 })
    }

    /// Where the arrays are.
    fn arrays(&self) -> Result<Arrays, String> {
        let value_type: ExportType = self.value_type.parse()?;
        let array = |offset: u64, width: usize| {
            let start = usize::try_from(offset).map_err(|error| error.to_string())?;
            Ok::<_, String>(Array { start, width })
        };
        Ok(Arrays {
            keys: array(self.keys_offset, 8)?,
            scales: self.scales_offset.map(|offset| array(offset, 4)).transpose()?,
            values: array(self.values_offset, self.dim.saturating_mul(value_type.bytes()))?,
        })
    }

    /// The table of these keys, and of the bytes of their scales and values.
    fn table(&self, keys: &[u64], scales: Option<&[u8]>, values: &[u8]) -> Result<VersionedTable, String> {
        let value_type: ExportType = self.value_type.parse()?;
        let width = value_type.bytes();
        let mut table = Builder::new(self.dim);
        let mut row = Vec::new();
        for (place, (key, values)) in keys.iter().zip(values.chunks(self.dim.saturating_mul(width).max(1))).enumerate()
        {
            if table.last_key().is_some_and(|last| last >= *key) {
                return Err("its keys do not rise".to_owned());
            }
            let scale = scales.map_or(1.0, |scales| ExportType::F32.decode(&scales[4 * place..][..4], 1.0));
            row.clear();
            row.extend(values.chunks_exact(width).map(|value| value_type.decode(value, scale)));
            table.push(*key, &row);
        }
        Ok(table.finish())
    }
}

fn keys_of(bytes: &[u8]) -> Vec<u64> {
    bytes.as_chunks::<8>().0.iter().map(|key| u64::from_le_bytes(*key)).collect()
}

/// The arrays of a rows file.
struct Arrays {
    keys: Array,
    scales: Option<Array>,
    values: Array,
}

/// An array of a rows file.
#[derive(Debug, Clone, Copy)]
struct Array {
    start: usize,
    /// Bytes of a row.
    width: usize,
}

impl Array {
    /// The byte behind the last of so many rows.
    fn end(&self, rows: usize) -> usize {
        self.start.saturating_add(rows.saturating_mul(self.width))
    }

    /// The bytes of so many rows.
    fn of<'b>(&self, bytes: &'b [u8], rows: usize) -> Result<&'b [u8], String> {
        bytes.get(self.start..self.end(rows)).ok_or_else(|| {
            let (found, start) = (bytes.len(), self.start);
            format!("it has {found} bytes, and an array of {rows} rows at {start} is longer")
        })
    }
}

/// A part of a rows file that is kept.
#[derive(Debug)]
struct Wanted {
    range: Range<usize>,
    bytes: Vec<u8>,
}

impl Wanted {
    const fn new(range: Range<usize>) -> Self {
        Self { range, bytes: Vec::new() }
    }

    /// Keeps the bytes of a piece that are wanted. The piece begins at `place` of the file.
    fn keep(&mut self, place: usize, piece: &[u8]) {
        let start = self.range.start.max(place);
        let end = self.range.end.min(place + piece.len());
        if start < end {
            self.bytes.extend_from_slice(&piece[start - place..end - place]);
        }
    }

    fn is_whole(&self) -> bool {
        self.bytes.len() == self.range.len()
    }
}

/// Takes a rows file piece by piece, and keeps the rows of a range of keys.
#[derive(Debug)]
pub(super) struct PartOfRows<'f> {
    file: &'f RowsFile,
    range: KeyRange,
    /// Rows of the file.
    rows: usize,
    /// The magic, the keys, and then the scales and the values of the rows.
    wanted: Vec<Wanted>,
    scales: Option<Array>,
    values: Array,
    /// Bytes that were taken.
    place: usize,
}

impl PartOfRows<'_> {
    /// Takes the next bytes.
    pub(super) fn push(&mut self, mut piece: &[u8]) {
        // The arrays behind the keys are wanted once the keys are known.
        if let [_, keys] = &self.wanted[..]
            && !keys.is_whole()
            && self.place + piece.len() > keys.range.end
        {
            let (first, rest) = piece.split_at(keys.range.end - self.place);
            self.take(first);
            piece = rest;
        }
        if let [_, keys] = &self.wanted[..]
            && keys.is_whole()
        {
            let keys = keys_of(&keys.bytes);
            let start = keys.partition_point(|key| *key < self.range.first);
            let end = keys.partition_point(|key| *key <= self.range.last).max(start);
            let part = |array: &Array| Wanted::new(array.end(start)..array.end(end));
            let own = Wanted { range: 0..0, bytes: self.wanted[1].bytes[8 * start..8 * end].to_vec() };
            let scales = self.scales.as_ref().map_or(Wanted::new(0..0), part);
            let values = part(&self.values);
            self.wanted.truncate(1);
            self.wanted.extend([own, scales, values]);
        }
        self.take(piece);
    }

    fn take(&mut self, piece: &[u8]) {
        let place = self.place;
        self.wanted.iter_mut().for_each(|wanted| wanted.keep(place, piece));
        self.place += piece.len();
    }

    /// The table of the rows, once all bytes were taken.
    pub(super) fn finish(self) -> Result<VersionedTable, String> {
        let (found, rows) = (self.place, self.rows);
        let [magic, keys, scales, values] = &self.wanted[..] else {
            return Err(format!("it has {found} bytes, and its {rows} keys end later"));
        };
        if magic.bytes != MAGIC {
            return Err("it does not begin as a rows file".to_owned());
        }
        if !scales.is_whole() || !values.is_whole() {
            return Err(format!("it has {found} bytes, and the values of its {rows} rows end later"));
        }
        let scales = self.scales.is_some().then_some(&scales.bytes[..]);
        self.file.table(&keys_of(&keys.bytes), scales, &values.bytes)
    }
}

/// Fills up to the next multiple of [`ALIGNMENT`], and returns it.
fn align(bytes: &mut Vec<u8>) -> u64 {
    bytes.resize(bytes.len().next_multiple_of(ALIGNMENT), 0);
    bytes.len() as u64
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
    fn a_part_of_a_file_has_the_rows_of_its_keys() {
        let range = KeyRange { first: 20 << 56, last: 61 << 56 };
        for value_type in ExportType::ALL {
            let (bytes, file) = RowsFile::encode(2, &table(), value_type).unwrap();
            let whole = file.decode(&bytes).unwrap();
            for piece in [1, 7, 64, 1000, bytes.len()] {
                let mut part = file.read_part(range).unwrap();
                bytes.chunks(piece).for_each(|piece| part.push(piece));
                let part = part.finish().unwrap();
                let expected: Vec<_> = whole.rows().filter(|(key, _)| range.contains(*key)).collect();
                assert_eq!(part.len(), 42);
                assert_eq!(part.rows().collect::<Vec<_>>(), expected, "{} by {piece}", value_type.name());
            }
            for bytes in [&bytes[..bytes.len() / 2], &bytes[..100]] {
                let mut part = file.read_part(KeyRange::ALL).unwrap();
                part.push(bytes);
                assert!(part.finish().is_err_and(|problem| problem.contains("end later")));
            }
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

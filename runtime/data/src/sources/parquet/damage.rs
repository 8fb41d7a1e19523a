//! Finds the column chunk behind an error of the decoder, for a message. Readers call it after an
//! error only, because it reads the pages of a row group again.

use std::sync::Arc;

use parquet::arrow::ProjectionMask;
use parquet::errors::ParquetError;
use parquet::file::metadata::ParquetMetaData;
use parquet::file::reader::ChunkReader;
use parquet::file::serialized_reader::SerializedPageReader;

/// The message of the decoder for a page with a checksum that its bytes do not have.
const WRONG_CHECKSUM: &str = "Page CRC checksum mismatch";

/// Runs a piece of the Parquet decoder, which panics on some damaged files. A panic becomes an
/// error. The caller must then drop the values that the piece worked on.
pub(super) fn caught<T>(decode: impl FnOnce() -> T) -> Result<T, ParquetError> {
    std::panic::catch_unwind(std::panic::AssertUnwindSafe(decode)).map_err(|panic| {
        let said = panic.downcast_ref::<&str>().map(|said| (*said).to_owned());
        let said = said.or_else(|| panic.downcast_ref::<String>().cloned());
        let said = said.unwrap_or_else(|| "no message".to_owned());
        ParquetError::General(format!("its pages cannot be decoded ({said})"))
    })
}

/// A column with a page that cannot be read.
pub(super) struct BadColumn {
    name: String,
    problem: String,
}

impl BadColumn {
    /// The first column of a row group, among the columns of `mask`, with a page that cannot be
    /// read.
    pub(super) fn find<R: ChunkReader>(
        input: R,
        metadata: &ParquetMetaData,
        mask: &ProjectionMask,
        group: usize,
    ) -> Option<Self> {
        let (input, group) = (Arc::new(input), metadata.row_groups().get(group)?);
        let rows = usize::try_from(group.num_rows()).ok()?;
        let wanted = group.columns().iter().enumerate().filter(|(leaf, _)| mask.leaf_included(*leaf));
        for (_, column) in wanted {
            let pages = caught(|| {
                let mut pages = SerializedPageReader::new(Arc::clone(&input), column, rows, None)?;
                pages.try_for_each(|page| page.map(drop))
            });
            if let Err(error) = pages.and_then(|pages: Result<(), ParquetError>| pages) {
                return Some(Self { name: column.column_path().string(), problem: error.to_string() });
            }
        }
        None
    }
}

/// The finding about a row group: the column if it is known, and the message of the decoder.
pub(super) fn problem(group: usize, column: Option<BadColumn>, error: String) -> String {
    let (place, error) = match column {
        Some(BadColumn { name, problem }) => (format!("row group {group}, column `{name}`"), problem),
        None => (format!("row group {group}"), error),
    };
    match error.contains(WRONG_CHECKSUM) {
        true => format!("{place}: the bytes of a page do not match its checksum"),
        false => format!("{place}: {error}"),
    }
}

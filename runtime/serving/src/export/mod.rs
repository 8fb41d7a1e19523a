//! Exports for serving: one folder that a server maps into memory without parsing rows.
//!
//! - `model.json`: how cells become keys and inputs, and where each array lies in its file;
//! - `rows-G.bin` for each row group: keys, factors if the type has them, and values, each as one
//!   array that begins at a multiple of 64 bytes;
//! - `tower.onnx`: the tower, from dense features and pooled rows to the probability;
//! - `dense.bin`: the parameters of the tower, for this program.
//!
//! The bytes depend on the trained model alone: not on the number of servers that wrote the
//! checkpoint, its id, or the time. `docs/reference/serving-format.md` describes them.

mod folder;
mod manifest;
mod read;
mod rows;

use std::path::Path;

use rectrain_dense::tasks::{BinaryCrossEntropy, Tasks};

use self::folder::Folder;
use self::manifest::{FileOfExport, ServedModel};
pub use self::read::load_export;
use self::rows::RowsFile;
use crate::error::ServingError;
use crate::model::Model;
use crate::value::ExportType;

/// The file that describes an export.
pub const MODEL_FILE: &str = "model.json";
const TOWER: &str = "tower.onnx";
const DENSE: &str = "dense.bin";

/// A finished export.
#[derive(Debug, Clone, PartialEq)]
pub struct Exported {
    /// The names of its files.
    pub files: Vec<String>,
    /// Bytes of all files but `model.json`.
    pub bytes: u64,
    /// Rows of all groups.
    pub rows: u64,
    /// The largest difference between an exported value and the checkpoint's.
    pub largest_error: f32,
    /// The digest of the model.
    pub digest: String,
}

/// Whether a local folder holds an export, for serving or for other programs.
#[must_use]
pub fn is_export(folder: &Path) -> bool {
    folder.join(MODEL_FILE).is_file()
}

/// Writes `model` into `output`, which does not exist yet or is empty. All files appear there at
/// once. After an error there is nothing.
///
/// # Errors
/// [`ServingError::NotEmpty`], [`ServingError::Value`], and errors of the operating system.
pub fn export(model: &Model, output: &Path, value_type: ExportType) -> Result<Exported, ServingError> {
    let folder = Folder::begin(output)?;
    let mut groups = Vec::with_capacity(model.tables.len());
    for (group, table) in model.tables.iter().enumerate() {
        let (bytes, layout) = RowsFile::encode(group, table, value_type)?;
        groups.push(RowsFile { file: folder.write(&layout.name(), &bytes)?, ..layout });
    }
    let built = model.description.model.build()?;
    let onnx = rectrain_dense::export_onnx(&*built, &Tasks::single(BinaryCrossEntropy), &model.parameters)?;
    let tower = folder.write(TOWER, &onnx)?;
    let parameters: Vec<u8> = model.parameters.iter().flat_map(|value| value.to_le_bytes()).collect();
    let dense = folder.write(DENSE, &parameters)?;
    let served = ServedModel::new(model, groups, tower, dense);
    folder.write(MODEL_FILE, &served.encode())?;
    folder.finish()?;
    Ok(summary(&served))
}

fn summary(served: &ServedModel) -> Exported {
    let of_groups = served.rows.iter().map(|rows| &rows.file);
    let all: Vec<&FileOfExport> = of_groups.chain([&served.tower, &served.dense]).collect();
    let names = all.iter().map(|file| file.name.clone());
    Exported {
        files: names.chain([MODEL_FILE.to_owned()]).collect(),
        bytes: all.iter().map(|file| file.bytes).sum(),
        rows: served.rows.iter().map(|rows| rows.rows).sum(),
        largest_error: served.rows.iter().map(|rows| rows.largest_error).fold(0.0, f32::max),
        digest: served.digest.clone(),
    }
}

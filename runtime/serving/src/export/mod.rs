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
pub(crate) use self::read::{FoundExport, load_from};
pub use self::read::{Part, load_export};
use self::rows::RowsFile;
use crate::error::ServingError;
use crate::model::Model;
use crate::value::ExportType;

/// The file that describes an export.
pub const MODEL_FILE: &str = "model.json";
const TOWER: &str = "tower.onnx";
const DENSE: &str = "dense.bin";

/// A finished export.
#[derive(Debug, Clone, Default, PartialEq)]
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
    let mut files = Files::new(model, value_type);
    while let Some((name, bytes)) = files.next_file()? {
        folder.write(&name, &bytes)?;
    }
    folder.finish()?;
    Ok(files.served.as_ref().map(summary).unwrap_or_default())
}

/// The files of an export, one after another, so that only one is in memory.
pub(crate) struct Files<'m> {
    model: &'m Model,
    value_type: ExportType,
    rows: Vec<RowsFile>,
    tower: Option<FileOfExport>,
    dense: Option<FileOfExport>,
    /// `model.json`, once all files were taken.
    served: Option<ServedModel>,
}

impl<'m> Files<'m> {
    pub(crate) fn new(model: &'m Model, value_type: ExportType) -> Self {
        Self { model, value_type, rows: Vec::new(), tower: None, dense: None, served: None }
    }

    /// The name and the bytes of the next file. `model.json` is the last one, because it has the
    /// digests of the others.
    pub(crate) fn next_file(&mut self) -> Result<Option<(String, Vec<u8>)>, ServingError> {
        let group = self.rows.len();
        if let Some(table) = self.model.tables.get(group) {
            let (bytes, layout) = RowsFile::encode(group, table, self.value_type)?;
            let name = layout.name();
            self.rows.push(RowsFile { file: FileOfExport::of(&name, &bytes), ..layout });
            return Ok(Some((name, bytes)));
        }
        if self.tower.is_none() {
            let built = self.model.description.model.build()?;
            let tasks = Tasks::single(BinaryCrossEntropy);
            let bytes = rectrain_dense::export_onnx(&*built, &tasks, &self.model.parameters)?;
            self.tower = Some(FileOfExport::of(TOWER, &bytes));
            return Ok(Some((TOWER.to_owned(), bytes)));
        }
        if self.dense.is_none() {
            let bytes: Vec<u8> = self.model.parameters.iter().flat_map(|value| value.to_le_bytes()).collect();
            self.dense = Some(FileOfExport::of(DENSE, &bytes));
            return Ok(Some((DENSE.to_owned(), bytes)));
        }
        let (None, Some(tower), Some(dense)) = (&self.served, &self.tower, &self.dense) else { return Ok(None) };
        let served = ServedModel::new(self.model, self.rows.clone(), tower.clone(), dense.clone());
        let bytes = served.encode();
        self.served = Some(served);
        Ok(Some((MODEL_FILE.to_owned(), bytes)))
    }

    /// The digest of the export. Empty until all files were taken.
    pub(crate) fn digest(&self) -> String {
        self.served.as_ref().map(|served| served.digest.clone()).unwrap_or_default()
    }
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

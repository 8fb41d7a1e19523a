//! Reads an export back. Nothing is trusted: every file has the digest in `model.json`.

use std::fs;
use std::path::Path;

use super::folder::sha256;
use super::manifest::{FileOfExport, ServedModel};
use super::{MODEL_FILE, rows};
use crate::description::Description;
use crate::error::ServingError;
use crate::model::Model;
use crate::table::Table;

/// Loads the export in `folder`.
///
/// # Errors
/// [`ServingError::Description`] if it is no export for serving or is of a newer version,
/// [`ServingError::Damaged`], and errors of the operating system.
pub fn load_export(folder: &Path) -> Result<Model, ServingError> {
    let path = folder.join(MODEL_FILE);
    let bytes = fs::read(&path).map_err(ServingError::io("read", &path))?;
    let name = folder.display().to_string();
    let served = ServedModel::decode(&name, &bytes)?;
    let description = Description::of(&served.identity, &name)?;
    let tables = served.rows.iter().map(|rows| table(folder, rows)).collect::<Result<Vec<_>, _>>()?;
    let parameters = checked(folder, &served.dense)?;
    let number = |bytes: &[u8]| f32::from_le_bytes(bytes.try_into().unwrap_or_default());
    let model = Model {
        name,
        job: served.job,
        step: served.step,
        identity: served.identity,
        description,
        tables,
        parameters: parameters.chunks_exact(4).map(number).collect(),
    };
    model.check()?;
    Ok(model)
}

fn table(folder: &Path, rows: &rows::RowsFile) -> Result<Table, ServingError> {
    let bytes = checked(folder, &rows.file)?;
    let damaged = |problem| ServingError::Damaged { file: folder.join(&rows.file.name), problem };
    rows.decode(&bytes).map_err(damaged)
}

/// The bytes of a file, if they have the digest that `model.json` gives.
fn checked(folder: &Path, file: &FileOfExport) -> Result<Vec<u8>, ServingError> {
    let path = folder.join(&file.name);
    let bytes = fs::read(&path).map_err(ServingError::io("read", &path))?;
    let found = sha256(&bytes);
    if found == file.sha256 {
        return Ok(bytes);
    }
    let problem = format!("its SHA-256 is {found}, and {MODEL_FILE} says {}", file.sha256);
    Err(ServingError::Damaged { file: path, problem })
}

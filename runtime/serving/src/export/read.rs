//! Reads an export back. Nothing is trusted: every file has the digest in `model.json`.

use std::fs;
use std::path::{Path, PathBuf};

use rectrain_storage::Directory;

use super::manifest::{FileOfExport, ServedModel};
use super::{MODEL_FILE, rows};
use crate::description::Description;
use crate::error::ServingError;
use crate::hash::sha256;
use crate::model::Model;
use crate::versioned_table::VersionedTable;

/// The most bytes of a `model.json`.
const MAX_MODEL_FILE: u64 = 64 << 20;

/// Loads the export in `folder`.
///
/// # Errors
/// [`ServingError::Description`] if it is no export for serving or is of a newer version,
/// [`ServingError::Damaged`], and errors of the operating system.
pub fn load_export(folder: &Path) -> Result<Model, ServingError> {
    let read = |name: &str| {
        let path = folder.join(name);
        fs::read(&path).map_err(ServingError::io("read", &path))
    };
    let name = folder.display().to_string();
    let served = ServedModel::decode(&name, &read(MODEL_FILE)?)?;
    let tables =
        served.rows.iter().map(|rows| table(&name, rows, &read(&rows.file.name)?)).collect::<Result<_, _>>()?;
    let parameters = parameters(&name, &served.dense, &read(&served.dense.name)?)?;
    assemble(name, served, tables, parameters)
}

/// An export of a directory.
pub(crate) struct FoundExport {
    pub(crate) model: Model,
    pub(crate) digest: String,
    /// The content digest that it states.
    pub(crate) content_digest: Option<String>,
}

/// Loads the export in a folder of a directory. `None` if there is none.
///
/// # Errors
/// As [`load_export`], and errors of the storage.
pub(crate) async fn load_from(directory: &Directory, folder: &str) -> Result<Option<FoundExport>, ServingError> {
    let name = directory.name_of(folder);
    let Some(bytes) = directory.read(&format!("{folder}/{MODEL_FILE}"), MAX_MODEL_FILE).await? else {
        return Ok(None);
    };
    let served = ServedModel::decode(&name, &bytes)?;
    let mut tables = Vec::with_capacity(served.rows.len());
    for rows in &served.rows {
        tables.push(table(&name, rows, &read(directory, folder, &rows.file).await?)?);
    }
    let parameters = parameters(&name, &served.dense, &read(directory, folder, &served.dense).await?)?;
    let (digest, content_digest) = (served.digest.clone(), served.content_digest.clone());
    Ok(Some(FoundExport { model: assemble(name, served, tables, parameters)?, digest, content_digest }))
}

async fn read(directory: &Directory, folder: &str, file: &FileOfExport) -> Result<Vec<u8>, ServingError> {
    let path = format!("{folder}/{}", file.name);
    let missing = || ServingError::Damaged {
        file: PathBuf::from(directory.name_of(&path)),
        problem: "it does not exist".to_owned(),
    };
    directory.read(&path, file.bytes).await?.ok_or_else(missing)
}

fn assemble(
    name: String,
    served: ServedModel,
    tables: Vec<VersionedTable>,
    parameters: Vec<f32>,
) -> Result<Model, ServingError> {
    let description = Description::of(&served.identity, &name)?;
    let ServedModel { job, step, identity, .. } = served;
    let model = Model { name, job, step, identity, description, tables, parameters };
    model.check()?;
    Ok(model)
}

fn table(folder: &str, rows: &rows::RowsFile, bytes: &[u8]) -> Result<VersionedTable, ServingError> {
    check(folder, &rows.file, bytes)?;
    rows.decode(bytes).map_err(|problem| damaged(folder, &rows.file, problem))
}

fn parameters(folder: &str, file: &FileOfExport, bytes: &[u8]) -> Result<Vec<f32>, ServingError> {
    check(folder, file, bytes)?;
    Ok(bytes.as_chunks::<4>().0.iter().map(|value| f32::from_le_bytes(*value)).collect())
}

/// Whether the bytes of a file have the digest that `model.json` gives.
fn check(folder: &str, file: &FileOfExport, bytes: &[u8]) -> Result<(), ServingError> {
    let found = sha256(bytes);
    if found == file.sha256 {
        return Ok(());
    }
    Err(damaged(folder, file, format!("its SHA-256 is {found}, and {MODEL_FILE} says {}", file.sha256)))
}

fn damaged(folder: &str, file: &FileOfExport, problem: String) -> ServingError {
    // A folder may be in a bucket, and `/` divides its name from its files in both.
    ServingError::Damaged { file: PathBuf::from(format!("{}/{}", folder.trim_end_matches('/'), file.name)), problem }
}

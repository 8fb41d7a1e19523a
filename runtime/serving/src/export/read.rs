//! Reads an export back. Nothing is trusted: every file has the digest in `model.json`.

use std::fs;
use std::path::{Path, PathBuf};

use rectrain_storage::Directory;
use sha2::{Digest, Sha256};

use super::manifest::{FileOfExport, ServedModel};
use super::{MODEL_FILE, rows};
use crate::description::Description;
use crate::error::ServingError;
use crate::hash::{hexadecimal, sha256};
use crate::model::Model;
use crate::table::KeyRange;
use crate::versioned_table::VersionedTable;

/// The most bytes of a `model.json`.
const MAX_MODEL_FILE: u64 = 64 << 20;
/// Bytes of a rows file that are read at a time, if only a part of its rows is kept.
const PIECE: usize = 8 << 20;

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

/// The rows of a model that a reader keeps.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Part {
    /// All rows.
    Whole,
    /// The rows of these keys, such as a shard's.
    Keys(KeyRange),
    /// No rows: the dense part alone.
    Dense,
}

/// An export of a directory.
pub(crate) struct FoundExport {
    pub(crate) model: Model,
    pub(crate) digest: String,
    /// The content digest that it states.
    pub(crate) content_digest: Option<String>,
}

/// Loads a part of the export in a folder of a directory. `None` if there is none.
///
/// # Errors
/// As [`load_export`], and errors of the storage.
pub(crate) async fn load_from(
    directory: &Directory,
    folder: &str,
    part: Part,
) -> Result<Option<FoundExport>, ServingError> {
    let name = directory.name_of(folder);
    let Some(bytes) = directory.read(&format!("{folder}/{MODEL_FILE}"), MAX_MODEL_FILE).await? else {
        return Ok(None);
    };
    let served = ServedModel::decode(&name, &bytes)?;
    let mut tables = Vec::with_capacity(served.rows.len());
    for rows in &served.rows {
        tables.push(match part {
            Part::Whole => table(&name, rows, &read(directory, folder, &rows.file).await?)?,
            Part::Keys(keys) => part_of_table(directory, folder, rows, keys).await?,
            Part::Dense => VersionedTable::new(rows.dim),
        });
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

/// Reads the rows of a range of keys, piece by piece. The whole file passes its digest.
async fn part_of_table(
    directory: &Directory,
    folder: &str,
    rows: &rows::RowsFile,
    keys: KeyRange,
) -> Result<VersionedTable, ServingError> {
    let name = directory.name_of(folder);
    let fault = |problem| damaged(&name, &rows.file, problem);
    let mut part = rows.read_part(keys).map_err(fault)?;
    let path = format!("{folder}/{}", rows.file.name);
    match directory.size(&path).await? {
        Some(found) if found == rows.file.bytes => {}
        Some(found) => {
            let expected = rows.file.bytes;
            return Err(fault(format!("it has {found} bytes, and {MODEL_FILE} says {expected}")));
        }
        None => return Err(fault("it does not exist".to_owned())),
    }
    let mut hasher = Sha256::new();
    for start in (0..rows.file.bytes).step_by(PIECE) {
        let end = rows.file.bytes.min(start + PIECE as u64);
        let piece = directory.read_range(&path, start..end).await?;
        hasher.update(&piece);
        part.push(&piece);
    }
    check_digest(&name, &rows.file, hexadecimal(&hasher.finalize()))?;
    part.finish().map_err(fault)
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
    check_digest(folder, file, sha256(bytes))
}

fn check_digest(folder: &str, file: &FileOfExport, found: String) -> Result<(), ServingError> {
    if found == file.sha256 {
        return Ok(());
    }
    Err(damaged(folder, file, format!("its SHA-256 is {found}, and {MODEL_FILE} says {}", file.sha256)))
}

fn damaged(folder: &str, file: &FileOfExport, problem: String) -> ServingError {
    // A folder may be in a bucket, and `/` divides its name from its files in both.
    ServingError::Damaged { file: PathBuf::from(format!("{}/{}", folder.trim_end_matches('/'), file.name)), problem }
}

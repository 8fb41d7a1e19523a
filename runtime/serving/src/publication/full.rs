//! A full model that a delta was published for. Its files are written beside later deltas, which
//! takes long, and announced afterwards. Servers that follow the deltas never need it.

use rectrain_checkpoint::{Checkpoint, CheckpointId};
use rectrain_embedding::LeastCount;
use rectrain_storage::Directory;

use super::delta::Base;
use super::{names, unix_milliseconds};
use crate::error::ServingError;
use crate::export::{Files, MODEL_FILE};
use crate::model::Model;
use crate::value::ExportType;

/// Bytes of a part of an upload.
const PART_BYTES: usize = 8 << 20;

/// See the module documentation.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FullModel {
    /// The sequence number and the digest of the delta.
    pub(super) model: Base,
    /// The checkpoint with the same model.
    pub(super) checkpoint: String,
    pub(super) checkpoint_id: CheckpointId,
    /// The least number of examples of its rows.
    pub(super) least: Option<LeastCount>,
}

/// A full model whose files are written.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct WrittenFull {
    /// The sequence number and the digest of the delta.
    pub(super) model: Base,
    /// The digest in its `model.json`.
    pub(super) digest: String,
    /// The time at which it was written, in milliseconds since 1970.
    pub(super) published_at: u64,
}

impl WrittenFull {
    /// Its sequence number.
    #[must_use]
    pub fn sequence(&self) -> u64 {
        self.model.sequence
    }
}

impl FullModel {
    /// Reads the checkpoint and writes the files. The caller opens the publisher's two paths anew,
    /// in its own runtime. Needs memory for the values of all rows.
    ///
    /// # Errors
    /// A checkpoint that cannot be read, also because it was deleted or replaced meanwhile; errors
    /// of the storage.
    pub async fn write(self, checkpoints: &Directory, output: &Directory) -> Result<WrittenFull, ServingError> {
        let checkpoint = Checkpoint::open(checkpoints, &self.checkpoint).await?;
        if checkpoint.id() != self.checkpoint_id {
            let problem = format!("it was replaced while the full model {} was being written", self.model.sequence);
            return Err(ServingError::Publication { file: checkpoint.name(), problem });
        }
        let model = Model::thin_of_checkpoint(&checkpoint, self.least).await?;
        let digest = write_full(output, self.model.sequence, &model).await?;
        Ok(WrittenFull { model: self.model, digest, published_at: unix_milliseconds() })
    }
}

/// Writes the files of a full model. Returns its digest.
pub(super) async fn write_full(output: &Directory, sequence: u64, model: &Model) -> Result<String, ServingError> {
    let folder = names::full(sequence);
    // A publisher that ended before it announced its model may have left one.
    output.delete_folder(&folder, MODEL_FILE).await?;
    let mut files = Files::new(model, ExportType::F32);
    while let Some((name, bytes)) = files.next_file()? {
        write(output, &format!("{folder}/{name}"), bytes).await?;
    }
    Ok(files.digest())
}

/// Writes a file.
pub(super) async fn write(output: &Directory, file: &str, bytes: Vec<u8>) -> Result<(), ServingError> {
    let mut writer = output.create(file, PART_BYTES);
    writer.write(bytes).await?;
    Ok(writer.finish().await?)
}

//! Trained models, as commands name them.

use std::path::Path;

use rectrain_serving::Model;

use crate::args::CheckpointPlace;
use crate::checkpoint;
use crate::failure::Failure;

/// Loads an export from a local folder, or a checkpoint from any store.
pub(crate) fn load(model: &str, options: &[String]) -> Result<Model, Failure> {
    let folder = Path::new(model);
    if rectrain_serving::is_export(folder) {
        return Ok(rectrain_serving::load_export(folder)?);
    }
    let place = CheckpointPlace { path: model.to_owned(), options: options.to_vec() };
    crate::failure::runtime()?.block_on(async {
        let checkpoint = checkpoint::open(&place).await?;
        Ok(Model::of_checkpoint(&checkpoint).await?)
    })
}

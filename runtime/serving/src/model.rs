//! A trained model in memory: its description, its rows and its dense parameters. Read-only.

use std::ops::Range;
use std::sync::Arc;

use rectrain_checkpoint::{Checkpoint, CheckpointError, Identity, SlotSet};
use rectrain_embedding::{LeastCount, Slot, Store};

use crate::content::{RowSum, content_digest};
use crate::description::Description;
use crate::error::ServingError;
use crate::versioned_table::{Builder, VersionedTable};

/// Parts in which rows are restored. Only one part has optimizer state in memory at a time.
const PARTS: u32 = 16;

/// See the module documentation.
#[derive(Debug)]
pub struct Model {
    /// The checkpoint or the folder, for messages.
    pub name: String,
    /// The name of the job, if the checkpoint has it.
    pub job: Option<String>,
    /// Global steps that it was trained.
    pub step: u64,
    /// The identity that the description was read from.
    pub identity: Identity,
    /// How cells become predictions.
    pub description: Description,
    /// The rows, by row group.
    pub tables: Vec<VersionedTable>,
    /// The dense parameters, in the order of the tower's layout.
    pub parameters: Vec<f32>,
}

impl Model {
    /// Loads a checkpoint with all its bases. Every byte passes its checksum.
    ///
    /// # Errors
    /// A checkpoint that is damaged, or that does not describe its model; errors of the storage.
    pub async fn of_checkpoint(checkpoint: &Checkpoint) -> Result<Self, ServingError> {
        Self::thin_of_checkpoint(checkpoint, None).await
    }

    /// As [`Self::of_checkpoint`], without the rows of fewer examples.
    ///
    /// # Errors
    /// As [`Self::of_checkpoint`].
    pub async fn thin_of_checkpoint(checkpoint: &Checkpoint, least: Option<LeastCount>) -> Result<Self, ServingError> {
        let (name, manifest) = (checkpoint.name(), checkpoint.manifest());
        let description = Description::of(&manifest.identity, &name)?;
        let tables = tables(checkpoint, &description, least).await?;
        let parameters = checkpoint.dense().await?.parameters;
        let job = manifest.info.get("job").and_then(|job| job.as_str()).map(str::to_owned);
        let model = Self {
            name,
            job,
            step: manifest.step,
            identity: manifest.identity.clone(),
            description,
            tables,
            parameters,
        };
        model.check()?;
        Ok(model)
    }

    /// Checks that rows and parameters have the sizes that the description gives.
    pub(crate) fn check(&self) -> Result<(), ServingError> {
        let expected = self.description.model.build()?.layout().total();
        let fault = |problem| Err(ServingError::Description { model: self.name.clone(), problem });
        if self.parameters.len() != expected {
            let found = self.parameters.len();
            return fault(format!("it has {found} dense parameters, and its model has {expected}"));
        }
        let dims: Vec<usize> = self.tables.iter().map(VersionedTable::dim).collect();
        if dims != self.description.layout.group_dims {
            let expected = &self.description.layout.group_dims;
            return fault(format!("its rows have {dims:?} values, and its features need {expected:?}"));
        }
        Ok(())
    }

    /// The model at another step, with these rows and parameters.
    pub(crate) fn with(&self, step: u64, tables: Vec<VersionedTable>, parameters: Vec<f32>) -> Self {
        Self {
            name: self.name.clone(),
            job: self.job.clone(),
            step,
            identity: self.identity.clone(),
            description: self.description.clone(),
            tables,
            parameters,
        }
    }

    /// Removes rows. By row group, `is_kept` has one value for each row, by rising key. Rows
    /// without a value go too.
    pub fn keep_rows(&mut self, is_kept: &[Vec<bool>]) {
        for (table, is_kept) in self.tables.iter_mut().zip(is_kept) {
            *table = table.kept(is_kept);
        }
    }

    /// Whether all values of rows and all dense parameters are finite.
    #[must_use]
    pub fn is_finite(&self) -> bool {
        let values = self.tables.iter().flat_map(VersionedTable::rows).flat_map(|(_, values)| values);
        values.chain(&self.parameters).all(|value| value.is_finite())
    }

    /// The digest of rows and dense parameters, as in `model.json`. Takes time in proportion to the
    /// rows.
    #[must_use]
    pub fn content_digest(&self) -> String {
        let sums: Vec<RowSum> = self.tables.iter().map(RowSum::of).collect();
        content_digest(&self.tables, &sums, &self.parameters)
    }

    /// Rows of all groups.
    #[must_use]
    pub fn rows(&self) -> u64 {
        self.tables.iter().map(|table| table.len() as u64).sum()
    }
}

/// The values of all rows. Slots in order are keys in order, so the tables are sorted.
async fn tables(
    checkpoint: &Checkpoint,
    description: &Description,
    least: Option<LeastCount>,
) -> Result<Vec<VersionedTable>, ServingError> {
    let dims: Vec<usize> = description.store.groups.iter().map(|group| group.dim).collect();
    let mut tables: Vec<Builder> = dims.iter().copied().map(Builder::new).collect();
    let finish = |tables: Vec<Builder>| tables.into_iter().map(Builder::finish).collect();
    let config = match checkpoint.store_config().await {
        Err(CheckpointError::NotHeld { .. }) => return Ok(finish(tables)),
        config => config?,
    };
    if config.groups.iter().map(|group| group.dim).ne(dims) {
        let problem = "its rows have other widths than its description gives".to_owned();
        return Err(ServingError::Description { model: checkpoint.name(), problem });
    }
    let slots = config.slots;
    let store = Arc::new(Store::new(config)?);
    let part = slots.div_ceil(PARTS);
    for start in (0..slots).step_by(part as usize) {
        let range = start..(start + part).min(slots);
        checkpoint.restore_rows(&store, &SlotSet::new(range.clone().map(Slot))).await?;
        take_rows(&store, range, least, &mut tables)?;
    }
    Ok(finish(tables))
}

/// Moves the rows of these slots with enough examples into the tables.
fn take_rows(
    store: &Store,
    slots: Range<u32>,
    least: Option<LeastCount>,
    tables: &mut [Builder],
) -> Result<(), ServingError> {
    let specs = &store.config().groups;
    for slot in slots {
        // In the order of the rows.
        let words = if least.is_some() { store.row_words(Slot(slot))? } else { Vec::new() };
        let mut words = words.into_iter();
        store.for_each_row(Slot(slot), |group, key, values, _state| {
            let group = usize::from(group.0);
            let is_kept = match (least, words.next()) {
                (Some(least), Some((_, word))) => least.keeps(&specs[group], word),
                _ => true,
            };
            if is_kept {
                tables[group].push(key.0, values);
            }
        })?;
        store.clear_slot(Slot(slot))?;
    }
    Ok(())
}

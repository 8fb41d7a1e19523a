//! Predicts batches of rows, on the code paths of training. Ids have no duplicates, as the loader
//! sends them. Pooling is the embedding worker's, and the tower is the dense workers'. Rows come
//! from the model in memory, or from elsewhere.

use std::sync::Arc;

use rectrain_data::Batch;
use rectrain_dense::tasks::BinaryCrossEntropy;
use rectrain_dense::{ComputeDevice, DenseOptimizer, Features, Precision, Tasks, Tower, TowerOptions};
use rectrain_embedding::{FeatureKey, GroupId, Store};
use rectrain_pooling::PreparedIds;
use rectrain_protocol::unseen::LookUps;
use rectrain_wire::ids::{Scratch, UniqueIds};

use crate::error::ServingError;
use crate::model::Model;
use crate::versioned_table::VersionedTable;

/// How a predictor computes.
#[derive(Debug, Clone, Copy, Default)]
pub struct PredictorOptions {
    /// Threads of the tower; 0 means one for each core. Their number does not change predictions.
    pub threads: usize,
    /// Precision of the products of linear layers. The checkpoint does not record the job's.
    pub precision: Precision,
}

/// A model that is ready to predict.
pub struct Predictor {
    model: Arc<Model>,
    /// An empty store. It reads the initial values of keys without a row, as in an evaluation.
    initial: Store,
    tower: Tower,
    scratch: Scratch,
}

/// The predictions of a batch.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Predictions {
    /// The probability of each row.
    pub probabilities: Vec<f32>,
    /// Ids that were looked up and ids without a row, by sparse feature.
    pub look_ups: Vec<LookUps>,
}

/// The rows of the keys of one row group.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct GroupRows {
    /// `[keys, dim]`.
    pub values: Vec<f32>,
    /// Whether each key has no row.
    pub missing: Vec<bool>,
}

impl GroupRows {
    /// Room for the rows of so many keys, each of `dim` values.
    #[must_use]
    pub fn new(keys: usize, dim: usize) -> Self {
        Self { values: vec![0.0; keys * dim], missing: vec![false; keys] }
    }
}

impl Predictor {
    /// Builds the tower of a model.
    ///
    /// # Errors
    /// Errors of the tower and of the store of initial values.
    pub fn new(model: impl Into<Arc<Model>>, options: PredictorOptions) -> Result<Self, ServingError> {
        let model: Arc<Model> = model.into();
        let PredictorOptions { threads, precision } = options;
        let options = TowerOptions { seed: 0, rank: 0, threads, device: ComputeDevice::Cpu, precision };
        // The tower is not trained, and this optimizer has no state.
        let optimizer = DenseOptimizer::Sgd { learning_rate: 1.0, momentum: 0.0 };
        let tasks = Tasks::single(BinaryCrossEntropy);
        let mut tower = Tower::new(model.description.model.build()?, tasks, optimizer, options)?;
        tower.parameters_mut()?.copy_from_slice(&model.parameters);
        let initial = Store::new(model.description.store.clone())?;
        Ok(Self { model, initial, tower, scratch: Scratch::default() })
    }

    /// The model.
    #[must_use]
    pub fn model(&self) -> &Model {
        &self.model
    }

    /// Replaces the model. After an error the one before stays.
    ///
    /// # Errors
    /// [`ServingError::Description`] for a model with other features or another tower.
    pub fn set_model(&mut self, model: Arc<Model>) -> Result<(), ServingError> {
        if !self.model.description.answers_as(&model.description) {
            let problem = "its model or its features differ from the served ones; start the server anew".to_owned();
            return Err(ServingError::Description { model: model.name.clone(), problem });
        }
        model.check()?;
        self.tower.parameters_mut()?.copy_from_slice(&model.parameters);
        self.model = model;
        Ok(())
    }

    /// Predicts the rows of a batch, in their order, with the rows of the model.
    ///
    /// # Errors
    /// Ids that contradict each other, a batch of another schema, a prediction that is not finite.
    pub fn predict(&mut self, batch: &Batch) -> Result<Predictions, ServingError> {
        let ids = self.prepare(batch)?;
        let read = |(table, keys): (&VersionedTable, &Vec<u64>)| read(table, keys);
        let rows = self.model.tables.iter().zip(ids.keys()).map(read).collect();
        self.predict_with(batch, &ids, rows)
    }

    /// The keys of a batch by row group, and the rows that each of its samples pools.
    ///
    /// # Errors
    /// Ids that contradict each other.
    pub fn prepare(&mut self, batch: &Batch) -> Result<PreparedIds, ServingError> {
        let mut unique = Vec::with_capacity(batch.sparse.len());
        for column in &batch.sparse {
            let offsets = column.offsets.as_deref();
            unique.push(UniqueIds::from_column(&column.keys, offsets, batch.samples, &mut self.scratch)?);
        }
        Ok(PreparedIds::new(batch.samples, unique, &self.model.description.layout))
    }

    /// Predicts the rows of a batch, in their order, with these rows of its keys by row group. They
    /// may come from another server. A key without a row reads as its initial values, whatever the
    /// values in its place are.
    ///
    /// # Errors
    /// A batch of another schema, a prediction that is not finite.
    pub fn predict_with(
        &mut self,
        batch: &Batch,
        ids: &PreparedIds,
        rows: Vec<GroupRows>,
    ) -> Result<Predictions, ServingError> {
        let layout = &self.model.description.layout;
        let (mut values, mut missing) = (Vec::with_capacity(rows.len()), Vec::with_capacity(rows.len()));
        for ((group, mut rows), keys) in (0..).map(GroupId).zip(rows).zip(ids.keys()) {
            let dim = layout.group_dims[usize::from(group.0)];
            for (place, _) in rows.missing.iter().enumerate().filter(|(_, is_missing)| **is_missing) {
                let out = &mut rows.values[place * dim..(place + 1) * dim];
                self.initial.read(group, &[FeatureKey(keys[place])], out)?;
            }
            values.push(rows.values);
            missing.push(rows.missing);
        }
        let pooled = ids.pool(&values, layout);
        let look_ups = ids.count_unseen(&missing, layout);
        let features = Features {
            samples: batch.samples,
            dense: &batch.dense,
            embeddings: &pooled.embeddings,
            linear: &pooled.linear,
        };
        Ok(Predictions { probabilities: self.tower.predict(features)?, look_ups })
    }
}

/// Reads the rows of keys, as far as there are any.
fn read(table: &VersionedTable, keys: &[u64]) -> GroupRows {
    let dim = table.dim();
    let mut rows = GroupRows::new(keys.len(), dim);
    for (place, key) in keys.iter().enumerate() {
        match table.row(*key) {
            Some(row) => rows.values[place * dim..(place + 1) * dim].copy_from_slice(row),
            None => rows.missing[place] = true,
        }
    }
    rows
}

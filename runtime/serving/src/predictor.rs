//! Predicts batches of rows, on the code paths of training. Ids have no duplicates, as the loader
//! sends them. Pooling is the embedding worker's, and the tower is the dense workers'.

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
struct GroupRows {
    /// `[keys, dim]`.
    values: Vec<f32>,
    /// Whether each key has no row.
    missing: Vec<bool>,
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

    /// Predicts the rows of a batch, in their order.
    ///
    /// # Errors
    /// Ids that contradict each other, a batch of another schema, a prediction that is not finite.
    pub fn predict(&mut self, batch: &Batch) -> Result<Predictions, ServingError> {
        let layout = &self.model.description.layout;
        let mut unique = Vec::with_capacity(batch.sparse.len());
        for column in &batch.sparse {
            let offsets = column.offsets.as_deref();
            unique.push(UniqueIds::from_column(&column.keys, offsets, batch.samples, &mut self.scratch)?);
        }
        let prepared = PreparedIds::new(batch.samples, unique, layout);
        let (mut rows, mut missing) = (Vec::new(), Vec::new());
        for (group, (table, keys)) in self.model.tables.iter().zip(prepared.keys()).enumerate() {
            let read = self.read(GroupId(group as u16), table, keys)?;
            rows.push(read.values);
            missing.push(read.missing);
        }
        let pooled = prepared.pool(&rows, layout);
        let look_ups = prepared.count_unseen(&missing, layout);
        let features = Features {
            samples: batch.samples,
            dense: &batch.dense,
            embeddings: &pooled.embeddings,
            linear: &pooled.linear,
        };
        Ok(Predictions { probabilities: self.tower.predict(features)?, look_ups })
    }

    /// Reads the rows of keys. A key without a row reads as its initial values.
    fn read(&self, group: GroupId, table: &VersionedTable, keys: &[u64]) -> Result<GroupRows, ServingError> {
        let mut values = vec![0.0; keys.len() * table.dim()];
        let mut missing = vec![false; keys.len()];
        for (place, key) in keys.iter().enumerate() {
            let out = &mut values[place * table.dim()..(place + 1) * table.dim()];
            match table.row(*key) {
                Some(row) => out.copy_from_slice(row),
                None => {
                    missing[place] = true;
                    self.initial.read(group, &[FeatureKey(*key)], out)?;
                }
            }
        }
        Ok(GroupRows { values, missing })
    }
}

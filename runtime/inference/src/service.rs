//! The way of a request from its columns to its probabilities, without HTTP: limits, encoding, the
//! queue, and the deadline.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Instant;

use prometheus::Registry;
use rectrain_data::{Batch, Column, ColumnEncoder, Schema, Values};
use rectrain_serving::Model;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use crate::batcher::{Answer, Batcher, Patience, Predict, Predicted, Running, predict_now};
use crate::error::InferenceError;
use crate::limits::Limits;
use crate::metrics::Metrics;
use crate::progress::{Progress, SlowLog};
use crate::record::Recorder;
use crate::refusal::{Refusal, Shed};
use crate::updates::Updates;
use crate::version::{Publication, Version};

/// The description of the model that a server answers for.
#[derive(Debug, Clone)]
pub struct ServedModel {
    /// The name in requests.
    pub name: String,
    /// Global steps that it was trained: the version in requests.
    pub step: u64,
    /// Embedding rows of all row groups.
    pub rows: u64,
    /// The features.
    pub schema: Schema,
    /// Texts that stand for a missing value.
    pub null_values: Vec<String>,
    /// The publication of a model that may change; `None` for any other.
    pub publication: Option<Publication>,
}

impl ServedModel {
    /// The description of a trained model.
    #[must_use]
    pub fn of(model: &Model, name: String) -> Self {
        let description = &model.description;
        Self {
            name,
            step: model.step,
            rows: model.rows(),
            schema: description.schema.clone(),
            null_values: description.null_values.clone(),
            publication: None,
        }
    }
}

/// See the module documentation.
pub(crate) struct Service {
    pub(crate) name: String,
    pub(crate) limits: Limits,
    pub(crate) metrics: Metrics,
    encoder: ColumnEncoder,
    /// One permit for each request in progress.
    requests: Arc<Semaphore>,
    batcher: Batcher,
    draining: AtomicBool,
    slow: Arc<SlowLog>,
    /// Empty if requests are not recorded.
    pub(crate) recorder: OnceLock<Recorder>,
}

impl Service {
    /// Predicts a row of missing values, and starts the thread that predicts.
    pub(crate) fn start(
        model: ServedModel,
        mut predictor: impl Predict,
        limits: Limits,
        registry: Registry,
    ) -> Result<(Arc<Self>, Running), InferenceError> {
        let ServedModel { name, step, rows, schema, null_values, publication } = model;
        let features = schema.sparse.iter().map(|field| field.name.clone()).collect();
        let metrics = Metrics::new(registry, features)?;
        let version = Version::new(step, rows, publication);
        version.show(&metrics);
        let encoder = ColumnEncoder::new(schema, &null_values)?;
        predict_now(&mut predictor, &row_of_missing_values(&encoder)?, Patience::Short)?;
        let (batcher, running) = Batcher::start(predictor, version, &limits, metrics.clone())?;
        let service = Self {
            name,
            limits,
            metrics,
            encoder,
            requests: Arc::new(Semaphore::new(limits.max_requests)),
            batcher,
            draining: AtomicBool::new(false),
            slow: Arc::new(SlowLog::new(limits.slow)),
            recorder: OnceLock::new(),
        };
        Ok((Arc::new(service), running))
    }

    /// The version of the model that answers now.
    pub(crate) fn version(&self) -> Arc<Version> {
        self.batcher.version()
    }

    /// The side that takes newer models.
    pub(crate) fn updates(&self) -> Updates {
        Updates(self.batcher.clone())
    }

    /// The features of the model.
    pub(crate) fn schema(&self) -> &Schema {
        self.encoder.schema()
    }

    /// Refuses another model, and another version if one is named.
    pub(crate) fn check(&self, name: &str, version: Option<&str>) -> Result<(), Refusal> {
        if name != self.name {
            let own = &self.name;
            return Err(Refusal::NotFound(format!("there is no model `{name}`; this server has the model `{own}`")));
        }
        let served = self.version();
        match version {
            Some(version) if version != served.name => {
                let own = &served.name;
                let problem = format!("there is no version `{version}` of `{name}`; this server has version `{own}`");
                Err(Refusal::NotFound(problem))
            }
            _ => Ok(()),
        }
    }

    /// Whether new requests are welcome.
    pub(crate) fn is_ready(&self) -> bool {
        !self.draining.load(Ordering::Relaxed)
    }

    /// The server is not ready from now on. It still answers.
    pub(crate) fn drain(&self) {
        self.draining.store(true, Ordering::Relaxed);
    }

    /// Answers the requests that wait, and no others.
    pub(crate) fn close(&self) {
        self.batcher.close();
    }

    /// A request has come.
    pub(crate) fn begin(&self) -> Progress {
        Progress::begin(&self.metrics, &self.slow)
    }

    /// Admits a request before its body is read. The permit is held until its response.
    pub(crate) fn admit(&self) -> Result<OwnedSemaphorePermit, Refusal> {
        let permit = Arc::clone(&self.requests).try_acquire_owned();
        permit.map_err(|_full| self.shed(Shed::Requests(self.limits.max_requests)))
    }

    /// The batch of the rows of a request. One that can be encoded may be recorded.
    pub(crate) fn encode(&self, columns: &[Column]) -> Result<Batch, Refusal> {
        let batch = self.encoder.encode(columns).map_err(|error| Refusal::Bad(error.to_string()))?;
        if let Some(recorder) = self.recorder.get() {
            recorder.offer(columns);
        }
        Ok(batch)
    }

    /// Predicts the rows of a request.
    pub(crate) async fn predict(&self, batch: Batch, deadline: Instant) -> Answer {
        if batch.samples == 0 {
            return Ok(Predicted { probabilities: Vec::new(), version: self.version() });
        }
        let answer = match self.batcher.submit(batch, Instant::now(), deadline) {
            Err(Refusal::Shed(shed)) => return Err(self.shed(shed)),
            submitted => submitted?,
        };
        answer.await.unwrap_or(Err(Refusal::Ending))
    }

    fn shed(&self, shed: Shed) -> Refusal {
        self.metrics.shed.with_label_values(&[shed.label()]).inc();
        Refusal::Shed(shed)
    }
}

/// The batch for the first prediction, which allocates the memory of the later ones.
fn row_of_missing_values(encoder: &ColumnEncoder) -> Result<Batch, InferenceError> {
    let schema = encoder.schema();
    let names = schema.sparse.iter().map(|field| &field.name).chain(schema.dense.iter().map(|field| &field.name));
    let column = |name: &String| Column { name: name.clone(), rows: 1, list: None, values: Values::Texts(vec![None]) };
    Ok(encoder.encode(&names.map(column).collect::<Vec<_>>())?)
}

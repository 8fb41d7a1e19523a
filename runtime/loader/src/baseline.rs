//! The frozen model (`spec.training.quality.baseline`): it predicts the rows of each training chunk
//! that this loader reads, and learns nothing. The counts of its predictions go to the coordinator
//! with the chunk's report.
//!
//! Training does not depend on it. If its checkpoint is gone, or a prediction fails, the loader
//! says so and goes on without it. Rows that are read again, for a member that died, are not
//! predicted again.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use rectrain_data::Batch;
use rectrain_dense::metrics::WindowPart;
use rectrain_protocol::blocking::blocking;
use rectrain_protocol::error::RoleError;
use rectrain_protocol::plan::BaselinePlan;
use rectrain_protocol::window_part;
use rectrain_serving::{Model, Predictor, PredictorOptions, ServingError};

use crate::Loader;
use crate::lease::Pass;
use crate::progress::{REPORT_EVERY, while_reporting_progress};
use crate::reader::Content;

/// Threads that the predictions use. The training on the same machine needs the others.
const THREADS: usize = 1;

impl Loader {
    /// Loads the frozen model for a pass; `None` if it has none, or if it cannot be loaded.
    pub(crate) async fn baseline(&self, pass: Pass) -> Result<Option<Box<Predictor>>, RoleError> {
        let Some(baseline) = self.plan.quality.baseline.as_ref().filter(|_| pass == Pass::Training) else {
            return Ok(None);
        };
        // A large model takes long, which is no stall.
        let passed = AtomicU64::new(0);
        let loading = self.load_baseline(baseline);
        let passed = || passed.fetch_add(1, Ordering::Relaxed);
        match while_reporting_progress(loading, REPORT_EVERY, passed, || self.report_progress()).await? {
            Ok(predictor) => Ok(Some(Box::new(predictor))),
            Err(problem) => {
                self.lose_baseline(&problem);
                Ok(None)
            }
        }
    }

    async fn load_baseline(&self, baseline: &BaselinePlan) -> Result<Predictor, String> {
        let checkpoint = baseline.open(&self.plan.identity()).await.map_err(|error| error.to_string())?;
        let model = Model::of_checkpoint(&checkpoint).await.map_err(|error| error.to_string())?;
        let options = PredictorOptions { threads: THREADS, precision: self.plan.precision };
        Predictor::new(model, options).map_err(|error| error.to_string())
    }

    /// Predicts the rows of a chunk, and adds the counts to it. Returns the model for the next one.
    pub(crate) async fn predict(
        &self,
        mut predictor: Box<Predictor>,
        mut content: Content,
    ) -> Result<(Option<Box<Predictor>>, Content), RoleError> {
        let Some(rows) = content.rows.take() else { return Ok((Some(predictor), content)) };
        let started = Instant::now();
        let predicting = blocking("predictions of the frozen model", move || {
            let part = predictions(&mut predictor, &rows);
            (predictor, rows, part)
        });
        let (predictor, rows, part) = predicting.await?;
        self.metrics.predict.observe(started.elapsed().as_secs_f64());
        content.rows = Some(rows);
        match part {
            Ok(part) => {
                self.metrics.baseline_rows.inc_by(part.samples);
                content.baseline = Some(window_part::write(part));
                Ok((Some(predictor), content))
            }
            Err(error) => {
                self.lose_baseline(&error.to_string());
                Ok((None, content))
            }
        }
    }

    fn lose_baseline(&self, problem: &str) {
        self.metrics.baseline_failures.inc();
        tracing::warn!("training goes on without the frozen model on loader {}: {problem}", self.index);
    }
}

fn predictions(predictor: &mut Predictor, rows: &Batch) -> Result<WindowPart, ServingError> {
    let predictions = predictor.predict(rows)?;
    let mut part = WindowPart::default();
    part.push(&predictions.probabilities, &rows.labels);
    Ok(part)
}

#[cfg(test)]
mod tests {
    use rectrain_data::{Dataset, ReadPlan};
    use rectrain_protocol::plan::small_plan;
    use rectrain_serving::{Description, VersionedTable};

    use super::*;

    #[test]
    fn every_row_of_a_chunk_is_predicted() {
        let plan = small_plan(&["spec.model.kind=lr,spec.model.embeddingDim=null,spec.model.hidden=null"]);
        let description = Description::of(&plan.identity(), "a model").unwrap();
        let model = Model {
            name: "a model".to_owned(),
            job: None,
            step: 1,
            identity: plan.identity(),
            tables: description.layout.group_dims.iter().map(|dim| VersionedTable::new(*dim)).collect(),
            parameters: vec![0.0; plan.dense_parameters().unwrap()],
            description,
        };
        let mut predictor =
            Predictor::new(model, PredictorOptions { threads: 1, ..PredictorOptions::default() }).unwrap();
        let dataset = Dataset::open(plan.train.clone(), plan.schema.clone()).unwrap();
        let read = ReadPlan { chunk_rows: 100, shuffle: None, epoch: 0, read_ahead_chunks: 0 };
        let rows = dataset.reader(read).unwrap().read(0).unwrap().unwrap();
        let part = predictions(&mut predictor, &rows).unwrap();
        // A logistic regression without weights predicts one half.
        assert_eq!((part.samples, part.label_sum), (100, rows.label_sum()));
        assert!((part.prediction_sum - 50.0).abs() < 1e-3, "{}", part.prediction_sum);
    }
}

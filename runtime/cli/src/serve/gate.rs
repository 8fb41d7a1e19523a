//! The gate of a server: a model with a low AUC on held-out rows is not taken.

use rectrain_data::{Batch, Dataset};
use rectrain_dense::metrics::Evaluation;
use rectrain_inference::{NextModel, Patience, Predict, predict_now};
use rectrain_serving::{Description, PredictorOptions, ServingError};

use super::args::ServeArgs;
use crate::checkpoint::store_options;
use crate::failure::Failure;
use crate::outlook::failure;
use crate::row_files::{each_batch, source};

/// The most held-out rows. They stay in memory.
const MAX_ROWS: usize = 1 << 20;

/// Held-out rows in memory, and a predictor of its own, so that requests do not wait for it.
pub(super) struct Gate<P> {
    predictor: P,
    batches: Vec<Batch>,
    least_auc: f64,
}

impl<P: Predict> Gate<P> {
    /// Reads the held-out rows; `None` if the server has no gate. `predictor` makes the predictor.
    pub(super) fn open(
        args: &ServeArgs,
        description: &Description,
        predictor: impl FnOnce(PredictorOptions) -> Result<P, ServingError>,
    ) -> Result<Option<Self>, Failure> {
        let Some(least_auc) = args.gate_min_auc else { return Ok(None) };
        let config = source(&args.gate_rows, description, store_options(&args.options)?);
        let dataset = Dataset::open(config, description.schema.clone()).map_err(failure)?;
        let options = PredictorOptions { threads: 1, precision: args.precision };
        Ok(Some(Self { predictor: predictor(options)?, batches: read(&dataset)?, least_auc }))
    }

    /// Checks a model. The error is the reason why it is not taken.
    pub(super) fn check(&mut self, next: NextModel) -> Result<(), String> {
        let refused = |error: ServingError| error.to_string();
        let step = next.model.step;
        self.predictor.set_model(next).map_err(refused)?;
        let mut evaluation = Evaluation::default();
        for batch in &self.batches {
            let predictions = predict_now(&mut self.predictor, batch, Patience::Short).map_err(refused)?;
            evaluation.push(&predictions.probabilities, &batch.labels);
        }
        let least = self.least_auc;
        match evaluation.finish().auc {
            Some(auc) if auc >= least => Ok(()),
            Some(auc) => Err(format!(
                "the model of step {step} has an AUC of {auc:.4} on --gate-rows, and --gate-min-auc is {least}"
            )),
            None => Err("the rows of --gate-rows have labels of one kind, so there is no AUC".to_owned()),
        }
    }
}

fn read(dataset: &Dataset) -> Result<Vec<Batch>, Failure> {
    let (mut batches, mut rows) = (Vec::new(), 0);
    each_batch(dataset, |batch| {
        rows += batch.samples;
        if rows > MAX_ROWS {
            return Err(Failure::User(format!("--gate-rows have more than {MAX_ROWS} rows; name fewer")));
        }
        batches.push(batch);
        Ok(())
    })?;
    Ok(batches)
}

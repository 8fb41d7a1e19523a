//! Refuses wrong input, and non-finite values before they spread into every parameter.

use super::{Compute, Tower};
use crate::DenseError;
use crate::batch::{Features, StepOutput};
use crate::finite::first_not_finite;
use crate::inputs::InputWidths;
use crate::pass::Passed;

impl Tower {
    /// Refuses a batch that has not as many values as the model takes.
    pub(super) fn check_lengths(widths: InputWidths, features: &Features<'_>) -> Result<(), DenseError> {
        for (input, values, columns) in inputs(widths, features) {
            if values.len() != features.samples * columns {
                return Err(DenseError::InputLength { input, samples: features.samples, columns, got: values.len() });
            }
        }
        Ok(())
    }

    /// Refuses inputs that are infinite or not a number.
    pub(super) fn check_inputs(
        &self,
        widths: InputWidths,
        features: &Features<'_>,
        during: &dyn Fn() -> String,
    ) -> Result<(), DenseError> {
        for (input, values, columns) in inputs(widths, features) {
            self.check_finite(&format!("the {input} input"), values, columns, during)?;
        }
        Ok(())
    }

    /// Refuses values that are infinite or not a number. The error names the first.
    pub(super) fn check_finite(
        &self,
        what: &str,
        values: &[f32],
        columns: usize,
        during: &dyn Fn() -> String,
    ) -> Result<(), DenseError> {
        let found = match &self.compute {
            Compute::Host(host) => host.first_not_finite(values),
            Compute::Accelerator(_) => first_not_finite(values),
        };
        let Some(position) = found else { return Ok(()) };
        let (sample, column) = (position / columns, position % columns);
        let place = if columns == 1 { String::new() } else { format!(", column {column}") };
        Err(DenseError::NonFinite {
            what: format!("{what} of sample {sample}{place} ({})", values[position]),
            during: during(),
        })
    }

    /// The output of a step, if the step found finite values only.
    pub(super) fn check_step(
        &self,
        widths: InputWidths,
        features: &Features<'_>,
        passed: Passed,
        during: &dyn Fn() -> String,
    ) -> Result<StepOutput, DenseError> {
        let Passed { output, broken, finite } = passed;
        if !finite.inputs {
            self.check_inputs(widths, features, during)?;
        }
        self.check_finite("the prediction", &output.predictions, self.tasks.columns(), during)?;
        if output.loss_sums.iter().any(|sum| !sum.is_finite()) {
            return Err(DenseError::NonFinite { what: "the loss".into(), during: during() });
        }
        let gradients = [
            ("the gradient of the embeddings", &output.embedding_gradients, widths.embeddings),
            ("the gradient of the first-order weights", &output.linear_gradients, widths.linear),
        ];
        for (what, gradients, columns) in gradients.into_iter().filter(|_| !finite.gradients) {
            self.check_finite(what, gradients, columns, during)?;
        }
        match broken.and_then(|index| self.layout().entries().get(index)) {
            None => Ok(output),
            Some(entry) => {
                Err(DenseError::NonFinite { what: format!("the gradient of `{}`", entry.name), during: during() })
            }
        }
    }
}

/// The name, the values and the columns of each input.
fn inputs<'a>(widths: InputWidths, features: &Features<'a>) -> [(&'static str, &'a [f32], usize); 3] {
    [
        ("dense", features.dense, widths.dense),
        ("embeddings", features.embeddings, widths.embeddings),
        ("linear", features.linear, widths.linear),
    ]
}

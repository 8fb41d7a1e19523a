//! Tasks. Each has one column of logits and labels, a loss and metrics.
//!
//! A [`Loss`] is evaluated outside the autodiff graph, because its derivative by the logit has a
//! closed form. So the loss can be summed in f64, and an exact derivative enters the graph at the
//! logits.

mod binary_cross_entropy;
mod fake_negative_weighted;
mod squared_error;

use std::fmt::Debug;
use std::sync::Arc;

use burn::tensor::Tensor;
use rectrain_kinds::{LossKind, Task};

pub use self::binary_cross_entropy::BinaryCrossEntropy;
pub use self::fake_negative_weighted::FakeNegativeWeighted;
pub use self::squared_error::SquaredError;
use crate::DenseError;
use crate::metrics::{Metric, TaskMetrics};
use crate::models::Model;

/// A loss of one logit and one label.
pub trait Loss: Debug + Send + Sync {
    /// The loss's name in sentences, such as `binary cross-entropy`.
    fn name(&self) -> &'static str;

    /// Whether the loss accepts this label.
    fn takes(&self, label: f32) -> bool;

    /// The accepted labels, in sentences, such as `labels from 0 to 1`.
    fn labels(&self) -> &'static str;

    /// The prediction for a logit. NaN for an infinite logit, which is an overflow of the model.
    /// The tower refuses it.
    fn predict(&self, logit: f64) -> f64;

    /// Loss, prediction and derivative of one sample.
    fn evaluate(&self, logit: f64, label: f64) -> SampleLoss;

    /// The derivative of [`Loss::evaluate`] on a device, element by element, for tensors of one
    /// shape.
    fn derivative(&self, logits: Tensor<2>, labels: Tensor<2>) -> Tensor<2>;

    /// The ONNX operator from a logit to the prediction, such as `Sigmoid` or `Identity`.
    fn onnx_operator(&self) -> &'static str;

    /// The metrics that measure the quality of its predictions.
    fn metrics(&self) -> &'static [Metric];
}

/// A loss at one sample.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct SampleLoss {
    /// The loss.
    pub loss: f64,
    /// [`Loss::predict`] of the logit.
    pub prediction: f64,
    /// The derivative of the loss by the logit.
    pub derivative: f64,
}

/// A task with the loss that trains it.
#[derive(Debug, Clone)]
pub struct TaskLoss {
    /// Unique among the tasks. It appears in errors, reports and the names of ONNX outputs.
    pub name: String,
    /// The loss.
    pub loss: Arc<dyn Loss>,
    /// Factor of the loss in the sum over all tasks, above 0.
    pub weight: f64,
}

/// The tasks of a model: one for each column of its logits. Labels, logits and predictions are `[B,
/// tasks]`, row-major.
#[derive(Debug, Clone)]
pub struct Tasks(Arc<[TaskLoss]>);

/// Losses, predictions and derivatives of a batch.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct BatchLoss {
    /// Σ over samples by task, neither weighted nor scaled.
    pub(crate) loss_sums: Vec<f64>,
    /// `[B, tasks]`.
    pub(crate) predictions: Vec<f32>,
    /// scale · weight · derivative, `[B, tasks]`.
    pub(crate) logit_gradients: Vec<f32>,
}

impl Tasks {
    /// Tasks in the order of the logits' columns.
    ///
    /// # Errors
    /// [`DenseError::InvalidTasks`] if there is no task, if a name occurs twice, or if a weight is
    /// not a finite number above 0.
    pub fn new(tasks: Vec<TaskLoss>) -> Result<Self, DenseError> {
        let invalid = |reason: String| Err(DenseError::InvalidTasks { reason });
        if tasks.is_empty() {
            return invalid("there is none; give at least one label".into());
        }
        for (index, task) in tasks.iter().enumerate() {
            let TaskLoss { name, weight, .. } = task;
            if !(weight.is_finite() && *weight > 0.0) {
                return invalid(format!("`{name}` has the weight {weight}, expected a number above 0"));
            }
            if tasks[..index].iter().any(|earlier| earlier.name == *name) {
                return invalid(format!("two of them are named `{name}`; give each its own name"));
            }
        }
        Ok(Self(tasks.into()))
    }

    /// The tasks of a manifest.
    ///
    /// # Errors
    /// As [`Tasks::new`].
    pub fn declared(tasks: &[Task]) -> Result<Self, DenseError> {
        let with_loss = |task: &Task| TaskLoss { name: task.name.clone(), loss: loss(task.loss), weight: task.weight };
        Self::new(tasks.iter().map(with_loss).collect())
    }

    /// One task with this loss.
    pub fn single(loss: impl Loss + 'static) -> Self {
        Self([TaskLoss { name: "label".to_owned(), loss: Arc::new(loss), weight: 1.0 }].into())
    }

    /// The tasks, in the order of the logits' columns. There is at least one.
    pub fn list(&self) -> &[TaskLoss] {
        &self.0
    }

    /// Number of tasks: columns of labels, logits and predictions.
    pub(crate) fn columns(&self) -> usize {
        self.0.len()
    }

    /// Refuses a model that does not have exactly one logit for each task.
    pub(crate) fn check_model(&self, model: &dyn Model) -> Result<(), DenseError> {
        let (logits, tasks) = (model.tasks(), self.columns());
        if logits == tasks {
            return Ok(());
        }
        let reason = format!("the `{}` model has {logits} logits a sample, expected {tasks}: one a task", model.name());
        Err(DenseError::InvalidTasks { reason })
    }

    /// Refuses a wrong number of labels, and labels that their loss does not accept.
    pub(crate) fn check_labels(&self, labels: &[f32], samples: usize, step: u64) -> Result<(), DenseError> {
        let columns = self.columns();
        if labels.len() != samples * columns {
            return Err(DenseError::InputLength { input: "label", samples, columns, got: labels.len() });
        }
        for (sample, row) in labels.chunks_exact(columns).enumerate() {
            for (task, &value) in self.0.iter().zip(row) {
                if !task.loss.takes(value) {
                    let (loss, expected) = (task.loss.name(), task.loss.labels());
                    return Err(DenseError::InvalidLabel { sample, value, step, loss, expected });
                }
            }
        }
        Ok(())
    }

    /// Evaluates a batch.
    pub(crate) fn evaluate(&self, logits: &[f32], labels: &[f32], scale: f32) -> BatchLoss {
        let mut loss_sums = vec![0.0; self.columns()];
        let mut predictions = Vec::with_capacity(logits.len());
        let mut logit_gradients = Vec::with_capacity(logits.len());
        let rows = logits.chunks_exact(self.columns()).zip(labels.chunks_exact(self.columns()));
        for (logits, labels) in rows {
            for (column, task) in self.0.iter().enumerate() {
                let sample = task.loss.evaluate(f64::from(logits[column]), f64::from(labels[column]));
                loss_sums[column] += sample.loss;
                predictions.push(sample.prediction as f32);
                logit_gradients.push((f64::from(scale) * task.weight * sample.derivative) as f32);
            }
        }
        BatchLoss { loss_sums, predictions, logit_gradients }
    }

    /// The predictions for logits of `[B, tasks]`.
    pub(crate) fn predict(&self, logits: &[f32]) -> Vec<f32> {
        let tasks = self.0.iter().cycle();
        logits.iter().zip(tasks).map(|(&logit, task)| task.loss.predict(f64::from(logit)) as f32).collect()
    }

    /// The derivative of scale · Σ weight · loss by the logits, on a device: `[B, tasks]` each.
    pub(crate) fn derivative(&self, logits: Tensor<2>, labels: Tensor<2>, scale: f32) -> Tensor<2> {
        let weighted = |task: &TaskLoss, logits, labels| {
            task.loss.derivative(logits, labels).mul_scalar(scale * task.weight as f32)
        };
        if let [task] = &*self.0 {
            return weighted(task, logits, labels);
        }
        let column = |index: usize, task: &TaskLoss| {
            weighted(task, logits.clone().narrow(1, index, 1), labels.clone().narrow(1, index, 1))
        };
        Tensor::cat(self.0.iter().enumerate().map(|(index, task)| column(index, task)).collect(), 1)
    }

    /// The metrics of each task over all samples of an evaluation. `predictions` and `labels` are
    /// `[samples, tasks]`. `groups` has one group a sample, usually a user, or none.
    ///
    /// # Panics
    /// When the slices' lengths do not fit each other.
    pub fn metrics(&self, predictions: &[f32], labels: &[f32], groups: &[u64]) -> Vec<TaskMetrics> {
        let column = |values: &[f32], index: usize| -> Vec<f32> {
            values.iter().skip(index).step_by(self.columns()).copied().collect()
        };
        let of_task = |(index, task): (usize, &TaskLoss)| {
            let (predictions, labels) = (column(predictions, index), column(labels, index));
            TaskMetrics::new(&task.name, task.loss.metrics(), &predictions, &labels, groups)
        };
        self.0.iter().enumerate().map(of_task).collect()
    }
}

/// The loss of a kind.
fn loss(kind: LossKind) -> Arc<dyn Loss> {
    match kind {
        LossKind::BinaryCrossEntropy => Arc::new(BinaryCrossEntropy),
        LossKind::FakeNegativeWeighted => Arc::new(FakeNegativeWeighted),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn task(name: &str, weight: f64, loss: impl Loss + 'static) -> TaskLoss {
        TaskLoss { name: name.to_owned(), loss: Arc::new(loss), weight }
    }

    fn two_tasks() -> Tasks {
        Tasks::new(vec![task("click", 1.0, BinaryCrossEntropy), task("watched", 0.25, SquaredError)]).unwrap()
    }

    #[test]
    fn each_column_has_its_own_loss() {
        let (logits, labels) = ([0.5_f32, 2.0, -1.0, 3.0], [1.0_f32, 5.0, 0.0, 2.0]);
        let both = two_tasks().evaluate(&logits, &labels, 0.5);
        let click = Tasks::single(BinaryCrossEntropy).evaluate(&[0.5, -1.0], &[1.0, 0.0], 0.5);
        let watched = Tasks::single(SquaredError).evaluate(&[2.0, 3.0], &[5.0, 2.0], 0.5);
        assert_eq!(both.loss_sums, [click.loss_sums[0], watched.loss_sums[0]]);
        for row in 0..2 {
            assert_eq!(both.predictions[2 * row..][..2], [click.predictions[row], watched.predictions[row]]);
            assert_eq!(both.logit_gradients[2 * row], click.logit_gradients[row]);
            assert_eq!(both.logit_gradients[2 * row + 1], 0.25 * watched.logit_gradients[row]);
        }
        assert_eq!(two_tasks().predict(&logits), both.predictions);
    }

    #[test]
    fn a_device_has_the_derivatives_of_the_host() {
        let device = burn::tensor::Device::flex();
        let (logits, labels) = ([0.5_f32, 2.0, -1.0, 3.0], [1.0_f32, 5.0, 0.0, 2.0]);
        let tensor =
            |values: [f32; 4]| Tensor::<2>::from_data([[values[0], values[1]], [values[2], values[3]]], &device);
        let found = two_tasks().derivative(tensor(logits), tensor(labels), 0.5);
        let found: Vec<f32> = found.into_data().try_into_vec().unwrap();
        let expected = two_tasks().evaluate(&logits, &labels, 0.5).logit_gradients;
        assert!(found.iter().zip(&expected).all(|(a, b)| (a - b).abs() < 1e-6), "{found:?} {expected:?}");
    }

    #[test]
    fn labels_that_a_loss_does_not_take_are_refused() {
        assert!(two_tasks().check_labels(&[1.0, 7.0], 1, 3).is_ok());
        let message = two_tasks().check_labels(&[0.0, 0.0, 7.0, 1.0], 2, 3).unwrap_err().to_string();
        assert_eq!(
            message,
            "the label of sample 1 is 7 in training step 3; binary cross-entropy takes labels from 0 to 1"
        );
        let message = two_tasks().check_labels(&[0.0, f32::NAN], 1, 3).unwrap_err().to_string();
        assert!(message.contains("squared error takes finite labels"), "{message}");
        let message = two_tasks().check_labels(&[0.0], 1, 3).unwrap_err().to_string();
        assert!(message.contains("takes 2 a sample (2)"), "{message}");
    }

    #[test]
    fn contradicting_tasks_are_refused() {
        let refusal = |tasks| Tasks::new(tasks).unwrap_err().to_string();
        assert!(refusal(vec![]).contains("give at least one label"));
        let twice = vec![task("a", 1.0, BinaryCrossEntropy), task("a", 1.0, BinaryCrossEntropy)];
        assert!(refusal(twice).contains("two of them are named `a`"));
        assert!(refusal(vec![task("a", 0.0, BinaryCrossEntropy)]).contains("`a` has the weight 0"));
    }

    #[test]
    fn each_task_has_the_metrics_of_its_loss() {
        let (predictions, labels) = ([0.9, 2.0, 0.2, 4.0], [1.0, 3.0, 0.0, 4.0]);
        let [click, watched] = &two_tasks().metrics(&predictions, &labels, &[])[..] else { panic!("two tasks") };
        assert_eq!((click.task.as_str(), click.samples), ("click", 2));
        assert_eq!((click.value(Metric::Auc), click.value(Metric::Gauc)), (Some(1.0), None));
        assert_eq!(click.value(Metric::MeanSquaredError), None);
        assert_eq!((watched.task.as_str(), watched.value(Metric::Auc)), ("watched", None));
        assert_eq!(watched.value(Metric::MeanSquaredError), Some(0.5));
    }
}

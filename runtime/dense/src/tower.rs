//! The tower: the owner of a model's parameters, gradients and optimizer state, each one flat buffer of the same layout, and the one
//! place where Burn's tensors meet them. A dense worker calls it once a step: `forward_backward`, then (after it has reduced the
//! gradients with its peers, in place) `apply`; evaluation and inference call `predict`. It knows no other process and no clock.
//!
//! What is copied in a step: the parameters once, from the flat buffer into Burn tensors (Burn owns its buffers; all shards of the
//! batch share this one copy); each shard's rows of the inputs; and the gradients, from Burn's buffers into the flat ones. Nothing
//! else leaves or enters the graph.
//!
//! Results are bit-equal from run to run and for any number of threads: shards depend on the batch's size only (see `workers`), each
//! shard's graph runs on one thread, and sums over shards are taken in their order. They are not bit-equal between different
//! processors: the matrix product picks its kernel by CPU features (AVX-512, FMA) and its blocking by cache sizes at run time, and
//! `exp` comes from the C library. Initial parameters, dropout masks and the optimizer's constants are the same everywhere.
//!
//! Calls block for the length of the computation: on an async runtime, call them from a blocking thread. Activations are allocated
//! anew in every step, so a process that trains should tell glibc's malloc to keep freed memory (`M_MMAP_THRESHOLD`,
//! `M_TRIM_THRESHOLD`); that is up to the program, not to this crate.

use std::ops::Range;

use burn::tensor::{Gradients, Tensor, TensorData};

use crate::layers::{Dropout, Parameters, matrix};
use crate::loss::{binary_cross_entropy, sigmoid};
use crate::model::{Inputs, Model};
use crate::optimizer::DenseOptimizer;
use crate::workers::{Workers, shards};
use crate::{DenseError, ParameterLayout};

/// Values that one thread updates at a time.
const UPDATE_CHUNK: usize = 1 << 15;

/// What a tower is besides its model and optimizer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TowerOptions {
    /// Seed of the initial parameters and of the dropout masks; equal on all replicas.
    pub seed: u64,
    /// Which replica this is: replicas drop different activations.
    pub rank: u32,
    /// Threads to compute with, 0 for one a core. Results do not depend on it. Memory does: up to twice as many shards of at most
    /// 1,024 samples are in work at a time, each with its activations and its gradients.
    pub threads: usize,
}

/// The inputs of a batch, row-major. An input that the model does not take is empty.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Features<'a> {
    /// Rows of the batch, from 0.
    pub samples: usize,
    /// `[samples, dense_features]`.
    pub dense: &'a [f32],
    /// Pooled embeddings, `[samples, Σ dims]`, concatenated in feature order.
    pub embeddings: &'a [f32],
    /// Pooled first-order weights, `[samples, F]`.
    pub linear: &'a [f32],
}

/// What a training step yields besides the gradients of the parameters.
#[derive(Debug, Clone, PartialEq)]
pub struct StepOutput {
    /// Σ over the samples of the binary cross-entropy, not scaled.
    pub loss_sum: f64,
    /// Predicted probability a sample, from before the update.
    pub predictions: Vec<f32>,
    /// d(scale·Σ loss)/d(pooled embeddings), `[samples, Σ dims]`.
    pub embedding_gradients: Vec<f32>,
    /// d(scale·Σ loss)/d(pooled first-order weights), `[samples, F]`; empty when the model takes none.
    pub linear_gradients: Vec<f32>,
}

/// A model with its parameters, gradients and optimizer state.
#[derive(Debug, Clone)]
pub struct Tower {
    model: Model,
    optimizer: DenseOptimizer,
    seed: u64,
    rank: u32,
    workers: Workers,
    parameters: Vec<f32>,
    gradients: Vec<f32>,
    optimizer_state: Vec<f32>,
}

impl Tower {
    /// A tower at the start of training.
    ///
    /// # Errors
    /// [`DenseError::InvalidOptimizer`] and [`DenseError::Threads`].
    pub fn new(model: Model, optimizer: DenseOptimizer, options: TowerOptions) -> Result<Self, DenseError> {
        optimizer.validate()?;
        let total = model.layout().total();
        Ok(Self {
            parameters: model.layout().initialize(options.seed),
            gradients: vec![0.0; total],
            optimizer_state: optimizer.initial_state(total),
            workers: Workers::new(options.threads)?,
            model,
            optimizer,
            seed: options.seed,
            rank: options.rank,
        })
    }

    /// The model.
    pub fn model(&self) -> &Model {
        &self.model
    }

    /// The layout of the flat buffers.
    pub fn layout(&self) -> &ParameterLayout {
        self.model.layout()
    }

    /// The optimizer.
    pub fn optimizer(&self) -> &DenseOptimizer {
        &self.optimizer
    }

    /// The flat parameters.
    pub fn parameters(&self) -> &[f32] {
        &self.parameters
    }

    /// The flat parameters, to be overwritten in place.
    pub fn parameters_mut(&mut self) -> &mut [f32] {
        &mut self.parameters
    }

    /// The flat gradients of the last `forward_backward`, zero before the first.
    pub fn gradients(&self) -> &[f32] {
        &self.gradients
    }

    /// The flat gradients, to be reduced in place.
    pub fn gradients_mut(&mut self) -> &mut [f32] {
        &mut self.gradients
    }

    /// The flat optimizer state: one vector of the parameters' layout for each of [`DenseOptimizer::slots`], one after another.
    pub fn optimizer_state(&self) -> &[f32] {
        &self.optimizer_state
    }

    /// The flat optimizer state, to be overwritten in place.
    pub fn optimizer_state_mut(&mut self) -> &mut [f32] {
        &mut self.optimizer_state
    }

    /// Takes parameters and optimizer state from a checkpoint that the optimizer `saved_kind` wrote ([`DenseOptimizer::kind`]).
    /// The update count belongs to the checkpoint as well: pass it on to [`Tower::apply`].
    ///
    /// # Errors
    /// [`DenseError::OptimizerChanged`] and [`DenseError::RestoreLength`]; the tower is then as it was.
    pub fn restore(&mut self, parameters: &[f32], saved_kind: &str, optimizer_state: &[f32]) -> Result<(), DenseError> {
        if saved_kind != self.optimizer.kind() {
            return Err(DenseError::OptimizerChanged { saved: saved_kind.into(), configured: self.optimizer.kind() });
        }
        for (what, expected, got) in [
            ("parameters", self.parameters.len(), parameters.len()),
            ("optimizer state", self.optimizer_state.len(), optimizer_state.len()),
        ] {
            if expected != got {
                return Err(DenseError::RestoreLength { what, expected, got });
            }
        }
        self.parameters.copy_from_slice(parameters);
        self.optimizer_state.copy_from_slice(optimizer_state);
        Ok(())
    }

    /// Computes the loss and all gradients of `scale · Σ loss` at the present parameters; those of the parameters are then in
    /// [`Tower::gradients`]. `scale` is 1 / (samples of the global batch), so that gradients summed over replicas are those of the
    /// mean. A batch of 0 samples is legal and has zero gradients. `step` is the global step, on which dropout masks depend.
    ///
    /// # Errors
    /// [`DenseError::InputLength`], [`DenseError::InvalidLabel`], and [`DenseError::NonFinite`] for an input, a prediction or a
    /// gradient. The gradients are then undefined; parameters and optimizer state are untouched.
    pub fn forward_backward(
        &mut self,
        features: Features<'_>,
        labels: &[f32],
        scale: f32,
        step: u64,
    ) -> Result<StepOutput, DenseError> {
        let during = || format!("training step {step}");
        self.check_features(&features, &during)?;
        check_labels(labels, features.samples, step)?;

        let mut output = StepOutput {
            loss_sum: 0.0,
            predictions: Vec::with_capacity(features.samples),
            embedding_gradients: Vec::with_capacity(features.embeddings.len()),
            linear_gradients: Vec::with_capacity(features.linear.len()),
        };
        self.gradients.fill(0.0);
        let parameters = self.parameter_tensors();
        let dropout =
            Dropout { rate: self.model.config().dropout, seed: self.seed, step, rank: self.rank, first_sample: 0 };
        for wave in shards(features.samples).chunks(2 * self.workers.threads()) {
            let results = self.workers.map(wave.to_vec(), |shard| {
                differentiate(&self.model, &parameters, &features, labels, scale, dropout, shard)
            });
            self.accumulate(&results);
            for result in &results {
                output.loss_sum += result.loss_sum;
                output.predictions.extend_from_slice(&result.predictions);
                output.embedding_gradients.extend_from_slice(values(&result.embeddings));
                output.linear_gradients.extend_from_slice(values(&result.linear));
            }
        }
        self.check_step(&output, &during)?;
        Ok(output)
    }

    /// Predicted probabilities, one a sample, without recording gradients or dropping activations.
    ///
    /// # Errors
    /// [`DenseError::InputLength`] and [`DenseError::NonFinite`].
    pub fn predict(&self, features: Features<'_>) -> Result<Vec<f32>, DenseError> {
        let during = || "prediction".to_string();
        self.check_features(&features, &during)?;
        let parameters = self.parameter_tensors();
        let results = self.workers.map(shards(features.samples), |shard| {
            let inputs = self.inputs(&features, &shard);
            let logits = self.model.forward(&Parameters(&parameters), inputs, Dropout::default());
            let logits = logits.into_data();
            as_slice(&logits).iter().map(|&logit| sigmoid(f64::from(logit)) as f32).collect::<Vec<f32>>()
        });
        let predictions = results.concat();
        check_finite("the prediction", &predictions, 1, &during)?;
        Ok(predictions)
    }

    /// Updates the parameters in place from the gradients. `update_count` counts the updates that these parameters have had
    /// including this one, from 1, through restarts: Adam's bias correction is computed from it.
    ///
    /// # Errors
    /// [`DenseError::UpdateCount`] for count 0.
    pub fn apply(&mut self, update_count: u64) -> Result<(), DenseError> {
        let rule = self.optimizer.rule(update_count)?;
        let total = self.parameters.len();
        let mut slots: Vec<_> =
            self.optimizer_state.chunks_exact_mut(total.max(1)).map(|slot| slot.chunks_mut(UPDATE_CHUNK)).collect();
        let work: Vec<_> = self
            .parameters
            .chunks_mut(UPDATE_CHUNK)
            .zip(self.gradients.chunks(UPDATE_CHUNK))
            .map(|(parameters, gradients)| {
                let slots: Vec<_> = slots.iter_mut().filter_map(Iterator::next).collect();
                (parameters, slots, gradients)
            })
            .collect();
        self.workers.map(work, |(parameters, slots, gradients)| {
            rule.apply(parameters, slots, gradients);
        });
        Ok(())
    }

    /// The parameters as Burn tensors outside any graph: the one copy of a step.
    fn parameter_tensors(&self) -> Vec<Tensor<2>> {
        self.layout()
            .entries()
            .iter()
            .map(|entry| {
                let [rows, columns] = entry.shape;
                matrix(self.parameters[entry.range()].to_vec(), rows, columns)
            })
            .collect()
    }

    fn inputs(&self, features: &Features<'_>, shard: &Range<usize>) -> Inputs {
        inputs(&self.model, features, shard)
    }

    /// Adds the shards' gradients to the flat buffer, in the order of the shards.
    fn accumulate(&mut self, results: &[ShardGradients]) {
        let mut rest = self.gradients.as_mut_slice();
        let mut targets = Vec::new();
        for (index, entry) in self.model.layout().entries().iter().enumerate() {
            let (values, tail) = rest.split_at_mut(entry.values());
            targets.push((index, values));
            rest = tail;
        }
        self.workers.map(targets, |(index, target)| {
            for result in results {
                for (sum, value) in target.iter_mut().zip(values(&result.parameters[index])) {
                    *sum += value;
                }
            }
        });
    }

    fn check_features(&self, features: &Features<'_>, during: &dyn Fn() -> String) -> Result<(), DenseError> {
        for (input, values, columns) in [
            ("dense", features.dense, self.model.dense_width()),
            ("embeddings", features.embeddings, self.model.embedding_width()),
            ("linear", features.linear, self.model.linear_width()),
        ] {
            if values.len() != features.samples * columns {
                return Err(DenseError::InputLength { input, samples: features.samples, columns, got: values.len() });
            }
            check_finite(&format!("the {input} input"), values, columns, during)?;
        }
        Ok(())
    }

    fn check_step(&self, output: &StepOutput, during: &dyn Fn() -> String) -> Result<(), DenseError> {
        check_finite("the prediction", &output.predictions, 1, during)?;
        if !output.loss_sum.is_finite() {
            return Err(DenseError::NonFinite { what: "the loss".into(), during: during() });
        }
        check_finite(
            "the gradient of the embeddings",
            &output.embedding_gradients,
            self.model.embedding_width(),
            during,
        )?;
        check_finite(
            "the gradient of the first-order weights",
            &output.linear_gradients,
            self.model.linear_width(),
            during,
        )?;
        match self.gradients.iter().position(|value| !value.is_finite()) {
            None => Ok(()),
            Some(position) => {
                let entry = self.layout().entries().iter().find(|entry| entry.range().contains(&position));
                Err(DenseError::NonFinite {
                    what: format!("the gradient of `{}`", entry.map_or("", |entry| &entry.name)),
                    during: during(),
                })
            }
        }
    }
}

/// The gradients of one shard, as Burn's buffers.
struct ShardGradients {
    loss_sum: f64,
    predictions: Vec<f32>,
    /// In layout order; none for a parameter that the loss does not depend on.
    parameters: Vec<Option<TensorData>>,
    embeddings: Option<TensorData>,
    linear: Option<TensorData>,
}

/// Forward and backward pass of one shard, in a graph of its own.
fn differentiate(
    model: &Model,
    parameters: &[Tensor<2>],
    features: &Features<'_>,
    labels: &[f32],
    scale: f32,
    dropout: Dropout,
    shard: Range<usize>,
) -> ShardGradients {
    let leaf = |tensor: Tensor<2>| tensor.autodiff().require_grad();
    let parameters: Vec<Tensor<2>> = parameters.iter().cloned().map(leaf).collect();
    let inputs = inputs(model, features, &shard);
    let embeddings = inputs.embeddings.map(leaf);
    let linear = inputs.linear.map(leaf);
    let inputs = Inputs { dense: inputs.dense, embeddings: embeddings.clone(), linear: linear.clone() };
    let dropout = Dropout { first_sample: shard.start, ..dropout };
    let logits = model.forward(&Parameters(&parameters), inputs, dropout);
    let data = logits.clone().inner().into_data();
    let loss = binary_cross_entropy(as_slice(&data), &labels[shard.clone()], scale);
    // The gradient of Σ logit·c with a constant c is c: this hands the loss's derivative to the graph.
    let mut gradients = (logits * matrix(loss.logit_gradients, shard.len(), 1)).sum().backward();
    ShardGradients {
        loss_sum: loss.loss_sum,
        predictions: loss.predictions,
        parameters: parameters.iter().map(|leaf| take(leaf, &mut gradients)).collect(),
        embeddings: embeddings.and_then(|leaf| take(&leaf, &mut gradients)),
        linear: linear.and_then(|leaf| take(&leaf, &mut gradients)),
    }
}

/// The rows of a shard as tensors outside any graph.
fn inputs(model: &Model, features: &Features<'_>, shard: &Range<usize>) -> Inputs {
    let rows = |values: &[f32], columns: usize| {
        (columns > 0).then(|| {
            let rows = values[shard.start * columns..shard.end * columns].to_vec();
            matrix(rows, shard.len(), columns)
        })
    };
    Inputs {
        dense: rows(features.dense, model.dense_width()),
        embeddings: rows(features.embeddings, model.embedding_width()),
        linear: rows(features.linear, model.linear_width()),
    }
}

/// Moves a leaf's gradient out of the graph.
fn take(leaf: &Tensor<2>, gradients: &mut Gradients) -> Option<TensorData> {
    leaf.grad_remove(gradients).map(Tensor::into_data)
}

/// The values of a gradient; empty for none.
fn values(gradient: &Option<TensorData>) -> &[f32] {
    gradient.as_ref().map_or(&[], as_slice)
}

fn as_slice(data: &TensorData) -> &[f32] {
    data.as_slice().expect("this crate makes f32 tensors only")
}

fn check_labels(labels: &[f32], samples: usize, step: u64) -> Result<(), DenseError> {
    if labels.len() != samples {
        return Err(DenseError::InputLength { input: "label", samples, columns: 1, got: labels.len() });
    }
    match labels.iter().position(|label| !(0.0..=1.0).contains(label)) {
        None => Ok(()),
        Some(sample) => Err(DenseError::InvalidLabel { sample, value: labels[sample], step }),
    }
}

/// Refuses values that are infinite or not a number, naming the first.
fn check_finite(what: &str, values: &[f32], columns: usize, during: &dyn Fn() -> String) -> Result<(), DenseError> {
    match values.iter().position(|value| !value.is_finite()) {
        None => Ok(()),
        Some(position) => {
            let (sample, column) = (position / columns, position % columns);
            let place = if columns == 1 { String::new() } else { format!(", column {column}") };
            Err(DenseError::NonFinite {
                what: format!("{what} of sample {sample}{place} ({})", values[position]),
                during: during(),
            })
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::{CrossStructure, ModelConfig, ModelKind};
    use crate::random::Stream;
    use crate::reference::{Batch, DropoutKey, Reference};

    const SEED: u64 = 11;
    const RANK: u32 = 3;
    const STEP: u64 = 17;

    fn config(kind: ModelKind) -> ModelConfig {
        let dims = match kind {
            ModelKind::Lr => vec![0; 3],
            ModelKind::Dlrm { .. } | ModelKind::DeepFm { .. } | ModelKind::Fm => vec![4; 3],
            _ => vec![4, 2, 3],
        };
        ModelConfig { kind, dense_features: 2, embedding_dims: dims, dropout: 0.0 }
    }

    fn dnn() -> ModelConfig {
        config(ModelKind::Dnn { hidden: vec![6, 5] })
    }

    fn dcn(structure: CrossStructure, low_rank: Option<usize>, hidden: Vec<usize>) -> ModelConfig {
        config(ModelKind::DcnV2 { structure, cross_layers: 3, low_rank, hidden })
    }

    /// Every kind, and every branch within the kinds.
    fn all_models() -> Vec<ModelConfig> {
        let without_dense = |kind| ModelConfig { dense_features: 0, ..config(kind) };
        let without_sparse = |kind| ModelConfig { embedding_dims: vec![], ..config(kind) };
        vec![
            config(ModelKind::Lr),
            without_dense(ModelKind::Lr),
            without_sparse(ModelKind::Lr),
            config(ModelKind::Fm),
            without_dense(ModelKind::Fm),
            config(ModelKind::DeepFm { hidden: vec![6, 5] }),
            config(ModelKind::WideDeep { hidden: vec![6, 5] }),
            dnn(),
            without_dense(ModelKind::Dnn { hidden: vec![6] }),
            without_sparse(ModelKind::Dnn { hidden: vec![6] }),
            config(ModelKind::Dnn { hidden: vec![] }),
            config(ModelKind::Dlrm { bottom: vec![5, 4], top: vec![7, 6] }),
            config(ModelKind::Dlrm { bottom: vec![5], top: vec![7] }),
            without_dense(ModelKind::Dlrm { bottom: vec![5], top: vec![7] }),
            dcn(CrossStructure::Parallel, None, vec![6, 5]),
            dcn(CrossStructure::Parallel, Some(2), vec![6]),
            dcn(CrossStructure::Parallel, None, vec![]),
            dcn(CrossStructure::Stacked, None, vec![6, 5]),
            dcn(CrossStructure::Stacked, Some(2), vec![6]),
        ]
    }

    fn tower_with(config: ModelConfig, threads: usize) -> Tower {
        let options = TowerOptions { seed: SEED, rank: RANK, threads };
        Tower::new(Model::new(config).unwrap(), DenseOptimizer::adam(1e-2), options).unwrap()
    }

    fn tower(config: ModelConfig) -> Tower {
        tower_with(config, 1)
    }

    /// A tower none of whose parameters is 0: a weight that starts at 0 hides what is multiplied by it.
    fn moved_tower(config: ModelConfig) -> Tower {
        let mut tower = tower(config);
        let stream = Stream::new(&[98]);
        for (index, parameter) in (0..).zip(tower.parameters_mut()) {
            *parameter += (0.2 * stream.unit(index) - 0.1) as f32;
        }
        tower
    }

    /// A batch whose values f32 holds exactly.
    #[derive(Clone)]
    struct Sampled {
        samples: usize,
        dense: Vec<f32>,
        embeddings: Vec<f32>,
        linear: Vec<f32>,
        labels: Vec<f32>,
    }

    impl Sampled {
        fn new(model: &Model, samples: usize) -> Self {
            let values = |key: u64, width: usize| -> Vec<f32> {
                let stream = Stream::new(&[99, key]);
                (0..(samples * width) as u64).map(|i| (2.0 * stream.unit(i) - 1.0) as f32).collect()
            };
            Self {
                samples,
                dense: values(0, model.dense_width()),
                embeddings: values(1, model.embedding_width()),
                linear: values(2, model.linear_width()),
                labels: values(3, 1).iter().map(|&x| if x > 0.0 { 1.0 } else { 0.0 }).collect(),
            }
        }

        fn features(&self) -> Features<'_> {
            Features { samples: self.samples, dense: &self.dense, embeddings: &self.embeddings, linear: &self.linear }
        }

        fn batch(&self) -> Batch {
            let wide = |values: &[f32]| values.iter().copied().map(f64::from).collect();
            Batch {
                samples: self.samples,
                dense: wide(&self.dense),
                embeddings: wide(&self.embeddings),
                linear: wide(&self.linear),
                labels: wide(&self.labels),
            }
        }
    }

    fn wide(values: &[f32]) -> Vec<f64> {
        values.iter().copied().map(f64::from).collect()
    }

    /// Central differences of `loss` along each coordinate.
    fn differences(at: &[f64], loss: impl Fn(&[f64]) -> f64) -> Vec<f64> {
        const EPSILON: f64 = 1e-5;
        let mut point = at.to_vec();
        (0..at.len())
            .map(|index| {
                let mut moved = |by: f64| {
                    point[index] = at[index] + by;
                    let loss = loss(&point);
                    point[index] = at[index];
                    loss
                };
                (moved(EPSILON) - moved(-EPSILON)) / (2.0 * EPSILON)
            })
            .collect()
    }

    fn assert_close(what: &str, got: &[f32], expected: &[f64]) {
        assert_eq!(got.len(), expected.len(), "{what}");
        let scale = expected.iter().fold(1e-3_f64, |most, value| most.max(value.abs()));
        for (index, (&got, &expected)) in got.iter().zip(expected).enumerate() {
            let error = (f64::from(got) - expected).abs();
            assert!(error <= 2e-6 * scale + 2e-5 * expected.abs(), "{what}[{index}]: {got} but {expected} expected");
        }
    }

    /// Compares one training step with finite differences of the reference.
    fn check_step(config: ModelConfig, samples: usize, dropout: DropoutKey) {
        let name = format!("{config:?}");
        let mut tower = moved_tower(config.clone());
        let sampled = Sampled::new(tower.model(), samples);
        let scale = 1.0 / 3.0;
        let output = tower.forward_backward(sampled.features(), &sampled.labels, scale, STEP).unwrap();

        let batch = sampled.batch();
        let parameters = wide(tower.parameters());
        let layout = tower.layout().clone();
        let reference = Reference { config: &config, layout: &layout, dropout };
        let logits: Vec<f64> = (0..samples).map(|sample| reference.logit(&parameters, &batch, sample)).collect();
        let probabilities: Vec<f64> = logits.iter().map(|x| 1.0 / (1.0 + (-x).exp())).collect();
        assert_close(&format!("{name}: predictions"), &output.predictions, &probabilities);
        let loss = reference.loss_sum(&parameters, &batch);
        assert!((output.loss_sum - loss).abs() < 1e-6 * loss, "{name}: loss {} but {loss}", output.loss_sum);

        let scaled = |parameters: &[f64], batch: &Batch| f64::from(scale) * reference.loss_sum(parameters, batch);
        let expected = differences(&parameters, |point| scaled(point, &batch));
        for entry in layout.entries() {
            let what = format!("{name}: {}", entry.name);
            assert_close(&what, &tower.gradients()[entry.range()], &expected[entry.range()]);
        }
        let expected = differences(&batch.embeddings, |point| {
            scaled(&parameters, &Batch { embeddings: point.to_vec(), ..batch.clone() })
        });
        assert_close(&format!("{name}: embeddings"), &output.embedding_gradients, &expected);
        let expected =
            differences(&batch.linear, |point| scaled(&parameters, &Batch { linear: point.to_vec(), ..batch.clone() }));
        assert_close(&format!("{name}: linear"), &output.linear_gradients, &expected);
    }

    #[test]
    fn forward_and_all_gradients_of_every_model_match_an_independent_definition() {
        for config in all_models() {
            check_step(config, 5, None);
        }
    }

    #[test]
    fn dropout_masks_and_their_gradients_match_an_independent_definition() {
        let key = Some([SEED, STEP, u64::from(RANK)]);
        for config in all_models() {
            check_step(ModelConfig { dropout: 0.4, ..config }, 5, key);
        }
    }

    #[test]
    fn a_batch_cut_into_shards_has_the_gradients_of_the_whole_batch() {
        assert!(shards(600).len() > 1);
        let dropout = Some([SEED, STEP, u64::from(RANK)]);
        let small = ModelConfig { dropout: 0.3, embedding_dims: vec![], ..config(ModelKind::Dnn { hidden: vec![4] }) };
        check_step(small, 600, dropout);
        check_step(ModelConfig { embedding_dims: vec![], ..config(ModelKind::Lr) }, 600, None);
    }

    #[test]
    fn predictions_match_the_definition_and_drop_nothing() {
        for config in all_models() {
            let config = ModelConfig { dropout: 0.5, ..config };
            let tower = moved_tower(config.clone());
            let sampled = Sampled::new(tower.model(), 300);
            let reference = Reference { config: &config, layout: tower.layout(), dropout: None };
            let (parameters, batch) = (wide(tower.parameters()), sampled.batch());
            let expected: Vec<f64> = (0..batch.samples)
                .map(|sample| 1.0 / (1.0 + (-reference.logit(&parameters, &batch, sample)).exp()))
                .collect();
            assert_close(&format!("{config:?}"), &tower.predict(sampled.features()).unwrap(), &expected);
        }
    }

    #[test]
    fn dropout_keeps_the_expectation_and_differs_by_step_and_rank() {
        let config = ModelConfig { dropout: 0.3, ..dnn() };
        let model = Model::new(config).unwrap();
        let sampled = Sampled::new(&model, 512);
        let predictions = |rank, step| {
            let options = TowerOptions { seed: SEED, rank, threads: 1 };
            let mut tower = Tower::new(model.clone(), DenseOptimizer::adam(1e-3), options).unwrap();
            tower.forward_backward(sampled.features(), &sampled.labels, 1.0, step).unwrap().predictions
        };
        assert_eq!(predictions(0, 1), predictions(0, 1));
        assert_ne!(predictions(0, 1), predictions(0, 2));
        assert_ne!(predictions(0, 1), predictions(1, 1));

        let ones = matrix(vec![1.0; 100_000], 1000, 100);
        let dropout = Dropout { rate: 0.3, seed: 1, step: 2, rank: 3, first_sample: 0 };
        let dropped = dropout.apply(5, ones).into_data();
        let zeros = as_slice(&dropped).iter().filter(|&&x| x == 0.0).count();
        assert!((zeros as f64 / 1e5 - 0.3).abs() < 0.005, "{zeros}");
        assert!(as_slice(&dropped).iter().all(|&x| x == 0.0 || x == 1.0 / 0.7_f32));
    }

    /// Three steps of training; everything that came out, as bits.
    fn train(config: &ModelConfig, threads: usize) -> Vec<u32> {
        let mut tower = tower_with(config.clone(), threads);
        let sampled = Sampled::new(tower.model(), 1500);
        let mut bits = Vec::new();
        for step in 1..=3 {
            let output = tower.forward_backward(sampled.features(), &sampled.labels, 1.0 / 1500.0, step).unwrap();
            tower.apply(step).unwrap();
            let loss = output.loss_sum.to_bits();
            bits.extend([loss as u32, (loss >> 32) as u32]);
            let all = [&output.predictions, &output.embedding_gradients, &output.linear_gradients];
            bits.extend(all.into_iter().flatten().map(|value| value.to_bits()));
        }
        let predictions = tower.predict(sampled.features()).unwrap();
        let flat = [tower.parameters(), tower.gradients(), tower.optimizer_state(), &predictions];
        bits.extend(flat.into_iter().flatten().map(|value| value.to_bits()));
        bits
    }

    #[test]
    fn training_is_bit_equal_from_run_to_run_and_for_any_number_of_threads() {
        let models = [
            config(ModelKind::Dlrm { bottom: vec![64, 32], top: vec![96, 64] }),
            config(ModelKind::DeepFm { hidden: vec![96, 64] }),
            dcn(CrossStructure::Parallel, Some(2), vec![96, 64]),
        ];
        for config in models {
            let config = ModelConfig { dropout: 0.1, ..config };
            let once = train(&config, 1);
            for threads in [1, 2, 3] {
                assert!(once == train(&config, threads), "{config:?} on {threads} threads");
            }
        }
    }

    #[test]
    fn towers_that_compute_at_the_same_time_do_not_disturb_each_other() {
        let config = config(ModelKind::Dlrm { bottom: vec![16], top: vec![16] });
        let alone = train(&config, 2);
        std::thread::scope(|scope| {
            let runs: Vec<_> = (0..4).map(|_| scope.spawn(|| train(&config, 2))).collect();
            for run in runs {
                assert!(alone == run.join().unwrap());
            }
        });
    }

    #[test]
    fn an_empty_batch_has_zero_gradients_and_still_applies() {
        for config in all_models() {
            let mut tower = tower(config);
            let sampled = Sampled::new(tower.model(), 4);
            tower.forward_backward(sampled.features(), &sampled.labels, 1.0, 1).unwrap();
            let empty = Sampled::new(tower.model(), 0);
            let output = tower.forward_backward(empty.features(), &[], 1.0, 2).unwrap();
            assert_eq!(output.loss_sum, 0.0);
            assert!(output.predictions.is_empty() && output.embedding_gradients.is_empty());
            assert!(tower.gradients().iter().all(|&gradient| gradient == 0.0));
            tower.apply(1).unwrap();
            assert!(tower.predict(empty.features()).unwrap().is_empty());
        }
    }

    #[test]
    fn gradients_of_replicas_sum_to_those_of_the_global_batch() {
        let mut tower = tower(dnn());
        let sampled = Sampled::new(tower.model(), 10);
        tower.forward_backward(sampled.features(), &sampled.labels, 0.1, 1).unwrap();
        let whole = wide(tower.gradients());
        let mut sum = vec![0.0_f32; whole.len()];
        for part in [0..4, 4..10] {
            let rows = |values: &[f32], width: usize| values[part.start * width..part.end * width].to_vec();
            let (dense, embeddings) = (rows(&sampled.dense, 2), rows(&sampled.embeddings, 9));
            let features = Features { samples: part.len(), dense: &dense, embeddings: &embeddings, linear: &[] };
            tower.forward_backward(features, &sampled.labels[part.clone()], 0.1, 1).unwrap();
            sum.iter_mut().zip(tower.gradients()).for_each(|(sum, gradient)| *sum += gradient);
        }
        assert_close("sum over replicas", &sum, &whole);
    }

    #[test]
    fn values_that_are_not_finite_stop_the_step_and_are_named() {
        let mut tower = tower(dnn());
        let sampled = Sampled::new(tower.model(), 4);
        let before = tower.parameters().to_vec();
        let error = |tower: &mut Tower, sampled: &Sampled| {
            tower.forward_backward(sampled.features(), &sampled.labels, 1.0, 7).unwrap_err().to_string()
        };

        let mut broken = sampled.clone();
        broken.dense[2 * 2 + 1] = f32::NAN;
        let message = error(&mut tower, &broken);
        assert!(
            message.starts_with("the dense input of sample 2, column 1 (NaN) is not finite in training step 7"),
            "{message}"
        );
        assert!(tower.predict(broken.features()).unwrap_err().to_string().contains("in prediction"));

        let mut broken = sampled.clone();
        broken.embeddings[9 + 8] = f32::NEG_INFINITY;
        let message = error(&mut tower, &broken);
        assert!(message.starts_with("the embeddings input of sample 1, column 8 (-inf)"), "{message}");

        let mut broken = sampled.clone();
        broken.labels[3] = 2.0;
        let message = error(&mut tower, &broken);
        assert!(message.starts_with("the label of sample 3 is 2 in training step 7"), "{message}");

        tower.parameters_mut().fill(3e38);
        let message = error(&mut tower, &sampled);
        assert!(message.contains("prediction of sample 0"), "{message}");
        tower.parameters_mut().copy_from_slice(&before);
        assert!(tower.forward_backward(sampled.features(), &sampled.labels, 1.0, 8).is_ok());
    }

    #[test]
    fn a_gradient_that_overflows_is_named_by_its_parameter() {
        let mut tower = tower(ModelConfig { embedding_dims: vec![], ..config(ModelKind::Lr) });
        let features = Features { samples: 1, dense: &[1e20, -1e20], embeddings: &[], linear: &[] };
        tower.parameters_mut().fill(0.0);
        let error = tower.forward_backward(features, &[1.0], 1e20, 1).unwrap_err();
        assert!(error.to_string().starts_with("the gradient of `firstOrder.weight` is not finite"), "{error}");
    }

    #[test]
    fn inputs_of_a_wrong_length_are_refused_with_what_was_expected() {
        let mut tower = tower(dnn());
        let sampled = Sampled::new(tower.model(), 4);
        let short = Features { embeddings: &sampled.embeddings[1..], ..sampled.features() };
        let message = tower.forward_backward(short, &sampled.labels, 1.0, 1).unwrap_err().to_string();
        assert_eq!(
            message,
            "the embeddings input of a batch of 4 samples has 35 values, but this model takes 9 a sample (36)"
        );
        let message = tower.forward_backward(sampled.features(), &[1.0], 1.0, 1).unwrap_err().to_string();
        assert!(message.starts_with("the label input"), "{message}");
    }

    fn steps(tower: &mut Tower, updates: Range<u64>) {
        let sampled = Sampled::new(tower.model(), 32);
        for update in updates {
            tower.forward_backward(sampled.features(), &sampled.labels, 1.0 / 32.0, update).unwrap();
            tower.apply(update).unwrap();
        }
    }

    #[test]
    fn adam_goes_on_after_a_restore_as_if_nothing_had_happened_but_only_with_its_update_count() {
        let mut uninterrupted = tower(dnn());
        steps(&mut uninterrupted, 1..6);
        let (parameters, state) = (uninterrupted.parameters().to_vec(), uninterrupted.optimizer_state().to_vec());
        steps(&mut uninterrupted, 6..9);

        let mut restored = tower(dnn());
        restored.restore(&parameters, "adam", &state).unwrap();
        steps(&mut restored, 6..9);
        assert_eq!(restored.parameters(), uninterrupted.parameters());

        let mut forgetful = tower(dnn());
        forgetful.restore(&parameters, "adam", &state).unwrap();
        steps(&mut forgetful, 1..4);
        assert_ne!(forgetful.parameters(), uninterrupted.parameters(), "the beta powers were lost and nobody saw it");
    }

    #[test]
    fn a_restore_notices_another_optimizer_or_another_model() {
        let mut tower = tower(dnn());
        let (parameters, state) = (tower.parameters().to_vec(), tower.optimizer_state().to_vec());
        let message = tower.restore(&parameters, "sgd", &state).unwrap_err().to_string();
        assert!(message.contains("written by `sgd`, but the configured dense optimizer is `adam`"), "{message}");
        let message = tower.restore(&parameters[1..], "adam", &state).unwrap_err().to_string();
        assert!(message.contains("cannot restore the parameters"), "{message}");
        let message = tower.restore(&parameters, "adam", &state[1..]).unwrap_err().to_string();
        assert!(message.contains("cannot restore the optimizer state"), "{message}");
    }

    #[test]
    fn training_lowers_the_loss_to_that_of_the_function_behind_the_labels() {
        let mut tower = tower(config(ModelKind::Dlrm { bottom: vec![16], top: vec![32] }));
        let mut sampled = Sampled::new(tower.model(), 512);
        for sample in 0..sampled.samples {
            let score: f32 =
                (0..4).map(|d| sampled.embeddings[sample * 12 + d] * sampled.embeddings[sample * 12 + 8 + d]).sum();
            sampled.labels[sample] = if score > 0.0 { 1.0 } else { 0.0 };
        }
        let mut losses = Vec::new();
        for step in 1..=150 {
            let output = tower.forward_backward(sampled.features(), &sampled.labels, 1.0 / 512.0, step).unwrap();
            losses.push(output.loss_sum / 512.0);
            tower.apply(step).unwrap();
        }
        assert!(losses[0] > 0.6 && losses[149] < 0.15, "{} to {}", losses[0], losses[149]);
    }
}

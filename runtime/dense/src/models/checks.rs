//! Checks that several models share. Each error is a sentence for the author of the manifest.

use rectrain_kinds::ModelKind;

use super::ModelConfig;
use crate::DenseError;
use crate::layers::hidden_sizes;

/// Checks the inputs and the dropout of any model.
pub(super) fn inputs(config: &ModelConfig) -> Result<(), DenseError> {
    if !(0.0..1.0).contains(&config.dropout) {
        return Err(config.invalid(format!(
            "dropout is {}, but it is a probability from 0 up to, not including, 1",
            config.dropout
        )));
    }
    if config.dense_features == 0 && config.embedding_dims.is_empty() {
        return Err(
            config.invalid("it has neither dense nor sparse features, so it has no inputs; give at least one feature")
        );
    }
    if config.tasks == 0 {
        return Err(config.invalid("it has no task, so it has no logit; give at least one label"));
    }
    dims(config)
}

/// Refuses several tasks for a model with first-order weights, because an id has only one such
/// weight.
pub(super) fn one_task(config: &ModelConfig) -> Result<(), DenseError> {
    if config.tasks == 1 {
        return Ok(());
    }
    Err(config.invalid(format!(
        "it has {} tasks, but its first-order weights are for one; use dnn, dlrm, dcn or dcnV2",
        config.tasks
    )))
}

fn dims(config: &ModelConfig) -> Result<(), DenseError> {
    let dims = &config.embedding_dims;
    if !config.settings.kind().has_embeddings() {
        return match dims.iter().position(|&dim| dim != 0) {
            None => Ok(()),
            Some(position) => Err(config.invalid(format!(
                "sparse feature {position} has an embedding of dimension {}, but logistic regression has only \
                 first-order weights; use dimension 0",
                dims[position]
            ))),
        };
    }
    match dims.iter().position(|&dim| dim == 0) {
        None => Ok(()),
        Some(position) => Err(config.invalid(format!(
            "sparse feature {position} has embedding dimension 0, but this model takes embeddings; \
             use a dimension of at least 1"
        ))),
    }
}

/// The common dimension of all embeddings, for a model that multiplies embeddings of different
/// features.
pub(super) fn one_width(config: &ModelConfig) -> Result<usize, DenseError> {
    let dims = &config.embedding_dims;
    let Some(&first) = dims.first() else {
        return Err(config.invalid("it makes features interact, so it needs at least one sparse feature"));
    };
    match dims.iter().position(|&dim| dim != first) {
        None => Ok(first),
        Some(position) => Err(config.invalid(format!(
            "its interactions need embeddings of one dimension, but sparse feature 0 has {first} and sparse feature \
             {position} has {}; use one dimension, or a model that concatenates ({})",
            dims[position],
            concatenating()
        ))),
    }
}

/// Names of the models that take embeddings of any dimension.
fn concatenating() -> String {
    let kinds = ModelKind::ALL.into_iter().filter(|kind| kind.has_embeddings() && !kind.needs_one_width());
    kinds.map(ModelKind::name).collect::<Vec<_>>().join(", ")
}

/// Refuses a model without cross layers.
pub(super) fn cross_layers(config: &ModelConfig, layers: usize) -> Result<(), DenseError> {
    if layers > 0 {
        return Ok(());
    }
    Err(config.invalid("it has 0 cross layers; use at least 1, or the dnn model"))
}

/// Refuses `dcn` without cross layers, and without an MLP beside them.
pub(super) fn crosses_beside_mlp(config: &ModelConfig, layers: usize, hidden: &[usize]) -> Result<(), DenseError> {
    cross_layers(config, layers)?;
    if hidden_sizes(hidden).is_empty() {
        return Err(
            config.invalid("it has no hidden layer beside its cross layers; use at least 1, or the dcnV2 model")
        );
    }
    sizes(config, "hidden", hidden)
}

/// Refuses a hidden layer without units. `name` is the setting.
pub(super) fn sizes(config: &ModelConfig, name: &str, sizes: &[usize]) -> Result<(), DenseError> {
    match sizes.iter().position(|&size| size == 0) {
        None => Ok(()),
        Some(position) => Err(config.invalid(format!("layer {position} of `{name}` has size 0; use at least 1"))),
    }
}

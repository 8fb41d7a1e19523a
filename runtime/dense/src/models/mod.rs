//! The click models, one file each: settings and their checks, parameters, formula and ONNX graph.
//!
//! A model owns no values. It knows the layout of its parameters and maps a batch of inputs to
//! logits. The tower calls it, both in training and in prediction. [`ModelConfig::build`] makes the
//! models of a manifest. Other crates may implement [`Model`] too: the tower treats all models
//! alike.

mod checks;
mod dcn;
mod dcn_v2;
mod deepfm;
mod dlrm;
mod dnn;
mod first_layer;
mod fm;
mod lr;
#[cfg(test)]
pub(crate) mod reference;
mod substitutes;
#[cfg(test)]
mod tests;
mod wide_deep;

use std::fmt::Debug;
use std::sync::Arc;

use burn::tensor::Tensor;
use rectrain_kinds::ModelSettings;
use serde::{Deserialize, Serialize};

pub use self::first_layer::FirstLayer;
use self::substitutes::Substitute;
use crate::DenseError;
use crate::concatenation;
use crate::inputs::{InputWidths, Inputs};
use crate::layers::{Context, CrossShape, FactorizationMachine, MlpLogit, MlpShape, Products, VectorCrosses};
use crate::layout::ParameterLayout;
use crate::onnx::{Graph, Value};

/// A click model: a function from parameters and inputs to logits.
///
/// An implementation lays its parameters out once, with layers of [`crate::layers`] or with
/// [`ParameterLayout::push`]. It keeps the layers and the layout, and no values.
///
/// ```
/// use rectrain_dense::burn::tensor::Tensor;
/// use rectrain_dense::layers::{Context, Linear};
/// use rectrain_dense::onnx::{Graph, Value};
/// use rectrain_dense::{InputWidths, Inputs, Model, ParameterLayout};
///
/// /// One linear layer over the embeddings.
/// #[derive(Debug)]
/// struct Shallow {
///     layout: ParameterLayout,
///     width: usize,
///     logit: Linear,
/// }
///
/// impl Shallow {
///     fn new(width: usize) -> Self {
///         let mut layout = ParameterLayout::default();
///         let logit = Linear::new(&mut layout, "logit", width, 1);
///         Self { layout, width, logit }
///     }
/// }
///
/// impl Model for Shallow {
///     fn name(&self) -> &str {
///         "shallow"
///     }
///
///     fn layout(&self) -> &ParameterLayout {
///         &self.layout
///     }
///
///     fn input_widths(&self) -> InputWidths {
///         InputWidths { embeddings: self.width, ..InputWidths::default() }
///     }
///
///     fn forward(&self, context: &Context<'_>, inputs: Inputs<Tensor<2>>) -> Tensor<2> {
///         let embeddings = inputs.embeddings.expect("its width is not 0");
///         self.logit.forward(context, embeddings)
///     }
///
///     fn onnx(&self, graph: &mut Graph<'_>, inputs: Inputs<Value>) -> Value {
///         let embeddings = inputs.embeddings.expect("its width is not 0");
///         self.logit.onnx(graph, &embeddings)
///     }
/// }
///
/// let model = Shallow::new(8);
/// assert_eq!(model.layout().total(), 9);
/// ```
pub trait Model: Debug + Send + Sync {
    /// The model's name, for errors and for its ONNX graph.
    fn name(&self) -> &str;

    /// The layout of the model's parameters in the flat buffer.
    fn layout(&self) -> &ParameterLayout;

    /// The columns of the model's inputs. A pass has a tensor for each input with at least one
    /// column.
    fn input_widths(&self) -> InputWidths;

    /// The logits, `[B, tasks]`.
    fn forward(&self, context: &Context<'_>, inputs: Inputs<Tensor<2>>) -> Tensor<2>;

    /// The logits, `[N, tasks]`, in an ONNX graph: the formula of [`Model::forward`] without
    /// dropout.
    fn onnx(&self, graph: &mut Graph<'_>, inputs: Inputs<Value>) -> Value;

    /// Logits of a sample, one for each task.
    fn tasks(&self) -> usize {
        1
    }

    /// Whether the model takes pooled embeddings.
    fn needs_embeddings(&self) -> bool {
        self.input_widths().embeddings > 0
    }

    /// Whether the model takes a pooled first-order weight for each sparse feature.
    fn needs_linear(&self) -> bool {
        self.input_widths().linear > 0
    }
}

/// A model of the manifest and its inputs.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ModelConfig {
    /// The model with its sizes.
    #[serde(flatten)]
    pub settings: ModelSettings,
    /// Number of dense features.
    pub dense_features: usize,
    /// Embedding dimension of each sparse feature, in the order in which they are concatenated. 0
    /// for a model without embeddings.
    pub embedding_dims: Vec<usize>,
    /// Logits of a sample, one a task; left out of JSON when it is 1. `dnn`, `dlrm`, `dcn` and
    /// `dcnV2` may have several: their output layer then has as many columns.
    #[serde(default = "one", skip_serializing_if = "is_one")]
    pub tasks: usize,
    /// Probability that a hidden activation is dropped in training, in `[0, 1)`. The output of a
    /// bottom MLP is not a hidden activation. Dropout belongs to training and not to the trained
    /// model, so JSON leaves it out.
    #[serde(skip)]
    pub dropout: f32,
}

fn one() -> usize {
    1
}

#[allow(clippy::trivially_copy_pass_by_ref, reason = "serde passes a reference")]
fn is_one(tasks: &usize) -> bool {
    *tasks == 1
}

impl ModelConfig {
    /// One task and no dropout.
    pub fn new(settings: ModelSettings, dense_features: usize, embedding_dims: Vec<usize>) -> Self {
        Self { settings, dense_features, embedding_dims, tasks: 1, dropout: 0.0 }
    }

    /// Checks the settings against each other and lays out the parameters.
    ///
    /// # Errors
    /// [`DenseError::InvalidModel`] with a sentence that describes the contradiction.
    pub fn build(&self) -> Result<Arc<dyn Model>, DenseError> {
        checks::inputs(self)?;
        Ok(match &self.settings {
            ModelSettings::Dlrm { bottom, top } => Arc::new(dlrm::Dlrm::new(self, bottom, top)?),
            ModelSettings::DeepFm { hidden } => Arc::new(deepfm::DeepFm::new(self, hidden)?),
            ModelSettings::Dnn { hidden } => Arc::new(dnn::Dnn::new(self, hidden)?),
            ModelSettings::WideDeep { hidden } => Arc::new(wide_deep::WideDeep::new(self, hidden)?),
            ModelSettings::Dcn { cross_layers, hidden } => Arc::new(dcn::Dcn::new(self, *cross_layers, hidden)?),
            &ModelSettings::DcnV2 { structure, cross_layers: layers, low_rank: rank, ref hidden } => {
                Arc::new(dcn_v2::DcnV2::new(self, dcn_v2::Crosses { structure, layers, rank }, hidden)?)
            }
            ModelSettings::Fm => Arc::new(fm::Fm::new(self)?),
            ModelSettings::Lr => Arc::new(lr::Lr::new(self)?),
        })
    }

    /// The model that takes the summed partial results of parameter servers in the mode `des`. Its
    /// parameters have the layout of [`ModelConfig::build`]. `None` if the model has no
    /// substitution.
    ///
    /// # Errors
    /// As [`ModelConfig::build`].
    pub fn build_substitute(&self) -> Result<Option<Arc<dyn Model>>, DenseError> {
        checks::inputs(self)?;
        Ok(match &self.settings {
            ModelSettings::Lr => Some(Arc::new(Substitute::of_lr(self)?)),
            ModelSettings::Fm => Some(Arc::new(Substitute::of_fm(self)?)),
            ModelSettings::Dnn { hidden } => Some(Arc::new(Substitute::of_dnn(self, hidden)?)),
            ModelSettings::WideDeep { hidden } => Some(Arc::new(Substitute::of_wide_deep(self, hidden)?)),
            ModelSettings::DeepFm { hidden } => Some(Arc::new(Substitute::of_deepfm(self, hidden)?)),
            ModelSettings::Dcn { cross_layers, hidden } => {
                Some(Arc::new(Substitute::of_dcn(self, *cross_layers, hidden)?))
            }
            ModelSettings::Dlrm { .. } | ModelSettings::DcnV2 { .. } => None,
        })
    }

    /// The model's name.
    pub fn name(&self) -> &'static str {
        self.settings.kind().name()
    }

    /// Embedding values of a sample: Σ dims.
    fn embedding_width(&self) -> usize {
        self.embedding_dims.iter().sum()
    }

    /// Inputs of a model without first-order weights.
    fn dense_and_embeddings(&self) -> InputWidths {
        InputWidths { dense: self.dense_features, embeddings: self.embedding_width(), linear: 0 }
    }

    /// Inputs of a model with a first-order weight for each sparse feature.
    fn with_first_order(&self) -> InputWidths {
        InputWidths { linear: self.embedding_dims.len(), ..self.dense_and_embeddings() }
    }

    /// The MLP named `deep` over embeddings and dense features, with the layer that makes the
    /// logit.
    fn deep(&self, layout: &mut ParameterLayout, hidden: &[usize]) -> MlpLogit {
        let inputs = self.embedding_width() + self.dense_features;
        MlpLogit::new(layout, "deep", MlpShape { inputs, hidden, logits: self.tasks, dropout: self.dropout })
    }

    /// The cross layers of `dcn` over embeddings and dense features.
    fn crosses(&self, layout: &mut ParameterLayout, layers: usize) -> VectorCrosses {
        let summed = self.embedding_width();
        let shape = CrossShape { width: summed + self.dense_features, summed, layers, logits: self.tasks };
        VectorCrosses::new(layout, "cross", shape)
    }

    /// The second-order term over all sparse features.
    fn second_order(&self) -> Result<FactorizationMachine, DenseError> {
        let dim = checks::one_width(self)?;
        Ok(FactorizationMachine { features: self.embedding_dims.len(), dim })
    }

    fn invalid(&self, reason: impl Into<String>) -> DenseError {
        DenseError::InvalidModel { model: self.name().to_owned(), reason: reason.into() }
    }
}

/// Embeddings and dense features side by side; a model has at least one of them.
fn concatenate(context: &Context<'_>, parts: [Option<Tensor<2>>; 2]) -> Tensor<2> {
    match (parts, context.products) {
        ([Some(left), Some(right)], Products::Packed(packed)) if packed.is_recording() => {
            concatenation::forward_recorded([left, right])
        }
        ([Some(left), Some(right)], Products::Packed(_)) => concatenation::forward([left, right]),
        (parts, _) => Tensor::cat(parts.into_iter().flatten().collect(), 1),
    }
}

/// [`concatenate`] in a graph.
fn concatenate_onnx(graph: &mut Graph<'_>, parts: [Option<&Value>; 2]) -> Value {
    let parts: Vec<&Value> = parts.into_iter().flatten().collect();
    graph.concatenate(&parts)
}

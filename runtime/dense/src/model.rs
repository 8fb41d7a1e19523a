//! The click-through models, each a function from parameters and inputs to one logit a sample. A model owns no values: it knows the
//! layout of its parameters and what it computes from them. The tower calls it, in training and in prediction alike.

use burn::tensor::Tensor;
use rectrain_kinds::CrossStructure;
use serde::{Deserialize, Serialize};

use crate::DenseError;
use crate::layers::{Cross, Dropout, FirstOrder, Linear, Mlp, Parameters, factorization_machine, pairs, pairwise_dots};
use crate::layout::ParameterLayout;

/// Which model, with its sizes. Lists of sizes are those of hidden layers, each followed by ReLU; the layer that makes the logit is
/// added by itself (a last size of 1 is taken to be that layer).
///
/// In JSON, as a checkpoint's manifest keeps it, the kind's name and its sizes: `{"kind": "dnn", "hidden": [256, 128]}`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "camelCase", rename_all_fields = "camelCase")]
pub enum ModelKind {
    /// DLRM (Naumov et al. 2019): the bottom MLP maps the dense features to a vector of the embeddings' dimension, all pairs of
    /// vectors interact by dot products, and the top MLP maps those and the bottom's output to the logit. Without dense features
    /// there is no bottom MLP and `bottom` is not used.
    Dlrm {
        /// Sizes of the bottom MLP. The embeddings' dimension is appended unless it is the last size already.
        bottom: Vec<usize>,
        /// Sizes of the top MLP.
        top: Vec<usize>,
    },
    /// DeepFM (Guo et al. 2017): the sum of an FM and an MLP over the same embeddings.
    #[serde(rename = "deepfm")]
    DeepFm {
        /// Sizes of the MLP, which sees embeddings and dense features.
        hidden: Vec<usize>,
    },
    /// Persia's FFNN (Lian et al. 2022, section 5): an MLP over embeddings and dense features.
    Dnn {
        /// Sizes of the MLP.
        hidden: Vec<usize>,
    },
    /// Wide&Deep (Cheng et al. 2016): the sum of a logistic regression and an MLP.
    WideDeep {
        /// Sizes of the MLP, which sees embeddings and dense features.
        hidden: Vec<usize>,
    },
    /// DCN-V2 (Wang et al. 2021): explicit feature crosses and an MLP, over embeddings and dense features.
    DcnV2 {
        /// Where the MLP stands.
        structure: CrossStructure,
        /// Number of cross layers, at least 1.
        cross_layers: usize,
        /// Rank of the cross weights; none means full matrices.
        low_rank: Option<usize>,
        /// Sizes of the MLP; empty means crosses only.
        hidden: Vec<usize>,
    },
    /// Factorization machine (Rendle 2010) over the sparse features, with dense features entering linearly.
    Fm,
    /// Logistic regression. The sparse features have first-order weights and no embeddings: their dimensions are 0.
    Lr,
}

impl ModelKind {
    /// The name as the manifest spells it.
    pub fn name(&self) -> &'static str {
        match self {
            Self::Dlrm { .. } => "dlrm",
            Self::DeepFm { .. } => "deepfm",
            Self::Dnn { .. } => "dnn",
            Self::WideDeep { .. } => "wideDeep",
            Self::DcnV2 { .. } => "dcnV2",
            Self::Fm => "fm",
            Self::Lr => "lr",
        }
    }
}

/// A model and its inputs.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ModelConfig {
    /// Which model.
    #[serde(flatten)]
    pub kind: ModelKind,
    /// Number of dense features.
    pub dense_features: usize,
    /// Embedding dimension of each sparse feature, in the order in which they are concatenated.
    pub embedding_dims: Vec<usize>,
    /// Probability that a hidden activation is dropped in training, in `[0, 1)`. The bottom MLP's output is not a hidden activation.
    /// It belongs to training, not to what is trained, so JSON leaves it out.
    #[serde(skip)]
    pub dropout: f32,
}

/// The inputs of a forward pass; an input without columns is none.
pub(crate) struct Inputs {
    /// `[B, dense_features]`.
    pub(crate) dense: Option<Tensor<2>>,
    /// `[B, Σ dims]`.
    pub(crate) embeddings: Option<Tensor<2>>,
    /// `[B, F]`.
    pub(crate) linear: Option<Tensor<2>>,
}

/// A checked model: the layout of its parameters and what it computes.
#[derive(Debug, Clone)]
pub struct Model {
    config: ModelConfig,
    layout: ParameterLayout,
    architecture: Architecture,
}

#[derive(Debug, Clone)]
pub(crate) enum Architecture {
    Dlrm {
        bottom: Option<(Mlp, Linear)>,
        top: Mlp,
        logit: Linear,
    },
    /// LR, FM, Wide&Deep and DeepFM are sums of some of three parts.
    Sum {
        first_order: FirstOrder,
        second_order: bool,
        deep: Option<(Mlp, Linear)>,
    },
    Dnn {
        hidden: Mlp,
        logit: Linear,
    },
    DcnV2 {
        structure: CrossStructure,
        crosses: Vec<Cross>,
        deep: Mlp,
        logit: Linear,
    },
}

impl Model {
    /// Checks the settings against each other and lays the parameters out.
    ///
    /// # Errors
    /// [`DenseError::InvalidModel`] with a sentence for the contradiction.
    pub fn new(config: ModelConfig) -> Result<Self, DenseError> {
        check(&config)?;
        let mut layout = ParameterLayout::default();
        let architecture = build(&config, &mut layout);
        Ok(Self { config, layout, architecture })
    }

    /// The settings it was made of.
    pub fn config(&self) -> &ModelConfig {
        &self.config
    }

    /// What it computes, in parts.
    pub(crate) fn architecture(&self) -> &Architecture {
        &self.architecture
    }

    /// All linear layers: those whose products are in the precision that was asked for.
    pub(crate) fn linears(&self) -> Vec<&Linear> {
        let (mlps, others): (Vec<&Mlp>, Vec<&Linear>) = match &self.architecture {
            Architecture::Dlrm { bottom, top, logit } => {
                let (hidden, output) =
                    bottom.iter().map(|(hidden, output)| (hidden, output)).unzip::<_, _, Vec<_>, Vec<_>>();
                (hidden.into_iter().chain([top]).collect(), output.into_iter().chain([logit]).collect())
            }
            Architecture::Sum { deep, .. } => deep.iter().map(|(hidden, logit)| (hidden, logit)).unzip(),
            Architecture::Dnn { hidden, logit } => (vec![hidden], vec![logit]),
            Architecture::DcnV2 { crosses, deep, logit, .. } => {
                (vec![deep], crosses.iter().map(|cross| &cross.up).chain([logit]).collect())
            }
        };
        mlps.into_iter().flat_map(|mlp| mlp.layers.iter().map(|(linear, _)| linear)).chain(others).collect()
    }

    /// Where the parameters lie in the flat buffer.
    pub fn layout(&self) -> &ParameterLayout {
        &self.layout
    }

    /// Whether the model takes pooled embeddings.
    pub fn needs_embeddings(&self) -> bool {
        self.config.kind != ModelKind::Lr && !self.config.embedding_dims.is_empty()
    }

    /// Whether the model takes a pooled first-order weight for each sparse feature.
    pub fn needs_linear(&self) -> bool {
        use ModelKind::{DeepFm, Fm, Lr, WideDeep};
        matches!(self.config.kind, DeepFm { .. } | WideDeep { .. } | Fm | Lr) && !self.config.embedding_dims.is_empty()
    }

    /// Dense values a sample.
    pub fn dense_width(&self) -> usize {
        self.config.dense_features
    }

    /// Embedding values a sample: Σ dims.
    pub fn embedding_width(&self) -> usize {
        self.config.embedding_dims.iter().sum()
    }

    /// First-order weights a sample: the number of sparse features, or 0.
    pub fn linear_width(&self) -> usize {
        if self.needs_linear() { self.config.embedding_dims.len() } else { 0 }
    }

    /// The logits, `[B, 1]`.
    pub(crate) fn forward(&self, parameters: &Parameters<'_>, inputs: Inputs, dropout: Dropout) -> Tensor<2> {
        match &self.architecture {
            Architecture::Dlrm { bottom, top, logit } => {
                let bottom = bottom.as_ref().zip(inputs.dense).map(|((hidden, output), dense)| {
                    output.forward_relu(parameters, hidden.forward(parameters, dense, dropout))
                });
                let features = self.config.embedding_dims.len();
                let vectors = concatenate([bottom.clone(), inputs.embeddings]);
                let dots = pairwise_dots(vectors, features + usize::from(bottom.is_some()));
                let top_input = concatenate([bottom, Some(dots)]);
                logit.forward(parameters, top.forward(parameters, top_input, dropout))
            }
            Architecture::Sum { first_order, second_order, deep } => {
                let first = first_order.forward(parameters, inputs.linear, inputs.dense.clone());
                let second = inputs
                    .embeddings
                    .clone()
                    .filter(|_| *second_order)
                    .map(|embeddings| factorization_machine(embeddings, self.config.embedding_dims.len()));
                let deep = deep.as_ref().map(|(hidden, logit)| {
                    let input = concatenate([inputs.embeddings, inputs.dense]);
                    logit.forward(parameters, hidden.forward(parameters, input, dropout))
                });
                [second, deep].into_iter().flatten().fold(first, |sum, part| part + sum)
            }
            Architecture::Dnn { hidden, logit } => {
                let input = concatenate([inputs.embeddings, inputs.dense]);
                logit.forward(parameters, hidden.forward(parameters, input, dropout))
            }
            Architecture::DcnV2 { structure, crosses, deep, logit } => {
                let x0 = concatenate([inputs.embeddings, inputs.dense]);
                let crossed = crosses.iter().fold(x0.clone(), |x, cross| cross.forward(parameters, x0.clone(), x));
                let last = match structure {
                    CrossStructure::Stacked => deep.forward(parameters, crossed, dropout),
                    CrossStructure::Parallel if deep.is_empty() => crossed,
                    CrossStructure::Parallel => {
                        concatenate([Some(crossed), Some(deep.forward(parameters, x0, dropout))])
                    }
                };
                logit.forward(parameters, last)
            }
        }
    }
}

/// Side by side; at least one of the parts is there (see `check`).
fn concatenate(parts: [Option<Tensor<2>>; 2]) -> Tensor<2> {
    Tensor::cat(parts.into_iter().flatten().collect(), 1)
}

/// Sizes without the logit's own.
fn hidden_sizes(sizes: &[usize]) -> &[usize] {
    sizes.strip_suffix(&[1]).unwrap_or(sizes)
}

fn build(config: &ModelConfig, layout: &mut ParameterLayout) -> Architecture {
    let features = config.embedding_dims.len();
    let width = config.embedding_dims.iter().sum::<usize>() + config.dense_features;
    let tower = |layout: &mut ParameterLayout, name: &str, inputs: usize, sizes: &[usize]| {
        let hidden = Mlp::new(layout, name, inputs, hidden_sizes(sizes));
        let logit = Linear::new(layout, &format!("{name}.logit"), hidden.outputs(), 1);
        (hidden, logit)
    };
    match &config.kind {
        ModelKind::Dlrm { bottom, top } => {
            let dim = config.embedding_dims[0];
            let bottom = (config.dense_features > 0).then(|| {
                let hidden = bottom.strip_suffix(&[dim]).unwrap_or(bottom);
                let hidden = Mlp::new(layout, "bottom", config.dense_features, hidden);
                let output = Linear::new(layout, "bottom.output", hidden.outputs(), dim);
                (hidden, output)
            });
            let extra = usize::from(bottom.is_some());
            let (top, logit) = tower(layout, "top", pairs(features + extra) + extra * dim, top);
            Architecture::Dlrm { bottom, top, logit }
        }
        ModelKind::Dnn { hidden } => {
            let (hidden, logit) = tower(layout, "deep", width, hidden);
            Architecture::Dnn { hidden, logit }
        }
        ModelKind::DcnV2 { structure, cross_layers, low_rank, hidden } => {
            let crosses = (0..*cross_layers)
                .map(|index| Cross::new(layout, &format!("cross.{index}"), width, *low_rank))
                .collect();
            let deep = Mlp::new(layout, "deep", width, hidden_sizes(hidden));
            let last = match structure {
                CrossStructure::Parallel if !deep.is_empty() => width + deep.outputs(),
                CrossStructure::Parallel | CrossStructure::Stacked => deep.outputs(),
            };
            let logit = Linear::new(layout, "logit", last, 1);
            Architecture::DcnV2 { structure: *structure, crosses, deep, logit }
        }
        ModelKind::DeepFm { hidden } | ModelKind::WideDeep { hidden } => Architecture::Sum {
            first_order: FirstOrder::new(layout, config.dense_features),
            second_order: matches!(config.kind, ModelKind::DeepFm { .. }),
            deep: Some(tower(layout, "deep", width, hidden)),
        },
        ModelKind::Fm | ModelKind::Lr => Architecture::Sum {
            first_order: FirstOrder::new(layout, config.dense_features),
            second_order: config.kind == ModelKind::Fm,
            deep: None,
        },
    }
}

fn check(config: &ModelConfig) -> Result<(), DenseError> {
    let refuse = |reason: String| Err(DenseError::InvalidModel { model: config.kind.name(), reason });
    let dims = &config.embedding_dims;
    if !(0.0..1.0).contains(&config.dropout) {
        return refuse(format!(
            "dropout is {}, but it is a probability from 0 up to, not including, 1",
            config.dropout
        ));
    }
    if config.dense_features == 0 && dims.is_empty() {
        return refuse(
            "it has neither dense nor sparse features, so it has no inputs; give at least one feature".into(),
        );
    }
    match &config.kind {
        ModelKind::Lr => {
            if let Some(position) = dims.iter().position(|&dim| dim != 0) {
                return refuse(format!(
                    "sparse feature {position} has an embedding of dimension {}, but logistic regression has only \
                     first-order weights; use dimension 0",
                    dims[position]
                ));
            }
        }
        _ => {
            if let Some(position) = dims.iter().position(|&dim| dim == 0) {
                return refuse(format!(
                    "sparse feature {position} has embedding dimension 0, but this model takes embeddings; \
                     use a dimension of at least 1"
                ));
            }
        }
    }
    if matches!(config.kind, ModelKind::Dlrm { .. } | ModelKind::DeepFm { .. } | ModelKind::Fm) {
        if dims.is_empty() {
            return refuse("it makes features interact, so it needs at least one sparse feature".into());
        }
        if let Some(position) = dims.iter().position(|dim| dim != &dims[0]) {
            return refuse(format!(
                "its interactions need embeddings of one dimension, but sparse feature 0 has {} and sparse feature {position} \
                 has {}; use one dimension, or a model that concatenates (dnn, wideDeep, dcnV2)",
                dims[0], dims[position]
            ));
        }
    }
    match &config.kind {
        ModelKind::Dlrm { bottom, top } => {
            if config.dense_features == 0 && dims.len() == 1 {
                return refuse(
                    "it has one sparse and no dense feature, so no pair can interact; give at least two features"
                        .into(),
                );
            }
            check_sizes("bottom", bottom).and(check_sizes("top", top)).or_else(refuse)
        }
        ModelKind::DeepFm { hidden } | ModelKind::Dnn { hidden } | ModelKind::WideDeep { hidden } => {
            check_sizes("hidden", hidden).or_else(refuse)
        }
        ModelKind::DcnV2 { cross_layers, low_rank, hidden, .. } => {
            if *cross_layers == 0 {
                return refuse("it has 0 cross layers; use at least 1, or the dnn model".into());
            }
            if *low_rank == Some(0) {
                return refuse("the rank of its cross layers is 0; use at least 1, or none for full matrices".into());
            }
            check_sizes("hidden", hidden).or_else(refuse)
        }
        ModelKind::Fm | ModelKind::Lr => Ok(()),
    }
}

fn check_sizes(name: &str, sizes: &[usize]) -> Result<(), String> {
    match sizes.iter().position(|&size| size == 0) {
        Some(position) => Err(format!("layer {position} of `{name}` has size 0; use at least 1")),
        None => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn config(kind: ModelKind, dense_features: usize, embedding_dims: &[usize]) -> ModelConfig {
        ModelConfig { kind, dense_features, embedding_dims: embedding_dims.to_vec(), dropout: 0.0 }
    }

    fn refusal(config: ModelConfig) -> String {
        Model::new(config).unwrap_err().to_string()
    }

    fn dlrm() -> ModelKind {
        ModelKind::Dlrm { bottom: vec![512, 256], top: vec![512, 256] }
    }

    #[test]
    fn contradictions_are_refused_in_sentences() {
        let dnn = || ModelKind::Dnn { hidden: vec![8] };
        for (config, expected) in [
            (config(dlrm(), 13, &[16, 8]), "sparse feature 0 has 16 and sparse feature 1 has 8"),
            (config(ModelKind::Fm, 13, &[16, 8]), "cannot build the `fm` model"),
            (config(ModelKind::Fm, 13, &[]), "needs at least one sparse feature"),
            (config(dlrm(), 0, &[16]), "no pair can interact"),
            (config(ModelKind::Lr, 1, &[0, 4]), "sparse feature 1 has an embedding of dimension 4"),
            (config(dnn(), 1, &[4, 0]), "sparse feature 1 has embedding dimension 0"),
            (config(dnn(), 0, &[]), "neither dense nor sparse features"),
            (config(ModelKind::Dnn { hidden: vec![8, 0] }, 1, &[]), "layer 1 of `hidden` has size 0"),
            (ModelConfig { dropout: 1.0, ..config(dnn(), 1, &[]) }, "dropout is 1"),
            (ModelConfig { dropout: f32::NAN, ..config(dnn(), 1, &[]) }, "dropout is NaN"),
        ] {
            let message = refusal(config);
            assert!(message.contains(expected), "{message}");
        }
        let dcn = |cross_layers, low_rank| ModelKind::DcnV2 {
            structure: CrossStructure::Parallel,
            cross_layers,
            low_rank,
            hidden: vec![],
        };
        assert!(refusal(config(dcn(0, None), 1, &[4])).contains("0 cross layers"));
        assert!(refusal(config(dcn(1, Some(0)), 1, &[4])).contains("rank of its cross layers is 0"));
    }

    #[test]
    fn dlrm_has_the_parameters_of_the_paper() {
        let model = Model::new(config(dlrm(), 13, &[16; 26])).unwrap();
        let bottom = (13 + 1) * 512 + (512 + 1) * 256 + (256 + 1) * 16;
        let interactions = 27 * 26 / 2 + 16;
        let top = (interactions + 1) * 512 + (512 + 1) * 256 + 257;
        assert_eq!(model.layout().total(), bottom + top);
        assert_eq!((model.embedding_width(), model.linear_width()), (416, 0));
    }

    #[test]
    fn sizes_that_are_appended_by_default_may_be_written_out() {
        let written = ModelKind::Dlrm { bottom: vec![512, 256, 16], top: vec![512, 256, 1] };
        let layout = |kind| Model::new(config(kind, 13, &[16; 26])).unwrap().layout().clone();
        assert_eq!(layout(written), layout(dlrm()));
    }

    #[test]
    fn a_model_survives_json_by_the_names_of_the_manifest() {
        let dcn = ModelKind::DcnV2 {
            structure: CrossStructure::Stacked,
            cross_layers: 2,
            low_rank: Some(3),
            hidden: vec![4],
        };
        let deep = [
            ModelKind::DeepFm { hidden: vec![8] },
            ModelKind::Dnn { hidden: vec![] },
            ModelKind::WideDeep { hidden: vec![1] },
        ];
        for kind in deep.into_iter().chain([dlrm(), dcn, ModelKind::Fm, ModelKind::Lr]) {
            let config = config(kind, 3, &[16; 2]);
            let json = serde_json::to_value(&config).unwrap();
            assert_eq!(json["kind"], config.kind.name());
            assert_eq!(json["denseFeatures"], 3);
            assert_eq!(serde_json::from_value::<ModelConfig>(json).unwrap(), config);
        }
    }

    #[test]
    fn models_say_which_inputs_they_take() {
        let needs = |kind, dims: &[usize]| {
            let model = Model::new(config(kind, 1, dims)).unwrap();
            (model.needs_embeddings(), model.needs_linear())
        };
        let hidden = vec![4];
        assert_eq!(needs(ModelKind::Lr, &[0, 0]), (false, true));
        assert_eq!(needs(ModelKind::Lr, &[]), (false, false));
        assert_eq!(needs(ModelKind::Fm, &[4, 4]), (true, true));
        assert_eq!(needs(ModelKind::DeepFm { hidden: hidden.clone() }, &[4, 4]), (true, true));
        assert_eq!(needs(ModelKind::WideDeep { hidden: hidden.clone() }, &[4, 2]), (true, true));
        assert_eq!(needs(ModelKind::Dnn { hidden }, &[4, 2]), (true, false));
        assert_eq!(needs(dlrm(), &[4, 4]), (true, false));
    }
}

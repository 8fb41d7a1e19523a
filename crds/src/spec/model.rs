//! `spec.model`: the tower on top of the embeddings.

use kube::KubeSchema;
use kube::core::Rule;
use rectrain_kinds::{CrossStructure, ModelKind};
use serde::{Deserialize, Serialize};

use crate::defaults;

/// The model: its kind and its sizes.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
#[x_kube(
    validation = Rule::new("!has(self.bottom) || self.kind == 'dlrm'").message("only dlrm has a bottom MLP: remove `bottom`, or set kind: dlrm").field_path(".bottom"),
    validation = Rule::new("!has(self.crossLayers) || self.kind in ['dcn', 'dcnV2']").message("`crossLayers` belongs only to dcn and dcnV2: remove it, or set kind: dcnV2").field_path(".crossLayers"),
    validation = Rule::new("!has(self.crossStructure) || self.kind == 'dcnV2'").message("`crossStructure` belongs only to dcnV2: remove it, or set kind: dcnV2").field_path(".crossStructure"),
    validation = Rule::new("!has(self.lowRank) || self.kind == 'dcnV2'").message("`lowRank` belongs only to dcnV2: remove it, or set kind: dcnV2").field_path(".lowRank"),
    validation = Rule::new("!has(self.hidden) || !(self.kind in ['fm', 'lr'])").message("fm and lr have no hidden layers: remove `hidden`, or choose another kind").field_path(".hidden"),
    validation = Rule::new("!has(self.dropout) || self.dropout == 0.0 || !(self.kind in ['fm', 'lr'])").message("fm and lr have no layers to drop out of: remove `dropout`, or choose another kind").field_path(".dropout"),
    validation = Rule::new("!has(self.dropout) || self.dropout < 1.0").message("dropout is the share of activations set to 0: expected at least 0 and below 1").field_path(".dropout"),
    validation = Rule::new("!has(self.embeddingDim) || self.kind != 'lr'").message("lr has one weight per id and no embeddings: remove `embeddingDim`, or choose another kind").field_path(".embeddingDim")
)]
pub struct ModelSpec {
    /// The model on top of the embeddings. Required.
    pub kind: ModelKind,

    /// Width of an embedding row, in values, for every sparse feature without a `dim` of its own.
    /// Not for `lr`. The first-order weights of `deepfm`, `fm`, `wideDeep` and `lr` (one per id)
    /// are stored beside it.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = 4096), extend("x-default" = defaults::EMBEDDING_DIM))]
    pub embedding_dim: Option<u32>,

    /// Widths of the hidden layers of the (top) MLP, in units, first layer first. A ReLU follows
    /// each. An output layer of one unit is appended, unless the last layer is one. An empty list
    /// leaves only the output layer. Not for `fm` and `lr`. `dcn` needs a hidden layer.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 16), inner(range(min = 1, max = 65536)), extend("x-default" = defaults::HIDDEN))]
    pub hidden: Option<Vec<u32>>,

    /// Widths of the layers of `dlrm`'s bottom MLP over the dense features, in units, first layer
    /// first. Its output is an input of the dot products. So a last layer of width `embeddingDim`
    /// is appended, unless the last layer has that width. Only for `dlrm`, which has no bottom MLP
    /// without dense features.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(length(max = 16), inner(range(min = 1, max = 65536)), extend("x-default" = defaults::BOTTOM))]
    pub bottom: Option<Vec<u32>>,

    /// Number of cross layers. Only for `dcn` and `dcnV2`.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = 16), extend("x-default" = defaults::CROSS_LAYERS))]
    pub cross_layers: Option<u32>,

    /// How `dcnV2` combines its cross layers and its MLP. Only for `dcnV2`.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(extend("x-default" = CrossStructure::Parallel))]
    pub cross_structure: Option<CrossStructure>,

    /// Rank of the two factors that replace each cross matrix of `dcnV2`, in columns. Without it
    /// the matrix is full. Only for `dcnV2`.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = 65536), extend("x-default" = "full matrices"))]
    pub low_rank: Option<u32>,

    /// Share of the hidden activations that are set to 0 in each training step, at least 0 and
    /// below 1. Not for `fm` and `lr`.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 0.0, max = 1.0), extend("x-default" = defaults::DROPOUT))]
    pub dropout: Option<f64>,
}

/// Models that multiply the embeddings of different features need one width. A rule of `spec`,
/// because it reads the model and the features.
pub(crate) fn one_width_rule() -> Rule {
    let kinds = ModelKind::ALL.into_iter().filter(|kind| kind.needs_one_width()).map(ModelKind::name);
    let names: Vec<&str> = kinds.collect();
    let rule = format!(
        "!(self.model.kind in ['{}']) || self.features.sparse.all(f, !has(f.dim) || \
         f.dim == (has(self.model.embeddingDim) ? self.model.embeddingDim : {}))",
        names.join("', '"),
        defaults::EMBEDDING_DIM,
    );
    let (last, others) = names.split_last().unwrap_or((&"", &[]));
    let message = format!(
        "{} and {last} multiply the embeddings of different features, so they need one width: remove `dim` from the \
         features, or make it equal to spec.model.embeddingDim",
        others.join(", "),
    );
    Rule::new(rule).message(message.as_str()).field_path(".features.sparse")
}

//! Models, each with its sizes. `rectrain-dense` has their layers and formulas.

use serde::{Deserialize, Serialize};

named! {
    /// The kinds of model.
    pub enum ModelKind as "model" {
        /// Deep learning recommendation model (Naumov et al. 2019): a bottom MLP over the dense
        /// features, dot products of all pairs of vectors, and a top MLP. Needs the same dimension
        /// for every sparse feature.
        Dlrm = "dlrm",
        /// Factorization machine and MLP over the same embeddings, with their logits added (Guo et
        /// al. 2017). Needs the same dimension for every sparse feature.
        DeepFm = "deepfm",
        /// MLP over the concatenated embeddings and dense features: Persia's feed-forward network.
        Dnn = "dnn",
        /// Linear model and MLP side by side, with their logits added (Cheng et al. 2016).
        WideDeep = "wideDeep",
        /// Deep and cross network: explicit crosses of the features with vectors as weights, and an
        /// MLP (Wang et al. 2017).
        Dcn = "dcn",
        /// Deep and cross network, version 2: explicit crosses of the features, and an MLP (Wang et
        /// al. 2021).
        DcnV2 = "dcnV2",
        /// Factorization machine of second order (Rendle 2010). Needs the same dimension for every
        /// sparse feature.
        Fm = "fm",
        /// Logistic regression: one weight per id and per dense feature, and no embeddings.
        Lr = "lr",
    }
}

impl ModelKind {
    /// Whether an id has an embedding.
    #[must_use]
    pub const fn has_embeddings(self) -> bool {
        !matches!(self, Self::Lr)
    }

    /// Whether the mode `des` can train the model: parameter servers then compute its layers with
    /// weights of ids.
    #[must_use]
    pub const fn has_substitution(self) -> bool {
        matches!(self, Self::Lr | Self::Fm | Self::Dnn | Self::WideDeep | Self::DeepFm | Self::Dcn)
    }

    /// The sentence that refuses the mode `des` for this model. `None` if the model has a
    /// substitution.
    #[must_use]
    pub fn refuses_substitution(self) -> Option<String> {
        if self.has_substitution() {
            return None;
        }
        let names: Vec<_> = Self::ALL.into_iter().filter(|kind| kind.has_substitution()).map(Self::name).collect();
        let names = names.join(", ");
        Some(format!("mode des has no substitution for the model {self}: expected one of {names}, or another mode"))
    }

    /// Whether the embeddings of different features are multiplied, so that they need one width.
    #[must_use]
    pub const fn needs_one_width(self) -> bool {
        matches!(self, Self::Dlrm | Self::DeepFm | Self::Fm)
    }
}

named! {
    /// How `dcnV2` combines its cross layers and its MLP (Wang et al. 2021, figure 1).
    #[derive(Default)]
    pub enum CrossStructure as "structure of dcnV2" {
        /// Both see the features, and the output layer sees both.
        #[default]
        Parallel = "parallel",
        /// The MLP sees the output of the cross layers.
        Stacked = "stacked",
    }
}

/// A model with its sizes. Lists are the widths of hidden layers, first layer first; each is
/// followed by ReLU. The layer that makes the logit comes on top, unless the last width is 1.
///
/// The manifest of a checkpoint keeps it as JSON: `{"kind": "dnn", "hidden": [256, 128]}`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "camelCase", rename_all_fields = "camelCase")]
pub enum ModelSettings {
    /// [`ModelKind::Dlrm`]. Without dense features it has no bottom MLP, and `bottom` is not used.
    Dlrm {
        /// The bottom MLP. The embeddings' dimension is appended, unless it is the last width.
        bottom: Vec<usize>,
        /// The top MLP.
        top: Vec<usize>,
    },
    /// [`ModelKind::DeepFm`].
    #[serde(rename = "deepfm")]
    DeepFm {
        /// The MLP over embeddings and dense features.
        hidden: Vec<usize>,
    },
    /// [`ModelKind::Dnn`].
    Dnn {
        /// The MLP over embeddings and dense features.
        hidden: Vec<usize>,
    },
    /// [`ModelKind::WideDeep`].
    WideDeep {
        /// The MLP over embeddings and dense features.
        hidden: Vec<usize>,
    },
    /// [`ModelKind::Dcn`].
    Dcn {
        /// Number of cross layers, at least 1.
        cross_layers: usize,
        /// The MLP beside them, at least one layer.
        hidden: Vec<usize>,
    },
    /// [`ModelKind::DcnV2`].
    DcnV2 {
        /// Where the MLP stands.
        structure: CrossStructure,
        /// Number of cross layers, at least 1.
        cross_layers: usize,
        /// Rank of the cross matrices; `None` means full matrices.
        low_rank: Option<usize>,
        /// The MLP; empty means crosses only.
        hidden: Vec<usize>,
    },
    /// [`ModelKind::Fm`]. Dense features enter linearly.
    Fm,
    /// [`ModelKind::Lr`].
    Lr,
}

impl ModelSettings {
    /// The kind.
    #[must_use]
    pub const fn kind(&self) -> ModelKind {
        match self {
            Self::Dlrm { .. } => ModelKind::Dlrm,
            Self::DeepFm { .. } => ModelKind::DeepFm,
            Self::Dnn { .. } => ModelKind::Dnn,
            Self::WideDeep { .. } => ModelKind::WideDeep,
            Self::Dcn { .. } => ModelKind::Dcn,
            Self::DcnV2 { .. } => ModelKind::DcnV2,
            Self::Fm => ModelKind::Fm,
            Self::Lr => ModelKind::Lr,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_model_is_written_as_its_kind_and_its_sizes() {
        let hidden = vec![8];
        let structure = CrossStructure::Stacked;
        for settings in [
            ModelSettings::Dlrm { bottom: vec![4], top: vec![2] },
            ModelSettings::DeepFm { hidden: hidden.clone() },
            ModelSettings::Dnn { hidden: hidden.clone() },
            ModelSettings::WideDeep { hidden: hidden.clone() },
            ModelSettings::Dcn { cross_layers: 2, hidden: hidden.clone() },
            ModelSettings::DcnV2 { structure, cross_layers: 2, low_rank: None, hidden },
            ModelSettings::Fm,
            ModelSettings::Lr,
        ] {
            let json = serde_json::to_value(&settings).unwrap();
            assert_eq!(json["kind"], settings.kind().name());
            assert_eq!(serde_json::from_value::<ModelSettings>(json).unwrap(), settings);
        }
    }
}

//! Optimizers, each with its settings. The formulas are in the crates that compute them: the dense
//! ones in `rectrain-dense`, the sparse ones in `rectrain-embedding`.

use serde::{Deserialize, Serialize};

named! {
    /// Optimizers of the dense parameters.
    #[derive(Default)]
    pub enum DenseOptimizerKind as "dense optimizer" {
        /// Adam (Kingma and Ba 2015); `weightDecay` is added to the gradient.
        #[default]
        Adam = "adam",
        /// Adam with decoupled weight decay (Loshchilov and Hutter 2019).
        AdamW = "adamW",
        /// Stochastic gradient descent, optionally with momentum.
        Sgd = "sgd",
        /// AdaGrad (Duchi et al. 2011).
        AdaGrad = "adaGrad",
    }
}

named! {
    /// Optimizers of the embedding rows.
    #[derive(Default)]
    pub enum SparseOptimizerKind as "sparse optimizer" {
        /// Adam on the rows of a batch, like PyTorch's SparseAdam. Two values of state per value.
        #[default]
        Adam = "adam",
        /// AdaGrad. One value of state per value.
        AdaGrad = "adaGrad",
        /// Row-wise AdaGrad (Kraken's rAdaGrad): one accumulator per row, the mean of the squared
        /// gradients of its values. Needs the least memory of the adaptive optimizers.
        RowWiseAdaGrad = "rowWiseAdaGrad",
        /// Stochastic gradient descent. No state.
        Sgd = "sgd",
        /// FTRL-proximal (McMahan et al. 2013): `l1` gives sparse weights. Two values of state per
        /// value.
        Ftrl = "ftrl",
    }
}

/// A dense optimizer with its settings. All settings are finite, and named as in PyTorch.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "camelCase", rename_all_fields = "camelCase")]
pub enum DenseOptimizer {
    /// `b ← momentum·b + g; p ← p − lr·b` (`torch.optim.SGD`, no dampening, not Nesterov).
    Sgd {
        /// Above 0.
        learning_rate: f64,
        /// In `[0, 1)`; 0 keeps no state.
        momentum: f64,
    },
    /// `s ← s + g²; p ← p − lr·g / (√s + ε)` (`torch.optim.Adagrad`, no learning-rate decay).
    AdaGrad {
        /// Above 0.
        learning_rate: f64,
        /// The initial `s`, at least 0 (PyTorch 0, TensorFlow 0.1).
        initial_accumulator: f64,
        /// Above 0.
        epsilon: f64,
    },
    /// `torch.optim.Adam`: `g ← g + λp; m ← m + (1−β₁)(g − m); v ← β₂v + (1−β₂)g²;
    /// p ← p − lr/(1−β₁ᵗ) · m / (√v/√(1−β₂ᵗ) + ε)`.
    Adam {
        /// Above 0.
        learning_rate: f64,
        /// β₁ in `[0, 1)`.
        beta1: f64,
        /// β₂ in `[0, 1)`.
        beta2: f64,
        /// ε above 0.
        epsilon: f64,
        /// λ, at least 0: added to the gradient.
        weight_decay: f64,
    },
    /// `torch.optim.AdamW`: `p ← (1 − lr·λ)p` first, then Adam without λ.
    AdamW {
        /// Above 0.
        learning_rate: f64,
        /// β₁ in `[0, 1)`.
        beta1: f64,
        /// β₂ in `[0, 1)`.
        beta2: f64,
        /// ε above 0.
        epsilon: f64,
        /// λ, at least 0: decoupled.
        weight_decay: f64,
    },
}

impl DenseOptimizer {
    /// Settings that may change when a later run continues a checkpoint.
    pub const CHANGEABLE: [&str; 2] = ["learningRate", "weightDecay"];

    /// The kind. State of one kind is useless to another.
    #[must_use]
    pub const fn kind(&self) -> DenseOptimizerKind {
        match self {
            Self::Sgd { .. } => DenseOptimizerKind::Sgd,
            Self::AdaGrad { .. } => DenseOptimizerKind::AdaGrad,
            Self::Adam { .. } => DenseOptimizerKind::Adam,
            Self::AdamW { .. } => DenseOptimizerKind::AdamW,
        }
    }

    /// Names of the state vectors, each as long as the parameters. The flat state holds them in
    /// this order, one after another.
    #[must_use]
    pub fn slots(&self) -> &'static [&'static str] {
        match self {
            Self::Sgd { momentum, .. } if *momentum == 0.0 => &[],
            Self::Sgd { .. } => &["momentum"],
            Self::AdaGrad { .. } => &["sum"],
            Self::Adam { .. } | Self::AdamW { .. } => &["m", "v"],
        }
    }

    /// Adam with PyTorch's defaults and this learning rate.
    #[must_use]
    pub const fn adam(learning_rate: f64) -> Self {
        Self::Adam { learning_rate, beta1: 0.9, beta2: 0.999, epsilon: 1e-8, weight_decay: 0.0 }
    }
}

/// A sparse optimizer with its settings. All settings are finite. They are f64 so that 1 − β₂ keeps
/// its digits; rows are computed in f32.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "camelCase", rename_all_fields = "camelCase")]
pub enum SparseOptimizer {
    /// Plain stochastic gradient descent.
    Sgd {
        /// η above 0.
        learning_rate: f64,
    },
    /// Duchi, Hazan, Singer, JMLR 2011, like `torch.optim.Adagrad` for sparse gradients.
    AdaGrad {
        /// η above 0.
        learning_rate: f64,
        /// The accumulator of a new row, at least 0.
        initial_accumulator: f64,
        /// ε above 0.
        epsilon: f64,
    },
    /// Kraken §III-B, "rAdaGrad": AdaGrad with the mean of g² over the columns, one accumulator per
    /// row.
    RowWiseAdaGrad {
        /// η above 0.
        learning_rate: f64,
        /// The accumulator of a new row, at least 0.
        initial_accumulator: f64,
        /// ε above 0.
        epsilon: f64,
    },
    /// Kingma, Ba, ICLR 2015, lazily. A row's moments change only when the row has a gradient, and
    /// the bias correction uses the global update count, exactly as in `torch.optim.SparseAdam`.
    /// The powers of β are computed from the count and not stored.
    Adam {
        /// η above 0.
        learning_rate: f64,
        /// β₁ in `[0, 1)`.
        beta1: f64,
        /// β₂ in `[0, 1)`.
        beta2: f64,
        /// ε above 0.
        epsilon: f64,
    },
    /// McMahan et al., "Ad click prediction", KDD 2013, algorithm 1. In the paper all weights start
    /// at
    /// 0. A row that starts elsewhere gets the z for which the paper's closed form gives exactly
    ///    its initial value. So a gradient of 0 leaves it unchanged.
    Ftrl {
        /// α above 0.
        learning_rate: f64,
        /// β above 0.
        beta: f64,
        /// λ₁, at least 0.
        l1: f64,
        /// λ₂, at least 0.
        l2: f64,
    },
}

impl SparseOptimizer {
    /// The kind. State of one kind is useless to another.
    #[must_use]
    pub const fn kind(&self) -> SparseOptimizerKind {
        match self {
            Self::Sgd { .. } => SparseOptimizerKind::Sgd,
            Self::AdaGrad { .. } => SparseOptimizerKind::AdaGrad,
            Self::RowWiseAdaGrad { .. } => SparseOptimizerKind::RowWiseAdaGrad,
            Self::Adam { .. } => SparseOptimizerKind::Adam,
            Self::Ftrl { .. } => SparseOptimizerKind::Ftrl,
        }
    }

    /// Floats of optimizer state in a row of `dim` columns.
    #[must_use]
    pub const fn state_len(&self, dim: usize) -> usize {
        match self {
            Self::Sgd { .. } => 0,
            Self::AdaGrad { .. } => dim,
            Self::RowWiseAdaGrad { .. } => 1,
            Self::Adam { .. } | Self::Ftrl { .. } => 2 * dim,
        }
    }

    /// Settings that may change when a later run continues a checkpoint. FTRL's learning rate may
    /// not: its weights are a function of its state and of that rate.
    #[must_use]
    pub const fn changeable(&self) -> &'static [&'static str] {
        match self {
            Self::Ftrl { .. } => &[],
            Self::Sgd { .. } | Self::AdaGrad { .. } | Self::RowWiseAdaGrad { .. } | Self::Adam { .. } => {
                &["learningRate"]
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_optimizer_is_written_as_its_kind_and_its_settings() {
        let dense = DenseOptimizer::Sgd { learning_rate: 0.5, momentum: 0.0 };
        assert_eq!(
            serde_json::to_value(dense).unwrap(),
            serde_json::json!({"kind": "sgd", "learningRate": 0.5, "momentum": 0.0})
        );
        let sparse = SparseOptimizer::RowWiseAdaGrad { learning_rate: 0.5, initial_accumulator: 0.0, epsilon: 0.25 };
        let json = serde_json::to_value(sparse).unwrap();
        assert_eq!(json["kind"], sparse.kind().name());
        assert_eq!(serde_json::from_value::<SparseOptimizer>(json).unwrap(), sparse);
    }

    #[test]
    fn settings_that_may_change_are_settings() {
        let adam = DenseOptimizer::adam(0.1);
        let json = serde_json::to_value(adam).unwrap();
        assert!(DenseOptimizer::CHANGEABLE.iter().all(|setting| json.get(setting).is_some()));
        let sparse = SparseOptimizer::Sgd { learning_rate: 0.1 };
        let json = serde_json::to_value(sparse).unwrap();
        assert!(sparse.changeable().iter().all(|setting| json.get(setting).is_some()));
    }
}

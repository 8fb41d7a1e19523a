//! Kinds of values: how they are pooled, stored, computed, sent, transformed and initialised.

use serde::{Deserialize, Serialize};

named! {
    /// How the rows of a feature with several values become one vector.
    pub enum Pooling as "pooling" {
        /// The sum of the rows.
        Sum = "sum",
        /// The sum divided by the number of values, like the default of PyTorch's EmbeddingBag.
        Mean = "mean",
        /// The sum divided by the square root of the number of values.
        SqrtN = "sqrtN",
    }
}

named! {
    /// How a value of an embedding row is stored.
    #[derive(Default)]
    pub enum ValueType as "type of stored values" {
        /// 32-bit floating point.
        #[default]
        F32 = "f32",
        /// IEEE half precision: half the memory, magnitudes up to 65,504.
        F16 = "f16",
        /// bfloat16: half the memory, the range of f32 and 8 bits of precision.
        Bf16 = "bf16",
    }
}

impl ValueType {
    /// Bytes of one stored value.
    #[must_use]
    pub const fn bytes(self) -> usize {
        match self {
            Self::F32 => 4,
            Self::F16 | Self::Bf16 => 2,
        }
    }
}

named! {
    /// The number format of the products in linear layers.
    #[derive(Default)]
    pub enum Precision as "precision" {
        /// 32-bit floating point.
        #[default]
        Fp32 = "fp32",
        /// Operands rounded to bfloat16 (8 bits of precision, the range of f32), sums in 32 bits.
        /// On Intel CPUs with AMX and AMD CPUs with AVX512-BF16, that is at least twice the
        /// arithmetic per second. On other CPUs it is correct and no faster than `fp32`. GPUs need
        /// compute capability 8.0 (Ampere).
        Bf16 = "bf16",
    }
}

named! {
    /// How embedding values and their gradients travel between roles.
    #[derive(Default)]
    pub enum Compression as "compression" {
        /// As 32-bit floating point: exact.
        #[default]
        None = "none",
        /// As blocks of half-precision values scaled by κ/‖v‖∞ (Persia §4.2.3): half the bytes, and
        /// lossy.
        Fp16 = "fp16",
    }
}

named! {
    /// Where the rows of features with several values are pooled.
    #[derive(Default)]
    pub enum PartialPooling as "partial pooling" {
        /// On the embedding workers: rows and their gradients travel.
        #[default]
        Never = "never",
        /// On the parameter servers, for each piece and each table for which that sends fewer
        /// bytes. Each server pools the rows that it holds, and the embedding worker adds the sums.
        BySize = "bySize",
    }
}

named! {
    /// The device that a dense worker computes on.
    #[derive(Default)]
    pub enum DeviceKind as "device" {
        /// A GPU if there is one and this build can use it, the CPU otherwise.
        Auto = "auto",
        /// The CPU.
        #[default]
        Cpu = "cpu",
        /// An NVIDIA GPU. Training ends with an error if there is none.
        Cuda = "cuda",
    }
}

named! {
    /// The id for an empty value of a sparse feature.
    #[derive(Default)]
    pub enum MissingValue as "treatment of missing values" {
        /// An id of its own, with a row that is trained like any other.
        #[default]
        Token = "token",
        /// No id: the feature contributes a vector of zeros.
        Skip = "skip",
    }
}

named! {
    /// The function applied to a number before the model sees it.
    #[derive(Default)]
    pub enum TransformKind as "transform" {
        /// x
        #[default]
        Identity = "identity",
        /// ln(1 + max(x, 0)), for counts. A negative number counts as 0.
        Log1p = "log1p",
        /// sign(x) · ln(1 + |x|), for amounts that may be negative.
        SignedLog1p = "signedLog1p",
        /// (x - mean) / std
        Standardize = "standardize",
        /// (x - min) / (max - min), not clipped
        MinMax = "minMax",
    }
}

/// A transform with its settings: the function applied to a number x before the model sees it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", rename_all_fields = "camelCase")]
pub enum Transform {
    /// x
    #[default]
    Identity,
    /// ln(1 + max(x, 0)), for counts.
    Log1p,
    /// sign(x) · ln(1 + |x|), for amounts that may be negative.
    SignedLog1p,
    /// (x − mean) / std
    Standardize {
        /// Finite.
        mean: f32,
        /// Finite, above 0.
        std: f32,
    },
    /// (x − min) / (max − min), not clipped.
    MinMax {
        /// The number that becomes 0.
        min: f32,
        /// The number that becomes 1, above `min`.
        max: f32,
    },
}

impl Transform {
    /// The transformed number.
    #[inline]
    #[must_use]
    pub fn apply(self, x: f32) -> f32 {
        match self {
            Self::Identity => x,
            Self::Log1p => x.max(0.0).ln_1p(),
            Self::SignedLog1p => x.abs().ln_1p().copysign(x),
            Self::Standardize { mean, std } => (x - mean) / std,
            Self::MinMax { min, max } => (x - min) / (max - min),
        }
    }
}

named! {
    /// The distribution of the initial values of an embedding row.
    pub enum InitializerKind as "initializer" {
        /// Normal with mean 0; `scale` is the standard deviation.
        Normal = "normal",
        /// Uniform from -`scale` to +`scale`.
        Uniform = "uniform",
        /// All values 0.
        Zeros = "zeros",
    }
}

/// The initial values of the columns of a new row.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", rename_all_fields = "camelCase")]
pub enum Initializer {
    /// Uniform in `[low, high]`.
    Uniform {
        /// Finite.
        low: f32,
        /// Finite, at least `low`.
        high: f32,
    },
    /// Normal with mean 0, not truncated: the largest possible value is 8.3 standard deviations.
    Normal {
        /// Finite, at least 0.
        standard_deviation: f32,
    },
    /// The same value everywhere.
    Constant(f32),
}

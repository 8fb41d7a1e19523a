//! `spec.training`: the algorithm and its hyper-parameters.

use kube::KubeSchema;
use rectrain_kinds::{
    Compression, DenseOptimizerKind, KeyDivisor, Mode, OutputModel, PartialPooling, Precision, ShadowAlgorithm,
    SparseOptimizerKind, SyncPieces, ValueType, WirePrecision,
};
use schemars::{JsonSchema, Schema, SchemaGenerator};
use serde::{Deserialize, Serialize};

use crate::{QualitySpec, defaults};

/// The value of `spec.training.mode`: a fixed mode, or the automatic choice while training
/// continues. The mode in use at any time is a [`Mode`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ModeSpec {
    /// This mode.
    Fixed(Mode),
    /// `sync` or `gba`, whichever is currently faster.
    Auto,
}

impl ModeSpec {
    const AUTO: &'static str = "auto";
    const AUTO_MEANING: &'static str = "`sync` or `gba`, whichever is predicted to be faster from the workers' measured step times \
        and the load of the cluster. Training starts in `sync`, and switches at global-step boundaries without a change of \
        hyper-parameters. `spec.training.auto` sets the sensitivity. Outside a cluster only the step times decide.";

    /// The name in a manifest.
    pub fn name(self) -> &'static str {
        match self {
            ModeSpec::Fixed(mode) => mode.name(),
            ModeSpec::Auto => Self::AUTO,
        }
    }

    /// The mode that training starts in.
    pub fn first(self) -> Mode {
        match self {
            ModeSpec::Fixed(mode) => mode,
            ModeSpec::Auto => Mode::Sync,
        }
    }
}

impl Default for ModeSpec {
    fn default() -> Self {
        ModeSpec::Fixed(Mode::default())
    }
}

impl From<Mode> for ModeSpec {
    fn from(mode: Mode) -> Self {
        ModeSpec::Fixed(mode)
    }
}

impl std::fmt::Display for ModeSpec {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name())
    }
}

impl Serialize for ModeSpec {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(self.name())
    }
}

impl<'de> Deserialize<'de> for ModeSpec {
    fn deserialize<D: serde::Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        use serde::de::IntoDeserializer;
        let name = String::deserialize(deserializer)?;
        if name == Self::AUTO {
            return Ok(ModeSpec::Auto);
        }
        Mode::deserialize(name.into_deserializer()).map(ModeSpec::Fixed)
    }
}

impl JsonSchema for ModeSpec {
    fn schema_name() -> std::borrow::Cow<'static, str> {
        "ModeSpec".into()
    }

    fn json_schema(generator: &mut SchemaGenerator) -> Schema {
        let mut schema = Mode::json_schema(generator);
        if let Some(serde_json::Value::Array(modes)) = schema.get_mut("oneOf") {
            modes.push(serde_json::json!({"type": "string", "const": Self::AUTO, "description": Self::AUTO_MEANING}));
        }
        schema
    }
}

/// The sensitivity of the mode `auto`.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
#[x_kube(
    validation = Rule::new("(has(self.dwellSeconds) ? self.dwellSeconds : 300) >= (has(self.windowSeconds) ? self.windowSeconds : 60)").message("a mode must stay at least as long as the window of its measurements: expected a `dwellSeconds` (default 300) of at least `windowSeconds` (default 60)").field_path(".dwellSeconds")
)]
pub struct AutoModeSpec {
    /// The predicted gain in speed over `sync` that a switch to `gba` needs, as a share: 0.1 is a
    /// tenth. The margin in effect is at least the gain that earns back the time of the switch
    /// within `dwellSeconds`. It is doubled until the job has used `gba` once. Training returns to
    /// `sync` as soon as the gain is below half of the margin. In a crowded cluster, half of the
    /// margin is enough for a switch to `gba`. Training then returns only if `sync` is faster by
    /// the whole margin.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 0.0, max = 10.0), extend("x-default" = defaults::MODE_MARGIN))]
    pub margin: Option<f64>,

    /// Seconds over which predictions are averaged.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 15, max = 3600), extend("x-default" = defaults::MODE_WINDOW_SECONDS))]
    pub window_seconds: Option<u32>,

    /// The shortest time in a mode, in seconds.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 30, max = 86_400), extend("x-default" = defaults::MODE_DWELL_SECONDS))]
    pub dwell_seconds: Option<u32>,

    /// The most switches per hour.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = 8), extend("x-default" = defaults::MODE_SWITCHES_PER_HOUR))]
    pub switches_per_hour: Option<u32>,

    /// From this CPU share on, the cluster counts as crowded if others use it. The share is of the
    /// nodes' CPU, minus the job's requests.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 0.0, max = 1.0), extend("x-default" = defaults::MODE_CROWDED_CPU))]
    pub crowded_cpu: Option<f64>,
}

/// Settings of the mode `sync`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct SyncSpec {
    /// Global steps beyond the present one whose rows are requested early. Parameter servers send
    /// the rows that no step before changes, and the others once they are updated. The results do
    /// not depend on it. 0: every look-up waits for the update before. A job in which rows may be
    /// evicted, may expire or need admission looks nothing up early.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 0, max = 16), extend("x-default" = defaults::LOOK_AHEAD))]
    pub look_ahead: Option<u32>,

    /// Which dense worker computes a piece (a local batch) of a global batch. With `pulled`, a slow
    /// dense worker delays no step. The model then has the same bits for any number of dense
    /// workers. It requires `localBatchSize`; three pieces or more for each dense worker are best.
    /// It is not possible with `barrierWorkers`. With `pulled`, a dense worker sends its dense
    /// gradients for each piece instead of once a step.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(extend("x-default" = SyncPieces::Fixed))]
    pub pieces: Option<SyncPieces>,
}

/// Settings of the mode `hybrid`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct HybridSpec {
    /// τ: a look-up of rows may miss the updates of at most this many preceding global steps. 0
    /// waits for every update. Late updates cost quality where a job has few steps, or where its
    /// batches share many rows. Take `sync` if you compare models, or if no test AUC may be
    /// lost. It looks ahead too, and has nine tenths of the speed on fast links.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 0, max = 1024), extend("x-default" = defaults::STALENESS))]
    pub staleness: Option<u32>,
}

/// Settings of the mode `gba`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct GbaSpec {
    /// ι: the largest staleness, in global steps, at which a gradient still counts. A staler
    /// gradient is left out of its step. The staleness of a key's gradient counts from the step
    /// that last updated the key.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 0, max = 1024), extend("x-default" = defaults::GBA_STALENESS))]
    pub staleness: Option<u32>,

    /// The divisor of the sum of a key's gradients.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(extend("x-default" = KeyDivisor::Buffer))]
    pub key_divisor: Option<KeyDivisor>,
}

/// Settings of the mode `hopBs`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct HopBsSpec {
    /// b1: how many local batches a dense worker may be ahead of the slowest.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 0, max = 1024), extend("x-default" = defaults::HOP_BS_BOUND))]
    pub bound: Option<u32>,
}

/// Settings of the mode `hopBw`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct HopBwSpec {
    /// b3: a step does not wait for the gradients of this many dense workers, the slowest. Less
    /// than the number of dense workers.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 0, max = 1024), extend("x-default" = defaults::HOP_BW_BACKUPS))]
    pub backups: Option<u32>,
}

/// Settings of the mode `bsp`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct BspSpec {
    /// b2: gradients of local batches in a step.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = 65_536), extend("x-default" = "globalBatchSize / localBatchSize"))]
    pub aggregate: Option<u32>,
}

/// Settings of the mode `shadow`.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct ShadowSpec {
    /// The algorithm that synchronises the replicas.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(extend("x-default" = ShadowAlgorithm::Easgd))]
    pub algorithm: Option<ShadowAlgorithm>,

    /// α: in an exchange, the replica moves towards the copy on the parameter servers by this share
    /// of their difference. In `easgd`, the copy first moves towards the replica in the same way.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 0.001, max = 1.0), extend("x-default" = defaults::SHADOW_ALPHA))]
    pub alpha: Option<f64>,

    /// Training waits for an exchange after this many local batches of a dense worker. This is the
    /// foreground form, a baseline. Without it, one exchange follows another while training goes
    /// on.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = 1_000_000), extend("x-default" = "in the background"))]
    pub every_steps: Option<u32>,

    /// η of `bmuf`: the copy moves towards the mean of the replicas by this share of their
    /// difference. Other algorithms ignore it.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 0.001, max = 2.0), extend("x-default" = defaults::SHADOW_ETA))]
    pub eta: Option<f64>,

    /// The block momentum of `bmuf`: the share of the last step that the next one repeats. Other
    /// algorithms ignore it.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 0.0, max = 0.99), extend("x-default" = defaults::SHADOW_MOMENTUM))]
    pub momentum: Option<f64>,

    /// The momentum of `bmuf` is Nesterov's. Without `momentum` it changes nothing.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(extend("x-default" = false))]
    pub nesterov: Option<bool>,

    /// The fragments of the dense parameters. An exchange moves one of them, and they take turns.
    /// Each parameter server divides its part of the parameters into this many ranges of equal
    /// size. With `bmuf` and Nesterov's momentum, this is the method of Streaming DiLoCo.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = 256), extend("x-default" = defaults::SHADOW_FRAGMENTS))]
    pub fragments: Option<u32>,

    /// How values travel in an exchange. The last exchange before a pause, and the first one of a
    /// fragment after it, are always in 32 bits.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(extend("x-default" = WirePrecision::Fp32))]
    pub wire_precision: Option<WirePrecision>,

    /// The threads of a dense worker that train its replica, each with batches of its own. They
    /// update the same parameters without locks (Hogwild), so two updates of a parameter at the
    /// same moment may lose one of the two. The processors of the worker are divided among them.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = 64), extend("x-default" = defaults::SHADOW_THREADS))]
    pub threads: Option<u32>,

    /// The model that training results in. Evaluations and checkpoints take it.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(extend("x-default" = OutputModel::Copy))]
    pub output_model: Option<OutputModel>,
}

/// A scheduled switch of the training mode.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct SwitchSpec {
    /// Global batches trained before the switch. Required.
    #[schemars(range(min = 1, max = 1_000_000_000_000u64))]
    pub step: u64,

    /// The mode after the switch. Required.
    pub mode: Mode,
}

/// The optimizer of the dense parameters. Defaults are PyTorch's where PyTorch has them.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
#[x_kube(
    validation = Rule::new("!has(self.learningRate) || self.learningRate > 0.0").message("expected a learning rate above 0").field_path(".learningRate"),
    validation = Rule::new("!(has(self.beta1) || has(self.beta2)) || !has(self.kind) || self.kind in ['adam', 'adamW']").message("`beta1` and `beta2` belong to adam and adamW: remove them, or choose one of these"),
    validation = Rule::new("!(has(self.beta1) && self.beta1 >= 1.0) && !(has(self.beta2) && self.beta2 >= 1.0)").message("`beta1` and `beta2` are decay rates: expected at least 0 and below 1"),
    validation = Rule::new("!has(self.momentum) || (has(self.kind) && self.kind == 'sgd')").message("`momentum` belongs to sgd: remove it, or set kind: sgd").field_path(".momentum"),
    validation = Rule::new("!has(self.momentum) || self.momentum < 1.0").message("momentum is a decay rate: expected at least 0 and below 1").field_path(".momentum"),
    validation = Rule::new("!has(self.weightDecay) || !has(self.kind) || self.kind in ['adam', 'adamW']").message("`weightDecay` belongs to adam and adamW: remove it, or choose one of these").field_path(".weightDecay"),
    validation = Rule::new("!has(self.initialAccumulator) || (has(self.kind) && self.kind == 'adaGrad')").message("`initialAccumulator` belongs to adaGrad: remove it, or set kind: adaGrad").field_path(".initialAccumulator"),
    validation = Rule::new("!has(self.epsilon) || self.epsilon > 0.0").message("`epsilon` keeps the divisor above 0: expected a number above 0").field_path(".epsilon"),
    validation = Rule::new("!has(self.epsilon) || !(has(self.kind) && self.kind == 'sgd')").message("sgd has no divisor: remove `epsilon`, or choose another kind").field_path(".epsilon")
)]
pub struct DenseOptimizerSpec {
    /// The algorithm.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(extend("x-default" = DenseOptimizerKind::Adam))]
    pub kind: Option<DenseOptimizerKind>,

    /// Step size, above 0.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 0.0, max = 1000.0), extend("x-default" = "0.001 for adam and adamW, 0.01 for sgd and adaGrad"))]
    pub learning_rate: Option<f64>,

    /// Decay rate of the mean of the gradients, at least 0 and below 1. Only for adam and adamW.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 0.0, max = 1.0), extend("x-default" = defaults::ADAM_BETA1))]
    pub beta1: Option<f64>,

    /// Decay rate of the mean of the squared gradients, at least 0 and below 1. Only for adam and
    /// adamW.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 0.0, max = 1.0), extend("x-default" = defaults::ADAM_BETA2))]
    pub beta2: Option<f64>,

    /// A number above 0 that is added to the divisor. Not for sgd.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 0.0, max = 1.0), extend("x-default" = "1e-8 for adam and adamW, 1e-10 for adaGrad"))]
    pub epsilon: Option<f64>,

    /// Weight decay: added to the gradient as weightDecay · parameter; with adamW, subtracted from
    /// the parameter directly. Only for adam and adamW.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 0.0, max = 1000.0), extend("x-default" = "0 for adam, 0.01 for adamW"))]
    pub weight_decay: Option<f64>,

    /// The initial value of the accumulator. Only for adaGrad.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 0.0, max = 1000.0), extend("x-default" = defaults::ADA_GRAD_INITIAL_ACCUMULATOR))]
    pub initial_accumulator: Option<f64>,

    /// Momentum, at least 0 and below 1. Only for sgd.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 0.0, max = 1.0), extend("x-default" = defaults::SGD_MOMENTUM))]
    pub momentum: Option<f64>,
}

/// The optimizer of the embedding rows.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
#[x_kube(
    validation = Rule::new("!has(self.learningRate) || self.learningRate > 0.0").message("expected a learning rate above 0").field_path(".learningRate"),
    validation = Rule::new("!(has(self.beta1) || has(self.beta2)) || !has(self.kind) || self.kind == 'adam'").message("`beta1` and `beta2` belong to adam: remove them, or set kind: adam"),
    validation = Rule::new("!(has(self.beta1) && self.beta1 >= 1.0) && !(has(self.beta2) && self.beta2 >= 1.0)").message("`beta1` and `beta2` are decay rates: expected at least 0 and below 1"),
    validation = Rule::new("!has(self.epsilon) || self.epsilon > 0.0").message("`epsilon` keeps the divisor above 0: expected a number above 0").field_path(".epsilon"),
    validation = Rule::new("!has(self.beta) || self.beta > 0.0").message("beta keeps ftrl's first step finite: expected a number above 0").field_path(".beta"),
    validation = Rule::new("!has(self.epsilon) || !has(self.kind) || !(self.kind in ['sgd', 'ftrl'])").message("sgd and ftrl have no epsilon: remove `epsilon`, or choose another kind").field_path(".epsilon"),
    validation = Rule::new("!has(self.initialAccumulator) || (has(self.kind) && self.kind in ['adaGrad', 'rowWiseAdaGrad'])").message("`initialAccumulator` belongs to adaGrad and rowWiseAdaGrad: remove it, or choose one of these").field_path(".initialAccumulator"),
    validation = Rule::new("!(has(self.beta) || has(self.l1) || has(self.l2)) || (has(self.kind) && self.kind == 'ftrl')").message("`beta`, `l1` and `l2` belong to ftrl: remove them, or set kind: ftrl")
)]
pub struct SparseOptimizerSpec {
    /// The algorithm. Cannot be changed once the job exists, because the rows are stored together
    /// with its state.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(extend("x-default" = "adam, or rowWiseAdaGrad with spec.features.memory"))]
    pub kind: Option<SparseOptimizerKind>,

    /// Step size, above 0; with ftrl it is α.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 0.0, max = 1000.0), extend("x-default" = "0.001 for adam, 0.01 for adaGrad, rowWiseAdaGrad and sgd, 0.05 for ftrl"))]
    pub learning_rate: Option<f64>,

    /// Decay rate of the mean of the gradients, at least 0 and below 1. Only for adam.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 0.0, max = 1.0), extend("x-default" = defaults::ADAM_BETA1))]
    pub beta1: Option<f64>,

    /// Decay rate of the mean of the squared gradients, at least 0 and below 1. Only for adam.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 0.0, max = 1.0), extend("x-default" = defaults::ADAM_BETA2))]
    pub beta2: Option<f64>,

    /// A number above 0 that is added to the divisor. For adam, adaGrad and rowWiseAdaGrad.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 0.0, max = 1.0), extend("x-default" = "1e-8 for adam, 1e-10 for adaGrad and rowWiseAdaGrad"))]
    pub epsilon: Option<f64>,

    /// The initial value of an accumulator. For adaGrad and rowWiseAdaGrad.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 0.0, max = 1000.0), extend("x-default" = defaults::ADA_GRAD_INITIAL_ACCUMULATOR))]
    pub initial_accumulator: Option<f64>,

    /// β of ftrl's step size α / (β + √n), above 0.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 0.0, max = 1000.0), extend("x-default" = defaults::FTRL_BETA))]
    pub beta: Option<f64>,

    /// ftrl's penalty on absolute values. Weights with less evidence than this are exactly 0.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 0.0, max = 1000.0), extend("x-default" = defaults::FTRL_L1))]
    pub l1: Option<f64>,

    /// ftrl's penalty on squares.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 0.0, max = 1000.0), extend("x-default" = defaults::FTRL_L2))]
    pub l2: Option<f64>,
}

/// The optimizers.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct OptimizerSpec {
    /// The optimizer of the dense parameters.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(extend("x-default" = "adam"))]
    pub dense: Option<DenseOptimizerSpec>,

    /// The optimizer of the embedding rows.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(extend("x-default" = "adam"))]
    pub sparse: Option<SparseOptimizerSpec>,

    /// The optimizer of the first-order weights, which are the first value of each row in lr, fm,
    /// deepfm and wideDeep. `sparse` then holds for the embeddings alone. With kind: ftrl and `l1`
    /// above 0, the weights of ids with little evidence are exactly 0.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(extend("x-default" = "`sparse` holds for the whole row"))]
    pub first_order: Option<SparseOptimizerSpec>,
}

/// When the test rows are evaluated.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub enum EvaluationTime {
    /// Once, when training has ended.
    #[default]
    End,
    /// After each epoch.
    Epoch,
    /// After every `steps` steps, and when training has ended.
    Steps,
}

/// When the test rows are evaluated. Training pauses meanwhile.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
#[x_kube(
    validation = Rule::new("(has(self.every) && self.every == 'steps') == has(self.steps)").message("`steps` and every: steps go together: give both, or neither").field_path(".steps")
)]
pub struct EvaluationSpec {
    /// When the test rows are evaluated.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(extend("x-default" = EvaluationTime::End))]
    pub every: Option<EvaluationTime>,

    /// Steps between two evaluations, counted in global batches in every mode. Required by every:
    /// steps, refused without it.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = 1_000_000_000_000u64))]
    pub steps: Option<u64>,
}

/// The treatment of labels that come after their rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub enum LateLabelsSpec {
    /// Each row comes with the label 0 first, and once more with the label 1 if it is positive. The
    /// loss is weighted so that predictions are the share of positive rows all the same (Ktena et
    /// al. 2019). Take it for a stream that cannot wait for the labels.
    FakeNegativeWeighted,
}

/// How the model is trained.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
#[x_kube(
    validation = Rule::new("!(has(self.epochs) && has(self.steps))").message("`epochs` and `steps` both decide when training ends: give one of them"),
    validation = Rule::new("!has(self.localBatchSize) || (has(self.globalBatchSize) ? self.globalBatchSize : 4096) % self.localBatchSize == 0").message("a global batch consists of whole local batches: expected a `localBatchSize` that divides `globalBatchSize` (default 4096), so that M = globalBatchSize / localBatchSize").field_path(".localBatchSize"),
    validation = Rule::new("!has(self.switchAt) || self.switchAt.size() < 2 || self.switchAt.all(later, self.switchAt.filter(other, other.step == later.step).size() == 1)").message("only one switch can happen at a step: expected every `step` of `switchAt` to be different").field_path(".switchAt"),
    validation = Rule::new("!(has(self.sync) && has(self.sync.pieces) && self.sync.pieces == 'pulled') || has(self.localBatchSize)").message("pulled pieces are local batches: expected a `localBatchSize` that divides `globalBatchSize`, best into three pieces or more for each dense worker").field_path(".localBatchSize"),
    validation = Rule::new("!(has(self.sync) && has(self.sync.pieces) && self.sync.pieces == 'pulled') || !has(self.barrierWorkers)").message("all dense workers pull pieces: remove `barrierWorkers`, or set sync.pieces: fixed").field_path(".barrierWorkers"),
    validation = Rule::new("!(has(self.mode) && self.mode == 'auto') || !has(self.switchAt) || self.switchAt.size() == 0").message("auto decides when to switch the mode: remove `switchAt`, or choose another mode").field_path(".switchAt")
)]
pub struct TrainingSpec {
    /// The training mode. Hyper-parameters need not change with it. A running job switches to a new
    /// mode at the next global-step boundary; nothing restarts.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(extend("x-default" = Mode::Sync))]
    pub mode: Option<ModeSpec>,

    /// Rows of one step, over all dense workers together. Each takes its share.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = 16_777_216), extend("x-default" = defaults::GLOBAL_BATCH_SIZE))]
    pub global_batch_size: Option<u32>,

    /// Rows that a dense worker computes at a time without a barrier. M = globalBatchSize /
    /// localBatchSize of them make a step of `gba`. In the other modes a dense worker computes its
    /// share of the step at once; the share consists of such local batches. Between processes, as
    /// in a cluster, roles send the numbers of a local batch in one message, which holds 1 GiB.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = 16_777_216), extend("x-default" = "globalBatchSize / dense workers"))]
    pub local_batch_size: Option<u32>,

    /// Dense workers that train in the modes with a barrier, `sync` and `hybrid`. The others wait
    /// for a switch to a mode without one.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = 1024), extend("x-default" = "all dense workers"))]
    pub barrier_workers: Option<u32>,

    /// Passes over the training rows. Not together with `steps`.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = 100_000), extend("x-default" = defaults::EPOCHS))]
    pub epochs: Option<u32>,

    /// Steps after which training ends, counted in global batches in every mode. The data is read
    /// again from the start as often as needed. Not together with `epochs`.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = 1_000_000_000_000u64), extend("x-default" = "epochs decides"))]
    pub steps: Option<u64>,

    /// Seed of everything random in training: initial values, dropout, shuffling. Cannot be changed
    /// once the job exists.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 0, max = 9_007_199_254_740_991u64), extend("x-default" = defaults::SEED))]
    pub seed: Option<u64>,

    /// The sensitivity of the mode `auto`. Other modes ignore it, so that the mode can be changed
    /// alone.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub auto: Option<AutoModeSpec>,

    /// Settings of the mode `sync`. Other modes ignore them.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub sync: Option<SyncSpec>,

    /// Settings of the mode `hybrid`. Other modes ignore them, so that the mode can be changed
    /// alone.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub hybrid: Option<HybridSpec>,

    /// Settings of the mode `gba`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub gba: Option<GbaSpec>,

    /// Settings of the mode `hopBs`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub hop_bs: Option<HopBsSpec>,

    /// Settings of the mode `hopBw`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub hop_bw: Option<HopBwSpec>,

    /// Settings of the mode `bsp`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub bsp: Option<BspSpec>,

    /// Settings of the mode `shadow`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub shadow: Option<ShadowSpec>,

    /// Scheduled switches of the training mode, with ascending steps. A switch moves only the dense
    /// parameters and the optimizer's state. No process restarts, no row is lost or trained twice,
    /// and hyper-parameters stay. At most 64.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 64), extend("x-default" = "none"))]
    pub switch_at: Vec<SwitchSpec>,

    /// The optimizers of the dense parameters and of the embedding rows.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub optimizer: Option<OptimizerSpec>,

    /// How a value of an embedding row is stored. Computation is always in f32. Cannot be changed
    /// once the job exists.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(extend("x-default" = ValueType::F32))]
    pub embedding_value_type: Option<ValueType>,

    /// The number format of the products in linear layers, forward and backward. Everything else
    /// stays in 32 bits: parameters and their gradients, the optimizer's state, embeddings, the
    /// loss, messages and checkpoints. So it may change between two runs.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(extend("x-default" = Precision::Fp32))]
    pub precision: Option<Precision>,

    /// The treatment of labels that come after their rows.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(extend("x-default" = "none: each row comes once, with its label"))]
    pub late_labels: Option<LateLabelsSpec>,

    /// How embedding values and their gradients travel between roles.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(extend("x-default" = Compression::None))]
    pub compression: Option<Compression>,

    /// Where the rows of features with several values are pooled, in every mode but `des`. With
    /// `bySize` fewer bytes travel if samples have many values. The trained model then depends on
    /// the number of parameter servers, within rounding: it is the order in which sums are added.
    /// A piece that servers pool is not looked up early (`sync.lookAhead`).
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(extend("x-default" = PartialPooling::Never))]
    pub partial_pooling: Option<PartialPooling>,

    /// When the test rows are evaluated. Training pauses meanwhile.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(extend("x-default" = "once, at the end"))]
    pub evaluation: Option<EvaluationSpec>,

    /// The quality of the latest predictions on training rows, each made before its row is learned.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub quality: Option<QualitySpec>,

    /// Training has diverged when the mean loss of a batch is more than this many times a normal
    /// one. The normal one is the largest of three losses. One is of the first batch, one is the
    /// smallest so far, and one is of a model with only zeros as its logits. A job that diverges
    /// fails and is not restarted. Values that are not finite always end it.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 2.0, max = 1_000_000_000_000.0), extend("x-default" = defaults::DIVERGENCE_FACTOR))]
    pub divergence_factor: Option<f64>,
}

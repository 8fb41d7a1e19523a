//! An example of every kind that a manifest can name. `rectrain explain KIND` prints it, and a test
//! loads each of them on top of a complete manifest.

/// A field that takes kinds, with an example of each kind.
#[derive(Clone, Copy, Debug)]
pub struct KindField {
    /// The kinds in sentences, as in [`rectrain_kinds::KindSet`]: "training mode".
    pub title: &'static str,
    /// The path of the field, such as `spec.training.mode`.
    pub field: &'static str,
    /// The examples, in the order of the documentation.
    pub examples: &'static [KindExample],
}

/// An example of a kind.
#[derive(Clone, Copy, Debug)]
pub struct KindExample {
    /// The kind's name.
    pub kind: &'static str,
    /// A part of `spec`, as YAML.
    pub spec: &'static str,
}

const fn example(kind: &'static str, spec: &'static str) -> KindExample {
    KindExample { kind, spec }
}

/// Every field that takes kinds.
pub const KIND_FIELDS: [KindField; 21] = [
    KindField { title: "training mode", field: "spec.training.mode", examples: &MODES },
    KindField { title: "division of a step", field: "spec.training.sync.pieces", examples: &SYNC_PIECES },
    KindField { title: "divisor of a key's gradients", field: "spec.training.gba.keyDivisor", examples: &KEY_DIVISORS },
    KindField { title: "algorithm of shadow", field: "spec.training.shadow.algorithm", examples: &SHADOW_ALGORITHMS },
    KindField {
        title: "precision of exchanges",
        field: "spec.training.shadow.wirePrecision",
        examples: &WIRE_PRECISIONS,
    },
    KindField { title: "output model", field: "spec.training.shadow.outputModel", examples: &OUTPUT_MODELS },
    KindField { title: "model", field: "spec.model.kind", examples: &MODELS },
    KindField { title: "structure of dcnV2", field: "spec.model.crossStructure", examples: &CROSS_STRUCTURES },
    KindField { title: "dense optimizer", field: "spec.training.optimizer.dense.kind", examples: &DENSE_OPTIMIZERS },
    KindField { title: "sparse optimizer", field: "spec.training.optimizer.sparse.kind", examples: &SPARSE_OPTIMIZERS },
    KindField { title: "pooling", field: "spec.features.sparse.pooling", examples: &POOLINGS },
    KindField { title: "type of stored values", field: "spec.training.embeddingValueType", examples: &VALUE_TYPES },
    KindField { title: "precision", field: "spec.training.precision", examples: &PRECISIONS },
    KindField { title: "compression", field: "spec.training.compression", examples: &COMPRESSIONS },
    KindField { title: "partial pooling", field: "spec.training.partialPooling", examples: &PARTIAL_POOLINGS },
    KindField { title: "device", field: "spec.roles.denseWorker.device", examples: &DEVICES },
    KindField {
        title: "treatment of missing values",
        field: "spec.features.sparse.missing",
        examples: &MISSING_VALUES,
    },
    KindField { title: "transform", field: "spec.features.dense.transform", examples: &TRANSFORMS },
    KindField { title: "initializer", field: "spec.features.initializer.kind", examples: &INITIALIZERS },
    KindField { title: "eviction policy", field: "spec.features.eviction.policy", examples: &EVICTIONS },
    KindField { title: "priority of rows", field: "spec.features.sparse.priority", examples: &PRIORITIES },
];

const MODES: [KindExample; 10] = [
    example(
        "sync",
        "\
training:
  mode: sync
  globalBatchSize: 4096
  sync: {lookAhead: 1}
",
    ),
    example(
        "hybrid",
        "\
training:
  mode: hybrid
  hybrid: {staleness: 4}
",
    ),
    example(
        "async",
        "\
training:
  mode: async
  globalBatchSize: 4096
  localBatchSize: 512
",
    ),
    example(
        "gba",
        "\
training:
  mode: gba
  globalBatchSize: 4096
  localBatchSize: 512   # a step is M = 4096 / 512 = 8 gradients
  gba: {staleness: 4}
roles:
  denseWorker: {replicas: 8}
",
    ),
    example(
        "hopBs",
        "\
training:
  mode: hopBs
  hopBs: {bound: 2}
roles:
  denseWorker: {replicas: 8}
",
    ),
    example(
        "hopBw",
        "\
training:
  mode: hopBw
  hopBw: {backups: 1}
roles:
  denseWorker: {replicas: 8}
",
    ),
    example(
        "bsp",
        "\
training:
  mode: bsp
  bsp: {aggregate: 4}
roles:
  denseWorker: {replicas: 8}
",
    ),
    example(
        "shadow",
        "\
training:
  mode: shadow
  globalBatchSize: 4096
  localBatchSize: 512
  shadow: {alpha: 0.5}
roles:
  denseWorker: {replicas: 8}
",
    ),
    example(
        "des",
        "\
model: {kind: fm, embeddingDim: 8}
training:
  mode: des
roles:
  ps: {replicas: 4}
",
    ),
    example(
        "auto",
        "\
training:
  mode: auto
  globalBatchSize: 4096
  localBatchSize: 512
  auto: {margin: 0.1}
roles:
  denseWorker: {replicas: 8}
",
    ),
];

const SYNC_PIECES: [KindExample; 2] = [
    example(
        "fixed",
        "\
training:
  mode: sync
  sync: {pieces: fixed}
",
    ),
    example(
        "pulled",
        "\
training:
  mode: sync
  globalBatchSize: 4096
  localBatchSize: 256
  sync: {pieces: pulled}
roles:
  denseWorker: {replicas: 4}
",
    ),
];

const SHADOW_ALGORITHMS: [KindExample; 3] = [
    example(
        "easgd",
        "\
training:
  mode: shadow
  shadow: {algorithm: easgd}
",
    ),
    example(
        "ma",
        "\
training:
  mode: shadow
  shadow: {algorithm: ma}
",
    ),
    example(
        "bmuf",
        "\
training:
  mode: shadow
  shadow: {algorithm: bmuf, eta: 0.7, momentum: 0.9, nesterov: true}
",
    ),
];

const WIRE_PRECISIONS: [KindExample; 2] = [
    example(
        "fp32",
        "\
training:
  mode: shadow
  shadow: {wirePrecision: fp32}
",
    ),
    example(
        "bf16",
        "\
training:
  mode: shadow
  shadow: {wirePrecision: bf16}
",
    ),
];

const OUTPUT_MODELS: [KindExample; 3] = [
    example(
        "copy",
        "\
training:
  mode: shadow
  shadow: {outputModel: copy}
",
    ),
    example(
        "mean",
        "\
training:
  mode: shadow
  shadow: {outputModel: mean}
",
    ),
    example(
        "first",
        "\
training:
  mode: shadow
  shadow: {outputModel: first}
",
    ),
];

const KEY_DIVISORS: [KindExample; 3] = [
    example(
        "buffer",
        "\
training:
  mode: gba
  gba: {keyDivisor: buffer}
",
    ),
    example(
        "workers",
        "\
training:
  mode: gba
  gba: {keyDivisor: workers}
",
    ),
    example(
        "batches",
        "\
training:
  mode: gba
  gba: {keyDivisor: batches}
",
    ),
];

const MODELS: [KindExample; 8] = [
    example(
        "dlrm",
        "\
model:
  kind: dlrm
  embeddingDim: 16
  bottom: [512, 256]   # a layer of width 16 is appended
  hidden: [512, 256]
",
    ),
    example(
        "deepfm",
        "\
model:
  kind: deepfm
  embeddingDim: 16
  hidden: [256, 128]
",
    ),
    example(
        "dnn",
        "\
model:
  kind: dnn
  hidden: [256, 128]
  dropout: 0.1
",
    ),
    example(
        "wideDeep",
        "\
model:
  kind: wideDeep
  hidden: [256, 128]
",
    ),
    example(
        "dcn",
        "\
model:
  kind: dcn
  crossLayers: 3
  hidden: [256, 128]
",
    ),
    example(
        "dcnV2",
        "\
model:
  kind: dcnV2
  crossLayers: 3
  lowRank: 64
  hidden: [256, 128]
",
    ),
    example(
        "fm",
        "\
model:
  kind: fm
  embeddingDim: 16
",
    ),
    example(
        "lr",
        "\
model:
  kind: lr
",
    ),
];

const CROSS_STRUCTURES: [KindExample; 2] = [
    example(
        "parallel",
        "\
model:
  kind: dcnV2
  crossStructure: parallel
",
    ),
    example(
        "stacked",
        "\
model:
  kind: dcnV2
  crossStructure: stacked
",
    ),
];

const DENSE_OPTIMIZERS: [KindExample; 4] = [
    example(
        "adam",
        "\
training:
  optimizer:
    dense: {kind: adam, learningRate: 0.001}
",
    ),
    example(
        "adamW",
        "\
training:
  optimizer:
    dense: {kind: adamW, learningRate: 0.001, weightDecay: 0.01}
",
    ),
    example(
        "sgd",
        "\
training:
  optimizer:
    dense: {kind: sgd, learningRate: 0.01, momentum: 0.9}
",
    ),
    example(
        "adaGrad",
        "\
training:
  optimizer:
    dense: {kind: adaGrad, learningRate: 0.01, initialAccumulator: 0.1}
",
    ),
];

const SPARSE_OPTIMIZERS: [KindExample; 5] = [
    example(
        "adam",
        "\
training:
  optimizer:
    sparse: {kind: adam, learningRate: 0.001}
",
    ),
    example(
        "adaGrad",
        "\
training:
  optimizer:
    sparse: {kind: adaGrad, learningRate: 0.01}
",
    ),
    example(
        "rowWiseAdaGrad",
        "\
training:
  optimizer:
    sparse: {kind: rowWiseAdaGrad, learningRate: 0.01}
",
    ),
    example(
        "sgd",
        "\
training:
  optimizer:
    sparse: {kind: sgd, learningRate: 0.01}
",
    ),
    example(
        "ftrl",
        "\
training:
  optimizer:
    sparse: {kind: ftrl, learningRate: 0.05, beta: 1.0, l1: 0.1, l2: 0.1}
",
    ),
];

const POOLINGS: [KindExample; 3] = [
    example(
        "sum",
        "\
features:
  sparse:
    - {name: tags, pooling: sum, multiValue: {separator: \"|\"}}
",
    ),
    example(
        "mean",
        "\
features:
  sparse:
    - {name: tags, pooling: mean, multiValue: {separator: \"|\"}}
",
    ),
    example(
        "sqrtN",
        "\
features:
  sparse:
    - {name: tags, pooling: sqrtN, multiValue: {separator: \"|\"}}
",
    ),
];

const VALUE_TYPES: [KindExample; 3] = [
    example(
        "f32",
        "\
training:
  embeddingValueType: f32
",
    ),
    example(
        "f16",
        "\
training:
  embeddingValueType: f16
",
    ),
    example(
        "bf16",
        "\
training:
  embeddingValueType: bf16
",
    ),
];

const PRECISIONS: [KindExample; 2] = [
    example(
        "fp32",
        "\
training:
  precision: fp32
",
    ),
    example(
        "bf16",
        "\
training:
  precision: bf16
",
    ),
];

const COMPRESSIONS: [KindExample; 2] = [
    example(
        "none",
        "\
training:
  compression: none
",
    ),
    example(
        "fp16",
        "\
training:
  compression: fp16
",
    ),
];

const PARTIAL_POOLINGS: [KindExample; 2] = [
    example(
        "never",
        "\
training:
  partialPooling: never
",
    ),
    example(
        "bySize",
        "\
training:
  mode: sync
  partialPooling: bySize
roles:
  ps: {replicas: 2}
",
    ),
];

const DEVICES: [KindExample; 3] = [
    example(
        "auto",
        "\
roles:
  denseWorker: {device: auto}
",
    ),
    example(
        "cpu",
        "\
roles:
  denseWorker: {device: cpu, threads: 8}
",
    ),
    example(
        "cuda",
        "\
roles:
  denseWorker: {device: cuda}   # gpus: 1 means the same
",
    ),
];

const MISSING_VALUES: [KindExample; 2] = [
    example(
        "token",
        "\
features:
  sparse:
    - {name: city, missing: token}
",
    ),
    example(
        "skip",
        "\
features:
  sparse:
    - {name: city, missing: skip}
",
    ),
];

const TRANSFORMS: [KindExample; 5] = [
    example(
        "identity",
        "\
features:
  dense:
    - {name: age, transform: identity}
",
    ),
    example(
        "log1p",
        "\
features:
  dense:
    - {name: clicks, transform: log1p}
",
    ),
    example(
        "signedLog1p",
        "\
features:
  dense:
    - {name: balance, transform: signedLog1p}
",
    ),
    example(
        "standardize",
        "\
features:
  dense:
    - {name: age, transform: standardize, mean: 38.5, std: 12.0}
",
    ),
    example(
        "minMax",
        "\
features:
  dense:
    - {name: rating, transform: minMax, min: 1, max: 5}
",
    ),
];

const INITIALIZERS: [KindExample; 3] = [
    example(
        "normal",
        "\
features:
  initializer: {kind: normal, scale: 0.01}
",
    ),
    example(
        "uniform",
        "\
features:
  initializer: {kind: uniform, scale: 0.05}
",
    ),
    example(
        "zeros",
        "\
features:
  initializer: {kind: zeros}
",
    ),
];

const EVICTIONS: [KindExample; 3] = [
    example(
        "score",
        "\
features:
  memory: {maxRows: 1000000}
  eviction: {policy: score, decayPerDay: 0.1, positiveWeight: 3}
",
    ),
    example(
        "lfu",
        "\
features:
  memory: {maxRows: 1000000}
  eviction: {policy: lfu}
",
    ),
    example(
        "lru",
        "\
features:
  memory: {maxRows: 1000000}
  eviction: {policy: lru}
",
    ),
];

const PRIORITIES: [KindExample; 2] = [
    example(
        "high",
        "\
features:
  memory: {maxRows: 1000000}
  sparse:
    - {name: country, priority: high}
    - {name: query}
",
    ),
    example(
        "low",
        "\
features:
  memory: {maxRows: 1000000}
  sparse:
    - {name: country, priority: high}
    - {name: query, priority: low}
",
    ),
];

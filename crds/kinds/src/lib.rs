//! Every kind that a manifest names: training modes, roles, models, tasks, optimizers, pooling,
//! compression, precision, formats of data. Each kind is declared once, here, with its name and its
//! documentation. Positions in data are here too, because the training algorithms and the readers
//! share them, and the rules for paths and URLs, which manifests and the storage share. The
//! warning about unseen test ids is here, because the coordinator and the operator both give it.
//!
//! `rectrain-crds` documents the kinds in the CustomResourceDefinition, the runtime computes with
//! them, and the operator makes pods of them. A kind has one spelling everywhere: in manifests,
//! metrics, reports, plots and checkpoints.

#[macro_use]
mod named;
mod data;
mod follow;
mod life;
mod location;
mod mode;
mod model;
mod moment;
mod optimizer;
mod position;
mod quality;
mod role;
mod shadow;
mod stream;
mod task;
mod unseen;
mod values;

pub use data::{
    BadRows, CsvFormat, DataFormat, DenseField, FileFormat, LabelField, NO_GROUP, Schema, SparseField, Split,
    SyntheticConfig, TimeBound, TimeField, criteo_columns,
};
pub use follow::{FileOrder, FollowConfig, FollowEnd, LateFiles};
pub use life::{EvictionKind, RowPriority, TimeUnit};
pub use location::{EXPECTED_LOCATION, Scheme, endpoint_problem, is_true, unexpanded};
pub use mode::{Family, KeyDivisor, Mode, SyncPieces};
pub use model::{CrossStructure, ModelKind, ModelSettings};
pub use moment::{Date, DateForm, DateOrder, DateProblem, Moment};
pub use named::{KindSet, UnknownKind};
pub use optimizer::{DenseOptimizer, DenseOptimizerKind, SparseOptimizer, SparseOptimizerKind};
pub use position::{Offset, PartId, Position, Start};
pub use quality::{QualityMetric, RegressionAction, RegressionRule};
pub use role::{PerRole, Role};
pub use shadow::{OutputModel, ShadowAlgorithm, WirePrecision};
pub use stream::{
    KafkaConfig, KafkaSecurity, LostRecords, PartitionState, RecordFormat, SaslMechanism, Segment, SegmentRead,
    StreamEnd, StreamStart,
};
pub use task::{LossKind, Task};
pub use unseen::{MOST_UNSEEN_FEATURES, UnseenShares, highest_unseen, unseen_warning};
pub use values::{
    Compression, DeviceKind, Initializer, InitializerKind, MissingValue, PartialPooling, Pooling, Precision, Transform,
    TransformKind, ValueType,
};

/// Every enum of kinds that `rectrain explain` has pages for. The other enums are:
///
/// - [`Role`], which has different names in manifests and commands;
/// - [`LossKind`], which a manifest chooses by the kind of its labels;
/// - [`DataFormat`], which the paths of the files name.
pub const KIND_SETS: [KindSet; 21] = [
    Mode::SET,
    SyncPieces::SET,
    KeyDivisor::SET,
    ShadowAlgorithm::SET,
    WirePrecision::SET,
    OutputModel::SET,
    ModelKind::SET,
    CrossStructure::SET,
    DenseOptimizerKind::SET,
    SparseOptimizerKind::SET,
    Pooling::SET,
    ValueType::SET,
    Precision::SET,
    Compression::SET,
    PartialPooling::SET,
    DeviceKind::SET,
    MissingValue::SET,
    TransformKind::SET,
    InitializerKind::SET,
    EvictionKind::SET,
    RowPriority::SET,
];

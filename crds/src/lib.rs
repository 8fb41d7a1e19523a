//! The API types of Rectrain: `RecTrainingJob`, the one manifest that `rectrain run job.yaml` reads
//! and that `kubectl apply` puts into a cluster.
//!
//! This crate is types and pure functions. It opens no file and no socket, and starts no thread.
//! The operator and the runtime depend on it, and it knows neither. A manifest passes through it in
//! this order:
//!
//! 1. [`parse_manifest`] / [`load`]: text → [`RecTrainingJob`]. `--set` overrides ([`apply_set`])
//!    are applied in between. An error names the file, the line, the field and the expectation.
//! 2. [`validate`]: a job → [`ResolvedJob`], with every default filled in and every feature range
//!    expanded. No other code knows a default.
//! 3. [`capabilities`]: the fields that need something the caller may not be able to do.
//! 4. [`crd_yaml`], [`explain`], [`reference_markdown`]: the CustomResourceDefinition and the
//!    manual, both generated from the types, so that they cannot drift from them.
//!
//! [`RecModelServer`] is the kind of servers for a trained model. Only a cluster reads it.
//!
//! [`simulation`] reads `kind: Simulation`, the input of `rectrain simulate`, just as strictly.
//!
//! The rules of a manifest have one source: the OpenAPI schema generated from the types, with its
//! CEL rules. The API server evaluates it in a cluster, and this crate evaluates the same schema on
//! a laptop. Rust alone checks the rules that CEL cannot express: a range
//! of names that overlaps another, for example, or features that disagree on their table's width.
//!
//! The types themselves ignore unknown fields, because an operator must be able to read an object
//! written by a newer client. Strictness is the parser's.

mod capability;
mod check;
mod decision;
pub mod defaults;
mod differences;
mod doubts;
mod examples;
mod explain;
mod field_examples;
mod job;
mod life;
mod locate;
mod locations;
mod manifest;
mod path;
mod ranges;
mod reference;
mod resolve;
mod resolved;
mod schema;
mod server;
mod set;
mod set_aside;
pub mod simulation;
pub mod spec;
mod status;
mod suggest;
mod syntax;
mod template;
mod typed;
mod validate;
mod warm_start;
mod words;

pub use capability::{Capability, Requirement, capabilities, refuse_missing};
pub use check::FieldError;
pub use decision::{DecisionAction, DecisionStatus, DecisionSubject, UnknownAction};
pub use differences::differing_fields;
pub use doubts::doubts;
pub use examples::{KIND_FIELDS, KindExample, KindField};
pub use explain::{ExplainError, explain, explain_all, field_paths};
pub use field_examples::FIELD_EXAMPLES;
pub use job::{RecTrainingJob, RecTrainingJobSpec};
pub use locations::local_paths;
pub use manifest::{
    LocatedError, Manifest, ManifestError, Origin, Override, load, parse_manifest, parse_manifest_with,
};
pub use path::{FieldPath, Segment};
pub use ranges::{ExpandError, expand};
pub use rectrain_kinds::*;
pub use reference::{reference_markdown, server_reference_markdown, simulation_reference_markdown};
pub use resolved::{
    DataSource, FilePlan, FollowSource, ResolvedAdmission, ResolvedAutoMode, ResolvedAutoscaling, ResolvedBounds,
    ResolvedBudget, ResolvedCheckpoint, ResolvedData, ResolvedDenseWorkerScaling, ResolvedEmbedding,
    ResolvedEmbeddingWorkerScaling, ResolvedEvaluation, ResolvedEviction, ResolvedFaultTolerance, ResolvedFeatures,
    ResolvedJob, ResolvedLife, ResolvedLoaderScaling, ResolvedMemory, ResolvedModel, ResolvedPsScaling,
    ResolvedPublish, ResolvedQuality, ResolvedReplaceSlow, ResolvedRole, ResolvedRoles, ResolvedShadow,
    ResolvedStorage, ResolvedTable, ResolvedTraining, StreamSource, TrainTest, TrainingLength,
};
pub use schema::{crd, crd_yaml, server_crd, server_crd_yaml};
pub use server::{
    CanarySpec, GateSpec, ModelPlace, ModelVersion, RecModelServer, RecModelServerSpec, RecModelServerStatus,
    ServedModelSpec, ServerAutoscalingSpec, ServerCount, ServerPhase, ServerTlsSpec, ShardCount, ShardsSpec,
    VersionStatus, WarmUpSpec,
};
pub use set::{SetError, SetKind, apply_set};
pub use spec::*;
pub use status::{
    AttemptMode, AttemptReplicas, AttemptStatus, BudgetStatus, CheckpointStatus, JobSummary, ModePrediction, Phase,
    QualityStatus, RecTrainingJobStatus, ReplacedPod, ReplicaCount, ReplicaStatuses, RoleReplicas, SlowestStatus,
    StreamStatus, TableSummary, TablesStatus, WindowStatus,
};
pub use validate::{validate, validate_update};
pub use warm_start::WarmStart;

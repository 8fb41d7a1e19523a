//! The API types of Rectrain: `RecTrainingJob`, the one manifest that `rectrain run job.yaml` reads and that
//! `kubectl apply` puts into a cluster.
//!
//! This crate is types and pure functions. It opens no file and no socket, starts no thread and knows neither the
//! operator nor the runtime; both depend on it. What it offers, in the order a manifest passes through it:
//!
//! 1. [`parse_manifest`] / [`load`]: text → [`RecTrainingJob`], with `--set` overrides ([`apply_set`]) applied in
//!    between. An error names the file, the line, the field and what was expected there.
//! 2. [`validate`]: a job → [`ResolvedJob`], in which every default is filled in and every feature range is written out.
//!    Nobody else knows a default.
//! 3. [`capabilities`]: which fields ask for something that the caller may not be able to do.
//! 4. [`crd_yaml`], [`explain`], [`reference_markdown`]: the CustomResourceDefinition and the manual, both generated
//!    from the types, so that they cannot drift from them.
//!
//! [`simulation`] reads `kind: Simulation`, what `rectrain simulate` runs, with the same strictness.
//!
//! The rules of a manifest have one source: the OpenAPI schema generated from the types, with its CEL rules. The API
//! server evaluates it in a cluster, this crate evaluates the same schema on a laptop. Only what CEL cannot say (a
//! range of names that overlaps another one, two features that share a table and disagree on its width) is Rust alone.
//!
//! The types themselves ignore fields they do not know, because an operator must be able to read an object that a
//! newer client wrote; strictness is the parser's.

mod capability;
mod check;
mod decision;
pub mod defaults;
mod explain;
mod job;
mod locate;
mod manifest;
mod names;
mod path;
mod reference;
mod resolve;
mod resolved;
mod schema;
mod set;
pub mod simulation;
pub mod spec;
mod status;
mod suggest;
mod validate;

pub use capability::{Capability, Requirement, capabilities, refuse_missing};
pub use check::FieldError;
pub use decision::{DecisionAction, DecisionStatus, DecisionSubject, UnknownAction};
pub use explain::{ExplainError, explain, explain_mode};
pub use job::{RecTrainingJob, RecTrainingJobSpec};
pub use manifest::{
    LocatedError, Manifest, ManifestError, Origin, Override, load, parse_manifest, parse_manifest_with,
};
pub use names::{ExpandError, expand};
pub use path::{FieldPath, Segment};
pub use rectrain_kinds::*;
pub use reference::{reference_markdown, simulation_reference_markdown};
pub use resolved::{
    DataSource, FileFormat, FilePlan, ResolvedAutoMode, ResolvedAutoscaling, ResolvedBadRows, ResolvedBounds,
    ResolvedCheckpoint, ResolvedCsv, ResolvedData, ResolvedDense, ResolvedDenseWorkerScaling,
    ResolvedEmbeddingWorkerScaling, ResolvedEvaluation, ResolvedFaultTolerance, ResolvedFeatures, ResolvedJob,
    ResolvedLabel, ResolvedModel, ResolvedPsScaling, ResolvedRole, ResolvedRoles, ResolvedSparse, ResolvedSplit,
    ResolvedStorage, ResolvedSynthetic, ResolvedTable, ResolvedTime, ResolvedTraining, TrainTest, TrainingLength,
};
pub use schema::{crd, crd_yaml};
pub use set::{SetError, SetKind, apply_set};
pub use spec::*;
pub use status::{
    AttemptMode, AttemptReplicas, AttemptStatus, CheckpointStatus, JobSummary, ModePrediction, Phase,
    RecTrainingJobStatus, ReplicaCount, ReplicaStatuses, RoleReplicas,
};
pub use validate::{validate, validate_update};

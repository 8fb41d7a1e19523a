//! Reads a manifest from disk and makes a plan of it. Also the commands that only read manifests.

use std::sync::Arc;

use rectrain_checkpoint::CheckpointId;
use rectrain_crds::{Capability, FieldError, Manifest};
use rectrain_dense::GPU_SUPPORT;
use rectrain_protocol::plan::JobPlan;

use crate::args::{JobArgs, ValidateArgs};
use crate::failure::Failure;
use crate::{input, output, preview};

/// The optional capabilities of manifests that this build of the runtime has.
const CAPABILITIES: &[Capability] = if GPU_SUPPORT {
    &[Capability::Checkpoint, Capability::Resume, Capability::WarmStart, Capability::AutoMode, Capability::Cuda]
} else {
    &[Capability::Checkpoint, Capability::Resume, Capability::WarmStart, Capability::AutoMode]
};

/// A job that can run here.
pub(crate) struct Job {
    /// The text of its manifest. Standard input can be read only once.
    pub(crate) text: String,
    /// The manifest with its overrides as YAML; `None` if it cannot be written as YAML.
    pub(crate) in_use: Option<String>,
    pub(crate) plan: Arc<JobPlan>,
    /// Sentences about the manifest for the user.
    pub(crate) notes: Vec<String>,
    /// Settings that are legal and most likely wrong.
    pub(crate) doubts: Vec<String>,
}

/// Checks the text of a manifest, for this machine or a cluster.
fn load(args: &JobArgs, text: &str) -> Result<Manifest, Failure> {
    let file = input::name(&args.manifest);
    rectrain_crds::load(text, &file, &args.overrides()).map_err(|error| Failure::User(error.to_string()))
}

/// One error for each capability that the manifest needs and this build lacks without a cluster.
fn missing(manifest: &Manifest) -> Vec<FieldError> {
    rectrain_crds::refuse_missing(&manifest.job, CAPABILITIES).err().unwrap_or_default()
}

/// Settings that are legal and most likely wrong, here or in a cluster.
fn doubts(manifest: &Manifest) -> Vec<String> {
    manifest.unquoted.iter().cloned().chain(rectrain_crds::doubts(&manifest.resolved)).collect()
}

fn plan_of(args: &JobArgs, manifest: &Manifest) -> Result<JobPlan, Failure> {
    JobPlan::new(&manifest.resolved).map_err(|error| match Failure::from(error) {
        Failure::User(message) => Failure::User(format!("{}: {message}", input::name(&args.manifest))),
        other => other,
    })
}

/// The manifest of a text and its plan. The job may be one that needs a cluster.
pub(crate) fn parse(args: &JobArgs, text: &str) -> Result<(Manifest, JobPlan), Failure> {
    let manifest = load(args, text)?;
    let plan = plan_of(args, &manifest)?;
    Ok((manifest, plan))
}

/// Reads a manifest and makes the plan that all members share.
pub(crate) fn read(args: &JobArgs) -> Result<Job, Failure> {
    let text = input::read(&args.manifest, "manifest")?;
    let manifest = load(args, &text)?;
    let missing = missing(&manifest);
    if !missing.is_empty() {
        let file = input::name(&args.manifest);
        let errors: Vec<String> = missing.iter().map(|error| format!("{file}: {error}")).collect();
        return Err(Failure::User(errors.join("\n")));
    }
    let plan = Arc::new(plan_of(args, &manifest)?);
    let doubts = doubts(&manifest);
    let in_use = manifest.to_yaml();
    Ok(Job { text, in_use, plan, notes: manifest.set_aside, doubts })
}

/// The plan of a process of a job. The process that started it has shown the notes.
pub(crate) fn plan(args: &JobArgs) -> Result<Arc<JobPlan>, Failure> {
    read(args).map(|job| job.plan)
}

/// The manifest with its overrides as YAML; `None` if it cannot be read.
pub(crate) fn manifest_in_use(args: &JobArgs) -> Option<String> {
    load(args, &input::read(&args.manifest, "manifest").ok()?).ok()?.to_yaml()
}

/// `rectrain validate`. The job may be one that needs a cluster.
pub(crate) fn validate(args: &ValidateArgs) -> Result<(), Failure> {
    let job = &args.job;
    let text = input::read(&job.manifest, "manifest")?;
    let (manifest, plan) = parse(job, &text)?;
    let file = input::name(&job.manifest);
    output::line(format_args!("{file}: valid ({} in mode {})", plan.model.name(), plan.mode.name()))?;
    for error in missing(&manifest) {
        output::line(format_args!("note: `rectrain run` would refuse it here: {error}"))?;
    }
    for note in &manifest.set_aside {
        output::line(format_args!("note: {note}"))?;
    }
    if let Some(note) = rectrain_crds::local_paths(&manifest.job) {
        output::line(format_args!("note: {note}"))?;
    }
    for doubt in doubts(&manifest) {
        output::line(format_args!("warning: {doubt}"))?;
    }
    if args.data { preview::show(&plan) } else { Ok(()) }
}

/// `rectrain explain`
pub(crate) fn explain(topic: &str, recursive: bool) -> Result<(), Failure> {
    let explained = if recursive { rectrain_crds::explain_all(topic) } else { rectrain_crds::explain(topic) };
    Ok(output::line(explained.map_err(|error| Failure::User(error.to_string()))?)?)
}

/// A unique name for a run.
pub(crate) fn new_run() -> String {
    CheckpointId::random().to_string()
}

//! Reads a manifest from disk and makes a plan of it. Also the commands that only read manifests.

use std::sync::Arc;

use rectrain_checkpoint::CheckpointId;
use rectrain_crds::{Capability, FieldError, Manifest};
use rectrain_dense::GPU_SUPPORT;
use rectrain_protocol::plan::JobPlan;

use crate::args::JobArgs;
use crate::failure::Failure;

/// The optional capabilities of manifests that this build of the runtime has.
const CAPABILITIES: &[Capability] = if GPU_SUPPORT {
    &[Capability::Checkpoint, Capability::Resume, Capability::AutoMode, Capability::Cuda]
} else {
    &[Capability::Checkpoint, Capability::Resume, Capability::AutoMode]
};

/// Reads and checks a manifest, for this machine or a cluster.
fn load(args: &JobArgs) -> Result<Manifest, Failure> {
    let file = args.manifest.display().to_string();
    let text = std::fs::read_to_string(&args.manifest)
        .map_err(|error| Failure::User(format!("{file}: the manifest cannot be read: {error}")))?;
    rectrain_crds::load(&text, &file, &args.overrides()).map_err(|error| Failure::User(error.to_string()))
}

/// One error for each capability that the manifest needs and this build lacks without a cluster.
fn missing(manifest: &Manifest) -> Vec<FieldError> {
    rectrain_crds::refuse_missing(&manifest.job, CAPABILITIES).err().unwrap_or_default()
}

fn plan_of(args: &JobArgs, manifest: &Manifest) -> Result<JobPlan, Failure> {
    JobPlan::new(&manifest.resolved).map_err(|error| match Failure::from(error) {
        Failure::User(message) => Failure::User(format!("{}: {message}", args.manifest.display())),
        other => other,
    })
}

/// Reads a manifest and makes the plan that all members share.
pub(crate) fn plan(args: &JobArgs) -> Result<Arc<JobPlan>, Failure> {
    plan_and_manifest(args).map(|(plan, _)| plan)
}

/// As [`plan`], with the manifest and its overrides as YAML.
pub(crate) fn plan_and_manifest(args: &JobArgs) -> Result<(Arc<JobPlan>, Option<String>), Failure> {
    let manifest = load(args)?;
    let missing = missing(&manifest);
    if !missing.is_empty() {
        let errors: Vec<String> = missing.iter().map(|error| format!("{}: {error}", args.manifest.display())).collect();
        return Err(Failure::User(errors.join("\n")));
    }
    Ok((plan_of(args, &manifest).map(Arc::new)?, manifest.to_yaml()))
}

/// The manifest with its overrides as YAML; `None` if it cannot be read.
pub(crate) fn manifest_in_use(args: &JobArgs) -> Option<String> {
    load(args).ok()?.to_yaml()
}

/// `rectrain validate`. The job may be one that needs a cluster.
pub(crate) fn validate(args: &JobArgs) -> Result<(), Failure> {
    let manifest = load(args)?;
    let plan = plan_of(args, &manifest)?;
    println!("{}: valid ({} in mode {})", args.manifest.display(), plan.model.name(), plan.mode.name());
    for error in missing(&manifest) {
        println!("note: `rectrain run` would refuse it here: {error}");
    }
    Ok(())
}

/// `rectrain explain`
pub(crate) fn explain(topic: &str) -> Result<(), Failure> {
    let text = rectrain_crds::explain(topic).map_err(|error| Failure::User(error.to_string()))?;
    println!("{text}");
    Ok(())
}

/// A unique name for a run.
pub(crate) fn new_run() -> String {
    CheckpointId::random().to_string()
}

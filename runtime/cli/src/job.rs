//! From a manifest on disk to a plan, and the commands that only look at manifests.

use std::sync::Arc;

use rectrain_crds::{Capability, Manifest};
use rectrain_dense::GPU_SUPPORT;
use rectrain_roles::plan::JobPlan;

use crate::Failure;
use crate::args::JobArgs;

/// What this build of the runtime can do of what a manifest may ask for.
const CAPABILITIES: &[Capability] = if GPU_SUPPORT {
    &[Capability::Checkpoint, Capability::Resume, Capability::AutoMode, Capability::Cuda]
} else {
    &[Capability::Checkpoint, Capability::Resume, Capability::AutoMode]
};

/// Reads and checks a manifest.
pub(crate) fn load(args: &JobArgs) -> Result<Manifest, Failure> {
    let file = args.manifest.display().to_string();
    let text = std::fs::read_to_string(&args.manifest)
        .map_err(|error| Failure::User(format!("{file}: the manifest cannot be read: {error}")))?;
    let manifest =
        rectrain_crds::load(&text, &file, &args.overrides()).map_err(|error| Failure::User(error.to_string()))?;
    rectrain_crds::refuse_missing(&manifest.job, CAPABILITIES).map_err(|errors| {
        let errors: Vec<String> = errors.iter().map(|error| format!("{file}: {error}")).collect();
        Failure::User(errors.join("\n"))
    })?;
    Ok(manifest)
}

/// Reads a manifest and makes the plan that all members share.
pub(crate) fn plan(args: &JobArgs) -> Result<Arc<JobPlan>, Failure> {
    let manifest = load(args)?;
    let plan = JobPlan::new(&manifest.resolved).map_err(|error| match Failure::from(error) {
        Failure::User(message) => Failure::User(format!("{}: {message}", args.manifest.display())),
        other => other,
    })?;
    Ok(Arc::new(plan))
}

/// `rectrain validate`
pub(crate) fn validate(args: &JobArgs) -> Result<(), Failure> {
    let plan = plan(args)?;
    println!("{}: valid ({} in mode {})", args.manifest.display(), plan.model.kind.name(), plan.mode.name());
    Ok(())
}

/// `rectrain explain`
pub(crate) fn explain(topic: &str) -> Result<(), Failure> {
    let text = rectrain_crds::explain(topic).map_err(|error| Failure::User(error.to_string()))?;
    println!("{text}");
    Ok(())
}

//! Plans of manifests with overrides.

use rectrain_crds::{Override, SetKind};
use rectrain_protocol::plan::JobPlan;

/// The plan of a manifest. `changes` are overrides as on the command line.
pub(crate) fn plan_of(manifest: &str, changes: &[&str]) -> JobPlan {
    let overridden = |change: &&str| Override { kind: SetKind::Infer, expression: (*change).to_owned() };
    let overrides: Vec<_> = changes.iter().map(overridden).collect();
    JobPlan::new(&rectrain_crds::load(manifest, "test.yaml", &overrides).unwrap().resolved).unwrap()
}

//! The manifest that a job's pods read, and its resolved form for people.
//!
//! The ConfigMap is immutable and named by its content, so that a restarted container reads the
//! same manifest as the others. Its training mode is the attempt's initial one. Only the
//! coordinator reads the mode, and a restarted coordinator is asked for the present one.

use k8s_openapi::api::core::v1::ConfigMap;
use rectrain_crds::RecTrainingJob;
use serde_json::json;

use super::Plan;
use crate::names;
use crate::reconcile::validate::for_pods;

/// The file that pods read.
pub(super) const MANIFEST: &str = "job.yaml";
/// The resolved manifest, for people.
const RESOLVED: &str = "resolved.json";
/// Bytes of the resolved manifest at most. An object holds 1 MiB, and a larger one would be
/// refused.
const MOST_FOR_PEOPLE: usize = 500_000;

pub(super) fn build(plan: &Plan<'_>) -> Result<ConfigMap, serde_json::Error> {
    let name = plan.name();
    let job = RecTrainingJob::new(&name, for_pods(&plan.spec));
    let manifest = json!({
        "apiVersion": "rectrain.dev/v1alpha1",
        "kind": "RecTrainingJob",
        "metadata": {"name": name},
        "spec": job.spec,
    });
    // JSON is YAML, and every parser reads it alike.
    let mut data = vec![(MANIFEST.to_owned(), serde_json::to_string_pretty(&manifest)?)];
    // Settings that pods do not read may change during an attempt, and this object may not.
    let mut resolved = serde_json::to_value(&plan.resolved)?;
    if let Some(fields) = resolved.as_object_mut() {
        fields.remove("faultTolerance");
        fields.remove("suspend");
    }
    let resolved = serde_json::to_string_pretty(&resolved)?;
    if resolved.len() <= MOST_FOR_PEOPLE {
        data.push((RESOLVED.to_owned(), resolved));
    }
    Ok(ConfigMap {
        metadata: plan.metadata(names::config_map(&name, &plan.manifest_hash), names::job_labels(&name)),
        data: Some(data.into_iter().collect()),
        immutable: Some(true),
        ..ConfigMap::default()
    })
}

//! The manifest that a job's pods read, and beside it what it means with every default filled in. It is named by its content and
//! cannot be changed, so that a container that starts again reads what the others have read. Its training mode is the one that the
//! attempt has started in: only the coordinator reads it, and a coordinator that starts again is asked for the present one.

use k8s_openapi::api::core::v1::ConfigMap;
use rectrain_crds::RecTrainingJob;
use serde_json::json;

use super::Plan;
use crate::names;
use crate::reconcile::validate::for_pods;

/// The file that pods read.
pub(super) const MANIFEST: &str = "job.yaml";
/// For people: what the manifest means.
const RESOLVED: &str = "resolved.json";
/// An object holds 1 MiB; what is only for people is left out rather than refused.
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
    // JSON is YAML, and says the same to every reader.
    let mut data = vec![(MANIFEST.to_owned(), serde_json::to_string_pretty(&manifest)?)];
    // What pods do not read may change under a job, and this object may not.
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

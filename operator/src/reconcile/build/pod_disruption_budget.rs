//! The number of a role's pods that a drain may evict at a time: one. So a drain makes progress,
//! and a job loses only as many pods at once as it can recover from. Pods that are not ready do not
//! block a drain: they do not participate, and their replacements may wait for the drained node.

use k8s_openapi::api::policy::v1::{PodDisruptionBudget, PodDisruptionBudgetSpec};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::LabelSelector;
use k8s_openapi::apimachinery::pkg::util::intstr::IntOrString;
use rectrain_crds::Role;

use super::Plan;
use crate::names;

pub(super) fn build(plan: &Plan<'_>, role: Role) -> PodDisruptionBudget {
    let name = plan.name();
    PodDisruptionBudget {
        metadata: plan.metadata(names::of_role(&name, role), names::role_labels(&name, role)),
        spec: Some(PodDisruptionBudgetSpec {
            max_unavailable: Some(IntOrString::Int(1)),
            selector: Some(LabelSelector {
                match_labels: Some(names::pod_selector(&name, role)),
                ..LabelSelector::default()
            }),
            unhealthy_pod_eviction_policy: Some("AlwaysAllow".to_owned()),
            ..PodDisruptionBudgetSpec::default()
        }),
        status: None,
    }
}

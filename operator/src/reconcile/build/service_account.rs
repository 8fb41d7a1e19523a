//! The ServiceAccount of a job's pods, without rights and without a token. A role that needs an
//! identity (Workload Identity) names another account in its template.

use k8s_openapi::api::core::v1::ServiceAccount;

use super::Plan;
use crate::names;

pub(super) fn build(plan: &Plan<'_>) -> ServiceAccount {
    let name = plan.name();
    ServiceAccount {
        metadata: plan.metadata(names::of_job(&name), names::job_labels(&name)),
        automount_service_account_token: Some(false),
        ..ServiceAccount::default()
    }
}

//! The coordinator's counts of batches and switches.

use serde::{Deserialize, Serialize};

#[allow(clippy::trivially_copy_pass_by_ref, reason = "serde passes a reference")]
fn is_zero(count: &u64) -> bool {
    *count == 0
}

/// Counts for metrics and the summary.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct TokenCounts {
    pub issued: u64,
    pub lost: u64,
    pub dropped_batches: u64,
    pub repeated_batches: u64,
    /// Batches of replicas that died before the parameter servers had seen them (`shadow`).
    #[serde(default, skip_serializing_if = "is_zero")]
    pub lost_replica_batches: u64,
    pub switches: u64,
}

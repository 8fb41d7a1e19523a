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
    /// Exchanges of replicas with the parameter servers, without the ones that a pause requires
    /// (`shadow`).
    #[serde(default, skip_serializing_if = "is_zero")]
    pub exchanges: u64,
    /// The batches between these exchanges.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub exchanged_batches: u64,
    pub switches: u64,
}

impl TokenCounts {
    /// The average sync gap: the batches of a worker between two exchanges (ShadowSync §4.1.1).
    /// `None` before the first exchange.
    #[must_use]
    pub fn average_sync_gap(&self) -> Option<f64> {
        (self.exchanges > 0).then(|| self.exchanged_batches as f64 / self.exchanges as f64)
    }
}

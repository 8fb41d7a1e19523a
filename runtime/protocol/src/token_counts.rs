//! The coordinator's counts of batches and switches.

use serde::{Deserialize, Serialize};

/// Counts for metrics and the summary.
#[derive(Debug, Default, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct TokenCounts {
    pub issued: u64,
    pub lost: u64,
    pub dropped_batches: u64,
    pub repeated_batches: u64,
    pub switches: u64,
}

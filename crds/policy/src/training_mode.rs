//! The two training modes that automatic switching chooses between.

use serde::{Deserialize, Serialize};

/// A training mode. Both modes share hyper-parameters and the optimizer's state (GBA, §4.1), so a
/// job can switch between them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum TrainingMode {
    /// A barrier in every step.
    Sync,
    /// Global-batch gradient aggregation: no worker waits for another.
    Gba,
}

impl TrainingMode {
    /// The name in a manifest.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Sync => "sync",
            Self::Gba => "gba",
        }
    }

    /// The other mode.
    #[must_use]
    pub fn other(self) -> Self {
        match self {
            Self::Sync => Self::Gba,
            Self::Gba => Self::Sync,
        }
    }
}

impl std::fmt::Display for TrainingMode {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name())
    }
}

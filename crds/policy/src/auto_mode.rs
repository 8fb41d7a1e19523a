//! The two training modes that `mode: auto` chooses between.

use rectrain_kinds::Mode;
use serde::{Deserialize, Serialize};

/// A training mode that `mode: auto` may choose. Both modes share hyper-parameters and the
/// optimizer's state (GBA, §4.1), so a job can switch between them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(into = "Mode", try_from = "Mode")]
pub enum AutoMode {
    /// [`Mode::Sync`].
    Sync,
    /// [`Mode::Gba`].
    Gba,
}

impl AutoMode {
    /// The other mode.
    #[must_use]
    pub fn other(self) -> Self {
        match self {
            Self::Sync => Self::Gba,
            Self::Gba => Self::Sync,
        }
    }
}

impl From<AutoMode> for Mode {
    fn from(mode: AutoMode) -> Self {
        match mode {
            AutoMode::Sync => Self::Sync,
            AutoMode::Gba => Self::Gba,
        }
    }
}

/// `mode: auto` never chooses this mode.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("`mode: auto` chooses between sync and gba, never {0}")]
pub struct NotAutomatic(pub Mode);

impl TryFrom<Mode> for AutoMode {
    type Error = NotAutomatic;

    fn try_from(mode: Mode) -> Result<Self, NotAutomatic> {
        match mode {
            Mode::Sync => Ok(Self::Sync),
            Mode::Gba => Ok(Self::Gba),
            other => Err(NotAutomatic(other)),
        }
    }
}

impl std::fmt::Display for AutoMode {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(Mode::from(*self).name())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_automatic_mode_is_written_as_its_training_mode() {
        for mode in Mode::ALL {
            let text = serde_json::to_string(&mode).unwrap();
            match AutoMode::try_from(mode) {
                Ok(auto) => assert_eq!(serde_json::to_string(&auto).unwrap(), text),
                Err(error) => {
                    assert_eq!(serde_json::from_str::<AutoMode>(&text).unwrap_err().to_string(), error.to_string());
                }
            }
        }
    }
}

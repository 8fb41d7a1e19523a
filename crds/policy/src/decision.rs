//! What was decided, on what, and why.

use serde::{Deserialize, Serialize};

use crate::TrainingMode;

/// What a decision is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum Subject {
    /// The training mode.
    Mode,
    /// The parameter servers.
    Ps,
    /// The embedding workers.
    EmbeddingWorker,
    /// The dense workers.
    DenseWorker,
}

impl Subject {
    /// All of them.
    pub const ALL: [Subject; 4] = [Subject::Mode, Subject::Ps, Subject::EmbeddingWorker, Subject::DenseWorker];

    /// The name in a manifest.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Mode => "mode",
            Self::Ps => "ps",
            Self::EmbeddingWorker => "embeddingWorker",
            Self::DenseWorker => "denseWorker",
        }
    }
}

impl std::fmt::Display for Subject {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name())
    }
}

/// What is to be done.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum Action {
    /// Nothing.
    Keep,
    /// Go on in another mode.
    SwitchMode {
        /// The mode in use.
        from: TrainingMode,
        /// The other one.
        to: TrainingMode,
    },
    /// Have another number of replicas.
    Scale {
        /// How many are wanted (or were recommended last, if nothing is carried out).
        from: u32,
        /// How many should be.
        to: u32,
    },
    /// Spread the slots anew over as many parameter servers as there are.
    Rebalance {
        /// How many that is.
        replicas: u32,
    },
    /// Raise the memory limit of the parameter servers, one of which was killed for its memory.
    RaiseMemory {
        /// The index of that one.
        replica: u32,
        /// Their limit.
        #[serde(rename = "fromBytes")]
        from_bytes: u64,
        /// What it should be.
        #[serde(rename = "toBytes")]
        to_bytes: u64,
    },
}

/// See the module's text.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Decision {
    /// The time of the observations it was made on.
    pub at_seconds: u64,
    /// What it is about.
    pub subject: Subject,
    /// What is to be done.
    pub action: Action,
    /// A sentence.
    pub reason: String,
}

impl Decision {
    pub(crate) fn new(at_seconds: u64, subject: Subject, action: Action, reason: impl Into<String>) -> Self {
        Self { at_seconds, subject, action, reason: reason.into() }
    }

    /// Whether anything is to be done.
    #[must_use]
    pub fn acts(&self) -> bool {
        self.action != Action::Keep
    }
}

impl std::fmt::Display for Action {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Keep => f.write_str("keep"),
            Self::SwitchMode { from, to } => write!(f, "{from} -> {to}"),
            Self::Scale { from, to } => write!(f, "{from} -> {to}"),
            Self::Rebalance { replicas } => write!(f, "spread anew over {replicas}"),
            Self::RaiseMemory { replica, from_bytes, to_bytes } => {
                write!(f, "replica {replica}: {from_bytes} -> {to_bytes} bytes")
            }
        }
    }
}

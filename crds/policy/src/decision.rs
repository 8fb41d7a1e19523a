//! A decision: its subject, its action and its reason.

use serde::{Deserialize, Serialize};

use crate::AutoMode;

/// The subject of a decision.
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
    /// The loaders.
    Loader,
}

impl Subject {
    /// Every subject, in the order of decisions.
    pub const ALL: [Subject; 5] =
        [Subject::Mode, Subject::Ps, Subject::EmbeddingWorker, Subject::DenseWorker, Subject::Loader];

    /// The name in a manifest.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Mode => "mode",
            Self::Ps => "ps",
            Self::EmbeddingWorker => "embeddingWorker",
            Self::DenseWorker => "denseWorker",
            Self::Loader => "loader",
        }
    }
}

impl std::fmt::Display for Subject {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name())
    }
}

/// The action that a decision asks for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum Action {
    /// Change nothing.
    Keep,
    /// Switch the training mode.
    SwitchMode {
        /// The mode in use.
        from: AutoMode,
        /// The other mode.
        to: AutoMode,
    },
    /// Change the number of replicas.
    Scale {
        /// The present number. If decisions are only recommended: the number recommended last.
        from: u32,
        /// The new number.
        to: u32,
    },
    /// Rebalance the slots over the present parameter servers.
    Rebalance {
        /// The number of parameter servers.
        replicas: u32,
    },
    /// Raise the memory limit of all parameter servers, because one was killed for its memory.
    RaiseMemory {
        /// The index of the parameter server that was killed.
        replica: u32,
        /// The present limit.
        #[serde(rename = "fromBytes")]
        from_bytes: u64,
        /// The new limit.
        #[serde(rename = "toBytes")]
        to_bytes: u64,
    },
}

/// A decision about one subject.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Decision {
    /// The time of the observations that it was made on.
    pub at_seconds: u64,
    /// The subject.
    pub subject: Subject,
    /// The action.
    pub action: Action,
    /// Why, in a sentence.
    pub reason: String,
}

impl Decision {
    pub(crate) fn new(at_seconds: u64, subject: Subject, action: Action, reason: impl Into<String>) -> Self {
        Self { at_seconds, subject, action, reason: reason.into() }
    }

    /// Whether it changes anything.
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
            Self::Rebalance { replicas } => write!(f, "rebalance over {replicas}"),
            Self::RaiseMemory { replica, from_bytes, to_bytes } => {
                write!(f, "replica {replica}: {from_bytes} -> {to_bytes} bytes")
            }
        }
    }
}

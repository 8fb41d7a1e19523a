//! The roles of a job's processes.

use serde::{Deserialize, Serialize};

/// A role. In a cluster each role is a StatefulSet of its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum Role {
    /// Leads the job: members, data, steps. A job has exactly one.
    Coordinator,
    /// Parameter server: holds embedding rows.
    Ps,
    /// Looks up rows and pools them.
    EmbeddingWorker,
    /// Trains the dense part of the model.
    DenseWorker,
    /// Reads data.
    Loader,
}

impl Role {
    /// Every role; the coordinator first.
    pub const ALL: [Self; 5] = [Self::Coordinator, Self::Ps, Self::EmbeddingWorker, Self::DenseWorker, Self::Loader];

    /// The roles that join a coordinator. Their replicas may change while a job trains.
    pub const MEMBERS: [Self; 4] = [Self::Ps, Self::EmbeddingWorker, Self::DenseWorker, Self::Loader];

    /// The name in commands, labels, metrics and Kubernetes objects. Object names allow no upper
    /// case.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Coordinator => "coordinator",
            Self::Ps => "ps",
            Self::EmbeddingWorker => "embedding-worker",
            Self::DenseWorker => "dense-worker",
            Self::Loader => "loader",
        }
    }

    /// The section of `spec.roles`; also the name in events and in a job's status.
    #[must_use]
    pub const fn section(self) -> &'static str {
        match self {
            Self::Coordinator => "coordinator",
            Self::Ps => "ps",
            Self::EmbeddingWorker => "embeddingWorker",
            Self::DenseWorker => "denseWorker",
            Self::Loader => "loader",
        }
    }

    /// The name in sentences.
    #[must_use]
    pub const fn plural(self) -> &'static str {
        match self {
            Self::Coordinator => "coordinators",
            Self::Ps => "parameter servers",
            Self::EmbeddingWorker => "embedding workers",
            Self::DenseWorker => "dense workers",
            Self::Loader => "loaders",
        }
    }

    /// The role with this [`Self::name`].
    #[must_use]
    pub fn named(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|role| role.name() == name)
    }
}

impl std::fmt::Display for Role {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_role_is_found_by_its_name_and_written_as_its_section() {
        for role in Role::ALL {
            assert_eq!(Role::named(role.name()), Some(role));
            assert_eq!(serde_json::to_value(role).unwrap(), role.section());
            assert_eq!(role.name().replace('-', ""), role.section().to_lowercase());
        }
        assert_eq!(Role::named("embeddingWorker"), None);
        assert_eq!(Role::ALL[1..], Role::MEMBERS);
    }
}

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

    /// Whether a replacement can always take over while the job trains: true for roles whose state
    /// can be rebuilt from the data.
    #[must_use]
    pub const fn is_replaceable(self) -> bool {
        matches!(self, Self::EmbeddingWorker | Self::Loader)
    }

    /// Whether the role reads data or writes checkpoints, and so needs credentials of the object
    /// store.
    #[must_use]
    pub const fn uses_storage(self) -> bool {
        !matches!(self, Self::EmbeddingWorker)
    }

    /// The name of one member in sentences.
    #[must_use]
    pub fn singular(self) -> &'static str {
        let plural = self.plural();
        plural.strip_suffix('s').unwrap_or(plural)
    }

    /// The role with this [`Self::name`].
    #[must_use]
    pub fn named(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|role| role.name() == name)
    }
}

/// One value for each role whose members join a coordinator ([`Role::MEMBERS`]).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "camelCase")]
pub struct PerRole<T> {
    /// Parameter servers: slots move between them.
    pub ps: T,
    /// Embedding workers. New batches go to all current workers.
    pub embedding_worker: T,
    /// Dense workers. They join and leave at a step boundary, if `spec.training.localBatchSize` is
    /// set.
    pub dense_worker: T,
    /// Loaders.
    pub loader: T,
}

impl<T> PerRole<T> {
    /// Computes the value of each role.
    pub fn from_fn(mut value: impl FnMut(Role) -> T) -> Self {
        Self {
            ps: value(Role::Ps),
            embedding_worker: value(Role::EmbeddingWorker),
            dense_worker: value(Role::DenseWorker),
            loader: value(Role::Loader),
        }
    }

    /// The value of a role; `None` for the coordinator.
    #[must_use]
    pub const fn get(&self, role: Role) -> Option<&T> {
        match role {
            Role::Coordinator => None,
            Role::Ps => Some(&self.ps),
            Role::EmbeddingWorker => Some(&self.embedding_worker),
            Role::DenseWorker => Some(&self.dense_worker),
            Role::Loader => Some(&self.loader),
        }
    }

    /// The value of a role; `None` for the coordinator.
    pub const fn get_mut(&mut self, role: Role) -> Option<&mut T> {
        match role {
            Role::Coordinator => None,
            Role::Ps => Some(&mut self.ps),
            Role::EmbeddingWorker => Some(&mut self.embedding_worker),
            Role::DenseWorker => Some(&mut self.dense_worker),
            Role::Loader => Some(&mut self.loader),
        }
    }
}

impl PerRole<u32> {
    /// The number of members of `role`. A job has one coordinator.
    #[must_use]
    pub fn count(&self, role: Role) -> u32 {
        self.get(role).copied().unwrap_or(1)
    }

    /// The same numbers except for `role`. The number of coordinators does not change.
    #[must_use]
    pub fn with(mut self, role: Role, members: u32) -> Self {
        if let Some(of_role) = self.get_mut(role) {
            *of_role = members;
        }
        self
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

    #[test]
    fn every_member_role_has_a_value_of_its_own() {
        let mut values = PerRole::from_fn(|role| role.name().len() as u32);
        for role in Role::MEMBERS {
            assert_eq!(values.get(role).copied(), Some(role.name().len() as u32));
            *values.get_mut(role).unwrap() += 100;
            assert_eq!(values.count(role), role.name().len() as u32 + 100);
            assert_eq!(values.with(role, 7).count(role), 7);
        }
        assert_eq!(values.get(Role::Coordinator), None);
        assert_eq!(values.with(Role::Coordinator, 9).count(Role::Coordinator), 1);
    }
}

//! Roles as messages and the plan know them.

use rectrain_kinds::Role;
use rectrain_proto::v1;

use crate::plan::JobPlan;

/// A role in messages and in the plan.
pub trait RoleExt: Copy {
    /// The role as messages name it.
    fn proto(self) -> v1::Role;

    /// Members of this role in the plan; 1 for the coordinator.
    fn replicas(self, plan: &JobPlan) -> u32;

    /// Whether a replacement can always take over while the job trains: true for roles whose state can be
    /// read again.
    fn is_replaceable(self) -> bool;
}

impl RoleExt for Role {
    fn proto(self) -> v1::Role {
        match self {
            Self::Coordinator => v1::Role::Coordinator,
            Self::Ps => v1::Role::Ps,
            Self::EmbeddingWorker => v1::Role::EmbeddingWorker,
            Self::DenseWorker => v1::Role::DenseWorker,
            Self::Loader => v1::Role::Loader,
        }
    }

    fn replicas(self, plan: &JobPlan) -> u32 {
        plan.replicas.of(self)
    }

    fn is_replaceable(self) -> bool {
        matches!(self, Self::EmbeddingWorker | Self::Loader)
    }
}

/// The member's role that a message names, if it names one.
#[must_use]
pub fn role_of(role: v1::Role) -> Option<Role> {
    Role::MEMBERS.into_iter().find(|member| member.proto() == role)
}

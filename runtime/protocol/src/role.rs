//! Roles in messages and in the plan.

use rectrain_kinds::Role;
use rectrain_proto::v1;

use crate::plan::JobPlan;

/// The message and the plan's numbers of a role.
pub trait RoleExt: Copy {
    /// The role in messages.
    fn proto(self) -> v1::Role;

    /// Members of this role in the plan; 1 for the coordinator.
    fn replicas(self, plan: &JobPlan) -> u32;

    /// Whether a replacement can always take over while the job trains: true for roles whose state
    /// can be rebuilt from the data.
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

/// The member's role that a message names; `None` if it names no member's role.
#[must_use]
pub fn role_of(role: v1::Role) -> Option<Role> {
    Role::MEMBERS.into_iter().find(|member| member.proto() == role)
}

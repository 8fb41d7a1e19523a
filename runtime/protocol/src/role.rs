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
}

impl RoleExt for Role {
    fn proto(self) -> v1::Role {
        v1::Role::from(self)
    }

    fn replicas(self, plan: &JobPlan) -> u32 {
        plan.replicas.count(self)
    }
}

/// The member's role that a message names; `None` if it names no member's role.
#[must_use]
pub fn role_of(role: v1::Role) -> Option<Role> {
    Role::MEMBERS.into_iter().find(|member| member.proto() == role)
}

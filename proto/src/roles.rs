//! The roles of messages and of manifests have the same names.

use rectrain_kinds::Role;

use crate::v1;

impl From<Role> for v1::Role {
    fn from(role: Role) -> Self {
        let name = role.name().to_uppercase().replace('-', "_");
        Self::from_str_name(&format!("ROLE_{name}")).unwrap_or(Self::Unspecified)
    }
}

/// The member's role that a message names; `None` if it names no member's role.
#[must_use]
pub fn member_role(role: v1::Role) -> Option<Role> {
    Role::MEMBERS.into_iter().find(|member| v1::Role::from(*member) == role)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_role_has_a_message_of_its_own() {
        let messages: Vec<_> = Role::ALL.into_iter().map(v1::Role::from).collect();
        let expected =
            [v1::Role::Coordinator, v1::Role::Ps, v1::Role::EmbeddingWorker, v1::Role::DenseWorker, v1::Role::Loader];
        assert_eq!(messages, expected);
        assert!(!messages.contains(&v1::Role::Unspecified));
        for role in Role::ALL {
            let member = Role::MEMBERS.contains(&role).then_some(role);
            assert_eq!(member_role(v1::Role::from(role)), member);
        }
        assert_eq!(member_role(v1::Role::Unspecified), None);
    }
}

//! Converts the ticket of a checkpoint that is being written between its message and the type of
//! the checkpoint crate.

use rectrain_checkpoint::{Base, FileEntry, Ticket};
use rectrain_proto::v1;

use crate::error::RoleError;

/// The ticket for a message.
pub fn write(ticket: &Ticket) -> v1::Ticket {
    let base = ticket.base.as_ref();
    v1::Ticket {
        directory: ticket.directory.clone(),
        id: ticket.id.to_string(),
        step: ticket.step,
        base_directory: base.map(|base| base.directory.clone()).unwrap_or_default(),
        base_id: base.map(|base| base.id.to_string()).unwrap_or_default(),
    }
}

/// The ticket in a `message`.
pub fn read(message: &'static str, ticket: Option<v1::Ticket>) -> Result<Ticket, RoleError> {
    let wrong = |reason: String| RoleError::Inconsistent { message, reason };
    let ticket = ticket.ok_or_else(|| wrong("the ticket is missing".to_owned()))?;
    let id = |id: &str| id.parse().map_err(|error| wrong(format!("`{id}` is not the ID of a checkpoint: {error}")));
    let base = if ticket.base_directory.is_empty() {
        None
    } else {
        Some(Base { id: id(&ticket.base_id)?, directory: ticket.base_directory })
    };
    Ok(Ticket { id: id(&ticket.id)?, directory: ticket.directory, step: ticket.step, base })
}

/// The entry of a written file for a message.
pub fn write_file(file: &FileEntry) -> Result<v1::SavedFile, RoleError> {
    let entry = serde_json::to_string(file).map_err(|error| RoleError::Task {
        what: "encoding of a checkpoint's file entry",
        reason: error.to_string(),
    })?;
    Ok(v1::SavedFile { entry })
}

/// The entry of a written file in a `message`.
pub fn read_file(message: &'static str, file: &v1::SavedFile) -> Result<FileEntry, RoleError> {
    serde_json::from_str(&file.entry)
        .map_err(|error| RoleError::Inconsistent { message, reason: format!("a file's entry cannot be read: {error}") })
}

#[cfg(test)]
mod tests {
    use rectrain_checkpoint::CheckpointId;

    use super::*;

    #[test]
    fn a_ticket_survives_its_message() {
        let base = Base { directory: "step-000000000001".to_owned(), id: CheckpointId(7) };
        for base in [None, Some(base)] {
            let ticket =
                Ticket { directory: "step-000000000002".to_owned(), id: CheckpointId(u128::MAX), step: 2, base };
            assert_eq!(read("freeze", Some(write(&ticket))).unwrap(), ticket);
        }
        assert!(read("freeze", None).is_err());
        assert!(read("freeze", Some(v1::Ticket { id: "x".to_owned(), ..v1::Ticket::default() })).is_err());
    }
}

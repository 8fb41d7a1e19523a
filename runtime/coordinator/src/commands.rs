//! Commands of the operator and the command line: switch the training mode, and scale a role.

use rectrain_modes::TrainingMode;
use rectrain_protocol::Role;
use rectrain_protocol::events::JobEvent;

use super::Coordinator;
use super::refused::{ResizeRefused, SwitchRefused};

impl Coordinator {
    /// Requests another number of members of a role. With `decided_seconds` and [`Role::Ps`],
    /// requests that the slots are rebalanced over the present parameter servers. Returns the
    /// present number.
    pub(crate) fn scale(
        &self,
        role: Role,
        members: u32,
        reason: String,
        decided_seconds: Option<u64>,
    ) -> Result<u32, ResizeRefused> {
        let (from, is_new) = match decided_seconds {
            Some(decided) if role == Role::Ps => self.lock().request_rebalance(members, decided)?,
            _ => self.lock().request_members(role, members)?,
        };
        if is_new {
            let reason = Some(reason).filter(|reason| !reason.is_empty());
            self.events.push(JobEvent::Scaling { role, from, to: members, reason });
            let events = self.lock().sync_with_training();
            self.publish(events);
            self.changed.notify_waiters();
        }
        Ok(from)
    }

    /// Requests another number of members of a role, as the control interface does. Returns the
    /// present number.
    ///
    /// # Errors
    /// [`ResizeRefused`] if the job cannot have that many members, or cannot be scaled now.
    pub fn request_scale(&self, role: Role, members: u32) -> Result<u32, ResizeRefused> {
        self.scale(role, members, String::new(), None)
    }

    /// Gives a member another share of its role's work, as a measurement of its speed does. A later
    /// measurement may change it again. A member with a `weight` of
    /// [`EVEN`](rectrain_modes::shares::EVEN) gets an even share.
    ///
    /// # Errors
    /// [`ResizeRefused`] for a role other than loaders, embedding workers and parameter servers, if
    /// slots are moving, or if training has ended.
    pub fn weigh(&self, role: Role, member: u32, weight: u32) -> Result<(), ResizeRefused> {
        self.lock().weigh(role, member, weight)?;
        self.changed.notify_waiters();
        Ok(())
    }

    /// Switches the training mode at the next boundary. Returns the name of the present mode.
    pub(crate) fn set_mode(&self, name: &str, reason: String) -> Result<&'static str, SwitchRefused> {
        let mode = self.plan.mode_named(name).ok_or_else(|| {
            let names: Vec<&str> = self.plan.modes.iter().map(|mode| mode.name()).collect();
            SwitchRefused::Mode(format!("there is no training mode `{name}`: expected one of {}", names.join(", ")))
        })?;
        if mode == TrainingMode::Des
            && let Some(refusal) = self.plan.model.settings.kind().refuses_substitution()
        {
            return Err(SwitchRefused::Mode(refusal));
        }
        let from = {
            let mut state = self.lock();
            let from = state.training().request_mode(mode)?;
            if let Err(error) = state.training().advance() {
                state.fail((&error).into());
            }
            from
        };
        if !reason.is_empty() {
            self.events.push(JobEvent::ModeChosen { mode: mode.name().to_owned(), reason });
        }
        self.changed.notify_waiters();
        Ok(from.name())
    }
}

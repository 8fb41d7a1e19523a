//! Goes back to an earlier checkpoint after a fall of the quality: writes the
//! [`Record`](super::rollback::Record), and ends the attempt.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use rectrain_protocol::error::RoleError;

use super::checkpointing::Checkpointer;
use super::rollback::Fall;
use super::{Coordinator, warn_all};

/// The time until the next attempt to go back, if the storage fails.
const RETRY: Duration = Duration::from_secs(5);

fn now_millis() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_millis()).unwrap_or(u64::MAX)
}

impl Coordinator {
    /// Goes back after a fall of the quality. While the storage fails, training waits, and this
    /// tries again. Returns if training waits from now on.
    ///
    /// # Errors
    /// [`RoleError::RolledBack`] if the attempt is over, so that the next one begins with an
    /// earlier checkpoint. Also errors of the lease on the path.
    pub(super) async fn go_back(&self, fall: &Fall, checkpointer: &mut Checkpointer) -> Result<(), RoleError> {
        // The one that is being written may have rows in doubt. It is deleted with the newer ones.
        self.finish_saves(checkpointer).await?;
        let Some(checkpoints) = &checkpointer.checkpoints else { return Err(RoleError::Stopped) };
        let mut is_told = false;
        let record = loop {
            match checkpoints.go_back(fall, self.attempt, now_millis()).await {
                Ok(record) => break record,
                Err(error) if error.is_user_error() || matches!(error, RoleError::Superseded) => return Err(error),
                Err(error) if !std::mem::replace(&mut is_told, true) => warn_all(
                    &self.events,
                    [format!("training cannot go back to an earlier checkpoint yet, and waits: {error}")],
                ),
                Err(_again) => {}
            }
            tokio::time::sleep(RETRY).await;
        };
        match record {
            Some(record) if !record.holds() => Err(RoleError::RolledBack(record.message())),
            Some(record) => {
                warn_all(&self.events, [record.message()]);
                self.change(|state| {
                    state.hold_after_fall();
                    Ok(())
                })
            }
            None => {
                let message = "no checkpoint is from before the fall of the quality, so training waits and does not go back: restart the job to go on from its last checkpoint, or raise spec.checkpoint.keep for a new job";
                warn_all(&self.events, [message.to_owned()]);
                self.change(|state| {
                    state.forget_fall();
                    Ok(())
                })
            }
        }
    }
}

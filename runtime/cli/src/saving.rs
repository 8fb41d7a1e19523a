//! Saves a checkpoint when a signal ends a command.

use std::time::Duration;

use crate::failure::Failure;
use crate::signal;

/// The seconds at the end of the grace period that are reserved for ending, not for saving.
const ENDING_SECONDS: u32 = 8;

/// Waits for `saving`, the checkpoint that this command saves when a signal ends it, while the job
/// (`running`) continues. Returns the command's result.
pub(crate) async fn save_while<T>(
    running: impl Future<Output = T>,
    saving: impl Future<Output = Result<String, String>>,
    grace_seconds: u32,
) -> Failure {
    tokio::select! {
        failure = save(saving, grace_seconds) => failure,
        _ended = running => interrupted(Err("the job ended".to_owned())),
    }
}

/// As [`save_while`], for a job that runs in other processes. A second signal ends the wait.
pub(crate) async fn save(saving: impl Future<Output = Result<String, String>>, grace_seconds: u32) -> Failure {
    let seconds = u64::from(grace_seconds.saturating_sub(ENDING_SECONDS).max(1));
    interrupted(tokio::select! {
        saved = tokio::time::timeout(Duration::from_secs(seconds), saving) => {
            saved.unwrap_or_else(|_| Err(format!("saving took longer than {seconds} s")))
        }
        () = signal::interrupted() => Err("a second signal arrived".to_owned()),
    })
}

/// The result of an interrupted command, which saved a checkpoint (its name) or did not (the
/// reason).
pub(crate) fn interrupted(saved: Result<String, String>) -> Failure {
    Failure::Interrupted(match saved {
        Ok(checkpoint) => {
            format!("interrupted; checkpoint {checkpoint} was saved: spec.checkpoint.resume=latest resumes from it")
        }
        Err(reason) => format!("interrupted; no checkpoint was saved: {reason}"),
    })
}

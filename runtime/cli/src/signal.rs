//! The signals that end a command.

use std::time::Duration;

use tokio::signal::unix::{SignalKind, signal};

/// How long a checkpoint may take that is saved because the process was told to end: well within the 30 s that Kubernetes gives a
/// pod before it kills it.
pub(crate) const SAVE_GRACE: Duration = Duration::from_secs(22);

/// Ctrl-C, or the signal with which a supervisor ends a process.
pub(crate) async fn interrupted() {
    let Ok(mut terminate) = signal(SignalKind::terminate()) else {
        return std::future::pending().await;
    };
    tokio::select! {
        result = tokio::signal::ctrl_c() => if result.is_err() { std::future::pending::<()>().await },
        _ = terminate.recv() => {}
    }
}

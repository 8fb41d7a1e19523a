//! The signals that end a command.

use tokio::signal::unix::{SignalKind, signal};

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

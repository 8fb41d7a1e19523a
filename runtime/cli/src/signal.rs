//! The signals that end a command.

use tokio::signal::unix::{SignalKind, signal};

/// Ctrl-C, or the signal with which a supervisor ends a process. One that comes after this call and before the future is polled counts: a
/// process that says it stays until told to stop can be told at once.
pub(crate) fn interrupted() -> impl Future<Output = ()> {
    let signals = [SignalKind::interrupt(), SignalKind::terminate()].map(signal);
    async move {
        match signals {
            [Ok(mut interrupt), Ok(mut terminate)] => tokio::select! {
                _ = interrupt.recv() => {}
                _ = terminate.recv() => {}
            },
            // Without handlers the system ends the process.
            _ => std::future::pending().await,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_signal_that_comes_before_anybody_waits_for_it_is_noticed() {
        let told = interrupted();
        let this = std::process::id().to_string();
        let sent = std::process::Command::new("kill").args(["-TERM", &this]).status();
        assert!(sent.is_ok_and(|status| status.success()));
        told.await;
    }
}

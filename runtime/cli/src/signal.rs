//! The signals that end a command: SIGINT and SIGTERM.

use tokio::signal::unix::{SignalKind, signal};

/// Waits for SIGINT (Ctrl-C) or SIGTERM. This call installs the handlers, so a signal counts even
/// if it arrives before the first poll. A supervisor may thus send one at once.
pub(crate) fn interrupted() -> impl Future<Output = ()> {
    let signals = [SignalKind::interrupt(), SignalKind::terminate()].map(signal);
    async move {
        match signals {
            [Ok(mut interrupt), Ok(mut terminate)] => tokio::select! {
                _ = interrupt.recv() => {}
                _ = terminate.recv() => {}
            },
            // The handlers could not be installed, so a signal ends the process.
            _ => std::future::pending().await,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_signal_before_the_first_poll_is_noticed() {
        let signalled = interrupted();
        let this = std::process::id().to_string();
        let sent = std::process::Command::new("kill").args(["-TERM", &this]).status();
        assert!(sent.is_ok_and(|status| status.success()));
        signalled.await;
    }
}

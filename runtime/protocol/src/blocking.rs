//! Runs blocking work outside the threads of the async runtime.

use tokio::task::JoinHandle;

use crate::error::RoleError;

/// Runs `work` on a thread where it may block.
pub async fn blocking<T: Send + 'static>(
    what: &'static str,
    work: impl FnOnce() -> T + Send + 'static,
) -> Result<T, RoleError> {
    await_task(what, tokio::task::spawn_blocking(work)).await
}

/// Awaits a blocking task. The task is cancelled only when the runtime shuts down. This future then
/// never resolves, so a shutdown is not reported as a job failure.
pub async fn await_task<T>(what: &'static str, work: JoinHandle<T>) -> Result<T, RoleError> {
    match work.await {
        Err(error) if error.is_cancelled() => std::future::pending().await,
        done => done.map_err(|error| RoleError::Task { what, reason: error.to_string() }),
    }
}

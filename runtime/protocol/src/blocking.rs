//! Work that takes its time, beside what may not wait for it.

use tokio::task::JoinHandle;

use crate::error::RoleError;

/// Runs `work` where it may take its time.
pub async fn blocking<T: Send + 'static>(
    what: &'static str,
    work: impl FnOnce() -> T + Send + 'static,
) -> Result<T, RoleError> {
    done(what, tokio::task::spawn_blocking(work)).await
}

/// What came of work that nobody cancels. Only a process that ends does: whoever waits for the work learns of that end, and not of a failure,
/// which would be the job's.
pub async fn done<T>(what: &'static str, work: JoinHandle<T>) -> Result<T, RoleError> {
    match work.await {
        Err(error) if error.is_cancelled() => std::future::pending().await,
        done => done.map_err(|error| RoleError::Task { what, reason: error.to_string() }),
    }
}

//! The bridge from this crate's blocking API to the async object stores. One small runtime does all
//! network work; the first access to an object starts it. Callers wait on ordinary channels, so
//! they may be on any thread, even one of another async runtime.

use std::future::Future;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, sync_channel};
use std::sync::{Arc, OnceLock};
use std::time::Duration;
use tokio::runtime::{Builder, Runtime};

/// A flag that a dropped reader sets. The threads that work for the reader check it, and end.
#[derive(Debug, Clone, Default)]
pub(crate) struct Stop(Arc<AtomicBool>);

impl Stop {
    pub(crate) fn set(&self) {
        self.0.store(true, Ordering::Relaxed);
    }

    pub(crate) fn is_set(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }
}

/// The result of a task on the runtime. Dropping it cancels the task.
pub(crate) struct Pending<T> {
    /// The bound is 1, and the task sends exactly one value, so it never waits.
    result: Receiver<T>,
    task: tokio::task::AbortHandle,
}

impl<T> Drop for Pending<T> {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl<T> Pending<T> {
    /// Blocks until the result arrives. Fails if `stop` is set first, or if the task panicked.
    pub(crate) fn wait(self, stop: &Stop) -> std::io::Result<T> {
        loop {
            match self.result.recv_timeout(Duration::from_millis(50)) {
                Ok(value) => return Ok(value),
                Err(RecvTimeoutError::Disconnected) => {
                    return Err(std::io::Error::other("a network task ended unexpectedly"));
                }
                Err(RecvTimeoutError::Timeout) if stop.is_set() => {
                    return Err(std::io::Error::other("reading was stopped"));
                }
                Err(RecvTimeoutError::Timeout) => {}
            }
        }
    }
}

/// Starts `future` on the runtime of this crate.
pub(crate) fn spawn<F>(future: F) -> std::io::Result<Pending<F::Output>>
where
    F: Future + Send + 'static,
    F::Output: Send + 'static,
{
    let (sender, result) = sync_channel(1);
    let task = runtime()?.spawn(async move {
        // The receiver may be gone if its reader was dropped.
        let _ = sender.send(future.await);
    });
    Ok(Pending { result, task: task.abort_handle() })
}

fn runtime() -> std::io::Result<&'static Runtime> {
    static RUNTIME: OnceLock<std::io::Result<Runtime>> = OnceLock::new();
    RUNTIME
        .get_or_init(|| {
            Builder::new_multi_thread().worker_threads(2).thread_name("rectrain-data-io").enable_all().build()
        })
        .as_ref()
        .map_err(|error| std::io::Error::new(error.kind(), error.to_string()))
}

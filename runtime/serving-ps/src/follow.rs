//! Follows the publications of a path, on a thread of its own.

use std::thread::JoinHandle;
use std::time::Duration;

use rectrain_serving::ServingError;
use rectrain_serving::publication::{Follower, Trouble};
use rectrain_storage::Directory;
use tokio::sync::{oneshot, watch};

use crate::error::RowsServerError;
use crate::held::{Held, show};
use crate::metrics::Metrics;
use crate::options::Options;

/// Half of the time from the first look for a publication to the second one.
const FIRST: Duration = Duration::from_millis(250);

/// Follows until the process ends. `ended` resolves if the thread ends before.
pub(crate) struct Following {
    pub(crate) ended: oneshot::Receiver<ServingError>,
    _thread: JoinHandle<()>,
}

/// Starts the thread. A path without a publication is waited for.
pub(crate) fn start(
    options: &Options,
    held: watch::Sender<Held>,
    metrics: Metrics,
) -> Result<Following, RowsServerError> {
    let io = |action| move |source| RowsServerError::Io { action, source };
    // The clients of a store belong to the runtime that they are made in.
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    let runtime = runtime.map_err(io("start the runtime of the thread that follows"))?;
    let options = options.clone();
    let (ending, ended) = oneshot::channel();
    let work = move || {
        let error = runtime.block_on(follow(&options, &held, &metrics));
        // Nothing waits for it if the server ends.
        let _told = ending.send(error);
    };
    let thread = std::thread::Builder::new().name("rectrain-follow".into()).spawn(work);
    Ok(Following { ended, _thread: thread.map_err(io("start the thread that follows"))? })
}

/// Follows the path. Returns the error of a path that cannot be opened at all.
async fn follow(options: &Options, held: &watch::Sender<Held>, metrics: &Metrics) -> ServingError {
    let directory = match Directory::open(&options.path, &options.storage, false) {
        Ok(directory) => directory,
        Err(error) => return error.into(),
    };
    let mut trouble = Trouble::default();
    let failed = || metrics.update_failures.inc();
    let mut follower = loop {
        match Follower::open_part(directory.clone(), options.keys(), options.versions).await {
            Ok((follower, update)) => {
                metrics.count(&update);
                trouble.note(update.stopped.map(|error| error.to_string()), failed);
                break follower;
            }
            Err(error) if error.is_users_input() => return error,
            Err(error) => trouble.note(Some(error.to_string()), failed),
        }
        tokio::time::sleep(trouble.wait(FIRST)).await;
    };
    show(held, &follower);
    metrics.show(&held.borrow());
    loop {
        tokio::time::sleep(trouble.wait(options.poll)).await;
        let problem = match follower.poll().await {
            Ok(None) => None,
            Ok(Some(update)) => {
                show(held, &follower);
                metrics.count(&update);
                metrics.show(&held.borrow());
                metrics.freshness(follower.version().published_at);
                let version = follower.version();
                tracing::info!(sequence = version.base.sequence, step = version.model.step, "took a newer model");
                update.stopped.map(|error| error.to_string())
            }
            Err(error) => Some(error.to_string()),
        };
        trouble.note(problem, failed);
    }
}

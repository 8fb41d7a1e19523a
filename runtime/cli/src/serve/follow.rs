//! Follows published models while a server runs, on a thread of its own.

use std::path::Path;
use std::time::Duration;

use rectrain_inference::Updates;
use rectrain_serving::ServingError;
use rectrain_serving::publication::{Follower, ServedVersion, is_local_publication, is_publication};
use rectrain_storage::Directory;
use tokio::runtime::Runtime;

use super::gate::Gate;
use crate::checkpoint::store_options;
use crate::failure::Failure;

/// The longest time between two looks while a model cannot be taken. A full model is loaded at each
/// of them.
const LONGEST_BACKOFF: Duration = Duration::from_secs(10);

/// Published models, and the newest one in memory.
pub(super) struct Following {
    /// The clients of a store belong to the runtime that they were made in.
    runtime: Runtime,
    follower: Follower,
}

impl Following {
    /// Loads the newest model of a path; `None` if no models are published there.
    pub(super) fn open(model: &str, options: &[String]) -> Result<Option<Self>, Failure> {
        let is_url = model.contains("://");
        if !is_url && !is_local_publication(Path::new(model)) {
            return Ok(None);
        }
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
        let runtime = runtime.map_err(|error| Failure::Failed(format!("cannot start the runtime: {error}")))?;
        let options = store_options(options)?;
        let opened = runtime.block_on(async {
            let directory = Directory::open(model, &options, false).map_err(ServingError::from)?;
            if is_url && !is_publication(&directory).await? {
                return Ok(None);
            }
            Follower::open(directory).await.map(Some)
        });
        let Some((follower, update)) = opened? else {
            return Ok(None);
        };
        if let Some(error) = update.stopped {
            tracing::warn!(%error, "the newest model cannot be taken yet, so an earlier one is served");
        }
        Ok(Some(Self { runtime, follower }))
    }

    /// The model that is served.
    pub(super) fn version(&self) -> &ServedVersion {
        self.follower.version()
    }

    /// Follows until the process ends.
    pub(super) fn start(self, every: Duration, gate: Option<Gate>, updates: Updates) -> Result<(), Failure> {
        let Self { runtime, follower } = self;
        let work = move || runtime.block_on(follow(follower, every, gate, updates));
        let thread = std::thread::Builder::new().name("rectrain-follow".into()).spawn(work);
        thread.map(drop).map_err(|error| Failure::Failed(format!("cannot start the thread that follows: {error}")))
    }
}

async fn follow(mut follower: Follower, every: Duration, mut gate: Option<Gate>, updates: Updates) {
    // A reason that repeats is not logged again.
    let (mut warned, mut wait) = (None, every);
    loop {
        tokio::time::sleep(wait).await;
        let problem = match follower.poll().await {
            Ok(None) => None,
            Ok(Some(update)) => {
                let version = follower.version();
                let passed = gate.as_mut().map_or(Ok(()), |gate| gate.check(&version.model));
                if passed.is_ok() {
                    tracing::info!(sequence = version.base.sequence, step = version.model.step, "took a newer model");
                    updates.offer(version, &update);
                }
                passed.err().or_else(|| update.stopped.map(|error| error.to_string()))
            }
            Err(error) => Some(error.to_string()),
        };
        wait = if problem.is_some() { (2 * wait).min(LONGEST_BACKOFF.max(every)) } else { every };
        if let Some(error) = &problem {
            updates.failed();
            if warned.as_ref() != Some(error) {
                tracing::warn!(%error, "the newest model cannot be taken; the server looks again");
            }
        }
        warned = problem;
    }
}

//! Follows published models while a server runs, on a thread of its own.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use rectrain_inference::{NextModel, Updates};
use rectrain_serving::publication::{
    Follower, RowChanges, ServedVersion, Trouble, is_local_publication, is_publication,
};
use rectrain_serving::{Predictor, ServingError};
use rectrain_storage::Directory;
use tokio::runtime::Runtime;

use super::gate::Gate;
use crate::checkpoint::store_options;
use crate::failure::Failure;

/// Published models, and the newest one in memory.
pub(super) struct Following {
    /// The clients of a store belong to the runtime that they were made in.
    runtime: Runtime,
    follower: Follower,
}

impl Following {
    /// Loads the newest model of a path; `None` if no models are published there.
    pub(super) fn open(model: &str, options: &[String]) -> Result<Option<Self>, Failure> {
        let Some((runtime, directory)) = open_directory(model, options)? else { return Ok(None) };
        let (follower, update) = runtime.block_on(Follower::open(directory))?;
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
    pub(super) fn start(self, every: Duration, gate: Option<Gate<Predictor>>, updates: Updates) -> Result<(), Failure> {
        let Self { runtime, follower } = self;
        start_thread(move || runtime.block_on(follow(follower, every, gate, updates)))
    }
}

/// The directory of published models, and the runtime that its clients belong to; `None` if no
/// models are published there.
pub(super) fn open_directory(model: &str, options: &[String]) -> Result<Option<(Runtime, Directory)>, Failure> {
    let is_url = model.contains("://");
    if !is_url && !is_local_publication(Path::new(model)) {
        return Ok(None);
    }
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    let runtime = runtime.map_err(|error| Failure::Failed(format!("cannot start the runtime: {error}")))?;
    let options = store_options(options)?;
    let directory = runtime.block_on(async {
        let directory = Directory::open(model, &options, false).map_err(ServingError::from)?;
        let is_publication = !is_url || is_publication(&directory).await?;
        Ok::<_, ServingError>(is_publication.then_some(directory))
    });
    Ok(directory?.map(|directory| (runtime, directory)))
}

/// Starts the thread that follows.
pub(super) fn start_thread(work: impl FnOnce() + Send + 'static) -> Result<(), Failure> {
    let thread = std::thread::Builder::new().name("rectrain-follow".into()).spawn(work);
    thread.map(drop).map_err(|error| Failure::Failed(format!("cannot start the thread that follows: {error}")))
}

/// The model of a version, as a predictor takes it.
pub(super) fn next_model(version: &ServedVersion) -> NextModel {
    NextModel { model: Arc::clone(&version.model), base: version.base.clone(), changes: RowChanges::Unknown }
}

async fn follow(mut follower: Follower, every: Duration, mut gate: Option<Gate<Predictor>>, updates: Updates) {
    let mut trouble = Trouble::default();
    loop {
        tokio::time::sleep(trouble.wait(every)).await;
        let problem = match follower.poll().await {
            Ok(None) => None,
            Ok(Some(update)) => {
                let version = follower.version();
                let passed = gate.as_mut().map_or(Ok(()), |gate| gate.check(next_model(version)));
                if passed.is_ok() {
                    tracing::info!(sequence = version.base.sequence, step = version.model.step, "took a newer model");
                    updates.offer(version, &update);
                }
                passed.err().or_else(|| update.stopped.map(|error| error.to_string()))
            }
            Err(error) => Some(error.to_string()),
        };
        trouble.note(problem, || updates.failed());
    }
}

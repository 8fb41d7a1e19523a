//! The choice of the model: its place, its checkpoint, and when a newer one takes its turn. Pure.

use std::time::Duration;

use jiff::{SignedDuration, Timestamp};
use rectrain_crds::{
    CheckpointStatus, ModelPlace, RecModelServer, RecModelServerStatus, RecTrainingJob, StorageSpec, defaults,
};

/// The most checkpoints that are remembered for a rollback.
const MOST_HISTORY: usize = 16;

/// The model that the servers should have.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Target {
    /// The place of its checkpoints.
    pub place: ModelPlace,
    /// Its checkpoint. `None` serves the path as it is.
    pub checkpoint: Option<CheckpointStatus>,
}

impl Target {
    /// The model as `rectrain serve` takes it.
    #[must_use]
    pub fn location(&self) -> String {
        let path = &self.place.path;
        match &self.checkpoint {
            Some(checkpoint) => format!("{}/{}", path.trim_end_matches('/'), checkpoint.name),
            None => path.clone(),
        }
    }

    /// The global step of the model, if it is known.
    #[must_use]
    pub fn step(&self) -> Option<u64> {
        self.checkpoint.as_ref().map(|checkpoint| checkpoint.step)
    }
}

/// Why there is no model.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Missing {
    /// The job does not exist, and was never seen.
    Job,
    /// The job writes no checkpoints.
    CheckpointPath,
    /// The job has no complete checkpoint yet.
    Checkpoint,
}

/// The choice of a model.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Choice {
    /// The place of the model, if it is known.
    pub place: Option<ModelPlace>,
    /// The newest known checkpoint of the job.
    pub latest: Option<CheckpointStatus>,
    /// The model, or why there is none.
    pub target: Result<Target, Missing>,
    /// The model of the canary.
    pub canary: Option<Target>,
    /// The time until a newer checkpoint takes its turn.
    pub wait: Option<Duration>,
}

/// Chooses the model of `server`. `job` is the job that its manifest names, if it exists.
#[must_use]
pub fn choose(server: &RecModelServer, job: Option<&RecTrainingJob>, now: Timestamp) -> Choice {
    let before = server.status.clone().unwrap_or_default();
    let place = match place(server, job, &before) {
        Ok(place) => place,
        Err(missing) => return Choice { place: None, latest: None, target: Err(missing), canary: None, wait: None },
    };
    let is_same_place = before.model.as_ref().is_some_and(|known| known.path == place.path);
    let before = if is_same_place { before } else { RecModelServerStatus::default() };
    let reported = job.and_then(|job| job.status.as_ref()?.last_checkpoint.clone());
    let latest = if place.job.is_some() { reported.or_else(|| before.latest.clone()) } else { None };
    let (checkpoint, wait) = match server.spec.pinned() {
        Some(step) => (Some(checkpoint_of(step, latest.as_ref(), &before)), None),
        None => follow(server, latest.as_ref(), &before, now),
    };
    let canary = server.spec.canary.as_ref().map(|canary| Target {
        place: place.clone(),
        checkpoint: Some(checkpoint_of(canary.step, latest.as_ref(), &before)),
    });
    let target = if checkpoint.is_none() && place.job.is_some() {
        Err(Missing::Checkpoint)
    } else {
        Ok(Target { place: place.clone(), checkpoint })
    };
    Choice { place: Some(place), latest, target, canary, wait }
}

/// The place of the model. The place of a job that is gone is in the status.
fn place(
    server: &RecModelServer,
    job: Option<&RecTrainingJob>,
    before: &RecModelServerStatus,
) -> Result<ModelPlace, Missing> {
    let Some(name) = &server.spec.model.job else {
        let path = server.spec.model.path.clone().unwrap_or_default();
        return Ok(with_storage(ModelPlace { path, ..ModelPlace::default() }, server.spec.storage.as_ref()));
    };
    let Some(job) = job else {
        let known = before.model.clone().filter(|known| known.job.as_ref() == Some(name));
        return known.map(|known| with_storage(known, server.spec.storage.as_ref())).ok_or(Missing::Job);
    };
    let path = job.spec.checkpoint.as_ref().and_then(|checkpoint| checkpoint.path.clone());
    let path = path.ok_or(Missing::CheckpointPath)?;
    let place = ModelPlace { job: Some(name.clone()), path, ..ModelPlace::default() };
    Ok(with_storage(place, server.spec.storage.as_ref().or(job.spec.data.storage.as_ref())))
}

/// The place with these settings of its store. Without settings it keeps its own.
fn with_storage(place: ModelPlace, storage: Option<&StorageSpec>) -> ModelPlace {
    match storage {
        Some(storage) => {
            ModelPlace { options: storage.options.clone(), secret_name: storage.secret_name.clone(), ..place }
        }
        None => place,
    }
}

/// The checkpoint of a step. Only a full checkpoint has a name that follows from its step.
fn checkpoint_of(step: u64, latest: Option<&CheckpointStatus>, before: &RecModelServerStatus) -> CheckpointStatus {
    let mut known = latest.into_iter().chain(&before.checkpoint).chain(&before.canary).chain(&before.history);
    let known = known.find(|checkpoint| checkpoint.step == step);
    known.cloned().unwrap_or_else(|| CheckpointStatus { name: format!("step-{step:012}"), step })
}

/// The newest checkpoint, or the present one until the newest may take its turn.
fn follow(
    server: &RecModelServer,
    latest: Option<&CheckpointStatus>,
    before: &RecModelServerStatus,
    now: Timestamp,
) -> (Option<CheckpointStatus>, Option<Duration>) {
    let (Some(latest), Some(present)) = (latest, &before.checkpoint) else {
        return (latest.cloned(), None);
    };
    // A change of the manifest does not wait.
    let is_new_manifest = before.observed_generation != server.metadata.generation;
    let wait = before.since.as_ref().map_or(Duration::ZERO, |since| left(server, since.0, now));
    if latest == present || is_new_manifest || wait.is_zero() {
        return (Some(latest.clone()), None);
    }
    (Some(present.clone()), Some(wait))
}

/// The rest of the least time between two changes of the model.
fn left(server: &RecModelServer, since: Timestamp, now: Timestamp) -> Duration {
    let seconds = server.spec.update_every_seconds.unwrap_or(defaults::SERVER_UPDATE_SECONDS);
    let end = since + SignedDuration::from_secs(i64::from(seconds));
    Duration::try_from(end.duration_since(now)).unwrap_or(Duration::ZERO)
}

/// The remembered checkpoints after a change to `target`: each step once, the newest last.
#[must_use]
pub fn history(before: &RecModelServerStatus, target: &Target) -> Vec<CheckpointStatus> {
    if before.model.as_ref().is_none_or(|known| known.path != target.place.path) {
        return Vec::new();
    }
    let mut history = before.history.clone();
    if before.checkpoint != target.checkpoint
        && let Some(present) = &before.checkpoint
    {
        history.retain(|checkpoint| checkpoint.step != present.step);
        history.push(present.clone());
    }
    let superfluous = history.len().saturating_sub(MOST_HISTORY);
    history.drain(..superfluous);
    history
}

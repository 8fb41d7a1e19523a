//! Dry runs of changed manifests. A change that needs another attempt ends all pods. So the
//! operator first asks the API server, with a dry run of server-side apply, whether it accepts the
//! next attempt's StatefulSets. A refused template then costs nothing.

use futures::{StreamExt, stream};
use jiff::{SignedDuration, Timestamp};
use kube::api::{Api, DynamicObject, Patch, PatchParams};
use kube::{Client, ResourceExt};
use rectrain_crds::{Phase, RecTrainingJob};

use super::error::ReconcileError;
use crate::failure::{Cause, Problem};
use crate::names::FIELD_MANAGER;
use crate::objects::{Kind, Wanted};
use crate::phase::Decision;

/// Time after which a dry run is repeated.
const REPEAT: SignedDuration = SignedDuration::from_secs(15);
/// Dry runs at the same time.
const CONCURRENT: usize = 5;

/// The dry run of a manifest.
#[derive(Clone, Debug)]
pub struct DryRun {
    generation: Option<i64>,
    at: Timestamp,
    refused: Option<Problem>,
}

impl DryRun {
    /// Why the API server refused it.
    #[must_use]
    pub fn refused(&self) -> Option<&Problem> {
        self.refused.as_ref()
    }

    /// Whether it was a recent dry run of this generation of the job.
    #[must_use]
    pub fn is_of(&self, job: &RecTrainingJob, now: Timestamp) -> bool {
        self.generation == job.metadata.generation && now.duration_since(self.at) < REPEAT
    }
}

/// Whether the decision ends an attempt under way for a changed manifest of this digest, at once or
/// after a checkpoint.
#[must_use]
pub fn is_needed(job: &RecTrainingJob, decision: &Decision, spec_hash: &str) -> bool {
    let Some(before) = &job.status else { return false };
    let is_live = matches!(before.phase, Some(Phase::Starting | Phase::Training | Phase::Evaluating));
    let (Some(present), Some(next)) = (&before.attempt, &decision.status.attempt) else { return false };
    let ends = next.number > present.number && next.spec_hash != present.spec_hash;
    is_live && (ends || decision.ask_save && present.spec_hash != spec_hash)
}

/// Runs the StatefulSets among `next` dry. Without an answer of the API server they count as
/// refused.
pub async fn dry_run(client: &Client, job: &RecTrainingJob, next: &[Wanted], now: Timestamp) -> DryRun {
    let namespace = job.namespace().unwrap_or_default();
    let sets = next.iter().filter(|object| object.kind == Kind::StatefulSet);
    let runs: Vec<_> = sets.map(|set| refusal(client, &namespace, set)).collect();
    let refusals: Vec<_> = stream::iter(runs).buffered(CONCURRENT).collect().await;
    DryRun { generation: job.metadata.generation, at: now, refused: refusals.into_iter().flatten().next() }
}

async fn refusal(client: &Client, namespace: &str, set: &Wanted) -> Option<Problem> {
    let api: Api<DynamicObject> = Api::namespaced_with(client.clone(), namespace, &set.kind.resource());
    let parameters = PatchParams::apply(FIELD_MANAGER).force().dry_run();
    let answer = api.patch(&set.name, &parameters, &Patch::Apply(&set.body)).await;
    let source = answer.err()?;
    let error = ReconcileError::Apply { kind: set.kind.name(), name: set.name.clone(), source };
    let message = match error.obstacle() {
        Some(obstacle) => obstacle.message,
        None => format!("whether the change can be carried out is not known: {error}"),
    };
    Some(Problem::new(
        Cause::ObjectRefused,
        format!("{message}. Until then training continues with the manifest before"),
    ))
}

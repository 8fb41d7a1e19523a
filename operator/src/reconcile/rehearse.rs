//! A change of the manifest that needs another attempt ends all pods. Before it does, the API server is asked whether it would take the
//! next attempt's StatefulSets (a server-side apply that is not carried out): a template that it refuses then costs nothing.

use futures::{StreamExt, stream};
use jiff::{SignedDuration, Timestamp};
use kube::api::{Api, DynamicObject, Patch, PatchParams};
use kube::{Client, ResourceExt};
use rectrain_crds::{Phase, RecTrainingJob};

use crate::failure::{Cause, Problem};
use crate::names::FIELD_MANAGER;
use crate::phase::Decision;
use crate::reconcile::ReconcileError;
use crate::reconcile::kinds::{Kind, Wanted};

/// Time after which what was refused is tried again.
const TRY_AGAIN: SignedDuration = SignedDuration::from_secs(15);

/// A manifest that was tried out, and what came of it.
#[derive(Clone, Debug)]
pub struct Rehearsal {
    generation: Option<i64>,
    at: Timestamp,
    refused: Option<Problem>,
}

impl Rehearsal {
    /// Why it was refused, if it was.
    #[must_use]
    pub fn refused(&self) -> Option<&Problem> {
        self.refused.as_ref()
    }

    /// Whether it says how this generation of the job would do now.
    #[must_use]
    pub fn is_of(&self, job: &RecTrainingJob, now: Timestamp) -> bool {
        self.generation == job.metadata.generation && now.duration_since(self.at) < TRY_AGAIN
    }
}

/// Whether the decision ends an attempt that is under way for a manifest of this digest, or is about to, once there is a checkpoint.
#[must_use]
pub fn is_needed(job: &RecTrainingJob, decision: &Decision, spec_hash: &str) -> bool {
    let Some(before) = &job.status else { return false };
    let is_live = matches!(before.phase, Some(Phase::Starting | Phase::Training | Phase::Evaluating));
    let (Some(present), Some(next)) = (&before.attempt, &decision.status.attempt) else { return false };
    let ends = next.number > present.number && next.spec_hash != present.spec_hash;
    is_live && (ends || decision.ask_save && present.spec_hash != spec_hash)
}

/// Tries out the StatefulSets among `next`. As long as the API server does not say whether it would take them, it does not.
pub async fn rehearse(client: &Client, job: &RecTrainingJob, next: &[Wanted], now: Timestamp) -> Rehearsal {
    let namespace = job.namespace().unwrap_or_default();
    let sets = next.iter().filter(|object| object.kind == Kind::StatefulSet);
    let trying: Vec<_> = sets.map(|set| would_take(client, &namespace, set)).collect();
    let answers: Vec<_> = stream::iter(trying).buffered(5).collect().await;
    Rehearsal { generation: job.metadata.generation, at: now, refused: answers.into_iter().flatten().next() }
}

async fn would_take(client: &Client, namespace: &str, set: &Wanted) -> Option<Problem> {
    let api: Api<DynamicObject> = Api::namespaced_with(client.clone(), namespace, &set.kind.resource());
    let parameters = PatchParams::apply(FIELD_MANAGER).force().dry_run();
    let answer = api.patch(&set.name, &parameters, &Patch::Apply(&set.body)).await;
    let source = answer.err()?;
    let error = ReconcileError::Apply { kind: set.kind.name(), name: set.name.clone(), source };
    let what = error
        .obstacle()
        .map_or_else(|| format!("whether the change can be carried out is not known: {error}"), |it| it.message);
    Some(Problem::new(Cause::ObjectRefused, format!("{what}. Until then training goes on as the manifest was before")))
}

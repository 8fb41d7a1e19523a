//! Pods that the cluster does not make. What refuses them (a quota, a limit, a ServiceAccount that is not there, an admission webhook) tells
//! the controller of StatefulSets, and that tells it in events only; so where pods are lacking for a while, the events are read.

use jiff::{SignedDuration, Timestamp};
use k8s_openapi::api::core::v1::Event;
use kube::Client;
use kube::api::{Api, ListParams};

use crate::failure::{Cause, Problem};
use crate::names::{Role, of_role};
use crate::reconcile::dereference::Belongings;
use crate::reconcile::kinds::{Kind, Owned};

/// How long pods may be lacking before somebody is asked why.
const PATIENCE: SignedDuration = SignedDuration::from_secs(10);
/// Between two questions.
const ASK_AGAIN: SignedDuration = SignedDuration::from_secs(15);

/// That pods are lacking, and what is known of it.
#[derive(Clone, Debug)]
pub struct Lacking {
    since: Timestamp,
    asked: Option<Timestamp>,
    found: Option<Problem>,
}

/// The set that has fewer pods than it asks for, and its role.
fn lacking<'a>(belongings: &'a Belongings, job: &str) -> Option<(Role, &'a Owned)> {
    Role::ALL.into_iter().find_map(|role| {
        let set = belongings.find(Kind::StatefulSet, &of_role(job, role))?;
        let number = |field: &str, name: &str| set.body[field][name].as_u64();
        // Its controller has seen what is asked for.
        let is_seen = number("status", "observedGeneration") >= number("metadata", "generation");
        let made = number("status", "replicas").unwrap_or(0);
        (is_seen && made < number("spec", "replicas").unwrap_or(0)).then_some((role, set))
    })
}

/// What keeps the cluster from making the job's pods, if some are lacking and events tell of it. `memory` is what the last call has left.
pub async fn look(
    client: &Client,
    (namespace, job): (&str, &str),
    belongings: &Belongings,
    memory: Option<Lacking>,
    now: Timestamp,
) -> Option<Lacking> {
    let (role, set) = lacking(belongings, job)?;
    let mut lacking = memory.unwrap_or(Lacking { since: now, asked: None, found: None });
    let is_due = lacking.asked.is_none_or(|asked| now.duration_since(asked) >= ASK_AGAIN);
    if now.duration_since(lacking.since) < PATIENCE || !is_due {
        return Some(lacking);
    }
    lacking.asked = Some(now);
    match why(client, namespace, set).await {
        Ok(why) => lacking.found = why.map(|why| problem(role, &set.name, &why)),
        // What was found before still holds as far as anybody knows.
        Err(error) => tracing::warn!(job, %error, "why pods are not made could not be asked"),
    }
    Some(lacking)
}

impl Lacking {
    /// The problem, if it is known.
    #[must_use]
    pub fn problem(&self) -> Option<&Problem> {
        self.found.as_ref()
    }
}

/// What the newest event says that tells of a pod of the set which could not be made.
async fn why(client: &Client, namespace: &str, set: &Owned) -> Result<Option<String>, kube::Error> {
    let events: Api<Event> = Api::namespaced(client.clone(), namespace);
    let of_set = ListParams::default().fields(&format!("involvedObject.uid={},reason=FailedCreate", set.uid));
    let events = events.list(&of_set).await?;
    let newest = events.items.into_iter().max_by_key(|event| event.last_timestamp.as_ref().map(|time| time.0));
    Ok(newest.and_then(|event| event.message))
}

fn problem(role: Role, set: &str, why: &str) -> Problem {
    let role = role.field();
    Problem::new(
        Cause::PodsRefused,
        format!(
            "the cluster makes no pod of StatefulSet {set}: {}. Look at the namespace's quota and limits, and at spec.roles.{role}.template (serviceAccountName, priorityClassName, resources)",
            why.trim_end_matches('.')
        ),
    )
}

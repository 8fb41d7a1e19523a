//! Pods that the cluster does not make, and containers that it does not begin. What keeps them from it (a quota, a limit, a ServiceAccount that is not
//! there, an admission webhook; a Secret or a disk that cannot be mounted, a node without addresses) is told in events only; so where they are lacking for
//! a while, the events are read.

use jiff::{SignedDuration, Timestamp};
use k8s_openapi::api::core::v1::Event;
use kube::Client;
use kube::api::{Api, ListParams};

use crate::failure::{Cause, Problem};
use crate::names::{Role, of_role};
use crate::pods::PodFacts;
use crate::reconcile::dereference::Belongings;
use crate::reconcile::kinds::Kind;

/// Between two questions.
const ASK_AGAIN: SignedDuration = SignedDuration::from_secs(15);

/// That something is lacking, and what is known of it.
#[derive(Clone, Debug)]
pub struct Lacking {
    /// The uid of whom events are about.
    whose: String,
    since: Timestamp,
    asked: Option<Timestamp>,
    found: Option<Problem>,
}

/// Who does not get what it needs.
enum Needy<'a> {
    /// A set that has fewer pods than it asks for.
    Set { role: Role, uid: &'a str, name: &'a str },
    /// A pod whose container a node is to begin.
    Pod(&'a PodFacts),
}

impl<'a> Needy<'a> {
    fn find(belongings: &'a Belongings, job: &str, attempt: u32) -> Option<Self> {
        let set = Role::ALL.into_iter().find_map(|role| {
            let set = belongings.find(Kind::StatefulSet, &of_role(job, role))?;
            let number = |field: &str, name: &str| set.body[field][name].as_u64();
            // Its controller has seen what is asked for.
            let is_seen = number("status", "observedGeneration") >= number("metadata", "generation");
            let made = number("status", "replicas").unwrap_or(0);
            let lacks = is_seen && made < number("spec", "replicas").unwrap_or(0);
            lacks.then_some(Self::Set { role, uid: &set.uid, name: &set.name })
        });
        let mut pods = belongings.pods.iter().filter(|pod| pod.attempt == attempt && pod.is_being_created());
        set.or_else(|| pods.next().map(Self::Pod))
    }

    fn uid(&self) -> &'a str {
        match self {
            Self::Set { uid, .. } => uid,
            Self::Pod(pod) => &pod.uid,
        }
    }

    /// How long it may lack it before somebody is asked why: large images are pulled and disks attached for a while.
    fn patience(&self) -> SignedDuration {
        match self {
            Self::Set { .. } => SignedDuration::from_secs(10),
            Self::Pod(_) => SignedDuration::from_secs(60),
        }
    }

    /// What selects the events that may tell of it.
    fn events(&self) -> String {
        match self {
            Self::Set { uid, .. } => format!("involvedObject.uid={uid},reason=FailedCreate"),
            Self::Pod(pod) => format!("involvedObject.uid={}", pod.uid),
        }
    }

    /// Whether the newest of them tells of a failure. A pod that is being created has a node by now, and an image that is pulled for long is none.
    fn is_told_by(&self, newest: &Event) -> bool {
        let reason = newest.reason.as_deref().unwrap_or_default();
        let is_harmless = ["FailedScheduling", "FailedToRetrieveImagePullSecret"].contains(&reason);
        matches!(self, Self::Set { .. }) || reason.starts_with("Failed") && !is_harmless
    }

    fn problem(&self, why: &str) -> Problem {
        let why = why.trim_end_matches('.');
        match self {
            Self::Set { role, name, .. } => Problem::new(
                Cause::PodsRefused,
                format!(
                    "the cluster makes no pod of StatefulSet {name}: {why}. Look at the namespace's quota and limits, and at spec.roles.{}.template (serviceAccountName, priorityClassName, resources)",
                    role.field()
                ),
            ),
            Self::Pod(pod) => Problem::new(
                Cause::ContainerConfig,
                format!(
                    "the container of {} is not begun: {why}. Check what spec.roles.{}.template.volumes names, and the pod's node",
                    pod.name,
                    pod.role.field()
                ),
            ),
        }
    }
}

/// What keeps the cluster from making and beginning the pods of the job's attempt, if some are lacking and events tell of it. `memory` is what the last
/// call has left.
pub async fn look(
    client: &Client,
    (namespace, job, attempt): (&str, &str, u32),
    belongings: &Belongings,
    memory: Option<Lacking>,
    now: Timestamp,
) -> Option<Lacking> {
    let needy = Needy::find(belongings, job, attempt)?;
    let memory = memory.filter(|memory| memory.whose == needy.uid());
    let begins = || Lacking { whose: needy.uid().to_owned(), since: now, asked: None, found: None };
    let mut lacking = memory.unwrap_or_else(begins);
    let is_due = lacking.asked.is_none_or(|asked| now.duration_since(asked) >= ASK_AGAIN);
    if now.duration_since(lacking.since) < needy.patience() || !is_due {
        return Some(lacking);
    }
    lacking.asked = Some(now);
    match why(client, namespace, &needy).await {
        Ok(why) => lacking.found = why.map(|why| needy.problem(&why)),
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

/// What the newest of the events says, if it tells of it.
async fn why(client: &Client, namespace: &str, needy: &Needy<'_>) -> Result<Option<String>, kube::Error> {
    let events: Api<Event> = Api::namespaced(client.clone(), namespace);
    let events = events.list(&ListParams::default().fields(&needy.events())).await?;
    let newest = events.items.into_iter().max_by_key(last_seen);
    Ok(newest.filter(|event| needy.is_told_by(event)).and_then(|event| event.message))
}

fn last_seen(event: &Event) -> Option<Timestamp> {
    let last = event.last_timestamp.as_ref().map(|time| time.0);
    last.or_else(|| event.event_time.as_ref().map(|time| time.0))
}

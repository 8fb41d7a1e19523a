//! Pods that the cluster does not create, and containers that it does not start.
//!
//! Only events tell the reason. A pod is not created because of a quota, a limit, a missing
//! ServiceAccount or an admission webhook. A container is not started because a Secret or a disk
//! cannot be mounted, or because a node has no addresses. So if pods or containers are missing for
//! a while, the operator reads the events.

use jiff::{SignedDuration, Timestamp};
use k8s_openapi::api::core::v1::Event;
use kube::Client;
use kube::api::{Api, ListParams};
use rectrain_crds::Role;

use super::dereference::Belongings;
use crate::failure::{Cause, Problem};
use crate::names::{JobName, of_role};
use crate::objects::Kind;
use crate::pods::PodFacts;

/// Time between two reads of events.
const READ_AGAIN: SignedDuration = SignedDuration::from_secs(15);

/// Missing pods or containers.
#[derive(Clone, Debug)]
pub struct Lacking {
    /// The uid of the object that the events are about.
    uid: String,
    since: Timestamp,
    read: Option<Timestamp>,
    found: Option<Problem>,
}

/// The object that lacks pods or containers.
enum Needy<'a> {
    /// A StatefulSet with fewer pods than it wants.
    Set { role: Role, uid: &'a str, name: &'a str },
    /// A pod whose container its node has not started.
    Pod(&'a PodFacts),
}

impl<'a> Needy<'a> {
    fn find(belongings: &'a Belongings, job: &str, attempt: u32) -> Option<Self> {
        let set = Role::ALL.into_iter().find_map(|role| {
            let set = belongings.find(Kind::StatefulSet, &of_role(job, role))?;
            let number = |field: &str, name: &str| set.body[field][name].as_u64();
            // Its controller has seen the wanted number.
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

    /// Time before the events are read: pulling a large image or attaching a disk takes a while.
    fn patience(&self) -> SignedDuration {
        match self {
            Self::Set { .. } => SignedDuration::from_secs(10),
            Self::Pod(_) => SignedDuration::from_secs(60),
        }
    }

    /// The field selector of the events that may tell the reason.
    fn events(&self) -> String {
        match self {
            Self::Set { uid, .. } => format!("involvedObject.uid={uid},reason=FailedCreate"),
            Self::Pod(pod) => format!("involvedObject.uid={}", pod.uid),
        }
    }

    /// Whether the newest event reports a failure. A pod that is being created has been scheduled,
    /// and a long pull is no failure.
    fn is_failure(&self, newest: &Event) -> bool {
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
                    "the cluster creates no pod of StatefulSet {name}: {why}. Look at the namespace's quota and limits, and at spec.roles.{}.template (serviceAccountName, priorityClassName, resources)",
                    role.section()
                ),
            ),
            Self::Pod(pod) => Problem::new(
                Cause::ContainerConfig,
                format!(
                    "the container of {} does not start: {why}. Check the objects that spec.roles.{}.template.volumes names, and the pod's node",
                    pod.name,
                    pod.role.section()
                ),
            ),
        }
    }
}

/// An attempt of a job.
#[derive(Clone, Copy)]
pub struct Attempt<'a> {
    /// The job.
    pub job: &'a JobName,
    /// The attempt's number.
    pub number: u32,
}

/// Looks for missing pods and containers of an attempt, and reads their events when that is due.
/// `before` is the result of the previous look.
pub async fn look(
    client: &Client,
    attempt: Attempt<'_>,
    belongings: &Belongings,
    before: Option<Lacking>,
    now: Timestamp,
) -> Option<Lacking> {
    let JobName { namespace, name } = attempt.job;
    let needy = Needy::find(belongings, name, attempt.number)?;
    let before = before.filter(|before| before.uid == needy.uid());
    let first = || Lacking { uid: needy.uid().to_owned(), since: now, read: None, found: None };
    let mut lacking = before.unwrap_or_else(first);
    let is_due = lacking.read.is_none_or(|read| now.duration_since(read) >= READ_AGAIN);
    if now.duration_since(lacking.since) < needy.patience() || !is_due {
        return Some(lacking);
    }
    lacking.read = Some(now);
    match why(client, namespace, &needy).await {
        Ok(why) => lacking.found = why.map(|why| needy.problem(&why)),
        // The problem found before remains.
        Err(error) => tracing::warn!(job = name, %error, "cannot read the events of missing pods"),
    }
    Some(lacking)
}

impl Lacking {
    /// The problem, if an event told it.
    #[must_use]
    pub fn problem(&self) -> Option<&Problem> {
        self.found.as_ref()
    }
}

/// The message of the newest event, if it reports a failure.
async fn why(client: &Client, namespace: &str, needy: &Needy<'_>) -> Result<Option<String>, kube::Error> {
    let events: Api<Event> = Api::namespaced(client.clone(), namespace);
    let events = events.list(&ListParams::default().fields(&needy.events())).await?;
    let newest = events.items.into_iter().max_by_key(last_seen);
    Ok(newest.filter(|event| needy.is_failure(event)).and_then(|event| event.message))
}

fn last_seen(event: &Event) -> Option<Timestamp> {
    let last = event.last_timestamp.as_ref().map(|time| time.0);
    last.or_else(|| event.event_time.as_ref().map(|time| time.0))
}

//! Events of jobs and model servers: one for each transition, none for a state that lasts. They are
//! for `kubectl describe`. No program reads them, so an event that cannot be published is logged.

use k8s_openapi::api::core::v1::ObjectReference;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Condition;
use kube::Resource;
use kube_runtime::events::{Event, EventType, Recorder, Reporter};
use rectrain_crds::{
    AttemptReplicas, DecisionAction, DecisionStatus, Phase, RecTrainingJob, RecTrainingJobStatus, ReplacedPod, Role,
    unseen_warning,
};

use crate::failure::Problem;
use crate::names::FIELD_MANAGER;
use crate::phase::{CHECKPOINTED, Decision, NO_CHECKPOINT_PATH};
use crate::text::shorten;

/// The action of events without an action of their own.
const RECONCILE: &str = "Reconcile";
/// Events hold 1,024 bytes of text.
const MOST: usize = 1000;

/// Publishes events.
#[derive(Clone)]
pub struct Announcer(Recorder);

/// An event to publish.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Announcement {
    /// Whether it reports a problem.
    pub is_warning: bool,
    /// A word.
    pub reason: &'static str,
    /// The action. Kubernetes counts an event with the reason and action of an earlier one as the
    /// same.
    pub action: String,
    /// A sentence.
    pub note: String,
}

impl Announcement {
    fn normal(reason: &'static str, action: impl Into<String>, note: String) -> Self {
        Self { is_warning: false, reason, action: action.into(), note }
    }
}

impl Announcer {
    /// An announcer in the name of this instance of the operator.
    #[must_use]
    pub fn new(client: kube::Client, instance: Option<String>) -> Self {
        Self(Recorder::new(client, Reporter { controller: FIELD_MANAGER.to_owned(), instance }))
    }

    /// Publishes the events of the transition from `before` to the decision.
    pub async fn announce(&self, job: &RecTrainingJob, before: Option<&RecTrainingJobStatus>, decision: &Decision) {
        for announcement in transitions(before, decision) {
            self.publish(announcement, &job.object_ref(&())).await;
        }
    }

    /// Publishes an event about an object.
    pub async fn publish(&self, announcement: Announcement, object: &ObjectReference) {
        let event = Event {
            type_: if announcement.is_warning { EventType::Warning } else { EventType::Normal },
            reason: announcement.reason.to_owned(),
            note: Some(announcement.note),
            action: announcement.action,
            secondary: None,
        };
        if let Err(error) = self.0.publish(&event, object).await {
            tracing::warn!(%error, reason = announcement.reason, "an event could not be published");
        }
    }
}

/// The events of a change of status. Pure.
#[must_use]
pub fn transitions(before: Option<&RecTrainingJobStatus>, decision: &Decision) -> Vec<Announcement> {
    let after = &decision.status;
    let mut all = Vec::new();
    all.extend(phase_changed(before, after));
    if let Some(before) = before {
        all.extend(mode_switched(before, after));
        all.extend(has_unseen_ids(before, after));
        all.extend(slows_training(before, after));
        let is_new = |pod: &&ReplacedPod| !before.replaced_pods.contains(pod);
        all.extend(after.replaced_pods.iter().filter(is_new).map(is_replaced));
        all.extend(Role::MEMBERS.into_iter().filter_map(|role| scaled(role, before, after)));
    }
    let known = before.map(|status| status.decisions.as_slice()).unwrap_or_default();
    all.extend(after.decisions.iter().filter(|decision| !known.contains(decision)).map(decided));
    all.extend(decision.problem.as_ref().and_then(|problem| has_problem(before, problem)));
    all.extend(loses_training(before, after));
    all
}

/// The job was accepted without a path for checkpoints, or a change has removed it.
fn loses_training(before: Option<&RecTrainingJobStatus>, after: &RecTrainingJobStatus) -> Option<Announcement> {
    let condition = without_checkpoints(after)?;
    let is_known = before.is_some_and(|before| without_checkpoints(before).is_some());
    (!is_known).then(|| Announcement {
        is_warning: true,
        reason: NO_CHECKPOINT_PATH,
        action: RECONCILE.to_owned(),
        note: condition.message.clone(),
    })
}

/// The condition that says that the job has no path for checkpoints.
fn without_checkpoints(status: &RecTrainingJobStatus) -> Option<&Condition> {
    status.conditions.iter().find(|condition| condition.type_ == CHECKPOINTED && condition.status == "False")
}

/// The phase has changed. Evaluations come and go; the status shows them.
fn phase_changed(before: Option<&RecTrainingJobStatus>, after: &RecTrainingJobStatus) -> Option<Announcement> {
    let before = before.and_then(|status| status.phase);
    let phase = after.phase.filter(|phase| Some(*phase) != before)?;
    let is_routine = matches!((before, phase), (Some(Phase::Evaluating), Phase::Training) | (_, Phase::Evaluating));
    (!is_routine).then(|| Announcement::normal(phase.name(), RECONCILE, note(phase, after)))
}

/// A problem that the status before does not have.
fn has_problem(before: Option<&RecTrainingJobStatus>, problem: &Problem) -> Option<Announcement> {
    let conditions = before.into_iter().flat_map(|status| &status.conditions);
    let mut same = conditions.filter(|c| c.reason == problem.cause.reason() && c.message == problem.message);
    if same.next().is_some() {
        return None;
    }
    let note = problem.message.chars().scan(0, |bytes, c| {
        *bytes += c.len_utf8();
        (*bytes <= MOST).then_some(c)
    });
    Some(Announcement {
        is_warning: true,
        reason: problem.cause.reason(),
        action: RECONCILE.to_owned(),
        note: note.collect(),
    })
}

/// An automatic decision was made.
fn decided(decision: &DecisionStatus) -> Announcement {
    let DecisionStatus { subject, action, reason, applied, .. } = decision;
    let (subject, from, to) = (subject.name(), action.from_text(), action.to_text());
    let change = match action {
        DecisionAction::Rebalance { servers } => format!("{subject} rebalance over {servers}"),
        DecisionAction::RaiseMemory { .. } => format!("{subject} memory from {from} to {to} bytes"),
        _ => format!("{subject} from {from} to {to}"),
    };
    Announcement::normal(
        if *applied { "Decided" } else { "Recommended" },
        format!("{subject}/{to}"),
        shorten(&format!("{change}: {reason}"), MOST),
    )
}

/// The mode has changed within an attempt, by a decision, a change of the manifest or a schedule.
fn mode_switched(before: &RecTrainingJobStatus, after: &RecTrainingJobStatus) -> Option<Announcement> {
    let number = |status: &RecTrainingJobStatus| status.attempt.as_ref().map(|attempt| attempt.number);
    let (from, to) = (before.mode?, after.mode?);
    let has_trained = matches!(before.phase, Some(Phase::Training | Phase::Evaluating));
    let is_switch = has_trained && number(before) == number(after) && from != to;
    let note = || format!("from mode {from} to {to}, seen at step {}", after.step.unwrap_or(0));
    is_switch.then(|| Announcement::normal("ModeSwitched", format!("SwitchTo/{to}"), note()))
}

/// An evaluation met test ids that no training row had: more than half of a feature's, or many more
/// than before.
fn has_unseen_ids(before: &RecTrainingJobStatus, after: &RecTrainingJobStatus) -> Option<Announcement> {
    let earlier = Some(&before.unseen).filter(|unseen| !unseen.is_empty());
    let warning = unseen_warning(&after.unseen, earlier)?;
    Some(Announcement {
        is_warning: true,
        reason: "UnseenIds",
        action: "Evaluate".to_owned(),
        note: shorten(&warning, MOST),
    })
}

/// Another member slows training, or none does any longer.
fn slows_training(before: &RecTrainingJobStatus, after: &RecTrainingJobStatus) -> Option<Announcement> {
    let pod = |status: &RecTrainingJobStatus| status.slowest.as_ref().map(|slowest| slowest.pod.clone());
    let (earlier, later) = (pod(before), pod(after));
    if earlier == later {
        return None;
    }
    match &after.slowest {
        Some(slowest) => {
            let node = slowest.node.as_deref().map(|node| format!(" on node {node}")).unwrap_or_default();
            let cost = match 100.0 * slowest.share {
                percent if percent < 1.0 => "its work has moved to other members".to_owned(),
                percent => format!("its slowness costs {percent:.0} % of a step's time"),
            };
            let note = format!("{}{node} is slow: {cost}", slowest.pod);
            Some(Announcement { is_warning: true, reason: "SlowMember", action: format!("Slow/{}", slowest.pod), note })
        }
        None if after.phase == Some(Phase::Training) => {
            let pod = earlier?;
            Some(Announcement::normal(
                "MemberRecovered",
                format!("Recovered/{pod}"),
                format!("{pod} is no longer slow"),
            ))
        }
        None => None,
    }
}

/// A slow pod is replaced.
fn is_replaced(replaced: &ReplacedPod) -> Announcement {
    let ReplacedPod { pod, uid, reason, .. } = replaced;
    let note = shorten(&format!("{reason}; it is replaced, and new pods of its role avoid its node"), MOST);
    Announcement { is_warning: true, reason: "SlowPodReplaced", action: format!("Replace/{pod}/{uid}"), note }
}

/// The number of a role's members has changed.
fn scaled(role: Role, before: &RecTrainingJobStatus, after: &RecTrainingJobStatus) -> Option<Announcement> {
    let (old, new) = (before.attempt.as_ref()?, after.attempt.as_ref()?);
    let present = |replicas: &AttemptReplicas| replicas.get(role).map(|of_role| of_role.present);
    let (from, to) = (present(old.replicas.as_ref()?)?, present(new.replicas.as_ref()?)?);
    if old.number != new.number || from == to {
        return None;
    }
    let (reason, change) = match role {
        Role::Ps => ("SlotsMoved", format!("the rows moved from {from} to {to} parameter servers")),
        _ => ("Scaled", format!("from {from} to {to} {}s", role.name())),
    };
    let note = format!("{change}; seen at step {}", after.step.unwrap_or(0));
    Some(Announcement::normal(reason, format!("ScaleTo/{}/{to}", role.section()), note))
}

fn note(phase: Phase, status: &RecTrainingJobStatus) -> String {
    let attempt = status.attempt.as_ref().map_or(0, |attempt| attempt.number);
    match phase {
        Phase::Pending => "accepted".to_owned(),
        Phase::Starting => format!("the pods of attempt {attempt} are starting"),
        Phase::Training => "all roles have joined; the job trains".to_owned(),
        Phase::Evaluating => "the job predicts the test rows".to_owned(),
        Phase::Restarting => format!("all roles restart as attempt {attempt}"),
        Phase::Suspended if without_checkpoints(status).is_some() => {
            "suspended by spec.suspend; its training is lost, because spec.checkpoint.path is not set".to_owned()
        }
        Phase::Suspended => "suspended by spec.suspend".to_owned(),
        Phase::Complete => match status.summary.as_ref() {
            Some(summary) => {
                let auc = summary.auc.map(|auc| format!(", test AUC {auc:.4}")).unwrap_or_default();
                format!("trained on {} rows in {} steps{auc}", summary.samples, summary.steps)
            }
            None => "trained".to_owned(),
        },
        Phase::Failed => "ended without a model; the condition Failed says why".to_owned(),
    }
}

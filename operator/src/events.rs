//! Events of a job: one for each transition, none for anything that goes on. They are for `kubectl describe`; nothing reads them, and
//! one that cannot be published is only logged.

use kube::Resource;
use kube::runtime::events::{Event, EventType, Recorder, Reporter};
use rectrain_crds::{DecisionStatus, Phase, RecTrainingJob, RecTrainingJobStatus};

use crate::automatic;
use crate::failure::shorten;
use crate::members;
use crate::names::{FIELD_MANAGER, Role};
use crate::phase::Decision;

/// The action of all events but those that have one of their own.
const RECONCILE: &str = "Reconcile";
/// Events hold 1,024 bytes of text.
const MOST: usize = 1000;

/// Publishes the events of jobs.
#[derive(Clone)]
pub struct Announcer(Recorder);

/// What an event says.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Announcement {
    /// Whether something is wrong.
    pub is_warning: bool,
    /// A word.
    pub reason: &'static str,
    /// What was done. An event of the same reason and action as an earlier one is that event, counted.
    pub action: String,
    /// A sentence.
    pub note: String,
}

impl Announcer {
    /// In the name of this instance of the operator.
    #[must_use]
    pub fn new(client: kube::Client, instance: Option<String>) -> Self {
        Self(Recorder::new(client, Reporter { controller: FIELD_MANAGER.to_owned(), instance }))
    }

    /// Tells of the transition from `before` to what was decided, if it is one.
    pub async fn announce(&self, job: &RecTrainingJob, before: Option<&RecTrainingJobStatus>, decision: &Decision) {
        for announcement in transitions(before, decision) {
            let event = Event {
                type_: if announcement.is_warning { EventType::Warning } else { EventType::Normal },
                reason: announcement.reason.to_owned(),
                note: Some(announcement.note),
                action: announcement.action,
                secondary: None,
            };
            if let Err(error) = self.0.publish(&event, &job.object_ref(&())).await {
                tracing::warn!(%error, reason = announcement.reason, "an event could not be published");
            }
        }
    }
}

/// The events of a change of status. Pure.
#[must_use]
pub fn transitions(before: Option<&RecTrainingJobStatus>, decision: &Decision) -> Vec<Announcement> {
    let after = &decision.status;
    let mut all = Vec::new();
    let before_phase = before.and_then(|status| status.phase);
    if let Some(phase) = after.phase.filter(|phase| Some(*phase) != before_phase) {
        // Evaluations come and go, and are seen in the status.
        let is_routine =
            matches!((before_phase, phase), (Some(Phase::Evaluating), Phase::Training) | (_, Phase::Evaluating));
        if !is_routine {
            all.push(Announcement {
                is_warning: false,
                reason: phase.name(),
                action: RECONCILE.to_owned(),
                note: note(phase, after),
            });
        }
    }
    all.extend(before.and_then(|before| mode_switched(before, after)));
    all.extend(
        before.into_iter().flat_map(|before| Role::MEMBERS.into_iter().filter_map(|role| scaled(role, before, after))),
    );
    let before_decisions = before.map(|status| status.decisions.as_slice()).unwrap_or_default();
    all.extend(after.decisions.iter().filter(|decision| !before_decisions.contains(decision)).map(decided));
    if let Some(problem) = &decision.problem {
        let told_before = before.is_some_and(|status| {
            status.conditions.iter().any(|c| c.reason == problem.cause.reason() && c.message == problem.message)
        });
        if !told_before {
            let note = problem.message.chars().scan(0, |bytes, c| {
                *bytes += c.len_utf8();
                (*bytes <= MOST).then_some(c)
            });
            all.push(Announcement {
                is_warning: true,
                reason: problem.cause.reason(),
                action: RECONCILE.to_owned(),
                note: note.collect(),
            });
        }
    }
    all
}

/// A decision was made automatically.
fn decided(decision: &DecisionStatus) -> Announcement {
    let DecisionStatus { subject, from, to, reason, applied, replica, .. } = decision;
    let (what, unit) = if replica.is_some() { (" memory", " bytes") } else { ("", "") };
    let change = if automatic::is_rebalance(decision) {
        format!("spread anew over {to}")
    } else {
        format!("from {from} to {to}{unit}")
    };
    Announcement {
        is_warning: false,
        reason: if *applied { "Decided" } else { "Recommended" },
        action: format!("{}/{to}", subject.name()),
        note: shorten(&format!("{}{what} {change}: {reason}", subject.name()), MOST),
    }
}

/// Training went on in another mode under the same pods, whoever asked for it.
fn mode_switched(before: &RecTrainingJobStatus, after: &RecTrainingJobStatus) -> Option<Announcement> {
    let number = |status: &RecTrainingJobStatus| status.attempt.as_ref().map(|attempt| attempt.number);
    let (from, to) = (before.mode?, after.mode?);
    let has_trained = matches!(before.phase, Some(Phase::Training | Phase::Evaluating));
    let is_switch = has_trained && number(before) == number(after) && from != to;
    is_switch.then(|| Announcement {
        is_warning: false,
        reason: "ModeSwitched",
        action: format!("SwitchTo/{to}"),
        note: format!("from mode {from} to {to}, seen at step {}", after.step.unwrap_or(0)),
    })
}

/// Other members of a role take part than before.
fn scaled(role: Role, before: &RecTrainingJobStatus, after: &RecTrainingJobStatus) -> Option<Announcement> {
    let (old, new) = (before.attempt.as_ref()?, after.attempt.as_ref()?);
    let present = |replicas| members::of(replicas, role).map(|of_role| of_role.present);
    let (from, to) = (present(old.replicas.as_ref()?)?, present(new.replicas.as_ref()?)?);
    let (reason, what) = match role {
        Role::Ps => ("SlotsMoved", format!("the rows are on {to} parameter servers, which were on {from}")),
        _ => ("Scaled", format!("{to} {}s take part, which were {from}", role.name())),
    };
    (old.number == new.number && from != to).then(|| Announcement {
        is_warning: false,
        reason,
        action: format!("ScaleTo/{}/{to}", role.field()),
        note: format!("{what}; seen at step {}", after.step.unwrap_or(0)),
    })
}

fn note(phase: Phase, status: &RecTrainingJobStatus) -> String {
    let attempt = status.attempt.as_ref().map_or(0, |attempt| attempt.number);
    match phase {
        Phase::Pending => "accepted".to_owned(),
        Phase::Starting => format!("the pods of attempt {attempt} are starting"),
        Phase::Training => "all roles have joined; steps are being made".to_owned(),
        Phase::Evaluating => "the test rows are being predicted".to_owned(),
        Phase::Restarting => format!("all roles start again as attempt {attempt}"),
        Phase::Suspended => "held by spec.suspend".to_owned(),
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

//! The phase and conditions of a `RecModelServer`. Pure.
//!
//! | type | true while |
//! |---|---|
//! | `Ready` | all servers answer with the wanted model |
//! | `Progressing` | servers start, or change to another model |
//! | `Degraded` | the user is needed, as the message says |

use jiff::Timestamp;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{Condition, Time};
use rectrain_crds::ServerPhase;

/// The state of the servers in one word and one sentence.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Finding {
    /// The phase.
    pub phase: ServerPhase,
    /// The reason of the conditions: a word.
    pub reason: &'static str,
    /// The message of the conditions: a sentence.
    pub message: String,
}

impl Finding {
    /// A finding.
    #[must_use]
    pub fn new(phase: ServerPhase, reason: &'static str, message: impl Into<String>) -> Self {
        Self { phase, reason, message: message.into() }
    }
}

/// All conditions, in a fixed order. A condition keeps its time as long as it keeps its status.
#[must_use]
pub fn conditions(before: &[Condition], finding: &Finding, generation: Option<i64>, now: Timestamp) -> Vec<Condition> {
    let phase = finding.phase;
    let all = [
        ("Ready", phase == ServerPhase::Ready),
        ("Progressing", matches!(phase, ServerPhase::Pending | ServerPhase::Progressing)),
        ("Degraded", phase == ServerPhase::Degraded),
    ];
    let condition = |(kind, holds): (&str, bool)| {
        let status = if holds { "True" } else { "False" };
        let known = before.iter().find(|known| known.type_ == kind && known.status == status);
        // `Ready` explains why it is false; the others have a message only while they are true.
        let explains = holds || kind == "Ready";
        Condition {
            type_: kind.to_owned(),
            status: status.to_owned(),
            reason: if explains { finding.reason } else { phase.name() }.to_owned(),
            message: if explains { finding.message.clone() } else { String::new() },
            last_transition_time: known.map_or(Time(now), |known| known.last_transition_time.clone()),
            observed_generation: generation,
        }
    };
    all.into_iter().map(condition).collect()
}

//! `status.decisions`: the decisions of the automatic mode and of autoscaling.
//!
//! In Rust a decision's action is a tagged union. In a status it is flat: the field `action` is the
//! tag, and `from` and `to` are texts whatever they mean. A structural schema allows no `oneOf`,
//! and gives a field one type. The flat form has two more uses:
//!
//! - Earlier versions wrote it without `action`. The API server drops fields that the schema does
//!   not list, so their decisions can be read only because the fields are the same.
//! - An earlier version of the operator can still read it, and passes over `action`.

use std::borrow::Cow;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use schemars::{JsonSchema, Schema, SchemaGenerator};
use serde::{Deserialize, Serialize};

use crate::Mode;

/// The subject of a decision.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub enum DecisionSubject {
    /// The training mode.
    Mode,
    /// The parameter servers.
    Ps,
    /// The embedding workers.
    EmbeddingWorker,
    /// The dense workers.
    DenseWorker,
    /// The loaders.
    Loader,
}

impl DecisionSubject {
    /// The name in a status.
    pub fn name(self) -> &'static str {
        match self {
            DecisionSubject::Mode => "mode",
            DecisionSubject::Ps => "ps",
            DecisionSubject::EmbeddingWorker => "embeddingWorker",
            DecisionSubject::DenseWorker => "denseWorker",
            DecisionSubject::Loader => "loader",
        }
    }
}

/// The action of a decision.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum DecisionAction {
    /// Switch the training mode.
    SwitchMode {
        /// The mode before.
        from: Mode,
        /// The new mode.
        to: Mode,
    },
    /// Change the number of a role's replicas.
    Scale {
        /// The number before.
        from: u32,
        /// The new number.
        to: u32,
    },
    /// Rebalance the slots over the present parameter servers.
    Rebalance {
        /// The number of parameter servers.
        servers: u32,
    },
    /// Raise the memory limit of all parameter servers, because one was killed for its memory.
    RaiseMemory {
        /// The index of the parameter server that was killed.
        replica: u32,
        /// The limit before.
        from_bytes: u64,
        /// The new limit.
        to_bytes: u64,
    },
    /// A decision that this version does not know. It is written back as it was read.
    Unknown(UnknownAction),
}

/// The fields of an action that this version does not know.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UnknownAction {
    action: Option<String>,
    from: String,
    to: String,
    replica: Option<u32>,
}

impl DecisionAction {
    /// The field `from` of a status: a mode, a number of replicas, or bytes.
    pub fn from_text(&self) -> String {
        match self {
            Self::SwitchMode { from, .. } => from.to_string(),
            Self::Scale { from, .. } => from.to_string(),
            Self::Rebalance { servers } => servers.to_string(),
            Self::RaiseMemory { from_bytes, .. } => from_bytes.to_string(),
            Self::Unknown(unknown) => unknown.from.clone(),
        }
    }

    /// The field `to` of a status: a mode, a number of replicas, or bytes.
    pub fn to_text(&self) -> String {
        match self {
            Self::SwitchMode { to, .. } => to.to_string(),
            Self::Scale { to, .. } => to.to_string(),
            Self::Rebalance { servers } => servers.to_string(),
            Self::RaiseMemory { to_bytes, .. } => to_bytes.to_string(),
            Self::Unknown(unknown) => unknown.to.clone(),
        }
    }

    fn name(&self) -> Option<Cow<'static, str>> {
        match self {
            Self::SwitchMode { .. } => Some(SWITCH_MODE.into()),
            Self::Scale { .. } => Some(SCALE.into()),
            Self::Rebalance { .. } => Some(REBALANCE.into()),
            Self::RaiseMemory { .. } => Some(RAISE_MEMORY.into()),
            Self::Unknown(unknown) => unknown.action.clone().map(Cow::Owned),
        }
    }

    fn replica(&self) -> Option<u32> {
        match self {
            Self::RaiseMemory { replica, .. } => Some(*replica),
            Self::Unknown(unknown) => unknown.replica,
            _ => None,
        }
    }
}

/// A decision of the automatic mode or of autoscaling.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(from = "Fields", into = "Fields")]
pub struct DecisionStatus {
    /// The subject.
    pub subject: DecisionSubject,
    /// The time of the decision.
    pub time: Time,
    /// The action.
    pub action: DecisionAction,
    /// Whether the operator carries the action out, or only recommends it.
    pub applied: bool,
    /// Why, in a sentence.
    pub reason: String,
}

const SWITCH_MODE: &str = "switchMode";
const SCALE: &str = "scale";
const REBALANCE: &str = "rebalance";
const RAISE_MEMORY: &str = "raiseMemory";

/// The values of the field `action`, for the schema.
#[derive(JsonSchema)]
#[serde(rename_all = "camelCase")]
#[allow(dead_code, reason = "only its schema is used")]
enum ActionName {
    /// The training mode is switched.
    SwitchMode,
    /// The role gets another number of replicas.
    Scale,
    /// The slots are rebalanced over the present parameter servers.
    Rebalance,
    /// The memory limit of all parameter servers is raised.
    RaiseMemory,
}

/// A decision of the automatic mode or of autoscaling.
#[derive(Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
struct Fields {
    /// The subject of the decision.
    subject: DecisionSubject,
    /// The time of the decision.
    time: Time,
    /// The action. Absent in decisions of operators that did not write it yet: the other fields say
    /// which it is.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(with = "Option<ActionName>")]
    action: Option<String>,
    /// The value before: a mode, a number of replicas, or bytes of memory.
    #[schemars(length(max = 32))]
    from: String,
    /// The new value. Equal to `from` if the slots of the parameter servers are rebalanced.
    #[schemars(length(max = 32))]
    to: String,
    /// Index of the parameter server that was killed for its memory. Only with `raiseMemory`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    replica: Option<u32>,
    /// Whether the operator carries the action out, or only recommends it.
    applied: bool,
    /// Why, in a sentence.
    #[schemars(length(max = 1024))]
    reason: String,
}

impl Fields {
    /// The action's name. Operators that did not write it had no other action for these fields.
    fn action_name(&self) -> &str {
        match (&self.action, self.subject, self.replica) {
            (Some(name), ..) => name,
            (None, DecisionSubject::Mode, _) => SWITCH_MODE,
            (None, DecisionSubject::Ps, Some(_)) => RAISE_MEMORY,
            (None, DecisionSubject::Ps, None) if self.from == self.to => REBALANCE,
            (None, ..) => SCALE,
        }
    }

    fn known_action(&self) -> Option<DecisionAction> {
        let (from, to) = (&self.from, &self.to);
        Some(match self.action_name() {
            SWITCH_MODE => DecisionAction::SwitchMode { from: mode(from)?, to: mode(to)? },
            SCALE => DecisionAction::Scale { from: from.parse().ok()?, to: to.parse().ok()? },
            REBALANCE => DecisionAction::Rebalance { servers: to.parse().ok()? },
            RAISE_MEMORY => DecisionAction::RaiseMemory {
                replica: self.replica?,
                from_bytes: from.parse().ok()?,
                to_bytes: to.parse().ok()?,
            },
            _ => return None,
        })
    }
}

fn mode(name: &str) -> Option<Mode> {
    Mode::ALL.into_iter().find(|mode| mode.name() == name)
}

impl From<Fields> for DecisionStatus {
    fn from(fields: Fields) -> Self {
        let known = fields.known_action();
        let Fields { subject, time, action, from, to, replica, applied, reason } = fields;
        let action = known.unwrap_or(DecisionAction::Unknown(UnknownAction { action, from, to, replica }));
        Self { subject, time, action, applied, reason }
    }
}

impl From<DecisionStatus> for Fields {
    fn from(decision: DecisionStatus) -> Self {
        let DecisionStatus { subject, time, action, applied, reason } = decision;
        Self {
            subject,
            time,
            from: action.from_text(),
            to: action.to_text(),
            replica: action.replica(),
            action: action.name().map(Cow::into_owned),
            applied,
            reason,
        }
    }
}

impl JsonSchema for DecisionStatus {
    fn schema_name() -> Cow<'static, str> {
        "DecisionStatus".into()
    }

    fn json_schema(generator: &mut SchemaGenerator) -> Schema {
        Fields::json_schema(generator)
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn read(fields: &Value) -> DecisionStatus {
        serde_json::from_value(fields.clone()).expect("a decision is read")
    }

    fn fields(subject: &str, from: &str, to: &str) -> Value {
        json!({"subject": subject, "time": "2026-01-01T00:00:00Z", "from": from, "to": to, "applied": true, "reason": "r"})
    }

    /// Decisions as operators wrote them before they wrote the action.
    #[test]
    fn a_stored_decision_without_an_action_is_read() {
        assert_eq!(
            read(&fields("mode", "sync", "gba")).action,
            DecisionAction::SwitchMode { from: Mode::Sync, to: Mode::Gba }
        );
        assert_eq!(read(&fields("ps", "2", "3")).action, DecisionAction::Scale { from: 2, to: 3 });
        assert_eq!(read(&fields("ps", "3", "3")).action, DecisionAction::Rebalance { servers: 3 });
        assert_eq!(read(&fields("denseWorker", "3", "3")).action, DecisionAction::Scale { from: 3, to: 3 });
        let mut raised = fields("ps", "5", "7");
        raised["replica"] = json!(1);
        assert_eq!(read(&raised).action, DecisionAction::RaiseMemory { replica: 1, from_bytes: 5, to_bytes: 7 });
    }

    #[test]
    fn every_action_is_written_with_its_name_and_read_again() {
        for (subject, action, name) in [
            (DecisionSubject::Mode, DecisionAction::SwitchMode { from: Mode::Gba, to: Mode::Sync }, SWITCH_MODE),
            (DecisionSubject::DenseWorker, DecisionAction::Scale { from: 2, to: 4 }, SCALE),
            (DecisionSubject::Ps, DecisionAction::Scale { from: 4, to: 4 }, SCALE),
            (DecisionSubject::Ps, DecisionAction::Rebalance { servers: 3 }, REBALANCE),
            (DecisionSubject::Ps, DecisionAction::RaiseMemory { replica: 0, from_bytes: 5, to_bytes: 7 }, RAISE_MEMORY),
        ] {
            let time = read(&fields("ps", "1", "2")).time;
            let decision = DecisionStatus { subject, time, action, applied: false, reason: "why".to_owned() };
            let written = serde_json::to_value(&decision).expect("it is written");
            assert_eq!(written["action"], name);
            assert!(written["from"].is_string() && written["to"].is_string(), "{written}");
            assert_eq!(read(&written), decision);
        }
    }

    /// A later version may have written it. The job must stay readable, and the decision as it is.
    #[test]
    fn an_unknown_action_is_kept_as_it_is() {
        let mut later = fields("ps", "eu", "us");
        later["action"] = json!("moveRegion");
        for unknown in [later, fields("ps", "a few", "more"), fields("mode", "sync", "bmuf")] {
            let decision = read(&unknown);
            assert!(matches!(decision.action, DecisionAction::Unknown(_)), "{decision:?}");
            assert_eq!(serde_json::to_value(&decision).expect("it is written"), unknown);
        }
    }
}

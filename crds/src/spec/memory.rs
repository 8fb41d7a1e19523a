//! The parts of `spec.features` that keep tables within a budget: which ids get a row, and which
//! rows are removed.

use kube::KubeSchema;
use rectrain_kinds::EvictionKind;
use schemars::{Schema, SchemaGenerator, json_schema};
use serde::{Deserialize, Serialize};

use crate::defaults;

/// A number of bytes, as a number or as a text with a unit.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum BytesSpec {
    /// Bytes.
    Integer(i64),
    /// Digits and a unit: `40Gi`, `512Mi`, `40G`.
    Text(String),
}

const BYTE_UNITS: [(&str, u64); 9] = [
    ("Ki", 1 << 10),
    ("Mi", 1 << 20),
    ("Gi", 1 << 30),
    ("Ti", 1 << 40),
    ("k", 1_000),
    ("M", 1_000_000),
    ("G", 1_000_000_000),
    ("T", 1_000_000_000_000),
    ("", 1),
];

impl BytesSpec {
    /// The number of bytes, or `None` for a text of another form and for a negative number.
    #[must_use]
    pub fn bytes(&self) -> Option<u64> {
        match self {
            Self::Integer(bytes) => u64::try_from(*bytes).ok(),
            Self::Text(text) => {
                let text = text.trim();
                let (digits, unit) =
                    BYTE_UNITS.iter().find_map(|(name, unit)| Some((text.strip_suffix(name)?, unit)))?;
                digits.parse::<u64>().ok()?.checked_mul(*unit)
            }
        }
    }
}

fn bytes_schema(_: &mut SchemaGenerator) -> Schema {
    json_schema!({
        "x-kubernetes-int-or-string": true,
        "x-expected": "a number of bytes such as 40Gi or 512Mi",
    })
}

/// One budget for the rows of all tables. Exactly one of three.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
#[x_kube(
    validation = Rule::new("[has(self.maxRows), has(self.maxBytes), has(self.auto)].filter(given, given).size() == 1").message("expected exactly one of `maxRows`, `maxBytes` and `auto: true`"),
    validation = Rule::new("!has(self.auto) || self.auto").message("a table without a budget is the default: remove `memory`, or set `auto: true`").field_path(".auto")
)]
pub struct MemorySpec {
    /// The most rows of all tables together. Take it to compare jobs, because a row has the same
    /// weight for every width. At least the rows that one global batch can need, which are
    /// globalBatchSize times the number of sparse features.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = 1_000_000_000_000u64), extend("x-default" = "no limit"))]
    pub max_rows: Option<u64>,

    /// The most bytes of all rows together, with the state of their optimizer and their share of
    /// the index: a number, or a text such as `40Gi`. Take it in production. It may change while
    /// the job trains: a lower number evicts rows with the next steps.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(schema_with = "bytes_schema", extend("x-default" = "no limit"))]
    pub max_bytes: Option<BytesSpec>,

    /// True takes the share of the memory limits of the parameter servers that requests and buffers
    /// leave, which is 60 %. Needs `spec.roles.ps.template.resources.limits.memory`. The servers at
    /// the start of an attempt count, so scaling changes no budget meanwhile. Take it if you do not
    /// know the sizes of your tables.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(extend("x-default" = "false"))]
    pub auto: Option<bool>,
}

/// The order in which rows are evicted. Only with `memory`.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
#[x_kube(
    validation = Rule::new("!(has(self.decayPerDay) || has(self.positiveWeight)) || !has(self.policy) || self.policy == 'score'").message("`decayPerDay` and `positiveWeight` belong to the policy score: remove them, or set policy: score"),
    validation = Rule::new("!has(self.decayPerDay) || self.decayPerDay < 1.0").message("with a decay of 1 a score forgets all but the last update: expected a number below 1, such as 0.1; or set policy: lru").field_path(".decayPerDay")
)]
pub struct EvictionSpec {
    /// The policy.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(extend("x-default" = EvictionKind::Score))]
    pub policy: Option<EvictionKind>,

    /// β of the score S ← (1 - β)·S + β·(r·c⁺ + c⁻), for a day of event time (Kraken §III-A). 0.1
    /// forgets half of an id's past in a week. 0 never forgets. Without a time column there is no
    /// clock, and a score does not decay.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 0.0, max = 1.0), extend("x-default" = defaults::EVICTION_DECAY_PER_DAY))]
    pub decay_per_day: Option<f64>,

    /// r of the score: how many negative examples one positive example is worth. Raise it where
    /// positives are rare.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 0.0, max = 1000.0), extend("x-default" = defaults::EVICTION_POSITIVE_WEIGHT))]
    pub positive_weight: Option<f64>,
}

/// Which ids get a row. Until then an id reads as its initial values, and its gradients are dropped
/// and counted. Exactly one of two.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, KubeSchema)]
#[serde(rename_all = "camelCase")]
#[x_kube(
    validation = Rule::new("has(self.probability) != has(self.count)").message("expected exactly one of `probability`, such as 0.1, and `count`, such as 3"),
    validation = Rule::new("!has(self.probability) || self.probability > 0.0").message("with a probability of 0 no id ever gets a row: expected a number above 0, such as 0.1; or remove the feature").field_path(".probability")
)]
pub struct AdmissionSpec {
    /// Each update of an id without a row admits it with this probability p, above 0: after 1/p
    /// updates on average. It takes no memory. Take it first. 1 admits every id.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 0.0, max = 1.0), extend("x-default" = "every id"))]
    pub probability: Option<f64>,

    /// The update of this number admits an id. Counters take 12 bytes for each id without a row, up
    /// to 16,777,216 ids of a row group. Beyond that the ids with the fewest updates lose their
    /// count. So an id is never admitted early, and only then late. Take it if an id must not get a
    /// row by chance.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = 1_000_000u32), extend("x-default" = "every id"))]
    pub count: Option<u32>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_are_read_with_every_unit() {
        let bytes = |text: &str| BytesSpec::Text(text.to_owned()).bytes();
        assert_eq!((bytes("40Gi"), bytes(" 512Mi"), bytes("7")), (Some(40 << 30), Some(512 << 20), Some(7)));
        assert_eq!((bytes("2G"), bytes("1Ti"), bytes("3k")), (Some(2_000_000_000), Some(1 << 40), Some(3_000)));
        assert_eq!((bytes("Gi"), bytes("4.5Gi"), bytes("-1"), bytes("1Pi")), (None, None, None, None));
        assert_eq!(bytes("99999999999Ti"), None);
        assert_eq!((BytesSpec::Integer(9).bytes(), BytesSpec::Integer(-9).bytes()), (Some(9), None));
    }
}

//! The parts of a job that must match its checkpoint: model, features, optimizers, the meaning of
//! rows and labels. They are kept as JSON sections, so that an error can name a difference by its
//! path. The creator of an identity leaves out settings that may change between two runs: learning
//! rates, batch sizes, replicas, the training mode.
//!
//! A program may add sections that earlier versions did not write. So a section that a checkpoint
//! lacks is not compared.

use std::collections::BTreeMap;
use std::fmt;

use serde::{Deserialize, Serialize};
use serde_json::Value;

/// The identity of a job; see the module documentation.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Identity {
    sections: BTreeMap<String, Value>,
}

/// The first difference between two identities.
#[derive(Debug, Clone, PartialEq)]
pub struct Difference {
    /// The path of the difference, such as `model.hidden.1`.
    pub path: String,
    /// The value in the checkpoint; `None` if it has none.
    pub saved: Option<Value>,
    /// The value in the job; `None` if it has none.
    pub wanted: Option<Value>,
}

impl fmt::Display for Difference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let shown = |value: &Option<Value>| match value {
            None => "missing".to_owned(),
            Some(Value::Null) => "not set".to_owned(),
            Some(value) => format!("`{value}`"),
        };
        write!(f, "{} is {} in the checkpoint and {} in the job", self.path, shown(&self.saved), shown(&self.wanted))
    }
}

impl Identity {
    /// An identity with these sections (`model`, `features`, `denseOptimizer` …).
    #[must_use]
    pub fn new(sections: impl IntoIterator<Item = (String, Value)>) -> Self {
        Self { sections: sections.into_iter().collect() }
    }

    /// A section.
    #[must_use]
    pub fn section(&self, name: &str) -> Option<&Value> {
        self.sections.get(name)
    }

    /// All sections by name.
    #[must_use]
    pub fn sections(&self) -> &BTreeMap<String, Value> {
        &self.sections
    }

    /// The first difference between this identity, a checkpoint's, and a job's, if they differ.
    /// Sections that the checkpoint lacks are not compared: the program that wrote it did not know
    /// them. Another kind of model comes first, because it also changes features.
    #[must_use]
    pub fn difference(&self, wanted: &Self) -> Option<Difference> {
        let kind = |identity: &Self| identity.section("model")?.get("kind").cloned();
        let kinds = kind(self).zip(kind(wanted));
        let of_kinds = kinds.and_then(|(saved, wanted)| differ("spec.model.kind", Some(&saved), Some(&wanted)));
        let mut sections = self.sections.iter();
        of_kinds.or_else(|| sections.find_map(|(name, saved)| differ(name, Some(saved), wanted.section(name))))
    }
}

fn differ(path: &str, saved: Option<&Value>, wanted: Option<&Value>) -> Option<Difference> {
    let below = |key: &dyn fmt::Display| format!("{path}.{key}");
    match (saved, wanted) {
        (Some(Value::Object(saved)), Some(Value::Object(wanted))) => {
            let added = wanted.keys().filter(|key| !saved.contains_key(*key));
            let mut keys: Vec<&String> = saved.keys().chain(added).collect();
            keys.sort();
            keys.into_iter().find_map(|key| differ(&below(key), saved.get(key), wanted.get(key)))
        }
        (Some(Value::Array(saved)), Some(Value::Array(wanted))) => (0..saved.len().max(wanted.len()))
            .find_map(|index| differ(&below(&index), saved.get(index), wanted.get(index))),
        (Some(Value::Number(a)), Some(Value::Number(b))) if same_number(a, b) => None,
        _ if saved == wanted => None,
        _ => Some(Difference { path: path.to_owned(), saved: saved.cloned(), wanted: wanted.cloned() }),
    }
}

/// True if the numbers are equal, or differ only by the rounding of their text form.
fn same_number(a: &serde_json::Number, b: &serde_json::Number) -> bool {
    let near = |a: f64, b: f64| (a - b).abs() <= 4.0 * f64::EPSILON * a.abs().max(b.abs());
    a == b || a.is_f64() && b.is_f64() && a.as_f64().zip(b.as_f64()).is_some_and(|(a, b)| near(a, b))
}

/// A sparse feature in the section `features`: everything that turns its rows into model inputs.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct FeatureIdentity {
    /// The feature's name.
    pub name: String,
    /// The table of its keys.
    pub table: String,
    /// The row group of its rows.
    pub group: u16,
    /// Columns of its embedding; 0 if the model takes only its first-order weight.
    pub dim: usize,
    /// `sum`, `mean` or `sqrtN`.
    pub pooling: String,
    /// True if column 0 of its rows is its first-order weight.
    pub linear: bool,
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn identity(model: Value) -> Identity {
        Identity::new([("model".to_owned(), model)])
    }

    fn difference(saved: Value, wanted: Value) -> String {
        identity(saved).difference(&identity(wanted)).map_or("none".to_owned(), |found| found.to_string())
    }

    #[test]
    fn the_first_difference_is_named_by_its_path() {
        let saved = json!({"kind": "dnn", "hidden": [8, 4], "epsilon": 1e-8});
        assert_eq!(difference(saved.clone(), saved.clone()), "none");
        let mut wanted = saved.clone();
        wanted["hidden"][1] = json!(5);
        assert_eq!(difference(saved.clone(), wanted), "model.hidden.1 is `4` in the checkpoint and `5` in the job");
        let mut wanted = saved.clone();
        wanted["hidden"] = json!([8]);
        assert_eq!(difference(saved.clone(), wanted), "model.hidden.1 is `4` in the checkpoint and missing in the job");
        let mut wanted = saved.clone();
        wanted["rank"] = json!(1);
        assert_eq!(difference(saved.clone(), wanted), "model.rank is missing in the checkpoint and `1` in the job");
        let mut wanted = saved.clone();
        wanted["epsilon"] = json!(1.1e-8);
        assert!(difference(saved, wanted).starts_with("model.epsilon"));
    }

    #[test]
    fn another_kind_of_model_is_named_before_its_features() {
        let of = |kind: &str, linear: bool| {
            let sections = [("model", json!({"kind": kind})), ("features", json!([{"linear": linear}]))];
            Identity::new(sections.map(|(name, section)| (name.to_owned(), section)))
        };
        let found = of("deepfm", true).difference(&of("lr", false)).unwrap().to_string();
        assert_eq!(found, "spec.model.kind is `\"deepfm\"` in the checkpoint and `\"lr\"` in the job");
        let found = of("lr", true).difference(&of("lr", false)).unwrap().to_string();
        assert!(found.starts_with("features.0.linear is"), "{found}");
    }

    #[test]
    fn only_sections_that_the_checkpoint_has_are_compared() {
        let model = ("model".to_owned(), json!({"kind": "lr"}));
        let label = ("spec.features.label".to_owned(), json!({"name": "label", "positiveFrom": null}));
        let (old, new) = (Identity::new([model.clone()]), Identity::new([model.clone(), label]));
        assert_eq!(old.difference(&new), None);
        let missing = new.difference(&old).unwrap().to_string();
        assert!(
            missing.starts_with("spec.features.label is `") && missing.ends_with("missing in the job"),
            "{missing}"
        );
        let threshold = ("spec.features.label".to_owned(), json!({"name": "label", "positiveFrom": 4.0}));
        assert_eq!(
            new.difference(&Identity::new([model, threshold])).unwrap().to_string(),
            "spec.features.label.positiveFrom is not set in the checkpoint and `4.0` in the job"
        );
    }

    #[test]
    fn numbers_rounded_by_their_text_form_are_equal() {
        assert_eq!(difference(json!(0.1), json!(0.1 + f64::EPSILON / 16.0)), "none");
        assert_ne!(difference(json!(1), json!(2)), "none");
        assert_ne!(difference(json!(u64::MAX), json!(u64::MAX - 1)), "none");
    }
}

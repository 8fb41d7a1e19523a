//! The fields in which manifests differ.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::Value;

use crate::FieldPath;

/// The value of a field that a manifest leaves out.
const ABSENT: &str = "-";

/// Each field of `spec` whose value differs among the texts of manifests, with its value in each.
/// Fields are in the order of their paths; `-` is a field that a manifest leaves out. A text that
/// is no manifest has no fields.
#[must_use]
pub fn differing_fields(manifests: &[&str]) -> Vec<(String, Vec<String>)> {
    let all: Vec<BTreeMap<String, String>> = manifests.iter().map(|text| fields(text)).collect();
    let paths: BTreeSet<&String> = all.iter().flat_map(BTreeMap::keys).collect();
    let rows = paths.into_iter().map(|path| {
        let values: Vec<String> = all.iter().map(|fields| value(fields, path)).collect();
        (path.clone(), values)
    });
    rows.filter(|(_, values)| values.windows(2).any(|pair| pair[0] != pair[1])).collect()
}

fn value(fields: &BTreeMap<String, String>, path: &str) -> String {
    fields.get(path).map_or(ABSENT, String::as_str).to_owned()
}

/// The fields of `spec` by their paths. A list of numbers or texts is one value.
fn fields(manifest: &str) -> BTreeMap<String, String> {
    let mut fields = BTreeMap::new();
    let document: Value = serde_yaml::from_str(manifest).unwrap_or_default();
    collect(&document["spec"], &FieldPath::root().key("spec"), &mut fields);
    fields
}

fn collect(value: &Value, path: &FieldPath, fields: &mut BTreeMap<String, String>) {
    match value {
        Value::Null => {}
        Value::Object(inner) if !inner.is_empty() => {
            inner.iter().for_each(|(name, value)| collect(value, &path.key(name), fields));
        }
        Value::Array(entries) if entries.iter().any(Value::is_object) => {
            entries.iter().enumerate().for_each(|(index, entry)| collect(entry, &path.index(index), fields));
        }
        Value::String(text) => {
            fields.insert(path.to_string(), text.clone());
        }
        other => {
            fields.insert(path.to_string(), other.to_string());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn differing(manifests: &[&str]) -> Vec<String> {
        let found = differing_fields(manifests);
        found.into_iter().map(|(path, values)| format!("{path}: {}", values.join(" | "))).collect()
    }

    #[test]
    fn only_fields_that_differ_are_found() {
        let one = "spec:\n  model: {kind: deepfm, hidden: [8, 4]}\n  features: {sparse: [{name: a}]}\n  training: {}\n";
        let other = one.replace("deepfm", "lr").replace("8, 4", "8").replace("{name: a}", "{name: a, dim: 4}");
        assert_eq!(
            differing(&[one, &other, one]),
            [
                "spec.features.sparse[0].dim: - | 4 | -",
                "spec.model.hidden: [8,4] | [8] | [8,4]",
                "spec.model.kind: deepfm | lr | deepfm",
            ]
        );
        assert_eq!(differing(&[one, one]), Vec::<String>::new());
    }

    #[test]
    fn a_text_that_is_no_manifest_has_no_fields() {
        assert_eq!(differing(&["spec: {a: 1}", "", "[", "7"]), ["spec.a: 1 | - | - | -"]);
    }
}

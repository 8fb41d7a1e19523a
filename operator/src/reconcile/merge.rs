//! Strategic merge of pod templates, as `kubectl patch` does it: objects are merged field by field,
//! lists with keyed entries by key, and other lists and values are replaced. Pure.
//!
//! `k8s_openapi::DeepMerge` merges the same types, but it cannot express three cases that templates
//! need. The tests show each of them:
//!
//! - A `null` has to delete a field. `DeepMerge` reads it as absent and keeps the field.
//! - A volume or a variable has one source, so another source replaces it. `DeepMerge` keeps both,
//!   and the API server refuses such a pod.
//! - Tolerations are merged by their key. `DeepMerge` replaces the list, and the operator's
//!   tolerations of lost nodes would go.

use rectrain_crds::PodTemplate;
use serde_json::{Value, json};

use crate::names::CONTAINER;

/// Lists of a pod template with keyed entries, and their keys. Other lists are replaced as a whole.
const KEYS: &[(&str, &[&str])] = &[
    ("containers", &["name"]),
    ("initContainers", &["name"]),
    ("env", &["name"]),
    ("volumes", &["name"]),
    ("volumeMounts", &["mountPath"]),
    ("ports", &["containerPort", "protocol"]),
    ("imagePullSecrets", &["name"]),
    ("tolerations", &["key", "operator", "value", "effect"]),
    ("topologySpreadConstraints", &["topologyKey", "whenUnsatisfiable"]),
];

/// The user's template as a pod template, to merge over the operator's. Labels and annotations are
/// left out.
///
/// # Errors
/// If it cannot be written as JSON.
pub fn overlay(user: &PodTemplate) -> Result<Value, serde_json::Error> {
    let mut fields = serde_json::to_value(user)?;
    let mut container = json!({"name": CONTAINER});
    for field in ["resources", "env", "volumeMounts"] {
        if let Some(value) = fields.as_object_mut().and_then(|fields| fields.remove(field)) {
            container[field] = value;
        }
    }
    if let Some(fields) = fields.as_object_mut() {
        fields.remove("labels");
        fields.remove("annotations");
    }
    fields["containers"] = json!([container]);
    Ok(json!({"spec": fields}))
}

/// Merges `over` into `base`. A `null` in `over` deletes the field.
pub fn strategic_merge(base: &mut Value, over: &Value) {
    match (base, over) {
        (Value::Object(base), Value::Object(over)) => {
            for (field, value) in over {
                if value.is_null() {
                    base.remove(field);
                    continue;
                }
                match base.get_mut(field) {
                    None => {
                        base.insert(field.clone(), value.clone());
                    }
                    Some(present) => match (keys(field), present, value) {
                        (Some(keys), Value::Array(present), Value::Array(value)) => merge_list(present, value, keys),
                        (_, present, value) => strategic_merge(present, value),
                    },
                }
            }
        }
        (base, over) => *base = over.clone(),
    }
}

fn keys(field: &str) -> Option<&'static [&'static str]> {
    KEYS.iter().find(|(list, _)| *list == field).map(|(_, keys)| *keys)
}

/// Merges entries with the same key; new entries follow.
fn merge_list(present: &mut Vec<Value>, over: &[Value], keys: &[&str]) {
    let same = |a: &Value, b: &Value| keys.iter().all(|key| a.get(key) == b.get(key));
    for entry in over {
        match present.iter_mut().find(|other| same(other, entry)) {
            // A volume or a variable has one source: the new one replaces the old one.
            Some(other) if keys == ["name"] && is_another_source(other, entry) => *other = entry.clone(),
            Some(other) => strategic_merge(other, entry),
            None => present.push(entry.clone()),
        }
    }
}

/// Whether both are different sources: `value` and `valueFrom`, `emptyDir` and
/// `persistentVolumeClaim`.
fn is_another_source(a: &Value, b: &Value) -> bool {
    let fields = |value: &Value| -> Vec<String> {
        value.as_object().map(|o| o.keys().filter(|key| *key != "name").cloned().collect()).unwrap_or_default()
    };
    let (a, b) = (fields(a), fields(b));
    a.len() == 1 && b.len() == 1 && a != b
}

#[cfg(test)]
mod tests {
    use super::*;
    use k8s_openapi::DeepMerge;
    use k8s_openapi::api::core::v1::PodSpec;

    fn merged(base: Value, over: Value) -> Value {
        let mut base = base;
        strategic_merge(&mut base, &over);
        base
    }

    #[test]
    fn named_entries_are_merged_and_new_ones_follow() {
        let base = json!({"containers": [{"name": "rectrain", "image": "a", "env": [{"name": "X", "value": "1"}, {"name": "Y", "value": "2"}]}]});
        let over = json!({"containers": [{"name": "rectrain", "env": [{"name": "Y", "value": "3"}, {"name": "Z", "value": "4"}]}, {"name": "side"}]});
        assert_eq!(
            merged(base, over),
            json!({"containers": [
                {"name": "rectrain", "image": "a", "env": [{"name": "X", "value": "1"}, {"name": "Y", "value": "3"}, {"name": "Z", "value": "4"}]},
                {"name": "side"},
            ]})
        );
    }

    #[test]
    fn another_source_of_a_variable_or_volume_replaces_the_first() {
        let base = json!({"env": [{"name": "A", "value": "1"}], "volumes": [{"name": "tmp", "emptyDir": {}}]});
        let over = json!({
            "env": [{"name": "A", "valueFrom": {"secretKeyRef": {"name": "s", "key": "k"}}}],
            "volumes": [{"name": "tmp", "persistentVolumeClaim": {"claimName": "c"}}],
        });
        assert_eq!(merged(base, over.clone()), over);
    }

    #[test]
    fn mounts_are_merged_by_path_and_ports_by_number() {
        let base = json!({"volumeMounts": [{"name": "tmp", "mountPath": "/tmp"}], "ports": [{"containerPort": 1, "name": "a"}]});
        let over = json!({"volumeMounts": [{"name": "big", "mountPath": "/tmp"}, {"name": "tmp", "mountPath": "/x"}], "ports": [{"containerPort": 2}]});
        assert_eq!(
            merged(base, over),
            json!({
                "volumeMounts": [{"name": "big", "mountPath": "/tmp"}, {"name": "tmp", "mountPath": "/x"}],
                "ports": [{"containerPort": 1, "name": "a"}, {"containerPort": 2}],
            })
        );
    }

    #[test]
    fn values_and_other_lists_are_replaced_and_null_deletes() {
        let base =
            json!({"args": ["a", "b"], "nodeSelector": {"a": "1"}, "x": 1, "resources": {"limits": {"memory": "1Gi"}}});
        let over = json!({"args": ["c"], "nodeSelector": {"b": "2"}, "x": null, "resources": {"limits": {"cpu": "1"}}});
        assert_eq!(
            merged(base, over),
            json!({"args": ["c"], "nodeSelector": {"a": "1", "b": "2"}, "resources": {"limits": {"memory": "1Gi", "cpu": "1"}}})
        );
    }

    #[test]
    fn a_second_merge_changes_nothing() {
        let over = json!({"tolerations": [{"key": "gpu", "operator": "Exists"}], "env": [{"name": "A", "value": "1"}]});
        let once = merged(json!({"tolerations": [{"key": "spot", "operator": "Exists"}]}), over.clone());
        assert_eq!(merged(once.clone(), over), once);
        assert_eq!(once["tolerations"].as_array().map(Vec::len), Some(2));
    }

    fn deep_merged(base: &Value, over: &Value) -> Value {
        let read = |spec: &Value| serde_json::from_value::<PodSpec>(spec.clone()).expect("a pod's spec");
        let mut merged = read(base);
        merged.merge_from(read(over));
        serde_json::to_value(merged).expect("JSON")
    }

    #[test]
    fn deep_merge_does_not_delete_by_null() {
        let base = json!({"containers": [], "volumes": [{"name": "tmp", "emptyDir": {"medium": "Memory"}}]});
        let over = json!({"containers": [], "volumes": [{"name": "tmp", "emptyDir": {"medium": null}}]});
        let medium = |spec: Value| spec["volumes"][0]["emptyDir"]["medium"].clone();
        assert_eq!(medium(deep_merged(&base, &over)), "Memory");
        assert_eq!(medium(merged(base, over)), Value::Null);
    }

    #[test]
    fn deep_merge_gives_a_volume_two_sources() {
        let base = json!({"containers": [], "volumes": [{"name": "tmp", "emptyDir": {}}]});
        let over = json!({"containers": [], "volumes": [{"name": "tmp", "persistentVolumeClaim": {"claimName": "c"}}]});
        let has_old_source = |spec: Value| spec["volumes"][0].get("emptyDir").is_some();
        assert!(has_old_source(deep_merged(&base, &over)));
        assert!(!has_old_source(merged(base, over)));
    }

    #[test]
    fn deep_merge_drops_the_operators_tolerations() {
        let base =
            json!({"containers": [], "tolerations": [{"key": "node.kubernetes.io/not-ready", "operator": "Exists"}]});
        let over = json!({"containers": [], "tolerations": [{"key": "spot", "operator": "Exists"}]});
        let count = |spec: Value| spec["tolerations"].as_array().map(Vec::len);
        assert_eq!(count(deep_merged(&base, &over)), Some(1));
        assert_eq!(count(merged(base, over)), Some(2));
    }
}

//! Kubernetes' strategic merge, for the part of it that pod templates need: objects are merged field by field, lists whose entries
//! have a name are merged by it, all other lists and values are replaced. Pure.

use serde_json::Value;

/// Lists of a pod's template whose entries have a key, and the key. Others are replaced as a whole, as `kubectl patch` does.
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

/// Lays `over` over `base`. A `null` in `over` removes what is there.
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
                    Some(there) => match (keys(field), there, value) {
                        (Some(keys), Value::Array(there), Value::Array(value)) => merge_list(there, value, keys),
                        (_, there, value) => strategic_merge(there, value),
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

/// Entries with the key of one that is there are laid over it; the others follow.
fn merge_list(there: &mut Vec<Value>, over: &[Value], keys: &[&str]) {
    let same = |a: &Value, b: &Value| keys.iter().all(|key| a.get(key) == b.get(key));
    for entry in over {
        match there.iter_mut().find(|other| same(other, entry)) {
            // A volume or a variable has one source: the new one takes the place of the old one.
            Some(other) if keys == ["name"] && is_one_of_many(other, entry) => *other = entry.clone(),
            Some(other) => strategic_merge(other, entry),
            None => there.push(entry.clone()),
        }
    }
}

/// Whether both give the same thing in different ways: `value` and `valueFrom`, `emptyDir` and `persistentVolumeClaim`.
fn is_one_of_many(a: &Value, b: &Value) -> bool {
    let fields = |value: &Value| -> Vec<String> {
        value.as_object().map(|o| o.keys().filter(|key| *key != "name").cloned().collect()).unwrap_or_default()
    };
    let (a, b) = (fields(a), fields(b));
    a.len() == 1 && b.len() == 1 && a != b
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn merged(base: Value, over: Value) -> Value {
        let mut base = base;
        strategic_merge(&mut base, &over);
        base
    }

    #[test]
    fn entries_with_a_name_are_merged_by_it_and_new_ones_follow() {
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
    fn a_variable_or_volume_takes_another_source_and_never_has_two() {
        let base = json!({"env": [{"name": "A", "value": "1"}], "volumes": [{"name": "tmp", "emptyDir": {}}]});
        let over = json!({
            "env": [{"name": "A", "valueFrom": {"secretKeyRef": {"name": "s", "key": "k"}}}],
            "volumes": [{"name": "tmp", "persistentVolumeClaim": {"claimName": "c"}}],
        });
        assert_eq!(merged(base, over.clone()), over);
    }

    #[test]
    fn mounts_are_told_apart_by_their_path_and_ports_by_their_number() {
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
    fn values_and_other_lists_are_replaced_maps_are_joined_and_null_removes() {
        let base =
            json!({"args": ["a", "b"], "nodeSelector": {"a": "1"}, "x": 1, "resources": {"limits": {"memory": "1Gi"}}});
        let over = json!({"args": ["c"], "nodeSelector": {"b": "2"}, "x": null, "resources": {"limits": {"cpu": "1"}}});
        assert_eq!(
            merged(base, over),
            json!({"args": ["c"], "nodeSelector": {"a": "1", "b": "2"}, "resources": {"limits": {"memory": "1Gi", "cpu": "1"}}})
        );
    }

    #[test]
    fn merging_the_same_twice_changes_nothing_more() {
        let over = json!({"tolerations": [{"key": "gpu", "operator": "Exists"}], "env": [{"name": "A", "value": "1"}]});
        let once = merged(json!({"tolerations": [{"key": "spot", "operator": "Exists"}]}), over.clone());
        assert_eq!(merged(once.clone(), over), once);
        assert_eq!(once["tolerations"].as_array().map(Vec::len), Some(2));
    }
}

//! Each field of the manifest has an example that `rectrain explain` prints, and each example is
//! valid.
#![allow(clippy::unwrap_used, reason = "an unwrap in a test is an assertion")]

use rectrain_crds::{FIELD_EXAMPLES, explain, field_paths, load};
use serde_json::Value;

/// A whole manifest; the examples are laid over its `spec`.
const BASE: &str = "\
apiVersion: rectrain.dev/v1alpha1
kind: RecTrainingJob
metadata: {name: base}
spec:
  model: {kind: dnn}
  features:
    sparse: [{name: user}, {name: item}]
    dense: [{name: age}]
  data:
    train: {paths: [train.csv]}
    test: {paths: [test.csv]}
";

/// Lays `over` over `under`. Objects are merged, except `data`, whose sources exclude each other.
fn merge(under: &mut Value, over: &Value) {
    match (under, over) {
        (Value::Object(under), Value::Object(over)) => {
            for (name, value) in over {
                let field = under.entry(name).or_insert(Value::Null);
                if name == "data" { *field = value.clone() } else { merge(field, value) }
            }
        }
        (under, over) => *under = over.clone(),
    }
}

/// Whether there is a value at a path, in any entry of the lists on its way.
fn has(value: &Value, path: &[&str]) -> bool {
    match (value, path) {
        (Value::Array(entries), _) => entries.iter().any(|entry| has(entry, path)),
        (value, []) => !value.is_null(),
        (value, [name, rest @ ..]) => has(&value[*name], rest),
    }
}

#[test]
fn every_example_of_a_field_is_valid() {
    for example in FIELD_EXAMPLES {
        let mut manifest: Value = serde_yaml::from_str(BASE).unwrap();
        merge(&mut manifest["spec"], &serde_yaml::from_str(example).unwrap());
        let text = serde_yaml::to_string(&manifest).unwrap();
        load(&text, "example.yaml", &[]).unwrap_or_else(|error| panic!("{error}\n{text}"));
    }
}

#[test]
fn every_field_is_explained_with_an_example_that_has_it() {
    let paths = field_paths();
    let paths: Vec<&String> = paths.iter().filter(|path| path.starts_with("spec.")).collect();
    assert!(paths.len() > 300, "only {} fields", paths.len());
    for path in paths {
        let page = explain(path).unwrap();
        let (_, example) = page.split_once("\nEXAMPLE:\n").unwrap_or_else(|| panic!("{path} has no example"));
        if !example.starts_with("  --set spec.") {
            let example: Value = serde_yaml::from_str(example).unwrap();
            assert!(has(&example, &path.split('.').collect::<Vec<_>>()), "the example of {path} lacks it:\n{page}");
        }
    }
}

//! Each field of the manifest has an example that `rectrain explain` prints, and each example is
//! valid.
#![allow(clippy::unwrap_used, reason = "an unwrap in a test is an assertion")]

mod base;

use base::{BASE, merge};
use rectrain_crds::{FIELD_EXAMPLES, explain, field_paths, load};
use serde_json::Value;

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
        let spec = &mut manifest["spec"];
        let mut example: Value = serde_yaml::from_str(example).unwrap();
        // Sources exclude each other, so an example's data replaces the base's.
        if let Some(data) = example.as_object_mut().unwrap().remove("data") {
            spec["data"] = data;
        }
        merge(spec, &example);
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

//! The OpenAPI schema of `RecTrainingJob`, generated from the types. It is the one source of a
//! manifest's rules: for the API server (the CustomResourceDefinition), for this crate's own check,
//! and for the manual.
//!
//! The schema has two forms. The *annotated* form also has keywords that only this crate reads:
//! `x-default` (the default), `x-values` (the meaning of each value of an enum) and `x-expected` (a
//! pattern in words). The *cluster's* form folds them into the descriptions, because a structural
//! schema allows no keywords of its own.

use std::sync::LazyLock;

use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::{
    CustomResourceDefinition, CustomResourceValidation, JSONSchemaProps,
};
use kube::CustomResourceExt;
use schemars::JsonSchema;
use schemars::generate::SchemaSettings;
use serde_json::{Map, Value, json};

use crate::{FieldPath, RecModelServer, RecTrainingJob, Segment};

/// The value of an absent field.
pub(crate) const DEFAULT: &str = "x-default";
/// The meaning of each value of an enum, by value.
pub(crate) const VALUES: &str = "x-values";
/// The values that a pattern expects, in words.
pub(crate) const EXPECTED: &str = "x-expected";
/// Kubernetes' keyword for objects with fields that the schema does not list.
pub(crate) const OPEN: &str = "x-kubernetes-preserve-unknown-fields";

static ANNOTATED: LazyLock<Value> = LazyLock::new(generate::<RecTrainingJob>);
static SERVER: LazyLock<Value> = LazyLock::new(generate::<RecModelServer>);

/// The annotated schema of a type.
pub(crate) fn generate<T: JsonSchema>() -> Value {
    let settings = SchemaSettings::openapi3().with(|s| {
        s.inline_subschemas = true;
        s.meta_schema = None;
    });
    let schema = settings.into_generator().into_root_schema_for::<T>();
    let mut schema = schema.to_value();
    normalize(&mut schema);
    schema
}

/// The annotated schema of the whole object: `spec` and `status`. The API server knows `metadata`.
pub(crate) fn annotated() -> &'static Value {
    &ANNOTATED
}

/// The annotated schema of a `RecModelServer`.
pub(crate) fn annotated_server() -> &'static Value {
    &SERVER
}

/// The schema of the field at `path`. The index of a list entry may be left out:
/// `spec.features.sparse[2].dim` and `spec.features.sparse.dim` are the same field.
pub(crate) fn at(path: &FieldPath) -> Option<&'static Value> {
    path.0.iter().try_fold(annotated(), step)
}

/// As [`at`], of a `RecModelServer`.
pub(crate) fn at_server(path: &FieldPath) -> Option<&'static Value> {
    path.0.iter().try_fold(annotated_server(), step)
}

fn step(schema: &'static Value, segment: &Segment) -> Option<&'static Value> {
    match segment {
        Segment::Index(_) => schema.get("items"),
        Segment::Key(name) => properties(schema).or_else(|| properties(schema.get("items")?))?.get(name),
    }
}

/// The fields in the schema of an object.
pub(crate) fn properties(schema: &Value) -> Option<&Map<String, Value>> {
    schema.get("properties")?.as_object()
}

/// The CustomResourceDefinition `rectrainingjobs.rectrain.dev`, as a cluster gets it.
///
/// # Panics
/// Never in practice: the schema comes from the types, and a test generates it.
pub fn crd() -> CustomResourceDefinition {
    with_schema(RecTrainingJob::crd(), annotated())
}

/// The CustomResourceDefinition `recmodelservers.rectrain.dev`, as a cluster gets it.
///
/// # Panics
/// Never in practice: see [`crd`].
pub fn server_crd() -> CustomResourceDefinition {
    with_schema(RecModelServer::crd(), annotated_server())
}

fn with_schema(mut crd: CustomResourceDefinition, annotated: &Value) -> CustomResourceDefinition {
    let props: JSONSchemaProps =
        serde_json::from_value(for_cluster(annotated)).expect("the types' schema is an OpenAPI v3 schema");
    crd.spec.versions[0].schema = Some(CustomResourceValidation { open_api_v3_schema: Some(props) });
    crd
}

/// [`crd`] as a YAML file, for `kubectl apply` and the Helm chart.
///
/// # Panics
/// Never in practice: see [`crd`].
pub fn crd_yaml() -> String {
    yaml_of(&crd())
}

/// [`server_crd`] as a YAML file, for `kubectl apply` and the Helm chart.
///
/// # Panics
/// Never in practice: see [`crd`].
pub fn server_crd_yaml() -> String {
    yaml_of(&server_crd())
}

fn yaml_of(crd: &CustomResourceDefinition) -> String {
    let yaml = serde_yaml::to_string(crd).expect("a CustomResourceDefinition is plain data");
    format!(
        "# Generated from the types in crds/src: `cargo run --release -p rectrain-crds --example generate` writes it.\n{yaml}"
    )
}

/// Converts the output of schemars, in place, into Kubernetes' structural form: no `oneOf`, `anyOf`
/// or `nullable`, only known number formats, and descriptions without the source's line breaks.
fn normalize(schema: &mut Value) {
    let Some(node) = schema.as_object_mut() else { return };
    unwrap_option(node);
    unwrap_enum(node);
    for keyword in ["nullable", "title", "$schema"] {
        node.remove(keyword);
    }
    normalize_format(node);
    if let Some(Value::String(description)) = node.get_mut("description") {
        *description = reflow(description);
    }
    if node.get("properties").is_some() {
        node.remove("additionalProperties");
    }
    for keyword in ["items", "additionalProperties"] {
        if let Some(child) = node.get_mut(keyword) {
            normalize(child);
        }
    }
    if let Some(Value::Object(fields)) = node.get_mut("properties") {
        for field in fields.values_mut() {
            if let Some(field) = field.as_object_mut() {
                // Empty lists and maps are Rust's way to say "absent", not a default of the user.
                field.remove("default");
            }
            normalize(field);
        }
    }
}

/// Replaces `anyOf: [T, null]`, an optional T, by T. The field's own keywords take precedence over
/// the type's.
fn unwrap_option(node: &mut Map<String, Value>) {
    let is_null =
        |schema: &Value| schema.get("enum") == Some(&json!([null])) || schema.get("type") == Some(&json!("null"));
    let Some(Value::Array(choices)) = node.get("anyOf") else { return };
    let [Value::Object(inner), null] = choices.as_slice() else { return };
    if !is_null(null) {
        return;
    }
    let inner = inner.clone();
    node.remove("anyOf");
    for (keyword, value) in inner {
        node.entry(keyword).or_insert(value);
    }
}

/// Replaces an enum whose values have their own descriptions (schemars' `oneOf`) by a list of
/// values. The descriptions go to `x-values`.
fn unwrap_enum(node: &mut Map<String, Value>) {
    let Some(Value::Array(variants)) = node.get("oneOf") else { return };
    let mut names = Vec::new();
    let mut meanings = Map::new();
    for variant in variants {
        let Some(values) = variant.get("enum").and_then(Value::as_array) else { return };
        for name in values {
            if let (Some(name), Some(meaning)) = (name.as_str(), variant.get("description").and_then(Value::as_str)) {
                meanings.insert(name.to_string(), reflow(meaning).into());
            }
            names.push(name.clone());
        }
    }
    node.remove("oneOf");
    node.insert("type".into(), "string".into());
    node.insert("enum".into(), names.into());
    node.insert(VALUES.into(), meanings.into());
}

/// Kubernetes warns about unknown formats, and its integers are signed.
fn normalize_format(node: &mut Map<String, Value>) {
    let known = match node.get("format").and_then(Value::as_str) {
        Some("uint8" | "int8" | "uint16" | "int16") => "int32",
        Some("uint32" | "uint64" | "uint") => "int64",
        _ => return,
    };
    node.insert("format".into(), known.into());
}

/// Joins the lines of each paragraph. An empty line stays a paragraph break.
fn reflow(text: &str) -> String {
    let paragraphs = text.split("\n\n").map(|paragraph| paragraph.split_whitespace().collect::<Vec<_>>().join(" "));
    paragraphs.filter(|paragraph| !paragraph.is_empty()).collect::<Vec<_>>().join("\n\n")
}

/// The schema as a structural schema of a CustomResourceDefinition.
fn for_cluster(schema: &Value) -> Value {
    let mut schema = schema.clone();
    fold_annotations(&mut schema);
    // The scale subresource reads `spec.roles.denseWorker.replicas`, so every object must have it.
    for (pointer, default) in [
        ("/properties/spec/properties/roles", json!({})),
        ("/properties/spec/properties/roles/properties/denseWorker", json!({})),
        (
            "/properties/spec/properties/roles/properties/denseWorker/properties/replicas",
            json!(crate::defaults::REPLICAS),
        ),
    ] {
        if let Some(Value::Object(node)) = schema.pointer_mut(pointer) {
            node.insert("default".into(), default);
        }
    }
    schema
}

/// Moves this crate's own keywords into the descriptions.
fn fold_annotations(schema: &mut Value) {
    let Some(node) = schema.as_object_mut() else { return };
    let mut description = node.get("description").and_then(Value::as_str).unwrap_or_default().to_string();
    if let Some(default) = node.remove(DEFAULT) {
        description = format!("{description} Default: {}.", default_text(&default));
    }
    if let Some(Value::Object(meanings)) = node.remove(VALUES) {
        for value in node.get("enum").and_then(Value::as_array).into_iter().flatten().filter_map(Value::as_str) {
            if let Some(meaning) = meanings.get(value).and_then(Value::as_str) {
                description = format!("{description}\n\n{value}: {meaning}");
            }
        }
    }
    node.remove(EXPECTED);
    if !description.is_empty() {
        node.insert("description".into(), description.trim().into());
    }
    for keyword in ["items", "additionalProperties"] {
        if let Some(child) = node.get_mut(keyword) {
            fold_annotations(child);
        }
    }
    if let Some(Value::Object(fields)) = node.get_mut("properties") {
        fields.values_mut().for_each(fold_annotations);
    }
}

/// A default as readers see it: `[256, 128]`, `0.001`, `adam`.
pub(crate) fn default_text(default: &Value) -> String {
    match default {
        Value::String(text) => text.clone(),
        Value::Array(items) => format!("[{}]", items.iter().map(entry_text).collect::<Vec<_>>().join(", ")),
        Value::Number(number) => match number.as_f64() {
            Some(value) if value != 0.0 && value.abs() < 1e-4 => format!("{value:e}"),
            Some(value) if value.fract() == 0.0 => format!("{value}"),
            _ => number.to_string(),
        },
        other => other.to_string(),
    }
}

/// An entry of a default list as a manifest has it. A text that YAML reads as another value, such
/// as NULL, has quotes.
fn entry_text(entry: &Value) -> String {
    let is_text = |text: &str| serde_yaml::from_str::<serde_yaml::Value>(text).is_ok_and(|read| read.is_string());
    match entry {
        Value::String(text) if !is_text(text) => format!("'{text}'"),
        other => default_text(other),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn visit(schema: &Value, path: &FieldPath, see: &mut dyn FnMut(&FieldPath, &Map<String, Value>)) {
        let node = schema.as_object().expect("a schema is an object");
        see(path, node);
        for (name, field) in properties(schema).into_iter().flatten() {
            visit(field, &path.key(name), see);
        }
        for keyword in ["items", "additionalProperties"] {
            if let Some(child) = schema.get(keyword) {
                visit(child, &path.index(0), see);
            }
        }
    }

    #[test]
    fn the_schema_is_structural() {
        visit(&for_cluster(annotated()), &FieldPath::root(), &mut |path, node| {
            for keyword in
                ["oneOf", "anyOf", "allOf", "$ref", "nullable", "definitions", "x-default", "x-values", "x-expected"]
            {
                assert!(!node.contains_key(keyword), "{path} has {keyword}");
            }
            assert!(node.contains_key("type") || node.contains_key("x-kubernetes-int-or-string"), "{path} has no type");
            let format = node.get("format").and_then(Value::as_str);
            assert!(matches!(format, None | Some("int32" | "int64" | "double" | "date-time")), "{path}: {format:?}");
        });
    }

    #[test]
    fn a_server_needs_a_model_and_nothing_else() {
        let schema = for_cluster(annotated_server());
        assert_eq!(schema["required"], json!(["spec"]));
        assert_eq!(schema["properties"]["spec"]["required"], json!(["model"]));
    }

    #[test]
    fn the_servers_schema_is_structural_and_described() {
        visit(&for_cluster(annotated_server()), &FieldPath::root(), &mut |path, node| {
            for keyword in ["oneOf", "anyOf", "allOf", "$ref", "nullable", "x-default", "x-values", "x-expected"] {
                assert!(!node.contains_key(keyword), "{path} has {keyword}");
            }
            assert!(node.contains_key("type") || node.contains_key("x-kubernetes-int-or-string"), "{path} has no type");
            if matches!(path.0.last(), Some(Segment::Key(_))) {
                assert!(node.contains_key("description"), "{path} has no description");
            }
        });
    }

    #[test]
    fn every_column_of_servers_is_a_field() {
        let field = |path: &str| {
            let step = |schema: &'static Value, name: &str| properties(schema)?.get(name);
            path.split('.').filter(|name| !name.is_empty()).try_fold(annotated_server(), step)
        };
        let crd = server_crd();
        assert_eq!(crd.metadata.name.as_deref(), Some("recmodelservers.rectrain.dev"));
        assert_eq!(crd.spec.names.short_names, Some(vec!["rms".to_string()]));
        let columns = crd.spec.versions[0].additional_printer_columns.iter().flatten();
        for column in columns.filter(|column| column.name != "Age") {
            assert!(field(&column.json_path).is_some(), "{} is not a field", column.json_path);
        }
    }

    #[test]
    fn every_field_has_a_description() {
        visit(annotated(), &FieldPath::root(), &mut |path, node| {
            if matches!(path.0.last(), Some(Segment::Key(_))) {
                let description = node.get("description").and_then(Value::as_str).unwrap_or_default();
                assert!(description.len() >= 8 && description.contains('.'), "{path}: {description:?}");
            }
        });
    }

    #[test]
    fn every_optional_setting_documents_its_default() {
        // Objects of optional settings, and fields that another field requires or forbids, have no
        // default of their own.
        const WITHOUT: [&str; 7] = [
            "spec.features.dense[0].mean",
            "spec.features.dense[0].std",
            "spec.features.dense[0].min",
            "spec.features.dense[0].max",
            "spec.training.evaluation.steps",
            "spec.features.sparse[0].multiValue",
            "spec.data.test",
        ];
        fn walk(schema: &Value, path: &FieldPath, missing: &mut Vec<String>) {
            let required = schema.get("required").and_then(Value::as_array).cloned().unwrap_or_default();
            for (name, field) in properties(schema).into_iter().flatten() {
                let path = path.key(name);
                let leaf = field.get("type") != Some(&json!("object"));
                let text = path.to_string();
                let optional =
                    !required.contains(&json!(name)) && text.starts_with("spec.") && !text.contains(".template.");
                if optional && leaf && field.get(DEFAULT).is_none() && !WITHOUT.contains(&text.as_str()) {
                    missing.push(text);
                }
                walk(field, &path, missing);
                if let Some(items) = field.get("items") {
                    walk(items, &path.index(0), missing);
                }
            }
        }
        let mut missing = Vec::new();
        walk(annotated(), &FieldPath::root(), &mut missing);
        assert!(missing.is_empty(), "no x-default: {missing:?}");
    }

    /// CEL rules may read lists, maps and texts, so these need bounds. Otherwise the API server
    /// refuses the rules as too expensive.
    #[test]
    fn every_list_and_text_of_spec_is_bounded() {
        visit(&annotated()["properties"]["spec"], &FieldPath::parse("spec"), &mut |path, node| {
            if path.to_string().contains(".template.") || path.to_string().contains(".options") {
                return;
            }
            match node.get("type").and_then(Value::as_str) {
                Some("array") => assert!(node.contains_key("maxItems"), "{path} has no maxItems"),
                Some("string") => {
                    assert!(node.contains_key("maxLength") || node.contains_key("enum"), "{path} has no maxLength")
                }
                _ => {}
            }
        });
    }

    #[test]
    fn the_definition_fits_into_the_annotation_of_kubectl_apply() {
        let size = serde_json::to_string(&crd()).unwrap().len();
        assert!(size < 200 * 1024, "{size} bytes; kubectl apply stores a copy in an annotation of at most 256 KiB");
    }

    #[test]
    fn kubectl_sees_short_name_category_columns_and_subresources() {
        let crd = crd();
        assert_eq!(crd.metadata.name.as_deref(), Some("rectrainingjobs.rectrain.dev"));
        assert_eq!(crd.spec.names.short_names, Some(vec!["rtj".to_string()]));
        assert_eq!(crd.spec.names.categories, Some(vec!["all".to_string()]));
        assert_eq!(crd.spec.scope, "Namespaced");
        let version = &crd.spec.versions[0];
        let columns: Vec<_> = version.additional_printer_columns.iter().flatten().map(|c| c.name.as_str()).collect();
        assert_eq!(
            columns,
            ["Phase", "Mode", "Step", "Samples/s", "AUC", "PS", "EW", "DW", "Restarts", "Slowest", "Lag", "Age"]
        );
        let subresources = version.subresources.clone().unwrap();
        assert!(subresources.status.is_some());
        let scale = subresources.scale.unwrap();
        for path in
            [&scale.spec_replicas_path, &scale.status_replicas_path, scale.label_selector_path.as_ref().unwrap()]
        {
            assert!(at(&FieldPath::parse(path)).is_some(), "{path} is not a field");
        }
        for column in version.additional_printer_columns.iter().flatten().filter(|c| c.name != "Age") {
            assert!(at(&FieldPath::parse(&column.json_path)).is_some(), "{} is not a field", column.json_path);
        }
    }

    /// kube's derive makes a structural schema of its own, which its CEL helpers use. Ours must
    /// have the same fields and rules.
    #[test]
    fn the_schema_has_the_fields_and_rules_that_kube_derives() {
        fn outline(schema: &Value) -> Vec<String> {
            let mut lines = Vec::new();
            visit(schema, &FieldPath::root(), &mut |path, node| {
                lines.push(format!("{path} {:?} {:?}", node.get("enum"), node.get("x-kubernetes-validations")));
            });
            lines.sort();
            lines
        }
        let derived = RecTrainingJob::crd().spec.versions[0].schema.clone().unwrap().open_api_v3_schema.unwrap();
        let ours = crd().spec.versions[0].schema.clone().unwrap().open_api_v3_schema.unwrap();
        assert_eq!(outline(&serde_json::to_value(ours).unwrap()), outline(&serde_json::to_value(derived).unwrap()));
    }
}

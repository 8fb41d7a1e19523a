//! The manifest reference (docs/reference/manifest.md), generated from the schema.

use serde_json::Value;

use crate::FieldPath;
use crate::check::meanings;
use crate::explain::{description, rules, type_name};
use crate::schema::{DEFAULT, annotated, annotated_server, default_text, properties};
use crate::simulation::simulation_schema;

const HEAD: &str = "\
<!-- Generated from the types in crds/src: `cargo run --release -p rectrain-crds --example generate` writes it. -->
# Manifest reference

A manifest is one YAML document with `apiVersion: rectrain.dev/v1alpha1` and `kind: RecTrainingJob`. `rectrain run` reads it
from a file, and `kubectl apply` puts the same document into a cluster. `metadata.name` is required: at most 35 characters,
a-z, 0-9 and `-`, starting with a letter. `rectrain explain FIELD` and `kubectl explain rtj.spec` show the same text as this
page. `rectrain explain KIND` also shows an example of every kind (`dlrm`, `adam`, `hybrid`, …).

The command line can override any field: `--set spec.training.mode=hybrid`. The grammar is Helm's: commas between
assignments, `a[0].b` for entries of lists, `{x,y}` for lists, `\\` before a character that is meant literally, and `null` to
remove a field. `--set-string` takes every value as text.
";

/// The reference as Markdown: a section for each object of the manifest, with a row for each field.
pub fn reference_markdown() -> String {
    let mut page = HEAD.to_string();
    for part in ["spec", "status"] {
        object(&annotated()["properties"][part], &FieldPath::root().key(part), &mut page);
    }
    page
}

const SIMULATION_HEAD: &str = "\
<!-- Generated from the types in crds/src: `cargo run --release -p rectrain-crds --example generate` writes it. -->
# Simulation reference

A simulation is one YAML document with `apiVersion: rectrain.dev/v1alpha1` and `kind: Simulation`. Only `rectrain simulate`
reads it. `metadata.name` is optional. A single number may stand for a list of one. `--set` and `--set-string` override fields
as in manifests. docs/guide/simulate.md is the guide.
";

/// The reference of `kind: Simulation` as Markdown.
pub fn simulation_reference_markdown() -> String {
    let mut page = SIMULATION_HEAD.to_string();
    object(&simulation_schema()["properties"]["spec"], &FieldPath::root().key("spec"), &mut page);
    page
}

const SERVER_HEAD: &str = "\
<!-- Generated from the types in crds/src: `cargo run --release -p rectrain-crds --example generate` writes it. -->
# Reference of RecModelServer

A `RecModelServer` (short name `rms`) has `apiVersion: rectrain.dev/v1alpha1`. It runs servers for a trained model in a cluster.
`metadata.name` has at most 35 characters: a-z, 0-9 and `-`, starting with a letter. docs/guide/serving.md is the guide.
`spec.template` and `spec.shards.template` have the fields of `template` in [a role of a job](manifest.md).
";

/// The reference of `RecModelServer` as Markdown.
pub fn server_reference_markdown() -> String {
    let mut page = SERVER_HEAD.to_string();
    for part in ["spec", "status"] {
        object(&annotated_server()["properties"][part], &FieldPath::root().key(part), &mut page);
    }
    page
}

fn object(schema: &Value, path: &FieldPath, page: &mut String) {
    let name = path.to_string().replace("[0]", "[]");
    *page += &format!("\n## `{name}`\n\n{}\n\n", description(schema).trim_end_matches(" Required."));
    *page += "| field | type | default | meaning |\n|---|---|---|---|\n";
    for (name, field) in properties(schema).into_iter().flatten() {
        *page += &row(name, field, schema);
    }
    let rules = rules(schema);
    if !rules.is_empty() {
        *page += "\nRules:\n\n";
        for rule in rules {
            *page += &format!("- {rule}\n");
        }
    }
    for (name, field) in properties(schema).into_iter().flatten() {
        let path = path.key(name);
        let items = field.get("items").filter(|items| properties(items).is_some());
        match items {
            Some(items) => object(items, &path.index(0), page),
            None if is_repeated(&path) => {}
            None if properties(field).is_some() => object(field, &path, page),
            None => {}
        }
    }
}

/// True for templates other than the dense worker's: all are the same, and the reference has one.
fn is_repeated(path: &FieldPath) -> bool {
    let path = path.to_string();
    path.ends_with(".template") && path != "spec.roles.denseWorker.template"
}

fn row(name: &str, field: &Value, parent: &Value) -> String {
    let required = parent["required"].as_array().is_some_and(|required| required.iter().any(|r| r == name));
    let default = match field.get(DEFAULT) {
        Some(default) => default_text(default),
        None if required => "required".to_string(),
        None => String::new(),
    };
    let mut meaning = description(field).trim_end_matches(" Required.").to_string();
    for bounds in bounds(field).into_iter().chain(field.get("items").and_then(bounds)) {
        meaning += &format!(" {bounds}.");
    }
    for (value, explained) in meanings(field) {
        meaning += &format!("<br>`{value}`: {explained}");
    }
    let cell = |text: &str| text.replace("\n\n", "<br>").replace('\n', " ").replace('|', "\\|");
    format!("| `{name}` | {} | {} | {} |\n", cell(&type_name(field)), cell(&default), cell(&meaning))
}

fn bounds(schema: &Value) -> Option<String> {
    let bound = |keyword: &str| schema.get(keyword).map(default_text);
    match (bound("minimum")?, bound("maximum")?) {
        (least, most) if least == most => None,
        (least, most) => Some(format!("From {least} to {most}")),
    }
}

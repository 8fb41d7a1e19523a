//! Makes the chart's README of the comments in `values.yaml` and the types in
//! `values.schema.json`, as helm-docs does.

use std::fmt::Write;
use std::path::Path;

use serde_json::Value;

const HEAD: &str = "\
# The chart of Rectrain

Installs the operator, which runs `RecTrainingJob`s, and their CustomResourceDefinition.
[Installation](../../docs/operations/install.md) shows how. `values.schema.json` refuses misspelt
values.

`cargo xtask docs` makes this page of `values.yaml` and `values.schema.json`.

Jobs have their own settings of pods (`spec.roles.ROLE.template`). The values below are for the
operator, unless they name jobs.

| value | type | default | meaning |
|---|---|---|---|
";

/// A value with a default.
struct Row {
    path: String,
    default: String,
    meaning: String,
}

/// The README of the chart in this folder.
pub(crate) fn markdown(chart: &Path) -> String {
    let read = |file: &str| std::fs::read_to_string(chart.join(file)).expect("a file of the chart");
    let schema: Value = serde_json::from_str(&read("values.schema.json")).expect("JSON");
    let mut text = HEAD.to_owned();
    for Row { path, default, meaning } in rows(&read("values.yaml")) {
        let kind = kind(&schema, &path);
        let default = if default.is_empty() { String::new() } else { format!("`{default}`") };
        // Writing to a String cannot fail.
        let _ =
            writeln!(text, "| `{path}` | {kind} | {} | {} |", default.replace('|', "\\|"), meaning.replace('|', "\\|"));
    }
    text
}

/// The values of the file, in its order. A comment belongs to the key below it. A section has a row
/// if it has a comment.
fn rows(text: &str) -> Vec<Row> {
    let (mut rows, mut comment, mut path): (Vec<Row>, Vec<&str>, Vec<(usize, &str)>) = Default::default();
    // The lines below a key with a comment that belong to its default.
    let mut whole: Option<usize> = None;
    for line in text.lines() {
        let trimmed = line.trim_start();
        let indent = line.len() - trimmed.len();
        if let (Some(depth), Some(row)) = (whole, rows.last_mut())
            && indent > depth
        {
            row.default = format!("{} {trimmed}", row.default).trim().to_owned();
            continue;
        }
        whole = None;
        if trimmed.is_empty() {
            comment.clear();
        } else if let Some(said) = trimmed.strip_prefix("# ") {
            comment.push(said);
        } else if let Some((key, default)) = trimmed.split_once(':') {
            path.retain(|(depth, _)| *depth < indent);
            path.push((indent, key));
            let name = path.iter().map(|(_, key)| *key).collect::<Vec<_>>().join(".");
            let meaning = std::mem::take(&mut comment).join(" ");
            let is_section = default.trim().is_empty() && !is_free(&name);
            if !is_section || !meaning.is_empty() {
                rows.push(Row { path: name, default: default.trim().to_owned(), meaning });
            }
            whole = (default.trim().is_empty() && !is_section).then_some(indent);
        }
    }
    rows
}

/// Whether the content of this key is one value: Kubernetes' own objects and lists.
fn is_free(path: &str) -> bool {
    ["resources", "podSecurityContext", "securityContext", "gpu.tolerations"].contains(&path)
}

/// The type of a value in the schema.
fn kind(schema: &Value, path: &str) -> String {
    let referred = |found: &Value| match found["$ref"].as_str() {
        Some(name) => schema["definitions"][name.rsplit('/').next().unwrap_or_default()].clone(),
        None => found.clone(),
    };
    let found = path.split('.').fold(schema.clone(), |at, key| referred(&at["properties"][key]));
    match (&found["type"], &found["enum"]) {
        (Value::String(kind), _) => kind.clone(),
        (Value::Array(kinds), _) => kinds.iter().filter_map(Value::as_str).collect::<Vec<_>>().join(" or "),
        (_, Value::Array(_)) => "string".to_owned(),
        _ => panic!("values.schema.json has no type of {path}"),
    }
}

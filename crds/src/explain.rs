//! `rectrain explain FIELD|MODE`: the manual of one field or mode, from the schema and thus from the doc comments of the types.

use serde_json::Value;

use crate::check::{expected, meanings};
use crate::schema::{self, DEFAULT, default_text, properties};
use crate::suggest::nearest;
use crate::{FieldPath, Mode, ModeSpec};

/// There is nothing of that name to explain.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("there is no field or mode `{topic}`{hint}")]
pub struct ExplainError {
    /// What was asked for.
    pub topic: String,
    /// The nearest thing there is.
    hint: String,
}

const WIDTH: usize = 100;

/// Explains a field (`spec.training.globalBatchSize`, or without `spec.`) or a training mode (`hybrid`): type, default,
/// allowed values, meaning, rules, and the fields below it.
///
/// # Errors
/// If there is no such field or mode; the message names the nearest one.
pub fn explain(topic: &str) -> Result<String, ExplainError> {
    let topic = topic.trim();
    let modes = Mode::ALL.into_iter().map(ModeSpec::Fixed).chain([ModeSpec::Auto]);
    if let Some(mode) = modes.into_iter().find(|mode| mode.name() == topic) {
        return Ok(explain_mode(mode));
    }
    let path = FieldPath::parse(topic);
    let below_spec = FieldPath(FieldPath::parse("spec").0.into_iter().chain(path.0.iter().cloned()).collect());
    for path in [path, below_spec] {
        if let Some(schema) = schema::at(&path) {
            return Ok(page(&path, schema));
        }
    }
    Err(ExplainError { topic: topic.to_string(), hint: hint(topic) })
}

/// Explains a training mode in a paragraph.
pub fn explain_mode(mode: ModeSpec) -> String {
    let path = FieldPath::parse("spec.training.mode");
    let meaning = schema::at(&path).and_then(|schema| meanings(schema).find(|(value, _)| *value == mode.name()));
    let meaning = meaning.map(|(_, meaning)| meaning).unwrap_or_default();
    format!("MODE:  {mode}   (spec.training.mode={mode})\n\n{}", wrapped(meaning, ""))
}

fn hint(topic: &str) -> String {
    if crate::spec::REFUSED_MODES.contains(&topic) {
        return format!(
            ": this version does not run that training mode; it runs {}",
            Mode::ALL.map(Mode::name).join(" and ")
        );
    }
    let mut paths = Vec::new();
    collect(schema::annotated(), &FieldPath::root(), &mut paths);
    let last = topic.rsplit('.').next().unwrap_or(topic);
    let leaf = |path: &String| path.rsplit('.').next().unwrap_or_default().to_string();
    let exact = paths.iter().find(|path| leaf(path) == last).cloned();
    let near = || {
        let leaves: Vec<String> = paths.iter().map(leaf).collect();
        let meant = nearest(last, leaves.iter().map(String::as_str))?;
        paths.iter().find(|path| leaf(path) == meant).cloned()
    };
    exact.or_else(near).map(|path| format!("; did you mean `{path}`?")).unwrap_or_default()
}

fn collect(schema: &Value, path: &FieldPath, paths: &mut Vec<String>) {
    for (name, field) in properties(schema).into_iter().flatten() {
        let path = path.key(name);
        paths.push(path.to_string());
        collect(field, &path, paths);
    }
    if let Some(items) = schema.get("items") {
        collect(items, path, paths);
    }
}

fn page(path: &FieldPath, schema: &Value) -> String {
    let mut page = format!("FIELD:    {path} <{}>\n", type_name(schema));
    if let Some(default) = schema.get(DEFAULT) {
        page += &format!("DEFAULT:  {}\n", default_text(default));
    }
    if properties(schema).is_none() && schema.get("enum").is_none() {
        page += &format!("EXPECTED: {}\n", expected(schema));
    }
    page += &format!("\n{}", wrapped(description(schema), ""));
    section(&mut page, "VALUES", meanings(schema).map(|(value, meaning)| (value.to_string(), meaning.to_string())));
    let object = if properties(schema).is_some() { schema } else { schema.get("items").unwrap_or(schema) };
    let required = object.get("required").and_then(Value::as_array).cloned().unwrap_or_default();
    let fields = properties(object).into_iter().flatten().map(|(name, field)| {
        let mark = if required.iter().any(|r| r == name) { ", required" } else { "" };
        (format!("{name} <{}{mark}>", type_name(field)), first_sentence(description(field)).to_string())
    });
    section(&mut page, "FIELDS", fields);
    let rules = rules(schema).into_iter().chain(if std::ptr::eq(object, schema) { Vec::new() } else { rules(object) });
    section(&mut page, "RULES", rules.map(|rule| (rule, String::new())));
    page
}

fn section(page: &mut String, title: &str, entries: impl Iterator<Item = (String, String)>) {
    let mut text = String::new();
    for (name, meaning) in entries {
        text += &wrapped(&name, "  ");
        if !meaning.is_empty() {
            text += &wrapped(&meaning, "      ");
        }
    }
    if !text.is_empty() {
        *page += &format!("\n{title}:\n{text}");
    }
}

/// The sentences of the rules that a value must keep to.
pub(crate) fn rules(schema: &Value) -> Vec<String> {
    let rules = schema.get("x-kubernetes-validations").and_then(Value::as_array).into_iter().flatten();
    rules.filter_map(|rule| rule["message"].as_str()).map(str::to_string).collect()
}

/// The type of a field in a word: `integer`, `[]text`, `object`.
pub(crate) fn type_name(schema: &Value) -> String {
    match schema.get("type").and_then(Value::as_str) {
        Some("array") => format!("[]{}", schema.get("items").map(type_name).unwrap_or_default()),
        Some("object") if schema.get("additionalProperties").is_some() => "map".to_string(),
        Some(name) => name.to_string(),
        None => "integer or string".to_string(),
    }
}

/// What a field means.
pub(crate) fn description(schema: &Value) -> &str {
    schema.get("description").and_then(Value::as_str).unwrap_or_default()
}

fn first_sentence(text: &str) -> &str {
    text.find(". ").map_or(text, |end| &text[..=end])
}

/// Text in lines of at most [`WIDTH`] characters, each after `indent`; ends with a line break.
fn wrapped(text: &str, indent: &str) -> String {
    let mut lines = String::new();
    for paragraph in text.split('\n') {
        let mut line = String::new();
        for word in paragraph.split_whitespace() {
            if !line.is_empty() && indent.len() + line.chars().count() + 1 + word.chars().count() > WIDTH {
                lines += &format!("{indent}{line}\n");
                line.clear();
            }
            if !line.is_empty() {
                line.push(' ');
            }
            line += word;
        }
        lines += format!("{indent}{line}").trim_end();
        lines.push('\n');
    }
    lines
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_field_is_explained_with_type_default_range_and_meaning() {
        let page = explain("spec.training.globalBatchSize").unwrap();
        for part in [
            "spec.training.globalBatchSize <integer>",
            "DEFAULT:  4096",
            "an integer from 1 to 16777216",
            "over all dense workers",
        ] {
            assert!(page.contains(part), "{part}:\n{page}");
        }
        assert_eq!(explain("training.globalBatchSize").unwrap(), page, "`spec.` may be left out");
    }

    #[test]
    fn an_enum_is_explained_with_all_its_values() {
        let page = explain("spec.model.kind").unwrap();
        for kind in ["dlrm", "deepfm", "dnn", "wideDeep", "dcnV2", "fm", "lr"] {
            assert!(page.contains(&format!("\n  {kind}\n      ")), "{kind}:\n{page}");
        }
    }

    #[test]
    fn an_object_and_a_list_are_explained_with_their_fields_and_rules() {
        let page = explain("spec.data").unwrap();
        assert!(page.contains("\n  synthetic <object>\n") && page.contains("RULES:\n"), "{page}");
        let page = explain("spec.features.sparse").unwrap();
        assert!(page.contains("name <string, required>") && page.contains("<[]object>"), "{page}");
        assert_eq!(
            explain("spec.features.sparse.dim").unwrap(),
            explain("features.sparse[3].dim").unwrap().replace("[3]", "")
        );
    }

    #[test]
    fn every_mode_has_its_paragraph() {
        for mode in Mode::ALL {
            let page = explain(mode.name()).unwrap();
            assert!(page.len() > 150 && page.contains(&format!("spec.training.mode={mode}")), "{page}");
            assert_eq!(serde_json::to_value(mode).unwrap(), mode.name());
        }
    }

    #[test]
    fn what_does_not_exist_is_answered_with_the_nearest_that_does() {
        for (topic, hint) in [
            ("spec.training.globalBachSize", "did you mean `spec.training.globalBatchSize`?"),
            ("batchSize", "did you mean `spec.training.localBatchSize`?"),
            ("spec.hidden", "did you mean `spec.model.hidden`?"),
            ("des", "it runs sync and hybrid and async and gba"),
        ] {
            let error = explain(topic).unwrap_err().to_string();
            assert!(error.contains(topic) && error.contains(hint), "{error}");
        }
        assert_eq!(explain("qqqq").unwrap_err().to_string(), "there is no field or mode `qqqq`");
    }
}

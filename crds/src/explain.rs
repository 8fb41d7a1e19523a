//! `rectrain explain FIELD|KIND`: the manual of one field, kind or document, from the schema. So
//! its text comes from the doc comments of the types.

use serde_json::Value;

use crate::check::{expected, meanings};
use crate::examples::{KIND_FIELDS, KindExample, KindField};
use crate::field_examples::example_with;
use crate::schema::{self, DEFAULT, EXPECTED, default_text, properties};
use crate::simulation::simulation_schema;
use crate::suggest::nearest;
use crate::{FieldPath, Segment};

/// The topic is neither a field nor a kind.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("there is no field or kind `{topic}`{hint}")]
pub struct ExplainError {
    /// The topic.
    pub topic: String,
    /// The nearest field or kind.
    hint: String,
}

const WIDTH: usize = 100;

const SERVER: &str = "RecModelServer";
/// The names of this kind of object, as `kubectl` takes them.
const SERVER_NAMES: [&str; 3] = [SERVER, "rms", "recmodelservers"];
const SERVER_EXAMPLE: &str = "docs/examples/server.yaml";
/// The example of servers whose rows are in shards.
const SHARDS_EXAMPLE: &str = "docs/examples/sharded-server.yaml";

/// The most fields of one name that a message suggests.
const MOST_NAMESAKES: usize = 3;

/// Explains a field (`spec.training.globalBatchSize`, or without `spec.`): type, default, allowed
/// values, meaning, rules, and the fields below it. Or explains a kind (`hybrid`, `dlrm`, `adam`):
/// its meaning, with an example. Some names are kinds of several fields; all are explained. The
/// fields of a `RecModelServer` have its name before them: `RecModelServer.spec.model`.
///
/// # Errors
/// A topic that is neither. The message names the nearest field or kind.
pub fn explain(topic: &str) -> Result<String, ExplainError> {
    let topic = topic.trim();
    let kinds = kind_pages(topic);
    if !kinds.is_empty() {
        return Ok(kinds.join("\n"));
    }
    if let Some(document) = document(topic) {
        return Ok(document.page());
    }
    if let Some(page) = root_page(topic) {
        return Ok(page.to_string());
    }
    if let Some((path, schema)) = server_field(topic) {
        let example = example_of_server(&path);
        return Ok(page(&format!("{SERVER}.{path}"), schema) + &format!("\nEXAMPLE:\n  {example}\n"));
    }
    match field(topic) {
        Some((path, schema)) => {
            let example = example_of(&path, schema).or_else(|| example_with(&path));
            Ok(page(&path.to_string(), schema) + &example.unwrap_or_default())
        }
        None => Err(ExplainError { topic: topic.to_string(), hint: hint(topic) }),
    }
}

/// As [`explain`], with a list of all fields below the field or document.
///
/// # Errors
/// As [`explain`].
pub fn explain_all(topic: &str) -> Result<String, ExplainError> {
    let topic = topic.trim();
    let mut text = explain(topic)?;
    let mut fields = String::new();
    if let Some(document) = document(topic) {
        list_fields(document.schema, 1, &mut fields);
    } else if let Some((_, schema)) = server_field(topic).or_else(|| field(topic)) {
        list_fields(schema, 1, &mut fields);
    }
    if !fields.is_empty() {
        text += &format!("\nALL FIELDS:\n{fields}");
    }
    Ok(text)
}

/// The field with this path, with or without `spec.` before it.
fn field(topic: &str) -> Option<(FieldPath, &'static Value)> {
    field_in(schema::at, topic)
}

/// The field of a `RecModelServer` behind its name, with or without `spec.` before it.
fn server_field(topic: &str) -> Option<(FieldPath, &'static Value)> {
    let (document, field) = topic.split_once('.')?;
    if SERVER_NAMES.contains(&document) { field_in(schema::at_server, field) } else { None }
}

/// The example of a field of a `RecModelServer`.
fn example_of_server(path: &FieldPath) -> &'static str {
    let is_of_shards = path.to_string().starts_with("spec.shards");
    if is_of_shards { SHARDS_EXAMPLE } else { SERVER_EXAMPLE }
}

fn field_in(at: fn(&FieldPath) -> Option<&'static Value>, topic: &str) -> Option<(FieldPath, &'static Value)> {
    let path = FieldPath::parse(topic);
    let below_spec = FieldPath::parse("spec").join(&path);
    [path, below_spec].into_iter().filter(|path| !path.0.is_empty()).find_map(|path| {
        let schema = at(&path)?;
        Some((path, schema))
    })
}

/// Lists the fields of a schema with their types, indented by their depth.
fn list_fields(schema: &Value, depth: usize, into: &mut String) {
    let object = schema.get("items").unwrap_or(schema);
    for (name, field) in properties(object).into_iter().flatten() {
        *into += &format!("{}{name} <{}>\n", "  ".repeat(depth), type_name(field));
        list_fields(field, depth + 1, into);
    }
}

/// A kind of document, with its schema.
struct Document {
    kind: &'static str,
    purpose: &'static str,
    example: &'static str,
    schema: &'static Value,
}

fn document(topic: &str) -> Option<Document> {
    match topic {
        "RecTrainingJob" | "rtj" | "rectrainingjobs" => Some(Document {
            kind: "RecTrainingJob",
            purpose: "A training job: the one manifest that `rectrain run` reads and that `kubectl apply` puts into a \
                      cluster.",
            example: "docs/examples/minimal.yaml",
            schema: schema::annotated(),
        }),
        "Simulation" => Some(Document {
            kind: "Simulation",
            purpose: "The input of `rectrain simulate`: how many workers, how fast they are, and which training modes \
                      are compared.",
            example: "docs/examples/straggler.yaml",
            schema: simulation_schema(),
        }),
        name if SERVER_NAMES.contains(&name) => Some(Document {
            kind: SERVER,
            purpose: "Servers of a trained model in a cluster: the model of a job or of a path, and the number of \
                      servers. The operator runs them. `rectrain explain RecModelServer.spec.model` explains a field.",
            example: SERVER_EXAMPLE,
            schema: schema::annotated_server(),
        }),
        _ => None,
    }
}

impl Document {
    fn page(&self) -> String {
        let mut page = format!("DOCUMENT: {} (rectrain.dev/v1alpha1)\n\n{}", self.kind, wrapped(self.purpose, ""));
        page += "\nFIELDS:\n  apiVersion <string, required>\n      rectrain.dev/v1alpha1\n";
        page += &format!("  kind <string, required>\n      {}\n  metadata <object>\n      The name.\n", self.kind);
        let spec = properties(self.schema).and_then(|fields| fields.get("spec"));
        let fields = spec.and_then(properties).into_iter().flatten();
        let fields = fields.map(|(name, field)| {
            (format!("spec.{name} <{}>", type_name(field)), first_sentence(description(field)).to_string())
        });
        for (name, meaning) in fields {
            page += &wrapped(&name, "  ");
            page += &wrapped(&meaning, "      ");
        }
        page + &format!("\nEXAMPLE:\n  {}\n", self.example)
    }
}

/// The pages of the fields outside `spec`, which belong to Kubernetes.
fn root_page(topic: &str) -> Option<&'static str> {
    match topic {
        "metadata" => Some(METADATA),
        "metadata.name" => Some(METADATA_NAME),
        "apiVersion" => Some("FIELD:    apiVersion <string, required>\nEXPECTED: rectrain.dev/v1alpha1\n"),
        "kind" => Some("FIELD:    kind <string, required>\nEXPECTED: RecTrainingJob, RecModelServer or Simulation\n"),
        _ => None,
    }
}

const METADATA: &str = "\
FIELD:    metadata <object, required>

Kubernetes' metadata of the object. `rectrain run` reads only the name.

FIELDS:
  name <string, required>
      The job's name.
  namespace <string>
      The namespace in a cluster.
  labels, annotations <map>
      Labels and annotations in a cluster.

EXAMPLE:
  metadata: {name: clicks}
";

const METADATA_NAME: &str = "\
FIELD:    metadata.name <string, required>
EXPECTED: at most 35 characters: lower-case letters, digits and `-`, first a letter

The job's name. It begins the names of the job's pods. `rectrain status NAME` and `rectrain mode NAME`
find a running job by it.

EXAMPLE:
  metadata: {name: clicks}
";

/// How to set a field on the command line, with a value that it takes. `None` for objects, and for
/// texts without an example.
fn example_of(path: &FieldPath, schema: &Value) -> Option<String> {
    let value = match schema.get("type").and_then(Value::as_str)? {
        "boolean" => "true".to_string(),
        "integer" | "number" => {
            let default = schema.get(DEFAULT).filter(|default| default.is_number());
            default.or_else(|| schema.get("minimum")).map_or_else(|| "1".to_string(), default_text)
        }
        "string" => match schema.get("enum").and_then(Value::as_array) {
            Some(values) => values.first()?.as_str()?.to_string(),
            None => {
                let (_, example) = schema.get(EXPECTED)?.as_str()?.split_once("such as ")?;
                example.split([',', ' ']).next()?.to_string()
            }
        },
        _ => return None,
    };
    // A field below a list belongs to its entries.
    let mut place = FieldPath::root();
    for segment in &path.0 {
        let Segment::Key(name) = segment else { continue };
        place = place.key(name);
        let is_list = schema::at(&place)?.get("items").is_some();
        place = if is_list { place.index(0) } else { place };
    }
    Some(format!("\nEXAMPLE:\n  --set {place}={value}\n"))
}

/// The pages of all kinds with this name.
fn kind_pages(name: &str) -> Vec<String> {
    let mut pages = Vec::new();
    for field in &KIND_FIELDS {
        for example in field.examples.iter().filter(|example| example.kind == name) {
            pages.push(kind_page(field, example));
        }
    }
    pages
}

fn kind_page(field: &KindField, example: &KindExample) -> String {
    let KindExample { kind, spec } = example;
    let schema = schema::at(&FieldPath::parse(field.field));
    let meaning = schema.and_then(|schema| meanings(schema).find(|(value, _)| value == kind));
    let meaning = meaning.map(|(_, meaning)| meaning).unwrap_or_default();
    let spec: String = spec.lines().map(|line| format!("    {line}\n")).collect();
    format!(
        "KIND:     {kind} ({title})\nFIELD:    {path}={kind}\n\n{meaning}\nEXAMPLE:\n  spec:\n{spec}",
        title = field.title,
        path = field.field,
        meaning = wrapped(meaning, ""),
    )
}

fn hint(topic: &str) -> String {
    let paths = field_paths();
    let last = topic.rsplit('.').next().unwrap_or(topic);
    let namesakes: Vec<String> =
        paths.iter().filter(|path| leaf(path) == last).take(MOST_NAMESAKES).map(|path| format!("`{path}`")).collect();
    if !namesakes.is_empty() {
        return format!("; did you mean {}?", namesakes.join(" or "));
    }
    nearest_topic(last, &paths).map(|meant| format!("; did you mean `{meant}`?")).unwrap_or_default()
}

/// The field or kind with the nearest name.
fn nearest_topic<'a>(name: &str, paths: &'a [String]) -> Option<&'a str> {
    let leaves = paths.iter().map(|path| leaf(path));
    let kinds = KIND_FIELDS.iter().flat_map(|field| field.examples).map(|example| example.kind);
    let meant = nearest(name, leaves.chain(kinds))?;
    Some(paths.iter().find(|path| leaf(path) == meant).map_or(meant, String::as_str))
}

/// The last part of a path.
fn leaf(path: &str) -> &str {
    path.rsplit('.').next().unwrap_or(path)
}

/// The paths of all fields of the manifest and of their parts, such as `spec.data.csv.delimiter`.
/// The fields of a list's entries have the list's path before them, without an index.
#[must_use]
pub fn field_paths() -> Vec<String> {
    let mut paths = Vec::new();
    collect(schema::annotated(), &FieldPath::root(), &mut paths);
    paths
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

/// The page of a field, without an example.
fn page(name: &str, schema: &Value) -> String {
    let mut page = format!("FIELD:    {name} <{}>\n", type_name(schema));
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

/// The messages of the rules about a value.
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

/// The description of a field.
pub(crate) fn description(schema: &Value) -> &str {
    schema.get("description").and_then(Value::as_str).unwrap_or_default()
}

fn first_sentence(text: &str) -> &str {
    text.find(". ").map_or(text, |end| &text[..=end])
}

/// Wraps text to lines of at most [`WIDTH`] characters, each after `indent`. Ends with a line
/// break.
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
    use crate::{Mode, ModelKind};

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
        for kind in ModelKind::ALL {
            assert!(page.contains(&format!("\n  {kind}\n      ")), "{kind}:\n{page}");
        }
    }

    #[test]
    fn objects_and_lists_are_explained_with_fields_and_rules() {
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
    fn documents_and_their_metadata_are_explained() {
        for (topic, part) in [
            ("RecTrainingJob", "spec.training <object>"),
            ("Simulation", "spec.workers <[]integer>"),
            ("RecModelServer", "spec.model <object>"),
            ("rms", "docs/examples/server.yaml"),
            ("metadata", "name <string, required>"),
            ("metadata.name", "at most 35 characters"),
            ("apiVersion", "rectrain.dev/v1alpha1"),
        ] {
            let page = explain(topic).unwrap();
            assert!(page.contains(part), "{part}:\n{page}");
        }
    }

    #[test]
    fn fields_of_a_model_server_have_its_name_before_them() {
        let page = explain("RecModelServer.spec.updateEverySeconds").unwrap();
        assert!(page.starts_with("FIELD:    RecModelServer.spec.updateEverySeconds <integer>\n"), "{page}");
        assert!(page.ends_with("EXAMPLE:\n  docs/examples/server.yaml\n"), "{page}");
        assert_eq!(explain("rms.updateEverySeconds").unwrap(), page, "`spec.` may be left out");
        assert!(explain_all("rms.model").unwrap().contains("\nALL FIELDS:\n  job <string>\n"));
        for field in ["rms.shards", "rms.shards.count", "rms.shards.cacheRows"] {
            let page = explain(field).unwrap();
            assert!(page.ends_with("EXAMPLE:\n  docs/examples/sharded-server.yaml\n"), "{page}");
        }
        assert!(explain("rms.training").is_err() && explain("spec.updateEverySeconds").is_err());
    }

    #[test]
    fn all_fields_below_a_field_are_listed() {
        let page = explain_all("spec.training").unwrap();
        assert!(
            page.contains("\nALL FIELDS:\n") && page.contains("\n    dense <object>\n      beta1 <number>\n"),
            "{page}"
        );
        assert!(!explain_all("spec.training.seed").unwrap().contains("ALL FIELDS"));
        assert!(explain_all("RecTrainingJob").unwrap().contains("\n      globalBatchSize <integer>\n"));
    }

    #[test]
    fn a_field_has_an_example_that_can_be_set() {
        for (field, example) in [
            ("spec.training.globalBatchSize", "  --set spec.training.globalBatchSize=4096\n"),
            ("features.sparse.dim", "  --set spec.features.sparse[0].dim=1\n"),
            ("spec.training.mode", "  --set spec.training.mode=sync\n"),
        ] {
            assert!(explain(field).unwrap().ends_with(&format!("EXAMPLE:\n{example}")), "{}", explain(field).unwrap());
        }
    }

    #[test]
    fn a_field_in_the_wrong_place_is_found_by_its_last_name() {
        let error = explain("training.learningRate").unwrap_err().to_string();
        let hint = "did you mean `spec.training.optimizer.dense.learningRate` or \
                    `spec.training.optimizer.firstOrder.learningRate` or \
                    `spec.training.optimizer.sparse.learningRate`?";
        assert!(error.contains(hint), "{error}");
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
    fn a_kind_is_explained_with_its_field_meaning_and_example() {
        let page = explain("ftrl").unwrap();
        let expected =
            "KIND:     ftrl (sparse optimizer)\nFIELD:    spec.training.optimizer.sparse.kind=ftrl\n\nFTRL-proximal";
        assert!(page.starts_with(expected), "{page}");
        assert!(page.contains("\nEXAMPLE:\n  spec:\n    training:\n      optimizer:\n"), "{page}");
        let page = explain("adam").unwrap();
        assert!(page.contains("adam (dense optimizer)") && page.contains("adam (sparse optimizer)"), "{page}");
        let page = explain("bmuf").unwrap();
        assert!(page.contains("bmuf (algorithm of shadow)") && page.contains("mode: shadow\n"), "{page}");
    }

    #[test]
    fn an_unknown_topic_is_answered_with_the_nearest_one() {
        for (topic, hint) in [
            ("spec.training.globalBachSize", "did you mean `spec.training.globalBatchSize`?"),
            ("batchSize", "did you mean `spec.training.localBatchSize`?"),
            ("spec.hidden", "did you mean `spec.model.hidden`?"),
            ("deepFM", "did you mean `deepfm`?"),
            ("rowwiseadagrad", "did you mean `rowWiseAdaGrad`?"),
        ] {
            let error = explain(topic).unwrap_err().to_string();
            assert!(error.contains(topic) && error.contains(hint), "{error}");
        }
        assert_eq!(explain("qqqq").unwrap_err().to_string(), "there is no field or kind `qqqq`");
    }
}

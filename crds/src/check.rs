//! Checks the shape of a manifest against the schema: known fields, types, values, bounds, required
//! fields. The verdict is the API server's; the sentences also state the expectation.

use std::collections::HashMap;
use std::sync::LazyLock;

use parking_lot::Mutex;
use regex::Regex;
use serde_json::{Map, Value};

use crate::schema::{EXPECTED, OPEN, VALUES, annotated, properties};
use crate::suggest::{are_alike, near, nearest};
use crate::{FieldPath, Mode, ModeSpec, Segment, ShadowAlgorithm};

/// An error about one field.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{}{message}", named(.path))]
pub struct FieldError {
    /// The field.
    pub path: FieldPath,
    /// The problem, the expectation, and, where it helps, the remedy.
    pub message: String,
}

impl FieldError {
    /// `message` about the field at `path`.
    pub fn new(path: FieldPath, message: impl Into<String>) -> Self {
        Self { path, message: message.into() }
    }
}

/// The field before a message. The whole manifest has no name.
fn named(path: &FieldPath) -> String {
    if path.0.is_empty() { String::new() } else { format!("{path}: ") }
}

/// Further errors are not reported: users do not read more, and most have one cause.
pub(crate) const MAX_ERRORS: usize = 20;

/// The error for a job without `spec`.
pub(crate) const JOB_WITHOUT_SPEC: &str = "missing: `spec` describes the job: model, features and data are required";

/// Checks `spec` of a whole manifest against the schema. Null counts as absent.
pub(crate) fn check_spec(manifest: &Value) -> Vec<FieldError> {
    check_document(manifest, annotated(), JOB_WITHOUT_SPEC)
}

/// Checks a document of any kind. `document` is the schema of the whole document, and
/// `without_spec` the error if it has no `spec`.
pub(crate) fn check_document(manifest: &Value, document: &Value, without_spec: &str) -> Vec<FieldError> {
    let mut checker = Checker { document, errors: Vec::new() };
    let path = FieldPath::root().key("spec");
    match manifest.get("spec") {
        None | Some(Value::Null) => checker.report(&path, without_spec),
        Some(spec) => checker.node(spec, &document["properties"]["spec"], &path),
    }
    checker.errors
}

struct Checker<'a> {
    document: &'a Value,
    errors: Vec<FieldError>,
}

impl Checker<'_> {
    fn report(&mut self, path: &FieldPath, message: impl Into<String>) {
        if self.errors.len() < MAX_ERRORS {
            self.errors.push(FieldError::new(path.clone(), message));
        }
    }

    fn node(&mut self, value: &Value, schema: &Value, path: &FieldPath) {
        if schema.get("x-kubernetes-int-or-string").is_some() {
            if !(value.is_string() || value.is_i64() || value.is_u64()) {
                self.report(path, unexpected(schema, value));
            }
            return;
        }
        match (schema.get("type").and_then(Value::as_str), value) {
            (Some("object"), Value::Object(fields)) => self.object(fields, schema, path),
            (Some("array"), Value::Array(entries)) => self.array(entries, schema, path),
            (Some("string"), Value::String(text)) => self.text(text, schema, path),
            (Some("integer"), Value::Number(number)) if number.is_i64() || number.is_u64() => {
                self.number(value, number.as_f64(), schema, path);
            }
            (Some("number"), Value::Number(number)) => self.number(value, number.as_f64(), schema, path),
            (Some("boolean"), Value::Bool(_)) => {}
            _ => self.report(path, unexpected(schema, value)),
        }
    }

    fn object(&mut self, fields: &Map<String, Value>, schema: &Value, path: &FieldPath) {
        let present = |name: &str| fields.get(name).is_some_and(|value| !value.is_null());
        for name in schema.get("required").and_then(Value::as_array).into_iter().flatten().filter_map(Value::as_str) {
            if !present(name) {
                self.report(&path.key(name), missing(&schema["properties"][name]));
            }
        }
        let limit = schema.get("maxProperties").and_then(Value::as_u64);
        if let Some(limit) = limit.filter(|&limit| fields.len() as u64 > limit) {
            self.report(path, format!("expected at most {limit} entries, found {}", fields.len()));
        }
        let open = schema.get(OPEN).is_some();
        for (name, value) in fields.iter().filter(|(_, value)| !value.is_null()) {
            let path = path.key(name);
            match properties(schema).and_then(|known| known.get(name)).or(schema.get("additionalProperties")) {
                Some(field) => self.node(value, field, &path),
                None if open => {}
                None => self.report(&path, unknown(name, schema, self.document, &path)),
            }
        }
    }

    fn array(&mut self, entries: &[Value], schema: &Value, path: &FieldPath) {
        let bound = |keyword: &str| schema.get(keyword).and_then(Value::as_u64);
        let length = entries.len() as u64;
        if let Some(least) = bound("minItems").filter(|&least| length < least) {
            self.report(
                path,
                format!("expected at least {least} {}, found {length}", plural(least, "entry", "entries")),
            );
        }
        if let Some(most) = bound("maxItems").filter(|&most| length > most) {
            self.report(path, format!("expected at most {most} entries, found {length}"));
            return;
        }
        let items = schema.get("items").unwrap_or(&Value::Null);
        for (index, entry) in entries.iter().enumerate() {
            self.node(entry, items, &path.index(index));
        }
    }

    fn text(&mut self, text: &str, schema: &Value, path: &FieldPath) {
        if let Some(values) = schema.get("enum").and_then(Value::as_array) {
            if !values.iter().any(|value| value.as_str() == Some(text)) {
                self.report(path, not_one_of(text, values, path));
            }
            return;
        }
        let bound = |keyword: &str| schema.get(keyword).and_then(Value::as_u64);
        let length = text.chars().count() as u64;
        if bound("minLength").is_some_and(|least| length < least) {
            self.report(path, format!("expected {}, found an empty text", expected(schema)));
        } else if let Some(most) = bound("maxLength").filter(|&most| length > most) {
            let unit = plural(most, "character", "characters");
            self.report(path, format!("expected at most {most} {unit}, found {length}"));
        } else if schema.get("pattern").and_then(Value::as_str).is_some_and(|pattern| !matches(pattern, text)) {
            self.report(path, format!("expected {}, found `{}`", expected(schema), shorten(text)));
        }
    }

    fn number(&mut self, value: &Value, number: Option<f64>, schema: &Value, path: &FieldPath) {
        let bound = |keyword: &str| schema.get(keyword).and_then(Value::as_f64);
        let Some(number) = number else { return };
        if bound("minimum").is_some_and(|least| number < least) || bound("maximum").is_some_and(|most| number > most) {
            self.report(path, unexpected(schema, value));
        }
    }
}

/// "expected an integer from 1 to 4096, found the text `abc`".
fn unexpected(schema: &Value, value: &Value) -> String {
    let hint = match (schema.get("type").and_then(Value::as_str), value) {
        // YAML reads words such as NULL as null.
        (Some("string"), Value::Null) => return format!("expected {}, found null; put it in quotes", expected(schema)),
        (Some("string"), Value::Number(_) | Value::Bool(_)) => "; put it in quotes",
        (None, Value::Number(_)) if schema.get(EXPECTED).is_none() => "; put it in quotes",
        _ => "",
    };
    format!("expected {}, found {}{hint}", expected(schema), found(value))
}

/// The values that a schema admits, in words.
pub(crate) fn expected(schema: &Value) -> String {
    if let Some(words) = schema.get(EXPECTED).and_then(Value::as_str) {
        return words.to_string();
    }
    if let Some(values) = schema.get("enum").and_then(Value::as_array) {
        return one_of(values);
    }
    match schema.get("type").and_then(Value::as_str) {
        None => "a quantity such as 500m, 2 or 16Gi".to_string(),
        Some("integer") => format!("an integer{}", range(schema)),
        Some("number") => format!("a number{}", range(schema)),
        Some("boolean") => "true or false".to_string(),
        Some("string") => "text".to_string(),
        Some("array") => match schema.get("items").map(expected) {
            Some(items) => format!("a list, each entry {items}"),
            None => "a list".to_string(),
        },
        Some("object") => match properties(schema) {
            Some(fields) => format!("an object with the fields {}", listed(fields.keys().map(String::as_str))),
            None => "an object".to_string(),
        },
        _ => "a value".to_string(),
    }
}

fn range(schema: &Value) -> String {
    let bound = |keyword: &str| schema.get(keyword).map(crate::schema::default_text);
    match (bound("minimum"), bound("maximum")) {
        (Some(least), Some(most)) if least == most => format!(", namely {least}"),
        (Some(least), Some(most)) => format!(" from {least} to {most}"),
        (Some(least), None) => format!(" of at least {least}"),
        (None, Some(most)) => format!(" of at most {most}"),
        (None, None) => String::new(),
    }
}

/// A value, in words.
pub(crate) fn found(value: &Value) -> String {
    match value {
        Value::Null => "nothing".to_string(),
        Value::Bool(value) => value.to_string(),
        Value::Number(number) => number.to_string(),
        Value::String(text) => format!("the text `{}`", shorten(text)),
        Value::Array(entries) => format!("a list of {}", entries.len()),
        Value::Object(_) => "an object".to_string(),
    }
}

fn missing(schema: &Value) -> String {
    let description = schema.get("description").and_then(Value::as_str).unwrap_or_default();
    let purpose = description.split(". ").next().unwrap_or_default().trim_end_matches('.');
    let values = schema.get("enum").and_then(Value::as_array).map(|values| format!("; expected {}", one_of(values)));
    format!("missing, and required: {}{}", lower_first(purpose), values.unwrap_or_default())
}

fn lower_first(text: &str) -> String {
    let mut chars = text.chars();
    chars.next().map_or_else(String::new, |first| first.to_lowercase().chain(chars).collect())
}

fn unknown(name: &str, schema: &Value, document: &Value, path: &FieldPath) -> String {
    let siblings = || properties(schema).into_iter().flatten().map(|(name, _)| name.as_str());
    let meant: Vec<String> = near(name, siblings()).iter().map(|meant| format!("`{meant}`")).collect();
    if !meant.is_empty() {
        return format!("unknown field; did you mean {}?", meant.join(" or "));
    }
    let parent = FieldPath(path.0[..path.0.len() - 1].to_vec());
    let count = siblings().count();
    // An object with so few fields is known from their names: a namesake elsewhere would mislead.
    let is_small = (1..=2).contains(&count);
    let places = if is_small { Vec::new() } else { elsewhere(name, document, &parent) };
    if !places.is_empty() {
        let places: Vec<String> = places.iter().map(|place| format!("`{place}`")).collect();
        return format!("unknown field here; did you mean {}?", places.join(" or "));
    }
    if count == 0 {
        return "unknown field: no fields are expected here".to_string();
    }
    format!("unknown field; `{parent}` has the {} {}", plural(count as u64, "field", "fields"), listed(siblings()))
}

/// The most fields of one name that a message suggests.
const MOST_PLACES: usize = 3;

/// The fields of `spec` with this name, if there are few: those below `parent`, or else all.
fn elsewhere(name: &str, document: &Value, parent: &FieldPath) -> Vec<FieldPath> {
    fn collect(name: &str, schema: &Value, path: &FieldPath, places: &mut Vec<FieldPath>) {
        for (field, child) in properties(schema).into_iter().flatten() {
            let path = path.key(field);
            if are_alike(field, name) {
                places.push(path.clone());
            }
            collect(name, child, &path, places);
        }
        if let Some(items) = schema.get("items") {
            collect(name, items, path, places);
        }
    }
    let mut places = Vec::new();
    collect(name, &document["properties"]["spec"], &FieldPath::root().key("spec"), &mut places);
    if places.iter().any(|place| parent.contains(place)) {
        places.retain(|place| parent.contains(place));
    }
    if places.len() <= MOST_PLACES { places } else { Vec::new() }
}

fn not_one_of(text: &str, values: &[Value], path: &FieldPath) -> String {
    let is_mode = path.0.last() == Some(&Segment::Key("mode".to_string()));
    if is_mode && ShadowAlgorithm::ALL.iter().any(|algorithm| algorithm.name() == text) {
        return format!(
            "`{text}` is an algorithm of the mode `shadow`: set spec.training.mode to `shadow` and spec.training.shadow.algorithm to `{text}`"
        );
    }
    let is_switch = is_mode && values.iter().any(|value| value.as_str() == Some(Mode::Gba.name()));
    if is_switch && text == ModeSpec::Auto.name() {
        return format!("a step cannot switch to `auto`: expected {}, or spec.training.mode: auto", one_of(values));
    }
    let meant = nearest(text, values.iter().filter_map(Value::as_str));
    let hint = meant.map(|meant| format!("; did you mean `{meant}`?")).unwrap_or_default();
    format!("expected {}, found `{}`{hint}", one_of(values), shorten(text))
}

/// "one of `a`, `b` and `c`", or "`a`".
fn one_of(values: &[Value]) -> String {
    match values {
        [only] => format!("`{}`", only.as_str().unwrap_or_default()),
        _ => format!("one of {}", listed(values.iter().filter_map(Value::as_str))),
    }
}

/// "`a`, `b` and `c`".
fn listed<'a>(names: impl Iterator<Item = &'a str>) -> String {
    let names: Vec<String> = names.map(|name| format!("`{name}`")).collect();
    match names.as_slice() {
        [] => String::new(),
        [only] => only.clone(),
        [all @ .., last] => format!("{} and {last}", all.join(", ")),
    }
}

fn plural(count: u64, one: &'static str, many: &'static str) -> &'static str {
    if count == 1 { one } else { many }
}

/// The start of a text, long enough to recognise it.
fn shorten(text: &str) -> String {
    let mut chars = text.chars();
    let start: String = chars.by_ref().take(60).map(|c| if c.is_control() { ' ' } else { c }).collect();
    if chars.next().is_some() { format!("{start}…") } else { start }
}

/// Matches `text` against a pattern of the schema. The few patterns are compiled once.
fn matches(pattern: &str, text: &str) -> bool {
    static PATTERNS: LazyLock<Mutex<HashMap<String, Option<Regex>>>> = LazyLock::new(Mutex::default);
    let mut patterns = PATTERNS.lock();
    let regex = patterns.entry(pattern.to_string()).or_insert_with(|| Regex::new(pattern).ok());
    regex.as_ref().is_some_and(|regex| regex.is_match(text))
}

/// The values of the enum at `schema`, with their meanings.
pub(crate) fn meanings(schema: &Value) -> impl Iterator<Item = (&str, &str)> {
    let values = schema.get("enum").and_then(Value::as_array).into_iter().flatten().filter_map(Value::as_str);
    values.map(|value| (value, schema[VALUES][value].as_str().unwrap_or_default()))
}

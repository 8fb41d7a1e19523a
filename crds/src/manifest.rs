//! Reads the text of a manifest into a [`RecTrainingJob`], strictly. An unknown field, a value of
//! the wrong type or a duplicate name is an error with its position. `--set` overrides are applied
//! in between, and an error caused by an override names the override instead of a line.

use std::fmt;

use serde::Deserialize;
use serde_json::{Map, Value};
use serde_yaml::Value as Yaml;

use crate::locate::locate;
use crate::schema::annotated;
use crate::set_aside::set_aside;
use crate::suggest::nearest;
use crate::syntax::{Explained, explain_syntax};
use crate::template::template_errors;
use crate::typed::typed;
use crate::{FieldError, FieldPath, RecTrainingJob, ResolvedJob, SetError, SetKind, apply_set, check, validate, words};

/// One `--set` or `--set-string` of the command line.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Override {
    /// The flag.
    pub kind: SetKind,
    /// The expression, such as `spec.training.mode=hybrid`.
    pub expression: String,
}

/// A manifest that was read and validated.
#[derive(Clone, Debug, PartialEq)]
pub struct Manifest {
    /// The object as written, with overrides applied.
    pub job: RecTrainingJob,
    /// The same job with every default filled in.
    pub resolved: ResolvedJob,
    /// A sentence for each setting of the file that was set aside, because an override chose a kind
    /// without it.
    pub set_aside: Vec<String>,
    /// A sentence for each word of the file that `kubectl` reads as true or false, because it has
    /// no quotes.
    pub unquoted: Vec<String>,
}

impl Manifest {
    /// The object as written, with overrides applied, as YAML that `kubectl` reads the same way.
    /// `None` if it cannot be written; no manifest that was read causes that.
    #[must_use]
    pub fn to_yaml(&self) -> Option<String> {
        let mut object = serde_yaml::to_value(&self.job).ok()?;
        drop_nulls(&mut object);
        let written = serde_yaml::to_string(&object).ok()?;
        let quoted = words::quoted(&written);
        // A text of several lines may have a line that is such a word, and it must not change.
        let is_equal = serde_yaml::from_str::<Yaml>(&quoted).is_ok_and(|again| again == object);
        Some(if is_equal { quoted } else { written })
    }
}

/// Removes the fields that the manifest left out.
fn drop_nulls(value: &mut serde_yaml::Value) {
    match value {
        serde_yaml::Value::Mapping(fields) => {
            fields.retain(|_, field| !field.is_null());
            fields.iter_mut().for_each(|(_, field)| drop_nulls(field));
        }
        serde_yaml::Value::Sequence(entries) => entries.iter_mut().for_each(drop_nulls),
        _ => {}
    }
}

/// Why a manifest was refused. The message names file, line and field, and states the expectation.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum ManifestError {
    /// The text is not YAML.
    #[error("{origin}: this is not valid YAML: {reason}")]
    Syntax {
        /// The file and the line.
        origin: Origin,
        /// The YAML parser's message.
        reason: String,
    },
    /// The file has no document.
    #[error("{file}: the file is empty: expected one {kind}, such as {example}")]
    Empty {
        /// The file.
        file: String,
        /// The expected kind of document.
        kind: &'static str,
        /// The path of an example.
        example: &'static str,
    },
    /// The file has several documents.
    #[error(
        "{file}: expected one {kind}, found several YAML documents (separated by `---`): put each into a file of its own"
    )]
    SeveralDocuments {
        /// The file.
        file: String,
        /// The expected kind of document.
        kind: &'static str,
    },
    /// An override cannot be applied.
    #[error(transparent)]
    Override(#[from] SetError),
    /// Fields are wrong.
    #[error("{}", .errors.iter().map(ToString::to_string).collect::<Vec<_>>().join("\n"))]
    Fields {
        /// The errors; at least one.
        errors: Vec<LocatedError>,
    },
}

/// The source of a wrong value.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Origin {
    /// The file. Line and column count from 1, if they are known.
    File {
        /// The file.
        file: String,
        /// Line and column.
        place: Option<(usize, usize)>,
    },
    /// An override on the command line.
    Override(Override),
}

impl fmt::Display for Origin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Origin::File { file, place: Some((line, column)) } => write!(f, "{file}:{line}:{column}"),
            Origin::File { file, place: None } => f.write_str(file),
            Origin::Override(set) => write!(f, "{} {}", set.kind.flag(), set.expression),
        }
    }
}

/// An error about a field, with the source of its value.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{origin}: {error}")]
pub struct LocatedError {
    /// The source of the value.
    pub origin: Origin,
    /// The error.
    pub error: FieldError,
}

/// Reads a manifest. Errors call it `file`.
///
/// # Errors
/// Text that is not YAML, not one document, or not a `RecTrainingJob`. Fields that are unknown,
/// missing, of the wrong type or out of bounds. [`validate`] finds contradictions between fields.
pub fn parse_manifest(text: &str, file: &str) -> Result<RecTrainingJob, ManifestError> {
    parse_manifest_with(text, file, &[])
}

/// Reads a manifest and applies overrides to it, in order.
///
/// # Errors
/// Like [`parse_manifest`], and an override that cannot be applied.
pub fn parse_manifest_with(text: &str, file: &str, overrides: &[Override]) -> Result<RecTrainingJob, ManifestError> {
    let (job, ..) = read(text, file, overrides)?;
    Ok(job)
}

/// Reads a manifest, applies overrides, and validates the result, for `rectrain run` and `rectrain
/// validate`.
///
/// # Errors
/// Like [`parse_manifest_with`], and everything that [`validate`] finds, with its line.
pub fn load(text: &str, file: &str, overrides: &[Override]) -> Result<Manifest, ManifestError> {
    let (job, sources, set_aside) = read(text, file, overrides)?;
    match validate(&job) {
        Ok(resolved) => Ok(Manifest { job, resolved, set_aside, unquoted: sources.unquoted }),
        Err(errors) => Err(sources.locate(errors)),
    }
}

fn read<'a>(
    text: &'a str,
    file: &'a str,
    overrides: &'a [Override],
) -> Result<(RecTrainingJob, Sources<'a>, Vec<String>), ManifestError> {
    let (mut manifest, sources) = read_document(&JOB, text, file, overrides)?;
    let overridden: Vec<FieldPath> = sources.set.iter().map(|(path, _)| path.clone()).collect();
    let set_aside = set_aside(&mut manifest, &overridden);
    let job = typed(manifest, &FieldPath::parse("spec")).map_err(|errors| sources.locate(errors))?;
    match template_errors(&job) {
        errors if errors.is_empty() => Ok((job, sources, set_aside)),
        errors => Err(sources.locate(errors)),
    }
}

/// A kind of document, and the checks of its text.
pub(crate) struct DocumentKind {
    /// `kind`.
    pub(crate) name: &'static str,
    /// The path of an example.
    pub(crate) example: &'static str,
    /// True if `metadata` with a name is required.
    pub(crate) named: bool,
    /// The error if `spec` is missing.
    pub(crate) without_spec: &'static str,
    /// The annotated schema of the whole document.
    pub(crate) schema: fn() -> &'static Value,
    /// Expands shorthands, after overrides are applied.
    pub(crate) prepare: fn(&mut Value),
}

const JOB: DocumentKind = DocumentKind {
    name: "RecTrainingJob",
    example: "docs/examples/minimal.yaml",
    named: true,
    without_spec: check::JOB_WITHOUT_SPEC,
    schema: annotated,
    prepare: |_| {},
};

/// Reads a document of `kind`, applies overrides, and checks it against the kind's schema.
pub(crate) fn read_document<'a>(
    kind: &'static DocumentKind,
    text: &'a str,
    file: &'a str,
    overrides: &'a [Override],
) -> Result<(Value, Sources<'a>), ManifestError> {
    // Editors on Windows begin a file with a byte-order mark, which YAML allows.
    let text = text.strip_prefix('\u{feff}').unwrap_or(text);
    let mut sources = Sources { kind, text, file, set: Vec::new(), unquoted: Vec::new() };
    let yaml = sources.document()?;
    let mut manifest = to_json(yaml, &FieldPath::root()).map_err(|error| sources.locate(vec![error]))?;
    prune(&mut manifest);
    sources.unquoted = words::warnings(&manifest, text, file);
    for set in overrides {
        for path in apply_set(&mut manifest, &set.expression, set.kind)? {
            sources.set.push((path, set));
        }
    }
    (kind.prepare)(&mut manifest);
    let errors = check_root(kind, &manifest);
    if !errors.is_empty() {
        return Err(sources.locate(errors));
    }
    Ok((manifest, sources))
}

/// The sources of a document's values.
#[derive(Clone)]
pub(crate) struct Sources<'a> {
    kind: &'static DocumentKind,
    text: &'a str,
    file: &'a str,
    set: Vec<(FieldPath, &'a Override)>,
    /// A sentence for each word of the text that needs quotes.
    unquoted: Vec<String>,
}

impl Sources<'_> {
    /// The one document of the text. Empty documents (comments before a `---`) do not count.
    fn document(&self) -> Result<Yaml, ManifestError> {
        let mut found = None;
        for document in serde_yaml::Deserializer::from_str(self.text) {
            let value = Yaml::deserialize(document).map_err(|error| self.syntax(&error))?;
            if value.is_null() {
                continue;
            }
            if found.replace(value).is_some() {
                return Err(ManifestError::SeveralDocuments { file: self.file.to_string(), kind: self.kind.name });
            }
        }
        let DocumentKind { name: kind, example, .. } = *self.kind;
        let mut value = found.ok_or_else(|| ManifestError::Empty { file: self.file.to_string(), kind, example })?;
        value.apply_merge().map_err(|error| self.syntax(&error))?;
        Ok(value)
    }

    fn syntax(&self, error: &serde_yaml::Error) -> ManifestError {
        let place = error.location().map(|location| (location.line(), location.column()));
        let message = error.to_string();
        // The parser appends the position in its own words. `origin` already has it.
        let reason = message.split(" at line ").next().unwrap_or(&message);
        let Explained { place, reason } = explain_syntax(self.text, place, reason);
        ManifestError::Syntax { origin: Origin::File { file: self.file.to_string(), place }, reason }
    }

    pub(crate) fn locate(&self, errors: Vec<FieldError>) -> ManifestError {
        let errors = errors.into_iter().map(|error| LocatedError { origin: self.origin(&error.path), error }).collect();
        ManifestError::Fields { errors }
    }

    /// The last override that set the field, an object around it or a part of it. Otherwise its
    /// line.
    fn origin(&self, path: &FieldPath) -> Origin {
        let set = self.set.iter().rev().find(|(set, _)| set.contains(path) || path.contains(set) && path.0.len() > 1);
        match set {
            Some((_, set)) => Origin::Override((*set).clone()),
            None => Origin::File { file: self.file.to_string(), place: locate(self.text, path) },
        }
    }
}

/// Converts YAML to JSON, which has only texts as names and only finite numbers.
fn to_json(yaml: Yaml, path: &FieldPath) -> Result<Value, FieldError> {
    match yaml {
        Yaml::Null => Ok(Value::Null),
        Yaml::Bool(value) => Ok(value.into()),
        Yaml::String(text) => Ok(text.into()),
        Yaml::Number(number) => to_number(&number, path),
        Yaml::Sequence(entries) => {
            let entries = entries.into_iter().enumerate();
            entries
                .map(|(index, entry)| to_json(entry, &path.index(index)))
                .collect::<Result<Vec<_>, _>>()
                .map(Value::Array)
        }
        Yaml::Mapping(fields) => {
            let mut object = Map::new();
            for (name, value) in fields {
                let Yaml::String(name) = name else {
                    return Err(FieldError::new(path.clone(), "the name of a field is not text: put it in quotes"));
                };
                let value = to_json(value, &path.key(&name))?;
                object.insert(name, value);
            }
            Ok(Value::Object(object))
        }
        Yaml::Tagged(tagged) => Err(FieldError::new(
            path.clone(),
            format!("the YAML tag `{}` is not expected: write the value without it", tagged.tag),
        )),
    }
}

fn to_number(number: &serde_yaml::Number, path: &FieldPath) -> Result<Value, FieldError> {
    let integer = number.as_i64().map(Value::from).or_else(|| number.as_u64().map(Value::from));
    let float = || number.as_f64().and_then(serde_json::Number::from_f64).map(Value::Number);
    integer
        .or_else(float)
        .ok_or_else(|| FieldError::new(path.clone(), format!("expected a finite number, found {number}")))
}

/// Removes null fields, as the API server does: `seed:` without a value is no seed.
fn prune(value: &mut Value) {
    match value {
        Value::Object(fields) => {
            fields.retain(|_, field| !field.is_null());
            fields.values_mut().for_each(prune);
        }
        Value::Array(entries) => entries.iter_mut().for_each(prune),
        _ => {}
    }
}

const API_VERSION: &str = "rectrain.dev/v1alpha1";
const ROOT_FIELDS: [&str; 5] = ["apiVersion", "kind", "metadata", "spec", "status"];
/// The fields of Kubernetes' ObjectMeta.
const METADATA_FIELDS: [&str; 15] = [
    "annotations",
    "creationTimestamp",
    "deletionGracePeriodSeconds",
    "deletionTimestamp",
    "finalizers",
    "generateName",
    "generation",
    "labels",
    "managedFields",
    "name",
    "namespace",
    "ownerReferences",
    "resourceVersion",
    "selfLink",
    "uid",
];

fn check_root(kind: &DocumentKind, manifest: &Value) -> Vec<FieldError> {
    let root = FieldPath::root();
    let Some(fields) = manifest.as_object() else {
        let found = check::found(manifest);
        return vec![FieldError::new(
            root,
            format!("expected a {} with {}, found {found}", kind.name, ROOT_FIELDS[..4].join(", ")),
        )];
    };
    let mut errors = Vec::new();
    for (field, wanted) in [("apiVersion", API_VERSION), ("kind", kind.name)] {
        match fields.get(field) {
            Some(Value::String(found)) if found == wanted => {}
            Some(found) => errors
                .push(FieldError::new(root.key(field), format!("expected `{wanted}`, found {}", check::found(found)))),
            None => errors.push(FieldError::new(root.key(field), format!("missing: expected `{field}: {wanted}`"))),
        }
    }
    if !errors.is_empty() {
        return errors;
    }
    errors.extend(unknown_names(fields, &ROOT_FIELDS, &root));
    match fields.get("metadata") {
        Some(Value::Object(metadata)) => {
            errors.extend(unknown_names(metadata, &METADATA_FIELDS, &root.key("metadata")))
        }
        Some(other) => {
            errors.push(FieldError::new(
                root.key("metadata"),
                format!("expected an object with the field `name`, found {}", check::found(other)),
            ));
        }
        None if !kind.named => {}
        None => errors.push(FieldError::new(
            root.key("metadata"),
            "missing: expected the job's name, such as `metadata: {name: my-job}`",
        )),
    }
    errors.extend(check::check_document(manifest, (kind.schema)(), kind.without_spec));
    errors.truncate(check::MAX_ERRORS);
    errors
}

fn unknown_names(fields: &Map<String, Value>, known: &[&str], path: &FieldPath) -> Vec<FieldError> {
    let unknown = fields.keys().filter(|name| !known.contains(&name.as_str()));
    let errors = unknown.map(|name| {
        let hint = match nearest(name, known.iter().copied()) {
            Some(meant) => format!("unknown field; did you mean `{meant}`?"),
            None => format!("unknown field; expected one of {}", known.join(", ")),
        };
        FieldError::new(path.key(name), hint)
    });
    errors.collect()
}

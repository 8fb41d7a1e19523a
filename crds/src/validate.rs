//! Validation of a job: the schema first (types, bounds). If that finds no error, its CEL rules
//! (contradictions within an object), and the rules that only Rust can check ([`crate::resolve`]).
//! The API server evaluates the first two; this module evaluates them from the same schema.

use kube::core::cel::{CompiledSchema, Validator, compile_schema};
use serde_json::Value;

use crate::resolve::resolve;
use crate::template::template_errors;
use crate::{FieldError, FieldPath, RecTrainingJob, ResolvedJob, check, schema};

/// Checks a job and fills in its defaults.
///
/// # Errors
/// Up to 20 errors, each with its field and the expectation.
pub fn validate(job: &RecTrainingJob) -> Result<ResolvedJob, Vec<FieldError>> {
    let object = as_value(job)?;
    let mut errors = name_errors(job);
    errors.extend(check::check_spec(&object));
    errors.extend(template_errors(job));
    if !errors.is_empty() {
        return Err(errors);
    }
    let rules = rule_errors(&object, None);
    let resolved = resolve(job);
    if rules.is_empty() { resolved } else { Err(refined(rules, resolved.err().unwrap_or_default())) }
}

/// Replaces the error of a rule by more precise ones. A rule about features can name the list, but
/// not the entry that breaks it. If Rust found the entry, its errors are used instead. Other errors
/// that Rust found may just follow from the broken rule, so they are dropped.
fn refined(rules: Vec<FieldError>, details: Vec<FieldError>) -> Vec<FieldError> {
    let features = FieldPath::parse("spec.features");
    let mut errors = Vec::new();
    for rule in rules {
        let within = |detail: &&FieldError| {
            features.contains(&rule.path) && rule.path.contains(&detail.path) && detail.path != rule.path
        };
        let details: Vec<_> =
            details.iter().filter(within).filter(|detail| !errors.contains(*detail)).cloned().collect();
        if details.is_empty() {
            errors.push(rule);
        } else {
            errors.extend(details);
        }
    }
    errors
}

/// Checks a change of an existing job: like [`validate`], and also the fields that cannot be
/// changed.
///
/// # Errors
/// Like [`validate`].
pub fn validate_update(job: &RecTrainingJob, old: &RecTrainingJob) -> Result<ResolvedJob, Vec<FieldError>> {
    let resolved = validate(job)?;
    let errors = rule_errors(&as_value(job)?, Some(&as_value(old)?));
    if errors.is_empty() { Ok(resolved) } else { Err(errors) }
}

fn as_value(job: &RecTrainingJob) -> Result<Value, Vec<FieldError>> {
    serde_json::to_value(job)
        .map_err(|error| vec![FieldError::new(FieldPath::root(), format!("it cannot be written as JSON: {error}"))])
}

fn name_errors(job: &RecTrainingJob) -> Vec<FieldError> {
    if job.metadata.name.as_ref().is_some_and(|name| !name.is_empty()) {
        return Vec::new();
    }
    vec![FieldError::new(FieldPath::parse("metadata.name"), "missing: expected the job's name, such as `name: my-job`")]
}

/// The CEL rules that the object breaks. With an `old` object, also the rules about changes.
fn rule_errors(object: &Value, old: Option<&Value>) -> Vec<FieldError> {
    thread_local! {
        // Threads cannot share programs and validator. Compiling them takes milliseconds.
        static RULES: (Validator, CompiledSchema) = (Validator::new(), compile_schema(schema::annotated()));
    }
    let broken = RULES.with(|(validator, rules)| validator.validate_compiled(rules, object, old));
    let errors = broken.err().map(|errors| errors.into_vec()).unwrap_or_default();
    errors
        .into_iter()
        .take(check::MAX_ERRORS)
        .map(|error| FieldError::new(rule_path(&error.field_path), error.message))
        .collect()
}

/// The field of a rule. The only rules at the root are about the name: rules can read nothing else
/// of `metadata`, and a rule there cannot name its field.
fn rule_path(path: &str) -> FieldPath {
    FieldPath::parse(if path.is_empty() { "metadata.name" } else { path })
}

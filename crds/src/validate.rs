//! Whether a job can be run as it stands. First the schema (types, bounds); then, if that finds nothing, its CEL rules (what
//! contradicts within the object) and what only Rust can say ([`crate::resolve`]). The first two are what the API server does,
//! evaluated here from the same schema.

use k8s_openapi::api::core::v1::{
    Affinity, EnvVar, LocalObjectReference, Toleration, TopologySpreadConstraint, Volume, VolumeMount,
};
use kube::core::cel::{CompiledSchema, Validator, compile_schema};
use serde::de::DeserializeOwned;
use serde_json::Value;

use crate::manifest::typed;
use crate::resolve::resolve;
use crate::{FieldError, FieldPath, PodTemplate, RecTrainingJob, ResolvedJob, check, schema};

/// Checks a job and fills in what it leaves open.
///
/// # Errors
/// Everything that is wrong with the job, up to 20 errors, each with its field and what was expected there.
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

/// A rule about features can name the list, but not the entry of it that breaks the rule. Where Rust has found the entry, its
/// errors take the place of the rule's; whatever else it has found may only follow from the broken rule.
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

/// Checks a change to a job that exists: everything that [`validate`] checks, and the fields that cannot be changed.
///
/// # Errors
/// As [`validate`].
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

/// What is wrong with the parts of pod templates that are in Kubernetes' own form: types and misspellings.
pub(crate) fn template_errors(job: &RecTrainingJob) -> Vec<FieldError> {
    let Some(roles) = &job.spec.roles else { return Vec::new() };
    let errors = roles.templates().into_iter().filter_map(|(role, template)| {
        Some(errors_of_template(template?, &FieldPath::parse(&format!("spec.roles.{role}.template"))))
    });
    errors.flatten().take(check::MAX_ERRORS).collect()
}

fn errors_of_template(template: &PodTemplate, at: &FieldPath) -> Vec<FieldError> {
    let mut errors = each_as_kubernetes_has_it::<Toleration>(&template.tolerations, &at.key("tolerations"));
    errors.extend(
        template.affinity.iter().flat_map(|value| as_kubernetes_has_it::<Affinity>(value, &at.key("affinity"))),
    );
    let spread = &template.topology_spread_constraints;
    errors.extend(each_as_kubernetes_has_it::<TopologySpreadConstraint>(spread, &at.key("topologySpreadConstraints")));
    let secrets = &template.image_pull_secrets;
    errors.extend(each_as_kubernetes_has_it::<LocalObjectReference>(secrets, &at.key("imagePullSecrets")));
    errors.extend(each_as_kubernetes_has_it::<EnvVar>(&template.env, &at.key("env")));
    errors.extend(each_as_kubernetes_has_it::<Volume>(&template.volumes, &at.key("volumes")));
    errors.extend(each_as_kubernetes_has_it::<VolumeMount>(&template.volume_mounts, &at.key("volumeMounts")));
    errors
}

fn each_as_kubernetes_has_it<T: DeserializeOwned>(values: &[Value], at: &FieldPath) -> Vec<FieldError> {
    let each = values.iter().enumerate().flat_map(|(index, value)| as_kubernetes_has_it::<T>(value, &at.index(index)));
    each.collect()
}

fn as_kubernetes_has_it<T: DeserializeOwned>(value: &Value, at: &FieldPath) -> Vec<FieldError> {
    let errors = typed::<T>(value.clone(), &FieldPath::root()).err().unwrap_or_default();
    errors.into_iter().map(|error| FieldError { path: at.join(&error.path), ..error }).collect()
}

/// The CEL rules that the object breaks; rules about a change are evaluated when there is an `old` one.
fn rule_errors(object: &Value, old: Option<&Value>) -> Vec<FieldError> {
    thread_local! {
        // Programs and validator are not shared between threads; compiling them takes milliseconds.
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

/// The only rules at the root are about the name: nothing else of `metadata` can be read by a rule, and a rule there cannot
/// name its field.
fn rule_path(path: &str) -> FieldPath {
    FieldPath::parse(if path.is_empty() { "metadata.name" } else { path })
}

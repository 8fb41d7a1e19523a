//! Checks the parts of pod templates that have Kubernetes' own types. The schema leaves them open.

use k8s_openapi::api::core::v1::{
    Affinity, EnvVar, LocalObjectReference, Toleration, TopologySpreadConstraint, Volume, VolumeMount,
};
use serde::de::DeserializeOwned;
use serde_json::Value;

use crate::typed::typed;
use crate::{FieldError, FieldPath, PodTemplate, RecTrainingJob, Role, check};

/// Errors in the parts of pod templates that have Kubernetes' own types: wrong types and
/// misspellings.
pub(crate) fn template_errors(job: &RecTrainingJob) -> Vec<FieldError> {
    let Some(roles) = &job.spec.roles else { return Vec::new() };
    let errors = Role::ALL.into_iter().filter_map(|role| {
        let at = FieldPath::parse(&format!("spec.roles.{}.template", role.section()));
        Some(errors_of_template(roles.template(role)?, &at))
    });
    errors.flatten().take(check::MAX_ERRORS).collect()
}

fn errors_of_template(template: &PodTemplate, at: &FieldPath) -> Vec<FieldError> {
    let mut errors = errors_of_list::<Toleration>(&template.tolerations, &at.key("tolerations"));
    errors.extend(template.affinity.iter().flat_map(|value| errors_of_value::<Affinity>(value, &at.key("affinity"))));
    let spread = &template.topology_spread_constraints;
    errors.extend(errors_of_list::<TopologySpreadConstraint>(spread, &at.key("topologySpreadConstraints")));
    let secrets = &template.image_pull_secrets;
    errors.extend(errors_of_list::<LocalObjectReference>(secrets, &at.key("imagePullSecrets")));
    errors.extend(errors_of_list::<EnvVar>(&template.env, &at.key("env")));
    errors.extend(errors_of_list::<Volume>(&template.volumes, &at.key("volumes")));
    errors.extend(errors_of_list::<VolumeMount>(&template.volume_mounts, &at.key("volumeMounts")));
    errors
}

fn errors_of_list<T: DeserializeOwned>(values: &[Value], at: &FieldPath) -> Vec<FieldError> {
    let each = values.iter().enumerate().flat_map(|(index, value)| errors_of_value::<T>(value, &at.index(index)));
    each.collect()
}

fn errors_of_value<T: DeserializeOwned>(value: &Value, at: &FieldPath) -> Vec<FieldError> {
    let errors = typed::<T>(value.clone(), &FieldPath::root()).err().unwrap_or_default();
    errors.into_iter().map(|error| FieldError { path: at.join(&error.path), ..error }).collect()
}

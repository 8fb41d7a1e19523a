//! Converts a JSON value into a Rust type, strictly. Kubernetes' own types (pod templates,
//! conditions) are open in the schema, so only the Rust types know their fields.

use serde::de::DeserializeOwned;
use serde_json::Value;

use crate::{FieldError, FieldPath};

/// Converts the value. Unknown fields `within` this path are errors.
pub(crate) fn typed<T: DeserializeOwned>(manifest: Value, within: &FieldPath) -> Result<T, Vec<FieldError>> {
    let mut unknown = Vec::new();
    let mut track = serde_path_to_error::Track::new();
    let mut note = |path: serde_ignored::Path<'_>| unknown.push(path.to_string());
    let tracked = serde_path_to_error::Deserializer::new(manifest, &mut track);
    let document = T::deserialize(serde_ignored::Deserializer::new(tracked, &mut note));
    let document = document
        .map_err(|error| vec![FieldError::new(FieldPath::parse(&track.path().to_string()), error.to_string())])?;
    let errors: Vec<_> = unknown
        .iter()
        .map(|path| ignored_path(path))
        .filter(|path| within.contains(path))
        .map(|path| FieldError::new(path, "unknown field"))
        .collect();
    if errors.is_empty() { Ok(document) } else { Err(errors) }
}

/// Parses a path of serde_ignored, such as `spec.roles.?.template.env.0.x`. A `?` is an Option, and
/// a bare number is an entry of a list.
fn ignored_path(path: &str) -> FieldPath {
    path.split('.').filter(|part| *part != "?").fold(FieldPath::root(), |path, part| match part.parse() {
        Ok(index) => path.index(index),
        Err(_) => path.key(part),
    })
}

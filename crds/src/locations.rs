//! The rules for the paths and URLs of a job, and for the endpoint of its object store. Pure: only
//! the text is checked, and nothing is opened.

use std::collections::BTreeMap;

use rectrain_kinds::{Scheme, endpoint_problem, is_true, unexpanded};

use crate::{FieldError, FieldPath, PathsSpec, RecTrainingJob, RecTrainingJobSpec, TrainSpec};

/// Options that name an endpoint, for `s3://` and for `gs://`. Names are in any case of letters.
const S3_ENDPOINTS: [&str; 5] = ["endpoint", "endpoint_url", "aws_endpoint", "aws_endpoint_url", "aws_endpoint_url_s3"];
const GS_ENDPOINTS: [&str; 3] = ["endpoint", "base_url", "google_base_url"];
const ALLOW_HTTP: [&str; 2] = ["allow_http", "aws_allow_http"];

/// The errors of all paths and URLs of a job, and of the options of its object store.
pub(crate) fn location_errors(spec: &RecTrainingJobSpec) -> Vec<FieldError> {
    let locations = locations(spec);
    let mut errors: Vec<FieldError> =
        locations.iter().filter_map(|(field, path)| Some(FieldError::new(field.clone(), problem(path)?))).collect();
    let schemes: Vec<Scheme> = locations.iter().filter_map(|(_, path)| Scheme::of(path).ok()).collect();
    if let Some(storage) = &spec.data.storage {
        errors.extend(option_errors(&storage.options, storage.secret_name.is_some(), &schemes));
    }
    errors
}

/// The most fields that a note names.
const MOST_NAMED: usize = 3;

/// A note about the paths that begin in the working directory, which a cluster does not have.
/// `None` if there are none.
#[must_use]
pub fn local_paths(job: &RecTrainingJob) -> Option<String> {
    let is_relative = |path: &str| matches!(Scheme::of(path), Ok(Scheme::Path)) && !path.starts_with('/');
    let found: Vec<String> = locations(&job.spec)
        .iter()
        .filter(|(_, path)| is_relative(path))
        .map(|(field, path)| format!("{field} (`{path}`)"))
        .collect();
    let others = found.len().saturating_sub(MOST_NAMED);
    let mut named = found.get(..MOST_NAMED).unwrap_or(&found).join(", ");
    if others > 0 {
        named += &format!(" and {others} more");
    }
    (!found.is_empty()).then(|| {
        format!(
            "the pods of a cluster do not see this folder: for a cluster, name a bucket or a mounted volume in {named}"
        )
    })
}

/// Every path of a job, with its field.
fn locations(spec: &RecTrainingJobSpec) -> Vec<(FieldPath, &str)> {
    let data = &spec.data;
    let mut found = Vec::new();
    let train = data.train.as_ref().map_or(("spec.data.train.paths", &[][..]), TrainSpec::file_paths);
    let (test, source) = (paths(&data.test), paths(&data.source));
    for (field, paths) in [train, ("spec.data.test.paths", test), ("spec.data.source.paths", source)] {
        let list = FieldPath::parse(field);
        let paths = paths.iter().enumerate();
        found.extend(paths.map(|(index, path)| (list.index(index), path.as_str())));
    }
    let checkpoint = spec.checkpoint.as_ref().and_then(|checkpoint| checkpoint.path.as_deref());
    found.extend(checkpoint.map(|path| (FieldPath::parse("spec.checkpoint.path"), path)));
    let from = spec.checkpoint.as_ref().and_then(|checkpoint| checkpoint.from.as_deref());
    found.extend(from.map(|from| (FieldPath::parse("spec.checkpoint.from"), from)));
    let quality = spec.training.as_ref().and_then(|training| training.quality.as_ref());
    let baseline = quality.and_then(|quality| quality.baseline.as_ref());
    let field = || FieldPath::parse("spec.training.quality.baseline.from");
    found.extend(baseline.map(|baseline| (field(), baseline.from.as_str())));
    let publish = spec.serving.as_ref().and_then(|serving| serving.publish.as_ref());
    found.extend(publish.map(|publish| (FieldPath::parse("spec.serving.publish.path"), publish.path.as_str())));
    found
}

fn paths(given: &Option<PathsSpec>) -> &[String] {
    given.as_ref().map_or(&[], |given| &given.paths)
}

fn problem(path: &str) -> Option<String> {
    let scheme = match Scheme::of(path) {
        Ok(scheme) => scheme,
        Err(problem) => return Some(format!("{problem}, found `{path}`")),
    };
    let part = unexpanded(path).filter(|_| matches!(scheme, Scheme::Path | Scheme::File))?;
    Some(format!("nothing expands `{part}` in `{path}`: write the whole path, such as /home/me/models"))
}

/// The errors of the endpoint, if a URL of the job uses it. A Secret may set `AWS_ALLOW_HTTP`.
fn option_errors(options: &BTreeMap<String, String>, has_secret: bool, schemes: &[Scheme]) -> Vec<FieldError> {
    let named = |names: &[&str], name: &str| names.iter().any(|known| name.eq_ignore_ascii_case(known));
    let is_allowed = options.iter().any(|(name, value)| named(&ALLOW_HTTP, name) && is_true(value));
    let (on_s3, on_gs) = (schemes.contains(&Scheme::S3), schemes.contains(&Scheme::Gs));
    let may_use_http = is_allowed || has_secret || !on_s3;
    let mut errors = Vec::new();
    for (name, endpoint) in options {
        if !(on_s3 && named(&S3_ENDPOINTS, name) || on_gs && named(&GS_ENDPOINTS, name)) {
            continue;
        }
        if let Some(problem) = endpoint_problem(endpoint, may_use_http) {
            let field = FieldPath::parse("spec.data.storage.options").key(name);
            errors.push(FieldError::new(field, format!("{problem}, found `{endpoint}`")));
        }
    }
    errors
}

//! `spec.checkpoint.from`: the checkpoint whose model a new job begins with. Parses the text
//! `PATH[@STEP|@latest]`, and compares two paths as texts. Pure.

use std::fmt;

use serde::Serialize;

/// The checkpoint that a new job begins with.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct WarmStart {
    /// The `spec.checkpoint.path` of the job that wrote it.
    pub path: String,
    /// Its step; `None` means the newest checkpoint there.
    pub step: Option<u64>,
}

impl fmt::Display for WarmStart {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.step {
            Some(step) => write!(f, "{}@{step}", self.path),
            None => write!(f, "{}@latest", self.path),
        }
    }
}

impl WarmStart {
    /// Parses `PATH`, `PATH@STEP` or `PATH@latest`. The last `@` begins the step, unless a slash
    /// follows it.
    ///
    /// # Errors
    /// A sentence, if the path is empty or the step is neither a number nor `latest`.
    pub fn parse(text: &str) -> Result<Self, String> {
        let (path, step) = match text.rsplit_once('@').filter(|(_, step)| !step.contains('/')) {
            None => (text, None),
            Some((path, "latest")) => (path, None),
            Some((path, step)) => (path, Some(read_step(step, text)?)),
        };
        if path.is_empty() {
            return Err(format!("expected a path before the `@`, found `{text}`"));
        }
        Ok(Self { path: path.to_owned(), step })
    }

    /// Whether the checkpoint is in this `spec.checkpoint.path`, as far as the texts tell.
    #[must_use]
    pub fn is_in(&self, path: &str) -> bool {
        plain(&self.path) == plain(path)
    }
}

fn read_step(step: &str, text: &str) -> Result<u64, String> {
    let digits = !step.is_empty() && step.bytes().all(|byte| byte.is_ascii_digit());
    step.parse().ok().filter(|_| digits).ok_or_else(|| {
        format!(
            "expected the number of a step or `latest` after the `@`, such as /models/monday@latest, found `{text}`; \
             if the `@` belongs to the path, add `@latest`"
        )
    })
}

/// The path without `file://`, `./` in front, repeated slashes and slashes at the end.
fn plain(path: &str) -> String {
    let is_file = path.get(..7).is_some_and(|start| start.eq_ignore_ascii_case("file://"));
    let local = if is_file { &path[7..] } else { path };
    let (scheme, rest) = match local.split_once("://") {
        // Both schemes name the same buckets.
        Some((scheme, rest)) if scheme.eq_ignore_ascii_case("s3a") => ("s3://".to_owned(), rest),
        Some((scheme, rest)) => (format!("{}://", scheme.to_ascii_lowercase()), rest),
        None if local.starts_with('/') => ("/".to_owned(), local),
        None => (String::new(), local),
    };
    let parts: Vec<&str> = rest.split('/').filter(|part| !part.is_empty() && *part != ".").collect();
    format!("{scheme}{}", parts.join("/"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str) -> Result<(String, Option<u64>), String> {
        WarmStart::parse(text).map(|from| (from.path, from.step))
    }

    #[test]
    fn the_last_at_begins_the_step_unless_a_slash_follows() {
        for (text, path, step) in [
            ("/models/monday", "/models/monday", None),
            ("/models/monday@latest", "/models/monday", None),
            ("/models/monday@1200", "/models/monday", Some(1200)),
            ("s3://b/me@work/ck", "s3://b/me@work/ck", None),
            ("s3://b/me@work/ck@7", "s3://b/me@work/ck", Some(7)),
            ("ck@7@latest", "ck@7", None),
        ] {
            assert_eq!(parse(text), Ok((path.to_owned(), step)), "{text}");
        }
    }

    #[test]
    fn a_step_that_is_no_number_is_refused() {
        for text in ["ck@", "ck@newest", "ck@-1", "ck@+1", "ck@1.0", "ck@99999999999999999999", "@latest", "@7"] {
            let error = parse(text).unwrap_err();
            assert!(error.starts_with("expected ") && error.contains(text), "{text}: {error}");
        }
    }

    #[test]
    fn spellings_of_one_path_are_the_same_place() {
        let is_in = |from: &str, path: &str| WarmStart::parse(from).unwrap().is_in(path);
        for (from, path) in [
            ("/models/a@7", "/models/a"),
            ("/models/a/", "file:///models//a"),
            ("./ck", "ck/"),
            ("S3A://b/ck", "s3://b/ck/"),
        ] {
            assert!(is_in(from, path), "{from} is in {path}");
        }
        for (from, path) in [("/models/a", "models/a"), ("/models/a", "/models/ab"), ("s3://b/ck", "gs://b/ck")] {
            assert!(!is_in(from, path), "{from} is not in {path}");
        }
    }
}

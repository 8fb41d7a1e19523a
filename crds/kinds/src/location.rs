//! The places that paths and URLs of a manifest name. Manifests and the storage of the runtime
//! check them by the same rules. Pure: nothing is opened, and no variable is read.

/// The scheme of a path or URL.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scheme {
    /// A path of this machine.
    Path,
    /// A `file://` URL.
    File,
    /// An `s3://` or `s3a://` URL.
    S3,
    /// A `gs://` URL.
    Gs,
}

/// What a path has to be. Part of messages.
pub const EXPECTED_LOCATION: &str = "expected a local path, or a file://, s3:// or gs:// URL";

impl Scheme {
    /// The scheme of a path or URL, in any case of letters.
    ///
    /// # Errors
    /// A scheme that no build reads, a bucket without a name, or a URL with one slash. The text
    /// states the problem and the expectation, without the path.
    pub fn of(path: &str) -> Result<Self, String> {
        let Some((name, rest)) = path.split_once("://") else {
            return match path.split_once(":/").and_then(|(name, _)| Self::named(name)) {
                None => Ok(Self::Path),
                Some(_) => Err(format!("a URL has two slashes after the colon; {EXPECTED_LOCATION}")),
            };
        };
        let Some(scheme) = Self::named(name) else {
            return Err(format!("no build reads {name}:// URLs; {EXPECTED_LOCATION}"));
        };
        match scheme {
            Self::S3 | Self::Gs if rest.split('/').next().is_none_or(str::is_empty) => {
                Err(format!("the URL names no bucket; expected {name}://BUCKET/PATH"))
            }
            _ => Ok(scheme),
        }
    }

    fn named(name: &str) -> Option<Self> {
        match name.to_ascii_lowercase().as_str() {
            "file" => Some(Self::File),
            "s3" | "s3a" => Some(Self::S3),
            "gs" => Some(Self::Gs),
            _ => None,
        }
    }
}

/// The part of a local path that a shell would expand and Rectrain does not: a leading `~`, or the
/// first variable (`$HOME`, `${DAY}`, `$(DAY)`). In a cluster every process has its own home and
/// environment, so Rectrain refuses such a path.
#[must_use]
pub fn unexpanded(path: &str) -> Option<&str> {
    let start = if path.get(..7).is_some_and(|start| start.eq_ignore_ascii_case("file://")) { 7 } else { 0 };
    let local = &path[start..];
    if local == "~" || local.starts_with("~/") {
        return Some("~");
    }
    local.match_indices('$').find_map(|(at, _)| variable(local, at))
}

/// The variable whose `$` is at `at`. Without brackets, only capital letters make a name, and no
/// letter or digit stands before the `$`: file names such as `part$1` and `Outer$Inner` stay valid.
fn variable(path: &str, at: usize) -> Option<&str> {
    let after = &path[at + 1..];
    for (open, close) in [('{', '}'), ('(', ')')] {
        let Some(inner) = after.strip_prefix(open) else { continue };
        let end = inner.find(close)?;
        return is_name(&inner[..end], |_| true).then(|| &path[at..at + end + 3]);
    }
    let name = &after[..after.find(|c: char| !is_word(c)).unwrap_or(after.len())];
    let follows_a_word = path[..at].chars().next_back().is_some_and(is_word);
    let is_variable = !follows_a_word && is_name(name, |c| !c.is_ascii_lowercase());
    is_variable.then(|| &path[at..=at + name.len()])
}

fn is_word(c: char) -> bool {
    c.is_ascii_alphanumeric() || c == '_'
}

fn is_name(name: &str, allowed: impl Fn(char) -> bool) -> bool {
    let starts = name.starts_with(|c: char| c.is_ascii_alphabetic() || c == '_');
    starts && name.chars().all(|c| is_word(c) && allowed(c))
}

/// The problem of an object store's endpoint; `None` if there is none. `may_use_http` is the option
/// `allow_http`. The text states the problem and the expectation, without the endpoint.
#[must_use]
pub fn endpoint_problem(endpoint: &str, may_use_http: bool) -> Option<String> {
    let usual = if may_use_http { "http" } else { "https" };
    let url = endpoint.split_once("://").map(|(scheme, rest)| (scheme.to_ascii_lowercase(), rest));
    match url {
        Some((scheme, rest)) if scheme == "http" || scheme == "https" => {
            if rest.is_empty() || rest.starts_with('/') {
                return Some(format!("expected a host after {scheme}://"));
            }
            (scheme == "http" && !may_use_http).then(|| {
                "http:// sends data and requests unencrypted; set the option `allow_http` to \"true\", or use https://"
                    .to_owned()
            })
        }
        Some((_, rest)) => Some(format!("expected http:// or https://, such as {usual}://{rest}")),
        None => Some(format!("expected http:// or https:// before the host, such as {usual}://{endpoint}")),
    }
}

/// Whether an option's value reads as true.
#[must_use]
pub fn is_true(value: &str) -> bool {
    matches!(value.to_ascii_lowercase().as_str(), "1" | "true" | "on" | "yes" | "y")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_schemes_that_builds_read_are_accepted() {
        for (path, scheme) in [
            ("a/b#1.csv", Scheme::Path),
            ("s3", Scheme::Path),
            ("a:b/c", Scheme::Path),
            ("file:///a", Scheme::File),
            ("FILE:///a", Scheme::File),
            ("s3://b", Scheme::S3),
            ("S3A://b/*.csv", Scheme::S3),
            ("gs://b/k", Scheme::Gs),
        ] {
            assert_eq!(Scheme::of(path), Ok(scheme), "{path}");
        }
        for (path, part) in [
            ("hdfs://nn/x.csv", "no build reads hdfs:// URLs"),
            ("oss://b/x.csv", "no build reads oss:// URLs"),
            ("az://b/x.csv", "no build reads az:// URLs"),
            ("https://host/x.csv", "no build reads https:// URLs"),
            (" s3://b/x.csv", "no build reads"),
            ("s3:/b/x.csv", "two slashes"),
            ("file:/x.csv", "two slashes"),
            ("s3:///x.csv", "names no bucket"),
            ("gs://", "names no bucket"),
        ] {
            let problem = Scheme::of(path).unwrap_err();
            assert!(problem.contains(part) && problem.contains("expected"), "{path}: {problem}");
        }
    }

    #[test]
    fn a_part_that_a_shell_would_expand_is_found() {
        for (path, part) in [
            ("~", "~"),
            ("~/models", "~"),
            ("file://~/models", "~"),
            ("$HOME/models", "$HOME"),
            ("/data/${DAY}.csv", "${DAY}"),
            ("/data/${day}/x", "${day}"),
            ("/data/$(DAY)/x", "$(DAY)"),
            ("/data/day=$DAY.csv", "$DAY"),
            ("file:///data/$DAY/x", "$DAY"),
        ] {
            assert_eq!(unexpanded(path), Some(part), "{path}");
        }
        for path in ["a~", "./~/a", "~a/b", "a~/b", "part$1.csv", "Outer$INNER", "$1", "$", "${", "${1}", "a$b", "é$"]
        {
            assert_eq!(unexpanded(path), None, "{path}");
        }
    }

    #[test]
    fn an_endpoint_is_an_http_url_with_a_host() {
        for endpoint in ["https://minio:9000", "HTTPS://h", "https://h/path"] {
            assert_eq!(endpoint_problem(endpoint, false), None, "{endpoint}");
        }
        assert_eq!(endpoint_problem("http://minio:9000", true), None);
        for (endpoint, part) in [
            ("minio:9000", "such as http://minio:9000"),
            ("127.0.0.1", "such as http://127.0.0.1"),
            ("", "expected http://"),
            ("s3://minio:9000", "such as http://minio:9000"),
            ("//minio:9000", "expected http://"),
            ("http://", "expected a host"),
            ("https:///x", "expected a host"),
        ] {
            let problem = endpoint_problem(endpoint, true).unwrap_or_default();
            assert!(problem.contains(part), "{endpoint}: {problem}");
        }
        assert!(endpoint_problem("http://h", false).is_some_and(|problem| problem.contains("allow_http")));
        assert!(is_true("True") && is_true("1") && !is_true("no"));
    }
}

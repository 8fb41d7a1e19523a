//! Paths and URLs, and the store of a bucket.

use std::collections::BTreeMap;
use std::str::FromStr;
use std::sync::Arc;
use std::time::Duration;

use object_store::aws::{AmazonS3Builder, AmazonS3ConfigKey};
use object_store::gcp::{GoogleCloudStorageBuilder, GoogleConfigKey};
use object_store::{ClientConfigKey, ObjectStore, RetryConfig};
use rectrain_kinds::{Scheme, endpoint_problem, is_true};

use crate::StorageError;
use crate::credentials::{self, with_shared_file};
use crate::renewing::Renewing;

/// The location that a path or URL names.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Place {
    /// A path of this machine.
    Local(String),
    /// A key (or a prefix of keys, or a glob of keys) in a bucket.
    Bucket(Bucket),
}

/// A key in a bucket.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Bucket {
    /// `s3://bucket` or `gs://bucket`, as the caller gave it.
    pub root: String,
    /// The part after the bucket's name, without the slash between them. May be empty.
    pub key: String,
    google: bool,
}

/// Parses a path or URL.
///
/// # Errors
/// [`StorageError::BadPath`] for an unknown scheme, or a file URL that names no local path.
pub fn place_of(path: &str) -> Result<Place, StorageError> {
    let scheme = Scheme::of(path).map_err(|problem| bad_path(path, problem))?;
    let (name, rest) = path.split_once("://").unwrap_or(("", path));
    match scheme {
        Scheme::Path => Ok(Place::Local(path.to_owned())),
        Scheme::File => local_path_of_url(path).map(Place::Local),
        Scheme::S3 | Scheme::Gs => {
            let (bucket, key) = rest.split_once('/').unwrap_or((rest, ""));
            let google = scheme == Scheme::Gs;
            Ok(Place::Bucket(Bucket { root: format!("{name}://{bucket}"), key: key.to_owned(), google }))
        }
    }
}

impl Bucket {
    /// The bucket's store. Credentials come from the options, and otherwise from the environment
    /// and the files that it names. The store reads them again when a request is refused.
    ///
    /// # Errors
    /// [`StorageError::UnknownOption`], [`StorageError::BadPath`] for a file of credentials, and
    /// [`StorageError::Unreachable`]. No request is made yet.
    pub fn store(&self, options: &BTreeMap<String, String>) -> Result<Arc<dyn ObjectStore>, StorageError> {
        let origin = credentials::origin(self.google, options, variable);
        let (bucket, own) = (self.clone(), options.clone());
        Ok(Arc::new(Renewing::new(Box::new(move || bucket.client(&own)), origin)?))
    }

    /// A client with the credentials as they are now.
    fn client(&self, options: &BTreeMap<String, String>) -> Result<Arc<dyn ObjectStore>, StorageError> {
        use_ring();
        let unreachable = |source| StorageError::Unreachable { url: self.root.clone(), source };
        if self.google {
            google(&self.root, options)?.map_err(unreachable)
        } else {
            amazon(&self.root, options)?.map_err(unreachable)
        }
    }
}

/// Chooses ring for the process's TLS, unless it has chosen already. A client of an object store
/// cannot be built before.
pub fn use_ring() {
    let _chosen = tokio_rustls::rustls::crypto::ring::default_provider().install_default();
}

type Built = object_store::Result<Arc<dyn ObjectStore>>;

/// Common options of each kind of store, for the error about an unknown one.
const USUAL_OF_AMAZON: &str =
    "endpoint, region, access_key_id, secret_access_key, session_token, skip_signature and allow_http";
const USUAL_OF_GOOGLE: &str =
    "endpoint, service_account, service_account_key, application_credentials, skip_signature and allow_http";

fn amazon(root: &str, options: &BTreeMap<String, String>) -> Result<Built, StorageError> {
    let mut builder = AmazonS3Builder::from_env().with_url(root.replacen("s3a://", "s3://", 1)).with_retry(retries());
    for (name, value) in options {
        builder = builder.with_config(option::<AmazonS3ConfigKey>(root, name, USUAL_OF_AMAZON)?, value);
    }
    let may_use_http = builder.get_config_value(&AmazonS3ConfigKey::Client(ClientConfigKey::AllowHttp));
    let endpoint = builder.get_config_value(&AmazonS3ConfigKey::S3Endpoint);
    if let Some(endpoint) = endpoint.or_else(|| builder.get_config_value(&AmazonS3ConfigKey::Endpoint)) {
        check_endpoint(root, &endpoint, may_use_http.as_deref().is_some_and(is_true))?;
    }
    let builder = with_shared_file(builder, variable)?;
    Ok(builder.build().map(|store| Arc::new(store) as _))
}

fn variable(name: &str) -> Option<String> {
    std::env::var(name).ok()
}

/// The client would panic or fail without naming the endpoint.
fn check_endpoint(root: &str, endpoint: &str, may_use_http: bool) -> Result<(), StorageError> {
    match endpoint_problem(endpoint, may_use_http) {
        None => Ok(()),
        Some(problem) => Err(StorageError::Endpoint { url: root.to_owned(), endpoint: endpoint.to_owned(), problem }),
    }
}

fn google(root: &str, options: &BTreeMap<String, String>) -> Result<Built, StorageError> {
    let mut builder = GoogleCloudStorageBuilder::from_env().with_url(root).with_retry(retries());
    for (name, value) in options {
        let known = match name.eq_ignore_ascii_case("endpoint") {
            true => GoogleConfigKey::BaseUrl,
            false => option(root, name, USUAL_OF_GOOGLE)?,
        };
        builder = builder.with_config(known, value);
    }
    if let Some(endpoint) = builder.get_config_value(&GoogleConfigKey::BaseUrl) {
        // Google's client may always use http.
        check_endpoint(root, &endpoint, true)?;
    }
    Ok(builder.build().map(|store| Arc::new(store) as _))
}

/// Short enough to report a wrong endpoint within a minute, long enough for a server's restart.
fn retries() -> RetryConfig {
    RetryConfig { max_retries: 8, retry_timeout: Duration::from_secs(60), ..RetryConfig::default() }
}

fn option<K: FromStr>(url: &str, name: &str, usual: &'static str) -> Result<K, StorageError> {
    let unknown = |_| StorageError::UnknownOption { url: url.to_owned(), name: name.to_owned(), usual };
    name.to_ascii_lowercase().parse().map_err(unknown)
}

fn bad_path(path: &str, problem: impl Into<String>) -> StorageError {
    StorageError::BadPath { path: path.to_owned(), problem: problem.into() }
}

/// `?` and `#` are ordinary characters in our file URLs, also in globs.
fn local_path_of_url(url: &str) -> Result<String, StorageError> {
    let escaped = url.replace('?', "%3F").replace('#', "%23");
    let parsed = url::Url::parse(&escaped).map_err(|error| bad_path(url, error.to_string()))?;
    let path =
        parsed.to_file_path().map_err(|()| bad_path(url, "a file URL has three slashes: file:///folder/file"))?;
    path.into_os_string().into_string().map_err(|_| bad_path(url, "it is not UTF-8"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_place_is_a_path_or_a_key_in_a_bucket() {
        let bucket = |path| match place_of(path).unwrap() {
            Place::Bucket(bucket) => (bucket.root, bucket.key, bucket.google),
            Place::Local(path) => panic!("{path}"),
        };
        assert_eq!(place_of("a/b#1").unwrap(), Place::Local("a/b#1".into()));
        assert_eq!(place_of("file:///a/b?").unwrap(), Place::Local("/a/b?".into()));
        assert_eq!(bucket("gs://b/c/d"), ("gs://b".into(), "c/d".into(), true));
        assert_eq!(bucket("S3A://b"), ("S3A://b".into(), String::new(), false));
        assert!(place_of("ftp://a").unwrap_err().to_string().contains("ftp://a"));
        assert!(place_of("file://host/a").is_err());
    }

    #[test]
    fn an_unknown_option_is_refused_by_name() {
        let store = |url: &str, options: &[&str]| match place_of(url).unwrap() {
            Place::Bucket(bucket) => {
                bucket.store(&options.iter().map(|name| ((*name).into(), "true".into())).collect())
            }
            Place::Local(path) => panic!("{path}"),
        };
        for (url, name) in [("s3://bucket", "endpiont"), ("s3://bucket", "service_account"), ("gs://bucket", "region")]
        {
            let message = store(&format!("{url}/key"), &[name]).unwrap_err().to_string();
            let (refused, usual) = message.split_once("; the common options are ").unwrap();
            assert!(refused.contains(url) && refused.contains(&format!("`{name}`")), "{message}");
            assert!(usual.contains("endpoint") && !usual.contains(name), "{message}");
        }
        assert!(store("s3://bucket/key", &[]).is_ok());
    }

    #[test]
    fn an_endpoint_without_http_or_permission_is_refused() {
        let store = |url: &str, options: &[(&str, &str)]| match place_of(url).unwrap() {
            Place::Bucket(bucket) => {
                bucket.store(&options.iter().map(|&(name, value)| (name.into(), value.into())).collect())
            }
            Place::Local(path) => panic!("{path}"),
        };
        for (url, options, part) in [
            ("s3://b/k", &[("endpoint", "minio:9000"), ("allow_http", "true")][..], "such as http://minio:9000"),
            ("s3a://b/k", &[("AWS_ENDPOINT_URL", "127.0.0.1:9000")], "such as https://127.0.0.1:9000"),
            ("s3://b/k", &[("endpoint_url", "s3://minio")], "expected http:// or https://"),
            ("s3://b/k", &[("endpoint", "http://minio:9000")], "set the option `allow_http`"),
            ("s3://b/k", &[("endpoint", "http://minio:9000"), ("allow_http", "no")], "set the option `allow_http`"),
            ("gs://b/k", &[("endpoint", "fake-gcs:4443")], "such as http://fake-gcs:4443"),
        ] {
            let error = store(url, options).unwrap_err();
            assert!(error.is_users_input() && error.to_string().contains(part), "{options:?}: {error}");
        }
        for (url, options) in [
            ("s3://b/k", &[("endpoint", "http://minio:9000"), ("aws_allow_http", "1")][..]),
            ("s3://b/k", &[("endpoint", "https://minio:9000")]),
            ("gs://b/k", &[("endpoint", "http://127.0.0.1:1"), ("skip_signature", "true")]),
        ] {
            assert!(store(url, options).is_ok(), "{options:?}");
        }
    }

    #[test]
    fn the_usual_options_of_a_store_are_known_to_it() {
        for name in USUAL_OF_AMAZON.replace(" and ", ", ").split(", ") {
            assert!(option::<AmazonS3ConfigKey>("s3://bucket", name, USUAL_OF_AMAZON).is_ok(), "{name}");
        }
        for name in USUAL_OF_GOOGLE.replace(" and ", ", ").split(", ").filter(|name| *name != "endpoint") {
            assert!(option::<GoogleConfigKey>("gs://bucket", name, USUAL_OF_GOOGLE).is_ok(), "{name}");
        }
    }
}

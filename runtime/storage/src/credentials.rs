//! Where a client of an object store takes its credentials from, and the keys in a file of shared
//! credentials. Messages name variables and files, never their values.

use std::collections::BTreeMap;

use object_store::aws::{AmazonS3Builder, AmazonS3ConfigKey};
use rectrain_kinds::is_true;

use crate::StorageError;

/// The variable with the path of a file of keys.
const SHARED_FILE: &str = "AWS_SHARED_CREDENTIALS_FILE";
/// The variable with the profile in that file.
const PROFILE: &str = "AWS_PROFILE";

/// A place of credentials.
struct Origin {
    /// The option, without the prefix that its longer name has.
    option: &'static str,
    variables: &'static [&'static str],
    /// Whether the value is the path of a file. Its content can change while a process runs.
    is_file: bool,
}

impl Origin {
    const fn value(option: &'static str, variables: &'static [&'static str]) -> Self {
        Self { option, variables, is_file: false }
    }

    const fn file(option: &'static str, variables: &'static [&'static str]) -> Self {
        Self { option, variables, is_file: true }
    }
}

/// In the order in which the client prefers them.
const AMAZON: &[Origin] = &[
    Origin::value("access_key_id", &["AWS_ACCESS_KEY_ID"]),
    Origin::file("shared_credentials_file", &[SHARED_FILE]),
    Origin::file("web_identity_token_file", &["AWS_WEB_IDENTITY_TOKEN_FILE"]),
    Origin::value("container_credentials_relative_uri", &["AWS_CONTAINER_CREDENTIALS_RELATIVE_URI"]),
    Origin::file("container_authorization_token_file", &["AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE"]),
];

/// In the order in which the client prefers them.
const GOOGLE: &[Origin] = &[
    Origin::value("bearer_token", &["GOOGLE_BEARER_TOKEN"]),
    Origin::file("service_account", &["GOOGLE_SERVICE_ACCOUNT", "SERVICE_ACCOUNT"]),
    Origin::file("service_account_path", &["GOOGLE_SERVICE_ACCOUNT_PATH"]),
    Origin::value("service_account_key", &["GOOGLE_SERVICE_ACCOUNT_KEY"]),
    Origin::file("application_credentials", &["GOOGLE_APPLICATION_CREDENTIALS"]),
];

/// One clause about where the credentials come from, for the end of an error.
pub(crate) fn origin(
    is_google: bool,
    options: &BTreeMap<String, String>,
    variable: impl Fn(&str) -> Option<String>,
) -> String {
    let (origins, prefix) = if is_google { (GOOGLE, "google_") } else { (AMAZON, "aws_") };
    let option = |wanted: &str| {
        options.iter().find(|(name, _)| {
            let name = name.to_ascii_lowercase();
            name.strip_prefix(prefix).unwrap_or(&name) == wanted
        })
    };
    if option("skip_signature").is_some_and(|(_, value)| is_true(value)) {
        return "no credentials were sent, because the option `skip_signature` is set".to_owned();
    }
    for origin in origins {
        if let Some((name, value)) = option(origin.option) {
            return clause(&format!("the option `{name}`"), value, origin.is_file);
        }
        let set = origin.variables.iter().find_map(|&name| variable(name).map(|value| (name, value)));
        if let Some((name, value)) = set {
            return clause(&format!("the variable {name}"), &value, origin.is_file);
        }
    }
    let names: Vec<&str> = origins.iter().flat_map(|origin| origin.variables).copied().collect();
    format!("the credentials come from the machine's metadata server, because none of {} is set", names.join(", "))
}

fn clause(name: &str, value: &str, is_file: bool) -> String {
    match is_file {
        true => format!("the credentials come from the file {value}, which {name} names"),
        false => format!("the credentials come from {name}, which a running process keeps: restart it with new ones"),
    }
}

/// The keys of one profile.
struct Keys {
    id: String,
    secret: String,
    session_token: Option<String>,
}

/// Gives the builder the keys in the file that `AWS_SHARED_CREDENTIALS_FILE` names, unless it has
/// keys already. The client of the object store does not know this file.
///
/// # Errors
/// [`StorageError::BadPath`] if the file cannot be read or lacks the keys.
pub(crate) fn with_shared_file(
    builder: AmazonS3Builder,
    variable: impl Fn(&str) -> Option<String>,
) -> Result<AmazonS3Builder, StorageError> {
    let id = builder.get_config_value(&AmazonS3ConfigKey::AccessKeyId);
    let is_unsigned = builder.get_config_value(&AmazonS3ConfigKey::SkipSignature).is_some_and(|value| is_true(&value));
    let is_needed = id.is_none() && !is_unsigned;
    let Some(path) = variable(SHARED_FILE).filter(|path| is_needed && !path.is_empty()) else { return Ok(builder) };
    let profile = variable(PROFILE).unwrap_or_else(|| "default".to_owned());
    let text = std::fs::read_to_string(&path).map_err(|error| error.to_string());
    let keys = text.and_then(|text| parse(&text, &profile));
    let keys = keys.map_err(|problem| StorageError::BadPath {
        path: path.clone(),
        problem: format!("{problem}; the variable {SHARED_FILE} names it as a file of credentials"),
    })?;
    let builder = builder.with_access_key_id(keys.id).with_secret_access_key(keys.secret);
    Ok(match keys.session_token {
        Some(token) => builder.with_token(token),
        None => builder,
    })
}

/// The keys of a profile in the text of a file of shared credentials, or the problem with it.
fn parse(text: &str, profile: &str) -> Result<Keys, String> {
    let mut entries: Option<BTreeMap<&str, &str>> = None;
    let mut is_inside = false;
    for line in text.lines().map(str::trim) {
        if let Some(name) = line.strip_prefix('[').and_then(|rest| rest.strip_suffix(']')) {
            is_inside = name.trim() == profile;
            if is_inside {
                entries.get_or_insert_default();
            }
        } else if let (true, false, Some((name, value))) =
            (is_inside, line.starts_with(['#', ';']), line.split_once('='))
        {
            entries.get_or_insert_default().insert(name.trim(), value.trim());
        }
    }
    let entries = entries.ok_or_else(|| format!("it has no profile `{profile}`"))?;
    let entry = |name: &str| entries.get(name).filter(|value| !value.is_empty()).map(|value| (*value).to_owned());
    let needed = |name: &str| entry(name).ok_or_else(|| format!("its profile `{profile}` has no `{name}`"));
    Ok(Keys {
        id: needed("aws_access_key_id")?,
        secret: needed("aws_secret_access_key")?,
        session_token: entry("aws_session_token"),
    })
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "an unwrap in a test is an assertion")]
mod tests {
    use super::*;

    const FILE: &str = "# keys\n[default]\naws_access_key_id = id-1\naws_secret_access_key=secret-1\n\n[ads]\n\
                        aws_access_key_id=id-2\n; old\naws_secret_access_key = a=b\naws_session_token = token\n[half]\n\
                        aws_access_key_id=id-3\n[empty]\n";

    #[test]
    fn the_origin_of_credentials_is_named_without_their_values() {
        let options = |name: &str, value: &str| BTreeMap::from([(name.to_owned(), value.to_owned())]);
        let none = BTreeMap::new();
        for (is_google, given, set, expected) in [
            (false, none.clone(), Some("AWS_ACCESS_KEY_ID"), "from the variable AWS_ACCESS_KEY_ID, which"),
            (
                false,
                none.clone(),
                Some(SHARED_FILE),
                "the file value-1, which the variable AWS_SHARED_CREDENTIALS_FILE",
            ),
            (
                false,
                options("AWS_Access_Key_Id", "id"),
                Some(SHARED_FILE),
                "from the option `AWS_Access_Key_Id`, which",
            ),
            (false, options("skip_signature", "true"), None, "no credentials were sent"),
            (false, none.clone(), None, "metadata server, because none of AWS_ACCESS_KEY_ID, AWS_SHARED"),
            (true, none.clone(), Some("GOOGLE_SERVICE_ACCOUNT_KEY"), "from the variable GOOGLE_SERVICE_ACCOUNT_KEY"),
            (true, none.clone(), Some("SERVICE_ACCOUNT"), "the file value-1, which the variable SERVICE_ACCOUNT"),
            (true, options("service_account", "/k.json"), None, "the file /k.json, which the option `service_account`"),
            (true, none.clone(), Some("AWS_ACCESS_KEY_ID"), "metadata server, because none of GOOGLE_BEARER_TOKEN"),
        ] {
            let text = origin(is_google, &given, |name| (Some(name) == set).then(|| "value-1".to_owned()));
            assert!(text.contains(expected), "{expected}: {text}");
            assert!(text.contains("the file") || !text.contains("value-1"), "{text}");
        }
    }

    #[test]
    fn a_profile_has_its_own_keys() {
        let keys = |profile| parse(FILE, profile).map(|keys| (keys.id, keys.secret, keys.session_token));
        assert_eq!(keys("default"), Ok(("id-1".into(), "secret-1".into(), None)));
        assert_eq!(keys("ads"), Ok(("id-2".into(), "a=b".into(), Some("token".into()))));
        for (profile, problem) in [
            ("half", "its profile `half` has no `aws_secret_access_key`"),
            ("empty", "its profile `empty` has no `aws_access_key_id`"),
            ("none", "it has no profile `none`"),
        ] {
            assert_eq!(keys(profile), Err(problem.to_owned()));
        }
    }

    #[test]
    fn keys_of_a_shared_file_are_used_unless_others_are_set() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("credentials").display().to_string();
        std::fs::write(&path, FILE).unwrap();
        let id = |builder: AmazonS3Builder, profile: &str| {
            let variable = |name: &str| match name {
                SHARED_FILE => Some(path.clone()),
                PROFILE => Some(profile.to_owned()),
                _ => None,
            };
            with_shared_file(builder, variable).map(|builder| builder.get_config_value(&AmazonS3ConfigKey::AccessKeyId))
        };
        assert_eq!(id(AmazonS3Builder::new(), "ads").unwrap(), Some("id-2".to_owned()));
        let own = AmazonS3Builder::new().with_access_key_id("own");
        assert_eq!(id(own, "ads").unwrap(), Some("own".to_owned()));
        assert_eq!(id(AmazonS3Builder::new().with_skip_signature(true), "ads").unwrap(), None);
        let message = id(AmazonS3Builder::new(), "half").unwrap_err().to_string();
        assert!(message.contains(&path) && message.contains(SHARED_FILE) && !message.contains("id-3"), "{message}");
    }
}

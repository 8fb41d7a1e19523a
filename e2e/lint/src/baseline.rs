//! The checked-in `e2e/lint/baseline.toml`.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use serde::Deserialize;
use serde::de::DeserializeOwned;

use crate::error::LintError;

/// Findings that are allowed for now.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Baseline {
    pub prose: Prose,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Prose {
    /// Numbers by the name of the kind of finding.
    pub allowed: BTreeMap<String, usize>,
    /// Files and folders that are not checked.
    #[serde(default)]
    pub exempt: Vec<Exempt>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Exempt {
    pub path: PathBuf,
    /// Why the path is exempt, for readers of the file.
    #[serde(rename = "reason")]
    _reason: String,
}

impl Baseline {
    /// Reads `e2e/lint/baseline.toml`.
    pub fn read(root: &Path) -> Result<Self, LintError> {
        read(&root.join("e2e/lint/baseline.toml"))
    }
}

fn read<T: DeserializeOwned>(path: &Path) -> Result<T, LintError> {
    toml::from_str(&crate::tree::read(path)?).map_err(|error| LintError::parse(path, error))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_exemption_needs_a_reason() {
        let text = "[prose.allowed]\n[[prose.exempt]]\npath = 'a'\n";
        assert!(toml::from_str::<Baseline>(text).unwrap_err().to_string().contains("reason"));
        assert!(toml::from_str::<Baseline>(&format!("{text}reason = 'b'")).is_ok());
    }

    #[test]
    fn unknown_keys_are_refused() {
        assert!(toml::from_str::<Baseline>("[prose.allowed]\n[other]").is_err());
    }
}

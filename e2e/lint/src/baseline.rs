//! The checked-in files of the lints: `e2e/lint/baseline.toml` and `e2e/lint/layers.toml`.

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
    #[serde(default)]
    pub architecture: Architecture,
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

#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Architecture {
    /// Each entry allows one circle of modules that spans folders.
    #[serde(default)]
    pub circles: Vec<AllowedCircle>,
}

#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct AllowedCircle {
    #[serde(rename = "crate")]
    pub package: String,
    /// The circle has at most this many modules.
    pub modules: usize,
    /// Why the circle is allowed. Reports print it.
    pub reason: String,
}

impl Baseline {
    /// Reads `e2e/lint/baseline.toml`.
    pub fn read(root: &Path) -> Result<Self, LintError> {
        read(&root.join("e2e/lint/baseline.toml"))
    }
}

/// The layers of the workspace, from the top down.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Layers {
    pub layers: Vec<Layer>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Layer {
    pub name: String,
    pub crates: Vec<String>,
}

impl Layers {
    /// Reads `e2e/lint/layers.toml`.
    pub fn read(root: &Path) -> Result<Self, LintError> {
        read(&root.join("e2e/lint/layers.toml"))
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
        assert!(toml::from_str::<Layers>("[[layers]]\nname = 'a'\ncrates = []\ncrate = 'b'").is_err());
    }
}

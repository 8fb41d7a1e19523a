//! Errors of the lints.

use std::fmt;
use std::path::{Path, PathBuf};

/// Why a lint failed.
#[derive(Debug)]
pub enum LintError {
    /// The command line has an argument that the lint does not know.
    Usage(String),
    /// A file or folder cannot be read.
    Read { path: PathBuf, source: std::io::Error },
    /// A TOML file has a syntax error, or lacks a key.
    Parse { path: PathBuf, reason: String },
    /// `mod NAME;` has no file.
    MissingModule { declared_in: PathBuf, name: String },
    /// The lint ran and found problems, listed one a line.
    Failed { lint: &'static str, problems: Vec<String> },
}

impl LintError {
    pub(crate) fn read(path: &Path, source: std::io::Error) -> Self {
        Self::Read { path: path.to_owned(), source }
    }

    pub(crate) fn parse(path: &Path, reason: impl fmt::Display) -> Self {
        Self::Parse { path: path.to_owned(), reason: reason.to_string() }
    }
}

impl fmt::Display for LintError {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Usage(text) => out.write_str(text),
            Self::Read { path, source } => write!(out, "cannot read {}: {source}", path.display()),
            Self::Parse { path, reason } => write!(out, "{}: {reason}", path.display()),
            Self::MissingModule { declared_in, name } => {
                write!(out, "{} declares `mod {name};`, but the module has no file", declared_in.display())
            }
            Self::Failed { lint, problems } => write!(out, "{lint} failed:\n  {}", problems.join("\n  ")),
        }
    }
}

impl std::error::Error for LintError {}

impl From<LintError> for String {
    fn from(error: LintError) -> Self {
        error.to_string()
    }
}

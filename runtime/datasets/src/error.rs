//! Errors of preparing a data set. Each message names the file, describes the fault, and suggests a
//! remedy.

/// Why a data set could not be prepared.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DatasetError {
    /// A path names nothing.
    #[error("there is no file {path}: check the path")]
    NotFound {
        /// The path that was looked for.
        path: String,
    },
    /// The operating system refused.
    #[error("cannot {action} {file}: {source}")]
    Io {
        /// The attempted action.
        action: &'static str,
        /// The file or folder.
        file: String,
        /// The operating system's error.
        source: std::io::Error,
    },
    /// A file is not the expected kind of file.
    #[error("{file} is not {expected}: {problem}")]
    WrongFormat {
        /// The file.
        file: String,
        /// The expected kind of file.
        expected: &'static str,
        /// The contradiction that was found in it.
        problem: String,
    },
    /// A file's content breaks off or does not decode.
    #[error("{file} is damaged: {problem}")]
    Damaged {
        /// The file.
        file: String,
        /// The decoder's message.
        problem: String,
    },
    /// Python or pip did not run, or failed.
    #[error("cannot {action}: {problem}")]
    Download {
        /// The attempted action.
        action: String,
        /// The failure, and a remedy.
        problem: String,
    },
}

impl DatasetError {
    /// Whether the user's arguments are at fault (the path, or the files behind it), rather than a
    /// disk or a download. Decides between exit codes.
    #[must_use]
    pub fn is_users_input(&self) -> bool {
        match self {
            Self::Io { source, .. } => {
                matches!(source.kind(), std::io::ErrorKind::NotFound | std::io::ErrorKind::PermissionDenied)
            }
            Self::Download { .. } => false,
            Self::NotFound { .. } | Self::WrongFormat { .. } | Self::Damaged { .. } => true,
        }
    }
}

/// A line as it is quoted in an error: at most 80 characters.
pub(crate) fn quoted(line: &str) -> String {
    match line.char_indices().nth(80) {
        Some((end, _)) => format!("{}…", &line[..end]),
        None => line.to_owned(),
    }
}

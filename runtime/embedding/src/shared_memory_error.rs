//! Shared memory that is refused.

use std::path::PathBuf;
use thiserror::Error;

/// Shared memory that no store can be kept in, or that holds no rows of this one.
#[derive(Debug, Error)]
pub enum SharedMemoryError {
    #[error("cannot {attempt} {path} for the rows of a store: {source}", path = path.display())]
    Io { attempt: &'static str, path: PathBuf, source: std::io::Error },
    #[error("the rows in {path} cannot be used: {problem}", path = path.display())]
    Damaged { path: PathBuf, problem: &'static str },
}

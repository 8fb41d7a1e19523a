//! The project's own lints, which `cargo xtask` calls.
//!
//! [`prose`] checks the English of comments and documents.

mod baseline;
mod error;
mod lexer;
pub mod prose;
mod tree;

pub use error::LintError;

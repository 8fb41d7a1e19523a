//! The project's own lints, which `cargo xtask` calls.
//!
//! [`prose`] checks the English of comments and documents. [`architecture`] checks the layers of
//! crates and the circles of modules. docs/development/lints.md describes both. The lints read the
//! checkout without other tools, and take less than two seconds.

pub mod architecture;
mod baseline;
mod error;
mod lexer;
pub mod prose;
mod tree;

pub use error::LintError;

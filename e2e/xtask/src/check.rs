//! `cargo xtask check`.

use rectrain_harness::cargo::cargo;
use rectrain_harness::workspace::workspace;

use crate::error::XtaskError;
use crate::features;

/// Checks formatting and lints.
pub(crate) fn check() -> Result<(), XtaskError> {
    rectrain_lint::check(&workspace())?;
    features::check()?;
    cargo(&["fmt", "--all", "--check"], "run `cargo fmt --all`")?;
    cargo(
        &["clippy", "--release", "--workspace", "--all-targets", "--", "-D", "warnings"],
        "repair the places that clippy names above",
    )?;
    Ok(())
}

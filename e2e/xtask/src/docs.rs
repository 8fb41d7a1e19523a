//! `cargo xtask docs`: writes the files that are generated from the code.

use rectrain_harness::HarnessError;
use rectrain_harness::cargo::cargo;
use rectrain_harness::command::{command, output};
use rectrain_harness::files::write;
use rectrain_harness::workspace::{built, workspace};

/// Builds the generators and runs them.
pub(crate) fn docs() -> Result<(), HarnessError> {
    cargo(&["build", "--release", "--workspace", "--examples"], "the build failed")?;
    generate("generate")?;
    write(&workspace().join("docs/reference/metrics.md"), generate("metrics_reference")?)?;
    write(&workspace().join("docs/reference/serving-metrics.md"), generate("serving_metrics")?)?;
    write(&workspace().join("docs/reference/serving-ps-metrics.md"), generate("serving_ps_metrics")?)?;
    write(&workspace().join("docs/reference/operator-metrics.md"), generate("operator_metrics")?)?;
    write(&workspace().join("charts/rectrain/README.md"), generate("chart_values")?)
}

/// Runs a built example in the workspace; returns its output.
fn generate(example: &str) -> Result<String, HarnessError> {
    let program = built(&format!("examples/{example}"))?;
    output(command::<&str>(program, []).current_dir(workspace()))
}

//! Images and chart in the cluster.

use std::path::Path;
use std::time::SystemTime;

use rectrain_bring_up::images::{Image, TAG, provide};
use rectrain_bring_up::tools::{HELM, KUBE, build};
use rectrain_bring_up::{Paths, kubeconfig};
use rectrain_harness::HarnessError;
use rectrain_harness::cargo::build_programs;
use rectrain_harness::command::{command, output, visible};
use rectrain_harness::files::{read, write};
use rectrain_harness::kubectl::SYSTEM;
use rectrain_harness::workspace::workspace;

use crate::TrialError;
use crate::error::unmet;

/// The release's name.
const RELEASE: &str = "rectrain";
const CHART: &str = "charts/rectrain";
/// Short polls make the operator notice changes quickly.
pub(crate) const POLL_EVERY_SECOND: &str = "--set=pollSeconds=1";

/// `cargo xtask cluster images`: builds the images of the runtime and the operator and provides
/// them.
///
/// # Errors
/// A build fails; there is no cluster.
pub fn images(paths: &Paths) -> Result<(), TrialError> {
    build_programs()?;
    Ok(provide(paths, &[Image::Runtime, Image::Operator])?)
}

/// `cargo xtask cluster install`: installs the chart with these images. `more` are arguments of
/// helm.
///
/// # Errors
/// See [`images`]; helm fails.
pub fn install(paths: &Paths, more: &[&str]) -> Result<(), TrialError> {
    install_chart(paths, &workspace().join(CHART), more)
}

/// Installs a chart whose CRD lacks the column AGE, as an earlier version's might.
pub(crate) fn install_earlier(paths: &Paths, more: &[&str]) -> Result<(), TrialError> {
    let chart = paths.run().join("earlier-chart");
    output(command("cp", ["--recursive", "--no-target-directory"]).arg(workspace().join(CHART)).arg(&chart))?;
    let file = chart.join("files/rectrainingjobs.yaml");
    let definition = read(&file)?;
    let no_age = || unmet("a column with the job's age", format!("none in {}", file.display()));
    let (columns, rest) =
        definition.split_once("    - description: Time since the job was created.").ok_or_else(no_age)?;
    let (_, rest) = rest.split_once("type: date\n").ok_or_else(no_age)?;
    write(&file, [columns, rest].concat())?;
    install_chart(paths, &chart, more)
}

fn install_chart(paths: &Paths, chart: &Path, more: &[&str]) -> Result<(), TrialError> {
    images(paths)?;
    build(paths, &[HELM, KUBE])?;
    let mut helm = command(paths.program("helm"), ["upgrade", "--install", RELEASE]);
    helm.arg(chart).args(["--namespace", SYSTEM, "--create-namespace", "--wait"]);
    for (value, image) in [("image", Image::Operator), ("runtimeImage", Image::Runtime)] {
        helm.args(["--set", &format!("{value}.repository={},{value}.tag={TAG}", image.repository())]);
    }
    // The tag stays when the program changes. The annotation makes the Deployment replace its pods
    // then.
    let made = std::fs::metadata(Image::Operator.archive(paths)).and_then(|archive| archive.modified());
    let made = made.map_err(HarnessError::io("look at", "the operator's image"))?;
    let made = made.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default().as_millis();
    helm.args(["--set-string", &format!("podAnnotations.imageMadeAtMilliseconds={made}")]);
    Ok(visible(helm.args(more).env("KUBECONFIG", kubeconfig(paths)?))?)
}

/// Uninstalls the chart.
pub(crate) fn uninstall(paths: &Paths) -> Result<(), TrialError> {
    let mut helm = command(paths.program("helm"), ["uninstall", RELEASE, "--namespace", SYSTEM, "--wait"]);
    Ok(visible(helm.env("KUBECONFIG", kubeconfig(paths)?))?)
}

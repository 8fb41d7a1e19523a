//! An object store that speaks S3, in the cluster.

use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{ChildStdout, Command, Stdio};

use rectrain_bring_up::images::{Image, provide};
use rectrain_bring_up::tools::{KUBE, OBJECT_STORE, build};
use rectrain_bring_up::{Paths, kubectl, sources};
use rectrain_harness::HarnessError;
use rectrain_harness::command::{Running, command, output};
use rectrain_harness::files::read;
use rectrain_harness::kubectl::{Kubectl, PODS};

use crate::TrialError;
use crate::error::unmet;

/// The access key of the object store, which is its secret key as well.
const USER: &str = "demonstration";

/// `cargo xtask cluster object-store`: runs the object store in a namespace, as the service
/// `object-store`. The Secret `object-store` has the client's settings.
///
/// # Errors
/// The program or its image cannot be built; its pod does not start.
pub fn start(paths: &Paths, namespace: &str) -> Result<(), TrialError> {
    build(paths, &[OBJECT_STORE, KUBE])?;
    provide(paths, &[Image::ObjectStore])?;
    let kubectl = kubectl(paths)?;
    kubectl.apply(namespace, &read(&sources().join("manifests/object-store.yaml"))?)?;
    Ok(kubectl.within(namespace, &["rollout", "status", "deployment/object-store", PODS]).map(drop)?)
}

/// A port of this machine that kubectl forwards to the object store, until this value is dropped.
pub(crate) struct Forwarded {
    address: String,
    // Both are held, and not read. kubectl prints a line for every connection, and ends if the pipe
    // closes.
    _kubectl: Running,
    _printed: Option<BufReader<ChildStdout>>,
}

impl Forwarded {
    /// The options with which `rectrain` reads from this port (`--option`).
    pub(crate) fn options(&self) -> [String; 5] {
        [
            format!("endpoint=http://{}", self.address),
            "allow_http=true".to_owned(),
            "region=us-east-1".to_owned(),
            format!("access_key_id={USER}"),
            format!("secret_access_key={USER}"),
        ]
    }
}

/// Forwards a free port of this machine to the object store.
pub(crate) fn forward(kubectl: &Kubectl, namespace: &str) -> Result<Forwarded, TrialError> {
    let mut forward = kubectl.command();
    forward.args(["--namespace", namespace, "port-forward", "service/object-store", ":7070"]);
    let mut forward = Running::start(forward.stdin(Stdio::null()).stdout(Stdio::piped()))?;
    let mut line = String::new();
    let mut printed = forward.0.stdout.take().map(BufReader::new);
    if let Some(printed) = &mut printed {
        printed.read_line(&mut line).map_err(HarnessError::io("read", "the output of kubectl port-forward"))?;
    }
    let address = line.strip_prefix("Forwarding from ").and_then(|rest| rest.split(' ').next());
    let address = address.ok_or_else(|| unmet("kubectl to forward a port to the object store", format!("{line:?}")))?;
    Ok(Forwarded { address: address.to_owned(), _kubectl: forward, _printed: printed })
}

/// Uploads files of a folder into the bucket `data`, and makes the bucket if it does not exist.
pub(crate) fn upload(kubectl: &Kubectl, namespace: &str, folder: &Path, files: &[&str]) -> Result<(), TrialError> {
    let forwarded = forward(kubectl, namespace)?;
    let address = &forwarded.address;
    let bucket = format!("http://{address}/data");
    if output(s3(&bucket).arg("--head")).is_err() {
        output(s3(&bucket).args(["--request", "PUT"]))?;
    }
    for file in files {
        output(s3(&format!("http://{address}/data/{file}")).arg("--upload-file").arg(folder.join(file)))?;
    }
    Ok(())
}

/// The text of an object in the bucket `data`.
pub(crate) fn download(kubectl: &Kubectl, namespace: &str, key: &str) -> Result<String, TrialError> {
    let forwarded = forward(kubectl, namespace)?;
    Ok(output(&mut s3(&format!("http://{}/data/{key}", forwarded.address)))?)
}

/// Makes the bucket `data` if it does not exist.
pub(crate) fn make_bucket(kubectl: &Kubectl, namespace: &str) -> Result<(), TrialError> {
    upload(kubectl, namespace, Path::new("."), &[])
}

/// curl with a signed request to the object store.
fn s3(url: &str) -> Command {
    let mut curl = command("curl", ["--silent", "--show-error", "--fail-with-body"]);
    curl.args(["--aws-sigv4", "aws:amz:us-east-1:s3", "--user"]).arg(format!("{USER}:{USER}"));
    curl.args(["--header", "x-amz-content-sha256: UNSIGNED-PAYLOAD", url]);
    curl
}

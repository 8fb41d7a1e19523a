//! What is done with a cluster that is up: give it the images, install the chart, and train in it.

use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, SystemTime};

use serde_json::{Value, json};

use super::images::{self, Image, TAG};
use super::paths::{Paths, sources, write};
use super::process::{command, eventually, output, visible};
use super::{foreign_kubeconfig, kubeconfig, kubectl, tools};

/// The operator's namespace, and the release.
const SYSTEM: &str = "rectrain-system";
const RELEASE: &str = "rectrain";
const CHART: &str = "charts/rectrain";
/// How long a small job may take on a slow machine.
const JOB: Duration = Duration::from_secs(1200);
/// How long pods have to start or to go.
const PODS: &str = "--timeout=180s";

/// `cargo xtask cluster images`
pub(super) fn images(paths: &Paths) -> Result<(), String> {
    build_programs()?;
    provide(paths, &[Image::Runtime, Image::Operator])
}

/// Builds the programs of the images, with the same selection as the tests' (what tests depend on decides on features), so that no
/// dependency is built twice.
fn build_programs() -> Result<(), String> {
    crate::cargo(&["build", "--release", "--workspace", "--bins", "--tests"], "the build failed")
}

/// Builds images and gives them to the nodes. The nodes of a cluster that is not of this machine are given nothing: its owner loads
/// the archives.
fn provide(paths: &Paths, wanted: &[Image]) -> Result<(), String> {
    tools::install_packages()?;
    let foreign = foreign_kubeconfig(paths).is_some();
    for &image in wanted {
        images::build(paths, image)?;
        if foreign {
            let archive = image.archive(paths);
            eprintln!(
                "xtask: load {} into the cluster that KUBECONFIG names, as with `kind load image-archive`",
                archive.display()
            );
        } else {
            let cluster = super::find(paths).ok_or("there is no cluster: `cargo xtask cluster up` makes one")?;
            images::import(paths, &cluster, image)?;
        }
    }
    Ok(())
}

/// `cargo xtask cluster install`
pub(super) fn install(paths: &Paths, more: &[&str]) -> Result<(), String> {
    install_chart(paths, &crate::workspace().join(CHART), more)
}

/// Installs a chart whose definition of jobs lacks their age, as an earlier one may.
pub(super) fn install_earlier(paths: &Paths, more: &[&str]) -> Result<(), String> {
    let chart = paths.run().join("earlier-chart");
    output(command("cp", ["--recursive", "--no-target-directory"]).arg(crate::workspace().join(CHART)).arg(&chart))?;
    let file = chart.join("files/rectrainingjobs.yaml");
    let definition = read(&file)?;
    let (columns, rest) = definition.split_once("    - description: Time since the job was made.").ok_or("no age")?;
    let (_, rest) = rest.split_once("type: date\n").ok_or("no end of the age")?;
    write(&file, [columns, rest].concat())?;
    install_chart(paths, &chart, more)
}

fn install_chart(paths: &Paths, chart: &Path, more: &[&str]) -> Result<(), String> {
    images(paths)?;
    tools::build(paths, &[tools::HELM, tools::KUBE])?;
    let mut helm = command(paths.program("helm"), ["upgrade", "--install", RELEASE]);
    helm.arg(chart).args(["--namespace", SYSTEM, "--create-namespace", "--wait"]);
    for (value, image) in [("image", Image::Operator), ("runtimeImage", Image::Runtime)] {
        helm.args(["--set", &format!("{value}.repository={},{value}.tag={TAG}", image.repository())]);
    }
    // The tag stays when the program changes: this makes pods of the new one.
    let made = std::fs::metadata(Image::Operator.archive(paths)).and_then(|archive| archive.modified());
    let made = made.map_err(|error| format!("cannot look at the operator's image: {error}"))?;
    let made = made.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default().as_millis();
    helm.args(["--set-string", &format!("podAnnotations.imageMadeAtMilliseconds={made}")]);
    visible(helm.args(more).env("KUBECONFIG", kubeconfig(paths)?))
}

/// Takes away what [`install`] has installed.
pub(super) fn uninstall(paths: &Paths) -> Result<(), String> {
    let mut helm = command(paths.program("helm"), ["uninstall", RELEASE, "--namespace", SYSTEM, "--wait"]);
    visible(helm.env("KUBECONFIG", kubeconfig(paths)?))
}

/// `cargo xtask cluster smoke`: the runtime's image, the network and the names of pods, with no operator. Trains in `sync`, where
/// the model must be bit for bit the one that `rectrain run` trains with as many replicas.
pub(super) fn smoke(paths: &Paths) -> Result<(), String> {
    const NAMESPACE: &str = "rectrain-smoke";
    const JOB_FILE: &str = "docs/examples/synthetic.yaml";
    let sets = [
        "spec.training.mode=sync",
        "spec.data.synthetic.rows=40000",
        "spec.data.synthetic.testRows=4000",
        "spec.roles.ps.replicas=2",
        "spec.roles.embeddingWorker.replicas=2",
        "spec.roles.denseWorker.replicas=2",
    ];
    tools::build(paths, &[tools::KUBE])?;
    build_programs()?;
    provide(paths, &[Image::Runtime])?;
    let mut run = command(crate::built("rectrain")?, ["run", JOB_FILE, "--json"]);
    run.args(sets.iter().flat_map(|set| ["--set", set])).current_dir(crate::workspace());
    let here = last_event(&output(&mut run)?)?;

    fresh_namespace(paths, NAMESPACE)?;
    let manifest = crate::workspace().join(JOB_FILE);
    let job = std::fs::read_to_string(&manifest).map_err(|error| format!("cannot read {JOB_FILE}: {error}"))?;
    within(paths, NAMESPACE, &["create", "configmap", "job", &format!("--from-literal=job.yaml={job}")])?;
    // The overrides become arguments of every pod.
    let pods = read(&sources().join("manifests/smoke.yaml"))?;
    let arguments: Vec<_> = sets.iter().map(|set| format!("--set={set}")).collect();
    let pods = pods.replace("--stay,", &format!("--stay, {},", arguments.join(", ")));
    apply(paths, NAMESPACE, &pods)?;
    let there = eventually(JOB, "the job in the cluster", || {
        let logs = within(paths, NAMESPACE, &["logs", "coordinator-0"])?;
        last_event(&logs)
    })?;
    println!("{}", within(paths, NAMESPACE, &["get", "pods", "--output", "wide"])?);
    compare(&here, &there)?;
    let restarts = r"jsonpath={.items[*].status.containerStatuses[0].restartCount}";
    let restarts = within(paths, NAMESPACE, &["get", "pods", "--output", restarts])?;
    if restarts.split_whitespace().any(|count| count != "0") {
        return Err(format!("pods were restarted: {restarts}"));
    }
    within(paths, NAMESPACE, &["delete", "namespace", NAMESPACE, PODS]).map(drop)
}

/// The digest of the trained model, and what was found on the test rows.
fn compare(here: &Value, there: &Value) -> Result<(), String> {
    for field in ["parametersSha256", "samples", "test"] {
        println!("{field}: {}", there[field]);
        if here[field] != there[field] {
            return Err(format!("{field} is {} in the cluster and {} outside of it", there[field], here[field]));
        }
    }
    Ok(())
}

/// The event with which a job ended, if it has.
pub(super) fn last_event(lines: &str) -> Result<Value, String> {
    let last = lines.lines().rfind(|line| line.starts_with('{')).ok_or("there are no events yet")?;
    let event: Value = serde_json::from_str(last).map_err(|error| format!("{last:?} is no event: {error}"))?;
    match event["event"].as_str() {
        Some("summary" | "failed") => Ok(event),
        _ => Err(format!("the last event is {last}")),
    }
}

/// `cargo xtask cluster demo`: the README's example, with its data in an object store in the cluster.
pub(super) fn demo(paths: &Paths) -> Result<(), String> {
    const NAMESPACE: &str = "rectrain-demo";
    const JOB_FILE: &str = "docs/examples/movielens-100k.yaml";
    const DATA: &str = "data/movielens-100k";
    install(paths, &[])?;
    tools::build(paths, &[tools::OBJECT_STORE])?;
    provide(paths, &[Image::ObjectStore])?;
    visible(
        command(crate::built("rectrain")?, ["data", "movielens-100k", "--output", DATA])
            .current_dir(crate::workspace()),
    )?;
    fresh_namespace(paths, NAMESPACE)?;
    apply(paths, NAMESPACE, &read(&sources().join("manifests/object-store.yaml"))?)?;
    within(paths, NAMESPACE, &["rollout", "status", "deployment/object-store", PODS])?;
    upload(paths, NAMESPACE, &crate::workspace().join(DATA), &["train.csv", "test.csv"])?;
    let data = json!({"spec": {"data": {
        "train": {"paths": ["s3://data/train.csv"]},
        "test": {"paths": ["s3://data/test.csv"]},
        "storage": {
            "secretName": "object-store",
        },
    }}});
    let mut patch = kubectl(paths)?;
    patch.args(["patch", "--local", "--type=merge", "--output=json", "--filename"]);
    let job = output(patch.arg(crate::workspace().join(JOB_FILE)).args(["--patch", &data.to_string()]))?;
    apply(paths, NAMESPACE, &job)?;
    let there = watch(paths, NAMESPACE, "movielens-100k")?;
    println!("{there:#}");
    let here = last_event(&output(
        command(crate::built("rectrain")?, ["run", JOB_FILE, "--json"]).current_dir(crate::workspace()),
    )?)?;
    if here["parametersSha256"] != there["parametersSha256"] {
        return Err(format!("`rectrain run` trained another model: {}", here["parametersSha256"]));
    }
    println!("`rectrain run` trained the same model, to the bit");
    Ok(())
}

/// `cargo xtask cluster object-store`: one that speaks S3, as the service `object-store` with the Secret of the same name.
pub(super) fn object_store(paths: &Paths, namespace: &str) -> Result<(), String> {
    tools::build(paths, &[tools::OBJECT_STORE, tools::KUBE])?;
    provide(paths, &[Image::ObjectStore])?;
    apply(paths, namespace, &read(&sources().join("manifests/object-store.yaml"))?)?;
    within(paths, namespace, &["rollout", "status", "deployment/object-store", PODS]).map(drop)
}

/// Shows the job's phases until it has ended; gives its summary.
fn watch(paths: &Paths, namespace: &str, job: &str) -> Result<Value, String> {
    let resource = format!("rectrainingjob/{job}");
    let mut showing = kubectl(paths)?;
    showing.args(["--namespace", namespace, "get", "rectrainingjob", job, "--watch"]).stdin(Stdio::null());
    let showing = Running(showing.spawn().map_err(|error| format!("cannot run kubectl: {error}"))?);
    let ended = eventually(JOB, "the job", || {
        let status = within(paths, namespace, &["get", &resource, "--output=json"])?;
        let status: Value = serde_json::from_str(&status).map_err(|error| error.to_string())?;
        let conditions = status["status"]["conditions"].as_array().cloned().unwrap_or_default();
        let holds = |kind: &str| conditions.iter().find(|at| at["type"] == kind && at["status"] == "True").cloned();
        match (holds("Complete"), holds("Failed")) {
            (Some(_), _) => Ok(Ok(status["status"]["summary"].clone())),
            (None, Some(failed)) => Ok(Err(format!("the job failed: {}", failed["message"]))),
            (None, None) => Err(format!("its conditions are {conditions:?}")),
        }
    })?;
    drop(showing);
    ended
}

/// Puts files into the bucket `data` of the object store, which is made if it is not there.
pub(super) fn upload(paths: &Paths, namespace: &str, folder: &Path, files: &[&str]) -> Result<(), String> {
    let mut forward = kubectl(paths)?;
    forward.args(["--namespace", namespace, "port-forward", "service/object-store", ":7070"]).stdin(Stdio::null());
    let mut forward =
        Running(forward.stdout(Stdio::piped()).spawn().map_err(|error| format!("cannot run kubectl: {error}"))?);
    let mut line = String::new();
    // Kept to the end: kubectl says a word for every connection, and ends if nobody reads.
    let mut printed = forward.0.stdout.take().map(BufReader::new);
    if let Some(printed) = &mut printed {
        printed.read_line(&mut line).map_err(|error| format!("cannot read of kubectl: {error}"))?;
    }
    let address = line.strip_prefix("Forwarding from ").and_then(|rest| rest.split(' ').next());
    let address = address.ok_or_else(|| format!("kubectl does not forward to the object store: {line:?}"))?;
    let bucket = format!("http://{address}/data");
    if output(s3(&bucket).arg("--head")).is_err() {
        output(s3(&bucket).args(["--request", "PUT"]))?;
    }
    for file in files {
        output(s3(&format!("http://{address}/data/{file}")).arg("--upload-file").arg(folder.join(file)))?;
    }
    Ok(())
}

/// A signed request to the demonstration's object store.
fn s3(url: &str) -> Command {
    let signed = ["--aws-sigv4", "aws:amz:us-east-1:s3", "--user", "demonstration:demonstration"];
    let mut curl = command("curl", ["--silent", "--show-error", "--fail-with-body"]);
    curl.args(signed).args(["--header", "x-amz-content-sha256: UNSIGNED-PAYLOAD", url]);
    curl
}

/// Makes the namespace anew; it enforces the restricted pod-security standard.
pub(super) fn fresh_namespace(paths: &Paths, namespace: &str) -> Result<(), String> {
    within(paths, namespace, &["delete", "namespace", namespace, "--ignore-not-found", PODS])?;
    let text = read(&sources().join("manifests/namespace.yaml"))?;
    apply(paths, namespace, &text.replace("{{NAMESPACE}}", namespace))
}

/// Applies objects that are given as text.
pub(super) fn apply(paths: &Paths, namespace: &str, objects: &str) -> Result<(), String> {
    use std::io::Write;
    let mut kubectl = kubectl(paths)?;
    kubectl.args(["--namespace", namespace, "apply", "--filename=-"]).stdin(Stdio::piped()).stdout(Stdio::null());
    let cannot = |error: std::io::Error| format!("cannot run kubectl: {error}");
    let mut child = kubectl.spawn().map_err(cannot)?;
    if let Some(mut input) = child.stdin.take() {
        input.write_all(objects.as_bytes()).map_err(cannot)?;
    }
    let status = child.wait().map_err(cannot)?;
    if status.success() { Ok(()) } else { Err(format!("kubectl apply in {namespace} failed: its complaint is above")) }
}

/// kubectl in a namespace; what it printed.
pub(super) fn within(paths: &Paths, namespace: &str, words: &[&str]) -> Result<String, String> {
    output(kubectl(paths)?.args(["--namespace", namespace]).args(words).stdin(Stdio::null()))
}

fn read(path: &Path) -> Result<String, String> {
    std::fs::read_to_string(path).map_err(|error| format!("cannot read {}: {error}", path.display()))
}

/// A process that ends with its owner.
pub(super) struct Running(pub(super) Child);

impl Drop for Running {
    fn drop(&mut self) {
        // It may have ended by itself.
        let _killed = self.0.kill();
        let _waited = self.0.wait();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_summary_or_a_failure_ends_a_job() {
        assert!(last_event("").is_err());
        assert!(last_event("{\"event\":\"progress\"}\n").is_err());
        let ended =
            last_event("starting\n{\"event\":\"progress\"}\n{\"event\":\"summary\",\"steps\":3}\nlog\n").unwrap();
        assert_eq!(ended["steps"], 3);
        assert_eq!(last_event("{\"event\":\"failed\"}").unwrap()["event"], "failed");
    }
}

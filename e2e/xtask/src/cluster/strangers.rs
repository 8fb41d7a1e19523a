//! Pods that do not belong to a job and call its members all the same: one with no certificate, and one with a certificate that
//! somebody else has signed. Both carry the job's label, so that no NetworkPolicy stands between.

use std::time::Duration;

use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, IsCa, KeyPair};
use serde_json::{Value, json};

use super::install::{apply, within};
use super::operate::{NAMESPACE, delete_job, endless, get, kill_pod, metrics, status, submit, until_phase};
use super::paths::Paths;
use super::process::eventually;

/// A pod is made, calls, gives up, and is counted within this time.
const PATIENCE: Duration = Duration::from_secs(120);
const JOB: &str = "guarded";
const FOREIGN: &str = "foreign-certificate";

/// Whom a stranger calls, and what it has.
struct Stranger {
    calls: &'static str,
    secret: Option<&'static str>,
    /// The reason for which it is counted.
    reason: &'static str,
}

const STRANGERS: [Stranger; 4] = [
    Stranger { calls: "coordinator", secret: None, reason: "protocol" },
    Stranger { calls: "coordinator", secret: Some(FOREIGN), reason: "certificate" },
    Stranger { calls: "ps", secret: None, reason: "protocol" },
    Stranger { calls: "ps", secret: Some(FOREIGN), reason: "certificate" },
];

/// A step of `cargo xtask cluster operate`.
pub(super) fn refuses_strangers(paths: &Paths) -> Result<(), String> {
    submit(paths, JOB, &endless())?;
    until_phase(paths, JOB, "Training")?;
    apply(paths, NAMESPACE, &foreign_secret(paths)?.to_string())?;
    let member = get(paths, &format!("pod/{JOB}-loader-0"))?;
    for (number, stranger) in STRANGERS.iter().enumerate() {
        apply(paths, NAMESPACE, &pod(&name(number), &member, stranger)?.to_string())?;
    }
    for (number, stranger) in STRANGERS.iter().enumerate() {
        eventually(PATIENCE, "a stranger that is counted", || counted(paths, stranger))?;
        eventually(PATIENCE, "the end of a stranger", || {
            match get(paths, &format!("pod/{}", name(number)))?["status"]["phase"].as_str() {
                Some("Failed") => Ok(()),
                other => Err(format!("{} is {other:?}", name(number))),
            }
        })?;
    }
    let after = status(paths, JOB)?;
    if after["phase"] != "Training" || after["restarts"] != 0 {
        return Err(format!("strangers disturbed the job: {after}"));
    }
    println!("{} strangers refused and counted, training undisturbed", STRANGERS.len());
    for number in 0..STRANGERS.len() {
        kill_pod(paths, NAMESPACE, &name(number))?;
    }
    within(paths, NAMESPACE, &["delete", "secret", FOREIGN])?;
    delete_job(paths, JOB)
}

fn name(number: usize) -> String {
    format!("stranger-{number}")
}

/// The job's own authority, which the stranger believes, and a certificate that another one has signed.
fn foreign_secret(paths: &Paths) -> Result<Value, String> {
    let known = get(paths, &format!("secret/{JOB}-certificate"))?["data"]["ca.crt"].clone();
    let (certificate, key) = foreign_certificate().map_err(|error| error.to_string())?;
    Ok(json!({
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {"name": FOREIGN},
        "data": {"ca.crt": known},
        "stringData": {"tls.crt": certificate, "tls.key": key},
    }))
}

fn foreign_certificate() -> Result<(String, String), rcgen::Error> {
    let mut params = CertificateParams::default();
    params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    let authority = CertifiedIssuer::self_signed(params, KeyPair::generate()?)?;
    let key = KeyPair::generate()?;
    let certificate = CertificateParams::new(["member.rectrain.dev".to_owned()])?.signed_by(&key, &authority)?;
    Ok((certificate.pem(), key.serialize_pem()))
}

/// As a member's pod, but for its labels and its certificate, and it takes `stranger.calls` for the coordinator.
fn pod(name: &str, member: &Value, stranger: &Stranger) -> Result<Value, String> {
    let service = format!("{JOB}-{}", stranger.calls);
    let mut arguments: Vec<Value> = ["embedding-worker", "/etc/rectrain/job.yaml", "--index=0", "--log=json"]
        .map(Value::from)
        .into_iter()
        .chain([format!("--coordinator=tcp://{service}-0.{service}.{NAMESPACE}.svc:7000").into()])
        .collect();
    let spec = &member["spec"];
    let manifest = spec["volumes"].as_array().into_iter().flatten().find(|volume| volume["name"] == "manifest");
    let mut volumes = vec![manifest.ok_or("a member's pod has no manifest")?.clone()];
    let mut mounts = vec![json!({"name": "manifest", "mountPath": "/etc/rectrain", "readOnly": true})];
    if let Some(secret) = stranger.secret {
        arguments.push("--tls=/etc/foreign".into());
        volumes.push(json!({"name": "foreign", "secret": {"secretName": secret}}));
        mounts.push(json!({"name": "foreign", "mountPath": "/etc/foreign", "readOnly": true}));
    }
    let container = &spec["containers"][0];
    Ok(json!({
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "labels": {"rectrain.dev/job": JOB}},
        "spec": {
            "restartPolicy": "Never",
            "automountServiceAccountToken": false,
            "securityContext": spec["securityContext"],
            "volumes": volumes,
            "containers": [{
                "name": "stranger",
                "image": container["image"],
                "imagePullPolicy": container["imagePullPolicy"],
                "args": arguments,
                "securityContext": container["securityContext"],
                "volumeMounts": mounts,
            }],
        },
    }))
}

/// Whether the process that the stranger has called says so.
fn counted(paths: &Paths, stranger: &Stranger) -> Result<(), String> {
    let pod = format!("{JOB}-{}-0", stranger.calls);
    let text = metrics(paths, NAMESPACE, &pod, 9090)?;
    let series = format!("rectrain_wire_refused_connections_total{{reason=\"{}\"}} ", stranger.reason);
    match text.lines().find_map(|line| line.strip_prefix(series.as_str())?.parse::<f64>().ok()) {
        Some(count) if count > 0.0 => Ok(()),
        other => Err(format!("{pod} has counted {other:?} because of {}", stranger.reason)),
    }
}

//! Pods that do not belong to a job, but call its members: one without a certificate, and one whose
//! certificate another authority has signed. Both carry the job's label, so that no NetworkPolicy
//! blocks them.

use std::time::Duration;

use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, IsCa, KeyPair};
use rectrain_harness::events::missing;
use rectrain_harness::jobs::{Jobs, NAMESPACE};
use rectrain_harness::manifests::endless;
use rectrain_harness::waiting::eventually;
use rectrain_harness::{HarnessError, not_yet};
use serde_json::{Value, json};

use crate::TrialError;
use crate::cluster::support::TestCluster;
use crate::error::unmet;

/// How long a pod may take to start, to call, to give up, and to be counted.
const PATIENCE: Duration = Duration::from_secs(120);
const JOB: &str = "guarded";
const FOREIGN: &str = "foreign-certificate";

/// A pod that does not belong to the job.
struct Stranger {
    /// The role that it calls.
    calls: &'static str,
    /// The Secret with its certificate.
    secret: Option<&'static str>,
    /// The label `reason` of the counter that must count it.
    reason: &'static str,
}

const STRANGERS: [Stranger; 4] = [
    Stranger { calls: "coordinator", secret: None, reason: "protocol" },
    Stranger { calls: "coordinator", secret: Some(FOREIGN), reason: "certificate" },
    Stranger { calls: "ps", secret: None, reason: "protocol" },
    Stranger { calls: "ps", secret: Some(FOREIGN), reason: "certificate" },
];

pub(in crate::cluster) fn refuses_strangers(cluster: &TestCluster) -> Result<(), TrialError> {
    let jobs = &cluster.jobs;
    jobs.submit(JOB, &endless())?;
    jobs.until_phase(JOB, "Training")?;
    jobs.apply(&foreign_secret(jobs)?)?;
    let member = jobs.get(&format!("pod/{JOB}-loader-0"))?;
    for (number, stranger) in STRANGERS.iter().enumerate() {
        jobs.apply(&pod(&name(number), &member, stranger)?)?;
    }
    for (number, stranger) in STRANGERS.iter().enumerate() {
        eventually(PATIENCE, "the count of a stranger", || is_counted(jobs, stranger))?;
        eventually(PATIENCE, "the end of a stranger", || {
            match jobs.get(&format!("pod/{}", name(number)))?["status"]["phase"].as_str() {
                Some("Failed") => Ok(()),
                other => Err(not_yet(format!("{} is {other:?}", name(number)))),
            }
        })?;
    }
    let after = jobs.status(JOB)?;
    if after["phase"] != "Training" || after["restarts"] != 0 {
        return Err(unmet("the job to train without a restart", after));
    }
    println!("{} strangers refused and counted, training undisturbed", STRANGERS.len());
    for number in 0..STRANGERS.len() {
        jobs.kill_pod(&name(number))?;
    }
    jobs.within(&["delete", "secret", FOREIGN])?;
    Ok(jobs.delete(JOB)?)
}

fn name(number: usize) -> String {
    format!("stranger-{number}")
}

/// A Secret with the job's own authority, which the stranger trusts, and a certificate of another
/// authority.
fn foreign_secret(jobs: &Jobs) -> Result<Value, TrialError> {
    let known = jobs.get(&format!("secret/{JOB}-certificate"))?["data"]["ca.crt"].clone();
    let (certificate, key) = foreign_certificate()?;
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

/// A member's pod with other labels and another certificate, which takes `stranger.calls` for the
/// coordinator.
fn pod(name: &str, member: &Value, stranger: &Stranger) -> Result<Value, HarnessError> {
    let service = format!("{JOB}-{}", stranger.calls);
    let mut arguments: Vec<Value> = ["embedding-worker", "/etc/rectrain/job.yaml", "--index=0", "--log=json"]
        .map(Value::from)
        .into_iter()
        .chain([format!("--coordinator=tcp://{service}-0.{service}.{NAMESPACE}.svc:7000").into()])
        .collect();
    let spec = &member["spec"];
    let manifest = spec["volumes"].as_array().into_iter().flatten().find(|volume| volume["name"] == "manifest");
    let manifest = manifest.ok_or_else(|| missing("a member's pod", spec, "the volume `manifest`"))?;
    let mut volumes = vec![manifest.clone()];
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

/// Checks that the called process has counted the stranger.
fn is_counted(jobs: &Jobs, stranger: &Stranger) -> Result<(), HarnessError> {
    let pod = format!("{JOB}-{}-0", stranger.calls);
    let text = jobs.metrics(&pod)?;
    let series = format!("rectrain_wire_refused_connections_total{{reason=\"{}\"}} ", stranger.reason);
    match text.lines().find_map(|line| line.strip_prefix(series.as_str())?.parse::<f64>().ok()) {
        Some(count) if count > 0.0 => Ok(()),
        other => Err(not_yet(format!("{pod} has counted {other:?} for the reason {}", stranger.reason))),
    }
}

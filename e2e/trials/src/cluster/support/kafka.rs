//! A Kafka broker in the cluster. Pods reach it with TLS and SASL, this machine with neither.

use std::path::Path;
use std::time::{Duration, Instant};

use rcgen::{CertificateParams, KeyPair};
use rectrain_bring_up::images::{Image, provide};
use rectrain_bring_up::sources;
use rectrain_harness::files::read;
use rectrain_harness::jobs::{Jobs, NAMESPACE};
use rectrain_harness::kafka::{CLUSTER, PASSWORD, USER};
use rectrain_harness::kubectl::PODS;
use rectrain_harness::manifests::list;
use rectrain_harness::waiting::eventually;
use rectrain_harness::{HarnessError, not_yet, processes, rectrain};
use serde_json::{Value, json};

use super::TestCluster;
use crate::TrialError;

/// The broker's address for the pods of its namespace.
pub(crate) const ADDRESS: &str = "kafka:9093";
/// The Secret with the name, the password and the certificate that a job's loaders need.
pub(crate) const SECRET: &str = "kafka-user";
/// The Secret with the broker's certificate and its key.
const CERTIFICATE: &str = "kafka-certificate";
const POD: &str = "kafka-0";
/// How long a killed broker may take to answer again.
const RESTART: Duration = Duration::from_secs(180);

/// The broker.
pub(crate) struct Kafka<'a> {
    jobs: &'a Jobs,
    /// The address without TLS and SASL, from this machine.
    address: String,
}

impl<'a> Kafka<'a> {
    /// Starts a broker without topics.
    pub(crate) fn start(cluster: &'a TestCluster) -> Result<Self, TrialError> {
        provide(&cluster.paths, &[Image::Kafka])?;
        let jobs = &cluster.jobs;
        remove(jobs)?;
        jobs.apply(&secrets()?)?;
        let manifest = with_names(&read(&sources().join("manifests/kafka.yaml"))?);
        cluster.kubectl().apply(NAMESPACE, &manifest)?;
        jobs.within(&["rollout", "status", "statefulset/kafka", PODS])?;
        Ok(Self { jobs, address: format!("{}:9092", jobs.address_of(POD)?) })
    }

    /// Writes the rows of a CSV file to a topic, which gets 8 partitions if it is new.
    pub(crate) fn write(&self, rows: &Path, topic: &str) -> Result<(), HarnessError> {
        rectrain::replay(&rows.display().to_string(), &format!("kafka://{}/{topic}", self.address))
    }

    /// Kills the broker's process. Returns how long it took until the next one answered, which has
    /// the same records.
    pub(crate) fn restart(&self) -> Result<Duration, HarnessError> {
        let killed = Instant::now();
        processes::signal(self.jobs.process_of(POD)?, "KILL")?;
        eventually(RESTART, "the broker's next process", || {
            let pod = self.jobs.get(&format!("pod/{POD}"))?;
            let container = &pod["status"]["containerStatuses"][0];
            if container["restartCount"] == 1 && container["ready"] == true { Ok(()) } else { Err(not_yet(container)) }
        })?;
        Ok(killed.elapsed())
    }

    /// Removes the broker and its records.
    pub(crate) fn remove(self) -> Result<(), HarnessError> {
        remove(self.jobs)
    }
}

fn remove(jobs: &Jobs) -> Result<(), HarnessError> {
    let [secret, certificate] = [SECRET, CERTIFICATE].map(|name| format!("secret/{name}"));
    let objects: [&str; 5] = ["statefulset/kafka", "service/kafka", "configmap/kafka", &secret, &certificate];
    jobs.within(&[&["delete", "--ignore-not-found", PODS][..], &objects].concat())?;
    // A StatefulSet is gone before its pods are.
    jobs.within(&["delete", "pod", POD, "--ignore-not-found", PODS]).map(drop)
}

/// The broker's objects, with the names that the harness uses for every broker.
fn with_names(manifest: &str) -> String {
    manifest.replace("{{CLUSTER}}", CLUSTER).replace("{{USER}}", USER).replace("{{PASSWORD}}", PASSWORD)
}

/// The Secrets of the broker and of its user.
fn secrets() -> Result<Value, TrialError> {
    let (certificate, key) = certificate()?;
    let secret = |name: &str, entries: Value| json!({"apiVersion": "v1", "kind": "Secret", "metadata": {"name": name}, "stringData": entries});
    let user = json!({"KAFKA_USERNAME": USER, "KAFKA_PASSWORD": PASSWORD, "KAFKA_CA_CERTIFICATE": certificate});
    let keystore = json!({"keystore.pem": format!("{key}{certificate}")});
    Ok(list(vec![secret(SECRET, user), secret(CERTIFICATE, keystore)]))
}

/// A certificate for the broker's name, which it signs itself, and its key, as PEM.
fn certificate() -> Result<(String, String), rcgen::Error> {
    let key = KeyPair::generate()?;
    let certificate = CertificateParams::new(["kafka".to_owned()])?.self_signed(&key)?;
    Ok((certificate.pem(), key.serialize_pem()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_manifest_has_the_names_of_the_harness_and_of_the_job() {
        let manifest = with_names(&read(&sources().join("manifests/kafka.yaml")).unwrap());
        assert!(!manifest.contains("{{"), "{manifest}");
        assert!(manifest.contains(&format!("SCRAM-SHA-512=[name={USER},password={PASSWORD}]")));
        assert!(manifest.contains(&format!("SASL_SSL://{ADDRESS}")));
        assert!(manifest.contains(&format!("secretName: {CERTIFICATE}")));
    }

    #[test]
    fn the_user_trusts_the_certificate_of_the_broker() {
        let secrets = secrets().unwrap();
        let [user, broker] = [0, 1].map(|index| secrets["items"][index]["stringData"].clone());
        let authority = user["KAFKA_CA_CERTIFICATE"].as_str().unwrap();
        let keystore = broker["keystore.pem"].as_str().unwrap();
        assert!(authority.starts_with("-----BEGIN CERTIFICATE-----") && keystore.ends_with(authority));
        assert!(keystore.starts_with("-----BEGIN PRIVATE KEY-----"), "{keystore}");
    }
}

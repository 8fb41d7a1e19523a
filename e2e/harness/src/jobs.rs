//! The jobs in one namespace of a cluster: submit, watch, disturb and delete them.

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader};
use std::net::{IpAddr, SocketAddr};
use std::process::Stdio;
use std::time::Duration;

use serde_json::{Value, json};

use crate::command::{Running, command, output};
use crate::kubectl::Kubectl;
use crate::manifests::manifest;
use crate::waiting::eventually;
use crate::workspace::built;
use crate::{HarnessError, events, not_yet, processes};

/// The namespace that the trials use.
pub const NAMESPACE: &str = "rectrain-operate";

/// How long a small job may take on a slow machine.
const JOB: Duration = Duration::from_secs(900);
/// How long a condition may take to appear.
const CONDITION: Duration = Duration::from_secs(180);
/// How long a job may take to make one step, restarts included.
const STEP: Duration = Duration::from_secs(180);
/// The port of every process's metrics.
pub const METRICS_PORT: u16 = 9090;

/// The jobs in one namespace.
#[derive(Debug, Clone)]
pub struct Jobs {
    kubectl: Kubectl,
    namespace: String,
}

impl Jobs {
    /// The jobs in `namespace`.
    #[must_use]
    pub fn new(kubectl: Kubectl, namespace: &str) -> Self {
        Self { kubectl, namespace: namespace.to_owned() }
    }

    /// kubectl for the cluster.
    #[must_use]
    pub fn kubectl(&self) -> &Kubectl {
        &self.kubectl
    }

    /// Runs kubectl in the namespace and returns its output.
    ///
    /// # Errors
    /// See [`output`].
    pub fn within(&self, words: &[&str]) -> Result<String, HarnessError> {
        self.kubectl.within(&self.namespace, words)
    }

    /// Applies an object, or a list of objects.
    ///
    /// # Errors
    /// See [`Kubectl::apply`].
    pub fn apply(&self, objects: &Value) -> Result<(), HarnessError> {
        self.kubectl.apply(&self.namespace, &objects.to_string())
    }

    /// Applies the small job of [`manifest`] with these changes.
    ///
    /// # Errors
    /// See [`Kubectl::apply`].
    pub fn submit(&self, name: &str, changes: &Value) -> Result<(), HarnessError> {
        self.apply(&manifest(name, changes))
    }

    /// An object (`pod/clicks-ps-0`), or all objects of a kind.
    ///
    /// # Errors
    /// See [`Kubectl::json`].
    pub fn get(&self, resource: &str) -> Result<Value, HarnessError> {
        self.kubectl.json(&self.namespace, &["get", resource])
    }

    /// The job, with spec and status.
    ///
    /// # Errors
    /// See [`Kubectl::json`].
    pub fn job(&self, name: &str) -> Result<Value, HarnessError> {
        self.get(&format!("rectrainingjob/{name}"))
    }

    /// The job's status.
    ///
    /// # Errors
    /// See [`Kubectl::json`].
    pub fn status(&self, name: &str) -> Result<Value, HarnessError> {
        Ok(self.job(name)?["status"].clone())
    }

    /// The global step in the job's status; 0 before the first one.
    ///
    /// # Errors
    /// See [`Kubectl::json`].
    pub fn step(&self, name: &str) -> Result<u64, HarnessError> {
        Ok(self.status(name)?["step"].as_u64().unwrap_or(0))
    }

    /// Merges a patch into the job.
    ///
    /// # Errors
    /// See [`output`].
    pub fn patch(&self, name: &str, patch: &Value) -> Result<(), HarnessError> {
        self.within(&["patch", "rectrainingjob", name, "--type=merge", &format!("--patch={patch}")]).map(drop)
    }

    /// Deletes the job and waits until it is gone.
    ///
    /// # Errors
    /// See [`output`].
    pub fn delete(&self, name: &str) -> Result<(), HarnessError> {
        self.within(&["delete", "rectrainingjob", name, "--timeout=120s"]).map(drop)
    }

    /// Waits until the job is in a phase; returns the job.
    ///
    /// # Errors
    /// [`HarnessError::TimedOut`].
    pub fn until_phase(&self, name: &str, phase: &str) -> Result<Value, HarnessError> {
        eventually(JOB, &format!("the phase {phase} of {name}"), || {
            let job = self.job(name)?;
            let status = &job["status"];
            if status["phase"] == phase {
                return Ok(job);
            }
            Err(not_yet(format!("phase {}, {}", status["phase"], status["conditions"])))
        })
    }

    /// Waits until the job is past a global step; returns its step.
    ///
    /// # Errors
    /// [`HarnessError::TimedOut`].
    pub fn until_step_after(&self, name: &str, step: u64) -> Result<u64, HarnessError> {
        eventually(STEP, &format!("a step of {name} after {step}"), || match self.step(name)? {
            present if present > step => Ok(present),
            present => Err(not_yet(format!("it is at step {present}"))),
        })
    }

    /// The phases of a job until it ends, as a watch shows them, without repetitions. A watch may
    /// miss a short phase.
    ///
    /// # Errors
    /// [`HarnessError::Io`] if the watch breaks off.
    pub fn phases(&self, name: &str) -> Result<Vec<String>, HarnessError> {
        let mut watch = self.kubectl.command();
        watch.args(["--namespace", &self.namespace, "get", "rectrainingjob", name, "--watch"]);
        watch.arg("--output=jsonpath={.status.phase}{\"\\n\"}").stdin(Stdio::null()).stdout(Stdio::piped());
        // The watch never ends by itself.
        let mut watch = Running::start(&mut watch)?;
        let lines = watch.0.stdout.take().ok_or(HarnessError::NoPipe { program: "kubectl", stream: "output" })?;
        let mut seen: Vec<String> = Vec::new();
        for line in BufReader::new(lines).lines() {
            let phase = line.map_err(HarnessError::io("read", "the watch of kubectl"))?;
            if !phase.is_empty() && seen.last() != Some(&phase) {
                seen.push(phase.clone());
            }
            if phase == "Complete" || phase == "Failed" {
                break;
            }
        }
        Ok(seen)
    }

    /// Waits until a condition of the job is true for a reason; returns the condition's message.
    ///
    /// # Errors
    /// [`HarnessError::TimedOut`].
    pub fn until_condition(&self, name: &str, kind: &str, reason: &str) -> Result<String, HarnessError> {
        eventually(CONDITION, &format!("the condition {kind} of {name} with reason {reason}"), || {
            let job = self.job(name)?;
            let found = condition(&job, kind).ok_or_else(|| not_yet(&job["status"]["conditions"]))?;
            if found["reason"] != reason {
                return Err(not_yet(format!("its reason is {}: {}", found["reason"], found["message"])));
            }
            Ok(found["message"].as_str().unwrap_or_default().to_owned())
        })
    }

    /// The names and uids of the job's pods.
    ///
    /// # Errors
    /// See [`output`].
    pub fn pods(&self, name: &str) -> Result<BTreeMap<String, String>, HarnessError> {
        self.uids("pods", "{.metadata.name}", name)
    }

    /// Fails while the job has a pod.
    ///
    /// # Errors
    /// [`HarnessError::NotYet`] with the pods.
    pub fn has_no_pods(&self, name: &str) -> Result<(), HarnessError> {
        let pods = self.within(&["get", "pods", "--selector", &selector(name), "--output=name"])?;
        if pods.trim().is_empty() { Ok(()) } else { Err(not_yet(pods)) }
    }

    /// The names (`Service/clicks-ps`) and uids of all objects that belong to the job, except its
    /// pods.
    ///
    /// # Errors
    /// See [`output`].
    pub fn belongings(&self, name: &str) -> Result<BTreeMap<String, String>, HarnessError> {
        let kinds = "serviceaccounts,configmaps,secrets,services,networkpolicies,poddisruptionbudgets,statefulsets";
        self.uids(kinds, "{.kind}/{.metadata.name}", name)
    }

    fn uids(&self, kinds: &str, key: &str, job: &str) -> Result<BTreeMap<String, String>, HarnessError> {
        let columns = format!("--output=jsonpath={{range .items[*]}}{key} {{.metadata.uid}}{{\"\\n\"}}{{end}}");
        let text = self.within(&["get", kinds, "--selector", &selector(job), &columns])?;
        let pairs = text.lines().filter_map(|line| line.split_once(' '));
        Ok(pairs.map(|(name, uid)| (name.to_owned(), uid.to_owned())).collect())
    }

    /// Kills a pod without grace.
    ///
    /// # Errors
    /// See [`output`].
    pub fn kill_pod(&self, pod: &str) -> Result<(), HarnessError> {
        self.kubectl.kill_pod(&self.namespace, pod)
    }

    /// The node that a pod runs on.
    ///
    /// # Errors
    /// [`HarnessError::NoField`] if it runs on none.
    pub fn node_of(&self, pod: &str) -> Result<String, HarnessError> {
        let found = self.get(&format!("pod/{pod}"))?;
        let node = found["spec"]["nodeName"].as_str().map(str::to_owned);
        node.ok_or_else(|| events::missing(pod, &found["spec"], "nodeName"))
    }

    /// A pod's IP address.
    ///
    /// # Errors
    /// [`HarnessError::NoField`] if it has none.
    pub fn address_of(&self, pod: &str) -> Result<String, HarnessError> {
        let found = self.get(&format!("pod/{pod}"))?;
        let address = found["status"]["podIP"].as_str().map(str::to_owned);
        address.ok_or_else(|| events::missing(pod, &found["status"], "podIP"))
    }

    /// The address of a port of a pod.
    ///
    /// # Errors
    /// [`HarnessError::NoField`] if the pod has no IP address.
    pub fn socket_of(&self, pod: &str, port: u16) -> Result<SocketAddr, HarnessError> {
        let text = self.address_of(pod)?;
        let ip: Option<IpAddr> = text.parse().ok();
        let ip = ip.ok_or_else(|| events::missing(pod, &json!(text), "an IP address"))?;
        Ok(SocketAddr::new(ip, port))
    }

    /// The process of a pod's container, on this machine.
    ///
    /// # Errors
    /// [`HarnessError::NoProcess`].
    pub fn process_of(&self, pod: &str) -> Result<u32, HarnessError> {
        let found = self.get(&format!("pod/{pod}"))?;
        let uid = found["metadata"]["uid"].as_str().unwrap_or_default();
        processes::of_pod(uid).ok_or_else(|| HarnessError::NoProcess { pod: pod.to_owned() })
    }

    /// The metrics of a job's pod.
    ///
    /// # Errors
    /// See [`output`].
    pub fn metrics(&self, pod: &str) -> Result<String, HarnessError> {
        self.kubectl.page(&self.namespace, pod, METRICS_PORT, "metrics")
    }

    /// The page that the job's coordinator shows to people, as JSON.
    ///
    /// # Errors
    /// See [`output`]; [`HarnessError::Json`].
    pub fn page(&self, name: &str) -> Result<Value, HarnessError> {
        let pod = format!("{name}-coordinator-0");
        let text = self.kubectl.page(&self.namespace, &pod, METRICS_PORT, "job.json")?;
        events::parse(&format!("the page of {name}"), &text)
    }

    /// The events in the log of the job's coordinator.
    ///
    /// # Errors
    /// See [`output`].
    pub fn events(&self, name: &str) -> Result<Vec<Value>, HarnessError> {
        let log = self.within(&["logs", &format!("{name}-coordinator-0")])?;
        Ok(log.lines().filter_map(|line| serde_json::from_str(line).ok()).collect())
    }

    /// Runs `rectrain` against this cluster and namespace.
    ///
    /// # Errors
    /// See [`output`].
    pub fn rectrain(&self, words: &[&str]) -> Result<String, HarnessError> {
        let mut rectrain = command(built("rectrain")?, words);
        output(rectrain.args(["--namespace", &self.namespace]).env("KUBECONFIG", self.kubectl.kubeconfig()))
    }

    /// Changes the number of replicas of a role in the manifest.
    ///
    /// # Errors
    /// See [`output`].
    pub fn set_replicas(&self, name: &str, role: &str, replicas: u32) -> Result<(), HarnessError> {
        self.patch(name, &json!({"spec": {"roles": {role: {"replicas": replicas}}}}))
    }
}

/// The label selector of a job's objects.
#[must_use]
pub fn selector(job: &str) -> String {
    format!("rectrain.dev/job={job}")
}

/// A condition of the job, if it is true.
#[must_use]
pub fn condition(job: &Value, kind: &str) -> Option<Value> {
    let conditions = job["status"]["conditions"].as_array()?;
    conditions.iter().find(|found| found["type"] == kind && found["status"] == "True").cloned()
}

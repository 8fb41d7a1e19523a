//! kubectl for one cluster.

use std::io::Write;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use serde_json::Value;

use crate::command::{Running, output, shown, start};
use crate::http::free_address;
use crate::workspace::workspace;
use crate::{HarnessError, events, files};

/// The operator's namespace.
pub const SYSTEM: &str = "rectrain-system";
/// How long pods may take to start or to end, as an argument of kubectl.
pub const PODS: &str = "--timeout=180s";
/// A namespace that enforces the restricted pod-security standard.
const NAMESPACE_MANIFEST: &str = "e2e/cluster/manifests/namespace.yaml";

/// kubectl, and the kubeconfig of one cluster.
#[derive(Debug, Clone)]
pub struct Kubectl {
    program: PathBuf,
    kubeconfig: PathBuf,
}

impl Kubectl {
    /// `program` is the Kubernetes program of `e2e/cluster`, whose subcommand `kubectl` this runs.
    #[must_use]
    pub fn new(program: PathBuf, kubeconfig: PathBuf) -> Self {
        Self { program, kubeconfig }
    }

    /// The cluster's kubeconfig.
    #[must_use]
    pub fn kubeconfig(&self) -> &Path {
        &self.kubeconfig
    }

    /// kubectl without arguments.
    #[must_use]
    pub fn command(&self) -> Command {
        let mut kubectl = Command::new(&self.program);
        kubectl.arg("kubectl").env("KUBECONFIG", &self.kubeconfig);
        kubectl
    }

    /// Runs kubectl in a namespace and returns its output.
    ///
    /// # Errors
    /// See [`output`].
    pub fn within(&self, namespace: &str, words: &[&str]) -> Result<String, HarnessError> {
        output(self.command().args(["--namespace", namespace]).args(words).stdin(Stdio::null()))
    }

    /// Runs kubectl in a namespace with `--output=json` and parses its output.
    ///
    /// # Errors
    /// See [`output`]; [`HarnessError::Json`].
    pub fn json(&self, namespace: &str, words: &[&str]) -> Result<Value, HarnessError> {
        let text = self.within(namespace, &[words, &["--output=json"]].concat())?;
        events::parse(&format!("the output of `kubectl {}`", words.join(" ")), &text)
    }

    /// The page that a pod serves, through the API server.
    ///
    /// # Errors
    /// See [`output`].
    pub fn page(&self, namespace: &str, pod: &str, port: u16, path: &str) -> Result<String, HarnessError> {
        let page = format!("/api/v1/namespaces/{namespace}/pods/{pod}:{port}/proxy/{path}");
        self.within(namespace, &["get", "--raw", &page])
    }

    /// Applies objects, as YAML or JSON. kubectl writes its complaint to the terminal.
    ///
    /// # Errors
    /// [`HarnessError::NotStarted`], [`HarnessError::Io`], [`HarnessError::Failed`].
    pub fn apply(&self, namespace: &str, objects: &str) -> Result<(), HarnessError> {
        let mut kubectl = self.command();
        kubectl.args(["--namespace", namespace, "apply", "--filename=-"]).stdin(Stdio::piped()).stdout(Stdio::null());
        let mut child = start(&mut kubectl)?;
        if let Some(mut input) = child.stdin.take() {
            input.write_all(objects.as_bytes()).map_err(HarnessError::io("write to", "kubectl apply"))?;
        }
        let status = child.wait().map_err(HarnessError::io("wait for", "kubectl apply"))?;
        if status.success() {
            return Ok(());
        }
        let output = "its complaint is above".to_owned();
        Err(HarnessError::Failed { command: shown(&kubectl), status, output })
    }

    /// Deletes a namespace, if it exists, and makes it again.
    ///
    /// # Errors
    /// See [`Kubectl::apply`].
    pub fn fresh_namespace(&self, namespace: &str) -> Result<(), HarnessError> {
        self.within(namespace, &["delete", "namespace", namespace, "--ignore-not-found", PODS])?;
        let manifest = files::read(&workspace().join(NAMESPACE_MANIFEST))?;
        self.apply(namespace, &manifest.replace("{{NAMESPACE}}", namespace))
    }

    /// Kills a pod without grace.
    ///
    /// # Errors
    /// See [`output`].
    pub fn kill_pod(&self, namespace: &str, pod: &str) -> Result<(), HarnessError> {
        self.within(namespace, &["delete", "pod", pod, "--grace-period=0", "--force"]).map(drop)
    }

    /// Starts a proxy to the API server, which needs no certificate; returns its address.
    ///
    /// # Errors
    /// See [`Running::start`].
    pub fn proxy(&self) -> Result<(Running, SocketAddr), HarnessError> {
        let address = free_address()?;
        let mut proxy = self.command();
        proxy.args(["proxy", "--port", &address.port().to_string()]).stdin(Stdio::null()).stdout(Stdio::null());
        Ok((Running::start(&mut proxy)?, address))
    }

    /// The name of the operator's leader; empty while there is none.
    ///
    /// # Errors
    /// See [`output`].
    pub fn leader(&self) -> Result<String, HarnessError> {
        let holder = "--output=jsonpath={.spec.holderIdentity}";
        self.within(SYSTEM, &["get", "lease/rectrain-operator", holder])
    }

    /// The metrics that the operator's pod `pod` serves.
    ///
    /// # Errors
    /// See [`output`].
    pub fn operator_metrics(&self, pod: &str) -> Result<String, HarnessError> {
        self.page(SYSTEM, pod, 8080, "metrics")
    }
}

//! What an installation of the operator decides for all its jobs. Values come from the command line, which the chart writes.

use std::time::Duration;

/// See the module's text.
#[derive(Clone, Debug)]
pub struct OperatorConfig {
    /// Image of the pods of jobs.
    pub runtime_image: String,
    /// `Always`, `IfNotPresent` or `Never`.
    pub image_pull_policy: String,
    /// Secrets, in the job's namespace, with which the image is pulled.
    pub image_pull_secrets: Vec<String>,
    /// Time between two questions to a coordinator.
    pub poll: Duration,
    /// The operator's own namespace, from where alone the coordinators' control port can be reached; `None` when it does not run
    /// in a cluster, and then the port is open to all pods.
    pub namespace: Option<String>,
    /// Whether the pods of attempts that begin now speak with members of their job only. Needs the installation's root.
    pub tls: bool,
    /// Objects that are reconciled at the same time.
    pub concurrency: u16,
}

impl Default for OperatorConfig {
    fn default() -> Self {
        Self {
            runtime_image: "rectrain:latest".to_owned(),
            image_pull_policy: "IfNotPresent".to_owned(),
            image_pull_secrets: Vec::new(),
            poll: Duration::from_secs(3),
            namespace: None,
            tls: false,
            concurrency: 64,
        }
    }
}

//! What an installation of the operator decides for all its jobs. Values come from the command line, which the chart writes.

use std::collections::BTreeMap;
use std::time::Duration;

use k8s_openapi::api::core::v1::Toleration;
use serde::Deserialize;

/// See the module's text.
#[derive(Clone, Debug)]
pub struct OperatorConfig {
    /// Image of the pods of jobs.
    pub runtime_image: String,
    /// Image of the pods of jobs whose dense workers compute on GPUs.
    pub gpu_runtime_image: String,
    /// Where pods with a GPU go.
    pub gpu_pods: GpuPods,
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
    /// Jobs that are reconciled at the same time, at least 1.
    pub concurrency: u16,
}

impl OperatorConfig {
    /// The image of a job's pods. All roles of a job run the same program.
    #[must_use]
    pub fn image(&self, gpus: u32) -> &str {
        if gpus > 0 { &self.gpu_runtime_image } else { &self.runtime_image }
    }
}

/// Where pods with a GPU go, in the form of a pod's fields.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct GpuPods {
    /// Labels that a node must have.
    pub node_selector: Option<BTreeMap<String, String>>,
    /// Taints that do not keep them away.
    pub tolerations: Option<Vec<Toleration>>,
}

impl std::str::FromStr for GpuPods {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        serde_json::from_str(text)
            .map_err(|error| format!("expected {{\"nodeSelector\": …, \"tolerations\": …}} in JSON: {error}"))
    }
}

impl Default for OperatorConfig {
    fn default() -> Self {
        Self {
            runtime_image: "rectrain:latest".to_owned(),
            gpu_runtime_image: "rectrain-cuda:latest".to_owned(),
            gpu_pods: GpuPods::default(),
            image_pull_policy: "IfNotPresent".to_owned(),
            image_pull_secrets: Vec::new(),
            poll: Duration::from_secs(3),
            namespace: None,
            tls: false,
            concurrency: 16,
        }
    }
}

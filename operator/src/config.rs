//! The settings of an installation of the operator, for all its jobs. They come from the command
//! line, which the chart writes.

use std::collections::BTreeMap;
use std::time::Duration;

use k8s_openapi::api::core::v1::Toleration;
use serde::Deserialize;

/// The settings of an installation.
#[derive(Clone, Debug)]
pub struct OperatorConfig {
    /// Image of the pods of jobs.
    pub runtime_image: String,
    /// Image of the pods of jobs whose dense workers compute on GPUs.
    pub gpu_runtime_image: String,
    /// Placement of pods with a GPU.
    pub gpu_pods: GpuPods,
    /// `Always`, `IfNotPresent` or `Never`.
    pub image_pull_policy: String,
    /// Secrets, in the job's namespace, to pull the image with.
    pub image_pull_secrets: Vec<String>,
    /// Time between two requests to a coordinator.
    pub poll: Duration,
    /// The operator's own namespace: only its pods may reach the coordinators' control port. `None`
    /// if the operator does not run in a cluster; then all pods may reach it.
    pub namespace: Option<String>,
    /// Whether pods of new attempts accept only members of their job. Needs the installation's
    /// root.
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

/// Placement of pods with a GPU, as fields of a pod.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct GpuPods {
    /// Labels that a node must have.
    pub node_selector: Option<BTreeMap<String, String>>,
    /// Taints that the pods tolerate.
    pub tolerations: Option<Vec<Toleration>>,
}

/// A text that is no [`GpuPods`].
#[derive(Debug, thiserror::Error)]
#[error("expected {{\"nodeSelector\": …, \"tolerations\": …}} in JSON: {0}")]
pub struct GpuPodsError(#[from] serde_json::Error);

impl std::str::FromStr for GpuPods {
    type Err = GpuPodsError;

    fn from_str(text: &str) -> Result<Self, GpuPodsError> {
        Ok(serde_json::from_str(text)?)
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

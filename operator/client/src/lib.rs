//! The commands `rectrain status`, `rectrain logs`, `rectrain mode` and `rectrain page`: they read
//! or change a job in the kubeconfig's cluster. The command line uses this crate behind its feature
//! `cluster`, so that runtime images build without a Kubernetes client. It needs only the
//! permissions of a kubectl user, and never connects to the job's pods: the API server does.

// A print macro panics when its pipe closes.
#![deny(clippy::print_stdout, clippy::print_stderr)]

mod logs;
mod page;
mod show;

use kube::api::{Api, ListParams, Patch, PatchParams};
use kube::config::KubeConfigOptions;
use kube::{Client, Config};
use rectrain_crds::{Mode, RecTrainingJob};
use serde_json::json;

pub use logs::{LogRequest, logs};
pub use page::CoordinatorAnswer;
pub use show::render;

/// The label of all objects of a job.
const JOB_LABEL: &str = "rectrain.dev/job";
/// The label of a pod's role.
const ROLE_LABEL: &str = "rectrain.dev/role";

/// The container of a job's pods that runs the job's role.
const CONTAINER: &str = "rectrain";

/// Why a command on a job in a cluster failed.
#[derive(Debug, thiserror::Error)]
pub enum ClientError {
    /// There is no usable kubeconfig.
    #[error("no cluster: {0}; set KUBECONFIG or pass --context")]
    Config(String),
    /// The API server refused or failed a request.
    #[error("cannot {attempt}: {source}")]
    Api {
        /// The request, as "read job clicks".
        attempt: String,
        /// Its error.
        source: Box<kube::Error>,
    },
    /// The namespace has no such job.
    #[error("there is no RecTrainingJob `{job}` in namespace {namespace}{hint}")]
    NoSuchJob {
        /// The requested name.
        job: String,
        /// The namespace.
        namespace: String,
        /// The names of some other jobs. Empty without any.
        hint: String,
    },
    /// The job has no such pods at the moment.
    #[error("job `{job}` has no pods of role {role} now: its phase is {phase}")]
    NoPods {
        /// The job.
        job: String,
        /// The role.
        role: String,
        /// The job's phase.
        phase: String,
    },
    /// The output could not be written.
    #[error("cannot write the output: {0}")]
    Output(#[from] std::io::Error),
}

/// A cluster and a namespace.
#[derive(Clone)]
pub struct Cluster {
    client: Client,
    namespace: String,
}

impl Cluster {
    /// Connects to the cluster of the kubeconfig or of the pod's ServiceAccount. `context` and
    /// `namespace` override theirs.
    ///
    /// # Errors
    /// If neither names a usable cluster.
    pub async fn connect(context: Option<String>, namespace: Option<String>) -> Result<Self, ClientError> {
        // A build may contain several TLS providers: rustls then needs an explicit default. An
        // error means that the process already has one, which serves as well.
        let _chosen = tokio_rustls::rustls::crypto::ring::default_provider().install_default();
        let config = match context {
            Some(context) => {
                let options = KubeConfigOptions { context: Some(context), ..KubeConfigOptions::default() };
                Config::from_kubeconfig(&options).await.map_err(|error| ClientError::Config(error.to_string()))?
            }
            None => Config::infer().await.map_err(|error| ClientError::Config(error.to_string()))?,
        };
        let namespace = namespace.unwrap_or_else(|| config.default_namespace.clone());
        let client = Client::try_from(config).map_err(|error| ClientError::Config(error.to_string()))?;
        Ok(Self { client, namespace })
    }

    /// Reads the job of this name.
    ///
    /// # Errors
    /// If there is none; the error names up to ten jobs of the namespace. If the API server fails.
    pub async fn job(&self, name: &str) -> Result<RecTrainingJob, ClientError> {
        let jobs: Api<RecTrainingJob> = Api::namespaced(self.client.clone(), &self.namespace);
        let failed = |source| api_error(format!("read job {name}"), source);
        if let Some(job) = jobs.get_opt(name).await.map_err(failed)? {
            return Ok(job);
        }
        let others = jobs.list_metadata(&ListParams::default().limit(10)).await.map_err(failed)?;
        let names: Vec<String> = others.items.into_iter().filter_map(|job| job.metadata.name).collect();
        let hint = if names.is_empty() { String::new() } else { format!("; there is {}", names.join(", ")) };
        Err(ClientError::NoSuchJob { job: name.to_owned(), namespace: self.namespace.clone(), hint })
    }

    /// Sets the training mode in the job's manifest. In a running job, the operator switches the
    /// mode at the next global-step boundary, without restarting a pod. If the job cannot switch,
    /// its condition `Stalled` says why. Any other job starts in the new mode.
    ///
    /// # Errors
    /// If there is no such job, or if the API server refuses the change.
    pub async fn set_mode(&self, name: &str, mode: Mode) -> Result<(), ClientError> {
        self.job(name).await?;
        let jobs: Api<RecTrainingJob> = Api::namespaced(self.client.clone(), &self.namespace);
        let patch = json!({"spec": {"training": {"mode": mode}}});
        jobs.patch(name, &PatchParams::default(), &Patch::Merge(patch))
            .await
            .map(drop)
            .map_err(|source| api_error(format!("set the mode of job {name}"), source))
    }
}

fn api_error(attempt: String, source: kube::Error) -> ClientError {
    ClientError::Api { attempt, source: Box::new(source) }
}

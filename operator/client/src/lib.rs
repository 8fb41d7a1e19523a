//! What `rectrain status`, `rectrain logs` and `rectrain mode` do: look at a job in the cluster that the kubeconfig names. A crate of
//! its own, which the command has behind the feature `cluster`, so that a runtime image can be built without a Kubernetes client.
//! It reads what everybody may read with kubectl; nothing here talks to the job's pods.

mod logs;
mod show;

use kube::api::{Api, ListParams, Patch, PatchParams};
use kube::config::KubeConfigOptions;
use kube::{Client, Config};
use rectrain_crds::{Mode, RecTrainingJob};
use serde_json::json;

pub use logs::{LogRequest, logs};
pub use show::render;

/// The label of everything that belongs to a job.
const JOB_LABEL: &str = "rectrain.dev/job";
/// The label of a pod's role.
const ROLE_LABEL: &str = "rectrain.dev/role";

/// The container in which a pod of a job does its work.
const CONTAINER: &str = "rectrain";

/// Why a job in a cluster could not be looked at.
#[derive(Debug, thiserror::Error)]
pub enum ClientError {
    /// There is no kubeconfig, or it names no cluster.
    #[error("no cluster: {0}; set KUBECONFIG, or give --context")]
    Config(String),
    /// The API server did not do as asked.
    #[error("cannot {attempt}: {source}")]
    Api {
        /// What was asked.
        attempt: String,
        /// Why not.
        source: Box<kube::Error>,
    },
    /// There is no such job.
    #[error("there is no RecTrainingJob `{job}` in namespace {namespace}{hint}")]
    NoSuchJob {
        /// Its name.
        job: String,
        /// Where.
        namespace: String,
        /// Those that there are.
        hint: String,
    },
    /// The job has no such pods now.
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
    /// The one that the kubeconfig (or the pod's ServiceAccount) names.
    ///
    /// # Errors
    /// If there is none.
    pub async fn connect(context: Option<String>, namespace: Option<String>) -> Result<Self, ClientError> {
        // Crates of one build may bring several, and then rustls has to be told; that one was chosen already is as good.
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

    /// The job of this name.
    ///
    /// # Errors
    /// If there is none, with the names of those that there are.
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

    /// Sets the training mode in the job's manifest. The operator asks a job under way to go on in it from the next global-step
    /// boundary on, and no pod is restarted; any other job starts in it. That a job under way cannot is in its condition `Stalled`.
    ///
    /// # Errors
    /// If there is no such job, or the API server refuses the change.
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

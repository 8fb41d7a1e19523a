//! `rectrain status`, `rectrain logs`, `rectrain mode`: a job in the cluster that the kubeconfig names.

use clap::Args;
use rectrain_client::{ClientError, Cluster, LogRequest, logs, render};
use rectrain_crds::Mode;

use crate::Failure;

/// A job in a cluster.
#[derive(Debug, Clone, Args)]
pub(crate) struct ClusterJob {
    /// The job's name
    pub(crate) job: String,
    /// Its namespace; the context's if not given
    #[arg(short, long)]
    pub(crate) namespace: Option<String>,
    /// The context of the kubeconfig; its current one if not given
    #[arg(long)]
    pub(crate) context: Option<String>,
}

#[derive(Debug, Args)]
pub(crate) struct LogsArgs {
    #[command(flatten)]
    job: ClusterJob,
    /// Whose logs
    #[arg(long, default_value = "coordinator", value_parser = ["coordinator", "ps", "embedding-worker", "dense-worker", "loader"])]
    role: String,
    /// Of this replica alone, from 0
    #[arg(long)]
    index: Option<u32>,
    /// Go on as lines come
    #[arg(short, long)]
    follow: bool,
    /// Of the container's run before this one
    #[arg(short, long)]
    previous: bool,
    /// The last lines only
    #[arg(long)]
    tail: Option<i64>,
}

#[derive(Debug, Args)]
pub(crate) struct ModeArgs {
    #[command(flatten)]
    job: ClusterJob,
    /// The mode to go on in; its roles then start again, from the last checkpoint if it writes any
    mode: Option<String>,
}

impl From<ClientError> for Failure {
    fn from(error: ClientError) -> Self {
        match error {
            ClientError::NoSuchJob { .. } | ClientError::Config(_) | ClientError::NoPods { .. } => {
                Self::User(error.to_string())
            }
            ClientError::Api { .. } | ClientError::Output(_) => Self::Failed(error.to_string()),
        }
    }
}

/// `rectrain status`
pub(crate) fn status(job: &ClusterJob) -> Result<(), Failure> {
    crate::runtime()?.block_on(async {
        let cluster = connect(job).await?;
        print!("{}", render(&cluster.job(&job.job).await?));
        Ok(())
    })
}

/// `rectrain logs`
pub(crate) fn show_logs(args: &LogsArgs) -> Result<(), Failure> {
    let request = LogRequest {
        role: args.role.clone(),
        index: args.index,
        follow: args.follow,
        previous: args.previous,
        tail: args.tail,
    };
    crate::runtime()?.block_on(async {
        let cluster = connect(&args.job).await?;
        Ok(logs(&cluster, &args.job.job, &request).await?)
    })
}

/// `rectrain mode`
pub(crate) fn mode(args: &ModeArgs) -> Result<(), Failure> {
    let wanted = args.mode.as_deref().map(parse_mode).transpose()?;
    crate::runtime()?.block_on(async {
        let cluster = connect(&args.job).await?;
        if let Some(mode) = wanted {
            cluster.set_mode(&args.job.job, mode).await?;
            println!("{}", mode.name());
            return Ok(());
        }
        let job = cluster.job(&args.job.job).await?;
        let in_use = job.status.and_then(|status| status.mode);
        let asked = job.spec.training.and_then(|training| training.mode).unwrap_or_default();
        println!("{}", in_use.unwrap_or(asked).name());
        Ok(())
    })
}

fn parse_mode(name: &str) -> Result<Mode, Failure> {
    Mode::ALL.into_iter().find(|mode| mode.name() == name).ok_or_else(|| {
        let known: Vec<_> = Mode::ALL.iter().map(|mode| mode.name()).collect();
        Failure::User(format!("`{name}` is no training mode of this version: expected one of {}", known.join(", ")))
    })
}

async fn connect(job: &ClusterJob) -> Result<Cluster, ClientError> {
    Cluster::connect(job.context.clone(), job.namespace.clone()).await
}

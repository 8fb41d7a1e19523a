//! `rectrain status`, `rectrain logs` and `rectrain mode` for a job in the cluster that the
//! kubeconfig names.

use rectrain_client::{ClientError, Cluster, LogRequest, render};
use rectrain_crds::Mode;

use crate::args::{LogsArgs, RunningJob};
use crate::failure::Failure;
use crate::output;

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
pub(crate) async fn status(job: &RunningJob) -> Result<(), Failure> {
    let cluster = connect(job).await?;
    Ok(output::print(render(&cluster.job(&job.job).await?))?)
}

/// `rectrain logs`
pub(crate) async fn logs(args: &LogsArgs) -> Result<(), Failure> {
    let request = LogRequest {
        role: args.role.clone(),
        index: args.index,
        follow: args.follow,
        previous: args.previous,
        tail: args.tail,
    };
    let cluster = connect(&args.job).await?;
    match rectrain_client::logs(&cluster, &args.job.job, &request).await {
        // The reader has seen enough.
        Err(ClientError::Output(error)) if error.kind() == std::io::ErrorKind::BrokenPipe => Ok(()),
        printed => Ok(printed?),
    }
}

/// `rectrain mode JOB`: the mode in use.
pub(crate) async fn mode(job: &RunningJob) -> Result<&'static str, Failure> {
    let found = connect(job).await?.job(&job.job).await?;
    let in_use = found.status.and_then(|status| status.mode);
    let asked = found.spec.training.and_then(|training| training.mode).unwrap_or_default();
    Ok(in_use.map_or(asked.name(), Mode::name))
}

/// `rectrain mode set JOB MODE`: asks for another mode in the job's manifest.
pub(crate) async fn set_mode(job: &RunningJob, mode: &str) -> Result<(), Failure> {
    let mode = parse_mode(mode)?;
    Ok(connect(job).await?.set_mode(&job.job, mode).await?)
}

fn parse_mode(name: &str) -> Result<Mode, Failure> {
    Mode::ALL.into_iter().find(|mode| mode.name() == name).ok_or_else(|| {
        let known: Vec<_> = Mode::ALL.iter().map(|mode| mode.name()).collect();
        Failure::User(format!("`{name}` is no training mode of this version: expected one of {}", known.join(", ")))
    })
}

async fn connect(job: &RunningJob) -> Result<Cluster, ClientError> {
    Cluster::connect(job.context.clone(), job.namespace.clone()).await
}

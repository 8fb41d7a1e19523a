//! `rectrain mode`: shows or switches the training mode of a running job. It looks for the job on
//! this machine first, and then in the cluster that the kubeconfig names.

use rectrain_proto::v1;
use tonic::Code;

use crate::args::{ModeArgs, ModeCommand, RunningJob};
use crate::failure::Failure;
use crate::{output, running};

pub(crate) fn mode(args: &ModeArgs) -> Result<(), Failure> {
    crate::failure::runtime()?.block_on(async {
        match (&args.set, &args.job) {
            (Some(ModeCommand::Set { job, mode }), _) => set(job, mode).await,
            (None, Some(job)) => show(job).await,
            (None, None) => Err(Failure::User(
                "no job is given: use `rectrain mode JOB` or `rectrain mode set JOB MODE`".to_owned(),
            )),
        }
    })
}

async fn set(job: &RunningJob, mode: &str) -> Result<(), Failure> {
    let name = &job.job;
    let Some(mut client) = running::connect(name).await? else {
        in_a_cluster::set_mode(job, mode).await?;
        output::line(format_args!(
            "{name}: -> {mode}, requested from the operator: a running job switches without a restart"
        ))?;
        return Ok(());
    };
    let reply = client.set_mode(v1::SetModeRequest { mode: mode.to_owned(), reason: String::new() }).await.map_err(
        |status| match status.code() {
            Code::InvalidArgument => Failure::User(status.message().to_owned()),
            Code::FailedPrecondition => Failure::Failed(status.message().to_owned()),
            _ => lost(name, &status),
        },
    )?;
    let from = reply.into_inner().from;
    if from == mode {
        output::line(format_args!("{name}: already in mode {mode}"))?;
    } else {
        output::line(format_args!("{name}: {from} -> {mode} at the next global-step boundary"))?;
    }
    Ok(())
}

async fn show(job: &RunningJob) -> Result<(), Failure> {
    let Some(mut client) = running::connect(&job.job).await? else {
        output::line(in_a_cluster::mode(job).await?)?;
        return Ok(());
    };
    let status = client.get_status(v1::StatusRequest {}).await.map_err(|status| lost(&job.job, &status))?;
    output::line(status.into_inner().mode)?;
    Ok(())
}

pub(crate) fn lost(job: &str, status: &tonic::Status) -> Failure {
    Failure::Failed(format!("the coordinator of {job} was lost: {}", status.message()))
}

/// The failure of a command on a job that runs neither here nor, for the reason `failure`, in a
/// cluster.
#[cfg(feature = "cluster")]
pub(crate) fn neither(job: &RunningJob, failure: Failure) -> Failure {
    match failure {
        Failure::User(message) => Failure::User(format!("{}; in a cluster: {message}", not_here(job))),
        other => other,
    }
}

/// Without a cluster, the failure says it all.
#[cfg(not(feature = "cluster"))]
pub(crate) fn neither(_job: &RunningJob, failure: Failure) -> Failure {
    failure
}

/// The message about a job that does not run on this machine.
pub(crate) fn not_here(job: &RunningJob) -> String {
    format!(
        "no job `{}` runs on this machine: give the name of a running job, or the address of its coordinator, \
         such as 127.0.0.1:7001",
        job.job
    )
}

#[cfg(feature = "cluster")]
mod in_a_cluster {
    use super::{Failure, RunningJob, neither};
    use crate::cluster;

    pub(super) async fn mode(job: &RunningJob) -> Result<&'static str, Failure> {
        cluster::mode(job).await.map_err(|failure| neither(job, failure))
    }

    pub(super) async fn set_mode(job: &RunningJob, mode: &str) -> Result<(), Failure> {
        cluster::set_mode(job, mode).await.map_err(|failure| neither(job, failure))
    }
}

#[cfg(not(feature = "cluster"))]
mod in_a_cluster {
    use super::{Failure, RunningJob, not_here};

    pub(super) async fn mode(job: &RunningJob) -> Result<&'static str, Failure> {
        Err(Failure::User(not_here(job)))
    }

    pub(super) async fn set_mode(job: &RunningJob, _mode: &str) -> Result<(), Failure> {
        Err(Failure::User(not_here(job)))
    }
}

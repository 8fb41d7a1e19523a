//! `rectrain mode`: shows or switches the training mode of a job that runs.

use rectrain_proto::v1;
use tonic::Code;

use crate::args::{ModeArgs, ModeCommand};
use crate::{Failure, running};

pub(crate) fn mode(args: &ModeArgs) -> Result<(), Failure> {
    crate::runtime()?.block_on(async {
        match (&args.set, &args.job) {
            (Some(ModeCommand::Set { job, mode }), _) => set(job, mode).await,
            (None, Some(job)) => show(job).await,
            (None, None) => {
                Err(Failure::User("which job? `rectrain mode JOB` or `rectrain mode set JOB MODE`".to_owned()))
            }
        }
    })
}

async fn set(job: &str, mode: &str) -> Result<(), Failure> {
    let mut client = running::connect(job).await?;
    let reply =
        client.set_mode(v1::SetModeRequest { mode: mode.to_owned() }).await.map_err(|status| match status.code() {
            Code::InvalidArgument => Failure::User(status.message().to_owned()),
            Code::FailedPrecondition => Failure::Failed(status.message().to_owned()),
            _ => Failure::Failed(format!("the coordinator of {job} was lost: {}", status.message())),
        })?;
    let from = reply.into_inner().from;
    if from == mode {
        println!("{job}: in mode {mode} already");
    } else {
        println!("{job}: {from} -> {mode} at the next global-step boundary");
    }
    Ok(())
}

async fn show(job: &str) -> Result<(), Failure> {
    let mut client = running::connect(job).await?;
    let lost =
        |status: tonic::Status| Failure::Failed(format!("the coordinator of {job} was lost: {}", status.message()));
    println!("{}", client.get_status(v1::StatusRequest {}).await.map_err(lost)?.into_inner().mode);
    Ok(())
}

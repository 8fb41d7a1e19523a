//! `rectrain scale`: spreads the slots of a job that runs on this machine over another number of parameter servers, or anew over as
//! many, while it trains.

use rectrain_proto::v1;
use tonic::Code;

use crate::args::{ScaleArgs, ScaledRole};
use crate::{Failure, running};

pub(crate) fn scale(args: &ScaleArgs) -> Result<(), Failure> {
    let ScaledRole::Ps = args.role;
    crate::runtime()?.block_on(async {
        let (name, mut client) = match &args.job {
            Some(job) => (job.clone(), running::connect(job).await?.ok_or_else(|| not_here(job))?),
            None => running::the_only_one().await?,
        };
        let asked = client.scale(v1::ScaleRequest { ps: args.replicas, reason: String::new() }).await;
        let from = asked.map_err(|status| refused(&name, &status))?.into_inner().from;
        let to = args.replicas;
        if from == to {
            println!("{name}: the slots are spread anew over {to} parameter servers while training goes on");
        } else {
            println!("{name}: {from} -> {to} parameter servers; slots move while training goes on");
        }
        Ok(())
    })
}

fn refused(job: &str, status: &tonic::Status) -> Failure {
    match status.code() {
        Code::InvalidArgument => Failure::User(status.message().to_owned()),
        Code::FailedPrecondition => Failure::Failed(status.message().to_owned()),
        _ => Failure::Failed(format!("the coordinator of {job} was lost: {}", status.message())),
    }
}

fn not_here(job: &str) -> Failure {
    Failure::User(format!(
        "no job `{job}` runs on this machine: give the name of one, or the address of its coordinator such as http://127.0.0.1:7001"
    ))
}

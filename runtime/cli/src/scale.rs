//! `rectrain scale`: changes a role's number of members in a job that runs on this machine, or
//! rebalances its slots over the present parameter servers. Training continues meanwhile.

use rectrain_kinds::Role;
use rectrain_proto::v1;
use tonic::Code;

use crate::args::ScaleArgs;
use crate::failure::Failure;
use crate::{output, running};

pub(crate) fn scale(args: &ScaleArgs) -> Result<(), Failure> {
    let role = args.role;
    crate::failure::runtime()?.block_on(async {
        let (name, mut client) = match &args.job {
            Some(job) => (job.clone(), running::connect(job).await?.ok_or_else(|| not_here(job))?),
            None => running::the_only_one().await?,
        };
        let request = v1::ScaleRequest {
            role: v1::Role::from(role).into(),
            replicas: args.replicas,
            ..v1::ScaleRequest::default()
        };
        let reply = client.scale(request).await;
        let from = reply.map_err(|status| refused(&name, &status))?.into_inner().from;
        let to = args.replicas;
        let members = role.plural();
        let done = match role {
            Role::Ps if from == to => format!("slots are rebalanced over {to} {members} while training continues"),
            Role::Ps => format!("{from} -> {to} {members}; slots move while training continues"),
            _ if from == to => format!("already {to} {members}"),
            _ => format!("{from} -> {to} {members} while training continues"),
        };
        output::line(format_args!("{name}: {done}"))?;
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
        "no job `{job}` runs on this machine: give the name of a running job, or the address of its coordinator, \
         such as 127.0.0.1:7001; for a job in a cluster, change spec.roles.ROLE.replicas \
         (kubectl patch rtj {job})"
    ))
}

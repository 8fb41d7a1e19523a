//! `rectrain run --processes`: every replica of every role a process of its own on loopback, watched by this one.

use std::process::{ExitStatus, Stdio};
use std::time::Duration;

use rectrain_proto::v1;
use rectrain_proto::v1::control_client::ControlClient;
use rectrain_roles::events::JobEvent;
use rectrain_roles::member::Role;
use rectrain_roles::plan::JobPlan;
use tokio::io::{AsyncBufReadExt, BufReader};
use tokio::process::{Child, Command};
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio::time::timeout;

use crate::args::RunArgs;
use crate::role::CoordinatorAddresses;
use crate::running::Running;
use crate::show::Display;
use crate::slow::CpuLimit;
use crate::{Failure, signal, slow};

/// How long the coordinator has to say where it is.
const START: Duration = Duration::from_secs(30);
/// How long processes have to end by themselves after the job has.
const END: Duration = Duration::from_secs(10);
/// Any free port of this machine.
const LOOPBACK: &str = "127.0.0.1:0";

/// A process that ended, and how.
type Ended = (String, std::io::Result<ExitStatus>);

pub(crate) async fn run(args: &RunArgs, plan: &JobPlan, mut display: Display) -> Result<(), Failure> {
    let slow = slow::factors(&args.slow, plan.replicas.dense_workers)?;
    let cores = slow::cores(&args.cpus, plan.replicas.dense_workers)?;
    let (coordinator, addresses) = start_coordinator(args).await?;
    let _running = Running::note(&plan.name, &addresses.control);
    display.note(&format!("coordinator at {}, metrics on {}", addresses.control, addresses.metrics));
    let stop = watch::Sender::new(());
    // Dropped last: a cgroup can be removed when its process has ended.
    let mut limits = Vec::new();
    let mut children = JoinSet::new();
    watch_child(&mut children, "coordinator".to_owned(), coordinator, stop.subscribe());
    for role in Role::ALL {
        for index in 0..role.replicas(plan) {
            let name = format!("{} {index}", role.name());
            let mut command = member(args, role, index, &addresses)?;
            if let (Role::DenseWorker, Some(factor)) = (role, slow.get(&index)) {
                command.arg("--slow").arg(factor.to_string());
            }
            let child = command.spawn().map_err(|error| cannot_start(&name, &error))?;
            if let (Role::DenseWorker, Some(cores), Some(pid)) = (role, cores.get(&index), child.id()) {
                limits.push(CpuLimit::put(pid, *cores)?);
            }
            watch_child(&mut children, name, child, stop.subscribe());
        }
    }
    let following = follow(addresses.control, &mut display);
    let outcome = tokio::select! {
        outcome = following => outcome,
        failure = first_failure(&mut children) => Err(failure),
        () = signal::interrupted() => Err(Failure::Interrupted("interrupted; nothing was saved".to_owned())),
    };
    let outcome = match outcome {
        Err(Failure::Failed(message)) => Err(name_the_killed(message, &mut children).await),
        other => other,
    };
    let grace = if matches!(outcome, Err(Failure::Interrupted(_))) { Duration::ZERO } else { END };
    if timeout(grace, all_ended(&mut children)).await.is_err() {
        tracing::info!("processes still run {grace:?} after the end of the job and are killed");
        stop.send_replace(());
        all_ended(&mut children).await;
    }
    outcome
}

async fn start_coordinator(args: &RunArgs) -> Result<(Child, CoordinatorAddresses), Failure> {
    let mut command = this_program("coordinator", args)?;
    command.args(["--bind", "tcp://127.0.0.1:0", "--control"]).arg(args.control.to_string());
    command.arg("--metrics").arg(args.metrics.to_string());
    let mut child = command.stdout(Stdio::piped()).spawn().map_err(|error| cannot_start("the coordinator", &error))?;
    let output = child.stdout.take().ok_or_else(|| Failure::Failed("the coordinator has no output".to_owned()))?;
    let mut line = String::new();
    let read = timeout(START, BufReader::new(output).read_line(&mut line)).await;
    let addresses = serde_json::from_str(&line).map_err(|_| {
        Failure::Failed(format!(
            "the coordinator did not say where it is within {START:?} (it said {line:?}, {read:?})"
        ))
    })?;
    Ok((child, addresses))
}

fn member(args: &RunArgs, role: Role, index: u32, addresses: &CoordinatorAddresses) -> Result<Command, Failure> {
    let mut command = this_program(role.name(), args)?;
    command.args(["--bind", "tcp://127.0.0.1:0", "--metrics", LOOPBACK, "--coordinator", &addresses.members]);
    command.arg("--index").arg(index.to_string()).stdout(Stdio::null());
    Ok(command)
}

/// This program as another role of the same job.
fn this_program(role: &str, args: &RunArgs) -> Result<Command, Failure> {
    let program = std::env::current_exe()
        .map_err(|error| Failure::Failed(format!("cannot find this program to start it again: {error}")))?;
    let mut command = Command::new(program);
    command.arg(role).args(args.job.repeat()).stdin(Stdio::null()).stderr(Stdio::piped()).kill_on_drop(true);
    Ok(command)
}

fn watch_child(children: &mut JoinSet<Ended>, name: String, mut child: Child, mut stop: watch::Receiver<()>) {
    if let Some(stderr) = child.stderr.take() {
        let name = name.clone();
        tokio::spawn(async move {
            let mut lines = BufReader::new(stderr).lines();
            while let Ok(Some(line)) = lines.next_line().await {
                tracing::info!(process = name, "{line}");
            }
        });
    }
    children.spawn(async move {
        let ended = tokio::select! {
            status = child.wait() => return (name, status),
            stopped = stop.changed() => stopped,
        };
        // Told to stop, or the teller is gone: either way this process must not outlive the run.
        tracing::debug!(process = name, told = ended.is_ok(), "killing");
        let status = match child.start_kill() {
            Ok(()) => child.wait().await,
            Err(error) => Err(error),
        };
        (name, status)
    });
}

async fn all_ended(children: &mut JoinSet<Ended>) {
    while children.join_next().await.is_some() {}
}

/// Shows the job's events until the last.
async fn follow(control: String, display: &mut Display) -> Result<(), Failure> {
    let lost =
        |error: &dyn std::fmt::Display| Failure::Failed(format!("the coordinator at {control} was lost: {error}"));
    let mut client = ControlClient::connect(control.clone()).await.map_err(|error| lost(&error))?;
    let mut events = client.watch(v1::WatchRequest {}).await.map_err(|error| lost(&error))?.into_inner();
    while let Some(event) = events.message().await.map_err(|error| lost(&error))? {
        let event: JobEvent = serde_json::from_str(&event.json).map_err(|error| lost(&error))?;
        display.show(&event);
        match event {
            JobEvent::Summary(_) => return Ok(()),
            JobEvent::Failed { message, user_error: true } => return Err(Failure::User(message)),
            JobEvent::Failed { message, .. } => return Err(Failure::Failed(message)),
            _ => {}
        }
    }
    Err(lost(&"the stream of events ended"))
}

/// A process that dies without a word ends the job; one that reports a failure does so through the coordinator first.
async fn first_failure(children: &mut JoinSet<Ended>) -> Failure {
    while let Some(ended) = children.join_next().await {
        match ended {
            Ok((name, Ok(status))) if !status.success() && status.code().is_none() => {
                return Failure::Failed(format!("{name} was killed ({status})"));
            }
            Ok((name, Err(error))) => return Failure::Failed(format!("{name} cannot be waited for: {error}")),
            Ok((name, Ok(status))) => tracing::info!(process = name, %status, "ended"),
            Err(error) => return Failure::Failed(format!("a process's watcher failed: {error}")),
        }
    }
    std::future::pending().await
}

/// A process that was killed could not say so: the others' complaints are about it.
async fn name_the_killed(message: String, children: &mut JoinSet<Ended>) -> Failure {
    match timeout(Duration::from_secs(1), first_failure(children)).await {
        Ok(Failure::Failed(killed)) if killed != message => Failure::Failed(format!("{killed}; {message}")),
        _ => Failure::Failed(message),
    }
}

fn cannot_start(what: &str, error: &std::io::Error) -> Failure {
    Failure::Failed(format!("cannot start {what}: {error}"))
}

//! `rectrain run --processes`: every replica of every role a process of its own on loopback, watched by this one. An embedding worker or
//! a loader that is killed is replaced while the others go on, and so are a parameter server, whose rows are in shared memory, and a
//! dense worker, whose parameters others have, and the coordinator, which has written down what it knew. When any other crashes, all end and begin again from the last checkpoint. Both as often as
//! `spec.faultTolerance` allows.

mod memory;
mod restarts;
mod succession;

use std::cell::Cell;
use std::collections::BTreeMap;
use std::fmt;
use std::path::Path;
use std::pin::{Pin, pin};
use std::process::{ExitStatus, Stdio};
use std::time::{Duration, Instant};

use rectrain_crds::defaults::TERMINATION_GRACE_SECONDS;
use rectrain_kinds::Role;
use rectrain_proto::v1;
use rectrain_proto::v1::control_client::ControlClient;
use rectrain_protocol::events::JobEvent;
use rectrain_protocol::plan::{JobPlan, Replicas};
use rectrain_protocol::role::RoleExt;
use tempfile::NamedTempFile;
use tokio::io::{AsyncBufReadExt, BufReader};
use tokio::process::{Child, Command};
use tokio::sync::{mpsc, watch};
use tokio::task::JoinSet;
use tokio::time::timeout;
use tonic::Streaming;

use crate::args::RunArgs;
use crate::processes::memory::SharedMemory;
use crate::processes::restarts::{Account, Restarts};
use crate::processes::succession::Succession;
use crate::role::CoordinatorAddresses;
use crate::run::{interrupted, new_run, save};
use crate::running::Running;
use crate::show::Display;
use crate::slow::CpuLimit;
use crate::{Failure, INTERRUPTED, signal, slow};

/// How long the coordinator has to say where it is.
const START: Duration = Duration::from_secs(30);
/// The pause before events are asked for again.
const WATCH_AGAIN: Duration = Duration::from_millis(50);
/// How long a coordinator has to say how the job stands.
const STATUS: Duration = Duration::from_secs(5);
/// How long processes have to end by themselves after the job has.
const END: Duration = Duration::from_secs(10);
/// How long a process that ends with an error is given to have told the coordinator why, and its last words to be read.
const SAYS_WHY: Duration = Duration::from_secs(1);
/// Any free port of this machine.
const LOOPBACK: &str = "127.0.0.1:0";

/// A process of the job.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Process {
    Coordinator,
    Member(Role, u32),
}

impl fmt::Display for Process {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Coordinator => f.write_str("coordinator"),
            Self::Member(role, index) => write!(f, "{} {index}", role.name()),
        }
    }
}

/// A process that ended, how, and its last words.
type Ended = (Process, std::io::Result<ExitStatus>, String);

/// A process that died.
struct Death {
    /// None, if not even that is known.
    process: Option<Process>,
    /// It was told to end, by somebody else.
    was_told: bool,
    /// It was killed, and could not say so.
    was_killed: bool,
    /// A sentence.
    message: String,
}

pub(crate) async fn run(
    args: &RunArgs,
    plan: &JobPlan,
    manifest: NamedTempFile,
    mut display: Display,
) -> Result<(), Failure> {
    let job = Job {
        args,
        manifest,
        plan,
        run: new_run(),
        replicas: Cell::new(plan.replicas),
        next_replicas: Cell::new(plan.replicas),
        slow: slow::factors(&args.slow, plan.replicas.dense_worker)?,
        cores: slow::cores(&args.cpus, plan.replicas.dense_worker)?,
        memory: plan.shared_memory.then(SharedMemory::of_run).flatten(),
        succession: Succession::default(),
    };
    let mut restarts = Restarts::new(plan.max_restarts, plan.backoff);
    let mut account = Account::default();
    let mut told_to_end = pin!(signal::interrupted());
    loop {
        account.begin_attempt();
        let attempt = job.attempt(&mut display, &mut account, &mut restarts, told_to_end.as_mut());
        let message = match attempt.await {
            Err(Failure::Failed(message)) => message,
            ended => return ended,
        };
        let Some(pause) = restarts.after_crash(account.saved_in_attempt(), Instant::now()) else {
            display.show(&JobEvent::Failed { message: message.clone(), user_error: false });
            return Err(Failure::Failed(restarts.exhausted(&message)));
        };
        account.restarts = restarts.done();
        display.show(&JobEvent::Restarting { restart: restarts.done(), message, seconds: pause.as_secs() });
        tokio::select! {
            () = tokio::time::sleep(pause) => {}
            () = &mut told_to_end => return Err(interrupted(Err("the job was about to restart".to_owned()))),
        }
    }
}

/// A copy of the manifest that only this run knows.
pub(crate) fn frozen(manifest: &Path) -> Result<NamedTempFile, Failure> {
    let copied = NamedTempFile::with_suffix(".yaml").and_then(|copy| std::fs::copy(manifest, &copy).map(|_| copy));
    copied.map_err(|error| {
        Failure::Failed(format!("cannot copy {} for the job's processes: {error}", manifest.display()))
    })
}

/// What all attempts of a run share.
struct Job<'a> {
    args: &'a RunArgs,
    /// The manifest as it was when the run began, whatever becomes of the user's file: all processes go by one plan.
    manifest: NamedTempFile,
    plan: &'a JobPlan,
    run: String,
    /// Members that this attempt began with: those that join later go by the same plan, such as the first slot map.
    replicas: Cell<Replicas>,
    /// Members that the next attempt begins with: as many as were asked for last.
    next_replicas: Cell<Replicas>,
    slow: BTreeMap<u32, f64>,
    cores: BTreeMap<u32, f64>,
    /// Where parameter servers keep their rows, if not in memory of their own.
    memory: Option<SharedMemory>,
    succession: Succession,
}

impl Job<'_> {
    /// Starts every process and follows the job to its end, or to the first crash; none of them is left.
    async fn attempt(
        &self,
        display: &mut Display,
        account: &mut Account,
        restarts: &mut Restarts,
        mut told_to_end: Pin<&mut impl Future<Output = ()>>,
    ) -> Result<(), Failure> {
        self.replicas.set(self.next_replicas.get());
        self.succession.begin();
        if let Some(memory) = &self.memory {
            let cannot =
                |error| Failure::Failed(format!("cannot begin anew: the coordinator's journal stays: {error}"));
            memory.forget_coordinator().map_err(cannot)?;
        }
        let (coordinator, addresses) = self.start_coordinator(None).await?;
        let _running = Running::note(&self.plan.name, &addresses.control);
        let page = addresses.metrics.trim_end_matches("metrics");
        display.note(&format!(
            "the job on {page}, its metrics on {}, control at {}",
            addresses.metrics, addresses.control
        ));
        let stop = watch::Sender::new(());
        // Dropped last: a cgroup can be removed when its process has ended.
        let mut limits = Vec::new();
        let mut children = JoinSet::new();
        watch_child(&mut children, Process::Coordinator, coordinator, stop.subscribe());
        for role in Role::MEMBERS {
            for index in 0..self.replicas.get().count(role) {
                let child = self.start_member(role, index, &addresses, &mut limits)?;
                watch_child(&mut children, Process::Member(role, index), child, stop.subscribe());
            }
        }
        let (joining, mut joins) = mpsc::unbounded_channel();
        let mut following = pin!(self.follow(&addresses.control, display, account, joining));
        let outcome = loop {
            tokio::select! {
                outcome = &mut following => break outcome,
                death = first_death(&mut children) => match death.process {
                    Some(Process::Member(role, index)) if self.has_successor(role, index) && (death.was_told || restarts.replaces(Instant::now())) => {
                        self.succession.is_replaced(role, index);
                        tracing::warn!("{}; another takes its place", death.message);
                        let child = self.start_member(role, index, &addresses, &mut limits)?;
                        watch_child(&mut children, Process::Member(role, index), child, stop.subscribe());
                    }
                    Some(Process::Coordinator) if self.memory.is_some() && restarts.replaces(Instant::now()) => {
                        tracing::warn!("{}; it is started again", death.message);
                        match self.start_coordinator_again(&addresses, restarts).await {
                            Ok(Some(coordinator)) => {
                                watch_child(&mut children, Process::Coordinator, coordinator, stop.subscribe());
                            }
                            Ok(None) => {
                                restarts.replaced_in_vain(1);
                                break Err(Failure::Failed(death.message));
                            }
                            Err(failure) => break Err(failure),
                        }
                    }
                    _ => break Err(Failure::Failed(death.message)),
                },
                () = &mut told_to_end => break Err(save(ask_to_save(&addresses.control), TERMINATION_GRACE_SECONDS).await),
                Some((role, from, to)) = joins.recv() => {
                    self.next_replicas.set(self.next_replicas.get().with(role, to));
                    for index in from..to {
                        let child = self.start_member(role, index, &addresses, &mut limits)?;
                        watch_child(&mut children, Process::Member(role, index), child, stop.subscribe());
                    }
                }
            }
        };
        if outcome.is_err() {
            restarts.replaced_in_vain(self.succession.away());
        }
        let outcome = match outcome {
            Err(Failure::Failed(message)) => Err(name_the_killed(message, &mut children).await),
            other => other,
        };
        // The last event has been read; processes that wait for one that is dead are not waited for.
        let grace = if outcome.is_ok() || matches!(outcome, Err(Failure::User(_))) { END } else { Duration::ZERO };
        if timeout(grace, all_ended(&mut children)).await.is_err() {
            tracing::debug!("processes still run {grace:?} after the end of the job and are killed");
            stop.send_replace(());
            all_ended(&mut children).await;
        }
        outcome
    }

    fn has_successor(&self, role: Role, index: u32) -> bool {
        let members = self.replicas.get().count(role).min(self.next_replicas.get().count(role));
        self.succession.may_be_replaced(role, index, members, self.memory.is_some())
    }

    /// Shows the job's events until the last, and tells which members are to join. Without any for as long as the plan's `stall` the job counts as stalled.
    async fn follow(
        &self,
        control: &str,
        display: &mut Display,
        account: &mut Account,
        joining: mpsc::UnboundedSender<(Role, u32, u32)>,
    ) -> Result<(), Failure> {
        let stall = self.plan.stall;
        let lost =
            |error: &dyn fmt::Display| Failure::Failed(format!("the coordinator at {control} was lost: {error}"));
        let (mut events, mut seen) = (watch_events(control, 0).await.map_err(|error| lost(&error))?, 0);
        loop {
            let Ok(event) = timeout(stall, events.message()).await else {
                if idle(control).await.is_some_and(|idle| idle < stall) {
                    // A long evaluation, or servers that restore, save or digest many rows.
                    continue;
                }
                return Err(Failure::Failed(format!("training has stalled: no progress for {} s", stall.as_secs())));
            };
            let Ok(Some(event)) = event else {
                // One that was killed may be back soon; whether it is, whoever waits for its process knows first.
                events = watch_again(control, seen).await.map_err(|error| lost(&error))?;
                continue;
            };
            seen = event.number;
            let event: JobEvent = serde_json::from_str(&event.json).map_err(|error| lost(&error))?;
            self.succession.take(&event);
            match account.take(event) {
                summary @ JobEvent::Summary(_) => {
                    display.show(&summary);
                    return Ok(());
                }
                JobEvent::Failed { message, user_error: true } => {
                    display.show(&JobEvent::Failed { message: message.clone(), user_error: true });
                    return Err(Failure::User(message));
                }
                // Whether that is the end is not decided here.
                JobEvent::Failed { message, user_error: false } => return Err(Failure::Failed(message)),
                event => {
                    if let JobEvent::Scaling { role, from, to, .. } = event {
                        // Whoever is told outlives this.
                        let _ended = joining.send((role, from, to));
                    }
                    display.show(&event);
                }
            }
        }
    }

    fn start_member(
        &self,
        role: Role,
        index: u32,
        addresses: &CoordinatorAddresses,
        limits: &mut Vec<CpuLimit>,
    ) -> Result<Child, Failure> {
        let mut command = self.member(role, index, addresses)?;
        if let (Role::Ps, Some(memory)) = (role, &self.memory) {
            command.arg("--shared-memory").arg(memory.of_server(index));
        }
        if let (Role::DenseWorker, Some(factor)) = (role, self.slow.get(&index)) {
            command.arg("--slow").arg(factor.to_string());
        }
        let spawned = command.spawn();
        let child = spawned.map_err(|error| cannot_start(&Process::Member(role, index).to_string(), &error))?;
        if let (Role::DenseWorker, Some(cores), Some(pid)) = (role, self.cores.get(&index), child.id()) {
            limits.push(CpuLimit::put(pid, *cores)?);
        }
        Ok(child)
    }

    /// Starts the coordinator: in the place of one that was killed, where that one was.
    async fn start_coordinator(
        &self,
        killed: Option<&CoordinatorAddresses>,
    ) -> Result<(Child, CoordinatorAddresses), Failure> {
        let mut command = self.this_program("coordinator")?;
        let (members, control, metrics) = match killed {
            Some(CoordinatorAddresses { members, control, metrics, .. }) => {
                let socket = |url: &str| url.trim_start_matches("http://").trim_end_matches("/metrics").to_owned();
                (members.clone(), socket(control), socket(metrics))
            }
            None => ("tcp://127.0.0.1:0".to_owned(), self.args.control.to_string(), self.args.metrics.to_string()),
        };
        command.args(["--bind", &members, "--control", &control, "--metrics", &metrics, "--run", &self.run]);
        if let Some(memory) = &self.memory {
            command.arg("--journal").arg(memory.of_coordinator());
        }
        let spawned = command.stdout(Stdio::piped()).spawn();
        let mut child = spawned.map_err(|error| cannot_start("the coordinator", &error))?;
        let output = child.stdout.take().ok_or_else(|| Failure::Failed("the coordinator has no output".to_owned()))?;
        let mut line = String::new();
        let read = timeout(START, BufReader::new(output).read_line(&mut line)).await;
        match serde_json::from_str(&line) {
            Ok(addresses) => Ok((child, addresses)),
            Err(_) => Err(said_instead(child, &format!("it said {line:?}, {read:?}")).await),
        }
    }

    /// Starts another in the place of a coordinator that was killed; `None` if that one has left nothing to go on from. One that dies before
    /// it is there is started again as well.
    async fn start_coordinator_again(
        &self,
        killed: &CoordinatorAddresses,
        restarts: &mut Restarts,
    ) -> Result<Option<Child>, Failure> {
        loop {
            match self.start_coordinator(Some(killed)).await {
                Ok((coordinator, addresses)) => return Ok(addresses.taken_up.then_some(coordinator)),
                Err(Failure::Failed(message)) if restarts.replaces(Instant::now()) => {
                    tracing::warn!("{message}; the coordinator is started again");
                }
                Err(failure) => return Err(failure),
            }
        }
    }

    fn member(&self, role: Role, index: u32, addresses: &CoordinatorAddresses) -> Result<Command, Failure> {
        let mut command = self.this_program(role.name())?;
        command.args(["--bind", "tcp://127.0.0.1:0", "--metrics", LOOPBACK, "--coordinator", &addresses.members]);
        command.arg("--index").arg(index.to_string()).stdout(Stdio::null());
        Ok(command)
    }

    /// This program as another role of the same job.
    fn this_program(&self, role: &str) -> Result<Command, Failure> {
        let program = std::env::current_exe()
            .map_err(|error| Failure::Failed(format!("cannot find this program to start it again: {error}")))?;
        let mut command = Command::new(program);
        command.arg(role).args(self.args.job.repeat(self.manifest.path()));
        for role in Role::MEMBERS {
            let replicas = self.replicas.get().count(role);
            if replicas != role.replicas(self.plan) {
                command.arg("--set").arg(format!("spec.roles.{}.replicas={replicas}", role.section()));
                // A local batch stays what it is, whatever the number of dense workers.
                let local = self.plan.local_batch_rows;
                if role == Role::DenseWorker && self.plan.global_batch_rows.is_multiple_of(local) {
                    command.arg("--set").arg(format!("spec.training.localBatchSize={local}"));
                }
            }
        }
        command.stdin(Stdio::null()).stderr(Stdio::piped()).kill_on_drop(true);
        // Ctrl-C is this process's to answer: the others must go on until a checkpoint is saved.
        command.process_group(0);
        Ok(command)
    }
}

/// The job's events behind the one with this number.
async fn watch_events(control: &str, after: u64) -> Result<Streaming<v1::JobEvent>, Box<dyn std::error::Error>> {
    let mut client = ControlClient::connect(control.to_owned()).await?;
    Ok(client.watch(v1::WatchRequest { after, newest: 0 }).await?.into_inner())
}

/// For how long the job has made no progress, if its coordinator says so soon.
async fn idle(control: &str) -> Option<Duration> {
    let asking = async {
        let mut client = ControlClient::connect(control.to_owned()).await.ok()?;
        let status = client.get_status(v1::StatusRequest {}).await.ok()?.into_inner();
        Duration::try_from_secs_f64(status.idle_seconds?).ok()
    };
    timeout(STATUS, asking).await.ok().flatten()
}

/// As [`watch_events`], of a coordinator that has as long as one that starts to be there.
async fn watch_again(control: &str, after: u64) -> Result<Streaming<v1::JobEvent>, Box<dyn std::error::Error>> {
    let watching = async {
        loop {
            if let Ok(events) = watch_events(control, after).await {
                return events;
            }
            tokio::time::sleep(WATCH_AGAIN).await;
        }
    };
    Ok(timeout(START, watching).await?)
}

/// Why a coordinator has not said where it is. What the user can mend it says itself, and is not tried again.
async fn said_instead(coordinator: Child, seen: &str) -> Failure {
    let silent = || Failure::Failed(format!("the coordinator did not say where it is within {START:?} ({seen})"));
    // Dropped, it is killed.
    let Ok(Ok(output)) = timeout(END, coordinator.wait_with_output()).await else { return silent() };
    let words = String::from_utf8_lossy(&output.stderr);
    match sentence_of(&words) {
        "" => silent(),
        sentence if output.status.code() == Some(2) => Failure::User(sentence.to_owned()),
        sentence => Failure::Failed(sentence.to_owned()),
    }
}

/// What a process says of its end.
fn sentence_of(words: &str) -> &str {
    words.trim().rsplit_once("rectrain: ").map_or(words.trim(), |(_, sentence)| sentence)
}

/// Whether a process ended by itself and not well.
fn is_failure(status: &ExitStatus) -> bool {
    status.code().is_some_and(|code| code != 0 && code != i32::from(INTERRUPTED))
}

fn watch_child(children: &mut JoinSet<Ended>, process: Process, mut child: Child, mut stop: watch::Receiver<()>) {
    let stderr = child.stderr.take();
    let words = tokio::spawn(async move {
        let mut last = String::new();
        let Some(stderr) = stderr else { return last };
        let mut lines = BufReader::new(stderr).lines();
        while let Ok(Some(line)) = lines.next_line().await {
            tracing::info!(%process, "{line}");
            last = line;
        }
        last
    });
    children.spawn(async move {
        let ended = tokio::select! {
            status = child.wait() => {
                if status.as_ref().is_ok_and(is_failure) {
                    // What it has told the coordinator says more, and comes first.
                    tokio::time::sleep(SAYS_WHY).await;
                }
                let words = timeout(SAYS_WHY, words).await.ok().and_then(Result::ok).unwrap_or_default();
                return (process, status, words);
            }
            stopped = stop.changed() => stopped,
        };
        // Told to stop, or the teller is gone: either way this process must not outlive the run.
        tracing::debug!(%process, told = ended.is_ok(), "killing");
        let status = match child.start_kill() {
            Ok(()) => child.wait().await,
            Err(error) => Err(error),
        };
        (process, status, String::new())
    });
}

async fn all_ended(children: &mut JoinSet<Ended>) {
    while children.join_next().await.is_some() {}
}

/// Has the job save a checkpoint.
async fn ask_to_save(control: &str) -> Result<String, String> {
    let mut client = ControlClient::connect(control.to_owned()).await.map_err(|error| error.to_string())?;
    let saved = client.save_checkpoint(v1::SaveCheckpointRequest {}).await;
    saved.map(|saved| saved.into_inner().checkpoint).map_err(|status| status.message().to_owned())
}

/// A process that dies; what one reports through the coordinator comes before that.
async fn first_death(children: &mut JoinSet<Ended>) -> Death {
    while let Some(ended) = children.join_next().await {
        let (mut was_told, mut was_killed) = (false, false);
        let (process, message) = match ended {
            Ok((process, Ok(status), _)) if status.success() => {
                tracing::info!(%process, "ended");
                continue;
            }
            Ok((process, Ok(status), words)) => match status.code() {
                None => {
                    was_killed = true;
                    (Some(process), format!("{process} was killed ({status})"))
                }
                Some(code) if code == i32::from(INTERRUPTED) => {
                    was_told = true;
                    (Some(process), format!("{process} was told to end"))
                }
                Some(code) => {
                    (Some(process), format!("{process} ended with exit code {code}: {}", sentence_of(&words)))
                }
            },
            Ok((process, Err(error), _)) => (Some(process), format!("{process} cannot be waited for: {error}")),
            Err(error) => (None, format!("a process's watcher failed: {error}")),
        };
        return Death { process, was_told, was_killed, message };
    }
    std::future::pending().await
}

/// A process that was killed could not say so: the others' complaints are about it.
async fn name_the_killed(message: String, children: &mut JoinSet<Ended>) -> Failure {
    match timeout(Duration::from_secs(1), first_death(children)).await {
        Ok(Death { message: killed, was_killed: true, .. }) if killed != message => {
            Failure::Failed(format!("{killed}; {message}"))
        }
        _ => Failure::Failed(message),
    }
}

fn cannot_start(what: &str, error: &std::io::Error) -> Failure {
    Failure::Failed(format!("cannot start {what}: {error}"))
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "an unwrap in a test is an assertion")]
mod tests {
    use super::*;

    /// With what it said last, as nobody else may have heard it.
    #[tokio::test]
    async fn a_process_that_gives_up_is_missed() {
        let mut children = JoinSet::new();
        let stop = watch::Sender::new(());
        let ends = |script: &str| {
            let mut command = Command::new("sh");
            command.args(["-c", script]).stderr(Stdio::piped());
            command.spawn().unwrap()
        };
        for (index, script) in ["exit 0", "echo rectrain: no sockets >&2; exit 1"].into_iter().enumerate() {
            watch_child(&mut children, Process::Member(Role::Loader, index as u32), ends(script), stop.subscribe());
        }
        let death = first_death(&mut children).await;
        assert_eq!((death.message.as_str(), death.was_told), ("loader 1 ended with exit code 1: no sockets", false));
    }
}

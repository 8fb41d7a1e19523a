//! `rectrain run --processes`: runs each replica of each role in its own process on loopback, and
//! watches the processes.
//!
//! A dead process is replaced while the others continue, if its replacement can find its state:
//!
//! - embedding workers and loaders have none to lose;
//! - the rows of a parameter server are in shared memory;
//! - other dense workers have the parameters of a dense worker;
//! - the coordinator has a journal.
//!
//! After any other crash all processes end, and the job restarts from its last checkpoint.
//! `spec.faultTolerance` limits both.

mod memory;
mod replacements;
mod restarts;

use std::cell::Cell;
use std::collections::BTreeMap;
use std::fmt;
use std::pin::{Pin, pin};
use std::process::{ExitStatus, Stdio};
use std::time::{Duration, Instant};

use rectrain_crds::defaults::TERMINATION_GRACE_SECONDS;
use rectrain_kinds::Role;
use rectrain_proto::v1;
use rectrain_proto::v1::control_client::ControlClient;
use rectrain_protocol::events::JobEvent;
use rectrain_protocol::failure::JobFailure;
use rectrain_protocol::plan::{JobPlan, Replicas};
use tempfile::NamedTempFile;
use tokio::io::{AsyncBufReadExt, BufReader};
use tokio::process::{Child, Command};
use tokio::sync::{mpsc, watch};
use tokio::task::JoinSet;
use tokio::time::timeout;
use tonic::Streaming;

use crate::args::RunArgs;
use crate::failure::{DIVERGED, Failure, INTERRUPTED, USER};
use crate::job::new_run;
use crate::processes::memory::SharedMemory;
use crate::processes::replacements::Replacements;
use crate::processes::restarts::{Account, Restarts};
use crate::role::CoordinatorAddresses;
use crate::running::Running;
use crate::saving::{interrupted, save};
use crate::show::{Addresses, Display};
use crate::slow::CpuLimit;
use crate::{browser, signal, slow};

/// How long a coordinator may take to print its addresses.
const START_TIMEOUT: Duration = Duration::from_secs(30);
/// The pause before another attempt to follow the events.
const WATCH_RETRY: Duration = Duration::from_millis(50);
/// How long a coordinator may take to answer a status request.
const STATUS_TIMEOUT: Duration = Duration::from_secs(5);
/// How long processes may take to end by themselves after the job's end.
const END_TIMEOUT: Duration = Duration::from_secs(10);
/// How long to wait for the reason of a process's failure, from the coordinator and from its last
/// line of output.
const REASON_WAIT: Duration = Duration::from_secs(1);
/// How long the coordinator may take to tell a failure after which no retry can help.
const LAST_EVENT_WAIT: Duration = Duration::from_secs(20);
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

/// An ended process, its exit status, and the last line of its standard error.
type Ended = (Process, std::io::Result<ExitStatus>, String);

/// The death of a process.
struct Death {
    /// `None` if the watcher of the process failed.
    process: Option<Process>,
    /// True if it ended because it got SIGTERM or SIGINT from another program.
    was_signalled: bool,
    /// True if it was killed, so that it could not report a reason.
    was_killed: bool,
    /// True if its exit code says that a retry cannot help.
    is_final: bool,
    /// A sentence for the user.
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
        memory: plan.shared_memory.then(SharedMemory::create).flatten(),
        replacements: Replacements::default(),
    };
    let mut restarts = Restarts::new(plan.max_restarts, plan.backoff);
    let mut account = Account::default();
    let mut signalled = pin!(signal::interrupted());
    loop {
        account.begin_attempt();
        let attempt = job.attempt(&mut display, &mut account, &mut restarts, signalled.as_mut());
        let message = match attempt.await {
            Err(Failure::Failed(message)) => message,
            Ok(()) => return display.unwritten().map_or(Ok(()), |reason| Err(Failure::Failed(reason))),
            ended => return ended,
        };
        let Some(pause) = restarts.after_crash(account.saved_in_attempt(), Instant::now()) else {
            display.show(&JobFailure::new(&*message, false).into());
            return Err(Failure::Failed(restarts.exhausted(&message)));
        };
        account.restarts = restarts.done();
        display.show(&JobEvent::Restarting { restart: restarts.done(), message, seconds: pause.as_secs() });
        tokio::select! {
            () = tokio::time::sleep(pause) => {}
            () = &mut signalled => return Err(interrupted(Err("the job was about to restart".to_owned()))),
        }
    }
}

/// Makes a copy of the manifest for this run.
pub(crate) fn frozen(manifest: &str) -> Result<NamedTempFile, Failure> {
    let copied = NamedTempFile::with_suffix(".yaml").and_then(|copy| std::fs::write(&copy, manifest).map(|()| copy));
    copied.map_err(|error| Failure::Failed(format!("cannot copy the manifest for the job's processes: {error}")))
}

/// The state that all attempts of a run share.
struct Job<'a> {
    args: &'a RunArgs,
    /// A copy of the manifest from the start of the run. The user may edit the original meanwhile,
    /// and all processes need the same plan.
    manifest: NamedTempFile,
    plan: &'a JobPlan,
    /// The name of the run.
    run: String,
    /// The members at the start of this attempt. Members that join later need the same plan, for
    /// example for the first slot map.
    replicas: Cell<Replicas>,
    /// The members at the start of the next attempt: the numbers that were requested last.
    next_replicas: Cell<Replicas>,
    slow: BTreeMap<u32, f64>,
    cores: BTreeMap<u32, f64>,
    /// The shared memory for rows and journal. Without it parameter servers keep rows in their own
    /// memory.
    memory: Option<SharedMemory>,
    replacements: Replacements,
}

impl Job<'_> {
    /// Starts all processes, and follows the job to its end or to a crash that ends the attempt.
    /// All processes have ended when this returns.
    async fn attempt(
        &self,
        display: &mut Display,
        account: &mut Account,
        restarts: &mut Restarts,
        mut signalled: Pin<&mut impl Future<Output = ()>>,
    ) -> Result<(), Failure> {
        self.replicas.set(self.next_replicas.get());
        self.replacements.begin_attempt();
        if let Some(memory) = &self.memory {
            let cannot = |error| {
                Failure::Failed(format!("cannot remove the coordinator's journal of the previous attempt: {error}"))
            };
            memory.forget_coordinator().map_err(cannot)?;
        }
        let (coordinator, addresses) = self.start_coordinator(None).await?;
        let page = addresses.metrics.trim_end_matches("metrics");
        let _running = Running::note(&self.plan.name, &addresses.control, page);
        display.addresses(&Addresses { page, metrics: &addresses.metrics, control: &addresses.control });
        if self.args.history.open && restarts.done() == 0 {
            browser::open(page);
        }
        let stop = watch::Sender::new(());
        // Declared before `children`, so that it is dropped after them: a cgroup can only be
        // removed when its process has ended.
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
                    // The coordinator tells the failure, but it may first wait for its last copy to
                    // parameter servers that have ended.
                    _ if death.is_final => {
                        let told = timeout(LAST_EVENT_WAIT, &mut following).await;
                        break told.unwrap_or(Err(Failure::Failed(death.message)));
                    }
                    Some(Process::Member(role, index)) if self.is_replaceable(role, index) && (death.was_signalled || restarts.try_replace(Instant::now())) => {
                        self.replacements.start(role, index);
                        tracing::warn!("{}; starting its replacement", death.message);
                        let child = self.start_member(role, index, &addresses, &mut limits)?;
                        watch_child(&mut children, Process::Member(role, index), child, stop.subscribe());
                    }
                    Some(Process::Coordinator) if self.memory.is_some() && restarts.try_replace(Instant::now()) => {
                        tracing::warn!("{}; restarting it", death.message);
                        match self.restart_coordinator(&addresses, restarts).await {
                            Ok(Some(coordinator)) => {
                                watch_child(&mut children, Process::Coordinator, coordinator, stop.subscribe());
                            }
                            Ok(None) => {
                                restarts.return_unused(1);
                                break Err(Failure::Failed(death.message));
                            }
                            Err(failure) => break Err(failure),
                        }
                    }
                    _ => break Err(Failure::Failed(death.message)),
                },
                () = &mut signalled => break Err(save(request_checkpoint(&addresses.control), TERMINATION_GRACE_SECONDS).await),
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
            restarts.return_unused(self.replacements.pending());
        }
        let outcome = match outcome {
            Err(Failure::Failed(message)) => Err(name_killed_process(message, &mut children).await),
            other => other,
        };
        // The last event has been read. After a crash the others may wait for the dead process, so
        // they get no time to end.
        let ended = match &outcome {
            Ok(()) => timeout(END_TIMEOUT, all_ended(&mut children)).await.is_ok(),
            Err(failure) if failure.is_final() => {
                // A member that has not heard of the failure calls a coordinator that has ended.
                let _late = timeout(END_TIMEOUT, coordinator_ended(&mut children)).await;
                false
            }
            Err(_) => false,
        };
        if !ended {
            tracing::debug!("killing the processes that still run after the end of the job");
            stop.send_replace(());
            all_ended(&mut children).await;
        }
        outcome
    }

    fn is_replaceable(&self, role: Role, index: u32) -> bool {
        let members = self.replicas.get().count(role).min(self.next_replicas.get().count(role));
        self.replacements.may_be_replaced(role, index, members, self.memory.is_some())
    }

    /// Shows the job's events up to the last. Sends (role, from, to) to `joining` when members
    /// `from` to `to - 1` have to join. Without progress for the plan's `stall`, the job counts as
    /// stalled.
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
                // A killed coordinator may be back soon. The watcher of its process decides whether
                // it is restarted.
                events = reconnect_events(control, seen).await.map_err(|error| lost(&error))?;
                continue;
            };
            seen = event.number;
            let event: JobEvent = serde_json::from_str(&event.json).map_err(|error| lost(&error))?;
            self.replacements.record(&event);
            match account.record(event) {
                summary @ JobEvent::Summary(_) => {
                    display.show(&summary);
                    return Ok(());
                }
                // The caller decides whether the run restarts.
                JobEvent::Failed { message, user_error: false, divergence: None } => {
                    return Err(Failure::Failed(message));
                }
                JobEvent::Failed { message, user_error, divergence } => {
                    display.show(&JobEvent::Failed { message: message.clone(), user_error, divergence });
                    return Err(if user_error { Failure::User(message) } else { Failure::Diverged(message) });
                }
                event => {
                    if let JobEvent::Scaling { role, from, to, .. } = event {
                        // The receiver outlives this future.
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
            command.arg("--shared-memory").arg(memory.server_directory(index));
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

    /// Starts the coordinator. A replacement serves the addresses of the killed one.
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
            command.arg("--journal").arg(memory.coordinator_directory());
            // A replacement whose journal was removed asks the parameter servers. The processes of
            // an earlier attempt have all ended, so one number does for all attempts.
            if killed.is_some() {
                command.args(["--recover-attempt", "0"]);
            }
        }
        let spawned = command.stdout(Stdio::piped()).spawn();
        let mut child = spawned.map_err(|error| cannot_start("the coordinator", &error))?;
        let output =
            child.stdout.take().ok_or_else(|| Failure::Failed("the coordinator's output cannot be read".to_owned()))?;
        let mut line = String::new();
        let read = timeout(START_TIMEOUT, BufReader::new(output).read_line(&mut line)).await;
        match serde_json::from_str(&line) {
            Ok(addresses) => Ok((child, addresses)),
            Err(_) => Err(no_addresses(child, &format!("its first line: {line:?}, {read:?}")).await),
        }
    }

    /// Starts a replacement of a killed coordinator. `None` if the killed one left no journal to
    /// recover from. A replacement that dies before it serves is replaced too.
    async fn restart_coordinator(
        &self,
        killed: &CoordinatorAddresses,
        restarts: &mut Restarts,
    ) -> Result<Option<Child>, Failure> {
        loop {
            match self.start_coordinator(Some(killed)).await {
                Ok((coordinator, addresses)) => return Ok(addresses.taken_up.then_some(coordinator)),
                Err(Failure::Failed(message)) if restarts.try_replace(Instant::now()) => {
                    tracing::warn!("{message}; restarting the coordinator");
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

    /// The command that runs this program as another role of the same job.
    fn this_program(&self, role: &str) -> Result<Command, Failure> {
        let program = std::env::current_exe()
            .map_err(|error| Failure::Failed(format!("cannot find this program to start it again: {error}")))?;
        let mut command = Command::new(program);
        command.arg(role).args(self.args.job.repeat(self.manifest.path()));
        command.arg("--parent").arg(std::process::id().to_string());
        if let Some(link) = &self.args.link {
            command.arg("--link").arg(link.to_string());
        }
        for role in Role::MEMBERS {
            let replicas = self.replicas.get().count(role);
            if replicas != self.plan.replicas.count(role) {
                command.arg("--set").arg(format!("spec.roles.{}.replicas={replicas}", role.section()));
                // Otherwise the size of a local batch would change with the number of dense
                // workers.
                let local = self.plan.local_batch_rows;
                if role == Role::DenseWorker && self.plan.global_batch_rows.is_multiple_of(local) {
                    command.arg("--set").arg(format!("spec.training.localBatchSize={local}"));
                }
            }
        }
        command.stdin(Stdio::null()).stderr(Stdio::piped()).kill_on_drop(true);
        // Only this process may get Ctrl-C. The others must continue until a checkpoint is saved.
        command.process_group(0);
        Ok(command)
    }
}

/// Follows the job's events with numbers greater than `after`.
async fn watch_events(control: &str, after: u64) -> Result<Streaming<v1::JobEvent>, Box<dyn std::error::Error>> {
    let mut client = ControlClient::connect(control.to_owned()).await?;
    Ok(client.watch(v1::WatchRequest { after, newest: 0 }).await?.into_inner())
}

/// For how long the job has made no progress. `None` if its coordinator does not answer in time.
async fn idle(control: &str) -> Option<Duration> {
    let request = async {
        let mut client = ControlClient::connect(control.to_owned()).await.ok()?;
        let status = client.get_status(v1::StatusRequest {}).await.ok()?.into_inner();
        Duration::try_from_secs_f64(status.idle_seconds?).ok()
    };
    timeout(STATUS_TIMEOUT, request).await.ok().flatten()
}

/// As [`watch_events`], for a coordinator that may be restarting. Retries for `START_TIMEOUT`.
async fn reconnect_events(control: &str, after: u64) -> Result<Streaming<v1::JobEvent>, Box<dyn std::error::Error>> {
    let watching = async {
        loop {
            if let Ok(events) = watch_events(control, after).await {
                return events;
            }
            tokio::time::sleep(WATCH_RETRY).await;
        }
    };
    Ok(timeout(START_TIMEOUT, watching).await?)
}

/// The failure of a coordinator that printed no addresses. If the user's input caused it, the
/// coordinator printed the reason, and the run does not restart.
async fn no_addresses(coordinator: Child, seen: &str) -> Failure {
    let silent = || Failure::Failed(format!("the coordinator printed no addresses within {START_TIMEOUT:?} ({seen})"));
    // At a timeout the child is dropped, which kills it.
    let Ok(Ok(output)) = timeout(END_TIMEOUT, coordinator.wait_with_output()).await else { return silent() };
    let words = String::from_utf8_lossy(&output.stderr);
    match last_sentence(&words) {
        "" => silent(),
        sentence if output.status.code() == Some(i32::from(USER)) => Failure::User(sentence.to_owned()),
        sentence => Failure::Failed(sentence.to_owned()),
    }
}

/// The error sentence in the last line of a process's standard error.
fn last_sentence(words: &str) -> &str {
    words.trim().rsplit_once("rectrain: ").map_or(words.trim(), |(_, sentence)| sentence)
}

/// True if a process ended by itself with an error.
fn is_failure(status: &ExitStatus) -> bool {
    status.code().is_some_and(|code| code != 0 && code != i32::from(INTERRUPTED))
}

/// Spawns a task that awaits the end of `child`, and kills the child at a message of `stop`.
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
                    // Its report to the coordinator says more, so let that arrive first.
                    tokio::time::sleep(REASON_WAIT).await;
                }
                let words = timeout(REASON_WAIT, words).await.ok().and_then(Result::ok).unwrap_or_default();
                return (process, status, words);
            }
            stopped = stop.changed() => stopped,
        };
        // `stop` has sent a message or was dropped. Either way this process must not outlive the
        // run.
        tracing::debug!(%process, requested = ended.is_ok(), "killing");
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

/// Waits until the coordinator, or every process, has ended.
async fn coordinator_ended(children: &mut JoinSet<Ended>) {
    while let Some(ended) = children.join_next().await {
        if matches!(ended, Ok((Process::Coordinator, ..))) {
            return;
        }
    }
}

/// Requests a checkpoint from the coordinator. Returns its name, or the reason why there is none.
async fn request_checkpoint(control: &str) -> Result<String, String> {
    let mut client = ControlClient::connect(control.to_owned()).await.map_err(|error| error.to_string())?;
    let saved = client.save_checkpoint(v1::SaveCheckpointRequest {}).await;
    saved.map(|saved| saved.into_inner().checkpoint).map_err(|status| status.message().to_owned())
}

/// Awaits the first death of a process. Successful ends do not count.
async fn first_death(children: &mut JoinSet<Ended>) -> Death {
    while let Some(ended) = children.join_next().await {
        let (mut was_signalled, mut was_killed, mut is_final) = (false, false, false);
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
                    was_signalled = true;
                    (Some(process), format!("{process} was ended by a signal"))
                }
                Some(code) => {
                    is_final = [USER, DIVERGED].map(i32::from).contains(&code);
                    (Some(process), format!("{process} ended with exit code {code}: {}", last_sentence(&words)))
                }
            },
            Ok((process, Err(error), _)) => (Some(process), format!("cannot wait for {process}: {error}")),
            Err(error) => (None, format!("the watcher of a process failed: {error}")),
        };
        return Death { process, was_signalled, was_killed, is_final, message };
    }
    std::future::pending().await
}

/// Adds the death of a killed process to `message`. The killed process could report nothing, and
/// `message` is then the complaint of another process about it.
async fn name_killed_process(message: String, children: &mut JoinSet<Ended>) -> Failure {
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

    /// The message contains the process's last line, which may not have reached the coordinator.
    #[tokio::test]
    async fn the_death_of_a_failed_process_is_reported_with_its_last_line() {
        let mut children = JoinSet::new();
        let stop = watch::Sender::new(());
        let ends = |script: &str| {
            let mut command = Command::new("sh");
            command.args(["-c", script]).stderr(Stdio::piped());
            command.spawn().unwrap()
        };
        let scripts = ["exit 0", "echo rectrain: no sockets >&2; exit 1", "sleep 0.5; exit 3"];
        for (index, script) in scripts.into_iter().enumerate() {
            watch_child(&mut children, Process::Member(Role::Loader, index as u32), ends(script), stop.subscribe());
        }
        let death = first_death(&mut children).await;
        assert_eq!(
            (death.message.as_str(), death.was_signalled),
            ("loader 1 ended with exit code 1: no sockets", false)
        );
        let diverged = first_death(&mut children).await;
        assert_eq!((death.is_final, diverged.is_final), (false, true), "{}", diverged.message);
    }
}

//! The coordinator or one member of a job, in its own process. Pods run these commands, and
//! `rectrain run --processes` starts them. The process ends with its job. With `--stay` it waits
//! for SIGTERM, because Kubernetes restarts a pod of a StatefulSet that exits, whatever its exit
//! code.

use std::pin::pin;
use std::sync::Arc;
use std::time::{Duration, Instant};

use prometheus::Registry;
use rectrain_coordinator::{Coordinator, Guard, JournalPlace, LivePage, RunFacts, recover_copy, serve_control};
use rectrain_kinds::Role;
use rectrain_member::http::{serve_metrics, serve_metrics_and_page};
use rectrain_member::member::Member;
use rectrain_protocol::events::EventLog;
use rectrain_protocol::metrics::{CoordinatorMetrics, RoleMetrics};
use rectrain_protocol::plan::JobPlan;
use rectrain_protocol::readiness::Readiness;
use rectrain_protocol::watchdog::Watchdog;
use rectrain_protocol::{RoleError, kind_name};
use rectrain_wire::tls::Credentials;
use rectrain_wire::{Service, TcpConfig, TcpTransport, Transport, WireCounters};
use serde::{Deserialize, Serialize};

use crate::args::{CoordinatorArgs, JobArgs, MemberArgs, PatienceArgs, TlsArgs};
use crate::failure::Failure;
use crate::link::Link;
use crate::outlook::Outlook;
use crate::publishing::Publishing;
use crate::saving::{interrupted, save_while};
use crate::show::Display;
use crate::{job, output, parent, signal};

/// How long the coordinator waits at the end until members and followers have learned of the end.
const FAREWELL: Duration = Duration::from_secs(5);
/// How long an interrupted coordinator with a journal lets replies leave. Its replacement answers
/// the requests that wait.
const HANDOVER: Duration = Duration::from_secs(1);
/// The time from the last heartbeat of a killed run until its lease has surely expired.
const LEASE_EXPIRY: Duration = Duration::from_secs(40);
/// The pause between two attempts to get the lease of another run.
const LEASE_RETRY: Duration = Duration::from_secs(5);

/// The addresses of a coordinator: the first line that it prints, as JSON.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct CoordinatorAddresses {
    /// For members.
    pub(crate) members: String,
    /// For the operator and the command line (gRPC).
    pub(crate) control: String,
    /// Prometheus metrics.
    pub(crate) metrics: String,
    /// True if it recovered the state of a killed coordinator from the journal.
    pub(crate) taken_up: bool,
}

/// The plan of a job that runs in several processes, including this one.
fn plan_of_process(args: &JobArgs, patience: &PatienceArgs) -> Result<Arc<JobPlan>, Failure> {
    if let Some(parent) = patience.parent {
        parent::watch(parent)?;
    }
    let mut plan = job::plan(args)?;
    if let Some(seconds) = patience.stall_seconds {
        Arc::make_mut(&mut plan).stall = Duration::from_secs(u64::from(seconds));
    }
    plan.check_message_size(TcpConfig::default().limits.max_frame_bytes)?;
    Ok(plan)
}

/// `rectrain coordinator`
pub(crate) fn coordinate(args: &CoordinatorArgs) -> Result<(), Failure> {
    let plan = plan_of_process(&args.job, &args.patience)?;
    crate::failure::runtime()?.block_on(async {
        let Network { metrics, counters, transport, credentials } = Network::new(&args.tls, &args.patience, &plan)?;
        let (page, readiness) = (LivePage::default(), Readiness::default());
        page.describe(RunFacts { manifest: job::manifest_in_use(&args.job), ..RunFacts::default() });
        let (metrics_address, _metrics) =
            serve_metrics_and_page(args.metrics, metrics.clone(), readiness.clone(), page.clone())
                .await
                .map_err(|error| Failure::cannot_listen(error, "--metrics"))?;
        let events = EventLog::default();
        let coordinator_metrics = CoordinatorMetrics::of(&metrics, 0);
        let mut signalled = pin!(signal::interrupted());
        let journal = tokio::select! {
            journal = journal_place(args, &plan, &transport, &coordinator_metrics) => journal?,
            () = &mut signalled => return Err(interrupted(Err("training had not begun".to_owned()))),
        };
        let coordinator = Box::pin(started(&plan, args, journal, &events, &coordinator_metrics)).await?;
        let publishing = Publishing::start(&plan, &coordinator_metrics, events.follow_after(events.number())).await?;
        let coordinator = Arc::new(coordinator);
        page.show(Arc::clone(&coordinator));
        let service = Arc::clone(&coordinator) as Arc<dyn Service>;
        let serving = transport.serve(service, &args.bind).map_err(RoleError::from)?;
        let guard = credentials.map(|credentials| Guard { credentials, counters: Arc::clone(&counters) });
        let (control_address, control) = serve_control(args.control, Arc::clone(&coordinator), guard)
            .await
            .map_err(|error| Failure::cannot_listen(error, "--control"))?;
        readiness.set_ready();
        let addresses = CoordinatorAddresses {
            members: serving.address().to_string(),
            control: format!("http://{control_address}"),
            metrics: format!("http://{metrics_address}/metrics"),
            taken_up: coordinator.is_recovered(),
        };
        output::line(serde_json::to_string(&addresses).map_err(|error| Failure::Failed(error.to_string()))?)?;
        let mut running = pin!(lead(coordinator.run(&transport), print(events, args.json)));
        let result = tokio::select! {
            result = &mut running => match result {
                // Members must find the coordinator that leads the job now, so their connections
                // to this one close at once.
                Err(superseded @ RoleError::Superseded) => return Err(superseded.into()),
                result => result.map(drop).map_err(Failure::from),
            },
            () = &mut signalled => {
                let saving = async { coordinator.leave().await.map_err(|error| error.to_string()) };
                let saved = save_while(&mut running, saving, args.patience.grace_seconds).await;
                // This process cannot tell whether the run continues elsewhere or is suspended, so
                // other runs may get the path. A replacement of the same run gets it at once.
                let _late = tokio::time::timeout(FAREWELL, coordinator.release_path()).await;
                Err(saved)
            }
        };
        if !matches!(result, Err(Failure::Interrupted(_))) {
            if let Some(publishing) = publishing {
                publishing.finish().await;
            }
            page.keep().await;
            if args.stay {
                log_stay(&result);
                signalled.await;
            }
        }
        let continues = args.journal.is_some() && matches!(result, Err(Failure::Interrupted(_)));
        let all_informed = serving.stop(if continues { HANDOVER } else { FAREWELL }).await;
        tracing::info!(all_informed, traffic = ?counters.snapshot(), "the coordinator ends");
        // A follower that has not read the last event by then reconnects and finds no coordinator.
        let _followers = tokio::time::timeout(Duration::from_millis(500), control).await;
        result
    })
}

/// Starts the coordinator. In a cluster the run before may still save its last checkpoint, or may
/// have been killed on another machine. So a pod waits for the end or the expiry of its lease on
/// the checkpoint path before it gives up.
async fn started(
    plan: &Arc<JobPlan>,
    args: &CoordinatorArgs,
    journal: Option<JournalPlace<'_>>,
    events: &EventLog,
    metrics: &CoordinatorMetrics,
) -> Result<Coordinator, Failure> {
    let patience = Duration::from_secs(u64::from(args.patience.grace_seconds)) + LEASE_EXPIRY;
    let begun = Instant::now();
    loop {
        let started = Coordinator::start(Arc::clone(plan), &args.run, journal, events.clone(), metrics.clone()).await;
        match started {
            Err(RoleError::Leased(reason)) if args.stay && begun.elapsed() < patience => {
                tracing::warn!("{reason}; this run waits for its end");
            }
            started => return Ok(started?),
        }
        tokio::select! {
            () = tokio::time::sleep(LEASE_RETRY) => {}
            () = signal::interrupted() => {
                let reason = "the job waited for its checkpoint path";
                return Err(interrupted(Err(reason.to_owned())));
            }
        }
    }
}

/// The place of the journal. If the job's attempt is under way and its journal is lost, recovers
/// the journal from a copy.
async fn journal_place<'a>(
    args: &'a CoordinatorArgs,
    plan: &JobPlan,
    transport: &TcpTransport,
    metrics: &CoordinatorMetrics,
) -> Result<Option<JournalPlace<'a>>, RoleError> {
    let Some(directory) = args.journal.as_deref() else { return Ok(None) };
    let place = JournalPlace::new(directory, args.recover_attempt.unwrap_or(0));
    if args.recover_attempt.is_some() {
        let is_recovered = recover_copy(place, plan, &args.run, transport, &args.bind).await?;
        metrics.journal_copies_recovered.inc_by(u64::from(is_recovered));
    }
    Ok(Some(place))
}

/// Leads the job until it has ended and its last event is printed. A superseded coordinator pushes
/// no last event, so its process ends at once.
async fn lead<T>(
    run: impl Future<Output = Result<T, RoleError>>,
    printing: impl Future<Output = ()>,
) -> Result<T, RoleError> {
    let (mut run, mut printing) = (pin!(run), pin!(printing));
    let result = tokio::select! {
        result = &mut run => result,
        () = &mut printing => return run.await,
    };
    if !matches!(result, Err(RoleError::Superseded)) {
        printing.await;
    }
    result
}

/// Prints the job's events as lines of JSON, up to the last, if `json` is true.
async fn print(events: EventLog, json: bool) {
    let mut display = Display::new(true, Outlook::default(), Vec::new());
    let mut follower = events.follow();
    while json && let Some(event) = follower.next().await {
        display.show(&event);
    }
}

/// How long a member of a failed job waits for SIGTERM, which an operator sends within seconds. The
/// coordinator may die before the operator learns of the failure. The operator then keeps the job,
/// and the coordinator's replacement waits for members. This process exits, so that Kubernetes
/// restarts it and it joins the replacement.
const FAILED_STAY: Duration = Duration::from_secs(300);
/// How long a member of a completed job waits for SIGTERM.
const COMPLETED_STAY: Duration = Duration::MAX;

/// Logs how the job ended, and that this process stays.
fn log_stay(result: &Result<(), Failure>) {
    match result {
        Ok(()) => tracing::info!("the job is done; staying until told to stop"),
        Err(failure) => {
            tracing::error!("the job has failed; staying until told to stop: {}", failure.message());
        }
    }
}

/// `rectrain ps`, `rectrain embedding-worker`, `rectrain dense-worker`, `rectrain loader`
pub(crate) fn run_member(role: Role, args: &MemberArgs) -> Result<(), Failure> {
    let plan = plan_of_process(&args.job, &args.patience)?;
    crate::failure::runtime()?.block_on(async {
        let (stall, watchdog) = (plan.stall, Watchdog::default());
        let Network { metrics, counters, transport, .. } = Network::new(&args.tls, &args.patience, &plan)?;
        let readiness = Readiness::default();
        let (address, _metrics) = serve_metrics(args.metrics, metrics.clone(), readiness.clone()).await?;
        tracing::info!(role = role.name(), index = args.index, metrics = %address, "joining");
        let member = Member {
            plan,
            role,
            index: args.index,
            transport: Arc::new(transport),
            coordinator: args.coordinator.clone(),
            bind: args.bind.clone(),
            advertise: args.advertise.clone(),
            shared_memory: args.shared_memory.clone(),
            slow: args.slow,
            watchdog: watchdog.clone(),
            readiness,
            metrics,
            counters,
        };
        let mut signalled = pin!(signal::interrupted());
        let leaving = member.leave();
        let mut running = pin!(member.run());
        let result = tokio::select! {
            result = &mut running => result,
            (activity, limit) = watchdog.expired(stall) => crate::failure::abort(&format!(
                "{} {} has {activity} for {} s, the limit for a job without progress (spec.faultTolerance.stallSeconds)",
                role.name(),
                args.index,
                limit.as_secs(),
            )),
            () = &mut signalled => {
                let saving = async { leaving.await.map_err(|error| error.to_string()) };
                let mut released = false;
                let running = async { released = running.await.is_ok() };
                let ended = Box::pin(save_while(running, saving, args.patience.grace_seconds)).await;
                let continues =
                    || Failure::Interrupted("interrupted; the job continues, with the rows on other servers".to_owned());
                return Err(if released { continues() } else { ended });
            }
        };
        // A member that fails ends its process. After its restart it learns that the job has
        // failed, and stays.
        let has_failed = matches!(result, Err(RoleError::JobFailed { .. }));
        let result = result.map_err(Failure::from);
        if args.stay && (has_failed || result.is_ok()) {
            log_stay(&result);
            let patience = if has_failed { FAILED_STAY } else { COMPLETED_STAY };
            let _signalled = tokio::time::timeout(patience, signalled).await;
        }
        result
    })
}

/// The metrics and the transport of a process of a job.
struct Network {
    metrics: RoleMetrics,
    counters: Arc<WireCounters>,
    transport: TcpTransport,
    credentials: Option<Credentials>,
}

impl Network {
    fn new(tls: &TlsArgs, patience: &PatienceArgs, plan: &JobPlan) -> Result<Self, Failure> {
        let metrics = RoleMetrics::new(Registry::new())?;
        let counters = WireCounters::register(metrics.registry(), kind_name).map_err(RoleError::from)?;
        let credentials = tls.tls.as_deref().map(Credentials::read).transpose();
        let credentials = credentials.map_err(|error| Failure::User(format!("--tls: {error}")))?;
        let max_calls = plan.max_concurrent_calls();
        let config = TcpConfig {
            credentials: credentials.clone(),
            max_in_flight: max_calls,
            max_concurrent: max_calls,
            link: patience.link.as_ref().map(Link::paced).transpose()?,
            ..TcpConfig::default()
        };
        let transport = TcpTransport::new(config, Arc::clone(&counters));
        Ok(Self { metrics, counters, transport, credentials })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_superseded_coordinator_does_not_wait_for_a_last_event() {
        let superseded = lead::<()>(async { Err(RoleError::Superseded) }, std::future::pending()).await;
        assert!(matches!(superseded, Err(RoleError::Superseded)));
    }

    #[tokio::test]
    async fn the_last_event_is_printed_before_the_process_ends() {
        let mut is_printed = false;
        let run = async { Err::<(), _>(RoleError::Stopped) };
        let stopped = lead(run, async {
            tokio::task::yield_now().await;
            is_printed = true;
        })
        .await;
        assert!(matches!(stopped, Err(RoleError::Stopped)));
        assert!(is_printed);
        assert!(matches!(lead(async { Ok(7) }, async {}).await, Ok(7)));
    }
}

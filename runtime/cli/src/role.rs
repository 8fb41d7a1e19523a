//! One member of a job in a process of its own: what pods run, and what `rectrain run --processes` starts. A process ends with
//! its job; with `--stay` it waits to be told, because a pod of a StatefulSet that exits is restarted whatever its exit code.

use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use prometheus::Registry;
use rectrain_coordinator::{Coordinator, Guard, LivePage, serve_control};
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

use crate::args::{CoordinatorArgs, JobArgs, MemberArgs, TlsArgs};
use crate::run::save_while;
use crate::show::Display;
use crate::{Failure, job, signal};

/// How long members and followers have to hear that the job has ended.
const FAREWELL: Duration = Duration::from_secs(5);

/// Where a coordinator can be reached: the first line it prints, as JSON.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct CoordinatorAddresses {
    /// For members.
    pub(crate) members: String,
    /// For the operator and the command line (gRPC).
    pub(crate) control: String,
    /// Prometheus metrics.
    pub(crate) metrics: String,
    /// Whether it goes on where one was that had been killed.
    pub(crate) taken_up: bool,
}

/// The plan of a job of which this process is one of several.
fn plan_of_process(args: &JobArgs, stall_seconds: Option<u32>) -> Result<Arc<JobPlan>, Failure> {
    let mut plan = job::plan(args)?;
    if let Some(seconds) = stall_seconds {
        Arc::make_mut(&mut plan).stall = Duration::from_secs(u64::from(seconds));
    }
    plan.check_message_size(TcpConfig::default().limits.max_frame_bytes)?;
    Ok(plan)
}

/// `rectrain coordinator`
pub(crate) fn coordinate(args: &CoordinatorArgs) -> Result<(), Failure> {
    let plan = plan_of_process(&args.job, args.patience.stall_seconds)?;
    crate::runtime()?.block_on(async {
        let Network { metrics, counters, transport, credentials } = Network::new(&args.tls, &plan)?;
        let (page, readiness) = (LivePage::default(), Readiness::default());
        let (metrics_address, _metrics) =
            serve_metrics_and_page(args.metrics, metrics.clone(), readiness.clone(), page.clone()).await?;
        let events = EventLog::default();
        let coordinator_metrics = CoordinatorMetrics::of(&metrics, 0);
        let journal = args.journal.as_deref();
        let coordinator = Coordinator::start(plan, &args.run, journal, events.clone(), coordinator_metrics).await;
        let coordinator = Arc::new(coordinator?);
        page.show(Arc::clone(&coordinator));
        let service = Arc::clone(&coordinator) as Arc<dyn Service>;
        let serving = transport.serve(service, &args.bind).map_err(RoleError::from)?;
        let guard = credentials.map(|credentials| Guard { credentials, counters: Arc::clone(&counters) });
        let (control_address, control) = serve_control(args.control, Arc::clone(&coordinator), guard).await?;
        readiness.set_ready();
        let addresses = CoordinatorAddresses {
            members: serving.address().to_string(),
            control: format!("http://{control_address}"),
            metrics: format!("http://{metrics_address}/metrics"),
            taken_up: coordinator.is_recovered(),
        };
        println!("{}", serde_json::to_string(&addresses).map_err(|error| Failure::Failed(error.to_string()))?);
        let mut told_to_stop = pin!(signal::interrupted());
        let mut running = pin!(async { tokio::join!(coordinator.run(&transport), print(events, args.json)).0 });
        let result = tokio::select! {
            result = &mut running => result.map(drop).map_err(Failure::from),
            () = &mut told_to_stop => {
                coordinator.let_all_leave();
                let saving = async { coordinator.save_now().await.map_err(|error| error.to_string()) };
                Err(save_while(&mut running, saving, args.patience.grace_seconds).await)
            }
        };
        if args.stay && !matches!(result, Err(Failure::Interrupted(_))) {
            staying(&result);
            told_to_stop.await;
        }
        let all_heard = serving.stop(FAREWELL).await;
        tracing::info!(all_heard, traffic = ?counters.snapshot(), "the coordinator ends");
        // Followers read the last event within this time or reconnect and find nobody.
        let _followers = tokio::time::timeout(Duration::from_millis(500), control).await;
        result
    })
}

/// Shows the job's events as lines of JSON until the last, if that is asked for.
async fn print(events: EventLog, json: bool) {
    let mut display = Display::new(true);
    let mut follower = events.follow();
    while json && let Some(event) = follower.next().await {
        display.show(&event);
    }
}

/// How long a member of a failed job waits for being told to stop, which takes an operator seconds. If the coordinator has died before anybody
/// had asked it how the job stands, nobody knows that it has failed, and the coordinator's successor waits for members: a process that is
/// started again joins it.
const FAILED_STAY: Duration = Duration::from_secs(300);
const WHOLE_LIFE: Duration = Duration::MAX;

/// Says how the job ended in the logs of a process that stays.
fn staying(result: &Result<(), Failure>) {
    match result {
        Ok(()) => tracing::info!("the job is done; staying until told to stop"),
        Err(Failure::User(message) | Failure::Failed(message) | Failure::Interrupted(message)) => {
            tracing::error!("the job has failed; staying until told to stop: {message}");
        }
    }
}

/// `rectrain ps`, `rectrain embedding-worker`, `rectrain dense-worker`, `rectrain loader`
pub(crate) fn take_part(role: Role, args: &MemberArgs) -> Result<(), Failure> {
    let plan = plan_of_process(&args.job, args.patience.stall_seconds)?;
    crate::runtime()?.block_on(async {
        let (stall, computing) = (plan.stall, Watchdog::default());
        let Network { metrics, counters, transport, .. } = Network::new(&args.tls, &plan)?;
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
            watchdog: computing.clone(),
            readiness,
            metrics,
            counters,
        };
        let mut told_to_stop = pin!(signal::interrupted());
        let leaving = member.leave();
        let mut running = pin!(member.run());
        let result = tokio::select! {
            result = &mut running => result,
            (what, limit) = computing.expired(stall) => crate::abort(&format!(
                "{} {} has {what} for {} s, as long as a job may be without progress (spec.faultTolerance.stallSeconds)",
                role.name(),
                args.index,
                limit.as_secs(),
            )),
            () = &mut told_to_stop => {
                let saving = async { leaving.await.map_err(|error| error.to_string()) };
                let mut released = false;
                let running = async { released = running.await.is_ok() };
                let ended = Box::pin(save_while(running, saving, args.patience.grace_seconds)).await;
                let went_on = || Failure::Interrupted("interrupted; the job goes on with the rows on other servers".to_owned());
                return Err(if released { went_on() } else { ended });
            }
        };
        // A member's own failure ends its process: restarted, it is told that the job has failed, and stays.
        let has_failed = matches!(result, Err(RoleError::JobFailed { .. }));
        let result = result.map_err(Failure::from);
        if args.stay && (has_failed || result.is_ok()) {
            staying(&result);
            let patience = if has_failed { FAILED_STAY } else { WHOLE_LIFE };
            let _told = tokio::time::timeout(patience, told_to_stop).await;
        }
        result
    })
}

/// What a process of a job speaks with others through.
struct Network {
    metrics: RoleMetrics,
    counters: Arc<WireCounters>,
    transport: TcpTransport,
    credentials: Option<Credentials>,
}

impl Network {
    fn new(tls: &TlsArgs, plan: &JobPlan) -> Result<Self, Failure> {
        let metrics = RoleMetrics::new(Registry::new())?;
        let counters = WireCounters::register(metrics.registry(), kind_name).map_err(RoleError::from)?;
        let credentials = tls.tls.as_deref().map(Credentials::read).transpose();
        let credentials = credentials.map_err(|error| Failure::User(format!("--tls: {error}")))?;
        let places = plan.max_concurrent_calls();
        let config = TcpConfig {
            credentials: credentials.clone(),
            max_in_flight: places,
            max_concurrent: places,
            ..TcpConfig::default()
        };
        let transport = TcpTransport::new(config, Arc::clone(&counters));
        Ok(Self { metrics, counters, transport, credentials })
    }
}

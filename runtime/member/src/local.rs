//! A whole job in one process. Every member is a task, and messages are moved instead of copied.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use rectrain_wire::{Address, BoxFuture, InProcess, InProcessConfig, Transport, WireCounters};
use tokio::task::JoinSet;

use crate::member::Member;
use rectrain_coordinator::Coordinator;
use rectrain_kinds::Role;
use rectrain_protocol::error::RoleError;
use rectrain_protocol::events::{EventLog, JobEvent, Summary};
use rectrain_protocol::message::kind_name;
use rectrain_protocol::metrics::{CoordinatorMetrics, RoleMetrics};
use rectrain_protocol::plan::JobPlan;
use rectrain_protocol::readiness::Readiness;
use rectrain_protocol::watchdog::Watchdog;

/// Trains the job and returns its summary. `events` gets the job's events. Dense workers in `slow`
/// take that many times as long to compute. `run` names this run in its checkpoints. Dropping the
/// future stops the job.
pub fn run_in_process<'a>(
    plan: Arc<JobPlan>,
    run: &'a str,
    slow: &'a BTreeMap<u32, f64>,
    events: EventLog,
    metrics: RoleMetrics,
) -> BoxFuture<'a, Result<Summary, RoleError>> {
    Box::pin(async move {
        let coordinator =
            Coordinator::start(Arc::clone(&plan), run, None, events, CoordinatorMetrics::of(&metrics, 0)).await?;
        run_with(plan, slow, Arc::new(coordinator), metrics).await
    })
}

/// As [`run_in_process`], with a coordinator that the caller has started and may command.
///
/// The future is boxed in this crate. Otherwise every program that awaits it would compile the code
/// of all roles again.
pub fn run_with(
    plan: Arc<JobPlan>,
    slow: &BTreeMap<u32, f64>,
    coordinator: Arc<Coordinator>,
    metrics: RoleMetrics,
) -> BoxFuture<'_, Result<Summary, RoleError>> {
    Box::pin(train(plan, slow, coordinator, metrics))
}

async fn train(
    plan: Arc<JobPlan>,
    slow: &BTreeMap<u32, f64>,
    coordinator: Arc<Coordinator>,
    metrics: RoleMetrics,
) -> Result<Summary, RoleError> {
    let counters = WireCounters::register(metrics.registry(), kind_name)?;
    let places = plan.max_concurrent_calls();
    let config = InProcessConfig { max_in_flight: places, max_concurrent: places };
    let transport: Arc<dyn Transport> = Arc::new(InProcess::new(config, Arc::clone(&counters)));
    let address = Address::local("coordinator");
    let _serving = transport.serve(Arc::clone(&coordinator) as Arc<dyn rectrain_wire::Service>, &address)?;
    let mut members = JoinSet::new();
    let mut started = 0u32;
    let mut start = |members: &mut JoinSet<_>, role: Role, index: u32| {
        started += 1;
        let member = Member {
            readiness: Readiness::default(),
            plan: Arc::clone(&plan),
            role,
            index,
            transport: Arc::clone(&transport),
            coordinator: address.clone(),
            // A member and its replacement need different addresses.
            bind: Address::local(format!("{}-{index}-{started}", role.name())),
            advertise: None,
            // All members end with this process.
            shared_memory: None,
            slow: if role == Role::DenseWorker { slow.get(&index).copied().unwrap_or(1.0) } else { 1.0 },
            watchdog: Watchdog::default(),
            metrics: metrics.clone(),
            counters: Arc::clone(&counters),
        };
        members.spawn(member.run());
    };
    for role in Role::MEMBERS {
        (0..plan.replicas.count(role)).for_each(|index| start(&mut members, role, index));
    }
    let mut events = coordinator.follow();
    let mut running = Box::pin(coordinator.run(&*transport));
    let summary = loop {
        tokio::select! {
            summary = &mut running => break summary,
            error = first_panic(&mut members) => {
                coordinator.fail(error.to_string(), false);
                break Err(error);
            }
            Some(event) = events.next() => if let JobEvent::Scaling { role, from, to, .. } = event {
                (from..to).for_each(|index| start(&mut members, role, index));
            },
        }
    };
    // The coordinator has told every member how the job ended. Members that still run are aborted.
    let ended = async { while members.join_next().await.is_some() {} };
    if tokio::time::timeout(FAREWELL, ended).await.is_err() {
        members.shutdown().await;
    }
    summary
}

/// How long members may take to end after the job.
const FAREWELL: Duration = Duration::from_secs(5);

/// Returns when a member panics. A member reports its errors to the coordinator, but a panic
/// reaches only its task.
async fn first_panic(members: &mut JoinSet<Result<(), RoleError>>) -> RoleError {
    while let Some(member) = members.join_next().await {
        if let Err(error) = member
            && error.is_panic()
        {
            return RoleError::Task { what: "a member of the job", reason: error.to_string() };
        }
    }
    std::future::pending().await
}

//! `rectrain run`: the whole job on this machine, in one process or in many.

use std::sync::Arc;

use prometheus::Registry;
use rectrain_roles::coordinator::{Coordinator, serve_control};
use rectrain_roles::events::{EventLog, Summary};
use rectrain_roles::http::serve_metrics;
use rectrain_roles::local::run_with;
use rectrain_roles::metrics::{CoordinatorMetrics, RoleMetrics};
use rectrain_roles::plan::JobPlan;

use crate::args::RunArgs;
use crate::running::Running;
use crate::show::Display;
use crate::{Failure, data, job, processes, signal, slow};

pub(crate) fn run(args: &RunArgs) -> Result<(), Failure> {
    let plan = job::plan(&args.job)?;
    data::provide(&plan)?;
    let display = Display::new(args.json);
    // Drawing the whole test part takes time, and a program that reads JSON is not told.
    if !args.json
        && let Some(auc) = data::best_possible_auc(&plan)?
    {
        display.note(&format!("synthetic clicks: the best possible test AUC is {auc:.4}"));
    }
    crate::runtime()?.block_on(async {
        if args.processes { processes::run(args, &plan, display).await } else { in_process(args, plan, display).await }
    })
}

async fn in_process(args: &RunArgs, plan: Arc<JobPlan>, mut display: Display) -> Result<(), Failure> {
    let metrics = RoleMetrics::new(Registry::new())?;
    let (address, _serving) = serve_metrics(args.metrics, metrics.clone()).await?;
    display.note(&format!("metrics on http://{address}/metrics"));
    let slow = slow::factors(&args.slow, plan.replicas.dense_workers)?;
    let events = EventLog::default();
    let mut follower = events.follow();
    let name = plan.name.clone();
    let coordinator = Coordinator::new(Arc::clone(&plan), events, CoordinatorMetrics::of(&metrics, 0))?;
    let coordinator = Arc::new(coordinator);
    let (control, _control) = serve_control(args.control, Arc::clone(&coordinator)).await?;
    let _running = Running::note(&name, &format!("http://{control}"));
    let showing = tokio::spawn(async move {
        while let Some(event) = follower.next().await {
            display.show(&event);
        }
    });
    let result: Result<Summary, Failure> = tokio::select! {
        result = run_with(plan, &slow, coordinator, metrics) => result.map_err(Failure::from),
        () = signal::interrupted() => {
            showing.abort();
            return Err(Failure::Interrupted("interrupted; nothing was saved".to_owned()));
        }
    };
    // The last event has been pushed, so the display ends by itself.
    if let Err(error) = showing.await {
        return Err(Failure::Failed(format!("the display failed: {error}")));
    }
    result.map(drop)
}

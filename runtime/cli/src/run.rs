//! `rectrain run`: runs the whole job on this machine, in one process or in many.

use std::sync::Arc;
use std::time::Duration;

use prometheus::Registry;
use rectrain_checkpoint::CheckpointId;
use rectrain_coordinator::{Coordinator, LivePage, serve_control};
use rectrain_crds::defaults::TERMINATION_GRACE_SECONDS;
use rectrain_member::http::serve_metrics_and_page;
use rectrain_member::local::run_with;
use rectrain_protocol::events::{EventLog, Summary};
use rectrain_protocol::metrics::{CoordinatorMetrics, RoleMetrics};
use rectrain_protocol::plan::JobPlan;
use rectrain_protocol::readiness::Readiness;

use crate::args::RunArgs;
use crate::running::Running;
use crate::show::Display;
use crate::{Failure, data, job, processes, signal, slow};

/// The seconds at the end of the grace period that are reserved for ending, not for saving.
const ENDING_SECONDS: u32 = 8;

pub(crate) fn run(args: &RunArgs) -> Result<(), Failure> {
    let plan = job::plan(&args.job)?;
    // Copied before anything slow, during which the user may edit the manifest for the next
    // experiment.
    let manifest = args.processes.then(|| processes::frozen(&args.job.manifest)).transpose()?;
    data::provide(&plan)?;
    let display = Display::new(args.json);
    // Drawing the whole test part takes time, and the JSON output does not contain the result.
    if !args.json
        && let Some(auc) = data::best_possible_auc(&plan)?
    {
        display.note(&format!("synthetic clicks: the best possible test AUC is {auc:.4}"));
    }
    crate::runtime()?.block_on(async {
        match manifest {
            Some(manifest) => processes::run(args, &plan, manifest, display).await,
            None => Box::pin(in_process(args, plan, display)).await,
        }
    })
}

async fn in_process(args: &RunArgs, plan: Arc<JobPlan>, mut display: Display) -> Result<(), Failure> {
    let metrics = RoleMetrics::new(Registry::new())?;
    let (page, readiness) = (LivePage::default(), Readiness::default());
    let (address, _serving) =
        serve_metrics_and_page(args.metrics, metrics.clone(), readiness.clone(), page.clone()).await?;
    display.note(&format!("the job on http://{address}/, its metrics on http://{address}/metrics"));
    let slow = slow::factors(&args.slow, plan.replicas.dense_worker)?;
    let events = EventLog::default();
    let mut follower = events.follow();
    let name = plan.name.clone();
    let coordinator_metrics = CoordinatorMetrics::of(&metrics, 0);
    let coordinator = Coordinator::start(Arc::clone(&plan), &new_run(), None, events, coordinator_metrics).await?;
    let coordinator = Arc::new(coordinator);
    page.show(Arc::clone(&coordinator));
    let (control, _control) = serve_control(args.control, Arc::clone(&coordinator), None).await?;
    readiness.set_ready();
    let _running = Running::note(&name, &format!("http://{control}"));
    let showing = tokio::spawn(async move {
        while let Some(event) = follower.next().await {
            display.show(&event);
        }
    });
    let mut running = std::pin::pin!(run_with(plan, &slow, Arc::clone(&coordinator), metrics));
    let result: Result<Summary, Failure> = tokio::select! {
        result = &mut running => result.map_err(Failure::from),
        () = signal::interrupted() => {
            let saving = async { coordinator.save_now().await.map_err(|error| error.to_string()) };
            let interrupted = save_while(&mut running, saving, TERMINATION_GRACE_SECONDS).await;
            showing.abort();
            coordinator.fail("interrupted".to_owned(), false);
            // The job's members end in order, or `run_with` stops them.
            let _ended = running.await;
            return Err(interrupted);
        }
    };
    // The last event has been pushed, so the display ends by itself.
    if let Err(error) = showing.await {
        return Err(Failure::Failed(format!("the display failed: {error}")));
    }
    result.map(drop)
}

/// A unique name for a run.
pub(crate) fn new_run() -> String {
    CheckpointId::random().to_string()
}

/// Waits for `saving`, the checkpoint that this command saves when a signal ends it, while the job
/// (`running`) continues. Returns the command's result.
pub(crate) async fn save_while<T>(
    running: impl Future<Output = T>,
    saving: impl Future<Output = Result<String, String>>,
    grace_seconds: u32,
) -> Failure {
    tokio::select! {
        failure = save(saving, grace_seconds) => failure,
        _ended = running => interrupted(Err("the job ended".to_owned())),
    }
}

/// As [`save_while`], for a job that runs in other processes. A second signal ends the wait.
pub(crate) async fn save(saving: impl Future<Output = Result<String, String>>, grace_seconds: u32) -> Failure {
    let seconds = u64::from(grace_seconds.saturating_sub(ENDING_SECONDS).max(1));
    interrupted(tokio::select! {
        saved = tokio::time::timeout(Duration::from_secs(seconds), saving) => {
            saved.unwrap_or_else(|_| Err(format!("saving took longer than {seconds} s")))
        }
        () = signal::interrupted() => Err("a second signal arrived".to_owned()),
    })
}

/// The result of an interrupted command, which saved a checkpoint (its name) or did not (the
/// reason).
pub(crate) fn interrupted(saved: Result<String, String>) -> Failure {
    Failure::Interrupted(match saved {
        Ok(checkpoint) => {
            format!("interrupted; checkpoint {checkpoint} was saved: spec.checkpoint.resume=latest resumes from it")
        }
        Err(reason) => format!("interrupted; no checkpoint was saved: {reason}"),
    })
}

//! `rectrain run`: runs the whole job on this machine, in one process or in many.

use std::sync::Arc;

use prometheus::Registry;
use rectrain_coordinator::{Coordinator, INTERRUPTED, LivePage, RunFacts, serve_control};
use rectrain_crds::defaults::TERMINATION_GRACE_SECONDS;
use rectrain_member::http::serve_metrics_and_page;
use rectrain_member::local::run_with;
use rectrain_protocol::events::{EventLog, Summary};
use rectrain_protocol::metrics::{CoordinatorMetrics, RoleMetrics};
use rectrain_protocol::plan::JobPlan;
use rectrain_protocol::readiness::Readiness;

use crate::args::RunArgs;
use crate::failure::Failure;
use crate::history::{Ending, History};
use crate::job::Job;
use crate::publishing::Publishing;
use crate::running::Running;
use crate::saving::save_while;
use crate::show::{Addresses, Display};
use crate::tensorboard::TensorBoard;
use crate::{browser, data, job, outlook, output, processes, signal, slow};

pub(crate) fn run(args: &RunArgs) -> Result<(), Failure> {
    let Job { text, in_use, plan, notes, doubts } = job::read(&args.job)?;
    // The text is read once: the user may edit the manifest for the next experiment meanwhile.
    let has_processes = args.processes || plan.rolls_back();
    let manifest = has_processes.then(|| processes::frozen(&text)).transpose()?;
    output::check().map_err(|error| {
        Failure::Failed(format!("the summary cannot be written to standard output: {error}: write it to another place"))
    })?;
    data::provide(&plan)?;
    let outlook = outlook::look(&plan)?;
    let mut display = Display::new(args.json, outlook, doubts.into_iter().chain(outlook.doubt()).collect());
    for note in &notes {
        display.note(&format!("note: {note}"));
    }
    if has_processes && !args.processes {
        display.note(
            "note: the members are processes, because a rollback (spec.training.quality.onRegression) restarts them",
        );
    }
    let history = History::of(&args.history, &plan, in_use.as_deref());
    let tensorboard = TensorBoard::of(args.history.tensorboard.as_deref(), &plan.name);
    display.record_in(history.clone(), tensorboard);
    // Drawing the whole test part takes time, and the JSON output does not contain the result.
    if !args.json
        && let Some(auc) = data::best_possible_auc(&plan)?
    {
        display.note(&format!("synthetic clicks: the best possible test AUC is {auc:.4}"));
    }
    let run_facts = RunFacts { manifest: in_use, ..history.facts() };
    let outcome = crate::failure::runtime()?.block_on(async {
        match manifest {
            Some(manifest) => processes::run(args, &plan, manifest, display).await,
            None => Box::pin(in_process(args, plan, display, Recorded { history: history.clone(), run_facts })).await,
        }
    });
    if let Some(page) = history.end(&ending(&outcome))
        && !args.json
    {
        output::say(&format!("the page of this run: {}", page.display()));
    }
    outcome
}

fn ending(outcome: &Result<(), Failure>) -> Ending {
    match outcome {
        Ok(()) => Ending::Done,
        Err(Failure::Interrupted(message)) => Ending::Interrupted(message.clone()),
        Err(failure) => Ending::Failed(failure.message().to_owned()),
    }
}

/// The history of the run, and the facts that its live page shows.
struct Recorded {
    history: History,
    run_facts: RunFacts,
}

async fn in_process(
    args: &RunArgs,
    plan: Arc<JobPlan>,
    mut display: Display,
    recorded: Recorded,
) -> Result<(), Failure> {
    let metrics = RoleMetrics::new(Registry::new())?;
    let (page, readiness) = (LivePage::default(), Readiness::default());
    let (address, _serving) = serve_metrics_and_page(args.metrics, metrics.clone(), readiness.clone(), page.clone())
        .await
        .map_err(|error| Failure::cannot_listen(error, "--metrics"))?;
    page.describe(recorded.run_facts);
    if args.history.open {
        browser::open(format!("http://{address}/"));
    }
    let slow = slow::factors(&args.slow, plan.replicas.dense_worker)?;
    let events = EventLog::default();
    let (mut follower, saved) = (events.follow(), events.follow());
    let name = plan.name.clone();
    let coordinator_metrics = CoordinatorMetrics::of(&metrics, 0);
    let (run, metrics_of_job) = (job::new_run(), coordinator_metrics.clone());
    let coordinator = Coordinator::start(Arc::clone(&plan), &run, None, events, metrics_of_job).await?;
    let publishing = Publishing::start(&plan, &coordinator_metrics, saved).await?;
    let coordinator = Arc::new(coordinator);
    page.show(Arc::clone(&coordinator));
    let (control, _control) = serve_control(args.control, Arc::clone(&coordinator), None)
        .await
        .map_err(|error| Failure::cannot_listen(error, "--control"))?;
    readiness.set_ready();
    let control = format!("http://{control}");
    let page_address = format!("http://{address}/");
    display.addresses(&Addresses {
        page: &page_address,
        metrics: &format!("http://{address}/metrics"),
        control: &control,
    });
    let _running = Running::note(&name, &control, &page_address);
    let showing = tokio::spawn(async move {
        while let Some(event) = follower.next().await {
            display.show(&event);
        }
        display.unwritten()
    });
    let mut running = std::pin::pin!(run_with(plan, &slow, Arc::clone(&coordinator), metrics));
    let result: Result<Summary, Failure> = tokio::select! {
        result = &mut running => result.map_err(Failure::from),
        () = signal::interrupted() => {
            let saving = async { coordinator.save_now().await.map_err(|error| error.to_string()) };
            let interrupted = save_while(&mut running, saving, TERMINATION_GRACE_SECONDS).await;
            showing.abort();
            recorded.history.record_state(page.state());
            coordinator.fail(INTERRUPTED.to_owned(), false);
            // The job's members end in order, or `run_with` stops them.
            let _ended = running.await;
            return Err(interrupted);
        }
    };
    if let Some(publishing) = publishing {
        publishing.finish().await;
    }
    // The last event has been pushed, so the display ends by itself.
    let unwritten = showing.await.map_err(|error| Failure::Failed(format!("the display failed: {error}")))?;
    recorded.history.record_state(page.state());
    result?;
    unwritten.map_or(Ok(()), |reason| Err(Failure::Failed(reason)))
}

//! Measures how long a migration of slots holds up training.
//! It trains until there are enough rows, moves the slots to 3 and then 2 parameter servers, and
//! compares the steps meanwhile with the steps before.
//!
//!     cargo run --release -p rectrain-member --example migration -- 10000000 [MODE]

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use prometheus::Registry;
use rectrain_coordinator::Coordinator;
use rectrain_kinds::Role;
use rectrain_member::local::run_with;
use rectrain_protocol::events::{EventLog, JobEvent};
use rectrain_protocol::metrics::{CoordinatorMetrics, RoleMetrics};
use rectrain_protocol::plan::JobPlan;

const BATCH: u64 = 4096;
const FEATURES: u64 = 26;
/// Steps for the median.
const STEPS_BEFORE: usize = 100;
/// The time between two reads of the progress. Step times are only as exact as this.
const TICK: Duration = Duration::from_millis(2);

type Failure = Box<dyn std::error::Error>;

fn main() -> Result<(), Failure> {
    let mut arguments = std::env::args().skip(1);
    let rows: u64 = arguments.next().unwrap_or_else(|| "1000000".to_owned()).parse()?;
    let mode = arguments.next().unwrap_or_else(|| "sync".to_owned());
    tokio::runtime::Builder::new_multi_thread().enable_all().build()?.block_on(measure(rows, &mode))
}

/// Ids are nearly uniform, and there are a third more than the wanted rows, so that rows appear
/// quickly.
fn plan(rows: u64, mode: &str) -> Result<JobPlan, Failure> {
    let vocabulary = rows * 4 / 3 / FEATURES;
    let manifest = format!(
        "{{apiVersion: rectrain.dev/v1alpha1, kind: RecTrainingJob, metadata: {{name: migration}}, spec: {{
         model: {{kind: deepfm, embeddingDim: 16, hidden: [64, 32]}},
         features: {{sparse: [{{name: 'C{{1..{FEATURES}}}'}}]}},
         data: {{synthetic: {{rows: {}, testRows: 1, vocabulary: {vocabulary}, zipfExponent: 0.01}}}},
         training: {{mode: {mode}, globalBatchSize: {BATCH}, epochs: 1}}}}}}",
        BATCH * 100_000
    );
    Ok(JobPlan::new(&rectrain_crds::load(&manifest, "migration.yaml", &[])?.resolved)?)
}

async fn measure(rows: u64, mode: &str) -> Result<(), Failure> {
    let plan = Arc::new(plan(rows, mode)?);
    let metrics = RoleMetrics::new(Registry::new())?;
    let events = EventLog::default();
    let coordinator =
        Coordinator::start(Arc::clone(&plan), "run", None, events.clone(), CoordinatorMetrics::of(&metrics, 0)).await?;
    let coordinator = Arc::new(coordinator);
    let slow = BTreeMap::new();
    let running = run_with(plan, &slow, Arc::clone(&coordinator), metrics.clone());
    let measuring = async {
        let mut steps = Steps::new(&metrics);
        while steps.sum("rectrain_ps_rows") < rows as f64 {
            steps.tick().await;
        }
        println!("{} rows in {} steps", steps.sum("rectrain_ps_rows"), steps.seconds.len());
        steps.seconds.clear();
        while steps.seconds.len() < STEPS_BEFORE {
            steps.tick().await;
        }
        let median = steps.report("without", None);
        let mut follower = events.follow();
        for servers in [3, 2, 2] {
            steps.seconds.clear();
            coordinator.request_scale(Role::Ps, servers)?;
            let moved = loop {
                tokio::select! {
                    event = follower.next() => match event {
                        Some(moved @ JobEvent::SlotsMoved { .. }) => break moved,
                        Some(_) => {}
                        None => return Err("the job has ended".into()),
                    },
                    () = steps.tick() => {}
                }
            };
            // The step after the pause is one of these.
            for _step in 0..5 {
                let known = steps.seconds.len();
                while steps.seconds.len() == known {
                    steps.tick().await;
                }
            }
            if let JobEvent::SlotsMoved { from, to, slots, bytes, seconds, rest_seconds, .. } = moved {
                let text = format!(
                    "{from} -> {to}: {slots} slots, {} MB, {seconds:.2} s, flip {rest_seconds:.3} s",
                    bytes / 1_000_000
                );
                steps.report(&text, Some(median));
            }
        }
        Ok(())
    };
    tokio::select! {
        ended = running => Err(format!("the job ended before it was measured: {ended:?}").into()),
        measured = measuring => measured,
    }
}

/// Times between two steps, including pauses.
struct Steps<'m> {
    metrics: &'m RoleMetrics,
    known: f64,
    since: Instant,
    seconds: Vec<f64>,
}

impl<'m> Steps<'m> {
    fn new(metrics: &'m RoleMetrics) -> Self {
        Self { metrics, known: 0.0, since: Instant::now(), seconds: Vec::new() }
    }

    async fn tick(&mut self) {
        tokio::time::sleep(TICK).await;
        let steps = self.sum("rectrain_dense_worker_steps_total");
        if steps > self.known {
            self.seconds.push(self.since.elapsed().as_secs_f64());
            (self.known, self.since) = (steps, Instant::now());
        }
    }

    fn sum(&self, name: &str) -> f64 {
        let families = self.metrics.registry().gather();
        let family = families.iter().filter(|family| family.name() == name).flat_map(|family| family.get_metric());
        family.map(|metric| metric.get_gauge().get_value() + metric.get_counter().get_value()).sum()
    }

    fn report(&self, what: &str, median: Option<f64>) -> f64 {
        let mut sorted = self.seconds.clone();
        sorted.sort_by(f64::total_cmp);
        let own = sorted.get(sorted.len() / 2).copied().unwrap_or(0.0);
        let longest = sorted.last().copied().unwrap_or(0.0);
        let above = longest - median.unwrap_or(own);
        println!(
            "{what}: {} steps, median {:.0} ms, longest {:.0} ms, {:.0} ms above the median without",
            sorted.len(),
            own * 1e3,
            longest * 1e3,
            above * 1e3
        );
        own
    }
}

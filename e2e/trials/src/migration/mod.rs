//! `cargo xtask migration`: measures steps while many rows move between parameter servers. A job
//! trains in many processes until its servers hold the rows. Then another server joins, and the
//! trial watches the steps.

mod kills;

use std::path::Path;
use std::time::{Duration, Instant};

use rectrain_harness::arguments::number;
use rectrain_harness::cargo::build_programs;
use rectrain_harness::events::integer;
use rectrain_harness::files::{temporary_folder, write};
use rectrain_harness::rectrain::scale_servers;
use rectrain_harness::statistics::median;
use rectrain_harness::watched::WatchedRun;
use rectrain_harness::{HarnessError, http};
use serde_json::{Value, json};

use crate::TrialError;
use crate::error::unmet;

const USAGE: &str = "usage: cargo xtask migration [--rows 10000000] [--servers 2] [--to 3]
  Prints one line of JSON: the rows, the median and the longest step before and during the migration, and the
  size and time of the migration. Fails if the longest step during it exceeds the median by a second.
usage: cargo xtask migration kills
  Kills a member of each role at each message of a migration, one in each run. Fails unless every run trains
  the same model.";
/// Time between two looks at the step.
const LOOK: Duration = Duration::from_millis(20);
/// How long the steps are watched before slots move.
const BEFORE: Duration = Duration::from_secs(20);
/// The time limit for loading the rows, which takes minutes, and for moving them.
const AT_MOST: Duration = Duration::from_secs(1800);
/// The longest step may exceed the median by this much.
const ALLOWED_SECONDS: f64 = 1.0;
const NAME: &str = "migration";

struct Plan {
    rows: u64,
    servers: u32,
    to: u32,
}

/// The steps of a job during some time.
struct Steps {
    /// For each observed change: seconds per step since the previous one.
    seconds: Vec<f64>,
    /// The longest time without a change, in seconds.
    longest: f64,
}

/// Runs the trial with the arguments of the command line.
///
/// # Errors
/// Wrong arguments; a run that fails; the failures that [`USAGE`] lists.
pub fn run(arguments: &[&str]) -> Result<(), TrialError> {
    if arguments == ["kills"] {
        return kills::run();
    }
    let plan = parse(arguments)?;
    build_programs()?;
    let folder = temporary_folder("migration");
    let measured = measure_job(&plan, &folder.join("job.json"));
    let removed = std::fs::remove_dir_all(&folder);
    let measured = measured?;
    removed.map_err(HarnessError::io("remove", folder.display()))?;
    println!("{measured}");
    let above = |name: &str| measured[name].as_f64().unwrap_or(f64::INFINITY);
    let over = above("longestStepSecondsWhileMoving") - above("medianStepSeconds");
    if over < ALLOWED_SECONDS {
        return Ok(());
    }
    Err(unmet(format!("no step to exceed the median by {ALLOWED_SECONDS} s"), format!("one exceeds it by {over:.2} s")))
}

fn parse(arguments: &[&str]) -> Result<Plan, HarnessError> {
    let mut plan = Plan { rows: 10_000_000, servers: 2, to: 3 };
    for pair in arguments.chunks(2) {
        match pair {
            ["--rows", rows] => plan.rows = number(rows, USAGE)?,
            ["--servers", servers] => plan.servers = number(servers, USAGE)?,
            ["--to", to] => plan.to = number(to, USAGE)?,
            _ => return Err(HarnessError::Usage(USAGE)),
        }
    }
    Ok(plan)
}

/// A job whose ids hardly repeat, so that almost every look-up makes a row.
fn job(plan: &Plan) -> Value {
    json!({
        "apiVersion": "rectrain.dev/v1alpha1",
        "kind": "RecTrainingJob",
        "metadata": {"name": NAME},
        "spec": {
            "model": {"kind": "deepfm", "hidden": [64]},
            "features": {"sparse": [{"name": "C{1..8}"}], "dense": [{"name": "I{1..4}"}]},
            "data": {"synthetic": {"rows": 100_000_000_000_u64, "testRows": 100, "vocabulary": 1_000_000_000}},
            "training": {"mode": "sync", "globalBatchSize": 2_000},
            "roles": {"ps": {"replicas": plan.servers}},
        },
    })
}

/// Starts the job, measures it, and ends it.
fn measure_job(plan: &Plan, manifest: &Path) -> Result<Value, TrialError> {
    write(manifest, job(plan).to_string())?;
    let job = WatchedRun::start(manifest, &[])?;
    let measured = measure(plan, &job);
    job.end()?;
    measured
}

/// The rows in the job's parameter servers.
fn rows(job: &WatchedRun) -> u64 {
    job.metrics().iter().filter_map(|text| http::sum_of(text, "rectrain_ps_rows")).sum::<f64>() as u64
}

fn measure(plan: &Plan, job: &WatchedRun) -> Result<Value, TrialError> {
    let started = Instant::now();
    while rows(job) < plan.rows {
        if started.elapsed() > AT_MOST {
            return Err(unmet(format!("{} rows within {AT_MOST:?}", plan.rows), format!("{} rows", rows(job))));
        }
        std::thread::sleep(Duration::from_secs(1));
    }
    let before = steps(job, |_, elapsed| elapsed >= BEFORE)?;
    let held = rows(job);
    scale_servers(plan.to, NAME)?;
    let mut moved = Value::Null;
    let meanwhile = steps(job, |job, _| {
        let events = job["events"].as_array().map(Vec::as_slice).unwrap_or_default();
        let events = events.iter().map(|logged| &logged["event"]);
        moved = events.rev().find(|event| event["event"] == "slotsMoved").cloned().unwrap_or(Value::Null);
        !moved.is_null()
    })?;
    Ok(json!({
        "rows": held,
        "slots": moved["slots"],
        "bytesMoved": moved["bytes"],
        "seconds": moved["seconds"],
        "restSeconds": moved["restSeconds"],
        "medianStepSeconds": median(before.seconds),
        "longestStepSeconds": before.longest,
        "medianStepSecondsWhileMoving": median(meanwhile.seconds),
        "longestStepSecondsWhileMoving": meanwhile.longest,
    }))
}

/// Watches the steps until `is_enough` accepts the job's page and the elapsed time.
fn steps(job: &WatchedRun, mut is_enough: impl FnMut(&Value, Duration) -> bool) -> Result<Steps, TrialError> {
    let started = Instant::now();
    let mut seen = Steps { seconds: Vec::new(), longest: 0.0 };
    let mut last: Option<(u64, Instant)> = None;
    loop {
        let now = job.page()?;
        let at = Instant::now();
        let step = integer("the job's page", &now, "step")?;
        match last {
            Some((before, since)) if step > before => {
                let seconds = at.duration_since(since).as_secs_f64();
                seen.seconds.push(seconds / (step - before) as f64);
                seen.longest = seen.longest.max(seconds);
                last = Some((step, at));
            }
            None => last = Some((step, at)),
            Some(_) => {}
        }
        if is_enough(&now, started.elapsed()) {
            return Ok(seen);
        }
        if started.elapsed() > AT_MOST {
            return Err(unmet(format!("slots that move within {AT_MOST:?}"), &now["events"]));
        }
        std::thread::sleep(LOOK);
    }
}

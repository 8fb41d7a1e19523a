//! `cargo xtask migration`: how long a step takes while many rows move between parameter servers. A job trains in processes of its own
//! until its servers hold the rows, another server joins, and its steps are watched meanwhile.

mod kills;

use std::io::{BufRead, BufReader};
use std::net::{SocketAddr, TcpListener};
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::{http, median};

const USAGE: &str = "usage: cargo xtask migration [--rows 10000000] [--servers 2] [--to 3]
  prints one line of JSON: rows held, the median and the longest step before and while slots move, and what moved in what time;
  fails if the longest step while slots move is a second or more above the median
usage: cargo xtask migration kills
  kills a member of each role at each message of a migration, one at a time, and fails unless the same model is trained each time";
/// Time between two looks at the step.
const LOOK: Duration = Duration::from_millis(20);
/// Steps that are watched before slots move.
const BEFORE: Duration = Duration::from_secs(20);
/// Loading that many rows takes minutes; this long without an end means that something is wrong.
const AT_MOST: Duration = Duration::from_secs(1800);
/// What the longest step may be above the median.
const ALLOWED_SECONDS: f64 = 1.0;
const NAME: &str = "migration";

struct Plan {
    rows: u64,
    servers: u32,
    to: u32,
}

/// What was seen of a job's steps for a while.
struct Steps {
    /// Seconds between two changes of the step, over the steps in between.
    seconds: Vec<f64>,
    /// The longest time in which the step did not change.
    longest: f64,
}

pub(crate) fn run(arguments: &[&str]) -> Result<(), String> {
    if arguments == ["kills"] {
        return kills::run();
    }
    let plan = parse(arguments)?;
    crate::cargo(&["build", "--release", "--workspace", "--bins", "--tests"], "the build failed")?;
    let folder = std::env::temp_dir().join(format!("rectrain-migration-{}", std::process::id()));
    std::fs::create_dir_all(&folder).map_err(|error| format!("cannot make {}: {error}", folder.display()))?;
    let manifest = folder.join("job.json");
    let written = std::fs::write(&manifest, job(&plan).to_string());
    let measured = written.map_err(|error| format!("cannot write {}: {error}", manifest.display())).and_then(|()| {
        let mut job = Job::start(&manifest)?;
        let measured = measure(&plan, &job);
        job.end()?;
        measured
    });
    let removed = std::fs::remove_dir_all(&folder);
    let measured = measured?;
    removed.map_err(|error| format!("cannot remove {}: {error}", folder.display()))?;
    println!("{measured}");
    let above = |name: &str| measured[name].as_f64().unwrap_or(f64::INFINITY);
    let over = above("longestStepSecondsWhileMoving") - above("medianStepSeconds");
    if over < ALLOWED_SECONDS { Ok(()) } else { Err(format!("a step took {over:.2} s more than the median")) }
}

fn parse(arguments: &[&str]) -> Result<Plan, String> {
    let mut plan = Plan { rows: 10_000_000, servers: 2, to: 3 };
    for pair in arguments.chunks(2) {
        let number = |text: &str| text.parse().map_err(|_| USAGE.to_owned());
        match pair {
            ["--rows", rows] => plan.rows = number(rows)?,
            ["--servers", servers] => plan.servers = number(servers)? as u32,
            ["--to", to] => plan.to = number(to)? as u32,
            _ => return Err(USAGE.to_owned()),
        }
    }
    Ok(plan)
}

/// Ids that hardly repeat, so that almost every look-up makes a row.
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

/// The job's processes.
struct Job {
    run: Child,
    page: SocketAddr,
    /// Where the metrics of its processes are, as far as they have said.
    metrics: Arc<Mutex<Vec<SocketAddr>>>,
}

impl Job {
    fn start(manifest: &std::path::Path) -> Result<Self, String> {
        let page = TcpListener::bind("127.0.0.1:0").and_then(|listener| listener.local_addr());
        let page = page.map_err(|error| format!("no port is free: {error}"))?;
        let mut run = Command::new(crate::built("rectrain")?);
        run.args(["run", "--processes", "--json", "--metrics", &page.to_string()]).arg(manifest);
        // Its processes say in their logs where their metrics are.
        run.env("RECTRAIN_LOG", "info").env("NO_COLOR", "1").stdout(Stdio::null()).stderr(Stdio::piped());
        let mut run = run.spawn().map_err(|error| format!("cannot run rectrain: {error}"))?;
        let logs = run.stderr.take().ok_or("rectrain has no logs")?;
        let metrics = Arc::new(Mutex::new(Vec::new()));
        let found = Arc::clone(&metrics);
        std::thread::spawn(move || {
            for address in BufReader::new(logs).lines().map_while(Result::ok).filter_map(|line| metrics_of(&line)) {
                found.lock().unwrap_or_else(PoisonError::into_inner).push(address);
            }
        });
        Ok(Self { run, page, metrics })
    }

    /// Rows that its parameter servers hold.
    fn rows(&self) -> u64 {
        let addresses = self.metrics.lock().unwrap_or_else(PoisonError::into_inner).clone();
        let rows = |address| http::sum_of(&http::get(address, "/metrics").ok()?, "rectrain_ps_rows");
        addresses.into_iter().filter_map(rows).sum::<f64>() as u64
    }

    /// How it stands.
    fn ask(&self) -> Result<Value, String> {
        let text = http::get(self.page, "/job.json").map_err(|error| error.to_string())?;
        serde_json::from_str(&text).map_err(|error| format!("{error}: {text}"))
    }

    fn end(&mut self) -> Result<(), String> {
        // It ends its processes, and saves nothing.
        let told = Command::new("kill").args(["-INT", &self.run.id().to_string()]).status();
        told.and_then(|_| self.run.wait()).map(drop).map_err(|error| format!("cannot end the job: {error}"))
    }
}

/// Where a process that joins says that its metrics are.
fn metrics_of(line: &str) -> Option<SocketAddr> {
    let (_, rest) = line.split_once("metrics=")?;
    rest.split_whitespace().next()?.parse().ok()
}

fn measure(plan: &Plan, job: &Job) -> Result<Value, String> {
    let begun = Instant::now();
    while job.rows() < plan.rows {
        if begun.elapsed() > AT_MOST {
            return Err(format!("there were {} rows after {AT_MOST:?}", job.rows()));
        }
        std::thread::sleep(Duration::from_secs(1));
    }
    let before = steps(job, |_, elapsed| elapsed >= BEFORE)?;
    let rows = job.rows();
    scale(plan.to, NAME)?;
    let mut moved = Value::Null;
    let meanwhile = steps(job, |job, _| {
        let events = job["events"].as_array().map(Vec::as_slice).unwrap_or_default();
        let events = events.iter().map(|logged| &logged["event"]);
        moved = events.rev().find(|event| event["event"] == "slotsMoved").cloned().unwrap_or(Value::Null);
        !moved.is_null()
    })?;
    Ok(json!({
        "rows": rows,
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

/// Watches the steps until it is enough.
fn steps(job: &Job, mut is_enough: impl FnMut(&Value, Duration) -> bool) -> Result<Steps, String> {
    let begun = Instant::now();
    let mut seen = Steps { seconds: Vec::new(), longest: 0.0 };
    let mut last: Option<(u64, Instant)> = None;
    loop {
        let now = job.ask()?;
        let at = Instant::now();
        let step = now["step"].as_u64().ok_or("the page has no step")?;
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
        if is_enough(&now, begun.elapsed()) {
            return Ok(seen);
        }
        if begun.elapsed() > AT_MOST {
            return Err(format!("the slots have not moved within {AT_MOST:?}: {}", now["events"]));
        }
        std::thread::sleep(LOOK);
    }
}

fn scale(to: u32, job: &str) -> Result<(), String> {
    let mut scale = Command::new(crate::built("rectrain")?);
    let status = scale.args(["scale", "ps", &to.to_string(), "--job", job]).status();
    match status {
        Ok(status) if status.success() => Ok(()),
        other => Err(format!("the job cannot be scaled: {other:?}")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn metrics_are_found_in_what_a_process_says() {
        let line = "INFO rectrain::processes: joining role=\"ps\" index=0 metrics=127.0.0.1:4711 process=ps 0";
        assert_eq!(metrics_of(line), "127.0.0.1:4711".parse().ok());
        assert_eq!(metrics_of("INFO joining"), None);
    }
}

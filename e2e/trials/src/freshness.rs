//! `cargo xtask freshness`: the time from a gradient until it changes an answer. A job trains at
//! full speed and publishes its model, and several inference servers follow it.
//!
//! - A gradient is applied when its global step is complete. The trial samples the job's steps.
//! - It is visible in a server when an answer of the server names that step, or a later one. The
//!   trial sends a request to each server every few milliseconds.
//!
//! Then one server is stopped for a while (SIGSTOP), as by a partition, and continues. It must
//! catch up. At the end all servers must answer with the last published model.
//!
//! With shards, the rows are on replicas of prediction parameter servers. A replica is then stopped
//! as well. Meanwhile all servers must answer, and follow the publications.

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use rectrain_harness::HarnessError;
use rectrain_harness::arguments::number;
use rectrain_harness::cargo::build_programs;
use rectrain_harness::files::{remove_folder, temporary_folder};
use rectrain_harness::http::free_address;
use rectrain_harness::processes::signal;
use rectrain_harness::serving::{self, Endpoint, InferenceServer, PublishingJob, Shards};
use rectrain_harness::statistics::quantile;
use serde_json::{Value, json};

use crate::TrialError;
use crate::error::unmet;

const USAGE: &str = "usage: cargo xtask freshness [--manifest FILE] [--servers 3] [--seconds 60] [--every 1] \
[--poll 20ms] [--stopped 20] [--shards 0] [--replicas 2] [--set PATH=VALUE]
  Trains FILE (by default synthetic rows) with a publication every EVERY seconds, such as 0.2, and SERVERS inference
  servers that look for a newer one every POLL. Prints one line of JSON: the p50, p99 and the longest time in seconds
  from a global step until an answer shows it, and the time in which a server catches up after STOPPED seconds of
  SIGSTOP. With SHARDS, the rows are on REPLICAS prediction parameter servers for each shard, and one of these is
  stopped as well.
  Fails if no answer changes, if a request has no answer while such a server is stopped, or if a server is stale after
  it was stopped, or at the end.";

/// The time between two looks at the step, and between two requests to a server.
const LOOK: Duration = Duration::from_millis(10);
/// Rows of a request.
const ROWS: u64 = 20;
/// Answers that differ by less are equal: batches differ in the order of sums.
const EQUAL: f64 = 1e-6;

struct Plan {
    manifest: String,
    servers: usize,
    seconds: u64,
    every: f64,
    poll: String,
    stopped: u64,
    shards: usize,
    replicas: usize,
    sets: Vec<String>,
}

/// Runs the trial with the arguments of the command line.
///
/// # Errors
/// Wrong arguments; a process that fails; the failures that [`USAGE`] lists.
pub fn run(arguments: &[&str]) -> Result<(), TrialError> {
    let plan = parse(arguments)?;
    build_programs()?;
    let folder = temporary_folder("freshness");
    // After a failure the logs stay.
    let measured = measure(&plan, &folder).map_err(TrialError::part(format!("logs in {}", folder.display())))?;
    remove_folder(&folder)?;
    println!("{measured}");
    Ok(())
}

fn parse(arguments: &[&str]) -> Result<Plan, HarnessError> {
    let mut plan = Plan {
        manifest: serving::MANIFEST.to_owned(),
        servers: 3,
        seconds: 60,
        every: 1.0,
        poll: "20ms".to_owned(),
        stopped: 20,
        shards: 0,
        replicas: 2,
        sets: Vec::new(),
    };
    for pair in arguments.chunks(2) {
        match pair {
            ["--manifest", file] => plan.manifest = (*file).to_owned(),
            ["--servers", servers] => plan.servers = number(servers, USAGE)?,
            ["--seconds", seconds] => plan.seconds = number(seconds, USAGE)?,
            ["--every", every] => plan.every = number(every, USAGE)?,
            ["--poll", poll] => plan.poll = (*poll).to_owned(),
            ["--stopped", stopped] => plan.stopped = number(stopped, USAGE)?,
            ["--shards", shards] => plan.shards = number(shards, USAGE)?,
            ["--replicas", replicas] => plan.replicas = number(replicas, USAGE)?,
            ["--set", set] => plan.sets.push((*set).to_owned()),
            _ => return Err(HarnessError::Usage(USAGE)),
        }
    }
    // A replica that is stopped needs another one.
    let has_replicas = plan.shards == 0 || plan.replicas >= 2;
    if plan.servers == 0 || !has_replicas { Err(HarnessError::Usage(USAGE)) } else { Ok(plan) }
}

/// The first moment at which a server answered with a version, in seconds.
#[derive(Debug, Clone, PartialEq)]
struct Seen {
    seconds: f64,
    version: u64,
    probabilities: Vec<f64>,
}

/// A look at the job: the steps that it had completed, in seconds.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Look {
    seconds: f64,
    step: u64,
}

fn measure(plan: &Plan, folder: &Path) -> Result<Value, TrialError> {
    let mut job = PublishingJob::start(&plan.manifest, &plan.sets, plan.every, folder)?;
    let shards = Shards::start(job.published(), plan.shards, plan.replicas, folder)?;
    let servers = servers(plan, &job, &shards, folder)?;
    let (looks, seen) = watch(&job, &servers, Duration::from_secs(plan.seconds))?;
    let ages = seen.iter().flat_map(|seen| ages(&looks, seen)).collect();
    let caught_up = stop_and_continue(plan, &job, &servers)?;
    let lost = stop_a_replica(plan, &job, &servers, &shards)?;
    job.end()?;
    let last = job.latest_step()?;
    for server in &servers {
        server.endpoint.until_version(last)?;
    }
    report(plan, &looks, &seen, ages, caught_up, lost)
}

fn servers(
    plan: &Plan,
    job: &PublishingJob,
    shards: &Shards,
    folder: &Path,
) -> Result<Vec<InferenceServer>, HarnessError> {
    let log = |server: usize| -> PathBuf { folder.join(format!("serve-{server}.log")) };
    let arguments: Vec<&str> = ["--poll", &plan.poll, "--threads", "1"].into_iter().chain(shards.arguments()).collect();
    let start = |server| InferenceServer::start(job.published(), free_address()?, &arguments, &log(server));
    (0..plan.servers).map(start).collect()
}

/// Watches the steps of the job and the versions of the servers for a time.
fn watch(
    job: &PublishingJob,
    servers: &[InferenceServer],
    time: Duration,
) -> Result<(Vec<Look>, Vec<Vec<Seen>>), HarnessError> {
    let (started, has_ended) = (Instant::now(), AtomicBool::new(false));
    let (started, has_ended) = (&started, &has_ended);
    std::thread::scope(|scope| {
        let watching: Vec<_> =
            servers.iter().map(|server| scope.spawn(move || versions(&server.endpoint, *started, has_ended))).collect();
        let looks = steps(job, *started, time);
        has_ended.store(true, Ordering::Relaxed);
        let seen = watching.into_iter().map(|server| server.join().unwrap_or(Err(HarnessError::Panicked)));
        let seen: Result<Vec<_>, _> = seen.collect();
        Ok::<_, HarnessError>((looks?, seen?))
    })
}

fn steps(job: &PublishingJob, started: Instant, time: Duration) -> Result<Vec<Look>, HarnessError> {
    let mut looks = Vec::new();
    while started.elapsed() < time {
        // Before the question, so that a step is never taken for a younger one.
        let seconds = started.elapsed().as_secs_f64();
        looks.push(Look { seconds, step: job.step()? });
        std::thread::sleep(LOOK);
    }
    Ok(looks)
}

fn versions(endpoint: &Endpoint, started: Instant, has_ended: &AtomicBool) -> Result<Vec<Seen>, HarnessError> {
    let request = endpoint.request(ROWS, 0)?;
    let mut seen: Vec<Seen> = Vec::new();
    while !has_ended.load(Ordering::Relaxed) {
        let answer = endpoint.infer(&request)?;
        let seconds = started.elapsed().as_secs_f64();
        if seen.last().is_none_or(|last| last.version != answer.version) {
            seen.push(Seen { seconds, version: answer.version, probabilities: answer.probabilities });
        }
        std::thread::sleep(LOOK);
    }
    Ok(seen)
}

/// The seconds from the completion of each step until a server shows it. A step between two looks
/// counts as complete at the earlier one.
fn ages(looks: &[Look], seen: &[Seen]) -> Vec<f64> {
    let mut ages = Vec::new();
    for pair in seen.windows(2) {
        let [before, after] = pair else { continue };
        for step in before.version + 1..=after.version {
            let later = looks.partition_point(|look| look.step < step);
            // A step of the time before the first look has no known age.
            if let Some(look) = later.checked_sub(1).and_then(|earlier| looks.get(earlier)) {
                ages.push(after.seconds - look.seconds);
            }
        }
    }
    ages
}

/// Stops the first server for a time. Returns the seconds until it answers with a model as new as
/// the newest one at its return.
fn stop_and_continue(plan: &Plan, job: &PublishingJob, servers: &[InferenceServer]) -> Result<f64, TrialError> {
    let Some(server) = servers.first() else { return Ok(0.0) };
    let before = job.latest_step()?;
    signal(server.process(), "STOP")?;
    std::thread::sleep(Duration::from_secs(plan.stopped));
    let newest = job.latest_step();
    signal(server.process(), "CONT")?;
    let (newest, returned) = (newest?, Instant::now());
    if newest <= before {
        return Err(unmet("publications while a server is stopped", format!("the model of step {newest}")));
    }
    server.endpoint.until_version(newest)?;
    Ok(returned.elapsed().as_secs_f64())
}

/// A time in which a replica of a shard was stopped.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Lost {
    /// Answers meanwhile, and the longest time of one in seconds.
    answers: u64,
    longest: f64,
    /// Seconds until the replica holds a model as new as the newest one at its return.
    caught_up: f64,
}

/// Stops the first replica of the first shard for a time. Meanwhile each server answers, and goes
/// to newer models. `None` without shards.
fn stop_a_replica(
    plan: &Plan,
    job: &PublishingJob,
    servers: &[InferenceServer],
    shards: &Shards,
) -> Result<Option<Lost>, TrialError> {
    let Some(replica) = shards.replicas.first() else { return Ok(None) };
    let requests: Result<Vec<String>, _> = servers.iter().map(|server| server.endpoint.request(ROWS, 0)).collect();
    let requests = requests?;
    signal(replica.process(), "STOP")?;
    // The replica continues also if an answer is missing.
    let answered = answers_meanwhile(plan, job, servers, &requests);
    let newest = job.latest_sequence();
    signal(replica.process(), "CONT")?;
    let (returned, (answers, longest)) = (Instant::now(), answered?);
    replica.until_sequence(newest?)?;
    Ok(Some(Lost { answers, longest, caught_up: returned.elapsed().as_secs_f64() }))
}

/// Sends requests for the time in which a replica is stopped. Returns the number of answers, and
/// the longest time of one. All servers must have a model of the second half of the time.
fn answers_meanwhile(
    plan: &Plan,
    job: &PublishingJob,
    servers: &[InferenceServer],
    requests: &[String],
) -> Result<(u64, f64), TrialError> {
    let (started, time) = (Instant::now(), Duration::from_secs(plan.stopped));
    let (mut answers, mut longest, mut half) = (0, 0.0_f64, None);
    let mut versions = vec![0; servers.len()];
    while started.elapsed() < time {
        if half.is_none() && started.elapsed() >= time / 2 {
            half = Some(job.latest_step()?);
        }
        for ((server, request), version) in servers.iter().zip(requests).zip(&mut versions) {
            let sent = Instant::now();
            *version = server.endpoint.infer(request)?.version;
            longest = longest.max(sent.elapsed().as_secs_f64());
            answers += 1;
        }
        std::thread::sleep(LOOK);
    }
    match half {
        Some(half) if versions.iter().any(|version| *version < half) => {
            Err(unmet("newer models while a replica is stopped", format!("versions {versions:?}, and {half} before")))
        }
        _ => Ok((answers, longest)),
    }
}

fn report(
    plan: &Plan,
    looks: &[Look],
    seen: &[Vec<Seen>],
    mut ages: Vec<f64>,
    caught_up: f64,
    lost: Option<Lost>,
) -> Result<Value, TrialError> {
    ages.sort_by(f64::total_cmp);
    let changed: usize = seen.iter().map(|seen| changed_answers(seen)).sum();
    if ages.is_empty() || changed == 0 {
        return Err(unmet("answers that change", format!("{changed} changes in {} s", plan.seconds)));
    }
    Ok(json!({
        "servers": plan.servers,
        "everySeconds": plan.every,
        "poll": plan.poll,
        "stepsPerSecond": speed(looks),
        "models": seen.iter().map(Vec::len).sum::<usize>(),
        "changedAnswers": changed,
        "steps": ages.len(),
        "p50Seconds": quantile(&ages, 0.5),
        "p99Seconds": quantile(&ages, 0.99),
        "longestSeconds": ages.last(),
        "stoppedSeconds": plan.stopped,
        "caughtUpSeconds": caught_up,
        "shards": plan.shards,
        "replicas": lost.map(|_| plan.replicas),
        "answersWithoutAReplica": lost.map(|lost| lost.answers),
        "longestAnswerSeconds": lost.map(|lost| lost.longest),
        "replicaCaughtUpSeconds": lost.map(|lost| lost.caught_up),
    }))
}

/// The changes of the version that changed an answer.
fn changed_answers(seen: &[Seen]) -> usize {
    let differ = |pair: &&[Seen]| match pair {
        [before, after] => {
            let mut both = before.probabilities.iter().zip(&after.probabilities);
            both.any(|(before, after)| (before - after).abs() > EQUAL)
        }
        _ => false,
    };
    seen.windows(2).filter(differ).count()
}

fn speed(looks: &[Look]) -> Option<f64> {
    let (first, last) = looks.first().zip(looks.last())?;
    Some((last.step - first.step) as f64 / (last.seconds - first.seconds))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn seen(seconds: f64, version: u64, probability: f64) -> Seen {
        Seen { seconds, version, probabilities: vec![0.5, probability] }
    }

    #[test]
    fn the_age_of_a_step_counts_from_the_last_look_without_it() {
        let looks = [(0.0, 10), (1.0, 12), (2.0, 12), (3.0, 15)].map(|(seconds, step)| Look { seconds, step });
        // Step 10 was complete before the first look. 11 and 12 come after the look at 0 s, and 13
        // to 15 after the one at 2 s.
        let versions = [seen(0.5, 9, 0.1), seen(2.5, 12, 0.2), seen(4.0, 15, 0.2)];
        assert_eq!(ages(&looks, &versions), [2.5, 2.5, 2.0, 2.0, 2.0]);
        assert_eq!(changed_answers(&versions), 1);
        assert_eq!(ages(&looks, &versions[..1]), [0.0; 0]);
    }

    #[test]
    fn arguments_replace_the_defaults() {
        let plan = parse(&["--servers", "2", "--stopped", "5", "--set", "a=1"]).expect("valid");
        assert_eq!((plan.servers, plan.stopped, plan.seconds), (2, 5, 60));
        assert_eq!(parse(&["--every", "0.2"]).expect("valid").every, 0.2);
        assert_eq!((plan.manifest.as_str(), plan.sets), (serving::MANIFEST, vec!["a=1".to_owned()]));
        let plan = parse(&["--shards", "2", "--replicas", "3"]).expect("valid");
        assert_eq!((plan.shards, plan.replicas), (2, 3));
        for wrong in [
            &["--shards", "2", "--replicas", "1"][..],
            &["--servers", "0"],
            &["--servers"],
            &["--slow", "1"],
            &["--every", "often"],
        ] {
            assert!(matches!(parse(wrong), Err(HarnessError::Usage(_))), "{wrong:?}");
        }
    }
}

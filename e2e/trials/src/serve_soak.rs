//! `cargo xtask serve-soak`: inference servers under load for minutes, while a job trains and
//! publishes, and while servers are killed.
//!
//! - **Load.** Clients first find the rate that saturates the servers. Then requests arrive as a
//!   Poisson process at a share of it, and latencies count from the arrival. A client repeats a
//!   failed request once, at the next server, as a load balancer would.
//! - **Kills.** Every few seconds a server gets SIGKILL and starts again at its address. With
//!   shards, inference servers and prediction parameter servers are killed in turn. The first one
//!   of each role is never killed, so that its memory shows a leak.
//! - **Answers.** All answers of one version to one request must be equal, from any server. At the
//!   end the servers must answer as one that has loaded the last checkpoint itself.

use std::collections::HashMap;
use std::net::SocketAddr;
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use rectrain_harness::HarnessError;
use rectrain_harness::arguments::number;
use rectrain_harness::cargo::build_programs;
use rectrain_harness::files::{remove_folder, temporary_folder};
use rectrain_harness::http::free_address;
use rectrain_harness::processes::resident_bytes;
use rectrain_harness::serving::{self, Answer, Endpoint, InferenceServer, PublishingJob, Shards};
use rectrain_harness::statistics::quantile;
use rectrain_random::SplitMix64;
use serde_json::{Value, json};

use crate::TrialError;
use crate::error::unmet;

const USAGE: &str = "usage: cargo xtask serve-soak [--manifest FILE] [--servers 3] [--clients 16] [--seconds 600] \
[--load 0.8] [--every 2] [--kill 20] [--seed 7] [--shards 0] [--replicas 2] [--set PATH=VALUE]
  Trains FILE (by default synthetic rows) with a publication every EVERY seconds. SERVERS inference servers follow it
  under LOAD times their saturating rate, from CLIENTS connections. Every KILL seconds one of them is killed; 0 kills
  none. With SHARDS, the rows are on REPLICAS prediction parameter servers for each shard, and these are killed in turn
  with the others. Prints one line of JSON: rates, latencies in milliseconds from the arrival, the share of requests
  without an answer, and the memory of the job and of a server that is never killed.
  Fails if an answer is wrong, or if one request in a thousand has no answer.";

/// The servers' arguments.
const ARGUMENTS: [&str; 4] = ["--poll", "200ms", "--threads", "1"];
/// The time in which the saturating rate is measured.
const CALIBRATION: Duration = Duration::from_secs(20);
/// The time between two looks at the memory.
const LOOK: Duration = Duration::from_secs(1);
/// Distinct requests, which are sent in turns, and rows of each.
const REQUESTS: u64 = 8;
const ROWS: u64 = 200;
/// Answers that differ by less are equal: batches differ in the order of sums.
const EQUAL: f64 = 1e-6;
/// The share of requests that may have no answer.
const MOST_ERRORS: f64 = 1e-3;
/// The longest soak, so that all latencies fit into memory.
const MOST_SECONDS: u64 = 24 * 3600;

struct Plan {
    manifest: String,
    servers: usize,
    clients: usize,
    seconds: u64,
    load: f64,
    every: f64,
    kill: u64,
    seed: u64,
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
    let folder = temporary_folder("serve-soak");
    // After a failure the logs stay.
    let report = soak(&plan, &folder).map_err(TrialError::part(format!("logs in {}", folder.display())))?;
    remove_folder(&folder)?;
    println!("{report}");
    judge(&report)
}

fn parse(arguments: &[&str]) -> Result<Plan, HarnessError> {
    let mut plan = Plan {
        manifest: serving::MANIFEST.to_owned(),
        servers: 3,
        clients: 16,
        seconds: 600,
        load: 0.8,
        every: 2.0,
        kill: 20,
        seed: 7,
        shards: 0,
        replicas: 2,
        sets: Vec::new(),
    };
    for pair in arguments.chunks(2) {
        match pair {
            ["--manifest", file] => plan.manifest = (*file).to_owned(),
            ["--servers", servers] => plan.servers = number(servers, USAGE)?,
            ["--clients", clients] => plan.clients = number(clients, USAGE)?,
            ["--seconds", seconds] => plan.seconds = number(seconds, USAGE)?,
            ["--load", load] => plan.load = number(load, USAGE)?,
            ["--every", every] => plan.every = number(every, USAGE)?,
            ["--kill", kill] => plan.kill = number(kill, USAGE)?,
            ["--seed", seed] => plan.seed = number(seed, USAGE)?,
            ["--shards", shards] => plan.shards = number(shards, USAGE)?,
            ["--replicas", replicas] => plan.replicas = number(replicas, USAGE)?,
            ["--set", set] => plan.sets.push((*set).to_owned()),
            _ => return Err(HarnessError::Usage(USAGE)),
        }
    }
    let is_load = plan.load > 0.0 && plan.load <= 1.0;
    let is_time = (1..=MOST_SECONDS).contains(&plan.seconds);
    // A replica that is killed needs another one.
    let has_replicas = plan.shards == 0 || plan.replicas >= 2;
    // A client needs another server for its second attempt.
    if plan.servers < 2 || !has_replicas || plan.clients == 0 || !is_load || !is_time {
        return Err(HarnessError::Usage(USAGE));
    }
    Ok(plan)
}

/// A server at a fixed address, which may be killed and started again.
struct Replica {
    listen: SocketAddr,
    server: InferenceServer,
    starts: u32,
}

impl Replica {
    fn start(site: &Site<'_>, index: usize) -> Result<Self, HarnessError> {
        let listen = free_address()?;
        let server = site.start_server(listen, &format!("serve-{index}-1.log"))?;
        Ok(Self { listen, server, starts: 1 })
    }

    fn kill_and_start(&mut self, site: &Site<'_>, index: usize) -> Result<(), HarnessError> {
        self.server.kill()?;
        self.starts += 1;
        self.server = site.start_server(self.listen, &format!("serve-{index}-{}.log", self.starts))?;
        Ok(())
    }
}

/// The ground on which servers start.
struct Site<'s> {
    job: &'s PublishingJob,
    folder: &'s Path,
    /// The servers' arguments.
    arguments: Vec<String>,
}

impl Site<'_> {
    fn start_server(&self, listen: SocketAddr, log: &str) -> Result<InferenceServer, HarnessError> {
        let arguments: Vec<&str> = self.arguments.iter().map(String::as_str).collect();
        InferenceServer::start(self.job.published(), listen, &arguments, &self.folder.join(log))
    }
}

/// The clients' work.
struct Load {
    endpoints: Vec<Endpoint>,
    requests: Vec<String>,
    /// The first answer of each version to each request. The publications of the trial bound it.
    known: Mutex<HashMap<(u64, usize), Vec<f64>>>,
}

/// The outcomes of a client's requests.
#[derive(Debug, Default)]
struct Outcomes {
    /// In milliseconds from the arrival.
    latencies: Vec<f64>,
    /// Requests that another server answered after a failure.
    repeated: u64,
    /// Why requests have no answer.
    errors: Vec<String>,
    /// Answers that contradict another one of their version.
    wrong: u64,
}

impl Outcomes {
    fn merge(mut self, other: Self) -> Self {
        self.latencies.extend(other.latencies);
        self.repeated += other.repeated;
        self.errors.extend(other.errors);
        self.wrong += other.wrong;
        self
    }
}

impl Load {
    /// Sends the request of a place, and checks the answer.
    fn send(&self, place: usize, arrival: Instant, outcomes: &mut Outcomes) {
        let request = request_of(place, self.requests.len(), self.endpoints.len());
        let attempt =
            |attempt: usize| self.endpoints[(place + attempt) % self.endpoints.len()].infer(&self.requests[request]);
        let answer = match attempt(0) {
            Ok(answer) => answer,
            Err(_) => match attempt(1) {
                Ok(answer) => {
                    outcomes.repeated += 1;
                    answer
                }
                Err(error) => {
                    outcomes.errors.push(error.to_string());
                    return;
                }
            },
        };
        outcomes.latencies.push(arrival.elapsed().as_secs_f64() * 1e3);
        outcomes.wrong += u64::from(!agrees(&mut self.known.lock(), request, answer));
    }

    /// Answers a second of clients that send as soon as they have an answer.
    fn saturating_rate(&self, clients: usize) -> Result<f64, TrialError> {
        let (next, started) = (AtomicUsize::new(0), Instant::now());
        let outcomes = in_threads(clients, || {
            let mut outcomes = Outcomes::default();
            while started.elapsed() < CALIBRATION {
                self.send(next.fetch_add(1, Ordering::Relaxed), Instant::now(), &mut outcomes);
            }
            outcomes
        })?;
        let answers = outcomes.latencies.len();
        match outcomes.errors.first() {
            None if answers > 0 => Ok(answers as f64 / started.elapsed().as_secs_f64()),
            error => Err(unmet("answers before the first kill", format!("{answers} answers, and {error:?}"))),
        }
    }

    /// A client of the open load, until there is no arrival any more.
    fn client(&self, arrivals: &[Duration], next: &AtomicUsize, started: Instant) -> Outcomes {
        let mut outcomes = Outcomes::default();
        loop {
            let place = next.fetch_add(1, Ordering::Relaxed);
            let Some(arrival) = arrivals.get(place) else { return outcomes };
            let arrival = started + *arrival;
            std::thread::sleep(arrival.saturating_duration_since(Instant::now()));
            self.send(place, arrival, &mut outcomes);
        }
    }
}

/// The request of a place. Place after place goes to the next server, so each request goes to all
/// servers before the next one does. Answers of different servers are then compared, whatever their
/// number.
fn request_of(place: usize, requests: usize, servers: usize) -> usize {
    place / servers % requests
}

/// Whether an answer equals the first one of its version to this request. Remembers a first one.
fn agrees(known: &mut HashMap<(u64, usize), Vec<f64>>, request: usize, answer: Answer) -> bool {
    let Answer { version, probabilities } = answer;
    match known.get(&(version, request)) {
        Some(first) => are_equal(first, &probabilities),
        None => {
            known.insert((version, request), probabilities);
            true
        }
    }
}

fn are_equal(first: &[f64], second: &[f64]) -> bool {
    first.len() == second.len() && first.iter().zip(second).all(|(first, second)| (first - second).abs() < EQUAL)
}

/// Runs clients at the same time, and merges their outcomes.
fn in_threads(clients: usize, client: impl Fn() -> Outcomes + Sync) -> Result<Outcomes, HarnessError> {
    let client = &client;
    std::thread::scope(|scope| {
        let running: Vec<_> = (0..clients).map(|_| scope.spawn(client)).collect();
        running.into_iter().try_fold(Outcomes::default(), |all, client| {
            Ok::<_, HarnessError>(all.merge(client.join().map_err(|_| HarnessError::Panicked)?))
        })
    })
}

/// The times of the arrivals of a Poisson process, rising.
fn poisson(rate: f64, seconds: u64, seed: u64) -> Vec<Duration> {
    let (mut random, mut now) = (SplitMix64::of_words(&[seed]), 0.0);
    let arrivals = std::iter::from_fn(|| {
        now += random.exponential(1.0 / rate);
        (now < seconds as f64).then(|| Duration::from_secs_f64(now))
    });
    arrivals.collect()
}

fn soak(plan: &Plan, folder: &Path) -> Result<Value, TrialError> {
    let mut job = PublishingJob::start(&plan.manifest, &plan.sets, plan.every, folder)?;
    let mut shards = Shards::start(job.published(), plan.shards, plan.replicas, folder)?;
    let arguments = ARGUMENTS.into_iter().chain(shards.arguments()).map(str::to_owned).collect();
    let site = Site { job: &job, folder, arguments };
    let replicas: Result<Vec<Replica>, HarnessError> =
        (0..plan.servers).map(|index| Replica::start(&site, index)).collect();
    let mut replicas = replicas?;
    let endpoints: Vec<Endpoint> = replicas.iter().map(|replica| replica.server.endpoint.clone()).collect();
    let requests: Result<Vec<String>, HarnessError> =
        (0..REQUESTS).map(|salt| endpoints[0].request(ROWS, salt)).collect();
    let load = Load { endpoints, requests: requests?, known: Mutex::new(HashMap::new()) };
    let saturating = load.saturating_rate(plan.clients)?;
    let rate = plan.load * saturating;
    let arrivals = poisson(rate, plan.seconds, plan.seed);
    let (next, started) = (AtomicUsize::new(0), Instant::now());
    let (outcomes, disturbed) = std::thread::scope(|scope| {
        let clients = scope.spawn(|| in_threads(plan.clients, || load.client(&arrivals, &next, started)));
        let disturbed = disturb(plan, &site, &mut replicas, &mut shards, started);
        (clients.join().unwrap_or(Err(HarnessError::Panicked)), disturbed)
    });
    let (outcomes, disturbed) = (outcomes?, disturbed?);
    job.end()?;
    let differing = compare_with_the_checkpoint(&job, &load, folder)?;
    Ok(report(plan, [saturating, rate], outcomes, &disturbed, [load.versions(), differing]))
}

/// The kills, and the memory in bytes at each look.
#[derive(Debug, Default)]
struct Disturbed {
    kills: u64,
    server: Vec<u64>,
    rows: Vec<u64>,
    job: Vec<u64>,
}

/// Kills servers in turn and looks at the memory, until the time is over.
fn disturb(
    plan: &Plan,
    site: &Site<'_>,
    replicas: &mut [Replica],
    shards: &mut Shards,
    started: Instant,
) -> Result<Disturbed, HarnessError> {
    let first = replicas.first().map(|replica| replica.server.process());
    let (first_rows, process) = (shards.replicas.first().map(|rows| rows.process()), site.job.process());
    let mut disturbed = Disturbed::default();
    while started.elapsed() < Duration::from_secs(plan.seconds) {
        std::thread::sleep(LOOK);
        disturbed.server.extend(first.and_then(resident_bytes));
        disturbed.rows.extend(first_rows.and_then(resident_bytes));
        disturbed.job.extend(resident_bytes(process));
        let due = started.elapsed().as_secs().checked_div(plan.kill).unwrap_or(0);
        if due > disturbed.kills {
            match victim(disturbed.kills as usize, replicas.len(), shards.replicas.len()) {
                Victim::Server(index) => replicas[index].kill_and_start(site, index)?,
                Victim::Rows(index) => shards.replicas[index].kill_and_start(site.job.published(), site.folder)?,
            }
            disturbed.kills += 1;
        }
    }
    Ok(disturbed)
}

/// A server that is killed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Victim {
    /// An inference server.
    Server(usize),
    /// A prediction parameter server.
    Rows(usize),
}

/// The server that is killed after so many kills: the roles in turn, and never the first of one.
fn victim(kills: usize, servers: usize, rows: usize) -> Victim {
    if rows == 0 {
        return Victim::Server(1 + kills % (servers - 1));
    }
    let round = kills / 2;
    if kills.is_multiple_of(2) {
        Victim::Server(1 + round % (servers - 1))
    } else {
        Victim::Rows(1 + round % (rows - 1))
    }
}

impl Load {
    /// Versions that have answered.
    fn versions(&self) -> u64 {
        let known = self.known.lock();
        let mut versions: Vec<u64> = known.keys().map(|(version, _)| *version).collect();
        versions.sort_unstable();
        versions.dedup();
        versions.len() as u64
    }
}

/// Answers of the servers that differ from a server that has loaded the last checkpoint itself.
fn compare_with_the_checkpoint(job: &PublishingJob, load: &Load, folder: &Path) -> Result<u64, HarnessError> {
    let last = job.latest_step()?;
    let log = folder.join("serve-checkpoint.log");
    let alone = InferenceServer::start(&job.latest_checkpoint()?, free_address()?, &["--threads", "1"], &log)?;
    let mut differing = 0;
    for endpoint in &load.endpoints {
        endpoint.until_version(last)?;
        for request in &load.requests {
            let (expected, found) = (alone.endpoint.infer(request)?, endpoint.infer(request)?);
            let is_right =
                expected.version == found.version && are_equal(&expected.probabilities, &found.probabilities);
            differing += u64::from(!is_right);
        }
    }
    Ok(differing)
}

fn report(
    plan: &Plan,
    [saturating, rate]: [f64; 2],
    mut outcomes: Outcomes,
    disturbed: &Disturbed,
    [versions, differing]: [u64; 2],
) -> Value {
    let latencies = &mut outcomes.latencies;
    latencies.sort_by(f64::total_cmp);
    let (answers, errors) = (latencies.len(), outcomes.errors.len());
    json!({
        "servers": plan.servers,
        "seconds": plan.seconds,
        "saturatingRequestsPerSecond": saturating,
        "requestsPerSecond": rate,
        "answers": answers,
        "p50": quantile(latencies, 0.5),
        "p99": quantile(latencies, 0.99),
        "longest": latencies.last(),
        "repeated": outcomes.repeated,
        "errors": errors,
        "errorShare": errors as f64 / (answers + errors).max(1) as f64,
        "firstErrors": outcomes.errors.iter().take(3).collect::<Vec<_>>(),
        "wrong": outcomes.wrong,
        "differFromTheCheckpoint": differing,
        "versions": versions,
        "shards": plan.shards,
        "kills": disturbed.kills,
        "serverBytes": memory(&disturbed.server),
        "rowsBytes": memory(&disturbed.rows),
        "jobBytes": memory(&disturbed.job),
    })
}

/// The memory after a third of the looks, and the most after that.
fn memory(looks: &[u64]) -> Value {
    let later = &looks[looks.len() / 3..];
    json!({ "afterAThird": later.first(), "mostAfter": later.iter().max() })
}

fn judge(report: &Value) -> Result<(), TrialError> {
    let count = |field: &str| report[field].as_u64().unwrap_or(u64::MAX);
    if count("wrong") > 0 || count("differFromTheCheckpoint") > 0 {
        return Err(unmet("no wrong answer", report));
    }
    if report["errorShare"].as_f64().is_none_or(|share| share >= MOST_ERRORS) {
        return Err(unmet("fewer than one request in a thousand without an answer", report));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    fn answer(version: u64, probability: f64) -> Answer {
        Answer { version, probabilities: vec![0.5, probability] }
    }

    #[test]
    fn every_server_gets_every_request() {
        for servers in 2..=9 {
            let pairs: HashSet<_> =
                (0..8 * servers).map(|place| (request_of(place, 8, servers), place % servers)).collect();
            assert_eq!(pairs.len(), 8 * servers, "{servers} servers");
        }
    }

    #[test]
    fn answers_of_one_version_must_be_equal() {
        let mut known = HashMap::new();
        assert!(agrees(&mut known, 0, answer(7, 0.25)));
        assert!(agrees(&mut known, 0, answer(7, 0.25 + 1e-8)));
        assert!(!agrees(&mut known, 0, answer(7, 0.26)));
        // Another request, and another version.
        assert!(agrees(&mut known, 1, answer(7, 0.9)) && agrees(&mut known, 0, answer(8, 0.9)));
        assert!(!agrees(&mut known, 0, Answer { version: 8, probabilities: vec![0.5] }));
    }

    #[test]
    fn wrong_and_missing_answers_fail_the_trial() {
        let report = |wrong: u64, differing: u64, share: f64| json!({ "wrong": wrong, "differFromTheCheckpoint": differing, "errorShare": share });
        assert!(judge(&report(0, 0, 0.0009)).is_ok());
        for bad in [report(1, 0, 0.0), report(0, 1, 0.0), report(0, 0, 0.001), json!({})] {
            assert!(judge(&bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn memory_counts_from_a_third_of_the_looks() {
        assert_eq!(memory(&[9, 1, 2, 5, 4, 3]), json!({ "afterAThird": 2, "mostAfter": 5 }));
        assert_eq!(memory(&[]), json!({ "afterAThird": null, "mostAfter": null }));
    }

    #[test]
    fn roles_are_killed_in_turn_and_never_the_first_of_one() {
        let victims = |rows| (0..5).map(|kills| victim(kills, 3, rows)).collect::<Vec<_>>();
        assert_eq!(victims(0), [1, 2, 1, 2, 1].map(Victim::Server));
        let expected = [Victim::Server(1), Victim::Rows(1), Victim::Server(2), Victim::Rows(2), Victim::Server(1)];
        assert_eq!(victims(4), expected);
    }

    #[test]
    fn arrivals_rise_at_their_rate() {
        let arrivals = poisson(500.0, 20, 7);
        assert!(arrivals.is_sorted() && (arrivals.len() as f64 - 10_000.0).abs() < 500.0, "{}", arrivals.len());
    }

    #[test]
    fn arguments_replace_the_defaults() {
        let plan = parse(&["--servers", "2", "--load", "0.5", "--kill", "0"]).expect("valid");
        assert_eq!((plan.servers, plan.kill, plan.seconds), (2, 0, 600));
        for wrong in [
            &["--servers", "1"][..],
            &["--shards", "2", "--replicas", "1"],
            &["--load", "1.5"],
            &["--seconds", "0"],
            &["--clients"],
        ] {
            assert!(matches!(parse(wrong), Err(HarnessError::Usage(_))), "{wrong:?}");
        }
    }
}

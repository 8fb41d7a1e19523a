//! `cargo xtask cluster chaos`: a job in the cluster loses containers, pods and nodes at random. A
//! seed, which is printed, decides the kills; they hit any role, while the job trains and while it
//! recovers. The result is compared with an undisturbed run outside of the cluster.
//!
//! The checkpoints are in an object store outside of the nodes, as in a cloud.

use std::io::{BufRead, BufReader};
use std::net::TcpStream;
use std::path::PathBuf;
use std::process::Stdio;
use std::time::{Duration, Instant};

use rectrain_bring_up::network::MACHINE;
use rectrain_bring_up::{Paths, foreign_kubeconfig, tools};
use rectrain_harness::arguments::number;
use rectrain_harness::command::{Running, command};
use rectrain_harness::events::{integer, missing, test_auc};
use rectrain_harness::files::{make_folder, remove_folder};
use rectrain_harness::jobs::{Jobs, NAMESPACE, selector};
use rectrain_harness::manifests::{manifest, merged};
use rectrain_harness::rectrain::train_outside;
use rectrain_harness::waiting::eventually;
use rectrain_harness::{HarnessError, not_yet, processes, say};
use rectrain_random::SplitMix64;
use serde_json::{Value, json};

use super::support::TestCluster;
use super::support::chart::{POLL_EVERY_SECOND, install};
use super::support::power::out_of_service;
use crate::TrialError;
use crate::error::unmet;

const USAGE: &str = "usage: cargo xtask cluster chaos [--mode sync] [--kills 20] [--seed 7]
  Prints each kill, and at the end one line of JSON: the kills by victim, whether the models are equal, rows lost
  or trained twice, the difference of the test AUC, and the restarts. Fails if rows are lost or trained twice, if
  `sync` trains another model, or if the AUC differs by more than 0.001.";
const NAME: &str = "chaos";
/// This many of twenty kills hit a node, and a pod; the rest hits a container.
const NODES_OF_TWENTY: u64 = 3;
const PODS_OF_TWENTY: u64 = 8;
/// One in [`HASTY`] kills does not wait for the recovery from the previous one, but at most
/// [`HASTE`] seconds.
const HASTY: u64 = 3;
const HASTE: f64 = 8.0;
/// How long the job may take to train again, or to reach the step of the next kill.
const FORWARD: Duration = Duration::from_secs(300);
/// The largest difference of the test AUC from the undisturbed run's.
const AUC: f64 = 0.001;
/// The job's rows, and the rows of a global batch.
const ROWS: u64 = 4_000_000;
const BATCH: u64 = 500;

#[derive(Debug, PartialEq)]
struct Plan {
    mode: String,
    kills: u64,
    seed: u64,
}

/// The kind of a victim.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Level {
    /// The process of a pod's container. The next one runs in the same pod.
    Container,
    /// A pod, without grace.
    Pod,
    /// A node with all its pods, as in a power cut.
    Node,
}

/// When a kill happens.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Moment {
    /// At this global step.
    Step(u64),
    /// This long after the previous kill.
    After(Duration),
}

/// The number of victims of each kind.
#[derive(Debug, Default, Clone, Copy)]
struct Kills {
    containers: u64,
    pods: u64,
    nodes: u64,
}

/// Runs the trial with the arguments of the command line.
///
/// # Errors
/// Wrong arguments; a foreign cluster; the failures that [`USAGE`] lists.
pub fn run(paths: &Paths, arguments: &[&str]) -> Result<(), TrialError> {
    let plan = parse(arguments)?;
    if foreign_kubeconfig(paths).is_some() {
        return Err(TrialError::ForeignCluster { trial: "chaos" });
    }
    install(paths, &[POLL_EVERY_SECOND])?;
    let cluster = TestCluster::connect(paths)?;
    let jobs = &cluster.jobs;
    cluster.kubectl().fresh_namespace(NAMESPACE)?;
    let store = ObjectStore::start(paths)?;
    jobs.apply(&store.secret())?;
    let changes = changes(&plan);
    let alone = train_outside(&manifest(NAME, &changes))?;
    let job = merged(changes, store.checkpoints(&plan));
    jobs.submit(NAME, &job)?;
    jobs.until_phase(NAME, "Training")?;
    println!("seed {}: {} kills over {} steps", plan.seed, plan.kills, ROWS / BATCH);
    let killer = Killer { cluster: &cluster, random: SplitMix64::new(plan.seed ^ 0x5eed), kills: Kills::default() };
    let kills = killer.kill(&moments(&plan), &levels(&plan))?;
    let job = jobs.until_phase(NAME, "Complete")?;
    report(&plan, &alone, &job["status"], kills)?;
    jobs.delete(NAME)?;
    Ok(jobs.within(&["delete", "namespace", NAMESPACE, "--timeout=180s"]).map(drop)?)
}

fn parse(arguments: &[&str]) -> Result<Plan, HarnessError> {
    let mut plan = Plan { mode: "sync".to_owned(), kills: 20, seed: 7 };
    for pair in arguments.chunks(2) {
        match pair {
            ["--mode", mode] => plan.mode = (*mode).to_owned(),
            ["--kills", kills] => plan.kills = number(kills, USAGE)?,
            ["--seed", seed] => plan.seed = number(seed, USAGE)?,
            _ => return Err(HarnessError::Usage(USAGE)),
        }
    }
    Ok(plan)
}

fn changes(plan: &Plan) -> Value {
    json!({
        "data": {"synthetic": {"rows": ROWS, "testRows": 50_000, "vocabulary": 20_000}},
        "training": {"mode": plan.mode, "globalBatchSize": BATCH, "localBatchSize": BATCH / 4},
    })
}

/// The moments of the kills: most are spread over the first four fifths of the steps, some follow
/// the previous kill closely.
fn moments(plan: &Plan) -> Vec<Moment> {
    let mut random = SplitMix64::new(plan.seed);
    let steps = ROWS / BATCH / 5 * 4;
    let mut at: Vec<u64> = (0..plan.kills).map(|_| random.remainder(steps)).collect();
    at.sort_unstable();
    let mut moment = |step| match random.remainder(HASTY) {
        0 => Moment::After(Duration::from_secs_f64(HASTE * random.unit())),
        _ => Moment::Step(step),
    };
    at.into_iter().map(&mut moment).collect()
}

/// The kinds of victims, in an order that the seed decides.
fn levels(plan: &Plan) -> Vec<Level> {
    let of_twenty = |share: u64| (plan.kills * share).div_ceil(20);
    let (nodes, pods) = (of_twenty(NODES_OF_TWENTY), of_twenty(PODS_OF_TWENTY));
    let level = |kill| match kill {
        kill if kill < nodes => Level::Node,
        kill if kill < nodes + pods => Level::Pod,
        _ => Level::Container,
    };
    let mut levels: Vec<_> = (0..plan.kills).map(level).collect();
    let mut random = SplitMix64::new(plan.seed ^ 0x1e7e1);
    for last in (1..levels.len()).rev() {
        levels.swap(last, random.remainder(last as u64 + 1) as usize);
    }
    levels
}

struct Killer<'a> {
    cluster: &'a TestCluster,
    random: SplitMix64,
    kills: Kills,
}

impl Killer<'_> {
    fn kill(mut self, moments: &[Moment], levels: &[Level]) -> Result<Kills, TrialError> {
        let mut last = Instant::now();
        for (number, (moment, level)) in (1..).zip(moments.iter().zip(levels)) {
            match *moment {
                Moment::After(pause) => std::thread::sleep(pause.saturating_sub(last.elapsed())),
                Moment::Step(step) => self.until_step(step)?,
            }
            last = Instant::now();
            let killed = self.kill_one(*level)?;
            println!("kill {number}: {level:?} {killed} ({moment:?})");
        }
        Ok(self.kills)
    }

    fn until_step(&self, step: u64) -> Result<(), HarnessError> {
        eventually(FORWARD, &format!("step {step} of {NAME}"), || {
            let status = self.cluster.jobs.status(NAME)?;
            let reached = status["step"].as_u64().unwrap_or(0);
            let is_there = status["phase"] == "Training" && reached >= step;
            if is_there { Ok(()) } else { Err(not_yet(format!("step {reached}, {}", status["phase"]))) }
        })
    }

    /// Kills a victim of this kind; returns its name.
    fn kill_one(&mut self, level: Level) -> Result<String, TrialError> {
        match level {
            Level::Container => {
                let killed = self.kill_a_pod(|jobs, pod| processes::signal(jobs.process_of(pod)?, "KILL"))?;
                self.kills.containers += 1;
                Ok(killed)
            }
            Level::Pod => {
                let killed = self.kill_a_pod(Jobs::kill_pod)?;
                self.kills.pods += 1;
                Ok(killed)
            }
            Level::Node => {
                let killed = self.lose_a_node()?;
                self.kills.nodes += 1;
                Ok(killed)
            }
        }
    }

    /// Kills any of the job's running pods with `kill`; picks another one if that fails, as for a
    /// pod that ends.
    fn kill_a_pod(&mut self, kill: impl Fn(&Jobs, &str) -> Result<(), HarnessError>) -> Result<String, HarnessError> {
        let (jobs, random) = (&self.cluster.jobs, &mut self.random);
        eventually(FORWARD, "a pod to kill", || {
            let pods = running_pods(jobs)?;
            let names: Vec<_> = pods.iter().filter_map(|pod| pod["metadata"]["name"].as_str()).collect();
            let name = names.get(random.remainder(names.len() as u64) as usize);
            let name = *name.ok_or_else(|| not_yet("no pod runs"))?;
            kill(jobs, name).map(|()| name.to_owned())
        })
    }

    /// Stops a node. Once the job trains without it, the node returns, empty.
    fn lose_a_node(&mut self) -> Result<String, TrialError> {
        let (jobs, random) = (&self.cluster.jobs, &mut self.random);
        let (node, lost) = eventually(FORWARD, "a node to kill", || {
            let pods = running_pods(jobs)?;
            let pod = pods.get(random.remainder(pods.len() as u64) as usize).ok_or_else(|| not_yet("no pod runs"))?;
            let node = pod["spec"]["nodeName"].as_str();
            let node = node.ok_or_else(|| missing("a running pod", &pod["spec"], "nodeName"))?.to_owned();
            let lost = pods.iter().filter(|pod| pod["spec"]["nodeName"] == *node);
            let lost: Vec<_> = lost.filter_map(|pod| pod["metadata"]["name"].as_str().map(str::to_owned)).collect();
            Ok::<_, HarnessError>((node, lost))
        })?;
        out_of_service(self.cluster, &node, || Ok(until_trains_without(jobs, &node)?))?;
        Ok(format!("{node} with {}", lost.join(", ")))
    }
}

fn running_pods(jobs: &Jobs) -> Result<Vec<Value>, HarnessError> {
    let pods = jobs.kubectl().json(NAMESPACE, &["get", "pods", "--selector", &selector(NAME)])?;
    let all = pods["items"].as_array().cloned().unwrap_or_default();
    let runs = |pod: &Value| pod["status"]["phase"] == "Running" && pod["metadata"]["deletionTimestamp"].is_null();
    Ok(all.into_iter().filter(runs).collect())
}

/// Waits until the job makes progress with no pod on the node.
fn until_trains_without(jobs: &Jobs, node: &str) -> Result<(), HarnessError> {
    let mut before = None;
    eventually(FORWARD, &format!("training without {node}"), || {
        let status = jobs.status(NAME)?;
        let on_node = running_pods(jobs)?.iter().filter(|pod| pod["spec"]["nodeName"] == *node).count();
        let step = status["step"].as_u64().filter(|_| status["phase"] == "Training" && on_node == 0);
        let Some(step) = step else {
            return Err(not_yet(format!("phase {}, {on_node} pods on the node", status["phase"])));
        };
        // The first step may be from before the loss; only a second, later one is progress.
        let has_progressed = before.replace(step).is_some_and(|before| before < step);
        if has_progressed { Ok(()) } else { Err(not_yet(format!("step {step}"))) }
    })
}

/// An object store that speaks S3, on the machine and not on its nodes. Its folder is deleted at
/// the end.
struct ObjectStore<'a> {
    paths: &'a Paths,
    _server: Running,
}

const ACCESS: &str = "demonstration";
const PORT: u16 = 7070;

impl<'a> ObjectStore<'a> {
    fn start(paths: &'a Paths) -> Result<Self, TrialError> {
        tools::build(paths, &[tools::OBJECT_STORE])?;
        let folder = Self::folder(paths);
        remove_folder(&folder)?;
        make_folder(&folder.join("data"))?;
        let address = format!("{MACHINE}:{PORT}");
        let mut server = command(paths.program("versitygw"), ["--port", &address, "posix"]);
        server.arg(&folder).envs([("ROOT_ACCESS_KEY", ACCESS), ("ROOT_SECRET_KEY", ACCESS)]).stdout(Stdio::piped());
        let mut server = Running::start(&mut server)?;
        // It logs every request, and would block on a full pipe.
        if let Some(log) = server.0.stdout.take() {
            std::thread::spawn(move || BufReader::new(log).lines().map_while(Result::ok).for_each(drop));
        }
        eventually(FORWARD, "the object store", || TcpStream::connect(&address).map(drop))?;
        // Another program may serve at this address.
        if let Ok(Some(status)) = server.0.try_wait() {
            return Err(unmet(format!("a free port at {address}"), format!("versitygw ended with {status}")));
        }
        Ok(Self { paths, _server: server })
    }

    fn folder(paths: &Paths) -> PathBuf {
        paths.root().join("chaos-objects")
    }

    fn secret(&self) -> Value {
        json!({"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "object-store"}, "stringData": {
            "AWS_ENDPOINT": format!("http://{MACHINE}:{PORT}"),
            "AWS_ALLOW_HTTP": "true",
            "AWS_REGION": "us-east-1",
            "AWS_ACCESS_KEY_ID": ACCESS,
            "AWS_SECRET_ACCESS_KEY": ACCESS,
        }})
    }

    /// Changes that let a job save its checkpoints here, and restart as often as necessary.
    fn checkpoints(&self, plan: &Plan) -> Value {
        json!({
            "data": {"storage": {"secretName": "object-store"}},
            "checkpoint": {"path": format!("s3://data/{NAME}"), "everySteps": 100},
            "faultTolerance": {"maxRestarts": 3 * plan.kills + 20, "backoffSeconds": 1},
        })
    }
}

impl Drop for ObjectStore<'_> {
    fn drop(&mut self) {
        if let Err(error) = remove_folder(&Self::folder(self.paths)) {
            say(error);
        }
    }
}

fn report(plan: &Plan, alone: &Value, status: &Value, kills: Kills) -> Result<(), TrialError> {
    let summary = &status["summary"];
    let equal = alone["parametersSha256"] == summary["parametersSha256"];
    let trained = integer("the job's summary", summary, "samples")?;
    let expected = integer("the undisturbed run's summary", alone, "trainedRows")?;
    let (lost, twice) = (expected.saturating_sub(trained), trained.saturating_sub(expected));
    let auc = summary["auc"].as_f64().ok_or_else(|| missing("the job's summary", summary, "auc"))?;
    let difference = auc - test_auc(alone)?;
    println!(
        "{}",
        json!({"kills": plan.kills, "containers": kills.containers, "pods": kills.pods, "nodes": kills.nodes, "digestEqual": equal,
            "rowsLost": lost, "rowsTwice": twice, "aucDifference": difference, "restarts": status["restarts"],
            "attempts": status["attempt"]["number"], "mode": plan.mode, "seed": plan.seed})
    );
    if lost > 0 || twice > 0 {
        return Err(unmet("every row trained once", format!("{lost} rows lost, {twice} trained twice")));
    }
    if plan.mode == "sync" && !equal {
        return Err(unmet("the same model from `sync`", "another model after the kills"));
    }
    if difference.abs() > AUC {
        return Err(unmet(format!("a test AUC within {AUC}"), format!("a difference of {difference:.4}")));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_seed_gives_the_same_moments_and_all_levels() {
        let plan = |seed| Plan { kills: 200, seed, ..parse(&[]).unwrap() };
        assert_eq!(moments(&plan(7)), moments(&plan(7)));
        assert_ne!(moments(&plan(7)), moments(&plan(8)));
        let levels = levels(&plan(7));
        for (of, expected) in [(Level::Container, 90), (Level::Pod, 80), (Level::Node, 30)] {
            assert_eq!(levels.iter().filter(|level| **level == of).count(), expected, "{of:?}");
        }
        assert!(!levels.is_sorted_by_key(|level| *level as u8));
    }

    #[test]
    fn a_wrong_argument_is_answered_with_the_usage() {
        assert_eq!(parse(&["--kills", "many"]).unwrap_err().to_string(), USAGE);
        assert_eq!(parse(&["--seed"]).unwrap_err().to_string(), USAGE);
        let plan = Plan { mode: "gba".to_owned(), kills: 3, seed: 9 };
        assert_eq!(parse(&["--mode", "gba", "--kills", "3", "--seed", "9"]).unwrap(), plan);
    }
}

//! `cargo xtask cluster chaos`: a job in the cluster that loses containers, pods and nodes at random, by a seed that is printed, and the
//! same job left alone, outside of the cluster. Kills fall on any role, while it trains and while it recovers. Its checkpoints are in an
//! object store outside of the nodes, as a cloud's is.

use std::io::{BufRead, BufReader};
use std::process::Stdio;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use super::foreign_kubeconfig;
use super::install::{Running, apply, fresh_namespace, install, within};
use super::network::MACHINE;
use super::operate::{
    NAMESPACE, delete_job, kill_pod, manifest, merged, out_of_service, outside, process_of_pod, status, submit,
    until_phase,
};
use super::paths::{Paths, make_folder, remove_folder};
use super::process::{command, eventually, output};
use super::tools;
use crate::random::Random;

pub(super) const USAGE: &str = "usage: cargo xtask cluster chaos [--mode sync] [--kills 20] [--seed 7]
  prints each kill, and last one line of JSON: kills by what was killed, whether the trained models are equal, rows lost or trained
  twice, the difference of the test AUC, restarts; fails where rows are lost or twice, where `sync` trains another model, and where
  the AUC differs by more than 0.001";
const NAME: &str = "chaos";
/// Of twenty kills so many fall on a node, and on a pod; the others on a container.
const NODES_OF_TWENTY: u64 = 3;
const PODS_OF_TWENTY: u64 = 8;
/// One of so many kills falls while the job may still recover from the one before, so many seconds after that.
const HASTY: u64 = 3;
const HASTE: f64 = 8.0;
/// Until a job trains again, or is as far as a kill waits for.
const FORWARD: Duration = Duration::from_secs(300);
/// How far the test AUC may be from that of the job left alone.
const AUC: f64 = 0.001;
/// Rows of the job, and of a global batch.
const ROWS: u64 = 4_000_000;
const BATCH: u64 = 500;

#[derive(Debug, PartialEq)]
struct Plan {
    mode: String,
    kills: u64,
    seed: u64,
}

/// What is killed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Level {
    /// The process of a pod's container: the next one runs in the same pod.
    Container,
    /// A pod, without grace.
    Pod,
    /// A node, as by a power cut, with all pods on it.
    Node,
}

/// When a kill falls.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Moment {
    /// When so many steps are trained.
    Step(u64),
    /// So long after the kill before.
    After(Duration),
}

/// How many of each.
#[derive(Debug, Default, Clone, Copy)]
struct Kills {
    containers: u64,
    pods: u64,
    nodes: u64,
}

/// See the module's text.
pub(super) fn chaos(paths: &Paths, arguments: &[&str]) -> Result<(), String> {
    let plan = parse(arguments)?;
    if foreign_kubeconfig(paths).is_some() {
        return Err(
            "chaos kills containers and nodes, and the cluster that KUBECONFIG names is not of this machine".to_owned()
        );
    }
    install(paths, &["--set=pollSeconds=1"])?;
    fresh_namespace(paths, NAMESPACE)?;
    let store = ObjectStore::start(paths)?;
    apply(paths, NAMESPACE, &store.secret().to_string())?;
    let changes = changes(&plan);
    let alone = outside(&manifest(NAME, &changes))?;
    let job = merged(changes, store.checkpoints(&plan));
    submit(paths, NAME, &job)?;
    until_phase(paths, NAME, "Training")?;
    println!("seed {}: {} kills over {} steps", plan.seed, plan.kills, ROWS / BATCH);
    let killer = Killer { paths, random: Random(plan.seed ^ 0x5eed), kills: Kills::default() };
    let kills = killer.kill(&moments(&plan), &levels(&plan))?;
    let job = until_phase(paths, NAME, "Complete")?;
    report(&plan, &alone, &job["status"], kills)?;
    delete_job(paths, NAME)?;
    within(paths, NAMESPACE, &["delete", "namespace", NAMESPACE, "--timeout=180s"]).map(drop)
}

fn parse(arguments: &[&str]) -> Result<Plan, String> {
    let mut plan = Plan { mode: "sync".to_owned(), kills: 20, seed: 7 };
    for pair in arguments.chunks(2) {
        match pair {
            ["--mode", mode] => plan.mode = (*mode).to_owned(),
            ["--kills", kills] => plan.kills = kills.parse().map_err(|_| USAGE.to_owned())?,
            ["--seed", seed] => plan.seed = seed.parse().map_err(|_| USAGE.to_owned())?,
            _ => return Err(USAGE.to_owned()),
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

/// When the kills fall: most spread over the first four fifths of the steps, some soon after the one before.
fn moments(plan: &Plan) -> Vec<Moment> {
    let mut random = Random(plan.seed);
    let steps = ROWS / BATCH / 5 * 4;
    let mut at: Vec<u64> = (0..plan.kills).map(|_| random.below(steps)).collect();
    at.sort_unstable();
    let mut moment = |step| match random.below(HASTY) {
        0 => Moment::After(Duration::from_secs_f64(HASTE * random.fraction())),
        _ => Moment::Step(step),
    };
    at.into_iter().map(&mut moment).collect()
}

/// What each kill falls on, in an order that the seed decides.
fn levels(plan: &Plan) -> Vec<Level> {
    let of_twenty = |share: u64| (plan.kills * share).div_ceil(20);
    let (nodes, pods) = (of_twenty(NODES_OF_TWENTY), of_twenty(PODS_OF_TWENTY));
    let level = |kill| match kill {
        kill if kill < nodes => Level::Node,
        kill if kill < nodes + pods => Level::Pod,
        _ => Level::Container,
    };
    let mut levels: Vec<_> = (0..plan.kills).map(level).collect();
    let mut random = Random(plan.seed ^ 0x1e7e1);
    for last in (1..levels.len()).rev() {
        levels.swap(last, random.below(last as u64 + 1) as usize);
    }
    levels
}

struct Killer<'a> {
    paths: &'a Paths,
    random: Random,
    kills: Kills,
}

impl Killer<'_> {
    fn kill(mut self, moments: &[Moment], levels: &[Level]) -> Result<Kills, String> {
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

    fn until_step(&self, step: u64) -> Result<(), String> {
        eventually(FORWARD, &format!("step {step} of {NAME}"), || {
            let status = status(self.paths, NAME)?;
            let reached = status["step"].as_u64().unwrap_or(0);
            let is_there = status["phase"] == "Training" && reached >= step;
            if is_there { Ok(()) } else { Err(format!("step {reached}, {}", status["phase"])) }
        })
    }

    /// Gives what was killed.
    fn kill_one(&mut self, level: Level) -> Result<String, String> {
        match level {
            Level::Container => {
                let killed = self.tried(|paths, pod| {
                    output(&mut command("kill", ["-KILL", &process_of_pod(paths, pod)?.to_string()])).map(drop)
                })?;
                self.kills.containers += 1;
                Ok(killed)
            }
            Level::Pod => {
                let killed = self.tried(|paths, pod| kill_pod(paths, NAMESPACE, pod))?;
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

    /// Kills any of the job's pods; one that just goes by itself is left alone.
    fn tried(&mut self, kill: impl Fn(&Paths, &str) -> Result<(), String>) -> Result<String, String> {
        let (paths, random) = (self.paths, &mut self.random);
        eventually(FORWARD, "a pod to kill", || {
            let pods = running_pods(paths)?;
            let names: Vec<_> = pods.iter().filter_map(|pod| pod["metadata"]["name"].as_str()).collect();
            let name = *names.get(random.below(names.len() as u64) as usize).ok_or("no pod runs")?;
            kill(paths, name).map(|()| name.to_owned())
        })
    }

    /// A node goes; when the job trains without it, it comes back, empty.
    fn lose_a_node(&mut self) -> Result<String, String> {
        let (paths, random) = (self.paths, &mut self.random);
        let (node, lost) = eventually(FORWARD, "a node to kill", || {
            let pods = running_pods(paths)?;
            let pod = pods.get(random.below(pods.len() as u64) as usize).ok_or("no pod runs")?;
            let node = pod["spec"]["nodeName"].as_str().ok_or("a pod that runs has no node")?.to_owned();
            let lost = pods.iter().filter(|pod| pod["spec"]["nodeName"] == *node);
            let lost: Vec<_> = lost.filter_map(|pod| pod["metadata"]["name"].as_str().map(str::to_owned)).collect();
            Ok((node, lost))
        })?;
        out_of_service(paths, &node, || trains_without(paths, &node))?;
        Ok(format!("{node} with {}", lost.join(", ")))
    }
}

fn running_pods(paths: &Paths) -> Result<Vec<Value>, String> {
    let selector = format!("rectrain.dev/job={NAME}");
    let text = within(paths, NAMESPACE, &["get", "pods", "--selector", &selector, "--output=json"])?;
    let pods: Value = serde_json::from_str(&text).map_err(|error| format!("kubectl gives no JSON: {error}"))?;
    let all = pods["items"].as_array().cloned().unwrap_or_default();
    let runs = |pod: &Value| pod["status"]["phase"] == "Running" && pod["metadata"]["deletionTimestamp"].is_null();
    Ok(all.into_iter().filter(runs).collect())
}

fn trains_without(paths: &Paths, node: &str) -> Result<(), String> {
    let pods_there = || {
        let pods = running_pods(paths)?;
        Ok::<_, String>(pods.iter().filter(|pod| pod["spec"]["nodeName"] == *node).count())
    };
    let mut before = None;
    eventually(FORWARD, &format!("training without {node}"), || {
        let status = status(paths, NAME)?;
        let step = status["step"].as_u64().filter(|_| status["phase"] == "Training" && pods_there() == Ok(0));
        let Some(step) = step else { return Err(format!("{}, {:?} pods there", status["phase"], pods_there())) };
        // Progress, and not the status from before.
        let goes_on = before.replace(step).is_some_and(|before| before < step);
        if goes_on { Ok(()) } else { Err(format!("step {step}")) }
    })
}

/// One that speaks S3, on the machine and not on its nodes, with its objects in a folder that goes with it.
struct ObjectStore<'a> {
    paths: &'a Paths,
    _server: Running,
}

const ACCESS: &str = "demonstration";
const PORT: u16 = 7070;

impl<'a> ObjectStore<'a> {
    fn start(paths: &'a Paths) -> Result<Self, String> {
        tools::build(paths, &[tools::OBJECT_STORE])?;
        let folder = Self::folder(paths);
        remove_folder(&folder)?;
        make_folder(&folder.join("data"))?;
        let address = format!("{MACHINE}:{PORT}");
        let mut server = command(paths.program("versitygw"), ["--port", &address, "posix"]);
        server.arg(&folder).envs([("ROOT_ACCESS_KEY", ACCESS), ("ROOT_SECRET_KEY", ACCESS)]).stdout(Stdio::piped());
        let mut server = Running(server.spawn().map_err(|error| format!("cannot run versitygw: {error}"))?);
        // It tells of every request, and would stop if nobody read.
        if let Some(told) = server.0.stdout.take() {
            std::thread::spawn(move || BufReader::new(told).lines().map_while(Result::ok).for_each(drop));
        }
        eventually(FORWARD, "the object store", || {
            std::net::TcpStream::connect(&address).map(drop).map_err(|error| error.to_string())
        })?;
        // What answers may be another that has the address.
        if let Ok(Some(status)) = server.0.try_wait() {
            return Err(format!("versitygw ended ({status}): does another program serve at {address}?"));
        }
        Ok(Self { paths, _server: server })
    }

    fn folder(paths: &Paths) -> std::path::PathBuf {
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

    /// What a job says that saves its checkpoints here, and may be restarted as often as it has to be.
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
            eprintln!("xtask: {error}");
        }
    }
}

fn report(plan: &Plan, alone: &Value, status: &Value, kills: Kills) -> Result<(), String> {
    let summary = &status["summary"];
    let equal = alone["parametersSha256"] == summary["parametersSha256"];
    let trained = summary["samples"].as_u64().ok_or_else(|| format!("{summary} has no samples"))?;
    let expected = alone["trainedRows"].as_u64().ok_or("the job left alone has no trainedRows")?;
    let (lost, twice) = (expected.saturating_sub(trained), trained.saturating_sub(expected));
    let auc = |auc: &Value| auc.as_f64().ok_or("a summary has no test AUC");
    let difference = auc(&summary["auc"])? - auc(&alone["test"]["auc"])?;
    println!(
        "{}",
        json!({"kills": plan.kills, "containers": kills.containers, "pods": kills.pods, "nodes": kills.nodes, "digestEqual": equal,
            "rowsLost": lost, "rowsTwice": twice, "aucDifference": difference, "restarts": status["restarts"],
            "attempts": status["attempt"]["number"], "mode": plan.mode, "seed": plan.seed})
    );
    if lost > 0 || twice > 0 {
        return Err(format!("{lost} rows were lost and {twice} are in the model twice"));
    }
    if plan.mode == "sync" && !equal {
        return Err("sync trained another model after the kills".to_owned());
    }
    if difference.abs() > AUC {
        return Err(format!("the test AUC differs by {difference:.4}, and may by {AUC}"));
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
    fn what_is_no_argument_is_answered_with_the_usage() {
        assert_eq!(parse(&["--kills", "many"]), Err(USAGE.to_owned()));
        assert_eq!(parse(&["--seed"]), Err(USAGE.to_owned()));
        let plan = Plan { mode: "gba".to_owned(), kills: 3, seed: 9 };
        assert_eq!(parse(&["--mode", "gba", "--kills", "3", "--seed", "9"]), Ok(plan));
    }
}

//! The API server does not answer for a while. A job trains on, and the operator waits: no instance
//! exits, also none that starts meanwhile.

use std::net::SocketAddr;
use std::time::{Duration, Instant};

use rectrain_harness::events::missing;
use rectrain_harness::jobs::{Jobs, METRICS_PORT};
use rectrain_harness::kubectl::SYSTEM;
use rectrain_harness::manifests::endless;
use rectrain_harness::waiting::eventually;
use rectrain_harness::{HarnessError, http, not_yet, processes};
use serde_json::Value;

use crate::TrialError;
use crate::cluster::support::TestCluster;
use crate::cluster::support::members::samples;
use crate::cluster::support::outcome::no_restart;
use crate::cluster::support::stopped::Stopped;
use crate::error::unmet;

/// How long the API server does not answer.
const SILENCE: Duration = Duration::from_secs(90);
/// The time from the beginning of the silence until an instance is killed, which starts again.
const KILLED_AFTER: Duration = Duration::from_secs(10);
/// How long the kubelet may take to start it again.
const STARTS: Duration = Duration::from_secs(40);
/// How long an instance may take to notice the silence.
const NOTICED: Duration = Duration::from_secs(30);
/// How long an instance may take to lead again after the silence, and nodes and pods to be ready.
const AFTERWARDS: Duration = Duration::from_secs(60);
const AFTERWARDS_ARGUMENT: &str = "--timeout=60s";
/// The instances of the operator.
const INSTANCES: &str = "--selector=app.kubernetes.io/name=rectrain-operator";
const OPERATOR_PORT: u16 = 8080;
const ANSWERS: &str = "rectrain_operator_api_server_answers";

/// Stops the API server for [`SILENCE`]. Connections to it stay open meanwhile, and get no answer.
pub(in crate::cluster) fn waits_for_the_api_server(cluster: &TestCluster) -> Result<(), TrialError> {
    if cluster.skips("an API server that does not answer")? {
        return Ok(());
    }
    let (jobs, name) = (&cluster.jobs, "unheard");
    jobs.submit(name, &endless())?;
    jobs.until_step_after(name, 0)?;
    let pods = jobs.pods(name)?;
    let operator = Jobs::new(cluster.kubectl().clone(), SYSTEM);
    let mut instances = Instance::all(&operator)?;
    let trained = jobs.socket_of(&format!("{name}-dense-worker-0"), METRICS_PORT)?;
    silence(&mut instances, trained)?;
    leads_again(jobs, name)?;
    none_has_exited(&operator, &instances)?;
    jobs.within(&["wait", "nodes", "--all", "--for=condition=Ready", AFTERWARDS_ARGUMENT])?;
    operator.within(&["wait", "pods", INSTANCES, "--for=condition=Ready", AFTERWARDS_ARGUMENT])?;
    no_restart(name, &jobs.status(name)?["attempt"]["number"])?;
    let after = jobs.pods(name)?;
    if after != pods {
        return Err(unmet(format!("the pods {pods:?}"), format!("{after:?}")));
    }
    Ok(jobs.delete(name)?)
}

/// An instance of the operator.
#[derive(Debug, PartialEq)]
struct Instance {
    pod: String,
    uid: String,
    process: u32,
    /// Restarts of its container so far.
    restarts: u64,
    address: SocketAddr,
}

impl Instance {
    /// All instances, in the order of their pods' names.
    fn all(operator: &Jobs) -> Result<Vec<Self>, HarnessError> {
        let pods = operator.kubectl().json(SYSTEM, &["get", "pods", INSTANCES])?;
        let pods = pods["items"].as_array().cloned().unwrap_or_default();
        let stays = |pod: &&Value| pod["metadata"]["deletionTimestamp"].is_null();
        pods.iter().filter(stays).map(|pod| Self::of(operator, pod)).collect()
    }

    fn of(operator: &Jobs, found: &Value) -> Result<Self, HarnessError> {
        let text = |field: &str| {
            let value = found["metadata"][field].as_str().map(str::to_owned);
            value.ok_or_else(|| missing("a pod of the operator", &found["metadata"], field))
        };
        let (pod, uid) = (text("name")?, text("uid")?);
        let restarts = found["status"]["containerStatuses"][0]["restartCount"].as_u64();
        Ok(Self {
            process: processes::of_pod(&uid).ok_or_else(|| HarnessError::NoProcess { pod: pod.clone() })?,
            restarts: restarts.ok_or_else(|| missing(&pod, &found["status"], "restartCount"))?,
            address: operator.socket_of(&pod, OPERATOR_PORT)?,
            pod,
            uid,
        })
    }

    /// Kills the process, and waits until its container has another one.
    fn starts_again(&mut self) -> Result<(), HarnessError> {
        processes::signal(self.process, "KILL")?;
        let killed = self.process;
        self.process = eventually(STARTS, &format!("another process in {}", self.pod), || {
            let now = processes::of_pod(&self.uid).filter(|now| *now != killed);
            now.ok_or_else(|| not_yet("there is none"))
        })?;
        self.restarts += 1;
        Ok(())
    }

    /// Waits until the instance counts the API server as silent.
    fn until_it_notices(&self) -> Result<(), HarnessError> {
        eventually(NOTICED, &format!("{} to notice the silence", self.pod), || {
            match http::sum_of(&http::get(self.address, "/metrics")?, ANSWERS) {
                Some(answers) if answers < 0.5 => Ok(()),
                other => Err(not_yet(format!("{ANSWERS} is {other:?}"))),
            }
        })
    }
}

/// Stops the API server, and meanwhile kills the first instance. The job must train all the while.
fn silence(instances: &mut [Instance], worker: SocketAddr) -> Result<(), TrialError> {
    let stopped = Stopped::api_server()?;
    let began = Instant::now();
    let first = samples(worker, NOTICED)?;
    std::thread::sleep(KILLED_AFTER);
    let killed = instances.first_mut().ok_or_else(|| unmet("an instance of the operator", "none"))?;
    killed.starts_again()?;
    instances.iter().try_for_each(Instance::until_it_notices)?;
    let noticed = began.elapsed().as_secs_f64();
    let middle = samples(worker, NOTICED)?;
    std::thread::sleep(SILENCE.saturating_sub(began.elapsed()));
    let last = samples(worker, NOTICED)?;
    drop(stopped);
    println!(
        "{:.0} s of silence, noticed within {noticed:.0} s: {first}, {middle}, {last} samples",
        began.elapsed().as_secs_f64()
    );
    if first < middle && middle < last {
        return Ok(());
    }
    Err(unmet("a job that trains without an API server", format!("{first}, {middle} and {last} samples")))
}

/// Waits until an instance leads again: the job's step in its status grows.
fn leads_again(jobs: &Jobs, name: &str) -> Result<(), HarnessError> {
    let heard = Instant::now();
    let before = eventually(AFTERWARDS, "the first answer of the API server", || jobs.step(name))?;
    let now = eventually(AFTERWARDS, &format!("a step of {name} after {before}"), || match jobs.step(name)? {
        now if now > before => Ok(now),
        now => Err(not_yet(format!("it is at step {now}"))),
    })?;
    println!("the status has step {now} {:.0} s after the silence, and {before} before", heard.elapsed().as_secs_f64());
    Ok(())
}

/// Waits until the API server shows the processes and restarts in `expected`.
fn none_has_exited(operator: &Jobs, expected: &[Instance]) -> Result<(), HarnessError> {
    eventually(AFTERWARDS, &format!("the instances {expected:?}"), || match Instance::all(operator)? {
        found if found == expected => Ok(()),
        found => Err(not_yet(format!("{found:?}"))),
    })
}

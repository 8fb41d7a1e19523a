//! The operator chooses a job's training mode (`spec.training.mode: auto`) while neighbours disturb
//! the job.
//!
//! Two nodes have processors of their own, and the neighbours take one node's, as pods of a shared
//! cluster do. The kernel divides a node's processors by the pods' requests. The job has to switch
//! to `gba` within half a minute, and to switch back when they leave. In between it has to train
//! faster than a job in `sync` would. Neighbours that join and leave at random must not cause too
//! many switches. The trial writes timelines.

use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant, SystemTime};

use parking_lot::{Mutex, MutexGuard};
use rectrain_bring_up::cgroups::OwnProcessors;
use rectrain_bring_up::images::{Image, TAG};
use rectrain_harness::command::Running;
use rectrain_harness::events::missing;
use rectrain_harness::files::write;
use rectrain_harness::jobs::{Jobs, METRICS_PORT, NAMESPACE};
use rectrain_harness::manifests::{list, manifest, merge};
use rectrain_harness::waiting::eventually;
use rectrain_harness::{HarnessError, http, not_yet};
use rectrain_random::SplitMix64;
use serde_json::{Value, json};

use super::timeline::{Sample, Switch, Timeline};
use crate::TrialError;
use crate::cluster::support::TestCluster;
use crate::error::unmet;

/// How long the operator may take to switch after workers become slow.
const FOLLOWS: Duration = Duration::from_secs(30);
/// The least gain: the job's throughput divided by the throughput in `sync` beside the same
/// neighbours.
const GAIN: f64 = 1.5;
/// The largest difference of the test AUC from the undisturbed run's.
const AUC: f64 = 0.001;
/// How long a throughput for a comparison is measured.
const MEASURED: Duration = Duration::from_secs(30);
/// How long the throughput may take to settle after a change.
const SETTLED: Duration = Duration::from_secs(10);
/// The window of the operator's decisions. Half a window suffices for a decision.
const WINDOW: Duration = Duration::from_secs(60);
/// The least time in a mode, instead of the default five minutes, so that the trial is short. With
/// an even shorter time the operator would demand a higher gain.
const DWELL: Duration = Duration::from_secs(120);
/// How long neighbours may take to start or to end.
const PODS: Duration = Duration::from_secs(90);
const SECOND: Duration = Duration::from_secs(1);
/// A sample's throughput is measured over this many seconds.
const RATE_SECONDS: f64 = 5.0;
/// How long neighbours join and leave at random.
const NOISE: Duration = Duration::from_secs(240);
/// The shortest and the longest time that they stay or stay away, in seconds.
const STAY: [f64; 2] = [5.0, 40.0];
/// The manifest's default limit of switches per hour.
const SWITCHES: usize = 4;
/// The environment variable with the seed of the random neighbours. The default is the clock.
const SEED: &str = "RECTRAIN_SEED";
const NEIGHBOURS: &str = "neighbours";

pub(in crate::cluster) fn follows_the_load(cluster: &TestCluster) -> Result<(), TrialError> {
    if cluster.skips("contention for processors")? {
        return Ok(());
    }
    let trial = Trial { cluster, nodes: nodes(&cluster.jobs)? };
    let _own = OwnProcessors::give(&trial.nodes)?;
    trial.invite()?;
    let undisturbed = trial.undisturbed()?;
    let in_sync = trial.in_sync()?;
    trial.followed(&undisturbed, in_sync)?;
    trial.noisy()?;
    Ok(cluster.jobs.within(&["delete", "deployment", NEIGHBOURS]).map(drop)?)
}

/// The names of two nodes that accept pods: the calm one, and the one for the neighbours.
fn nodes(jobs: &Jobs) -> Result<[String; 2], TrialError> {
    let nodes = jobs.get("nodes")?;
    let mut takes_pods = nodes["items"].as_array().into_iter().flatten().filter(|node| {
        let conditions = node["status"]["conditions"].as_array();
        let is_ready =
            conditions.is_some_and(|all| all.iter().any(|one| one["type"] == "Ready" && one["status"] == "True"));
        is_ready && node["spec"]["taints"].is_null()
    });
    let mut name = || takes_pods.next().and_then(|node| Some(node["metadata"]["name"].as_str()?.to_owned()));
    match (name(), name()) {
        (Some(calm), Some(shared)) => Ok([calm, shared]),
        _ => Err(unmet("two ready nodes without taints", "fewer")),
    }
}

/// The job whose mode followed the neighbours.
struct Followed {
    /// Seconds from the neighbours' arrival to the mode `gba`.
    to_gba: f64,
    /// Seconds from their departure to the mode `sync`.
    to_sync: f64,
    /// Samples per second beside the neighbours.
    in_gba: f64,
    summary: Value,
}

struct Trial<'a> {
    cluster: &'a TestCluster,
    /// The calm node, and the node for the neighbours.
    nodes: [String; 2],
}

impl Trial<'_> {
    /// Creates the neighbours' Deployment, with no replica: another job, which computes all the
    /// time. They request much CPU, so the kernel favours them over the job's workers.
    fn invite(&self) -> Result<(), HarnessError> {
        let training = manifest(
            NEIGHBOURS,
            &json!({
                "model": {"hidden": [256, 256]},
                "data": {"synthetic": {"rows": 1_000_000_000_000_u64, "testRows": 1, "vocabulary": 1000}},
                "training": {"mode": "async", "localBatchSize": 125},
                "roles": {"denseWorker": {"replicas": 4}},
            }),
        );
        let pod = json!({
            "terminationGracePeriodSeconds": 1,
            "nodeSelector": {"kubernetes.io/hostname": self.nodes[1]},
            "securityContext": {"runAsNonRoot": true, "seccompProfile": {"type": "RuntimeDefault"}},
            "containers": [{
                "name": "rectrain",
                "image": format!("{}:{TAG}", Image::Runtime.repository()),
                "args": ["run", "/etc/neighbours/job.json", "--no-history"],
                "resources": {"requests": {"cpu": "600m", "memory": "128Mi"}},
                "securityContext": {
                    "allowPrivilegeEscalation": false, "readOnlyRootFilesystem": true, "capabilities": {"drop": ["ALL"]},
                },
                "volumeMounts": [{"name": "job", "mountPath": "/etc/neighbours"}, {"name": "tmp", "mountPath": "/tmp"}],
            }],
            "volumes": [{"name": "job", "configMap": {"name": NEIGHBOURS}}, {"name": "tmp", "emptyDir": {}}],
        });
        let labels = json!({"app": NEIGHBOURS});
        let config = json!({"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": NEIGHBOURS},
            "data": {"job.json": training.to_string()}});
        let deployment = json!({"apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": NEIGHBOURS}, "spec": {
            "replicas": 0,
            "selector": {"matchLabels": labels},
            "template": {"metadata": {"labels": labels}, "spec": pod},
        }});
        self.cluster.jobs.apply(&list(vec![config, deployment]))
    }

    /// Changes the number of neighbours; returns the time at which all of them run, or all have
    /// ended.
    fn neighbours(&self, count: usize) -> Result<Instant, HarnessError> {
        let jobs = &self.cluster.jobs;
        jobs.within(&["scale", "deployment", NEIGHBOURS, &format!("--replicas={count}")])?;
        let phases = "--output=jsonpath={.items[*].status.phase}";
        eventually(PODS, &format!("{count} neighbours"), || {
            let pods = jobs.within(&["get", "pods", "--selector", &format!("app={NEIGHBOURS}"), phases])?;
            let is_done = pods.split_whitespace().eq(std::iter::repeat_n("Running", count));
            if is_done { Ok(Instant::now()) } else { Err(not_yet(format!("their phases are {pods:?}"))) }
        })
    }

    /// Submits a variation of the trial's job: a dense worker on each node, everything else on the
    /// calm one. Its work is mostly dense, so a barrier costs almost nothing without neighbours.
    fn submit(&self, name: &str, changes: &Value) -> Result<(), HarnessError> {
        let [calm, _] = &self.nodes;
        let on_the_calm_node = json!({"replicas": 1, "template": {
            "nodeSelector": {"kubernetes.io/hostname": calm},
            "resources": {"requests": {"cpu": "100m", "memory": "64Mi"}},
        }});
        let of_this_role = json!({"matchLabels": {"rectrain.dev/job": name, "rectrain.dev/role": "dense-worker"}});
        let apart = json!({"podAntiAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": [{"weight": 100,
            "podAffinityTerm": {"topologyKey": "kubernetes.io/hostname", "labelSelector": of_this_role}}]}});
        let mut job = json!({
            "model": {"hidden": [1024, 512]},
            "features": {"sparse": [{"name": "C{1..8}"}]},
            "data": {"synthetic": {"rows": ROWS, "testRows": 50_000, "vocabulary": 5_000}},
            "training": {"globalBatchSize": 4_096, "localBatchSize": 1_024},
            "roles": {
                "ps": on_the_calm_node, "embeddingWorker": on_the_calm_node, "loader": on_the_calm_node,
                "coordinator": {"template": on_the_calm_node["template"]},
                "denseWorker": {"replicas": 2, "template": {
                    "affinity": apart,
                    "resources": {"requests": {"cpu": "150m", "memory": "64Mi"}},
                }},
            },
        });
        merge(&mut job, changes);
        self.cluster.jobs.submit(name, &job)?;
        self.cluster.jobs.until_phase(name, "Training").map(drop)
    }

    /// The metrics addresses of the dense workers, half of them on each node.
    fn workers(&self, name: &str) -> Result<Vec<SocketAddr>, TrialError> {
        let selector = format!("rectrain.dev/job={name},rectrain.dev/role=dense-worker");
        let pods = self.cluster.kubectl().json(NAMESPACE, &["get", "pods", "--selector", &selector])?;
        let pods = pods["items"].as_array().cloned().unwrap_or_default();
        let shared = pods.iter().filter(|pod| pod["spec"]["nodeName"] == self.nodes[1].as_str()).count();
        if 2 * shared != pods.len() {
            let found = format!("{shared} of {}", pods.len());
            return Err(unmet(format!("half of the dense workers on {}", self.nodes[1]), found));
        }
        pods.iter()
            .map(|pod| {
                let ip = pod["status"]["podIP"].as_str().and_then(|ip| ip.parse::<IpAddr>().ok());
                let address = ip.map(|ip| SocketAddr::new(ip, METRICS_PORT));
                address.ok_or_else(|| missing("a dense worker's pod", &pod["status"], "podIP").into())
            })
            .collect()
    }

    fn record(&self, name: &str) -> Result<Recorder, TrialError> {
        Ok(Recorder::start(self.cluster, name, self.workers(name)?)?)
    }

    /// Waits until the job is complete, and deletes it; returns its summary.
    fn completed(&self, name: &str) -> Result<Value, HarnessError> {
        let job = self.cluster.jobs.until_phase(name, "Complete")?;
        self.remove(name)?;
        let summary = job["status"]["summary"].clone();
        println!("{name}: {} samples, test AUC {}", summary["samples"], summary["auc"]);
        Ok(summary)
    }

    fn remove(&self, name: &str) -> Result<(), HarnessError> {
        self.cluster.jobs.delete(name)?;
        eventually(PODS, &format!("the end of the pods of {name}"), || self.cluster.jobs.has_no_pods(name))
    }

    /// Trains without neighbours, which must stay in `sync`; returns the summary.
    fn undisturbed(&self) -> Result<Value, TrialError> {
        let name = "undisturbed";
        self.submit(name, &auto())?;
        let recorder = self.record(name)?;
        let summary = self.completed(name)?;
        let timeline = recorder.finish();
        let mode = timeline.samples.last().map(|sample| sample.mode.clone()).unwrap_or_default();
        self.keep("undisturbed", "mode: auto with no neighbours", timeline.clone(), vec![])?;
        if !timeline.switches.is_empty() || mode != "sync" {
            return Err(unmet("an undisturbed job to stay in sync", format!("{:?}", timeline.switches)));
        }
        Ok(summary)
    }

    /// Trains in `sync` beside neighbours; returns the samples per second.
    fn in_sync(&self) -> Result<f64, TrialError> {
        let name = "stays-in-sync";
        self.submit(name, &json!({"training": {"mode": "sync"}}))?;
        let recorder = self.record(name)?;
        let before = recorder.rate_over(SETTLED + MEASURED, MEASURED)?;
        let came = self.neighbours(2)?;
        let beside = recorder.rate_after(came)?;
        self.neighbours(0)?;
        let mut timeline = recorder.finish();
        timeline.contention = vec![[recorder.seconds(came), recorder.now()]];
        println!("sync: {before:.0} samples/s alone, {beside:.0} beside neighbours");
        self.keep(
            "stays-in-sync",
            "mode: sync beside neighbours",
            timeline,
            vec![("samplesPerSecondAlone", before), ("samplesPerSecondBeside", beside)],
        )?;
        self.remove(name)?;
        Ok(beside)
    }

    /// Neighbours join and leave, and the mode follows.
    fn followed(&self, undisturbed: &Value, in_sync: f64) -> Result<(), TrialError> {
        let name = "followed";
        let title = "mode: auto, neighbours come and go";
        self.submit(name, &auto())?;
        let recorder = self.record(name)?;
        let mut contention = Vec::new();
        let followed = self.come_and_go(&recorder, name, &mut contention);
        let now = recorder.now();
        let contention = contention.iter().map(|[from, to]| [*from, to.min(now)]).collect();
        let timeline = Timeline { contention, ..recorder.finish() };
        let Followed { to_gba, in_gba, to_sync, summary } = match followed {
            Ok(followed) => followed,
            Err(error) => {
                self.keep(name, title, timeline, vec![])?;
                return Err(error);
            }
        };
        let gain = in_gba / in_sync;
        println!("in gba {gain:.2} times the throughput of sync beside the same neighbours");
        let auc = |summary: &Value| summary["auc"].as_f64().ok_or_else(|| missing("the summary", summary, "auc"));
        let (here, there) = (auc(&summary)?, auc(undisturbed)?);
        let figures = vec![
            ("secondsToGba", to_gba),
            ("secondsToSync", to_sync),
            ("samplesPerSecondInGba", in_gba),
            ("samplesPerSecondOfSync", in_sync),
            ("gain", gain),
            ("auc", here),
            ("aucUndisturbed", there),
        ];
        self.keep(name, title, timeline, figures)?;
        if summary["samples"] != undisturbed["samples"] {
            let expected = format!("{} samples, as in the undisturbed run", undisturbed["samples"]);
            return Err(unmet(expected, &summary["samples"]));
        }
        if (here - there).abs() > AUC {
            return Err(unmet(format!("a test AUC within {AUC} of the undisturbed {there}"), here));
        }
        if gain < GAIN {
            return Err(unmet(format!("{GAIN} times the throughput of sync"), format!("{gain:.2} times")));
        }
        Ok(())
    }

    /// Lets neighbours join and leave, and follows the job to its end. `contention` gets their
    /// times, even if a later step fails.
    fn come_and_go(
        &self,
        recorder: &Recorder,
        name: &str,
        contention: &mut Vec<[f64; 2]>,
    ) -> Result<Followed, TrialError> {
        // First the operator sees the job without neighbours.
        recorder.rate_over(SETTLED + WINDOW, WINDOW)?;
        recorder.is_in("sync")?;
        let came = self.neighbours(2)?;
        contention.push([recorder.seconds(came), f64::INFINITY]);
        recorder.until_mode("gba", came, FOLLOWS)?;
        let to_gba = came.elapsed().as_secs_f64();
        let in_gba = recorder.rate_after(Instant::now())?;
        println!("gba {to_gba:.1} s after the neighbours came; {in_gba:.0} samples/s");
        let went = self.neighbours(0)?;
        *contention = vec![[recorder.seconds(came), recorder.seconds(went)]];
        recorder.until_mode("sync", went, DWELL + 2 * WINDOW)?;
        let to_sync = went.elapsed().as_secs_f64();
        println!("sync {to_sync:.1} s after they had gone");
        Ok(Followed { to_gba, in_gba, to_sync, summary: self.completed(name)? })
    }

    /// Neighbours join and leave too quickly for switches to pay off.
    fn noisy(&self) -> Result<(), TrialError> {
        let name = "noisy";
        // These settings allow switches so soon that only the hourly limit prevents them.
        let nervous = json!({
            "training": {"mode": "auto", "auto": {"windowSeconds": 15, "dwellSeconds": 30}},
            "data": {"synthetic": {"rows": 1_000_000_000, "testRows": 1_000}},
        });
        let seed = seed()?;
        let mut random = SplitMix64::new(seed);
        println!("neighbours at random: {SEED}={seed}");
        self.submit(name, &nervous)?;
        let recorder = self.record(name)?;
        let mut contention = Vec::new();
        while recorder.now() < NOISE.as_secs_f64() {
            recorder.rate_over(stay(&mut random), SECOND)?;
            let came = recorder.seconds(self.neighbours(2)?);
            recorder.rate_over(stay(&mut random), SECOND)?;
            contention.push([came, recorder.seconds(self.neighbours(0)?)]);
        }
        let visits = contention.len();
        let mut timeline = recorder.finish();
        timeline.contention = contention;
        let switches = timeline.switches.len();
        println!("neighbours came {visits} times: {switches} switches");
        let figures = vec![("seed", seed as f64), ("visits", visits as f64), ("switches", switches as f64)];
        self.keep("noisy", "mode: auto, neighbours at random", timeline, figures)?;
        self.remove(name)?;
        if switches > SWITCHES {
            return Err(unmet(format!("at most {SWITCHES} switches within an hour"), switches));
        }
        Ok(())
    }

    /// Writes a timeline as JSON and as SVG.
    fn keep(&self, name: &str, title: &str, timeline: Timeline, figures: Vec<(&str, f64)>) -> Result<(), HarnessError> {
        let figures = figures.into_iter().map(|(name, value)| (name.to_owned(), value)).collect();
        let timeline = Timeline { title: title.to_owned(), figures, ..timeline };
        let folder = self.cluster.paths.root().join("timelines");
        write(&folder.join(format!("{name}.json")), format!("{:#}\n", timeline.to_json()))?;
        let svg = folder.join(format!("{name}.svg"));
        write(&svg, timeline.to_svg())?;
        println!("{title}: {}", svg.display());
        Ok(())
    }
}

/// The job's rows: enough for neighbours to join and leave while it trains.
const ROWS: u64 = 14_000_000;

/// Mode auto with its defaults, except for [`DWELL`].
fn auto() -> Value {
    json!({"training": {"mode": "auto", "auto": {"dwellSeconds": DWELL.as_secs()}}})
}

/// Looks at a job every second, in a thread, until [`Recorder::finish`].
struct Recorder {
    started: Instant,
    recorded: Arc<Mutex<Recorded>>,
    /// The proxy to the API server, and the thread.
    watching: Mutex<Option<(Running, JoinHandle<()>)>>,
}

#[derive(Default)]
struct Recorded {
    /// The mode in the status.
    mode: String,
    /// Pairs of a time in seconds and the samples that all dense workers have trained until then.
    totals: Vec<(f64, f64)>,
    samples: Vec<Sample>,
    switches: Vec<Switch>,
    /// Ends the thread.
    is_over: bool,
}

impl Recorder {
    fn start(cluster: &TestCluster, name: &str, workers: Vec<SocketAddr>) -> Result<Self, HarnessError> {
        let started = Instant::now();
        let recorded = Arc::new(Mutex::new(Recorded::default()));
        let (proxy, api_server) = cluster.kubectl().proxy()?;
        let path = format!("/apis/rectrain.dev/v1alpha1/namespaces/{NAMESPACE}/rectrainingjobs/{name}");
        let known = Arc::clone(&recorded);
        let looking = std::thread::spawn(move || {
            while !lock(&known).is_over {
                // A server that does not answer in time is asked again in the next second.
                let job = http::get(api_server, &path).ok();
                let job = job.and_then(|body| serde_json::from_str::<Value>(&body).ok());
                if let Some(job) = job {
                    lock(&known).see(started.elapsed().as_secs_f64(), &job["status"]);
                }
                if let Some(total) = total(&workers) {
                    lock(&known).measure(started.elapsed().as_secs_f64(), total);
                }
                std::thread::sleep(SECOND);
            }
        });
        Ok(Self { started, recorded, watching: Mutex::new(Some((proxy, looking))) })
    }

    /// The moment in seconds of the timeline.
    fn seconds(&self, moment: Instant) -> f64 {
        moment.saturating_duration_since(self.started).as_secs_f64()
    }

    fn now(&self) -> f64 {
        self.seconds(Instant::now())
    }

    /// Waits for `patience`; returns the samples per second over the `last` part of that time.
    fn rate_over(&self, patience: Duration, last: Duration) -> Result<f64, HarnessError> {
        let end = self.now() + patience.as_secs_f64();
        let from = end - last.as_secs_f64();
        eventually(patience + PODS, "the dense workers' metrics", || {
            let recorded = lock(&self.recorded);
            let (latest, all) = recorded.totals.last().copied().ok_or_else(|| not_yet("no dense worker answers"))?;
            if latest < end {
                return Err(not_yet(format!("{latest:.0} of {end:.0} s have passed")));
            }
            let first = recorded.totals.iter().rev().find(|(at, _)| *at <= from).or(recorded.totals.first());
            let (at, before) = first.copied().unwrap_or((0.0, 0.0));
            Ok((all - before) / (latest - at).max(1.0))
        })
    }

    /// The samples per second, measured after the effects of `moment` have settled.
    fn rate_after(&self, moment: Instant) -> Result<f64, HarnessError> {
        self.rate_over(SETTLED.saturating_sub(moment.elapsed()) + MEASURED, MEASURED)
    }

    fn is_in(&self, mode: &str) -> Result<(), TrialError> {
        match &lock(&self.recorded).mode {
            now if now == mode => Ok(()),
            now => Err(unmet(format!("the mode {mode} before the neighbours join"), now)),
        }
    }

    fn until_mode(&self, mode: &str, since: Instant, patience: Duration) -> Result<(), HarnessError> {
        eventually(patience.saturating_sub(since.elapsed()), &format!("the mode {mode}"), || {
            match &lock(&self.recorded).mode {
                now if now == mode => Ok(()),
                now => Err(not_yet(format!("it is {now}"))),
            }
        })
    }

    /// Ends the recording; returns the timeline.
    fn finish(&self) -> Timeline {
        lock(&self.recorded).is_over = true;
        let watching = self.watching.lock().take();
        if let Some((_proxy, looking)) = watching {
            // The records remain, even if the thread has panicked.
            let _ended = looking.join();
        }
        let recorded = lock(&self.recorded);
        Timeline { samples: recorded.samples.clone(), switches: recorded.switches.clone(), ..Timeline::default() }
    }
}

impl Drop for Recorder {
    fn drop(&mut self) {
        self.finish();
    }
}

fn lock(recorded: &Mutex<Recorded>) -> MutexGuard<'_, Recorded> {
    recorded.lock()
}

impl Recorded {
    /// Records a switch of the mode in the job's status.
    fn see(&mut self, seconds: f64, status: &Value) {
        let text = |field: &str| status[field].as_str().unwrap_or_default();
        let (mode, reason) = (text("mode"), text("modeReason"));
        if text("phase") != "Training" || mode.is_empty() || mode == self.mode {
            return;
        }
        if !self.mode.is_empty() {
            println!("{mode} at {seconds:.0} s: {reason}");
            self.switches.push(Switch { seconds, mode: mode.to_owned(), reason: reason.to_owned() });
        }
        mode.clone_into(&mut self.mode);
    }

    /// Records the trained samples, and the throughput over the last seconds.
    fn measure(&mut self, seconds: f64, total: f64) {
        self.totals.push((seconds, total));
        let earlier = self.totals.iter().rev().find(|(at, _)| at + RATE_SECONDS <= seconds);
        if let Some((at, before)) = earlier {
            let samples_per_second = (total - before) / (seconds - at);
            self.samples.push(Sample { seconds, samples_per_second, mode: self.mode.clone() });
        }
    }
}

/// The samples that all workers together have trained; `None` if one does not answer.
fn total(workers: &[SocketAddr]) -> Option<f64> {
    workers
        .iter()
        .map(|worker| http::sum_of(&http::get(*worker, "/metrics").ok()?, "rectrain_dense_worker_samples_total"))
        .sum()
}

/// The given seed, or one from the clock.
fn seed() -> Result<u64, TrialError> {
    match std::env::var(SEED) {
        Ok(text) => text.parse().map_err(|_| unmet(format!("a number in {SEED}"), format!("{text:?}"))),
        Err(_) => Ok(SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).map_or(1, |time| time.as_secs())),
    }
}

/// How long neighbours stay or stay away this time.
fn stay(random: &mut SplitMix64) -> Duration {
    let [shortest, longest] = STAY;
    Duration::from_secs_f64(shortest + (longest - shortest) * random.unit())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_new_mode_in_the_status_is_a_switch_while_the_job_trains() {
        let mut recorded = Recorded { mode: "sync".to_owned(), ..Recorded::default() };
        let status = |phase: &str, mode: &str| json!({"phase": phase, "mode": mode, "modeReason": "faster"});
        recorded.see(1.0, &status("Training", "sync"));
        recorded.see(2.0, &status("Training", "gba"));
        recorded.see(3.0, &status("Complete", "sync"));
        recorded.measure(3.0, 100.0);
        recorded.measure(8.0, 200.0);
        assert_eq!(recorded.switches, [Switch { seconds: 2.0, mode: "gba".to_owned(), reason: "faster".to_owned() }]);
        let sample = Sample { seconds: 8.0, samples_per_second: 20.0, mode: "gba".to_owned() };
        assert_eq!(recorded.samples, [sample]);
    }

    #[test]
    fn stays_are_within_their_bounds_and_follow_the_seed() {
        let stays = || {
            let mut random = SplitMix64::new(7);
            (0..100).map(|_| stay(&mut random).as_secs_f64()).collect::<Vec<_>>()
        };
        assert!(stays().iter().all(|stay| (STAY[0]..STAY[1]).contains(stay)));
        assert_eq!(stays(), stays());
    }
}

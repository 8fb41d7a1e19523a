//! A job whose training mode is left to the operator (`spec.training.mode: auto`), on two nodes with processors of their own, of which
//! neighbours take one node's, as pods of a shared cluster do: the kernel shares a node's processors by what pods request. It goes over to `gba` within
//! half a minute, trains faster than a job that stays in `sync` beside the same neighbours, and goes back when they have gone; neighbours
//! that come and go at random cause no more switches than are allowed. What happened is written down as timelines.

use std::net::{IpAddr, SocketAddr};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant, SystemTime};

use serde_json::{Value, json};

use super::cgroups::OwnProcessors;
use super::dashboards::proxy;
use super::foreign_kubeconfig;
use super::images::{Image, TAG};
use super::install::{Running, apply, within};
use super::operate::{NAMESPACE, delete_job, get, manifest, merge, no_pods, submit, until_phase};
use super::paths::{Paths, write};
use super::process::eventually;
use super::timeline::{Sample, Switch, Timeline};
use crate::http;
use crate::random::Random;

/// The operator has switched within this time after workers became slow.
const FOLLOWS: Duration = Duration::from_secs(30);
/// How much faster than `sync` the job must train beside the same neighbours.
const GAIN: f64 = 1.5;
/// How far the test AUC may be from that of the undisturbed run.
const AUC: f64 = 0.001;
/// How long throughput is measured for a comparison.
const MEASURED: Duration = Duration::from_secs(30);
/// Until what was before no longer shows in it.
const SETTLED: Duration = Duration::from_secs(10);
/// The operator decides over this time; from its second half on there is enough of it.
const WINDOW: Duration = Duration::from_secs(60);
/// Instead of the default five minutes, so that a test sees both switches within a few. (Shorter, a switch would have to earn more.)
const DWELL: Duration = Duration::from_secs(120);
/// How long neighbours may take to come or to go.
const PODS: Duration = Duration::from_secs(90);
const SECOND: Duration = Duration::from_secs(1);
/// Throughput is that of the last so many seconds.
const RATE_SECONDS: f64 = 5.0;
/// How long neighbours come and go at random.
const NOISE: Duration = Duration::from_secs(240);
/// The shortest and the longest that they stay or stay away, in seconds.
const STAY: [f64; 2] = [5.0, 40.0];
/// Switches an hour, as the manifest has them by default.
const SWITCHES: usize = 4;
/// The seed of the neighbours that come and go; the clock's if it is not given.
const SEED: &str = "RECTRAIN_SEED";

/// The port that every process of a job has its metrics at.
const METRICS_PORT: u16 = 9090;
const NEIGHBOURS: &str = "neighbours";

/// A step of `cargo xtask cluster operate`.
pub(super) fn follows_the_load(paths: &Paths) -> Result<(), String> {
    if foreign_kubeconfig(paths).is_some() {
        eprintln!(
            "xtask: SKIPPED contention, because pods of a cluster that is not of this machine cannot be measured"
        );
        return Ok(());
    }
    let trial = Trial { paths, nodes: nodes(paths)? };
    let _own = OwnProcessors::give(&trial.nodes)?;
    trial.invite()?;
    let undisturbed = trial.undisturbed()?;
    let in_sync = trial.in_sync()?;
    trial.followed(&undisturbed, in_sync)?;
    trial.noisy()?;
    within(paths, NAMESPACE, &["delete", "deployment", NEIGHBOURS]).map(drop)
}

/// The names of two nodes that take pods: one that is left alone, and one that has neighbours.
fn nodes(paths: &Paths) -> Result<[String; 2], String> {
    let nodes = get(paths, "nodes")?;
    let mut takes_pods = nodes["items"].as_array().into_iter().flatten().filter(|node| {
        let conditions = node["status"]["conditions"].as_array();
        let is_ready =
            conditions.is_some_and(|all| all.iter().any(|one| one["type"] == "Ready" && one["status"] == "True"));
        is_ready && node["spec"]["taints"].is_null()
    });
    let mut name = || takes_pods.next().and_then(|node| Some(node["metadata"]["name"].as_str()?.to_owned()));
    match (name(), name()) {
        (Some(calm), Some(shared)) => Ok([calm, shared]),
        _ => Err("fewer than two nodes are ready and without taints".to_owned()),
    }
}

/// A job whose mode followed neighbours that came and went.
struct Followed {
    /// Seconds until it was in that mode.
    to_gba: f64,
    to_sync: f64,
    /// Samples a second beside the neighbours.
    in_gba: f64,
    summary: Value,
}

struct Trial<'a> {
    paths: &'a Paths,
    nodes: [String; 2],
}

impl Trial<'_> {
    /// Makes the neighbours, none of them for now: somebody else's training, which computes whenever it is let. What they request
    /// is what the kernel gives them before workers that request little.
    fn invite(&self) -> Result<(), String> {
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
                "args": ["run", "/etc/neighbours/job.json"],
                "resources": {"requests": {"cpu": "600m", "memory": "128Mi"}},
                "securityContext": {
                    "allowPrivilegeEscalation": false, "readOnlyRootFilesystem": true, "capabilities": {"drop": ["ALL"]},
                },
                "volumeMounts": [{"name": "job", "mountPath": "/etc/neighbours"}, {"name": "tmp", "mountPath": "/tmp"}],
            }],
            "volumes": [{"name": "job", "configMap": {"name": NEIGHBOURS}}, {"name": "tmp", "emptyDir": {}}],
        });
        let labels = json!({"app": NEIGHBOURS});
        let objects = json!({"apiVersion": "v1", "kind": "List", "items": [
            {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": NEIGHBOURS}, "data": {"job.json": training.to_string()}},
            {"apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": NEIGHBOURS}, "spec": {
                "replicas": 0,
                "selector": {"matchLabels": labels},
                "template": {"metadata": {"labels": labels}, "spec": pod},
            }},
        ]});
        apply(self.paths, NAMESPACE, &objects.to_string())
    }

    /// Neighbours come, or go; gives when that was done.
    fn neighbours(&self, count: usize) -> Result<Instant, String> {
        within(self.paths, NAMESPACE, &["scale", "deployment", NEIGHBOURS, &format!("--replicas={count}")])?;
        let phases = "--output=jsonpath={.items[*].status.phase}";
        eventually(PODS, &format!("{count} neighbours"), || {
            let pods =
                within(self.paths, NAMESPACE, &["get", "pods", "--selector", &format!("app={NEIGHBOURS}"), phases])?;
            let is_done = pods.split_whitespace().eq(std::iter::repeat_n("Running", count));
            if is_done { Ok(Instant::now()) } else { Err(pods) }
        })
    }

    /// The job, of which every run here is a variation: a dense worker on each node, all else on the calm one. Most of its work is the dense
    /// workers', so that a barrier costs next to nothing while nobody disturbs them.
    fn submit(&self, name: &str, changes: &Value) -> Result<(), String> {
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
        submit(self.paths, name, &job)?;
        until_phase(self.paths, name, "Training").map(drop)
    }

    /// A dense worker on each node, by their addresses.
    fn workers(&self, name: &str) -> Result<Vec<SocketAddr>, String> {
        let selector = format!("rectrain.dev/job={name},rectrain.dev/role=dense-worker");
        let pods = within(self.paths, NAMESPACE, &["get", "pods", "--selector", &selector, "--output=json"])?;
        let pods: Value = serde_json::from_str(&pods).map_err(|error| format!("kubectl gives no JSON: {error}"))?;
        let pods = pods["items"].as_array().cloned().unwrap_or_default();
        let shared = pods.iter().filter(|pod| pod["spec"]["nodeName"] == self.nodes[1].as_str()).count();
        if 2 * shared != pods.len() {
            return Err(format!("{shared} of {} dense workers are on {}, and not half", pods.len(), self.nodes[1]));
        }
        pods.iter()
            .map(|pod| {
                let ip = pod["status"]["podIP"].as_str().and_then(|ip| ip.parse::<IpAddr>().ok());
                ip.map(|ip| SocketAddr::new(ip, METRICS_PORT))
                    .ok_or_else(|| format!("{} has no address", pod["metadata"]["name"]))
            })
            .collect()
    }

    fn record(&self, name: &str) -> Result<Recorder, String> {
        Recorder::start(self.paths, name, self.workers(name)?)
    }

    /// The job to its end; its summary.
    fn completed(&self, name: &str) -> Result<Value, String> {
        let job = until_phase(self.paths, name, "Complete")?;
        self.removed(name)?;
        let summary = job["status"]["summary"].clone();
        println!("{name}: {} samples, test AUC {}", summary["samples"], summary["auc"]);
        Ok(summary)
    }

    fn removed(&self, name: &str) -> Result<(), String> {
        delete_job(self.paths, name)?;
        eventually(PODS, &format!("the end of the pods of {name}"), || no_pods(self.paths, name))
    }

    /// Nobody comes: the summary. It stays in `sync`.
    fn undisturbed(&self) -> Result<Value, String> {
        let name = "undisturbed";
        self.submit(name, &auto())?;
        let recorder = self.record(name)?;
        let summary = self.completed(name)?;
        let timeline = recorder.finish();
        let mode = timeline.samples.last().map(|sample| sample.mode.clone()).unwrap_or_default();
        self.keep("undisturbed", "mode: auto with no neighbours", timeline.clone(), vec![])?;
        if !timeline.switches.is_empty() || mode != "sync" {
            return Err(format!("a job that nobody disturbs left sync: {:?}", timeline.switches));
        }
        Ok(summary)
    }

    /// Samples a second of a job that stays in `sync` beside neighbours.
    fn in_sync(&self) -> Result<f64, String> {
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
        self.removed(name)?;
        Ok(beside)
    }

    /// Neighbours come, and go.
    fn followed(&self, undisturbed: &Value, in_sync: f64) -> Result<(), String> {
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
            Err(error) => return self.keep(name, title, timeline, vec![]).and(Err(error)),
        };
        let gain = in_gba / in_sync;
        println!("in gba {gain:.2} times the throughput of sync beside the same neighbours");
        let auc = |summary: &Value| summary["auc"].as_f64().ok_or_else(|| format!("{summary} has no AUC"));
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
            return Err(format!(
                "{} samples were trained, and {} undisturbed",
                summary["samples"], undisturbed["samples"]
            ));
        }
        if (here - there).abs() > AUC {
            return Err(format!("the test AUC is {here}, and {there} undisturbed"));
        }
        if gain < GAIN {
            return Err(format!("{gain:.2} times the throughput of sync, and not {GAIN}"));
        }
        Ok(())
    }

    /// Follows the job to its end, and notes from when to when there were neighbours.
    fn come_and_go(&self, recorder: &Recorder, name: &str, contention: &mut Vec<[f64; 2]>) -> Result<Followed, String> {
        // The operator knows the job without neighbours.
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

    /// Neighbours that come and go faster than it is worth following.
    fn noisy(&self) -> Result<(), String> {
        let name = "noisy";
        // As nervous as a manifest can make it, so that it is the limit that holds it back.
        let nervous = json!({
            "training": {"mode": "auto", "auto": {"windowSeconds": 15, "dwellSeconds": 30}},
            "data": {"synthetic": {"rows": 1_000_000_000, "testRows": 1_000}},
        });
        let seed = seed()?;
        let mut random = Random(seed);
        println!("neighbours that come and go at random: {SEED}={seed}");
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
        self.removed(name)?;
        if switches > SWITCHES {
            return Err(format!("{switches} switches within an hour, and {SWITCHES} are allowed"));
        }
        Ok(())
    }

    /// Writes a timeline down, as JSON and as SVG.
    fn keep(&self, name: &str, title: &str, timeline: Timeline, figures: Vec<(&str, f64)>) -> Result<(), String> {
        let figures = figures.into_iter().map(|(name, value)| (name.to_owned(), value)).collect();
        let timeline = Timeline { title: title.to_owned(), figures, ..timeline };
        let folder = self.paths.root().join("timelines");
        write(&folder.join(format!("{name}.json")), format!("{:#}\n", timeline.to_json()))?;
        let svg = folder.join(format!("{name}.svg"));
        write(&svg, timeline.to_svg())?;
        println!("{title}: {}", svg.display());
        Ok(())
    }
}

/// Rows of the job: enough for neighbours to come and go while it trains.
const ROWS: u64 = 14_000_000;

/// With the defaults, but for the time that a mode stays.
fn auto() -> Value {
    json!({"training": {"mode": "auto", "auto": {"dwellSeconds": DWELL.as_secs()}}})
}

/// Looks at a job every second until it is told to finish.
struct Recorder {
    started: Instant,
    recorded: Arc<Mutex<Recorded>>,
    watching: Mutex<Option<(Running, JoinHandle<()>)>>,
}

#[derive(Default)]
struct Recorded {
    /// The mode that the status has.
    mode: String,
    /// Samples that all dense workers have trained, by seconds.
    totals: Vec<(f64, f64)>,
    samples: Vec<Sample>,
    switches: Vec<Switch>,
    /// Nobody looks any more.
    is_over: bool,
}

impl Recorder {
    fn start(paths: &Paths, name: &str, workers: Vec<SocketAddr>) -> Result<Self, String> {
        let started = Instant::now();
        let recorded = Arc::new(Mutex::new(Recorded::default()));
        let (proxy, api_server) = proxy(paths)?;
        let api_server: SocketAddr = api_server.parse().map_err(|error| format!("{api_server}: {error}"))?;
        let path = format!("/apis/rectrain.dev/v1alpha1/namespaces/{NAMESPACE}/rectrainingjobs/{name}");
        let known = Arc::clone(&recorded);
        let looking = std::thread::spawn(move || {
            while !lock(&known).is_over {
                // Who does not answer in time is asked again with the others.
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

    /// Seconds of the timeline at a moment.
    fn seconds(&self, moment: Instant) -> f64 {
        moment.saturating_duration_since(self.started).as_secs_f64()
    }

    fn now(&self) -> f64 {
        self.seconds(Instant::now())
    }

    /// Waits, and gives samples a second over the last part of that time.
    fn rate_over(&self, patience: Duration, last: Duration) -> Result<f64, String> {
        let end = self.now() + patience.as_secs_f64();
        let from = end - last.as_secs_f64();
        eventually(patience + PODS, "samples that are trained", || {
            let recorded = lock(&self.recorded);
            let (latest, all) = recorded.totals.last().copied().ok_or("no dense worker answers")?;
            if latest < end {
                return Err(format!("{latest:.0} of {end:.0} s have passed"));
            }
            let first = recorded.totals.iter().rev().find(|(at, _)| *at <= from).or(recorded.totals.first());
            let (at, before) = first.copied().unwrap_or((0.0, 0.0));
            Ok((all - before) / (latest - at).max(1.0))
        })
    }

    /// Samples a second once what was before `moment` no longer shows.
    fn rate_after(&self, moment: Instant) -> Result<f64, String> {
        self.rate_over(SETTLED.saturating_sub(moment.elapsed()) + MEASURED, MEASURED)
    }

    fn is_in(&self, mode: &str) -> Result<(), String> {
        match &lock(&self.recorded).mode {
            now if now == mode => Ok(()),
            now => Err(format!("it is in {now} and not in {mode} before the neighbours have come")),
        }
    }

    fn until_mode(&self, mode: &str, since: Instant, patience: Duration) -> Result<(), String> {
        eventually(patience.saturating_sub(since.elapsed()), &format!("the mode {mode}"), || {
            match &lock(&self.recorded).mode {
                now if now == mode => Ok(()),
                now => Err(format!("it is {now}")),
            }
        })
    }

    /// Looks no more; gives what was seen.
    fn finish(&self) -> Timeline {
        lock(&self.recorded).is_over = true;
        let watching = self.watching.lock().unwrap_or_else(PoisonError::into_inner).take();
        if let Some((_proxy, looking)) = watching {
            // What it has recorded is there, however it ended.
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
    recorded.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Recorded {
    /// What the status of the job says.
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

    fn measure(&mut self, seconds: f64, total: f64) {
        self.totals.push((seconds, total));
        let earlier = self.totals.iter().rev().find(|(at, _)| at + RATE_SECONDS <= seconds);
        if let Some((at, before)) = earlier {
            let samples_per_second = (total - before) / (seconds - at);
            self.samples.push(Sample { seconds, samples_per_second, mode: self.mode.clone() });
        }
    }
}

/// Samples that all workers together have trained.
fn total(workers: &[SocketAddr]) -> Option<f64> {
    workers
        .iter()
        .map(|worker| http::sum_of(&http::get(*worker, "/metrics").ok()?, "rectrain_dense_worker_samples_total"))
        .sum()
}

/// The seed that is given, or the clock's.
fn seed() -> Result<u64, String> {
    match std::env::var(SEED) {
        Ok(text) => text.parse().map_err(|_| format!("{SEED} is {text:?}, and no number")),
        Err(_) => Ok(SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).map_or(1, |time| time.as_secs())),
    }
}

/// How long neighbours stay, or stay away.
fn stay(random: &mut Random) -> Duration {
    let [shortest, longest] = STAY;
    Duration::from_secs_f64(shortest + (longest - shortest) * random.fraction())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_switch_is_recorded_where_the_status_has_another_mode_while_it_trains() {
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
    fn stays_are_within_their_bounds_and_the_same_for_a_seed() {
        let stays = || {
            let mut random = Random(7);
            (0..100).map(|_| stay(&mut random).as_secs_f64()).collect::<Vec<_>>()
        };
        assert!(stays().iter().all(|stay| (STAY[0]..STAY[1]).contains(stay)));
        assert_eq!(stays(), stays());
    }
}

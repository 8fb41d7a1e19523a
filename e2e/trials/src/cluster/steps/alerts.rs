//! The chart's alerts fire in a real Prometheus when the trial produces their causes in a real
//! cluster. Such causes are a stalled job, a stranger's call, a missing object store, and a foreign
//! lease. All durations are a thirtieth of the chart's.

use std::collections::BTreeSet;
use std::path::PathBuf;
use std::process::Stdio;
use std::time::Duration;

use rectrain_harness::cargo::cargo;
use rectrain_harness::command::{Running, command, output};
use rectrain_harness::files::{read, remove_folder, write};
use rectrain_harness::jobs::NAMESPACE;
use rectrain_harness::kubectl::SYSTEM;
use rectrain_harness::manifests::{endless, merged, with_checkpoints, with_limits, without_a_node};
use rectrain_harness::waiting::eventually;
use rectrain_harness::workspace::{built, workspace};
use rectrain_harness::{HarnessError, not_yet, say};
use serde_json::{Value, json};

use super::serving::server;
use crate::TrialError;
use crate::cluster::support::TestCluster;
use crate::cluster::support::chart::{POLL_EVERY_SECOND, install};
use crate::cluster::support::monitoring::{Monitoring, patience_for};
use crate::cluster::support::object_store;
use crate::cluster::support::stopped::Stopped;
use crate::error::unmet;

/// The factor by which the rules are faster than the chart's.
const FASTER: u64 = 30;
/// How long an alert may take to fire after its cause.
const FIRES: Duration = Duration::from_secs(240);
/// How long a cause may take to end.
const OVER: Duration = Duration::from_secs(120);
/// Global steps between two checkpoints.
const EVERY: u64 = 100;
/// The job that suffers most of the causes.
const JOB: &str = "suffers";

/// The alerts whose cause this trial does not produce. The series of their causes fire them in
/// `e2e/cluster/alerts-test.yaml`.
const WITHOUT_CAUSE: [&str; 10] = [
    // A trial of its own slows members.
    "RectrainSlowMember",
    // A later version of the operator would have to write a status.
    "RectrainJobUnreadable",
    // The cluster has no Kafka, and its jobs have synthetic rows.
    "RectrainStreamLagging",
    "RectrainStreamRowsLost",
    "RectrainQualityFell",
    // The trial `serves-a-model` has servers of a model.
    "RectrainServersNotReady",
    "RectrainModelStale",
    "RectrainModelNotTaken",
    "RectrainRequestsRefused",
    "RectrainPublicationFailed",
];

pub(in crate::cluster) fn alerts(cluster: &TestCluster) -> Result<(), TrialError> {
    let rules = read(&workspace().join("charts/rectrain/alerts.yaml"))?;
    let Some(monitoring) = Monitoring::start(cluster, Some(&shortened(&rules)))? else { return Ok(()) };
    cargo(&["build", "--release", "--workspace", "--example", "faulty_member"], "the faulty member cannot be built")?;
    let mut watch = Watch { cluster, monitoring, fired: BTreeSet::new() };
    stalled_and_failed_jobs(&mut watch)?;
    silent_shard(&mut watch)?;
    drops_gradients(&mut watch)?;
    faulty_member(&mut watch)?;
    crowding_member(&mut watch)?;
    near_memory_limit(&mut watch)?;
    unpredicted(&mut watch)?;
    suffers(&mut watch)?;
    operator(&mut watch)?;
    let (fired, expected) = (&watch.fired, with_cause(&rules));
    let missing: Vec<_> = expected.iter().filter(|name| !fired.contains(**name)).collect();
    println!("fired by their causes: {fired:?}");
    watch.monitoring.end()?;
    if missing.is_empty() { Ok(()) } else { Err(unmet("every alert of the rules to fire", format!("not {missing:?}"))) }
}

struct Watch<'a> {
    cluster: &'a TestCluster,
    monitoring: Monitoring,
    /// The alerts that have fired.
    fired: BTreeSet<String>,
}

impl Watch<'_> {
    /// Waits until the alert fires, for `job` if one is given.
    fn fires(&mut self, alert: &str, job: Option<&str>) -> Result<(), HarnessError> {
        eventually(FIRES, &format!("the alert {alert}"), || {
            self.monitoring.look_again(self.cluster)?;
            self.is_firing(alert, job)
        })?;
        println!("{alert} fires");
        self.fired.insert(alert.to_owned());
        Ok(())
    }

    fn is_firing(&self, alert: &str, job: Option<&str>) -> Result<(), HarnessError> {
        let answer = self.monitoring.prometheus.ask("alerts", &[])?;
        let all = answer["data"]["alerts"].as_array().cloned().unwrap_or_default();
        let matches = |found: &&Value| {
            found["labels"]["alertname"] == alert && job.is_none_or(|job| found["labels"]["job_name"] == job)
        };
        let found = all.iter().find(matches).ok_or_else(|| not_yet(format!("there are {:?}", labels(&all))))?;
        let description = found["annotations"]["description"].as_str().unwrap_or_default();
        if description.is_empty() || description.contains("error expanding") || description.contains("no value") {
            return Err(not_yet(format!("its description is {description:?}")));
        }
        if found["state"] == "firing" { Ok(()) } else { Err(not_yet(format!("it is {}", found["state"]))) }
    }

    /// Checks that no alert fires for a healthy job.
    fn is_silent(&self, job: &str) -> Result<(), HarnessError> {
        let firing = self.monitoring.query(&format!("ALERTS{{job_name=\"{job}\",alertstate=\"firing\"}}"))?;
        if firing.is_empty() { Ok(()) } else { Err(not_yet(format!("{job} is healthy, and has {firing:?}"))) }
    }
}

fn labels(alerts: &[Value]) -> Vec<String> {
    alerts.iter().map(|alert| format!("{} ({})", alert["labels"]["alertname"], alert["state"])).collect()
}

/// A job that no node accepts, and one without its data.
fn stalled_and_failed_jobs(watch: &mut Watch<'_>) -> Result<(), HarnessError> {
    let jobs = &watch.cluster.jobs;
    let missing = json!({"data": {"synthetic": null, "train": {"paths": ["/data/missing.csv"]}}});
    jobs.submit("waits", &json!({"roles": {"loader": {"template": without_a_node()}}}))?;
    jobs.submit("bad-input", &missing)?;
    watch.fires("RectrainJobStalled", Some("waits"))?;
    watch.fires("RectrainJobFailed", Some("bad-input"))?;
    jobs.delete("waits")?;
    jobs.delete("bad-input")
}

/// A shard whose path has no publication. Its pod restarts and never answers.
fn silent_shard(watch: &mut Watch<'_>) -> Result<(), HarnessError> {
    let (jobs, name) = (&watch.cluster.jobs, "silent");
    let shards = json!({"count": 1, "replicas": 1});
    jobs.apply(&server(name, &json!({"model": {"path": "/tmp/none"}, "shards": shards})))?;
    watch.fires("RectrainShardDown", None)?;
    jobs.within(&["delete", "recmodelserver", name, "--timeout=120s"]).map(drop)
}

/// Each step uses the first of two gradients and drops the other one. Then a killed pod uses up the
/// only restart.
fn drops_gradients(watch: &mut Watch<'_>) -> Result<(), HarnessError> {
    let (jobs, name) = (&watch.cluster.jobs, "drops");
    let changes = json!({
        "training": {"mode": "hopBw", "hopBw": {"backups": 1}},
        "roles": {"denseWorker": {"replicas": 2}},
        "faultTolerance": {"maxRestarts": 1},
    });
    jobs.submit(name, &merged(endless(), changes))?;
    jobs.until_phase(name, "Training")?;
    watch.fires("RectrainGradientsDropped", Some(name))?;
    jobs.kill_pod(&format!("{name}-ps-0"))?;
    watch.fires("RectrainRestartsNearBudget", Some(name))?;
    jobs.delete(name)
}

/// A faulty member sends gradients of missing rows, and another one sends gradients that are not
/// finite.
fn faulty_member(watch: &mut Watch<'_>) -> Result<(), HarnessError> {
    let (jobs, name) = (&watch.cluster.jobs, "deceived");
    jobs.submit(name, &merged(endless(), json!({"training": {"mode": "async"}})))?;
    jobs.until_phase(name, "Training")?;
    let server = jobs.address_of(&format!("{name}-ps-0"))?;
    let certificates = Certificates::of(watch.cluster, name)?;
    for (fault, alert) in [("missing", "RectrainRowsLost"), ("not-finite", "RectrainNonFiniteGradients")] {
        let mut member = command(built("examples/faulty_member")?, [format!("tcp://{server}:7000")]);
        let _member = Running::start(member.arg(&certificates.folder).arg(fault).stdout(Stdio::null()))?;
        watch.fires(alert, Some(name))?;
    }
    jobs.delete(name)
}

/// A faulty member trains more ids within an hour of event time than the budget has rows for. Most
/// look-ups then are of its new ids.
fn crowding_member(watch: &mut Watch<'_>) -> Result<(), HarnessError> {
    let (jobs, name) = (&watch.cluster.jobs, "crowded");
    let features = json!({"memory": {"maxRows": 2_000_000}, "eviction": {"policy": "lru"}});
    // Small batches, so that the job looks up fewer rows than the faulty member.
    let training = json!({"mode": "async", "globalBatchSize": 100});
    jobs.submit(name, &merged(endless(), json!({"training": training, "features": features})))?;
    jobs.until_phase(name, "Training")?;
    eventually(FIRES, "a hit rate to compare with", || {
        watch.monitoring.look_again(watch.cluster)?;
        let query = format!("rectrain:job_hit_rate:ratio15m{{rectrain_dev_job=\"{name}\"}} > 0.8");
        if watch.monitoring.query(&query)?.is_empty() { Err(not_yet("there is none")) } else { Ok(()) }
    })?;
    let server = jobs.address_of(&format!("{name}-ps-0"))?;
    let certificates = Certificates::of(watch.cluster, name)?;
    let mut member = command(built("examples/faulty_member")?, [format!("tcp://{server}:7000")]);
    let _member = Running::start(member.arg(&certificates.folder).arg("crowds").stdout(Stdio::null()))?;
    watch.fires("RectrainYoungRowsEvicted", Some(name))?;
    watch.fires("RectrainHitRateFell", Some(name))?;
    jobs.delete(name)
}

/// A job's certificate and key, in a folder of this machine until this value is dropped.
struct Certificates {
    folder: PathBuf,
}

impl Certificates {
    fn of(cluster: &TestCluster, job: &str) -> Result<Self, HarnessError> {
        let certificates = Self { folder: cluster.paths.run().join("certificates") };
        let secret = format!("secret/{job}-certificate");
        for file in ["ca.crt", "tls.crt", "tls.key"] {
            let template = format!("--template={{{{index .data \"{file}\" | base64decode}}}}");
            write(&certificates.folder.join(file), cluster.jobs.within(&["get", &secret, &template])?)?;
        }
        Ok(certificates)
    }
}

impl Drop for Certificates {
    fn drop(&mut self) {
        if let Err(error) = remove_folder(&self.folder) {
            say(error);
        }
    }
}

/// The memory limit of a parameter server is lowered to little more than its use, and nothing
/// raises it.
fn near_memory_limit(watch: &mut Watch<'_>) -> Result<(), HarnessError> {
    let (jobs, name) = (&watch.cluster.jobs, "fills");
    let changes = json!({
        "data": {"synthetic": {"vocabulary": 50_000, "zipfExponent": 0.01}},
        "training": {"globalBatchSize": 2_000},
        "roles": {"ps": with_limits(&json!({"memory": "512Mi"}))},
    });
    jobs.submit(name, &merged(endless(), changes))?;
    jobs.until_phase(name, "Training")?;
    let pod = format!("{name}-ps-0");
    let used = format!("container_memory_working_set_bytes{{pod=\"{pod}\",container=\"rectrain\"}}[1m]");
    let settled = format!("max_over_time({used}) < 1.02 * min_over_time({used}) and count_over_time({used}) > 2");
    let used = eventually(FIRES, "a table that stops growing", || {
        watch.monitoring.look_again(watch.cluster)?;
        let found = watch.monitoring.query(&settled)?;
        found.first().map(|(_, bytes)| *bytes).ok_or_else(|| not_yet("it grows"))
    })?;
    let memory = json!({"memory": format!("{:.0}", used / 0.92)});
    let container = json!({"name": "rectrain", "resources": {"limits": memory, "requests": memory}});
    let patch = json!({"spec": {"containers": [container]}}).to_string();
    jobs.within(&["patch", "pod", &pod, "--subresource=resize", &format!("--patch={patch}")])?;
    watch.fires("RectrainPsNearMemoryLimit", Some(name))?;
    jobs.delete(name)
}

/// Evaluations take most of the time. The prediction of a mode's speed does not include them, so it
/// is wrong.
fn unpredicted(watch: &mut Watch<'_>) -> Result<(), HarnessError> {
    let (jobs, name) = (&watch.cluster.jobs, "unpredicted");
    let changes = json!({
        "data": {"synthetic": {"testRows": 200_000}},
        "training": {
            "mode": "auto", "auto": {"windowSeconds": 15, "dwellSeconds": 30},
            "evaluation": {"every": "steps", "steps": 50},
        },
    });
    jobs.submit(name, &merged(endless(), changes))?;
    jobs.until_phase(name, "Training")?;
    let error = "rectrain_operator_mode_prediction_error_ratio";
    eventually(patience_for(error), "the error of a prediction", || {
        watch.monitoring.look_again(watch.cluster)?;
        let found = watch.monitoring.query(&format!("{error}{{job_name=\"{name}\"}}"))?;
        if found.is_empty() { Err(not_yet("there is none")) } else { Ok(()) }
    })?;
    watch.fires("RectrainModePredictionWrong", Some(name))?;
    jobs.delete(name)
}

/// One job suffers one cause after the other.
fn suffers(watch: &mut Watch<'_>) -> Result<(), TrialError> {
    let (cluster, jobs) = (watch.cluster, &watch.cluster.jobs);
    object_store::start(&cluster.paths, NAMESPACE)?;
    object_store::make_bucket(cluster.kubectl(), NAMESPACE)?;
    jobs.submit(JOB, &with_checkpoints(&endless(), JOB, EVERY))?;
    jobs.until_phase(JOB, "Training")?;
    eventually(FIRES, "checkpoints, and a rate to compare with", || {
        watch.monitoring.look_again(cluster)?;
        let query = format!("rectrain_coordinator_checkpoints_total{{rectrain_dev_job=\"{JOB}\"}} > 2");
        if watch.monitoring.query(&query)?.is_empty() { Err(not_yet("there are none")) } else { watch.is_silent(JOB) }
    })?;
    for mode in ["gba", "sync"].repeat(4) {
        jobs.patch(JOB, &json!({"spec": {"training": {"mode": mode}}}))?;
        eventually(OVER, &format!("the mode {mode}"), || match &jobs.status(JOB)?["mode"] {
            now if now == mode => Ok(()),
            other => Err(not_yet(format!("it is {other}"))),
        })?;
    }
    watch.fires("RectrainModeFlapping", Some(JOB))?;
    stranger(cluster)?;
    watch.fires("RectrainStrangersRefused", Some(JOB))?;
    jobs.within(&["scale", "deployment/object-store", "--replicas=0"])?;
    watch.fires("RectrainCheckpointFailed", Some(JOB))?;
    watch.fires("RectrainCheckpointTooOld", Some(JOB))?;
    trains_without_store(cluster)?;
    // A dense worker that waits for rows still serves its metrics, with a constant count of
    // samples.
    let stopped = Stopped::process_of(jobs, &format!("{JOB}-loader-0"))?;
    watch.fires("RectrainThroughputCollapsed", Some(JOB))?;
    watch.fires("RectrainJobNotProgressing", Some(JOB))?;
    drop(stopped);
    jobs.until_phase(JOB, "Training")?;
    let stopped = Stopped::process_of(jobs, &format!("{JOB}-coordinator-0"))?;
    watch.fires("RectrainReconcileSlow", None)?;
    drop(stopped);
    Ok(jobs.delete(JOB)?)
}

/// A checkpoint is due about every second and cannot be written. Training does not wait for it.
fn trains_without_store(cluster: &TestCluster) -> Result<(), TrialError> {
    let (before, seconds) = (cluster.jobs.step(JOB)?, 10);
    std::thread::sleep(Duration::from_secs(seconds));
    let steps = cluster.jobs.step(JOB)?.saturating_sub(before);
    println!("{steps} steps in {seconds} s without a store");
    if steps > 3 * EVERY {
        return Ok(());
    }
    Err(unmet(format!("more than {} steps in {seconds} s without a store", 3 * EVERY), format!("{steps} steps")))
}

/// A client without TLS calls the parameter server, and must get no answer.
fn stranger(cluster: &TestCluster) -> Result<(), TrialError> {
    let address = cluster.jobs.address_of(&format!("{JOB}-ps-0"))?;
    let called = output(&mut command("curl", ["--silent", "--max-time", "5", &format!("http://{address}:7000/")]));
    if let Ok(answer) = called { Err(unmet("no answer to a stranger", format!("{answer:?}"))) } else { Ok(()) }
}

/// Causes in the operator itself.
fn operator(watch: &mut Watch<'_>) -> Result<(), TrialError> {
    let (jobs, name) = (&watch.cluster.jobs, "unseen");
    jobs.submit(name, &endless())?;
    jobs.until_phase(name, "Training")?;
    without_right(watch, name)?;
    without_leader(watch)?;
    without_operator(watch)?;
    Ok(jobs.delete(name)?)
}

/// No instance of the operator runs.
fn without_operator(watch: &mut Watch<'_>) -> Result<(), HarnessError> {
    scale_operator(watch.cluster, 0)?;
    let fired = watch.fires("RectrainOperatorDown", None);
    // The operator must return even if the alert did not fire.
    scale_operator(watch.cluster, 2)?;
    fired
}

/// The operator loses the right to write a status.
fn without_right(watch: &mut Watch<'_>, job: &str) -> Result<(), TrialError> {
    let jobs = &watch.cluster.jobs;
    let role = jobs.get("clusterrole/rectrain")?;
    let mut rules = role["rules"].as_array().into_iter().flatten();
    let index = rules.position(|rule| rule["resources"] == json!(["rectrainingjobs/status"]));
    let index = index.ok_or_else(|| unmet("the right to write a status", &role["rules"]))?;
    let patch = json!([{"op": "remove", "path": format!("/rules/{index}")}]);
    jobs.kubectl().within(SYSTEM, &["patch", "clusterrole/rectrain", "--type=json", &format!("--patch={patch}")])?;
    let fired =
        watch.fires("RectrainReconcileErrors", None).and_then(|()| watch.fires("RectrainStatusStale", Some(job)));
    // The right must return even if the alerts did not fire.
    install(&watch.cluster.paths, &[POLL_EVERY_SECOND, "--force-conflicts"])?;
    Ok(fired?)
}

/// A foreign holder keeps the operator's lease.
fn without_leader(watch: &mut Watch<'_>) -> Result<(), HarnessError> {
    let jobs = &watch.cluster.jobs;
    let now = output(&mut command("date", ["-u", "+%Y-%m-%dT%H:%M:%S.000000Z"]))?;
    let theirs = json!({"spec": {"holderIdentity": "another-holder", "leaseDurationSeconds": 3600, "renewTime": now.trim(), "acquireTime": now.trim()}});
    jobs.kubectl()
        .within(SYSTEM, &["patch", "lease/rectrain-operator", "--type=merge", &format!("--patch={theirs}")])?;
    let fired = watch.fires("RectrainOperatorWithoutLeader", None);
    let over = json!({"spec": {"leaseDurationSeconds": 1}});
    jobs.kubectl().within(SYSTEM, &["patch", "lease/rectrain-operator", "--type=merge", &format!("--patch={over}")])?;
    eventually(OVER, "a leader", || match jobs.kubectl().leader()?.as_str() {
        "another-holder" | "" => Err(not_yet("there is none")),
        _ => Ok(()),
    })?;
    fired
}

/// Changes the number of the operator's instances.
fn scale_operator(cluster: &TestCluster, count: u32) -> Result<(), HarnessError> {
    let within = |words: &[&str]| cluster.kubectl().within(SYSTEM, words);
    within(&["scale", "deployment/rectrain", &format!("--replicas={count}")])?;
    within(&["rollout", "status", "deployment/rectrain", "--timeout=120s"]).map(drop)
}

/// The rules with every duration, and the one threshold in seconds, divided by about [`FASTER`].
fn shortened(rules: &str) -> String {
    let mut text = rules.replace("job_status_age_seconds) > 120", "job_status_age_seconds) > 10");
    for before in ["[", "for: ", "offset "] {
        let mut parts = text.split(before);
        let mut faster = parts.next().unwrap_or_default().to_owned();
        for part in parts {
            faster.push_str(before);
            faster.push_str(&shorter(part));
        }
        text = faster;
    }
    text
}

/// A text that begins with a duration in minutes or hours, with the shorter duration in seconds.
fn shorter(text: &str) -> String {
    let digits = text.find(|letter: char| !letter.is_ascii_digit()).unwrap_or(text.len());
    let seconds = match (text[..digits].parse::<u64>(), text[digits..].chars().next()) {
        (Ok(minutes), Some('m')) => minutes * 60,
        (Ok(hours), Some('h')) => hours * 3600,
        _ => return text.to_owned(),
    };
    format!("{}s{}", seconds / FASTER, &text[digits + 1..])
}

/// The names of the alerts whose cause this trial produces.
fn with_cause(rules: &str) -> Vec<&str> {
    names(rules).into_iter().filter(|name| !WITHOUT_CAUSE.contains(name)).collect()
}

/// The names of all alerts.
fn names(rules: &str) -> Vec<&str> {
    rules.lines().filter_map(|line| line.trim().strip_prefix("- alert: ")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_durations_of_the_rules_become_shorter() {
        let rules = "- record: a:rate5m\n  expr: rate(b[1h] offset 5m) > c[d]\n  for: 10m\n";
        assert_eq!(shortened(rules), "- record: a:rate5m\n  expr: rate(b[120s] offset 10s) > c[d]\n  for: 20s\n");
        let chart = std::fs::read_to_string(workspace().join("charts/rectrain/alerts.yaml")).unwrap();
        let faster = shortened(&chart);
        assert!(!faster.contains("[5m]") && !faster.contains("for: 5m") && !faster.contains("> 120"), "{faster}");
        assert_eq!(names(&chart), names(&faster));
        assert!(names(&chart).len() > 15);
    }

    /// A trial of an hour shall not be the first to find a new alert.
    #[test]
    fn each_alert_with_a_cause_is_awaited() {
        let chart = std::fs::read_to_string(workspace().join("charts/rectrain/alerts.yaml")).unwrap();
        let source = include_str!("alerts.rs");
        let awaited =
            |name: &str| source.contains(&format!("(\"{name}\", ")) || source.contains(&format!("\"{name}\")"));
        let forgotten: Vec<_> = with_cause(&chart).into_iter().filter(|name| !awaited(name)).collect();
        assert!(forgotten.is_empty(), "neither produced nor in WITHOUT_CAUSE: {forgotten:?}");
    }
}

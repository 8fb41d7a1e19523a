//! The alerts of the chart's rules, fired in a real Prometheus by producing their causes in a real cluster: a job that stalls, a stranger
//! that calls, a store that is gone, a lease that is somebody else's. What is waited for is a thirtieth as long as in the chart.

use std::collections::BTreeSet;
use std::path::PathBuf;
use std::process::Stdio;
use std::time::Duration;

use serde_json::{Value, json};

use super::dashboards::{EVERY, Monitoring, no_node, patience_for};
use super::install::{Running, install, object_store, upload, within};
use super::operate::{
    NAMESPACE, SYSTEM, delete_job, endless, get, kill_pod, leader, merged, patch, process_of_pod, status, submit,
    until_phase,
};
use super::paths::{Paths, remove_folder, write};
use super::process::{command, eventually, output};
use super::recovery::saved;
use super::scaling::with_limits;

/// By which rules are faster than in the chart.
const FASTER: u64 = 30;
/// An alert fires within this time after its cause began.
const FIRES: Duration = Duration::from_secs(240);
/// What was caused is over within this time.
const OVER: Duration = Duration::from_secs(120);
/// The job that most of it happens to.
const JOB: &str = "suffers";

/// A step of `cargo xtask cluster operate`.
pub(super) fn alerts(paths: &Paths) -> Result<(), String> {
    let file = crate::workspace().join("charts/rectrain/alerts.yaml");
    let rules = std::fs::read_to_string(&file).map_err(|error| format!("cannot read {}: {error}", file.display()))?;
    let Some(monitoring) = Monitoring::start(paths, Some(&shortened(&rules)))? else { return Ok(()) };
    crate::cargo(
        &["build", "--release", "--workspace", "--example", "faulty_member"],
        "the faulty member cannot be built",
    )?;
    let mut watch = Watch { paths, monitoring, fired: BTreeSet::new() };
    jobs_that_need_somebody(&mut watch)?;
    drops_gradients(&mut watch)?;
    faulty_member(&mut watch)?;
    near_memory_limit(&mut watch)?;
    unpredicted(&mut watch)?;
    suffers(&mut watch)?;
    operator(&mut watch)?;
    let (fired, expected) = (&watch.fired, names(&rules));
    let missing: Vec<_> = expected.iter().filter(|name| !fired.contains(**name)).collect();
    println!("fired by their causes: {fired:?}");
    watch.monitoring.end()?;
    if missing.is_empty() { Ok(()) } else { Err(format!("these alerts were not fired: {missing:?}")) }
}

struct Watch<'a> {
    paths: &'a Paths,
    monitoring: Monitoring,
    /// So far.
    fired: BTreeSet<String>,
}

impl Watch<'_> {
    /// Waits until the alert fires, about `job` where it is about one.
    fn fires(&mut self, alert: &str, job: Option<&str>) -> Result<(), String> {
        eventually(FIRES, &format!("the alert {alert}"), || {
            self.monitoring.look_again(self.paths)?;
            self.is_firing(alert, job)
        })?;
        println!("{alert} fires");
        self.fired.insert(alert.to_owned());
        Ok(())
    }

    fn is_firing(&self, alert: &str, job: Option<&str>) -> Result<(), String> {
        let answer = self.monitoring.prometheus.ask("alerts", &[])?;
        let all = answer["data"]["alerts"].as_array().cloned().unwrap_or_default();
        let is_it = |found: &&Value| {
            found["labels"]["alertname"] == alert && job.is_none_or(|job| found["labels"]["job_name"] == job)
        };
        let found = all.iter().find(is_it).ok_or_else(|| format!("there are {:?}", labels(&all)))?;
        let description = found["annotations"]["description"].as_str().unwrap_or_default();
        if description.is_empty() || description.contains("error expanding") || description.contains("no value") {
            return Err(format!("its description is {description:?}"));
        }
        if found["state"] == "firing" { Ok(()) } else { Err(format!("it is {}", found["state"])) }
    }

    /// Nothing may be said of a job that is well.
    fn is_silent(&self, job: &str) -> Result<(), String> {
        let about = self.monitoring.query(&format!("ALERTS{{job_name=\"{job}\",alertstate=\"firing\"}}"))?;
        if about.is_empty() { Ok(()) } else { Err(format!("{job} is well, and there are {about:?}")) }
    }
}

fn labels(alerts: &[Value]) -> Vec<String> {
    alerts.iter().map(|alert| format!("{} ({})", alert["labels"]["alertname"], alert["state"])).collect()
}

fn jobs_that_need_somebody(watch: &mut Watch<'_>) -> Result<(), String> {
    let missing = json!({"data": {"synthetic": null, "train": {"paths": ["/data/missing.csv"]}}});
    submit(watch.paths, "waits", &json!({"roles": {"loader": {"template": no_node()}}}))?;
    submit(watch.paths, "bad-input", &missing)?;
    watch.fires("RectrainJobStalled", Some("waits"))?;
    watch.fires("RectrainJobFailed", Some("bad-input"))?;
    delete_job(watch.paths, "waits")?;
    delete_job(watch.paths, "bad-input")
}

/// A step takes the first of two gradients and drops the other. Then a pod is killed, and the only restart is used up.
fn drops_gradients(watch: &mut Watch<'_>) -> Result<(), String> {
    let (paths, name) = (watch.paths, "drops");
    let changes = json!({
        "training": {"mode": "hopBw", "hopBw": {"backups": 1}},
        "roles": {"denseWorker": {"replicas": 2}},
        "faultTolerance": {"maxRestarts": 1},
    });
    submit(paths, name, &merged(endless(), changes))?;
    until_phase(paths, name, "Training")?;
    watch.fires("RectrainGradientsDropped", Some(name))?;
    kill_pod(paths, NAMESPACE, &format!("{name}-ps-0"))?;
    watch.fires("RectrainRestartsNearBudget", Some(name))?;
    delete_job(paths, name)
}

/// A member sends gradients of rows that are not there, and another such that are no numbers.
fn faulty_member(watch: &mut Watch<'_>) -> Result<(), String> {
    let (paths, name) = (watch.paths, "deceived");
    submit(paths, name, &merged(endless(), json!({"training": {"mode": "async"}})))?;
    until_phase(paths, name, "Training")?;
    let server = address_of(paths, &format!("{name}-ps-0"))?;
    let certificates = Certificates::of(paths, name)?;
    for (fault, alert) in [("missing", "RectrainRowsLost"), ("not-finite", "RectrainNonFiniteGradients")] {
        let mut member = command(crate::built("examples/faulty_member")?, [format!("tcp://{server}:7000")]);
        let member = member.arg(&certificates.folder).arg(fault).stdout(Stdio::null());
        let _member = Running(member.spawn().map_err(|error| format!("cannot run the faulty member: {error}"))?);
        watch.fires(alert, Some(name))?;
    }
    delete_job(paths, name)
}

/// A job's certificate and key, in a folder of this machine for as long as this is.
struct Certificates {
    folder: PathBuf,
}

impl Certificates {
    fn of(paths: &Paths, job: &str) -> Result<Self, String> {
        let certificates = Self { folder: paths.run().join("certificates") };
        let secret = format!("secret/{job}-certificate");
        for file in ["ca.crt", "tls.crt", "tls.key"] {
            let template = format!("--template={{{{index .data \"{file}\" | base64decode}}}}");
            write(&certificates.folder.join(file), within(paths, NAMESPACE, &["get", &secret, &template])?)?;
        }
        Ok(certificates)
    }
}

impl Drop for Certificates {
    fn drop(&mut self) {
        if let Err(error) = remove_folder(&self.folder) {
            eprintln!("xtask: {error}");
        }
    }
}

/// The limit of a parameter server comes to be little more than what its table takes, which nobody raises.
fn near_memory_limit(watch: &mut Watch<'_>) -> Result<(), String> {
    let (paths, name) = (watch.paths, "fills");
    let changes = json!({
        "data": {"synthetic": {"vocabulary": 50_000, "zipfExponent": 0.01}},
        "training": {"globalBatchSize": 2_000},
        "roles": {"ps": with_limits(&json!({"memory": "512Mi"}))},
    });
    submit(paths, name, &merged(endless(), changes))?;
    until_phase(paths, name, "Training")?;
    let pod = format!("{name}-ps-0");
    let used = format!("container_memory_working_set_bytes{{pod=\"{pod}\",container=\"rectrain\"}}[1m]");
    let settled = format!("max_over_time({used}) < 1.02 * min_over_time({used}) and count_over_time({used}) > 2");
    let used = eventually(FIRES, "a table that grows no more", || {
        watch.monitoring.look_again(paths)?;
        let found = watch.monitoring.query(&settled)?;
        found.first().map(|(_, bytes)| *bytes).ok_or_else(|| "it grows".to_owned())
    })?;
    let memory = json!({"memory": format!("{:.0}", used / 0.92)});
    let container = json!({"name": "rectrain", "resources": {"limits": memory, "requests": memory}});
    let patch = json!({"spec": {"containers": [container]}}).to_string();
    within(paths, NAMESPACE, &["patch", "pod", &pod, "--subresource=resize", &format!("--patch={patch}")])?;
    watch.fires("RectrainPsNearMemoryLimit", Some(name))?;
    delete_job(paths, name)
}

/// Evaluations take most of the time, of which what predicts the modes' speeds knows nothing.
fn unpredicted(watch: &mut Watch<'_>) -> Result<(), String> {
    let (paths, name) = (watch.paths, "unpredicted");
    let changes = json!({
        "data": {"synthetic": {"testRows": 200_000}},
        "training": {
            "mode": "auto", "auto": {"windowSeconds": 15, "dwellSeconds": 30},
            "evaluation": {"every": "steps", "steps": 50},
        },
    });
    submit(paths, name, &merged(endless(), changes))?;
    until_phase(paths, name, "Training")?;
    let error = "rectrain_operator_mode_prediction_error_ratio";
    eventually(patience_for(error), "a prediction of what is not met", || {
        watch.monitoring.look_again(paths)?;
        let found = watch.monitoring.query(&format!("{error}{{job_name=\"{name}\"}}"))?;
        if found.is_empty() { Err("there is none".to_owned()) } else { Ok(()) }
    })?;
    watch.fires("RectrainModePredictionWrong", Some(name))?;
    delete_job(paths, name)
}

/// One misfortune after the other happens to one job.
fn suffers(watch: &mut Watch<'_>) -> Result<(), String> {
    let paths = watch.paths;
    object_store(paths, NAMESPACE)?;
    upload(paths, NAMESPACE, &crate::workspace(), &[])?;
    submit(paths, JOB, &saved(&endless(), JOB, EVERY))?;
    until_phase(paths, JOB, "Training")?;
    eventually(FIRES, "checkpoints, and a rate to compare with", || {
        watch.monitoring.look_again(paths)?;
        let query = format!("rectrain_coordinator_checkpoints_total{{rectrain_dev_job=\"{JOB}\"}} > 2");
        if watch.monitoring.query(&query)?.is_empty() { Err("there are none".to_owned()) } else { watch.is_silent(JOB) }
    })?;
    for mode in ["gba", "sync"].repeat(4) {
        patch(paths, JOB, &json!({"spec": {"training": {"mode": mode}}}))?;
        eventually(OVER, &format!("the mode {mode}"), || match &status(paths, JOB)?["mode"] {
            now if now == mode => Ok(()),
            other => Err(format!("it is {other}")),
        })?;
    }
    watch.fires("RectrainModeFlapping", Some(JOB))?;
    stranger(paths)?;
    watch.fires("RectrainStrangersRefused", Some(JOB))?;
    within(paths, NAMESPACE, &["scale", "deployment/object-store", "--replicas=0"])?;
    watch.fires("RectrainCheckpointFailed", Some(JOB))?;
    watch.fires("RectrainCheckpointTooOld", Some(JOB))?;
    goes_on_without_store(paths)?;
    // A dense worker that waits for rows still says how many it has trained.
    let stopped = Stopped::process_of(paths, &format!("{JOB}-loader-0"))?;
    watch.fires("RectrainThroughputCollapsed", Some(JOB))?;
    watch.fires("RectrainJobNotProgressing", Some(JOB))?;
    drop(stopped);
    until_phase(paths, JOB, "Training")?;
    let stopped = Stopped::process_of(paths, &format!("{JOB}-coordinator-0"))?;
    watch.fires("RectrainReconcileSlow", None)?;
    drop(stopped);
    delete_job(paths, JOB)
}

/// A checkpoint is due every second or so, and none can be written: nothing of training waits for that.
fn goes_on_without_store(paths: &Paths) -> Result<(), String> {
    let step = || Ok::<_, String>(status(paths, JOB)?["step"].as_u64().unwrap_or(0));
    let (before, seconds) = (step()?, 10);
    std::thread::sleep(Duration::from_secs(seconds));
    let steps = step()?.saturating_sub(before);
    println!("{steps} steps in {seconds} s without a store");
    if steps > 3 * EVERY { Ok(()) } else { Err(format!("only {steps} steps in {seconds} s")) }
}

/// Somebody who speaks no TLS calls the parameter server.
fn stranger(paths: &Paths) -> Result<(), String> {
    let address = address_of(paths, &format!("{JOB}-ps-0"))?;
    let called = output(&mut command("curl", ["--silent", "--max-time", "5", &format!("http://{address}:7000/")]));
    if let Ok(answer) = called { Err(format!("a stranger was answered {answer:?}")) } else { Ok(()) }
}

fn address_of(paths: &Paths, pod: &str) -> Result<String, String> {
    let found = get(paths, &format!("pod/{pod}"))?;
    found["status"]["podIP"].as_str().map(str::to_owned).ok_or_else(|| format!("{pod} has no address"))
}

/// Of the operator itself.
fn operator(watch: &mut Watch<'_>) -> Result<(), String> {
    let paths = watch.paths;
    let name = "unseen";
    submit(paths, name, &endless())?;
    until_phase(paths, name, "Training")?;
    without_right(watch, name)?;
    without_leader(watch)?;
    without_operator(watch)?;
    delete_job(paths, name)
}

/// There is none.
fn without_operator(watch: &mut Watch<'_>) -> Result<(), String> {
    have_operators(watch.paths, 0)?;
    let fired = watch.fires("RectrainOperatorDown", None);
    // Whatever came of it.
    have_operators(watch.paths, 2)?;
    fired
}

/// The operator may write no status.
fn without_right(watch: &mut Watch<'_>, job: &str) -> Result<(), String> {
    let paths = watch.paths;
    let role = get(paths, "clusterrole/rectrain")?;
    let rules = role["rules"].as_array().ok_or("the operator has no rights")?;
    let index = rules.iter().position(|rule| rule["resources"] == json!(["rectrainingjobs/status"]));
    let index = index.ok_or("the operator has no right to write a status")?;
    let patch = json!([{"op": "remove", "path": format!("/rules/{index}")}]);
    within(paths, SYSTEM, &["patch", "clusterrole/rectrain", "--type=json", &format!("--patch={patch}")])?;
    let fired =
        watch.fires("RectrainReconcileErrors", None).and_then(|()| watch.fires("RectrainStatusStale", Some(job)));
    // Whatever came of it.
    install(paths, &["--set=pollSeconds=1", "--force-conflicts"])?;
    fired
}

/// Somebody else holds the lease, and does not give it back.
fn without_leader(watch: &mut Watch<'_>) -> Result<(), String> {
    let paths = watch.paths;
    let now = output(&mut command("date", ["-u", "+%Y-%m-%dT%H:%M:%S.000000Z"]))?;
    let theirs = json!({"spec": {"holderIdentity": "somebody", "leaseDurationSeconds": 3600, "renewTime": now.trim(), "acquireTime": now.trim()}});
    within(paths, SYSTEM, &["patch", "lease/rectrain-operator", "--type=merge", &format!("--patch={theirs}")])?;
    let fired = watch.fires("RectrainOperatorWithoutLeader", None);
    let over = json!({"spec": {"leaseDurationSeconds": 1}});
    within(paths, SYSTEM, &["patch", "lease/rectrain-operator", "--type=merge", &format!("--patch={over}")])?;
    eventually(OVER, "a leader", || match leader(paths)?.as_str() {
        "somebody" | "" => Err("there is none".to_owned()),
        _ => Ok(()),
    })?;
    fired
}

fn have_operators(paths: &Paths, count: u32) -> Result<(), String> {
    within(paths, SYSTEM, &["scale", "deployment/rectrain", &format!("--replicas={count}")])?;
    within(paths, SYSTEM, &["rollout", "status", "deployment/rectrain", "--timeout=120s"]).map(drop)
}

/// A process that does nothing until this is dropped.
pub(super) struct Stopped(String);

impl Stopped {
    /// The one of the pod's container.
    pub(super) fn process_of(paths: &Paths, pod: &str) -> Result<Self, String> {
        let stopped = Self(process_of_pod(paths, pod)?.to_string());
        output(&mut command("kill", ["-STOP", &stopped.0]))?;
        Ok(stopped)
    }
}

impl Drop for Stopped {
    fn drop(&mut self) {
        // It may have been ended meanwhile.
        let _gone = output(&mut command("kill", ["-CONT", &self.0]));
    }
}

/// The rules with every duration [`FASTER`], and the one threshold that is a time.
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

/// What begins with a duration in minutes or hours, with a shorter one.
fn shorter(text: &str) -> String {
    let digits = text.find(|letter: char| !letter.is_ascii_digit()).unwrap_or(text.len());
    let seconds = match (text[..digits].parse::<u64>(), text[digits..].chars().next()) {
        (Ok(minutes), Some('m')) => minutes * 60,
        (Ok(hours), Some('h')) => hours * 3600,
        _ => return text.to_owned(),
    };
    format!("{}s{}", seconds / FASTER, &text[digits + 1..])
}

/// The names of all alerts.
fn names(rules: &str) -> Vec<&str> {
    rules.lines().filter_map(|line| line.trim().strip_prefix("- alert: ")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_duration_of_the_rules_is_shorter_and_nothing_else_changes() {
        let rules = "- record: a:rate5m\n  expr: rate(b[1h] offset 5m) > c[d]\n  for: 10m\n";
        assert_eq!(shortened(rules), "- record: a:rate5m\n  expr: rate(b[120s] offset 10s) > c[d]\n  for: 20s\n");
        let chart = std::fs::read_to_string(crate::workspace().join("charts/rectrain/alerts.yaml")).unwrap();
        let faster = shortened(&chart);
        assert!(!faster.contains("[5m]") && !faster.contains("for: 5m") && !faster.contains("> 120"), "{faster}");
        assert_eq!(names(&chart), names(&faster));
        assert!(names(&chart).len() > 15);
    }
}

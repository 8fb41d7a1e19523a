//! `cargo xtask cluster operate`: the operator in a real cluster, with the real images. Jobs complete with the digest that a run
//! outside of the cluster has; what is deleted or changed is repaired; the leader is killed; every failure that a user can
//! cause is caused, and shows its condition. The namespace enforces the restricted pod-security standard.

use std::collections::BTreeMap;
use std::process::Stdio;
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use super::alerts::{Stopped, alerts};
use super::contention::follows_the_load;
use super::dashboards::{dashboards, no_node};
use super::fakes::{hundred_with_pods, thousand_with_pods};
use super::images::{self, Image, NEXT_TAG};
use super::install::{apply, fresh_namespace, install, install_earlier, last_event, uninstall, within};
use super::kubectl;
use super::metrics_server::measured;
use super::paths::Paths;
use super::process::{Trial, command, eventually, output, side_by_side};
use super::prometheus::scrapes;
use super::recovery::{drained, goes_on, keeps_rows, reached, same_rows, until_step_after};
use super::refusals::refuses;
use super::rights::needs_its_rights;
use super::scaling::{evens_out, falls_back, grows, scales, settles};
use super::strangers::refuses_strangers;

pub(super) const NAMESPACE: &str = "rectrain-operate";
pub(super) const SYSTEM: &str = "rectrain-system";
const CRD: &str = "customresourcedefinition/rectrainingjobs.rectrain.dev";
/// How long a small job may take on a slow machine.
const JOB: Duration = Duration::from_secs(900);
/// How long a condition may take to show.
const SHOW: Duration = Duration::from_secs(180);
/// What is deleted or changed is back within this time.
const REPAIR: Duration = Duration::from_secs(5);
/// A job under way is in another training mode within this time after its manifest was changed: a few seconds, on a machine that is
/// not busy with much else.
const SWITCH: Duration = Duration::from_secs(30);
/// Another instance leads within this time after the leader was killed.
const TAKEOVER: Duration = Duration::from_secs(20);

/// One thing that is done in the cluster.
struct Step {
    /// By which it is asked for.
    name: &'static str,
    /// What it shows.
    shows: &'static str,
    /// Does it, or says what is not as it should be.
    run: fn(&Paths) -> Result<(), String>,
    /// Whether it is so short that every test of everything has it.
    is_quick: bool,
}

const fn quick(name: &'static str, run: fn(&Paths) -> Result<(), String>, shows: &'static str) -> Step {
    Step { name, shows, run, is_quick: true }
}

const fn long(name: &'static str, run: fn(&Paths) -> Result<(), String>, shows: &'static str) -> Step {
    Step { name, shows, run, is_quick: false }
}

const STEPS: [Step; 28] = [
    quick("completes", completes, "a job completes with the digest of a run outside of the cluster"),
    quick("switches", switches, "a job under way goes on in another training mode without a restart"),
    quick("refuses", refuses, "the API server refuses what cannot be trained, and says why"),
    quick(
        "refuses-strangers",
        refuses_strangers,
        "a pod without the job's certificate reaches no member of the job, and is counted",
    ),
    quick(
        "keeps-rows",
        keeps_rows,
        "a parameter server's container that is killed finds its rows, and the others go on",
    ),
    quick("leaves-nothing", leaves_nothing, "a deleted job leaves nothing"),
    quick("scrapes", scrapes, "Prometheus reads every metric that is documented"),
    long("dashboards", dashboards, "every panel of the dashboards has data, and promtool agrees to the alerts"),
    long("alerts", alerts, "alerts are fired by their causes"),
    quick("repairs", repairs, "what is deleted or changed by others is repaired"),
    quick(
        "takes-over",
        takes_over,
        "another instance takes over from the leader, and a chart is upgraded, under a running job",
    ),
    long(
        "outlives-the-chart",
        outlives_the_chart,
        "a chart that is uninstalled takes no job with it, and the next one goes on with it and brings its kind up to date",
    ),
    quick("survives", survives, "a pod of each role is killed, in hybrid, and the job completes"),
    long("goes-on", goes_on, "killed and deleted jobs go on from their checkpoints, in sync to the bit"),
    long(
        "drained",
        drained,
        "a node that is drained costs nothing: rows go to other parameter servers before their pods do",
    ),
    quick("outlives-a-node", outlives_a_node, "a node that is lost costs restarts and the job completes on the others"),
    long("scales", scales, "members come and go under a job that trains on, by command and because they idle"),
    long("grows", grows, "a table that grows gets more servers, and one that was killed for its memory more of it"),
    long(
        "settles",
        settles,
        "hot servers and embedding workers get others beside them, and how many there are settles",
    ),
    long("falls-back", falls_back, "servers that a load asked for go when it falls"),
    long("evens-out", evens_out, "servers that are used unevenly have their slots spread anew"),
    long(
        "measured",
        measured,
        "what metrics-server measures of nodes is seen, and dense workers are a HorizontalPodAutoscaler's to scale",
    ),
    long("follows-the-load", follows_the_load, "the training mode follows the load of the nodes"),
    quick("fails", fails, "every failure shows its condition"),
    quick("needs-its-rights", needs_its_rights, "the operator needs each right that the chart gives it"),
    quick("thousand", thousand, "a thousand jobs"),
    quick("hundred-with-pods", hundred_with_pods, "a hundred jobs with pods on nodes that are faked"),
    long("thousand-with-pods", thousand_with_pods, "a thousand jobs with pods on nodes that are faked"),
];

/// All steps, those of `--quick`, or those that are named.
pub(super) fn operate(paths: &Paths, wanted: &[&str]) -> Result<(), String> {
    if let Some(unknown) =
        wanted.iter().find(|name| **name != "--quick" && STEPS.iter().all(|step| step.name != **name))
    {
        let names: Vec<_> = STEPS.iter().map(|step| step.name).collect();
        return Err(format!(
            "there is no step `{unknown}` of `operate`: expected --quick or some of {}",
            names.join(", ")
        ));
    }
    install(paths, &["--set=pollSeconds=1"])?;
    fresh_namespace(paths, NAMESPACE)?;
    let is_wanted = |step: &&Step| {
        wanted.is_empty() || wanted.contains(&step.name) || (step.is_quick && wanted.contains(&"--quick"))
    };
    for step in STEPS.iter().filter(is_wanted) {
        let started = Instant::now();
        (step.run)(paths).map_err(|error| format!("{}: {error}", step.shows))?;
        println!("{}: {:.0} s", step.shows, started.elapsed().as_secs_f64());
    }
    within(paths, NAMESPACE, &["delete", "namespace", NAMESPACE, "--timeout=600s"]).map(drop)
}

/// A job over made-up rows; `changes` are laid over it.
pub(super) fn manifest(name: &str, changes: &Value) -> Value {
    let mut job = json!({
        "apiVersion": "rectrain.dev/v1alpha1",
        "kind": "RecTrainingJob",
        "metadata": {"name": name},
        "spec": {
            "model": {"kind": "deepfm", "hidden": [32]},
            "features": {"sparse": [{"name": "C{1..6}"}], "dense": [{"name": "I{1..4}"}]},
            "data": {"synthetic": {"rows": 20_000, "testRows": 2_000}},
            "training": {"mode": "sync", "globalBatchSize": 500},
            "roles": {"ps": {"replicas": 2}, "embeddingWorker": {"replicas": 2}, "denseWorker": {"replicas": 2}},
            "faultTolerance": {"backoffSeconds": 1},
        },
    });
    merge(&mut job["spec"], changes);
    job
}

pub(super) fn merge(base: &mut Value, over: &Value) {
    match (base, over) {
        (Value::Object(base), Value::Object(over)) => {
            for (field, value) in over {
                if value.is_null() {
                    base.remove(field);
                } else {
                    merge(base.entry(field.clone()).or_insert(Value::Null), value);
                }
            }
        }
        (base, over) => *base = over.clone(),
    }
}

/// Rows for so long that a test ends first.
pub(super) fn endless() -> Value {
    json!({
        "data": {"synthetic": {"rows": 1_000_000_000, "testRows": 1_000}},
        "roles": {"ps": {"replicas": 1}, "embeddingWorker": {"replicas": 1}, "denseWorker": {"replicas": 1}},
    })
}

pub(super) fn submit(paths: &Paths, name: &str, changes: &Value) -> Result<(), String> {
    apply(paths, NAMESPACE, &manifest(name, changes).to_string())
}

pub(super) fn get(paths: &Paths, resource: &str) -> Result<Value, String> {
    let text = within(paths, NAMESPACE, &["get", resource, "--output=json"])?;
    serde_json::from_str(&text).map_err(|error| error.to_string())
}

/// Changes a job as it is in the cluster.
pub(super) fn patch(paths: &Paths, name: &str, changes: &Value) -> Result<(), String> {
    within(paths, NAMESPACE, &["patch", "rectrainingjob", name, "--type=merge", &format!("--patch={changes}")])
        .map(drop)
}

fn job(paths: &Paths, name: &str) -> Result<Value, String> {
    get(paths, &format!("rectrainingjob/{name}"))
}

pub(super) fn status(paths: &Paths, name: &str) -> Result<Value, String> {
    Ok(job(paths, name)?["status"].clone())
}

pub(super) fn delete_job(paths: &Paths, name: &str) -> Result<(), String> {
    within(paths, NAMESPACE, &["delete", "rectrainingjob", name, "--timeout=120s"]).map(drop)
}

/// The condition of this type, if it holds.
fn condition(job: &Value, kind: &str) -> Option<Value> {
    let conditions = job["status"]["conditions"].as_array()?;
    conditions.iter().find(|c| c["type"] == kind && c["status"] == "True").cloned()
}

pub(super) fn until_phase(paths: &Paths, name: &str, phase: &str) -> Result<Value, String> {
    eventually(JOB, &format!("{phase} of {name}"), || {
        let job = job(paths, name)?;
        let status = &job["status"];
        if status["phase"] == phase { Ok(job) } else { Err(format!("{} {}", status["phase"], status["conditions"])) }
    })
}

/// The phases that a watch of the job shows, each once as long as it stays, until the job has ended.
fn phases(paths: &Paths, name: &str) -> Result<Vec<String>, String> {
    let mut watch = kubectl(paths)?;
    watch.args([
        "--namespace",
        NAMESPACE,
        "get",
        "rectrainingjob",
        name,
        "--watch",
        "--output=jsonpath={.status.phase}{\"\\n\"}",
    ]);
    let mut watch = watch.stdin(Stdio::null()).stdout(Stdio::piped()).spawn().map_err(|error| error.to_string())?;
    let lines = watch.stdout.take().ok_or("kubectl has no output")?;
    let mut seen: Vec<String> = Vec::new();
    for line in std::io::BufRead::lines(std::io::BufReader::new(lines)) {
        let phase = line.map_err(|error| error.to_string())?;
        if !phase.is_empty() && seen.last() != Some(&phase) {
            seen.push(phase.clone());
        }
        if phase == "Complete" || phase == "Failed" {
            break;
        }
    }
    // It watches for ever.
    let _killed = watch.kill();
    let _waited = watch.wait();
    Ok(seen)
}

fn completes(paths: &Paths) -> Result<(), String> {
    let name = "complete";
    let manifest = manifest(name, &json!({}));
    let here = outside(&manifest)?;
    apply(paths, NAMESPACE, &manifest.to_string())?;
    let seen = phases(paths, name)?;
    println!("phases: {}", seen.join(", "));
    let job = until_phase(paths, name, "Complete")?;
    let there = &job["status"]["summary"];
    println!("summary: {there}");
    for (field, expected) in [("parametersSha256", &here["parametersSha256"]), ("auc", &here["test"]["auc"])] {
        if there[field] != *expected {
            return Err(format!("{field} is {} in the cluster and {expected} outside of it", there[field]));
        }
    }
    // A watch misses one that is short.
    let mut documented = ["Pending", "Starting", "Training", "Evaluating", "Complete"].into_iter();
    let are_documented = seen.iter().all(|phase| documented.any(|next| next == phase));
    if !are_documented || seen.last().is_none_or(|last| last != "Complete") || condition(&job, "Ready").is_none() {
        return Err(format!("{seen:?}: {}", job["status"]["conditions"]));
    }
    eventually(SHOW, "the end of all pods", || no_pods(paths, name))?;
    let told = rectrain(paths, &["status", name])?;
    println!("{told}");
    if told.contains("Complete") {
        Ok(())
    } else {
        Err("`rectrain status` does not say that it is complete".to_owned())
    }
}

/// The summary of `rectrain run`, outside of the cluster.
pub(super) fn outside(manifest: &Value) -> Result<Value, String> {
    let file = std::env::temp_dir().join(format!("rectrain-{}.json", std::process::id()));
    std::fs::write(&file, manifest.to_string()).map_err(|error| error.to_string())?;
    let here = output(command(crate::built("rectrain")?, ["run", "--json"]).arg(&file));
    // Whatever came of the run, the file is not needed any more.
    let _removed = std::fs::remove_file(&file);
    last_event(&here?)
}

/// The process of the pod's container, on this machine: the pod's uid is in the name of its cgroup.
pub(super) fn process_of_pod(paths: &Paths, pod: &str) -> Result<u32, String> {
    let uid = get(paths, &format!("pod/{pod}"))?["metadata"]["uid"].as_str().unwrap_or_default().to_owned();
    let is_its = |process: u32| {
        let cgroup = std::fs::read_to_string(format!("/proc/{process}/cgroup")).unwrap_or_default();
        !uid.is_empty() && cgroup.contains(&uid)
    };
    let mut its = super::process::all().filter(|(process, words)| words.len() > 2 && is_its(*process));
    its.next().map(|(process, _)| process).ok_or_else(|| format!("{pod} has no process on this machine"))
}

/// `rectrain`, about this cluster.
fn rectrain(paths: &Paths, words: &[&str]) -> Result<String, String> {
    let mut rectrain = command(crate::built("rectrain")?, words);
    output(rectrain.args(["--namespace", NAMESPACE]).env("KUBECONFIG", super::kubeconfig(paths)?))
}

/// The command line, the API server, the operator, the coordinator: and back in the status. A mode that cannot be stops nothing.
/// The rows do not end, so that no machine is too fast for the last switch.
fn switches(paths: &Paths) -> Result<(), String> {
    let name = "switched";
    // Both of two workers would be dropped.
    let training = json!({"hopBw": {"backups": 2}});
    submit(paths, name, &json!({"data": {"synthetic": {"rows": 1_000_000_000}}, "training": training}))?;
    until_phase(paths, name, "Training")?;
    let before = pods(paths, name)?;
    let switch_between = |from: &str, to: &str| -> Result<(), String> {
        let step = job(paths, name)?["status"]["step"].as_u64().unwrap_or(0);
        let took = switch(paths, name, to)?;
        println!("{from} -> {to}: {:.1} s after the manifest was changed, near step {step}", took.as_secs_f64());
        Ok(())
    };
    switch_between("sync", "gba")?;
    switch_between("gba", "hybrid")?;
    rectrain(paths, &["mode", "set", name, "hopBw"])?;
    println!("ModeRefused: {}", shows(paths, name, "Stalled", "ModeRefused")?);
    switch_between("hybrid", "gba")?;
    let step = job(paths, name)?["status"]["step"].as_u64().unwrap_or(0);
    let job = eventually(SHOW, "progress after the last switch, with all pods ready and nothing stalled", || {
        let job = job(paths, name)?;
        let goes_on =
            job["status"]["step"].as_u64().is_some_and(|now| now > step) && condition(&job, "Ready").is_some();
        if goes_on { Ok(job) } else { Err(job["status"].to_string()) }
    })?;
    let (phase, attempt, restarts) =
        (&job["status"]["phase"], &job["status"]["attempt"]["number"], &job["status"]["restarts"]);
    if *phase != "Training" || *attempt != 1 || *restarts != 0 {
        return Err(format!("phase {phase}, attempt {attempt}, {restarts} restarts"));
    }
    let reasons = within(paths, NAMESPACE, &["get", "events", "--output=jsonpath={.items[*].reason}"])?;
    if !reasons.split_whitespace().any(|reason| reason == "ModeSwitched") {
        return Err(format!("no event tells of the switch: {reasons}"));
    }
    println!("{} pods, none restarted", before.len());
    speaks_to_its_user(paths, name, "gba")?;
    delete_job(paths, name)
}

/// `rectrain mode` and `rectrain logs` of a job that trains in a mode.
fn speaks_to_its_user(paths: &Paths, name: &str, mode: &str) -> Result<(), String> {
    let told = rectrain(paths, &["mode", name])?;
    let logs = rectrain(paths, &["logs", name, "--role", "ps", "--tail", "5"])?;
    let lines = logs.lines().count();
    println!("mode {}; {lines} lines of logs", told.trim());
    if told.trim() == mode && (1..=10).contains(&lines) { Ok(()) } else { Err(format!("{told}; {logs}")) }
}

/// Changes the training mode with the command line; the time until the status has it, with the pods that there were.
fn switch(paths: &Paths, name: &str, to: &str) -> Result<Duration, String> {
    let before = pods(paths, name)?;
    rectrain(paths, &["mode", "set", name, to])?;
    let started = Instant::now();
    eventually(SWITCH, &format!("the mode {to} of {name}"), || match &job(paths, name)?["status"] {
        status if status["mode"] == *to => Ok(()),
        status => Err(format!("it is {}; {}", status["mode"], status["attempt"])),
    })?;
    let took = started.elapsed();
    if pods(paths, name)? == before { Ok(took) } else { Err("pods were restarted".to_owned()) }
}

pub(super) fn no_pods(paths: &Paths, name: &str) -> Result<(), String> {
    let pods =
        within(paths, NAMESPACE, &["get", "pods", "--selector", &format!("rectrain.dev/job={name}"), "--output=name"])?;
    if pods.trim().is_empty() { Ok(()) } else { Err(pods) }
}

/// Everything that belongs to a job but its pods: name and identity.
pub(super) fn belongings(paths: &Paths, name: &str) -> Result<BTreeMap<String, String>, String> {
    let kinds = "serviceaccounts,configmaps,secrets,services,networkpolicies,poddisruptionbudgets,statefulsets";
    let columns = "--output=jsonpath={range .items[*]}{.kind}/{.metadata.name} {.metadata.uid}{\"\\n\"}{end}";
    let text = within(paths, NAMESPACE, &["get", kinds, "--selector", &format!("rectrain.dev/job={name}"), columns])?;
    Ok(text
        .lines()
        .filter_map(|line| line.split_once(' '))
        .map(|(name, uid)| (name.to_owned(), uid.to_owned()))
        .collect())
}

/// What a pod measures, on that port.
pub(super) fn metrics(paths: &Paths, namespace: &str, pod: &str, port: u16) -> Result<String, String> {
    let page = format!("/api/v1/namespaces/{namespace}/pods/{pod}:{port}/proxy/metrics");
    within(paths, namespace, &["get", "--raw", &page])
}

/// Deletes a pod at once: what runs in it is killed.
pub(super) fn kill_pod(paths: &Paths, namespace: &str, pod: &str) -> Result<(), String> {
    within(paths, namespace, &["delete", "pod", pod, "--grace-period=0", "--force"]).map(drop)
}

pub(super) fn pods(paths: &Paths, name: &str) -> Result<BTreeMap<String, String>, String> {
    let columns = "--output=jsonpath={range .items[*]}{.metadata.name} {.metadata.uid}{\"\\n\"}{end}";
    let text = within(paths, NAMESPACE, &["get", "pods", "--selector", &format!("rectrain.dev/job={name}"), columns])?;
    Ok(text
        .lines()
        .filter_map(|line| line.split_once(' '))
        .map(|(name, uid)| (name.to_owned(), uid.to_owned()))
        .collect())
}

fn repairs(paths: &Paths) -> Result<(), String> {
    let name = "repaired";
    submit(paths, name, &endless())?;
    until_phase(paths, name, "Training")?;
    let before = belongings(paths, name)?;
    let mut slowest = Duration::ZERO;
    for (object, uid) in &before {
        // Without its StatefulSet a role's pods go, and the job starts again: the last of the test.
        let orphan = if object.starts_with("StatefulSet") { "--cascade=orphan" } else { "--cascade=background" };
        slowest = slowest.max(relabels(paths, object)?);
        within(paths, NAMESPACE, &["delete", object, orphan, "--wait=false"])?;
        slowest = slowest.max(repaired(object, || match belongings(paths, name)?.get(object) {
            Some(now) if now != uid => Ok(()),
            other => Err(format!("it is {other:?}")),
        })?);
    }
    println!("{} objects changed and deleted; the slowest repair took {:.1} s", before.len(), slowest.as_secs_f64());
    within(paths, NAMESPACE, &["scale", &format!("statefulset/{name}-loader"), "--replicas=3"])?;
    repaired("the replicas of a StatefulSet", || {
        let replicas = get(paths, &format!("statefulset/{name}-loader"))?["spec"]["replicas"].clone();
        if replicas == 1 { Ok(()) } else { Err(replicas.to_string()) }
    })?;
    delete_job(paths, name)
}

/// A label of an object of a job is changed, and the operator changes it back; gives how long that took.
pub(super) fn relabels(paths: &Paths, object: &str) -> Result<Duration, String> {
    within(paths, NAMESPACE, &["label", object, "app.kubernetes.io/name=other", "--overwrite"])?;
    repaired(&format!("the label of {object}"), || {
        let label = get(paths, object)?["metadata"]["labels"]["app.kubernetes.io/name"].clone();
        if label == "rectrain" { Ok(()) } else { Err(format!("it is {label}")) }
    })
}

fn repaired(what: &str, check: impl FnMut() -> Result<(), String>) -> Result<Duration, String> {
    let started = Instant::now();
    eventually(REPAIR, &format!("the repair of {what}"), check)?;
    Ok(started.elapsed())
}

pub(super) fn leader(paths: &Paths) -> Result<String, String> {
    let holder = "--output=jsonpath={.spec.holderIdentity}";
    within(paths, SYSTEM, &["get", "lease/rectrain-operator", holder])
}

fn takes_over(paths: &Paths) -> Result<(), String> {
    let name = "undisturbed";
    submit(paths, name, &endless())?;
    until_phase(paths, name, "Training")?;
    let before = pods(paths, name)?;
    let old = leader(paths)?;
    kill_pod(paths, SYSTEM, &old)?;
    let started = Instant::now();
    eventually(TAKEOVER, "another leader", || match leader(paths)? {
        now if now != old && !now.is_empty() => Ok(()),
        now => Err(format!("the leader is {now:?}")),
    })?;
    println!("another instance led after {:.1} s", started.elapsed().as_secs_f64());
    until_step_after(paths, name, reached(paths, name)?)?;
    let old = attempt_image(paths, name)?;
    let has_new_image = upgrade(paths)?;
    until_step_after(paths, name, reached(paths, name)?)?;
    if pods(paths, name)? != before {
        return Err("pods were restarted".to_owned());
    }
    if has_new_image {
        kill_pod(paths, NAMESPACE, &format!("{name}-ps-0"))?;
        eventually(SHOW, "the new image in an attempt that begins later", || match attempt_image(paths, name)? {
            now if now != old => Ok(()),
            now => Err(now),
        })?;
    }
    delete_job(paths, name)?;
    install(paths, &["--set=pollSeconds=1"])
}

/// Operator and runtime in another version. The images of a cluster that is not of this machine have one name each, and there only
/// the operator's arguments change. Gives whether jobs have another image from now on.
fn upgrade(paths: &Paths) -> Result<bool, String> {
    let Some(cluster) = super::find(paths).filter(|_| super::foreign_kubeconfig(paths).is_none()) else {
        return install(paths, &["--set=pollSeconds=2"]).map(|()| false);
    };
    for image in [Image::Operator, Image::Runtime] {
        images::tag_next(&cluster, image)?;
    }
    install(paths, &["--set=pollSeconds=1", &format!("--set=image.tag={NEXT_TAG},runtimeImage.tag={NEXT_TAG}")])?;
    Ok(true)
}

/// The chart is uninstalled under a job, which stays as it is, an earlier one is installed and then this one: the job's kind is that of each,
/// and the operator goes on where it was.
fn outlives_the_chart(paths: &Paths) -> Result<(), String> {
    let name = "kept";
    submit(paths, name, &endless())?;
    until_phase(paths, name, "Training")?;
    let before = pods(paths, name)?;
    uninstall(paths)?;
    let at = reached(paths, name)?;
    let columns = || Ok::<_, String>(get(paths, CRD)?["spec"]["versions"][0]["additionalPrinterColumns"].clone());
    let all = columns()?;
    install_earlier(paths, &["--set=pollSeconds=1"])?;
    if columns()? == all {
        return Err("the kind is not that of the earlier chart".to_owned());
    }
    install(paths, &["--set=pollSeconds=1"])?;
    let later = until_step_after(paths, name, at)?;
    println!("no operator from step {at} on, and then one that went on: step {later}");
    match (columns()? == all, pods(paths, name)? == before) {
        (true, true) => delete_job(paths, name),
        (false, _) => Err("the kind is not what the chart says".to_owned()),
        (_, false) => Err("pods were restarted".to_owned()),
    }
}

fn attempt_image(paths: &Paths, name: &str) -> Result<String, String> {
    Ok(status(paths, name)?["attempt"]["image"].to_string())
}

/// A pod of each role is killed in turn, and training goes on each time: without a restart, or, where rows or the ledger are gone that no
/// checkpoint has, from the beginning.
fn survives(paths: &Paths) -> Result<(), String> {
    let name = "killed";
    submit(paths, name, &json!({"data": {"synthetic": {"rows": 4_000_000}}, "training": {"mode": "hybrid"}}))?;
    until_phase(paths, name, "Training")?;
    for role in ["loader", "embedding-worker", "dense-worker", "ps", "coordinator"] {
        let pod = format!("{name}-{role}-0");
        let uid = pods(paths, name)?.get(&pod).cloned();
        let before = status(paths, name)?["restarts"].as_u64().unwrap_or(0);
        // What only these held is gone with their pods.
        let ends_the_attempt = ["ps", "coordinator"].contains(&role);
        kill_pod(paths, NAMESPACE, &pod)?;
        let killed = Instant::now();
        let mut at = None;
        let restarts = eventually(SHOW, &format!("steps of {name} after {role} was killed"), || {
            let status = status(paths, name)?;
            let is_another = pods(paths, name)?.get(&pod).is_some_and(|now| Some(now) != uid.as_ref());
            let step = status["step"].as_u64().unwrap_or(0);
            let is_known = !ends_the_attempt || status["restarts"].as_u64().unwrap_or(0) > before;
            match at {
                None if is_another && is_known && status["phase"] == "Training" => at = Some(step),
                Some(at) if step > at => return Ok(status["restarts"].clone()),
                _ => {}
            }
            Err(format!("{} at step {step}", status["phase"]))
        })?;
        println!(
            "{role} killed: trains again after {:.0} s, {restarts} restarts so far",
            killed.elapsed().as_secs_f64()
        );
    }
    println!("phases: {}", phases(paths, name)?.join(", "));
    let job = until_phase(paths, name, "Complete")?;
    match job["status"]["restarts"].as_u64() {
        Some(restarts) if restarts >= 2 => delete_job(paths, name),
        other => Err(format!("{other:?} restarts were counted")),
    }
}

/// A node goes as in a power cut, with the operator that may be on it, and nobody says or does anything about it. What was trained on it
/// is trained again: every row counts once in the model.
fn outlives_a_node(paths: &Paths) -> Result<(), String> {
    if super::foreign_kubeconfig(paths).is_some() {
        eprintln!("xtask: SKIPPED the loss of a node, because the cluster is not of this machine");
        return Ok(());
    }
    let name = "outlived";
    let hybrid = json!({"data": {"synthetic": {"rows": 400_000}}, "training": {"mode": "hybrid"}});
    let undisturbed = outside(&manifest(name, &hybrid))?;
    submit(paths, name, &hybrid)?;
    let step = until_step_after(paths, name, 0)?;
    let node = get(paths, &format!("pod/{name}-ps-1"))?["spec"]["nodeName"].as_str().unwrap_or_default().to_owned();
    let started = Instant::now();
    let job = without_power(paths, &node, || until_phase(paths, name, "Complete"))?;
    let seconds = started.elapsed().as_secs_f64();
    println!("complete {seconds:.0} s after the node was lost, near step {step}: {}", job["status"]["attempt"]);
    match job["status"]["restarts"].as_u64() {
        Some(restarts) if restarts >= 1 => same_rows(paths, name, &undisturbed),
        other => Err(format!("{other:?} restarts were counted")),
    }
}

/// By which the controllers know that pods of a node run no more, and delete them at once.
const OUT_OF_SERVICE: &str = "node.kubernetes.io/out-of-service=nodeshutdown:NoExecute";

/// Does something while a node is without power, with all pods that were on it.
pub(super) fn without_power<T>(
    paths: &Paths,
    node: &str,
    meanwhile: impl FnOnce() -> Result<T, String>,
) -> Result<T, String> {
    super::stop_node(paths, node)?;
    let done = not_ready(paths, node).and_then(|()| meanwhile());
    super::up(paths)?;
    done
}

/// As [`without_power`], and somebody who knows of it says so.
pub(super) fn out_of_service<T>(
    paths: &Paths,
    node: &str,
    meanwhile: impl FnOnce() -> Result<T, String>,
) -> Result<T, String> {
    let taint = |change: &str| within(paths, NAMESPACE, &["taint", "node", node, &format!("{OUT_OF_SERVICE}{change}")]);
    let done = without_power(paths, node, || taint("").and_then(|_| meanwhile()));
    let taken_back = taint("-");
    done.and_then(|done| taken_back.map(|_| done))
}

fn not_ready(paths: &Paths, node: &str) -> Result<(), String> {
    let started = Instant::now();
    eventually(SHOW, &format!("that {node} is not ready"), || {
        let condition = r#"--output=jsonpath={.status.conditions[?(@.type=="Ready")].status}"#;
        match within(paths, NAMESPACE, &["get", "node", node, condition])?.as_str() {
            "True" => Err("it is ready".to_owned()),
            _ => Ok(()),
        }
    })?;
    println!("{node} was not ready after {:.0} s", started.elapsed().as_secs_f64());
    Ok(())
}

/// What is wrong with the job, the condition that it gets, its reason, and what its message says.
fn fails(paths: &Paths) -> Result<(), String> {
    let template = |role: &str, template: Value| json!({"roles": {role: {"template": template}}});
    let missing = json!({"data": {"synthetic": null, "train": {"paths": ["/data/missing.csv"]}}});
    let secret = json!({"data": {"storage": {"secretName": "nobody-made-it"}}});
    let quick = json!({"activeDeadlineSeconds": 1, "data": {"synthetic": {"rows": 1_000_000_000}}});
    // Rows come until they are more than that.
    let little = template("ps", json!({"resources": {"limits": {"memory": "64Mi"}, "requests": {"memory": "64Mi"}}}));
    let little =
        |fault_tolerance: Value| merged(merged(endless(), little.clone()), json!({"faultTolerance": fault_tolerance}));
    // The next attempt says so while it waits.
    let (no_memory, next) = (little(json!({"maxRestarts": 0})), little(json!({"backoffSeconds": 15})));
    let no_node = template("loader", no_node());
    let no_source = template("loader", json!({"volumeMounts": [{"name": "nothing", "mountPath": "/x"}]}));
    let no_account = template("loader", json!({"serviceAccountName": "nobody-made-it"}));
    // The API server does not look into these lists.
    let no_text = template("ps", json!({"env": [{"name": "DEBUG", "value": 1}]}));
    let conditions = [
        ("no-account", no_account, "Stalled", "PodsRefused", "nobody-made-it"),
        ("no-text", no_text, "Failed", "InvalidSpec", "env[0].value"),
        ("bad-input", missing, "Failed", "BadInput", "missing.csv"),
        ("no-secret", secret, "Stalled", "ContainerConfigError", "nobody-made-it"),
        ("no-node", no_node, "Reconciling", "Unschedulable", "nodeSelector"),
        ("refused", no_source, "Stalled", "ObjectRefused", "StatefulSet"),
        ("too-late", quick, "Failed", "DeadlineExceeded", "activeDeadlineSeconds"),
        ("no-memory", no_memory, "Failed", "RestartsExhausted", "memory"),
        ("out-of-memory", next, "Reconciling", "OutOfMemory", "memory"),
    ];
    let shown = conditions.into_iter().map(|(name, changes, kind, reason, says)| -> Trial<'_> {
        Box::new(move || {
            submit(paths, name, &changes)?;
            let message = shows(paths, name, kind, reason)?;
            if !message.contains(says) {
                return Err(format!("{name}: the message does not say `{says}`: {message}"));
            }
            println!("{reason}: {message}");
            delete_job(paths, name)
        })
    });
    let others = [crashes, stands_still, gets_on, taken].map(|trial| -> Trial<'_> { Box::new(move || trial(paths)) });
    side_by_side(shown.chain(others).collect())?;
    no_image(paths)
}

/// Pods that are killed are a crash: tried again after a while, and not more often than is allowed.
fn crashes(paths: &Paths) -> Result<(), String> {
    let name = "crashes";
    let once = json!({"faultTolerance": {"maxRestarts": 1, "backoffSeconds": 10}});
    submit(paths, name, &merged(endless(), once))?;
    for (kind, reason) in [("Reconciling", "Crash"), ("Failed", "RestartsExhausted")] {
        until_phase(paths, name, "Training")?;
        kill_pod(paths, NAMESPACE, &format!("{name}-ps-0"))?;
        println!("{reason}: {}", shows(paths, name, kind, reason)?);
    }
    delete_job(paths, name)
}

/// A dense worker stands still, and so does the job.
fn stands_still(paths: &Paths) -> Result<(), String> {
    if super::foreign_kubeconfig(paths).is_some() {
        eprintln!("xtask: SKIPPED a process that stands still, because the cluster is not of this machine");
        return Ok(());
    }
    let name = "stands-still";
    submit(paths, name, &merged(endless(), json!({"faultTolerance": {"stallSeconds": 10, "backoffSeconds": 15}})))?;
    until_step_after(paths, name, 0)?;
    let stopped = Stopped::process_of(paths, &format!("{name}-dense-worker-0"))?;
    println!("NoProgress: {}", shows(paths, name, "Reconciling", "NoProgress")?);
    drop(stopped);
    delete_job(paths, name)
}

/// Without a barrier no worker counts steps, and a job gets on all the same: for longer than it may stand still.
fn gets_on(paths: &Paths) -> Result<(), String> {
    let name = "gets-on";
    let mut changes = json!({"training": {"mode": "gba"}, "faultTolerance": {"stallSeconds": 20}});
    // Two cores start all these jobs at once, and pods that request nothing get next to nothing of them: not one step in 20 s was seen.
    for role in ["coordinator", "ps", "embeddingWorker", "denseWorker", "loader"] {
        changes["roles"][role]["template"]["resources"]["requests"]["cpu"] = json!("250m");
    }
    submit(paths, name, &merged(endless(), changes))?;
    until_phase(paths, name, "Training")?;
    std::thread::sleep(Duration::from_secs(35));
    let job = job(paths, name)?;
    let (phase, restarts) = (&job["status"]["phase"], job["status"]["restarts"].as_u64().unwrap_or(0));
    if phase != "Training" || restarts > 0 {
        return Err(format!("{name} is in phase {phase} after {restarts} restarts: {}", job["status"]["conditions"]));
    }
    println!("{name}: at step {} after 35 s in gba with stallSeconds: 20", job["status"]["step"]);
    delete_job(paths, name)
}

pub(super) fn merged(mut base: Value, over: Value) -> Value {
    merge(&mut base, &over);
    base
}

pub(super) fn shows(paths: &Paths, name: &str, kind: &str, reason: &str) -> Result<String, String> {
    eventually(SHOW, &format!("the condition {kind} of {name}"), || {
        let job = job(paths, name)?;
        let found = condition(&job, kind).ok_or_else(|| job["status"]["conditions"].to_string())?;
        if found["reason"] != reason {
            return Err(format!("its reason is {}: {}", found["reason"], found["message"]));
        }
        Ok(found["message"].as_str().unwrap_or_default().to_owned())
    })
}

/// Somebody else's Service has the name of one that the job needs.
fn taken(paths: &Paths) -> Result<(), String> {
    let theirs = json!({"apiVersion": "v1", "kind": "Service", "metadata": {"name": "taken-ps"}, "spec": {"ports": [{"port": 80}]}});
    apply(paths, NAMESPACE, &theirs.to_string())?;
    submit(paths, "taken", &json!({}))?;
    println!("NameConflict: {}", shows(paths, "taken", "Stalled", "NameConflict")?);
    delete_job(paths, "taken")?;
    within(paths, NAMESPACE, &["delete", "service", "taken-ps"]).map(drop)
}

/// An image that no node can get, for jobs that begin now.
fn no_image(paths: &Paths) -> Result<(), String> {
    install(paths, &["--set=pollSeconds=1", "--set=runtimeImage.tag=no-such-tag"])?;
    submit(paths, "no-image", &json!({}))?;
    println!("ImagePullFailed: {}", shows(paths, "no-image", "Stalled", "ImagePullFailed")?);
    delete_job(paths, "no-image")?;
    install(paths, &["--set=pollSeconds=1"])
}

fn leaves_nothing(paths: &Paths) -> Result<(), String> {
    let name = "gone";
    submit(paths, name, &endless())?;
    until_phase(paths, name, "Training")?;
    delete_job(paths, name)?;
    eventually(SHOW, "the end of everything that belonged to the job", || {
        let left = belongings(paths, name)?;
        if left.is_empty() { no_pods(paths, name) } else { Err(format!("{left:?}")) }
    })
}

/// A thousand jobs that hold: how long the operator takes to see them all, and what they cost. Nobody waits for their end.
fn thousand(paths: &Paths) -> Result<(), String> {
    const JOBS: usize = 1000;
    const HELD: &str = "rectrain-held";
    fresh_namespace(paths, HELD)?;
    let jobs: Vec<Value> =
        (0..JOBS).map(|index| manifest(&format!("held-{index}"), &json!({"suspend": true}))).collect();
    let list = json!({"apiVersion": "v1", "kind": "List", "items": jobs});
    let before = Costs::of(paths)?;
    let started = Instant::now();
    apply(paths, HELD, &list.to_string())?;
    let applied = started.elapsed();
    eventually(JOB, "the phases of all jobs", || {
        let phases = within(paths, HELD, &["get", "rectrainingjobs", "--output=jsonpath={.items[*].status.phase}"])?;
        let held = phases.split_whitespace().filter(|phase| *phase == "Suspended").count();
        if held >= JOBS { Ok(()) } else { Err(format!("{held} are held")) }
    })?;
    let all = started.elapsed();
    let after = Costs::of(paths)?;
    println!(
        "{JOBS} jobs applied in {:.1} s, all seen after {:.1} s; {}",
        applied.as_secs_f64(),
        all.as_secs_f64(),
        after.since(&before),
    );
    after.within_bounds(&before)?;
    within(paths, HELD, &["delete", "namespace", HELD, "--wait=false"]).map(drop)
}

/// What the leader's metrics say.
#[derive(Default)]
pub(super) struct Costs {
    pub(super) reconciles: f64,
    /// Calls to the API server.
    pub(super) calls: f64,
    /// For bounds in seconds, ascending: how many took at most that.
    within: Vec<(f64, f64)>,
    /// Bytes.
    memory: f64,
}

impl Costs {
    pub(super) fn of(paths: &Paths) -> Result<Self, String> {
        // Between two leaders there is none.
        let leader = eventually(TAKEOVER, "a leader", || match leader(paths)? {
            nobody if nobody.is_empty() => Err("the lease is nobody's".to_owned()),
            leader => Ok(leader),
        })?;
        let text = metrics(paths, SYSTEM, &leader, 8080)?;
        let samples = || text.lines().filter_map(|line| line.rsplit_once(' '));
        let value = |name: &str| -> Result<f64, String> {
            let sample = samples().find(|(sample, _)| *sample == name);
            sample
                .and_then(|(_, value)| value.parse().ok())
                .ok_or_else(|| format!("{name} is not among the operator's metrics"))
        };
        let requests = samples().filter(|(sample, _)| sample.starts_with("rectrain_operator_api_requests_total{"));
        let bucket = |(sample, count): (&str, &str)| -> Option<(f64, f64)> {
            let bound = sample.strip_prefix("rectrain_operator_reconcile_seconds_bucket{le=\"")?.strip_suffix("\"}")?;
            Some((bound.parse().ok()?, count.parse().ok()?))
        };
        Ok(Self {
            reconciles: value("rectrain_operator_reconcile_seconds_count")?,
            calls: requests.filter_map(|(_, value)| value.parse::<f64>().ok()).sum(),
            within: samples().filter_map(bucket).collect(),
            memory: value("process_resident_memory_bytes")?,
        })
    }

    /// The least bound in seconds that 99 in 100 of the reconciles after `before` kept; infinite if they kept none.
    fn p99(&self, before: &Self) -> f64 {
        let most = 0.99 * (self.reconciles - before.reconciles);
        let earlier = |bound: f64| before.within.iter().find(|(at, _)| *at == bound).map_or(0.0, |(_, count)| *count);
        let kept = self.within.iter().find(|(bound, count)| count - earlier(*bound) >= most);
        kept.map_or(f64::INFINITY, |(bound, _)| *bound)
    }

    /// Whether what there was after `before` is what a thousand jobs may cost.
    pub(super) fn within_bounds(&self, before: &Self) -> Result<(), String> {
        if self.p99(before) > 1.0 || self.memory > 200e6 {
            return Err("more than one reconcile in a hundred took over a second, or memory is above 200 MB".to_owned());
        }
        Ok(())
    }

    /// In words, what there was after `before`.
    pub(super) fn since(&self, before: &Self) -> String {
        let (reconciles, p99) = (self.reconciles - before.reconciles, self.p99(before));
        format!("{reconciles} reconciles, 99 in 100 of them within {p99} s; {:.0} MB", self.memory / 1e6)
    }
}

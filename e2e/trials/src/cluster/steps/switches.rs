//! Switches of the training mode: from the command line through API server, operator and
//! coordinator, and back in the status. A mode that the job cannot use changes nothing.

use std::time::{Duration, Instant};

use rectrain_harness::jobs::{Jobs, condition};
use rectrain_harness::not_yet;
use rectrain_harness::waiting::eventually;
use serde_json::json;

use crate::TrialError;
use crate::cluster::support::TestCluster;
use crate::error::unmet;

/// How long a switch may take. An idle machine needs a few seconds.
const SWITCH: Duration = Duration::from_secs(30);
/// The job switches to these modes too, in this order. `hopBw` is refused here.
const OTHERS: [&str; 6] = ["shadow", "des", "async", "bsp", "hopBs", "sync"];
/// How long the first step after the last switch may take.
const PROGRESS: Duration = Duration::from_secs(180);

pub(in crate::cluster) fn switches(cluster: &TestCluster) -> Result<(), TrialError> {
    let (jobs, name) = (&cluster.jobs, "switched");
    // With two backups hopBw would drop the gradients of both workers.
    let training = json!({"hopBw": {"backups": 2}});
    // The rows outlast the last switch on a machine of any speed.
    jobs.submit(name, &json!({"data": {"synthetic": {"rows": 1_000_000_000}}, "training": training}))?;
    jobs.until_phase(name, "Training")?;
    let before = jobs.pods(name)?;
    switch_between(jobs, name, "sync", "gba")?;
    switch_between(jobs, name, "gba", "hybrid")?;
    jobs.rectrain(&["mode", "set", name, "hopBw"])?;
    println!("ModeRefused: {}", jobs.until_condition(name, "Stalled", "ModeRefused")?);
    switch_between(jobs, name, "hybrid", "gba")?;
    let mut from = "gba";
    for to in OTHERS {
        switch_between(jobs, name, from, to)?;
        from = to;
    }
    switch_between(jobs, name, from, "gba")?;
    has_not_restarted(jobs, name)?;
    let reasons = jobs.within(&["get", "events", "--output=jsonpath={.items[*].reason}"])?;
    if !reasons.split_whitespace().any(|reason| reason == "ModeSwitched") {
        return Err(unmet("an event with the reason ModeSwitched", reasons));
    }
    println!("{} pods, none restarted", before.len());
    answers_its_user(jobs, name, "gba")?;
    Ok(jobs.delete(name)?)
}

/// Waits for a step after the last switch, with all pods ready, and checks that the job is in its
/// first attempt.
fn has_not_restarted(jobs: &Jobs, name: &str) -> Result<(), TrialError> {
    let step = jobs.step(name)?;
    let job = eventually(PROGRESS, "a step after the last switch, with the condition Ready", || {
        let job = jobs.job(name)?;
        let is_past = job["status"]["step"].as_u64().is_some_and(|now| now > step);
        if is_past && condition(&job, "Ready").is_some() { Ok(job) } else { Err(not_yet(&job["status"])) }
    })?;
    let status = &job["status"];
    let (phase, attempt, restarts) = (&status["phase"], &status["attempt"]["number"], &status["restarts"]);
    if *phase == "Training" && *attempt == 1 && *restarts == 0 {
        return Ok(());
    }
    let found = format!("phase {phase}, attempt {attempt}, {restarts} restarts");
    Err(unmet("training in the first attempt without a restart", found))
}

/// Checks `rectrain mode` and `rectrain logs`.
fn answers_its_user(jobs: &Jobs, name: &str, mode: &str) -> Result<(), TrialError> {
    let answer = jobs.rectrain(&["mode", name])?;
    let logs = jobs.rectrain(&["logs", name, "--role", "ps", "--tail", "5"])?;
    let lines = logs.lines().count();
    println!("mode {}; {lines} lines of logs", answer.trim());
    if answer.trim() == mode && (1..=10).contains(&lines) {
        return Ok(());
    }
    Err(unmet(format!("the mode {mode} and some logs"), format!("the mode {answer} and the logs {logs}")))
}

fn switch_between(jobs: &Jobs, name: &str, from: &str, to: &str) -> Result<(), TrialError> {
    let step = jobs.step(name)?;
    let took = switch(jobs, name, to)?;
    println!("{from} -> {to}: {:.1} s after the manifest was changed, near step {step}", took.as_secs_f64());
    Ok(())
}

/// Switches with the command line; returns the time until the status has the mode. All pods stay.
fn switch(jobs: &Jobs, name: &str, to: &str) -> Result<Duration, TrialError> {
    let before = jobs.pods(name)?;
    jobs.rectrain(&["mode", "set", name, to])?;
    let started = Instant::now();
    eventually(SWITCH, &format!("the mode {to} of {name}"), || match &jobs.status(name)? {
        status if status["mode"] == *to => Ok(()),
        status => Err(not_yet(format!("it is {}; {}", status["mode"], status["attempt"]))),
    })?;
    let took = started.elapsed();
    let after = jobs.pods(name)?;
    if after == before { Ok(took) } else { Err(unmet(format!("the pods {before:?}"), format!("{after:?}"))) }
}

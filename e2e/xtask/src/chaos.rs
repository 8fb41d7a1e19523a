//! `cargo xtask chaos`: trains a job in processes of its own and kills them with SIGKILL, at random and by a seed that is printed,
//! then compares with the same job left alone. Kills fall on any role, while it trains, while it starts and restores, and while it
//! saves; after each one the run has to begin again by itself.

use std::process::{Child, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::{Duration, Instant};

use serde_json::{Value, json};

use crate::random::Random;
use crate::run_processes::{self, children_of};

const USAGE: &str = "usage: cargo xtask chaos [--manifest FILE] [--mode sync] [--kills 20] [--seed 7] [--set PATH=VALUE]
  the run gets a folder of its own as spec.checkpoint.path, which is deleted in the end
  prints each kill, and last one line of JSON: kills, whether the trained models are equal, rows lost, gradients that parameter servers
  lack or have twice, batches trained again, the difference of the test AUC, and the longest time until a killed parameter server was
  back with its rows; fails where rows or gradients are lost or twice, or where `sync` trains another model";
/// Nothing said for so long means that the run hangs.
const SILENCE: Duration = Duration::from_secs(180);
/// Startup, in which a kill meets processes that start, join or restore.
const STARTUP: Duration = Duration::from_millis(1500);

struct Plan {
    manifest: String,
    mode: String,
    kills: u32,
    seed: u64,
    sets: Vec<String>,
}

/// When a kill falls: at the latest when so many batches are trained.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Moment {
    batch: u64,
    before: Before,
}

/// What it may fall after before that.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Before {
    Nothing,
    /// So long after the one that was killed before is back.
    Startup(Duration),
    /// So long after a checkpoint was saved: with one every few steps, while the next one is being written.
    Checkpoint(Duration),
}

pub(crate) fn run(arguments: &[&str]) -> Result<(), String> {
    let plan = parse(arguments)?;
    crate::cargo(&["build", "--release", "--workspace", "--bins", "--tests"], "the build failed")?;
    let alone = left_alone(&plan)?;
    let steps = alone["steps"].as_u64().ok_or("the summary has no steps")?;
    println!("seed {}: {} kills over {steps} steps", plan.seed, plan.kills);
    let folder = std::env::temp_dir().join(format!("rectrain-chaos-{}", std::process::id()));
    let killed = killed(&plan, &moments(&plan, steps), &folder.display().to_string());
    let removed = std::fs::remove_dir_all(&folder);
    let (killed, kills) = killed?;
    removed.map_err(|error| format!("cannot remove {}: {error}", folder.display()))?;
    report(&plan, &alone, &killed, &kills)
}

/// What was done to a run.
#[derive(Debug, Default)]
struct Kills {
    done: u32,
    /// When a parameter server was killed that is not back yet.
    server: Option<Instant>,
    longest_server_restart: Duration,
}

fn parse(arguments: &[&str]) -> Result<Plan, String> {
    let mut plan = Plan {
        manifest: "docs/examples/chaos.yaml".to_owned(),
        mode: "sync".to_owned(),
        kills: 20,
        seed: 7,
        sets: Vec::new(),
    };
    for pair in arguments.chunks(2) {
        match pair {
            ["--manifest", file] => plan.manifest = (*file).to_owned(),
            ["--mode", mode] => plan.mode = (*mode).to_owned(),
            ["--kills", kills] => plan.kills = kills.parse().map_err(|_| USAGE.to_owned())?,
            ["--seed", seed] => plan.seed = seed.parse().map_err(|_| USAGE.to_owned())?,
            ["--set", set] => plan.sets.push((*set).to_owned()),
            _ => return Err(USAGE.to_owned()),
        }
    }
    plan.sets.push(format!("spec.training.mode={}", plan.mode));
    Ok(plan)
}

/// The job without a kill and without checkpoints.
fn left_alone(plan: &Plan) -> Result<Value, String> {
    let none = "spec.checkpoint=null".to_owned();
    let mut job = crate::job(&plan.manifest, plan.sets.iter().chain([&none]))?;
    job.arg("--processes");
    crate::last_event(&crate::output(job)?)
}

/// When the kills fall: most while it trains, spread over the steps but for the last fifth, in which those fall that had to wait.
fn moments(plan: &Plan, steps: u64) -> Vec<Moment> {
    let mut random = Random(plan.seed);
    let mut batches: Vec<u64> = (0..plan.kills).map(|_| random.below((steps / 5 * 4).max(1))).collect();
    batches.sort_unstable();
    let mut before = || match random.below(10) {
        0 | 1 => Before::Startup(STARTUP.mul_f64(random.fraction())),
        2 | 3 => Before::Checkpoint(Duration::from_millis(random.below(150))),
        _ => Before::Nothing,
    };
    batches.into_iter().map(|batch| Moment { batch, before: before() }).collect()
}

/// The job with the kills; gives its summary.
fn killed(plan: &Plan, moments: &[Moment], folder: &str) -> Result<(Value, Kills), String> {
    let own = format!(
        "spec.checkpoint.path={folder},spec.faultTolerance.maxRestarts={},spec.faultTolerance.backoffSeconds=1",
        2 * plan.kills + 10
    );
    let mut job = crate::job(&plan.manifest, plan.sets.iter().chain([&own]))?;
    job.arg("--processes").stdout(Stdio::piped());
    let mut run = job.spawn().map_err(|error| format!("cannot run rectrain: {error}"))?;
    let (sender, events) = channel();
    run_processes::tell(run.stdout.take(), sender, |line| serde_json::from_str(line).ok())?;
    let result = kill_at(&mut run, &events, moments, Random(plan.seed ^ 0x5eed));
    let status = run_processes::end(&mut run, &result)?;
    let (summary, kills) = result?;
    let summary = summary.ok_or(format!("the run ended with {status} and no summary after {} kills", kills.done))?;
    Ok((summary, kills))
}

fn kill_at(
    run: &mut Child,
    events: &Receiver<Value>,
    moments: &[Moment],
    mut random: Random,
) -> Result<(Option<Value>, Kills), String> {
    let (mut kills, mut moments) = (Kills::default(), moments.iter().copied());
    let mut next = moments.next();
    let mut due: Option<Instant> = None;
    let mut down = false;
    loop {
        let wait = due.map_or(SILENCE, |due| due.saturating_duration_since(Instant::now()));
        let event = match events.recv_timeout(wait) {
            Ok(event) => event,
            Err(RecvTimeoutError::Disconnected) => return Ok((None, kills)),
            Err(RecvTimeoutError::Timeout) if due.is_some() => Value::Null,
            Err(RecvTimeoutError::Timeout) => return Err(format!("the run has said nothing for {SILENCE:?}")),
        };
        match event["event"].as_str() {
            Some("summary") => return Ok((Some(event), kills)),
            // A member that had not joined yet is replaced without a word.
            Some("started") => down = false,
            Some("restarting" | "rejoined" | "serverKeptRows" | "coordinatorTakenUp") => {
                down = false;
                if let Some(killed) = kills.server.take().filter(|_| event["event"] == "serverKeptRows") {
                    kills.longest_server_restart = kills.longest_server_restart.max(killed.elapsed());
                }
                let pause = Duration::from_secs(event["seconds"].as_u64().unwrap_or(0));
                if let Some(Before::Startup(after)) = next.map(|next| next.before) {
                    due = Some(Instant::now() + pause + after);
                }
            }
            Some("checkpointSaved") if !down => {
                if let Some(Before::Checkpoint(after)) = next.map(|next| next.before) {
                    due = due.or(Some(Instant::now() + after));
                }
            }
            Some("progress") if !down => {
                let step = event["step"].as_u64().unwrap_or(0);
                if next.is_some_and(|next| step >= next.batch) {
                    due = Some(Instant::now());
                }
            }
            _ => {}
        }
        if due.is_some_and(|due| due <= Instant::now()) {
            due = None;
            if let Some(killed) = kill_one(run.id(), &mut random)? {
                kills.done += 1;
                kills.server = (killed == "ps").then(Instant::now);
                down = true;
                let Moment { batch, before } = next.unwrap_or(Moment { batch: 0, before: Before::Nothing });
                println!("kill {}: {killed} (batch {batch}, before {before:?})", kills.done);
                next = moments.next();
            } else {
                due = Some(Instant::now() + Duration::from_millis(50));
            }
        }
    }
}

/// Kills one of the run's processes; gives its role. None while there is none.
fn kill_one(run: u32, random: &mut Random) -> Result<Option<String>, String> {
    let children = children_of(run);
    if children.is_empty() {
        return Ok(None);
    }
    let (process, role) = &children[random.below(children.len() as u64) as usize];
    Ok(run_processes::kill(*process)?.then(|| role.clone()))
}

fn report(plan: &Plan, alone: &Value, killed: &Value, kills: &Kills) -> Result<(), String> {
    let number = |summary: &Value, name: &str| summary[name].as_u64().ok_or(format!("the summary has no {name}"));
    let equal = alone["parametersSha256"] == killed["parametersSha256"];
    let rows = |summary: &Value| number(summary, "trainedRows");
    let lost = rows(alone)?.saturating_sub(rows(killed)?);
    let twice = rows(killed)?.saturating_sub(rows(alone)?);
    let (missing, doubled) = gradients(killed)?;
    let auc = |summary: &Value| summary["test"]["auc"].as_f64().ok_or("the summary has no test AUC");
    println!(
        "{}",
        json!({ "kills": kills.done, "digestEqual": equal, "rowsLost": lost, "rowsTwice": twice, "gradientsMissing": missing, "gradientsTwice": doubled,
            "tokensLost": number(killed, "tokensLost")?, "batchesRepeated": number(killed, "repeatedBatches")?,
            "aucDifference": auc(killed)? - auc(alone)?, "restarts": number(killed, "restarts")?,
            "longestServerRestartSeconds": kills.longest_server_restart.as_secs_f64(), "mode": plan.mode, "seed": plan.seed })
    );
    if kills.done < plan.kills {
        return Err(format!("the job ended after {} of {} kills: give it more rows", kills.done, plan.kills));
    }
    if lost > 0 || twice > 0 {
        return Err(format!("{lost} rows were lost and {twice} are in the model twice"));
    }
    if missing > 0 || doubled > 0 {
        return Err(format!(
            "servers lack {missing} gradients that the coordinator has as applied, or have {doubled} twice"
        ));
    }
    if plan.mode == "sync" && !equal {
        return Err("sync trained another model after the kills".to_owned());
    }
    Ok(())
}

/// What the parameter servers have applied without a barrier, against the coordinator's ledger: tokens that it handed out and does not
/// count as lost. Gradients that a server lacks, and that one has beyond that.
fn gradients(summary: &Value) -> Result<(u64, u64), String> {
    let number = |name: &str| summary[name].as_u64().ok_or(format!("the summary has no {name}"));
    let expected = number("tokensIssued")?.saturating_sub(number("tokensLost")?);
    let (fewest, most) = (number("fewestAppliedGradients")?, number("mostAppliedGradients")?);
    Ok((expected.saturating_sub(fewest), most.saturating_sub(expected)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_seed_gives_the_same_kills_and_most_fall_while_it_trains() {
        let plan = |seed| Plan { kills: 200, seed, ..parse(&[]).unwrap() };
        let all = moments(&plan(7), 1000);
        assert_eq!(all, moments(&plan(7), 1000));
        assert_ne!(all, moments(&plan(8), 1000));
        let training = all.iter().filter(|moment| moment.before == Before::Nothing).count();
        assert!((80..180).contains(&training), "{training}");
        assert!(all.iter().any(|moment| matches!(moment.before, Before::Startup(_))));
        assert!(all.is_sorted_by_key(|moment| moment.batch));
    }

    #[test]
    fn a_gradient_that_one_server_lacks_and_one_that_another_has_twice_are_both_found() {
        let summary =
            json!({"tokensIssued": 105, "tokensLost": 5, "fewestAppliedGradients": 99, "mostAppliedGradients": 101});
        assert_eq!(gradients(&summary), Ok((1, 1)));
        assert!(gradients(&json!({"tokensIssued": 1})).is_err());
    }

    #[test]
    fn a_processes_children_are_found_with_their_role() {
        let mut child = std::process::Command::new("sleep").arg("60").spawn().unwrap();
        let begun = Instant::now();
        let mut children = Vec::new();
        while !children.contains(&(child.id(), "60".to_owned())) && begun.elapsed() < Duration::from_secs(10) {
            children = children_of(std::process::id());
        }
        child.kill().unwrap();
        child.wait().unwrap();
        assert!(children.contains(&(child.id(), "60".to_owned())), "{children:?}");
    }
}

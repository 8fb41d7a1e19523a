//! `cargo xtask migration kills`: a `sync` job in processes of its own goes from two parameter servers to three and is killed at a message
//! of that, once for each message and each role, and has to train what it trains left alone. That a process gets a message is read in its
//! log, so a kill falls while it is answered, or just after.

use std::collections::BTreeMap;
use std::path::Path;
use std::process::{Child, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::Duration;

use serde_json::{Value, json};

use crate::run_processes::{self, children_of};

const MANIFEST: &str = "docs/examples/chaos.yaml";
const NAME: &str = "migration-kills";
const FROM: u32 = 2;
const TO: u32 = 3;
/// Nothing said for so long means that the run hangs.
const SILENCE: Duration = Duration::from_secs(120);
/// Every role: of the parameter servers one that slots leave, and the one that they go to.
const VICTIMS: [(&str, u32); 6] =
    [("coordinator", 0), ("ps", 0), ("ps", 2), ("embedding-worker", 0), ("dense-worker", 0), ("loader", 0)];

/// What a run says.
enum Said {
    Event(Value),
    /// A parameter server got a message of this kind.
    Message(String),
}

/// The `occurrence`th message of a kind, counted from 1.
#[derive(Clone, Debug)]
struct Moment {
    kind: String,
    occurrence: usize,
}

struct Run {
    summary: Value,
    /// Messages by kind, in order of their first.
    messages: Vec<(String, usize)>,
    /// Whether somebody was killed.
    was_killed: bool,
}

pub(super) fn run() -> Result<(), String> {
    crate::cargo(&["build", "--release", "--workspace", "--bins", "--tests"], "the build failed")?;
    let folder = std::env::temp_dir().join(format!("rectrain-{NAME}-{}", std::process::id()));
    let checkpoints = |name: &str| folder.join(name);
    let alone = train(&checkpoints("alone"), false, None)?.summary;
    let moved = train(&checkpoints("moved"), true, None)?;
    check("nobody", &alone, &moved.summary)?;
    let moments = moments(&moved.messages);
    println!("{}", json!({"messages": moved.messages.iter().cloned().collect::<BTreeMap<_, _>>()}));
    // That each model is the same is what it has come to the end for.
    let (mut kills, mut restarts, mut batches_again) = (0u64, 0, 0);
    for moment in &moments {
        for victim in VICTIMS {
            let what = format!("{} {} at {} {}", victim.0, victim.1, moment.kind, moment.occurrence);
            let killed = train(&checkpoints(&what.replace(' ', "-")), true, Some((moment, victim)))
                .map_err(|error| format!("{what}: {error}"))?;
            check(&what, &alone, &killed.summary)?;
            let number = |name: &str| killed.summary[name].as_u64().unwrap_or(0);
            println!(
                "{}",
                json!({"victim": format!("{} {}", victim.0, victim.1), "message": moment.kind, "occurrence": moment.occurrence,
                    "killed": killed.was_killed, "restarts": number("restarts"), "batchesRepeated": number("repeatedBatches")})
            );
            kills += u64::from(killed.was_killed);
            restarts += number("restarts");
            batches_again += number("repeatedBatches");
        }
    }
    // Left by a run that was stopped, at worst, in the folder for such things.
    let _removed = std::fs::remove_dir_all(&folder);
    println!("{}", json!({"kills": kills, "restarts": restarts, "batchesRepeated": batches_again}));
    Ok(())
}

/// The first message of each kind and the last one, and each of those that come a few times.
fn moments(messages: &[(String, usize)]) -> Vec<Moment> {
    let of = |(kind, count): &(String, usize)| {
        let occurrences = if *count <= 5 { (1..=*count).collect() } else { vec![1, count / 2, *count] };
        let kind = kind.clone();
        occurrences.into_iter().map(move |occurrence| Moment { kind: kind.clone(), occurrence }).collect::<Vec<_>>()
    };
    messages.iter().flat_map(of).collect()
}

fn check(what: &str, alone: &Value, other: &Value) -> Result<(), String> {
    for name in ["parametersSha256", "trainedRows"] {
        if alone[name] != other[name] || alone[name].is_null() {
            return Err(format!(
                "{what} was killed: {name} is {}, and {} of the job left alone",
                other[name], alone[name]
            ));
        }
    }
    Ok(())
}

/// Trains; with `moves`, slots go to other servers; with a `kill`, somebody is killed meanwhile.
fn train(checkpoints: &Path, moves: bool, kill: Option<(&Moment, (&str, u32))>) -> Result<Run, String> {
    let sets = [
        format!("metadata.name={NAME}"),
        "spec.training.mode=sync,spec.training.epochs=1,spec.data.synthetic.rows=50000".to_owned(),
        format!("spec.roles.ps.replicas={FROM},spec.faultTolerance.backoffSeconds=1"),
        format!("spec.checkpoint.path={}", checkpoints.display()),
    ];
    let mut job = crate::job(MANIFEST, &sets)?;
    job.args(["--processes", "--slow", "denseWorker-0=6x"]);
    job.env("RECTRAIN_LOG", "info,rectrain_parameter_server=debug").stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = job.spawn().map_err(|error| format!("cannot run rectrain: {error}"))?;
    let followed = follow(&mut child, moves, kill);
    let status = run_processes::end(&mut child, &followed)?;
    let run = followed?;
    if status.success() { Ok(run) } else { Err(format!("rectrain ended with {status}")) }
}

fn follow(child: &mut Child, moves: bool, kill: Option<(&Moment, (&str, u32))>) -> Result<Run, String> {
    let said = listen(child)?;
    let mut run = Run { summary: Value::Null, messages: Vec::new(), was_killed: false };
    let mut is_asked = !moves;
    loop {
        let said = match said.recv_timeout(SILENCE) {
            Ok(said) => said,
            Err(RecvTimeoutError::Disconnected) if run.summary.is_null() => return Err("it gave no summary".to_owned()),
            Err(RecvTimeoutError::Disconnected) => return Ok(run),
            Err(RecvTimeoutError::Timeout) => return Err(format!("it has said nothing for {SILENCE:?}")),
        };
        match said {
            Said::Event(event) => match event["event"].as_str() {
                Some("progress") if !std::mem::replace(&mut is_asked, true) => super::scale(TO, NAME)?,
                Some("summary") => run.summary = event,
                _ => {}
            },
            Said::Message(kind) => {
                let count = match run.messages.iter_mut().find(|(of, _)| *of == kind) {
                    Some((_, count)) => {
                        *count += 1;
                        *count
                    }
                    None => {
                        run.messages.push((kind.clone(), 1));
                        1
                    }
                };
                if let Some((moment, victim)) = kill
                    && !run.was_killed
                    && moment.kind == kind
                    && moment.occurrence == count
                {
                    run.was_killed = kill_member(child.id(), victim)?;
                }
            }
        }
    }
}

fn kill_member(run: u32, (role, index): (&str, u32)) -> Result<bool, String> {
    let is_it = |process: u32| {
        let line = std::fs::read(format!("/proc/{process}/cmdline")).unwrap_or_default();
        let mut words = line.split(|byte| *byte == 0).skip_while(|word| *word != b"--index").skip(1);
        words.next().is_none_or(|of| of == index.to_string().as_bytes())
    };
    let Some((process, _)) = children_of(run).into_iter().find(|(process, of)| of == role && is_it(*process)) else {
        return Ok(false);
    };
    run_processes::kill(process)
}

/// What it prints, as it comes.
fn listen(child: &mut Child) -> Result<Receiver<Said>, String> {
    let (sender, receiver) = channel();
    run_processes::tell(child.stdout.take(), sender.clone(), |line| {
        Some(Said::Event(serde_json::from_str(line).ok()?))
    })?;
    run_processes::tell(child.stderr.take(), sender, |line| Some(Said::Message(message(line)?.to_owned())))?;
    Ok(receiver)
}

/// The kind of message that a line of the log tells of.
fn message(line: &str) -> Option<&str> {
    let (_, rest) = line.split_once("a message about slots kind=\"")?;
    Some(rest.split_once('"')?.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_are_found_in_a_log() {
        let line = "INFO rectrain::processes: DEBUG rectrain_parameter_server: a message about slots kind=\"copy_slot\" process=ps 0";
        assert_eq!(message(line), Some("copy_slot"));
        assert_eq!(message("INFO joining"), None);
    }

    #[test]
    fn the_first_and_the_last_message_of_a_kind_are_moments() {
        let moments = moments(&[("seal_slots".to_owned(), 2), ("copy_slot".to_owned(), 300)]);
        let all: Vec<_> = moments.iter().map(|moment| (moment.kind.as_str(), moment.occurrence)).collect();
        assert_eq!(
            all,
            [("seal_slots", 1), ("seal_slots", 2), ("copy_slot", 1), ("copy_slot", 150), ("copy_slot", 300)]
        );
    }
}

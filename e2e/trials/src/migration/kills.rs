//! `cargo xtask migration kills`: a `sync` job in many processes goes from two parameter servers to
//! three. Each run kills one member at one message of the migration, and has to train the model of
//! an undisturbed run.
//!
//! The trial sees a message in the log of the server that receives it. So the kill hits while the
//! server handles the message, or just after.

use std::collections::BTreeMap;
use std::path::Path;
use std::process::{Child, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::Duration;

use rectrain_harness::cargo::build_programs;
use rectrain_harness::command::start;
use rectrain_harness::files::temporary_folder;
use rectrain_harness::processes::children_of;
use rectrain_harness::rectrain::{job, scale_servers};
use rectrain_harness::{HarnessError, run_processes};
use serde_json::{Value, json};

use crate::TrialError;
use crate::error::unmet;

const MANIFEST: &str = "docs/examples/chaos.yaml";
const NAME: &str = "migration-kills";
const FROM: u32 = 2;
const TO: u32 = 3;
/// A run that prints nothing for this long hangs.
const SILENCE: Duration = Duration::from_secs(120);
/// A member of every role. Of the parameter servers, one that slots leave, and the one that they
/// move to.
const VICTIMS: [Member; 6] =
    [("coordinator", 0), ("ps", 0), ("ps", 2), ("embedding-worker", 0), ("dense-worker", 0), ("loader", 0)];

/// A line that a run prints.
enum Line {
    /// An event on standard output.
    Event(Value),
    /// A log line: a parameter server received a message of this kind.
    Message(String),
}

/// The message of a kind at which a member is killed.
#[derive(Clone, Debug)]
struct Moment {
    kind: String,
    /// The number of the message among those with this kind, from 1.
    occurrence: usize,
}

/// The role and the index of a member.
type Member = (&'static str, u32);

/// A kill in a run.
#[derive(Clone, Copy)]
struct Kill<'a> {
    moment: &'a Moment,
    victim: Member,
}

/// The result of a run.
struct Run {
    summary: Value,
    /// The number of messages by kind, in the order of first occurrence.
    messages: Vec<(String, usize)>,
    /// Whether the victim was killed.
    was_killed: bool,
}

/// See the module's text.
pub(super) fn run() -> Result<(), TrialError> {
    build_programs()?;
    let folder = temporary_folder(NAME);
    let checkpoints = |name: &str| folder.join(name);
    let alone = train(&checkpoints("alone"), false, None)?.summary;
    let moved = train(&checkpoints("moved"), true, None)?;
    check("no member", &alone, &moved.summary)?;
    let moments = moments(&moved.messages);
    println!("{}", json!({"messages": moved.messages.iter().cloned().collect::<BTreeMap<_, _>>()}));
    let (mut kills, mut restarts, mut batches_again) = (0u64, 0, 0);
    for moment in &moments {
        for victim in VICTIMS {
            let name = format!("{} {} at {} {}", victim.0, victim.1, moment.kind, moment.occurrence);
            let kill = Kill { moment, victim };
            let killed = train(&checkpoints(&name.replace(' ', "-")), true, Some(kill));
            let killed = killed.map_err(TrialError::part(format!("{name} killed")))?;
            check(&name, &alone, &killed.summary)?;
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
    // A failed run leaves its folder among the temporary files, for a look at the checkpoints.
    let _removed = std::fs::remove_dir_all(&folder);
    println!("{}", json!({"kills": kills, "restarts": restarts, "batchesRepeated": batches_again}));
    Ok(())
}

/// The moments of the kills: every message of a rare kind; the first, middle and last one of a
/// frequent kind.
fn moments(messages: &[(String, usize)]) -> Vec<Moment> {
    let of = |(kind, count): &(String, usize)| {
        let occurrences = if *count <= 5 { (1..=*count).collect() } else { vec![1, count / 2, *count] };
        let kind = kind.clone();
        occurrences.into_iter().map(move |occurrence| Moment { kind: kind.clone(), occurrence }).collect::<Vec<_>>()
    };
    messages.iter().flat_map(of).collect()
}

/// Compares the model and the trained rows with those in the undisturbed run `alone`.
fn check(killed: &str, alone: &Value, other: &Value) -> Result<(), TrialError> {
    for field in ["parametersSha256", "trainedRows"] {
        if alone[field] != other[field] || alone[field].is_null() {
            let found = format!("{} ({killed} was killed)", other[field]);
            return Err(unmet(format!("{field} {}, as in the undisturbed run", alone[field]), found));
        }
    }
    Ok(())
}

/// Trains the job. With `moves`, another server joins; with `kill`, a member is killed meanwhile.
fn train(checkpoints: &Path, moves: bool, kill: Option<Kill<'_>>) -> Result<Run, TrialError> {
    let sets = [
        format!("metadata.name={NAME}"),
        "spec.training.mode=sync,spec.training.epochs=1,spec.data.synthetic.rows=50000".to_owned(),
        format!("spec.roles.ps.replicas={FROM},spec.faultTolerance.backoffSeconds=1"),
        format!("spec.checkpoint.path={}", checkpoints.display()),
    ];
    let mut job = job(MANIFEST, &sets)?;
    job.args(["--processes", "--slow", "denseWorker-0=6x"]);
    job.env("RECTRAIN_LOG", "info,rectrain_parameter_server=debug").stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = start(&mut job)?;
    let followed = follow(&mut child, moves, kill);
    let status = run_processes::end(&mut child, &followed)?;
    let run = followed?;
    if status.success() { Ok(run) } else { Err(unmet("a run that succeeds", format!("it ended with {status}"))) }
}

/// Follows a run to its end.
fn follow(child: &mut Child, moves: bool, kill: Option<Kill<'_>>) -> Result<Run, TrialError> {
    let lines = listen(child)?;
    let mut run = Run { summary: Value::Null, messages: Vec::new(), was_killed: false };
    let mut is_asked = !moves;
    loop {
        let line = match lines.recv_timeout(SILENCE) {
            Ok(line) => line,
            Err(RecvTimeoutError::Disconnected) if run.summary.is_null() => {
                return Err(unmet("a summary", "the run ended without one"));
            }
            Err(RecvTimeoutError::Disconnected) => return Ok(run),
            Err(RecvTimeoutError::Timeout) => return Err(unmet("output", format!("silence for {SILENCE:?}"))),
        };
        match line {
            Line::Event(event) => match event["event"].as_str() {
                Some("progress") if !std::mem::replace(&mut is_asked, true) => scale_servers(TO, NAME)?,
                Some("summary") => run.summary = event,
                _ => {}
            },
            Line::Message(kind) => {
                let count = run.count(&kind);
                if let Some(Kill { moment, victim }) = kill
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

impl Run {
    /// Counts a message; returns how many of its kind there were so far.
    fn count(&mut self, kind: &str) -> usize {
        if let Some((_, count)) = self.messages.iter_mut().find(|(counted, _)| counted == kind) {
            *count += 1;
            return *count;
        }
        self.messages.push((kind.to_owned(), 1));
        1
    }
}

/// Kills a member of the run; returns false if it has no process.
fn kill_member(run: u32, (role, index): Member) -> Result<bool, HarnessError> {
    let matches = |process: u32| {
        let line = std::fs::read(format!("/proc/{process}/cmdline")).unwrap_or_default();
        let mut words = line.split(|byte| *byte == 0).skip_while(|word| *word != b"--index").skip(1);
        words.next().is_none_or(|of| of == index.to_string().as_bytes())
    };
    let Some((process, _)) = children_of(run).into_iter().find(|(process, of)| of == role && matches(*process)) else {
        return Ok(false);
    };
    run_processes::kill(process)
}

/// The run's lines as they are printed.
fn listen(child: &mut Child) -> Result<Receiver<Line>, HarnessError> {
    let (sender, receiver) = channel();
    run_processes::forward_lines(child.stdout.take(), sender.clone(), |line| {
        Some(Line::Event(serde_json::from_str(line).ok()?))
    })?;
    run_processes::forward_lines(child.stderr.take(), sender, |line| Some(Line::Message(message(line)?.to_owned())))?;
    Ok(receiver)
}

/// The kind of the message that a log line reports.
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
    fn every_rare_message_and_some_frequent_ones_are_moments() {
        let moments = moments(&[("seal_slots".to_owned(), 2), ("copy_slot".to_owned(), 300)]);
        let all: Vec<_> = moments.iter().map(|moment| (moment.kind.as_str(), moment.occurrence)).collect();
        assert_eq!(
            all,
            [("seal_slots", 1), ("seal_slots", 2), ("copy_slot", 1), ("copy_slot", 150), ("copy_slot", 300)]
        );
    }
}

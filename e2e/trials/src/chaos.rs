//! `cargo xtask chaos`: trains a job in many processes, kills some of them with SIGKILL, and
//! compares the result with an undisturbed run of the same job.
//!
//! A seed, which is printed, decides the kills. They hit any role, while the job trains, starts,
//! restores or saves. The run has to recover from each one by itself.

use std::process::Stdio;
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::{Duration, Instant};

use rectrain_harness::arguments::number;
use rectrain_harness::cargo::build_programs;
use rectrain_harness::command::start;
use rectrain_harness::events::{integer, missing, test_auc};
use rectrain_harness::files::temporary_folder;
use rectrain_harness::kafka::Broker;
use rectrain_harness::processes::children_of;
use rectrain_harness::rectrain::{job, movielens_data, replay, train};
use rectrain_harness::{HarnessError, run_processes};
use rectrain_random::SplitMix64;
use serde_json::{Value, json};

use crate::TrialError;
use crate::error::unmet;

const USAGE: &str = "usage: cargo xtask chaos [--manifest FILE] [--mode sync] [--kills 20] [--seed 7] \
[--source kafka] \
[--set PATH=VALUE]
  --source kafka trains MovieLens from a Kafka topic of 8 partitions, and the broker may be a victim, too.
  The run gets a checkpoint folder of its own, which is deleted at the end.
  Prints each kill, and at the end one line of JSON: the number of kills, whether the models are equal, rows
  lost or trained twice, gradients that parameter servers lack or have twice, repeated batches, the difference
  of the test AUC, and the longest restart of a parameter server that kept its rows.
  In `shadow` no dense gradient travels. In its place the line has the batches of replicas that died with their
  worker. The job gets more rows until it lasts long enough for the kills, unless --manifest names another job.
  Fails if rows or gradients are lost or counted twice, if `sync` trains another model, or if the AUC of `shadow`
  differs by more than 0.001.";
/// A run that prints no event for this long hangs.
const SILENCE: Duration = Duration::from_secs(180);
/// The time after a restart in which processes start, join or restore.
const STARTUP: Duration = Duration::from_millis(1500);

/// The manifest of a run on synthetic rows, and its rows.
const MANIFEST: &str = "docs/examples/chaos.yaml";
const ROWS: u64 = 200_000;

/// In `shadow`, training goes on while a victim is away. So the job has to last this long for each
/// kill.
const SECONDS_A_KILL: f64 = 5.0;
/// The job gets at most this many times its rows.
const MOST_TIMES_THE_ROWS: f64 = 50.0;
/// In `shadow`, the largest difference of the AUC from the undisturbed run. With the test rows
/// below, chance alone stays well below it.
const AUC_BOUND: f64 = 0.001;
const SHADOW_TEST_ROWS: u64 = 100_000;

/// The manifest of a run on a stream, and its data.
const STREAM_MANIFEST: &str = "docs/examples/movielens-100k.yaml";
const STREAM_DATA: &str = "data/movielens-100k/train.csv";
const TOPIC: &str = "chaos";

/// The longest time without a report that a victim is back.
const BACK: Duration = Duration::from_secs(10);
/// The mode that trains replicas.
const SHADOW: &str = "shadow";

#[derive(Debug)]
struct Plan {
    /// Whether the rows come from Kafka.
    on_stream: bool,
    manifest: String,
    mode: String,
    kills: u32,
    seed: u64,
    sets: Vec<String>,
}

/// When a kill happens: at the earliest when so many samples are trained. (A step of `shadow` is a
/// local batch in the summary, and a global batch in the events.)
#[derive(Debug, Clone, Copy, PartialEq)]
struct Moment {
    samples: u64,
    before: Before,
}

/// An earlier occasion for the kill.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Before {
    /// There is none.
    Nothing,
    /// This long after the previous victim is back.
    Startup(Duration),
    /// This long after a checkpoint was saved. With a checkpoint every few steps, the next one is
    /// being written.
    Checkpoint(Duration),
}

/// Runs the trial with the arguments of the command line.
///
/// # Errors
/// Wrong arguments; a run that fails or hangs; a loss that [`USAGE`] lists.
pub fn run(arguments: &[&str]) -> Result<(), TrialError> {
    let plan = parse(arguments)?;
    build_programs()?;
    let broker = plan.on_stream.then(stream).transpose()?;
    let plan = match &broker {
        Some(broker) => plan.on(broker),
        None => plan,
    };
    let (plan, alone) = undisturbed(plan)?;
    let samples = integer("the summary", &alone, "samples")?;
    println!("seed {}: {} kills over {samples} samples", plan.seed, plan.kills);
    let folder = temporary_folder("chaos");
    let killed = killed(&plan, &moments(&plan, samples), &folder.display().to_string(), broker);
    let removed = std::fs::remove_dir_all(&folder);
    let (killed, kills) = killed?;
    removed.map_err(HarnessError::io("remove", folder.display()))?;
    report(&plan, &alone, &killed, &kills)
}

/// A broker with a topic of rows.
fn stream() -> Result<Broker, HarnessError> {
    movielens_data()?;
    let broker = Broker::start("")?;
    replay(STREAM_DATA, &format!("kafka://{}/{TOPIC}", broker.address))?;
    Ok(broker)
}

impl Plan {
    /// Whether the job may get more rows.
    fn may_grow(&self) -> bool {
        self.mode == SHADOW && self.manifest == MANIFEST && !self.on_stream
    }

    /// The same with rows from a broker.
    fn on(self, broker: &Broker) -> Self {
        let kafka = format!(
            "{},spec.data.shuffle=null,spec.training.epochs=null,\
             spec.roles.loader.replicas=3,spec.roles.ps.replicas=2,spec.roles.embeddingWorker.replicas=2,\
             spec.roles.denseWorker.replicas=2,spec.checkpoint.everySteps=20",
            broker.source(TOPIC)
        );
        let sets = [kafka].into_iter().chain(self.sets).collect();
        Self { manifest: STREAM_MANIFEST.to_owned(), sets, ..self }
    }
}

/// The kills of a run so far.
#[derive(Debug, Default)]
struct Kills {
    done: u32,
    /// When the last victim was killed, if it was a parameter server that is not back.
    server: Option<Instant>,
    longest_server_restart: Duration,
}

fn parse(arguments: &[&str]) -> Result<Plan, HarnessError> {
    let mut plan = Plan {
        on_stream: false,
        manifest: MANIFEST.to_owned(),
        mode: "sync".to_owned(),
        kills: 20,
        seed: 7,
        sets: Vec::new(),
    };
    for pair in arguments.chunks(2) {
        match pair {
            ["--manifest", file] => plan.manifest = (*file).to_owned(),
            ["--mode", mode] => plan.mode = (*mode).to_owned(),
            ["--kills", kills] => plan.kills = number(kills, USAGE)?,
            ["--seed", seed] => plan.seed = number(seed, USAGE)?,
            ["--source", "kafka"] => plan.on_stream = true,
            ["--set", set] => plan.sets.push((*set).to_owned()),
            _ => return Err(HarnessError::Usage(USAGE)),
        }
    }
    plan.sets.push(format!("spec.training.mode={}", plan.mode));
    if plan.may_grow() {
        plan.sets.insert(0, format!("spec.data.synthetic.testRows={SHADOW_TEST_ROWS}"));
    }
    Ok(plan)
}

/// The summary of the job without kills and without checkpoints. If the job may grow and is too
/// short for its kills, the plan gets more rows.
fn undisturbed(mut plan: Plan) -> Result<(Plan, Value), HarnessError> {
    let alone = train_alone(&plan)?;
    let seconds = alone["seconds"].as_f64().ok_or_else(|| missing("the summary", &alone, "seconds"))?;
    let Some(rows) = rows_for(plan.kills, seconds).filter(|_| plan.may_grow()) else { return Ok((plan, alone)) };
    println!("{seconds:.1} s are too short for {} kills: the job gets {rows} rows", plan.kills);
    plan.sets.insert(0, format!("spec.data.synthetic.rows={rows}"));
    let alone = train_alone(&plan)?;
    Ok((plan, alone))
}

/// The rows of a job that lasts long enough for the kills. `seconds` is the time of the job with
/// [`ROWS`]. `None` if it is long enough.
fn rows_for(kills: u32, seconds: f64) -> Option<u64> {
    let times = f64::from(kills) * SECONDS_A_KILL / seconds.max(f64::MIN_POSITIVE);
    (times > 1.0).then(|| (ROWS as f64 * times.min(MOST_TIMES_THE_ROWS)).ceil() as u64)
}

/// Trains the job without kills and without checkpoints. Returns its summary.
fn train_alone(plan: &Plan) -> Result<Value, HarnessError> {
    let none = "spec.checkpoint=null".to_owned();
    let mut job = job(&plan.manifest, plan.sets.iter().chain([&none]))?;
    job.arg("--processes");
    train(job)
}

/// The moments of the kills, spread over the first four fifths of the samples. The last fifth is
/// for kills that had to wait.
fn moments(plan: &Plan, samples: u64) -> Vec<Moment> {
    let mut random = SplitMix64::new(plan.seed);
    let mut all: Vec<u64> = (0..plan.kills).map(|_| random.remainder((samples / 5 * 4).max(1))).collect();
    all.sort_unstable();
    let mut before = || match random.remainder(10) {
        0 | 1 => Before::Startup(STARTUP.mul_f64(random.unit())),
        2 | 3 => Before::Checkpoint(Duration::from_millis(random.remainder(150))),
        _ => Before::Nothing,
    };
    all.into_iter().map(|samples| Moment { samples, before: before() }).collect()
}

/// Trains the job and kills its processes; returns its summary.
fn killed(plan: &Plan, moments: &[Moment], folder: &str, broker: Option<Broker>) -> Result<(Value, Kills), TrialError> {
    let own = format!(
        "spec.checkpoint.path={folder},spec.faultTolerance.maxRestarts={},spec.faultTolerance.backoffSeconds=1",
        2 * plan.kills + 10
    );
    let mut job = job(&plan.manifest, plan.sets.iter().chain([&own]))?;
    let mut run = start(job.arg("--processes").stdout(Stdio::piped()))?;
    let (sender, events) = channel();
    run_processes::forward_lines(run.stdout.take(), sender, |line| serde_json::from_str(line).ok())?;
    let killer = Killer::new(run.id(), moments, SplitMix64::new(plan.seed ^ 0x5eed));
    let result = Killer { broker, ..killer }.follow(&events);
    let status = run_processes::end(&mut run, &result)?;
    let (summary, kills) = result?;
    let unsummarized = || unmet("a summary", format!("the run ended with {status} after {} kills", kills.done));
    Ok((summary.ok_or_else(unsummarized)?, kills))
}

/// Kills processes of a run at given moments.
struct Killer<'a> {
    /// The process of `rectrain run`.
    run: u32,
    random: SplitMix64,
    kills: Kills,
    next: Option<Moment>,
    later: std::slice::Iter<'a, Moment>,
    /// The time of the next kill, once its occasion has come.
    due: Option<Instant>,
    /// When the last victim died, if it is not known to be back.
    down_since: Option<Instant>,
    /// The broker of a run on a stream. It may be a victim, too.
    broker: Option<Broker>,
}

impl<'a> Killer<'a> {
    fn new(run: u32, moments: &'a [Moment], random: SplitMix64) -> Self {
        let mut later = moments.iter();
        let next = later.next().copied();
        Self { run, random, kills: Kills::default(), next, later, due: None, down_since: None, broker: None }
    }

    /// Follows the run and kills, until its summary or its end.
    fn follow(mut self, events: &Receiver<Value>) -> Result<(Option<Value>, Kills), TrialError> {
        loop {
            let wait = self.due.map_or(SILENCE, |due| due.saturating_duration_since(Instant::now()));
            let event = match events.recv_timeout(wait) {
                Ok(event) => event,
                Err(RecvTimeoutError::Disconnected) => return Ok((None, self.kills)),
                Err(RecvTimeoutError::Timeout) if self.due.is_some() => Value::Null,
                Err(RecvTimeoutError::Timeout) => return Err(unmet("an event", format!("silence for {SILENCE:?}"))),
            };
            if event["event"] == "summary" {
                return Ok((Some(event), self.kills));
            }
            self.plan_after(&event);
            if self.due.is_some_and(|due| due <= Instant::now()) {
                self.kill()?;
            }
        }
    }

    /// Plans the next kill if the event is its occasion. The replacement of a member that had not
    /// joined yet is not reported, so a victim counts as back after [`BACK`].
    fn plan_after(&mut self, event: &Value) {
        if self.down_since.is_some_and(|since| since.elapsed() >= BACK) {
            self.plan_after_return(&Value::Null);
        }
        match event["event"].as_str() {
            Some("started") => self.down_since = None,
            Some("restarting" | "rejoined" | "serverKeptRows" | "coordinatorTakenUp") => self.plan_after_return(event),
            Some("checkpointSaved") if self.down_since.is_none() => {
                if let Some(Before::Checkpoint(after)) = self.next.map(|next| next.before) {
                    self.due = self.due.or(Some(Instant::now() + after));
                }
            }
            Some("progress") if self.down_since.is_none() => {
                let samples = event["samples"].as_u64().unwrap_or(0);
                if self.next.is_some_and(|next| samples >= next.samples) {
                    self.due = Some(Instant::now());
                }
            }
            _ => {}
        }
    }

    /// The last victim is back, or the job restarts after a pause.
    fn plan_after_return(&mut self, event: &Value) {
        self.down_since = None;
        if let Some(killed) = self.kills.server.take().filter(|_| event["event"] == "serverKeptRows") {
            self.kills.longest_server_restart = self.kills.longest_server_restart.max(killed.elapsed());
        }
        let pause = Duration::from_secs(event["seconds"].as_u64().unwrap_or(0));
        if let Some(Before::Startup(after)) = self.next.map(|next| next.before) {
            self.due = Some(Instant::now() + pause + after);
        }
    }

    /// Kills a process now, or tries again in a moment if there is none.
    fn kill(&mut self) -> Result<(), HarnessError> {
        if let Some(broker) = self.broker.as_mut().filter(|_| self.random.remainder(10) == 0) {
            broker.restart()?;
            self.note("broker");
            return Ok(());
        }
        let Some(killed) = kill_one(self.run, &mut self.random)? else {
            self.due = Some(Instant::now() + Duration::from_millis(50));
            return Ok(());
        };
        self.down_since = Some(Instant::now());
        self.kills.server = (killed == "ps").then(Instant::now);
        self.note(&killed);
        Ok(())
    }

    /// Counts a kill, and plans the next one.
    fn note(&mut self, killed: &str) {
        self.due = None;
        self.kills.done += 1;
        let Moment { samples, before } = self.next.unwrap_or(Moment { samples: 0, before: Before::Nothing });
        println!("kill {}: {killed} (from {samples} samples on, before {before:?})", self.kills.done);
        self.next = self.later.next().copied();
    }
}

/// Kills one of the run's processes and returns its role; `None` while there is no process.
fn kill_one(run: u32, random: &mut SplitMix64) -> Result<Option<String>, HarnessError> {
    let children = children_of(run);
    if children.is_empty() {
        return Ok(None);
    }
    let (process, role) = &children[random.remainder(children.len() as u64) as usize];
    Ok(run_processes::kill(*process)?.then(|| role.clone()))
}

fn report(plan: &Plan, alone: &Value, killed: &Value, kills: &Kills) -> Result<(), TrialError> {
    let losses = Losses::of(&plan.mode, alone, killed)?;
    let number = |name: &str| integer("the summary", killed, name);
    println!(
        "{}",
        json!({ "kills": kills.done, "digestEqual": losses.is_equal, "rowsLost": losses.rows, "rowsTwice": losses.rows_twice,
            "gradientsMissing": losses.gradients.map(|(missing, _)| missing),
            "gradientsTwice": losses.gradients.map(|(_, twice)| twice),
            "replicaBatchesLost": number("lostReplicaBatches")?,
            "tokensLost": number("tokensLost")?, "batchesRepeated": number("repeatedBatches")?,
            "aucDifference": losses.auc_difference, "restarts": number("restarts")?,
            "longestServerRestartSeconds": kills.longest_server_restart.as_secs_f64(), "mode": plan.mode, "seed": plan.seed })
    );
    if kills.done < plan.kills {
        let found = format!("the job ended after {} kills: give it more rows", kills.done);
        return Err(unmet(format!("{} kills", plan.kills), found));
    }
    losses.check(&plan.mode)
}

/// The cost of the kills.
#[derive(Debug)]
struct Losses {
    /// Whether the model is the one of the undisturbed run.
    is_equal: bool,
    rows: u64,
    rows_twice: u64,
    /// Dense gradients that the worst server lacks, and that one has too many. `None` in a mode
    /// without them.
    gradients: Option<(u64, u64)>,
    /// The AUC less the AUC of the undisturbed run.
    auc_difference: f64,
}

impl Losses {
    /// `alone` and `killed` are the summaries of both runs.
    fn of(mode: &str, alone: &Value, killed: &Value) -> Result<Self, HarnessError> {
        let [before, after] = [alone, killed].map(|summary| integer("the summary", summary, "trainedRows"));
        let (before, after) = (before?, after?);
        Ok(Self {
            is_equal: alone["parametersSha256"] == killed["parametersSha256"],
            rows: before.saturating_sub(after),
            rows_twice: after.saturating_sub(before),
            gradients: (mode != SHADOW).then(|| gradients(killed)).transpose()?,
            auc_difference: test_auc(killed)? - test_auc(alone)?,
        })
    }

    /// Fails if the mode promises to lose less.
    fn check(&self, mode: &str) -> Result<(), TrialError> {
        if self.rows > 0 || self.rows_twice > 0 {
            let found = format!("{} rows lost, {} trained twice", self.rows, self.rows_twice);
            return Err(unmet("every row trained once", found));
        }
        if let Some((missing, doubled)) = self.gradients.filter(|counts| *counts != (0, 0)) {
            let found = format!("a server lacks {missing} of them, or has {doubled} twice");
            return Err(unmet("every gradient in the coordinator's ledger applied once", found));
        }
        if mode == "sync" && !self.is_equal {
            return Err(unmet("the same model from `sync`", "another model after the kills"));
        }
        // A value that is not a number fails, too.
        let is_near = self.auc_difference.abs() <= AUC_BOUND;
        if mode == SHADOW && !is_near {
            let expected = format!("an AUC within {AUC_BOUND} of the undisturbed run's");
            return Err(unmet(expected, format!("a difference of {:+.5}", self.auc_difference)));
        }
        Ok(())
    }
}

/// Compares the gradients that parameter servers applied without a barrier with the coordinator's
/// ledger: the tokens it issued, less the lost ones. Returns how many the worst server lacks, and
/// how many one has too many.
fn gradients(summary: &Value) -> Result<(u64, u64), HarnessError> {
    let number = |name: &str| integer("the summary", summary, name);
    let expected = number("tokensIssued")?.saturating_sub(number("tokensLost")?);
    let (fewest, most) = (number("fewestAppliedGradients")?, number("mostAppliedGradients")?);
    Ok((expected.saturating_sub(fewest), most.saturating_sub(expected)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_seed_gives_the_same_kills_most_of_them_in_training() {
        let plan = |seed| Plan { kills: 200, seed, ..parse(&[]).unwrap() };
        let all = moments(&plan(7), 1000);
        assert_eq!(all, moments(&plan(7), 1000));
        assert_ne!(all, moments(&plan(8), 1000));
        let training = all.iter().filter(|moment| moment.before == Before::Nothing).count();
        assert!((80..180).contains(&training), "{training}");
        assert!(all.iter().any(|moment| matches!(moment.before, Before::Startup(_))));
        assert!(all.is_sorted_by_key(|moment| moment.samples));
    }

    #[test]
    fn a_victim_whose_return_is_not_reported_counts_as_back() {
        let moments = [Moment { samples: 7, before: Before::Startup(Duration::ZERO) }];
        let mut killer = Killer::new(0, &moments, SplitMix64::new(1));
        let progress = json!({ "event": "progress", "samples": 9 });
        killer.down_since = Some(Instant::now());
        killer.plan_after(&progress);
        assert!(killer.due.is_none() && killer.down_since.is_some());
        killer.down_since = Instant::now().checked_sub(BACK);
        killer.plan_after(&progress);
        assert!(killer.due.is_some() && killer.down_since.is_none());
    }

    #[test]
    fn missing_and_doubled_gradients_are_both_found() {
        let summary =
            json!({"tokensIssued": 105, "tokensLost": 5, "fewestAppliedGradients": 99, "mostAppliedGradients": 101});
        assert_eq!(gradients(&summary).unwrap(), (1, 1));
        assert!(gradients(&json!({"tokensIssued": 1})).is_err());
    }

    #[test]
    fn a_job_in_shadow_gets_rows_for_its_kills() {
        assert_eq!(rows_for(20, 100.0), None, "five seconds a kill");
        assert_eq!(rows_for(20, 25.0), Some(4 * ROWS));
        assert_eq!(rows_for(1, 0.0), Some(50 * ROWS), "a bound");
        let grows = |arguments: &[&str]| parse(arguments).unwrap().may_grow();
        assert!(grows(&["--mode", "shadow"]) && !grows(&["--mode", "gba"]));
        assert!(!grows(&["--mode", "shadow", "--manifest", "mine.yaml"]));
    }

    /// In `shadow`, no dense gradient reaches a server, and the AUC decides.
    #[test]
    fn shadow_fails_by_its_auc_and_not_by_missing_gradients() {
        let summary = |auc: f64, rows: u64| {
            json!({"tokensIssued": 105, "tokensLost": 5, "fewestAppliedGradients": 0, "mostAppliedGradients": 0,
                "trainedRows": rows, "test": {"auc": auc}, "parametersSha256": auc.to_string()})
        };
        let check = |mode: &str, auc: f64, rows: u64| {
            Losses::of(mode, &summary(0.75, 100), &summary(auc, rows)).unwrap().check(mode)
        };
        assert!(check("shadow", 0.7509, 100).is_ok() && check("shadow", 0.7491, 100).is_ok());
        assert!(check("shadow", 0.7511, 100).is_err() && check("shadow", 0.7489, 100).is_err());
        assert!(check("shadow", 0.75, 99).is_err() && check("shadow", 0.75, 101).is_err(), "rows count in every mode");
        assert!(check("gba", 0.75, 100).is_err(), "no gradient was applied");
    }
}

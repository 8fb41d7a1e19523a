//! Containers of a job are killed at random while one of its members is slow, and work moves away
//! from it and back. In `sync` the model is the one of a run that was left alone, to the bit. In
//! `gba` every row is trained once.
//!
//! A seed decides the victims and the slow members. The containers that replace the victims run in
//! the same pods, so parameter servers and the coordinator find their state again.

use std::time::{Duration, Instant};

use rectrain_bring_up::cgroups::LimitedProcessor;
use rectrain_harness::files::write;
use rectrain_harness::jobs::Jobs;
use rectrain_harness::manifests::manifest;
use rectrain_harness::rectrain::train_outside;
use rectrain_harness::waiting::eventually;
use rectrain_harness::{http, not_yet, processes};
use rectrain_random::SplitMix64;
use serde_json::{Value, json};

use super::slow_members::SHARE_CHANGES;
use crate::TrialError;
use crate::cluster::support::TestCluster;
use crate::cluster::support::members::{Member, any_of, limit, pod};
use crate::cluster::support::outcome::{same_digest, same_rows};
use crate::error::unmet;

const SEED: u64 = 11;
/// Enough for all kills: the job must not end before the last one.
const ROWS: u64 = 10_000_000;
const KILLS: u32 = 20;
/// Another member is slow after so many kills.
const KILLS_OF_A_SLOW_MEMBER: u32 = 4;
/// The part of a processor that a slow member has, in percent. The job must end in time.
const SLOW_PERCENT: u32 = 5;
/// The longest time between a recovery and the next kill.
const PAUSE: f64 = 5.0;
/// The time until the first kill, in which the first share falls.
const FIRST: Duration = Duration::from_secs(25);
/// How long a job may take to train again after a kill.
const RECOVERY: Duration = Duration::from_secs(180);
/// The roles whose work moves, with their numbers of members.
const SLOWED: [Member; 3] = [("ps", 3), ("embedding-worker", 2), ("loader", 2)];
/// The other roles.
const OTHERS: [Member; 2] = [("dense-worker", 2), ("coordinator", 1)];
const LOST_TOKENS: &str = "rectrain_coordinator_tokens_lost_total";

pub(in crate::cluster) fn in_sync(cluster: &TestCluster) -> Result<(), TrialError> {
    killed(cluster, "sync", same_digest)
}

pub(in crate::cluster) fn in_gba(cluster: &TestCluster) -> Result<(), TrialError> {
    killed(cluster, "gba", same_rows)
}

/// Compares the end of a job with the summary of an undisturbed run, and deletes the job.
type Comparison = fn(&Jobs, &str, &Value) -> Result<(), TrialError>;

fn changes(mode: &str) -> Value {
    json!({
        "data": {"synthetic": {"rows": ROWS, "testRows": 50_000, "vocabulary": 20_000}},
        "training": {"mode": mode, "globalBatchSize": 500, "localBatchSize": 250},
        "roles": {
            "ps": {"replicas": 3}, "embeddingWorker": {"replicas": 2}, "loader": {"replicas": 2},
            "denseWorker": {"replicas": 2},
        },
        "faultTolerance": {"maxRestarts": 3 * KILLS, "backoffSeconds": 1},
    })
}

/// It takes about eight minutes.
fn killed(cluster: &TestCluster, mode: &str, compare: Comparison) -> Result<(), TrialError> {
    if cluster.skips("slow members")? {
        return Ok(());
    }
    let (jobs, name) = (&cluster.jobs, format!("slow-kills-{mode}"));
    let changes = changes(mode);
    let alone = train_outside(&manifest(&name, &changes))?;
    jobs.submit(&name, &changes)?;
    jobs.until_phase(&name, "Training")?;
    let mut trial =
        Trial { jobs, name: &name, random: SplitMix64::new(SEED), moves: Counter::default(), lost: Counter::default() };
    trial.kill_all()?;
    let (moves, lost) = (trial.moves.total, trial.lost.total);
    let status = jobs.status(&name)?;
    let table = json!({"mode": mode, "seed": SEED, "kills": KILLS, "shareChanges": moves, "tokensLost": lost,
        "restarts": status["restarts"]});
    println!("{table}");
    write(&cluster.paths.root().join(format!("{name}.json")), format!("{table:#}\n"))?;
    compare(jobs, &name, &alone)?;
    if moves < 1.0 {
        return Err(unmet("work that moves while members are slow", "no share has changed"));
    }
    Ok(())
}

/// A counter of a process that may be replaced. Its successor counts from 0, or from the last value
/// in the journal.
#[derive(Debug, Default, PartialEq)]
struct Counter {
    last: f64,
    total: f64,
}

impl Counter {
    fn look(&mut self, value: f64) {
        self.total += if value < self.last { value } else { value - self.last };
        self.last = value;
    }
}

struct Trial<'a> {
    jobs: &'a Jobs,
    name: &'a str,
    random: SplitMix64,
    moves: Counter,
    lost: Counter,
}

impl Trial<'_> {
    fn kill_all(&mut self) -> Result<(), TrialError> {
        let mut slow = self.slow_member()?;
        std::thread::sleep(FIRST);
        for kill in 1..=KILLS {
            self.look();
            let victim = any_of(&[&SLOWED[..], &OTHERS].concat(), &mut self.random);
            let began = Instant::now();
            self.kill(&pod(self.name, victim))?;
            println!("kill {kill}: {victim:?}, trains again after {:.0} s", began.elapsed().as_secs_f64());
            if kill % KILLS_OF_A_SLOW_MEMBER == 0 || victim == slow.0 {
                // The first one recovers before another one is slow.
                drop(slow);
                slow = self.slow_member()?;
            }
            std::thread::sleep(Duration::from_secs_f64(PAUSE * self.random.unit()));
        }
        self.look();
        Ok(())
    }

    /// Slows any member whose work can move.
    fn slow_member(&mut self) -> Result<(Member, LimitedProcessor), TrialError> {
        let member = any_of(&SLOWED, &mut self.random);
        let pod = pod(self.name, member);
        let limited = limit(self.jobs, &pod, SLOW_PERCENT, RECOVERY)?;
        println!("{pod} is slow");
        Ok((member, limited))
    }

    /// Kills the process of a pod, and waits until the job trains with another one.
    fn kill(&self, pod: &str) -> Result<(), TrialError> {
        if self.jobs.status(self.name)?["phase"] == "Complete" {
            return Err(unmet(
                format!("{KILLS} kills before the end of the job"),
                format!("its end before {pod} was killed"),
            ));
        }
        let killed = self.jobs.process_of(pod)?;
        processes::signal(killed, "KILL")?;
        let mut at = None;
        Ok(eventually(RECOVERY, &format!("steps of {} after {pod} was killed", self.name), || {
            let status = self.jobs.status(self.name)?;
            let step = status["step"].as_u64().unwrap_or(0);
            let is_another = self.jobs.process_of(pod).is_ok_and(|now| now != killed);
            match at {
                _ if status["phase"] == "Complete" => Ok(()),
                None if is_another && status["phase"] == "Training" => {
                    at = Some(step);
                    Err(not_yet(format!("step {step}")))
                }
                Some(before) if step > before => Ok(()),
                _ => Err(not_yet(format!("{} at step {step}", status["phase"]))),
            }
        })?)
    }

    /// Reads the counters of the coordinator, if it answers.
    fn look(&mut self) {
        let Ok(page) = self.jobs.metrics(&format!("{}-coordinator-0", self.name)) else { return };
        for (counter, metric) in [(&mut self.moves, SHARE_CHANGES), (&mut self.lost, LOST_TOKENS)] {
            counter.look(http::sum_of(&page, metric).unwrap_or(0.0));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_counter_goes_on_after_its_process_was_replaced() {
        let mut counter = Counter::default();
        [2.0, 5.0, 5.0, 1.0, 4.0].into_iter().for_each(|value| counter.look(value));
        assert_eq!(counter, Counter { last: 4.0, total: 9.0 });
    }

    #[test]
    fn every_member_may_be_a_victim() {
        let mut random = SplitMix64::new(SEED);
        let roles = [&SLOWED[..], &OTHERS].concat();
        let victims: Vec<_> = (0..500).map(|_| any_of(&roles, &mut random)).collect();
        for (role, count) in roles {
            assert!((0..count).all(|number| victims.contains(&(role, number))), "{role}");
        }
        assert_eq!(pod("job", ("ps", 2)), "job-ps-2");
    }
}

//! One member becomes slow, and recovers: its container is limited to a small part of a processor,
//! from outside. The job has to name it, to move work away from it, and to give it work again. Each
//! part of the trial slows a member of one role, in a job of its own, and writes its figures as
//! JSON.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::time::{Duration, Instant};

use rectrain_bring_up::cgroups::LimitedProcessor;
use rectrain_harness::events::missing;
use rectrain_harness::files::write;
use rectrain_harness::jobs::METRICS_PORT;
use rectrain_harness::manifests::{endless, merged};
use rectrain_harness::waiting::eventually;
use rectrain_harness::{HarnessError, http, not_yet};
use serde_json::{Value, json};

use crate::TrialError;
use crate::cluster::support::TestCluster;
use crate::cluster::support::members::samples;
use crate::cluster::support::outcome::no_restart;
use crate::error::unmet;

/// The part of a processor that a slow member has, in percent.
pub(super) const SLOW_PERCENT: u32 = 3;
/// How long the job may take to name a slow member.
const NAMED: Duration = Duration::from_secs(30);
/// The time after a member has become slow, or has recovered, at which throughput is judged.
const JUDGED: Duration = Duration::from_secs(90);
/// How long a throughput is measured.
const MEASURED: Duration = Duration::from_secs(30);
/// The least and the longest time that the job has to reach its usual speed at first.
const WARM: Duration = Duration::from_secs(60);
const SETTLED: Duration = Duration::from_secs(210);
/// How long the numbers of members must not have changed before a healthy job is measured: longer
/// than the cool-down and the window of a decision together.
const UNCHANGED: Duration = Duration::from_secs(55);
/// How long a page or the API server may take to answer.
pub(super) const ANSWERS: Duration = Duration::from_secs(60);
/// The time between two looks at the status.
const LOOK: Duration = Duration::from_secs(2);
/// The least throughput over the healthy one while a member is slow, and after it has recovered.
const WHILE_SLOW: f64 = 0.7;
const AFTERWARDS: f64 = 0.9;
/// Dense workers of the job.
pub(super) const WORKERS: u32 = 4;
/// The roles whose numbers must not grow, as in a status.
const SCALED: [&str; 3] = ["ps", "embeddingWorker", "loader"];
pub(super) const SHARE_CHANGES: &str = "rectrain_coordinator_share_changes_total";

/// The promises about a slow member. Each includes the ones before it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Promise {
    /// The job goes on in its attempt, with the same processes.
    Survives,
    /// The status names the member.
    Named,
    /// The job keeps most of its throughput, and no member is added.
    Keeps,
    /// Its share of the work falls.
    Moves,
}

/// A member that becomes slow.
struct Case {
    /// The part of the trial, as on the command line.
    part: &'static str,
    /// The role, as in the names of pods.
    role: &'static str,
    promise: Promise,
    /// Whether free dense workers pull the pieces of a step (`spec.training.sync.pieces`).
    pulled: bool,
}

pub(in crate::cluster) fn server(cluster: &TestCluster) -> Result<(), TrialError> {
    slowed(cluster, &Case { part: "server", role: "ps", promise: Promise::Moves, pulled: false })
}

pub(in crate::cluster) fn embedding(cluster: &TestCluster) -> Result<(), TrialError> {
    slowed(cluster, &Case { part: "embedding", role: "embedding-worker", promise: Promise::Moves, pulled: false })
}

pub(in crate::cluster) fn loader(cluster: &TestCluster) -> Result<(), TrialError> {
    slowed(cluster, &Case { part: "loader", role: "loader", promise: Promise::Moves, pulled: false })
}

pub(in crate::cluster) fn dense(cluster: &TestCluster) -> Result<(), TrialError> {
    slowed(cluster, &Case { part: "dense", role: "dense-worker", promise: Promise::Named, pulled: false })
}

pub(in crate::cluster) fn pulled(cluster: &TestCluster) -> Result<(), TrialError> {
    slowed(cluster, &Case { part: "pulled", role: "dense-worker", promise: Promise::Keeps, pulled: true })
}

pub(in crate::cluster) fn coordinator(cluster: &TestCluster) -> Result<(), TrialError> {
    slowed(cluster, &Case { part: "coordinator", role: "coordinator", promise: Promise::Survives, pulled: false })
}

/// The numbers of members that the job wants, by the role's section in a status.
type Counts = BTreeMap<&'static str, u64>;

/// The job at a moment at which its throughput was measured.
#[derive(Debug, Clone, PartialEq)]
struct Figures {
    samples_per_second: f64,
    mode: String,
    /// Changes of shares of work so far.
    share_changes: f64,
}

impl Figures {
    fn to_json(&self) -> Value {
        json!({"samplesPerSecond": self.samples_per_second.round(), "mode": self.mode, "shareChanges": self.share_changes})
    }
}

/// The figures of a part.
#[derive(Debug, Clone, PartialEq)]
struct Row {
    member: String,
    promise: Promise,
    /// Seconds until the status named it; `None` if it did not.
    named_seconds: Option<f64>,
    /// Periods of a tenth of a second in which the limit has stopped it.
    throttled_periods: u64,
    healthy: Figures,
    slow: Figures,
    after: Figures,
    /// The members at first, and the most of each role since the member became slow.
    members: Counts,
    most_members: Counts,
    /// The decisions in the last status.
    decisions: Value,
}

impl Row {
    fn to_json(&self) -> Value {
        json!({
            "member": self.member,
            "namedAfterSeconds": self.named_seconds.map(f64::round),
            "throttledPeriods": self.throttled_periods,
            "healthy": self.healthy.to_json(),
            "slow": self.slow.to_json(),
            "after": self.after.to_json(),
            "shareOfHealthy": {
                "slow": hundredths(self.share(&self.slow)), "after": hundredths(self.share(&self.after)),
            },
            "members": {"healthy": self.members, "most": self.most_members},
            "decisions": self.decisions,
        })
    }

    /// The throughput over the healthy one.
    fn share(&self, figures: &Figures) -> f64 {
        figures.samples_per_second / self.healthy.samples_per_second.max(1.0)
    }

    /// The first promise about the member that does not hold.
    fn broken(&self) -> Option<TrialError> {
        self.without_proof().or_else(|| self.not_named()).or_else(|| self.not_moved()).or_else(|| self.not_kept())
    }

    /// Why the figures would prove nothing.
    fn without_proof(&self) -> Option<TrialError> {
        if self.healthy.samples_per_second < 1.0 {
            return Some(unmet("a healthy job that trains", self.healthy.to_json()));
        }
        (self.throttled_periods == 0).then(|| unmet(format!("{} slowed by its limit", self.member), "no such period"))
    }

    fn not_named(&self) -> Option<TrialError> {
        let in_time = self.named_seconds.is_some_and(|seconds| seconds <= NAMED.as_secs_f64());
        if self.promise < Promise::Named || in_time {
            return None;
        }
        let found = self.named_seconds.map_or("it was not".to_owned(), |seconds| format!("after {seconds:.0} s"));
        Some(unmet(format!("{} named within {NAMED:?}", self.member), found))
    }

    fn not_moved(&self) -> Option<TrialError> {
        let has_moved = self.slow.share_changes > self.healthy.share_changes;
        if self.promise < Promise::Moves || has_moved {
            return None;
        }
        Some(unmet(format!("a smaller share of work for {}", self.member), "no change"))
    }

    fn not_kept(&self) -> Option<TrialError> {
        let member = &self.member;
        if self.promise < Promise::Keeps {
            return None;
        }
        let share = |figures| format!("{:.2} of it", self.share(figures));
        if self.share(&self.slow) < WHILE_SLOW {
            let expected = format!("{WHILE_SLOW} of the throughput while {member} is slow");
            return Some(unmet(expected, share(&self.slow)));
        }
        if self.share(&self.after) < AFTERWARDS {
            return Some(unmet(format!("{AFTERWARDS} of it after {member} has recovered"), share(&self.after)));
        }
        let added =
            self.most_members.iter().find(|(role, most)| self.members.get(*role).is_none_or(|count| *most > count));
        added.map(|(role, most)| unmet(format!("no {role} added for {member}: {:?}", self.members), most))
    }
}

fn hundredths(share: f64) -> f64 {
    (share * 100.0).round() / 100.0
}

/// Runs a part of the trial. It takes six to nine minutes.
fn slowed(cluster: &TestCluster, case: &Case) -> Result<(), TrialError> {
    if cluster.skips("slow members")? {
        return Ok(());
    }
    let name = format!("slow-{}", case.part);
    let jobs = &cluster.jobs;
    let pulled = json!({"training": {"mode": "sync", "sync": {"pieces": "pulled"}}});
    let job = if case.pulled { merged(job(), pulled) } else { job() };
    jobs.submit(&name, &merged(endless(), job))?;
    jobs.until_phase(&name, "Training")?;
    let trial = Trial { cluster, name: &name, workers: workers(cluster, &name)? };
    let row = trial.row(case)?;
    jobs.delete(&name)?;
    let table = row.to_json();
    println!("{table:#}");
    write(&cluster.paths.root().join(format!("slow-members-{}.json", case.part)), format!("{table:#}\n"))?;
    row.broken().map_or(Ok(()), Err)
}

/// A DLRM over many wide rows, whose parameter servers and embedding workers have about as much
/// work as its dense workers. With rows of 16 values, [`SLOW_PERCENT`] of a processor is nearly
/// enough for a server. The operator may change its mode and the number of its members.
///
/// A step takes longer than a period of a limit. A limited member may stand still for the rest of
/// each period, so it may delay every step that long, however little work it has left.
pub(super) fn job() -> Value {
    json!({
        "model": {"kind": "dlrm", "embeddingDim": 64, "hidden": [64], "bottom": [32]},
        "data": {"synthetic": {"vocabulary": 100_000}},
        "training": {"mode": "auto", "globalBatchSize": 16_000, "localBatchSize": 4_000},
        "roles": {
            "ps": {"replicas": 3}, "embeddingWorker": {"replicas": 2}, "loader": {"replicas": 2},
            "denseWorker": {"replicas": WORKERS},
        },
        "autoscaling": {
            "mode": "apply", "upWindowSeconds": 20, "downWindowSeconds": 20, "coolDownSeconds": 30,
            "ps": {"min": 3}, "embeddingWorker": {"min": 2}, "loader": {"min": 2, "max": 3},
            "denseWorker": {"scaler": "external"},
        },
    })
}

/// The metrics addresses of the dense workers.
pub(super) fn workers(cluster: &TestCluster, name: &str) -> Result<Vec<SocketAddr>, HarnessError> {
    let address = |worker: u32| cluster.jobs.socket_of(&format!("{name}-dense-worker-{worker}"), METRICS_PORT);
    (0..WORKERS).map(address).collect()
}

/// The wanted numbers of members in a status.
fn counts(status: &Value) -> Counts {
    let replicas = &status["attempt"]["replicas"];
    SCALED.iter().filter_map(|role| Some((*role, replicas[role]["wanted"].as_u64()?))).collect()
}

/// The larger number of each role.
fn most(mut a: Counts, b: Counts) -> Counts {
    for (role, count) in b {
        a.entry(role).and_modify(|most| *most = count.max(*most)).or_insert(count);
    }
    a
}

/// The statuses of a while.
struct Watched {
    /// Seconds until the member was named first.
    named_seconds: Option<f64>,
    most_members: Counts,
}

struct Trial<'a> {
    cluster: &'a TestCluster,
    name: &'a str,
    workers: Vec<SocketAddr>,
}

impl Trial<'_> {
    /// Slows the member with number 0 of a role, and lets it recover.
    fn row(&self, case: &Case) -> Result<Row, TrialError> {
        let member = format!("{}-{}-0", self.name, case.role);
        let members = self.settle()?;
        self.until_not_named(&member)?;
        let healthy = self.figures()?;
        let process = self.cluster.jobs.process_of(&member)?;
        let limited = LimitedProcessor::to(process, SLOW_PERCENT)?;
        let throttled_before = limited.throttled_periods()?;
        let while_slow = self.watch(&member, JUDGED)?;
        let slow = self.figures()?;
        let throttled_periods = limited.throttled_periods()? - throttled_before;
        drop(limited);
        let afterwards = self.watch(&member, JUDGED)?;
        let after = self.figures()?;
        let status = self.status()?;
        no_restart(self.name, &status["attempt"]["number"])?;
        if self.cluster.jobs.process_of(&member)? != process {
            return Err(unmet(format!("the same process in {member}"), "another one, without the limit"));
        }
        Ok(Row {
            member,
            promise: case.promise,
            named_seconds: while_slow.named_seconds,
            throttled_periods,
            healthy,
            slow,
            after,
            most_members: most(most(while_slow.most_members, afterwards.most_members), counts(&status)),
            members,
            decisions: status["decisions"].clone(),
        })
    }

    /// Waits until the healthy job has all its members and their numbers do not change. Returns
    /// the numbers.
    fn settle(&self) -> Result<Counts, TrialError> {
        let started = Instant::now();
        let (mut seen, mut since) = (counts(&self.status()?), Instant::now());
        while started.elapsed() < WARM || since.elapsed() < UNCHANGED {
            if started.elapsed() > SETTLED {
                let expected = format!("numbers of members that stay for {UNCHANGED:?} in a healthy job");
                return Err(unmet(expected, self.status()?["decisions"].clone()));
            }
            std::thread::sleep(LOOK);
            let now = counts(&self.status()?);
            if now != seen {
                (seen, since) = (now, Instant::now());
            }
        }
        Ok(seen)
    }

    /// Waits until the status does not name the member, which is healthy.
    fn until_not_named(&self, member: &str) -> Result<(), HarnessError> {
        eventually(NAMED, &format!("a status that does not name {member}, which is healthy"), || {
            let slowest = self.status()?["slowest"].clone();
            if slowest["pod"] == member { Err(not_yet(slowest)) } else { Ok(()) }
        })
    }

    /// The status. A machine whose processors are busy may take long for it.
    fn status(&self) -> Result<Value, HarnessError> {
        eventually(ANSWERS, "the job's status", || self.cluster.jobs.status(self.name))
    }

    /// Looks at the status for `time`.
    fn watch(&self, member: &str, time: Duration) -> Result<Watched, HarnessError> {
        let started = Instant::now();
        let mut watched = Watched { named_seconds: None, most_members: Counts::new() };
        while started.elapsed() < time {
            let status = self.status()?;
            watched.most_members = most(watched.most_members, counts(&status));
            if watched.named_seconds.is_none() && status["slowest"]["pod"] == member {
                watched.named_seconds = Some(started.elapsed().as_secs_f64());
                println!("named: {}", status["slowest"]);
            }
            std::thread::sleep(LOOK);
        }
        Ok(watched)
    }

    fn figures(&self) -> Result<Figures, HarnessError> {
        let samples_per_second = self.samples_per_second()?;
        let mode = self.status()?["mode"].as_str().unwrap_or_default().to_owned();
        let coordinator = format!("{}-coordinator-0", self.name);
        let page = eventually(ANSWERS, "the coordinator's metrics", || self.cluster.jobs.metrics(&coordinator))?;
        let share_changes = http::sum_of(&page, SHARE_CHANGES);
        let share_changes = share_changes.ok_or_else(|| missing(&coordinator, &json!("its metrics"), SHARE_CHANGES))?;
        let figures = Figures { samples_per_second, mode, share_changes };
        println!("{}", figures.to_json());
        Ok(figures)
    }

    /// The samples per second of all dense workers, over [`MEASURED`].
    fn samples_per_second(&self) -> Result<f64, HarnessError> {
        let before = trained(&self.workers)?;
        std::thread::sleep(MEASURED);
        Ok(rate(&before, &trained(&self.workers)?))
    }
}

/// The samples that each dense worker has trained, with the time of its answer.
pub(super) fn trained(workers: &[SocketAddr]) -> Result<Vec<(Instant, f64)>, HarnessError> {
    workers.iter().map(|worker| samples(*worker, ANSWERS).map(|sum| (Instant::now(), sum))).collect()
}

/// The samples per second of all dense workers between two looks. Each worker has its own time: a
/// slow one may take long to answer.
pub(super) fn rate(before: &[(Instant, f64)], after: &[(Instant, f64)]) -> f64 {
    let rate = |((at, before), (then, after)): (&(Instant, f64), &(Instant, f64))| {
        (after - before) / then.duration_since(*at).as_secs_f64().max(f64::MIN_POSITIVE)
    };
    before.iter().zip(after).map(rate).sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn figures(samples_per_second: f64, share_changes: f64) -> Figures {
        Figures { samples_per_second, mode: "sync".to_owned(), share_changes }
    }

    fn row() -> Row {
        let members = Counts::from([("ps", 3), ("embeddingWorker", 2)]);
        Row {
            member: "slow-server-ps-0".to_owned(),
            promise: Promise::Moves,
            named_seconds: Some(12.0),
            throttled_periods: 400,
            healthy: figures(50_000.0, 1.0),
            slow: figures(40_000.0, 2.0),
            after: figures(49_000.0, 3.0),
            members: members.clone(),
            most_members: members,
            decisions: json!([]),
        }
    }

    fn broken(row: &Row) -> String {
        row.broken().map(|error| error.to_string()).unwrap_or_default()
    }

    #[test]
    fn each_promise_is_checked_where_work_moves() {
        assert_eq!(broken(&row()), "");
        assert!(broken(&Row { named_seconds: None, ..row() }).contains("named within"));
        assert!(broken(&Row { named_seconds: Some(31.0), ..row() }).contains("after 31 s"));
        assert!(broken(&Row { slow: figures(34_000.0, 2.0), ..row() }).contains("0.68 of it"));
        assert!(broken(&Row { after: figures(44_000.0, 3.0), ..row() }).contains("0.88 of it"));
        let one_more = Counts::from([("ps", 3), ("embeddingWorker", 3)]);
        assert!(broken(&Row { most_members: one_more, ..row() }).contains("no embeddingWorker added"));
    }

    #[test]
    fn a_row_without_proof_is_refused() {
        assert!(broken(&Row { throttled_periods: 0, ..row() }).contains("slowed by its limit"));
        assert!(broken(&Row { healthy: figures(0.0, 1.0), ..row() }).contains("a healthy job that trains"));
        assert!(broken(&Row { slow: figures(40_000.0, 1.0), ..row() }).contains("a smaller share of work"));
        let survives = Row { promise: Promise::Survives, throttled_periods: 0, ..row() };
        assert!(broken(&survives).contains("slowed by its limit"));
    }

    #[test]
    fn a_role_whose_work_does_not_move_promises_less() {
        let slow = Row { slow: figures(1.0, 1.0), named_seconds: None, ..row() };
        assert_eq!(broken(&Row { promise: Promise::Survives, ..slow.clone() }), "");
        assert!(broken(&Row { promise: Promise::Named, ..slow }).contains("named within"));
        assert_eq!(broken(&Row { promise: Promise::Named, slow: figures(1.0, 1.0), ..row() }), "");
    }

    #[test]
    fn the_most_members_of_each_role_count() {
        let of = |replicas: Value| counts(&json!({"attempt": {"replicas": replicas}}));
        let (two, three) =
            (of(json!({"ps": {"wanted": 3}, "loader": {"wanted": 2}})), of(json!({"ps": {"wanted": 2}})));
        assert_eq!(most(two.clone(), three), Counts::from([("ps", 3), ("loader", 2)]));
        assert_eq!(most(Counts::new(), two), Counts::from([("ps", 3), ("loader", 2)]));
    }

    #[test]
    fn the_table_has_the_figures_of_the_row() {
        let row = row().to_json();
        assert_eq!((&row["namedAfterSeconds"], &row["slow"]["samplesPerSecond"]), (&json!(12.0), &json!(40_000.0)));
        assert_eq!(row["shareOfHealthy"], json!({"slow": 0.8, "after": 0.98}));
        assert_eq!(row["members"]["most"], json!({"ps": 3, "embeddingWorker": 2}));
    }
}

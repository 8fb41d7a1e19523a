//! One member of each role in turn becomes slow, and recovers: its container is limited to a small
//! part of a processor, from outside. The job has to name it, to move work away from it, and to
//! give it work again. The trial writes a table as JSON.

use std::net::{IpAddr, SocketAddr};
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
use crate::error::unmet;

/// The part of a processor that a slow member has, in percent.
const SLOW_PERCENT: u32 = 3;
/// How long the job may take to name a slow member.
const NAMED: Duration = Duration::from_secs(30);
/// The time after a member has become slow, or has recovered, at which throughput is judged.
const JUDGED: Duration = Duration::from_secs(90);
/// How long a throughput is measured.
const MEASURED: Duration = Duration::from_secs(30);
/// How long the job may take to train at its usual speed at first.
const WARM: Duration = Duration::from_secs(60);
const SECOND: Duration = Duration::from_secs(1);
/// The least throughput over the healthy one while a member is slow, and after it has recovered.
const WHILE_SLOW: f64 = 0.7;
const AFTERWARDS: f64 = 0.9;
/// Dense workers of the job.
const WORKERS: u32 = 4;

/// A member that becomes slow.
struct Case {
    /// The role, as in the names of pods.
    role: &'static str,
    /// Its section in a status, if its work has to move away.
    moves: Option<&'static str>,
}

/// Work moves away from parameter servers and embedding workers. The others are measured only.
const CASES: [Case; 5] = [
    Case { role: "ps", moves: Some("ps") },
    Case { role: "embedding-worker", moves: Some("embeddingWorker") },
    Case { role: "dense-worker", moves: None },
    Case { role: "loader", moves: None },
    Case { role: "coordinator", moves: None },
];

/// A row of the table.
#[derive(Debug, Clone, PartialEq)]
struct Row {
    member: String,
    /// Whether its work has to move away.
    moves: bool,
    /// Seconds until the status named it; `None` if it did not.
    named_seconds: Option<f64>,
    /// Samples per second before, while it was slow, and after it had recovered.
    healthy: f64,
    slow: f64,
    after: f64,
    /// Replicas of its role before and while it was slow.
    replicas: [u64; 2],
    mode: String,
}

impl Row {
    fn to_json(&self) -> Value {
        let [before, during] = self.replicas;
        json!({
            "member": self.member,
            "namedAfterSeconds": self.named_seconds.map(f64::round),
            "samplesPerSecond": {
                "healthy": self.healthy.round(), "slow": self.slow.round(), "after": self.after.round(),
            },
            "replicas": {"healthy": before, "slow": during},
            "modeWhileSlow": self.mode,
        })
    }

    /// The first promise about the member that does not hold.
    fn broken(&self) -> Option<TrialError> {
        let member = &self.member;
        let share = |rate: f64| format!("{:.2} of it", rate / self.healthy.max(1.0));
        if !self.moves {
            return None;
        }
        if self.named_seconds.is_none_or(|seconds| seconds > NAMED.as_secs_f64()) {
            return Some(unmet(format!("{member} named within {NAMED:?}"), format!("{:?} s", self.named_seconds)));
        }
        if self.slow < WHILE_SLOW * self.healthy {
            return Some(unmet(format!("{WHILE_SLOW} of the throughput while {member} is slow"), share(self.slow)));
        }
        if self.after < AFTERWARDS * self.healthy {
            return Some(unmet(format!("{AFTERWARDS} of it after {member} has recovered"), share(self.after)));
        }
        let [before, during] = self.replicas;
        (during > before).then(|| unmet(format!("{before} members beside {member}"), during))
    }
}

pub(in crate::cluster) fn slow_members(cluster: &TestCluster) -> Result<(), TrialError> {
    if cluster.skips("slow members")? {
        return Ok(());
    }
    let name = "slow-members";
    let jobs = &cluster.jobs;
    jobs.submit(name, &merged(endless(), job()))?;
    jobs.until_phase(name, "Training")?;
    let trial = Trial { cluster, name, workers: workers(cluster, name)? };
    std::thread::sleep(WARM);
    let rows = CASES.iter().map(|case| trial.slowed(case)).collect::<Result<Vec<_>, _>>()?;
    jobs.delete(name)?;
    let table = Value::from_iter(rows.iter().map(Row::to_json));
    println!("{table:#}");
    write(&cluster.paths.root().join("slow-members.json"), format!("{table:#}\n"))?;
    rows.iter().find_map(Row::broken).map_or(Ok(()), Err)
}

/// A DLRM over many rows, whose parameter servers and embedding workers have about as much work as
/// its dense workers. The operator may change its mode and the number of its members.
fn job() -> Value {
    json!({
        "model": {"kind": "dlrm", "hidden": [64], "bottom": [32]},
        "data": {"synthetic": {"vocabulary": 100_000}},
        "training": {"mode": "auto", "globalBatchSize": 4_000, "localBatchSize": 1_000},
        "roles": {
            "ps": {"replicas": 3}, "embeddingWorker": {"replicas": 2}, "loader": {"replicas": 2},
            "denseWorker": {"replicas": WORKERS},
        },
        "autoscaling": {
            "mode": "apply", "upWindowSeconds": 20, "downWindowSeconds": 20, "coolDownSeconds": 30,
            "ps": {"min": 3}, "embeddingWorker": {"min": 2}, "denseWorker": {"scaler": "external"},
        },
    })
}

/// The metrics addresses of the dense workers.
fn workers(cluster: &TestCluster, name: &str) -> Result<Vec<SocketAddr>, TrialError> {
    let address = |worker: u32| {
        let pod = format!("{name}-dense-worker-{worker}");
        let text = cluster.jobs.address_of(&pod)?;
        let ip: Option<IpAddr> = text.parse().ok();
        let ip = ip.ok_or_else(|| missing(&pod, &json!(text), "an IP address"))?;
        Ok(SocketAddr::new(ip, METRICS_PORT))
    };
    (0..WORKERS).map(address).collect()
}

struct Trial<'a> {
    cluster: &'a TestCluster,
    name: &'a str,
    workers: Vec<SocketAddr>,
}

impl Trial<'_> {
    /// Slows the member with number 0 of a role, and lets it recover.
    fn slowed(&self, case: &Case) -> Result<Row, TrialError> {
        let member = format!("{}-{}-0", self.name, case.role);
        let process = self.cluster.jobs.process_of(&member)?;
        let healthy = self.rate()?;
        let before = self.replicas(case)?;
        let limited = LimitedProcessor::to(process, SLOW_PERCENT)?;
        let named_seconds = self.until_named(&member, JUDGED)?;
        let slow = self.rate()?;
        let (during, mode) = (self.replicas(case)?, self.status()?["mode"].as_str().unwrap_or_default().to_owned());
        drop(limited);
        std::thread::sleep(JUDGED);
        let after = self.rate()?;
        let moves = case.moves.is_some();
        let row = Row { member, moves, named_seconds, healthy, slow, after, replicas: [before, during], mode };
        println!("{}", row.to_json());
        Ok(row)
    }

    fn status(&self) -> Result<Value, HarnessError> {
        self.cluster.jobs.status(self.name)
    }

    /// The wanted replicas of a role; 0 if its work does not move.
    fn replicas(&self, case: &Case) -> Result<u64, HarnessError> {
        let Some(section) = case.moves else { return Ok(0) };
        let status = self.status()?;
        let of_role = &status["attempt"]["replicas"][section];
        of_role["wanted"].as_u64().ok_or_else(|| missing("the replicas", of_role, "wanted"))
    }

    /// Waits for `time`. Returns the seconds until the status named the member.
    fn until_named(&self, member: &str, time: Duration) -> Result<Option<f64>, HarnessError> {
        let (started, mut named) = (Instant::now(), None);
        while started.elapsed() < time {
            if named.is_none() && self.status()?["slowest"]["pod"] == member {
                named = Some(started.elapsed().as_secs_f64());
            }
            std::thread::sleep(SECOND);
        }
        Ok(named)
    }

    /// The samples per second of all dense workers, over [`MEASURED`].
    fn rate(&self) -> Result<f64, HarnessError> {
        let (started, before) = (Instant::now(), self.trained()?);
        std::thread::sleep(MEASURED);
        Ok((self.trained()? - before) / started.elapsed().as_secs_f64())
    }

    /// The samples that the dense workers have trained. A slow one may take long to answer.
    fn trained(&self) -> Result<f64, HarnessError> {
        let samples = |worker: &SocketAddr| {
            eventually(WARM, "a dense worker's metrics", || {
                let page = http::get(*worker, "/metrics")?;
                let sum = http::sum_of(&page, "rectrain_dense_worker_samples_total");
                sum.ok_or_else(|| not_yet("it has trained no sample"))
            })
        };
        self.workers.iter().map(samples).sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row() -> Row {
        Row {
            member: "slow-members-ps-0".to_owned(),
            moves: true,
            named_seconds: Some(12.0),
            healthy: 50_000.0,
            slow: 40_000.0,
            after: 49_000.0,
            replicas: [3, 3],
            mode: "sync".to_owned(),
        }
    }

    fn broken(row: &Row) -> String {
        row.broken().map(|error| error.to_string()).unwrap_or_default()
    }

    #[test]
    fn each_promise_is_checked_where_work_moves() {
        assert_eq!(broken(&row()), "");
        assert!(broken(&Row { named_seconds: None, ..row() }).contains("named within"));
        assert!(broken(&Row { named_seconds: Some(31.0), ..row() }).contains("named within"));
        assert!(broken(&Row { slow: 34_000.0, ..row() }).contains("0.68 of it"));
        assert!(broken(&Row { after: 44_000.0, ..row() }).contains("0.88 of it"));
        assert!(broken(&Row { replicas: [3, 4], ..row() }).contains("3 members"));
        let measured_only = Row { moves: false, slow: 1.0, named_seconds: None, ..row() };
        assert_eq!(broken(&measured_only), "");
    }

    #[test]
    fn the_table_has_the_figures_of_the_row() {
        let row = row().to_json();
        assert_eq!((&row["namedAfterSeconds"], &row["samplesPerSecond"]["slow"]), (&json!(12.0), &json!(40_000.0)));
        assert_eq!(row["replicas"], json!({"healthy": 3, "slow": 3}));
    }
}

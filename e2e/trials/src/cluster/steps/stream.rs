//! A job on a Kafka topic, with TLS and SASL from a Secret. The broker is killed under it. A burst
//! of rows gives it more loaders. It is suspended while rows arrive. No row may be lost, and none
//! trained twice.
//!
//! Each row has a number of its own, as the id of two features. `once` keeps a row for every id
//! that was trained. `twice` admits an id at its second sighting, and its counts are in checkpoints
//! too. So the rows of `once` are the records that were trained, and the rows of `twice` the
//! records that were trained again. Neither count is the coordinator's own.

use std::fmt::Write as _;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use rectrain_harness::events::missing;
use rectrain_harness::files::write;
use rectrain_harness::jobs::{Jobs, NAMESPACE};
use rectrain_harness::manifests::{merged, with_checkpoints, with_limits};
use rectrain_harness::waiting::eventually;
use rectrain_harness::{HarnessError, http, kafka, not_yet, skips};
use serde_json::{Value, json};

use super::recovery::resumed_at;
use super::serving::{server, under_load, until_serving};
use crate::TrialError;
use crate::cluster::support::kafka::{ADDRESS, Kafka, SECRET};
use crate::cluster::support::outcome::no_restart;
use crate::cluster::support::{TestCluster, object_store};
use crate::error::unmet;

/// Rows that a loader reads within seconds.
const FEW: u64 = 50_000;
/// Rows that keep a loader busy for a while.
const MANY: u64 = 400_000;
/// The rows that a burst keeps waiting: more than two loaders read within `catchUpSeconds`. So a
/// decision sees the need throughout its window.
const WAITING: u64 = 1_000_000;
/// The most rows of a part. Each takes some 100 bytes of a parameter server.
const MOST: u64 = 6_000_000;
/// How long the rows of a part may take to be trained.
const TRAINED: Duration = Duration::from_secs(240);
/// How long a decision about the loaders may take.
const DECIDED: Duration = Duration::from_secs(150);
/// How long rows that come again would take to show.
const LATE: Duration = Duration::from_secs(5);
/// How long the job is suspended.
const SUSPENDED: Duration = Duration::from_secs(60);
/// Rows of a global batch. They are many, so that a loader spends its time on reading, and not on
/// handing batches over.
const BATCH: u64 = 10_000;
/// Global steps between two checkpoints.
const EVERY: u64 = 10;

/// The broker is killed while rows wait, and while none wait. The job goes on without a restart.
pub(in crate::cluster) fn broker(cluster: &TestCluster) -> Result<(), TrialError> {
    in_trial(cluster, "stream-broker", |trial| {
        trial.submit(&trial.job())?;
        trial.write(MANY)?;
        let before = eventually(TRAINED, "the first rows", || trial.trained())?.once;
        let away = trial.kafka.restart()?;
        println!("broker killed with {before} of {} rows trained: back after {away:.1?}", trial.written);
        if before >= trial.written {
            return Err(unmet("rows that wait when the broker is killed", format!("{before} rows, all trained")));
        }
        trial.until_trained()?;
        trial.write(FEW)?;
        trial.until_trained()?;
        no_restart(trial.name, &trial.jobs.status(trial.name)?["attempt"]["number"])
    })
}

/// A burst gives the job more loaders, and they leave when all rows are trained.
pub(in crate::cluster) fn lag(cluster: &TestCluster) -> Result<(), TrialError> {
    in_trial(cluster, "stream-lag", |trial| {
        trial.submit(&merged(trial.job(), following_the_lag()))?;
        trial.until_trained()?;
        let loaders = trial.until_more_loaders()?;
        trial.until_trained()?;
        eventually(DECIDED, "one loader after the burst", || match trial.loaders()? {
            1 => Ok(()),
            more => Err(not_yet(format!("{more} loaders"))),
        })?;
        println!("{loaders} loaders in the burst, and one after it");
        trial.write(FEW)?;
        trial.until_trained()?;
        no_restart(trial.name, &trial.jobs.status(trial.name)?["attempt"]["number"])
    })
}

/// The job is suspended while rows wait and arrive, and goes on behind the rows of its checkpoint.
pub(in crate::cluster) fn suspended(cluster: &TestCluster) -> Result<(), TrialError> {
    in_trial(cluster, "stream-suspended", |trial| {
        object_store::start(&cluster.paths, NAMESPACE)?;
        object_store::make_bucket(cluster.kubectl(), NAMESPACE)?;
        let (jobs, name) = (trial.jobs, trial.name);
        trial.submit(&with_checkpoints(&trial.job(), name, EVERY))?;
        trial.write(MANY)?;
        let step = jobs.until_step_after(name, EVERY)?;
        jobs.patch(name, &json!({"spec": {"suspend": true}}))?;
        let held = jobs.until_phase(name, "Suspended")?;
        let saved = held["status"]["lastCheckpoint"]["step"].as_u64().unwrap_or(0);
        trial.write(FEW)?;
        std::thread::sleep(SUSPENDED);
        jobs.patch(name, &json!({"spec": {"suspend": false}}))?;
        let resumed = resumed_at(jobs, name)?;
        println!("suspended near step {step}, with a checkpoint of step {saved}: resumed at step {resumed}");
        if saved < step || resumed < saved {
            let found = format!("a checkpoint of step {saved}, and a resumption at step {resumed}");
            return Err(unmet(format!("a resumption from a checkpoint of step {step} or later"), found));
        }
        trial.until_trained()
    })
}

/// Servers of the job's model take newer ones while rows arrive, and no request fails.
pub(in crate::cluster) fn served(cluster: &TestCluster) -> Result<(), TrialError> {
    in_trial(cluster, "stream-served", |trial| {
        object_store::start(&cluster.paths, NAMESPACE)?;
        object_store::make_bucket(cluster.kubectl(), NAMESPACE)?;
        let (jobs, name) = (trial.jobs, trial.name);
        trial.submit(&with_checkpoints(&trial.job(), name, EVERY))?;
        trial.write(MANY)?;
        jobs.apply(&server(name, &json!({"model": {"job": name}, "updateEverySeconds": 10})))?;
        let first = until_serving(jobs, name, "servers with the first model", |step| step > 0)?;
        let request = cluster.paths.run().join("stream-request.json");
        write(&request, request_for(7).to_string())?;
        let answers = under_load(jobs, name, &request, || {
            trial.write(MANY)?;
            until_serving(jobs, name, "servers with a newer model", |step| step > first).map(drop)?;
            trial.until_trained()
        })?;
        println!("answers by step, while rows arrived: {answers:?}");
        if answers.len() < 2 {
            return Err(unmet("answers of two models at least", format!("{answers:?}")));
        }
        Ok(jobs.within(&["delete", "recmodelserver", name, "--timeout=120s"]).map(drop)?)
    })
}

/// A request for the row with a number.
fn request_for(number: u64) -> Value {
    let column = |name: &str| json!({"name": name, "shape": [1], "datatype": "INT64", "data": [number]});
    json!({"inputs": [column("once"), column("twice")]})
}

/// A decision within a minute about loaders, and about nothing else.
fn following_the_lag() -> Value {
    let external = json!({"scaler": "external"});
    json!({"autoscaling": {
        "mode": "apply", "upWindowSeconds": 15, "downWindowSeconds": 15, "coolDownSeconds": 10,
        "ps": external, "embeddingWorker": external, "denseWorker": external,
        "loader": {"min": 1, "max": 4, "catchUpSeconds": 10},
    }})
}

/// Runs a part of the trial on a topic of its own, with a few rows. Removes what it made.
fn in_trial(
    cluster: &TestCluster,
    name: &'static str,
    run: impl FnOnce(&mut Trial<'_>) -> Result<(), TrialError>,
) -> Result<(), TrialError> {
    if cluster.skips("a job on Kafka")? {
        return Ok(());
    }
    if let Err(reason) = kafka::java().and_then(|_| kafka::jars()) {
        return Ok(skips::skip("a job on Kafka", reason)?);
    }
    let file = cluster.paths.run().join("stream.csv");
    let mut trial = Trial { jobs: &cluster.jobs, kafka: Kafka::start(cluster)?, name, file, written: 0 };
    trial.write(FEW)?;
    run(&mut trial)?;
    trial.jobs.delete(name)?;
    Ok(trial.kafka.remove()?)
}

/// The ids that have a row.
#[derive(Debug, PartialEq, Eq)]
struct Trained {
    /// The records that were trained.
    once: u64,
    /// The records that were trained again.
    twice: u64,
}

impl Trained {
    /// Reads a parameter server's metrics. `None` without them.
    fn read(page: &str) -> Option<Self> {
        let rows = |table| http::sum_with(page, "rectrain_ps_table_rows", &[table]);
        Some(Self { once: rows("table=\"once\"")? as u64, twice: rows("table=\"twice\"")? as u64 })
    }
}

/// A job, which has the name of its topic.
struct Trial<'a> {
    jobs: &'a Jobs,
    kafka: Kafka<'a>,
    name: &'static str,
    /// The file of the rows that are written next.
    file: PathBuf,
    /// Rows in the topic.
    written: u64,
}

impl Trial<'_> {
    /// One member of each role. The loader, with a fiftieth of a core, limits the rows per second.
    fn job(&self) -> Value {
        json!({
            "model": {"embeddingDim": 4, "hidden": [8]},
            "features": {"sparse": [{"name": "once"}, {"name": "twice", "admission": {"count": 2}}], "dense": null},
            "data": {"synthetic": null, "train": {"kafka": {
                "bootstrapServers": [ADDRESS], "topics": [self.name], "format": "json", "lingerMillis": 1_000,
                "security": {"tls": true, "sasl": "scramSha512", "secretName": SECRET},
            }}},
            "training": {"globalBatchSize": BATCH},
            "roles": {
                "ps": {"replicas": 1}, "embeddingWorker": {"replicas": 1}, "denseWorker": {"replicas": 1},
                "loader": with_limits(&json!({"cpu": "20m"})),
            },
        })
    }

    fn submit(&self, job: &Value) -> Result<(), HarnessError> {
        self.jobs.submit(self.name, job)?;
        self.jobs.until_phase(self.name, "Training").map(drop)
    }

    /// Writes rows that are not in the topic yet.
    fn write(&mut self, rows: u64) -> Result<(), HarnessError> {
        write(&self.file, csv(self.written, rows))?;
        self.kafka.write(&self.file, self.name)?;
        self.written += rows;
        Ok(())
    }

    fn trained(&self) -> Result<Trained, HarnessError> {
        let pod = format!("{}-ps-0", self.name);
        let page = self.jobs.metrics(&pod)?;
        Trained::read(&page).ok_or_else(|| missing(&pod, &json!("its metrics"), "the rows of its tables"))
    }

    /// Waits until all rows are trained. None may be lost, and none trained again.
    fn until_trained(&self) -> Result<(), TrialError> {
        let started = Instant::now();
        eventually(TRAINED, &format!("{} rows, all trained", self.written), || {
            let waiting = self.waiting()?;
            match self.trained()? {
                Trained { once, .. } if once >= self.written && waiting == 0 => Ok(()),
                trained => Err(not_yet(format!("{trained:?}, and {waiting} rows wait"))),
            }
        })?;
        println!("{} rows trained after {:.0} s", self.written, started.elapsed().as_secs_f64());
        std::thread::sleep(LATE);
        let status = self.jobs.status(self.name)?;
        let found = self.trained()?;
        if found != (Trained { once: self.written, twice: 0 }) || status["stream"]["lostRecords"] != 0 {
            let found = format!("{found:?}, and {} lost", status["stream"]["lostRecords"]);
            return Err(unmet(format!("each of {} rows trained once", self.written), found));
        }
        Ok(())
    }

    /// The rows of the topic that wait, as the status has them.
    fn waiting(&self) -> Result<u64, HarnessError> {
        let status = self.jobs.status(self.name)?;
        status["stream"]["lagRows"].as_u64().ok_or_else(|| not_yet(format!("no lag in {status}")))
    }

    /// The loaders that take part.
    fn loaders(&self) -> Result<u64, HarnessError> {
        let status = self.jobs.status(self.name)?;
        let loaders = &status["attempt"]["replicas"]["loader"];
        loaders["present"].as_u64().ok_or_else(|| missing(self.name, loaders, "present"))
    }

    /// Writes rows faster than one loader reads them, until there are more loaders. Returns their
    /// number.
    fn until_more_loaders(&mut self) -> Result<u64, TrialError> {
        let started = Instant::now();
        loop {
            let (loaders, waiting) = (self.loaders()?, self.waiting()?);
            if loaders > 1 {
                println!("{loaders} loaders {:.0} s after the burst began", started.elapsed().as_secs_f64());
                return Ok(loaders);
            }
            if started.elapsed() > DECIDED || self.written > MOST {
                let decisions = self.jobs.status(self.name)?["decisions"].clone();
                return Err(unmet(format!("another loader for {waiting} rows that wait"), decisions));
            }
            if waiting < WAITING {
                self.write(MANY)?;
            } else {
                std::thread::sleep(Duration::from_secs(1));
            }
        }
    }
}

/// Rows with the numbers from `first` on, and a label that is 1 for every third of them.
fn csv(first: u64, rows: u64) -> String {
    let mut text = "label,once,twice\n".to_owned();
    for number in first..first + rows {
        // A text takes every write.
        let _written = writeln!(text, "{},{number},{number}", u64::from(number.is_multiple_of(3)));
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_row_comes_in_two_files() {
        assert_eq!(csv(3, 2), "label,once,twice\n1,3,3\n0,4,4\n");
        assert_eq!(csv(5, 1), "label,once,twice\n0,5,5\n");
    }

    #[test]
    fn rows_that_were_trained_again_are_told_from_the_others() {
        let row = |table, rows| format!("rectrain_ps_table_rows{{replica=\"0\",table=\"{table}\"}} {rows}\n");
        let page = row("once", 10) + &row("twice", 2);
        assert_eq!(Trained::read(&page), Some(Trained { once: 10, twice: 2 }));
        assert_eq!(Trained::read(&row("once", 10)), None);
    }
}

//! Measurements of a job at one moment. Only the time is required; the policy makes no decision
//! about an unknown quantity.

use serde::{Deserialize, Serialize};

use crate::{AutoMode, Decision, LoaderLoad, LoaderUse};

/// A dense worker since the previous observation.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Worker {
    /// Rows of each measured batch.
    pub batch_rows: u32,
    /// Seconds of computation of each of its last batches, without waiting; or only their mean.
    pub compute_seconds: Vec<f64>,
}

impl Worker {
    /// Mean seconds of computation of `rows` rows, in proportion to the measured rows.
    pub(crate) fn mean_seconds(&self, rows: f64) -> f64 {
        let mean = self.compute_seconds.iter().sum::<f64>() / self.compute_seconds.len().max(1) as f64;
        mean * rows / f64::from(self.batch_rows)
    }
}

/// Fills `measured` up to `count` workers. Workers that idle in `sync` report nothing: each is
/// assumed to be as fast as the measured workers on average.
#[must_use]
pub fn with_idle(mut measured: Vec<Worker>, count: usize) -> Vec<Worker> {
    let rows = measured.iter().map(|worker| f64::from(worker.batch_rows)).sum::<f64>() / measured.len().max(1) as f64;
    let seconds = measured.iter().map(|worker| worker.mean_seconds(rows)).sum::<f64>() / measured.len().max(1) as f64;
    if !measured.is_empty() {
        let idle = Worker { batch_rows: (rows.round() as u32).max(1), compute_seconds: vec![seconds] };
        measured.resize(count.max(measured.len()), idle);
    }
    measured
}

/// A parameter server.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct PsLoad {
    /// Memory in use.
    pub bytes: u64,
    /// Its memory limit, if it has one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub limit_bytes: Option<u64>,
    /// Share of the time, 0 to 1, that it spends in look-ups and updates.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub busy: Option<f64>,
    /// Keys looked up per second since the previous observation.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub look_ups_per_second: Option<f64>,
    /// How often it was killed for its memory since its pod was created.
    #[serde(default)]
    pub oom_kills: u32,
}

/// A server is slow if a row takes it this many times as long as the others, and if it is this many
/// times as busy. Their medians count.
const SLOW_FACTOR: f64 = 2.5;
const SLOW_BUSIER: f64 = 1.5;

/// A slow parameter server. Its coordinator moves slots away from it, and another server would be
/// no cure.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct SlowServer {
    pub(crate) index: usize,
    /// Its time for a row over the median of the others.
    pub(crate) factor: f64,
    /// The share of the time that a server of the usual speed would be busy in its place.
    pub(crate) usual_busy: f64,
}

/// All embedding workers together.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct EmbeddingWorkerLoad {
    /// Mean seconds that a batch waits in the queue.
    pub queue_wait_seconds: f64,
    /// Mean seconds of work on a batch after its wait.
    pub service_seconds: f64,
}

/// The load of the nodes that run the job's pods: an early warning of slow workers (GBA, §3.2,
/// figure 1).
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct ClusterLoad {
    /// CPU in use by other pods over the CPU that the job has not requested: 0 to 1, mean over
    /// nodes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub node_cpu: Option<f64>,
    /// Nodes under memory, disk or process pressure.
    #[serde(default)]
    pub nodes_under_pressure: u32,
    /// Pods of the job that wait for a node.
    #[serde(default)]
    pub pending_pods: u32,
    /// Pods preempted or evicted since the previous observation.
    #[serde(default)]
    pub preemptions: u32,
}

/// The number of replicas of a role.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct ReplicaCount {
    /// Replicas that the role should have.
    pub wanted: u32,
    /// Replicas that are ready.
    pub ready: u32,
}

/// The numbers of replicas of all roles that can be scaled.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Replicas {
    /// Parameter servers.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ps: Option<ReplicaCount>,
    /// Embedding workers.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub embedding_worker: Option<ReplicaCount>,
    /// Dense workers.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub dense_worker: Option<ReplicaCount>,
    /// Loaders.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub loader: Option<ReplicaCount>,
}

/// Measurements of a job at one moment.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct Observations {
    /// The time, in seconds since any fixed moment.
    pub at_seconds: u64,
    /// The number of the job's attempt. In another attempt all processes have restarted.
    #[serde(skip_serializing_if = "is_zero")]
    pub attempt: u32,
    /// Decisions since the previous observation that [`crate::decide`] did not make, such as the
    /// one after a kill that ended an attempt.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub decided_elsewhere: Vec<Decision>,
    /// The mode in use. Absent while the job trains no step, or in a mode that is not switched
    /// automatically.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub mode: Option<AutoMode>,
    /// Rows of a global step.
    pub global_batch_rows: u32,
    /// Rows of a worker's batch in `gba`, and of a pulled piece in `sync`.
    pub local_batch_rows: u32,
    /// Whether free workers pull the pieces of a step in `sync`. A piece is a local batch.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub pulls_pieces: bool,
    /// ι of `gba`: gradients that are staler than this many global steps are excluded.
    pub staleness_tolerance: u32,
    /// Dense workers, by rank.
    pub workers: Vec<Worker>,
    /// The first this many workers train in `sync`. Absent: all of them.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub barrier_workers: Option<u32>,
    /// Mean seconds of an all-reduce; known in `sync`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub all_reduce_seconds: Option<f64>,
    /// Mean seconds per batch that a worker waits for a token and parameters; known in `gba`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub exchange_seconds: Option<f64>,
    /// Mean seconds per batch that a worker waits for data and embeddings.
    pub wait_seconds: f64,
    /// Rows trained per second by all workers since the previous observation. Absent if training
    /// was paused meanwhile.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub samples_per_second: Option<f64>,
    /// Parameter servers, by index.
    pub ps: Vec<PsLoad>,
    /// Embedding workers.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub embedding_workers: Option<EmbeddingWorkerLoad>,
    /// Loaders of a stream. Absent for a job on files.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub loaders: Option<LoaderLoad>,
    /// Loaders of data that ends. Absent for a job on a stream.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub loader_use: Option<LoaderUse>,
    /// Nodes and pending pods.
    pub cluster: ClusterLoad,
    /// Replicas of the roles.
    pub replicas: Replicas,
}

#[allow(clippy::trivially_copy_pass_by_ref, reason = "serde passes a reference")]
fn is_zero(number: &u32) -> bool {
    *number == 0
}

/// A measurement outside its range.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[error("{field} is {value}: expected {expected}")]
pub struct ObservationError {
    /// The field's name in JSON.
    pub field: &'static str,
    /// The value found.
    pub value: f64,
    /// The expected range, in words.
    pub expected: &'static str,
}

/// A number, with its name.
type Field = (&'static str, f64);

impl Observations {
    /// Checks every number against its range.
    ///
    /// # Errors
    /// The first number outside its range.
    pub fn check(&self) -> Result<(), ObservationError> {
        let refuse = |(field, value): Field, expected| Err(ObservationError { field, value, expected });
        if let Some(wrong) =
            self.times().chain(self.look_ups()).find(|(_, seconds)| !seconds.is_finite() || *seconds < 0.0)
        {
            return refuse(wrong, "a finite number of at least 0");
        }
        if let Some(wrong) = self.shares().find(|(_, share)| !(0.0..=1.0).contains(share)) {
            return refuse(wrong, "a share from 0 to 1");
        }
        for worker in &self.workers {
            if worker.batch_rows == 0 {
                return refuse(("workers[].batchRows", 0.0), "at least 1");
            }
            if let Some(seconds) =
                worker.compute_seconds.iter().find(|seconds| !seconds.is_finite() || **seconds <= 0.0)
            {
                return refuse(("workers[].computeSeconds", *seconds), "a finite number above 0");
            }
        }
        Ok(())
    }

    /// The largest number of look-ups or bytes of a parameter server over their mean. Absent if
    /// neither is known of all servers.
    pub(crate) fn unevenness(&self) -> Option<f64> {
        let of = |cost: &dyn Fn(&PsLoad) -> Option<f64>| {
            let costs = self.ps.iter().map(cost).collect::<Option<Vec<f64>>>()?;
            let mean = costs.iter().sum::<f64>() / costs.len() as f64;
            (mean > 0.0).then(|| costs.iter().copied().fold(0.0, f64::max) / mean)
        };
        let all = [of(&|ps| ps.look_ups_per_second), of(&|ps| Some(ps.bytes as f64))];
        all.into_iter().flatten().reduce(f64::max)
    }

    /// The slow parameter servers, of those that report how busy they are.
    pub(crate) fn slow_servers(&self) -> Vec<SlowServer> {
        let known = |(index, ps): (usize, &PsLoad)| {
            let (busy, rows) = (ps.busy?, ps.look_ups_per_second?);
            (rows > 0.0).then_some((index, busy, rows))
        };
        let known: Vec<_> = self.ps.iter().enumerate().filter_map(known).collect();
        let slow = |&(index, busy, rows): &(usize, f64, f64)| {
            let others = known.iter().filter(|(other, ..)| *other != index);
            let usual = median(others.clone().map(|(_, busy, rows)| busy / rows)).filter(|usual| *usual > 0.0)?;
            let factor = busy / rows / usual;
            let is_slow = factor >= SLOW_FACTOR && busy >= SLOW_BUSIER * median(others.map(|(_, busy, _)| *busy))?;
            is_slow.then_some(SlowServer { index, factor, usual_busy: rows * usual })
        };
        known.iter().filter_map(slow).collect()
    }

    fn times(&self) -> impl Iterator<Item = Field> {
        let (embedding, loaders) = (self.embedding_workers, self.loaders);
        [
            ("allReduceSeconds", self.all_reduce_seconds),
            ("exchangeSeconds", self.exchange_seconds),
            ("waitSeconds", Some(self.wait_seconds)),
            ("samplesPerSecond", self.samples_per_second),
            ("embeddingWorkers.queueWaitSeconds", embedding.map(|load| load.queue_wait_seconds)),
            ("embeddingWorkers.serviceSeconds", embedding.map(|load| load.service_seconds)),
            ("loaders.lagRows", loaders.map(|load| load.lag_rows)),
            ("loaders.arriving", loaders.map(|load| load.arriving)),
            ("loaders.read", loaders.map(|load| load.read)),
        ]
        .into_iter()
        .filter_map(|(name, value)| Some((name, value?)))
    }

    fn look_ups(&self) -> impl Iterator<Item = Field> {
        self.ps.iter().filter_map(|ps| Some(("ps[].lookUpsPerSecond", ps.look_ups_per_second?)))
    }

    fn shares(&self) -> impl Iterator<Item = Field> {
        let busy = self.ps.iter().filter_map(|ps| Some(("ps[].busy", ps.busy?)));
        let loaders = self.loaders.into_iter().flat_map(|load| {
            [("loaders.readingShare", load.reading_share), ("loaders.waitingShare", load.waiting_share)]
        });
        let loader_use = self.loader_use.into_iter();
        let loader_use =
            loader_use.flat_map(|load| [("loaderUse.waiting", load.waiting), ("loaderUse.reading", load.reading)]);
        busy.chain(self.cluster.node_cpu.map(|cpu| ("cluster.nodeCpu", cpu))).chain(loaders).chain(loader_use)
    }
}

/// The lower median.
fn median(values: impl Iterator<Item = f64>) -> Option<f64> {
    let mut values: Vec<f64> = values.collect();
    values.sort_by(f64::total_cmp);
    values.get(values.len().checked_sub(1)? / 2).copied()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn servers(loads: &[(f64, f64)]) -> Observations {
        let load = |&(busy, rows)| PsLoad { busy: Some(busy), look_ups_per_second: Some(rows), ..PsLoad::default() };
        Observations { ps: loads.iter().map(load).collect(), ..Observations::default() }
    }

    fn slow(loads: &[(f64, f64)]) -> Vec<usize> {
        servers(loads).slow_servers().into_iter().map(|server| server.index).collect()
    }

    #[test]
    fn a_server_that_takes_long_for_a_row_is_slow_and_a_loaded_one_is_not() {
        assert_eq!(slow(&[(0.1, 1000.0), (1.0, 1000.0), (0.1, 1000.0)]), [1]);
        assert_eq!(slow(&[(1.0, 1000.0), (0.05, 1000.0)]), [0]);
        assert_eq!(slow(&[(0.1, 1000.0), (0.9, 9000.0)]), [0_usize; 0], "it has more rows");
        assert_eq!(slow(&[(0.9, 1000.0), (0.95, 1000.0), (0.8, 1000.0)]), [0_usize; 0], "all are busy");
        assert_eq!(slow(&[(0.3, 1000.0), (0.3, 100.0)]), [0_usize; 0], "it is no busier");
        assert_eq!(slow(&[(0.9, 1000.0)]), [0_usize; 0]);
        let [server] = servers(&[(0.1, 1000.0), (0.8, 500.0)]).slow_servers()[..] else { panic!("one is slow") };
        assert!((server.factor - 16.0).abs() < 1e-9 && (server.usual_busy - 0.05).abs() < 1e-9, "{server:?}");
    }
}

//! What was measured of a job at one moment. All of it is optional but the time: what is not known is not decided on.

use serde::{Deserialize, Serialize};

use crate::Decision;

/// The two training modes that automatic switching chooses between: they share hyper-parameters and the optimizer's state
/// (GBA, §4.1).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum TrainingMode {
    /// A barrier in every step.
    Sync,
    /// Global-batch gradient aggregation: nobody waits.
    Gba,
}

impl TrainingMode {
    /// The name in a manifest.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Sync => "sync",
            Self::Gba => "gba",
        }
    }

    /// The other one.
    #[must_use]
    pub fn other(self) -> Self {
        match self {
            Self::Sync => Self::Gba,
            Self::Gba => Self::Sync,
        }
    }
}

impl std::fmt::Display for TrainingMode {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.name())
    }
}

/// A dense worker since the observation before.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Worker {
    /// Rows of the batches measured.
    pub batch_rows: u32,
    /// Seconds of computation of each of its last batches, waiting left out; or their mean alone.
    pub compute_seconds: Vec<f64>,
}

impl Worker {
    /// Mean seconds of computation of `rows` rows, in proportion to those measured.
    pub(crate) fn mean_seconds(&self, rows: f64) -> f64 {
        let mean = self.compute_seconds.iter().sum::<f64>() / self.compute_seconds.len().max(1) as f64;
        mean * rows / f64::from(self.batch_rows)
    }
}

/// As many as `count` workers where fewer were measured: those that idle in `sync` are taken to be as fast as the others on average.
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
    /// Memory at which it is killed, if there is such a limit.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub limit_bytes: Option<u64>,
    /// Share of the time, 0 to 1, in which it looks up or updates rows.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub busy: Option<f64>,
    /// Keys looked up a second since the observation before.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub look_ups_per_second: Option<f64>,
    /// Times it was killed for its memory, since it was made.
    #[serde(default)]
    pub oom_kills: u32,
}

/// The embedding workers, all together.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct EmbeddingWorkerLoad {
    /// Mean seconds a batch waited until one began with it.
    pub queue_wait_seconds: f64,
    /// Mean seconds one then took for it.
    pub service_seconds: f64,
}

/// The nodes that the job's pods are on, and their queue: the early warning of slow workers (GBA, §3.2, figure 1).
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct ClusterLoad {
    /// CPU that others use over CPU that the job has not requested, 0 to 1, mean over the nodes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub node_cpu: Option<f64>,
    /// Nodes under memory, disk or process pressure.
    #[serde(default)]
    pub nodes_under_pressure: u32,
    /// Pods that wait for a node.
    #[serde(default)]
    pub pending_pods: u32,
    /// Pods preempted or evicted since the observation before.
    #[serde(default)]
    pub preemptions: u32,
}

/// How many replicas a role has.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct ReplicaCount {
    /// That should be.
    pub wanted: u32,
    /// That are ready.
    pub ready: u32,
}

/// How many replicas the roles have that can be scaled.
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
}

/// See the module's text.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct Observations {
    /// When, in seconds since any fixed moment.
    pub at_seconds: u64,
    /// Which attempt of the job it is: in another, all processes have begun anew.
    #[serde(skip_serializing_if = "is_zero")]
    pub attempt: u32,
    /// What was decided since the observation before by somebody else, as after a kill that ended an attempt.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub decided_elsewhere: Vec<Decision>,
    /// The mode in use; none while no steps are made, or in a mode that is not switched automatically.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub mode: Option<TrainingMode>,
    /// Rows of a global step.
    pub global_batch_rows: u32,
    /// Rows that a worker computes at a time in `gba`.
    pub local_batch_rows: u32,
    /// ι of `gba`: gradients staler than so many global steps are left out.
    pub staleness_tolerance: u32,
    /// Dense workers, by rank.
    pub workers: Vec<Worker>,
    /// How many of them, the first, train in `sync`; none: all.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub barrier_workers: Option<u32>,
    /// Mean seconds of an all-reduce; known in `sync`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub all_reduce_seconds: Option<f64>,
    /// Mean seconds a worker waits for a token and parameters, a batch; known in `gba`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub exchange_seconds: Option<f64>,
    /// Mean seconds a worker waits for data and embeddings, a batch.
    pub wait_seconds: f64,
    /// Rows trained a second since the observation before, all workers together; none if training rested meanwhile.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub samples_per_second: Option<f64>,
    /// Parameter servers, by index.
    pub ps: Vec<PsLoad>,
    /// Embedding workers.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub embedding_workers: Option<EmbeddingWorkerLoad>,
    /// Nodes and their queue.
    pub cluster: ClusterLoad,
    /// Replicas of the roles.
    pub replicas: Replicas,
}

#[allow(clippy::trivially_copy_pass_by_ref, reason = "serde asks by reference")]
fn is_zero(number: &u32) -> bool {
    *number == 0
}

/// A measurement that cannot be one.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[error("{field} is {value}: expected {expected}")]
pub struct ObservationError {
    /// Its name in JSON.
    pub field: &'static str,
    /// What was found.
    pub value: f64,
    /// In words.
    pub expected: &'static str,
}

/// A number, with its name.
type Field = (&'static str, f64);

impl Observations {
    /// Finds a number that is out of its range.
    ///
    /// # Errors
    /// The first such number.
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

    fn times(&self) -> impl Iterator<Item = Field> {
        let embedding = self.embedding_workers;
        [
            ("allReduceSeconds", self.all_reduce_seconds),
            ("exchangeSeconds", self.exchange_seconds),
            ("waitSeconds", Some(self.wait_seconds)),
            ("samplesPerSecond", self.samples_per_second),
            ("embeddingWorkers.queueWaitSeconds", embedding.map(|load| load.queue_wait_seconds)),
            ("embeddingWorkers.serviceSeconds", embedding.map(|load| load.service_seconds)),
        ]
        .into_iter()
        .filter_map(|(name, value)| Some((name, value?)))
    }

    fn look_ups(&self) -> impl Iterator<Item = Field> {
        self.ps.iter().filter_map(|ps| Some(("ps[].lookUpsPerSecond", ps.look_ups_per_second?)))
    }

    fn shares(&self) -> impl Iterator<Item = Field> {
        let busy = self.ps.iter().filter_map(|ps| Some(("ps[].busy", ps.busy?)));
        busy.chain(self.cluster.node_cpu.map(|cpu| ("cluster.nodeCpu", cpu)))
    }
}

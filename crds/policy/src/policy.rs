//! What the user allows and aims at. Every default is here, once, with why it is what it is.

use serde::{Deserialize, Serialize};

/// See the module's text. What is absent is not decided.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct Policy {
    /// Automatic switching of the training mode.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub mode: Option<ModePolicy>,
    /// The pace of scaling, for all roles.
    pub scaling: ScalingPolicy,
    /// Parameter servers.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ps: Option<PsPolicy>,
    /// Embedding workers.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub embedding_worker: Option<EmbeddingWorkerPolicy>,
    /// Dense workers.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub dense_worker: Option<DenseWorkerPolicy>,
}

/// When the training mode is switched.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct ModePolicy {
    /// How much faster the other mode must be predicted to be: 0.1 is a tenth. Between the two thresholds, one for each direction,
    /// nothing is switched (hysteresis).
    pub margin: f64,
    /// Seconds that predictions are averaged over: single slow batches are no reason.
    pub window_seconds: u64,
    /// Seconds that a mode stays at least (dwell).
    pub dwell_seconds: u64,
    /// Switches an hour at most.
    pub switches_per_hour: u32,
    /// Seconds without training that a switch takes: it must be earned back within the dwell.
    pub switch_seconds: f64,
    /// Share of the nodes' CPU, less what the job requests, from which on the cluster counts as crowded if others use it.
    pub crowded_cpu: f64,
}

impl Default for ModePolicy {
    fn default() -> Self {
        Self {
            // More than the prediction's error on equal workers (tests/throughput.rs), less than one slow worker costs.
            margin: 0.1,
            window_seconds: 60,
            dwell_seconds: 300,
            switches_per_hour: 4,
            switch_seconds: 10.0,
            crowded_cpu: 0.85,
        }
    }
}

/// The pace of scaling.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct ScalingPolicy {
    /// Whether decisions are only told and not carried out: then they are compared with what was told last.
    pub recommends_only: bool,
    /// Seconds between two decisions about a role. Longer than both windows, so that none sees a change half done.
    pub cool_down_seconds: u64,
    /// Seconds for which more replicas must have been needed throughout.
    pub up_window_seconds: u64,
    /// Seconds for which fewer must have been enough throughout.
    pub down_window_seconds: u64,
    /// How far a measure may be from its target, as a share of it, before anything is done.
    pub tolerance: f64,
}

impl Default for ScalingPolicy {
    fn default() -> Self {
        // Tolerance and the longer window for going down are those of Kubernetes' HorizontalPodAutoscaler.
        Self {
            recommends_only: false,
            cool_down_seconds: 300,
            up_window_seconds: 60,
            down_window_seconds: 300,
            tolerance: 0.1,
        }
    }
}

/// How many replicas a role may have.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct ReplicaBounds {
    /// At least.
    pub min: u32,
    /// At most.
    pub max: u32,
}

impl ReplicaBounds {
    pub(crate) fn clamp(self, replicas: u32) -> u32 {
        replicas.min(self.max).max(self.min)
    }
}

/// Parameter servers: by memory and by look-up load.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct PsPolicy {
    /// How many there may be.
    pub bounds: ReplicaBounds,
    /// Share of its memory limit that the fullest should use.
    #[serde(default = "PsPolicy::default_memory_target")]
    pub memory_target: f64,
    /// Share of the time that the busiest should work.
    #[serde(default = "PsPolicy::default_busy_target")]
    pub busy_target: f64,
    /// Seconds over which the growth of the table is measured.
    #[serde(default = "PsPolicy::default_growth_window")]
    pub growth_window_seconds: u64,
    /// Seconds ahead for which there must be memory: as long as it takes to have more of them at work.
    #[serde(default = "PsPolicy::default_growth_horizon")]
    pub growth_horizon_seconds: u64,
    /// Memory that one may be given at most after one was killed for its memory; without, memory is not raised.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub max_memory_bytes: Option<u64>,
}

impl PsPolicy {
    /// With every default.
    #[must_use]
    pub fn new(bounds: ReplicaBounds) -> Self {
        Self {
            bounds,
            memory_target: Self::default_memory_target(),
            busy_target: Self::default_busy_target(),
            growth_window_seconds: Self::default_growth_window(),
            growth_horizon_seconds: Self::default_growth_horizon(),
            max_memory_bytes: None,
        }
    }

    fn default_memory_target() -> f64 {
        0.75
    }

    fn default_busy_target() -> f64 {
        0.7
    }

    fn default_growth_window() -> u64 {
        600
    }

    fn default_growth_horizon() -> u64 {
        900
    }
}

/// Embedding workers: by queue wait.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct EmbeddingWorkerPolicy {
    /// How many there may be.
    pub bounds: ReplicaBounds,
    /// Mean seconds that a batch may wait; none: as long as it is worked on.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub queue_wait_seconds: Option<f64>,
}

/// Dense workers: by marginal throughput, and by cost per sample where a price is given.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct DenseWorkerPolicy {
    /// How many there may be.
    pub bounds: ReplicaBounds,
    /// What one more should add, as a share of what each adds on average; between 0 and 1.
    #[serde(default = "DenseWorkerPolicy::default_marginal_throughput")]
    pub marginal_throughput: f64,
    /// Price of one for an hour, in any currency.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub price_per_hour: Option<f64>,
    /// What a million samples may cost, in the same currency.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub max_cost_per_million: Option<f64>,
}

impl DenseWorkerPolicy {
    /// With every default.
    #[must_use]
    pub fn new(bounds: ReplicaBounds) -> Self {
        Self {
            bounds,
            marginal_throughput: Self::default_marginal_throughput(),
            price_per_hour: None,
            max_cost_per_million: None,
        }
    }

    fn default_marginal_throughput() -> f64 {
        0.6
    }
}

/// A policy that contradicts itself.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[error("{field}: expected {expected}")]
pub struct PolicyError {
    /// Its name in JSON.
    pub field: &'static str,
    /// In words.
    pub expected: &'static str,
}

impl Policy {
    /// Finds a setting that is out of its range.
    ///
    /// # Errors
    /// The first such setting.
    pub fn check(&self) -> Result<(), PolicyError> {
        let bounds = [
            ("ps.bounds", self.ps.as_ref().map(|role| role.bounds)),
            ("embeddingWorker.bounds", self.embedding_worker.as_ref().map(|role| role.bounds)),
            ("denseWorker.bounds", self.dense_worker.as_ref().map(|role| role.bounds)),
        ];
        if let Some((field, _)) = bounds.into_iter().find(|(_, b)| b.is_some_and(|b| b.min == 0 || b.min > b.max)) {
            return Err(PolicyError { field, expected: "1 <= min <= max" });
        }
        let wrong = |share: f64| !(share > 0.0 && share < 1.0);
        let ps = |share: fn(&PsPolicy) -> f64| self.ps.as_ref().is_some_and(|ps| wrong(share(ps)));
        let mode = |is_wrong: fn(&ModePolicy) -> bool| self.mode.as_ref().is_some_and(is_wrong);
        let above_0 = |number: Option<f64>| number.is_some_and(|number| !(number.is_finite() && number > 0.0));
        let dense = self.dense_worker.as_ref();
        let queue_wait = self.embedding_worker.as_ref().and_then(|role| role.queue_wait_seconds);
        let checks = [
            (mode(|m| !(m.margin.is_finite() && m.margin >= 0.0)), "mode.margin", "a number of at least 0"),
            (mode(|m| m.window_seconds == 0), "mode.windowSeconds", "at least 1"),
            (mode(|m| m.dwell_seconds < m.window_seconds), "mode.dwellSeconds", "at least windowSeconds"),
            (
                mode(|m| !(0.0..0.5 * m.dwell_seconds as f64).contains(&m.switch_seconds)),
                "mode.switchSeconds",
                "a number of at least 0 and below half of dwellSeconds",
            ),
            (self.scaling.up_window_seconds == 0, "scaling.upWindowSeconds", "at least 1"),
            (self.scaling.down_window_seconds == 0, "scaling.downWindowSeconds", "at least 1"),
            (!(0.0..1.0).contains(&self.scaling.tolerance), "scaling.tolerance", "a number from 0 to below 1"),
            (ps(|p| p.memory_target), "ps.memoryTarget", "a share between 0 and 1"),
            (ps(|p| p.busy_target), "ps.busyTarget", "a share between 0 and 1"),
            (above_0(queue_wait), "embeddingWorker.queueWaitSeconds", "a number above 0"),
            (
                dense.is_some_and(|d| wrong(d.marginal_throughput)),
                "denseWorker.marginalThroughput",
                "a share between 0 and 1",
            ),
            (above_0(dense.and_then(|d| d.price_per_hour)), "denseWorker.pricePerHour", "a number above 0"),
            (above_0(dense.and_then(|d| d.max_cost_per_million)), "denseWorker.maxCostPerMillion", "a number above 0"),
            (
                dense.is_some_and(|d| d.max_cost_per_million.is_some() && d.price_per_hour.is_none()),
                "denseWorker.maxCostPerMillion",
                "a pricePerHour with it",
            ),
        ];
        match checks.into_iter().find(|(is_wrong, ..)| *is_wrong) {
            Some((_, field, expected)) => Err(PolicyError { field, expected }),
            None => Ok(()),
        }
    }
}

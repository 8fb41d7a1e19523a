//! The user's limits and targets. Every default is here, with its reason.

use serde::{Deserialize, Serialize};

use crate::AutoMode;

/// The user's limits and targets. The policy makes no decision about an absent part.
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
    /// Loaders.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub loader: Option<LoaderPolicy>,
}

/// When the training mode is switched.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct ModePolicy {
    /// How much faster the other mode must be predicted to be: 0.1 is a tenth. Each direction has
    /// its own threshold; between the two the mode stays (hysteresis).
    pub margin: f64,
    /// Seconds over which predictions are averaged, so that a single slow batch causes no switch.
    pub window_seconds: u64,
    /// Seconds that a mode stays at least (dwell).
    pub dwell_seconds: u64,
    /// Switches per hour at most.
    pub switches_per_hour: u32,
    /// Seconds of training that a switch costs: it must earn them back within the dwell.
    pub switch_seconds: f64,
    /// A cluster is crowded if other pods use at least this share of the nodes' CPU, without the
    /// CPU that the job requests.
    pub crowded_cpu: f64,
}

impl Default for ModePolicy {
    fn default() -> Self {
        Self {
            // Above the prediction's error on equal workers (tests/throughput.rs), below the cost
            // of one slow worker.
            margin: 0.1,
            window_seconds: 60,
            dwell_seconds: 300,
            switches_per_hour: 4,
            switch_seconds: 10.0,
            crowded_cpu: 0.85,
        }
    }
}

/// The circumstances that set the threshold of a switch.
#[derive(Clone, Copy, Debug)]
pub(crate) struct SwitchCircumstances {
    /// The mode to switch to.
    pub(crate) to: AutoMode,
    /// Whether the cluster is crowded.
    pub(crate) is_crowded: bool,
    /// Whether the job has trained in `to` before.
    pub(crate) has_used: bool,
}

impl ModePolicy {
    /// The advantage, as the natural logarithm of a ratio of speeds, above which training switches.
    ///
    /// - To `gba`: the margin, but at least d / (d − s), which earns the switch's s seconds back
    ///   within the dwell d. A crowded cluster is about to slow workers down: half the margin.
    /// - To `sync`, whose steps are exact and repeatable: below zero. `gba` is left as soon as it
    ///   is not worth half its threshold. In a crowded cluster `sync` must be faster by the margin.
    ///
    /// The models do not know, say, that workers share a processor. So the threshold to a `gba`
    /// that the job has never used is doubled.
    pub(crate) fn threshold(&self, circumstances: SwitchCircumstances) -> f64 {
        let SwitchCircumstances { to, is_crowded, has_used } = circumstances;
        let dwell = self.dwell_seconds as f64;
        let earned_back = self.switch_seconds / (dwell - self.switch_seconds).max(1.0);
        let unsure = if has_used || to == AutoMode::Sync { 1.0 } else { 2.0 };
        let at_least = |margin: f64| unsure * margin.max(earned_back).ln_1p();
        match (to, is_crowded) {
            (AutoMode::Gba, false) | (AutoMode::Sync, true) => at_least(self.margin),
            (AutoMode::Gba, true) => at_least(0.5 * self.margin),
            (AutoMode::Sync, false) => -0.5 * at_least(self.margin),
        }
    }

    /// The largest threshold of any switch.
    pub(crate) fn largest_threshold(&self) -> f64 {
        self.threshold(SwitchCircumstances { to: AutoMode::Gba, is_crowded: false, has_used: false })
    }
}

/// The pace of scaling.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields, default)]
pub struct ScalingPolicy {
    /// Whether decisions are only recommended. A new one is then compared with the last
    /// recommendation, because nothing carries it out.
    pub recommends_only: bool,
    /// Seconds between two decisions about a role. Longer than both windows, so that no window sees
    /// a change that is half done.
    pub cool_down_seconds: u64,
    /// A role scales out if it needed more replicas throughout this many seconds.
    pub up_window_seconds: u64,
    /// A role scales in if it needed fewer replicas throughout this many seconds.
    pub down_window_seconds: u64,
    /// A measure within this share of its target needs no change.
    pub tolerance: f64,
}

impl Default for ScalingPolicy {
    fn default() -> Self {
        // Kubernetes' HorizontalPodAutoscaler has the same tolerance and the same longer window for
        // scaling in.
        Self {
            recommends_only: false,
            cool_down_seconds: 300,
            up_window_seconds: 60,
            down_window_seconds: 300,
            tolerance: 0.1,
        }
    }
}

/// The range of a role's number of replicas.
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

/// Parameter servers: scaled by memory and by look-up load.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct PsPolicy {
    /// The range of their number.
    pub bounds: ReplicaBounds,
    /// Share of its memory limit that the fullest server should use.
    #[serde(default = "PsPolicy::default_memory_target")]
    pub memory_target: f64,
    /// Share of the time that the busiest server should work.
    #[serde(default = "PsPolicy::default_busy_target")]
    pub busy_target: f64,
    /// Seconds over which the growth of the table is measured.
    #[serde(default = "PsPolicy::default_growth_window")]
    pub growth_window_seconds: u64,
    /// Seconds ahead for which the servers need memory: the time until more of them are at work.
    #[serde(default = "PsPolicy::default_growth_horizon")]
    pub growth_horizon_seconds: u64,
    /// The highest memory limit of a server after a kill for memory. Absent: limits are not raised.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub max_memory_bytes: Option<u64>,
    /// Bytes to which the memory budget of the job bounds the tables of all servers together.
    /// Absent: the tables grow without a bound.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub table_budget_bytes: Option<u64>,
}

impl PsPolicy {
    /// A policy with every default.
    #[must_use]
    pub fn new(bounds: ReplicaBounds) -> Self {
        Self {
            bounds,
            memory_target: Self::default_memory_target(),
            busy_target: Self::default_busy_target(),
            growth_window_seconds: Self::default_growth_window(),
            growth_horizon_seconds: Self::default_growth_horizon(),
            max_memory_bytes: None,
            table_budget_bytes: None,
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

/// Embedding workers: scaled by queue wait.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct EmbeddingWorkerPolicy {
    /// The range of their number.
    pub bounds: ReplicaBounds,
    /// Mean seconds that a batch may wait. Absent: as long as the work on it takes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub queue_wait_seconds: Option<f64>,
}

/// Dense workers: scaled by marginal throughput, and by cost per sample if a price is given.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct DenseWorkerPolicy {
    /// The range of their number.
    pub bounds: ReplicaBounds,
    /// Throughput that one more worker should add, as a share of the mean per worker; between 0 and
    /// 1.
    #[serde(default = "DenseWorkerPolicy::default_marginal_throughput")]
    pub marginal_throughput: f64,
    /// Price of a worker per hour, in any currency.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub price_per_hour: Option<f64>,
    /// Highest cost of a million samples, in the same currency.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub max_cost_per_million: Option<f64>,
}

impl DenseWorkerPolicy {
    /// A policy with every default.
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

/// Loaders: scaled by the rows of a stream that wait, or by the time that dense workers wait for
/// data that ends.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct LoaderPolicy {
    /// The range of their number.
    pub bounds: ReplicaBounds,
    /// Seconds in which the rows that wait should be read, above 0.
    #[serde(default = "LoaderPolicy::default_catch_up")]
    pub catch_up_seconds: f64,
    /// Share of the time that the loaders should read, above 0 and below 1.
    #[serde(default = "LoaderPolicy::default_busy_target")]
    pub busy_target: f64,
    /// Share of the time that dense workers may wait for data that ends, above 0 and below 1.
    #[serde(default = "LoaderPolicy::default_wait_target")]
    pub wait_target: f64,
}

impl LoaderPolicy {
    /// A policy with every default.
    #[must_use]
    pub fn new(bounds: ReplicaBounds) -> Self {
        Self {
            bounds,
            catch_up_seconds: Self::default_catch_up(),
            busy_target: Self::default_busy_target(),
            wait_target: Self::default_wait_target(),
        }
    }

    fn default_wait_target() -> f64 {
        0.1
    }

    fn default_catch_up() -> f64 {
        300.0
    }

    fn default_busy_target() -> f64 {
        0.8
    }
}

/// A policy that contradicts itself.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[error("{field}: expected {expected}")]
pub struct PolicyError {
    /// The field's name in JSON.
    pub field: &'static str,
    /// The expected range, in words.
    pub expected: &'static str,
}

/// A rule that a setting has to meet: whether it is broken, the setting's name and the expected
/// range.
type Rule = (bool, &'static str, &'static str);

impl Policy {
    /// Checks every setting against its range.
    ///
    /// # Errors
    /// The first setting outside its range.
    pub fn check(&self) -> Result<(), PolicyError> {
        let rules = self.bounds_rules().into_iter().chain(self.mode_rules()).chain(self.scaling_rules());
        let mut rules = rules.chain(self.ps_rules()).chain(self.worker_rules());
        match rules.find(|(is_broken, ..)| *is_broken) {
            Some((_, field, expected)) => Err(PolicyError { field, expected }),
            None => Ok(()),
        }
    }

    fn bounds_rules(&self) -> [Rule; 4] {
        let rule = |bounds: Option<ReplicaBounds>, field| {
            let is_broken = bounds.is_some_and(|bounds| bounds.min == 0 || bounds.min > bounds.max);
            (is_broken, field, "1 <= min <= max")
        };
        [
            rule(self.ps.as_ref().map(|role| role.bounds), "ps.bounds"),
            rule(self.embedding_worker.as_ref().map(|role| role.bounds), "embeddingWorker.bounds"),
            rule(self.dense_worker.as_ref().map(|role| role.bounds), "denseWorker.bounds"),
            rule(self.loader.as_ref().map(|role| role.bounds), "loader.bounds"),
        ]
    }

    fn mode_rules(&self) -> [Rule; 4] {
        let mode = |is_wrong: fn(&ModePolicy) -> bool| self.mode.as_ref().is_some_and(is_wrong);
        [
            (mode(|m| !(m.margin.is_finite() && m.margin >= 0.0)), "mode.margin", "a number of at least 0"),
            (mode(|m| m.window_seconds == 0), "mode.windowSeconds", "at least 1"),
            (mode(|m| m.dwell_seconds < m.window_seconds), "mode.dwellSeconds", "at least windowSeconds"),
            (
                mode(|m| !(0.0..0.5 * m.dwell_seconds as f64).contains(&m.switch_seconds)),
                "mode.switchSeconds",
                "a number of at least 0 and below half of dwellSeconds",
            ),
        ]
    }

    fn scaling_rules(&self) -> [Rule; 3] {
        let scaling = &self.scaling;
        [
            (scaling.up_window_seconds == 0, "scaling.upWindowSeconds", "at least 1"),
            (scaling.down_window_seconds == 0, "scaling.downWindowSeconds", "at least 1"),
            (!(0.0..1.0).contains(&scaling.tolerance), "scaling.tolerance", "a number from 0 to below 1"),
        ]
    }

    fn ps_rules(&self) -> [Rule; 2] {
        let ps = |share: fn(&PsPolicy) -> f64| self.ps.as_ref().is_some_and(|ps| !is_inner_share(share(ps)));
        [
            (ps(|ps| ps.memory_target), "ps.memoryTarget", "a share between 0 and 1"),
            (ps(|ps| ps.busy_target), "ps.busyTarget", "a share between 0 and 1"),
        ]
    }

    fn worker_rules(&self) -> [Rule; 8] {
        let not_positive = |number: Option<f64>| number.is_some_and(|number| !(number.is_finite() && number > 0.0));
        let queue_wait = self.embedding_worker.as_ref().and_then(|role| role.queue_wait_seconds);
        let dense = self.dense_worker.as_ref();
        let marginal = dense.is_some_and(|dense| !is_inner_share(dense.marginal_throughput));
        let price = dense.and_then(|dense| dense.price_per_hour);
        let max_cost = dense.and_then(|dense| dense.max_cost_per_million);
        let wait_target = self.loader.as_ref().is_some_and(|loader| !is_inner_share(loader.wait_target));
        let catch_up = self.loader.as_ref().map(|loader| loader.catch_up_seconds);
        let busy = self.loader.as_ref().is_some_and(|loader| !is_inner_share(loader.busy_target));
        [
            (not_positive(queue_wait), "embeddingWorker.queueWaitSeconds", "a number above 0"),
            (marginal, "denseWorker.marginalThroughput", "a share between 0 and 1"),
            (not_positive(catch_up), "loader.catchUpSeconds", "a number above 0"),
            (busy, "loader.busyTarget", "a share between 0 and 1"),
            (not_positive(price), "denseWorker.pricePerHour", "a number above 0"),
            (not_positive(max_cost), "denseWorker.maxCostPerMillion", "a number above 0"),
            (max_cost.is_some() && price.is_none(), "denseWorker.maxCostPerMillion", "a pricePerHour with it"),
            (wait_target, "loader.waitTarget", "a share between 0 and 1"),
        ]
    }
}

/// Whether a number lies between 0 and 1, without either.
fn is_inner_share(share: f64) -> bool {
    share > 0.0 && share < 1.0
}

//! The policy of a manifest.

use std::time::Duration;

use rectrain_crds::{
    AutoscalingMode, BudgetStatus, ResolvedAutoMode, ResolvedAutoscaling, ResolvedBounds, ResolvedBudget,
    ResolvedDenseWorkerScaling, ResolvedEmbeddingWorkerScaling, ResolvedJob, ResolvedLoaderScaling, ResolvedPsScaling,
};
use rectrain_policy::{
    DenseWorkerPolicy, EmbeddingWorkerPolicy, LoaderPolicy, ModePolicy, Policy, PsPolicy, ReplicaBounds, ScalingPolicy,
};

/// Looks in a window, so that each window has at least three measurements.
const LOOKS_A_WINDOW: u64 = 4;

/// The policy of a manifest. `None` if it leaves no decision to the operator.
#[must_use]
pub fn policy(job: &ResolvedJob) -> Option<Policy> {
    let mode = job.training.auto.map(mode_policy);
    let Some(given) = &job.autoscaling else {
        return mode.map(|mode| Policy { mode: Some(mode), ..Policy::default() });
    };
    Some(Policy {
        mode,
        scaling: scaling_policy(given),
        ps: given.ps.map(|ps| PsPolicy { table_budget_bytes: budget_of_manifest(job), ..ps_policy(ps) }),
        embedding_worker: given.embedding_worker.map(embedding_worker_policy),
        dense_worker: given.dense_worker.map(dense_worker_policy),
        loader: given.loader.map(loader_policy),
    })
}

/// The policy with the budget that the coordinator reports. It may differ from the manifest's:
/// `auto` counts the servers at the start of the attempt.
#[must_use]
pub fn with_budget(policy: Policy, job: &ResolvedJob, reported: Option<&BudgetStatus>) -> Policy {
    let budget = reported.and_then(|budget| match budget {
        BudgetStatus { max_bytes: Some(bytes), .. } => Some(ResolvedBudget::Bytes(*bytes)),
        BudgetStatus { max_rows, .. } => max_rows.map(ResolvedBudget::Rows),
    });
    let Some(budget) = budget else { return policy };
    let ps = policy.ps.map(|ps| PsPolicy { table_budget_bytes: Some(budget_bytes(job, budget)), ..ps });
    Policy { ps, ..policy }
}

fn mode_policy(auto: ResolvedAutoMode) -> ModePolicy {
    ModePolicy {
        margin: auto.margin,
        window_seconds: u64::from(auto.window_seconds),
        dwell_seconds: u64::from(auto.dwell_seconds),
        switches_per_hour: auto.switches_per_hour,
        crowded_cpu: auto.crowded_cpu,
        ..ModePolicy::default()
    }
}

fn scaling_policy(given: &ResolvedAutoscaling) -> ScalingPolicy {
    ScalingPolicy {
        recommends_only: given.mode == AutoscalingMode::Recommend,
        cool_down_seconds: u64::from(given.cool_down_seconds),
        up_window_seconds: u64::from(given.up_window_seconds),
        down_window_seconds: u64::from(given.down_window_seconds),
        ..ScalingPolicy::default()
    }
}

fn ps_policy(ps: ResolvedPsScaling) -> PsPolicy {
    PsPolicy {
        memory_target: ps.memory_target,
        busy_target: ps.busy_target,
        max_memory_bytes: ps.max_memory_bytes,
        ..PsPolicy::new(bounds(ps.bounds))
    }
}

/// Bytes of a row beside its values and the state of its optimizer: its key, its word, and its
/// share of the index.
const ROW_OVERHEAD_BYTES: u64 = 28;

fn budget_of_manifest(job: &ResolvedJob) -> Option<u64> {
    Some(budget_bytes(job, job.features.memory?.budget))
}

/// The bytes to which the budget bounds the tables. A budget of rows is counted in the job's widest
/// rows, so that this is never too little.
fn budget_bytes(job: &ResolvedJob, budget: ResolvedBudget) -> u64 {
    let rows = match budget {
        ResolvedBudget::Bytes(bytes) => return bytes,
        ResolvedBudget::Rows(rows) => rows,
    };
    // A value with up to two numbers of state, and a first-order weight.
    let value = job.training.embedding_value_type.bytes() as u64 + 8;
    let widest = job.features.tables.iter().map(|table| (table.dim as u64 + 1) * value).max().unwrap_or(0);
    rows.saturating_mul(widest + ROW_OVERHEAD_BYTES)
}

fn embedding_worker_policy(role: ResolvedEmbeddingWorkerScaling) -> EmbeddingWorkerPolicy {
    EmbeddingWorkerPolicy { bounds: bounds(role.bounds), queue_wait_seconds: role.queue_wait_seconds }
}

fn dense_worker_policy(role: ResolvedDenseWorkerScaling) -> DenseWorkerPolicy {
    DenseWorkerPolicy {
        marginal_throughput: role.marginal_throughput,
        price_per_hour: role.price_per_hour,
        max_cost_per_million: role.max_cost_per_million_samples,
        ..DenseWorkerPolicy::new(bounds(role.bounds))
    }
}

fn loader_policy(role: ResolvedLoaderScaling) -> LoaderPolicy {
    LoaderPolicy {
        bounds: bounds(role.bounds),
        catch_up_seconds: f64::from(role.catch_up_seconds),
        busy_target: role.busy_target,
        wait_target: role.wait_target,
    }
}

fn bounds(bounds: ResolvedBounds) -> ReplicaBounds {
    ReplicaBounds { min: bounds.min, max: bounds.max }
}

/// The longest time between two looks at a job with automatic decisions: a fraction of the shortest
/// window.
#[must_use]
pub fn look_every(job: Option<&ResolvedJob>) -> Option<Duration> {
    let policy = policy(job?)?;
    let mode = policy.mode.iter().map(|mode| mode.window_seconds);
    let workers = policy.embedding_worker.is_some() || policy.dense_worker.is_some();
    let scales = policy.ps.is_some() || workers || policy.loader.is_some();
    let up = scales.then_some(policy.scaling.up_window_seconds);
    mode.chain(up).min().map(|seconds| Duration::from_secs((seconds / LOOKS_A_WINDOW).max(1)))
}

#[cfg(test)]
mod tests {
    use rectrain_crds::{EvictionKind, ResolvedEviction, ResolvedMemory, defaults};

    use super::*;
    use crate::manifests;

    #[test]
    fn the_manifests_defaults_are_the_policys_defaults() {
        let policy = policy(&manifests::load(manifests::AUTOMATIC).resolved).expect("a policy");
        let bounds = |min, max| ReplicaBounds { min, max };
        let expected = Policy {
            mode: Some(ModePolicy::default()),
            scaling: ScalingPolicy { recommends_only: true, ..ScalingPolicy::default() },
            ps: Some(PsPolicy::new(bounds(1, 4))),
            embedding_worker: Some(EmbeddingWorkerPolicy { bounds: bounds(1, 4), queue_wait_seconds: None }),
            dense_worker: Some(DenseWorkerPolicy::new(bounds(2, 8))),
            loader: Some(LoaderPolicy::new(bounds(1, 4))),
        };
        assert_eq!((policy.check(), &policy), (Ok(()), &expected));
    }

    #[test]
    fn loaders_of_a_stream_have_a_policy_with_its_defaults() {
        let mut job = manifests::load(manifests::AUTOMATIC).resolved;
        let bounds = ResolvedBounds { min: 1, max: 4 };
        let (catch_up_seconds, busy_target) = (defaults::CATCH_UP_SECONDS, defaults::LOADER_BUSY_TARGET);
        let wait_target = defaults::LOADER_WAIT_TARGET;
        let scaling = job.autoscaling.as_mut().expect("automatic numbers");
        scaling.loader = Some(ResolvedLoaderScaling { bounds, catch_up_seconds, busy_target, wait_target });
        let policy = policy(&job).expect("a policy");
        assert_eq!(
            (policy.check(), policy.loader),
            (Ok(()), Some(LoaderPolicy::new(ReplicaBounds { min: 1, max: 4 })))
        );
    }

    #[test]
    fn a_memory_budget_bounds_the_expected_growth() {
        let mut job = manifests::load(manifests::AUTOMATIC).resolved;
        let policy_of = |job: &ResolvedJob| policy(job).and_then(|policy| policy.ps).map(|ps| ps.table_budget_bytes);
        assert_eq!(policy_of(&job), Some(None));
        let eviction = ResolvedEviction {
            policy: EvictionKind::Score,
            decay_per_day_millionths: 100_000,
            positive_weight_thousandths: 3_000,
        };
        let mut with = |budget| {
            job.features.memory = Some(ResolvedMemory { budget, eviction });
            policy_of(&job)
        };
        assert_eq!(with(ResolvedBudget::Bytes(7 << 30)), Some(Some(7 << 30)));
        let Some(Some(rows)) = with(ResolvedBudget::Rows(1_000)) else { panic!("no budget") };
        assert!(rows >= 1_000 * (4 + ROW_OVERHEAD_BYTES), "{rows}");
    }

    #[test]
    fn the_budget_in_force_comes_before_the_manifests() {
        let job = manifests::load(manifests::AUTOMATIC).resolved;
        let reported = |budget: Option<BudgetStatus>| {
            let policy = with_budget(policy(&job)?, &job, budget.as_ref());
            Some(policy.ps?.table_budget_bytes)
        };
        let bytes = BudgetStatus { max_rows: None, max_bytes: Some(9 << 30) };
        assert_eq!(reported(Some(bytes)), Some(Some(9 << 30)));
        let rows = BudgetStatus { max_rows: Some(1_000), max_bytes: None };
        assert_eq!(reported(Some(rows)), Some(Some(budget_bytes(&job, ResolvedBudget::Rows(1_000)))));
        assert_eq!((reported(None), reported(Some(BudgetStatus::default()))), (Some(None), Some(None)));
    }
}

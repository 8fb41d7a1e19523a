//! The number of replicas that a role needs now, by its latest measurements. [`crate::replicas`]
//! decides over a window of such needs.

use crate::loader_need;
use crate::loaders::{self, Needed};
use crate::look::Look;
use crate::observations::SlowServer;
use crate::predict::{mean_of_the_slowest, pieces};
use crate::{
    AutoMode, DenseWorkerPolicy, EmbeddingWorkerPolicy, History, LoaderPolicy, Observations, Policy, PsLoad, PsPolicy,
    ReplicaBounds, ReplicaCount, Subject, pulled,
};

/// A decision at most doubles or halves a role, so that the measurements still say something about
/// its effect.
const MOST_AT_ONCE: f64 = 2.0;

/// The number of replicas that a role needs.
pub(crate) struct Need {
    pub(crate) replicas: u32,
    /// The measurements behind it, in words.
    pub(crate) facts: String,
}

/// Why a role's need is unknown.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Unknown {
    #[error("the policy has no settings for it")]
    NoPolicy,
    #[error("neither memory limits nor load are known")]
    NoLoad,
    #[error("the queue wait of batches is not known")]
    NoQueueWait,
    #[error("no batch was measured yet")]
    NoBatch,
    #[error("the job trains no step, or is in a mode that is not scaled")]
    NoMode,
    #[error("in `sync` with `barrierWorkers` more of them would idle")]
    WouldIdle,
    #[error("no batch of every dense worker was measured yet")]
    NoBatchOfAll,
    #[error("the loaders were not measured yet")]
    NoLoaders,
    #[error("no loader has read a row")]
    NoRead,
}

/// A measure of load over its target.
struct Ratio {
    ratio: f64,
    facts: String,
}

/// A role that the policy has settings for.
#[derive(Clone, Copy)]
pub(crate) struct Role {
    pub(crate) subject: Subject,
    pub(crate) bounds: ReplicaBounds,
    pub(crate) count: Option<ReplicaCount>,
}

impl Role {
    /// The number of replicas, if no change is under way.
    pub(crate) fn settled(&self) -> Option<u32> {
        self.count.filter(|count| count.wanted == count.ready && count.ready > 0).map(|count| count.ready)
    }
}

/// The roles that the policy has settings for.
pub(crate) fn roles(policy: &Policy, observations: &Observations) -> Vec<Role> {
    let replicas = &observations.replicas;
    let role = |subject, bounds: Option<ReplicaBounds>, count| Some(Role { subject, bounds: bounds?, count });
    [
        role(Subject::Ps, policy.ps.as_ref().map(|role| role.bounds), replicas.ps),
        role(
            Subject::EmbeddingWorker,
            policy.embedding_worker.as_ref().map(|role| role.bounds),
            replicas.embedding_worker,
        ),
        role(Subject::DenseWorker, policy.dense_worker.as_ref().map(|role| role.bounds), replicas.dense_worker),
        role(Subject::Loader, policy.loader.as_ref().map(|role| role.bounds), replicas.loader),
    ]
    .into_iter()
    .flatten()
    .collect()
}

/// The need of each role of the policy, as far as it is known.
pub(crate) fn needed(policy: &Policy, observations: &Observations, history: &History) -> Vec<(Subject, u32)> {
    let look = Look { policy, observations, history };
    let needs = roles(policy, observations).into_iter().filter_map(|role| {
        let count = role.settled()?;
        let need = need(look, role.subject, count).ok()?;
        Some((role.subject, need.replicas))
    });
    needs.collect()
}

/// The number of replicas that `subject` needs; `count` replicas are ready.
pub(crate) fn need(look: Look<'_>, subject: Subject, count: u32) -> Result<Need, Unknown> {
    let policy = look.policy;
    let Ratio { ratio, facts } = match subject {
        Subject::Ps => ps(policy.ps.as_ref().ok_or(Unknown::NoPolicy)?, look)?,
        Subject::EmbeddingWorker => {
            embedding_worker(policy.embedding_worker.as_ref().ok_or(Unknown::NoPolicy)?, look.observations)?
        }
        Subject::DenseWorker => {
            return dense_worker(policy.dense_worker.as_ref().ok_or(Unknown::NoPolicy)?, look, count);
        }
        Subject::Loader => {
            return loader(policy.loader.as_ref().ok_or(Unknown::NoPolicy)?, look, count);
        }
        Subject::Mode => return Err(Unknown::NoPolicy),
    };
    Ok(Need { replicas: scaled_up(count, ratio, policy.scaling.tolerance), facts })
}

/// The formula of HorizontalPodAutoscaler: ⌈replicas · measure / target⌉, or the present number
/// within the tolerance.
pub(crate) fn scaled_up(count: u32, ratio: f64, tolerance: f64) -> u32 {
    if (ratio - 1.0).abs() <= tolerance {
        return count;
    }
    whole((f64::from(count) * ratio.clamp(MOST_AT_ONCE.recip(), MOST_AT_ONCE)).ceil())
}

fn whole(replicas: f64) -> u32 {
    replicas.clamp(1.0, f64::from(u32::MAX)) as u32
}

fn percent(share: f64) -> f64 {
    (share * 100.0).round()
}

/// Measure over target of memory or load, whichever is worse.
fn ps(policy: &PsPolicy, look: Look<'_>) -> Result<Ratio, Unknown> {
    let loads = PsLoads::of(policy, look);
    let ratio = loads.worst().ok_or(Unknown::NoLoad)?;
    Ok(Ratio { ratio, facts: loads.facts() })
}

/// How far the parameter servers use up their targets.
pub(crate) struct PsLoads<'a> {
    policy: &'a PsPolicy,
    /// Used shares of the memory limits, of the servers with a limit.
    fills: Vec<f64>,
    /// Busy shares of the time, of the servers that report it. A slow one counts as one of the
    /// usual speed.
    busy: Vec<f64>,
    slow: Vec<SlowServer>,
    /// Factor by which the table will have grown at the horizon.
    grown: f64,
}

impl<'a> PsLoads<'a> {
    pub(crate) fn of(policy: &'a PsPolicy, look: Look<'_>) -> Self {
        let servers = &look.observations.ps;
        let total: u64 = servers.iter().map(|ps| ps.bytes).sum();
        let growth = look.history.growth().max(0.0) * policy.growth_horizon_seconds as f64;
        let slow = look.observations.slow_servers();
        let busy = |(index, ps): (usize, &PsLoad)| {
            let usual = slow.iter().find(|server| server.index == index).map(|server| server.usual_busy);
            usual.or(ps.busy)
        };
        let busy = servers.iter().enumerate().filter_map(busy).collect();
        let fill = |ps: &PsLoad| Some(ps.bytes as f64 / ps.limit_bytes.filter(|limit| *limit > 0)? as f64);
        Self {
            policy,
            fills: servers.iter().filter_map(fill).collect(),
            busy,
            slow,
            grown: grown(total as f64, growth, policy.table_budget_bytes),
        }
    }

    /// Measure over target of the fullest or the busiest server, whichever is worse.
    pub(crate) fn worst(&self) -> Option<f64> {
        self.ratio(most)
    }

    /// Like [`Self::worst`], if all servers had the same load.
    pub(crate) fn mean(&self) -> Option<f64> {
        self.ratio(|shares| (!shares.is_empty()).then(|| shares.iter().sum::<f64>() / shares.len() as f64))
    }

    fn ratio(&self, of: impl Fn(&[f64]) -> Option<f64>) -> Option<f64> {
        let memory = of(&self.fills).map(|fill| fill * self.grown / self.policy.memory_target);
        let load = of(&self.busy).map(|busy| busy / self.policy.busy_target);
        memory.into_iter().chain(load).reduce(f64::max)
    }

    fn facts(&self) -> String {
        let memory = most(&self.fills).map(|fill| {
            format!(
                "the fullest uses {} % of its memory and will use {} % in {} s; the target is {} %",
                percent(fill),
                percent(fill * self.grown),
                self.policy.growth_horizon_seconds,
                percent(self.policy.memory_target)
            )
        });
        let load = most(&self.busy).map(|busy| {
            format!(
                "the busiest works {} % of the time; the target is {} %",
                percent(busy),
                percent(self.policy.busy_target)
            )
        });
        let slow = self.slow.iter().map(|server| {
            let SlowServer { index, factor, .. } = server;
            format!("replica {index} takes {factor:.1} times as long for a row as the others, so its slots move away")
        });
        memory.into_iter().chain(load).chain(slow).collect::<Vec<_>>().join("; ")
    }
}

/// Factor by which a table of `total` bytes will have grown. A budget ends the growth. A table that
/// is beyond its budget, because it was lowered, does not grow.
fn grown(total: f64, growth: f64, budget: Option<u64>) -> f64 {
    let room = budget.map_or(f64::INFINITY, |budget| (budget as f64 - total).max(0.0));
    1.0 + growth.min(room) / total.max(1.0)
}

fn most(shares: &[f64]) -> Option<f64> {
    shares.iter().copied().reduce(f64::max)
}

/// An embedding worker as a queue with one server (M/M/1). With service time s, a wait of W means
/// that it is busy ρ = W/(s + W) of the time. The wait is the target W* at ρ* = W*/(s + W*). The
/// need spreads the load ρ·n so that each worker is busy ρ*.
fn embedding_worker(policy: &EmbeddingWorkerPolicy, observations: &Observations) -> Result<Ratio, Unknown> {
    let load = observations.embedding_workers.ok_or(Unknown::NoQueueWait)?;
    let (wait, service) = (load.queue_wait_seconds, load.service_seconds);
    if service <= 0.0 {
        return Err(Unknown::NoBatch);
    }
    let target = policy.queue_wait_seconds.unwrap_or(service);
    let busy = |wait: f64| wait / (service + wait);
    let facts = format!(
        "a batch waits {:.1} ms before {:.1} ms of work; the target wait is {:.1} ms",
        wait * 1e3,
        service * 1e3,
        target * 1e3
    );
    Ok(Ratio { ratio: busy(wait) / busy(target), facts })
}

/// Loaders of a stream by its lag, and others by the time that dense workers wait for data.
fn loader(policy: &LoaderPolicy, look: Look<'_>, count: u32) -> Result<Need, Unknown> {
    if let Some(load) = &look.observations.loaders {
        let Needed { loaders, facts } = loaders::needed(policy, load, count).ok_or(Unknown::NoRead)?;
        return Ok(Need { replicas: loaders, facts });
    }
    let load = look.observations.loader_use.ok_or(Unknown::NoLoaders)?;
    let (ratio, facts) = loader_need::ratio(policy, load);
    Ok(Need { replicas: scaled_up(count, ratio, look.policy.scaling.tolerance), facts })
}

/// The parts of a step with the present dense workers.
struct Step {
    /// Seconds that shrink as workers are added.
    shrinks: f64,
    /// Seconds that do not.
    stays: f64,
    /// Rows that all workers train meanwhile.
    rows: f64,
}

/// C are the seconds of a step that shrink as workers are added, O the seconds that do not. Then n
/// workers train G/(C·(n₀/n) + O) samples per second, and one more adds the share C/(C + O) of the
/// mean per worker. That share is the target θ at n₀·(C/O)·(1 − θ)/θ workers, which is the need.
fn dense_worker(policy: &DenseWorkerPolicy, look: Look<'_>, count: u32) -> Result<Need, Unknown> {
    let Look { observations, history, .. } = look;
    let mode = observations.mode.ok_or(Unknown::NoMode)?;
    if mode == AutoMode::Sync && observations.barrier_workers.is_some() {
        return Err(Unknown::WouldIdle);
    }
    let predicted = history.predict(observations).ok_or(Unknown::NoBatchOfAll)?;
    let step = parts_of_a_step(observations, history, mode);
    let theta = policy.marginal_throughput;
    let workers = f64::from(count);
    let mut aim = workers * step.shrinks / step.stays.max(f64::MIN_POSITIVE) * (1.0 - theta) / theta;
    let mut facts = format!(
        "one more would add {} % of the mean per worker; the target is {} %",
        percent(step.shrinks / (step.shrinks + step.stays)),
        percent(theta)
    );
    if let Some(cost) = Cost::of(policy, &step, workers, predicted.of(mode)) {
        aim = cost.most_workers.map_or(aim, |most| aim.min(most));
        facts += &cost.facts;
    }
    if let Some(ceiling) = history.ceiling {
        aim = aim.min(f64::from(ceiling.replicas));
        facts += &format!("; more than {} brought less than half of that when tried", ceiling.replicas);
    }
    let ratio = aim / workers;
    let replicas = if (ratio - 1.0).abs() <= look.policy.scaling.tolerance {
        count
    } else {
        whole((workers * ratio.clamp(MOST_AT_ONCE.recip(), MOST_AT_ONCE)).floor())
    };
    Ok(Need { replicas, facts })
}

/// The cost of a million samples, and the number of workers that it allows.
struct Cost {
    /// `None` without a limit.
    most_workers: Option<f64>,
    facts: String,
}

impl Cost {
    /// `None` without a price. If a million samples may cost at most p, n workers at h per hour may
    /// take (G/10⁶)·p·3600/h worker-seconds per step. They take C·n₀ + O·n.
    fn of(policy: &DenseWorkerPolicy, step: &Step, workers: f64, samples_per_second: f64) -> Option<Self> {
        let price = policy.price_per_hour?;
        let cost = workers * price / 3600.0 / samples_per_second * 1e6;
        let mut facts = format!("; a million samples cost {cost:.3}");
        let Some(most) = policy.max_cost_per_million else { return Some(Self { most_workers: None, facts }) };
        facts += &format!(", at most {most:.3} are allowed");
        let worker_seconds = step.rows * 1e-6 * most * 3600.0 / price;
        let most_workers = (worker_seconds - step.shrinks * workers) / step.stays.max(f64::MIN_POSITIVE);
        Some(Self { most_workers: Some(most_workers), facts })
    }
}

fn parts_of_a_step(observations: &Observations, history: &History, mode: AutoMode) -> Step {
    let workers = &observations.workers;
    let wait = observations.wait_seconds;
    match mode {
        AutoMode::Sync => {
            let rows = f64::from(observations.global_batch_rows);
            if let Some(pieces) = pieces(observations) {
                let local = f64::from(observations.local_batch_rows);
                let stays = history.exchange_seconds.unwrap_or(0.0) + wait;
                return Step { shrinks: pulled::step_seconds(workers, local, pieces, 0.0), stays, rows };
            }
            let share = rows / workers.len() as f64;
            let stays = history.all_reduce_seconds.or(history.exchange_seconds).unwrap_or(0.0) + wait;
            Step { shrinks: mean_of_the_slowest(workers, share), stays, rows }
        }
        AutoMode::Gba => {
            let local = f64::from(observations.local_batch_rows);
            let compute = workers.iter().map(|worker| worker.mean_seconds(local)).sum::<f64>() / workers.len() as f64;
            let stays = history.exchange_seconds.or(history.all_reduce_seconds).unwrap_or(0.0) + wait;
            Step { shrinks: compute, stays, rows: local * workers.len() as f64 }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_budget_ends_the_growth_of_the_tables() {
        assert_eq!((grown(100.0, 50.0, None), grown(100.0, 50.0, Some(200))), (1.5, 1.5));
        assert_eq!((grown(100.0, 50.0, Some(110)), grown(100.0, 50.0, Some(80))), (1.1, 1.0));
        assert_eq!(grown(0.0, 0.0, Some(80)), 1.0);
    }
}

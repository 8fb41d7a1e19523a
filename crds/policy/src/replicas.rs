//! How many replicas a role should have: first how many it needs by what was measured now ([`needed`]), then, over a window of such
//! findings, whether that is reason enough ([`decide`]).
//!
//! Going up takes the least and going down the most that was needed in the window (the stabilisation of Kubernetes'
//! HorizontalPodAutoscaler), so that a peak or a lull is followed only if it lasts. A role is left alone while a change of it is
//! under way, and for its cool-down. A parameter server that was killed for its memory waits for neither.
//!
//! A number that turned out to be too few is not tried again for a while ([`History::too_few`]): a measurement of those there are says
//! only so much of what fewer would do.
//!
//! Parameter servers that are used unevenly have their slots spread anew, which costs less than one more of them; only what that does
//! not help gets more.

use crate::history::Window;
use crate::predict::mean_of_the_slowest;
use crate::{
    Action, Decision, DenseWorkerPolicy, EmbeddingWorkerPolicy, History, Observations, Policy, PsLoad, PsPolicy,
    ReplicaBounds, ReplicaCount, ScalingPolicy, Subject, TrainingMode,
};

/// A decision at most doubles or halves a role, so that what was measured still says something about what comes of it.
const MOST_AT_ONCE: f64 = 2.0;
/// How much more memory parameter servers get after one was killed for it.
const RAISED_MEMORY: f64 = 1.5;

/// Spread slots leave no server with more than so many times the mean of look-ups or bytes, as far as whole slots allow
/// (`rectrain_modes::migration::plan_moves`).
const EVEN: f64 = 1.1;
/// Servers that do less than this share of what is aimed at are not worth moving rows for.
const WORTH_SPREADING: f64 = 0.5;
/// Cool-downs for which slots that were spread, over as many servers or over others, are not spread for their own sake: single slots
/// may be larger than what is even.
const SPREAD_COOL_DOWNS: u64 = 12;

/// What a role needs, or why that is not known; and in words.
type Finding = Result<(u32, String), String>;

/// What each role of the policy needs, as far as it is known.
pub(crate) fn needed(policy: &Policy, observations: &Observations, history: &History) -> Vec<(Subject, u32)> {
    let findings = roles(policy, observations).into_iter().filter_map(|role| {
        let count = role.settled()?;
        let (needed, _) = finding(policy, observations, history, role.subject, count).ok()?;
        Some((role.subject, needed))
    });
    findings.collect()
}

pub(crate) fn decide(policy: &Policy, observations: &Observations, history: &History) -> Vec<Decision> {
    let roles = roles(policy, observations);
    roles.into_iter().map(|role| decide_role(policy, observations, history, role)).collect()
}

/// A role that the policy speaks of.
#[derive(Clone, Copy)]
struct Role {
    subject: Subject,
    bounds: ReplicaBounds,
    count: Option<ReplicaCount>,
}

impl Role {
    /// How many there are, if no change is under way.
    fn settled(&self) -> Option<u32> {
        self.count.filter(|count| count.wanted == count.ready && count.ready > 0).map(|count| count.ready)
    }
}

fn roles(policy: &Policy, observations: &Observations) -> Vec<Role> {
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
    ]
    .into_iter()
    .flatten()
    .collect()
}

fn decide_role(policy: &Policy, observations: &Observations, history: &History, role: Role) -> Decision {
    let (action, reason) = match verdict(policy, observations, history, role) {
        Ok((action, reason)) => (action, reason),
        Err(reason) => (Action::Keep, reason),
    };
    Decision::new(observations.at_seconds, role.subject, action, reason)
}

fn verdict(
    policy: &Policy,
    observations: &Observations,
    history: &History,
    role: Role,
) -> Result<(Action, String), String> {
    let Role { subject, bounds, count } = role;
    let count = count.ok_or("how many there are is not known")?;
    let scaling = &policy.scaling;
    // What is only told changes nothing, so the next decision is compared with what was told.
    let told = history.decided_replicas(subject).filter(|_| scaling.recommends_only);
    let present = told.unwrap_or(count.wanted);
    if let (Subject::Ps, Some(killed), Some(ps)) = (subject, history.killed_for_memory(), &policy.ps) {
        let limit = observations.ps.get(killed as usize).and_then(|ps| ps.limit_bytes);
        return after_a_kill(ps, killed, limit, present);
    }
    let within = bounds.clamp(present);
    if within != present {
        let reason = format!("{present} are not within {} to {}, which the manifest allows", bounds.min, bounds.max);
        return Ok((Action::Scale { from: present, to: within }, reason));
    }
    let settled = role
        .settled()
        .ok_or_else(|| format!("{} of {} are ready: a change is under way", count.ready, count.wanted))?;
    let (_, mut facts) = finding(policy, observations, history, subject, settled)?;
    let window = history.needed.get(&subject);
    let over = |seconds| window.and_then(|window: &Window<u32>| window.over(seconds));
    let up = over(scaling.up_window_seconds).and_then(|needed| needed.into_iter().min());
    let down = over(scaling.down_window_seconds).and_then(|needed| needed.into_iter().max());
    let too_few = history.too_few(subject, scaling.cool_down_seconds, observations.at_seconds);
    let too_few = too_few.filter(|too_few| down.is_some_and(|down| down <= *too_few));
    if let Some(too_few) = too_few {
        facts += &format!("; {too_few} were too few when tried");
    }
    let down = down.max(too_few.map(|too_few| too_few.saturating_add(1)));
    let to = match (up.map(|up| bounds.clamp(up)), down.map(|down| bounds.clamp(down))) {
        (Some(up), _) if up > present => up,
        (_, Some(down)) if down < present => down,
        (None, _) => return Err(format!("less than {} s were measured", scaling.up_window_seconds)),
        _ => present,
    };
    let spread = (subject == Subject::Ps).then(|| spread(policy, observations, history, settled)).flatten();
    let (action, facts) = match spread {
        Some((enough, uneven)) if to == present || to > present && enough <= present => {
            (Action::Rebalance { replicas: settled }, format!("{uneven}; {facts}"))
        }
        _ if to == present => return Err(format!("{facts}; {present} is right, or not wrong for long enough")),
        _ => (Action::Scale { from: present, to }, facts),
    };
    if let Some(last) = history.last(subject)
        && observations.at_seconds < last.at_seconds.saturating_add(scaling.cool_down_seconds)
    {
        let since = observations.at_seconds.saturating_sub(last.at_seconds);
        let cool_down = scaling.cool_down_seconds;
        return Err(format!("{facts}; the last decision was {since} s ago, and the cool-down is {cool_down} s"));
    }
    Ok((action, facts))
}

/// If the slots of `count` parameter servers should be spread anew: how many servers would do then, and why, in words.
fn spread(policy: &Policy, observations: &Observations, history: &History, count: u32) -> Option<(u32, String)> {
    let scaling = &policy.scaling;
    let again = SPREAD_COOL_DOWNS.saturating_mul(scaling.cool_down_seconds);
    let is_spread = |last: &Decision| {
        let spreads = matches!(last.action, Action::Rebalance { .. } | Action::Scale { .. });
        spreads && observations.at_seconds < last.at_seconds.saturating_add(again)
    };
    if count < 2 || history.last(Subject::Ps).is_some_and(is_spread) {
        return None;
    }
    let least = history.unevenness.over(scaling.up_window_seconds)?.into_iter().reduce(f64::min)?;
    let load = PsLoads::of(policy.ps.as_ref()?, observations, history);
    let is_uneven = least > EVEN * (1.0 + scaling.tolerance) && load.worst()? >= WORTH_SPREADING;
    let uneven =
        format!("one server has {least:.2} times the mean of look-ups or bytes, {EVEN:.2} at most are promised");
    is_uneven.then(|| (scaled_up(count, load.mean().unwrap_or(1.0), scaling.tolerance), uneven))
}

/// The most look-ups or bytes of a parameter server over their mean; none if neither is known of all.
pub(crate) fn unevenness(observations: &Observations) -> Option<f64> {
    let ps = &observations.ps;
    let of = |cost: &dyn Fn(&PsLoad) -> Option<f64>| {
        let costs = ps.iter().map(cost).collect::<Option<Vec<f64>>>()?;
        let mean = costs.iter().sum::<f64>() / costs.len() as f64;
        (mean > 0.0).then(|| costs.iter().copied().fold(0.0, f64::max) / mean)
    };
    let all = [of(&|ps| ps.look_ups_per_second), of(&|ps| Some(ps.bytes as f64))];
    all.into_iter().flatten().reduce(f64::max)
}

/// What is done after the parameter server `killed`, one of `present`, was killed for its memory at `limit` bytes: all of them get
/// half as much memory more where the policy allows it, or its slots are spread over half as many servers more, and at least one.
///
/// # Errors
/// Why nothing can be done, and what to change.
pub fn after_a_kill(
    policy: &PsPolicy,
    killed: u32,
    limit: Option<u64>,
    present: u32,
) -> Result<(Action, String), String> {
    if let (Some(limit), Some(most)) = (limit, policy.max_memory_bytes)
        && limit < most
    {
        let to_bytes = ((limit as f64 * RAISED_MEMORY) as u64).clamp(limit, most);
        let reason = format!("replica {killed} was killed for its memory at its limit of {limit} bytes");
        return Ok((Action::RaiseMemory { replica: killed, from_bytes: limit, to_bytes }, reason));
    }
    let bounds = policy.bounds;
    let to = bounds.clamp(present.saturating_add((present / 2).max(1)));
    if to > present {
        let reason = format!("replica {killed} was killed for its memory: its slots are spread over more");
        return Ok((Action::Scale { from: present, to }, reason));
    }
    Err(format!(
        "replica {killed} was killed for its memory, and there are {present} of at most {}: raise `max` or `maxMemoryGib`",
        bounds.max
    ))
}

fn finding(policy: &Policy, observations: &Observations, history: &History, subject: Subject, count: u32) -> Finding {
    let unknown = || "the policy does not speak of it".to_owned();
    let (ratio, facts) = match subject {
        Subject::Ps => ps(policy.ps.as_ref().ok_or_else(unknown)?, observations, history)?,
        Subject::EmbeddingWorker => {
            embedding_worker(policy.embedding_worker.as_ref().ok_or_else(unknown)?, observations)?
        }
        Subject::DenseWorker => {
            return dense_worker(
                policy.dense_worker.as_ref().ok_or_else(unknown)?,
                &policy.scaling,
                observations,
                history,
                count,
            );
        }
        Subject::Mode => return Err(unknown()),
    };
    Ok((scaled_up(count, ratio, policy.scaling.tolerance), facts))
}

/// HorizontalPodAutoscaler's formula: ⌈replicas · measure / target⌉, and as many as there are within the tolerance.
fn scaled_up(count: u32, ratio: f64, tolerance: f64) -> u32 {
    if (ratio - 1.0).abs() <= tolerance {
        return count;
    }
    whole((f64::from(count) * ratio.clamp(MOST_AT_ONCE.recip(), MOST_AT_ONCE)).ceil())
}

fn whole(replicas: f64) -> u32 {
    replicas.clamp(1.0, f64::from(u32::MAX)) as u32
}

/// Measure over target, the worse of memory and look-up load.
fn ps(policy: &PsPolicy, observations: &Observations, history: &History) -> Result<(f64, String), String> {
    let load = PsLoads::of(policy, observations, history);
    let ratio = load.worst().ok_or("neither memory limits nor load are known")?;
    Ok((ratio, load.facts()))
}

/// How much of what they may do the parameter servers do.
struct PsLoads<'a> {
    policy: &'a PsPolicy,
    /// Shares of the memory limits, of those that have one.
    fills: Vec<f64>,
    /// Shares of the time, of those of which it is known.
    busy: Vec<f64>,
    /// By how many times the table will have grown at the horizon.
    grown: f64,
}

impl<'a> PsLoads<'a> {
    fn of(policy: &'a PsPolicy, observations: &Observations, history: &History) -> Self {
        let total: u64 = observations.ps.iter().map(|ps| ps.bytes).sum();
        let growth = history.growth().max(0.0) * policy.growth_horizon_seconds as f64;
        let fill = |ps: &PsLoad| Some(ps.bytes as f64 / ps.limit_bytes.filter(|limit| *limit > 0)? as f64);
        Self {
            policy,
            fills: observations.ps.iter().filter_map(fill).collect(),
            busy: observations.ps.iter().filter_map(|ps| ps.busy).collect(),
            grown: 1.0 + growth / (total as f64).max(1.0),
        }
    }

    /// Measure over target of the fullest or the busiest, whichever is the worse.
    fn worst(&self) -> Option<f64> {
        self.ratio(most)
    }

    /// As [`Self::worst`] if all did the same.
    fn mean(&self) -> Option<f64> {
        self.ratio(|shares| (!shares.is_empty()).then(|| shares.iter().sum::<f64>() / shares.len() as f64))
    }

    fn ratio(&self, of: impl Fn(&[f64]) -> Option<f64>) -> Option<f64> {
        let memory = of(&self.fills).map(|fill| fill * self.grown / self.policy.memory_target);
        let load = of(&self.busy).map(|busy| busy / self.policy.busy_target);
        memory.into_iter().chain(load).reduce(f64::max)
    }

    fn facts(&self) -> String {
        let percent = |share: f64| (share * 100.0).round();
        let memory = most(&self.fills).map(|fill| {
            format!(
                "the fullest uses {} % of its memory and will use {} % in {} s, {} % are aimed at",
                percent(fill),
                percent(fill * self.grown),
                self.policy.growth_horizon_seconds,
                percent(self.policy.memory_target)
            )
        });
        let load = most(&self.busy).map(|busy| {
            format!(
                "the busiest works {} % of the time, {} % are aimed at",
                percent(busy),
                percent(self.policy.busy_target)
            )
        });
        memory.into_iter().chain(load).collect::<Vec<_>>().join("; ")
    }
}

fn most(shares: &[f64]) -> Option<f64> {
    shares.iter().copied().reduce(f64::max)
}

impl History {
    /// Bytes a second by which the table grows: the slope of a least-squares line.
    fn growth(&self) -> f64 {
        let samples = self.table_bytes.samples();
        let n = samples.len() as f64;
        let Some(first) = self.table_bytes.samples().next().filter(|_| n >= 3.0).copied() else { return 0.0 };
        let points = samples.map(|sample| {
            let seconds = sample.at_seconds.saturating_sub(first.at_seconds) as f64;
            (seconds, sample.value as f64 - first.value as f64)
        });
        let (x, y, xx, xy) =
            points.fold((0.0, 0.0, 0.0, 0.0), |(sx, sy, sxx, sxy), (x, y)| (sx + x, sy + y, sxx + x * x, sxy + x * y));
        let spread = n * xx - x * x;
        if spread > 0.0 { (n * xy - x * y) / spread } else { 0.0 }
    }
}

/// An embedding worker as a queue with one server (M/M/1): with service time s a wait of W means that it is busy ρ = W/(s + W) of
/// the time, and the wait is as aimed at (W*) when it is busy ρ* = W*/(s + W*); the load ρ·n is spread so.
fn embedding_worker(policy: &EmbeddingWorkerPolicy, observations: &Observations) -> Result<(f64, String), String> {
    let load = observations.embedding_workers.ok_or("the wait of batches is not known")?;
    let (wait, service) = (load.queue_wait_seconds, load.service_seconds);
    if service <= 0.0 {
        return Err("no batch was measured yet".to_owned());
    }
    let aim = policy.queue_wait_seconds.unwrap_or(service);
    let busy = |wait: f64| wait / (service + wait);
    let facts = format!(
        "a batch waits {:.1} ms and is worked on for {:.1} ms; {:.1} ms of waiting are aimed at",
        wait * 1e3,
        service * 1e3,
        aim * 1e3
    );
    Ok((busy(wait) / busy(aim), facts))
}

/// With C the seconds of a step that shrink as workers are added and O those that do not, n workers train G/(C·(n₀/n) + O), so one
/// more adds the share C/(C + O) of what each adds on average. It is θ at n₀·(C/O)·(1 − θ)/θ workers, which is what is needed.
/// Where a million samples may cost at most p, n workers at h an hour may take (G/10⁶)·p·3600/h worker-seconds a step, which are
/// C·n₀ + O·n.
fn dense_worker(
    policy: &DenseWorkerPolicy,
    scaling: &ScalingPolicy,
    observations: &Observations,
    history: &History,
    count: u32,
) -> Finding {
    let mode = observations.mode.ok_or("no steps are made, or in a mode that is not scaled")?;
    if mode == TrainingMode::Sync && observations.barrier_workers.is_some() {
        return Err("in `sync` with `barrierWorkers` more of them would idle".to_owned());
    }
    let predicted = history.predict(observations).ok_or("no batch of every dense worker was measured yet")?;
    let (shrinks, stays, rows) = parts_of_a_step(observations, history, mode);
    let theta = policy.marginal_throughput;
    let marginal = shrinks / (shrinks + stays);
    let workers = f64::from(count);
    let mut aim = workers * shrinks / stays.max(f64::MIN_POSITIVE) * (1.0 - theta) / theta;
    let percent = |share: f64| (share * 100.0).round();
    let mut facts = format!(
        "one more would add {} % of what each adds on average, {} % are aimed at",
        percent(marginal),
        percent(theta)
    );
    if let Some(price) = policy.price_per_hour {
        let cost = workers * price / 3600.0 / predicted.of(mode) * 1e6;
        facts += &format!("; a million samples cost {cost:.3}");
        if let Some(most) = policy.max_cost_per_million {
            let worker_seconds = rows * 1e-6 * most * 3600.0 / price;
            aim = aim.min((worker_seconds - shrinks * workers) / stays.max(f64::MIN_POSITIVE));
            facts += &format!(", at most {most:.3} are allowed");
        }
    }
    if let Some(ceiling) = history.ceiling {
        aim = aim.min(f64::from(ceiling.replicas));
        facts += &format!("; more than {} brought less than half of that when tried", ceiling.replicas);
    }
    let ratio = aim / workers;
    if (ratio - 1.0).abs() <= scaling.tolerance {
        return Ok((count, facts));
    }
    Ok((whole((workers * ratio.clamp(MOST_AT_ONCE.recip(), MOST_AT_ONCE)).floor()), facts))
}

/// Seconds of a step that shrink as workers are added, those that stay, and the rows that all workers train meanwhile.
fn parts_of_a_step(observations: &Observations, history: &History, mode: TrainingMode) -> (f64, f64, f64) {
    let workers = &observations.workers;
    let wait = observations.wait_seconds;
    match mode {
        TrainingMode::Sync => {
            let rows = f64::from(observations.global_batch_rows);
            let share = rows / workers.len() as f64;
            let stays = history.all_reduce_seconds.or(history.exchange_seconds).unwrap_or(0.0) + wait;
            (mean_of_the_slowest(workers, share), stays, rows)
        }
        TrainingMode::Gba => {
            let local = f64::from(observations.local_batch_rows);
            let compute = workers.iter().map(|worker| worker.mean_seconds(local)).sum::<f64>() / workers.len() as f64;
            let stays = history.exchange_seconds.or(history.all_reduce_seconds).unwrap_or(0.0) + wait;
            (compute, stays, local * workers.len() as f64)
        }
    }
}

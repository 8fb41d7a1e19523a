//! The training mode: the one that is predicted to train more, if the difference is worth a switch.

use crate::{Action, ClusterLoad, Decision, History, ModePolicy, Observations, Subject, TrainingMode};

const HOUR_SECONDS: u64 = 3600;

pub(crate) fn decide(policy: &ModePolicy, observations: &Observations, history: &History) -> Decision {
    let now = observations.at_seconds;
    let (action, reason) = match verdict(policy, observations, history) {
        Ok((from, reason)) => (Action::SwitchMode { from, to: from.other() }, reason),
        Err(reason) => (Action::Keep, reason),
    };
    Decision::new(now, Subject::Mode, action, reason)
}

/// The mode to leave, or why it stays.
fn verdict(
    policy: &ModePolicy,
    observations: &Observations,
    history: &History,
) -> Result<(TrainingMode, String), String> {
    let now = observations.at_seconds;
    let present = observations.mode.ok_or("no steps are made, or in a mode that is not switched automatically")?;
    let predicted = history.predict(observations).ok_or("no batch of every dense worker was measured yet")?;
    let window = policy.window_seconds;
    let advantages = history.advantage.over(window).ok_or_else(|| format!("less than {window} s were measured"))?;
    let gba_over_sync = advantages.iter().sum::<f64>() / advantages.len() as f64;
    let gain = match present {
        TrainingMode::Sync => gba_over_sync,
        TrainingMode::Gba => -gba_over_sync,
    };
    let crowd = crowd(policy, &observations.cluster);
    let needed = needed(policy, present.other(), crowd.is_some(), history.has_used(present.other()));
    let facts = format!(
        "predicted over {window} s: gba {} % {} than sync (now {:.0} against {:.0} samples/s; slowest of a step is worker {}, {:.3} s a step){}",
        (gba_over_sync.abs().exp_m1() * 100.0).round(),
        if gba_over_sync < 0.0 { "slower" } else { "faster" },
        predicted.gba,
        predicted.sync,
        predicted.slowest,
        predicted.sync_step_seconds,
        crowd.map(|crowd| format!("; the cluster is crowded: {crowd}")).unwrap_or_default(),
    );
    let takes = match (present, (needed.abs().exp_m1() * 100.0).round()) {
        (TrainingMode::Gba, percent) if needed < 0.0 => format!("gba stays while it is {percent} % faster"),
        (present, percent) => format!("leaving {present} takes {percent} % more"),
    };
    if gain <= needed {
        return Err(format!("{facts}; {takes}"));
    }
    if let Some(last) = history.last(Subject::Mode)
        && now < last.at_seconds.saturating_add(policy.dwell_seconds)
    {
        let since = now.saturating_sub(last.at_seconds);
        return Err(format!(
            "{facts}; a switch was decided {since} s ago, and a mode stays {} s",
            policy.dwell_seconds
        ));
    }
    let switches = history.switches_within(HOUR_SECONDS, now);
    if switches >= policy.switches_per_hour as usize {
        return Err(format!("{facts}; the last hour has had its {switches} switches"));
    }
    Ok((present, format!("{facts}; {takes}")))
}

/// The advantage of `to` (natural logarithm of a ratio) at which training goes over to it. To `gba`: the margin, but at least what
/// earns the switch's time s back within the dwell d, d / (d − s). To `sync`, whose steps are exact and can be repeated: less than nothing,
/// as soon as `gba` is not worth half its threshold any more. In a crowded cluster workers are about to become slow: half the margin
/// leads to `gba`, and only where `sync` is the faster by the margin is it left. A `gba` that was never used is only what the models say
/// of it, which know nothing of, say, processors that workers share: all of that is doubled until it has been.
fn needed(policy: &ModePolicy, to: TrainingMode, is_crowded: bool, has_used: bool) -> f64 {
    let dwell = policy.dwell_seconds as f64;
    let earned_back = policy.switch_seconds / (dwell - policy.switch_seconds).max(1.0);
    let unsure = if has_used || to == TrainingMode::Sync { 1.0 } else { 2.0 };
    let at_least = |margin: f64| unsure * margin.max(earned_back).ln_1p();
    match (to, is_crowded) {
        (TrainingMode::Gba, false) | (TrainingMode::Sync, true) => at_least(policy.margin),
        (TrainingMode::Gba, true) => at_least(0.5 * policy.margin),
        (TrainingMode::Sync, false) => -0.5 * at_least(policy.margin),
    }
}

/// The largest advantage that a switch of this policy may take.
pub(crate) fn most_needed(policy: &ModePolicy) -> f64 {
    needed(policy, TrainingMode::Gba, false, false)
}

/// What of the cluster's load warns of slow workers.
fn crowd(policy: &ModePolicy, load: &ClusterLoad) -> Option<String> {
    let count = |count: u32, what: &str| (count > 0).then(|| format!("{count} {what}"));
    let signs = [
        load.node_cpu
            .filter(|cpu| *cpu >= policy.crowded_cpu)
            .map(|cpu| format!("{:.0} % of CPU in use by others", cpu * 100.0)),
        count(load.nodes_under_pressure, "nodes under pressure"),
        count(load.pending_pods, "pods pending"),
        count(load.preemptions, "pods preempted"),
    ];
    let signs: Vec<_> = signs.into_iter().flatten().collect();
    (!signs.is_empty()).then(|| signs.join(", "))
}

//! The training mode: the faster one by prediction, if the difference is worth a switch.

use crate::look::Look;
use crate::policy::SwitchCircumstances;
use crate::{Action, AutoMode, ClusterLoad, Decision, ModePolicy, Prediction, Subject, Verdict};

const HOUR_SECONDS: u64 = 3600;

pub(crate) fn decide(policy: &ModePolicy, look: Look<'_>) -> Decision {
    verdict(policy, look).into_decision(look.observations.at_seconds, Subject::Mode)
}

fn verdict(policy: &ModePolicy, look: Look<'_>) -> Verdict {
    let Look { observations, history, .. } = look;
    let Some(present) = observations.mode else {
        return Verdict::keep("the job trains no step, or is in a mode that is not switched automatically");
    };
    let Some(predicted) = history.predict(observations) else {
        return Verdict::keep("no batch of every dense worker was measured yet");
    };
    let Some(advantages) = history.advantage.over(policy.window_seconds) else {
        return Verdict::keep(format!("less than {} s were measured", policy.window_seconds));
    };
    // Both windows have the same samples, but a history of an earlier version has only one.
    let sync = history.sync_speed.over(policy.window_seconds).unwrap_or_else(|| vec![predicted.sync.ln()]);
    let comparison = Comparison {
        present,
        gba_over_sync: mean(&advantages),
        sync: mean(&sync).exp(),
        crowd: crowd(policy, &observations.cluster),
    };
    let to = present.other();
    let threshold = policy.threshold(SwitchCircumstances {
        to,
        is_crowded: comparison.crowd.is_some(),
        has_used: history.has_used(to),
    });
    let facts = format!("{}; {}", comparison.facts(policy, predicted), takes(present, threshold));
    if comparison.gain() <= threshold {
        return Verdict::keep(facts);
    }
    match limit(policy, look) {
        Some(limit) => Verdict::keep(format!("{}; {limit}", comparison.facts(policy, predicted))),
        None => Verdict::act(Action::SwitchMode { from: present, to }, facts),
    }
}

/// Both modes over the window of decisions.
struct Comparison {
    present: AutoMode,
    /// Mean of ln(gba / sync).
    gba_over_sync: f64,
    /// The geometric mean of the predictions for `sync`, in rows per second.
    sync: f64,
    crowd: Option<String>,
}

impl Comparison {
    /// The other mode's advantage over the present one.
    fn gain(&self) -> f64 {
        match self.present {
            AutoMode::Sync => self.gba_over_sync,
            AutoMode::Gba => -self.gba_over_sync,
        }
    }

    fn facts(&self, policy: &ModePolicy, predicted: Prediction) -> String {
        format!(
            "predicted over {} s: gba {} % {} than sync ({:.0} against {:.0} samples/s; slowest of a step is worker {}, {:.3} s a step){}",
            policy.window_seconds,
            percent(self.gba_over_sync),
            if self.gba_over_sync < 0.0 { "slower" } else { "faster" },
            self.sync * self.gba_over_sync.exp(),
            self.sync,
            predicted.slowest,
            predicted.sync_step_seconds,
            self.crowd.as_ref().map(|crowd| format!("; the cluster is crowded: {crowd}")).unwrap_or_default(),
        )
    }
}

fn mean(values: &[f64]) -> f64 {
    values.iter().sum::<f64>() / values.len().max(1) as f64
}

/// The size of a logarithmic advantage in percent.
fn percent(advantage: f64) -> f64 {
    (advantage.abs().exp_m1() * 100.0).round()
}

/// The threshold, in words.
fn takes(present: AutoMode, threshold: f64) -> String {
    match present {
        AutoMode::Gba if threshold < 0.0 => format!("gba stays while it is {} % faster", percent(threshold)),
        present => format!("leaving {present} takes {} % more", percent(threshold)),
    }
}

/// The dwell or the hourly limit, if it forbids a switch now.
fn limit(policy: &ModePolicy, look: Look<'_>) -> Option<String> {
    let now = look.observations.at_seconds;
    if let Some(last) = look.history.last(Subject::Mode)
        && now < last.at_seconds.saturating_add(policy.dwell_seconds)
    {
        let since = now.saturating_sub(last.at_seconds);
        let dwell = policy.dwell_seconds;
        return Some(format!("a switch was decided {since} s ago, and a mode stays {dwell} s"));
    }
    let switches = look.history.switches_within(HOUR_SECONDS, now);
    let is_used_up = switches >= policy.switches_per_hour as usize;
    is_used_up.then(|| format!("all {switches} switches of the last hour are used up"))
}

/// Signs in the cluster's load that workers are about to become slow.
fn crowd(policy: &ModePolicy, load: &ClusterLoad) -> Option<String> {
    let count = |count: u32, things: &str| (count > 0).then(|| format!("{count} {things}"));
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

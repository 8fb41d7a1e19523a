//! The slow member of a job, and the time without a step, with the names of pods.

use jiff::Timestamp;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use rectrain_crds::{Phase, Role, SlowestStatus};

use super::decision::Run;
use super::draft::Draft;
use super::progress::rounded;
use crate::coordinator_view::{NoStep, SlowMember};
use crate::pods::PodFacts;
use crate::replace_slow::{self, Slow};

/// Least change of the share that is written to the status.
const SHARE_STEP: f64 = 0.1;
const HELD: &str = "training waits, because the quality of its predictions has fallen (status.quality, \
spec.training.quality.onRegression): suspend the job and resume it to go on from its last checkpoint";

impl Draft<'_> {
    /// The slow member of the coordinator's report, as the status shows it.
    pub(super) fn slowest(&self, slow: SlowMember) -> SlowestStatus {
        let pod = self.pod_of(slow.role, slow.index);
        let since = i64::try_from(slow.since_seconds).ok().and_then(|seconds| Timestamp::from_second(seconds).ok());
        let now = SlowestStatus {
            role: slow.role.section().to_owned(),
            index: slow.index,
            pod: self.pod_name(slow.role, slow.index),
            node: pod.and_then(|pod| pod.node.clone()),
            share: rounded(slow.share, 1),
            since: since.map(Time),
        };
        // A share that wavers must not change the status at each look.
        match &self.before.slowest {
            Some(before) if before.pod == now.pod && (before.share - slow.share).abs() < SHARE_STEP => {
                SlowestStatus { share: before.share, ..now }
            }
            _ => now,
        }
    }

    /// Notes the replacement of a pod that stays slow. It is carried out once it is in the status.
    pub(super) fn note_replacement(&mut self, phase: Phase, run: Run) {
        self.status.replaced_pods = replace_slow::remembered(&self.before.replaced_pods, self.facts.now);
        // The rows of a pod need members that can take them. A pod that ends counts as ready.
        if run == Run::Go
            && phase == Phase::Training
            && self.live_report().is_some()
            && self.all_ready()
            && !replace_slow::is_under_way(self.facts.pods, &self.status.replaced_pods)
            && let Some(settings) = self.facts.verdict.ok().and_then(|resolved| resolved.fault_tolerance.replace_slow)
            && let Some(slow) = self.slow_member()
            && let Some(replaced) = replace_slow::decide(settings, &slow, &self.status.replaced_pods, self.facts.now)
        {
            self.status.replaced_pods.push(replaced);
        }
    }

    /// The slow member in the status, with its pod.
    fn slow_member(&self) -> Option<Slow<'_>> {
        let slowest = self.status.slowest.as_ref()?;
        let role = Role::ALL.into_iter().find(|role| role.section() == slowest.role)?;
        let pod = self.pod_of(role, slowest.index)?;
        let replicas = self.status.attempt.as_ref()?.replicas.as_ref()?;
        Some(Slow { role, slowest, pod, members: replicas.get(role)?.present })
    }

    /// The message of a job that makes no step for longer than usual, or that waits.
    pub(super) fn no_step_message(&self, phase: Phase) -> Option<String> {
        let report = self.live_report().filter(|_| phase == Phase::Training)?;
        if report.quality.as_deref().is_some_and(|quality| quality.is_held) {
            return Some(HELD.to_owned());
        }
        let NoStep { seconds, waits_for } = *report.no_step.as_deref()?;
        let time = words(seconds);
        Some(match waits_for {
            Some((role, index)) => {
                let node = self.pod_of(role, index).and_then(|pod| pod.node.as_deref());
                let on = node.map(|node| format!(" on node {node}")).unwrap_or_default();
                format!("no step was made for {time}: training waits for {}{on}", self.pod_name(role, index))
            }
            None => format!("no step was made for {time}, and no member has reported a wait for another one"),
        })
    }

    fn pod_of(&self, role: Role, index: u32) -> Option<&PodFacts> {
        let attempt = self.status.attempt.as_ref()?.number;
        let is_it = |pod: &&PodFacts| pod.role == role && pod.attempt == attempt && pod.index() == Some(index);
        self.facts.pods.iter().find(is_it)
    }

    /// The name of a member's pod. A pod that does not exist is named by its role and index.
    fn pod_name(&self, role: Role, index: u32) -> String {
        self.pod_of(role, index).map_or_else(|| format!("{role} {index}"), |pod| pod.name.clone())
    }
}

/// A time, rounded down to five seconds, or to minutes. The message then changes rarely.
fn words(seconds: f64) -> String {
    let seconds = seconds.max(0.0) as u64;
    match seconds {
        0..5 => "some seconds".to_owned(),
        5..60 => format!("{} s", seconds / 5 * 5),
        _ => format!("{} min", seconds / 60),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_time_without_a_step_changes_rarely() {
        let times = [3.2, 5.0, 9.9, 59.0, 61.0, 179.0].map(words);
        assert_eq!(times, ["some seconds", "5 s", "5 s", "55 s", "1 min", "2 min"]);
    }
}

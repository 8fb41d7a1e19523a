//! Follows the loaders while a job trains.
//!
//! `spec.autoscaling.loader` outside a cluster: the coordinator itself decides how many loaders a
//! run has, with the decision function of `rectrain-policy`. In a cluster the operator decides, and
//! the manifest of such a coordinator has no `autoscaling`.

use std::time::{Duration, Instant};

use rectrain_policy::{Action, History, LoaderUse, Observations, Policy, ReplicaCount, Replicas};
use rectrain_protocol::Role;
use rectrain_protocol::events::JobEvent;

use super::Coordinator;
use super::refused::ResizeRefused;

/// The time between two looks for a decision. A look is long enough for several chunks.
const POLL: Duration = Duration::from_secs(10);
/// The time between two looks for a late chunk.
const LATE_POLL: Duration = Duration::from_millis(500);

impl Coordinator {
    /// Shares the chunks by the loaders' speed, and gives late ones to a second loader, until
    /// dropped. Never returns. Dense workers that wait for data report nothing, so this has a clock
    /// of its own.
    pub(super) async fn share_chunks(&self) {
        let mut interval = tokio::time::interval(LATE_POLL);
        loop {
            interval.tick().await;
            let is_late = self.lock().share_chunks(Instant::now());
            if is_late {
                // A second loader waits for the chunk.
                self.changed.notify_waiters();
            }
        }
    }

    /// Observes the loaders, decides on their number and carries it out until dropped. Never
    /// returns.
    pub(super) async fn scale_loaders(&self) {
        let Some(policy) = self.plan.loader_scaling.clone() else { return std::future::pending().await };
        let (mut scaler, begun) = (LoaderScaler::new(policy), Instant::now());
        let mut interval = tokio::time::interval(POLL);
        loop {
            interval.tick().await;
            let now = Instant::now();
            let (load, count) = self.lock().look_at_loaders(now);
            if let Some((to, reason)) = scaler.look((now - begun).as_secs(), load, count) {
                self.scale_loaders_to(to, reason, scaler.policy.scaling.recommends_only);
            }
        }
    }

    fn scale_loaders_to(&self, to: u32, reason: String, recommends_only: bool) {
        if recommends_only {
            self.publish(vec![JobEvent::Warning { message: format!("{to} loaders are recommended: {reason}") }]);
            return;
        }
        match self.scale(Role::Loader, to, reason, None) {
            Ok(_) => {}
            // Training ends, or a command requested another number at the same time.
            Err(ResizeRefused::Now(why) | ResizeRefused::Number(why)) => {
                tracing::info!(to, why, "the number of loaders was not changed");
            }
        }
    }
}

/// The history of observations and decisions.
struct LoaderScaler {
    policy: Policy,
    history: History,
}

impl LoaderScaler {
    fn new(policy: Policy) -> Self {
        Self { policy, history: History::default() }
    }

    /// Observes the loaders at a time in seconds. Returns another number of them and the reason, if
    /// the job needs it.
    fn look(&mut self, at_seconds: u64, loader_use: Option<LoaderUse>, count: ReplicaCount) -> Option<(u32, String)> {
        let replicas = Replicas { loader: Some(count), ..Replicas::default() };
        let observations = Observations { at_seconds, loader_use, replicas, ..Observations::default() };
        let decisions = self.history.advance(&self.policy, &observations);
        decisions.into_iter().find_map(|decision| match decision.action {
            Action::Scale { to, .. } => Some((to, decision.reason)),
            _ => None,
        })
    }
}

#[cfg(test)]
mod tests {
    use rectrain_protocol::plan::small_plan;

    use super::*;

    /// The settings of a run that scales its loaders only.
    const LOADERS_ONLY: [&str; 5] = [
        "spec.autoscaling.mode=apply",
        "spec.autoscaling.ps.scaler=external",
        "spec.autoscaling.embeddingWorker.scaler=external",
        "spec.autoscaling.denseWorker.scaler=external",
        "spec.autoscaling.loader.max=3",
    ];

    #[test]
    fn a_run_gets_loaders_while_its_dense_workers_wait_for_data() {
        assert!(small_plan(&[]).loader_scaling.is_none());
        let policy = small_plan(&LOADERS_ONLY).loader_scaling.unwrap();
        assert!(policy.ps.is_none() && policy.mode.is_none() && !policy.scaling.recommends_only);
        let mut scaler = LoaderScaler::new(policy);
        let (mut loaders, mut changes) = (1, Vec::new());
        for look in 1..=100 {
            let count = ReplicaCount { wanted: loaders, ready: loaders };
            let load = LoaderUse { waiting: 0.5, reading: 1.0 };
            if let Some((to, reason)) = scaler.look(10 * look, Some(load), count) {
                assert!(reason.contains("dense workers wait 50 % of the time for data"), "{reason}");
                loaders = to;
                changes.push(to);
            }
        }
        assert_eq!(changes, [2, 3], "up to the bound");
    }

    #[test]
    fn nothing_is_decided_without_a_measurement() {
        let mut scaler = LoaderScaler::new(small_plan(&LOADERS_ONLY).loader_scaling.unwrap());
        let count = ReplicaCount { wanted: 1, ready: 1 };
        assert!((1..=100).all(|look| scaler.look(10 * look, None, count).is_none()));
    }
}

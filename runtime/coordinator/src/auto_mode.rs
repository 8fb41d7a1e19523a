//! `spec.training.mode: auto` outside a cluster: the coordinator chooses between `sync` and `gba`
//! itself.
//! It uses the decision functions of `rectrain-policy` with the step times that its workers
//! measure. In a cluster the operator decides, because it also sees the load of the nodes. The
//! manifest of such a coordinator names a mode.

use std::time::{Duration, Instant};

use rectrain_kinds::Mode;
use rectrain_modes::gba::{Decay, TokenMode};
use rectrain_policy::{Action, AutoMode, History, ModePolicy, Observations, Policy, Worker, with_idle};
use rectrain_proto::v1;

use super::Coordinator;
use super::refused::SwitchRefused;
use rectrain_modes::TrainingMode;
use rectrain_protocol::plan::JobPlan;

/// The time between two observations.
const POLL: Duration = Duration::from_secs(1);

impl Coordinator {
    /// Observes training, decides and switches the mode until dropped. Never returns.
    pub(super) async fn choose_modes(&self) {
        let Some(policy) = self.plan.auto.clone() else { return std::future::pending().await };
        let mut chooser = ModeChooser::new(policy);
        let mut interval = tokio::time::interval(POLL);
        loop {
            interval.tick().await;
            if let Some((mode, reason)) = chooser.poll(&self.plan, &self.status()) {
                self.switch_to(mode, reason);
            }
        }
    }

    fn switch_to(&self, mode: AutoMode, reason: String) {
        match self.set_mode(Mode::from(mode).name(), reason) {
            Ok(_) => {}
            // Training ends, or a command requested a switch at the same time.
            Err(SwitchRefused::Now(why) | SwitchRefused::Mode(why)) => {
                tracing::info!(%mode, why, "the training mode was not switched");
            }
        }
    }
}

/// The history of observations and decisions.
struct ModeChooser {
    policy: Policy,
    history: History,
    began: Instant,
    /// The time of the last observation, and the samples and the mode then.
    before: Option<(Instant, u64, String)>,
}

impl ModeChooser {
    fn new(policy: ModePolicy) -> Self {
        let policy = Policy { mode: Some(policy), ..Policy::default() };
        Self { policy, history: History::default(), began: Instant::now(), before: None }
    }

    /// Observes the status. Returns the mode to switch to and the reason, if a switch pays off.
    fn poll(&mut self, plan: &JobPlan, status: &v1::JobStatus) -> Option<(AutoMode, String)> {
        let now = Instant::now();
        let before = self.before.replace((now, status.samples, status.mode.clone()));
        let samples_per_second = before
            .filter(|(_, samples, mode)| *mode == status.mode && *samples < status.samples)
            .map(|(then, samples, _)| (status.samples - samples) as f64 / (now - then).as_secs_f64());
        let observations = Observations {
            at_seconds: self.began.elapsed().as_secs(),
            samples_per_second,
            ..observations(plan, status)
        };
        let decisions = self.history.advance(&self.policy, &observations);
        decisions.into_iter().find_map(|decision| match decision.action {
            Action::SwitchMode { to, .. } => Some((to, decision.reason)),
            _ => None,
        })
    }
}

fn observations(plan: &JobPlan, status: &v1::JobStatus) -> Observations {
    let is_training = status.phase() == v1::Phase::Training;
    let mode = status.mode.parse::<Mode>().ok().filter(|_| is_training).and_then(|mode| AutoMode::try_from(mode).ok());
    let workers = status.workers.iter().map(|worker| Worker {
        batch_rows: (worker.batch_rows.round() as u32).max(1),
        compute_seconds: worker.compute_seconds.iter().map(|seconds| f64::from(*seconds)).collect(),
    });
    // The time of a step is unknown until all of its workers have reported. With a barrier, the
    // workers that it leaves out never report.
    let dense_workers = status.replicas.iter().find(|replicas| replicas.role() == v1::Role::DenseWorker);
    let present = dense_workers.map_or(0, |there| there.present as usize);
    let step_workers =
        plan.barrier_workers.filter(|_| mode == Some(AutoMode::Sync)).map_or(present, |some| some as usize);
    let all_have_reported = present > 0 && status.workers.len() >= step_workers;
    Observations {
        mode,
        global_batch_rows: u32::try_from(plan.global_batch_rows).unwrap_or(u32::MAX),
        local_batch_rows: u32::try_from(plan.local_batch_rows).unwrap_or(u32::MAX),
        pulls_pieces: plan.pulls_pieces(),
        staleness_tolerance: staleness_tolerance(plan),
        workers: if all_have_reported { with_idle(workers.collect(), present) } else { Vec::new() },
        barrier_workers: plan.barrier_workers,
        all_reduce_seconds: Some(status.all_reduce_seconds).filter(|seconds| *seconds > 0.0),
        ..Observations::default()
    }
}

/// ι of `gba`, in global steps.
fn staleness_tolerance(plan: &JobPlan) -> u32 {
    let tolerances = plan.modes.iter().filter_map(|mode| match mode {
        TrainingMode::Tokens(TokenMode::Gba { decay: Decay::Threshold { tolerance }, .. }) => Some(*tolerance),
        _ => None,
    });
    tolerances.min().and_then(|tolerance| u32::try_from(tolerance).ok()).unwrap_or(u32::MAX)
}

#[cfg(test)]
mod tests {
    use rectrain_protocol::plan::small_plan;

    use super::*;

    #[test]
    fn pulled_pieces_are_observed_with_their_rows() {
        let of = |pieces: &str| {
            let plan = small_plan(&[&format!("spec.training.sync.pieces={pieces}"), "spec.training.localBatchSize=8"]);
            let seen = observations(&plan, &v1::JobStatus::default());
            (seen.pulls_pieces, seen.local_batch_rows, seen.global_batch_rows)
        };
        assert_eq!([of("pulled"), of("fixed")], [(true, 8, 24), (false, 8, 24)]);
    }
}

//! `spec.training.mode: auto` where no operator decides: the coordinator chooses between `sync` and `gba` itself, by the same pure
//! decisions (`rectrain-policy`), from its workers' measured step times. In a cluster the operator decides, which also sees the load of
//! the nodes, and the manifest that the coordinator reads there names a mode.

use std::time::{Duration, Instant};

use rectrain_kinds::Mode;
use rectrain_modes::gba::{Decay, TokenMode};
use rectrain_policy::{Action, AutoMode, History, ModePolicy, Observations, Policy, Worker, with_idle};
use rectrain_proto::v1;

use super::Coordinator;
use super::training::SwitchRefused;
use rectrain_modes::TrainingMode;
use rectrain_protocol::plan::JobPlan;

/// Time between two looks.
const LOOK: Duration = Duration::from_secs(1);

impl Coordinator {
    /// Looks, decides and switches until dropped; never ends where the plan does not ask for it.
    pub(super) async fn choose_modes(&self) {
        let Some(policy) = self.plan.auto.clone() else { return std::future::pending().await };
        let mut chooser = Chooser::new(policy);
        let mut look = tokio::time::interval(LOOK);
        loop {
            look.tick().await;
            if let Some((mode, reason)) = chooser.look(&self.plan, &self.status()) {
                self.go_on_in(mode, reason);
            }
        }
    }

    fn go_on_in(&self, mode: AutoMode, reason: String) {
        match self.set_mode(Mode::from(mode).name(), reason) {
            Ok(_) => {}
            // Training ends, or somebody else has asked for a mode in this moment.
            Err(SwitchRefused::Now(why) | SwitchRefused::Mode(why)) => {
                tracing::info!(%mode, why, "the training mode was not switched");
            }
        }
    }
}

/// What was seen, and what was decided on it.
struct Chooser {
    policy: Policy,
    history: History,
    began: Instant,
    /// When the last look was, how many rows were trained then, and in which mode.
    before: Option<(Instant, u64, String)>,
}

impl Chooser {
    fn new(policy: ModePolicy) -> Self {
        let policy = Policy { mode: Some(policy), ..Policy::default() };
        Self { policy, history: History::default(), began: Instant::now(), before: None }
    }

    /// The mode to go on in, and why, if it is another one.
    fn look(&mut self, plan: &JobPlan, status: &v1::JobStatus) -> Option<(AutoMode, String)> {
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
    // Before all have reported nothing is known of a step; those that a barrier leaves out do not report.
    let dense_workers = status.replicas.iter().find(|replicas| replicas.role() == v1::Role::DenseWorker);
    let present = dense_workers.map_or(0, |there| there.present as usize);
    let step_workers =
        plan.some_with_barrier.filter(|_| mode == Some(AutoMode::Sync)).map_or(present, |some| some as usize);
    let all_have_reported = present > 0 && status.workers.len() >= step_workers;
    Observations {
        mode,
        global_batch_rows: u32::try_from(plan.global_batch_rows).unwrap_or(u32::MAX),
        local_batch_rows: u32::try_from(plan.local_batch_rows).unwrap_or(u32::MAX),
        staleness_tolerance: staleness_tolerance(plan),
        workers: if all_have_reported { with_idle(workers.collect(), present) } else { Vec::new() },
        barrier_workers: plan.some_with_barrier,
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

//! Begins a new job with the model of another job's checkpoint (`spec.checkpoint.from`). The other
//! job's files are only read: this takes no lease on its path and writes nothing there.
//!
//! All attempts of a run must begin with the same model. So the first attempt notes the exact
//! checkpoint in this job's own path ([`PIN`]), and later ones read the note. A job without a path
//! loses its training with each attempt anyway, and then looks for the newest checkpoint again.

use rectrain_checkpoint::{Checkpoint, CheckpointError, Depth, Listed, ListedState, latest_good, list};
use rectrain_protocol::error::RoleError;
use rectrain_protocol::events::{JobEvent, WarmStartOrigin};
use rectrain_protocol::plan::{Inheritance, JobPlan, WarmStartPlan};
use rectrain_storage::Directory;
use serde::{Deserialize, Serialize};

use super::snapshot::Snapshot;

/// The note of the first attempt, in the job's own checkpoint path.
pub(super) const PIN: &str = "from.json";
/// The largest note that is read.
const MOST_PIN_BYTES: u64 = 1 << 16;
/// The most steps that a refusal lists.
const LISTED_STEPS: usize = 20;

/// The model that the job begins with.
#[derive(Debug)]
pub(super) struct WarmStart {
    pub(super) origin: WarmStartOrigin,
    inheritance: Inheritance,
    /// The global step before which the state of the dense optimizer began.
    dense_since: u64,
    /// The checkpoint's dense optimizer, if the job has another one.
    replaced_optimizer: Option<String>,
}

/// A note of the checkpoint that a run begins with.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Pin {
    /// The run, across all its attempts.
    run: String,
    /// The manifest's `spec.checkpoint.from`.
    from: String,
    origin: WarmStartOrigin,
}

/// A search for the checkpoint.
pub(super) struct Search<'s> {
    pub(super) plan: &'s JobPlan,
    pub(super) from: &'s WarmStartPlan,
    /// The run, across all its attempts.
    pub(super) run: &'s str,
    /// The job's own checkpoint path, if it has one.
    pub(super) own: Option<&'s Directory>,
}

impl WarmStart {
    /// The state of the job before its first step. The global step counts on from the checkpoint's,
    /// because optimizers and dropout masks depend on it. The data begins at its first row.
    pub(super) fn snapshot(&self, plan: &JobPlan) -> Snapshot {
        Snapshot::before_first_row(plan, self.origin.step, self.dense_since)
    }

    /// The event of the model, once all servers have taken over their `rows`.
    pub(super) fn event(self, rows: u64) -> JobEvent {
        let Inheritance { dense, new_features, left_out_features, .. } = self.inheritance;
        JobEvent::WarmStarted {
            from: self.origin,
            rows,
            new_features,
            left_out_features,
            fresh_parameters: dense.fresh() as u64,
            replaced_optimizer: self.replaced_optimizer,
        }
    }
}

impl Search<'_> {
    /// Finds the checkpoint, and checks that the job can begin with it. Also returns warnings about
    /// newer checkpoints that cannot be used.
    ///
    /// # Errors
    /// [`RoleError::Input`] if there is no such checkpoint, if it is damaged, or if its model does
    /// not fit the job. Also errors of the storage.
    pub(super) async fn find(&self) -> Result<(WarmStart, Vec<String>), RoleError> {
        let directory = self.from.directory()?;
        self.refuse_own_path(&directory)?;
        let pinned = self.pinned().await?;
        let (name, warnings) = match &pinned {
            Some(pinned) => (pinned.checkpoint.clone(), Vec::new()),
            None => self.choose(&directory).await?,
        };
        let found = self.open(&directory, &name).await?;
        match pinned {
            Some(pinned) if pinned != found.origin => Err(self.replaced(&pinned)),
            Some(_) => Ok((found, warnings)),
            None => {
                self.pin(&found.origin).await?;
                Ok((found, warnings))
            }
        }
    }

    /// The texts of the two paths differ, but they may be links to one folder.
    fn refuse_own_path(&self, from: &Directory) -> Result<(), RoleError> {
        let Some(own) = self.own.filter(|own| own.is_local() && from.is_local()) else { return Ok(()) };
        let real = |directory: &Directory| std::fs::canonicalize(directory.name()).ok();
        if real(own).is_none() || real(own) != real(from) {
            return Ok(());
        }
        Err(RoleError::Input(format!(
            "spec.checkpoint.from: {} and spec.checkpoint.path {} are the same folder: set spec.checkpoint.resume to \
             `latest` instead to resume there, or give this job another path",
            from.name(),
            own.name()
        )))
    }

    /// The checkpoint that an earlier attempt of this run began with.
    async fn pinned(&self) -> Result<Option<WarmStartOrigin>, RoleError> {
        let Some(own) = self.own else { return Ok(None) };
        let bytes = own.read(PIN, MOST_PIN_BYTES).await.map_err(CheckpointError::from)?;
        let pin = bytes.and_then(|bytes| serde_json::from_slice::<Pin>(&bytes).ok());
        let is_of_this_run = |pin: &Pin| pin.run == self.run && pin.from == self.from.from.to_string();
        Ok(pin.filter(is_of_this_run).map(|pin| pin.origin))
    }

    /// Notes the checkpoint for the next attempts of this run.
    async fn pin(&self, origin: &WarmStartOrigin) -> Result<(), RoleError> {
        let Some(own) = self.own else { return Ok(()) };
        let pin = Pin { run: self.run.to_owned(), from: self.from.from.to_string(), origin: origin.clone() };
        let failed = |error: serde_json::Error| RoleError::Task {
            what: "noting the checkpoint of spec.checkpoint.from",
            reason: error.to_string(),
        };
        let bytes = serde_json::to_vec_pretty(&pin).map_err(failed)?;
        Ok(own.put(PIN, bytes).await.map_err(CheckpointError::from)?)
    }

    /// The name of the wanted checkpoint.
    async fn choose(&self, directory: &Directory) -> Result<(String, Vec<String>), RoleError> {
        match self.from.from.step {
            Some(step) => Ok((self.of_step(directory, step).await?, Vec::new())),
            None => self.newest(directory).await,
        }
    }

    async fn newest(&self, directory: &Directory) -> Result<(String, Vec<String>), RoleError> {
        let latest = latest_good(directory, None, Depth::Sizes, &[]).await.map_err(|error| self.unusable(error))?;
        let faults = latest.skipped.iter().filter(|skipped| is_fault(&skipped.reason));
        let faults: Vec<String> = faults.map(|skipped| format!("{}: {}", skipped.name, skipped.reason)).collect();
        match latest.checkpoint {
            Some(checkpoint) => {
                let skipped = |fault: String| format!("spec.checkpoint.from skips the newer checkpoint {fault}");
                Ok((checkpoint.manifest().directory(), faults.into_iter().map(skipped).collect()))
            }
            None if faults.is_empty() => {
                Err(self.from.refused(&format!("{} holds no finished checkpoint", directory.name())))
            }
            None => Err(self.from.refused(&format!(
                "none of the checkpoints in {} can be used: {}",
                directory.name(),
                faults.join("; ")
            ))),
        }
    }

    async fn of_step(&self, directory: &Directory, step: u64) -> Result<String, RoleError> {
        let listed = list(directory).await.map_err(|error| self.unusable(error))?;
        // Of one step, the full checkpoint comes last and needs no other one.
        let named = listed.iter().rev().find(|listed| listed.step == step && !is_unfinished(listed));
        if let Some(listed) = named {
            return Ok(listed.name.clone());
        }
        Err(self.from.refused(&no_such_step(directory.name(), step, &listed)))
    }

    /// Opens the checkpoint, and checks everything but the rows.
    async fn open(&self, directory: &Directory, name: &str) -> Result<WarmStart, RoleError> {
        let checkpoint = Checkpoint::open(directory, name).await.map_err(|error| self.unusable(error))?;
        checkpoint.verify(Depth::Sizes).await.map_err(|error| self.unusable(error))?;
        let inheritance = self.plan.inherit(&checkpoint.manifest().identity, &checkpoint.name())?;
        // Dense workers read their parameters later, when a better choice would be too late.
        let dense = checkpoint.dense().await.map_err(|error| self.unusable(error))?;
        let continues = self.plan.continues_dense_optimizer(&dense);
        let step = checkpoint.manifest().step;
        Ok(WarmStart {
            origin: WarmStartOrigin {
                path: self.from.from.path.clone(),
                step,
                checkpoint: name.to_owned(),
                digest: checkpoint.manifest().digest().to_string(),
            },
            inheritance,
            dense_since: if continues { step.saturating_sub(dense.update_count) } else { step },
            replaced_optimizer: (!continues).then_some(dense.optimizer),
        })
    }

    /// The error of a checkpoint that cannot be used. It is the user's unless the store failed,
    /// which a retry may cure.
    fn unusable(&self, error: CheckpointError) -> RoleError {
        let is_users = match &error {
            CheckpointError::Storage(reason) => reason.is_users_input(),
            error => error.is_checkpoints_fault(),
        };
        match is_users {
            true => unusable(self.from, &error.to_string()),
            false => RoleError::Checkpoint(Box::new(error)),
        }
    }

    fn replaced(&self, pinned: &WarmStartOrigin) -> RoleError {
        RoleError::Input(format!(
            "spec.checkpoint.from: the first attempt of this run began with {} of {} (digest {}), which was replaced \
             since: expected the same checkpoint in every attempt; start the job again to begin with the new one",
            pinned.checkpoint, pinned.path, pinned.digest
        ))
    }
}

/// The refusal of a damaged checkpoint.
pub(super) fn unusable(from: &WarmStartPlan, reason: &str) -> RoleError {
    RoleError::Input(format!(
        "spec.checkpoint.from: {reason}. Expected a whole checkpoint: restore its files from a copy, or name another one \
         as spec.checkpoint.from={}@STEP (`rectrain checkpoint ls` lists them)",
        from.from.path
    ))
}

fn is_unfinished(listed: &Listed) -> bool {
    matches!(listed.state, ListedState::Unfinished)
}

/// A checkpoint that is being written, or whose job died meanwhile, is no fault.
fn is_fault(reason: &CheckpointError) -> bool {
    !matches!(reason, CheckpointError::Unfinished { .. })
}

/// The sentence about a step without a finished checkpoint.
fn no_such_step(path: &str, step: u64, listed: &[Listed]) -> String {
    if listed.iter().any(|listed| listed.step == step) {
        return format!("the checkpoint of step {step} in {path} was never finished");
    }
    let mut steps: Vec<u64> = listed.iter().filter(|listed| !is_unfinished(listed)).map(|listed| listed.step).collect();
    steps.dedup();
    let from = steps.len().saturating_sub(LISTED_STEPS);
    let texts: Vec<String> = steps[from..].iter().map(u64::to_string).collect();
    match texts.is_empty() {
        true => format!("{path} holds no finished checkpoint, and none of step {step}"),
        false => format!("{path} holds no checkpoint of step {step}; its newest steps are {}", texts.join(", ")),
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "an unwrap in a test is an assertion")]
mod tests {
    use rectrain_checkpoint::Kind;

    use super::*;

    fn listed(step: u64, state: ListedState) -> Listed {
        Listed { name: format!("step-{step}"), step, kind: Kind::Full, state }
    }

    fn refused() -> ListedState {
        ListedState::Refused(CheckpointError::Name { name: "x".to_owned() })
    }

    #[test]
    fn a_step_without_a_checkpoint_lists_the_ones_there() {
        let all = [listed(10, refused()), listed(20, refused()), listed(30, ListedState::Unfinished)];
        assert_eq!(no_such_step("ck", 7, &all), "ck holds no checkpoint of step 7; its newest steps are 10, 20");
        assert_eq!(no_such_step("ck", 30, &all), "the checkpoint of step 30 in ck was never finished");
        assert_eq!(no_such_step("ck", 7, &all[2..]), "ck holds no finished checkpoint, and none of step 7");
    }
}

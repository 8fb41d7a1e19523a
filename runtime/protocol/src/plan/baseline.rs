//! How the quality of predictions on training rows is watched, and the frozen model that predicts
//! the same rows (`spec.training.quality`).

use std::collections::BTreeMap;

use rectrain_checkpoint::{Checkpoint, Identity, ListedState, list};
use rectrain_crds::{RegressionRule, ResolvedQuality, WarmStart};
use rectrain_storage::Directory;
use serde_json::Value;

use crate::error::RoleError;

/// The manifest's field.
const FIELD: &str = "spec.training.quality.baseline.from";
/// The sections of an identity that say how cells become inputs.
const INPUTS: [&str; 3] = ["spec.features.label", "spec.features.sparse", "denseFeatures"];

/// How the quality of predictions on training rows is watched.
#[derive(Debug, Clone)]
pub struct QualityPlan {
    /// The number of the latest predictions that count.
    pub window_rows: u64,
    /// The frozen model; `None`: there is none.
    pub baseline: Option<BaselinePlan>,
    /// When the quality has fallen; `None`: that does not matter.
    pub on_regression: Option<RegressionRule>,
}

/// A frozen model.
#[derive(Debug, Clone)]
pub struct BaselinePlan {
    /// The path and the step of its checkpoint.
    pub from: WarmStart,
    /// Options of the object store.
    pub storage_options: BTreeMap<String, String>,
}

impl QualityPlan {
    pub(super) fn new(quality: &ResolvedQuality, storage_options: &BTreeMap<String, String>) -> Self {
        let plan = |from: &WarmStart| BaselinePlan { from: from.clone(), storage_options: storage_options.clone() };
        Self {
            window_rows: quality.window_rows,
            baseline: quality.baseline.as_ref().map(plan),
            on_regression: quality.on_regression,
        }
    }
}

impl BaselinePlan {
    /// Opens the checkpoint, and reads its manifests. `job` is the identity of the job: a model
    /// with other inputs could not predict its rows.
    ///
    /// # Errors
    /// [`RoleError::Input`] if there is no such checkpoint, or if its model has other inputs. Also
    /// errors of the storage.
    pub async fn open(&self, job: &Identity) -> Result<Checkpoint, RoleError> {
        let directory = Directory::open(&self.from.path, &self.storage_options, false);
        let directory = directory.map_err(|error| refused(&error.to_string()))?;
        let listed = list(&directory).await?;
        let is_it =
            |state: &ListedState, step| Some(step) == self.from.step && !matches!(state, ListedState::Unfinished);
        // Of one step, the full checkpoint comes last and needs no other one.
        let found = listed.iter().rev().find(|listed| is_it(&listed.state, listed.step));
        let Some(found) = found else {
            return Err(refused(&format!("there is no finished checkpoint {}", self.from)));
        };
        let checkpoint = Checkpoint::open(&directory, &found.name).await?;
        check_inputs(&checkpoint.manifest().identity, job)?;
        Ok(checkpoint)
    }
}

fn refused(reason: &str) -> RoleError {
    RoleError::Input(format!(
        "{FIELD}: {reason}: expected a checkpoint that exists, of a model with the features of this job (in a cluster, in \
         a bucket, or in a volume that coordinator and loader mount)"
    ))
}

/// Refuses a model whose inputs differ from the job's.
fn check_inputs(frozen: &Identity, job: &Identity) -> Result<(), RoleError> {
    let differs = INPUTS.into_iter().find(|section| frozen.section(section) != job.section(section));
    let differs = differs.or_else(|| (features(frozen) != features(job)).then_some("spec.features.sparse"));
    match differs {
        None => Ok(()),
        Some(section) => Err(refused(&format!("its model has other inputs than this job, as {section} tells"))),
    }
}

/// The names and tables of the sparse features, in their order.
fn features(identity: &Identity) -> Vec<(&Value, &Value)> {
    let features = identity.section("features").and_then(Value::as_array);
    features.into_iter().flatten().map(|feature| (&feature["name"], &feature["table"])).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plan::small_plan;

    #[test]
    fn a_model_with_other_inputs_is_refused() {
        let job = small_plan(&[]).identity();
        assert!(check_inputs(&job, &job).is_ok());
        let narrower = small_plan(&["spec.training.globalBatchSize=48", "spec.training.seed=9"]).identity();
        assert!(check_inputs(&narrower, &job).is_ok(), "only the inputs count");
        for section in ["spec.features.label", "spec.features.sparse", "denseFeatures", "features"] {
            let others = job.sections().clone().into_iter().filter(|(name, _)| name != section);
            let error = check_inputs(&Identity::new(others), &job).unwrap_err();
            assert!(error.is_user_error() && error.to_string().starts_with(FIELD), "{error}");
        }
    }

    #[tokio::test]
    async fn a_checkpoint_that_is_not_there_is_named() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().display().to_string();
        let from = WarmStart { path: path.clone(), step: Some(40) };
        let plan = BaselinePlan { from, storage_options: BTreeMap::new() };
        let error = plan.open(&small_plan(&[]).identity()).await.unwrap_err();
        assert!(error.is_user_error() && error.to_string().contains(&format!("checkpoint {path}@40")), "{error}");
    }
}

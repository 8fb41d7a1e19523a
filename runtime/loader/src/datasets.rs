//! The training data and the test data. Each is opened at its first use and then shared, so that a
//! reader knows the rows that earlier readers have counted.

use rectrain_data::{Dataset, SourceConfig};
use rectrain_protocol::blocking::blocking;
use rectrain_protocol::error::RoleError;
use rectrain_protocol::plan::JobPlan;
use tokio::sync::OnceCell;

/// See the module documentation.
#[derive(Default)]
pub(crate) struct Datasets {
    train: OnceCell<Dataset>,
    test: OnceCell<Dataset>,
}

impl Datasets {
    pub(crate) async fn train(&self, plan: &JobPlan) -> Result<Dataset, RoleError> {
        let dataset = self.train.get_or_try_init(|| open(plan, &plan.train)).await?;
        Ok(dataset.clone())
    }

    /// The test data.
    ///
    /// # Errors
    /// The plan has no test data, or a file belongs to both the training data and the test data.
    pub(crate) async fn test(&self, plan: &JobPlan) -> Result<Dataset, RoleError> {
        let dataset = self.test.get_or_try_init(|| self.open_test(plan)).await?;
        Ok(dataset.clone())
    }

    async fn open_test(&self, plan: &JobPlan) -> Result<Dataset, RoleError> {
        let test = plan.test.as_ref().ok_or_else(|| RoleError::Inconsistent {
            message: "evaluation_lease",
            reason: "the job has no test data".to_owned(),
        })?;
        if plan.follow().is_some() {
            // Each listing is compared with the test files.
            return open(plan, test).await;
        }
        let (train, test) = (self.train(plan).await?, open(plan, test).await?);
        Ok(blocking("comparison of the files", move || test.refuse_files_of(&train).map(|()| test)).await??)
    }
}

/// Opens the data. This reads headers and lists objects, so it may wait for disks and networks.
async fn open(plan: &JobPlan, source: &SourceConfig) -> Result<Dataset, RoleError> {
    let (source, schema) = (source.clone(), plan.schema.clone());
    Ok(blocking("opening of the data", move || Dataset::open(source, schema)).await??)
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    /// A plan that trains on the `.csv` files of `folder`, and tests on the files that `test` names
    /// there.
    fn plan(folder: &Path, test: &str) -> JobPlan {
        let folder = folder.display();
        let manifest = format!(
            "{{apiVersion: rectrain.dev/v1alpha1, kind: RecTrainingJob, metadata: {{name: t}}, spec: {{model: {{kind: lr}},
             features: {{sparse: [{{name: user}}]}},
             data: {{train: {{paths: ['{folder}/*.csv']}}, test: {{paths: ['{folder}/{test}']}}}}}}}}"
        );
        let manifest = rectrain_crds::load(&manifest, "t.yaml", &[]).unwrap();
        JobPlan::new(&manifest.resolved).unwrap()
    }

    #[tokio::test]
    async fn each_part_is_opened_once() {
        let folder = tempfile::tempdir().unwrap();
        std::fs::create_dir(folder.path().join("test")).unwrap();
        let files = ["train.csv", "test/test.csv"].map(|name| folder.path().join(name));
        files.iter().for_each(|file| std::fs::write(file, "label,user\n1,a\n0,b\n").unwrap());
        let (plan, datasets) = (plan(folder.path(), "test/test.csv"), Datasets::default());
        assert_eq!(datasets.test(&plan).await.unwrap().files().len(), 1);
        // Opening the data again would fail.
        files.iter().for_each(|file| std::fs::remove_file(file).unwrap());
        assert_eq!(datasets.train(&plan).await.unwrap().files().len(), 1);
        assert_eq!(datasets.test(&plan).await.unwrap().files().len(), 1);
    }

    #[tokio::test]
    async fn a_training_file_is_refused_as_test_data() {
        let folder = tempfile::tempdir().unwrap();
        for name in ["train.csv", "test.csv"] {
            std::fs::write(folder.path().join(name), "label,user\n1,a\n0,b\n").unwrap();
        }
        let plan = plan(folder.path(), "test.csv");
        let error = Datasets::default().test(&plan).await.unwrap_err();
        assert!(error.to_string().contains("test.csv is found by the training paths too"), "{error}");
    }
}

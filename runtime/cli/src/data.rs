//! `rectrain data`, and the data sets that a run gets for itself.

use std::path::Path;

use rectrain_data::{Dataset, Format};
use rectrain_datasets::movielens::{PreparedReport, find_or_download_movielens};
use rectrain_protocol::plan::JobPlan;

use crate::args::DataSet;
use crate::{Failure, show};

/// A folder of this name that a manifest points into is filled before the run if it is not there.
const MOVIELENS_100K: &str = "movielens-100k";

/// `rectrain data movielens-100k`
pub(crate) fn prepare(set: &DataSet) -> Result<(), Failure> {
    let DataSet::Movielens100k { output, from } = set;
    let report = movielens(from.as_deref(), output)?;
    println!(
        "{}: {} rows to train on, {} to test on, {} users, {} items{}",
        output.display(),
        report.train_rows,
        report.test_rows,
        report.users,
        report.items,
        if report.was_complete { " (was there already)" } else { "" }
    );
    Ok(())
}

/// Gets a known data set that the plan's paths point to and that is not there yet.
pub(crate) fn provide(plan: &JobPlan) -> Result<(), Failure> {
    let paths = plan.train.paths.iter().chain(plan.test.iter().flat_map(|test| &test.paths));
    for folder in paths.filter_map(|path| missing_movielens(path)) {
        show::say(&format!("getting MovieLens 100k into {}", folder.display()));
        movielens(None, folder)?;
    }
    Ok(())
}

/// The folder to get MovieLens 100k into, if `path` is a file of it on this machine. Files of the user's own in such a folder stay as they are.
fn missing_movielens(path: &str) -> Option<&Path> {
    const FILES: [&str; 2] = ["train.csv", "test.csv"];
    let file = Path::new(path);
    let folder = file.parent()?;
    let is_its =
        folder.file_name()? == MOVIELENS_100K && FILES.iter().any(|name| file.file_name().is_some_and(|f| f == *name));
    let is_missing = !path.contains("://") && FILES.iter().all(|name| !folder.join(name).exists());
    (is_its && is_missing).then_some(folder)
}

/// Synthetic clicks know the AUC of the teacher that drew them: no model can be expected to do better.
pub(crate) fn best_possible_auc(plan: &JobPlan) -> Result<Option<f64>, Failure> {
    let Some(test) = plan.test.as_ref().filter(|test| matches!(test.format, Format::Synthetic(_))) else {
        return Ok(None);
    };
    let test = Dataset::open(test.clone(), plan.schema.clone()).map_err(rectrain_protocol::RoleError::from)?;
    Ok(test.best_possible_auc())
}

fn movielens(from: Option<&Path>, output: &Path) -> Result<PreparedReport, Failure> {
    find_or_download_movielens(from, output).map_err(|error| {
        if error.is_users_input() { Failure::User(error.to_string()) } else { Failure::Failed(error.to_string()) }
    })
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "an unwrap in a test is an assertion")]
mod tests {
    use super::*;

    #[test]
    fn only_a_data_set_that_is_not_there_is_got() {
        let folder = tempfile::tempdir().unwrap();
        let own = folder.path().join(MOVIELENS_100K);
        let path = |name: &str| own.join(name).display().to_string();
        assert_eq!(missing_movielens(&path("train.csv")), Some(own.as_path()));
        assert_eq!(missing_movielens(&path("train*.csv")), None);
        assert_eq!(missing_movielens("s3://bucket/movielens-100k/train.csv"), None);
        assert_eq!(missing_movielens("elsewhere/train.csv"), None);
        std::fs::create_dir(&own).unwrap();
        std::fs::write(own.join("train.csv"), "the user's").unwrap();
        assert_eq!(missing_movielens(&path("test.csv")), None);
    }
}

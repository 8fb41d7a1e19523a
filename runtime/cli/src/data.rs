//! `rectrain data`, and the data sets that `rectrain run` downloads by itself.

use std::path::Path;

use rectrain_data::{Dataset, Format};
use rectrain_datasets::movielens::{PreparedReport, find_or_download_movielens};
use rectrain_protocol::plan::JobPlan;

use crate::args::DataCommand;
use crate::failure::Failure;
use crate::{output, placement, profile};

/// If a manifest's paths point into a folder of this name, a run fills the missing folder first.
const MOVIELENS_100K: &str = "movielens-100k";

pub(crate) fn run(command: &DataCommand) -> Result<(), Failure> {
    match command {
        DataCommand::Profile(args) => profile::run(args),
        DataCommand::Placement(args) => placement::run(args),
        DataCommand::Replay(args) => crate::replay::replay(args),
        DataCommand::Movielens100k { output, from } => prepare(output, from.as_deref()),
    }
}

/// `rectrain data movielens-100k`
fn prepare(folder: &Path, from: Option<&Path>) -> Result<(), Failure> {
    let report = movielens(from, folder)?;
    output::line(format_args!(
        "{}: {} rows to train on, {} to test on, {} users, {} items{}",
        folder.display(),
        report.train_rows,
        report.test_rows,
        report.users,
        report.items,
        if report.was_complete { " (already complete)" } else { "" }
    ))?;
    Ok(())
}

/// Prepares the known data sets that the plan's paths point to and that are missing.
pub(crate) fn provide(plan: &JobPlan) -> Result<(), Failure> {
    let paths = plan.train.paths.iter().chain(plan.test.iter().flat_map(|test| &test.paths));
    for folder in paths.filter_map(|path| missing_movielens(path)) {
        output::say(&format!("preparing MovieLens 100k in {}", folder.display()));
        movielens(None, folder)?;
    }
    Ok(())
}

/// The folder to fill with MovieLens 100k, if `path` is one of its files on this machine and none
/// of them exists. A folder with a file of the user's by one of these names stays unchanged.
fn missing_movielens(path: &str) -> Option<&Path> {
    const FILES: [&str; 2] = ["train.csv", "test.csv"];
    let file = Path::new(path);
    let folder = file.parent()?;
    let is_movielens =
        folder.file_name()? == MOVIELENS_100K && FILES.iter().any(|name| file.file_name().is_some_and(|f| f == *name));
    let is_missing = !path.contains("://") && FILES.iter().all(|name| !folder.join(name).exists());
    (is_movielens && is_missing).then_some(folder)
}

/// The best AUC that a model can be expected to reach on the test part. Only synthetic clicks have
/// one: the AUC of the teacher that drew them.
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
    fn only_a_missing_data_set_is_prepared() {
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

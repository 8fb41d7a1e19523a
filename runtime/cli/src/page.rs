//! `rectrain page`: the page of a job on this machine or in a cluster. While the coordinator of a
//! job in a cluster answers, a server on this machine forwards its page through the API server.
//! After the end the page is made of the record that the coordinator left beside the checkpoints.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use rectrain_coordinator::{MAX_PAGE_RECORD_BYTES, PAGE_RECORD, page_of_runs};
use rectrain_storage::Directory;
use serde_json::Value;

use crate::args::PageArgs;
use crate::checkpoint::store_options;
use crate::failure::Failure;
use crate::{browser, output, running};

/// The page of a job, or of the last job of a checkpoint path.
pub(crate) fn page(args: &PageArgs) -> Result<(), Failure> {
    let options = store_options(&args.options)?;
    crate::failure::runtime()?.block_on(async {
        if is_path(&args.job) {
            let page = kept(args, &args.job, &options).await.map_err(Failure::User)?;
            return tell_file(args, &page);
        }
        let is_of_a_cluster = args.namespace.is_some() || args.context.is_some();
        if let Some(page) = running::page(&args.job).filter(|_| !is_of_a_cluster) {
            return tell(args, &page);
        }
        in_a_cluster::page(args, options).await
    })
}

/// Prints the address of the page of a running job, and opens it if that is wanted.
fn tell(args: &PageArgs, page: &str) -> Result<(), Failure> {
    output::line(format_args!("the page of {}: {page}", args.job))?;
    if args.open {
        browser::open(page);
    }
    Ok(())
}

/// Prints the file of the page of an ended job, and opens it if that is wanted.
fn tell_file(args: &PageArgs, page: &Path) -> Result<(), Failure> {
    output::line(format_args!("the page: {}", page.display()))?;
    if args.open {
        browser::open(page);
    }
    Ok(())
}

/// Whether the argument is a checkpoint path. The name of a job has no slash.
fn is_path(job: &str) -> bool {
    job.contains('/')
}

/// Writes the page of the record in a checkpoint path. Returns its file.
///
/// # Errors
/// A sentence that says why there is no page.
async fn kept(args: &PageArgs, path: &str, options: &BTreeMap<String, String>) -> Result<PathBuf, String> {
    let record = read(path, options).await?;
    let page = args.output.clone().unwrap_or_else(|| file_of(&record));
    std::fs::write(&page, page_of_runs(&[record]))
        .map_err(|error| format!("{}: the page cannot be written: {error}", page.display()))?;
    Ok(page)
}

async fn read(path: &str, options: &BTreeMap<String, String>) -> Result<Value, String> {
    let directory = Directory::open(path, options, false).map_err(|error| error.to_string())?;
    let found = directory.read(PAGE_RECORD, MAX_PAGE_RECORD_BYTES).await.map_err(|error| error.to_string())?;
    let file = directory.name_of(PAGE_RECORD);
    let bytes =
        found.ok_or_else(|| format!("there is no {file}: the coordinator of a job writes it when the job ends"))?;
    let record: Value = serde_json::from_slice(&bytes).map_err(|error| format!("{file} cannot be read: {error}"))?;
    match record["name"].is_string() {
        true => Ok(record),
        false => Err(format!("{file} is no record of a job: it has no name")),
    }
}

/// `NAME.html` in the working folder. The name comes from a file, so it may not lead elsewhere.
fn file_of(record: &Value) -> PathBuf {
    let name = match Path::new(record["name"].as_str().unwrap_or_default()).file_name() {
        Some(name) => name.to_string_lossy(),
        None => "job".into(),
    };
    PathBuf::from(format!("{name}.html"))
}

#[cfg(feature = "cluster")]
mod in_a_cluster {
    use rectrain_client::{Cluster, CoordinatorAnswer};
    use rectrain_coordinator::forwarded_page;
    use rectrain_crds::{Phase, RecTrainingJob};
    use rectrain_member::http::serve_page;

    use super::{BTreeMap, Failure, PageArgs, PathBuf, kept, tell, tell_file};
    use crate::signal;

    /// The query of a page that has nothing yet.
    const ALL: &str = "after=0&points=0";

    pub(super) async fn page(args: &PageArgs, options: BTreeMap<String, String>) -> Result<(), Failure> {
        let cluster = Cluster::connect(args.context.clone(), args.namespace.clone()).await?;
        let name = &args.job;
        let job = cluster.job(name).await?;
        match cluster.coordinator_page(name, ALL).await? {
            CoordinatorAnswer::Page(_) => forward(args, cluster).await,
            CoordinatorAnswer::Silent(reason) => {
                let phase = job.status.as_ref().and_then(|status| status.phase);
                let phase = phase.map_or("not seen by an operator yet", Phase::name);
                let silent = format!("the coordinator of {name} does not answer ({reason}), and its phase is {phase}");
                let page = ended(args, &job, options).await;
                tell_file(args, &page.map_err(|problem| Failure::User(format!("{silent}: {problem}")))?)
            }
        }
    }

    /// Serves the page of a job with a coordinator, until a signal ends the command.
    async fn forward(args: &PageArgs, cluster: Cluster) -> Result<(), Failure> {
        let name = args.job.clone();
        let ask = move |query: String| {
            let (cluster, name) = (cluster.clone(), name.clone());
            async move {
                match cluster.coordinator_page(&name, &query).await {
                    Ok(CoordinatorAnswer::Page(job)) => Ok(job),
                    Ok(CoordinatorAnswer::Silent(reason)) => Err(reason),
                    Err(error) => Err(error.to_string()),
                }
            }
        };
        let interrupted = signal::interrupted();
        let (address, _serving) = serve_page(args.address, forwarded_page(ask))
            .await
            .map_err(|error| Failure::cannot_listen(error, "--address"))?;
        tell(args, &format!("http://{address}/"))?;
        interrupted.await;
        Ok(())
    }

    /// The file with the page of a job whose pods have ended.
    async fn ended(
        args: &PageArgs,
        job: &RecTrainingJob,
        options: BTreeMap<String, String>,
    ) -> Result<PathBuf, String> {
        let path = job.spec.checkpoint.as_ref().and_then(|checkpoint| checkpoint.path.as_deref());
        let path = path.ok_or("it sets no spec.checkpoint.path, so no page was kept")?;
        let of_job = job.spec.data.storage.clone().unwrap_or_default().options;
        let options = of_job.into_iter().chain(options).collect();
        let hint = "a path on a volume can be read where the volume is mounted only: `rectrain page ./FOLDER` there";
        let found = kept(args, path, &options).await;
        found.map_err(|problem| if path.contains("://") { problem } else { format!("{problem}; {hint}") })
    }
}

#[cfg(not(feature = "cluster"))]
mod in_a_cluster {
    use super::{BTreeMap, Failure, PageArgs};

    pub(super) async fn page(args: &PageArgs, _options: BTreeMap<String, String>) -> Result<(), Failure> {
        let job = &args.job;
        let message = format!("{job}: this build cannot reach a cluster: give the job's checkpoint path (`./{job}`)");
        Err(Failure::User(message))
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_page_is_named_after_its_job_and_stays_in_the_folder() {
        for (name, file) in [("clicks", "clicks.html"), ("../../etc/x", "x.html"), ("..", "job.html"), ("", "job.html")]
        {
            assert_eq!(file_of(&json!({ "name": name })), Path::new(file), "{name}");
        }
    }
}

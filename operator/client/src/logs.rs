//! The logs of a job's pods, one pod after the other, or all of a role followed at once.

use std::future::poll_fn;
use std::io::Write;
use std::pin::pin;

use futures::future::try_join_all;
use futures::{AsyncBufRead, StreamExt, TryStreamExt, stream};
use k8s_openapi::api::core::v1::Pod;
use kube::api::{Api, ListParams, LogParams};

use crate::{CONTAINER, ClientError, Cluster, JOB_LABEL, ROLE_LABEL, api_error};

/// Which logs.
#[derive(Clone, Debug, Default)]
pub struct LogRequest {
    /// Of this role's pods.
    pub role: String,
    /// Of this replica alone, from 0.
    pub index: Option<u32>,
    /// Go on as lines come.
    pub follow: bool,
    /// Of the container's run before this one.
    pub previous: bool,
    /// The last lines only.
    pub tail: Option<i64>,
}

/// Prints logs to standard output; with several pods each line begins with its pod's name.
///
/// # Errors
/// If the job has no such pods, or their logs cannot be read.
pub async fn logs(cluster: &Cluster, job: &str, request: &LogRequest) -> Result<(), ClientError> {
    let found = cluster.job(job).await?;
    let pods: Api<Pod> = Api::namespaced(cluster.client.clone(), &cluster.namespace);
    let selector = format!("{JOB_LABEL}={job},{ROLE_LABEL}={}", request.role);
    let list = pods.list(&ListParams::default().labels(&selector)).await;
    let list = list.map_err(|source| api_error(format!("list the pods of job {job}"), source))?;
    let mut names: Vec<String> = list.items.into_iter().filter_map(|pod| pod.metadata.name).collect();
    names.retain(|name| request.index.is_none_or(|index| name.ends_with(&format!("-{index}"))));
    names.sort();
    if names.is_empty() {
        let phase =
            found.status.and_then(|status| status.phase).map_or("unknown".to_owned(), |phase| format!("{phase:?}"));
        return Err(ClientError::NoPods { job: job.to_owned(), role: request.role.clone(), phase });
    }
    let is_alone = names.len() == 1;
    let each = names.iter().map(|name| print_if_any(&pods, name, request, (!is_alone).then_some(name.as_str())));
    let missing = if request.follow {
        try_join_all(each).await?
    } else {
        stream::iter(each).then(|pod| pod).try_collect().await?
    };
    let (some, mut none): (Vec<_>, Vec<_>) = missing.into_iter().partition(Option::is_none);
    match none.pop().flatten() {
        Some(error) if some.is_empty() => Err(error),
        _ => Ok(()),
    }
}

/// One that has no such logs, as it has not begun or was never started again, keeps nobody from the others': the error is given when all is done.
async fn print_if_any(
    pods: &Api<Pod>,
    name: &str,
    request: &LogRequest,
    prefix: Option<&str>,
) -> Result<Option<ClientError>, ClientError> {
    match print(pods, name, request, prefix).await {
        Err(error) if is_no_log(&error) => {
            if prefix.is_some() {
                writeln!(std::io::stderr(), "{error}")?;
            }
            Ok(Some(error))
        }
        printed => printed.map(|()| None),
    }
}

/// Whether the API server has no such logs, and may have another pod's.
fn is_no_log(error: &ClientError) -> bool {
    let ClientError::Api { source, .. } = error else { return false };
    matches!(&**source, kube::Error::Api(status) if matches!(status.code, 400 | 404))
}

fn parameters(request: &LogRequest) -> LogParams {
    LogParams {
        // A cluster may put others beside it, and then has to be told which.
        container: Some(CONTAINER.to_owned()),
        follow: request.follow,
        previous: request.previous,
        tail_lines: request.tail,
        ..LogParams::default()
    }
}

async fn print(pods: &Api<Pod>, name: &str, request: &LogRequest, prefix: Option<&str>) -> Result<(), ClientError> {
    let stream = pods.log_stream(name, &parameters(request)).await;
    let mut stream = pin!(stream.map_err(|source| api_error(format!("read the logs of {name}"), source))?);
    let mut rest = Vec::new();
    loop {
        let more = poll_fn(|context| stream.as_mut().poll_fill_buf(context).map_ok(<[u8]>::to_vec)).await?;
        if more.is_empty() {
            break;
        }
        stream.as_mut().consume(more.len());
        rest.extend_from_slice(&more);
        write_lines(&mut rest, prefix)?;
    }
    if !rest.is_empty() {
        rest.push(b'\n');
    }
    write_lines(&mut rest, prefix)
}

/// Writes the whole lines of `text` and leaves what follows the last of them.
fn write_lines(text: &mut Vec<u8>, prefix: Option<&str>) -> Result<(), ClientError> {
    let Some(end) = text.iter().rposition(|byte| *byte == b'\n') else { return Ok(()) };
    let rest = text.split_off(end + 1);
    let mut output = std::io::stdout().lock();
    for line in text.split_inclusive(|byte| *byte == b'\n') {
        if let Some(prefix) = prefix {
            write!(output, "{prefix} ")?;
        }
        output.write_all(line)?;
    }
    output.flush()?;
    *text = rest;
    Ok(())
}

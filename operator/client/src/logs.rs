//! The logs of a job's pods: one pod after another, or all pods of a role followed at once.

use std::future::poll_fn;
use std::io::Write;
use std::pin::pin;

use futures::future::try_join_all;
use futures::{AsyncBufRead, StreamExt, TryStreamExt, stream};
use k8s_openapi::api::core::v1::Pod;
use kube::api::{Api, ListParams, LogParams};

use crate::{CONTAINER, ClientError, Cluster, JOB_LABEL, ROLE_LABEL, api_error};

/// The logs to print.
#[derive(Clone, Debug, Default)]
pub struct LogRequest {
    /// The role of the pods.
    pub role: String,
    /// Only this replica, from 0.
    pub index: Option<u32>,
    /// Follow the logs as they grow.
    pub follow: bool,
    /// The logs of the container's previous run.
    pub previous: bool,
    /// Only this many lines, the last.
    pub tail: Option<i64>,
}

/// Prints logs to standard output. With several pods, each line starts with its pod's name.
///
/// # Errors
/// If the job has no such pods, if none of them has such logs, or if the output fails.
pub async fn logs(cluster: &Cluster, job: &str, request: &LogRequest) -> Result<(), ClientError> {
    let found = cluster.job(job).await?;
    let pods: Api<Pod> = Api::namespaced(cluster.client.clone(), &cluster.namespace);
    let names = pod_names(&pods, job, request).await?;
    if names.is_empty() {
        let phase = found.status.and_then(|status| status.phase);
        let phase = phase.map_or("unknown".to_owned(), |phase| format!("{phase:?}"));
        return Err(ClientError::NoPods { job: job.to_owned(), role: request.role.clone(), phase });
    }
    let has_prefix = names.len() > 1;
    let each = names.iter().map(|name| print_if_any(&pods, name, request, has_prefix.then_some(name.as_str())));
    let outcomes: Vec<Option<ClientError>> = if request.follow {
        try_join_all(each).await?
    } else {
        stream::iter(each).then(|pod| pod).try_collect().await?
    };
    let (printed, mut missing): (Vec<_>, Vec<_>) = outcomes.into_iter().partition(Option::is_none);
    match missing.pop().flatten() {
        Some(error) if printed.is_empty() => Err(error),
        _ => Ok(()),
    }
}

/// The names of the pods whose logs are requested, sorted.
async fn pod_names(pods: &Api<Pod>, job: &str, request: &LogRequest) -> Result<Vec<String>, ClientError> {
    let selector = format!("{JOB_LABEL}={job},{ROLE_LABEL}={}", request.role);
    let list = pods.list(&ListParams::default().labels(&selector)).await;
    let list = list.map_err(|source| api_error(format!("list the pods of job {job}"), source))?;
    let mut names: Vec<String> = list.items.into_iter().filter_map(|pod| pod.metadata.name).collect();
    names.retain(|name| request.index.is_none_or(|index| name.ends_with(&format!("-{index}"))));
    names.sort();
    Ok(names)
}

/// Prints a pod's logs. Returns the error of a pod without such logs instead of failing with it:
/// the caller still prints the other pods' logs.
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

/// Whether this pod has no such logs. It may not have started yet, or have no previous run.
fn is_no_log(error: &ClientError) -> bool {
    let ClientError::Api { source, .. } = error else { return false };
    matches!(&**source, kube::Error::Api(status) if matches!(status.code, 400 | 404))
}

fn parameters(request: &LogRequest) -> LogParams {
    LogParams {
        // A pod with several containers needs a name: a cluster may inject sidecars.
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

/// Writes the complete lines of `text` and leaves the rest in it.
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

//! `rectrain status` and `rectrain logs`. A job on this machine, or at the address of a
//! coordinator, comes before a job in a cluster.

use std::io::ErrorKind;
use std::time::Duration;

use rectrain_crds::{QualityStatus, WindowStatus};
use rectrain_kinds::Role;
use rectrain_proto::v1;
use rectrain_proto::v1::control_client::ControlClient;
use tokio::time::timeout;
use tonic::transport::Channel;

use crate::args::{LogsArgs, RunningJob};
use crate::failure::Failure;
use crate::human::{bytes, list, number, rate, thousands};
use crate::mode::{lost, neither};
use crate::sentences::sentence_of_json;
use crate::{output, running};

/// The old events of a job arrive at once: after this time without one, there are no more.
const NO_MORE: Duration = Duration::from_millis(100);
/// The first old event may take longer.
const FIRST: Duration = Duration::from_secs(2);

/// `rectrain status`
pub(crate) fn status(job: &RunningJob) -> Result<(), Failure> {
    crate::failure::runtime()?.block_on(async {
        let Some(mut client) = found_here(job).await? else {
            return in_a_cluster::status(job).await.map_err(|failure| neither(job, failure));
        };
        let status = client.get_status(v1::StatusRequest {}).await.map_err(|status| lost(&job.job, &status))?;
        Ok(output::line(shown(&job.job, &status.into_inner()))?)
    })
}

/// `rectrain logs`
pub(crate) fn logs(args: &LogsArgs) -> Result<(), Failure> {
    let job = &args.job;
    crate::failure::runtime()?.block_on(async {
        let Some(client) = found_here(job).await? else {
            return in_a_cluster::logs(args).await.map_err(|failure| neither(job, failure));
        };
        if args.role != Role::Coordinator.name() || args.previous || args.index.is_some_and(|index| index > 0) {
            return Err(Failure::User(format!(
                "{} runs on this machine, and only its coordinator keeps events: leave out --role, --index and \
                 --previous; start the job with RECTRAIN_LOG=info to see the logs of all its roles",
                job.job
            )));
        }
        events(client, args).await
    })
}

/// The control interface of a job on this machine. A namespace or a context means a cluster.
async fn found_here(job: &RunningJob) -> Result<Option<ControlClient<Channel>>, Failure> {
    if job.namespace.is_some() || job.context.is_some() {
        return Ok(None);
    }
    running::connect(&job.job).await
}

async fn events(mut client: ControlClient<Channel>, args: &LogsArgs) -> Result<(), Failure> {
    let job = &args.job.job;
    let newest = args.tail.map_or(0, |tail| u32::try_from(tail).unwrap_or(u32::MAX));
    let request = v1::WatchRequest { after: 0, newest };
    let mut events = client.watch(request).await.map_err(|status| lost(job, &status))?.into_inner();
    let mut printed = 0;
    loop {
        if !args.follow && args.tail == Some(printed) {
            return Ok(());
        }
        let patience = match (args.follow, printed) {
            (true, _) => Duration::MAX,
            (false, 0) => FIRST,
            (false, _) => NO_MORE,
        };
        let Ok(next) = timeout(patience, events.message()).await else { return Ok(()) };
        let Some(event) = next.map_err(|status| lost(job, &status))? else { return Ok(()) };
        match output::write(sentence_of_json(&event.json) + "\n") {
            // The reader has seen enough.
            Err(error) if error.kind() == ErrorKind::BrokenPipe => return Ok(()),
            written => written.map_err(output::OutputError::from)?,
        }
        printed += 1;
    }
}

fn shown(name: &str, status: &v1::JobStatus) -> String {
    let total = if status.total_steps > 0 { format!(" of {}", thousands(status.total_steps)) } else { String::new() };
    let mut rows = vec![
        ("mode", status.mode.clone()),
        ("step", format!("{}{total}", thousands(status.step))),
        ("samples", thousands(status.samples)),
        ("samples/s", rate(status.samples_per_second)),
        ("loss", format!("{:.4}", status.loss)),
        ("AUC", number(status.auc, 4)),
        ("members", members(status)),
    ];
    rows.extend(new_rows(status).map(|quality| ("new rows", quality)));
    rows.extend(tables(status).map(|tables| ("tables", tables)));
    if !status.last_checkpoint.is_empty() {
        rows.push(("checkpoint", status.last_checkpoint.clone()));
    }
    if !status.missing.is_empty() {
        rows.push(("not joined", status.missing.join(", ")));
    }
    let rows: Vec<(String, String)> = rows.into_iter().map(|(name, value)| (format!("  {name}"), value)).collect();
    let message = if status.message.is_empty() { String::new() } else { format!("\n\n{}", status.message) };
    format!("{name}: {}\n{}{message}", phase(status.phase()), list(&rows))
}

/// The quality on rows before they were learned, beside the frozen model's.
fn new_rows(status: &v1::JobStatus) -> Option<String> {
    let quality = status.quality.as_ref()?;
    let window = |of: &v1::WindowQuality| WindowStatus { auc: of.auc, rows: of.rows, ..WindowStatus::default() };
    let quality = QualityStatus {
        window: quality.window.as_ref().map(window).unwrap_or_default(),
        baseline: quality.baseline.as_ref().map(window),
        has_fallen: quality.has_fallen,
        is_held: quality.is_held,
    };
    quality.text()
}

/// The size of the tables, and their budget if they have one.
fn tables(status: &v1::JobStatus) -> Option<String> {
    let v1::TableSize { rows, bytes: size } = status.tables?;
    let budget = status.budget.unwrap_or_default();
    let of = |limit: u64, shown: fn(u64) -> String| match limit {
        0 => String::new(),
        limit => format!(" of {}", shown(limit)),
    };
    Some(format!("{}{} rows, {}{}", thousands(rows), of(budget.rows, thousands), bytes(size), of(budget.bytes, bytes)))
}

fn members(status: &v1::JobStatus) -> String {
    let each = status.replicas.iter().map(|replicas| {
        let role = rectrain_proto::member_role(replicas.role()).map_or("?", Role::name);
        format!("{role} {}/{}", replicas.present, replicas.wanted)
    });
    each.collect::<Vec<_>>().join(", ")
}

fn phase(phase: v1::Phase) -> &'static str {
    match phase {
        v1::Phase::Unspecified => "unknown",
        v1::Phase::Starting => "Starting",
        v1::Phase::Training => "Training",
        v1::Phase::Evaluating => "Evaluating",
        v1::Phase::Complete => "Complete",
        v1::Phase::Failed => "Failed",
    }
}

#[cfg(feature = "cluster")]
mod in_a_cluster {
    pub(super) use crate::cluster::{logs, status};
}

#[cfg(not(feature = "cluster"))]
mod in_a_cluster {
    use super::{Failure, LogsArgs, RunningJob};
    use crate::mode::not_here;

    pub(super) async fn status(job: &RunningJob) -> Result<(), Failure> {
        Err(Failure::User(not_here(job)))
    }

    pub(super) async fn logs(args: &LogsArgs) -> Result<(), Failure> {
        Err(Failure::User(not_here(&args.job)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_status_names_phase_step_and_members() {
        let replicas =
            vec![v1::RoleReplicas { role: v1::Role::from(Role::Ps).into(), present: 1, wanted: 2, needed: 2 }];
        let status = v1::JobStatus {
            phase: v1::Phase::Training.into(),
            mode: "sync".to_owned(),
            step: 1200,
            total_steps: 9000,
            replicas,
            ..v1::JobStatus::default()
        };
        let text = shown("clicks", &status);
        assert!(text.starts_with("clicks: Training\n"), "{text}");
        assert!(text.contains("1,200 of 9,000") && text.contains("ps 1/2") && !text.contains("tables"), "{text}");
    }

    #[test]
    fn a_status_has_the_quality_on_new_rows() {
        let of = |auc| Some(v1::WindowQuality { auc: Some(auc), rows: 9, ..v1::WindowQuality::default() });
        let quality = v1::Quality { window: of(0.7), ..v1::Quality::default() };
        let shown = |quality| new_rows(&v1::JobStatus { quality: Some(quality), ..v1::JobStatus::default() });
        assert_eq!(shown(v1::Quality::default()), None);
        // A replaced coordinator has seen no prediction.
        let replaced = v1::Quality { is_held: true, ..v1::Quality::default() };
        assert_eq!(shown(replaced).as_deref(), Some("the quality has fallen, and training waits"));
        assert_eq!(shown(quality).as_deref(), Some("AUC 0.7000"));
        let held = v1::Quality { baseline: of(0.65), has_fallen: true, is_held: true, window: of(0.7) };
        assert_eq!(shown(held).as_deref(), Some("AUC 0.7000, frozen 0.6500; it has fallen, and training waits"));
    }

    #[test]
    fn a_status_has_the_tables_and_their_budget() {
        let size = v1::TableSize { rows: 81_234, bytes: 45_467_048 };
        let shown = |budget| tables(&v1::JobStatus { tables: Some(size), budget, ..v1::JobStatus::default() });
        assert_eq!(shown(None).as_deref(), Some("81,234 rows, 45.5 MB"));
        let budget = |rows, bytes| Some(v1::TableBudget { rows, bytes });
        assert_eq!(shown(budget(100_000, 0)).as_deref(), Some("81,234 of 100,000 rows, 45.5 MB"));
        assert_eq!(shown(budget(0, 60_000_000)).as_deref(), Some("81,234 rows, 45.5 MB of 60.0 MB"));
    }
}

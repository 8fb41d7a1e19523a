//! Requests to coordinators (`proto/rectrain/v1/control.proto`): the state of a job, another
//! training mode, other members, a checkpoint.
//!
//! Each request has a short connection of its own, so a coordinator holds nothing for the operator.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::time::Duration;

use futures::future::BoxFuture;
use jiff::Timestamp;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use rectrain_crds::{
    BudgetStatus, CheckpointStatus, JobSummary, MOST_UNSEEN_FEATURES, Mode, QualityStatus, Role, StreamStatus,
    TableSummary, UnseenShares, WindowStatus, highest_unseen,
};
use rectrain_proto::v1::control_client::ControlClient;
use rectrain_proto::{member_role, v1};
use serde::Deserialize;
use tonic::Code;
use tonic::transport::{Certificate, Channel, ClientTlsConfig, Endpoint, Identity};

use crate::certificates::{JobCertificate, MEMBER_NAME};
use crate::coordinator_view::{
    CoordinatorView, Members, NoStep, Rebalance, Report, SlowMember, Stage, SwitchAnswer, Tables,
};

/// Deadline of a request.
const DEADLINE: Duration = Duration::from_secs(3);
/// Deadline of a connection, within [`DEADLINE`].
const CONNECT_DEADLINE: Duration = Duration::from_secs(1);
/// Events to fetch for the last one: all events of a job that trained for months take longer than
/// [`DEADLINE`].
const NEWEST_EVENTS: u32 = 8;

/// The address of a coordinator, and the certificate to show it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CoordinatorEndpoint {
    /// Its control port.
    pub address: SocketAddr,
    /// The certificate of its job; `None` if it accepts every caller.
    pub certificate: Option<JobCertificate>,
}

/// A client of coordinators.
pub trait CoordinatorClient: Send + Sync {
    /// Asks for the state of the job. No answer is [`CoordinatorView::Silent`].
    fn view<'a>(&'a self, coordinator: &'a CoordinatorEndpoint) -> BoxFuture<'a, CoordinatorView>;

    /// Asks for a switch to `mode`. The job's events carry `reason`, which may be empty. A request
    /// for the mode in use changes nothing.
    fn set_mode<'a>(
        &'a self,
        coordinator: &'a CoordinatorEndpoint,
        mode: Mode,
        reason: &'a str,
    ) -> BoxFuture<'a, SwitchAnswer>;

    /// Asks for `replicas` members of a role. The next report shows whether the coordinator
    /// accepted.
    fn scale<'a>(
        &'a self,
        coordinator: &'a CoordinatorEndpoint,
        role: Role,
        replicas: u32,
        reason: &'a str,
    ) -> BoxFuture<'a, Result<(), RequestError>>;

    /// Asks for a rebalance. The next report shows whether the coordinator accepted.
    fn rebalance<'a>(
        &'a self,
        coordinator: &'a CoordinatorEndpoint,
        rebalance: Rebalance,
        reason: &'a str,
    ) -> BoxFuture<'a, Result<(), RequestError>>;

    /// Asks for another memory budget of the tables. The next report shows whether the coordinator
    /// accepted.
    fn set_budget<'a>(
        &'a self,
        coordinator: &'a CoordinatorEndpoint,
        budget: BudgetStatus,
    ) -> BoxFuture<'a, Result<(), RequestError>>;

    /// Asks for a checkpoint at the next step boundary and waits, without a deadline, until it
    /// exists. Returns its name.
    fn save<'a>(&'a self, coordinator: &'a CoordinatorEndpoint) -> BoxFuture<'a, Result<String, RequestError>>;
}

/// Why a request had no success.
#[derive(Debug, thiserror::Error)]
pub enum RequestError {
    /// No connection.
    #[error("cannot connect to the coordinator: {0}")]
    Connect(#[from] tonic::transport::Error),
    /// The coordinator refused.
    #[error("the coordinator refused: {0}")]
    Refused(Box<tonic::Status>),
    /// No answer within the deadline.
    #[error("the coordinator did not answer within {0:?}")]
    Deadline(Duration),
    /// An event that this version cannot read.
    #[error("cannot read the coordinator's last event: {0}")]
    Event(#[from] serde_json::Error),
    /// The stream of events ended early.
    #[error("the coordinator's events end without a summary or a failure")]
    NoLastEvent,
}

impl From<tonic::Status> for RequestError {
    fn from(status: tonic::Status) -> Self {
        Self::Refused(Box::new(status))
    }
}

/// A client over gRPC.
#[derive(Clone, Copy, Debug, Default)]
pub struct GrpcCoordinatorClient;

impl CoordinatorClient for GrpcCoordinatorClient {
    fn view<'a>(&'a self, coordinator: &'a CoordinatorEndpoint) -> BoxFuture<'a, CoordinatorView> {
        Box::pin(async move {
            within_deadline(view(coordinator)).await.unwrap_or_else(|error| {
                tracing::debug!(address = %coordinator.address, %error, "the coordinator does not answer");
                CoordinatorView::Silent
            })
        })
    }

    fn set_mode<'a>(
        &'a self,
        coordinator: &'a CoordinatorEndpoint,
        mode: Mode,
        reason: &'a str,
    ) -> BoxFuture<'a, SwitchAnswer> {
        let request = v1::SetModeRequest { mode: mode.name().to_owned(), reason: reason.to_owned() };
        Box::pin(async move {
            let set_mode = async {
                connect(coordinator).await?.set_mode(request).await?;
                Ok::<_, RequestError>(())
            };
            within_deadline(set_mode).await.map_or_else(switch_refused, |()| SwitchAnswer::Accepted)
        })
    }

    fn scale<'a>(
        &'a self,
        coordinator: &'a CoordinatorEndpoint,
        role: Role,
        replicas: u32,
        reason: &'a str,
    ) -> BoxFuture<'a, Result<(), RequestError>> {
        let (role, reason) = (v1::Role::from(role).into(), reason.to_owned());
        Box::pin(scale(coordinator, v1::ScaleRequest { role, replicas, reason, decided_seconds: None }))
    }

    fn rebalance<'a>(
        &'a self,
        coordinator: &'a CoordinatorEndpoint,
        rebalance: Rebalance,
        reason: &'a str,
    ) -> BoxFuture<'a, Result<(), RequestError>> {
        let request = v1::ScaleRequest {
            role: v1::Role::from(Role::Ps).into(),
            replicas: rebalance.servers,
            reason: reason.to_owned(),
            decided_seconds: Some(rebalance.decided_seconds),
        };
        Box::pin(scale(coordinator, request))
    }

    fn set_budget<'a>(
        &'a self,
        coordinator: &'a CoordinatorEndpoint,
        budget: BudgetStatus,
    ) -> BoxFuture<'a, Result<(), RequestError>> {
        let BudgetStatus { max_rows, max_bytes } = budget;
        let budget = v1::TableBudget { rows: max_rows.unwrap_or(0), bytes: max_bytes.unwrap_or(0) };
        Box::pin(within_deadline(async move {
            connect(coordinator).await?.set_budget(v1::SetBudgetRequest { budget: Some(budget) }).await?;
            Ok(())
        }))
    }

    fn save<'a>(&'a self, coordinator: &'a CoordinatorEndpoint) -> BoxFuture<'a, Result<String, RequestError>> {
        Box::pin(async move {
            let mut client = connect(coordinator).await?;
            Ok(client.save_checkpoint(v1::SaveCheckpointRequest {}).await?.into_inner().checkpoint)
        })
    }
}

async fn within_deadline<T>(request: impl Future<Output = Result<T, RequestError>>) -> Result<T, RequestError> {
    tokio::time::timeout(DEADLINE, request).await.unwrap_or(Err(RequestError::Deadline(DEADLINE)))
}

async fn scale(coordinator: &CoordinatorEndpoint, request: v1::ScaleRequest) -> Result<(), RequestError> {
    let scale = async {
        connect(coordinator).await?.scale(request).await?;
        Ok::<_, RequestError>(())
    };
    within_deadline(scale).await
}

async fn connect(coordinator: &CoordinatorEndpoint) -> Result<ControlClient<Channel>, RequestError> {
    let CoordinatorEndpoint { address, certificate } = coordinator;
    let endpoint = match certificate {
        Some(certificate) => Endpoint::from_shared(format!("https://{address}"))?.tls_config(tls(certificate))?,
        None => Endpoint::from_shared(format!("http://{address}"))?,
    };
    Ok(ControlClient::new(endpoint.connect_timeout(CONNECT_DEADLINE).connect().await?))
}

fn tls(certificate: &JobCertificate) -> ClientTlsConfig {
    ClientTlsConfig::new()
        .ca_certificate(Certificate::from_pem(&certificate.authority))
        .identity(Identity::from_pem(&certificate.certificate, &certificate.key))
        .domain_name(MEMBER_NAME)
}

/// Only INVALID_ARGUMENT is final: the job cannot train in the mode. After every other error the
/// operator asks again.
fn switch_refused(error: RequestError) -> SwitchAnswer {
    match error {
        RequestError::Refused(status) if status.code() == Code::InvalidArgument => {
            SwitchAnswer::Refused(status.message().to_owned())
        }
        other => SwitchAnswer::Again(other.to_string()),
    }
}

async fn view(coordinator: &CoordinatorEndpoint) -> Result<CoordinatorView, RequestError> {
    let mut client = connect(coordinator).await?;
    let status = client.get_status(v1::StatusRequest {}).await?.into_inner();
    match status.phase() {
        v1::Phase::Complete | v1::Phase::Failed => ending(&mut client, last_checkpoint(&status)).await,
        _ => Ok(CoordinatorView::Live(report(&status))),
    }
}

fn report(status: &v1::JobStatus) -> Report {
    let stage = match status.phase() {
        v1::Phase::Training => Stage::Training,
        v1::Phase::Evaluating => Stage::Evaluating,
        _ => Stage::Starting,
    };
    Report {
        stage,
        mode: serde_json::from_value(status.mode.clone().into()).ok(),
        step: status.step,
        total_steps: (status.total_steps > 0).then_some(status.total_steps),
        samples_per_second: status.samples_per_second,
        loss: status.loss,
        auc: status.auc,
        unseen: status.unseen.clone().into_iter().collect(),
        last_checkpoint: last_checkpoint(status),
        members: members(status),
        missing: status.missing.clone(),
        idle_seconds: status.idle_seconds,
        recovered: status.recovered,
        slots_decided_seconds: status.slots_decided_seconds,
        slowest: status.slowest.as_ref().and_then(slow_member).map(Box::new),
        no_step: status.no_step.as_ref().map(no_step).map(Box::new),
        tables: Box::new(tables(status)),
        stream: status.stream.as_ref().map(|lag| Box::new(stream(lag))),
        quality: status.quality.as_ref().and_then(quality).map(Box::new),
    }
}

fn stream(lag: &v1::StreamLag) -> StreamStatus {
    let event_time = lag.event_time.and_then(|seconds| Timestamp::from_second(seconds as i64).ok());
    StreamStatus {
        lag_rows: lag.rows,
        lag_seconds: lag.seconds.max(0.0).round() as u64,
        event_time: event_time.map(Time),
        lost_records: lag.lost_records,
        partitions: Some(lag.partitions).filter(|partitions| *partitions > 0),
    }
}

/// `None` before the first prediction, unless training is held: a replaced coordinator has seen no
/// prediction, and holds it all the same.
fn quality(reported: &v1::Quality) -> Option<QualityStatus> {
    let window = |of: &v1::WindowQuality| {
        let rounded = |value: Option<f64>| value.map(|value| (value * 1e4).round() / 1e4);
        WindowStatus {
            auc: rounded(of.auc),
            normalized_entropy: rounded(of.normalized_entropy),
            calibration: rounded(of.calibration),
            rows: of.rows,
        }
    };
    let latest = reported.window.as_ref().map(window);
    (latest.is_some() || reported.is_held).then(|| QualityStatus {
        window: latest.unwrap_or_default(),
        baseline: reported.baseline.as_ref().map(window),
        has_fallen: reported.has_fallen,
        is_held: reported.is_held,
    })
}

fn tables(status: &v1::JobStatus) -> Tables {
    let size = status.tables.map(|v1::TableSize { rows, bytes }| (rows, bytes));
    Tables { budget: status.budget.map(budget), size }
}

fn budget(v1::TableBudget { rows, bytes }: v1::TableBudget) -> BudgetStatus {
    BudgetStatus { max_rows: (rows > 0).then_some(rows), max_bytes: (bytes > 0).then_some(bytes) }
}

fn slow_member(slowest: &v1::Slowest) -> Option<SlowMember> {
    let role = member_role(slowest.role())?;
    Some(SlowMember { role, index: slowest.index, share: slowest.share, since_seconds: slowest.since_seconds })
}

fn no_step(no_step: &v1::NoStep) -> NoStep {
    let member = |member: &v1::Member| Some((member_role(member.role())?, member.index));
    NoStep { seconds: no_step.seconds, waits_for: no_step.waits_for.as_ref().and_then(member) }
}

fn last_checkpoint(status: &v1::JobStatus) -> Option<CheckpointStatus> {
    let (name, step) = (&status.last_checkpoint, status.last_checkpoint_step);
    (!name.is_empty()).then(|| CheckpointStatus { name: name.clone(), step })
}

/// The members of each reported role.
fn members(status: &v1::JobStatus) -> BTreeMap<Role, Members> {
    let members = |reported: &v1::RoleReplicas| {
        let &v1::RoleReplicas { present, wanted, needed, .. } = reported;
        (present > 0 && wanted > 0 && needed > 0).then_some(Members { present, wanted, needed })
    };
    status.replicas.iter().filter_map(|reported| Some((member_role(reported.role())?, members(reported)?))).collect()
}

/// Events that end a job, as `rectrain run --json` prints them; all others are skipped.
#[derive(Debug, Deserialize)]
#[serde(tag = "event", rename_all = "camelCase", rename_all_fields = "camelCase")]
enum LastEvent {
    Summary(Box<Summary>),
    Failed {
        message: String,
        user_error: bool,
        /// The figures, which the message has too.
        #[serde(default)]
        divergence: Option<serde::de::IgnoredAny>,
    },
    #[serde(other)]
    Other,
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Summary {
    test: Option<Test>,
    steps: u64,
    trained_rows: u64,
    seconds: f64,
    samples_per_second: f64,
    rows: u64,
    table: Option<TableSummary>,
    #[serde(default)]
    skipped_rows: u64,
    parameters_sha256: String,
}

#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Test {
    auc: Option<f64>,
    gauc: Option<f64>,
    rows_without_group: Option<u64>,
    log_loss: Option<f64>,
    normalized_entropy: Option<f64>,
    calibration: Option<f64>,
    #[serde(default)]
    unseen: UnseenShares,
}

async fn ending(
    client: &mut ControlClient<Channel>,
    last_checkpoint: Option<CheckpointStatus>,
) -> Result<CoordinatorView, RequestError> {
    let newest = v1::WatchRequest { newest: NEWEST_EVENTS, ..v1::WatchRequest::default() };
    let mut events = client.watch(newest).await?.into_inner();
    while let Some(event) = events.message().await? {
        if let Some(view) = end(serde_json::from_str(&event.json)?, last_checkpoint.as_ref()) {
            return Ok(view);
        }
    }
    Err(RequestError::NoLastEvent)
}

/// The end that an event reports, if it reports one.
fn end(event: LastEvent, last_checkpoint: Option<&CheckpointStatus>) -> Option<CoordinatorView> {
    match event {
        LastEvent::Summary(summary) => Some(CoordinatorView::Complete {
            summary: Box::new(job_summary(*summary)),
            last_checkpoint: last_checkpoint.cloned(),
        }),
        LastEvent::Failed { message, user_error: false, divergence: Some(_) } => {
            Some(CoordinatorView::Diverged { message })
        }
        LastEvent::Failed { message, user_error, .. } => Some(CoordinatorView::Failed { message, user_error }),
        LastEvent::Other => None,
    }
}

fn job_summary(summary: Summary) -> JobSummary {
    let test = summary.test.unwrap_or_default();
    JobSummary {
        auc: test.auc,
        gauc: test.gauc,
        rows_without_group: test.rows_without_group,
        log_loss: test.log_loss,
        normalized_entropy: test.normalized_entropy,
        calibration: test.calibration,
        unseen: highest_unseen(&test.unseen, MOST_UNSEEN_FEATURES),
        steps: summary.steps,
        samples: summary.trained_rows,
        seconds: summary.seconds,
        samples_per_second: summary.samples_per_second,
        rows: summary.rows,
        table: summary.table,
        skipped_rows: summary.skipped_rows,
        parameters_sha256: summary.parameters_sha256,
    }
}

#[cfg(test)]
mod tests {
    use rectrain_crds::TablesStatus;

    use super::*;

    #[test]
    fn only_an_invalid_mode_is_refused_for_good() {
        let refused = |code| switch_refused(tonic::Status::new(code, "why").into());
        assert_eq!(refused(Code::InvalidArgument), SwitchAnswer::Refused("why".to_owned()));
        for code in [Code::FailedPrecondition, Code::Unavailable, Code::Unimplemented, Code::Cancelled] {
            assert!(matches!(refused(code), SwitchAnswer::Again(_)), "{code}");
        }
    }

    #[test]
    fn a_report_has_the_size_of_the_tables_once_the_coordinator_knows_it() {
        let budget = Some(v1::TableBudget { rows: 0, bytes: 900 });
        let reported = |tables| report(&v1::JobStatus { tables, budget, ..v1::JobStatus::default() }).tables;
        let budget = Some(BudgetStatus { max_rows: None, max_bytes: Some(900) });
        let known = reported(Some(v1::TableSize { rows: 5, bytes: 700 }));
        assert_eq!(known.status(), Some(TablesStatus { rows: 5, bytes: 700, budget }));
        let unknown = reported(None);
        assert_eq!((unknown.status(), unknown.budget), (None, budget));
    }

    #[test]
    fn a_report_has_the_quality_after_the_first_prediction() {
        let reported = |quality| report(&v1::JobStatus { quality: Some(quality), ..v1::JobStatus::default() }).quality;
        assert_eq!(reported(v1::Quality::default()), None);
        let held = reported(v1::Quality { is_held: true, ..v1::Quality::default() });
        assert_eq!(held.as_deref(), Some(&QualityStatus { is_held: true, ..QualityStatus::default() }));
        let window = |auc| Some(v1::WindowQuality { auc: Some(auc), rows: 9, ..v1::WindowQuality::default() });
        let (window, baseline) = (window(0.712_345), window(0.6));
        let found = reported(v1::Quality { window, baseline, has_fallen: true, is_held: true });
        let status = |auc| WindowStatus { auc: Some(auc), rows: 9, ..WindowStatus::default() };
        let expected =
            QualityStatus { window: status(0.7123), baseline: Some(status(0.6)), has_fallen: true, is_held: true };
        assert_eq!(found.as_deref(), Some(&expected));
    }

    #[test]
    fn the_last_event_is_the_summary_or_the_failure() {
        let saved = CheckpointStatus { name: "full-5".to_owned(), step: 5 };
        let end = |json| end(serde_json::from_str(json).expect("it is read"), Some(&saved));
        let summary = r#"{"event":"summary","test":{"auc":0.79,"logLoss":0.5,"normalizedEntropy":0.9,"calibration":1.0,"samples":9,"unseen":{"user":0.25}},
            "steps":5,"samples":41,"trainedRows":40,"seconds":2.0,"samplesPerSecond":20.0,"rows":7,"storeBytes":1,"skippedRows":0,"bytesOnWire":{},
            "parametersSha256":"ab"}"#;
        match end(summary) {
            Some(CoordinatorView::Complete { summary, last_checkpoint }) => {
                assert_eq!(last_checkpoint.as_ref(), Some(&saved));
                assert_eq!((summary.auc, summary.steps, summary.parameters_sha256.as_str()), (Some(0.79), 5, "ab"));
                assert_eq!(summary.unseen.get("user"), Some(&0.25));
                assert_eq!(summary.samples, 40, "the trained rows of the ledger");
            }
            other => panic!("{other:?}"),
        }
        let failed = end(r#"{"event":"failed","message":"m","userError":true}"#);
        assert_eq!(failed, Some(CoordinatorView::Failed { message: "m".to_owned(), user_error: true }));
        let diverged = end(
            r#"{"event":"failed","message":"m","userError":false,"divergence":{"step":3,"loss":null,"bestLoss":0.7}}"#,
        );
        assert_eq!(diverged, Some(CoordinatorView::Diverged { message: "m".to_owned() }));
        let progress = r#"{"event":"progress","step":1,"totalSteps":null,"samples":1,"samplesPerSecond":1.0,"loss":0.1,"runningAuc":null}"#;
        assert_eq!(end(progress), None);
    }
}

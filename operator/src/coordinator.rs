//! How the operator asks a coordinator how its job stands, and to go on in another training mode
//! (`proto/rectrain/v1/control.proto`). One short connection a question: a coordinator has nothing to hold for the operator, and an
//! answer that does not come is no answer.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::time::Duration;

use futures::future::BoxFuture;
use rectrain_crds::{CheckpointStatus, JobSummary, Mode};
use rectrain_proto::v1;
use rectrain_proto::v1::control_client::ControlClient;
use serde::Deserialize;
use tonic::Code;
use tonic::transport::{Certificate, Channel, ClientTlsConfig, Endpoint, Identity};

use crate::certificates::{JobCertificate, MEMBER_NAME};
use crate::names::Role;
use crate::switch::SwitchAnswer;

/// How long a coordinator has to answer.
const DEADLINE: Duration = Duration::from_secs(3);
/// Within it a coordinator that is there takes a connection.
const CONNECT_DEADLINE: Duration = Duration::from_secs(1);
/// Events that are asked for to find the last one: a job that has trained for months has too many for [`DEADLINE`].
const NEWEST_EVENTS: u32 = 8;

/// What a coordinator says of its job.
#[derive(Clone, Debug, PartialEq)]
pub enum CoordinatorView {
    /// It does not answer, or is not there.
    Silent,
    /// The job is under way.
    Live(Report),
    /// The job is done.
    Complete {
        /// What came of it.
        summary: Box<JobSummary>,
        /// The last checkpoint that it saved, or went on from.
        last_checkpoint: Option<CheckpointStatus>,
    },
    /// The job ended without being done.
    Failed {
        /// One sentence.
        message: String,
        /// Whether the manifest or the data is at fault.
        user_error: bool,
    },
}

/// Where a job under way stands.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Report {
    /// What it does.
    pub stage: Stage,
    /// Its mode, if this version knows it.
    pub mode: Option<Mode>,
    /// Completed global steps.
    pub step: u64,
    /// Steps in all, once known.
    pub total_steps: Option<u64>,
    /// Rows per second.
    pub samples_per_second: f64,
    /// Mean loss of the last report.
    pub loss: f64,
    /// AUC of the last evaluation, or of the training rows.
    pub auc: Option<f64>,
    /// The last checkpoint that exists as a whole, if this attempt has written one.
    pub last_checkpoint: Option<CheckpointStatus>,
    /// The members of each role, if it says so.
    pub members: BTreeMap<Role, Members>,
    /// Members that have not joined yet.
    pub missing: Vec<String>,
    /// Seconds since a step, or a part of an evaluation, was last done, if it says so.
    pub idle_seconds: Option<f64>,
    /// When it was decided to spread its slots anew, in seconds since 1970, of the newest such decision that it has agreed to; 0 before.
    pub slots_decided_seconds: u64,
}

/// The members of a role of a job under way.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Members {
    /// Those that take part.
    pub present: u32,
    /// As many as there are to be.
    pub wanted: u32,
    /// As many processes as are needed until then.
    pub needed: u32,
}

/// What a job under way does.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Stage {
    /// Members are joining.
    #[default]
    Starting,
    /// Steps are being made.
    Training,
    /// The test rows are being predicted.
    Evaluating,
}

/// Where a coordinator is, and what it has to be shown.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Whereabouts {
    /// Its control port.
    pub address: SocketAddr,
    /// The certificate of its job; `None` if it hears anybody.
    pub certificate: Option<JobCertificate>,
}

/// Whoever can ask coordinators.
pub trait AskCoordinator: Send + Sync {
    /// Asks how the job stands.
    fn ask<'a>(&'a self, coordinator: &'a Whereabouts) -> BoxFuture<'a, CoordinatorView>;

    /// Asks to go on in `mode`, for a reason that whoever follows the job is told; it may be empty. To ask for the mode that the job is in
    /// changes nothing.
    fn set_mode<'a>(&'a self, coordinator: &'a Whereabouts, mode: Mode, reason: &'a str)
    -> BoxFuture<'a, SwitchAnswer>;

    /// Asks for so many members of a role, likewise for a reason. Whether it has agreed is in what it says next of how the job stands; `Err` is why it has
    /// not, in a sentence.
    fn scale<'a>(
        &'a self,
        coordinator: &'a Whereabouts,
        role: Role,
        replicas: u32,
        reason: &'a str,
    ) -> BoxFuture<'a, Result<(), String>>;

    /// Asks for a checkpoint at the next boundary, and waits until it exists, however long that takes: its name, or why there is none, in a
    /// sentence.
    fn save<'a>(&'a self, coordinator: &'a Whereabouts) -> BoxFuture<'a, Result<String, String>>;

    /// Asks for slots to be spread anew; as [`Self::scale`].
    fn rebalance<'a>(
        &'a self,
        coordinator: &'a Whereabouts,
        rebalance: Rebalance,
        reason: &'a str,
    ) -> BoxFuture<'a, Result<(), String>>;
}

/// The slots are to be spread anew over the parameter servers that there are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rebalance {
    /// How many that is.
    pub servers: u32,
    /// When it was decided, in seconds since 1970: a coordinator does it once for each.
    pub decided_seconds: u64,
}

/// Asks over gRPC.
#[derive(Clone, Copy, Debug, Default)]
pub struct GrpcCoordinators;

impl AskCoordinator for GrpcCoordinators {
    fn ask<'a>(&'a self, coordinator: &'a Whereabouts) -> BoxFuture<'a, CoordinatorView> {
        let address = coordinator.address;
        Box::pin(async move {
            match tokio::time::timeout(DEADLINE, question(coordinator)).await {
                Ok(Ok(view)) => view,
                Ok(Err(error)) => {
                    tracing::debug!(%address, %error, "the coordinator does not answer");
                    CoordinatorView::Silent
                }
                Err(_) => {
                    tracing::debug!(%address, "the coordinator did not answer within {DEADLINE:?}");
                    CoordinatorView::Silent
                }
            }
        })
    }

    fn set_mode<'a>(
        &'a self,
        coordinator: &'a Whereabouts,
        mode: Mode,
        reason: &'a str,
    ) -> BoxFuture<'a, SwitchAnswer> {
        Box::pin(async move {
            match tokio::time::timeout(DEADLINE, switch(coordinator, mode, reason)).await {
                Ok(Ok(())) => SwitchAnswer::Accepted,
                Ok(Err(error)) => switch_refused(error),
                Err(_) => SwitchAnswer::Again(format!("it did not answer within {DEADLINE:?}")),
            }
        })
    }

    fn scale<'a>(
        &'a self,
        coordinator: &'a Whereabouts,
        role: Role,
        replicas: u32,
        reason: &'a str,
    ) -> BoxFuture<'a, Result<(), String>> {
        let (role, reason) = (proto(role).into(), reason.to_owned());
        Box::pin(ask_for_members(coordinator, v1::ScaleRequest { role, replicas, reason, decided_seconds: None }))
    }

    fn save<'a>(&'a self, coordinator: &'a Whereabouts) -> BoxFuture<'a, Result<String, String>> {
        Box::pin(async move { save(coordinator).await.map_err(|error| error.to_string()) })
    }

    fn rebalance<'a>(
        &'a self,
        coordinator: &'a Whereabouts,
        rebalance: Rebalance,
        reason: &'a str,
    ) -> BoxFuture<'a, Result<(), String>> {
        let request = v1::ScaleRequest {
            role: proto(Role::Ps).into(),
            replicas: rebalance.servers,
            reason: reason.to_owned(),
            decided_seconds: Some(rebalance.decided_seconds),
        };
        Box::pin(ask_for_members(coordinator, request))
    }
}

async fn ask_for_members(coordinator: &Whereabouts, request: v1::ScaleRequest) -> Result<(), String> {
    let asked = async {
        connect(coordinator).await?.scale(request).await?;
        Ok::<_, AskError>(())
    };
    match tokio::time::timeout(DEADLINE, asked).await {
        Ok(answer) => answer.map_err(|error| error.to_string()),
        Err(_) => Err(format!("it did not answer within {DEADLINE:?}")),
    }
}

/// Why a question got no answer.
#[derive(Debug, thiserror::Error)]
enum AskError {
    #[error("cannot connect: {0}")]
    Connect(#[from] tonic::transport::Error),
    #[error("it refused: {0}")]
    Refused(Box<tonic::Status>),
    #[error("its last event cannot be read: {0}")]
    Event(#[from] serde_json::Error),
    #[error("its events end without a last one")]
    NoLastEvent,
}

impl From<tonic::Status> for AskError {
    fn from(status: tonic::Status) -> Self {
        Self::Refused(Box::new(status))
    }
}

async fn connect(coordinator: &Whereabouts) -> Result<ControlClient<Channel>, AskError> {
    let Whereabouts { address, certificate } = coordinator;
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

async fn save(coordinator: &Whereabouts) -> Result<String, AskError> {
    let mut client = connect(coordinator).await?;
    Ok(client.save_checkpoint(v1::SaveCheckpointRequest {}).await?.into_inner().checkpoint)
}

async fn switch(coordinator: &Whereabouts, mode: Mode, reason: &str) -> Result<(), AskError> {
    let mut client = connect(coordinator).await?;
    client.set_mode(v1::SetModeRequest { mode: mode.name().to_owned(), reason: reason.to_owned() }).await?;
    Ok(())
}

/// Only a mode that cannot be is refused for good.
fn switch_refused(error: AskError) -> SwitchAnswer {
    match error {
        AskError::Refused(status) if status.code() == Code::InvalidArgument => {
            SwitchAnswer::Refused(status.message().to_owned())
        }
        other => SwitchAnswer::Again(other.to_string()),
    }
}

async fn question(coordinator: &Whereabouts) -> Result<CoordinatorView, AskError> {
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
        last_checkpoint: last_checkpoint(status),
        members: members(status),
        missing: status.missing.clone(),
        idle_seconds: status.idle_seconds,
        slots_decided_seconds: status.slots_decided_seconds,
    }
}

fn last_checkpoint(status: &v1::JobStatus) -> Option<CheckpointStatus> {
    let (name, step) = (&status.last_checkpoint, status.last_checkpoint_step);
    (!name.is_empty()).then(|| CheckpointStatus { name: name.clone(), step })
}

/// Of each role that it speaks of.
fn members(status: &v1::JobStatus) -> BTreeMap<Role, Members> {
    let role = |of_role: &v1::RoleReplicas| Role::MEMBERS.into_iter().find(|role| proto(*role) == of_role.role());
    let of_role = |told: &v1::RoleReplicas| {
        let &v1::RoleReplicas { present, wanted, needed, .. } = told;
        (present > 0 && wanted > 0 && needed > 0).then_some(Members { present, wanted, needed })
    };
    status.replicas.iter().filter_map(|told| Some((role(told)?, of_role(told)?))).collect()
}

/// As messages name it.
fn proto(role: Role) -> v1::Role {
    match role {
        Role::Coordinator => v1::Role::Coordinator,
        Role::Ps => v1::Role::Ps,
        Role::EmbeddingWorker => v1::Role::EmbeddingWorker,
        Role::DenseWorker => v1::Role::DenseWorker,
        Role::Loader => v1::Role::Loader,
    }
}

/// Events that end a job, as `rectrain run --json` prints them; all others are read past.
#[derive(Debug, Deserialize)]
#[serde(tag = "event", rename_all = "camelCase", rename_all_fields = "camelCase")]
enum LastEvent {
    Summary(Box<Summary>),
    Failed {
        message: String,
        user_error: bool,
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
    #[serde(default)]
    skipped_rows: u64,
    parameters_sha256: String,
}

#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Test {
    auc: Option<f64>,
    gauc: Option<f64>,
    log_loss: Option<f64>,
    normalized_entropy: Option<f64>,
    calibration: Option<f64>,
}

async fn ending(
    client: &mut ControlClient<Channel>,
    last_checkpoint: Option<CheckpointStatus>,
) -> Result<CoordinatorView, AskError> {
    let newest = v1::WatchRequest { newest: NEWEST_EVENTS, ..v1::WatchRequest::default() };
    let mut events = client.watch(newest).await?.into_inner();
    while let Some(event) = events.message().await? {
        if let Some(view) = end(serde_json::from_str(&event.json)?, last_checkpoint.as_ref()) {
            return Ok(view);
        }
    }
    Err(AskError::NoLastEvent)
}

/// The end that an event tells, if it tells one.
fn end(event: LastEvent, last_checkpoint: Option<&CheckpointStatus>) -> Option<CoordinatorView> {
    match event {
        LastEvent::Summary(summary) => Some(CoordinatorView::Complete {
            summary: Box::new(job_summary(*summary)),
            last_checkpoint: last_checkpoint.cloned(),
        }),
        LastEvent::Failed { message, user_error } => Some(CoordinatorView::Failed { message, user_error }),
        LastEvent::Other => None,
    }
}

fn job_summary(summary: Summary) -> JobSummary {
    let test = summary.test.unwrap_or_default();
    JobSummary {
        auc: test.auc,
        gauc: test.gauc,
        log_loss: test.log_loss,
        normalized_entropy: test.normalized_entropy,
        calibration: test.calibration,
        steps: summary.steps,
        samples: summary.trained_rows,
        seconds: summary.seconds,
        samples_per_second: summary.samples_per_second,
        rows: summary.rows,
        skipped_rows: summary.skipped_rows,
        parameters_sha256: summary.parameters_sha256,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_mode_that_cannot_be_is_refused_for_good() {
        let refused = |code| switch_refused(tonic::Status::new(code, "why").into());
        assert_eq!(refused(Code::InvalidArgument), SwitchAnswer::Refused("why".to_owned()));
        for code in [Code::FailedPrecondition, Code::Unavailable, Code::Unimplemented, Code::Cancelled] {
            assert!(matches!(refused(code), SwitchAnswer::Again(_)), "{code}");
        }
    }

    #[test]
    fn the_last_event_is_the_summary_or_the_failure() {
        let saved = CheckpointStatus { name: "full-5".to_owned(), step: 5 };
        let end = |json| end(serde_json::from_str(json).expect("it is read"), Some(&saved));
        let summary = r#"{"event":"summary","test":{"auc":0.79,"logLoss":0.5,"normalizedEntropy":0.9,"calibration":1.0,"samples":9},
            "steps":5,"samples":41,"trainedRows":40,"seconds":2.0,"samplesPerSecond":20.0,"rows":7,"storeBytes":1,"skippedRows":0,"bytesOnWire":{},
            "parametersSha256":"ab"}"#;
        match end(summary) {
            Some(CoordinatorView::Complete { summary, last_checkpoint }) => {
                assert_eq!(last_checkpoint.as_ref(), Some(&saved));
                assert_eq!((summary.auc, summary.steps, summary.parameters_sha256.as_str()), (Some(0.79), 5, "ab"));
                assert_eq!(summary.samples, 40, "those of the ledger");
            }
            other => panic!("{other:?}"),
        }
        let failed = end(r#"{"event":"failed","message":"m","userError":true}"#);
        assert_eq!(failed, Some(CoordinatorView::Failed { message: "m".to_owned(), user_error: true }));
        let progress = r#"{"event":"progress","step":1,"totalSteps":null,"samples":1,"samplesPerSecond":1.0,"loss":0.1,"runningAuc":null}"#;
        assert_eq!(end(progress), None);
    }
}

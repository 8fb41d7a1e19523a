//! The control interface over gRPC (`proto/rectrain/v1/control.proto`). The operator and the
//! command line use it.

use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use futures::{Stream, StreamExt};
use rectrain_proto::v1::control_server::{Control, ControlServer};
use rectrain_proto::{member_role, v1};
use rectrain_wire::tls::Credentials;
use rectrain_wire::{WireCounters, listening_at};
use tokio::net::{TcpListener, TcpStream};
use tokio_rustls::server::TlsStream;
use tonic::{Request, Response, Status};

use super::Coordinator;
use super::refused::{BudgetRefused, ResizeRefused, SwitchRefused};
use rectrain_protocol::error::RoleError;

/// Serves [`Control`] for one coordinator.
pub struct ControlService {
    coordinator: Arc<Coordinator>,
}

impl ControlService {
    /// The service for tonic.
    #[must_use]
    pub fn server(coordinator: Arc<Coordinator>) -> ControlServer<Self> {
        ControlServer::new(Self { coordinator })
    }
}

#[tonic::async_trait]
impl Control for ControlService {
    async fn get_status(&self, _request: Request<v1::StatusRequest>) -> Result<Response<v1::JobStatus>, Status> {
        Ok(Response::new(self.coordinator.status()))
    }

    async fn set_mode(&self, request: Request<v1::SetModeRequest>) -> Result<Response<v1::SetModeReply>, Status> {
        let v1::SetModeRequest { mode, reason } = request.into_inner();
        let requested = self.coordinator.set_mode(&mode, reason);
        self.coordinator.journaled().await;
        match requested {
            Ok(from) => Ok(Response::new(v1::SetModeReply { from: from.to_owned() })),
            Err(SwitchRefused::Mode(reason)) => Err(Status::invalid_argument(reason)),
            Err(SwitchRefused::Now(reason)) => Err(Status::failed_precondition(reason)),
        }
    }

    async fn save_checkpoint(
        &self,
        _request: Request<v1::SaveCheckpointRequest>,
    ) -> Result<Response<v1::SaveCheckpointReply>, Status> {
        let saved = self.coordinator.save_now().await;
        saved
            .map(|checkpoint| Response::new(v1::SaveCheckpointReply { checkpoint }))
            .map_err(|refused| Status::failed_precondition(refused.to_string()))
    }

    async fn scale(&self, request: Request<v1::ScaleRequest>) -> Result<Response<v1::ScaleReply>, Status> {
        let request = request.into_inner();
        let role = member_role(request.role())
            .ok_or_else(|| Status::invalid_argument("the role to scale is missing, or has no members"))?;
        let requested = self.coordinator.scale(role, request.replicas, request.reason, request.decided_seconds);
        self.coordinator.journaled().await;
        match requested {
            Ok(from) => Ok(Response::new(v1::ScaleReply { from })),
            Err(ResizeRefused::Number(reason)) => Err(Status::invalid_argument(reason)),
            Err(ResizeRefused::Now(reason)) => Err(Status::failed_precondition(reason)),
        }
    }

    async fn set_budget(&self, request: Request<v1::SetBudgetRequest>) -> Result<Response<v1::SetBudgetReply>, Status> {
        let requested = self.coordinator.set_budget(request.into_inner().budget.unwrap_or_default());
        self.coordinator.journaled().await;
        match requested {
            Ok(from) => Ok(Response::new(v1::SetBudgetReply { from: Some(from) })),
            Err(refused @ BudgetRefused::Budget(_)) => Err(Status::invalid_argument(refused.to_string())),
            Err(refused @ BudgetRefused::Ended) => Err(Status::failed_precondition(refused.to_string())),
        }
    }

    type WatchStream = Pin<Box<dyn Stream<Item = Result<v1::JobEvent, Status>> + Send>>;

    async fn watch(&self, request: Request<v1::WatchRequest>) -> Result<Response<Self::WatchStream>, Status> {
        let v1::WatchRequest { after, newest } = request.into_inner();
        let log = &self.coordinator.events;
        let events = if newest == 0 { log.follow_after(after) } else { log.follow_newest(after, newest as usize) };
        let stream = futures::stream::unfold(events, |mut events| async move {
            let logged = events.next_logged().await?;
            let json = serde_json::to_string(&logged.event).map_err(|error| Status::internal(error.to_string()));
            Some((json.map(|json| v1::JobEvent { json, number: logged.number }), events))
        });
        Ok(Response::new(Box::pin(stream)))
    }
}

/// Concurrent TLS handshakes. Further connections wait to be accepted.
const HANDSHAKES: usize = 64;
/// Back-off after a failed accept. Most likely the process is out of file descriptors.
const ACCEPT_PAUSE: Duration = Duration::from_millis(50);

/// Admits only clients that have the job's certificate.
#[derive(Clone)]
pub struct Guard {
    /// The job's certificate.
    pub credentials: Credentials,
    /// Counts refused connections.
    pub counters: Arc<WireCounters>,
}

/// Serves the control interface until the returned task is aborted. With a `guard`, it serves only
/// clients that have the job's certificate. Returns the bound address; port 0 takes any free one.
pub async fn serve_control(
    address: SocketAddr,
    coordinator: Arc<Coordinator>,
    guard: Option<Guard>,
) -> Result<(SocketAddr, tokio::task::JoinHandle<()>), RoleError> {
    let cannot = |source| RoleError::System { attempt: format!("serve the control interface on {address}"), source };
    let listener = TcpListener::bind(&listening_at(address)[..]).await.map_err(cannot)?;
    let bound = listener.local_addr().map_err(cannot)?;
    let server = tonic::transport::Server::builder().add_service(ControlService::server(coordinator));
    let serving = tokio::spawn(async move {
        let ended = match guard {
            Some(guard) => server.serve_with_incoming(members(listener, guard)).await,
            None => {
                let incoming = tonic::transport::server::TcpIncoming::from(listener);
                server.serve_with_incoming(incoming).await
            }
        };
        if let Err(error) = ended {
            tracing::error!(%error, "the control interface ended");
        }
    });
    Ok((bound, serving))
}

/// Accepts connections and keeps those that show the job's certificate. Until it is refused, a
/// stranger uses one of the concurrent handshakes and nothing else.
fn members(listener: TcpListener, guard: Guard) -> impl Stream<Item = std::io::Result<TlsStream<TcpStream>>> {
    let accepted = futures::stream::unfold(listener, |listener| async move {
        let accepted = listener.accept().await;
        if accepted.is_err() {
            tokio::time::sleep(ACCEPT_PAUSE).await;
        }
        Some((accepted, listener))
    });
    let shown = accepted.map(move |accepted| {
        let guard = guard.clone();
        async move {
            let (stream, from) = match accepted {
                Ok(accepted) => accepted,
                Err(error) => {
                    tracing::warn!(%error, "could not accept a connection to the control interface");
                    return None;
                }
            };
            match guard.credentials.accept(stream).await {
                Ok(stream) => Some(Ok(stream)),
                Err(stranger) => {
                    guard.counters.refused_stranger(&stranger);
                    tracing::warn!(%from, reason = stranger.reason, "refused a connection to the control interface: {stranger}");
                    None
                }
            }
        }
    });
    shown.buffer_unordered(HANDSHAKES).filter_map(std::future::ready)
}

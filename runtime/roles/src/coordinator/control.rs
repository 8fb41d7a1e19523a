//! The coordinator's public face over gRPC (`proto/rectrain/v1/control.proto`): the operator and the command line follow a job
//! with it.

use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::Arc;

use futures::Stream;
use rectrain_proto::v1;
use rectrain_proto::v1::control_server::{Control, ControlServer};
use tonic::{Request, Response, Status};

use super::Coordinator;
use super::state::ResizeRefused;
use super::training::SwitchRefused;
use crate::error::RoleError;

/// Serves [`Control`] for one coordinator.
pub struct ControlService {
    coordinator: Arc<Coordinator>,
}

impl ControlService {
    /// As a tonic service.
    #[must_use]
    pub fn server(coordinator: Arc<Coordinator>) -> ControlServer<Self> {
        ControlServer::new(Self { coordinator })
    }
}

#[tonic::async_trait]
impl Control for ControlService {
    async fn get_status(&self, _request: Request<v1::StatusRequest>) -> Result<Response<v1::JobStatus>, Status> {
        Ok(Response::new(self.coordinator.lock().status()))
    }

    async fn set_mode(&self, request: Request<v1::SetModeRequest>) -> Result<Response<v1::SetModeReply>, Status> {
        match self.coordinator.set_mode(&request.into_inner().mode) {
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
            .map_err(Status::failed_precondition)
    }

    async fn scale(&self, request: Request<v1::ScaleRequest>) -> Result<Response<v1::ScaleReply>, Status> {
        match self.coordinator.scale(request.into_inner().ps) {
            Ok(from) => Ok(Response::new(v1::ScaleReply { from })),
            Err(ResizeRefused::Number(reason)) => Err(Status::invalid_argument(reason)),
            Err(ResizeRefused::Now(reason)) => Err(Status::failed_precondition(reason)),
        }
    }

    type WatchStream = Pin<Box<dyn Stream<Item = Result<v1::JobEvent, Status>> + Send>>;

    async fn watch(&self, _request: Request<v1::WatchRequest>) -> Result<Response<Self::WatchStream>, Status> {
        let events = self.coordinator.events.follow();
        let stream = futures::stream::unfold(events, |mut events| async move {
            let event = events.next().await?;
            let json = serde_json::to_string(&event).map_err(|error| Status::internal(error.to_string()));
            Some((json.map(|json| v1::JobEvent { json }), events))
        });
        Ok(Response::new(Box::pin(stream)))
    }
}

/// Serves the control interface until the returned task is aborted; gives the address that was bound (port 0 takes any free one).
pub async fn serve_control(
    address: SocketAddr,
    coordinator: Arc<Coordinator>,
) -> Result<(SocketAddr, tokio::task::JoinHandle<()>), RoleError> {
    let cannot = |source| RoleError::System { attempt: format!("serve the control interface on {address}"), source };
    let listener = tokio::net::TcpListener::bind(address).await.map_err(cannot)?;
    let bound = listener.local_addr().map_err(cannot)?;
    let incoming = tonic::transport::server::TcpIncoming::from(listener);
    let server = tonic::transport::Server::builder().add_service(ControlService::server(coordinator));
    let serving = tokio::spawn(async move {
        if let Err(error) = server.serve_with_incoming(incoming).await {
            tracing::error!(%error, "the control interface ended");
        }
    });
    Ok((bound, serving))
}

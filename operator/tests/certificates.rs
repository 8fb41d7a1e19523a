//! The operator's certificates, used as the runtime uses them: peers accept members of the job and
//! the operator, and refuse members of another job.

#![allow(clippy::unwrap_used, reason = "an unwrap in a test is an assertion")]

use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use futures::Stream;
use rectrain_crds::Mode;
use rectrain_operator::certificates::{JobCertificate, MEMBER_NAME, Root};
use rectrain_operator::coordinator_client::{CoordinatorClient, CoordinatorEndpoint, GrpcCoordinatorClient};
use rectrain_operator::coordinator_view::{CoordinatorView, SwitchAnswer};
use rectrain_proto::v1;
use rectrain_proto::v1::control_server::{Control, ControlServer};
use rectrain_wire::tls::{self, Credentials};
use rectrain_wire::{
    Address, BoxFuture, Frame, Peer, Refusal, Service, TcpConfig, TcpTransport, Transport, WireCounters,
};
use tokio::net::TcpListener;
use tonic::{Request, Response, Status};

fn certificate(uid: &str) -> JobCertificate {
    Root::from_bytes([7; 32]).of_job(uid).unwrap()
}

/// The credentials as a pod reads them.
fn credentials(certificate: &JobCertificate) -> Credentials {
    let folder = tempfile::tempdir().unwrap();
    for (file, pem) in [
        (tls::AUTHORITY_FILE, &certificate.authority),
        (tls::CERTIFICATE_FILE, &certificate.certificate),
        (tls::KEY_FILE, &certificate.key),
    ] {
        std::fs::write(folder.path().join(file), pem).unwrap();
    }
    Credentials::read(folder.path()).unwrap()
}

struct Echo;

impl Service for Echo {
    fn call<'a>(&'a self, _peer: &'a Peer, request: Frame) -> BoxFuture<'a, Result<Frame, Refusal>> {
        Box::pin(async move { Ok(request) })
    }
}

fn transport(uid: &str, counters: &Arc<WireCounters>) -> TcpTransport {
    let config = TcpConfig { credentials: Some(credentials(&certificate(uid))), ..TcpConfig::default() };
    TcpTransport::new(config, Arc::clone(counters))
}

#[tokio::test]
async fn members_accept_their_own_job_and_refuse_another_one() {
    assert_eq!(MEMBER_NAME, tls::MEMBER_NAME);
    let counters = WireCounters::unregistered(|_| "any").unwrap();
    let serving = transport("a", &counters).serve(Arc::new(Echo), &Address::tcp("127.0.0.1", 0)).unwrap();
    let call = async |uid: &str| {
        let others = WireCounters::unregistered(|_| "any").unwrap();
        let channel = transport(uid, &others).connect(serving.address()).unwrap();
        channel.call(Frame::new(1, "rows"), Duration::from_secs(2)).await
    };
    call("a").await.unwrap();
    assert!(call("b").await.is_err());
    assert!(counters.refused_connections("certificate") > 0);
}

/// A coordinator whose job is at step 7.
struct AtStep7;

#[tonic::async_trait]
impl Control for AtStep7 {
    async fn get_status(&self, _: Request<v1::StatusRequest>) -> Result<Response<v1::JobStatus>, Status> {
        let phase = v1::Phase::Training.into();
        Ok(Response::new(v1::JobStatus { phase, step: 7, mode: "sync".to_owned(), ..v1::JobStatus::default() }))
    }

    async fn set_mode(&self, _: Request<v1::SetModeRequest>) -> Result<Response<v1::SetModeReply>, Status> {
        Ok(Response::new(v1::SetModeReply { from: "sync".to_owned() }))
    }

    async fn save_checkpoint(
        &self,
        _: Request<v1::SaveCheckpointRequest>,
    ) -> Result<Response<v1::SaveCheckpointReply>, Status> {
        Err(Status::unimplemented("not tested"))
    }

    async fn scale(&self, _: Request<v1::ScaleRequest>) -> Result<Response<v1::ScaleReply>, Status> {
        Err(Status::unimplemented("not tested"))
    }

    async fn set_budget(&self, _: Request<v1::SetBudgetRequest>) -> Result<Response<v1::SetBudgetReply>, Status> {
        Err(Status::unimplemented("not tested"))
    }

    type WatchStream = Pin<Box<dyn Stream<Item = Result<v1::JobEvent, Status>> + Send>>;

    async fn watch(&self, _: Request<v1::WatchRequest>) -> Result<Response<Self::WatchStream>, Status> {
        Err(Status::unimplemented("not tested"))
    }
}

async fn coordinator(uid: &str) -> SocketAddr {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let credentials = credentials(&certificate(uid));
    let members = futures::stream::unfold((listener, credentials), |(listener, credentials)| async move {
        loop {
            let (stream, _) = listener.accept().await.unwrap();
            if let Ok(stream) = credentials.accept(stream).await {
                return Some((Ok::<_, std::io::Error>(stream), (listener, credentials)));
            }
        }
    });
    let server = tonic::transport::Server::builder().add_service(ControlServer::new(AtStep7));
    tokio::spawn(server.serve_with_incoming(members));
    address
}

#[tokio::test]
async fn a_coordinator_accepts_only_the_certificate_of_its_job() {
    let address = coordinator("a").await;
    let of = |certificate| CoordinatorEndpoint { address, certificate };
    for stranger in [of(None), of(Some(certificate("b")))] {
        assert_eq!(GrpcCoordinatorClient.view(&stranger).await, CoordinatorView::Silent, "{stranger:?}");
        assert!(matches!(GrpcCoordinatorClient.set_mode(&stranger, Mode::Gba, "").await, SwitchAnswer::Again(_)));
    }
    let member = of(Some(certificate("a")));
    assert_eq!(GrpcCoordinatorClient.set_mode(&member, Mode::Gba, "").await, SwitchAnswer::Accepted);
    match GrpcCoordinatorClient.view(&member).await {
        CoordinatorView::Live(report) => assert_eq!((report.step, report.mode), (7, Some(Mode::Sync))),
        other => panic!("{other:?}"),
    }
}

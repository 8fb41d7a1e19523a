//! The servers of REST and gRPC: they listen, answer until they are told to end, and then drain.

use std::future::pending;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use axum::serve::ListenerExt;
use futures::StreamExt;
use futures::future::try_join;
use prometheus::Registry;
use rectrain_wire::listening_at;
use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;
use tonic::transport::server::TcpIncoming;

use crate::batcher::{Predict, Running};
use crate::error::InferenceError;
use crate::grpc::Grpc;
use crate::limits::Limits;
use crate::record::{RecordOptions, Recorder};
use crate::rest::{routes, routes_with_tls};
use crate::service::{ServedModel, Service};
use crate::tls::{Client, Protocol, RestListener, Tls, connections};
use crate::updates::Updates;

/// The time beyond the limit of a request within which its response is sent.
const SENDING: Duration = Duration::from_secs(1);

/// A model that is ready to answer requests.
pub struct Server {
    service: Arc<Service>,
    running: Running,
    tls: Option<Arc<Tls>>,
}

/// Listens at an address. Returns the bound one; port 0 takes any free port.
///
/// # Errors
/// [`InferenceError::Listen`] if the address cannot be bound.
pub async fn listen(address: SocketAddr) -> Result<(TcpListener, SocketAddr), InferenceError> {
    let cannot = |source| InferenceError::Listen { address, source };
    let listener = TcpListener::bind(&listening_at(address)[..]).await.map_err(cannot)?;
    let bound = listener.local_addr().map_err(cannot)?;
    Ok((listener, bound))
}

impl Server {
    /// Checks that the model predicts a row of missing values, and starts the thread that predicts.
    ///
    /// # Errors
    /// A model that cannot predict such a row, and [`InferenceError::Io`] if there can be no
    /// thread.
    pub fn new(
        model: ServedModel,
        predictor: impl Predict,
        limits: Limits,
        registry: Registry,
    ) -> Result<Self, InferenceError> {
        let (service, running) = Service::start(model, predictor, limits, registry)?;
        Ok(Self { service, running, tls: None })
    }

    /// Speaks TLS at both ports.
    #[must_use]
    pub fn with_tls(self, tls: Tls) -> Self {
        Self { tls: Some(Arc::new(tls)), ..self }
    }

    /// Records a sample of the requests. Only the first call has an effect.
    ///
    /// # Errors
    /// [`InferenceError::File`] if the file cannot be opened, and [`InferenceError::Io`] if there
    /// can be no thread.
    pub fn record(&self, options: RecordOptions) -> Result<(), InferenceError> {
        let max_line_bytes = self.service.limits.max_body_bytes;
        let recorder = Recorder::start(options, max_line_bytes, self.service.metrics.clone())?;
        let _first_one_stays = self.service.recorder.set(recorder);
        Ok(())
    }

    /// The side that takes newer models.
    #[must_use]
    pub fn updates(&self) -> Updates {
        self.service.updates()
    }

    /// Answers requests until `end` resolves: REST at `listener`, and gRPC at `grpc` if it is
    /// given. Then the server is not ready, and still answers for [`Limits::drain`]. After that it
    /// accepts no connection, and answers the requests in progress.
    ///
    /// # Errors
    /// [`InferenceError::ModelEnded`] if the thread that predicts has ended before.
    pub async fn serve(
        self,
        listener: TcpListener,
        grpc: Option<TcpListener>,
        end: impl Future<Output = ()>,
    ) -> Result<(), InferenceError> {
        let Self { service, running: Running { thread, ended }, tls } = self;
        let stop = CancellationToken::new();
        let rest = serve_rest(Arc::clone(&service), listener, tls.clone(), stop.clone());
        let grpc = serve_grpc(Arc::clone(&service), grpc, tls.clone(), stop.clone());
        let renewing = async {
            match tls {
                Some(tls) => tls.renew(service.metrics.clone()).await,
                None => pending().await,
            }
        };
        tokio::select! {
            served = try_join(rest, grpc) => {
                served?;
            }
            () = drain(&service, end, &stop) => tracing::warn!("connections that did not end were closed"),
            () = renewing => {}
            _closed = ended => return Err(InferenceError::ModelEnded),
        }
        service.close();
        let joined = tokio::task::spawn_blocking(move || thread.join()).await;
        if matches!(joined, Ok(Ok(()))) { Ok(()) } else { Err(InferenceError::ModelEnded) }
    }
}

async fn serve_rest(
    service: Arc<Service>,
    listener: TcpListener,
    tls: Option<Arc<Tls>>,
    stop: CancellationToken,
) -> Result<(), InferenceError> {
    let cannot = |source| InferenceError::Io { action: "serve REST", source };
    let Some(tls) = tls else {
        // Small responses would wait for acknowledgements otherwise.
        let listener = listener.tap_io(|stream| {
            let _kept_as_it_is = stream.set_nodelay(true);
        });
        let serving = axum::serve(listener, routes(service)).with_graceful_shutdown(stop.cancelled_owned());
        return serving.await.map_err(cannot);
    };
    let routes = routes_with_tls(Arc::clone(&service), tls.needs_clients_certificate());
    let listener = RestListener::new(listener, tls, service.metrics.clone()).map_err(cannot)?;
    let routes = routes.into_make_service_with_connect_info::<Client>();
    let serving = axum::serve(listener, routes).with_graceful_shutdown(stop.cancelled_owned());
    serving.await.map_err(cannot)
}

async fn serve_grpc(
    service: Arc<Service>,
    listener: Option<TcpListener>,
    tls: Option<Arc<Tls>>,
    stop: CancellationToken,
) -> Result<(), InferenceError> {
    let Some(listener) = listener else { return Ok(()) };
    let metrics = service.metrics.clone();
    let server = tonic::transport::Server::builder().add_service(Grpc::server(service));
    let served = match tls {
        Some(tls) => {
            let incoming = connections(listener, tls, Protocol::Grpc, metrics);
            let incoming = incoming.map(|(stream, _)| Ok::<_, std::io::Error>(stream));
            server.serve_with_incoming_shutdown(incoming, stop.cancelled()).await
        }
        None => {
            let incoming = TcpIncoming::from(listener).with_nodelay(Some(true));
            server.serve_with_incoming_shutdown(incoming, stop.cancelled()).await
        }
    };
    served.map_err(|error| InferenceError::Io { action: "serve gRPC", source: std::io::Error::other(error) })
}

/// Ends the server in order. Returns only if connections do not end in time.
async fn drain(service: &Service, end: impl Future<Output = ()>, stop: &CancellationToken) {
    end.await;
    service.drain();
    tokio::time::sleep(service.limits.drain).await;
    stop.cancel();
    tokio::time::sleep(service.limits.timeout + SENDING).await;
}

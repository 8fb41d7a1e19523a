//! The server: it listens, answers until it is told to end, and then drains.

use std::net::SocketAddr;
use std::time::Duration;

use futures::future::try_join;
use rectrain_wire::listening_at;
use tokio::net::TcpListener;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;
use tonic::transport::server::TcpIncoming;

use crate::error::RowsServerError;
use crate::follow::{Following, start};
use crate::held::Held;
use crate::http::{Status, routes};
use crate::metrics::Metrics;
use crate::options::Options;
use crate::rows::LookUps;

/// The time after the drain within which look-ups in progress end.
const SENDING: Duration = Duration::from_secs(1);
/// The most requests of a connection at a time.
const STREAMS: u32 = 1024;
/// The time between two signs of life that an idle connection asks for, and the time for one.
const KEEP_ALIVE: Duration = Duration::from_secs(5);

/// A server that listens.
pub struct RowsServer {
    options: Options,
    rows: TcpListener,
    http: TcpListener,
}

impl RowsServer {
    /// Listens for look-ups and for HTTP. Port 0 takes any free port.
    ///
    /// # Errors
    /// [`RowsServerError::Listen`].
    pub async fn listen(options: Options, rows: SocketAddr, http: SocketAddr) -> Result<Self, RowsServerError> {
        Ok(Self { options, rows: listen(rows).await?, http: listen(http).await? })
    }

    /// The bound addresses: of look-ups, and of HTTP.
    ///
    /// # Errors
    /// [`RowsServerError::Io`].
    pub fn addresses(&self) -> Result<[SocketAddr; 2], RowsServerError> {
        let address = |listener: &TcpListener| {
            listener.local_addr().map_err(|source| RowsServerError::Io { action: "find its own address", source })
        };
        Ok([address(&self.rows)?, address(&self.http)?])
    }

    /// Follows the publications and answers until `end` resolves. Then the server is not ready, and
    /// still answers for [`Options::drain`].
    ///
    /// # Errors
    /// A path that cannot be opened; a thread that does not start.
    pub async fn serve(self, end: impl Future<Output = ()>) -> Result<(), RowsServerError> {
        let Self { options, rows, http } = self;
        let metrics = Metrics::new()?;
        let (held, watching) = watch::channel(Held::default());
        let Following { ended, .. } = start(&options, held.clone(), metrics.clone())?;
        let stop = CancellationToken::new();
        let look_ups =
            LookUps::new(options.shard, options.shards, watching.clone(), metrics.clone(), stop.clone()).server();
        let rows = async {
            let incoming = TcpIncoming::from(rows).with_nodelay(Some(true));
            let server = tonic::transport::Server::builder()
                .max_concurrent_streams(STREAMS)
                .http2_keepalive_interval(Some(KEEP_ALIVE))
                .http2_keepalive_timeout(Some(KEEP_ALIVE))
                .add_service(look_ups);
            let served = server.serve_with_incoming_shutdown(incoming, stop.cancelled()).await;
            served.map_err(|error| io("serve look-ups")(std::io::Error::other(error)))
        };
        let http = async {
            let status = Status { held: watching, metrics };
            let serving = axum::serve(http, routes(status)).with_graceful_shutdown(stop.clone().cancelled_owned());
            serving.await.map_err(io("serve HTTP"))
        };
        tokio::select! {
            served = try_join(rows, http) => served.map(drop),
            () = drain(&options, &held, end, &stop) => {
                tracing::warn!("connections that did not end were closed");
                Ok(())
            }
            error = ended => Err(error.map_or(RowsServerError::FollowEnded, RowsServerError::Model)),
        }
    }
}

fn io(action: &'static str) -> impl FnOnce(std::io::Error) -> RowsServerError {
    move |source| RowsServerError::Io { action, source }
}

async fn listen(address: SocketAddr) -> Result<TcpListener, RowsServerError> {
    let bound = TcpListener::bind(&listening_at(address)[..]).await;
    bound.map_err(|source| RowsServerError::Listen { address, source })
}

/// Ends the server in order. Returns only if connections do not end in time.
async fn drain(options: &Options, held: &watch::Sender<Held>, end: impl Future<Output = ()>, stop: &CancellationToken) {
    end.await;
    held.send_modify(|held| held.ending = true);
    tokio::time::sleep(options.drain).await;
    stop.cancel();
    tokio::time::sleep(SENDING).await;
}

//! What a process serves over HTTP: `/metrics`, `/healthz` and `/readyz`, and a coordinator the page of its job as well.

use std::net::SocketAddr;

use axum::Router;
use axum::extract::State;
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use rectrain_wire::listening_at;
use tokio::task::JoinHandle;

use rectrain_coordinator::LivePage;
use rectrain_protocol::error::RoleError;
use rectrain_protocol::metrics::RoleMetrics;
use rectrain_protocol::readiness::Readiness;

/// Serves metrics and whether the process takes part in its job, until dropped or aborted; gives the address that was bound (port 0 takes any
/// free one).
///
/// # Errors
/// If the address cannot be had.
pub async fn serve_metrics(
    address: SocketAddr,
    metrics: RoleMetrics,
    takes_part: Readiness,
) -> Result<(SocketAddr, JoinHandle<()>), RoleError> {
    let (listener, bound) = listen(address).await?;
    Ok((bound, tokio::spawn(serve(listener, routes(metrics, takes_part)))))
}

/// As [`serve_metrics`], and the page.
///
/// # Errors
/// If the address cannot be had.
pub async fn serve_metrics_and_page(
    address: SocketAddr,
    metrics: RoleMetrics,
    takes_part: Readiness,
    page: LivePage,
) -> Result<(SocketAddr, JoinHandle<()>), RoleError> {
    let (listener, bound) = listen(address).await?;
    let router = routes(metrics, takes_part).merge(page.router());
    let serving = tokio::spawn(async move {
        tokio::select! {
            () = serve(listener, router) => {}
            () = page.follow() => {}
        }
    });
    Ok((bound, serving))
}

async fn listen(address: SocketAddr) -> Result<(tokio::net::TcpListener, SocketAddr), RoleError> {
    let cannot = |source| RoleError::System { attempt: format!("serve metrics on {address}"), source };
    let listener = tokio::net::TcpListener::bind(&listening_at(address)[..]).await.map_err(cannot)?;
    let bound = listener.local_addr().map_err(cannot)?;
    Ok((listener, bound))
}

fn routes(metrics: RoleMetrics, takes_part: Readiness) -> Router {
    let ready = move || {
        let has_begun = takes_part.has_begun();
        async move {
            if has_begun {
                (StatusCode::OK, "ok\n")
            } else {
                (StatusCode::SERVICE_UNAVAILABLE, "this process does not take part in its job yet\n")
            }
        }
    };
    Router::new()
        .route("/metrics", get(encode))
        .route("/healthz", get(|| async { "ok\n" }))
        .route("/readyz", get(ready))
        .with_state(metrics)
}

async fn serve(listener: tokio::net::TcpListener, router: Router) {
    if let Err(error) = axum::serve(listener, router).await {
        tracing::error!(%error, "the metrics server ended");
    }
}

async fn encode(State(metrics): State<RoleMetrics>) -> Response {
    match metrics.encode() {
        Ok(text) => ([(header::CONTENT_TYPE, prometheus::TEXT_FORMAT)], text).into_response(),
        Err(error) => (StatusCode::INTERNAL_SERVER_ERROR, error.to_string()).into_response(),
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "an unwrap in a test is an assertion")]
mod tests {
    use prometheus::Registry;
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    use tokio::net::TcpStream;

    use super::*;

    async fn status(address: SocketAddr, page: &str) -> String {
        let mut stream = TcpStream::connect(address).await.unwrap();
        let request = format!("GET {page} HTTP/1.1\r\nHost: test\r\nConnection: close\r\n\r\n");
        stream.write_all(request.as_bytes()).await.unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).await.unwrap();
        answer.split(' ').nth(1).unwrap().to_owned()
    }

    #[tokio::test]
    async fn a_process_is_healthy_from_the_first_and_ready_when_it_takes_part() {
        let (metrics, takes_part) = (RoleMetrics::new(Registry::new()).unwrap(), Readiness::default());
        let (address, _serving) =
            serve_metrics("127.0.0.1:0".parse().unwrap(), metrics, takes_part.clone()).await.unwrap();
        assert_eq!([status(address, "/healthz").await, status(address, "/readyz").await], ["200", "503"]);
        takes_part.begin();
        assert_eq!([status(address, "/readyz").await, status(address, "/metrics").await], ["200", "200"]);
    }
}

//! The HTTP server of a process: `/metrics`, `/healthz` and `/readyz`, and in a coordinator the
//! live page of its job.

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

/// Serves metrics and readiness until the returned task is aborted. Returns the bound address; port
/// 0 takes any free one.
///
/// # Errors
/// [`RoleError::System`] if the address cannot be bound.
pub async fn serve_metrics(
    address: SocketAddr,
    metrics: RoleMetrics,
    readiness: Readiness,
) -> Result<(SocketAddr, JoinHandle<()>), RoleError> {
    let (listener, bound) = listen(address).await?;
    Ok((bound, tokio::spawn(serve(listener, routes(metrics, readiness)))))
}

/// As [`serve_metrics`], with the live page.
///
/// # Errors
/// [`RoleError::System`] if the address cannot be bound.
pub async fn serve_metrics_and_page(
    address: SocketAddr,
    metrics: RoleMetrics,
    readiness: Readiness,
    page: LivePage,
) -> Result<(SocketAddr, JoinHandle<()>), RoleError> {
    let (listener, bound) = listen(address).await?;
    page.observe(metrics.registry());
    let router = routes(metrics, readiness).merge(page.router());
    let serving = tokio::spawn(async move {
        tokio::select! {
            () = serve(listener, router) => {}
            () = page.follow() => {}
        }
    });
    Ok((bound, serving))
}

/// Serves a page alone, until the returned task is aborted. Returns the bound address; port 0 takes
/// any free one.
///
/// # Errors
/// [`RoleError::System`] if the address cannot be bound.
pub async fn serve_page(address: SocketAddr, page: Router) -> Result<(SocketAddr, JoinHandle<()>), RoleError> {
    let (listener, bound) = listen(address).await?;
    Ok((bound, tokio::spawn(serve(listener, page))))
}

async fn listen(address: SocketAddr) -> Result<(tokio::net::TcpListener, SocketAddr), RoleError> {
    let cannot = |source| RoleError::System { attempt: format!("serve HTTP on {address}"), source };
    let listener = tokio::net::TcpListener::bind(&listening_at(address)[..]).await.map_err(cannot)?;
    let bound = listener.local_addr().map_err(cannot)?;
    Ok((listener, bound))
}

fn routes(metrics: RoleMetrics, readiness: Readiness) -> Router {
    let ready = move || {
        let is_ready = readiness.is_ready();
        async move {
            if is_ready {
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
        answer(address, page).await.split(' ').nth(1).unwrap().to_owned()
    }

    async fn answer(address: SocketAddr, page: &str) -> String {
        let mut stream = TcpStream::connect(address).await.unwrap();
        let request = format!("GET {page} HTTP/1.1\r\nHost: test\r\nConnection: close\r\n\r\n");
        stream.write_all(request.as_bytes()).await.unwrap();
        let mut answer = String::new();
        stream.read_to_string(&mut answer).await.unwrap();
        answer
    }

    #[tokio::test]
    async fn a_process_is_healthy_from_the_first_and_ready_when_it_takes_part() {
        let (metrics, readiness) = (RoleMetrics::new(Registry::new()).unwrap(), Readiness::default());
        let (address, _serving) =
            serve_metrics("127.0.0.1:0".parse().unwrap(), metrics, readiness.clone()).await.unwrap();
        assert_eq!([status(address, "/healthz").await, status(address, "/readyz").await], ["200", "503"]);
        readiness.set_ready();
        assert_eq!([status(address, "/readyz").await, status(address, "/metrics").await], ["200", "200"]);
    }

    #[tokio::test]
    async fn a_forwarded_page_asks_the_other_side_for_the_job() {
        let ask = |query: String| async move {
            if query == "after=7&points=9" {
                Ok(format!("{{\"asked\":\"{query}\"}}"))
            } else {
                Err(format!("no {query}"))
            }
        };
        let page = rectrain_coordinator::forwarded_page(ask);
        let (address, _serving) = serve_page("127.0.0.1:0".parse().unwrap(), page).await.unwrap();
        assert!(answer(address, "/").await.contains("<h1 id=\"name\">"));
        let job = answer(address, "/job.json?after=7&points=9&other=%2F..").await;
        assert!(job.ends_with("{\"asked\":\"after=7&points=9\"}") && job.contains("application/json"), "{job}");
        let refused = answer(address, "/job.json?after=x").await;
        assert!(refused.starts_with("HTTP/1.1 502") && refused.ends_with("no after=0&points=0"), "{refused}");
    }
}

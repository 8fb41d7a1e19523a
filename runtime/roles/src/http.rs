//! `/metrics` and `/healthz` of a process.

use std::net::SocketAddr;

use axum::Router;
use axum::extract::State;
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::get;

use crate::error::RoleError;
use crate::metrics::RoleMetrics;

/// Serves until dropped or aborted; gives the address that was bound (port 0 takes any free one).
pub async fn serve_metrics(
    address: SocketAddr,
    metrics: RoleMetrics,
) -> Result<(SocketAddr, tokio::task::JoinHandle<()>), RoleError> {
    let cannot = |source| RoleError::System { attempt: format!("serve metrics on {address}"), source };
    let listener = tokio::net::TcpListener::bind(address).await.map_err(cannot)?;
    let bound = listener.local_addr().map_err(cannot)?;
    let router =
        Router::new().route("/metrics", get(encode)).route("/healthz", get(|| async { "ok\n" })).with_state(metrics);
    let serving = tokio::spawn(async move {
        if let Err(error) = axum::serve(listener, router).await {
            tracing::error!(%error, "the metrics server ended");
        }
    });
    Ok((bound, serving))
}

async fn encode(State(metrics): State<RoleMetrics>) -> Response {
    match metrics.encode() {
        Ok(text) => ([(header::CONTENT_TYPE, prometheus::TEXT_FORMAT)], text).into_response(),
        Err(error) => (StatusCode::INTERNAL_SERVER_ERROR, error.to_string()).into_response(),
    }
}
